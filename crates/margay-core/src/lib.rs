//! The Service Access Layer as a pure state machine: bytes, events and `now` in; bytes, one deadline and events out.
//!
//! No socket, clock, thread, randomness or async lives here (DESIGN §3.4). [`Sal`] is the whole of it; its doc comment
//! is the contract.
#![no_std]

extern crate alloc;

mod act;
pub mod association;
mod cache;
mod leg;
mod machine;
mod resolve;
pub mod session;
pub mod table;
mod trust;
mod types;

pub use act::ending::{drain, fence, patience, quiet};
pub use act::fetch::HandOverError;
pub use act::moving::keepsake;
pub use act::path::place_stack::{PlaceStacks, PlaceStacksError};
pub use act::path::policy::{Policy, Weights, WeightsError};
pub use act::path::side_path::{MoveRefused, Towards};
pub use act::path::{direct, policy};
pub use act::stack_change::{ChangeCause, ChangeOutcome, ChangeRefused, StackChange, StackInfo};
pub use act::{chain, fetch, handover, reconfiguration, search, secure, stack_change, stack_rule};
pub use association::location::{Cause, Moved, Moving, Pair, Trouble};
pub use association::{auth, location, twin};
pub use cache::entry::{
    Directions, Entry, EntryUpdate, FlowCounters, Grant, Passage, Path, PathId, RemoveReason, Survey, Wire,
};
pub use cache::output::{AppVerdict, Output};
pub use cache::packet::{KNOCK_WINDOW, PINHOLE_WINDOW};
pub use cache::{entry, flow_cache, output};
pub use leg::stack::{PlaceStack, Stack, Stacks, Taking};

pub use leg::carriage::{Carriage, DirectEvent, Why};
pub use leg::seal::{Cipher, SealKeys};
pub use leg::{carriage, copies, delta, loss, reorder, stripe, timing};
pub use machine::control::AssociationSetup;
pub use machine::counters::Counters;
pub use machine::input::Input;
pub use machine::sal::Sal;
pub use machine::share::{SHARED_TABLES, share_refusals};
pub use resolve::forward::ABSENT_AWAITED;
pub use resolve::{delay, explain, forward_all, instance, notice, router_copy, segment, source, way};
pub use session::event::{AssociationInfo, Event, FlowInfo, StripePlace};
pub use session::flow::{LIFE, LifeEvent};
pub use session::hand_over::{HandOver, HandedSession, PeerTicket, Ticket};
pub use session::{event, give_up, hand_over};
pub use table::lifetime;
pub use table::middlebox::{BoxKind, Middlebox};
pub use trust::{certificate, cookie, handshake, key_revocation, succession};
pub use types::config::{Config, Limits};
pub use types::direction::Direction;
pub use types::drop_reason::DropReason;
pub use types::ranges::{BITS_V4, BITS_V6, RangeError, RangeV4, RangeV6, Ranges};
pub use types::role::{Lifecycle, Role};
pub use types::time::Instant;
pub use types::tuple::Tuple;
pub use types::{config, epoch, fair_table, hop, key, name, rate, rng, state, time};
