//! An agent for tests: the format of the program socket, and names that stand for sockets of the loopback.

use std::collections::{HashMap, HashSet};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use margay_core::Ranges;
use margay_sdk::{Agent, Name, Prefix, ServiceId};
use rustix::cmsg_space;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown,
    SocketAddrUnix, SocketType,
};
use tempfile::TempDir;

pub const NAME: u8 = 1;
pub const RESOLVE: u8 = 2;
pub const BIND: u8 = 3;
pub const SOURCE: u8 = 4;
pub const PEER: u8 = 5;
pub const EVENTS: u8 = 6;
pub const EVENT: u8 = 7;
pub const RANGES: u8 = 8;
pub const INSTANCES: u8 = 13;
pub const INSTANCE: u8 = 14;
pub const LOAD: u8 = 15;

/// What the agent knows, and how it is to misbehave.
pub struct World {
    services: Vec<(Prefix, u8, u16)>,
    sources: HashMap<(u8, u16), ServiceId>,
    /// Kinds that were asked, in order.
    pub asked: Vec<u8>,
    /// Loads that were reported, with the ends of their connections that are the agent's.
    pub loads: Vec<(Prefix, u16, u64)>,
    /// Written names that came with BIND.
    pub written: Vec<String>,
    /// Kinds that are refused.
    pub refused: HashMap<u8, (u16, &'static str)>,
    /// Ports of peers that did not come by way of Margay.
    pub past: HashSet<u16>,
    /// Kinds that are not answered until they are taken out here.
    pub silent: HashSet<u8>,
    /// What is sent instead of a reply.
    pub garbage: Option<Vec<u8>>,
    /// Refuses connections, with this text.
    pub full: Option<&'static str>,
    /// The addresses that it gives.
    pub v6: Ipv6Addr,
    pub v4: Ipv4Addr,
    /// A port at which nobody listens: that of names which nobody serves.
    nobody: u16,
    subscribers: Vec<Arc<OwnedFd>>,
    connections: Vec<Arc<OwnedFd>>,
    is_down: bool,
}

type Shared = Arc<(Mutex<World>, Condvar)>;

pub struct FakeAgent {
    dir: TempDir,
    shared: Shared,
    listening: Option<(Arc<OwnedFd>, JoinHandle<()>)>,
}

impl FakeAgent {
    pub fn start() -> Self {
        // Bound and not listening, so that nobody else gets the port.
        let nobody = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port();
        let world = World {
            services: Vec::new(),
            sources: HashMap::new(),
            asked: Vec::new(),
            loads: Vec::new(),
            written: Vec::new(),
            refused: HashMap::new(),
            past: HashSet::new(),
            silent: HashSet::new(),
            garbage: None,
            full: None,
            v6: Ipv6Addr::LOCALHOST,
            v4: Ipv4Addr::LOCALHOST,
            nobody,
            subscribers: Vec::new(),
            connections: Vec::new(),
            is_down: false,
        };
        let shared = Arc::new((Mutex::new(world), Condvar::new()));
        let mut agent = Self { dir: tempfile::tempdir().expect("a directory"), shared, listening: None };
        agent.listen();
        agent
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("programs.sock")
    }

    pub async fn agent(&self) -> Agent {
        Agent::connect_to(&self.path()).await.expect("the agent listens")
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.shared.0.lock().expect("no test panicked in here")
    }

    /// The port of what was served last.
    pub fn served_port(&self) -> u16 {
        self.world().services.last().expect("something is served").2
    }

    /// How often a kind was asked.
    pub fn asked(&self, kind: u8) -> usize {
        self.world().asked.iter().filter(|asked| **asked == kind).count()
    }

    /// Waits until a kind has been asked so often.
    pub async fn wait_asked(&self, kind: u8, times: usize) {
        let asked = async {
            while self.asked(kind) < times {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), asked).await.expect("it is asked");
    }

    /// How many connections the library has open.
    pub fn open_connections(&self) -> usize {
        let is_open = |connection: &&Arc<OwnedFd>| {
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            !matches!(rustix::net::recv(&***connection, &mut [0; 1], flags), Ok((0, _)))
        };
        self.world().connections.iter().filter(is_open).count()
    }

    /// Answers what it did not answer.
    pub fn speak(&self) {
        self.world().silent.clear();
        self.shared.1.notify_all();
    }

    pub fn event(&self, line: &str) {
        for subscriber in &self.world().subscribers {
            let mut bytes = reply_head(EVENT, 0);
            bytes.extend(line.as_bytes());
            send(subscriber, &bytes);
        }
    }

    /// Tells whoever follows a name of an instance at a port of the loopback; without a line, that the list is
    /// complete.
    pub fn instance(&self, line: &str, port: u16) {
        for subscriber in &self.world().subscribers {
            let mut bytes = reply_head(INSTANCE, 0);
            bytes[6..8].copy_from_slice(&port.to_be_bytes());
            bytes[56..60].copy_from_slice(&Ipv4Addr::LOCALHOST.octets());
            bytes.extend(line.as_bytes());
            send(subscriber, &bytes);
        }
    }

    /// As `kill -9` ends an agent: its socket's file stays.
    pub fn kill(&mut self) {
        let Some((listening, accepting)) = self.listening.take() else { return };
        let mut world = self.world();
        world.is_down = true;
        world.subscribers.clear();
        for connection in world.connections.drain(..) {
            // It may be gone already.
            let _ = rustix::net::shutdown(&*connection, Shutdown::Both);
        }
        drop(world);
        rustix::net::shutdown(&*listening, Shutdown::Both).expect("it listens");
        // What was queued there shall not be taken for the next agent's.
        accepting.join().expect("no panic");
        self.speak();
    }

    /// Another agent in its place, which knows what this one knew.
    pub fn listen(&mut self) {
        let _ = std::fs::remove_file(self.path());
        let listening = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
        rustix::net::bind(&listening, &SocketAddrUnix::new(self.path()).expect("short")).expect("bound");
        rustix::net::listen(&listening, 16).expect("listens");
        self.world().is_down = false;
        let listening = Arc::new(listening);
        let shared = Arc::clone(&self.shared);
        let accepted_at = Arc::clone(&listening);
        let accepting = thread::spawn(move || {
            while let Ok(connection) = rustix::net::accept(&*accepted_at) {
                let connection = Arc::new(connection);
                let mut world = shared.0.lock().expect("unpoisoned");
                if world.is_down {
                    // It came before the end, and was noticed after it.
                    break;
                }
                if let Some(text) = world.full {
                    send(&connection, &[reply_head(0, 87), text.as_bytes().to_vec()].concat());
                    continue;
                }
                world.connections.push(Arc::clone(&connection));
                drop(world);
                let shared = Arc::clone(&shared);
                thread::spawn(move || while serve(&shared, &connection) {});
            }
        });
        self.listening = Some((listening, accepting));
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        self.kill();
    }
}

/// One request. Whether there may be another.
fn serve(shared: &Shared, connection: &Arc<OwnedFd>) -> bool {
    let mut bytes = [0; 512];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        rustix::net::recvmsg(&**connection, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
    let length = match received {
        Ok(message) if message.bytes > 0 => message.bytes,
        _ => return false,
    };
    let socket = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let (lock, spoken) = &**shared;
    let mut world = lock.lock().expect("unpoisoned");
    world.asked.push(bytes[1]);
    while world.silent.contains(&bytes[1]) {
        world = spoken.wait(world).expect("unpoisoned");
    }
    if world.is_down {
        return false;
    }
    let answer = match (&world.garbage, world.refused.get(&bytes[1])) {
        (Some(garbage), _) => garbage.clone(),
        (None, Some((errno, text))) => [reply_head(bytes[1], *errno), text.as_bytes().to_vec()].concat(),
        (None, None) => world.answer(&bytes[..length], connection, socket.as_ref()),
    };
    if [EVENTS, INSTANCES].contains(&bytes[1]) {
        world.subscribers.push(Arc::clone(connection));
    }
    drop(world);
    // Whoever has the answer may close the socket, and see what follows from that.
    drop(socket);
    send(connection, &answer);
    true
}

fn send(connection: &OwnedFd, bytes: &[u8]) {
    // Whoever asked may be gone.
    let control = &mut SendAncillaryBuffer::default();
    let _ = rustix::net::sendmsg(connection, &[IoSlice::new(bytes)], control, SendFlags::NOSIGNAL);
}

pub fn reply_head(kind: u8, errno: u16) -> Vec<u8> {
    let mut bytes = vec![1, kind];
    bytes.extend(errno.to_be_bytes());
    bytes.resize(60, 0);
    bytes
}

fn port_of(socket: Option<&OwnedFd>) -> u16 {
    let address = rustix::net::getsockname(socket.expect("BIND comes with a socket")).expect("a socket");
    SocketAddr::try_from(address).expect("of the internet").port()
}

impl World {
    fn answer(&mut self, request: &[u8], connection: &OwnedFd, socket: Option<&OwnedFd>) -> Vec<u8> {
        assert_eq!((request[0], request[3]), (1, 0));
        let (kind, protocol) = (request[1], request[2]);
        let number = |at: usize| u16::from_be_bytes([request[at], request[at + 1]]);
        let (port, bits) = (number(4), number(6));
        let id = ServiceId(request[8..40].try_into().expect("32 bytes"));
        let text = str::from_utf8(&request[56..]).expect("UTF-8");
        let mut reply = reply_head(kind, 0);
        match kind {
            NAME => match text.parse::<Name>() {
                Ok(name) => {
                    reply[4..6].copy_from_slice(&name.prefix().bits.to_be_bytes());
                    reply[8..40].copy_from_slice(&name.service_id().0);
                    reply.extend(name.written().as_bytes());
                }
                Err(error) => return [reply_head(kind, 22), error.to_string().into_bytes()].concat(),
            },
            RESOLVE => {
                let serving = self.services.iter().filter(|(prefix, by, _)| *by == protocol && prefix.contains(&id));
                let port = serving.max_by_key(|(prefix, ..)| prefix.bits).map_or(self.nobody, |(.., port)| *port);
                reply[6..8].copy_from_slice(&port.to_be_bytes());
                reply[40..56].copy_from_slice(&self.v6.octets());
                reply[56..60].copy_from_slice(&self.v4.octets());
            }
            BIND => {
                self.services.push((Prefix::new(id, bits), protocol, port_of(socket)));
                self.written.push(text.to_owned());
            }
            SOURCE => {
                assert_eq!(port, port_of(socket));
                let own = ServiceId(std::array::from_fn(|at| if at < 12 { 0 } else { port.to_be_bytes()[at % 2] }));
                let id = if id == ServiceId::default() { own } else { id };
                self.sources.insert((protocol, port), id);
                reply[8..40].copy_from_slice(&id.0);
            }
            PEER if self.past.contains(&port) => return reply_head(kind, 107),
            PEER => {
                assert!(socket.is_some());
                // Whoever said nothing goes by the name of its host.
                let host = ServiceId(std::array::from_fn(|at| if at < 12 { 0 } else { 0x55 }));
                let id = self.sources.get(&(protocol, port)).copied().unwrap_or(host);
                reply[8..40].copy_from_slice(&id.0);
            }
            RANGES => {
                reply[40..56].copy_from_slice(&Ranges::USUAL.host_v6().octets());
                reply[56..60].copy_from_slice(&Ranges::USUAL.host_v4().octets());
            }
            LOAD => {
                let inode = rustix::fs::fstat(connection).expect("a socket").st_ino;
                self.loads.push((Prefix::new(id, bits), port, inode));
            }
            EVENTS | INSTANCES => {}
            other => panic!("a request of kind {other}"),
        }
        reply
    }
}
