//! The agent's API: gRPC on a Unix socket that only root and one group may open (DESIGN §15), and over TLS for
//! operators elsewhere.

mod admission;
pub mod remote;
pub mod socket;

use std::io;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

pub use self::socket::{ApiError, bind, connect, serve};
use self::v1::agent_client::AgentClient;

/// A list of all flows of a large host is the largest answer.
const ANSWER_MAX_BYTES: usize = 64 << 20;

/// A client of the agent at the other end of a connection, which is the only one that it has: the transport, left to
/// connect by itself, does not tell why it could not.
async fn client_over<S>(stream: S) -> Result<AgentClient<Channel>, tonic::transport::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut once = Some(stream);
    let connector = service_fn(move |_| {
        let connection = once.take().map(TokioIo::new).ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
        async { connection }
    });
    let channel = Endpoint::from_static("http://agent").connect_with_connector(connector).await?;
    Ok(AgentClient::new(channel).max_decoding_message_size(ANSWER_MAX_BYTES))
}

/// Messages and services of `proto/margay.proto`.
#[allow(missing_docs, clippy::all, clippy::unwrap_used)]
pub mod v1 {
    tonic::include_proto!("margay.v1");
}
