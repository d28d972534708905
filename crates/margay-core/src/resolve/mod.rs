//! How a name becomes a host: ways, instances, forwarding, delaying, segments, searches, notices.

pub mod delay;
pub mod explain;
pub(crate) mod forward;
pub mod forward_all;
pub mod instance;
pub mod lifetime;
pub(crate) mod named;
pub mod notice;
pub mod router_copy;
pub mod segment;
pub mod source;
pub mod way;
