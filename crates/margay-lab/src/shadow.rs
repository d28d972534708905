//! Private copies of `/etc`, `/run` and `/var/lib` for a host, without copying: a small file system of links to the
//! real entries, in which some names are the host's own. Works in a user namespace, where overlays of root's files do
//! not.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};

/// Where the real directory can be seen inside the private one.
const REAL: &str = ".host";

/// A name that belongs to the host.
pub enum Own<'a> {
    /// An empty directory.
    Directory(&'a str),
    /// A file with this text.
    File(&'a str, String),
}

impl Own<'_> {
    fn name(&self) -> &str {
        match self {
            Self::Directory(name) | Self::File(name, _) => name,
        }
    }
}

/// Puts a private version of `dir` in its place, for this mount namespace. `staging` is an empty directory.
///
/// # Errors
///
/// Mounting is refused.
pub fn shadow(dir: &Path, staging: &Path, own: &[Own]) -> Result<()> {
    fs::create_dir_all(staging).with_context(|| format!("cannot make {}", staging.display()))?;
    let none = None::<&str>;
    mount(Some("margay-lab"), staging, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=0755"))
        .with_context(|| format!("cannot mount a private {}", dir.display()))?;
    let real = staging.join(REAL);
    fs::create_dir(&real)?;
    mount(Some(dir), &real, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)
        .with_context(|| format!("cannot bind {}", dir.display()))?;
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let name = entry?.file_name();
        if !own.iter().any(|own| name == own.name()) {
            symlink(Path::new(REAL).join(&name), staging.join(&name))?;
        }
    }
    for own in own {
        match own {
            Own::Directory(name) => fs::create_dir(staging.join(name))?,
            Own::File(name, text) => fs::write(staging.join(name), text)?,
        }
    }
    mount(Some(staging), dir, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)
        .with_context(|| format!("cannot put a private {} in place", dir.display()))
}
