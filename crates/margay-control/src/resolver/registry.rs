//! The registry of a router that this host is registered with, asked name by name: for names that are served there and
//! not found by the host's way to its routers.

use std::sync::Arc;
use std::time::Duration;

use margay_core::name::{Prefix, authority_block};

use super::{Answering, Found, Place, Resolve, ResolveError, Wanted};
use crate::registration::{Home, Instance};

/// How long an answer holds: a router hears within a second that an instance is gone, and nobody tells this host.
pub const TTL: Duration = Duration::from_secs(2);

/// This host's routers, as they are now.
pub type Homes = Arc<dyn Fn() -> Vec<Arc<Home>> + Send + Sync>;

/// A router's registry.
pub struct Registry {
    homes: Homes,
    /// As its join token has it.
    router: String,
}

impl Registry {
    /// Of the router at this address, HOST:PORT as the join token has it.
    pub fn new(router: String, homes: Homes) -> Self {
        Self { homes, router }
    }

    async fn ask(&self, wanted: &Wanted) -> Result<Found, ResolveError> {
        let mut there: Vec<_> =
            (self.homes)().into_iter().filter(|home| home.config().router_address == self.router).collect();
        // Of several authorities of one router the name's own is asked first.
        there.sort_by_key(|home| authority_block(&home.config().authority) != wanted.service.authority());
        let Some(home) = there.first() else {
            let text = format!("this host is not registered with a router at {}; see `margay status`", self.router);
            return Err(ResolveError::Failed(text));
        };
        let instances = home.resolve(wanted.service).await.map_err(|error| ResolveError::Failed(error.to_string()))?;
        let usable = instances.into_iter().filter(|one| one.weight > 0 && one.prefix.contains(&wanted.service));
        best(wanted, usable.collect())
    }
}

/// Those of the longest prefix and of that the highest priority.
fn best(wanted: &Wanted, instances: Vec<Instance>) -> Result<Found, ResolveError> {
    let rank = |one: &Instance| (one.prefix.bits, one.priority);
    let (bits, priority) = instances.iter().map(rank).max().ok_or(ResolveError::Nobody)?;
    let chosen = instances.iter().filter(|one| rank(one) == (bits, priority));
    let places = chosen.map(|one| Place { address: one.address, host: Some(one.host), weight: one.weight }).collect();
    Ok(Found { prefix: Prefix::new(wanted.service, bits), places, ttl: TTL })
}

impl Resolve for Registry {
    fn kind(&self) -> &'static str {
        "registry"
    }

    fn resolve<'a>(&'a self, wanted: &'a Wanted) -> Answering<'a> {
        Box::pin(self.ask(wanted))
    }
}

#[cfg(test)]
mod tests {
    use margay_core::key::HostId;
    use margay_core::name::ServiceId;

    use super::*;

    #[test]
    fn the_best_instances_are_those_that_the_router_would_take() {
        let wanted = Wanted { service: ServiceId([7; 32]), written: None };
        let instance = |n: u8, bits: u16, priority: u32| Instance {
            host: HostId([n; 16]),
            host_name: String::new(),
            address: ([10, 0, 0, n], 54324).into(),
            name: String::new(),
            prefix: Prefix::new(wanted.service, bits),
            weight: u32::from(n),
            priority,
            sticky: false,
            fence: None,
            zero_weight: None,
        };
        assert_eq!(best(&wanted, Vec::new()), Err(ResolveError::Nobody));
        let all = vec![instance(1, 96, 900), instance(2, 256, 5), instance(3, 256, 9), instance(4, 256, 9)];
        let found = best(&wanted, all).expect("some");
        assert_eq!(found.prefix, wanted.service.into());
        let of = |place: &Place| (place.host.expect("said").0[0], place.weight);
        assert_eq!(found.places.iter().map(of).collect::<Vec<_>>(), [(3, 3), (4, 4)]);
    }
}
