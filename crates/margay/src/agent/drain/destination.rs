//! The hosts that an operator names for the connections of programs: each must take new flows of all that is drained.

use margay_control::registration::Instance;
use margay_core::key::HostId;
use margay_core::name::Name;

use super::{Drain, DrainError};
use crate::agent::{Agent, home, naming};

/// The host-IDs of those that the drain names. A name that is drained and that nobody serves here needs none.
///
/// # Errors
///
/// One is no other host that takes new flows of each name, or nobody can say.
pub(super) async fn find_all(agent: &Agent, drain: &Drain) -> Result<Vec<String>, DrainError> {
    let mut found = drain.to.clone();
    if found.is_empty() {
        return Ok(found);
    }
    let own = agent.host.identity.host_id();
    let is_meant = |is_served: bool| is_served || drain.name.is_some();
    for service in drain.published(agent).iter().filter(|service| is_meant(service.is_served)) {
        let name = &service.name;
        let refused = |host: &str, why: String| DrainError::Destination {
            host: host.to_owned(),
            name: name.written().to_owned(),
            why,
        };
        let instances = home::instances(&agent.publishing.services, agent.routing.router.as_deref(), name).await;
        let unknown = |why: String| refused(&drain.to[0], format!("which hosts serve the name is not known ({why})"));
        let (instances, _) = instances.map_err(unknown)?;
        for (at, host) in drain.to.iter().enumerate() {
            found[at] = pick(host, &instances, own, name).map_err(|why| refused(host, why))?.to_string();
        }
    }
    Ok(found)
}

fn pick(host: &str, instances: &[Instance], own: HostId, name: &Name) -> Result<HostId, String> {
    let list = format!("margay service show {name}");
    let candidates: Vec<(HostId, String)> = instances.iter().map(|one| (one.host, one.host_name.clone())).collect();
    let picked = naming::pick(host, &candidates, &list)?;
    if picked == own {
        return Err(format!("it is the host that is drained; `{list}` shows the others"));
    }
    if !instances.iter().any(|one| one.host == picked && one.weight > 0) {
        return Err(format!("it takes no new flows of the name; `{list}` shows which hosts do"));
    }
    Ok(picked)
}

#[cfg(test)]
mod test {
    use std::net::SocketAddr;

    use super::*;

    fn instance(n: u8, weight: u32) -> Instance {
        Instance {
            host: HostId([n; 16]),
            host_name: format!("host{n}"),
            address: SocketAddr::from(([10, 0, 0, n], 54324)),
            name: "web.shop".to_owned(),
            prefix: "sid:ab/8".parse().expect("literal"),
            weight,
            priority: 1,
            sticky: false,
            fence: None,
            zero_weight: None,
        }
    }

    #[test]
    fn it_is_another_host_that_takes_new_flows() {
        let instances = [instance(1, 1), instance(2, 0), instance(3, 0), instance(3, 1)];
        let name: Name = "web.shop".parse().expect("a name");
        let pick = |host: &str| pick(host, &instances, HostId([1; 16]), &name);
        assert_eq!(pick("host3"), Ok(HostId([3; 16])), "one of its instances does");
        assert_eq!(pick(&HostId([3; 16]).to_string()), Ok(HostId([3; 16])));
        for (host, why) in [("host1", "is drained"), ("host2", "no new flows"), ("host4", "no host"), ("", "no host")] {
            let error = pick(host).expect_err(host);
            assert!(error.contains(why) && error.contains("`margay service show web.shop`"), "{host}: {error}");
        }
    }
}
