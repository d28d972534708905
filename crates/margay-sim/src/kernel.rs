//! The kernel's flow cache as `margay-datapath/bpf/flow_cache.bpf.c` has it: what it sends and accepts direct, and how it finds
//! that a flow has stalled.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use margay_core::{Instant, Tuple, Wire};
use margay_wire::FlowId;

use crate::cache::wire_tuple;
use crate::program::{FIN, SYN, Segment, UDP};

/// A wait for an answer is too long after this and twice the round trip.
const STALL: Duration = Duration::from_millis(190);
/// The same without a round trip known.
const STALL_UNKNOWN: Duration = Duration::from_secs(1);

/// The same for datagrams, to which the other end answers once in [`ANSWER`].
const DATAGRAM_STALL: Duration = Duration::from_millis(3500);
const ANSWER: Duration = Duration::from_secs(1);
/// After such a pause a flow of datagrams is proved anew.
const DATAGRAM_IDLE: Duration = Duration::from_secs(15);

/// One flow that goes direct in at least one direction.
struct Direct {
    app: Tuple,
    wire: Wire,
    /// This host's address and the peer's.
    between: (IpAddr, IpAddr),
    /// The path is held: nothing is sent direct.
    is_held: bool,
    unanswered_since: Option<Instant>,
    rtt: Duration,
    is_stalled: bool,
    /// The last packet each way, and when an answer was asked for last.
    last_out: Option<Instant>,
    last_in: Option<Instant>,
    asked: Option<Instant>,
}

/// What the agent wants of a flow.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub app: Tuple,
    pub wire: Wire,
    pub between: (IpAddr, IpAddr),
    pub is_held: bool,
}

/// The kernel's cache of one host.
pub struct Kernel {
    flows: HashMap<FlowId, Direct>,
    by_app: HashMap<Tuple, FlowId>,
    /// Round trips by peer: a hint for flows that know none yet.
    paths: HashMap<IpAddr, Duration>,
    /// Longer IP packets are left to the agent.
    pub mtu: usize,
    /// Packets that it sent direct.
    pub sent: u64,
    /// Times that it found a flow stalled.
    pub stalls: u64,
    /// Flows whose datagrams want an answer.
    one_way: Vec<FlowId>,
}

impl Default for Kernel {
    fn default() -> Self {
        Self {
            flows: HashMap::new(),
            by_app: HashMap::new(),
            paths: HashMap::new(),
            mtu: 1500,
            sent: 0,
            stalls: 0,
            one_way: Vec::new(),
        }
    }
}

impl Kernel {
    /// Takes the entry that the agent wants; what goes direct neither way is no entry.
    pub(crate) fn follow(&mut self, flow: FlowId, wanted: Option<Wanted>) {
        match wanted.filter(|wanted| wanted.wire.sending || wanted.wire.accepting) {
            Some(Wanted { app, wire, between, is_held }) => {
                self.by_app.insert(app, flow);
                let fresh = Direct {
                    app,
                    wire,
                    between,
                    is_held,
                    unanswered_since: None,
                    rtt: Duration::ZERO,
                    is_stalled: false,
                    last_out: None,
                    last_in: None,
                    asked: None,
                };
                let entry = self.flows.entry(flow).or_insert(fresh);
                (entry.app, entry.wire, entry.between) = (app, wire, between);
                entry.is_held = is_held;
                (entry.unanswered_since, entry.is_stalled) = (None, false);
            }
            None => {
                if let Some(entry) = self.flows.remove(&flow) {
                    self.by_app.remove(&entry.app);
                }
            }
        }
    }

    /// Forgets every flow.
    pub(crate) fn clear(&mut self) {
        self.flows.clear();
        self.by_app.clear();
    }

    /// Whether the flow has stalled; `None` when it is not here.
    pub(crate) fn is_stalled(&self, flow: FlowId) -> Option<bool> {
        self.flows.get(&flow).map(|entry| entry.is_stalled)
    }

    /// The application's packet as it goes on the wire; `None` when the agent is to have it.
    pub(crate) fn egress(&mut self, now: Instant, segment: &Segment) -> Option<(FlowId, Vec<u8>)> {
        if segment.flags & SYN != 0 {
            return None;
        }
        let flow = *self.by_app.get(&segment.tuple)?;
        let entry = self.flows.get_mut(&flow)?;
        if !entry.wire.sending || entry.is_stalled || entry.is_held {
            return None;
        }
        let is_datagram = segment.tuple.protocol == UDP;
        let tuple = wire_tuple(segment.tuple.protocol, entry.between.0, entry.between.1, &entry.wire);
        let packet = segment.clone().readdressed(tuple).emit();
        if packet.len() > self.mtu || is_datagram && segment.data.is_empty() {
            return None;
        }
        if is_datagram {
            let has_paused = entry.last_out.max(entry.last_in).is_some_and(|last| now.since(last) > DATAGRAM_IDLE);
            if has_paused || entry.unanswered_since.is_some_and(|since| now.since(since) > DATAGRAM_STALL) {
                entry.is_stalled = true;
                self.stalls += u64::from(!has_paused);
                return None;
            }
            entry.unanswered_since.get_or_insert(now);
        } else if !segment.data.is_empty() || segment.flags & FIN != 0 {
            let of_path = self.paths.get(&entry.between.1).copied();
            let rtt = if entry.rtt.is_zero() { of_path } else { Some(entry.rtt) };
            let limit = rtt.map_or(STALL_UNKNOWN, |rtt| STALL + 2 * rtt);
            if entry.unanswered_since.is_some_and(|since| now.since(since) > limit) {
                entry.is_stalled = true;
                self.stalls += 1;
                return None;
            }
            entry.unanswered_since.get_or_insert(now);
        }
        entry.last_out = Some(now);
        self.sent += 1;
        Some((flow, packet))
    }

    /// A packet of the wire: its flow, and the five-tuple that the application's packets have. `None` when it goes up.
    pub(crate) fn ingress(&mut self, now: Instant, segment: &Segment) -> Option<(FlowId, Tuple)> {
        let (source, destination) = (segment.tuple.source, segment.tuple.destination);
        let is_bare = segment.tuple.protocol == UDP && segment.data.is_empty();
        let is_on = |entry: &Direct| {
            (entry.wire.accepting || is_bare)
                && entry.app.protocol == segment.tuple.protocol
                && entry.between == (destination.ip(), source.ip())
                && (entry.wire.remote_port, entry.wire.local_port) == (source.port(), destination.port())
        };
        let (flow, entry) = self.flows.iter_mut().find(|(_, entry)| is_on(entry))?;
        if segment.tuple.protocol == UDP {
            entry.unanswered_since = None;
            if is_bare {
                return None;
            }
            let is_long_ago = |at: Option<Instant>| at.is_none_or(|at| now.since(at) > ANSWER);
            if is_long_ago(entry.last_out) && is_long_ago(entry.asked) {
                entry.asked = Some(now);
                self.one_way.push(*flow);
            }
            entry.last_in = Some(now);
        } else if let Some(since) = entry.unanswered_since.take() {
            let wait = now.since(since);
            if entry.rtt.is_zero() {
                self.paths.insert(entry.between.1, wait);
            }
            // The longest counts at once and is forgotten slowly.
            let shorter = entry.rtt.saturating_sub(wait) / 8;
            entry.rtt = if wait > entry.rtt { wait } else { entry.rtt - shorter };
        }
        Some((*flow, entry.app.reversed()))
    }

    /// Flows whose datagrams want an answer, since none goes back.
    pub(crate) fn take_one_way(&mut self) -> Vec<FlowId> {
        std::mem::take(&mut self.one_way)
    }
}
