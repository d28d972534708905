//! Programs that talk for longer: one TCP connection, bytes both ways, and what a kernel's TCP does about loss and
//! reordering.

use std::collections::BTreeMap;
use std::time::Duration;

use margay_core::{Instant, Tuple};

use crate::program::{ACK, FIN, RST, SYN, Segment};

/// Bytes per segment.
pub const MSS: usize = 1000;
/// Segments in flight.
const WINDOW: u64 = 32;
/// Linux: first SYN time-out, least variance part of the others, longest.
const SYN_RTO: Duration = Duration::from_secs(1);
const RTO_MIN: Duration = Duration::from_millis(200);
const RTO_MAX: Duration = Duration::from_secs(120);
/// Answers to segments out of the window are so far apart at least (`net.ipv4.tcp_invalid_ratelimit`).
const DUPLICATE_EVERY: Duration = Duration::from_millis(500);
const TIME_WAIT: Duration = Duration::from_secs(60);

/// What a program writes.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Bytes per write.
    pub write: usize,
    /// Between writes.
    pub every: Duration,
    /// So many writes.
    pub writes: u32,
    /// After the last write it closes; else it closes when the peer has.
    pub closes: bool,
}

impl Plan {
    /// Says nothing, closes when the peer does.
    pub const LISTEN: Self = Self { write: 0, every: Duration::from_secs(1), writes: 0, closes: false };
}

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has sent its SYN.
    Opening,
    /// It has answered a SYN.
    Answered,
    /// Data may pass.
    Open,
    /// Closed in order; late packets are acknowledged.
    TimeWait,
    /// No socket any more: whatever comes is answered with a RST.
    Gone,
}

/// One end of a connection.
#[derive(Clone)]
pub struct Stream {
    tuple: Tuple,
    plan: Plan,
    /// Where it is in its life.
    pub state: State,
    /// Segments that came when there was no socket any more, each answered with a RST.
    pub refused: u32,
    /// A RST or an ICMP error ended it.
    pub was_reset: bool,
    /// A byte that came was not the one that was sent.
    pub was_wrong: bool,
    /// Segments that came before their turn.
    pub out_of_order: u64,
    /// Bytes read by the program.
    pub received: u64,
    /// Segments sent again.
    pub retransmissions: u64,
    next_write: Instant,
    writes_left: u32,
    written: u64,
    own_base: u32,
    peer_base: u32,
    unacknowledged: u64,
    next: u64,
    window: u64,
    recover: u64,
    duplicates: u32,
    timer: Option<Instant>,
    backoff: u32,
    timed: Option<(u64, Instant)>,
    round_trip: Option<(Duration, Duration)>,
    waiting_since: Option<Instant>,
    longest_wait: Duration,
    early: BTreeMap<u64, Vec<u8>>,
    peer_fin: Option<u64>,
    has_peer_closed: bool,
    /// Its FIN went before the peer's had come: it waits at the end (RFC 9293 §3.6).
    has_closed_first: bool,
    next_duplicate: Instant,
    ends: Option<Instant>,
    /// Whose bytes it says and takes, where those are not known by the numbers of its SYNs.
    contents: Option<(u32, u32)>,
    /// It belongs to a program that relays: whether it may say its FIN.
    relayed: Option<bool>,
    /// Its kernel says nothing by itself: the connection is on its way from one host to another.
    is_frozen: bool,
}

/// What stands at a place of a stream: its sender is known by its first sequence number.
fn byte(base: u32, at: u64) -> u8 {
    ((at ^ u64::from(base)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

impl Stream {
    fn new(tuple: Tuple, plan: Plan, state: State, now: Instant) -> Self {
        let port = u32::from(tuple.source.port()) << 16 | u32::from(tuple.destination.port());
        Self {
            tuple,
            plan,
            state,
            refused: 0,
            was_reset: false,
            was_wrong: false,
            out_of_order: 0,
            received: 0,
            retransmissions: 0,
            next_write: now + plan.every,
            writes_left: plan.writes,
            written: 0,
            own_base: port.wrapping_mul(2_654_435_761),
            peer_base: 0,
            unacknowledged: 0,
            next: 0,
            window: 10,
            recover: 0,
            duplicates: 0,
            timer: None,
            backoff: 0,
            timed: None,
            round_trip: None,
            waiting_since: None,
            longest_wait: Duration::ZERO,
            early: BTreeMap::new(),
            peer_fin: None,
            has_peer_closed: false,
            has_closed_first: false,
            next_duplicate: now,
            ends: None,
            contents: None,
            relayed: None,
            is_frozen: false,
        }
    }

    /// Connects.
    pub(crate) fn connect(tuple: Tuple, plan: Plan, now: Instant) -> Self {
        Self { timer: Some(now), ..Self::new(tuple, plan, State::Opening, now) }
    }

    /// Takes a connection whose SYN came.
    pub(crate) fn accept(syn: &Segment, plan: Plan, now: Instant) -> Self {
        let mut stream = Self::new(syn.tuple.reversed(), plan, State::Answered, now);
        stream.peer_base = syn.sequence.wrapping_add(1);
        (stream.timed, stream.timer) = (Some((0, now)), Some(now + SYN_RTO));
        stream
    }

    /// Freezes the connection, and gives what another host needs to go on with it.
    pub(crate) fn freeze(&mut self) -> Self {
        self.is_frozen = true;
        self.clone()
    }

    /// The same connection under another five-tuple, frozen still.
    pub(crate) fn restored(self, tuple: Tuple) -> Self {
        Self { tuple, ..self }
    }

    /// Bytes both ways are the same whatever numbers the connection has: a program may relay them.
    pub(crate) fn say_plainly(&mut self, is_initiator: bool) {
        self.contents = Some(if is_initiator { (11, 23) } else { (23, 11) });
    }

    /// A program that relays has it.
    pub(crate) fn relay(&mut self) {
        self.relayed = Some(false);
    }

    /// As much is relayed to it as has come by another one.
    pub(crate) fn relay_from(&mut self, received: u64, has_closed: bool) {
        self.written = self.written.max(received);
        self.relayed = Some(has_closed && self.written == received);
    }

    /// The peer has said its FIN, and all before it has come.
    pub(crate) const fn has_peer_closed(&self) -> bool {
        self.has_peer_closed
    }

    /// The number of a byte of the peer's, and of one of its own.
    pub(crate) const fn numbers_of(&self, received: u64, written: u64) -> (u32, u32) {
        (self.peer_base.wrapping_add(received as u32), self.own_base.wrapping_add(written as u32))
    }

    /// The program is gone: its kernel resets the connection.
    pub(crate) fn abort(&mut self) -> Option<Segment> {
        let is_open = matches!(self.state, State::Open | State::Answered);
        let reset = self.segment(RST, None);
        self.end(false);
        is_open.then_some(reset)
    }

    /// The connection is not frozen any more; what it says first is how far it is.
    pub(crate) fn go_on(&mut self, now: Instant) -> Vec<Segment> {
        self.is_frozen = false;
        self.restart(now)
    }

    /// No socket any more, and nobody is told.
    pub(crate) fn close_silently(&mut self) {
        self.end(false);
    }

    /// Whether a program has it: it is open, and not on its way to another host.
    pub fn is_live(&self) -> bool {
        self.state == State::Open && !self.is_frozen
    }

    pub(crate) const fn is_frozen(&self) -> bool {
        self.is_frozen
    }

    pub(crate) fn tuple(&self) -> &Tuple {
        &self.tuple
    }

    /// Bytes that the program has written and the peer has acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.unacknowledged.min(self.written)
    }

    /// Bytes that the program has written.
    pub const fn written(&self) -> u64 {
        self.written
    }

    /// Everything that was to be written is, and the peer has it.
    pub fn is_done(&self) -> bool {
        self.writes_left == 0 && self.acknowledged() == self.written
    }

    /// The longest time for which sent bytes waited without any being acknowledged.
    pub fn longest_wait(&self, now: Instant) -> Duration {
        let current = self.waiting_since.filter(|_| !self.was_reset).map_or(Duration::ZERO, |since| now.since(since));
        self.longest_wait.max(current)
    }

    /// Forgets earlier waits.
    pub fn forget_waits(&mut self, now: Instant) {
        self.longest_wait = Duration::ZERO;
        self.waiting_since = self.waiting_since.map(|_| now);
    }

    /// Writes `bytes` more, now or when the connection is open.
    pub fn write(&mut self, bytes: u64) {
        self.written += bytes;
    }

    /// Writes by another plan from now on.
    pub fn follow(&mut self, now: Instant, plan: Plan) {
        (self.plan, self.writes_left, self.next_write) = (plan, plan.writes, now + plan.every);
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        if self.is_frozen {
            return None;
        }
        let is_open = matches!(self.state, State::Open | State::Opening | State::Answered);
        let write = (self.state == State::Open && self.writes_left > 0).then_some(self.next_write);
        self.timer.filter(|_| is_open).into_iter().chain(write).chain(self.ends).min()
    }

    pub(crate) fn poll(&mut self, now: Instant) -> Vec<Segment> {
        if self.ends.is_some_and(|ends| ends <= now) {
            (self.state, self.ends) = (State::Gone, None);
        }
        if self.state == State::Open && self.writes_left > 0 && self.next_write <= now {
            self.writes_left -= 1;
            self.next_write = now + self.plan.every;
            self.written += self.plan.write as u64;
        }
        let mut out = Vec::new();
        if self.timer.is_some_and(|timer| timer <= now) {
            self.time_out(now, &mut out);
        }
        self.send_new(now, &mut out);
        out
    }

    fn time_out(&mut self, now: Instant, out: &mut Vec<Segment>) {
        match self.state {
            State::Opening => {
                self.timed = (self.backoff == 0).then_some((0, now));
                out.push(self.segment(SYN, None));
            }
            State::Answered if self.backoff > 5 => self.end(false),
            State::Answered => {
                self.timed = None;
                out.push(self.segment(SYN | ACK, None));
            }
            State::Open => {
                // Everything again from the first unacknowledged, slowly.
                self.recover = self.recover.max(self.next);
                (self.next, self.window) = (self.unacknowledged, 1);
                (self.timed, self.duplicates) = (None, 0);
                self.retransmissions += 1;
            }
            State::TimeWait | State::Gone => {}
        }
        self.timer = (self.state != State::Gone).then(|| now + self.time_out_after());
        self.backoff += 1;
    }

    /// The agent has it send again what was lost in flight, and say once more what it has.
    pub(crate) fn restart(&mut self, now: Instant) -> Vec<Segment> {
        if self.state != State::Open || self.is_frozen {
            return Vec::new();
        }
        let mut out = vec![self.segment(ACK, None)];
        if self.next > self.unacknowledged {
            self.recover = self.recover.max(self.next);
            self.next = self.unacknowledged;
            (self.timed, self.duplicates, self.backoff) = (None, 0, 0);
            self.timer = Some(now + self.time_out_after());
            self.send_new(now, &mut out);
        }
        out
    }

    fn time_out_after(&self) -> Duration {
        let base = self.round_trip.map_or(SYN_RTO, |(mean, variance)| mean + (4 * variance).max(RTO_MIN));
        base.saturating_mul(1 << self.backoff.min(10)).min(RTO_MAX)
    }

    /// Whether its FIN may go once everything written has.
    fn is_closing(&self) -> bool {
        self.relayed.unwrap_or(self.writes_left == 0 && (self.plan.closes || self.has_peer_closed))
    }

    fn send_new(&mut self, now: Instant, out: &mut Vec<Segment>) {
        if self.state != State::Open || self.is_frozen {
            return;
        }
        let limit = self.unacknowledged + self.window * MSS as u64;
        while self.next < self.written.min(limit) {
            let (from, to) = (self.next, self.written.min(self.next + MSS as u64).min(limit));
            out.push(self.segment(ACK, Some((from, to))));
            self.next = to;
            if from >= self.recover {
                self.timed.get_or_insert((to, now));
            }
        }
        if self.is_closing() && self.next == self.written {
            self.has_closed_first |= !self.has_peer_closed;
            out.push(self.segment(ACK | FIN, Some((self.next, self.next))));
            self.next += 1;
        }
        if self.next > self.unacknowledged {
            self.waiting_since.get_or_insert(now);
            if self.timer.is_none() {
                self.timer = Some(now + self.time_out_after());
            }
        }
    }

    fn segment(&self, flags: u8, data: Option<(u64, u64)>) -> Segment {
        // What was sent and is to be sent again has been sent.
        let (from, to) = data.unwrap_or((self.next.max(self.recover), self.next.max(self.recover)));
        let sequence = self.own_base.wrapping_add(from as u32).wrapping_sub(u32::from(flags & SYN != 0));
        let fin = u64::from(self.has_peer_closed);
        Segment {
            tuple: self.tuple,
            sequence,
            acknowledgement: self.peer_base.wrapping_add((self.received + fin) as u32),
            flags,
            data: (from..to).map(|at| byte(self.contents.map_or(self.own_base, |contents| contents.0), at)).collect(),
            proof: None,
            tag: None,
        }
    }

    fn end(&mut self, was_reset: bool) {
        self.was_reset |= was_reset;
        (self.state, self.timer, self.ends) = (State::Gone, None, None);
    }

    /// An ICMP error came for it: before it is open that ends it.
    pub(crate) fn unreachable(&mut self) {
        if self.state == State::Opening {
            self.end(true);
        }
    }

    pub(crate) fn handle(&mut self, now: Instant, segment: &Segment) -> Vec<Segment> {
        let has_syn = segment.flags & SYN != 0;
        if segment.flags & RST != 0 {
            self.end(!matches!(self.state, State::TimeWait | State::Gone));
            return Vec::new();
        }
        match self.state {
            State::Opening if has_syn => {
                self.peer_base = segment.sequence.wrapping_add(1);
                self.open(now);
                let mut out = vec![self.segment(ACK, None)];
                self.send_new(now, &mut out);
                out
            }
            State::Opening => Vec::new(),
            State::Answered if has_syn => vec![self.segment(SYN | ACK, None)],
            State::Answered => {
                self.open(now);
                self.take(now, segment)
            }
            State::Open if has_syn => vec![self.segment(ACK, None)],
            State::Open => self.take(now, segment),
            // Whose acknowledgement was lost says again its FIN, or the data before it (RFC 9293 §3.10.7.4).
            State::TimeWait if segment.flags & FIN != 0 || !segment.data.is_empty() => vec![self.segment(ACK, None)],
            State::TimeWait => Vec::new(),
            State::Gone => {
                self.refused += 1;
                vec![Segment { sequence: segment.acknowledgement, ..self.segment(RST, None) }]
            }
        }
    }

    fn open(&mut self, now: Instant) {
        (self.state, self.timer, self.backoff, self.next_write) = (State::Open, None, 0, now + self.plan.every);
        if let Some((_, since)) = self.timed.take() {
            self.sample(now.since(since));
        }
    }

    fn take(&mut self, now: Instant, segment: &Segment) -> Vec<Segment> {
        let mut out = Vec::new();
        self.take_acknowledgement(now, segment, &mut out);
        let has_fin = segment.flags & FIN != 0;
        let offset = i64::from(segment.sequence.wrapping_sub(self.peer_base).wrapping_sub(self.received as u32) as i32);
        let at = self.received.checked_add_signed(offset);
        if !segment.data.is_empty() || has_fin {
            if let Some(at) = at {
                self.take_data(at, segment, has_fin);
            }
            out.push(self.segment(ACK, None));
        } else if !(0..65_536).contains(&offset) && now >= self.next_duplicate {
            // Out of the window, as a late pinhole is.
            self.next_duplicate = now + DUPLICATE_EVERY;
            out.push(self.segment(ACK, None));
        }
        self.send_new(now, &mut out);
        self.close_if_over(now);
        out
    }

    fn take_acknowledgement(&mut self, now: Instant, segment: &Segment, out: &mut Vec<Segment>) {
        let relative = segment.acknowledgement.wrapping_sub(self.own_base).wrapping_sub(self.unacknowledged as u32);
        let advance = i64::from(relative as i32);
        let in_flight = self.next.max(self.recover) - self.unacknowledged;
        if advance > 0 && advance as u64 <= in_flight {
            let before = self.unacknowledged;
            self.unacknowledged += advance as u64;
            self.next = self.next.max(self.unacknowledged);
            self.window = (self.window + (self.unacknowledged - before).div_ceil(MSS as u64)).min(WINDOW);
            (self.duplicates, self.backoff) = (0, 0);
            if let Some((_, since)) = self.timed.take_if(|(at, _)| *at <= self.unacknowledged) {
                self.sample(now.since(since));
            }
            self.longest_wait = self.longest_wait(now);
            let is_waiting = self.next > self.unacknowledged;
            self.waiting_since = is_waiting.then_some(now);
            self.timer = is_waiting.then(|| now + self.time_out_after());
        } else if advance == 0 && segment.data.is_empty() && self.next > self.unacknowledged {
            self.duplicates += 1;
            if self.duplicates == 3 && self.unacknowledged >= self.recover {
                self.recover = self.next;
                self.timed = None;
                self.retransmissions += 1;
                let to = self.written.min(self.unacknowledged + MSS as u64);
                let is_fin = self.unacknowledged == self.written;
                let flags = if is_fin { ACK | FIN } else { ACK };
                out.push(self.segment(flags, Some((self.unacknowledged, to.max(self.unacknowledged)))));
            }
        }
    }

    fn sample(&mut self, took: Duration) {
        self.round_trip = Some(match self.round_trip {
            None => (took, took / 2),
            Some((mean, variance)) => ((7 * mean + took) / 8, (3 * variance + mean.abs_diff(took)) / 4),
        });
    }

    fn take_data(&mut self, at: u64, segment: &Segment, has_fin: bool) {
        let end = at + segment.data.len() as u64;
        if has_fin {
            self.peer_fin = Some(end);
        }
        if at > self.received {
            self.out_of_order += 1;
            self.early.insert(at, segment.data.clone());
            return;
        }
        self.read(at, &segment.data);
        while let Some((at, data)) = self.early.pop_first() {
            if at > self.received {
                self.early.insert(at, data);
                break;
            }
            self.read(at, &data);
        }
        self.has_peer_closed |= self.peer_fin == Some(self.received);
    }

    fn read(&mut self, at: u64, data: &[u8]) {
        let skip = (self.received - at) as usize;
        for &found in data.get(skip..).unwrap_or_default() {
            self.was_wrong |= found != byte(self.contents.map_or(self.peer_base, |contents| contents.1), self.received);
            self.received += 1;
        }
    }

    fn close_if_over(&mut self, now: Instant) {
        let is_fin_acknowledged = self.is_closing() && self.unacknowledged == self.written + 1;
        if !(is_fin_acknowledged && self.has_peer_closed) || self.state != State::Open {
            return;
        }
        self.timer = None;
        if self.plan.closes || self.has_closed_first {
            (self.state, self.ends) = (State::TimeWait, Some(now + TIME_WAIT));
        } else {
            self.state = State::Gone;
        }
    }
}
