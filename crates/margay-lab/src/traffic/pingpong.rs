//! Round trips of one byte.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::any_of;
use crate::host::write_line;
use crate::report::{median, percentile};

/// Not counted: what a connection does at its start is not what it does when it is established.
const WARM_UP: usize = 1000;
const PATIENCE: Duration = Duration::from_secs(5);

/// How long they took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RoundTrips {
    /// The middle, in microseconds.
    pub median_us: f64,
    /// All but one of a hundred are below.
    pub p99_us: f64,
}

/// Prints [`RoundTrips`] as JSON.
pub fn measure(host: &str, port: u16, count: usize, udp: bool) -> Result<()> {
    let to = (host, port).to_socket_addrs().with_context(|| format!("cannot resolve {host}"))?;
    let to = to.into_iter().next().with_context(|| format!("{host} has no address"))?;
    let times_us = if udp { datagrams(to, count)? } else { connection(to, count)? };
    let found = RoundTrips { median_us: median(&times_us), p99_us: percentile(&times_us, 99.0) };
    write_line(&serde_json::to_string(&found)?)
}

fn connection(to: SocketAddr, count: usize) -> Result<Vec<f64>> {
    let mut stream = TcpStream::connect(to).with_context(|| format!("cannot connect to {to}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    repeat(count, |byte| {
        stream.write_all(&[byte])?;
        let mut back = [0];
        stream.read_exact(&mut back).context("no answer")?;
        Ok(())
    })
}

fn datagrams(to: SocketAddr, count: usize) -> Result<Vec<f64>> {
    let socket = UdpSocket::bind((any_of(to.ip()), 0)).context("cannot bind a UDP socket")?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect(to).with_context(|| format!("cannot reach {to}"))?;
    repeat(count, |byte| {
        socket.send(&[byte])?;
        let mut back = [0];
        socket.recv(&mut back).context("no answer")?;
        Ok(())
    })
}

/// Microseconds that each exchange took.
fn repeat(count: usize, mut exchange: impl FnMut(u8) -> Result<()>) -> Result<Vec<f64>> {
    let mut times_us = Vec::with_capacity(count);
    for number in 0..WARM_UP + count {
        let start = Instant::now();
        exchange(number as u8)?;
        if number >= WARM_UP {
            times_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(times_us)
}
