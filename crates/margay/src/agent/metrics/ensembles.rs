//! The switches of ensembles on this host, which are asked at their sockets.

use std::fmt::Error;
use std::path::Path;
use std::time::Duration;

use margay_frames::switch::control::{self, Question};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use serde_json::Value;
use tokio::time::timeout;

/// A switch has so long to answer: who reads metrics waits for it.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);
/// Switches that are asked.
const SWITCHES_MAX: usize = 64;

/// What the switches show whose sockets are below a directory: those that the agent's user, or root, has started.
/// One that does not answer is left out.
pub async fn shown(runtime_dir: &Path) -> Vec<Value> {
    let Ok(entries) = std::fs::read_dir(runtime_dir.join("ensembles")) else { return Vec::new() };
    let mut asked = tokio::task::JoinSet::new();
    for entry in entries.flatten().take(SWITCHES_MAX) {
        asked.spawn(async move { timeout(ANSWER_LIMIT, control::ask(&entry.path(), &Question::Show)).await });
    }
    let mut all: Vec<Value> = asked.join_all().await.into_iter().filter_map(|answer| answer.ok()?.ok()).collect();
    all.sort_by(|a, b| a["name"].as_str().cmp(&b["name"].as_str()));
    all
}

/// A row of a metric: the values of its labels, and the figure.
type Row = (Vec<(&'static str, String)>, u64);

/// Writes them. `None`: each metric with one row, without switches.
pub fn encode(shown: Option<&[Value]>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    for (name, help, kind, rows) in families(shown) {
        let mut descriptor = encoder.encode_descriptor(name, help, None, kind)?;
        for (labels, figure) in rows {
            let metric = descriptor.encode_family(&labels)?;
            match kind {
                MetricType::Counter => ConstCounter::new(figure).encode(metric)?,
                // No figure of a switch is near 2^63.
                _ => ConstGauge::new(i64::try_from(figure).unwrap_or(i64::MAX)).encode(metric)?,
            }
        }
    }
    Ok(())
}

/// Name, help, type and rows of a metric.
type Family = (&'static str, &'static str, MetricType, Vec<Row>);

fn families(shown: Option<&[Value]>) -> Vec<Family> {
    let of_switch =
        |field: &str| rows(shown, &["ensemble"], |switch| vec![(vec![text(&switch["name"])], count(&switch[field]))]);
    let of_member = |figure: fn(&Value) -> u64| {
        rows(shown, &["ensemble", "member"], |switch| {
            let members = switch["members"].as_array().into_iter().flatten();
            members.map(|member| (vec![text(&switch["name"]), text(&member["name"])], figure(member))).collect()
        })
    };
    let mut families = vec![
        (
            "ensemble_connections",
            "Connections of clients with an ensemble by a switch of this host",
            MetricType::Gauge,
            of_switch("connection_count"),
        ),
        (
            "ensemble_connections_failed",
            "Connections of clients with an ensemble that could not go on",
            MetricType::Counter,
            of_switch("failed"),
        ),
        (
            "ensemble_member_up",
            "1: a member of an ensemble answers and takes requests, 0: it does not",
            MetricType::Gauge,
            of_member(|member| u64::from(member["state"] == "up")),
        ),
        (
            "ensemble_member_frames_in_flight",
            "Chunks that a member of an ensemble has not acknowledged",
            MetricType::Gauge,
            of_member(|member| count(&member["frames_in_flight"])),
        ),
        (
            "ensemble_member_holes",
            "Chunks of a member of an ensemble that have not come, though later ones have",
            MetricType::Gauge,
            of_member(|member| count(&member["holes"])),
        ),
        (
            "ensemble_member_errors",
            "Requests that a member of an ensemble has answered with an error of its program",
            MetricType::Counter,
            of_member(|member| count(&member["errors"])),
        ),
        (
            "ensemble_member_requests",
            "Requests that a switch of this host has given to a member",
            MetricType::Counter,
            of_member(|member| count(&member["requests"])),
        ),
        (
            "ensemble_member_answers",
            "Requests that a member has answered by a switch of this host",
            MetricType::Counter,
            of_member(|member| count(&member["answers"])),
        ),
        (
            "ensemble_member_deaths",
            "Times that a member of an ensemble has died",
            MetricType::Counter,
            of_member(|member| count(&member["deaths"])),
        ),
    ];
    families.extend(families_of_modules(shown));
    families
}

fn families_of_modules(shown: Option<&[Value]>) -> [Family; 2] {
    let of_module = |field: &str| {
        rows(shown, &["ensemble", "module"], |switch| {
            let module = Some(&switch["module"]).filter(|module| module.is_object());
            let row = |module: &Value| (vec![text(&switch["name"]), text(&module["hash"])], count(&module[field]));
            module.map(row).into_iter().collect()
        })
    };
    [
        (
            "ensemble_module_calls",
            "Requests that the module of an ensemble's switch was asked about",
            MetricType::Counter,
            of_module("calls"),
        ),
        (
            "ensemble_module_faults",
            "Connections that the module of an ensemble's switch has failed",
            MetricType::Counter,
            of_module("faults"),
        ),
    ]
}

/// All switches' rows of a metric with these labels.
fn rows(shown: Option<&[Value]>, labels: &[&'static str], of: impl Fn(&Value) -> Vec<(Vec<String>, u64)>) -> Vec<Row> {
    let nobody = || vec![(vec![String::new(); labels.len()], 0)];
    let found = shown.map_or_else(nobody, |shown| shown.iter().flat_map(of).collect());
    let labelled = |values: Vec<String>| labels.iter().copied().zip(values).collect();
    found.into_iter().map(|(values, figure)| (labelled(values), figure)).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

#[cfg(test)]
mod test {
    use serde_json::json;

    use super::*;

    #[test]
    fn members_and_the_module_have_figures_of_their_own() {
        let switch = json!({
            "name": "cache.shop", "connection_count": 3, "failed": 1,
            "members": [
                {"name": "m1", "state": "up", "requests": 7, "answers": 6, "deaths": 0, "frames_in_flight": 1},
                {"name": "m2", "state": "dead", "requests": 4, "answers": 4, "deaths": 2, "frames_in_flight": 0},
            ],
            "module": {"hash": "abc", "calls": 11, "faults": 0},
        });
        let found = families(Some(&[switch]));
        let of = |wanted: &str| {
            let (.., rows) = found.iter().find(|(name, ..)| *name == wanted).expect("a family");
            rows.iter()
                .map(|(labels, figure)| (labels.last().expect("a label").1.as_str(), *figure))
                .collect::<Vec<_>>()
        };
        assert_eq!(of("ensemble_connections"), [("cache.shop", 3)]);
        assert_eq!(of("ensemble_member_up"), [("m1", 1), ("m2", 0)]);
        assert_eq!(of("ensemble_member_requests"), [("m1", 7), ("m2", 4)]);
        assert_eq!(of("ensemble_member_deaths"), [("m1", 0), ("m2", 2)]);
        assert_eq!(of("ensemble_module_calls"), [("abc", 11)]);
        let without = families(Some(&[json!({"name": "cache.shop", "members": [], "module": null})]));
        assert!(without.iter().filter(|(name, ..)| name.contains("_m")).all(|(.., rows)| rows.is_empty()));
        assert!(families(None).iter().all(|(.., rows)| rows.len() == 1), "each is in the book");
    }
}
