//! `margay ensemble`: the switch of an ensemble, its framers, and what operators ask a switch.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use margay_ensemble::{WINDOW_DEFAULT, WINDOW_MAX, WINDOW_MIN};
use margay_frames::framer::{ByName, Framer};
use margay_frames::process::{drop_privileges, raise_descriptor_limit};
use margay_frames::protocol::Protocol;
use margay_frames::switch::control::{self, Question};
use margay_frames::{by_name, member, switch};
use margay_sdk::{Agent, Options, Target, ToTarget};
use margay_wire::FRAMED_LABEL_MAX;
use miette::{IntoDiagnostic, Result, WrapErr, miette};
use nix::unistd::{AccessFlags, access, geteuid};
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use super::{Json, Out, output};
use crate::agent::programs;
use crate::config::{Config, EnsembleProtocol, EnsembleRouter, EnsembleSection, ProgramProtocol};
use crate::log;

pub mod carrier;
mod module;
mod socket;

/// Questions of operators that wait.
const QUESTIONS_MAX: usize = 16;
/// Longest file name that is a name as it is: the path of a socket has 107 bytes at most.
const FILE_NAME_MAX: usize = 64;
/// Bytes of a longer name that its file name begins with.
const FILE_NAME_BEGIN: usize = 40;

const STILL_PRIVILEGED: &str = "cannot give up root's privileges, which nothing needs from here on";

#[derive(Subcommand)]
pub enum EnsembleVerb {
    /// Run a switch: serve a name, and give each request to one of the members
    Serve(ServeArgs),
    /// Run a member: take a switch's requests to a memcached or Redis of this host, as long as that answers
    Member(MemberArgs),
    /// Take unmodified clients of this host to an ensemble
    #[command(subcommand)]
    Framer(FramerVerb),
    /// The switches of this host
    List(Json),
    /// A switch of this host: its members and connections
    Show(ShowArgs),
    /// Give a member no new requests: those that it has are answered
    Drain(DrainArgs),
    /// Have a module of WebAssembly divide the requests of new connections
    Load(module::LoadArgs),
    /// Have requests of new connections divided without a module again
    Unload(module::UnloadArgs),
    /// Try a module with requests, without a switch: which member it gives each, and how long that takes
    Try(module::TryArgs),
    /// Carry the frames of a member that starts this with its socket as standard input, without its privileges
    #[command(hide = true)]
    Carry(carrier::CarryArgs),
    /// Carry the frames of a program that starts this with a socket as standard input
    #[command(subcommand, hide = true)]
    Socket(socket::SocketVerb),
}

#[derive(Args)]
pub struct ServeArgs {
    /// The name that clients ask for
    name: String,
    /// The name that members serve
    #[arg(long, value_name = "NAME")]
    members: String,
    /// What clients and members speak
    #[arg(long, value_enum, default_value_t = EnsembleProtocol::Memcached)]
    protocol: EnsembleProtocol,
    /// How requests are divided
    #[arg(long, value_enum, default_value_t = EnsembleRouter::Ketama)]
    router: EnsembleRouter,
    /// A module of WebAssembly that divides requests instead; root alone
    #[arg(long, value_name = "FILE", conflicts_with = "router")]
    module: Option<PathBuf>,
    /// Chunks of requests, and of answers, that a connection may have under way
    #[arg(long, value_name = "NUMBER", default_value_t = WINDOW_DEFAULT,
        value_parser = clap::value_parser!(u16).range(i64::from(WINDOW_MIN)..=i64::from(WINDOW_MAX)))]
    window: u16,
    /// End when standard input does: the agent that has started this is gone
    #[arg(long, hide = true)]
    attended: bool,
}

#[derive(Args)]
pub struct MemberArgs {
    /// The name that members serve
    name: String,
    /// What the program speaks
    #[arg(long, value_enum, default_value_t = ProgramProtocol::Memcached)]
    protocol: ProgramProtocol,
    /// Where the program is; on this host unless given, at port 11211 (memcached) or 6379 (Redis)
    #[arg(long, value_name = "ADDRESS:PORT")]
    to: Option<SocketAddr>,
    /// What the member is called in the ring of keys, as clients had it in their list of servers; the name of this host
    /// unless given
    #[arg(long = "as", value_name = "LABEL")]
    label: Option<String>,
}

#[derive(Subcommand)]
pub enum FramerVerb {
    /// A memcached for clients of this host, by either of its protocols
    Memcached(FramerArgs),
    /// A Redis for clients of this host, by its protocol RESP
    Resp(FramerArgs),
}

#[derive(Args)]
pub struct FramerArgs {
    /// The ensemble's name
    #[arg(long, value_name = "NAME")]
    service: String,
    /// Where clients find it; on this host unless given, at port 11211 (memcached) or 6379 (Redis)
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
}

#[derive(Args)]
pub struct ShowArgs {
    /// The ensemble's name
    name: String,
    #[command(flatten)]
    json: Json,
}

#[derive(Args)]
pub struct DrainArgs {
    /// The ensemble's name
    name: String,
    /// The host of the member
    #[arg(value_name = "HOST")]
    member: String,
    /// Give it new requests again
    #[arg(long)]
    undo: bool,
    #[command(flatten)]
    json: Json,
}

/// Does what a verb says.
pub async fn ensemble(config: &Config, verb: EnsembleVerb, out: &mut Out) -> Result<()> {
    raise_descriptor_limit();
    match verb {
        EnsembleVerb::Serve(args) => serve(config, args).await,
        EnsembleVerb::Member(args) => run_member(config, args).await,
        EnsembleVerb::Framer(FramerVerb::Memcached(args)) => run_framer(config, Protocol::Memcached, args).await,
        EnsembleVerb::Framer(FramerVerb::Resp(args)) => run_framer(config, Protocol::Resp, args).await,
        EnsembleVerb::List(json) => list(config, json, out).await,
        EnsembleVerb::Show(args) => show(config, args, out).await,
        EnsembleVerb::Drain(args) => drain(config, args, out).await,
        EnsembleVerb::Load(args) => module::load(config, args, out).await,
        EnsembleVerb::Unload(args) => module::unload(config, args, out).await,
        EnsembleVerb::Try(args) => module::attempt(args, out),
        EnsembleVerb::Socket(verb) => socket::socket(config, verb).await,
        EnsembleVerb::Carry(_) => Err(miette!("this verb is for members alone")),
    }
}

async fn agent_of(config: &Config) -> Result<Agent, margay_sdk::Error> {
    Agent::connect_to(&programs::path(&config.host.runtime_dir)).await
}

/// A name as people write it, as the agent reads it.
async fn target_of(agent: &Agent, written: &str) -> Result<Target> {
    let (prefix, written) = agent.name(written).await.into_diagnostic()?;
    Ok(Target { written: Some(written), ..prefix.to_target().into_diagnostic()? })
}

fn written(target: &Target) -> String {
    target.written.clone().unwrap_or_else(|| target.prefix.to_string())
}

/// Where the switches of this host are asked: those of the agent's user, and those of the user who calls.
fn directories(config: &Config) -> Vec<PathBuf> {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(|dir| Path::new(&dir).join("margay"));
    let mut all: Vec<PathBuf> = [Some(config.host.runtime_dir.clone()), own].into_iter().flatten().collect();
    all.dedup();
    all.into_iter().map(|dir| dir.join("ensembles")).collect()
}

/// Where a switch that is started now is asked: beside the agent's sockets, or where its user may not write there, in a
/// place of the user's own.
fn own_directory(config: &Config) -> PathBuf {
    let mut all = directories(config);
    let is_agents = access(&config.host.runtime_dir, AccessFlags::W_OK).is_ok() || all.len() == 1;
    all.swap_remove(usize::from(!is_agents))
}

fn file_of(name: &str) -> String {
    let written = name.replace('/', "%");
    if written.len() <= FILE_NAME_MAX {
        return format!("{written}.sock");
    }
    let begin = &written[..written.floor_char_boundary(FILE_NAME_BEGIN)];
    format!("{begin}-{}.sock", &blake3::hash(name.as_bytes()).to_hex()[..16])
}

/// Removes a socket at which nobody listens any more.
///
/// # Errors
///
/// Somebody listens there (`AddrInUse`); it is no socket; the file system refuses.
async fn remove_dead(path: &Path) -> io::Result<()> {
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            if fs::symlink_metadata(path)?.file_type().is_socket() { fs::remove_file(path) } else { Err(error) }
        }
        // Also one that does not answer is there.
        Ok(_) => Err(ErrorKind::AddrInUse.into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Err(ErrorKind::AddrInUse.into()),
        Err(error) => Err(error),
    }
}

/// Listens for operators, of this user alone. A socket that a switch before this has left is replaced; that of a living
/// one is not.
async fn listen(path: &Path, name: &str) -> Result<UnixListener> {
    let failed = |what: &str| format!("cannot {what} {}, where operators ask the switch", path.display());
    if let Some(parent) = path.parent() {
        let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(parent);
        made.into_diagnostic().wrap_err_with(|| failed("make the directory of"))?;
    }
    match remove_dead(path).await {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            return Err(miette!("a switch of {name} runs on this host already; one is enough"));
        }
        other => other.into_diagnostic().wrap_err_with(|| failed("replace"))?,
    }
    let listener = UnixListener::bind(path).into_diagnostic().wrap_err_with(|| failed("listen at"))?;
    let mode = fs::set_permissions(path, fs::Permissions::from_mode(0o600));
    mode.into_diagnostic().wrap_err_with(|| failed("set the mode of"))?;
    Ok(listener)
}

async fn serve(config: &Config, args: ServeArgs) -> Result<()> {
    log::start(&config.log);
    let agent = agent_of(config).await.into_diagnostic()?;
    let name = target_of(&agent, &args.name).await?;
    let members = target_of(&agent, &args.members).await?;
    if name.prefix.covers(&members.prefix) || members.prefix.covers(&name.prefix) {
        return Err(miette!(
            "{} and {} are not apart: an ensemble that contained itself would ask itself; give the members a name of \
             their own",
            written(&name),
            written(&members)
        ));
    }
    let module = match &args.module {
        None => None,
        Some(file) => Some(module::loaded(config, &written(&name), file).await?.0),
    };
    let path = own_directory(config).join(file_of(&written(&name)));
    let listener = listen(&path, &written(&name)).await?;
    let socket = Options::new().agent(&agent).bind_datagrams(&name).await.into_diagnostic()?;
    let listed = watch::Sender::new(Vec::new());
    let receiver = listed.subscribe();
    let (sender, commands) = mpsc::channel(QUESTIONS_MAX);
    let set_up = switch::Config {
        name: written(&name),
        members: written(&members),
        content: args.protocol.into(),
        policy: args.router.into(),
        window: args.window,
        module,
    };
    eprintln!("margay: {} is an ensemble of {}, for {}", set_up.name, set_up.members, set_up.content.name());
    let mut terminate = signal(SignalKind::terminate()).into_diagnostic()?;
    give_up_privileges(&agent).await.into_diagnostic().wrap_err(STILL_PRIVILEGED)?;
    let ended = tokio::select! {
        ended = switch::run(socket.into_udp(), receiver, commands, set_up) => ended.into_diagnostic(),
        ended = by_name::follow_members(&agent, &members, &listed) => ended.into_diagnostic(),
        never = control::serve(listener, sender) => match never {},
        () = unattended(args.attended) => Ok(()),
        _ = terminate.recv() => Ok(()),
        _ = tokio::signal::ctrl_c() => Ok(()),
    };
    // Whoever asks hears at once that there is none; that of another switch, started meanwhile, stays. A switch that
    // root has started may not remove it, and leaves a socket that refuses.
    let _ = remove_dead(&path).await;
    ended
}

/// Gives up root's privileges, and the connections to the agent that root has opened: whoever takes this process over
/// may ask for what `nobody` may ask for, and no more.
async fn give_up_privileges(agent: &Agent) -> io::Result<()> {
    agent.disconnect().await;
    drop_privileges()
}

/// Ends when whoever attends to this is gone.
async fn unattended(is_attended: bool) {
    if !is_attended {
        return std::future::pending().await;
    }
    // Nothing comes but its end.
    let _ = tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await;
}

async fn run_member(config: &Config, args: MemberArgs) -> Result<()> {
    log::start(&config.log);
    let label = args.label.unwrap_or_default();
    if label.len() > FRAMED_LABEL_MAX {
        return Err(miette!("the label has {} bytes, and may have {FRAMED_LABEL_MAX}", label.len()));
    }
    let agent = agent_of(config).await.into_diagnostic()?;
    let name = target_of(&agent, &args.name).await?;
    let protocol = Protocol::from(args.protocol);
    let to = args.to.unwrap_or_else(|| usual_address(protocol));
    let set_up = member::Config { protocol, to, label, host: [0; 16] };
    eprintln!("margay: a member of {}, with the {} at {to}", written(&name), protocol.program());
    let leave = watch::Sender::new(false);
    let receiver = leave.subscribe();
    let mut terminate = signal(SignalKind::terminate()).into_diagnostic()?;
    let serving = async {
        if geteuid().is_root() {
            let serve = async |socket, set_up, leave| carrier::serve(args.protocol, socket, set_up, leave).await;
            by_name::serve_member(&agent, &name, &set_up, receiver, serve).await
        } else {
            by_name::serve_member(&agent, &name, &set_up, receiver, member::serve).await
        }
    };
    let told = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        leave.send_replace(true);
        // The other future ends when all switches have let go.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = serving => ended.into_diagnostic(),
        () = told => Ok(()),
    }
}

/// Where a program is, unless it is told otherwise.
fn usual_address(protocol: Protocol) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, protocol.port()).into()
}

async fn run_framer(config: &Config, protocol: Protocol, args: FramerArgs) -> Result<()> {
    log::start(&config.log);
    let agent = agent_of(config).await.into_diagnostic()?;
    let name = target_of(&agent, &args.service).await?;
    let reach = ByName::new(agent.clone(), name.prefix, written(&name));
    let listen = args.listen.unwrap_or_else(|| usual_address(protocol));
    let program = protocol.program();
    let framer = Framer::bind(protocol, listen, reach).await.into_diagnostic().wrap_err_with(|| {
        format!("cannot listen on {listen}; does a {program} run here? --listen chooses another place")
    })?;
    eprintln!("margay: clients of {program} reach {} at {}", written(&name), framer.address().into_diagnostic()?);
    give_up_privileges(&agent).await.into_diagnostic().wrap_err(STILL_PRIVILEGED)?;
    framer.run().await;
    Ok(())
}

async fn ask(config: &Config, name: &str, question: &Question) -> Result<Value> {
    let paths = directories(config).into_iter().map(|dir| dir.join(file_of(name)));
    let mut asked = Err(ErrorKind::NotFound.into());
    for path in paths {
        asked = control::ask(&path, question).await;
        if !matches!(&asked, Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)) {
            break;
        }
    }
    let is_forbidden = matches!(&asked, Err(error) if error.kind() == ErrorKind::PermissionDenied);
    asked.into_diagnostic().wrap_err_with(|| {
        if is_forbidden {
            format!("the switch of {name} is another user's; ask as root, or as that user")
        } else {
            format!("the switch of {name} gives no answer; `margay ensemble list` names those that do")
        }
    })
}

async fn list(config: &Config, json: Json, out: &mut Out) -> Result<()> {
    let mut found = Vec::new();
    // Without the directory there never was a switch.
    let entries = directories(config).into_iter().filter_map(|dir| fs::read_dir(dir).ok());
    for entry in entries.flatten().flatten() {
        // One that does not answer is gone.
        if let Ok(mut shown) = control::ask(&entry.path(), &Question::Show).await {
            shown["connections"].take();
            found.push(shown);
        }
    }
    let absent = config.ensembles().filter(|section| {
        let name = section.name.to_string();
        !found.iter().any(|shown| shown["name"] == name.as_str())
    });
    let absent: Vec<&EnsembleSection> = absent.collect();
    if json.json {
        let names: Vec<String> = absent.iter().map(|section| section.name.to_string()).collect();
        return out.json(&json!({ "ensembles": found, "not_running": names }));
    }
    let row = |shown: &Value| {
        let members = shown["members"].as_array().map_or(&[][..], Vec::as_slice);
        let up = members.iter().filter(|member| member["state"] == "up").count();
        vec![
            text(&shown["name"]),
            text(&shown["members_name"]),
            text(&shown["protocol"]),
            format!("{up} of {}", members.len()),
            text(&shown["connection_count"]),
            module::of_row(&shown["module"]),
        ]
    };
    let header = ["NAME", "MEMBERS", "PROTOCOL", "UP", "CONNECTIONS", "MODULE"];
    out.table(&header, found.iter().map(row).collect(), "no switch runs on this host")?;
    for section in absent {
        let name = &section.name;
        out.line(&format!("{name} is in the configuration, and no switch of it runs; the agent's log says why"))?;
    }
    Ok(())
}

async fn show(config: &Config, args: ShowArgs, out: &mut Out) -> Result<()> {
    let shown = ask(config, &args.name, &Question::Show).await?;
    if args.json.json {
        return out.json(&shown);
    }
    let rows = |key: &str, fields: &[&str]| -> Vec<Vec<String>> {
        let all = shown[key].as_array().map_or(&[][..], Vec::as_slice);
        all.iter().map(|one| fields.iter().map(|field| text(&one[*field])).collect()).collect()
    };
    out.line(&format!(
        "{}, {}: {}, {} accepted, {} failed; {} of members, {} lost",
        text(&shown["name"]),
        text(&shown["protocol"]),
        output::count(shown["connection_count"].as_u64().unwrap_or_default(), "connection"),
        text(&shown["accepted"]),
        text(&shown["failed"]),
        output::count(shown["member_deaths"].as_u64().unwrap_or_default(), "death"),
        output::count(shown["lost_requests"].as_u64().unwrap_or_default(), "request"),
    ))?;
    if let Some(why) = shown["last_failure"].as_str() {
        out.line(&format!("the last connection that failed was that of {why}"))?;
    }
    if let Some(line) = module::line_of(&shown["module"]) {
        out.line(&line)?;
    }
    let fields = ["name", "state", "weight", "connection_count", "why"];
    let header = ["MEMBER", "STATE", "WEIGHT", "CONNECTIONS", "WHY"];
    out.table(&header, rows("members", &fields), "there is no member")?;
    let fields = ["name", "frames_in_flight", "window_bytes", "holes", "patches", "errors", "last_error"];
    let header = ["LEGS TO", "IN FLIGHT", "WINDOW", "HOLES", "PATCHES", "ERRORS", "LAST ERROR"];
    let has_leg = |row: &Vec<String>| !row[2].is_empty() || !row[6].is_empty();
    let legs: Vec<Vec<String>> = rows("members", &fields).into_iter().filter(has_leg).collect();
    if !legs.is_empty() {
        out.table(&header, legs, "")?;
    }
    let connections =
        rows("connections", &["client", "age_ms", "open_requests", "chunks_unacknowledged", "holes", "window_bytes"]);
    let header = ["CLIENT", "AGE MS", "OPEN REQUESTS", "UNACKNOWLEDGED", "HOLES", "WINDOW"];
    out.table(&header, connections, "there is no connection")
}

async fn drain(config: &Config, args: DrainArgs, out: &mut Out) -> Result<()> {
    let question = Question::Drain { member: args.member.clone(), undo: args.undo };
    ask(config, &args.name, &question).await?;
    let what = if args.undo { "gets new requests again" } else { "gets no new requests" };
    let done = json!({"name": args.name, "member": args.member, "undone": args.undo});
    out.done(args.json.json, &done, &format!("{} {what}", args.member))
}

/// A value as a table has it.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod test {
    use margay_frames::router::Policy;
    use tokio::net::UdpSocket;

    use super::*;

    #[tokio::test]
    async fn a_living_switch_keeps_its_socket_and_a_dead_one_does_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("ensembles/cache.shop.sock");
        let listener = listen(&path, "cache.shop").await.expect("nobody is there");
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let (_listed, members) = watch::channel(Vec::new());
        let (sender, commands) = mpsc::channel(1);
        let set_up = switch::Config {
            name: "cache.shop".to_owned(),
            members: "members.shop".to_owned(),
            content: Protocol::Memcached.into(),
            policy: Policy::Ketama,
            window: WINDOW_DEFAULT,
            module: None,
        };
        let running = async {
            tokio::select! {
                ended = switch::run(socket, members, commands, set_up) => panic!("it has ended: {ended:?}"),
                never = control::serve(listener, sender) => match never {},
                again = listen(&path, "cache.shop") => again,
            }
        };
        let error = running.await.expect_err("one is there");
        assert!(error.to_string().contains("runs on this host already"), "{error}");
        let listener = listen(&path, "cache.shop").await.expect("a dead one is replaced");
        let mode = fs::metadata(&path).expect("there").permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "operators of this user alone");
        let error = listen(&path, "cache.shop").await.expect_err("one that says nothing is there, too");
        assert!(error.to_string().contains("runs on this host already"), "{error}");
        remove_dead(&path).await.expect_err("it lives");
        drop(listener);
        remove_dead(&path).await.expect("it is dead");
        assert!(!path.exists());
        remove_dead(&path).await.expect("there is none");
    }

    #[tokio::test]
    async fn what_is_no_socket_is_not_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("cache.shop.sock");
        fs::write(&path, "mine").expect("written");
        let error = listen(&path, "cache.shop").await.expect_err("something else is there");
        assert!(error.to_string().contains("cannot replace"), "{error}");
        assert_eq!(fs::read_to_string(&path).expect("there"), "mine");
    }

    #[test]
    fn a_name_is_a_file() {
        assert_eq!(file_of("cache.shop"), "cache.shop.sock");
        assert_eq!(file_of("a.b/key:c"), "a.b%key:c.sock");
        let long = "x".repeat(200) + ".shop";
        let other = "x".repeat(201) + ".shop";
        assert!(file_of(&long).len() <= FILE_NAME_MAX && file_of(&long) != file_of(&other));
    }
}
