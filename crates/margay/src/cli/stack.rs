//! `margay stack`.

use clap::Subcommand;
use margay_control::api::v1::StackRequest;
use miette::Result;

use super::{Client, Out, refused};

#[derive(Subcommand)]
pub enum StackVerb {
    /// Forget every cached flow; the next packet of each brings its entry back
    ClearCache,
    /// Take the eBPF programs off: flows go on, encapsulated
    Unload,
    /// Put the eBPF programs on again: flows go direct once more
    Load,
}

pub async fn stack(mut client: Client, verb: StackVerb, out: &mut Out) -> Result<()> {
    let act = match verb {
        StackVerb::ClearCache => "clear-cache",
        StackVerb::Unload => "unload",
        StackVerb::Load => "load",
    };
    let reply = client.stack(StackRequest { act: act.to_owned() }).await.map_err(refused)?.into_inner();
    out.line(&format!("done; established data is carried by: {}", reply.datapath))
}
