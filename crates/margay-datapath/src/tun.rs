//! `sal0`, the virtual interface: a TUN with offloads, read and written in super-packets of up to 64 KiB (DESIGN §2).
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::sys::uio::{readv, writev};

use crate::error::Error;
use crate::vnet;

/// Longest packet that the kernel hands over: an IPv6 header and 65535 bytes.
pub const PACKET_MAX: usize = 65_575;

/// Packets that wait at `sal0` for the agent. What a program sends into a full queue is lost without a word to that
/// program: with the 500 of a TUN, 20 ms without a processor lost datagrams of a flow of 17,000 a second.
pub const QUEUE_PACKETS: u32 = 2000;

const CSUM: u32 = 0x01;
const TSO4: u32 = 0x02;
const TSO6: u32 = 0x04;
const TSO_ECN: u32 = 0x08;
const USO4: u32 = 0x20;
const USO6: u32 = 0x40;

/// Offloads to ask for, best first; kernels before 6.2 do not know the last two flags.
const OFFLOADS: [u32; 3] = [CSUM | TSO4 | TSO6 | TSO_ECN | USO4 | USO6, CSUM | TSO4 | TSO6 | TSO_ECN, 0];

/// An open queue of the TUN. Reads never block; wait with `poll`.
#[derive(Debug)]
pub struct Tun {
    file: File,
    offloads: u32,
}

/// Makes the interface, so that it stays when no process holds it (DESIGN §3.6). An existing TUN of that name is kept.
pub fn create_persistent(name: &str) -> Result<(), Error> {
    let file = attach(name)?;
    set_persistent(&file, name, true)
}

/// Removes an interface made by [`create_persistent`]. Whoever still holds it keeps it until it lets go.
pub fn remove(name: &str) -> Result<(), Error> {
    let file = attach(name)?;
    set_persistent(&file, name, false)
}

impl Tun {
    /// Opens the interface; makes one that goes away with the descriptor if there is none.
    pub fn open(name: &str) -> Result<Self, Error> {
        let file = attach(name)?;
        for offloads in OFFLOADS {
            // SAFETY: TUNSETOFFLOAD takes its argument by value; the descriptor is open.
            let result =
                unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD as _, libc::c_ulong::from(offloads)) };
            if result == 0 {
                return Ok(Self { file, offloads });
            }
        }
        Err(Error::system(format!("set the offloads of {name}"), io::Error::last_os_error()))
    }

    /// Whether the kernel leaves segmentation to us.
    pub const fn segmentation_offload(&self) -> bool {
        self.offloads & TSO4 != 0
    }

    /// Whether the kernel leaves the cutting of UDP bursts to us.
    pub const fn udp_segmentation_offload(&self) -> bool {
        self.offloads & USO4 != 0
    }

    /// Reads one packet behind its [`vnet`] header, spread over `slots`; the header must have its own first slot.
    /// Gives the packet's bytes without the header; `None` when nothing waits.
    pub fn read(&self, slots: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
        match readv(&self.file, slots) {
            Ok(len) if len <= vnet::LEN => Err(ErrorKind::UnexpectedEof.into()),
            Ok(len) => Ok(Some(len - vnet::LEN)),
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes one packet, whose parts begin with its [`vnet`] header.
    pub fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        loop {
            match writev(&self.file, parts) {
                Err(nix::errno::Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn attach(name: &str) -> Result<File, Error> {
    let bad = |byte: u8| byte.is_ascii_whitespace() || matches!(byte, 0 | b'/' | b'%' | b':');
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.bytes().any(bad) || name == "." || name == ".." {
        return Err(Error::BadName { name: name.to_owned() });
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")
        .map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => Error::NoTun,
            _ => Error::system("open /dev/net/tun", error),
        })?;
    // SAFETY: all-zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = byte as libc::c_char;
    }
    let flags = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq, which lives across the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    if result == 0 {
        return Ok(file);
    }
    let error = io::Error::last_os_error();
    let name = name.to_owned();
    Err(match error.raw_os_error() {
        Some(libc::EBUSY) => Error::TunBusy { name },
        Some(libc::EINVAL) => Error::NotATun { name },
        _ => Error::system(format!("make or open the interface {name}"), error),
    })
}

fn set_persistent(file: &File, name: &str, persistent: bool) -> Result<(), Error> {
    // SAFETY: TUNSETPERSIST takes its argument by value; the descriptor is open.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETPERSIST as _, libc::c_ulong::from(persistent)) };
    if result == 0 {
        return Ok(());
    }
    Err(Error::system(format!("make {name} persistent, or no longer so"), io::Error::last_os_error()))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn names_that_cannot_be() {
        for name in ["", "sixteen-bytes-is", "a/b", "sal%d", "sal 0", "."] {
            assert!(matches!(attach(name), Err(Error::BadName { .. })), "{name:?}");
        }
    }
}
