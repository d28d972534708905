//! Keys, authorities, join tokens and members.

use std::net::SocketAddr;

use margay_control::api::v1::*;
use margay_control::entropy;
use margay_control::keyring::{Authority, ServiceKey, written_key};
use margay_control::store::{Member, MemberKey, Token, TokenState};
use margay_control::token::{JoinToken, TokenSecret};
use margay_control::warrant::lineages;
use margay_core::key::{HostId, HostPublic, to_hex};
use margay_core::name::{Name, Prefix, authority_block};
use tonic::Status;

use super::{blocking, environment, misuse, not_found, succession, warrant};
use crate::agent::{Agent, authority, cluster, naming};
use crate::config::Config;
use crate::host;

const DAY_S: u64 = 24 * 60 * 60;
const LIFETIME_MAX_S: u64 = 366 * DAY_S;

pub(super) fn reply(agent: &Agent) -> Result<IdentityReply, Status> {
    let authorities = agent.host.keyring.authorities().map_err(environment)?;
    let joined = blocking(|| agent.host.store.joined()).map_err(environment)?;
    let lines = blocking(|| lineages(&agent.host.keyring, &agent.host.store)).map_err(environment)?;
    let current = |block| lines.get(&block).map(|(_, line)| succession::current(line, agent.host.clock.unix_s()));
    let of_keyring = |authority: &Authority| AuthorityInfo {
        successions: current(authority.block()).unwrap_or_default(),
        ..authority_info(authority)
    };
    let mut infos: Vec<AuthorityInfo> = authorities.iter().map(of_keyring).collect();
    for home in joined {
        if infos.iter().all(|info| info.name != home.authority) {
            infos.push(AuthorityInfo {
                block: to_hex(&authority_block(&home.authority)),
                successions: current(authority_block(&home.authority)).unwrap_or_default(),
                name: home.authority,
                key: written_key(&home.authority_key),
                signs: false,
            });
        }
    }
    Ok(IdentityReply {
        host_id: agent.host.identity.host_id().to_string(),
        host_key: to_hex(&agent.host.local.host_key.public().0),
        epoch: agent.host.identity.epoch,
        boot_id: to_hex(&agent.host.identity.boot_id),
        authorities: infos,
        service_keys: agent.host.keyring.service_keys().map_err(environment)?.iter().map(key_info).collect(),
        warrants: warrant::list(agent)?,
    })
}

fn authority_info(authority: &Authority) -> AuthorityInfo {
    AuthorityInfo {
        name: authority.name.clone(),
        block: to_hex(&authority.block()),
        key: written_key(&authority.root()),
        signs: true,
        successions: Vec::new(),
    }
}

fn key_info(key: &ServiceKey) -> ServiceKeyInfo {
    ServiceKeyInfo { name: key.name.clone(), service_id: key.service.to_string(), key: written_key(&key.key.public()) }
}

pub(super) fn create_authority(agent: &Agent, name: &str) -> Result<AuthorityInfo, Status> {
    let has_joined = |router: &str| {
        misuse(format!(
            "this host is a member of the authority `{name}`, whose key is elsewhere (it has joined the router at \
             {router}); a second key would be another authority of the same name, and nobody would believe it. \
             `margay id authority request {name}` asks for the right to sign for the one that there is; or choose \
             another name"
        ))
    };
    let joined = blocking(|| agent.host.store.joined()).map_err(environment)?;
    if let Some(home) = joined.iter().find(|home| home.authority == name) {
        return Err(has_joined(&home.router_address));
    }
    let made = blocking(|| agent.host.keyring.create_authority(name)).map_err(misuse)?;
    adopt(agent)?;
    tracing::info!(authority = name, "authority made");
    Ok(authority_info(&made))
}

/// Another authority can be signed for: it is trusted, and what is published under it is signed from now on.
pub(super) fn adopt(agent: &Agent) -> Result<(), Status> {
    let joined = agent.publishing.services.joined();
    let host = agent.host.local.host_key.public();
    let keys = (&agent.host.keyring, &*agent.host.store);
    authority::adopt(&agent.core, keys, &host, &agent.host.clock, &joined).map_err(environment)?;
    agent.routing.answering.renew(&agent.core, &agent.host.keyring, &host, &agent.host.clock).map_err(environment)?;
    agent.routing.router.iter().for_each(|router| router.review_authorities());
    agent.publishing.services.renew();
    Ok(())
}

pub(super) fn create_service_key(agent: &Agent, name: &str) -> Result<ServiceKeyInfo, Status> {
    blocking(|| agent.host.keyring.create_service_key(name)).map(|made| key_info(&made)).map_err(misuse)
}

pub(super) async fn create_token(agent: &Agent, request: TokenCreateRequest) -> Result<TokenCreateReply, Status> {
    if agent.routing.router.is_none() {
        let advice = "this host is no router, so nobody could join here; run `margay up --router`, or use the router";
        return Err(environment(advice));
    }
    if request.groups.iter().any(|group| group.trim().is_empty()) {
        return Err(misuse("a group has a name, as allow lists write it after `group:`"));
    }
    let found = agent.host.keyring.authority(&request.authority).map_err(misuse)?;
    let authority = found.ok_or_else(|| {
        not_found(format!(
            "the key of `{0}` is not here; `margay id authority create {0}` makes one, `margay id authority request \
             {0}` asks who has it",
            request.authority
        ))
    })?;
    if !authority.is_valid(agent.host.clock.unix_s()) {
        return Err(environment(authority.ended()));
    }
    let grants = request.grants.iter().map(|grant| parse_grant(grant, &authority)).collect::<Result<Vec<_>, _>>()?;
    let lifetime_s = if request.lifetime_s == 0 { DAY_S } else { request.lifetime_s };
    if lifetime_s > LIFETIME_MAX_S {
        return Err(misuse("a token lives a year at most"));
    }
    let token = JoinToken {
        router_address: match request.router_address {
            asked if asked.is_empty() => cluster::address_of(&agent.config()).await.map_err(environment)?,
            asked => asked,
        },
        router_key: agent.host.local.host_key.public(),
        authority: authority.name.clone(),
        authority_key: authority.root(),
        secret: TokenSecret::new(entropy::rng().map_err(environment)?.bytes()),
    };
    token.check().map_err(misuse)?;
    let now = agent.host.clock.unix_s();
    let kept = Token {
        hash: token.secret.hash(),
        authority: authority.name.clone(),
        grants: if grants.is_empty() { vec![authority_prefix(&authority)] } else { grants },
        groups: request.groups,
        uses_left: request.uses.max(1),
        created_s: now,
        expires_s: now + lifetime_s,
    };
    blocking(|| agent.host.store.add_token(&kept)).map_err(environment)?;
    tracing::info!(token = kept.hash.id(), authority = authority.name, uses = kept.uses_left, "token made");
    Ok(TokenCreateReply { token: token.to_string(), info: Some(token_info(&kept, now)) })
}

fn authority_prefix(authority: &Authority) -> Prefix {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&authority.block());
    Prefix::new(margay_core::name::ServiceId(id), margay_core::name::AUTHORITY_BITS)
}

fn parse_grant(text: &str, authority: &Authority) -> Result<Prefix, Status> {
    let name: Name = text.parse().map_err(misuse)?;
    if !authority_prefix(authority).covers(&name.prefix()) {
        return Err(misuse(format!("`{text}` is not of the authority {}", authority.name)));
    }
    // A service's grant covers its keys and its own tail, too.
    let prefix = name.prefix();
    let is_plain = !text.contains(['/', ':']);
    Ok(if is_plain { Prefix::new(prefix.id, margay_core::name::SERVICE_BITS) } else { prefix })
}

/// Where hosts find this router, unless the operator says it: the first address of this host.
pub(in crate::agent) async fn router_address(config: &Config) -> Result<String, String> {
    let listen = config.router.listen;
    if !listen.ip().is_unspecified() {
        return Ok(listen.to_string());
    }
    let addresses = host::local_addresses(config.ranges()).await.map_err(|error| error.to_string())?;
    let usable = addresses.into_iter().find(|address| listen.is_ipv6() || address.is_ipv4());
    let none = "this host has no address that others could use; name one with [router] address in the configuration";
    let address = usable.ok_or(none)?;
    Ok(SocketAddr::new(address, listen.port()).to_string())
}

fn token_info(token: &Token, unix_s: u64) -> TokenInfo {
    let state = match token.state(unix_s) {
        TokenState::Usable => "usable",
        TokenState::Expired => "expired",
        TokenState::UsedUp => "used-up",
    };
    TokenInfo {
        id: token.hash.id(),
        authority: token.authority.clone(),
        grants: token.grants.iter().map(Prefix::to_string).collect(),
        groups: token.groups.clone(),
        uses_left: token.uses_left,
        created_unix_s: token.created_s,
        expires_unix_s: token.expires_s,
        state: state.to_owned(),
    }
}

pub(super) fn list_tokens(agent: &Agent) -> Result<TokenListReply, Status> {
    let now = agent.host.clock.unix_s();
    let tokens = blocking(|| agent.host.store.tokens()).map_err(environment)?;
    Ok(TokenListReply { tokens: tokens.iter().map(|token| token_info(token, now)).collect() })
}

pub(super) fn revoke_token(agent: &Agent, id: &str) -> Result<TokenInfo, Status> {
    let now = agent.host.clock.unix_s();
    let revoked = blocking(|| agent.host.store.revoke_token(id, now)).map_err(environment)?;
    let revoked =
        revoked.ok_or_else(|| not_found(format!("there is no token `{id}`; `margay id token list` shows them")))?;
    Ok(token_info(&revoked, now))
}

fn member_info(agent: &Agent, member: &Member) -> MemberInfo {
    let connected = agent.routing.router.as_ref().and_then(|router| router.connected(member.host.id()));
    MemberInfo {
        host_id: member.host.id().to_string(),
        host_name: member.host_name.clone(),
        authority: member.authority.clone(),
        grants: member.grants.iter().map(Prefix::to_string).collect(),
        grant_names: member.grants.iter().map(|grant| naming::prefix(agent, grant)).collect(),
        groups: member.groups.clone(),
        joined_unix_s: member.joined_s,
        connected: connected.is_some(),
        address: connected.map(|address| address.to_string()).unwrap_or_default(),
    }
}

pub(super) fn list_members(agent: &Agent) -> Result<MemberListReply, Status> {
    let members = blocking(|| agent.host.store.members()).map_err(environment)?;
    Ok(MemberListReply { members: members.iter().map(|member| member_info(agent, member)).collect() })
}

/// The member that is meant, and what it may serve from then on.
pub(super) fn granted(agent: &Agent, request: &MemberGrantRequest) -> Result<(Member, Vec<Prefix>), Status> {
    let mut found = blocking(|| agent.host.store.members()).map_err(environment)?;
    let id = member_of(&found, &request.host_id)?;
    found.retain(|member| {
        let is_meant = request.authority.is_empty() || request.authority == member.authority;
        member.host.id() == id && is_meant
    });
    let member = match &found[..] {
        [member] => member,
        [] if !request.authority.is_empty() => {
            let authority = &request.authority;
            return Err(not_found(format!("{id} is no member of {authority}; `margay id member list` shows them")));
        }
        [] => return Err(not_a_member(id)),
        _ => return Err(misuse(format!("{id} is a member of several authorities here; say which: --authority NAME"))),
    };
    let found = agent.host.keyring.authority(&member.authority).map_err(environment)?;
    let authority = found
        .ok_or_else(|| not_found(format!("the key of the authority {} is not here any more", member.authority)))?;
    let grants = request.grants.iter().map(|grant| parse_grant(grant, &authority)).collect::<Result<Vec<_>, _>>()?;
    for (prefix, written) in grants.iter().zip(&request.grants) {
        agent.names.naming.learn_prefix(*prefix, written);
    }
    Ok((member.clone(), grants))
}

pub(super) fn grant_member(agent: &Agent, request: &MemberGrantRequest) -> Result<MemberInfo, Status> {
    let (member, grants) = granted(agent, request)?;
    let id = member.host.id();
    let key = MemberKey { host: member.host, authority: authority_block(&member.authority) };
    let now = agent.host.clock.unix_s();
    let changed = blocking(|| agent.host.store.set_grants(&key, &grants, now)).map_err(environment)?;
    if let Some(router) = &agent.routing.router {
        router.review_grants();
    }
    changed.map(|member| member_info(agent, &member)).ok_or_else(|| not_a_member(id))
}

/// The member that is meant by its name, its host-ID or the first letters of that.
fn member_of(members: &[Member], text: &str) -> Result<HostId, Status> {
    let candidates: Vec<_> = members.iter().map(|member| (member.host.id(), member.host_name.clone())).collect();
    naming::pick(text, &candidates, "margay id member list").map_err(not_found)
}

/// The key of a host that has joined here, by its name, its host-ID or the first letters of that.
pub(super) fn key_of_member(agent: &Agent, text: &str) -> Result<HostPublic, Status> {
    let members = blocking(|| agent.host.store.members()).map_err(environment)?;
    let id = member_of(&members, text).map_err(|status| {
        let why = status.message();
        misuse(format!("{why}; of another host write the key, 64 hexadecimal digits: `margay id` there shows it"))
    })?;
    members.into_iter().map(|member| member.host).find(|host| host.id() == id).ok_or_else(|| not_a_member(id))
}

fn not_a_member(id: HostId) -> Status {
    not_found(format!("{id} is no member; `margay id member list` shows them"))
}

pub(super) fn remove_member(agent: &Agent, host: &str) -> Result<MemberInfo, Status> {
    let id = match host.parse() {
        Ok(id) => id,
        Err(_) => member_of(&blocking(|| agent.host.store.members()).map_err(environment)?, host)?,
    };
    let removed = blocking(|| agent.host.store.remove_member(id, agent.host.clock.unix_s())).map_err(environment)?;
    let first = removed.first().ok_or_else(|| not_a_member(id))?;
    let mut info = member_info(agent, first);
    if let Some(router) = &agent.routing.router {
        router.remove_host(id).map_err(environment)?;
    }
    info.connected = false;
    Ok(info)
}
