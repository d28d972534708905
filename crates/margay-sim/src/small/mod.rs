//! Small worlds for exhaustive checking: a few hosts, every order of delivery, loss, duplication, replay, time-out and
//! move.
//!
//! A state is the list of steps that led to it, played again on the cores that ship. Slow per state, and exactly the
//! code that runs on hosts. [`meeting`] is about hosts that connect, [`moving`] about hosts that move, [`handing`]
//! about a connection that goes to another host, [`changing`] about a flow whose stack is changed.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, SocketAddr};

use margay_core::{Instant, Limits};
use margay_wire::PORT;

use crate::host::{Host, Outgoing, Start};
use crate::nonces::Nonces;

pub mod changing;
pub mod handing;
pub mod meeting;
pub mod moving;

/// Where one who saw packets sends them from.
const ELSEWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 1)), PORT);

/// One step of a small world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The datagram in flight of this number arrives.
    Deliver(usize),
    /// It arrives and is in flight still.
    Duplicate(usize),
    /// It is lost.
    Lose(usize),
    /// A datagram sent earlier is seen again, from another address.
    Replay(usize),
    /// It takes so long that the next timer runs out.
    Wait,
    /// This host goes to the next of its places.
    Move(usize),
    /// This host's traffic goes unanswered, or seems to.
    Doubt(usize),
    /// A connection that is frozen comes to the host that takes it.
    Carry,
    /// The host that gives it wants to keep it.
    Cancel,
    /// The agent of this host is killed, and starts again.
    Restart(usize),
    /// The configuration of this host comes to demand sealed flows.
    Demand(usize),
    /// From now on all is quiet: nothing is lost, nothing moves, and programs talk.
    Quiet,
}

/// How much of each may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Losses.
    pub lose: usize,
    /// Duplications.
    pub duplicate: usize,
    /// Replays.
    pub replay: usize,
    /// Timers.
    pub wait: usize,
    /// Timers while something is in flight, among those.
    pub early: usize,
    /// Doubts.
    pub doubt: usize,
    /// Hand-overs that are cancelled.
    pub cancel: usize,
    /// Agents that are killed and start again.
    pub restart: usize,
    /// Demands that come late.
    pub demand: usize,
}

impl Budget {
    /// What is left of it after a step.
    fn spend(&mut self, step: Step, is_early: bool) {
        let spent = match step {
            Step::Deliver(_) | Step::Move(_) | Step::Carry | Step::Quiet => return,
            Step::Duplicate(_) => &mut self.duplicate,
            Step::Lose(_) => &mut self.lose,
            Step::Replay(_) => &mut self.replay,
            Step::Doubt(_) => &mut self.doubt,
            Step::Cancel => &mut self.cancel,
            Step::Restart(_) => &mut self.restart,
            Step::Demand(_) => &mut self.demand,
            Step::Wait => {
                self.early -= usize::from(is_early);
                &mut self.wait
            }
        };
        *spent -= 1;
    }
}

/// A datagram: from where, to where, and its bytes.
type Letter = (SocketAddr, SocketAddr, Vec<u8>);

/// A few hosts and what is between them.
pub struct SmallWorld {
    hosts: Vec<Host>,
    in_flight: Vec<Letter>,
    sent: Vec<Letter>,
    now: Instant,
    /// What is left of what may happen.
    pub left: Budget,
    /// Of all that came to each host since the start, and when. A host is what came to it: hosts of one past are in one
    /// state.
    pasts: Vec<u64>,
    is_quiet: bool,
    journeys: moving::Journeys,
    handing: Option<handing::Handing>,
    changing: Option<changing::Changing>,
}

fn hash_of(thing: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    thing.hash(&mut hasher);
    hasher.finish()
}

impl SmallWorld {
    fn new(hosts: Vec<Host>, now: Instant) -> Self {
        let pasts = vec![0; hosts.len()];
        Self {
            hosts,
            in_flight: Vec::new(),
            sent: Vec::new(),
            now,
            left: Budget::default(),
            pasts,
            is_quiet: false,
            journeys: Default::default(),
            handing: None,
            changing: None,
        }
    }

    /// From now on it is judged: what came before is the set-up.
    fn begin(mut self, budget: Budget) -> Self {
        self.sent.clone_from(&self.in_flight);
        self.pasts.fill(0);
        self.left = budget;
        self
    }

    /// Something comes to a host.
    fn touch(&mut self, host: usize, what: impl Hash, act: impl FnOnce(&mut Host, Instant)) {
        self.pasts[host] = hash_of((self.pasts[host], self.now, what));
        act(&mut self.hosts[host], self.now);
        self.collect(host);
    }

    fn collect(&mut self, host: usize) {
        for outgoing in std::mem::take(&mut self.hosts[host].outbox) {
            // Hosts of small worlds have no kernel cache: nothing goes direct.
            let Outgoing::Datagram(local, to, bytes) = outgoing else { continue };
            let Some(from) = self.hosts[host].source_for(local, to.ip()) else { continue };
            if self.is_kept_back(&bytes) {
                continue;
            }
            let letter = (SocketAddr::new(from, PORT), to, bytes);
            self.sent.push(letter.clone());
            self.in_flight.push(letter);
        }
    }

    fn arrive(&mut self, letter: &Letter) {
        let (from, to, bytes) = letter;
        if let Some(host) = self.hosts.iter().position(|host| host.addresses.contains(&to.ip())) {
            self.note_proof(host, letter);
            self.touch(host, (from, to, bytes), |host, now| host.handle_datagram(now, to.ip(), *from, bytes));
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.hosts.iter().filter_map(Host::next_deadline).min()
    }

    fn wait_until(&mut self, at: Instant) {
        self.now = self.now.max(at);
        for host in 0..self.hosts.len() {
            if self.hosts[host].next_deadline().is_some_and(|deadline| deadline <= self.now) {
                self.touch(host, "timer", Host::handle_time);
            }
        }
    }

    /// Lets everything that is in flight arrive, in order, and what it brings about.
    fn deliver_all(&mut self) {
        while !self.in_flight.is_empty() {
            let letter = self.in_flight.remove(0);
            self.arrive(&letter);
        }
    }

    /// Carries out one of [`steps`](Self::steps).
    ///
    /// # Panics
    ///
    /// On any other.
    pub fn play(&mut self, step: Step) {
        self.left.spend(step, !self.in_flight.is_empty());
        match step {
            Step::Deliver(at) => {
                let letter = self.in_flight.remove(at);
                self.arrive(&letter);
            }
            Step::Duplicate(at) => {
                let letter = self.in_flight[at].clone();
                self.arrive(&letter);
            }
            Step::Lose(at) => drop(self.in_flight.remove(at)),
            Step::Replay(at) => {
                let (_, to, bytes) = self.sent[at].clone();
                self.arrive(&(ELSEWHERE, to, bytes));
            }
            Step::Wait => self.next_deadline().into_iter().for_each(|at| self.wait_until(at)),
            Step::Move(host) => self.go_on(host),
            Step::Doubt(host) => self.doubt(host),
            Step::Carry => self.carry(),
            Step::Cancel => self.cancel(),
            Step::Restart(host) if self.changing.is_some() => self.restart_agent(host),
            Step::Restart(host) => self.restart(host),
            Step::Demand(host) => self.demand(host),
            Step::Quiet if self.handing.is_some() => self.settle_hand_over(),
            Step::Quiet if self.changing.is_some() => self.settle_changes(),
            Step::Quiet => self.settle(),
        }
        self.look_back();
        self.look_at_seals();
        self.do_as_agents();
    }

    /// Steps that are possible within what is left of the budget.
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.is_quiet {
            return steps;
        }
        for at in 0..self.in_flight.len() {
            // One of several that are the same is as good as another.
            if self.in_flight[..at].contains(&self.in_flight[at]) {
                continue;
            }
            steps.push(Step::Deliver(at));
            steps.extend((self.left.duplicate > 0).then_some(Step::Duplicate(at)));
            steps.extend((self.left.lose > 0).then_some(Step::Lose(at)));
        }
        if self.left.replay > 0 {
            steps.extend((0..self.sent.len()).map(Step::Replay));
        }
        let may_wait = self.left.wait > 0 && (self.in_flight.is_empty() || self.left.early > 0);
        steps.extend((may_wait && self.next_deadline().is_some()).then_some(Step::Wait));
        steps.extend(self.moves());
        steps.extend(self.steps_of_agents());
        steps.extend(self.steps_of_operators());
        steps
    }

    /// Equal for worlds that go on alike: the same came to each host, the same is in flight, and the same may happen.
    pub fn fingerprint(&self) -> u64 {
        let mut in_flight: Vec<_> = self.in_flight.iter().collect();
        in_flight.sort();
        let mut sent: Vec<_> = if self.left.replay > 0 { self.sent.iter().collect() } else { Vec::new() };
        sent.sort();
        hash_of((&self.pasts, in_flight, sent, self.now, self.left, self.is_quiet))
    }
}

fn new_host(address: IpAddr, start: Start, seed: u8, now: Instant) -> Host {
    // No two hosts encrypt under one key: each looks after its own.
    Host::new(address, start, now, [seed; 32], Limits::default(), Nonces::default())
}
