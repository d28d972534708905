//! Identifiers, keys, names, time and other plain values.

pub mod config;
pub mod direction;
pub mod drop_reason;
pub mod epoch;
pub mod fair_table;
pub mod hop;
pub mod key;
pub(crate) mod keyed_hash;
pub mod name;
pub(crate) mod ranges;
pub mod rate;
pub mod rng;
pub mod role;
pub(crate) mod site;
pub mod state;
pub mod time;
pub mod tuple;
