//! What agents and kernels hold for flows, and what of it is left when the flows are gone.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use margay_datapath::kernel::HOST_MAP_SIZES;
use serde_json::Value;

use crate::agent;
use crate::command::progress;
use crate::host::Host;
use crate::observe::{self, BpfMap};
use crate::program::wait_for;
use crate::scenario::Findings;

/// Pairs of ports rest for a minute after their flow.
const LIMIT: Duration = Duration::from_secs(90);

/// What agents and kernels hold for flows.
#[derive(Clone, Debug)]
pub struct Entries {
    flows: Vec<Value>,
    maps: Vec<BTreeMap<u32, BpfMap>>,
}

impl Entries {
    fn now(hosts: &[&Host]) -> Result<Self> {
        let mut entries = Self { flows: Vec::new(), maps: Vec::new() };
        for host in hosts {
            entries.flows.extend(agent::flows(host)?);
            entries.maps.push(observe::bpf_maps(agent::pid(host)?)?);
        }
        Ok(entries)
    }

    /// When all flows are gone.
    ///
    /// # Errors
    ///
    /// They do not go, or no agent runs on a host.
    pub fn settled(hosts: &[&Host]) -> Result<Self> {
        wait_for("the end of all flows", LIMIT, || {
            let entries = Self::now(hosts)?;
            if entries.flows.is_empty() { Ok(entries) } else { bail!("there are {}", entries.flows.len()) }
        })
    }

    /// How many more than these: flows that agents list, and entries of maps that are still the same ones.
    fn more_than(&self, before: &Self) -> f64 {
        let flows = self.flows.len() as f64 - before.flows.len() as f64;
        (flows + self.growth(before).map(|(_, entries)| entries).sum::<f64>()).max(0.0)
    }

    /// By how many entries each hash has grown. What is there for each other host may come with the first connection
    /// to go direct, and goes when two hosts meet anew: so many are no growth.
    fn growth(&self, before: &Self) -> impl Iterator<Item = (BpfMap, f64)> {
        let hosts = self.maps.iter().zip(&before.maps);
        // And the router.
        let others = self.maps.len() as f64;
        hosts.flat_map(move |(now, then)| {
            now.iter().filter_map(move |(id, map)| {
                let entries = ((map.bytes - then.get(id)?.bytes) / map.entry_bytes?).round();
                let allowed = if is_of_hosts(map) { others } else { 0.0 };
                Some((*map, (entries - allowed).max(0.0)))
            })
        })
    }

    /// What there is more than then, for somebody who looks for its cause.
    fn remains(&self, before: &Self) -> String {
        let flows = self.flows.iter().map(Value::to_string);
        let maps = self.growth(before).filter(|(_, entries)| *entries > 0.0);
        let maps = maps.map(|(BpfMap { sizes: (key, value), .. }, entries)| {
            format!("a map with keys of {key} bytes and values of {value} has {entries} entries more")
        });
        flows.chain(maps).collect::<Vec<_>>().join("\n")
    }

    /// How many hashes each host still has of then, at the least.
    fn kept_since(&self, before: &Self) -> f64 {
        let hosts = self.maps.iter().zip(&before.maps);
        let kept = hosts.map(|(now, then)| {
            then.iter().filter(|(id, map)| map.entry_bytes.is_some() && now.contains_key(id)).count()
        });
        kept.min().unwrap_or_default() as f64
    }
}

fn is_of_hosts(map: &BpfMap) -> bool {
    HOST_MAP_SIZES.contains(&(map.sizes.0 as usize, map.sizes.1 as usize))
}

/// Flows that these hosts still have after so long, each of which is told; fewer, and sooner, when they go before.
///
/// # Errors
///
/// No agent runs on a host.
pub fn flows_left(hosts: &[&Host], limit: Duration) -> Result<f64> {
    let list = || hosts.iter().map(|host| Ok((host.name(), agent::flows(host)?))).collect::<Result<Vec<_>>>();
    let gone = wait_for("the end of all flows", limit, || {
        let left = list()?;
        if left.iter().all(|(_, flows)| flows.is_empty()) { Ok(left) } else { bail!("some are left") }
    });
    let left = gone.or_else(|_| list())?;
    for (host, flows) in &left {
        flows.iter().for_each(|flow| progress(&format!("{host}: this flow is left: {flow}")));
    }
    Ok(left.iter().map(|(_, flows)| flows.len() as f64).sum())
}

/// Waits until nothing is left of flows that have ended, and sets `leaked_entries` to what is, and `hash_maps_kept` to
/// how many of the maps of then say so.
///
/// # Errors
///
/// No agent runs on a host.
pub fn report_leaks(hosts: &[&Host], before: &Entries, findings: &mut Findings) -> Result<()> {
    let mut last = None;
    let settled = wait_for("the end of all entries", LIMIT, || {
        let now = Entries::now(hosts)?;
        let leaked = now.more_than(before);
        last = Some(now);
        if leaked == 0.0 { Ok(()) } else { bail!("{leaked} are left") }
    });
    let now = last.context("no agent tells of its flows")?;
    findings.set("leaked_entries", now.more_than(before));
    // A map that another took the place of says nothing of what was before.
    findings.set("hash_maps_kept", now.kept_since(before));
    if let Err(error) = settled {
        findings.note(format!("{error:#}"));
        progress(&now.remains(before));
        for host in hosts {
            let sockets = host.run(["ss", "-Htanoe"])?;
            progress(&format!("{}: sockets:\n{sockets}", host.name()));
        }
    }
    Ok(())
}
