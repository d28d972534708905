"""Framed sockets, over a process that speaks as `margay ensemble socket` does."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import sys
import tempfile
import unittest
from pathlib import Path

import margay
from margay._frames import FRAME_MAX

# As the program: echoes frames as answers, or accepts one connection that says hello, or fails.
PROGRAM = """#!{python}
import array, socket, struct, sys
head = struct.Struct(">cBHIB255s")
def message(kind, number=0, value=b"", flags=0, key=b""):
    return head.pack(kind, flags, 0, number, len(key), key) + value
packets = socket.socket(fileno=0)
what, *words = sys.argv[3:]
name = words[-1]
if name == "nobody.shop":
    packets.sendall(message(b"E", {timed_out}, b"nobody answers"))
    sys.exit()
packets.sendall(message(b"O"))
if what == "listen":
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(packets, [message(b"A", 0, " ".join(words).encode())], [theirs.fileno()])
    theirs.close()
    ours.sendall(message(b"F", 9, b"hello", 2, b"k"))
    packets = ours
while True:
    body, descriptors, _, _ = socket.recv_fds(packets, 1 << 17, 1)
    if not body:
        break
    if body.endswith(b"lose"):
        packets.sendall(message(b"L", 1))
    else:
        socket.send_fds(packets, [b"F" + body[1:]], descriptors)
    for descriptor in descriptors:
        socket.close(descriptor)
"""


class WithProgram(unittest.TestCase):
    def setUp(self) -> None:
        directory = self.enterContext(tempfile.TemporaryDirectory())
        path = Path(directory, "margay")
        path.write_text(PROGRAM.format(python=sys.executable, timed_out=errno.ETIMEDOUT))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        before = os.environ.get("MARGAY_PROGRAM")
        os.environ["MARGAY_PROGRAM"] = str(path)
        self.addCleanup(lambda: os.environ.pop("MARGAY_PROGRAM") if before is None else None)


class FramedSockets(WithProgram):
    def test_frames_go_and_come_whole(self) -> None:
        with margay.connect_frames("work.shop") as server:
            large = bytes(1_000_000)
            self.assertEqual(server.send(b"one", key=b"k", order=3, safe=True, wants_answer=True), 0)
            one = server.recv()
            self.assertEqual(one, margay.Frame(0, b"one", False, True, 3, b"k"))
            self.assertEqual(server.send(large, order=margay.UNORDERED), 1)
            back = server.recv()
            assert isinstance(back, margay.Frame)
            self.assertEqual((back.data, back.order, back.wants_answer), (large, margay.UNORDERED, False))
            server.send(b"lose")
            self.assertEqual(server.recv(), margay.Lost(1))

    def test_a_connection_is_accepted_and_answered(self) -> None:
        with margay.listen_frames("work.shop", label="first") as listener:
            client, who = listener.accept()
            self.assertEqual(who, "--as first -- work.shop")
            with client:
                hello = client.recv()
                assert isinstance(hello, margay.Frame)
                self.assertEqual((hello.data, hello.key, hello.number, hello.wants_answer), (b"hello", b"k", 9, True))
                client.answer(hello, b"yes")
                said = client.recv()
                assert isinstance(said, margay.Frame)
                self.assertEqual((said.data, said.is_answer, said.number), (b"yes", True, 9))
                self.assertEqual(client.send(b"unasked"), 0)

    def test_a_read_that_took_too_long_has_lost_nothing(self) -> None:
        with margay.connect_frames("work.shop") as server:
            server.settimeout(0.01)
            with self.assertRaises(TimeoutError):
                server.recv()
            server.settimeout(None)
            server.send(b"later")
            arrival = server.recv()
            assert isinstance(arrival, margay.Frame)
            self.assertEqual(arrival.data, b"later")

    def test_what_is_wrong_is_said(self) -> None:
        with self.assertRaisesRegex(TimeoutError, "nobody answers"):
            margay.connect_frames("nobody.shop")
        with margay.connect_frames("work.shop") as server:
            for wrong in ({"order": 256}, {"order": -1}, {"key": bytes(256)}):
                with self.assertRaises(ValueError):
                    server.send(b"", **wrong)  # type: ignore[arg-type]
            with self.assertRaises(ValueError):
                server.send(bytes(FRAME_MAX + 1))
        os.environ["MARGAY_PROGRAM"] = "/nowhere/margay"
        with self.assertRaises(FileNotFoundError):
            margay.connect_frames("work.shop")


class FramedSocketsOfCoroutines(WithProgram, unittest.IsolatedAsyncioTestCase):
    async def test_many_frames_go_while_others_come(self) -> None:
        async with await margay.open_frames("work.shop") as server:
            # More than the sockets hold, so that each way has to wait for the other.
            frames = [bytes([number]) * 60_000 for number in range(64)] + [bytes(1_000_000)]

            async def send() -> list[int]:
                return [await server.send(frame, key=b"k", wants_answer=True) for frame in frames]

            sending = asyncio.create_task(send())
            for frame in frames:
                arrival = await server.recv()
                assert isinstance(arrival, margay.Frame)
                self.assertEqual((arrival.data, arrival.key, arrival.wants_answer), (frame, b"k", True))
            self.assertEqual(await sending, list(range(65)))
            await server.send(b"lose")
            self.assertEqual(await anext(aiter(server)), margay.Lost(1))

    async def test_a_call_that_is_cancelled_loses_nothing(self) -> None:
        async with await margay.open_frames("work.shop") as server:
            has_begun = asyncio.Event()

            async def receive() -> object:
                has_begun.set()
                return await server.recv()

            waiting = asyncio.create_task(receive())
            await has_begun.wait()
            waiting.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await waiting
            await server.send(b"one")
            arrival = await server.recv()
            assert isinstance(arrival, margay.Frame)
            self.assertEqual(arrival.data, b"one")

    async def test_connections_are_accepted_and_answered(self) -> None:
        async with await margay.open_frames_listener("work.shop", label="first") as listener:
            client, who = await anext(aiter(listener))
            self.assertEqual(who, "--as first -- work.shop")
            async with client:
                hello = await client.recv()
                assert isinstance(hello, margay.Frame)
                await client.answer(hello, b"yes")
                said = await client.recv()
                assert isinstance(said, margay.Frame)
                self.assertEqual((said.data, said.is_answer, said.number), (b"yes", True, 9))

    async def test_what_is_wrong_is_said(self) -> None:
        with self.assertRaisesRegex(TimeoutError, "nobody answers"):
            await margay.open_frames("nobody.shop")
        async with await margay.open_frames("work.shop") as server:
            with self.assertRaises(ValueError):
                await server.send(b"", order=256)
        os.environ["MARGAY_PROGRAM"] = "/nowhere/margay"
        with self.assertRaises(FileNotFoundError):
            await margay.open_frames("work.shop")
