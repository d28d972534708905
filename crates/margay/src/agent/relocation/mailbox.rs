//! What the core says of hand-overs, each for whoever carries it out.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use margay_core::{HandOver, Ticket};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until};

/// The core's words of one hand-over are fewer.
const WORDS_MAX: usize = 16;
/// Hand-overs of which this host knows nothing yet, until they are refused; more are left to the core's own time-out.
const STRAYS_MAX: usize = 1024;
/// For so long the giver's word may come after the client's flow: giver and client are asked at one time.
const STRAY_PATIENCE: Duration = Duration::from_secs(2);

/// All hand-overs that run on this host.
#[derive(Default)]
pub struct Mailboxes {
    open: Mutex<HashMap<Ticket, mpsc::Sender<HandOver>>>,
    /// The earliest first.
    strays: Mutex<VecDeque<(Instant, HandOver)>>,
    has_strays: Notify,
}

/// What the core says of one of them.
pub struct Mailbox {
    all: Arc<Mailboxes>,
    ticket: Ticket,
    words: mpsc::Receiver<HandOver>,
}

impl Mailboxes {
    /// For the words about a ticket; `None` where somebody hears them already.
    pub fn open(self: &Arc<Self>, ticket: Ticket) -> Option<Mailbox> {
        let (sender, words) = mpsc::channel(WORDS_MAX);
        let mut open = self.open.lock();
        if open.contains_key(&ticket) {
            return None;
        }
        let mut strays = self.strays.lock();
        let early = strays.iter().position(|(_, word)| ticket_of(word) == ticket);
        if let Some((_, word)) = early.and_then(|at| strays.remove(at)) {
            // The channel is empty.
            let _ = sender.try_send(word);
        }
        open.insert(ticket, sender);
        Some(Mailbox { all: Arc::clone(self), ticket, words })
    }

    /// Delivers a word of the core. Quick, and never calls back.
    pub fn put(&self, word: HandOver) {
        let open = self.open.lock();
        match open.get(&ticket_of(&word)) {
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
            HandOver::Awaits { .. } if strays.len() < STRAYS_MAX => {
                strays.push_back((Instant::now() + STRAY_PATIENCE, word));
                self.has_strays.notify_one();
            }
            HandOver::Dropped(ticket) => strays.retain(|(_, stray)| ticket_of(stray) != ticket),
            _ => {}
        }
    }

    /// The next one that nobody here has come to know of in time.
    pub async fn next_stray(&self) -> Ticket {
        loop {
            let earliest = self.strays.lock().front().map(|(until, _)| *until);
            let Some(until) = earliest else {
                self.has_strays.notified().await;
                continue;
            };
            sleep_until(until).await;
            let mut strays = self.strays.lock();
            if strays.front().is_some_and(|(until, _)| *until <= Instant::now())
                && let Some((_, word)) = strays.pop_front()
            {
                return ticket_of(&word);
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
        self.all.open.lock().remove(&self.ticket);
    }
}

fn ticket_of(word: &HandOver) -> Ticket {
    match word {
        HandOver::Fetched(ticket)
        | HandOver::Refused { ticket, .. }
        | HandOver::Stays(ticket)
        | HandOver::Gone(ticket)
        | HandOver::Lost(ticket)
        | HandOver::Awaits { ticket, .. }
        | HandOver::Taken(ticket)
        | HandOver::Dropped(ticket) => *ticket,
    }
}

#[cfg(test)]
mod test {
    use std::net::SocketAddr;

    use margay_core::Tuple;
    use margay_core::key::HostId;
    use margay_core::name::ServiceId;

    use super::*;

    fn ticket(n: u8) -> Ticket {
        Ticket([n; 16])
    }

    #[tokio::test]
    async fn each_hears_its_own() {
        let all = Arc::new(Mailboxes::default());
        let mut mailbox = all.open(ticket(1)).expect("the first");
        assert!(all.open(ticket(1)).is_none());
        all.put(HandOver::Gone(ticket(2)));
        all.put(HandOver::Stays(ticket(1)));
        assert_eq!(mailbox.next().await, HandOver::Stays(ticket(1)));
        drop(mailbox);
        assert!(all.open(ticket(1)).is_some(), "it is free again");
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_comes_to_know_of_is_refused_and_the_rest_is_kept_for_who_does() {
        let all = Arc::new(Mailboxes::default());
        let at = SocketAddr::from(([198, 18, 0, 1], 80));
        let awaits = |n| HandOver::Awaits {
            ticket: ticket(n),
            giver: HostId([n; 16]),
            service: ServiceId::default(),
            app: Tuple { protocol: 6, source: at, destination: at },
        };
        all.put(HandOver::Gone(ticket(1)));
        [2, 3, 4].into_iter().for_each(|n| all.put(awaits(n)));
        all.put(HandOver::Dropped(ticket(4)));
        let mut late = all.open(ticket(2)).expect("nobody hears it yet");
        assert_eq!(late.next().await, awaits(2));
        assert_eq!(all.next_stray().await, ticket(3));
        assert!(all.strays.lock().is_empty());
    }
}
