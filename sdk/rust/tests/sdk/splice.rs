//! Programs that leave between two connections.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread::{self, JoinHandle};

use margay_sdk::{Agent, Error, NotSpliced};
use rustix::cmsg_space;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags,
    SocketAddrUnix, SocketType,
};

use super::fake::reply_head;

const SPLICE: u8 = 75;
const ENOTCONN: u16 = 107;
const EBADMSG: u16 = 74;

/// Answers one request after the other: `None` ends the connection instead. Gives what came: the fixed bytes, and the
/// inodes of the sockets.
fn agent(path: &Path, answers: Vec<Option<Vec<u8>>>) -> JoinHandle<Vec<(Vec<u8>, Vec<u64>)>> {
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).expect("short")).expect("bound");
    rustix::net::listen(&listener, 4).expect("listening");
    thread::spawn(move || {
        let mut heard = Vec::new();
        let mut connection: Option<OwnedFd> = None;
        for answer in answers {
            let open = connection.take().unwrap_or_else(|| rustix::net::accept(&listener).expect("a program"));
            let mut bytes = [0; 512];
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(4))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let parts = &mut [IoSliceMut::new(&mut bytes)];
            let len = rustix::net::recvmsg(&open, parts, &mut control, RecvFlags::CMSG_CLOEXEC).expect("asked").bytes;
            let passed = control.drain().filter_map(|part| match part {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            heard.push((bytes[..len].to_vec(), passed.flatten().map(|fd| inode(&fd)).collect()));
            if let Some(answer) = answer {
                let control = &mut SendAncillaryBuffer::default();
                rustix::net::sendmsg(&open, &[IoSlice::new(&answer)], control, SendFlags::NOSIGNAL).expect("heard");
                connection = Some(open);
            }
        }
        heard
    })
}

fn inode(socket: &impl std::os::fd::AsFd) -> u64 {
    rustix::fs::fstat(socket).expect("open").st_ino
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let opened = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    (listener.accept().expect("connected").0, opened)
}

#[tokio::test]
async fn the_agent_has_both_sockets_in_order_or_the_program_keeps_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("programs.sock");
    let refused = |errno: u16, text: &str| Some([reply_head(SPLICE, errno), text.as_bytes().to_vec()].concat());
    let answers =
        vec![Some(reply_head(SPLICE, 0)), refused(ENOTCONN, "not connected"), refused(EBADMSG, "no request"), None];
    let heard = agent(&path, answers);
    let agent = Agent::connect_to(&path).await.expect("it listens");
    let (left, right) = pair();
    let inodes = [&left, &right].map(inode);
    agent.splice(left, right).await.expect("granted");

    let (left, right) = pair();
    let again = [&left, &right].map(inode);
    let NotSpliced { sockets, error } = agent.splice(left, right).await.expect_err("refused");
    assert!(matches!(error, Error::Refused { errno, .. } if errno == i32::from(ENOTCONN)), "{error}");
    let [left, right] = sockets.expect("the program's");
    assert_eq!([inode(&left), inode(&right)], again);

    let NotSpliced { sockets, error } = agent.splice(left, right).await.expect_err("of before");
    assert!(matches!(error, Error::Incompatible { .. }), "{error}");
    let [left, right] = sockets.expect("the program's");
    // The agent ends after it has been asked: nobody knows who relays.
    let NotSpliced { sockets, error } = agent.splice(left, right).await.expect_err("no answer");
    assert!(sockets.is_none() && matches!(error, Error::AgentDown { .. }), "{error}");

    let heard = heard.join().expect("it answers all");
    assert_eq!(heard[0].0, [&[1, SPLICE, 6][..], &[0; 53]].concat());
    assert_eq!((heard[0].1.clone(), heard[1].1.clone()), (inodes.to_vec(), again.to_vec()));
}
