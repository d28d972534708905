//! The Service Access Layer as a pure state machine: bytes, events and `now` in; bytes, one deadline and events out.
//!
//! No socket, clock, thread, randomness or async lives here (DESIGN §3.4). [`Sal`] is the whole of it; its doc comment
//! is the contract.
#![no_std]

extern crate alloc;

pub mod association;
pub mod auth;
pub mod carriage;
pub mod certificate;
mod changes;
mod closing;
pub mod config;
mod control;
pub mod cookie;
mod counters;
pub mod delay;
pub mod direct;
pub mod entry;
pub mod event;
pub mod explain;
mod flow;
mod flow_ports;
mod forward;
pub mod forward_all;
mod grant;
mod greeting;
mod half_open;
pub mod handover;
pub mod handshake;
mod hold;
pub mod hop;
pub mod instance;
pub mod keepsake;
pub mod key;
pub mod key_revocation;
pub mod lifetime;
mod liveness;
pub mod location;
mod moving;
pub mod name;
pub mod notice;
pub mod output;
mod packet;
pub mod policy;
mod queue;
pub mod rate;
mod redirect;
mod related;
pub mod reorder;
pub mod rng;
pub mod router_copy;
mod sal;
pub mod search;
pub mod secure;
pub mod segment;
pub mod session;
mod setup;
mod side_path;
pub mod source;
pub mod state;
pub mod stripe;
mod striping;
pub mod succession;
mod surrogate;
pub mod table;
pub mod time;
mod translator;
pub mod way;
mod wire_path;

pub use carriage::{Carriage, DirectEvent, Why};
pub use config::{Config, Limits};
pub use control::AssociationSetup;
pub use counters::Counters;
pub use entry::{Entry, EntryUpdate, Grant, Passage, Path, PathId, RemoveReason, Survey, Tuple, Wire};
pub use event::{AssociationInfo, Event, FlowInfo, Lifecycle, Role};
pub use flow::{LIFE, LifeEvent};
pub use location::{Cause, Moved, Moving, Pair, Trouble};
pub use output::{AppVerdict, Direction, DropReason, Output};
pub use packet::KNOCK_WINDOW;
pub use policy::Policy;
pub use sal::Sal;
pub use secure::{Cipher, SealKeys};
pub use side_path::{MoveRefused, Towards};
pub use striping::StripePlace;
pub use time::Instant;
