//! Chains (docs/decisions/0074): the policy that this host goes by, and virtual addresses for what its boxes see.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use margay_control::chains::{Doubt, SignedChains};
use margay_control::keyring::Keyring;
use margay_control::lease::Asker;
use margay_control::lineage::LineageError;
use margay_control::pins::{give_back, pin_statements};
use margay_control::store::Store;
use margay_control::warrant::{believed, lineages};
use margay_core::chain::{CHAIN_RULES_MAX, ChainPolicy, Requirement};
use margay_core::name::{AUTHORITY_BITS, Name, Prefix, ServiceId};

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
    /// The key that signs for the authority now has signed it: names that it is not about are to go through no boxes.
    /// Anybody else's policy may have replaced one that demanded more.
    is_its_last_word: bool,
}

/// All that authorities have signed, as far as this host knows them.
///
/// # Errors
///
/// The store, or the keys of authorities, cannot be read.
pub fn said(keyring: &Keyring, store: &Store, unix_s: u64) -> Result<Vec<Said>, LineageError> {
    let mut lines = lineages(keyring, store)?;
    let revoked = believed(keyring, store, unix_s)?;
    let of = |signed: SignedChains| {
        let (authority, line) = lines.remove(&signed.authority)?;
        let policy = signed.policy(&line, &revoked, unix_s);
        let until_s = signed.until_s(&line, &revoked, unix_s).unwrap_or(0);
        let is_its_last_word = !signed.is_by_warrant() && signed.signer == line.last();
        Some(Said { authority, signed, policy, until_s, is_its_last_word })
    };
    Ok(store.chains()?.into_iter().filter_map(of).collect())
}

/// One policy of all that counts, and of what this host itself requires; and for people, what does not count and why.
/// What does not count closes names, and takes nothing from what other authorities and this host require.
fn joined(
    all: Vec<Said>,
    damaged: Vec<(String, [u8; 8])>,
    required: Vec<Requirement>,
) -> (ChainPolicy, Vec<(String, Doubt)>) {
    let mut joined = ChainPolicy { required, ..ChainPolicy::default() };
    let mut doubts = Vec::new();
    for Said { authority, signed, policy, is_its_last_word, .. } in all {
        let with_its = policy.and_then(|policy| {
            // Each authority speaks of its own names: no rule of one comes before one of another.
            let mut more = joined.clone();
            more.rules.extend(policy.rules);
            more.required.extend(policy.required);
            more.check().map_err(|error| Doubt::Rules(error.into()))?;
            Ok(more)
        });
        match with_its {
            Ok(more) => joined = more,
            Err(why) => {
                joined.lapsed.extend(closed_by(&signed, &why, is_its_last_word));
                doubts.push((authority, why));
            }
        }
    }
    for (authority, block) in damaged {
        joined.lapsed.push(all_of(block));
        doubts.push((authority, Doubt::Malformed));
    }
    (joined, doubts)
}

/// Names that nobody reaches, since rules that were taken once do not count: those that the rules are about.
fn closed_by(signed: &SignedChains, why: &Doubt, is_its_last_word: bool) -> Vec<Prefix> {
    let names = signed.lapsed_names();
    // Whoever stole a router's key, or one that another key has followed, may have put rules that demand nothing in the
    // place of those that did, and let them end.
    let may_lack_names = match why {
        Doubt::Revoked | Doubt::Unsigned | Doubt::Malformed => true,
        Doubt::Ended | Doubt::Ahead => !is_its_last_word,
        Doubt::Newer | Doubt::Rules(_) => false,
    };
    if may_lack_names || names.len() > CHAIN_RULES_MAX { vec![all_of(signed.authority)] } else { names }
}

/// All names of an authority.
fn all_of(block: [u8; 8]) -> Prefix {
    let mut id = ServiceId::default();
    id.0[..8].copy_from_slice(&block);
    Prefix::new(id, AUTHORITY_BITS)
}

/// A router signs again what it has signed of chains, before that ends.
fn sign_again(host: &Host) -> Result<(), Box<dyn Error>> {
    let unix_s = host.clock.unix_s();
    let mut lines = lineages(&host.keyring, &host.store)?;
    let revoked = believed(&host.keyring, &host.store, unix_s)?;
    let authorities = host.keyring.authorities()?;
    for signed in host.store.chains()? {
        let by = authorities.iter().find(|by| by.block() == signed.authority);
        let Some((by, (name, line))) = by.zip(lines.remove(&signed.authority)) else { continue };
        if let Some(again) = signed.renewed(by, &line, &revoked, unix_s) {
            let replaces = |known: Option<&SignedChains>| again.replaces(known, &line, &revoked, unix_s);
            if host.store.keep_chains(&again, &name, unix_s, replaces)? {
                tracing::info!(authority = name, "the chains of the authority are signed again");
            }
        }
    }
    Ok(())
}

/// Has the core go by what the disk and the configuration say, for the first time. Where that cannot be read, nobody
/// reaches any name until it can.
pub fn begin(agent: &Agent) {
    if let Err(error) = look(agent) {
        tracing::error!(%error, "chains cannot be read; no session is taken until they can");
        let closed = ChainPolicy { lapsed: vec![Prefix::new(ServiceId::default(), 0)], ..ChainPolicy::default() };
        agent.core.0.with_sal(|sal, _| sal.set_chain_policy(closed)).unwrap_or_else(|error| {
            tracing::error!(%error, "no name is closed");
        });
    }
}

/// The same, from then on.
pub fn renew(agent: &Agent) {
    if let Err(error) = look(agent) {
        tracing::error!(%error, "chains cannot be read; those of before stay");
    }
}

fn look(agent: &Agent) -> Result<(), Box<dyn Error>> {
    let Host { keyring, store, clock, .. } = &agent.host;
    let damaged = pin_statements(keyring, store, clock.unix_s())?;
    let all = said(keyring, store, clock.unix_s())?;
    let (policy, doubts) = joined(all, damaged, agent.config().required());
    let is_news = agent.core.0.with_sal(|sal, _| *sal.chain_policy() != policy);
    for (authority, why) in doubts.iter().filter(|_| is_news) {
        tracing::error!(authority, %why, "this host does not go by the chains of an authority");
    }
    agent.core.0.with_sal(|sal, _| sal.set_chain_policy(policy))?;
    Ok(())
}

/// Goes by what authorities say, whenever that changes or ends; until it is dropped.
pub async fn follow(agent: Arc<Agent>) {
    let mut changes = agent.host.store.key_changes();
    // A router may have told something since the start.
    changes.mark_changed();
    let mut given_back = Instant::now();
    loop {
        if let Ok(Err(_)) = tokio::time::timeout(LOOK_EVERY, changes.changed()).await {
            return;
        }
        let agent = Arc::clone(&agent);
        // Not at each change: two routers whose clocks differ much might never agree what is to be there.
        let is_due = given_back.elapsed() >= LOOK_EVERY;
        if is_due {
            given_back = Instant::now();
        }
        let look = move || {
            if let Err(error) = sign_again(&agent.host) {
                tracing::warn!(%error, "chains cannot be signed again");
            }
            renew(&agent);
            let Host { keyring, store, clock, .. } = &agent.host;
            if is_due && let Err(error) = give_back(keyring, store, clock.unix_s()) {
                tracing::warn!(%error, "what the cluster's store has lost is not given back");
            }
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
    use margay_control::store::{Marks, Row, SharedTable};
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
            assert!(store.keep_chains(&signed, &authority.name, NOW_S, |_| true).expect("written"));
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
        let (policy, _) = joined(said(&keyring, &store, NOW_S).expect("readable"), Vec::new(), config.required());
        assert_eq!((policy.rules.len(), policy.required.len()), (2, 1), "nobody here knows the third authority");
        assert_eq!(policy.check(), Ok(()));
        let too_early = said(&keyring, &store, NOW_S - 7 * 86_400).expect("readable");
        assert!(too_early.iter().all(|said| said.policy == Err(Doubt::Ahead)));
        let (policy, doubts) = joined(too_early, Vec::new(), Vec::new());
        assert_eq!((policy.rules.len(), policy.lapsed.len(), doubts.len()), (0, 2, 2), "nobody gets past them");
    }

    fn keys() -> (tempfile::TempDir, Keyring, Store) {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let (keyring, store) = (Keyring::open(&dir).expect("opened"), Store::open(&dir).expect("made"));
        (base, keyring, store)
    }

    /// As another router has it.
    fn share(store: &Store, block: [u8; 8], row: Option<Vec<u8>>) {
        let row: Row = (SharedTable::Chains, block.to_vec(), row);
        store.follow(&[row], Marks::default()).expect("written");
    }

    fn router_of(by: &Authority, lifetime_s: u64) -> Authority {
        let key = SigningKey::generate(&mut Rng::new([7; 32]));
        let granted = Request::new("shop", &key).grant(by, NOW_S, lifetime_s).expect("granted");
        let Warrant::Authority(warrant) = granted else { panic!("it is an authority's") };
        Authority { key, warrant: Some(warrant), ..by.clone() }
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
        let damaged = pin_statements(keyring, store, unix_s).expect("readable");
        let (policy, _) = joined(said(keyring, store, unix_s).expect("readable"), damaged, Vec::new());
        assert_eq!(policy.required.len(), policy.rules.len());
        (policy.rules.len(), policy.lapsed)
    }

    #[test]
    fn rules_that_have_run_out_let_nobody_past() {
        let (_base, keyring, store) = keys();
        let by = keyring.create_authority("shop").expect("made");
        let web: Name = "web.shop".parse().expect("literal");
        let signed = required(&by, None);
        share(&store, by.block(), Some(signed.encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S + LIFETIME_S), (1, Vec::new()));
        assert_eq!(goes_by(&keyring, &store, NOW_S + LIFETIME_S + 1), (0, vec![web.service_prefix()]));
        let again = required(&by, Some(&signed));
        share(&store, by.block(), Some(again.encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S + LIFETIME_S), (1, Vec::new()));
    }

    #[test]
    fn what_a_key_has_signed_that_was_taken_back_counts_no_longer_where_it_was_known() {
        let (_base, keyring, store) = keys();
        let by = keyring.create_authority("shop").expect("made");
        let router = router_of(&by, 86_400);
        let signed = required(&router, None);
        share(&store, by.block(), Some(signed.encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S).0, 1);
        let revocation = revoke(&by, router.key.public(), NOW_S).expect("made");
        // Whoever has stolen the key puts rules that demand nothing in the place of those that did.
        let empty = SignedChains::sign(&router, &ChainRules::default(), Some(&signed), NOW_S * 1000).expect("signed");
        share(&store, by.block(), Some(empty.encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S), (0, Vec::new()));
        assert!(store.revoke_key(&revocation, "shop", NOW_S).expect("written"));
        assert_eq!(goes_by(&keyring, &store, NOW_S), (0, vec![all_of(by.block())]));
        share(&store, by.block(), Some(required(&by, Some(&empty)).encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S), (1, Vec::new()));
    }

    #[test]
    fn an_authority_with_many_rules_takes_nothing_from_others_and_closes_its_own_names_alone() {
        let (_base, keyring, store) = keys();
        let (shop, lab) =
            (keyring.create_authority("shop").expect("made"), keyring.create_authority("lab").expect("made"));
        assert!(store.keep_chains(&required(&shop, None), "shop", NOW_S, |_| true).expect("written"));
        let chain = |number: usize| PolicyChain {
            name: number.to_string(),
            services: format!("n{number}.lab"),
            ..PolicyChain::default()
        };
        let require =
            |number: usize| PolicyRequirement { services: format!("n{number}.lab"), boxes: vec!["fw.lab".to_owned()] };
        let keep = |rules: &ChainRules, ms: u64| {
            let signed = SignedChains::sign(&lab, rules, None, NOW_S * 1000 + ms).expect("signed");
            assert!(store.keep_chains(&signed, "lab", NOW_S, |_| true).expect("written"));
        };
        keep(&ChainRules { chains: (0..CHAIN_RULES_MAX).map(chain).collect(), required: Vec::new() }, 0);
        let all = || said(&keyring, &store, NOW_S).expect("readable");
        let own = |name: &str| Requirement {
            services: name.parse::<Name>().expect("literal").service_prefix(),
            boxes: vec!["fw.lab".parse::<Name>().expect("literal").service_id()],
        };
        let (policy, doubts) = joined(all(), Vec::new(), vec![own("web.shop")]);
        assert_eq!((policy.rules.len(), policy.required.len(), doubts.len()), (CHAIN_RULES_MAX + 1, 2, 0));
        assert_eq!(policy.check(), Ok(()));
        // With what the host requires of the same authority's names there is one too many.
        let by_way = PolicyChain { services: "*.lab".to_owned(), boxes: vec!["fw.lab".to_owned()], ..chain(0) };
        keep(&ChainRules { chains: vec![by_way], required: (0..600).map(require).collect() }, 1);
        let many: Vec<Requirement> = (0..600).map(|number| own(&format!("m{number}.lab"))).collect();
        let (policy, doubts) = joined(all(), Vec::new(), many);
        assert_eq!((policy.rules.len(), policy.required.len(), doubts.len()), (1, 601, 1));
        assert_eq!((policy.lapsed.len(), policy.check()), (601, Ok(())));
    }

    #[test]
    fn what_nobody_has_signed_in_the_place_of_chains_closes_names_where_no_others_are_known() {
        let posing = {
            let (_base, elsewhere, _) = keys();
            elsewhere.create_authority("shop").expect("made")
        };
        for (is_own, garbage) in [(true, vec![1, 2, 3]), (true, required(&posing, None).encode()), (false, vec![4])] {
            let (_base, keyring, store) = keys();
            let by = keyring.create_authority("shop").expect("made");
            share(&store, if is_own { by.block() } else { [9; 8] }, Some(garbage.clone()));
            let closed = if is_own { vec![all_of(by.block())] } else { Vec::new() };
            assert_eq!(goes_by(&keyring, &store, NOW_S), (0, closed));
            share(&store, by.block(), Some(required(&by, None).encode()));
            assert_eq!(goes_by(&keyring, &store, NOW_S), (1, Vec::new()));
            share(&store, by.block(), Some(garbage));
            assert_eq!(goes_by(&keyring, &store, NOW_S), (1, Vec::new()), "what is known stays");
        }
    }

    #[test]
    fn a_row_that_is_gone_or_older_opens_no_names() {
        let (_base, keyring, store) = keys();
        let by = keyring.create_authority("shop").expect("made");
        let before = SignedChains::sign(&by, &ChainRules::default(), None, NOW_S * 1000).expect("signed");
        share(&store, by.block(), Some(required(&by, Some(&before)).encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S), (1, Vec::new()));
        for row in [None, Some(before.encode())] {
            share(&store, by.block(), row);
            assert_eq!(goes_by(&keyring, &store, NOW_S), (1, Vec::new()));
        }
    }

    #[test]
    fn rules_of_a_routers_key_that_have_ended_close_what_those_before_them_may_have_demanded() {
        let (_base, keyring, store) = keys();
        let by = keyring.create_authority("shop").expect("made");
        let router = router_of(&by, 3600);
        let own = required(&by, None);
        share(&store, by.block(), Some(own.encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S), (1, Vec::new()));
        let empty = |before| SignedChains::sign(&router, &ChainRules::default(), Some(before), NOW_S * 1000);
        let stolen = empty(&own).expect("signed");
        share(&store, by.block(), Some(stolen.encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S), (1, Vec::new()), "the authority's own word stays");

        let (_base, keyring, store) = keys();
        let joined = keyring.request("shop", true).expect("asked").grant(&by, NOW_S, 86_400).expect("granted");
        let Warrant::Authority(joined) = joined else { panic!("it is an authority's") };
        keyring.accept(joined, &[], NOW_S).expect("accepted");
        let of_router = required(&router, None);
        share(&store, by.block(), Some(of_router.encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S), (1, Vec::new()));
        share(&store, by.block(), Some(empty(&of_router).expect("signed").encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S), (0, Vec::new()));
        assert_eq!(goes_by(&keyring, &store, NOW_S + 3601), (0, vec![all_of(by.block())]));
        // What was replaced a while ago does not open them.
        let old = SignedChains::sign(&by, &ChainRules::default(), None, (NOW_S - 2 * 86_400) * 1000).expect("signed");
        share(&store, by.block(), Some(old.encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S + 3601), (0, vec![all_of(by.block())]));
        share(&store, by.block(), Some(required(&by, Some(&stolen)).encode()));
        assert_eq!(goes_by(&keyring, &store, NOW_S + 3601), (1, Vec::new()));
    }
}
