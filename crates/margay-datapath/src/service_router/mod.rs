//! The service router in the kernel (DESIGN §8; Serval §4.2): resolvable packets that need only be forwarded are, by
//! an eBPF program where they arrive. It decides as the core does, by a copy of the core's service table; what it
//! cannot decide comes to user space (docs/decisions/0022).
//!
//! Nothing depends on it, and nothing of it outlives this process.
#![allow(unsafe_code)]

mod attach;
mod cells;
mod copy;
pub(crate) mod layout;
pub mod rate;
#[cfg(test)]
mod table_test;
#[cfg(test)]
mod test;

/// Generated from the object.
#[allow(unsafe_code, missing_docs, unreachable_pub, dead_code, clippy::all, clippy::print_stdout, clippy::unwrap_used)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/service_router.skel.rs"));
}

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenObject};
use margay_core::DropReason;
use margay_core::association::Neighbour;
use margay_core::name::Prefix;
use margay_core::table::changes::Part;
use margay_core::table::{Outcome, RuleId};
use margay_core::time::Instant;
use parking_lot::Mutex;

use crate::kernel::plain::Plain;
use crate::kernel::{Unavailable, words};
use attach::Attached;
pub use attach::Mode;
use cells::Cells;
use copy::{Copy, Maps};
use layout::{COUNTERS, DROPS};
use skeleton::{OpenServiceRouterSkel, ServiceRouterSkel, ServiceRouterSkelBuilder};

/// Prefixes with several instances that the kernel decides by itself, at 16 KiB each; packets of more go to the agent.
const LISTS_MAX: u32 = 4096;
/// Next hops; packets to more go to the agent.
const HOPS_MAX: u32 = 1 << 16;

/// How packets to a next hop leave this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// The address that they leave with.
    pub local: IpAddr,
    /// Index of the interface.
    pub ifindex: u32,
    /// Largest IP packet in bytes.
    pub mtu: u32,
    /// The interface's own address of layer 2.
    pub local_mac: [u8; 6],
    /// That of the neighbour that they are handed to.
    pub remote_mac: [u8; 6],
}

/// What the program has done by a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeatUsage {
    /// Packets that it decided upon.
    pub packets: u64,
    /// When it decided upon the last of them.
    pub last: Option<Instant>,
}

/// The program and its maps.
pub struct ServiceRouter {
    skeleton: Mutex<ServiceRouterSkel<'static>>,
    maps: Maps,
    copy: Mutex<Copy>,
    attached: Mutex<Attached>,
    /// Why the program leaves everything to the agent, if it does.
    failure: Mutex<Option<String>>,
}

impl ServiceRouter {
    /// Loads the program, for an agent at UDP port `sal_port` whose service table has at most `rules_max` rules. It is
    /// on no interface yet.
    ///
    /// # Errors
    ///
    /// Why the kernel does not take it.
    pub fn open(sal_port: u16, rules_max: u32) -> Result<Self, Unavailable> {
        words::keep();
        // One object per process: it lives as long as the process.
        let storage: &'static mut MaybeUninit<OpenObject> = Box::leak(Box::new(MaybeUninit::uninit()));
        let mut open = ServiceRouterSkelBuilder::default()
            .open(storage)
            .map_err(|error| Unavailable::system("read the object", error))?;
        let set_up = |open: &mut OpenServiceRouterSkel<'_>| -> libbpf_rs::Result<()> {
            if let Some(constants) = open.maps.rodata_data.as_deref_mut() {
                constants.sal_port = sal_port.to_be();
                constants.hash_seed = RandomState::new().hash_one(rules_max);
            }
            open.maps.chunks.set_max_entries(cells::places_for(rules_max))?;
            open.maps.seats.set_max_entries(rules_max)?;
            open.maps.bucket_lists.set_max_entries(LISTS_MAX)?;
            open.maps.hops.set_max_entries(HOPS_MAX)?;
            open.maps.neighbours.set_max_entries(HOPS_MAX)
        };
        set_up(&mut open).map_err(|error| Unavailable::system("prepare the maps", error))?;
        let mut skeleton = open.load().map_err(|error| Unavailable::of_load(&error))?;
        let buffer = skeleton.progs.route_buffer.as_fd().as_raw_fd().to_ne_bytes();
        let put = skeleton.maps.programs.update(&0_u32.to_ne_bytes(), &buffer, MapFlags::ANY);
        put.map_err(|error| Unavailable::system("put a program in its place", error))?;
        let handle = |map: &libbpf_rs::Map<'_>| {
            MapHandle::try_from(map).map_err(|error| Unavailable::system("open a map", error))
        };
        let maps = Maps {
            seats: handle(&skeleton.maps.seats)?,
            lists: handle(&skeleton.maps.bucket_lists)?,
            hops: handle(&skeleton.maps.hops)?,
            neighbours: handle(&skeleton.maps.neighbours)?,
            own_addresses: handle(&skeleton.maps.own_addresses)?,
            devices: handle(&skeleton.maps.devices)?,
            counters: handle(&skeleton.maps.counters)?,
        };
        let opened = |error| Unavailable::system("make a table", error);
        let keep_cell = skeleton.progs.keep_cell.as_fd().try_clone_to_owned().map_err(opened)?;
        let shared = skeleton.maps.bss_data.take().ok_or_else(|| opened(io::ErrorKind::NotFound.into()))?;
        let cells = Cells::new(keep_cell, handle(&skeleton.maps.chunks)?, shared, rules_max).map_err(opened)?;
        Ok(Self {
            skeleton: Mutex::new(skeleton),
            maps,
            copy: Mutex::new(Copy::new(cells, rules_max, LISTS_MAX, HOPS_MAX)),
            attached: Mutex::default(),
            failure: Mutex::default(),
        })
    }

    /// Takes up what has changed of the service table.
    pub fn take_routes(&self, part: &Part<(Prefix, Outcome)>) {
        self.change(|copy| {
            if part.begins_anew {
                for prefix in copy.prefixes() {
                    copy.apply(&self.maps, prefix, &Outcome::Shorter)?;
                }
            }
            let mut changed = part.changed.iter();
            changed.try_for_each(|(prefix, outcome)| copy.apply(&self.maps, *prefix, outcome))
        });
    }

    /// Takes up what has changed of hop keys.
    pub fn take_hop_keys(&self, part: &Part<(Neighbour, Option<[u8; 16]>)>) {
        self.change(|copy| {
            if part.begins_anew {
                for neighbour in copy.neighbours() {
                    copy.set_hop_key(&self.maps, neighbour, None)?;
                }
            }
            let mut changed = part.changed.iter();
            changed.try_for_each(|(neighbour, key)| copy.set_hop_key(&self.maps, *neighbour, *key))
        });
    }

    /// Asks `find` how packets to next hops leave this host: to all, or only to those that have no way yet.
    pub fn find_ways(&self, all: bool, find: impl FnMut(SocketAddr) -> Option<Way>) {
        self.change(|copy| copy.find_ways(&self.maps, all, find));
    }

    /// Whether there is a next hop without a way.
    pub fn is_lost(&self) -> bool {
        self.copy.lock().is_lost()
    }

    /// Sets this host's own addresses: packets to others are none of the program's.
    pub fn set_own_addresses(&self, addresses: &[IpAddr]) {
        self.change(|_| {
            let wanted: Vec<_> = addresses.iter().map(|address| layout::own_of(*address)).collect();
            for key in self.maps.own_addresses.keys().collect::<Vec<_>>() {
                if !wanted.iter().any(|own| own.bytes() == key) {
                    self.maps.own_addresses.delete(&key).map_err(io::Error::other)?;
                }
            }
            let put = |own: &layout::own_address| {
                self.maps.own_addresses.update(own.bytes(), &1_u32.to_ne_bytes(), MapFlags::ANY)
            };
            wanted.iter().try_for_each(put).map_err(io::Error::other)
        });
    }

    /// Changes the copy. Whatever cannot be written leaves the program without any: the agent decides everything then.
    fn change(&self, change: impl FnOnce(&mut Copy) -> io::Result<()>) {
        let mut failure = self.failure.lock();
        if failure.is_some() {
            return;
        }
        let mut copy = self.copy.lock();
        let lengths = match change(&mut copy) {
            Ok(()) => copy.lengths(),
            Err(error) => {
                tracing::error!(%error, "the service router in the kernel is of no more use; this process forwards");
                *failure = Some(format!("its tables could not be written: {error}"));
                None
            }
        };
        // Without one of them, a shorter prefix would answer for it.
        copy.set_lengths(&lengths.unwrap_or_default());
    }

    /// Why the program leaves everything to the agent, if it does.
    pub fn failure(&self) -> Option<String> {
        let lengths = || "prefixes of more than 32 lengths are in use".to_owned();
        self.failure.lock().clone().or_else(|| self.copy.lock().lengths().is_none().then(lengths))
    }

    /// What the program has done by a rule.
    pub fn usage(&self, rule: RuleId) -> SeatUsage {
        let Some(usage) = self.copy.lock().usage(&self.maps, rule) else { return SeatUsage::default() };
        usage_of(usage)
    }

    /// What was done by rules that are no more in force here: lower ones, when a higher one has come. For the core to
    /// keep.
    pub fn take_credits(&self) -> Vec<(RuleId, SeatUsage)> {
        self.copy.lock().take_credits().into_iter().map(|(rule, usage)| (rule, usage_of(usage))).collect()
    }

    /// Everything counted, by name, all processors together.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        COUNTERS.iter().zip(0..).map(|(name, number)| (*name, self.counter(number))).collect()
    }

    /// Packets forwarded.
    pub fn forwarded(&self) -> u64 {
        self.counter(0)
    }

    /// Packets dropped for a reason of the core's.
    pub fn drops(&self, reason: DropReason) -> u64 {
        DROPS.iter().filter(|(_, of)| *of == reason).map(|(number, _)| self.counter(*number)).sum()
    }

    fn counter(&self, number: u32) -> u64 {
        let values = self.maps.counters.lookup_percpu(&number.to_ne_bytes(), MapFlags::ANY).ok().flatten();
        let value = |bytes: &Vec<u8>| bytes.as_slice().try_into().map_or(0, u64::from_ne_bytes);
        values.map_or(0, |values| values.iter().map(value).sum())
    }

    /// Bytes that the table of prefixes takes.
    pub fn table_bytes(&self) -> usize {
        self.copy.lock().table_bytes()
    }

    /// How full the maps are: prefixes, prefixes with several instances, next hops.
    pub fn sizes(&self) -> [usize; 3] {
        self.copy.lock().sizes()
    }
}

fn usage_of(usage: layout::usage) -> SeatUsage {
    let last = (usage.last_ns > 0).then(|| Instant::from_micros(usage.last_ns / 1000));
    SeatUsage { packets: usage.packets, last }
}
