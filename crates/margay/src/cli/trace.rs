//! `margay trace`.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use margay_control::api::v1::{PolicyChain, RouteInfo, TraceHop, TraceReply, TraceRequest, TraceRule};
use margay_control::chains::written;
use miette::Result;

use super::output::{count, span};
use super::route::{ended_rule, of, place};
use super::{Client, Json, Out, refused};
use crate::listener::{Protocol, ServiceName, name_and_port};

#[derive(Args)]
pub struct TraceArgs {
    /// The name, and a port of the service: web.shop or web.shop:80; whatever port its instances listen on when left
    /// out
    #[arg(value_name = "NAME[:PORT]", value_parser = name_and_port)]
    name: (ServiceName, Option<u16>),
    /// Transport protocol
    #[arg(long, default_value = "tcp")]
    protocol: Protocol,
    #[command(flatten)]
    json: Json,
}

pub async fn trace(mut client: Client, args: TraceArgs, out: &mut Out) -> Result<ExitCode> {
    let (name, port) = args.name;
    let request =
        TraceRequest { name: name.to_string(), port: port.map(u32::from), protocol: args.protocol.label().to_owned() };
    let reply = client.trace(request).await.map_err(refused)?.into_inner();
    if args.json.json {
        out.json(&reply)?;
    } else {
        lines(&reply).iter().try_for_each(|line| out.line(line))?;
    }
    Ok(if reply.reached { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One block for each hop: what it does, its rules with what became of each (the one that decides is marked), and what
/// else there is to know.
fn lines(reply: &TraceReply) -> Vec<String> {
    let mut lines: Vec<String> = reply.chain.iter().map(chain).collect();
    for (number, hop) in (1..).zip(&reply.hops) {
        let here = if number == 1 { " (this host)" } else { "" };
        lines.push(format!("{number:2}  {}{here}: {}", host(hop), hop.why));
        lines.extend(hop.rules.iter().map(rule));
        if hop.rules_left_out > 0 {
            lines.push(format!("      {} left out, none of which decides", count(hop.rules_left_out.into(), "rule")));
        }
        lines.extend(hop.ended.iter().map(|ended| format!("      {}", ended_rule(ended))));
        lines.extend(hop.notes.iter().map(|note| format!("      note: {note}")));
    }
    let end = match reply.hops.last().map(|hop| (hop.act.as_str(), host(hop))) {
        Some(("deliver", host)) => format!("{} is reached at {host}", reply.name),
        Some(("unasked", host)) => {
            format!("what {host} would do is not known: the trace ends before it reaches {}", reply.name)
        }
        Some((_, host)) => format!("{} is not reached: it ends at {host}", reply.name),
        None => format!("{} is not reached", reply.name),
    };
    lines.push(end);
    lines
}

/// The chain that decides, before the way that a session without one would go.
fn chain(chain: &PolicyChain) -> String {
    match chain.boxes.first() {
        Some(first) => format!(
            "sessions go by chain {}: first to the first box (`margay trace {first}`), and from the last one on as \
             follows, from that box's host",
            written(chain)
        ),
        None => format!("sessions go by chain {}", written(chain)),
    }
}

fn host(hop: &TraceHop) -> String {
    if hop.host_name.is_empty() { hop.host_id.chars().take(12).collect() } else { hop.host_name.clone() }
}

fn rule(rule: &TraceRule) -> String {
    let none = RouteInfo::default();
    let route = rule.route.as_ref().unwrap_or(&none);
    let mark = if rule.verdict == "chosen" { '*' } else { '-' };
    let origin = if route.origin == "registered" && !route.host_name.is_empty() {
        format!("registered by {}", route.host_name)
    } else {
        route.origin.clone()
    };
    let age = span(Duration::from_secs(route.age_ms / 1000));
    format!(
        "    {mark} rule {}: {}, {}, priority {}, weight {}, {origin}, {age} old: {}",
        route.id,
        of(route),
        [route.action.as_str(), &place(route)].join(" ").trim_end(),
        route.priority,
        route.weight,
        rule.why
    )
}

#[cfg(test)]
mod test {
    use super::*;

    fn hop(name: &str, act: &str, why: &str) -> TraceHop {
        TraceHop { host_name: name.to_owned(), act: act.to_owned(), why: why.to_owned(), ..TraceHop::default() }
    }

    #[test]
    fn a_trace_as_people_read_it() {
        let route = RouteInfo {
            name: "web.shop".to_owned(),
            action: "forward".to_owned(),
            to: "10.1.0.11:54324".to_owned(),
            host_name: "web1".to_owned(),
            origin: "registered".to_owned(),
            priority: 10,
            weight: 1,
            id: 12,
            age_ms: 61_000,
            ..RouteInfo::default()
        };
        let rule = TraceRule { route: Some(route), verdict: "chosen".to_owned(), why: "it decides".to_owned() };
        let router = TraceHop { rules: vec![rule], rules_left_out: 2, ..hop("router", "forward", "sends it on") };
        let mut reply = TraceReply {
            name: "web.shop".to_owned(),
            reached: true,
            chain: None,
            hops: vec![hop("client", "forward", "sends"), router],
        };
        reply.hops.push(hop("web1", "deliver", "hands it over"));
        let wanted = [
            " 1  client (this host): sends",
            " 2  router: sends it on",
            "    * rule 12: web.shop, forward 10.1.0.11:54324, priority 10, weight 1, registered by web1, 1m 1s old: \
             it decides",
            "      2 rules left out, none of which decides",
            " 3  web1: hands it over",
            "web.shop is reached at web1",
        ];
        assert_eq!(lines(&reply), wanted);
        let boxes = vec!["fw.shop".to_owned()];
        let inspect =
            PolicyChain { name: "inspect".to_owned(), services: "web.shop".to_owned(), ..PolicyChain::default() };
        reply.chain = Some(PolicyChain { boxes, ..inspect.clone() });
        assert!(lines(&reply)[0].contains("inspect: web.shop through fw.shop"), "{:?}", lines(&reply));
        assert!(lines(&reply)[0].contains("`margay trace fw.shop`"));
        reply.chain = Some(inspect);
        assert_eq!(lines(&reply)[0], "sessions go by chain inspect: web.shop through no boxes");
        reply.hops.push(hop("10.0.0.9:54324", "unasked", "it does not answer"));
        let end = "what 10.0.0.9:54324 would do is not known: the trace ends before it reaches web.shop";
        assert_eq!(lines(&reply).last().map(String::as_str), Some(end));
    }
}
