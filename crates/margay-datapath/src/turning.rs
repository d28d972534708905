//! Flows that turn from one stack to another (docs/decisions/0073): the last packet of the one before, and what
//! overtakes the peer's.
//!
//! The thread that reads `sal0` sends the last packet, between two packets of applications: so nothing of the stack
//! before is sent after it. The thread that reads UDP comes to the peer's in its turn: until then what is of the new
//! stack waits, for a short while at most.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use margay_core::Stack;
use margay_core::flow_cache::FENCE_WAIT;
use margay_core::time::Instant;
use margay_wire::{
    DATA_HEADER_LEN, DataRepr, FENCE, FlowId, STACK_ENCAP, STACK_FEC, STACK_SCTP, TRAIN_HEADER_LEN, fence_of_change,
};
use parking_lot::Mutex;

use crate::backlog::Notice;
use crate::driver::{Core, Shared};
use crate::held_bytes::HeldAccount;
use crate::train::Assembler;
use crate::{clock, ingress};

/// So many bytes may overtake it; with the next ones, nothing waits any longer. A busy host reads them behind one
/// another, and the FENCE behind what was sent before it.
const HELD_BYTES_MAX: usize = 4 << 20;
/// What a run takes beside its own bytes.
const RUN_OVERHEAD_BYTES: usize = size_of::<Held>() + 32;

/// What becomes of a run of chunks of a flow that turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// They are taken.
    Take,
    /// They wait: until then at most, where the peer has said that it turns.
    Held(Option<Instant>),
    /// Nothing waits any longer, and they are taken after what has.
    Overtaken,
    /// The change is over. They are looked at again after what has waited: what the table said of them before may be
    /// that of a change that was given up, and a flow that stays sealed then takes nothing plain.
    Over,
    /// They are of the stack before, and late.
    Late,
    /// Too much waits for the word of a peer that may not turn at all.
    Full,
}

/// A run that waits.
#[derive(Debug)]
struct Held {
    header: DataRepr,
    datagrams: Vec<u8>,
    stride: usize,
    came: (Option<IpAddr>, SocketAddr),
}

#[derive(Debug)]
struct Waiting {
    /// The peer has said that it turns: what comes of the new stack is not held for long.
    is_said: bool,
    is_fenced: bool,
    /// The change is over without the FENCE; what waits goes on before anything else of the flow.
    is_over: bool,
    runs: VecDeque<Held>,
    account: HeldAccount,
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
    /// The peer turns to a stack, by this change. What waits counts for `account`.
    pub fn new(flow: FlowId, change: u32, to: Stack, account: HeldAccount) -> Self {
        let waiting =
            Waiting { is_said: false, is_fenced: false, is_over: false, runs: VecDeque::new(), account, until: None };
        Self { flow, change, to, waiting: Mutex::new(waiting) }
    }

    /// The stack to which the peer turns.
    pub const fn to(&self) -> Stack {
        self.to
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
        if waiting.is_over {
            return Admission::Over;
        }
        let bytes = waiting.account.bytes() + datagrams.len() + RUN_OVERHEAD_BYTES;
        match (stack == self.to, waiting.is_fenced) {
            (true, true) | (false, false) => Admission::Take,
            (false, true) => Admission::Late,
            (true, false) if bytes > HELD_BYTES_MAX || !waiting.account.resize(bytes) => {
                if !waiting.is_said {
                    return Admission::Full;
                }
                waiting.is_fenced = true;
                Admission::Overtaken
            }
            (true, false) => {
                let until = waiting.is_said.then(|| *waiting.until.get_or_insert(now + FENCE_WAIT));
                waiting.runs.push_back(Held { header, datagrams: datagrams.to_vec(), stride, came });
                Admission::Held(until)
            }
        }
    }

    /// The peer's FENCE of a change has come. False if it is of another one, or nothing waits for it any more.
    pub fn fence(&self, change: u32) -> bool {
        change == self.change && !std::mem::replace(&mut self.waiting.lock().is_fenced, true)
    }

    /// The peer has said that it turns. What waits already does so no longer than what comes now.
    pub fn say(&self, now: Instant) {
        let mut waiting = self.waiting.lock();
        waiting.is_said = true;
        if !waiting.runs.is_empty() {
            waiting.until.get_or_insert(now + FENCE_WAIT);
        }
    }

    /// The change is over: the flow has one stack. True if something waits still: it is to be given on at once.
    pub fn end(&self, now: Instant) -> bool {
        let mut waiting = self.waiting.lock();
        waiting.is_over = true;
        waiting.until = Some(now);
        !waiting.runs.is_empty()
    }

    /// When what waits is to be given on at the latest.
    pub fn due(&self) -> Option<Instant> {
        let waiting = self.waiting.lock();
        waiting.until.filter(|_| !waiting.runs.is_empty())
    }

    /// Whether something has waited for too long. If so nothing does any longer.
    fn is_due(&self, now: Instant) -> bool {
        let mut waiting = self.waiting.lock();
        let is_waiting = !waiting.runs.is_empty() && (waiting.is_over || !waiting.is_fenced);
        let is_due = is_waiting && waiting.until.is_some_and(|until| until <= now);
        waiting.is_fenced |= is_due;
        is_due
    }

    fn is_over(&self) -> bool {
        self.waiting.lock().is_over
    }

    fn take_held(&self) -> VecDeque<Held> {
        let mut waiting = self.waiting.lock();
        waiting.account.clear();
        std::mem::take(&mut waiting.runs)
    }
}

/// Gives on what has waited for a FENCE, and tells the core that the peer has turned, where it does not know.
pub(crate) fn release<C: Core>(shared: &Shared<C>, assembler: &mut Assembler, turn: &Turn) {
    let held = turn.take_held();
    if turn.is_over() {
        shared.table.write().forget_turn(turn);
    }
    for Held { header, mut datagrams, stride, came } in held {
        if let Err(reason) = ingress::take(shared, assembler, header, (&mut datagrams, stride), came, None) {
            shared.counting.drop(reason);
        }
    }
    if !turn.is_over() {
        shared.notice(Notice::Turned(turn.flow, turn.change));
    }
}

/// Turns of which something has waited for long enough.
pub(crate) fn release_due<C: Core>(shared: &Shared<C>, assembler: &mut Assembler) {
    let now = clock::now();
    for turn in shared.overtaking.take(now) {
        if turn.is_due(now) {
            release(shared, assembler, &turn);
        } else if let Some(until) = turn.due().filter(|until| *until > now) {
            shared.overtaking.add(&turn, until);
        }
    }
}

impl<C> Shared<C> {
    /// Sends the last packet of the stack that a flow has had. From here on it is sent by the other one.
    pub fn turn(&self, flow: FlowId) {
        let Some(last) = self.table.read().begin_turn(flow) else { return };
        let route = &last.route;
        if let Some(fec) = &route.fec {
            fec.close(self, route);
        }
        if let Some(sctp) = &route.sctp {
            self.repeating.add(sctp, clock::now());
        }
        if let Some(seal) = &route.seal {
            match seal.seal_fence(route.peer_flow, last.stack, last.change) {
                // Without it, what follows waits at the peer: a full queue of this host is waited for.
                Ok(datagram) => self.send_data(&datagram, datagram.len(), &route.to, true),
                Err(reason) => self.counting.drop(reason),
            }
            return;
        }
        let stack = match last.stack {
            Stack::Fec | Stack::SecureFec => STACK_FEC,
            Stack::Sctp | Stack::SecureSctp => STACK_SCTP,
            Stack::Plain | Stack::Secure => STACK_ENCAP,
        };
        let mut datagram = [0; DATA_HEADER_LEN + TRAIN_HEADER_LEN];
        let dst_flow = route.peer_flow;
        let packet_number = route.packet_number;
        DataRepr { stack, flags: FENCE, dst_flow, packet_number, index: 0, count: 1 }.emit(&mut datagram);
        datagram[DATA_HEADER_LEN..].copy_from_slice(&fence_of_change(last.change));
        self.send_data(&datagram, datagram.len(), &route.to, true);
    }
}

/// Wakes the thread that reads UDP.
pub(crate) type Overtaking = crate::striped::Agenda<Turn>;

#[cfg(test)]
mod tests {
    use margay_core::fair_table::Peer;

    use super::*;
    use crate::held_bytes::{HELD_BYTES_ALL, HeldBytes};

    fn fresh(change: u32, to: Stack) -> Turn {
        Turn::new(FlowId(7), change, to, HeldBytes::default().account(Peer::Own))
    }

    fn header(stack: u8) -> DataRepr {
        DataRepr { stack, flags: 0, dst_flow: FlowId(7), packet_number: 1, index: 0, count: 1 }
    }

    /// The peer has said that it turns.
    fn said(change: u32, to: Stack) -> Turn {
        let turn = fresh(change, to);
        turn.say(Instant::ZERO);
        turn
    }

    fn held_until(millis: u64) -> Admission {
        Admission::Held(Some(Instant::from_millis(millis)))
    }

    fn admit(turn: &Turn, millis: u64, stack: Stack) -> Admission {
        let from = "10.0.0.2:54324".parse().expect("literal");
        let number = if stack == Stack::Plain { 2 } else { 3 };
        turn.admit(Instant::from_millis(millis), stack, header(number), (&[0; 40], 40), (None, from))
    }

    #[test]
    fn what_overtakes_waits_for_the_fence_and_what_comes_behind_it_is_late() {
        let turn = said(9, Stack::Secure);
        assert_eq!(admit(&turn, 1, Stack::Plain), Admission::Take);
        assert_eq!(admit(&turn, 2, Stack::Secure), held_until(52));
        assert_eq!(admit(&turn, 3, Stack::Secure), held_until(52), "as long as the first");
        assert_eq!(admit(&turn, 4, Stack::Plain), Admission::Take);
        assert!(!turn.fence(8), "of another change");
        assert!(turn.fence(9) && !turn.fence(9), "once");
        assert_eq!(turn.take_held().len(), 2);
        assert_eq!(admit(&turn, 5, Stack::Plain), Admission::Late);
        assert_eq!(admit(&turn, 6, Stack::Secure), Admission::Take);
    }

    #[test]
    fn a_lost_fence_holds_up_little_and_not_for_long() {
        let turn = said(9, Stack::Plain);
        assert!(!turn.is_due(Instant::from_millis(1000)), "nothing waits");
        assert_eq!(admit(&turn, 1000, Stack::Plain), held_until(1050));
        assert!(!turn.is_due(Instant::from_millis(1049)));
        assert!(turn.is_due(Instant::from_millis(1050)) && !turn.is_due(Instant::from_millis(1051)));
        let turn = said(10, Stack::Plain);
        let held_max = HELD_BYTES_MAX / (40 + RUN_OVERHEAD_BYTES);
        for _ in 0..held_max {
            assert!(matches!(admit(&turn, 1, Stack::Plain), Admission::Held(_)));
        }
        assert_eq!(admit(&turn, 1, Stack::Plain), Admission::Overtaken);
        assert_eq!((turn.take_held().len(), admit(&turn, 1, Stack::Secure)), (held_max, Admission::Late));
    }

    #[test]
    fn what_is_forged_before_the_peer_has_said_a_word_ends_nothing() {
        let turn = fresh(9, Stack::Secure);
        for _ in 0..HELD_BYTES_MAX / (40 + RUN_OVERHEAD_BYTES) {
            assert_eq!(admit(&turn, 1, Stack::Secure), Admission::Held(None));
        }
        assert_eq!(admit(&turn, 1, Stack::Secure), Admission::Full);
        assert!(turn.due().is_none() && !turn.is_due(Instant::from_millis(60_000)));
        assert_eq!(admit(&turn, 60_000, Stack::Plain), Admission::Take);
        turn.say(Instant::from_millis(60_000));
        turn.say(Instant::from_millis(60_010));
        assert_eq!(turn.due(), Some(Instant::from_millis(60_050)), "as of the first word");
        assert!(turn.is_due(Instant::from_millis(60_050)));
        assert_eq!(admit(&turn, 60_051, Stack::Plain), Admission::Late);
    }

    #[test]
    fn a_peer_that_turns_many_flows_holds_no_more_than_its_share() {
        let (all, peer) = (HeldBytes::default(), Peer::Unauthenticated([192, 0, 2, 1].into()));
        let from = "192.0.2.1:54324".parse().expect("literal");
        let run = [0; 60_000];
        let turns: Vec<Turn> = (0..64).map(|_| Turn::new(FlowId(7), 9, Stack::Secure, all.account(peer))).collect();
        let admit = |turn: &Turn| turn.admit(Instant::ZERO, Stack::Secure, header(3), (&run, 60_000), (None, from));
        let held_of = |turn: &Turn| (0..100).filter(|_| matches!(admit(turn), Admission::Held(_))).count();
        let held: usize = turns.iter().map(held_of).sum();
        assert!((250..280).contains(&held) && held * run.len() <= HELD_BYTES_ALL / 16, "{held}");
        assert_eq!(admit(&turns[63]), Admission::Full);
        turns[63].say(Instant::ZERO);
        assert_eq!(admit(&turns[63]), Admission::Overtaken, "its own flow waits no longer");
        let other = Turn::new(FlowId(8), 9, Stack::Secure, all.account(Peer::Unauthenticated([10, 0, 0, 2].into())));
        assert!(matches!(admit(&other), Admission::Held(_)), "another peer has room");
        drop(turns);
        let again = Turn::new(FlowId(7), 9, Stack::Secure, all.account(peer));
        assert!(matches!(admit(&again), Admission::Held(_)));
    }

    #[test]
    fn of_a_change_that_is_over_what_waits_goes_on_before_anything_else() {
        let turn = fresh(9, Stack::Secure);
        assert!(!turn.end(Instant::from_millis(5)), "nothing waits");
        let turn = fresh(9, Stack::Secure);
        admit(&turn, 1, Stack::Secure);
        assert!(turn.end(Instant::from_millis(5)) && turn.is_due(Instant::from_millis(5)));
        for stack in Stack::ALL {
            assert_eq!(admit(&turn, 5, stack), Admission::Over, "the table has to say again what it is");
        }
        assert_eq!((turn.take_held().len(), turn.due()), (1, None));
        assert!(!turn.is_due(Instant::from_millis(6)), "given on already");
    }
}
