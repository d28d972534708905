//! Boxes: what the kernel of a host does with packets that come in by `sal0` and are for nobody here.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::chain::AddRefused;
use margay_core::name::ServiceId;
use margay_core::{Instant, Tuple};

use crate::program::{ACK, RST, SYN, Segment};

/// What a box does with the first packet of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// It lets it pass, as every other.
    Passes,
    /// It drops it; of datagrams every one.
    Eats,
    /// It resets it.
    Refuses,
    /// It answers it, as if it were the service.
    Answers,
    /// It lets it pass twice.
    Doubles,
    /// It gives its client another address and port, and the service another port, as one that translates addresses
    /// does, and takes them back from what answers.
    Translates,
    /// The same, and it lets first packets out two at a time.
    TranslatesInPairs,
}

/// A box of a simulated host.
#[derive(Debug)]
pub struct Middlebox {
    /// What it does with first packets.
    pub habit: Habit,
    /// Five-tuples of first packets that it was given.
    pub seen: BTreeSet<Tuple>,
    /// Packets that have passed.
    pub passed: u64,
    /// Bytes of programs that have passed.
    pub bytes: u64,
    /// SYNs with a tag that it was given.
    pub tagged: u64,
    /// Segments whose numbers are all 0, with neither data nor a flag but ACK: no end sends such.
    pub probes: u64,
    /// It lets packets out so much later, in the order in which they came.
    pub lag: Duration,
    late: VecDeque<(Instant, Segment)>,
    /// Boxes through which it wants each session to go next, in order: it asks before it lets the first packet out.
    pub next: Vec<ServiceId>,
    /// What it was told each time.
    pub told: Vec<Result<(), AddRefused>>,
    /// What it has given clients, by what comes in.
    translated: BTreeMap<Tuple, Tuple>,
    /// A first packet that waits for another one.
    kept: Option<Segment>,
}

impl Middlebox {
    pub(crate) const fn new(habit: Habit) -> Self {
        Self {
            habit,
            seen: BTreeSet::new(),
            passed: 0,
            bytes: 0,
            tagged: 0,
            probes: 0,
            lag: Duration::ZERO,
            late: VecDeque::new(),
            next: Vec::new(),
            told: Vec::new(),
            translated: BTreeMap::new(),
            kept: None,
        }
    }

    /// Whether a packet begins a session, as far as the box can tell.
    pub(crate) fn is_first(&self, segment: &Segment) -> bool {
        if segment.tuple.protocol == crate::program::UDP {
            !self.seen.contains(&segment.tuple.reversed()) && !self.seen.contains(&segment.tuple)
        } else {
            segment.flags & (SYN | ACK) == SYN
        }
    }

    /// A packet comes in. Gives what comes out of it now.
    pub(crate) fn take(&mut self, now: Instant, segment: &Segment) -> Vec<Segment> {
        let out = self.handle(segment);
        self.late.extend(out.into_iter().map(|segment| (now + self.lag, segment)));
        self.take_late(now)
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.late.front().map(|(at, _)| *at)
    }

    /// What comes out of it now.
    pub(crate) fn take_late(&mut self, now: Instant) -> Vec<Segment> {
        let due = self.late.iter().take_while(|(at, _)| *at <= now).count();
        self.late.drain(..due).map(|(_, segment)| segment).collect()
    }

    /// What comes of a packet, in the order in which it comes out.
    fn handle(&mut self, segment: &Segment) -> Vec<Segment> {
        let is_datagram = segment.tuple.protocol == crate::program::UDP;
        let is_first = self.is_first(segment);
        if is_first {
            self.seen.insert(segment.tuple);
            self.tagged += u64::from(segment.tag.is_some());
        }
        let back = |flags: u8| Segment {
            tuple: segment.tuple.reversed(),
            sequence: 0,
            acknowledgement: segment.sequence.wrapping_add(1),
            flags,
            data: Vec::new(),
            proof: None,
            tag: None,
        };
        match self.habit {
            Habit::Eats if is_first || is_datagram => return Vec::new(),
            Habit::Refuses if is_first => return vec![back(RST | ACK)],
            Habit::Answers if is_first => return vec![back(SYN | ACK)],
            _ => {}
        }
        let is_probe = !is_datagram && segment.flags == ACK && segment.data.is_empty();
        self.probes += u64::from(is_probe && (segment.sequence, segment.acknowledgement) == (0, 0));
        self.passed += 1;
        self.bytes += segment.data.len() as u64;
        let count = if is_first && self.habit == Habit::Doubles { 2 } else { 1 };
        let tuple = self.translate(segment.tuple, is_first);
        let out = segment.clone().readdressed(tuple);
        if is_first && self.habit == Habit::TranslatesInPairs {
            let Some(other) = self.kept.take() else {
                self.kept = Some(out);
                return Vec::new();
            };
            return vec![other, out];
        }
        vec![out; count]
    }

    /// The five-tuple of a packet as it comes out.
    fn translate(&mut self, tuple: Tuple, is_first: bool) -> Tuple {
        let translates = matches!(self.habit, Habit::Translates | Habit::TranslatesInPairs);
        if is_first && translates && !self.translated.contains_key(&tuple) {
            let port = 20_000 + self.translated.len() as u16;
            let address = match tuple.source.ip() {
                IpAddr::V4(_) => IpAddr::from([203, 0, 113, 7]),
                IpAddr::V6(_) => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 7]),
            };
            let destination = SocketAddr::new(tuple.destination.ip(), tuple.destination.port() + 8000);
            let other = Tuple { source: SocketAddr::new(address, port), destination, ..tuple };
            self.translated.insert(tuple, other);
            self.translated.insert(other.reversed(), tuple.reversed());
        }
        self.translated.get(&tuple).copied().unwrap_or(tuple)
    }
}
