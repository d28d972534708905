//! Active sockets (DESIGN §9; Serval §4.1): who listens on this machine and who no longer does, as the kernel itself
//! says it.
//!
//! Sockets of the own network namespace are reported, and those of programs in a cgroup with an owner, wherever they
//! are.
#![allow(unsafe_code)]

mod layout;
#[cfg(test)]
mod test;

/// Generated from the object.
#[allow(unsafe_code, missing_docs, unreachable_pub, dead_code, clippy::all, clippy::print_stdout, clippy::unwrap_used)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/active_sockets.skel.rs"));
}

use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{ErrorKind, Iter, Link, MapCore, MapFlags, MapHandle, OpenObject, ProgramMut};
use margay_core::Ranges;
use nix::sched::{CloneFlags, setns};
use parking_lot::Mutex;

use crate::kernel::plain::Plain;
use crate::kernel::ring::Ring;
use crate::kernel::words;
use crate::kernel::{Unavailable, host_words};
use layout::{OWNER_LOW_PORTS, OWNER_PRIVATE, datagram_key, socket_event};
use skeleton::{ActiveSocketsSkel, ActiveSocketsSkelBuilder};

/// The kernel's number of a socket; no other has it until the next boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cookie(pub u64);

/// The kernel's number of a network namespace; no other has it until the next boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NamespaceCookie(pub u64);

/// The kernel's number of a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CgroupId(pub u64);

/// Whose sockets: a number of the agent's own, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(pub u32);

/// A program's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Executable {
    device: u32,
    inode: u64,
}

impl Executable {
    /// The file at this path, as the kernel numbers it.
    ///
    /// # Errors
    ///
    /// There is none, or it may not be looked at.
    pub fn at(path: &Path) -> io::Result<Self> {
        let found = path.metadata()?;
        // A device number as the kernel has it: 20 bits of minor.
        let (major, minor) = (libc::major(found.dev()), libc::minor(found.dev()));
        Ok(Self { device: major << 20 | minor, inode: found.ino() })
    }
}

/// A socket that listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Socket {
    /// Which.
    pub cookie: Cookie,
    /// Where.
    pub namespace: NamespaceCookie,
    /// Whose.
    pub owner: Option<OwnerId>,
    /// The program that made it listen; not known of sockets that were there before.
    pub executable: Option<Executable>,
    /// IP protocol number.
    pub protocol: u8,
    /// What it is bound to. Port 0: the kernel chooses one just now, and [`ActiveSockets::listening`] knows it.
    pub address: SocketAddr,
    /// Bound to every address of IPv6, it takes IPv4 packets, too.
    pub takes_both: bool,
    /// The interface whose packets alone it takes, or by which alone it sends.
    pub interface: Option<NonZeroU32>,
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It listens from now on.
    Listens(Socket),
    /// It no longer does: closed, shut down, or all that had it are dead.
    Ended(Cookie),
    /// A socket that was held with [`ActiveSockets::hold`] exists no longer, whether it ever listened or not.
    Released(Cookie),
    /// A socket that listens may have been bound to an interface, or to none any more: [`ActiveSockets::listening`]
    /// knows.
    Rebound,
}

/// What is reported of an owner's sockets, and what is done to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// Sockets are bound to the host's virtual address, which no network leads to.
    pub private: bool,
    /// Datagram sockets below port 1024 are reported, too.
    pub low_ports: bool,
}

/// The programs in the kernel. They go with this handle.
pub struct ActiveSockets {
    skeleton: ActiveSocketsSkel<'static>,
    ring: Ring<socket_event>,
    lost: Mutex<u64>,
    own: NamespaceCookie,
    streams: Link,
    datagrams: Link,
    _links: Vec<Link>,
}

impl ActiveSockets {
    /// Loads the programs and attaches them to the machine. `cgroup_root`: the root of the version 2 hierarchy;
    /// `ranges`: the addresses that stand for names.
    ///
    /// # Errors
    ///
    /// Why the kernel does not take them.
    pub fn open(cgroup_root: &Path, ranges: Ranges) -> Result<Self, Unavailable> {
        words::keep();
        let own = own_namespace().map_err(|error| Unavailable::system("ask for the network namespace", error))?;
        let root =
            File::open(cgroup_root).map_err(|error| Unavailable::system("open the root of the cgroups", error))?;
        let mut skeleton = load(own, ranges)?;
        let progs = &mut skeleton.progs;
        let root = root.as_raw_fd();
        let links = [
            progs.stream_state.attach(),
            progs.datagram_bound4.attach_cgroup(root),
            progs.datagram_bound6.attach_cgroup(root),
            progs.socket_released.attach_cgroup(root),
            progs.socket_rebound.attach_cgroup(root),
            progs.private_bind4.attach_cgroup(root),
            progs.private_bind6.attach_cgroup(root),
        ];
        let links = links
            .into_iter()
            .collect::<Result<_, _>>()
            .map_err(|error| Unavailable::system("attach a program", error))?;
        let iterator = |program: &ProgramMut<'_>| {
            program.attach().map_err(|error| Unavailable::system("attach the look at all sockets", error))
        };
        let (streams, datagrams) = (iterator(&progs.all_streams)?, iterator(&progs.all_datagrams)?);
        let events =
            MapHandle::try_from(&skeleton.maps.events).map_err(|error| Unavailable::system("open a map", error))?;
        let ring = Ring::new(events).map_err(|error| Unavailable::system("open the ring of events", error))?;
        Ok(Self { skeleton, ring, lost: Mutex::new(0), own, streams, datagrams, _links: links })
    }

    /// The network namespace of this process.
    pub const fn own_namespace(&self) -> NamespaceCookie {
        self.own
    }

    /// Sockets of programs in this cgroup, and in those below it, are `owner`'s from now on.
    ///
    /// # Errors
    ///
    /// There are too many.
    pub fn set_owner(&self, cgroup: CgroupId, owner: OwnerId, watch: Watch) -> io::Result<()> {
        let flags = if watch.private { OWNER_PRIVATE } else { 0 } | if watch.low_ports { OWNER_LOW_PORTS } else { 0 };
        let value = layout::owner { number: owner.0, flags };
        self.skeleton.maps.owners.update(&cgroup.0.to_ne_bytes(), value.bytes(), MapFlags::ANY).map_err(of_map)
    }

    /// The cgroup is gone, or nobody's any more.
    pub fn forget_owner(&self, cgroup: CgroupId) {
        // Absent, when it was forgotten already.
        let _ = self.skeleton.maps.owners.delete(&cgroup.0.to_ne_bytes());
    }

    /// Datagram sockets on this port are reported: of an owner, or of this network namespace.
    ///
    /// # Errors
    ///
    /// There are too many.
    pub fn want_datagrams(&self, owner: Option<OwnerId>, port: u16) -> io::Result<()> {
        let map = &self.skeleton.maps.datagram_ports;
        map.update(datagrams(owner, port).bytes(), &1_u32.to_ne_bytes(), MapFlags::ANY).map_err(of_map)
    }

    /// They are not any more.
    pub fn forget_datagrams(&self, owner: Option<OwnerId>, port: u16) {
        // Absent, when it was forgotten already.
        let _ = self.skeleton.maps.datagram_ports.delete(datagrams(owner, port).bytes());
    }

    /// The end of this socket is reported, whatever it does until then.
    ///
    /// # Errors
    ///
    /// There are too many.
    pub fn hold(&self, cookie: Cookie) -> io::Result<()> {
        self.skeleton.maps.held.update(&cookie.0.to_ne_bytes(), &1_u32.to_ne_bytes(), MapFlags::ANY).map_err(of_map)
    }

    /// Its end is of no interest any more.
    pub fn let_go(&self, cookie: Cookie) {
        // Absent, when it was released already.
        let _ = self.skeleton.maps.held.delete(&cookie.0.to_ne_bytes());
    }

    /// Whether a socket is held, and was not released since: for when a report may have been lost.
    pub fn is_held(&self, cookie: Cookie) -> bool {
        self.skeleton.maps.held.lookup(&cookie.0.to_ne_bytes(), MapFlags::ANY).is_ok_and(|found| found.is_some())
    }

    /// What listens now, in the network namespace of this process or in another. Of whom a socket is that was passed to
    /// its program is known by its maker only.
    ///
    /// # Errors
    ///
    /// The kernel's word.
    pub fn listening(&self, namespace: Option<BorrowedFd<'_>>) -> io::Result<Vec<Socket>> {
        let look = || {
            let mut all = Vec::new();
            for link in [&self.streams, &self.datagrams] {
                let mut bytes = Vec::new();
                Iter::new(link).map_err(of_map)?.read_to_end(&mut bytes)?;
                all.extend(bytes.chunks_exact(size_of::<socket_event>()).filter_map(socket_event::read));
            }
            Ok(all)
        };
        let events: io::Result<Vec<socket_event>> = match namespace {
            None => look(),
            // A thread of its own: one that came back from elsewhere would be a trap.
            Some(namespace) => std::thread::scope(|scope| {
                let there = scope.spawn(|| {
                    setns(namespace, CloneFlags::CLONE_NEWNET)?;
                    look()
                });
                there.join().unwrap_or_else(|_| Err(io::Error::other("the look at all sockets ended badly")))
            }),
        };
        let sockets = events?.into_iter().filter_map(|event| match layout::change_of(&event) {
            Change::Listens(socket) => Some(socket),
            Change::Ended(_) | Change::Released(_) | Change::Rebound => None,
        });
        Ok(sockets.collect())
    }

    /// Readable when something has happened.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// What has happened, in this order.
    pub fn take(&self) -> Vec<Change> {
        self.ring.take().iter().map(layout::change_of).collect()
    }

    /// Whether something has happened since the last call that could not be reported: then all sockets are to be looked
    /// at.
    pub fn has_lost(&self) -> bool {
        let value = self.skeleton.maps.lost.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY).ok().flatten();
        let now = value.and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes);
        let mut before = self.lost.lock();
        std::mem::replace(&mut *before, now) != now
    }

    /// How full the maps are: cgroups with an owner, wanted datagram ports, sockets that listen, sockets that are held.
    pub fn sizes(&self) -> [usize; 4] {
        let maps = &self.skeleton.maps;
        let count = |map: &dyn MapCore| map.keys().count();
        [count(&maps.owners), count(&maps.datagram_ports), count(&maps.reported), count(&maps.held)]
    }
}

fn load(own: NamespaceCookie, ranges: Ranges) -> Result<ActiveSocketsSkel<'static>, Unavailable> {
    // One object per process: it lives as long as the process.
    let storage: &'static mut MaybeUninit<OpenObject> = Box::leak(Box::new(MaybeUninit::uninit()));
    let mut open = ActiveSocketsSkelBuilder::default()
        .open(storage)
        .map_err(|error| Unavailable::system("read the object", error))?;
    if let Some(constants) = open.maps.rodata_data.as_deref_mut() {
        constants.own_netns = own.0;
        (constants.host_v4, constants.host_v6) = host_words(ranges);
    }
    open.load().map_err(|error| Unavailable::of_load(&error))
}

fn datagrams(owner: Option<OwnerId>, port: u16) -> datagram_key {
    datagram_key { owner: owner.map_or(0, |owner| owner.0), port, ..Default::default() }
}

fn of_map(error: libbpf_rs::Error) -> io::Error {
    match error.kind() {
        ErrorKind::TooBig => io::Error::other("the kernel's table of active sockets is full"),
        _ => io::Error::other(error),
    }
}

/// The cookie of the calling thread's network namespace.
///
/// # Errors
///
/// The kernel does not tell (before Linux 5.14), or gives no socket.
pub fn own_namespace() -> io::Result<NamespaceCookie> {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").or_else(|_| std::net::UdpSocket::bind("[::1]:0"))?;
    namespace_of(socket.as_fd())
}

/// The cookie of a socket's network namespace.
///
/// # Errors
///
/// It is no internet socket, or the kernel does not tell (before Linux 5.14).
pub fn namespace_of(socket: BorrowedFd<'_>) -> io::Result<NamespaceCookie> {
    let (mut cookie, mut len) = (0_u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: the option writes eight bytes at most, which is what `cookie` has; both live across the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if result == 0 { Ok(NamespaceCookie(cookie)) } else { Err(io::Error::last_os_error()) }
}
