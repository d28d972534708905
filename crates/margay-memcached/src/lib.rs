//! Memcached in partitions (DESIGN §5, §8; Serval §6.2): which partition a key is in, and a proxy that takes
//! unmodified clients there.
//!
//! Reading order: [`partition`] (the client call), [`request`] (what clients say), [`server`] (who answers for a
//! partition), [`proxy`]. Framers of ensembles (crate `margay-frames`) use [`request`], and all processes that
//! clients or other hosts talk to use [`process`].

pub mod partition;
pub mod process;
pub mod proxy;
pub mod request;
pub mod server;
