//! `chain-nat`: as `insert-remove`, with a translator between the two ends and the boxes.

use std::path::Path;

use anyhow::Result;

use super::insert_remove::{BOUNDS, changes};
use crate::lab::Lab;
use crate::scenario::{Findings, Scenario};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "chain-nat",
    summary: "a scrubber is put into running sessions of a client behind a translator, and taken out of them",
    bounds: &BOUNDS,
    run,
};

const TOPOLOGY: &str = r#"
[subnet.core]
v4 = "10.1.0.0/24"

[subnet.home]
v4 = "192.168.1.0/24"

[host.router]
role = "router"
links = [{ subnet = "core" }]

[host.nat]
role = "gateway"
nat = "core"
links = [{ subnet = "core" }, { subnet = "home" }]

[host.client]
role = "agent"
links = [{ subnet = "home" }]

[host.server]
role = "agent"
links = [{ subnet = "core" }]

[host.box1]
role = "agent"
links = [{ subnet = "core" }]

[host.box2]
role = "agent"
links = [{ subnet = "core" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("chain-nat", TOPOLOGY)?, dir)?;
    super::let_forward(&lab, 2)?;
    changes(&lab, findings)
}
