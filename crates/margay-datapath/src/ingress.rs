//! The thread from UDP to `sal0`.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use margay_core::direct::DirectEvent;
use margay_core::output::{Direction, DropReason};
use margay_wire::{FENCE, Kind};

use crate::backlog::Notice;
use crate::clock;
use crate::driver::{Core, Shared};
use crate::train::{Assembler, Piece, Run, pieces};
use crate::udp::RECEIVE_MAX;
use crate::wait::readable;

/// Runs until the datapath stops.
pub(crate) fn run<C: Core>(shared: &Shared<C>) -> io::Result<()> {
    let mut buffer = vec![0; RECEIVE_MAX].into_boxed_slice();
    let mut assembler = Assembler::default();
    while !shared.is_stopping() {
        let Some(received) = shared.sockets.data.receive(&mut buffer)? else {
            readable([shared.sockets.data.as_fd(), shared.stop.as_fd()])?;
            continue;
        };
        for piece in pieces(&buffer[..received.len], received.segment) {
            match piece {
                Piece::Run(run) => match accept(shared, &mut assembler, &run, received.from) {
                    Err(DropReason::UnknownFlow) => run.datagrams().for_each(|one| miss(shared, received.from, one)),
                    Err(reason) => shared.counting.drop(reason),
                    Ok(()) => {}
                },
                // The kernel may join a last, shorter datagram of signalling to DATA.
                Piece::Other(datagram) if datagram.get(1).is_none_or(|&kind| kind == Kind::Data.into()) => {
                    shared.counting.drop(DropReason::Malformed);
                }
                Piece::Other(datagram) => miss(shared, received.from, datagram),
            }
        }
    }
    Ok(())
}

/// Gives a run of chunks to the application. [`DropReason::UnknownFlow`] when the flow is not cached.
pub(crate) fn accept<C: Core>(
    shared: &Shared<C>,
    assembler: &mut Assembler,
    run: &Run<'_>,
    from: SocketAddr,
) -> Result<(), DropReason> {
    let flow = run.header.dst_flow;
    let route = shared.table.read().ingress(flow, from, &run.header)?;
    if run.header.flags & FENCE != 0 {
        // Everything before it has been written to `sal0`: this thread takes them in order.
        shared.table.read().note_fence(flow, run.header.packet_number);
        shared.notice(Notice::Direct(flow, DirectEvent::PeerDirect));
    } else if route.is_back {
        shared.notice(Notice::Direct(flow, DirectEvent::PeerBack));
    }
    if run.is_mark() {
        return Ok(());
    }
    if route.is_sending && run.opens() {
        // The peer says SYN-ACK again: the acknowledgement that would open its connection went direct, and nowhere. It waits
        // for the core to take the flow back, and to have the application say it once more: TCP does that only twice a second.
        shared.notice(Notice::Direct(flow, DirectEvent::Stalled));
        return Ok(());
    }
    shared.counting.ingress_runs.add(1);
    let delivered = assembler.accept(run, &route.key, clock::now, |parts| shared.tun.write(parts));
    shared.counting.drop_many(DropReason::Incomplete, assembler.take_incomplete());
    let delivered = delivered?;
    if delivered.segments > 0 {
        shared.counting.ingress_bytes.add(delivered.bytes as u64);
        let wants_pinhole = shared.table.read().count_ingress(flow, delivered.bytes, delivered.segments);
        if wants_pinhole {
            shared.send_pinhole(flow);
        }
        shared.report(flow, Direction::Ingress, delivered.flags);
    }
    Ok(())
}

fn miss<C>(shared: &Shared<C>, from: SocketAddr, datagram: &[u8]) {
    shared.counting.ingress_misses.add(1);
    if let Err(reason) = shared.backlog.datagram(from, datagram) {
        shared.counting.drop(reason);
    }
}
