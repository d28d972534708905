//! Filters of chains: classic BPF programs, as libpcap compiles expressions to (McCanne and Jacobson, 1993), checked
//! once and run on first packets (Dysco, section 2.2; docs/decisions/0093).
//!
//! A program is 1 to [`INSTRUCTIONS_MAX`] instructions of 8 bytes, big-endian:
//!
//! ```text
//!     0        2    3    4            8
//!     ┌────────┬────┬────┬────────────┐
//!     │ code   │ jt │ jf │ k          │
//!     └────────┴────┴────┴────────────┘
//! ```
//!
//! It reads one packet, beginning with the IP header (libpcap's link type RAW). All jumps go forward, so that it ends
//! after as many steps as it has instructions.

use alloc::string::String;
use alloc::vec::Vec;

/// Instructions of one filter.
pub const INSTRUCTIONS_MAX: usize = 512;
/// Bytes of an instruction.
const LEN: usize = 8;
/// Words of a program's memory.
const MEMORY: usize = 16;
/// IP packets are not longer: what reads behind that reads what a capture adds.
const PACKET_MAX: u32 = 65_535;

/// What packets of a rule's sessions look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// The expression, for people.
    pub text: String,
    /// What it was compiled to.
    pub program: Program,
}

/// A program that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program(Vec<Instruction>);

/// Why bytes are no program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// Of another length than instructions have.
    #[error("{0} bytes are no instructions of {LEN} bytes each")]
    Length(usize),
    /// None, or too many.
    #[error("it has {0} instructions; 1 to {INSTRUCTIONS_MAX} are allowed: write a shorter expression")]
    Count(usize),
    /// A code that classic BPF has not.
    #[error("instruction {at} has the code {code:#06x}, which classic BPF has not")]
    Code {
        /// Which, from 0.
        at: usize,
        /// What it has there.
        code: u16,
    },
    /// A number that its code does not allow.
    #[error("instruction {at} has the number {number}, which its code does not allow")]
    Number {
        /// Which, from 0.
        at: usize,
        /// What it has there.
        number: u32,
    },
    /// It reads what no packet has.
    #[error(
        "instruction {at} reads what is not in an IP packet, but beside it (by which interface it came, say); a first \
         packet has its headers and data alone"
    )]
    Beside {
        /// Which, from 0.
        at: usize,
    },
    /// Back, or out of the program.
    #[error(
        "instruction {at} jumps back, or out of the program; expressions that loop (`protochain`) cannot be used: \
         write `ip6 proto` or `ip proto`"
    )]
    Jump {
        /// Which, from 0.
        at: usize,
    },
    /// The last instruction goes on.
    #[error("it does not end with an instruction that returns")]
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Byte,
    Half,
    Word,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operand {
    Number(u32),
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arithmetic {
    Add,
    Subtract,
    Multiply,
    Divide,
    Or,
    And,
    ShiftLeft,
    ShiftRight,
    Remainder,
    ExclusiveOr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Equal,
    Greater,
    GreaterOrEqual,
    AnyBit,
}

/// One step. *A* is the accumulator, *X* the index register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instruction {
    /// A from the packet at a fixed place.
    Load(Width, u32),
    /// A from the packet at X and so many bytes more.
    LoadAtIndex(Width, u32),
    LoadNumber(u32),
    LoadMemory(usize),
    LoadLength,
    IndexNumber(u32),
    IndexMemory(usize),
    IndexLength,
    /// X is the length of the IPv4 header whose first byte lies there.
    IndexHeaderLength(u32),
    Store(usize),
    StoreIndex(usize),
    Compute(Arithmetic, Operand),
    Negate,
    /// So many instructions are passed over.
    Jump(usize),
    Branch {
        comparison: Comparison,
        operand: Operand,
        then: usize,
        otherwise: usize,
    },
    ReturnNumber(u32),
    ReturnAccumulator,
    ToIndex,
    FromIndex,
}

impl Width {
    const fn len(self) -> usize {
        match self {
            Self::Byte => 1,
            Self::Half => 2,
            Self::Word => 4,
        }
    }

    /// `None`: the packet ends before that.
    fn read(self, packet: &[u8], at: Option<u32>) -> Option<u32> {
        let at = usize::try_from(at?).ok()?;
        let bytes = packet.get(at..at.checked_add(self.len())?)?;
        Some(bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)))
    }
}

impl Arithmetic {
    /// `None`: a division by zero, which ends the program.
    fn of(self, left: u32, right: u32) -> Option<u32> {
        match self {
            Self::Add => Some(left.wrapping_add(right)),
            Self::Subtract => Some(left.wrapping_sub(right)),
            Self::Multiply => Some(left.wrapping_mul(right)),
            Self::Divide => left.checked_div(right),
            Self::Remainder => left.checked_rem(right),
            Self::Or => Some(left | right),
            Self::And => Some(left & right),
            Self::ExclusiveOr => Some(left ^ right),
            Self::ShiftLeft => Some(left.checked_shl(right).unwrap_or(0)),
            Self::ShiftRight => Some(left.checked_shr(right).unwrap_or(0)),
        }
    }

    /// Whether a number that stands in the program makes sense.
    const fn takes(self, number: u32) -> bool {
        match self {
            Self::Divide | Self::Remainder => number != 0,
            Self::ShiftLeft | Self::ShiftRight => number < u32::BITS,
            _ => true,
        }
    }
}

impl Comparison {
    const fn holds(self, left: u32, right: u32) -> bool {
        match self {
            Self::Equal => left == right,
            Self::Greater => left > right,
            Self::GreaterOrEqual => left >= right,
            Self::AnyBit => left & right != 0,
        }
    }
}

impl Program {
    /// From the bytes of its instructions.
    ///
    /// # Errors
    ///
    /// They are none, or it could read or jump where there is nothing, or never end.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProgramError> {
        if !bytes.len().is_multiple_of(LEN) {
            return Err(ProgramError::Length(bytes.len()));
        }
        let count = bytes.len() / LEN;
        if !(1..=INSTRUCTIONS_MAX).contains(&count) {
            return Err(ProgramError::Count(count));
        }
        let decoded = bytes.chunks_exact(LEN).enumerate().map(|(at, bytes)| decode(at, count, bytes));
        let program = decoded.collect::<Result<Vec<_>, _>>()?;
        let is_end = |last: &Instruction| matches!(last, Instruction::ReturnNumber(_) | Instruction::ReturnAccumulator);
        if program.last().is_some_and(is_end) { Ok(Self(program)) } else { Err(ProgramError::End) }
    }

    /// Whether a packet, from its IP header on, is one of those that the expression describes. One that is too short
    /// for what the program reads is none.
    pub fn matches(&self, packet: &[u8]) -> bool {
        self.run(packet).is_some_and(|returned| returned != 0)
    }

    fn run(&self, packet: &[u8]) -> Option<u32> {
        let len = u32::try_from(packet.len()).ok()?;
        let (mut accumulator, mut index) = (0_u32, 0_u32);
        let mut memory = [0_u32; MEMORY];
        let mut rest = self.0.iter();
        loop {
            let value = |operand: Operand| match operand {
                Operand::Number(number) => number,
                Operand::Index => index,
            };
            match *rest.next()? {
                Instruction::Load(width, at) => accumulator = width.read(packet, Some(at))?,
                Instruction::LoadAtIndex(width, at) => accumulator = width.read(packet, index.checked_add(at))?,
                Instruction::LoadNumber(number) => accumulator = number,
                Instruction::LoadMemory(at) => accumulator = *memory.get(at)?,
                Instruction::LoadLength => accumulator = len,
                Instruction::IndexNumber(number) => index = number,
                Instruction::IndexMemory(at) => index = *memory.get(at)?,
                Instruction::IndexLength => index = len,
                Instruction::IndexHeaderLength(at) => index = (Width::Byte.read(packet, Some(at))? & 0xf) * 4,
                Instruction::Store(at) => *memory.get_mut(at)? = accumulator,
                Instruction::StoreIndex(at) => *memory.get_mut(at)? = index,
                Instruction::Compute(how, operand) => accumulator = how.of(accumulator, value(operand))?,
                Instruction::Negate => accumulator = accumulator.wrapping_neg(),
                Instruction::Jump(over) => rest.advance(over),
                Instruction::Branch { comparison, operand, then, otherwise } => {
                    rest.advance(if comparison.holds(accumulator, value(operand)) { then } else { otherwise });
                }
                Instruction::ReturnNumber(number) => return Some(number),
                Instruction::ReturnAccumulator => return Some(accumulator),
                Instruction::ToIndex => index = accumulator,
                Instruction::FromIndex => accumulator = index,
            }
        }
    }
}

/// Passing over instructions.
trait Advance {
    fn advance(&mut self, over: usize);
}

impl Advance for core::slice::Iter<'_, Instruction> {
    fn advance(&mut self, over: usize) {
        *self = self.as_slice().get(over..).unwrap_or_default().iter();
    }
}

/// The instruction `at` of `count`.
fn decode(at: usize, count: usize, bytes: &[u8]) -> Result<Instruction, ProgramError> {
    let code = u16::from_be_bytes([bytes[0], bytes[1]]);
    let number = u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
    let place = || if number <= PACKET_MAX { Ok(number) } else { Err(ProgramError::Beside { at }) };
    let cell = || {
        let cell = usize::try_from(number).ok().filter(|cell| *cell < MEMORY);
        cell.ok_or(ProgramError::Number { at, number })
    };
    let jump = |over: u32| {
        let over = usize::try_from(over).ok().filter(|over| *over < count - at - 1);
        over.ok_or(ProgramError::Jump { at })
    };
    let operand = || if code & 8 == 0 { Operand::Number(number) } else { Operand::Index };
    // Codes as in <linux/filter.h>: the class in the lowest 3 bits, then what is done, and with what.
    Ok(match code {
        0x20 => Instruction::Load(Width::Word, place()?),
        0x28 => Instruction::Load(Width::Half, place()?),
        0x30 => Instruction::Load(Width::Byte, place()?),
        0x40 => Instruction::LoadAtIndex(Width::Word, number),
        0x48 => Instruction::LoadAtIndex(Width::Half, number),
        0x50 => Instruction::LoadAtIndex(Width::Byte, number),
        0x00 => Instruction::LoadNumber(number),
        0x60 => Instruction::LoadMemory(cell()?),
        0x80 => Instruction::LoadLength,
        0x01 => Instruction::IndexNumber(number),
        0x61 => Instruction::IndexMemory(cell()?),
        0x81 => Instruction::IndexLength,
        0xb1 => Instruction::IndexHeaderLength(place()?),
        0x02 => Instruction::Store(cell()?),
        0x03 => Instruction::StoreIndex(cell()?),
        0x84 => Instruction::Negate,
        0x04 | 0x0c | 0x14 | 0x1c | 0x24 | 0x2c | 0x34 | 0x3c | 0x44 | 0x4c | 0x54 | 0x5c | 0x64 | 0x6c | 0x74
        | 0x7c | 0x94 | 0x9c | 0xa4 | 0xac => {
            let how = arithmetic(code);
            let operand = operand();
            match operand {
                Operand::Number(number) if !how.takes(number) => return Err(ProgramError::Number { at, number }),
                _ => Instruction::Compute(how, operand),
            }
        }
        0x05 => Instruction::Jump(jump(number)?),
        0x15 | 0x1d | 0x25 | 0x2d | 0x35 | 0x3d | 0x45 | 0x4d => {
            let comparison = match code & 0xf0 {
                0x10 => Comparison::Equal,
                0x20 => Comparison::Greater,
                0x30 => Comparison::GreaterOrEqual,
                _ => Comparison::AnyBit,
            };
            let then = jump(bytes[2].into())?;
            let otherwise = jump(bytes[3].into())?;
            Instruction::Branch { comparison, operand: operand(), then, otherwise }
        }
        0x06 => Instruction::ReturnNumber(number),
        0x16 => Instruction::ReturnAccumulator,
        0x07 => Instruction::ToIndex,
        0x87 => Instruction::FromIndex,
        code => return Err(ProgramError::Code { at, code }),
    })
}

/// Of a code that is one of arithmetic.
const fn arithmetic(code: u16) -> Arithmetic {
    match code & 0xf0 {
        0x00 => Arithmetic::Add,
        0x10 => Arithmetic::Subtract,
        0x20 => Arithmetic::Multiply,
        0x30 => Arithmetic::Divide,
        0x40 => Arithmetic::Or,
        0x50 => Arithmetic::And,
        0x60 => Arithmetic::ShiftLeft,
        0x70 => Arithmetic::ShiftRight,
        0x90 => Arithmetic::Remainder,
        _ => Arithmetic::ExclusiveOr,
    }
}

#[cfg(test)]
#[path = "filter_test.rs"]
mod test;
