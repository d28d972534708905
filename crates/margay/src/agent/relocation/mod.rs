//! A program's connection goes to another host, and its client notices nothing but a short pause
//! (`docs/decisions/0069-a-connection-goes-to-another-host.md`). Three hosts take part: the one whose program has the
//! connection (the giver), the client's, and the one where another instance of the name goes on with it (the taker).
//!
//! The core asks the client and keeps its word, which alone decides where the connection is. The agents, here, freeze
//! the socket, carry it over, and set it up again. Reading order: [`mailbox`] (what the core says), [`transfer`] (the
//! stream between the agents), [`giver`], [`taker`], [`local_rules`] (how the giver's agent reaches the taker's),
//! [`counting`] (what agents ask each other by that stream besides).

pub mod counting;
pub mod giver;
mod local_rules;
mod mailbox;
mod taker;
mod transfer;

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use margay_control::permits::{Backlog, Permit, Permits};
use margay_control::relocation::RECORD_MAX;
use margay_core::fair_table::Peer;
use margay_core::{HandOver, Tuple};
use margay_wire::HANDED_DATA_MAX;
use parking_lot::Mutex;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use self::local_rules::{Listeners, LocalRules};
use self::mailbox::Mailboxes;
use self::transfer::IdleStreams;
use super::Agent;
use super::instance_addresses::InstanceAddresses;

/// Connections that go, or that come, at one time. One client, or one giver, has a sixteenth; its others wait.
const TRANSFERS_MAX: u32 = 1024;
/// Bytes of connections that come at one time: of one giver, three of the largest.
const TAKEN_BYTES_MAX: usize = 16 * 3 * (RECORD_MAX + HANDED_DATA_MAX as usize);
/// Streams of other hosts, half of which may be idle. One giver has a sixteenth: twice the connections that it brings
/// at once.
const STREAMS_MAX: usize = 2 * TRANSFERS_MAX as usize;
/// Until the client's word is known, counted from the first question to it: its lease, and some.
const WORD_LIMIT: Duration = Duration::from_secs(35);
const _: () = assert!(WORD_LIMIT.as_millis() > margay_core::session::LEASE_MAX.as_millis());
/// How long an agent that stops waits for those that are on their way.
const END_LIMIT: Duration = Duration::from_secs(5);

/// How a hand-over has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Of the giver: another host has the connection.
    Gone,
    /// Of the giver: it stays where it was.
    Stays,
    /// Of the giver: nobody has it.
    Lost,
    /// Of the taker: it is here.
    Taken,
    /// Of the taker: it is not.
    Dropped,
}

impl Outcome {
    const ALL: [Self; 5] = [Self::Gone, Self::Stays, Self::Lost, Self::Taken, Self::Dropped];

    /// Of the metric: role and outcome.
    const fn labels(self) -> [&'static str; 2] {
        match self {
            Self::Gone => ["giver", "gone"],
            Self::Stays => ["giver", "stays"],
            Self::Lost => ["giver", "lost"],
            Self::Taken => ["taker", "taken"],
            Self::Dropped => ["taker", "dropped"],
        }
    }
}

/// What the agent knows of connections that go to another host, or come from one.
pub struct Relocations {
    mailboxes: Arc<Mailboxes>,
    addresses: InstanceAddresses,
    local_rules: LocalRules,
    idle: Arc<IdleStreams>,
    /// By their clients.
    giving: Turns,
    /// The same by their takers, which take no more of one giver.
    going_to: Permits,
    /// By their givers.
    taking: Turns,
    taken_bytes: Permits,
    streams: Permits,
    /// Those whose givers have shown no right to a name yet.
    unproved: Backlog,
    /// Cookies of sockets that are on their way.
    moving: Mutex<HashSet<u64>>,
    counts: [AtomicU64; Outcome::ALL.len()],
}

/// Connections that are on their way, each of somebody.
struct Turns {
    shares: Permits,
    all: Arc<Semaphore>,
}

/// One of them, until this is dropped.
#[expect(dead_code, reason = "both are given back when they are dropped")]
struct Turn {
    of_share: Permit,
    of_all: OwnedSemaphorePermit,
}

impl Turns {
    fn new() -> Self {
        let all = TRANSFERS_MAX as usize;
        // This host may be its own client.
        Self { shares: Permits::new(all, all / 16), all: Arc::new(Semaphore::new(all)) }
    }

    /// Waits until one more of this peer's may begin. Cancel-safe.
    ///
    /// # Errors
    ///
    /// None begins any more.
    async fn wait(&self, peer: Peer) -> Result<Turn, AcquireError> {
        let of_share = self.shares.wait(peer).await;
        let of_all = Arc::clone(&self.all).acquire_owned().await?;
        Ok(Turn { of_share, of_all })
    }

    /// Waits for those that are on their way, not for long; after that, none begins.
    async fn end(&self) {
        if timeout(END_LIMIT, self.all.acquire_many(TRANSFERS_MAX)).await.is_err() {
            tracing::warn!("the agent stops while connections are on their way to another host");
        }
        self.all.close();
    }
}

/// For the core's words of hand-overs, before there is an agent.
#[derive(Clone, Default)]
pub struct Words(Arc<Mailboxes>);

impl Words {
    /// Delivers one. Quick, and never calls back.
    pub fn put(&self, word: HandOver) {
        self.0.put(word);
    }
}

impl Relocations {
    /// None is on its way yet.
    pub fn new(words: &Words, addresses: &InstanceAddresses) -> Self {
        Self {
            mailboxes: Arc::clone(&words.0),
            addresses: addresses.clone(),
            local_rules: LocalRules::default(),
            idle: Arc::default(),
            giving: Turns::new(),
            going_to: Permits::new(TRANSFERS_MAX as usize, 0),
            taking: Turns::new(),
            taken_bytes: Permits::new(TAKEN_BYTES_MAX, 0),
            streams: Permits::new(STREAMS_MAX, 0),
            unproved: Backlog::new(STREAMS_MAX),
            moving: Mutex::default(),
            counts: Default::default(),
        }
    }

    /// Makes the service table follow from the names that programs take over.
    pub fn follow_takers(&self, agent: &Agent) {
        self.local_rules.follow(&agent.core, || agent.connections.programs.takers.prefixes());
    }

    /// Whether a flow that is served here is no program's, but brings connections of another host.
    pub fn is_stream(&self, app: &Tuple) -> bool {
        self.local_rules.is_stream(app)
    }

    /// Waits for those that are on their way, not for long; after that, none begins.
    pub async fn end(&self) {
        self.giving.end().await;
        self.taking.end().await;
    }

    /// How often another host was refused a stream, or memory for a connection.
    pub fn refused(&self) -> u64 {
        self.unproved.refused() + self.streams.refused() + self.taken_bytes.refused()
    }

    fn note(&self, outcome: Outcome) {
        self.counts[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How many have ended how: role, outcome, and the count.
    pub fn counts(&self) -> Vec<([&'static str; 2], u64)> {
        let count = |outcome: Outcome| self.counts[outcome as usize].load(Ordering::Relaxed);
        Outcome::ALL.into_iter().map(|outcome| (outcome.labels(), count(outcome))).collect()
    }
}

/// The counts of no agent.
pub fn no_counts() -> Vec<([&'static str; 2], u64)> {
    Outcome::ALL.into_iter().map(|outcome| (outcome.labels(), 0)).collect()
}

/// Takes connections of other hosts from now on, for programs that take over names, until the tasks are ended.
pub async fn start(agent: &Arc<Agent>) -> Vec<JoinHandle<()>> {
    let mut tasks = vec![tokio::spawn(refuse_strays(Arc::clone(agent)))];
    match listen(agent).await {
        Ok(listeners) => {
            let take = |listener| tokio::spawn(taker::run(Arc::clone(agent), listener));
            tasks.extend(listeners.sockets.into_iter().map(take));
        }
        Err(error) => tracing::warn!(%error, "connections of other hosts cannot be taken over"),
    }
    tasks
}

async fn listen(agent: &Agent) -> io::Result<Listeners> {
    let listeners = Listeners::bind(agent.names.leases.ranges()).await?;
    agent.connections.relocations.local_rules.lead_to(&listeners);
    Ok(listeners)
}

/// A client that was told of this host by somebody who gives nothing to it is told so.
async fn refuse_strays(agent: Arc<Agent>) {
    loop {
        let ticket = agent.connections.relocations.mailboxes.next_stray().await;
        agent.core.0.with_sal(|sal, now| sal.refuse_hand_over(now, ticket));
    }
}

#[cfg(test)]
mod test {
    use futures_util::FutureExt as _;
    use margay_core::key::HostId;

    use super::*;

    #[tokio::test]
    async fn each_outcome_is_counted_for_itself_and_none_begins_after_the_end() {
        let relocations = Relocations::new(&Words::default(), &InstanceAddresses::default());
        relocations.note(Outcome::Lost);
        relocations.note(Outcome::Taken);
        let counts: Vec<u64> = relocations.counts().into_iter().map(|(_, count)| count).collect();
        assert_eq!(counts, [0, 0, 1, 1, 0]);
        relocations.end().await;
        assert!(relocations.giving.wait(SILENT).await.is_err() && relocations.taking.wait(SILENT).await.is_err());
    }

    const SILENT: Peer = Peer::Member(HostId([1; 16]));

    #[tokio::test]
    async fn a_client_that_answers_nothing_holds_up_its_own_connections_alone() {
        let relocations = Relocations::new(&Words::default(), &InstanceAddresses::default());
        let mut held = Vec::new();
        while let Some(turn) = relocations.giving.wait(SILENT).now_or_never() {
            held.push(turn.expect("they begin"));
        }
        assert_eq!(held.len(), 64);
        assert!(relocations.giving.wait(Peer::Member(HostId([2; 16]))).now_or_never().is_some());
        held.pop();
        assert!(relocations.giving.wait(SILENT).now_or_never().is_some());
    }
}
