//! The command line: one verb per module, each with `--json` where it lists.

mod audit;
mod cache;
mod chain;
mod check;
mod complete;
mod drain;
mod drainer;
mod ensemble;
mod fact;
mod flow;
mod help;
mod id;
mod middlebox;
mod order;
mod output;
mod path;
mod policy;
mod rebalance;
pub mod reload;
mod route;
mod router;
mod run;
mod service;
mod stack;
mod status;
mod trace;
mod unit;
mod warrant;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use margay_control::api;
use margay_control::api::remote::TlsFiles;
use margay_control::api::v1::agent_client::AgentClient;
use margay_frames::process::raise_descriptor_limit;
use miette::{IntoDiagnostic, Report, Result, WrapErr, miette};
use tonic::transport::Channel;

use crate::agent::StartedWith;
use crate::config::{Config, LogSection};
use crate::{agent, down, host, log, responder, start, up};

pub use output::{Out, Unwritable};

/// Connect to service names, not to addresses.
///
/// Programs stay as they are: they look up web.shop.sal.internal, connect, and reach one of the hosts that serve
/// web.shop, chosen when the first packet passes a service router. Data then flows between the two hosts, without the
/// router.
#[derive(Parser)]
#[command(name = "margay", version)]
struct Cli {
    /// Configuration file (TOML); /etc/margay/margay.toml unless given
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    remote: RemoteArgs,
    #[command(subcommand)]
    verb: Option<Verb>,
}

/// Which agent is asked, if it is not the one of this host. The first page of the help shows these options
/// ([`help`]), and the pages of the verbs do not.
#[derive(Args, Default)]
struct RemoteArgs {
    /// Its [api] listen, as a name or an address that its certificate is for
    #[arg(long, global = true, hide = true, value_name = "HOST:PORT", env = "MARGAY_REMOTE")]
    remote: Option<String>,
    /// The authority of its certificate (PEM)
    #[arg(long, global = true, hide = true, value_name = "FILE", env = "MARGAY_TLS_CA")]
    tls_ca: Option<PathBuf>,
    /// Your own certificate (PEM)
    #[arg(long, global = true, hide = true, value_name = "FILE", env = "MARGAY_TLS_CERTIFICATE")]
    tls_certificate: Option<PathBuf>,
    /// Its key (PEM)
    #[arg(long, global = true, hide = true, value_name = "FILE", env = "MARGAY_TLS_KEY")]
    tls_key: Option<PathBuf>,
}

impl RemoteArgs {
    /// The address and the files, where another host's agent is meant.
    fn given(self) -> Result<Option<(String, TlsFiles)>> {
        let Some(address) = self.remote else { return Ok(None) };
        let (Some(authorities), Some(certificate), Some(key)) = (self.tls_ca, self.tls_certificate, self.tls_key)
        else {
            return Err(miette!("--remote needs --tls-ca, --tls-certificate and --tls-key"));
        };
        Ok(Some((address, TlsFiles { certificate, key, authorities })))
    }
}

#[derive(Subcommand)]
enum Verb {
    /// Prepare this host and start the agent
    Up(up::UpArgs),
    /// Stop the agent and restore this host
    Down(down::DownArgs),
    /// Run the agent in the foreground (what `up` and systemd start)
    Agent(AgentArgs),
    /// Make the agent read its configuration again
    Reload(reload::ReloadArgs),
    /// Run the DNS responder that an agent starts
    #[command(hide = true)]
    Responder(responder::Words),
    /// How the agent is doing
    Status(status::StatusArgs),
    /// Look for what is wrong: on this host, and on the way to a peer
    Check(check::CheckArgs),
    /// Services: publish, withdraw, set, list, show, resolve
    #[command(subcommand)]
    Service(service::ServiceVerb),
    /// Boxes that sessions pass on this host, as chains of the policy say: serve, next
    #[command(subcommand)]
    Middlebox(middlebox::MiddleboxVerb),
    /// Start a program, and serve a name while it listens
    Run(run::RunArgs),
    /// Take a name, or all of this host, out of service: no new flows, and those that are there end in time
    Drain(drain::DrainArgs),
    /// Let new flows come again to what was drained
    Undrain(drain::UndrainArgs),
    /// Let connections of a name go to instances that have fewer than their share
    Rebalance(rebalance::RebalanceArgs),
    /// Let a unit of systemd serve a name while it listens
    Enable(unit::EnableArgs),
    /// Let a unit of systemd serve no name any more
    Disable(unit::DisableArgs),
    /// Drain around the stop of a unit (what `margay enable --drain` puts into units)
    #[command(subcommand, hide = true)]
    Unit(unit::stop::StopVerb),
    /// Ensembles: one connection to many servers, switched request by request
    #[command(subcommand)]
    Ensemble(ensemble::EnsembleVerb),
    /// Flows: list, show, watch, migrate, close
    #[command(subcommand)]
    Flow(flow::FlowVerb),
    /// Paths: by which addresses this host and its peers find each other; move them
    #[command(subcommand)]
    Path(path::PathVerb),
    /// Routes: the service table, rule by rule; rules of your own
    #[command(subcommand)]
    Route(route::RouteVerb),
    /// Routers of other sites: what is announced to them, and by them
    #[command(subcommand)]
    Router(router::RouterVerb),
    /// Chains of boxes that sessions pass: show, insert, remove, replace
    #[command(subcommand)]
    Chain(chain::ChainVerb),
    /// Policies: rules, grants and chains as a file declares them
    #[command(subcommand)]
    Policy(policy::PolicyVerb),
    /// What would happen to a connection to a name now, hop by hop, and why
    Trace(trace::TraceArgs),
    /// How live flows are carried: plain or sealed; orders, and rules
    #[command(subcommand)]
    Stack(stack::StackVerb),
    /// Facts from outside, which rules of stacks look at: set, list, clear
    #[command(subcommand)]
    Fact(fact::FactVerb),
    /// The flow caches: empty them, take the kernel's off, put it on
    #[command(subcommand)]
    Cache(cache::CacheVerb),
    /// Identity: keys, authorities, join tokens, members
    Id(id::IdArgs),
    /// The audit log of a router
    #[command(subcommand)]
    Audit(audit::AuditVerb),
    /// What lets a shell complete words, names and flows of the running agent among them, to standard output
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

impl Verb {
    /// Its word, where it acts on this host alone.
    fn on_this_host(&self) -> Option<&'static str> {
        match self {
            Self::Up(_) => Some("up"),
            Self::Down(_) => Some("down"),
            Self::Agent(_) => Some("agent"),
            Self::Run(_) => Some("run"),
            Self::Enable(_) => Some("enable"),
            Self::Disable(_) => Some("disable"),
            Self::Unit(_) => Some("unit"),
            Self::Ensemble(_) => Some("ensemble"),
            Self::Middlebox(middlebox::MiddleboxVerb::Next(_)) => Some("middlebox next"),
            _ => None,
        }
    }
}

#[derive(Args)]
struct AgentArgs {
    /// Be a service router, also when the configuration does not say so
    #[arg(long)]
    router: bool,
}

/// Whether lists are for programs.
#[derive(Args, Clone, Copy)]
pub struct Json {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The command line, with a first page that groups the verbs.
pub fn command() -> clap::Command {
    help::group(Cli::command())
}

/// Parses the command line and does what it says. Must be called while the process has one thread.
pub fn main() -> ExitCode {
    complete::answer();
    wrap_errors_on_terminals_only();
    let cli = Cli::from_arg_matches(&command().get_matches()).unwrap_or_else(|error| error.exit());
    match cli.verb {
        None => {
            // Nothing can be done when even this cannot be printed.
            let _ = command().print_long_help();
            ExitCode::SUCCESS
        }
        Some(Verb::Responder(words)) => {
            log::start(&LogSection::default());
            responder::main(&words)
        }
        Some(Verb::Ensemble(ensemble::EnsembleVerb::Carry(args))) => {
            log::start(&LogSection::default());
            ensemble::carrier::main(args)
        }
        Some(verb) => report(perform(verb, cli.config, cli.remote)),
    }
}

fn report(result: Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        if is_broken_pipe(&error) {
            return ExitCode::SUCCESS;
        }
        // Nobody may be reading.
        let _ = writeln!(std::io::stderr(), "{error:?}");
        ExitCode::FAILURE
    })
}

/// The reader of standard output has read enough.
fn is_broken_pipe(error: &Report) -> bool {
    error.downcast_ref::<Unwritable>().is_some_and(Unwritable::is_broken_pipe)
}

/// Errors are wrapped for a terminal only: in a file or a pipe, a path or a command that is cut in two is found by no
/// search.
fn wrap_errors_on_terminals_only() {
    if std::io::stderr().is_terminal() {
        return;
    }
    // Fails only when a hook is set already: this is the only place that sets one.
    let _ = miette::set_hook(Box::new(|_| {
        Box::new(miette::MietteHandlerOpts::new().width(usize::MAX).wrap_lines(false).break_words(false).build())
    }));
}

fn perform(verb: Verb, config_path: Option<PathBuf>, remote: RemoteArgs) -> Result<ExitCode> {
    let mut out = Out::new();
    if let Verb::Completions { shell } = verb {
        let script = complete::script(shell).into_diagnostic()?;
        out.write_all(&script).map_err(Unwritable::report)?;
        return Ok(ExitCode::SUCCESS);
    }
    let remote = remote.given()?;
    if let (Some((address, _)), Some(word)) = (&remote, verb.on_this_host()) {
        return Err(miette!("`margay {word}` acts on this host alone; on {address} it has to be run there"));
    }
    let is_agent = matches!(verb, Verb::Agent(_));
    let config = load(config_path.as_deref(), &verb).inspect_err(|error| {
        if is_agent {
            start::notify_failure(&error.to_string());
        }
    })?;
    // An ensemble's parts keep to one thread each: what its tasks say goes together, and none wakes another thread.
    let mut builder = if is_agent {
        tokio::runtime::Builder::new_multi_thread()
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    let runtime = builder.enable_all().build().into_diagnostic().wrap_err("cannot start the runtime")?;
    let result = runtime.block_on(async {
        match verb {
            Verb::Up(args) => up::up(&config, config_path, args, &mut out).await.map(|()| ExitCode::SUCCESS),
            Verb::Down(args) => down::down(&config, args, &mut out).await.map(|()| ExitCode::SUCCESS),
            Verb::Agent(args) => {
                log::start(&config.log);
                raise_descriptor_limit();
                let router = args.router || start::was_router(&config);
                let ended = agent::run(config, StartedWith { config_path, router }).await;
                ended.map(|()| ExitCode::SUCCESS).or_else(tell_starter)
            }
            Verb::Reload(args) => {
                let client = connect(&config, remote.as_ref()).await?;
                reload::reload(client, config_path.as_deref(), args, &mut out).await.map(|()| ExitCode::SUCCESS)
            }
            Verb::Enable(args) => unit::enable(&args, &mut out).map(|()| ExitCode::SUCCESS),
            Verb::Disable(args) => unit::disable(&args, &mut out).map(|()| ExitCode::SUCCESS),
            Verb::Unit(verb) => {
                let runtime_dir = &config.host.runtime_dir;
                unit::stop::perform(async || connect(&config, None).await, runtime_dir, verb).await
            }
            Verb::Ensemble(verb) => ensemble::ensemble(&config, verb, &mut out).await.map(|()| ExitCode::SUCCESS),
            Verb::Middlebox(middlebox::MiddleboxVerb::Next(args)) => {
                middlebox::next(&config, &args, &mut out).await.map(|()| ExitCode::SUCCESS)
            }
            // The agent may come up meanwhile.
            Verb::Check(args) => check::check(async || connect(&config, remote.as_ref()).await, args, &mut out).await,
            Verb::Stack(verb) => {
                let connect = async || connect(&config, remote.as_ref()).await;
                stack::stack(connect, verb, &mut out).await.map(|()| ExitCode::SUCCESS)
            }
            verb => ask(verb, connect(&config, remote.as_ref()).await?, &mut out).await,
        }
    });
    // What still waits on another thread, such as for the datapath's end, keeps the process no longer.
    runtime.shutdown_background();
    result
}

/// An agent that was started by somebody tells whom, and its log, why it ends; else whoever sees its standard error.
fn tell_starter(error: Report) -> Result<ExitCode> {
    if !start::has_starter() {
        return Err(error);
    }
    let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
    let advice = error.help().map(|advice| format!("; {advice}")).unwrap_or_default();
    let cause = format!("{}{advice}", causes.join(": "));
    tracing::error!("{cause}");
    start::notify_failure(&cause);
    Ok(ExitCode::FAILURE)
}

/// The configuration. Whoever only asks the running agent, or takes the host down, needs no more of the file than where
/// the agent's directories are, and `up` has written that down: the way out works with a broken file, and with one that
/// names other directories by now.
fn load(path: Option<&Path>, verb: &Verb) -> Result<Config> {
    let needs_all = matches!(verb, Verb::Up(_) | Verb::Agent(_) | Verb::Enable(_) | Verb::Disable(_) | Verb::Run(_));
    if needs_all {
        let is_new = matches!(verb, Verb::Up(args) if !args.is_of_unit());
        let read = if is_new { Config::load_written(path) } else { Config::load(path) };
        return read.map_err(Report::from);
    }
    let (config, broken) = load_for_asking(path);
    if let Some(error) = broken {
        // Nobody may be reading.
        let _ = writeln!(
            std::io::stderr(),
            "{error:?}\nThe file is left aside: the agent is looked for in {}.",
            config.host.runtime_dir.display()
        );
    }
    Ok(config)
}

/// The configuration for whoever only asks the agent, and what is wrong with the file.
fn load_for_asking(path: Option<&Path>) -> (Config, Option<Report>) {
    let prepared = host::Prepared::load();
    match Config::load(path) {
        Ok(mut config) => {
            if let Some(prepared) = prepared.filter(|_| !config.socket().exists()) {
                prepared.direct(&mut config);
            }
            (config, None)
        }
        Err(broken) => {
            let mut config = Config::default();
            prepared.unwrap_or_default().direct(&mut config);
            (config, Some(Report::from(broken)))
        }
    }
}

async fn ask(verb: Verb, client: Client, out: &mut Out) -> Result<ExitCode> {
    match verb {
        Verb::Status(args) => status::status(client, args, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Service(verb) => service::service(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Middlebox(verb) => middlebox::middlebox(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Run(args) => run::run(client, args).await,
        Verb::Drain(args) => drain::drain(client, args, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Undrain(args) => drain::undrain(client, args, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Rebalance(args) => rebalance::rebalance(client, args, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Flow(verb) => flow::flow(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Path(verb) => path::path(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Route(verb) => route::route(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Router(verb) => router::router(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Chain(verb) => chain::chain(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Policy(verb) => policy::policy(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Trace(args) => trace::trace(client, args, out).await,
        Verb::Fact(verb) => fact::fact(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Cache(verb) => cache::cache(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Audit(verb) => audit::audit(client, verb, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Id(args) => id::id(client, args, out).await.map(|()| ExitCode::SUCCESS),
        Verb::Up(_)
        | Verb::Down(_)
        | Verb::Agent(_)
        | Verb::Check(_)
        | Verb::Stack(_)
        | Verb::Reload(_)
        | Verb::Enable(_)
        | Verb::Disable(_)
        | Verb::Unit(_)
        | Verb::Ensemble(_)
        | Verb::Responder(_)
        | Verb::Completions { .. } => Err(miette!("this verb does not ask the agent")),
    }
}

/// A client of the agent.
pub type Client = AgentClient<Channel>;

async fn connect(config: &Config, remote: Option<&(String, TlsFiles)>) -> Result<Client> {
    match remote {
        Some((address, files)) => api::remote::connect(address, files).await.into_diagnostic(),
        None => api::connect(&config.socket()).await.into_diagnostic(),
    }
}

/// What the agent says, without the transport's words.
pub fn refused(status: tonic::Status) -> Report {
    miette!("{}", status.message())
}
