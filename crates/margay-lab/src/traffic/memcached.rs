//! SETs by memcached's UDP protocol, so many at once, to as many addresses as there are partitions; and what a server
//! has taken.

use std::collections::{HashMap, VecDeque};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use margay_core::name::{ServiceId, key_tail};
use serde::{Deserialize, Serialize};

use super::any_of;
use crate::host::write_line;
use crate::traffic::now_ms;

/// A request without an answer for so long is lost.
const LOST: Duration = Duration::from_millis(50);
/// A line of figures is about so much time.
pub const SLOT: Duration = Duration::from_millis(20);
/// How often a reader looks at the clock.
const TICK: Duration = Duration::from_millis(1);
/// Request, number, count and zero, two bytes each.
const FRAME: usize = 8;

/// What became of requests in a stretch of time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Slot {
    /// Its end, as [`now_ms`] has it.
    pub at_ms: f64,
    /// Answers, by partition.
    pub answered: Vec<u32>,
    /// Requests that were given up.
    pub lost: u32,
    /// Answers that are not the one of a value that was taken.
    pub refused: u32,
}

/// What a server has taken so far.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Taken {
    /// When, as [`now_ms`] has it.
    pub at_ms: f64,
    /// SETs since its start; `None`: it does not run.
    pub sets: Option<u64>,
}

/// What to send.
pub struct Plan {
    /// Where: one address for each partition, a power of two of them.
    pub to: Vec<SocketAddr>,
    /// Requests at once, all partitions together.
    pub window: usize,
    /// Length of a value.
    pub bytes: usize,
}

struct Sender {
    plan: Plan,
    bits: u8,
    socket: UdpSocket,
    value: Vec<u8>,
    random: u64,
    next_id: u16,
    /// Partition and time of each request that waits.
    waiting: HashMap<u16, (usize, Instant)>,
    order: VecDeque<u16>,
    slot: Slot,
}

/// Sends until it is ended; prints a [`Slot`] as a line of JSON for each stretch of time.
pub fn send_sets(plan: Plan) -> Result<()> {
    anyhow::ensure!(plan.to.len().is_power_of_two(), "the number of addresses is no power of two");
    let mut sender = Sender::new(plan)?;
    let mut slot_ends = Instant::now() + SLOT;
    loop {
        sender.fill();
        sender.hear()?;
        if Instant::now() >= slot_ends {
            slot_ends += SLOT;
            let partitions = sender.plan.to.len();
            let fresh = Slot { answered: vec![0; partitions], ..Slot::default() };
            let mut slot = std::mem::replace(&mut sender.slot, fresh);
            slot.at_ms = now_ms();
            write_line(&serde_json::to_string(&slot)?)?;
        }
    }
}

fn socket(plan: &Plan) -> Result<UdpSocket> {
    let first = plan.to.first().context("no address")?;
    let socket = UdpSocket::bind((any_of(first.ip()), 0)).context("no UDP socket")?;
    socket.set_read_timeout(Some(TICK))?;
    Ok(socket)
}

impl Sender {
    fn new(plan: Plan) -> Result<Self> {
        let partitions = plan.to.len();
        Ok(Self {
            bits: u8::try_from(partitions.trailing_zeros())?,
            socket: socket(&plan)?,
            value: vec![b'v'; plan.bytes],
            random: u64::from(std::process::id()),
            next_id: 0,
            waiting: HashMap::new(),
            order: VecDeque::new(),
            slot: Slot { answered: vec![0; partitions], ..Slot::default() },
            plan,
        })
    }

    /// Sends as many requests as may wait. Keys are as they come, so that who is slow gets its share all the same.
    fn fill(&mut self) {
        while self.waiting.len() < self.plan.window {
            let key = self.key();
            let partition = self.partition_of(key.as_bytes());
            self.send(&key, partition);
        }
    }

    fn key(&mut self) -> String {
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        format!("k{:016x}", mixed ^ mixed >> 31)
    }

    fn partition_of(&self, key: &[u8]) -> usize {
        let mut id = [0; 32];
        id[12..].copy_from_slice(&key_tail(key));
        usize::from(ServiceId(id).partition(self.bits))
    }

    fn send(&mut self, key: &str, partition: usize) {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let mut datagram = id.to_be_bytes().to_vec();
        datagram.extend([0, 0, 0, 1, 0, 0]);
        // Writing to memory does not fail.
        let _ = write!(datagram, "set {key} 0 0 {}\r\n", self.value.len());
        datagram.extend_from_slice(&self.value);
        datagram.extend_from_slice(b"\r\n");
        // What cannot be sent is lost, like what is lost later.
        let _ = self.socket.send_to(&datagram, self.plan.to[partition]);
        self.waiting.insert(id, (partition, Instant::now()));
        self.order.push_back(id);
    }

    /// Takes what has come, and gives up what was lost.
    fn hear(&mut self) -> Result<()> {
        let mut datagram = [0; 2048];
        match self.socket.recv_from(&mut datagram) {
            Ok((length, _)) if length >= FRAME => {
                let id = u16::from_be_bytes([datagram[0], datagram[1]]);
                if let Some((partition, _)) = self.waiting.remove(&id) {
                    if datagram[FRAME..length].starts_with(b"STORED") {
                        self.slot.answered[partition] += 1;
                    } else {
                        self.slot.refused += 1;
                    }
                }
            }
            Ok(_) => {}
            // Nothing yet, a word about an earlier datagram that nobody took, or we were stopped and go on.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::ConnectionRefused | ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(error).context("cannot receive"),
        }
        while let Some(id) = self.order.front() {
            match self.waiting.get(id) {
                Some((_, sent)) if sent.elapsed() < LOST => break,
                Some(_) => {
                    self.slot.lost += 1;
                    self.waiting.remove(id);
                }
                None => {}
            }
            self.order.pop_front();
        }
        Ok(())
    }
}

/// Asks a memcached of this host every so often how many SETs it has taken, until it is ended; prints [`Taken`] as
/// lines of JSON.
pub fn watch_sets(port: u16, every: Duration) -> Result<()> {
    let mut server = None;
    let mut next = Instant::now();
    loop {
        let sets = ask(&mut server, port);
        if sets.is_none() {
            server = None;
        }
        write_line(&serde_json::to_string(&Taken { at_ms: now_ms(), sets })?)?;
        next += every;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

fn ask(server: &mut Option<BufReader<TcpStream>>, port: u16) -> Option<u64> {
    if server.is_none() {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
        stream.set_read_timeout(Some(LOST)).ok()?;
        *server = Some(BufReader::new(stream));
    }
    let server = server.as_mut()?;
    server.get_mut().write_all(b"stats\r\n").ok()?;
    let mut sets = None;
    loop {
        let mut line = String::new();
        server.read_line(&mut line).ok().filter(|length| *length > 0)?;
        match line.trim_end().split_once("cmd_set ") {
            Some((_, count)) => sets = count.parse().ok(),
            None if line.starts_with("END") => return sets,
            None => {}
        }
    }
}
