//! What the agents of two hosts say to each other when a connection goes from one to the other
//! (`proto/handover.proto`): messages, and how long their parts may be. The stream is that of the registration.

pub use crate::registration::stream::{HAND_OVER, Reader, StreamError, Writer, answer, begin, read_all};

/// Messages of `proto/handover.proto`.
#[allow(missing_docs, clippy::all, clippy::unwrap_used)]
pub mod proto {
    tonic::include_proto!("margay.handover.v1");
}

/// Version of the protocol in `Head`.
pub const VERSION: u32 = 1;
/// Longest record of a connection in bytes: both of its queues, and some for its numbers and options.
pub const RECORD_MAX: usize = 40 << 20;
/// Bytes of a record, or of data, in one message.
pub const PIECE_MAX: usize = 32 << 10;
