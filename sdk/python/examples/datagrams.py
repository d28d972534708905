"""Datagrams by name: a server that answers in upper case, and a client that asks it.

Run: python3 datagrams.py serve shout.shop; python3 datagrams.py ask shout.shop hello
"""

import sys

import margay

match sys.argv[1:]:
    case ["serve", name]:
        with margay.datagrams(name) as sock:
            print(f"serving {name}", flush=True)
            while True:
                data, peer = sock.recvfrom(1500)
                sock.sendto(data.upper(), peer)
    case ["ask", name, text]:
        with margay.datagrams() as sock:
            sock.settimeout(20)
            sock.sendto(text.encode(), name)
            data, peer = sock.recvfrom(1500)
            print(f"{peer}: {data.decode()}")
    case _:
        sys.exit("usage: datagrams.py serve NAME | ask NAME TEXT")
