"""What can go wrong, by who is at fault. All are OSErrors; what a socket call itself says comes as it always does."""

from __future__ import annotations

import errno
import os


class Error(OSError):
    """What is about Margay. `errno` is a number of the module errno; `strerror` says why, and what to do."""


class AgentDown(Error):
    """This host: no agent runs here, or it went away, or does not answer. Connections that exist go on without it."""

    @classmethod
    def at(cls, path: str, source: OSError) -> AgentDown:
        """The agent at `path` cannot be asked because of `source`."""
        number = source.errno or (errno.ETIMEDOUT if isinstance(source, TimeoutError) else errno.ECONNRESET)
        reason = source.strerror or str(source) or os.strerror(number)
        advice = "Start it (`margay up`), or say in MARGAY_PROGRAMS where its programs.sock is"
        return cls(number, f"the Margay agent of this host does not answer: {reason}. {advice}", path)


class Refused(Error):
    """The caller, mostly: the agent understood the request and says no; `strerror` has its reason."""

    @classmethod
    def because(cls, what: str, number: int, text: str) -> Refused:
        """The agent's answer to a request for `what`."""
        kind = Denied if number in (errno.EACCES, errno.EPERM) else Refused
        return kind(number, f"the Margay agent refused {what}: {text or os.strerror(number)}")


class Denied(Refused, PermissionError):
    """The user of this process has no right to the name."""


class Incompatible(Error):
    """The agent's version: what it sent is not what this package understands."""

    @classmethod
    def at(cls, path: str, why: str) -> Incompatible:
        """What the agent at `path` sent is none of ours."""
        text = f"the agent and this program do not understand each other: {why}. Use package and agent of one version"
        return cls(errno.EPROTO, text, path)
