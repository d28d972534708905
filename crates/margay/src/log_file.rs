//! The agent's log where no systemd keeps it: a file under the runtime directory, which is memory. So it is bounded:
//! what is too long becomes the log before this one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Its name.
pub const NAME: &str = "agent.log";
/// Bytes of a log, and of the one before it.
pub const MAX_BYTES: u64 = 8 << 20;
const BEFORE: &str = "log.1";

/// Opens it for an agent that starts: what the one before has said stays, since it may say why that one ended. Gives
/// its length, too.
///
/// # Errors
///
/// The file system refuses.
pub fn open(path: &Path) -> io::Result<(File, u64)> {
    bound(path, MAX_BYTES)?;
    let log = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    let len = log.metadata()?.len();
    Ok((log, len))
}

/// Begins it anew if it has more than `max` bytes. Whoever has it open goes on at its beginning. Nothing happens where
/// there is none.
///
/// # Errors
///
/// The file system refuses.
pub fn bound(path: &Path, max: u64) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(about) if about.len() > max => {}
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => return Ok(()),
    }
    fs::copy(path, path.with_extension(BEFORE))?;
    OpenOptions::new().write(true).open(path)?.set_len(0)
}

/// What was said from `begin` on; of that at most the last `max` bytes.
pub fn tail(path: &Path, begin: u64, max: u64) -> String {
    let read = File::open(path).and_then(|mut file| {
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(begin.min(len).max(len.saturating_sub(max))))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    });
    read.unwrap_or_else(|error| format!("(its log cannot be read: {error})"))
}

#[cfg(test)]
mod test {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_is_too_long_is_the_log_before_and_the_writer_goes_on() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(NAME);
        bound(&path, 4).expect("there is none");
        let (mut log, begin) = open(&path).expect("made");
        assert_eq!(begin, 0);
        log.write_all(b"first").expect("written");
        bound(&path, 5).expect("looked at");
        assert_eq!(fs::read(&path).expect("there"), b"first");
        bound(&path, 4).expect("begun anew");
        log.write_all(b"then").expect("written");
        assert_eq!(fs::read(&path).expect("there"), b"then");
        let before = path.with_extension(BEFORE);
        assert_eq!(fs::read(&before).expect("there"), b"first");
        assert_eq!(fs::metadata(&before).expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn an_agent_s_last_words_are_its_own_and_those_before_stay() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(NAME);
        open(&path).expect("made").0.write_all(b"the one before\n").expect("written");
        let (mut log, begin) = open(&path).expect("there");
        log.write_all(b"a long story, and its end\n").expect("written");
        assert_eq!(tail(&path, begin, 4096), "a long story, and its end");
        assert_eq!(tail(&path, begin, 4), "end");
        assert!(fs::read_to_string(&path).expect("there").starts_with("the one before"));
    }
}
