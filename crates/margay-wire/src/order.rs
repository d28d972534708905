//! ORDER: a host that is not the client's has an order carried out on a session's boxes (docs/decisions/0112).

use crate::header::{Error, SessionId};

/// Bytes of ORDER's value.
pub(crate) const ORDER_LEN: usize = 152;
/// Bytes of it that are signed.
pub const ORDER_SIGNED_LEN: usize = 88;

mod field {
    use core::ops::Range;

    pub const STATE: usize = 0;
    pub const ACT: usize = 1;
    pub const SESSION: Range<usize> = 4..20;
    pub const SERVICE: Range<usize> = 20..32;
    pub const OTHER: Range<usize> = 32..44;
    pub const START: Range<usize> = 44..52;
    pub const SAID_AT_MS: Range<usize> = 52..56;
    pub const HOST_KEY: Range<usize> = 56..88;
    pub const SIGNATURE: Range<usize> = 88..152;
}

macro_rules! numbers {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $one:ident = $number:literal;)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $name { $($(#[$doc])* $one = $number,)* }

        impl TryFrom<u8> for $name {
            type Error = Error;

            fn try_from(number: u8) -> Result<Self, Error> {
                match number { $($number => Ok(Self::$one),)* _ => Err(Error) }
            }
        }
    };
}

numbers! {
    /// What the sender of an ORDER says of it.
    OrderState {
        /// It wishes that it be carried out.
        Wished = 0;
        /// It is to be signed with the start and the time that come with this.
        ToSign = 1;
        /// It waits for its turn, or is being carried out.
        Taken = 2;
        /// It was carried out.
        Done = 3;
        /// It is refused, and the session is as it was.
        Refused = 4;
        /// It has come to nothing, and the session is as it was.
        Failed = 5;
        /// The session ended meanwhile.
        Ended = 6;
    }
}

numbers! {
    /// What is ordered.
    OrderAct {
        /// A box is put in: before the other one, or behind all.
        Insert = 1;
        /// A box is taken out.
        Remove = 2;
        /// A box is taken out, and the other one put in its place.
        Replace = 3;
    }
}

/// ORDER: an order of the host that RECONFIGURATION names, or what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderRepr {
    /// What is said of it.
    pub state: OrderState,
    /// What is ordered.
    pub act: OrderAct,
    /// The session whose boxes are to be others.
    pub session: SessionId,
    /// The first 96 bits of the box's name; the others are zero.
    pub service: [u8; 12],
    /// The same of the other box; zero: there is none.
    pub other: [u8; 12],
    /// Which start of the agent of the client's host; zero in a wish of a host that has not heard from it.
    pub start: u64,
    /// When that one has said so, by its clock, in milliseconds.
    pub said_at_ms: u32,
    /// Of the sender.
    pub host_key: [u8; 32],
    /// By the sender.
    pub signature: [u8; 64],
}

impl OrderRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; ORDER_LEN] = value.try_into().map_err(|_| Error)?;
        Ok(Self {
            state: value[field::STATE].try_into()?,
            act: value[field::ACT].try_into()?,
            session: SessionId(value[field::SESSION].try_into().map_err(|_| Error)?),
            service: value[field::SERVICE].try_into().map_err(|_| Error)?,
            other: value[field::OTHER].try_into().map_err(|_| Error)?,
            start: u64::from_be_bytes(value[field::START].try_into().map_err(|_| Error)?),
            said_at_ms: u32::from_be_bytes(value[field::SAID_AT_MS].try_into().map_err(|_| Error)?),
            host_key: value[field::HOST_KEY].try_into().map_err(|_| Error)?,
            signature: value[field::SIGNATURE].try_into().map_err(|_| Error)?,
        })
    }

    /// What of the value is signed: all before the signature.
    pub fn signed_bytes(&self) -> [u8; ORDER_SIGNED_LEN] {
        let mut value = [0; ORDER_LEN];
        self.emit(&mut value);
        let mut signed = [0; ORDER_SIGNED_LEN];
        signed.copy_from_slice(&value[..ORDER_SIGNED_LEN]);
        signed
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::STATE] = self.state as u8;
        value[field::ACT] = self.act as u8;
        value[field::SESSION].copy_from_slice(&self.session.0);
        value[field::SERVICE].copy_from_slice(&self.service);
        value[field::OTHER].copy_from_slice(&self.other);
        value[field::START].copy_from_slice(&self.start.to_be_bytes());
        value[field::SAID_AT_MS].copy_from_slice(&self.said_at_ms.to_be_bytes());
        value[field::HOST_KEY].copy_from_slice(&self.host_key);
        value[field::SIGNATURE].copy_from_slice(&self.signature);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_as_written_in_the_book() {
        let repr = OrderRepr {
            state: OrderState::Taken,
            act: OrderAct::Replace,
            session: SessionId([1; 16]),
            service: [2; 12],
            other: [3; 12],
            start: 0x0405_0607_0809_0a0b,
            said_at_ms: 0x0c0d_0e0f,
            host_key: [16; 32],
            signature: [17; 64],
        };
        let mut value = [0; ORDER_LEN];
        repr.emit(&mut value);
        assert_eq!(value[..6], [2, 3, 0, 0, 1, 1]);
        assert_eq!(value[18..22], [1, 1, 2, 2]);
        assert_eq!(value[31..33], [2, 3]);
        assert_eq!(value[43..57], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        assert_eq!(value[87..89], [16, 17]);
        assert_eq!(repr.signed_bytes()[..], value[..88]);
        assert_eq!(OrderRepr::parse(&value), Ok(repr));
        for (at, wrong) in [(0, 7), (1, 0), (1, 4)] {
            let mut other = value;
            other[at] = wrong;
            assert_eq!(OrderRepr::parse(&other), Err(Error), "{at}: {wrong}");
        }
        assert_eq!(OrderRepr::parse(&value[..151]), Err(Error));
    }
}
