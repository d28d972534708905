//! A program that leaves between two connections.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use crate::agent::Agent;
use crate::error::Error;
use crate::wire::{Kind, Protocol, Request};

/// Why two connections do not become one.
#[derive(Debug)]
pub struct NotSpliced {
    /// The two sockets, left and right: this process goes on relaying between them. `None`: they are closed, since
    /// nobody can say whether the agent relays.
    pub sockets: Option<[OwnedFd; 2]>,
    /// Why the agent has refused, or has not answered.
    pub error: Error,
}

impl fmt::Display for NotSpliced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.sockets {
            Some(_) => write!(f, "the two connections stay two: {}", self.error),
            None => write!(f, "nobody can say who relays between them, so both are closed: {}", self.error),
        }
    }
}

impl std::error::Error for NotSpliced {}

/// Leaves between two TCP connections: `left`, which this program has accepted by a name, and `right`, which it has
/// opened to one. They become one connection, without this program. All that was read of either must have been written
/// to the other one; what was read and is still in a buffer of this process is lost.
///
/// Until they are one, or for as long as they cannot be, the agent relays between the two; the ends notice nothing
/// either way. An agent that is restarted while it relays ends the two connections by resets.
///
/// A call that is cancelled closes both sockets.
///
/// ```no_run
/// use margay_sdk::splice;
/// use tokio::net::TcpStream;
///
/// # async fn example(client: TcpStream, server: TcpStream) -> Result<(), Box<dyn std::error::Error>> {
/// // The first lines have been read, checked and passed on: the rest is none of this program's business.
/// splice(client.into_std()?, server.into_std()?).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`NotSpliced`] has the sockets, unless they are closed, and as its error [`Error::Refused`] with `ENOTCONN` (one of
/// them is no connection by a name), `EINVAL` (they are in the wrong order), `EALREADY`, or `EOPNOTSUPP` (they cannot
/// become one; the text says why); [`Error::AgentDown`]; [`Error::Incompatible`].
pub async fn splice(left: impl Into<OwnedFd>, right: impl Into<OwnedFd>) -> Result<(), NotSpliced> {
    Agent::shared().splice(left, right).await
}

impl Agent {
    /// As [`splice`], by this agent.
    ///
    /// # Errors
    /// As for [`splice`].
    pub async fn splice(&self, left: impl Into<OwnedFd>, right: impl Into<OwnedFd>) -> Result<(), NotSpliced> {
        let sockets = [left.into(), right.into()];
        let request = Request { protocol: Some(Protocol::Tcp), ..Request::new(Kind::Splice) };
        let passed = [sockets[0].as_fd(), sockets[1].as_fd()];
        let mut is_sent = false;
        match self.ask_once("to leave between two connections", &request, &passed, &mut is_sent).await {
            Ok(_) => Ok(()),
            // It does not know the question.
            Err(Error::Refused { errno, .. }) if errno == Errno::BADMSG.raw_os_error() => {
                let why = "it is of an earlier release, and makes no one connection of two".to_owned();
                Err(NotSpliced { sockets: Some(sockets), error: self.incompatible(why) })
            }
            Err(error @ Error::Refused { .. }) => Err(NotSpliced { sockets: Some(sockets), error }),
            Err(error) => Err(NotSpliced { sockets: (!is_sent).then_some(sockets), error }),
        }
    }
}
