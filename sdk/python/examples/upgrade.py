"""An echo server that numbers the lines of each connection, and is replaced by another one without a client's noticing.
Its connections go on in a server on another host when an operator drains its name on this one, or when that host has
fewer than its share.

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
from typing import Any

import margay

name, *replaced = sys.argv[1:]
# Readable once this server is to end, and hands over what it has.
end, ending = socket.socketpair()
# One for each connection, and its peer: it is written there that the connection is to go to another host, and to which.
orders: dict[socket.socket, tuple[Any, ...]] = {}


def wait_for(*waited: socket.socket | margay.GivingTakeover) -> int:
    """Until there is something to read: of which descriptor. -1: it is time to end, and nothing was read."""
    poll = select.poll()
    for one in (end, *waited):
        poll.register(one, select.POLLIN)
    ready = [fd for fd, _ in poll.poll()]
    return -1 if end.fileno() in ready else ready[0]


def hand_over(sock: margay.Socket, data: bytes = b"", to: str = "") -> None:
    try:
        margay.hand_over(sock, name, data, to=to)
    except margay.Error as error:
        print(error, flush=True)


def accept(listener: margay.Socket) -> None:
    listener.setblocking(False)
    with listener:
        while wait_for(listener) >= 0:
            try:
                conn, _ = listener.accept()
            except BlockingIOError:
                continue
            threading.Thread(target=echo, args=[conn]).start()
        hand_over(listener)


def echo(conn: margay.Socket, count: int = 0, rest: bytes = b"") -> None:
    order, ordering = socket.socketpair()
    with conn, order, ordering:
        orders[ordering] = conn.getpeername()
        while (ready := wait_for(conn, order)) >= 0:
            if ready == order.fileno():
                hand_over(conn, b"%d %s" % (count, rest), order.recv(256)[1:].decode())
                if conn.fileno() < 0:
                    break
                continue
            data = conn.recv(65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            conn.sendall(b"".join(b"%d %s\n" % (count + at, line) for at, line in enumerate(lines, 1)))
            count += len(lines)
        else:
            hand_over(conn, b"%d %s" % (count, rest))
        orders.pop(ordering, None)


def give(asked: margay.Give) -> None:
    """Each connection is given by its own thread, between two requests."""
    for ordering, peer in list(orders.items()):
        # Its connection may have ended meanwhile.
        with contextlib.suppress(OSError):
            if asked.is_for(peer):
                ordering.send(b">" + asked.to.encode())


def take_over(takeover: margay.GivingTakeover) -> None:
    # Whatever comes of the agent, those that are here are served.
    with takeover, contextlib.suppress(margay.AgentDown):
        while wait_for(takeover) >= 0:
            come = next(takeover)
            if isinstance(come, margay.Give):
                give(come)
            elif come.is_listening:
                threading.Thread(target=accept, args=[come.socket]).start()
            else:
                count, _, rest = come.data.partition(b" ")
                threading.Thread(target=echo, args=[come.socket, int(count), rest]).start()


signal.signal(signal.SIGTERM, lambda *_: ending.close())
takeover = margay.take_over_giving(name)
if replaced:
    os.kill(int(replaced[0]), signal.SIGTERM)
else:
    threading.Thread(target=accept, args=[margay.listen(name)]).start()
print(f"serving {name}", flush=True)
take_over(takeover)
