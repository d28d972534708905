//! What becomes of a join: the router's answer is waited for.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use margay_control::api;
use margay_control::api::v1::{RouterInfo, StatusReply, StatusRequest};
use miette::{IntoDiagnostic, Result, miette};
use tokio::time::{Instant, sleep};

use crate::config::Config;

/// A router that is there answers within a second; one that has just started lets hosts in after some more.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_millis(50);
/// People see that something is waited for.
const PROGRESS: Duration = Duration::from_secs(1);

/// How a join stands.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The host is a member.
    Joined,
    /// The router does not let it in.
    Refused(String),
    /// There is no answer yet.
    Open(String),
}

/// Waits until the running agent is a member of the authority that its token names. Whatever the router says, the
/// agent goes on running and asking: a router that cannot let a host in now may be able to later.
///
/// # Errors
///
/// The router refuses, for the reason that the message has; or it is not reached in time.
pub async fn await_answer(config: &Config, is_quiet: bool) -> Result<()> {
    let mut client = api::connect(&config.socket()).await.into_diagnostic()?;
    let begun = Instant::now();
    let mut told = begun;
    loop {
        let status = client.status(StatusRequest {}).await.map_err(|status| miette!("{}", status.message()))?;
        let why = match answer(&status.into_inner()) {
            Answer::Joined => return Ok(()),
            Answer::Refused(why) => {
                return Err(miette!(
                    help = "the agent runs and goes on asking; with another token: `margay down`, then `margay up \
                     --join TOKEN`",
                    "{why}"
                ));
            }
            Answer::Open(why) => why,
        };
        if begun.elapsed() > ANSWER_LIMIT {
            return Err(miette!(
                help = "the agent runs and goes on asking; `margay status` says how it stands, `margay check` looks \
                 for the cause",
                "this host has not joined yet: {why}"
            ));
        }
        if told.elapsed() > PROGRESS && !is_quiet && std::io::stderr().is_terminal() {
            told = Instant::now();
            // Nobody may be reading.
            let _ = writeln!(std::io::stderr(), "waiting for the router: {why}");
        }
        sleep(LOOK).await;
    }
}

fn answer(status: &StatusReply) -> Answer {
    if status.joined {
        return Answer::Joined;
    }
    let said = |router: &RouterInfo| match router.why.as_str() {
        "" => format!("the router at {} has not answered", router.address),
        why => format!("the router at {}: {why}", router.address),
    };
    match status.routers.iter().find(|router| router.state == "refused") {
        Some(router) => Answer::Refused(format!("the router at {} refuses this host: {}", router.address, router.why)),
        None => Answer::Open(status.routers.first().map_or_else(|| "no router is known".to_owned(), said)),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn status(state: &str, why: &str) -> StatusReply {
        let router = RouterInfo {
            address: "192.0.2.1:54324".into(),
            state: state.into(),
            why: why.into(),
            ..RouterInfo::default()
        };
        StatusReply { routers: vec![router], ..StatusReply::default() }
    }

    #[test]
    fn a_refusal_ends_the_waiting_and_a_router_that_is_away_does_not() {
        let Answer::Refused(why) = answer(&status("refused", "the token is used up")) else { panic!("not refused") };
        assert!(why.contains("192.0.2.1:54324") && why.contains("the token is used up"), "{why}");
        let away = answer(&status("unreachable", "connection refused"));
        assert!(matches!(away, Answer::Open(why) if why.contains("connection")));
        assert!(matches!(answer(&StatusReply::default()), Answer::Open(_)));
        assert_eq!(answer(&StatusReply { joined: true, ..status("refused", "of another router") }), Answer::Joined);
    }
}
