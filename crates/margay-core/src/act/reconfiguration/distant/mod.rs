//! Orders that are given at another host than the client's (docs/decisions/0112; Dysco, section 3.2): at the host of
//! the session's server, for all that the client's operator may order, or at the host of a box, for that box.
//!
//! ```text
//!   who gives the order                                              client's host
//!     Knocking ────── wish, signed ───────────────────────────────────▶
//!              ◀───── told: to sign, with this start and this time ────
//!     Signed   ────── wish, signed with these ────────────────────────▶ an order, in its turn
//!              ◀───── told: taken ─────────────────────────────────────
//!     Waiting  ────── the same wish, now and then ────────────────────▶
//!     Over     ◀───── told: done, refused, failed, ended ──────────────
//! ```
//!
//! All goes by the session's way, and the hosts of boxes pass it on. They could make up such words; so each is signed
//! by its host, about one session and one number. The start and the time are those of the client's agent: a wish that
//! somebody has kept is none to its next start, nor after [`FRESH`], whatever the clocks of other hosts show.

mod giving;
mod taking;

pub(super) use giving::Givings;
pub use giving::{ORDERING, OrderingEvent, OrderingState};
pub(super) use taking::{Asker, Takings};

use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{BoxRepr, OrderAct, OrderRepr, ReconfigurationRepr, ReconfigurationStep};

use super::{Beside, Edit, ReconfigurationRefused, SessionBoxes, bare};
use crate::act::chain::{ChainPolicy, head_of, service_of};
use crate::types::key::{HostId, HostPublic, HostSecret};
use crate::types::name::ServiceId;

const CONTEXT: &[u8] = b"margay 2026 order";
/// So long after its receiver has said what is to be signed, a wish is taken.
const FRESH: Duration = Duration::from_secs(5);
/// Where an order has no other box.
const NONE: [u8; 12] = [0; 12];

/// What is signed beside ORDER.
#[derive(Clone, Copy, Debug)]
struct Word<'a> {
    /// Of the order.
    number: u32,
    /// The host that has given it.
    by: HostId,
    /// Of ERROR, where there is one.
    code: u16,
    text: &'a str,
}

impl Word<'_> {
    fn bytes(&self, order: &OrderRepr) -> Vec<u8> {
        let mut bytes = CONTEXT.to_vec();
        bytes.extend_from_slice(&self.number.to_be_bytes());
        bytes.extend_from_slice(&self.by.0);
        bytes.extend_from_slice(&order.signed_bytes());
        bytes.extend_from_slice(&self.code.to_be_bytes());
        bytes.extend_from_slice(self.text.as_bytes());
        bytes
    }

    fn sign(&self, key: &HostSecret, order: OrderRepr) -> OrderRepr {
        let order = OrderRepr { host_key: key.public().0, ..order };
        OrderRepr { signature: key.sign(&self.bytes(&order)), ..order }
    }

    /// Whether this is the word of a host.
    fn is_of(&self, host: HostId, order: &OrderRepr) -> bool {
        let key = HostPublic(order.host_key);
        key.id() == host && !key.is_of_low_order() && key.verify(&self.bytes(order), &order.signature)
    }
}

/// RECONFIGURATION beside an ORDER.
const fn step_of(step: ReconfigurationStep, number: u32, by: HostId) -> ReconfigurationRepr {
    ReconfigurationRepr { host: by.0, ..bare(step, number) }
}

/// What an order is on the wire: the act, the box and the other box. `None`: nobody orders that.
fn parts_of(edit: &Edit) -> Option<(OrderAct, [u8; 12], [u8; 12])> {
    Some(match edit {
        Edit::Insert { service, before } => (OrderAct::Insert, head_of(service), before.as_ref().map_or(NONE, head_of)),
        Edit::Remove { service } => (OrderAct::Remove, head_of(service), NONE),
        Edit::Replace { service, by } => (OrderAct::Replace, head_of(service), head_of(by)),
        Edit::Leave { .. } => return None,
    })
}

/// What is ordered. `None`: an act that wants another box, or none, and has it not.
fn edit_of(order: &OrderRepr) -> Option<Edit> {
    let name = |service| service_of(&BoxRepr { service, flags: margay_wire::BoxFlags::empty(), added_by: 0 });
    let service = name(order.service);
    let other = (order.other != NONE).then(|| name(order.other));
    match (order.act, other) {
        (OrderAct::Insert, before) => Some(Edit::Insert { service, before }),
        (OrderAct::Remove, None) => Some(Edit::Remove { service }),
        (OrderAct::Replace, Some(by)) => Some(Edit::Replace { service, by }),
        _ => None,
    }
}

impl Edit {
    /// The box that it puts in.
    const fn new_box(&self) -> Option<ServiceId> {
        match self {
            Self::Insert { service, .. } | Self::Replace { by: service, .. } => Some(*service),
            Self::Remove { .. } | Self::Leave { .. } => None,
        }
    }

    /// Whether a policy names the box that it puts in.
    fn check_policy(&self, policy: &ChainPolicy) -> Result<(), ReconfigurationRefused> {
        let unnamed = self.new_box().filter(|one| policy.name_of_box(one).is_none());
        unnamed.map_or(Ok(()), |one| Err(ReconfigurationRefused::NotNamed(one)))
    }

    /// Whether the host of some boxes may have it carried out on a session through those that are known: it takes one
    /// of its own out, or puts one in directly before or behind one of its own.
    pub(super) fn check_host_of(&self, own: &[ServiceId], known: &SessionBoxes) -> Result<(), ReconfigurationRefused> {
        let is_its = match self {
            Self::Remove { service } | Self::Replace { service, .. } => own.contains(service),
            Self::Insert { service, .. } => {
                let wanted = self.of(known).map_err(ReconfigurationRefused::Edit)?;
                let are_beside = |two: &[ServiceId]| {
                    two[0] == *service && own.contains(&two[1]) || two[1] == *service && own.contains(&two[0])
                };
                wanted.windows(2).any(are_beside)
            }
            Self::Leave { .. } => false,
        };
        if is_its { Ok(()) } else { Err(ReconfigurationRefused::NotItsBox) }
    }
}

/// A reason as it may be shown, whoever has written it, and as ERROR has room for it.
fn reason(text: &str) -> String {
    let mut reason = String::new();
    for character in text.chars().map(|one| if one.is_control() { '?' } else { one }) {
        if reason.len() + character.len_utf8() > margay_wire::ERROR_TEXT_MAX {
            break;
        }
        reason.push(character);
    }
    reason
}

impl<'a> Beside<'a> {
    fn order(order: OrderRepr, certificate: &'a [u8]) -> Self {
        let certificate = (!certificate.is_empty()).then_some(certificate);
        Self { order: Some(order), certificate, ..Self::default() }
    }
}

#[cfg(test)]
mod test;
