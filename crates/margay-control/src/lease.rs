//! Leases: virtual IPv4 addresses that stand for names on this host (DESIGN §5).
//!
//! A name keeps its address, also across restarts: it is on disk before anyone hears of it. Only when the pool is used up is
//! an address taken back, from the name that nobody used for the longest time, and never from one that was used within the
//! last hour. New leases come at a bounded rate, so that a program that asks for random names cannot use the pool up within
//! that hour: names that are in use keep what they have.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use margay_core::name::{Name, ServiceId};

use crate::store::{Store, StoreError, StoredLease};
use crate::{Clock, SalControl};

/// First address of the pool: 198.18.0.0/24 holds the host's own address.
const FIRST: u32 = 0xc612_0100;
/// Addresses in the pool: 198.18.1.0 to 198.18.255.255. The next /16 is for surrogates.
const POOL: u32 = 0xff00;
/// A name that was used since then keeps its address in any case. More than a resolver may remember an answer.
const IN_USE_S: u64 = 3600;
/// New leases per second. An hour of them is 36,000, hence never the whole pool.
const NEW_PER_S: u64 = 10;
/// New leases at once, where none were made for a while.
const NEW_BURST: u64 = 256;
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
        "no address was leased to `{0}`: programs on this host ask for more than {NEW_PER_S} new names a second; find out which one does, names that have an address keep it"
    )]
    TooFast(String),
    /// Every name is in use.
    #[error(
        "no address was leased to `{0}`: each of the {POOL} virtual IPv4 addresses was used within the last hour; use the name's IPv6 address"
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
    making: Mutex<Rate>,
}

#[derive(Default)]
struct State {
    by_address: HashMap<Ipv4Addr, Lease>,
    by_service: HashMap<ServiceId, Ipv4Addr>,
    written_s: u64,
    taken_back: u64,
}

#[derive(Clone)]
struct Lease {
    service: ServiceId,
    name: String,
    used_s: u64,
    /// As it lies on disk.
    written_s: u64,
}

/// A bucket of leases that may be made.
struct Rate {
    left: u64,
    filled_s: u64,
}

impl Rate {
    fn take(&mut self, now_s: u64) -> bool {
        let fresh = now_s.saturating_sub(self.filled_s).saturating_mul(NEW_PER_S);
        self.left = self.left.saturating_add(fresh).min(NEW_BURST);
        // Also where the clock was set back: else nothing would be made until it has caught up.
        self.filled_s = now_s;
        let Some(left) = self.left.checked_sub(1) else { return false };
        self.left = left;
        true
    }
}

impl State {
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
        (0..POOL)
            .map(|step| Ipv4Addr::from(FIRST + (start + step) % POOL))
            .find(|address| !self.by_address.contains_key(address))
    }

    fn longest_idle(&self, now_s: u64) -> Option<Ipv4Addr> {
        let idle = self.by_address.iter().filter(|(_, lease)| now_s.saturating_sub(lease.used_s) >= IN_USE_S);
        idle.min_by_key(|(address, lease)| (lease.used_s, **address)).map(|(address, _)| *address)
    }
}

impl Leases {
    /// Reads the leases that were kept, and binds each of them.
    ///
    /// # Errors
    ///
    /// The store cannot be read.
    pub fn open(store: Arc<Store>, sal: Arc<dyn SalControl>, clock: Clock) -> Result<Arc<Self>, StoreError> {
        let now_s = clock.unix_s();
        let mut state = State { written_s: now_s, ..State::default() };
        for kept in store.leases()? {
            let IpAddr::V4(address) = kept.address else { continue };
            if !is_in_pool(address) {
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
        let making = Mutex::new(Rate { left: NEW_BURST, filled_s: now_s });
        Ok(Arc::new(Self { store, sal, clock, state: Mutex::new(state), making }))
    }

    /// The address of a name: the same every time, also after a restart. It is on disk before it is given out, so this
    /// may wait for the disk: from async code, call it on a blocking thread.
    ///
    /// # Errors
    ///
    /// The store fails, too many new names are asked for at once, or every address is in use. Names that have an address
    /// get it in any case.
    pub fn lease(&self, name: &Name) -> Result<Ipv4Addr, LeaseError> {
        if let Some(address) = self.used(name) {
            self.keep_uses_now_and_then();
            return Ok(address);
        }
        let mut rate = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = self.used(name) {
            return Ok(address);
        }
        if !rate.take(self.clock.unix_s()) {
            return Err(LeaseError::TooFast(name.written().to_owned()));
        }
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
            self.state().taken_back += 1;
            tracing::warn!(%address, from = gone.name, to = lease.name, "the virtual IPv4 addresses are used up: one was taken back");
        }
        self.sal.bind_name(address.into(), lease.service);
        self.state().insert(address, lease);
        Ok(address)
    }

    /// A free address, or one that was just taken back, with what it stood for.
    fn vacant(&self, name: &Name) -> Result<(Ipv4Addr, Option<Lease>), LeaseError> {
        let mut state = self.state();
        if let Some(address) = state.free(&name.service_id()) {
            return Ok((address, None));
        }
        let idle = state.longest_idle(self.clock.unix_s());
        let address = idle.ok_or_else(|| LeaseError::Exhausted(name.written().to_owned()))?;
        let gone = state.remove(address);
        drop(state);
        self.sal.unbind_name(address.into());
        Ok((address, gone))
    }

    /// Says that a flow uses an address, so that it is not taken back.
    pub fn touch(&self, address: Ipv4Addr) {
        let now_s = self.clock.unix_s();
        self.state().mark_used(address, now_s);
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

    /// How many names have an address.
    pub fn len(&self) -> usize {
        self.state().by_address.len()
    }

    /// Whether none has.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many addresses were taken back since the start, because the pool was used up.
    pub fn taken_back(&self) -> u64 {
        self.state().taken_back
    }

    /// Writes down when names were last used, for those where the disk is behind; waits for the disk. Look-ups do it once a minute.
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

fn is_in_pool(address: Ipv4Addr) -> bool {
    (FIRST..FIRST + POOL).contains(&u32::from(address))
}

fn stored(address: Ipv4Addr, lease: &Lease) -> StoredLease {
    StoredLease { address: address.into(), service: lease.service, name: lease.name.clone(), used_s: lease.used_s }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use margay_core::AssociationSetup;
    use margay_core::certificate::{Revocation, TrustAnchor};
    use margay_core::key_revocation::KeyRevocation;
    use margay_core::name::Prefix;
    use margay_core::succession::Succession;
    use margay_core::table::{Rule, RuleId, TableError};

    use super::*;
    use crate::store::tests::store;

    /// Keeps the names that are bound, and refuses to bind an address twice.
    #[derive(Default)]
    struct Recorder {
        bound: Mutex<HashMap<IpAddr, ServiceId>>,
    }

    impl Recorder {
        fn get(&self, address: Ipv4Addr) -> Option<ServiceId> {
            self.bound.lock().expect("no panic").get(&address.into()).copied()
        }

        fn len(&self) -> usize {
            self.bound.lock().expect("no panic").len()
        }
    }

    impl SalControl for Recorder {
        fn install_association(&self, _setup: AssociationSetup) {}
        fn add_trust_anchor(&self, _anchor: TrustAnchor) {}
        fn revoke(&self, _: Revocation) {}
        fn revoke_key(&self, _: KeyRevocation) {}
        fn succeed(&self, _: &Succession) {}
        fn set_membership(&self, _chain: Vec<u8>) {}
        fn set_service_certificate(&self, _prefix: Prefix, _chain: Vec<u8>) {}
        fn add_rule(&self, _prefix: Prefix, _rule: Rule) -> Result<RuleId, TableError> {
            Err(TableError { limit: 0 })
        }
        fn remove_rule(&self, _id: RuleId) -> bool {
            false
        }
        fn bind_name(&self, address: IpAddr, service: ServiceId) {
            let before = self.bound.lock().expect("no panic").insert(address, service);
            assert_eq!(before, None, "{address} was bound already");
        }
        fn unbind_name(&self, address: IpAddr) {
            let before = self.bound.lock().expect("no panic").remove(&address);
            assert!(before.is_some(), "{address} was not bound");
        }
    }

    /// Everything that leases stand on, with a clock that tests turn.
    struct World {
        _base: tempfile::TempDir,
        store: Arc<Store>,
        now_s: Arc<AtomicU64>,
    }

    impl World {
        fn new() -> Self {
            let (base, store) = store();
            Self { _base: base, store: Arc::new(store), now_s: Arc::new(AtomicU64::new(1_000_000)) }
        }

        fn open(&self) -> (Arc<Leases>, Arc<Recorder>) {
            let (sal, now_s) = (Arc::new(Recorder::default()), Arc::clone(&self.now_s));
            let clock = Clock::from_fn(move || now_s.load(Ordering::SeqCst));
            let control: Arc<dyn SalControl> = Arc::<Recorder>::clone(&sal);
            (Leases::open(Arc::clone(&self.store), control, clock).expect("readable"), sal)
        }

        fn pass(&self, seconds: u64) {
            self.now_s.fetch_add(seconds, Ordering::SeqCst);
        }

        /// A pool that is used up: each name was used a second after the one before.
        fn fill(&self) {
            let from_s = self.now_s.load(Ordering::SeqCst);
            let all: Vec<StoredLease> = (0..POOL)
                .map(|at| StoredLease {
                    address: Ipv4Addr::from(FIRST + at).into(),
                    service: name(&format!("s{at}.old")).service_id(),
                    name: format!("s{at}.old"),
                    used_s: from_s + u64::from(at),
                })
                .collect();
            self.store.write_leases(&all, &[]).expect("written");
            self.pass(u64::from(POOL));
        }
    }

    fn name(text: &str) -> Name {
        text.parse().expect("a name")
    }

    #[test]
    fn a_name_keeps_its_address_also_across_a_restart() {
        let world = World::new();
        let (leases, sal) = world.open();
        let web = leases.lease(&name("web.shop")).expect("leased");
        let user = leases.lease(&name("web.shop/key:user42")).expect("leased");
        assert_ne!(web, user);
        assert!(is_in_pool(web) && is_in_pool(user));
        assert_eq!(leases.lease(&name("WEB.shop")).expect("leased"), web);
        assert_eq!(leases.find(&name("web.shop")), Some(web));
        assert_eq!(leases.find(&name("api.shop")), None);
        assert_eq!(leases.name_of(user).as_deref(), Some("web.shop/key:user42"));
        assert_eq!(sal.get(user), Some(name("web.shop/key:user42").service_id()), "all 256 bits");
        drop(leases);
        let (leases, sal) = world.open();
        assert_eq!((leases.len(), sal.len()), (2, 2));
        assert_eq!(sal.get(web), Some(name("web.shop").service_id()));
        assert_eq!(leases.lease(&name("web.shop")).expect("leased"), web);
        assert_eq!(sal.len(), 2);
    }

    #[test]
    fn another_store_gives_the_same_address_where_it_is_free() {
        let (one, other) = (World::new(), World::new());
        let address = one.open().0.lease(&name("web.shop")).expect("leased");
        let leases = other.open().0;
        leases.lease(&name("api.shop")).expect("leased");
        assert_eq!(leases.lease(&name("web.shop")).expect("leased"), address);
    }

    #[test]
    fn it_is_on_disk_before_it_is_given_out() {
        let world = World::new();
        let (leases, _sal) = world.open();
        let address = leases.lease(&name("web.shop")).expect("leased");
        let kept = world.store.leases().expect("readable");
        assert_eq!(kept.len(), 1);
        assert_eq!((kept[0].address, kept[0].name.as_str()), (address.into(), "web.shop"));
    }

    #[test]
    fn uses_reach_the_disk_within_a_minute_of_look_ups_and_at_the_end() {
        let world = World::new();
        let (leases, _sal) = world.open();
        let address = leases.lease(&name("web.shop")).expect("leased");
        let used_s = || world.store.leases().expect("readable")[0].used_s;
        world.pass(59);
        leases.lease(&name("web.shop")).expect("leased");
        assert_eq!(used_s(), 1_000_000);
        world.pass(1);
        leases.lease(&name("web.shop")).expect("leased");
        assert_eq!(used_s(), 1_000_060);
        world.pass(5);
        leases.touch(address);
        drop(leases);
        assert_eq!(used_s(), 1_000_065);
    }

    #[test]
    fn a_used_up_pool_takes_the_longest_idle_back_and_nothing_that_is_in_use() {
        let world = World::new();
        world.fill();
        let (leases, sal) = world.open();
        assert_eq!(leases.len(), POOL as usize);
        leases.touch(Ipv4Addr::from(FIRST));
        leases.lease(&name("s1.old")).expect("its own");
        let web = leases.lease(&name("web.shop")).expect("leased");
        assert_eq!(web, Ipv4Addr::from(FIRST + 2));
        assert_eq!(leases.find(&name("s2.old")), None);
        assert_eq!(sal.get(web), Some(name("web.shop").service_id()));
        assert_eq!((leases.len(), sal.len()), (POOL as usize, POOL as usize));
        assert_eq!(leases.taken_back(), 1);
        drop(leases);
        let (leases, _sal) = world.open();
        assert_eq!((leases.find(&name("web.shop")), leases.find(&name("s2.old"))), (Some(web), None));
    }

    #[test]
    fn names_in_use_are_never_taken_back() {
        let world = World::new();
        world.fill();
        let (leases, _sal) = world.open();
        for at in 0..POOL {
            leases.touch(Ipv4Addr::from(FIRST + at));
        }
        world.pass(IN_USE_S - 1);
        let error = leases.lease(&name("web.shop")).expect_err("all in use");
        assert!(matches!(error, LeaseError::Exhausted(_)), "{error}");
        assert_eq!(leases.lease(&name("s7.old")).expect("its own"), Ipv4Addr::from(FIRST + 7));
        world.pass(1);
        assert_eq!(leases.lease(&name("web.shop")).expect("idle now"), Ipv4Addr::from(FIRST));
    }

    #[test]
    fn random_names_come_at_a_bounded_rate_and_known_ones_at_any() {
        let world = World::new();
        let (leases, _sal) = world.open();
        let random =
            |from: u64, to: u64| (from..to).filter(|n| leases.lease(&name(&format!("r{n}.x"))).is_ok()).count();
        assert_eq!(random(0, 300), NEW_BURST as usize);
        let error = leases.lease(&name("web.shop")).expect_err("too fast");
        assert!(matches!(error, LeaseError::TooFast(_)), "{error}");
        assert!(leases.lease(&name("r0.x")).is_ok());
        world.pass(1);
        assert_eq!(random(300, 400), NEW_PER_S as usize);
        assert!(NEW_PER_S * IN_USE_S + NEW_BURST < u64::from(POOL), "an hour of new names leaves room");
        world.now_s.fetch_sub(500_000, Ordering::SeqCst);
        world.pass(1);
        assert_eq!(random(400, 500), 0, "a clock that was set back gives nothing at first");
        world.pass(1);
        assert_eq!(random(500, 600), NEW_PER_S as usize, "and then as ever");
    }

    #[test]
    fn leases_outside_the_pool_are_left_alone() {
        let world = World::new();
        let odd = |address: &str| StoredLease {
            address: address.parse().expect("literal"),
            service: name("web.shop").service_id(),
            name: "web.shop".to_owned(),
            used_s: 0,
        };
        let all = [odd("198.18.0.1"), odd("198.19.0.1"), odd("10.0.0.1"), odd("fd5a:4c00::7")];
        world.store.write_leases(&all, &[]).expect("written");
        let (leases, sal) = world.open();
        assert!(leases.is_empty() && sal.len() == 0);
        assert_eq!(world.store.leases().expect("readable").len(), 4);
    }

    #[test]
    fn many_threads_that_ask_for_one_name_get_one_address() {
        let world = World::new();
        let (leases, sal) = world.open();
        let ask = || leases.lease(&name("web.shop")).expect("leased");
        let all: Vec<Ipv4Addr> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert!(all.iter().all(|address| *address == all[0]));
        assert_eq!((leases.len(), sal.len()), (1, 1));
    }
}
