//! Lines of JSON that traffic programs print beside a scenario, as they come.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;

use crate::host::Host;

/// A program, and what it has printed so far. It ends when this is dropped.
pub struct Series<T> {
    child: Child,
    lines: Arc<Mutex<Vec<T>>>,
}

impl<T: Clone + DeserializeOwned + Send + 'static> Series<T> {
    /// Starts a traffic program.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn start(host: &Host, words: &[String]) -> Result<Self> {
        let mut child = host.traffic(words)?.stdout(Stdio::piped()).spawn().context("cannot start traffic")?;
        let output = BufReader::new(child.stdout.take().context("the traffic has no output")?);
        let lines = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&lines);
        // Ends with the program.
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Ok(line) = serde_json::from_str(&line) {
                    kept.lock().unwrap_or_else(PoisonError::into_inner).push(line);
                }
            }
        });
        Ok(Self { child, lines })
    }

    /// All so far.
    pub fn lines(&self) -> Vec<T> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<T> Drop for Series<T> {
    fn drop(&mut self) {
        // One that is gone already is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
