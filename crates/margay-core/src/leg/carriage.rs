//! How a flow is carried, what changes it, and why it is as it is: the states of the direct path, declared as data
//! ([`direct`](crate::act::path::direct) is what happens at a change).

use crate::leg::stack::Stack;
use crate::types::role::Role;

/// How an established flow is carried. The declared states of the direct path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Carriage {
    /// Encapsulated, and it stays so; the reason is in [`Why`].
    Never,
    /// Encapsulated both ways.
    Encapsulated,
    /// Encapsulated; a pinhole came and was answered, so the peer may send direct at any time.
    Offered,
    /// This end, an initiator, sends direct from the start, and has not heard yet that the peer does. What comes direct
    /// goes to the program at once: the peer has been told by the very message that let it send anything, so that
    /// nothing encapsulated is before it.
    Starting,
    /// This end sends direct, the peer does not yet.
    Sending,
    /// Direct both ways.
    Direct,
}

/// What happens to a flow's direct path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectEvent {
    /// The path was proved lately: start without proof.
    Start,
    /// A direct packet without data came.
    Pinhole,
    /// The peer sends direct from now on.
    PeerDirect,
    /// Direct packets of this end go unanswered.
    Stalled,
    /// The peer, which sent direct, encapsulates again.
    PeerBack,
}

impl DirectEvent {
    /// All of them, for the matrix.
    pub const ALL: [Self; 5] = [Self::Start, Self::Pinhole, Self::PeerDirect, Self::Stalled, Self::PeerBack];
}

/// The declared transitions: state, event, and the next state of an initiator and of a responder. What is not listed
/// changes nothing.
pub const DIRECT: &[(Carriage, DirectEvent, Carriage, Carriage)] = &[
    (Carriage::Encapsulated, DirectEvent::Start, Carriage::Starting, Carriage::Direct),
    (Carriage::Encapsulated, DirectEvent::Pinhole, Carriage::Sending, Carriage::Offered),
    (Carriage::Encapsulated, DirectEvent::PeerDirect, Carriage::Direct, Carriage::Direct),
    (Carriage::Offered, DirectEvent::PeerDirect, Carriage::Direct, Carriage::Direct),
    (Carriage::Offered, DirectEvent::PeerBack, Carriage::Encapsulated, Carriage::Encapsulated),
    (Carriage::Starting, DirectEvent::PeerDirect, Carriage::Direct, Carriage::Direct),
    (Carriage::Starting, DirectEvent::Stalled, Carriage::Encapsulated, Carriage::Encapsulated),
    (Carriage::Starting, DirectEvent::PeerBack, Carriage::Encapsulated, Carriage::Encapsulated),
    (Carriage::Sending, DirectEvent::PeerDirect, Carriage::Direct, Carriage::Direct),
    (Carriage::Sending, DirectEvent::Stalled, Carriage::Encapsulated, Carriage::Encapsulated),
    (Carriage::Direct, DirectEvent::Stalled, Carriage::Encapsulated, Carriage::Encapsulated),
    (Carriage::Direct, DirectEvent::PeerBack, Carriage::Encapsulated, Carriage::Encapsulated),
];

impl Carriage {
    /// The state after `event`, or `None` where it changes nothing.
    pub fn after(self, event: DirectEvent, role: Role) -> Option<Self> {
        let found = DIRECT.iter().find(|(from, on, _, _)| *from == self && *on == event);
        found.map(|(_, _, initiator, responder)| if role == Role::Initiator { *initiator } else { *responder })
    }

    /// Whether this end sends direct.
    pub const fn sends(self) -> bool {
        matches!(self, Self::Starting | Self::Sending | Self::Direct)
    }

    /// Whether the peer sends direct, or may from its first packet on, and everything encapsulated before has passed.
    pub const fn accepts(self) -> bool {
        matches!(self, Self::Starting | Self::Direct)
    }

    /// Whether direct data that comes now is to wait for a FENCE.
    pub const fn expects_fence(self) -> bool {
        matches!(self, Self::Offered | Self::Sending)
    }
}

/// Why a flow is on its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// No eBPF flow cache on this host.
    NoCache,
    /// The peer offered no flow port: it has no eBPF, or is of an older version.
    PeerHasNone,
    /// It is sealed, and only user space can do that.
    Secure,
    /// It goes by `fec`, and only user space can do that.
    Fec,
    /// It goes by `sctp`, and only user space can do that.
    Sctp,
    /// It goes by several pairs of addresses at once, and only user space can do that.
    Striped,
    /// Both ends are on this host.
    SameHost,
    /// The pair of ports was taken.
    PortsTaken,
    /// Another host shares the peer's address.
    SharedAddress,
    /// No direct packet has come through yet.
    Unproved,
    /// Packets of its own kind came through both ways.
    Proved,
    /// Another flow had proved the path a moment before.
    Hinted,
    /// The hosts' kernels set it up by themselves.
    Granted,
    /// Direct packets went unanswered: a firewall, say.
    Stalled,
    /// The peer went back.
    PeerBack,
    /// The hosts' addresses have changed, and no direct packet has come by the new ones yet.
    Held,
    /// No place is known where the peer could be reached.
    Nowhere,
}

impl Why {
    /// Why a flow of this stack is never direct.
    pub(crate) const fn of_stack(stack: Stack) -> Self {
        match stack {
            Stack::Fec => Self::Fec,
            Stack::Sctp => Self::Sctp,
            Stack::Plain | Stack::Secure | Stack::SecureFec | Stack::SecureSctp => Self::Secure,
        }
    }

    /// A sentence for lists.
    pub const fn text(self) -> &'static str {
        match self {
            Self::NoCache => "this host has no eBPF flow cache; `margay check` says why",
            Self::PeerHasNone => "the peer offers no direct path",
            Self::Secure => "it is carried `secure`, which is never direct",
            Self::Fec => "it is carried by `fec`, which is never direct",
            Self::Sctp => "it is carried by `sctp`, which is never direct",
            Self::Striped => "it is striped over several pairs of addresses, which is never direct",
            Self::SameHost => "both ends are on this host",
            Self::PortsTaken => "its pair of flow ports is in use",
            Self::SharedAddress => "several hosts share the peer's address",
            Self::Unproved => "no direct packet of this flow has come through yet",
            Self::Proved => "direct packets of this flow came through both ways",
            Self::Hinted => "other flows had proved the path",
            Self::Granted => "set up in the kernel, by a grant",
            Self::Stalled => "direct packets went unanswered; a firewall between the hosts may drop them",
            Self::PeerBack => "the peer went back to encapsulation",
            Self::Held => "the hosts' addresses changed, and no direct packet has come by the new ones yet",
            Self::Nowhere => "neither end is known to be reachable now; it goes on as soon as one is",
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::String;
    use core::fmt::Write as _;

    use super::*;

    #[test]
    fn the_whole_matrix_of_the_direct_path() {
        let states = [
            Carriage::Never,
            Carriage::Encapsulated,
            Carriage::Offered,
            Carriage::Starting,
            Carriage::Sending,
            Carriage::Direct,
        ];
        let mut matrix = String::new();
        for state in states {
            for event in DirectEvent::ALL {
                let after = |role| state.after(event, role).map_or(String::from("-"), |to| alloc::format!("{to:?}"));
                let (initiator, responder) = (after(Role::Initiator), after(Role::Responder));
                if (initiator.as_str(), responder.as_str()) != ("-", "-") {
                    writeln!(matrix, "{state:?} {event:?} {initiator} {responder}").expect("a String takes all");
                }
            }
        }
        let expected = "\
Encapsulated Start Starting Direct
Encapsulated Pinhole Sending Offered
Encapsulated PeerDirect Direct Direct
Offered PeerDirect Direct Direct
Offered PeerBack Encapsulated Encapsulated
Starting PeerDirect Direct Direct
Starting Stalled Encapsulated Encapsulated
Starting PeerBack Encapsulated Encapsulated
Sending PeerDirect Direct Direct
Sending Stalled Encapsulated Encapsulated
Direct Stalled Encapsulated Encapsulated
Direct PeerBack Encapsulated Encapsulated\n";
        assert_eq!(matrix, expected);
    }
}
