//! What a TCP connection shows of itself as its packets pass: its numbers, and how it ends.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use margay_core::Direction;
use margay_core::delta::Translation;

use crate::kernel::{TcpSeen, WireState};
use crate::packet::{FIN, FlowKey};

/// A TCP flow's numbers as its application showed them last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpNumbers {
    /// The next sequence number.
    pub sequence: u32,
    /// The acknowledgement.
    pub acknowledgement: u32,
    /// The number after the segment's FIN, if it bears one.
    pub end: Option<u32>,
}

impl TcpNumbers {
    /// The same on the other side of a translation.
    pub(crate) fn translated(self, by: &Translation) -> Self {
        Self {
            sequence: self.sequence.wrapping_add(by.sequence),
            acknowledgement: self.acknowledgement.wrapping_add(by.acknowledgement),
            end: self.end.map(|end| end.wrapping_add(by.sequence)),
        }
    }
}

/// Whether one sequence number comes after another (RFC 9293 §3.4: the numbers wrap).
pub(crate) const fn is_later(one: u32, other: u32) -> bool {
    one.wrapping_sub(other).cast_signed() > 0
}

/// The later of two sequence numbers.
pub(crate) const fn later(one: u32, other: u32) -> u32 {
    if is_later(other, one) { other } else { one }
}

/// What a connection has shown of itself, as far as it was encapsulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The application's five-tuple.
    pub key: FlowKey,
    /// What its application showed last.
    pub own: Option<TcpNumbers>,
    /// What the peer showed last.
    pub peer: Option<TcpNumbers>,
    /// Payload of the application's largest segment in bytes; zero while unknown.
    pub segment: u32,
}

/// What one end has shown last; zero while that is unknown. Several threads carry segments of one connection.
pub(crate) struct Shown(AtomicU64);

impl Shown {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Takes note of a segment's numbers. What is acknowledged stays so: a thread that is late, or a path that is
    /// longer, brings an earlier segment after a later one.
    pub(crate) fn note(&self, numbers: TcpNumbers) {
        let noted = |before: u64| {
            let acknowledged = numbers_of(before)
                .map_or(numbers.acknowledgement, |before| later(before.acknowledgement, numbers.acknowledgement));
            Some(u64::from(numbers.sequence) << 32 | u64::from(acknowledged))
        };
        // It always gives a value.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, noted);
    }

    pub(crate) fn numbers(&self) -> Option<TcpNumbers> {
        numbers_of(self.0.load(Ordering::Relaxed))
    }

    /// Takes note of what was shown before, elsewhere.
    pub(crate) fn precede(&self, before: &Self) {
        let Some(before) = before.numbers() else { return };
        let sequence = self.numbers().map_or(before.sequence, |known| later(before.sequence, known.sequence));
        self.note(TcpNumbers { sequence, ..before });
    }
}

const fn numbers_of(packed: u64) -> Option<TcpNumbers> {
    let numbers = TcpNumbers { sequence: (packed >> 32) as u32, acknowledgement: packed as u32, end: None };
    if packed == 0 { None } else { Some(numbers) }
}

/// What an end has shown in the kernel's cache.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Direct {
    /// The number after its FIN.
    pub end: Option<u32>,
    /// The last acknowledgement.
    pub acknowledgement: Option<u32>,
}

impl WireState {
    /// The number after an end's FIN, if one has passed here that counts. After a FIN come acknowledgements alone,
    /// whose number is this one.
    pub fn end(&self, of: Direction) -> Option<u32> {
        let seen = if of == Direction::Egress { &self.sent } else { &self.received };
        let has_closed = self.seen.ends().any(|(direction, flags)| direction == of && flags & FIN != 0);
        seen.as_ref().filter(|_| has_closed).map(TcpSeen::next)
    }

    /// What the application has shown of its end, and the peer of the other.
    pub(crate) fn shown(&self) -> (Direct, Direct) {
        let last = |seen: &Option<TcpSeen>| seen.as_ref().map(|seen| seen.acknowledgement);
        (
            Direct { end: self.end(Direction::Egress), acknowledgement: last(&self.sent) },
            Direct { end: self.end(Direction::Ingress), acknowledgement: last(&self.received) },
        )
    }
}

/// How a connection ends, as far as that has passed encapsulated.
pub(crate) struct Ending {
    /// The number after the application's FIN.
    pub own: End,
    /// And after the peer's, whether or not the application takes it (RFC 5961): it counts once it is acknowledged.
    pub peer: End,
}

/// The number after a FIN; zero while none has passed. A FIN whose next number is zero is not noticed: its flow is
/// kept until it is idle, once in 2^32 times, and an entry of the cache stays small.
pub(crate) struct End(AtomicU32);

impl End {
    /// Takes note of a segment that bears a FIN.
    pub(crate) fn note(&self, end: Option<u32>) {
        if let Some(end) = end {
            self.0.store(end, Ordering::Relaxed);
        }
    }

    /// Takes note of a segment that has passed before, elsewhere.
    pub(crate) fn precede(&self, before: &Self) {
        if self.known().is_none() {
            self.note(before.known());
        }
    }

    fn known(&self) -> Option<u32> {
        let end = self.0.load(Ordering::Relaxed);
        (end != 0).then_some(end)
    }

    /// Whether an acknowledgement is of it.
    pub(crate) fn is(&self, acknowledgement: u32) -> bool {
        self.known() == Some(acknowledgement)
    }
}

impl Ending {
    pub(crate) const fn new() -> Self {
        Self { own: End(AtomicU32::new(0)), peer: End(AtomicU32::new(0)) }
    }

    /// Whether each end has acknowledged all of the other's. FINs and acknowledgements may have passed in user space,
    /// where `own` and `peer` were shown last, or in the kernel's cache, which has `sent` and `received`.
    pub(crate) fn is_over(
        &self,
        (own, peer): (Option<TcpNumbers>, Option<TcpNumbers>),
        (sent, received): (Direct, Direct),
    ) -> bool {
        let is_acknowledged = |end: Option<u32>, by: Option<TcpNumbers>, by_direct: Direct| {
            end.is_some() && (by.map(|by| by.acknowledgement) == end || by_direct.acknowledgement == end)
        };
        let own_end = self.own.known().or(sent.end);
        let peer_end = self.peer.known().or(received.end);
        is_acknowledged(own_end, peer, received) && is_acknowledged(peer_end, own, sent)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn numbers(sequence: u32, acknowledgement: u32) -> Option<TcpNumbers> {
        Some(TcpNumbers { sequence, acknowledgement, end: None })
    }

    #[test]
    fn what_is_acknowledged_stays_so_however_late_another_segment_comes() {
        let shown = Shown::new();
        assert_eq!(shown.numbers(), None);
        for (said, acknowledged) in [(0xffff_fff0, 0xffff_fff0), (5, 5), (0xffff_fff8, 5), (4, 5), (9, 9)] {
            shown.note(TcpNumbers { sequence: said, acknowledgement: said, end: None });
            assert_eq!(shown.numbers(), numbers(said, acknowledged));
        }
    }

    #[test]
    fn a_connection_is_over_when_each_has_acknowledged_the_others_fin_wherever_it_passed() {
        let nothing = (Direct::default(), Direct::default());
        let ending = Ending::new();
        assert!(!ending.is_over((None, None), nothing));
        ending.own.note(Some(1));
        assert!(!ending.is_over((numbers(1, 500), numbers(500, 1)), nothing), "the peer has not closed");
        ending.peer.note(Some(501));
        assert!(!ending.is_over((numbers(1, 500), numbers(501, 1)), nothing), "its FIN is not acknowledged");
        let earlier = numbers(501, u32::MAX);
        assert!(!ending.is_over((numbers(1, 501), earlier), nothing), "nor is the application's");
        assert!(ending.is_over((numbers(1, 501), numbers(501, 1)), nothing));
        // The peer's FIN, and the acknowledgements of both, went direct.
        let ending = Ending::new();
        ending.own.note(Some(9));
        let here = (numbers(9, 500), numbers(100, 8));
        let received = Direct { end: Some(501), acknowledgement: Some(9) };
        assert!(!ending.is_over(here, (Direct::default(), received)));
        assert!(ending.is_over(here, (Direct { end: None, acknowledgement: Some(501) }, received)));
        // The application's FIN, too; its last word came after that.
        let ending = Ending::new();
        let sent = Direct { end: Some(9), acknowledgement: Some(501) };
        assert!(ending.is_over((None, None), (sent, received)));
    }
}
