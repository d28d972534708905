//! Numbered datagrams at an even rate over one connected socket, and a program that says what of them has come: how
//! many, in what order, and for how long nothing did.

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

/// Run and number.
const HEAD: usize = 12;
/// Datagrams go in bursts, so far apart.
const TICK: Duration = Duration::from_millis(1);
/// Datagrams of a burst at most: a sender that had to wait for a processor fills no queue.
const BURST: u64 = 64;
/// The sink's own queue, in bytes: a sink that has to wait for a processor loses nothing.
const RECEIVE_BUFFER: usize = 64 << 20;
/// A line is said for so long a time.
const SLICE_MS: u64 = 10;

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
    /// Datagrams a second; 0: as many as go
    #[arg(long)]
    pub rate: u64,
    /// Payload of each
    #[arg(long, default_value_t = 1472)]
    pub bytes: usize,
    /// Port to send from; 0: any
    #[arg(long, default_value_t = 0)]
    pub from: u16,
}

/// What a sender did.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sent {
    /// Datagrams that the kernel took.
    pub sent: u64,
}

/// What has come of a run: in a slice of time, and all in all until its end.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Came {
    /// The run.
    pub run: u32,
    /// When the slice began, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Datagrams in it.
    pub count: u64,
    /// The longest time without one that ended in it, in microseconds.
    pub longest_gap_us: u64,
    /// Different ones so far.
    pub received: u64,
    /// Those that came once more.
    pub duplicated: u64,
    /// Those that came behind a later one.
    pub reordered: u64,
    /// Those whose bytes were not the ones that were sent.
    pub wrong: u64,
    /// One more than the greatest number so far.
    pub next: u64,
}

/// What stands at a place of a datagram.
fn byte(number: u64, at: usize) -> u8 {
    (number.wrapping_mul(31).wrapping_add(at as u64) >> 1) as u8
}

fn fill(datagram: &mut [u8], run: u32, number: u64) {
    datagram[..4].copy_from_slice(&run.to_be_bytes());
    datagram[4..HEAD].copy_from_slice(&number.to_be_bytes());
    for (at, place) in datagram.iter_mut().enumerate().skip(HEAD) {
        *place = byte(number, at);
    }
}

/// Sends until its input ends, then prints [`Sent`] as JSON.
pub fn send(plan: &Plan) -> Result<()> {
    ensure!(plan.bytes >= HEAD, "a datagram has at least {HEAD} bytes");
    let to = (plan.host.as_str(), plan.port).to_socket_addrs();
    let to = to.with_context(|| format!("cannot resolve {}", plan.host))?.next().context("no address")?;
    let socket = UdpSocket::bind((any_of(to.ip()), plan.from)).context("cannot bind a UDP socket")?;
    socket.connect(to).context("cannot connect a UDP socket")?;
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    std::thread::spawn(move || {
        // Whatever is said, or that nobody is there any more, ends it.
        let _ = std::io::stdin().read(&mut [0; 1]);
        over.store(true, Ordering::Relaxed);
    });
    let mut datagram = vec![0; plan.bytes];
    let start = Instant::now();
    let mut sent = 0_u64;
    while !is_over.load(Ordering::Relaxed) {
        let due = match plan.rate {
            0 => sent + BURST,
            rate => ((start.elapsed().as_secs_f64() * rate as f64) as u64).min(sent + BURST),
        };
        while sent < due {
            fill(&mut datagram, plan.run, sent);
            // A full queue of this host is waited for; what a host refuses for a moment is sent again.
            if socket.send(&datagram).is_err() {
                break;
            }
            sent += 1;
        }
        if plan.rate > 0 {
            sleep(TICK);
        }
    }
    write_line(&serde_json::to_string(&Sent { sent })?)
}

/// One run, as the sink knows it.
#[derive(Default)]
struct Run {
    seen: Vec<u64>,
    next: u64,
    last: Option<Instant>,
    came: Came,
}

impl Run {
    fn note(&mut self, now: Instant, number: u64, is_right: bool) {
        let word = (number / 64) as usize;
        let bit = 1 << (number % 64);
        if self.seen.len() <= word {
            self.seen.resize(word + 1, 0);
        }
        let is_known = self.seen[word] & bit != 0;
        self.seen[word] |= bit;
        self.came.count += 1;
        self.came.received += u64::from(!is_known);
        self.came.duplicated += u64::from(is_known);
        self.came.reordered += u64::from(!is_known && number < self.next);
        self.came.wrong += u64::from(!is_right);
        self.next = self.next.max(number + 1);
        self.came.next = self.next;
        let gap = self.last.map_or(0, |last| now.duration_since(last).as_micros() as u64);
        self.came.longest_gap_us = self.came.longest_gap_us.max(gap);
        self.last = Some(now);
    }

    /// Says what has come in a slice, and begins the next one.
    fn say(&mut self, unix_ms: u64) -> Result<()> {
        if self.came.unix_ms == unix_ms {
            return Ok(());
        }
        if self.came.count > 0 {
            write_line(&serde_json::to_string(&self.came)?)?;
        }
        (self.came.unix_ms, self.came.count, self.came.longest_gap_us) = (unix_ms, 0, 0);
        Ok(())
    }
}

/// Counts until it is killed; prints a [`Came`] as JSON for every 10 ms in which something of a run came.
pub fn sink(listen: SocketAddr) -> Result<()> {
    let socket = UdpSocket::bind(listen).with_context(|| format!("cannot bind {listen}"))?;
    setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).context("cannot enlarge the sink's queue")?;
    socket.set_read_timeout(Some(Duration::from_millis(SLICE_MS)))?;
    write_line("ready")?;
    let mut buffer = [0; 2048];
    let mut runs: BTreeMap<u32, Run> = BTreeMap::new();
    loop {
        let received = socket.recv(&mut buffer);
        let now = Instant::now();
        let unix_ms = now_ms() as u64 / SLICE_MS * SLICE_MS;
        for run in runs.values_mut() {
            run.say(unix_ms)?;
        }
        let Some(datagram) = received.ok().and_then(|len| buffer.get(..len)) else { continue };
        let Some((head, rest)) = datagram.split_first_chunk::<HEAD>() else { continue };
        let run = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
        let number = head[4..].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let is_right = rest.iter().zip(HEAD..).all(|(found, at)| *found == byte(number, at));
        let fresh = || Run { came: Came { run, unix_ms, ..Came::default() }, ..Run::default() };
        runs.entry(run).or_insert_with(fresh).note(now, number, is_right);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_twice_or_late_or_wrong_is_told_apart() {
        let mut run = Run::default();
        let start = Instant::now();
        for (at, number) in [(0, 0), (1, 1), (2, 3), (9, 2), (10, 3), (11, 100)] {
            run.note(start + Duration::from_millis(at), number, number != 100);
        }
        let Came { count, received, duplicated, reordered, wrong, longest_gap_us, next, .. } = run.came;
        assert_eq!((count, received, duplicated, reordered, wrong, next), (6, 5, 1, 1, 1, 101));
        assert_eq!(longest_gap_us, 7000);
    }

    #[test]
    fn each_datagram_has_bytes_of_its_own() {
        let datagram = |number| {
            let mut datagram = [0; 40];
            fill(&mut datagram, 7, number);
            datagram
        };
        assert_ne!(datagram(1)[HEAD..], datagram(2)[HEAD..]);
        assert_eq!(datagram(0x0102)[..HEAD], [0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 1, 2]);
    }
}
