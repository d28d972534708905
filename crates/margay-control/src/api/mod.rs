//! The agent's API: gRPC on a Unix socket that only root and one group may open (DESIGN §15), and over TLS for operators elsewhere.

pub mod remote;
pub mod socket;

pub use socket::{ApiError, bind, connect, serve};

/// Messages and services of `proto/margay.proto`.
#[allow(missing_docs, clippy::all, clippy::unwrap_used)]
pub mod v1 {
    tonic::include_proto!("margay.v1");
}
