//! Two hosts with one association and one flow, which go from place to place, and, if there is one, their router.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use margay_core::handover::{HandoverRecord, KeyReference, Leg, LegKind};
use margay_core::{AssociationInfo, AssociationSetup, Input, Instant, Lifecycle, Moving, Ranges, Role, Tuple};
use margay_wire::{FlowId, Kind, Message, PORT, STACK_ENCAP, SessionId};

use super::{Budget, ELSEWHERE, Letter, SmallWorld, Step, new_host};
use crate::host::Start;
use crate::program::{Datagram, UDP};
use crate::world::service;

const ENDS: [usize; 2] = [0, 1];
const ROUTER: usize = 2;
/// Programs talk once in this time when all is quiet, so many times at most.
const ROUND: Duration = Duration::from_secs(1);
const ROUNDS_MAX: u32 = 40;

/// Where the hosts are at the start, and where they go: numbers of addresses for each place.
#[derive(Clone, Copy, Debug)]
pub struct Travels {
    /// Of both hosts.
    pub places: [&'static [&'static [u8]]; 2],
    /// Whether there is a router that both are registered with.
    pub router: bool,
}

/// What is wrong when all has been quiet for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// An end has lost the flow.
    Lost,
    /// The ends do not agree on where they find each other, or are still looking.
    Apart,
    /// They agree, and what programs say does not come through.
    Deaf,
}

/// Where hosts still go, and what they know of each other.
#[derive(Default)]
pub(super) struct Journeys {
    /// Places to come, of each host; the next one is the last.
    places: Vec<Vec<Vec<IpAddr>>>,
    /// Each host has one address at a time.
    is_single: bool,
    /// By end: from where the other has answered.
    proved: [BTreeSet<SocketAddr>; 2],
    /// Where each end found the other after the last step.
    known: [Option<SocketAddr>; 2],
    went_back: bool,
    fault: Option<Fault>,
}

fn address(host: usize, number: u8) -> IpAddr {
    Ipv4Addr::new(10, host as u8 + 1, 0, number).into()
}

/// Number of the association with the other end.
fn association(host: usize) -> u32 {
    100 + host as u32
}

fn flow(host: usize) -> FlowId {
    FlowId(1000 + host as u32)
}

fn tuple(host: usize) -> Tuple {
    let own = SocketAddr::new(Ranges::USUAL.host_v4().into(), 7000);
    let other = SocketAddr::new([198, 18, 1, host as u8].into(), 7000);
    Tuple { protocol: UDP, source: own, destination: other }
}

impl SmallWorld {
    /// Two hosts that share a flow; nothing is in flight.
    pub fn moving(travels: &Travels, budget: Budget) -> Self {
        let now = Instant::from_millis(1);
        let places = travels.places.iter().enumerate();
        let mut places: Vec<Vec<Vec<IpAddr>>> = places
            .map(|(host, places)| {
                let of = |place: &&[u8]| place.iter().map(|number| address(host, *number)).collect();
                places.iter().rev().map(of).collect()
            })
            .collect();
        places.extend(travels.router.then(|| vec![vec![address(ROUTER, 1)]]));
        let starts: Vec<_> = places.iter_mut().map(|places| places.pop().unwrap_or_default()).collect();
        let start = |(host, own): (usize, &Vec<IpAddr>)| {
            let start = Start {
                key_seed: [host as u8 + 1; 32],
                epoch: 1,
                boot: 1,
                router: host == ROUTER,
                ranges: Ranges::USUAL,
            };
            new_host(own[0], start, host as u8 + 10, now)
        };
        let mut world = Self::new(starts.iter().enumerate().map(start).collect(), now);
        world.associate(0, 1);
        if travels.router {
            ENDS.iter().for_each(|end| world.associate(ROUTER, *end));
        }
        ENDS.iter().for_each(|end| world.share_flow(*end));
        // Each hears of the other's addresses, and of its router.
        for (host, own) in starts.iter().enumerate() {
            let more = [own.clone(), vec![address(host, 99)]].concat();
            for addresses in [own, &more, own] {
                world.hosts[host].set_addresses(now, addresses.clone());
                world.collect(host);
                world.deliver_all();
            }
        }
        let is_single = places.iter().flatten().chain(&starts).all(|place| place.len() == 1);
        world.journeys = Journeys { places, is_single, ..Journeys::default() };
        for end in ENDS {
            world.journeys.known[end] = world.with_other(end).map(|known| known.remote);
            world.journeys.proved[end].extend(world.journeys.known[end]);
        }
        world.begin(budget)
    }

    fn associate(&mut self, one: usize, other: usize) {
        let is_registration = one == ROUTER;
        for (own, peer) in [(one, other), (other, one)] {
            let id =
                |own: usize, peer: usize| if is_registration { 10 * own + peer + 1 } else { association(own) as usize };
            let setup = AssociationSetup {
                host_key: self.hosts[peer].public_key(),
                key: [(one + other) as u8; 32],
                local_id: id(own, peer) as u32,
                remote_id: id(peer, own) as u32,
                peer_epoch: 1,
                boot_id: None,
                remote: SocketAddr::new(self.hosts[peer].address, PORT),
                hop_key: is_registration.then_some([other as u8; 16]),
                router: is_registration,
                initiator: own == one,
            };
            self.hosts[own].sal.install_association(self.now, setup);
        }
    }

    /// As if it had been handed over: nothing of how it was set up is left to go on.
    fn share_flow(&mut self, end: usize) {
        let leg = |kind, stack, tuple, flow, keys| Leg { kind, stack, tuple, flow, keys };
        let keys = KeyReference { host: self.hosts[1 - end].sal.host(), association: association(end) };
        let record = HandoverRecord {
            flow: flow(end),
            peer_flow: flow(1 - end),
            session: SessionId([1; 16]),
            key_session: None,
            service: service("talk.shop"),
            port: 0,
            source: None,
            role: if end == 0 { Role::Initiator } else { Role::Responder },
            lifecycle: Lifecycle::Established,
            authenticated: true,
            fins: (false, false),
            is_demanded: false,
            is_demanded_by_peer: false,
            is_demanded_by_rule: false,
            is_guarded: false,
            generation: 1,
            age_ms: 0,
            idle_ms: 0,
            egress: None,
            ingress: None,
            give_up_after: None,
            chain: None,
            delta: None,
            way: None,
            fetched: None,
            legs: vec![
                leg(LegKind::Sal0, 0, Some(tuple(end)), None, None),
                leg(LegKind::Stack, STACK_ENCAP, None, Some(flow(1 - end)), Some(keys)),
            ],
        };
        self.hosts[end].sal.adopt_flow(self.now, &record).expect("an empty host takes it");
        self.hosts[end].drain(self.now);
    }

    fn with_other(&self, end: usize) -> Option<AssociationInfo> {
        let other = self.hosts[1 - end].sal.host();
        self.hosts[end].sal.paths().into_iter().find(|known| known.host == other)
    }

    /// Moves and doubts that may come.
    pub(super) fn moves(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.journeys.places.is_empty() {
            return steps;
        }
        for end in ENDS {
            let has_more = self.journeys.places.get(end).is_some_and(|places| !places.is_empty());
            steps.extend(has_more.then_some(Step::Move(end)));
            steps.extend((self.left.doubt > 0).then_some(Step::Doubt(end)));
        }
        steps.push(Step::Quiet);
        steps
    }

    pub(super) fn go_on(&mut self, host: usize) {
        let place = self.journeys.places[host].pop().expect("it has somewhere to go");
        self.touch(host, &place, |host, now| host.set_addresses(now, place.clone()));
    }

    pub(super) fn doubt(&mut self, end: usize) {
        self.touch(end, "silence", |host, now| {
            host.sal.handle(now, Input::Silence { flow: flow(end), unanswered: Duration::ZERO });
            host.drain(now);
        });
    }

    /// Notes from where the other end has answered one about a move. Who sends again what it saw proves nothing.
    pub(super) fn note_proof(&mut self, host: usize, (from, _, bytes): &Letter) {
        let Ok(message) = Message::parse(bytes) else { return };
        let relayed = message.resolvable.and_then(|resolvable| resolvable.via);
        let source = relayed.unwrap_or(*from);
        if matches!(message.kind, Kind::RsynAck | Kind::RsynDone)
            && source != ELSEWHERE
            && let Some(proved) = self.journeys.proved.get_mut(host)
        {
            proved.insert(source);
        }
    }

    /// What the last step has changed.
    pub(super) fn look_back(&mut self) {
        if self.journeys.places.is_empty() {
            return;
        }
        for end in ENDS {
            let now = self.with_other(end).map(|known| known.remote);
            let before = std::mem::replace(&mut self.journeys.known[end], now);
            let is_there = |place: Option<SocketAddr>| {
                place.is_some_and(|place| self.hosts[1 - end].addresses.contains(&place.ip()))
            };
            let is_back = self.journeys.is_single && is_there(before) && !is_there(now);
            self.journeys.went_back |= is_back;
        }
    }

    /// Nothing is lost from here on, nothing moves. Programs talk; where nothing comes, the cache says so.
    pub(super) fn settle(&mut self) {
        self.is_quiet = true;
        self.deliver_all();
        for _ in 0..ROUNDS_MAX {
            let heard = self.talk();
            let until = self.now + ROUND;
            while let Some(at) = self.next_deadline().filter(|at| *at <= until) {
                self.wait_until(at);
                self.deliver_all();
            }
            self.now = until;
            if self.find_fault(heard).is_none() {
                break;
            }
            for end in ENDS.into_iter().filter(|end| !heard[*end]) {
                self.doubt(end);
                self.deliver_all();
            }
        }
        let heard = self.talk();
        self.journeys.fault = self.find_fault(heard);
    }

    /// Each end says something. Gives whether each has heard the other.
    fn talk(&mut self) -> [bool; 2] {
        for end in ENDS {
            self.hosts[end].datagrams.clear();
            let said = Datagram { tuple: tuple(end), data: b"are you there?".to_vec() };
            self.touch(end, "talk", |host, now| host.say(now, &said));
        }
        self.deliver_all();
        ENDS.map(|end| !self.hosts[end].datagrams.is_empty())
    }

    fn find_fault(&self, heard: [bool; 2]) -> Option<Fault> {
        let lives = |end: &usize| self.hosts[*end].sal.flows().any(|flow| flow.lifecycle == Lifecycle::Established);
        if !ENDS.iter().all(lives) {
            return Some(Fault::Lost);
        }
        let known = ENDS.map(|end| self.with_other(end));
        let is_right = |end: &usize| {
            let (own, other) = (known[*end].as_ref(), known[1 - end].as_ref());
            own.zip(other).is_some_and(|(own, other)| {
                let is_here = own.local.is_some_and(|local| self.hosts[*end].addresses.contains(&local));
                is_here && own.local == Some(other.remote.ip()) && own.moving == Moving::Settled && !own.is_suspected
            })
        };
        if !ENDS.iter().all(is_right) {
            return Some(Fault::Apart);
        }
        (heard != [true; 2]).then_some(Fault::Deaf)
    }

    /// An end sends to where the other has not answered.
    pub fn is_unproved(&self) -> bool {
        let is_its = |end: &usize| self.journeys.known[*end].is_none_or(|at| self.journeys.proved[*end].contains(&at));
        !ENDS.iter().all(is_its)
    }

    /// An end has left the place where the other was for one where it was not.
    pub const fn went_back(&self) -> bool {
        self.journeys.went_back
    }

    /// All is quiet, and nobody has anywhere left to go.
    pub fn have_all_moved(&self) -> bool {
        self.is_quiet && self.journeys.places.iter().all(Vec::is_empty)
    }

    /// What was wrong after quiet.
    pub const fn fault(&self) -> Option<Fault> {
        self.journeys.fault
    }
}
