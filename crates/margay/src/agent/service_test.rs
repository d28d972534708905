use std::collections::BTreeMap;
use std::net::IpAddr;

use margay_core::certificate::{Revocation, TrustAnchor};
use margay_core::give_up::GiveUpAfter;
use margay_core::key::HostSecret;
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::ServiceId;
use margay_core::rng::Rng;
use margay_core::succession::Succession;
use margay_core::{AssociationSetup, Ranges};

use super::fitness::Sick;
use super::*;
use crate::agent::listening::Place;
use crate::listener::{MiddleboxKind, Protocol};

/// A core that remembers what it was told.
#[derive(Default)]
struct Recorder {
    rules: Mutex<BTreeMap<RuleId, (Prefix, Rule)>>,
    certificates: Mutex<Vec<(Prefix, bool)>>,
    next: Mutex<u64>,
    full: Mutex<bool>,
    /// Names that lost their certificate while there were rules for them.
    bare: Mutex<Vec<Prefix>>,
    /// Names whose flows of datagrams were ended.
    ended: Mutex<Vec<Prefix>>,
}

impl SalControl for Recorder {
    fn install_association(&self, _: AssociationSetup) {}
    fn add_trust_anchor(&self, _: TrustAnchor) {}
    fn revoke(&self, _: Revocation) {}
    fn revoke_key(&self, _: KeyRevocation) {}
    fn succeed(&self, _: &Succession) {}
    fn set_membership(&self, _: Vec<u8>) {}
    fn set_own_terms(&self, _: Prefix, _: Option<GiveUpAfter>) {}

    fn set_service_certificate(&self, prefix: Prefix, chain: Vec<u8>) {
        if chain.is_empty() && self.rules.lock().values().any(|(of, _)| *of == prefix) {
            self.bare.lock().push(prefix);
        }
        self.certificates.lock().push((prefix, !chain.is_empty()));
    }
    fn add_rule(&self, prefix: Prefix, rule: Rule) -> Result<RuleId, TableError> {
        if *self.full.lock() {
            return Err(TableError { limit: 0 });
        }
        *self.next.lock() += 1;
        let id = RuleId(*self.next.lock());
        self.rules.lock().insert(id, (prefix, rule));
        Ok(id)
    }
    fn remove_rule(&self, id: RuleId) -> bool {
        self.rules.lock().remove(&id).is_some()
    }
    fn bind_name(&self, _: IpAddr, _: ServiceId) {}
    fn unbind_name(&self, _: IpAddr) {}
}

struct Host {
    _base: tempfile::TempDir,
    dir: StateDir,
    store: Arc<Store>,
    core: Arc<Recorder>,
    forwards: bool,
}

fn host() -> Host {
    let base = tempfile::tempdir().expect("a directory");
    let dir = StateDir::open(base.path().join("state")).expect("made");
    let store = Arc::new(Store::open(&dir).expect("made"));
    Host { _base: base, dir, store, core: Arc::default(), forwards: true }
}

impl Host {
    /// What a start of the agent makes.
    fn services(&mut self) -> Services {
        self.core = Arc::default();
        let local = Local {
            host_key: HostSecret::generate(&mut Rng::new([7; 32])),
            epoch: 1,
            boot_id: [1; 16],
            sal_port: 54324,
            host_name: "alpha".into(),
            software: "test".into(),
        };
        let around = Surroundings {
            core: Arc::clone(&self.core) as Arc<dyn SalControl>,
            local,
            keyring: Keyring::open(&self.dir).expect("opened"),
            store: Arc::clone(&self.store),
            clock: Clock::from_fn(|| 1_700_000_000),
            dir: self.dir.clone(),
            router: None,
            look_up: Box::new(|_, _| true),
            ranges: Ranges::USUAL,
            end_datagrams: {
                let core = Arc::clone(&self.core);
                Box::new(move |prefix| core.ended.lock().push(*prefix))
            },
        };
        Services::new(around, self.forwards)
    }

    fn ports(&self) -> Vec<u16> {
        let rules = self.core.rules.lock();
        rules
            .values()
            .filter_map(|(_, rule)| match &rule.action {
                Action::Demux(demux) => Some(demux.listener.port()),
                _ => None,
            })
            .collect()
    }
}

const TERMS: Terms = Terms {
    weight: 100,
    priority: 100,
    partition_bits: 0,
    exclusive: false,
    fenced: false,
    sticky: false,
    give_up_after_ms: None,
    quiet_ms: None,
};

fn publication(name: &str, listen: &str) -> Publication {
    let address: SocketAddr = listen.parse().expect("literal");
    let listener = Listener {
        address,
        service_port: Some(80),
        protocol: None,
        allow: Vec::new(),
        middlebox: None,
        origin: Origin::Order,
        takes_both: false,
    };
    Publication { name: name.parse().expect("literal"), listener, terms: TERMS, checks: Checks::default() }
}

fn of_box(name: &str) -> Publication {
    let listener = Listener::of_box(MiddleboxKind::Forward, Vec::new(), Origin::Order);
    Publication { listener, ..publication(name, "0.0.0.0:80") }
}

#[tokio::test]
async fn a_box_needs_no_socket_and_comes_back_after_a_restart() {
    let mut host = host();
    let services = host.services();
    services.set_listening(Listening::new());
    services.publish(of_box("fw.shop")).expect("published");
    let services = host.services();
    services.set_listening(Listening::new());
    services.restore(&[]).expect("restored");
    let has_box = |host: &Host| host.core.rules.lock().values().any(|(_, rule)| matches!(rule.action, Action::Box(_)));
    assert!(has_box(&host));
    host.forwards = false;
    let services = host.services();
    services.restore(&[]).expect("restored");
    let found = services.find(&"fw.shop".parse().expect("a name")).expect("kept");
    assert!(!has_box(&host) && !found.is_served && found.refused.contains("boxes = true"), "{}", found.refused);
}

#[tokio::test]
async fn a_name_is_a_boxs_or_a_programs_and_a_boxs_is_a_whole_service() {
    let mut host = host();
    let services = host.services();
    services.publish(of_box("fw.shop")).expect("published");
    let error = services.publish(publication("fw.shop", "0.0.0.0:80")).expect_err("it is a box");
    assert!(error.to_string().contains("fw.shop is the name of a box"), "{error}");
    let error = services.publish(of_box("fw.shop/key:one")).expect_err("no box's name");
    assert!(error.to_string().contains("whole service"), "{error}");
    assert_eq!(host.core.rules.lock().len(), 1);
    assert_eq!(services.withdraw(&"fw.shop".parse().expect("a name"), None).await.expect("withdrawn"), 1);
    assert!(host.core.rules.lock().is_empty());
}

#[tokio::test]
async fn what_is_published_comes_back_after_a_restart() {
    let mut host = host();
    let services = host.services();
    services.publish(publication("web.shop", "0.0.0.0:8080")).expect("published");
    services.publish(publication("web.shop", "0.0.0.0:8081")).expect("published");
    assert_eq!(host.ports(), [8080, 8081]);

    let services = host.services();
    services.restore(&[]).expect("restored");
    assert_eq!(host.ports(), [8080, 8081]);
    let name: Name = "web.shop".parse().expect("literal");
    assert_eq!(services.withdraw(&name, Some("0.0.0.0:8080".parse().expect("literal"))).await.expect("withdrawn"), 1);
    assert_eq!(host.ports(), [8081]);
    assert_eq!(services.withdraw(&name, None).await.expect("withdrawn"), 1);
    assert!(host.ports().is_empty());
    assert!(matches!(services.withdraw(&name, None).await, Err(PublishError::Unknown(_))));

    let services = host.services();
    services.restore(&[]).expect("restored");
    assert!(services.list().is_empty());
}

#[test]
fn the_configuration_alone_keeps_its_services() {
    let mut host = host();
    let mut configured = publication("db.shop", "0.0.0.0:5432");
    configured.listener.origin = Origin::Configuration;
    host.services().restore(&[configured]).expect("restored");
    assert_eq!(host.ports(), [5432]);
    host.services().restore(&[]).expect("restored");
    assert!(host.ports().is_empty());
}

#[test]
fn publishing_again_changes_weight_and_leaves_one_rule() {
    let mut host = host();
    let services = host.services();
    services.publish(publication("web.shop", "0.0.0.0:8080")).expect("published");
    services
        .publish(Publication { terms: Terms { weight: 7, ..TERMS }, ..publication("web.shop", "0.0.0.0:8080") })
        .expect("published");
    let rules = host.core.rules.lock();
    let weights: Vec<u32> = rules.values().map(|(_, rule)| rule.weight).collect();
    assert_eq!(weights, [7]);
}

#[test]
fn a_service_with_partitions_is_served_with_all_that_is_under_it() {
    let mut host = host();
    let services = host.services();
    services.keyring.create_authority("shop").expect("made");
    let divided = Terms { partition_bits: 4, exclusive: false, ..TERMS };
    services.publish(Publication { terms: divided, ..publication("cache.shop", "0.0.0.0:8080") }).expect("published");
    let serving = |services: &Services, name: &str| {
        let found = services.serving(&name.parse().expect("a name"))?;
        Some((found.name.to_string(), found.listeners[0].address.port()))
    };
    let whole = Some(("cache.shop".to_owned(), 8080));
    assert_eq!([serving(&services, "cache.shop"), serving(&services, "cache.shop/key:one")], [whole.clone(), whole]);
    assert_eq!(serving(&services, "web.shop"), None);
    let prefixes = |host: &Host| host.core.rules.lock().values().map(|(prefix, _)| prefix.bits).collect::<Vec<_>>();
    assert_eq!(prefixes(&host), [96]);
    assert_eq!(host.core.certificates.lock().iter().map(|(prefix, _)| prefix.bits).collect::<Vec<_>>(), [96]);
    let services = host.services();
    services.restore(&[]).expect("restored");
    assert_eq!((prefixes(&host), services.list()[0].terms), (vec![96], divided));
    let key = Publication { terms: divided, ..publication("cache.shop/key:one", "0.0.0.0:8081") };
    assert!(matches!(services.publish(key), Err(PublishError::Misuse(_))));
    // Without partitions it is the one name again.
    services.publish(publication("cache.shop", "0.0.0.0:8080")).expect("published");
    assert_eq!(prefixes(&host), [256]);
    assert_eq!(serving(&services, "cache.shop/key:one"), None);
}

#[test]
fn what_is_refused_changes_nothing() {
    let mut host = host();
    let services = host.services();
    services.publish(publication("web.shop", "0.0.0.0:8080")).expect("published");
    let mut stranger = publication("web.shop", "0.0.0.0:8081");
    stranger.listener.allow = vec!["everybody".into()];
    assert!(matches!(services.publish(stranger), Err(PublishError::Misuse(_))));
    assert!(matches!(services.publish(publication("web.shop", "127.0.0.1:80")), Err(PublishError::Misuse(_))));
    let heavy =
        Publication { terms: Terms { weight: WEIGHT_MAX + 1, ..TERMS }, ..publication("web.shop", "0.0.0.0:8081") };
    assert!(matches!(services.publish(heavy), Err(PublishError::Misuse(_))));
    *host.core.full.lock() = true;
    assert!(matches!(services.publish(publication("web.shop", "0.0.0.0:8081")), Err(PublishError::Table(_))));
    assert_eq!(host.ports(), [8080]);
}

#[test]
fn a_holder_of_the_authority_s_key_signs_for_itself() {
    let mut host = host();
    let services = host.services();
    services.keyring.create_authority("shop").expect("made");
    services.publish(publication("web.shop", "0.0.0.0:8080")).expect("published");
    services.publish(publication("web.other", "0.0.0.0:8081")).expect("published");
    let shop: Name = "web.shop".parse().expect("literal");
    assert_eq!(*host.core.certificates.lock(), [(shop.prefix(), true)]);
}

#[tokio::test]
async fn what_is_withdrawn_can_be_answered_for_to_its_end() {
    let mut host = host();
    let services = host.services();
    services.keyring.create_authority("shop").expect("made");
    services.publish(publication("web.shop", "0.0.0.0:8080")).expect("published");
    let shop: Name = "web.shop".parse().expect("literal");
    services.withdraw(&shop, None).await.expect("withdrawn");
    assert_eq!(*host.core.certificates.lock(), [(shop.prefix(), true), (shop.prefix(), false)]);
    assert_eq!(*host.core.bare.lock(), []);
}

#[test]
fn a_damaged_file_is_named_and_kept() {
    let mut host = host();
    host.dir.write(kept::FILE, b"{\"version\":9,\"services\":[]}").expect("written");
    let error = host.services().restore(&[]).expect_err("refused").to_string();
    assert!(error.contains(kept::FILE) && error.contains("version 9"), "{error}");
    assert!(host.dir.read(kept::FILE).expect("readable").is_some());
}

#[test]
fn what_is_published_follows_its_socket_where_the_kernel_says_what_listens() {
    let mut host = host();
    let services = host.services();
    let (web, far) = (publication("web.shop", "0.0.0.0:80"), publication("far.shop", "192.0.2.9:80"));
    services.publish(web.clone()).expect("published");
    services.publish(far).expect("published");
    let served = |services: &Services| services.own_instances().into_iter().map(|found| found.name).collect::<Vec<_>>();
    assert_eq!(served(&services), ["web.shop", "far.shop"], "nobody knows better");
    let rules = || host.core.rules.lock().len();
    assert_eq!(rules(), 2);

    services.set_listening(Listening::default());
    assert_eq!(served(&services), ["far.shop"], "what is elsewhere is not for this host's kernel to say");
    let sockets = |all: &[(&str, Protocol)]| {
        let place = |(address, protocol): &(&str, Protocol)| {
            let address: SocketAddr = address.parse().expect("literal");
            Place { address, protocol: *protocol, takes_both: address.is_ipv6() }
        };
        all.iter().map(place).collect::<Listening>()
    };
    services.set_listening(sockets(&[("127.0.0.1:80", Protocol::Tcp), ("0.0.0.0:81", Protocol::Tcp)]));
    assert_eq!(served(&services), ["far.shop"], "neither takes what comes for it");
    services.set_listening(sockets(&[("[::]:80", Protocol::Tcp)]));
    assert_eq!(served(&services), ["web.shop", "far.shop"], "a socket of both families does");
    assert_eq!(rules(), 2);
    services.set_listening(sockets(&[("0.0.0.0:80", Protocol::Udp)]));
    assert_eq!(served(&services), ["web.shop", "far.shop"], "it was published for both protocols");
    services.publish(publication("web.shop", "0.0.0.0:8080")).expect("published");
    assert_eq!(rules(), 3, "one socket is enough for all that was ordered for a name");
    // Published again while nothing listens, and kept all the same.
    services.set_listening(Listening::default());
    services.publish(web).expect("published");
    assert_eq!((served(&services), services.list().len()), (vec!["far.shop".to_owned()], 2));
    assert_eq!(rules(), 1);
}

#[test]
fn a_programs_sockets_come_and_go_beside_what_was_ordered() {
    let mut host = host();
    let services = host.services();
    let ordered = publication("web.shop", "0.0.0.0:80");
    let name = ordered.name.clone();
    services.publish(ordered).expect("published");
    let mut found = publication("web.shop", "0.0.0.0:8080").listener;
    found.origin = Origin::Socket;
    let found = [found];
    let now = || services.find(&name).map(|service| (service.listeners.len(), service.terms.weight));
    let before = now().expect("published").1;
    let other = Terms { weight: 7, ..TERMS };
    assert!(services.follow(&name, &found, other).expect("served"));
    assert!(!services.follow(&name, &found, other).expect("served"), "nothing is new");
    assert_eq!(now(), Some((2, 7)));
    assert!(services.follow(&name, &found, TERMS).expect("served"), "another share is");
    assert!(services.follow(&name, &[], other).expect("withdrawn"));
    assert_eq!(now(), Some((1, before)), "the program takes nothing along");
    assert!(!services.follow(&name, &[], other).expect("withdrawn"));
}

#[tokio::test]
async fn the_share_of_whatever_is_served_can_be_set_and_outlives_the_agent_where_it_is_an_order() {
    let mut host = host();
    let services = host.services();
    let name: Name = "web.shop".parse().expect("literal");
    assert!(!services.set_weight(&name, 0).await.expect("no error"), "nobody serves it here");
    services.publish(publication("web.shop", "0.0.0.0:8080")).expect("published");
    let mut followed = publication("web.shop", "0.0.0.0:8081").listener;
    followed.origin = Origin::Socket;
    services.follow(&name, &[followed], TERMS).expect("served");
    assert!(services.set_weight(&name, 0).await.expect("set"));
    let weights = |host: &Host| host.core.rules.lock().values().map(|(_, rule)| rule.weight).collect::<Vec<_>>();
    assert_eq!(weights(&host), [0, 0]);
    assert!(matches!(services.set_weight(&name, WEIGHT_MAX + 1).await, Err(PublishError::Misuse(_))));
    let services = host.services();
    services.restore(&[]).expect("restored");
    assert_eq!(weights(&host), [0]);
}

#[tokio::test]
async fn what_is_drained_has_no_share_whatever_is_published_set_or_started_meanwhile() {
    let mut host = host();
    let services = host.services();
    let weights = |host: &Host| host.core.rules.lock().values().map(|(_, rule)| rule.weight).collect::<Vec<_>>();
    let web = publication("web.shop", "0.0.0.0:80");
    let name = web.name.clone();
    services.publish(web).expect("published");
    services.publish(publication("adm.shop", "0.0.0.0:81")).expect("published");
    let of_one = Drained { host: false, names: [name.prefix()].into() };
    assert!(services.set_drained(of_one.clone()).await.is_empty(), "there is no router");
    assert_eq!(weights(&host), [100, 0], "rules are in the order in which they came");
    assert_eq!(services.list().iter().map(|service| service.is_drained).collect::<Vec<_>>(), [false, true]);
    services.publish(publication("web.shop", "0.0.0.0:8080")).expect("published");
    assert!(services.set_weight(&name, 7).await.expect("set"));
    assert_eq!(weights(&host), [100, 0, 0]);
    services.set_drained(Drained { host: true, names: [].into() }).await;
    services.publish(publication("new.shop", "0.0.0.0:82")).expect("published");
    assert_eq!(weights(&host), [0; 4], "the host takes nothing more");

    let services = host.services();
    services.restore_drained(of_one);
    services.restore(&[]).expect("restored");
    let of =
        |wanted: &str| services.list().iter().any(|service| service.name.written() == wanted && service.is_drained);
    assert!(of("web.shop") && !of("adm.shop") && !of("new.shop"), "as the agent before has kept it");
    services.set_drained(Drained::default()).await;
    let mut back = weights(&host);
    back.sort_unstable();
    assert_eq!(back, [7, 7, 100, 100], "the shares are those that were set");
}

fn sick(reason: &str) -> Fitness {
    Fitness { sick: Some(Sick { since_unix_s: 1, reason: reason.to_owned() }), percent: 0 }
}

#[tokio::test]
async fn what_is_sick_has_no_share_and_what_is_drained_besides_has_none_when_it_is_well() {
    let mut host = host();
    let services = host.services();
    let weights = |host: &Host| host.core.rules.lock().values().map(|(_, rule)| rule.weight).collect::<Vec<_>>();
    let web = publication("web.shop", "0.0.0.0:80");
    let name = web.name.clone();
    services.publish(web).expect("published");
    services.set_fitness(&name, sick("refused")).await;
    assert_eq!(weights(&host), [0]);
    services.publish(publication("web.shop", "0.0.0.0:8080")).expect("published");
    assert!(services.set_weight(&name, 50).await.expect("set"));
    assert_eq!(weights(&host), [0, 0], "whatever is published or set meanwhile");
    let changes = services.changes();
    services.set_fitness(&name, sick("no answer")).await;
    assert!(!changes.has_changed().expect("it is there"), "the reason alone is nobody else's business");
    let found = services.find(&name).expect("published");
    assert_eq!((found.terms.weight, found.weight(), found.fitness), (50, 0, sick("no answer")));

    services.set_drained(Drained { host: true, names: [].into() }).await;
    services.set_fitness(&name, Fitness::default()).await;
    assert_eq!(weights(&host), [0, 0], "it is drained");
    services.set_drained(Drained::default()).await;
    assert_eq!(weights(&host), [50, 50]);
    services.set_fitness(&name, Fitness { sick: None, percent: 10 }).await;
    assert_eq!(weights(&host), [5, 5]);

    let services = host.services();
    services.restore_fitness([(name.prefix(), sick("refused"))].into());
    services.restore(&[]).expect("restored");
    assert_eq!(weights(&host), [0, 0], "as the agent before has found it");
}

#[tokio::test]
async fn checks_by_order_are_kept_until_nothing_is_ordered() {
    let mut host = host();
    let services = host.services();
    let health = toml::from_str("http = \"/healthz\"\nslow_start = \"10s\"").expect("read");
    let checks = Checks { health: Some(health), load: None };
    let web = Publication { checks: checks.clone(), ..publication("web.shop", "0.0.0.0:80") };
    let name = web.name.clone();
    services.publish(web).expect("published");
    let services = host.services();
    services.restore(&[]).expect("restored");
    let ordered = services.ordered_checks();
    assert_eq!(ordered.into_values().collect::<Vec<_>>(), [(name.clone(), checks)]);
    services.publish(publication("web.shop", "0.0.0.0:80")).expect("published");
    assert!(services.ordered_checks().is_empty(), "the last order says so");
    let load = toml::from_str("command = [\"/load\"]").expect("read");
    let checks = Checks { health: None, load: Some(load) };
    services.publish(Publication { checks, ..publication("web.shop", "0.0.0.0:80") }).expect("published");
    services.withdraw(&name, None).await.expect("withdrawn");
    assert!(services.ordered_checks().is_empty(), "nothing is left of it");
}

#[tokio::test]
async fn flows_of_datagrams_end_with_the_last_socket_and_not_by_an_order() {
    let mut host = host();
    let services = host.services();
    let sockets = |of: &[(&str, Protocol)]| -> Listening {
        let place = |(address, protocol): &(&str, Protocol)| Place {
            address: address.parse().expect("literal"),
            protocol: *protocol,
            takes_both: false,
        };
        of.iter().map(place).collect()
    };
    let web = publication("web.shop", "0.0.0.0:80");
    let name = web.name.clone();
    let prefix = name.prefix();
    services.set_listening(sockets(&[("0.0.0.0:80", Protocol::Tcp), ("0.0.0.0:80", Protocol::Udp)]));
    services.publish(web.clone()).expect("published");
    services.set_listening(sockets(&[("0.0.0.0:80", Protocol::Udp)]));
    assert!(host.core.ended.lock().is_empty(), "datagrams are taken still");
    services.set_listening(sockets(&[("0.0.0.0:80", Protocol::Tcp)]));
    assert_eq!(std::mem::take(&mut *host.core.ended.lock()), [prefix]);
    services.set_listening(sockets(&[("0.0.0.0:80", Protocol::Udp)]));
    services.withdraw(&name, None).await.expect("withdrawn");
    services.set_listening(Listening::default());
    assert!(host.core.ended.lock().is_empty(), "it was withdrawn before, and its flows were to go on");
    let mut found = publication("web.shop", "0.0.0.0:53").listener;
    (found.origin, found.protocol) = (Origin::Socket, Some(Protocol::Udp));
    assert!(services.follow(&name, &[found], TERMS).expect("served"));
    assert!(services.follow(&name, &[], TERMS).expect("withdrawn"));
    assert_eq!(*host.core.ended.lock(), [prefix], "of a program");
}
