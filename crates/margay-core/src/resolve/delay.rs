//! DELAY: first packets wait while somebody outside the core finds out who serves their name (DESIGN §8; Serval §4.2).
//!
//! One question is put per name, however many packets wait for its answer. An answer becomes FORWARD rules that end by
//! themselves, and what waited goes on by them. A resolver that fails is not asked of that name again for a while: the
//! next rule of the same prefix decides meanwhile, and where there is none, packets are refused at once. An answer is a
//! hint and no more: who may answer for a name is proved when the flow is set up.
//!
//! Whatever waits here, and what answers leave behind, counts for whoever has sent the packet: a router by the
//! association whose hop tag it bears, any other host by its address. No host can have others' first packets refused.

use alloc::collections::btree_map::{BTreeMap, Entry};
use alloc::collections::{BTreeSet, VecDeque};
use alloc::string::ToString;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{FlowId, Message};

use crate::association::{Association, AssociationTable};
use crate::cache::output::AppVerdict;
use crate::cache::packet::{self, AppPacket, Parsed, Unreachable};
use crate::machine::sal::Sal;
use crate::table::lifetime::Lifetime;
use crate::table::resolver::ResolverId;
use crate::table::{Action, NextHop, Rule, RuleId};
use crate::types::config::Limits;
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::{FairShares, FairTable, Peer};
use crate::types::name::{Prefix, ServiceId};
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// One resolver has so long to answer.
pub const QUESTION_TIMEOUT: Duration = Duration::from_millis(2000);
/// No packet waits longer than this, however many resolvers are asked in turn: well before an initiator gives up.
pub const HELD_TIMEOUT: Duration = Duration::from_millis(2500);
/// A resolver that had no answer for a name is not asked for it again for so long.
pub const FAILURE_KEPT: Duration = Duration::from_millis(2000);
/// Instances of one answer; the rest is left out.
pub const HOPS_MAX: usize = 64;
/// An answer holds for so long at least: what waits must get by it.
pub const TTL_MIN: Duration = Duration::from_secs(1);
/// And for so long at most.
pub const TTL_MAX: Duration = Duration::from_secs(24 * 3600);

/// All other hosts together have so many times the room of the programs here: those of one network have as much.
const OTHERS: usize = 4;

/// Who serves a name?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Question {
    /// The name.
    pub service: ServiceId,
    /// Who is asked.
    pub resolver: ResolverId,
}

/// What a resolver says of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// For which names: the one that was asked for, or a prefix of it that is no shorter than the rule's.
    pub prefix: Prefix,
    /// Where to, and which share each takes.
    pub hops: Vec<(NextHop, u32)>,
    /// How long it holds.
    pub ttl: Duration,
}

/// How much waits for resolvers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldCount {
    /// Names that are asked for.
    pub names: usize,
    /// Packets that wait.
    pub packets: usize,
    /// Their length.
    pub bytes: usize,
    /// The most packets that ever waited at once.
    pub packets_max: usize,
    /// Rules that answers have made, and that have not ended.
    pub rules: usize,
}

/// Who a packet is from: a copy of it is known by that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sender {
    Program(Tuple),
    Host { from: SocketAddr, local: Option<IpAddr>, flow: FlowId },
}

struct Held {
    sender: Sender,
    peer: Peer,
    bytes: Vec<u8>,
}

struct Wait {
    resolver: ResolverId,
    /// Who has asked first.
    peer: Peer,
    /// The rule that delays.
    rule: RuleId,
    /// Until then the resolver may answer.
    until: Instant,
    /// Then what waits is refused; of a wait with packets.
    give_up: Option<Instant>,
    packets: Vec<Held>,
    /// How many of them are whose.
    shares: FairShares,
}

impl Wait {
    /// Those who wait for the answer, or have waited.
    fn peers(&self) -> impl Iterator<Item = Peer> {
        self.packets.iter().map(|held| held.peer).chain([self.peer])
    }

    fn due(&self) -> Instant {
        self.give_up.map_or(self.until, |give_up| give_up.min(self.until))
    }
}

/// What has become of an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Installed {
    /// There are rules of it.
    Rules,
    /// Nothing of it can be used, or the delay is gone.
    Nothing,
    /// None of those who wait may have another rule.
    NoRoom,
}

/// What made a rule.
#[derive(Clone, Copy)]
struct Resolved {
    resolver: ResolverId,
    /// The rule that delayed.
    by: RuleId,
}

/// Everything that waits, and what came of it.
pub(crate) struct Delays {
    waits: BTreeMap<ServiceId, Wait>,
    order: BTreeSet<(Instant, ServiceId)>,
    questions: VecDeque<Question>,
    has_news: bool,
    /// Names, packets and bytes that wait.
    names: FairShares,
    packets: FairShares,
    bytes: FairShares,
    packets_max: usize,
    /// Until when a resolver that had no answer is not asked again.
    failures: FairTable<Question, Instant>,
    resolved: FairTable<RuleId, Resolved>,
    /// What is given on again has waited since before: it is refused then.
    give_up: Option<Instant>,
}

impl Delays {
    pub const fn new(limits: &Limits) -> Self {
        Self {
            waits: BTreeMap::new(),
            order: BTreeSet::new(),
            questions: VecDeque::new(),
            has_news: false,
            names: shares(limits.held_names),
            packets: shares(limits.held_packets),
            bytes: shares(limits.held_bytes),
            packets_max: 0,
            failures: FairTable::new(limits.failed_names, limits.failed_names),
            resolved: FairTable::elastic(OTHERS * limits.resolved_rules, limits.resolved_rules),
            give_up: None,
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.order.first().map(|(due, _)| *due)
    }

    pub const fn has_news(&self) -> bool {
        self.has_news
    }

    pub const fn take_news(&mut self) -> bool {
        core::mem::replace(&mut self.has_news, false)
    }

    /// Keeps a change of a wait's deadline.
    fn settle(&mut self, service: ServiceId, before: Option<Instant>) {
        if let Some(before) = before {
            self.order.remove(&(before, service));
        }
        if let Some(wait) = self.waits.get(&service) {
            self.order.insert((wait.due(), service));
        }
    }

    /// Takes a wait out, with all of its packets.
    fn take(&mut self, service: ServiceId) -> Option<Wait> {
        let wait = self.waits.remove(&service)?;
        self.order.remove(&(wait.due(), service));
        self.questions.retain(|question| question.service != service);
        self.names.give_back(wait.peer, 1);
        self.let_go(&wait.packets);
        Some(wait)
    }

    fn let_go(&mut self, packets: &[Held]) {
        for held in packets {
            self.packets.give_back(held.peer, 1);
            self.bytes.give_back(held.peer, held.bytes.len());
        }
    }

    /// `peer`: who has asked.
    pub fn note_failure(&mut self, now: Instant, peer: Peer, question: Question) {
        self.failures.displace(peer, question, now + FAILURE_KEPT);
    }

    /// Whether there is room for one more packet.
    fn has_room(&self, service: &ServiceId, held: &Held) -> bool {
        let of_name = match self.waits.get(service) {
            Some(wait) => wait.shares.check(held.peer, 1),
            None => self.names.check(held.peer, 1),
        };
        of_name.is_ok()
            && self.packets.check(held.peer, 1).is_ok()
            && self.bytes.check(held.peer, held.bytes.len()).is_ok()
    }

    fn push(&mut self, now: Instant, service: ServiceId, held: Held) {
        let Some(wait) = self.waits.get_mut(&service) else { return };
        let before = wait.due();
        let give_up = self.give_up.unwrap_or(now + HELD_TIMEOUT);
        wait.give_up = Some(wait.give_up.map_or(give_up, |known| known.min(give_up)));
        wait.shares.add(held.peer, 1);
        self.packets.add(held.peer, 1);
        self.bytes.add(held.peer, held.bytes.len());
        self.packets_max = self.packets_max.max(self.packets.used());
        wait.packets.push(held);
        self.settle(service, Some(before));
    }
}

impl Sal {
    /// The next question that a resolver is to be asked. Its answer goes to [`Sal::handle_resolution`].
    pub fn poll_question(&mut self) -> Option<Question> {
        self.delays.questions.pop_front()
    }

    /// How much waits for resolvers.
    pub fn held(&self) -> HeldCount {
        HeldCount {
            names: self.delays.waits.len(),
            packets: self.delays.packets.used(),
            bytes: self.delays.bytes.used(),
            packets_max: self.delays.packets_max,
            rules: self.delays.resolved.len(),
        }
    }

    /// Packets that wait for an answer about `service`.
    pub fn held_for(&self, service: &ServiceId) -> usize {
        self.delays.waits.get(service).map_or(0, |wait| wait.packets.len())
    }

    /// The resolver whose answer made a rule.
    pub fn resolved_by(&self, id: RuleId) -> Option<ResolverId> {
        self.delays.resolved.get(&id).map(|resolved| resolved.resolver)
    }

    /// A rule is gone: so is what its answers made.
    pub(crate) fn forget_resolved(&mut self, id: RuleId, rule: &Rule) {
        self.delays.resolved.remove(&id);
        if !matches!(rule.action, Action::Delay(_)) {
            return;
        }
        let of_rule = |(made, resolved): (&RuleId, &Resolved)| (resolved.by == id).then_some(*made);
        let made: Vec<RuleId> = self.delays.resolved.iter().filter_map(of_rule).collect();
        for id in made {
            self.delays.resolved.remove(&id);
            self.lifetimes.remove(id);
            if let Some((prefix, _)) = self.table.remove(id) {
                self.end_grants_under(&prefix);
            }
        }
    }

    /// Whether a resolver had no answer for a name just now: it is not asked again for [`FAILURE_KEPT`].
    pub fn had_no_answer(&self, service: &ServiceId, resolver: ResolverId) -> bool {
        let question = Question { service: *service, resolver };
        self.delays.failures.get(&question).is_some_and(|until| *until > self.now)
    }

    /// The same, of a rule's resolver.
    pub(crate) fn has_failed(&self, service: &ServiceId, rule: &Rule) -> bool {
        matches!(rule.action, Action::Delay(resolver) if self.had_no_answer(service, resolver))
    }

    /// Holds a program's first packet until `resolver` has answered, or refuses it.
    pub(crate) fn delay_own(
        &mut self,
        now: Instant,
        service: ServiceId,
        packet: &AppPacket<'_>,
        (rule, resolver): (RuleId, ResolverId),
    ) -> AppVerdict {
        if self.is_unresolved(&service, rule) {
            self.table.note_use(now, rule);
            if self.refuse_unresolved(packet) {
                return AppVerdict::Drop(DropReason::NoService);
            }
            self.queue.refuse(packet, Unreachable::Port);
            let why = "no resolver says now who serves this name; `margay trace NAME` shows what they answered";
            self.connect_failed(service, packet, why.to_string());
            return AppVerdict::Drop(DropReason::NoService);
        }
        let sender = Sender::Program(packet.tuple);
        let copies = if packet.is_tcp() { 1 } else { self.config.limits.held_per_flow };
        let held = Held { sender, peer: Peer::Own, bytes: packet.whole.to_vec() };
        match self.delay(now, service, held, copies, (rule, resolver)) {
            Ok(()) => AppVerdict::Consumed,
            Err(reason) => {
                self.queue.refuse(packet, Unreachable::Host);
                self.connect_failed(service, packet, "too many packets wait for resolvers; try again".to_string());
                AppVerdict::Drop(reason)
            }
        }
    }

    /// Holds another host's SYN until `resolver` has answered, or has its sender told that nobody serves the name.
    pub(crate) fn delay_other(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
        service: ServiceId,
        datagram: &[u8],
        (rule, resolver): (RuleId, ResolverId),
    ) -> Result<(), DropReason> {
        // Whoever asks a whole segment asks those who know; nobody else is asked for it.
        if self.came_to_all {
            return Err(DropReason::NoService);
        }
        let sender = Sender::Host { from, local: self.arrival, flow: message.src_flow };
        let peer = self.associations.sender_of(from, message, datagram);
        let held = Held { sender, peer, bytes: datagram.to_vec() };
        let result = if self.is_unresolved(&service, rule) {
            self.table.note_use(now, rule);
            Err(DropReason::NoService)
        } else {
            self.delay(now, service, held, 1, (rule, resolver))
        };
        if result.is_err() {
            self.answer_nobody(now, from, message, &service, datagram);
        }
        result
    }

    fn is_unresolved(&self, service: &ServiceId, rule: RuleId) -> bool {
        self.table.get(rule).is_none_or(|(_, rule)| self.has_failed(service, rule))
    }

    /// `copies`: how many packets of one sender are held; further ones are let go, and nothing is said of them.
    fn delay(
        &mut self,
        now: Instant,
        service: ServiceId,
        held: Held,
        copies: usize,
        (rule, resolver): (RuleId, ResolverId),
    ) -> Result<(), DropReason> {
        let wait = self.delays.waits.get(&service);
        let known = wait.map_or(0, |wait| wait.packets.iter().filter(|known| known.sender == held.sender).count());
        if known >= copies {
            return Ok(());
        }
        self.table.note_use(now, rule);
        if !self.delays.has_room(&service, &held) {
            self.counters.delays_refused += 1;
            return Err(DropReason::Full);
        }
        if self.delays.give_up.is_none() {
            self.counters.delayed += 1;
        }
        if let Entry::Vacant(place) = self.delays.waits.entry(service) {
            let of_name = self.config.limits.held_per_name;
            place.insert(Wait {
                resolver,
                peer: held.peer,
                rule,
                until: now + QUESTION_TIMEOUT,
                give_up: None,
                packets: Vec::new(),
                shares: shares(of_name),
            });
            self.delays.names.add(held.peer, 1);
            self.delays.settle(service, None);
            self.delays.questions.push_back(Question { service, resolver });
            self.delays.has_news = true;
            self.counters.questions += 1;
        }
        self.delays.push(now, service, held);
        Ok(())
    }

    /// What a resolver said; `None`: it has failed, or knows nobody. An answer that nobody waits for is counted, and no
    /// more.
    pub fn handle_resolution(&mut self, now: Instant, question: Question, answer: Option<Answer>) {
        self.now = now;
        if self.delays.waits.get(&question.service).is_none_or(|wait| wait.resolver != question.resolver) {
            self.counters.answers_late += 1;
            return;
        }
        let Some(wait) = self.delays.take(question.service) else { return };
        let installed = answer.map(|answer| self.install_answer(now, &question.service, &wait, answer));
        match installed.unwrap_or(Installed::Nothing) {
            Installed::Rules => {}
            Installed::Nothing => {
                self.counters.questions_failed += 1;
                self.delays.note_failure(now, wait.peer, question);
            }
            Installed::NoRoom => {
                // That they have their share is nothing to others who may ask for the name.
                self.counters.questions_failed += 1;
                return self.refuse_held(now, question.service, wait.packets);
            }
        }
        self.give_on(now, wait);
    }

    /// Makes rules of an answer.
    fn install_answer(&mut self, now: Instant, service: &ServiceId, wait: &Wait, answer: Answer) -> Installed {
        let Some((of_rule, priority)) = self.table.get(wait.rule).map(|(prefix, rule)| (prefix, rule.priority)) else {
            return Installed::Nothing;
        };
        let is_within = answer.prefix.contains(service) && answer.prefix.bits >= of_rule.bits;
        let prefix = if is_within { answer.prefix } else { Prefix::from(*service) };
        let usable = |(hop, weight): &(NextHop, u32)| *weight > 0 && self.may_lead_to(hop.address);
        let hops: Vec<(NextHop, u32)> = answer.hops.into_iter().filter(usable).take(HOPS_MAX).collect();
        self.forget_answer(prefix, wait.rule);
        if hops.is_empty() {
            return Installed::Nothing;
        }
        // They count for a program here, if one waits.
        let has_room = |peer: &Peer| self.delays.resolved.has_room_for(*peer, hops.len());
        let Some(peer) = wait.peers().filter(has_room).min() else { return Installed::NoRoom };
        let until = Some(now + answer.ttl.clamp(TTL_MIN, TTL_MAX));
        let mut installed = Installed::Nothing;
        for (hop, weight) in hops {
            if !self.delays.resolved.has_room(peer) {
                break;
            }
            let rule = Rule { priority: priority.saturating_add(1), weight, action: Action::Forward(hop) };
            let Ok(id) = self.table.insert(now, prefix, rule) else { break };
            self.lifetimes.set(now, id, Lifetime { idle: None, until });
            let resolved = Resolved { resolver: wait.resolver, by: wait.rule };
            // There is room.
            let _ = self.delays.resolved.insert(peer, id, resolved);
            installed = Installed::Rules;
        }
        installed
    }

    /// Another answer takes the place of an older one for the same prefix.
    fn forget_answer(&mut self, prefix: Prefix, by: RuleId) {
        let made = self.rules_covering(prefix.id).filter(|(of, _, _)| *of == prefix).map(|(_, id, _)| id);
        let older: Vec<RuleId> =
            made.filter(|id| self.delays.resolved.get(id).is_some_and(|resolved| resolved.by == by)).collect();
        for id in older {
            self.remove_rule(id);
        }
    }

    /// Whether what is sent there would leave this host, and come to one.
    fn may_lead_to(&self, address: SocketAddr) -> bool {
        let ip = address.ip();
        let is_nobody =
            ip.is_unspecified() || ip.is_multicast() || ip.is_loopback() || self.config.ranges.is_virtual(ip);
        let is_broadcast = matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
        address.port() != 0 && !is_nobody && !is_broadcast && !self.has_address(ip)
    }

    /// What waited goes on by the rules that there are now: to an instance, to the next resolver, or back as a refusal.
    fn give_on(&mut self, now: Instant, wait: Wait) {
        self.delays.give_up = wait.give_up;
        for held in wait.packets {
            match held.sender {
                Sender::Program(_) => self.give_on_own(now, held.bytes),
                Sender::Host { from, local, .. } => {
                    (self.arrival, self.came_to_all) = (local, false);
                    // Counted where it is dropped; the network expects nothing else.
                    let _ = self.give_on_other(now, from, &held.bytes);
                }
            }
        }
        self.delays.give_up = None;
    }

    fn give_on_own(&mut self, now: Instant, bytes: Vec<u8>) {
        let Ok(Parsed::Transport(packet)) = packet::parse(&bytes) else { return };
        match self.handle_transport_packet(now, &packet) {
            AppVerdict::Consumed | AppVerdict::Parted(_) => {}
            // Of a flow that an earlier one has begun.
            AppVerdict::Forward(_) => self.queue.egress(bytes),
            AppVerdict::Drop(reason) => self.counters.drop(reason),
        }
    }

    fn give_on_other(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) -> Result<(), DropReason> {
        let message = Message::parse(datagram).map_err(|_| DropReason::Malformed)?;
        let result = self.handle_syn(now, from, &message, datagram);
        if let Err(reason) = result {
            self.counters.drop(reason);
        }
        result
    }

    /// Resolvers that have not answered in time, and packets that have waited too long.
    pub(crate) fn delays_due(&mut self, now: Instant) {
        while let Some((due, service)) = self.delays.order.first().copied().filter(|(due, _)| *due <= now) {
            let Some(wait) = self.delays.waits.get_mut(&service) else { return };
            if wait.until <= now {
                let question = Question { service, resolver: wait.resolver };
                self.handle_resolution(now, question, None);
                continue;
            }
            // The resolver may still answer: whoever comes after these need not ask it again.
            let packets = core::mem::take(&mut wait.packets);
            packets.iter().for_each(|held| wait.shares.give_back(held.peer, 1));
            wait.give_up = None;
            self.delays.let_go(&packets);
            self.delays.settle(service, Some(due));
            self.refuse_held(now, service, packets);
        }
    }

    fn refuse_held(&mut self, now: Instant, service: ServiceId, packets: Vec<Held>) {
        for held in packets {
            self.counters.drop(DropReason::NoService);
            match held.sender {
                Sender::Program(_) => {
                    let Ok(Parsed::Transport(packet)) = packet::parse(&held.bytes) else { continue };
                    if self.refuse_unresolved(&packet) {
                        continue;
                    }
                    self.queue.refuse(&packet, Unreachable::Port);
                    let why = "the resolvers did not say in time who serves this name; `margay trace NAME` shows what \
                               they answered";
                    self.connect_failed(service, &packet, why.to_string());
                }
                Sender::Host { from, .. } => {
                    let Ok(message) = Message::parse(&held.bytes) else { continue };
                    self.answer_nobody(now, from, &message, &service, &held.bytes);
                }
            }
        }
    }
}

/// `own`: the room of the programs here.
const fn shares(own: usize) -> FairShares {
    FairShares::elastic(OTHERS * own, own)
}

impl AssociationTable {
    /// Whom a SYN from there counts for: a host that has tagged it, or whoever is at the address.
    fn sender_of(&self, from: SocketAddr, message: &Message<'_>, datagram: &[u8]) -> Peer {
        let is_tagged = message.resolvable.is_some_and(|part| self.is_hop_tagged(from, &part, datagram));
        let with_key = self.at_address(from).find(|association| association.hop_key.is_some());
        with_key.filter(|_| is_tagged).map_or(Peer::Unauthenticated(from.ip()), Association::peer)
    }
}

#[cfg(test)]
mod tests {
    use margay_wire::{Kind, MessageWriter, NextProtocol, ResolvableRepr};

    use super::*;
    use crate::trust::handshake::Keys;
    use crate::types::key::{HostId, HostPublic};
    use crate::types::keyed_hash::KeyedHash;

    #[test]
    fn whose_names_fail_forgets_its_own_failures_first() {
        let limits = Limits::default();
        let mut delays = Delays::new(&limits);
        let question = |n: u32| {
            let mut service = ServiceId([0; 32]);
            service.0[..4].copy_from_slice(&n.to_be_bytes());
            Question { service, resolver: ResolverId(1) }
        };
        delays.note_failure(Instant::ZERO, Peer::Own, question(0));
        let peer = Peer::Member(HostId([1; 16]));
        for n in 1..=1000 {
            delays.note_failure(Instant::from_millis(n.into()), peer, question(n));
        }
        assert_eq!(delays.failures.len(), 1 + limits.failed_names / 16);
        assert!([0, 1000].iter().all(|n| delays.failures.contains_key(&question(*n))));
    }

    #[test]
    fn a_router_counts_by_its_association_and_who_shows_no_tag_by_its_address() {
        let from = SocketAddr::new([192, 0, 2, 1].into(), 7);
        let mut associations = AssociationTable::with_hasher(64, 64, 1, KeyedHash(1, 2));
        let mut router = Association::new(7, 7, HostPublic([3; 32]), Keys { root: [1; 32] }, true, from);
        router.hop_key = Some([9; 16]);
        let host = router.host;
        associations.insert(router).expect("room");
        let part =
            ResolvableRepr { hop_limit: 9, reply_to: None, via: None, service: [3; 32], nonce: 4, hop_tag: [0; 8] };
        let mut buf = alloc::vec![0; 512];
        let mut writer = MessageWriter::new(&mut buf, Kind::Syn, FlowId(0), FlowId(2), 0);
        writer.resolvable(&part).and_then(|writer| writer.payload(NextProtocol::None, b"")).expect("room");
        let len = writer.finish().expect("room");
        buf.truncate(len);
        let peer = |buf: &[u8]| associations.sender_of(from, &Message::parse(buf).expect("our own"), buf);
        assert_eq!(peer(&buf), Peer::Unauthenticated(from.ip()));
        Sal::tag_hop(&mut buf, Some([9; 16]));
        assert_eq!(peer(&buf), Peer::Member(host));
    }

    #[test]
    fn packets_of_one_host_for_one_name_leave_room_for_those_of_others() {
        let limits = Limits { held_per_name: 8, held_bytes: 256, ..Limits::default() };
        let mut delays = Delays::new(&limits);
        let service = ServiceId([1; 32]);
        let held = |peer, length| Held {
            sender: Sender::Host { from: ([192, 0, 2, 1], 1).into(), local: None, flow: FlowId(1) },
            peer,
            bytes: alloc::vec![0; length],
        };
        let [one, other] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(|at| Peer::Unauthenticated(at.into()));
        let wait = Wait {
            resolver: ResolverId(1),
            peer: one,
            rule: RuleId(1),
            until: Instant::from_millis(1),
            give_up: None,
            packets: Vec::new(),
            shares: shares(limits.held_per_name),
        };
        delays.waits.insert(service, wait);
        for _ in 0..2 {
            assert!(delays.has_room(&service, &held(one, 1)));
            delays.push(Instant::ZERO, service, held(one, 1));
        }
        assert!(!delays.has_room(&service, &held(one, 1)), "of one name");
        assert!(!delays.has_room(&service, &held(other, 65)), "in bytes");
        assert!(delays.has_room(&service, &held(other, 64)) && delays.has_room(&service, &held(Peer::Own, 256)));
        delays.take(service);
        assert_eq!((delays.packets.used(), delays.bytes.used(), delays.names.used()), (0, 0, 0));
    }
}
