//! Leases: virtual IPv4 addresses that stand for names on this host (DESIGN §5).
//!
//! A name keeps its address, also across restarts: it is on disk before anyone hears of it. Only when the pool is
//! used up is an address taken back, from the name that nobody used for the longest time, and never from one that was
//! used within the last day: programs cache addresses for much longer than DNS lets them. A use is a look-up, a first
//! packet that a program sends there, and every moment of a flow or a grant that goes there. New leases come at a
//! bounded rate, and each asker has a budget of its own for a day, so that a program that asks for random names
//! cannot use the pool up: names that are in use keep what they have.

mod budget;

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use margay_core::Ranges;
use margay_core::name::{Name, ServiceId};

pub use self::budget::Asker;
use self::budget::{ASKER_BURST, ASKER_EVERY_S, Budgets, Excess, NEW_PER_S};
use crate::store::{Store, StoreError, StoredLease};
use crate::{Clock, SalControl};

/// Addresses in the pool.
const POOL: u32 = Ranges::NAMES_V4;
/// A name that was used since then keeps its address in any case.
pub(crate) const QUARANTINE_S: u64 = 24 * 60 * 60;
/// How many are leased when the operator is told that the pool comes to its end.
const NEARLY_ALL: usize = POOL as usize / 10 * 9;
/// Between two walks over all flows for the sake of a pool that is used up.
const WALK_AFTER_S: u64 = 60;
/// The agent looks at the clock more often. What passed without it was no time in which programs could use anything.
const GAP_S: u64 = 60 * 60;
/// Between two words of the log about the end of the pool.
const ALARM_AFTER_S: u64 = 60;
/// How old the last use on disk may be.
const WRITE_AFTER_S: u64 = 60;

/// Why there is no address for a name.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The store.
    #[error("no address was leased to `{name}`: {error}")]
    Store {
        /// Who wanted one.
        name: String,
        /// What the store said.
        error: StoreError,
    },
    /// Too many new names at once.
    #[error(
        "no address was leased to `{0}`: programs on this host ask for more than {NEW_PER_S} new names a second; \
         find out which one does, names that have an address keep it"
    )]
    TooFast(String),
    /// Too many new names of one asker.
    #[error(
        "no address was leased to `{name}`: {asker} has asked for {ASKER_BURST} new names, and gets another every \
         {ASKER_EVERY_S} s; find out which program does, names that have an address keep it"
    )]
    TooMany {
        /// Who wanted one.
        name: String,
        /// On whose behalf.
        asker: Asker,
    },
    /// Every name is in use.
    #[error(
        "no address was leased to `{0}`: each of the {POOL} virtual IPv4 addresses was used within the last day; use \
         the name's IPv6 address"
    )]
    Exhausted(String),
    /// The agent is on its way out.
    #[error("no address was leased to `{0}`: the agent is stopping")]
    Stopping(String),
}

/// What is leased to whom.
pub struct Leases {
    store: Arc<Store>,
    sal: Arc<dyn SalControl>,
    clock: Clock,
    state: Mutex<State>,
    /// Held by whoever makes a lease, over the write to the disk; look-ups of leases that exist do not wait for it.
    making: Mutex<Budgets>,
}

/// What became of wishes for new leases since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseCounts {
    /// Addresses that went from one name to another, because the pool was used up.
    pub taken_back: u64,
    /// Refused, since all askers together asked for too many within some seconds.
    pub too_fast: u64,
    /// Refused, since one asker asked for too many within a day.
    pub too_many: u64,
    /// Refused, since every address is in use.
    pub exhausted: u64,
}

/// How full the pool is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fullness {
    /// Addresses in the pool.
    pub pool: usize,
    /// Those that stand for names.
    pub leased: usize,
    /// Of these, not used within the last day: another name may have them.
    pub idle: usize,
}

impl Fullness {
    /// Whether the pool comes to its end.
    pub const fn is_nearly_full(&self) -> bool {
        self.leased >= NEARLY_ALL
    }

    /// Whether the next new name gets no address.
    pub const fn is_exhausted(&self) -> bool {
        self.leased >= self.pool && self.idle == 0
    }
}

struct State {
    ranges: Ranges,
    by_address: HashMap<Ipv4Addr, Lease>,
    by_service: HashMap<ServiceId, Ipv4Addr>,
    written_s: u64,
    /// When all flows were asked last which addresses they use.
    walked_s: u64,
    /// What the clock said last.
    seen_s: u64,
    /// When the log was told last that the pool is used up.
    alarmed_s: u64,
    counts: LeaseCounts,
}

#[derive(Clone)]
struct Lease {
    service: ServiceId,
    name: String,
    used_s: u64,
    /// As it lies on disk.
    written_s: u64,
}

impl State {
    fn new(ranges: Ranges, now_s: u64) -> Self {
        Self {
            ranges,
            by_address: HashMap::new(),
            by_service: HashMap::new(),
            written_s: now_s,
            walked_s: 0,
            seen_s: now_s,
            alarmed_s: 0,
            counts: LeaseCounts::default(),
        }
    }

    fn insert(&mut self, address: Ipv4Addr, lease: Lease) {
        self.by_service.insert(lease.service, address);
        self.by_address.insert(address, lease);
    }

    fn remove(&mut self, address: Ipv4Addr) -> Option<Lease> {
        let lease = self.by_address.remove(&address)?;
        self.by_service.remove(&lease.service);
        Some(lease)
    }

    fn mark_used(&mut self, address: Ipv4Addr, now_s: u64) {
        if let Some(lease) = self.by_address.get_mut(&address) {
            lease.used_s = now_s;
        }
    }

    /// The first free address from where the name's bits point, so that a host that lost its store gives most names the
    /// address that they had.
    fn free(&self, service: &ServiceId) -> Option<Ipv4Addr> {
        if self.by_address.len() >= POOL as usize {
            return None;
        }
        let hash = blake3::hash(&service.0);
        let start = hash.as_bytes()[..4].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)) % POOL;
        (0..POOL).map(|step| self.ranges.name_v4(start + step)).find(|address| !self.by_address.contains_key(address))
    }

    /// Uses are as old as the time that programs had since. A clock that was set, or a host that slept, does not make
    /// them older, and one that was set back leaves none ahead.
    fn follow_clock(&mut self, now_s: u64) {
        let gap_s = now_s.saturating_sub(self.seen_s);
        let was_set = gap_s > GAP_S || now_s < self.seen_s;
        self.seen_s = now_s;
        if was_set {
            for lease in self.by_address.values_mut() {
                lease.used_s = lease.used_s.saturating_add(gap_s).min(now_s);
            }
        }
    }

    fn idle(&self, now_s: u64) -> impl Iterator<Item = (&Ipv4Addr, &Lease)> {
        self.by_address.iter().filter(move |(_, lease)| now_s.saturating_sub(lease.used_s) >= QUARANTINE_S)
    }

    fn longest_idle(&self, now_s: u64) -> Option<Ipv4Addr> {
        self.idle(now_s).min_by_key(|(address, lease)| (lease.used_s, **address)).map(|(address, _)| *address)
    }
}

impl Leases {
    /// Reads the leases that were kept, and binds each of them; those of a range that this host had before are dropped.
    ///
    /// # Errors
    ///
    /// The store cannot be read.
    pub fn open(
        store: Arc<Store>,
        sal: Arc<dyn SalControl>,
        clock: Clock,
        ranges: Ranges,
    ) -> Result<Arc<Self>, StoreError> {
        let now_s = clock.unix_s();
        let mut state = State::new(ranges, now_s);
        let mut strange = Vec::new();
        for kept in store.leases()? {
            let IpAddr::V4(address) = kept.address else { continue };
            if !ranges.is_name_v4(address) {
                strange.push(kept.address);
                continue;
            }
            sal.bind_name(kept.address, kept.service);
            // A use that lies ahead is one before the clock was set back.
            let lease = Lease {
                service: kept.service,
                name: kept.name,
                used_s: kept.used_s.min(now_s),
                written_s: kept.used_s,
            };
            state.insert(address, lease);
        }
        if let Some(one) = strange.first() {
            let range = tracing::field::display(ranges.v4);
            let leases = strange.len();
            tracing::info!(leases, %one, range, "leases outside of the range of virtual addresses are dropped");
            store.write_leases(&[], &strange)?;
        }
        let making = Mutex::new(Budgets::new(now_s));
        let leases = Self { store, sal, clock, state: Mutex::new(state), making };
        // Flows that have outlived the agent may be older than what the disk knows.
        leases.follow_uses();
        Ok(Arc::new(leases))
    }

    /// The address of a name: the same every time, also after a restart. It is on disk before it is given out, so this
    /// may wait for the disk: from async code, call it on a blocking thread.
    ///
    /// # Errors
    ///
    /// The store fails, too many new names are asked for at once or by this asker, or every address is in use. Names
    /// that have an address get it in any case.
    pub fn lease(&self, name: &Name, asker: Asker) -> Result<Ipv4Addr, LeaseError> {
        if let Some(address) = self.used(name) {
            self.keep_uses_now_and_then();
            return Ok(address);
        }
        let mut budgets = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = self.used(name) {
            return Ok(address);
        }
        let taken = budgets.take(asker, self.clock.unix_s());
        taken.map_err(|excess| self.excess(excess, name, asker))?;
        self.make(name)
    }

    /// Looks a name up for somebody who will use it. Does not wait for the disk.
    pub(crate) fn used(&self, name: &Name) -> Option<Ipv4Addr> {
        let now_s = self.clock.unix_s();
        let mut state = self.state();
        let address = *state.by_service.get(&name.service_id())?;
        state.mark_used(address, now_s);
        Some(address)
    }

    fn excess(&self, excess: Excess, name: &Name, asker: Asker) -> LeaseError {
        let (name, mut state) = (name.written().to_owned(), self.state());
        match excess {
            Excess::All => {
                state.counts.too_fast += 1;
                LeaseError::TooFast(name)
            }
            Excess::OfAsker => {
                state.counts.too_many += 1;
                LeaseError::TooMany { name, asker }
            }
        }
    }

    /// Only under `making`.
    fn make(&self, name: &Name) -> Result<Ipv4Addr, LeaseError> {
        let (address, gone) = self.vacant(name)?;
        let now_s = self.clock.unix_s();
        let lease =
            Lease { service: name.service_id(), name: name.written().to_owned(), used_s: now_s, written_s: now_s };
        if let Err(error) = self.store.write_leases(&[stored(address, &lease)], &[]) {
            if let Some(gone) = gone {
                self.sal.bind_name(address.into(), gone.service);
                self.state().insert(address, gone);
            }
            return Err(LeaseError::Store { name: lease.name, error });
        }
        if let Some(gone) = gone {
            self.state().counts.taken_back += 1;
            tracing::warn!(%address, from = gone.name, to = lease.name, "the virtual IPv4 addresses are used up: one \
             was taken back");
        }
        self.sal.bind_name(address.into(), lease.service);
        let mut state = self.state();
        state.insert(address, lease);
        if state.by_address.len() == NEARLY_ALL {
            tracing::warn!(
                leased = NEARLY_ALL,
                pool = POOL,
                "nine tenths of the virtual IPv4 addresses stand for names: programs on this host look up very many"
            );
        }
        Ok(address)
    }

    /// A free address, or one that was just taken back, with what it stood for.
    fn vacant(&self, name: &Name) -> Result<(Ipv4Addr, Option<Lease>), LeaseError> {
        if let Some(address) = self.state().free(&name.service_id()) {
            return Ok((address, None));
        }
        let now_s = self.clock.unix_s();
        let is_walk_due = now_s.abs_diff(self.state().walked_s) >= WALK_AFTER_S;
        self.note_uses(is_walk_due);
        let mut state = self.state();
        let Some(address) = state.longest_idle(now_s) else {
            state.counts.exhausted += 1;
            let is_news = now_s.abs_diff(state.alarmed_s) >= ALARM_AFTER_S;
            if is_news {
                state.alarmed_s = now_s;
                tracing::error!(
                    pool = POOL,
                    name = name.written(),
                    "all virtual IPv4 addresses are in use, and new names get none; find out which program looks up \
                     so many"
                );
            }
            return Err(LeaseError::Exhausted(name.written().to_owned()));
        };
        let gone = state.remove(address);
        drop(state);
        self.sal.unbind_name(address.into());
        Ok((address, gone))
    }

    /// Hears from the core which addresses are in use. The agent asks for it from time to time, more often than once
    /// an hour.
    pub fn follow_uses(&self) {
        self.note_uses(true);
    }

    /// With `all`, of flows and grants too, which takes a walk over them.
    fn note_uses(&self, all: bool) {
        let mut used = self.sal.take_used_leases();
        if all {
            used.extend(self.sal.leases_of_flows());
        }
        self.touch(&used);
        if all {
            self.state().walked_s = self.clock.unix_s();
        }
    }

    /// Says that addresses are in use, so that they are not taken back.
    pub fn touch(&self, used: &BTreeSet<IpAddr>) {
        let (now_s, mut state) = (self.clock.unix_s(), self.state());
        state.follow_clock(now_s);
        for address in used {
            if let IpAddr::V4(address) = address {
                state.mark_used(*address, now_s);
            }
        }
    }

    /// The address of a name, if it has one. Not a use of it.
    pub fn find(&self, name: &Name) -> Option<Ipv4Addr> {
        self.state().by_service.get(&name.service_id()).copied()
    }

    /// The name that an address stands for, as it was written when it was leased.
    pub fn name_of(&self, address: Ipv4Addr) -> Option<String> {
        self.state().by_address.get(&address).map(|lease| lease.name.clone())
    }

    /// The written name of a service that has a lease.
    pub fn written(&self, service: &ServiceId) -> Option<String> {
        let state = self.state();
        state.by_service.get(service).and_then(|address| state.by_address.get(address)).map(|lease| lease.name.clone())
    }

    /// The virtual addresses of this host.
    pub fn ranges(&self) -> Ranges {
        self.state().ranges
    }

    /// How many names have an address.
    pub fn len(&self) -> usize {
        self.state().by_address.len()
    }

    /// Whether none has.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What became of wishes for new leases since the start.
    pub fn counts(&self) -> LeaseCounts {
        self.state().counts
    }

    /// How full the pool is.
    pub fn fullness(&self) -> Fullness {
        let (now_s, state) = (self.clock.unix_s(), self.state());
        Fullness { pool: POOL as usize, leased: state.by_address.len(), idle: state.idle(now_s).count() }
    }

    /// Writes down when names were last used, for those where the disk is behind; waits for the disk. Look-ups do it
    /// once a minute.
    ///
    /// # Errors
    ///
    /// The store fails; nothing is lost, and the next call tries again.
    pub fn keep_uses(&self) -> Result<(), StoreError> {
        // Not while a lease is made: its address may change hands.
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let mut behind = Vec::new();
        let now_s = self.clock.unix_s();
        {
            let mut state = self.state();
            state.written_s = now_s;
            for (address, lease) in &state.by_address {
                if lease.used_s != lease.written_s {
                    behind.push(stored(*address, lease));
                }
            }
        }
        if behind.is_empty() {
            return Ok(());
        }
        self.store.write_leases(&behind, &[])?;
        let mut state = self.state();
        for written in behind {
            let IpAddr::V4(address) = written.address else { continue };
            if let Some(lease) = state.by_address.get_mut(&address) {
                lease.written_s = written.used_s;
            }
        }
        Ok(())
    }

    fn keep_uses_now_and_then(&self) {
        let age_s = self.clock.unix_s().saturating_sub(self.state().written_s);
        if age_s >= WRITE_AFTER_S
            && let Err(error) = self.keep_uses()
        {
            tracing::warn!(%error, "when names were last used was not written down");
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is whole before anything could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        if let Err(error) = self.keep_uses() {
            tracing::warn!(%error, "when names were last used was not written down");
        }
    }
}

impl std::fmt::Debug for Leases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Leases({})", self.len())
    }
}

fn stored(address: Ipv4Addr, lease: &Lease) -> StoredLease {
    StoredLease { address: address.into(), service: lease.service, name: lease.name.clone(), used_s: lease.used_s }
}

#[cfg(test)]
mod test;
