//! `margay run --drain`: a program whose names are drained before it is told to stop.

use std::future::pending;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus};

use miette::{IntoDiagnostic, Result};
use rustix::process::{Pid, Signal, kill_process};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinHandle, spawn_blocking};

use super::not_started;
use crate::cli::drainer::Drainer;

/// What shells add to the number of the signal that has ended a program.
const BY_SIGNAL: i32 = 128;

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
