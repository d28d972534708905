//! Datagrams as fast as they go, from one unconnected socket, and programs that count them.

use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{any_of, now_ms};
use crate::host::write_line;

/// The clock is looked at once in so many datagrams.
const BETWEEN_LOOKS: u64 = 64;

/// What a sender did.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Blasted {
    /// Datagrams that the kernel took.
    pub sent: u64,
    /// Datagrams that it refused.
    pub refused: u64,
    /// In so many seconds.
    pub seconds: f64,
}

/// What came to a sink in a slice of time.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Slice {
    /// When the slice began, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Datagrams.
    pub count: u64,
}

/// Sends for `time` and prints [`Blasted`] as JSON.
pub fn blast(host: &str, port: u16, bytes: usize, time: Duration) -> Result<()> {
    let to = (host, port).to_socket_addrs().with_context(|| format!("cannot resolve {host}"))?;
    let to = to.into_iter().next().with_context(|| format!("{host} has no address"))?;
    let socket = UdpSocket::bind((any_of(to.ip()), 0)).context("cannot bind a UDP socket")?;
    let payload = vec![b'm'; bytes];
    let (start, mut sent, mut refused) = (Instant::now(), 0_u64, 0_u64);
    while (sent + refused) % BETWEEN_LOOKS != 0 || start.elapsed() < time {
        match socket.send_to(&payload, to) {
            Ok(_) => sent += 1,
            Err(_) => refused += 1,
        }
    }
    let found = Blasted { sent, refused, seconds: start.elapsed().as_secs_f64() };
    write_line(&serde_json::to_string(&found)?)
}

/// Counts until it is killed; prints a [`Slice`] as JSON for every 10 ms in which something came.
pub fn sink(listen: SocketAddr) -> Result<()> {
    let socket = UdpSocket::bind(listen).with_context(|| format!("cannot bind {listen}"))?;
    socket.set_read_timeout(Some(Duration::from_millis(10)))?;
    write_line("ready")?;
    let mut buffer = [0; 2048];
    let mut slice = Slice { unix_ms: 0, count: 0 };
    loop {
        let came = socket.recv(&mut buffer).is_ok();
        let unix_ms = now_ms() as u64 / 10 * 10;
        if slice.unix_ms != unix_ms && slice.count > 0 {
            write_line(&serde_json::to_string(&slice)?)?;
            slice.count = 0;
        }
        slice.unix_ms = unix_ms;
        slice.count += u64::from(came);
    }
}
