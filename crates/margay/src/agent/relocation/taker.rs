//! The taker's part: a connection of another host is set up here, and goes to a program that takes over its name.
//!
//! It stays frozen until the client's host has gone over. Whatever fails before leaves nothing here, and the giver goes
//! on with the connection.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use margay_control::permits::{BacklogPlace, Permit};
use margay_core::fair_table::Peer;
use margay_core::key::{HostId, HostPublic};
use margay_core::name::{Prefix, ServiceId};
use margay_core::{HandOver, HandedSession, PeerTicket, Tuple};
use margay_datapath::repair::{Restored, TcpRecord, restore};
use rustix::fs::{MemfdFlags, memfd_create};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::block_in_place;
use tokio::time::{Instant, timeout_at};

use super::mailbox::{HandOverKey, Mailbox};
use super::transfer::{Asked, Incoming, Offered, STEP_LIMIT};
use super::{Outcome, WORD_LIMIT, counting};
use crate::agent::programs::hand_over::Gift;
use crate::agent::{Agent, core::CoreHandle};

/// Until the client's flow is here, once the giver was told that it may send.
const AWAIT_LIMIT: Duration = Duration::from_secs(10);
// A giver whose client says that the connection stays hears in time that it is not here.
const _: () = assert!(AWAIT_LIMIT.as_millis() + 2 * STEP_LIMIT.as_millis() < WORD_LIMIT.as_millis());
/// After an accept that has failed, for want of descriptors most likely.
const PAUSE: Duration = Duration::from_millis(100);

/// Takes connections that other hosts bring, until the task is ended.
pub(super) async fn run(agent: Arc<Agent>, listener: TcpListener) {
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection of another host could not be taken");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let from = from.ip().to_canonical();
        // Whose it is shows later.
        let place = match agent.connections.relocations.unproved.enter(from) {
            Ok(place) => place,
            Err(full) => {
                // Closed at once, so that the giver tries another host.
                tracing::info!(%from, %full, "a stream of another host's agent was refused");
                continue;
            }
        };
        let agent = Arc::clone(&agent);
        tokio::spawn(async move {
            if let Err(why) = serve(&agent, stream, place).await {
                tracing::info!(why, "a stream of another host's agent has ended");
            }
        });
    }
}

/// The connection that a stream has brought last, until its client's word is known.
struct Undecided {
    ticket: PeerTicket,
    /// Whether it is here, once that is known.
    is_taken: oneshot::Receiver<bool>,
}

/// Takes one connection after the other from a stream, and answers questions. Anybody may open a stream: one that has
/// shown no right to a name is closed with the refusal, and may be closed for another one before it asks for anything.
async fn serve(agent: &Arc<Agent>, stream: TcpStream, mut place: BacklogPlace) -> Result<(), String> {
    let first = async {
        let mut incoming = Incoming::accept(&agent.host.local.host_key, stream).await?;
        Ok(incoming.asked(false).await?.map(|asked| (incoming, asked)))
    };
    let first: Result<_, String> = tokio::select! {
        first = first => first,
        () = place.displaced() => Err("too many streams at once of hosts that have shown no right to a name".to_owned()),
    };
    let Some((incoming, asked)) = first? else { return Ok(()) };
    let mut giving = Giving { agent, incoming, place: Place::Unproved(place), last: None };
    let mut next = Some(asked);
    while let Some(asked) = next {
        giving.answer(asked).await?;
        next = giving.incoming.asked(giving.is_proved()).await?;
    }
    Ok(())
}

/// What a stream takes room of.
#[expect(dead_code, reason = "a place is given back when it is dropped")]
enum Place {
    /// Of those that have shown no right to a name of this host yet.
    Unproved(BacklogPlace),
    /// Of its giver's share.
    Proved(Permit),
}

/// A stream of a giver.
struct Giving<'a> {
    agent: &'a Arc<Agent>,
    incoming: Incoming,
    place: Place,
    last: Option<Undecided>,
}

impl Giving<'_> {
    const fn is_proved(&self) -> bool {
        matches!(self.place, Place::Proved(_))
    }

    fn giver(&self) -> Peer {
        Peer::Member(self.incoming.giver.id())
    }

    /// The giver has shown a right to a name of this host.
    fn note_proved(&mut self) -> Result<(), String> {
        if !self.is_proved() {
            let permit = self.agent.connections.relocations.streams.take(self.giver(), 1);
            self.place = Place::Proved(permit.map_err(|full| full.to_string())?);
        }
        Ok(())
    }

    /// An error ends the stream.
    async fn answer(&mut self, asked: Asked) -> Result<(), String> {
        match asked {
            Asked::Connection(offered) => self.take_connection(offered).await,
            Asked::Count(question) => {
                let counted = counting::answer(self.agent, &self.incoming.giver, &question).await;
                match counted.and_then(|counted| self.note_proved().map(|()| counted)) {
                    Ok(counted) => self.incoming.tell_count(counted).await,
                    Err(why) => self.refuse(why).await,
                }
            }
            // Whoever asks only this would keep its place for ever.
            Asked::Settle if !self.is_proved() => self.refuse("the stream has brought no connection".to_owned()).await,
            Asked::Settle => {
                let is_taken = settle(self.agent, self.last.take()).await;
                self.incoming.tell_settled(is_taken).await
            }
        }
    }

    /// Ends a stream whose giver has shown no right to a name.
    async fn refuse(&mut self, why: String) -> Result<(), String> {
        self.incoming.refuse(&why).await;
        if self.is_proved() { Ok(()) } else { Err(why) }
    }

    async fn take_connection(&mut self, offered: Offered) -> Result<(), String> {
        let relocations = &self.agent.connections.relocations;
        // Anybody can have a right to a name; only few have one to a name that is taken over here.
        let admitted = prove(self.agent, &self.incoming.giver, &offered).and_then(|()| admit(self.agent, &offered));
        let mailbox = match admitted.and_then(|mailbox| self.note_proved().map(|()| mailbox)) {
            Ok(mailbox) => mailbox,
            Err(why) => {
                self.refuse(why.clone()).await?;
                note(self.agent, Err(why));
                return Ok(());
            }
        };
        let turn = relocations.taking.wait(self.giver()).await.map_err(|_| "the agent stops".to_owned())?;
        self.last = None;
        let ticket = offered.ticket;
        match take(self.agent, &mut self.incoming, offered, mailbox).await {
            Ok(taken) => {
                let agent = Arc::clone(self.agent);
                let (decided, is_taken) = oneshot::channel();
                self.last = Some(Undecided { ticket, is_taken });
                // The client's word and the program take their time; the next connection does not wait for them.
                tokio::spawn(async move {
                    note(&agent, taken.finish(&agent, decided).await);
                    drop(turn);
                });
            }
            Err(why) => {
                self.incoming.refuse(&why).await;
                note(self.agent, Err(why));
            }
        }
        Ok(())
    }
}

/// The client's host has told the giver that the connection stays. It has told this host that it comes, or it cannot
/// any more: both have not got the connection, whatever a client says to either.
async fn settle(agent: &Agent, last: Option<Undecided>) -> bool {
    let Some(Undecided { ticket, is_taken }) = last else { return false };
    if agent.core.0.with_sal(|sal, now| sal.refuse_hand_over(now, ticket)) {
        agent.connections.relocations.mailboxes.put(HandOver::Dropped(ticket));
    }
    is_taken.await.unwrap_or(false)
}

fn note(agent: &Agent, taken: Result<(), String>) {
    if let Err(why) = &taken {
        tracing::info!(why, "a connection of another host was not taken");
    }
    agent.connections.relocations.note(if taken.is_ok() { Outcome::Taken } else { Outcome::Dropped });
}

/// A connection that is set up, and frozen.
struct Taken {
    restored: Restored,
    data: Vec<u8>,
    service: ServiceId,
    giver: HostId,
    mailbox: Mailbox,
}

/// Sets a connection up that is offered, and lets the client go over.
async fn take(agent: &Agent, incoming: &mut Incoming, offered: Offered, mut mailbox: Mailbox) -> Result<Taken, String> {
    let ticket = offered.ticket;
    let giver = Peer::Member(incoming.giver.id());
    let mut room = agent.connections.relocations.taken_bytes.take(giver, 0).map_err(|full| full.to_string())?;
    let prepared = prepare(&agent.core, incoming, &offered, (&mut mailbox, &mut room)).await;
    let (restored, data) = match prepared {
        Ok(prepared) => prepared,
        Err(why) => {
            agent.core.0.with_sal(|sal, now| sal.refuse_hand_over(now, ticket));
            return Err(why);
        }
    };
    // Before the client goes over: the giver, which hears of that, reads no more of this connection then.
    if let Err(why) = incoming.confirm().await {
        // The client decides all the same.
        tracing::debug!(why, "the giver could not be told that the connection is here");
    }
    agent.core.0.with_sal(|sal, now| sal.take_over(now, ticket));
    Ok(Taken { restored, data, service: offered.of.service, giver: incoming.giver.id(), mailbox })
}

/// Whether the giver may speak for the connection's name.
fn prove(agent: &Agent, giver: &HostPublic, offered: &Offered) -> Result<(), String> {
    let service = &offered.of.service;
    // Programs trust what is said of a connection: without proof, nobody says anything.
    if !agent.core.0.with_sal(|sal, _| sal.may_serve(service, giver, &offered.chain))? {
        return Err(
            "this host trusts no authority of the name, so that nobody can hand over its connections".to_owned()
        );
    }
    Ok(())
}

/// Whether the connection would be taken.
fn admit(agent: &Agent, offered: &Offered) -> Result<Mailbox, String> {
    let service = &offered.of.service;
    if !agent.connections.programs.takers.has(None, &Prefix::from(*service)) {
        agent.connections.relocations.follow_takers(agent);
        return Err("no program of this host takes over the name; start it there, and wait until it says so".to_owned());
    }
    let mailbox = agent.connections.relocations.mailboxes.open(HandOverKey::Taking(offered.ticket));
    mailbox.ok_or_else(|| "this connection is being handed over already".to_owned())
}

/// Sets the connection up, frozen. Gives it with the program's data.
async fn prepare(
    core: &CoreHandle,
    incoming: &mut Incoming,
    offered: &Offered,
    (mailbox, room): (&mut Mailbox, &mut Permit),
) -> Result<(Restored, Vec<u8>), String> {
    incoming.agree().await?;
    let app = awaited(offered, mailbox).await?;
    let parts = incoming.parts(offered.data_length, room).await?;
    let record = TcpRecord::decode(&parts.record).map_err(|error| error.to_string())?;
    let mut inject = |packet: &[u8]| {
        core.0.give_to_kernel(packet);
        Ok::<(), std::io::Error>(())
    };
    let restored = block_in_place(|| restore(&record, app.source, app.destination, &mut inject));
    let restored = restored.map_err(|error| error.to_string())?;
    for note in restored.notes() {
        tracing::info!(service = %offered.of.service, %note, "of a connection of another host");
    }
    Ok((restored, parts.data))
}

/// The client's flow: its five-tuple as the connection's own packets have it. What its host has asked for must be what
/// the giver gives.
async fn awaited(offered: &Offered, mailbox: &mut Mailbox) -> Result<Tuple, String> {
    let until = Instant::now() + AWAIT_LIMIT;
    loop {
        let word = timeout_at(until, mailbox.next()).await;
        match word.map_err(|_| "the client's host has not fetched the connection in time".to_owned())? {
            HandOver::Awaits { of, app, .. } => {
                let other = || {
                    let HandedSession { giver, client, session, port, .. } = of;
                    format!(
                        "host {client} fetches session {session}, port {port}, of host {giver}: another one than is \
                         given"
                    )
                };
                return (of == offered.of).then_some(app).ok_or_else(other);
            }
            HandOver::Dropped(_) => return Err("the client's host has let go of the hand-over".to_owned()),
            _ => {}
        }
    }
}

impl Taken {
    /// Does as the client's word says.
    async fn finish(mut self, agent: &Agent, is_taken: oneshot::Sender<bool>) -> Result<(), String> {
        let decided = self.decided().await;
        // The giver asks only where its client's word is another one.
        let _ = is_taken.send(decided.is_ok());
        if let Err(why) = decided {
            self.restored.discard();
            return Err(why);
        }
        self.go_on(agent).await
    }

    /// Waits for the client's word.
    async fn decided(&mut self) -> Result<(), String> {
        let until = Instant::now() + WORD_LIMIT;
        loop {
            let word = timeout_at(until, self.mailbox.next()).await;
            match word.map_err(|_| "the client's word has not come in time".to_owned())? {
                HandOver::Taken(_) => return Ok(()),
                HandOver::Dropped(_) => return Err("the connection stays where it was".to_owned()),
                _ => {}
            }
        }
    }

    /// The connection is here: it goes on, and a program gets it.
    async fn go_on(self, agent: &Agent) -> Result<(), String> {
        let lost = |why: String| format!("its client has come, but no program has it, and it has ended: {why}");
        let socket = block_in_place(|| self.restored.go_on()).map_err(|error| lost(error.to_string()))?;
        let data = memory_file(&self.data).map_err(|error| lost(error.to_string()))?;
        let gift = Gift { name: Prefix::from(self.service), socket, data };
        agent.connections.programs.takers.give(None, gift).await.map_err(|(_, why)| lost(why))?;
        tracing::info!(service = %self.service, giver = %self.giver, "a connection of another host goes on here");
        Ok(())
    }
}

/// A file that has the data; none for none.
fn memory_file(data: &[u8]) -> std::io::Result<Option<File>> {
    if data.is_empty() {
        return Ok(None);
    }
    let file = File::from(memfd_create("margay-hand-over", MemfdFlags::CLOEXEC)?);
    file.write_all_at(data, 0)?;
    Ok(Some(file))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn data_is_given_as_a_file_that_is_read_from_its_beginning() {
        assert!(memory_file(&[]).expect("nothing to do").is_none());
        let file = memory_file(b"anna").expect("made").expect("there is data");
        let mut read = [0; 4];
        file.read_exact_at(&mut read, 0).expect("as long");
        assert_eq!((&read, file.metadata().expect("known").len()), (b"anna", 4));
    }
}
