//! What the core says of hand-overs, each for whoever carries it out.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use margay_core::{HandOver, PeerTicket, Ticket};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until};

/// The core's words of one hand-over are fewer.
const WORDS_MAX: usize = 16;
/// Hand-overs of which this host knows nothing yet, until they are refused: all that the core awaits, of which one
/// client has its share.
const STRAYS_MAX: usize = margay_core::fetch::HAND_OVERS_MAX;
/// For so long the giver's word may come after the client's flow: giver and client are asked at one time.
const STRAY_PATIENCE: Duration = Duration::from_secs(2);

/// What a hand-over is known by on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HandOverKey {
    /// By the ticket that this host has drawn, which gives the connection.
    Giving(Ticket),
    /// By the client's host and the ticket, where the connection is taken.
    Taking(PeerTicket),
}

/// All hand-overs that run on this host.
#[derive(Default)]
pub struct Mailboxes {
    open: Mutex<HashMap<HandOverKey, mpsc::Sender<HandOver>>>,
    /// The earliest first.
    strays: Mutex<VecDeque<(Instant, PeerTicket, HandOver)>>,
    has_strays: Notify,
}

/// What the core says of one of them.
pub struct Mailbox {
    all: Arc<Mailboxes>,
    key: HandOverKey,
    words: mpsc::Receiver<HandOver>,
}

impl Mailboxes {
    /// For the words about a hand-over; `None` where somebody hears them already.
    pub fn open(self: &Arc<Self>, key: HandOverKey) -> Option<Mailbox> {
        let (sender, words) = mpsc::channel(WORDS_MAX);
        let mut open = self.open.lock();
        if open.contains_key(&key) {
            return None;
        }
        let mut strays = self.strays.lock();
        let early = strays.iter().position(|(_, stray, _)| HandOverKey::Taking(*stray) == key);
        if let Some((_, _, word)) = early.and_then(|at| strays.remove(at)) {
            // The channel is empty.
            let _ = sender.try_send(word);
        }
        open.insert(key, sender);
        Some(Mailbox { all: Arc::clone(self), key, words })
    }

    /// Delivers a word of the core. Quick, and never calls back.
    pub fn put(&self, word: HandOver) {
        let open = self.open.lock();
        match open.get(&key_of(&word)) {
            Some(sender) => {
                // Whoever heard it has just ended.
                let _ = sender.try_send(word);
            }
            None => self.note_stray(word),
        }
    }

    /// A client is to fetch a connection that nobody gives to this host, as far as is known.
    fn note_stray(&self, word: HandOver) {
        let mut strays = self.strays.lock();
        match word {
            HandOver::Awaits { ticket, .. } if strays.len() < STRAYS_MAX => {
                strays.push_back((Instant::now() + STRAY_PATIENCE, ticket, word));
                self.has_strays.notify_one();
            }
            HandOver::Dropped(ticket) => strays.retain(|(_, stray, _)| *stray != ticket),
            _ => {}
        }
    }

    /// The next one that nobody here has come to know of in time.
    pub async fn next_stray(&self) -> PeerTicket {
        loop {
            let earliest = self.strays.lock().front().map(|(until, ..)| *until);
            let Some(until) = earliest else {
                self.has_strays.notified().await;
                continue;
            };
            sleep_until(until).await;
            let mut strays = self.strays.lock();
            if strays.front().is_some_and(|(until, ..)| *until <= Instant::now())
                && let Some((_, ticket, _)) = strays.pop_front()
            {
                return ticket;
            }
        }
    }
}

impl Mailbox {
    /// The next word. Cancel-safe.
    pub async fn next(&mut self) -> HandOver {
        match self.words.recv().await {
            Some(word) => word,
            // The sender is there as long as this is.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        self.all.open.lock().remove(&self.key);
    }
}

fn key_of(word: &HandOver) -> HandOverKey {
    match word {
        HandOver::Fetched(ticket)
        | HandOver::Refused { ticket, .. }
        | HandOver::Stays(ticket)
        | HandOver::Gone(ticket)
        | HandOver::Lost(ticket) => HandOverKey::Giving(*ticket),
        HandOver::Awaits { ticket, .. } | HandOver::Taken(ticket) | HandOver::Dropped(ticket) => {
            HandOverKey::Taking(*ticket)
        }
    }
}

#[cfg(test)]
mod test {
    use std::net::SocketAddr;

    use margay_core::key::HostId;
    use margay_core::name::ServiceId;
    use margay_core::{HandedSession, Tuple};
    use margay_wire::SessionId;

    use super::*;

    const CLIENT: HostId = HostId([1; 16]);

    fn giving(n: u8) -> HandOverKey {
        HandOverKey::Giving(Ticket([n; 16]))
    }

    fn taking(peer: HostId, n: u8) -> PeerTicket {
        PeerTicket { peer, ticket: Ticket([n; 16]) }
    }

    fn awaits(peer: HostId, n: u8) -> HandOver {
        let at = SocketAddr::from(([198, 18, 0, 1], 80));
        HandOver::Awaits {
            ticket: taking(peer, n),
            of: HandedSession {
                giver: HostId([n; 16]),
                client: peer,
                session: SessionId([n; 16]),
                service: ServiceId::default(),
                port: 80,
            },
            app: Tuple { protocol: 6, source: at, destination: at },
        }
    }

    #[tokio::test]
    async fn each_hears_its_own() {
        let all = Arc::new(Mailboxes::default());
        let mut mailbox = all.open(giving(1)).expect("the first");
        assert!(all.open(giving(1)).is_none());
        all.put(HandOver::Gone(Ticket([2; 16])));
        all.put(HandOver::Taken(taking(CLIENT, 1)));
        all.put(HandOver::Stays(Ticket([1; 16])));
        assert_eq!(mailbox.next().await, HandOver::Stays(Ticket([1; 16])));
        drop(mailbox);
        assert!(all.open(giving(1)).is_some(), "it is free again");
    }

    #[tokio::test]
    async fn the_same_ticket_from_another_host_is_another_hand_over() {
        let all = Arc::new(Mailboxes::default());
        let thief = HostId([2; 16]);
        all.put(awaits(thief, 7));
        let mut mailbox = all.open(HandOverKey::Taking(taking(CLIENT, 7))).expect("nobody hears it yet");
        all.put(awaits(thief, 7));
        all.put(HandOver::Taken(taking(thief, 7)));
        all.put(awaits(CLIENT, 7));
        assert_eq!(mailbox.next().await, awaits(CLIENT, 7));
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_comes_to_know_of_is_refused_and_the_rest_is_kept_for_who_does() {
        let all = Arc::new(Mailboxes::default());
        all.put(HandOver::Gone(Ticket([1; 16])));
        [2, 3, 4].into_iter().for_each(|n| all.put(awaits(CLIENT, n)));
        all.put(HandOver::Dropped(taking(CLIENT, 4)));
        let mut late = all.open(HandOverKey::Taking(taking(CLIENT, 2))).expect("nobody hears it yet");
        assert_eq!(late.next().await, awaits(CLIENT, 2));
        assert_eq!(all.next_stray().await, taking(CLIENT, 3));
        assert!(all.strays.lock().is_empty());
    }
}
