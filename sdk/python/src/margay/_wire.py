"""What is said on the program socket: one request message, one reply message, big-endian."""

from __future__ import annotations

import enum
import ipaddress
import struct
from dataclasses import dataclass

VERSION = 1
REQUEST = struct.Struct(">BBBxHH32s16s")
REPLY = struct.Struct(">BBHHH32s16s4s")
# Longest text of a request, in bytes.
TEXT_MAX = 255
# Room for any message that an agent sends, in bytes.
MESSAGE_MAX = 16 * 1024
# The port of a TAKE_OVER by a program that gives its own connections away when it is asked to.
GIVES = 1
# Most that a program says of a socket that it hands over, in bytes.
HANDED_MAX = 1024 * 1024


class Kind(enum.IntEnum):
    """What is asked."""

    NAME = 1
    RESOLVE = 2
    BIND = 3
    SOURCE = 4
    PEER = 5
    EVENTS = 6
    # Comes unasked, after a reply to EVENTS.
    EVENT = 7
    RANGES = 8
    HAND_OVER = 9
    TAKE_OVER = 10
    # Comes unasked, after a reply to TAKE_OVER; and is the request by which a program takes what came.
    HANDED = 11
    # Comes unasked, after a reply to TAKE_OVER whose port was GIVES.
    GIVE = 12
    LOAD = 15
    NEXT = 16
    SPLICE = 75


class Garbled(Exception):
    """A message that is not of the format."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply, one event, or the message that comes with a socket."""

    kind: int
    errno: int
    bits: int
    port: int
    id: bytes
    v6: ipaddress.IPv6Address
    v4: ipaddress.IPv4Address
    text: str


def request(
    kind: Kind,
    *,
    protocol: int = 0,
    port: int = 0,
    bits: int = 0,
    id: bytes = bytes(32),
    address: str = "::",
    text: str = "",
) -> bytes:
    """The message. ValueError if the text is too long."""
    written = text.encode()
    if len(written) > TEXT_MAX:
        raise ValueError(f"the name has {len(written)} bytes; at most {TEXT_MAX} can be asked")
    return REQUEST.pack(VERSION, kind, protocol, port, bits, id, _packed(address)) + written


def target_id(destination: tuple[str, int]) -> bytes:
    """Where a session's first packet goes to, as the id of a request."""
    address, port = destination
    return _packed(address) + port.to_bytes(2) + bytes(14)


def _packed(address: str) -> bytes:
    # A zone (fe80::1%eth0) is the socket's business.
    ip = ipaddress.ip_address(address.partition("%")[0])
    return bytes(10) + b"\xff\xff" + ip.packed if ip.version == 4 else ip.packed


def parse(message: bytes) -> Reply:
    """Reads a message. Garbled says in what it is not the format of version 1."""
    if len(message) < REPLY.size:
        raise Garbled(f"a reply of {len(message)} bytes, where {REPLY.size} are the least")
    if len(message) >= MESSAGE_MAX:
        raise Garbled(f"a message of {MESSAGE_MAX} bytes or more")
    version, kind, errno, bits, port, id, v6, v4 = REPLY.unpack_from(message)
    if version != VERSION:
        raise Garbled(f"version {version} of the program socket, not {VERSION}")
    if bits > 256:
        raise Garbled(f"a prefix of {bits} bits")
    try:
        text = message[REPLY.size :].decode()
    except UnicodeDecodeError:
        raise Garbled("a text that is not UTF-8") from None
    return Reply(kind, errno, bits, port, id, ipaddress.IPv6Address(v6), ipaddress.IPv4Address(v4), text)
