//! What the core asks of its caller, and what it says about a packet.

use core::fmt;
use core::net::{IpAddr, SocketAddr};

use margay_wire::FlowId;

use crate::entry::EntryUpdate;

/// One thing for the caller to do. They come in one ordered queue: an entry is installed before the packet that needs
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send `buf[..len]` as a UDP datagram from the SAL port.
    Transmit {
        /// This host's address to send from; `None` where its routing decides.
        local: Option<IpAddr>,
        /// Destination.
        to: SocketAddr,
        /// Bytes of the datagram.
        len: usize,
    },
    /// Write the IP packet `buf[..len]` to `sal0`; its checksums are complete.
    Inject {
        /// Bytes of the packet.
        len: usize,
    },
    /// Write the IP packet `buf[..len]` to `sal0`, as above: one of this flow's peer, which came by the core. It may
    /// end the connection: that is to be told of if the application's TCP takes it for an ending (RFC 5961), as of
    /// what the cache carries.
    Deliver {
        /// The flow.
        flow: FlowId,
        /// Bytes of the packet.
        len: usize,
    },
    /// An application's packet that was held: carry `buf[..len]` as if it had just been read from `sal0`.
    Egress {
        /// Bytes of the IP packet.
        len: usize,
    },
    /// A DATA datagram that was held: process `buf[..len]` as if it had just been received.
    Ingress {
        /// Who sent it.
        from: SocketAddr,
        /// Bytes of the datagram.
        len: usize,
    },
    /// Change the flow cache.
    Update(EntryUpdate),
    /// Send a bare TCP segment of this flow on its flow ports, with the numbers that its application has shown.
    Pinhole(FlowId),
    /// The same, if the numbers are known, with [`KNOCK_WINDOW`](crate::KNOCK_WINDOW) for its window: nothing of the
    /// peer's has come.
    Knock(FlowId),
    /// Once everything of this flow that was read from `sal0` before is sent, send an empty DATA with FENCE.
    Fence(FlowId),
    /// Send an empty DATA without FENCE now: the peer learns that this end encapsulates again, even if it has no data.
    Back(FlowId),
    /// What was in flight of this connection is lost: have the host's TCP send it again now, instead of when its timer
    /// says so (DESIGN §18).
    Restart(FlowId),
    /// Both ends of a connection have closed: ask the flow cache whether each has acknowledged all of the other's, FIN
    /// included, and give its answer to [`Sal::handle_ending`](crate::Sal::handle_ending).
    Ending(FlowId),
    /// Ask the kernel's cache what has become of these flows of a grant, a bit for each, and give its answer to
    /// [`Sal::handle_survey`](crate::Sal::handle_survey).
    Survey {
        /// Which grant.
        grant: FlowId,
        /// By flow.
        flows: u128,
    },
    /// Have it tell [`Sal::handle_opened`](crate::Sal::handle_opened) of these, as far as they have been answered.
    Tell {
        /// Which grant.
        grant: FlowId,
        /// By flow.
        flows: u128,
    },
    /// There are questions for resolvers: [`Sal::poll_question`](crate::Sal::poll_question) gives them. Said once,
    /// until there are further ones.
    Questions,
    /// Names need virtual addresses on this host: [`Sal::take_wanted_leases`](crate::Sal::take_wanted_leases) gives
    /// them. Said once, until there are further ones.
    Leases,
    /// Peers want connections of programs here to end in order: [`Sal::take_quiet_requests`]
    /// (crate::Sal::take_quiet_requests) gives them. Said once, until there are further ones.
    QuietEnds,
    /// Something that a router's copy of the service table must know has changed: [`Sal::take_route_changes`]
    /// (crate::Sal::take_route_changes) and [`Sal::take_hop_key_changes`](crate::Sal::take_hop_key_changes) say what.
    /// Said once, until it is asked for.
    Routes,
}

/// What became of an application's packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppVerdict {
    /// The core took it: it is held, carried in signalling or answered.
    Consumed,
    /// The flow is known; its entry is in the output queue. Drain the queue and look the packet up once more.
    Forward(FlowId),
    /// Not carried, and why.
    Drop(DropReason),
}

/// Which way a packet went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the application to the peer.
    Egress,
    /// From the peer to the application.
    Ingress,
}

macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)*) => {
        /// Why a packet was dropped. Numbers are stable and never reused; metrics, traces and eBPF share them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DropReason { $($(#[$doc])* $name = $number,)* }

        impl DropReason {
            /// Every reason, by number.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The name that metrics carry: lower case, words joined by `_`.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

drop_reasons! {
    /// The datagram does not follow the format.
    Malformed = 1, "malformed";
    /// A version that this program does not speak.
    Version = 2, "version";
    /// A message that must be authenticated carries no tag.
    Untagged = 3, "untagged";
    /// The tag names no association.
    UnknownAssociation = 4, "unknown_association";
    /// The tag is wrong.
    BadTag = 5, "bad_tag";
    /// Sent under an epoch that the sender has left.
    OldEpoch = 6, "old_epoch";
    /// Seen before, or too old to tell.
    Replayed = 7, "replayed";
    /// No flow of that identifier.
    UnknownFlow = 8, "unknown_flow";
    /// A message that does not fit the state of its flow.
    Unexpected = 9, "unexpected";
    /// The hop tag is missing or wrong where one is needed.
    BadHopTag = 10, "bad_hop_tag";
    /// The hop limit ran out.
    HopLimit = 11, "hop_limit";
    /// A cookie was asked for.
    CookieWanted = 12, "cookie_wanted";
    /// The cookie is wrong or too old.
    BadCookie = 13, "bad_cookie";
    /// A table or queue is at its bound.
    Full = 14, "full";
    /// The service table says DROP.
    ServiceDrop = 15, "service_drop";
    /// Nobody serves the name.
    NoService = 16, "no_service";
    /// The handshake failed: garbage, or made for another session.
    BadHandshake = 17, "bad_handshake";
    /// The certificate does not let the host answer for the name.
    BadCertificate = 18, "bad_certificate";
    /// The peer may not connect.
    NotAllowed = 19, "not_allowed";
    /// A protocol that Margay does not carry.
    Protocol = 20, "protocol";
    /// The address is not one of a name.
    NoName = 21, "no_name";
    /// The source of a DATA packet is not on the flow's paths.
    WrongPath = 22, "wrong_path";
    /// A part of a fragmented packet or of a train did not come in time.
    Incomplete = 23, "incomplete";
    /// A critical extension that this program does not know.
    UnknownCritical = 24, "unknown_critical";
    /// Over the rate at which such messages are answered.
    RateLimited = 25, "rate_limited";
    /// TCP-MD5 or TCP-AO signs addresses, which Margay rewrites.
    SignedTcp = 26, "signed_tcp";
    /// The operating system refused to send or write it.
    Environment = 27, "environment";
    /// Of a location that its host has left since.
    Stale = 28, "stale";
    /// The token is not the one that was sent to the place that the message comes from.
    BadToken = 29, "bad_token";
    /// Nowhere to send it: the peer's place is not known.
    Nowhere = 30, "nowhere";
    /// DATA of a sealed flow that is not sealed, or the other way round, or under another cipher.
    OtherStack = 31, "other_stack";
    /// Sealed DATA whose tag is wrong: forged, or damaged.
    BadSeal = 32, "bad_seal";
    /// Sealed DATA that has been opened before, or is too old to tell.
    ReplayedSeal = 33, "replayed_seal";
    /// Sealed under epochs that are not the present ones: an agent has started again.
    OtherEpoch = 34, "other_epoch";
    /// Nobody serves the name yet: this router has just started, and hosts are still to register.
    Awaited = 35, "awaited";
    /// Another host uses the sender's key; whether that one is still there is being asked, and this is heard again
    /// then.
    Inquired = 36, "inquired";
    /// Another host uses the sender's key, was there before it, and is alive.
    KeptOut = 37, "kept_out";
    /// Another act is changing the session. It is heard when it comes again later.
    Locked = 38, "locked";
    /// A datagram of `fec` that has come twice, or after it was given up, or whose number is far from the others.
    LateDatagram = 39, "late_datagram";
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}
