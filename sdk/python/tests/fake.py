"""An agent for tests: the format of the program socket, and names that stand for sockets of the loopback."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

from margay import Agent

NAME, RESOLVE, BIND, SOURCE, PEER, EVENTS, EVENT, RANGES, HAND_OVER, TAKE_OVER, HANDED, GIVE = range(1, 13)
LOAD, NEXT = 15, 16
SPLICE = 75
REQUEST = struct.Struct(">BBBBHH32s16s")


def reply(
    kind: int,
    *,
    error: int = 0,
    bits: int = 0,
    port: int = 0,
    id: bytes = bytes(32),
    v6: str = "::",
    v4: str = "0.0.0.0",
    text: str = "",
) -> bytes:
    fixed = struct.pack(">BBHHH32s", 1, kind, error, bits, port, id)
    return fixed + socket.inet_pton(socket.AF_INET6, v6) + socket.inet_aton(v4) + text.encode()


def read_name(text: str) -> tuple[bytes, int, str]:
    """As the agent reads names, but with a hash that Python has."""
    if text.startswith("sid:"):
        digits, _, bits = text[4:].partition("/")
        return bytes.fromhex(digits).ljust(32, b"\0"), int(bits or 256), text
    host, _, key = text.partition("/key:")
    service, dot, authority = host.lower().partition(".")
    if not dot:
        raise ValueError(f"`{text}` has no authority; write service.authority")
    tail = digest(key, 20) if key else bytes(20)
    return digest(authority, 8) + digest(service, 4) + tail, 256, host.lower() + (f"/key:{key}" if key else "")


def digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


@dataclass(eq=False)
class Taker:
    """A connection on which a program takes over sockets."""

    connection: socket.socket
    prefix: bytes
    bits: int
    pid: int
    # It has been sent a socket, and has not answered.
    is_asked: bool = False
    is_gone: bool = False

    def takes(self, id: bytes, bits: int, giver: int) -> bool:
        # The programs of a test itself stand for processes.
        is_other = self.pid != giver or giver == os.getpid()
        return is_other and bits >= self.bits and leading(id, self.bits) == leading(self.prefix, self.bits)


class FakeAgent:
    """Speaks at `path` until `kill`. What it knows and how it is to misbehave are its attributes."""

    def __init__(self) -> None:
        self._dir = tempfile.TemporaryDirectory()
        self.path = os.path.join(self._dir.name, "programs.sock")
        self.services: list[tuple[bytes, int, int, int]] = []
        self.sources: dict[tuple[int, int], bytes] = {}
        # The requests as they came.
        self.messages: list[bytes] = []
        self.asked: list[int] = []
        self.answered: list[int] = []
        self.written: list[str] = []
        self.refused: dict[int, tuple[int, str]] = {}
        self.garbage: bytes | None = None
        # Ports of peers that did not come by way of Margay.
        self.past: set[int] = set()
        # Kinds that are heard, and after which the connection is closed without an answer.
        self.hangs_up_after: set[int] = set()
        # How long a program has to take a socket, in seconds.
        self.taking_time = 2.0
        # Names by which clients have come, by their ports.
        self.served: dict[int, bytes] = {}
        # Data that was given with sockets: the names of its files.
        self.files: list[str] = []
        # Pairs of sockets that are to become one connection, by their inodes.
        self.spliced: list[list[int]] = []
        # Refuses connections, with this text.
        self.full: str | None = None
        self.v6, self.v4 = "::1", "127.0.0.1"
        # The virtual addresses of its host.
        self.own_v6, self.own_v4 = "fd5a:4c00::1", "198.18.0.1"
        self._silent: set[int] = set()
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._subscribers: list[socket.socket] = []
        self._takers: list[Taker] = []
        # Bound and not listening: the port of names that nobody serves.
        self._nobody = socket.socket()
        self._nobody.bind(("127.0.0.1", 0))
        self.listen()

    def listen(self) -> None:
        """Another agent in the place of one that was killed, which knows what that one knew."""
        if os.path.exists(self.path):
            os.unlink(self.path)
        self._is_down = False
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(self.path)
        self._listening.listen(64)
        self._accepting = threading.Thread(target=self._accept, args=[self._listening], daemon=True)
        self._accepting.start()

    def kill(self) -> None:
        """As `kill -9` ends an agent: its socket's file stays."""
        with self._changed:
            self._is_down = True
            self._subscribers.clear()
            connections, self._connections = self._connections, []
            for connection in connections:
                connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        self._listening.shutdown(socket.SHUT_RDWR)
        # What was queued there shall not be taken for the next agent's.
        self._accepting.join()
        self._listening.close()

    def close(self) -> None:
        if not self._is_down:
            self.kill()
        self._nobody.close()
        self._dir.cleanup()

    def agent(self) -> Agent:
        return Agent(self.path)

    def silence(self, kind: int) -> None:
        """Does not answer a kind until `speak`."""
        with self._changed:
            self._silent.add(kind)

    def speak(self) -> None:
        with self._changed:
            self._silent.clear()
            self._changed.notify_all()

    def wait_asked(self, kind: int, times: int) -> None:
        """Waits until a kind has been asked so often."""
        self._wait(self.asked, kind, times)

    def wait_answered(self, kind: int, times: int) -> None:
        """Waits until a kind has been answered so often."""
        self._wait(self.answered, kind, times)

    def _wait(self, kinds: list[int], kind: int, times: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: kinds.count(kind) >= times, 60):
                raise TimeoutError(f"kind {kind}: {kinds.count(kind)} of {times}")

    def event(self, line: str) -> None:
        with self._changed:
            for subscriber in self._subscribers:
                # It may be gone, and not be missed yet.
                with contextlib.suppress(OSError):
                    subscriber.send(reply(EVENT, text=line))

    def hand(self, message: bytes, fds: list[int]) -> None:
        """Sends all who take over a message that may be none, and expects no answer."""
        with self._changed:
            for taker in self._takers:
                socket.send_fds(taker.connection, [message], fds)

    def wait_takers(self, number: int) -> None:
        """Waits until so many take over."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._takers) == number, 60):
                raise TimeoutError(f"{len(self._takers)} take over, not {number}")

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with self._changed:
                if self._is_down:
                    # It came before the end, and was noticed after it.
                    connection.close()
                    return
                if self.full is not None:
                    connection.send(reply(0, error=errno.EUSERS, text=self.full))
                    connection.close()
                    continue
                self._connections.append(connection)
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while self._answer(connection):
                pass
            with self._changed:
                if connection in self._connections:
                    self._connections.remove(connection)
                if connection in self._subscribers:
                    self._subscribers.remove(connection)
                for taker in [taker for taker in self._takers if taker.connection is connection]:
                    self._end(taker)

    def _answer(self, connection: socket.socket) -> bool:
        try:
            message, fds, _, _ = socket.recv_fds(connection, 512, 2)
        except OSError:
            return False
        try:
            if not message:
                return False
            kind = message[1]
            with self._changed:
                self.messages.append(message)
                self.asked.append(kind)
                self._changed.notify_all()
                self._changed.wait_for(lambda: kind not in self._silent or self._is_down)
                if self._is_down or kind in self.hangs_up_after:
                    return False
                if kind == HANDED:
                    return self._is_taken(connection, message, fds)
                answer = self._find(kind, message, fds)
                if kind == HAND_OVER and answer[2:4] == b"\0\0" and self.garbage is None:
                    answer = self._give(answer, fds, pid_of(connection))
                if self._is_down:
                    return False
                # Whoever has the answer may close the socket, and see what follows from that.
                while fds:
                    os.close(fds.pop())
                if kind == EVENTS:
                    self._subscribers.append(connection)
                if kind == TAKE_OVER and answer[2:4] == b"\0\0":
                    bits = int.from_bytes(answer[4:6])
                    self._takers.append(Taker(connection, answer[8:40], bits, pid_of(connection)))
                self.answered.append(kind)
                self._changed.notify_all()
                connection.send(answer)
            return True
        except OSError:
            return False
        finally:
            for fd in fds:
                os.close(fd)

    def _is_taken(self, connection: socket.socket, message: bytes, fds: list[int]) -> bool:
        """The answer to a socket that was sent."""
        assert (message, fds) == (bytes([1, HANDED]) + bytes(54), [])
        for taker in self._takers:
            if taker.connection is connection and taker.is_asked:
                taker.is_asked = False
                self.answered.append(HANDED)
                self._changed.notify_all()
                return True
        return False

    def _give(self, answer: bytes, fds: list[int], giver: int) -> bytes:
        """The answer to a giver, whose socket goes to the first that takes it."""
        id, bits = answer[8:40], int.from_bytes(answer[4:6])
        error, text = errno.ESRCH, "no other process of this user takes over the name"
        for taker in [taker for taker in self._takers if taker.takes(id, bits, giver)]:
            if self._offer(taker, reply(HANDED, id=id, bits=bits), fds):
                return answer
            error, text = errno.ETIMEDOUT, "who takes over the name has not taken it"
        return reply(HAND_OVER, error=error, text=text)

    def _offer(self, taker: Taker, message: bytes, fds: list[int]) -> bool:
        """Whether it has the socket now."""

        def is_over() -> bool:
            return not taker.is_asked or taker.is_gone or self._is_down

        self._changed.wait_for(is_over)
        if taker.is_gone or self._is_down:
            return False
        taker.is_asked = True
        try:
            socket.send_fds(taker.connection, [message], fds)
        except OSError:
            self._end(taker)
            return False
        if not self._changed.wait_for(is_over, self.taking_time):
            # What comes from now on is too late for it; what is there already is read before the end.
            taker.connection.shutdown(socket.SHUT_RD)
            self._changed.wait_for(is_over)
        return not taker.is_asked

    def _end(self, taker: Taker) -> None:
        taker.is_gone = True
        self._takers.remove(taker)
        self._changed.notify_all()

    def _find(self, kind: int, message: bytes, fds: list[int]) -> bytes:
        if self.garbage is not None:
            return self.garbage
        if kind in self.refused:
            number, text = self.refused[kind]
            return reply(kind, error=number, text=text)
        version, _, protocol, zero, port, bits, id, _ = REQUEST.unpack_from(message)
        text = message[REQUEST.size :].decode()
        assert (version, zero) == (1, 0)
        if kind == HAND_OVER:
            return self._given(message, fds)
        if kind == SPLICE:
            self.spliced.append([os.fstat(fd).st_ino for fd in fds])
            return reply(kind)
        assert len(fds) == (kind in (BIND, SOURCE, PEER))
        if kind == NAME:
            try:
                id, bits, text = read_name(text)
            except ValueError as error:
                return reply(kind, error=errno.EINVAL, text=str(error))
            return reply(kind, id=id, bits=bits, text=text)
        if kind == RESOLVE:
            return reply(kind, port=self._port(id, protocol), v6=self.v6, v4=self.v4)
        if kind == TAKE_OVER:
            assert message == bytes([1, TAKE_OVER, 0, 0, 0, port]) + bits.to_bytes(2) + id + bytes(16)
            assert port in (0, 1)
            return reply(kind, id=id, bits=bits)
        if kind == RANGES:
            return reply(kind, v6=self.own_v6, v4=self.own_v4)
        if kind == BIND:
            self.services.append((id, bits, protocol, local_port(fds[0])))
            self.written.append(text)
        if kind == SOURCE:
            assert port == local_port(fds[0]) != 0
            id = id if any(id) else bytes(12) + b"\x77" * 16 + struct.pack(">I", port)
            self.sources[protocol, port] = id
            return reply(kind, id=id)
        if kind == PEER and port in self.past:
            return reply(kind, error=errno.ENOTCONN, text="no such flow")
        if kind == PEER:
            # Whoever said nothing goes by the name of its host.
            return reply(kind, id=self.sources.get((protocol, port), bytes(12) + b"\x55" * 20))
        return reply(kind)

    def _given(self, message: bytes, fds: list[int]) -> bytes:
        """What is wrong with a socket that is to be given; or the answer if somebody takes it."""
        _, _, protocol, _, port, bits, id, address = REQUEST.unpack_from(message)
        # A host may follow: all of them are this one here.
        assert (protocol, port, address) == (6, 0, bytes(16))
        assert len(fds) in (1, 2)
        with socket.socket(fileno=os.dup(fds[0])) as sock:
            if sock.type != socket.SOCK_STREAM:
                return reply(HAND_OVER, error=errno.EPROTONOSUPPORT, text="only TCP sockets are handed over")
            if bits == 0:
                assert not any(id)
                try:
                    id, bits = self.served[sock.getpeername()[1]], 256
                except (OSError, KeyError):
                    return reply(HAND_OVER, error=errno.ENOTCONN, text="no flow leads to this socket")
        self.files += [os.readlink(f"/proc/self/fd/{fd}") for fd in fds[1:]]
        if len(fds) == 2 and os.fstat(fds[1]).st_size > 1048576:
            return reply(HAND_OVER, error=errno.E2BIG, text="1048576 bytes are the most")
        return reply(HAND_OVER, id=id, bits=bits)

    def _port(self, id: bytes, protocol: int) -> int:
        matches: list[tuple[int, int]] = [
            (bits, port)
            for prefix, bits, by, port in self.services
            if by == protocol and leading(id, bits) == leading(prefix, bits)
        ]
        nobody: int = self._nobody.getsockname()[1]
        # Of several that are as long, the last.
        return max(reversed(matches), key=lambda match: match[0])[1] if matches else nobody


def leading(id: bytes, bits: int) -> int:
    return int.from_bytes(id) >> (256 - bits)


def pid_of(connection: socket.socket) -> int:
    """Who opened it."""
    pid, _, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def local_port(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as sock:
        address: tuple[Any, ...] = sock.getsockname()
        return int(address[1])
