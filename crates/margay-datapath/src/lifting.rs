//! Flows of datagrams whose direct packets the kernel is to take from now on. Some have gone up to the agent before,
//! and those that the kernel takes must not overtake them (DESIGN §18): so the kernel goes on sending them up until all
//! that came up has been delivered, and nothing has come up since.

use margay_wire::FlowId;

use crate::direct::QUEUE_READS;
use crate::driver::Shared;

/// A flow whose packets come faster than they are delivered is taken after so many questions: a few packets of it may
/// be overtaken then, as by any queue of a network.
const QUESTIONS_MAX: u32 = 256;

/// The flows, for whoever reads `sal0`.
#[derive(Debug, Default)]
pub(crate) struct Lifting {
    /// Each with the number of times that the kernel was asked.
    flows: Vec<(FlowId, u32)>,
    reads: u32,
}

impl Lifting {
    /// `sal0` has been read once, and `is_drained` if nothing lay there. Whether all that lay there when the kernel was
    /// asked last has been read, and some flow waits for that.
    pub fn has_read<C>(&mut self, shared: &Shared<C>, is_drained: bool) -> bool {
        let added = shared.direct.lifting.take();
        if !added.is_empty() {
            self.flows.extend(added.into_iter().map(|flow| (flow, 0)));
            self.reads = 0;
        }
        if self.flows.is_empty() {
            return false;
        }
        self.reads += 1;
        is_drained || self.reads > QUEUE_READS
    }

    /// Asks the kernel about each flow, where the core has worked off all that was read. True if some are left that can
    /// be asked about again without waiting for the core.
    pub fn ask<C>(&mut self, shared: &Shared<C>) -> bool {
        if !shared.backlog.await_packets() {
            return false;
        }
        self.reads = 0;
        self.flows.retain_mut(|(flow, questions)| {
            *questions += 1;
            !shared.direct.lift(*flow, *questions >= QUESTIONS_MAX)
        });
        !self.flows.is_empty()
    }
}
