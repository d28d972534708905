"""The same for asyncio. What asks the agent runs in a thread, so that the loop never waits for it."""

from __future__ import annotations

import asyncio
import collections
import errno
import functools
import os
import socket
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from ._agent import Agent, protocol_of
from ._calls import hand_over
from ._names import ServiceId, Target
from ._socket import BACKLOG, LACKS_FAMILY, Own, Peer, PeerNames, Socket, candidates, peer_at
from ._takeover import Takeover

T = TypeVar("T")
DATAGRAM_MAX = 65535


async def open_connection(
    target: Target, *, source: Target | Own | None = None, agent: Agent | None = None, **options: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """asyncio.open_connection by a service's name; `options` are those of it (`limit`, `ssl`, `server_hostname`, …).

    Raises as `connect` does.
    """
    sock = await _connected(socket.SOCK_STREAM, target, source, agent)
    try:
        return await asyncio.open_connection(sock=sock, **options)
    except BaseException:
        sock.close()
        raise


async def start_server(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None],
    target: Target | Socket,
    *,
    backlog: int = BACKLOG,
    agent: Agent | None = None,
    **options: Any,
) -> asyncio.Server:
    """asyncio.start_server that serves a name, or all names of a prefix; `options` are those of it. In the handler,
    `await margay.peer_service(writer)` says who is there. Whoever comes to the plain address of this host is turned
    away before. Instead of a name it may be given a listening socket, as one that was taken over: that object is closed
    by it, and the server has the socket.

    Raises as `listen` does.
    """
    if isinstance(target, Socket):
        asked = agent or target.agent
        sock = target.plain()
    else:
        asked = agent or Agent.shared()
        sock = await _bound(socket.SOCK_STREAM, target, None, agent)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await _came_past(writer, asked):
            writer.close()
            return
        handling = handler(reader, writer)
        if handling is not None:
            await handling

    try:
        return await asyncio.start_server(handle, sock=sock, backlog=backlog, **options)
    except BaseException:
        sock.close()
        raise


async def peer_service(
    transport: asyncio.StreamWriter | asyncio.BaseTransport, *, agent: Agent | None = None
) -> ServiceId | None:
    """The name of the other end of a connection, asked now: what it said and may say, or else that of its host. None
    where it did not come by way of Margay.

    Raises AgentDown, Incompatible, Refused; OSError(ENOTCONN) where the connection is over.
    """
    sock, address = transport.get_extra_info("socket"), transport.get_extra_info("peername")
    if sock is None or sock.fileno() < 0 or not address:
        raise OSError(errno.ENOTCONN, "the connection is over")
    return await _off(sock, (agent or Agent.shared()).peer, address[0], address[1])


async def _came_past(writer: asyncio.StreamWriter, agent: Agent) -> bool:
    sock, address = writer.get_extra_info("socket"), writer.get_extra_info("peername")
    if sock.fileno() < 0 or not address:
        # It is over; the handler will see.
        return False
    return await _off(sock, peer_at, agent, address) is None


class AsyncDatagrams:
    """Datagrams for coroutines: to any service, each to an instance chosen for it; with a name, also from anybody."""

    def __init__(self, sock: socket.socket, agent: Agent) -> None:
        self.socket = sock
        """The kernel's socket."""
        self._agent = agent
        self._names = PeerNames()
        self._left_over: collections.deque[tuple[bytes, Any]] = collections.deque()

    async def sendto(self, data: bytes, address: Target | Peer | tuple[Any, ...]) -> int:
        """Sends one datagram to a service, or answers a Peer. Returns its length."""
        loop = asyncio.get_running_loop()
        if not isinstance(address, Target):
            return await loop.sock_sendto(self.socket, data, tuple(address))
        target = address

        async def send_to(found: tuple[Any, ...]) -> int:
            # It was resolved a moment ago, so that nobody need be asked.
            self._names.note(found, self._agent.prefix(target).id)
            return await loop.sock_sendto(self.socket, data, found)

        return await _try_addresses(self.socket, self._agent, target, send_to)

    async def recvfrom(self, size: int = DATAGRAM_MAX) -> tuple[bytes, Peer]:
        """The next datagram, and who it is from: the service that was asked; of others the name is asked once a second,
        at most. What comes to the plain address of this host is dropped. A call that is cancelled loses no datagram."""
        while True:
            if self._left_over:
                data, address = self._left_over.popleft()
            else:
                data, address = await asyncio.get_running_loop().sock_recvfrom(self.socket, size)
            known = self._names.find(address)
            try:
                peer = known[0] if known else await _off(self.socket, self._names.ask, self._agent, address)
            except BaseException:
                self._left_over.append((data, address))
                raise
            if peer is not None:
                return data, peer

    def close(self) -> None:
        """A bound name is served no longer."""
        self.socket.close()

    async def __aenter__(self) -> AsyncDatagrams:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def open_datagrams(
    target: Target | None = None, *, source: Target | Own | None = None, agent: Agent | None = None
) -> AsyncDatagrams:
    """Datagrams for coroutines; with a name, it is served. Raises as `listen` does."""
    agent = agent or Agent.shared()
    return AsyncDatagrams(await _bound(socket.SOCK_DGRAM, target, source, agent), agent)


async def create_datagram_endpoint(
    protocol: Callable[[], Any],
    target: Target | None = None,
    *,
    remote: Target | None = None,
    source: Target | Own | None = None,
    agent: Agent | None = None,
) -> tuple[asyncio.DatagramTransport, Any]:
    """create_datagram_endpoint of a loop, which serves the name `target`, or is connected to the service `remote`. What
    comes to the plain address of this host comes to a served name's protocol, too. Raises as `listen` and `connect`
    do."""
    if remote is not None:
        if target is not None:
            raise ValueError("a socket serves a name (target), or is connected to one (remote), not both")
        sock: socket.socket = await _connected(socket.SOCK_DGRAM, remote, source, agent)
    else:
        sock = await _bound(socket.SOCK_DGRAM, target, source, agent)
    try:
        return await asyncio.get_running_loop().create_datagram_endpoint(protocol, sock=sock)
    except BaseException:
        sock.close()
        raise


async def hand_over_async(
    sock: socket.socket, name: Target | None = None, data: bytes = b"", *, to: str = "", agent: Agent | None = None
) -> None:
    """As `hand_over`. Nothing may be waiting for the socket then. To give that of a transport: `pause_reading()`; wait
    until it has written all; give `get_extra_info("socket").dup()`; and, when that is done, `abort()`.

    A cancellation takes effect once the outcome is known: `sock.fileno()` is -1 if the socket is not the caller's any
    more.
    """
    work = functools.partial(hand_over, sock, name, data, to=to, agent=agent)
    asking = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not asking.done():
        try:
            await asyncio.wait([asking])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # It was looked at.
        asking.exception()
        raise cancelled
    asking.result()


async def open_takeover(name: Target, *, agent: Agent | None = None) -> Takeover:
    """As `take_over`, for `async for`."""
    return await Takeover(name, agent).__aenter__()


async def _off(sock: Any, call: Callable[..., T], *args: Any) -> T:
    """Calls with a socket in a thread. Who is cancelled may close the socket at once, so that the thread has a
    descriptor of its own: the number of the first may be another file's by then."""
    copy = socket.socket(fileno=os.dup(sock.fileno()))

    def work() -> T:
        with copy:
            return call(copy, *args)

    return await asyncio.to_thread(work)


def _source_of(source: Target | Own) -> Target | None:
    return None if isinstance(source, Own) else source


async def _bound(type: int, target: Target | None, source: Target | Own | None, agent: Agent | None) -> socket.socket:
    """A plain socket: asyncio's own calls of `accept` and `recvfrom` shall not wait for the agent."""
    sock = Socket(type=type, agent=agent)
    try:
        sock.setblocking(False)
        sock.bind_anywhere()
        if source is not None:
            await _off(sock, sock.agent.source, _source_of(source), sock.getsockname()[1])
        if target is not None:
            await _off(sock, sock.agent.bind, target)
        return sock.plain()
    except BaseException:
        sock.close()
        raise


async def _connected(type: int, target: Target, source: Target | Own | None, agent: Agent | None) -> socket.socket:
    agent = agent or Agent.shared()
    sock = await _bound(type, None, source, agent) if source is not None else _unbound(type, agent)
    try:
        loop = asyncio.get_running_loop()
        await _try_addresses(sock, agent, target, lambda to: loop.sock_connect(sock, to))
        return sock
    except BaseException:
        sock.close()
        raise


def _unbound(type: int, agent: Agent) -> socket.socket:
    sock = Socket(type=type, agent=agent)
    sock.setblocking(False)
    return sock.plain()


async def _try_addresses(
    sock: socket.socket, agent: Agent, target: Target, call: Callable[[tuple[Any, ...]], Awaitable[T]]
) -> T:
    protocol = protocol_of(sock)
    addresses = agent.known(target, protocol)
    if addresses is None:
        addresses = await asyncio.to_thread(agent.resolve, target, protocol)
    failure = OSError(errno.EADDRNOTAVAIL, f"{target} has no address that this socket could use")
    for address in candidates(sock, addresses):
        try:
            return await call(address)
        except OSError as error:
            failure = error
            if error.errno not in LACKS_FAMILY:
                break
    agent.forget(target, protocol)
    raise failure
