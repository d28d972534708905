//! A client, and two hosts of one name: one of these gives the client's connection to the other.
//!
//! What agents do beside the core (they freeze, carry and restore the connection) is done at once, but for the
//! transfer, which is a step of its own.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::key::HostPublic;
use margay_core::{Event, HandOver, Instant, PeerTicket, Ranges, Role, Ticket, Tuple};
use margay_wire::PORT;

use super::meeting::{address, start};
use super::{Budget, SmallWorld, Step};
use crate::host::Host;
use crate::stream::{Plan, Stream};
use crate::world::service;

const CLIENT: usize = 0;
const GIVER: usize = 1;
const TAKER: usize = 2;
const NAME: &str = "chat.shop";
const SERVICE_PORT: u16 = 80;
const TICKET: Ticket = Ticket([1; 16]);
/// After quiet: the leases of all three, and what a client needs to hear that nobody is there.
const QUIET_ROUNDS: u32 = 120;
const ROUND: Duration = Duration::from_secs(1);
/// In so many rounds each, and after the last of them, programs say something.
const TALK_EVERY: u32 = 20;
/// What a program says.
const LINE: Plan = Plan { write: 100, every: Duration::ZERO, writes: 1, closes: false };

/// What is wrong when all has been quiet for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The client's program waits for a connection that nobody has.
    Hung,
    /// A server's program has a connection that the client has not.
    Unknown,
    /// Both have it, and what programs say does not come through, or comes through wrong.
    Deaf,
    /// Nobody has it any more, and no agent was killed.
    Lost,
}

/// How far a hand-over is, as the agents have it.
pub(super) struct Handing {
    /// Events of each host that have been read.
    read: [usize; 3],
    /// Of the giver's program.
    old: Tuple,
    /// Of the taker, once the client's flow is there.
    new: Option<Tuple>,
    /// Frozen, and not carried yet.
    record: Option<Stream>,
    is_restored: bool,
    was_killed: bool,
    was_doubled: bool,
    fault: Option<Fault>,
}

impl SmallWorld {
    /// A client has a connection with the giver, and the giver has just been asked to hand it over.
    pub fn handing(budget: Budget) -> Self {
        let now = Instant::from_millis(1);
        let hosts = [CLIENT, GIVER, TAKER].map(|at| start(at, at as u8 + 10, 1, now));
        let mut world = Self::new(hosts.into(), now);
        let name = service(NAME);
        for server in [GIVER, TAKER] {
            world.hosts[server].serve_streams(name, SERVICE_PORT, Plan::LISTEN);
        }
        let key = world.hosts[GIVER].public_key();
        world.hosts[CLIENT].forward(name.into(), address(GIVER), Some(key));
        let to = SocketAddr::new(Ranges::USUAL.virtual_v6(&name).into(), SERVICE_PORT);
        world.hosts[CLIENT].connect_stream(now, to, Plan::LISTEN);
        world.pass(ROUND);

        // What a service router would know.
        let key = world.hosts[TAKER].public_key();
        world.hosts[CLIENT].forward(name.into(), address(TAKER), Some(key));
        let taker = HostPublic(world.hosts[TAKER].public_key()).id();
        let at = SocketAddr::new(address(TAKER), PORT);
        let served = world.hosts[GIVER].sal.flows().find(|flow| flow.role == Role::Responder);
        let served = served.expect("the client has connected");
        let read = [CLIENT, GIVER, TAKER].map(|host| world.hosts[host].events.len());
        world.hosts[GIVER].sal.hand_over(world.now, served.flow, TICKET, taker, at).expect("it is open");
        let now = world.now;
        world.hosts[GIVER].drain(now);
        world.collect(GIVER);
        world.handing = Some(Handing {
            read,
            old: served.app,
            new: None,
            record: None,
            is_restored: false,
            was_killed: false,
            was_doubled: false,
            fault: None,
        });
        world.begin(budget)
    }

    /// Lets time pass; everything arrives at once.
    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        self.deliver_all();
        while let Some(at) = self.next_deadline().filter(|at| *at <= until) {
            self.wait_until(at);
            self.deliver_all();
            self.do_as_agents();
        }
        self.now = until;
    }

    /// Steps of agents that are possible.
    pub(super) fn steps_of_agents(&self) -> Vec<Step> {
        let Some(handing) = &self.handing else { return Vec::new() };
        let mut steps = vec![Step::Quiet];
        steps.extend((handing.record.is_some() && handing.new.is_some()).then_some(Step::Carry));
        steps.extend((self.left.cancel > 0).then_some(Step::Cancel));
        if self.left.restart > 0 {
            steps.extend([CLIENT, GIVER, TAKER].map(Step::Restart));
        }
        steps
    }

    fn handing_mut(&mut self) -> &mut Handing {
        self.handing.as_mut().expect("such steps are of hand-overs alone")
    }

    /// The connection comes to the taker, and both agents say so to their cores.
    pub(super) fn carry(&mut self) {
        let handing = self.handing_mut();
        let (record, new) = (handing.record.take().expect("frozen"), handing.new.expect("awaited"));
        handing.is_restored = true;
        let ticket = PeerTicket { peer: HostPublic(self.hosts[CLIENT].public_key()).id(), ticket: TICKET };
        self.touch(TAKER, "restore", |host, now| {
            host.restore(record, new);
            host.sal.take_over(now, ticket);
            host.drain(now);
        });
        self.touch(GIVER, "restored", |host, now| {
            host.sal.await_word(now, TICKET);
            host.drain(now);
        });
    }

    /// The giver wants to keep its connection; nothing is carried any more.
    pub(super) fn cancel(&mut self) {
        self.handing_mut().record = None;
        self.touch(GIVER, "cancel", |host, now| {
            host.sal.cancel_hand_over(now, TICKET);
            host.drain(now);
        });
    }

    /// An agent is killed, and starts again.
    pub(super) fn restart(&mut self, host: usize) {
        let handing = self.handing_mut();
        handing.was_killed = true;
        let (old, new, is_restored) = (handing.old, handing.new, handing.is_restored);
        // A frozen connection is closed by its program, or goes with the agent that has it.
        let closed = match host {
            GIVER => Some(old),
            TAKER => new.filter(|_| is_restored),
            _ => None,
        };
        if host == TAKER {
            handing.new = None;
        }
        if host != CLIENT {
            handing.record = None;
        }
        self.touch(host, "restart", |host, now| {
            closed.iter().for_each(|tuple| host.close_frozen(tuple));
            host.kill_agent();
            host.start_agent(now, [77; 32]);
        });
        if host == TAKER {
            // The stream between both agents has ended.
            self.cancel();
        }
    }

    /// Does what the cores tell their agents.
    pub(super) fn do_as_agents(&mut self) {
        if self.handing.is_none() {
            return;
        }
        for host in [CLIENT, GIVER, TAKER] {
            let read = self.handing_mut().read[host];
            let events = self.hosts[host].events[read..].to_vec();
            self.handing_mut().read[host] = read + events.len();
            for event in events {
                if let Event::HandOver(word) = event {
                    self.hear_word(host, &word);
                }
            }
        }
        let live = self.live_ends();
        self.handing_mut().was_doubled |= live > 1;
    }

    fn hear_word(&mut self, host: usize, word: &HandOver) {
        let handing = self.handing_mut();
        let (old, new, is_restored) = (handing.old, handing.new, handing.is_restored);
        match word {
            HandOver::Fetched(_) => {
                let record = self.hosts[host].freeze(&old);
                self.handing_mut().record = record;
            }
            HandOver::Awaits { app, .. } => handing.new = Some(*app),
            HandOver::Taken(_) => self.go_on_at(host, new),
            HandOver::Dropped(_) => {
                handing.new = None;
                if is_restored {
                    new.iter().for_each(|tuple| self.hosts[host].close_frozen(tuple));
                }
            }
            HandOver::Stays(_) => {
                handing.record = None;
                self.go_on_at(host, Some(old));
            }
            HandOver::Gone(_) | HandOver::Lost(_) => {
                handing.record = None;
                self.hosts[host].close_frozen(&old);
            }
            HandOver::Refused { .. } => {}
        }
    }

    fn go_on_at(&mut self, host: usize, tuple: Option<Tuple>) {
        let Some(tuple) = tuple else { return };
        self.touch(host, "go on", |host, now| host.go_on(now, &tuple));
    }

    fn live_ends(&self) -> usize {
        [GIVER, TAKER].iter().map(|host| live_streams(&self.hosts[*host]).count()).sum()
    }

    /// Nothing is lost from here on, and no agent is killed. Programs talk now and then.
    pub(super) fn settle_hand_over(&mut self) {
        self.is_quiet = true;
        let mut before = [0; 3];
        for round in 0..QUIET_ROUNDS {
            if self.steps_of_agents().contains(&Step::Carry) {
                self.carry();
            }
            if round % TALK_EVERY == 0 {
                before = self.received();
                self.talk_by_streams();
            }
            self.pass(ROUND);
            self.do_as_agents();
        }
        let fault = self.find_fault_of_hand_over(before);
        self.handing_mut().fault = fault;
    }

    fn talk_by_streams(&mut self) {
        for host in [CLIENT, GIVER, TAKER] {
            let now = self.now;
            let open = self.hosts[host].streams.iter_mut().filter(|stream| stream.is_live());
            open.for_each(|stream| stream.follow(now, LINE));
        }
        self.wait_until(self.now);
    }

    /// What each host's programs have received.
    fn received(&self) -> [u64; 3] {
        [CLIENT, GIVER, TAKER].map(|host| self.hosts[host].streams.iter().map(|stream| stream.received).sum())
    }

    fn find_fault_of_hand_over(&self, before: [u64; 3]) -> Option<Fault> {
        let has_client = live_streams(&self.hosts[CLIENT]).count() == 1;
        let now = self.received();
        let has_heard = |host: usize| now[host] > before[host];
        let is_wrong = self.hosts.iter().flat_map(|host| &host.streams).any(|stream| stream.was_wrong);
        match (has_client, self.live_ends()) {
            (true, 0) => Some(Fault::Hung),
            (true, _) if is_wrong || !has_heard(CLIENT) || !(has_heard(GIVER) || has_heard(TAKER)) => Some(Fault::Deaf),
            (true, _) => None,
            (false, 0) => self.handing.as_ref().is_none_or(|handing| !handing.was_killed).then_some(Fault::Lost),
            (false, _) => Some(Fault::Unknown),
        }
    }

    /// Both servers' programs have had the connection at one time.
    pub fn was_doubled(&self) -> bool {
        self.handing.as_ref().is_some_and(|handing| handing.was_doubled)
    }

    /// What was wrong with the hand-over after quiet.
    pub fn fault_of_hand_over(&self) -> Option<Fault> {
        self.handing.as_ref().and_then(|handing| handing.fault)
    }

    /// After quiet, the taker's program has the connection.
    pub fn has_gone(&self) -> bool {
        self.is_quiet && live_streams(&self.hosts[TAKER]).count() == 1
    }
}

fn live_streams(host: &Host) -> impl Iterator<Item = &Stream> {
    host.streams.iter().filter(|stream| stream.is_live())
}
