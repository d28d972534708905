//! `margay cache`.

use clap::Subcommand;
use margay_control::api::v1::CacheRequest;
use miette::Result;

use super::{Client, Json, Out, refused};

#[derive(Subcommand)]
pub enum CacheVerb {
    /// Forget every cached flow; the next packet of each brings its entry back
    Clear(Json),
    /// Take the eBPF programs off: flows go on, encapsulated
    Unload(Json),
    /// Put the eBPF programs on again: flows go direct once more
    Load(Json),
}

pub async fn cache(mut client: Client, verb: CacheVerb, out: &mut Out) -> Result<()> {
    let (act, json) = match verb {
        CacheVerb::Clear(json) => ("clear", json),
        CacheVerb::Unload(json) => ("unload", json),
        CacheVerb::Load(json) => ("load", json),
    };
    let reply = client.cache(CacheRequest { act: act.to_owned() }).await.map_err(refused)?.into_inner();
    let sentence = format!("done; established data is carried by: {}", reply.datapath);
    out.done(json.json, &reply, &sentence)
}
