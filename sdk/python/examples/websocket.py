"""A WebSocket server that numbers the messages of each connection and sends them back.

Its connections go on in a server on another host when an operator drains its name on this one, or when that host has
fewer than its share: no client connects anew. The protocol is that of the package `websockets`.

Run on each host: python3 websocket.py chat.shop. With a port, as python3 websocket.py chat.shop 81, it listens there,
and `margay run`, `margay enable` or `margay service publish` serve the name.
"""

import asyncio
import contextlib
import socket
import struct
import sys
from typing import Any

import margay
from websockets.connection import State
from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.server import ServerConnection

name, *ports = sys.argv[1:]
connections: set["Connection"] = set()


def frame_length(data: bytes) -> int | None:
    """Of the frame of a client that `data` begins with; None: it is not whole."""
    if len(data) < 2:
        return None
    short = data[1] & 127
    form = {126: "!H", 127: "!Q"}.get(short)
    head = 2 + 4 + (struct.calcsize(form) if form else 0)
    if len(data) < head:
        return None
    length = head + (struct.unpack_from(form, data, 2)[0] if form else short)
    return length if len(data) >= length else None


class Connection:
    def __init__(self, sock: socket.socket, count: int | None = None, rest: bytes = b"") -> None:
        """Without a count the client has not asked for a WebSocket yet."""
        sock.setblocking(False)
        self.sock, self.count, self.rest = sock, count or 0, rest
        self.peer: tuple[Any, ...] = sock.getpeername()
        self.protocol = ServerConnection(state=State.CONNECTING if count is None else State.OPEN)
        self.woken = asyncio.Event()
        # The host that the connection is to go to.
        self.host: str | None = None

    def move(self, host: str) -> None:
        self.host = host
        self.woken.set()

    async def serve(self) -> None:
        connections.add(self)
        try:
            await self.answer(b"")
            while self.protocol.state is not State.CLOSED and self.sock.fileno() >= 0:
                if self.host is not None and self.protocol.state is State.OPEN:
                    await self.give(self.host)
                    continue
                await self.wake()
                try:
                    data = self.sock.recv(65536)
                except BlockingIOError:
                    continue
                if not data:
                    break
                await self.answer(data)
        except OSError as error:
            print(error, flush=True)
        finally:
            connections.discard(self)
            self.sock.close()

    async def wake(self) -> None:
        """Until there is something to read, or to do."""
        loop, fd = asyncio.get_running_loop(), self.sock.fileno()
        loop.add_reader(fd, self.woken.set)
        try:
            await self.woken.wait()
        finally:
            loop.remove_reader(fd)
        self.woken.clear()

    async def answer(self, data: bytes) -> None:
        """The protocol gets whole frames only, so that `rest` is all that the next server has to know of the last."""
        if self.protocol.state is State.CONNECTING:
            self.protocol.receive_data(data)
        else:
            self.rest += data
            while length := frame_length(self.rest):
                self.protocol.receive_data(self.rest[:length])
                self.rest = self.rest[length:]
        for event in self.protocol.events_received():
            if isinstance(event, Request):
                self.protocol.send_response(self.protocol.accept(event))
            elif event.opcode is Opcode.TEXT and event.fin:
                self.count += 1
                self.protocol.send_text(b"%d %s" % (self.count, event.data))
        for part in self.protocol.data_to_send():
            if part:
                await asyncio.get_running_loop().sock_sendall(self.sock, part)
            else:
                self.sock.shutdown(socket.SHUT_WR)

    async def give(self, host: str) -> None:
        """All answers are with the kernel now, and go with the socket."""
        self.host = None
        try:
            await margay.hand_over_async(self.sock, name, b"%d %s" % (self.count, self.rest), to=host)
        except margay.Error as error:
            # If nobody has taken it, it goes on here.
            print(error, flush=True)


async def accept(listener: socket.socket) -> None:
    listener.setblocking(False)
    while True:
        conn, _ = await asyncio.get_running_loop().sock_accept(listener)
        asyncio.create_task(Connection(conn).serve())


async def main() -> None:
    takeover = margay.take_over_giving(name)
    listener = socket.create_server(("", int(ports[0]))) if ports else margay.listen(name)
    accepting = asyncio.create_task(accept(listener))
    print(f"serving {name}", flush=True)
    # Whatever comes of the agent, those that are here are served.
    with contextlib.suppress(margay.AgentDown):
        async for come in takeover:
            if isinstance(come, margay.Give):
                for connection in list(connections):
                    if come.is_for(connection.peer):
                        connection.move(come.to)
            else:
                count, _, rest = come.data.partition(b" ")
                asyncio.create_task(Connection(come.socket, int(count), rest).serve())
    await accepting


asyncio.run(main())
