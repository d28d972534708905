//! What the router signs for its hosts, as far as it has the keys; and what of it holds no longer.

use margay_core::certificate::Revocation;
use margay_core::key_revocation::KeyRevocation;

use super::{Shared, answer_of};
use crate::issue;
use crate::registration::proto::{self, Code, from_router};
use crate::registration::refusal::No;
use crate::store::Member;

/// Hosts that were put out, and keys that may sign no longer.
#[derive(Default)]
pub struct PutOut {
    pub hosts: Vec<Revocation>,
    pub keys: Vec<KeyRevocation>,
}

impl PutOut {
    /// Whom a host of an authority is not to believe any more; nothing, where there is nobody.
    pub fn told(&self, authority: [u8; 8]) -> Vec<proto::FromRouter> {
        let hosts = self.hosts.iter().filter(|one| one.authority == authority);
        let hosts: Vec<_> =
            hosts.map(|one| proto::Revocation { host_key: one.host_key.to_vec(), until_unix_s: one.until_s }).collect();
        let keys = self.keys.iter().filter(|one| one.authority == authority);
        let keys: Vec<_> = keys.map(|one| one.encode().to_vec()).collect();
        // Both in one could be more than a message holds.
        let parts = [proto::Revoked { hosts, keys: Vec::new() }, proto::Revoked { hosts: Vec::new(), keys }];
        let parts = parts.into_iter().filter(|part| !(part.hosts.is_empty() && part.keys.is_empty()));
        parts.map(|part| answer_of(from_router::Body::Revoked(part))).collect()
    }
}

pub(super) fn authority_of(shared: &Shared, block: [u8; 8]) -> Result<Option<crate::keyring::Authority>, No> {
    let found = shared.keyring.authority_of(block).map_err(|error| No(Code::Store, error.to_string()))?;
    match found {
        Some(found) if !found.is_valid(shared.clock.unix_s()) => Err(No(Code::Store, found.ended())),
        found => Ok(found),
    }
}

pub(super) fn membership_of(shared: &Shared, member: &Member) -> Result<Vec<u8>, No> {
    let block = margay_core::name::authority_block(&member.authority);
    let authority = authority_of(shared, block)?.ok_or_else(|| {
        No(Code::NotAMember, format!("the key of the authority {} is not on this router any more", member.authority))
    })?;
    Ok(issue::membership(&authority, &member.host, &member.groups, shared.clock.unix_s()).0)
}
