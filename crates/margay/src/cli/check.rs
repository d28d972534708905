//! `margay check`.

use std::process::ExitCode;

use clap::Args;
use margay_control::api::v1::{CheckRequest, CheckStep};
use miette::Result;

use super::output::count;
use super::{Client, Json, Out, refused};

#[derive(Args)]
pub struct CheckArgs {
    /// A name (web.shop, or web.shop:80 to connect, too), a host-ID or an address; this host only when left out
    peer: Option<String>,
    #[command(flatten)]
    json: Json,
}

pub async fn check(mut client: Client, args: CheckArgs, out: &mut Out) -> Result<ExitCode> {
    let request = CheckRequest { peer: args.peer.unwrap_or_default() };
    let mut steps = client.check(request).await.map_err(refused)?.into_inner();
    let mut all = Vec::new();
    let mut failed = 0;
    let mut warnings = 0;
    while let Some(step) = steps.message().await.map_err(refused)? {
        failed += usize::from(step.state == "failed");
        warnings += u64::from(step.state == "warning");
        if !args.json.json {
            say(&step, out)?;
        }
        all.push(step);
    }
    if args.json.json {
        out.json(&all)?;
    } else if failed == 0 {
        out.line(&match warnings {
            0 => "nothing is wrong".to_owned(),
            _ => format!("nothing has failed; {} above", count(warnings, "warning")),
        })?;
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn say(step: &CheckStep, out: &mut Out) -> Result<()> {
    out.line(&format!("{:8} {:9} {}", step.state, step.name, step.detail))?;
    if step.advice.is_empty() { Ok(()) } else { out.line(&format!("{:18} {}", "", step.advice)) }
}
