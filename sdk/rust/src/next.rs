//! The program of a box, which names the boxes that a session goes through next.

use std::net::SocketAddr;

use margay_core::name::{Prefix, ServiceId};
use margay_wire::ProgramTarget;
use rustix::io::Errno;

use crate::agent::Agent;
use crate::error::Error;
use crate::wire::{Kind, Protocol, Request};

/// Addresses and ports of a session's first packet as it has come to the box by `sal0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FirstPacket {
    /// What it is of.
    pub protocol: Protocol,
    /// Its source: the client.
    pub from: SocketAddr,
    /// Its destination: what stands for the service on this host.
    pub to: SocketAddr,
}

/// Has a session go through these boxes next, in order, before the rest of its chain. The box must not have let the
/// session's first packet out; as long as it keeps the packet, for a second at most, the last call counts. To say the
/// same again does nothing.
///
/// The process must belong to the program that was started as the box, or its user may serve the box's name, as root
/// may. Which boxes may be named the policy says, by `may_add` of the session's chain.
///
/// ```no_run
/// use margay_sdk::{FirstPacket, Protocol, pass_next};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let first = FirstPacket { protocol: Protocol::Tcp, from: "10.0.0.7:40000".parse()?, to: "198.18.0.9:443".parse()? };
/// pass_next(&first, &["ids.shop"]).await?;
/// // And now the packet may go on.
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Refused`] with `ENOTCONN` (no such session has come to a box of this host), `EACCES` (the program is not
/// that box's), `EPERM` (the policy does not let the box be added to such sessions), `EALREADY` (the first packet has
/// left the box), `E2BIG` (more than eight boxes), `EINVAL` (a name that is no box's, or that the session passes
/// already); [`Error::AgentDown`]; [`Error::Incompatible`], also where the agent is of an earlier release.
pub async fn pass_next(first: &FirstPacket, boxes: &[&str]) -> Result<(), Error> {
    Agent::shared().pass_next(first, boxes).await
}

impl Agent {
    /// As [`pass_next`], by this agent.
    ///
    /// # Errors
    /// As for [`pass_next`].
    pub async fn pass_next(&self, first: &FirstPacket, boxes: &[&str]) -> Result<(), Error> {
        let FirstPacket { protocol, from, to } = *first;
        let text = boxes.join(" ");
        let request = Request {
            protocol: Some(protocol),
            port: from.port(),
            prefix: Prefix { id: ServiceId(ProgramTarget(to).emit()), bits: 0 },
            address: Some(from.ip()),
            text: &text,
            ..Request::new(Kind::Next)
        };
        match self.ask("to name the next box", &request, None).await {
            Ok(_) => Ok(()),
            // It does not know the question.
            Err(Error::Refused { errno, .. }) if errno == Errno::BADMSG.raw_os_error() => {
                Err(self.incompatible("it is of an earlier release, and takes no names of next boxes".to_owned()))
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_has_the_session_where_the_format_says() {
        let to: SocketAddr = "198.18.0.9:443".parse().expect("literal");
        let request = Request {
            protocol: Some(Protocol::Tcp),
            port: 40_000,
            prefix: Prefix { id: ServiceId(ProgramTarget(to).emit()), bits: 0 },
            address: Some("10.0.0.7".parse().expect("literal")),
            text: "ids.shop",
            ..Request::new(Kind::Next)
        };
        let bytes = request.to_bytes().expect("short");
        let mut wanted = vec![1, 16, 6, 0, 0x9c, 0x40, 0, 0];
        wanted.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 198, 18, 0, 9, 0x01, 0xbb]);
        wanted.extend_from_slice(&[0; 14]);
        wanted.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 7]);
        wanted.extend_from_slice(b"ids.shop");
        assert_eq!(bytes, wanted);
    }
}
