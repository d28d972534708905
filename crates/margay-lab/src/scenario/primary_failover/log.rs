//! What sessions of one program have said.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::Group;
use crate::host::Host;
use crate::program::{Program, tail, wait_for};

/// A program that keeps sessions.
pub struct Log {
    /// What they are called together.
    pub name: &'static str,
    /// How many there are.
    pub sessions: usize,
    program: Program,
}

#[derive(Deserialize)]
struct Line {
    session: usize,
    kind: String,
    at_ms: f64,
    #[serde(default)]
    server: String,
}

impl Log {
    /// Starts sessions of a host with a server.
    pub fn start(host: &Host, script: &Path, group: &Group, to: &str, port: &str) -> Result<Self> {
        let script = script.to_str().context("a path that is no text")?;
        let busy = group.busy.to_string();
        let idle = group.idle.to_string();
        let words = ["/usr/bin/python3", script, group.name, to, port, &busy, &idle];
        let program = host.spawn(&format!("sessions-{}", group.name), words)?;
        Ok(Self { name: group.name, sessions: group.busy + group.idle, program })
    }

    /// Waits until all are open.
    pub fn await_open(&self, limit: Duration) -> Result<()> {
        wait_for(&format!("sessions ({})", self.name), limit, || {
            let open = self.first(|line| line.kind == "open").len();
            ensure!(open == self.sessions, "{open} of {} are open: {}", self.sessions, tail(&self.program.log()));
            Ok(())
        })
    }

    fn lines(&self) -> Vec<Line> {
        // The last one may be on its way, and the interpreter's own words are none.
        self.program.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// When each session has said this first, in milliseconds since 1970.
    fn first(&self, is_meant: impl Fn(&Line) -> bool) -> BTreeMap<usize, f64> {
        let mut first = BTreeMap::new();
        for line in self.lines().into_iter().filter(is_meant) {
            first.entry(line.session).or_insert(line.at_ms);
        }
        first
    }

    /// When each session that has failed since then did first.
    pub fn first_failures_ms(&self, since_ms: f64) -> Vec<f64> {
        self.first(|line| line.kind == "failed" && line.at_ms >= since_ms).into_values().collect()
    }

    /// How many failures there were before.
    pub fn failures_before(&self, until_ms: f64) -> usize {
        // Those from before a session was open are none of a session.
        let open = self.first(|line| line.kind == "open");
        let was_open = |line: &Line| open.get(&line.session).is_some_and(|open_ms| *open_ms < line.at_ms);
        self.lines().iter().filter(|line| line.kind == "failed" && line.at_ms < until_ms && was_open(line)).count()
    }

    /// When each session has first had a row acknowledged by a server.
    pub fn first_written_ms(&self, server: &str) -> Vec<f64> {
        self.first(|line| line.kind == "written" && line.server == server).into_values().collect()
    }

    /// How many rows a server has acknowledged since then.
    pub fn written_since(&self, server: &str, since_ms: f64) -> usize {
        let is_meant = |line: &&Line| line.kind == "written" && line.server == server && line.at_ms >= since_ms;
        self.lines().iter().filter(is_meant).count()
    }
}
