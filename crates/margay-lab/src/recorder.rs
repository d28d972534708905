//! dumpcap, on a link of a host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::host::Host;
use crate::program::{Program, wait_for};

/// A capture that is under way.
pub struct Recorder {
    program: Program,
    file: PathBuf,
}

impl Recorder {
    /// Records what passes a host's link of this number and matches a filter of pcap, until there is so much.
    ///
    /// # Errors
    ///
    /// dumpcap does not start.
    pub fn start(host: &Host, link: usize, matching: &str, count: usize) -> Result<Self> {
        Self::start_of(host, link, &format!("udp port 54324 and less 1514 and {matching}"), count)
    }

    /// As [`start`](Self::start), of any packets.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub fn start_of(host: &Host, link: usize, filter: &str, count: usize) -> Result<Self> {
        Self::start_at(host, &format!("eth{link}"), filter, count)
    }

    /// As [`start_of`](Self::start_of), at an interface of this name.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub fn start_at(host: &Host, interface: &str, filter: &str, count: usize) -> Result<Self> {
        let (file, log) = (host.dir.join(format!("{interface}.pcap")), format!("dumpcap-{interface}"));
        // What an earlier one has left would be taken for this one's.
        for left in [host.dir.join(format!("{log}.log")), file.clone()] {
            let _ = std::fs::remove_file(left);
        }
        let path = file.to_str().context("a path that is no text")?;
        let count = count.to_string();
        // Unlike tcpdump, it also runs where no other user exists: in a user namespace.
        let argv = ["dumpcap", "-q", "-P", "-i", interface, "-f", filter, "-c", &count, "-w", path];
        let program = host.spawn(&log, argv)?;
        wait_for("dumpcap", Duration::from_secs(5), || {
            if program.log().contains("File:") { Ok(()) } else { bail!("it does not listen: {}", program.log()) }
        })?;
        Ok(Self { program, file })
    }

    /// The file (pcap), while it is written.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Ends it, if it has not ended by itself; gives the file (pcap).
    ///
    /// # Errors
    ///
    /// dumpcap fails.
    pub fn finish(&mut self) -> Result<PathBuf> {
        // It has ended by itself when it has seen enough.
        let _ = self.program.signal(Signal::SIGINT);
        self.program.finish(Duration::from_secs(5))?;
        Ok(self.file.clone())
    }
}
