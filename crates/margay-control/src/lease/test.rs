//! A pool that is used, used up, and asked by many.

use std::sync::atomic::{AtomicU64, Ordering};

use margay_core::AssociationSetup;
use margay_core::certificate::{Revocation, TrustAnchor};
use margay_core::give_up::GiveUpAfter;
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::Prefix;
use margay_core::succession::Succession;
use margay_core::table::{Rule, RuleId, TableError};

use super::budget::NEW_BURST;
use super::*;
use crate::store::tests::store;

const ASKER: Asker = Asker::Address(IpAddr::V4(Ipv4Addr::LOCALHOST));
const OTHER: Asker = Asker::User(1000);

/// Keeps the names that are bound, and refuses to bind an address twice.
#[derive(Default)]
struct Recorder {
    bound: Mutex<HashMap<IpAddr, ServiceId>>,
    /// What programs have sent to, and where flows go.
    used: Mutex<BTreeSet<IpAddr>>,
    flows: Mutex<BTreeSet<IpAddr>>,
    walks: AtomicU64,
}

impl Recorder {
    fn get(&self, address: Ipv4Addr) -> Option<ServiceId> {
        self.bound.lock().expect("no panic").get(&address.into()).copied()
    }

    fn len(&self) -> usize {
        self.bound.lock().expect("no panic").len()
    }
}

impl SalControl for Recorder {
    fn install_association(&self, _setup: AssociationSetup) {}
    fn add_trust_anchor(&self, _anchor: TrustAnchor) {}
    fn revoke(&self, _: Revocation) {}
    fn revoke_key(&self, _: KeyRevocation) {}
    fn succeed(&self, _: &Succession) {}
    fn set_membership(&self, _chain: Vec<u8>) {}
    fn set_own_terms(&self, _: Prefix, _: Option<GiveUpAfter>) {}

    fn set_service_certificate(&self, _prefix: Prefix, _chain: Vec<u8>) {}
    fn add_rule(&self, _prefix: Prefix, _rule: Rule) -> Result<RuleId, TableError> {
        Err(TableError { limit: 0 })
    }
    fn remove_rule(&self, _id: RuleId) -> bool {
        false
    }
    fn bind_name(&self, address: IpAddr, service: ServiceId) {
        let before = self.bound.lock().expect("no panic").insert(address, service);
        assert_eq!(before, None, "{address} was bound already");
    }
    fn unbind_name(&self, address: IpAddr) {
        let before = self.bound.lock().expect("no panic").remove(&address);
        assert!(before.is_some(), "{address} was not bound");
    }
    fn take_used_leases(&self) -> BTreeSet<IpAddr> {
        std::mem::take(&mut *self.used.lock().expect("no panic"))
    }
    fn leases_of_flows(&self) -> BTreeSet<IpAddr> {
        self.walks.fetch_add(1, Ordering::SeqCst);
        self.flows.lock().expect("no panic").clone()
    }
}

/// Everything that leases stand on, with a clock that tests turn.
struct World {
    _base: tempfile::TempDir,
    store: Arc<Store>,
    now_s: Arc<AtomicU64>,
}

impl World {
    fn new() -> Self {
        let (base, store) = store();
        Self { _base: base, store: Arc::new(store), now_s: Arc::new(AtomicU64::new(1_000_000)) }
    }

    fn open(&self) -> (Arc<Leases>, Arc<Recorder>) {
        let (sal, now_s) = (Arc::new(Recorder::default()), Arc::clone(&self.now_s));
        let clock = Clock::from_fn(move || now_s.load(Ordering::SeqCst));
        let control: Arc<dyn SalControl> = Arc::<Recorder>::clone(&sal);
        (Leases::open(Arc::clone(&self.store), control, clock, Ranges::USUAL).expect("readable"), sal)
    }

    fn pass(&self, seconds: u64) {
        self.now_s.fetch_add(seconds, Ordering::SeqCst);
    }

    /// A pool that is used up: each name was used a second after the one before.
    fn fill(&self) {
        let from_s = self.now_s.load(Ordering::SeqCst);
        let all: Vec<StoredLease> = (0..POOL)
            .map(|at| StoredLease {
                address: Ranges::USUAL.name_v4(at).into(),
                service: name(&format!("s{at}.old")).service_id(),
                name: format!("s{at}.old"),
                used_s: from_s + u64::from(at),
            })
            .collect();
        self.store.write_leases(&all, &[]).expect("written");
        self.pass(u64::from(POOL) + QUARANTINE_S);
    }

    /// So many seconds of an agent that runs.
    fn live(&self, leases: &Leases, seconds: u64) {
        for _ in 0..seconds / GAP_S {
            self.pass(GAP_S);
            leases.follow_uses();
        }
        self.pass(seconds % GAP_S);
        leases.follow_uses();
    }
}

fn at(number: u32) -> Ipv4Addr {
    Ranges::USUAL.name_v4(number)
}

fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

#[test]
fn a_name_keeps_its_address_also_across_a_restart() {
    let world = World::new();
    let (leases, sal) = world.open();
    let web = leases.lease(&name("web.shop"), ASKER).expect("leased");
    let user = leases.lease(&name("web.shop/key:user42"), ASKER).expect("leased");
    assert_ne!(web, user);
    assert!([web, user].iter().all(|address| Ranges::USUAL.is_name_v4(*address)));
    assert_eq!(leases.lease(&name("WEB.shop"), ASKER).expect("leased"), web);
    assert_eq!(leases.find(&name("web.shop")), Some(web));
    assert_eq!(leases.find(&name("api.shop")), None);
    assert_eq!(leases.name_of(user).as_deref(), Some("web.shop/key:user42"));
    assert_eq!(sal.get(user), Some(name("web.shop/key:user42").service_id()), "all 256 bits");
    drop(leases);
    let (leases, sal) = world.open();
    assert_eq!((leases.len(), sal.len()), (2, 2));
    assert_eq!(sal.get(web), Some(name("web.shop").service_id()));
    assert_eq!(leases.lease(&name("web.shop"), ASKER).expect("leased"), web);
    assert_eq!(sal.len(), 2);
}

#[test]
fn another_store_gives_the_same_address_where_it_is_free() {
    let (one, other) = (World::new(), World::new());
    let address = one.open().0.lease(&name("web.shop"), ASKER).expect("leased");
    let leases = other.open().0;
    leases.lease(&name("api.shop"), ASKER).expect("leased");
    assert_eq!(leases.lease(&name("web.shop"), ASKER).expect("leased"), address);
}

#[test]
fn it_is_on_disk_before_it_is_given_out() {
    let world = World::new();
    let (leases, _sal) = world.open();
    let address = leases.lease(&name("web.shop"), ASKER).expect("leased");
    let kept = world.store.leases().expect("readable");
    assert_eq!(kept.len(), 1);
    assert_eq!((kept[0].address, kept[0].name.as_str()), (address.into(), "web.shop"));
}

#[test]
fn uses_reach_the_disk_within_a_minute_of_look_ups_and_at_the_end() {
    let world = World::new();
    let (leases, _sal) = world.open();
    let address = leases.lease(&name("web.shop"), ASKER).expect("leased");
    let used_s = || world.store.leases().expect("readable")[0].used_s;
    world.pass(59);
    leases.lease(&name("web.shop"), ASKER).expect("leased");
    assert_eq!(used_s(), 1_000_000);
    world.pass(1);
    leases.lease(&name("web.shop"), ASKER).expect("leased");
    assert_eq!(used_s(), 1_000_060);
    world.pass(5);
    leases.touch(&BTreeSet::from([address.into()]));
    drop(leases);
    assert_eq!(used_s(), 1_000_065);
}

#[test]
fn a_used_up_pool_takes_the_longest_idle_back_and_nothing_that_is_in_use() {
    let world = World::new();
    world.fill();
    let (leases, sal) = world.open();
    assert_eq!(leases.len(), POOL as usize);
    leases.touch(&BTreeSet::from([at(0).into()]));
    leases.lease(&name("s1.old"), ASKER).expect("its own");
    let web = leases.lease(&name("web.shop"), ASKER).expect("leased");
    assert_eq!(web, at(2));
    assert_eq!(leases.find(&name("s2.old")), None);
    assert_eq!(sal.get(web), Some(name("web.shop").service_id()));
    assert_eq!((leases.len(), sal.len()), (POOL as usize, POOL as usize));
    assert_eq!(leases.counts().taken_back, 1);
    drop(leases);
    let (leases, _sal) = world.open();
    assert_eq!((leases.find(&name("web.shop")), leases.find(&name("s2.old"))), (Some(web), None));
}

#[test]
fn names_in_use_are_never_taken_back() {
    let world = World::new();
    world.fill();
    let (leases, _sal) = world.open();
    leases.touch(&(0..POOL).map(|number| at(number).into()).collect());
    world.live(&leases, QUARANTINE_S - 1);
    let error = leases.lease(&name("web.shop"), ASKER).expect_err("all in use");
    assert!(matches!(error, LeaseError::Exhausted(_)), "{error}");
    assert_eq!(leases.lease(&name("s7.old"), ASKER).expect("its own"), at(7));
    let full = Fullness { pool: POOL as usize, leased: POOL as usize, idle: 0 };
    assert_eq!((leases.fullness(), leases.counts().exhausted), (full, 1));
    assert!(full.is_exhausted() && full.is_nearly_full());
    world.live(&leases, 1);
    assert!(!leases.fullness().is_exhausted());
    assert_eq!(leases.lease(&name("web.shop"), ASKER).expect("idle now"), at(0));
    assert_eq!(leases.counts(), LeaseCounts { taken_back: 1, exhausted: 1, ..LeaseCounts::default() });
}

#[test]
fn flows_and_first_packets_are_uses_also_those_of_this_moment() {
    let world = World::new();
    world.fill();
    let (leases, sal) = world.open();
    sal.flows.lock().expect("no panic").insert(at(0).into());
    let used = |number| sal.used.lock().expect("no panic").insert(at(number).into());
    used(1);
    world.live(&leases, GAP_S);
    // Nobody has looked since, but the pool is used up.
    used(2);
    assert_eq!(leases.lease(&name("one.new"), ASKER).expect("leased"), at(3));
    used(4);
    assert_eq!(leases.lease(&name("two.new"), ASKER).expect("leased"), at(5));
    sal.flows.lock().expect("no panic").insert(at(6).into());
    world.pass(WALK_AFTER_S);
    let walks = sal.walks.load(Ordering::SeqCst);
    assert_eq!(leases.lease(&name("three.new"), ASKER).expect("leased"), at(7));
    assert_eq!(leases.lease(&name("four.new"), ASKER).expect("leased"), at(8));
    assert_eq!(sal.walks.load(Ordering::SeqCst), walks + 1, "a walk over all flows is not for every name");
}

#[test]
fn flows_that_have_outlived_the_agent_hold_their_names() {
    let world = World::new();
    world.fill();
    let sal = Arc::new(Recorder::default());
    sal.flows.lock().expect("no panic").insert(at(0).into());
    let (control, now_s): (Arc<dyn SalControl>, _) = (Arc::<Recorder>::clone(&sal), Arc::clone(&world.now_s));
    let clock = Clock::from_fn(move || now_s.load(Ordering::SeqCst));
    let leases = Leases::open(Arc::clone(&world.store), control, clock, Ranges::USUAL).expect("readable");
    sal.flows.lock().expect("no panic").clear();
    assert_eq!(leases.lease(&name("web.shop"), ASKER).expect("leased"), at(1));
}

#[test]
fn a_clock_that_is_set_makes_nothing_idle() {
    let world = World::new();
    world.fill();
    let (leases, _sal) = world.open();
    leases.touch(&(0..POOL).map(|number| at(number).into()).collect());
    let refused = || matches!(leases.lease(&name("web.shop"), ASKER), Err(LeaseError::Exhausted(_)));
    world.pass(50 * QUARANTINE_S);
    assert!(refused(), "set forward");
    world.now_s.fetch_sub(80 * QUARANTINE_S, Ordering::SeqCst);
    assert!(refused(), "set back");
    world.live(&leases, QUARANTINE_S);
    assert!(!refused(), "a day later");
}

#[test]
fn who_asks_for_very_many_names_leaves_the_pool_to_others() {
    let world = World::new();
    let (leases, _sal) = world.open();
    let known = leases.lease(&name("known.shop"), ASKER).expect("leased");
    leases.making.lock().expect("no panic").spend(ASKER);
    let error = leases.lease(&name("one-more.x"), ASKER).expect_err("too many");
    assert!(matches!(error, LeaseError::TooMany { .. }), "{error}");
    assert_eq!(leases.lease(&name("known.shop"), ASKER).expect("its own"), known);
    assert!(leases.lease(&name("web.shop"), OTHER).is_ok(), "others have a budget of their own");
    assert_eq!(leases.counts(), LeaseCounts { too_many: 1, ..LeaseCounts::default() });
    world.pass(ASKER_EVERY_S);
    assert!(leases.lease(&name("one-more.x"), ASKER).is_ok());
}

#[test]
fn random_names_come_at_a_bounded_rate_and_known_ones_at_any() {
    let world = World::new();
    let (leases, _sal) = world.open();
    let random =
        |from: u64, to: u64| (from..to).filter(|n| leases.lease(&name(&format!("r{n}.x")), ASKER).is_ok()).count();
    assert_eq!(random(0, 300), NEW_BURST as usize / 2);
    let error = leases.lease(&name("web.shop"), ASKER).expect_err("too fast");
    assert!(matches!(error, LeaseError::TooFast(_)), "{error}");
    assert!(leases.lease(&name("r0.x"), ASKER).is_ok());
    world.pass(1);
    assert_eq!(random(300, 400), NEW_PER_S as usize / 2);
    world.now_s.fetch_sub(500_000, Ordering::SeqCst);
    world.pass(1);
    assert_eq!(random(400, 500), 0, "a clock that was set back gives nothing at first");
    world.pass(1);
    assert_eq!(random(500, 600), NEW_PER_S as usize / 2, "and then as ever");
}

#[test]
fn leases_of_another_range_are_dropped() {
    let world = World::new();
    let odd = |address: &str| StoredLease {
        address: address.parse().expect("literal"),
        service: name("web.shop").service_id(),
        name: "web.shop".to_owned(),
        used_s: 0,
    };
    let all = [odd("198.18.0.1"), odd("198.19.0.1"), odd("10.0.0.1"), odd("fd5a:4c00::7")];
    world.store.write_leases(&all, &[]).expect("written");
    let (leases, sal) = world.open();
    assert!(leases.is_empty() && sal.len() == 0);
    let left = world.store.leases().expect("readable");
    assert_eq!(left.iter().map(|lease| lease.address.to_string()).collect::<Vec<_>>(), ["fd5a:4c00::7"]);
}

#[test]
fn many_threads_that_ask_for_one_name_get_one_address() {
    let world = World::new();
    let (leases, sal) = world.open();
    let ask = || leases.lease(&name("web.shop"), ASKER).expect("leased");
    let all: Vec<Ipv4Addr> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(all.iter().all(|address| *address == all[0]));
    assert_eq!((leases.len(), sal.len()), (1, 1));
}
