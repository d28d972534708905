//! Why the boxes of a session are not changed.

use alloc::string::{String, ToString};

use margay_wire::{ErrorCode, FlowId};

use super::EditError;
use crate::act::chain::ChainPolicy;
use crate::association::AssociationTable;
use crate::machine::sal::Sal;
use crate::session::LockError;
use crate::session::flow::{Flow, Marks, Setup};
use crate::types::fair_table::{Full, Peer};
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::role::{Lifecycle, Role};

/// Why not; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReconfigurationRefused {
    /// No such flow.
    #[error("there is no flow {0}; `margay flow list` shows those that there are")]
    UnknownFlow(FlowId),
    /// It is the server's end.
    #[error("the host of the session's client leads a change of its boxes, and this flow is served here")]
    Served,
    /// It is a half at a box.
    #[error("the host of the session's client leads a change of its boxes, and this is the host of a box")]
    AtBox,
    /// It is being set up, or it is over.
    #[error("only a session that is set up, and that is not over, can go through other boxes")]
    NotOpen,
    /// Client and server are one host.
    #[error("both ends of the session are on this host: nothing of it leaves the host")]
    SameHost,
    /// The host that orders it is that of a box, and it is not about that box.
    #[error("the host of a box may take its own out, replace it, or put a box in directly before or behind it")]
    NotItsBox,
    /// The host that orders it is neither that of the server nor that of a box.
    #[error("the host that orders it is neither known to serve the session nor any of its boxes")]
    NotOfSession,
    /// The client's host is to put in what its policy does not know.
    #[error("no chain of the signed policy names {}", .0)]
    NotNamed(ServiceId),
    /// It goes by several pairs of addresses.
    #[error(
        "the flow is striped over several pairs of addresses; give it another policy first \
         (`margay flow policy FLOW fail-over`)"
    )]
    Striped,
    /// A program leaves, and before it is a proxy of the same chain.
    #[error("the session begins at a proxy of the chain that the program which leaves is of, and keeps it therefore")]
    BehindProxy,
    /// It waits: another act has it.
    #[error("the connection is on its way to another host, or waits to be sealed; try again in a moment")]
    Held,
    /// Nobody knows who is at its other end.
    #[error(
        "the session was set up by an agent of a version that does not note who is at its other end; sessions that \
         begin from now on can be changed"
    )]
    UnknownEnd,
    /// The session cannot have these boxes.
    #[error("{0}")]
    Edit(EditError),
    /// Too many orders wait already, or a program is leaving.
    #[error("the session is being changed, and other orders wait; try again in a moment")]
    UnderWay,
    /// Another act is at work.
    #[error("{0}")]
    Busy(LockError),
    /// Too many are changed at once.
    #[error("too many sessions are being changed: {0}")]
    Full(Full),
    /// There is no room for another way of the session.
    #[error("{limit} flows are open already; try again when some have ended")]
    TooManyFlows {
        /// The bound.
        limit: usize,
    },
}

/// What people are told of a right anchor that does not agree.
pub(super) const fn refusal_text(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::UnknownFlow => "the server's host does not know the session",
        ErrorCode::Closed => "the session is over at the server's host, or not set up there yet",
        ErrorCode::Overloaded => {
            "the server's host changes this session already, or too many others; try again in a moment"
        }
        ErrorCode::Striped => "the session is striped over several pairs of addresses at the server's host",
        _ => "the server's host does not agree; its log has the reason",
    }
}

impl Flow {
    /// The host at the other end of a session, at one of its ends.
    pub(super) fn far_end(&self, associations: &AssociationTable) -> Option<HostId> {
        match self.chain.as_deref() {
            Some(chained) => chained.far_end,
            None => associations.get(self.association).map(|peer| peer.host),
        }
    }

    /// What counts for `host`, the session's other end or the host of a middlebox of it, by whichever hosts it is
    /// heard. Where nobody vouches for the host by which it is heard, both may be one person's, and count by where that
    /// host is.
    pub(super) fn peer_of(&self, associations: &AssociationTable, host: Option<HostId>) -> Peer {
        let Some(neighbour) = associations.get(self.association) else {
            return Peer::Unauthenticated(self.app.source.ip());
        };
        match (neighbour.peer(), host.filter(|host| *host != neighbour.host)) {
            (Peer::Own | Peer::Member(_), Some(host)) => Peer::Behind { host, by: neighbour.host },
            (peer, _) => peer,
        }
    }

    /// The host at the other end of a session, where boxes are before it: they pass its words on.
    pub(super) fn far_end_by_boxes(&self, associations: &AssociationTable) -> Option<HostId> {
        let neighbour = associations.get(self.association).map(|peer| peer.host);
        self.far_end(associations).filter(|far_end| neighbour != Some(*far_end))
    }
}

impl Sal {
    /// Whether an end of a session agrees that it goes through other boxes. Gives the host at the other end.
    pub(super) fn may_go_another_way(&self, id: FlowId, role: Role) -> Result<HostId, ReconfigurationRefused> {
        if self.reconfigurations.splices.of(id).is_some() {
            return Err(ReconfigurationRefused::UnderWay);
        }
        self.may_leave_way(id, role)
    }

    /// Whether an end of a session can go another way, whoever is between. Gives the host at the other end.
    pub(super) fn may_leave_way(&self, id: FlowId, role: Role) -> Result<HostId, ReconfigurationRefused> {
        let flow = self.flows.get(id).ok_or(ReconfigurationRefused::UnknownFlow(id))?;
        let is_open = matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed) && flow.carries_data();
        let is_proved = flow.role == Role::Responder || flow.has(Marks::CONFIRMED);
        let is_set_up = is_proved && !matches!(flow.setup, Setup::Initiator(_) | Setup::Responder(_));
        let far_end = flow.far_end(&self.associations);
        Err(match flow.chain.as_deref() {
            _ if flow.is_at_box() => ReconfigurationRefused::AtBox,
            _ if flow.role != role => ReconfigurationRefused::Served,
            _ if !is_open || !is_set_up || !flow.directions.has_egress() => ReconfigurationRefused::NotOpen,
            _ if flow.stripe.is_some() => ReconfigurationRefused::Striped,
            _ if flow.is_held || flow.has(Marks::GUARDED) || self.fetches.is_between(id) => {
                ReconfigurationRefused::Held
            }
            _ if self.queue.is_frozen(id) => ReconfigurationRefused::Held,
            _ => match far_end {
                None => ReconfigurationRefused::UnknownEnd,
                Some(host) if host == self.config.host_id() => ReconfigurationRefused::SameHost,
                Some(host) => return Ok(host),
            },
        })
    }
}

impl ReconfigurationRefused {
    /// A sentence for people, in which boxes are called as a policy calls them.
    pub(super) fn text(&self, policy: &ChainPolicy) -> String {
        let name = |service: &ServiceId| policy.name_of_box(service).map_or_else(|| service.to_string(), String::from);
        match self {
            Self::Edit(error) => error.text(name),
            other => other.to_string(),
        }
    }

    /// What the left anchor is told.
    pub(super) const fn code(self) -> ErrorCode {
        match self {
            Self::UnknownFlow(_) | Self::Served | Self::AtBox => ErrorCode::UnknownFlow,
            Self::NotOpen => ErrorCode::Closed,
            Self::Striped => ErrorCode::Striped,
            Self::Held | Self::UnderWay | Self::Busy(_) | Self::Full(_) | Self::TooManyFlows { .. } => {
                ErrorCode::Overloaded
            }
            Self::NotItsBox
            | Self::NotOfSession
            | Self::NotNamed(_)
            | Self::SameHost
            | Self::BehindProxy
            | Self::UnknownEnd
            | Self::Edit(_) => ErrorCode::Refused,
        }
    }
}

#[cfg(test)]
mod test {
    use margay_wire::SessionId;

    use super::*;
    use crate::association::Association;
    use crate::trust::certificate::Membership;
    use crate::trust::handshake::Keys;
    use crate::types::key::HostPublic;
    use crate::types::keyed_hash::KeyedHash;
    use crate::types::time::Instant;
    use crate::types::tuple::Tuple;

    #[test]
    fn who_is_behind_a_host_that_nobody_vouches_for_counts_as_that_host() {
        let [at, service] = [1, 2].map(|n| core::net::SocketAddr::new([192, 0, 2, n].into(), 80));
        let client = HostId([9; 16]);
        let mut associations = AssociationTable::with_hasher(64, 64, 1, KeyedHash(1, 2));
        let middlebox = Association::new(7, 7, HostPublic([3; 32]), Keys { root: [1; 32] }, false, at);
        let by = middlebox.host;
        associations.insert(middlebox).expect("room");
        let tuple = Tuple { protocol: 6, source: at, destination: service };
        let mut flow =
            Flow::new(FlowId(1), SessionId([1; 16]), ServiceId([0; 32]), Role::Responder, tuple, Instant::ZERO);
        flow.association = 7;
        assert_eq!(flow.peer_of(&associations, Some(client)), Peer::Unauthenticated(at.ip()));
        assert_eq!(flow.peer_of(&associations, Some(by)), Peer::Unauthenticated(at.ip()));
        let shown =
            Membership { authority: [1; 8], groups: alloc::vec![], not_after_s: u64::MAX, issuers: alloc::vec![] };
        associations.set_membership(7, Some(shown));
        assert_eq!(flow.peer_of(&associations, Some(client)), Peer::Behind { host: client, by });
        assert_eq!(flow.peer_of(&associations, None), Peer::Member(by));
    }
}
