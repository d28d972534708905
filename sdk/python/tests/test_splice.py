"""Programs that leave between two connections."""

from __future__ import annotations

import errno
import os
import socket

import margay

from .fake import SPLICE
from .test_sockets import Case


class Splice(Case):
    def pair(self) -> tuple[socket.socket, socket.socket]:
        return self.enterContext(socket.socket()), self.enterContext(socket.socket())

    def splice(self, left: socket.socket, right: socket.socket) -> None:
        margay.splice(left, right, agent=self.agent)

    def test_the_agent_has_both_in_order_and_they_are_closed_here(self) -> None:
        left, right = self.pair()
        inodes = [os.fstat(sock.fileno()).st_ino for sock in (left, right)]
        self.splice(left, right)
        self.assertEqual(self.fake.messages[-1], b"\x01\x4b\x06" + bytes(53))
        self.assertEqual(self.fake.spliced, [inodes])
        self.assertEqual((left.fileno(), right.fileno()), (-1, -1))

    def test_what_is_refused_stays_the_programs(self) -> None:
        left, right = self.pair()
        self.fake.refused[SPLICE] = (errno.ENOTCONN, "the first socket is not connected")
        with self.assertRaises(margay.Refused) as raised:
            self.splice(left, right)
        self.assertEqual(raised.exception.errno, errno.ENOTCONN)
        self.fake.refused[SPLICE] = (errno.EBADMSG, "this is no request")
        with self.assertRaisesRegex(margay.Incompatible, "makes no one connection of two"):
            self.splice(left, right)
        self.assertTrue(min(left.fileno(), right.fileno()) >= 0)
        left.close()
        with self.assertRaises(OSError) as closed:
            self.splice(left, right)
        self.assertEqual(closed.exception.errno, errno.EBADF)
        self.assertTrue(right.fileno() >= 0)

    def test_nobody_relays_where_nobody_can_say_who_does(self) -> None:
        left, right = self.pair()
        self.fake.hangs_up_after.add(SPLICE)
        with self.assertRaises(margay.AgentDown) as raised:
            self.splice(left, right)
        self.assertEqual(raised.exception.errno, errno.ECONNABORTED)
        self.assertEqual((left.fileno(), right.fileno()), (-1, -1))
