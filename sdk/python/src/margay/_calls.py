"""One call for what programs mostly do with sockets."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ._agent import Agent
from ._events import Events
from ._names import Name, Prefix, Target
from ._socket import BACKLOG, Own, Socket
from ._takeover import GivingTakeover, Takeover


def connect(
    target: Target, *, timeout: float | None = None, source: Target | Own | None = None, agent: Agent | None = None
) -> Socket:
    """Connects to a service: to one of its instances, chosen now.

    `timeout` in seconds holds for the connect and for all that follows, as in socket.create_connection. `source` is the
    name that the service sees; without it, that of the host. Raises AgentDown, Refused, and what any connect raises:
    ConnectionRefusedError or OSError(EHOSTUNREACH) where nobody serves the name.
    """
    return _opened(Socket(agent=agent), target, timeout, source)


def connect_datagrams(
    target: Target, *, timeout: float | None = None, source: Target | Own | None = None, agent: Agent | None = None
) -> Socket:
    """Datagrams to and from one instance of a service. See `connect`."""
    return _opened(Socket(type=socket.SOCK_DGRAM, agent=agent), target, timeout, source)


def _opened(sock: Socket, target: Target, timeout: float | None, source: Target | Own | None) -> Socket:
    try:
        if timeout is not None:
            sock.settimeout(timeout)
        if source is not None:
            sock.use_source(source)
        sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return sock


def listen(target: Target, *, backlog: int = BACKLOG, agent: Agent | None = None) -> Socket:
    """Serves a name until the socket is closed, at a port of the kernel's choice; clients need none. A name that stands
    for a prefix ("sid:3f00/8") serves all of it.

    Raises AgentDown; Denied (the user of this process has no right to the name); Refused with EADDRINUSE (another name
    has the same bits, or an exclusive name is taken). That a service router refuses shows later, in `margay service
    list`.
    """
    sock = Socket(agent=agent)
    try:
        # Before it listens: what is refused shall not have answered anybody.
        sock.bind(target)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def listen_prefix(prefix: Prefix | str, *, backlog: int = BACKLOG, agent: Agent | None = None) -> Socket:
    """Serves every name under a prefix. See `listen`."""
    return listen(prefix, backlog=backlog, agent=agent)


def datagrams(
    target: Target | None = None, *, source: Target | Own | None = None, agent: Agent | None = None
) -> Socket:
    """Datagrams to any service, each to an instance chosen for it; with a name, also from anybody. See `listen`."""
    sock = Socket(type=socket.SOCK_DGRAM, agent=agent)
    try:
        sock.bind_anywhere()
        if source is not None:
            sock.use_source(source)
        if target is not None:
            sock.bind(target)
    except BaseException:
        sock.close()
        raise
    return sock


def events(agent: Agent | None = None) -> Events:
    """What happens to the flows of this user's programs (of all programs, for root)."""
    return Events(agent)


def name(written: str, *, agent: Agent | None = None) -> Name:
    """What the agent reads in a written name. Refused with EINVAL if it is none."""
    return (agent or Agent.shared()).name(written)


def hand_over(
    sock: socket.socket, name: Target | None = None, data: bytes = b"", *, to: str = "", agent: Agent | None = None
) -> None:
    """Gives a TCP socket, connected or listening, to another process of this user on this host that takes over its
    name, and waits until that process has it: four seconds at most, of an agent that works.

    `to`: the name or host-ID of a host where an accepted connection is to go on; where none is said, and no process of
    this host takes over the name, it goes to any other host that serves it. That takes 45 seconds at most.

    `name`: None lets the agent find the name by which the connection came; a listening socket needs one. `data` is for
    the other process to know, 1 MiB at most: what has been read of the next request, and so on. Bytes that nobody has
    read go with the socket; what this program has in buffers of its own (`makefile`, TLS) does not.

    Afterwards `sock` is closed. Other descriptors of it (`dup`, a child's) are the caller's to close, and a selector's
    to forget before this call.

    Raises what leaves `sock` open, still the caller's and as it was: ValueError (more data); Refused with ESRCH (nobody
    takes over the name), ETIMEDOUT (who does, has not taken it), ENOTCONN (no flow that says the name), EHOSTUNREACH
    (the other host is unknown, or does not answer), EOPNOTSUPP (the connection cannot go there), or another reason;
    AgentDown where nothing could be asked. Raises Refused with ECONNABORTED where neither host has the connection:
    `sock` is closed then. Raises AgentDown with errno ECONNABORTED where the agent ended, or was silent for 45 seconds,
    after it had been asked: nobody knows who has the socket, so that `sock` is closed, and the connection may be lost.
    It is closed, too, with Incompatible and when the call is interrupted. Nothing is asked a second time.
    `sock.fileno()` is -1 where it is closed.
    """
    if agent is None:
        agent = sock.agent if isinstance(sock, Socket) else Agent.shared()
    agent.hand_over(sock, name, data, to)


def take_over(name: Target, *, agent: Agent | None = None) -> Takeover:
    """From now on this process takes over the sockets of a name, or of all names of a prefix ("sid:3f00/8"), that other
    processes of this user hand over: it iterates over them.

    Raises AgentDown; Denied (the user of this process has no right to the name); Refused with EUSERS (64 processes of
    this user take over names already).
    """
    takeover = Takeover(name, agent)
    takeover.open()
    return takeover


def take_over_giving(name: Target, *, agent: Agent | None = None) -> GivingTakeover:
    """As `take_over`, of a process that gives its own connections to other hosts when it is asked to. It iterates over
    `Taken` and `Give`."""
    takeover = GivingTakeover(name, agent)
    takeover.open()
    return takeover


def report_load(name: Target, percent: int, *, agent: Agent | None = None) -> None:
    """Says how much of its weight this process is to keep for a name, or a prefix of names, that it serves.

    `percent` is 0 to 100; with 0 no new connection comes.

    It holds until the next report of the name, and as long as this process and the agent live: say it again every few
    seconds. It is cheap, and the agent tells others at most once in a second. Of several processes that serve the name
    on this host the smallest report counts.

    Raises ValueError; AgentDown; Denied (no right to the name); Refused with ENOENT (this process does not serve the
    name) or ENOSPC (64 names are reported of already); Incompatible where the agent is of an earlier release, which
    takes no reports.
    """
    (agent or Agent.shared()).report_load(name, percent)


def pass_next(
    boxes: Sequence[str],
    source: tuple[str, int],
    destination: tuple[str, int],
    *,
    protocol: int = socket.IPPROTO_TCP,
    agent: Agent | None = None,
) -> None:
    """Has a session go through these boxes next, in order, before the rest of its chain: for the program of a box.

    `source` and `destination` are those of the session's first packet as it has come to the box by sal0. The box must
    not have let that packet out; as long as it keeps the packet, for a second at most, the last call counts. To say the
    same again does nothing.

    The process must belong to the program that was started as the box, or its user may serve the box's name, as root
    may. Which boxes may be named the policy says, by `may_add` of the session's chain.

    Raises ValueError; AgentDown; Denied (the program is not that box's); Refused with ENOTCONN (no such session has
    come to a box of this host), EPERM (the policy does not let the box be added to such sessions), EALREADY (the first
    packet has left the box), E2BIG (more than eight boxes) or EINVAL (a name that is no box's, or that the session
    passes already); Incompatible where the agent is of an earlier release.
    """
    (agent or Agent.shared()).pass_next(boxes, source, destination, protocol)


def splice(left: socket.socket, right: socket.socket, *, agent: Agent | None = None) -> None:
    """Leaves between two TCP connections: `left`, which this program has accepted by a name, and `right`, which it has
    opened to one. They become one connection, without this program.

    All that was read of either must have been written to the other one; what is in buffers of this program (`makefile`,
    TLS) is lost. Afterwards both are closed here. Until they are one, or for as long as they cannot be, the agent
    relays between the two; the ends notice nothing either way. An agent that is restarted while it relays ends the two
    connections by resets.

    Raises what leaves both open, still the caller's: Refused with ENOTCONN (one of them is no connection by a name),
    EINVAL (they are in the wrong order), EALREADY, or EOPNOTSUPP (they cannot become one); Incompatible where the agent
    is of an earlier release; AgentDown where nothing could be asked. Raises AgentDown with errno ECONNABORTED where the
    agent ended after it had been asked: nobody knows who relays, so that both are closed.
    """
    if agent is None:
        agent = left.agent if isinstance(left, Socket) else Agent.shared()
    agent.splice(left, right)
