"""Framed sockets, over a process that speaks as `margay ensemble socket` does."""

from __future__ import annotations

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
import socket, struct, sys
def message(kind, value=b""):
    return struct.pack(">I", 1 + len(value)) + kind + value
stream = socket.socket(fileno=0)
what, name = sys.argv[3:5]
if name == "nobody.shop":
    stream.sendall(message(b"E", struct.pack(">i", {timed_out}) + b"nobody answers"))
    sys.exit()
stream.sendall(message(b"O"))
if what == "listen":
    ours, theirs = socket.socketpair()
    socket.send_fds(stream, [message(b"A", " ".join(sys.argv[5:]).encode())], [theirs.fileno()])
    theirs.close()
    ours.sendall(message(b"F", struct.pack(">BHIB", 2, 0, 9, 1) + b"khello"))
    stream = ours
reader = stream.makefile("rb")
while len(head := reader.read(4)) == 4:
    body = reader.read(struct.unpack(">I", head)[0])
    flags, order, number, key_size = struct.unpack_from(">BHIB", body, 1)
    if body.endswith(b"lose"):
        stream.sendall(message(b"L", struct.pack(">I", 1)))
    else:
        stream.sendall(message(b"F", body[1:]))
"""


class FramedSockets(unittest.TestCase):
    def setUp(self) -> None:
        directory = self.enterContext(tempfile.TemporaryDirectory())
        path = Path(directory, "margay")
        path.write_text(PROGRAM.format(python=sys.executable, timed_out=errno.ETIMEDOUT))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        before = os.environ.get("MARGAY_PROGRAM")
        os.environ["MARGAY_PROGRAM"] = str(path)
        self.addCleanup(lambda: os.environ.pop("MARGAY_PROGRAM") if before is None else None)

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
            self.assertEqual(who, "--as first")
            with client:
                hello = client.recv()
                assert isinstance(hello, margay.Frame)
                self.assertEqual((hello.data, hello.key, hello.number, hello.wants_answer), (b"hello", b"k", 9, True))
                client.answer(hello, b"yes")
                said = client.recv()
                assert isinstance(said, margay.Frame)
                self.assertEqual((said.data, said.is_answer, said.number), (b"yes", True, 9))
                self.assertEqual(client.send(b"unasked"), 0)

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
