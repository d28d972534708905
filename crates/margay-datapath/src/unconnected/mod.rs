//! Unconnected datagrams (DESIGN §9; Serval §4.1): each that a program sends to a name goes to an instance chosen for
//! it alone, by programs in the kernel's socket calls. Which instances there are is the agent's to say.
//!
//! Programs and maps are pinned: datagrams are spread while the agent is away, too.
#![allow(unsafe_code)]

mod layout;
#[cfg(test)]
mod test;

/// Generated from the object.
#[allow(unsafe_code, missing_docs, unreachable_pub, dead_code, clippy::all, clippy::print_stdout, clippy::unwrap_used)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/unconnected.skel.rs"));
}

use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{ErrorKind, Link, MapCore, MapFlags, MapHandle, OpenObject, ProgramMut};

use margay_core::Ranges;

use crate::active_sockets::own_namespace;
use crate::clock;
use crate::kernel::plain::Plain;
use crate::kernel::ring::Ring;
use crate::kernel::words;
use crate::kernel::{Unavailable, prefix_v4, prefix_v6, remove_pin};
use layout::{VERSION, address_value, client_key, name_key, question};
use skeleton::{OpenUnconnectedSkel, UnconnectedSkel, UnconnectedSkelBuilder};

/// What is pinned, and by what the names of pinned links begin.
const PINNED_MAPS: [&str; 6] = ["spreads", "faces", "heard", "clients", "surrogates", "unconnected_layout"];
const LINK: &str = "call_";

/// In a client's key: sockets of every port.
const ANY_PORT: u16 = 0;

/// The programs in the kernel. They stay when this handle goes.
pub struct Unconnected {
    skeleton: UnconnectedSkel<'static>,
    ring: Ring<question>,
    _links: Vec<Link>,
}

impl Unconnected {
    /// Loads the programs, or takes over what an agent before has left in `pin_dir`, and attaches them to the machine.
    /// `cgroup_root`: the root of the version 2 hierarchy; `sal0`: the number of the interface that names lead to;
    /// `ranges`: the addresses that stand for them.
    ///
    /// # Errors
    ///
    /// Why the kernel does not take them.
    pub fn open(cgroup_root: &Path, pin_dir: &Path, sal0: u32, ranges: Ranges) -> Result<Self, Unavailable> {
        words::keep();
        let root =
            File::open(cgroup_root).map_err(|error| Unavailable::system("open the root of the cgroups", error))?;
        if pinned_version(pin_dir) != Some(VERSION) {
            remove_maps(pin_dir);
        }
        let mut loaded = load(pin_dir, sal0, ranges);
        if loaded.is_err() {
            // Of this version by its own account, and yet not what the programs want: a bound changed, say.
            remove_maps(pin_dir);
            loaded = load(pin_dir, sal0, ranges);
        }
        let skeleton = loaded?;
        let version = VERSION.to_ne_bytes();
        let marked = skeleton.maps.unconnected_layout.update(&0_u32.to_ne_bytes(), &version, MapFlags::ANY);
        marked.map_err(|error| Unavailable::system("mark the maps", error))?;
        let progs = &skeleton.progs;
        let calls = [
            ("send4", &progs.send_v4),
            ("send6", &progs.send_v6),
            ("connect4", &progs.connect_v4),
            ("connect6", &progs.connect_v6),
            ("receive4", &progs.receive_v4),
            ("receive6", &progs.receive_v6),
            ("peer4", &progs.peer_v4),
            ("peer6", &progs.peer_v6),
        ];
        let attach =
            |(name, program): (&str, &ProgramMut<'_>)| attach(&pin_dir.join(format!("{LINK}{name}")), program, &root);
        let links = calls.into_iter().map(attach).collect::<Result<_, _>>();
        let links = links.map_err(|error| Unavailable::system("attach a program to the socket calls", error))?;
        let questions =
            MapHandle::try_from(&skeleton.maps.questions).map_err(|error| Unavailable::system("open a map", error))?;
        let ring = Ring::new(questions).map_err(|error| Unavailable::system("open the ring of questions", error))?;
        Ok(Self { skeleton, ring, _links: links })
    }

    /// Datagrams to `name` go to these instances from now on, by weight; at most 64 of them. Each is known to programs
    /// by the name. `sticky`: all that one socket sends goes to one of them.
    ///
    /// # Errors
    ///
    /// There are too many names or instances.
    pub fn spread(&self, name: SocketAddr, instances: &[(IpAddr, u32)], sticky: bool) -> io::Result<()> {
        let face = layout::value_of(name.ip());
        for (instance, _) in instances {
            let key = layout::value_of(*instance);
            self.skeleton.maps.faces.update(key.bytes(), face.bytes(), MapFlags::ANY).map_err(of_map)?;
        }
        let key = layout::key_of(name);
        let spreads = &self.skeleton.maps.spreads;
        let before = spreads.lookup(key.bytes(), MapFlags::ANY).ok().flatten();
        let used_ns = before.as_deref().map_or_else(now_ns, layout::used_ns);
        let spread = layout::spread_of(instances, sticky, used_ns, before.as_deref());
        spreads.update(key.bytes(), &spread, MapFlags::ANY).map_err(of_map)
    }

    /// Nobody serves the name, or nobody asks for it: its datagrams go as those of a connected socket.
    pub fn gather(&self, name: SocketAddr) {
        // Absent, when it was forgotten already.
        let _ = self.skeleton.maps.spreads.delete(layout::key_of(name).bytes());
    }

    /// An instance's address stands for nothing any more.
    pub fn forget(&self, instance: IpAddr) {
        // Absent, when it was forgotten already.
        let _ = self.skeleton.maps.faces.delete(layout::value_of(instance).bytes());
    }

    /// Programs are shown `address` in the place of a surrogate, and answer there: by the surrogate that was heard
    /// last, where the client's socket has several.
    ///
    /// # Errors
    ///
    /// There are too many clients.
    pub fn show_client(&self, surrogate: SocketAddr, address: IpAddr) -> io::Result<()> {
        let key = layout::key_of(surrogate);
        let client = layout::client_key_of(SocketAddr::new(address, surrogate.port()), ANY_PORT);
        let maps = &self.skeleton.maps;
        let value = layout::value_of(surrogate.ip());
        maps.surrogates.update(client.bytes(), value.bytes(), MapFlags::ANY).map_err(of_map)?;
        maps.clients.update(key.bytes(), layout::value_of(address).bytes(), MapFlags::ANY).map_err(of_map)
    }

    /// The surrogate stands for nobody any more, whom the server at `own_port` has heard.
    pub fn hide_client(&self, surrogate: SocketAddr, own_port: u16) {
        let key = layout::key_of(surrogate);
        let maps = &self.skeleton.maps;
        let Some(value) = maps.clients.lookup(key.bytes(), MapFlags::ANY).ok().flatten() else { return };
        // Refused only when it is gone already.
        let _ = maps.clients.delete(key.bytes());
        let Some(address) = address_value::read(&value).map(|value| layout::address_of(&value)) else { return };
        let client = SocketAddr::new(address, surrogate.port());
        for port in [ANY_PORT, own_port] {
            if self.surrogate_at(client, port) == Some(surrogate.ip()) {
                // As above.
                let _ = maps.surrogates.delete(layout::client_key_of(client, port).bytes());
            }
        }
    }

    /// The surrogate by which a client with this address and port was heard last.
    pub fn surrogate_of(&self, client: SocketAddr) -> Option<IpAddr> {
        self.surrogate_at(client, ANY_PORT)
    }

    fn surrogate_at(&self, client: SocketAddr, own_port: u16) -> Option<IpAddr> {
        let key = layout::client_key_of(client, own_port);
        let value = self.skeleton.maps.surrogates.lookup(key.bytes(), MapFlags::ANY).ok()??;
        Some(layout::address_of(&address_value::read(&value)?))
    }

    /// Of all surrogates, only those that are `alive` stand for clients from now on.
    pub fn keep_clients(&self, alive: impl Fn(SocketAddr) -> bool) {
        let maps = &self.skeleton.maps;
        let is_over = |surrogate: IpAddr, port: u16| !alive(SocketAddr::new(surrogate, port));
        let of_clients = maps.clients.keys().filter(|key| {
            name_key::read(key).is_none_or(|key| {
                let surrogate = layout::name_of(&key);
                is_over(surrogate.ip(), surrogate.port())
            })
        });
        let of_surrogates = maps.surrogates.keys().filter(|bytes| {
            let value = maps.surrogates.lookup(bytes, MapFlags::ANY).ok().flatten();
            let surrogate = value.and_then(|value| address_value::read(&value)).map(|value| layout::address_of(&value));
            let port = client_key::read(bytes).map(|key| u16::from_be(key.port));
            surrogate.zip(port).is_none_or(|(surrogate, port)| is_over(surrogate, port))
        });
        // What is deleted while a map is walked makes the walk begin again: so the keys come first.
        let clients: Vec<_> = of_clients.collect();
        let surrogates: Vec<_> = of_surrogates.collect();
        // Refused only where a key is gone already.
        clients.iter().for_each(|key| drop(maps.clients.delete(key)));
        surrogates.iter().for_each(|key| drop(maps.surrogates.delete(key)));
    }

    /// Surrogates in whose place programs are shown something else.
    #[cfg(test)]
    fn shown(&self) -> Vec<SocketAddr> {
        let keys = self.skeleton.maps.clients.keys();
        keys.filter_map(|key| Some(layout::name_of(&name_key::read(&key)?))).collect()
    }

    /// Readable when programs have sent to names that are not spread.
    pub fn questions(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// Those names. Each is asked about once a second at most.
    pub fn take(&self) -> Vec<SocketAddr> {
        self.ring.take().iter().map(|question| layout::name_of(&question.name)).collect()
    }

    /// Names that are spread, and how long ago each was sent to.
    pub fn spreads(&self) -> Vec<(SocketAddr, Duration)> {
        let map = &self.skeleton.maps.spreads;
        let now_ns = now_ns();
        let names = map.keys().filter_map(|key| {
            let name = layout::name_of(&name_key::read(&key)?);
            let used_ns = layout::used_ns(&map.lookup(&key, MapFlags::ANY).ok()??);
            Some((name, Duration::from_nanos(now_ns.saturating_sub(used_ns))))
        });
        names.collect()
    }

    /// Addresses of instances, and those of the names by which programs know them.
    pub fn faces(&self) -> Vec<(IpAddr, IpAddr)> {
        let map = &self.skeleton.maps.faces;
        let read = |bytes: &[u8]| Some(layout::address_of(&address_value::read(bytes)?));
        let face = |key: Vec<u8>| Some((read(&key)?, read(&map.lookup(&key, MapFlags::ANY).ok()??)?));
        map.keys().filter_map(face).collect()
    }

    /// Takes everything out of the kernel that an agent has left pinned in `pin_dir`.
    pub fn remove_pins(pin_dir: &Path) {
        remove_maps(pin_dir);
        let entries = fs::read_dir(pin_dir).into_iter().flatten().flatten();
        let is_link = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(LINK));
        entries.map(|entry| entry.path()).filter(is_link).for_each(|path| remove_pin(&path));
    }
}

/// Puts a program in the place of its predecessor, or on the cgroup.
fn attach(pin: &Path, program: &ProgramMut<'_>, root: &File) -> libbpf_rs::Result<Link> {
    if let Ok(mut link) = Link::open(pin) {
        match link.update_prog(program) {
            Ok(()) => return Ok(link),
            Err(error) => tracing::debug!(%error, pin = %pin.display(), "a pinned link is of no more use"),
        }
        remove_pin(pin);
    }
    let mut link = program.attach_cgroup(root.as_raw_fd())?;
    link.pin(pin)?;
    Ok(link)
}

fn pinned_version(pin_dir: &Path) -> Option<u32> {
    let map = MapHandle::from_pinned_path(pin_dir.join("unconnected_layout")).ok()?;
    let bytes = map.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY).ok()??;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

fn remove_maps(pin_dir: &Path) {
    PINNED_MAPS.iter().for_each(|name| remove_pin(&pin_dir.join(name)));
}

fn load(pin_dir: &Path, sal0: u32, ranges: Ranges) -> Result<UnconnectedSkel<'static>, Unavailable> {
    let own = own_namespace().map_err(|error| Unavailable::system("ask for the network namespace", error))?;
    // One object per process: it lives as long as the process.
    let storage: &'static mut MaybeUninit<OpenObject> = Box::leak(Box::new(MaybeUninit::uninit()));
    let mut open = UnconnectedSkelBuilder::default()
        .open(storage)
        .map_err(|error| Unavailable::system("read the object", error))?;
    if let Some(constants) = open.maps.rodata_data.as_deref_mut() {
        constants.own_netns = own.0;
        (constants.virtual_v4, constants.virtual_v4_mask) = prefix_v4(ranges);
        constants.virtual_v6 = prefix_v6(ranges);
        constants.sal0_ifindex = sal0;
    }
    let set_up = |open: &mut OpenUnconnectedSkel<'_>| -> libbpf_rs::Result<()> {
        open.maps.spreads.set_pin_path(pin_dir.join("spreads"))?;
        open.maps.faces.set_pin_path(pin_dir.join("faces"))?;
        open.maps.heard.set_pin_path(pin_dir.join("heard"))?;
        open.maps.clients.set_pin_path(pin_dir.join("clients"))?;
        open.maps.surrogates.set_pin_path(pin_dir.join("surrogates"))?;
        open.maps.unconnected_layout.set_pin_path(pin_dir.join("unconnected_layout"))
    };
    set_up(&mut open).map_err(|error| Unavailable::system("prepare the maps", error))?;
    open.load().map_err(|error| Unavailable::of_load(&error))
}

fn now_ns() -> u64 {
    clock::now().micros() * 1000
}

fn of_map(error: libbpf_rs::Error) -> io::Error {
    match error.kind() {
        ErrorKind::TooBig => io::Error::other("the kernel's table of names or instances is full"),
        _ => io::Error::other(error),
    }
}
