"""The agent of this host, as a program asks it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol as Interface

from ._errors import AgentDown, Incompatible, Refused
from ._names import Name, Prefix, ServiceId, Target
from ._wire import GIVES, HANDED_MAX, MESSAGE_MAX, Garbled, Kind, Reply, parse, request, target_id

DEFAULT_PATH = "/run/margay/programs.sock"
"""Where an agent listens for programs, unless MARGAY_PROGRAMS names another place."""

# An agent that takes longer than this for an answer, in seconds, is treated as absent.
ANSWER_TIME = 5
# The same where a socket is handed over, maybe to another host: the agent answers before.
GIVE_TIME = 45
# A host's own virtual addresses, unless it has others. All virtual ones begin with the first 15 bits of the one, or the
# first 32 of the other.
USUAL = (ipaddress.IPv4Address("198.18.0.1"), ipaddress.IPv6Address("fd5a:4c00::1"))
# Requests at one time, each on a connection of its own; others wait. An agent has so many connections for each user.
AT_ONCE_MAX = 8
# The same of those who hand over sockets: with another host each takes several round trips.
GIVING_AT_ONCE_MAX = 32
# Connections that are kept open for the next request.
IDLE_MAX = 4
# No name is said: the agent finds that of a socket by its flow, and makes one for a source.
NO_NAME = Prefix(ServiceId(bytes(32)), 0)
# Names and addresses that are remembered.
KNOWN_MAX = 256
# How long an address is remembered, in seconds: as long as the agent's answers by DNS hold. An agent gives the address
# of a name that is idle to another only after an hour.
ADDRESS_AGE = 30.0


class HasFileno(Interface):
    """A socket, or what stands for one."""

    @property
    def type(self) -> int:
        """SOCK_STREAM or SOCK_DGRAM."""

    def fileno(self) -> int:
        """The descriptor."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """What stands for a name on this host: virtual addresses, and the port that means the service."""

    v6: ipaddress.IPv6Address | None
    v4: ipaddress.IPv4Address | None
    port: int


def protocol_of(sock: HasFileno) -> int:
    """The number of a socket's transport, as in the IP header."""
    return socket.IPPROTO_UDP if sock.type == socket.SOCK_DGRAM else socket.IPPROTO_TCP


class Agent:
    """The agent of this host. Any number of threads may share one; processes that fork may go on using theirs.

    Connections are opened when there is something to ask, and opened anew after the agent was restarted. Every request
    ends within five seconds. All may raise AgentDown, Incompatible and Refused.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path: str = os.fspath(path or os.environ.get("MARGAY_PROGRAMS") or DEFAULT_PATH)
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(AT_ONCE_MAX)
        # Those who hand over sockets have turns of their own: they may take long.
        self._giving = threading.BoundedSemaphore(GIVING_AT_ONCE_MAX)
        self._idle: list[tuple[tuple[int, int, int], socket.socket]] = []
        self._names: dict[str, Name] = {}
        self._addresses: dict[tuple[Prefix, int], tuple[Addresses, float]] = {}
        # That by which loads are reported: what was reported holds until it is closed.
        self._reporting: tuple[tuple[int, int, int], socket.socket] | None = None
        self._report_turn = threading.Lock()
        _agents.add(self)

    @staticmethod
    def shared() -> Agent:
        """The agent that this process uses where none is named."""
        global _shared
        _shared = _shared or Agent()
        return _shared

    def name(self, written: str) -> Name:
        """What the agent reads in a written name. Refused with EINVAL if it is none."""
        with self._lock:
            known = self._names.get(written)
        if known is not None:
            return known
        try:
            message = request(Kind.NAME, text=written)
        except ValueError as error:
            raise Refused(errno.EINVAL, str(error)) from None
        reply = self._ask("the name", Kind.NAME, message)
        name = Name(Prefix(ServiceId(reply.id), reply.bits), reply.text)
        with self._lock:
            while len(self._names) >= KNOWN_MAX:
                del self._names[next(iter(self._names))]
            self._names[written] = name
        return name

    def prefix(self, target: Target) -> Prefix:
        """The bits of what stands for a service."""
        return self._prefix_and_text(target)[0]

    def _prefix_and_text(self, target: Target) -> tuple[Prefix, str]:
        known = self.name(target) if isinstance(target, str) else target
        return _prefix_of(known), known.written if isinstance(known, Name) else ""

    def resolve(self, target: Target, protocol: int = socket.IPPROTO_TCP) -> Addresses:
        """The addresses that stand for a name on this host; a prefix names its first serviceID. They are remembered for
        30 seconds."""
        known = self.known(target, protocol)
        if known is not None:
            return known
        prefix = self.prefix(target)
        message = request(Kind.RESOLVE, protocol=protocol, bits=prefix.bits, id=prefix.id.raw)
        reply = self._ask("to resolve the name", Kind.RESOLVE, message)
        # A name that has no address of its own in IPv6 has the other one, mapped.
        v6 = None if reply.v6.is_unspecified or reply.v6.ipv4_mapped else reply.v6
        v4 = None if reply.v4.is_unspecified else reply.v4
        if reply.port == 0 or (v6 is None and v4 is None):
            raise Incompatible.at(self.path, "an answer without an address or a port")
        addresses = Addresses(v6, v4, reply.port)
        with self._lock:
            # The oldest come first.
            self._addresses.pop((prefix, protocol), None)
            while len(self._addresses) >= KNOWN_MAX:
                del self._addresses[next(iter(self._addresses))]
            self._addresses[prefix, protocol] = addresses, time.monotonic()
        return addresses

    def known(self, target: Target, protocol: int) -> Addresses | None:
        """What `resolve` remembers, without asking."""
        with self._lock:
            if isinstance(target, str):
                if target not in self._names:
                    return None
                target = self._names[target]
            prefix = _prefix_of(target)
            addresses, since = self._addresses.get((prefix, protocol), (None, -ADDRESS_AGE))
        return addresses if time.monotonic() - since < ADDRESS_AGE else None

    def forget(self, target: Target, protocol: int) -> None:
        """What was remembered may be why a connect failed."""
        prefix = self.prefix(target)
        with self._lock:
            self._addresses.pop((prefix, protocol), None)

    def bind(self, sock: HasFileno, target: Target) -> None:
        """`sock` serves a name, or all names of a prefix, from the moment it listens (UDP: is bound) until it is closed
        by all who have it. Denied: no right to the name. Refused with EADDRINUSE: another name has the same bits, or an
        exclusive name is taken."""
        prefix, written = self._prefix_and_text(target)
        message = request(Kind.BIND, protocol=protocol_of(sock), bits=prefix.bits, id=prefix.id.raw, text=written)
        self._ask("to let this program serve the name", Kind.BIND, message, sock)

    def source(self, sock: HasFileno, target: Target | None, port: int) -> ServiceId:
        """Flows that `sock` opens from now on carry this name as their source; None gives it a name that no other
        socket has. `port` is its local port. Denied: no right to the name."""
        prefix, written = (NO_NAME, "") if target is None else self._prefix_and_text(target)
        message = request(
            Kind.SOURCE, protocol=protocol_of(sock), port=port, bits=prefix.bits, id=prefix.id.raw, text=written
        )
        return ServiceId(self._ask("the source name", Kind.SOURCE, message, sock).id)

    def peer(self, sock: HasFileno, host: str, port: int) -> ServiceId | None:
        """The name of the peer that `sock` knows by this address: what it said and may say, or else that of its host.
        None where the connection, or the datagram, did not come by way of Margay."""
        message = request(Kind.PEER, protocol=protocol_of(sock), port=port, address=host)
        try:
            return ServiceId(self._ask("to say who the peer is", Kind.PEER, message, sock).id)
        except Refused as error:
            if error.errno == errno.ENOTCONN:
                return None
            raise

    def is_virtual(self, host: str) -> bool:
        """Whether an address belongs to Margay's own ranges on this host."""
        try:
            reply = self._ask("for the virtual addresses", Kind.RANGES, request(Kind.RANGES))
            own = USUAL if reply.v4.is_unspecified else (reply.v4, reply.v6)
        except Refused:
            # An agent that does not know the question has the usual ones.
            own = USUAL
        ip = ipaddress.ip_address(host.partition("%")[0])
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        networks = (ipaddress.ip_network(f"{one}/{bits}", strict=False) for one, bits in zip(own, (15, 32)))
        return any((mapped or ip) in network for network in networks)

    def subscribe(self) -> socket.socket:
        """A connection on which the agent tells of events from now on."""
        return self._subscribed("events", Kind.EVENTS, request(Kind.EVENTS))

    def report_load(self, target: Target, percent: int) -> None:
        """Says how much of its weight this process is to keep for a name. See margay.report_load."""
        if not 0 <= percent <= 100:
            raise ValueError(f"{percent} % of a weight cannot stay: 0 to 100 can")
        prefix = self.prefix(target)
        message = request(Kind.LOAD, port=percent, bits=prefix.bits, id=prefix.id.raw)
        if not self._report_turn.acquire(timeout=ANSWER_TIME):
            raise AgentDown.at(self.path, TimeoutError(errno.ETIMEDOUT, "no answer to those who asked before"))
        try:
            self._report(_owner(), message)
        finally:
            self._report_turn.release()

    def _report(self, owner: tuple[int, int, int], message: bytes) -> None:
        kept, self._reporting = self._reporting, None
        try:
            connection, answer = self._exchange_on(kept, owner, message)
        except OSError as error:
            raise self._explained(error) from None
        try:
            self._check("a report of load", Kind.LOAD, answer)
        except Incompatible:
            connection.close()
            raise
        except Refused as refused:
            self._reporting = owner, connection
            if refused.errno == errno.EBADMSG:
                # It does not know the question.
                why = "it is of an earlier release, and takes no reports of load"
                raise Incompatible.at(self.path, why) from None
            raise
        self._reporting = owner, connection

    def _exchange_on(
        self, kept: tuple[tuple[int, int, int], socket.socket] | None, owner: tuple[int, int, int], message: bytes
    ) -> tuple[socket.socket, bytes]:
        if kept is not None:
            opened_by, connection = kept
            try:
                if opened_by == owner:
                    return connection, self._converse(connection, message, None)
            except TimeoutError:
                connection.close()
                raise
            except OSError:
                # Left open by an agent that died; a report may be repeated.
                pass
            except BaseException:
                connection.close()
                raise
            connection.close()
        connection = self._open()
        try:
            return connection, self._converse(connection, message, None)
        except BaseException:
            connection.close()
            raise

    def take_over(self, target: Target, gives: bool = False) -> socket.socket:
        """A connection on which sockets of a name, or of all names of a prefix, come from now on, until it is closed.
        Denied: no right to the name. Refused with EUSERS: 64 processes of this user take over names already. If this
        process `gives`, it is told there which connections of its own it is to give to other hosts."""
        prefix = self.prefix(target)
        port = GIVES if gives else 0
        message = request(Kind.TAKE_OVER, port=port, bits=prefix.bits, id=prefix.id.raw)
        return self._subscribed("to let this program take over the name", Kind.TAKE_OVER, message)

    def hand_over(self, sock: socket.socket, target: Target | None, data: bytes = b"", to: str = "") -> Prefix:
        """Gives `sock` to another process, and returns the name by which it went. See margay.hand_over."""
        if len(data) > HANDED_MAX:
            raise ValueError(f"{len(data)} bytes go with the socket; at most {HANDED_MAX} can")
        if sock.fileno() < 0:
            raise OSError(errno.EBADF, "the socket is closed")
        prefix = NO_NAME if target is None else self.prefix(target)
        if target is not None and prefix.bits == 0:
            raise ValueError("a prefix of 0 bits is no name; None lets the agent find it")
        message = request(Kind.HAND_OVER, protocol=socket.IPPROTO_TCP, bits=prefix.bits, id=prefix.id.raw, text=to)
        with contextlib.ExitStack() as files, self._turn(self._giving, GIVE_TIME):
            fds = [sock.fileno()]
            if data:
                fds.append(_memory_file(files, data))
            reply = self._give_in_turn("to hand the socket over", Kind.HAND_OVER, [sock], message, fds)
        return Prefix(ServiceId(reply.id), reply.bits)

    def pass_next(
        self, boxes: Sequence[str], source: tuple[str, int], destination: tuple[str, int], protocol: int
    ) -> None:
        """Has a session go through these boxes next. See margay.pass_next."""
        message = request(
            Kind.NEXT,
            protocol=protocol,
            port=source[1],
            id=target_id(destination),
            address=source[0],
            text=" ".join(boxes),
        )
        try:
            self._ask("to name the next box", Kind.NEXT, message)
        except Refused as refused:
            if refused.errno != errno.EBADMSG:
                raise
            # It does not know the question.
            why = "it is of an earlier release, and takes no names of next boxes"
            raise Incompatible.at(self.path, why) from None

    def splice(self, left: socket.socket, right: socket.socket) -> None:
        """Leaves between two connections. See margay.splice."""
        socks = [left, right]
        fds = [sock.fileno() for sock in socks]
        if min(fds) < 0:
            raise OSError(errno.EBADF, "the socket is closed")
        message = request(Kind.SPLICE, protocol=socket.IPPROTO_TCP)
        with self._turn(self._giving, GIVE_TIME):
            try:
                self._give_in_turn("to leave between two connections", Kind.SPLICE, socks, message, fds)
            except Refused as refused:
                if refused.errno != errno.EBADMSG:
                    raise
                # It does not know the question.
                why = "it is of an earlier release, and makes no one connection of two"
                raise Incompatible.at(self.path, why) from None

    def _give_in_turn(
        self, what: str, kind: Kind, socks: list[socket.socket], message: bytes, fds: list[int]
    ) -> Reply:
        # A connection that was idle may be that of an agent that died, and nothing is asked twice here.
        try:
            connection = self._open()
        except OSError as error:
            raise AgentDown.at(self.path, error) from None
        is_ours = False
        try:
            connection.settimeout(GIVE_TIME)
            try:
                socket.send_fds(connection, [message], fds)
            except OSError as error:
                # A message goes whole or not at all.
                is_ours = True
                if not isinstance(error, BrokenPipeError):
                    raise
            return self._check(what, kind, self._answer(connection))
        except Refused as refused:
            # ECONNABORTED: neither host has the connection.
            is_ours = refused.errno != errno.ECONNABORTED
            raise
        except Incompatible:
            raise
        except OSError as error:
            if not is_ours:
                text = f"{error.strerror or error}; who has the socket is not known, and it is closed here"
                error = OSError(errno.ECONNABORTED, text)
            raise AgentDown.at(self.path, error) from None
        finally:
            connection.close()
            # At once: `close` would wait for what `makefile` has made.
            for sock in [] if is_ours else socks:
                if (fd := sock.detach()) >= 0:
                    os.close(fd)

    def _subscribed(self, what: str, kind: Kind, message: bytes) -> socket.socket:
        try:
            connection = self._open()
        except OSError as error:
            raise AgentDown.at(self.path, error) from None
        try:
            self._check(what, kind, self._converse(connection, message, None))
            return connection
        except OSError as error:
            connection.close()
            raise self._explained(error) from None
        except BaseException:
            connection.close()
            raise

    def _ask(self, what: str, kind: Kind, message: bytes, sock: HasFileno | None = None) -> Reply:
        if sock is not None and sock.fileno() < 0:
            raise OSError(errno.EBADF, "the socket is closed")
        with self._turn(self._turns, ANSWER_TIME):
            return self._ask_in_turn(what, kind, message, sock)

    @contextlib.contextmanager
    def _turn(self, turns: threading.BoundedSemaphore, limit: float) -> Iterator[None]:
        if not turns.acquire(timeout=limit):
            raise AgentDown.at(self.path, TimeoutError(errno.ETIMEDOUT, "no answer to those who asked before"))
        try:
            yield
        finally:
            turns.release()

    def _ask_in_turn(self, what: str, kind: Kind, message: bytes, sock: HasFileno | None) -> Reply:
        owner = _owner()
        try:
            connection, answer = self._exchange(owner, message, sock)
        except OSError as error:
            raise self._explained(error) from None
        try:
            reply = self._check(what, kind, answer)
        except Incompatible:
            connection.close()
            raise
        except Refused:
            self._put_back(owner, connection)
            raise
        self._put_back(owner, connection)
        return reply

    def _explained(self, error: OSError) -> OSError:
        return error if isinstance(error, (Refused, Incompatible)) else AgentDown.at(self.path, error)

    def _check(self, what: str, kind: Kind, answer: bytes) -> Reply:
        try:
            reply = parse(answer)
        except Garbled as error:
            raise Incompatible.at(self.path, str(error)) from None
        if reply.errno:
            # It may be that of the connection, which is of no kind.
            raise Refused.because(what, reply.errno, reply.text)
        if reply.kind != kind:
            raise Incompatible.at(self.path, f"a reply of kind {reply.kind} to a request of kind {kind}")
        return reply

    def _exchange(
        self, owner: tuple[int, int, int], message: bytes, sock: HasFileno | None
    ) -> tuple[socket.socket, bytes]:
        while (idle := self._take_idle(owner)) is not None:
            try:
                return idle, self._converse(idle, message, sock)
            except TimeoutError:
                idle.close()
                raise
            except OSError:
                # Left open by an agent that died; all requests may be repeated.
                idle.close()
            except BaseException:
                idle.close()
                raise
        connection = self._open()
        try:
            return connection, self._converse(connection, message, sock)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def _converse(cls, connection: socket.socket, message: bytes, sock: HasFileno | None) -> bytes:
        try:
            if sock is None:
                connection.send(message)
            else:
                socket.send_fds(connection, [message], [sock.fileno()])
        except BrokenPipeError:
            # An agent with too many connections says so, unasked, and closes this one.
            pass
        return cls._answer(connection)

    @staticmethod
    def _answer(connection: socket.socket) -> bytes:
        try:
            answer = connection.recv(MESSAGE_MAX)
        except ConnectionResetError:
            # It did not read the request; what it said comes after this error.
            answer = connection.recv(MESSAGE_MAX)
        if not answer:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        return answer

    def _open(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # A full queue of connections is waited for only by a socket that blocks.
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", ANSWER_TIME, 0))
            connection.connect(self.path)
            connection.settimeout(ANSWER_TIME)
        except BaseException:
            connection.close()
            raise
        return connection

    def _take_idle(self, owner: tuple[int, int, int]) -> socket.socket | None:
        with self._lock:
            # The agent would take this process for the one that forked it, or for the user that it was.
            for opened_by, connection in self._idle:
                if opened_by != owner:
                    connection.close()
            self._idle = [idle for idle in self._idle if idle[0] == owner]
            return self._idle.pop()[1] if self._idle else None

    def _put_back(self, owner: tuple[int, int, int], connection: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < IDLE_MAX:
                self._idle.append((owner, connection))
                return
        connection.close()

    def close(self) -> None:
        """Closes the connections, by which loads that were reported hold no longer. The next request opens another."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()
        with self._report_turn:
            reporting, self._reporting = self._reporting, None
        if reporting is not None:
            reporting[1].close()

    def _after_fork(self) -> None:
        # Threads that the child does not have may hold the locks, or have been in the middle of a change.
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(AT_ONCE_MAX)
        self._giving = threading.BoundedSemaphore(GIVING_AT_ONCE_MAX)
        inherited, self._idle = self._idle, []
        self._names, self._addresses = {}, {}
        self._report_turn = threading.Lock()
        if self._reporting is not None:
            inherited.append(self._reporting)
            self._reporting = None
        for _, connection in inherited:
            connection.close()

    def __del__(self) -> None:
        # Not all of it is there if the constructor failed.
        for _, connection in getattr(self, "_idle", []):
            connection.close()
        reporting = getattr(self, "_reporting", None)
        if reporting is not None:
            reporting[1].close()

    def __repr__(self) -> str:
        return f"Agent({self.path!r})"


def _memory_file(files: contextlib.ExitStack, data: bytes) -> int:
    """A file with this data, until `files` are closed."""
    file = files.enter_context(open(os.memfd_create("margay-hand-over", os.MFD_CLOEXEC), "wb"))
    file.write(data)
    file.flush()
    return file.fileno()


def _prefix_of(target: Name | ServiceId | Prefix) -> Prefix:
    if isinstance(target, Name):
        return target.prefix
    return target if isinstance(target, Prefix) else Prefix(target)


def _owner() -> tuple[int, int, int]:
    """Who opens a connection: the agent judges requests by it, and the kernel notes it once, at `connect`."""
    return os.getpid(), os.geteuid(), os.getegid()


def _after_fork() -> None:
    for agent in list(_agents):
        agent._after_fork()


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()
_shared: Agent | None = None
os.register_at_fork(after_in_child=_after_fork)
