"""Speaks nonsense to the program socket, and too much of it; says what came of it."""

import array
import json
import os
import random
import socket

PATH = "/run/margay/programs.sock"


def connect():
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(5)
    one.connect(PATH)
    return one


def ask(one, data, passed=()):
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
    one.sendmsg([data], control)
    answer = one.recv(2000)
    return int.from_bytes(answer[2:4], "big") if len(answer) >= 60 else -1


def request(kind, protocol=6, bits=256, text=b""):
    return bytes([1, kind, protocol, 0, 0, 0]) + bits.to_bytes(2, "big") + bytes(48) + text


def main():
    dice = random.Random(1)
    dice_bytes = lambda: bytes(dice.randrange(256) for _ in range(dice.randrange(1, 600)))
    one, asked, done = connect(), 0, 0
    for _ in range(2000):
        asked += 1
        done += ask(one, dice_bytes()) == 0
    with open("/dev/null") as null, socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        pipe = os.pipe()
        for kind in (3, 4, 5):
            for passed in ((), (null.fileno(),), (tcp.fileno(), udp.fileno()), tuple([tcp.fileno()] * 9), (one.fileno(),),
                           (pipe[0],), (udp.fileno(),), (tcp.fileno(),)):
                asked += 1
                done += ask(one, request(kind), passed) == 0
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    held, refused = [], 0
    for _ in range(300):
        try:
            more = connect()
            if ask(more, request(1, text=b"web.shop")) == 0:
                held.append(more)
            else:
                refused += 1
        except OSError:
            refused += 1
    print(json.dumps({"asked": asked, "done": done, "held": len(held), "refused": refused}))


main()
