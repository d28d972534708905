//! A lab that stays: `up`, `exec`, `down`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use serde::{Deserialize, Serialize};

use crate::agent::Agents;
use crate::command::{fresh_dir, progress, tidy};
use crate::fabric::{self, Privilege};
use crate::host::{Entrance, Host, write_line};
use crate::lab::Lab;
use crate::program::wait_for;
use crate::topology::Topology;

/// What is remembered of a running lab.
#[derive(Serialize, Deserialize)]
struct State {
    init_pid: u32,
    /// Start time of the init, so that another process with its number is not taken for it.
    init_started: u64,
    dir: PathBuf,
    user_namespace: bool,
    hosts: BTreeMap<String, Entrance>,
}

fn state_file(name: &str) -> Result<PathBuf> {
    let plain = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if !plain {
        bail!("\"{name}\" cannot name a lab: use letters, digits and -");
    }
    let dir = if geteuid().is_root() {
        PathBuf::from("/run/margay-lab")
    } else {
        match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(dir) => PathBuf::from(dir).join("margay-lab"),
            None => std::env::temp_dir().join(format!("margay-lab-{}", geteuid())),
        }
    };
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir.join(format!("{name}.json")))
}

/// The 22nd field of `/proc/PID/stat`; none when there is no such process.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn running(name: &str) -> Result<Option<State>> {
    let path = state_file(name)?;
    let Ok(text) = std::fs::read_to_string(&path) else { return Ok(None) };
    let state: State =
        serde_json::from_str(&text).with_context(|| format!("{} is not a lab's state; remove it", path.display()))?;
    Ok((start_time(state.init_pid) == Some(state.init_started)).then_some(state))
}

/// Builds the hosts of `file` and leaves them running, agents included.
///
/// # Errors
///
/// The file is wrong, a lab of this name runs already, or something cannot be built.
pub fn up(file: &Path, name: &str) -> Result<()> {
    let topology = Topology::load(file)?;
    if running(name)?.is_some() {
        bail!("the lab \"{name}\" runs already; end it with `margay-lab down`, or give another --name");
    }
    let state_path = state_file(name)?;
    let dir = fresh_dir(name)?;
    let log_path = dir.join("lab.log");
    let log = std::fs::File::create(&log_path).with_context(|| format!("cannot write {}", log_path.display()))?;
    let user_namespace = !geteuid().is_root();
    progress(&format!("building {} hosts ({})", topology.hosts.len(), Privilege::of_this_process().sentence()));
    let file = file.canonicalize().with_context(|| format!("cannot find {}", file.display()))?;
    let mut init = fabric::start([OsString::from("up"), file.into(), dir.clone().into()], true, |command| {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    })?;
    let mut line = String::new();
    BufReader::new(init.stdout.take().context("the lab has no output")?).read_line(&mut line)?;
    let Ok(hosts) = serde_json::from_str(&line) else {
        fabric::finish(init)?;
        bail!("the lab could not be built:\n{}", std::fs::read_to_string(&log_path).unwrap_or_default().trim());
    };
    let init_started = start_time(init.id()).context("the lab ended at once")?;
    let state = State { init_pid: init.id(), init_started, dir, user_namespace, hosts };
    std::fs::write(&state_path, serde_json::to_string(&state)?)
        .with_context(|| format!("cannot write {}", state_path.display()))?;
    progress(&format!("up: {}", topology.hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(" ")));
    Ok(())
}

/// The worker of a standing lab: builds it, says so on standard output, and stays.
///
/// # Errors
///
/// Something cannot be built.
pub fn work(file: &Path, dir: &Path) -> Result<()> {
    let topology = Topology::load(file)?;
    let lab = Lab::build(topology, dir)?;
    let _agents = Agents::start(&lab)?;
    let hosts: BTreeMap<&str, &Entrance> = lab.hosts.iter().map(|host| (host.name(), host.entrance())).collect();
    write_line(&serde_json::to_string(&hosts)?)?;
    loop {
        std::thread::park();
    }
}

/// Replaces this process by a command on a host.
///
/// # Errors
///
/// There is no such lab or host, or the command cannot be started.
pub fn exec(name: &str, host: &str, argv: &[OsString]) -> Result<()> {
    let state =
        running(name)?.with_context(|| format!("no lab \"{name}\" runs; start one with `margay-lab up FILE`"))?;
    let Some(entrance) = state.hosts.get(host) else {
        let names: Vec<_> = state.hosts.keys().map(String::as_str).collect();
        bail!("there is no host \"{host}\"; there are: {}", names.join(", "));
    };
    let mut command = Command::new("nsenter");
    command.arg("--target").arg(state.init_pid.to_string());
    if state.user_namespace {
        command.args(["--user", "--preserve-credentials"]);
    }
    command.args(["--mount", "--pid", "--net", "--"]).args(entrance.words()).args(argv);
    Host::set_path(&mut command);
    Err(command.exec()).context("cannot run nsenter; is util-linux installed?")
}

/// Ends a standing lab with everything in it.
///
/// # Errors
///
/// None runs.
pub fn down(name: &str) -> Result<()> {
    let Some(state) = running(name)? else { bail!("no lab \"{name}\" runs") };
    let pid = Pid::from_raw(state.init_pid.cast_signed());
    kill(pid, Signal::SIGKILL).with_context(|| format!("cannot end process {pid}; it is another user's?"))?;
    wait_for("the end of the lab", Duration::from_secs(10), || match start_time(state.init_pid) {
        Some(started) if started == state.init_started && !is_zombie(state.init_pid) => bail!("process {pid} is there"),
        _ => Ok(()),
    })?;
    std::fs::remove_file(state_file(name)?)?;
    tidy(&state.dir, false);
    Ok(())
}

/// An ended process whose parent has not asked for its status yet.
fn is_zombie(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z')))
}
