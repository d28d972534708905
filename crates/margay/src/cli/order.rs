//! `margay chain insert`, `remove` and `replace` with `--everywhere`: by one order, on all hosts of an authority.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use margay_control::api::v1::*;
use margay_control::chain_order::LIFE_S;
use miette::{Result, miette};

use super::output::count;
use super::policy::Ports;
use super::{Client, Out, refused};
use crate::listener::{Protocol, ServiceName};

/// The name that sessions are to, or `*.authority`: all names of that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Services(String);

impl fmt::Display for Services {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Services {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // An authority has no name by itself.
        let checked = text.strip_prefix("*.").map_or_else(|| text.to_owned(), |authority| format!("any.{authority}"));
        checked.parse::<ServiceName>()?;
        Ok(Self(text.to_owned()))
    }
}

/// Whose sessions are changed, beside this host's.
#[derive(Args)]
pub struct Everywhere {
    /// On a router: the sessions of all hosts of the name's authority
    #[arg(long, requires = "service", conflicts_with = "flow")]
    everywhere: bool,
    /// With --everywhere: of these hosts alone, host:<id> or group:<name>; may be given more than once
    #[arg(long, value_name = "HOST|GROUP", requires = "everywhere")]
    from: Vec<String>,
    /// With --everywhere: sessions of this protocol alone
    #[arg(long, value_enum, requires = "everywhere")]
    protocol: Option<Protocol>,
    /// With --everywhere: sessions to these ports of the service alone
    #[arg(long, value_name = "PORT[-PORT]", requires = "everywhere")]
    port: Option<Ports>,
    /// With --everywhere: how long hosts are waited for, and may begin (1s to 10m); 30s unless given
    #[arg(long, value_name = "TIME", value_parser = wait, requires = "everywhere")]
    wait: Option<Duration>,
}

const WAIT_DEFAULT: Duration = Duration::from_secs(30);

fn wait(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let is_bounded = u32::try_from(time.as_secs()).is_ok_and(|seconds| LIFE_S.contains(&seconds));
    if is_bounded { Ok(time) } else { Err(format!("{text} is not from 1s to 10m")) }
}

impl Everywhere {
    /// Whether all hosts are meant.
    pub fn is_meant(&self) -> bool {
        self.everywhere
    }
}

/// Orders it, and waits until it is over. Fails if a session stays as it was, or a host has not carried the order out.
pub async fn order(
    mut client: Client,
    of: &ChainChangeRequest,
    whose: Everywhere,
    json: bool,
    out: &mut Out,
) -> Result<()> {
    let request = ChainOrderRequest {
        act: of.act.clone(),
        r#box: of.r#box.clone(),
        other: of.other.clone(),
        name: of.name.clone(),
        protocol: whose.protocol.map(Protocol::label).unwrap_or_default().to_owned(),
        first_port: whose.port.map_or(0, |ports| ports.first.into()),
        last_port: whose.port.map_or(0, |ports| ports.last.into()),
        clients: whose.from,
        // Within bounds, as was seen when it was read.
        wait_s: u32::try_from(whose.wait.unwrap_or(WAIT_DEFAULT).as_secs()).unwrap_or(*LIFE_S.end()),
    };
    let mut reports = client.chain_order(request).await.map_err(refused)?.into_inner();
    let is_told = std::io::stderr().is_terminal() && !json;
    let mut hosts = Vec::new();
    let mut last = ChainOrderReport::default();
    while let Some(report) = reports.message().await.map_err(refused)? {
        if is_told && report.phase == "going" {
            tell(&report);
        }
        hosts.extend(report.hosts.iter().cloned());
        last = report;
    }
    if is_told {
        // Nobody may be reading.
        let _ = write!(std::io::stderr(), "\r\x1b[K");
    }
    if last.phase != "over" {
        return Err(miette!(
            help = "hosts finish what they have begun with; `margay audit list` there has the order",
            "the router's agent has stopped; what has become of the order is not known"
        ));
    }
    last.hosts = hosts;
    if json {
        out.json(&last)?;
    } else {
        said(&last).iter().try_for_each(|line| out.line(line))?;
    }
    outcome(&last)
}

/// How it goes, in one line that the next one replaces.
fn tell(report: &ChainOrderReport) {
    let (asked, changed) = (count(report.asked.into(), "host"), count(report.changed, "session"));
    // Nobody may be reading.
    let _ = write!(std::io::stderr(), "\r\x1b[K{} of {asked} over, {changed} changed", report.over);
}

/// What people are told in the end.
fn said(report: &ChainOrderReport) -> Vec<String> {
    let mut lines = Vec::new();
    for host in &report.hosts {
        let called = if host.host_name.is_empty() { &host.host_id } else { &host.host_name };
        for one in &host.as_before {
            lines.push(format!("{called}: {} as before: {}", count(one.sessions.into(), "session"), one.why));
        }
        if host.state != "done" {
            lines.push(format!("{called} is {}: {}", host.state, host.why));
        }
    }
    let (asked, changed) = (count(report.asked.into(), "host"), count(report.changed, "session"));
    lines.push(format!("{asked} asked, {changed} changed"));
    lines
}

fn outcome(report: &ChainOrderReport) -> Result<()> {
    let undone = report.hosts.iter().filter(|host| host.state != "done").count() as u64;
    let mut what = Vec::new();
    if report.as_before > 0 {
        what.push(format!("{} of {} stay as they were", report.as_before, count(report.sessions, "session")));
    }
    if undone > 0 {
        what.push(format!("the order is not carried out on {undone} of {}", count(report.asked.into(), "host")));
    }
    if what.is_empty() { Ok(()) } else { Err(miette!("{}", what.join("; "))) }
}

#[cfg(test)]
mod test {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Words {
        #[arg(long = "name")]
        service: Option<Services>,
        flow: Option<String>,
        #[command(flatten)]
        whose: Everywhere,
    }

    #[test]
    fn an_order_has_a_name_and_bounds() {
        let parse = |words: &str| Words::try_parse_from(std::iter::once("chain").chain(words.split_whitespace()));
        let words = "--name *.shop --everywhere --from group:a --from host:b --protocol tcp --port 80-90 --wait 1m";
        let read = parse(words).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(read.service.map(|name| name.to_string()).as_deref(), Some("*.shop"));
        assert_eq!(read.whose.port.map(|ports| (ports.first, ports.last)), Some((80, 90)));
        assert_eq!((read.whose.from.len(), read.whose.wait), (2, Some(Duration::from_secs(60))));
        assert!(!parse("--name web.shop").expect("good words").whose.is_meant());
        for bad in [
            "--everywhere",
            "f1 --everywhere --name web.shop",
            "--name web.shop --from group:a",
            "--name web.shop --wait 5s",
            "--name web.shop --everywhere --wait 500ms",
            "--name web.shop --everywhere --wait 11m",
            "--name web.shop --everywhere --port 0",
            "--name web.shop --everywhere --protocol icmp",
            "--name *. --everywhere",
            "--name w*.shop --everywhere",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_was_not_done_is_named_and_fails() {
        let host = |name: &str, state: &str, sessions, changed| ChainOrderHost {
            host_name: name.to_owned(),
            state: state.to_owned(),
            sessions,
            changed,
            why: if state == "done" { String::new() } else { "it has not answered in time".to_owned() },
            ..ChainOrderHost::default()
        };
        let mut report = ChainOrderReport {
            asked: 3,
            sessions: 4,
            changed: 4,
            hosts: vec![host("web1", "done", 4, 4)],
            ..ChainOrderReport::default()
        };
        assert_eq!(said(&report), ["3 hosts asked, 4 sessions changed"]);
        assert!(outcome(&report).is_ok());
        report.hosts.push(host("web2", "silent", 0, 0));
        assert_eq!(said(&report)[0], "web2 is silent: it has not answered in time");
        let error = outcome(&report).expect_err("one is silent").to_string();
        assert_eq!(error, "the order is not carried out on 1 of 3 hosts");
        report.hosts[0].as_before = vec![ChainOrderReason { why: "nobody serves the box".to_owned(), sessions: 1 }];
        (report.changed, report.as_before) = (3, 1);
        assert_eq!(said(&report)[0], "web1: 1 session as before: nobody serves the box");
        let error = outcome(&report).expect_err("one stays").to_string();
        assert!(error.starts_with("1 of 4 sessions stay as they were; "), "{error}");
    }
}
