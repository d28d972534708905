"""Two programs that talk both ways at a steady pace, and check every byte; `gate.shop` is between them."""

from __future__ import annotations

import json
import sys
import threading
import time
from socket import SHUT_WR, socket

import margay

PIECE = 8192
EVERY_S = 0.004
SECONDS = 6.0
BLOCK = bytes((at * 31 + at // 251) & 255 for at in range(65521))
WORD = b"checked HELLO\n"


def say(sock: socket) -> None:
    at = 0
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        begin = at % len(BLOCK)
        piece = (BLOCK + BLOCK)[begin : begin + PIECE]
        sock.sendall(piece)
        at += len(piece)
        time.sleep(EVERY_S)
    sock.shutdown(SHUT_WR)


def exchange(sock: socket, heard: bytes) -> None:
    """`heard`: what has come already."""
    sender = threading.Thread(target=say, args=(sock,))
    sender.start()
    print("begun", flush=True)
    received = wrong = 0
    error = ""
    try:
        while heard or (heard := sock.recv(65536)):
            begin = received % len(BLOCK)
            wanted = (BLOCK + BLOCK + BLOCK)[begin : begin + len(heard)]
            wrong += sum(a != b for a, b in zip(heard, wanted)) if heard != wanted else 0
            received += len(heard)
            heard = b""
        sender.join()
    except OSError as found:
        error = str(found)
    print(json.dumps({"received": received, "wrong": wrong, "error": error}), flush=True)


def main() -> None:
    if sys.argv[1] == "ask":
        with margay.connect("gate.shop") as sock:
            sock.sendall(b"HELLO\n")
            exchange(sock, b"")
        return
    with margay.listen("web.shop") as listener:
        print("ready", flush=True)
        sock, _ = listener.accept()
        with sock:
            heard = b""
            while len(heard) < len(WORD):
                heard += sock.recv(len(WORD) - len(heard))
            if heard != WORD:
                print(json.dumps({"received": 0, "wrong": len(heard), "error": "another word"}), flush=True)
                return
            exchange(sock, b"")


main()
