//! A flow of datagrams whose stack both of its ends change at once, while an end comes to demand a seal and an agent
//! starts again.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{Cipher, FlowInfo, Instant, Ranges, Stack};
use margay_wire::{ChangeStep, Message};

use super::meeting::{address, start};
use super::{Budget, SmallWorld, Step};
use crate::program::Datagram;
use crate::world::service;

const CLIENT: usize = 0;
const SERVER: usize = 1;
const BOTH: [usize; 2] = [CLIENT, SERVER];
const CIPHERS: &[Cipher] = &[Cipher::Aes256Gcm];
const NAME: &str = "ask.shop";
const PORT: u16 = 53;
const CLIENT_PORT: u16 = 4000;
/// After quiet: what a change takes at most, and what two ends then need to tell each other of it.
const QUIET_ROUNDS: u32 = 8;
const ROUND: Duration = Duration::from_secs(1);

/// What is missing of a world on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// Whoever comes to demand a seal does not tell its core.
    Demand,
    /// What an end tells the other of the stack that it has is lost each time.
    Word,
}

/// What is done to the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orders {
    /// The stack that it has at first.
    pub from: Stack,
    /// What the client's operator orders at the beginning, and the server's.
    pub to: [Option<Stack>; 2],
    /// What is missing.
    pub lacks: Option<Lack>,
}

/// What is wrong when all has been quiet for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The two ends have different stacks.
    Apart,
    /// A change is under way still, or a session locked.
    Unfinished,
    /// What programs say does not come.
    Deaf,
}

/// The flow, as it is judged.
pub(super) struct Changing {
    lacks: Option<Lack>,
    demands: [bool; 2],
    /// Since the end demands so.
    was_sealed: [bool; 2],
    fell: bool,
    said: u32,
    fault: Option<Fault>,
}

impl SmallWorld {
    /// The two hosts have a flow, and their operators have just given their orders.
    pub fn changing(orders: Orders, budget: Budget) -> Self {
        let now = Instant::from_millis(1);
        let hosts = BOTH.map(|at| start(at, at as u8 + 10, 1, now));
        let mut world = Self::new(hosts.into(), now);
        BOTH.into_iter().for_each(|host| world.hosts[host].set_secure(CIPHERS, false));
        let demux = Demux {
            listener: SocketAddr::new([0_u16; 8].into(), PORT),
            other_family: None,
            is_looked_up: false,
            service_port: None,
            protocol: Some(17),
            allow: Allow::Any,
        };
        let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
        world.hosts[SERVER].sal.add_rule(Instant::ZERO, service(NAME).into(), rule).expect("room");
        let key = world.hosts[SERVER].public_key();
        world.hosts[CLIENT].forward(service(NAME).into(), address(SERVER), Some(key));
        world.changing = Some(Changing {
            lacks: orders.lacks,
            demands: [false; 2],
            was_sealed: [false; 2],
            fell: false,
            said: 0,
            fault: None,
        });
        world.say_by_datagrams();
        world.pass(ROUND);
        if orders.from != Stack::Plain {
            world.order(CLIENT, orders.from);
            world.pass(ROUND);
        }
        assert!(BOTH.iter().all(|host| world.flow(*host).is_some_and(|flow| flow.stack.stack == orders.from)));
        for (host, to) in BOTH.into_iter().zip(orders.to) {
            to.into_iter().for_each(|to| world.order(host, to));
        }
        world.begin(budget)
    }

    fn changing_mut(&mut self) -> &mut Changing {
        self.changing.as_mut().expect("such steps are of changes alone")
    }

    fn flow(&self, host: usize) -> Option<FlowInfo> {
        self.hosts[host].sal.flows().find(|flow| flow.peer_flow.0 != 0)
    }

    fn order(&mut self, host: usize, to: Stack) {
        let Some(flow) = self.flow(host).map(|flow| flow.flow) else { return };
        self.touch(host, ("order", to), |host, now| {
            // What is refused changes nothing.
            let _ = host.sal.set_flow_stack(now, flow, to);
            host.drain(now);
        });
    }

    /// Steps of operators that are possible.
    pub(super) fn steps_of_operators(&self) -> Vec<Step> {
        let Some(changing) = &self.changing else { return Vec::new() };
        let mut steps = vec![Step::Quiet];
        if self.left.demand > 0 {
            steps.extend(BOTH.into_iter().filter(|host| !changing.demands[*host]).map(Step::Demand));
        }
        if self.left.restart > 0 {
            steps.extend(BOTH.map(Step::Restart));
        }
        steps
    }

    /// The configuration of a host demands from here on that the flow is sealed.
    pub(super) fn demand(&mut self, host: usize) {
        let changing = self.changing_mut();
        changing.demands[host] = true;
        let tells = changing.lacks != Some(Lack::Demand);
        self.touch(host, "demand", |host, now| {
            if tells {
                host.set_secure(CIPHERS, true);
            }
            host.drain(now);
        });
    }

    /// An agent is killed, and starts again.
    pub(super) fn restart_agent(&mut self, host: usize) {
        self.touch(host, "restart", |host, now| {
            host.kill_agent();
            host.start_agent(now, [77; 32]);
        });
    }

    /// Whether a message is lost, whatever the budget says.
    pub(super) fn is_kept_back(&self, bytes: &[u8]) -> bool {
        let is_deaf = self.changing.as_ref().is_some_and(|changing| changing.lacks == Some(Lack::Word));
        is_deaf && {
            let change = Message::parse(bytes).ok().and_then(|message| message.change());
            change.is_some_and(|change| change.step == ChangeStep::Tell)
        }
    }

    /// Whoever demands a seal, and has it, has it for ever.
    pub(super) fn look_at_seals(&mut self) {
        if self.changing.is_none() {
            return;
        }
        let is_sealed = BOTH.map(|host| self.flow(host).is_some_and(|flow| flow.stack.stack.is_sealed()));
        let changing = self.changing_mut();
        for host in BOTH {
            if changing.demands[host] {
                changing.fell |= changing.was_sealed[host] && !is_sealed[host];
                changing.was_sealed[host] |= is_sealed[host];
            }
        }
    }

    /// Both programs say something.
    fn say_by_datagrams(&mut self) {
        let changing = self.changing_mut();
        changing.said += 1;
        let number = changing.said.to_be_bytes();
        let own = SocketAddr::new(Ranges::USUAL.host_v6().into(), CLIENT_PORT);
        let to = SocketAddr::new(Ranges::USUAL.virtual_v6(&service(NAME)).into(), PORT);
        let answer = self.flow(SERVER).map(|flow| Datagram { tuple: flow.app, data: number.to_vec() });
        self.touch(CLIENT, "say", |host, now| host.say(now, &Datagram::new(own, to, &number)));
        if let Some(answer) = answer {
            self.touch(SERVER, "say", |host, now| host.say(now, &answer));
        }
    }

    /// Nothing is lost from here on, and no agent is killed. Programs talk.
    pub(super) fn settle_changes(&mut self) {
        self.is_quiet = true;
        for _ in 0..QUIET_ROUNDS {
            self.say_by_datagrams();
            self.pass(ROUND);
            self.look_at_seals();
        }
        let fault = self.find_fault_of_changes();
        self.changing_mut().fault = fault;
    }

    fn find_fault_of_changes(&mut self) -> Option<Fault> {
        let flows = BOTH.map(|host| self.flow(host));
        let [Some(client), Some(server)] = &flows else { return Some(Fault::Deaf) };
        let now = self.now;
        let is_locked = BOTH.iter().any(|host| self.hosts[*host].sal.locked_sessions(now) > 0);
        let said = self.changing_mut().said.to_be_bytes();
        let has_heard = |host: &usize| self.hosts[*host].datagrams.last().is_some_and(|last| last.data == said);
        match () {
            () if client.stack.stack != server.stack.stack => Some(Fault::Apart),
            () if is_locked || flows.iter().flatten().any(|flow| flow.stack.changing_to.is_some()) => {
                Some(Fault::Unfinished)
            }
            () if !BOTH.iter().all(has_heard) => Some(Fault::Deaf),
            () => None,
        }
    }

    /// An end that demands a seal, and had it, had it no more at some time.
    pub fn fell_below_a_demand(&self) -> bool {
        self.changing.as_ref().is_some_and(|changing| changing.fell)
    }

    /// What was wrong with the flow after quiet.
    pub fn fault_of_changes(&self) -> Option<Fault> {
        self.changing.as_ref().and_then(|changing| changing.fault)
    }

    /// After quiet, both ends have this stack.
    pub fn has_become(&self, stack: Stack) -> bool {
        self.is_quiet && BOTH.iter().all(|host| self.flow(*host).is_some_and(|flow| flow.stack.stack == stack))
    }
}
