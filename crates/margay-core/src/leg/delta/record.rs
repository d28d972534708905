//! A delta in the record of a flow, for the next start of the agent.
//!
//! ```text
//! 0 the peer's numbers | 4 this end's | 8 the peer's clock | 12 this end's
//! 16 shift of windows that come | 17 of windows that go | 18 flags | 19 zero
//! flags: 1, 2 kind of the peer's clock, 4, 8 of this end's, 16 no selective acknowledgements
//! kind of a clock: 0 what is added, 1 awaited: what it shows when the record is written, 2 absent (zero)
//! ```
//! Numbers are big-endian.

use super::{Clock, Delta, SHIFT_MAX, millis};
use crate::types::time::Instant;

const FIXED: u8 = 0;
const AWAITED: u8 = 1;
const ABSENT: u8 = 2;
const KIND_BITS: u8 = 3;
const OWN_SHIFT: u8 = 2;
const DROPS_SACK: u8 = 16;

/// Bytes of [`Delta::encode`].
pub const DELTA_RECORD_LEN: usize = 20;

impl Clock {
    fn encode(self, now: Instant) -> (u8, u32) {
        match self {
            Self::Fixed(shift) => (FIXED, shift),
            Self::Awaited(ahead) => (AWAITED, ahead.wrapping_add(millis(now))),
            Self::Absent => (ABSENT, 0),
        }
    }

    fn decode(kind: u8, value: u32, now: Instant) -> Option<Self> {
        match kind & KIND_BITS {
            FIXED => Some(Self::Fixed(value)),
            AWAITED => Some(Self::awaited(value, now)),
            ABSENT if value == 0 => Some(Self::Absent),
            _ => None,
        }
    }
}

impl Delta {
    /// The bytes, as of `now`.
    pub fn encode(&self, now: Instant) -> [u8; DELTA_RECORD_LEN] {
        let peer_clock = self.peer_clock.encode(now);
        let own_clock = self.own_clock.encode(now);
        let mut out = [0; DELTA_RECORD_LEN];
        for (at, number) in [self.peer, self.own, peer_clock.1, own_clock.1].into_iter().enumerate() {
            out[at * 4..at * 4 + 4].copy_from_slice(&number.to_be_bytes());
        }
        [out[16]] = self.ingress_shift.to_be_bytes();
        [out[17]] = self.egress_shift.to_be_bytes();
        out[18] = peer_clock.0 | own_clock.0 << OWN_SHIFT | if self.drops_sack { DROPS_SACK } else { 0 };
        out
    }

    /// Reads what [`encode`](Self::encode) has written; clocks that are awaited go on from `now`.
    pub fn decode(bytes: &[u8; DELTA_RECORD_LEN], now: Instant) -> Option<Self> {
        let number = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let shift =
            |at: usize| Some(i8::from_be_bytes([bytes[at]])).filter(|shift| (-SHIFT_MAX..=SHIFT_MAX).contains(shift));
        let flags = bytes[18];
        let is_known = flags < DROPS_SACK << 1 && bytes[19] == 0;
        Some(Self {
            peer: number(0),
            own: number(4),
            peer_clock: Clock::decode(flags, number(8), now).filter(|_| is_known)?,
            own_clock: Clock::decode(flags >> OWN_SHIFT, number(12), now)?,
            ingress_shift: shift(16)?,
            egress_shift: shift(17)?,
            drops_sack: flags & DROPS_SACK != 0,
        })
    }
}
