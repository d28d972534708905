//! The routers that this host belongs to: from its store, and from a join token.

use std::collections::HashMap;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use margay_control::dns::Directory;
use margay_control::registration::{Home, HomeConfig, Instance, Local, Phase, Router, Ways};
use margay_control::store::Store;
use margay_control::token::JoinToken;
use margay_control::wide_area::WideArea;
use margay_control::{Clock, SalControl, StateDir};
use margay_core::name::{Name, Prefix, ServiceId};
use miette::{IntoDiagnostic, Result, WrapErr};

use super::service::Services;
use super::{Agent, spread, trace};
use crate::config::Config;
use crate::start::TOKEN_FILE;

/// Routers to register with: every one that welcomed this host before, and the one of a token that was not used yet.
///
/// # Errors
///
/// The token is none, or cannot be read.
pub fn candidates(config: &Config, dir: &StateDir, store: &Store) -> Result<Vec<HomeConfig>> {
    let mut homes: Vec<HomeConfig> = store
        .joined()
        .into_diagnostic()?
        .into_iter()
        .map(|joined| HomeConfig {
            router_address: joined.router_address,
            router_key: joined.router_key,
            authority: joined.authority,
            authority_key: joined.authority_key,
            secret: None,
        })
        .collect();
    if let Some(token) = token(config, dir)? {
        let same = |home: &HomeConfig| home.router_key == token.router_key && home.authority == token.authority;
        homes.retain(|home| !same(home));
        homes.push(HomeConfig {
            router_address: config.join.router.map_or(token.router_address, |address| address.to_string()),
            router_key: token.router_key,
            authority: token.authority,
            authority_key: token.authority_key,
            secret: Some(token.secret),
        });
    }
    Ok(homes)
}

fn token(config: &Config, dir: &StateDir) -> Result<Option<JoinToken>> {
    let given = dir.read(TOKEN_FILE).into_diagnostic()?.map(|text| text.trim().to_owned());
    let configured = match (&config.join.token, &config.join.token_file) {
        (Some(token), _) => Some(token.clone()),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path).into_diagnostic();
            Some(text.wrap_err_with(|| format!("cannot read the join token in {}", path.display()))?.trim().to_owned())
        }
        (None, None) => None,
    };
    let Some(text) = given.or(configured) else { return Ok(None) };
    text.parse().map(Some).into_diagnostic()
}

/// Starts to register with a router, and forgets the token once it is used.
pub fn join(
    config: HomeConfig,
    local: &Local,
    store: &Arc<Store>,
    control: &Arc<dyn SalControl>,
    clock: &Clock,
    ways: &Arc<Ways>,
    area: Option<&Arc<WideArea>>,
) -> Arc<Home> {
    let (store, control, ways) = (Arc::clone(store), Arc::clone(control), Some(Arc::clone(ways)));
    Arc::new(Home::start(config, local.clone(), store, control, clock.clone(), ways, area.cloned()))
}

/// One more router, on an agent that runs.
pub fn add(agent: &Arc<Agent>, config: HomeConfig) -> Arc<Home> {
    let control: Arc<dyn SalControl> = Arc::new(agent.core.clone());
    let home = join(config, &agent.local, &agent.store, &control, &agent.clock, &agent.ways, agent.area.as_ref());
    home.set_tracer(trace::tracer(agent));
    spread::hear(agent, &home);
    agent.services.add_home(Arc::clone(&home));
    home
}

/// Instances of a name as the routers know them, and who said so. `None`: no router answered.
pub async fn instances(
    services: &Services,
    router: Option<&Router>,
    name: &Name,
) -> Result<(Vec<Instance>, String), String> {
    let id: ServiceId = name.service_id();
    if let Some(router) = router {
        return Ok((router.instances_of(&id), "this host".to_owned()));
    }
    let mut homes = services.homes_of(name);
    // Whoever is not there does not answer.
    homes.sort_by_key(|home| !is_connected(home));
    let mut why = "this host has joined no router".to_owned();
    for home in &homes {
        match home.resolve(id).await {
            Ok(instances) => return Ok((instances, home.config().router_address.clone())),
            Err(error) => why = format!("router {}: {error}", home.config().router_address),
        }
    }
    if homes.is_empty() {
        let own = services.own_instances().into_iter().filter(|own| own.prefix.contains(&id)).collect();
        return Ok((own, "this host".to_owned()));
    }
    Err(why)
}

/// Whether a router is connected.
pub fn is_connected(home: &Home) -> bool {
    home.state().phase == Phase::Connected
}

/// Plain addresses of names that nobody serves (DESIGN §18: a peer without an agent).
pub struct Fallbacks {
    by_prefix: HashMap<Prefix, Vec<IpAddr>>,
    services: Arc<Services>,
    router: Option<Arc<Router>>,
}

impl Fallbacks {
    /// As configured.
    pub fn new(config: &Config, services: Arc<Services>, router: Option<Arc<Router>>) -> Self {
        let mut by_prefix: HashMap<Prefix, Vec<IpAddr>> = HashMap::new();
        for section in &config.fallback {
            let section = section.get_ref();
            by_prefix.entry(section.name.0.prefix()).or_default().push(section.address);
        }
        Self { by_prefix, services, router }
    }

    async fn find(&self, name: &Name) -> Vec<IpAddr> {
        let Some(plain) = self.by_prefix.get(&name.prefix()) else { return Vec::new() };
        if self.services.find(name).is_some() {
            return Vec::new();
        }
        match instances(&self.services, self.router.as_deref(), name).await {
            Ok((found, _)) if !found.is_empty() => Vec::new(),
            // Without a router, nobody serves the name as far as this host can tell.
            _ => plain.clone(),
        }
    }
}

impl Directory for Fallbacks {
    fn fallback<'a>(&'a self, name: &'a Name) -> Pin<Box<dyn Future<Output = Vec<IpAddr>> + Send + 'a>> {
        Box::pin(self.find(name))
    }
}
