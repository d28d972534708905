//! GRANT: flows that the kernels of two hosts may open by themselves (docs/decisions/0035).

use crate::header::{Error, FlowId};

/// Flows of one grant.
pub const GRANT_FLOWS_MAX: u16 = 128;
/// Bytes of GRANT's value.
pub(crate) const GRANT_LEN: usize = 12;

mod field {
    use core::ops::Range;

    pub const FIRST_FLOW: Range<usize> = 0..4;
    pub const PORT: Range<usize> = 4..6;
    pub const COUNT: Range<usize> = 6..8;
    pub const LIFETIME: Range<usize> = 8..10;
}

/// GRANT: of a SYN, flows that the initiator's kernel would open by itself; of the SYN-ACK, those that it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantRepr {
    /// The sender's number of the first flow; each next flow has the next number.
    pub first_flow: FlowId,
    /// The sender's flow port. In a SYN it is the first flow's, and each next flow has the next port; in a SYN-ACK it
    /// is that of all.
    pub port: u16,
    /// Flows: 1 to [`GRANT_FLOWS_MAX`].
    pub count: u16,
    /// For how long flows may be opened: wanted in a SYN, given in a SYN-ACK.
    pub lifetime_ms: u16,
}

impl GrantRepr {
    /// Whether there are so many flows and numbers of them.
    pub(crate) fn is_sound(&self) -> bool {
        let last = self.count.checked_sub(1).and_then(|more| self.first_flow.0.checked_add(u32::from(more)));
        self.count <= GRANT_FLOWS_MAX && self.first_flow.0 != 0 && self.port != 0 && last.is_some()
    }

    /// Whether each flow can have a port of its own, as those of a SYN do.
    pub(crate) fn ports_rise(&self) -> bool {
        self.count.checked_sub(1).and_then(|more| self.port.checked_add(more)).is_some()
    }

    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; GRANT_LEN] = value.try_into().map_err(|_| Error)?;
        let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let half = |at: core::ops::Range<usize>| u16::from_be_bytes([value[at.start], value[at.start + 1]]);
        let repr = Self {
            first_flow: FlowId(number(&value[field::FIRST_FLOW])),
            port: half(field::PORT),
            count: half(field::COUNT),
            lifetime_ms: half(field::LIFETIME),
        };
        if repr.is_sound() { Ok(repr) } else { Err(Error) }
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::FIRST_FLOW].copy_from_slice(&self.first_flow.0.to_be_bytes());
        value[field::PORT].copy_from_slice(&self.port.to_be_bytes());
        value[field::COUNT].copy_from_slice(&self.count.to_be_bytes());
        value[field::LIFETIME].copy_from_slice(&self.lifetime_ms.to_be_bytes());
    }
}
