//! Flows that turn from one stack to another (docs/decisions/0073): the last packet of the one before, and what
//! overtakes the peer's.
//!
//! The thread that reads `sal0` sends the last packet, between two packets of applications: so nothing of the stack
//! before is sent after it. The thread that reads UDP comes to the peer's in its turn: until then what is of the new
//! stack waits, for a short while at most.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use margay_core::stack_change::Stack;
use margay_core::time::Instant;
use margay_wire::{DATA_HEADER_LEN, DataRepr, FENCE, FlowId, STACK_ENCAP, TRAIN_HEADER_LEN, fence_of_change};
use parking_lot::Mutex;

use crate::backlog::Notice;
use crate::clock;
use crate::driver::{Core, Shared};
use crate::ingress;
use crate::train::Assembler;
use crate::wait::Wake;

/// A FENCE that is lost holds up what has overtaken it for so long at most.
const FENCE_WAIT: Duration = Duration::from_millis(50);
/// So much may overtake it, in receives of one train; with the next one, nothing waits any longer.
const HELD_MAX: usize = 64;

/// What becomes of a run of chunks of a flow that turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// They are taken.
    Take,
    /// They wait, until then at most.
    Held(Instant),
    /// Nothing waits any longer, and they are taken after what has.
    Overtaken,
    /// They are of the stack before, and late.
    Late,
}

/// A run that waits.
#[derive(Debug)]
struct Held {
    header: DataRepr,
    datagrams: Vec<u8>,
    stride: usize,
    came: (Option<IpAddr>, SocketAddr),
}

#[derive(Debug, Default)]
struct Waiting {
    is_fenced: bool,
    runs: VecDeque<Held>,
    until: Option<Instant>,
}

/// One turn of a flow's peer. It outlives the flow's entry.
#[derive(Debug)]
pub struct Turn {
    /// This host's number of the flow.
    pub flow: FlowId,
    /// The number of the change.
    pub change: u32,
    to: Stack,
    waiting: Mutex<Waiting>,
}

impl PartialEq for Turn {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::eq(self, other)
    }
}

impl Eq for Turn {}

impl Turn {
    /// The peer turns to a stack, by this change.
    pub fn new(flow: FlowId, change: u32, to: Stack) -> Self {
        Self { flow, change, to, waiting: Mutex::default() }
    }

    /// What becomes of a run of a stack, of datagrams of `stride` bytes.
    pub fn admit(
        &self,
        now: Instant,
        stack: Stack,
        header: DataRepr,
        (datagrams, stride): (&[u8], usize),
        came: (Option<IpAddr>, SocketAddr),
    ) -> Admission {
        let mut waiting = self.waiting.lock();
        match (stack == self.to, waiting.is_fenced) {
            (true, true) | (false, false) => Admission::Take,
            (false, true) => Admission::Late,
            (true, false) if waiting.runs.len() >= HELD_MAX => {
                waiting.is_fenced = true;
                Admission::Overtaken
            }
            (true, false) => {
                let until = *waiting.until.get_or_insert(now + FENCE_WAIT);
                waiting.runs.push_back(Held { header, datagrams: datagrams.to_vec(), stride, came });
                Admission::Held(until)
            }
        }
    }

    /// The peer's FENCE of a change has come. False if it is of another one, or nothing waits for it any more.
    pub fn fence(&self, change: u32) -> bool {
        change == self.change && !std::mem::replace(&mut self.waiting.lock().is_fenced, true)
    }

    /// Whether something has waited for too long. If so nothing does any longer.
    fn is_due(&self, now: Instant) -> bool {
        let mut waiting = self.waiting.lock();
        let is_due = !waiting.is_fenced && waiting.until.is_some_and(|until| until <= now);
        waiting.is_fenced |= is_due;
        is_due
    }

    fn take_held(&self) -> VecDeque<Held> {
        std::mem::take(&mut self.waiting.lock().runs)
    }
}

/// Gives on what has waited for a FENCE, and tells the core that the peer has turned.
pub(crate) fn release<C: Core>(shared: &Shared<C>, assembler: &mut Assembler, turn: &Turn) {
    for Held { header, mut datagrams, stride, came } in turn.take_held() {
        if let Err(reason) = ingress::take(shared, assembler, header, (&mut datagrams, stride), came) {
            shared.counting.drop(reason);
        }
    }
    shared.notice(Notice::Turned(turn.flow, turn.change));
}

/// Turns of which something has waited for long enough.
pub(crate) fn release_due<C: Core>(shared: &Shared<C>, assembler: &mut Assembler) {
    let now = clock::now();
    for turn in shared.overtaking.take(now) {
        if turn.is_due(now) {
            release(shared, assembler, &turn);
        } else if let Some(until) = turn.waiting.lock().until.filter(|until| *until > now) {
            shared.overtaking.add(&turn, until);
        }
    }
}

/// Flows that are to be sent by another stack, for the thread that reads `sal0`.
pub(crate) struct Turns {
    flows: Mutex<Vec<FlowId>>,
    is_waiting: AtomicBool,
    wake: Wake,
}

impl Turns {
    pub fn new() -> io::Result<Self> {
        Ok(Self { flows: Mutex::default(), is_waiting: AtomicBool::new(false), wake: Wake::new()? })
    }

    pub fn add(&self, flow: FlowId) {
        self.flows.lock().push(flow);
        self.is_waiting.store(true, Ordering::Release);
        self.wake.set();
    }

    pub fn take(&self) -> Vec<FlowId> {
        // Reading first keeps the cache line shared in the common case.
        if !self.is_waiting.load(Ordering::Relaxed) || !self.is_waiting.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        // In this order: what is added meanwhile has the next call come here, which clears what it sets.
        self.wake.clear();
        std::mem::take(&mut *self.flows.lock())
    }
}

impl AsFd for Turns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl<C> Shared<C> {
    /// Sends the last packet of the stack that a flow has had. From here on it is sent by the other one.
    pub fn turn(&self, flow: FlowId) {
        let Some(last) = self.table.read().begin_turn(flow) else { return };
        let route = &last.route;
        if let Some(seal) = &route.seal {
            match seal.seal_fence(route.peer_flow, last.change) {
                Ok(datagram) => self.send_data(&datagram, datagram.len(), &route.to, false),
                Err(reason) => self.counting.drop(reason),
            }
            return;
        }
        let mut datagram = [0; DATA_HEADER_LEN + TRAIN_HEADER_LEN];
        let (dst_flow, packet_number) = (route.peer_flow, route.packet_number);
        DataRepr { stack: STACK_ENCAP, flags: FENCE, dst_flow, packet_number, index: 0, count: 1 }.emit(&mut datagram);
        datagram[DATA_HEADER_LEN..].copy_from_slice(&fence_of_change(last.change));
        self.send_data(&datagram, datagram.len(), &route.to, false);
    }
}

/// Wakes the thread that reads UDP.
pub(crate) type Overtaking = crate::striped::Agenda<Turn>;

#[cfg(test)]
mod tests {
    use super::*;

    fn header(stack: u8) -> DataRepr {
        DataRepr { stack, flags: 0, dst_flow: FlowId(7), packet_number: 1, index: 0, count: 1 }
    }

    fn admit(turn: &Turn, millis: u64, stack: Stack) -> Admission {
        let from = "10.0.0.2:54324".parse().expect("literal");
        let number = if stack == Stack::Plain { 2 } else { 3 };
        turn.admit(Instant::from_millis(millis), stack, header(number), (&[0; 40], 40), (None, from))
    }

    #[test]
    fn what_overtakes_waits_for_the_fence_and_what_comes_behind_it_is_late() {
        let turn = Turn::new(FlowId(7), 9, Stack::Secure);
        assert_eq!(admit(&turn, 1, Stack::Plain), Admission::Take);
        assert_eq!(admit(&turn, 2, Stack::Secure), Admission::Held(Instant::from_millis(52)));
        assert_eq!(admit(&turn, 3, Stack::Secure), Admission::Held(Instant::from_millis(52)), "as long as the first");
        assert_eq!(admit(&turn, 4, Stack::Plain), Admission::Take);
        assert!(!turn.fence(8), "of another change");
        assert!(turn.fence(9) && !turn.fence(9), "once");
        assert_eq!(turn.take_held().len(), 2);
        assert_eq!(admit(&turn, 5, Stack::Plain), Admission::Late);
        assert_eq!(admit(&turn, 6, Stack::Secure), Admission::Take);
    }

    #[test]
    fn a_lost_fence_holds_up_little_and_not_for_long() {
        let turn = Turn::new(FlowId(7), 9, Stack::Plain);
        assert!(!turn.is_due(Instant::from_millis(1000)), "nothing waits");
        assert_eq!(admit(&turn, 1000, Stack::Plain), Admission::Held(Instant::from_millis(1050)));
        assert!(!turn.is_due(Instant::from_millis(1049)));
        assert!(turn.is_due(Instant::from_millis(1050)) && !turn.is_due(Instant::from_millis(1051)));
        let turn = Turn::new(FlowId(7), 10, Stack::Plain);
        for _ in 0..HELD_MAX {
            assert!(matches!(admit(&turn, 1, Stack::Plain), Admission::Held(_)));
        }
        assert_eq!(admit(&turn, 1, Stack::Plain), Admission::Overtaken);
        assert_eq!((turn.take_held().len(), admit(&turn, 1, Stack::Secure)), (HELD_MAX, Admission::Late));
    }
}
