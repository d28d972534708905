//! Cgroups (version 2) as the mark of a program: whatever it starts is in it, too, and no program can leave it by
//! itself.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use margay_control::entropy;
use margay_datapath::active_sockets::CgroupId;
use nix::mount::{MsFlags, mount, umount};

/// Begins the names of those that are made here.
const PREFIX: &str = "margay-run-";
/// Where the hierarchy is mounted if nobody has done so: below the runtime directory.
const MOUNT: &str = "cgroup";

/// The hierarchy.
#[derive(Clone, Debug)]
pub struct Hierarchy {
    root: PathBuf,
}

impl Hierarchy {
    /// Finds where it is mounted; mounts it below `runtime_dir` where nobody has.
    ///
    /// # Errors
    ///
    /// The kernel has none, or this process may not mount it.
    pub fn find(runtime_dir: &Path) -> io::Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let of_version_2 = mounts.lines().filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (path, kind) = (words.next()?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(path))
        });
        // One that this process cannot see, under another mount say, is of no use.
        if let Some(root) = of_version_2.into_iter().find(|path| path.join("cgroup.procs").exists()) {
            return Ok(Self { root });
        }
        let root = runtime_dir.join(MOUNT);
        fs::create_dir_all(&root)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("cgroup2"), &root, Some("cgroup2"), flags, None::<&str>)?;
        Ok(Self { root })
    }

    /// Unmounts it where it was mounted for the agent.
    pub fn release(runtime_dir: &Path) {
        let root = runtime_dir.join(MOUNT);
        if root.is_dir() {
            // Not mounted, or in use: an empty directory does no harm.
            let _ = umount(&root);
            let _ = fs::remove_dir(&root);
        }
    }

    /// Where it is mounted.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The cgroup that a process is in.
    ///
    /// # Errors
    ///
    /// The process is gone.
    pub fn of(&self, pid: u32) -> io::Result<PathBuf> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let path = text.lines().find_map(|line| line.strip_prefix("0::"));
        let path = path.ok_or_else(|| io::Error::other("the kernel has no cgroups of version 2"))?;
        Ok(self.root.join(path.trim_start_matches('/')))
    }

    /// Makes a cgroup in that of the process, and moves the process there. What limits the process still does.
    ///
    /// # Errors
    ///
    /// The process is gone, or the kernel's word.
    pub fn isolate(&self, pid: u32) -> io::Result<PathBuf> {
        // A number alone would not do: another PID namespace, or a process before, may have had it here.
        let random = entropy::rng().map_err(io::Error::other)?.u32();
        let path = self.of(pid)?.join(format!("{PREFIX}{pid}-{random:08x}"));
        fs::create_dir(&path)?;
        fs::write(path.join("cgroup.procs"), pid.to_string()).inspect_err(|_| {
            // Nobody is in it yet.
            let _ = fs::remove_dir(&path);
        })?;
        Ok(path)
    }
}

/// The kernel's number of a cgroup.
///
/// # Errors
///
/// It is gone.
pub fn id(path: &Path) -> io::Result<CgroupId> {
    Ok(CgroupId(fs::metadata(path)?.ino()))
}

/// Whether no process is in a cgroup or below it; one that is gone has none.
pub fn is_empty(path: &Path) -> bool {
    match fs::read_to_string(path.join("cgroup.events")) {
        Ok(text) => text.lines().any(|line| line == "populated 0"),
        Err(_) => true,
    }
}

fn is_ours(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX))
}

/// Removes one that is empty, if it was made here.
pub fn remove(path: &Path) {
    if !is_ours(path) {
        return;
    }
    // The program's own come first.
    for inner in fs::read_dir(path).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir()) {
        remove_empty(&inner.path());
    }
    remove_empty(path);
}

fn remove_empty(path: &Path) {
    match fs::remove_dir(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::debug!(path = %path.display(), %error, "a cgroup stays");
        }
        _ => {}
    }
}

/// The processes in a cgroup and below it.
pub fn processes(path: &Path) -> Vec<u32> {
    let text = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    let inner = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let below = inner.filter(|path| path.is_dir()).flat_map(|path| processes(&path));
    text.lines().filter_map(|line| line.parse().ok()).chain(below).collect()
}

#[cfg(test)]
mod test {
    use std::process::{Child, Command};

    use nix::unistd::Uid;

    use super::*;

    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().expect("it runs");
            self.0.wait().expect("it ends");
        }
    }

    #[test]
    fn a_program_gets_a_cgroup_of_its_own_that_goes_with_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let Some(hierarchy) = Hierarchy::find(dir.path()).ok().filter(|_| Uid::effective().is_root()) else {
            eprintln!("skipped: it needs root, and cgroups of version 2");
            return;
        };
        let sleeper = Sleeper(Command::new("sleep").arg("1000").spawn().expect("a program"));
        let pid = sleeper.0.id();
        let before = hierarchy.of(pid).expect("it is somewhere");
        let own = hierarchy.isolate(pid).expect("moved");
        assert_eq!((own.parent(), hierarchy.of(pid).expect("it is there")), (Some(before.as_path()), own.clone()));
        assert_eq!(processes(&own), [pid]);
        assert!(!is_empty(&own));
        remove(&own);
        assert!(own.exists(), "one with a program in it stays");
        drop(sleeper);
        remove(&own);
        assert!(!own.exists() && is_empty(&own));
        // What was not made here is nobody's to take away.
        let other = before.join("other");
        fs::create_dir(&other).expect("made");
        remove(&other);
        assert!(other.exists());
        fs::remove_dir(&other).expect("it is empty");
        Hierarchy::release(dir.path());
    }
}
