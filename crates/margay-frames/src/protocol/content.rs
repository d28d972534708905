//! What a switch carries: requests and answers of a program's protocol, or frames of programs' own.

use margay_wire::{OWN_FRAMES, OwnFrameRepr};

use super::Protocol;
use crate::head::Head;

/// What stands in the place of a frame of a program's own that nobody is to be given any more.
const NOTHING: &[u8] = &[0];

/// What a switch carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Requests and answers, which framers make frames of.
    Requests(Protocol),
    /// Frames of programs that use the SDKs (docs/decisions/0087).
    Frames,
}

impl From<Protocol> for Content {
    fn from(protocol: Protocol) -> Self {
        Self::Requests(protocol)
    }
}

impl Content {
    /// As HELLO has it.
    pub const fn number(self) -> u8 {
        match self {
            Self::Requests(protocol) => protocol.number(),
            Self::Frames => OWN_FRAMES,
        }
    }

    /// As commands and lists have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Requests(protocol) => protocol.name(),
            Self::Frames => "frames",
        }
    }

    /// What a protocol is called by its number.
    pub(super) fn name_of(number: u8) -> &'static str {
        let all = [Self::Requests(Protocol::Memcached), Self::Requests(Protocol::Resp), Self::Frames];
        let found = all.into_iter().find(|content| content.number() == number);
        found.map_or("a protocol that is not known here", Self::name)
    }

    /// Why an end that carries this takes no connection with one that names another protocol.
    pub fn refusal_of(self, number: u8) -> String {
        format!("this end speaks {}, and the other one {}", self.name(), Self::name_of(number))
    }

    /// What a request or frame is placed by, of which the beginning is enough; none in one that any member may have.
    pub(crate) fn key_of(self, request: &[u8]) -> Option<&[u8]> {
        match self {
            Self::Requests(protocol) => protocol.key_of(request),
            Self::Frames => OwnFrameRepr::parse_unnumbered(request).map(|repr| repr.key).filter(|key| !key.is_empty()),
        }
    }

    /// Whether another member may be given it, where nobody knows whether one has acted on it.
    pub(crate) fn is_safe(self, request: &[u8]) -> bool {
        match self {
            Self::Requests(protocol) => protocol.is_safe(request),
            Self::Frames => OwnFrameRepr::parse_unnumbered(request).is_some_and(|repr| repr.is_safe),
        }
    }

    /// Whether its member owes an answer.
    pub(crate) fn wants_answer(self, request: &[u8]) -> bool {
        match self {
            Self::Requests(_) => true,
            Self::Frames => OwnFrameRepr::parse_unnumbered(request).is_some_and(|repr| repr.wants_answer),
        }
    }

    /// Whether what a member sends answers what its number says.
    pub(crate) fn is_answer(self, answer: &[u8]) -> bool {
        match self {
            Self::Requests(_) => true,
            Self::Frames => OwnFrameRepr::parse_unnumbered(answer).is_some_and(|repr| repr.is_answer),
        }
    }

    /// What an answer says, of which the beginning is enough, where it says in the program's own protocol that the
    /// request could not be carried out.
    pub(crate) fn error_of(self, answer: &[u8]) -> Option<String> {
        match self {
            Self::Requests(protocol) => protocol.error_of(answer),
            Self::Frames => None,
        }
    }

    /// Why a module may not make the one of the other; none: it may.
    pub(crate) fn objection(self, request: &[u8], changed: &[u8]) -> Option<&'static str> {
        match self {
            Self::Requests(protocol) if !protocol.is_mixable(request, changed) => {
                Some("redirect makes of a request one of another protocol")
            }
            Self::Requests(protocol) if !protocol.is_request(changed) => {
                Some("redirect makes of a request what is no single request")
            }
            Self::Frames if OwnFrameRepr::parse_unnumbered(changed).is_none() => {
                Some("redirect makes of a frame what is none")
            }
            Self::Requests(_) | Self::Frames => None,
        }
    }

    /// What a member is given in the place of what it must not be given; and whether the client hears by that of the
    /// fate of its request.
    pub(crate) fn in_place(self, head: Head, why: &str) -> (Vec<u8>, bool) {
        match self {
            Self::Requests(protocol) => (head.answered(&protocol.error(why)), true),
            Self::Frames => (head.frame(NOTHING), false),
        }
    }
}
