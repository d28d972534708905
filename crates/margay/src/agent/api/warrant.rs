//! Warrants: what others may sign or answer for by the word of a key here, and this host by the word of one elsewhere.

use margay_control::api::v1::warrant_sign_request::What;
use margay_control::api::v1::*;
use margay_control::keyring::{AcceptError, written_key};
use margay_control::store::AuditEntry;
use margay_control::warrant::{Delegation, Permit, Request, Warrant, WarrantError};
use margay_core::key::{HostPublic, from_hex, to_hex};
use tonic::Status;

use super::{blocking, environment, identity, misuse, not_found};
use crate::agent::Agent;

/// Of each warrant here, what it is.
pub(super) fn list(agent: &Agent) -> Result<Vec<WarrantInfo>, Status> {
    let authorities = agent.keyring.authorities().map_err(environment)?.into_iter();
    let permits = agent.keyring.permits().map_err(environment)?.into_iter();
    let delegations = authorities.filter_map(|authority| authority.warrant);
    Ok(delegations.map(Warrant::Authority).chain(permits.map(Warrant::Service)).map(|warrant| info(&warrant)).collect())
}

fn info(warrant: &Warrant) -> WarrantInfo {
    match warrant {
        Warrant::Authority(delegation @ Delegation { authority, root, .. }) => WarrantInfo {
            kind: "authority".to_owned(),
            name: authority.clone(),
            service_id: String::new(),
            key: written_key(root),
            not_after_unix_s: delegation.not_after_s(),
        },
        Warrant::Service(permit @ Permit { name, key, .. }) => WarrantInfo {
            kind: "service".to_owned(),
            name: name.clone(),
            service_id: permit.service().map(|service| service.to_string()).unwrap_or_default(),
            key: written_key(key),
            not_after_unix_s: permit.not_after_s(),
        },
    }
}

pub(super) fn request(agent: &Agent, asked: &WarrantRequestRequest) -> Result<WarrantRequestReply, Status> {
    let made = blocking(|| agent.keyring.request(&asked.authority, asked.new_key)).map_err(misuse)?;
    Ok(WarrantRequestReply { request: made.to_string() })
}

pub(super) fn sign(agent: &Agent, asked: WarrantSignRequest) -> Result<WarrantSignReply, Status> {
    let (now, lifetime_s) = (agent.clock.unix_s(), asked.lifetime_s);
    let (subject, warrant) = match asked.what {
        None => return Err(misuse("a warrant is signed for a request, or for a host")),
        Some(What::Request(text)) => {
            let request: Request = text.parse().map_err(misuse)?;
            let found = agent.keyring.authority(&request.authority).map_err(misuse)?;
            let by = found.ok_or_else(|| misuse(WarrantError::NoKey(request.authority.clone())))?;
            if !by.is_valid(now) {
                return Err(environment(by.ended()));
            }
            (written_key(&request.key), request.grant(&by, now, lifetime_s).map_err(misuse)?)
        }
        Some(What::Host(HostOfKey { service, host_key })) => {
            let host = from_hex::<32>(&host_key).map(HostPublic);
            let host =
                host.map_err(|_| misuse("a host's key has 64 hexadecimal digits; `margay id` there shows it"))?;
            let keys = agent.keyring.service_keys().map_err(environment)?;
            let by = keys.iter().find(|key| key.name == service).ok_or_else(|| {
                not_found(format!("the key of `{service}` is not here; `margay id` lists the keys that are"))
            })?;
            let permit = Permit::new(by, &host, now, lifetime_s).map_err(misuse)?;
            (host.id().to_string(), Warrant::Service(permit))
        }
    };
    let info = info(&warrant);
    note(agent, "warrant-sign", subject, &info)?;
    Ok(WarrantSignReply { warrant: warrant.to_string(), info: Some(info) })
}

pub(super) fn accept(agent: &Agent, text: &str) -> Result<WarrantInfo, Status> {
    let warrant: Warrant = text.parse().map_err(misuse)?;
    let info = info(&warrant);
    let (host, now) = (agent.local.host_key.public(), agent.clock.unix_s());
    let taken = blocking(|| match warrant {
        Warrant::Authority(delegation) => agent.keyring.accept(delegation, now).map(drop),
        Warrant::Service(permit) => agent.keyring.accept_permit(&permit, &host, now),
    });
    taken.map_err(|error| match error {
        AcceptError::Warrant(error) => misuse(error),
        AcceptError::State(error) => environment(error),
    })?;
    identity::adopt(agent)?;
    note(agent, "warrant-accept", to_hex(&agent.local.host_key.public().id().0), &info)?;
    Ok(info)
}

fn note(agent: &Agent, act: &str, subject: String, info: &WarrantInfo) -> Result<(), Status> {
    let detail = format!("to {} for {}", if info.kind == "authority" { "sign" } else { "answer" }, info.name);
    let entry = AuditEntry::once(agent.clock.unix_s(), act, subject, detail);
    blocking(|| agent.store.note_all(&[entry])).map_err(environment)
}
