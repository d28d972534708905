//! The scenarios: each builds its lab, does real work with real programs, and gives figures.

mod acl;
mod active_sockets;
mod ad_hoc;
pub(crate) mod af_serval;
mod agent_restart;
mod alrm_hostile;
mod apps;
mod bad_weather;
mod black_hole;
mod both_move;
mod cache_off;
pub(crate) mod chain;
mod cloned_key;
mod containers;
mod datagram_failover;
mod datagram_rate;
mod direct_throughput;
mod drain;
mod drain_moves;
mod encap_throughput;
mod ends;
pub mod ensemble;
mod ensemble_churn;
mod ensemble_shard;
mod exclusive_names;
mod find_router;
mod firewalled;
mod first_datagrams;
mod flooding;
mod flow_memory;
mod full_backlog;
mod grants;
mod half_closed;
mod handover;
mod handover_attacks;
mod handover_weather;
mod hijack;
mod host_death;
mod host_tcp;
mod hostile_packets;
mod interface_balance;
mod interface_failover;
mod intruders;
mod judged;
pub mod late_binding;
mod lookup;
mod many_flows;
mod memcached_partitions;
mod memcached_switch;
mod mixed_versions;
mod model;
mod move_many;
mod moved;
mod multipath;
mod names;
mod narrow_path;
mod nat_first_contact;
mod next_key;
mod nonces;
mod odd_hosts;
mod odd_packets;
mod own_frames;
pub mod pair;
mod patience;
mod primary_failover;
mod quiet_end;
mod real_addresses;
mod rebalance;
mod redis_switch;
mod registration_attacks;
mod registry_scale;
mod remote;
mod renumber;
mod replicated_web;
mod reset_at_once;
mod resolve_script;
mod roam;
mod rolling_restart;
mod round_trips;
mod router_drain;
mod router_ha;
mod router_rate;
mod router_throughput;
pub mod rules;
mod secure_throughput;
mod setup_latency;
mod shed;
mod short_connections;
mod sick_instance;
pub mod site;
mod stack_attacks;
mod stack_lossy;
mod stack_paths;
mod stack_switch;
mod stack_throughput;
mod tampered_host;
mod trace;
mod unrest;
mod up_down;
mod upgrade_in_place;
mod virtual_addresses;
mod wide_area;
mod wrong_inputs;

use std::path::Path;

use anyhow::{Context, Result};

use crate::command::progress;
use crate::host::write_line;
use crate::report::{Bound, Figures, Report};

/// Set to 1 in the environment, scenarios take their full length.
pub const LONG: &str = "MARGAY_LAB_LONG";

/// Names a directory in the environment: scenarios that draw write their pictures there, as `<scenario>.svg`.
pub const PICTURES: &str = "MARGAY_LAB_PICTURES";

/// A scenario.
pub struct Scenario {
    /// Its fixed name.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// What its figures must reach.
    pub bounds: &'static [Bound],
    /// Does it.
    pub run: fn(&Path, &mut Findings) -> Result<()>,
}

/// What a scenario has found so far. What was found before an error is reported too.
#[derive(Default)]
pub struct Findings {
    /// Numbers by name.
    pub figures: Figures,
    /// Sentences.
    pub notes: Vec<String>,
}

impl Findings {
    /// Sets a figure.
    pub fn set(&mut self, name: &str, value: f64) {
        self.figures.set(name, value);
    }

    /// Writes a picture, where pictures are wanted.
    ///
    /// # Errors
    ///
    /// There is no room for it.
    pub fn draw(&self, scenario: &str, svg: &str) -> Result<()> {
        let Some(dir) = std::env::var_os(PICTURES) else { return Ok(()) };
        let path = Path::new(&dir).join(format!("{scenario}.svg"));
        std::fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Says a sentence in the report and on standard error.
    pub fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        progress(&text);
        self.notes.push(text);
    }
}

/// Whether what takes long shall be done at full length: for figures and for `make test-long`.
pub fn is_long() -> bool {
    std::env::var_os(LONG).is_some_and(|value| value == "1")
}

/// All scenarios, in the order in which they are run.
pub const ALL: &[Scenario] = &[
    late_binding::SCENARIO,
    registry_scale::SCENARIO,
    replicated_web::SCENARIO,
    resolve_script::SCENARIO,
    registration_attacks::SCENARIO,
    encap_throughput::SCENARIO,
    nat_first_contact::SCENARIO,
    ad_hoc::SCENARIO,
    find_router::SCENARIO,
    flooding::SCENARIO,
    lookup::SCENARIO,
    acl::SCENARIO,
    next_key::SCENARIO,
    flow_memory::SCENARIO,
    odd_hosts::SCENARIO,
    up_down::SCENARIO,
    wrong_inputs::SCENARIO,
    hostile_packets::SCENARIO,
    virtual_addresses::SCENARIO,
    real_addresses::SCENARIO,
    containers::SCENARIO,
    direct_throughput::SCENARIO,
    round_trips::SCENARIO,
    firewalled::SCENARIO,
    agent_restart::SCENARIO,
    setup_latency::SCENARIO,
    grants::SCENARIO,
    short_connections::SCENARIO,
    cache_off::SCENARIO,
    many_flows::SCENARIO,
    odd_packets::SCENARIO,
    host_death::SCENARIO,
    apps::SCENARIO,
    active_sockets::SCENARIO,
    memcached_partitions::SCENARIO,
    ensemble_churn::SCENARIO,
    ensemble_shard::SCENARIO,
    own_frames::SCENARIO,
    redis_switch::SCENARIO,
    memcached_switch::SCENARIO,
    alrm_hostile::SCENARIO,
    exclusive_names::SCENARIO,
    drain::SCENARIO,
    drain_moves::SCENARIO,
    router_drain::SCENARIO,
    rebalance::SCENARIO,
    quiet_end::SCENARIO,
    reset_at_once::SCENARIO,
    primary_failover::SCENARIO,
    rolling_restart::SCENARIO,
    shed::SCENARIO,
    sick_instance::SCENARIO,
    datagram_failover::SCENARIO,
    patience::SCENARIO,
    upgrade_in_place::SCENARIO,
    mixed_versions::SCENARIO,
    chain::setup::SCENARIO,
    chain::boxes::SCENARIO,
    chain::policy::SCENARIO,
    chain::attacks::SCENARIO,
    chain::insert_remove::SCENARIO,
    chain::ends::SCENARIO,
    chain::contention::SCENARIO,
    chain::orders::SCENARIO,
    chain::weather::SCENARIO,
    chain::nat::SCENARIO,
    chain::leaving::REMOVAL,
    chain::leaving::OFFSET,
    chain::leaving_boxes::SCENARIO,
    chain::proxy_boxes::SCENARIO,
    chain::disruption::SCENARIO,
    chain::leaving::RESTART,
    handover::SCENARIO,
    handover_attacks::SCENARIO,
    handover_weather::SCENARIO,
    datagram_rate::SCENARIO,
    narrow_path::SCENARIO,
    host_tcp::SCENARIO,
    full_backlog::SCENARIO,
    judged::SCENARIO,
    tampered_host::SCENARIO,
    names::SCENARIO,
    af_serval::SCENARIO,
    secure_throughput::SCENARIO,
    stack_attacks::SCENARIO,
    stack_lossy::SCENARIO,
    stack_paths::SCENARIO,
    stack_switch::SCENARIO,
    stack_throughput::SCENARIO,
    rules::SCENARIO,
    first_datagrams::SCENARIO,
    interface_failover::SCENARIO,
    remote::SCENARIO,
    renumber::SCENARIO,
    roam::SCENARIO,
    unrest::SCENARIO,
    black_hole::SCENARIO,
    interface_balance::SCENARIO,
    move_many::SCENARIO,
    both_move::SCENARIO,
    multipath::SCENARIO,
    hijack::SCENARIO,
    intruders::SCENARIO,
    cloned_key::SCENARIO,
    half_closed::SCENARIO,
    model::SCENARIO,
    nonces::SCENARIO,
    bad_weather::SCENARIO,
    trace::SCENARIO,
    router_ha::SCENARIO,
    wide_area::SCENARIO,
    router_rate::SCENARIO,
    router_throughput::SCENARIO,
];

/// The scenario of this name.
///
/// # Errors
///
/// There is none; the message names those that there are.
pub fn find(name: &str) -> Result<&'static Scenario> {
    ALL.iter().find(|scenario| scenario.name == name).ok_or_else(|| {
        let names: Vec<_> = ALL.iter().map(|scenario| scenario.name).collect();
        anyhow::anyhow!("there is no scenario \"{name}\"; there are: {}", names.join(", "))
    })
}

/// Runs a scenario in the lab's namespaces and prints its report as JSON. Returns the exit status.
///
/// # Errors
///
/// The report cannot be printed.
pub fn work(name: &str, dir: &Path) -> Result<u8> {
    let scenario = find(name)?;
    let mut findings = Findings::default();
    let result = (scenario.run)(dir, &mut findings);
    if let Err(error) = &result {
        findings.note(format!("{error:#}"));
        findings.figures.add("failed", 1.0);
    }
    let mut report = Report::judge(name, findings.figures, &findings.notes, scenario.bounds);
    report.pass &= result.is_ok();
    write_line(&serde_json::to_string(&report)?)?;
    Ok(u8::from(!report.pass))
}
