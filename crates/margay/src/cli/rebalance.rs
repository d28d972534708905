//! `margay rebalance`.

use std::io::{IsTerminal, Write};

use clap::Args;
use margay_control::api::v1::*;
use miette::{Result, miette};

use super::output::count;
use super::{Client, Json, Out, refused};
use crate::agent::rebalance::{RATE_DEFAULT, RATES};
use crate::listener::ServiceName;

#[derive(Args)]
pub struct RebalanceArgs {
    /// The name; this host is one of those that serve it
    name: ServiceName,
    /// How many connections each host gives in a second, at most (1 to 1000)
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = RATE_DEFAULT,
        value_parser = clap::value_parser!(u32).range(i64::from(*RATES.start())..=i64::from(*RATES.end()))
    )]
    max_per_s: u32,
    /// Change nothing, and say what would be given
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    json: Json,
}

pub async fn rebalance(mut client: Client, args: RebalanceArgs, out: &mut Out) -> Result<()> {
    let name = args.name.to_string();
    let request = RebalanceRequest { name: name.clone(), max_per_s: args.max_per_s, dry_run: args.dry_run };
    let mut reports = client.rebalance(request).await.map_err(refused)?.into_inner();
    let mut last = RebalanceReport::default();
    let is_told = std::io::stderr().is_terminal() && !args.json.json;
    while let Some(report) = reports.message().await.map_err(refused)? {
        if is_told && report.phase == "moving" {
            tell(&report);
        }
        last = report;
    }
    if is_told {
        // Nobody may be reading.
        let _ = write!(std::io::stderr(), "\r\x1b[K");
    }
    match last.phase.as_str() {
        "over" | "dry-run" if args.json.json => out.json(&last),
        "over" | "dry-run" => say(&last, out),
        _ => Err(miette!(
            help = "`margay rebalance` goes on from there when the agent runs again",
            "the agent has stopped; connections of {name} are where they are now"
        )),
    }
}

/// How it goes, in one line that the next one replaces.
fn tell(report: &RebalanceReport) {
    let given = report.hosts.iter().map(|host| host.given).sum();
    // Nobody may be reading.
    let _ = write!(std::io::stderr(), "\r\x1b[K{} given", count(given, "connection"));
}

fn say(report: &RebalanceReport, out: &mut Out) -> Result<()> {
    let is_rehearsed = report.phase == "dry-run";
    let row = |host: &RebalanceHost| {
        let mut row = vec![called(host), host.weight.to_string()];
        let takes_part = host.why_not.is_empty();
        let number = |number: u64| if takes_part { number.to_string() } else { "-".to_owned() };
        if !is_rehearsed {
            row.push(number(host.before));
        }
        row.extend([host.flows, host.share, host.given].map(number));
        row
    };
    let head: &[&str] = match is_rehearsed {
        true => &["HOST", "WEIGHT", "NOW", "SHARE", "WOULD GIVE"],
        false => &["HOST", "WEIGHT", "BEFORE", "NOW", "SHARE", "GIVEN"],
    };
    out.table(head, report.hosts.iter().map(row).collect(), "nobody serves it")?;
    for host in &report.hosts {
        if !host.why_not.is_empty() {
            out.line(&format!("{} takes no part: {}", called(host), host.why_not))?;
        }
        // What stays is of interest where it should have gone.
        for stay in host.stays.iter().filter(|_| host.flows > host.share) {
            out.line(&format!("{}: {} cannot go: {}", called(host), count(stay.flows, "connection"), stay.why))?;
        }
    }
    Ok(())
}

/// What people call a host.
fn called(host: &RebalanceHost) -> String {
    if host.host_name.is_empty() { host.host_id.clone() } else { host.host_name.clone() }
}

#[cfg(test)]
mod test {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Words {
        #[command(flatten)]
        args: RebalanceArgs,
    }

    #[test]
    fn a_name_and_a_rate_within_bounds() {
        let parse = |words: &str| Words::try_parse_from(std::iter::once("rebalance").chain(words.split_whitespace()));
        let args = parse("web.shop").expect("good words").args;
        assert_eq!((args.name.to_string().as_str(), args.max_per_s, args.dry_run), ("web.shop", RATE_DEFAULT, false));
        assert_eq!(parse("web.shop --max-per-s 1000 --dry-run").expect("good words").args.max_per_s, 1000);
        for bad in ["", "web..shop", "web.shop --max-per-s 0", "web.shop --max-per-s 1001", "web.shop --max-per-s few"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
