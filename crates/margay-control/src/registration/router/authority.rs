//! What the router signs for its hosts, as far as it has the keys.

use super::Shared;
use crate::issue;
use crate::registration::proto::Code;
use crate::registration::refusal::No;
use crate::store::Member;

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
