//! The kernel's flow cache as `margay-datapath/bpf/flow_cache.bpf.c` has it: what it sends and accepts direct, and how
//! it finds that a flow has stalled.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use margay_core::delta::Delta;
use margay_core::entry::PathId;
use margay_core::flow_cache::{DATAGRAM_ANSWER, DATAGRAM_IDLE, DATAGRAM_STALL, LINGER, STALL, STALL_UNKNOWN};
use margay_core::{Direction, Instant, Tuple, Wire};
use margay_wire::FlowId;

use crate::cache::wire_tuple;
use crate::granted::{self, Answer, Grants, Opening};
use crate::program::{ACK, FIN, RST, SYN, Segment, UDP};

/// One flow that goes direct in at least one direction.
struct Direct {
    app: Tuple,
    wire: Wire,
    /// This host's address and the peer's.
    between: (IpAddr, IpAddr),
    /// Those before, and until when what comes by them is taken.
    former: Option<((IpAddr, IpAddr), Instant)>,
    /// The path is held: nothing is sent direct.
    is_held: bool,
    unanswered_since: Option<Instant>,
    rtt: Duration,
    is_stalled: bool,
    /// The last packet each way, and when an answer was asked for last.
    last_out: Option<Instant>,
    last_in: Option<Instant>,
    asked: Option<Instant>,
    ending: Ending,
    /// Each has acknowledged all of the other's.
    is_over: bool,
    /// FIN and RST that have passed, either way.
    closed: [u8; 2],
    /// What its numbers on the wire differ by.
    delta: Option<Delta>,
}

/// How a connection ends: the number after this end's FIN and after the peer's, and what each has acknowledged last.
#[derive(Clone, Copy, Default)]
pub(crate) struct Ending {
    ends: (Option<u32>, Option<u32>),
    acknowledged: (Option<u32>, Option<u32>),
    /// How far the peer's data has come in order, as far as has been seen.
    reached: Option<u32>,
}

/// An ending of the peer's that its program's TCP has not been seen to take: the number of a RST, and that after a FIN.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unjudged {
    pub reset: Option<u32>,
    pub end: Option<u32>,
}

impl Unjudged {
    /// What a segment of the peer's brings.
    pub fn of(segment: &Segment) -> Option<Self> {
        let reset = (segment.flags & RST != 0).then_some(segment.sequence);
        let end = end_of(segment).filter(|_| reset.is_none());
        (reset.is_some() || end.is_some()).then_some(Self { reset, end })
    }

    /// Which of FIN and RST the program's TCP takes (RFC 5961): a RST at the very number that it expects, a FIN that it
    /// has acknowledged. `seen`: what the agent's table and the kernel have seen of the connection.
    pub fn taken(&self, seen: [&Ending; 2]) -> u8 {
        let acknowledged = seen.map(|ending| ending.acknowledged.0);
        let expected = acknowledged.into_iter().chain(seen.map(|ending| ending.reached));
        let is_reset = self.reset.is_some() && expected.into_iter().any(|next| next == self.reset);
        let is_end = self.end.is_some() && acknowledged.contains(&self.end);
        (if is_reset { RST } else { 0 }) | (if is_end { FIN } else { 0 })
    }
}

impl Ending {
    /// Takes note of what a packet says of it.
    pub fn note(&mut self, direction: Direction, segment: &Segment) {
        let (end, acknowledged) = match direction {
            Direction::Egress => (&mut self.ends.0, &mut self.acknowledged.0),
            Direction::Ingress => (&mut self.ends.1, &mut self.acknowledged.1),
        };
        *end = end_of(segment).or(*end);
        if segment.flags & (ACK | RST) != ACK {
            return;
        }
        // A segment of one path may overtake a segment of another.
        let is_overtaken = |last: u32| last.wrapping_sub(segment.acknowledgement).cast_signed() > 0;
        *acknowledged = acknowledged.filter(|last| is_overtaken(*last)).or(Some(segment.acknowledgement));
        if direction == Direction::Ingress {
            self.reach(segment);
        }
    }

    /// The first segment that is known of counts, and each that brings what the program's TCP expects.
    fn reach(&mut self, segment: &Segment) {
        let end = segment.sequence.wrapping_add(segment.data.len() as u32);
        let is_after = |one: u32, other: u32| one.wrapping_sub(other).cast_signed() > 0;
        let is_next = |next: &u32| !is_after(segment.sequence, *next) && is_after(end, *next);
        let expected = [self.acknowledged.0, self.reached];
        if expected == [None; 2] || expected.iter().flatten().any(is_next) {
            self.reached = Some(end);
        }
    }

    /// The numbers of a listener's answer, which no cache has carried.
    pub fn note_begun(&mut self, next: u32, expected: u32) {
        self.reached = Some(expected);
        self.acknowledged.1 = self.acknowledged.1.or(Some(next));
    }

    /// What has passed by two caches, the second of which has seen the later acknowledgement of an end that it knows.
    pub fn with(self, other: Self) -> Self {
        let ends = (self.ends.0.or(other.ends.0), self.ends.1.or(other.ends.1));
        let last = |end: Option<u32>, a: Option<u32>, b: Option<u32>| if a == end { a } else { b };
        let acknowledged = (
            last(ends.1, self.acknowledged.0, other.acknowledged.0),
            last(ends.0, self.acknowledged.1, other.acknowledged.1),
        );
        Self { ends, acknowledged, reached: self.reached.or(other.reached) }
    }

    /// What has passed after what had passed before, elsewhere.
    pub fn after(self, before: Self) -> Self {
        let ends = (self.ends.0.or(before.ends.0), self.ends.1.or(before.ends.1));
        let later = |now: Option<u32>, before: Option<u32>| match (now, before) {
            (Some(now), Some(before)) if before.wrapping_sub(now).cast_signed() > 0 => Some(before),
            _ => now.or(before),
        };
        let acknowledged =
            (later(self.acknowledged.0, before.acknowledged.0), later(self.acknowledged.1, before.acknowledged.1));
        Self { ends, acknowledged, reached: later(self.reached, before.reached) }
    }

    /// Each has acknowledged all of the other's.
    pub fn is_over(self) -> bool {
        let has_closed = self.ends.0.is_some() && self.ends.1.is_some();
        has_closed && self.ends == (self.acknowledged.1, self.acknowledged.0)
    }
}

impl Direct {
    /// Takes note of what a packet says of the flow's end.
    fn note_end(&mut self, direction: Direction, segment: &Segment) {
        self.ending.note(direction, segment);
        let at = if direction == Direction::Egress { 0 } else { 1 };
        self.closed[at] |= segment.flags & (FIN | RST);
        self.is_over |= self.ending.is_over();
    }
}

/// What the agent hears of a flow: the application's five-tuple, if the kernel has opened it, and what has passed of
/// its end.
pub(crate) struct Told {
    pub flow: FlowId,
    pub app: Option<Tuple>,
    pub closed: [(Direction, u8); 2],
}

/// The number after a segment's FIN.
fn end_of(segment: &Segment) -> Option<u32> {
    (segment.flags & FIN != 0).then(|| segment.sequence.wrapping_add(segment.data.len() as u32 + 1))
}

/// What the agent wants of a flow.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub app: Tuple,
    pub wire: Wire,
    pub between: (IpAddr, IpAddr),
    pub is_held: bool,
    pub delta: Option<Delta>,
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
    /// Direct packets of peers that it left to the agent.
    pub left: u64,
    /// Times that it found a flow stalled.
    pub stalls: u64,
    /// Packets that it gave to a program's TCP which had only the SYN of a connection that agents have set up.
    pub requests_met: u64,
    /// Flows whose datagrams want an answer.
    one_way: Vec<FlowId>,
    /// What the agent is to hear.
    told: Vec<Told>,
    /// What it may open by itself.
    pub(crate) grants: Grants,
    /// The numbers of programs' SYNs of which nothing else has passed.
    asked: HashMap<Tuple, u32>,
    /// Resets by paths of which nothing has come: the word of a host on the way.
    pub resets: u64,
    /// SYNs that were for a flow of a grant, or for one that is open, and did not show that their sender holds it.
    pub unproved: u64,
    /// Flows that it took by grants for programs here, and those that it opened for peers.
    pub set_up: (u64, u64),
}

impl Default for Kernel {
    fn default() -> Self {
        Self {
            flows: HashMap::new(),
            by_app: HashMap::new(),
            paths: HashMap::new(),
            mtu: 1500,
            sent: 0,
            left: 0,
            stalls: 0,
            requests_met: 0,
            one_way: Vec::new(),
            told: Vec::new(),
            grants: Grants::default(),
            resets: 0,
            unproved: 0,
            asked: HashMap::new(),
            set_up: (0, 0),
        }
    }
}

impl Kernel {
    /// Takes the entry that the agent wants; what goes direct neither way is no entry. Gives what it has seen of a
    /// connection's end whose entry goes.
    pub(crate) fn follow(&mut self, now: Instant, flow: FlowId, wanted: Option<Wanted>) -> Option<Ending> {
        if self.grants.know(flow) {
            self.tell_of(flow, false);
        }
        let before = self.ending(flow);
        self.set(now, flow, wanted);
        before.filter(|_| !self.flows.contains_key(&flow))
    }

    fn set(&mut self, now: Instant, flow: FlowId, wanted: Option<Wanted>) {
        match wanted.filter(|wanted| wanted.wire.sending || wanted.wire.accepting) {
            // A five-tuple that leads to another flow, which goes on, is that one's.
            Some(Wanted { app, .. }) if self.is_anothers(&app, flow) => {}
            Some(Wanted { app, wire, between, is_held, delta }) => {
                self.by_app.insert(app, flow);
                let fresh = Direct {
                    app,
                    wire,
                    between,
                    former: None,
                    is_held,
                    unanswered_since: None,
                    rtt: Duration::ZERO,
                    is_stalled: false,
                    last_out: None,
                    last_in: None,
                    asked: None,
                    ending: Ending::default(),
                    is_over: false,
                    closed: [0; 2],
                    delta,
                };
                let entry = self.flows.entry(flow).or_insert(fresh);
                if entry.app != app && self.by_app.get(&entry.app) == Some(&flow) {
                    self.by_app.remove(&entry.app);
                }
                if entry.between != between {
                    entry.former = Some((entry.between, now + LINGER));
                }
                (entry.app, entry.wire, entry.between) = (app, wire, between);
                entry.is_held = is_held;
                entry.delta = delta;
                (entry.unanswered_since, entry.is_stalled) = (None, false);
            }
            None => {
                // The five-tuple may be another flow's by now.
                if let Some(entry) = self.flows.remove(&flow)
                    && self.by_app.get(&entry.app) == Some(&flow)
                {
                    self.by_app.remove(&entry.app);
                }
            }
        }
    }

    fn is_anothers(&self, app: &Tuple, flow: FlowId) -> bool {
        let other = self.by_app.get(app).filter(|other| **other != flow).and_then(|other| self.flows.get(other));
        other.is_some_and(|other| other.wire.sending)
    }

    /// A path record is gone: what names it goes by the agent, and nothing is opened by grants that do.
    pub(crate) fn lose_path(&mut self, now: Instant, path: PathId) {
        self.grants.lose_path(path);
        let lost: Vec<FlowId> =
            self.flows.iter().filter(|(_, entry)| entry.wire.path == path).map(|(flow, _)| *flow).collect();
        for flow in lost {
            self.follow(now, flow, None);
        }
    }

    /// Forgets every flow.
    pub(crate) fn clear(&mut self) {
        self.flows.clear();
        self.by_app.clear();
        self.grants.clear();
        self.told.clear();
    }

    /// Whether the flow has stalled; `None` when it is not here.
    pub(crate) fn is_stalled(&self, flow: FlowId) -> Option<bool> {
        self.flows.get(&flow).map(|entry| entry.is_stalled)
    }

    /// The application's packet as it goes on the wire; `None` when the agent is to have it, which is told of its flow
    /// before.
    pub(crate) fn egress(&mut self, now: Instant, segment: &Segment) -> Option<(FlowId, Vec<u8>)> {
        let sent = self.send(now, segment);
        if sent.is_none()
            && let Some(flow) = self.by_app.get(&segment.tuple).copied()
            && self.grants.is_untold(flow)
        {
            self.tell(flow);
        }
        sent
    }

    /// How a connection ends, as far as it has passed here.
    pub(crate) fn ending(&self, flow: FlowId) -> Option<Ending> {
        self.flows.get(&flow).map(|entry| entry.ending)
    }

    /// The agent hears of a flow, if somebody has answered it.
    pub(crate) fn tell(&mut self, flow: FlowId) {
        if self.flows.contains_key(&flow) && !self.grants.is_fresh(flow) {
            self.grants.know(flow);
            self.tell_of(flow, true);
        }
    }

    fn tell_of(&mut self, flow: FlowId, is_opened: bool) {
        let Some(entry) = self.flows.get(&flow) else { return };
        let [out, back] = entry.closed;
        let closed = [(Direction::Egress, out), (Direction::Ingress, back)];
        self.told.push(Told { flow, app: is_opened.then_some(entry.app), closed });
    }

    /// Whether a flow has been answered, and whether it is over without anybody knowing of it.
    pub(crate) fn survey(&self, flow: FlowId) -> (bool, bool) {
        let Some(entry) = self.flows.get(&flow).filter(|_| !self.grants.is_fresh(flow)) else { return (false, false) };
        (true, entry.is_over && self.grants.is_untold(flow))
    }

    /// What the agent hears, and how many flows of which grants are opened.
    pub(crate) fn take_news(&mut self) -> (Vec<Told>, Vec<(FlowId, u16)>) {
        (std::mem::take(&mut self.told), std::mem::take(&mut self.grants.news))
    }

    fn send(&mut self, now: Instant, segment: &Segment) -> Option<(FlowId, Vec<u8>)> {
        let mut segment = segment.clone();
        if segment.flags & (SYN | ACK) != SYN {
            self.asked.remove(&segment.tuple);
        } else {
            segment.proof = Some(self.take(now, &segment)?);
        }
        let segment = &segment;
        let flow = *self.by_app.get(&segment.tuple)?;
        if segment.flags & SYN != 0 && !self.grants.is_fresh(flow) {
            return None;
        }
        let entry = self.flows.get_mut(&flow)?;
        if !entry.wire.sending || entry.is_stalled || entry.is_held {
            return None;
        }
        let is_datagram = segment.tuple.protocol == UDP;
        let tuple = wire_tuple(segment.tuple.protocol, entry.between.0, entry.between.1, &entry.wire);
        let on_wire = entry.delta.map_or(segment.clone(), |delta| segment.clone().on_wire(&delta));
        let packet = on_wire.readdressed(tuple).emit();
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
        entry.note_end(Direction::Egress, segment);
        entry.last_out = Some(now);
        self.sent += 1;
        Some((flow, packet))
    }

    /// A packet of the wire: its flow, and the five-tuple that the application's packets have. `None` when it goes up.
    /// `is_request`: whether the program's TCP has only the SYN of a connection.
    pub(crate) fn ingress(
        &mut self,
        now: Instant,
        segment: &Segment,
        is_request: impl Fn(&Tuple) -> bool,
    ) -> Option<(FlowId, Tuple)> {
        let (source, destination) = (segment.tuple.source, segment.tuple.destination);
        let between = (destination.ip(), source.ip());
        let is_bare = segment.tuple.protocol == UDP && segment.data.is_empty();
        let is_on = |entry: &Direct| {
            (entry.wire.takes() || is_bare)
                && entry.app.protocol == segment.tuple.protocol
                && (entry.between == between || entry.former.is_some_and(|(at, until)| at == between && now < until))
                && (entry.wire.remote_port, entry.wire.local_port) == (source.port(), destination.port())
        };
        if segment.flags & (SYN | ACK) == SYN {
            let is_open = self.flows.values().any(is_on);
            match if is_open { Answer::Unproved } else { self.grants.open(now, segment) } {
                Answer::Nothing => {}
                Answer::Unproved => {
                    self.unproved += 1;
                    return None;
                }
                Answer::Opens(opening) if self.by_app.contains_key(&opening.app) => {}
                Answer::Opens(opening) => {
                    self.set_up.1 += 1;
                    self.open(now, opening);
                }
            }
        }
        let (flow, entry) = self.flows.iter_mut().find(|(_, entry)| is_on(entry))?;
        if segment.flags & RST != 0 && entry.is_held {
            self.resets += 1;
            return None;
        }
        if !self.grants.is_fresh(*flow) && is_request(&entry.app) {
            self.requests_met += 1;
        }
        self.grants.note(*flow, segment.flags);
        let local = entry.delta.map_or(segment.clone(), |delta| segment.clone().local(&delta));
        // Whoever it is from, the program's TCP takes it for nothing.
        let is_taken = |unjudged: Unjudged| unjudged.taken([&entry.ending; 2]) != 0;
        let is_reset = segment.flags & RST != 0 && !self.grants.is_fresh(*flow);
        if is_reset && !Unjudged::of(&local).is_some_and(is_taken) {
            return Some((*flow, entry.app.reversed()));
        }
        entry.note_end(Direction::Ingress, &local);
        if segment.tuple.protocol == UDP {
            entry.unanswered_since = None;
            if is_bare {
                return None;
            }
            let is_long_ago = |at: Option<Instant>| at.is_none_or(|at| now.since(at) > DATAGRAM_ANSWER);
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

    /// A program's SYN: what it bears where it opens a flow by a grant. One that comes again has had no answer: the
    /// agent is to set it up, and what still comes of the first one is nobody's.
    fn take(&mut self, now: Instant, segment: &Segment) -> Option<u64> {
        let is_sent_again = self.asked.insert(segment.tuple, segment.sequence) == Some(segment.sequence);
        if let Some(flow) = self.by_app.get(&segment.tuple)
            && self.flows.get(flow).is_none_or(|entry| entry.ending.ends.0.is_none() || entry.ending.ends.1.is_none())
        {
            if let Some(entry) = self.flows.get_mut(flow).filter(|_| self.grants.is_fresh(*flow)) {
                (entry.wire.sending, entry.wire.accepting) = (false, false);
            }
            return None;
        }
        self.by_app.remove(&segment.tuple);
        // The agent has it.
        if is_sent_again {
            return None;
        }
        let opening = self.grants.take(now, segment)?;
        let Wire { local_port, remote_port, .. } = opening.wire;
        let proof = granted::proof(&opening.key, local_port, remote_port, segment.sequence);
        self.set_up.0 += 1;
        self.open(now, opening);
        Some(proof)
    }

    fn open(&mut self, now: Instant, opening: Opening) {
        let Opening { flow, app, wire, between, .. } = opening;
        self.set(now, flow, Some(Wanted { app, wire, between, is_held: false, delta: None }));
    }

    /// A grant is over: what nobody has answered goes, and what the agent does not know.
    pub(crate) fn reap(&mut self, first: FlowId, count: u16, is_known: impl Fn(FlowId) -> bool) {
        let fresh = self.grants.take_fresh(first, count);
        let of_grant = (first.0..first.0 + u32::from(count)).map(FlowId);
        for flow in of_grant.filter(|flow| fresh.contains(flow) || !is_known(*flow)) {
            if let Some(entry) = self.flows.remove(&flow)
                && self.by_app.get(&entry.app) == Some(&flow)
            {
                self.by_app.remove(&entry.app);
            }
        }
    }

    /// What it carries: the application's five-tuple, and how the packets look between the hosts. Without flows that
    /// nobody has answered yet.
    pub fn entries(&self) -> Vec<(FlowId, Tuple, Wire)> {
        let answered = self.flows.iter().filter(|(flow, _)| !self.grants.is_fresh(**flow));
        answered.map(|(flow, entry)| (*flow, entry.app, entry.wire)).collect()
    }

    /// Nothing is opened any more.
    pub fn forget_grants(&mut self) {
        self.grants.stop_all();
    }

    /// Flows whose datagrams want an answer, since none goes back.
    pub(crate) fn take_one_way(&mut self) -> Vec<FlowId> {
        std::mem::take(&mut self.one_way)
    }
}
