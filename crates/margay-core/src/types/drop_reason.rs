//! Why packets and messages are dropped.

use core::fmt;

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
    /// This host is starting; or nobody serves the name yet, since this router has just started, and hosts are still
    /// to register.
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
    /// The peer names another cipher for a flow that has one.
    OtherCipher = 40, "other_cipher";
    /// What a box was given, from a program of its host and not out of the box.
    NotForwarded = 41, "not_forwarded";
    /// The ACK shows that the SYN was changed on the path.
    SynChanged = 42, "syn_changed";
    /// It has the five-tuple of a flow whose socket has a source name, and was not sent by a socket of this host.
    NotItsSocket = 43, "not_its_socket";
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}
