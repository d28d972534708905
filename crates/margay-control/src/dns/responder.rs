//! The responder's process: sockets that programs ask, the agent that knows the zone, servers that know everything
//! else.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hickory_proto::op::{OpCode, Query, ResponseCode};
use hickory_proto::rr::RecordType;
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};
use margay_core::Ranges;
use tokio::net::{TcpListener, UdpSocket, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout_at};

use super::channel::{AgentChannel, Ended};
use super::memory::Memory;
use super::transport::{self, Askers, UserOf};
use super::upstream::{Forwarded, Servers, Upstreams};
use super::zone::{Place, Zones};
use super::{Carrier, DnsError, HEADER, Questioner, ResponderCounters};

/// So long an agent may think, or be away, before a name that was asked before has its last answer.
const THINKS: Duration = Duration::from_millis(2_500);
/// So long a name that was never asked before waits for an agent.
const AWAITED: Duration = Duration::from_secs(4);
/// How often the agent is told what was counted, where that has changed.
const REPORT_EVERY: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Counts {
    queries: AtomicU64,
    answered: AtomicU64,
    remembered: AtomicU64,
    forwarded: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    malformed: AtomicU64,
    crowded: AtomicU64,
}

fn add(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

/// What the tasks of a responder share.
pub(super) struct Desk {
    zones: Zones,
    agent: watch::Sender<Option<Arc<AgentChannel>>>,
    memory: Memory,
    upstreams: Upstreams,
    counts: Counts,
}

/// A running responder. It ends when it is dropped.
pub struct Responder {
    local: SocketAddr,
    desk: Arc<Desk>,
    running: watch::Sender<()>,
    tasks: JoinSet<()>,
}

impl Responder {
    /// Answers on two sockets of one address: for `zone`, and for names of addresses in `ranges`, what an agent says,
    /// else what `servers` say. One user of this host leaves room for others: `user_of` tells them apart.
    ///
    /// # Errors
    ///
    /// The zone is none, or a socket says nothing of itself.
    pub fn start(
        (udp, tcp): (UdpSocket, TcpListener),
        zone: &str,
        ranges: Ranges,
        servers: Servers,
        user_of: UserOf,
    ) -> Result<Self, DnsError> {
        let local = udp.local_addr().map_err(|error| DnsError::Io { listen: ([0, 0, 0, 0], 0).into(), error })?;
        let zones = Zones::new(zone, local.ip(), ranges)?;
        let desk = Arc::new(Desk {
            zones,
            agent: watch::Sender::new(None),
            memory: Memory::new(ranges),
            upstreams: Upstreams::new(servers),
            counts: Counts::default(),
        });
        let (running, stopped) = watch::channel(());
        let mut tasks = JoinSet::new();
        let askers = Arc::new(Askers::new(local.ip(), ranges, user_of));
        tasks.spawn(transport::serve_udp(udp, Arc::clone(&askers), Arc::clone(&desk), stopped.clone()));
        tasks.spawn(transport::serve_tcp(tcp, askers, Arc::clone(&desk), stopped.clone()));
        tasks.spawn(report(Arc::clone(&desk), stopped));
        Ok(Self { local, desk, running, tasks })
    }

    /// Asks the agent at the other end of a stream from now on. Returns when that agent is gone.
    pub async fn attach(&self, stream: UnixStream) -> Ended {
        let (channel, ended) = AgentChannel::open(stream);
        self.desk.agent.send_replace(Some(Arc::new(channel)));
        // The task that tells lives as long as the stream.
        ended.await.unwrap_or(Ended::Lost)
    }

    /// What it did so far.
    pub fn counters(&self) -> ResponderCounters {
        self.desk.counters()
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// Ends it; its address is free afterwards.
    pub async fn stop(self) {
        let Self { running, mut tasks, .. } = self;
        drop(running);
        while tasks.join_next().await.is_some() {}
    }
}

impl std::fmt::Debug for Responder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Responder({})", self.local)
    }
}

impl Desk {
    fn counters(&self) -> ResponderCounters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ResponderCounters {
            queries: read(&self.counts.queries),
            answered: read(&self.counts.answered),
            remembered: read(&self.counts.remembered),
            forwarded: read(&self.counts.forwarded),
            refused: read(&self.counts.refused),
            failed: read(&self.counts.failed),
            malformed: read(&self.counts.malformed),
            crowded: read(&self.counts.crowded),
        }
    }

    /// A question or a connection was refused: its asker has its share.
    pub(super) fn note_crowded(&self) {
        add(&self.counts.crowded);
    }

    /// What to answer to bytes of somebody. `None` where there shall be nothing: too short for DNS, or itself an
    /// answer.
    pub(super) async fn reply(&self, bytes: &[u8], asker: Questioner, carrier: Carrier) -> Option<Vec<u8>> {
        let query = match receive(bytes) {
            Received::Nothing => {
                add(&self.counts.malformed);
                return None;
            }
            Received::Malformed(reply) => {
                add(&self.counts.malformed);
                return Some(reply);
            }
            Received::Asked(query) => query,
        };
        add(&self.counts.queries);
        let reply = match self.zones.place(&query.name) {
            Place::Elsewhere => self.forward(bytes, &query, carrier).await,
            _ => self.of_zone(bytes, &query, asker, carrier).await?,
        };
        Some(reply)
    }

    async fn of_zone(&self, bytes: &[u8], query: &Query, asker: Questioner, carrier: Carrier) -> Option<Vec<u8>> {
        let start = Instant::now();
        if let Some(reply) = self.ask_agent(bytes, asker, carrier, start + THINKS).await {
            self.memory.note(query, &reply);
            self.count(&self.counts.answered, &reply);
            return Some(reply).filter(|reply| !reply.is_empty());
        }
        if let Some(reply) = self.memory.recall(bytes, carrier) {
            add(&self.counts.remembered);
            return Some(reply);
        }
        let reply = self.await_agent(bytes, asker, carrier, start + AWAITED).await;
        let reply = reply.unwrap_or_else(|| short_reply(bytes, ResponseCode::ServFail));
        self.memory.note(query, &reply);
        self.count(&self.counts.answered, &reply);
        Some(reply).filter(|reply| !reply.is_empty())
    }

    /// Of the agent that there is now; `None` where there is none, or it is silent.
    async fn ask_agent(&self, bytes: &[u8], asker: Questioner, carrier: Carrier, until: Instant) -> Option<Vec<u8>> {
        let agent = self.agent.borrow().clone()?;
        timeout_at(until, agent.ask(bytes, asker, carrier)).await.ok().flatten()
    }

    /// Of the next one.
    async fn await_agent(&self, bytes: &[u8], asker: Questioner, carrier: Carrier, until: Instant) -> Option<Vec<u8>> {
        let mut agents = self.agent.subscribe();
        let wanted = async {
            loop {
                let agent = agents.borrow_and_update().clone().filter(|agent| agent.is_open());
                if let Some(agent) = agent
                    && let Some(reply) = agent.ask(bytes, asker, carrier).await
                {
                    return Some(reply);
                }
                agents.changed().await.ok()?;
            }
        };
        timeout_at(until, wanted).await.ok().flatten()
    }

    async fn forward(&self, bytes: &[u8], query: &Query, carrier: Carrier) -> Vec<u8> {
        // A transfer has many messages, and this host is no server of anybody's zone.
        let is_transfer = matches!(query.query_type, RecordType::AXFR | RecordType::IXFR);
        let is_other_act = bytes[2] & 0x78 != u8::from(OpCode::Query) << 3;
        let code = match (is_transfer, is_other_act) {
            (_, true) => ResponseCode::NotImp,
            (true, false) => ResponseCode::Refused,
            _ => match self.upstreams.ask(bytes, carrier).await {
                Forwarded::Answer(mut reply) => {
                    // Recursion was done, whatever that server says of itself.
                    reply[3] |= RECURSION_AVAILABLE;
                    self.count(&self.counts.forwarded, &reply);
                    return reply;
                }
                Forwarded::NoServer => ResponseCode::Refused,
                Forwarded::Silence => ResponseCode::ServFail,
            },
        };
        let reply = short_reply(bytes, code);
        self.count(&self.counts.forwarded, &reply);
        reply
    }

    /// By what a reply says of itself; `well` where it says something about the name.
    fn count(&self, well: &AtomicU64, reply: &[u8]) {
        const NO_ERROR: u8 = 0;
        const SERVER_FAILURE: u8 = 2;
        const NO_SUCH_NAME: u8 = 3;
        add(match reply.get(3).map(|flags| flags & 0x0f) {
            Some(NO_ERROR | NO_SUCH_NAME) => well,
            Some(SERVER_FAILURE) => &self.counts.failed,
            _ => &self.counts.refused,
        });
    }
}

/// RA, in the fourth byte of a header.
const RECURSION_AVAILABLE: u8 = 0x80;

/// What has come to a responder, before anything is looked up.
#[derive(Debug)]
pub enum Received {
    /// Too short for DNS, or itself an answer: there is no reply to it.
    Nothing,
    /// No question that can be read, and the reply to it.
    Malformed(Vec<u8>),
    /// The one question.
    Asked(Query),
}

/// Reads what has come to a responder.
pub fn receive(bytes: &[u8]) -> Received {
    let is_query = bytes.len() >= HEADER && bytes[2] & 0x80 == 0;
    if !is_query {
        return Received::Nothing;
    }
    question(bytes).map_or_else(|| Received::Malformed(short_reply(bytes, ResponseCode::FormErr)), Received::Asked)
}

/// The one question of a message.
fn question(bytes: &[u8]) -> Option<Query> {
    if bytes[4..6] != [0, 1] {
        return None;
    }
    let mut decoder = BinDecoder::new(bytes);
    decoder.read_slice(HEADER).ok()?;
    Query::read(&mut decoder).ok()
}

/// A header and the question, where that can be read, and nothing else.
pub(super) fn short_reply(bytes: &[u8], code: ResponseCode) -> Vec<u8> {
    let end = super::upstream::question_end(bytes).filter(|_| code != ResponseCode::FormErr);
    let mut reply = bytes[..end.unwrap_or(HEADER)].to_vec();
    // QR, and of the question's flags opcode and RD.
    reply[2] = 0x80 | bytes[2] & 0x79;
    reply[3] = RECURSION_AVAILABLE | u8::try_from(u16::from(code) & 0x0f).unwrap_or_default();
    reply[4..HEADER].fill(0);
    reply[5] = u8::from(end.is_some());
    reply
}

/// Tells agents what was counted, as it changes.
async fn report(desk: Arc<Desk>, mut stopped: watch::Receiver<()>) {
    let (mut every, mut told) = (interval(REPORT_EVERY), ResponderCounters::default());
    let mut agents = desk.agent.subscribe();
    loop {
        let is_new = tokio::select! {
            _ = every.tick() => false,
            Ok(()) = agents.changed() => true,
            () = transport::ended(&mut stopped) => return,
        };
        let counters = desk.counters();
        let agent = desk.agent.borrow().clone();
        if let Some(agent) = agent.filter(|_| is_new || counters != told) {
            agent.report(&counters).await;
            told = counters;
        }
    }
}
