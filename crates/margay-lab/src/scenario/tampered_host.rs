//! `tampered-host`: whatever `up --dry-run` lists is undone or altered by another program on either end of flows, one
//! thing after another. The agent puts each back, no flow notices, and whoever does it again and again is named.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Findings, Scenario, moved, pair};
use crate::agent::{self, Agents};
use crate::fabric::margay_program;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::topology::Topology;
use crate::transfers::{Order, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "tampered-host",
    summary: "every change of `up` undone or altered by another program while flows run",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("back_ms_p99", Below(1000.0)),
    bound("resets", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
    // Of what `up` lists on both hosts, and of what network managers do to several of it at once.
    bound("tampered", AtLeast(40.0)),
    bound("without_tampering", Exactly(0.0)),
    bound("stopped_with_a_reason", Exactly(1.0)),
];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"
v6 = "fd01::/64"

[host.router]
role = "router"
links = [{ subnet = "site" }]

[host.server]
role = "agent"
links = [{ subnet = "site" }]

[host.client]
role = "agent"
links = [{ subnet = "site" }]
"#;

const WAYS: [&str; 4] = ["up:cubic", "down:cubic", "up:cubic", "down:cubic"];
/// Bytes per second of each.
const PACE: u64 = 200_000;
/// Whatever takes longer has not come back.
const BACK_LIMIT: Duration = Duration::from_secs(4);
/// More often than the agent puts up with.
const AGAIN: usize = 14;

/// What `up` makes, as text, but for numbers of interfaces. A link-local address that came while somebody had switched
/// its making on stays, and harms nobody, as nobody misses the kernel's own route to an address that the table of own
/// addresses has. The other end of the responder's interface has another number each time.
const SNAPSHOT: &str = r#"
    # The interface may be away for a moment.
    set +e
    exec 2>/dev/null
    for family in -4 -6; do
        for device in sal0 sal-dns; do ip $family -o addr show dev $device scope global | sed 's/^[0-9]*: //'; done
        ip $family rule show | sort
        ip $family route show table all |
            grep -v '^fe80::/64 dev sal0\|^local fe80:.* dev sal0\|^multicast\|^fd5a:4c00::1 dev sal0 proto kernel' | sort
    done
    for device in sal0 sal-dns; do
        ip -o link show $device | sed 's/^[0-9]*: //; s/@if[0-9]*//; s/ link-netnsid.*//'
        grep -r . /proc/sys/net/ipv4/conf/$device /proc/sys/net/ipv6/conf/$device | grep -v stable_secret | sort
    done
    cat /proc/sys/net/ipv4/ip_local_reserved_ports
    grep '^nameserver' /etc/resolv.conf
    exit 0
"#;

/// What other programs do to several changes at once, and to none by name.
const AT_ONCE: [(&str, &str); 7] = [
    // The agent's own has no interface any more, although there is one of that name. The agent may be first to make it.
    ("another sal0 in the place of the own one", "ip link del sal0; ip tuntap add dev sal0 mode tun || true"),
    ("routes flushed", "ip -4 route flush dev sal0; ip -6 route flush dev sal0"),
    ("down and up", "ip link set sal0 down; ip link set sal0 up"),
    ("addresses flushed", "ip addr flush dev sal0"),
    (
        "IPv6 off and on",
        "echo 1 > /proc/sys/net/ipv6/conf/sal0/disable_ipv6; echo 0 > /proc/sys/net/ipv6/conf/sal0/disable_ipv6",
    ),
    (
        "IPv6 off and on everywhere",
        "own=$(ip -6 -o addr show dev eth0 scope global | awk '{ print $4 }')
         for value in 1 0; do echo $value > /proc/sys/net/ipv6/conf/all/disable_ipv6; done
         ip addr add $own dev eth0 nodad",
    ),
    (
        "rules of systemd-networkd's",
        "for family in -4 -6; do ip $family rule show | awk '$1 != \"0:\" && $1 !~ /^3276/ { print $1 + 0 }' |
         while read -r priority; do ip $family rule del pref $priority; done; done",
    ),
];

/// A full-tunnel VPN comes, and sends everything to itself before all others; and goes.
const VPN_COMES: &str = "ip link add vpn0 type bridge; ip link set vpn0 up; ip route add default dev vpn0 table 52
    ip -6 route add default dev vpn0 table 52; ip rule add table 52; ip -6 rule add table 52";
const VPN_GOES: &str = "ip rule del table 52; ip -6 rule del table 52; ip link del vpn0";
/// No rule but that of this host's own addresses is before one of Margay's.
const IS_FIRST: &str =
    "for family in -4 -6; do ip $family rule show | sed -n 2p; done | grep -c '198.18.0\\|fd5a:4c00:'";

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("tampered-host", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let ends = [lab.host("client")?, lab.host("server")?];
    pair::demand_kernel(&ends, findings)?;
    ends.iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    for name in ["tampered", "without_tampering", "stopped_with_a_reason"] {
        findings.set(name, 0.0);
    }
    let mut serving = moved::serve(ends[1])?;
    let transfers = Transfers::start(ends[0], &mut serving, Order { to: moved::NAME, ways: &WAYS, pace: PACE })?;
    let mut back = Vec::new();
    for host in ends {
        pair::attempt_part(host.name(), findings, |findings| tamper(host, &mut back, findings));
    }
    pair::attempt_part("again and again", findings, |findings| insist(ends[0], findings));
    transfers.finish("all was put back", findings)?;
    findings.set("back_ms_p99", percentile(&back, 99.0));
    findings.set("back_ms_p50", percentile(&back, 50.0));
    pair::report_resets(&ends, findings)
}

/// Undoes or alters everything on one host.
fn tamper(host: &Host, back: &mut Vec<f64>, findings: &mut Findings) -> Result<()> {
    let listed: Value = serde_json::from_str(&agent::margay(host, ["up", "--dry-run", "--json"])?)?;
    let changes = listed["changes"].as_array().context("`up --dry-run` lists nothing")?;
    let mut acts = Vec::new();
    for listed in changes {
        let what = listed["what"].as_str().unwrap_or_default();
        match tampering(&listed["change"]) {
            Some(act) => acts.push((what.to_owned(), act)),
            None => {
                findings.note(format!("nobody tampers with: {what}"));
                findings.figures.add("without_tampering", 1.0);
            }
        }
    }
    acts.extend(AT_ONCE.map(|(what, act)| (what.to_owned(), act.to_owned())));
    let before = host.shell(SNAPSHOT)?;
    for (what, act) in acts {
        host.shell(&act).with_context(|| what.clone())?;
        findings.figures.add("tampered", 1.0);
        let is_back = || as_before(&before, &host.shell(SNAPSHOT)?);
        await_back(host, &what, is_back, back, findings);
    }
    host.shell(VPN_COMES)?;
    findings.figures.add("tampered", 1.0);
    let is_first = || if host.shell(IS_FIRST)?.trim() == "2" { Ok(()) } else { bail!("the VPN's rule is first") };
    await_back(host, "a VPN's rule", is_first, back, findings);
    host.shell(VPN_GOES)?;
    Ok(())
}

fn as_before(before: &str, now: &str) -> Result<()> {
    let missing = before.lines().find(|line| !now.lines().any(|now| now == *line));
    let added = now.lines().find(|line| !before.lines().any(|before| before == *line));
    match (missing, added) {
        (None, None) if before == now => Ok(()),
        _ => bail!("missing: {missing:?}, instead: {added:?}"),
    }
}

fn await_back(
    host: &Host,
    what: &str,
    is_back: impl FnMut() -> Result<()>,
    back: &mut Vec<f64>,
    findings: &mut Findings,
) {
    let start = Instant::now();
    if let Err(error) = wait_for(what, BACK_LIMIT, is_back) {
        findings.note(format!("{}: {error:#}", host.name()));
    }
    let took_ms = start.elapsed().as_secs_f64() * 1e3;
    if took_ms > 1000.0 {
        findings.note(format!("{}: {what}: back after {took_ms:.0} ms", host.name()));
    }
    back.push(took_ms);
}

/// What another program would do to a change; none for a change that this scenario does not know.
fn tampering(change: &Value) -> Option<String> {
    let word = |key: &str| change[key].as_str().unwrap_or_default();
    let block = |key: &str| {
        let (address, bits) = (change[key]["address"].as_str()?, change[key]["bits"].as_u64()?);
        Some((if address.contains(':') { "-6" } else { "-4" }, format!("{address}/{bits}")))
    };
    let other = |value: &str| if value == "0" { 1 } else { 0 };
    Some(match word("change") {
        "tun" | "veth" => format!("ip link del {}", word("interface")),
        "sizes" => format!("ip link set {} mtu 1300", word("interface")),
        "parameter" => format!("echo {} > /proc/sys/{}", other(word("value")), word("key")),
        "address" => format!("ip addr del {} dev {}", block("block")?.1, word("interface")),
        "up" => format!("ip link set {} down", word("interface")),
        "route" => {
            let (family, to) = block("destination")?;
            format!("ip {family} route del {to} dev {} table {}", word("interface"), change["table"])
        }
        "rule" => {
            let from = change["from"].as_str();
            let (family, to) =
                block("to").unwrap_or((if word("from").contains(':') { "-6" } else { "-4" }, String::new()));
            let selector = from.map(|from| format!("from {from}")).unwrap_or_else(|| format!("to {to}"));
            let port = change["source_port"].as_u64().map(|port| format!("sport {port}")).unwrap_or_default();
            format!("ip {family} rule del {selector} {port} table {}", change["table"])
        }
        "guard" => "nft delete table inet margay".to_owned(),
        "reserved_port" => "echo > /proc/sys/net/ipv4/ip_local_reserved_ports".to_owned(),
        "resolv_conf" => format!("printf 'nameserver 192.0.2.1\\n' > {}", word("path")),
        "resolved" => format!("resolvectl revert {}", word("interface")),
        _ => return None,
    })
}

/// Undoes one change until the agent stops putting it back; it says so, and `up` helps.
fn insist(host: &Host, findings: &mut Findings) -> Result<()> {
    let is_there =
        || if host.shell("ip rule show")?.contains("from 198.18.0.1 lookup 54324") { Ok(()) } else { bail!("gone") };
    for _ in 0..AGAIN {
        host.shell("ip rule del from 198.18.0.1 table 54324")?;
        if wait_for("the rule", Duration::from_secs(2), is_there).is_err() {
            break;
        }
    }
    let said = host.output([margay_program()?.into_os_string(), "check".into()])?;
    if !String::from_utf8_lossy(&said.stdout).contains("not put back any more") {
        bail!("`check` does not say that the agent has stopped");
    }
    agent::margay(host, ["up"])?;
    is_there().context("`up` does not help")?;
    findings.figures.add("stopped_with_a_reason", 1.0);
    Ok(())
}
