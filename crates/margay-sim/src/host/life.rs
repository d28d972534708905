//! Agents that are killed, and start again with what they had written down.

use std::time::Duration;

use margay_core::epoch::next_epoch;
use margay_core::handover::HandoverRecord;
use margay_core::{Cipher, Instant};
use margay_wire::FlowId;

use super::journal::Journal;
use super::{Host, Start};
use crate::cache::Cache;
use crate::kernel::Kernel;

/// What an agent has written down for its next start.
struct Kept {
    associations: Vec<u8>,
    flows: Vec<HandoverRecord>,
}

impl Host {
    /// The ciphers that its agent has, and whether it demands that every flow is sealed: also after its next starts.
    pub fn set_secure(&mut self, ciphers: &[Cipher], demands: bool) {
        self.secure = (ciphers.to_vec(), demands);
        self.sal.set_secure(ciphers, demands, Vec::new());
    }

    /// From which its key was made: the same machine can start again with it.
    pub fn key_seed(&self) -> [u8; 32] {
        self.start.key_seed
    }

    /// The agent's epoch.
    pub const fn epoch(&self) -> u32 {
        self.start.epoch
    }

    /// Its state directory is restored from the first copy that there was. What the runtime directory has stays: keys,
    /// and the epoch that they were used in last.
    pub const fn restore_state_directory(&mut self) {
        self.counted_epoch = 1;
    }

    /// The next start takes the epoch of the one before again.
    #[cfg(test)]
    pub(crate) const fn forget_epoch(&mut self) {
        self.start.epoch -= 1;
        self.counted_epoch = self.start.epoch;
    }

    /// From now on its agent does not run.
    pub fn kill_agent(&mut self) {
        self.is_dead = true;
    }

    /// From now on what is written down of flows is so much older than they are, but for what the core waits for.
    pub fn lag_records(&mut self, now: Instant, lag: Duration) {
        let kept = self.kept(now);
        self.journal = Some(Journal::lagging(lag, kept.associations, kept.flows));
    }

    /// How many flows the next start of the agent would find in records that lag behind.
    pub fn lagging_records(&self) -> usize {
        self.journal.as_ref().map_or(0, |journal| journal.records.len())
    }

    /// The agent's records are written that are due.
    pub(super) fn write_down(&mut self, now: Instant) {
        let awaited = self.journal.as_mut().map(|journal| journal.write(now, &mut self.sal)).unwrap_or_default();
        awaited.into_iter().for_each(|old| self.sal.kept(now, old));
    }

    /// Whether its agent runs.
    pub const fn has_agent(&self) -> bool {
        !self.is_dead
    }

    /// The agent starts again, with what the one before had written down when it was killed. The user-space cache is
    /// empty, the kernel's has gone on meanwhile.
    pub(crate) fn start_agent(&mut self, now: Instant, seed: [u8; 32]) {
        self.start_agent_with(now, seed, &|_| {});
    }

    /// The same, with records that whoever administers the host has altered.
    pub(crate) fn start_agent_with(&mut self, now: Instant, seed: [u8; 32], alter: &dyn Fn(&mut HandoverRecord)) {
        let mut kept = self.kept(now);
        kept.flows.iter_mut().for_each(alter);
        // Without a clock: only what is remembered counts.
        let epoch = next_epoch(Some(self.counted_epoch), Some(self.start.epoch), 0).expect("far from the last");
        self.counted_epoch = epoch;
        let start = Start { epoch, ..self.start };
        let mut next =
            Self::at(self.addresses.clone(), self.address, start, now, seed, self.limits, self.nonces.clone());
        for (prefix, id, rule) in self.sal.rules() {
            // An empty table has room for what another had room for.
            let _ = next.sal.add_rule_as(now, id, prefix, rule.clone());
        }
        // As an agent does: its configuration is read before flows are taken up.
        next.sal.set_stack_rules(now, self.sal.stack_rules().into_iter().map(|info| info.rule).collect());
        next.sal.set_chain_policy(self.sal.chain_policy().clone()).expect("it was gone by before");
        self.leases.iter().for_each(|(address, service)| next.sal.bind_name(*address, *service));
        std::mem::swap(&mut next.sal, &mut self.sal);
        let mut cache = Cache::new(self.cache.own, self.nonces.clone());
        cache.kernel = self.cache.kernel.take();
        (self.cache, self.start, self.is_dead) = (cache, start, false);
        if !self.secure.0.is_empty() {
            self.sal.set_secure(&self.secure.0, self.secure.1, Vec::new());
        }
        self.sal.take_up_associations(now, &kept.associations).expect("kept whole");
        for record in &kept.flows {
            // One that is over may be refused.
            let _ = self.sal.adopt_flow(now, record);
        }
        self.sal.forget_superseded();
        self.sal.resume_ways(now);
        if self.cache.kernel.is_some() {
            self.sal.set_flow_ports(now, Some(61_000..=65_535));
        }
        let entries = self.cache.kernel.as_ref().map(Kernel::entries).unwrap_or_default();
        for (flow, _, wire) in entries {
            if !self.sal.adopt_direct(now, flow, 1, &wire)
                && let Some(kernel) = &mut self.cache.kernel
            {
                kernel.follow(now, flow, None);
            }
        }
        self.drain(now);
    }

    fn kept(&mut self, now: Instant) -> Kept {
        if let Some(journal) = self.journal.take() {
            return Kept { associations: journal.associations, flows: journal.records.into_values().collect() };
        }
        let associations = self.sal.keep_associations().to_vec();
        let flows: Vec<FlowId> = self.sal.flows_to_keep().collect();
        let flows = flows.into_iter().filter_map(|flow| self.sal.export_flow(now, flow)).collect();
        Kept { associations, flows }
    }
}
