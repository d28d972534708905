//! Transfers that run beside a scenario until they are told to stop ([`crate::traffic`]): how far each is, how long
//! nothing came, and what became of it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::host::Host;
use crate::pause::pause_us;
use crate::program::wait_for;
use crate::scenario::Findings;
use crate::traffic::{AT_ONCE, MORE, STOP};
pub use crate::traffic::{Way, Word, now_us};

const START_LIMIT: Duration = Duration::from_secs(20);
const END_LIMIT: Duration = Duration::from_secs(10);

/// What to transfer, and how.
#[derive(Clone, Copy, Debug)]
pub struct Order<'a> {
    /// Server's name or address.
    pub to: &'a str,
    /// One transfer each: `up:cubic`, `down:bbr`.
    pub ways: &'a [&'a str],
    /// Bytes per second of each; 0: as fast as it goes.
    pub pace: u64,
}

/// One of the two programs, with all that it has said of its streams.
struct Side {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    words: BTreeMap<usize, Word>,
}

impl Side {
    fn start(mut command: Command) -> Result<Self> {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start transfers")?;
        let orders = child.stdin.take().context("the transfers have no input")?;
        let answers = BufReader::new(child.stdout.take().context("the transfers have no output")?);
        Ok(Self { child, orders, answers, words: BTreeMap::new() })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.answers.read_line(&mut line)? > 0, "a program of transfers has ended");
        Ok(line)
    }

    fn ask(&mut self, order: &str) -> Result<()> {
        writeln!(self.orders, "{order}").context("a program of transfers has ended")?;
        let line = self.line()?;
        let said: Value = serde_json::from_str(&line).with_context(|| format!("the transfers said {line:?}"))?;
        let words: BTreeMap<usize, Word> = serde_json::from_value(said["streams"].clone())?;
        for (stream, mut word) in words {
            // It tells only of new ones.
            if let Some(known) = self.words.remove(&stream) {
                word.gaps = [known.gaps, word.gaps].concat();
                word.marks = [known.marks, word.marks].concat();
            }
            self.words.insert(stream, word);
        }
        Ok(())
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // One that is gone already is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The server of transfers. It ends when this is dropped.
pub struct Server {
    side: Side,
    port: u16,
    mptcp: bool,
    /// Number of the next stream: those of former transfers are known by theirs.
    next: usize,
}

impl Server {
    /// Starts it on a port of a host, for IPv4. Returns when it listens.
    ///
    /// # Errors
    ///
    /// It does not.
    pub fn start(host: &Host, port: u16, mptcp: bool) -> Result<Self> {
        let mut command = host.traffic(["transfer-server", "--listen", &format!("0.0.0.0:{port}")])?;
        command.args(mptcp.then_some("--mptcp"));
        let mut side = Side::start(command)?;
        ensure!(side.line()?.trim() == "ready", "the server of transfers is not ready");
        Ok(Self { side, port, mptcp, next: 0 })
    }
}

/// Running transfers.
pub struct Transfers<'a> {
    ways: Vec<Way>,
    first: usize,
    client: Side,
    server: &'a mut Server,
}

impl<'a> Transfers<'a> {
    /// Starts transfers with a server, from another host, [`AT_ONCE`] at a time: the next ones when each of those
    /// before has brought something. Returns when all have.
    ///
    /// # Errors
    ///
    /// They do not in time; the message says why.
    pub fn start(client: &Host, server: &'a mut Server, order: Order<'_>) -> Result<Self> {
        let [port, pace, first] = [u64::from(server.port), order.pace, server.next as u64].map(|word| word.to_string());
        let mut command = client.traffic(["transfer", order.to, &port, "--pace", &pace, "--first", &first])?;
        command.args(server.mptcp.then_some("--mptcp")).args(order.ways.iter().flat_map(|way| ["--way", way]));
        let client = Side::start(command)?;
        let ways: Vec<Way> =
            order.ways.iter().map(|way| way.parse().map_err(anyhow::Error::msg)).collect::<Result<_>>()?;
        let first = server.next;
        server.next += ways.len();
        let mut transfers = Self { ways: Vec::new(), first, client, server };
        for some in ways.chunks(AT_ONCE) {
            if !transfers.ways.is_empty() {
                transfers.client.ask(MORE)?;
            }
            transfers.ways.extend_from_slice(some);
            let what = format!("the start of {} of {} transfers", transfers.ways.len(), ways.len());
            transfers.await_bytes(&what, 1, START_LIMIT)?;
        }
        Ok(transfers)
    }

    /// Asks both programs for what is new.
    ///
    /// # Errors
    ///
    /// One has ended.
    pub fn refresh(&mut self) -> Result<()> {
        self.client.ask("").and(self.server.side.ask(""))
    }

    /// What sender and receiver of each have said.
    fn ends(&self) -> impl Iterator<Item = (Word, Word)> {
        self.ways.iter().zip(self.first..).map(|(way, stream)| {
            let of = |side: &Side| side.words.get(&stream).cloned().unwrap_or_default();
            let (client, server) = (of(&self.client), of(&self.server.side));
            if way.up { (client, server) } else { (server, client) }
        })
    }

    /// What the receiver of each has said, in the order of the ways.
    pub fn received(&self) -> Vec<Word> {
        self.ends().map(|(_, receiver)| receiver).collect()
    }

    /// Waits until each has brought so many bytes more than now.
    ///
    /// # Errors
    ///
    /// One does not in time, or ends before; the message says how many, and why.
    pub fn await_bytes(&mut self, what: &str, bytes: u64, limit: Duration) -> Result<()> {
        self.refresh()?;
        let wanted: Vec<u64> = self.received().iter().map(|word| word.received + bytes).collect();
        let ended = wait_for(what, limit, || {
            self.refresh()?;
            let ended = self.ends().find(|(sender, receiver)| sender.ended || receiver.ended);
            let late = self.received().iter().zip(&wanted).filter(|(word, wanted)| word.received < **wanted).count();
            ensure!(late == 0 || ended.is_some(), "{late} of {} transfers stand still", wanted.len());
            Ok(ended)
        })?;
        match ended {
            None => Ok(()),
            Some((sender, receiver)) => {
                bail!("{what}: a transfer has ended: sender: {:?}, receiver: {:?}", sender.error, receiver.error)
            }
        }
    }

    /// How long each stood still after an event, until now, in milliseconds; see [`pause_us`].
    pub fn pauses_ms(&self, event_us: u64) -> Vec<Option<f64>> {
        let until_us = now_us();
        let of = |word: &Word| pause_us(&word.gaps, word.last_us, event_us, until_us).map(|us| us as f64 / 1e3);
        self.received().iter().map(of).collect()
    }

    /// Ends all transfers, and counts what became of them: `failed`, `wrong_bytes` (others than were sent, or not all
    /// of them), `transfers`, `transfer_resets`.
    ///
    /// # Errors
    ///
    /// A program has ended. Transfers that do not end are counted as failed.
    pub fn finish(mut self, what: &str, findings: &mut Findings) -> Result<()> {
        self.client.ask(STOP)?;
        let ended = wait_for("the end of all transfers", END_LIMIT, || {
            self.refresh()?;
            let missing = self.ends().filter(|(sender, receiver)| !(sender.ended && receiver.ended)).count();
            ensure!(missing == 0, "{missing} of {} go on", self.ways.len());
            Ok(())
        });
        for figure in ["failed", "wrong_bytes", "transfer_resets"] {
            findings.figures.add(figure, 0.0);
        }
        findings.figures.add("transfers", self.ways.len() as f64);
        let mut said = Vec::new();
        for (way, (sender, receiver)) in self.ways.iter().zip(self.ends()) {
            let is_whole = sender.ended && receiver.ended && sender.error.is_empty() && receiver.error.is_empty();
            // A transfer that was cut off has lost bytes, but none of them is another.
            let missing = if is_whole { sender.sent.abs_diff(receiver.received) } else { 0 };
            findings.figures.add("wrong_bytes", (receiver.wrong + missing) as f64);
            findings.figures.add("failed", f64::from(u8::from(!is_whole)));
            findings.figures.add("transfer_resets", f64::from(u8::from(sender.reset || receiver.reset)));
            if !is_whole || receiver.wrong + missing > 0 {
                let (wrong, bytes) = (receiver.wrong, receiver.received);
                let errors = format!("sender {:?}, receiver {:?}", sender.error, receiver.error);
                said.push(format!("{what}: {way}: {wrong} of {bytes} bytes wrong, {missing} missing; {errors}"));
            }
        }
        // The first few tell as much as all of them.
        said.into_iter().take(3).for_each(|text| findings.note(text));
        if let Err(error) = ended {
            findings.note(format!("{what}: {error:#}"));
        }
        Ok(())
    }
}

/// Bytes per second between two moments, by the marks of a receiver (see [`Word::marks`]); none where there are too
/// few.
pub fn rate(marks: &[(u64, u64)], from_us: u64, to_us: u64) -> f64 {
    let mut within = marks.iter().filter(|(at_us, _)| (from_us..to_us).contains(at_us));
    let (Some((first_us, first)), Some((last_us, last))) = (within.next(), within.next_back()) else { return 0.0 };
    (last - first) as f64 * 1e6 / (last_us - first_us) as f64
}

#[cfg(test)]
mod tests {
    use super::rate;

    #[test]
    fn rates_are_those_between_the_marks_within() {
        let marks = [(1_000_000, 500), (1_100_000, 1_500), (1_200_000, 2_500), (1_900_000, 2_600)];
        assert_eq!(rate(&marks, 1_000_000, 1_300_000), 10_000.0);
        assert_eq!(rate(&marks, 1_150_000, 1_300_000), 0.0);
        assert_eq!(rate(&[], 0, 1), 0.0);
    }
}
