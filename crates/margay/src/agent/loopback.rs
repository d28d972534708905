//! Services whose programs listen on the loopback alone (DESIGN §7): the kernel drops what other interfaces bring there, so
//! their sockets are looked up by a program of ours, which this module keeps supplied.
//!
//! A socket that is closed is forgotten by the kernel; the one that takes its place is found within two seconds.

use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::direct::DirectPath;
use super::service::Listener;
use crate::listener::{instead_of, is_loopback};

/// A listening TCP socket in `/proc/net/tcp`.
const LISTENS: &str = "0A";

/// The sockets that were found: the kernel's numbers of them.
#[derive(Debug, Default)]
pub struct LoopbackListeners(Mutex<HashMap<SocketAddr, u64>>);

/// Whether a listener at `address` can be reached here.
///
/// # Errors
///
/// It cannot; the message says what to bind instead.
pub fn deliverable(address: SocketAddr, direct: &DirectPath) -> Result<(), String> {
    match direct.why_not().filter(|_| is_loopback(address)) {
        None => Ok(()),
        Some(why) => Err(format!(
            "`{address}` is a loopback address, which only an eBPF program can reach, and there is none ({why}); {}",
            instead_of(address)
        )),
    }
}

impl LoopbackListeners {
    /// Finds the sockets of these listeners, and gives the kernel those that it does not have yet.
    pub fn follow<'a>(&self, listeners: impl Iterator<Item = &'a Listener>, direct: &DirectPath) {
        let mut known = self.0.lock();
        let wanted: Vec<SocketAddr> =
            listeners.map(|listener| listener.address).filter(|address| is_loopback(*address)).collect();
        known.retain(|address, _| {
            let is_wanted = wanted.contains(address);
            if !is_wanted {
                direct.with_cache(|cache| cache.forget_listener(*address));
            }
            is_wanted
        });
        for address in wanted {
            let Some(inode) = inode_of(address) else { continue };
            if known.get(&address) == Some(&inode) {
                continue;
            }
            let Some(socket) = socket_of(inode) else {
                tracing::warn!(%address, "the program that listens there does not let its socket be looked up");
                continue;
            };
            let given = direct.with_cache(|cache| cache.set_listener(address, socket.as_fd()));
            match given {
                Some(Ok(())) => {
                    tracing::info!(%address, "connections are brought to the loopback");
                    known.insert(address, inode);
                }
                Some(Err(error)) => tracing::warn!(%address, %error, "connections cannot be brought to the loopback"),
                None => {}
            }
        }
    }
}

/// The kernel's number of the TCP socket that listens at exactly this address.
fn inode_of(address: SocketAddr) -> Option<u64> {
    let table = if address.is_ipv4() { "tcp" } else { "tcp6" };
    let text = fs::read_to_string(format!("/proc/self/net/{table}")).ok()?;
    let wanted = written(address);
    text.lines().skip(1).find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (local, _, state) = (words.next()?, words.next()?, words.next()?);
        // After the state: queues, timer, retransmissions, owner, time-out, number.
        (local == wanted && state == LISTENS).then(|| words.nth(5)?.parse().ok())?
    })
}

/// As the kernel writes it: each word of the address as a number of this machine, and the port.
fn written(address: SocketAddr) -> String {
    let bytes = match address.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let words = bytes.chunks_exact(4).map(|word| {
        let word = word.try_into().unwrap_or_default();
        format!("{:08X}", u32::from_ne_bytes(word))
    });
    format!("{}:{:04X}", words.collect::<String>(), address.port())
}

/// Another descriptor of a socket, from whichever process has one.
fn socket_of(inode: u64) -> Option<OwnedFd> {
    let wanted = format!("socket:[{inode}]");
    let holds = |link: &Path| fs::read_link(link).is_ok_and(|to| to.as_os_str() == wanted.as_str());
    fs::read_dir("/proc").ok()?.flatten().find_map(|process| {
        let pid = process.file_name().to_str()?.parse().ok().and_then(Pid::from_raw)?;
        let descriptors = fs::read_dir(process.path().join("fd")).ok()?;
        let found = descriptors.flatten().find(|descriptor| holds(&descriptor.path()))?;
        let number = found.file_name().to_str()?.parse().ok()?;
        // The process may have ended, or closed it, in the meantime: then the next look finds what took its place.
        let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        pidfd_getfd(process, number, PidfdGetfdFlags::empty()).ok()
    })
}

#[cfg(test)]
mod test {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn addresses_are_written_as_the_kernel_does() {
        let written = |text: &str| super::written(text.parse().expect("an address"));
        if cfg!(target_endian = "little") {
            assert_eq!(written("127.0.0.1:80"), "0100007F:0050");
            assert_eq!(written("[::1]:8080"), "00000000000000000000000001000000:1F90");
        }
    }

    #[test]
    fn a_listening_socket_is_found_by_its_address() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let inode = inode_of(address).expect("it listens");
        let copy = socket_of(inode).expect("our own process has it");
        assert_eq!(TcpListener::from(copy).local_addr().expect("the same socket"), address);
        drop(listener);
    }
}
