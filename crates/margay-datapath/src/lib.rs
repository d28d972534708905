//! Everything between the kernel and the core: `sal0`, the UDP sockets, encapsulation and the user-space flow cache
//! (DESIGN §2, the engine path's first stack).

pub mod active_sockets;
pub mod arena;
mod backlog;
#[cfg(test)]
mod cache_suite;
mod caches;
pub mod checksum;
pub mod clock;
mod connection;
mod core_thread;
pub mod counters;
mod detour;
pub mod direct;
pub mod driver;
mod due_flows;
mod egress;
mod ending;
pub mod error;
pub mod fec;
pub mod fragment;
mod held_bytes;
mod ingress;
#[cfg(test)]
mod journey;
pub mod kernel;
mod lifting;
pub mod meaning;
pub mod offload;
pub mod order;
mod outbox;
pub mod packet;
mod pinhole;
#[cfg(test)]
mod prelude;
pub mod repair;
mod repairing;
mod restart;
#[cfg(test)]
mod sample;
pub mod sctp;
pub mod seal;
pub mod segments;
pub mod service_router;
pub mod sock_diag;
pub mod socket_table;
pub mod stillness;
pub mod striped;
pub mod table;
pub mod template;
pub mod train;
pub mod tun;
pub mod turning;
pub mod udp;
pub mod unconnected;
mod unreachable;
pub mod vnet;
mod wait;

pub use counters::Counters;
pub use driver::{Core, Datapath, DatapathConfig};
pub use error::Error;
pub use striped::PlaceCounters;
