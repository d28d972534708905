//! Cgroups (version 2) of hosts. Each has one that is the root to its programs, as it is in a container: what an agent
//! attaches to its machine's cgroups then meets that host's programs only, and costs those of the other hosts nothing.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};

/// Begins the names of all cgroups that labs make.
const PREFIX: &str = "margay-lab-";
/// Another lab may remove one that nobody has joined yet.
const ATTEMPTS: usize = 8;

/// Where this machine has them mounted.
fn mount_point() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let found = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|words| words[2] == "cgroup2");
    Ok(found.context("no cgroup file system of version 2")?[1].into())
}

/// The cgroup of a process.
///
/// # Errors
///
/// There is no such process, or there are no such cgroups.
pub fn of(pid: u32) -> Result<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).with_context(|| format!("no process {pid}"))?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::")).context("no cgroups of version 2")?;
    Ok(mount_point()?.join(path.trim_start_matches('/')))
}

/// The cgroup of a host, below that of this process. `lab_dir` tells labs apart.
///
/// # Errors
///
/// There are no such cgroups.
pub fn of_host(lab_dir: &Path, host: &str) -> Result<PathBuf> {
    let lab = lab_dir.file_name().context("a lab's directory has a name")?.to_string_lossy().into_owned();
    let lab = lab.strip_prefix(PREFIX).unwrap_or(&lab);
    Ok(of(std::process::id())?.join(format!("{PREFIX}{lab}.{host}")))
}

/// Makes a cgroup, and moves this process there.
///
/// # Errors
///
/// The kernel's word: this process is not root, say.
pub fn join(path: &Path) -> io::Result<()> {
    let mut outcome = Ok(());
    for _ in 0..ATTEMPTS {
        match fs::create_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        outcome = fs::write(path.join("cgroup.procs"), "0");
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// Shows `own` as the root of all, in a mount namespace of its own. To mount the file system itself once more is
/// refused in a place where it is mounted already.
///
/// # Errors
///
/// Mounting is refused.
pub fn show_as_root(own: &Path) -> Result<()> {
    let point = mount_point()?;
    mount(Some(own), &point, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .with_context(|| format!("cannot show the host's own cgroup as {}", point.display()))
}

/// Removes those of labs that have ended, however they ended. What somebody is in stays: the kernel sees to it.
pub fn remove_ended() {
    let Ok(own) = of(std::process::id()) else { return };
    for entry in fs::read_dir(own).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            remove(&entry.path());
        }
    }
}

/// Agents make some below a host's for programs that serve names.
fn remove(path: &Path) {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    for inner in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove(&inner.path());
    }
    // Refused where a process is in it, or in one below.
    let _ = fs::remove_dir(path);
}
