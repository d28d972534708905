//! The stream by which a connection goes from the agent of one host to that of another: TCP to the instance that takes
//! it, over Margay itself, and inside a stream that both prove their host keys for.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use margay_control::permits::Permit;
use margay_control::relocation::proto::{
    Count, Counted, End, FromGiver, FromTaker, Head, Refused, Restored, Settle, Settled, Willing, from_giver,
    from_taker,
};
use margay_control::relocation::{
    HAND_OVER, PIECE_MAX, RECORD_MAX, StreamError, VERSION, Writer, answer, begin, read_all,
};
use margay_core::instance::{Instance, Pin};
use margay_core::key::{HostId, HostPublic, HostSecret};
use margay_core::name::ServiceId;
use margay_core::table::{HAND_OVER_PORT, NextHop};
use margay_core::{HandedSession, PeerTicket, Ticket};
use margay_wire::{HANDED_DATA_MAX, SessionId};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::WORD_LIMIT;
use crate::agent::Agent;
use crate::agent::core::CoreHandle;
use crate::agent::instance_addresses::InstanceAddresses;

/// How long the other end may take for what it sends next.
pub const STEP_LIMIT: Duration = Duration::from_secs(5);
/// A transfer may take so long, and a second longer for each MiB that has come.
const TRANSFER_FIRST: Duration = Duration::from_secs(5);
/// Whatever has come: then the client's host has given the hand-over up.
const TRANSFER_MAX: Duration = margay_core::session::LEASE_MAX;
/// A giver's stream without a connection is kept for so long: others may follow.
const IDLE_LIMIT: Duration = Duration::from_secs(5);
/// A taker waits for longer, so that it is the giver that ends the stream: as long as the giver may still ask who has
/// the connection that was brought last.
const NEXT_LIMIT: Duration = Duration::from_secs(40);
const _: () =
    assert!(NEXT_LIMIT.as_millis() > WORD_LIMIT.as_millis() && NEXT_LIMIT.as_millis() > IDLE_LIMIT.as_millis());
/// Messages that have come and wait to be taken.
const UNREAD_MAX: usize = 4;

type Answers = mpsc::Receiver<Result<FromTaker, StreamError>>;
type Pieces = mpsc::Receiver<Result<FromGiver, StreamError>>;

/// An address of this host that stands for the instance at the other end.
struct InstanceAddress {
    address: IpAddr,
    addresses: InstanceAddresses,
    core: CoreHandle,
}

impl InstanceAddress {
    fn new(agent: &Agent, instance: Instance) -> Result<Self, String> {
        let addresses = agent.connections.relocations.addresses.clone();
        let core = agent.core.clone();
        let address = addresses.take(agent.names.leases.ranges(), true, 0);
        let address = address.ok_or("all virtual addresses of instances are in use on this host; try again later")?;
        core.0.with_sal(|sal, _| sal.bind_instance(address, instance));
        Ok(Self { address, addresses, core })
    }
}

impl Drop for InstanceAddress {
    fn drop(&mut self) {
        self.core.0.with_sal(|sal, _| sal.unbind_instance(self.address));
        self.addresses.free(self.address);
    }
}

/// The giver's end.
pub struct Outgoing {
    answers: Answers,
    writer: Writer,
    /// Ends with this, whatever the other end does.
    _reading: JoinSet<()>,
    /// As long as packets of the stream go there.
    _address: Option<InstanceAddress>,
}

/// What a taker says.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// It would take the connection.
    Willing,
    /// It does not; why, and what a person can do.
    Refused(String),
    /// The connection is there, and frozen.
    Restored,
}

impl Outgoing {
    /// Opens a stream to the agent of a service's instance on `host`, which hears SAL at `at`.
    ///
    /// # Errors
    ///
    /// Why there is none, as a sentence.
    pub async fn open(agent: &Agent, service: &ServiceId, host: HostId, at: SocketAddr) -> Result<Self, String> {
        let next_hop = NextHop { address: at, host: Some(host), router: false };
        let at_instance = InstanceAddress::new(agent, Instance { service: *service, next_hop, pin: Pin::Only })?;
        let unreached = |error: std::io::Error| {
            format!("no program there takes over the name, or the host does not answer ({error})")
        };
        let stream = TcpStream::connect((at_instance.address, HAND_OVER_PORT)).await.map_err(unreached)?;
        Ok(Self { _address: Some(at_instance), ..Self::over(stream, &agent.host.local.host_key, host).await? })
    }

    /// The stream over a TCP connection to `host`.
    async fn over(stream: TcpStream, own: &HostSecret, host: HostId) -> Result<Self, String> {
        let begun = begin(stream, own, HAND_OVER).await;
        let (reader, writer, peer) = begun.map_err(|error| broken(&error))?;
        if peer.id() != host {
            return Err(format!("host {} answers in its place; its registration is out of date", peer.id()));
        }
        let (sender, answers): (_, Answers) = mpsc::channel(UNREAD_MAX);
        let mut reading = JoinSet::new();
        reading.spawn(read_all(reader, sender));
        Ok(Self { answers, writer, _reading: reading, _address: None })
    }

    /// Whether another connection can go by it.
    fn is_usable(&self) -> bool {
        self.answers.is_empty() && !self.answers.is_closed()
    }

    /// Says what is to come.
    ///
    /// # Errors
    ///
    /// The stream is broken.
    pub async fn offer(
        &mut self,
        ticket: &Ticket,
        of: &HandedSession,
        chain: Vec<u8>,
        data: &[u8],
    ) -> Result<(), String> {
        let data_length = u32::try_from(data.len()).map_err(|_| "the data is too long".to_owned())?;
        let HandedSession { client, session, service, port, .. } = of;
        let head = Head {
            version: VERSION,
            ticket: ticket.0.to_vec(),
            service: service.0.to_vec(),
            chain,
            data_length,
            client: client.0.to_vec(),
            session: session.0.to_vec(),
            port: u32::from(*port),
        };
        self.say(from_giver::Body::Head(head)).await
    }

    /// Asks whether the taker's client has come for the connection that was sent last. If not, it never will. Waits for
    /// as long as the caller does: whoever has not answered may have the connection.
    ///
    /// # Errors
    ///
    /// The other agent has ended the stream; as a sentence.
    pub async fn settle(&mut self) -> Result<bool, String> {
        let question = FromGiver { body: Some(from_giver::Body::Settle(Settle {})) };
        self.writer.write(&question).await.map_err(|error| broken(&error))?;
        loop {
            match self.next().await? {
                from_taker::Body::Settled(Settled { taken }) => return Ok(taken),
                // Of the connection itself, said before the question was heard.
                from_taker::Body::Willing(_) | from_taker::Body::Restored(_) | from_taker::Body::Refused(_) => {}
                from_taker::Body::Counted(_) => return Err(broken(&StreamError::Garbage)),
            }
        }
    }

    /// Waits until the taker is willing.
    ///
    /// # Errors
    ///
    /// It is not; why, as a sentence.
    pub async fn await_willing(&mut self) -> Result<(), String> {
        match timeout(STEP_LIMIT, self.answer()).await {
            Ok(Ok(Answer::Willing)) => Ok(()),
            Ok(Ok(Answer::Refused(why))) => Err(why),
            Ok(Ok(Answer::Restored)) => Err(broken(&StreamError::Garbage)),
            Ok(Err(why)) => Err(why),
            Err(_) => Err(late()),
        }
    }

    /// Sends the connection, all but that this was all.
    ///
    /// # Errors
    ///
    /// The stream is broken.
    pub async fn send(&mut self, record: &[u8], data: &[u8]) -> Result<(), String> {
        let record = record.chunks(PIECE_MAX).map(|piece| from_giver::Body::Record(piece.to_vec()));
        let data = data.chunks(PIECE_MAX).map(|piece| from_giver::Body::Data(piece.to_vec()));
        let begun = Instant::now();
        for (count, body) in record.chain(data).enumerate() {
            let until = begun + transfer_limit(count * PIECE_MAX);
            timeout_at(until, self.say(body)).await.map_err(|_| slow())??;
        }
        Ok(())
    }

    /// Says that the connection was sent: it is set up from now on.
    ///
    /// # Errors
    ///
    /// The stream is broken.
    pub async fn end(&mut self) -> Result<(), String> {
        self.say(from_giver::Body::End(End {})).await
    }

    /// What the taker says next. Cancel-safe.
    ///
    /// # Errors
    ///
    /// The stream is broken.
    pub async fn answer(&mut self) -> Result<Answer, String> {
        match self.next().await? {
            from_taker::Body::Willing(_) => Ok(Answer::Willing),
            from_taker::Body::Refused(Refused { text }) => Ok(Answer::Refused(text)),
            from_taker::Body::Restored(_) => Ok(Answer::Restored),
            from_taker::Body::Counted(_) | from_taker::Body::Settled(_) => Err(broken(&StreamError::Garbage)),
        }
    }

    /// Asks how many connections of a name are there.
    ///
    /// # Errors
    ///
    /// The other agent does not say, or the stream is broken; as a sentence.
    pub async fn count(&mut self, question: Count) -> Result<Counted, String> {
        self.say(from_giver::Body::Count(question)).await?;
        match timeout(STEP_LIMIT, self.next()).await.map_err(|_| late())?? {
            from_taker::Body::Counted(counted) => Ok(counted),
            from_taker::Body::Refused(Refused { text }) => Err(text),
            from_taker::Body::Willing(_) | from_taker::Body::Restored(_) | from_taker::Body::Settled(_) => {
                Err(broken(&StreamError::Garbage))
            }
        }
    }

    /// Cancel-safe.
    async fn next(&mut self) -> Result<from_taker::Body, String> {
        match self.answers.recv().await {
            Some(Ok(message)) => message.body.ok_or_else(|| broken(&StreamError::Garbage)),
            Some(Err(error)) => Err(broken(&error)),
            None => Err("the other agent has ended the transfer".to_owned()),
        }
    }

    async fn say(&mut self, body: from_giver::Body) -> Result<(), String> {
        let message = FromGiver { body: Some(body) };
        let written = timeout(STEP_LIMIT, self.writer.write(&message)).await;
        written.map_err(|_| late())?.map_err(|error| broken(&error))
    }
}

/// A stream of a giver's that waits for the next connection.
struct IdleStream {
    since: Instant,
    host: HostId,
    service: ServiceId,
    stream: Outgoing,
}

/// All of them, the longest idle first.
#[derive(Default)]
pub struct IdleStreams(Mutex<Vec<IdleStream>>);

impl IdleStreams {
    /// One to a service's instance on `host`.
    pub fn take(&self, host: HostId, service: &ServiceId) -> Option<Outgoing> {
        let mut all = self.0.lock();
        let is_fit = |one: &IdleStream| one.host == host && one.service == *service && one.stream.is_usable();
        let at = all.iter().position(is_fit)?;
        Some(all.remove(at).stream)
    }

    /// Closes all that lead to `host`.
    pub fn forget(&self, host: HostId) {
        self.0.lock().retain(|one| one.host != host);
    }

    /// Keeps one whose last connection is settled.
    pub fn keep(self: &Arc<Self>, host: HostId, service: ServiceId, stream: Outgoing) {
        let mut all = self.0.lock();
        let is_first = all.is_empty();
        all.push(IdleStream { since: Instant::now(), host, service, stream });
        if is_first {
            tokio::spawn(Arc::clone(self).close_old());
        }
    }

    /// Closes those that have waited for too long, until there are none.
    async fn close_old(self: Arc<Self>) {
        while !self.0.lock().is_empty() {
            sleep(IDLE_LIMIT / 2).await;
            self.0.lock().retain(|one| one.since.elapsed() < IDLE_LIMIT && one.stream.is_usable());
        }
    }
}

/// What a giver has said first.
pub struct Offered {
    /// By which this host knows the hand-over.
    pub ticket: PeerTicket,
    /// Which connection it is, as the giver says.
    pub of: HandedSession,
    /// Certificates of the giver.
    pub chain: Vec<u8>,
    /// Bytes of data that will follow.
    pub data_length: usize,
}

/// What a stream is used for next.
pub enum Asked {
    /// To bring a connection.
    Connection(Offered),
    /// To ask how many there are.
    Count(Count),
    /// To ask who has the connection that was brought last.
    Settle,
}

/// The taker's end.
pub struct Incoming {
    /// Who gives.
    pub giver: HostPublic,
    pieces: Pieces,
    writer: Writer,
    /// Ends with this, whatever the other end does.
    _reading: JoinSet<()>,
}

/// The parts of a connection, as they come.
#[derive(Debug, Default)]
pub struct Parts {
    /// Of the TCP connection.
    pub record: Vec<u8>,
    /// What the program says of it.
    pub data: Vec<u8>,
    is_whole: bool,
}

impl Parts {
    const fn len(&self) -> usize {
        self.record.len() + self.data.len()
    }

    /// Takes what has come.
    ///
    /// # Errors
    ///
    /// It is too long, or out of place.
    fn add(&mut self, body: from_giver::Body, data_length: usize) -> Result<(), String> {
        match body {
            from_giver::Body::Record(piece) if !self.is_whole && self.record.len() + piece.len() <= RECORD_MAX => {
                self.record.extend_from_slice(&piece);
            }
            from_giver::Body::Data(piece) if !self.is_whole && self.data.len() + piece.len() <= data_length => {
                self.data.extend_from_slice(&piece);
            }
            from_giver::Body::End(_) if !self.is_whole && self.data.len() == data_length => self.is_whole = true,
            _ => return Err(broken(&StreamError::Garbage)),
        }
        Ok(())
    }
}

impl Incoming {
    /// Takes a stream.
    ///
    /// # Errors
    ///
    /// It is none.
    pub async fn accept(own: &HostSecret, stream: TcpStream) -> Result<Self, String> {
        let begun = timeout(STEP_LIMIT, answer(stream, own, HAND_OVER)).await;
        let (reader, writer, giver) = begun.map_err(|_| late())?.map_err(|error| broken(&error))?;
        let (sender, pieces): (_, Pieces) = mpsc::channel(UNREAD_MAX);
        let mut reading = JoinSet::new();
        reading.spawn(read_all(reader, sender));
        Ok(Self { giver, pieces, writer, _reading: reading })
    }

    /// What it is used for next; `None` where it has ended, or nothing has come for long. The wait is shorter for a
    /// giver that is not known to have a right to a name.
    ///
    /// # Errors
    ///
    /// What comes makes no sense, or is of another version, which the other end is told.
    pub async fn asked(&mut self, is_known: bool) -> Result<Option<Asked>, String> {
        let limit = if is_known { NEXT_LIMIT } else { STEP_LIMIT };
        let body = match timeout(limit, self.pieces.recv()).await {
            Ok(Some(Ok(message))) => message.body,
            Ok(Some(Err(_)) | None) | Err(_) => return Ok(None),
        };
        let asked = match body {
            Some(from_giver::Body::Head(head)) => offered(head, self.giver.id()).map(Asked::Connection),
            Some(from_giver::Body::Settle(_)) => Ok(Asked::Settle),
            Some(from_giver::Body::Count(question)) => check_version(question.version).map(|()| Asked::Count(question)),
            _ => return Err(broken(&StreamError::Garbage)),
        };
        match asked {
            Ok(asked) => Ok(Some(asked)),
            Err(why) => {
                self.refuse(&why).await;
                Err(why)
            }
        }
    }

    /// All parts of the connection, which `room` has memory for.
    ///
    /// # Errors
    ///
    /// They do not come in time, or what comes makes no sense.
    pub async fn parts(&mut self, data_length: usize, room: &mut Permit) -> Result<Parts, String> {
        let mut parts = Parts::default();
        let begun = Instant::now();
        while !parts.is_whole {
            let had = parts.len();
            let next = timeout_at(begun + transfer_limit(had), timeout(STEP_LIMIT, self.next())).await;
            let body = next.map_err(|_| slow())?.map_err(|_| late())??;
            parts.add(body, data_length)?;
            room.add(parts.len() - had)
                .map_err(|full| format!("this host has no memory for the connection: {full}"))?;
        }
        Ok(parts)
    }

    /// The connection may be sent.
    ///
    /// # Errors
    ///
    /// The stream is broken.
    pub async fn agree(&mut self) -> Result<(), String> {
        self.say(from_taker::Body::Willing(Willing {})).await
    }

    /// The connection is there.
    ///
    /// # Errors
    ///
    /// The stream is broken.
    pub async fn confirm(&mut self) -> Result<(), String> {
        self.say(from_taker::Body::Restored(Restored {})).await
    }

    /// Whether the client of the last connection has come.
    ///
    /// # Errors
    ///
    /// The stream is broken.
    pub async fn tell_settled(&mut self, taken: bool) -> Result<(), String> {
        self.say(from_taker::Body::Settled(Settled { taken })).await
    }

    /// So many connections are here.
    ///
    /// # Errors
    ///
    /// The stream is broken.
    pub async fn tell_count(&mut self, counted: Counted) -> Result<(), String> {
        self.say(from_taker::Body::Counted(counted)).await
    }

    /// The giver keeps the connection, or is not told how many there are.
    pub async fn refuse(&mut self, why: &str) {
        // Whoever has ended the stream needs no reason.
        let _ = self.say(from_taker::Body::Refused(Refused { text: why.to_owned() })).await;
    }

    async fn say(&mut self, body: from_taker::Body) -> Result<(), String> {
        let message = FromTaker { body: Some(body) };
        let written = timeout(STEP_LIMIT, self.writer.write(&message)).await;
        written.map_err(|_| late())?.map_err(|error| broken(&error))
    }

    async fn next(&mut self) -> Result<from_giver::Body, String> {
        match self.pieces.recv().await {
            Some(Ok(message)) => message.body.ok_or_else(|| broken(&StreamError::Garbage)),
            Some(Err(error)) => Err(broken(&error)),
            None => Err("the other agent has ended the transfer".to_owned()),
        }
    }
}

fn check_version(version: u32) -> Result<(), String> {
    if version == VERSION {
        return Ok(());
    }
    Err(format!(
        "the other agent speaks version {version} of hand-over, and this one {VERSION}; install one release on both"
    ))
}

fn offered(head: Head, giver: HostId) -> Result<Offered, String> {
    check_version(head.version)?;
    let unreadable = || broken(&StreamError::Garbage);
    let data_length = u64::from(head.data_length);
    if data_length > HANDED_DATA_MAX {
        return Err(format!("{data_length} bytes go with the connection, and {HANDED_DATA_MAX} are the most"));
    }
    let ticket = Ticket(head.ticket.try_into().map_err(|_| unreadable())?);
    let client = HostId(head.client.try_into().map_err(|_| unreadable())?);
    let session = SessionId(head.session.try_into().map_err(|_| unreadable())?);
    let port = u16::try_from(head.port).map_err(|_| unreadable())?;
    let service = ServiceId(head.service.try_into().map_err(|_| unreadable())?);
    Ok(Offered {
        ticket: PeerTicket { peer: client, ticket },
        of: HandedSession { giver, client, session, service, port },
        chain: head.chain,
        data_length: usize::try_from(data_length).map_err(|_| unreadable())?,
    })
}

fn broken(error: &StreamError) -> String {
    format!("the transfer between the agents came to nothing: {error}")
}

/// How long a transfer may take of which so many bytes have gone.
fn transfer_limit(bytes: usize) -> Duration {
    let seconds = u32::try_from(bytes >> 20).unwrap_or(u32::MAX);
    TRANSFER_FIRST.saturating_add(Duration::from_secs(seconds.into())).min(TRANSFER_MAX)
}

fn slow() -> String {
    "the transfer between the agents is too slow; look for what holds up packets between the two hosts".to_owned()
}

fn late() -> String {
    format!("the other agent has not answered within {} seconds; see its log", STEP_LIMIT.as_secs())
}

#[cfg(test)]
mod test {
    use margay_control::permits::Permits;
    use margay_core::fair_table::Peer;
    use margay_core::rng::Rng;
    use tokio::net::TcpListener;

    use super::*;

    const CLIENT: HostId = HostId([5; 16]);

    fn handed(giver: HostId) -> HandedSession {
        HandedSession { giver, client: CLIENT, session: SessionId([6; 16]), service: ServiceId([8; 32]), port: 80 }
    }

    fn room() -> Permit {
        Permits::new(16 << 20, 0).take(Peer::Member(HostId([1; 16])), 0).expect("room")
    }

    fn key(n: u8) -> HostSecret {
        HostSecret::generate(&mut Rng::new([n; 32]))
    }

    async fn ends() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let near = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("it listens");
        (near, listener.accept().await.expect("it has come").0)
    }

    #[tokio::test]
    async fn a_record_and_its_data_arrive_whole() {
        let (near, far) = ends().await;
        let record: Vec<u8> = (0..3 * PIECE_MAX + 7).map(|n| (n % 251) as u8).collect();
        let giving = async {
            let mut stream = Outgoing::over(near, &key(1), key(2).public().id()).await?;
            stream.offer(&Ticket([7; 16]), &handed(key(1).public().id()), vec![9], b"anna").await?;
            stream.await_willing().await?;
            stream.send(&record, b"anna").await?;
            stream.end().await?;
            stream.answer().await
        };
        let taking = async {
            let mut stream = Incoming::accept(&key(2), far).await?;
            let Some(Asked::Connection(offered)) = stream.asked(true).await? else { return Err("no offer".to_owned()) };
            stream.agree().await?;
            let parts = stream.parts(offered.data_length, &mut room()).await?;
            stream.confirm().await?;
            // It is open until the giver has heard that.
            Ok::<_, String>((stream, offered, parts))
        };
        let (given, taken) = tokio::join!(giving, taking);
        let (stream, offered, parts) = taken.expect("all has come");
        assert_eq!(given, Ok(Answer::Restored));
        assert_eq!(stream.giver.id(), key(1).public().id());
        assert_eq!(offered.ticket, PeerTicket { peer: CLIENT, ticket: Ticket([7; 16]) });
        assert_eq!((offered.of, offered.chain), (handed(key(1).public().id()), vec![9]));
        assert!(parts.record == record && parts.data == b"anna");
    }

    #[tokio::test]
    async fn a_refusal_is_told_and_another_host_is_not_spoken_to() {
        let (near, far) = ends().await;
        let giving = async {
            let mut stream = Outgoing::over(near, &key(1), key(2).public().id()).await?;
            stream.offer(&Ticket([7; 16]), &handed(key(1).public().id()), Vec::new(), &[]).await?;
            stream.await_willing().await
        };
        let taking = async {
            let mut stream = Incoming::accept(&key(2), far).await?;
            stream.asked(true).await?;
            stream.refuse("nobody here").await;
            Ok::<_, String>(stream)
        };
        let (refused, _taken) = tokio::join!(giving, taking);
        assert_eq!(refused, Err("nobody here".to_owned()));
        let (near, far) = ends().await;
        let (own, wrong) = (key(1), key(2));
        let meant = key(3).public().id();
        let (begun, _) = tokio::join!(Outgoing::over(near, &own, meant), Incoming::accept(&wrong, far));
        assert!(begun.err().is_some_and(|why| why.contains(&wrong.public().id().to_string())));
    }

    #[tokio::test]
    async fn a_stream_is_used_again_until_its_other_end_has_gone() {
        let idle = Arc::new(IdleStreams::default());
        let (near, far) = ends().await;
        let (own, other) = (key(1), key(2));
        let host = other.public().id();
        let (stream, taking) = tokio::join!(Outgoing::over(near, &own, host), Incoming::accept(&other, far));
        let service = ServiceId([8; 32]);
        idle.keep(host, service, stream.expect("open"));
        assert!(idle.take(host, &ServiceId([9; 32])).is_none(), "to another name");
        let stream = idle.take(host, &service).expect("it is idle");
        assert!(idle.take(host, &service).is_none(), "it is in use");
        idle.keep(host, service, stream);
        drop(taking);
        while idle.take(host, &service).map(|stream| idle.keep(host, service, stream)).is_some() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_question_is_answered_before_a_connection_is_brought_by_the_same_stream() {
        let (near, far) = ends().await;
        let question = Count { version: VERSION, service: vec![8; 32], bits: 256, ..Count::default() };
        let asking = async {
            let mut stream = Outgoing::over(near, &key(1), key(2).public().id()).await?;
            let counted = stream.count(question.clone()).await?;
            let refused = stream.count(Count { version: VERSION + 1, ..question.clone() }).await;
            Ok::<_, String>((counted.flows, refused))
        };
        let answering = async {
            let mut stream = Incoming::accept(&key(2), far).await?;
            let Some(Asked::Count(asked)) = stream.asked(true).await? else { return Err("no question".to_owned()) };
            stream.tell_count(Counted { flows: 7, ..Counted::default() }).await?;
            Ok((asked, stream.asked(true).await.err(), stream))
        };
        let (counted, answered) = tokio::join!(asking, answering);
        let (asked, ended, _stream) = answered.expect("a question");
        let (flows, refused) = counted.expect("an answer");
        assert_eq!((flows, asked), (7, question));
        assert!(refused.is_err_and(|why| why.contains("one release")) && ended.is_some());
    }

    #[tokio::test]
    async fn a_giver_hears_whether_the_taker_has_the_connection_past_what_was_said_before() {
        for is_taken in [true, false] {
            let (near, far) = ends().await;
            let giving = async {
                let mut stream = Outgoing::over(near, &key(1), key(2).public().id()).await?;
                stream.settle().await
            };
            let taking = async {
                let mut stream = Incoming::accept(&key(2), far).await?;
                stream.confirm().await?;
                let Some(Asked::Settle) = stream.asked(true).await? else { return Err("no question".to_owned()) };
                // It waits for its client.
                tokio::time::pause();
                sleep(4 * STEP_LIMIT).await;
                tokio::time::resume();
                stream.tell_settled(is_taken).await?;
                Ok::<_, String>(stream)
            };
            let (settled, taking) = tokio::join!(giving, taking);
            assert_eq!((settled, taking.is_ok()), (Ok(is_taken), true));
        }
    }

    fn head() -> Head {
        Head {
            version: VERSION,
            ticket: vec![1; 16],
            service: vec![2; 32],
            chain: vec![3],
            data_length: u32::try_from(HANDED_DATA_MAX).expect("a mebibyte"),
            client: vec![5; 16],
            session: vec![6; 16],
            port: 80,
        }
    }

    #[test]
    fn what_is_offered_is_checked() {
        let giver = HostId([4; 16]);
        let read = offered(head(), giver).expect("in order");
        assert_eq!(read.ticket, PeerTicket { peer: CLIENT, ticket: Ticket([1; 16]) });
        assert_eq!(read.of, HandedSession { service: ServiceId([2; 32]), ..handed(giver) });
        for wrong in [
            Head { version: VERSION + 1, ..head() },
            Head { ticket: vec![1; 15], ..head() },
            Head { service: Vec::new(), ..head() },
            Head { client: vec![5; 15], ..head() },
            Head { session: Vec::new(), ..head() },
            Head { port: 65_536, ..head() },
            Head { data_length: head().data_length + 1, ..head() },
        ] {
            assert!(offered(wrong, giver).is_err());
        }
        let other = offered(Head { version: 9, ..head() }, giver).err().unwrap_or_default();
        assert!(other.contains("version 9") && other.contains("one release"), "{other}");
    }

    #[tokio::test]
    async fn a_transfer_that_goes_on_for_ever_ends_and_one_that_is_larger_than_the_givers_share_is_refused() {
        for (pause, every, why) in [(Duration::from_secs(4), 1, "too slow"), (Duration::ZERO, PIECE_MAX, "no memory")] {
            let (near, far) = ends().await;
            let giving = async {
                let mut stream = Outgoing::over(near, &key(1), key(2).public().id()).await.expect("a stream");
                stream.offer(&Ticket([7; 16]), &handed(key(1).public().id()), vec![9], b"").await.expect("said");
                // Each piece in time, and never the last one.
                while stream.say(from_giver::Body::Record(vec![0; every])).await.is_ok() {
                    sleep(pause).await;
                }
            };
            let taking = async {
                let mut stream = Incoming::accept(&key(2), far).await.expect("a stream");
                assert!(matches!(stream.asked(true).await, Ok(Some(Asked::Connection(_)))));
                // Time jumps ahead whenever nothing else is to be done.
                tokio::time::pause();
                let begun = Instant::now();
                let refused = stream.parts(0, &mut room()).await.expect_err("it has no end");
                let took = begun.elapsed();
                tokio::time::resume();
                (refused, took)
            };
            let (refused, took) = tokio::select! {
                () = giving => panic!("the stream has ended before"),
                refused = taking => refused,
            };
            assert!(refused.contains(why), "{refused}");
            assert!(took <= TRANSFER_MAX);
        }
    }

    #[test]
    fn the_time_of_a_transfer_grows_with_what_has_come_and_has_an_end() {
        let mib = |count: usize| transfer_limit(count << 20);
        assert_eq!([mib(0), mib(1), mib(10)].map(|limit| limit.as_secs()), [5, 6, 15]);
        assert_eq!(mib(40), TRANSFER_MAX);
    }

    #[test]
    fn parts_come_until_the_end_and_never_more_than_was_said() {
        let mut parts = Parts::default();
        parts.add(from_giver::Body::Record(vec![1; 10]), 3).expect("room");
        parts.add(from_giver::Body::Data(vec![2; 2]), 3).expect("room");
        assert!(parts.add(from_giver::Body::End(End {}), 3).is_err(), "a byte is missing");
        assert!(parts.add(from_giver::Body::Data(vec![2; 2]), 3).is_err(), "a byte too many");
        parts.add(from_giver::Body::Data(vec![2]), 3).expect("room");
        parts.add(from_giver::Body::End(End {}), 3).expect("whole");
        assert!(parts.add(from_giver::Body::Record(vec![1]), 3).is_err(), "after the end");
        assert_eq!((parts.record.len(), parts.data.len()), (10, 3));
        parts.record = vec![0; RECORD_MAX];
        parts.is_whole = false;
        assert!(parts.add(from_giver::Body::Record(vec![1]), 3).is_err(), "too long");
    }
}
