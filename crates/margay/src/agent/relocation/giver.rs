//! The giver's part: a connection of a program of this host goes to another instance of its name.
//!
//! Nothing is frozen before the taker is willing and the client has fetched the flow. From then on the client's word
//! decides: the connection stays here and goes on, or it has gone and the socket here is closed in silence. Every step
//! has a time-out, and all of them together are shorter than a program's library waits.

use std::collections::HashSet;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use margay_control::entropy;
use margay_control::registration::Instance;
use margay_core::fair_table::Peer;
use margay_core::fetch::refusal_text;
use margay_core::key::HostId;
use margay_core::name::{Name, ServiceId};
use margay_core::{HandOver, HandOverError, HandedSession, Sal, Ticket, Tuple};
use margay_datapath::repair::Frozen;
use margay_wire::{FlowId, HANDED_DATA_MAX};
use nix::errno::Errno;
use rustix::net::sockopt::socket_cookie;
use tokio::task::block_in_place;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::mailbox::{HandOverKey, Mailbox};
use super::transfer::{Answer, Outgoing};
use super::{Outcome, Relocations, Turn, WORD_LIMIT};
use crate::agent::programs::hand_over::Gift;
use crate::agent::programs::request::No;
use crate::agent::{Agent, home, naming};

/// How long a program waits for its turn.
const TURN_LIMIT: Duration = Duration::from_secs(2);
/// Until a taker is willing, all that are asked together.
const PREPARE_LIMIT: Duration = Duration::from_secs(5);
/// Until the client has fetched the flow.
const FETCH_LIMIT: Duration = Duration::from_secs(5);
/// Until the connection is there.
const RESTORE_LIMIT: Duration = Duration::from_secs(10);
/// Until the taker's last word is there, where the client's has come before it.
const SETTLE_LIMIT: Duration = Duration::from_millis(500);
/// How long a program's library waits for all of it.
const LIBRARY_LIMIT: Duration = Duration::from_secs(45);
const _: () = assert!(
    TURN_LIMIT.as_millis() + PREPARE_LIMIT.as_millis() + WORD_LIMIT.as_millis() + SETTLE_LIMIT.as_millis()
        < LIBRARY_LIMIT.as_millis()
);
const _: () = assert!(FETCH_LIMIT.as_millis() + RESTORE_LIMIT.as_millis() < WORD_LIMIT.as_millis());
/// Instances that are asked where the program names none.
const TAKERS_ASKED_MAX: usize = 3;

/// A connection that is to go.
struct Connection {
    flow: FlowId,
    service: ServiceId,
    /// Which one it is, for the taker.
    of: HandedSession,
    socket: OwnedFd,
    data: Vec<u8>,
}

/// A host that may take it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    host: HostId,
    name: String,
    /// Where it hears SAL.
    at: SocketAddr,
}

/// Why a connection has not gone.
enum Failure {
    /// Nothing has been frozen: another taker may be asked.
    Untouched(No),
    /// It is of no use to ask another one.
    Final(No),
}

/// A socket that is on its way; it is no longer when this is dropped.
struct Claim<'a> {
    relocations: &'a Relocations,
    cookie: u64,
}

impl<'a> Claim<'a> {
    fn new(relocations: &'a Relocations, cookie: u64) -> Result<Self, No> {
        if relocations.moving.lock().insert(cookie) {
            return Ok(Self { relocations, cookie });
        }
        Err((Errno::EALREADY, "this connection is being handed over already".to_owned()))
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.relocations.moving.lock().remove(&self.cookie);
    }
}

/// Gives a program's connection to another host: to the one that `host` names, or to any other instance of its name.
///
/// # Errors
///
/// The program still has it, but for `ECONNABORTED`: nobody has it.
pub(in crate::agent) async fn give(agent: &Arc<Agent>, gift: Gift, flow: ServedFlow, host: &str) -> Result<(), No> {
    let (agent, host) = (Arc::clone(agent), host.to_owned());
    // A task of its own: the end of the program's connection to the agent does not stop it in the middle.
    let giving = tokio::spawn(async move {
        let given = give_whole(&agent, gift, flow, &host).await;
        agent.connections.rebalances.hear(&flow.app, &given);
        agent.connections.relocations.note(match &given {
            Ok(()) => Outcome::Gone,
            Err((Errno::ECONNABORTED, _)) => Outcome::Lost,
            Err(_) => Outcome::Stays,
        });
        given
    });
    giving.await.unwrap_or_else(|_| Err((Errno::EIO, "the agent has failed; see its log".to_owned())))
}

async fn give_whole(agent: &Agent, gift: Gift, flow: ServedFlow, host: &str) -> Result<(), No> {
    let cookie = socket_cookie(&gift.socket).map_err(|error| (Errno::ENOTSOCK, error.to_string()))?;
    let _claim = Claim::new(&agent.connections.relocations, cookie)?;
    let (of, client) = handed_session(agent, &flow)?;
    let _turn = turn(agent, client).await?;
    let connection = connection(gift, &flow, of)?;
    let places = places(agent, &connection.service, host).await?;
    let until = Instant::now() + PREPARE_LIMIT;
    let mut reasons = Vec::new();
    let mut last = Errno::ESRCH;
    for place in &places {
        match attempt(agent, &connection, place, until).await {
            Ok(()) => {
                tracing::info!(
                    flow = %connection.flow, service = %connection.service, to = %place.host,
                    "a connection has gone to another host"
                );
                return Ok(());
            }
            Err(Failure::Final((errno, text))) => {
                tracing::info!(
                    flow = %connection.flow, to = %place.host, why = text, "a connection has not gone to another host"
                );
                return Err((errno, text));
            }
            Err(Failure::Untouched((errno, text))) => {
                tracing::debug!(flow = %connection.flow, to = %place.host, why = text, "a taker was asked in vain");
                reasons.push(format!("{}: {text}", place.name));
                last = errno;
            }
        }
    }
    Err((last, format!("the connection stays here: {}", reasons.join("; "))))
}

async fn turn(agent: &Agent, client: Peer) -> Result<Turn, No> {
    match timeout(TURN_LIMIT, agent.connections.relocations.giving.wait(client)).await {
        Ok(Ok(turn)) => Ok(turn),
        Ok(Err(_)) => Err((Errno::EBUSY, "the agent is stopping".to_owned())),
        Err(_) => Err((
            Errno::EBUSY,
            "too many connections of this client's are on their way to other hosts; try again".to_owned(),
        )),
    }
}

/// Which one it is, and whose share it takes of the connections that go at one time: a client that answers nothing
/// holds up its own.
fn handed_session(agent: &Agent, flow: &ServedFlow) -> Result<(HandedSession, Peer), No> {
    let found = agent.core.0.with_sal(|sal, _| sal.flow(flow.id));
    let known = found.and_then(|found| Some((found.peer?, found.shares_as?, found.session, found.port)));
    let (client, peer, session, port) = known.ok_or((Errno::ENOTCONN, "the connection has just ended".to_owned()))?;
    let giver = agent.host.identity.host_id();
    Ok((HandedSession { giver, client, session, service: flow.service, port }, peer))
}

fn connection(gift: Gift, flow: &ServedFlow, of: HandedSession) -> Result<Connection, No> {
    let Gift { socket, data, .. } = gift;
    let data = data.as_ref().map_or_else(|| Ok(Vec::new()), |file| block_in_place(|| read(file)))?;
    Ok(Connection { flow: flow.id, service: flow.service, of, socket, data })
}

/// A connection that a program here has accepted by a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) struct ServedFlow {
    /// As the program's packets have it.
    pub app: Tuple,
    /// The flow.
    pub id: FlowId,
    /// The name by which the client has come.
    pub service: ServiceId,
}

/// The flow of a connection that a program here has accepted by a name, and the name.
pub(in crate::agent) fn served_flow(agent: &Agent, app: &Tuple) -> Option<(FlowId, ServiceId)> {
    let find = || agent.core.0.with_sal(|sal, _| sal.served_flow(app));
    find().or_else(|| {
        // The kernel may have opened it by a grant, and the core has not heard of it yet.
        agent.core.0.hear_of_flows();
        find()
    })
}

/// The data of a program's: never mapped, and wherever the program has left the file's position.
fn read(file: &File) -> Result<Vec<u8>, No> {
    let failed = |error: std::io::Error| (Errno::EIO, format!("the data of the socket cannot be read: {error}"));
    let len = file.metadata().map_err(failed)?.len().min(HANDED_DATA_MAX);
    let mut data = vec![0; usize::try_from(len).unwrap_or(0)];
    // A file that has shrunk since is an error here.
    file.read_exact_at(&mut data, 0).map_err(failed)?;
    Ok(data)
}

/// The hosts that are asked, in order.
async fn places(agent: &Agent, service: &ServiceId, host: &str) -> Result<Vec<Place>, No> {
    let name: Name = service.to_string().parse().map_err(|error| (Errno::EINVAL, format!("{error}")))?;
    let unknown = |why: String| (Errno::EHOSTUNREACH, format!("the other instances of the name are not known: {why}"));
    let (found, _) =
        home::instances(&agent.publishing.services, agent.routing.router.as_deref(), &name).await.map_err(unknown)?;
    agent.names.naming.learn(&found);
    let own = agent.host.identity.host_id();
    if host.is_empty() {
        let start = entropy::rng().map_or(0, |mut rng| rng.u32());
        return any_of(found, own, start);
    }
    let candidates: Vec<(HostId, String)> = found.iter().map(|one| (one.host, one.host_name.clone())).collect();
    let meant = naming::pick(host, &candidates, &format!("margay service show {name}"))
        .map_err(|text| (Errno::EHOSTUNREACH, format!("another instance of the name is wanted: {text}")))?;
    let place = found.into_iter().find(|one| one.host == meant && meant != own).map(Place::from);
    place.map(|place| vec![place]).ok_or_else(|| (Errno::EINVAL, "the connection is on that host already".to_owned()))
}

impl From<Instance> for Place {
    fn from(found: Instance) -> Self {
        let name = if found.host_name.is_empty() { found.host.to_string() } else { found.host_name };
        Self { host: found.host, name, at: found.address }
    }
}

/// Some of those that take new clients, of the highest priorities; among equals the first is another one each time.
fn any_of(mut found: Vec<Instance>, own: HostId, start: u32) -> Result<Vec<Place>, No> {
    let mut seen = HashSet::from([own]);
    found.retain(|one| one.weight > 0 && seen.insert(one.host));
    if found.is_empty() {
        let text = "no other host serves the name, and here no other process of this user takes it over, or the name \
                    is drained";
        return Err((Errno::ESRCH, text.to_owned()));
    }
    let start = start as usize % found.len();
    found.rotate_left(start);
    // Equals stay in their order.
    found.sort_by_key(|one| std::cmp::Reverse(one.priority));
    Ok(found.into_iter().take(TAKERS_ASKED_MAX).map(Place::from).collect())
}

/// Asks one taker, and the client.
async fn attempt(agent: &Agent, connection: &Connection, place: &Place, until: Instant) -> Result<(), Failure> {
    let failed = |errno: Errno| move |text: String| Failure::Untouched((errno, text));
    let going = agent.connections.relocations.going_to.wait(Peer::Member(place.host));
    let _going = timeout_at(until, going)
        .await
        .map_err(|_| failed(Errno::EBUSY)("too many connections are on their way to it; try again".to_owned()))?;
    let seed = entropy::seed().map_err(|error| Failure::Final((Errno::EIO, error.to_string())))?;
    let ticket = Ticket(std::array::from_fn(|at| seed[at]));
    let mailbox = agent.connections.relocations.mailboxes.open(HandOverKey::Giving(ticket));
    let mailbox = mailbox.ok_or_else(|| Failure::Final((Errno::EIO, "two hand-overs have one ticket".to_owned())))?;
    let chain = agent.core.0.with_sal(|sal, _| sal.certificate_for(&connection.service));
    let late = |_| failed(Errno::ETIMEDOUT)("it has not answered in time".to_owned());
    let offered = timeout_at(until, offer(agent, connection, place, &ticket, &chain)).await.map_err(late)?;
    let stream = offered.map_err(failed(Errno::EHOSTUNREACH))?;
    let (flow, taker, at) = (connection.flow, place.host, place.at);
    let begun = agent.core.0.with_sal(|sal, now| sal.hand_over(now, flow, ticket, taker, at));
    begun.map_err(|error| Failure::Final((errno_of(error), error.to_string())))?;
    let until = Instant::now() + WORD_LIMIT;
    let giving = Giving {
        agent,
        ticket,
        mailbox,
        stream,
        until,
        last: None,
        is_fetched: false,
        was_sent: false,
        is_settled: false,
    };
    giving.run(connection, taker).await
}

/// Offers the connection to a taker, by a stream that is there already or by a new one.
async fn offer(
    agent: &Agent,
    connection: &Connection,
    place: &Place,
    ticket: &Ticket,
    chain: &[u8],
) -> Result<Outgoing, String> {
    let (service, of) = (&connection.service, &connection.of);
    if let Some(mut stream) = agent.connections.relocations.idle.take(place.host, service) {
        // It may have ended just now.
        if stream.offer(ticket, of, chain.to_vec(), &connection.data).await.is_ok() {
            return Ok(stream);
        }
    }
    let mut stream = Outgoing::open(agent, service, place.host, place.at).await?;
    stream.offer(ticket, of, chain.to_vec(), &connection.data).await?;
    Ok(stream)
}

fn errno_of(error: HandOverError) -> Errno {
    match error {
        HandOverError::NotOpen => Errno::ENOTCONN,
        HandOverError::NotTcp => Errno::EPROTONOSUPPORT,
        HandOverError::Chained => Errno::EOPNOTSUPP,
        HandOverError::Here => Errno::EINVAL,
        HandOverError::Busy => Errno::EALREADY,
    }
}

/// Where the connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Gone,
    Stays,
    Lost,
}

/// Where a connection is of which the client's host says that it stays, by what its taker says of it in time.
fn compared(settled: Result<Result<bool, String>, Elapsed>) -> End {
    match settled {
        Ok(Ok(true)) => End::Gone,
        Ok(Ok(false)) => End::Stays,
        Ok(Err(why)) => {
            // The taker's agent has ended, and with it whatever it had frozen.
            tracing::debug!(why, "the taker's agent has ended before it said whether it has a connection");
            End::Stays
        }
        Err(_) => End::Lost,
    }
}

/// A connection that the client has been asked to fetch.
struct Giving<'a> {
    agent: &'a Agent,
    ticket: Ticket,
    mailbox: Mailbox,
    stream: Outgoing,
    /// When it is lost if the core has said nothing.
    until: Instant,
    /// A word that came while something else was waited for.
    last: Option<HandOver>,
    /// Nothing of the flow leaves this host.
    is_fetched: bool,
    /// The taker may have the whole connection.
    was_sent: bool,
    /// The taker has said its last word of this connection.
    is_settled: bool,
}

impl Giving<'_> {
    /// Lets the connection go to `taker`, or keeps it; the stream to the taker is kept for others.
    async fn run(mut self, connection: &Connection, taker: HostId) -> Result<(), Failure> {
        let given = self.give(connection).await;
        if given.is_ok() && !self.is_settled {
            // The client's word has overtaken the taker's, which was said before. A stream that is closed before that
            // has been read is reset.
            let answer = timeout(SETTLE_LIMIT, self.stream.answer()).await;
            self.is_settled = matches!(answer, Ok(Ok(Answer::Restored)));
        }
        if self.is_settled {
            self.agent.connections.relocations.idle.keep(taker, connection.service, self.stream);
        } else {
            // Others to the same host may lead to an agent that is gone, too.
            self.agent.connections.relocations.idle.forget(taker);
        }
        given
    }

    /// Taker and client are asked at one time: either answer takes a round trip or more.
    async fn give(&mut self, connection: &Connection) -> Result<(), Failure> {
        let asked = tokio::join!(self.stream.await_willing(), timeout(FETCH_LIMIT, self.mailbox.next()));
        let refused = |text: String| Failure::Untouched((Errno::EOPNOTSUPP, text));
        match asked {
            (Ok(()), Ok(HandOver::Fetched(_))) => self.is_fetched = true,
            // Nothing is frozen, and another taker may be asked.
            (Err(why), Ok(HandOver::Refused { .. })) => return Err(refused(why)),
            (Ok(()), Ok(HandOver::Refused { code, .. })) => return Err(refused(refusal_text(code))),
            (willing, word) => {
                self.last = word.ok();
                let text = "the client's host has not fetched the connection in time";
                let why = willing.err().unwrap_or_else(|| text.to_owned());
                return match self.give_up(None, (Errno::ETIMEDOUT, why.clone())).await {
                    Err(Failure::Final((Errno::ETIMEDOUT, _))) => Err(Failure::Untouched((Errno::ETIMEDOUT, why))),
                    ended => ended,
                };
            }
        }
        // The program's own descriptor stays with the connection, for as long as that may stay here.
        let socket = match connection.socket.try_clone() {
            Ok(socket) => socket,
            Err(error) => return self.give_up(None, (Errno::EIO, error.to_string())).await,
        };
        let frozen = match block_in_place(|| Frozen::freeze(socket)) {
            Ok(frozen) => frozen,
            Err((_, error)) => return self.give_up(None, (Errno::EOPNOTSUPP, error.to_string())).await,
        };
        if let Err(why) = self.send(&frozen, &connection.data).await {
            return self.give_up(Some(frozen), why).await;
        }
        self.with_core(Sal::await_word);
        let text = "the client's host has not gone over to the other one";
        self.finish(Some(frozen), (Errno::ETIMEDOUT, text.to_owned())).await
    }

    fn with_core(&self, act: impl FnOnce(&mut Sal, margay_core::Instant, Ticket)) {
        self.agent.core.0.with_sal(|sal, now| act(sal, now, self.ticket));
    }

    /// Sends the connection, and waits until it is there.
    async fn send(&mut self, frozen: &Frozen, data: &[u8]) -> Result<(), No> {
        let record = block_in_place(|| frozen.dump()).map_err(|error| (Errno::EOPNOTSUPP, error.to_string()))?;
        let unreached = |why| (Errno::EHOSTUNREACH, why);
        self.stream.send(&record.encode(), data).await.map_err(unreached)?;
        // Whoever has not heard that sets nothing up. It may be heard although saying it fails.
        self.was_sent = true;
        self.stream.end().await.map_err(unreached)?;
        tokio::select! {
            biased;
            answer = self.stream.answer() => match answer.map_err(unreached)? {
                Answer::Restored => {
                    self.is_settled = true;
                    Ok(())
                }
                Answer::Refused(why) => {
                    (self.is_settled, self.was_sent) = (true, false);
                    Err((Errno::EOPNOTSUPP, why))
                }
                Answer::Willing => Err(unreached("the other agent answers what was not asked".to_owned())),
            },
            word = self.mailbox.next() => {
                let has_gone = matches!(word, HandOver::Gone(_));
                self.last = Some(word);
                let text = "the client's host has let go of the hand-over";
                if has_gone { Ok(()) } else { Err((Errno::ETIMEDOUT, text.to_owned())) }
            }
            () = sleep(RESTORE_LIMIT) => {
                Err((Errno::ETIMEDOUT, "the other host has not set up the connection in time".to_owned()))
            }
        }
    }

    /// The connection is to stay, unless the client has gone over already.
    async fn give_up(&mut self, frozen: Option<Frozen>, why: No) -> Result<(), Failure> {
        self.with_core(Sal::cancel_hand_over);
        self.finish(frozen, why).await
    }

    /// Does as the client's word says. `why` it stays, if it does.
    async fn finish(&mut self, frozen: Option<Frozen>, why: No) -> Result<(), Failure> {
        let end = match self.end().await {
            End::Stays if self.was_sent => self.compare().await,
            end => end,
        };
        match end {
            // The client cannot have gone over to what was never sent.
            End::Lost if !self.is_fetched => Err(Failure::Final(why)),
            End::Stays => {
                // The program goes on with its own descriptor.
                drop(frozen.map(Frozen::thaw));
                Err(Failure::Final(why))
            }
            End::Gone => {
                close(frozen);
                Ok(())
            }
            End::Lost => {
                close(frozen);
                let text = "nobody could say in time which host has the connection, so that it has ended here";
                Err(Failure::Final((Errno::ECONNABORTED, text.to_owned())))
            }
        }
    }

    /// The client's host says that the connection stays, and the taker may have it. Both hear of that what the client's
    /// host says to the one and to the other: where it has told the taker that the connection is there, it is there.
    /// The taker answers once it has stopped waiting for the client, which may take longer than the client's word.
    async fn compare(&mut self) -> End {
        let settled = timeout_at(self.until, self.stream.settle()).await;
        self.is_settled = matches!(settled, Ok(Ok(_)));
        let end = compared(settled);
        if end == End::Gone {
            let host = self.agent.host.identity.host_id();
            tracing::warn!(
                ticket = %self.ticket, %host,
                "a client's host has said that its connection stays, and to another host that it goes there: it has gone"
            );
        }
        end
    }

    async fn end(&mut self) -> End {
        // A taker that has said its last word says no more: its stream can only end, with its agent. The client, which
        // still waits for that agent, would keep the connection frozen for its whole lease.
        let mut is_watched = self.is_settled;
        loop {
            if let Some(word) = self.last.take()
                && let Some(end) = self.hear(word)
            {
                return end;
            }
            tokio::select! {
                biased;
                word = timeout_at(self.until, self.mailbox.next()) => match word {
                    Ok(word) => self.last = Some(word),
                    Err(_) => return End::Lost,
                },
                _ = self.stream.answer(), if is_watched => {
                    is_watched = false;
                    self.is_settled = false;
                    self.with_core(Sal::cancel_hand_over);
                }
            }
        }
    }

    /// What the core's word says of the connection's end, if it says so.
    fn hear(&mut self, word: HandOver) -> Option<End> {
        match word {
            HandOver::Gone(_) => Some(End::Gone),
            HandOver::Stays(_) | HandOver::Refused { .. } => Some(End::Stays),
            HandOver::Lost(_) => Some(End::Lost),
            // It came too late: the connection is cancelled already.
            HandOver::Fetched(_) => {
                self.is_fetched = true;
                None
            }
            HandOver::Awaits { .. } | HandOver::Taken(_) | HandOver::Dropped(_) => None,
        }
    }
}

/// Ends the connection on this host without a word.
fn close(frozen: Option<Frozen>) {
    if let Some(Err(error)) = frozen.map(Frozen::close_silently) {
        tracing::error!(%error, "the socket of a connection that has gone could not be closed; its program must do so");
    }
}

#[cfg(test)]
mod test {
    use std::io::{Seek as _, Write as _};

    use super::super::Words;
    use super::*;
    use crate::agent::instance_addresses::InstanceAddresses;

    fn instance(n: u8, priority: u32, weight: u32) -> Instance {
        Instance {
            host: HostId([n; 16]),
            host_name: format!("host{n}"),
            address: SocketAddr::from(([10, 0, 0, n], 54324)),
            name: "web.shop".to_owned(),
            prefix: "sid:ab/8".parse().expect("literal"),
            weight,
            priority,
            sticky: false,
            fence: None,
            zero_weight: None,
        }
    }

    fn asked(found: &[Instance], start: u32) -> Vec<String> {
        let places = any_of(found.to_vec(), HostId([1; 16]), start).expect("there are some");
        places.into_iter().map(|place| place.name).collect()
    }

    #[tokio::test]
    async fn a_connection_that_is_given_twice_is_on_its_way_once() {
        let relocations = Relocations::new(&Words::default(), &InstanceAddresses::default());
        let claim = Claim::new(&relocations, 7);
        assert!(claim.is_ok() && Claim::new(&relocations, 8).is_ok());
        let Err((errno, why)) = Claim::new(&relocations, 7) else { panic!("it is given twice") };
        assert_eq!((errno, why.as_str()), (Errno::EALREADY, "this connection is being handed over already"));
        drop(claim);
        assert!(Claim::new(&relocations, 7).is_ok());
    }

    #[test]
    fn those_of_the_highest_priority_are_asked_first_each_in_its_turn_and_few() {
        let found = [
            instance(1, 9, 1),
            instance(2, 1, 1),
            instance(3, 5, 1),
            instance(4, 5, 1),
            instance(4, 5, 1),
            instance(5, 9, 0),
            instance(6, 0, 1),
        ];
        assert_eq!(asked(&found, 0), ["host3", "host4", "host2"]);
        assert_eq!(asked(&found, 2), ["host4", "host3", "host2"]);
        let nobody = any_of(found[..1].to_vec(), HostId([1; 16]), 3).expect_err("this host alone");
        assert_eq!(nobody.0, Errno::ESRCH);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_stays_where_its_taker_says_so_or_has_ended_and_never_because_it_is_silent() {
        assert_eq!(compared(Ok(Ok(true))), End::Gone);
        assert_eq!(compared(Ok(Ok(false))), End::Stays);
        assert_eq!(compared(Ok(Err("reset".to_owned()))), End::Stays);
        let silent = timeout(SETTLE_LIMIT, std::future::pending()).await;
        assert_eq!(compared(silent), End::Lost);
    }

    #[test]
    fn data_is_read_from_its_beginning() {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(b"logged in as anna").expect("written");
        file.seek(std::io::SeekFrom::End(0)).expect("moved");
        assert_eq!(read(&file).expect("read"), b"logged in as anna");
    }
}
