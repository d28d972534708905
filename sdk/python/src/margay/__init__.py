"""Sockets by service name: connect to, serve and exchange datagrams with the services of a Margay network.

    sock = margay.connect("web.shop")               # a socket.socket
    listener = margay.listen("web.shop")            # conn, peer = listener.accept(); peer.service
    reader, writer = await margay.open_connection("web.shop")

All sockets are ordinary ones of the kernel; this package asks the agent of this host which addresses stand for a name,
tells it what a socket serves, and asks who a peer is. Nothing that is sent or received passes through it.
"""

from ._agent import DEFAULT_PATH, Addresses, Agent
from ._aio import (
    AsyncDatagrams,
    create_datagram_endpoint,
    open_connection,
    open_datagrams,
    peer_service,
    start_server,
)
from ._calls import connect, connect_datagrams, datagrams, events, listen, listen_prefix, name
from ._errors import AgentDown, Denied, Error, Incompatible, Refused
from ._events import Event, Events
from ._names import Name, Prefix, ServiceId, Target
from ._socket import OWN, Own, Peer, Socket

__all__ = [
    "DEFAULT_PATH",
    "OWN",
    "Addresses",
    "Agent",
    "AgentDown",
    "AsyncDatagrams",
    "Denied",
    "Error",
    "Event",
    "Events",
    "Incompatible",
    "Name",
    "Own",
    "Peer",
    "Prefix",
    "Refused",
    "ServiceId",
    "Socket",
    "Target",
    "connect",
    "connect_datagrams",
    "create_datagram_endpoint",
    "datagrams",
    "events",
    "listen",
    "listen_prefix",
    "name",
    "open_connection",
    "open_datagrams",
    "peer_service",
    "start_server",
]
