//! Frames as a camera sends them: several datagrams at once, so many times a second. And a program that says which of
//! them have come whole and in time.

use std::collections::BTreeMap;
use std::io::Read;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use nix::sys::socket::{setsockopt, sockopt};
use serde::{Deserialize, Serialize};

use super::{any_of, now_ms};
use crate::host::write_line;

/// Run, number of the frame, place of the datagram, and when the frame was sent in milliseconds since 1970.
const HEAD: usize = 20;
/// A frame that is not whole by then is of no use, if nothing else is said.
pub const IN_TIME_MS: u32 = 100;
/// The sink's own queue, in bytes: a sink that has to wait for a processor loses nothing.
const RECEIVE_BUFFER: usize = 16 << 20;
/// Frames of a run that may be incomplete at once; older ones are forgotten.
const INCOMPLETE_MAX: usize = 64;

/// What to send, and how.
#[derive(Clone, Debug, Args)]
pub struct Plan {
    /// Server's name or address
    pub host: String,
    /// Server's port
    pub port: u16,
    /// Number of the run, which each datagram says
    #[arg(long)]
    pub run: u32,
    /// Frames a second
    #[arg(long, default_value_t = 30)]
    pub rate: u32,
    /// Datagrams of a frame, at most 32
    #[arg(long, default_value_t = 15)]
    pub datagrams: u16,
    /// Payload of each
    #[arg(long, default_value_t = 1390)]
    pub bytes: usize,
}

/// A frame that has come whole, in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whole {
    /// The run.
    pub run: u32,
    /// Its number.
    pub frame: u32,
    /// How long after it was sent.
    pub took_ms: u32,
}

/// How many frames were sent.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sent {
    /// Frames.
    pub frames: u32,
}

/// Sends until its input ends, then prints [`Sent`] as JSON.
pub fn send(plan: &Plan) -> Result<()> {
    ensure!(plan.bytes >= HEAD, "a datagram has at least {HEAD} bytes");
    ensure!((1..=32).contains(&plan.datagrams) && plan.rate > 0, "1 to 32 datagrams, at least once a second");
    let to = (plan.host.as_str(), plan.port).to_socket_addrs();
    let to = to.with_context(|| format!("cannot resolve {}", plan.host))?.next().context("no address")?;
    let socket = UdpSocket::bind((any_of(to.ip()), 0)).context("cannot bind a UDP socket")?;
    socket.connect(to).context("cannot connect a UDP socket")?;
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    std::thread::spawn(move || {
        // Whatever is said, or that nobody is there any more, ends it.
        let _ = std::io::stdin().read(&mut [0; 1]);
        over.store(true, Ordering::Relaxed);
    });
    let mut datagram = vec![0x5a; plan.bytes];
    let every = Duration::from_secs(1) / plan.rate;
    let start = Instant::now();
    let mut frames = 0;
    while !is_over.load(Ordering::Relaxed) {
        sleep((every * frames).saturating_sub(start.elapsed()));
        let sent_ms = now_ms() as u64;
        for place in 0..plan.datagrams {
            datagram[..4].copy_from_slice(&plan.run.to_be_bytes());
            datagram[4..8].copy_from_slice(&frames.to_be_bytes());
            datagram[8..10].copy_from_slice(&place.to_be_bytes());
            datagram[10..12].copy_from_slice(&plan.datagrams.to_be_bytes());
            datagram[12..HEAD].copy_from_slice(&sent_ms.to_be_bytes());
            // What a host refuses for a moment is lost, as in the network.
            let _ = socket.send(&datagram);
        }
        frames += 1;
    }
    write_line(&serde_json::to_string(&Sent { frames })?)
}

/// What has come of a run: by frame, which of its datagrams.
struct Run {
    in_time_ms: u32,
    frames: BTreeMap<u32, u32>,
}

impl Run {
    const fn new(in_time_ms: u32) -> Self {
        Self { in_time_ms, frames: BTreeMap::new() }
    }

    /// Takes note of a datagram; gives the frame if it is whole now, and in time.
    fn note(&mut self, datagram: &[u8], arrived_ms: u64) -> Option<Whole> {
        let word = |at: usize| datagram[at..at + 4].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let half = |at: usize| u32::from(u16::from_be_bytes([datagram[at], datagram[at + 1]]));
        let sent_ms = datagram[12..HEAD].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let frame = word(4);
        let place = half(8);
        let datagrams = half(10);
        if !(1..=32).contains(&datagrams) || place >= datagrams {
            return None;
        }
        let came = self.frames.entry(frame).or_default();
        let was_whole = came.count_ones() == datagrams;
        *came |= 1 << place;
        let is_whole = came.count_ones() == datagrams && !was_whole;
        while self.frames.len() > INCOMPLETE_MAX {
            self.frames.pop_first();
        }
        let took_ms = arrived_ms.saturating_sub(sent_ms);
        let is_in_time = took_ms <= u64::from(self.in_time_ms);
        (is_whole && is_in_time).then(|| Whole { run: word(0), frame, took_ms: took_ms as u32 })
    }
}

/// Says of each frame that comes whole and in time a [`Whole`] as JSON, until it is killed.
pub fn sink(listen: SocketAddr, in_time_ms: u32) -> Result<()> {
    let socket = UdpSocket::bind(listen).with_context(|| format!("cannot bind {listen}"))?;
    setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).context("cannot enlarge the sink's queue")?;
    write_line("ready")?;
    let mut buffer = [0; 2048];
    let mut runs: BTreeMap<u32, Run> = BTreeMap::new();
    loop {
        let Ok(len) = socket.recv(&mut buffer) else { continue };
        let Some(datagram) = buffer.get(..len).filter(|datagram| datagram.len() >= HEAD) else { continue };
        let run = u32::from_be_bytes([datagram[0], datagram[1], datagram[2], datagram[3]]);
        if let Some(whole) = runs.entry(run).or_insert(Run::new(in_time_ms)).note(datagram, now_ms() as u64) {
            write_line(&serde_json::to_string(&whole)?)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(frame: u32, place: u16) -> Vec<u8> {
        let mut datagram = vec![0; HEAD];
        datagram[3] = 7;
        datagram[4..8].copy_from_slice(&frame.to_be_bytes());
        datagram[8..10].copy_from_slice(&place.to_be_bytes());
        datagram[10..12].copy_from_slice(&3_u16.to_be_bytes());
        datagram[12..].copy_from_slice(&1000_u64.to_be_bytes());
        datagram
    }

    #[test]
    fn a_frame_counts_once_when_it_is_whole_in_time() {
        let mut run = Run::new(100);
        assert_eq!(run.note(&datagram(1, 0), 1010), None);
        assert_eq!(run.note(&datagram(1, 0), 1010), None, "it comes twice");
        assert_eq!(run.note(&datagram(1, 2), 1020), None);
        assert_eq!(run.note(&datagram(1, 1), 1030), Some(Whole { run: 7, frame: 1, took_ms: 30 }));
        assert_eq!(run.note(&datagram(1, 1), 1030), None);
        for place in 0..3 {
            assert_eq!(run.note(&datagram(2, place), 1101), None, "too late");
        }
        assert_eq!(run.note(&datagram(3, 3), 1000), None, "a place that no frame has");
        let mut patient = Run::new(220);
        let whole = (0..3).filter_map(|place| patient.note(&datagram(2, place), 1220)).count();
        assert_eq!(whole, 1, "in time for who waits longer");
    }
}
