//! Processes of an `upgrading-server` beside a scenario ([`crate::traffic`]).

use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use crate::host::Host;
use crate::program::{Program, wait_for};
use crate::traffic::Step;

/// Until a process has said what is waited for.
const LIMIT: Duration = Duration::from_secs(20);

/// One process of the server.
pub struct Serving {
    /// The process.
    pub program: Program,
}

impl Serving {
    /// Starts one that gives and takes sockets of `service`; its log has `name`.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn start(host: &Host, service: &str, name: &str, options: &[&str]) -> Result<Self> {
        let command = host.traffic(["upgrading-server", "--service", service].iter().chain(options))?;
        Ok(Self { program: Program::start(command, &host.dir.join(format!("upgrading-{name}.log")))? })
    }

    /// What it has said so far.
    pub fn steps(&self) -> Vec<Step> {
        // The last line may be half-written.
        self.program.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Waits until it has said something so often.
    ///
    /// # Errors
    ///
    /// It does not; the message has what it said.
    pub fn await_step(&mut self, what: &str, times: usize, is_meant: impl Fn(&Step) -> bool) -> Result<()> {
        self.await_step_for(LIMIT, what, times, is_meant)
    }

    /// The same, for so long.
    ///
    /// # Errors
    ///
    /// As for [`await_step`](Self::await_step).
    pub fn await_step_for(
        &mut self,
        limit: Duration,
        what: &str,
        times: usize,
        is_meant: impl Fn(&Step) -> bool,
    ) -> Result<()> {
        wait_for(what, limit, || {
            let steps = self.steps();
            let found = steps.iter().filter(|step| is_meant(step)).count();
            let ended = self.program.ended()?;
            ensure!(found >= times, "{found} times; it has come to {steps:?}, ended: {ended:?}");
            Ok(())
        })
    }

    /// Why it has kept its listening socket, each time.
    pub fn refusals(&self) -> Vec<Option<i32>> {
        let listening = |step: Step| match step {
            Step::Keeps { listening: true, errno, .. } => Some(errno),
            _ => None,
        };
        self.steps().into_iter().filter_map(listening).collect()
    }

    /// Tells it to give what it has, and waits until it has begun with that: for the so-manyth time.
    ///
    /// # Errors
    ///
    /// It does not begin.
    pub fn give(&mut self, times: usize) -> Result<()> {
        self.program.signal(Signal::SIGTERM)?;
        self.await_step("a server that gives", times, |step| *step == Step::Gives)
    }

    /// Waits until it has kept its listening socket so often, and gives the last reason.
    ///
    /// # Errors
    ///
    /// It has not.
    pub fn await_refusal(&mut self, times: usize) -> Result<Option<i32>> {
        let is_refusal = |step: &Step| matches!(step, Step::Keeps { listening: true, .. });
        self.await_step("a server that keeps what it has", times, is_refusal)?;
        Ok(self.refusals().last().copied().flatten())
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Told to end as others are, it would look for somebody to give its sockets to.
        if matches!(self.program.ended(), Ok(None)) {
            let _ = self.program.signal(Signal::SIGKILL);
        }
    }
}
