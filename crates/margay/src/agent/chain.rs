//! Chains (docs/decisions/0074): the policy that this host goes by, and virtual addresses for what its boxes see.

use std::io;
use std::sync::Arc;
use std::thread;

use margay_control::chains::{Doubt, SignedChains};
use margay_control::keyring::Keyring;
use margay_control::lease::Asker;
use margay_control::store::{Store, StoreError};
use margay_control::warrant::lineages;
use margay_core::chain::{ChainPolicy, Requirement};
use margay_core::name::{Name, Prefix, ServiceId};

use super::{Agent, Host};

/// What an authority has signed.
pub struct Said {
    /// The authority's name.
    pub authority: String,
    /// The policy with its signature, as it is kept on disk and told to other hosts.
    pub signed: SignedChains,
    /// What this host goes by, or why it does not.
    pub policy: Result<ChainPolicy, Doubt>,
}

/// All that authorities have signed, as far as this host knows them.
///
/// # Errors
///
/// The store cannot be read.
pub fn said(keyring: &Keyring, store: &Store, unix_s: u64) -> Result<Vec<Said>, StoreError> {
    let mut lines = lineages(keyring, store);
    let of = |signed: SignedChains| {
        let (authority, line) = lines.remove(&signed.authority)?;
        let policy = signed.policy(&line, unix_s);
        Some(Said { authority, signed, policy })
    };
    Ok(store.chains()?.into_iter().filter_map(of).collect())
}

/// One policy of all that counts, and of what this host itself requires.
fn joined(all: Vec<Said>, required: Vec<Requirement>) -> ChainPolicy {
    let mut joined = ChainPolicy { required, ..ChainPolicy::default() };
    for Said { authority, policy, .. } in all {
        match policy {
            Ok(policy) => {
                // Each authority speaks of its own names: no rule of one comes before one of another.
                joined.rules.extend(policy.rules);
                joined.required.extend(policy.required);
            }
            Err(why) => tracing::error!(authority, %why, "this host does not go by the chains of an authority"),
        }
    }
    joined
}

/// Has the core go by what the disk and the configuration say.
pub fn renew(agent: &Agent) {
    let required = agent.config().required();
    match said(&agent.host.keyring, &agent.host.store, agent.host.clock.unix_s()) {
        Ok(all) => {
            let policy = joined(all, required);
            if let Err(error) = agent.core.0.with_sal(|sal, _| sal.set_chain_policy(policy)) {
                tracing::error!(%error, "the chains of before stay");
            }
        }
        Err(error) => tracing::error!(%error, "chains cannot be read; those of before stay"),
    }
}

/// Goes by what authorities say, whenever that changes; until it is dropped.
pub async fn follow(agent: Arc<Agent>) {
    let mut changes = agent.host.store.key_changes();
    // A router may have told something since the start.
    changes.mark_changed();
    while changes.changed().await.is_ok() {
        let agent = Arc::clone(&agent);
        if tokio::task::spawn_blocking(move || renew(&agent)).await.is_err() {
            tracing::error!("looking at chains ended badly");
        }
    }
}

/// Leases virtual addresses to names that boxes here are to see, on a thread of its own, until the datapath ends.
///
/// # Errors
///
/// The system has no thread to give.
pub fn start(agent: &Arc<Agent>) -> io::Result<()> {
    let news = agent.core.0.lease_news();
    let running = Arc::downgrade(agent);
    let lease = move || {
        while news.wait().is_ok_and(|goes_on| goes_on) {
            let Some(agent) = running.upgrade() else { return };
            let wanted = agent.core.0.with_sal(|sal, _| sal.take_wanted_leases());
            // In IPv6 a name has the address that is computed from it, or none.
            for (service, _) in wanted.into_iter().filter(|(_, is_v4)| *is_v4) {
                if let Some(name) = name_of(&agent.host, service)
                    && let Err(error) = agent.names.leases.lease(&name, Asker::Boxes)
                {
                    tracing::warn!(%name, %error, "boxes see sessions to this name with no IPv4 address");
                }
            }
        }
    };
    thread::Builder::new().name("margay-chain".to_owned()).spawn(lease).map(drop)
}

/// As somebody has written it, or in digits.
fn name_of(host: &Host, service: ServiceId) -> Option<Name> {
    let known = host.store.name_of(&Prefix::from(service)).ok().flatten();
    known.and_then(|written| written.parse().ok()).or_else(|| format!("{service}/256").parse().ok())
}

#[cfg(test)]
mod test {
    use margay_control::StateDir;
    use margay_control::api::v1::PolicyChain;
    use margay_control::chains::ChainRules;

    use super::*;
    use crate::config::Config;

    const NOW_S: u64 = 1_700_000_000;

    #[test]
    fn what_authorities_say_and_what_the_host_requires_are_one_policy() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let keyring = Keyring::open(&dir).expect("opened");
        let store = Store::open(&dir).expect("made");
        let keep = |authority: &margay_control::keyring::Authority, service: &str| {
            let chain = PolicyChain {
                name: "inspect".to_owned(),
                services: format!("{service}.{}", authority.name),
                boxes: vec!["fw.infra".to_owned()],
                ..PolicyChain::default()
            };
            let rules = ChainRules { chains: vec![chain], required: Vec::new() };
            let signed = SignedChains::sign(authority, &rules, None, NOW_S * 1000).expect("signed");
            assert!(store.keep_chains(&signed, &authority.name, NOW_S).expect("written"));
        };
        let shop = keyring.create_authority("shop");
        let lab = keyring.create_authority("lab");
        keep(&shop.expect("made"), "web");
        keep(&lab.expect("made"), "db");
        let elsewhere = StateDir::open(base.path().join("other")).expect("made");
        let unknown = Keyring::open(&elsewhere).expect("opened").create_authority("unknown").expect("made");
        keep(&unknown, "web");
        let config: Config =
            toml::from_str("[[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\"\nrequire = [\"fw.infra\"]\n")
                .expect("a configuration");
        let policy = joined(said(&keyring, &store, NOW_S).expect("readable"), config.required());
        assert_eq!((policy.rules.len(), policy.required.len()), (2, 1), "nobody here knows the third authority");
        assert_eq!(policy.check(), Ok(()));
        let too_early = said(&keyring, &store, NOW_S - 7 * 86_400).expect("readable");
        assert!(too_early.iter().all(|said| said.policy == Err(Doubt::Ahead)));
        assert!(joined(too_early, Vec::new()).rules.is_empty());
    }
}
