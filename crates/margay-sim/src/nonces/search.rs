//! Small worlds that look for a nonce that is used twice, from seeds: a client and two hosts of one name. The client's
//! connection is handed over, which fails as often as not; its stack is changed from either end; hosts move, caches
//! forget, packets come again; agents are killed, and start again with an older copy of their state directories.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::AddAssign;
use std::time::Duration;

use margay_core::key::HostPublic;
use margay_core::{Cipher, Event, HandOver, Instant, Lifecycle, PeerTicket, Role, Stack, Ticket, Tuple};
use margay_wire::{FlowId, PORT};

use super::NonceCounts;
use crate::stream::{Plan, Stream};
use crate::world::service;
use crate::{HostId, Weather, World};

const NAME: &str = "chat.shop";
const CHAT: Plan = Plan { write: 60, every: Duration::from_millis(25), writes: u32::MAX, closes: false };
const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
/// How often what agents do beside the core is done.
const STEP: Duration = Duration::from_millis(2);
/// What a connection takes from one host to the other.
const TRANSFER: Duration = Duration::from_millis(3);
/// Disturbances in each world.
const DISTURBANCES: u32 = 10;
const TCP: u8 = 6;

/// What has happened in worlds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Worlds.
    pub worlds: u64,
    /// Packets that were encrypted.
    pub encrypted: u64,
    /// Packets among them whose nonces had been used under their keys.
    pub reused: u64,
    /// Hand-overs that failed after the connection was frozen, so that it stayed.
    pub stayed: u64,
    /// Hand-overs that were made.
    pub gone: u64,
    /// Starts of agents after the first.
    pub restarts: u64,
    /// Changes of stacks that were made.
    pub changes: u64,
}

impl AddAssign for Found {
    fn add_assign(&mut self, other: Self) {
        self.worlds += other.worlds;
        self.encrypted += other.encrypted;
        self.reused += other.reused;
        self.stayed += other.stayed;
        self.gone += other.gone;
        self.restarts += other.restarts;
        self.changes += other.changes;
    }
}

/// What goes wrong in a hand-over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    TransferLost,
    RestoreFails,
    Cancelled,
}

/// A hand-over, as the agents of source and target host have it.
struct Transfer {
    source: HostId,
    target: HostId,
    /// Of the source host's program.
    old: Tuple,
    /// Of the target host's.
    new: Option<Tuple>,
    frozen: Option<(Instant, Stream)>,
    fault: Fault,
}

struct Search {
    world: World,
    client: HostId,
    servers: [HostId; 2],
    /// How far the events of each host have been read.
    read: [usize; 3],
    transfers: HashMap<Ticket, Transfer>,
    addresses: u8,
    found: Found,
}

impl Search {
    /// `demands`: every flow is encrypted from its set-up on.
    fn new(seed: u64, demands: bool) -> Self {
        let mut world = World::new(seed, Weather::FAIR);
        world.nonces.only_count();
        let [client, one, other] = [0; 3].map(|_| world.add_host(false));
        let is_direct = world.random().is_multiple_of(2);
        for host in [client, one, other] {
            world.host(host).set_secure(&CIPHERS, demands);
            world.set_direct(host, is_direct);
        }
        let name = service(NAME);
        for server in [one, other] {
            world.host(server).serve_streams(name, 81, CHAT);
        }
        // The client's table says where both are: it goes to no address that a host of a hand-over says.
        for server in [one, other] {
            let (address, key) = (world.host(server).address, world.host(server).public_key());
            world.host(client).forward(name.into(), address, Some(key));
        }
        world.connect_stream(client, NAME, CHAT);
        world.run_for(Duration::from_millis(60));
        let weather = Weather {
            delay_max: Duration::from_millis(1 + u64::from(world.random() % 8)),
            loss_per_mille: world.random() % 60,
            duplicate_per_mille: world.random() % 60,
            ..Weather::FAIR
        };
        world.network.weather = weather;
        world.recording = Some(Vec::new());
        let found = Found { worlds: 1, ..Found::default() };
        let transfers = HashMap::new();
        Self { world, client, servers: [one, other], read: [0; 3], transfers, addresses: 10, found }
    }

    fn pick(&mut self, below: u32) -> u32 {
        self.world.random() % below
    }

    fn any_host(&mut self) -> HostId {
        HostId(self.pick(3) as usize)
    }

    /// Lets time pass, and does what agents do.
    fn pass(&mut self, time: Duration) {
        let until = self.world.now + time;
        while self.world.now < until {
            self.world.run_for(STEP);
            for id in 0..3 {
                self.hear(HostId(id));
            }
            self.carry();
        }
    }

    fn hear(&mut self, id: HostId) {
        let now = self.world.now;
        let host = &mut self.world.hosts[id.0];
        let read = std::mem::replace(&mut self.read[id.0], host.events.len());
        let mut is_touched = false;
        let events = host.events[read..].to_vec();
        for event in events {
            match event {
                Event::HandOver(word) => {
                    is_touched |= Self::hear_word(&mut self.transfers, &mut self.found, host, now, &word)
                }
                Event::StackChanged { change, .. } => {
                    self.found.changes += u64::from(change.outcome == margay_core::ChangeOutcome::Done);
                }
                _ => {}
            }
        }
        if is_touched {
            self.world.touch(id);
        }
    }

    /// True where it is of a hand-over that is known.
    fn hear_word(
        transfers: &mut HashMap<Ticket, Transfer>,
        found: &mut Found,
        host: &mut crate::Host,
        now: Instant,
        word: &HandOver,
    ) -> bool {
        let ticket = match word {
            HandOver::Awaits { ticket, .. } | HandOver::Taken(ticket) | HandOver::Dropped(ticket) => &ticket.ticket,
            HandOver::Fetched(ticket)
            | HandOver::Gone(ticket)
            | HandOver::Refused { ticket, .. }
            | HandOver::Stays(ticket)
            | HandOver::Lost(ticket) => ticket,
        };
        let Some(transfer) = transfers.get_mut(ticket) else { return false };
        match word {
            HandOver::Fetched(_) => {
                transfer.frozen = host.freeze(&transfer.old).map(|frozen| (now + TRANSFER, frozen));
            }
            HandOver::Awaits { app, .. } => transfer.new = Some(*app),
            HandOver::Taken(_) => transfer.new.iter().for_each(|new| host.go_on(now, new)),
            HandOver::Dropped(_) => transfer.new.iter().for_each(|new| host.close_frozen(new)),
            HandOver::Stays(_) => {
                transfer.frozen = None;
                host.go_on(now, &transfer.old);
                found.stayed += 1;
            }
            HandOver::Gone(_) | HandOver::Lost(_) => {
                host.close_silently(&transfer.old);
                found.gone += u64::from(matches!(word, HandOver::Gone(_)));
            }
            HandOver::Refused { .. } => {}
        }
        true
    }

    /// The connections that have come over between agents.
    fn carry(&mut self) {
        let now = self.world.now;
        let peer = HostPublic(self.world.host(self.client).public_key()).id();
        for (ticket, transfer) in &mut self.transfers {
            let at_target = PeerTicket { peer, ticket: *ticket };
            let Transfer { source, target, fault, .. } = *transfer;
            let is_there = transfer.new.is_some() && transfer.frozen.as_ref().is_some_and(|(at, _)| *at <= now);
            let Some((_, frozen)) = transfer.frozen.take_if(|_| is_there) else { continue };
            match (fault, transfer.new) {
                (Fault::None, Some(new)) => {
                    self.world.host(target).restore(frozen, new);
                    self.world.host(target).sal.take_over(now, at_target);
                    self.world.host(source).sal.await_word(now, *ticket);
                }
                (fault, _) => {
                    if fault == Fault::RestoreFails {
                        self.world.host(target).sal.refuse_hand_over(now, at_target);
                    }
                    self.world.host(source).sal.cancel_hand_over(now, *ticket);
                }
            }
            self.world.touch(source);
            self.world.touch(target);
        }
    }

    /// The connection's flow at the host that serves it now.
    fn served(&self) -> Option<(HostId, FlowId, Tuple)> {
        self.servers.iter().find_map(|server| {
            let mut flows = self.world.hosts[server.0].sal.flows();
            let is_it =
                |role, protocol, life| role == Role::Responder && protocol == TCP && life == Lifecycle::Established;
            let flow = flows.find(|flow| is_it(flow.role, flow.app.protocol, flow.lifecycle))?;
            Some((*server, flow.flow, flow.app))
        })
    }

    fn hand_over(&mut self) {
        let fault = [Fault::None, Fault::TransferLost, Fault::RestoreFails, Fault::Cancelled][self.pick(4) as usize];
        let Some((source, flow, old)) = self.served() else { return };
        let target = self.servers[usize::from(self.servers[0] == source)];
        let ticket = Ticket([self.transfers.len() as u8 + 1; 16]);
        let now = self.world.now;
        let key = HostPublic(self.world.host(target).public_key()).id();
        let Some(at) = self.world.host(target).addresses.first().copied() else { return };
        let at = SocketAddr::new(at, PORT);
        if self.world.host(source).sal.hand_over(now, flow, ticket, key, at).is_err() {
            return;
        }
        self.transfers.insert(ticket, Transfer { source, target, old, new: None, frozen: None, fault });
        self.world.touch(source);
        if fault == Fault::Cancelled {
            let wait = Duration::from_millis(u64::from(self.pick(12)));
            self.pass(wait);
            let now = self.world.now;
            self.world.host(source).sal.cancel_hand_over(now, ticket);
            self.world.touch(source);
        }
    }

    fn change_stack(&mut self) {
        let Some((server, flow, _)) = self.served() else { return };
        let to = if self.pick(3) == 0 { Stack::Plain } else { Stack::Secure };
        let is_open = |role| role == Role::Initiator;
        let of_client = self.world.hosts[self.client.0]
            .sal
            .flows()
            .find(|flow| is_open(flow.role) && flow.app.protocol == TCP && flow.lifecycle == Lifecycle::Established);
        let (host, flow) = match of_client.filter(|_| self.pick(2) == 0) {
            Some(flow) => (self.client, flow.flow),
            None => (server, flow),
        };
        let now = self.world.now;
        // It may be on its way to another host, or demanded: then it is refused.
        let _ = self.world.host(host).sal.set_flow_stack(now, flow, to);
        self.world.touch(host);
    }

    fn move_host(&mut self) {
        let host = self.any_host();
        self.addresses += 1;
        let address = IpAddr::from([10, 9, host.0 as u8, self.addresses]);
        self.world.set_addresses(host, vec![address]);
    }

    /// An agent is killed and starts again, perhaps with an older copy of its state directory.
    fn restart(&mut self) {
        let host = self.any_host();
        for (ticket, transfer) in &mut self.transfers {
            if transfer.source == host {
                transfer.frozen = None;
                self.world.hosts[host.0].close_frozen(&transfer.old);
            }
            if transfer.target == host {
                transfer.new.iter().for_each(|new| self.world.hosts[host.0].close_frozen(new));
                if transfer.frozen.take().is_some() {
                    // The stream between the two agents has ended.
                    let now = self.world.now;
                    self.world.hosts[transfer.source.0].sal.cancel_hand_over(now, *ticket);
                }
            }
        }
        self.world.kill_agent(host);
        let pause = Duration::from_millis(u64::from(self.pick(60)));
        self.pass(pause);
        if self.pick(2) == 0 {
            self.world.host(host).restore_state_directory();
        }
        self.world.start_agent(host);
        self.found.restarts += 1;
    }

    /// Somebody sends again what was on the wire.
    fn replay(&mut self) {
        for _ in 0..8 {
            let Some(count) = self.world.recording.as_ref().map(|seen| seen.len() as u32).filter(|count| *count > 0)
            else {
                return;
            };
            let at = self.pick(count) as usize;
            let seen = self.world.recording.as_ref().and_then(|seen| seen.get(at)).cloned();
            seen.into_iter().for_each(|(from, to, bytes)| self.world.inject(from, to, bytes));
        }
    }

    /// A program whose connection is lost has another one.
    fn connect_again(&mut self) {
        if !self.world.hosts[self.client.0].streams.iter().any(Stream::is_live) {
            self.world.connect_stream(self.client, NAME, CHAT);
        }
    }

    fn disturb(&mut self) {
        match self.pick(12) {
            0..=3 => self.hand_over(),
            4 | 5 => self.change_stack(),
            6 => self.move_host(),
            7..=9 => self.restart(),
            10 => {
                let host = self.any_host();
                self.world.host(host).cache.clear();
            }
            _ => self.replay(),
        }
        let pause = Duration::from_millis(20 + u64::from(self.pick(100)));
        self.pass(pause);
        self.connect_again();
    }

    fn finish(mut self) -> Found {
        for _ in 0..DISTURBANCES {
            self.disturb();
        }
        let NonceCounts { encrypted, reused, .. } = self.world.nonces.counts();
        Found { encrypted, reused, ..self.found }
    }
}

/// The worlds of a seed: one whose hosts demand that every flow is encrypted, and one in which that is ordered.
pub fn run(seed: u64) -> Found {
    let mut found = Found::default();
    for demands in [true, false] {
        found += Search::new(seed, demands).finish();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_sees_what_it_is_for() {
        let mut found = Found::default();
        for seed in 0..6 {
            found += run(seed);
        }
        assert_eq!((found.worlds, found.reused), (12, 0), "{found:?}");
        assert!(found.encrypted > 500 && found.stayed > 3 && found.gone > 3, "{found:?}");
        assert!(found.restarts > 12 && found.changes > 3, "{found:?}");
    }

    /// An agent that starts in an epoch that its keys were used in: a copy of the runtime directory was restored, too.
    #[test]
    fn an_epoch_that_comes_again_is_found() {
        let mut reused = 0;
        for seed in 0..6 {
            let mut search = Search::new(seed, true);
            for host in [search.client, search.servers[0]] {
                search.pass(Duration::from_millis(100));
                search.world.kill_agent(host);
                search.world.host(host).forget_epoch();
                search.world.start_agent(host);
            }
            search.pass(Duration::from_millis(300));
            reused += search.world.nonces.counts().reused;
        }
        assert!(reused > 0);
    }
}
