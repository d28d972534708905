"""Tells each client the address that it is seen by. PROTOCOL PORT ADDRESS..., a socket each; `only6|ADDRESS` takes IPv6 alone,
`mptcp|ADDRESS` is a socket of MPTCP; `card|ADDRESS` is bound to the first card, `unicast|ADDRESS` sends by that card alone,
and `late|ADDRESS` is bound to it by SIGUSR1."""
import select
import signal
import socket
import struct
import sys

CARD = "eth0"
IPPROTO_MPTCP = 262
IP_UNICAST_IF = 50


def open_socket(protocol, port, text):
    kind, _, address = text.rpartition("|")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    way = IPPROTO_MPTCP if kind == "mptcp" else 0
    made = socket.socket(family, socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM, way)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, kind == "only6")
    if protocol == "tcp":
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if kind == "card":
        bind_to_card(made)
    if kind == "unicast":
        made.setsockopt(socket.IPPROTO_IP, IP_UNICAST_IF, struct.pack("!I", socket.if_nametoindex(CARD)))
    made.bind((address, port))
    if protocol == "tcp":
        made.listen(64)
    return made


def bind_to_card(made):
    made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, CARD.encode())


def answer(ready, protocol):
    if protocol == "udp":
        _, peer = ready.recvfrom(2048)
        ready.sendto(peer[0].encode(), peer)
        return
    connection, peer = ready.accept()
    connection.recv(64)
    connection.sendall(peer[0].encode())
    connection.close()


protocol, port = sys.argv[1], int(sys.argv[2])
sockets = [open_socket(protocol, port, text) for text in sys.argv[3:]]
late = [made for made, text in zip(sockets, sys.argv[3:]) if text.startswith("late|")]
signal.signal(signal.SIGUSR1, lambda *_: [bind_to_card(made) for made in late])
while True:
    for ready in select.select(sockets, [], [])[0]:
        answer(ready, protocol)
