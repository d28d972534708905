//! LOSS: how much of a flow of datagrams has arrived (docs/decisions/0081).

use crate::header::Error;

/// Bytes of LOSS's value.
pub(crate) const LOSS_LEN: usize = 20;

mod field {
    use core::ops::Range;

    pub const BASIS: Range<usize> = 0..4;
    pub const SENT: Range<usize> = 4..8;
    pub const EXPECTED: Range<usize> = 8..12;
    pub const RECEIVED: Range<usize> = 12..16;
    pub const GAPS: Range<usize> = 16..20;
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

/// LOSS: in a PROBE of a flow, a question; with CONFIRM the answer. Counts wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LossRepr {
    /// What the sender's [`expected`](Self::expected), [`received`](Self::received) and [`gaps`](Self::gaps) go by.
    /// Zero: by what programs send, from the flow's beginning. Else the change from which on the peer sends by `fec` or
    /// `sctp`: by the numbers of its datagrams, from there on.
    pub basis: u32,
    /// Datagrams that the sender's program has sent.
    pub sent: u32,
    /// Datagrams that should have come to it: by numbers, or in an answer [`sent`](Self::sent) of the question.
    pub expected: u32,
    /// Datagrams that have; those that were repaired are not among them.
    pub received: u32,
    /// How often one or several in a row have not come, by numbers.
    pub gaps: u32,
}

impl LossRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; LOSS_LEN] = value.try_into().map_err(|_| Error)?;
        Ok(Self {
            basis: word(&value[field::BASIS]),
            sent: word(&value[field::SENT]),
            expected: word(&value[field::EXPECTED]),
            received: word(&value[field::RECEIVED]),
            gaps: word(&value[field::GAPS]),
        })
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::BASIS].copy_from_slice(&self.basis.to_be_bytes());
        value[field::SENT].copy_from_slice(&self.sent.to_be_bytes());
        value[field::EXPECTED].copy_from_slice(&self.expected.to_be_bytes());
        value[field::RECEIVED].copy_from_slice(&self.received.to_be_bytes());
        value[field::GAPS].copy_from_slice(&self.gaps.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_is_as_written_in_the_book() {
        let repr = LossRepr { basis: 1, sent: 0x0203, expected: 5, received: 0xff00_0000, gaps: 4 };
        let mut value = [9; LOSS_LEN];
        repr.emit(&mut value);
        assert_eq!(value, [0, 0, 0, 1, 0, 0, 2, 3, 0, 0, 0, 5, 0xff, 0, 0, 0, 0, 0, 0, 4]);
        assert_eq!(LossRepr::parse(&value), Ok(repr));
        assert_eq!(LossRepr::parse(&value[..19]), Err(Error));
    }
}
