//! Warrants: what others may sign or answer for by the word of a key here, and this host by the word of one elsewhere.

use margay_control::api::v1::warrant_sign_request::What;
use margay_control::api::v1::*;
use margay_control::keyring::{AcceptError, written_key};
use margay_control::lineage::SUCCESSION_PREFIX;
use margay_control::store::AuditEntry;
use margay_control::warrant::{self, Delegation, Permit, REVOCATION_PREFIX, Request, Warrant, WarrantError};
use margay_core::key::{HostPublic, VerifyingKey, from_hex, to_hex};
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::authority_block;
use tonic::Status;

use super::{blocking, environment, identity, misuse, not_found, succession};
use crate::agent::{Agent, Host};

/// Of each warrant here, what it is.
pub(super) fn list(agent: &Agent) -> Result<Vec<WarrantInfo>, Status> {
    let authorities = agent.host.keyring.authorities().map_err(environment)?.into_iter();
    let permits = agent.host.keyring.permits().map_err(environment)?.into_iter();
    let delegations = authorities.filter_map(|authority| {
        let revoked = authority.revoked.is_some();
        Some(WarrantInfo { revoked, ..info(&Warrant::Authority(authority.warrant?)) })
    });
    Ok(delegations.chain(permits.map(|permit| info(&Warrant::Service(permit)))).collect())
}

fn info(warrant: &Warrant) -> WarrantInfo {
    match warrant {
        Warrant::Authority(delegation @ Delegation { authority, root, members, .. }) => WarrantInfo {
            kind: "authority".to_owned(),
            name: authority.clone(),
            service_id: String::new(),
            key: written_key(root),
            not_after_unix_s: delegation.not_after_s(),
            signs_with: members.last().and_then(|last| last.delegate).map(|key| written_key(&key)).unwrap_or_default(),
            revoked: false,
        },
        Warrant::Service(permit @ Permit { name, key, .. }) => WarrantInfo {
            kind: "service".to_owned(),
            name: name.clone(),
            service_id: permit.service().map(|service| service.to_string()).unwrap_or_default(),
            key: written_key(key),
            not_after_unix_s: permit.not_after_s(),
            ..WarrantInfo::default()
        },
    }
}

pub(super) fn request(agent: &Agent, asked: &WarrantRequestRequest) -> Result<WarrantRequestReply, Status> {
    let made = blocking(|| agent.host.keyring.request(&asked.authority, asked.new_key)).map_err(misuse)?;
    Ok(WarrantRequestReply { request: made.to_string() })
}

pub(super) fn sign(agent: &Agent, asked: WarrantSignRequest) -> Result<WarrantSignReply, Status> {
    let now = agent.host.clock.unix_s();
    let lifetime_s = asked.lifetime_s;
    let (subject, warrant) = match asked.what {
        None => return Err(misuse("a warrant is signed for a request, or for a host")),
        Some(What::Request(text)) => {
            let request: Request = text.parse().map_err(misuse)?;
            let found = agent.host.keyring.authority(&request.authority).map_err(misuse)?;
            let by = found.ok_or_else(|| misuse(WarrantError::NoKey(request.authority.clone())))?;
            if !by.is_valid(now) {
                return Err(environment(by.ended()));
            }
            let revoked = blocking(|| warrant::believed(&agent.host.keyring, &agent.host.store, now));
            let revoked = revoked.map_err(environment)?;
            if revoked.iter().any(|one| (one.authority, one.key) == (by.block(), request.key)) {
                return Err(misuse(WarrantError::RevokedKey(request.authority)));
            }
            // A key that another one follows signs for no longer than it is trusted.
            let trusted_s =
                by.next.as_ref().map_or(u64::MAX, |next| next.succession.trusted_until_s.saturating_sub(now));
            (written_key(&request.key), request.grant(&by, now, lifetime_s.min(trusted_s)).map_err(misuse)?)
        }
        Some(What::Host(HostOfKey { service, host_key })) => {
            let host = match from_hex::<32>(&host_key) {
                Ok(key) => HostPublic(key),
                Err(_) => identity::key_of_member(agent, &host_key)?,
            };
            let keys = agent.host.keyring.service_keys().map_err(environment)?;
            let by = keys.iter().find(|key| key.name == service).ok_or_else(|| {
                not_found(format!("the key of `{service}` is not here; `margay id` lists the keys that are"))
            })?;
            let permit = Permit::new(by, &host, now, lifetime_s).map_err(misuse)?;
            (host.id().to_string(), Warrant::Service(permit))
        }
    };
    let info = info(&warrant);
    note(&agent.host, "warrant-sign", subject, &info)?;
    Ok(WarrantSignReply { warrant: warrant.to_string(), info: Some(info) })
}

pub(super) fn accept(agent: &Agent, text: &str) -> Result<WarrantInfo, Status> {
    if text.trim_start().to_ascii_lowercase().starts_with(SUCCESSION_PREFIX) {
        return succession::accept(agent, text);
    }
    if text.trim_start().to_ascii_lowercase().starts_with(REVOCATION_PREFIX) {
        let revocation = warrant::read_revocation(text).map_err(misuse)?;
        let known = blocking(|| {
            warrant::revoker(&revocation, &agent.host.keyring, &agent.host.store, agent.host.clock.unix_s())
        });
        return take_back(agent, &revocation, &known.map_err(misuse)?);
    }
    let warrant: Warrant = text.parse().map_err(misuse)?;
    let info = info(&warrant);
    let host = agent.host.local.host_key.public();
    let now = agent.host.clock.unix_s();
    let lines = blocking(|| warrant::lineages(&agent.host.keyring, &agent.host.store)).map_err(environment)?;
    let taken = blocking(|| match warrant {
        Warrant::Authority(delegation) => {
            let line = lines.get(&authority_block(&delegation.authority)).map(|(_, line)| line.successions());
            let heirs: Vec<VerifyingKey> = line.unwrap_or_default().iter().map(|one| one.new).collect();
            agent.host.keyring.accept(delegation, &heirs, now).map(drop)
        }
        Warrant::Service(permit) => agent.host.keyring.accept_permit(&permit, &host, now),
    });
    taken.map_err(|error| match error {
        AcceptError::Warrant(error) => misuse(error),
        AcceptError::State(error) => environment(error),
    })?;
    identity::adopt(agent)?;
    note(&agent.host, "warrant-accept", to_hex(&agent.host.local.host_key.public().id().0), &info)?;
    Ok(info)
}

pub(super) fn revoke(agent: &Agent, asked: &WarrantRevokeRequest) -> Result<WarrantRevokeReply, Status> {
    let key = from_hex::<32>(&asked.key).map(VerifyingKey);
    let key = key.map_err(|_| {
        misuse("a key has 64 hexadecimal digits; `margay audit list` shows it beside warrant-sign, `margay id` on its router")
    })?;
    let found = agent.host.keyring.authority(&asked.authority).map_err(misuse)?;
    let by = found.ok_or_else(|| {
        not_found(format!("the key of `{}` is not here; `margay id` lists the keys that are", asked.authority))
    })?;
    let revocation = warrant::revoke(&by, key, agent.host.clock.unix_s()).map_err(misuse)?;
    if key == by.key.public() {
        // It was lost: the one that follows signs at once.
        blocking(|| agent.host.keyring.promote(agent.host.clock.unix_s(), Some(&by.name))).map_err(environment)?;
    }
    let info = take_back(agent, &revocation, &by.name)?;
    Ok(WarrantRevokeReply { revocation: warrant::write_revocation(&revocation), info: Some(info) })
}

/// From now on neither this host nor those that it tells believe the key. The store tells the router of it.
fn take_back(agent: &Agent, revocation: &KeyRevocation, authority: &str) -> Result<WarrantInfo, Status> {
    let now = agent.host.clock.unix_s();
    blocking(|| agent.host.store.revoke_key(revocation, authority, now)).map_err(environment)?;
    identity::adopt(agent)?;
    Ok(WarrantInfo {
        kind: "revocation".to_owned(),
        name: authority.to_owned(),
        key: written_key(&revocation.signer),
        not_after_unix_s: revocation.until_s,
        signs_with: written_key(&revocation.key),
        revoked: true,
        ..WarrantInfo::default()
    })
}

fn note(host: &Host, act: &str, subject: String, info: &WarrantInfo) -> Result<(), Status> {
    let detail = format!("to {} for {}", if info.kind == "authority" { "sign" } else { "answer" }, info.name);
    let entry = AuditEntry::once(host.clock.unix_s(), act, subject, detail);
    blocking(|| host.store.note_all(&[entry])).map_err(environment)
}
