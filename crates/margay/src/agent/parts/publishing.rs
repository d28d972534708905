use std::sync::Arc;

use crate::agent::{active, drain, ensembles, health, service};

/// What this host publishes, and whether it may be sent connections.
///
/// `services` has the last word of what is registered: listeners (`active`), checks (`health`) and drains each tell it
/// what they found, and none of them writes to a router by itself.
pub struct Publishing {
    /// Names that this host serves, and the routers it tells.
    pub services: Arc<service::Services>,
    /// What listens here, and which names that serves.
    pub active: active::Active,
    /// Whether each service passes its checks.
    pub health: health::Health,
    /// Names that take no new connections.
    pub drains: drain::Drains,
    /// Switches of ensembles.
    pub ensembles: ensembles::Ensembles,
}
