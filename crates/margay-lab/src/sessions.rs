//! Connections that talk to an `upgrading-server` all the time beside a scenario ([`crate::traffic`]).

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::host::Host;
use crate::traffic::Talked;

/// Between two lines of a session, more or less.
const EVERY_MS: &str = "100";

/// The program that talks.
pub struct Sessions {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Sessions {
    /// Opens so many to a name or an address, each of which says ten lines a second. Returns when each was answered.
    ///
    /// # Errors
    ///
    /// The program cannot be started, or a connection is not answered.
    pub fn open(client: &Host, to: &str, port: u16, count: usize, options: &[&str]) -> Result<Self> {
        let port = port.to_string();
        let count_text = count.to_string();
        let words = ["sessions", to, &port, "--count", &count_text, "--every-ms", EVERY_MS];
        Self::start(client.traffic(words.iter().chain(options))?, count)
    }

    /// Starts another program that talks over so many connections, takes the same orders and says the same. Returns
    /// when each was answered.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub fn start(mut command: Command, count: usize) -> Result<Self> {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start sessions")?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("the sessions have no output")?);
        let mut sessions = Self { child, orders, answers };
        let talked = sessions.read()?;
        let answered = talked.open - talked.hung;
        ensure!(answered == count, "of {count} sessions {answered} were answered: {:?}", talked.errors);
        Ok(sessions)
    }

    fn read(&mut self) -> Result<Talked> {
        let mut line = String::new();
        ensure!(self.answers.read_line(&mut line)? > 0, "the program of sessions has ended");
        serde_json::from_str(&line).with_context(|| format!("the sessions said {line:?}"))
    }

    /// Waits until each that is open was answered a line that it says from now on, and gives what there is to say since
    /// this was asked last.
    ///
    /// # Errors
    ///
    /// The program has ended. Sessions that hang, or have ended, are none.
    pub fn round(&mut self) -> Result<Talked> {
        let orders = self.orders.as_mut().context("the sessions have no input")?;
        writeln!(orders).context("the program of sessions has ended")?;
        self.read()
    }

    /// Closes all of them in order.
    ///
    /// # Errors
    ///
    /// They do not end.
    pub fn end(mut self) -> Result<Talked> {
        drop(self.orders.take());
        let talked = self.read()?;
        self.child.wait().context("the program of sessions does not end")?;
        Ok(talked)
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        // One that is gone already is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
