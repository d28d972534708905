//! What becomes of the flows of a drain, by name.

use std::collections::{BTreeSet, HashMap};
use std::{cmp, mem};

use margay_control::api::v1::{DrainCount, DrainReport};
use margay_core::drain::ServedFlow;
use margay_core::name::{Prefix, ServiceId};
use margay_wire::FlowId;
use tokio::time::Instant;

use super::Drain;
use crate::agent::service::Published;
use crate::agent::{Agent, naming};

const UDP: u8 = 17;

/// The flows of one name.
struct Row {
    prefix: Prefix,
    /// Its datagrams may go to another instance.
    is_movable: bool,
    count: DrainCount,
}

/// What becomes of a flow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It goes on, until it ends by itself or the deadline comes.
    Stays,
    /// The client's next datagram goes to another instance.
    Elsewhere,
}

/// The count of a drain.
pub(super) struct Tally {
    /// The flows of this host that are meant.
    of: Prefix,
    /// Longest prefix first; after them names that are not published any more.
    rows: Vec<Row>,
    /// Flows that were open at the last look, and the place of their row.
    open: HashMap<FlowId, usize>,
}

impl Tally {
    /// Nothing is counted yet.
    pub(super) fn new(drain: &Drain, published: &[Published], movable: &BTreeSet<Prefix>) -> Self {
        let row = |service: &Published| Row {
            prefix: service.prefix(),
            is_movable: movable.contains(&service.name.prefix()),
            count: DrainCount { name: service.name.written().to_owned(), ..DrainCount::default() },
        };
        let mut rows: Vec<Row> = published.iter().map(row).collect();
        rows.sort_by_key(|row| cmp::Reverse(row.prefix.bits));
        let of_name = |name: &margay_core::name::Name| rows.first().map_or_else(|| name.prefix(), |row| row.prefix);
        let of = drain.name.as_ref().map(of_name).unwrap_or_default();
        Self { of, rows, open: HashMap::new() }
    }

    fn served(&self, agent: &Agent) -> Vec<ServedFlow> {
        agent.core.0.hear_of_flows();
        agent.core.0.with_sal(|sal, _| sal.served_flows(&self.of))
    }

    fn place_of(&mut self, agent: &Agent, service: &ServiceId) -> usize {
        if let Some(place) = self.rows.iter().position(|row| row.prefix.contains(service)) {
            return place;
        }
        let prefix = Prefix::from(*service);
        let count = DrainCount { name: naming::prefix(agent, &prefix), ..DrainCount::default() };
        self.rows.push(Row { prefix, is_movable: false, count });
        self.rows.len() - 1
    }

    fn fate(&self, place: usize, flow: &ServedFlow) -> Fate {
        if flow.protocol == UDP && self.rows[place].is_movable { Fate::Elsewhere } else { Fate::Stays }
    }

    /// Counts what a drain would meet.
    pub(super) fn rehearse(&mut self, agent: &Agent) {
        for flow in self.served(agent) {
            let place = self.place_of(agent, &flow.service);
            let fate = self.fate(place, &flow);
            let count = &mut self.rows[place].count;
            count.open += 1;
            count.elsewhere += u64::from(fate == Fate::Elsewhere);
        }
    }

    /// Counts flows that have ended since the last look, and ends those that go elsewhere; with `is_due` all that are
    /// left. Gives whether none is.
    pub(super) fn look(&mut self, agent: &Agent, is_due: bool) -> bool {
        let mut before = mem::take(&mut self.open);
        let mut ending = Vec::new();
        self.rows.iter_mut().for_each(|row| row.count.open = 0);
        for flow in self.served(agent) {
            before.remove(&flow.flow);
            let place = self.place_of(agent, &flow.service);
            let fate = self.fate(place, &flow);
            let count = &mut self.rows[place].count;
            match fate {
                Fate::Elsewhere => count.elsewhere += 1,
                Fate::Stays if is_due => count.reset += 1,
                Fate::Stays => {
                    count.open += 1;
                    self.open.insert(flow.flow, place);
                    continue;
                }
            }
            ending.push(flow.flow);
        }
        before.into_values().for_each(|place| self.rows[place].count.finished += 1);
        agent.core.0.with_sal(|sal, now| sal.end_drained(now, &ending));
        self.open.is_empty()
    }

    /// Writes the counts into a report, by name.
    pub(super) fn tell(&self, report: &mut DrainReport, deadline: Instant) {
        report.services = self.rows.iter().map(|row| row.count.clone()).collect();
        report.services.sort_by(|one, other| one.name.cmp(&other.name));
        let left = deadline.saturating_duration_since(Instant::now());
        report.left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    }
}
