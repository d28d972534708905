//! The Service Access Layer as a pure state machine: bytes, events and `now` in; bytes, one deadline and events out.
//!
//! No socket, clock, thread, randomness or async lives here (DESIGN §3.4). [`Sal`] is the whole of it; its doc comment
//! is the contract.
#![no_std]

extern crate alloc;

pub mod association;
pub mod auth;
pub mod certificate;
mod closing;
pub mod config;
mod control;
pub mod cookie;
mod counters;
pub mod direct;
pub mod entry;
pub mod event;
mod flow;
mod forward;
mod greeting;
pub mod handover;
pub mod handshake;
pub mod hop;
pub mod instance;
pub mod keepsake;
pub mod key;
pub mod name;
pub mod output;
mod packet;
mod queue;
mod rate;
mod related;
pub mod rng;
mod sal;
pub mod session;
mod setup;
pub mod source;
pub mod state;
mod surrogate;
pub mod table;
pub mod time;

pub use config::{Config, Limits};
pub use control::AssociationSetup;
pub use counters::Counters;
pub use direct::{Carriage, DirectEvent, Why};
pub use entry::{Entry, EntryUpdate, Path, PathId, RemoveReason, Tuple, Wire};
pub use event::{AssociationInfo, Event, FlowInfo, Lifecycle, Role};
pub use flow::{LIFE, LifeEvent};
pub use output::{AppVerdict, Direction, DropReason, Output};
pub use sal::Sal;
pub use time::Instant;
