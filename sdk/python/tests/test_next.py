"""Programs of boxes that name the boxes that a session goes through next."""

from __future__ import annotations

import errno
import socket

import margay

from .fake import NEXT
from .test_sockets import Case


class Next(Case):
    def ask(self, source: tuple[str, int] = ("10.0.0.7", 40000), protocol: int = socket.IPPROTO_TCP) -> None:
        boxes = ["ids.shop", "fw2.shop"]
        margay.pass_next(boxes, source, ("198.18.0.9", 443), protocol=protocol, agent=self.agent)

    def test_the_request_is_of_the_format(self) -> None:
        self.ask()
        mapped = bytes(10) + b"\xff\xff"
        target = mapped + bytes([198, 18, 0, 9]) + b"\x01\xbb" + bytes(14)
        wanted = b"\x01\x10\x06\0\x9c\x40\0\0" + target + mapped + bytes([10, 0, 0, 7]) + b"ids.shop fw2.shop"
        self.assertEqual(self.fake.messages[-1], wanted)
        self.ask(("fd00::7", 1), socket.IPPROTO_UDP)
        self.assertEqual(self.fake.messages[-1][:8], b"\x01\x10\x11\0\0\x01\0\0")

    def test_refusals_are_said(self) -> None:
        self.fake.refused[NEXT] = (errno.EPERM, "ids.shop is not added: no chain has it")
        with self.assertRaises(margay.Refused) as raised:
            self.ask()
        self.assertEqual(raised.exception.errno, errno.EPERM)
        self.fake.refused[NEXT] = (errno.EBADMSG, "this is no request")
        with self.assertRaisesRegex(margay.Incompatible, "takes no names of next boxes"):
            self.ask()
        with self.assertRaises(ValueError):
            margay.pass_next(["x" * 256], ("10.0.0.7", 1), ("198.18.0.9", 443), agent=self.agent)
