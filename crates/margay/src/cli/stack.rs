//! `margay stack`.

use clap::Subcommand;
use margay_control::api::v1::StackRequest;
use miette::Result;

use super::{Client, Json, Out, refused};

#[derive(Subcommand)]
pub enum StackVerb {
    /// Forget every cached flow; the next packet of each brings its entry back
    ClearCache(Json),
    /// Take the eBPF programs off: flows go on, encapsulated
    Unload(Json),
    /// Put the eBPF programs on again: flows go direct once more
    Load(Json),
}

pub async fn stack(mut client: Client, verb: StackVerb, out: &mut Out) -> Result<()> {
    let (act, json) = match verb {
        StackVerb::ClearCache(json) => ("clear-cache", json),
        StackVerb::Unload(json) => ("unload", json),
        StackVerb::Load(json) => ("load", json),
    };
    let reply = client.stack(StackRequest { act: act.to_owned() }).await.map_err(refused)?.into_inner();
    let sentence = format!("done; established data is carried by: {}", reply.datapath);
    out.done(json.json, &reply, &sentence)
}
