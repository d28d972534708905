//! Containers as people run them: podman's, root's and another user's, with its own networks and translation rules; and
//! pasta, by which newer versions connect containers of users. Nothing is fetched: a container has the machine's `/usr`
//! and the lab's own program.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::fabric::own_command;
use crate::host::Host;
use crate::program::{Program, output_within, tail, wait_for};

const LIMIT: Duration = Duration::from_secs(30);
/// A user without rights, of the engine's own `/etc/passwd`.
const USER_ID: u32 = 4711;

/// Where pasta takes questions for the host's own resolver, as podman has it.
const PASTA_RESOLVER: &str = "169.254.1.1";

/// Who runs containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// With a bridge and netfilter's rules.
    Root,
    /// Rootless, in user namespaces.
    Somebody,
}

/// A place on a host where podman runs: what it keeps under `/run` and `/dev/shm` is not the machine's.
pub struct Engine<'a> {
    host: &'a Host,
    holder: Program,
    dir: PathBuf,
}

impl<'a> Engine<'a> {
    /// Prepares it.
    ///
    /// # Errors
    ///
    /// A mount is refused; the message is the shell's.
    pub fn start(host: &'a Host) -> Result<Self> {
        let dir = host.dir.join("engine");
        let own = own_command()?;
        let programs = PathBuf::from(own.get_program());
        let programs = programs.parent().context("a program is in a directory")?;
        let script = format!(
            r#"set -eu
mkdir -p {dir}/home {dir}/program {dir}/rootfs; cd {dir}
mount -t tmpfs none /run; mount -t tmpfs none /dev/shm; mkdir -p /run/user/{USER_ID}
# crun knows no mixture of versions.
[ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ] || mount -t cgroup2 none /sys/fs/cgroup
mount --bind {programs} program
cat /etc/passwd > passwd; echo "somebody:x:{USER_ID}:{USER_ID}::{dir}/home:/bin/sh" >> passwd; mount --bind passwd /etc/passwd
# Links are not read there; this `/etc` is the host's own.
for file in subuid subgid; do rm -f /etc/$file; echo somebody:100000:65536 > /etc/$file; done
echo nameserver {PASTA_RESOLVER} > resolv.conf
chown {USER_ID}:{USER_ID} home /run/user/{USER_ID}; chmod 700 /run/user/{USER_ID}
cd rootfs; mkdir usr proc sys dev etc run tmp; for link in bin sbin lib lib64; do ln -s usr/$link $link; done
echo ready; exec sleep infinity"#,
            dir = dir.display(),
            programs = programs.display(),
        );
        let holder = host.spawn("engine", ["unshare", "--mount", "sh", "-c", &script])?;
        wait_for("a place for containers", LIMIT, || {
            ensure!(holder.log().contains("ready"), "{}", tail(&holder.log()));
            Ok(())
        })?;
        Ok(Self { host, holder, dir })
    }

    /// The words before a command that is to run there, as this user.
    pub fn entrance(&self, user: User) -> Vec<OsString> {
        let pid = self.holder.pid().to_string();
        let mut words: Vec<OsString> = ["nsenter", "--target", &pid, "--mount", "--"].map(Into::into).into();
        if user == User::Somebody {
            let id = USER_ID.to_string();
            words.extend(["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "env"].map(OsString::from));
            words.push(format!("HOME={}/home", self.dir.display()).into());
            words.push(format!("XDG_RUNTIME_DIR=/run/user/{USER_ID}").into());
        }
        words
    }

    /// A program of the lab, as it is seen in a container (or, for pasta, where the engine is).
    fn traffic(&self, is_contained: bool, words: &[&str]) -> Result<Vec<OsString>> {
        let own = own_command()?;
        let name = PathBuf::from(own.get_program());
        let name = name.file_name().context("a program has a name")?;
        let place = if is_contained { PathBuf::from("/program") } else { self.dir.join("program") };
        let own = std::iter::once(place.join(name).into());
        Ok(own.chain(["traffic"].iter().chain(words).map(Into::into)).collect())
    }

    /// `podman` with what makes it this engine's, to be followed by a verb.
    fn podman(&self, user: User) -> Vec<OsString> {
        let mut words = self.entrance(user);
        words.extend(["podman", "--cgroup-manager", "cgroupfs", "--events-backend", "none"].map(OsString::from));
        if user == User::Root {
            let storage = self.dir.join("storage").into_os_string();
            words.extend(["--root".into(), storage, "--runroot".into(), "/run/engine".into()]);
        }
        words
    }

    /// The command that starts an echo server on port 7 of a container. It says so and ends; or, not `detached`, is the
    /// container for as long as it lives.
    ///
    /// # Errors
    ///
    /// This program's path is not known.
    pub fn echo(&self, user: User, name: &str, options: &[&str], port: u16, detached: bool) -> Result<Vec<OsString>> {
        let mut words = self.podman(user);
        words.extend(["run", "--name", name].map(OsString::from));
        words.extend(detached.then(|| "--detach".into()));
        // Where root may not raise limits, as on some machines, nor may podman. What `margay run` starts is found by
        // its cgroup.
        words.extend(
            ["--ulimit", "nofile=1024:4096", "--ulimit", "nproc=4096:4096", "--cgroups", "disabled"]
                .map(OsString::from),
        );
        words.extend(options.iter().map(Into::into));
        words.extend(["--volume", "/usr:/usr:ro", "--volume"].map(OsString::from));
        words.push(format!("{}/program:/program:ro", self.dir.display()).into());
        words.extend(["--rootfs".into(), self.dir.join("rootfs").into_os_string()]);
        words.extend(self.traffic(true, &["echo", "--listen", &format!("0.0.0.0:{port}")])?);
        Ok(words)
    }

    /// Starts such a container.
    ///
    /// # Errors
    ///
    /// podman refuses.
    pub fn start_echo(&self, user: User, name: &str, options: &[&str], port: u16) -> Result<()> {
        let mut command = self.host.command(self.echo(user, name, options, port, true)?);
        let output = output_within(&mut command, LIMIT)?;
        ensure!(output.status.success(), "podman: {}", tail(&String::from_utf8_lossy(&output.stderr)));
        Ok(())
    }

    /// A traffic program in a container that runs.
    ///
    /// # Errors
    ///
    /// This program's path is not known.
    pub fn inside(&self, user: User, name: &str, words: &[&str]) -> Result<Command> {
        let mut argv = self.podman(user);
        argv.extend(["exec", name].map(OsString::from));
        argv.extend(self.traffic(true, words)?);
        Ok(self.host.command(argv))
    }

    /// A traffic program in a namespace that pasta connects, with these options besides those that podman gives it by
    /// itself.
    ///
    /// # Errors
    ///
    /// This program's path is not known.
    pub fn pasta(&self, options: &[&str], words: &[&str]) -> Result<Command> {
        let mut argv = self.entrance(User::Somebody);
        let forward = ["--dns-forward", PASTA_RESOLVER];
        argv.extend(["pasta", "--quiet", "--ipv4-only", "--config-net"].into_iter().chain(forward).map(OsString::from));
        argv.extend(options.iter().map(Into::into));
        let resolver = self.dir.join("resolv.conf");
        let script = format!("mount --bind {} /etc/resolv.conf && exec \"$@\"", resolver.display());
        argv.extend(["--", "unshare", "--mount", "sh", "-c", &script, "sh"].map(OsString::from));
        argv.extend(self.traffic(false, words)?);
        Ok(self.host.command(argv))
    }

    /// The first address of a container's interface, as podman says it.
    ///
    /// # Errors
    ///
    /// There is no such container.
    pub fn address(&self, name: &str) -> Result<String> {
        let mut argv = self.podman(User::Root);
        argv.extend(["inspect", "--format", "{{.NetworkSettings.IPAddress}}", name].map(OsString::from));
        Ok(self.host.run(argv)?.trim().to_owned())
    }
}
