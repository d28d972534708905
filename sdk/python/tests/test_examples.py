"""The examples, as programs."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import unittest
from pathlib import Path
from typing import IO

import margay

from .fake import EVENTS, GIVE, HAND_OVER, FakeAgent, reply

HERE = Path(__file__).resolve().parent.parent


class Examples(unittest.TestCase):
    def setUp(self) -> None:
        self.fake = FakeAgent()
        self.addCleanup(self.fake.close)
        self.listener = self.enterContext(socket.create_server(("127.0.0.1", 0)))
        self.environment = os.environ | {"PYTHONPATH": str(HERE / "src"), "MARGAY_PROGRAMS": self.fake.path}

    def start(self, name: str, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "examples" / name), *args]
        program = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.addCleanup(program.communicate)
        self.addCleanup(program.kill)
        return program

    def serve(self, name: str, *args: str, served: str | None = None) -> subprocess.Popen[str]:
        program = self.start(name, *args)
        assert program.stdout is not None
        self.assertEqual(program.stdout.readline(), f"serving {served or args[-1]}\n")
        return program

    def output(self, name: str, *args: str) -> str:
        program = self.start(name, *args)
        output, errors = program.communicate(timeout=60)
        self.assertEqual(program.returncode, 0, errors)
        return output

    def test_the_echo_server_echoes(self) -> None:
        self.serve("echo_server.py", "echo.shop")
        self.assertEqual(self.output("echo_client.py", "echo.shop", "hello"), "hello\n")

    def test_the_asynchronous_echo_server_echoes(self) -> None:
        server = self.serve("async_echo.py", "echo.shop")
        self.assertEqual(self.output("echo_client.py", "echo.shop", "hello"), "hello\n")
        assert server.stdout is not None
        self.assertRegex(server.stdout.readline(), r"^sid:0{24}(77){16}[0-9a-f]{8} is here\n$")

    def test_the_prefix_server_greets_by_name(self) -> None:
        self.serve("prefix_server.py", "sid:3f00/8")
        self.assertRegex(
            self.output("echo_client.py", "sid:3f17", "x"), r"^hello sid:0{24}(77){16}.*this is sid:3f00/8\n"
        )

    def test_datagrams_are_answered(self) -> None:
        self.serve("datagrams.py", "serve", "shout.shop")
        self.assertRegex(self.output("datagrams.py", "ask", "shout.shop", "hello"), r": HELLO\n$")

    def test_the_web_server_is_reached_by_name(self) -> None:
        self.serve("web.py", "serve", "web.shop")
        self.assertRegex(
            self.output("web.py", "get", "web.shop", "/page"), r"^hello sid:0{24}(55){20}, this is /page\n$"
        )

    def test_a_server_is_replaced_and_its_clients_do_not_notice(self) -> None:
        agent = self.fake.agent()

        def connect() -> tuple[margay.Socket, IO[bytes]]:
            sock = self.enterContext(margay.connect("echo.shop", timeout=20, agent=agent))
            return sock, self.enterContext(sock.makefile("rb"))

        server = self.serve("upgrade.py", "echo.shop")
        clients = [connect() for _ in range(5)]
        for sock, lines in clients:
            sock.sendall(b"one\ntwo\nthr")
            self.assertEqual(lines.readline() + lines.readline(), b"1 one\n2 two\n")
        for generation in range(2):
            replaced = server
            server = self.serve("upgrade.py", "echo.shop", str(replaced.pid), served="echo.shop")
            self.assertEqual(replaced.communicate(timeout=60), ("", ""))
            self.assertEqual(replaced.returncode, 0)
            self.assertEqual(self.fake.answered.count(HAND_OVER), (generation + 1) * (5 + 1))
        for sock, lines in clients:
            sock.sendall(b"ee\n")
            self.assertEqual(lines.readline(), b"3 three\n")
        sock, lines = connect()
        sock.sendall(b"new\n")
        self.assertEqual(lines.readline(), b"1 new\n")
        # Now nobody takes over.
        server.send_signal(signal.SIGTERM)
        self.assertIn("no other process of this user takes over the name", server.communicate(timeout=60)[0])
        self.assertEqual(server.returncode, 0)
        for _, lines in clients:
            self.assertEqual(lines.read(), b"")

    def test_a_server_whose_name_is_drained_gives_its_connections_and_serves_those_that_stay(self) -> None:
        agent = self.fake.agent()
        self.serve("upgrade.py", "echo.shop")
        self.fake.wait_takers(1)
        clients = [self.enterContext(margay.connect("echo.shop", timeout=20, agent=agent)) for _ in range(3)]
        for sock in clients:
            sock.sendall(b"one\n")
            self.assertEqual(sock.recv(100), b"1 one\n")
        shop = agent.name("echo.shop").id.raw
        self.fake.hand(reply(GIVE, id=shop, bits=256, text="host2"), [])
        self.fake.wait_answered(HAND_OVER, 3)
        given = [message for message in self.fake.messages if message[1] == HAND_OVER]
        self.assertEqual([message[56:] for message in given], [b"host2"] * 3)
        # Nobody has taken them.
        for sock in clients:
            sock.sendall(b"two\n")
            self.assertEqual(sock.recv(100), b"2 two\n")

    @unittest.skipUnless(importlib.util.find_spec("websockets"), "the package websockets is not installed")
    def test_a_websocket_goes_on_where_its_server_gives_it_and_here_where_nobody_takes_it(self) -> None:
        from websockets.frames import Frame, Opcode

        def exchange(sock: socket.socket, sent: bytes) -> bytes:
            sock.sendall(sent)
            head = sock.recv(2, socket.MSG_WAITALL)
            return sock.recv(head[1], socket.MSG_WAITALL)

        def frame(text: bytes) -> bytes:
            return Frame(Opcode.TEXT, text).serialize(mask=True)

        agent = self.fake.agent()
        self.serve("websocket.py", "chat.shop")
        self.fake.wait_takers(1)
        client = self.enterContext(margay.connect("chat.shop", timeout=20, agent=agent))
        client.sendall(
            b"GET / HTTP/1.1\r\nHost: chat.shop\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += client.recv(1)
        self.assertIn(b"101 Switching Protocols", answer)
        # The accept key of RFC 6455, section 1.3.
        self.assertIn(b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", answer)
        self.assertEqual(exchange(client, frame(b"one")), b"1 one")
        shop = agent.name("chat.shop").id.raw
        self.fake.hand(reply(GIVE, id=shop, bits=256, text="host2"), [])
        self.fake.wait_answered(HAND_OVER, 1)
        # Nobody has taken it.
        self.assertEqual(exchange(client, frame(b"two")), b"2 two")
        # One that another server gives, in the middle of a message.
        ours, theirs = socket.create_connection(self.listener.getsockname()), self.listener.accept()[0]
        self.enterContext(ours)
        message = frame(b"x" * 100)
        margay.hand_over(theirs, "chat.shop", b"7 " + message[:20], agent=agent)
        self.assertEqual(exchange(ours, message[20:]), b"8 " + b"x" * 100)

    def test_events_are_printed_until_the_agent_ends(self) -> None:
        program = self.start("events.py")
        assert program.stdout is not None
        self.assertEqual(program.stdout.readline(), "listening\n")
        self.assertEqual(self.fake.asked, [EVENTS])
        self.fake.event('{"kind":"failed","name":"web.shop","why":"nobody serves it"}')
        self.assertEqual(program.stdout.readline(), "failed web.shop nobody serves it\n")
        self.fake.kill()
        self.assertIn("margay up", program.communicate(timeout=60)[0])
        self.assertEqual(program.returncode, 0)

    def test_without_an_agent_a_program_says_so(self) -> None:
        self.environment["MARGAY_PROGRAMS"] = "/nonexistent/programs.sock"
        program = self.start("echo_server.py", "echo.shop")
        self.assertIn("AgentDown", program.communicate(timeout=60)[1])
        self.assertNotEqual(program.returncode, 0)
