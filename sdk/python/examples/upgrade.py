"""An echo server that numbers the lines of each connection, and is replaced by another one without a client's noticing.

Run: python3 upgrade.py echo.shop; and to replace it, with its process ID: python3 upgrade.py echo.shop 4711
Without another one, SIGTERM ends it and its connections.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading

import margay

name, *replaced = sys.argv[1:]
# Readable once this server is to end, and hands over what it has.
end, ending = socket.socketpair()


def wait_for(sock: margay.Socket | margay.Takeover) -> bool:
    """Until there is something to read; False: it is time to end, and nothing was read."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(end, select.POLLIN)
    return all(fd != end.fileno() for fd, _ in poll.poll())


def hand_over(sock: margay.Socket, data: bytes = b"") -> None:
    try:
        margay.hand_over(sock, name, data)
    except margay.Error as error:
        print(error, flush=True)


def accept(listener: margay.Socket) -> None:
    listener.setblocking(False)
    with listener:
        while wait_for(listener):
            try:
                conn, _ = listener.accept()
            except BlockingIOError:
                continue
            threading.Thread(target=echo, args=[conn]).start()
        hand_over(listener)


def echo(conn: margay.Socket, count: int = 0, rest: bytes = b"") -> None:
    with conn:
        while wait_for(conn):
            data = conn.recv(65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            conn.sendall(b"".join(b"%d %s\n" % (count + at, line) for at, line in enumerate(lines, 1)))
            count += len(lines)
        hand_over(conn, b"%d %s" % (count, rest))


def take_over(takeover: margay.Takeover) -> None:
    # Whatever comes of the agent, those that are here are served.
    with takeover, contextlib.suppress(margay.AgentDown):
        while wait_for(takeover):
            taken = next(takeover)
            if taken.is_listening:
                threading.Thread(target=accept, args=[taken.socket]).start()
            else:
                count, _, rest = taken.data.partition(b" ")
                threading.Thread(target=echo, args=[taken.socket, int(count), rest]).start()


signal.signal(signal.SIGTERM, lambda *_: ending.close())
if replaced:
    takeover = margay.take_over(name)
    os.kill(int(replaced[0]), signal.SIGTERM)
    print(f"serving {name}", flush=True)
    take_over(takeover)
else:
    listener = margay.listen(name)
    print(f"serving {name}", flush=True)
    accept(listener)
