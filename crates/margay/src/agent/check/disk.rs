//! Room on the disks that the agent writes to.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use super::{Finding, Steps};
use crate::agent::Agent;

/// A file that stands for all that the agent writes.
const PROBE: &str = ".check";
/// As much as the smallest of the agent's files takes on most disks.
const PROBE_BYTES: usize = 4096;

pub(super) async fn look(agent: &Agent, steps: &mut Steps) {
    let host = &agent.config().host;
    let of_state = "make room there, or let it be written: until then no registration, token, grant or rule is kept, \
                    and the agent cannot be started again";
    let of_runtime = "make room there: until then a restart of the agent forgets flows and programs";
    for (dir, advice) in [(&host.state_dir, of_state), (&host.runtime_dir, of_runtime)] {
        let written = tokio::task::block_in_place(|| probe(dir));
        let finding = match written {
            Ok(()) => Finding::Ok(format!("{} can be written", dir.display())),
            Err(error) => Finding::failed(format!("{} cannot be written: {error}", dir.display()), advice),
        };
        steps.say("disk", finding).await;
    }
}

/// Writes a file in a directory, waits for the disk, and removes it.
fn probe(dir: &Path) -> io::Result<()> {
    let path = dir.join(PROBE);
    let written = write(&path);
    // Nothing is left behind, whatever came of it; a file that was never made cannot be removed.
    let _ = fs::remove_file(&path);
    written
}

fn write(path: &Path) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&[0; PROBE_BYTES])?;
    file.sync_all()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_directory_that_can_be_written_is_left_as_it_was() {
        let dir = tempfile::tempdir().expect("a directory");
        probe(dir.path()).expect("it can be written");
        assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 0);
    }

    #[test]
    fn a_full_disk_and_a_missing_directory_are_errors() {
        let full = write(Path::new("/dev/full")).expect_err("it is always full");
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(probe(&dir.path().join("gone")).expect_err("no such directory").kind(), io::ErrorKind::NotFound);
    }
}
