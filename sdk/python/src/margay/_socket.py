"""Sockets by name: the kernel's, and socket.socket in every respect."""

from __future__ import annotations

import enum
import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ._agent import Addresses, Agent, HasFileno, protocol_of
from ._names import ServiceId, Target

# For how long, in seconds, a peer's name is taken for what it was: a burst of datagrams is one question.
PEER_AGE = 1.0
# Peers whose names are remembered, and services that were asked.
PEERS_MAX = 1024
# Connections that may wait for `accept`, unless said otherwise.
BACKLOG = 1024
# How the kernel says that it has no IPv6: not built in, switched off (disable_ipv6), or without the route to the
# virtual addresses.
LACKS_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENETUNREACH)


T = TypeVar("T")


class Own(enum.Enum):
    """The type of OWN."""

    OWN = "own"


OWN: Final = Own.OWN
"""As a source: a name that no other socket has."""


class Peer(tuple[Any, ...]):
    """The other end: the address that this host's kernel knows it by, as sockets give and take it, and its name.

    `service` is the name that it said and may say, or else that of its host; None if nobody vouches for it: the agent
    could not be asked, or the connection is over.
    """

    service: ServiceId | None

    def __new__(cls, address: tuple[Any, ...], service: ServiceId | None) -> Peer:
        """An address with the name of who is there."""
        peer = super().__new__(cls, address)
        peer.service = service
        return peer

    def __str__(self) -> str:
        return str(self.service) if self.service else super().__repr__()


def peer_at(sock: HasFileno, agent: Agent, address: tuple[Any, ...]) -> Peer | None:
    """Who is at an address. None: it came past Margay to the plain address of this host, where nobody asks whether it
    may."""
    try:
        service = agent.peer(sock, address[0], address[1])
        # No network leads to Margay's own addresses: that was a flow, which is over.
        is_past = service is None and not agent.is_virtual(address[0])
    except OSError:
        return Peer(address, None)
    return None if is_past else Peer(address, service)


class PeerNames:
    """Who sends datagrams to one socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[Peer | None, float]] = {}
        # By the address that stands for each: answers come from there, whichever instance sent them.
        self._asked: dict[tuple[str, int], ServiceId] = {}

    def note(self, address: tuple[Any, ...], service: ServiceId) -> None:
        """A service is sent to at an address."""
        with self._lock:
            if len(self._asked) >= PEERS_MAX:
                self._asked.clear()
            self._asked[address[0], address[1]] = service

    def ask(self, sock: HasFileno, agent: Agent, address: tuple[Any, ...]) -> Peer | None:
        """As `peer_at`."""
        known = self.find(address)
        if known is not None:
            return known[0]
        peer = peer_at(sock, agent, address)
        with self._lock:
            if len(self._known) >= PEERS_MAX:
                self._known.clear()
            self._known[address[0], address[1]] = peer, time.monotonic()
        return peer

    def find(self, address: tuple[Any, ...]) -> tuple[Peer | None, float] | None:
        """What was found within the last second, and when."""
        with self._lock:
            service = self._asked.get((address[0], address[1]))
            if service is not None:
                return Peer(address, service), time.monotonic()
            known = self._known.get((address[0], address[1]))
        return known if known is not None and time.monotonic() - known[1] < PEER_AGE else None


def family_of_kernel(type: int) -> int:
    """The family in which this kernel has sockets: IPv6, which serves IPv4, too, if it can be."""
    try:
        socket.socket(socket.AF_INET6, type).close()
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            raise
        return socket.AF_INET
    return socket.AF_INET6


def candidates(sock: socket.socket, addresses: Addresses) -> list[tuple[Any, ...]]:
    """What stands for a name, as a socket's family wants it, in the order in which it is to be tried."""
    v6, v4, port = addresses.v6, addresses.v4, addresses.port
    if sock.family == socket.AF_INET:
        return [(str(v4), port)] if v4 else []
    found: list[tuple[Any, ...]] = [(str(v6), port, 0, 0)] if v6 else []
    if v4:
        found.append((f"::ffff:{v4}", port, 0, 0))
    return found


class Socket(socket.socket):
    """A socket whose addresses may be names: `connect("web.shop")`, `bind("web.shop")`, `sendto(data, "web.shop")`.

    It is the kernel's TCP socket (UDP with `type=SOCK_DGRAM`) and behaves as one wherever a socket.socket is wanted.
    Addresses may also be given as tuples. What asks the agent takes five seconds at most, whatever the socket's
    time-out.
    """

    def __init__(
        self,
        family: int = -1,
        type: int = -1,
        proto: int = -1,
        fileno: int | None = None,
        *,
        agent: Agent | None = None,
    ) -> None:
        if fileno is None and type == -1:
            type = socket.SOCK_STREAM
        if fileno is None and family == -1:
            family = family_of_kernel(type)
        super().__init__(family, type, proto, fileno)
        self.agent: Agent = agent or Agent.shared()
        self._peers = PeerNames()
        if fileno is None and family == socket.AF_INET6:
            # The sysctl bindv6only may say otherwise.
            self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)

    def bind_anywhere(self) -> None:
        """Takes a port of the kernel's choice, at every address of this host, unless the socket has one."""
        if self.getsockname()[1] == 0:
            super().bind(("", 0) if self.family == socket.AF_INET else ("::", 0))

    def bind(self, address: Target | Any) -> None:
        """Serves a name, or all names of a prefix: from `listen` on; for datagrams, from now on. At a port of the
        kernel's choice, unless a tuple was bound before. Denied, Refused: see Agent.bind."""
        if not isinstance(address, Target):
            super().bind(address)
            return
        self.bind_anywhere()
        self.agent.bind(self, address)

    def use_source(self, source: Target | Own = OWN) -> ServiceId:
        """Flows that this socket opens from now on carry this name as their source. Denied: no right to the name."""
        self.bind_anywhere()
        return self.agent.source(self, None if isinstance(source, Own) else source, self.getsockname()[1])

    def connect(self, address: Target | Any) -> None:
        """Connects to a service: to one of its instances, chosen now (for datagrams: with the first one)."""
        if isinstance(address, Target):
            self._try_addresses(address, super().connect)
        else:
            super().connect(address)

    def connect_ex(self, address: Target | Any) -> int:
        """As `connect`, with the number of an error as the result."""
        try:
            self.connect(address)
        except OSError as error:
            return error.errno or errno.ETIMEDOUT
        return 0

    def sendto(self, data: Any, *flags_and_address: Any) -> int:
        """Sends one datagram to a service, or to a peer that one came from: `sendto(data, [flags,] address)`."""
        *before, address = flags_and_address
        flags = before[0] if before else 0
        if not isinstance(address, Target):
            return super().sendto(data, flags, address)
        send, service = super().sendto, self.agent.prefix(address).id

        def send_to(found: tuple[Any, ...]) -> int:
            self._peers.note(found, service)
            return send(data, flags, found)

        return self._try_addresses(address, send_to)

    def _try_addresses(self, target: Target, call: Callable[[tuple[Any, ...]], T]) -> T:
        protocol = protocol_of(self)
        found = candidates(self, self.agent.resolve(target, protocol))
        failure = OSError(errno.EADDRNOTAVAIL, f"{target} has no address that this socket could use")
        for address in found:
            try:
                return call(address)
            except BlockingIOError:
                # Under way, or to be tried again: the caller waits for the socket.
                raise
            except OSError as error:
                failure = error
                if error.errno not in LACKS_FAMILY:
                    break
        self.agent.forget(target, protocol)
        raise failure

    def accept(self) -> tuple[Socket, Peer]:
        """The next connection, and who it is from. Whoever comes to the plain address of this host is turned away:
        there nobody asks whether it may connect."""
        while True:
            plain, address = super().accept()
            with plain:
                peer = peer_at(plain, self.agent, address)
                if peer is not None:
                    timeout = plain.gettimeout()
                    conn = Socket(plain.family, plain.type, plain.proto, plain.detach(), agent=self.agent)
                    conn.settimeout(timeout)
                    return conn, peer

    def recvfrom(self, bufsize: int, flags: int = 0) -> tuple[bytes, Any]:
        """The next datagram, and the Peer that it is from: the service that was asked; of others the name is asked once
        a second, at most. What comes to the plain address of this host is dropped."""
        while True:
            data, address = super().recvfrom(bufsize, flags)
            if not address or (peer := self._peers.ask(self, self.agent, address)) is not None:
                return data, peer if address else address
            self._drop(flags)

    def recvfrom_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> tuple[int, Any]:
        """As `recvfrom`, into a buffer."""
        while True:
            length, address = super().recvfrom_into(buffer, nbytes, flags)
            if not address or (peer := self._peers.ask(self, self.agent, address)) is not None:
                return length, peer if address else address
            self._drop(flags)

    def _drop(self, flags: int) -> None:
        """The datagram that was looked at is still the next one, if it was only looked at."""
        if flags & socket.MSG_PEEK:
            super().recvfrom(0, flags & ~socket.MSG_PEEK)

    def peer_service(self) -> ServiceId | None:
        """The name of the other end of a connection, asked now."""
        host, port = self.getpeername()[:2]
        return self.agent.peer(self, host, port)

    def dup(self) -> Socket:
        """Another descriptor for the same socket. A name is served until all are closed."""
        copy = super().dup()
        copy.agent = self.agent
        return copy

    def plain(self) -> socket.socket:
        """This socket as a socket.socket that knows nothing of names, and takes what comes to the plain address of this
        host, too. This object is closed by it."""
        timeout = self.gettimeout()
        plain = socket.socket(self.family, self.type, self.proto, self.detach())
        plain.settimeout(timeout)
        return plain
