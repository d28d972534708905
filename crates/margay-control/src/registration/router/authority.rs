//! What the router signs for its hosts, as far as it has the keys; and what of it holds no longer.

use margay_core::certificate::Revocation;
use margay_core::key_revocation::KeyRevocation;
use margay_core::succession::Succession;

use super::{Shared, answer_of};
use crate::chains::SignedChains;
use crate::issue;
use crate::keyring::Authority;
use crate::lineage::Lineage;
use crate::registration::proto::{self, Code, from_router};
use crate::registration::refusal::No;
use crate::store::Member;

/// Hosts that were put out, what has become of keys, and which sessions go through boxes.
#[derive(Default)]
pub struct News {
    pub hosts: Vec<Revocation>,
    pub revoked: Vec<KeyRevocation>,
    pub successions: Vec<Succession>,
    pub chains: Vec<SignedChains>,
}

impl News {
    /// What a host of an authority is told; nothing, where there is nothing.
    pub fn told(&self, authority: [u8; 8]) -> Vec<proto::FromRouter> {
        let hosts = self.hosts.iter().filter(|one| one.authority == authority);
        let hosts: Vec<_> =
            hosts.map(|one| proto::Revocation { host_key: one.host_key.to_vec(), until_unix_s: one.until_s }).collect();
        let hosts = (!hosts.is_empty()).then_some(from_router::Body::Revoked(proto::Revoked { hosts }));
        let chains = self.chains.iter().find(|one| one.authority == authority);
        let chains = chains.map(|one| from_router::Body::Chains(proto::Chains { signed: one.encode() }));
        hosts
            .into_iter()
            .chain(self.keys(authority).map(from_router::Body::Keys))
            .chain(chains)
            .map(answer_of)
            .collect()
    }

    /// What has become of the keys of an authority, if something has.
    pub fn keys(&self, authority: [u8; 8]) -> Option<proto::Keys> {
        let successions = self.successions.iter().filter(|one| one.authority == authority);
        let revoked = self.revoked.iter().filter(|one| one.authority == authority);
        let keys = proto::Keys {
            successions: successions.map(|one| one.encode().to_vec()).collect(),
            revocations: revoked.map(|one| one.encode().to_vec()).collect(),
        };
        (keys != proto::Keys::default()).then_some(keys)
    }
}

pub(super) fn authority_of(shared: &Shared, block: [u8; 8]) -> Result<Option<Authority>, No> {
    let found = shared.keyring.authority_of(block).map_err(|error| No(Code::Store, error.to_string()))?;
    match found {
        Some(found) if !found.is_valid(shared.clock.unix_s()) => Err(No(Code::Store, found.ended())),
        // The key that has signed its warrant is trusted no longer.
        Some(found) if found.warrant.is_some() && is_by_former_key(shared, &found)? => {
            Err(No(Code::Store, found.ended()))
        }
        found => Ok(found),
    }
}

fn is_by_former_key(shared: &Shared, authority: &Authority) -> Result<bool, No> {
    let line = Lineage::of(&shared.store, authority.block(), authority.root())
        .map_err(|error| No(Code::Store, error.to_string()))?;
    Ok(line.until_s(&authority.root()).is_some_and(|until_s| until_s < shared.clock.unix_s()))
}

/// What a host is shown: that it is a member of the authority, and that this router is one of the authority's. Both
/// encoded chains.
pub(super) struct Proofs {
    pub membership: Vec<u8>,
    pub router: Vec<u8>,
}

pub(super) fn proofs_of(shared: &Shared, member: &Member) -> Result<Proofs, No> {
    let block = margay_core::name::authority_block(&member.authority);
    let authority = authority_of(shared, block)?.ok_or_else(|| {
        No(Code::NotAMember, format!("the key of the authority {} is not on this router any more", member.authority))
    })?;
    let unix_s = shared.clock.unix_s();
    Ok(Proofs {
        membership: issue::membership(&authority, &member.host, &member.groups, unix_s).0,
        router: issue::router(&authority, &shared.local.host_key.public(), unix_s).0,
    })
}
