//! Round trips of one byte.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;

use crate::host::write_line;
use crate::report::{median, percentile};

const WARM_UP: usize = 200;

/// Prints the median and the 99th percentile in microseconds.
pub fn measure(host: &str, port: u16, count: usize) -> Result<()> {
    let mut stream = TcpStream::connect((host, port)).with_context(|| format!("cannot connect to {host}:{port}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut times_us = Vec::with_capacity(count);
    let mut byte = [0];
    for number in 0..WARM_UP + count {
        let start = Instant::now();
        stream.write_all(&[number as u8])?;
        stream.read_exact(&mut byte).context("no answer")?;
        if number >= WARM_UP {
            times_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    write_line(&json!({"median_us": median(&times_us), "p99_us": percentile(&times_us, 99.0)}).to_string())
}
