//! Connections that are set up and closed again, without a byte in them: how long `connect()` takes, and how many there
//! are per second.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::host::write_line;
use crate::report::{median, percentile};

const PATIENCE: Duration = Duration::from_secs(10);

/// How it went.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Connects {
    /// The middle of all times that `connect()` took, in microseconds.
    pub median_us: f64,
    /// All but one of a hundred took less.
    pub p99_us: f64,
    /// Connections per second, from the first to the last.
    pub per_s: f64,
    /// Connections that did not come about.
    pub failed: u64,
    /// Why, of one of them; empty where there is none.
    pub error: String,
}

/// Prints [`Connects`] as JSON. `parallel` threads share the work.
pub fn measure(host: &str, port: u16, count: usize, parallel: usize) -> Result<()> {
    let to = (host, port).to_socket_addrs().with_context(|| format!("cannot resolve {host}"))?.next();
    let to = to.with_context(|| format!("{host} has no address"))?;
    let parallel = parallel.max(1);
    let (times_us, errors) = (Mutex::new(Vec::with_capacity(count)), Mutex::new(Vec::new()));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for number in 0..parallel {
            let share = count / parallel + usize::from(number < count % parallel);
            let (times_us, errors) = (&times_us, &errors);
            scope.spawn(move || {
                let (mut own_us, mut own_errors) = connect(to, share);
                // Poisoned only by a panic, which ends the program anyhow.
                if let (Ok(mut times_us), Ok(mut errors)) = (times_us.lock(), errors.lock()) {
                    times_us.append(&mut own_us);
                    errors.append(&mut own_errors);
                }
            });
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    let times_us = times_us.into_inner().ok().context("a thread ended badly")?;
    if !times_us.is_empty() {
        await_server(to).with_context(|| format!("{host} does not echo"))?;
    }
    let errors = errors.into_inner().ok().context("a thread ended badly")?;
    let found = Connects {
        median_us: median(&times_us),
        p99_us: percentile(&times_us, 99.0),
        per_s: times_us.len() as f64 / seconds,
        failed: errors.len() as u64,
        error: errors.first().map_or_else(String::new, |(took, error)| format!("after {took:.0?}: {error}")),
    };
    write_line(&serde_json::to_string(&found)?)
}

/// Ends when the server has taken all connections that were made: what it had not would fill its queue for whoever is
/// measured next, and a full queue costs a second.
fn await_server(to: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b".")?;
    stream.read_exact(&mut [0])
}

/// One after the other: microseconds of those that came about, and after how long others did not, and why.
fn connect(to: SocketAddr, count: usize) -> (Vec<f64>, Vec<(Duration, std::io::Error)>) {
    let (mut times_us, mut errors) = (Vec::with_capacity(count), Vec::new());
    for _ in 0..count {
        let start = Instant::now();
        match TcpStream::connect_timeout(&to, PATIENCE) {
            Ok(_) => times_us.push(start.elapsed().as_secs_f64() * 1e6),
            Err(error) => errors.push((start.elapsed(), error)),
        }
    }
    (times_us, errors)
}
