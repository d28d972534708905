//! What an operator declares of this host as a whole: its rules, what its members may serve, and chains of boxes.

use margay_control::api::v1::*;
use margay_control::quantity::span;
use margay_control::store::StoredRule;
use tonic::Status;

use super::identity::{grant_member, granted};
use super::route::{order_of, refusal};
use super::{blocking, chain, misuse};
use crate::agent::rule_book::RuleChange;
use crate::agent::{Agent, naming};

/// Members of one policy.
const GRANTS_MAX: usize = 10_000;
/// Rules of one policy; the store has as many.
const ROUTES_MAX: usize = 10_000;

pub(super) fn apply(agent: &Agent, request: &PolicyApplyRequest) -> Result<PolicyApplyReply, Status> {
    let routes = request.routes.as_ref().map(|all| &all.routes[..]);
    if request.grants.len() > GRANTS_MAX || routes.is_some_and(|all| all.len() > ROUTES_MAX) {
        return Err(misuse(format!("a policy has {ROUTES_MAX} rules and {GRANTS_MAX} members at most")));
    }
    let ranges = agent.config().ranges();
    // All of it is looked at before any of it is done.
    let order = |route: &RouteAddRequest| {
        order_of(route, ranges).map_err(|status| misuse(format!("the rule for {}: {}", route.name, status.message())))
    };
    let orders = routes.map(|all| all.iter().map(order).collect::<Result<Vec<_>, _>>()).transpose()?;
    let (mut changes, mut grants) = (Vec::new(), Vec::new());
    for grant in &request.grants {
        let (member, wanted) = granted(agent, grant)?;
        if member.grants != wanted {
            let before: Vec<String> = member.grants.iter().map(|grant| naming::prefix(agent, grant)).collect();
            let (name, id) = (&member.host_name, member.host.id());
            let text = format!("{name} ({id}): {} -> {}", listed(&before), listed(&grant.grants));
            changes.push(PolicyChange { act: "change".to_owned(), what: "grant".to_owned(), text });
            grants.push(grant);
        }
    }
    let chains = chain::declared(agent, request)?;
    if let Some(orders) = &orders {
        let declared = blocking(|| agent.routing.rules.declare(orders, &agent.authorities(), request.dry_run));
        changes.splice(0..0, declared.map_err(refusal)?.iter().map(described));
    }
    changes.extend(chains.iter().flat_map(|one| one.changes.clone()));
    let warnings = chain::warnings(agent, &chains);
    if !request.dry_run {
        chain::apply(agent, &chains)?;
        for grant in grants {
            grant_member(agent, grant)?;
        }
        tracing::info!(changes = changes.len(), "a policy was applied by the operator");
    }
    Ok(PolicyApplyReply { changes, warnings })
}

fn listed(grants: &[String]) -> String {
    if grants.is_empty() { "nothing".to_owned() } else { grants.join(" ") }
}

fn described(change: &RuleChange) -> PolicyChange {
    let (act, text) = match change {
        RuleChange::Add(rule) => ("add", written(rule)),
        RuleChange::Amend { before, after } => {
            ("change", format!("rule {}: {} -> {}", before.id.0, written(before), terms(after)))
        }
        RuleChange::Delete(rule) => ("delete", format!("rule {}: {}", rule.id.0, written(rule))),
    };
    PolicyChange { act: act.to_owned(), what: "route".to_owned(), text }
}

/// A rule as one line.
fn written(rule: &StoredRule) -> String {
    let action = match (rule.forward, &rule.resolver) {
        (Some(to), _) => format!("{} {to}", if rule.all { "forward-all" } else { "forward" }),
        (None, Some(resolver)) => format!("delay {resolver}"),
        (None, None) => "drop".to_owned(),
    };
    format!("{} {action}, {}", rule.name, terms(rule))
}

fn terms(rule: &StoredRule) -> String {
    let mut text = format!("priority {}, weight {}", rule.priority, rule.weight);
    for (which, time) in [("idle", rule.idle), ("hard", rule.hard)] {
        text.extend(time.map(|time| format!(", {which} {}", span(time))));
    }
    text
}
