//! The process that answers: it has sockets and no rights.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use margay_control::dns::channel::Ended;
use margay_control::dns::{Responder, Servers, UserOf};
use margay_core::Ranges;
use margay_datapath::sock_diag;
use margay_frames::process::drop_privileges;
use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, UdpSocket, UnixListener, UnixStream};
use tokio::sync::mpsc;

use super::{IDENTITY_LEN, Sockets, Words, given, pass};
use crate::agent::programs::rights::account;
use crate::host::{RESOLV_CONF, resolv_conf};

/// After an error of the system, so that a lasting one does not take the processor.
const PAUSE: Duration = Duration::from_millis(100);

/// Until an agent says that it is to end.
///
/// # Errors
///
/// What it was given is of no use, or its keeper is gone.
pub(super) fn run(words: &Words) -> io::Result<()> {
    let (control, sockets) = given()?;
    let identity = words.identity()?;
    drop_privileges()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(words, identity, control, sockets))
}

async fn serve(words: &Words, identity: [u8; IDENTITY_LEN], control: OwnedFd, sockets: Sockets) -> io::Result<()> {
    let responder = Arc::new(start(words, &sockets)?);
    let control = StdListener::from(control);
    control.set_nonblocking(true)?;
    let control = UnixListener::from_std(control)?;
    let mut keeper = keeper_stream()?;
    let (say, mut ended) = mpsc::channel(1);
    loop {
        tokio::select! {
            accepted = control.accept() => match accepted.and_then(|(stream, _)| greet(stream, &identity, &sockets)) {
                Ok(stream) => {
                    let (responder, say) = (Arc::clone(&responder), say.clone());
                    tokio::spawn(async move {
                        // Once the loop has ended, nobody wants to know.
                        let _ = say.send(responder.attach(stream).await).await;
                    });
                }
                Err(error) => {
                    tracing::debug!(%error, "an agent could not be heard");
                    tokio::time::sleep(PAUSE).await;
                }
            },
            Some(how) = ended.recv() => if how == Ended::End {
                return Ok(());
            },
            // It says nothing: this is its end.
            _ = keeper.read_u8() => return Err(io::Error::other("its keeper is gone")),
        }
    }
}

fn start(words: &Words, sockets: &Sockets) -> io::Result<Responder> {
    let udp = std::net::UdpSocket::from(sockets.udp.try_clone()?);
    let tcp = std::net::TcpListener::from(sockets.tcp.try_clone()?);
    udp.set_nonblocking(true)?;
    tcp.set_nonblocking(true)?;
    let both = (UdpSocket::from_std(udp)?, TcpListener::from_std(tcp)?);
    let ranges = Ranges { v4: words.ipv4, v6: words.ipv6 };
    let (servers, user_of) = (servers(words.address), user_of(words.address));
    Responder::start(both, &words.zone, ranges, servers, user_of).map_err(io::Error::other)
}

/// As the kernel says whose sockets of this host are: the process is in the host's network namespace, also where what
/// programs ask is in another one.
fn user_of(own: SocketAddr) -> UserOf {
    Box::new(move |protocol, from| {
        let socket = sock_diag::socket_of(protocol, from, own).ok()??;
        socket.user().map(account)
    })
}

/// The agent is told what this process is, and given what it holds.
fn greet(stream: UnixStream, identity: &[u8], sockets: &Sockets) -> io::Result<UnixStream> {
    let stream = stream.into_std()?;
    pass(&stream, identity, &sockets.fds().collect::<Vec<_>>())?;
    UnixStream::from_std(stream)
}

fn keeper_stream() -> io::Result<UnixStream> {
    let stream = StdStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// The servers of `resolv.conf` other than this one, read again whenever the file is another.
fn servers(own: SocketAddr) -> Servers {
    let known = Mutex::new((None, Vec::new()));
    Box::new(move || {
        let path = Path::new(RESOLV_CONF);
        let stamp = std::fs::metadata(path).ok().map(|file| (file.ino(), file.mtime(), file.mtime_nsec(), file.len()));
        let mut known = known.lock();
        if stamp.is_none() || known.0 != stamp {
            // A file that is gone, or cannot be read, names nobody.
            let content = resolv_conf::look(path).map(|present| present.effective).unwrap_or_default();
            *known = (stamp, resolv_conf::upstreams(&content, own.ip()));
        }
        known.1.clone()
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_kernel_says_which_user_asks() {
        let own = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
        let at = own.local_addr().expect("bound");
        let asker = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
        asker.connect(at).expect("a peer");
        let (from, user_of) = (asker.local_addr().expect("bound"), user_of(at));
        assert_eq!(user_of(17, from), Some(nix::unistd::Uid::effective().as_raw()));
        drop(asker);
        assert_eq!(user_of(17, from), None);
    }
}
