//! The caches of a host under the suite that every flow cache is under (docs/decisions/0106): user space alone, the
//! kernel alone, and both as they stand together.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use margay_cache_suite::{
    Arrival, CacheUnderTest, FIN, LOCAL, Need, Notice, RST, Report, Seen, Why, cases, peer_keys, read, run,
};
use margay_core::entry::EntryUpdate;
use margay_core::flow_cache::UNANSWERED;
use margay_core::{Direction, DropReason};
use margay_wire::{
    DATA_HEADER_LEN, DataRepr, FENCE, FlowId, GsoKind, STACK_ENCAP, TRAIN_HEADER_LEN, TrainRepr, is_sealed,
};
use parking_lot::RwLock;

use crate::caches::Caches;
use crate::clock;
use crate::direct::{Direct, Route, Routing, Turn};
use crate::egress::numbers;
use crate::ending::{Arrived, Endings};
use crate::kernel::KernelCache;
use crate::kernel::unattached::monotonic_ns;
use crate::outbox::{self, Outbox};
use crate::packet::{self, ACK, Packet, SYN, UDP};
use crate::seal::Seal;
use crate::table::{EgressRoute, IngressRoute, Origin, Table};
use crate::train::{Assembler, Run, open_run};
use crate::vnet::{self, Vnet};

/// Verdicts of tcx.
const NEXT: i32 = -1;
const DROP: i32 = 2;
const REDIRECT: i32 = 7;

/// A host that has a route to everybody by one interface.
struct OneCard;

impl Routing for OneCard {
    fn route(&self, remote: IpAddr, local: Option<IpAddr>) -> Option<Route> {
        Some(Route { local: local.unwrap_or(LOCAL), next_hop: remote, ifindex: 1, mtu: 1500 })
    }

    fn is_up(&self, _: IpAddr) -> bool {
        true
    }

    fn forget_neighbour(&self, _: u32, _: IpAddr) {}
}

/// Which caches there are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    UserSpace,
    Kernel,
    Both,
}

/// The caches, and what of the packet threads is needed to pass them.
struct OnHost {
    part: Part,
    kernel: Option<Arc<KernelCache>>,
    /// Since when the kernel's time has not been put back.
    called_ns: u64,
    table: RwLock<Table>,
    direct: Direct,
    endings: Endings,
    outbox: Outbox,
    assembler: Assembler,
    notices: Vec<Notice>,
}

impl OnHost {
    /// With this kernel's cache, emptied, or none.
    fn new(part: Part, kernel: Option<Arc<KernelCache>>) -> Self {
        clock::stopped::pass(Duration::ZERO);
        let direct = Direct::new(kernel.is_some().then(|| Box::new(OneCard) as Box<dyn Routing>)).expect("descriptors");
        if let Some(kernel) = &kernel {
            kernel.wipe();
            kernel.set_local_addresses(&[LOCAL]);
            direct.use_cache(Some(Arc::clone(kernel)));
        }
        let mut host = Self {
            part,
            kernel,
            called_ns: monotonic_ns(),
            table: RwLock::default(),
            direct,
            endings: Endings::default(),
            outbox: Outbox::new(1472),
            assembler: Assembler::default(),
            notices: Vec::new(),
        };
        host.age(Duration::ZERO);
        host
    }

    /// So much time passes in the kernel, and no other.
    fn age(&mut self, time: Duration) {
        self.kernel.iter().for_each(|kernel| kernel.age(time, &mut self.called_ns));
    }

    const fn caches(&self) -> Caches<'_> {
        Caches { table: &self.table, direct: &self.direct, endings: &self.endings }
    }

    fn ended(&mut self, flow: FlowId, direction: Direction, flags: u8) {
        if flags & (FIN | RST) != 0 {
            self.notices.push(Notice::Ended(flow, direction, flags & (FIN | RST)));
        }
    }

    /// As the core's thread hears it.
    fn hear(&mut self) {
        let events = self.direct.take_events();
        for (flow, turn) in events.turns {
            if let Turn::Ended(direction, flags) = turn {
                self.ended(flow, direction, flags);
            }
        }
        self.notices.extend(events.one_way.into_iter().map(Notice::OneWay));
    }

    fn judge(&mut self) {
        for (flow, flags) in self.caches().judge_endings() {
            self.ended(flow, Direction::Ingress, flags);
        }
    }

    /// As the egress thread does.
    fn send_by_agent(&mut self, packet: &[u8], by: Option<FlowId>) -> Seen {
        let loaded = self.outbox.load(Vnet::default(), packet).expect("there is room");
        let Ok(Packet::Transport(found)) = packet::parse(self.outbox.head(&loaded), loaded.len) else {
            panic!("cases have whole packets")
        };
        if found.flags & (SYN | ACK) == SYN {
            return Seen::Missed;
        }
        let train = outbox::train_header(&loaded.vnet, &found).expect("of a packet");
        let said = numbers(self.outbox.head(&loaded), &found);
        let bytes = found.payload_len();
        let route = match by {
            None => self.table.read().egress(&found.key, bytes, 1, said, Origin::of(&found)),
            Some(flow) => self.table.read().egress_by(flow, bytes, 1, said),
        };
        let Some(route) = route else { return Seen::Missed };
        if let Some(delta) = &route.delta {
            self.outbox.translate(&loaded, delta);
        }
        if route.is_beside && self.direct.is_stalled(route.flow, self.table.read().wire(route.flow)) {
            self.notices.push(Notice::Stalled(route.flow));
        }
        if let Some(silence) = route.silence {
            let is_its_own = silence >= UNANSWERED;
            self.notices.push(if is_its_own { Notice::Silence } else { Notice::PathSilence }(route.flow));
        }
        let mut sent = Vec::new();
        let mut send = |datagrams: &[u8], stride: usize, _: &_| {
            sent.extend(datagrams.chunks(stride).map(<[u8]>::to_vec));
        };
        self.outbox.carry(&loaded, &train, &route, &mut send).expect("it is sealed");
        self.outbox.flush(&mut send);
        if by.is_none() {
            self.ended(route.flow, Direction::Egress, found.flags);
        }
        if route.takes_end && self.endings.are_waiting() {
            self.judge();
        }
        if route.to.is_void { Seen::Nowhere } else { encapsulated(&route, sent) }
    }

    /// As the ingress thread does with what has a route.
    fn take_run(&mut self, route: &IngressRoute, run: &Run<'_>) -> Result<Seen, DropReason> {
        let flow = run.header.dst_flow;
        if route.seal.is_none() && !route.by_plain_place {
            if run.header.flags & FENCE != 0 {
                self.table.read().note_fence(flow, run.header.packet_number);
                self.notices.push(Notice::PeerDirect(flow));
            } else if route.is_back {
                self.notices.push(Notice::PeerBack(flow));
            }
            if run.is_mark() {
                return Ok(Seen::Marked);
            }
        }
        let mut given = Vec::new();
        let delivered = self.assembler.accept(run, &route.to, clock::now, |parts| {
            given.extend(parts.iter().flat_map(|part| part.iter().copied()));
            Ok(())
        })?;
        let (tuple, numbers) = read(&given[vnet::LEN..]);
        if route.gives_up {
            return Ok(Seen::GivenUp { flow, numbers });
        }
        let arrived = Arrived::of_train(&delivered);
        {
            let table = self.table.read();
            table.count_ingress(flow, delivered.bytes, delivered.segments);
            arrived.iter().for_each(|arrived| table.note_train(flow, arrived));
        }
        if let Some(ending) = arrived.filter(Arrived::may_end) {
            let taken = self.caches().take_ending(flow, &ending, self.caches().known_of(flow));
            self.ended(flow, Direction::Ingress, taken);
        }
        Ok(Seen::Given { tuple, numbers })
    }
}

/// What a packet's chunks are, as the peer reads them.
fn encapsulated(route: &EgressRoute, mut sent: Vec<Vec<u8>>) -> Seen {
    let headers: Vec<DataRepr> = sent.iter().map(|datagram| DataRepr::parse(datagram).expect("DATA")).collect();
    let first = headers[0];
    let mut inside = Vec::new();
    let peer = Seal::new(&peer_keys());
    for (datagram, header) in sent.iter_mut().zip(&headers) {
        if is_sealed(header.stack) {
            peer.open(header, datagram).expect("its peer can open it");
            datagram.truncate(datagram.len() - margay_wire::SEAL_TAG_LEN);
        }
        inside.extend_from_slice(&datagram[DATA_HEADER_LEN..]);
    }
    Seen::Encapsulated {
        to: route.to.remote,
        peer_flow: first.dst_flow,
        packet_number: first.packet_number,
        is_beside: route.is_beside,
        is_sealed: is_sealed(first.stack),
        numbers: read(&inside[TRAIN_HEADER_LEN..]).1,
    }
}

/// The datagram of an arrival, and its header.
fn data(arrival: &Arrival, packet: &[u8]) -> (DataRepr, Vec<u8>) {
    let (flow, flags, packet_number) = (arrival.flow, arrival.flags, arrival.number);
    let header = DataRepr { stack: STACK_ENCAP, flags, dst_flow: flow, packet_number, index: 0, count: 1 };
    let mut datagram = vec![0; DATA_HEADER_LEN];
    header.emit(&mut datagram);
    if arrival.is_mark {
        return (header, datagram);
    }
    let inner_len = packet.len() as u32;
    let train = TrainRepr { gso: GsoKind::None, partial_checksum: false, segment_size: 0, inner_len };
    datagram.resize(DATA_HEADER_LEN + TRAIN_HEADER_LEN, 0);
    train.emit(&mut datagram[DATA_HEADER_LEN..]);
    datagram.extend_from_slice(packet);
    let Some(keys) = &arrival.seal else { return (header, datagram) };
    datagram.extend([0; margay_wire::SEAL_TAG_LEN]);
    let seal = Seal::new(keys);
    seal.take_numbers(packet_number as usize);
    let stride = datagram.len();
    seal.seal_train(flow, &mut datagram, stride).expect("sealed");
    (DataRepr::parse(&datagram).expect("DATA"), datagram)
}

const fn why(reason: DropReason) -> Option<Why> {
    match reason {
        DropReason::WrongPath => Some(Why::WrongPath),
        DropReason::OtherStack => Some(Why::OtherStack),
        DropReason::ReplayedSeal => Some(Why::Replayed),
        DropReason::BadSeal | DropReason::OtherEpoch => Some(Why::Strange),
        _ => None,
    }
}

impl CacheUnderTest for OnHost {
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
        let opens = match &update {
            EntryUpdate::Install(entry) if entry.app.protocol == UDP => Some(entry.flow),
            _ => None,
        };
        self.caches().apply(update);
        // The core has carried what it held.
        opens.into_iter().for_each(|flow| self.table.read().open(flow));
        // What has come up before has been delivered.
        for flow in self.direct.lifting.take() {
            while !self.direct.lift(flow, false) {}
        }
        self.hear();
    }

    fn pass(&mut self, time: Duration) {
        clock::stopped::pass(time);
        self.age(time);
        self.judge();
    }

    fn forget(&mut self) {
        self.table.write().clear();
        self.direct.clear();
    }

    fn send(&mut self, packet: &[u8]) -> Seen {
        if let Some(kernel) = self.kernel.clone() {
            self.age(Duration::ZERO);
            let (verdict, out) = kernel.run(true, packet);
            self.hear();
            match verdict {
                REDIRECT => {
                    let (wire, numbers) = read(&out);
                    return Seen::Direct { wire, numbers };
                }
                NEXT if self.part == Part::Kernel => return Seen::Missed,
                NEXT => {}
                other => panic!("verdict {other}"),
            }
        }
        self.send_by_agent(packet, None)
    }

    fn carry(&mut self, flow: FlowId, packet: &[u8]) -> Seen {
        self.send_by_agent(packet, Some(flow))
    }

    fn note_parted(&mut self, flow: FlowId, packet: &[u8]) {
        let Ok(Packet::Transport(found)) = packet::parse(packet, packet.len()) else { panic!("a whole packet") };
        let said = numbers(packet, &found).expect("a segment with ACK");
        if self.table.read().note_parted(flow, said) {
            self.judge();
        }
    }

    fn take(&mut self, arrival: &Arrival, packet: &[u8]) -> Seen {
        let (header, mut datagram) = data(arrival, packet);
        let (flow, came) = (arrival.flow, (arrival.at, arrival.from));
        let route = self.table.read().ingress(flow, came, &header);
        let taken = route.and_then(|route| {
            if route.ends_silence {
                self.notices.push(Notice::Answer(flow));
            }
            let Some(seal) = &route.seal else { return self.take_run(&route, &Run::single(header, &datagram)) };
            let (mut result, stride) = (None, datagram.len());
            open_run(seal, header, (&mut datagram, stride), |opened| {
                result = Some(opened.and_then(|run| self.take_run(&route, &run)));
            });
            let result = result.expect("of one datagram");
            if matches!(result, Err(DropReason::BadSeal | DropReason::OtherEpoch)) && seal.may_complain(clock::now()) {
                self.notices.push(Notice::StrangeSeal(flow));
            }
            result
        });
        match taken {
            Ok(seen) => seen,
            Err(DropReason::UnknownFlow) => Seen::Missed,
            Err(reason) => {
                if reason == DropReason::OtherStack && self.table.read().may_complain_of_stack(flow) {
                    self.notices.push(Notice::StrangeStack(flow));
                }
                Seen::Dropped(why(reason).unwrap_or_else(|| panic!("dropped: {reason}")))
            }
        }
    }

    fn take_direct(&mut self, packet: &[u8]) -> Seen {
        let kernel = self.kernel.clone().expect("cases of it need it");
        let resets = kernel.counted("drop_reset");
        self.age(Duration::ZERO);
        let (verdict, out) = kernel.run(false, packet);
        self.hear();
        let (tuple, numbers) = read(&out);
        match verdict {
            REDIRECT if tuple == read(packet).0 => Seen::Missed,
            REDIRECT => Seen::Given { tuple, numbers },
            DROP if kernel.counted("drop_reset") > resets => Seen::Dropped(Why::HeldReset),
            NEXT => Seen::OfHost,
            other => panic!("verdict {other}"),
        }
    }

    fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    fn is_over(&mut self, flow: FlowId) -> bool {
        self.caches().is_over(flow)
    }

    fn pinhole(&mut self, flow: FlowId) -> Option<(u32, u32)> {
        let (_, numbers) = self.table.read().knock(flow)?;
        Some(numbers.map_or((0, 0), |numbers| (numbers.sequence, numbers.acknowledgement)))
    }
}

/// Has the caches do all cases; prints what they cannot show, and counts it.
fn done_by(part: Part, not_shown: usize) {
    let kernel = match part {
        Part::UserSpace => None,
        Part::Kernel | Part::Both => match KernelCache::unattached() {
            Some(kernel) => Some(Arc::new(kernel)),
            // It has said so.
            None => return,
        },
    };
    let report: Report = run(&cases(), || OnHost::new(part, kernel.clone()));
    eprintln!("{report}");
    assert!(report.wrong.is_empty(), "{report}");
    assert_eq!(report.not_shown.len(), not_shown, "{report}");
}

#[test]
fn user_space_does_as_every_flow_cache() {
    done_by(Part::UserSpace, 17);
}

#[test]
fn the_kernel_does_as_every_flow_cache() {
    done_by(Part::Kernel, 46);
}

#[test]
fn both_together_do_as_every_flow_cache() {
    done_by(Part::Both, 8);
}
