//! Names whose last socket for datagrams closes: a connection hears of that by its FIN or RST, a flow of datagrams by
//! nothing, so its peer is told.

use std::collections::BTreeSet;

use margay_core::name::Prefix;

use super::{Listener, Published, Services};
use crate::listener::Protocol;

/// Ends the flows of datagrams that are served under a prefix.
pub type EndDatagrams = Box<dyn Fn(&Prefix) + Send + Sync>;

impl Services {
    /// Sockets have come or gone: who has a flow with one that is gone is told.
    pub(super) fn follow_datagrams(&self) {
        let mut known = self.with_datagram_sockets.lock();
        let now = self.with_datagrams();
        known.difference(&now).for_each(|prefix| (self.end_datagrams)(prefix));
        *known = now;
    }

    /// Changes by order what is served: flows of datagrams that are there go on. The lock keeps sockets that come or go
    /// meanwhile from being taken for the cause.
    pub(super) fn change_by_order<R>(&self, change: impl FnOnce() -> R) -> R {
        let mut known = self.with_datagram_sockets.lock();
        let done = change();
        *known = self.with_datagrams();
        done
    }

    /// The names that some socket takes datagrams for.
    fn with_datagrams(&self) -> BTreeSet<Prefix> {
        let published = self.published.lock();
        let taking = published.iter().filter(|service| self.takes_datagrams(service));
        taking.map(Published::prefix).collect()
    }

    fn takes_datagrams(&self, service: &Published) -> bool {
        let of_datagrams = |protocol| protocol == Protocol::Udp;
        let takes = |listener: &Listener| listener.carries(Protocol::Udp) && self.is_taken(listener, of_datagrams);
        service.listeners.iter().any(takes)
    }
}
