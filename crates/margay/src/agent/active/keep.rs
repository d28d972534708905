//! The programs that were started for a name, kept for the next start of the agent where a reboot forgets them.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::rule::Offer;

const FILE: &str = "programs.json";
const VERSION: u32 = 1;

/// A program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// What it serves.
    pub offers: Vec<Offer>,
    /// Its sockets are kept off the network.
    pub private: bool,
    /// What was started, for people.
    pub command: String,
    /// Its cgroup.
    pub cgroup: PathBuf,
    /// The kernel's number of that; another one of the same name is not it.
    pub cgroup_id: u64,
    /// Sockets that it was given, by cookie: their maker is somebody else.
    pub passed: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    programs: Vec<Program>,
}

/// What the agent before has left; nothing, if it cannot be read: the programs have to be started again then.
pub fn read(runtime_dir: &Path) -> Vec<Program> {
    let path = runtime_dir.join(FILE);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::warn!(path = %path.display(), %error, "programs that serve names are not known any more");
            }
            return Vec::new();
        }
    };
    match serde_json::from_str::<Kept>(&text) {
        Ok(kept) if kept.version == VERSION => kept.programs,
        Ok(kept) => {
            tracing::warn!(
                version = kept.version,
                "programs that serve names were kept by another version; start them again"
            );
            Vec::new()
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "programs that serve names are not known any more");
            Vec::new()
        }
    }
}

/// Forgets them.
pub fn remove(runtime_dir: &Path) {
    match fs::remove_file(runtime_dir.join(FILE)) {
        Err(error) if error.kind() != ErrorKind::NotFound => tracing::warn!(%error, "{FILE} cannot be removed"),
        _ => {}
    }
}

/// Keeps them, in place of what was there.
///
/// # Errors
///
/// The disk's word.
pub fn write(runtime_dir: &Path, programs: Vec<Program>) -> io::Result<()> {
    let (path, fresh) = (runtime_dir.join(FILE), runtime_dir.join(format!("{FILE}.new")));
    let text = serde_json::to_vec_pretty(&Kept { version: VERSION, programs })?;
    fs::write(&fresh, text)?;
    fs::rename(fresh, path)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_is_kept_is_read_again() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(read(dir.path()).is_empty());
        let program = Program {
            offers: Vec::new(),
            private: true,
            command: "nginx".into(),
            cgroup: "/sys/fs/cgroup/margay-run-1-1".into(),
            cgroup_id: 99,
            passed: vec![1, 2],
        };
        write(dir.path(), vec![program.clone()]).expect("room");
        assert_eq!(read(dir.path()), [program]);
        fs::write(dir.path().join(FILE), "{").expect("room");
        assert!(read(dir.path()).is_empty(), "what is damaged is nothing");
        fs::write(dir.path().join(FILE), r#"{"version":9,"programs":[]}"#).expect("room");
        assert!(read(dir.path()).is_empty(), "and what is of another version");
    }
}
