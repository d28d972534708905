//! Notices: hosts tell their network segments which names they serve, and which no longer (Serval §4.4 (ii)); who has
//! heard of a host asks it alone, and the whole segment only where that comes to nothing.
//!
//! A notice is signed by its host's key and carries the certificate by which the host answers for the name: the proof
//! of a SYN-ACK. It is a hint all the same. Whoever answers a SYN proves it again, so what is false costs one SYN. Each
//! holds for a minute, and numbers that only rise keep an old one from being believed while a later one holds.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::cmp::Ordering;
use core::net::SocketAddr;
use core::time::Duration;

use margay_wire::{Addresses, Extension, Flags, FlowId, Kind, Message, NoticeRepr, ResolvableRepr};

use crate::association::draft::Draft;
use crate::machine::sal::Sal;
use crate::resolve::forward::rewrite;
use crate::resolve::segment::{SEGMENT, SEGMENT_TIMEOUT};
use crate::session::flow::Setup;
use crate::table::ServiceTable;
use crate::table::{Action, Demux, HAND_OVER_PORT, Rule, is_answering};
use crate::trust::certificate::Authenticated;
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::hop::HOP_LIMIT;
use crate::types::key::{HostId, HostPublic};
use crate::types::name::{Prefix, SERVICE_BITS, ServiceId};
use crate::types::rate::RateLimit;
use crate::types::time::Instant;

/// How long a notice holds, in seconds of the wall clock.
pub const LIFETIME_S: u64 = 60;
/// It is said anew so often.
const REFRESH: Duration = Duration::from_secs(20);
/// What is new is said so many times, the second time after [`AGAIN`] and each later one after twice as long as before:
/// some get lost.
const TIMES: u32 = 3;
const AGAIN: Duration = Duration::from_millis(200);
/// Clocks that differ by less do no harm.
const SKEW_S: u64 = 300;
/// Names that are remembered, and of one host. Beyond it new ones are not; but what is proved takes the place of what
/// nobody here can check.
pub const HEARD_MAX: usize = 1024;
const HEARD_OF_HOST_MAX: usize = 64;
/// Names that a host tells of.
const OWN_MAX: usize = 64;
/// Notices that are checked in a second; each costs two signatures.
const CHECKED_PER_S: u32 = 200;
/// Whoever did not answer for a name is not asked for it alone for so long.
const FAILED: Duration = Duration::from_secs(10);

/// A name that this host tells of.
struct Own {
    said: u32,
    withdrawn: bool,
    next: Instant,
}

/// What a host has said last of a name.
struct Entry {
    epoch: u32,
    sequence: u32,
    until_s: u64,
    withdrawn: bool,
    authenticated: bool,
    addresses: Vec<SocketAddr>,
    at: Instant,
    hops: u8,
    failed: Option<Instant>,
    packets: u64,
    used: Option<Instant>,
}

/// A name that a host says it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// The name.
    pub prefix: Prefix,
    /// The host.
    pub host: HostId,
    /// Where first packets go.
    pub address: SocketAddr,
    /// Its right to the name was checked; otherwise nobody here can tell.
    pub authenticated: bool,
    /// When it was said last.
    pub at: Instant,
    /// Relays that have passed it on.
    pub hops: u8,
    /// It did not answer for the name a short while ago: first packets do not go there.
    pub has_failed: bool,
    /// First packets that went there, and when the last one did.
    pub packets: u64,
    /// See `packets`.
    pub used: Option<Instant>,
}

/// What this host says and has heard.
pub(crate) struct Notices {
    is_on: bool,
    sequence: u32,
    own: BTreeMap<Prefix, Own>,
    /// Since then it is to be looked which names are served here.
    look: Option<Instant>,
    heard: BTreeMap<(Prefix, HostId), Entry>,
    checks: RateLimit,
}

impl Notices {
    pub fn new(now: Instant) -> Self {
        Self {
            is_on: false,
            sequence: 0,
            own: BTreeMap::new(),
            look: None,
            heard: BTreeMap::new(),
            checks: RateLimit::new(CHECKED_PER_S, now),
        }
    }

    /// Whether a host that was heard of serves a name at an address.
    pub fn has_at(&self, service: &ServiceId, at: SocketAddr) -> bool {
        self.heard.iter().any(|((prefix, _), entry)| prefix.contains(service) && entry.addresses.contains(&at))
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.own.values().map(|own| own.next).chain(self.look).min()
    }

    /// The names that are served here may be others now.
    pub fn look_again(&mut self, now: Instant) {
        if self.is_on {
            self.look = Some(now);
        }
    }

    /// Everything is said anew, where this host's addresses, or what it may say, are others now.
    pub fn tell_again(&mut self, now: Instant, has_changed: bool) {
        for own in self.own.values_mut().filter(|own| has_changed && !own.withdrawn) {
            (own.said, own.next) = (0, now);
        }
    }

    /// Whether there is room for one more; what is over is forgotten, and what nobody could check gives way to what is
    /// proved.
    fn make_room(&mut self, host: HostId, authenticated: bool, unix_s: u64) -> bool {
        self.heard.retain(|_, entry| entry.until_s >= unix_s);
        if self.heard.keys().filter(|(_, of)| *of == host).count() >= HEARD_OF_HOST_MAX {
            return false;
        }
        if self.heard.len() < HEARD_MAX {
            return true;
        }
        let weak = self.heard.iter().filter(|(_, entry)| authenticated && !entry.authenticated);
        let oldest = weak.min_by_key(|(_, entry)| entry.at).map(|(key, _)| *key);
        oldest.is_some_and(|key| self.heard.remove(&key).is_some())
    }
}

impl Sal {
    /// Whether this host tells its segments which names it serves, and goes by what it hears of others.
    pub fn set_notices(&mut self, now: Instant, is_on: bool) {
        self.now = now;
        self.notices.is_on = is_on;
        self.notices.look_again(now);
    }

    /// Every name that others say they serve and that this host could go by, in the order of names.
    pub fn heard(&self, now: Instant) -> impl Iterator<Item = Heard> {
        let unix_s = self.unix_s_at(now);
        self.notices.heard.iter().filter(move |(_, entry)| !entry.withdrawn && entry.until_s >= unix_s).filter_map(
            move |((prefix, host), entry)| {
                Some(Heard {
                    prefix: *prefix,
                    host: *host,
                    address: self.config.usable_address(entry)?,
                    authenticated: entry.authenticated,
                    at: entry.at,
                    hops: entry.hops,
                    has_failed: entry.failed.is_some_and(|at| now.since(at) < FAILED),
                    packets: entry.packets,
                    used: entry.used,
                })
            },
        )
    }

    /// How many names are remembered, those that are served no longer among them.
    pub fn heard_count(&self) -> usize {
        self.notices.heard.len()
    }

    /// The host that a first packet to a name goes to before the segment is asked: of those that were heard of for the
    /// longest prefix, one whose right to it was checked, if there is any.
    pub fn heard_of(&self, now: Instant, service: &ServiceId, sticky: u64) -> Option<Heard> {
        let fits = |heard: &Heard| self.notices.is_on && !heard.has_failed && heard.prefix.contains(service);
        let fit: Vec<Heard> = self.heard(now).filter(fits).collect();
        let rank = |heard: &Heard| (heard.prefix.bits, heard.authenticated);
        let best = fit.iter().map(rank).max()?;
        let best: Vec<&Heard> = fit.iter().filter(|heard| rank(heard) == best).collect();
        let at = sticky % best.len() as u64;
        best.get(usize::try_from(at).ok()?).copied().copied()
    }

    /// Where a first packet to a name goes for which the segment would be asked.
    pub(crate) fn hop_by_notice(&mut self, now: Instant, service: &ServiceId, sticky: u64) -> Option<SocketAddr> {
        let heard = self.heard_of(now, service, sticky)?;
        let entry = self.notices.heard.get_mut(&(heard.prefix, heard.host))?;
        entry.packets += 1;
        entry.used = Some(now);
        self.counters.notices_used += 1;
        Some(heard.address)
    }

    /// The host that a connecting flow went to by its notice has not answered, or not well: the segment is asked, as
    /// without. False where the flow did not go by a notice.
    pub(crate) fn leave_notice(&mut self, now: Instant, id: FlowId) -> bool {
        let Some((service, next_hop)) = self.flows.get(id).and_then(|flow| match &flow.setup {
            Setup::Initiator(setup) if setup.pin.is_none() && setup.related.is_none() => {
                Some((flow.asked(), setup.next_hop))
            }
            _ => None,
        }) else {
            return false;
        };
        if !self.notices.is_on || next_hop == SEGMENT || next_hop == self.loopback() {
            return false;
        }
        // Where a rule leads there, it is the rule's word and no notice's.
        let is_it = |action: &Action| action.next_hop().is_some_and(|hop| hop.address == next_hop);
        if self.rules_covering(service).any(|(_, _, rule)| is_it(&rule.action)) {
            return false;
        }
        let went_there =
            |prefix: &Prefix, entry: &Entry| prefix.contains(&service) && entry.addresses.contains(&next_hop);
        let mut known =
            self.notices.heard.iter_mut().filter(|((prefix, _), entry)| went_there(prefix, entry)).peekable();
        if known.peek().is_none() {
            return false;
        }
        known.for_each(|(_, entry)| entry.failed = Some(now));
        self.counters.notices_failed += 1;
        if let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
            (setup.next_hop, setup.retries, setup.give_up) = (SEGMENT, 0, now + SEGMENT_TIMEOUT);
        }
        self.send_syn(now, id);
        true
    }

    /// A notice came to this host's segment.
    pub(crate) fn handle_notice(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        let (notice, addresses) = (message.notice(), message.addresses());
        let (Some(notice), Some(addresses), Some(resolvable)) = (notice, addresses, message.resolvable) else {
            return Err(DropReason::Malformed);
        };
        let (host_key, prefix) = (HostPublic(notice.host_key), Prefix::new(ServiceId(notice.prefix), notice.bits));
        if !self.came_to_all {
            return Err(DropReason::Unexpected);
        }
        let is_wanted = self.notices.is_on || self.relay.is_some();
        if !is_wanted || host_key == self.config.host_key.public() {
            return Ok(());
        }
        if prefix.id.0 != notice.prefix || prefix.bits < SERVICE_BITS {
            return Err(DropReason::Malformed);
        }
        let key = (prefix, host_key.id());
        if !self.is_new_notice(&key, &notice)? {
            return Ok(());
        }
        if !self.notices.checks.take(now) {
            return Err(DropReason::RateLimited);
        }
        let authenticated = self.check_notice(message, &notice, &prefix.id, addresses)?;
        if !self.notices.heard.contains_key(&key) && !self.notices.make_room(key.1, authenticated, self.unix_s()) {
            self.counters.notices_refused += 1;
            return Err(DropReason::Full);
        }
        let mut addresses: Vec<SocketAddr> = addresses.iter().map(|(address, _)| address).collect();
        // The one that it sends from is on this segment.
        addresses.sort_by_key(|address| address.ip() != from.ip());
        let NoticeRepr { epoch, sequence, until_s, withdrawn, .. } = notice;
        let hops = HOP_LIMIT.saturating_sub(resolvable.hop_limit);
        // Whoever has started again may answer now.
        let failed_in = |entry: &Entry| entry.failed.filter(|_| entry.epoch == notice.epoch);
        let known = self.notices.heard.get(&key).map(|entry| (failed_in(entry), entry.packets, entry.used));
        let (failed, packets, used) = known.unwrap_or_default();
        let entry = Entry {
            epoch,
            sequence,
            until_s,
            withdrawn,
            authenticated,
            addresses,
            at: now,
            hops,
            failed,
            packets,
            used,
        };
        self.notices.heard.insert(key, entry);
        self.counters.notices_heard += 1;
        self.pass_notice_on(&resolvable, datagram)
    }

    /// Whether it is later than what its host has said before, and no copy of that: by the other family, say, or by
    /// another relay.
    fn is_new_notice(&self, key: &(Prefix, HostId), notice: &NoticeRepr) -> Result<bool, DropReason> {
        let unix_s = self.unix_s();
        if notice.until_s < unix_s || notice.until_s > unix_s + LIFETIME_S + SKEW_S {
            return Err(DropReason::Stale);
        }
        let known = self.notices.heard.get(key).map(|entry| (entry.epoch, entry.sequence));
        match known.map(|known| (notice.epoch, notice.sequence).cmp(&known)) {
            Some(Ordering::Less) => Err(DropReason::Replayed),
            Some(Ordering::Equal) => Ok(false),
            Some(Ordering::Greater) | None => Ok(true),
        }
    }

    /// Whether its host has said it; and the right to the name, where somebody is trusted for it.
    fn check_notice(
        &mut self,
        message: &Message<'_>,
        notice: &NoticeRepr,
        service: &ServiceId,
        addresses: Addresses<'_>,
    ) -> Result<bool, DropReason> {
        let signed = [&notice.signed_head()[..], addresses.as_bytes()].concat();
        let refused = |sal: &mut Self, why| {
            sal.counters.notices_refused += 1;
            Err(why)
        };
        if !HostPublic(notice.host_key).verify(&signed, &notice.signature) {
            return refused(self, DropReason::BadTag);
        }
        let (chain, unix_s) = (message.certificate().unwrap_or_default(), self.unix_s());
        match self.trust.verify_service(chain, service, &notice.host_key, unix_s) {
            Ok(proof) => Ok(proof == Authenticated::Yes),
            Err(_) => refused(self, DropReason::BadCertificate),
        }
    }

    fn pass_notice_on(&mut self, resolvable: &ResolvableRepr, datagram: &[u8]) -> Result<(), DropReason> {
        if self.relay.is_none() {
            return Ok(());
        }
        if resolvable.hop_limit <= 1 {
            return Err(DropReason::HopLimit);
        }
        let onward = ResolvableRepr { hop_limit: resolvable.hop_limit - 1, ..*resolvable };
        let copy = rewrite(datagram, &onward, None).ok_or(DropReason::Malformed)?;
        self.counters.forwarded += 1;
        self.transmit(SEGMENT, copy, Kind::Notice);
        Ok(())
    }

    /// This host goes: it serves nothing any more, and nobody shall ask it.
    pub(crate) fn withdraw_notices(&mut self) {
        let told: Vec<Prefix> = self.notices.own.keys().copied().collect();
        for prefix in told {
            self.say_notice(prefix, true);
        }
        self.notices.own.clear();
    }

    /// Says what is to be said now.
    pub(crate) fn notices_due(&mut self, now: Instant) {
        if self.notices.look.take().is_some() {
            self.notices.look_for_names(&self.table, now);
        }
        let due: Vec<Prefix> =
            self.notices.own.iter().filter(|(_, own)| own.next <= now).map(|(prefix, _)| *prefix).collect();
        for prefix in due {
            let Some(own) = self.notices.own.get_mut(&prefix) else { continue };
            own.said += 1;
            let withdrawn = own.withdrawn;
            if own.said < TIMES {
                own.next = now + AGAIN * (1 << own.said.min(TIMES)) / 2;
            } else if withdrawn {
                self.notices.own.remove(&prefix);
            } else {
                own.next = now + REFRESH;
            }
            self.say_notice(prefix, withdrawn);
        }
    }

    fn say_notice(&mut self, prefix: Prefix, withdrawn: bool) {
        let addresses = self.config.own_addresses();
        let Ok(told) = Addresses::parse(&addresses) else { return };
        self.notices.sequence += 1;
        let mut notice = NoticeRepr {
            epoch: self.config.epoch,
            sequence: self.notices.sequence,
            until_s: self.unix_s() + LIFETIME_S,
            bits: prefix.bits,
            withdrawn,
            prefix: prefix.id.0,
            host_key: self.config.host_key.public().0,
            signature: [0; 64],
        };
        notice.signature = self.config.host_key.sign(&[&notice.signed_head()[..], &addresses].concat());
        let chain = self.certificate_for(&prefix.id);
        let mut extensions = alloc::vec![Extension::Notice(notice), Extension::Addresses(told)];
        extensions.extend((!chain.is_empty()).then_some(Extension::Certificate(&chain)));
        let mut draft = Draft::new(Kind::Notice, FlowId(0), FlowId(0));
        draft.flags = Flags::RESOLVABLE;
        draft.resolvable = Some(ResolvableRepr {
            hop_limit: HOP_LIMIT,
            reply_to: None,
            via: None,
            service: prefix.id.0,
            nonce: 0,
            hop_tag: [0; 8],
        });
        draft.extensions = &extensions;
        if let Some(datagram) = draft.write(None).filter(|whole| whole.len() <= usize::from(self.config.datagram_max)) {
            self.transmit(SEGMENT, datagram, Kind::Notice);
        }
    }
}

impl Config {
    fn usable_address(&self, entry: &Entry) -> Option<SocketAddr> {
        entry.addresses.iter().copied().find(|address| self.has_family_of(address.ip()))
    }
}

impl Notices {
    /// Which names are served here now.
    fn look_for_names(&mut self, table: &ServiceTable, now: Instant) {
        let is_served = |rule: &Rule| {
            let takes_clients = |demux: &Demux| demux.service_port != Some(HAND_OVER_PORT);
            matches!(&rule.action, Action::Demux(demux) if takes_clients(demux)) && !is_answering(rule)
        };
        let served = table.iter().filter(|(prefix, _, rule)| prefix.bits >= SERVICE_BITS && is_served(rule));
        let mut served: Vec<Prefix> = served.map(|(prefix, _, _)| prefix).collect();
        served.sort_unstable();
        served.dedup();
        served.truncate(OWN_MAX);
        for (prefix, own) in &mut self.own {
            if own.withdrawn == served.binary_search(prefix).is_ok() {
                *own = Own { said: 0, withdrawn: !own.withdrawn, next: now };
            }
        }
        for prefix in served {
            self.own.entry(prefix).or_insert(Own { said: 0, withdrawn: false, next: now });
        }
    }
}
