//! The board, and all that it touches: rights, rules, and the streams that bring and take words.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use margay_core::certificate::{Revocation, TrustAnchor, TrustStore, decode_chain};
use margay_core::key::{HostPublic, VerifyingKey};
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::Prefix;
use margay_core::succession::Succession;
use margay_core::table::RuleId;
use margay_core::way::Relation;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::announcement::{Announcement, Fault, Stage, is_site, prefix_of};
use super::board::{Board, Link, Neighbour, Word};
use super::policy::Policy;
use super::rule::{Rules, rule_of};
use crate::keyring::Keyring;
use crate::registration::proto::{self, from_host, from_router};
use crate::registration::{Act, Ledger};
use crate::store::Member;
use crate::{Clock, SalControl, issue};

/// Words that one neighbour is told in one go.
const WORDS_MAX: usize = 64;
/// How often proofs are looked at: those that end, and those to be made anew.
const LOOK: Duration = Duration::from_secs(60);

/// What happened, for metrics.
#[derive(Clone, Copy)]
enum Count {
    Sent,
    RetractionSent,
    Received,
    RetractionReceived,
    Refused,
    Declined,
}

const COUNTS: [&str; 6] =
    ["sent", "retraction_sent", "received", "retraction_received", "refused", "declined_by_neighbour"];

struct Place {
    address: SocketAddr,
    wake: Arc<Notify>,
    since_unix_s: u64,
}

struct State {
    board: Board,
    rules: Rules,
    trust: TrustStore,
    /// Authorities of this router that are trusted already.
    anchored: BTreeSet<[u8; 8]>,
    places: BTreeMap<Link, Place>,
    /// When proofs are looked at next.
    look_at: margay_core::Instant,
    counts: [u64; COUNTS.len()],
}

impl State {
    fn count(&mut self, what: Count) {
        self.counts[what as usize] += 1;
    }
}

/// What a router tells other routers, and is told by them.
pub struct WideArea {
    policy: Arc<Policy>,
    own: HostPublic,
    keyring: Keyring,
    sal: Arc<dyn SalControl>,
    clock: Clock,
    started: Instant,
    ledger: OnceLock<Arc<Ledger>>,
    state: Mutex<State>,
}

/// A neighbour as lists show it.
#[derive(Clone, Debug)]
pub struct NeighbourInfo {
    /// The stream.
    pub link: Link,
    /// How it is taken.
    pub neighbour: Neighbour,
    /// Its SAL address.
    pub address: SocketAddr,
    /// Since when its stream is up, in seconds since 1970.
    pub since_unix_s: u64,
    /// What it was told, and why it did not take it, if so.
    pub told: Vec<(Announcement, String)>,
    /// What it said, and how long ago in milliseconds.
    pub heard: Vec<(Announcement, u64)>,
}

/// What goes by a stream, either way.
#[derive(Clone, Debug, PartialEq)]
pub enum Words {
    /// Names are announced.
    Announce(proto::Announce),
    /// They are no longer.
    Retract(proto::Retract),
    /// An announcement is not taken.
    Declined(proto::Declined),
}

impl From<Words> for from_host::Body {
    fn from(words: Words) -> Self {
        match words {
            Words::Announce(announce) => Self::Announce(announce),
            Words::Retract(retract) => Self::Retract(retract),
            Words::Declined(declined) => Self::Declined(declined),
        }
    }
}

impl From<Words> for from_router::Body {
    fn from(words: Words) -> Self {
        match words {
            Words::Announce(announce) => Self::Announce(announce),
            Words::Retract(retract) => Self::Retract(retract),
            Words::Declined(declined) => Self::Declined(declined),
        }
    }
}

impl WideArea {
    /// Of a router whose key is `own`.
    pub fn new(policy: Policy, own: HostPublic, keyring: Keyring, sal: Arc<dyn SalControl>, clock: Clock) -> Arc<Self> {
        let state = State {
            board: Board::new(own.id(), &policy.site),
            rules: Rules::new(Arc::clone(&sal)),
            trust: TrustStore::default(),
            anchored: BTreeSet::new(),
            places: BTreeMap::new(),
            look_at: margay_core::Instant::ZERO,
            counts: [0; COUNTS.len()],
        };
        Arc::new(Self {
            policy: Arc::new(policy),
            own,
            keyring,
            sal,
            clock,
            started: Instant::now(),
            ledger: OnceLock::new(),
            state: Mutex::new(state),
        })
    }

    /// What the operator wants.
    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// Where refusals are written down.
    pub(crate) fn set_ledger(&self, ledger: Arc<Ledger>) {
        // Set once, at the start.
        let _ = self.ledger.set(ledger);
    }

    fn now(&self) -> margay_core::Instant {
        let micros = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        margay_core::Instant::from_micros(micros)
    }

    /// Believes what an authority has signed.
    pub fn trust(&self, anchor: TrustAnchor) {
        self.state.lock().trust.add(anchor);
    }

    /// Believes no more what was signed for a host that was put out.
    pub fn revoke(&self, revocation: Revocation) {
        let mut state = self.state.lock();
        state.trust.revoke(revocation, self.clock.unix_s());
        state.board.forget_all_where(|heard| {
            let Announcement { origin, prefix, not_after_s, .. } = &heard.announcement;
            origin.0 == revocation.host_key
                && prefix.id.authority() == revocation.authority
                && *not_after_s <= revocation.until_s
        });
        self.settle(&mut state);
    }

    /// Believes the key that follows another one, and that one for its time.
    pub fn succeed(&self, succession: &Succession) {
        self.state.lock().trust.succeed(succession);
    }

    /// Trusts the authority that this router signs for.
    fn anchor(&self, state: &mut State, authority: [u8; 8]) {
        if !state.anchored.contains(&authority)
            && let Ok(Some(known)) = self.keyring.authority_of(authority)
        {
            state.anchored.insert(authority);
            state.trust.add(TrustAnchor { authority, key: known.root() });
        }
    }

    /// Believes no more what was signed with a key that may sign no longer.
    pub fn revoke_key(&self, revocation: KeyRevocation) {
        let (mut state, unix_s) = (self.state.lock(), self.clock.unix_s());
        let State { board, trust, .. } = &mut *state;
        trust.revoke_key(revocation, unix_s);
        board.forget_all_where(|heard| trust.is_by_revoked_key(&heard.announcement.proof));
        self.settle(&mut state);
    }

    /// A stream with a neighbouring router begins. It ends when what is given back is dropped. `member`: what it was
    /// granted here; none where this router has joined it.
    ///
    /// # Errors
    ///
    /// Its site has no name, or there are too many neighbours.
    pub fn attach(
        self: &Arc<Self>,
        link: Link,
        address: SocketAddr,
        site: &str,
        relation: Relation,
        member: Option<Member>,
    ) -> Result<Attachment, Fault> {
        if !is_site(site) {
            return Err(Fault::Invalid("the name of its site is no label"));
        }
        let preferred = self.policy.preference(site);
        let (preference, weight) = (preferred.preference, preferred.weight);
        let neighbour = Neighbour { site: site.to_owned(), relation, preference, weight };
        let wake = Arc::new(Notify::new());
        let mut state = self.state.lock();
        let ticket = state.board.arrive(link, neighbour)?;
        let place = Place { address, wake: Arc::clone(&wake), since_unix_s: self.clock.unix_s() };
        state.places.insert(link, place);
        self.sal.set_relation(link.host, Some(relation));
        self.settle(&mut state);
        tracing::info!(site, host = %link.host, ?relation, "a router of another site is here");
        Ok(Attachment { area: Arc::clone(self), link, ticket, wake, member })
    }

    fn leave(&self, link: &Link, ticket: u64) {
        let mut state = self.state.lock();
        if !state.board.leave(link, ticket) {
            return;
        }
        state.places.remove(link);
        // By another stream, for another authority, it may still be a neighbour.
        let other = state.board.neighbours().find(|(other, _)| other.host == link.host);
        let relation = other.map(|(_, neighbour)| neighbour.relation);
        self.sal.set_relation(link.host, relation);
        self.settle(&mut state);
        tracing::info!(host = %link.host, "a router of another site is gone");
    }

    /// Makes the rules follow from what was heard, and wakes the streams that have something to say.
    fn settle(&self, state: &mut State) {
        for prefix in state.board.take_changed() {
            let candidates = state.board.candidates(&prefix);
            let rule = |candidate: &super::board::Candidate<'_>| {
                Some((candidate.link, rule_of(candidate, state.places.get(&candidate.link)?.address)))
            };
            let wanted = candidates.iter().filter_map(rule).collect();
            state.rules.set(prefix, wanted);
        }
        for link in state.board.to_tell() {
            if let Some(place) = state.places.get(link) {
                place.wake.notify_one();
            }
        }
    }

    fn prove(&self, prefix: Prefix, host: &HostPublic) -> Option<(Vec<u8>, u64)> {
        let authority = self.keyring.authority_of(prefix.id.authority());
        let authority = authority.inspect_err(|error| tracing::warn!(%error, "an authority's key cannot be read"));
        let unix_s = self.clock.unix_s();
        let authority = authority.ok()?.filter(|authority| authority.is_valid(unix_s))?;
        Some(issue::service(&authority, prefix, host, unix_s))
    }

    fn own_announcement(&self, prefix: Prefix, name: String) -> Announcement {
        // Without the authority's key, whoever hears it knows what this router was granted.
        let (proof, not_after_s) = self.prove(prefix, &self.own).unwrap_or((Vec::new(), u64::MAX));
        let path = vec![Stage { host: self.own.id(), site: self.policy.site.clone() }];
        let (scope, weight) = (self.policy.scope(&prefix), self.policy.weight);
        Announcement { prefix, name, scope, path, weight, origin: self.own, proof, not_after_s }
    }

    /// Follows what the site serves, and the time, until it is aborted.
    pub async fn follow(
        self: Arc<Self>,
        mut changes: watch::Receiver<u64>,
        take_served: impl Fn() -> Vec<(Prefix, Option<String>)>,
    ) {
        loop {
            let served = take_served();
            let deadline = self.look(served);
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(deadline) => {}
            }
        }
    }

    /// Takes up what is served otherwise than before, and what time has brought. Gives how long nothing else happens.
    fn look(&self, served: Vec<(Prefix, Option<String>)>) -> Duration {
        let (now, unix_s) = (self.now(), self.clock.unix_s());
        let mut state = self.state.lock();
        for (prefix, name) in served {
            let announcement = name.map(|name| self.own_announcement(prefix, name));
            state.board.set_served(now, prefix, announcement);
        }
        if state.look_at <= now {
            state.look_at = now + LOOK;
            self.look_at_proofs(&mut state, now, unix_s);
        }
        state.board.tick(now);
        self.settle(&mut state);
        let deadline = state.board.deadline().map_or(state.look_at, |deadline| deadline.min(state.look_at));
        deadline.since(now)
    }

    /// Makes those anew that end before long, and forgets what is not proved any more.
    fn look_at_proofs(&self, state: &mut State, now: margay_core::Instant, unix_s: u64) {
        let mut roots: BTreeMap<[u8; 8], Option<VerifyingKey>> = BTreeMap::new();
        let mut is_by_root = |one: &Announcement| {
            let block = one.prefix.id.authority();
            let of_keyring = || self.keyring.authority_of(block).ok().flatten().map(|known| known.root());
            let root = *roots.entry(block).or_insert_with(of_keyring);
            let chain = decode_chain(&one.proof).unwrap_or_default();
            root.is_none() || chain.first().map(|first| first.issuer) == root
        };
        let is_old = |one: &&Announcement| {
            one.proof.is_empty() || one.not_after_s <= unix_s + issue::LIFETIME_S / 2 || !is_by_root(one)
        };
        let old: Vec<Announcement> = state.board.served().filter(is_old).cloned().collect();
        for one in old {
            let again = self.own_announcement(one.prefix, one.name);
            // What would hold no longer is no news; this router's warrant may end soon.
            if !again.proof.is_empty() && (one.proof.is_empty() || again.not_after_s > one.not_after_s) {
                state.board.set_served(now, one.prefix, Some(again));
            }
        }
        state.board.forget_all_where(|heard| heard.announcement.not_after_s <= unix_s);
    }

    fn check(&self, state: &mut State, said: &mut Announcement, member: Option<&Member>) -> Result<(), Fault> {
        let prefix = said.prefix;
        if member.is_some_and(|member| !member.may_register(&prefix)) {
            return Err(Fault::NoGrant(prefix));
        }
        let authority = prefix.id.authority();
        self.anchor(state, authority);
        let unproved = |why: &str| Fault::Proof { prefix, why: why.to_owned() };
        if said.proof.is_empty() {
            if member.is_none() || said.path.len() > 1 {
                return Err(unproved("it shows no certificate"));
            }
            let none = "it shows no certificate, and this router has no key of the authority to make it one";
            let made = self.prove(prefix, &said.origin).ok_or_else(|| unproved(none))?;
            (said.proof, said.not_after_s) = made;
            return Ok(());
        }
        let proved = state.trust.verify_prefix(&said.proof, &prefix, &said.origin.0, self.clock.unix_s());
        said.not_after_s = proved.map_err(|error| unproved(&error.to_string()))?;
        Ok(())
    }

    fn refuse(&self, state: &mut State, link: &Link, prefix: &Prefix, fault: &Fault) -> proto::Declined {
        state.count(Count::Refused);
        tracing::warn!(host = %link.host, %prefix, why = %fault, "announcement refused");
        if let Some(ledger) = self.ledger.get() {
            ledger.note(Act::AnnounceRefused, link.host, format!("{prefix}: {fault}"));
        }
        proto::Declined {
            service_id: prefix.id.0.to_vec(),
            bits: prefix.bits.into(),
            code: fault.code().into(),
            text: fault.to_string(),
        }
    }

    /// The sites by which a rule leads, the next one first, if it is one of these.
    pub fn origin(&self, rule: RuleId) -> Option<Vec<String>> {
        let state = self.state.lock();
        let (prefix, link) = state.rules.find(rule)?;
        let candidates = state.board.candidates(&prefix);
        let candidate = candidates.iter().find(|candidate| candidate.link == link)?;
        Some(candidate.heard.announcement.sites().into_iter().map(str::to_owned).collect())
    }

    /// Names of prefixes that neighbours have announced; with `about` of those alone that cover it, or that it covers.
    pub fn names(&self, about: Option<&Prefix>) -> Vec<(Prefix, String)> {
        let is_meant = |prefix: &Prefix| about.is_none_or(|about| prefix.overlaps(about));
        let state = self.state.lock();
        let all = state.board.heard().map(|heard| &heard.announcement);
        let named = all.filter(|said| !said.name.is_empty() && is_meant(&said.prefix));
        named.map(|said| (said.prefix, said.name.clone())).collect()
    }

    /// The neighbours whose streams are up, and what was said.
    pub fn neighbours(&self) -> Vec<NeighbourInfo> {
        let (state, now) = (self.state.lock(), self.now());
        let board = &state.board;
        let info = |(link, neighbour): (&Link, &Neighbour)| {
            let place = state.places.get(link)?;
            let told = board.told(link).map(|(announcement, why)| (announcement.clone(), why.to_owned()));
            let age_ms = |since: margay_core::Instant| u64::try_from(now.since(since).as_millis()).unwrap_or(u64::MAX);
            let heard = board.heard_from(link).map(|heard| (heard.announcement.clone(), age_ms(heard.since)));
            Some(NeighbourInfo {
                link: *link,
                neighbour: neighbour.clone(),
                address: place.address,
                since_unix_s: place.since_unix_s,
                told: told.collect(),
                heard: heard.collect(),
            })
        };
        board.neighbours().filter_map(info).collect()
    }

    /// How many neighbours there are, and prefixes that they have announced.
    pub fn sizes(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.board.neighbours().count(), state.board.prefixes())
    }

    /// How often what was said and heard.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let counts = self.state.lock().counts;
        COUNTS.into_iter().zip(counts).collect()
    }
}

/// A stream with a neighbour while it lasts.
pub struct Attachment {
    area: Arc<WideArea>,
    link: Link,
    ticket: u64,
    wake: Arc<Notify>,
    member: Option<Member>,
}

impl Attachment {
    fn take_words(&self) -> Vec<Words> {
        let mut state = self.area.state.lock();
        let words = state.board.take_words(&self.link, self.ticket, WORDS_MAX);
        let mut all = Vec::with_capacity(words.len());
        for word in words {
            all.push(match word {
                Word::Announce(announcement) => {
                    state.count(Count::Sent);
                    Words::Announce(announcement.written())
                }
                Word::Retract(prefix) => {
                    state.count(Count::RetractionSent);
                    let (service_id, bits) = (prefix.id.0.to_vec(), prefix.bits.into());
                    Words::Retract(proto::Retract { service_id, bits })
                }
            });
        }
        all
    }

    /// The neighbour has said something; gives what is to be answered.
    pub fn take(&self, words: Words) -> Option<Words> {
        match words {
            Words::Announce(announce) => return self.hear(announce).map(Words::Declined),
            Words::Retract(retract) => {
                let Ok(prefix) = prefix_of(&retract.service_id, retract.bits) else { return None };
                let mut state = self.area.state.lock();
                state.count(Count::RetractionReceived);
                state.board.retracted(&self.link, self.ticket, &prefix);
                self.area.settle(&mut state);
            }
            Words::Declined(declined) => {
                let Ok(prefix) = prefix_of(&declined.service_id, declined.bits) else { return None };
                let mut state = self.area.state.lock();
                state.count(Count::Declined);
                tracing::warn!(host = %self.link.host, %prefix, why = declined.text, "an announcement is not taken");
                state.board.declined(&self.link, self.ticket, &prefix, shown(&declined.text));
            }
        }
        None
    }

    fn hear(&self, announce: proto::Announce) -> Option<proto::Declined> {
        let said = prefix_of(&announce.service_id, announce.bits);
        let read = Announcement::read(announce);
        let (area, now) = (&self.area, self.area.now());
        let mut state = area.state.lock();
        state.count(Count::Received);
        let prefix = said.unwrap_or_default();
        let taken = read.and_then(|mut announcement| {
            area.check(&mut state, &mut announcement, self.member.as_ref())?;
            let path = announcement.sites().join(" > ");
            state.board.hear(now, &self.link, self.ticket, announcement)?;
            if let Some(ledger) = area.ledger.get() {
                ledger.note(Act::Announce, self.link.host, format!("{prefix}, by {path}"));
            }
            Ok(())
        });
        let declined = taken.err().map(|fault| {
            state.board.retracted(&self.link, self.ticket, &prefix);
            area.refuse(&mut state, &self.link, &prefix, &fault)
        });
        area.settle(&mut state);
        declined
    }

    /// What the neighbour may announce has changed: what it may no longer is forgotten, and it is told.
    pub fn review(&mut self, member: &Member) -> Vec<Words> {
        let area = &self.area;
        let mut state = area.state.lock();
        let not_granted = |heard: &super::board::Heard| !member.may_register(&heard.announcement.prefix);
        let gone = state.board.forget_where(&self.link, not_granted);
        let declined = gone
            .iter()
            .map(|prefix| Words::Declined(area.refuse(&mut state, &self.link, prefix, &Fault::NoGrant(*prefix))));
        let declined = declined.collect();
        area.settle(&mut state);
        self.member = Some(member.clone());
        declined
    }

    /// This router may announce other names to the neighbour than before.
    pub fn tell_declined_again(&self) {
        let mut state = self.area.state.lock();
        state.board.tell_declined_again(&self.link, self.ticket);
        self.area.settle(&mut state);
    }

    /// What an earlier stream of the neighbour had said and this one has not no longer holds.
    pub fn sweep(&self) {
        let mut state = self.area.state.lock();
        state.board.sweep(&self.link, self.ticket);
        self.area.settle(&mut state);
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.area.leave(&self.link, self.ticket);
    }
}

/// What somebody else has written, as far as people want to read it.
fn shown(text: &str) -> String {
    const SHOWN_MAX: usize = 300;
    text.chars().filter(|char| !char.is_control()).take(SHOWN_MAX).collect()
}

/// What is to be said by a stream now; waits until there is something. Without an attachment there never is.
pub async fn due(attachment: Option<&Attachment>) -> Vec<Words> {
    let Some(attachment) = attachment else { return std::future::pending().await };
    loop {
        let words = attachment.take_words();
        if !words.is_empty() {
            return words;
        }
        attachment.wake.notified().await;
    }
}
