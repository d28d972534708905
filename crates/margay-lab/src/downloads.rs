//! Downloads that run beside a scenario ([`crate::traffic`]): how far they are, and what became of each.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::host::Host;
use crate::program::wait_for;
use crate::scenario::Findings;
pub use crate::traffic::Download;

/// How many, of what, how fast.
#[derive(Clone, Copy, Debug)]
pub struct Order<'a> {
    /// Server's name or address.
    pub host: &'a str,
    /// File on the server, without the first slash.
    pub path: &'a str,
    /// Connections at once.
    pub count: usize,
    /// Bytes per second that each takes at most; 0: all that come.
    pub pace: u64,
}

/// The program that downloads.
pub struct Downloads {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    count: usize,
    results: Option<Vec<Download>>,
    bytes: f64,
}

/// How far they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Have begun to receive.
    pub open: usize,
    /// Received by all together.
    pub bytes: f64,
    /// Have ended.
    pub ended: usize,
}

impl Downloads {
    /// Starts them on a host.
    ///
    /// # Errors
    ///
    /// The program cannot be started.
    pub fn start(host: &Host, order: Order) -> Result<Self> {
        let (count, pace) = (order.count.to_string(), order.pace.to_string());
        let mut command =
            host.traffic(["download", order.host, "80", order.path, "--count", &count, "--pace", &pace])?;
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start downloads")?;
        let orders = child.stdin.take().context("the downloads have no input")?;
        let answers = BufReader::new(child.stdout.take().context("the downloads have no output")?);
        Ok(Self { child, orders, answers, count: order.count, results: None, bytes: 0.0 })
    }

    /// How far they are.
    ///
    /// # Errors
    ///
    /// The program has ended badly.
    pub fn progress(&mut self) -> Result<Progress> {
        if self.results.is_none() && writeln!(self.orders).is_ok() {
            let said = self.read()?;
            if said["downloads"].is_null() {
                let of = |field: &str| said[field].as_f64().unwrap_or_default();
                self.bytes = of("bytes");
                return Ok(Progress { open: of("open") as usize, bytes: self.bytes, ended: of("ended") as usize });
            }
        }
        Ok(Progress { open: self.count, bytes: self.bytes, ended: self.count })
    }

    /// Waits until `enough`.
    ///
    /// # Errors
    ///
    /// It does not come to that in time, or all end before.
    pub fn await_progress(
        &mut self,
        what: &str,
        limit: Duration,
        enough: impl Fn(Progress) -> bool,
    ) -> Result<Progress> {
        let count = self.count;
        let last = wait_for(what, limit, || {
            let progress = self.progress()?;
            // All that there will be has come then.
            if enough(progress) || progress.ended >= count { Ok(progress) } else { bail!("it is at {progress:?}") }
        })?;
        if enough(last) { Ok(last) } else { bail!("{what}: all downloads have ended before: {last:?}") }
    }

    /// Waits until all receive.
    ///
    /// # Errors
    ///
    /// They do not in time.
    pub fn await_open(&mut self, limit: Duration) -> Result<Progress> {
        let count = self.count;
        self.await_progress("the start of all downloads", limit, |progress| progress.open >= count)
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("the program that downloads has ended");
        }
        let said: Value = serde_json::from_str(&line).with_context(|| format!("the downloads said {line:?}"))?;
        if !said["downloads"].is_null() {
            let results: Vec<Download> = serde_json::from_value(said["downloads"].clone())?;
            self.bytes = results.iter().map(|result| result.bytes as f64).sum();
            self.results = Some(results);
        }
        Ok(said)
    }

    /// Waits for the end of all of them.
    ///
    /// # Errors
    ///
    /// The program fails, or takes too long.
    pub fn finish(mut self, limit: Duration) -> Result<Vec<Download>> {
        let count = self.count;
        self.await_progress("the end of all downloads", limit, |progress| progress.ended >= count)?;
        while self.results.is_none() {
            self.read()?;
        }
        self.child.wait().context("the downloads do not end")?;
        Ok(self.results.take().unwrap_or_default())
    }
}

impl Drop for Downloads {
    fn drop(&mut self) {
        // One that is gone already is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Counts what became of downloads: `failed`, `wrong_bytes` (whole, but not what the server has), `downloads`.
pub fn judge(what: &str, results: &[Download], sha256: &str, findings: &mut Findings) {
    for figure in ["failed", "wrong_bytes"] {
        findings.figures.add(figure, 0.0);
    }
    findings.figures.add("downloads", results.len() as f64);
    let mut said = 0;
    for result in results {
        let complaint = if !result.error.is_empty() {
            findings.figures.add("failed", 1.0);
            result.error.as_str()
        } else if result.sha256 != sha256 {
            findings.figures.add("wrong_bytes", 1.0);
            "the hash is another"
        } else {
            continue;
        };
        said += 1;
        // The first few tell as much as all of them.
        if said <= 3 {
            findings.note(format!("{what}: after {} bytes: {complaint}", result.bytes));
        }
    }
}

/// The longest time that one of them waited for the next bytes.
pub fn stall_ms_max(results: &[Download]) -> f64 {
    results.iter().map(|result| result.stall_ms).fold(0.0, f64::max)
}
