//! The Service Access Layer as a pure state machine: bytes, events and `now` in; bytes, one deadline and events out.
//!
//! No socket, clock, thread, randomness or async lives here (DESIGN §3.4). [`Sal`] is the whole of it; its doc comment
//! is the contract.
#![no_std]

extern crate alloc;

pub mod config;
pub mod entry;
pub mod event;
pub mod output;
pub mod time;
