//! Why the stack of a flow is not changed.

use margay_wire::{CHANGES, ErrorCode, FlowId};

use super::ChangeOutcome;
use crate::act::secure::CipherBound;
use crate::association::Association;
use crate::leg::seal::Cipher;
use crate::leg::stack::Stack;
use crate::machine::sal::Sal;
use crate::session::LockError;
use crate::session::flow::Flow;
use crate::types::fair_table::Full;
use crate::types::role::Lifecycle;

const UDP: u8 = 17;

/// One end of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This host.
    This,
    /// The peer.
    Peer,
}

/// Why not; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefused {
    /// No such flow.
    #[error("there is no flow {0}; `margay flow list` shows those that there are")]
    UnknownFlow(FlowId),
    /// The same, at the peer.
    #[error("the peer's agent does not know the flow yet, or no more; try again in a moment")]
    UnknownToPeer,
    /// It is being set up, or one side has closed.
    #[error("only a connection that is set up, and that nobody has closed, can be carried in another way")]
    NotOpen,
    /// The server has not confirmed yet that it is set up.
    #[error("the connection is only being set up: its server has not confirmed it yet; try again in a moment")]
    Unconfirmed,
    /// Client and server are one host.
    #[error("both ends are on this host: nothing of the flow leaves it")]
    SameHost,
    /// It goes by several pairs of addresses.
    #[error(
        "the flow is striped over several pairs of addresses; give it another policy first \
         (`margay flow policy FLOW fail-over`)"
    )]
    Striped,
    /// Its session goes through boxes.
    #[error(
        "the session goes through boxes, and this flow is one of its hops: the others would stay as they are; have the \
         name demand `secure` instead"
    )]
    Chained,
    /// It is being handed over to another host.
    #[error("the connection is on its way to another host; try again when it is there")]
    Held,
    /// A change of it is under way.
    #[error("the flow's stack is being changed already; `margay stack show FLOW` shows what becomes of it")]
    UnderWay,
    /// Another act is at work.
    #[error("{0}")]
    Busy(LockError),
    /// The same, at the peer.
    #[error("the peer's agent changes this flow already, or too many others; try again in a moment")]
    PeerBusy,
    /// The peer's version knows no changes.
    #[error("the agent of the peer is of a version that cannot change a live flow; bring it up to date")]
    OldPeer,
    /// The two ends have no cipher in common.
    #[error("the two hosts have no cipher in common")]
    NoCipher,
    /// The flow has keys for another cipher.
    #[error("the flow has a cipher, which stays the same until one of the two agents starts again")]
    OtherCipher,
    /// The peer's version has no `fec`.
    #[error("the agent of the peer is of a version that has no `fec`; bring it up to date")]
    NoFec,
    /// The peer's version cannot seal what goes by `fec`.
    #[error("the agent of the peer is of a version that cannot seal what goes by `fec`; bring it up to date")]
    NoSealedFec,
    /// It has been tried, and nothing of it came.
    #[error(
        "what was sent by `fec` or `sctp` did not come to the peer, whose agent answers; a rule tries again after a \
         minute"
    )]
    Failed,
    /// The peer has said nothing of an earlier change.
    #[error("the peer's agent has not answered in time; it is asked again after a while")]
    NoAnswer,
    /// The peer's version has no `sctp`.
    #[error("the agent of the peer is of a version that has no `sctp`; bring it up to date")]
    NoSctp,
    /// The peer's version cannot seal what goes by `sctp`.
    #[error("the agent of the peer is of a version that cannot seal what goes by `sctp`; bring it up to date")]
    NoSealedSctp,
    /// It is a connection.
    #[error("`fec` and `sctp` are for flows of datagrams: TCP repeats by itself what is lost")]
    DatagramsOnly,
    /// An end demands that the flow is sealed.
    #[error("{}", demanded(.0))]
    Demanded(End),
    /// A rule wants it, and an order, or a rule of another end, is against it.
    #[error("{}", outranked(.0))]
    Outranked(End),
    /// There is no order to release.
    #[error("no order holds for this flow; `margay stack show FLOW` shows why it is carried as it is")]
    NoOrder,
    /// Too many are changed at once.
    #[error("too many flows are being changed: {0}")]
    Full(Full),
    /// The peer does not agree, for a reason that this version does not know.
    #[error("the peer's agent refuses, with code {0}")]
    ByPeer(u16),
}

fn demanded(end: &End) -> &'static str {
    match end {
        End::This => "this host demands `secure` for this flow, by its configuration or a rule, and it gets no less",
        End::Peer => "the peer demands `secure` for this flow, and it gets no less",
    }
}

fn outranked(end: &End) -> &'static str {
    match end {
        End::This => "an order or a rule of this host wants the flow as it is",
        End::Peer => "an order or a rule at the peer's end wants the flow as it is",
    }
}

impl From<CipherBound> for ChangeRefused {
    fn from(CipherBound: CipherBound) -> Self {
        Self::OtherCipher
    }
}

impl ChangeRefused {
    /// What a peer is told.
    pub(super) const fn code(self) -> ErrorCode {
        match self {
            // The peer hears of it what one hears who asks a moment too early at the other end.
            Self::UnknownFlow(_) | Self::UnknownToPeer | Self::Unconfirmed => ErrorCode::UnknownFlow,
            Self::NotOpen => ErrorCode::Closed,
            Self::Striped => ErrorCode::Striped,
            Self::Held | Self::UnderWay | Self::Busy(_) | Self::PeerBusy | Self::Full(_) => ErrorCode::Overloaded,
            Self::OldPeer
            | Self::NoCipher
            | Self::OtherCipher
            | Self::NoFec
            | Self::NoSealedFec
            | Self::NoSctp
            | Self::NoSealedSctp => ErrorCode::NoCommonStack,
            Self::DatagramsOnly => ErrorCode::DatagramsOnly,
            Self::Demanded(_) => ErrorCode::Demanded,
            Self::Outranked(_) => ErrorCode::Outranked,
            Self::SameHost | Self::Chained | Self::NoOrder | Self::Failed | Self::NoAnswer | Self::ByPeer(_) => {
                ErrorCode::Refused
            }
        }
    }

    /// What a peer has said.
    pub(super) fn of_peer(code: ErrorCode) -> Self {
        match code {
            ErrorCode::UnknownFlow => Self::UnknownToPeer,
            ErrorCode::Closed => Self::NotOpen,
            ErrorCode::Striped => Self::Striped,
            ErrorCode::Overloaded => Self::PeerBusy,
            ErrorCode::NoCommonStack => Self::NoCipher,
            ErrorCode::DatagramsOnly => Self::DatagramsOnly,
            ErrorCode::Demanded => Self::Demanded(End::Peer),
            ErrorCode::Outranked => Self::Outranked(End::Peer),
            other => Self::ByPeer(other.into()),
        }
    }
}

impl Sal {
    /// Whether this end agrees that the flow is carried by a stack.
    pub(super) fn may_change(&self, id: FlowId, to: Stack) -> Result<(), ChangeRefused> {
        let flow = self.flows.get(id).ok_or(ChangeRefused::UnknownFlow(id))?;
        let association = self.associations.get(flow.association);
        let is_open = flow.lifecycle == Lifecycle::Established && flow.carries_data();
        let refused = match to {
            _ if association.is_some_and(Association::is_self) => ChangeRefused::SameHost,
            _ if !is_open => ChangeRefused::NotOpen,
            _ if !flow.is_proved() => ChangeRefused::Unconfirmed,
            _ if flow.stripe.is_some() => ChangeRefused::Striped,
            _ if flow.chain.is_some() => ChangeRefused::Chained,
            _ if flow.is_held || self.fetches.is_between(id) => ChangeRefused::Held,
            _ if association.is_none_or(|association| association.stacks & CHANGES == 0) => ChangeRefused::OldPeer,
            to if to.makes_good() && flow.app.protocol != UDP => ChangeRefused::DatagramsOnly,
            to if !to.is_sealed() && flow.is_demanded_here() => ChangeRefused::Demanded(End::This),
            Stack::Fec if !association.is_some_and(Association::has_fec) => ChangeRefused::NoFec,
            Stack::Sctp if !association.is_some_and(Association::has_sctp) => ChangeRefused::NoSctp,
            to if to.is_sealed() && self.cipher_for(flow).is_none() => ChangeRefused::NoCipher,
            Stack::SecureFec if !self.can_seal(flow, to) => ChangeRefused::NoSealedFec,
            Stack::SecureSctp if !self.can_seal(flow, to) => ChangeRefused::NoSealedSctp,
            _ => return Ok(()),
        };
        Err(refused)
    }

    /// Whether what a flow sends can go by a stack, sealed or not, under its seal.
    pub(crate) fn can_seal(&self, flow: &Flow, stack: Stack) -> bool {
        let association = self.associations.get(flow.association);
        let cipher = self.cipher_for(flow);
        let is_able = |(peer, cipher): (&Association, Cipher)| match stack.sealed() {
            Stack::SecureFec => flow.app.protocol == UDP && peer.has_sealed_fec(cipher),
            Stack::SecureSctp => flow.app.protocol == UDP && peer.has_sealed_sctp(cipher),
            Stack::Plain | Stack::Fec | Stack::Sctp | Stack::Secure => true,
        };
        association.zip(cipher).is_some_and(is_able)
    }

    /// The configuration has come to demand that a flow is sealed: a change to less that is not made yet comes to
    /// nothing.
    pub(crate) fn keep_as_demanded(&mut self, id: FlowId) {
        let now = self.now;
        let outcome = ChangeOutcome::Refused(ChangeRefused::Demanded(End::This));
        if self.stack_changes.leading.get(&id).is_some_and(|one| !one.to.is_sealed() && !one.is_made()) {
            self.abandon(now, id, outcome);
        }
        if self.stack_changes.following.get(&id).is_some_and(|one| !one.to.is_sealed() && !one.is_made()) {
            // The initiator may have made it already: then its word is answered by what the flow has here.
            self.unready(id);
            self.end_following(now, id, outcome);
        }
        if self.stack_changes.proposing.get(&id).is_some_and(|one| !one.to.is_sealed()) {
            self.end_proposing(now, id, outcome);
        }
    }

    /// The cipher that a flow is or would be sealed with. One that it has had stays its own: its numbers go on.
    pub(super) fn cipher_for(&self, flow: &Flow) -> Option<Cipher> {
        let had = flow.seal.as_ref().map(|keys| keys.cipher);
        had.or_else(|| Cipher::best(self.secure.secure_stacks() & self.associations.get(flow.association)?.stacks))
    }
}
