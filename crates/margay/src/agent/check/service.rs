//! What this host serves: its sockets, and what its routers say to it.

use std::time::Duration;

use margay_control::quantity::{count_of, span};
use margay_control::registration::{Phase, RegistrationState};

use super::{Finding, Steps, sockets};
use crate::agent::listening::Origin;
use crate::agent::service::Published;
use crate::agent::service::fitness::Sick;
use crate::agent::{Agent, lookup};

/// What this host serves or would, and whether anything listens for it.
pub(super) async fn look(agent: &Agent, steps: &mut Steps) {
    let (programs, sockets, _) = agent.publishing.active.counts();
    let finding = match agent.publishing.active.why_not() {
        None => Finding::Ok(format!(
            "{} listening; started to serve names: {}",
            count_of(sockets, "socket"),
            count_of(programs, "program")
        )),
        Some(why) => Finding::warning(
            format!("the kernel does not say what listens: {why}"),
            "`margay service publish` and `withdraw` work all the same",
        ),
    };
    steps.say("sockets", finding).await;
    let (names, instances) = agent.kernel.spreads.counts();
    let finding = match agent.kernel.spreads.why_not() {
        None => Finding::Ok(format!(
            "each datagram of an unconnected socket is resolved; programs send to {} with {}",
            count_of(names, "name"),
            count_of(instances, "instance")
        )),
        Some(why) => Finding::warning(
            format!("datagrams of one socket to one name all go to one instance: {why}"),
            "what is connected, and TCP, work all the same; see the step `direct`",
        ),
    };
    steps.say("datagrams", finding).await;
    for waiting in agent.publishing.active.waiting() {
        let what = format!("{} waits for a socket of {}", waiting.name, waiting.program);
        let finding = match waiting.why.as_str() {
            "" => Finding::warning(what, "which ports does the program listen on? `ss -ltnp` shows it"),
            why => Finding::failed(format!("{} has one, and cannot be served", waiting.name), why),
        };
        steps.say("service", finding).await;
    }
    for service in agent.publishing.services.list() {
        registered(agent, steps, &service).await;
        if let Some(sick) = &service.fitness.sick {
            steps.say("service", of_sickness(&service.name.to_string(), sick, agent.host.clock.unix_s())).await;
        }
        for listener in &service.listeners {
            // The kernel has said so; it may be in another network namespace.
            let is_followed = listener.origin == Origin::Socket;
            let found = is_followed || sockets::is_listening(listener.address, listener.protocol);
            let what = format!("{} at {}", service.name, listener.address);
            let finding = if let Err(why) =
                lookup::deliverable(listener.address, &agent.kernel.direct, agent.config().ranges())
            {
                Finding::failed(format!("{what} cannot be reached: {why}"), "see the step `direct`")
            } else if listener.is_reached_by_lookup() && !agent.publishing.services.is_looked_up(listener) {
                Finding::failed(
                    format!("{what} cannot be reached: another service listens on the loopback at the same port"),
                    "let one of the two listen on another port, or on 0.0.0.0",
                )
            } else if found {
                Finding::Ok(format!("{what}: a program listens"))
            } else {
                Finding::warning(
                    format!("{what}: no program listens there"),
                    "start the program, and it is served; or `margay service withdraw` the listener",
                )
            };
            steps.say("service", finding).await;
        }
    }
}

/// What each router of a service says to its registration.
async fn registered(agent: &Agent, steps: &mut Steps, service: &Published) {
    if !service.refused.is_empty() {
        let text = format!("{} is not served: {}", service.name, service.refused);
        steps.say("service", Finding::failed(text, "`margay service show` on this router says who has the name")).await;
    }
    if !service.is_served {
        return;
    }
    for home in agent.publishing.services.homes_of(&service.name) {
        // What is wrong with the router itself is said of it.
        if home.state().phase == Phase::Connected
            && let Some(state) = home.registration(&service.prefix())
            && let Some(finding) = of_registration(&service.name.to_string(), &home.config().router_address, &state)
        {
            steps.say("service", finding).await;
        }
    }
}

fn of_sickness(name: &str, sick: &Sick, now_unix_s: u64) -> Finding {
    let since = span(Duration::from_secs(now_unix_s.saturating_sub(sick.since_unix_s)));
    Finding::failed(
        format!("{name} is sick for {since} and takes no new flows: {}", sick.reason),
        "look at the program that serves it; its weight comes back by itself when its checks succeed",
    )
}

/// `None` where all is well.
fn of_registration(name: &str, router: &str, state: &RegistrationState) -> Option<Finding> {
    match state.state {
        "refused" => Some(Finding::failed(
            format!("{name} is not registered: the router {router} refuses it: {}", state.why),
            format!(
                "where a grant is missing, `margay id member grant HOST {name}` on the router gives it; it is asked \
                 for again by itself"
            ),
        )),
        "registered" => None,
        _ => Some(Finding::waiting(
            format!("{name} is not registered yet: the router {router} has not answered"),
            "look again in a moment",
        )),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_sick_service_is_a_failure_with_its_reason() {
        let sick = Sick { since_unix_s: 1000, reason: "0.0.0.0:80: answers 500, 200-399 is wanted".to_owned() };
        let Finding::Failed(text, _) = of_sickness("web.shop", &sick, 1090) else { panic!("a failure") };
        assert!(text.starts_with("web.shop is sick for 1m 30s") && text.contains("answers 500"), "{text}");
    }

    #[test]
    fn a_refused_registration_is_a_failure_with_the_router_s_reason() {
        let state = |state: &'static str| RegistrationState {
            state,
            why: "this host has no grant for it".to_owned(),
            since_unix_s: 0,
            certificate_expires_unix_s: 0,
        };
        let found = |word| of_registration("web.shop", "10.0.0.1:54324", &state(word));
        let Some(Finding::Failed(text, advice)) = found("refused") else { panic!("a failure") };
        assert!(text.contains("10.0.0.1:54324 refuses it: this host has no grant for it"), "{text}");
        assert!(advice.contains("margay id member grant HOST web.shop"), "{advice}");
        assert!(matches!(found("pending"), Some(Finding::Waiting(..))));
        assert!(found("registered").is_none());
    }
}
