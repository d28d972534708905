//! `margay id authority request | sign | succeed | revoke`, `margay id key sign`, `margay id accept`.

use std::io::Read;
use std::time::Duration;

use margay_control::api::v1::warrant_sign_request::What;
use margay_control::api::v1::*;
use miette::{IntoDiagnostic, Result, WrapErr};

use super::output::moment;
use super::{Client, Json, Out, refused};

/// More than any warrant has.
const TEXT_MAX: u64 = 64 * 1024;

pub async fn request(mut client: Client, name: String, new_key: bool, json: Json, out: &mut Out) -> Result<()> {
    let asked = WarrantRequestRequest { authority: name, new_key };
    let reply = client.warrant_request(asked).await.map_err(refused)?.into_inner();
    if json.json { out.json(&reply) } else { out.line(&reply.request) }
}

pub async fn sign(mut client: Client, what: What, lifetime: Duration, json: Json, out: &mut Out) -> Result<()> {
    let asked = WarrantSignRequest { what: Some(what), lifetime_s: lifetime.as_secs() };
    let reply = client.warrant_sign(asked).await.map_err(refused)?.into_inner();
    if json.json { out.json(&reply) } else { out.line(&reply.warrant) }
}

pub async fn revoke(mut client: Client, authority: String, key: String, json: Json, out: &mut Out) -> Result<()> {
    let asked = WarrantRevokeRequest { authority, key };
    let reply = client.warrant_revoke(asked).await.map_err(refused)?.into_inner();
    if json.json { out.json(&reply) } else { out.line(&reply.revocation) }
}

pub async fn succeed(mut client: Client, name: String, overlap: Duration, json: Json, out: &mut Out) -> Result<()> {
    let asked = AuthoritySucceedRequest { name, overlap_s: overlap.as_secs() };
    let reply = client.authority_succeed(asked).await.map_err(refused)?.into_inner();
    if json.json { out.json(&reply) } else { out.line(&reply.succession) }
}

/// Which key follows which, and when.
pub fn followed(one: &SuccessionInfo) -> String {
    let begin = moment(one.signs_from_unix_s);
    let end = moment(one.old_trusted_until_unix_s);
    format!(
        "  key {} follows key {}: first signature {begin}, end of the former key's trust {end}",
        one.new_key, one.old_key
    )
}

pub async fn accept(mut client: Client, warrant: String, json: Json, out: &mut Out) -> Result<()> {
    let warrant = if warrant == "-" { from_input()? } else { warrant };
    let taken = client.warrant_accept(WarrantAcceptRequest { warrant }).await.map_err(refused)?.into_inner();
    if json.json { out.json(&taken) } else { out.line(&described(&taken)) }
}

fn from_input() -> Result<String> {
    let mut text = String::new();
    let read = std::io::stdin().lock().take(TEXT_MAX).read_to_string(&mut text);
    read.into_diagnostic().wrap_err("cannot read the warrant from standard input")?;
    Ok(text)
}

/// What it is for, and until when.
pub fn described(warrant: &WarrantInfo) -> String {
    let end = moment(warrant.not_after_unix_s);
    match warrant.kind.as_str() {
        "authority" if warrant.revoked => {
            format!("this host may sign for {} no longer: key {} was taken back", warrant.name, warrant.signs_with)
        }
        "authority" => {
            let WarrantInfo { name, key, signs_with, .. } = warrant;
            format!(
                "this host may sign for {name} with key {signs_with}, by the word of key {key}; end of the warrant: \
                 {end}"
            )
        }
        "succession" => format!("key {} of {} follows key {}", warrant.signs_with, warrant.name, warrant.key),
        "revocation" => format!("key {} may sign for {} no longer", warrant.signs_with, warrant.name),
        _ => format!("this host may answer for {} ({}); end of the warrant: {end}", warrant.name, warrant.service_id),
    }
}
