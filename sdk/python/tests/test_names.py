"""Values and formats."""

import ipaddress
import struct
import unittest

from margay import Prefix, ServiceId, _wire
from margay._wire import Garbled, Kind


class Names(unittest.TestCase):
    def test_a_service_is_written_with_all_its_digits(self) -> None:
        id = ServiceId(bytes(range(32)))
        self.assertEqual(str(id), "sid:" + bytes(range(32)).hex())
        self.assertEqual((id.authority, id.tail), (bytes(range(8)), bytes(range(12, 32))))
        self.assertEqual(len({id, ServiceId(bytes(range(32)))}), 1)
        with self.assertRaises(ValueError):
            ServiceId(b"short")

    def test_a_prefix_masks_and_contains(self) -> None:
        prefix = Prefix(ServiceId(b"\xff" * 32), 9)
        self.assertEqual(str(prefix), f"sid:ff80{'0' * 60}/9")
        self.assertIn(ServiceId(b"\xff" * 32), prefix)
        self.assertNotIn(ServiceId(bytes(32)), prefix)
        self.assertIn(ServiceId(bytes(32)), Prefix(ServiceId(b"\xff" * 32), 0))
        for bits in (-1, 257):
            with self.assertRaises(ValueError):
                Prefix(ServiceId(bytes(32)), bits)


class Wire(unittest.TestCase):
    def test_a_request_has_its_fields_where_the_format_says(self) -> None:
        message = _wire.request(
            Kind.PEER, protocol=17, port=0x1234, bits=96, id=b"\xab" * 32, address="198.18.1.7", text="a"
        )
        self.assertEqual(message[:8], bytes([1, 5, 17, 0, 0x12, 0x34, 0, 96]))
        self.assertEqual(message[8:40], b"\xab" * 32)
        self.assertEqual(message[40:], bytes(10) + b"\xff\xff" + bytes([198, 18, 1, 7]) + b"a")
        self.assertEqual(_wire.request(Kind.PEER, address="fe80::1%lo")[40:42], b"\xfe\x80")
        with self.assertRaises(ValueError):
            _wire.request(Kind.NAME, text="x" * 256)

    def test_a_reply_is_read_where_the_format_says(self) -> None:
        literal = struct.pack(">BBHHH", 1, 2, 13, 256, 54324) + b"\x07" * 32
        literal += bytes.fromhex("fd5a4c00000000000000000000000009") + bytes([198, 18, 1, 7]) + b"no right"
        reply = _wire.parse(literal)
        self.assertEqual((reply.kind, reply.errno, reply.bits, reply.port), (Kind.RESOLVE, 13, 256, 54324))
        self.assertEqual((reply.id, reply.text), (b"\x07" * 32, "no right"))
        self.assertEqual(reply.v6, ipaddress.IPv6Address("fd5a:4c00::9"))
        self.assertEqual(reply.v4, ipaddress.IPv4Address("198.18.1.7"))
        for at, value in ((0, 2), (5, 1), (60, 0xFF)):
            broken = bytearray(literal)
            broken[at] = value
            with self.assertRaises(Garbled):
                _wire.parse(bytes(broken))
        for length in (0, 59):
            with self.assertRaises(Garbled):
                _wire.parse(literal[:length])
