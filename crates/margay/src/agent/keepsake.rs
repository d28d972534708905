//! The associations, kept over a restart of the agent where a reboot forgets them: under the runtime directory.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use margay_core::{Instant, Sal};

/// The file.
#[derive(Clone, Debug)]
pub struct Keepsake(PathBuf);

impl Keepsake {
    /// In this runtime directory.
    pub fn new(runtime_dir: &Path) -> Self {
        Self(runtime_dir.join("associations"))
    }

    /// Hands the core what the start before has left. Without it every peer is met anew, which costs a handshake each.
    /// `continues`: the keys are of this boot, and it is known in which epoch they were used last. Others are
    /// forgotten: a nonce could be used twice under them.
    pub fn take_up(&self, sal: &mut Sal, now: Instant, continues: bool) {
        if !continues {
            // Absent as a rule: a boot begins without them.
            return drop(fs::remove_file(&self.0));
        }
        let bytes = match fs::read(&self.0) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => return tracing::warn!(path = %self.0.display(), %error, "associations cannot be read"),
        };
        match sal.take_up_associations(now, &bytes) {
            Ok(count) => tracing::info!(count, "associations taken up"),
            Err(error) => tracing::warn!(path = %self.0.display(), %error, "peers will be met anew"),
        }
    }

    /// Writes the file whole, or not at all.
    pub fn write(&self, bytes: &[u8]) {
        let temporary = self.0.with_extension("new");
        let written = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary);
        let written = written.and_then(|mut file| file.write_all(bytes)).and_then(|()| fs::rename(&temporary, &self.0));
        if let Err(error) = written {
            tracing::warn!(path = %self.0.display(), %error, "associations cannot be kept for the next start");
        }
    }
}
