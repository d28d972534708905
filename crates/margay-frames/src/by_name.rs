//! Ensembles by name: what the parts ask the agent of their host.

use std::io;
use std::time::Duration;

use margay_core::key::HostId;
use margay_sdk::{Agent, Error, Instances, Options, Target};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::member::{Config, End, check};
use crate::switch::MemberAt;

/// Pause before the agent is asked again, when it has ended.
const AGENT_PAUSE: Duration = Duration::from_millis(500);
/// Pause before a program is looked at again that does not answer.
const PROGRAM_PAUSE: Duration = Duration::from_millis(500);

/// Follows who the members of an ensemble are, for ever. While the agent is away those hold that it has named last.
///
/// # Errors
///
/// Only before the first list: the agent does not answer, or refuses.
pub async fn follow_members(agent: &Agent, name: &Target, members: &watch::Sender<Vec<MemberAt>>) -> io::Result<()> {
    let mut instances = Instances::of(agent, name).await?;
    loop {
        match instances.next().await {
            Ok(found) => {
                if instances.beyond() > 0 {
                    let taken = found.len();
                    let beyond = instances.beyond();
                    tracing::warn!(taken, beyond, "more hosts serve the members' name than an ensemble has members");
                }
                members.send_replace(found.into_iter().filter_map(member_of).collect());
            }
            Err(error) => {
                tracing::warn!(%error, "the agent does not say who the members are; it is asked again");
                instances = loop {
                    sleep(AGENT_PAUSE).await;
                    if let Ok(again) = Instances::of(agent, name).await {
                        break again;
                    }
                };
            }
        }
    }
}

fn member_of(instance: margay_sdk::Instance) -> Option<MemberAt> {
    let margay_sdk::Instance { host, name, address, weight } = instance;
    Some(MemberAt { host: host_of(&host)?, name, address, weight })
}

/// A host-ID, which the agent writes in hexadecimal.
fn host_of(text: &str) -> Option<[u8; 16]> {
    text.parse::<HostId>().ok().map(|host| host.0)
}

/// Serves as a member by name: as long as the program answers, and again when it does. Ends when `leave` becomes
/// true, and all switches have let go. `serve` is [`member::serve`](crate::member::serve), or has another process do
/// that: whoever binds the name again needs the right to.
///
/// # Errors
///
/// The agent refuses the name, or does not answer to begin with; a socket fails.
pub async fn serve_member(
    agent: &Agent,
    name: &Target,
    config: &Config,
    mut leave: watch::Receiver<bool>,
    serve: impl AsyncFn(UdpSocket, Config, watch::Receiver<bool>) -> io::Result<End>,
) -> io::Result<()> {
    let mut has_waited = false;
    let mut has_served = false;
    loop {
        while let Err(why) = check(config.protocol, config.to).await {
            if !std::mem::replace(&mut has_waited, true) {
                tracing::warn!(why, "the member is not there until it answers");
            }
            tokio::select! {
                () = sleep(PROGRAM_PAUSE) => {}
                _ = leave.wait_for(|is_leaving| *is_leaving) => return Ok(()),
            }
        }
        has_waited = false;
        // The agent says which host this is, by the name that it gives the socket.
        let bound = match Options::new().agent(agent).own_source().bind_datagrams(name).await {
            Err(error @ Error::AgentDown { .. }) if has_served => {
                tracing::warn!(%error, "the member is not there until the agent is");
                tokio::select! {
                    () = sleep(AGENT_PAUSE) => continue,
                    _ = leave.wait_for(|is_leaving| *is_leaving) => return Ok(()),
                }
            }
            bound => bound?,
        };
        has_served = true;
        let host = bound.source().and_then(|source| source.host()).map(|host| host.0).unwrap_or_default();
        tracing::info!(name = name.written, program = %config.to, "the member is there");
        match serve(bound.into_udp(), Config { host, ..config.clone() }, leave.clone()).await? {
            End::Left => return Ok(()),
            End::ProgramGone(why) => tracing::warn!(why, "the member is gone"),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_host_is_read_from_its_digits() {
        let mut host = [0; 16];
        (host[0], host[15]) = (0xab, 0x01);
        assert_eq!(host_of("ab000000000000000000000000000001"), Some(host));
        for bad in [
            "",
            "ab",
            "zz000000000000000000000000000001",
            "äb000000000000000000000000000001",
            "ä000000000000000000000000000001",
            "+1000000000000000000000000000001",
        ] {
            assert_eq!(host_of(bad), None, "{bad}");
        }
    }
}
