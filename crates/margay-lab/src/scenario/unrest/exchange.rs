//! What sessions say of themselves: when each exchange was done, which answers were wrong, and which sessions have
//! ended.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::scenario::Findings;

/// One line of a session's program.
#[derive(Deserialize)]
struct Line {
    session: String,
    time_us: u64,
    wrong: Option<String>,
    broken: Option<String>,
}

/// How one session goes on.
#[derive(Clone, Copy, Default)]
pub struct Session {
    count: usize,
    last_us: u64,
    longest_pause_us: u64,
}

/// Exchanges of all sessions so far.
#[derive(Default)]
pub struct Exchanges {
    /// Those that have done at least one exchange, by name.
    pub sessions: BTreeMap<String, Session>,
    /// Answers that were not the expected ones.
    pub wrong: Vec<String>,
    /// Sessions that have ended, and why.
    pub broken: Vec<String>,
}

impl Exchanges {
    /// Reads the output of the sessions' programs. What else they print is skipped, and so is a line that is being
    /// written.
    ///
    /// # Errors
    ///
    /// A whole line that begins as a report is none.
    pub fn read(text: &str) -> Result<Self> {
        let mut exchanges = Self::default();
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n') && line.starts_with('{'));
        for line in whole {
            let line: Line = serde_json::from_str(line).with_context(|| format!("not a report: {line}"))?;
            exchanges.take(line);
        }
        Ok(exchanges)
    }

    fn take(&mut self, line: Line) {
        if let Some(why) = line.broken {
            return self.broken.push(format!("{}: {why}", line.session));
        }
        if let Some(what) = line.wrong {
            return self.wrong.push(format!("{}: {what}", line.session));
        }
        let session = self.sessions.entry(line.session).or_default();
        if session.count > 0 {
            let pause_us = line.time_us.saturating_sub(session.last_us);
            session.longest_pause_us = session.longest_pause_us.max(pause_us);
        }
        session.count += 1;
        session.last_us = line.time_us;
    }

    /// Sessions with fewer exchanges.
    pub fn slower_than(&self, count: usize) -> Vec<&str> {
        self.sessions.iter().filter(|(_, done)| done.count < count).map(|(name, _)| name.as_str()).collect()
    }

    /// Sessions that have not done so many exchanges more than they had done before.
    pub fn behind(&self, before: &Self, count: usize) -> Vec<&str> {
        let wanted = |name: &str| before.sessions.get(name).map_or(0, |done| done.count) + count;
        self.sessions.iter().filter(|(name, done)| done.count < wanted(name)).map(|(name, _)| name.as_str()).collect()
    }

    /// Adds to the figures: those in `late` that have not ended are stuck.
    pub fn report(&self, seed: u64, late: &[&str], findings: &mut Findings) {
        let has_ended = |name: &str| self.broken.iter().any(|said| said.starts_with(&format!("{name}:")));
        findings.figures.add("stuck", late.iter().filter(|name| !has_ended(name)).count() as f64);
        findings.figures.add("wrong_bytes", self.wrong.len() as f64);
        findings.figures.add("broken", self.broken.len() as f64);
        for said in self.broken.iter().chain(self.wrong.iter().take(3)) {
            findings.note(format!("seed {seed}: {said}"));
        }
        let longest = self.sessions.iter().max_by_key(|(_, done)| done.longest_pause_us);
        if let Some((name, done)) = longest {
            let longest_s = done.longest_pause_us as f64 / 1e6;
            findings.note(format!("seed {seed}: the longest pause, {longest_s:.1} s, was of {name}"));
            findings.set("longest_pause_s", longest_s.max(findings.figures.get("longest_pause_s")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = r#"Warning: something else
{"session": "redis of home", "time_us": 1000000}
{"session": "redis of home", "time_us": 1200000}
{"session": "mqtt of home", "time_us": 1300000}
{"session": "redis of home", "time_us": 3200000}
{"session": "mqtt of home", "time_us": 1400000, "wrong": "'3' where '2' was expected"}
{"session": "ssh of home", "time_us": 1500000, "broken": "ConnectionError: ssh has ended"}
{"session": "mqtt of home", "ti"#;

    #[test]
    fn exchanges_pauses_and_ends_are_told_apart() {
        let exchanges = Exchanges::read(SAID).expect("reports");
        assert_eq!(exchanges.sessions.len(), 2);
        assert_eq!(exchanges.sessions["redis of home"].longest_pause_us, 2_000_000);
        assert_eq!(exchanges.slower_than(2), ["mqtt of home"]);
        assert_eq!((exchanges.wrong.len(), exchanges.broken.len()), (1, 1));
        let mut findings = Findings::default();
        exchanges.report(1, &exchanges.behind(&Exchanges::default(), 2), &mut findings);
        assert_eq!(findings.figures.get("stuck"), 1.0);
        assert_eq!(findings.figures.get("longest_pause_s"), 2.0);
    }

    #[test]
    fn a_report_that_is_none_is_an_error() {
        assert!(Exchanges::read("{\"session\": 7}\n").is_err());
    }
}
