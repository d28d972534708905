//! Joins a router while the agent runs, and leaves nothing of a join that fails.

use std::sync::Arc;
use std::time::Duration;

use margay_control::api::v1::JoinReply;
use margay_control::registration::{Home, HomeConfig, Phase};
use margay_control::token::JoinToken;
use margay_control::warrant::lineages;
use margay_core::name::authority_block;
use tokio::task::block_in_place;
use tokio::time::{Instant, timeout_at};

use super::{Agent, Publishing, home};

/// A router that is there answers within a second; one that has just started lets hosts in after some more, and one
/// that is only found by a search within seconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);

/// Joins the router of a token, and waits for the router's answer.
///
/// # Errors
///
/// The router's reason, or that it is not reached. This host belongs to whom it belonged to before then.
pub async fn join(agent: &Arc<Agent>, token: JoinToken) -> Result<JoinReply, String> {
    let config = home::config_of(&agent.config(), token);
    check_own(agent, &config)?;
    let reply = JoinReply {
        authority: config.authority.clone(),
        router_address: config.router_address.clone(),
        was_member: false,
    };
    let known = agent.publishing.services.homes().into_iter().find(|home| is_same(home.config(), &config));
    if known.as_ref().is_some_and(|known| home::is_connected(known)) {
        return Ok(JoinReply { was_member: true, ..reply });
    }
    // Goes on where nobody waits any longer: what is begun is ended, one way or the other.
    let agent = Arc::clone(agent);
    let attempt = tokio::spawn(async move { attempt(&agent, known, config).await });
    attempt.await.map_err(|error| error.to_string())?.map(|()| reply)
}

/// Two authorities of one name cannot be told apart: names of the one are names of the other.
fn check_own(agent: &Agent, config: &HomeConfig) -> Result<(), String> {
    let HomeConfig { authority, authority_key, .. } = config;
    let own = block_in_place(|| agent.host.keyring.authority(authority)).map_err(|error| error.to_string())?;
    if own.is_none_or(|own| own.warrant.is_some()) {
        return Ok(());
    }
    let lines =
        block_in_place(|| lineages(&agent.host.keyring, &agent.host.store)).map_err(|error| error.to_string())?;
    let line = lines.get(&authority_block(authority)).map(|(_, line)| line);
    if line.is_some_and(|line| line.until_s(authority_key).is_some()) {
        return Ok(());
    }
    let state_dir = agent.config().host.state_dir.clone();
    Err(format!(
        "the token is for another authority `{authority}` than the one whose key is on this host, and hosts could not \
         tell their names apart; join from a host without that key, or, if nobody needs it, take \
         {}/keys/authority/{authority}.key away while the agent is down",
        state_dir.display()
    ))
}

fn is_same(one: &HomeConfig, other: &HomeConfig) -> bool {
    one.router_key == other.router_key && one.authority == other.authority
}

/// In place of `known`, which is not connected.
async fn attempt(agent: &Arc<Agent>, known: Option<Arc<Home>>, config: HomeConfig) -> Result<(), String> {
    if let Some(known) = &known {
        leave(&agent.publishing, known).await;
    }
    // A search may find another router of the authority than the one that the token names.
    let others = || {
        let of_authority = |home: &Arc<Home>| home.config().authority == config.authority;
        agent.publishing.services.homes().into_iter().filter(of_authority).collect::<Vec<_>>()
    };
    let was_member = others().iter().any(|home| home::is_connected(home));
    let joined = home::add(agent, config.clone());
    let until = Instant::now() + ANSWER_LIMIT;
    let answer = loop {
        let mut state = joined.changed();
        let mut homes = agent.publishing.services.home_changes();
        let (mut changes, now) = (Vec::new(), state.borrow_and_update().clone());
        for home in homes.borrow_and_update().iter() {
            changes.push(home.changed());
        }
        if now.phase == Phase::Connected || !was_member && others().iter().any(|home| home::is_connected(home)) {
            break Ok(());
        }
        if now.phase == Phase::Refused {
            break Err(format!("the router at {} refuses this host: {}", config.router_address, now.why));
        }
        let any = futures_util::future::select_all(changes.iter_mut().map(|change| Box::pin(change.changed())));
        let news = async {
            tokio::select! {
                _ = any => {}
                _ = homes.changed() => {}
            }
        };
        if timeout_at(until, news).await.is_err() {
            let why = if now.why.is_empty() { "no answer".to_owned() } else { now.why };
            let limit_s = ANSWER_LIMIT.as_secs();
            let at = &config.router_address;
            break Err(format!("the router at {at} has not let this host in within {limit_s} s: {why}"));
        }
    };
    if answer.is_err() {
        leave(&agent.publishing, &joined).await;
        if let Some(known) = known {
            home::add(agent, known.config().clone());
        }
    }
    answer
}

async fn leave(publishing: &Publishing, home: &Arc<Home>) {
    publishing.services.remove_home(home);
    home.stop().await;
}
