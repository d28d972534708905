//! `cache-off`: the flow cache is only a cache. Its maps are emptied and its programs taken off and put on again, a
//! hundred times at random, on both hosts; the transfers that it carries do not notice.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::downloads::{self, Downloads, Order};
use crate::host::Host;
use crate::observe;
use crate::pump::Dice;
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::server::{Nginx, noise, sha256};
use crate::wire::set_rate;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "cache-off",
    summary: "the kernel's maps emptied, its programs taken off and put on again, 100 times under hashed transfers",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
    bound("acts", Exactly(ACTS as f64)),
    bound("direct_again", Exactly(1.0)),
];

const ACTS: usize = 100;
const TRANSFERS: usize = 20;
const FILE_BYTES: usize = 60_000_000;
/// Of the link, so that the transfers last for all of it: a minute.
const LINK_MBIT: u32 = 160;
const NAME: &str = "web.shop.sal.internal";
const OPEN_LIMIT: Duration = Duration::from_secs(30);
const STEP_LIMIT: Duration = Duration::from_secs(20);
const END_LIMIT: Duration = Duration::from_secs(180);
const SEED: u64 = 3;

/// A host, and whether its programs are on.
struct Cached<'a> {
    host: &'a Host,
    is_on: bool,
}

impl Cached<'_> {
    /// One act by chance.
    fn act(&mut self, dice: &mut Dice, findings: &mut Findings) {
        let act = match (self.is_on, dice.below(3)) {
            (false, _) => "load",
            (true, 0) => "unload",
            (true, _) => "clear",
        };
        match agent::cache(self.host, act) {
            Ok(()) => {
                self.is_on = act != "unload";
                findings.figures.add(act, 1.0);
                findings.figures.add("acts", 1.0);
            }
            Err(error) => {
                // The first one tells as much as all of them.
                if findings.figures.get("acts_refused") == 0.0 {
                    findings.note(format!("{error:#}"));
                }
                findings.figures.add("acts_refused", 1.0);
                findings.figures.add("failed", 1.0);
            }
        }
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = pair::build("cache-off", dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    pair::demand_kernel(&[client, server], findings)?;
    let nginx = Nginx::start(server, &["0.0.0.0:80"])?;
    nginx.put("file", &noise(FILE_BYTES, 1))?;
    agent::publish(server, "web.shop", "0.0.0.0:80", &[])?;
    for host in [client, server] {
        set_rate(Some(host), "eth0", LINK_MBIT)?;
        observe::count_virtual_resets(host)?;
    }
    findings.set("acts", 0.0);
    findings.set("direct_again", 0.0);
    let mut running = Downloads::start(client, Order { host: NAME, path: "file", count: TRANSFERS, pace: 0 })?;
    pair::attempt_part("acts", findings, |findings| disturb([client, server], &mut running, findings));
    pair::attempt_part("direct again", findings, |findings| {
        agent::await_paths(&[client, server], true, 1, OPEN_LIMIT)?;
        findings.set("direct_again", 1.0);
        Ok(())
    });
    let results = running.finish(END_LIMIT)?;
    downloads::judge("transfers", &results, &sha256(client, &nginx.root.join("file"))?, findings);
    findings.set("stall_ms_max", downloads::stall_ms_max(&results));
    pair::report_resets(&[client, server], findings)?;
    Ok(())
}

/// Act after act, at even distances of the transfers' way.
fn disturb(hosts: [&Host; 2], running: &mut Downloads, findings: &mut Findings) -> Result<()> {
    running.await_open(OPEN_LIMIT)?;
    let mut dice = Dice::new(SEED);
    let mut cached = hosts.map(|host| Cached { host, is_on: true });
    // The rest of the way is for what comes after, and since some are faster than others.
    let step = (TRANSFERS * FILE_BYTES) as f64 * 0.4 / ACTS as f64;
    for number in 0..ACTS {
        let mark = step * (number + 1) as f64;
        running.await_progress("the next part of the transfers", STEP_LIMIT, |now| now.bytes >= mark)?;
        cached[dice.below(2)].act(&mut dice, findings);
    }
    for cached in cached.iter_mut().filter(|cached| !cached.is_on) {
        agent::cache(cached.host, "load")?;
    }
    let ended = running.progress()?.ended;
    anyhow::ensure!(ended < TRANSFERS / 2, "{ended} of {TRANSFERS} transfers had ended before the last act");
    Ok(())
}
