//! Connections to a name, one after the other, with the moment of each and who answered.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::host::write_line;

const PATIENCE: Duration = Duration::from_secs(5);
/// Between two connections.
const PAUSE: Duration = Duration::from_millis(15);

/// One connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Landing {
    /// When `connect()` was called, on the machine's monotonic clock, in microseconds.
    pub start_us: u64,
    /// What was answered.
    pub answer: String,
    /// Why there was no answer; empty otherwise.
    pub error: String,
}

/// Microseconds on the machine's monotonic clock, which all processes share.
pub fn now_us() -> u64 {
    // The clock is there on every Linux.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// Connects, asks, prints a [`Landing`] as a line of JSON, and again, until it is killed. The name is looked up once, as by a
/// program that runs for long.
pub fn repeat(host: &str, port: u16, ask: &str) -> Result<()> {
    let to = (host, port).to_socket_addrs().with_context(|| format!("cannot resolve {host}"))?.next();
    let to = to.with_context(|| format!("{host} has no address"))?;
    let ask = ask.replace("\\r\\n", "\r\n");
    loop {
        let start_us = now_us();
        let (answer, error) = match land(to, &ask) {
            Ok(answer) => (answer, String::new()),
            Err(error) => (String::new(), error.to_string()),
        };
        write_line(&serde_json::to_string(&Landing { start_us, answer, error })?)?;
        std::thread::sleep(PAUSE);
    }
}

fn land(to: SocketAddr, ask: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(ask.as_bytes())?;
    let mut answer = Vec::new();
    let mut part = [0; 1024];
    // Until the other end closes; memcached's end is a line.
    loop {
        match stream.read(&mut part)? {
            0 => break,
            count => answer.extend_from_slice(&part[..count]),
        }
        if answer.ends_with(b"END\r\n") {
            break;
        }
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
