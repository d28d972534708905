//! The routers that this host belongs to: from its store, and from a join token.

use std::collections::HashMap;
use std::fs;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use margay_control::dns::Directory;
use margay_control::registration::{Home, HomeConfig, Instance, Local, Phase, Router, Ways};
use margay_control::store::Store;
use margay_control::token::JoinToken;
use margay_control::wide_area::WideArea;
use margay_control::{Clock, SalControl};
use margay_core::chain::ChainPolicy;
use margay_core::name::{Name, Prefix, ServiceId, authority_block};
use margay_core::table::Resolution;
use miette::{IntoDiagnostic, Result, WrapErr};
use parking_lot::RwLock;

use super::core::CoreHandle;
use super::service::Services;
use super::{Agent, orders, spread, trace};
use crate::config::Config;
use crate::host::{RESOLV_CONF, resolv_conf};

/// Routers to register with: every one that welcomed this host before, and the one of the configuration's token.
///
/// # Errors
///
/// The token is none, or cannot be read.
pub fn candidates(config: &Config, store: &Store) -> Result<Vec<HomeConfig>> {
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
    if let Some(token) = token(config)? {
        let wanted = config_of(config, token);
        homes.retain(|home| !(home.router_key == wanted.router_key && home.authority == wanted.authority));
        homes.push(wanted);
    }
    Ok(homes)
}

/// The router of a token, where the configuration says that it is.
pub fn config_of(config: &Config, token: JoinToken) -> HomeConfig {
    HomeConfig {
        router_address: config.join.router.map_or(token.router_address, |address| address.to_string()),
        router_key: token.router_key,
        authority: token.authority,
        authority_key: token.authority_key,
        secret: Some(token.secret),
    }
}

/// The join token of the configuration.
///
/// # Errors
///
/// It is none, or cannot be read.
pub fn token(config: &Config) -> Result<Option<JoinToken>> {
    let text = match (&config.join.token, &config.join.token_file) {
        (Some(token), _) => token.clone(),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path).into_diagnostic();
            text.wrap_err_with(|| format!("cannot read the join token in {}", path.display()))?
        }
        (None, None) => return Ok(None),
    };
    text.trim().parse().map(Some).into_diagnostic()
}

/// Starts to register with a router.
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
    let home = join(
        config,
        &agent.host.local,
        &agent.host.store,
        &control,
        &agent.host.clock,
        &agent.routing.ways,
        agent.routing.area.as_ref(),
    );
    home.set_tracer(trace::tracer(agent));
    home.set_order_book(orders::book(agent));
    spread::hear(agent, &home);
    agent.publishing.services.add_home(Arc::clone(&home));
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
    plain: RwLock<PlainAddresses>,
    services: Arc<Services>,
    router: Option<Arc<Router>>,
    core: CoreHandle,
    zone: String,
}

/// `[[fallback]]` sections, by name.
#[derive(Default)]
struct PlainAddresses(HashMap<Prefix, Vec<IpAddr>>);

impl PlainAddresses {
    fn new(config: &Config) -> Self {
        let mut by_prefix: HashMap<Prefix, Vec<IpAddr>> = HashMap::new();
        for section in &config.fallback {
            let section = section.get_ref();
            by_prefix.entry(section.name.0.prefix()).or_default().push(section.address);
        }
        Self(by_prefix)
    }

    /// Those of a name, which has none where sessions to it have to pass middleboxes, or where it is closed: whoever
    /// keeps the routers' answers away would lead programs past them.
    fn of(&self, name: &Name, policy: &ChainPolicy) -> &[IpAddr] {
        let id = name.service_id();
        let needs_boxes = policy.required.iter().any(|required| required.services.contains(&id));
        let is_closed = policy.lapsed.iter().any(|prefix| prefix.contains(&id));
        let plain = self.0.get(&name.prefix()).filter(|_| !needs_boxes && !is_closed);
        plain.map_or(&[], Vec::as_slice)
    }
}

impl Fallbacks {
    /// None, until they are configured.
    pub fn new(config: &Config, services: Arc<Services>, router: Option<Arc<Router>>, core: CoreHandle) -> Self {
        Self { plain: RwLock::default(), services, router, core, zone: config.dns.zone.clone() }
    }

    /// As configured from now on. The core has the chain policy by then.
    pub fn configure(&self, config: &Config) {
        *self.plain.write() = PlainAddresses::new(config);
    }

    /// The plain addresses of a name, whether somebody serves it or not.
    pub fn plain(&self, name: &Name) -> Vec<IpAddr> {
        self.core.0.with_sal(|sal, _| self.plain.read().of(name, sal.chain_policy()).to_vec())
    }

    /// Whether a name exists; any does, where nobody comes by a search list.
    async fn has(&self, name: &Name) -> bool {
        let content = fs::read(RESOLV_CONF).unwrap_or_default();
        if !resolv_conf::searches(&content, &self.zone) || self.is_ruled(name) || self.services.find(name).is_some() {
            return true;
        }
        match instances(&self.services, self.router.as_deref(), name).await {
            Ok((found, _)) => !found.is_empty(),
            // Only routers of its authority could have said.
            Err(_) => {
                let block = name.service_id().authority();
                self.services.homes().iter().any(|home| authority_block(&home.config().authority) == block)
            }
        }
    }

    /// Whether this host knows itself where packets to a name go, or could ask somebody else than a router.
    fn is_ruled(&self, name: &Name) -> bool {
        let is_configured = self.plain.read().0.contains_key(&name.prefix());
        is_configured
            || self.core.0.with_sal(|sal, _| match sal.resolve(&name.service_id()) {
                Resolution::Forward(_, hop) => !hop.router,
                Resolution::Demux(..) | Resolution::Box(..) | Resolution::Delay(..) => true,
                Resolution::Drop(_) | Resolution::None => false,
            })
    }

    async fn find(&self, name: &Name) -> Vec<IpAddr> {
        let plain = self.plain(name);
        if plain.is_empty() || self.services.find(name).is_some() {
            return Vec::new();
        }
        match instances(&self.services, self.router.as_deref(), name).await {
            Ok((found, _)) if !found.is_empty() => Vec::new(),
            // Without a router, nobody serves the name as far as this host can tell.
            _ => plain,
        }
    }
}

impl Directory for Fallbacks {
    fn fallback<'a>(&'a self, name: &'a Name) -> Pin<Box<dyn Future<Output = Vec<IpAddr>> + Send + 'a>> {
        Box::pin(self.find(name))
    }

    fn exists<'a>(&'a self, name: &'a Name) -> Pin<Box<dyn Future<Output = bool> + Send + 'a>> {
        Box::pin(self.has(name))
    }
}

#[cfg(test)]
mod test {
    use margay_core::chain::Requirement;

    use super::*;

    #[test]
    fn nothing_leads_around_a_middlebox_that_is_required_nor_to_a_name_that_is_closed() {
        let name: Name = "web.shop".parse().expect("a name");
        let firewall: Name = "fw.shop".parse().expect("a name");
        let address = IpAddr::from([192, 0, 2, 7]);
        let plain = PlainAddresses(HashMap::from([(name.prefix(), vec![address])]));
        let requirement = |services| Requirement { services, boxes: vec![firewall.service_id()] };
        let required = |services| ChainPolicy { required: vec![requirement(services)], ..ChainPolicy::default() };
        let lapsed = |prefix| ChainPolicy { lapsed: vec![prefix], ..ChainPolicy::default() };
        assert_eq!(plain.of(&name, &ChainPolicy::default()), [address]);
        assert_eq!(plain.of(&name, &required(firewall.prefix())), [address]);
        let all = Prefix::new(ServiceId::default(), 0);
        for policy in [required(name.prefix()), lapsed(name.prefix()), lapsed(all)] {
            assert!(plain.of(&name, &policy).is_empty());
        }
    }
}
