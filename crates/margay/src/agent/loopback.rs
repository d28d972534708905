//! Services whose programs listen on the loopback alone (DESIGN §7): the kernel drops what other interfaces bring there, so
//! their sockets are looked up by a program of ours, which this module keeps supplied.
//!
//! A socket that is closed is forgotten by the kernel; the one that takes its place is found within two seconds.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use margay_datapath::socket_table::{self, Socket, Table};
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::direct::DirectPath;
use super::service::Listener;
use crate::listener::{instead_of, is_loopback};

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
    let table = if address.is_ipv4() { Table::Tcp } else { Table::Tcp6 };
    let is_it = |socket: &Socket| socket.local == address && socket.state == Socket::LISTEN;
    table.sockets().into_iter().find(is_it).map(|socket| socket.inode)
}

/// Another descriptor of a socket, from whichever process has one.
fn socket_of(inode: u64) -> Option<OwnedFd> {
    let holder = socket_table::holder(inode)?;
    // The process may have ended, or closed it, in the meantime: then the next look finds what took its place.
    let process = pidfd_open(Pid::from_raw(holder.pid.cast_signed())?, PidfdFlags::empty()).ok()?;
    pidfd_getfd(process, holder.descriptor, PidfdGetfdFlags::empty()).ok()
}

#[cfg(test)]
mod test {
    use std::net::TcpListener;

    use super::*;

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
