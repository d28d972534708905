//! What an agent has written down when it is killed, where that is not everything: records follow the flows by some
//! time.

use std::collections::BTreeMap;
use std::time::Duration;

use margay_core::handover::HandoverRecord;
use margay_core::{Event, Instant, Sal};
use margay_wire::FlowId;

use super::Host;

/// A record that the core waits for takes so long.
const AWAITED: Duration = Duration::from_micros(500);
/// A flow that has no record yet is asked for again.
const AGAIN: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(super) struct Journal {
    lag: Duration,
    due: BTreeMap<FlowId, Instant>,
    /// Pairs that the core waits for.
    awaited: Vec<(Instant, [FlowId; 2])>,
    /// What is written of flows, and of associations.
    pub records: BTreeMap<FlowId, HandoverRecord>,
    pub associations: Vec<u8>,
}

impl Journal {
    /// A record is written so long after its flow has changed.
    pub fn lagging(lag: Duration, associations: Vec<u8>, flows: Vec<HandoverRecord>) -> Self {
        let records = flows.into_iter().map(|record| (record.flow, record)).collect();
        Self { lag, due: BTreeMap::new(), awaited: Vec::new(), records, associations }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.due.values().copied().chain(self.awaited.iter().map(|(at, _)| *at)).min()
    }

    pub fn hear(&mut self, now: Instant, event: &Event) {
        match event {
            Event::FlowOpened(flow) | Event::FlowChanged(flow) | Event::FlowEnded { flow, .. } => {
                self.due.entry(*flow).or_insert(now + self.lag);
            }
            Event::FlowClosed { flow, .. } => {
                self.due.remove(&flow.flow);
                self.records.remove(&flow.flow);
            }
            Event::Keep { old, new } => self.awaited.push((now + AWAITED, [*old, *new])),
            _ => {}
        }
    }

    /// Writes what is due. Gives the flows that the core waits for.
    pub fn write(&mut self, now: Instant, sal: &mut Sal) -> Vec<FlowId> {
        let awaited = self.awaited.extract_if(.., |(at, _)| *at <= now).map(|(_, pair)| pair);
        let awaited: Vec<[FlowId; 2]> = awaited.collect();
        let due = self.due.extract_if(.., |_, at| *at <= now).map(|(flow, _)| flow);
        let due: Vec<FlowId> = due.chain(awaited.iter().flatten().copied()).collect();
        if !due.is_empty() {
            self.associations = sal.keep_associations().to_vec();
        }
        for flow in due {
            match sal.export_flow(now, flow) {
                Some(record) => drop(self.records.insert(flow, record)),
                None if sal.flow(flow).is_some_and(|shown| shown.goes_on) => {
                    self.due.insert(flow, now + AGAIN);
                }
                None => drop(self.records.remove(&flow)),
            }
        }
        awaited.into_iter().map(|[old, _]| old).collect()
    }
}

impl Host {
    /// Takes the core's events. Gives the flows that it wants to be written down, and are.
    pub(super) fn hear_events(&mut self, now: Instant) -> Vec<FlowId> {
        let mut kept = Vec::new();
        while let Some(event) = self.sal.poll_event() {
            self.hear_of_splice(&event);
            match (&mut self.journal, &event) {
                (Some(journal), event) => journal.hear(now, event),
                (None, Event::Keep { old, .. }) => kept.push(*old),
                (None, _) => {}
            }
            self.events.push(event);
        }
        kept
    }
}
