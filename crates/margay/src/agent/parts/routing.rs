use std::sync::Arc;

use margay_control::cluster::Cluster;
use margay_control::registration::{Router, Ways};
use margay_control::wide_area::WideArea;

use crate::agent::{rule_book, search};

/// Where first packets go: operators' rules, the router on this host, and the routers of others.
///
/// The rule book changes by the API and by reloads. Whether there is a router, a cluster or an area is settled at the
/// start; what they hold changes with what hosts and other routers tell them.
pub struct Routing {
    /// The operator's own rules.
    pub rules: rule_book::RuleBook,
    /// The router on this host.
    pub router: Option<Arc<Router>>,
    /// Its part in a cluster.
    pub cluster: Option<Arc<Cluster>>,
    /// Which of this host's routers first packets go to.
    pub ways: Arc<Ways>,
    /// What it tells routers of other sites, and is told by them.
    pub area: Option<Arc<WideArea>>,
    /// Searches for routers that do not answer where they are configured.
    pub searches: search::Searches,
    /// On a router: whether it answers such searches.
    pub answering: search::Answering,
}
