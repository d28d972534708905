//! The programs that were started for a name, and the sockets that were bound to one, kept for the next start of the
//! agent where a reboot forgets them.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::bound::Bound;
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

/// What is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    version: u32,
    /// Programs that were started for names.
    pub programs: Vec<Program>,
    /// Sockets that their programs have bound to names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bound: Vec<Bound>,
}

impl Kept {
    /// All of it, as this version writes it.
    pub fn new(programs: Vec<Program>, bound: Vec<Bound>) -> Self {
        Self { version: VERSION, programs, bound }
    }
}

/// What the agent before has left; nothing, if it cannot be read: the programs have to be started again then.
pub fn read(runtime_dir: &Path) -> Kept {
    let path = runtime_dir.join(FILE);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::warn!(path = %path.display(), %error, "programs that serve names are not known any more");
            }
            return Kept::default();
        }
    };
    match serde_json::from_str::<Kept>(&text) {
        Ok(kept) if kept.version == VERSION => kept,
        Ok(kept) => {
            tracing::warn!(
                version = kept.version,
                "programs that serve names were kept by another version; start them again"
            );
            Kept::default()
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "programs that serve names are not known any more");
            Kept::default()
        }
    }
}

/// Keeps them, in place of what was there.
///
/// # Errors
///
/// The disk's word.
pub fn write(runtime_dir: &Path, kept: &Kept) -> io::Result<()> {
    let (path, fresh) = (runtime_dir.join(FILE), runtime_dir.join(format!("{FILE}.new")));
    let text = serde_json::to_vec_pretty(kept)?;
    fs::write(&fresh, text)?;
    fs::rename(fresh, path)
}

/// As [`write`], and no file where there is nothing to keep. What fails is logged: the way out works with a full disk.
pub fn leave(runtime_dir: &Path, kept: &Kept) {
    let is_nothing = kept.programs.is_empty() && kept.bound.is_empty();
    let left = if is_nothing { fs::remove_file(runtime_dir.join(FILE)) } else { write(runtime_dir, kept) };
    match left {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::warn!(%error, "the next `margay up` will not know the programs that serve names");
        }
        _ => {}
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_is_kept_is_read_again() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(read(dir.path()), Kept::default());
        let program = Program {
            offers: Vec::new(),
            private: true,
            command: "nginx".into(),
            cgroup: "/sys/fs/cgroup/margay-run-1-1".into(),
            cgroup_id: 99,
            passed: vec![1, 2],
        };
        let name = "sid:0011/16".parse().expect("literal");
        let bound = Bound {
            cookie: 5,
            protocol: crate::listener::Protocol::Udp,
            port: 40_000,
            name,
            program: "a".into(),
            weight: Some(0),
        };
        let kept = Kept::new(vec![program], vec![bound]);
        write(dir.path(), &kept).expect("room");
        assert_eq!(read(dir.path()), kept);
        leave(dir.path(), &kept);
        assert_eq!(read(dir.path()), kept);
        leave(dir.path(), &Kept::default());
        leave(dir.path(), &Kept::default());
        assert!(!dir.path().join(FILE).exists(), "nothing stays of nothing");
        fs::write(dir.path().join(FILE), "{").expect("room");
        assert_eq!(read(dir.path()), Kept::default(), "what is damaged is nothing");
        fs::write(dir.path().join(FILE), r#"{"version":9,"programs":[]}"#).expect("room");
        assert_eq!(read(dir.path()), Kept::default(), "and what is of another version");
    }
}
