#!/usr/bin/env python3
"""Asks a service router which instance has a name, with nothing but the format in docs/book/wire.md.

    resolve.py ROUTER NAME [--port 80]

NAME is service.authority, service.authority/key:KEY, or sid:HEX. What it does is the first half of a connection: it sends the SYN that a
host's agent would send, the router passes it on to an instance, and the instance answers. It does not prove who the instance is (that
takes the rest of the handshake, and the authority's key), and it leaves the instance with a half-open connection, which ends by itself.
Prints JSON; exit status 0 if an instance answered, 1 if none did, 2 if the arguments make no sense.
"""

import argparse
import ipaddress
import json
import os
import socket
import struct
import sys

PORT = 54324
SYN, SYN_ACK, ERROR = 1, 2, 11
RESOLVABLE, FULL = 0x01, 0x02
SESSION, CAPABILITIES, KEY_EXCHANGE, CERTIFICATE, ERROR_TEXT, COOKIE = 0x02, 0x04, 0x05, 0x86, 0x09, 0x8B
TCP = 6
# A SYN is no smaller than the answers to it: an instance sends no more than it got.
SYN_LEN = 1400
TRIES, WAIT_S = 4, 0.5


def blake3(data):
    """BLAKE3 of at most 64 bytes: one compression of one block."""
    assert len(data) <= 64, "a name has 63 characters at most"
    iv = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]
    order = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
    block = list(struct.unpack("<16I", data.ljust(64, b"\0")))
    # Counter 0, length, and the flags CHUNK_START, CHUNK_END and ROOT.
    state = iv + iv[:4] + [0, 0, len(data), 1 | 2 | 8]

    def mix(a, b, c, d, x, y):
        for more, first, second in ((x, 16, 12), (y, 8, 7)):
            state[a] = (state[a] + state[b] + more) & 0xFFFFFFFF
            state[d] = turn(state[d] ^ state[a], first)
            state[c] = (state[c] + state[d]) & 0xFFFFFFFF
            state[b] = turn(state[b] ^ state[c], second)

    def turn(word, by):
        return (word >> by | word << 32 - by) & 0xFFFFFFFF

    for _ in range(7):
        for column in range(4):
            mix(column, column + 4, column + 8, column + 12, *block[2 * column : 2 * column + 2])
        for column in range(4):
            b, c, d = (column + 1) % 4 + 4, (column + 2) % 4 + 8, (column + 3) % 4 + 12
            mix(column, b, c, d, *block[8 + 2 * column : 10 + 2 * column])
        block = [block[at] for at in order]
    return struct.pack("<8I", *(state[at] ^ state[at + 8] for at in range(8)))


def service_id(name):
    """The 256 bits of a name (docs/book/names.md)."""
    if name.startswith("sid:"):
        return bytes.fromhex(name[4:].ljust(64, "0"))
    head, _, key = name.partition("/key:")
    service, _, authority = head.lower().partition(".")
    if not service or not authority:
        raise ValueError(f"{name} is no name: write service.authority, or sid:HEX")
    tail = blake3(key.encode())[:20] if key else bytes(20)
    return blake3(authority.encode())[:8] + blake3(service.encode())[:4] + tail


def extension(kind, value):
    """Type, zero, length, value, zeros up to a multiple of four."""
    return struct.pack("!BBH", kind, 0, len(value)) + value + bytes(-len(value) % 4)


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def tcp_syn(source_port, port):
    """The packet of the program that wants to connect. Its addresses are the virtual ones of the asking host; the instance writes its own."""
    source, destination = bytes([198, 18, 0, 1]), bytes([198, 18, 0, 2])
    segment = struct.pack("!HHIIBBHHH", source_port, port, 1000, 0, 0x60, 0x02, 64240, 0, 0) + b"\x02\x04\x05\xb4"
    pseudo = source + destination + struct.pack("!BBH", 0, TCP, len(segment))
    segment = segment[:16] + struct.pack("!H", checksum(pseudo + segment)) + segment[18:]
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0x4000, 64, TCP, 0) + source + destination
    return header[:10] + struct.pack("!H", checksum(header)) + header[12:] + segment


class Question:
    """One flow that asks for a name. Sent again, and with the cookie that an instance under load wants, it is the same question."""

    def __init__(self, service, port, client):
        self.service, self.port = service, port
        self.flow, self.nonce, self.session = os.urandom(4), os.urandom(8), os.urandom(16)
        self.host_id, self.association, self.ephemeral = os.urandom(16), os.urandom(4), os.urandom(32)
        address = ipaddress.ip_address(client)
        mapped = address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed
        self.client = mapped + struct.pack("!H", 40000)
        self.cookie = None

    def datagram(self):
        session = self.session + self.client + struct.pack("!HB3x", self.port, TCP)
        # Stacks 1 and 2: direct and encap.
        extensions = extension(SESSION, session) + extension(CAPABILITIES, struct.pack("!IHxx", 6, 1400))
        # The first message of Noise XX is an ephemeral public key.
        extensions += extension(KEY_EXCHANGE, self.host_id + self.association + self.ephemeral)
        if self.cookie:
            extensions += extension(COOKIE, self.cookie)
        hop_limit = struct.pack("!BBH", 16, 0, 0)
        resolvable = hop_limit + bytes(36) + self.service + self.nonce + bytes(8)
        payload = tcp_syn(40000, self.port)
        lengths = struct.pack("!HH", 20 + len(resolvable) + len(extensions), len(payload))
        header = struct.pack("!BBBB", 1, SYN, RESOLVABLE | FULL, 4) + lengths + bytes(4) + self.flow + bytes(4)
        return (header + resolvable + extensions + payload).ljust(SYN_LEN, b"\0")


def address_of(packed):
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)


def read(datagram):
    """The header, the resolvable part and the extensions of a message; None if it is none."""
    if len(datagram) < 20 or datagram[0] != 1:
        return None
    kind, flags = datagram[1], datagram[2]
    header_len, payload_len = struct.unpack("!HH", datagram[4:8])
    at = 108 if flags & RESOLVABLE else 20
    if not at <= header_len <= len(datagram) - payload_len:
        return None
    message = {"type": kind, "to": datagram[8:12], "extensions": {}}
    if flags & RESOLVABLE and datagram[21] & 2:
        message["via"] = address_of(datagram[44:60])
    while at + 4 <= header_len:
        extension_type, length = datagram[at], struct.unpack("!H", datagram[at + 2 : at + 4])[0]
        message["extensions"][extension_type] = datagram[at + 4 : at + 4 + length]
        at += 4 + length + -length % 4
    message["packet"] = datagram[header_len : header_len + payload_len]
    return message


def certificates(chain):
    """For each certificate of a chain: its prefix, the host's key, and its end.

    The format: crates/margay-core/src/trust/certificate.rs."""
    found, at = [], 4
    for _ in range(chain[0] if chain else 0):
        length = struct.unpack("!H", chain[at : at + 2])[0]
        one = chain[at + 2 : at + 2 + length]
        bits, end = struct.unpack("!H", one[2:4])[0], struct.unpack("!Q", one[76:84])[0]
        found.append({"prefix": f"sid:{one[4:36].hex()}/{bits}", "host_key": one[36:68].hex(), "not_after_unix_s": end})
        at += 2 + length
    return found


def ask(router, question):
    """Sends the question until somebody answers; None if nobody does."""
    family = socket.AF_INET6 if ":" in router else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as door:
        door.settimeout(WAIT_S)
        for _ in range(TRIES):
            door.sendto(question.datagram(), (router, PORT))
            try:
                while True:
                    datagram, sender = door.recvfrom(65535)
                    message = read(datagram)
                    if message is None or message["to"] != question.flow:
                        continue
                    if message["type"] == ERROR and COOKIE in message["extensions"]:
                        question.cookie = message["extensions"][COOKIE]
                        break
                    if message["type"] in (SYN_ACK, ERROR):
                        return message, sender[0]
            except TimeoutError:
                continue
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("router", type=lambda text: str(ipaddress.ip_address(text)))
    parser.add_argument("name", type=service_id)
    parser.add_argument("--port", type=int, default=80)
    given = parser.parse_args()
    found = ask(given.router, Question(given.name, given.port, "192.0.2.1"))
    if found is None:
        print(json.dumps({"service_id": given.name.hex(), "error": "no answer"}))
        return 1
    message, sender = found
    extensions = message["extensions"]
    # What a router relays says whom it is from; what comes straight is from the instance itself.
    reply = {"service_id": given.name.hex(), "instance": message.get("via", sender), "relayed": "via" in message}
    if ERROR_TEXT in extensions:
        reply["error"] = struct.unpack("!H", extensions[ERROR_TEXT][:2])[0]
    if KEY_EXCHANGE in extensions:
        reply["host_id"] = extensions[KEY_EXCHANGE][:16].hex()
    reply["certificates"] = certificates(extensions.get(CERTIFICATE, b""))
    packet = message["packet"]
    # The listener's own answer: SYN and ACK.
    reply["accepts"] = len(packet) >= 34 and packet[0] == 0x45 and packet[33] & 0x12 == 0x12
    print(json.dumps(reply))
    return 0 if reply["accepts"] else 1


if __name__ == "__main__":
    sys.exit(main())
