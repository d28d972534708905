//! First packets that are discarded by a rule, and connections that failed of late.

use std::time::Duration;

use margay_core::name::Prefix;
use margay_core::table::Action;

use super::{Finding, Steps};
use crate::agent::Agent;
use crate::agent::api::route::{Found, Known};
use crate::agent::failure::{Failed, KEPT};
use margay_control::quantity;

/// Rules that are told; there may be thousands.
const RULES_MAX: usize = 20;

pub(super) async fn look(agent: &Agent, steps: &mut Steps) {
    rules(agent, steps).await;
    for failed in agent.process.watchers.failures() {
        let known = Known::of(agent, None, Some(&Prefix::from(failed.service)));
        let name = [
            known.name(&Prefix::from(failed.service)),
            agent.names.leases.written(&failed.service).unwrap_or_default(),
        ];
        let name = name.into_iter().find(|name| !name.is_empty()).unwrap_or_else(|| failed.service.to_string());
        steps.say("refused", of_failed(&failed, &name)).await;
    }
}

fn of_failed(failed: &Failed, name: &str) -> Finding {
    let Failed { why, count, last, to, .. } = failed;
    let port = to.port();
    let times = quantity::count(*count, "connection");
    let text = format!(
        "{times} to {name}:{port} failed within the last {}, the last {} ago: {why}",
        quantity::span(KEPT),
        quantity::span(Duration::from_secs(last.elapsed().as_secs()))
    );
    Finding::warning(text, format!("`margay trace {name}:{port}` shows which rule of which host decides now"))
}

async fn rules(agent: &Agent, steps: &mut Steps) {
    let mut found: Vec<Found> = agent.core.0.with_sal(|sal, _| {
        let discards = sal.rules().filter(|(.., rule)| matches!(rule.action, Action::Drop));
        discards.map(|(prefix, id, rule)| Found::of(sal, prefix, id, rule)).take(RULES_MAX + 1).collect()
    });
    let are_more = found.len() > RULES_MAX;
    found.truncate(RULES_MAX);
    let known = Known::of(agent, None, None);
    for rule in &found {
        let info = known.route(rule);
        let name = if info.name.is_empty() { &info.prefix } else { &info.name };
        let what = format!("rule {} of this host discards first packets to {name}", info.id);
        let finding = match info.used_ms_ago {
            None => Finding::Ok(format!("{what}; there were none")),
            Some(ago_ms) => {
                let ago = Duration::from_millis(ago_ms).as_secs();
                let text = format!("{what}: {} so far, the last {ago}s ago", info.packets);
                Finding::warning(text, format!("`margay route delete {}`, if it is not meant", info.id))
            }
        };
        steps.say("rule", finding).await;
    }
    if are_more {
        let text = format!("more than {RULES_MAX} rules discard first packets; `margay route list` shows all");
        steps.say("rule", Finding::Ok(text)).await;
    }
}

#[cfg(test)]
mod test {
    use std::time::Instant;

    use margay_core::name::ServiceId;

    use super::*;

    #[test]
    fn connections_that_failed_are_told_with_their_reason_and_what_to_look_at() {
        let to = ([198, 18, 1, 1], 80).into();
        let failed = Failed {
            service: ServiceId::default(),
            why: "rule 7 discards it".to_owned(),
            count: 2,
            last: Instant::now(),
            to,
        };
        let Finding::Warning(text, advice) = of_failed(&failed, "web.shop") else { panic!("a warning") };
        let wanted = "2 connections to web.shop:80 failed within the last 5m, the last 0s ago: rule 7 discards it";
        assert_eq!(text, wanted);
        assert!(advice.contains("`margay trace web.shop:80`"), "{advice}");
    }
}
