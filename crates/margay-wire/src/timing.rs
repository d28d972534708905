//! TIMING: how evenly the datagrams of a flow arrive (docs/decisions/0084).

use crate::header::Error;

/// Bytes of TIMING's value.
pub(crate) const TIMING_LEN: usize = 16;
/// The jitter is not known.
const UNKNOWN: u32 = u32::MAX;

mod field {
    use core::ops::Range;

    pub const AT: Range<usize> = 0..4;
    pub const JITTER: Range<usize> = 4..8;
    pub const JUDGED: Range<usize> = 8..12;
    pub const LATE: Range<usize> = 12..16;
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

/// TIMING: beside LOSS in a PROBE of a flow. Counts wrap, and so does the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimingRepr {
    /// When the PROBE was sent, in microseconds of the sender's clock.
    pub at_us: u32,
    /// By how much the time varies that the peer's PROBEs of this flow take to the sender, in microseconds (RFC 3550
    /// §6.4.1). At most `u32::MAX - 1`.
    pub jitter_us: Option<u32>,
    /// Datagrams of the peer's that have come with a number.
    pub judged: u32,
    /// Of these, those that came behind a later one (RFC 4737 §3.3).
    pub late: u32,
}

impl TimingRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; TIMING_LEN] = value.try_into().map_err(|_| Error)?;
        let jitter_us = word(&value[field::JITTER]);
        Ok(Self {
            at_us: word(&value[field::AT]),
            jitter_us: (jitter_us != UNKNOWN).then_some(jitter_us),
            judged: word(&value[field::JUDGED]),
            late: word(&value[field::LATE]),
        })
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::AT].copy_from_slice(&self.at_us.to_be_bytes());
        value[field::JITTER].copy_from_slice(&self.jitter_us.unwrap_or(UNKNOWN).to_be_bytes());
        value[field::JUDGED].copy_from_slice(&self.judged.to_be_bytes());
        value[field::LATE].copy_from_slice(&self.late.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timing_is_as_written_in_the_book() {
        let repr = TimingRepr { at_us: 0x0102_0304, jitter_us: Some(5), judged: 0xff00_0000, late: 7 };
        let mut value = [9; TIMING_LEN];
        repr.emit(&mut value);
        assert_eq!(value, [1, 2, 3, 4, 0, 0, 0, 5, 0xff, 0, 0, 0, 0, 0, 0, 7]);
        assert_eq!(TimingRepr::parse(&value), Ok(repr));
        assert_eq!(TimingRepr::parse(&value[..15]), Err(Error));
        let unknown = TimingRepr { jitter_us: None, ..repr };
        unknown.emit(&mut value);
        assert_eq!((TimingRepr::parse(&value), &value[4..8]), (Ok(unknown), &[0xff; 4][..]));
    }
}
