//! `margay id`.

use std::time::Duration;

use clap::{Args, Subcommand};
use margay_control::api::v1::warrant_sign_request::What;
use margay_control::api::v1::*;
use miette::Result;

use super::output::{moment, span};
use super::{Client, Json, Out, refused, warrant};

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct IdArgs {
    #[command(flatten)]
    json: Json,
    #[command(subcommand)]
    verb: Option<IdVerb>,
}

#[derive(Subcommand)]
enum IdVerb {
    /// Authorities: who owns the second half of names
    #[command(subcommand)]
    Authority(AuthorityVerb),
    /// Keys of services whose names certify themselves
    #[command(subcommand)]
    Key(KeyVerb),
    /// Join tokens
    #[command(subcommand)]
    Token(TokenVerb),
    /// Hosts that have joined this router
    #[command(subcommand)]
    Member(MemberVerb),
    /// Take a warrant that was signed for this host, or a revocation
    Accept {
        /// margay-warrant-…, as `sign` printed it, or margay-revocation-…; - reads it from standard input
        warrant: String,
        #[command(flatten)]
        json: Json,
    },
    /// Hosts that this host shares keys with
    Peers(Json),
}

#[derive(Subcommand)]
enum AuthorityVerb {
    /// Ask for the right to sign for an authority whose key is on another host
    Request {
        /// Its name
        name: String,
        /// Ask for a new key, although this router signs by one already
        #[arg(long)]
        new_key: bool,
        #[command(flatten)]
        json: Json,
    },
    /// Let the router that made a request sign for the authority, by a key of its own
    Sign {
        /// margay-request-…, as `request` printed it
        request: String,
        /// How long: 30d, 90d, 366d at most
        #[arg(long, default_value = "90d", value_name = "TIME", value_parser = lifetime)]
        lifetime: Duration,
        #[command(flatten)]
        json: Json,
    },
    /// Make a key that follows the authority's own one, which is here: hosts learn it, certificates are made with it
    /// from half of the overlap on, and the one before is trusted no longer after that. Prints the succession for
    /// routers that do not hear of it by themselves: `margay id accept` there
    Succeed {
        /// Its name
        name: String,
        /// How long both are trusted: at least two days, so that no certificate of the one before is left
        #[arg(long, default_value = "4d", value_name = "TIME", value_parser = lifetime)]
        overlap: Duration,
        #[command(flatten)]
        json: Json,
    },
    /// Take back what another router may sign for an authority whose key is here; all who hear of it believe it no
    /// more. Prints the revocation for routers that do not hear of it by themselves: `margay id accept` there
    Revoke {
        /// Its name
        name: String,
        /// The router's key: 64 hexadecimal digits, WHO of warrant-sign in `margay audit list`
        key: String,
        #[command(flatten)]
        json: Json,
    },
    /// Make an authority's key on this host
    Create {
        /// What stands after the service in its names: shop, for web.shop
        name: String,
        #[command(flatten)]
        json: Json,
    },
}

#[derive(Subcommand)]
enum KeyVerb {
    /// Make a service's key, and with it a name that nobody else can serve
    Create {
        /// service.authority
        name: String,
        #[command(flatten)]
        json: Json,
    },
    /// Let another host answer for the name of a key that is here
    Sign {
        /// service.authority
        name: String,
        /// The host's key (64 hexadecimal digits, `margay id` there shows it), or the name of a host that has joined
        /// here
        #[arg(long, value_name = "KEY|HOST")]
        host: String,
        /// How long: 30d, 90d, 366d at most
        #[arg(long, default_value = "90d", value_name = "TIME", value_parser = lifetime)]
        lifetime: Duration,
        #[command(flatten)]
        json: Json,
    },
}

#[derive(Subcommand)]
enum TokenVerb {
    /// Make a join token; it is printed once
    Create(TokenArgs),
    /// Tokens that were made here
    List(Json),
    /// Take a token back; hosts that used it stay members
    Revoke {
        /// As `list` shows it
        id: String,
        #[command(flatten)]
        json: Json,
    },
}

#[derive(Args)]
struct TokenArgs {
    /// The authority that hosts join with it
    authority: String,
    /// How many hosts may join with it
    #[arg(long, default_value_t = 1, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    uses: u32,
    /// How long it holds: 90m, 12h, 7d
    #[arg(long, default_value = "1d", value_name = "TIME", value_parser = lifetime)]
    lifetime: Duration,
    /// A name that hosts may serve; all of the authority unless given, may be repeated
    #[arg(long, value_name = "NAME")]
    grant: Vec<String>,
    /// A group that hosts belong to, for allow lists; may be repeated
    #[arg(long, value_name = "NAME")]
    group: Vec<String>,
    /// Where hosts reach this router; its first address unless given
    #[arg(long, value_name = "ADDRESS:PORT")]
    router_address: Option<String>,
    #[command(flatten)]
    json: Json,
}

#[derive(Subcommand)]
enum MemberVerb {
    /// All of them
    List(Json),
    /// Say anew which names a host may serve, instead of what its tokens said; holds at once
    Grant {
        /// Its name, its host-ID or the first letters of that
        host: String,
        /// Names: web.shop, web.shop/key:user42, sid:<hex>/bits; none: it may serve nothing
        #[arg(value_name = "NAME")]
        names: Vec<String>,
        /// The authority, where the host is a member of several here
        #[arg(long, value_name = "NAME")]
        authority: Option<String>,
        #[command(flatten)]
        json: Json,
    },
    /// Put a host out: its registrations end now, and hosts that reach a router believe it no longer; others, within a
    /// day
    Remove {
        /// Its name, its host-ID or the first letters of that
        host: String,
        #[command(flatten)]
        json: Json,
    },
}

fn lifetime(text: &str) -> Result<Duration, String> {
    let parsed =
        humantime::parse_duration(text).map_err(|error| format!("{error}; write for example 90m, 12h or 7d"))?;
    if parsed.as_secs() == 0 { Err("it lives a second at least".into()) } else { Ok(parsed) }
}

pub async fn id(client: Client, args: IdArgs, out: &mut Out) -> Result<()> {
    match args.verb {
        None => identity(client, args.json, out).await,
        Some(IdVerb::Authority(AuthorityVerb::Create { name, json })) => authority(client, name, json, out).await,
        Some(IdVerb::Authority(AuthorityVerb::Request { name, new_key, json })) => {
            warrant::request(client, name, new_key, json, out).await
        }
        Some(IdVerb::Authority(AuthorityVerb::Sign { request, lifetime, json })) => {
            warrant::sign(client, What::Request(request), lifetime, json, out).await
        }
        Some(IdVerb::Authority(AuthorityVerb::Succeed { name, overlap, json })) => {
            warrant::succeed(client, name, overlap, json, out).await
        }
        Some(IdVerb::Authority(AuthorityVerb::Revoke { name, key, json })) => {
            warrant::revoke(client, name, key, json, out).await
        }
        Some(IdVerb::Key(KeyVerb::Create { name, json })) => key(client, name, json, out).await,
        Some(IdVerb::Key(KeyVerb::Sign { name, host, lifetime, json })) => {
            let what = What::Host(HostOfKey { service: name, host_key: host });
            warrant::sign(client, what, lifetime, json, out).await
        }
        Some(IdVerb::Accept { warrant, json }) => warrant::accept(client, warrant, json, out).await,
        Some(IdVerb::Token(verb)) => token(client, verb, out).await,
        Some(IdVerb::Member(verb)) => member(client, verb, out).await,
        Some(IdVerb::Peers(json)) => peers(client, json, out).await,
    }
}

async fn identity(mut client: Client, json: Json, out: &mut Out) -> Result<()> {
    let reply = client.identity(IdentityRequest {}).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    out.facts(&[("host", reply.host_id), ("key", reply.host_key), ("epoch", reply.epoch.to_string())])?;
    for authority in reply.authorities {
        let is_by_warrant =
            reply.warrants.iter().any(|warrant| warrant.kind == "authority" && warrant.name == authority.name);
        let how = match authority.signs {
            true if is_by_warrant => "this router signs for it by a warrant",
            true => "its key is here",
            false => "joined",
        };
        out.line(&format!("authority {} ({how}), key {}", authority.name, authority.key))?;
        for one in &authority.successions {
            out.line(&warrant::followed(one))?;
        }
    }
    for key in reply.service_keys {
        out.line(&format!("service key {}: {}", key.name, key.service_id))?;
    }
    for warrant in &reply.warrants {
        out.line(&warrant::described(warrant))?;
    }
    Ok(())
}

async fn authority(mut client: Client, name: String, json: Json, out: &mut Out) -> Result<()> {
    let made = client.authority_create(AuthorityCreateRequest { name }).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&made);
    }
    out.line(&format!("authority {} is made; its key is on this host only: keep a copy in a safe place", made.name))?;
    let status = client.status(StatusRequest {}).await.map_err(refused)?.into_inner();
    if !status.router {
        out.line("nobody can join at this host before it is a router: `margay up --router`")?;
    }
    if let Some(home) = status.routers.iter().find(|home| home.authority != made.name) {
        out.line(&format!(
            "this host shows others that it is a member of {}, by the router at {}; where members of {} alone may \
             connect, it may not",
            home.authority, home.address, made.name
        ))?;
    }
    out.line(&format!("`margay id token create {}` prints a token for a host that shall join", made.name))
}

async fn key(mut client: Client, name: String, json: Json, out: &mut Out) -> Result<()> {
    let made = client.service_key_create(ServiceKeyCreateRequest { name }).await.map_err(refused)?.into_inner();
    if json.json { out.json(&made) } else { out.line(&made.service_id) }
}

async fn token(mut client: Client, verb: TokenVerb, out: &mut Out) -> Result<()> {
    match verb {
        TokenVerb::Create(args) => {
            let request = TokenCreateRequest {
                authority: args.authority,
                router_address: args.router_address.unwrap_or_default(),
                grants: args.grant,
                groups: args.group,
                uses: args.uses,
                lifetime_s: args.lifetime.as_secs(),
            };
            let reply = client.token_create(request).await.map_err(refused)?.into_inner();
            if args.json.json { out.json(&reply) } else { out.line(&reply.token) }
        }
        TokenVerb::List(json) => {
            let reply = client.token_list(TokenListRequest {}).await.map_err(refused)?.into_inner();
            if json.json {
                return out.json(&reply);
            }
            let rows = reply.tokens.into_iter().map(|token| {
                let (uses, ends) = (token.uses_left.to_string(), moment(token.expires_unix_s));
                vec![token.id, token.authority, token.state, uses, ends, token.groups.join(" ")]
            });
            let header = ["TOKEN", "AUTHORITY", "STATE", "USES LEFT", "ENDS", "GROUPS"];
            out.table(&header, rows.collect(), "no tokens; `margay id token create AUTHORITY` makes one")
        }
        TokenVerb::Revoke { id, json } => {
            let gone = client.token_revoke(TokenRevokeRequest { id }).await.map_err(refused)?.into_inner();
            let sentence = format!("token {} is revoked", gone.id);
            out.done(json.json, &gone, &sentence)
        }
    }
}

async fn member(mut client: Client, verb: MemberVerb, out: &mut Out) -> Result<()> {
    match verb {
        MemberVerb::List(json) => {
            let reply = client.member_list(MemberListRequest {}).await.map_err(refused)?.into_inner();
            if json.json {
                return out.json(&reply);
            }
            let rows = reply.members.into_iter().map(|member| {
                let state = if member.connected { member.address } else { "not connected".into() };
                vec![
                    member.host_name,
                    member.host_id,
                    member.authority,
                    state,
                    moment(member.joined_unix_s),
                    if member.grant_names.is_empty() { "nothing".to_owned() } else { member.grant_names.join(" ") },
                    member.groups.join(" "),
                ]
            });
            let header = ["HOST", "HOST-ID", "AUTHORITY", "ADDRESS", "JOINED", "MAY SERVE", "GROUPS"];
            out.table(&header, rows.collect(), "no host has joined here")
        }
        MemberVerb::Grant { host, names, authority, json } => {
            let request = MemberGrantRequest { host_id: host, authority: authority.unwrap_or_default(), grants: names };
            let now = client.member_grant(request).await.map_err(refused)?.into_inner();
            let grants = if now.grant_names.is_empty() { "nothing".to_owned() } else { now.grant_names.join(" ") };
            let sentence = format!("{} ({}) may serve {grants}", now.host_name, now.host_id);
            out.done(json.json, &now, &sentence)
        }
        MemberVerb::Remove { host, json } => {
            let gone = client.member_remove(MemberRemoveRequest { host_id: host }).await.map_err(refused)?.into_inner();
            let sentence = format!("{} ({}) is no member any more", gone.host_name, gone.host_id);
            out.done(json.json, &gone, &sentence)
        }
    }
}

async fn peers(mut client: Client, json: Json, out: &mut Out) -> Result<()> {
    let reply = client.association_list(AssociationListRequest {}).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    let rows = reply.associations.into_iter().map(|peer| {
        let role = if peer.router { "router" } else { "" };
        let heard = format!("{} ago", span(Duration::from_millis(peer.heard_ms_ago)));
        vec![
            peer.host_name,
            peer.host_id,
            peer.remote,
            role.into(),
            peer.flows.to_string(),
            peer.datagram_max_bytes.to_string(),
            heard,
        ]
    });
    let header = ["HOST", "HOST-ID", "ADDRESS", "ROLE", "FLOWS", "DATAGRAM BYTES", "HEARD"];
    out.table(&header, rows.collect(), "this host shares keys with nobody yet")
}
