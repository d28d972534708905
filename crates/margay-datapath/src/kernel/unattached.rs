//! The kernel's cache without an interface: what it is told is told as on a host, and packets pass it by test run.

use std::path::PathBuf;
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags};
use margay_core::Ranges;
use nix::time::{ClockId, clock_gettime};

use super::layout::{self, COUNTERS, flow_entry, path_entry};
use super::load::Loaded;
use super::plain::Plain;
use super::test::{Rig, SAL0, programs, run_program};
use super::{Adopted, CacheConfig, KernelCache, counted};

/// The time of the programs, which no test can put forward.
pub(crate) fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has it");
    Duration::from(time).as_nanos() as u64
}

impl KernelCache {
    /// `None` without root.
    pub(crate) fn unattached() -> Option<Self> {
        let Rig(skeleton) = programs(SAL0)?;
        let config = CacheConfig {
            sal0: "sal0".to_owned(),
            interfaces: Vec::new(),
            local_addresses: Vec::new(),
            in_place: false,
            pin_dir: PathBuf::new(),
            flow_ports: 61_000..=65_535,
            ranges: Ranges::USUAL,
            boxes: true,
            flows_max: 0,
        };
        let loaded = Loaded::of(skeleton, SAL0, &config).expect("maps");
        let cache = Self {
            loaded,
            adopted: Adopted::Fresh,
            guard: None,
            index: Default::default(),
            left: Default::default(),
            peers: Default::default(),
            grants: Default::default(),
        };
        Some(cache)
    }

    /// Verdict on a packet of a program, or of a card, and the IP packet that came out.
    pub(crate) fn run(&self, is_egress: bool, packet: &[u8]) -> (i32, Vec<u8>) {
        let programs = &self.loaded.skeleton().progs;
        run_program(if is_egress { &programs.app_egress } else { &programs.wire_ingress }, packet)
    }

    /// What was counted under this name.
    pub(crate) fn counted(&self, name: &str) -> u64 {
        let number = COUNTERS.iter().zip(0_u32..).find(|(counter, _)| **counter == name).expect("a counter").1;
        counted(&self.loaded.maps.counters, number)
    }

    /// So much time passes, and not what has passed since the last call: all that has been seen was so much earlier.
    /// The agent is alive.
    pub(crate) fn age(&self, by: Duration, called_ns: &mut u64) {
        let now_ns = monotonic_ns();
        let since_ns = now_ns - std::mem::replace(called_ns, now_ns);
        let by = by.as_nanos() as u64;
        let earlier = |at: &mut u64| *at = if *at == 0 { 0 } else { (*at + since_ns).saturating_sub(by).max(1) };
        let maps = &self.loaded.maps;
        let put = |map: &libbpf_rs::MapHandle, key: &[u8], value: &[u8]| {
            map.update(key, value, MapFlags::ANY).expect("its own key");
        };
        for (key, mut entry) in self.entries_with_keys().collect::<Vec<(_, flow_entry)>>() {
            let times = [
                &mut entry.unanswered_since_ns,
                &mut entry.egress.last_ns,
                &mut entry.ingress.last_ns,
                &mut entry.egress.asked_ns,
                &mut entry.ingress.asked_ns,
            ];
            times.into_iter().for_each(earlier);
            put(&maps.flows, key.bytes(), entry.bytes());
        }
        for key in maps.paths.keys() {
            let mut path: path_entry = super::get(&maps.paths, &key).expect("its own key");
            earlier(&mut path.since_ns);
            // Paths are told by a clock that tests put forward.
            path.since_ns = path.since_ns.min(now_ns);
            put(&maps.paths, &key, path.bytes());
        }
        for key in maps.pairs.keys() {
            let mut pair: layout::pair_value = super::get(&maps.pairs, &key).expect("its own key");
            earlier(&mut pair.told_ns);
            put(&maps.pairs, &key, pair.bytes());
        }
        put(&maps.heartbeat, &0_u32.to_ne_bytes(), &now_ns.to_ne_bytes());
        self.forget_left();
    }

    /// As it was at first.
    pub(crate) fn wipe(&self) {
        let maps = &self.loaded.maps;
        for map in [&maps.flows, &maps.apps, &maps.deltas, &maps.paths, &maps.pairs, &maps.peers, &maps.locals] {
            map.keys().collect::<Vec<_>>().iter().for_each(|key| map.delete(key).expect("its own key"));
        }
        self.index.lock().clear();
        self.left.lock().clear();
        *self.peers.lock() = Default::default();
        self.take_events(drop);
    }
}
