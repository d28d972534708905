"""Sockets that come from other processes of this user."""

from __future__ import annotations

import array
import errno
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from typing import Any, TypeVar

from ._agent import Agent
from ._names import Prefix, ServiceId, Target
from ._socket import Socket
from ._subscription import Subscription
from ._wire import HANDED_MAX, MESSAGE_MAX, Garbled, Kind, parse, request

# Room for the descriptors of a message: the two that there are, and some that there should not be. The kernel closes
# what has no room.
ROOM = socket.CMSG_SPACE(8 * array.array("i").itemsize)


@dataclass(frozen=True, slots=True)
class Taken:
    """A socket that another process has given, and that is this one's now."""

    socket: Socket
    """As `listen` returns it, if it listens; otherwise as `accept` does. It has the time-out of new sockets."""
    data: bytes
    """What the other process says of it, 1 MiB at most; empty if it says nothing."""
    name: Prefix
    """The name, or names, that it serves; of a connection, the name by which it came."""

    @property
    def is_listening(self) -> bool:
        """Whether it listens; otherwise it is a connection."""
        return self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0


@dataclass(frozen=True, slots=True)
class Give:
    """This process is asked to give connections to another host: all of a name, since an operator drains it on this
    one, or one of them, since the other host has fewer than its share. Those that no other host takes it goes on
    with."""

    name: Prefix
    """The name, or names, by which the connections came."""
    to: str
    """The host that gets them, for `to` of `hand_over`; empty: any that serves the name."""
    peer: tuple[str, int] | None = None
    """Address and port of the one connection that is meant, by its peer; None: all of the name are. `is_for`
    compares."""

    def is_for(self, peer: tuple[Any, ...]) -> bool:
        """Whether the connection with this peer, as `getpeername` has it, is meant."""
        return self.peer is None or (_plain(peer[0]), peer[1]) == self.peer


def _plain(address: str) -> str:
    """An address in one form: IPv4 is not mapped, and there is no zone."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return str((ip.version == 6 and ip.ipv4_mapped) or ip)


T = TypeVar("T")


class _Inbox(Subscription[T]):
    """What comes to a process that takes over a name."""

    def __init__(self, name: Target, agent: Agent | None = None) -> None:
        super().__init__(agent)
        self._name = name

    def _read(self, connection: socket.socket) -> Taken | Give | None:
        """The next message; None: it is of no kind that this package knows, and wants no answer."""
        message, ancillary, _, _ = connection.recvmsg(MESSAGE_MAX, ROOM, socket.MSG_CMSG_CLOEXEC)
        fds = _fds_in(ancillary)
        try:
            return self._understand(connection, message, fds)
        except BaseException:
            # Without an answer the giver would wait, and keep its socket.
            self.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def _understand(self, connection: socket.socket, message: bytes, fds: list[int]) -> Taken | Give | None:
        if not message:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        reply = parse(message)
        if reply.errno:
            raise Garbled(f"a message of kind {reply.kind}, errno {reply.errno}, where a socket was to come")
        name = Prefix(ServiceId(reply.id), reply.bits)
        if reply.kind == Kind.GIVE:
            return Give(name, reply.text, (_plain(str(reply.v6)), reply.port) if reply.port else None)
        return self._take(connection, name, fds) if reply.kind == Kind.HANDED else None

    def _take(self, connection: socket.socket, name: Prefix, fds: list[int]) -> Taken:
        if not fds:
            raise Garbled("a message about a socket, and no socket")
        data = _contents(fds[1]) if len(fds) > 1 else b""
        try:
            connection.send(request(Kind.HANDED))
        except OSError as error:
            reason = "it has ended, or was answered too late; a socket that came is its giver's again"
            raise ConnectionResetError(error.errno, reason) from None
        # Not before: a socket that is not ours must not be changed, and its modes are the giver's, too.
        sock = Socket(fileno=fds[0], agent=self._agent)
        del fds[0]
        sock.settimeout(socket.getdefaulttimeout())
        return Taken(sock, data, name)


class Takeover(_Inbox[Taken]):
    """The sockets of a name as other processes of this user give them, for `for` and for `async for`: those that are
    given after `take_over`; or after the first `next` or `with` of an object that was made without it.

    Whoever waits in `next`, or calls it within two seconds of when `fileno()` is readable, takes the socket; if nobody
    does, it stays its giver's, and the agent ends this taking over. Nothing is taken but by `next`.

    AgentDown is raised once when the agent ends, or has ended the taking over because this process was too late;
    whoever goes on iterating after that takes over again. `close` ends it: sockets that were taken stay.
    """

    def _subscribe(self) -> socket.socket:
        return self._agent.take_over(self._name)

    def _receive(self, connection: socket.socket) -> Taken:
        while not isinstance(taken := self._read(connection), Taken):
            pass
        return taken


class GivingTakeover(_Inbox[Taken | Give]):
    """As `Takeover`, of a process that gives its own connections to other hosts when it is asked to: among what it
    takes come objects of `Give`: one for each drain that begins, and for one that has begun already, and one for each
    connection that is to go to a host with fewer than its share."""

    def _subscribe(self) -> socket.socket:
        return self._agent.take_over(self._name, gives=True)

    def _receive(self, connection: socket.socket) -> Taken | Give:
        while (come := self._read(connection)) is None:
            pass
        return come


def _fds_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds: array.array[Any] = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _contents(file: int) -> bytes:
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        raise Garbled("the data of a socket, in what is no file")
    size, data = min(about.st_size, HANDED_MAX), bytearray()
    # The offset is the giver's, too.
    while len(data) < size and (part := os.pread(file, size - len(data), len(data))):
        data += part
    return bytes(data)
