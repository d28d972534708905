//! What each instance of a name has, by its own agent's word.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::future::join_all;
use margay_control::registration::Instance;
use margay_control::relocation::proto::Counted;
use margay_core::key::HostId;
use margay_core::name::Name;

use super::plan::Share;
use super::{Question, answer};
use crate::agent::relocation::counting;
use crate::agent::spread::choice;
use crate::agent::{Agent, home};

/// More connections of one host are none that could be counted: so that sums have room.
const FLOWS_MAX: u64 = 1 << 32;
const OUT: &str = "it takes no new connections: it is drained or sick, its weight is 0, or its priority is lower";

/// An instance, and what its agent has said.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// As routers list it.
    pub instance: Instance,
    /// Whether routers send new connections there.
    pub takes_part: bool,
    /// What it has; or why it has not said so, as a sentence.
    pub counted: Result<Counted, String>,
}

impl Seen {
    /// Its part in a plan; `None`: it has none.
    pub fn share(&self) -> Option<Share> {
        let counted = self.counted.as_ref().ok().filter(|_| self.takes_part)?;
        Some(Share { host: self.instance.host, weight: self.instance.weight, flows: counted.flows.min(FLOWS_MAX) })
    }

    /// Why it takes no part; empty: it does.
    pub fn why_not(&self) -> String {
        match &self.counted {
            _ if !self.takes_part => OUT.to_owned(),
            Ok(_) => String::new(),
            Err(why) => why.clone(),
        }
    }
}

/// Those that take part.
pub(super) fn shares(seen: &[Seen]) -> Vec<Share> {
    seen.iter().filter_map(Seen::share).collect()
}

/// Asks the agents of all instances of a name at one time; `question` says what of each host, and whether it takes
/// part.
///
/// # Errors
///
/// Nobody can say which instances there are; why, as a sentence.
pub(super) async fn take(
    agent: &Arc<Agent>,
    name: &Name,
    question: impl Fn(HostId, bool) -> Question,
) -> Result<Vec<Seen>, String> {
    let (mut listed, _) = home::instances(&agent.publishing.services, agent.routing.router.as_deref(), name).await?;
    agent.names.naming.learn(&listed);
    let usable = choice::usable(&listed, &name.service_id());
    let parts: HashSet<HostId> = usable.into_iter().map(|instance| instance.host).collect();
    let mut known = HashSet::new();
    listed.retain(|instance| known.insert(instance.host));
    let asked = listed.into_iter().map(|instance| {
        let takes_part = parts.contains(&instance.host);
        let question = question(instance.host, takes_part);
        async move {
            let counted = ask(agent, name, &instance, &question).await;
            Seen { instance, takes_part, counted }
        }
    });
    Ok(join_all(asked).await)
}

async fn ask(agent: &Arc<Agent>, name: &Name, instance: &Instance, question: &Question) -> Result<Counted, String> {
    let prefix = name.prefix();
    if instance.host == agent.host.identity.host_id() {
        return answer(agent, &prefix, question, "the operator").await;
    }
    counting::ask(agent, &prefix, instance.host, instance.address, question).await
}

#[cfg(test)]
mod test {
    use std::net::SocketAddr;

    use super::*;

    fn seen(n: u8, takes_part: bool, counted: Result<u64, &str>) -> Seen {
        let instance = Instance {
            host: HostId([n; 16]),
            host_name: format!("host{n}"),
            address: SocketAddr::from(([10, 0, 0, n], 54324)),
            name: "web.shop".to_owned(),
            prefix: "sid:ab/8".parse().expect("literal"),
            weight: u32::from(n),
            priority: 1,
            sticky: false,
            fence: None,
            zero_weight: None,
        };
        let counted = counted.map(|flows| Counted { flows, ..Counted::default() }).map_err(str::to_owned);
        Seen { instance, takes_part, counted }
    }

    #[test]
    fn who_takes_no_new_connections_or_does_not_say_is_left_out_with_the_reason() {
        let all = [
            seen(1, true, Ok(7)),
            seen(2, false, Ok(9)),
            seen(3, true, Err("it is away")),
            seen(4, true, Ok(u64::MAX)),
        ];
        let shares: Vec<(u32, u64)> = shares(&all).into_iter().map(|share| (share.weight, share.flows)).collect();
        assert_eq!(shares, [(1, 7), (4, FLOWS_MAX)]);
        let reasons: Vec<String> = all.iter().map(Seen::why_not).collect();
        assert_eq!(reasons, ["", OUT, "it is away", ""]);
    }
}
