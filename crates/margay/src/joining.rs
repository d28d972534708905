//! A join, as the command line asks for it: the router's answer is waited for.

use std::io::Write;
use std::pin::pin;
use std::time::Duration;

use margay_control::api;
use margay_control::api::v1::{JoinReply, JoinRequest};
use margay_control::token::JoinToken;
use miette::{IntoDiagnostic, Result, miette};
use tokio::time::{Instant, interval_at};

use crate::config::Config;

/// People see that something is waited for.
const PROGRESS: Duration = Duration::from_secs(1);

/// Makes this host a member of the authority that a token names, by the running agent. It undoes a join that fails.
///
/// # Errors
///
/// The router refuses, for the reason that the message has; or it is not reached in time.
pub async fn join(config: &Config, token: &str, is_quiet: bool) -> Result<JoinReply> {
    let router = token.parse::<JoinToken>().into_diagnostic()?.router_address;
    let mut client = api::connect(&config.socket()).await.into_diagnostic()?;
    let mut answer = pin!(client.join(JoinRequest { token: token.to_owned() }));
    let mut rounds = interval_at(Instant::now() + PROGRESS, PROGRESS);
    let begun = Instant::now();
    loop {
        tokio::select! {
            answer = &mut answer => {
                let answer = answer.map_err(|status| miette!("{}", status.message()))?;
                return Ok(answer.into_inner());
            }
            _ = rounds.tick() => {
                if !is_quiet {
                    let waited_s = begun.elapsed().as_secs();
                    // Nobody may be reading.
                    let _ = writeln!(std::io::stderr(), "waiting for the router at {router} ({waited_s} s)");
                }
            }
        }
    }
}
