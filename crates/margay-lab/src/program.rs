//! A program that runs beside the scenario, and ends with it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const PATIENCE: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(5);

/// A running program; dropping the handle ends it.
pub struct Program {
    child: Child,
    log: PathBuf,
}

impl Program {
    /// Starts `command` with its output in `log`.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn start(mut command: Command, log: &Path) -> Result<Self> {
        let file = File::options().create(true).append(true).open(log);
        let file = file.with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .stdout(file.try_clone().context("no descriptor left")?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {:?}", command.get_program()))?;
        Ok(Self { child, log: log.to_owned() })
    }

    /// Its process id, as seen in the lab.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Whether it has ended.
    ///
    /// # Errors
    ///
    /// The kernel does not know it.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("cannot ask for a program's state")
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// It takes longer than `limit`, or fails; the message has its log's end.
    pub fn finish(&mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            match self.ended()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("{} failed ({status}): {}", self.log.display(), tail(&self.log())),
                None if Instant::now() > deadline => {
                    bail!("{} did not end within {limit:?}: {}", self.log.display(), tail(&self.log()))
                }
                None => std::thread::sleep(POLL),
            }
        }
    }

    /// Sends a signal.
    ///
    /// # Errors
    ///
    /// It is gone already.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).context("cannot signal a program")
    }

    /// Asks it to end, and ends it if it does not.
    pub fn stop(&mut self) {
        if matches!(self.ended(), Ok(None)) && self.signal(Signal::SIGTERM).is_ok() {
            let deadline = Instant::now() + PATIENCE;
            while matches!(self.ended(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(POLL);
            }
        }
        // One that is gone already is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The last lines of a log, for a message.
pub fn tail(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(8)..].join("\n")
}

/// Polls until `ready` gives something. For what tells us no other way.
///
/// # Errors
///
/// It does not within `limit`; the message has the last reason.
pub fn wait_for<T>(what: &str, limit: Duration, mut ready: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        match ready() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() > deadline => {
                return Err(error.context(format!("{what}: not within {limit:?}")));
            }
            Err(_) => std::thread::sleep(POLL),
        }
    }
}

/// Runs a command to its end, whatever its status, with its output.
///
/// # Errors
///
/// It cannot be started, or takes longer than `limit`.
pub fn output_within(command: &mut Command, limit: Duration) -> Result<Output> {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let pid = Pid::from_raw(child.id().cast_signed());
    let (done, waiting) = mpsc::channel::<()>();
    // The thread ends the program when nobody says in time that it is done.
    let guard = std::thread::spawn(move || {
        let late = waiting.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout);
        if late {
            // One that ended just now is what we want.
            let _ = kill(pid, Signal::SIGKILL);
        }
        late
    });
    let output = child.wait_with_output().context("cannot wait for a program")?;
    drop(done);
    if guard.join().unwrap_or(false) {
        bail!("{command:?} did not end within {limit:?}");
    }
    Ok(output)
}
