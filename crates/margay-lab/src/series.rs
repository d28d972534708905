//! Lines of JSON that traffic programs print beside a scenario, as they come.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::de::DeserializeOwned;

use crate::host::Host;
use crate::program::wait_for;

/// A program, and what it has printed so far. It ends when this is dropped.
pub struct Series<T> {
    child: Child,
    lines: Arc<Mutex<Vec<T>>>,
    reading: Option<JoinHandle<()>>,
}

impl<T: Clone + DeserializeOwned + Send + 'static> Series<T> {
    /// Starts a traffic program.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn start(host: &Host, words: &[String]) -> Result<Self> {
        let mut command = host.traffic(words)?;
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start traffic")?;
        let output = BufReader::new(child.stdout.take().context("the traffic has no output")?);
        let lines = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&lines);
        // Ends with the program.
        let reading = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Ok(line) = serde_json::from_str(&line) {
                    kept.lock().unwrap_or_else(PoisonError::into_inner).push(line);
                }
            }
        });
        Ok(Self { child, lines, reading: Some(reading) })
    }

    /// All so far.
    pub fn lines(&self) -> Vec<T> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends the program a signal.
    ///
    /// # Errors
    ///
    /// It is gone already.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).context("cannot signal the traffic")
    }

    /// How many of those so far are meant.
    pub fn count(&self, is_meant: impl Fn(&T) -> bool) -> usize {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|line| is_meant(line)).count()
    }

    /// Ends the input of a program that goes on until then, waits for its end, and gives all that it has printed.
    ///
    /// # Errors
    ///
    /// It takes longer than `limit`, or fails.
    pub fn finish(mut self, limit: Duration) -> Result<Vec<T>> {
        drop(self.child.stdin.take());
        let status = wait_for("the traffic's end", limit, || match self.child.try_wait()? {
            Some(status) => Ok(status),
            None => bail!("it goes on"),
        })?;
        if !status.success() {
            bail!("the traffic failed ({status})");
        }
        // Its output has ended with it. A reader that ended badly has read what there is.
        let _ = self.reading.take().map(JoinHandle::join);
        Ok(self.lines())
    }
}

impl<T> Drop for Series<T> {
    fn drop(&mut self) {
        // One that is gone already is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
