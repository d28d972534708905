//! A host: a holder process with network, mount, UTS and, if this is root's lab, cgroup namespaces of its own, and the
//! programs that run in it.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::sethostname;
use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::fabric::{margay_program, own_command};
use crate::program::Program;
use crate::shadow::{Own, shadow};
use crate::topology;

const READY: &str = "ready";

/// How programs get into a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entrance {
    /// Process that holds the namespaces, by its number inside the lab.
    pub holder_pid: u32,
    /// None without root, or where the machine has none of version 2: programs stay in that of the lab.
    cgroup: Option<PathBuf>,
}

impl Entrance {
    /// The words that go before a command. The command has the process id of the first of them.
    pub fn words(&self) -> Vec<OsString> {
        let pid = self.holder_pid.to_string();
        let namespaces = ["--target", &pid, "--net", "--mount", "--uts"].map(OsString::from);
        let Some(cgroup) = &self.cgroup else {
            return [OsString::from("nsenter")].into_iter().chain(namespaces).chain(["--".into()]).collect();
        };
        // Programs start in the cgroup of who starts them, and namespaces do not change that.
        let joining = ["sh", "-c", "echo 0 > \"$0\" && exec nsenter \"$@\""].map(OsString::from);
        let words = joining.into_iter().chain([cgroup.join("cgroup.procs").into()]).chain(namespaces);
        words.chain(["--cgroup".into(), "--".into()]).collect()
    }
}

/// A running host. Its namespaces live as long as its holder and its programs.
pub struct Host {
    /// As in the topology.
    pub plan: topology::Host,
    /// Logs and files of this host, outside of its private directories.
    pub dir: PathBuf,
    holder: Child,
    entrance: Entrance,
    /// The holder ends when this closes.
    _leash: ChildStdin,
    /// Of another version, where the host does not run the one that is tested.
    other_program: Mutex<Option<PathBuf>>,
}

impl Host {
    /// Starts the holder. The host has a loopback interface and nothing else.
    ///
    /// # Errors
    ///
    /// Namespaces or private mounts are refused.
    pub fn start(plan: &topology::Host, lab_dir: &Path, hosts_file: &str) -> Result<Self> {
        let dir = lab_dir.join(&plan.name);
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let own_cgroup = cgroup::of_host(lab_dir, &plan.name).ok();
        let mut holder = own_command()?
            .args(["hold", &plan.name, "--dir"])
            .arg(&dir)
            .args(own_cgroup.iter().flat_map(|path| [OsStr::new("--cgroup"), path.as_os_str()]))
            .args((plan.role == topology::Role::Gateway).then_some("--forwarding"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a host's holder")?;
        let mut leash = holder.stdin.take().context("the holder has no input")?;
        let mut answer = BufReader::new(holder.stdout.take().context("the holder has no output")?);
        writeln!(leash, "{}", serde_json::to_string(hosts_file)?).context("the holder does not listen")?;
        let mut line = String::new();
        answer.read_line(&mut line)?;
        if line.trim() != READY {
            holder.wait()?;
            bail!("host {} could not be set up; its holder says why above", plan.name);
        }
        let holder_pid = holder.id();
        // The holder may not have been let into it.
        let cgroup = own_cgroup.filter(|own| cgroup::of(holder_pid).is_ok_and(|found| found == *own));
        Ok(Self {
            plan: plan.clone(),
            dir,
            holder,
            entrance: Entrance { holder_pid, cgroup },
            _leash: leash,
            other_program: Mutex::new(None),
        })
    }

    /// The name in the topology.
    pub fn name(&self) -> &str {
        &self.plan.name
    }

    /// Process that holds the namespaces.
    pub fn holder_pid(&self) -> u32 {
        self.holder.id()
    }

    /// The way into it.
    pub fn entrance(&self) -> &Entrance {
        &self.entrance
    }

    /// A command that runs in this host. Its process id stays that of the program.
    pub fn command<I, S>(&self, argv: I) -> Command
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let words = self.entrance.words();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(argv);
        command.current_dir(&self.dir).stdin(Stdio::null());
        Self::set_path(&mut command);
        command
    }

    /// Lets `margay` be found by its name, the one that this lab runs.
    pub fn set_path(command: &mut Command) {
        let Ok(program) = margay_program() else { return };
        let dirs = program.parent().into_iter().map(Path::to_owned);
        let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into());
        if let Ok(joined) = std::env::join_paths(dirs.chain(std::env::split_paths(&path))) {
            command.env("PATH", joined);
        }
    }

    /// Runs a program to its end, whatever it says.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn output<I, S>(&self, argv: I) -> Result<Output>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        self.command(argv).output().with_context(|| format!("cannot run a program on {}", self.name()))
    }

    /// Runs a program to its end and gives its standard output.
    ///
    /// # Errors
    ///
    /// It cannot be started, or it fails; the message has what it wrote to standard error.
    pub fn run<I, S>(&self, argv: I) -> Result<String>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let argv: Vec<S> = argv.into_iter().collect();
        let output = self.output(&argv)?;
        if !output.status.success() {
            let words: Vec<_> = argv.iter().map(|word| word.as_ref().to_string_lossy()).collect();
            bail!(
                "on {}: `{}` failed ({}): {}{}",
                self.name(),
                words.join(" "),
                output.status,
                String::from_utf8_lossy(&output.stderr).trim(),
                String::from_utf8_lossy(&output.stdout).trim()
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a shell script to its end and gives its standard output. It stops at the first command that fails.
    ///
    /// # Errors
    ///
    /// As for [`run`](Self::run).
    pub fn shell(&self, script: &str) -> Result<String> {
        self.run(["bash", "-euo", "pipefail", "-c", script])
    }

    /// Starts a program; what it prints goes to the file `<log>.log` of this host. It ends when the handle is dropped.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn spawn<I, S>(&self, log: &str, argv: I) -> Result<Program>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        Program::start(self.command(argv), &self.dir.join(format!("{log}.log")))
    }

    /// The host's `margay` from now on: of another version, or (`None`) the one that is tested.
    pub fn set_program(&self, other: Option<PathBuf>) {
        *self.other_program.lock().unwrap_or_else(PoisonError::into_inner) = other;
    }

    /// The host's `margay`.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn program(&self) -> Result<PathBuf> {
        let other = self.other_program.lock().unwrap_or_else(PoisonError::into_inner).clone();
        other.map_or_else(margay_program, Ok)
    }

    /// Runs a hidden traffic program of the lab in this host.
    ///
    /// # Errors
    ///
    /// The path of this program is not known.
    pub fn traffic<I, S>(&self, args: I) -> Result<Command>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let own = own_command()?;
        let mut command = self.command([own.get_program()]);
        command.args(own.get_args()).arg("traffic").args(args);
        Ok(command)
    }

    /// The words of the traffic program for another program that starts it on this host: without those that lead there.
    ///
    /// # Errors
    ///
    /// This program's path is not known.
    pub fn words_of_traffic(&self, args: &[&str]) -> Result<Vec<String>> {
        let command = self.traffic(args)?;
        let words: Vec<String> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        let from = words.iter().position(|word| word == "--").context("no words of the program")? + 1;
        Ok(words[from..].to_vec())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // What the agent logged lies in the host's own /run, which goes with it. Hosts without an agent have none.
        let log = format!("/proc/{}/root/run/margay/agent.log", self.holder.id());
        let _ = std::fs::copy(log, self.dir.join("agent.log"));
        // A holder that is gone already is what we want.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// The holder process: makes the namespaces, says "ready", and waits for its input to close. Where it may not make the
/// cgroup, it stays in the one that it is in.
///
/// # Errors
///
/// Namespaces or private mounts are refused.
pub fn hold(name: &str, dir: &Path, own_cgroup: Option<&Path>, forwarding: bool) -> Result<()> {
    let mut input = std::io::stdin().lines();
    let hosts_file: String = serde_json::from_str(&input.next().context("no input")??)?;
    let own_cgroup = own_cgroup.filter(|path| cgroup::join(path).is_ok());
    let of_cgroup = own_cgroup.map_or(CloneFlags::empty(), |_| CloneFlags::CLONE_NEWCGROUP);
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS | of_cgroup)
        .with_context(|| format!("cannot make the namespaces of host {name}"))?;
    sethostname(name).context("cannot set the host name")?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).context("cannot make mounts private")?;
    if let Some(own) = own_cgroup {
        cgroup::show_as_root(own)?;
    }
    let own_etc = [
        Own::Directory("margay"),
        Own::File("hostname", format!("{name}\n")),
        Own::File("hosts", hosts_file),
        Own::File("resolv.conf", String::new()),
    ];
    shadow(Path::new("/etc"), &dir.join("etc"), &own_etc)?;
    shadow(Path::new("/run"), &dir.join("run"), &[Own::Directory("margay")])?;
    shadow(Path::new("/var/lib"), &dir.join("var-lib"), &[Own::Directory("margay")])?;
    // Machines may reserve it to the first network namespace; comparisons ask for it per socket, where it is free.
    let _ = sysctl("net/ipv4/tcp_congestion_control", "cubic");
    // Hosts talk at once: nobody else can have their addresses.
    for which in ["all", "default"] {
        sysctl(&format!("net/ipv6/conf/{which}/accept_dad"), "0")?;
        sysctl(&format!("net/ipv6/conf/{which}/accept_ra"), "0")?;
    }
    if forwarding {
        sysctl("net/ipv4/ip_forward", "1")?;
        sysctl("net/ipv6/conf/all/forwarding", "1")?;
    }
    write_line(READY)?;
    for line in input {
        line?;
    }
    Ok(())
}

fn sysctl(key: &str, value: &str) -> Result<()> {
    let path = Path::new("/proc/sys").join(key);
    std::fs::write(&path, value).with_context(|| format!("cannot set {} to {value}", path.display()))
}

/// One line for the process that reads our standard output.
///
/// # Errors
///
/// It does not listen any more.
pub fn write_line(text: &str) -> Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{text}")?;
    Ok(output.flush()?)
}
