//! Everything between the kernel and the core: `sal0`, the UDP sockets, encapsulation and the user-space flow cache
//! (DESIGN §2, the engine path's first stack).

pub mod checksum;
pub mod clock;
pub mod error;
pub mod fragment;
#[cfg(test)]
mod journey;
pub mod offload;
pub mod outbox;
pub mod packet;
mod port_owner;
#[cfg(test)]
mod sample;
pub mod table;
pub mod template;
pub mod train;
pub mod tun;
pub mod udp;
pub mod vnet;
