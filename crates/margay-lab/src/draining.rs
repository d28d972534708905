//! `margay drain` that runs beside a scenario.

use std::io::Read;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::agent;
use crate::arrivals::now_ms;
use crate::host::Host;
use crate::program::wait_for;

/// How long it may take until the host says that it is drained.
const LIMIT: Duration = Duration::from_secs(20);

/// The command; it ends when this is dropped.
pub struct Drain {
    child: Child,
    /// When it was ordered, as [`now_ms`] has it.
    pub begun_ms: f64,
}

impl Drain {
    /// Starts `margay drain WORDS --json` on a host.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn start(host: &Host, words: &[&str]) -> Result<Self> {
        let begun_ms = now_ms();
        let mut command = agent::command(host, ["drain"].iter().chain(words).chain(&["--json"]).copied())?;
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("cannot start a drain")?;
        Ok(Self { child, begun_ms })
    }

    /// What it complains of, where it has ended.
    fn complaint(&mut self) -> String {
        let Ok(Some(status)) = self.child.try_wait() else { return "the command runs still".to_owned() };
        let mut said = String::new();
        if let Some(errors) = self.child.stderr.as_mut() {
            // What cannot be read is missing in a message.
            let _ = errors.read_to_string(&mut said);
        }
        format!("the command has ended ({status}): {}", said.trim())
    }

    /// Waits until the host says that it is drained of a service.
    ///
    /// # Errors
    ///
    /// It does not in time; the message has what the command complains of.
    pub fn await_drained(&mut self, host: &Host, service: &str) -> Result<()> {
        let drained = wait_for(&format!("the drain of {}", host.name()), LIMIT, || {
            ensure!(agent::is_drained(host, service)?, "it is not drained");
            Ok(())
        });
        drained.map_err(|error| error.context(self.complaint()))
    }

    /// Waits for its end, and gives what it reports.
    ///
    /// # Errors
    ///
    /// It takes longer than `limit`, or fails.
    pub fn finish(mut self, limit: Duration) -> Result<Value> {
        let status = wait_for("the end of a drain", limit, || self.child.try_wait()?.context("it goes on"))?;
        ensure!(status.success(), "{}", self.complaint());
        let mut said = String::new();
        self.child.stdout.take().context("a drain has no output")?.read_to_string(&mut said)?;
        serde_json::from_str(&said).with_context(|| format!("a drain said {said:?}"))
    }
}

impl Drop for Drain {
    fn drop(&mut self) {
        // One that is gone already is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
