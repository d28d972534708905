//! A local user without rights, in a network namespace of its own, who makes sockets with the five-tuples of other
//! users' connections and asks the agent to give these away.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use margay_core::name::Name;
use margay_sdk::{NotHandedOver, ToTarget, hand_over_to};
use serde_json::json;
use tokio::net::{TcpListener, TcpSocket};

use crate::host::write_line;

/// Connections of a server, as `local,peer`.
pub type FiveTuple = (SocketAddr, SocketAddr);

/// Reads one.
///
/// # Errors
///
/// It is none.
pub fn five_tuple(text: &str) -> Result<FiveTuple, String> {
    let (local, peer) = text.split_once(',').ok_or("a comma is missing")?;
    let read = |one: &str| one.parse().map_err(|error| format!("{one}: {error}"));
    Ok((read(local)?, read(peer)?))
}

/// Asks for each, with and without its name. Prints what came of that.
///
/// # Errors
///
/// The kernel makes no such socket, or the name is none.
pub async fn give_away(all: &[FiveTuple], service: &Name, host: &str) -> Result<()> {
    let target = service.written().to_target()?;
    let (mut sent, mut accepted, mut refused, mut said) = (0, 0, 0, String::new());
    for (local, peer) in all {
        for name in [None, Some(&target)] {
            let socket = made_up(*local, *peer).await.with_context(|| format!("no socket {local} to {peer}"))?;
            sent += 1;
            match hand_over_to(host, socket, name, b"stolen").await {
                Ok(()) => accepted += 1,
                Err(NotHandedOver { error, .. }) => {
                    refused += 1;
                    said = error.to_string();
                }
            }
        }
    }
    // Not `said`: that is what takers say to streams.
    let text = json!({"sent": sent, "accepted": accepted, "refused_local": refused, "why": said});
    write_line(&text.to_string())
}

/// An accepted socket between these two addresses, both of which the namespace has.
async fn made_up(local: SocketAddr, peer: SocketAddr) -> Result<std::net::TcpStream> {
    let listener = TcpSocket::new_v4()?;
    listener.set_reuseaddr(true)?;
    listener.bind(local)?;
    let listener: TcpListener = listener.listen(1)?;
    let client = TcpSocket::new_v4()?;
    client.set_reuseaddr(true)?;
    client.bind(peer)?;
    let (client, accepted) = tokio::join!(client.connect(local), listener.accept());
    let (accepted, _) = accepted?;
    // A reset, so that the next one may have the same addresses at once.
    let client = client?.into_std()?;
    socket2::SockRef::from(&client).set_linger(Some(std::time::Duration::ZERO))?;
    Ok(accepted.into_std()?)
}
