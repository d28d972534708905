//! What a switch sends: packets of connections, gathered into messages, and those into datagrams.

use std::collections::BTreeMap;

use margay_ensemble::To;
use margay_wire::{FRAMED_HEADER_LEN, Framed};

use super::member::Host;
use super::served::{Key, Leg};
use crate::batch::Outbound;

/// What is to be sent.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    pub(super) to_peers: Outbound,
    pub(super) to_members: BTreeMap<Host, Outbound>,
}

impl Outgoing {
    pub(super) fn is_empty(&self) -> bool {
        self.to_peers.is_empty() && self.to_members.values().all(Outbound::is_empty)
    }

    /// A message of a connection: for the client, or for a member.
    pub(super) fn put(&mut self, key: Key, host: Option<Host>, message: &[u8]) {
        match host {
            None => self.to_peers.push(Some(key.0), message),
            Some(host) => self.to_members.entry(host).or_default().push(None, message),
        }
    }
}

/// A message of a connection that is put together.
pub(super) struct Gathered {
    pub(super) to: To,
    /// The member's; none: it is for the client.
    pub(super) host: Option<Host>,
    /// Of the connection with that end.
    number: u64,
    pub(super) bytes: Vec<u8>,
    /// Something is in it that is answered.
    pub(super) is_asking: bool,
}

impl Gathered {
    /// For an end that is there.
    pub(super) fn begin(to: To, key: &Key, legs: &BTreeMap<Host, Leg>) -> Option<Self> {
        let (host, number) = match to {
            To::Peer => (None, key.1),
            To::Member(id) => {
                let (host, leg) = legs.iter().find(|(_, leg)| leg.member() == Some(id))?;
                (Some(*host), leg.number)
            }
        };
        Some(Self { to, host, number, bytes: Vec::new(), is_asking: false })
    }

    pub(super) fn add(&mut self, packet: &[u8]) {
        if self.bytes.is_empty() {
            // Most messages have one packet alone.
            self.bytes.reserve(FRAMED_HEADER_LEN + packet.len());
            self.bytes.resize(FRAMED_HEADER_LEN, 0);
            // There is room for it.
            let _ = Framed::begin_data(self.number, &mut self.bytes);
        }
        self.bytes.extend_from_slice(packet);
    }
}
