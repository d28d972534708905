#!/usr/bin/env python3
"""A proxy that leaves: it reads the first line of each connection, passes it on with a word of its own in front where
it begins as it must, and makes one connection of the two. From then on nothing passes this host.

    margay run --service gate.shop -- examples/leaving-proxy.py gate.shop web.shop HELLO

`docs/book/leaving.md` says what becomes of the two connections.
"""

from __future__ import annotations

import sys
import threading
from socket import socket

import margay

LINE_MAX = 1024


def first_line(client: socket) -> bytes:
    """Up to its end, and not a byte more than has come with it."""
    heard = b""
    while b"\n" not in heard:
        if len(heard) > LINE_MAX:
            raise ValueError("its first line is too long")
        more = client.recv(LINE_MAX)
        if not more:
            raise ValueError("it has ended without a line")
        heard += more
    return heard


def serve(client: socket, upstream: str, word: bytes) -> None:
    with client:
        try:
            heard = first_line(client)
            if not heard.startswith(word):
                client.sendall(b"not here\n")
                return
            with margay.connect(upstream) as server:
                # All that was read is written before this program leaves, and what it adds, too.
                server.sendall(b"checked " + heard)
                margay.splice(client, server)
        except (OSError, ValueError) as error:
            print(f"leaving-proxy: {error}", file=sys.stderr, flush=True)


def main() -> None:
    name, upstream, word = sys.argv[1:]
    with margay.listen(name) as listener:
        print(f"leaving-proxy: {name} is passed on to {upstream}", flush=True)
        while True:
            client, _ = listener.accept()
            threading.Thread(target=serve, args=(client, upstream, word.encode()), daemon=True).start()


if __name__ == "__main__":
    main()
