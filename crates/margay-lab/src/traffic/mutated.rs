//! Datagrams of framed connections, mutated: to a switch that must take none of them amiss.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use margay_sdk::Options;
use margay_wire::sctp::{IDataFlags, IDataRepr, PacketWriter};
use margay_wire::{Framed, FramedTerms};
use tokio::net::UdpSocket;
use tokio::time::timeout;

use crate::host::write_line;
use crate::pump::Dice;

/// So long at most until the switch answers.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// A question is repeated after so long.
const AGAIN: Duration = Duration::from_millis(200);
/// Datagrams before the sender yields: sockets hold not many more.
const BURST: usize = 64;
const TERMS: FramedTerms = FramedTerms { tsn: 7, window_bytes: 1 << 16, window: 64, streams: 16 };

/// Sends so many to the switch of a name, on a connection of its own that is begun anew whenever the switch has ended
/// it. Prints how many connections that took, when the switch answers still.
pub async fn send(name: &str, count: usize) -> Result<()> {
    let connected = Options::new().connect_datagrams(name).await.with_context(|| format!("nobody serves {name}"))?;
    let socket = connected.into_udp();
    let mut dice = Dice::new(1);
    let mut number = 1;
    let mut tsn = begin(&socket, number).await?;
    for sent in 0..count {
        if sent % BURST == 0 && is_ended(&socket) {
            number += 1;
            tsn = begin(&socket, number).await?;
        }
        let mut datagram = sound(number, tsn, &mut dice);
        tsn = tsn.wrapping_add(1);
        mutate(&mut datagram, &mut dice);
        // What there is no room for is lost, as on the way.
        let _ = socket.send(&datagram).await;
        if sent % BURST == 0 {
            tokio::task::yield_now().await;
        }
    }
    begin(&socket, number + 1).await?;
    write_line(&number.to_string())
}

/// Begins a connection, and waits for the answer. Gives the first number of what is sent.
async fn begin(socket: &UdpSocket, number: u64) -> Result<u32> {
    let hello = emitted(number, &Framed::Hello { terms: TERMS, host: [0; 16], protocol: 0 });
    let since = Instant::now();
    let mut datagram = [0; 2048];
    while since.elapsed() < ANSWER_LIMIT {
        socket.send(&hello).await?;
        while let Ok(Ok(len)) = timeout(AGAIN, socket.recv(&mut datagram)).await {
            if matches!(Framed::parse(&datagram[..len]), Ok((of, Framed::Welcome { .. })) if of == number) {
                return Ok(TERMS.tsn);
            }
        }
    }
    bail!("the switch does not answer within {ANSWER_LIMIT:?}")
}

/// Whether the switch has ended the connection; reads all that has come.
fn is_ended(socket: &UdpSocket) -> bool {
    let mut datagram = [0; 2048];
    let mut is_ended = false;
    while let Ok(len) = socket.try_recv(&mut datagram) {
        is_ended |= matches!(Framed::parse(&datagram[..len]), Ok((_, Framed::Abort { .. })));
    }
    is_ended
}

fn emitted(number: u64, says: &Framed<'_>) -> Vec<u8> {
    let mut bytes = vec![0; says.len()];
    let _ = says.emit(number, &mut bytes);
    bytes
}

/// A request, or an acknowledgement, as framers send them.
fn sound(number: u64, tsn: u32, dice: &mut Dice) -> Vec<u8> {
    let mut bytes = vec![0; 600];
    let Some(value) = Framed::begin_data(number, &mut bytes) else { return bytes };
    let mut packet = PacketWriter::new(value);
    let flags = IDataFlags::BEGIN | IDataFlags::END;
    let repr = IDataRepr { flags, tsn, stream: 0, mid: tsn.wrapping_sub(TERMS.tsn), number: 0 };
    let frame = [&tsn.to_be_bytes()[..], &[0; 4], b"get key:1\r\n"].concat();
    // There is room for both.
    let _ = packet.i_data(&repr, &frame);
    if dice.below(4) == 0 {
        let _ = packet.sack(dice.below(1 << 16) as u32, 1 << 16, std::iter::empty());
    }
    let len = packet.len() + margay_wire::FRAMED_HEADER_LEN;
    bytes.truncate(len);
    bytes
}

/// Other bytes, another length, or a length inside that is a lie. The number of the connection stays mostly.
fn mutate(datagram: &mut Vec<u8>, dice: &mut Dice) {
    let from = if dice.below(16) == 0 { 0 } else { margay_wire::FRAMED_HEADER_LEN };
    for _ in 0..=dice.below(4) {
        let at = from + dice.below(datagram.len().saturating_sub(from));
        let last = datagram.len() - 1;
        datagram[at.min(last)] = dice.roll() as u8;
    }
    match dice.below(8) {
        0 => datagram.truncate(1 + dice.below(datagram.len() - 1)),
        1 => datagram.extend(std::iter::repeat_n(dice.roll() as u8, dice.below(1000))),
        // Where a chunk says how long it is.
        2 => datagram[margay_wire::FRAMED_HEADER_LEN + 2..][..2].copy_from_slice(&(dice.roll() as u16).to_be_bytes()),
        _ => {}
    }
}
