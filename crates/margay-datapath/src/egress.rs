//! The thread from `sal0` to UDP.

use std::io;
use std::os::fd::AsFd;

use margay_core::output::{Direction, DropReason};
use margay_wire::FENCE;

use crate::backlog::Notice;
use crate::clock;
use crate::driver::{Core, Shared};
use crate::fragment::Reassembler;
use crate::outbox::{self, Loaded, Outbox};
use crate::packet::{self, ACK, FIN, Packet, RST, SYN, TCP, Transport};
use crate::table::{Destination, TcpNumbers};
use crate::vnet::{Gso, Vnet};
use crate::wait::readable;

/// Runs until the datapath stops; an error means that the interface is gone.
pub(crate) fn run<C: Core>(shared: &Shared<C>, datagram_max: u16) -> io::Result<()> {
    let mut outbox = Outbox::new(datagram_max);
    let mut reassembler = Reassembler::default();
    let mut reads = 0;
    while !shared.is_stopping() {
        let read = outbox.read(&shared.tun);
        let fences = shared.direct.due_fences(&mut reads, matches!(read, Ok(None)));
        match read {
            Ok(Some(loaded)) => take(shared, &mut outbox, &mut reassembler, loaded),
            Ok(None) => {
                outbox.flush(&mut sender(shared, true));
                if fences.is_empty() {
                    readable([shared.tun.as_fd(), shared.direct.wake.as_fd(), shared.stop.as_fd()])?;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => shared.counting.drop(DropReason::Protocol),
            Err(error) => return Err(error),
        }
        if !fences.is_empty() {
            outbox.flush(&mut sender(shared, true));
            fences.into_iter().for_each(|flow| shared.send_mark(flow, FENCE));
        }
    }
    Ok(())
}

/// What an outbox sends with.
pub(crate) fn sender<C>(shared: &Shared<C>, patient: bool) -> impl FnMut(&[u8], usize, &Destination) {
    move |datagrams: &[u8], segment: usize, to: &Destination| shared.send_data(datagrams, segment, to, patient)
}

fn take<C: Core>(shared: &Shared<C>, outbox: &mut Outbox, reassembler: &mut Reassembler, loaded: Loaded) {
    match packet::parse(outbox.head(&loaded), loaded.len) {
        Ok(Packet::Transport(found)) => {
            let is_syn = found.flags & (SYN | ACK) == SYN;
            if is_syn
                || carry(shared, outbox, loaded, &found, true).is_err_and(|reason| reason == DropReason::UnknownFlow)
            {
                miss(shared, outbox, loaded.vnet, found.total_len);
            }
        }
        Ok(Packet::Fragment) => {
            shared.counting.fragments.add(1);
            let whole = reassembler.accept(outbox.whole(&loaded), clock::now());
            shared.counting.drop_many(DropReason::Incomplete, reassembler.take_incomplete());
            match whole {
                Ok(Some(packet)) => {
                    // A reassembled packet is no fragment, so this goes no deeper.
                    if let Some(loaded) = outbox.load(Vnet::default(), &packet) {
                        take(shared, outbox, reassembler, loaded);
                    }
                }
                Ok(None) => {}
                Err(reason) => shared.counting.drop(reason),
            }
        }
        Ok(Packet::Other(len)) => miss(shared, outbox, loaded.vnet, len),
        Err(packet::Malformed) => shared.counting.drop(DropReason::Malformed),
    }
}

/// Carries a packet whose flow is cached. [`DropReason::UnknownFlow`] when it is not; other reasons are counted.
pub(crate) fn carry<C: Core>(
    shared: &Shared<C>,
    outbox: &mut Outbox,
    loaded: Loaded,
    found: &Transport,
    patient: bool,
) -> Result<(), DropReason> {
    let Some(train) = outbox::train_header(&loaded.vnet, found) else {
        shared.counting.drop(DropReason::Malformed);
        return Err(DropReason::Malformed);
    };
    let bytes = found.payload_len();
    let segments = match loaded.vnet.gso {
        Gso::None => 1,
        _ => bytes.div_ceil(usize::from(loaded.vnet.segment_size)).max(1),
    };
    let numbers = numbers(outbox.head(&loaded), found);
    let route = shared.table.read().egress(&found.key, bytes, segments, numbers).ok_or(DropReason::UnknownFlow)?;
    if route.is_beside {
        shared.notice(Notice::Beside(route.flow));
    }
    shared.counting.egress_packets.add(1);
    shared.counting.egress_bytes.add(bytes as u64);
    let before = outbox.relaid();
    let loaded = Loaded { len: found.total_len, ..loaded };
    outbox.carry(&loaded, &train, &route, &mut sender(shared, patient));
    shared.counting.relaid.add(outbox.relaid() - before);
    if found.flags & (FIN | RST | SYN) != 0 {
        outbox.flush(&mut sender(shared, patient));
        shared.report(route.flow, Direction::Egress, found.flags);
    }
    if route.wants_pinhole {
        shared.send_pinhole(route.flow);
    }
    Ok(())
}

/// What a TCP segment says of its connection.
fn numbers(head: &[u8], found: &Transport) -> Option<TcpNumbers> {
    if found.key.protocol != TCP {
        return None;
    }
    let tcp = head.get(found.ip_len..)?;
    let number = |at: usize| Some(u32::from_be_bytes(tcp.get(at..at + 4)?.try_into().ok()?));
    let sequence = number(4)?.wrapping_add(found.payload_len() as u32);
    Some(TcpNumbers { sequence, acknowledgement: number(8)? })
}

fn miss<C>(shared: &Shared<C>, outbox: &mut Outbox, vnet: Vnet, len: usize) {
    shared.counting.egress_misses.add(1);
    if let Err(reason) = shared.backlog.packet(vnet, outbox.whole(&Loaded { vnet, len })) {
        shared.counting.drop(reason);
    }
}
