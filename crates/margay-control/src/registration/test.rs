use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use margay_core::AssociationSetup;
use margay_core::certificate::{Revocation, TrustAnchor, TrustStore};
use margay_core::give_up::GiveUpAfter;
use margay_core::key::{HostId, HostSecret, SigningKey};
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::{Name, Prefix, ServiceId, authority_block, self_certifying_tail};
use margay_core::rng::Rng;
use margay_core::succession::Succession;
use margay_core::table::{Action, Rule, RuleId, TableError};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::*;
use crate::api::v1::TraceHop;
use crate::issue::{self, authority_prefix};
use crate::keyring::{Keyring, ServiceKey};
use crate::store::{MemberKey, Store, Token};
use crate::token::TokenSecret;
use crate::{Clock, SalControl, StateDir};

mod chains;
mod fenced;
mod found;
mod orders;
mod revoked;
mod site;
mod succession;
mod twin;
mod zero_weight;

const NOW_S: u64 = 1_700_000_000;
const LIMIT: Duration = Duration::from_secs(10);

/// What the host of a router serves itself.
fn own_service(host: HostId, host_name: &str, address: SocketAddr, name: &Name) -> OwnService {
    OwnService {
        instance: Instance {
            host,
            host_name: host_name.to_owned(),
            address,
            name: name.written().to_owned(),
            prefix: name.prefix(),
            weight: 1,
            priority: 1,
            sticky: false,
            fence: None,
            zero_weight: None,
        },
        actions: Vec::new(),
        partition_bits: 0,
        exclusive: false,
        fenced: false,
    }
}

/// A core that remembers what it was told.
#[derive(Default)]
pub(super) struct Recorder {
    associations: Mutex<Vec<AssociationSetup>>,
    rules: Mutex<BTreeMap<RuleId, (Prefix, Rule)>>,
    next: Mutex<u64>,
    certificates: Mutex<BTreeMap<Prefix, Vec<u8>>>,
    membership: Mutex<Vec<u8>>,
    /// How many rules there were for a prefix at the least, since it first had one.
    pub(super) fewest: Mutex<BTreeMap<Prefix, usize>>,
    /// Whom rules lead to, and those that did when it had no certificate yet.
    served_by: Mutex<Option<Arc<Recorder>>>,
    early: Mutex<Vec<Prefix>>,
    /// Routers that have said whether they want to be asked no more.
    pub(super) leaving: Mutex<BTreeMap<HostId, bool>>,
    revoked: Mutex<Vec<Revocation>>,
    revoked_keys: Mutex<Vec<KeyRevocation>>,
    /// Whom it trusts.
    trust: Mutex<TrustStore>,
}

impl Recorder {
    pub(super) fn rules_of(&self, prefix: &Prefix) -> Vec<Rule> {
        self.rules.lock().values().filter(|(of, _)| of == prefix).map(|(_, rule)| rule.clone()).collect()
    }
}

impl SalControl for Recorder {
    fn install_association(&self, setup: AssociationSetup) {
        self.associations.lock().push(setup);
    }
    fn set_leaving(&self, router: HostId, is_leaving: bool) {
        self.leaving.lock().insert(router, is_leaving);
    }
    fn add_trust_anchor(&self, anchor: TrustAnchor) {
        self.trust.lock().add(anchor);
    }
    fn revoke(&self, revocation: Revocation) {
        self.revoked.lock().push(revocation);
    }
    fn revoke_key(&self, revocation: KeyRevocation) {
        self.trust.lock().revoke_key(revocation, NOW_S);
        self.revoked_keys.lock().push(revocation);
    }
    fn succeed(&self, succession: &Succession) {
        self.trust.lock().succeed(succession);
    }
    fn set_membership(&self, chain: Vec<u8>) {
        *self.membership.lock() = chain;
    }
    fn set_own_terms(&self, _: Prefix, _: Option<GiveUpAfter>) {}

    fn set_service_certificate(&self, prefix: Prefix, chain: Vec<u8>) {
        self.certificates.lock().insert(prefix, chain);
    }
    fn add_rule(&self, prefix: Prefix, rule: Rule) -> Result<RuleId, TableError> {
        let is_early = |host: &Arc<Self>| !host.certificates.lock().contains_key(&prefix);
        if self.served_by.lock().as_ref().is_some_and(is_early) {
            self.early.lock().push(prefix);
        }
        let mut next = self.next.lock();
        *next += 1;
        self.rules.lock().insert(RuleId(*next), (prefix, rule));
        Ok(RuleId(*next))
    }
    fn remove_rule(&self, id: RuleId) -> bool {
        let Some((prefix, _)) = self.rules.lock().remove(&id) else { return false };
        let left = self.rules_of(&prefix).len();
        let mut fewest = self.fewest.lock();
        let least = fewest.entry(prefix).or_insert(left);
        *least = left.min(*least);
        true
    }
    fn bind_name(&self, _: IpAddr, _: ServiceId) {}
    fn unbind_name(&self, _: IpAddr) {}
}

/// A host or a router: its directory, store and core.
struct Party {
    _base: tempfile::TempDir,
    keyring: Keyring,
    store: Arc<Store>,
    core: Arc<Recorder>,
    local: Local,
}

fn party(seed: u8, name: &str) -> Party {
    let base = tempfile::tempdir().expect("a directory");
    let dir = StateDir::open(base.path().join("state")).expect("made");
    let local = Local {
        host_key: HostSecret::generate(&mut Rng::new([seed; 32])),
        epoch: 1,
        boot_id: [seed; 16],
        sal_port: 54_324,
        host_name: name.to_owned(),
        software: "test".to_owned(),
    };
    let keyring = Keyring::open(&dir).expect("opened");
    let store = Arc::new(Store::open(&dir).expect("made"));
    Party { _base: base, keyring, store, core: Arc::default(), local }
}

fn clock() -> Clock {
    Clock::from_fn(|| NOW_S)
}

impl Party {
    async fn route(&self, lease_ms: u32) -> Arc<Router> {
        let listen = "127.0.0.1:0".parse().expect("literal");
        let config = RouterConfig { listen, lease_ms, heartbeat_ms: lease_ms / 4, cluster: None };
        let (store, core) = (Arc::clone(&self.store), Arc::clone(&self.core) as Arc<dyn SalControl>);
        Router::start(config, self.local.clone(), self.keyring.clone(), store, core, clock(), None)
            .await
            .expect("started")
    }

    fn token(&self, uses: u32, seed: u8, grants: Vec<Prefix>) -> TokenSecret {
        let secret = TokenSecret::new([seed; 16]);
        let token = Token {
            hash: secret.hash(),
            authority: "shop".to_owned(),
            grants,
            groups: vec!["front".to_owned()],
            uses_left: uses,
            created_s: NOW_S,
            expires_s: NOW_S + 86_400,
        };
        self.store.add_token(&token).expect("kept");
        secret
    }

    fn join(&self, router: &Party, at: &Router, secret: Option<TokenSecret>) -> Home {
        let authority = router.keyring.authority("shop").expect("readable").expect("made");
        let config = HomeConfig {
            router_address: at.local_address().to_string(),
            router_key: router.local.host_key.public(),
            authority: "shop".to_owned(),
            authority_key: authority.key.public(),
            secret,
        };
        let (store, core) = (Arc::clone(&self.store), Arc::clone(&self.core) as Arc<dyn SalControl>);
        Home::start(config, self.local.clone(), store, core, clock(), Some(Arc::default()), None)
    }
}

/// A router of shop with one host that joined.
async fn shop() -> (Party, Arc<Router>, Party, Home) {
    let (router, host) = (party(1, "router"), party(2, "web1"));
    let authority = router.keyring.create_authority("shop").expect("made");
    let at = router.route(60_000).await;
    let secret = router.token(1, 9, vec![authority_prefix(&authority)]);
    let home = host.join(&router, &at, Some(secret));
    await_phase(&home, Phase::Connected).await;
    (router, at, host, home)
}

async fn await_phase(home: &Home, phase: Phase) {
    let mut changed = home.changed();
    let reached = changed.wait_for(|state| state.phase == phase);
    timeout(LIMIT, reached).await.unwrap_or_else(|_| panic!("it is {:?}", home.state())).expect("it lives");
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let reached = async {
        while !done() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, reached).await.unwrap_or_else(|_| panic!("{what}: not in time"));
}

fn registration(name: &str, weight: u32) -> Registration {
    let parsed: Name = name.parse().expect("literal");
    Registration {
        name: name.to_owned(),
        prefix: parsed.prefix(),
        weight,
        priority: 100,
        proof: Vec::new(),
        partition_bits: 0,
        exclusive: false,
        fenced: false,
        sticky: false,
        zero_weight: None,
    }
}

fn state_of(home: &Home, name: &str) -> &'static str {
    let prefix = name.parse::<Name>().expect("literal").prefix();
    home.registration(&prefix).map_or("none", |state| state.state)
}

#[tokio::test]
async fn both_ends_hold_one_association_and_the_host_finds_the_router() {
    let (router, at, host, home) = shop().await;
    let (ours, theirs) = (host.core.associations.lock()[0].clone(), router.core.associations.lock()[0].clone());
    assert_eq!((ours.local_id, ours.remote_id, ours.key), (theirs.remote_id, theirs.local_id, theirs.key));
    assert_eq!((ours.hop_key, ours.initiator, theirs.initiator), (theirs.hop_key, true, false));
    let mut trust = TrustStore::default();
    trust.add(TrustAnchor { authority: authority_block("shop"), key: home.config().authority_key });
    let membership = host.core.membership.lock().clone();
    assert!(trust.verify_member(&membership, &host.local.host_key.public().0, NOW_S).is_ok());
    let mut lengths: Vec<u16> = host.core.rules.lock().values().map(|(prefix, _)| prefix.bits).collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [0, 64]);
    assert_eq!(at.host_count(), 1);
    home.stop().await;
    assert!(host.core.rules.lock().is_empty());
    at.stop().await;
}

#[tokio::test]
async fn a_name_is_registered_resolved_changed_and_withdrawn() {
    let (router, at, host, home) = shop().await;
    let web: Name = "web.shop".parse().expect("literal");
    home.register(registration("web.shop", 100));
    until("registration", || state_of(&home, "web.shop") == "registered").await;
    let rules = router.core.rules_of(&web.prefix());
    let Action::Forward(hop) = &rules[0].action else { panic!("{rules:?}") };
    assert_eq!((rules.len(), hop.host, hop.address.port()), (1, Some(host.local.host_key.public().id()), 54_324));
    let found = home.resolve(web.service_id()).await.expect("answered");
    assert_eq!((found.len(), found[0].host_name.as_str()), (1, "web1"));
    assert!(!host.core.certificates.lock()[&web.prefix()].is_empty());

    home.register(registration("web.shop", 7));
    home.settled().await;
    assert_eq!(state_of(&home, "web.shop"), "registered");
    until("the new weight", || router.core.rules_of(&web.prefix()).iter().any(|rule| rule.weight == 7)).await;
    until("the old rule's end", || router.core.rules_of(&web.prefix()).len() == 1).await;
    assert_eq!(router.core.fewest.lock()[&web.prefix()], 1, "there was always a rule");

    home.withdraw(web.prefix()).expect("registered").await;
    assert!(router.core.rules_of(&web.prefix()).is_empty());
    assert!(home.resolve(web.service_id()).await.expect("answered").is_empty());
    at.stop().await;
}

#[tokio::test]
async fn a_host_has_its_certificate_before_anybody_is_sent_to_it() {
    let (router, at, host, home) = shop().await;
    *router.core.served_by.lock() = Some(Arc::clone(&host.core));
    home.register(registration("web.shop", 100));
    until("registration", || state_of(&home, "web.shop") == "registered").await;
    assert_eq!((router.core.early.lock().len(), at.instances().len()), (0, 1));
    at.stop().await;
}

#[tokio::test]
async fn a_grant_that_is_taken_back_ends_what_was_registered_by_it_and_a_new_one_is_used_at_once() {
    let (router, at, host, home) = shop().await;
    let prefix = |name: &str| name.parse::<Name>().expect("literal").prefix();
    let key = MemberKey { host: host.local.host_key.public(), authority: authority_block("shop") };
    let grant = |names: &[&str]| {
        let grants: Vec<Prefix> = names.iter().map(|name| prefix(name)).collect();
        router.store.set_grants(&key, &grants, NOW_S).expect("written").expect("a member");
        at.review_grants();
    };
    for name in ["web.shop", "db.shop"] {
        home.register(registration(name, 100));
        until("registration", || state_of(&home, name) == "registered").await;
    }
    grant(&["db.shop"]);
    until("the refusal", || state_of(&home, "web.shop") == "refused").await;
    assert!(home.registration(&prefix("web.shop")).expect("known").why.contains("no grant"));
    assert_eq!(at.instances().iter().map(|found| found.name.as_str()).collect::<Vec<_>>(), ["db.shop"]);
    assert_eq!(state_of(&home, "db.shop"), "registered");
    assert!(host.core.certificates.lock()[&prefix("web.shop")].is_empty(), "it has no certificate to show");
    grant(&["db.shop", "web.shop"]);
    until("registration", || state_of(&home, "web.shop") == "registered").await;
    assert_eq!((at.instances().len(), at.host_count()), (2, 1));
    let unknown = MemberKey { host: party(9, "other").local.host_key.public(), ..key };
    assert_eq!(router.store.set_grants(&unknown, &[], NOW_S).expect("readable"), None);
    at.stop().await;
}

#[tokio::test]
async fn a_host_that_is_put_out_is_gone_at_once_and_the_others_hear_of_it() {
    let (router, at, first, home) = shop().await;
    let (out, outcast) = second(&router, &at).await;
    outcast.register(registration("web.shop", 100));
    until("registration", || state_of(&outcast, "web.shop") == "registered").await;
    let key = out.local.host_key.public();
    router.store.remove_member(key.id(), NOW_S).expect("written");
    at.remove_host(key.id()).expect("readable");
    assert_eq!(at.instances(), []);
    await_phase(&outcast, Phase::Refused).await;
    assert!(outcast.state().why.contains("needs a new join token"), "{}", outcast.state().why);
    let revocation = Revocation {
        authority: authority_block("shop"),
        host_key: key.0,
        until_s: NOW_S + issue::LIFETIME_S,
        by: None,
    };
    for core in [&router.core, &first.core] {
        until("the news", || *core.revoked.lock() == [revocation]).await;
    }
    // Who comes later hears of it, too.
    home.stop().await;
    let again = first.join(&router, &at, None);
    await_phase(&again, Phase::Connected).await;
    until("the news again", || first.core.revoked.lock().len() == 2).await;
    at.write_audit().await;
    let refused = router.store.audit(100).expect("readable").into_iter().filter(|entry| entry.act == "host-refused");
    assert!(refused.map(|entry| entry.subject).all(|subject| subject == key.id().to_string()));
    at.stop().await;
}

#[tokio::test]
async fn what_is_registered_and_what_is_refused_is_in_the_log_with_its_reason() {
    let (router, at, host, home) = shop().await;
    home.register(registration("web.shop", 100));
    home.register(registration("web.other", 100));
    until("registration", || state_of(&home, "web.shop") == "registered").await;
    until("the refusal", || state_of(&home, "web.other") == "refused").await;
    // Said again it is nothing new.
    home.register(registration("web.shop", 100));
    let mut stream = TcpStream::connect(at.local_address()).await.expect("connected");
    stream.write_all(&[0xff; 600]).await.expect("written");
    // It may be reset, too: either way it is over.
    let _ = timeout(LIMIT, stream.read_to_end(&mut Vec::new())).await.expect("the router ends it");
    home.resolve("web.shop".parse::<Name>().expect("literal").service_id()).await.expect("all before is answered");
    at.write_audit().await;
    let log = router.store.audit(100).expect("readable");
    let of = |act: &str| -> Vec<(String, String)> {
        let entries = log.iter().filter(|entry| entry.act == act);
        entries.map(|entry| (entry.subject.clone(), entry.detail.clone())).collect()
    };
    let id = host.local.host_key.public().id().to_string();
    assert_eq!(of("register"), [(id.clone(), "web.shop, priority 100, weight 100".to_owned())]);
    let [(subject, detail)] = &of("register-refused")[..] else { panic!("{log:?}") };
    assert!(*subject == id && detail.starts_with("web.other: ") && detail.contains("no grant"), "{detail}");
    let [(subject, _)] = &of("stream-refused")[..] else { panic!("{log:?}") };
    assert_eq!(subject, "127.0.0.1");
    at.stop().await;
}

#[tokio::test]
async fn a_host_that_watches_a_prefix_hears_of_every_change() {
    let (router, at, _host, home) = shop().await;
    let authority = router.keyring.authority("shop").expect("readable").expect("made");
    let other = party(3, "client");
    let client = other.join(&router, &at, Some(router.token(1, 8, vec![authority_prefix(&authority)])));
    await_phase(&client, Phase::Connected).await;
    let web = "web.shop".parse::<Name>().expect("literal").prefix();
    assert_eq!(client.watched(&web), None);
    client.watch(web, Watcher::Spreads);
    until("the first word", || client.watched(&web) == Some(Vec::new())).await;
    home.register(registration("web.shop", 100));
    until("the news", || client.watched(&web).is_some_and(|found| found.len() == 1)).await;
    let mut heard = client.heard();
    heard.mark_unchanged();
    home.register(registration("mail.shop", 100));
    until("registration", || state_of(&home, "mail.shop") == "registered").await;
    home.register(registration("web.shop", 7));
    until("the new weight", || client.watched(&web).is_some_and(|found| found[0].weight == 7)).await;
    // What a host serves goes with its stream.
    home.stop().await;
    until("the end", || client.watched(&web) == Some(Vec::new())).await;
    assert!(heard.has_changed().expect("it lives"));
    client.watch(web, Watcher::Absences);
    client.end_watch(web, Watcher::Spreads);
    assert_eq!(client.watched(&web), Some(Vec::new()), "the other one goes on");
    client.end_watch(web, Watcher::Absences);
    assert_eq!(client.watched(&web), None);
    at.stop().await;
}

#[tokio::test]
async fn what_no_grant_covers_is_refused_and_says_why() {
    let (_router, at, _host, home) = shop().await;
    home.register(registration("web.other", 100));
    until("the refusal", || state_of(&home, "web.other") == "refused").await;
    let prefix = "web.other".parse::<Name>().expect("literal").prefix();
    assert!(home.registration(&prefix).expect("known").why.contains("no grant"));
    at.stop().await;
}

#[tokio::test]
async fn bits_that_may_be_those_of_a_key_take_its_word_or_a_grant_for_just_them() {
    let (router, at, host, home) = shop().await;
    let mut rng = Rng::new([5; 32]);
    let (right, wrong) = (SigningKey::generate(&mut rng), SigningKey::generate(&mut rng));
    let mut service = "web.shop".parse::<Name>().expect("literal").service_id();
    let head: [u8; 12] = service.0[..12].try_into().expect("twelve");
    service.0[12..].copy_from_slice(&self_certifying_tail(&right.public(), &head));
    let written = service.to_string();
    let by = |key: &SigningKey| {
        let key = ServiceKey { name: "web.shop".to_owned(), key: key.clone(), service };
        issue::service_by_key(&key, &host.local.host_key.public(), NOW_S).0
    };
    for (proof, wanted) in [(Vec::new(), "refused"), (by(&wrong), "refused"), (by(&right), "registered")] {
        home.register(Registration { proof, ..registration(&written, 100) });
        until("an answer", || state_of(&home, &written) == wanted).await;
    }
    // A content's key has words that hash to its bits.
    home.register(registration("web.shop/key:user42", 100));
    until("registration", || state_of(&home, "web.shop/key:user42") == "registered").await;
    let (other, grant) = (party(3, "web2"), Prefix::from(service));
    let second = other.join(&router, &at, Some(router.token(1, 8, vec![grant])));
    second.register(registration(&written, 100));
    until("registration", || state_of(&second, &written) == "registered").await;
    at.stop().await;
}

#[tokio::test]
async fn a_token_is_good_for_as_many_hosts_as_it_says_and_a_member_needs_none() {
    let (router, at, host, home) = shop().await;
    let late = party(3, "late");
    let second = late.join(&router, &at, Some(TokenSecret::new([9; 16])));
    await_phase(&second, Phase::Refused).await;
    assert!(second.state().why.contains("used up"), "{}", second.state().why);
    home.stop().await;
    until("the host's end", || at.host_count() == 0).await;
    let again = host.join(&router, &at, None);
    await_phase(&again, Phase::Connected).await;
    at.stop().await;
}

/// The lease would end only much later; and a name that is there all the while has an instance all the while.
#[tokio::test]
async fn a_host_that_leaves_its_address_registers_again_at_once() {
    let (router, _at, host, home) = shop().await;
    home.register(registration("web.shop", 5));
    until("the registration", || state_of(&home, "web.shop") == "registered").await;
    let prefix = "web.shop".parse::<Name>().expect("literal").prefix();
    let streams = || router.core.associations.lock().len();
    let before = streams();
    home.moved(vec!["192.0.2.1".parse().expect("literal")]);
    home.moved(vec!["127.0.0.1".parse().expect("literal")]);
    until("another stream", || streams() > before).await;
    home.register(registration("web.shop", 6));
    until("the new weight", || router.core.rules_of(&prefix).first().is_some_and(|rule| rule.weight == 6)).await;
    assert_eq!(streams(), before + 1, "what it did not use is nothing to it");
    assert_eq!(router.core.rules_of(&prefix).len(), 1);
    assert_eq!(router.core.fewest.lock().get(&prefix).copied().unwrap_or(1), 1);
    assert_eq!(host.core.associations.lock().len(), before + 1);
}

#[tokio::test]
async fn a_stream_that_ends_takes_its_names_with_it() {
    let (router, at, _host, home) = shop().await;
    home.register(registration("web.shop", 100));
    until("registration", || state_of(&home, "web.shop") == "registered").await;
    home.stop().await;
    until("the rule's end", || router.core.rules.lock().is_empty()).await;
    at.stop().await;
}

#[tokio::test]
async fn another_key_at_the_router_s_address_is_not_believed() {
    let (router, at, host, home) = shop().await;
    home.stop().await;
    at.stop().await;
    let rogue = party(4, "rogue");
    rogue.keyring.create_authority("shop").expect("made");
    let at = rogue.route(60_000).await;
    let misled = host.join(&router, &at, None);
    // It is not waited for any longer than that.
    misled.register(registration("web.shop", 100));
    misled.settled().await;
    assert_eq!(misled.state().phase, Phase::Refused);
    assert!(misled.state().why.contains("another host answers"), "{}", misled.state().why);
    at.stop().await;
}

#[tokio::test]
async fn garbage_ends_its_own_stream_and_no_other() {
    let (_router, at, _host, home) = shop().await;
    for bytes in [vec![0; 2], vec![0xff; 600], b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0, 4, 1, 2, 3, 4]] {
        let mut stream = TcpStream::connect(at.local_address()).await.expect("connected");
        stream.write_all(&bytes).await.expect("written");
        stream.shutdown().await.expect("no more");
        let mut rest = Vec::new();
        // It may be reset, too: either way it is over.
        let _ = timeout(LIMIT, stream.read_to_end(&mut rest)).await.expect("the router ends it");
    }
    assert_eq!((home.state().phase, at.host_count()), (Phase::Connected, 1));
    at.stop().await;
}

fn register(name: &str) -> super::proto::from_host::Body {
    let wanted = registration(name, 100);
    super::proto::from_host::Body::Register(super::proto::Register {
        request: 1,
        name: wanted.name,
        service_id: wanted.prefix.id.0.to_vec(),
        bits: wanted.prefix.bits.into(),
        weight: wanted.weight,
        priority: wanted.priority,
        proof: wanted.proof,
        partition_bits: 0,
        exclusive: false,
        fenced: false,
        sticky: false,
        certificate_only: false,
        zero_weight: None,
    })
}

#[tokio::test]
async fn a_host_that_falls_silent_is_gone_after_its_lease() {
    let (router, host) = (party(1, "router"), party(2, "web1"));
    let authority = router.keyring.create_authority("shop").expect("made");
    let at = router.route(200).await;
    let secret = router.token(1, 9, vec![authority_prefix(&authority)]);
    // A host that says hello, and then nothing.
    let (_reader, mut writer) = orders::bare(&router, &at, &host, &secret).await;
    until("the host's arrival", || at.host_count() == 1).await;
    // It did not say that it can be asked, so it is not.
    let (id, question) = (host.local.host_key.public().id(), question("web.shop", &[&router]));
    until("its line", || matches!(now(at.trace(id, &question)), Some(Err(TraceError::Older)))).await;
    writer.write(&super::proto::FromHost { body: Some(register("web.shop")) }).await.expect("written");
    until("the registration", || at.instances().len() == 1).await;
    until("the end of its lease", || at.host_count() == 0).await;
    assert_eq!(at.instances_left().into_iter().filter(|(_, count)| *count > 0).collect::<Vec<_>>(), [("lapsed", 1)]);
    at.stop().await;
}

/// Another host of the authority.
async fn second(router: &Party, at: &Router) -> (Party, Home) {
    let host = party(3, "web2");
    let authority = router.keyring.authority("shop").expect("readable").expect("made");
    let secret = router.token(1, 8, vec![authority_prefix(&authority)]);
    let home = host.join(router, at, Some(secret));
    await_phase(&home, Phase::Connected).await;
    (host, home)
}

#[tokio::test]
async fn a_standby_takes_over_an_exclusive_name_when_its_holder_leaves() {
    let (router, at, _host, first) = shop().await;
    let (_standby, second) = second(&router, &at).await;
    let alone = Registration { exclusive: true, ..registration("db.shop", 100) };
    first.register(alone.clone());
    until("registration", || state_of(&first, "db.shop") == "registered").await;
    second.register(alone.clone());
    until("the refusal", || state_of(&second, "db.shop") == "refused").await;
    let why = second.registration(&alone.prefix).expect("known").why;
    assert!(why.contains("web1 serves db.shop"), "{why}");
    first.stop().await;
    until("the takeover", || state_of(&second, "db.shop") == "registered").await;
    let instances: Vec<_> = at.instances().into_iter().map(|found| found.host_name).collect();
    assert_eq!(instances, ["web2"]);
    at.stop().await;
}

#[tokio::test]
async fn a_grant_for_a_service_is_one_for_its_partitions() {
    let (router, host) = (party(1, "router"), party(2, "web1"));
    router.keyring.create_authority("shop").expect("made");
    let at = router.route(60_000).await;
    let granted: Name = "cache.shop".parse().expect("literal");
    let secret = router.token(1, 9, vec![granted.prefix()]);
    let home = host.join(&router, &at, Some(secret));
    await_phase(&home, Phase::Connected).await;
    for (name, wanted) in [("cache.shop", "registered"), ("other.shop", "refused")] {
        let prefix = name.parse::<Name>().expect("literal").service_prefix();
        home.register(Registration { prefix, partition_bits: 4, ..registration(name, 100) });
        until("an answer", || home.registration(&prefix).is_some_and(|state| state.state == wanted)).await;
    }
    assert!(host.core.certificates.lock().contains_key(&granted.service_prefix()));
    at.stop().await;
}

#[tokio::test]
async fn partitions_are_shared_by_those_who_agree_on_their_number() {
    let (router, at, _host, first) = shop().await;
    let (_other, second) = second(&router, &at).await;
    let prefix = "cache.shop".parse::<Name>().expect("literal").service_prefix();
    let divided = |bits| Registration { partition_bits: bits, prefix, ..registration("cache.shop", 100) };
    let home_state = |home: &Home, prefix: &Prefix| home.registration(prefix).map_or("none", |state| state.state);
    let state_of = |home: &Home| home_state(home, &prefix);
    first.register(divided(4));
    until("registration", || state_of(&first) == "registered").await;
    second.register(divided(3));
    until("the refusal", || state_of(&second) == "refused").await;
    second.register(divided(4));
    until("registration", || state_of(&second) == "registered").await;
    let part = divided(4).prefix.partition(4, 5);
    assert_eq!((router.core.rules_of(&part).len(), at.instances_under(&part).len()), (1, 2 + 1));
    assert_eq!((at.instances_under(&divided(4).prefix).len(), at.partitions_moved()), (2 + 16, 8));
    // More than a message holds.
    second.withdraw(prefix);
    until("the end", || at.instances().len() == 1).await;
    second.watch(prefix, Watcher::Absences);
    first.register(divided(10));
    until("all of the news", || second.watched(&prefix).is_some_and(|heard| heard.len() == 1 + 1024)).await;
    first.register(divided(11));
    until("the refusal of too many", || state_of(&first) == "refused").await;
    let key = Registration { partition_bits: 1, ..registration("cache.shop/key:one", 100) };
    first.register(key.clone());
    until("the refusal of a key's", || home_state(&first, &key.prefix) == "refused").await;
    at.stop().await;
}

fn question(name: &str, passed: &[&Party]) -> Question {
    Question {
        service: name.parse::<Name>().expect("literal").service_id(),
        protocol: 6,
        port: 80,
        sticky: 0xfedc_ba98_7654_3210,
        passed: passed.iter().map(|party| party.local.host_key.public().id()).collect(),
        limit: Duration::from_secs(4),
    }
}

/// What is there without waiting.
fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => Some(value),
        std::task::Poll::Pending => None,
    }
}

fn hop(name: &str, act: &str) -> TraceHop {
    TraceHop { host_name: name.to_owned(), act: act.to_owned(), ..TraceHop::default() }
}

/// Answers every question with one hop, and remembers what was asked.
fn answering(name: &'static str, asked: &Arc<Mutex<Vec<Question>>>) -> Tracer {
    let asked = Arc::clone(asked);
    Arc::new(move |question| {
        asked.lock().push(question);
        Box::pin(async move { vec![hop(name, "deliver")] })
    })
}

#[tokio::test]
async fn a_first_packet_is_traced_from_host_to_router_and_from_router_to_host() {
    let (router, at, host, home) = shop().await;
    let id = host.local.host_key.public().id();
    let asked = Arc::default();
    home.set_tracer(answering("web1", &asked));
    // The router asks the very host that asks it: both answers come by one stream.
    let asks_on = Arc::clone(&at);
    at.set_tracer(Arc::new(move |mut question: Question| {
        let (at, own) = (Arc::clone(&asks_on), router.local.host_key.public().id());
        Box::pin(async move {
            question.passed.push(own);
            let mut hops = vec![hop("router", "forward")];
            hops.extend(at.trace(id, &question).await.expect("answered"));
            hops
        })
    }));
    let asking = question("web.shop", &[&host]);
    let hops = home.trace(asking.clone()).await.expect("answered");
    assert_eq!(hops, [hop("router", "forward"), hop("web1", "deliver")]);
    let asked = asked.lock().clone();
    let passed = vec![id, home.config().router_key.id()];
    assert_eq!(asked, [Question { passed, ..asking }]);
    at.stop().await;
}

#[tokio::test]
async fn questions_that_nobody_may_ask_are_refused_and_the_stream_lives() {
    let (router, at, host, home) = shop().await;
    let asked = Arc::default();
    let refused = |answer: Result<Vec<TraceHop>, TraceError>| match answer {
        Err(TraceError::Refused(why)) => why,
        other => panic!("it was not refused: {other:?}"),
    };
    let good = question("web.shop", &[&host]);
    assert!(refused(home.trace(good.clone()).await).contains("just been started"));
    at.set_tracer(answering("router", &asked));
    assert!(refused(home.trace(question("web.bank", &[&host])).await).contains("another authority"));
    assert!(refused(home.trace(question("web.shop", &[&router])).await).contains("another host than it says"));
    assert!(refused(home.trace(question("web.shop", &[])).await).contains("makes no sense"));
    // Four of ten this second are used up.
    let mut answered = 0;
    while let Ok(hops) = home.trace(good.clone()).await {
        assert_eq!(hops, [hop("router", "deliver")]);
        answered += 1;
        assert!(answered < 1000, "nothing stops it");
    }
    assert!(answered >= 6, "{answered}");
    assert_eq!(at.traces_refused(), 5);
    let stranger = at.trace(router.local.host_key.public().id(), &question("web.shop", &[&router])).await;
    assert_eq!(stranger, Err(TraceError::Down));
    assert_eq!((home.state().phase, at.host_count()), (Phase::Connected, 1));
    home.stop().await;
    assert_eq!(home.trace(good).await, Err(TraceError::Down));
    at.stop().await;
}

#[tokio::test]
async fn a_router_that_does_not_answer_or_knows_no_such_question_is_said_to_be_so() {
    let (router, at, host, home) = shop().await;
    at.set_tracer(Arc::new(|_| Box::pin(std::future::pending())));
    let short = Question { limit: Duration::from_millis(50), ..question("web.shop", &[&host]) };
    assert_eq!(home.trace(short).await, Err(TraceError::Timeout));
    at.stop().await;
    // One of an older version welcomes the host, and says nothing of traces.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let other = party(3, "web2");
    let config = HomeConfig {
        router_address: listener.local_addr().expect("bound").to_string(),
        router_key: router.local.host_key.public(),
        secret: None,
        ..home.config().clone()
    };
    let (store, core) = (Arc::clone(&other.store), Arc::clone(&other.core) as Arc<dyn SalControl>);
    let home = Home::start(config, other.local.clone(), store, core, clock(), Some(Arc::default()), None);
    let (stream, _) = listener.accept().await.expect("it comes");
    let (mut reader, mut writer, _) = super::stream::accept(stream, &router.local.host_key).await.expect("met");
    let _: super::proto::FromHost = reader.read().await.expect("its hello");
    let authority = router.keyring.authority("shop").expect("readable").expect("made");
    let welcome = super::proto::Welcome {
        version: VERSION,
        membership: issue::membership(&authority, &other.local.host_key.public(), &[], NOW_S).0,
        router: issue::router(&authority, &router.local.host_key.public(), NOW_S).0,
        association_id: 7,
        association_key: vec![1; 32],
        hop_key: vec![1; 16],
        sal_port: 54_324,
        lease_ms: 60_000,
        heartbeat_ms: 10_000,
        ..super::proto::Welcome::default()
    };
    let body = Some(super::proto::from_router::Body::Welcome(welcome));
    writer.write(&super::proto::FromRouter { body }).await.expect("written");
    await_phase(&home, Phase::Connected).await;
    assert_eq!(home.trace(question("web.shop", &[&other])).await, Err(TraceError::Older));
    assert_eq!(home.state().phase, Phase::Connected);
    home.stop().await;
}
