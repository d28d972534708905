use margay_control::StateDir;
use margay_core::key::HostSecret;
use margay_core::rng::Rng;
use margay_core::table::{Demux, Resolution};
use margay_core::{Config, Event, Input, Limits, Ranges};
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::agent::resolvers::tests::one;

const NOW_S: u64 = 1_700_000_000;
const OWN: [u8; 4] = [10, 1, 0, 2];

/// A core whose time stands still until it is moved.
#[derive(Clone)]
struct Still {
    sal: Arc<Mutex<Sal>>,
    now_ms: Arc<AtomicU64>,
}

impl Still {
    fn new(rules: usize) -> Self {
        let config = Config {
            host_key: HostSecret::generate(&mut Rng::new([7; 32])),
            epoch: 1,
            boot_id: [1; 16],
            router: false,
            datagram_max: 1400,
            local_addresses: vec![OWN.into()],
            ranges: Ranges::USUAL,
            limits: Limits { rules, ..Limits::default() },
        };
        let sal = Arc::new(Mutex::new(Sal::new(config, Instant::ZERO, NOW_S, [3; 32])));
        Self { sal, now_ms: Arc::new(AtomicU64::new(1000)) }
    }

    fn now(&self) -> Instant {
        Instant::from_millis(self.now_ms.load(Ordering::Relaxed))
    }

    /// Lets time pass, as the datapath does: at each deadline the core is called. Gives the rules that have ended.
    fn pass(&self, time: Duration) -> Vec<(RuleId, Expiry)> {
        let until = self.now() + time;
        let mut ended = Vec::new();
        let mut sal = self.sal.lock();
        while let Some(at) = sal.poll_timeout().filter(|at| *at <= until) {
            sal.handle(at, Input::Timeout);
            while let Some(event) = sal.poll_event() {
                if let Event::RuleExpired { id, why, .. } = event {
                    ended.push((id, why));
                }
            }
        }
        self.now_ms.store(until.micros() / 1000, Ordering::Relaxed);
        ended
    }

    fn count(&self) -> usize {
        self.sal.lock().rules().count()
    }
}

impl Core for Still {
    fn with_sal<R>(&self, act: impl FnOnce(&mut Sal, Instant) -> R) -> R {
        act(&mut self.sal.lock(), self.now())
    }
}

struct Host {
    _base: tempfile::TempDir,
    store: Arc<Store>,
    unix_s: Arc<AtomicU64>,
}

fn host() -> Host {
    let base = tempfile::tempdir().expect("a directory");
    let dir = StateDir::open(base.path().join("state")).expect("made");
    let store = Arc::new(Store::open(&dir).expect("made"));
    Host { _base: base, store, unix_s: Arc::new(AtomicU64::new(NOW_S)) }
}

impl Host {
    /// What a start of the agent makes.
    fn book(&self, core: &Still) -> RuleBook<Still> {
        let unix_s = Arc::clone(&self.unix_s);
        let clock = Clock::from_fn(move || unix_s.load(Ordering::Relaxed));
        RuleBook::open(core.clone(), Arc::clone(&self.store), clock, one("hosts")).expect("opened")
    }
}

fn order(name: &str, forward: &[&str]) -> Order {
    Order {
        name: name.parse().expect("a name"),
        forward: forward.iter().map(|text| text.parse().expect("an address")).collect(),
        all: false,
        resolver: None,
        weight: 100,
        priority: 100,
        idle: None,
        hard: None,
    }
}

fn shop() -> Vec<String> {
    vec!["shop".to_owned()]
}

#[test]
fn what_makes_no_sense_is_refused_with_its_place_and_changes_nothing() {
    let (host, core) = (host(), Still::new(100));
    let book = host.book(&core);
    let (hop, sid) = ("10.1.0.9:54324", "sid:0102030405060708/72");
    let zero = Some(Duration::ZERO);
    let many = vec![hop; 65];
    let cases = [
        (order("web.shpo", &[hop]), "authority that this host does not belong to (it belongs to: shop)"),
        (order(sid, &[hop]), "authority that this host does not belong to"),
        (order("sid:01/8", &[]), "covers names of many authorities"),
        (Order { weight: 65_536, ..order("web.shop", &[hop]) }, "--weight 65536"),
        (Order { idle: zero, ..order("web.shop", &[hop]) }, "--idle-timeout 0"),
        (Order { hard: zero, ..order("web.shop", &[]) }, "--hard-timeout 0"),
        (order("web.shop", &["10.1.0.2:54324"]), "10.1.0.2:54324 is this host itself"),
        (order("web.shop", &["127.0.0.1:54324"]), "127.0.0.1:54324 is this host itself"),
        (order("web.shop", &[hop, hop]), "10.1.0.9:54324 stands twice"),
        (order("web.shop", &many), "65 addresses"),
    ];
    for (order, part) in cases {
        let error = book.add(&order, &shop()).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    for (address, part) in [("10.0.0.1:0", "no port"), ("224.0.0.1:1", "own address"), ("198.18.0.1:1", "own address")]
    {
        assert!(check_hop(address.parse().expect("literal"), Ranges::USUAL).expect_err(part).contains(part));
    }
    assert_eq!((core.count(), host.store.rules().expect("readable").len()), (0, 0));
}

#[test]
fn rules_for_all_are_kept_as_such_and_are_not_more_than_a_packet_is_copied_to() {
    let (host, core) = (host(), Still::new(100));
    let book = host.book(&core);
    let hops: Vec<String> = (1..=9).map(|n| format!("10.1.0.{}:54324", 100 + n)).collect();
    let hops: Vec<&str> = hops.iter().map(String::as_str).collect();
    let all = |hops: &[&str]| Order { all: true, ..order("web.shop", hops) };
    let error = book.add(&all(&hops), &shop()).expect_err("nine").to_string();
    assert!(error.contains("8 next hops"), "{error}");
    assert!(book.declare(&[all(&hops[..4]), all(&hops[4..])], &shop(), true).is_err(), "nine in two orders");
    book.add(&all(&hops[..8]), &shop()).expect("eight");
    assert!(book.add(&all(&hops[8..]), &shop()).is_err(), "one more");
    book.add(&Order { priority: 50, ..all(&hops[8..]) }, &shop()).expect("of another priority");
    drop(book);
    let core = Still::new(100);
    let book = host.book(&core);
    let actions = core.with_sal(|sal, _| sal.rules().map(|(_, _, rule)| rule.action.clone()).collect::<Vec<_>>());
    assert_eq!(actions.iter().filter(|action| matches!(action, Action::ForwardAll(_))).count(), 9);
    let one = book.declare(&[order("web.shop", &hops[..1])], &shop(), false).expect("declared");
    assert_eq!(one.len(), 10, "to forward to one is another rule than to forward to all");
}

#[test]
fn what_others_made_or_nobody_has_is_not_changed() {
    let (host, core) = (host(), Still::new(100));
    let book = host.book(&core);
    let listener = Demux {
        listener: "0.0.0.0:80".parse().expect("literal"),
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: None,
        allow: Default::default(),
    };
    let rule = Rule { priority: 1, weight: 1, action: Action::Demux(listener) };
    let prefix = "web.shop".parse::<Name>().expect("a name").prefix();
    let published = core.with_sal(|sal, now| sal.add_rule(now, prefix, rule)).expect("room");
    let drop = book.add(&order("web.shop", &[]), &shop()).expect("added")[0];
    let twice = book.add(&order("web.shop", &[]), &shop()).expect_err("twice").to_string();
    assert!(twice.contains(&format!("rule {} says so already", drop.0)), "{twice}");
    let to = Amendment { forward: Some("10.1.0.9:1".parse().expect("literal")), ..Amendment::default() };
    let weight = Amendment { weight: Some(3), ..Amendment::default() };
    for (id, amendment, part) in [
        (RuleId(99), &weight, "no rule 99"),
        (published, &weight, "not the operator's own"),
        (drop, &to, "leads nowhere"),
        (drop, &weight, "no share"),
    ] {
        let error = book.change(id, amendment).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    for (id, part) in [(RuleId(99), "no rule 99"), (published, "service list")] {
        let error = book.delete(id).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(core.count(), 2);
}

#[test]
fn a_rule_that_delays_needs_a_resolver_and_outlives_it() {
    let (host, core) = (host(), Still::new(100));
    let book = host.book(&core);
    let delay = |resolver: &str| Order { resolver: Some(resolver.to_owned()), ..order("web.shop", &[]) };
    let unknown = book.add(&delay("dns"), &shop()).expect_err("unknown").to_string();
    assert!(unknown.contains("no resolver `dns` here (there is: hosts)"), "{unknown}");
    let highest = Order { priority: u32::MAX, ..delay("hosts") };
    assert!(book.add(&highest, &shop()).expect_err("too high").to_string().contains("needs a higher one"));
    let id = book.add(&delay("hosts"), &shop()).expect("added")[0];
    let is_delay = |core: &Still, resolvers: &Resolvers| {
        let action = core.with_sal(|sal, _| sal.rule(id).map(|(_, rule)| rule.action.clone()));
        action == Some(Action::Delay(resolvers.id_of("hosts")))
    };
    assert!(is_delay(&core, &book.resolvers));
    let to = Amendment { forward: Some("10.1.0.9:1".parse().expect("literal")), ..Amendment::default() };
    assert!(book.change(id, &to).expect_err("leads nowhere").to_string().contains("delays, and leads nowhere"));
    book.change(id, &Amendment { priority: Some(7), ..Amendment::default() }).expect("changed");
    // The next start, whose configuration has another resolver.
    let core = Still::new(100);
    let clock = Clock::from_fn(|| NOW_S);
    let book = RuleBook::open(core.clone(), Arc::clone(&host.store), clock, one("other")).expect("opened");
    assert!(is_delay(&core, &book.resolvers));
    assert_eq!(book.get(id).and_then(|rule| rule.resolver).as_deref(), Some("hosts"));
    book.delete(id).expect("deleted");
}

#[test]
fn a_full_table_takes_all_of_an_order_or_nothing() {
    let (host, core) = (host(), Still::new(2));
    let book = host.book(&core);
    book.add(&order("web.shop", &[]), &shop()).expect("room");
    let error = book.add(&order("api.shop", &["10.1.0.8:1", "10.1.0.9:1"]), &shop()).expect_err("full").to_string();
    assert!(error.contains("service table is full: 2 rules"), "{error}");
    assert_eq!((core.count(), host.store.rules().expect("readable").len()), (1, 1));
}

#[test]
fn a_change_keeps_the_number_and_what_was_counted() {
    let (host, core) = (host(), Still::new(100));
    let book = host.book(&core);
    let ids = book.add(&order("web.shop", &["10.1.0.8:1", "10.1.0.9:1"]), &shop()).expect("added");
    let amendment =
        Amendment { forward: Some("10.1.0.7:1".parse().expect("literal")), priority: Some(7), ..Amendment::default() };
    let before = core.with_sal(|sal, _| sal.rule_usage(ids[0]));
    book.change(ids[0], &amendment).expect("changed");
    assert_eq!(core.with_sal(|sal, _| sal.rule_usage(ids[0])), before);
    let service = "web.shop".parse::<Name>().expect("a name").service_id();
    // The other one has the higher priority now, and the changed one takes over where it goes.
    let first = |core: &Still| {
        core.with_sal(|sal, _| match sal.resolve(&service) {
            Resolution::Forward(_, hop) => hop.address.to_string(),
            other => format!("{other:?}"),
        })
    };
    assert_eq!(first(&core), "10.1.0.9:1");
    let mut changes = book.changes();
    changes.mark_unchanged();
    book.delete(ids[1]).expect("deleted");
    assert!(changes.has_changed().expect("it lives") && book.covers(&service));
    assert_eq!(first(&core), "10.1.0.7:1");
    book.delete(ids[0]).expect("deleted");
    assert!(!book.covers(&service));
}

#[test]
fn rules_end_by_themselves_and_are_forgotten() {
    let (host, core) = (host(), Still::new(100));
    let book = host.book(&core);
    let second = Duration::from_secs(1);
    let idle = book.add(&Order { idle: Some(second), ..order("web.shop", &[]) }, &shop()).expect("added")[0];
    let hard = book.add(&Order { hard: Some(3 * second), ..order("api.shop", &[]) }, &shop()).expect("added")[0];
    let ended = core.pass(2 * second);
    assert_eq!(ended, [(idle, Expiry::Idle)]);
    book.note_ended(ended[0].0, ended[0].1);
    // Nobody heard of the second one.
    assert_eq!(core.pass(2 * second), [(hard, Expiry::Hard)]);
    book.reconcile();
    let told: Vec<(RuleId, Expiry)> = book.ended().iter().map(|ended| (ended.rule.id, ended.why)).collect();
    assert_eq!(told, [(hard, Expiry::Hard), (idle, Expiry::Idle)]);
    assert_eq!((core.count(), host.store.rules().expect("readable").len()), (0, 0));
}

#[test]
fn a_restart_keeps_numbers_and_the_rest_of_the_time() {
    let (host, core) = (host(), Still::new(100));
    let minute = Duration::from_secs(60);
    let (keeps, ends, over) = {
        let book = host.book(&core);
        let keeps = book.add(&order("web.shop", &["10.1.0.9:1"]), &shop()).expect("added")[0];
        let timed = Order { hard: Some(10 * minute), idle: Some(minute), ..order("api.shop", &[]) };
        let ends = book.add(&timed, &shop()).expect("added")[0];
        let over = book.add(&Order { hard: Some(minute), ..order("mail.shop", &[]) }, &shop()).expect("added")[0];
        (keeps, ends, over)
    };
    // The agent is away for four minutes.
    host.unix_s.fetch_add(240, Ordering::Relaxed);
    let core = Still::new(100);
    let book = host.book(&core);
    assert_eq!(book.ended().first().map(|ended| ended.rule.id), Some(over));
    assert_eq!(book.get(keeps).map(|rule| rule.created_s), Some(NOW_S));
    let left = core.with_sal(|sal, _| sal.rule_ends(ends));
    assert_eq!(left.hard, Some(core.now() + 6 * minute));
    assert_eq!(left.idle, Some(core.now() + minute));
    let later = book.add(&order("new.shop", &[]), &shop()).expect("added")[0];
    assert!(later > ends, "a number came twice");
    assert_eq!(host.store.rules().expect("readable").len(), 3);
}

#[test]
fn what_is_declared_is_there_and_nothing_else() {
    let (host, core) = (host(), Still::new(100));
    let book = host.book(&core);
    let [one, two, three] = ["10.1.0.7:54324", "10.1.0.8:54324", "10.1.0.9:54324"];
    let kept = Order { hard: Some(Duration::from_secs(600)), ..order("web.shop", &[one]) };
    let ids = book.add(&kept, &shop()).expect("added");
    book.add(&order("web.shop", &[two]), &shop()).expect("added");
    book.add(&order("old.shop", &[]), &shop()).expect("added");
    host.unix_s.fetch_add(60, Ordering::Relaxed);
    let before = host.store.rules().expect("readable");
    let declared =
        [kept, Order { weight: 7, priority: 5, ..order("web.shop", &[two]) }, order("new.shop", &[three, one])];
    let looked = book.declare(&declared, &shop(), true).expect("fine");
    assert_eq!(host.store.rules().expect("readable"), before, "looking changes nothing");
    let words = |changes: &[RuleChange]| -> Vec<String> {
        let word = |change: &RuleChange| match change {
            RuleChange::Add(rule) => format!("+ {} {:?}", rule.name, rule.forward),
            RuleChange::Amend { before, after } => format!("~ {} {} -> {}", before.id.0, before.weight, after.weight),
            RuleChange::Delete(rule) => format!("- {}", rule.name),
        };
        changes.iter().map(word).collect()
    };
    let wanted = ["~ 2 100 -> 7", "+ new.shop Some(10.1.0.9:54324)", "+ new.shop Some(10.1.0.7:54324)", "- old.shop"];
    assert_eq!(words(&looked), wanted);
    let done = book.declare(&declared, &shop(), false).expect("fine");
    assert_eq!(words(&done), wanted);
    let after = host.store.rules().expect("readable");
    assert_eq!(after.iter().find(|rule| rule.id == ids[0]), before.first(), "number, age and end are as they were");
    assert_eq!((after.len(), core.count()), (4, 4));
    assert_eq!(book.declare(&declared, &shop(), false).expect("fine"), [], "said again it changes nothing");
    // What is wrong with one order leaves all as it is: what makes no sense, and what has no room.
    for bad in [order("web.shpo", &[one]), Order { weight: 7, priority: 5, ..order("web.shop", &[two]) }] {
        assert!(book.declare(&[declared[0].clone(), declared[1].clone(), bad], &shop(), false).is_err());
    }
    let (full, small) = (self::host(), Still::new(1));
    let tight = full.book(&small);
    assert!(matches!(tight.declare(&declared, &shop(), false), Err(RuleError::Table(_))));
    assert_eq!((small.count(), full.store.rules().expect("readable").len()), (0, 0));
    assert_eq!(host.store.rules().expect("readable"), after);
    book.declare(&[], &shop(), false).expect("fine");
    assert_eq!((host.store.rules().expect("readable").len(), core.count()), (0, 0));
}
