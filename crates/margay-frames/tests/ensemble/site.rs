//! All parts of an ensemble in one process.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use margay_frames::framer::{Framer, Reach};
use margay_frames::protocol::Protocol;
use margay_frames::router::Policy;
use margay_frames::switch::control::{self, Question};
use margay_frames::switch::{self, MemberAt};
use margay_frames::{member, switch::Config};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket, UnixListener};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;

use crate::program::Program;

const LIMIT: Duration = Duration::from_secs(20);

/// Waits until something is so: each look awaits an answer of the switch, or of a program.
pub async fn wait_until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let waiting = async { while !is_so().await {} };
    timeout(LIMIT, waiting).await.unwrap_or_else(|_| panic!("{what}: not within {LIMIT:?}"));
}

/// A switch by its address.
struct ByAddress(SocketAddr);

impl Reach for ByAddress {
    async fn open(&self) -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind("127.0.0.1:0").await?;
        socket.connect(self.0).await?;
        Ok(socket)
    }

    fn name(&self) -> &str {
        "cache.test"
    }
}

struct Member {
    program: Program,
    at: MemberAt,
    framer: JoinHandle<io::Result<member::End>>,
    leave: watch::Sender<bool>,
}

pub struct Site {
    protocol: Protocol,
    members: BTreeMap<String, Member>,
    listed: watch::Sender<Vec<MemberAt>>,
    switch: JoinHandle<()>,
    address: SocketAddr,
    dir: tempfile::TempDir,
    framer: AbortHandle,
    clients: SocketAddr,
}

impl Drop for Site {
    fn drop(&mut self) {
        self.switch.abort();
        self.framer.abort();
    }
}

fn start_switch(
    protocol: Protocol,
    socket: UdpSocket,
    listed: watch::Receiver<Vec<MemberAt>>,
    dir: &Path,
) -> JoinHandle<()> {
    let path = dir.join("switch.sock");
    // There is one after a restart.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(path).expect("bound");
    let config = Config {
        name: "cache.test".to_owned(),
        members: "members.test".to_owned(),
        content: protocol.into(),
        policy: Policy::Ketama,
        window: 384,
        module: None,
    };
    let (sender, commands) = mpsc::channel(1);
    tokio::spawn(async move {
        tokio::select! {
            ended = switch::run(socket, listed, commands, config) => panic!("the switch has ended: {ended:?}"),
            never = control::serve(listener, sender) => match never {},
        }
    })
}

impl Site {
    pub async fn start(names: &[&str]) -> Self {
        Self::start_of(Protocol::Memcached, names).await
    }

    pub async fn start_of(protocol: Protocol, names: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let listed = watch::Sender::new(Vec::new());
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let address = socket.local_addr().expect("bound");
        let framer =
            Framer::bind(protocol, "127.0.0.1:0".parse().expect("literal"), ByAddress(address)).await.expect("a port");
        let clients = framer.address().expect("bound");
        let switch = start_switch(protocol, socket, listed.subscribe(), dir.path());
        let framer = tokio::spawn(framer.run()).abort_handle();
        let mut site = Self { protocol, members: BTreeMap::new(), listed, switch, address, dir, framer, clients };
        for name in names {
            site.add(name).await;
        }
        if !names.is_empty() {
            wait_until("all members answer", async || {
                let shown = site.show().await;
                let all = shown["members"].as_array().cloned().unwrap_or_default();
                all.len() == names.len() && all.iter().all(|one| one["state"] == "up")
            })
            .await;
        }
        site
    }

    pub async fn add(&mut self, name: &str) {
        self.add_of(self.protocol, name).await;
    }

    pub async fn add_of(&mut self, protocol: Protocol, name: &str) {
        let program = Program::start(protocol).await;
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let mut host = [0; 16];
        host[..name.len()].copy_from_slice(name.as_bytes());
        let address = socket.local_addr().expect("bound");
        let at = MemberAt { host, name: name.to_owned(), address, weight: 100 };
        let leave = watch::Sender::new(false);
        let config = member::Config { protocol, to: program.address, label: name.to_owned(), host };
        let framer = tokio::spawn(member::serve(socket, config, leave.subscribe()));
        self.members.insert(name.to_owned(), Member { program, at, framer, leave });
        self.list();
    }

    fn list(&self) {
        self.listed.send_replace(self.members.values().map(|member| member.at.clone()).collect());
    }

    /// Framer and program are gone at once.
    pub fn kill(&mut self, name: &str) {
        let member = self.members.remove(name).expect("there is one");
        member.framer.abort();
        // The list still has it: its flow says first that it is gone.
    }

    /// Another framer is in a member's place at once, before the list or the flow has said anything.
    pub async fn replace(&mut self, name: &str) {
        let member = self.members.get_mut(name).expect("there is one");
        member.framer.abort();
        let ended = (&mut member.framer).await.expect_err("it does not end by itself");
        assert!(ended.is_cancelled(), "{ended}");
        let address = member.at.address;
        // Its connections have the socket until they end.
        let binding = async {
            loop {
                match UdpSocket::bind(address).await {
                    Ok(socket) => return socket,
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        let socket = timeout(LIMIT, binding).await.expect("the address is free");
        let config = member::Config {
            protocol: self.protocol,
            to: member.program.address,
            label: name.to_owned(),
            host: member.at.host,
        };
        member.framer = tokio::spawn(member::serve(socket, config, member.leave.subscribe()));
    }

    pub fn leave(&self, name: &str) {
        self.members[name].leave.send_replace(true);
    }

    pub async fn await_gone(&mut self, name: &str) {
        let member = self.members.remove(name).expect("there is one");
        let ended = timeout(LIMIT, member.framer).await.expect("it leaves").expect("it does not panic");
        assert_eq!(ended.expect("its socket works"), member::End::Left);
        self.list();
    }

    pub fn hold(&self, name: &str) {
        self.members[name].program.hold(true);
    }

    pub fn release(&self, name: &str) {
        self.members[name].program.hold(false);
    }

    pub async fn await_asked(&self, name: &str, count: usize) {
        timeout(LIMIT, self.members[name].program.await_asked(count)).await.expect("it is asked");
    }

    /// Requests about keys that a program was asked so far.
    pub fn asked(&self, name: &str) -> usize {
        self.members[name].program.asked()
    }

    pub fn holders(&self, key: &str) -> Vec<&str> {
        let holders = self.members.iter().filter(|(_, member)| member.program.has(key));
        holders.map(|(name, _)| name.as_str()).collect()
    }

    pub fn put(&self, name: &str, key: &str, value: String) {
        self.members[name].program.put(key, value);
    }

    pub fn count(&self, name: &str) -> usize {
        self.members[name].program.count()
    }

    pub async fn restart_switch(&mut self) {
        self.switch.abort();
        // Its socket is closed with it.
        let ended = (&mut self.switch).await.expect_err("it does not end by itself");
        assert!(ended.is_cancelled(), "{ended}");
        let socket = UdpSocket::bind(self.address).await.expect("the address is free");
        self.switch = start_switch(self.protocol, socket, self.listed.subscribe(), self.dir.path());
    }

    pub async fn show(&self) -> Value {
        self.ask(&Question::Show).await.expect("the switch answers")
    }

    pub async fn drain(&self, name: &str, undo: bool) -> io::Result<Value> {
        let question = Question::Drain { member: name.to_owned(), undo };
        self.ask(&question).await
    }

    /// A file of the test's own.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub async fn load(&self, file: &Path) -> io::Result<Value> {
        let bytes = std::fs::read(file)?;
        self.ask(&Question::Load { file: file.to_str().expect("UTF-8").to_owned(), bytes }).await
    }

    pub async fn unload(&self) -> io::Result<Value> {
        self.ask(&Question::Unload).await
    }

    async fn ask(&self, question: &Question) -> io::Result<Value> {
        let path = self.dir.path().join("switch.sock");
        timeout(LIMIT, control::ask(&path, question)).await.expect("an answer")
    }

    /// A client's bare connection.
    pub async fn connect_bare(&self) -> TcpStream {
        TcpStream::connect(self.clients).await.expect("the framer listens")
    }

    /// A client of a framer of its own.
    pub async fn connect_by(&self, protocol: Protocol) -> Client {
        let listen = "127.0.0.1:0".parse().expect("literal");
        let framer = Framer::bind(protocol, listen, ByAddress(self.address)).await.expect("a port");
        let stream = TcpStream::connect(framer.address().expect("bound")).await.expect("the framer listens");
        tokio::spawn(framer.run());
        Client { stream, heard: Vec::new() }
    }

    /// A client, whose connection has all members that there are.
    pub async fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.clients).await.expect("the framer listens");
        if !self.members.is_empty() {
            wait_until("all members take part", async || {
                let shown = self.show().await;
                let connections = shown["connections"].as_array().cloned().unwrap_or_default();
                let is_whole =
                    |one: &Value| one["members"].as_array().is_some_and(|all| all.len() == self.members.len());
                !connections.is_empty() && connections.iter().all(is_whole)
            })
            .await;
        }
        Client { stream, heard: Vec::new() }
    }
}

/// A client that says lines.
pub struct Client {
    stream: TcpStream,
    heard: Vec<u8>,
}

impl Client {
    pub async fn send(&mut self, text: &str) {
        let sent = timeout(LIMIT, self.stream.write_all(text.as_bytes())).await.expect("the framer reads");
        sent.expect("the framer is there");
    }

    async fn read(&mut self) {
        let mut bytes = vec![0; 65_536];
        let read = timeout(LIMIT, self.stream.read(&mut bytes)).await.expect("an answer").expect("the framer is there");
        assert!(read > 0, "the framer has closed; before it said {}", String::from_utf8_lossy(&self.heard));
        self.heard.extend_from_slice(&bytes[..read]);
    }

    fn take(&mut self, len: usize) -> String {
        let rest = self.heard.split_off(len);
        String::from_utf8(std::mem::replace(&mut self.heard, rest)).expect("ASCII")
    }

    /// The framer has closed, and says nothing more.
    pub async fn hear_end(&mut self) {
        let read = timeout(LIMIT, self.stream.read_to_end(&mut self.heard)).await.expect("the end");
        read.expect("the framer is there");
        assert!(self.heard.is_empty(), "{}", String::from_utf8_lossy(&self.heard));
    }

    /// So many bytes.
    pub async fn hear(&mut self, len: usize) -> String {
        while self.heard.len() < len {
            self.read().await;
        }
        self.take(len)
    }

    pub async fn hear_line(&mut self) -> String {
        loop {
            if let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
                return self.take(end + 1);
            }
            self.read().await;
        }
    }

    /// Lines up to `END`, or an error.
    pub async fn hear_values(&mut self) -> String {
        let mut all = String::new();
        while !all.ends_with("END\r\n") && !all.contains("ERROR") {
            all += &self.hear_line().await;
        }
        all
    }

    pub async fn say(&mut self, text: &str) -> String {
        self.send(text).await;
        self.hear_line().await
    }

    pub async fn get(&mut self, key: &str) -> String {
        self.send(&format!("get {key}\r\n")).await;
        self.hear_values().await
    }
}
