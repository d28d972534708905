//! The guard: no reset of the host's own TCP reaches a peer on a flow port, whatever becomes of this process and of
//! the flow cache's programs (`bpf/guard.bpf.c`, decision 0040).

use std::collections::{HashMap, HashSet};
use std::fs;
use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapHandle, NF_INET_LOCAL_OUT, NFPROTO_IPV4, NFPROTO_IPV6, NetfilterOpts, ProgramMut};
use margay_core::Ranges;
use margay_core::time::Instant;
use parking_lot::Mutex;

use super::{Unavailable, counted, host_words, put, remove_pin, words};
use skeleton::{GuardSkel, GuardSkelBuilder, OpenGuardSkel};

/// Generated from the object.
#[allow(unsafe_code, missing_docs, unreachable_pub, dead_code, clippy::all, clippy::print_stdout, clippy::unwrap_used)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/guard.skel.rs"));
}

/// Of the program. A link in the kernel cannot be given another one: the next version is attached beside this one,
/// which then goes.
const VERSION: i32 = 1;
/// How the names of pins begin. The maps keep theirs through all versions.
const PIN: &str = "guard_";
const PEERS: &str = "guard_peers";
const COUNT: &str = "guard_count";
/// After the host's own filters. The kernel wants a place of its own for each program, so that each version has one.
const PRIORITY: i32 = 1000 + VERSION;
/// For so long a host that has no direct flow any more is remembered: it may not know yet, and send.
const REMEMBERED_FOR: Duration = Duration::from_secs(120);
/// Between two looks at who has flows.
const LOOK: Duration = Duration::from_secs(10);

/// The guard as this process reaches it. It stays when this is dropped.
pub(super) struct Guard {
    peers: MapHandle,
    count: MapHandle,
    watch: Mutex<Watch>,
}

/// When was looked last, and since when hosts have no path.
#[derive(Default)]
struct Watch {
    looked: Option<Instant>,
    idle: HashMap<Vec<u8>, Instant>,
}

impl Guard {
    /// Puts the guard in its place, or finds it there.
    pub fn open(pin_dir: &Path, flow_ports: &RangeInclusive<u16>, ranges: Ranges) -> Result<Self, Unavailable> {
        words::keep();
        let skeleton = load(pin_dir, flow_ports, ranges).or_else(|error| {
            // Pinned maps that are not what the program wants: of a version that is yet to come.
            tracing::warn!(%error, "the guard's maps cannot be used again");
            [PEERS, COUNT].iter().for_each(|name| remove_pin(&pin_dir.join(name)));
            load(pin_dir, flow_ports, ranges)
        })?;
        let mut names = vec![PEERS.to_owned(), COUNT.to_owned()];
        for (family, protocol_family) in [("v4", NFPROTO_IPV4), ("v6", NFPROTO_IPV6)] {
            let name = format!("{PIN}{VERSION}_{family}");
            attach(&skeleton.progs.guard, protocol_family, &pin_dir.join(&name))?;
            names.push(name);
        }
        pins(pin_dir).filter(|name| !names.contains(name)).for_each(|name| remove_pin(&pin_dir.join(name)));
        let handle = |map: &libbpf_rs::Map<'_>| {
            MapHandle::try_from(map).map_err(|error| Unavailable::system("open a map of the guard", error))
        };
        let (peers, count) = (handle(&skeleton.maps.guard_peers)?, handle(&skeleton.maps.guard_count)?);
        Ok(Self { peers, count, watch: Mutex::default() })
    }

    /// A host has direct flows with this one, or is about to.
    pub fn add(&self, remote: &[u8; 16]) {
        if let Err(error) = put(&self.peers, remote, &1_u32.to_ne_bytes(), "peers of the guard") {
            tracing::debug!(%error, "the host's own TCP may reset flows of a peer while the programs are not in place");
        }
    }

    /// From time to time: forgets hosts that have had no path for a while. `remotes` says who has one.
    pub fn look(&self, now: Instant, remotes: impl FnOnce() -> HashSet<[u8; 16]>) {
        let mut watch = self.watch.lock();
        if watch.looked.is_some_and(|looked| now.since(looked) < LOOK) {
            return;
        }
        watch.looked = Some(now);
        let remotes = remotes();
        remotes.iter().for_each(|remote| self.add(remote));
        let strange: Vec<_> =
            self.peers.keys().filter(|key| !remotes.iter().any(|remote| remote[..] == key[..])).collect();
        watch.idle.retain(|key, _| strange.contains(key));
        for key in strange {
            let since = *watch.idle.entry(key.clone()).or_insert(now);
            if now.since(since) >= REMEMBERED_FOR {
                watch.idle.remove(&key);
                // Refused only when it is gone already.
                let _ = self.peers.delete(&key);
            }
        }
    }

    /// Resets that were dropped.
    pub fn dropped(&self) -> u64 {
        counted(&self.count, 0)
    }

    /// Takes it out of the kernel.
    pub fn remove(pin_dir: &Path) {
        pins(pin_dir).for_each(|name| remove_pin(&pin_dir.join(name)));
    }
}

/// Names of the guard's pins.
fn pins(pin_dir: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(pin_dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    // What is removed while a directory is read may hide its neighbours.
    names.filter(|name| name.starts_with(PIN)).collect::<Vec<_>>().into_iter()
}

fn load(pin_dir: &Path, flow_ports: &RangeInclusive<u16>, ranges: Ranges) -> Result<GuardSkel<'static>, Unavailable> {
    // As of the flow cache: it lives as long as the process.
    let storage = Box::leak(Box::new(MaybeUninit::uninit()));
    let mut open =
        GuardSkelBuilder::default().open(storage).map_err(|error| Unavailable::system("read the guard", error))?;
    set_constants(&mut open, flow_ports, ranges);
    let pinned = open.maps.guard_peers.set_pin_path(pin_dir.join(PEERS));
    let pinned = pinned.and_then(|()| open.maps.guard_count.set_pin_path(pin_dir.join(COUNT)));
    pinned.map_err(|error| Unavailable::system("prepare the guard's maps", error))?;
    open.load().map_err(|error| Unavailable::of_load(&error))
}

fn set_constants(open: &mut OpenGuardSkel<'_>, flow_ports: &RangeInclusive<u16>, ranges: Ranges) {
    let Some(constants) = open.maps.rodata_data.as_deref_mut() else { return };
    (constants.flow_port_first, constants.flow_port_last) = (*flow_ports.start(), *flow_ports.end());
    (constants.host_v4, constants.host_v6) = host_words(ranges);
}

fn attach(program: &ProgramMut<'_>, protocol_family: i32, pin: &Path) -> Result<(), Unavailable> {
    if pin.exists() && Link::open(pin).is_ok() {
        return Ok(());
    }
    let options =
        NetfilterOpts { protocol_family, hooknum: NF_INET_LOCAL_OUT, priority: PRIORITY, ..Default::default() };
    let mut link = program
        .attach_netfilter_with_opts(options)
        .map_err(|error| Unavailable::system("attach the guard (CONFIG_NETFILTER_BPF_LINK)", error))?;
    link.pin(pin).map_err(|error| Unavailable::system("pin the guard", error))
}

#[cfg(test)]
mod test {
    use std::net::SocketAddr;

    use libbpf_rs::{MapFlags, ProgramInput};
    use margay_core::Tuple;

    use super::*;
    use crate::packet::{ACK, RST, SYN, TCP, mapped};
    use crate::sample::{self, Checksum};

    const DROP: u32 = 0;
    const ACCEPT: u32 = 1;

    fn rig() -> Option<GuardSkel<'static>> {
        if !nix::unistd::Uid::effective().is_root() {
            eprintln!("skipped: eBPF needs root");
            return None;
        }
        let mut open = GuardSkelBuilder::default().open(Box::leak(Box::new(MaybeUninit::uninit()))).expect("an object");
        set_constants(&mut open, &(61_000..=65_535), Ranges::USUAL);
        Some(open.load().expect("the verifier takes it"))
    }

    fn tuple(source: &str, destination: &str) -> Tuple {
        let address = |text: &str| text.parse::<SocketAddr>().expect("literal");
        Tuple { protocol: TCP, source: address(source), destination: address(destination) }
    }

    #[test]
    fn only_a_reset_that_would_end_a_flow_is_dropped() {
        let Some(guard) = rig() else { return };
        for peer in ["10.1.0.9", "fd00::9"] {
            let peer = mapped(peer.parse().expect("literal"));
            guard.maps.guard_peers.update(&peer, &1_u32.to_ne_bytes(), MapFlags::ANY).expect("room");
        }
        let run = |source: &str, destination: &str, flags: u8| {
            let packet = sample::packet(tuple(source, destination), flags, b"", Checksum::Complete);
            // The kernel's test run is of LOCAL_OUT, where packets begin with the IP header.
            let input = ProgramInput { data_in: Some(&packet), ..Default::default() };
            guard.progs.guard.test_run(input).expect("a run").return_value
        };
        assert_eq!(run("10.1.0.2:61001", "10.1.0.9:62080", RST), DROP);
        assert_eq!(run("[fd00::2]:61001", "[fd00::9]:62080", RST), DROP);
        // A host that has moved, and has not said so yet.
        assert_eq!(run("10.1.0.2:61001", "10.1.0.8:62080", RST), DROP);
        assert_eq!(run("[fd00::2]:61001", "[fd00::8]:62080", RST), DROP);
        // By a translator the peer has any port.
        assert_eq!(run("10.1.0.2:65535", "10.1.0.9:1024", RST), DROP);
        for (source, destination, flags, why) in [
            ("10.1.0.2:61001", "10.1.0.9:62080", RST | ACK, "a plain connection is refused, or ended"),
            ("10.1.0.2:61001", "10.1.0.9:62080", SYN | ACK, "a listener of the host"),
            ("10.1.0.2:61001", "10.1.0.9:62080", ACK, "a connection of the host"),
            ("10.1.0.2:60999", "10.1.0.9:62080", RST, "no flow port"),
            ("10.1.0.2:61001", "10.1.0.8:6208", RST, "a host without flows"),
            ("[fd00::2]:61001", "[fd00::8]:6208", RST, "a host without flows"),
            ("198.18.0.1:61001", "10.1.0.9:62080", RST, "a program's own, on its way into sal0"),
            ("[fd5a:4c00::1]:61001", "[fd00::9]:62080", RST, "a program's own, on its way into sal0"),
        ] {
            assert_eq!(run(source, destination, flags), ACCEPT, "{why}");
        }
    }
}
