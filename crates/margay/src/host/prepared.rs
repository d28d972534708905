//! Where the agent that `up` has prepared this host for keeps things: what `down` must undo is there, whatever the
//! configuration says by now.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::Config;

/// Its place is the same for every configuration. It goes with the boot, as an agent does.
const FILE: &str = "/run/margay/prepared.json";

/// The directories of the configuration that `up` read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prepared {
    state_dir: PathBuf,
    runtime_dir: PathBuf,
}

impl Default for Prepared {
    fn default() -> Self {
        Self::of(&Config::default())
    }
}

impl Prepared {
    /// As a configuration has it.
    pub fn of(config: &Config) -> Self {
        Self { state_dir: config.host.state_dir.clone(), runtime_dir: config.host.runtime_dir.clone() }
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

    /// Where the journal lies.
    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    /// Makes a configuration speak of these directories.
    pub fn direct(self, config: &mut Config) {
        config.host.state_dir = self.state_dir;
        config.host.runtime_dir = self.runtime_dir;
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
