//! Flows for which another thread has something to do.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use margay_wire::FlowId;
use parking_lot::Mutex;

use crate::wait::Wake;

/// Added by any thread, and taken by the one that waits on the descriptor.
pub(crate) struct DueFlows {
    flows: Mutex<Vec<FlowId>>,
    is_waiting: AtomicBool,
    wake: Wake,
}

impl DueFlows {
    pub fn new() -> io::Result<Self> {
        Ok(Self { flows: Mutex::default(), is_waiting: AtomicBool::new(false), wake: Wake::new()? })
    }

    pub fn add(&self, flow: FlowId) {
        self.flows.lock().push(flow);
        // In this order: a wake that is set after its flow was taken would be cleared by nobody.
        self.wake.set();
        self.is_waiting.store(true, Ordering::Release);
    }

    pub fn is_waiting(&self) -> bool {
        self.is_waiting.load(Ordering::Relaxed)
    }

    pub fn take(&self) -> Vec<FlowId> {
        // Reading first keeps the cache line shared in the common case.
        if !self.is_waiting() || !self.is_waiting.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        // In this order: what is added meanwhile has the next call come here, which clears what it sets.
        self.wake.clear();
        std::mem::take(&mut *self.flows.lock())
    }
}

impl AsFd for DueFlows {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn is_set(due: &DueFlows) -> bool {
        poll(&mut [PollFd::new(due.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO) != Ok(0)
    }

    fn await_number(number: &AtomicU32, wanted: u32) {
        while number.load(Ordering::Acquire) != wanted {
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_is_added_wakes_and_is_taken_once() {
        let due = DueFlows::new().expect("descriptors");
        assert!(due.take().is_empty() && !is_set(&due));
        due.add(FlowId(1));
        due.add(FlowId(2));
        assert!(due.is_waiting() && is_set(&due));
        assert_eq!(due.take(), [FlowId(1), FlowId(2)]);
        assert!(!due.is_waiting() && !is_set(&due) && due.take().is_empty());
    }

    #[test]
    fn a_flow_that_is_taken_while_it_is_added_leaves_no_wake_that_nobody_clears() {
        const ROUNDS: u32 = 3000;
        let due = DueFlows::new().expect("descriptors");
        let added = AtomicU32::new(0);
        let seen = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    due.add(FlowId(round));
                    added.store(round, Ordering::Release);
                    await_number(&seen, round);
                }
            });
            let mut missed = 0;
            let mut left_set = 0;
            for round in 1..=ROUNDS {
                let mut taken = Vec::new();
                while taken.is_empty() {
                    taken = due.take();
                }
                await_number(&added, round);
                missed += usize::from(taken != [FlowId(round)]);
                missed += due.take().len();
                left_set += usize::from(is_set(&due));
                seen.store(round, Ordering::Release);
            }
            // The other thread ends whatever is found.
            assert_eq!((missed, left_set), (0, 0), "a wake that stays set keeps the thread from sleeping");
        });
    }
}
