//! `margay stack`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use margay_control::api::v1::*;
use margay_control::quantity::count_of;
use miette::{IntoDiagnostic, Result, WrapErr};

use super::flow::{label, peer};
use super::output::span;
use super::{Client, Json, Out, refused};
use crate::config::Config;
use crate::listener::ServiceName;

#[derive(Subcommand)]
pub enum StackVerb {
    /// How the flows of this host are carried, oldest first
    List {
        /// Only flows of this name
        name: Option<ServiceName>,
        /// At most so many
        #[arg(long, value_name = "NUMBER", default_value_t = 100)]
        limit: u32,
        #[command(flatten)]
        json: Json,
    },
    /// How one flow is carried, why, and what has become of its last changes
    Show {
        /// The flow, as `list` shows it
        flow: String,
        #[command(flatten)]
        json: Json,
    },
    /// Have a live flow carried in this way, until that is released
    Set {
        /// The flow, as `list` shows it
        flow: String,
        /// In which way
        stack: StackWord,
        #[command(flatten)]
        json: Json,
    },
    /// Take an order back: the flow is carried as the configurations of the two hosts want it
    Release {
        /// The flow, as `list` shows it
        flow: String,
        #[command(flatten)]
        json: Json,
    },
    /// The rules by which flows are carried plain or sealed, the first to decide first
    Rules {
        #[command(subcommand)]
        verb: Option<RulesVerb>,
        #[command(flatten)]
        json: Json,
    },
}

#[derive(Subcommand)]
pub enum RulesVerb {
    /// Read the rules of a configuration file, and say what is wrong with them; no agent is asked
    Check {
        /// The file: a whole configuration, or [[stack_rule]] sections alone
        file: PathBuf,
        #[command(flatten)]
        json: Json,
    },
}

/// A stack, as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum StackWord {
    /// Encapsulated, and direct where that can be
    Plain,
    /// Flows of datagrams: what the network loses is repaired; a flow that is sealed stays so
    Fec,
    /// Flows of datagrams: what the network loses is sent again, for a quarter of a second; a flow that is sealed stays
    /// so
    Sctp,
    /// Sealed
    Secure,
    /// Flows of datagrams: sealed, and what the network loses is repaired
    SecureFec,
    /// Flows of datagrams: sealed, and what the network loses is sent again
    SecureSctp,
}

impl std::fmt::Display for StackWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Fec => "fec",
            Self::Sctp => "sctp",
            Self::Secure => "secure",
            Self::SecureFec => "secure-fec",
            Self::SecureSctp => "secure-sctp",
        })
    }
}

pub async fn stack(connect: impl AsyncFnOnce() -> Result<Client>, verb: StackVerb, out: &mut Out) -> Result<()> {
    if let StackVerb::Rules { verb: Some(RulesVerb::Check { file, json }), .. } = &verb {
        return check(file, *json, out);
    }
    let mut client = connect().await?;
    match verb {
        StackVerb::Rules { json, .. } => {
            let reply = client.stack_rule_list(StackRuleListRequest {}).await.map_err(refused)?.into_inner();
            if json.json { out.json(&reply) } else { rules(&reply.rules, out) }
        }
        StackVerb::List { name, limit, json } => {
            let service = name.map(|name| name.to_string()).unwrap_or_default();
            let request = FlowListRequest { service, limit, failed: false };
            let reply = client.flow_list(request).await.map_err(refused)?.into_inner();
            if json.json { out.json(&reply) } else { table(&reply.flows, out) }
        }
        StackVerb::Show { flow, json } => {
            let reply = client.flow_show(FlowShowRequest { flow }).await.map_err(refused)?.into_inner();
            if json.json { out.json(&reply) } else { show(&reply, out) }
        }
        StackVerb::Set { flow, stack, json } => {
            let request = StackSetRequest { flow: flow.clone(), stack: stack.to_string() };
            let reply = client.stack_set(request).await.map_err(refused)?.into_inner();
            // `fec` or `sctp` of a flow that is sealed is more than that.
            let now = reply.stack.as_ref().map_or_else(|| stack.to_string(), |stack| stack.stack.clone());
            let sentence = format!("{flow} is carried {now} until `margay stack release {flow}`");
            out.done(json.json, &reply, &sentence)
        }
        StackVerb::Release { flow, json } => {
            let request = StackReleaseRequest { flow: flow.clone() };
            let reply = client.stack_release(request).await.map_err(refused)?.into_inner();
            let now = reply.stack.as_ref().map(|stack| stack.stack.clone()).unwrap_or_default();
            let sentence = format!("the order for {flow} holds no longer; the flow is carried {now}");
            out.done(json.json, &reply, &sentence)
        }
    }
}

/// The rules of a file.
fn check(file: &Path, json: Json, out: &mut Out) -> Result<()> {
    let text = std::fs::read_to_string(file).into_diagnostic();
    let text = text.wrap_err_with(|| format!("cannot read {}", file.display()))?;
    let config = Config::parse(&text, file)?;
    let found = config.stack_rules("");
    let sections = config.stack_rule.iter().map(toml::Spanned::get_ref);
    let info = |rule: &margay_core::stack_rule::StackRule| {
        let section = sections.clone().nth(usize::from(rule.number) - 1);
        StackRuleInfo {
            number: rule.number.into(),
            names: section.map(|one| one.names.iter().map(ToString::to_string).collect()).unwrap_or_default(),
            when: rule.text.clone(),
            r#use: rule.uses.label().to_owned(),
            hold_s: section.map_or(0, |section| section.hold_s),
            release_s: section.map_or(0, |section| section.release_s),
            priority: rule.priority,
            floor: rule.is_floor,
            ..StackRuleInfo::default()
        }
    };
    let reply = StackRuleListReply { rules: found.iter().map(info).collect() };
    let sentence = match reply.rules.len() {
        0 => format!("{} has no [[stack_rule]]", file.display()),
        number => format!("{}, and nothing is wrong", count_of(number, "rule")),
    };
    out.done(json.json, &reply, &sentence)
}

/// Rules, one per row.
fn rules(rules: &[StackRuleInfo], out: &mut Out) -> Result<()> {
    let rows = rules.iter().map(|rule| {
        vec![
            rule.number.to_string(),
            rule.names.join(" "),
            rule.when.clone(),
            if rule.floor { format!("{} (floor)", rule.r#use) } else { rule.r#use.clone() },
            rule.priority.to_string(),
            rule.flows.to_string(),
            rule.in_force.to_string(),
            rule.failing.to_string(),
        ]
    });
    let heads = ["RULE", "NAMES", "WHEN", "USE", "PRIORITY", "FLOWS", "IN FORCE", "FAILING"];
    out.table(&heads, rows.collect(), "no rules; [[stack_rule]] in the configuration makes them")
}

/// Flows, one per row.
fn table(flows: &[FlowInfo], out: &mut Out) -> Result<()> {
    let rows = flows.iter().map(|flow| {
        let stack = flow.stack.clone().unwrap_or_default();
        vec![
            flow.flow.clone(),
            label(flow),
            peer(flow),
            stack.stack.clone(),
            flow.path.clone(),
            span(Duration::from_millis(stack.since_ms)),
            because(&stack),
        ]
    });
    out.table(&["FLOW", "SERVICE", "PEER", "STACK", "PATH", "SINCE", "WHY"], rows.collect(), "no flows")
}

fn show(flow: &FlowInfo, out: &mut Out) -> Result<()> {
    let stack = flow.stack.clone().unwrap_or_default();
    let facts = [
        ("flow", format!("{} of {} with {}", flow.flow, label(flow), peer(flow))),
        ("stack", describe(&stack)),
        ("path", format!("{} for {}: {}", flow.path, span(Duration::from_millis(flow.path_since_ms)), flow.path_why)),
        ("demanded", demanded(&stack).to_owned()),
        ("rules", rules_of(&stack)),
        ("facts", facts_of(&stack)),
        ("changes", changes(&stack)),
    ];
    out.facts(&facts)
}

/// The stack, since when, and why.
pub fn describe(stack: &FlowStack) -> String {
    let since = span(Duration::from_millis(stack.since_ms));
    let changing = match stack.changing_to.as_str() {
        "" => String::new(),
        to => format!("; changing to {to} now"),
    };
    format!("{} for {since}: {}{changing}", stack.stack, because(stack))
}

/// What rules make of a flow, the first to decide first.
fn rules_of(stack: &FlowStack) -> String {
    let time = |ms: u64| span(Duration::from_millis(ms));
    let line = |rule: &FlowRule| {
        let floor = if rule.floor { ", a floor" } else { "" };
        let state = match (rule.in_force, rule.holds, rule.failure.as_str()) {
            (in_force, _, failure) if !failure.is_empty() => {
                format!("{}fails, which counts as false: {failure}", if in_force { "in force still; " } else { "" })
            }
            (true, true, _) => "in force".to_owned(),
            (true, false, _) => format!("over for {} of {}", time(rule.since_ms), time(rule.waits_ms)),
            (false, true, _) => format!("holds for {} of {}", time(rule.since_ms), time(rule.waits_ms)),
            (false, false, _) => "does not hold".to_owned(),
        };
        format!("{} ({}{floor}) {}: {state}", rule.number, rule.r#use, rule.when)
    };
    let mut lines: Vec<String> = stack.rules.iter().map(line).collect();
    if !stack.order.is_empty() && !stack.rules.is_empty() {
        lines.push("an order holds: until it is released only a floor has a say".to_owned());
    }
    if !stack.blocked.is_empty() {
        lines.push(format!("rejected: {}; tried again in {}", stack.blocked, time(stack.blocked_ms)));
    }
    if stack.waits_for_seal {
        lines.push("nothing of the flow is sent until it is sealed".to_owned());
    }
    lines.join("\n  ")
}

/// What the rules see.
fn facts_of(stack: &FlowStack) -> String {
    let fact = |fact: &FlowFact| format!("{} = {}", fact.name, fact.value);
    stack.facts.iter().map(fact).collect::<Vec<_>>().join(", ")
}

/// Why a flow has its stack.
fn because(stack: &FlowStack) -> String {
    let floor = stack.rules.iter().find(|rule| rule.floor && rule.in_force);
    match (floor, stack.stack.as_str()) {
        (Some(floor), "secure") => format!("rule {} demands it", floor.number),
        (Some(floor), "secure-fec") => format!("{}; rule {} demands the seal", asked(stack), floor.number),
        _ => asked(stack),
    }
}

/// Who has asked for a flow's stack, rules that demand apart.
fn asked(stack: &FlowStack) -> String {
    let last = stack.changes.iter().rev().find(|change| change.outcome == "done");
    match (stack.order.as_str(), last.map(|change| change.cause.as_str())) {
        ("", Some("rule")) => format!("rule {} wants it", last.map_or(0, |change| change.rule)),
        ("", Some("rule-ended")) => format!("rule {} has no say any more", last.map_or(0, |change| change.rule)),
        ("", Some("peer")) => "the peer wanted it".into(),
        ("", Some("settled")) => "the two ends had different stacks, and took the same".into(),
        ("", Some(_)) => "an order was released".into(),
        ("", None) if stack.stack == "secure" => "sealed from its set-up on".into(),
        ("", None) => "nobody asked for more".into(),
        _ => format!("ordered {} ago", span(Duration::from_millis(stack.order_ms_ago))),
    }
}

/// Who demands that a flow is sealed.
pub fn demanded(stack: &FlowStack) -> &'static str {
    match (stack.demanded_here || stack.demanded_by_rule, stack.demanded_by_peer) {
        (true, false) if !stack.demanded_here => "a rule of this host demands `secure`: the flow gets no less",
        (true, true) => "both ends demand `secure`: the flow gets no less",
        (true, false) => "this host's configuration demands `secure`: the flow gets no less",
        (false, true) => "the peer demands `secure`: the flow gets no less",
        (false, false) => "nobody demands `secure`",
    }
}

/// The last changes, the oldest first.
fn changes(stack: &FlowStack) -> String {
    if stack.changes.is_empty() {
        return "none".into();
    }
    let line = |change: &FlowStackChange| {
        let ago = span(Duration::from_millis(change.ms_ago));
        let why = if change.why == change.outcome { String::new() } else { format!(": {}", change.why) };
        let cause = if change.rule == 0 { change.cause.clone() } else { format!("{} {}", change.cause, change.rule) };
        format!("{ago} ago, {} to {} ({cause}): {}{why}", change.from, change.to, change.outcome)
    };
    stack.changes.iter().map(line).collect::<Vec<_>>().join("\n  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(outcome: &str, cause: &str) -> FlowStackChange {
        FlowStackChange {
            ms_ago: 3000,
            from: "plain".into(),
            to: "secure".into(),
            cause: cause.into(),
            outcome: outcome.into(),
            why: if outcome == "done" { outcome } else { "the peer is silent" }.into(),
            rule: 0,
        }
    }

    #[test]
    fn the_reason_for_a_stack_is_said() {
        let stack = |stack: &str, order: &str, changes: Vec<FlowStackChange>| FlowStack {
            stack: stack.into(),
            order: order.into(),
            order_ms_ago: 2000,
            changes,
            ..FlowStack::default()
        };
        assert_eq!(because(&stack("plain", "", Vec::new())), "nobody asked for more");
        assert_eq!(because(&stack("secure", "", Vec::new())), "sealed from its set-up on");
        assert_eq!(because(&stack("secure", "secure", vec![change("done", "order")])), "ordered 2s ago");
        let repaired = FlowStackChange { rule: 2, ..change("done", "rule") };
        let floor = FlowRule { number: 1, floor: true, in_force: true, ..FlowRule::default() };
        let both = FlowStack { rules: vec![floor], ..stack("secure-fec", "", vec![repaired]) };
        assert_eq!(because(&both), "rule 2 wants it; rule 1 demands the seal");
        let refused = vec![change("done", "peer"), change("refused", "order")];
        assert_eq!(because(&stack("secure", "", refused.clone())), "the peer wanted it");
        let lines = changes(&stack("secure", "", refused));
        assert_eq!(
            lines,
            "3s ago, plain to secure (peer): done\n  3s ago, plain to secure (order): refused: the peer is silent"
        );
    }
}
