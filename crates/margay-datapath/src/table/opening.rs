//! What of a flow the packet threads leave to the core: what the application sends, while the flow is held; and all of
//! a flow of datagrams, while the core still carries what it has held of that flow. Otherwise the next datagrams, which
//! find the entry, would overtake those.

use std::sync::atomic::{AtomicU8, Ordering};

use margay_core::chain::{FORWARDED_HOP_LIMIT, OUTSIDE_HOP_LIMIT};
use margay_core::entry::Entry;
use margay_wire::FlowId;

use super::{Slot, Table};
use crate::packet::{Transport, UDP};

/// The packet threads carry it.
pub(super) const NOTHING: u8 = 0;
/// What the application sends: the flow is held.
const SENDS: u8 = 1;
/// All: the core still carries what it has held.
const OPENING: u8 = 2;

/// Of a flow that is new in the table.
pub(super) fn of_new(protocol: u8) -> AtomicU8 {
    AtomicU8::new(after_hold(protocol))
}

/// Connections put their segments in order themselves.
fn after_hold(protocol: u8) -> u8 {
    if protocol == UDP { OPENING } else { NOTHING }
}

/// Who sends a packet of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A program of this host.
    Program,
    /// Another network namespace or machine, such as a container.
    Outside,
    /// A middlebox, or the kernel for it: what it has forwarded.
    Middlebox,
    /// The core, which has held the packet, or been given it.
    Core,
}

/// Whose packets are a flow's own. The others come to the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sender {
    /// Anybody's here.
    Anybody,
    /// Those of a socket of this host that has a source name: none from outside.
    NamedSocket,
    /// What a middlebox has forwarded.
    Middlebox,
}

impl Sender {
    /// As an entry says.
    pub const fn of(entry: &Entry) -> Self {
        match (entry.at_middlebox, entry.is_of_named_socket) {
            (true, _) => Self::Middlebox,
            (false, true) => Self::NamedSocket,
            (false, false) => Self::Anybody,
        }
    }
}

impl Origin {
    /// Of a packet that has left `sal0`.
    pub const fn of(packet: &Transport) -> Self {
        match packet.hop_limit {
            FORWARDED_HOP_LIMIT => Self::Middlebox,
            OUTSIDE_HOP_LIMIT => Self::Outside,
            _ => Self::Program,
        }
    }
}

impl Slot {
    /// Takes over what the entry says. Gives whether the flow was held before.
    pub(super) fn follow_hold(&mut self, is_held: bool) -> bool {
        let protocol = self.key.protocol;
        let left = self.left_to_core.get_mut();
        let was_held = *left == SENDS;
        if is_held {
            *left = SENDS;
        } else if was_held {
            *left = after_hold(protocol);
        }
        was_held
    }

    /// Whether a packet of the application is the core's, which has not sent it itself.
    pub(super) fn is_left_to_core(&self, origin: Origin) -> bool {
        match origin {
            Origin::Program | Origin::Outside if self.sender == Sender::Middlebox => return true,
            Origin::Outside if self.sender == Sender::NamedSocket => return true,
            _ => {}
        }
        match self.left_to_core.load(Ordering::Acquire) {
            SENDS => true,
            OPENING => origin != Origin::Core,
            _ => false,
        }
    }

    pub(super) fn is_opening(&self) -> bool {
        self.left_to_core.load(Ordering::Acquire) == OPENING
    }
}

impl Table {
    /// Whether the core still carries what it has held of a flow.
    pub fn is_opening(&self, flow: FlowId) -> bool {
        self.find(flow).is_some_and(Slot::is_opening)
    }

    /// From here on the packet threads carry a flow of datagrams.
    pub fn open(&self, flow: FlowId) {
        if let Some(slot) = self.find(flow) {
            // It may be held again.
            let _ = slot.left_to_core.compare_exchange(OPENING, NOTHING, Ordering::Release, Ordering::Relaxed);
        }
    }
}
