//! Ensembles (DESIGN §13, after Anypoint): one connection of a peer with many members, switched frame by frame and
//! terminated nowhere on the way.
//!
//! [`Switch`] is what stands between them. It translates sequence numbers, and so leaves order, acknowledgement and
//! repetition to the ends: it holds no frame, acknowledges nothing by itself, and gives no frame to two members.
//! [`Sender`] and [`Receiver`] are the ends, of a peer as of a member. All speak the format of [`margay_wire::sctp`].
//!
//! Nothing here has a socket, clock, thread, randomness or async (DESIGN §3.4): packets and `now` in; packets, one
//! deadline and events out.
//!
//! To be read in this order: `number` and `member` (the paper's Tables 2 and 3), `split` (from the peer to the
//! members), `patch` (numbers kept free for what has not come), `merge` (from the members to the peer), `death` (what
//! becomes of a dead member's frames), `switch` (all of it together), then `endpoint`, and `connection` (an end with
//! its beginning and its end, as docs/decisions/0075 has them).
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

mod acknowledgement;
mod config;
mod connection;
mod counters;
mod death;
mod endpoint;
mod member;
mod merge;
mod number;
mod outbox;
mod patch;
mod plugin;
mod repeat;
mod rules;
mod split;
mod switch;

#[cfg(test)]
mod test;

pub use config::{Config, Failure, LossDetection, WINDOW_DEFAULT, WINDOW_MAX, WINDOW_MIN};
pub use connection::{Connection, ConnectionConfig, Over, Standing};
pub use counters::{Counters, Dropped};
pub use endpoint::{Patience, Queued, Reading, Received, Receiver, ReceiverConfig, Sender, SenderConfig, TooLarge};
pub use member::{Joining, Kind, MEMBER_STREAMS_MAX, MEMBERS_MAX, MemberId, Members};
pub use number::{Csn, Lsn, Serial, Tsn};
pub use outbox::{Packet, To};
pub use plugin::{Frame, Order, Plugin, Verdict};
pub use rules::{Rules, Sound};
pub use split::STREAMS_MAX;
pub use switch::{Event, Full, Switch};
