//! `margay check`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use margay_control::api::v1::{CheckRequest, CheckStep};
use miette::Result;

use super::output::count;
use super::{Client, Json, Out, refused};
use crate::listener::Protocol;

/// From one look to the next.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Args)]
#[command(
    after_help = "Exit status: 0 when nothing has failed, 1 when something has, or still does at the end of --wait."
)]
pub struct CheckArgs {
    /// A name (web.shop, or web.shop:80 to connect, too), a host-ID or an address; this host only when left out
    #[arg(value_name = "PEER")]
    peer: Option<String>,
    /// How to connect to NAME:PORT; with udp the program there is sent one empty datagram
    #[arg(long, value_name = "PROTOCOL", default_value = "tcp", requires = "peer")]
    protocol: Protocol,
    /// Look again and again until nothing has failed and nothing is under way: for a minute, or as long as it says
    #[arg(
        long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "1m",
        value_parser = humantime::parse_duration
    )]
    wait: Option<Duration>,
    #[command(flatten)]
    json: Json,
}

/// `connect` gives a client of the agent, where that runs.
pub async fn check(connect: impl AsyncFn() -> Result<Client>, args: CheckArgs, out: &mut Out) -> Result<ExitCode> {
    let begun = Instant::now();
    let has_time = || args.wait.is_some_and(|limit| begun.elapsed() + PAUSE < limit);
    let steps = loop {
        // What is said while it is waited for is said at the end.
        let is_last = args.wait.is_none();
        let looked = look(&connect, &args, is_last && !args.json.json, out).await;
        match looked {
            Ok(steps) if is_well(&steps) || !has_time() => break steps,
            Err(error) if !has_time() => return Err(error),
            Ok(_) | Err(_) => tokio::time::sleep(PAUSE).await,
        }
    };
    if args.json.json {
        out.json(&steps)?;
    } else {
        if args.wait.is_some() {
            steps.iter().try_for_each(|step| say(step, out))?;
        }
        out.line(&verdict(&steps))?;
    }
    let has_failed = tally(&steps, "failed") > 0 || (args.wait.is_some() && !is_well(&steps));
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// All steps of one look; each is said at once where `is_told`.
async fn look(
    connect: &impl AsyncFn() -> Result<Client>,
    args: &CheckArgs,
    is_told: bool,
    out: &mut Out,
) -> Result<Vec<CheckStep>> {
    let request =
        CheckRequest { peer: args.peer.clone().unwrap_or_default(), protocol: args.protocol.label().to_owned() };
    let mut steps = connect().await?.check(request).await.map_err(refused)?.into_inner();
    let mut all = Vec::new();
    while let Some(step) = steps.message().await.map_err(refused)? {
        if is_told {
            say(&step, out)?;
        }
        all.push(step);
    }
    Ok(all)
}

fn tally(steps: &[CheckStep], state: &str) -> u64 {
    steps.iter().filter(|step| step.state == state).count() as u64
}

fn is_well(steps: &[CheckStep]) -> bool {
    tally(steps, "failed") == 0 && tally(steps, "waiting") == 0
}

/// What it comes to, in one line.
fn verdict(steps: &[CheckStep]) -> String {
    let of = |state| tally(steps, state);
    let mut parts = Vec::new();
    if of("failed") > 0 {
        parts.push(format!("{} failed", of("failed")));
    }
    if of("waiting") > 0 {
        parts.push(format!("{} under way", of("waiting")));
    }
    if of("warning") > 0 {
        parts.push(count(of("warning"), "warning"));
    }
    if parts.is_empty() {
        "nothing is wrong".to_owned()
    } else {
        format!("of {}: {}", count(steps.len() as u64, "check"), parts.join(", "))
    }
}

fn say(step: &CheckStep, out: &mut Out) -> Result<()> {
    out.line(&format!("{:8} {:9} {}", step.state, step.name, step.detail))?;
    if step.advice.is_empty() { Ok(()) } else { out.line(&format!("{:18} {}", "", step.advice)) }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_last_line_says_nothing_is_wrong_only_where_nothing_is() {
        let steps = |states: &[&str]| -> Vec<CheckStep> {
            states.iter().map(|state| CheckStep { state: (*state).to_owned(), ..CheckStep::default() }).collect()
        };
        assert_eq!(verdict(&steps(&["ok", "ok"])), "nothing is wrong");
        assert_eq!(verdict(&steps(&["ok", "warning"])), "of 2 checks: 1 warning");
        let all = steps(&["failed", "failed", "waiting", "warning", "warning"]);
        assert_eq!(verdict(&all), "of 5 checks: 2 failed, 1 under way, 2 warnings");
        assert!(is_well(&steps(&["ok", "warning"])) && !is_well(&steps(&["waiting"])) && !is_well(&all));
    }
}
