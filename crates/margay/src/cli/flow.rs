//! `margay flow`.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use clap::Subcommand;
use margay_control::api::v1::*;
use miette::Result;
use serde_json::json;

use super::output::{bytes, count, span};
use super::{Client, Json, Out, refused};
use crate::listener::ServiceName;

#[derive(Subcommand)]
pub enum FlowVerb {
    /// Flows of this host, oldest first
    List {
        /// Only flows of this name
        name: Option<ServiceName>,
        /// At most so many
        #[arg(long, value_name = "NUMBER", default_value_t = 100)]
        limit: u32,
        /// Instead: flows that have failed lately, and why; the latest first
        #[arg(long)]
        failed: bool,
        #[command(flatten)]
        json: Json,
    },
    /// All about one flow
    Show {
        /// The flow, as `list` shows it
        flow: String,
        #[command(flatten)]
        json: Json,
    },
    /// Flows as they come and go
    Watch {
        /// Only flows of this name
        name: Option<ServiceName>,
        #[command(flatten)]
        json: Json,
    },
    /// Move a flow to another address: one of this host, or one of the peer
    Migrate {
        /// The flow, as `list` shows it
        flow: String,
        /// Where to
        #[arg(long, value_name = "ADDRESS")]
        to: String,
        #[command(flatten)]
        json: Json,
    },
    /// What a flow does with several addresses: fail over, stay with one, use them at once, in turns, or two for each
    /// packet
    Policy {
        /// The flow, as `list` shows it
        flow: String,
        /// Which policy
        policy: PolicyWord,
        /// With `pin`: an address of this host, or of the peer. With `weighted`: such addresses with their weights, as
        /// 192.0.2.1=2; places of other addresses have 1. With `stripe`, if anything: by which addresses a flow goes as
        /// it is, as 192.0.2.1=plain (by others it is sealed then), and by which what it loses is repaired, as
        /// 192.0.2.1=fec
        #[arg(required_if_eq_any([("policy", "pin"), ("policy", "weighted")]), value_name = "ADDRESS")]
        addresses: Vec<Addressed>,
        #[command(flatten)]
        json: Json,
    },
    /// End a flow at both ends, now
    Close {
        /// The flow, as `list` shows it
        flow: String,
        #[command(flatten)]
        json: Json,
    },
}

/// A policy, as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PolicyWord {
    /// Go with all flows of the peer
    FailOver,
    /// Stay with one address
    Pin,
    /// Go by several pairs of addresses at once, each packet where it arrives first
    Stripe,
    /// Go by several pairs of addresses in turns, each as often as its weight says
    Weighted,
    /// Send each packet by two pairs of addresses, of which the first one that arrives counts
    Redundant,
}

/// An address that a policy names, with what is said of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addressed {
    address: IpAddr,
    said: Option<OfPlace>,
}

/// What is said of a place.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OfPlace {
    Weight(u32),
    /// A word, which the agent knows.
    Stack(String),
}

impl FromStr for Addressed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, said) = text.split_once('=').map_or((text, None), |(address, said)| (address, Some(said)));
        let read = |said: &str| {
            if said.starts_with(|first: char| first.is_ascii_lowercase()) {
                return Ok(OfPlace::Stack(said.to_owned()));
            }
            let fault = || format!("`{said}` is no weight; it is a number from 1 to 255, as in {address}=2");
            let weight = said.parse::<u8>().ok().filter(|weight| *weight > 0);
            weight.map(|weight| OfPlace::Weight(weight.into())).ok_or_else(fault)
        };
        let parsed = address.parse().map_err(|_| format!("`{address}` is no IP address"))?;
        Ok(Self { address: parsed, said: said.map(read).transpose()? })
    }
}

impl std::fmt::Display for PolicyWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::FailOver => "fail-over",
            Self::Pin => "pin",
            Self::Stripe => "stripe",
            Self::Weighted => "weighted",
            Self::Redundant => "redundant",
        })
    }
}

/// What a policy names, as a request has it: an address, weights, or stacks of places.
fn named(policy: PolicyWord, addresses: &[Addressed]) -> Result<FlowPolicyRequest> {
    let mut request = FlowPolicyRequest { policy: policy.to_string(), ..FlowPolicyRequest::default() };
    match (policy, addresses) {
        (PolicyWord::Pin, [Addressed { address, said: None }]) => request.address = address.to_string(),
        (PolicyWord::Pin, _) => miette::bail!("`pin` takes one address, without a weight"),
        (PolicyWord::Weighted, _) => {
            let weight = |one: &Addressed| match one.said {
                Some(OfPlace::Weight(weight)) => Ok(PlaceWeight { address: one.address.to_string(), weight }),
                _ => Err(miette::miette!("{0} has no weight; write {0}=2", one.address)),
            };
            request.weights = addresses.iter().map(weight).collect::<Result<_>>()?;
        }
        (PolicyWord::Stripe, _) => {
            let stack = |one: &Addressed| match &one.said {
                Some(OfPlace::Stack(stack)) => {
                    Ok(PlaceStack { address: one.address.to_string(), stack: stack.clone() })
                }
                _ => Err(miette::miette!(
                    "`stripe` takes places with a stack of their own, as {0}=plain or {0}=fec, or none",
                    one.address
                )),
            };
            request.stacks = addresses.iter().map(stack).collect::<Result<_>>()?;
        }
        (_, []) => {}
        _ => miette::bail!("only `pin`, `stripe` and `weighted` take addresses"),
    }
    Ok(request)
}

pub async fn flow(mut client: Client, verb: FlowVerb, out: &mut Out) -> Result<()> {
    match verb {
        FlowVerb::List { name, limit, failed, json } => {
            let request = FlowListRequest { service: written(name), limit, failed };
            let reply = client.flow_list(request).await.map_err(refused)?.into_inner();
            if json.json {
                return out.json(&reply);
            }
            if failed {
                table_of_failed(&reply.flows, out)?
            } else {
                table(&reply.flows, out)?
            }
            let listed = reply.flows.len() as u64;
            if listed < reply.total {
                out.line(&format!("{} more; --limit {} lists all", reply.total - listed, reply.total))?;
            }
            Ok(())
        }
        FlowVerb::Show { flow, json } => {
            let reply = client.flow_show(FlowShowRequest { flow }).await.map_err(refused)?.into_inner();
            if json.json { out.json(&reply) } else { show(&reply, out) }
        }
        FlowVerb::Watch { name, json } => watch(client, written(name), json, out).await,
        FlowVerb::Migrate { flow, to, json } => {
            client.flow_migrate(FlowMigrateRequest { flow: flow.clone(), to: to.clone() }).await.map_err(refused)?;
            let sentence = format!("{flow} is moving to {to}; `margay flow show {flow}` shows when it is there");
            out.done(json.json, &json!({ "flow": flow, "to": to }), &sentence)
        }
        FlowVerb::Policy { flow, policy, addresses, json } => {
            let request = FlowPolicyRequest { flow: flow.clone(), ..named(policy, &addresses)? };
            let weight = |one: &PlaceWeight| json!({ "address": one.address, "weight": one.weight });
            let stack = |one: &PlaceStack| json!({ "address": one.address, "stack": one.stack });
            let value = json!({
                "flow": flow, "policy": request.policy, "address": request.address,
                "weights": request.weights.iter().map(weight).collect::<Vec<_>>(),
                "stacks": request.stacks.iter().map(stack).collect::<Vec<_>>(),
            });
            client.flow_policy(request).await.map_err(refused)?;
            let sentence =
                format!("{flow} has the policy {policy}; `margay flow show {flow}` shows what becomes of it");
            out.done(json.json, &value, &sentence)
        }
        FlowVerb::Close { flow, json } => {
            client.flow_close(FlowCloseRequest { flow: flow.clone() }).await.map_err(refused)?;
            out.done(json.json, &json!({ "flow": flow }), &format!("{flow} is closed"))
        }
    }
}

fn written(name: Option<ServiceName>) -> String {
    name.map(|name| name.to_string()).unwrap_or_default()
}

/// What people call the service.
pub fn label(flow: &FlowInfo) -> String {
    // The authority and the service: fewer digits would be the same for all names of an authority.
    let digits = || flow.service.chars().take("sid:".len() + 24).chain("…".chars()).collect();
    if flow.name.is_empty() { digits() } else { flow.name.clone() }
}

/// The boxes that a session passes, from its client to its server, or to the proxy at which it ends.
pub(super) fn hops(chain: &ChainInfo) -> String {
    let of_box = |one: &ChainBox| {
        let host = if one.host_name.is_empty() { one.host_id.get(..12).unwrap_or_default() } else { &one.host_name };
        let added = if one.added { "added " } else { "" };
        match (one.left_out, host) {
            (true, _) => format!("({added}{} left out)", one.name),
            (false, "") => format!("{added}{}", one.name),
            (false, host) => format!("{added}{} at {host}", one.name),
        }
    };
    let server = chain.boxes.last().is_none_or(|last| !last.ends).then(|| "server".to_owned());
    let hops = std::iter::once("client".to_owned()).chain(chain.boxes.iter().map(of_box)).chain(server);
    hops.collect::<Vec<_>>().join(" > ")
}

/// Which of a session's hops a flow is.
fn hop(chain: &ChainInfo) -> &'static str {
    match chain.place.as_str() {
        "first" => "from the client's host to the first box",
        "left" => "from the host before, to a box of this host",
        "right" => "from a box of this host, to the next host",
        "proxy" => "from the host before, to a proxy of this host",
        _ => "from the last box to the server's host",
    }
}

/// Whether a flow is this half of a session at a box of this host.
fn is_half(flow: &FlowInfo, place: &str) -> bool {
    flow.chain.as_ref().is_some_and(|chain| chain.place == place)
}

/// The peer by its name, where that is known, and its address.
pub fn peer(flow: &FlowInfo) -> String {
    let remote = if flow.remote.is_empty() { "?" } else { &flow.remote };
    if flow.peer_name.is_empty() { remote.to_owned() } else { format!("{} ({remote})", flow.peer_name) }
}

/// Flows, one per row; a session that passes a box of this host is one row, too.
pub fn table(flows: &[FlowInfo], out: &mut Out) -> Result<()> {
    let halves = |place: &'static str| flows.iter().filter(move |flow| is_half(flow, place));
    let left: HashSet<&str> = halves("left").map(|flow| flow.session.as_str()).collect();
    let right: HashMap<&str, &FlowInfo> = halves("right").map(|flow| (flow.session.as_str(), flow)).collect();
    let is_shown = |flow: &&FlowInfo| !(is_half(flow, "right") && left.contains(flow.session.as_str()));
    let rows = flows.iter().filter(is_shown).map(|flow| {
        let way = if flow.role == "initiator" { "to" } else { "from" };
        let onward = right.get(flow.session.as_str()).filter(|_| is_half(flow, "left"));
        let onward = onward.map(|onward| format!(" to {}", peer(onward))).unwrap_or_default();
        vec![
            flow.flow.clone(),
            label(flow),
            flow.protocol.clone(),
            format!("{way} {}{onward}", peer(flow)),
            flow.lifecycle.clone(),
            flow.path.clone(),
            span(Duration::from_millis(flow.age_ms)),
            bytes(flow.sent_bytes),
            bytes(flow.received_bytes),
        ]
    });
    out.table(
        &["FLOW", "SERVICE", "PROTO", "PEER", "STATE", "PATH", "AGE", "SENT", "RECEIVED"],
        rows.collect(),
        "no flows",
    )
}

/// Flows that have failed, one per row.
fn table_of_failed(flows: &[FlowInfo], out: &mut Out) -> Result<()> {
    let rows = flows.iter().map(|flow| {
        let ago = span(Duration::from_millis(flow.ended_ms_ago.unwrap_or_default()));
        vec![flow.flow.clone(), label(flow), flow.protocol.clone(), peer(flow), ago, flow.ended_why.clone()]
    });
    let nothing = "no flow has failed lately";
    out.table(&["FLOW", "SERVICE", "PROTO", "PEER", "AGO", "WHY"], rows.collect(), nothing)
}

/// Where the flow is in its life, who closed first, and its age, which is the flow's and not the state's.
fn state(flow: &FlowInfo) -> String {
    let opened = span(Duration::from_millis(flow.age_ms));
    if let Some(ms) = flow.ended_ms_ago {
        let ago = span(Duration::from_millis(ms));
        return format!("ended {ago} ago ({}), opened {opened} ago: {}", flow.ended_by, flow.ended_why);
    }
    let closed_by = match flow.closed_by.as_str() {
        "this" => " (the program here has closed)",
        "peer" => " (the peer's program has closed)",
        _ => "",
    };
    format!("{}{closed_by}, opened {opened} ago", flow.lifecycle)
}

fn show(flow: &FlowInfo, out: &mut Out) -> Result<()> {
    let proof =
        if flow.authenticated { "its right to the name was checked" } else { "its right to the name was not checked" };
    let facts = [
        ("flow", format!("{} (peer's: {}), session {}", flow.flow, flow.peer_flow, flow.session)),
        ("service", format!("{} {}", flow.name, flow.service).trim().to_owned()),
        ("role", flow.role.clone()),
        ("client", if flow.source.is_empty() { "named after its host".into() } else { flow.source.clone() }),
        ("state", state(flow)),
        ("program", format!("{} {} > {}", flow.protocol, flow.app_source, flow.app_destination)),
        (
            "peer",
            if flow.peer.is_empty() {
                "not proved yet".into()
            } else {
                format!("{} {} at {}; {proof}", flow.peer_name, flow.peer, flow.remote).trim_start().to_owned()
            },
        ),
        ("path", format!("{} for {}: {}", flow.path, span(Duration::from_millis(flow.path_since_ms)), flow.path_why)),
        ("stack", stack(flow)),
        ("addresses", addresses(flow)),
        ("policy", policy(flow)),
        ("sent", format!("{} in {}", bytes(flow.sent_bytes), count(flow.sent_packets, "packet"))),
        ("received", format!("{} in {}", bytes(flow.received_bytes), count(flow.received_packets, "packet"))),
    ];
    let evenness = evenness(flow).map(|evenness| ("timing", evenness));
    let chain = flow.chain.as_ref().map(|chain| ("hops", format!("{}; this flow is {}", hops(chain), hop(chain))));
    let lost = lost(flow).map(|lost| ("lost", lost));
    let legs = (!flow.legs.is_empty()).then(|| ("legs", legs(&flow.legs)));
    let changes = (!flow.reconfigurations.is_empty()).then(|| ("boxes", changes_of_boxes(&flow.reconfigurations)));
    let trouble = (!flow.trouble.is_empty()).then(|| ("trouble", flow.trouble.clone()));
    out.facts(
        &facts
            .into_iter()
            .chain(lost)
            .chain(evenness)
            .chain(chain)
            .chain(legs)
            .chain(changes)
            .chain(trouble)
            .collect::<Vec<_>>(),
    )
}

/// What is lost of its datagrams, where that is known.
fn lost(flow: &FlowInfo) -> Option<String> {
    let share = |ppm: Option<u32>, what: &str| Some(format!("{} of what is {what}", percent(ppm?)));
    let ways = [share(flow.lost_sent_ppm, "sent"), share(flow.lost_received_ppm, "received")];
    let known: Vec<String> = ways.into_iter().flatten().collect();
    (!known.is_empty()).then(|| known.join(", "))
}

/// How evenly its datagrams arrive, where that is known.
fn evenness(flow: &FlowInfo) -> Option<String> {
    let jitter = |us: Option<u32>, what: &str| Some(format!("{} jitter of what is {what}", milliseconds(us?)));
    let late = |ppm: Option<u32>, what: &str| Some(format!("{} of what is {what} out of order", percent(ppm?)));
    let all = [
        jitter(flow.jitter_sent_us, "sent"),
        jitter(flow.jitter_received_us, "received"),
        late(flow.reordered_sent_ppm, "sent"),
        late(flow.reordered_received_ppm, "received"),
    ];
    let known: Vec<String> = all.into_iter().flatten().collect();
    (!known.is_empty()).then(|| known.join(", "))
}

pub fn milliseconds(us: u32) -> String {
    format!("{:.1} ms", f64::from(us) / 1e3)
}

pub fn percent(ppm: u32) -> String {
    format!("{:.1} %", f64::from(ppm) / 1e4)
}

/// The last changes of a session's boxes, the oldest first.
fn changes_of_boxes(changes: &[ReconfigurationInfo]) -> String {
    let line = |change: &ReconfigurationInfo| {
        let ago = span(Duration::from_millis(change.ms_ago));
        let boxes = if change.boxes.is_empty() { "no boxes".to_owned() } else { change.boxes.join(", ") };
        let why = if change.outcome == "done" { String::new() } else { format!(": {}", change.why) };
        let what =
            if change.act == "leave" { "the proxy leaves".to_owned() } else { format!("{} to {boxes}", change.act) };
        let took =
            change.took_us.filter(|_| change.outcome == "done").map(|us| format!(" in {:.1} ms", us as f64 / 1e3));
        let by = if change.ordered_by.is_empty() { String::new() } else { format!(" by host {}", change.ordered_by) };
        format!("{ago} ago, {what}{by}: {}{}{why}", change.outcome, took.unwrap_or_default())
    };
    changes.iter().map(line).collect::<Vec<_>>().join("\n  ")
}

/// What a switch of this host knows of the members behind a client's flow.
fn legs(legs: &[LegInfo]) -> String {
    let line = |leg: &LegInfo| {
        let round_trip = leg.round_trip_us.map(|us| format!(", {:.1} ms there and back", us as f64 / 1e3));
        format!(
            "\n  {}: {}, room for {}, {} in flight, {}, {}{}",
            leg.member,
            count(leg.connections.into(), "connection"),
            bytes(leg.window_bytes.into()),
            leg.in_flight,
            count(leg.holes.into(), "hole"),
            match leg.patches {
                1 => "1 patch".to_owned(),
                patches => format!("{patches} patches"),
            },
            round_trip.unwrap_or_default(),
        )
    };
    legs.iter().map(line).collect()
}

/// How it is protected, why, and who demands that.
fn stack(flow: &FlowInfo) -> String {
    let stack = flow.stack.clone().unwrap_or_default();
    format!("{}; {}", super::stack::describe(&stack), super::stack::demanded(&stack))
}

/// Between which addresses it goes, and since when.
fn addresses(flow: &FlowInfo) -> String {
    let local = if flow.local.is_empty() { "?" } else { &flow.local };
    let aside = if flow.aside { ", apart from the other flows with this peer" } else { "" };
    if flow.moves == 0 {
        return format!("{local} > {}{aside}", flow.remote);
    }
    let ago = span(Duration::from_millis(flow.moved_ms_ago));
    format!(
        "{local} > {}{aside}; moved {}, {ago} ago: {}",
        flow.remote,
        count(flow.moves.into(), "time"),
        flow.moved_why
    )
}

/// What it does with several addresses; of a striped flow, what goes by each pair.
fn policy(flow: &FlowInfo) -> String {
    let places = flow.places.iter().map(|place| format!("\n  {}", describe(place)));
    format!("{}{}", flow.policy, places.collect::<String>())
}

/// One place of striped flows.
pub fn describe(place: &PlaceInfo) -> String {
    let carried = bytes(place.sent_bytes + place.received_bytes);
    let (rtt_ms, later_ms) = (place.round_trip_us as f64 / 1e3, place.later_us as f64 / 1e3);
    let weight = if place.weight > 0 { format!("weight {}, ", place.weight) } else { String::new() };
    let stack = if place.stack.is_empty() { String::new() } else { format!("{}, ", place.stack) };
    format!(
        "{} > {}: {}, {stack}{weight}{} % of all, {carried}; {}/s, {rtt_ms:.1} ms there and back, {later_ms:.1} ms \
         later than the quickest",
        place.local,
        place.remote,
        place.state,
        place.share,
        bytes(place.rate),
    )
}

async fn watch(mut client: Client, service: String, json: Json, out: &mut Out) -> Result<()> {
    let mut events = client.flow_watch(FlowWatchRequest { service }).await.map_err(refused)?.into_inner();
    // Who starts something that is to be seen waits for this line.
    eprintln!("margay: watching; what happens from now on is told");
    while let Some(event) = events.message().await.map_err(refused)? {
        if json.json {
            out.json_line(&event)?;
            continue;
        }
        let flow = event.flow.unwrap_or_default();
        let text = match event.kind.as_str() {
            "missed" => format!("… missed: {}", count(event.count, "event")),
            "connect-failed" => {
                format!(
                    "connect-failed  {} {} > {}: {}",
                    label(&flow),
                    flow.app_source,
                    flow.app_destination,
                    event.why
                )
            }
            "closed" => format!(
                "closed  {} {} {} after {}, {} sent, {} received: {}",
                flow.flow,
                label(&flow),
                flow.remote,
                span(Duration::from_millis(flow.age_ms)),
                bytes(flow.sent_bytes),
                bytes(flow.received_bytes),
                event.why
            ),
            kind => format!("{kind}  {} {} {} ({})", flow.flow, label(&flow), flow.remote, flow.role),
        };
        out.line(&text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hops_are_told_from_the_client_to_the_server() {
        let of_box = |name: &str, host_id: &str, host_name: &str, left_out: bool| ChainBox {
            name: name.into(),
            host_id: host_id.into(),
            host_name: host_name.into(),
            left_out,
            ends: false,
            added: false,
        };
        let boxes = vec![
            of_box("fw.shop", "00112233445566778899aabbccddeeff", "box1", false),
            of_box("av.shop", "", "", true),
            of_box("ids.shop", "00112233445566778899aabbccddeeff", "", false),
            of_box("tap.shop", "", "", false),
            ChainBox { added: true, ..of_box("log.shop", "", "box4", false) },
        ];
        let chain = ChainInfo { place: "first".into(), boxes };
        let wanted = "client > fw.shop at box1 > (av.shop left out) > ids.shop at 001122334455 > tap.shop > added \
                      log.shop at box4 > server";
        assert_eq!(hops(&chain), wanted);
        let proxy = ChainBox { ends: true, ..of_box("lb.shop", "", "box3", false) };
        let proxied = ChainInfo { place: "proxy".into(), boxes: vec![proxy] };
        assert_eq!(hops(&proxied), "client > lb.shop at box3");
    }

    #[test]
    fn the_state_says_who_closed_and_how_old_the_flow_is() {
        let of = |lifecycle: &str, closed_by: &str| {
            state(&FlowInfo {
                lifecycle: lifecycle.into(),
                closed_by: closed_by.into(),
                age_ms: 52_000,
                ..FlowInfo::default()
            })
        };
        assert_eq!(of("established", ""), "established, opened 52s ago");
        assert_eq!(of("half-closed", "this"), "half-closed (the program here has closed), opened 52s ago");
        assert_eq!(of("half-closed", "peer"), "half-closed (the peer's program has closed), opened 52s ago");
        let ended = FlowInfo {
            ended_ms_ago: Some(3000),
            ended_by: "elsewhere".into(),
            ended_why: "the name is held by db2 now".into(),
            age_ms: 52_000,
            ..FlowInfo::default()
        };
        assert_eq!(state(&ended), "ended 3s ago (elsewhere), opened 52s ago: the name is held by db2 now");
    }
}
