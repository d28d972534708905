#!/usr/bin/env python3
"""A box that classifies: sessions of the clients that are named go through other boxes next, the rest straight on.

    margay run --middlebox sort.shop --kind forward -- examples/classifying-box.py 10.1.0.0/16 ids.shop

The kernel forwards the packets of sessions as in any box, but for the first one of each: that is dropped there, and let
out by this program when the agent has been told where the session goes next. `docs/book/boxes.md` says more.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import subprocess
import sys

import margay

INTERFACE = "sal0"
TABLE = "sort"
TCP, SYN, ACK = 6, 2, 16
# The kernel keeps the first packets back, as they come by `sal0`; what this program sends does not pass this hook.
RULES = f"""
table inet {TABLE} {{
    chain forward {{
        type filter hook forward priority filter; policy accept;
        iifname "{INTERFACE}" oifname "{INTERFACE}" tcp flags & (syn | ack) == syn drop
    }}
}}
"""


def checksum(pseudo: bytes, segment: bytes) -> int:
    data = pseudo + segment + bytes(len(segment) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Syn:
    """The first packet of a session."""

    def __init__(self, packet: bytes) -> None:
        """ValueError if it is none."""
        is_v4 = packet[0] >> 4 == 4
        head = (packet[0] & 15) * 4 if is_v4 else 40
        if packet[9 if is_v4 else 6] != TCP or len(packet) < head + 20 or packet[head + 13] & (SYN | ACK) != SYN:
            raise ValueError("it begins no session")
        addresses = packet[12:20] if is_v4 else packet[8:40]
        half = len(addresses) // 2
        ports = struct.unpack_from(">HH", packet, head)
        self.source = (str(ipaddress.ip_address(addresses[:half])), ports[0])
        self.destination = (str(ipaddress.ip_address(addresses[half:])), ports[1])
        # What the kernel gives may leave the checksum to a card.
        segment = packet[head : head + 16] + bytes(2) + packet[head + 18 :]
        rest = struct.pack(">HH", TCP, len(segment)) if is_v4 else struct.pack(">II", len(segment), TCP)
        sum_of_all = struct.pack(">H", checksum(addresses + rest, segment))
        self.packet = packet[:head] + segment[:16] + sum_of_all + segment[18:]
        self.ethertype = 0x0800 if is_v4 else 0x86DD


def main() -> None:
    networks = [ipaddress.ip_network(text) for text in sys.argv[1].split(",")]
    boxes = sys.argv[2:]
    subprocess.run(["nft", "-f", "-"], input=RULES, text=True, check=True)
    every = socket.ntohs(0x0003)
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, every) as sal0:
        sal0.bind((INTERFACE, 0x0003))
        print("sorting", flush=True)
        while True:
            packet, (_, _, kind, _, _) = sal0.recvfrom(65536)
            if kind == socket.PACKET_OUTGOING:
                continue
            try:
                syn = Syn(packet)
            except (ValueError, IndexError):
                continue
            client = ipaddress.ip_address(syn.source[0])
            if any(client in network for network in networks if network.version == client.version):
                try:
                    margay.pass_next(boxes, syn.source, syn.destination)
                    print("named", *syn.source, *syn.destination, flush=True)
                except OSError as error:
                    # It goes on as it was to go.
                    print(f"not named: {error}", flush=True)
            sal0.sendto(syn.packet, (INTERFACE, syn.ethertype))


if __name__ == "__main__":
    main()
