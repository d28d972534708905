//! What goes to standard output: tables for people, JSON for programs.

use std::io::{self, Stdout, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};
use miette::{Diagnostic, IntoDiagnostic, Report, Result};
use serde::Serialize;

pub use margay_control::quantity::{count, span};

/// Standard output.
pub struct Out(Stdout);

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error, Diagnostic)]
#[error("cannot write to standard output: {0}")]
pub struct Unwritable(io::Error);

impl Unwritable {
    /// For `map_err`.
    pub fn report(error: io::Error) -> Report {
        Self(error).into()
    }

    /// Whether the reader has closed the pipe, as `head` does.
    pub fn is_broken_pipe(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Out {
    /// The process's.
    pub fn new() -> Self {
        Self(io::stdout())
    }

    /// One line.
    pub fn line(&mut self, text: &str) -> Result<()> {
        writeln!(self.0, "{text}").map_err(Unwritable::report)
    }

    /// One value, indented.
    pub fn json(&mut self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(value).into_diagnostic()?;
        self.line(&text)
    }

    /// One value in one line: for streams.
    pub fn json_line(&mut self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(value).into_diagnostic()?;
        self.line(&text)
    }

    /// What a command has done: a value for programs, or a sentence for people.
    pub fn done(&mut self, is_json: bool, value: &impl Serialize, sentence: &str) -> Result<()> {
        if is_json { self.json(value) } else { self.line(sentence) }
    }

    /// Rows under a header; nothing at all becomes `nothing`.
    pub fn table(&mut self, header: &[&str], rows: Vec<Vec<String>>, nothing: &str) -> Result<()> {
        if rows.is_empty() {
            return self.line(nothing);
        }
        let mut table = Table::new();
        table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
        table.add_rows(rows);
        for line in table.lines() {
            self.line(line.trim_end().strip_prefix(' ').unwrap_or(&line))?;
        }
        Ok(())
    }

    /// Names and values below each other; empty values are left out.
    pub fn facts(&mut self, facts: &[(&str, String)]) -> Result<()> {
        let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
            self.line(&format!("{name:width$}  {value}"))?;
        }
        Ok(())
    }
}

fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// For how long something has been so.
pub fn lasting(since_unix_s: u64) -> String {
    format!("for {}", span(Duration::from_secs(now_unix_s().saturating_sub(since_unix_s))))
}

/// How long ago, or from now on.
pub fn moment(unix_s: u64) -> String {
    let now = now_unix_s();
    if unix_s > now {
        format!("in {}", span(Duration::from_secs(unix_s - now)))
    } else {
        format!("{} ago", span(Duration::from_secs(now - unix_s)))
    }
}

/// Bytes in the largest unit that leaves a number.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn units() {
        assert_eq!([bytes(0), bytes(999), bytes(1000), bytes(1_250_000)], ["0 B", "999 B", "1.0 KB", "1.2 MB"]);
        assert!(moment(0).ends_with(" ago") && moment(u64::MAX / 2).starts_with("in "));
        assert_eq!(lasting(u64::MAX), "for 0s");
    }
}
