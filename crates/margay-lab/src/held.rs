//! Connections to an echo server that are held open beside a scenario, and used when it says so ([`crate::traffic`]).

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::host::Host;

/// The program that holds them.
pub struct Held {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    last: Value,
    wanted: usize,
}

impl Held {
    /// Opens so many to port 7 of a name or an address. Returns when all are open, or will not be.
    ///
    /// # Errors
    ///
    /// The program cannot be started.
    pub fn open(client: &Host, to: &str, count: usize) -> Result<Self> {
        let mut command = client.traffic(["flows", to, "7", "--count", &count.to_string()])?;
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot hold connections")?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("the program has no output")?);
        let mut held = Self { child, orders, answers, last: Value::Null, wanted: count };
        held.read()?;
        Ok(held)
    }

    fn read(&mut self) -> Result<()> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("the program that holds connections has ended");
        }
        self.last = serde_json::from_str(&line).with_context(|| format!("it said {line:?}"))?;
        Ok(())
    }

    fn number(&self, field: &str) -> f64 {
        self.last[field].as_f64().unwrap_or_default()
    }

    /// How many are open.
    pub fn open_count(&self) -> f64 {
        self.number("open")
    }

    /// How often one of them has said something and was answered.
    pub fn exchanges(&self) -> f64 {
        self.number("exchanges")
    }

    /// What it said last, for a message.
    pub fn said(&self) -> String {
        self.last.to_string()
    }

    /// Says something on each of them, in a random order.
    ///
    /// # Errors
    ///
    /// The program has ended. A connection that fails is not an error.
    pub fn round(&mut self) -> Result<()> {
        let orders = self.orders.as_mut().context("the program has no input")?;
        writeln!(orders).context("the program that holds connections has ended")?;
        self.read()
    }

    /// Closes all of them. Gives how many were lost, or failed once, in all of its time.
    ///
    /// # Errors
    ///
    /// The program does not end as it should.
    pub fn end(mut self) -> Result<f64> {
        drop(self.orders.take());
        self.read()?;
        self.child.wait().context("the program that holds connections does not end")?;
        let missing = self.wanted as f64 - self.open_count();
        Ok(self.number("failed").max(missing))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // One that is gone already is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
