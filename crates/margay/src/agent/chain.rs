//! Chains (docs/decisions/0074): the policy that this host goes by, and virtual addresses for what its boxes see.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use margay_control::chains::{Doubt, SignedChains};
use margay_control::keyring::Keyring;
use margay_control::lease::Asker;
use margay_control::store::{Store, StoreError};
use margay_control::warrant::{believed, lineages};
use margay_core::chain::{ChainPolicy, Requirement};
use margay_core::name::{Name, Prefix, ServiceId};

use super::{Agent, Host};

/// Signatures expire by the clock: no change of the store says so.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// What an authority has signed.
pub struct Said {
    /// The authority's name.
    pub authority: String,
    /// The policy with its signature, as it is kept on disk and told to other hosts.
    pub signed: SignedChains,
    /// What this host goes by, or why it does not.
    pub policy: Result<ChainPolicy, Doubt>,
    /// Until when, in seconds since 1970; zero: it does not.
    pub until_s: u64,
}

/// All that authorities have signed, as far as this host knows them.
///
/// # Errors
///
/// The store cannot be read.
pub fn said(keyring: &Keyring, store: &Store, unix_s: u64) -> Result<Vec<Said>, StoreError> {
    let mut lines = lineages(keyring, store);
    let revoked = believed(keyring, store, unix_s);
    let of = |signed: SignedChains| {
        let (authority, line) = lines.remove(&signed.authority)?;
        let policy = signed.policy(&line, &revoked, unix_s);
        let until_s = signed.until_s(&line, &revoked, unix_s).unwrap_or(0);
        Some(Said { authority, signed, policy, until_s })
    };
    Ok(store.chains()?.into_iter().filter_map(of).collect())
}

/// One policy of all that counts, and of what this host itself requires; and for people, what does not count and why.
fn joined(all: Vec<Said>, required: Vec<Requirement>) -> (ChainPolicy, Vec<(String, Doubt)>) {
    let mut joined = ChainPolicy { required, ..ChainPolicy::default() };
    let mut doubts = Vec::new();
    for Said { authority, signed, policy, .. } in all {
        match policy {
            Ok(policy) => {
                // Each authority speaks of its own names: no rule of one comes before one of another.
                joined.rules.extend(policy.rules);
                joined.required.extend(policy.required);
            }
            Err(why) => {
                // What nobody has signed demands nothing. The rest did once, and nothing has taken its place.
                if !matches!(why, Doubt::Malformed | Doubt::Unsigned) {
                    joined.lapsed.extend(signed.lapsed_names());
                }
                doubts.push((authority, why));
            }
        }
    }
    (joined, doubts)
}

/// A router signs again what it has signed of chains, before that ends.
fn sign_again(host: &Host) -> Result<(), Box<dyn Error>> {
    let unix_s = host.clock.unix_s();
    let mut lines = lineages(&host.keyring, &host.store);
    let revoked = believed(&host.keyring, &host.store, unix_s);
    let authorities = host.keyring.authorities()?;
    for signed in host.store.chains()? {
        let by = authorities.iter().find(|by| by.block() == signed.authority);
        let Some((by, (name, line))) = by.zip(lines.remove(&signed.authority)) else { continue };
        if let Some(again) = signed.renewed(by, &line, &revoked, unix_s) {
            host.store.keep_chains(&again, &name, unix_s)?;
            tracing::info!(authority = name, "the chains of the authority are signed again");
        }
    }
    Ok(())
}

/// Has the core go by what the disk and the configuration say.
pub fn renew(agent: &Agent) {
    let required = agent.config().required();
    match said(&agent.host.keyring, &agent.host.store, agent.host.clock.unix_s()) {
        Ok(all) => {
            let (policy, doubts) = joined(all, required);
            let is_news = agent.core.0.with_sal(|sal, _| *sal.chain_policy() != policy);
            for (authority, why) in doubts.iter().filter(|_| is_news) {
                tracing::error!(authority, %why, "this host does not go by the chains of an authority");
            }
            if let Err(error) = agent.core.0.with_sal(|sal, _| sal.set_chain_policy(policy)) {
                tracing::error!(%error, "the chains of before stay");
            }
        }
        Err(error) => tracing::error!(%error, "chains cannot be read; those of before stay"),
    }
}

/// Goes by what authorities say, whenever that changes or ends; until it is dropped.
pub async fn follow(agent: Arc<Agent>) {
    let mut changes = agent.host.store.key_changes();
    // A router may have told something since the start.
    changes.mark_changed();
    loop {
        if let Ok(Err(_)) = tokio::time::timeout(LOOK_EVERY, changes.changed()).await {
            return;
        }
        let agent = Arc::clone(&agent);
        let look = move || {
            if let Err(error) = sign_again(&agent.host) {
                tracing::warn!(%error, "chains cannot be signed again");
            }
            renew(&agent);
        };
        if tokio::task::spawn_blocking(look).await.is_err() {
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
            for wanted in wanted {
                if let Some(name) = name_of(&agent.host, wanted.service)
                    && let Err(error) = agent.names.leases.lease(&name, Asker::Boxes(wanted.by))
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
    use margay_control::api::v1::{PolicyChain, PolicyRequirement};
    use margay_control::chains::{ChainRules, LIFETIME_S};
    use margay_control::keyring::Authority;
    use margay_control::warrant::{Request, Warrant, revoke};
    use margay_core::key::SigningKey;
    use margay_core::rng::Rng;

    use super::*;
    use crate::config::Config;

    const NOW_S: u64 = 1_700_000_000;

    #[test]
    fn what_authorities_say_and_what_the_host_requires_are_one_policy() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let keyring = Keyring::open(&dir).expect("opened");
        let store = Store::open(&dir).expect("made");
        let keep = |authority: &Authority, service: &str| {
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
        let (policy, _) = joined(said(&keyring, &store, NOW_S).expect("readable"), config.required());
        assert_eq!((policy.rules.len(), policy.required.len()), (2, 1), "nobody here knows the third authority");
        assert_eq!(policy.check(), Ok(()));
        let too_early = said(&keyring, &store, NOW_S - 7 * 86_400).expect("readable");
        assert!(too_early.iter().all(|said| said.policy == Err(Doubt::Ahead)));
        let (policy, doubts) = joined(too_early, Vec::new());
        assert_eq!((policy.rules.len(), policy.lapsed.len(), doubts.len()), (0, 2, 2), "nobody gets past them");
    }

    fn keys() -> (tempfile::TempDir, Keyring, Store) {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let (keyring, store) = (Keyring::open(&dir).expect("opened"), Store::open(&dir).expect("made"));
        (base, keyring, store)
    }

    fn required(by: &Authority, before: Option<&SignedChains>) -> SignedChains {
        let boxes = vec!["fw.shop".to_owned()];
        let chain = PolicyChain {
            name: "inspect".to_owned(),
            services: "web.shop".to_owned(),
            boxes: boxes.clone(),
            ..PolicyChain::default()
        };
        let required = PolicyRequirement { services: "web.shop".to_owned(), boxes };
        let rules = ChainRules { chains: vec![chain], required: vec![required] };
        SignedChains::sign(by, &rules, before, NOW_S * 1000).expect("signed")
    }

    fn goes_by(keyring: &Keyring, store: &Store, unix_s: u64) -> (usize, Vec<Prefix>) {
        let (policy, _) = joined(said(keyring, store, unix_s).expect("readable"), Vec::new());
        assert_eq!(policy.required.len(), policy.rules.len());
        (policy.rules.len(), policy.lapsed)
    }

    #[test]
    fn rules_that_have_run_out_let_nobody_past() {
        let (_base, keyring, store) = keys();
        let by = keyring.create_authority("shop").expect("made");
        let web: Name = "web.shop".parse().expect("literal");
        let signed = required(&by, None);
        assert!(store.keep_chains(&signed, "shop", NOW_S).expect("written"));
        assert_eq!(goes_by(&keyring, &store, NOW_S + LIFETIME_S), (1, Vec::new()));
        assert_eq!(goes_by(&keyring, &store, NOW_S + LIFETIME_S + 1), (0, vec![web.service_prefix()]));
        let again = required(&by, Some(&signed));
        assert!(store.keep_chains(&again, "shop", NOW_S).expect("written"));
        assert_eq!(goes_by(&keyring, &store, NOW_S + LIFETIME_S), (1, Vec::new()));
    }

    #[test]
    fn what_a_key_has_signed_that_was_taken_back_counts_no_longer_where_it_was_known() {
        let (_base, keyring, store) = keys();
        let by = keyring.create_authority("shop").expect("made");
        let stolen = SigningKey::generate(&mut Rng::new([7; 32]));
        let granted = Request::new("shop", &stolen).grant(&by, NOW_S, 86_400).expect("granted");
        let Warrant::Authority(warrant) = granted else { panic!("it is an authority's") };
        let router = Authority { key: stolen.clone(), warrant: Some(warrant), ..by.clone() };
        let signed = required(&router, None);
        assert!(store.keep_chains(&signed, "shop", NOW_S).expect("written"));
        assert_eq!(goes_by(&keyring, &store, NOW_S).0, 1);
        let revocation = revoke(&by, stolen.public(), NOW_S).expect("made");
        assert!(store.revoke_key(&revocation, "shop", NOW_S).expect("written"));
        let web: Name = "web.shop".parse().expect("literal");
        assert_eq!(goes_by(&keyring, &store, NOW_S), (0, vec![web.service_prefix()]));
        assert!(store.keep_chains(&required(&by, Some(&signed)), "shop", NOW_S).expect("written"));
        assert_eq!(goes_by(&keyring, &store, NOW_S), (1, Vec::new()));
    }
}
