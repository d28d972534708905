"""Framed sockets: frames that arrive whole, each to one server, and each in the order that its sender has chosen.

The program `margay ensemble socket` has the connection, and this process a stream to it: acknowledgements, windows and
repetition are there in one way for all languages.
"""

from __future__ import annotations

import array
import errno
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ._agent import Agent
from ._errors import Error

# Longest frame, and longest key, in bytes.
FRAME_MAX = 8 << 20
KEY_MAX = 255
# Streams that frames may name are 1 to this one, less 1.
STREAMS_MAX = 256

# What was sent has five seconds to arrive; the process that carries it, a little longer.
CLOSE_LIMIT = 6.0

# As an order: behind the frames before it that go to the same server; nowhere. Other numbers are streams.
PER_SERVER = 0
UNORDERED = 0xFFFF

_LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(">BHIB")
_SAFE, _WANTS_ANSWER, _IS_ANSWER = 1, 2, 4


@dataclass(frozen=True)
class Frame:
    """A frame of the other end.

    `number` is a client's frame's own; of an answer, that of the frame which it answers, as `send` has given it; else
    zero.
    """

    number: int
    data: bytes
    is_answer: bool
    wants_answer: bool
    order: int
    key: bytes


@dataclass(frozen=True)
class Lost:
    """The server that had the frame of this number died with it: it may have acted on it, or not. No answer comes."""

    number: int


def _program() -> str:
    named = os.environ.get("MARGAY_PROGRAM") or shutil.which("margay")
    if named is None:
        text = "the program margay, which carries framed sockets, is not in PATH"
        raise Error(errno.ENOENT, f"{text}. Install it, or name it in MARGAY_PROGRAM")
    return named


def _start(words: list[str], agent: Agent | None) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    environment = dict(os.environ)
    if agent is not None:
        environment["MARGAY_PROGRAMS"] = agent.path
    try:
        with theirs:
            process = subprocess.Popen(
                [_program(), "ensemble", "socket", *words],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    return ours, process


class _Stream:
    """The stream to the process that has a socket, and that process, if it is this stream's own."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self.sock = sock
        self.process = process

    def write(self, kind: bytes, *parts: bytes) -> None:
        body = b"".join((kind, *parts))
        self.sock.sendall(_LENGTH.pack(len(body)) + body)

    def exactly(self, size: int) -> bytes:
        """So many bytes; fewer at the end."""
        bytes_read = bytearray()
        while len(bytes_read) < size:
            piece = self.sock.recv(size - len(bytes_read))
            if not piece:
                break
            bytes_read += piece
        return bytes(bytes_read)

    def read(self) -> tuple[bytes, bytes] | None:
        """The next message: its kind and value. None: there are no more. Raises what is told as an error."""
        head = self.exactly(_LENGTH.size)
        return self.body(head) if len(head) == _LENGTH.size else None

    def body(self, head: bytes) -> tuple[bytes, bytes] | None:
        (size,) = _LENGTH.unpack(head)
        message = self.exactly(size)
        if len(message) < size or not message:
            return None
        kind, value = message[:1], message[1:]
        if kind == b"E":
            (number,) = struct.unpack_from(">i", value)
            # The class of it is by its number.
            raise OSError(number, value[4:].decode(errors="replace"))
        return kind, value

    def await_open(self) -> None:
        message = self.read()
        if message is None or message[0] != b"O":
            text = "the program margay carries no framed sockets: use program and package of one version"
            raise Error(errno.EPROTO, text)

    def close(self) -> None:
        self.sock.close()
        if self.process is None:
            return
        try:
            self.process.wait(CLOSE_LIMIT)
        except subprocess.TimeoutExpired:
            # The other end takes nothing any more.
            self.process.kill()
            self.process.wait()


class Frames:
    """One end of a framed connection. Reads and writes block; one thread may read while another one writes.

    `close` of a connection that was opened here waits until all that was sent has arrived, for five seconds at most; of
    one that was accepted, this goes on behind the program's back.
    """

    def __init__(self, stream: _Stream, is_client: bool) -> None:
        self._stream = stream
        self._is_client = is_client
        self._next = 0

    def send(
        self,
        data: bytes,
        *,
        key: bytes = b"",
        order: int = PER_SERVER,
        safe: bool = False,
        wants_answer: bool = False,
    ) -> int:
        """Sends a frame, and gives its number; a server's frames have none, and give zero.

        `key` is what an ensemble's switch chooses the server by. `order` is PER_SERVER, UNORDERED, or a stream, all of
        which goes to one server. `safe`: where nobody knows whether its server acted on it before it died, another one
        is given it. `wants_answer`: a server that is drained stays until it has answered, and a `Lost` tells that no
        answer will come.
        """
        if order != UNORDERED and not 0 <= order < STREAMS_MAX:
            raise ValueError(f"streams are 1 to {STREAMS_MAX - 1}, and {order} is none")
        flags = (_SAFE if safe else 0) | (_WANTS_ANSWER if wants_answer else 0)
        self._say(data, key, flags, order, 0)
        number = self._next if self._is_client else 0
        self._next = (self._next + 1) % 2**32
        return number

    def answer(self, to: Frame, data: bytes) -> None:
        """Answers a frame."""
        self._say(data, b"", _IS_ANSWER, PER_SERVER, to.number)

    def _say(self, data: bytes, key: bytes, flags: int, order: int, number: int) -> None:
        if len(data) > FRAME_MAX:
            raise ValueError(f"the frame has {len(data)} bytes, and may have {FRAME_MAX}")
        if len(key) > KEY_MAX:
            raise ValueError(f"the key has {len(key)} bytes, and may have {KEY_MAX}")
        self._stream.write(b"S", _HEAD.pack(flags, order, number, len(key)), key, data)

    def recv(self) -> Frame | Lost | None:
        """What comes next; None once the other end has closed the connection.

        Raises OSError where it ended otherwise.
        """
        message = self._stream.read()
        if message is None:
            return None
        kind, value = message
        if kind == b"L":
            return Lost(*struct.unpack(">I", value))
        flags, order, number, key_size = _HEAD.unpack_from(value)
        data_at = _HEAD.size + key_size
        is_answer, wants_answer = bool(flags & _IS_ANSWER), bool(flags & _WANTS_ANSWER)
        return Frame(number, value[data_at:], is_answer, wants_answer, order, value[_HEAD.size : data_at])

    def __iter__(self) -> Iterator[Frame | Lost]:
        while (arrival := self.recv()) is not None:
            yield arrival

    def settimeout(self, seconds: float | None) -> None:
        """How long a read or write may take. One that took longer leaves the connection of no use but to be closed."""
        self._stream.sock.settimeout(seconds)

    def fileno(self) -> int:
        """For `select`: readable when something has come."""
        return self._stream.sock.fileno()

    def close(self) -> None:
        """Ends the connection, once all that was sent has arrived, or some seconds later."""
        self._stream.close()

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FramesListener:
    """Takes framed connections by a name, until it is closed. Those that are there go on."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def accept(self) -> tuple[Frames, str]:
        """The next connection, and the name of who has opened it: of an ensemble, its switch, once for each client."""
        descriptors = array.array("i")
        head, ancillary, _, _ = self._stream.sock.recvmsg(_LENGTH.size, socket.CMSG_SPACE(descriptors.itemsize))
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(value[: len(value) - len(value) % descriptors.itemsize])
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        for sock in sockets:
            # The kernel passes it as its process has it: without blocking.
            sock.setblocking(True)
        try:
            head += self._stream.exactly(_LENGTH.size - len(head))
            message = self._stream.body(head) if len(head) == _LENGTH.size else None
            if message is None or not sockets:
                raise Error(errno.ECONNABORTED, "the program margay, which carries framed sockets, has ended")
        except BaseException:
            for sock in sockets:
                sock.close()
            raise
        return Frames(_Stream(sockets[0], None), is_client=False), message[1].decode(errors="replace")

    def fileno(self) -> int:
        """For `select`: readable when a connection has come."""
        return self._stream.sock.fileno()

    def close(self) -> None:
        """Takes no new connections. Returns at once: the process that carries those that there are ends with them."""
        self._stream.sock.close()
        if (process := self._stream.process) is not None:
            # Somebody has to take its end note.
            threading.Thread(target=process.wait, daemon=True).start()
            self._stream.process = None

    def __enter__(self) -> FramesListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect_frames(target: str, *, agent: Agent | None = None) -> Frames:
    """Connects to a server of frames, or to an ensemble whose members are such servers.

    Raises TimeoutError where nobody answers, and ConnectionRefusedError where the other end does not take it.
    """
    stream = _Stream(*_start(["connect", target], agent))
    try:
        stream.await_open()
    except BaseException:
        stream.close()
        raise
    return Frames(stream, is_client=True)


def listen_frames(target: str, *, label: str = "", agent: Agent | None = None) -> FramesListener:
    """Serves a name with frames. `label` is what a member of an ensemble is called where keys are divided."""
    stream = _Stream(*_start(["listen", target, "--as", label], agent))
    try:
        stream.await_open()
    except BaseException:
        stream.close()
        raise
    return FramesListener(stream)
