//! What becomes of the flows of a drain, by name.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;
use std::{cmp, mem};

use margay_control::api::v1::{DrainCount, DrainReport};
use margay_core::drain::ServedFlow;
use margay_core::fetch::LeavingFlow;
use margay_core::name::{Prefix, ServiceId};
use margay_wire::FlowId;
use tokio::time::Instant;

use super::quiet::{self, Asking, ENDED_WITHIN};
use super::{Drain, When};
use crate::agent::service::Published;
use crate::agent::{Agent, naming};

pub(super) const TCP: u8 = 6;
const UDP: u8 = 17;

/// The flows of one name.
pub(super) struct Row {
    prefix: Prefix,
    /// Its datagrams may go to another instance.
    is_movable: bool,
    /// Connections that have carried nothing for so long are ended.
    pub quiet: Option<Duration>,
    pub count: DrainCount,
}

/// What becomes of a flow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It goes on, until it ends by itself or the deadline comes.
    Stays,
    /// The client's next datagram goes to another instance.
    Elsewhere,
}

/// A flow that was open at the last look.
#[derive(Clone, Copy)]
pub(super) struct Open {
    /// Of its row.
    pub place: usize,
    pub asking: Asking,
}

/// The count of a drain.
pub(super) struct Tally {
    /// The flows of this host that are meant.
    of: Prefix,
    /// What the order says of flows that are there.
    when: Option<When>,
    /// Longest prefix first; after them names that are not published any more.
    pub rows: Vec<Row>,
    pub open: HashMap<FlowId, Open>,
    /// Until then, programs may give away connections that are quiet, and none of these is ended.
    pub quiet_from: Instant,
}

/// What there is at one look.
struct Seen {
    served: Vec<ServedFlow>,
    /// Those that programs are giving to another host.
    leaving: Vec<LeavingFlow>,
}

/// A connection that has carried nothing for so long is ended.
fn quiet_of(when: Option<When>, service: Option<&Published>) -> Option<Duration> {
    let quiet_ms = match when {
        Some(When::Finish) => None,
        Some(When::Quiet { quiet_ms }) => Some(quiet_ms),
        None => service.and_then(|service| service.terms.quiet_ms),
    };
    quiet_ms.map(|quiet_ms| Duration::from_millis(quiet_ms.into()))
}

impl Tally {
    /// Nothing is counted yet.
    pub(super) fn new(drain: &Drain, published: &[Published], movable: &BTreeSet<Prefix>) -> Self {
        let row = |service: &Published| Row {
            prefix: service.prefix(),
            is_movable: movable.contains(&service.name.prefix()),
            quiet: quiet_of(drain.when, Some(service)),
            count: DrainCount { name: service.name.written().to_owned(), ..DrainCount::default() },
        };
        let mut rows: Vec<Row> = published.iter().map(row).collect();
        rows.sort_by_key(|row| cmp::Reverse(row.prefix.bits));
        let of = drain.scope(published);
        Self { of, when: drain.when, rows, open: HashMap::new(), quiet_from: Instant::now() }
    }

    /// Whether connections of any name end when they are quiet.
    pub(super) fn ends_quiet_ones(&self) -> bool {
        self.rows.iter().any(|row| row.quiet.is_some())
    }

    fn see(&self, agent: &Agent) -> Seen {
        agent.core.0.hear_of_flows();
        let mut seen =
            agent.core.0.with_sal(|sal, _| Seen { served: sal.served_flows(&self.of), leaving: sal.leaving_flows() });
        seen.leaving.retain(|leaving| self.of.contains(&leaving.service));
        // A stream by which connections come from another host is no client's.
        seen.served.retain(|served| !agent.connections.relocations.is_stream(&served.app));
        seen
    }

    fn place_of(&mut self, agent: &Agent, service: &ServiceId) -> usize {
        if let Some(place) = self.rows.iter().position(|row| row.prefix.contains(service)) {
            return place;
        }
        let prefix = Prefix::from(*service);
        let count = DrainCount { name: naming::prefix(agent, &prefix), ..DrainCount::default() };
        self.rows.push(Row { prefix, is_movable: false, quiet: quiet_of(self.when, None), count });
        self.rows.len() - 1
    }

    fn fate(&self, place: usize, flow: &ServedFlow) -> Fate {
        if flow.app.protocol == UDP && self.rows[place].is_movable { Fate::Elsewhere } else { Fate::Stays }
    }

    /// Counts what a drain would meet.
    pub(super) fn rehearse(&mut self, agent: &Agent) {
        let flows = self.see(agent).served;
        for flow in &flows {
            let place = self.place_of(agent, &flow.service);
            let fate = self.fate(place, flow);
            let count = &mut self.rows[place].count;
            count.open += 1;
            count.elsewhere += u64::from(fate == Fate::Elsewhere);
            self.open.insert(flow.flow, Open { place, asking: Asking::default() });
        }
        quiet::rehearse(self, &flows);
    }

    /// Counts the programs that would be asked to give connections away.
    pub(super) fn count_givers(&mut self, agent: &Agent) {
        for row in &mut self.rows {
            row.count.giving_programs = agent.connections.programs.takers.givers(&row.prefix) as u64;
        }
    }

    /// Counts flows that have ended since the last look, asks for the end of those that are quiet, and ends those that
    /// go elsewhere, and all that are left at the deadline. Gives whether none is.
    pub(super) fn look(&mut self, agent: &Agent, deadline: Instant) -> bool {
        // Before flows are looked for: those of which the answer has come may be over by now.
        quiet::hear(self, agent);
        let now = Instant::now();
        let mut before = mem::take(&mut self.open);
        let mut ending = Vec::new();
        self.rows.iter_mut().for_each(|row| row.count.open = 0);
        let Seen { served: flows, leaving } = self.see(agent);
        for flow in &flows {
            let asking = before.remove(&flow.flow).map(|known| known.asking).unwrap_or_default();
            let place = self.place_of(agent, &flow.service);
            let fate = self.fate(place, flow);
            let row = &mut self.rows[place];
            // Those that end when they are quiet are asked for once more at the deadline.
            let more = if row.quiet.is_some() && flow.app.protocol == TCP { ENDED_WITHIN } else { Duration::ZERO };
            match fate {
                Fate::Elsewhere => row.count.elsewhere += 1,
                Fate::Stays if now >= deadline + more || asking.is_overdue(now) => row.count.reset += 1,
                Fate::Stays => {
                    row.count.open += 1;
                    self.open.insert(flow.flow, Open { place, asking });
                    continue;
                }
            }
            ending.push(flow.flow);
        }
        for flow in leaving {
            self.count_leaving(agent, &flow, before.remove(&flow.flow));
        }
        for gone in before.into_values() {
            let count = &mut self.rows[gone.place].count;
            if gone.asking.has_ended() { count.quiet += 1 } else { count.finished += 1 }
        }
        agent.core.0.with_sal(|sal, now| sal.end_drained(now, &ending));
        quiet::ask(self, agent, &flows);
        self.open.is_empty()
    }

    /// Counts a connection that goes to another host, of which `known` is known from the last look. Until it has gone
    /// it may come to stay: it is open, and no reset at the deadline reaches it.
    fn count_leaving(&mut self, agent: &Agent, flow: &LeavingFlow, known: Option<Open>) {
        if flow.has_gone {
            // One that nobody knows was counted before, or had gone before the drain.
            if let Some(known) = known {
                self.rows[known.place].count.handed_over += 1;
            }
            return;
        }
        let place = self.place_of(agent, &flow.service);
        self.rows[place].count.open += 1;
        self.open.insert(flow.flow, known.unwrap_or(Open { place, asking: Asking::default() }));
    }

    /// Writes the counts into a report, by name.
    pub(super) fn tell(&self, report: &mut DrainReport, deadline: Instant) {
        report.services = self.rows.iter().map(|row| row.count.clone()).collect();
        report.services.sort_by(|one, other| one.name.cmp(&other.name));
        let left = deadline.saturating_duration_since(Instant::now());
        report.left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    }
}
