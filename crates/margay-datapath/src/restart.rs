//! Restarting the host's TCPs after a break (DESIGN §18): they know nothing of the move that has ended it, and would
//! wait for their timers. Which words a TCP acts upon was tried; what a lost packet means depends on which timers have
//! expired.
//!
//! As sender: "fragmentation needed" just below its segment size makes Linux send all that is unanswered at once, while
//! its timer has not expired (`tcp_simple_retransmit`). IPv6 wants to hear it twice: by the first word the route
//! changes, by the second the connection looks at it. It holds for the route for ten minutes, so that the next word has
//! to be a little lower. A TCP that has backed off takes one step back for each "host unreachable" about its oldest
//! segment (RFC 6069), and sends. As receiver: a byte that it has already makes it say what it has.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use margay_core::time::Instant;
use margay_wire::FlowId;
use parking_lot::Mutex;

use crate::clock;
use crate::connection::{is_later, later};
use crate::driver::Shared;
use crate::kernel::WireState;
use crate::packet::{ACK, FlowKey, IPV4_LEN, IPV6_LEN, TCP, TCP_LEN};
use crate::pinhole::ip_packet;
use crate::table::Connection;

/// Steps of back-off that are taken back: after a minute's break there are eight.
const UNREACHABLES: usize = 12;
/// An acknowledgement of what was acknowledged in any case.
const LONG_AGO: u32 = 1 << 30;
/// How far below the segment size the new one is.
const LESS: u32 = 4;
/// The least IPv6 takes; below it nobody is told to go.
const MTU_MIN: u32 = 1280;
/// For so long a route keeps it (`mtu_expires`).
const TOLD_FOR: Duration = Duration::from_secs(600);
/// Restarts within this time are of one move.
const TOGETHER: Duration = Duration::from_secs(1);
const ICMP_V4: u8 = 1;
const ICMP_V6: u8 = 58;

/// What is known of a connection at its end here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    /// The application's packets.
    key: FlowKey,
    /// What it sends next.
    next: u32,
    /// What it has received up to.
    received: u32,
    /// What the peer has acknowledged, if anything has come.
    acknowledged: Option<u32>,
    /// Payload of its largest segment in bytes.
    segment: u32,
}

impl Known {
    /// From what user space and the kernel's cache have seen.
    fn of(seen: &Connection, state: Option<&WireState>) -> Option<Self> {
        let sent = state.and_then(|state| state.sent);
        let next = [seen.own.map(|own| own.sequence), sent.map(|sent| sent.sequence.wrapping_add(sent.length))];
        let received = [seen.own.map(|own| own.acknowledgement), sent.map(|sent| sent.acknowledgement)];
        let heard = state.and_then(|state| state.received).map(|received| received.acknowledgement);
        let acknowledged = [seen.peer.map(|peer| peer.acknowledgement), heard];
        Some(Self {
            key: seen.key,
            next: next.into_iter().flatten().reduce(later)?,
            received: received.into_iter().flatten().reduce(later)?,
            acknowledged: acknowledged.into_iter().flatten().reduce(later),
            segment: seen.segment.max(sent.map_or(0, |sent| sent.segment)),
        })
    }

    /// The oldest byte that is unanswered.
    fn unanswered(&self) -> Option<u32> {
        self.acknowledged.filter(|acknowledged| is_later(self.next, *acknowledged))
    }

    /// Size of the IP packet that carries its largest segment: with timestamps, as Linux has them.
    fn packet_len(&self) -> u32 {
        let ip_len = if self.key.is_v4() { IPV4_LEN } else { IPV6_LEN };
        (ip_len + TCP_LEN + 12) as u32 + self.segment
    }

    /// The packets to give to the host, in order. `mtus`: what it is told of the largest packet that passes.
    fn packets(&self, mtus: &[u32]) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        packets.extend(self.old_byte());
        if let Some(oldest) = self.unanswered() {
            packets.extend(mtus.iter().filter_map(|mtu| self.error([3, 4], [2, 0], *mtu, oldest)));
            packets.extend(self.unreachable(oldest).into_iter().flat_map(|one| vec![one; UNREACHABLES]));
        }
        packets
    }

    fn ends(&self) -> (IpAddr, IpAddr) {
        let address = |octets| Ipv6Addr::from(octets).to_canonical();
        (address(self.key.source), address(self.key.destination))
    }

    /// A byte that the connection has had for long, as from the peer: it is out of its window, so that the connection
    /// says at once what it has (RFC 9293 §3.10.7.4), and takes nothing else of it for true. Never one that might be
    /// taken: its acknowledgement is only as far as is known.
    fn old_byte(&self) -> Option<Vec<u8>> {
        let (own, peer) = self.ends();
        let mut tcp = Vec::with_capacity(TCP_LEN + 1);
        tcp.extend(self.key.destination_port.to_be_bytes());
        tcp.extend(self.key.source_port.to_be_bytes());
        tcp.extend(self.received.wrapping_sub(2).to_be_bytes());
        tcp.extend(self.acknowledged.unwrap_or(self.next.wrapping_sub(LONG_AGO)).to_be_bytes());
        tcp.extend([(TCP_LEN as u8 / 4) << 4, ACK, 0xff, 0xff, 0, 0, 0, 0, 0]);
        ip_packet((peer, own), TCP, tcp, 16)
    }

    /// The head of the segment that begins at `sequence`, as the application sent it.
    fn quote(&self, sequence: u32) -> Option<Vec<u8>> {
        let mut tcp = Vec::with_capacity(TCP_LEN);
        tcp.extend(self.key.source_port.to_be_bytes());
        tcp.extend(self.key.destination_port.to_be_bytes());
        tcp.extend(sequence.to_be_bytes());
        tcp.extend(self.received.to_be_bytes());
        tcp.extend([(TCP_LEN as u8 / 4) << 4, ACK, 0xff, 0xff, 0, 0, 0, 0]);
        ip_packet(self.ends(), TCP, tcp, 16)
    }

    fn error(&self, v4: [u8; 2], v6: [u8; 2], rest: u32, sequence: u32) -> Option<Vec<u8>> {
        let (own, peer) = self.ends();
        let (protocol, kind) = if own.is_ipv4() { (ICMP_V4, v4) } else { (ICMP_V6, v6) };
        let mut icmp = vec![kind[0], kind[1], 0, 0];
        icmp.extend(rest.to_be_bytes());
        icmp.extend(self.quote(sequence)?);
        ip_packet((peer, own), protocol, icmp, 2)
    }

    fn unreachable(&self, sequence: u32) -> Option<Vec<u8>> {
        self.error([3, 1], [1, 0], 0, sequence)
    }
}

/// What the host's routes were told of the largest packet that passes.
#[derive(Debug, Default)]
pub struct Restarts(Mutex<HashMap<[u8; 16], Told>>);

#[derive(Clone, Copy, Debug)]
struct Told {
    at: Instant,
    mtus: [u32; 2],
}

impl Restarts {
    /// What to tell about packets to `destination`, of which the largest has `packet_len` bytes: lower than before, but
    /// the same to all connections that are restarted together. Nothing where it would become too little.
    fn mtus(&self, destination: [u8; 16], is_v4: bool, packet_len: u32, now: Instant) -> Vec<u32> {
        let mut all = self.0.lock();
        all.retain(|_, told| now.since(told.at) < TOLD_FOR);
        let before = all.get(&destination).copied();
        let told = match before {
            Some(told) if now.since(told.at) < TOGETHER => told,
            _ => {
                let from = before.map_or(packet_len, |told| told.mtus[1].min(packet_len));
                Told { at: now, mtus: [from.saturating_sub(LESS), from.saturating_sub(2 * LESS)] }
            }
        };
        if told.mtus[1] < MTU_MIN {
            return Vec::new();
        }
        all.insert(destination, told);
        told.mtus[usize::from(is_v4)..].to_vec()
    }
}

/// Has a connection send again what was lost.
pub(crate) fn restart<C>(shared: &Shared<C>, flow: FlowId) {
    let seen = shared.table.read().connection(flow);
    let known = seen.and_then(|seen| Known::of(&seen, shared.direct.state(flow).as_ref()));
    let Some(known) = known else { return };
    let key = &known.key;
    let mtus = shared.restarts.mtus(key.destination, key.is_v4(), known.packet_len(), clock::now());
    known.packets(&mtus).iter().for_each(|packet| shared.inject(packet));
    shared.counting.restarts.add(1);
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::checksum::{fold, sum};
    use crate::sample;
    use crate::table::TcpNumbers;

    fn known(v4: bool) -> Known {
        let key = FlowKey::from(if v4 { sample::tuple4(TCP) } else { sample::tuple6(TCP) });
        Known { key, next: 0x10, received: 0x0102_0304, acknowledged: Some(0xffff_fff0), segment: 1400 }
    }

    #[test]
    fn the_words_in_literal_bytes() {
        let packets = known(true).packets(&[1448]);
        assert_eq!(packets.len(), 2 + UNREACHABLES);
        let [old_byte, too_big, unreachable] = [&packets[0], &packets[1], &packets[2]];
        let ends = [198, 18, 0, 9, 198, 18, 0, 1];
        assert_eq!(old_byte[12..20], ends);
        assert_eq!(old_byte[20..34], [0, 80, 0x9c, 0x40, 1, 2, 3, 2, 0xff, 0xff, 0xff, 0xf0, 0x50, ACK]);
        assert_eq!(old_byte.len(), 41);
        assert_eq!((too_big[9], &too_big[20..22], &too_big[24..28]), (1, &[3, 4][..], &[0, 0, 5, 168][..]));
        assert_eq!(too_big[12..20], ends);
        assert_eq!(too_big[48..56], [0x9c, 0x40, 0, 80, 0xff, 0xff, 0xff, 0xf0]);
        assert_eq!((&unreachable[20..22], fold(sum(&unreachable[20..]))), (&[3, 1][..], 0xffff));
        let packets = known(false).packets(&[1468, 1464]);
        assert_eq!((packets[1][6], &packets[1][40..42], &packets[1][44..48]), (58, &[2, 0][..], &[0, 0, 5, 188][..]));
        assert_eq!((&packets[2][44..48], &packets[3][40..42]), (&[0, 0, 5, 184][..], &[1, 0][..]));
    }

    #[test]
    fn who_has_nothing_unanswered_is_told_nothing_of_it() {
        let done = Known { acknowledged: Some(0x10), ..known(true) };
        assert_eq!(done.packets(&[1400]).len(), 1);
        let unknown = Known { acknowledged: None, ..known(true) };
        assert_eq!(unknown.packets(&[1400]).len(), 1);
        assert_eq!(unknown.packets(&[])[0][28..32], [0xc0, 0, 0, 0x10], "nothing is acknowledged that may not be");
    }

    #[test]
    fn each_move_tells_a_little_less_and_connections_of_one_move_the_same() {
        let restarts = Restarts::default();
        let mtus = |v4: bool, len: u32, ms: u64| restarts.mtus([u8::from(v4); 16], v4, len, Instant::from_millis(ms));
        assert_eq!((mtus(false, 1500, 0), mtus(false, 1500, 900)), (vec![1496, 1492], vec![1496, 1492]));
        assert_eq!((mtus(false, 1500, 2000), mtus(true, 1500, 2000)), (vec![1488, 1484], vec![1492]));
        assert_eq!(mtus(false, 1500, 700_000), [1496, 1492], "routes forget it");
        assert_eq!(mtus(true, 1280, 3000), Vec::<u32>::new(), "nobody is told to send less than every link takes");
    }

    #[test]
    fn the_later_number_counts() {
        let own = Some(TcpNumbers { sequence: 0xffff_ff00, acknowledgement: 7, end: None });
        let peer = Some(TcpNumbers { sequence: 7, acknowledgement: 0xffff_fe00, end: None });
        let seen = Connection { key: known(true).key, own, peer, segment: 9 };
        let only_user_space = Known::of(&seen, None).expect("its numbers are known");
        assert_eq!((only_user_space.next, only_user_space.unanswered()), (0xffff_ff00, Some(0xffff_fe00)));
        assert_eq!(later(5, 0xffff_ff00), 5);
        assert_eq!(Known::of(&Connection { own: None, ..seen }, None), None);
    }
}
