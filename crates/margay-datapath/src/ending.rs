//! Endings of connections in packets of the peer's that come by user space: they count where the application's TCP
//! takes them (RFC 5961), as those do that the kernel's cache carries.

use std::collections::HashMap;

use margay_wire::FlowId;
use parking_lot::Mutex;

use crate::connection::{Connection, TcpNumbers, is_later};
use crate::kernel::Unjudged;
use crate::packet::{self, ACK, FIN, Packet, RST, TCP};
use crate::train::Delivered;

/// Connections whose endings wait to be judged; of more, the endings are not heard of before their idle time is over.
const WAITING_MAX: usize = 4096;

/// A segment of the peer's as its application gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrived {
    flags: u8,
    sequence: u32,
    /// The number after its payload.
    end: u32,
    acknowledgement: u32,
}

impl Arrived {
    /// `None` for what is no TCP segment.
    pub fn of(packet: &[u8]) -> Option<Self> {
        let Ok(Packet::Transport(found)) = packet::parse(packet, packet.len()) else { return None };
        let tcp = packet.get(found.ip_len..).filter(|_| found.key.protocol == TCP)?;
        let number = |at: usize| Some(u32::from_be_bytes(tcp.get(at..at + 4)?.try_into().ok()?));
        let (sequence, acknowledgement) = (number(4)?, number(8)?);
        let end = sequence.wrapping_add(found.payload_len() as u32);
        Some(Self { flags: found.flags, sequence, end, acknowledgement })
    }

    /// A train of segments, whose last numbers are these: `None` for what bears none.
    pub fn of_train(delivered: &Delivered) -> Option<Self> {
        let TcpNumbers { sequence: end, acknowledgement, .. } = delivered.numbers?;
        let sequence = end.wrapping_sub(delivered.bytes as u32);
        Some(Self { flags: delivered.flags, sequence, end, acknowledgement })
    }

    /// Whether it may end the connection.
    pub const fn may_end(&self) -> bool {
        self.flags & (FIN | RST) != 0
    }

    /// The peer's numbers after this segment. The sequence number advances with the first segment that is known of, and
    /// with one that brings what the application's TCP expects; the acknowledgement is every segment's, also where the
    /// peer's data has passed unseen before. `None` for a RST and a SYN alone.
    pub fn numbers(&self, known: &Unjudged, connection: Option<&Connection>) -> Option<TcpNumbers> {
        // A SYN acknowledges nothing.
        if self.flags & (RST | ACK) != ACK {
            return None;
        }
        let is_next = |next| !is_later(self.sequence, next) && is_later(self.end, next);
        // A FIN counts once the application's TCP has taken it.
        let sequence = match known.expected(connection).last() {
            Some(reached) if !known.expected(connection).any(is_next) => reached,
            _ => self.end,
        };
        Some(TcpNumbers { sequence, acknowledgement: self.acknowledgement, end: None })
    }

    /// What is to be judged of it, beside what is known.
    pub fn ending(&self, known: Unjudged) -> Option<Unjudged> {
        let reset = (self.flags & RST != 0).then_some(self.sequence);
        let end = (self.flags & (FIN | RST) == FIN).then_some(self.end.wrapping_add(1));
        Some(Unjudged { reset, end, ..known }).filter(Unjudged::is_ending)
    }
}

/// Those that no TCP has been seen to take yet.
#[derive(Default)]
pub(crate) struct Endings(Mutex<HashMap<FlowId, Unjudged>>);

impl Endings {
    /// Takes note of one. A FIN waits beside a RST of the same connection.
    pub fn wait(&self, flow: FlowId, ending: &Unjudged) {
        let mut waiting = self.0.lock();
        if waiting.len() < WAITING_MAX || waiting.contains_key(&flow) {
            let one = waiting.entry(flow).or_default();
            one.reset = ending.reset.or(one.reset);
            one.end = ending.end.or(one.end);
        }
    }

    /// What waits of one flow waits of another one: it is the same connection.
    pub fn pass_on(&self, from: FlowId, to: FlowId) {
        let mut waiting = self.0.lock();
        if let Some(left) = waiting.remove(&from) {
            let one = waiting.entry(to).or_default();
            one.reset = one.reset.or(left.reset);
            one.end = one.end.or(left.end);
        }
    }

    /// Whether any waits.
    pub fn are_waiting(&self) -> bool {
        !self.0.lock().is_empty()
    }

    /// Asks again of each: `judge` gives flags of what was taken, or `None` where the connection is no more. Gives
    /// those that were taken, with these flags.
    pub fn judge(&self, judge: impl Fn(FlowId, &Unjudged) -> Option<u8>) -> Vec<(FlowId, Unjudged, u8)> {
        let mut taken = Vec::new();
        self.0.lock().retain(|flow, ending| match judge(*flow, ending) {
            Some(0) => true,
            flags => {
                taken.extend(flags.map(|flags| (*flow, *ending, flags)));
                false
            }
        });
        taken
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::packet::FlowKey;
    use crate::sample;

    /// Of [`sample::packet`].
    const SEQUENCE: u32 = 0xffff_f000;

    fn arrived(flags: u8, payload: &[u8]) -> Arrived {
        Arrived::of(&sample::tcp4(payload, flags)).expect("a segment")
    }

    fn seen(own: Option<u32>, peer: Option<u32>) -> Connection {
        let own = own.map(|acknowledgement| TcpNumbers { sequence: 1, acknowledgement, end: None });
        let peer = peer.map(|sequence| TcpNumbers { sequence, acknowledgement: 1, end: None });
        Connection { key: FlowKey::from(sample::tuple4(TCP)), own, peer, segment: 0 }
    }

    #[test]
    fn a_reset_is_taken_at_what_is_expected_alone() {
        let reset = arrived(RST, b"").ending(Unjudged::default()).expect("an ending");
        for far in [1, 1000, 0x8000_0000, u32::MAX] {
            let other = Some(SEQUENCE.wrapping_add(far));
            assert_eq!(reset.taken(Some(&seen(other, other))), 0);
            assert_eq!(Unjudged { next: other, acknowledged: other, ..reset }.taken(None), 0);
        }
        assert_eq!(reset.taken(None), 0, "nothing is known");
        let exact = Some(SEQUENCE);
        for taken in [
            reset.taken(Some(&seen(exact, None))),
            reset.taken(Some(&seen(None, exact))),
            Unjudged { next: exact, ..reset }.taken(None),
            Unjudged { acknowledged: exact, ..reset }.taken(None),
        ] {
            assert_eq!(taken, RST);
        }
    }

    /// Data goes direct, and user space has had all before: a reset right behind it is what is expected.
    #[test]
    fn a_reset_behind_the_first_direct_segment_is_taken() {
        let reset = arrived(RST, b"").ending(Unjudged::default()).expect("an ending");
        let before = SEQUENCE.wrapping_sub(10);
        let direct = Unjudged { farthest: Some((before, SEQUENCE)), ..reset };
        assert_eq!(direct.taken(Some(&seen(Some(before), None))), RST);
        assert_eq!(direct.taken(Some(&seen(None, Some(before)))), RST);
        assert_eq!(Unjudged { acknowledged: Some(before), ..direct }.taken(None), RST);
        // What is between has not come, or it is made up.
        for gap in [1, 1000, 0x8000_0000, u32::MAX] {
            let other = Some(before.wrapping_sub(gap));
            assert_eq!(direct.taken(Some(&seen(other, other))), 0);
        }
        let late = Unjudged { farthest: Some((before, SEQUENCE.wrapping_sub(1))), ..reset };
        assert_eq!(late.taken(Some(&seen(Some(before), None))), 0);
    }

    #[test]
    fn a_fin_is_taken_once_it_is_acknowledged() {
        let fin = arrived(FIN | ACK, b"bye").ending(Unjudged::default()).expect("an ending");
        let end = SEQUENCE.wrapping_add(4);
        assert_eq!(fin.taken(Some(&seen(Some(end.wrapping_sub(1)), Some(end)))), 0);
        assert_eq!(fin.taken(Some(&seen(Some(end), None))), FIN);
        assert_eq!(Unjudged { acknowledged: Some(end), ..fin }.taken(None), FIN);
        assert_eq!(arrived(ACK, b"more").ending(Unjudged::default()), None);
    }

    #[test]
    fn made_up_data_is_not_what_comes_next() {
        let data = arrived(ACK, b"data");
        let known = Unjudged::default();
        let end = Some(SEQUENCE.wrapping_add(4));
        assert_eq!(data.numbers(&known, None).map(|numbers| numbers.sequence), end, "the first that is known of");
        assert_eq!(data.numbers(&known, Some(&seen(Some(SEQUENCE), None))).map(|numbers| numbers.sequence), end);
        for far in [1, 4000, 0x8000_0001, u32::MAX - 9] {
            let expected = SEQUENCE.wrapping_sub(far);
            let numbers = data.numbers(&known, Some(&seen(Some(expected), None)));
            assert_eq!(numbers.map(|numbers| numbers.sequence), Some(expected), "{far}");
        }
        assert_eq!(arrived(RST, b"").numbers(&known, None), None);
    }

    #[test]
    fn an_acknowledgement_counts_although_nothing_of_the_peers_was_seen_before() {
        let last = arrived(ACK, b"");
        let numbers = last.numbers(&Unjudged::default(), Some(&seen(Some(SEQUENCE), None)));
        let acknowledgement = last.acknowledgement;
        assert_eq!(numbers, Some(TcpNumbers { sequence: SEQUENCE, acknowledgement, end: None }));
    }

    #[test]
    fn a_train_is_judged_by_its_numbers() {
        let numbers = TcpNumbers { sequence: 7, acknowledgement: 9, end: Some(8) };
        let train = Delivered { bytes: 10, segments: 2, flags: FIN | ACK, numbers: Some(numbers) };
        let arrived = Arrived::of_train(&train).expect("of a connection");
        assert_eq!(arrived, Arrived { flags: FIN | ACK, sequence: 7_u32.wrapping_sub(10), end: 7, acknowledgement: 9 });
        assert_eq!(arrived.ending(Unjudged::default()).and_then(|ending| ending.end), Some(8));
        assert!(arrived.may_end() && !Arrived { flags: ACK, ..arrived }.may_end());
        assert_eq!(Arrived::of_train(&Delivered { numbers: None, ..train }), None, "of datagrams");
    }

    #[test]
    fn what_waits_of_a_way_that_is_no_more_waits_of_the_one_in_its_place() {
        let endings = Endings::default();
        endings.wait(FlowId(7), &Unjudged { end: Some(9), reset: Some(4), ..Unjudged::default() });
        endings.wait(FlowId(8), &Unjudged { reset: Some(5), ..Unjudged::default() });
        endings.pass_on(FlowId(7), FlowId(8));
        endings.pass_on(FlowId(6), FlowId(8));
        let both = Unjudged { reset: Some(5), end: Some(9), ..Unjudged::default() };
        assert_eq!(endings.judge(|_, _| Some(FIN)), [(FlowId(8), both, FIN)]);
    }

    #[test]
    fn what_waits_is_asked_for_until_it_is_taken_or_gone() {
        let (endings, flow) = (Endings::default(), FlowId(7));
        endings.wait(flow, &Unjudged { end: Some(9), ..Unjudged::default() });
        endings.wait(flow, &Unjudged { reset: Some(5), ..Unjudged::default() });
        endings.wait(FlowId(8), &Unjudged::default());
        let both = |_, ending: &Unjudged| ending.end.and(ending.reset).map(|_| 0);
        assert_eq!(endings.judge(both), [], "the other is no more");
        let waiting = Unjudged { reset: Some(5), end: Some(9), ..Unjudged::default() };
        assert_eq!(endings.judge(|_, _| Some(RST)), [(flow, waiting, RST)]);
        assert_eq!(endings.judge(|_, _| Some(RST)), []);
    }
}
