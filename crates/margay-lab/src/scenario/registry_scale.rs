//! `registry-scale`: a router whose registry grows to a million names, of hosts that only speak the protocol; what it
//! costs, and how long others wait to hear of those who come and go.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use super::{Findings, Scenario, is_long};
use crate::agent::{self, margay};
use crate::lab::Lab;
use crate::observe;
use crate::report::Limit::{AtLeast, AtMost, Below, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::topology::Topology;
use crate::traffic::registrants::{Churned, Step};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "registry-scale",
    summary: "a router's registry grows to 940,000 names and 100,000 instances beside them, with a thousand changes a \
              second (short: a twentieth)",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    bound("rss_bytes_per_instance", AtMost(3000.0)),
    bound("growth_bytes", AtMost(1.3)),
    // Processor time of the router: how long it takes is also a matter of what else the machine does in that quarter.
    bound("growth_cpu", AtMost(1.5)),
    bound("churn_per_s", AtLeast(900.0)),
    bound("converge_ms_p99", Below(1000.0)),
    bound("unheard", Exactly(0.0)),
    bound("refused", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"
[host.router]
role = "plain"
links = [{ subnet = "site" }]
[host.crowd]
role = "plain"
links = [{ subnet = "site" }]
"#;

/// How much of each there is.
struct Size {
    hosts: usize,
    own: usize,
    shared: usize,
    churn_s: usize,
}

/// Of a router's bound of 1,048,576 rules, all but a few.
const LONG: Size = Size { hosts: 1040, own: 904, shared: 96, churn_s: 30 };
const SHORT: Size = Size { hosts: 208, own: 226, shared: 24, churn_s: 5 };
const CHURN_PER_S: usize = 1000;
const WATCHERS: usize = 5;
const WATCHED: usize = 20;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse(SCENARIO.name, TOPOLOGY)?, dir)?;
    let (router, crowd) = (lab.host("router")?, lab.host("crowd")?);
    margay(router, ["up", "--router"])?;
    margay(router, ["id", "authority", "create", "shop"])?;
    findings.set("failed", 0.0);
    let Size { hosts, own, shared, churn_s } = if is_long() { LONG } else { SHORT };
    let uses = (hosts + WATCHERS).to_string();
    let token = margay(router, ["id", "token", "create", "shop", "--uses", &uses])?;
    let mut command = crowd.traffic(["crowd", "--token", token.trim()])?;
    let numbers = [
        ("--hosts", hosts),
        ("--own", own),
        ("--shared", shared),
        ("--churn-per-s", CHURN_PER_S),
        ("--churn-s", churn_s),
        ("--watchers", WATCHERS),
        ("--watched", WATCHED),
    ];
    for (word, number) in numbers {
        command.args([word, &number.to_string()]);
    }
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.context("the crowd cannot be started")?;
    let mut lines = BufReader::new(child.stdout.take().context("the crowd has no output")?).lines();
    let mut input = child.stdin.take().context("the crowd has no input")?;
    let pid = agent::pid(router)?;
    let mut steps = vec![Cost::of(pid, Step::default())?];
    let churned = loop {
        let Some(line) = lines.next().transpose()? else { break None };
        if let Ok(churned) = serde_json::from_str::<Churned>(&line) {
            break Some(churned);
        }
        let step: Step = serde_json::from_str(&line).context("the crowd says something else")?;
        steps.push(Cost::of(pid, step)?);
        writeln!(input)?;
    };
    let output = child.wait_with_output().context("the crowd does not end")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the crowd failed: {}", said.trim());
    grown(&steps, findings)?;
    let churned = churned.context("the crowd says nothing of those who come and go")?;
    findings.set("service_ids", (hosts * own + hosts) as f64);
    findings.set("instances_beside", (hosts * shared) as f64);
    findings.set("churn_per_s", churned.per_s);
    findings.set("converge_ms_p50", percentile(&churned.converge_ms, 50.0));
    findings.set("converge_ms_p99", percentile(&churned.converge_ms, 99.0));
    findings.set("heard", churned.converge_ms.len() as f64);
    findings.set("unheard", churned.unheard as f64);
    findings.set("refused", churned.failed as f64);
    if churned.failed > 0 {
        findings.note(churned.said);
    }
    agent::down(router)
}

/// What the router has used when so many were registered.
struct Cost {
    step: Step,
    rss_bytes: f64,
    cpu_s: f64,
}

impl Cost {
    fn of(router_pid: u32, step: Step) -> Result<Self> {
        Ok(Self {
            step,
            rss_bytes: observe::resident_bytes(router_pid)?,
            cpu_s: observe::processor_seconds(router_pid)?,
        })
    }
}

/// What a registration costs, and whether the last ones cost more than the first. The first quarter pays for what all
/// need.
fn grown(costs: &[Cost], findings: &mut Findings) -> Result<()> {
    let [empty, early, .., late, full] = costs else {
        anyhow::bail!("the crowd came in {} steps only", costs.len());
    };
    let (quarter, registered) = (early.step.registered as f64, full.step.registered as f64);
    for Cost { step, rss_bytes, cpu_s } in costs {
        findings.note(format!(
            "{} names: {:.0} MB, {cpu_s:.1} s of processor time, the last of them in {:.0} ms",
            step.registered,
            rss_bytes / 1e6,
            step.ms
        ));
    }
    findings.set("registered", registered);
    findings.set("rss_bytes_per_instance", (full.rss_bytes - empty.rss_bytes) / registered);
    findings.set("growth_bytes", (full.rss_bytes - late.rss_bytes) / (early.rss_bytes - empty.rss_bytes));
    findings.set("growth_cpu", (full.cpu_s - late.cpu_s) / (early.cpu_s - empty.cpu_s));
    findings.set("growth_ms", full.step.ms / early.step.ms);
    findings.set("registered_per_s", quarter / full.step.ms * 1e3);
    Ok(())
}
