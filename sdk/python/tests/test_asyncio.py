"""The same for coroutines."""

from __future__ import annotations

import asyncio
import errno
import socket
import unittest
from collections.abc import Coroutine
from typing import Any, TypeVar

import margay

from .fake import BIND, NAME, PEER, RESOLVE, FakeAgent

T = TypeVar("T")


class Asyncio(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.fake = FakeAgent()
        self.addCleanup(self.fake.close)
        self.agent = self.fake.agent()
        self.seen: asyncio.Queue[margay.ServiceId | None] = asyncio.Queue()

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.seen.put_nowait(await margay.peer_service(writer, agent=self.agent))
            writer.write(await reader.read())
        finally:
            writer.close()

    async def cancelled_while_asking(self, kind: int, call: Coroutine[Any, Any, T]) -> None:
        """Cancels `call` while the agent is silent about a kind of request."""
        asked, answered = self.fake.asked.count(kind), self.fake.answered.count(kind)
        self.fake.silence(kind)
        task = asyncio.create_task(call)
        await asyncio.to_thread(self.fake.wait_asked, kind, asked + 1)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.fake.speak()
        # The thread asks to the end.
        await asyncio.to_thread(self.fake.wait_answered, kind, answered + 1)

    async def test_streams_go_by_name(self) -> None:
        async with await margay.start_server(self.echo, "web.shop", agent=self.agent):
            for source in (None, margay.OWN, "cli.shop"):
                reader, writer = await margay.open_connection("web.shop", source=source, agent=self.agent)
                writer.write(b"hello")
                writer.write_eof()
                self.assertEqual(await reader.read(), b"hello")
                self.assertIsNotNone(await margay.peer_service(writer, agent=self.agent))
                writer.close()
                await writer.wait_closed()
        seen = [self.seen.get_nowait() for _ in range(3)]
        self.assertEqual(seen[2], margay.name("cli.shop", agent=self.agent).id)
        self.assertEqual(len(set(seen)), 3)
        with self.assertRaises(ConnectionRefusedError):
            await margay.open_connection("web.shop", agent=self.agent)

    async def test_who_comes_past_margay_is_turned_away(self) -> None:
        async with await margay.start_server(self.echo, "web.shop", agent=self.agent) as server:
            port = server.sockets[0].getsockname()[1]
            with socket.socket() as past, socket.socket(type=socket.SOCK_DGRAM) as sender:
                past.bind(("127.0.0.1", 0))
                sender.bind(("127.0.0.1", 0))
                self.fake.past |= {past.getsockname()[1], sender.getsockname()[1]}
                past.connect(("127.0.0.1", port))
                reader, writer = await asyncio.open_connection(sock=past)
                self.assertEqual(await reader.read(), b"")
                writer.close()
                async with await margay.open_datagrams("dns.shop", agent=self.agent) as served:
                    sender.sendto(b"past", ("127.0.0.1", served.socket.getsockname()[1]))
                    await served.sendto(b"by name", "dns.shop")
                    self.assertEqual((await served.recvfrom())[0], b"by name")
        self.assertTrue(self.seen.empty())

    async def test_many_connections_at_once(self) -> None:
        async def call() -> bytes:
            reader, writer = await margay.open_connection("web.shop", source=margay.OWN, agent=self.agent)
            writer.write(b"hello")
            writer.write_eof()
            try:
                return await reader.read()
            finally:
                writer.close()

        async with await margay.start_server(self.echo, "web.shop", agent=self.agent):
            self.assertEqual(await asyncio.gather(*[call() for _ in range(64)]), [b"hello"] * 64)
        self.assertEqual(len({self.seen.get_nowait() for _ in range(64)}), 64)

    async def test_a_host_without_ipv6_uses_the_other_address(self) -> None:
        self.fake.v6 = "ff02::1"
        async with await margay.start_server(self.echo, "web.shop", agent=self.agent):
            reader, writer = await margay.open_connection("web.shop", agent=self.agent)
            self.assertEqual(writer.get_extra_info("peername")[0], "::ffff:127.0.0.1")
            writer.write_eof()
            self.assertEqual(await reader.read(), b"")
            writer.close()

    async def test_refusals_come_with_the_reason(self) -> None:
        self.fake.refused[BIND] = errno.EACCES, "web.shop is not yours"
        for call in (
            margay.start_server(self.echo, "web.shop", agent=self.agent),
            margay.open_datagrams("web.shop", agent=self.agent),
        ):
            with self.assertRaisesRegex(PermissionError, "web.shop is not yours"):
                await call
        self.fake.kill()
        with self.assertRaises(margay.AgentDown):
            await margay.open_connection("other.shop", agent=self.agent)

    async def test_datagrams_go_by_name(self) -> None:
        async with (
            await margay.open_datagrams("dns.shop", agent=self.agent) as server,
            await margay.open_datagrams(source=margay.OWN, agent=self.agent) as client,
        ):
            for text in (b"one", b"two"):
                await client.sendto(text, "dns.shop")
                data, peer = await server.recvfrom()
                assert peer.service is not None
                self.assertEqual((data, peer.service.raw[-2:]), (text, client.socket.getsockname()[1].to_bytes(2)))
                await server.sendto(data.upper(), peer)
                data, peer = await client.recvfrom()
                self.assertEqual((data, peer.service), (text.upper(), self.agent.name("dns.shop").id))
        self.assertEqual((self.fake.asked.count(RESOLVE), self.fake.asked.count(PEER)), (1, 1))

    async def test_endpoints_go_by_name(self) -> None:
        received: asyncio.Queue[bytes] = asyncio.Queue()

        class Shout(asyncio.DatagramProtocol):
            def connection_made(self, transport: Any) -> None:
                self.transport = transport

            def datagram_received(self, data: bytes, addr: Any) -> None:
                self.transport.sendto(data.upper(), addr)

        class Hear(asyncio.DatagramProtocol):
            def datagram_received(self, data: bytes, addr: Any) -> None:
                received.put_nowait(data)

        server, _ = await margay.create_datagram_endpoint(Shout, "dns.shop", agent=self.agent)
        client, _ = await margay.create_datagram_endpoint(Hear, remote="dns.shop", source=margay.OWN, agent=self.agent)
        client.sendto(b"hello")
        self.assertEqual(await received.get(), b"HELLO")
        server.close()
        client.close()
        with self.assertRaises(ValueError):
            await margay.create_datagram_endpoint(Hear, "a.shop", remote="b.shop", agent=self.agent)

    async def test_what_is_cancelled_leaves_nothing_behind(self) -> None:
        # Each is cancelled in the middle of a question; the answer must not be taken for that of the next one.
        await self.cancelled_while_asking(NAME, margay.open_connection("a.shop", agent=self.agent))
        # Another name: the thread that was left behind goes on to resolve the first.
        await self.cancelled_while_asking(RESOLVE, margay.open_connection("b.shop", agent=self.agent))
        await self.cancelled_while_asking(BIND, margay.start_server(self.echo, "web.shop", agent=self.agent))
        async with await margay.start_server(self.echo, "web.shop", agent=self.agent):
            reader, writer = await margay.open_connection("web.shop", agent=self.agent)
            writer.write_eof()
            self.assertEqual(await reader.read(), b"")
            writer.close()

    async def test_a_cancelled_receive_loses_no_datagram(self) -> None:
        async with (
            await margay.open_datagrams("dns.shop", agent=self.agent) as server,
            await margay.open_datagrams(agent=self.agent) as client,
        ):
            await client.sendto(b"kept", "dns.shop")
            await self.cancelled_while_asking(PEER, server.recvfrom())
            self.assertEqual((await server.recvfrom())[0], b"kept")

    async def test_events_come_as_they_happen(self) -> None:
        async with margay.events(self.agent) as events:
            self.fake.event('{"kind":"opened","name":"web.shop"}')
            async for event in events:
                self.assertEqual((event.kind, event.name), ("opened", "web.shop"))
                break
            begun = asyncio.Event()

            async def wait_for_one() -> margay.Event:
                begun.set()
                return await anext(events)

            waiting = asyncio.ensure_future(wait_for_one())
            await begun.wait()
            waiting.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await waiting
            self.fake.event('{"kind":"closed"}')
            self.assertEqual((await anext(events)).kind, "closed")
            self.fake.kill()
            with self.assertRaises(margay.AgentDown):
                await anext(events)
            self.fake.listen()
            next_one = asyncio.ensure_future(anext(events))
            # The subscription is the first thing that the new agent hears.
            await asyncio.to_thread(self.fake.wait_asked, 6, 2)
            self.fake.event('{"kind":"opened"}')
            self.assertEqual((await next_one).kind, "opened")
