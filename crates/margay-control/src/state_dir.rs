//! The directory where an agent keeps what must survive it: 0700, its files 0600, every write whole or not at all.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

/// Where it lies unless the configuration says otherwise.
pub const DEFAULT: &str = "/var/lib/margay";
/// Larger files than this are not ours: none is written, and none is read. A service that is published takes some 300
/// bytes of one.
const FILE_MAX_BYTES: u64 = 16 << 20;

/// Something about the state directory that only the operator can put right. Each names the file.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The operating system refused.
    #[error("{path}: cannot {act}: {error}{advice}", path = path.display(), advice = advice(error))]
    Io {
        /// Which file.
        path: PathBuf,
        /// What was tried.
        act: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// Others can read or change what only root may.
    #[error("{path}: others may use it (mode {mode:04o}), so its keys may be known; chmod go= {path}, or replace them", path = path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The content is not what was written there.
    #[error("{path}: {what}", path = path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// It could not be read again.
    #[error("{path}: {bytes} bytes are more than the {FILE_MAX_BYTES} that may be kept there; nothing has changed", path = path.display())]
    TooLarge {
        /// Which file.
        path: PathBuf,
        /// What it would have had.
        bytes: usize,
    },
    /// The name cannot be a file here.
    #[error("`{0}` is no name for a key: use a-z, 0-9, - and . inside, as in names of services")]
    Name(String),
    /// It is there already, and a new one would make the old one unusable.
    #[error("{} exists already; move it away first if you really want a new one", .0.display())]
    Exists(PathBuf),
    /// No randomness.
    #[error(transparent)]
    NoEntropy(#[from] crate::entropy::NoEntropy),
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; run as root, or set a state directory of your own",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; make room, nothing was lost",
        io::ErrorKind::ReadOnlyFilesystem => "; the state directory must be writable",
        _ => "",
    }
}

/// The directory.
#[derive(Clone, Debug)]
pub struct StateDir {
    root: PathBuf,
}

impl StateDir {
    /// Makes the directory if it is missing.
    ///
    /// # Errors
    ///
    /// It cannot be made, or others may write in it.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StateError> {
        let root = root.into();
        make_dir(&root)?;
        Ok(Self { root })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The path of a file in it.
    pub fn join(&self, file: &str) -> PathBuf {
        self.root.join(file)
    }

    /// A directory in it, made if it is missing.
    ///
    /// # Errors
    ///
    /// It cannot be made, or others may write in it.
    pub fn subdir(&self, name: &str) -> Result<Self, StateError> {
        Self::open(self.root.join(name))
    }

    /// Names of the files in it that end in `suffix`, without it, sorted.
    ///
    /// # Errors
    ///
    /// The directory cannot be read.
    pub fn list(&self, suffix: &str) -> Result<Vec<String>, StateError> {
        let fail = |error| io_error(&self.root, "list it", error);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(fail)? {
            let name = entry.map_err(fail)?.file_name();
            if let Some(stem) = name.to_str().and_then(|name| name.strip_suffix(suffix)) {
                names.push(stem.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// The content of a file, `None` when there is none.
    ///
    /// # Errors
    ///
    /// It cannot be read, is no text, or others may read it.
    pub fn read(&self, file: &str) -> Result<Option<Zeroizing<String>>, StateError> {
        let path = self.join(file);
        let mut opened = match File::open(&path) {
            Ok(opened) => opened,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error(&path, "read it", error)),
        };
        let about = opened.metadata().map_err(|error| io_error(&path, "read it", error))?;
        let mode = about.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(StateError::Open { path, mode });
        }
        if !about.is_file() || about.len() > FILE_MAX_BYTES {
            return Err(damaged(&path, "not a file that this program wrote"));
        }
        let mut text = Zeroizing::new(String::new());
        opened.read_to_string(&mut text).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => damaged(&path, "not text; restore it from a copy"),
            _ => io_error(&path, "read it", error),
        })?;
        Ok(Some(text))
    }

    /// Replaces a file: afterwards, and after a crash at any time, it holds either all of the old or all of `content`.
    ///
    /// # Errors
    ///
    /// It cannot be written; the old content is still there.
    pub fn write(&self, file: &str, content: &[u8]) -> Result<(), StateError> {
        let path = self.join(file);
        if content.len() as u64 > FILE_MAX_BYTES {
            return Err(StateError::TooLarge { path, bytes: content.len() });
        }
        let temporary = self.root.join(format!(".{file}.new"));
        let written = write_synced(&temporary, content)
            .and_then(|()| fs::rename(&temporary, &path))
            .and_then(|()| File::open(&self.root)?.sync_all());
        written.map_err(|error| {
            // What was half-written is of no use; if it cannot be removed the next write truncates it.
            let _ = fs::remove_file(&temporary);
            io_error(&path, "write it", error)
        })
    }

    /// Whether there is such a file.
    pub fn has(&self, file: &str) -> bool {
        self.join(file).exists()
    }
}

fn write_synced(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    // The mode above counts for a new file only.
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    file.write_all(content)?;
    file.sync_all()
}

fn make_dir(path: &Path) -> Result<(), StateError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|error| io_error(path, "make the directory", error))?;
    let about = fs::metadata(path).map_err(|error| io_error(path, "look at it", error))?;
    let mode = about.mode() & 0o777;
    // Its files are private themselves; but who may write here may replace them.
    if mode & 0o022 != 0 { Err(StateError::Open { path: path.to_owned(), mode }) } else { Ok(()) }
}

fn io_error(path: &Path, act: &'static str, error: io::Error) -> StateError {
    StateError::Io { path: path.to_owned(), act, error }
}

pub(crate) fn damaged(path: &Path, what: impl Into<String>) -> StateError {
    StateError::Damaged { path: path.to_owned(), what: what.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).expect("is there").mode() & 0o777
    }

    #[test]
    fn files_are_private_and_replaced_whole() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("a/b")).expect("made");
        assert_eq!(mode_of(dir.path()), 0o700);
        assert!(dir.read("x").expect("readable").is_none());
        dir.write("x", b"one").expect("written");
        dir.write("x", b"two").expect("written");
        assert_eq!(dir.read("x").expect("readable").expect("is there").as_str(), "two");
        assert_eq!(mode_of(&dir.join("x")), 0o600);
        assert_eq!(dir.list("").expect("listed"), ["x"]);
    }

    #[test]
    fn a_failed_write_keeps_the_old_content_and_names_the_file() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        dir.write("x", b"old").expect("written");
        let error =
            dir.write("x", &vec![b' '; FILE_MAX_BYTES as usize + 1]).expect_err("could not be read").to_string();
        assert!(error.contains("nothing has changed"), "{error}");
        assert_eq!(&**dir.read("x").expect("readable").expect("there"), "old");
        let most = vec![b'x'; 100_000];
        dir.write("most", &most).expect("written");
        assert_eq!(dir.read("most").expect("readable").expect("there").len(), most.len());
        // A directory in the way of the temporary file, as a full disk would be: the write fails before the rename.
        fs::create_dir(dir.join(".x.new")).expect("made");
        let error = dir.write("x", b"new").expect_err("refused");
        assert!(error.to_string().contains("/s/x"), "{error}");
        assert_eq!(dir.read("x").expect("readable").expect("is there").as_str(), "old");
    }

    #[test]
    fn what_others_may_read_is_refused() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        dir.write("x", b"key").expect("written");
        fs::set_permissions(dir.join("x"), fs::Permissions::from_mode(0o644)).expect("set");
        assert!(matches!(dir.read("x"), Err(StateError::Open { mode: 0o644, .. })));
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).expect("set");
        assert!(matches!(StateDir::open(dir.path()), Err(StateError::Open { .. })));
    }
}
