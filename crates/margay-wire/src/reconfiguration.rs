//! RECONFIGURATION: a session that runs comes to go through other boxes (docs/decisions/0080; Dysco, section 3).

use core::net::SocketAddr;

use crate::address::{emit_ip, parse_socket};
use crate::header::Error;

/// Bytes of RECONFIGURATION's value.
pub(crate) const RECONFIGURATION_LEN: usize = 44;

mod field {
    use core::ops::Range;

    pub const STEP: usize = 0;
    pub const NUMBER: Range<usize> = 4..8;
    pub const HOST: Range<usize> = 8..24;
    pub const ADDRESS: Range<usize> = 24..40;
    pub const PORT: Range<usize> = 40..42;
}

macro_rules! steps {
    ($($(#[$doc:meta])* $name:ident = $number:literal;)*) => {
        /// What a message says of a reconfiguration.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum ReconfigurationStep { $($(#[$doc])* $name = $number,)* }

        impl ReconfigurationStep {
            /// Every step.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }

        impl TryFrom<u8> for ReconfigurationStep {
            type Error = Error;

            fn try_from(number: u8) -> Result<Self, Error> {
                match number { $($number => Ok(Self::$name),)* _ => Err(Error) }
            }
        }
    };
}

steps! {
    /// Left anchor to right anchor, by the old way: may the session be changed?
    Request = 1;
    /// It may; this is where the right anchor hears SAL.
    Answer = 2;
    /// It may not; ERROR says why.
    Refuse = 3;
    /// In a SYN: it sets up the new way of a session that the responder has.
    Begin = 4;
    /// Left anchor to right anchor, by the new way: it stands.
    Confirm = 5;
    /// The right anchor sends by the new way.
    Done = 6;
    /// By the old way: the sender sends nothing more by it.
    Fence = 7;
    /// Left anchor to right anchor, by the new way: it sends by it, too, and the old one is needed no more.
    Finish = 8;
    /// The right anchor has heard that.
    Finished = 9;
    /// This way of the session is over: who passes the word on forgets it.
    Leave = 10;
    /// The sender has forgotten it.
    Left = 11;
    /// Left anchor to right anchor, by the old way: the session stays as it was.
    Cancel = 12;
    /// The right anchor sends by the old way.
    Canceled = 13;
    /// To the left anchor, from the host of a program that leaves: have the session go on without it; SPLICE says what
    /// it stood between. From the host of the session's server or of a box: carry this ORDER out.
    Wish = 14;
    /// Left anchor to who has sent an ORDER: what becomes of it.
    Told = 15;
}

/// RECONFIGURATION: one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReconfigurationRepr {
    /// What the sender asks, answers or says with it.
    pub step: ReconfigurationStep,
    /// Which reconfiguration of the session: the left anchor's number, each later than the last. Beside an ORDER, the
    /// number of that: each of a host is later than its last.
    pub number: u32,
    /// Host-ID of the right anchor in [`ReconfigurationStep::Begin`], of the host that has given it beside an ORDER,
    /// otherwise zero.
    pub host: [u8; 16],
    /// Where the right anchor hears SAL, in [`ReconfigurationStep::Begin`] and [`ReconfigurationStep::Answer`];
    /// otherwise unspecified, port 0.
    pub address: SocketAddr,
}

impl ReconfigurationRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; RECONFIGURATION_LEN] = value.try_into().map_err(|_| Error)?;
        Ok(Self {
            step: value[field::STEP].try_into()?,
            number: value[field::NUMBER].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)),
            host: value[field::HOST].try_into().map_err(|_| Error)?,
            address: parse_socket(&value[field::ADDRESS], &value[field::PORT]),
        })
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::STEP] = self.step as u8;
        value[field::NUMBER].copy_from_slice(&self.number.to_be_bytes());
        value[field::HOST].copy_from_slice(&self.host);
        emit_ip(self.address.ip(), &mut value[field::ADDRESS]);
        value[field::PORT].copy_from_slice(&self.address.port().to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_as_written_in_the_book() {
        let repr = ReconfigurationRepr {
            step: ReconfigurationStep::Begin,
            number: 0x0102_0304,
            host: [7; 16],
            address: "10.0.0.2:54324".parse().expect("literal"),
        };
        let mut value = [0; RECONFIGURATION_LEN];
        repr.emit(&mut value);
        assert_eq!(value[..8], [4, 0, 0, 0, 1, 2, 3, 4]);
        assert_eq!(value[34..], [0xff, 0xff, 10, 0, 0, 2, 0xd4, 0x34, 0, 0]);
        assert_eq!(ReconfigurationRepr::parse(&value), Ok(repr));
        for step in [0, 16, 255] {
            value[0] = step;
            assert_eq!(ReconfigurationRepr::parse(&value), Err(Error), "{step} is no step");
        }
        assert_eq!(ReconfigurationRepr::parse(&value[..43]), Err(Error));
    }
}
