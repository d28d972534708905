//! Connections that keep coming beside a scenario ([`crate::traffic`]), and what became of each.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::host::Host;
pub use crate::traffic::{Arrival, now_ms};

/// Sleeps until a moment as [`now_ms`] has it: for what is to happen at its time, or not at all.
pub fn sleep_until(at_ms: f64) {
    std::thread::sleep(Duration::from_secs_f64((at_ms - now_ms()).max(0.0) / 1e3));
}

/// The program that connects again and again.
pub struct Arrivals {
    child: Child,
    input: Option<ChildStdin>,
    ended: Receiver<Arrival>,
    all: BTreeMap<u64, Arrival>,
    /// All numbers below this one have ended.
    unbroken: u64,
}

impl Arrivals {
    /// Begins a connection every so often, to a server that greets with its name, or is asked for it.
    ///
    /// # Errors
    ///
    /// The program cannot be started.
    pub fn start(host: &Host, name: &str, port: u16, every: Duration, ask: Option<&str>) -> Result<Self> {
        let options = ask.map(|ask| ["--ask", ask]);
        Self::start_as(host, name, port, every, options.as_ref().map_or(&[][..], |options| &options[..]))
    }

    /// As [`start`](Self::start), with so many at once and no more: where that is too much for the machine, there are
    /// fewer.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub fn start_at_most(
        at_most: usize,
        host: &Host,
        (name, port): (&str, u16),
        every: Duration,
        ask: &str,
    ) -> Result<Self> {
        Self::start_as(host, name, port, every, &["--ask", ask, "--at-most", &at_most.to_string()])
    }

    fn start_as(host: &Host, name: &str, port: u16, every: Duration, options: &[&str]) -> Result<Self> {
        let (port, every) = (port.to_string(), every.as_millis().to_string());
        let mut command = host.traffic(["arrivals", name, &port, "--every-ms", &every])?;
        command.args(options);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start connections")?;
        let lines = BufReader::new(child.stdout.take().context("the connections have no output")?).lines();
        let (sender, ended) = mpsc::channel();
        // Ends with the program, or with whoever wants to know.
        std::thread::spawn(move || {
            let arrivals = lines.map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok());
            arrivals.into_iter().try_for_each(|arrival| sender.send(arrival))
        });
        let input = child.stdin.take();
        Ok(Self { child, input, ended, all: BTreeMap::new(), unbroken: 0 })
    }

    /// Begins no more. Returns when all have ended that have begun.
    ///
    /// # Errors
    ///
    /// The program is none of ours.
    pub fn stop(&mut self) -> Result<()> {
        drop(self.input.take());
        self.child.wait().map(drop).context("connections that do not end")
    }

    /// All so far, when everything has ended that began before a moment ([`now_ms`]), and something that began later,
    /// too.
    ///
    /// # Errors
    ///
    /// It takes longer than `limit`, or the program has ended.
    pub fn until(&mut self, begun_ms: f64, limit: Duration) -> Result<impl Iterator<Item = &Arrival>> {
        let deadline = Instant::now() + limit;
        while self.all.get(&self.unbroken.wrapping_sub(1)).is_none_or(|last| last.begun_ms <= begun_ms) {
            let rest = deadline.saturating_duration_since(Instant::now());
            let arrival = self.ended.recv_timeout(rest).context("connections that keep coming: not in time")?;
            self.all.insert(arrival.number, arrival);
            while self.all.contains_key(&self.unbroken) {
                self.unbroken += 1;
            }
        }
        Ok(self.all.values())
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        // One that is gone already is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
