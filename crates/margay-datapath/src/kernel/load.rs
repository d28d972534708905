//! Loading, pinning and attaching (DESIGN §3.6): what a process before has left is taken over, so that traffic never
//! meets a moment without a program.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{AsRawLibbpf, Link, MapCore, MapFlags, MapHandle, OpenObject, ProgramInput, ProgramMut};
use margay_core::chain::FORWARDED_HOP_LIMIT;
use nix::mount::{MsFlags, mount, umount};
use nix::sys::statfs::statfs;
use parking_lot::Mutex;

use super::guard::Guard;
use super::interface::{self, Inside, Interface};
use super::layout::{LAYOUT_VERSION, flow_change, flow_event, flow_lift, grant_flows};
use super::plain::Plain;
use super::ring::Ring;
use super::skeleton::{FlowCacheSkel, FlowCacheSkelBuilder, OpenFlowCacheSkel};
use super::{Adopted, CacheConfig, CacheError, Unavailable, words};

/// Maps that outlive the process.
const PINNED_MAPS: [&str; 14] = [
    "apps",
    "flows",
    "deltas",
    "paths",
    "pairs",
    "locals",
    "peers",
    "listeners",
    "offers",
    "spares",
    "grants",
    "socketless",
    "layout",
    "counters",
];
/// How the names of pinned links begin.
const LINK: &str = "link_";
const LINK_OF_SAL0: &str = "link_sal0_";
/// Magic number of a bpffs.
const BPF_FS: i64 = 0xcafe_4a11;
/// `BPF_F_BEFORE`: first in the chain, before other people's programs (DESIGN §18).
const BEFORE: u32 = 1 << 3;

/// The maps that this process reads and writes.
pub(super) struct Maps {
    pub apps: MapHandle,
    pub flows: MapHandle,
    pub deltas: MapHandle,
    pub paths: MapHandle,
    pub pairs: MapHandle,
    pub locals: MapHandle,
    pub peers: MapHandle,
    pub peers_known: MapHandle,
    pub offers: MapHandle,
    pub spares: MapHandle,
    pub grants: MapHandle,
    pub listeners: MapHandle,
    pub insides: MapHandle,
    pub heartbeat: MapHandle,
    pub in_place: MapHandle,
    pub counters: MapHandle,
}

/// Programs and maps in the kernel.
pub(super) struct Loaded {
    skeleton: FlowCacheSkel<'static>,
    pub maps: Maps,
    pub events: Ring<flow_event>,
    sal0: u32,
    pin_dir: PathBuf,
    interfaces: Mutex<Vec<Interface>>,
    /// Whether the flow cache is to be on `sal0`.
    is_on: AtomicBool,
    /// Whether what middleboxes forward is marked at `sal0`, with the flow cache or without it.
    marks_forwarded: bool,
    /// By name of the pin.
    links: Mutex<HashMap<String, Link>>,
}

impl Loaded {
    pub fn open(config: &CacheConfig) -> Result<(Self, Adopted), Unavailable> {
        words::keep();
        let sal0 = interface_index(&config.sal0)?;
        let mut adopted = pinned_version(&config.pin_dir);
        let mut loaded = load(config, sal0);
        if let (Err(error), Adopted::Kept) = (&loaded, adopted) {
            // Of this layout by its own account, and yet not what the programs want: a bound changed, say.
            tracing::warn!(%error, "the pinned maps cannot be used again");
            remove_maps(&config.pin_dir);
            adopted = Adopted::Replaced { found: LAYOUT_VERSION };
            loaded = load(config, sal0);
        }
        Ok((Self::of(loaded?, sal0, config)?, adopted))
    }

    /// Programs that are in the kernel, and attached nowhere.
    pub fn of(skeleton: FlowCacheSkel<'static>, sal0: u32, config: &CacheConfig) -> Result<Self, Unavailable> {
        let handle = |map: &libbpf_rs::Map<'_>| {
            MapHandle::try_from(map).map_err(|error| Unavailable::system("open a map", error))
        };
        let maps = Maps {
            apps: handle(&skeleton.maps.apps)?,
            flows: handle(&skeleton.maps.flows)?,
            deltas: handle(&skeleton.maps.deltas)?,
            paths: handle(&skeleton.maps.paths)?,
            pairs: handle(&skeleton.maps.pairs)?,
            locals: handle(&skeleton.maps.locals)?,
            peers: handle(&skeleton.maps.peers)?,
            peers_known: handle(&skeleton.maps.peers_known)?,
            offers: handle(&skeleton.maps.offers)?,
            spares: handle(&skeleton.maps.spares)?,
            grants: handle(&skeleton.maps.grants)?,
            listeners: handle(&skeleton.maps.listeners)?,
            insides: handle(&skeleton.maps.insides)?,
            heartbeat: handle(&skeleton.maps.heartbeat)?,
            in_place: handle(&skeleton.maps.in_place)?,
            counters: handle(&skeleton.maps.counters)?,
        };
        let version = LAYOUT_VERSION.to_ne_bytes();
        skeleton
            .maps
            .layout
            .update(&0_u32.to_ne_bytes(), &version, MapFlags::ANY)
            .map_err(|error| Unavailable::system("mark the maps", error))?;
        let events = Ring::new(handle(&skeleton.maps.events)?)
            .map_err(|error| Unavailable::system("open the ring of events", error))?;
        Ok(Self {
            skeleton,
            maps,
            events,
            sal0,
            pin_dir: config.pin_dir.clone(),
            interfaces: Mutex::new(config.interfaces.clone()),
            is_on: AtomicBool::new(true),
            marks_forwarded: config.boxes,
            links: Mutex::default(),
        })
    }

    /// The programs and maps themselves.
    #[cfg(test)]
    pub const fn skeleton(&self) -> &FlowCacheSkel<'static> {
        &self.skeleton
    }

    /// Where the programs belong.
    fn places(&self) -> Vec<Place> {
        let mut places = Vec::new();
        if self.is_on.load(Ordering::Relaxed) || self.marks_forwarded {
            places.push(self.sal0_place());
        }
        // Whether flows go direct or not.
        places.push(Place { pin: format!("{LINK}up_{}", self.sal0), index: self.sal0, hook: Hook::Up });
        for Interface { index, is_ethernet, inside } in &*self.interfaces.lock() {
            let (pin, hook) = if *is_ethernet {
                (format!("{LINK}{index}"), Hook::Wire)
            } else {
                (format!("{LINK}in_{index}"), Hook::In)
            };
            places.push(Place { pin, index: *index, hook });
            // What leaves by a port has left by its bridge, which was asked.
            if *inside != Inside::Port {
                places.push(Place { pin: format!("{LINK}out_{index}"), index: *index, hook: Hook::Out });
            }
        }
        places
    }

    fn sal0_place(&self) -> Place {
        Place { pin: format!("{LINK_OF_SAL0}{}", self.sal0), index: self.sal0, hook: Hook::Sal0 }
    }

    pub fn attach(&self) -> Result<(), CacheError> {
        if !self.is_on.swap(true, Ordering::Relaxed) {
            // Its pin stays, and the link is given the other program.
            self.links.lock().remove(&self.sal0_place().pin);
        }
        self.attach_all()
    }

    fn attach_all(&self) -> Result<(), CacheError> {
        // First: whoever is inside is not to be taken for a stranger.
        if let Err(error) = interface::set_insides(&self.maps.insides, &self.interfaces.lock()) {
            tracing::warn!(%error, "what is inside of this host is not all known as such");
        }
        let mut links = self.links.lock();
        let places = self.places();
        for place in &places {
            if !links.contains_key(&place.pin) {
                match self.attach_one(place) {
                    Ok(link) => {
                        links.insert(place.pin.clone(), link);
                    }
                    // Not every interface takes programs; `sal0` must.
                    Err(error) if place.hook != Hook::Sal0 => {
                        tracing::warn!(interface = place.index, %error, "{}", place.hook.loss());
                    }
                    Err(error) => return Err(CacheError::System(format!("sal0 takes no program: {error}"))),
                }
            }
        }
        let is_gone = |name: &String| !places.iter().any(|place| place.pin == *name);
        links.retain(|name, _| !is_gone(name));
        // Those of a process before, too.
        let gone = pinned_links(&self.pin_dir).into_iter().filter(is_gone);
        gone.for_each(|name| remove_pin(&self.pin_dir.join(name)));
        Ok(())
    }

    fn attach_one(&self, place: &Place) -> libbpf_rs::Result<Link> {
        let pin = self.pin_dir.join(&place.pin);
        let index = place.index;
        let programs = &self.skeleton.progs;
        let program = match place.hook {
            Hook::Sal0 if self.is_on.load(Ordering::Relaxed) => &programs.app_egress,
            Hook::Sal0 => &programs.app_egress_uncached,
            Hook::Up => &programs.app_ingress,
            Hook::Wire => &programs.wire_ingress,
            Hook::In => &programs.card_ingress,
            Hook::Out => &programs.card_egress,
        };
        let mut before = pin.exists().then(|| Link::open(&pin).ok()).flatten();
        if let Some(mut link) = before.take() {
            match link.update_prog(program) {
                Ok(()) => return Ok(link),
                // Its interface is gone, and another has the number now.
                Err(error) => tracing::debug!(%error, pin = %pin.display(), "a pinned link is of no more use"),
            }
            before = Some(link);
        }
        let options = libbpf_sys::bpf_tcx_opts {
            sz: size_of::<libbpf_sys::bpf_tcx_opts>() as libbpf_sys::size_t,
            // On the way out last: others may give a packet a real address still.
            flags: if place.hook == Hook::Out { 0 } else { BEFORE },
            ..Default::default()
        };
        // SAFETY: the program is loaded and lives as long as the skeleton; the options live across the call.
        let link = unsafe {
            libbpf_sys::bpf_program__attach_tcx(
                program.as_libbpf_object().as_ptr(),
                index.cast_signed(),
                &raw const options,
            )
        };
        let Some(link) = NonNull::new(link) else { return Err(io::Error::last_os_error().into()) };
        // SAFETY: libbpf just gave us this link, and nobody else has it.
        let mut link = unsafe { Link::from_ptr(link) };
        // The new program stands: now the old one may go.
        if before.take().is_some() {
            remove_pin(&pin);
        }
        link.pin(&pin)?;
        Ok(link)
    }

    pub fn detach(&self) {
        self.is_on.store(false, Ordering::Relaxed);
        let place = self.sal0_place();
        let Some(link) = self.links.lock().remove(&place.pin) else { return };
        if self.marks_forwarded {
            match self.attach_one(&place) {
                Ok(link) => return drop(self.links.lock().insert(place.pin, link)),
                Err(error) => tracing::warn!(%error, "what middleboxes forward here is marked no longer"),
            }
        }
        if let Err(error) = link.detach() {
            tracing::debug!(%error, "already off");
        }
        drop(link);
        remove_pin(&self.pin_dir.join(place.pin));
    }

    /// Says how a flow goes on; gives one of `CHANGE_`.
    pub fn change_flow(&self, change: &flow_change) -> libbpf_rs::Result<u32> {
        run(&self.skeleton.progs.change_flow, change).map(|(result, _)| result)
    }

    /// Has a flow that is lifted accepted; gives one of `LIFT_`.
    pub fn lift_flow(&self, lift: &flow_lift) -> libbpf_rs::Result<u32> {
        run(&self.skeleton.progs.lift_flow, lift).map(|(result, _)| result)
    }

    /// Takes flows of a grant that is over out of the maps.
    pub fn forget_flows(&self, but: &grant_flows) -> libbpf_rs::Result<()> {
        run(&self.skeleton.progs.forget_flows, but).map(drop)
    }

    /// Says what has become of flows of a grant.
    pub fn survey_flows(&self, these: &grant_flows) -> libbpf_rs::Result<grant_flows> {
        run(&self.skeleton.progs.survey_flows, these).map(|(_, said)| said)
    }

    /// Has the events tell of flows of a grant.
    pub fn tell_flows(&self, these: &grant_flows) -> libbpf_rs::Result<()> {
        run(&self.skeleton.progs.tell_flows, these).map(drop)
    }

    pub fn bare_interfaces(&self) -> Vec<u32> {
        let links = self.links.lock();
        let places = self.places().into_iter();
        let mut bare: Vec<u32> =
            places.filter(|place| !links.contains_key(&place.pin)).map(|place| place.index).collect();
        bare.dedup();
        bare
    }

    /// Puts programs on again that somebody has taken off their interfaces; gives how many those were.
    pub fn reattach(&self) -> usize {
        let taken_off = {
            let mut links = self.links.lock();
            let before = links.len();
            links.retain(|_, link| !is_detached(link));
            before - links.len()
        };
        if taken_off > 0
            && let Err(error) = self.attach_all()
        {
            tracing::warn!(%error, "the programs are not on every interface");
        }
        taken_off
    }

    pub fn set_interfaces(&self, interfaces: &[Interface]) {
        if *self.interfaces.lock() == interfaces {
            return;
        }
        *self.interfaces.lock() = interfaces.to_vec();
        if let Err(error) = self.attach_all() {
            tracing::warn!(%error, "the programs are not on every interface");
        }
    }
}

/// Whether a link is of no interface any more: somebody has taken the program off, or the interface is gone.
fn is_detached(link: &Link) -> bool {
    let kind = link.info().map(|info| info.info);
    matches!(kind, Ok(LinkTypeInfo::Tcx(tcx)) if tcx.ifindex == 0)
}

/// Where a program belongs.
struct Place {
    /// Name of the link's pin.
    pin: String,
    /// Interface.
    index: u32,
    hook: Hook,
}

/// Which program it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hook {
    /// What leaves `sal0`: flows that go direct.
    Sal0,
    /// What comes by `sal0`: for listeners that are looked up, and what no socket can take.
    Up,
    /// What comes by an Ethernet card: direct flows, and what must not come in.
    Wire,
    /// What comes by another card: what must not come in.
    In,
    /// What leaves by a card: what must not.
    Out,
}

impl Hook {
    /// What a host is without it.
    const fn loss(self) -> &'static str {
        match self {
            Self::Sal0 | Self::Wire => {
                "no direct packets over this interface, and whoever is behind it can send to virtual addresses"
            }
            Self::Up => "services at one address of this host, or on its loopback, are not reached",
            Self::In => "whoever is behind this interface can send to virtual addresses",
            Self::Out => "packets with virtual addresses can leave by this interface",
        }
    }
}

/// Has a program carry out an order; gives what it returns, and the order as it has left it.
fn run<T: Plain + Copy>(program: &ProgramMut<'_>, order: &T) -> libbpf_rs::Result<(u32, T)> {
    let mut bytes = order.bytes().to_vec();
    let input = ProgramInput { context_in: Some(&mut bytes), ..Default::default() };
    let result = program.test_run(input)?.return_value;
    Ok((result, T::read(&bytes).unwrap_or(*order)))
}

fn load(config: &CacheConfig, sal0: u32) -> Result<FlowCacheSkel<'static>, Unavailable> {
    // One object per process that opens a cache: it lives as long as the process.
    let storage: &'static mut MaybeUninit<OpenObject> = Box::leak(Box::new(MaybeUninit::uninit()));
    let mut open = FlowCacheSkelBuilder::default()
        .open(storage)
        .map_err(|error| Unavailable::system("read the eBPF object", error))?;
    let set_up = |open: &mut OpenFlowCacheSkel<'_>| -> libbpf_rs::Result<()> {
        if let Some(constants) = open.maps.rodata_data.as_deref_mut() {
            constants.sal0_ifindex = sal0;
            constants.flow_port_first = *config.flow_ports.start();
            constants.flow_port_last = *config.flow_ports.end();
            interface::set_virtual(constants, config.ranges);
            constants.drops_tags = config.boxes.into();
            constants.forwarded_hop_limit = if config.boxes { FORWARDED_HOP_LIMIT.into() } else { 0 };
            interface::set_common(constants);
        }
        open.maps.apps.set_max_entries(config.flows_max)?;
        open.maps.flows.set_max_entries(config.flows_max)?;
        open.maps.apps.set_pin_path(config.pin_dir.join("apps"))?;
        open.maps.deltas.set_max_entries(config.flows_max)?;
        open.maps.flows.set_pin_path(config.pin_dir.join("flows"))?;
        open.maps.deltas.set_pin_path(config.pin_dir.join("deltas"))?;
        open.maps.paths.set_pin_path(config.pin_dir.join("paths"))?;
        open.maps.pairs.set_pin_path(config.pin_dir.join("pairs"))?;
        open.maps.locals.set_pin_path(config.pin_dir.join("locals"))?;
        open.maps.peers.set_pin_path(config.pin_dir.join("peers"))?;
        open.maps.listeners.set_pin_path(config.pin_dir.join("listeners"))?;
        open.maps.offers.set_pin_path(config.pin_dir.join("offers"))?;
        open.maps.spares.set_pin_path(config.pin_dir.join("spares"))?;
        open.maps.grants.set_pin_path(config.pin_dir.join("grants"))?;
        open.maps.socketless.set_pin_path(config.pin_dir.join("socketless"))?;
        open.maps.layout.set_pin_path(config.pin_dir.join("layout"))?;
        open.maps.counters.set_pin_path(config.pin_dir.join("counters"))
    };
    set_up(&mut open).map_err(|error| Unavailable::system("prepare the maps", error))?;
    open.load().map_err(|error| Unavailable::of_load(&error))
}

fn interface_index(name: &str) -> Result<u32, Unavailable> {
    nix::net::if_::if_nametoindex(name).map_err(|error| Unavailable::system("find sal0", error))
}

/// The layout of what is pinned; maps of another layout are removed. The links stay in any case: they keep flow ports
/// from the host's TCP until the new programs take their place.
fn pinned_version(pin_dir: &Path) -> Adopted {
    let found = MapHandle::from_pinned_path(pin_dir.join("layout"))
        .ok()
        .and_then(|map| map.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY).ok().flatten())
        .and_then(|bytes| bytes.try_into().ok())
        .map(u32::from_ne_bytes);
    match found {
        None => {
            remove_maps(pin_dir);
            Adopted::Fresh
        }
        Some(LAYOUT_VERSION) => Adopted::Kept,
        Some(found) => {
            remove_maps(pin_dir);
            Adopted::Replaced { found }
        }
    }
}

/// Makes the directory a BPF file system, if it is none.
pub(super) fn prepare_pins(pin_dir: &Path) -> Result<(), Unavailable> {
    let refuse = |source: io::Error| match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Unavailable::Privilege,
        _ => Unavailable::Pins { path: pin_dir.to_owned(), source },
    };
    fs::create_dir_all(pin_dir).map_err(refuse)?;
    let kind = statfs(pin_dir).map_err(|error| refuse(error.into()))?.filesystem_type();
    if kind.0 == BPF_FS {
        return Ok(());
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("bpf"), pin_dir, Some("bpf"), flags, Some("mode=0700")).map_err(|error| refuse(error.into()))
}

pub(crate) fn remove_pin(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "a pin cannot be removed");
        }
        _ => {}
    }
}

fn remove_maps(pin_dir: &Path) {
    PINNED_MAPS.iter().for_each(|name| remove_pin(&pin_dir.join(name)));
}

/// Names of the links that are pinned here.
fn pinned_links(pin_dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(pin_dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(LINK)).collect()
}

/// Takes the program off `sal0`, whoever has put it there.
pub(super) fn remove_egress(pin_dir: &Path) {
    let of_sal0 = pinned_links(pin_dir).into_iter().filter(|name| name.starts_with(LINK_OF_SAL0));
    of_sal0.for_each(|name| remove_pin(&pin_dir.join(name)));
}

/// Takes everything out of the kernel that is pinned here: programs without a link go off.
pub(super) fn remove_pins(pin_dir: &Path) {
    if !pin_dir.is_dir() {
        return;
    }
    remove_maps(pin_dir);
    pinned_links(pin_dir).iter().for_each(|name| remove_pin(&pin_dir.join(name)));
    // Last: until then a program may still be in its place.
    Guard::remove(pin_dir);
    // Not a mount of ours, or in use: an empty directory does no harm.
    let _ = umount(pin_dir);
    let _ = fs::remove_dir(pin_dir);
}

/// Whether this kernel has tcx, and lets this process use it: asked of the loopback, which every network namespace has.
pub(super) fn has_tcx() -> bool {
    const LOOPBACK: i32 = 1;
    // SAFETY: the kernel is given no pointer.
    let result =
        unsafe { libbpf_sys::bpf_prog_query_opts(LOOPBACK, libbpf_sys::BPF_TCX_INGRESS, std::ptr::null_mut()) };
    result == 0
}
