//! Datagrams as fast as they go over one connected socket, one a call or by `UDP_SEGMENT`, and a program that says how
//! many bytes of them have come.

use std::io::Read;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use nix::sys::socket::{setsockopt, sockopt};
use serde::{Deserialize, Serialize};

use super::{any_of, now_ms};
use crate::host::write_line;

/// The most that one call takes of datagrams over IPv4, in bytes.
const CALL_MAX: usize = 65_000;
/// The sink's own queue, in bytes: what comes while another program has the processor.
const RECEIVE_BUFFER: usize = 8 << 20;
/// A line is said for so long a time.
const SLICE_MS: u64 = 10;

/// What to send, and how.
#[derive(Clone, Debug, Args)]
pub struct Plan {
    /// Server's name or address
    pub host: String,
    /// Server's port
    pub port: u16,
    /// Payload of each
    #[arg(long)]
    pub bytes: u16,
    /// Datagrams of one call; more than one go by `UDP_SEGMENT`
    #[arg(long)]
    pub batch: usize,
}

/// What has come since the beginning.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Poured {
    /// Now, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Bytes of payload.
    pub bytes: u64,
}

/// Sends until its input ends.
pub fn pour(plan: &Plan) -> Result<()> {
    let len = usize::from(plan.bytes) * plan.batch;
    ensure!((1..=CALL_MAX).contains(&len), "a call sends from 1 to {CALL_MAX} bytes");
    let to = (plan.host.as_str(), plan.port).to_socket_addrs();
    let to = to.with_context(|| format!("cannot resolve {}", plan.host))?.next().context("no address")?;
    let socket = UdpSocket::bind((any_of(to.ip()), 0)).context("cannot bind a UDP socket")?;
    socket.connect(to).context("cannot connect a UDP socket")?;
    if plan.batch > 1 {
        setsockopt(&socket, sockopt::UdpGsoSegment, &plan.bytes.into()).context("the kernel has no UDP_SEGMENT")?;
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    std::thread::spawn(move || {
        // Whatever is said, or that nobody is there any more, ends it.
        let _ = std::io::stdin().read(&mut [0; 1]);
        over.store(true, Ordering::Relaxed);
    });
    let datagrams = vec![b'm'; len];
    while !is_over.load(Ordering::Relaxed) {
        // What a full queue refuses is as lost as what it drops later.
        let _ = socket.send(&datagrams);
    }
    Ok(())
}

/// Counts until it is killed; prints a [`Poured`] as JSON for every 10 ms in which something came.
pub fn sink(listen: SocketAddr) -> Result<()> {
    let socket = UdpSocket::bind(listen).with_context(|| format!("cannot bind {listen}"))?;
    setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).context("cannot enlarge the sink's queue")?;
    // Several datagrams by one call, where they came together.
    setsockopt(&socket, sockopt::UdpGroSegment, &true).context("the kernel has no UDP_GRO")?;
    socket.set_read_timeout(Some(Duration::from_millis(SLICE_MS)))?;
    write_line("ready")?;
    let mut buffer = vec![0; 1 << 16];
    let mut poured = Poured::default();
    let mut told = 0;
    loop {
        poured.bytes += socket.recv(&mut buffer).unwrap_or_default() as u64;
        let unix_ms = now_ms() as u64;
        if unix_ms >= poured.unix_ms + SLICE_MS && poured.bytes > told {
            poured.unix_ms = unix_ms;
            told = poured.bytes;
            write_line(&serde_json::to_string(&poured)?)?;
        }
    }
}
