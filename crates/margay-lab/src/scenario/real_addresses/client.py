"""Asks a server, by each of the addresses of a name, which address it sees: NAME PORT PROTOCOL [WAY]. An answer a line, or the
number of the error. WAY: `card`, by sockets that are bound to the first card; `unicast`, by sockets that send by it alone."""
import socket
import struct
import sys

CARD = "eth0"
IP_UNICAST_IF = 50
IPV6_UNICAST_IF = 76
LIMIT_S = 10

name, port, protocol, way = sys.argv[1], int(sys.argv[2]), sys.argv[3], (sys.argv[4:] or [""])[0]
kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM


def prepare(asking, family):
    asking.settimeout(LIMIT_S)
    if way == "card":
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, CARD.encode())
    if way == "unicast":
        index = struct.pack("!I", socket.if_nametoindex(CARD))
        if family == socket.AF_INET:
            asking.setsockopt(socket.IPPROTO_IP, IP_UNICAST_IF, index)
        else:
            asking.setsockopt(socket.IPPROTO_IPV6, IPV6_UNICAST_IF, index)


def ask(family, address):
    with socket.socket(family, kind) as asking:
        prepare(asking, family)
        asking.connect(address)
        # nginx wants a request; the others take any word.
        asking.sendall(b"GET / HTTP/1.0\r\n\r\n")
        said = b""
        while chunk := asking.recv(2048):
            said += chunk
            if protocol == "udp":
                break
    return said.decode().split("\r\n\r\n")[-1].strip()


for family in (socket.AF_INET, socket.AF_INET6):
    address = socket.getaddrinfo(name, port, family, kind)[0][4]
    try:
        print(ask(family, address))
    except OSError as error:
        # A time-out has no number.
        print(error.errno)
