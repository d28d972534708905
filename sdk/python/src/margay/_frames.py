"""Framed sockets: frames that arrive whole, each to one server, and each in the order that its sender has chosen.

The program `margay ensemble socket` has the connection, and this process a Unix socket to it: acknowledgements, windows
and repetition are there in one way for all languages. Packets have a head of one length and a payload, which is a file
of memory beside the head where a socket's buffer has no room for it.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from ._agent import Agent
from ._errors import Error

T = TypeVar("T")

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

# Payloads that go within a packet.
_INLINE_MAX = 64 << 10
# Kind, flags, order, number, length of the key, key.
_HEAD = struct.Struct(">cBHIB255s")
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


class _Packet(NamedTuple):
    kind: bytes
    flags: int
    order: int
    number: int
    key: bytes
    payload: bytes
    passed: socket.socket | None


def _start(words: list[str], agent: Agent | None) -> _Packets:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
    return _Packets(ours, process)


def _connect(target: str, agent: Agent | None) -> _Packets:
    return _start(["connect", "--", target], agent)


def _listen(target: str, label: str, agent: Agent | None) -> _Packets:
    return _start(["listen", "--as", label, "--", target], agent)


class _Packets:
    """The socket to the process that has a framed one, and that process, if it is this socket's own."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self.sock = sock
        self.process = process

    def send(self, head: bytes, payload: bytes) -> None:
        if len(payload) <= _INLINE_MAX:
            self.sock.sendmsg([head, payload])
            return
        with open(os.memfd_create("frame"), "wb", buffering=0) as file:
            done = 0
            while done < len(payload):
                done += file.write(memoryview(payload)[done:])
            rights = array.array("i", [file.fileno()])
            self.sock.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def receive(self) -> _Packet | None:
        """The next packet. None: there are no more. Raises what is told as an error."""
        space = socket.CMSG_SPACE(struct.calcsize("i"))
        packet, ancillary, flags, _ = self.sock.recvmsg(_HEAD.size + _INLINE_MAX, space, socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(value[: len(value) - len(value) % descriptors.itemsize])
        if flags & socket.MSG_CTRUNC and not descriptors:
            # What has come has gone: nobody may believe that nothing was there.
            self.sock.close()
            raise Error(errno.EMFILE, "there is no descriptor for a large frame or a connection: the socket is closed")
        if not packet:
            return None
        passed = None
        try:
            if len(packet) < _HEAD.size:
                raise Error(errno.EPROTO, "the program margay speaks otherwise: use program and package of one version")
            letter, said, order, number, key_size, key = _HEAD.unpack_from(packet)
            payload = packet[_HEAD.size :]
            if descriptors and letter == b"A":
                passed = socket.socket(fileno=descriptors.pop())
            elif descriptors:
                payload = _content(descriptors[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if letter == b"E":
            # The class of it is by its number.
            raise OSError(number, payload.decode(errors="replace"))
        return _Packet(letter, said, order, number, key[:key_size], payload, passed)

    def close_now(self) -> None:
        """Somebody has to take the process' end note."""
        self.sock.close()
        if self.process is not None:
            threading.Thread(target=self.process.wait, daemon=True).start()
            self.process = None

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


def _content(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    content = bytearray()
    while len(content) < size and (piece := os.pread(descriptor, size - len(content), len(content))):
        content += piece
    return bytes(content)


def _opened(packet: _Packet | None) -> None:
    if packet is None or packet.kind != b"O":
        text = "the program margay carries no framed sockets: use program and package of one version"
        raise Error(errno.EPROTO, text)


def _accepted(packet: _Packet | None) -> tuple[_Packets, str]:
    if packet is None or packet.passed is None:
        raise Error(errno.ECONNABORTED, "the program margay, which carries framed sockets, has ended")
    return _Packets(packet.passed, None), packet.payload.decode(errors="replace")


def _head(data: bytes, key: bytes, flags: int, order: int, number: int) -> bytes:
    if order != UNORDERED and not 0 <= order < STREAMS_MAX:
        raise ValueError(f"streams are 1 to {STREAMS_MAX - 1}, and {order} is none")
    if len(data) > FRAME_MAX:
        raise ValueError(f"the frame has {len(data)} bytes, and may have {FRAME_MAX}")
    if len(key) > KEY_MAX:
        raise ValueError(f"the key has {len(key)} bytes, and may have {KEY_MAX}")
    return _HEAD.pack(b"S", flags, order, number, len(key), key)


def _flags(safe: bool, wants_answer: bool) -> int:
    return (_SAFE if safe else 0) | (_WANTS_ANSWER if wants_answer else 0)


def _arrival(packet: _Packet | None) -> Frame | Lost | None:
    if packet is None:
        return None
    if packet.kind == b"L":
        return Lost(packet.number)
    is_answer, wants_answer = bool(packet.flags & _IS_ANSWER), bool(packet.flags & _WANTS_ANSWER)
    return Frame(packet.number, packet.payload, is_answer, wants_answer, packet.order, packet.key)


class _Numbers:
    """A client's frames are numbered as they are sent, a server's are not."""

    def __init__(self, is_client: bool) -> None:
        self._is_client = is_client
        self._next = 0

    def take(self) -> int:
        number = self._next
        self._next = (number + self._is_client) % 2**32
        return number


class Frames:
    """One end of a framed connection. Reads and writes block; one thread may read while another one writes.

    `close` of a connection that was opened here waits until all that was sent has arrived, for five seconds at most; of
    one that was accepted, this goes on behind the program's back.
    """

    def __init__(self, packets: _Packets, is_client: bool) -> None:
        self._packets = packets
        self._numbers = _Numbers(is_client)

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
        self._packets.send(_head(data, key, _flags(safe, wants_answer), order, 0), data)
        return self._numbers.take()

    def answer(self, to: Frame, data: bytes) -> None:
        """Answers a frame."""
        self._packets.send(_head(data, b"", _IS_ANSWER, PER_SERVER, to.number), data)

    def recv(self) -> Frame | Lost | None:
        """What comes next; None once the other end has closed the connection.

        Raises OSError where it ended otherwise.
        """
        return _arrival(self._packets.receive())

    def __iter__(self) -> Iterator[Frame | Lost]:
        while (arrival := self.recv()) is not None:
            yield arrival

    def settimeout(self, seconds: float | None) -> None:
        """How long a read or write may take. One that took longer has done nothing, and may be tried again."""
        self._packets.sock.settimeout(seconds)

    def fileno(self) -> int:
        """For `select`: readable when something has come."""
        return self._packets.sock.fileno()

    def close(self) -> None:
        """Ends the connection, once all that was sent has arrived, or some seconds later."""
        self._packets.close()

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FramesListener:
    """Takes framed connections by a name, until it is closed. Those that are there go on."""

    def __init__(self, packets: _Packets) -> None:
        self._packets = packets

    def accept(self) -> tuple[Frames, str]:
        """The next connection, and the name of who has opened it: of an ensemble, its switch, once for each client."""
        packets, who = _accepted(self._packets.receive())
        return Frames(packets, is_client=False), who

    def fileno(self) -> int:
        """For `select`: readable when a connection has come."""
        return self._packets.sock.fileno()

    def close(self) -> None:
        """Takes no new connections. Returns at once: the process that carries those that there are ends with them."""
        self._packets.close_now()

    def __enter__(self) -> FramesListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect_frames(target: str, *, agent: Agent | None = None) -> Frames:
    """Connects to a server of frames, or to an ensemble whose members are such servers.

    Raises TimeoutError where nobody answers, and ConnectionRefusedError where the other end does not take it.
    """
    packets = _connect(target, agent)
    try:
        _opened(packets.receive())
    except BaseException:
        packets.close()
        raise
    return Frames(packets, is_client=True)


def listen_frames(target: str, *, label: str = "", agent: Agent | None = None) -> FramesListener:
    """Serves a name with frames. `label` is what a member of an ensemble is called where keys are divided."""
    packets = _listen(target, label, agent)
    try:
        _opened(packets.receive())
    except BaseException:
        packets.close()
        raise
    return FramesListener(packets)


class _AsyncPackets:
    """Packets for coroutines: whatever is cancelled has sent or taken a whole packet, or none."""

    def __init__(self, packets: _Packets) -> None:
        packets.sock.setblocking(False)
        self._packets = packets
        # A loop has one who waits for each way.
        self._sending, self._receiving = asyncio.Lock(), asyncio.Lock()

    async def send(self, head: bytes, payload: bytes, numbers: _Numbers | None = None) -> int:
        loop = asyncio.get_running_loop()
        async with self._sending:
            await _once_ready(self._packets, loop.add_writer, loop.remove_writer, self._packets.send, head, payload)
            return numbers.take() if numbers is not None else 0

    async def receive(self) -> _Packet | None:
        loop = asyncio.get_running_loop()
        async with self._receiving:
            return await _once_ready(self._packets, loop.add_reader, loop.remove_reader, self._packets.receive)

    async def close(self) -> None:
        packets = self._packets
        if packets.process is None:
            packets.sock.close()
        else:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, packets.close))

    def close_now(self) -> None:
        self._packets.close_now()


async def _once_ready(
    packets: _Packets, add: Callable[..., None], remove: Callable[[int], bool], call: Callable[..., T], *args: Any
) -> T:
    while True:
        try:
            return call(*args)
        except BlockingIOError:
            pass
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        descriptor = packets.sock.fileno()
        add(descriptor, lambda: None if ready.done() else ready.set_result(None))  # noqa: B023
        try:
            await ready
        finally:
            remove(descriptor)


async def _open(start: Callable[..., _Packets], *args: Any) -> _AsyncPackets:
    starting = asyncio.get_running_loop().run_in_executor(None, start, *args)
    try:
        packets = await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(lambda started: started.exception() or started.result().close_now())
        raise
    opened = _AsyncPackets(packets)
    try:
        _opened(await opened.receive())
    except BaseException:
        packets.close_now()
        raise
    return opened


class AsyncFrames:
    """`Frames` for coroutines. A call that is cancelled loses nothing."""

    def __init__(self, packets: _AsyncPackets, is_client: bool) -> None:
        self._packets = packets
        self._numbers = _Numbers(is_client)

    async def send(
        self,
        data: bytes,
        *,
        key: bytes = b"",
        order: int = PER_SERVER,
        safe: bool = False,
        wants_answer: bool = False,
    ) -> int:
        """As that of `Frames`."""
        head = _head(data, key, _flags(safe, wants_answer), order, 0)
        return await self._packets.send(head, data, self._numbers)

    async def answer(self, to: Frame, data: bytes) -> None:
        """Answers a frame."""
        await self._packets.send(_head(data, b"", _IS_ANSWER, PER_SERVER, to.number), data)

    async def recv(self) -> Frame | Lost | None:
        """As that of `Frames`."""
        return _arrival(await self._packets.receive())

    async def __aiter__(self) -> AsyncIterator[Frame | Lost]:
        while (arrival := await self.recv()) is not None:
            yield arrival

    async def close(self) -> None:
        """Ends the connection, once all that was sent has arrived, or some seconds later. No call may be waiting."""
        await self._packets.close()

    async def __aenter__(self) -> AsyncFrames:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncFramesListener:
    """`FramesListener` for coroutines, and for `async for frames, who in listener`."""

    def __init__(self, packets: _AsyncPackets) -> None:
        self._packets = packets

    async def accept(self) -> tuple[AsyncFrames, str]:
        """As that of `FramesListener`. A call that is cancelled loses no connection."""
        packets, who = _accepted(await self._packets.receive())
        return AsyncFrames(_AsyncPackets(packets), is_client=False), who

    async def __aiter__(self) -> AsyncIterator[tuple[AsyncFrames, str]]:
        while True:
            yield await self.accept()

    def close(self) -> None:
        """As that of `FramesListener`. No call may be waiting."""
        self._packets.close_now()

    async def __aenter__(self) -> AsyncFramesListener:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def open_frames(target: str, *, agent: Agent | None = None) -> AsyncFrames:
    """As `connect_frames`, for coroutines. Raises as that does."""
    return AsyncFrames(await _open(_connect, target, agent), is_client=True)


async def open_frames_listener(target: str, *, label: str = "", agent: Agent | None = None) -> AsyncFramesListener:
    """As `listen_frames`, for coroutines. Raises as that does."""
    return AsyncFramesListener(await _open(_listen, target, label, agent))
