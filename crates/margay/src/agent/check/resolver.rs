//! Resolvers: whether each answers, and whether what is to be written there is.

use futures_util::future::join_all;
use margay_control::resolver::{ResolveError, Resolver, Wanted};
use margay_core::name::Name;

use super::{Finding, Steps};
use crate::agent::Agent;
use margay_control::quantity::count_of;

pub(super) async fn look(agent: &Agent, steps: &mut Steps) {
    let resolvers = agent.routing.rules.resolvers.all();
    let asked = resolvers.iter().map(|resolver| ask(agent, resolver));
    let asked: Vec<Finding> = join_all(asked).await;
    for finding in asked {
        steps.say("resolver", finding).await;
    }
    for resolver in &resolvers {
        let report = agent.routing.rules.resolvers.report(resolver.name());
        if let Some(trouble) = report.and_then(|report| report.trouble) {
            let text = format!("{}: what is registered here cannot be written there: {trouble}", resolver.name());
            let advice = "it is tried again and again; is its server up, and does its key allow the change?";
            steps.say("resolver", Finding::failed(text, advice)).await;
        }
    }
}

/// Asks for the first name that it is configured for, or else for one that nobody has.
async fn ask(agent: &Agent, resolver: &Resolver) -> Finding {
    let config = agent.config();
    let sections = config.resolver.iter().map(|section| section.get_ref());
    let names = sections.filter(|section| section.name == resolver.name()).flat_map(|section| &section.names);
    let name = names.map(|name| &name.0).find(|name| name.is_service() || name.prefix().bits == 256);
    let nobodys = || "check.margay".parse::<Name>().ok();
    let Some(name) = name.cloned().or_else(nobodys) else { return Finding::Ok(resolver.name().to_owned()) };
    let written = Some(name.written().to_owned()).filter(|written| !written.starts_with("sid:"));
    let answer = resolver.ask(&Wanted { service: name.service_id(), written }).await.map(|found| found.places.len());
    judge(resolver, &name, answer)
}

fn judge(resolver: &Resolver, name: &Name, answer: Result<usize, ResolveError>) -> Finding {
    let of = resolver.name();
    if let Some(trouble) = resolver.trouble() {
        return Finding::failed(format!("{of}: {trouble}"), advice(resolver.kind()));
    }
    match answer {
        Ok(instances) => Finding::Ok(format!("{of} answers: {} of {name}", count_of(instances, "instance"))),
        Err(ResolveError::Nobody) => Finding::Ok(format!("{of} answers: nobody serves {name}")),
        Err(ResolveError::Unfit(_)) => Finding::Ok(format!("{of} has no name that it could be asked for")),
        Err(error @ (ResolveError::TimedOut(_) | ResolveError::Failed(_))) => {
            Finding::failed(format!("{of} was asked for {name}: {error}"), advice(resolver.kind()))
        }
    }
}

/// What to look at where a resolver of a kind does not answer.
fn advice(kind: &str) -> &'static str {
    match kind {
        "static" => "is the file there, and can the agent read it? Connections to names that wait for it fail",
        "registry" => "see the step `router`: it is asked over this host's registration with it",
        "dht" => "are its bootstrap nodes up, and do UDP packets pass? Connections to names that wait for it fail",
        _ => "is its server up, and does UDP and TCP port 53 pass? Connections to names that wait for it fail",
    }
}

#[cfg(test)]
mod test {
    use std::time::Duration;

    use margay_control::resolver::file::StaticFile;
    use margay_core::Ranges;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_resolver_that_cannot_answer_is_a_failure_and_one_that_knows_nobody_is_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("names");
        let made = || {
            Resolver::new(
                "hosts".to_owned(),
                Duration::from_secs(1),
                Box::new(StaticFile::new(path.clone(), Ranges::USUAL)),
            )
        };
        let name: Name = "web.shop".parse().expect("a name");
        let wanted = Wanted { service: name.service_id(), written: Some("web.shop".to_owned()) };
        let find = async |resolver: &Resolver| {
            let answer = resolver.ask(&wanted).await.map(|found| found.places.len());
            judge(resolver, &name, answer)
        };
        assert!(matches!(find(&made()).await, Finding::Failed(..)), "there is no such file");
        std::fs::write(&path, "").expect("room");
        assert!(matches!(find(&made()).await, Finding::Ok(..)));
    }
}
