//! What is known of first packets that boxes here were given, so that each is known again when it comes out with other
//! addresses (docs/decisions/0077).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::FlowId;

use super::OVER_FOR;
use super::middlebox::BOX_PATIENCE;
use super::tag::tag_of;
use crate::cache::packet::AppPacket;

/// Bytes of UDP's header.
const UDP_HEADER_LEN: usize = 8;

/// By what a first packet is known again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Mark {
    /// The tag that this host has put on, of a box that changes addresses.
    Tag(u32),
    /// TCP's first sequence number: what changes addresses leaves it as it is.
    Number(u32),
    /// A digest of a datagram's payload.
    Payload([u8; 16]),
}

impl Mark {
    /// By what a packet is known that bears no tag. `None`: it begins nothing.
    pub fn of(packet: &AppPacket<'_>) -> Option<Self> {
        if packet.is_tcp_syn() {
            return packet.tcp_numbers().map(|(sequence, _)| Self::Number(sequence));
        }
        let payload = packet.transport.get(UDP_HEADER_LEN..).filter(|_| !packet.is_tcp())?;
        let mut digest = [0; 16];
        digest.copy_from_slice(&blake3::hash(payload).as_bytes()[..16]);
        Some(Self::Payload(digest))
    }

    /// How long a packet with this mark is known as that of a session which came to nothing. Programs may say the same
    /// words by datagrams again.
    pub fn is_kept_for(self) -> Duration {
        if matches!(self, Self::Payload(_)) { BOX_PATIENCE } else { OVER_FOR }
    }

    /// By its tag, where it bears one.
    pub fn of_tagged(packet: &AppPacket<'_>) -> Option<Self> {
        tag_of(packet).filter(|_| packet.is_tcp_syn()).map(Self::Tag)
    }
}

/// Half-open left halves whose boxes have a first packet, by its marks.
#[derive(Default)]
pub(super) struct Given(BTreeMap<Mark, Vec<FlowId>>);

impl Given {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn note(&mut self, mark: Mark, left: FlowId) {
        let known = self.0.entry(mark).or_default();
        if !known.contains(&left) {
            known.push(left);
        }
    }

    pub fn forget(&mut self, mark: Mark, left: FlowId) {
        if let Some(known) = self.0.get_mut(&mark) {
            known.retain(|id| *id != left);
            if known.is_empty() {
                self.0.remove(&mark);
            }
        }
    }

    /// Whose first packet has this mark.
    pub fn of(&self, mark: Mark) -> &[FlowId] {
        self.0.get(&mark).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_forgotten_with_the_last_half_that_has_it() {
        let mut given = Given::default();
        let mark = Mark::Number(7);
        for left in [1, 2, 1] {
            given.note(mark, FlowId(left));
        }
        assert_eq!(given.of(mark), [FlowId(1), FlowId(2)]);
        given.forget(mark, FlowId(1));
        given.forget(Mark::Tag(7), FlowId(2));
        assert_eq!((given.of(mark), given.is_empty()), (&[FlowId(2)][..], false));
        given.forget(mark, FlowId(2));
        assert!(given.is_empty());
    }
}
