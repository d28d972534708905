//! `margay run`: a program serves a name while it listens.

mod splice;
mod supervised;

use std::io::{ErrorKind, IsTerminal};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;
use std::{env, fs};

use clap::Args;
use margay_control::api::v1::*;
use margay_core::name::Name;
use miette::Result;
use rustix::fs::{Access, access};
use rustix::net::SocketType;
use rustix::net::sockopt::{socket_acceptconn, socket_cookie, socket_type};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use super::drain::DrainTermsArgs;
use super::drainer::Drainer;
use super::{Client, refused};
use crate::agent::active::rule::Wanted;
use crate::fields::Patience;
use crate::listener::{MiddleboxKind, Protocol, ServiceName, partition_count};

/// What shells say of a program that is not there, and of one that cannot be started.
const NOT_FOUND: u8 = 127;
const NOT_STARTED: u8 = 126;

#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    offer: OfferArgs,
    /// Keep the program's ports off the network: it is reached by name only
    #[arg(long)]
    private: bool,
    /// When told to stop (SIGTERM), drain the names first: new connections go elsewhere, those that are there get so
    /// long to end, and then the program is told to stop
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, conflicts_with = "unit")]
    drain: Option<Duration>,
    /// Start nothing: serve what the systemd unit around this process listens on (what `margay enable` puts into units)
    #[arg(long, conflicts_with = "command")]
    unit: bool,
    /// The program is a proxy that changes nothing more of a connection at this port of its once it relays by splice(2)
    /// (HAProxy: `option splice-request`, `option splice-response`): it leaves then, and its two connections become
    /// one. May be repeated
    #[arg(long, value_name = "PORT", conflicts_with = "unit", value_parser = clap::value_parser!(u16).range(1..))]
    splice: Vec<u16>,
    /// With --splice, the program stays in its connections until there is a file of this name, which is made when they
    /// shall do without it (`touch FILE`). Where the program changes its root directory, the name is one in there
    #[arg(long, value_name = "FILE", requires = "splice")]
    splice_when: Option<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, value_name = "COMMAND", required_unless_present = "unit")]
    command: Vec<String>,
}

/// What is served, of `run` and `enable`.
#[derive(Args, Clone, Debug)]
pub struct OfferArgs {
    /// The name; the port that clients use, and the program's port where that is another one: web.shop, web.shop:80,
    /// web.shop:80:8000. Without ports every TCP port that the program listens on is served, and UDP ports below 1024.
    /// May be repeated
    #[arg(long, value_name = "NAME[:PORT[:LISTEN]]", required_unless_present = "middlebox")]
    pub service: Vec<Wanted>,
    /// The program is a box of this name, which sessions pass, as chains of the policy say; it is served while the
    /// program runs. May be repeated
    #[arg(
        long,
        value_name = "NAME",
        requires = "kind",
        conflicts_with_all = ["service", "protocol", "partitions", "sticky"]
    )]
    pub middlebox: Vec<ServiceName>,
    /// What the box does
    #[arg(long, requires = "middlebox", conflicts_with = "service")]
    pub kind: Option<MiddleboxKind>,
    /// Only this protocol
    #[arg(long)]
    pub protocol: Option<Protocol>,
    /// Who may connect: authority (the name's, the default), any, host:<id>, group:<name>, authority:<name>; may be
    /// repeated
    #[arg(long, value_name = "WHO")]
    pub allow: Vec<String>,
    /// Share among instances of one priority; 0 takes no new connections
    #[arg(long, value_name = "NUMBER")]
    pub weight: Option<u32>,
    /// Instances of the highest priority take all connections, as long as there are any
    #[arg(long, value_name = "NUMBER")]
    pub priority: Option<u32>,
    /// Divide the service into so many partitions (a power of two, 2 to 1024); each is held by one of its hosts
    #[arg(long, value_name = "NUMBER", value_parser = partition_count)]
    pub partitions: Option<u32>,
    /// No other program and no other host may serve the name; a second host stands by
    #[arg(long)]
    pub exclusive: bool,
    /// With --exclusive: once another host holds the name, connections to the former one are reset at once, and that
    /// host serves it no more; a host that hears no router for a moment does not, either
    #[arg(long, requires = "exclusive")]
    pub fence: bool,
    /// Keep all datagrams of an unconnected UDP socket with one instance (QUIC, DTLS, games); otherwise each is for
    /// itself
    #[arg(long)]
    pub sticky: bool,
    /// Clients wait for so long for this host when it is silent and no router lists it, unless their own operator says
    /// otherwise: 500ms to 24h, or never; 30s unless given
    #[arg(long, value_name = "TIME")]
    pub give_up_after: Option<Patience>,
    #[command(flatten)]
    pub drained: DrainTermsArgs,
}

impl OfferArgs {
    /// What is served, of services once for each of its ports.
    pub fn names(&self) -> Vec<&str> {
        let boxes = self.middlebox.iter().map(|name| &name.0);
        self.service.iter().map(|wanted| &wanted.name).chain(boxes).map(Name::written).collect()
    }

    fn offers(&self) -> Vec<ProgramOffer> {
        let of_service = |wanted: &Wanted| ProgramOffer {
            name: wanted.name.written().to_owned(),
            port: wanted.port.map(u32::from),
            listen_port: wanted.listen_port.map(u32::from),
        };
        let of_box =
            |name: &ServiceName| ProgramOffer { name: name.0.written().to_owned(), port: None, listen_port: None };
        self.service.iter().map(of_service).chain(self.middlebox.iter().map(of_box)).collect()
    }
}

pub async fn run(mut client: Client, args: RunArgs) -> Result<ExitCode> {
    if let Some(program) = args.command.first() {
        if !is_there(program) {
            eprintln!("margay: there is no program {program}; nothing is served");
            return Ok(ExitCode::from(NOT_FOUND));
        }
        if program.contains('/') && !is_executable(Path::new(program)) {
            eprintln!("margay: cannot start {program}: it is no file that may be executed; nothing is served");
            return Ok(ExitCode::from(NOT_STARTED));
        }
    }
    let shim = if args.splice.is_empty() { None } else { Some(splice::shim()?) };
    let of = &args.offer;
    let request = ProgramAttachRequest {
        offers: of.offers(),
        protocol: of.protocol.map(Protocol::label).unwrap_or_default().to_owned(),
        allow: of.allow.clone(),
        weight: of.weight,
        priority: of.priority,
        partitions: of.partitions,
        exclusive: of.exclusive,
        fence: of.fence,
        sticky: of.sticky,
        give_up_after_ms: of.give_up_after.map(|patience| patience.0.ms()),
        quiet_ms: of.drained.quiet_ms()?,
        private: args.private,
        command: if args.unit { "a unit of systemd".to_owned() } else { args.command.join(" ") },
        passed: passed_sockets(),
        whole_cgroup: args.unit,
        middlebox: of.kind.map(MiddleboxKind::label).unwrap_or_default().to_owned(),
    };
    client.program_attach(request).await.map_err(refused)?;
    if args.command.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    if std::io::stderr().is_terminal() {
        let names = args.offer.names();
        let when = if args.offer.kind.is_some() { "while this program runs" } else { "when this program listens" };
        eprintln!(
            "margay: {} is served {when}; `margay service show {}` says how it stands",
            names.join(", "),
            names.first().copied().unwrap_or_default()
        );
    }
    let mut command = Command::new(&args.command[0]);
    command.args(&args.command[1..]);
    if let Some(shim) = shim {
        splice::watch(&mut command, &shim, &args.splice, args.splice_when.as_deref());
    }
    match args.drain {
        Some(deadline) => {
            let names = args.offer.names().into_iter().map(str::to_owned).collect();
            supervised::run(command, Drainer::new(client, names, deadline)).await
        }
        // This process becomes the program: its number, its parent and its descriptors stay.
        None => {
            let error = command.exec();
            Ok(not_started(&command, &error))
        }
    }
}

/// Says why a program was not started, and gives the exit status that shells have for that.
fn not_started(command: &Command, error: &std::io::Error) -> ExitCode {
    eprintln!("margay: cannot start {}: {error}", command.get_program().display());
    ExitCode::from(if error.kind() == ErrorKind::NotFound { NOT_FOUND } else { NOT_STARTED })
}

/// Whether a program is found as `exec` will look for it: by its path, or in the directories of `PATH`.
fn is_there(program: &str) -> bool {
    if program.contains('/') {
        return Path::new(program).exists();
    }
    // Without a PATH, the C library has one of its own.
    let Some(path) = env::var_os("PATH") else { return true };
    env::split_paths(&path).any(|dir| dir.join(program).exists())
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}

/// Sockets that whoever started this process has given it (socket activation): the kernel's cookies of those that
/// listen.
fn passed_sockets() -> Vec<u64> {
    let descriptors = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let is_socket = |to: &std::path::Path| to.to_string_lossy().starts_with("socket:");
    let numbers = descriptors.filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        fs::read_link(entry.path()).ok().filter(|to| is_socket(to)).map(|_| number)
    });
    numbers.filter_map(|number: i32| cookie_of(number)).collect()
}

fn cookie_of(descriptor: i32) -> Option<u64> {
    // A copy that is ours to look at. Where that is forbidden, what was passed is not known.
    let process = pidfd_open(getpid(), PidfdFlags::empty()).ok()?;
    let socket: OwnedFd = pidfd_getfd(process, descriptor, PidfdGetfdFlags::empty()).ok()?;
    let socket = socket.as_fd();
    let listens = socket_acceptconn(socket).unwrap_or(false);
    let takes_datagrams = socket_type(socket).is_ok_and(|kind| kind == SocketType::DGRAM);
    if listens || takes_datagrams { socket_cookie(socket).ok() } else { None }
}
