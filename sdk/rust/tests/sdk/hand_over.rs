//! Sockets that go from one process to another, against an agent whose part each test plays itself, byte by byte.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use crate::fake::reply_head;
use margay_sdk::{Agent, Error, Give, GivingTakeover, Incoming, Prefix, Takeover, Target, ToTarget};
use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};
use tempfile::TempDir;
use tokio::task::spawn_blocking;

const HAND_OVER: u8 = 9;
const TAKE_OVER: u8 = 10;
const HANDED: u8 = 11;
const GIVE: u8 = 12;
/// Of messages that come with the next version.
const UNKNOWN: u8 = 99;
/// More than any message passes.
const PASSED_MAX: usize = 8;

/// The socket for programs. Connections wait there until the test takes them.
struct Listening {
    dir: TempDir,
    socket: OwnedFd,
}

impl Listening {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        // What nobody has asked for shows, and is not waited for.
        let flags = SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let socket = socket.expect("a socket");
        let path = dir.path().join("programs.sock");
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).expect("short")).expect("bound");
        rustix::net::listen(&socket, 16).expect("listens");
        Self { dir, socket }
    }

    /// An agent that has a connection already, and that connection.
    async fn agent(&self) -> (Agent, OwnedFd) {
        let agent = Agent::connect_to(&self.dir.path().join("programs.sock")).await.expect("the agent listens");
        let connection = self.next().expect("it was opened");
        (agent, connection)
    }

    fn next(&self) -> Result<OwnedFd, Errno> {
        rustix::net::accept(&self.socket)
    }

    /// Somebody connects in a moment.
    async fn wait_next(&self) -> OwnedFd {
        loop {
            match self.next() {
                Ok(connection) => return connection,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    }
}

/// One message and what was passed with it; nothing at the end.
fn receive(connection: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut bytes = vec![0; 1024];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PASSED_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(connection, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags);
    let length = received.expect("a message").bytes;
    let mut passed = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            passed.extend(descriptors);
        }
    }
    bytes.truncate(length);
    (bytes, passed)
}

fn send(connection: &OwnedFd, bytes: &[u8], passed: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PASSED_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !passed.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(passed)));
    }
    rustix::net::sendmsg(connection, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).expect("sent");
}

fn refusal(kind: u8, errno: u16, text: &str) -> Vec<u8> {
    [reply_head(kind, errno), text.as_bytes().to_vec()].concat()
}

/// A reply about `web.shop`.
fn about_web(kind: u8) -> Vec<u8> {
    let mut reply = reply_head(kind, 0);
    reply[4..6].copy_from_slice(&256_u16.to_be_bytes());
    reply[8..40].copy_from_slice(&web().prefix.id.0);
    reply
}

fn web() -> Target {
    let target = "web.shop".to_target().expect("a name");
    assert_eq!(target.prefix.bits, 256);
    target
}

/// A request without anything but its kind, its protocol and a name.
fn request(kind: u8, protocol: u8, name: Option<&Target>) -> Vec<u8> {
    let prefix = name.map(|target| target.prefix).unwrap_or_default();
    let bits = prefix.bits.to_be_bytes();
    [&[1, kind, protocol, 0, 0, 0, bits[0], bits[1]][..], &prefix.id.0[..], &[0_u8; 16][..]].concat()
}

/// Both ends of a connection; the first one is that of a client.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bound");
    let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    client.set_read_timeout(Some(Duration::from_secs(20))).expect("a time");
    (client, listener.accept().expect("accepted").0)
}

/// Whether all who had the other end have closed it.
fn is_closed(mut client: &TcpStream) -> bool {
    client.read(&mut [0]).expect("a client is told") == 0
}

/// A socket that came back, or went somewhere, is the other end of this client.
fn works(mut client: &TcpStream, served: OwnedFd) {
    TcpStream::from(served).write_all(b"served").expect("sent");
    let mut heard = [0; 6];
    client.read_exact(&mut heard).expect("received");
    assert_eq!(&heard, b"served");
}

fn file(data: &[u8]) -> File {
    let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).expect("memory"));
    file.write_all_at(data, 0).expect("written");
    file
}

/// Receives a request, lets a test do something, and gives what came.
async fn asked(connection: OwnedFd, then: impl FnOnce(OwnedFd) + Send + 'static) -> (Vec<u8>, Vec<OwnedFd>) {
    let receiving = spawn_blocking(move || {
        let received = receive(&connection);
        then(connection);
        received
    });
    receiving.await.expect("no panic")
}

#[tokio::test]
async fn a_socket_goes_with_its_data_and_is_closed_here() {
    let listening = Listening::start();
    let (agent, connection) = listening.agent().await;
    let (client, served) = pair();
    let web = web();
    let answered = |connection: OwnedFd| send(&connection, &about_web(HAND_OVER), &[]);
    let (given, (bytes, mut passed)) =
        tokio::join!(agent.hand_over(served, Some(&web), b"anna"), asked(connection, answered));
    given.expect("taken");
    assert_eq!(bytes, request(HAND_OVER, 6, Some(&web)));
    assert_eq!(passed.len(), 2);
    let data = File::from(passed.pop().expect("the data"));
    let mut read = [0; 4];
    data.read_exact_at(&mut read, 0).expect("readable");
    assert_eq!((&read, data.metadata().expect("a file").len()), (b"anna", 4));
    works(&client, passed.pop().expect("the socket"));
    assert!(is_closed(&client));
}

#[tokio::test]
async fn without_a_name_and_data_there_is_none_of_either() {
    let listening = Listening::start();
    let (agent, connection) = listening.agent().await;
    let (_client, served) = pair();
    let answered = |connection: OwnedFd| send(&connection, &about_web(HAND_OVER), &[]);
    let (given, (bytes, passed)) = tokio::join!(agent.hand_over(served, None, b""), asked(connection, answered));
    given.expect("taken");
    assert_eq!((bytes, passed.len()), (request(HAND_OVER, 6, None), 1));
}

#[tokio::test]
async fn a_refusal_gives_the_socket_back() {
    let listening = Listening::start();
    let (agent, connection) = listening.agent().await;
    let (client, served) = pair();
    let web = web();
    let refused = |connection: OwnedFd| send(&connection, &refusal(HAND_OVER, 3, "nobody takes over the name"), &[]);
    let (given, asked) = tokio::join!(agent.hand_over(served, Some(&web), b""), asked(connection, refused));
    drop(asked);
    let refused = given.expect_err("refused");
    assert!(matches!(refused.error, Error::Refused { errno: 3, .. }), "{refused}");
    assert!(refused.to_string().contains("nobody takes over the name"), "{refused}");
    works(&client, refused.socket.expect("ours"));
}

#[tokio::test]
async fn a_host_that_is_named_is_said_to_the_agent() {
    let listening = Listening::start();
    let (agent, connection) = listening.agent().await;
    let (_client, served) = pair();
    let web = web();
    let answered = |connection: OwnedFd| send(&connection, &about_web(HAND_OVER), &[]);
    let (given, (bytes, _passed)) =
        tokio::join!(agent.hand_over_to("host2", served, Some(&web), b""), asked(connection, answered));
    given.expect("taken");
    assert_eq!(bytes, [request(HAND_OVER, 6, Some(&web)), b"host2".to_vec()].concat());
}

#[tokio::test]
async fn a_connection_that_neither_host_has_is_closed() {
    let listening = Listening::start();
    let (agent, connection) = listening.agent().await;
    let (client, served) = pair();
    let errno = u16::try_from(Errno::CONNABORTED.raw_os_error()).expect("small");
    let lost = move |connection: OwnedFd| send(&connection, &refusal(HAND_OVER, errno, "nobody has it"), &[]);
    let (given, asked) = tokio::join!(agent.hand_over_to("host2", served, None, b""), asked(connection, lost));
    drop(asked);
    let lost = given.expect_err("lost");
    assert!(matches!(lost.error, Error::Refused { .. }) && lost.socket.is_none(), "{lost}");
    assert!(is_closed(&client));
}

#[tokio::test]
async fn an_agent_that_dies_after_the_request_leaves_nobody_with_the_socket() {
    let listening = Listening::start();
    let (agent, connection) = listening.agent().await;
    let (client, served) = pair();
    let web = web();
    let (given, asked) = tokio::join!(agent.hand_over(served, Some(&web), b""), asked(connection, drop));
    drop(asked);
    let lost = given.expect_err("no answer");
    assert!(matches!(lost.error, Error::AgentDown { .. }) && lost.socket.is_none(), "{lost}");
    assert!(is_closed(&client));
    assert_eq!(listening.next().expect_err("it is not asked twice"), Errno::AGAIN);
}

#[tokio::test]
async fn an_answer_that_is_not_understood_closes_the_socket() {
    let listening = Listening::start();
    let (agent, connection) = listening.agent().await;
    let (client, served) = pair();
    let web = web();
    let nonsense = |connection: OwnedFd| send(&connection, &reply_head(TAKE_OVER, 0), &[]);
    let (given, asked) = tokio::join!(agent.hand_over(served, Some(&web), b""), asked(connection, nonsense));
    drop(asked);
    let lost = given.expect_err("nonsense");
    assert!(matches!(lost.error, Error::Incompatible { .. }) && lost.socket.is_none(), "{lost}");
    assert!(is_closed(&client));
}

#[tokio::test]
async fn a_connection_that_an_agent_left_open_is_not_used() {
    let listening = Listening::start();
    let (agent, connection) = listening.agent().await;
    drop(connection);
    let (_client, served) = pair();
    let answering = async {
        let connection = listening.wait_next().await;
        asked(connection, |connection| send(&connection, &about_web(HAND_OVER), &[])).await
    };
    let (given, (bytes, _)) = tokio::join!(agent.hand_over(served, None, b""), answering);
    given.expect("taken");
    assert_eq!(bytes, request(HAND_OVER, 6, None));
}

#[tokio::test]
async fn a_full_agent_refuses_unasked_and_the_socket_stays() {
    let listening = Listening::start();
    let (agent, connection) = listening.agent().await;
    drop(connection);
    let (client, served) = pair();
    let refusing = async { send(&listening.wait_next().await, &refusal(0, 87, "close some"), &[]) };
    let (given, ()) = tokio::join!(agent.hand_over(served, None, b""), refusing);
    let refused = given.expect_err("refused");
    assert!(matches!(refused.error, Error::Refused { errno: 87, .. }), "{refused}");
    works(&client, refused.socket.expect("ours"));
}

#[tokio::test]
async fn what_cannot_be_asked_is_not_asked() {
    let listening = Listening::start();
    let (agent, connection) = listening.agent().await;
    let everything = Target { prefix: Prefix::default(), written: None };
    let too_long = vec![0; (1 << 20) + 1];
    for (name, data) in [(web(), &too_long[..]), (everything, &b""[..])] {
        let (client, served) = pair();
        let refused = agent.hand_over(served, Some(&name), data).await.expect_err("wrong");
        assert_eq!(refused.error.kind(), ErrorKind::InvalidInput);
        works(&client, refused.socket.expect("ours"));
    }
    drop(agent);
    assert!(receive(&connection).0.is_empty(), "nothing was said");
}

/// A takeover that the agent has granted, and the agent's end of it.
async fn takeover(listening: &Listening, agent: &Agent) -> (Takeover, OwnedFd) {
    let granting = async {
        let connection = listening.wait_next().await;
        let copy = connection.try_clone().expect("a descriptor");
        (asked(copy, |connection| send(&connection, &about_web(TAKE_OVER), &[])).await.0, connection)
    };
    let (takeover, (bytes, connection)) = tokio::join!(Takeover::of(agent, "web.shop"), granting);
    assert_eq!(bytes, request(TAKE_OVER, 0, Some(&web())));
    (takeover.expect("granted"), connection)
}

#[tokio::test]
async fn a_socket_is_taken_with_its_data_and_the_agent_is_told() {
    let listening = Listening::start();
    let (agent, _connection) = listening.agent().await;
    let (mut takeover, connection) = takeover(&listening, &agent).await;
    let (client, served) = pair();
    send(&connection, &about_web(HANDED), &[served.as_fd(), file(b"anna").as_fd()]);
    drop(served);
    let taken = takeover.next().await.expect("a socket");
    assert_eq!((&taken.data[..], taken.name, taken.is_listening()), (&b"anna"[..], web().prefix, false));
    assert_eq!(receive(&connection).0, request(HANDED, 0, None));
    // Its descriptor alone is left.
    works(&client, taken.socket);
    assert!(is_closed(&client));

    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bound");
    send(&connection, &about_web(HANDED), &[listener.as_fd()]);
    let address = listener.local_addr().expect("bound");
    drop(listener);
    let taken = takeover.next().await.expect("a socket");
    assert!(taken.is_listening() && taken.data.is_empty());
    let listener = taken.into_listener().expect("a listener");
    let _client = TcpStream::connect(address).expect("connected");
    listener.accept().await.expect("accepted");
}

/// A message of this kind about the name, with a text.
fn with_text(kind: u8, text: &str) -> Vec<u8> {
    [about_web(kind), text.as_bytes().to_vec()].concat()
}

#[tokio::test]
async fn who_gives_is_told_what_and_where() {
    let listening = Listening::start();
    let (agent, _connection) = listening.agent().await;
    let granting = async {
        let connection = listening.wait_next().await;
        let copy = connection.try_clone().expect("a descriptor");
        (asked(copy, |connection| send(&connection, &about_web(TAKE_OVER), &[])).await.0, connection)
    };
    let (takeover, (bytes, connection)) = tokio::join!(GivingTakeover::of(&agent, "web.shop"), granting);
    assert_eq!(bytes[..6], [1, TAKE_OVER, 0, 0, 0, 1]);
    let mut takeover = takeover.expect("granted");
    let (client, served) = pair();
    let (unknown_client, unknown) = pair();
    send(&connection, &about_web(UNKNOWN), &[unknown.as_fd()]);
    drop(unknown);
    for host in ["host2", ""] {
        send(&connection, &with_text(GIVE, host), &[]);
    }
    send(&connection, &about_web(HANDED), &[served.as_fd()]);
    drop(served);
    for host in ["host2", ""] {
        let incoming = takeover.next().await.expect("it is told");
        let wanted = Give { name: web().prefix, host: host.to_owned(), peer: None };
        assert!(matches!(&incoming, Incoming::Give(give) if *give == wanted), "{incoming:?}");
    }
    assert!(is_closed(&unknown_client));
    let Incoming::Taken(taken) = takeover.next().await.expect("a socket") else { panic!("it was told already") };
    works(&client, taken.socket);
}

#[tokio::test]
async fn one_connection_is_named_by_its_peer() {
    let listening = Listening::start();
    let (agent, _connection) = listening.agent().await;
    let granting = async {
        let connection = listening.wait_next().await;
        let copy = connection.try_clone().expect("a descriptor");
        asked(copy, |connection| send(&connection, &about_web(TAKE_OVER), &[])).await;
        connection
    };
    let (takeover, connection) = tokio::join!(GivingTakeover::of(&agent, "web.shop"), granting);
    let mut message = with_text(GIVE, "host2");
    message[6..8].copy_from_slice(&4660_u16.to_be_bytes());
    message[50..56].copy_from_slice(&[0xff, 0xff, 10, 1, 0, 3]);
    send(&connection, &message, &[]);
    let Incoming::Give(give) = takeover.expect("granted").next().await.expect("it is told") else { panic!("a socket") };
    let address = |text: &str| -> SocketAddr { text.parse().expect("literal") };
    assert_eq!((give.host.as_str(), give.peer), ("host2", Some(address("10.1.0.3:4660"))));
    assert!(give.is_for(address("10.1.0.3:4660")) && give.is_for(address("[::ffff:10.1.0.3]:4660")));
    assert!(!give.is_for(address("10.1.0.3:4661")) && !give.is_for(address("10.1.0.4:4660")));
    assert!(Give { peer: None, ..give }.is_for(address("10.1.0.4:4661")), "all of them");
}

#[tokio::test]
async fn who_does_not_give_hears_nothing_of_it() {
    let listening = Listening::start();
    let (agent, _connection) = listening.agent().await;
    let (mut takeover, connection) = takeover(&listening, &agent).await;
    let (client, served) = pair();
    send(&connection, &about_web(GIVE), &[]);
    send(&connection, &about_web(HANDED), &[served.as_fd()]);
    drop(served);
    works(&client, takeover.next().await.expect("a socket").socket);
}

#[tokio::test]
async fn what_is_too_much_is_closed() {
    let listening = Listening::start();
    let (agent, _connection) = listening.agent().await;
    let (mut takeover, connection) = takeover(&listening, &agent).await;
    let (client, served) = pair();
    let (other_client, other) = pair();
    send(&connection, &about_web(HANDED), &[served.as_fd(), file(b"x").as_fd(), other.as_fd()]);
    drop((served, other));
    let taken = takeover.next().await.expect("a socket");
    assert!(is_closed(&other_client));
    works(&client, taken.socket);
}

#[tokio::test]
async fn who_is_too_late_has_no_socket_and_takes_over_anew() {
    let listening = Listening::start();
    let (agent, _connection) = listening.agent().await;
    let (mut takeover, connection) = takeover(&listening, &agent).await;
    let (client, served) = pair();
    send(&connection, &about_web(HANDED), &[served.as_fd()]);
    drop(served);
    // As the agent does after two seconds.
    rustix::net::shutdown(&connection, Shutdown::Read).expect("connected");
    let late = takeover.next().await.expect_err("too late");
    assert!(matches!(late, Error::AgentDown { .. }) && late.to_string().contains("too late"), "{late}");
    assert!(is_closed(&client));
    drop(connection);

    let (next_client, served) = pair();
    let granting = async {
        let connection = listening.wait_next().await;
        let copy = connection.try_clone().expect("a descriptor");
        asked(copy, |connection| send(&connection, &about_web(TAKE_OVER), &[])).await;
        send(&connection, &about_web(HANDED), &[served.as_fd()]);
        connection
    };
    let (taken, _connection) = tokio::join!(takeover.next(), granting);
    works(&next_client, taken.expect("a socket").socket);
}

#[tokio::test]
async fn an_agent_that_ends_leaves_the_socket_with_its_giver() {
    let listening = Listening::start();
    let (agent, _connection) = listening.agent().await;
    let (mut takeover, connection) = takeover(&listening, &agent).await;
    let (client, served) = pair();
    send(&connection, &about_web(HANDED), &[served.as_fd()]);
    drop(connection);
    assert!(matches!(takeover.next().await, Err(Error::AgentDown { .. })));
    works(&client, served.into());
    assert!(is_closed(&client));
}

#[tokio::test]
async fn a_cancelled_call_loses_no_socket() {
    let listening = Listening::start();
    let (agent, _connection) = listening.agent().await;
    let (mut takeover, connection) = takeover(&listening, &agent).await;
    for _ in 0..3 {
        tokio::select! {
            biased;
            _ = takeover.next() => panic!("nobody gave one"),
            () = tokio::task::yield_now() => {}
        }
    }
    let (client, served) = pair();
    send(&connection, &about_web(HANDED), &[served.as_fd()]);
    works(&client, takeover.next().await.expect("a socket").socket);
}

#[tokio::test]
async fn a_message_without_a_socket_and_data_that_is_too_long_are_refused() {
    let listening = Listening::start();
    let (agent, _connection) = listening.agent().await;
    let (mut first, connection) = takeover(&listening, &agent).await;
    send(&connection, &about_web(HANDED), &[]);
    assert!(matches!(first.next().await, Err(Error::Incompatible { .. })));
    let (mut second, connection) = takeover(&listening, &agent).await;
    let (_client, served) = pair();
    let long = file(b"");
    long.set_len((1 << 20) + 1).expect("memory");
    send(&connection, &about_web(HANDED), &[served.as_fd(), long.as_fd()]);
    let error = second.next().await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::InvalidData);
    assert!(receive(&connection).0.is_empty(), "the agent is not told that it is taken");
}

#[tokio::test]
async fn who_may_not_serve_the_name_may_not_take_it_over() {
    let listening = Listening::start();
    let (agent, _connection) = listening.agent().await;
    let refusing = async {
        let connection = listening.wait_next().await;
        asked(connection, |connection| send(&connection, &refusal(TAKE_OVER, 13, "ask its owner"), &[])).await
    };
    let (takeover, _) = tokio::join!(Takeover::of(&agent, "web.shop"), refusing);
    assert!(matches!(takeover, Err(Error::Refused { errno: 13, .. })));
    assert!(matches!(Takeover::of(&agent, "web").await, Err(Error::Name(_))));
}
