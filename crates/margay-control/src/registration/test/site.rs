//! Routers of sites: what their hosts serve is announced to other routers, which check the right to it.

use margay_core::key::HostId;
use margay_core::table::NextHop;

use super::*;
use crate::registration::proto::{self, from_host, from_router};
use crate::registration::stream::{self, Reader, Writer};
use crate::wide_area::{Announcement, Policy, Preference, Scope, Stage, WideArea};

/// A router of a site.
struct Site {
    party: Party,
    area: Arc<WideArea>,
    at: Arc<Router>,
}

fn area(party: &Party, policy: Policy) -> Arc<WideArea> {
    let core = Arc::clone(&party.core) as Arc<dyn SalControl>;
    WideArea::new(policy, party.local.host_key.public(), party.keyring.clone(), core, clock())
}

fn policy(site: &str) -> Policy {
    Policy { site: site.to_owned(), weight: 100, ..Policy::default() }
}

async fn site_of(party: Party, policy: Policy) -> Site {
    let area = area(&party, policy);
    let config = RouterConfig {
        listen: "127.0.0.1:0".parse().expect("literal"),
        lease_ms: 60_000,
        heartbeat_ms: 15_000,
        cluster: None,
    };
    let (store, core) = (Arc::clone(&party.store), Arc::clone(&party.core) as Arc<dyn SalControl>);
    let (local, keyring) = (party.local.clone(), party.keyring.clone());
    let at = Router::start(config, local, keyring, store, core, clock(), Some(Arc::clone(&area)));
    Site { at: at.await.expect("started"), party, area }
}

/// The first router, which has made the authority.
async fn hub() -> Site {
    let party = party(1, "hub");
    party.keyring.create_authority("shop").expect("made");
    site_of(party, policy("hub")).await
}

/// A router that signs for the hub's authority, too.
fn signer(seed: u8, hub: &Site) -> Party {
    let party = party(seed, "signer");
    let file = "state/keys/authority/shop.key";
    std::fs::copy(hub.party._base.path().join(file), party._base.path().join(file)).expect("copied");
    party
}

impl Site {
    fn secret(&self, seed: u8, grants: &[Prefix]) -> TokenSecret {
        self.party.token(1, seed, grants.to_vec())
    }

    /// This site's router joins another one.
    async fn join(&self, other: &Site, secret: TokenSecret) -> Home {
        let authority = other.party.keyring.authority("shop").expect("readable").expect("made");
        let config = HomeConfig {
            router_address: other.at.local_address().to_string(),
            router_key: other.party.local.host_key.public(),
            authority: "shop".to_owned(),
            authority_key: authority.key.public(),
            secret: Some(secret),
        };
        let (store, core) = (Arc::clone(&self.party.store), Arc::clone(&self.party.core) as Arc<dyn SalControl>);
        let home = Home::start(
            config,
            self.party.local.clone(),
            store,
            core,
            clock(),
            Some(Arc::default()),
            Some(Arc::clone(&self.area)),
        );
        await_phase(&home, Phase::Connected).await;
        home
    }

    fn count(&self, act: &str) -> u64 {
        self.area.counts().into_iter().find(|(known, _)| *known == act).expect("such a count").1
    }

    /// Where rules for a service of others lead.
    fn hops(&self, name: &str) -> Vec<NextHop> {
        let forward = |rule: Rule| match rule.action {
            Action::Forward(hop) => hop,
            other => panic!("{other:?}"),
        };
        self.party.core.rules_of(&service(name)).into_iter().map(forward).collect()
    }

    fn id(&self) -> HostId {
        self.party.local.host_key.public().id()
    }

    async fn refusals(&self) -> Vec<String> {
        self.at.write_audit().await;
        let log = self.party.store.audit(100).expect("readable").into_iter();
        log.filter(|entry| entry.act == "announce-refused").map(|entry| entry.detail).collect()
    }
}

fn service(name: &str) -> Prefix {
    name.parse::<Name>().expect("literal").service_prefix()
}

fn everything() -> [Prefix; 1] {
    [Prefix::of_authority("shop")]
}

/// A host of a site that serves names.
async fn host(site: &Site, seed: u8, names: &[&str]) -> (Party, Home) {
    let host = party(seed, "host");
    let home = host.join(&site.party, &site.at, Some(site.secret(seed, &everything())));
    await_phase(&home, Phase::Connected).await;
    for name in names {
        home.register(registration(name, 100));
        until("registration", || state_of(&home, name) == "registered").await;
    }
    (host, home)
}

#[tokio::test]
async fn names_are_announced_while_a_host_of_the_site_serves_them_and_churn_inside_is_not_heard() {
    let hub = hub().await;
    let berlin = site_of(signer(2, &hub), policy("berlin")).await;
    let home = berlin.join(&hub, hub.secret(20, &everything())).await;
    let (_first, one) = host(&berlin, 3, &["web.shop", "db.shop"]).await;
    until("announcements", || hub.hops("web.shop").len() + hub.hops("db.shop").len() == 2).await;
    assert_eq!(hub.hops("web.shop")[0].host, Some(berlin.id()));
    assert!(!hub.hops("web.shop")[0].router, "it is below");
    assert_eq!(hub.area.names(None).len(), 2, "with their names");
    let web = "web.shop".parse::<Name>().expect("literal").prefix();
    let (_second, other) = host(&berlin, 4, &["web.shop"]).await;
    for _ in 0..5 {
        one.withdraw(web).expect("registered").await;
        one.register(registration("web.shop", 7));
        until("registration", || state_of(&one, "web.shop") == "registered").await;
    }
    assert_eq!((berlin.count("sent"), hub.count("received"), hub.count("retraction_received")), (2, 2, 0));
    one.withdraw(web).expect("registered").await;
    other.withdraw(web).expect("registered").await;
    until("the retraction", || hub.hops("web.shop").is_empty()).await;
    assert_eq!(hub.hops("db.shop").len(), 1);
    home.stop().await;
    until("the end of all", || hub.hops("db.shop").is_empty()).await;
    assert!(hub.area.neighbours().is_empty() && berlin.area.neighbours().is_empty());
    hub.at.stop().await;
    berlin.at.stop().await;
}

#[tokio::test]
async fn peers_lead_to_each_other_and_not_what_they_do_not_know() {
    let hub = hub().await;
    let beside = Preference { beside: true, preference: 7, weight: 50 };
    let taken = Policy { neighbours: BTreeMap::from([("hub".to_owned(), beside)]), ..policy("berlin") };
    let berlin = site_of(signer(2, &hub), taken).await;
    let (_far, _far_served) = host(&hub, 5, &["far.shop"]).await;
    let _home = berlin.join(&hub, hub.secret(20, &everything())).await;
    until("the announcement", || berlin.hops("far.shop").len() == 1).await;
    assert!(berlin.hops("far.shop")[0].router, "it is beside");
    assert_eq!(berlin.party.core.rules_of(&service("far.shop"))[0].weight, 50);
    assert_eq!(berlin.party.core.rules_of(&Prefix::default()), [], "what is not known does not go there");
    let (_near, _near_served) = host(&berlin, 6, &["near.shop"]).await;
    until("the announcement", || hub.hops("near.shop").len() == 1).await;
    hub.at.stop().await;
    until("the end of all", || berlin.hops("far.shop").is_empty()).await;
    berlin.at.stop().await;
}

#[tokio::test]
async fn what_was_not_granted_is_refused_told_and_logged_until_it_is() {
    let hub = hub().await;
    let berlin = site_of(signer(2, &hub), policy("berlin")).await;
    let _home = berlin.join(&hub, hub.secret(20, &[service("db.shop")])).await;
    let (_host, _served) = host(&berlin, 3, &["web.shop", "db.shop"]).await;
    let declined = || {
        let neighbours = berlin.area.neighbours();
        let told = neighbours.into_iter().flat_map(|one| one.told);
        told.filter(|(_, why)| !why.is_empty()).map(|(said, why)| (said.name, why)).collect::<Vec<_>>()
    };
    until("the refusal", || declined().len() == 1).await;
    assert!(declined()[0].0 == "web.shop" && declined()[0].1.contains("granted no such names"), "{:?}", declined());
    // The two names may come one after the other.
    until("the announcement", || hub.hops("db.shop").len() == 1).await;
    assert_eq!(hub.hops("web.shop").len(), 0);
    assert!(hub.refusals().await[0].contains("granted no such names"));
    let key = MemberKey { host: berlin.party.local.host_key.public(), authority: authority_block("shop") };
    let grant = |names: &[&str]| {
        let grants: Vec<Prefix> = names.iter().map(|name| service(name)).collect();
        hub.party.store.set_grants(&key, &grants, NOW_S).expect("written").expect("a member");
        hub.at.review_grants();
    };
    grant(&["web.shop"]);
    until("the change", || hub.hops("web.shop").len() == 1 && hub.hops("db.shop").is_empty()).await;
    until("the refusal", || declined().iter().map(|(name, _)| name.as_str()).eq(["db.shop"])).await;
    hub.at.stop().await;
    berlin.at.stop().await;
}

#[tokio::test]
async fn a_router_without_the_authoritys_key_is_proved_by_the_one_that_granted() {
    let hub = hub().await;
    let world = site_of(signer(7, &hub), policy("world")).await;
    let _up = hub.join(&world, world.secret(21, &everything())).await;
    let berlin = site_of(party(2, "berlin"), policy("berlin")).await;
    let _home = berlin.join(&hub, hub.secret(20, &[service("web.shop")])).await;
    let name: Name = "web.shop".parse().expect("literal");
    let own = |name: &Name| own_service(berlin.id(), "berlin", "127.0.0.1:54324".parse().expect("literal"), name);
    berlin.at.set_own(vec![own(&name)]);
    until("the announcement", || world.hops("web.shop").len() == 1).await;
    let heard = &world.area.neighbours()[0].heard[0].0;
    assert_eq!((heard.sites(), heard.origin.id()), (vec!["hub", "berlin"], berlin.id()));
    // Its host was put out of the authority: whatever was signed for it holds no longer, wherever that was heard.
    let origin = berlin.party.local.host_key.public();
    world.area.revoke(Revocation {
        authority: authority_block("shop"),
        host_key: origin.0,
        until_s: u64::MAX,
        by: None,
    });
    assert!(world.hops("web.shop").is_empty());
    berlin.at.set_own(Vec::new());
    until("the retraction", || hub.hops("web.shop").is_empty()).await;
    for site in [&hub, &world, &berlin] {
        site.at.stop().await;
    }
}

/// A member that says what it likes.
struct Liar {
    party: Party,
    reader: Reader,
    writer: Writer,
}

impl Liar {
    async fn join(hub: &Site, grants: &[Prefix]) -> Self {
        let party = party(66, "liar");
        let secret = hub.secret(66, grants);
        let tcp = TcpStream::connect(hub.at.local_address()).await.expect("connected");
        let opened = stream::open(tcp, &party.local.host_key, &hub.party.local.host_key.public()).await;
        let (reader, writer) = opened.expect("met");
        let mut this = Self { party, reader, writer };
        let hello = proto::Hello {
            version: VERSION,
            secret: secret.as_bytes().to_vec(),
            authority: authority_block("shop").to_vec(),
            boot_id: vec![1; 16],
            association_id: 5,
            sal_port: 54_324,
            ..proto::Hello::default()
        };
        this.say(from_host::Body::Hello(hello)).await;
        assert!(matches!(this.hear().await, from_router::Body::Welcome(welcome) if welcome.site == "hub"));
        this
    }

    async fn say(&mut self, body: from_host::Body) {
        self.writer.write(&proto::FromHost { body: Some(body) }).await.expect("written");
    }

    /// What it is told beside signs of life.
    async fn hear(&mut self) -> from_router::Body {
        loop {
            let message: proto::FromRouter = timeout(LIMIT, self.reader.read()).await.expect("in time").expect("heard");
            match message.body.expect("words") {
                from_router::Body::Heartbeat(_) => {}
                body => return body,
            }
        }
    }

    /// Announces something, and gives why it is not taken.
    async fn announce(&mut self, said: &Announcement) -> (proto::Code, String) {
        self.say(from_host::Body::Announce(said.written())).await;
        match self.hear().await {
            from_router::Body::Declined(declined) => (declined.code(), declined.text),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn lies_about_who_may_announce_and_by_whom_are_refused_and_logged() {
    let hub = hub().await;
    let mut liar = Liar::join(&hub, &[service("web.shop")]).await;
    let (own, other) = (liar.party.local.host_key.public(), party(67, "other").local.host_key.public());
    let stage = |key: &margay_core::key::HostPublic| Stage { host: key.id(), site: "liar".to_owned() };
    let authority = hub.party.keyring.authority("shop").expect("readable").expect("made");
    let foreign = crate::keyring::Authority { key: SigningKey::generate(&mut Rng::new([9; 32])), ..authority.clone() };
    let proof = |by: &crate::keyring::Authority, name: &str, key| issue::service(by, service(name), key, NOW_S).0;
    let good = Announcement {
        prefix: service("web.shop"),
        name: String::new(),
        scope: Scope::World,
        path: vec![stage(&own)],
        weight: 1,
        origin: own,
        proof: proof(&authority, "web.shop", &own),
        not_after_s: 0,
    };
    // Before it has said whose router it is, it is none.
    liar.say(from_host::Body::Announce(good.written())).await;
    assert!(matches!(liar.hear().await, from_router::Body::Refusal(_)));
    liar.say(from_host::Body::Site(proto::Site { name: "liar".to_owned(), beside: false })).await;
    let by_way = |path: Vec<Stage>, origin, proof| Announcement { path, origin, proof, ..good.clone() };
    let old = issue::service(&authority, service("web.shop"), &own, NOW_S - 2 * issue::LIFETIME_S).0;
    let cases = [
        (Announcement { prefix: service("db.shop"), ..good.clone() }, proto::Code::NoGrant),
        (Announcement { prefix: Prefix::of_authority("shop"), ..good.clone() }, proto::Code::NoGrant),
        (Announcement { proof: proof(&foreign, "web.shop", &own), ..good.clone() }, proto::Code::Proof),
        (Announcement { proof: proof(&authority, "db.shop", &own), ..good.clone() }, proto::Code::Proof),
        (Announcement { proof: proof(&authority, "web.shop", &other), ..good.clone() }, proto::Code::Proof),
        (Announcement { proof: old, ..good.clone() }, proto::Code::Proof),
        (by_way(vec![stage(&own), stage(&other)], other, Vec::new()), proto::Code::Proof),
        (by_way(vec![stage(&other)], other, proof(&authority, "web.shop", &other)), proto::Code::Invalid),
        (
            by_way(
                vec![stage(&own), stage(&hub.party.local.host_key.public())],
                hub.party.local.host_key.public(),
                proof(&authority, "web.shop", &hub.party.local.host_key.public()),
            ),
            proto::Code::Loop,
        ),
    ];
    for (number, (said, wanted)) in cases.iter().enumerate() {
        let (code, text) = liar.announce(said).await;
        assert_eq!(code, *wanted, "number {number}: {text}");
    }
    assert_eq!((hub.count("refused"), hub.area.sizes()), (9, (1, 0)));
    assert_eq!(hub.refusals().await.len(), 9);
    // And the truth is taken, until it lies again.
    liar.say(from_host::Body::Announce(good.written())).await;
    until("the announcement", || hub.hops("web.shop").len() == 1).await;
    liar.announce(&cases[2].0).await;
    assert!(hub.hops("web.shop").is_empty());
    hub.at.stop().await;
}
