//! `margay run --drain`: a program whose names are drained before it is told to stop.

use std::future::pending;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use margay_control::api::v1::{DrainRequest, UndrainRequest};
use miette::{IntoDiagnostic, Result};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinHandle, JoinSet, spawn_blocking};

use super::{Client, not_started};

/// What shells add to the number of the signal that has ended a program.
const BY_SIGNAL: i32 = 128;

/// Drains the names of a program.
#[derive(Clone)]
pub(super) struct Drainer {
    pub client: Client,
    pub names: Vec<String>,
    /// How long connections that are there get to end.
    pub deadline: Duration,
    /// Those whose drain has begun by this: an operator may have drained others before.
    pub begun: Arc<Mutex<Vec<String>>>,
}

impl Drainer {
    /// Drains all names.
    async fn drain(self) {
        let mut draining = JoinSet::new();
        for name in &self.names {
            draining.spawn(self.clone().drain_name(name.clone()));
        }
        draining.join_all().await;
    }

    async fn drain_name(mut self, name: String) {
        let request = DrainRequest {
            name: name.clone(),
            deadline_ms: u64::try_from(self.deadline.as_millis()).unwrap_or(u64::MAX),
            when: "finish".to_owned(),
            last: true,
            dry_run: false,
            until_restart: true,
        };
        let drained = async {
            let mut reports = self.client.drain(request).await?.into_inner();
            self.begun.lock().push(name.clone());
            while reports.message().await?.is_some() {}
            Ok::<(), tonic::Status>(())
        };
        if let Err(error) = drained.await {
            eprintln!("margay: {name} is not drained: {}", error.message());
        }
    }

    /// The next start of the program serves the names again.
    async fn undrain(mut self) {
        let begun = std::mem::take(&mut *self.begun.lock());
        for name in begun {
            if let Err(error) = self.client.undrain(UndrainRequest { name }).await {
                eprintln!("margay: {}", error.message());
            }
        }
    }
}

/// Starts the program. SIGTERM is passed on to it when its names are drained, and at once when it comes a second time;
/// other signals that end or turn programs are passed on as they come. Ends as the program does.
pub(super) async fn run(mut command: Command, drainer: Drainer) -> Result<ExitCode> {
    let mut terminate = signal(SignalKind::terminate()).into_diagnostic()?;
    let mut hangup = signal(SignalKind::hangup()).into_diagnostic()?;
    // A terminal sends it to the program as well.
    let mut interrupt = signal(SignalKind::interrupt()).into_diagnostic()?;
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Ok(not_started(&command, &error)),
    };
    let process = Pid::from_child(&child);
    let mut ended = spawn_blocking(move || child.wait());
    let mut draining: Option<JoinHandle<()>> = None;
    let status = loop {
        tokio::select! {
            status = &mut ended => break status.into_diagnostic()?.into_diagnostic()?,
            Some(()) = terminate.recv() => match draining {
                None => draining = Some(tokio::spawn(drainer.clone().drain())),
                Some(_) => pass_on(process, Signal::TERM),
            },
            Some(()) = hangup.recv() => pass_on(process, Signal::HUP),
            Some(()) = interrupt.recv() => {}
            () = end_of(&mut draining) => {
                pass_on(process, Signal::TERM);
                // One that comes now is a second one.
                draining = Some(tokio::spawn(pending()));
            }
        }
    };
    if let Some(unfinished) = draining {
        unfinished.abort();
    }
    drainer.undrain().await;
    Ok(code_of(status))
}

/// Waits for the end of a drain, if there is one.
async fn end_of(draining: &mut Option<JoinHandle<()>>) {
    match draining {
        // Also of one that has broken down: the program is told to stop all the same.
        Some(draining) => drop(draining.await),
        None => pending().await,
    }
}

/// The program is there until its end was waited for, which nobody does before [`run`] ends.
fn pass_on(process: Pid, signal: Signal) {
    // It may have ended in this moment.
    let _ = kill_process(process, signal);
}

fn code_of(status: ExitStatus) -> ExitCode {
    let by_signal = || status.signal().map(|signal| BY_SIGNAL + signal);
    let code = status.code().or_else(by_signal).and_then(|code| u8::try_from(code).ok());
    code.map_or(ExitCode::FAILURE, ExitCode::from)
}
