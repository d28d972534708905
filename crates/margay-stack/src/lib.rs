//! Stacks that put something of their own into a flow of datagrams (DESIGN §12; docs/decisions/0081 and 0099).
//!
//! There are two: `fec`, which repairs what the network loses, and `sctp`, which sends it again. They are pure, as the
//! core is: datagrams and `now` in; datagrams, one deadline and counts out. `encap` and `secure` put nothing into a
//! flow but a header, and need no engine.
//!
//! | | order | twice | what is lost | bytes | waits |
//! |---|---|---|---|---|---|
//! | `fec` | kept | never | is repaired, for the most part | up to half as many more | behind what is missing, 40 ms |
//! | `sctp` | not kept | never | is sent again, [250 ms](sctp::LIFETIME) | what is lost; 24 each | nothing |
//!
//! Reading order: [`plan`] says how many repairs a block needs, [`encoder`] makes blocks and repairs, [`decoder`] puts
//! them together again; [`beside`] does both for one place of a striped flow, whose datagrams have numbers already.
//! [`sctp`] is one end of a flow by `sctp`.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod beside;
pub mod decoder;
pub mod encoder;
pub mod plan;
pub mod sctp;

pub use beside::{RepairBeside, Repairer, Restorer};
pub use decoder::{Arrivals, Decoder, Given, Refused, RepairOf};
pub use encoder::{Encoder, Repair, Slot};
pub use plan::{Loss, Plan};

/// Most repairs of a block.
pub const REPAIRS_MAX: u16 = margay_wire::BLOCK_MAX;

/// The number of the first datagram that a flow sends by `fec` or `sctp` from this change on. Both ends know the
/// change: so the first datagram may be lost as any other, and what is late of an earlier time is far from what is
/// expected.
pub const fn first_number(change: u32) -> u32 {
    // An odd constant, that of Fibonacci hashing: changes that follow each other have numbers far apart.
    change.wrapping_mul(0x9e37_79b1)
}
