//! By which stack flows are sent, and what of each is taken (docs/decisions/0073).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use margay_core::entry::PathId;
use margay_core::fair_table::Peer;
use margay_core::flow_cache::LINGER;
use margay_core::time::Instant;
use margay_core::{DropReason, Stack, Stacks, Taking};
use margay_wire::{DataRepr, FlowId};

use super::{EgressRoute, Origin, PathRecord, Slot, Table};
use crate::clock;
use crate::fec::Fec;
use crate::held_bytes::HeldAccount;
use crate::seal::Seal;
use crate::turning::Turn;

/// It is said no more often that what comes by a path is of another stack than its flow, in microseconds.
const COMPLAIN_US: u64 = 100_000;

/// The last packet of the stack that a flow has had.
#[derive(Debug, PartialEq, Eq)]
pub struct LastPacket {
    /// Where it goes, what it is sealed with, or what repairs or repeats those before it.
    pub route: EgressRoute,
    /// By which stack the flow has gone until now.
    pub stack: Stack,
    /// By which stack it goes from the change on.
    pub to: Stack,
    /// The number of the change.
    pub change: u32,
}

/// By which stack a flow is sent now; and the stack before, while its last packet is owed.
///
/// The low four bits are the one, the high ones that and one more, or zero. Both change together, since packets find
/// them while another thread sends the last packet.
#[derive(Debug)]
pub(super) struct Sends(AtomicU8);

const OWED_SHIFT: u32 = 4;
const NOW: u8 = (1 << OWED_SHIFT) - 1;

impl Sends {
    pub const fn new(stack: Stack) -> Self {
        Self(AtomicU8::new(stack as u8))
    }

    pub fn now(&self) -> Stack {
        of_place(self.0.load(Ordering::Relaxed) & NOW)
    }

    /// The stack whose last packet is still to be sent, though the flow is sent by another one already.
    fn owed(&self) -> Option<Stack> {
        owed_of(self.0.load(Ordering::Relaxed))
    }

    /// The one of which something may still be sent.
    pub fn last(&self) -> Stack {
        self.owed().unwrap_or_else(|| self.now())
    }

    pub fn set(&mut self, stack: Stack) {
        *self.0.get_mut() = stack as u8;
    }

    /// From here on it is another one, and the last packet of the one before is owed.
    pub fn set_owing(&mut self, stack: Stack) {
        let before = self.now();
        if before != stack {
            *self.0.get_mut() = stack as u8 | (before as u8 + 1) << OWED_SHIFT;
        }
    }

    /// From here on it is another one. Gives the one whose last packet is to be sent, if one is.
    fn turn(&self, stack: Stack) -> Option<Stack> {
        let before = self.0.swap(stack as u8, Ordering::Relaxed);
        owed_of(before).or_else(|| Some(of_place(before & NOW)).filter(|before| *before != stack))
    }
}

fn owed_of(sends: u8) -> Option<Stack> {
    (sends >> OWED_SHIFT).checked_sub(1).map(of_place)
}

fn of_place(place: u8) -> Stack {
    // Whatever is stored is one of them.
    Stack::ALL.into_iter().find(|stack| *stack as u8 == place).unwrap_or_default()
}

/// What numbers and repairs a flow.
#[derive(Debug)]
struct KeptFec {
    fec: Arc<Fec>,
    /// The flow goes by another stack; but the last packet of this one is not sent yet.
    is_left: bool,
}

/// The same, of what goes as it is, and of what goes sealed: while one becomes the other, a flow has both.
#[derive(Debug, Default)]
pub(super) struct KeptFecs {
    bare: Option<KeptFec>,
    sealed: Option<KeptFec>,
}

impl KeptFecs {
    /// Of a stack that repairs.
    fn of(&self, stack: Stack) -> Option<&KeptFec> {
        match stack {
            Stack::Fec => self.bare.as_ref(),
            Stack::SecureFec => self.sealed.as_ref(),
            Stack::Plain | Stack::Sctp | Stack::Secure | Stack::SecureSctp => None,
        }
    }

    /// Keeps what a stack needs as long as the flow may have that stack, or is sent so.
    fn follow(
        &mut self,
        flow: FlowId,
        stack: Stack,
        stacks: Stacks,
        sends: Stack,
        account: impl FnOnce() -> HeldAccount,
    ) {
        let kept = if stack == Stack::SecureFec { &mut self.sealed } else { &mut self.bare };
        if stacks.has(stack) {
            if kept.as_ref().is_none_or(|kept| kept.is_left) {
                let fec = Arc::new(Fec::new(flow, stack, stacks.change, account()));
                *kept = Some(KeptFec { fec, is_left: false });
            }
        } else if sends != stack {
            *kept = None;
        } else if let Some(kept) = kept {
            kept.is_left = true;
        }
    }

    fn is_empty(&self) -> bool {
        self.bare.is_none() && self.sealed.is_none()
    }
}

impl Slot {
    /// What DATA is opened with, if it is of a stack that this flow may have; and the stack.
    pub(super) fn admit(&self, data: &DataRepr) -> Result<(Stack, Option<Arc<Seal>>), DropReason> {
        let stack = Stack::of_number(data.stack).filter(|stack| self.stacks.takes(*stack));
        match stack.ok_or(DropReason::OtherStack)? {
            stack @ (Stack::Plain | Stack::Fec | Stack::Sctp) => Ok((stack, None)),
            stack @ (Stack::Secure | Stack::SecureFec | Stack::SecureSctp) => {
                let seal = self.seal.as_ref().filter(|seal| seal.number_of(stack) == data.stack);
                seal.map(|seal| (stack, Some(Arc::clone(seal)))).ok_or(DropReason::OtherStack)
            }
        }
    }
}

impl PathRecord {
    /// Whether it is time to say that something of another stack has come by it.
    fn may_complain(&self, now: Instant) -> bool {
        let last = self.complained_us.load(Ordering::Relaxed);
        let is_due = last == 0 || now.micros().saturating_sub(last) >= COMPLAIN_US;
        if is_due {
            self.complained_us.store(now.micros().max(1), Ordering::Relaxed);
        }
        is_due
    }
}

impl Table {
    /// Whether a flow is to be sent by another stack than it is.
    pub fn is_to_turn(&self, flow: FlowId) -> bool {
        self.find(flow).is_some_and(|slot| slot.sends.now() != slot.stacks.sends || slot.sends.owed().is_some())
    }

    /// From here on a flow is sent by the stack that its entry says. `None` if it is already.
    pub fn begin_turn(&self, flow: FlowId) -> Option<LastPacket> {
        let slot = self.find(flow)?;
        let is_held_back = slot.sends.owed().is_some();
        let before = slot.sends.turn(slot.stacks.sends)?;
        if let Some(sctp) = self.sctp_of(flow, before) {
            // While the table is locked: an update that finds the flow turned and this not left would forget it, and
            // with it what is under way.
            sctp.leave(clock::now(), slot.stacks.sends);
        }
        let route = self.full_route(slot, before)?;
        // What repairs a flow that was held until it is sealed is plain as well.
        let route = EgressRoute { fec: route.fec.filter(|_| !is_held_back), ..route };
        Some(LastPacket { route, stack: before, to: slot.stacks.sends, change: slot.stacks.change })
    }

    /// Where something of the cache's own goes by a stack, what it is sealed with, and what repairs those before it.
    /// `None` where the flow does not go by that stack, or nothing of it may be sent now: nothing plain of a flow that
    /// is sealed from here on.
    pub fn route_by(&self, flow: FlowId, stack: Stack) -> Option<EgressRoute> {
        let is_exposed = |slot: &&Slot| slot.stacks.sends.is_sealed() && !stack.is_sealed();
        self.full_route(self.find(flow).filter(|slot| !is_exposed(slot))?, stack)
    }

    fn full_route(&self, slot: &Slot, stack: Stack) -> Option<EgressRoute> {
        let flow = slot.flow;
        let bare = self.bare_route(Some(slot).filter(|slot| !slot.is_left_to_core(Origin::Core))?)?;
        let seal = if stack.is_sealed() { Some(self.seals.get(&flow).cloned()?) } else { None };
        let fec = if stack.repairs() { Some(self.kept_fec(flow, stack)?) } else { None };
        let sctp = if stack.repeats() { Some(self.sctp_of(flow, stack)?) } else { None };
        Some(EgressRoute { seal, fec, sctp, ..bare })
    }

    /// What numbers and repairs a flow that goes by `fec`, sealed or not; while one becomes the other, what is sent.
    pub fn fec(&self, flow: FlowId) -> Option<Arc<Fec>> {
        // There seldom is any.
        if self.fecs.is_empty() {
            return None;
        }
        let sends = self.find(flow).map_or(Stack::Fec, |slot| slot.stacks.sends);
        [sends, Stack::SecureFec, Stack::Fec].into_iter().find_map(|stack| self.fec_of(flow, stack))
    }

    /// The same, of one of the two stacks.
    pub fn fec_of(&self, flow: FlowId, stack: Stack) -> Option<Arc<Fec>> {
        let kept = self.fecs.get(&flow).and_then(|kept| kept.of(stack));
        kept.filter(|kept| !kept.is_left).map(|kept| Arc::clone(&kept.fec))
    }

    /// The same, also where the last packet by it is to be sent.
    pub(super) fn kept_fec(&self, flow: FlowId, stack: Stack) -> Option<Arc<Fec>> {
        self.fecs.get(&flow).and_then(|kept| kept.of(stack)).map(|kept| Arc::clone(&kept.fec))
    }

    /// Keeps what numbers and repairs a flow as long as its entry says that it goes by `fec`, or it is sent so.
    pub(super) fn follow_fec(&mut self, flow: FlowId, stacks: Stacks, sends: Stack, peer: Peer) {
        if self.fecs.is_empty() && !stacks.has_repaired() {
            return;
        }
        let kept = self.fecs.entry(flow).or_default();
        for stack in [Stack::Fec, Stack::SecureFec] {
            kept.follow(flow, stack, stacks, sends, || self.held_bytes.account(peer));
        }
        if kept.is_empty() {
            self.fecs.remove(&flow);
        }
    }

    /// Whether the core is to hear that something of another stack than its flow's has come.
    pub fn may_complain_of_stack(&self, flow: FlowId) -> bool {
        let record = self.find(flow).and_then(|slot| self.paths.get(&slot.path));
        record.is_some_and(|record| record.may_complain(clock::now()))
    }

    /// The turn of a flow's peer, while there is one, or something waits of it.
    pub(super) fn turn_of(&self, slot: &Slot) -> Option<Arc<Turn>> {
        // There seldom is any.
        if self.turns.is_empty() { None } else { self.turns.get(&slot.flow).cloned() }
    }

    /// Keeps what is known of a turn as long as the entries say that there is one, or something waits of it.
    pub(super) fn follow_turn(&mut self, flow: FlowId, takes: Taking, change: u32, peer: Peer) {
        let to = match takes {
            Taking::Only(_) => {
                if self.turns.get(&flow).is_some_and(|turn| !turn.end(clock::now())) {
                    self.turns.remove(&flow);
                }
                return;
            }
            Taking::Ready(to) | Taking::Turning(to) => to,
        };
        if self.turns.get(&flow).is_none_or(|turn| turn.change != change) {
            self.turns.insert(flow, Arc::new(Turn::new(flow, change, to, self.held_bytes.account(peer))));
        }
        if let Some(turn) = self.turns.get(&flow).filter(|_| matches!(takes, Taking::Turning(_))) {
            turn.say(clock::now());
        }
    }

    /// The turn of a flow of which something waits, and until when at most.
    pub fn waiting_turn(&self, flow: FlowId) -> Option<(Arc<Turn>, Instant)> {
        let turn = self.turns.get(&flow)?;
        Some((Arc::clone(turn), turn.due()?))
    }

    /// Nothing waits any more of a turn that is over.
    pub fn forget_turn(&mut self, turn: &Turn) {
        if self.turns.get(&turn.flow).is_some_and(|known| **known == *turn) {
            self.turns.remove(&turn.flow);
        }
    }

    /// A flow goes by another record: what its peer has sent by the one before still comes.
    pub(super) fn linger(&mut self, former: PathId, path: PathId) {
        if former == path {
            return;
        }
        let Some(remote) = self.paths.get(&former).map(|record| record.path.remote) else { return };
        if let Some(record) = self.paths.get_mut(&path).filter(|record| record.path.remote != remote) {
            record.former = Some((remote, clock::now() + LINGER));
        }
    }
}
