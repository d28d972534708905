//! A proxy in a network namespace of its own, as in a container, on a host that forwards nothing for boxes.

use anyhow::{Context, Result};

use super::super::serve;
use super::Stage;
use crate::agent;
use crate::host::Host;
use crate::program::{Program, wait_for};
use crate::scenario::Findings;

const PORT: &str = "8104";
/// The host's end of the link into the namespace, which the configuration has to name.
const LINK: &str = "to-box";

/// The name of a namespace is a file of the machine, which outlives the lab's hosts: one of a run that was cut off goes
/// first.
const BEGIN: &str = "
ip netns del box 2>/dev/null || true
ip netns add box
ip link add to-box type veth peer name eth0 netns box
ip addr add 192.0.2.1/30 dev to-box; ip link set to-box up
echo 1 > /proc/sys/net/ipv4/conf/to-box/forwarding; echo 1 > /proc/sys/net/ipv4/conf/sal0/forwarding
ip -n box addr add 192.0.2.2/30 dev eth0; ip -n box link set eth0 up; ip -n box link set lo up
ip -n box route add default via 192.0.2.1
";

/// Before the host's agent starts.
pub(super) fn prepare(host: &Host) -> Result<()> {
    host.shell(&format!("echo 'inside = [\"{LINK}\"]' >> /etc/margay/margay.toml")).map(drop)
}

fn haproxy(host: &Host, service: &str) -> Result<Program> {
    let (v4, _) = agent::virtual_addresses(host, service)?;
    let text = format!(
        "global\n  maxconn 512\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 1m\n  timeout server \
         1m\nlisten lines\n  bind 0.0.0.0:{PORT}\n  server web {v4}:7\n"
    );
    let config = host.dir.join("inner-haproxy.cfg");
    std::fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
    let config = config.to_string_lossy().into_owned();
    host.spawn("inner-haproxy", ["ip", "netns", "exec", "box", "haproxy", "-db", "-f", &config])
}

pub(super) fn judge(stage: &mut Stage<'_>, host: &Host, findings: &mut Findings) -> Result<()> {
    host.shell(BEGIN)?;
    let _haproxy = haproxy(host, "inside.shop")?;
    wait_for("HAProxy in its namespace", agent::READY_LIMIT, || {
        let found = host.run(["ip", "netns", "exec", "box", "ss", "-Hltn", &format!("sport = :{PORT}")])?;
        anyhow::ensure!(!found.trim().is_empty(), "nobody listens");
        Ok(())
    })?;
    serve(host, "inner.shop", "proxy", &["--listen", &format!("192.0.2.2:{PORT}")])?;
    let passed = stage.pass("inside.shop", &[], findings)?;
    // The card forwards nothing: what comes for the proxy takes the way by sal0 from its first packet on.
    let swallowed = agent::metric(host, "margay_kernel_undelivered_total")?;
    if swallowed > 0.0 {
        findings.note(format!("{swallowed} flows to the namespace were held up at the card"));
    }
    stage.judge("HAProxy in a network namespace", passed && swallowed == 0.0, findings);
    agent::withdraw(host, "inner.shop")?;
    host.run(["ip", "netns", "del", "box"]).map(drop)
}
