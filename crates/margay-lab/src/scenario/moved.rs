//! What the scenarios of moves share: a lab whose hosts are far from each other, and pauses as figures.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::{Findings, pair};
use crate::agent;
use crate::host::Host;
use crate::lab::Lab;
use crate::report::{median, percentile};
use crate::server;
use crate::topology::Topology;
use crate::transfers::{Server, Transfers};

/// The service of the transfers.
pub const SERVICE: &str = "flow.shop";
/// Its name.
pub const NAME: &str = "flow.shop.sal.internal";
/// Where its server listens.
pub const PORT: u16 = 5202;
/// Connections by which the path's time is measured.
const CONNECTIONS: usize = 11;

/// Both hosts and the router are on subnets of their own, of both families; the way between them is long, and their own
/// networks are fast. So what a new address needs of its neighbours takes no time that counts.
const FAR: &str = r#"
[subnet.west]
v4 = "10.1.0.0/24"
v6 = "fd01::/64"

[subnet.wan]
v4 = "10.2.0.0/24"
v6 = "fd02::/64"
delay_ms = 10

[subnet.east]
v4 = "10.3.0.0/24"
v6 = "fd03::/64"

[subnet.hub]
v4 = "10.4.0.0/24"
v6 = "fd04::/64"

[host.near]
role = "gateway"
links = [{ subnet = "west" }, { subnet = "wan" }]

[host.far]
role = "gateway"
links = [{ subnet = "wan" }, { subnet = "east" }, { subnet = "hub" }]

[host.router]
role = "router"
links = [{ subnet = "hub" }]

[host.server]
role = "agent"
links = [{ subnet = "east" }]

[host.client]
role = "agent"
links = [{ subnet = "west" }]
"#;

/// Builds it, with hosts `client`, `near`, `far`, `router` and `server`: 40 ms there and back. No agent is started.
///
/// # Errors
///
/// As for [`Lab::build`].
pub fn build_far(name: &str, dir: &Path) -> Result<Lab> {
    Lab::build(Topology::parse(name, FAR)?, dir)
}

/// Serves [`SERVICE`] on a host: transfers.
///
/// # Errors
///
/// As for [`Server::start`] and [`agent::publish`].
pub fn serve(host: &Host) -> Result<Server> {
    let server = Server::start(host, PORT, false)?;
    agent::publish(host, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    Ok(server)
}

/// What it takes there and back between two hosts: to set up a plain TCP connection. Sets `rtt_ms`.
///
/// # Errors
///
/// They do not reach each other.
pub fn measure_rtt_ms(client: &Host, server: &Host, findings: &mut Findings) -> Result<f64> {
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    let found = server::connects(client, &pair::address(server)?, CONNECTIONS, 1)?;
    let rtt_ms = found.median_us / 1e3;
    findings.set("rtt_ms", rtt_ms);
    Ok(rtt_ms)
}

/// Sets `moves`: how often peers have been moved with, as these hosts' agents count it.
///
/// # Errors
///
/// An agent does not count it.
pub fn report_moves(hosts: &[&Host], findings: &mut Findings) -> Result<()> {
    let moves: f64 = hosts.iter().map(|host| agent::metric(host, "margay_moves_total")).sum::<Result<f64>>()?;
    findings.set("moves", moves);
    Ok(())
}

/// Runs that failed; more make the rest pointless, and long.
pub const FAILED_MAX: usize = 3;

/// How long transfers stood still, over several events.
#[derive(Default)]
pub struct Pauses {
    ms: Vec<f64>,
}

impl Pauses {
    /// Waits until each transfer has brought so many bytes more, and enters how long each stood still after the event.
    /// The bytes are more than were under way when it came. Gives the pauses for people, in the order of the transfers'
    /// ways.
    ///
    /// # Errors
    ///
    /// One stands still for longer than `limit`, or ends.
    pub fn enter(
        &mut self,
        what: &str,
        transfers: &mut Transfers<'_>,
        event_us: u64,
        bytes: u64,
        limit: Duration,
    ) -> Result<String> {
        transfers.await_bytes(what, bytes, limit)?;
        let found: Vec<f64> = transfers.pauses_ms(event_us).into_iter().flatten().collect();
        let said: Vec<String> = found.iter().map(|ms| format!("{ms:.0}")).collect();
        self.ms.extend(found);
        Ok(format!("{} ms", said.join(" ")))
    }

    /// The middle of all, in milliseconds.
    pub fn p50_ms(&self) -> f64 {
        median(&self.ms)
    }

    /// The longest.
    pub fn max_ms(&self) -> f64 {
        percentile(&self.ms, 100.0)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.ms.len()
    }

    /// Sets `<prefix>pause_ms_p50` and `<prefix>pause_ms_max`, where there are any: none at all is no short pause.
    pub fn report_ms(&self, prefix: &str, findings: &mut Findings) {
        if self.count() > 0 {
            findings.set(&format!("{prefix}pause_ms_p50"), self.p50_ms());
            findings.set(&format!("{prefix}pause_ms_max"), self.max_ms());
        }
    }

    /// Sets `<prefix>pause_rtts_p50` and `<prefix>pause_rtts_max`, where there are any.
    pub fn report_rtts(&self, prefix: &str, rtt_ms: f64, findings: &mut Findings) {
        if self.count() > 0 {
            findings.set(&format!("{prefix}pause_rtts_p50"), self.p50_ms() / rtt_ms);
            findings.set(&format!("{prefix}pause_rtts_max"), self.max_ms() / rtt_ms);
        }
    }
}
