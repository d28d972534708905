"""Sockets that go from one process to another; here, mostly, from one thread to another."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import unittest
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from unittest import mock

import margay
from margay import Prefix, ServiceId

from .fake import BIND, EVENT, GIVE, HAND_OVER, HANDED, TAKE_OVER, FakeAgent, reply
from .test_sockets import Case

MEBIBYTE = 1048576


class HandOver(Case):
    def setUp(self) -> None:
        # It ends last: what the agent's end ends is waited for.
        self.threads = self.enterContext(ThreadPoolExecutor(16))
        super().setUp()
        self.shop = self.agent.name("web.shop").id
        self.listener = self.listen("web.shop")

    def accept(self) -> tuple[margay.Socket, margay.Socket]:
        """A client, and the server's end of its connection."""
        client = self.connect("web.shop")
        return client, self.enterContext(self.listener.accept()[0])

    def take_over(self, name: margay.Target = "web.shop") -> margay.Takeover:
        return self.enterContext(margay.take_over(name, agent=self.agent))

    def give(self, sock: socket.socket, name: margay.Target | None = "web.shop", data: bytes = b"") -> Future[None]:
        return self.threads.submit(margay.hand_over, sock, name, data, agent=self.agent)

    def take(self, takeover: margay.Takeover) -> margay.Taken:
        takeover.open()
        self.wait_for(takeover)
        taken = next(takeover)
        self.addCleanup(taken.socket.close)
        return taken

    def wait_for(self, file: int | margay.Takeover) -> None:
        self.assertTrue(select.select([file], [], [], 20)[0], "nothing comes")

    def refused(self, number: int, call: Callable[[], object]) -> str:
        with self.assertRaises(margay.Refused) as raised:
            call()
        self.assertEqual(raised.exception.errno, number)
        return str(raised.exception)

    def lost(self, client: margay.Socket, served: margay.Socket) -> None:
        """The giver could not say who has its socket, and has closed it: so did the agent."""
        with self.assertRaises(margay.AgentDown) as raised:
            margay.hand_over(served, "web.shop", agent=self.agent)
        self.assertEqual(raised.exception.errno, errno.ECONNABORTED)
        self.assertIn("closed here", str(raised.exception))
        self.assertEqual(served.fileno(), -1)
        self.assertEqual(client.recv(1), b"")

    def still_works(self, client: margay.Socket, served: margay.Socket) -> None:
        client.sendall(b"ping")
        self.wait_for(served.fileno())
        self.assertEqual(served.recv(100), b"ping")
        served.sendall(b"pong")
        self.assertEqual(client.recv(100), b"pong")

    def test_a_connection_goes_with_its_data(self) -> None:
        client, served = self.accept()
        takeover = self.take_over()
        client.sendall(b"readunread")
        self.assertEqual(served.recv(4), b"read")
        # What it has made does not keep the descriptor open.
        file = self.enterContext(served.makefile("rb"))
        giving = self.give(served, "web.shop", b"\0what it knows\xff")
        taken = self.take(takeover)
        giving.result()
        self.assertEqual((taken.data, taken.name), (b"\0what it knows\xff", Prefix(self.shop)))
        self.assertFalse(taken.is_listening)
        self.assertIsInstance(taken.socket, margay.Socket)
        self.assertFalse(taken.socket.get_inheritable())
        self.assertIsNotNone(taken.socket.peer_service())
        self.assertEqual(served.fileno(), -1)
        with self.assertRaises(OSError):
            file.read(1)
        self.assertEqual(taken.socket.recv(100), b"unread")
        self.still_works(client, taken.socket)
        taken.socket.close()
        self.assertEqual(client.recv(1), b"", "nobody else has it")
        self.assertEqual(self.fake.files, ["/memfd:margay-hand-over (deleted)"])

    def test_the_messages_are_of_the_format(self) -> None:
        _, served = self.accept()
        takeover = self.take_over()
        giving = self.give(served)
        self.take(takeover)
        giving.result()
        self.fake.wait_answered(HANDED, 1)
        take_over, hand_over, handed = self.fake.messages[-3:]
        self.assertEqual(take_over, b"\x01\x0a\0\0\0\0\x01\x00" + self.shop.raw + bytes(16))
        self.assertEqual(hand_over, b"\x01\x09\x06\0\0\0\x01\x00" + self.shop.raw + bytes(16))
        self.assertEqual(handed, b"\x01\x0b" + bytes(54))
        self.assertEqual(self.fake.files, [], "there was nothing to say")

    def test_a_listening_socket_is_served_by_the_other_one(self) -> None:
        takeover = self.take_over()
        self.listener.setblocking(False)
        # It waits in the queue of the socket.
        client = self.connect("web.shop", "cli.shop")
        giving = self.give(self.listener)
        taken = self.take(takeover)
        giving.result()
        with taken.socket as listener:
            self.assertTrue(taken.is_listening)
            self.assertEqual((taken.data, listener.gettimeout()), (b"", None))
            self.assertTrue(os.get_blocking(listener.fileno()), "the mode was the giver's")
            served, peer = listener.accept()
            with served:
                self.assertEqual(peer.service, self.agent.name("cli.shop").id)
                self.still_works(client, served)
            with socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 20) as past:
                self.fake.past.add(past.getsockname()[1])
                self.connect("web.shop", "cli.shop")
                served, peer = listener.accept()
                served.close()
                self.assertEqual(peer.service, self.agent.name("cli.shop").id)
                self.assertEqual(past.recv(1), b"")
        self.assertEqual(self.listener.fileno(), -1)

    def test_a_prefix_takes_all_names_under_it_and_a_flow_says_its_own(self) -> None:
        self.listen("sid:aabb/16")
        takeover = self.take_over("sid:aabb/16")
        for name, said in (
            ("sid:aabbcc", b"\xaa\xbb\xcc"),
            (None, b"\xaa\xbb\xdd"),
            ("sid:aabbcc/24", b"\xaa\xbb\xcc"),
        ):
            client, served = self.accept()
            self.fake.served[client.getsockname()[1]] = said.ljust(32, b"\0")
            giving = self.give(served, name, b"x" * MEBIBYTE)
            taken = self.take(takeover)
            giving.result()
            bits = 24 if name == "sid:aabbcc/24" else 256
            self.assertEqual(taken.name, Prefix(ServiceId(said.ljust(32, b"\0")), bits))
            self.assertEqual(taken.data, b"x" * MEBIBYTE)
            if name is None:
                self.assertIn(b"\x01\x09\x06" + bytes(53), self.fake.messages)
        for other in ("sid:aabc", "sid:aa/8"):
            self.refused(errno.ESRCH, self.give(self.listener, other).result)

    def test_the_agent_of_the_socket_is_asked(self) -> None:
        client, served = self.accept()
        takeover = self.take_over()
        giving = self.threads.submit(margay.hand_over, served, "web.shop")
        taken = self.take(takeover)
        giving.result()
        self.assertIs(taken.socket.agent, self.agent)
        self.still_works(client, taken.socket)

    def test_many_go_at_once(self) -> None:
        takeover = self.take_over()
        pairs = [self.accept() for _ in range(32)]
        giving = [self.give(served, data=b"%d" % at) for at, (_, served) in enumerate(pairs)]
        left = set(range(len(pairs)))
        while left:
            taken = self.take(takeover)
            left.remove(int(taken.data))
            self.assertEqual(taken.socket.getpeername(), pairs[int(taken.data)][0].getsockname())
        for future in giving:
            future.result()

    def test_what_is_refused_stays_the_givers(self) -> None:
        client, served = self.accept()
        why = self.refused(errno.ESRCH, lambda: margay.hand_over(served, "web.shop", agent=self.agent))
        self.assertIn("no other process of this user", why)
        self.still_works(client, served)
        self.refused(errno.ENOTCONN, lambda: margay.hand_over(served, agent=self.agent))
        self.refused(errno.ENOTCONN, lambda: margay.hand_over(self.listener, agent=self.agent))
        with self.datagrams() as datagrams:
            self.refused(errno.EPROTONOSUPPORT, lambda: margay.hand_over(datagrams, "web.shop", agent=self.agent))
        # As an agent answers that does not know the request.
        self.fake.refused[HAND_OVER] = errno.EBADMSG, "this is no request"
        self.refused(errno.EBADMSG, lambda: margay.hand_over(served, "web.shop", agent=self.agent))
        self.fake.full = "the agent has 1024 connections of programs; close some"
        for _ in range(20):
            self.refused(errno.EUSERS, lambda: margay.hand_over(served, self.shop, agent=self.agent))
        self.still_works(client, served)

    def test_who_may_not_take_over_is_told_so(self) -> None:
        self.fake.refused[TAKE_OVER] = errno.EACCES, "web.shop is not yours"
        with self.assertRaisesRegex(PermissionError, "web.shop is not yours"):
            margay.take_over("web.shop", agent=self.agent)
        self.fake.refused[TAKE_OVER] = errno.EUSERS, "64 processes take over"
        takeover = margay.Takeover("web.shop", self.agent)
        self.assertEqual(takeover.fileno(), -1)
        self.refused(errno.EUSERS, lambda: next(takeover))

    def test_what_cannot_be_given_is_not_asked_for(self) -> None:
        client, served = self.accept()
        for name, data in (("web.shop", bytes(MEBIBYTE + 1)), (Prefix(self.shop, 0), b"")):
            with self.assertRaises(ValueError):
                margay.hand_over(served, name, data, agent=self.agent)
        self.still_works(client, served)
        served.close()
        with self.assertRaises(OSError) as raised:
            margay.hand_over(served, "web.shop", agent=self.agent)
        self.assertEqual(raised.exception.errno, errno.EBADF)
        self.assertNotIn(HAND_OVER, self.fake.asked)

    def test_an_absent_agent_has_taken_nothing(self) -> None:
        client, served = self.accept()
        self.fake.kill()
        with self.assertRaises(margay.AgentDown) as raised:
            margay.hand_over(served, "web.shop", agent=self.agent)
        self.assertEqual(raised.exception.errno, errno.ECONNREFUSED)
        self.still_works(client, served)
        # The next one is asked at once, though connections to the first are open.
        self.fake.listen()
        takeover = self.take_over()
        giving = self.give(served)
        taken = self.take(takeover)
        giving.result()
        self.still_works(client, taken.socket)
        self.assertEqual(self.fake.asked.count(HAND_OVER), 1)

    def test_what_nobody_answers_for_is_closed_and_not_asked_again(self) -> None:
        self.fake.hangs_up_after.add(HAND_OVER)
        self.lost(*self.accept())
        self.assertEqual(self.fake.asked.count(HAND_OVER), 1)

    def test_an_agent_that_dies_in_the_middle_leaves_nobody_with_the_socket(self) -> None:
        client, served = self.accept()
        self.fake.silence(HAND_OVER)
        losing = self.threads.submit(self.lost, client, served)
        self.fake.wait_asked(HAND_OVER, 1)
        self.fake.kill()
        losing.result()

    def test_a_mute_agent_is_not_waited_for(self) -> None:
        client, served = self.accept()
        self.fake.silence(HAND_OVER)
        self.addCleanup(setattr, margay._agent, "GIVE_TIME", margay._agent.GIVE_TIME)
        margay._agent.GIVE_TIME = 1
        with self.assertRaises(margay.AgentDown) as raised:
            margay.hand_over(served, "web.shop", agent=self.agent)
        self.assertEqual((raised.exception.errno, served.fileno()), (errno.ECONNABORTED, -1))
        self.fake.kill()
        self.assertEqual(client.recv(1), b"")

    def test_a_host_is_said_to_the_agent(self) -> None:
        _, served = self.accept()
        takeover = self.take_over()
        giving = self.threads.submit(margay.hand_over, served, "web.shop", to="host2", agent=self.agent)
        self.take(takeover)
        giving.result()
        self.assertIn(b"\x01\x09\x06\0\0\0\x01\x00" + self.shop.raw + bytes(16) + b"host2", self.fake.messages)

    def test_an_answer_that_is_none_is_not_believed(self) -> None:
        for garbage in (b"\1\2\3", reply(BIND), reply(HAND_OVER) + b"\xff"):
            self.fake.garbage = None
            client, served = self.accept()
            self.fake.garbage = garbage
            with self.assertRaises(margay.Incompatible):
                margay.hand_over(served, self.shop, agent=self.agent)
            self.assertEqual(served.fileno(), -1)
            self.assertEqual(client.recv(1), b"")

    def test_who_is_late_has_nothing(self) -> None:
        client, served = self.accept()
        takeover = self.take_over()
        served.settimeout(20)
        self.fake.taking_time = 0
        self.refused(errno.ETIMEDOUT, lambda: margay.hand_over(served, "web.shop", b"x", agent=self.agent))
        with self.assertRaisesRegex(margay.AgentDown, "its giver's again"):
            next(takeover)
        self.assertEqual(takeover.fileno(), -1)
        self.assertFalse(os.get_blocking(served.fileno()), "its mode is not the taker's")
        self.still_works(client, served)
        # It takes over again.
        self.fake.wait_takers(0)
        self.fake.taking_time = 60
        taking = self.threads.submit(self.take, takeover)
        self.fake.wait_takers(1)
        giving = self.give(served, data=b"again")
        self.assertEqual(taking.result().data, b"again")
        giving.result()
        self.still_works(client, taking.result().socket)
        taking.result().socket.close()
        self.assertEqual(client.recv(1), b"", "the one that was late has no descriptor of it")

    def test_who_ends_takes_nothing(self) -> None:
        client, served = self.accept()
        takeover = self.take_over()
        self.assertEqual(select.select([takeover], [], [], 0)[0], [])
        giving = self.give(served)
        self.wait_for(takeover)
        other = self.take_over()
        takeover.close()
        self.assertEqual(takeover.fileno(), -1)
        self.refused(errno.ETIMEDOUT, giving.result)
        self.still_works(client, served)
        self.fake.wait_takers(1)
        giving = self.give(served)
        taken = self.take(other)
        giving.result()
        self.still_works(client, taken.socket)

    def test_the_agents_end_is_told_once(self) -> None:
        takeover = self.take_over()
        self.fake.kill()
        for _ in range(2):
            with self.assertRaises(margay.AgentDown):
                next(takeover)
        self.fake.listen()
        takeover.open()
        client, served = self.accept()
        giving = self.give(served)
        taken = self.take(takeover)
        giving.result()
        self.still_works(client, taken.socket)

    def test_surplus_descriptors_are_closed_and_surplus_data_is_not_read(self) -> None:
        _, served = self.accept()
        takeover = self.take_over()
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        with open(os.memfd_create("long"), "wb") as file:
            file.write(b"x" * (MEBIBYTE + 1))
            file.flush()
            # Of some more than the taker has room for, the kernel closes the rest.
            self.fake.hand(reply(HANDED, id=self.shop.raw, bits=256), [served.fileno(), file.fileno(), *[writing] * 20])
        os.close(writing)
        taken = self.take(takeover)
        self.assertEqual(taken.data, b"x" * MEBIBYTE)
        self.wait_for(reading)
        self.assertEqual(os.read(reading, 1), b"")

    def test_who_gives_is_told_what_and_where(self) -> None:
        takeover = self.enterContext(margay.take_over_giving("web.shop", agent=self.agent))
        self.assertEqual(self.fake.messages[-1][:8], b"\x01\x0a\0\0\0\x01\x01\x00")
        _, served = self.accept()
        # What nobody knows is passed over, and its descriptors are closed.
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        self.fake.hand(reply(99), [writing])
        os.close(writing)
        self.fake.hand(reply(GIVE, id=self.shop.raw, bits=256, text="host2"), [])
        self.fake.hand(reply(GIVE, id=b"\xaa".ljust(32, b"\0"), bits=8), [])
        giving = self.give(served, data=b"x")
        self.assertEqual(next(takeover), margay.Give(Prefix(self.shop), "host2"))
        self.assertEqual(os.read(reading, 1), b"")
        self.assertEqual(next(takeover), margay.Give(Prefix(ServiceId(b"\xaa".ljust(32, b"\0")), 8), ""))
        taken = next(takeover)
        assert isinstance(taken, margay.Taken)
        self.enterContext(taken.socket)
        self.assertEqual(taken.data, b"x")
        giving.result()

    def test_one_connection_is_named_by_its_peer(self) -> None:
        takeover = self.enterContext(margay.take_over_giving("web.shop", agent=self.agent))
        self.fake.hand(reply(GIVE, id=self.shop.raw, bits=256, port=4660, v6="::ffff:10.1.0.3", text="host2"), [])
        give = next(takeover)
        assert isinstance(give, margay.Give)
        self.assertEqual((give.to, give.peer), ("host2", ("10.1.0.3", 4660)))
        self.assertTrue(give.is_for(("10.1.0.3", 4660)))
        self.assertTrue(give.is_for(("::ffff:10.1.0.3", 4660, 0, 0)))
        self.assertFalse(give.is_for(("10.1.0.3", 4661)))
        self.assertFalse(give.is_for(("10.1.0.4", 4660)))
        self.assertTrue(margay.Give(give.name, give.to).is_for(("10.1.0.4", 4661)), "all of them")

    def test_who_does_not_give_hears_nothing_of_it(self) -> None:
        _, served = self.accept()
        takeover = self.take_over()
        self.fake.hand(reply(GIVE, id=self.shop.raw, bits=256), [])
        giving = self.give(served, data=b"x")
        self.assertEqual(self.take(takeover).data, b"x")
        giving.result()

    def test_a_message_that_is_none_is_not_answered(self) -> None:
        client, served = self.accept()
        garbage = [reply(HANDED, error=5), reply(EVENT, error=5), b"\1\2\3", reply(HANDED) + b"\xff"]
        for at, message in enumerate([reply(HANDED), *garbage, reply(HANDED)]):
            takeover = self.take_over()
            reading, writing = os.pipe()
            # No socket; what is not said to be one; and, last, data in what is no file.
            self.fake.hand(message, [] if at == 0 else [served.fileno(), writing])
            os.close(writing)
            with self.assertRaises(margay.Incompatible):
                next(takeover)
            self.assertEqual(takeover.fileno(), -1)
            self.wait_for(reading)
            self.assertEqual(os.read(reading, 1), b"", "what came is closed")
            os.close(reading)
            self.fake.wait_takers(0)
        self.assertNotIn(HANDED, self.fake.asked)
        self.still_works(client, served)

    def test_a_program_that_is_interrupted_takes_nothing(self) -> None:
        client, served = self.accept()
        takeover = self.take_over()
        giving = self.give(served, data=b"x")
        with mock.patch("margay._takeover._contents", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                self.take(takeover)
        self.assertEqual(takeover.fileno(), -1)
        self.refused(errno.ETIMEDOUT, giving.result)
        self.still_works(client, served)

    def test_a_giver_that_is_interrupted_has_closed_the_socket(self) -> None:
        client, served = self.accept()
        with mock.patch.object(self.agent, "_answer", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                margay.hand_over(served, "web.shop", agent=self.agent)
        self.assertEqual(served.fileno(), -1)
        self.assertEqual(client.recv(1), b"")


class Asynchronously(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.fake = FakeAgent()
        self.addCleanup(self.fake.close)
        self.agent = self.fake.agent()
        self.listener = self.enterContext(margay.listen("web.shop", agent=self.agent))

    def accept(self) -> tuple[margay.Socket, margay.Socket]:
        client = self.enterContext(margay.connect("web.shop", timeout=20, agent=self.agent))
        return client, self.enterContext(self.listener.accept()[0])

    async def give(self, sock: socket.socket, data: bytes = b"") -> None:
        await margay.hand_over_async(sock, "web.shop", data, agent=self.agent)

    async def test_a_server_goes_on_in_another_one(self) -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await margay.peer_service(writer, agent=self.agent))
            writer.write(await reader.readline())
            writer.close()

        seen: list[margay.ServiceId | None] = []
        client, served = self.accept()
        reader, writer = await asyncio.open_connection(sock=served)
        async with await margay.open_takeover("web.shop", agent=self.agent) as takeover:
            # Of a transport, a copy is given.
            assert isinstance(writer.transport, asyncio.Transport)
            writer.transport.pause_reading()
            copy = writer.get_extra_info("socket").dup()
            giving = [
                asyncio.create_task(self.give(copy, b"a connection")),
                asyncio.create_task(self.give(self.listener, b"a listening socket")),
            ]
            taken = {}
            async with asyncio.timeout(20):
                async for one in takeover:
                    taken[one.data] = one
                    if len(taken) == 2:
                        break
            await asyncio.gather(*giving)
        writer.transport.abort()
        self.assertEqual((copy.fileno(), self.listener.fileno()), (-1, -1))
        client.sendall(b"for the new one")
        reader, writer = await asyncio.open_connection(sock=taken[b"a connection"].socket)
        self.assertEqual(await reader.readexactly(15), b"for the new one")
        writer.close()
        await writer.wait_closed()
        self.assertEqual(client.recv(1), b"")

        listener = taken[b"a listening socket"].socket
        port = listener.getsockname()[1]
        async with await margay.start_server(echo, listener):
            self.assertEqual(listener.fileno(), -1, "the server has it")
            with socket.socket() as past:
                past.bind(("127.0.0.1", 0))
                self.fake.past.add(past.getsockname()[1])
                past.connect(("127.0.0.1", port))
                past.settimeout(20)
                self.assertEqual(await asyncio.to_thread(past.recv, 1), b"")
            reader, writer = await margay.open_connection("web.shop", source="cli.shop", agent=self.agent)
            writer.write(b"hello\n")
            self.assertEqual(await reader.read(), b"hello\n")
            writer.close()
        self.assertEqual(seen, [margay.name("cli.shop", agent=self.agent).id])

    async def test_refusals_and_ends_come_as_without_asyncio(self) -> None:
        client, served = self.accept()
        with self.assertRaises(margay.Refused) as raised:
            await self.give(served)
        self.assertEqual(raised.exception.errno, errno.ESRCH)
        with self.assertRaises(ValueError):
            await self.give(served, bytes(MEBIBYTE + 1))
        self.fake.refused[TAKE_OVER] = errno.EACCES, "web.shop is not yours"
        with self.assertRaises(PermissionError):
            await margay.open_takeover("web.shop", agent=self.agent)
        self.fake.refused.clear()
        async with margay.Takeover("web.shop", self.agent) as takeover:
            self.fake.taking_time = 0
            with self.assertRaises(margay.Refused) as raised:
                await self.give(served)
            self.assertEqual(raised.exception.errno, errno.ETIMEDOUT)
            with self.assertRaises(margay.AgentDown):
                await anext(takeover)
            self.fake.taking_time = 60
            await asyncio.to_thread(self.fake.wait_takers, 0)
            next_one = asyncio.ensure_future(anext(takeover))
            await asyncio.to_thread(self.fake.wait_takers, 1)
            await self.give(served)
            with (await next_one).socket as taken:
                client.sendall(b"x")
                self.assertEqual(await asyncio.to_thread(taken.recv, 1), b"x")
            self.fake.kill()
            with self.assertRaises(margay.AgentDown):
                await anext(takeover)

    async def test_a_cancellation_waits_for_the_outcome(self) -> None:
        _, refused = self.accept()
        _, given = self.accept()
        takeover = margay.Takeover("web.shop", self.agent)
        self.addCleanup(takeover.close)
        for times, sock in enumerate([refused, given], 1):
            self.fake.silence(HAND_OVER)
            task = asyncio.create_task(self.give(sock))
            await asyncio.to_thread(self.fake.wait_asked, HAND_OVER, times)
            for _ in range(2):
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=0)
                self.assertFalse(done)
            self.fake.speak()
            if sock is given:
                async with asyncio.timeout(20):
                    (await anext(takeover)).socket.close()
            with self.assertRaises(asyncio.CancelledError):
                await task
            if sock is refused:
                await asyncio.to_thread(takeover.open)
        self.assertNotEqual(refused.fileno(), -1)
        self.assertEqual(given.fileno(), -1)

    async def test_a_cancelled_wait_loses_no_socket(self) -> None:
        _, served = self.accept()
        async with await margay.open_takeover("web.shop", agent=self.agent) as takeover:
            waiting = asyncio.ensure_future(anext(takeover))
            done, _ = await asyncio.wait([waiting], timeout=0)
            self.assertFalse(done)
            waiting.cancel()
            giving = asyncio.create_task(self.give(served, b"kept"))
            # It has come before anybody waits for it.
            await asyncio.to_thread(select.select, [takeover], [], [], 20)
            with self.assertRaises(asyncio.CancelledError):
                await waiting
            async with asyncio.timeout(20):
                taken = await anext(takeover)
            taken.socket.close()
            self.assertEqual(taken.data, b"kept")
            await giving
