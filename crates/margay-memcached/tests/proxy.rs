//! The proxy between clients and servers, with an agent that only knows addresses.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use margay_core::name::Name;
use margay_memcached::partition::Partitions;
use margay_memcached::proxy::{Listeners, Proxy};
use margay_memcached::server::Servers;
use margay_sdk::Agent;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv, send, socket,
};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::sync::Mutex;
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(20);
const COUNT: u32 = 4;

fn service() -> Name {
    "cache.shop".parse().expect("literal")
}

fn partitions() -> Partitions {
    Partitions::new(&service(), COUNT).expect("four")
}

/// Each partition has an address of its own.
fn address_of(index: u16) -> Ipv4Addr {
    Ipv4Addr::new(127, 0, 66, u8::try_from(index + 1).expect("few"))
}

/// An agent that knows the service and the addresses of its partitions, and refuses everything else.
fn agent(dir: &Path) -> PathBuf {
    let path = dir.join("programs.sock");
    let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    bind(&listener, &SocketAddrUnix::new(&path).expect("short")).expect("bound");
    listen(&listener, 16).expect("listening");
    std::thread::spawn(move || {
        while let Ok(stream) = accept(&listener) {
            std::thread::spawn(move || answer_all(&stream));
        }
    });
    path
}

fn answer_all(stream: &OwnedFd) {
    let mut request = [0; 512];
    while let Ok((length, _)) = recv(stream, &mut request[..], RecvFlags::empty()) {
        let Some(request) = request.get(..length).filter(|request| request.len() >= 56) else { return };
        let mut reply = vec![0; 60];
        (reply[0], reply[1]) = (1, request[1]);
        let prefix = service().prefix();
        match request[1] {
            1 if &request[56..] == b"cache.shop" => {
                reply[4..6].copy_from_slice(&prefix.bits.to_be_bytes());
                reply[8..40].copy_from_slice(&prefix.id.0);
            }
            2 => {
                let id: [u8; 32] = request[8..40].try_into().expect("32 bytes");
                let index = margay_core::name::ServiceId(id).partition(2);
                assert_eq!(u16::from_be_bytes([request[6], request[7]]), 98, "the prefix of a partition");
                reply[6..8].copy_from_slice(&54_324_u16.to_be_bytes());
                reply[56..60].copy_from_slice(&address_of(index).octets());
            }
            _ => {
                reply[2..4].copy_from_slice(&22_u16.to_be_bytes());
                reply.extend_from_slice(b"no such name");
            }
        }
        if send(stream, &reply, SendFlags::NOSIGNAL).is_err() {
            return;
        }
    }
}

/// A memcached in a few lines, which knows what it was asked for.
#[derive(Clone, Default)]
struct Fake {
    items: Arc<std::sync::Mutex<HashMap<Vec<u8>, Vec<u8>>>>,
    /// Connections that it ends in the middle of a request.
    rude: Arc<std::sync::Mutex<usize>>,
}

impl Fake {
    fn listen(&self, listener: TcpListener) {
        let fake = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let fake = fake.clone();
                tokio::spawn(async move { fake.serve(stream).await });
            }
        });
    }

    async fn serve(&self, stream: TcpStream) -> Option<()> {
        let (reader, mut writer) = stream.into_split();
        let mut reader = BufReader::new(reader);
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).await.ok().filter(|length| *length > 0)?;
            let is_rude = {
                let mut rude = self.rude.lock().expect("whole");
                let is_rude = *rude > 0;
                *rude = rude.saturating_sub(1);
                is_rude
            };
            if is_rude {
                return None;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            let mut answer = Vec::new();
            match words[0] {
                "set" => {
                    let mut value = vec![0; words[4].parse::<usize>().ok()? + 2];
                    reader.read_exact(&mut value).await.ok()?;
                    self.items.lock().expect("whole").insert(words[1].into(), value);
                    answer.extend_from_slice(b"STORED\r\n");
                }
                "get" => {
                    let items = self.items.lock().expect("whole");
                    // Last first: the order is the proxy's affair.
                    for key in words[1..].iter().rev() {
                        if let Some(value) = items.get(key.as_bytes()) {
                            answer.extend(format!("VALUE {key} 0 {}\r\n", value.len() - 2).into_bytes());
                            answer.extend_from_slice(value);
                        }
                    }
                    answer.extend_from_slice(b"END\r\n");
                }
                _ => answer.extend_from_slice(b"1\r\n"),
            }
            writer.write_all(&answer).await.ok()?;
        }
    }
}

async fn proxy(dir: &Path, port: u16) -> SocketAddr {
    let agent = Agent::connect_to(&agent(dir)).await.expect("it listens");
    let servers = Servers::new(partitions(), agent, port);
    let listeners = Listeners::bind("127.0.0.1:0".parse().expect("literal")).expect("free");
    let proxy = Proxy::new(listeners, servers).expect("a runtime");
    let address = proxy.address().expect("bound");
    tokio::spawn(proxy.run());
    address
}

/// Says it, and hears until the answer ends like this.
async fn say(stream: &mut TcpStream, text: &[u8], end: &str) -> String {
    stream.write_all(text).await.expect("written");
    let mut heard = Vec::new();
    let hear = async {
        while !heard.ends_with(end.as_bytes()) {
            assert_ne!(stream.read_buf(&mut heard).await.expect("read"), 0, "{}", String::from_utf8_lossy(&heard));
        }
    };
    if timeout(LIMIT, hear).await.is_err() {
        panic!("no {end:?} in {:?}", String::from_utf8_lossy(&heard));
    }
    String::from_utf8(heard).expect("text")
}

/// Four servers of one partition each, at a port that is free on all of their addresses.
/// All tests use the same addresses: whoever looks for a port that is free at each of them does so alone.
static PORTS: Mutex<()> = Mutex::const_new(());

/// Sockets of all partitions at one port. Clients of other tests may have some of a port's.
async fn listeners() -> (u16, Vec<TcpListener>) {
    let _alone = PORTS.lock().await;
    loop {
        let first = TcpListener::bind((address_of(0), 0)).await.expect("a port");
        let port = first.local_addr().expect("bound").port();
        let mut all = vec![first];
        for index in 1..partitions().count() {
            let Ok(next) = TcpListener::bind((address_of(index), port)).await else { break };
            all.push(next);
        }
        if all.len() == usize::from(partitions().count()) {
            return (port, all);
        }
    }
}

async fn fakes() -> (u16, Vec<Fake>) {
    let (port, listeners) = listeners().await;
    let start = |listener| {
        let fake = Fake::default();
        fake.listen(listener);
        fake
    };
    (port, listeners.into_iter().map(start).collect())
}

#[tokio::test]
async fn each_key_goes_to_its_partition_and_many_are_gathered() {
    let dir = tempfile::tempdir().expect("a directory");
    let (port, fakes) = fakes().await;
    let mut client = TcpStream::connect(proxy(dir.path(), port).await).await.expect("connected");
    let keys: Vec<String> = (0..40).map(|number| format!("key{number}")).collect();
    for key in &keys {
        let stored = say(&mut client, format!("set {key} 0 0 8\r\n{key:>8}\r\n").as_bytes(), "\r\n").await;
        assert_eq!(stored, "STORED\r\n");
    }
    for (index, fake) in fakes.iter().enumerate() {
        let items = fake.items.lock().expect("whole");
        assert!(!items.is_empty());
        assert!(items.keys().all(|key| usize::from(partitions().index_of(key)) == index), "{items:?}");
    }
    let answer = say(&mut client, format!("get {} missing\r\n", keys.join(" ")).as_bytes(), "END\r\n").await;
    let wanted: String = keys.iter().map(|key| format!("VALUE {key} 0 8\r\n{key:>8}\r\n")).collect();
    assert_eq!(answer, format!("{wanted}END\r\n"));

    assert!(say(&mut client, b"version\r\n", "\r\n").await.starts_with("VERSION "));
    assert!(say(&mut client, b"stats\r\n", "\r\n").await.contains("stats is not supported"));
    assert_eq!(say(&mut client, b"verbosity 1\r\n", "\r\n").await, "OK\r\n");
    assert_eq!(say(&mut client, b"set key0 0 0 2 noreply\r\nab\r\nincr key0 1\r\n", "\r\n").await, "1\r\n");
    assert_eq!(say(&mut client, b"set key0 0 0 2\r\nabc\r\n", "\r\n").await, "CLIENT_ERROR bad data chunk\r\n");
    client.write_all(b"quit\r\n").await.expect("written");
    assert_eq!(client.read(&mut [0]).await.expect("the end"), 0);
}

#[tokio::test]
async fn what_may_be_repeated_survives_a_server_that_breaks_off() {
    let dir = tempfile::tempdir().expect("a directory");
    let (port, fakes) = fakes().await;
    let mut client = TcpStream::connect(proxy(dir.path(), port).await).await.expect("connected");
    let rude = &fakes[usize::from(partitions().index_of(b"key0"))].rude;
    *rude.lock().expect("whole") = 2;
    assert_eq!(say(&mut client, b"set key0 0 0 2\r\nab\r\n", "\r\n").await, "STORED\r\n");
    *rude.lock().expect("whole") = 1;
    let answer = say(&mut client, b"incr key0 1\r\n", "\r\n").await;
    assert!(answer.starts_with("SERVER_ERROR partition") && answer.contains("it may be done, or not"), "{answer}");
    assert_eq!(say(&mut client, b"incr key0 1\r\n", "\r\n").await, "1\r\n");
}

/// One datagram there, and all that come back for it, put together.
async fn ask_by_datagram(socket: &UdpSocket, id: u16, text: &[u8]) -> String {
    let request = [&id.to_be_bytes()[..], &[0, 0, 0, 1, 0, 0], text].concat();
    socket.send(&request).await.expect("sent");
    let mut pieces: HashMap<u16, Vec<u8>> = HashMap::new();
    let mut buffer = [0; 2000];
    loop {
        let length = timeout(LIMIT, socket.recv(&mut buffer)).await.expect("in time").expect("received");
        let number = |at: usize| u16::from_be_bytes([buffer[at], buffer[at + 1]]);
        assert_eq!(number(0), id);
        assert!(length <= 1400);
        pieces.insert(number(2), buffer[8..length].to_vec());
        if pieces.len() == usize::from(number(4)) {
            let whole: Vec<u8> = (0..number(4)).flat_map(|at| pieces[&at].clone()).collect();
            return String::from_utf8(whole).expect("text");
        }
    }
}

#[tokio::test]
async fn datagrams_are_answered_by_as_many_as_it_takes() {
    let dir = tempfile::tempdir().expect("a directory");
    let (port, _fakes) = fakes().await;
    let address = proxy(dir.path(), port).await;
    let mut client = TcpStream::connect(address).await.expect("connected");
    let value = "x".repeat(5000);
    assert_eq!(say(&mut client, format!("set big 0 0 5000\r\n{value}\r\n").as_bytes(), "\r\n").await, "STORED\r\n");
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("free");
    socket.connect(address).await.expect("connected");
    let answer = ask_by_datagram(&socket, 77, b"get big\r\n").await;
    assert_eq!(answer, format!("VALUE big 0 5000\r\n{value}\r\nEND\r\n"));
    assert_eq!(ask_by_datagram(&socket, 78, b"set small 0 0 1\r\na\r\n").await, "STORED\r\n");
    // A datagram that asks for far more than it has bytes itself.
    let many = b"get big\r\n".repeat(1000);
    let answer = ask_by_datagram(&socket, 80, &many).await;
    assert_eq!(answer, "SERVER_ERROR the answer is too large for UDP; use TCP\r\n");
    // Nonsense is no end of the proxy.
    socket.send(b"abc").await.expect("sent");
    socket.send(&[0, 9, 0, 0, 0, 1, 0, 0, b'g']).await.expect("sent");
    assert_eq!(ask_by_datagram(&socket, 79, b"get small\r\n").await, "VALUE small 0 1\r\na\r\nEND\r\n");
}

#[tokio::test]
async fn nobody_at_a_partition_is_an_error_and_not_a_silence() {
    let dir = tempfile::tempdir().expect("a directory");
    // Bound, and nobody listens.
    let nobody = TcpSocket::new_v4().expect("a socket");
    nobody.bind((address_of(0), 0).into()).expect("a port");
    let port = nobody.local_addr().expect("bound").port();
    let mut client = TcpStream::connect(proxy(dir.path(), port).await).await.expect("connected");
    let answer = say(&mut client, b"get key0 key1 key2 key3\r\n", "\r\n").await;
    assert!(answer.starts_with("SERVER_ERROR partition") && answer.contains("nobody answers at 127.0.66."), "{answer}");
}

/// Ends with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn real_servers_and_an_unmodified_client() {
    let alone = PORTS.lock().await;
    let port = TcpListener::bind((address_of(0), 0)).await.expect("free").local_addr().expect("bound").port();
    let mut servers = Vec::new();
    for index in 0..partitions().count() {
        let (address, port) = (address_of(index).to_string(), port.to_string());
        let words = ["-u", "root", "-l", &address, "-p", &port, "-U", "0", "-m", "8", "-t", "1"];
        match Command::new("memcached").args(words).stderr(Stdio::null()).spawn() {
            Ok(server) => servers.push(Ended(server)),
            Err(error) => return eprintln!("memcached is not installed: {error}"),
        }
    }
    for index in 0..partitions().count() {
        let up = async {
            while TcpStream::connect((address_of(index), port)).await.is_err() {
                tokio::task::yield_now().await
            }
        };
        timeout(LIMIT, up).await.expect("memcached listens");
    }
    drop(alone);
    let dir = tempfile::tempdir().expect("a directory");
    let address = proxy(dir.path(), port).await;
    let mut client = TcpStream::connect(address).await.expect("connected");
    for number in 0..20 {
        let stored = say(&mut client, format!("set n{number} 3 0 1\r\n5\r\n").as_bytes(), "\r\n").await;
        assert_eq!(stored, "STORED\r\n");
        assert_eq!(
            say(&mut client, format!("incr n{number} {number}\r\n").as_bytes(), "\r\n").await,
            format!("{}\r\n", 5 + number)
        );
    }
    assert_eq!(say(&mut client, b"add n0 0 0 1\r\n1\r\n", "\r\n").await, "NOT_STORED\r\n");
    assert_eq!(say(&mut client, b"append n0 0 0 1\r\n1\r\n", "\r\n").await, "STORED\r\n");
    let gets = say(&mut client, b"gets n0\r\n", "END\r\n").await;
    let unique = gets.lines().next().and_then(|line| line.rsplit(' ').next()).expect("a number").to_owned();
    assert_eq!(say(&mut client, format!("cas n0 0 0 2 {unique}\r\nok\r\n").as_bytes(), "\r\n").await, "STORED\r\n");
    assert_eq!(say(&mut client, b"delete n0\r\n", "\r\n").await, "DELETED\r\n");
    assert_eq!(say(&mut client, b"touch n0 9\r\n", "\r\n").await, "NOT_FOUND\r\n");
    let large = "y".repeat(1_000_000);
    let stored = say(&mut client, format!("set large 0 0 1000000\r\n{large}\r\n").as_bytes(), "\r\n").await;
    assert_eq!(stored, "STORED\r\n");
    let wanted = format!("VALUE large 0 1000000\r\n{large}\r\nVALUE n1 3 1\r\n6\r\nEND\r\n");
    assert!(say(&mut client, b"get large n1\r\n", "END\r\n").await == wanted);

    // libmemcached's own program, if it is there.
    let words = [format!("--servers={address}"), "n1".to_owned()];
    if let Ok(output) =
        tokio::task::spawn_blocking(move || Command::new("memccat").args(words).output()).await.expect("run")
    {
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "6", "{output:?}");
    }
}
