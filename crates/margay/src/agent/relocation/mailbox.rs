//! What the core says of hand-overs, each for whoever carries it out.

use std::collections::HashMap;
use std::sync::Arc;

use margay_core::{HandOver, Ticket};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

/// The core's words of one hand-over are fewer.
const WORDS_MAX: usize = 16;
/// Hand-overs of which this host knows nothing, until they are refused; more are left to the core's own time-out.
const STRAYS_MAX: usize = 64;

/// All hand-overs that run on this host.
#[derive(Default)]
pub struct Mailboxes {
    open: Mutex<HashMap<Ticket, mpsc::Sender<HandOver>>>,
    strays: Mutex<Vec<Ticket>>,
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
        open.insert(ticket, sender);
        Some(Mailbox { all: Arc::clone(self), ticket, words })
    }

    /// Delivers a word of the core. Quick, and never calls back.
    pub fn put(&self, word: HandOver) {
        let sender = self.open.lock().get(&ticket_of(&word)).cloned();
        match sender {
            Some(sender) => {
                // Whoever heard it has just ended.
                let _ = sender.try_send(word);
            }
            None => self.note_stray(&word),
        }
    }

    /// A client is to fetch a connection that nobody gives to this host.
    fn note_stray(&self, word: &HandOver) {
        let HandOver::Awaits { ticket, .. } = word else { return };
        let mut strays = self.strays.lock();
        if strays.len() < STRAYS_MAX {
            strays.push(*ticket);
            self.has_strays.notify_one();
        }
    }

    /// The next of those that nobody here knows of.
    pub async fn strays(&self) -> Vec<Ticket> {
        self.has_strays.notified().await;
        std::mem::take(&mut *self.strays.lock())
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

    #[tokio::test]
    async fn what_nobody_knows_of_is_refused_and_the_rest_forgotten() {
        let all = Mailboxes::default();
        let at = SocketAddr::from(([198, 18, 0, 1], 80));
        let awaits = |n| HandOver::Awaits {
            ticket: ticket(n),
            giver: HostId([n; 16]),
            service: ServiceId::default(),
            app: Tuple { protocol: 6, source: at, destination: at },
        };
        all.put(HandOver::Gone(ticket(1)));
        all.put(awaits(2));
        assert_eq!(all.strays().await, [ticket(2)]);
    }
}
