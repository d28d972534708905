//! What a flow cache and the packet path are told, what they report, and what packets are read as.

pub mod entry;
pub mod flow_cache;
pub mod output;
pub(crate) mod packet;
pub(crate) mod queue;
pub(crate) mod waiting_packets;
