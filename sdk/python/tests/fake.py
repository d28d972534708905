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
from typing import Any

from margay import Agent

NAME, RESOLVE, BIND, SOURCE, PEER, EVENTS, EVENT, RANGES = range(1, 9)
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


class FakeAgent:
    """Speaks at `path` until `kill`. What it knows and how it is to misbehave are its attributes."""

    def __init__(self) -> None:
        self._dir = tempfile.TemporaryDirectory()
        self.path = os.path.join(self._dir.name, "programs.sock")
        self.services: list[tuple[bytes, int, int, int]] = []
        self.sources: dict[tuple[int, int], bytes] = {}
        self.asked: list[int] = []
        self.answered: list[int] = []
        self.written: list[str] = []
        self.refused: dict[int, tuple[int, str]] = {}
        self.garbage: bytes | None = None
        # Ports of peers that did not come by way of Margay.
        self.past: set[int] = set()
        # Refuses connections, with this text.
        self.full: str | None = None
        self.v6, self.v4 = "::1", "127.0.0.1"
        # The virtual addresses of its host.
        self.own_v6, self.own_v4 = "fd5a:4c00::1", "198.18.0.1"
        self._silent: set[int] = set()
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._subscribers: list[socket.socket] = []
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
                self.asked.append(kind)
                self._changed.notify_all()
                self._changed.wait_for(lambda: kind not in self._silent or self._is_down)
                if self._is_down:
                    return False
                answer = self._find(kind, message, fds)
                # Whoever has the answer may close the socket, and see what follows from that.
                while fds:
                    os.close(fds.pop())
                if kind == EVENTS:
                    self._subscribers.append(connection)
                self.answered.append(kind)
                self._changed.notify_all()
                connection.send(answer)
            return True
        except OSError:
            return False
        finally:
            for fd in fds:
                os.close(fd)

    def _find(self, kind: int, message: bytes, fds: list[int]) -> bytes:
        if self.garbage is not None:
            return self.garbage
        if kind in self.refused:
            number, text = self.refused[kind]
            return reply(kind, error=number, text=text)
        version, _, protocol, zero, port, bits, id, _ = REQUEST.unpack_from(message)
        text = message[REQUEST.size :].decode()
        assert (version, zero) == (1, 0)
        assert len(fds) == (kind in (BIND, SOURCE, PEER))
        if kind == NAME:
            try:
                id, bits, text = read_name(text)
            except ValueError as error:
                return reply(kind, error=errno.EINVAL, text=str(error))
            return reply(kind, id=id, bits=bits, text=text)
        if kind == RESOLVE:
            return reply(kind, port=self._port(id, protocol), v6=self.v6, v4=self.v4)
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

    def _port(self, id: bytes, protocol: int) -> int:
        number = int.from_bytes(id)
        matches: list[tuple[int, int]] = [
            (bits, port)
            for prefix, bits, by, port in self.services
            if by == protocol and number >> (256 - bits) == int.from_bytes(prefix) >> (256 - bits)
        ]
        nobody: int = self._nobody.getsockname()[1]
        # Of several that are as long, the last.
        return max(reversed(matches), key=lambda match: match[0])[1] if matches else nobody


def local_port(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as sock:
        address: tuple[Any, ...] = sock.getsockname()
        return int(address[1])
