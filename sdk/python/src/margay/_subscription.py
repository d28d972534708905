"""A connection on which the agent sends messages that nobody asks for one by one."""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self, TypeVar

from ._agent import Agent
from ._errors import AgentDown, Incompatible
from ._wire import Garbled

T = TypeVar("T")


class Subscription(Iterator[T], AsyncIterator[T]):
    """What comes on such a connection, for `for` and for `async for`."""

    def __init__(self, agent: Agent | None) -> None:
        self._agent = agent or Agent.shared()
        self._connection: socket.socket | None = None

    @abstractmethod
    def _subscribe(self) -> socket.socket:
        """Asks the agent for the connection."""

    @abstractmethod
    def _receive(self, connection: socket.socket) -> T:
        """The next one. BlockingIOError if the connection does not block and there is none; any other OSError, if the
        agent has ended; Garbled."""

    def open(self) -> None:
        """Subscribes, unless that is done. AgentDown, Refused, Incompatible."""
        if self._connection is None:
            self._connection = self._subscribe()

    def close(self) -> None:
        """Ends the subscription."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def fileno(self) -> int:
        """The descriptor, for `select` and `poll`: it is readable when `next` need not wait. -1: nothing is subscribed
        to, as before the first `next` and after AgentDown."""
        return -1 if self._connection is None else self._connection.fileno()

    def __next__(self) -> T:
        self.open()
        assert self._connection is not None
        self._connection.settimeout(None)
        return self._next(self._connection)

    async def __anext__(self) -> T:
        connection = await self._opened()
        connection.settimeout(0)
        while True:
            try:
                return self._next(connection)
            except BlockingIOError:
                # Nothing is taken from the connection while this waits and may be cancelled.
                await _readable(connection)

    async def _opened(self) -> socket.socket:
        if self._connection is None:
            # If this is cancelled, the connection that comes of it is nobody's, and is closed.
            connection = await asyncio.to_thread(self._subscribe)
            self._connection = connection
        return self._connection

    def _next(self, connection: socket.socket) -> T:
        try:
            return self._receive(connection)
        except BlockingIOError:
            raise
        except OSError as error:
            self.close()
            raise AgentDown.at(self._agent.path, error) from None
        except Garbled as error:
            self.close()
            raise Incompatible.at(self._agent.path, str(error)) from None

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Not there if the constructor failed.
        if getattr(self, "_connection", None) is not None:
            self.close()


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    fd, future = connection.fileno(), loop.create_future()

    def notice() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(fd, notice)
    try:
        await future
    finally:
        loop.remove_reader(fd)
