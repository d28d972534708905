//! Connections that are set up and closed again, without a byte in them: how long `connect()` takes, and how many there are
//! per second.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::host::write_line;
use crate::report::{median, percentile};

const PATIENCE: Duration = Duration::from_secs(10);

/// How it went.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Connects {
    /// The middle of all times that `connect()` took, in microseconds.
    pub median_us: f64,
    /// All but one of a hundred took less.
    pub p99_us: f64,
    /// Connections per second, from the first to the last.
    pub per_s: f64,
    /// Connections that did not come about.
    pub failed: u64,
}

/// Prints [`Connects`] as JSON. `parallel` threads share the work.
pub fn measure(host: &str, port: u16, count: usize, parallel: usize) -> Result<()> {
    let to = (host, port).to_socket_addrs().with_context(|| format!("cannot resolve {host}"))?.next();
    let to = to.with_context(|| format!("{host} has no address"))?;
    let parallel = parallel.max(1);
    let (times_us, failed) = (Mutex::new(Vec::with_capacity(count)), Mutex::new(0));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for number in 0..parallel {
            let share = count / parallel + usize::from(number < count % parallel);
            let (times_us, failed) = (&times_us, &failed);
            scope.spawn(move || {
                let (mut own_us, own_failed) = connect(to, share);
                // Poisoned only by a panic, which ends the program anyhow.
                if let (Ok(mut times_us), Ok(mut failed)) = (times_us.lock(), failed.lock()) {
                    times_us.append(&mut own_us);
                    *failed += own_failed;
                }
            });
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    let times_us = times_us.into_inner().ok().context("a thread ended badly")?;
    let found = Connects {
        median_us: median(&times_us),
        p99_us: percentile(&times_us, 99.0),
        per_s: times_us.len() as f64 / seconds,
        failed: failed.into_inner().ok().context("a thread ended badly")?,
    };
    write_line(&serde_json::to_string(&found)?)
}

/// One after the other: microseconds of those that came about, and how many did not.
fn connect(to: SocketAddr, count: usize) -> (Vec<f64>, u64) {
    let (mut times_us, mut failed) = (Vec::with_capacity(count), 0);
    for _ in 0..count {
        let start = Instant::now();
        match TcpStream::connect_timeout(&to, PATIENCE) {
            Ok(_) => times_us.push(start.elapsed().as_secs_f64() * 1e6),
            Err(_) => failed += 1,
        }
    }
    (times_us, failed)
}
