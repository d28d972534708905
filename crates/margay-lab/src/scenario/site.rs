//! A router and hosts with agents on one subnet.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use crate::lab::Lab;
use crate::topology::Topology;

/// The subnet has IPv4.
pub const V4: &str = "v4 = \"10.1.0.0/24\"\n";
/// The subnet has both families.
pub const BOTH: &str = "v4 = \"10.1.0.0/24\"\nv6 = \"fd01::/64\"\n";

/// Builds it, with a host `router` and these others; no agent is started.
///
/// # Errors
///
/// As for [`Lab::build`].
pub fn build(name: &str, blocks: &str, agents: &[impl AsRef<str>], dir: &Path) -> Result<Lab> {
    let mut text = format!("[subnet.site]\n{blocks}");
    let agents = agents.iter().map(|agent| (agent.as_ref(), "agent"));
    for (host, role) in std::iter::once(("router", "router")).chain(agents) {
        write!(text, "[host.{host}]\nrole = \"{role}\"\nlinks = [{{ subnet = \"site\" }}]\n")?;
    }
    Lab::build(Topology::parse(name, &text)?, dir)
}
