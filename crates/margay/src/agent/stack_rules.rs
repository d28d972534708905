//! The rules by which flows are carried plain or sealed: the core decides, and this has the clock.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use margay_core::stack_rule::{JUDGE_EVERY, LocalPlace};
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval};

use super::Agent;
use super::flow_programs::Finder;
use crate::config::Config;
use crate::host::Placed;

/// What the look at the rules costs.
#[derive(Default)]
pub struct Judging {
    time_us: AtomicU64,
    rules_changed: Notify,
}

impl Judging {
    /// Other rules are in the core.
    pub fn note_rules(&self) {
        self.rules_changed.notify_one();
    }

    /// A look, whose time counts.
    fn count(&self, look: impl FnOnce()) {
        let begin = Instant::now();
        look();
        let time_us = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.time_us.fetch_add(time_us, Ordering::Relaxed);
    }

    /// Seconds that looks have taken since the start, waits for the core's lock included.
    pub fn seconds(&self) -> f64 {
        Duration::from_micros(self.time_us.load(Ordering::Relaxed)).as_secs_f64()
    }
}

/// Goes on until it is aborted.
pub async fn follow(agent: Arc<Agent>) {
    let mut finder = Finder::default();
    let mut rounds = interval(JUDGE_EVERY);
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        // Nobody is woken four times a second for nothing.
        while !agent.core.0.with_sal(|sal, _| sal.has_stack_rules()) {
            agent.process.watchers.judging().rules_changed.notified().await;
        }
        rounds.tick().await;
        tokio::task::block_in_place(|| {
            agent.process.watchers.judging().count(|| finder.look(&agent));
            judge(&agent);
        });
    }
}

/// Looks at the rules now.
pub fn judge(agent: &Agent) {
    agent.process.watchers.judging().count(|| judge_now(agent));
}

fn judge_now(agent: &Agent) {
    let core = &agent.core.0;
    let measured = core.with_sal(|sal, now| sal.flows_to_measure(now));
    let carried: Vec<_> = measured
        .into_iter()
        .filter_map(|flow| {
            let counters = core.flow_counters(flow)?;
            Some((flow, counters.egress_bytes + counters.ingress_bytes))
        })
        .collect();
    core.with_sal(|sal, now| {
        carried.into_iter().for_each(|(flow, bytes)| sal.note_carried(now, flow, bytes));
        sal.judge_stacks(now);
    });
}

/// What rules say of this host's addresses.
pub fn places(placed: &[Placed]) -> Vec<LocalPlace> {
    let place = |one: &Placed| LocalPlace {
        address: one.address,
        prefix: one.block(),
        interface: one.interface.clone(),
        is_wireless: is_wireless(&one.interface),
    };
    placed.iter().map(place).collect()
}

/// Whether the kernel knows a radio behind an interface.
fn is_wireless(interface: &str) -> bool {
    ["wireless", "phy80211"].iter().any(|entry| Path::new("/sys/class/net").join(interface).join(entry).exists())
}

/// What lists call this host, which `host.name` of a condition says.
pub fn host_name(config: &Config) -> String {
    let of_kernel = || nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
    config.host.name.clone().unwrap_or_else(of_kernel)
}
