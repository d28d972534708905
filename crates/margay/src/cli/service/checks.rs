//! `margay service publish --check-…`: how the agent finds out whether a service is well.

use std::time::Duration;

use clap::Args;
use margay_control::api::v1::{HealthCheck, HealthInfo, LoadCheck, ServiceInfo};

use crate::agent::health::spec::{StatusRange, parse_interval, parse_slow_start, parse_streak, parse_timeout};
use crate::cli::output::lasting;

#[derive(Args)]
pub struct CheckOptions {
    /// The agent connects to each listener; while that fails, the service takes no new connections
    #[arg(long, conflicts_with_all = ["check_http", "check_command"])]
    check_connect: bool,
    /// The agent asks each listener for this path by HTTP; while the answer is none or has another status than wanted,
    /// the service takes no new connections
    #[arg(long, value_name = "PATH", conflicts_with = "check_command")]
    check_http: Option<String>,
    /// With --check-http: statuses that are well, as 200 or 200-299; 200-399 unless given
    #[arg(long, value_name = "STATUS", requires = "check_http", conflicts_with = "check_connect")]
    check_status: Option<StatusRange>,
    /// The agent runs this program, which says by the exit status 0 that all is well. Takes all that follows, up to a
    /// `;`; for root alone
    #[arg(long, value_name = "COMMAND", num_args = 1.., allow_hyphen_values = true, value_terminator = ";")]
    check_command: Vec<String>,
    /// From one check to the next: 1s to 1h; 2s unless given
    #[arg(long, value_name = "TIME", value_parser = parse_interval)]
    check_interval: Option<Duration>,
    /// A check that takes longer has failed: 50ms to 1m; 1s unless given
    #[arg(long, value_name = "TIME", value_parser = parse_timeout)]
    check_timeout: Option<Duration>,
    /// So many checks in a row succeed before a sick service is well; 2 unless given
    #[arg(long, value_name = "NUMBER", value_parser = parse_streak)]
    rise: Option<u32>,
    /// So many checks in a row fail before a service is sick; 3 unless given
    #[arg(long, value_name = "NUMBER", value_parser = parse_streak)]
    fall: Option<u32>,
    /// How long the weight of a service that was sick takes to grow back: up to 1h; at once unless given
    #[arg(long, value_name = "TIME", value_parser = parse_slow_start)]
    slow_start: Option<Duration>,
    /// The agent runs this program, which prints how much of the weight the service keeps: 0 to 100. Takes all that
    /// follows, up to a `;`; for root alone
    #[arg(long, value_name = "COMMAND", num_args = 1.., allow_hyphen_values = true, value_terminator = ";")]
    load_command: Vec<String>,
    /// Instead: how long the program waits for a processor says how much of the weight the service keeps, 10 to 100
    /// percent; by the kernel's pressure of its cgroup
    #[arg(long, conflicts_with = "load_command")]
    load_cpu: bool,
    /// From one question about load to the next: 1s to 1h; 5s unless given. Needs --load-command or --load-cpu
    #[arg(long, value_name = "TIME", value_parser = parse_interval)]
    load_interval: Option<Duration>,
}

/// Bounded by the parsers: an hour at most.
fn ms(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

impl CheckOptions {
    /// What is to be checked. Options that need a check which is not there come to the agent, which refuses them.
    pub fn health(&self) -> Option<HealthCheck> {
        let check = HealthCheck {
            connect: self.check_connect,
            http: self.check_http.clone().unwrap_or_default(),
            status: self.check_status.map(|status| status.to_string()).unwrap_or_default(),
            command: self.check_command.clone(),
            interval_ms: self.check_interval.map(ms),
            timeout_ms: self.check_timeout.map(ms),
            rise: self.rise,
            fall: self.fall,
            slow_start_ms: self.slow_start.map(ms),
        };
        (check != HealthCheck::default()).then_some(check)
    }

    /// How load is asked for. An interval alone comes to the agent, which refuses it.
    pub fn load(&self) -> Option<LoadCheck> {
        let check = LoadCheck {
            command: self.load_command.clone(),
            cpu: self.load_cpu,
            interval_ms: self.load_interval.map(ms),
            timeout_ms: None,
        };
        (check != LoadCheck::default()).then_some(check)
    }
}

/// A weight beside what is left of it.
pub fn weight(service: &ServiceInfo) -> String {
    let ServiceInfo { priority, weight, effective_weight, .. } = service;
    if weight == effective_weight {
        return format!("{priority}/{weight}");
    }
    format!("{priority}/{weight} (now {effective_weight})")
}

/// Why a service takes no new connections: all reasons, as a list of one line; `None`: it does.
pub fn out_of_service(service: &ServiceInfo) -> Option<String> {
    let drained = service.drained.then(|| "drained".to_owned());
    let health = service.health.as_ref();
    let sick = health.filter(|health| health.state == "sick").map(|health| format!("sick: {}", health.reason));
    let reasons: Vec<String> = drained.into_iter().chain(sick).collect();
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

/// What `margay service show` says of checks, a line each.
pub fn lines(health: &HealthInfo) -> Vec<String> {
    let mut lines = Vec::new();
    let state = match (health.state.as_str(), health.sick_since_unix_s) {
        ("sick", Some(since_unix_s)) => format!("sick {}: {}", lasting(since_unix_s), health.reason),
        ("growing", _) => "well again, its weight grows".to_owned(),
        _ if health.last_failure.is_empty() => "well".to_owned(),
        _ => format!("well, but the last check failed: {}", health.last_failure),
    };
    if !health.check.is_empty() {
        lines.push(format!("health: {state} ({})", health.check));
    }
    if let Some(percent) = health.load_percent {
        let failure = &health.load_failure;
        let why = if failure.is_empty() { String::new() } else { format!("; it is not known now: {failure}") };
        let reported = health.reported_percent.map(|reported| format!("; its program reports {reported} %"));
        lines.push(format!("load: {percent} % of the weight is left{why}{}", reported.unwrap_or_default()));
    }
    lines
}

#[cfg(test)]
mod test {
    use clap::Parser;

    use super::*;

    fn service(drained: bool, state: &str) -> ServiceInfo {
        let health = HealthInfo {
            check: "connect, every 2s".to_owned(),
            state: state.to_owned(),
            reason: if state == "sick" { "no answer".to_owned() } else { String::new() },
            ..HealthInfo::default()
        };
        let effective_weight = if drained || state == "sick" { 0 } else { 100 };
        ServiceInfo {
            priority: 7,
            weight: 100,
            effective_weight,
            drained,
            health: Some(health),
            ..ServiceInfo::default()
        }
    }

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        checks: CheckOptions,
        #[arg(long)]
        json: bool,
    }

    fn parse(words: &[&str]) -> Result<Line, clap::Error> {
        Line::try_parse_from(["publish"].iter().chain(words))
    }

    #[test]
    fn a_command_has_all_words_up_to_its_end() {
        let words = ["--check-command", "/bin/check", "-H", "alpha", ";", "--rise", "5", "--json"];
        let line = parse(&words).expect("it is right");
        let health = line.checks.health().expect("a check");
        assert_eq!((health.command, health.rise), (["/bin/check", "-H", "alpha"].map(str::to_owned).into(), Some(5)));
        assert!(line.json && line.checks.load().is_none());
        let line = parse(&["--load-command", "/bin/load"]).expect("it is right");
        assert_eq!(line.checks.load().map(|load| load.command), Some(vec!["/bin/load".to_owned()]));
        assert_eq!(line.checks.health(), None);
        let line = parse(&["--load-cpu", "--load-interval", "10s"]).expect("it is right");
        let cpu = LoadCheck { cpu: true, interval_ms: Some(10_000), ..LoadCheck::default() };
        assert_eq!(line.checks.load(), Some(cpu));
    }

    #[test]
    fn a_check_is_one_and_its_options_belong_to_it() {
        for words in [
            &["--check-connect", "--check-http", "/"][..],
            &["--check-http", "/", "--check-command", "/bin/check"],
            &["--check-connect", "--check-status", "200"],
            &["--check-connect", "--check-interval", "10ms"],
            &["--load-cpu", "--load-command", "/bin/load"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
        assert!(parse(&["--check-http", "/", "--check-status", "200"]).is_ok());
    }

    #[test]
    fn all_reasons_are_said() {
        assert_eq!(out_of_service(&service(false, "well")), None);
        assert_eq!(out_of_service(&service(true, "well")).as_deref(), Some("drained"));
        assert_eq!(out_of_service(&service(false, "sick")).as_deref(), Some("sick: no answer"));
        assert_eq!(out_of_service(&service(true, "sick")).as_deref(), Some("drained; sick: no answer"));
        assert_eq!(weight(&service(false, "well")), "7/100");
        assert_eq!(weight(&service(true, "well")), "7/100 (now 0)");
    }

    #[test]
    fn a_check_that_has_failed_is_said_before_the_service_is_sick() {
        let mut health = service(false, "well").health.expect("it has one");
        assert_eq!(lines(&health), ["health: well (connect, every 2s)"]);
        health.last_failure = "refused".to_owned();
        health.load_percent = Some(40);
        let expected = [
            "health: well, but the last check failed: refused (connect, every 2s)",
            "load: 40 % of the weight is left",
        ];
        assert_eq!(lines(&health), expected);
        health.reported_percent = Some(70);
        assert_eq!(lines(&health)[1], "load: 40 % of the weight is left; its program reports 70 %");
    }
}
