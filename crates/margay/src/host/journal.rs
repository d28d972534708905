//! What `up` has changed, on disk before it is done, so that `down` can undo it: also after a crash, and after a
//! reboot.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use margay_control::{StateDir, StateError};
use serde::{Deserialize, Serialize};

use super::change::Change;

const FILE: &str = "host-changes.json";
const VERSION: u32 = 1;

/// Where the kernel's part of the changes lives: one boot, one network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Realm {
    /// Identity of the boot.
    pub boot_id: String,
    /// Inode of the network namespace.
    pub network_namespace: u64,
}

impl Realm {
    /// This process's.
    pub fn here() -> io::Result<Self> {
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(Self { boot_id, network_namespace: fs::metadata("/proc/self/ns/net")?.ino() })
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    realm: Realm,
    changes: Vec<Change>,
}

/// The journal.
pub struct Journal {
    dir: StateDir,
    realm: Realm,
    changes: Vec<Change>,
}

/// The journal is of no use.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The state directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// Not ours.
    #[error(
        "{path}: {why}; nobody knows what to undo: restore the file, or remove it and undo by hand (`ip link del \
         sal0`; the book's page on what `up` changes has the rest)"
    )]
    Damaged {
        /// Which file.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// `/proc` is missing.
    #[error("cannot tell which boot and network namespace this is: {0}; is /proc mounted?")]
    NoProc(io::Error),
}

impl Journal {
    /// Reads it. What a reboot or another network namespace has taken away is left out.
    pub fn open(dir: StateDir) -> Result<Self, JournalError> {
        let realm = Realm::here().map_err(JournalError::NoProc)?;
        let Some(text) = dir.read(FILE)? else { return Ok(Self { dir, realm, changes: Vec::new() }) };
        let damaged = |why: String| JournalError::Damaged { path: dir.join(FILE).display().to_string(), why };
        let file: File = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        if file.version != VERSION {
            return Err(damaged(format!("version {}, this program knows {VERSION}", file.version)));
        }
        let is_here = file.realm == realm;
        let changes = file.changes.into_iter().filter(|change| is_here || !change.dies_with_boot()).collect();
        Ok(Self { dir, realm, changes })
    }

    /// What was changed, or was about to be, in this order.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// Puts `changes` on disk, in place of what was there.
    pub fn write(&mut self, changes: Vec<Change>) -> Result<(), JournalError> {
        let file = File { version: VERSION, realm: self.realm.clone(), changes };
        // Plain data: it always has a JSON form.
        let text = serde_json::to_vec_pretty(&file).unwrap_or_default();
        self.dir.write(FILE, &text)?;
        self.changes = file.changes;
        Ok(())
    }

    /// Everything is undone.
    pub fn clear(&mut self) -> Result<(), JournalError> {
        self.changes.clear();
        match fs::remove_file(self.dir.join(FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(StateError::Io { path: self.dir.join(FILE), act: "remove it", error }.into())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use std::path::PathBuf;

    fn dir() -> (tempfile::TempDir, StateDir) {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("state")).expect("made");
        (base, dir)
    }

    fn changes() -> Vec<Change> {
        vec![
            Change::Tun { interface: "sal0".into() },
            Change::ResolvConf {
                path: PathBuf::from("/etc/resolv.conf"),
                server: margay_core::Ranges::USUAL.host_v4().into(),
                before: super::super::resolv_conf::Before::Absent,
            },
        ]
    }

    #[test]
    fn what_was_written_is_read() {
        let (_base, dir) = dir();
        let mut journal = Journal::open(dir.clone()).expect("opened");
        assert!(journal.changes().is_empty());
        journal.write(changes()).expect("written");
        let mut again = Journal::open(dir.clone()).expect("opened");
        assert_eq!(again.changes(), changes());
        again.clear().expect("cleared");
        again.clear().expect("twice");
        assert!(Journal::open(dir).expect("opened").changes().is_empty());
    }

    #[test]
    fn a_reboot_leaves_only_files() {
        let (_base, dir) = dir();
        let realm = Realm { boot_id: "earlier".into(), network_namespace: 1 };
        let file = File { version: VERSION, realm, changes: changes() };
        dir.write(FILE, &serde_json::to_vec(&file).expect("json")).expect("written");
        let journal = Journal::open(dir).expect("opened");
        assert_eq!(journal.changes(), &changes()[1..]);
    }

    #[test]
    fn damage_names_the_file() {
        let (_base, dir) = dir();
        for text in ["{", "{\"version\":2,\"realm\":{\"boot_id\":\"x\",\"network_namespace\":1},\"changes\":[]}"] {
            dir.write(FILE, text.as_bytes()).expect("written");
            let error = Journal::open(dir.clone()).err().expect("refused").to_string();
            assert!(error.contains("host-changes.json"), "{error}");
        }
    }
}
