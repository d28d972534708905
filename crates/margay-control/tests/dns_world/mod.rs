//! What a DNS responder stands on, and somebody who asks.

use std::collections::HashMap;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::{Name, RecordType};
use margay_control::dns::channel::{self, Ended};
use margay_control::dns::{Answers, Directory, DnsError, Responder, ResponderCounters, bind};
use margay_control::lease::Leases;
use margay_control::store::{Store, StoredLease};
use margay_control::{Clock, SalControl, StateDir};
use margay_core::certificate::{Revocation, TrustAnchor};
use margay_core::give_up::GiveUpAfter;
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::{self, Prefix, ServiceId};
use margay_core::succession::Succession;
use margay_core::table::{Rule, RuleId, TableError};
use margay_core::{AssociationSetup, Ranges};
use proptest::collection::vec;
use proptest::prelude::{Strategy, any};
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use tokio::net::{UdpSocket, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Long enough for any machine; a test that waits for it has failed.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Default)]
pub struct Recorder(Mutex<HashMap<IpAddr, ServiceId>>);

impl Recorder {
    pub fn bound(&self, address: IpAddr) -> Option<ServiceId> {
        self.0.lock().expect("no panic").get(&address).copied()
    }
}

impl SalControl for Recorder {
    fn install_association(&self, _setup: AssociationSetup) {}
    fn add_trust_anchor(&self, _anchor: TrustAnchor) {}
    fn revoke(&self, _: Revocation) {}
    fn revoke_key(&self, _: KeyRevocation) {}
    fn succeed(&self, _: &Succession) {}
    fn set_membership(&self, _chain: Vec<u8>) {}
    fn set_own_terms(&self, _: Prefix, _: Option<GiveUpAfter>) {}

    fn set_service_certificate(&self, _prefix: Prefix, _chain: Vec<u8>) {}
    fn add_rule(&self, _prefix: Prefix, _rule: Rule) -> Result<RuleId, TableError> {
        Err(TableError { limit: 0 })
    }
    fn remove_rule(&self, _id: RuleId) -> bool {
        false
    }
    fn bind_name(&self, address: IpAddr, service: ServiceId) {
        self.0.lock().expect("no panic").insert(address, service);
    }
    fn unbind_name(&self, address: IpAddr) {
        self.0.lock().expect("no panic").remove(&address);
    }
}

#[derive(Default)]
pub struct Plain(Mutex<HashMap<String, Vec<IpAddr>>>, Mutex<Option<String>>);

impl Plain {
    pub fn set(&self, name: &str, addresses: Vec<IpAddr>) {
        self.0.lock().expect("no panic").insert(name.to_owned(), addresses);
    }

    /// No other name exists.
    pub fn only(&self, name: &str) {
        *self.1.lock().expect("no panic") = Some(name.to_owned());
    }
}

impl Directory for Plain {
    fn fallback<'a>(&'a self, name: &'a name::Name) -> Pin<Box<dyn Future<Output = Vec<IpAddr>> + Send + 'a>> {
        let found = self.0.lock().expect("no panic").get(name.written()).cloned().unwrap_or_default();
        Box::pin(std::future::ready(found))
    }

    fn exists<'a>(&'a self, name: &'a name::Name) -> Pin<Box<dyn Future<Output = bool> + Send + 'a>> {
        let only = self.1.lock().expect("no panic");
        Box::pin(std::future::ready(only.as_deref().is_none_or(|only| only == name.written())))
    }
}

/// An agent at the other end of a responder's stream.
pub struct Agent {
    serving: JoinHandle<()>,
    attached: JoinHandle<Ended>,
    pub counters: watch::Receiver<ResponderCounters>,
}

impl Agent {
    pub fn start(responder: &Arc<Responder>, answers: &Arc<Answers>) -> Self {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let attached = tokio::spawn({
            let responder = Arc::clone(responder);
            async move { responder.attach(theirs).await }
        });
        let (counted, counters) = watch::channel(ResponderCounters::default());
        let answers = Arc::clone(answers);
        let serving = tokio::spawn(async move {
            channel::serve(ours, &answers, &counted).await.expect("good frames");
        });
        Self { serving, attached, counters }
    }

    /// As when it is killed.
    pub async fn kill(self) -> Ended {
        self.serving.abort();
        self.attached.await.expect("no panic")
    }
}

pub struct World {
    pub responder: Arc<Responder>,
    pub agent: Agent,
    pub answers: Arc<Answers>,
    pub leases: Arc<Leases>,
    pub sal: Arc<Recorder>,
    pub directory: Arc<Plain>,
    pub now_s: Arc<AtomicU64>,
    pub client: UdpSocket,
    _base: tempfile::TempDir,
}

/// A responder that hands everything of no zone to `servers`.
pub async fn responder(listen: SocketAddr, zone: &str, servers: &[SocketAddr]) -> Result<Responder, DnsError> {
    let servers = servers.to_vec();
    Responder::start(
        bind(listen).await?,
        zone,
        Ranges::USUAL,
        Box::new(move || servers.clone()),
        Box::new(|_, _| Some(0)),
    )
}

impl World {
    pub async fn start() -> Self {
        Self::start_with(&[], &[]).await
    }

    /// On a host that has leased these, and asked these servers before.
    pub async fn start_with(leased: &[StoredLease], servers: &[SocketAddr]) -> Self {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let store = Arc::new(Store::open(&dir).expect("opened"));
        store.write_leases(leased, &[]).expect("written");
        let (sal, directory) = (Arc::new(Recorder::default()), Arc::new(Plain::default()));
        let now_s = Arc::new(AtomicU64::new(1_000_000));
        let read = Arc::clone(&now_s);
        let clock = Clock::from_fn(move || read.load(Ordering::SeqCst));
        let control: Arc<dyn SalControl> = Arc::<Recorder>::clone(&sal);
        let leases = Leases::open(store, control, clock, Ranges::USUAL).expect("readable");
        let plain: Arc<dyn Directory> = Arc::<Plain>::clone(&directory);
        let listen: SocketAddr = "127.0.0.1:0".parse().expect("literal");
        let answers = Answers::new("sal.internal", listen.ip(), Arc::clone(&leases), plain).expect("a zone");
        let responder = Arc::new(responder(listen, "sal.internal", servers).await.expect("started"));
        let agent = Agent::start(&responder, &answers);
        let client = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        Self { responder, agent, answers, leases, sal, directory, now_s, client, _base: base }
    }

    pub async fn ask(&self, name: &str, kind: RecordType) -> Message {
        self.exchange(&wire(&question(Name::from_ascii(name).expect("a name"), kind))).await
    }

    pub async fn exchange(&self, bytes: &[u8]) -> Message {
        Message::from_vec(&self.exchange_bytes(bytes).await).expect("readable")
    }

    pub async fn exchange_bytes(&self, bytes: &[u8]) -> Vec<u8> {
        self.client.send_to(bytes, self.responder.local_address()).await.expect("sent");
        let answer = self.receive().await;
        assert_eq!(answer[..2], bytes[..2], "an answer to the question");
        answer
    }

    pub async fn receive(&self) -> Vec<u8> {
        let mut answer = vec![0; 65535];
        let received = tokio::time::timeout(PATIENCE, self.client.recv_from(&mut answer)).await;
        let (len, from) = received.expect("an answer").expect("received");
        assert_eq!(from, self.responder.local_address());
        answer.truncate(len);
        answer
    }
}

pub fn id_of(name: &str) -> ServiceId {
    name.parse::<name::Name>().expect("a name").service_id()
}

pub fn question(name: Name, kind: RecordType) -> Message {
    let mut message = Message::new(0x1234, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name, kind));
    message
}

pub fn wire(message: &Message) -> Vec<u8> {
    message.to_vec().expect("encodable")
}

/// Random bytes, bytes behind a good header, and good questions with some bytes changed or cut.
pub fn garbage(runner: &mut TestRunner, good: &[u8], count: usize) -> Vec<Vec<u8>> {
    let noise = vec(any::<u8>(), 0..600);
    let edits = vec((0..good.len(), any::<u8>()), 1..6);
    let all = (noise, edits, 0..good.len() + 1, 0..4_u8);
    let case = all.prop_map(|(noise, edits, cut, shape)| match shape {
        0 => noise,
        1 => [&good[..12.min(good.len())], &noise].concat(),
        _ => {
            let mut bytes = good.to_vec();
            for (at, value) in edits {
                bytes[at] = value;
            }
            if shape == 3 {
                bytes.truncate(cut);
            }
            bytes
        }
    });
    (0..count).map(|_| case.new_tree(runner).expect("a case").current()).collect()
}
