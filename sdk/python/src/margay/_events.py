"""What happens to the flows of this user's programs."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._agent import Agent
from ._names import ServiceId
from ._subscription import Subscription
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


class Events(Subscription[Event]):
    """Events as they happen, for `for` and for `async for`: from the first `next` on, or from `with`, if that is
    earlier.

    When the agent ends, AgentDown is raised once; whoever goes on iterating after that subscribes again. What happened
    meanwhile is not told.
    """

    def __init__(self, agent: Agent | None = None) -> None:
        super().__init__(agent)

    def _subscribe(self) -> socket.socket:
        return self._agent.subscribe()

    def _receive(self, connection: socket.socket) -> Event:
        message = connection.recv(MESSAGE_MAX)
        if not message:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        return _read(message)


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
