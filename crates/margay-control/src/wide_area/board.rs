//! What neighbouring routers have announced to this one, what this one serves itself, and what each neighbour is told
//! of it. Pure: no streams, no clock; what is to be said is taken out in parts, and says what holds then.
//!
//! A neighbour above or beside is told the best of what is served here and what was heard from below, and nothing else.
//! So announcements go up, and once across; with the rule that first packets go up, once across, and down
//! ([`margay_core::way`]), routers agree whatever each of them prefers, and nothing goes round.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use margay_core::Instant;
use margay_core::key::HostId;
use margay_core::name::Prefix;
use margay_core::way::Relation;
use std::time::Duration;

use super::announcement::{Announcement, Fault, PATH_MAX, Scope, Stage};

/// Neighbours of one router.
pub const LINKS_MAX: usize = 1024;
/// Prefixes that one neighbour announces.
pub const HEARD_MAX: usize = 10_000;
/// What is served here no longer is not announced again for so long: something that comes and goes is told twice in
/// that time at most.
pub const REST: Duration = Duration::from_secs(1);

/// A stream with a neighbour, for names of one authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Link {
    /// The neighbour.
    pub host: HostId,
    /// Block of the authority.
    pub authority: [u8; 8],
    /// This router has joined the neighbour, and not the other way.
    pub joined: bool,
}

/// A neighbour, as this router takes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// What its site is called.
    pub site: String,
    /// What it is to this one.
    pub relation: Relation,
    /// Higher first, among those of one relation.
    pub preference: u32,
    /// In percent of the share that it asks for.
    pub weight: u32,
}

/// What a neighbour is to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// This router leads there.
    Announce(Announcement),
    /// It does no longer.
    Retract(Prefix),
}

/// An announcement that was heard.
#[derive(Clone, Debug)]
pub struct Heard {
    /// What was said.
    pub announcement: Announcement,
    /// When it was said first, in this form.
    pub since: Instant,
    /// Of the stream by which it came.
    ticket: u64,
}

/// A way to names: what was heard, as this router ranks it.
#[derive(Clone, Debug)]
pub struct Candidate<'a> {
    /// From whom.
    pub link: Link,
    /// The neighbour.
    pub neighbour: &'a Neighbour,
    /// What it said.
    pub heard: &'a Heard,
    /// 0 is best; ways of one rank share.
    pub rank: usize,
}

struct Peer {
    neighbour: Neighbour,
    ticket: u64,
    told: BTreeMap<Prefix, Announcement>,
    /// What it would not take.
    declined: BTreeMap<Prefix, String>,
    /// Of which it may have to be told something.
    pending: BTreeSet<Prefix>,
}

/// All of it.
pub struct Board {
    own: Stage,
    peers: BTreeMap<Link, Peer>,
    served: BTreeMap<Prefix, Announcement>,
    /// What is served here no longer rests until then.
    resting: BTreeMap<Prefix, Instant>,
    heard: BTreeMap<Prefix, BTreeMap<Link, Heard>>,
    /// By link, to bound and to list them.
    heard_by: BTreeMap<Link, BTreeSet<Prefix>>,
    changed: BTreeSet<Prefix>,
    next_ticket: u64,
}

type Rank = (Relation, Reverse<u32>, usize);

impl Board {
    /// Of a router.
    pub fn new(host: HostId, site: &str) -> Self {
        Self {
            own: Stage { host, site: site.to_owned() },
            peers: BTreeMap::new(),
            served: BTreeMap::new(),
            resting: BTreeMap::new(),
            heard: BTreeMap::new(),
            heard_by: BTreeMap::new(),
            changed: BTreeSet::new(),
            next_ticket: 1,
        }
    }

    /// A stream with a neighbour begins; later ones replace it, and what was heard by it stays until
    /// [`sweep`](Self::sweep). Gives its number.
    ///
    /// # Errors
    ///
    /// There are too many neighbours.
    pub fn arrive(&mut self, link: Link, neighbour: Neighbour) -> Result<u64, Fault> {
        if self.peers.len() >= LINKS_MAX && !self.peers.contains_key(&link) {
            return Err(Fault::Invalid("this router has as many neighbours as it may"));
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let known = self.heard_by.get(&link).cloned().unwrap_or_default();
        self.changed.extend(known.iter().copied());
        let all = self.served.keys().chain(self.heard.keys()).copied();
        let pending = all.filter(|prefix| prefix.id.authority() == link.authority).collect();
        let (told, declined) = (BTreeMap::new(), BTreeMap::new());
        self.peers.insert(link, Peer { neighbour, ticket, told, declined, pending });
        // Its relation may be another now, and with it what is best.
        known.iter().for_each(|prefix| self.touch(*prefix));
        Ok(ticket)
    }

    /// Whether a stream is the neighbour's latest.
    pub fn is_current(&self, link: &Link, ticket: u64) -> bool {
        self.peers.get(link).is_some_and(|peer| peer.ticket == ticket)
    }

    /// A stream is over: what was heard by it no longer holds, unless another took its place.
    pub fn leave(&mut self, link: &Link, ticket: u64) -> bool {
        if !self.is_current(link, ticket) {
            return false;
        }
        self.peers.remove(link);
        self.forget_where(link, |_| true);
        true
    }

    /// What an earlier stream had said and this one has not is forgotten.
    pub fn sweep(&mut self, link: &Link, ticket: u64) {
        if self.is_current(link, ticket) {
            self.forget_where(link, |heard| heard.ticket != ticket);
        }
    }

    /// Forgets what a neighbour has said, where it is so.
    pub fn forget_where(&mut self, link: &Link, is_gone: impl Fn(&Heard) -> bool) -> Vec<Prefix> {
        let said = self.heard_by.get(link).into_iter().flatten();
        let gone: Vec<Prefix> = said
            .filter(|prefix| self.heard.get(prefix).and_then(|by| by.get(link)).is_some_and(&is_gone))
            .copied()
            .collect();
        gone.iter().for_each(|prefix| self.forget(link, prefix));
        gone
    }

    /// Forgets whatever was heard that is so.
    pub fn forget_all_where(&mut self, is_gone: impl Fn(&Heard) -> bool) {
        let links: Vec<Link> = self.heard_by.keys().copied().collect();
        for link in links {
            self.forget_where(&link, &is_gone);
        }
    }

    fn forget(&mut self, link: &Link, prefix: &Prefix) {
        let Some(by) = self.heard.get_mut(prefix) else { return };
        if by.remove(link).is_none() {
            return;
        }
        if by.is_empty() {
            self.heard.remove(prefix);
        }
        if let Some(said) = self.heard_by.get_mut(link) {
            said.remove(prefix);
            if said.is_empty() {
                self.heard_by.remove(link);
            }
        }
        self.touch(*prefix);
    }

    /// A neighbour announces something, which was proved. What it had said of the prefix before goes, whether this is
    /// taken or not.
    ///
    /// # Errors
    ///
    /// Why it is not taken.
    pub fn hear(&mut self, now: Instant, link: &Link, ticket: u64, announcement: Announcement) -> Result<(), Fault> {
        if !self.is_current(link, ticket) {
            return Err(Fault::Invalid("its stream was replaced"));
        }
        let prefix = announcement.prefix;
        let taken = self.check(link, &announcement);
        if taken.is_err() {
            self.forget(link, &prefix);
            return taken;
        }
        let known = self.heard.get(&prefix).and_then(|by| by.get(link));
        let same = known.filter(|known| known.announcement == announcement);
        let since = same.map_or(now, |known| known.since);
        let is_new = same.is_none();
        self.heard.entry(prefix).or_default().insert(*link, Heard { announcement, since, ticket });
        self.heard_by.entry(*link).or_default().insert(prefix);
        if is_new {
            self.touch(prefix);
        }
        Ok(())
    }

    fn check(&self, link: &Link, announcement: &Announcement) -> Result<(), Fault> {
        let Announcement { prefix, path, .. } = announcement;
        if self.peers.get(link).is_some_and(|peer| peer.neighbour.relation == Relation::Above) {
            return Err(Fault::FromAbove);
        }
        if prefix.id.authority() != link.authority {
            return Err(Fault::Invalid("the names are of another authority than the stream"));
        }
        if path.first().is_none_or(|first| first.host != link.host) {
            return Err(Fault::Invalid("its path begins at another router than the one that says it"));
        }
        if path.iter().any(|stage| stage.host == self.own.host) {
            let round: Vec<&str> = path.iter().rev().map(|stage| stage.site.as_str()).collect();
            return Err(Fault::Loop(round.join(" > ")));
        }
        let hosts: BTreeSet<HostId> = path.iter().map(|stage| stage.host).collect();
        if hosts.len() != path.len() {
            return Err(Fault::Invalid("a router is on its path twice"));
        }
        let said = self.heard_by.get(link);
        match said.filter(|said| said.len() >= HEARD_MAX && !said.contains(prefix)) {
            Some(_) => Err(Fault::Full(HEARD_MAX)),
            None => Ok(()),
        }
    }

    /// A neighbour leads there no longer.
    pub fn retracted(&mut self, link: &Link, ticket: u64, prefix: &Prefix) {
        if self.is_current(link, ticket) {
            self.forget(link, prefix);
        }
    }

    /// A neighbour does not take what it was told.
    pub fn declined(&mut self, link: &Link, ticket: u64, prefix: &Prefix, why: String) {
        let peer = self.peers.get_mut(link).filter(|peer| peer.ticket == ticket && peer.told.contains_key(prefix));
        if let Some(peer) = peer {
            peer.declined.insert(*prefix, why);
        }
    }

    /// All that a neighbour did not take is told to it once more.
    pub fn tell_declined_again(&mut self, link: &Link, ticket: u64) {
        let Some(peer) = self.peers.get_mut(link).filter(|peer| peer.ticket == ticket) else { return };
        for prefix in std::mem::take(&mut peer.declined).into_keys() {
            peer.told.remove(&prefix);
            peer.pending.insert(prefix);
        }
    }

    /// What is served here: from now on, otherwise than before, or no longer.
    pub fn set_served(&mut self, now: Instant, prefix: Prefix, announcement: Option<Announcement>) {
        match announcement {
            Some(announcement) => drop(self.served.insert(prefix, announcement)),
            None => {
                if self.served.remove(&prefix).is_some() && !self.is_resting(&prefix) {
                    self.resting.insert(prefix, now + REST);
                }
            }
        }
        self.touch(prefix);
    }

    /// What is served here, announced or resting.
    pub fn served(&self) -> impl Iterator<Item = &Announcement> {
        self.served.values()
    }

    fn is_resting(&self, prefix: &Prefix) -> bool {
        self.resting.contains_key(prefix)
    }

    /// When [`tick`](Self::tick) has something to do.
    pub fn deadline(&self) -> Option<Instant> {
        self.resting.values().min().copied()
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) {
        let over: Vec<Prefix> =
            self.resting.extract_if(.., |_, until| *until <= now).map(|(prefix, _)| prefix).collect();
        over.into_iter().for_each(|prefix| self.touch(prefix));
    }

    /// Something about a prefix has changed.
    fn touch(&mut self, prefix: Prefix) {
        self.changed.insert(prefix);
        let concerned = |link: &Link, peer: &Peer| {
            link.authority == prefix.id.authority() && peer.neighbour.relation != Relation::Below
        };
        for (_, peer) in self.peers.iter_mut().filter(|(link, peer)| concerned(link, peer)) {
            peer.pending.insert(prefix);
        }
    }

    /// Prefixes whose candidates may have changed, since this was asked last.
    pub fn take_changed(&mut self) -> BTreeSet<Prefix> {
        std::mem::take(&mut self.changed)
    }

    /// The neighbours that may have to be told something.
    pub fn to_tell(&self) -> impl Iterator<Item = &Link> {
        self.peers.iter().filter(|(_, peer)| !peer.pending.is_empty()).map(|(link, _)| link)
    }

    fn rank(&self, link: &Link, heard: &Heard) -> Option<Rank> {
        let neighbour = &self.peers.get(link)?.neighbour;
        Some((neighbour.relation, Reverse(neighbour.preference), heard.announcement.path.len()))
    }

    /// Ways to a prefix, best first: below before beside, then by preference, then by the number of routers.
    pub fn candidates(&self, prefix: &Prefix) -> Vec<Candidate<'_>> {
        let by = self.heard.get(prefix).into_iter().flatten();
        let mut ranked: Vec<(Rank, &Link, &Heard)> =
            by.filter_map(|(link, heard)| Some((self.rank(link, heard)?, link, heard))).collect();
        ranked.sort_by(|one, other| (&one.0, one.1).cmp(&(&other.0, other.1)));
        let mut candidates: Vec<Candidate<'_>> = Vec::new();
        let mut last = None;
        for (rank, link, heard) in ranked {
            let before = candidates.last().map_or(0, |candidate| candidate.rank);
            let is_worse = last.is_some_and(|last| last != rank);
            last = Some(rank);
            let Some(peer) = self.peers.get(link) else { continue };
            let rank = before + usize::from(is_worse);
            candidates.push(Candidate { link: *link, neighbour: &peer.neighbour, heard, rank });
        }
        candidates
    }

    /// What a neighbour is to be told of a prefix.
    fn word_for(&self, link: &Link, peer: &Peer, prefix: &Prefix) -> Option<Announcement> {
        if peer.neighbour.relation == Relation::Below || prefix.id.authority() != link.authority {
            return None;
        }
        if let Some(served) = self.served.get(prefix).filter(|_| !self.is_resting(prefix)) {
            return Some(served.clone());
        }
        let candidates = self.candidates(prefix);
        let may_be_told = |candidate: &&Candidate<'_>| {
            let Announcement { scope, path, .. } = &candidate.heard.announcement;
            let is_on_it = path.iter().any(|stage| stage.host == link.host);
            let is_below = candidate.neighbour.relation == Relation::Below;
            is_below && *scope == Scope::World && !is_on_it && path.len() < PATH_MAX
        };
        let heard = &candidates.iter().find(may_be_told)?.heard.announcement;
        let path = std::iter::once(&self.own).chain(&heard.path).cloned().collect();
        Some(Announcement { path, ..heard.clone() })
    }

    /// Up to `max` words for a neighbour, of which this stream is the latest; what it knows already is not said again.
    pub fn take_words(&mut self, link: &Link, ticket: u64, max: usize) -> Vec<Word> {
        let mut words = Vec::new();
        while words.len() < max {
            let Some(peer) = self.peers.get_mut(link).filter(|peer| peer.ticket == ticket) else { break };
            let Some(prefix) = peer.pending.pop_first() else { break };
            let Some(peer) = self.peers.get(link) else { break };
            let wanted = self.word_for(link, peer, &prefix);
            if peer.told.get(&prefix) == wanted.as_ref() {
                continue;
            }
            let Some(peer) = self.peers.get_mut(link) else { break };
            peer.declined.remove(&prefix);
            match wanted {
                Some(announcement) => {
                    peer.told.insert(prefix, announcement.clone());
                    words.push(Word::Announce(announcement));
                }
                None => {
                    peer.told.remove(&prefix);
                    words.push(Word::Retract(prefix));
                }
            }
        }
        words
    }

    /// The neighbours.
    pub fn neighbours(&self) -> impl Iterator<Item = (&Link, &Neighbour)> {
        self.peers.iter().map(|(link, peer)| (link, &peer.neighbour))
    }

    /// What a neighbour was told, and why it did not take it; empty: it did.
    pub fn told(&self, link: &Link) -> impl Iterator<Item = (&Announcement, &str)> {
        let told = self.peers.get(link).into_iter();
        told.flat_map(|peer| {
            let why = |prefix: &Prefix| peer.declined.get(prefix).map_or("", String::as_str);
            peer.told.iter().map(move |(prefix, announcement)| (announcement, why(prefix)))
        })
    }

    /// What was heard from a neighbour.
    pub fn heard_from(&self, link: &Link) -> impl Iterator<Item = &Heard> {
        let said = self.heard_by.get(link).into_iter().flatten();
        said.filter_map(|prefix| self.heard.get(prefix)?.get(link))
    }

    /// All that was heard.
    pub fn heard(&self) -> impl Iterator<Item = &Heard> {
        self.heard.values().flat_map(BTreeMap::values)
    }

    /// Prefixes that somebody has announced.
    pub fn prefixes(&self) -> usize {
        self.heard.len()
    }
}

#[cfg(test)]
#[path = "board_test.rs"]
mod test;
