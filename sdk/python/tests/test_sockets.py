"""Sockets that block."""

from __future__ import annotations

import errno
import http.client
import os
import selectors
import socket
import threading
import unittest
from collections.abc import Callable

import margay
from margay import Agent, Prefix, ServiceId

from .fake import BIND, EVENTS, NAME, PEER, RANGES, RESOLVE, FakeAgent, reply


class Case(unittest.TestCase):
    def setUp(self) -> None:
        self.fake = FakeAgent()
        self.addCleanup(self.fake.close)
        self.agent = self.fake.agent()

    def listen(self, target: margay.Target) -> margay.Socket:
        return self.enterContext(margay.listen(target, agent=self.agent))

    def connect(self, target: margay.Target, source: margay.Target | margay.Own | None = None) -> margay.Socket:
        return self.enterContext(margay.connect(target, source=source, timeout=20, agent=self.agent))

    def datagrams(self, target: margay.Target | None = None) -> margay.Socket:
        sock = self.enterContext(margay.datagrams(target, source=margay.OWN, agent=self.agent))
        sock.settimeout(20)
        return sock


class Streams(Case):
    def test_a_client_reaches_a_service_by_its_name(self) -> None:
        listener = self.listen("Web.shop")
        client = self.connect("web.shop")
        served, peer = listener.accept()
        with served:
            client.sendall(b"ping")
            self.assertEqual(served.recv(4), b"ping")
            self.assertIsInstance(client, socket.socket)
            self.assertEqual(peer.service, served.peer_service())
            self.assertEqual(tuple(peer), served.getpeername())
        self.assertEqual(self.fake.written, ["web.shop"])

    def test_peers_go_by_the_name_that_they_said(self) -> None:
        listener = self.listen("web.shop")
        name = margay.name("cli.shop", agent=self.agent)
        sources: list[margay.Target] = ["cli.shop", name, name.id, name.prefix]
        for source in sources:
            self.connect("web.shop", source)
            served, peer = listener.accept()
            served.close()
            self.assertEqual((peer.service, str(peer)), (name.id, str(name.id)))
        client = self.connect("web.shop", margay.OWN)
        served, peer = listener.accept()
        served.close()
        assert peer.service is not None
        self.assertEqual(peer.service.raw[-2:], client.getsockname()[1].to_bytes(2))

    def test_one_socket_serves_all_names_under_a_prefix(self) -> None:
        listener = self.enterContext(margay.listen_prefix("sid:aabb/16", agent=self.agent))
        for target in (
            "sid:aabbcc",
            ServiceId(b"\xaa\xbb" + bytes(30)),
            Prefix(ServiceId(b"\xaa\xbb\xcc" + bytes(29)), 24),
        ):
            self.connect(target)
            listener.accept()[0].close()
        with self.assertRaises(ConnectionRefusedError):
            self.connect("sid:aabc")

    def test_a_host_without_ipv6_uses_the_other_address(self) -> None:
        # No stream goes to a multicast address: the kernel has no route, as without IPv6.
        # Names with a key have none in IPv6.
        for self.fake.v6 in ("ff02::1", "::", "::ffff:127.0.0.1"):
            listener = self.listen("web.shop")
            agent = self.fake.agent()
            with margay.connect("web.shop", agent=agent) as client:
                self.assertEqual(client.getpeername()[0], "::ffff:127.0.0.1")
                listener.accept()[0].close()
            with margay.Socket(socket.AF_INET, agent=agent) as client:
                client.connect("web.shop")
                listener.accept()[0].close()

    def test_who_comes_past_margay_is_turned_away(self) -> None:
        listener = self.listen("web.shop")
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as past:
            self.fake.past.add(past.getsockname()[1])
            client = self.connect("web.shop")
            served, peer = listener.accept()
            served.close()
            self.assertEqual(peer[1], client.getsockname()[1])
            self.assertEqual(past.recv(1), b"")

    def test_who_cannot_be_named_is_nobody(self) -> None:
        listener = self.listen("web.shop")
        self.fake.refused[PEER] = errno.EIO, "the disk is broken"
        self.connect("web.shop")
        served, peer = listener.accept()
        with served:
            self.assertEqual((peer.service, str(peer)), (None, repr(tuple(peer))))
            with self.assertRaisesRegex(margay.Refused, "the disk is broken"):
                served.peer_service()
            self.fake.refused[PEER] = errno.ENOTCONN, "no such flow"
            self.assertIsNone(served.peer_service())

    def test_margays_own_addresses_are_known(self) -> None:
        own = ("198.18.0.1", "::ffff:198.19.255.255", "fd5a:4c00::1")
        others = ("198.20.0.1", "::ffff:127.0.0.1", "fd5a:4c01::1", "fe80::1%lo")
        agent = self.fake.agent()
        for host in own + others:
            self.assertEqual(agent.is_virtual(host), host in own, host)
        self.fake.own_v6, self.fake.own_v4 = "fdaa:1::1", "10.66.0.1"
        for host in ("10.67.255.255", "fdaa:1::7", *own):
            self.assertEqual(agent.is_virtual(host), host not in own, host)
        self.fake.refused[RANGES] = errno.EBADMSG, "this is no request"
        self.assertTrue(agent.is_virtual(own[0]), "an agent that does not know the question")
        agent.close()

    def test_addresses_are_remembered_until_they_fail(self) -> None:
        listener = self.listen("web.shop")
        for _ in range(3):
            self.connect("web.shop")
            listener.accept()[0].close()
        self.assertEqual((self.fake.asked.count(RESOLVE), self.fake.asked.count(NAME)), (1, 1))
        listener.close()
        with self.assertRaises(ConnectionRefusedError):
            self.connect("web.shop")
        self.listen("web.shop")
        self.connect("web.shop")
        self.assertEqual(self.fake.asked.count(RESOLVE), 2)
        for at in range(300):
            self.agent.resolve(ServiceId(at.to_bytes(32)))
            self.agent.name(f"sid:{at:04x}")
        self.agent.resolve(ServiceId(bytes(32)))
        self.agent.name("sid:0000")
        self.assertEqual(self.fake.asked.count(RESOLVE), 2 + 300 + 1, "the oldest gave way")
        self.assertEqual(self.fake.asked.count(NAME), 1 + 300 + 1, "the oldest gave way")

    def test_sockets_do_what_sockets_do(self) -> None:
        listener = self.listen("web.shop")
        listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            with self.assertRaises(BlockingIOError):
                listener.accept()
            client = self.connect("web.shop")
            self.assertTrue(selector.select(20))
            served, _ = listener.accept()
        with served, client.dup() as copy, copy.makefile("rw") as file:
            file.write("line\n")
            file.flush()
            self.assertEqual(served.recv(100), b"line\n")
            self.assertIs(copy.agent, self.agent)
        with margay.Socket(agent=self.agent) as nobody:
            self.assertEqual(nobody.connect_ex("none.shop"), errno.ECONNREFUSED)
        with margay.Socket(agent=self.agent) as slow:
            slow.setblocking(False)
            self.assertIn(slow.connect_ex("web.shop"), (0, errno.EINPROGRESS))
        with margay.Socket(agent=self.agent) as plain:
            plain.connect(("::1", listener.getsockname()[1]))

    def test_http_goes_by_name(self) -> None:
        listener = self.listen("web.shop")

        def serve() -> None:
            with listener.accept()[0] as served:
                served.recv(1000)
                served.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")

        thread = threading.Thread(target=serve)
        thread.start()
        connection = http.client.HTTPConnection("web.shop")
        connection.sock = self.connect("web.shop")
        connection.request("GET", "/")
        self.assertEqual(connection.getresponse().read(), b"hello")
        thread.join()


class Datagrams(Case):
    def test_datagrams_go_to_names_and_answers_come_back(self) -> None:
        server, client = self.datagrams("dns.shop"), self.datagrams()
        for text in (b"one", b"two"):
            self.assertEqual(client.sendto(text, "dns.shop"), 3)
            data, peer = server.recvfrom(100)
            self.assertEqual((data, peer.service.raw[-2:]), (text, client.getsockname()[1].to_bytes(2)))
            server.sendto(b"yes", peer)
            buffer = bytearray(100)
            length, peer = client.recvfrom_into(buffer)
            self.assertEqual((buffer[:length], peer.service), (b"yes", self.agent.name("dns.shop").id))
        # One question for the name, and one for the client.
        self.assertEqual((self.fake.asked.count(RESOLVE), self.fake.asked.count(PEER)), (1, 1))

    def test_datagrams_that_come_past_margay_are_dropped(self) -> None:
        server, client = self.datagrams("dns.shop"), self.datagrams()
        with socket.socket(type=socket.SOCK_DGRAM) as past:
            past.bind(("127.0.0.1", 0))
            self.fake.past.add(past.getsockname()[1])
            buffer = bytearray(100)
            receivers: list[Callable[[], bytes]] = [
                lambda: server.recvfrom(100)[0],
                lambda: server.recvfrom(100, socket.MSG_PEEK)[0],
                lambda: server.recvfrom(100)[0],
                lambda: bytes(buffer[: server.recvfrom_into(buffer)[0]]),
            ]
            for receive in receivers:
                past.sendto(b"past", ("127.0.0.1", server.getsockname()[1]))
                client.sendto(b"by name", "dns.shop")
                self.assertEqual(receive(), b"by name")

    def test_connected_datagrams_stay_with_one_instance(self) -> None:
        server = self.datagrams("dns.shop")
        with margay.connect_datagrams("dns.shop", timeout=20, agent=self.agent) as client:
            client.send(b"question")
            data, peer = server.recvfrom(100)
            server.sendto(b"answer", 0, peer)
            self.assertEqual((data, client.recv(100)), (b"question", b"answer"))
            server.close()
            client.send(b"anybody?")
            with self.assertRaises(ConnectionRefusedError):
                client.recv(100)

    def test_the_other_address_is_used_for_datagrams_too(self) -> None:
        self.fake.v6 = "::"
        server, client = self.datagrams("dns.shop"), self.datagrams()
        client.sendto(b"x", "dns.shop")
        self.assertEqual(server.recvfrom(100)[1][0], "::ffff:127.0.0.1")


class Agents(Case):
    def test_an_absent_agent_is_said_to_be_absent(self) -> None:
        absent = Agent("/nonexistent/programs.sock")
        with self.assertRaises(margay.AgentDown) as raised:
            margay.connect("web.shop", agent=absent)
        self.assertEqual(raised.exception.errno, errno.ENOENT)
        self.assertIn("margay up", str(raised.exception))
        self.assertIn("/nonexistent/programs.sock", str(raised.exception))
        self.fake.kill()
        with self.assertRaises(margay.AgentDown):
            margay.listen("web.shop", agent=self.agent)

    def test_a_restarted_agent_is_found_again(self) -> None:
        listener = self.listen("web.shop")
        for _ in range(3):
            self.fake.kill()
            self.fake.listen()
            self.connect("web.shop", margay.OWN)
            served, peer = listener.accept()
            served.close()
            self.assertIsNotNone(peer.service)
        # While there is none, what exists goes on: the address is remembered, the peer has no name.
        self.fake.kill()
        self.connect("web.shop")
        served, peer = listener.accept()
        with served:
            self.assertIsNone(peer.service)
            with self.assertRaises(margay.AgentDown):
                served.peer_service()

    def test_a_mute_agent_holds_nobody_for_ever(self) -> None:
        self.fake.silence(NAME)
        self.addCleanup(setattr, margay._agent, "ANSWER_TIME", margay._agent.ANSWER_TIME)
        margay._agent.ANSWER_TIME = 1
        with self.assertRaises(margay.AgentDown) as raised:
            self.agent.name("web.shop")
        self.assertEqual(raised.exception.errno, errno.ETIMEDOUT)

    def test_refusals_come_with_the_reason(self) -> None:
        for number, kind in ((errno.EACCES, PermissionError), (errno.EADDRINUSE, margay.Refused)):
            self.fake.refused[BIND] = number, "web.shop is not yours"
            for call in (margay.listen, margay.datagrams):
                with self.assertRaisesRegex(kind, "web.shop is not yours") as raised:
                    call("web.shop", agent=self.agent)
                self.assertEqual(raised.exception.errno, number)
                self.assertIsInstance(raised.exception, margay.Refused)
        for text in ("web", "x" * 300):
            with self.assertRaises(margay.Refused) as refused:
                self.agent.name(text)
            self.assertEqual(refused.exception.errno, errno.EINVAL)

    def test_nonsense_is_not_believed(self) -> None:
        self.agent.name("web.shop")
        nonsense = [
            b"\1\2\3",
            b"\x09" + reply(RESOLVE)[1:],
            reply(NAME),
            reply(RESOLVE) + b"\xff",
            reply(RESOLVE),
            reply(RESOLVE, port=1),
            reply(RESOLVE) + bytes(40000),
        ]
        for self.fake.garbage in nonsense:
            with self.assertRaises(margay.Incompatible):
                self.agent.resolve("web.shop")
        self.fake.garbage = None
        self.agent.resolve("web.shop")

    def test_an_agent_with_too_many_connections_says_so(self) -> None:
        self.fake.full = "the agent has 1024 connections of programs; close some"
        for _ in range(20):
            with self.assertRaisesRegex(margay.Refused, "1024 connections"):
                self.agent.name("web.shop")

    def test_threads_share_one_agent(self) -> None:
        listener = self.listen("web.shop")
        seen: list[bytes] = []

        def call() -> None:
            with margay.connect("web.shop", source=margay.OWN, timeout=20, agent=self.agent) as client:
                seen.append(client.getsockname()[1].to_bytes(2))

        threads = [threading.Thread(target=call) for _ in range(32)]
        for thread in threads:
            thread.start()
        named = []
        for _ in threads:
            served, peer = listener.accept()
            served.close()
            assert peer.service is not None
            named.append(peer.service.raw[-2:])
        for thread in threads:
            thread.join()
        self.assertEqual(sorted(seen), sorted(named))

    def test_a_child_does_not_speak_on_its_parents_connection(self) -> None:
        self.agent.name("parent.shop")
        self.fake.silence(NAME)
        # A thread that the child does not have is in the middle of a request.
        busy = threading.Thread(target=lambda: self.agent.name("busy.shop"))
        busy.start()
        self.fake.wait_asked(NAME, 2)
        child = os.fork()
        if child == 0:
            # No other exit: the rest of the tests is the parent's.
            status = 1
            try:
                inherited = self.agent._idle
                self.agent.resolve(ServiceId(bytes(32)))
                status = 0 if not inherited else 2
            finally:
                os._exit(status)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.fake.speak()
        busy.join()
        self.assertEqual(str(self.agent.name("again.shop")), "again.shop")

    def test_another_user_does_not_use_the_first_ones_connection(self) -> None:
        self.agent.name("one.shop")
        [(owner, connection)] = self.agent._idle
        self.agent._idle = [((owner[0], owner[1] + 1, owner[2]), connection)]
        self.agent.name("two.shop")
        self.assertEqual(connection.fileno(), -1)

    def test_what_is_closed_asks_nothing(self) -> None:
        listener = self.listen("web.shop")
        listener.close()
        with self.assertRaises(OSError) as raised:
            self.agent.bind(listener, "web.shop")
        self.assertEqual(raised.exception.errno, errno.EBADF)
        self.agent.close()
        self.agent.name("open.again")


class Events(Case):
    def test_events_come_as_they_happen(self) -> None:
        with margay.events(self.agent) as events:
            self.fake.event('{"kind":"opened","name":"web.shop","session":17,"service":"sid:01"}')
            self.fake.event('{"kind":"failed","service":"nonsense","why":"nobody serves it"}')
            event = next(events)
            self.assertEqual((event.kind, event.name, event.session, event.why), ("opened", "web.shop", "17", None))
            self.assertEqual(event.service, ServiceId(b"\1" + bytes(31)))
            event = next(events)
            self.assertEqual((event.kind, event.service, event.why), ("failed", None, "nobody serves it"))
            self.fake.kill()
            for _ in range(2):
                with self.assertRaises(margay.AgentDown):
                    next(events)
            self.fake.listen()
            events.open()
            self.fake.event('{"kind":"closed"}')
            self.assertEqual(next(events).kind, "closed")
            for nonsense in ("{", "[]", "{}"):
                events.open()
                self.fake.event(nonsense)
                with self.assertRaises(margay.Incompatible):
                    next(events)
        self.fake.refused[EVENTS] = errno.ENOSPC, "too many programs listen"
        with self.assertRaisesRegex(margay.Refused, "too many programs listen"):
            next(margay.events(self.agent))
