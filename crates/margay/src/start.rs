//! The agent as a process: one per host, started by `up` or by systemd, and told to be ready by whom it started.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixDatagram as StdDatagram;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use margay_control::StateError;
use margay_control::api::v1::{ShutdownRequest, StatusRequest};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::net::UnixDatagram;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::config::Config;
use crate::log_file;

const LOCK_FILE: &str = "agent.lock";
/// Keys are made and the disk is synced on the first start.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// The agent says goodbye to its routers and peers.
const STOP_LIMIT: Duration = Duration::from_secs(10);
const STOP_LOOK: Duration = Duration::from_millis(20);
/// One that runs answers at once, also under load.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
const LOG_TAIL_BYTES: u64 = 4096;
/// Is there while `up --router` holds.
const ROUTER_FILE: &str = "router";
/// Begins what a process says of itself, as systemd wants it.
const STATUS: &str = "STATUS=";
const UNIT: &str = "margay.service";
/// Where the unit reads what the command line adds; its place is fixed in the unit.
const UNIT_OPTIONS: &str = "/run/margay/options";

/// What the command line adds to the configuration.
#[derive(Clone, Debug, Default)]
pub struct StartOptions {
    /// `--config`.
    pub config_path: Option<PathBuf>,
    /// `--router`, now or by an earlier `up`.
    pub router: bool,
}

/// A started agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    /// `systemd` or `process`.
    pub how: &'static str,
    /// It was there already.
    pub was_running: bool,
}

/// The agent cannot be started or stopped.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Another one runs.
    #[error("an agent runs on this host already (process {pid}); `margay down` stops it, `margay status` asks it")]
    Running {
        /// Its process.
        pid: String,
    },
    /// The operating system refused.
    #[error("{}: cannot {act}: {error}{}", path.display(), advice(error))]
    Io {
        /// Which file.
        path: PathBuf,
        /// What was tried.
        act: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// It ended at once.
    #[error("{}{}", not_started(cause), last_lines(said, log))]
    Ended {
        /// Why.
        cause: String,
        /// Last lines of its log.
        said: String,
        /// The log.
        log: PathBuf,
    },
    /// It does not get ready.
    #[error("the agent is not ready after {READY_LIMIT:?}; {} says what it waits for", log.display())]
    Slow {
        /// The log.
        log: PathBuf,
    },
    /// It does not end.
    #[error("the agent (process {pid}) does not end; `kill -9 {pid}` ends it")]
    Stuck {
        /// Its process.
        pid: String,
    },
    /// systemd says no.
    #[error("systemctl {verb} margay: {said}; `journalctl -u margay` says more")]
    Systemd {
        /// What was asked.
        verb: &'static str,
        /// What it said.
        said: String,
    },
    /// The state directory.
    #[error(transparent)]
    State(#[from] StateError),
}

impl StartError {
    /// What is wrong, and what the agent said before, if that is known.
    pub fn parts(&self) -> (String, String) {
        match self {
            Self::Ended { cause, said, log } => (not_started(cause), last_lines(said, log)),
            other => (other.to_string(), String::new()),
        }
    }
}

fn not_started(cause: &str) -> String {
    format!("the agent does not start: {cause}")
}

fn last_lines(said: &str, log: &Path) -> String {
    let end = if said.is_empty() { String::new() } else { format!("; it ends with:\n{said}") };
    format!("\nIts log is {}{end}", log.display())
}

fn advice(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::PermissionDenied { "; run as root, or as who runs the agent" } else { "" }
}

fn io_error(path: &Path, act: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |error| StartError::Io { path: path.to_owned(), act, error }
}

/// While it lives, no other agent starts on this host.
#[derive(Debug)]
pub struct AgentLock {
    /// The kernel gives the lock back with the last descriptor, however the process ends.
    _file: File,
}

fn open_lock(config: &Config) -> Result<(PathBuf, File), StartError> {
    let dir = &config.host.runtime_dir;
    fs::create_dir_all(dir).map_err(io_error(dir, "make it"))?;
    let path = dir.join(LOCK_FILE);
    // Whoever may open it may lock it: then no agent would start, and whoever has the number of the last one's process
    // by now would be ended in its place.
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.map_err(io_error(&path, "open it"))?;
    // An earlier version has let everybody.
    file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(io_error(&path, "set its mode"))?;
    Ok((path, file))
}

/// Takes the lock, and notes the process in it.
///
/// # Errors
///
/// Another agent has it.
pub fn lock(config: &Config) -> Result<AgentLock, StartError> {
    let (path, mut file) = open_lock(config)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(StartError::Running { pid: read_pid(&mut file) }),
        Err(TryLockError::Error(error)) => return Err(io_error(&path, "lock it")(error)),
    }
    let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    written.map_err(io_error(&path, "write it"))?;
    Ok(AgentLock { _file: file })
}

fn read_pid(file: &mut File) -> String {
    let mut text = String::new();
    // Only for the message: the lock itself says that somebody is there.
    let _ = file.rewind().and_then(|()| file.read_to_string(&mut text));
    text.trim().to_owned()
}

/// The process of a running agent.
///
/// # Errors
///
/// The lock cannot be looked at.
pub fn running(config: &Config) -> Result<Option<String>, StartError> {
    let path = config.host.runtime_dir.join(LOCK_FILE);
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error(&path, "open it")(error)),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(None),
        Err(TryLockError::WouldBlock) => Ok(Some(read_pid(&mut file))),
        Err(TryLockError::Error(error)) => Err(io_error(&path, "look at its lock")(error)),
    }
}

/// Whether an agent runs here that answers. One that is just ending, or just starting, is waited for; one that is stuck
/// counts.
///
/// # Errors
///
/// As for [`running`].
pub async fn is_running(config: &Config) -> Result<bool, StartError> {
    let until = Instant::now() + STOP_LIMIT;
    while running(config)?.is_some() {
        if epoch_of(config).await.is_some() || Instant::now() >= until {
            return Ok(true);
        }
        sleep(STOP_LOOK).await;
    }
    Ok(false)
}

/// Tells whoever started this process how it goes, as systemd wants it (`sd_notify`). Without one, nothing happens.
pub fn notify(state: &str) {
    let Some(place) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let sent = StdDatagram::unbound().and_then(|socket| match place.to_str().and_then(|name| name.strip_prefix('@')) {
        Some(name) => {
            use std::os::linux::net::SocketAddrExt;
            let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
            socket.send_to_addr(state.as_bytes(), &address)
        }
        None => socket.send_to(state.as_bytes(), &place),
    });
    if let Err(error) = sent {
        tracing::warn!(%error, "nobody hears that the agent is ready");
    }
}

/// Whether whoever started this process is told how it goes.
pub fn has_starter() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// Tells whoever started this process why it ends.
pub fn notify_failure(cause: &str) {
    let line = cause.split_whitespace().collect::<Vec<_>>().join(" ");
    notify(&format!("{STATUS}{line}"));
}

/// Starts the agent and waits until it is ready.
///
/// # Errors
///
/// It does not start; the message has its last words.
pub async fn start(config: &Config, options: &StartOptions) -> Result<Started, StartError> {
    let by_systemd = has_unit().await;
    let how = if by_systemd { "systemd" } else { "process" };
    if is_running(config).await? {
        return Ok(Started { how, was_running: true });
    }
    keep(config, options).await?;
    if by_systemd {
        systemctl("start").await?;
    } else {
        spawn(config, options).await?;
    }
    Ok(Started { how, was_running: false })
}

/// Lets the next start, by whomever, know what the command line has said.
///
/// # Errors
///
/// The system refuses.
pub async fn keep(config: &Config, options: &StartOptions) -> Result<(), StartError> {
    if has_unit().await {
        write_unit_options(options)?;
    }
    if options.router { keep_router(config) } else { Ok(()) }
}

/// Waits until a running agent that was asked to start again has done so. `epoch` is the one before.
///
/// # Errors
///
/// It does not come back; the message has its last words.
pub async fn await_restart(config: &Config, epoch: u32, said_before: u64) -> Result<(), StartError> {
    let log = config.host.runtime_dir.join(log_file::NAME);
    let until = Instant::now() + READY_LIMIT;
    let mut gone = None;
    while Instant::now() < until {
        if epoch_of(config).await.is_some_and(|now| now != epoch) {
            return Ok(());
        }
        // For a moment nobody has the lock.
        gone = if running(config)?.is_some() { None } else { gone.or(Some(Instant::now())) };
        if gone.is_some_and(|since| since.elapsed() > ANSWER_LIMIT) && !has_unit().await {
            let said = log_file::tail(&log, said_before, LOG_TAIL_BYTES);
            return Err(StartError::Ended { cause: "it has ended, and has not come back".to_owned(), said, log });
        }
        sleep(STOP_LOOK).await;
    }
    Err(StartError::Slow { log })
}

/// The length of the agent's log, in bytes.
pub fn said(config: &Config) -> u64 {
    fs::metadata(config.host.runtime_dir.join(log_file::NAME)).map_or(0, |about| about.len())
}

/// Which of a host's agents runs.
pub async fn epoch_of(config: &Config) -> Option<u32> {
    let asked = async {
        let mut client = margay_control::api::connect(&config.socket()).await.ok()?;
        Some(client.status(StatusRequest {}).await.ok()?.into_inner().epoch)
    };
    timeout(ANSWER_LIMIT, asked).await.ok().flatten()
}

/// `--router` holds until the next `down` or reboot, also where the agent has crashed meanwhile.
fn keep_router(config: &Config) -> Result<(), StartError> {
    let path = config.host.runtime_dir.join(ROUTER_FILE);
    File::create(&path).map(drop).map_err(io_error(&path, "make it"))
}

/// Whether an earlier `up --router` holds.
pub fn was_router(config: &Config) -> bool {
    config.host.runtime_dir.join(ROUTER_FILE).exists()
}

/// No earlier `up` holds any more.
///
/// # Errors
///
/// The system refuses.
pub fn forget_router(config: &Config) -> Result<(), StartError> {
    let path = config.host.runtime_dir.join(ROUTER_FILE);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error(&path, "remove it")(error)),
        _ => Ok(()),
    }
}

fn write_unit_options(options: &StartOptions) -> Result<(), StartError> {
    let path = Path::new(UNIT_OPTIONS);
    let text = unit_options(options).map_err(io_error(path, "write it"))?;
    let dir = path.parent().unwrap_or(path);
    fs::create_dir_all(dir).map_err(io_error(dir, "make it"))?;
    fs::write(path, text).map_err(io_error(path, "write it"))
}

/// An environment file with one variable, which the unit splits at blanks.
fn unit_options(options: &StartOptions) -> io::Result<String> {
    let mut words = Vec::new();
    if let Some(path) = &options.config_path {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+,@".contains(&byte);
        let path = path.to_str().filter(|path| path.bytes().all(plain)).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "systemd cannot be told a path of the configuration with blanks or quotes in it; give the file \
                 another place",
            )
        })?;
        words.extend(["--config", path]);
    }
    if options.router {
        words.push("--router");
    }
    Ok(format!("MARGAY_OPTIONS=\"{}\"\n", words.join(" ")))
}

async fn has_unit() -> bool {
    if !Path::new("/run/systemd/system").is_dir() {
        return false;
    }
    let asked = Command::new("systemctl").args(["cat", UNIT]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    asked.await.is_ok_and(|status| status.success())
}

async fn systemctl(verb: &'static str) -> Result<(), StartError> {
    let output = Command::new("systemctl").args([verb, UNIT]).output().await;
    let output = output.map_err(|error| StartError::Systemd { verb, said: error.to_string() })?;
    if output.status.success() {
        return Ok(());
    }
    let said = match verb {
        "start" => last_status().await,
        _ => None,
    };
    let said = said.unwrap_or_else(|| String::from_utf8_lossy(&output.stderr).trim().to_owned());
    Err(StartError::Systemd { verb, said })
}

/// What the agent said of itself last, to systemd.
async fn last_status() -> Option<String> {
    let asked = Command::new("systemctl").args(["show", "--property=StatusText", "--value", UNIT]).output().await;
    let text = String::from_utf8_lossy(&asked.ok()?.stdout).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

async fn spawn(config: &Config, options: &StartOptions) -> Result<(), StartError> {
    let dir = &config.host.runtime_dir;
    fs::create_dir_all(dir).map_err(io_error(dir, "make it"))?;
    let log_path = dir.join(log_file::NAME);
    let (log, said_before) = log_file::open(&log_path).map_err(io_error(&log_path, "open it"))?;
    let notify_path = dir.join(format!("ready.{}", std::process::id()));
    let socket = UnixDatagram::bind(&notify_path).map_err(io_error(&notify_path, "make it"))?;
    let program = std::env::current_exe().map_err(io_error(Path::new("/proc/self/exe"), "find this program"))?;
    let mut command = Command::new(&program);
    command.arg("agent");
    if let Some(path) = &options.config_path {
        command.arg("--config").arg(path);
    }
    if options.router {
        command.arg("--router");
    }
    let copy = log.try_clone().map_err(io_error(&log_path, "open it"))?;
    command.env("NOTIFY_SOCKET", &notify_path).current_dir("/");
    // A group of its own: what ends `up` in a terminal does not end the agent.
    command.process_group(0).stdin(Stdio::null()).stdout(log).stderr(copy);
    let child = command.spawn().map_err(io_error(&program, "run it"));
    let result = match child {
        Ok(child) => await_ready(child, &socket, (&log_path, said_before)).await,
        Err(error) => Err(error),
    };
    // One more file in a directory of the runtime harms nobody.
    let _ = fs::remove_file(&notify_path);
    result
}

async fn await_ready(
    mut child: Child,
    socket: &UnixDatagram,
    (log, said_before): (&Path, u64),
) -> Result<(), StartError> {
    let mut buffer = [0; 4096];
    let ready = timeout(READY_LIMIT, async {
        let mut word = Word::default();
        loop {
            tokio::select! {
                received = socket.recv(&mut buffer) => word.hear(&buffer[..received.unwrap_or(0)]),
                ended = child.wait() => {
                    // Its last word may be unread.
                    while let Ok(len) = socket.try_recv(&mut buffer) {
                        word.hear(&buffer[..len]);
                    }
                    return Err(word.status.unwrap_or_else(|| match ended {
                        Ok(status) => format!("it has ended ({status})"),
                        Err(error) => error.to_string(),
                    }));
                }
            }
            if word.is_ready {
                return Ok(());
            }
        }
    });
    match ready.await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(cause)) => {
            let said = log_file::tail(log, said_before, LOG_TAIL_BYTES);
            Err(StartError::Ended { cause, said, log: log.to_owned() })
        }
        Err(_) => {
            // What does not get ready must not hold the lock.
            let _ = child.kill().await;
            Err(StartError::Slow { log: log.to_owned() })
        }
    }
}

/// What a process that was started says of itself.
#[derive(Debug, Default, PartialEq, Eq)]
struct Word {
    is_ready: bool,
    status: Option<String>,
}

impl Word {
    fn hear(&mut self, bytes: &[u8]) {
        for line in String::from_utf8_lossy(bytes).lines() {
            self.is_ready |= line == "READY=1";
            if let Some(status) = line.strip_prefix(STATUS) {
                self.status = Some(status.to_owned());
            }
        }
    }
}

/// Stops the agent; gives whether one ran.
///
/// # Errors
///
/// It does not end.
pub async fn stop(config: &Config) -> Result<bool, StartError> {
    let was_running = running(config)?.is_some();
    if was_running {
        end_flows(config).await;
    }
    if has_unit().await {
        // Also when it does not run: systemd must not start it again.
        systemctl("stop").await?;
    }
    let Some(pid) = running(config)? else { return Ok(was_running) };
    let stuck = || StartError::Stuck { pid: pid.clone() };
    let process = Pid::from_raw(pid.parse().map_err(|_| stuck())?);
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        match kill(process, signal) {
            Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
            Err(error) => {
                return Err(io_error(&config.host.runtime_dir.join(LOCK_FILE), "end the agent")(error.into()));
            }
        }
        let until = Instant::now() + STOP_LIMIT;
        while Instant::now() < until {
            if running(config)?.is_none() {
                return Ok(true);
            }
            sleep(STOP_LOOK).await;
        }
    }
    Err(stuck())
}

/// An agent that is merely stopped leaves its flows for the next one; this one is to end them. One that does not answer
/// is stopped without: then programs learn it from their own time-outs.
async fn end_flows(config: &Config) {
    let asked = async {
        let mut client = margay_control::api::connect(&config.socket()).await.ok()?;
        client.shutdown(ShutdownRequest {}).await.ok()
    };
    if tokio::time::timeout(STOP_LIMIT, asked).await.ok().flatten().is_none() {
        return;
    }
    let until = Instant::now() + STOP_LIMIT;
    while Instant::now() < until && running(config).is_ok_and(|running| running.is_some()) {
        sleep(STOP_LOOK).await;
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test]
    async fn an_agent_that_is_going_is_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let text = format!("[host]\nruntime_dir = {:?}\n", dir.path());
        let config = Config::parse(&text, Path::new("margay.toml")).expect("a configuration");
        let held = lock(&config).expect("nobody has it");
        assert!(running(&config).expect("a lock").is_some());
        // It is looked at before the lock goes.
        let (is_running, ()) = tokio::join!(is_running(&config), async { drop(held) });
        assert!(!is_running.expect("a lock"));
    }

    #[test]
    fn nobody_else_may_lock_what_keeps_a_second_agent_out() {
        let dir = tempfile::tempdir().expect("a directory");
        let text = format!("[host]\nruntime_dir = {:?}\n", dir.path());
        let config = Config::parse(&text, Path::new("margay.toml")).expect("a configuration");
        let path = dir.path().join(LOCK_FILE);
        fs::write(&path, "1\n").expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("as it was before");
        drop(lock(&config).expect("nobody has it"));
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_router_is_one_until_it_is_taken_down() {
        let dir = tempfile::tempdir().expect("a directory");
        let text = format!("[host]\nruntime_dir = {:?}\n", dir.path());
        let config = Config::parse(&text, Path::new("margay.toml")).expect("a configuration");
        assert!(!was_router(&config));
        keep_router(&config).expect("kept");
        assert!(was_router(&config));
        forget_router(&config).expect("forgotten");
        forget_router(&config).expect("twice");
        assert!(!was_router(&config));
    }

    #[test]
    fn the_unit_is_told_what_the_command_line_says() {
        let told = |config_path: Option<&str>, router| {
            unit_options(&StartOptions { config_path: config_path.map(PathBuf::from), router })
        };
        assert_eq!(told(None, false).expect("told"), "MARGAY_OPTIONS=\"\"\n");
        assert_eq!(
            told(Some("/srv/a-b/margay.toml"), true).expect("told"),
            "MARGAY_OPTIONS=\"--config /srv/a-b/margay.toml --router\"\n"
        );
        for path in ["/srv/a b", "/srv/\"", "/srv/$HOME", "/srv/\\", "/srv/%i", "/srv/\n"] {
            assert!(told(Some(path), false).is_err(), "{path}");
        }
    }
}
