//! Where the agent that `up` has prepared this host for keeps things: what `down` must undo is there, whatever the
//! configuration says by now.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::HostError;
use crate::config::{Config, RangesSection};

/// Its place is the same for every configuration. It goes with the boot, as an agent does.
const FILE: &str = "/run/margay/prepared.json";

/// The directories, and the virtual addresses, of the configuration that `up` read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prepared {
    state_dir: PathBuf,
    runtime_dir: PathBuf,
    #[serde(default)]
    ranges: RangesSection,
}

impl Default for Prepared {
    fn default() -> Self {
        Self::of(&Config::default())
    }
}

impl Prepared {
    /// As a configuration has it.
    pub fn of(config: &Config) -> Self {
        let (state_dir, runtime_dir) = (config.host.state_dir.clone(), config.host.runtime_dir.clone());
        Self { state_dir, runtime_dir, ranges: config.ranges }
    }

    /// What the last `up` of this boot wrote; none where `down` came since, or the file cannot be read.
    pub fn load() -> Option<Self> {
        Self::load_from(Path::new(FILE))
    }

    fn load_from(path: &Path) -> Option<Self> {
        serde_json::from_str(&fs::read_to_string(path).ok()?).ok()
    }

    /// Writes it.
    ///
    /// # Errors
    ///
    /// The system refuses.
    pub fn save(&self) -> io::Result<()> {
        let path = Path::new(FILE);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        // Plain data: it always has a JSON form.
        fs::write(path, serde_json::to_vec(self).unwrap_or_default())
    }

    /// Removes it: the host is as it was.
    ///
    /// # Errors
    ///
    /// The system refuses.
    pub fn forget() -> io::Result<()> {
        match fs::remove_file(FILE) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether this host may be prepared for this configuration without being restored first.
    ///
    /// # Errors
    ///
    /// It may not: the other one's changes are to be undone.
    pub fn check(self, config: &Config) -> Result<(), HostError> {
        let now = Self::of(config);
        if (&self.state_dir, &self.runtime_dir) != (&now.state_dir, &now.runtime_dir) {
            return Err(HostError::PreparedOtherwise(self.state_dir));
        }
        if self.ranges != now.ranges {
            let (before, now) = (self.ranges.value(), now.ranges.value());
            return Err(HostError::PreparedWithOtherRanges { before, now });
        }
        Ok(())
    }

    /// Makes a configuration speak of these directories and virtual addresses.
    pub fn direct(self, config: &mut Config) {
        config.host.state_dir = self.state_dir;
        config.host.runtime_dir = self.runtime_dir;
        config.ranges = self.ranges;
    }

    /// Makes a configuration keep the virtual addresses that this host was prepared with for it: flows have them. Says
    /// whether it had others.
    pub fn keep_ranges(&self, config: &mut Config) -> bool {
        if self.state_dir != config.host.state_dir {
            return false;
        }
        std::mem::replace(&mut config.ranges, self.ranges) != self.ranges
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_file_of_no_use_is_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("prepared.json");
        assert_eq!(Prepared::load_from(&path), None);
        for text in ["", "{", "{\"state_dir\": 1}"] {
            fs::write(&path, text).expect("written");
            assert_eq!(Prepared::load_from(&path), None, "{text}");
        }
        let prepared = Prepared::default();
        fs::write(&path, serde_json::to_vec(&prepared).expect("JSON")).expect("written");
        assert_eq!(Prepared::load_from(&path), Some(prepared));
    }
}
