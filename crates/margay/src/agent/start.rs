//! What comes up in which order, and goes down.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use futures_util::FutureExt;
use margay_control::api::v1::ReloadRequest;
use margay_control::cluster::Cluster;
use margay_control::identity::{BOOT_ID, Identity};
use margay_control::keyring::Keyring;
use margay_control::lease::Leases;
use margay_control::registration::{HomeConfig, Local, Router, RouterConfig};
use margay_control::store::Store;
use margay_control::wide_area::WideArea;
use margay_control::{Clock, SalControl, StateDir, api as transport, entropy};
use margay_core::name::Prefix;
use margay_core::segment::SEGMENT;
use margay_core::table::{Action, NextHop, Rule};
use margay_core::{Limits, Sal};
use margay_datapath::{Datapath, DatapathConfig, clock, seal};
use miette::{IntoDiagnostic, Result, WrapErr, miette};
use nix::net::if_::if_nametoindex;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;

use super::active::{self, Active, Reporters};
use super::api::Api;
use super::core::CoreHandle;
use super::direct::DirectPath;
use super::distant_orders;
use super::drain::{self, Drains};
use super::ensembles::Ensembles;
use super::health::{self, Health};
use super::host_changes;
use super::keepsake::Keepsake;
use super::naming::Naming;
use super::network::Network;
use super::orders::{self, Orders};
use super::programs::{self, Programs};
use super::quiet;
use super::rebalance::{self, Rebalances};
use super::relocation::{self, Relocations};
use super::resolvers::{self, Resolvers};
use super::rule_book::{self, RuleBook};
use super::search::{Answering, Searches};
use super::service::{Publication, Services, Surroundings};
use super::service_router::KernelRouter;
use super::spread::{self, Spreads};
use super::stack_rules;
use super::watch::Watchers;
use super::way::Way;
use super::{
    Agent, Configuration, Connections, Host, INTERFACE, Kernel, Names, Process, Publishing, Routing, StartedWith,
    authority, chain, cluster, dns, flows, home, reload, remote, trace, upkeep,
};
use crate::config::Config;
use crate::{host, start};

/// Silence after which a host or a router takes the other for gone; with the second look and all that follows from it,
/// within a second.
const LEASE_MS: u32 = 850;
/// Time between signs of life.
const HEARTBEAT_MS: u32 = 200;
/// A router that does not answer within this time is not waited for.
const SETTLED_LIMIT: Duration = Duration::from_millis(500);

/// Runs an agent until it is told to stop, or its datapath fails.
///
/// # Errors
///
/// What keeps it from running. Nothing is half-started then.
pub async fn run(mut config: Config, mut started_with: StartedWith) -> Result<()> {
    config.router.enabled |= started_with.router;
    // The agent may leave the directory that a path is meant from.
    started_with.config_path = started_with.config_path.map(|path| path.canonicalize().unwrap_or(path));
    // Given back with the process, not before: who gets it next finds no socket of this one any more.
    Box::leak(Box::new(start::lock(&config).into_diagnostic()?));
    let has_kept = host::Prepared::load().is_some_and(|prepared| prepared.keep_ranges(&mut config));
    if has_kept {
        let ranges = tracing::field::display(config.ranges());
        tracing::warn!(
            ranges,
            "this host is prepared with other [ranges] than the configuration has now; they stay until `margay down` \
             and `margay up`"
        );
    }
    let interface = restore_interface(&config).await?;
    let agent = bring_up(config, started_with).await?;
    chain::begin(&agent);
    agent.names.fallbacks.configure(&agent.config());
    begin(&agent.core, &agent.publishing.services, agent.config().router.enabled).await;
    let result = serve(&agent).await;
    take_down(&agent).await;
    // Somebody may have asked it to go down while it was ending by itself.
    let is_to_end = agent.process.parting.ends_flows.load(Ordering::Relaxed)
        || agent.process.parting.for_good.notified().now_or_never().is_some();
    // The agent itself may have made it again by now, with another index.
    let is_gone = result.is_err() && if_nametoindex(INTERFACE).ok() != Some(interface);
    if is_gone {
        // Flows are still there: the next start makes it again, and takes them up.
        tracing::warn!("somebody has removed {INTERFACE}; the agent begins again");
    }
    if (is_gone || agent.process.configuration.is_to_restart()) && !is_to_end {
        let error = agent.process.configuration.begin_again().await;
        return Err(miette!("the agent cannot begin again: {error}"));
    }
    result
}

/// Makes the interface again that `up` had made; gives its index.
async fn restore_interface(config: &Config) -> Result<u32> {
    if if_nametoindex(INTERFACE).is_err() && host::is_prepared(config).unwrap_or(false) {
        let say = |what: &str| tracing::warn!(what, "somebody has undone what `up` had changed; put back");
        host_changes::restore_all(config, say).await.into_diagnostic()?;
    }
    if_nametoindex(INTERFACE).map_err(|_| {
        miette!(
            help =
                "`margay up` prepares the host and starts the agent; `margay up --dry-run` shows what it would change",
            "there is no interface {INTERFACE}"
        )
    })
}

async fn bring_up(config: Config, started_with: StartedWith) -> Result<Arc<Agent>> {
    let (clock_of_wall, (state_dir, store, keyring)) = (Clock::system(), open_state(&config)?);
    let (identity, local) = identify(&config, &state_dir, &clock_of_wall)?;
    let (watchers, direct) = (Watchers::default(), DirectPath::open(&config).await);
    let (spreads, kernel_router) = (Spreads::open(&config, &direct), KernelRouter::open(&config));
    let core = start_core(&config, &identity, &clock_of_wall, &watchers, (&direct, &spreads)).await?;
    let rules = start_rules(&config, &core, &kernel_router, &store, &clock_of_wall)?;
    let (control, tokens): (Arc<dyn SalControl>, _) = (Arc::new(core.clone()), home::candidates(&config, &store)?);
    let (own, keys, ways) = (local.host_key.public(), (&keyring, &*store), Arc::default());
    authority::adopt(&*control, keys, &own, &clock_of_wall, &authorities_of(&tokens)).into_diagnostic()?;
    let answering = Answering::begin(&config, &*control, &keyring, &own, &clock_of_wall).into_diagnostic()?;
    let cluster = cluster::open(&config, &local, &store, &clock_of_wall).await?;
    let (router, area) = start_router(&config, &cluster, &local, &keyring, &store, &control, &clock_of_wall).await?;
    let around = Surroundings {
        core: Arc::clone(&control),
        local: local.clone(),
        keyring: keyring.clone(),
        store: Arc::clone(&store),
        clock: clock_of_wall.clone(),
        dir: state_dir,
        router: router.clone(),
        look_up: direct.look_up(),
        ranges: config.ranges(),
        end_datagrams: core.end_datagrams(),
    };
    let (services, drains, health) = publish(&config, around)?;
    let join = |token| home::join(token, &local, &store, &control, &clock_of_wall, &ways, area.as_ref());
    tokens.into_iter().for_each(|token| services.add_home(join(token)));
    let leases = Leases::open(Arc::clone(&store), control, clock_of_wall.clone(), config.ranges()).into_diagnostic()?;
    let fallbacks = Arc::new(home::Fallbacks::new(&config, Arc::clone(&services), router.clone(), core.clone()));
    let (dns, warnings) = start_dns(&config, &leases, &fallbacks).await;
    let ensembles = Ensembles::default();
    let active = Active::open(&config, &services, Reporters::attach(&config));
    let relocations = Relocations::new(watchers.hand_overs(), spreads.addresses());
    let network = Network::default();
    let way = Way::default();
    let searches = Searches::default();
    Ok(Arc::new(Agent {
        connections: Connections {
            programs: Programs::new(&config),
            relocations,
            rebalances: Rebalances::default(),
            orders: Orders::default(),
        },
        process: Process::new(Configuration::new(config, started_with), watchers, warnings),
        host: Host { identity, local, keyring, store, clock: clock_of_wall },
        kernel: Kernel { network, direct, way, router: kernel_router, spreads },
        publishing: Publishing { services, active, health, drains, ensembles },
        routing: Routing { rules, router, cluster, ways, area, searches, answering },
        names: Names { naming: Naming::default(), leases, dns, fallbacks },
        core,
    }))
}

/// The authorities that this host has joined by tokens.
fn authorities_of(tokens: &[HomeConfig]) -> Vec<String> {
    tokens.iter().map(|token| token.authority.clone()).collect()
}

/// What this host serves, drained or sick where it was.
fn publish(config: &Config, around: Surroundings) -> Result<(Arc<Services>, Drains, Health)> {
    let drains = Drains::open(around.dir.clone(), &around.clock).into_diagnostic()?;
    let health = Health::open(around.dir.clone()).into_diagnostic()?;
    let services = Services::new(around, config.host.boxes);
    services.restore_drained(drains.drained());
    services.restore_fitness(health.restored());
    services.restore(&configured(config)).into_diagnostic().wrap_err("services cannot be published")?;
    Ok((Arc::new(services), drains, health))
}

/// Takes packets when this host's routers have answered: before they have said so, it has no right to connect, nor to
/// serve anything, and whoever asked would be refused. What is carried for programs waits, too, in the kernel's queues,
/// as it did while there was no agent.
async fn begin(core: &CoreHandle, services: &Services, is_router: bool) {
    let homes = services.homes();
    let settled = async {
        for home in &homes {
            home.settled().await;
        }
    };
    if tokio::time::timeout(SETTLED_LIMIT, settled).await.is_err() {
        tracing::debug!("a router has not answered yet");
    }
    if is_router {
        core.0.with_sal(|sal, now| sal.await_hosts(now));
    }
    core.0.with_sal(|sal, _| sal.take_connects());
    core.0.begin();
}

/// What is kept on disk.
fn open_state(config: &Config) -> Result<(StateDir, Arc<Store>, Keyring)> {
    let dir = StateDir::open(&config.host.state_dir).into_diagnostic()?;
    let store = Arc::new(Store::open(&dir).into_diagnostic()?);
    let keyring = Keyring::open(&dir).into_diagnostic()?;
    Ok((dir, store, keyring))
}

fn identify(config: &Config, state_dir: &StateDir, clock: &Clock) -> Result<(Identity, Local)> {
    let identity = Identity::start(state_dir, &config.host.runtime_dir, Path::new(BOOT_ID), clock).into_diagnostic()?;
    let local = local_of(config, &identity);
    Ok((identity, local))
}

fn local_of(config: &Config, identity: &Identity) -> Local {
    Local {
        host_key: identity.host_key.clone(),
        epoch: identity.epoch,
        boot_id: identity.boot_id,
        sal_port: config.host.port,
        host_name: stack_rules::host_name(config),
        software: concat!("margay ", env!("CARGO_PKG_VERSION")).to_owned(),
    }
}

fn configured(config: &Config) -> Vec<Publication> {
    config.service.iter().filter_map(|section| Publication::of_section(section.get_ref())).collect()
}

async fn start_core(
    config: &Config,
    identity: &Identity,
    wall: &Clock,
    watchers: &Watchers,
    (direct, spreads): (&DirectPath, &Spreads),
) -> Result<CoreHandle> {
    let plan = host::plan(config).await.into_diagnostic()?;
    let placed = host::placed(config.ranges()).await.into_diagnostic().wrap_err("cannot read this host's addresses")?;
    let local_addresses = placed.iter().map(|one| one.address).collect();
    let datagram_max = plan.datagram_max();
    let core_config = margay_core::Config {
        host_key: identity.host_key.clone(),
        epoch: identity.epoch,
        boot_id: identity.boot_id,
        router: config.router.enabled,
        datagram_max,
        local_addresses,
        ranges: config.ranges(),
        limits: Limits::default(),
    };
    let now = clock::now();
    let mut sal = Sal::new(core_config, now, wall.unix_s(), entropy::seed().into_diagnostic()?);
    // Before flows are taken up: they are sealed with what this says.
    sal.set_secure(seal::ciphers(), config.secure, config.secure_names());
    sal.set_policies(config.policies());
    sal.set_local_places(stack_rules::places(&placed));
    sal.set_stack_rules(now, config.stack_rules(&stack_rules::host_name(config)));
    sal.set_give_up_after(config.host.give_up_after.map(|patience| patience.0));
    // Messages about what is carried already are answered from the beginning, SYNs when `begin` says so.
    sal.hold_connects();
    let runtime_dir = config.host.runtime_dir.clone();
    Keepsake::new(&runtime_dir).take_up(&mut sal, now, identity.continues);
    flows::take_up(&runtime_dir, &mut sal, now);
    direct.hand_over_grants(&mut sal, now);
    sal.forget_superseded();
    sal.resume_ways(now);
    direct.hand_over(&mut sal, now);
    spreads.hand_over(&sal);
    let (keeper, changes) = mpsc::channel();
    watchers.keep(keeper);
    let datapath_config = DatapathConfig {
        tun_name: INTERFACE.to_owned(),
        udp_port: config.host.port,
        datagram_max,
        routing: Some(Box::new(host::route::Kernel)),
        unconnected: spreads.kernel(),
        cache: direct.cache(),
        ..DatapathConfig::default()
    };
    let datapath = Arc::new(Datapath::start(datapath_config, sal, watchers.on_event()).into_diagnostic()?);
    let kept = Arc::downgrade(&datapath);
    let keep = move || flows::keep(&runtime_dir, kept, &changes);
    std::thread::Builder::new().name("margay-flows".to_owned()).spawn(keep).into_diagnostic()?;
    Ok(CoreHandle(datapath))
}

/// The operator's rules, which keep their numbers and so come first; then those of the configuration, and the default
/// rule of a host without a router. A router's own rules come before that. The kernel's service router follows them.
fn start_rules(
    config: &Config,
    core: &CoreHandle,
    kernel_router: &KernelRouter,
    store: &Arc<Store>,
    wall: &Clock,
) -> Result<RuleBook> {
    let resolvers = Arc::new(Resolvers::open(config, wall)?);
    let rules = RuleBook::open(core.clone(), Arc::clone(store), wall.clone(), Arc::clone(&resolvers));
    let rules = rules.into_diagnostic().wrap_err("the operator's rules cannot be taken up")?;
    resolvers.follow_rules(config, core).into_diagnostic()?;
    let floods = config.floods();
    core.0.with_sal(|sal, now| {
        sal.set_relay(now, config.ad_hoc.relay);
        sal.set_notices(now, floods);
    });
    if config.ad_hoc.enabled && !config.router.enabled {
        let hop = NextHop { address: SEGMENT, host: None, router: false };
        let rule = Rule { priority: 0, weight: 1, action: Action::Forward(hop) };
        core.add_rule(Prefix::default(), rule).into_diagnostic()?;
    }
    kernel_router.start(core).into_diagnostic()?;
    Ok(rules)
}

/// The router, and what it tells routers of other sites, if it belongs to one.
async fn start_router(
    config: &Config,
    cluster: &Option<Arc<Cluster>>,
    local: &Local,
    keyring: &Keyring,
    store: &Arc<Store>,
    control: &Arc<dyn SalControl>,
    wall: &Clock,
) -> Result<(Option<Arc<Router>>, Option<Arc<WideArea>>)> {
    if !config.router.enabled {
        return Ok((None, None));
    }
    let own = local.host_key.public();
    let wide_area = |policy| WideArea::new(policy, own, keyring.clone(), Arc::clone(control), wall.clone());
    let area = config.router.policy().map(wide_area);
    let (listen, cluster) = (config.router.listen, cluster.clone());
    let router_config = RouterConfig { listen, lease_ms: LEASE_MS, heartbeat_ms: HEARTBEAT_MS, cluster };
    let (store, control) = (Arc::clone(store), Arc::clone(control));
    let local = local.clone();
    let router = Router::start(router_config, local, keyring.clone(), store, control, wall.clone(), area.clone());
    Ok((Some(router.await.into_diagnostic()?), area))
}

/// The responder is a convenience: where its address is taken, the agent runs without it and says so.
async fn start_dns(
    config: &Config,
    leases: &Arc<Leases>,
    fallbacks: &Arc<home::Fallbacks>,
) -> (Option<dns::Dns>, Vec<String>) {
    if !config.dns.enabled {
        return (None, Vec::new());
    }
    let directory = Arc::clone(fallbacks);
    match dns::start(config, Arc::clone(leases), directory).await {
        Ok(started) => {
            let remark = started.way.remark();
            remark.iter().for_each(|remark| tracing::warn!(remark, "the DNS responder has no interface of its own"));
            (Some(started), Vec::from_iter(remark))
        }
        Err(error) => {
            tracing::warn!(%error, "names of the zone are not answered");
            (None, vec![format!("names of the zone {} are not answered: {error}", config.dns.zone)])
        }
    }
}

async fn serve(agent: &Arc<Agent>) -> Result<()> {
    let config = agent.config();
    let listener = transport::bind(&config.socket(), config.host.group.as_ref().map(|name| name.get_ref().as_str()))
        .into_diagnostic()?;
    agent.process.metrics.listen(agent, config.metrics.listen).await?;
    let operators = remote::start(agent).await?;
    let upkeep = tokio::spawn(upkeep::run(Arc::clone(agent)));
    let rules = tokio::spawn(rule_book::follow(Arc::clone(agent)));
    let reloads = tokio::spawn(reload_on_hangup(Arc::clone(agent), signal(SignalKind::hangup()).into_diagnostic()?));
    agent.publishing.services.homes().iter().for_each(|home| home.set_tracer(trace::tracer(agent)));
    agent.routing.router.iter().for_each(|router| router.set_tracer(trace::tracer(agent)));
    orders::begin(agent);
    active::start(agent).into_diagnostic()?;
    spread::start(agent).into_diagnostic()?;
    drain::resume(agent);
    resolvers::start(agent).into_diagnostic()?;
    quiet::start(agent).into_diagnostic()?;
    chain::start(agent).into_diagnostic()?;
    let following = follow(agent);
    let takers = relocation::start(agent).await;
    let program_socket = programs::socket::open(&programs::path(&config.host.runtime_dir))?;
    let by_name = programs::socket::open_by_name(&programs::path(&config.host.runtime_dir));
    let programs = tokio::spawn(programs::socket::run(Arc::clone(agent), program_socket, by_name));
    // They ask the agent at once.
    agent.publishing.ensembles.configure(&config, agent.process.configuration.path().await);
    let splices = tokio::spawn(programs::splice::run(Arc::clone(agent)));
    let (mut terminate, mut interrupt) =
        (signal(SignalKind::terminate()).into_diagnostic()?, signal(SignalKind::interrupt()).into_diagnostic()?);
    let datapath = Arc::clone(&agent.core.0);
    let datapath_ended = tokio::task::spawn_blocking(move || datapath.wait());
    host::await_running().await.into_diagnostic()?;
    let identity = &agent.host.identity;
    tracing::info!(host = %identity.host_id(), epoch = identity.epoch, router = agent.routing.router.is_some(), "up");
    start::notify(&format!("READY=1\nSTATUS=host {}", identity.host_id()));
    let until = async {
        tokio::select! {
            _ = terminate.recv() => tracing::info!("asked to stop"),
            _ = interrupt.recv() => tracing::info!("interrupted"),
            () = agent.process.parting.for_good.notified() => {
                tracing::info!("asked to go down for good; flows are ended");
                agent.process.parting.ends_flows.store(true, Ordering::Relaxed);
            }
            () = agent.process.configuration.restart() => tracing::info!("asked to start again"),
            _ = datapath_ended => {}
        }
        start::notify("STOPPING=1");
        // Watchers of flows would keep their streams open, and the server with them.
        agent.process.watchers.close();
        agent.publishing.drains.close();
        agent.connections.rebalances.close();
        agent.connections.orders.close();
    };
    let served = transport::serve(listener, Api(Arc::clone(agent)), until).await.into_diagnostic();
    [upkeep, rules, reloads, programs, splices].iter().chain(&following).for_each(|task| task.abort());
    agent.publishing.health.end().await;
    agent.publishing.ensembles.end().await;
    takers.into_iter().for_each(|task| task.abort());
    agent.connections.relocations.end().await;
    agent.process.metrics.end().await;
    operators.into_iter().for_each(|task| task.abort());
    match agent.core.0.failure() {
        Some(failure) => Err(miette!(
            help = "`margay check` looks at the host; `margay down` and `margay up` set it up again",
            "the datapath ended: {failure}"
        )),
        None => served,
    }
}

/// Follows what changes, until each of these is aborted.
fn follow(agent: &Arc<Agent>) -> [JoinHandle<()>; 4] {
    [
        tokio::spawn(health::run(Arc::clone(agent))),
        tokio::spawn(rebalance::auto::run(Arc::clone(agent))),
        tokio::spawn(chain::follow(Arc::clone(agent))),
        tokio::spawn(distant_orders::follow(Arc::clone(agent))),
    ]
}

/// SIGHUP: what is wrong with the file has nobody to be told to but the log.
async fn reload_on_hangup(agent: Arc<Agent>, mut hangup: Signal) {
    while hangup.recv().await.is_some() {
        if let Err(why) = reload::reload(&agent, &ReloadRequest::default()).await {
            tracing::error!(why, "the configuration is not read again, and nothing has changed");
        }
    }
}

async fn take_down(agent: &Agent) {
    if let Some(router) = &agent.routing.router {
        router.stop().await;
    }
    if let Some(cluster) = &agent.routing.cluster {
        cluster.stop().await;
    }
    for home in agent.publishing.services.homes() {
        home.stop().await;
    }
    let config = agent.config();
    let runtime_dir = &config.host.runtime_dir;
    if agent.process.parting.ends_flows.load(Ordering::Relaxed) {
        // Programs learn at once that their connections are gone; peers, too. Also of those that the kernel alone knows
        // of yet.
        agent.core.0.hear_of_flows();
        agent.core.0.with_sal(|sal, now| sal.shutdown(now));
        flows::forget(runtime_dir);
    }
    Keepsake::new(runtime_dir).write(&agent.core.0.with_sal(|sal, _| sal.keep_associations()));
    // Whatever else lies there is gone with the directory at the next boot.
    let _ = std::fs::remove_file(config.socket());
    let _ = std::fs::remove_file(programs::path(runtime_dir));
    tracing::info!("down");
}

/// Where SAL is heard.
pub fn sal_address(config: &Config) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), config.host.port)
}
