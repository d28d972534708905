//! What scenarios of ensembles ask a switch, and what they count of a load that checks its answers.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Findings;
use crate::agent;
use crate::host::Host;
use crate::program::wait_for;
use crate::report::{median, percentile};
use crate::traffic::Cached;

const LIMIT: Duration = Duration::from_secs(30);
/// What is asked so long after a death may have waited for its discovery.
const AFTER_DEATH_MS: f64 = 2000.0;

/// What the switch of a name shows.
pub fn shown(switch: &Host, name: &str) -> Result<Value> {
    let text = agent::margay(switch, ["ensemble", "show", name, "--json"])?;
    serde_json::from_str(&text).context("the switch shows no JSON")
}

fn state_of(shown: &Value, host: &str) -> String {
    let mut members = shown["members"].as_array().into_iter().flatten();
    let found = members.find(|member| member["name"] == host);
    found.and_then(|member| member["state"].as_str()).unwrap_or("absent").to_owned()
}

/// Waits until so many members are up, and part of every connection.
pub fn await_members(switch: &Host, name: &str, count: usize) -> Result<()> {
    wait_for("members", LIMIT, || {
        let shown = shown(switch, name)?;
        let members = shown["members"].as_array().cloned().unwrap_or_default();
        let is_whole =
            |member: &&Value| member["state"] == "up" && member["connection_count"] == shown["connection_count"];
        ensure!(members.iter().filter(is_whole).count() == count, "they are {members:?}");
        Ok(())
    })
}

/// Waits until a member is not up any more.
pub fn await_out(switch: &Host, name: &str, host: &str) -> Result<()> {
    wait_for(&format!("{host} is out"), LIMIT, || {
        let state = state_of(&shown(switch, name)?, host);
        ensure!(state != "up", "it is {state}");
        Ok(())
    })
}

/// Waits until a switch has counted so many deaths. A member that died is out as soon as it is listed no more: whether
/// it died is known when its flow has ended, or it has been silent for long enough.
pub fn await_deaths(switch: &Host, name: &str, count: u64) -> Result<()> {
    wait_for("deaths", LIMIT, || {
        let deaths = shown(switch, name)?["member_deaths"].as_u64().unwrap_or_default();
        ensure!(deaths >= count, "of {count} there are {deaths}");
        Ok(())
    })
}

/// Sums up a load of so many connections. `deaths_ms`: when members died.
pub fn judge(slots: &[Cached], connections: u32, deaths_ms: &[f64], findings: &mut Findings) {
    let sum = |of: fn(&Cached) -> u64| slots.iter().map(of).sum::<u64>() as f64;
    findings.set("answers", sum(|slot| slot.answered));
    findings.set("lost", sum(|slot| slot.lost));
    findings.set("duplicated", sum(|slot| slot.duplicated));
    findings.set("wrong_answers", sum(|slot| slot.wrong));
    findings.set("connections_ended", sum(|slot| slot.closed));
    findings.set("refused_safe", sum(|slot| slot.refused_safe));
    findings.set("refused_unsafe", sum(|slot| slot.refused_unsafe));
    let is_after_death =
        |at_ms: f64| deaths_ms.iter().any(|death_ms| (0.0..AFTER_DEATH_MS).contains(&(at_ms - death_ms)));
    let strange = slots.iter().filter(|slot| !is_after_death(slot.at_ms)).map(|slot| slot.refused_unsafe).sum::<u64>();
    findings.set("refused_without_a_death", strange as f64);
    let waits_ms = waits_after(slots, connections, deaths_ms);
    findings.set("recover_ms_p99", percentile(&waits_ms, 99.0));
    findings.set("recover_ms", median(&waits_ms));
    for error in slots.iter().flat_map(|slot| &slot.errors).take(8) {
        findings.note(error.clone());
    }
}

/// The longest wait of each connection for an answer, for each death; none is a wait of no time.
fn waits_after(slots: &[Cached], connections: u32, deaths_ms: &[f64]) -> Vec<f64> {
    let mut waits_ms = Vec::new();
    for death_ms in deaths_ms {
        for connection in 0..connections {
            let of_connection = slots.iter().flat_map(|slot| &slot.slow).filter(|slow| slow.connection == connection);
            let near = of_connection
                .filter(|slow| slow.begun_ms + slow.took_ms > *death_ms && slow.begun_ms < death_ms + AFTER_DEATH_MS);
            waits_ms.push(near.map(|slow| slow.took_ms).fold(0.0, f64::max));
        }
    }
    waits_ms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::Slow;

    #[test]
    fn a_wait_counts_for_the_death_that_it_is_near() {
        let slow = |connection, begun_ms, took_ms| Slow { connection, begun_ms, took_ms };
        let slots = [Cached {
            slow: vec![slow(0, 900.0, 300.0), slow(0, 2000.0, 50.0), slow(1, 100.0, 20.0), slow(1, 9000.0, 700.0)],
            ..Cached::default()
        }];
        let waits = waits_after(&slots, 16, &[1000.0]);
        assert_eq!(waits.len(), 16);
        assert_eq!(waits[..3], [300.0, 0.0, 0.0]);
    }
}
