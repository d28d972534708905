//! Onto interfaces and off them (docs/decisions/0022): into the drivers where every interface is a card whose driver
//! runs XDP programs and sends what they give it, else to where packets have buffers, which every interface has.
//! Another's XDP program is never replaced.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

use libbpf_rs::{AsRawLibbpf, Link, MapCore, MapFlags};
use nix::net::if_::if_indextoname;

use super::ServiceRouter;

/// Interfaces that packets may leave by, at most.
const DEVICES_MAX: usize = 256;
/// `BPF_F_BEFORE`: first in the chain.
const BEFORE: u32 = 1 << 3;
/// What a driver must be able to do: run programs, have them redirect, and send what others redirect to it
/// (`NETDEV_XDP_ACT_BASIC`, `_REDIRECT`, `_NDO_XMIT` of `linux/netdev.h`).
const FEATURES: u64 = 1 | 2 | 4;

/// Where the program gets the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// From the driver, before they have buffers (XDP).
    Driver,
    /// In their buffers (tcx).
    Buffer,
}

/// A program on an interface, as long as it is held.
enum Place {
    Driver { _link: OwnedFd },
    Buffer { _link: Link },
}

/// The links. They go with this process.
#[derive(Default)]
pub(super) struct Attached {
    mode: Option<Mode>,
    links: HashMap<u32, Place>,
    /// Interfaces that should have a program and have none, and why.
    bare: Vec<(u32, String)>,
}

impl ServiceRouter {
    /// Puts the program on these interfaces, and takes it off others. Where one does not take it, the agent forwards
    /// what comes there.
    pub fn attach(&self, interfaces: &[u32]) {
        let mode = if interfaces.iter().all(|index| can_run(*index)) { Mode::Driver } else { Mode::Buffer };
        let mut attached = self.attached.lock();
        if attached.mode != Some(mode) {
            // Else a packet might be decided upon twice.
            attached.links.clear();
            attached.mode = Some(mode);
        }
        attached.links.retain(|index, _| interfaces.contains(index));
        self.set_devices(interfaces);
        let before = std::mem::take(&mut attached.bare);
        for index in interfaces {
            if attached.links.contains_key(index) {
                continue;
            }
            match self.attach_one(*index, mode) {
                Ok(link) => {
                    attached.links.insert(*index, link);
                }
                Err(error) => {
                    let why = refusal(*index, &error);
                    if !before.iter().any(|(known, text)| known == index && *text == why) {
                        tracing::warn!(
                            interface = index,
                            why,
                            "the agent itself forwards what comes by this interface"
                        );
                    }
                    attached.bare.push((*index, why));
                }
            }
        }
    }

    /// How the program is attached, and on how many interfaces.
    pub fn mode(&self) -> Option<(Mode, usize)> {
        let attached = self.attached.lock();
        attached.mode.map(|mode| (mode, attached.links.len()))
    }

    /// Interfaces that should have the program and have not, and why.
    pub fn bare_interfaces(&self) -> Vec<(u32, String)> {
        self.attached.lock().bare.clone()
    }

    fn attach_one(&self, index: u32, mode: Mode) -> io::Result<Place> {
        match mode {
            Mode::Driver => self.attach_driver(index).map(|link| Place::Driver { _link: link }),
            Mode::Buffer => self.attach_buffer(index).map(|link| Place::Buffer { _link: link }),
        }
    }

    fn attach_driver(&self, index: u32) -> io::Result<OwnedFd> {
        put_on(self.skeleton.lock().progs.route_frame.as_fd(), index)
    }

    fn attach_buffer(&self, index: u32) -> io::Result<Link> {
        let options = libbpf_sys::bpf_tcx_opts {
            sz: size_of::<libbpf_sys::bpf_tcx_opts>() as libbpf_sys::size_t,
            flags: BEFORE,
            ..Default::default()
        };
        let skeleton = self.skeleton.lock();
        let program = skeleton.progs.find_buffer.as_libbpf_object().as_ptr();
        // SAFETY: the program is loaded and lives as long as the skeleton; the options live across the call.
        let link = unsafe { libbpf_sys::bpf_program__attach_tcx(program, index.cast_signed(), &raw const options) };
        let Some(link) = NonNull::new(link) else { return Err(io::Error::last_os_error()) };
        // SAFETY: libbpf just gave us this link, and nobody else has it.
        Ok(unsafe { Link::from_ptr(link) })
    }

    pub(super) fn set_devices(&self, interfaces: &[u32]) {
        let devices = &self.maps.devices;
        for key in devices.keys().collect::<Vec<_>>() {
            if !interfaces.iter().any(|index| index.to_ne_bytes()[..] == key[..]) {
                // Gone with its interface, perhaps.
                let _ = devices.delete(&key);
            }
        }
        for index in interfaces.iter().take(DEVICES_MAX) {
            let bytes = index.to_ne_bytes();
            if let Err(error) = devices.update(&bytes, &bytes, MapFlags::ANY) {
                tracing::warn!(interface = index, %error, "packets that should leave by this interface are dropped");
            }
        }
    }
}

/// Puts a program into an interface's driver, as long as the link is open.
pub(super) fn put_on(program: BorrowedFd<'_>, index: u32) -> io::Result<OwnedFd> {
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags: libbpf_sys::XDP_FLAGS_DRV_MODE,
        ..Default::default()
    };
    let program = program.as_raw_fd();
    // SAFETY: the program's descriptor is open, and the options live across the call.
    let link =
        unsafe { libbpf_sys::bpf_link_create(program, index.cast_signed(), libbpf_sys::BPF_XDP, &raw const options) };
    if link < 0 {
        return Err(io::Error::from_raw_os_error(-link));
    }
    // SAFETY: the kernel just gave us this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

fn query(index: u32) -> Option<libbpf_sys::bpf_xdp_query_opts> {
    let mut found = libbpf_sys::bpf_xdp_query_opts {
        sz: size_of::<libbpf_sys::bpf_xdp_query_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: the structure says its own size, and lives across the call.
    let result = unsafe { libbpf_sys::bpf_xdp_query(index.cast_signed(), 0, &raw mut found) };
    (result == 0).then_some(found)
}

/// Whether the interface is a card whose driver runs programs well. Those that are made of software say that they do,
/// and copy every packet of others for it.
fn can_run(index: u32) -> bool {
    let is_card = if_indextoname(index).is_ok_and(|name| {
        name.to_str().is_ok_and(|name| Path::new("/sys/class/net").join(name).join("device").exists())
    });
    is_card && query(index).is_some_and(|found| found.feature_flags & FEATURES == FEATURES)
}

fn refusal(index: u32, error: &io::Error) -> String {
    match query(index).map(|found| found.prog_id) {
        Some(other) if other != 0 => format!("it has another XDP program, number {other}"),
        _ => error.to_string(),
    }
}
