//! Connections that keep coming beside a scenario ([`crate::traffic`]), and what became of each.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::host::Host;
pub use crate::traffic::{Arrival, now_ms};

/// The program that connects again and again.
pub struct Arrivals {
    child: Child,
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
        let (port, every) = (port.to_string(), every.as_millis().to_string());
        let mut command = host.traffic(["arrivals", name, &port, "--every-ms", &every])?;
        command.args(ask.iter().flat_map(|ask| ["--ask", ask]));
        let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start connections")?;
        let lines = BufReader::new(child.stdout.take().context("the connections have no output")?).lines();
        let (sender, ended) = mpsc::channel();
        // Ends with the program, or with whoever wants to know.
        std::thread::spawn(move || {
            let arrivals = lines.map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok());
            arrivals.into_iter().try_for_each(|arrival| sender.send(arrival))
        });
        Ok(Self { child, ended, all: BTreeMap::new(), unbroken: 0 })
    }

    /// All so far, when everything has ended that began before a moment ([`now_ms`]), and something that began later, too.
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
