"""What happens to the flows of this user's programs."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ._agent import Agent
from ._errors import AgentDown, Incompatible
from ._names import ServiceId
from ._wire import MESSAGE_MAX, Garbled, Kind, parse


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a flow."""

    kind: str
    """ "opened", "closed", "failed"; "missed": this program was too slow, and so many events (`count`) are lost; or
    what later agents may tell."""
    fields: Mapping[str, Any]
    """All that the agent says, as it says it."""

    @property
    def name(self) -> str | None:
        """The service's name as it is written, where it is known."""
        return self._text("name")

    @property
    def service(self) -> ServiceId | None:
        """The service."""
        written = self._text("service") or ""
        try:
            raw = bytes.fromhex(written.removeprefix("sid:").partition("/")[0])
        except ValueError:
            return None
        return ServiceId(raw.ljust(32, b"\0")) if written.startswith("sid:") and len(raw) <= 32 else None

    @property
    def session(self) -> str | None:
        """The flow, as `margay flow` lists it."""
        session = self.fields.get("session")
        return str(session) if isinstance(session, (str, int)) else None

    @property
    def why(self) -> str | None:
        """The reason."""
        return self._text("why")

    def _text(self, field: str) -> str | None:
        text = self.fields.get(field)
        return text if isinstance(text, str) and text else None


class Events(Iterator[Event], AsyncIterator[Event]):
    """Events as they happen, for `for` and for `async for`: from the first `next` on, or from `with`, if that is
    earlier.

    When the agent ends, AgentDown is raised once; whoever goes on iterating after that subscribes again. What happened
    meanwhile is not told.
    """

    def __init__(self, agent: Agent | None = None) -> None:
        self._agent = agent or Agent.shared()
        self._connection: socket.socket | None = None

    def open(self) -> None:
        """Subscribes, unless that is done. AgentDown, Refused, Incompatible."""
        if self._connection is None:
            self._connection = self._agent.subscribe()

    def close(self) -> None:
        """Ends the subscription."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __next__(self) -> Event:
        self.open()
        assert self._connection is not None
        self._connection.settimeout(None)
        try:
            message = self._connection.recv(MESSAGE_MAX)
        except OSError as error:
            self.close()
            raise AgentDown.at(self._agent.path, error) from None
        return self._event(message)

    async def __anext__(self) -> Event:
        if self._connection is None:
            # If this is cancelled, the connection that comes of it is nobody's, and is closed.
            connection = await asyncio.to_thread(self._agent.subscribe)
            self._connection = connection
        self._connection.settimeout(0)
        try:
            message = await asyncio.get_running_loop().sock_recv(self._connection, MESSAGE_MAX)
        except OSError as error:
            self.close()
            raise AgentDown.at(self._agent.path, error) from None
        return self._event(message)

    def _event(self, message: bytes) -> Event:
        try:
            if not message:
                raise AgentDown.at(self._agent.path, ConnectionResetError(errno.ECONNRESET, "it closed the connection"))
            return _read(message)
        except Garbled as error:
            self.close()
            raise Incompatible.at(self._agent.path, str(error)) from None
        except AgentDown:
            self.close()
            raise

    def __iter__(self) -> Events:
        return self

    def __aiter__(self) -> Events:
        return self

    def __enter__(self) -> Events:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Events:
        if self._connection is None:
            self._connection = await asyncio.to_thread(self._agent.subscribe)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Not there if the constructor failed.
        if getattr(self, "_connection", None) is not None:
            self.close()


def _read(message: bytes) -> Event:
    reply = parse(message)
    if reply.kind != Kind.EVENT:
        raise Garbled(f"a message of kind {reply.kind} among events")
    try:
        fields = json.loads(reply.text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise Garbled("an event that is not an object in JSON")
    kind = fields.get("kind")
    if not isinstance(kind, str):
        raise Garbled("an event without a kind")
    return Event(kind, fields)
