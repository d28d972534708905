//! The simulator's cache under the suite that every flow cache is under (docs/decisions/0106): in the place of a host's
//! user space alone, of its kernel alone, and of both.

use std::time::Duration;

use margay_cache_suite::{
    ACK, Arrival, CacheUnderTest, FIN, LOCAL, Need, Notice, Numbers, RST, SYN, Seen, Why, cases, peer_keys, read, run,
};
use margay_core::flow_cache::UNANSWERED;
use margay_core::{Direction, EntryUpdate, Instant};
use margay_wire::{DATA_HEADER_LEN, DataRepr, FlowId, GsoKind, STACK_ENCAP, TRAIN_HEADER_LEN, TrainRepr, is_sealed};

use crate::cache::{Cache, Carried};
use crate::nonces::Nonces;
use crate::program::Segment;
use crate::seal::{Refused, Seal};
use crate::turn::Admission;

/// Which caches of a host it stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    UserSpace,
    Kernel,
    Both,
}

/// The cache, and what of a host is needed to pass it.
struct Simulated {
    part: Part,
    cache: Cache,
    now: Instant,
    notices: Vec<Notice>,
}

impl Simulated {
    fn new(part: Part) -> Self {
        let mut cache = Cache::new(LOCAL, Nonces::default());
        if part != Part::UserSpace {
            cache.kernel = Some(Default::default());
        }
        Self { part, cache, now: Instant::from_millis(1_000_000), notices: Vec::new() }
    }

    fn ended(&mut self, flow: FlowId, direction: Direction, flags: u8) {
        if flags & (FIN | RST) != 0 {
            self.notices.push(Notice::Ended(flow, direction, flags & (FIN | RST)));
        }
    }

    fn judge(&mut self) {
        for (flow, taken) in self.cache.judge_endings() {
            self.ended(flow, Direction::Ingress, taken);
        }
    }

    /// What of the agent's there is to see of a packet that it has carried.
    fn seen_of(&mut self, carried: Carried) -> Seen {
        let Carried { flow, to, datagram, is_beside, silence, .. } = carried;
        if let Some(silence) = silence {
            let is_its_own = silence >= UNANSWERED;
            self.notices.push(if is_its_own { Notice::Silence } else { Notice::PathSilence }(flow));
        }
        if is_beside && self.cache.is_stalled(self.now, flow) {
            self.notices.push(Notice::Stalled(flow));
        }
        let Some(to) = to else { return Seen::Nowhere };
        let header = DataRepr::parse(&datagram).expect("DATA");
        let inside = match is_sealed(header.stack) {
            true => Seal::new(peer_keys(), Nonces::default()).open(&header, &datagram).expect("its peer can open it"),
            false => datagram[DATA_HEADER_LEN..].to_vec(),
        };
        Seen::Encapsulated {
            to,
            peer_flow: header.dst_flow,
            packet_number: header.packet_number,
            is_beside,
            is_sealed: is_sealed(header.stack),
            numbers: read(&inside[TRAIN_HEADER_LEN..]).1,
        }
    }

    /// The program is given a segment of this flow.
    fn give(&mut self, flow: FlowId, segment: Segment) -> Seen {
        let taken = self.cache.take_ending(flow, &segment);
        self.ended(flow, Direction::Ingress, taken);
        Seen::Given { tuple: segment.tuple, numbers: numbers_of(&segment) }
    }
}

fn numbers_of(segment: &Segment) -> Numbers {
    let Segment { sequence, acknowledgement, flags, data, .. } = segment;
    Numbers { sequence: *sequence, acknowledgement: *acknowledgement, flags: *flags, len: data.len() }
}

/// The datagram of an arrival.
fn data(arrival: &Arrival, packet: &[u8]) -> Vec<u8> {
    let Arrival { flow, flags, number, .. } = *arrival;
    let header = DataRepr { stack: STACK_ENCAP, flags, dst_flow: flow, packet_number: number, index: 0, count: 1 };
    let inner_len = packet.len() as u32;
    let train = TrainRepr { gso: GsoKind::None, partial_checksum: false, segment_size: 0, inner_len };
    let mut payload = Vec::new();
    if !arrival.is_mark {
        payload.resize(TRAIN_HEADER_LEN, 0);
        train.emit(&mut payload);
        payload.extend_from_slice(packet);
    }
    if let Some(keys) = arrival.seal {
        let mut seal = Seal::new(keys, Nonces::default());
        for _ in 0..number {
            seal.number();
        }
        return seal.seal(header, &payload);
    }
    let mut datagram = vec![0; DATA_HEADER_LEN];
    header.emit(&mut datagram);
    datagram.extend(payload);
    datagram
}

impl CacheUnderTest for Simulated {
    fn lacks(&self, need: Need) -> Option<&'static str> {
        match (need, self.part) {
            (Need::Encapsulation, Part::Kernel) => Some("DATA passes user space alone"),
            (Need::Direct, Part::UserSpace) => Some("what goes direct passes the kernel's cache alone"),
            (Need::Both, Part::UserSpace | Part::Kernel) => Some("one of the two caches is not there"),
            (Need::KernelAlone, Part::Both) => Some("what the kernel leaves is carried by user space"),
            _ => None,
        }
    }

    fn apply(&mut self, update: EntryUpdate) {
        self.cache.apply(self.now, update);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    fn forget(&mut self) {
        self.cache.clear();
    }

    fn send(&mut self, packet: &[u8]) -> Seen {
        let segment = Segment::parse(packet).expect("cases have whole packets");
        if let Some((flow, direct)) = self.cache.send_direct(self.now, &segment, packet) {
            self.ended(flow, Direction::Egress, segment.flags);
            self.judge();
            let (wire, numbers) = read(&direct);
            return Seen::Direct { wire, numbers };
        }
        if self.part == Part::Kernel || segment.flags & (SYN | ACK) == SYN {
            return Seen::Missed;
        }
        let Some(carried) = self.cache.encapsulate(self.now, &segment, packet) else { return Seen::Missed };
        self.ended(carried.flow, Direction::Egress, segment.flags);
        self.judge();
        self.seen_of(carried)
    }

    fn carry(&mut self, flow: FlowId, packet: &[u8]) -> Seen {
        let segment = Segment::parse(packet).expect("cases have whole packets");
        let carried = self.cache.encapsulate_by(self.now, flow, &segment, packet);
        carried.map_or(Seen::Missed, |carried| self.seen_of(carried))
    }

    fn note_parted(&mut self, flow: FlowId, packet: &[u8]) {
        self.cache.note_parted(flow, &Segment::parse(packet).expect("cases have whole packets"));
        self.judge();
    }

    fn take(&mut self, arrival: &Arrival, packet: &[u8]) -> Seen {
        let datagram = data(arrival, packet);
        let came = (arrival.at, arrival.from);
        match self.cache.admit(self.now, came, &datagram) {
            Some((_, Admission::Elsewhere)) => return Seen::Dropped(Why::WrongPath),
            Some((flow, Admission::Strange)) => {
                self.notices.push(Notice::StrangeStack(flow));
                return Seen::Dropped(Why::OtherStack);
            }
            Some((_, Admission::Take)) | None => {}
            Some((_, other)) => panic!("no case turns a flow: {other:?}"),
        }
        let Some(found) = self.cache.decapsulate(came, &datagram) else { return Seen::Missed };
        let flow = found.flow;
        if found.ends_silence {
            self.notices.push(Notice::Answer(flow));
        }
        match found.is_refused {
            Some(Refused::Dropped) => return Seen::Dropped(Why::Replayed),
            Some(Refused::Strange) => {
                self.notices.push(Notice::StrangeSeal(flow));
                return Seen::Dropped(Why::Strange);
            }
            None => {}
        }
        if found.is_fence {
            self.notices.push(Notice::PeerDirect(flow));
        } else if found.is_back {
            self.notices.push(Notice::PeerBack(flow));
        }
        let Some(segment) = Segment::parse(&found.inner) else { return Seen::Marked };
        let (segment, comes_up) = self.cache.local(flow, segment);
        let segment = segment.readdressed(found.tuple);
        if comes_up {
            return Seen::GivenUp { flow, numbers: numbers_of(&segment) };
        }
        let seen = self.give(flow, segment.clone());
        self.cache.note_delivered(flow, &segment);
        seen
    }

    fn take_direct(&mut self, packet: &[u8]) -> Seen {
        let segment = Segment::parse(packet).expect("cases have whole packets");
        let kernel = self.cache.kernel.as_mut().expect("cases of it need it");
        let resets = kernel.resets;
        let found = kernel.ingress(self.now, &segment, |_| false);
        if kernel.resets > resets {
            return Seen::Dropped(Why::HeldReset);
        }
        self.notices.extend(kernel.take_one_way().into_iter().map(Notice::OneWay));
        let Some((flow, tuple)) = found else { return Seen::Missed };
        let (segment, _) = self.cache.local(flow, segment);
        self.give(flow, segment.readdressed(tuple))
    }

    fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    fn is_over(&mut self, flow: FlowId) -> bool {
        self.cache.is_over(flow)
    }

    fn pinhole(&mut self, flow: FlowId) -> Option<(u32, u32)> {
        let (_, numbers) = read(&self.cache.knock(flow)?);
        Some((numbers.sequence, numbers.acknowledgement))
    }
}

/// Has it do all cases; prints what it cannot show, and counts it.
fn done_by(part: Part, not_shown: usize) {
    let report = run(&cases(), || Simulated::new(part));
    eprintln!("{report}");
    assert!(report.wrong.is_empty(), "{report}");
    assert_eq!(report.not_shown.len(), not_shown, "{report}");
}

#[test]
fn its_user_space_does_as_every_flow_cache() {
    done_by(Part::UserSpace, 17);
}

#[test]
fn its_kernel_does_as_every_flow_cache() {
    done_by(Part::Kernel, 46);
}

#[test]
fn both_of_it_do_as_every_flow_cache() {
    done_by(Part::Both, 8);
}
