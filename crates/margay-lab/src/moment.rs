//! Changes to hosts, and when they were made: by the clock that all processes of a lab share.

use std::process::{Child, Stdio};

use anyhow::{Context, Result, bail};

use crate::host::Host;

/// When a change was made, in microseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Nothing was changed yet.
    pub before_us: u64,
    /// All was changed.
    pub after_us: u64,
}

/// A change that is being made.
pub struct Change {
    child: Child,
    what: String,
}

impl Change {
    /// Starts a shell script on a host. Only `act` is within the moment; `first` comes before.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn start(host: &Host, first: &str, act: &str) -> Result<Self> {
        // The shell says the time itself: another program for it would take as long as the change.
        let script = format!("{first}\necho \"$EPOCHREALTIME\"\n{act}\necho \"$EPOCHREALTIME\"\n");
        let mut command = host.command(["bash", "-euo", "pipefail", "-c", &script]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("cannot run bash")?;
        Ok(Self { child, what: format!("on {}: {act}", host.name()) })
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// The script fails.
    pub fn finish(self) -> Result<Moment> {
        let output = self.child.wait_with_output().context("cannot wait for a change")?;
        if !output.status.success() {
            bail!("{}: failed: {}", self.what, String::from_utf8_lossy(&output.stderr).trim());
        }
        read(&String::from_utf8_lossy(&output.stdout)).with_context(|| format!("{}: no times", self.what))
    }
}

/// The first and the last line are times.
fn read(text: &str) -> Option<Moment> {
    let mut lines = text.lines();
    let before_us = time_us(lines.next()?)?;
    Some(Moment { before_us, after_us: time_us(lines.next_back()?)? })
}

/// Microseconds of bash's `EPOCHREALTIME`: seconds with six digits after the point, or after the comma of some
/// languages.
pub fn time_us(text: &str) -> Option<u64> {
    let (seconds, micros) = text.trim().split_once(['.', ','])?;
    if micros.len() != 6 {
        return None;
    }
    seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(micros.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::{Moment, read, time_us};

    #[test]
    fn times_are_read() {
        assert_eq!(time_us("1795282713.000042"), Some(1_795_282_713_000_042));
        assert_eq!(time_us("1795282713,500000"), Some(1_795_282_713_500_000));
        assert_eq!(time_us("1795282713.5"), None);
        assert_eq!(time_us("soon"), None);
    }

    #[test]
    fn what_the_change_itself_says_is_no_time() {
        let moment = read("1.000001\nsomething\n1.000009\n");
        assert_eq!(moment, Some(Moment { before_us: 1_000_001, after_us: 1_000_009 }));
        assert_eq!(read("1.000001\n"), None);
    }
}
