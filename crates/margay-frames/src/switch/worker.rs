//! What a switch decides, without any socket: datagrams and time in, datagrams out.

mod said;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use margay_core::Instant;
use margay_core::rng::Rng;
use margay_ensemble::{
    Config as ConnectionConfig, Counters, Csn, Event, Joining, Kind, LossDetection, Lsn, STREAMS_MAX, Switch,
};
use margay_wire::{AbortReason, Framed, FramedTerms, framed_host_number};

use super::clients::{Clients, host_at};
use super::gathered::Outgoing;
use super::member::{Due, Host, Member, Reach};
use super::placed::{Loaded, Placed};
use super::served::{Asking, IDLE_MAX, Key, Leg, LegStanding, Lost, PING_EVERY, Served};
use super::{Config, MemberAt};
use crate::Table;
use crate::batch::bytes_of;
use crate::router::Router;

/// A client waits so long at most until each member has taken the connection: one that does not is mostly dead sooner.
/// Keys of a member that came later would have been given to others.
const JOINING_MAX: Duration = Duration::from_secs(1);
/// A client is told after so long that there is no member.
const NO_MEMBER_AFTER: Duration = Duration::from_millis(800);
/// A client that waits is looked at so often.
const WELCOME_CHECK: Duration = Duration::from_millis(20);
/// Why a member is dead whose flow leads to another one.
const OTHER_HOST: &str = "another host answers in its place";
/// A member hears so much later at most what the client has of its answers: mostly with the next request.
const SACK_DELAY: Duration = Duration::from_millis(20);

/// Sums over all that there was.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    pub(super) accepted: u64,
    pub(super) failed: u64,
    /// Whose connection failed last, and why.
    pub(super) last_failure: Option<String>,
    pub(super) deaths: u64,
    pub(super) lost_requests: u64,
    pub(super) dropped: Counters,
}

/// All of a switch.
pub(super) struct Worker {
    pub(super) config: Config,
    rng: Rng,
    pub(super) members: BTreeMap<Host, Member>,
    /// How many members there were.
    lives: u32,
    /// What divides the requests of new connections in the policy's place.
    pub(super) module: Option<Placed>,
    /// How many modules there were.
    modules: u64,
    pub(super) connections: Table<Key, Served>,
    clients: Clients,
    /// Whose a connection with a member is, by its number.
    legs: Table<u64, (Key, Host)>,
    due: BTreeSet<(Instant, Key)>,
    /// Connections of which something has come, each once.
    touched: VecDeque<Key>,
    out: Outgoing,
    pub(super) totals: Totals,
}

impl Worker {
    pub(super) fn new(mut config: Config, seed: [u8; 32]) -> Self {
        let module = config.module.take();
        let mut this = Self {
            config,
            rng: Rng::new(seed),
            members: BTreeMap::new(),
            lives: 0,
            module: None,
            modules: 0,
            connections: Table::default(),
            clients: Clients::new(),
            legs: Table::default(),
            due: BTreeSet::new(),
            touched: VecDeque::new(),
            out: Outgoing::default(),
            totals: Totals::default(),
        };
        this.place(Instant::ZERO, module);
        this
    }

    /// Another module divides the requests of connections that begin from now on, or none. Those that there are keep
    /// theirs, unless the module adopts them.
    pub(super) fn place(&mut self, now: Instant, loaded: Option<Loaded>) {
        self.modules += 1;
        self.module = loaded.map(|loaded| Placed::new(now, loaded, self.modules));
        self.touched.extend(self.connections.keys());
    }

    /// Who is a member from now on.
    pub(super) fn set_members(&mut self, now: Instant, listed: &[MemberAt]) {
        let mut back = Vec::new();
        for at in listed {
            let lives = &mut self.lives;
            let member = self.members.entry(at.host).or_insert_with(|| {
                *lives = lives.wrapping_add(1);
                Member::new(now, at.clone(), *lives)
            });
            if member.at.address != at.address {
                member.turn = member.turn.wrapping_add(1);
            }
            if !member.is_listed {
                // It has come back: whatever it was before.
                (member.is_listed, member.is_leaving) = (true, false);
                back.extend(member.has_parted(now).then_some(at.host));
            }
            member.at = at.clone();
        }
        for host in back {
            self.link_failed(now, host, "it was gone, and is there again");
        }
        self.note_unlisted(now, listed);
        let hosts: Vec<Host> = self.members.keys().copied().collect();
        hosts.into_iter().for_each(|host| self.follow_activity(now, host));
        self.forget_members();
    }

    /// Who is listed no more. One that has not said that it leaves may be dead: the list can say so before its flow
    /// does.
    fn note_unlisted(&mut self, now: Instant, listed: &[MemberAt]) {
        let mut parting = Vec::new();
        for (host, member) in &mut self.members {
            if !member.is_listed || listed.iter().any(|at| at.host == *host) {
                continue;
            }
            member.is_listed = false;
            if member.reach == Reach::Up && !member.is_leaving && member.legs > 0 {
                member.parts(now);
                parting.push(*host);
            }
        }
        parting.into_iter().for_each(|host| self.say_to_member(now, host, framed_host_number(&host), &Framed::Ping));
    }

    /// An operator drains a member, or takes that back. Gives whether there is one of this name.
    pub(super) fn drain(&mut self, now: Instant, name: &str, is_drained: bool) -> bool {
        let of_name = self.members.iter_mut().filter(|(_, member)| member.at.name == name);
        let mut hosts = Vec::new();
        for (host, member) in of_name {
            member.is_drained = is_drained;
            hosts.push(*host);
        }
        hosts.iter().for_each(|host| self.follow_activity(now, *host));
        !hosts.is_empty()
    }

    /// Brings all connections in step with whether a member takes frames.
    fn follow_activity(&mut self, now: Instant, host: Host) {
        let Some(member) = self.members.get(&host) else { return };
        let is_active = member.is_active();
        let takes = member.takes();
        let keys: Vec<Key> = self.connections.keys().copied().collect();
        for key in keys {
            if takes {
                self.open_leg(now, key, host);
            } else if !is_active {
                self.drain_leg(now, key, host);
            }
            self.touch(key);
        }
    }

    /// Members that are listed no more, that no connection has anything to do with, and whose fate is known.
    fn forget_members(&mut self) {
        self.members.retain(|_, member| member.is_listed || member.is_parting() || member.legs > 0);
    }

    /// Where sockets are to lead, and which of a member's sockets that is, by host.
    pub(super) fn links(&self) -> impl Iterator<Item = (Host, SocketAddr, u64)> + '_ {
        self.members.iter().map(|(host, member)| (*host, member.at.address, member.turn))
    }

    /// Whether one of the sockets that a member has had leads to it now.
    pub(super) fn leads(&self, host: Host, turn: u64) -> bool {
        self.members.get(&host).is_some_and(|member| member.turn == turn)
    }

    /// What is to be sent since it was taken last.
    pub(super) fn take_outgoing(&mut self) -> Outgoing {
        std::mem::take(&mut self.out)
    }

    /// What was taken has been sent: its memory is for what is said next.
    pub(super) fn give_back(&mut self, sent: Outgoing) {
        if self.out.is_empty() {
            self.out = sent;
        }
    }

    fn say_to_peer(&mut self, (address, number): Key, says: &Framed<'_>) {
        self.out.to_peers.push(Some(address), &bytes_of(number, says));
    }

    /// Says something to a member that is answered, or is not.
    fn say_to_member(&mut self, now: Instant, host: Host, number: u64, says: &Framed<'_>) {
        self.out.to_members.entry(host).or_default().push(None, &bytes_of(number, says));
        if matches!(says, Framed::Hello { .. } | Framed::Ping)
            && let Some(member) = self.members.get_mut(&host)
        {
            member.asked(now);
        }
    }

    /// A datagram of a client.
    pub(super) fn take_from_peer(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) {
        let Ok((number, says)) = Framed::parse(datagram) else { return };
        let key = (from, number);
        let Some(served) = self.connections.get_mut(&key) else { return self.take_from_stranger(now, key, &says) };
        served.heard_at = now;
        match says {
            Framed::Hello { .. } if served.is_welcome => self.welcome(key),
            Framed::Data(packet) if served.is_welcome => {
                // Why it has failed is told by an event.
                let _ = served.switch.from_peer(now, packet);
            }
            Framed::LostSeen { generation } => served.lost.seen(generation),
            Framed::Ping => self.say_to_peer(key, &Framed::Pong),
            Framed::Abort { .. } | Framed::Close => return self.close(now, key),
            Framed::Hello { .. }
            | Framed::Data(_)
            | Framed::Welcome { .. }
            | Framed::Pong
            | Framed::Leaving
            | Framed::Lost { .. } => {}
        }
        self.touch(key);
    }

    /// Something of a connection that is not known.
    fn take_from_stranger(&mut self, now: Instant, key: Key, says: &Framed<'_>) {
        match says {
            Framed::Hello { protocol, .. } if *protocol != self.config.content.number() => {
                let text = self.config.content.refusal_of(*protocol);
                self.say_to_peer(key, &Framed::abort(AbortReason::OtherProtocol, &text));
            }
            // Who names the host that is meant is a switch, which takes this one for a member of its own. Each would
            // ask the next, and of two that ask each other neither would ever come to an end.
            Framed::Hello { host, .. } if *host != [0; 16] => {
                let text = "this end is a switch, and no member: an ensemble has servers, not ensembles";
                self.say_to_peer(key, &Framed::abort(AbortReason::OtherProtocol, text));
            }
            Framed::Hello { terms, .. } => self.accept(now, key, *terms),
            Framed::Data(_) | Framed::Ping => {
                self.say_to_peer(key, &Framed::abort(AbortReason::Unknown, ""));
            }
            _ => {}
        }
    }

    fn accept(&mut self, now: Instant, key: Key, hello: FramedTerms) {
        let first = self.rng.u32();
        let config = ConnectionConfig {
            connection: self.rng.u32(),
            window: self.config.window,
            peer: LossDetection::Time,
            from_peer: Csn(hello.tsn),
            to_peer: Csn(first),
            sack_delay: SACK_DELAY,
            ..ConnectionConfig::default()
        };
        let router = match &mut self.module {
            None => Ok(Router::new(self.config.content, self.config.policy)),
            Some(placed) => placed.router(now, self.config.content, host_at(key.0.ip()), &self.clients),
        };
        let router = match router {
            Ok(router) => router,
            Err(why) => return self.say_to_peer(key, &Framed::abort(AbortReason::Module, &why)),
        };
        if let Err(full) = self.clients.add(now, key.0.ip()) {
            let text = format!("the switch takes no more connections of this client now: {full}");
            return self.say_to_peer(key, &Framed::abort(AbortReason::Full, &text));
        }
        let switch = Switch::new(config, router, hello.window_bytes);
        let served = Served {
            switch,
            hello,
            first,
            legs: BTreeMap::new(),
            began: now,
            heard_at: now,
            is_welcome: false,
            lost: Lost::default(),
            module: self.module.as_ref().map(|placed| placed.number),
            offered: self.module.as_ref().map(|placed| placed.number),
            module_calls: 0,
            ping_at: now + PING_EVERY,
            refused: BTreeMap::new(),
            is_touched: false,
            due: None,
        };
        self.connections.insert(key, served);
        self.totals.accepted += 1;
        self.open_legs(now, key);
        self.touch(key);
    }

    /// What follows from what has come of a connection is said once for all of it.
    fn touch(&mut self, key: Key) {
        if let Some(served) = self.connections.get_mut(&key)
            && !std::mem::replace(&mut served.is_touched, true)
        {
            self.touched.push_back(key);
        }
    }

    fn welcome(&mut self, key: Key) {
        let Some(served) = self.connections.get_mut(&key) else { return };
        served.is_welcome = true;
        let terms = self.terms(key);
        self.say_to_peer(key, &Framed::Welcome { terms, label: "" });
    }

    /// What this switch begins with, towards a client as towards members.
    fn terms(&self, key: Key) -> FramedTerms {
        let served = self.connections.get(&key);
        let members = || served.map(|served| served.joined().count()).unwrap_or_default();
        FramedTerms {
            tsn: served.map(|served| served.first).unwrap_or_default(),
            // What members have room for they say themselves, with their first acknowledgements.
            window_bytes: u32::try_from(members().max(1) << 16).unwrap_or(u32::MAX),
            window: self.config.window,
            streams: STREAMS_MAX as u16,
        }
    }

    /// Opens the connection with each member that takes any and has none.
    fn open_legs(&mut self, now: Instant, key: Key) {
        let hosts: Vec<Host> = self.members.keys().copied().collect();
        hosts.into_iter().for_each(|host| self.open_leg(now, key, host));
    }

    /// The same with one member.
    fn open_leg(&mut self, now: Instant, key: Key, host: Host) {
        let Some(member) = self.members.get_mut(&host).filter(|member| member.takes()) else { return };
        let Some(served) = self.connections.get_mut(&key) else { return };
        let is_refused = served.refused.get(&host).is_some_and(|retry| !retry.is_due(now));
        if served.legs.contains_key(&host) || is_refused {
            return;
        }
        let number = self.rng.u64().max(1);
        let first = self.rng.u32();
        let standing = LegStanding::opening(now);
        let leg = Leg { number, first, standing, since: now, asking: Asking::default(), is_owing: false };
        served.legs.insert(host, leg);
        self.legs.insert(number, (key, host));
        member.legs += 1;
        self.say_hello(now, key, host);
    }

    fn say_hello(&mut self, now: Instant, key: Key, host: Host) {
        let Some(served) = self.connections.get(&key) else { return };
        let Some(leg) = served.legs.get(&host) else { return };
        let number = leg.number;
        let protocol = self.config.content.number();
        let terms = FramedTerms { tsn: leg.first, window_bytes: served.hello.window_bytes, ..self.terms(key) };
        self.say_to_member(now, host, number, &Framed::Hello { terms, host, protocol });
    }

    /// A member takes no new frames of a connection.
    fn drain_leg(&mut self, now: Instant, key: Key, host: Host) {
        let Some(served) = self.connections.get_mut(&key) else { return };
        match served.legs.get(&host).map(Leg::member) {
            Some(Some(id)) => served.switch.drain(now, id),
            Some(None) => self.end_leg(now, key, host),
            None => {}
        }
    }

    /// A connection has nothing to do with a member any more.
    fn end_leg(&mut self, now: Instant, key: Key, host: Host) {
        if let Some(leg) = self.take_leg(now, key, host) {
            self.say_to_member(now, host, leg.number, &Framed::Close);
        }
    }

    fn take_leg(&mut self, now: Instant, key: Key, host: Host) -> Option<Leg> {
        let leg = self.connections.get_mut(&key)?.legs.remove(&host)?;
        self.legs.remove(&leg.number);
        if let Some(member) = self.members.get_mut(&host) {
            member.owes(now, key, false);
            member.legs -= 1;
        }
        Some(leg)
    }

    /// A connection's member is dead: for this connection, at least.
    fn lose_leg(&mut self, now: Instant, key: Key, host: Host) {
        let Some(leg) = self.take_leg(now, key, host) else { return };
        let Some(served) = self.connections.get_mut(&key) else { return };
        served.refused.entry(host).or_default().failed(now, leg.member().map(|_| leg.since));
        if let Some(id) = leg.member() {
            served.switch.died(now, id);
        }
    }

    /// A datagram of a member.
    pub(super) fn take_from_member(&mut self, now: Instant, host: Host, datagram: &[u8]) {
        let Ok((number, says)) = Framed::parse(datagram) else { return };
        let leg = self.legs.get(&number).filter(|(_, of)| *of == host).map(|(key, _)| *key);
        let is_of_host = number == framed_host_number(&host);
        match (&says, leg) {
            (Framed::Abort { reason: AbortReason::Leaving, .. }, _) if is_of_host => self.leaves(now, host),
            // A flow whose instance is gone goes to another.
            (Framed::Abort { .. }, _) if is_of_host => self.link_failed(now, host, OTHER_HOST),
            (Framed::Abort { .. }, None) => {}
            (Framed::Abort { .. }, Some(key)) => self.take_from_leg(now, key, host, &says),
            (Framed::Pong, None) if is_of_host => self.note_answer(now, host),
            (_, Some(key)) => {
                self.note_heard(now, host);
                self.take_from_leg(now, key, host, &says);
            }
            (Framed::Data(_) | Framed::Ping | Framed::Leaving, None) => {
                self.say_to_member(now, host, number, &Framed::abort(AbortReason::Unknown, ""));
            }
            _ => {}
        }
        if let Some(key) = leg {
            self.touch(key);
        }
    }

    /// A member is there.
    fn note_heard(&mut self, now: Instant, host: Host) {
        let Some(member) = self.members.get_mut(&host) else { return };
        if member.heard(now) {
            tracing::info!(member = member.at.name, "a member answers");
            self.follow_activity(now, host);
        }
    }

    /// A member is there, and takes connections.
    fn note_answer(&mut self, now: Instant, host: Host) {
        let Some(member) = self.members.get_mut(&host) else { return };
        if member.answers(now) {
            tracing::info!(member = member.at.name, "a member answers");
            self.follow_activity(now, host);
        }
        self.forget_members();
    }

    fn take_from_leg(&mut self, now: Instant, key: Key, host: Host, says: &Framed<'_>) {
        let Some(served) = self.connections.get_mut(&key) else { return };
        let Some(leg) = served.legs.get_mut(&host) else { return };
        leg.asking.heard(now, matches!(says, Framed::Data(_)));
        match says {
            Framed::Welcome { terms, label } if leg.member().is_none() => {
                let Some(member) = self.members.get_mut(&host) else { return };
                (leg.since, member.joined_at) = (now, Some(now));
                join(served, host, terms, if label.is_empty() { &member.at.name } else { label });
            }
            Framed::Data(packet) => {
                if let Some(id) = leg.member() {
                    // Why it has failed is told by an event.
                    let _ = served.switch.from_member(now, id, packet);
                }
            }
            Framed::Ping => {
                let number = leg.number;
                self.say_to_member(now, host, number, &Framed::Pong);
            }
            Framed::Leaving => self.leaves(now, host),
            Framed::Abort { reason: AbortReason::OtherHost, .. } => self.link_failed(now, host, OTHER_HOST),
            Framed::Abort { reason: AbortReason::OtherProtocol, text } => self.misfits(now, host, text),
            Framed::Abort { reason, text } => self.take_abort(now, key, host, *reason, text),
            Framed::Close => self.lose_leg(now, key, host),
            Framed::Welcome { .. }
            | Framed::Hello { .. }
            | Framed::Pong
            | Framed::Lost { .. }
            | Framed::LostSeen { .. } => {}
        }
    }

    /// A member has ended its part of a connection, or does not know the connection.
    fn take_abort(&mut self, now: Instant, key: Key, host: Host, reason: AbortReason, text: &str) {
        tracing::debug!(?reason, text, "a member has ended its part of a connection");
        let leg = self.connections.get(&key).and_then(|served| served.legs.get(&host));
        let joined_at = leg.filter(|leg| leg.member().is_some()).map(|leg| leg.since);
        if reason == AbortReason::Leaving {
            self.leaves(now, host);
            return self.lose_leg(now, key, host);
        }
        self.lose_leg(now, key, host);
        if let Some(joined_at) = joined_at {
            let why = if text.is_empty() { "it does not know its connections" } else { text };
            self.note_death(now, host, joined_at, why);
            self.doubt(now, host);
        }
    }

    /// A member has died, as far as a connection knows that it took at some time. One death is counted once.
    fn note_death(&mut self, now: Instant, host: Host, joined_at: Instant, why: &str) {
        if let Some(member) = self.members.get_mut(&host)
            && member.dies(now, joined_at)
        {
            tracing::warn!(member = member.at.name, why, "a member is dead");
            self.totals.deaths += 1;
        }
    }

    /// A member does not know a connection that was its: another process may be in its place, or another host. It is
    /// asked as such, and of all its connections: nobody else finds out that what they wait for will not come.
    fn doubt(&mut self, now: Instant, host: Host) {
        if self.members.get_mut(&host).is_some_and(|member| member.is_doubted(now)) {
            self.ask_all(now, host);
        }
    }

    /// Asks a member as such, and of all its connections.
    fn ask_all(&mut self, now: Instant, host: Host) {
        self.say_to_member(now, host, framed_host_number(&host), &Framed::Ping);
        let legs = self.connections.values().filter_map(|served| served.legs.get(&host));
        let numbers: Vec<u64> = legs.filter(|leg| leg.member().is_some()).map(|leg| leg.number).collect();
        numbers.into_iter().for_each(|number| self.say_to_member(now, host, number, &Framed::Ping));
    }

    fn leaves(&mut self, now: Instant, host: Host) {
        let Some(member) = self.members.get_mut(&host) else { return };
        if member.leaves(now) {
            tracing::info!(member = member.at.name, "a member leaves");
            self.follow_activity(now, host);
        }
        self.forget_members();
    }

    /// A member's host has refused a datagram.
    pub(super) fn link_refused(&mut self, now: Instant, host: Host, why: &str) {
        match self.members.get_mut(&host).map_or(Due::Nothing, |member| member.refused(now)) {
            Due::Nothing => {}
            Due::Ping => self.ask_all(now, host),
            Due::Dead => self.link_failed(now, host, why),
        }
    }

    /// Nothing leads to a member any more, or it is silent: it is dead for all connections.
    pub(super) fn link_failed(&mut self, now: Instant, host: Host, why: &str) {
        let Some(member) = self.members.get_mut(&host) else { return };
        let of_member: Vec<Key> = self.legs.values().filter(|(_, of)| *of == host).map(|(key, _)| *key).collect();
        // That one ends with which nobody has anything to do is no death.
        let is_missed = !of_member.is_empty() || member.is_parting();
        let joined_at = member.joined_at.filter(|_| is_missed && member.reach == Reach::Up);
        member.fell(now, why);
        if let Some(joined_at) = joined_at {
            self.note_death(now, host, joined_at, why);
        }
        for key in of_member {
            self.lose_leg(now, key, host);
            self.touch(key);
        }
        self.forget_members();
    }

    /// A member takes no connection, since its program speaks another protocol.
    fn misfits(&mut self, now: Instant, host: Host, why: &str) {
        self.link_failed(now, host, why);
        if let Some(member) = self.members.get_mut(&host) {
            tracing::warn!(member = member.at.name, why, "a member does not fit");
            member.misfits(now);
        }
    }

    /// Says what follows from what has come, and sees to the next timer.
    fn settle(&mut self, now: Instant, key: Key) {
        if let Some(served) = self.connections.get_mut(&key) {
            served.is_touched = false;
        }
        while let Some(event) = self.connections.get_mut(&key).and_then(|served| served.switch.poll_event()) {
            match event {
                Event::Gone(id) => {
                    let host = self.connections.get(&key).and_then(|served| served.host_of(id));
                    if let Some(host) = host {
                        self.end_leg(now, key, host);
                        // It may take frames again since.
                        self.open_leg(now, key, host);
                        self.forget_members();
                    }
                }
                Event::Failed(failure) => return self.fail(now, key, AbortReason::Failed, &failure.to_string()),
            }
        }
        self.offer(now, key);
        let fault = self.connections.get(&key).and_then(|served| served.switch.plugin().fault());
        if let Some(why) = fault.map(ToOwned::to_owned) {
            self.note_fault(now, key, &why);
            return self.fail(now, key, AbortReason::Module, &format!("its module fails: {why}"));
        }
        self.welcome_if_ready(now, key);
        self.tell_lost(now, key);
        self.gather(now, key);
        self.count(key);
        self.note_owed(now, key);
        self.note_deadline(now, key);
    }

    /// A connection can go on no more.
    fn fail(&mut self, now: Instant, key: Key, reason: AbortReason, why: &str) {
        tracing::info!(client = %key.0, why, "a connection has failed");
        self.totals.failed += 1;
        self.totals.last_failure = Some(format!("{}: {why}", key.0));
        self.say_to_peer(key, &Framed::abort(reason, why));
        self.close(now, key);
    }

    /// Offers a connection to the module that was loaded since it began: once, as soon as it may move.
    fn offer(&mut self, now: Instant, key: Key) {
        let Some(placed) = &mut self.module else { return };
        let Some(served) = self.connections.get_mut(&key) else { return };
        if served.offered == Some(placed.number) || !served.switch.plugin().may_move() {
            return;
        }
        served.offered = Some(placed.number);
        match placed.adopt(served.switch.plugin_mut()) {
            Ok(is_moved) => served.module = if is_moved { served.offered } else { served.module },
            Err(why) => {
                tracing::info!(client = %key.0, why, "a connection stays with what divides its requests");
                self.blame(now, key, &why);
            }
        }
    }

    /// A connection is lost by the fault of its module.
    fn note_fault(&mut self, now: Instant, key: Key, why: &str) {
        let Some(served) = self.connections.get(&key) else { return };
        let is_of_this = self.module.as_ref().is_some_and(|placed| Some(placed.number) == served.module);
        if is_of_this && !served.switch.plugin().is_fault_of_former() {
            self.blame(now, key, why);
        }
    }

    /// The module that is in its place has a fault.
    fn blame(&mut self, now: Instant, key: Key, why: &str) {
        if let Some(placed) = &mut self.module
            && placed.note_fault(now, host_at(key.0.ip()), &self.clients, why)
        {
            tracing::warn!(why, "the module has lost its place: there are no new connections until another is loaded");
        }
    }

    /// Which members owe a connection something: they are asked whether they are there.
    fn note_owed(&mut self, now: Instant, key: Key) {
        let Some(Served { switch, legs, .. }) = self.connections.get_mut(&key) else { return };
        for (host, leg) in legs {
            let Some(id) = leg.member() else { continue };
            let is_owing = switch.is_owing(id);
            leg.asking.owes(now, is_owing);
            // Mostly nothing has changed.
            if std::mem::replace(&mut leg.is_owing, is_owing) != is_owing
                && let Some(member) = self.members.get_mut(host)
            {
                member.owes(now, key, is_owing);
            }
        }
    }

    fn welcome_if_ready(&mut self, now: Instant, key: Key) {
        let Some(served) = self.connections.get(&key).filter(|served| !served.is_welcome) else { return };
        let waited = now.since(served.began);
        let is_settled = served.legs.values().all(|leg| leg.member().is_some())
            && !self.members.values().any(|member| member.is_awaited(now));
        let has_member = served.joined().next().is_some();
        if has_member && (is_settled || waited >= JOINING_MAX) {
            self.welcome(key);
        } else if !has_member && waited >= NO_MEMBER_AFTER {
            let text = format!("no member of {} answers", self.config.members);
            self.say_to_peer(key, &Framed::abort(AbortReason::NoMember, &text));
            self.close(now, key);
        }
    }

    fn note_deadline(&mut self, now: Instant, key: Key) {
        let Some(served) = self.connections.get_mut(&key) else { return };
        let next = served.next_deadline();
        let next = if served.is_welcome { next } else { next.min(now + WELCOME_CHECK) };
        if let Some(was) = served.due.replace(next) {
            self.due.remove(&(was, key));
        }
        self.due.insert((next, key));
    }

    /// Ends a connection, and its parts with members.
    fn close(&mut self, now: Instant, key: Key) {
        let hosts: Vec<Host> =
            self.connections.get(&key).into_iter().flat_map(|served| served.legs.keys().copied()).collect();
        hosts.into_iter().for_each(|host| self.end_leg(now, key, host));
        if let Some(served) = self.connections.remove(&key) {
            if let Some(due) = served.due {
                self.due.remove(&(due, key));
            }
            served.switch.close();
            self.clients.remove(now, key.0.ip());
        }
        self.forget_members();
    }

    /// Time has passed; also says what follows from what has come.
    pub(super) fn on_time(&mut self, now: Instant) {
        let hosts: Vec<Host> = self.members.keys().copied().collect();
        for host in hosts {
            match self.members.get_mut(&host).map_or(Due::Nothing, |member| member.on_time(now)) {
                Due::Nothing => {}
                Due::Ping => self.say_to_member(now, host, framed_host_number(&host), &Framed::Ping),
                Due::Dead => self.link_failed(now, host, "nothing comes from it"),
            }
        }
        while let Some((at, key)) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, key));
            self.connection_on_time(now, key);
        }
        while let Some(key) = self.touched.pop_front() {
            self.settle(now, key);
        }
    }

    fn connection_on_time(&mut self, now: Instant, key: Key) {
        let Some(served) = self.connections.get_mut(&key) else { return };
        if now.since(served.heard_at) >= IDLE_MAX {
            return self.close(now, key);
        }
        served.switch.on_time(now);
        let mut pinged = Vec::new();
        if served.ping_at <= now {
            served.ping_at = now + PING_EVERY;
            pinged.extend(served.legs.iter().map(|(host, leg)| (*host, leg.number)));
        }
        let mut again = Vec::new();
        let mut silent = Vec::new();
        for (host, leg) in &mut served.legs {
            match leg.asking.on_time(now) {
                Due::Nothing => {}
                Due::Ping => pinged.push((*host, leg.number)),
                Due::Dead => silent.push(*host),
            }
            again.extend(leg.standing.repeats(now).then_some(*host));
        }
        silent.into_iter().for_each(|host| self.lose_leg(now, key, host));
        again.into_iter().for_each(|host| self.say_hello(now, key, host));
        pinged.into_iter().for_each(|(host, number)| self.say_to_member(now, host, number, &Framed::Ping));
        self.open_legs(now, key);
        if let Some(served) = self.connections.get_mut(&key) {
            served.forget_refusals(now);
        }
        self.touch(key);
    }

    /// When [`on_time`](Self::on_time) is to be called, if ever.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let members = self.members.values().filter_map(Member::next_deadline);
        members.chain(self.due.first().map(|(at, _)| *at)).min()
    }
}

/// A member has answered: it takes frames from now on.
fn join(served: &mut Served, host: Host, terms: &FramedTerms, label: &str) {
    let Some(leg) = served.legs.get_mut(&host) else { return };
    let joining = Joining {
        kind: Kind::Margay,
        to_member: Lsn(leg.first),
        from_member: Lsn(terms.tsn),
        window_bytes: terms.window_bytes,
    };
    match served.switch.join(&joining) {
        Ok(id) => {
            leg.standing = LegStanding::Joined(id);
            served.switch.plugin_mut().name(id, label);
        }
        Err(full) => tracing::warn!(%full, "a member takes no part in a connection"),
    }
}

#[cfg(test)]
mod adopt_test;
#[cfg(test)]
mod churn_test;
#[cfg(test)]
mod test;
