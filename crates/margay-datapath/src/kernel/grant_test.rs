//! What the agent does with grants, upon programs and maps in namespaces of their own. It needs root; without it the
//! tests say so and pass.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{array, env, fs, process, thread};

use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, MapFlags};
use margay_core::entry::{GRANT_RECORD_LEN, GrantKey, Passage, Path as CorePath, PathId, Wire};
use margay_core::fair_table::Peer;
use margay_core::{Instant, Ranges, Tuple};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use super::*;
use crate::clock;
use crate::direct::{Direct, Route, Routing};
use crate::kernel::layout::{
    FLOW_ACCEPT, FLOW_EGRESS, FLOW_FRESH, FLOW_UNTOLD, SEEN_FIN_EGRESS, SEEN_OVER, flow_entry,
};
use crate::kernel::{Adopted, CacheConfig, WireState};
use crate::packet::TCP;
use crate::sample;

const PATH: PathId = PathId(7);
const OPENED: u32 = FLOW_EGRESS | FLOW_ACCEPT;

/// Runs `body` on a thread with network interfaces and mounts of its own; it gets a directory for pins.
pub(in crate::kernel) fn alone(name: &str, body: impl FnOnce(&Path) + Send + 'static) {
    if !nix::unistd::Uid::effective().is_root() {
        eprintln!("skipped: eBPF needs root");
        return;
    }
    let pins: PathBuf = env::temp_dir().join(format!("margay-{name}-{}", process::id()));
    fs::create_dir_all(&pins).expect("a directory");
    let inside = pins.clone();
    let result = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).expect("root may");
        let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, flags, None::<&str>).expect("root may");
        body(&inside);
        KernelCache::remove_pins(&inside);
    });
    let result = result.join();
    // Left where the test has failed.
    let _ = fs::remove_dir_all(&pins);
    result.expect("the test on its own thread passes");
}

fn cache(pins: &Path) -> KernelCache {
    let config = CacheConfig {
        sal0: "lo".to_owned(),
        interfaces: Vec::new(),
        local_addresses: Vec::new(),
        in_place: false,
        pin_dir: pins.to_owned(),
        flow_ports: 61_000..=65_535,
        ranges: Ranges::USUAL,
        boxes: false,
        flows_max: 1024,
    };
    KernelCache::open(&config).expect("the kernel takes it")
}

fn granted(id: u32, role: Role) -> Grant {
    Grant {
        id: FlowId(id),
        role,
        app: sample::tuple4(TCP),
        path: PATH,
        local_port: 61_001,
        remote_port: 61_952,
        first_flow: FlowId(1000),
        count: 5,
        until: clock::now() + Duration::from_secs(10),
        ports: array::from_fn(|flow| 30_000 + flow as u16),
        key: GrantKey([id as u8; 16]),
        record: [id as u8; GRANT_RECORD_LEN],
    }
}

/// Numbers of elements: destinations, grants of peers, grants to peers.
fn elements(cache: &KernelCache) -> [usize; 3] {
    let maps = &cache.loaded.maps;
    [&maps.offers, &maps.spares, &maps.grants].map(|map| map.keys().count())
}

/// Makes the entry of a grant's flow as the programs do, with its own five-tuple.
fn open(cache: &KernelCache, grant: &Grant, at: u16, flags: u32) -> (wire_key, Tuple) {
    let (flow, key) = layout::flows_of(grant).nth(at.into()).expect("one of its flows");
    let mut app = grant.app;
    app.destination.set_port(grant.ports[usize::from(at)]);
    let entry =
        flow_entry { flow: flow.0, generation: 1, flags, app: layout::app_key_of(&app.into()), ..Default::default() };
    put(&cache.loaded.maps.flows, key.bytes(), entry.bytes(), "flows").expect("room");
    put(&cache.loaded.maps.apps, entry.app.bytes(), key.bytes(), "flows").expect("room");
    (key, app)
}

/// Changes the entry of a flow.
fn alter(cache: &KernelCache, (key, _): &(wire_key, Tuple), change: impl FnOnce(&mut flow_entry)) {
    let mut entry = get::<flow_entry>(&cache.loaded.maps.flows, key.bytes()).expect("it is there");
    change(&mut entry);
    put(&cache.loaded.maps.flows, key.bytes(), entry.bytes(), "flows").expect("room");
}

/// What the agent is told now: flow and whether it was opened.
fn heard(cache: &KernelCache) -> Vec<(FlowId, bool)> {
    let mut heard = Vec::new();
    cache.take_events(|event| heard.push((event.flow, event.seen.opened())));
    heard
}

/// Whether both maps have a flow's part.
fn has(cache: &KernelCache, (key, app): &(wire_key, Tuple)) -> [bool; 2] {
    let maps = &cache.loaded.maps;
    let has = |map: &MapHandle, key: &[u8]| map.lookup(key, MapFlags::ANY).expect("a map").is_some();
    [has(&maps.flows, key.bytes()), has(&maps.apps, layout::app_key_of(&(*app).into()).bytes())]
}

#[test]
fn a_destination_has_room_for_eight_grants() {
    alone("offers", |pins| {
        let cache = cache(pins);
        for id in 1..=8 {
            cache.install_grant(&granted(id, Role::Initiator)).expect("room");
        }
        let full = CacheError::Full { what: "grants for one destination", limit: 8 };
        assert_eq!(cache.install_grant(&granted(9, Role::Initiator)), Err(full));
        assert_eq!(elements(&cache), [1, 8, 0], "nothing of it is left");
        let mut other = granted(10, Role::Initiator);
        other.app.destination.set_port(81);
        cache.install_grant(&other).expect("room");
        assert_eq!(elements(&cache), [2, 9, 0]);
        cache.stop_grant(FlowId(3));
        cache.stop_grant(FlowId(10));
        assert_eq!(elements(&cache), [1, 9, 0], "what was opened is still looked for");
        cache.install_grant(&granted(9, Role::Initiator)).expect("room again");
        cache.remove_grant(FlowId(3), |_| true);
        cache.remove_grant(FlowId(10), |_| true);
        assert_eq!(elements(&cache), [1, 8, 0]);
    });
}

#[test]
fn ports_are_of_one_grant_until_that_is_forgotten() {
    alone("ports", |pins| {
        let cache = cache(pins);
        cache.install_grant(&granted(1, Role::Responder)).expect("room");
        assert_eq!(cache.install_grant(&granted(2, Role::Responder)), Err(CacheError::Taken));
        let kept = || {
            let maps = &cache.loaded.maps;
            let kept = get::<grant>(&maps.grants, layout::grant_key_of(&granted(1, Role::Responder)).bytes());
            kept.map(|kept| (kept.until_ns > 0, kept.key))
        };
        assert_eq!(kept(), Some((true, [0x0101_0101_0101_0101; 2])));
        cache.stop_grant(FlowId(1));
        assert_eq!(kept(), Some((false, [0; 2])), "its key is of no use any more");
        assert_eq!(cache.install_grant(&granted(2, Role::Responder)), Err(CacheError::Taken));
        cache.remove_grant(FlowId(1), |_| true);
        assert_eq!(elements(&cache), [0, 0, 0]);
        cache.install_grant(&granted(2, Role::Responder)).expect("nobody has it");
    });
}

#[test]
fn what_nobody_knows_goes_with_its_grant() {
    for role in [Role::Initiator, Role::Responder] {
        alone("reaping", move |pins| {
            let (cache, grant) = (cache(pins), granted(1, role));
            cache.install_grant(&grant).expect("room");
            let unanswered = open(&cache, &grant, 0, OPENED | FLOW_FRESH);
            let known = open(&cache, &grant, 1, OPENED);
            let unknown = open(&cache, &grant, 2, OPENED);
            // The agent has set up the connection anew, by other flow ports.
            let again = open(&cache, &grant, 3, FLOW_FRESH);
            let mut elsewhere = again.0;
            elsewhere.path = 8;
            let app = layout::app_key_of(&again.1.into());
            put(&cache.loaded.maps.apps, app.bytes(), elsewhere.bytes(), "flows").expect("room");
            let other = open(&cache, &Grant { first_flow: FlowId(2000), ..grant }, 4, OPENED);
            cache.remove_grant(grant.id, |flow| flow == FlowId(1001));
            assert_eq!(has(&cache, &unanswered), [false, false]);
            assert_eq!(has(&cache, &known), [true, true]);
            assert_eq!(has(&cache, &unknown), [false, false]);
            assert_eq!(has(&cache, &again), [false, true]);
            assert_eq!(has(&cache, &other), [true, true], "in its place, and none of its flows");
            assert_eq!(elements(&cache), [0, 0, 0]);
        });
    }
}

#[test]
fn a_survey_says_which_flows_are_answered_and_which_are_over() {
    const FLOWS: [(u16, u32, u32); 6] = [
        (0, OPENED | FLOW_UNTOLD | FLOW_FRESH, 0),
        (1, OPENED | FLOW_UNTOLD, 0),
        (63, OPENED | FLOW_UNTOLD, SEEN_OVER),
        (64, OPENED | FLOW_UNTOLD, SEEN_OVER),
        // The agent knows it, and is told of its end by itself.
        (65, OPENED, SEEN_OVER),
        (127, OPENED | FLOW_UNTOLD, SEEN_FIN_EGRESS),
    ];
    for role in [Role::Initiator, Role::Responder] {
        alone("survey", move |pins| {
            let (cache, grant) = (cache(pins), Grant { count: 128, ..granted(1, role) });
            cache.install_grant(&grant).expect("room");
            for (at, flags, seen) in FLOWS {
                alter(&cache, &open(&cache, &grant, at, flags), |entry| entry.seen = seen);
            }
            let other = Grant { first_flow: FlowId(3000), ..grant };
            open(&cache, &other, 7, OPENED | FLOW_UNTOLD);
            let answered = 1 << 1 | 1 << 63 | 1 << 64 | 1 << 65 | 1 << 127;
            let over = 1 << 63 | 1 << 64;
            assert_eq!(cache.survey_grant(grant.id, u128::MAX), Survey { answered, over });
            let one = 1 << 64 | 1 << 7 | 1;
            assert_eq!(cache.survey_grant(grant.id, one), Survey { answered: 1 << 64, over: 1 << 64 });
            assert_eq!(cache.survey_grant(FlowId(2), u128::MAX), Survey::default());
            assert_eq!(heard(&cache), []);
        });
    }
}

#[test]
fn the_agent_is_told_of_flows_that_it_asks_for() {
    for role in [Role::Initiator, Role::Responder] {
        alone("telling", move |pins| {
            let (cache, grant) = (cache(pins), Grant { count: 128, ..granted(1, role) });
            cache.install_grant(&grant).expect("room");
            let flows: Vec<_> =
                [1, 2, 64, 127].map(|at| open(&cache, &grant, at, OPENED | FLOW_UNTOLD)).into_iter().collect();
            open(&cache, &grant, 3, OPENED | FLOW_UNTOLD | FLOW_FRESH);
            cache.tell_of_flows(grant.id, 1 << 1 | 1 << 3 | 1 << 64);
            assert_eq!(heard(&cache), [(FlowId(1001), true), (FlowId(1064), true)], "who was answered");
            cache.tell_of_flows(grant.id, 1 << 127);
            assert_eq!(heard(&cache), [(FlowId(1127), true)]);
            let untold = |at: usize| {
                let entry = get::<flow_entry>(&cache.loaded.maps.flows, flows[at].0.bytes()).expect("it is there");
                entry.flags & FLOW_UNTOLD != 0
            };
            assert_eq!([0, 1, 2, 3].map(untold), [false, true, false, false]);
            cache.tell_of_all();
            let all: Vec<_> = heard(&cache).into_iter().map(|(flow, _)| flow.0).collect();
            assert_eq!(all, [1001, 1002, 1064, 1127], "again: the word may have been lost");
        });
    }
}

#[test]
fn what_the_agent_knows_by_itself_it_hears_the_end_of() {
    alone("knowing", |pins| {
        let (cache, grant) = (cache(pins), granted(1, Role::Responder));
        cache.install_grant(&grant).expect("room");
        let opened = open(&cache, &grant, 2, OPENED | FLOW_UNTOLD | FLOW_FRESH);
        alter(&cache, &opened, |entry| entry.seen = 4);
        let flow = WireFlow {
            flow: FlowId(1002),
            generation: 1,
            app: opened.1.into(),
            path: PATH,
            local_port: grant.local_port,
            remote_port: grant.remote_port + 2,
            egress: true,
            accept: true,
            by_sal0: false,
            of_socket: false,
            delta: None,
        };
        cache.install(&flow).expect("its own place");
        let entry = get::<flow_entry>(&cache.loaded.maps.flows, opened.0.bytes()).expect("it is there");
        assert_eq!((entry.flags, heard(&cache)), (OPENED, vec![(FlowId(1002), false)]), "its end");
        cache.install(&WireFlow { generation: 2, ..flow }).expect("its own place");
        assert_eq!(heard(&cache), [], "once");
    });
}

#[test]
fn a_flow_that_was_opened_is_known_once_it_is_noted() {
    alone("noting", |pins| {
        let (cache, grant) = (cache(pins), granted(1, Role::Responder));
        let opened = open(&cache, &grant, 2, OPENED);
        let flow = FlowId(1002);
        assert_eq!(cache.state(flow), None);
        let noted = WireFlow {
            flow,
            generation: 1,
            app: opened.1.into(),
            path: PATH,
            local_port: grant.local_port,
            remote_port: grant.remote_port + 2,
            egress: true,
            accept: true,
            by_sal0: false,
            of_socket: false,
            delta: None,
        };
        cache.note_opened(&noted);
        assert_eq!(cache.state(flow).map(|state| (state.flow, state.fresh)), Some((flow, false)));
        assert!(cache.remove(flow).is_some());
        assert_eq!(has(&cache, &opened), [false, false]);

        // The kernel has begun another flow on the same five-tuple meanwhile: that one stays.
        let opened = open(&cache, &grant, 2, OPENED);
        cache.note_opened(&noted);
        let app = layout::app_key_of(&opened.1.into());
        let grant = Grant { first_flow: FlowId(2000), remote_port: 9, ..grant };
        let next =
            open(&cache, &Grant { app: opened.1, ports: [opened.1.destination.port(); 128], ..grant }, 0, OPENED);
        assert_eq!(next.1, opened.1);
        assert!(matches!(cache.install(&WireFlow { generation: 2, ..noted }), Err(CacheError::Taken)));
        let found = get::<wire_key>(&cache.loaded.maps.apps, app.bytes()).map(|key| key.remote_port);
        assert_eq!(found, Some(next.0.remote_port));
        assert!(cache.remove(flow).is_some());
        assert_eq!(has(&cache, &opened), [false, true]);
    });
}

#[test]
fn an_entry_that_the_kernel_has_made_since_the_start_can_be_removed() {
    alone("since", |pins| {
        drop(cache(pins));
        let started = cache(pins);
        let grant = granted(1, Role::Responder);
        started.install_grant(&grant).expect("room");
        let opened = open(&started, &grant, 0, OPENED);
        let listed = started.entries().next().expect("one");
        assert_eq!((started.remove(listed.flow), has(&started, &opened)), (None, [true, true]), "nobody was told");
        // Another flow has its place by now.
        started.remove_listed(&WireState { flow: FlowId(7), ..listed });
        assert_eq!(has(&started, &opened), [true, true]);
        started.remove_listed(&listed);
        assert_eq!((started.entries().count(), has(&started, &opened)), (0, [false, false]));
    });
}

#[test]
fn grants_end_when_the_cache_is_emptied_taken_off_or_taken_over() {
    alone("ends", |pins| {
        let first = cache(pins);
        let grant = granted(1, Role::Responder);
        let install = |cache: &KernelCache| {
            cache.install_grant(&grant).expect("room");
            cache.install_grant(&granted(2, Role::Initiator)).expect("room");
            open(cache, &grant, 0, OPENED | FLOW_FRESH)
        };
        let fresh = install(&first);
        first.clear();
        assert_eq!((elements(&first), has(&first, &fresh)), ([0, 0, 0], [false, false]));
        install(&first);
        first.detach();
        assert_eq!((elements(&first), has(&first, &fresh)), ([0, 0, 0], [false, false]));
        install(&first);
        drop(first);
        let second = cache(pins);
        assert_eq!((second.adopted(), elements(&second)), (Adopted::Kept, [0, 1, 1]), "nothing finds them any more");
        let mut kept = second.kept_grants();
        kept.sort_by_key(|grant| grant.id);
        assert_eq!(kept[0], Grant { until: Instant::ZERO, key: GrantKey::NONE, ..grant });
        let of_peer = granted(2, Role::Initiator);
        let (until, app, key) = (Instant::ZERO, kept[1].app, GrantKey::NONE);
        assert_eq!(kept[1], Grant { until, app, key, ports: [0; 128], ..of_peer });
        let entries: Vec<_> = second.entries().map(|state| (state.flow, state.fresh)).collect();
        assert_eq!((entries, second.state(FlowId(1000))), (vec![(FlowId(1000), true)], None), "nobody has answered it");
        kept.iter().for_each(|grant| second.remove_grant(grant.id, |_| false));
        assert_eq!((elements(&second), second.entries().count()), ([0, 0, 0], 0));
    });
}

/// Everything leaves by one interface.
struct OneLink;

impl Routing for OneLink {
    fn route(&self, remote: IpAddr, _: Option<IpAddr>) -> Option<Route> {
        Some(Route { local: "10.1.0.2".parse().ok()?, next_hop: remote, ifindex: 1, mtu: 1500 })
    }

    fn is_up(&self, _: IpAddr) -> bool {
        true
    }

    fn forget_neighbour(&self, _: u32, _: IpAddr) {}
}

#[test]
fn a_grant_is_given_to_the_cache_in_use_with_its_path() {
    alone("in-use", |pins| {
        let cache = Arc::new(cache(pins));
        let direct = Direct::new(Some(Box::new(OneLink))).expect("descriptors");
        let grant = granted(1, Role::Responder);
        direct.grant(&grant);
        direct.use_cache(Some(Arc::clone(&cache)));
        direct.grant(&grant);
        assert_eq!(elements(&cache), [0, 0, 0], "nothing is known of its path");
        direct.set_path(&CorePath {
            id: PATH,
            remote: "10.1.0.1:54324".parse().expect("literal"),
            local: None,
            datagram_max: 1472,
            passage: Passage::Open,
            wired: true,
            expected: None,
            watched: false,
            peer: Peer::Own,
        });
        assert_eq!(cache.paths().count(), 0, "no flow has used it");
        direct.grant(&grant);
        assert_eq!((elements(&cache), cache.paths().collect::<Vec<_>>()), ([0, 0, 1], vec![PATH]));
        direct.stop_grant(grant.id);
        assert_eq!(elements(&cache), [0, 0, 1], "its record is kept");

        let opened = open(&cache, &grant, 0, OPENED);
        let wire =
            Wire { path: PATH, local_port: 61_001, remote_port: 61_952, sending: true, accepting: true, begun: true };
        let wired = crate::table::Wired {
            app: opened.1.into(),
            generation: 1,
            wire,
            at_middlebox: false,
            is_of_named_socket: false,
            delta: None,
        };
        direct.note_opened(FlowId(1000), &wired);
        assert!(direct.state(FlowId(1000)).is_some());
        direct.remove_grant(grant.id, |_| false);
        assert_eq!(has(&cache, &opened), [false, false]);

        direct.grant(&grant);
        direct.use_cache(None);
        assert_eq!(elements(&cache), [0, 0, 0]);
    });
}

#[test]
fn a_program_that_somebody_takes_off_is_put_on_again() {
    alone("taken-off", |pins| {
        let cache = cache(pins);
        cache.attach().expect("lo takes it");
        let index = nix::net::if_::if_nametoindex("lo").expect("every namespace has it");
        let programs = || Link::open(pins.join(format!("link_sal0_{index}"))).expect("pinned");
        let is_on =
            || matches!(programs().info().expect("a link").info, LinkTypeInfo::Tcx(tcx) if tcx.ifindex == index);
        assert!(is_on());
        assert_eq!(cache.reattach(), 0, "all are in place");

        programs().detach().expect("root may");
        assert!(!is_on());
        assert_eq!(cache.reattach(), 1);
        assert!(is_on());
    });
}
