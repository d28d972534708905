//! What the next start of an anchor's agent needs of a session that has two ways while a program leaves
//! (docs/decisions/0092): part of the record of the flow that is the old way.
//!
//! ```text
//! 0 number of the reconfiguration | 4 the flow that is the new way | 8 this end's cut | 12 the other end's
//! 16 scale of the windows that the program's TCP is told | 17 flags | 18 zero (2)
//! 20 the session that the flow was of before (16) | 36 with bit 2 of the flags, the delta (`leg/delta/record.rs`)
//! flags: 1 the other end's cut is known, 2 its FIN is right below, 4 a delta follows
//! ```
//! Numbers are big-endian.

use alloc::vec::Vec;

use margay_wire::{FlowId, SessionId};

use super::cut::PeerCut;
use crate::leg::delta::{DELTA_RECORD_LEN, Delta};
use crate::types::time::Instant;

const FIXED_LEN: usize = 36;
const SCALE_MAX: u8 = 14;
const HAS_PEER: u8 = 1;
const IS_CLOSED: u8 = 2;
const HAS_DELTA: u8 = 4;

/// What is kept of a session's two ways at one of its ends, once that end's cut is fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartingRecord {
    /// Of the reconfiguration.
    pub number: u32,
    /// The new way.
    pub new: FlowId,
    /// This end's cut, as its program's TCP has numbers.
    pub own: u32,
    /// The other end's, where it is known.
    pub peer: Option<PeerCut>,
    /// By how many bits windows are shifted that the program's TCP is told, at most 14.
    pub scale: u8,
    /// The session that the flow was of before; the left anchor's is the same.
    pub before: SessionId,
    /// What the new way's numbers differ by; clocks that are awaited show what they show at [`Instant::ZERO`].
    pub delta: Option<Delta>,
}

impl PartingRecord {
    /// Bytes of [`encode`](Self::encode).
    pub(crate) fn len(&self) -> usize {
        FIXED_LEN + self.delta.map_or(0, |_| DELTA_RECORD_LEN)
    }

    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        let peer = self.peer.map_or(0, |peer| HAS_PEER | if peer.is_closed { IS_CLOSED } else { 0 });
        let flags = peer | self.delta.map_or(0, |_| HAS_DELTA);
        let mut out = Vec::with_capacity(self.len());
        for number in [self.number, self.new.0, self.own, self.peer.map_or(0, |peer| peer.number)] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        out.extend_from_slice(&[self.scale, flags, 0, 0]);
        out.extend_from_slice(&self.before.0);
        out.extend(self.delta.iter().flat_map(|delta| delta.encode(Instant::ZERO)));
        out
    }

    /// Reads what [`encode`](Self::encode) has written from the beginning of `bytes`.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (fixed, rest) = bytes.split_first_chunk::<FIXED_LEN>()?;
        let number = |at: usize| u32::from_be_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
        let flags = fixed[17];
        let has_peer = flags & HAS_PEER != 0;
        let is_closed = flags & IS_CLOSED != 0;
        let is_known = flags < HAS_DELTA << 1 && fixed[16] <= SCALE_MAX && fixed[18..20] == [0, 0];
        if !is_known || !has_peer && (is_closed || number(12) != 0) || number(4) == 0 {
            return None;
        }
        let delta = if flags & HAS_DELTA == 0 {
            None
        } else {
            Some(Delta::decode(rest.first_chunk::<DELTA_RECORD_LEN>()?, Instant::ZERO)?)
        };
        let mut before = [0; 16];
        before.copy_from_slice(&fixed[20..FIXED_LEN]);
        Some(Self {
            number: number(0),
            new: FlowId(number(4)),
            own: number(8),
            peer: has_peer.then_some(PeerCut { number: number(12), is_closed }),
            scale: fixed[16],
            before: SessionId(before),
            delta,
        })
    }
}

/// Which part a flow's record has in a session with two ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptWay {
    /// It is the old way.
    Old(PartingRecord),
    /// It is the new one, and is of use with the record of the old one alone.
    New,
}
