//! What a process that parses other hosts' bytes does when it starts: it makes room for many clients, and gives up
//! root's rights once it has its sockets. Shared by all of Margay's processes that need none afterwards.

use std::io;

use nix::sys::prctl::{set_dumpable, set_no_new_privs};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Gid, Uid, geteuid, setgid, setgroups, setuid};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

/// User and group `nobody`, who owns no file.
const NOBODY: u32 = 65_534;

/// Descriptors that a process may have, as Margay's systemd unit says.
const DESCRIPTORS_MAX: u64 = 65_536;

/// Raises the soft limit of descriptors, mostly 1,024, to 65,536 or to the hard limit. A client takes one or more.
pub fn raise_descriptor_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard.min(DESCRIPTORS_MAX)
    {
        // Everybody may, up to the hard limit; else the process goes on with fewer clients.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard.min(DESCRIPTORS_MAX), hard);
    }
}

/// Root becomes `nobody` without any capability; another user stays who it is, and loses its capabilities. No program
/// that this one starts gets more. Other processes of the same user cannot trace this one, nor read its memory or
/// descriptors (ptrace(2), PR_SET_DUMPABLE); they can still end it. To be called while the process has one thread: the
/// kernel has capabilities for each.
///
/// In a user namespace that knows one user alone, root stays root; the namespace is what confines it there, and the
/// capabilities are gone.
///
/// # Errors
///
/// The kernel leaves this process its capabilities: it must not go on.
pub fn drop_privileges() -> io::Result<()> {
    let become_nobody = || {
        setgroups(&[])?;
        setgid(Gid::from_raw(NOBODY))?;
        setuid(Uid::from_raw(NOBODY))
    };
    if geteuid().is_root()
        && let Err(error) = become_nobody()
    {
        tracing::warn!(%error, "this process cannot become nobody; it stays root, without capabilities");
    }
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    // Where the user has changed, the kernel has done that, unless `fs.suid_dumpable` is 1; elsewhere not.
    set_dumpable(false)?;
    Ok(set_no_new_privs()?)
}

#[cfg(test)]
mod test {
    use std::fs;
    use std::process::Command;

    use nix::sys::prctl::get_dumpable;

    use super::*;

    /// A line of what the kernel says of this thread.
    fn status(name: &str) -> String {
        let all = fs::read_to_string("/proc/thread-self/status").expect("proc is mounted");
        let line = all.lines().find_map(|line| line.strip_prefix(name)).expect("there is such a line");
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Privileges are the whole process's, so another process gives them up: this test, run once more.
    #[test]
    fn a_process_without_privileges_has_no_capability_and_gets_none() {
        const VARIABLE: &str = "MARGAY_TEST_DROPS_PRIVILEGES";
        if std::env::var_os(VARIABLE).is_none() {
            let program = std::env::current_exe().expect("this program");
            let mut command = Command::new(program);
            command.args(["a_process_without_privileges_has_no_capability_and_gets_none", "--nocapture"]);
            let output = command.env(VARIABLE, "1").output().expect("a process");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            return;
        }
        let was_root = geteuid().is_root();
        drop_privileges().expect("they can be given up");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(status(set), "0000000000000000", "{set}");
        }
        assert_eq!(status("NoNewPrivs:"), "1");
        set_dumpable(true).expect("everybody may");
        drop_privileges().expect("there is nothing left to give up");
        assert!(!get_dumpable().expect("known"), "others of the same user cannot read its memory");
        if was_root {
            assert_eq!((status("Uid:"), status("Groups:")), ("65534 ".repeat(4).trim_end().to_owned(), String::new()));
            assert!(setuid(Uid::from_raw(0)).is_err(), "there is no way back");
        }
    }
}
