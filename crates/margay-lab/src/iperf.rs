//! iperf3 by name and over plain TCP between the same two hosts, alternating, with the same congestion control.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::progress;
use crate::host::Host;
use crate::observe;
use crate::program::{Program, output_within, wait_for};
use crate::report::median;
use crate::scenario::Findings;

/// Where the server listens.
pub const PORT: u16 = 5201;
/// Pairs of runs per figure: short ones and many, since what else the machine does changes from one second to the next.
const PAIRS: usize = 11;
const SECONDS: u32 = 1;
/// Left out at the start of each run: slow start.
const OMITTED_SECONDS: u32 = 1;
const RUN_LIMIT: Duration = Duration::from_secs(30);
const START_LIMIT: Duration = Duration::from_secs(5);

/// Starts the server on a host. Returns when it listens.
///
/// # Errors
///
/// iperf3 is not installed, or does not listen in time.
pub fn serve(server: &Host) -> Result<Program> {
    let program = server.spawn("iperf3", ["iperf3", "-s", "-p", &PORT.to_string()])?;
    await_listener(server, PORT)?;
    Ok(program)
}

/// Waits until an iperf3 server listens.
///
/// # Errors
///
/// It does not in time.
pub fn await_listener(server: &Host, port: u16) -> Result<()> {
    let filter = format!("sport = :{port}");
    wait_for("the iperf3 server", START_LIMIT, || {
        if server.run(["ss", "-Hltn", &filter])?.trim().is_empty() { bail!("nobody listens") } else { Ok(()) }
    })
}

/// What iperf3 shall do.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Connections at once.
    pub streams: u32,
    /// The server sends.
    pub reverse: bool,
}

/// By name to plain: medians.
#[derive(Clone, Copy, Debug)]
pub struct Ratios {
    /// Throughput.
    pub throughput: f64,
    /// Processor time of the whole machine per byte.
    pub busy_per_byte: f64,
}

/// The two ways to one server.
pub struct Ways<'a> {
    /// Where iperf3 starts.
    pub client: &'a Host,
    /// The server's own address.
    pub plain: &'a str,
    /// The virtual address of its name.
    pub named: &'a str,
}

/// One run, and what it took.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Throughput.
    pub gbit_per_s: f64,
    /// Processor time of the whole machine per byte.
    pub busy_ns_per_byte: f64,
}

/// Runs iperf3 on a host, to an address.
///
/// # Errors
///
/// It fails.
pub fn measure(client: &Host, address: &str, load: Load) -> Result<Run> {
    let busy_before = observe::machine_busy_seconds()?;
    let (port, streams, seconds) = (PORT.to_string(), load.streams.to_string(), SECONDS.to_string());
    let omitted = OMITTED_SECONDS.to_string();
    // Sockets that are told so late keep the pacing of a machine whose own choice is BBR; so both sides are told alike.
    let mut argv = vec!["iperf3", "-c", address, "-p", &port, "-C", "cubic", "-J", "--connect-timeout", "5000"];
    argv.extend(["-P", &streams, "-t", &seconds, "-O", &omitted]);
    argv.extend(load.reverse.then_some("-R"));
    let output = output_within(&mut client.command(argv), RUN_LIMIT)?;
    let busy = observe::machine_busy_seconds()? - busy_before;
    let answer: Value = serde_json::from_slice(&output.stdout).context("iperf3 did not answer with JSON")?;
    if let Some(error) = answer["error"].as_str() {
        bail!("iperf3 to {address}: {error}");
    }
    let received = &answer["end"]["sum_received"];
    let (bits_per_s, bytes) = (received["bits_per_second"].as_f64(), received["bytes"].as_f64());
    let (Some(bits_per_s), Some(bytes)) = (bits_per_s, bytes) else { bail!("iperf3 measured nothing: {answer}") };
    // What was left out at the start was carried too.
    let carried = bytes * f64::from(SECONDS + OMITTED_SECONDS) / f64::from(SECONDS);
    Ok(Run { gbit_per_s: bits_per_s / 1e9, busy_ns_per_byte: busy * 1e9 / carried.max(1.0) })
}

impl Ways<'_> {
    /// Runs pairs; `what` says in the notes what was compared.
    ///
    /// # Errors
    ///
    /// A run fails.
    pub fn compare(&self, load: Load, what: &str, findings: &mut Findings) -> Result<Ratios> {
        let (mut ratios, mut busy, mut plain_gbit, mut named_gbit) = (vec![], vec![], vec![], vec![]);
        for pair in 0..PAIRS {
            // Which goes first alternates, too: neither always meets the warmer machine.
            let (base, ours) = if pair % 2 == 0 {
                let base = self.run(self.plain, load)?;
                (base, self.run(self.named, load)?)
            } else {
                let ours = self.run(self.named, load)?;
                (self.run(self.plain, load)?, ours)
            };
            progress(&format!("{what}: plain {:.2} Gbit/s, by name {:.2} Gbit/s", base.gbit_per_s, ours.gbit_per_s));
            ratios.push(ours.gbit_per_s / base.gbit_per_s);
            busy.push(ours.busy_ns_per_byte / base.busy_ns_per_byte);
            plain_gbit.push(base.gbit_per_s);
            named_gbit.push(ours.gbit_per_s);
        }
        findings.notes.push(format!(
            "{what}: plain {:.2} Gbit/s, by name {:.2} Gbit/s (medians of {PAIRS} pairs; ratios {})",
            median(&plain_gbit),
            median(&named_gbit),
            ratios.iter().map(|ratio| format!("{ratio:.2}")).collect::<Vec<_>>().join(" ")
        ));
        Ok(Ratios { throughput: median(&ratios), busy_per_byte: median(&busy) })
    }

    fn run(&self, address: &str, load: Load) -> Result<Run> {
        measure(self.client, address, load)
    }
}
