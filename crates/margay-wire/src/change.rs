//! CHANGE: how a live flow is carried becomes another (DESIGN §12; docs/decisions/0073).

use crate::header::Error;

/// Bytes of CHANGE's value.
pub(crate) const CHANGE_LEN: usize = 8;
/// Bit of CAPABILITIES: the sender takes CHANGE. Stacks have the numbers below it.
pub const CHANGES: u32 = 1 << 31;
/// Bit of the flags of CHANGE and of STACK: the sender demands a sealed flow.
pub(crate) const DEMANDS: u8 = 1;
/// Bit of the flags of CHANGE: a rule of the sender's host wants the change, and no order.
const BY_RULE: u8 = 2;

mod field {
    use core::ops::Range;

    pub const STEP: usize = 0;
    pub const STACK: usize = 1;
    pub const FLAGS: usize = 2;
    pub const NUMBER: Range<usize> = 4..8;
}

macro_rules! steps {
    ($($(#[$doc:meta])* $name:ident = $number:literal;)*) => {
        /// What a message says of a change.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum ChangeStep { $($(#[$doc])* $name = $number,)* }

        impl ChangeStep {
            /// Every step.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }

        impl TryFrom<u8> for ChangeStep {
            type Error = Error;

            fn try_from(number: u8) -> Result<Self, Error> {
                match number { $($number => Ok(Self::$name),)* _ => Err(Error) }
            }
        }
    };
}

steps! {
    /// Responder to initiator: make this change.
    Propose = 1;
    /// Initiator to responder: be ready to take this stack.
    Request = 2;
    /// The responder is.
    Answer = 3;
    /// The sender does not agree; ERROR says why. Nothing has changed.
    Refuse = 4;
    /// Initiator to responder: the change is made.
    Confirm = 5;
    /// The responder sends by the new stack.
    Done = 6;
    /// The initiator has given the change up; the flow stays as it was.
    Abandon = 7;
    /// No change is under way, and this is the stack that the sender has. With CONFIRM it answers the same.
    Tell = 8;
}

/// CHANGE: one step of a change, or the stack that a flow has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeRepr {
    /// What the sender asks, answers or says with it.
    pub step: ChangeStep,
    /// The stack that the flow shall have; of [`ChangeStep::Tell`] the one that it has.
    pub stack: u8,
    /// The sender demands that the flow is sealed.
    pub demands: bool,
    /// A rule of the sender's host wants the change: an order at the receiver's outranks it.
    pub by_rule: bool,
    /// Which change: the initiator's number, and of [`ChangeStep::Propose`] and its refusal the responder's.
    pub number: u32,
}

impl ChangeRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; CHANGE_LEN] = value.try_into().map_err(|_| Error)?;
        Ok(Self {
            step: value[field::STEP].try_into()?,
            stack: value[field::STACK],
            demands: value[field::FLAGS] & DEMANDS != 0,
            by_rule: value[field::FLAGS] & BY_RULE != 0,
            number: value[field::NUMBER].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)),
        })
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::STEP] = self.step as u8;
        value[field::STACK] = self.stack;
        value[field::FLAGS] = if self.demands { DEMANDS } else { 0 } | if self.by_rule { BY_RULE } else { 0 };
        value[field::NUMBER].copy_from_slice(&self.number.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_as_written_in_the_book() {
        let repr =
            ChangeRepr { step: ChangeStep::Answer, stack: 3, demands: true, by_rule: false, number: 0x0102_0304 };
        let mut value = [0; CHANGE_LEN];
        ChangeRepr { demands: false, by_rule: true, ..repr }.emit(&mut value);
        assert_eq!(value, [3, 3, 2, 0, 1, 2, 3, 4]);
        repr.emit(&mut value);
        assert_eq!(value, [3, 3, 1, 0, 1, 2, 3, 4]);
        assert_eq!(ChangeRepr::parse(&value), Ok(repr));
        for step in [0, 9, 255] {
            value[0] = step;
            assert_eq!(ChangeRepr::parse(&value), Err(Error), "{step} is no step");
        }
        assert_eq!(ChangeRepr::parse(&value[..7]), Err(Error));
    }
}
