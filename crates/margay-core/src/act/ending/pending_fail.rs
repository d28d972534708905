//! FAIL is confirmed by nobody, and a program that only waits would never learn that one was lost: it is said again, a
//! few times, to whoever shared the flow.

use alloc::collections::VecDeque;
use core::time::Duration;

use margay_wire::{ErrorCode, ErrorRepr, Extension, FlowId, Kind};

use crate::association::draft::Draft;
use crate::machine::sal::Sal;
use crate::types::time::Instant;

/// From one time to the next. With a tenth of all messages lost, one peer in a thousand does not hear of it.
const PAUSES: [Duration; 2] = [Duration::from_millis(200), Duration::from_millis(600)];
/// More ends at once are said once each.
const WAITING_MAX: usize = 4096;

/// A flow that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingFail {
    /// The association by which the peer is told.
    pub association: u32,
    /// The peer's number of the flow, and this host's.
    pub peer_flow: FlowId,
    pub flow: FlowId,
    pub code: ErrorCode,
}

/// Those that are said again, each after its pause: in each queue the earliest first.
#[derive(Debug, Default)]
pub(crate) struct PendingFails([VecDeque<(Instant, PendingFail)>; PAUSES.len()]);

impl PendingFails {
    fn add(&mut self, now: Instant, times: usize, pending: PendingFail) {
        let (Some(waiting), Some(pause)) = (self.0.get_mut(times), PAUSES.get(times)) else { return };
        if waiting.len() < WAITING_MAX {
            waiting.push_back((now + *pause, pending));
        }
    }

    /// When the next one is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.0.iter().filter_map(|waiting| waiting.front()).map(|(at, _)| *at).min()
    }

    fn take_due(&mut self, now: Instant) -> Option<(usize, PendingFail)> {
        let due = |waiting: &VecDeque<(Instant, PendingFail)>| waiting.front().is_some_and(|(at, _)| *at <= now);
        let times = self.0.iter().position(due)?;
        self.0[times].pop_front().map(|(_, pending)| (times, pending))
    }
}

impl Sal {
    /// Tells the peer of a flow that this end can carry it no more.
    pub(crate) fn say_fail(&mut self, id: FlowId, code: ErrorCode) {
        let Some(flow) = self.flows.get(id) else { return };
        let pending = PendingFail { association: flow.association, peer_flow: flow.peer_flow, flow: id, code };
        self.send_fail(pending);
        self.pending_fails.add(self.now, 0, pending);
    }

    fn send_fail(&mut self, pending: PendingFail) {
        let extensions = [Extension::Error(ErrorRepr { code: pending.code, text: "" })];
        let mut draft = Draft::new(Kind::Fail, pending.peer_flow, pending.flow);
        draft.extensions = &extensions;
        self.seal_and_send(pending.association, draft);
    }

    /// Says again what is due.
    pub(crate) fn pending_fails_due(&mut self, now: Instant) {
        while let Some((times, pending)) = self.pending_fails.take_due(now) {
            self.send_fail(pending);
            self.pending_fails.add(now, times + 1, pending);
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_fail_is_sent_again_twice_and_in_time() {
        let pending =
            |n| PendingFail { association: 1, peer_flow: FlowId(n), flow: FlowId(n), code: ErrorCode::Drained };
        let mut pending_fails = PendingFails::default();
        pending_fails.add(Instant::ZERO, 0, pending(1));
        pending_fails.add(Instant::from_millis(100), 0, pending(2));
        let mut said = alloc::vec::Vec::new();
        while let Some(now) = pending_fails.next_deadline() {
            while let Some((times, due)) = pending_fails.take_due(now) {
                said.push((now, due.flow.0));
                pending_fails.add(now, times + 1, due);
            }
        }
        let at = Instant::from_millis;
        assert_eq!(said, [(at(200), 1), (at(300), 2), (at(800), 1), (at(900), 2)]);
    }

    #[test]
    fn more_ends_than_there_is_room_for_are_said_once_each() {
        let mut pending_fails = PendingFails::default();
        for n in 0..WAITING_MAX as u32 + 10 {
            let flow = FlowId(n);
            pending_fails.add(
                Instant::ZERO,
                0,
                PendingFail { association: 1, peer_flow: flow, flow, code: ErrorCode::Closed },
            );
        }
        assert_eq!(pending_fails.0[0].len(), WAITING_MAX);
    }
}
