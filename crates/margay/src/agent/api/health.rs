//! How services are checked, as calls say it, and how it stands with them, as lists show it.

use margay_control::api::v1::*;
use nix::unistd::geteuid;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

use super::misuse;
use crate::agent::Agent;
use crate::agent::health::pressure;
use crate::agent::health::spec::{
    HealthSection, LoadSection, default_fall, default_interval, default_load_interval, default_rise, default_timeout,
    parse_interval, parse_slow_start, parse_streak, parse_timeout,
};
use crate::agent::health::state::Phase;
use crate::agent::service::Published;
use crate::agent::service::checks::Checks;
use crate::listener::Protocol;

/// Whether the caller may have this agent run programs: who the agent itself is, on this host.
pub(super) fn may_command<T>(request: &Request<T>) -> bool {
    let caller = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred.as_ref());
    caller.is_some_and(|caller| caller.uid() == 0 || caller.uid() == geteuid().as_raw())
}

/// What a call wants to be checked of a service that is served over `protocol`.
pub(super) fn checks(
    health: Option<HealthCheck>,
    load: Option<LoadCheck>,
    protocol: Option<Protocol>,
    may_command: bool,
) -> Result<Checks, Status> {
    let checks = Checks {
        health: health.map(health_of).transpose().map_err(misuse)?,
        load: load.map(load_of).transpose().map_err(misuse)?,
    };
    let wrong = |(what, advice): (String, String)| misuse(format!("{what}; {advice}"));
    checks.health.as_ref().map_or(Ok(()), |health| health.check(protocol)).map_err(wrong)?;
    checks.load.as_ref().map_or(Ok(()), LoadSection::check).map_err(wrong)?;
    if checks.load.as_ref().is_some_and(|load| load.cpu) {
        pressure::check_kernel().map_err(Status::failed_precondition)?;
    }
    let commands = checks.load.as_ref().map(|load| &load.command);
    let mut commands = commands.into_iter().chain(checks.health.as_ref().map(|health| &health.command));
    let has_command = commands.any(|command| !command.is_empty());
    if has_command && !may_command {
        return Err(Status::permission_denied(
            "the agent runs commands as root, so that only root of this host may give one; let root do it, or write it \
             into the configuration",
        ));
    }
    Ok(checks)
}

/// A number of milliseconds as the configuration would have it.
fn written(ms: u32) -> String {
    format!("{ms}ms")
}

fn health_of(check: HealthCheck) -> Result<HealthSection, String> {
    let status = (!check.status.is_empty()).then(|| check.status.parse()).transpose()?;
    let rise = check.rise.map(|count| parse_streak(&count.to_string())).transpose()?;
    let fall = check.fall.map(|count| parse_streak(&count.to_string())).transpose()?;
    let interval = check.interval_ms.map(|ms| parse_interval(&written(ms))).transpose()?;
    let timeout = check.timeout_ms.map(|ms| parse_timeout(&written(ms))).transpose()?;
    Ok(HealthSection {
        connect: check.connect,
        http: (!check.http.is_empty()).then_some(check.http),
        status,
        command: check.command,
        interval: interval.unwrap_or(default_interval()),
        timeout: timeout.unwrap_or(default_timeout()),
        rise: rise.unwrap_or(default_rise()),
        fall: fall.unwrap_or(default_fall()),
        slow_start: check.slow_start_ms.map(|ms| parse_slow_start(&written(ms))).transpose()?,
    })
}

fn load_of(check: LoadCheck) -> Result<LoadSection, String> {
    let interval = check.interval_ms.map(|ms| parse_interval(&written(ms))).transpose()?;
    let timeout = check.timeout_ms.map(|ms| parse_timeout(&written(ms))).transpose()?;
    Ok(LoadSection {
        cpu: check.cpu,
        command: check.command,
        interval: interval.unwrap_or(default_load_interval()),
        timeout,
    })
}

/// How it stands with a service; `None` where nothing of it is checked.
pub(super) fn info(agent: &Agent, published: &Published) -> Option<HealthInfo> {
    let report = agent.publishing.health.report(&published.name.prefix())?;
    let sick = published.fitness.sick.as_ref();
    Some(HealthInfo {
        check: report.check,
        // What routers and the service table have been told, which comes a moment after the check.
        state: state(sick.is_some(), report.phase).to_owned(),
        sick_since_unix_s: sick.map(|sick| sick.since_unix_s),
        reason: sick.map(|sick| sick.reason.clone()).unwrap_or_default(),
        last_failure: report.last_failure,
        load_percent: report.load_percent,
        reported_percent: report.reported_percent,
        load_failure: report.load_failure,
    })
}

const fn state(is_out: bool, phase: Phase) -> &'static str {
    match phase {
        _ if is_out => "sick",
        Phase::Well | Phase::Sick => "well",
        Phase::Growing => "growing",
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn check() -> HealthCheck {
        HealthCheck { http: "/healthz".to_owned(), ..HealthCheck::default() }
    }

    #[test]
    fn what_is_left_out_is_as_in_the_configuration() {
        let checks = checks(Some(check()), None, None, false).expect("it is right");
        let configured: HealthSection = toml::from_str("http = \"/healthz\"").expect("read");
        assert_eq!(checks.health, Some(configured));
        assert_eq!(checks.load, None);
    }

    #[test]
    fn what_the_configuration_would_refuse_is_refused() {
        for (health, why) in [
            (HealthCheck { interval_ms: Some(10), ..check() }, "no time from"),
            (HealthCheck { rise: Some(0), ..check() }, "checks in a row"),
            (HealthCheck { status: "ok".to_owned(), ..check() }, "no range"),
            (HealthCheck { connect: true, ..check() }, "2 ways"),
        ] {
            let error = checks(Some(health), None, None, true).expect_err("refused");
            assert!(error.message().contains(why), "{error}");
        }
    }

    #[test]
    fn load_is_asked_of_a_command_or_of_the_kernel() {
        let both = LoadCheck { command: vec!["/bin/true".to_owned()], cpu: true, ..LoadCheck::default() };
        let error = checks(None, Some(both), None, true).expect_err("refused");
        assert!(error.message().contains("one of them is wanted"), "{error}");
        let cpu = LoadCheck { cpu: true, ..LoadCheck::default() };
        let asked = checks(None, Some(cpu), None, false);
        match pressure::check_kernel() {
            Ok(()) => assert!(asked.expect("anybody may ask").load.is_some_and(|load| load.cpu)),
            Err(why) => assert_eq!(asked.expect_err("this kernel does not tell it").message(), why),
        }
    }

    #[test]
    fn commands_are_for_root_alone() {
        let command = vec!["/bin/true".to_owned()];
        let health = HealthCheck { command: command.clone(), ..HealthCheck::default() };
        let load = LoadCheck { command, ..LoadCheck::default() };
        assert!(checks(Some(health.clone()), Some(load.clone()), None, true).is_ok());
        for (health, load) in [(Some(health), None), (None, Some(load))] {
            let error = checks(health, load, None, false).expect_err("refused");
            assert_eq!(error.code(), tonic::Code::PermissionDenied);
        }
    }
}
