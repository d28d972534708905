"""Sockets by service name: connect to, serve and exchange datagrams with the services of a Margay network.

    sock = margay.connect("web.shop")               # a socket.socket
    listener = margay.listen("web.shop")            # conn, peer = listener.accept(); peer.service
    reader, writer = await margay.open_connection("web.shop")
    margay.hand_over(conn, "web.shop")              # to the process that iterates over margay.take_over("web.shop")

All sockets are ordinary ones of the kernel; this package asks the agent of this host which addresses stand for a name,
tells it what a socket serves, and asks who a peer is. Nothing that is sent or received passes through it.
"""

from ._agent import DEFAULT_PATH, Addresses, Agent
from ._aio import (
    AsyncDatagrams,
    create_datagram_endpoint,
    hand_over_async,
    open_connection,
    open_datagrams,
    open_takeover,
    peer_service,
    start_server,
)
from ._calls import (
    connect,
    connect_datagrams,
    datagrams,
    events,
    hand_over,
    listen,
    listen_prefix,
    name,
    pass_next,
    report_load,
    splice,
    take_over,
    take_over_giving,
)
from ._errors import AgentDown, Denied, Error, Incompatible, Refused
from ._events import Event, Events
from ._frames import (
    PER_SERVER,
    UNORDERED,
    AsyncFrames,
    AsyncFramesListener,
    Frame,
    Frames,
    FramesListener,
    Lost,
    connect_frames,
    listen_frames,
    open_frames,
    open_frames_listener,
)
from ._names import Name, Prefix, ServiceId, Target
from ._socket import OWN, Own, Peer, Socket
from ._takeover import Give, GivingTakeover, Taken, Takeover

__all__ = [
    "DEFAULT_PATH",
    "OWN",
    "PER_SERVER",
    "UNORDERED",
    "Addresses",
    "Agent",
    "AgentDown",
    "AsyncDatagrams",
    "AsyncFrames",
    "AsyncFramesListener",
    "Denied",
    "Error",
    "Event",
    "Events",
    "Frame",
    "Frames",
    "FramesListener",
    "Give",
    "GivingTakeover",
    "Incompatible",
    "Lost",
    "Name",
    "Own",
    "Peer",
    "Prefix",
    "Refused",
    "ServiceId",
    "Socket",
    "Taken",
    "Takeover",
    "Target",
    "connect",
    "connect_datagrams",
    "connect_frames",
    "create_datagram_endpoint",
    "datagrams",
    "events",
    "hand_over",
    "hand_over_async",
    "listen",
    "listen_frames",
    "listen_prefix",
    "name",
    "open_connection",
    "open_datagrams",
    "open_frames",
    "open_frames_listener",
    "open_takeover",
    "pass_next",
    "peer_service",
    "report_load",
    "splice",
    "start_server",
    "take_over",
    "take_over_giving",
]
