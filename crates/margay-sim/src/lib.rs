//! A whole network of Margay hosts in virtual time, from one seed (DESIGN §3.4, §16).
//!
//! Every host runs the [`Sal`](margay_core::Sal) that ships; only clock, network and programs are simulated. The same
//! seed gives the same run, packet for packet. [`World`] is the network, [`Host`] one machine on it, [`program`] the
//! tiny TCP and UDP programs that the hosts run, [`stream`] those that talk for longer, [`kernel`] the cache of the
//! direct path, and [`check`] judges a run from outside. [`nonces`] checks in every world that no nonce is used twice
//! under its key. [`ensemble`] is a world of its own: one peer, one switch, many members.

pub mod cache;
#[cfg(test)]
mod cache_suite;
pub mod certificate;
pub mod check;
pub mod ensemble;
pub mod granted;
pub mod host;
mod kernel;
pub mod middlebox;
pub mod network;
pub mod nonces;
mod place_fec;
pub mod program;
mod relay;
mod seal;
pub mod small;
pub mod stream;
mod turn;
pub mod unrest;
pub mod world;

pub use host::{Host, HostId};
pub use network::Weather;
pub use program::{Datagram, Outcome};
pub use relay::Relay;
pub use world::World;
