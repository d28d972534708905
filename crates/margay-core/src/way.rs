//! Which way a first packet may go on from a router: up, once across, and down (DESIGN §8). What comes from a router above or beside this
//! one goes to hosts and to routers below alone, and nothing goes back to the router that it comes from. So no packet goes
//! round, whatever the routers have told each other, as long as nobody is above itself: it meets a router once on its way up, and once on
//! its way down, at most.

use core::net::SocketAddr;

use crate::key::HostId;
use crate::sal::Sal;

/// Routers that this one exchanges announcements with. More than anybody has; what comes from others is taken for a host's.
const NEIGHBOURS_MAX: usize = 4096;

/// What a neighbouring router is to this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Relation {
    /// This router is where it sends what it knows no better way for.
    Below,
    /// Neither is above the other.
    Beside,
    /// It is where this router sends what it knows no better way for.
    Above,
}

/// Who a first packet comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// A program of this host, which may send it on although it is no router.
    Own,
    /// The host of the program that sends it.
    Host,
    /// The router at this address: it has passed that one.
    Router(SocketAddr),
}

/// What is to be known of a packet's sender, for where it may go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WayOn {
    /// Who it is.
    pub sender: Sender,
    /// Where it is a router that this one exchanges announcements with.
    relation: Option<Relation>,
}

impl WayOn {
    /// Whether it may go to hosts and to routers below alone.
    pub fn is_inward(&self) -> bool {
        matches!(self.relation, Some(Relation::Above | Relation::Beside))
    }

    /// Whether a next hop is where it comes from.
    pub fn is_back(&self, to: SocketAddr) -> bool {
        self.relation.is_some() && self.sender == Sender::Router(to)
    }
}

impl Sal {
    /// What a router is to this one from now on; `None`: nothing any more.
    pub fn set_relation(&mut self, host: HostId, relation: Option<Relation>) {
        match relation {
            None => drop(self.neighbours.remove(&host)),
            Some(relation) if self.neighbours.len() < NEIGHBOURS_MAX || self.neighbours.contains_key(&host) => {
                self.neighbours.insert(host, relation);
            }
            Some(_) => {}
        }
    }

    /// What a packet's sender means for where it may go.
    pub(crate) fn way_on(&self, sender: Sender) -> WayOn {
        let relation = match sender {
            Sender::Router(from) if !self.neighbours.is_empty() => {
                let there = self.associations.at_address(from);
                there.filter_map(|association| self.neighbours.get(&association.host).copied()).max()
            }
            Sender::Own | Sender::Host | Sender::Router(_) => None,
        };
        WayOn { sender, relation }
    }
}
