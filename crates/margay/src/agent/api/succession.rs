//! Keys of authorities that others follow.

use margay_control::api::v1::*;
use margay_control::keyring::{SucceedError, written_key};
use margay_control::lineage::{Lineage, TakeUpError, read_succession, take_up, write_succession};
use margay_control::store::Kept;
use margay_control::warrant::{self, WarrantError};
use margay_core::succession::Succession;
use tonic::Status;

use super::{blocking, environment, identity, misuse};
use crate::agent::Agent;

pub(super) fn info(one: &Succession) -> SuccessionInfo {
    SuccessionInfo {
        old_key: written_key(&one.old),
        new_key: written_key(&one.new),
        signs_from_unix_s: one.signs_from_s,
        old_trusted_until_unix_s: one.trusted_until_s,
    }
}

/// What of a line is not over.
pub(super) fn current(line: &Lineage, unix_s: u64) -> Vec<SuccessionInfo> {
    line.successions().iter().filter(|one| unix_s <= one.trusted_until_s).map(info).collect()
}

pub(super) fn succeed(agent: &Agent, asked: &AuthoritySucceedRequest) -> Result<AuthoritySucceedReply, Status> {
    let name = &asked.name;
    let now = agent.host.clock.unix_s();
    let made = blocking(|| agent.host.keyring.succeed(name, now, asked.overlap_s)).map_err(|error| match error {
        SucceedError::State(error) => environment(error),
        error => misuse(error),
    })?;
    blocking(|| take_up(&agent.host.keyring, &agent.host.store, now)).map_err(|error| match error {
        TakeUpError::Rival(_) => misuse(error),
        // It may have been kept all the same, and others told.
        error => {
            environment(format!("{error}; the key is made, and everybody is told of it as soon as the store takes it"))
        }
    })?;
    identity::adopt(agent)?;
    tracing::info!(authority = name, "a key was made that follows the authority's own one");
    Ok(AuthoritySucceedReply { succession: write_succession(&made), info: Some(info(&made)) })
}

/// Takes what was made on another host.
pub(super) fn accept(agent: &Agent, text: &str) -> Result<WarrantInfo, Status> {
    let one = read_succession(text).map_err(misuse)?;
    let mut known = blocking(|| warrant::lineages(&agent.host.keyring, &agent.host.store)).map_err(environment)?;
    let known = known.remove(&one.authority);
    let (name, line) = known.ok_or_else(|| misuse(WarrantError::Stranger))?;
    if !line.takes(&one) {
        return Err(misuse(WarrantError::OtherRoot(name)));
    }
    let kept =
        blocking(|| agent.host.store.keep_succession(&one, &name, agent.host.clock.unix_s())).map_err(environment)?;
    if kept == Kept::Rival {
        return Err(misuse(TakeUpError::Rival(name)));
    }
    identity::adopt(agent)?;
    Ok(WarrantInfo {
        kind: "succession".to_owned(),
        name,
        key: written_key(&one.old),
        not_after_unix_s: one.trusted_until_s,
        signs_with: written_key(&one.new),
        ..WarrantInfo::default()
    })
}
