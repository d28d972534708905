//! The namespaces in which a lab lives, so that nothing of it can leak into the machine or outlive it.
//!
//! Three processes: the *front* (what the user started) makes the namespaces; the *init* is process 1 of a PID
//! namespace and only reaps; the *worker* builds hosts and does the work. When the front or the init ends, the kernel
//! ends everything else. A user who is not root gets a user namespace around it all.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, getegid, geteuid};

/// With what rights a lab runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// As root of the machine.
    Root,
    /// As root of a user namespace of its own; there is no eBPF then.
    Rootless,
}

impl Privilege {
    /// What this process would get.
    pub fn of_this_process() -> Self {
        if geteuid().is_root() && !in_user_namespace() { Self::Root } else { Self::Rootless }
    }

    /// One sentence for the user.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::Root => "running as root",
            Self::Rootless => "running rootless, in a user namespace",
        }
    }
}

/// The first user namespace maps all identifiers onto themselves.
fn in_user_namespace() -> bool {
    std::fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_whitespace().collect::<Vec<_>>() != ["0", "0", "4294967295"])
}

fn own_program() -> Result<PathBuf> {
    std::env::current_exe().context("cannot find the path of this program")
}

/// The program of this lab, to start parts of itself.
///
/// # Errors
///
/// `/proc` does not say where it is.
pub fn own_command() -> Result<Command> {
    Ok(Command::new(own_program()?))
}

/// The `margay` program for the hosts: `$MARGAY_PROGRAM`, or the one beside this program.
///
/// # Errors
///
/// There is none.
pub fn margay_program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("MARGAY_PROGRAM") {
        return Ok(path.into());
    }
    let path = own_program()?.with_file_name("margay");
    if !path.is_file() {
        bail!("{} does not exist; build it, or name it in MARGAY_PROGRAM", path.display());
    }
    Ok(path)
}

/// Makes the namespaces and starts `inside ARGS` as their process 1.
///
/// The caller must have one thread only (the kernel wants that for a user namespace) and keeps no use of its own
/// network afterwards.
///
/// # Errors
///
/// The kernel or a policy of the machine refuses namespaces; the message says which.
pub fn start<I, S>(args: I, outlives_front: bool, adjust: impl FnOnce(&mut Command)) -> Result<Child>
where
    I: IntoIterator<Item = S>,
    S: AsRef<OsStr>,
{
    let privilege = Privilege::of_this_process();
    if privilege == Privilege::Rootless && !geteuid().is_root() {
        enter_user_namespace()?;
    }
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWPID).map_err(|error| {
        anyhow::anyhow!("cannot make network and PID namespaces ({error}); run as root, or where user namespaces work")
    })?;
    let mut command = own_command()?;
    command.arg("inside");
    if outlives_front {
        command.arg("--outlive");
    }
    command.args(args).env("MARGAY_LAB_PRIVILEGE", if privilege == Privilege::Root { "root" } else { "rootless" });
    adjust(&mut command);
    command.spawn().context("cannot start the lab's first process")
}

fn enter_user_namespace() -> Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|error| {
        anyhow::anyhow!(
            "cannot make a user namespace ({error}); see user.max_user_namespaces, kernel.unprivileged_userns_clone \
             and kernel.apparmor_restrict_unprivileged_userns, or run as root"
        )
    })?;
    let write = |file: &str, text: String| {
        std::fs::write(file, text).with_context(|| format!("cannot write {file} for the user namespace"))
    };
    write("/proc/self/setgroups", "deny".into())?;
    write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    write("/proc/self/gid_map", format!("0 {gid} 1"))
}

/// The rights with which the lab around this process was started.
pub fn privilege_inside() -> Privilege {
    match std::env::var("MARGAY_LAB_PRIVILEGE").as_deref() {
        Ok("root") => Privilege::Root,
        _ => Privilege::Rootless,
    }
}

/// Process 1: private mounts, a `/proc` of its own, the worker, and then reaping until the worker ends. Returns the
/// worker's exit status.
///
/// # Errors
///
/// Mounting is refused, or the worker cannot be started.
pub fn be_init(outlives_front: bool, worker_args: &[OsString]) -> Result<u8> {
    if !outlives_front {
        prctl::set_pdeathsig(Signal::SIGKILL).context("cannot tie the lab to its front")?;
    }
    unshare(CloneFlags::CLONE_NEWNS).context("cannot make a mount namespace")?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).context("cannot make mounts private")?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, none).context("cannot mount a /proc for the lab")?;
    let mut worker = own_command()?;
    worker.arg("work").args(worker_args);
    let child = worker.spawn().context("cannot start the lab's worker")?;
    let worker_pid = Pid::from_raw(i32::try_from(child.id()).context("process id out of range")?);
    loop {
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, status)) if pid == worker_pid => {
                return Ok(u8::try_from(status).unwrap_or(u8::MAX));
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == worker_pid => bail!("the lab's worker died of {signal}"),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => bail!("waiting for the lab's worker: {error}"),
        }
    }
}

/// Waits for the init and gives its exit status.
///
/// # Errors
///
/// It died of a signal.
pub fn finish(mut init: Child) -> Result<u8> {
    let status = init.wait().context("cannot wait for the lab")?;
    match status.code() {
        Some(code) => Ok(u8::try_from(code).unwrap_or(u8::MAX)),
        None => bail!("the lab was ended by signal {}", status.signal().unwrap_or_default()),
    }
}

/// No input for what runs without a user.
pub fn quiet_input(command: &mut Command) {
    command.stdin(Stdio::null());
}
