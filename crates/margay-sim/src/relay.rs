//! Programs that relay between a connection that they have accepted and one that they have opened, and may leave.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::delta::{SocketFacts, SpliceFacts};
use margay_core::reconfiguration::{SpliceOutcome, SpliceRefused};
use margay_core::{Event, Instant};
use margay_wire::FlowId;

use crate::host::Host;
use crate::stream::{Plan, State, Stream};

/// Says nothing by itself.
const RELAYED: Plan = Plan { write: 0, every: Duration::from_secs(1), writes: 0, closes: false };

/// A program that relays.
#[derive(Debug)]
pub struct Relay {
    /// Where it listens.
    port: u16,
    /// Where it connects to.
    to: SocketAddr,
    /// What has come waits for so long: it is acknowledged, and nobody else has it.
    lag: Duration,
    next: Option<Instant>,
    /// Its two connections, once there are any.
    pair: Option<(usize, usize)>,
    /// Their flows, while it is to leave.
    flows: Option<(FlowId, FlowId)>,
    /// It is killed, and both its connections with it.
    pub is_dead: bool,
    /// What has become of its wishes to leave.
    pub outcomes: Vec<SpliceOutcome>,
}

impl Relay {
    /// Listens on a port, and connects to an address.
    pub const fn new(port: u16, to: SocketAddr, lag: Duration) -> Self {
        Self { port, to, lag, next: None, pair: None, flows: None, is_dead: false, outcomes: Vec::new() }
    }

    /// Whether nobody has connected to it yet.
    pub(crate) const fn waits(&self) -> bool {
        self.pair.is_none() && !self.is_dead
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.next.filter(|_| !self.is_dead)
    }
}

impl Host {
    /// All programs here that relay go on.
    pub(crate) fn relay(&mut self, now: Instant) {
        for at in 0..self.relays.len() {
            if self.relays[at].is_dead {
                continue;
            }
            if self.relays[at].pair.is_none() {
                let port = self.relays[at].port;
                let is_its = |stream: &Stream| stream.tuple().source.port() == port && stream.state == State::Open;
                let Some(left) = self.streams.iter().position(is_its) else { continue };
                let to = self.relays[at].to;
                let right = self.connect_stream(now, to, RELAYED);
                self.streams[left].relay();
                self.streams[right].relay();
                self.relays[at].pair = Some((left, right));
                self.relays[at].next = Some(now);
            }
            if self.relays[at].next.is_some_and(|next| next <= now) {
                self.relay_once(now, at);
            }
        }
    }

    fn relay_once(&mut self, now: Instant, at: usize) {
        let Some((left, right)) = self.relays[at].pair else { return };
        for (from, to) in [(left, right), (right, left)] {
            let has_closed = self.streams[from].has_peer_closed();
            let received = self.streams[from].received;
            self.streams[to].relay_from(received, has_closed);
            if self.streams[from].was_reset {
                self.kill_relay(now, at);
                return;
            }
        }
        let is_over = [left, right].iter().all(|one| matches!(self.streams[*one].state, State::Gone | State::TimeWait));
        self.relays[at].next = (!is_over).then(|| now + self.relays[at].lag);
        for stream in [left, right] {
            for segment in self.streams[stream].poll(now) {
                self.send_segment(now, &segment);
            }
        }
    }

    /// The program ends, and its kernel resets both of its connections.
    pub fn kill_relay(&mut self, now: Instant, at: usize) {
        self.relays[at].is_dead = true;
        let Some((left, right)) = self.relays[at].pair else { return };
        [left, right].into_iter().for_each(|stream| self.abort_stream(now, stream));
    }

    /// A program resets a connection of its own.
    pub fn abort_stream(&mut self, now: Instant, stream: usize) {
        if let Some(reset) = self.streams[stream].abort() {
            self.send_segment(now, &reset);
        }
    }

    /// Whether the program has both of its connections.
    pub fn is_relaying(&self, at: usize) -> bool {
        self.relays[at].pair.is_some_and(|(_, right)| self.streams[right].state == State::Open)
    }

    /// The program wishes to leave.
    ///
    /// # Errors
    ///
    /// Why it cannot.
    ///
    /// # Panics
    ///
    /// It has no connections.
    pub fn splice(&mut self, now: Instant, at: usize) -> Result<(), SpliceRefused> {
        let (left, right) = self.relays[at].pair.expect("it relays");
        let [accepted, opened] = [left, right].map(|one| self.flow_of(one).expect("its flow").flow);
        let facts = |of: &Stream, written: u64, read: u64| {
            let (unread, written) = of.numbers_of(read, written);
            SocketFacts { unread, written, timestamp: None, peer_scale: 0, own_scale: 0, has_sack: false }
        };
        let [to_right, to_left] = [self.streams[right].written(), self.streams[left].written()];
        let facts = SpliceFacts {
            left: facts(&self.streams[left], to_left, to_right),
            right: facts(&self.streams[right], to_right, to_left),
        };
        self.relays[at].flows = Some((accepted, opened));
        let said = self.sal.splice(now, accepted, opened, facts);
        self.drain(now);
        said
    }

    pub(crate) fn hear_of_splice(&mut self, event: &Event) {
        let Event::SpliceOver { left, right, outcome } = event else { return };
        let Some(at) = self.relays.iter().position(|one| one.flows == Some((*left, *right))) else { return };
        self.relays[at].outcomes.push(outcome.clone());
        if *outcome == SpliceOutcome::Done {
            // Both sockets are reset.
            self.relays[at].is_dead = true;
            let Some((left, right)) = self.relays[at].pair else { return };
            let resets: Vec<_> = [left, right].iter().filter_map(|one| self.streams[*one].abort()).collect();
            self.resets.extend(resets);
        }
    }
}
