//! `up-down`: hosts with a firewall, a resolver and routes of their own are after `down` what they were before `up`.

use std::ffi::OsStr;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::{Findings, Scenario, pair};
use crate::agent::{self, READY_LIMIT, margay};
use crate::cgroup;
use crate::fabric::margay_program;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::wait_for;
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "up-down",
    summary: "up and down on hosts with a firewall, a resolver and routes of their own",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 2] = [bound("differences", Exactly(0.0)), bound("failed", Exactly(0.0))];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"
v6 = "fd01::/64"

[host.bare]
role = "plain"
links = [{ subnet = "site" }]

[host.busy]
role = "plain"
links = [{ subnet = "site" }]

[host.linked]
role = "plain"
links = [{ subnet = "site" }]
"#;

/// A host that has had a life of its own.
const BUSY: &str = r#"
    nft 'add table inet own; add chain inet own in { type filter hook input priority 0; policy accept; };
         add rule inet own in tcp dport 23 drop; add counter inet own seen'
    ip rule add from 10.7.0.0/16 lookup 100 priority 1000
    ip -6 rule add from fd77::/64 lookup 100 priority 1000
    ip route add 10.8.0.0/16 via 10.1.0.1 dev eth0 onlink table 100
    ip route add 10.9.0.0/16 via 10.1.0.1 dev eth0 onlink
    ip link add own0 type bridge
    ip link set own0 up
    ip addr add 10.77.0.1/24 dev own0
    echo 20000-20010,30000 > /proc/sys/net/ipv4/ip_local_reserved_ports
    printf '# by hand\nsearch example.org\nnameserver 192.0.2.53\noptions timeout:1' > /etc/resolv.conf
    chmod 640 /etc/resolv.conf
"#;

/// A host whose resolver file belongs to another program.
const LINKED: &str = r#"
    mkdir -p /run/other && printf 'nameserver 192.0.2.54\n' > /run/other/resolv.conf
    rm /etc/resolv.conf && ln -s /run/other/resolv.conf /etc/resolv.conf
"#;

/// Everything that `up` could touch, as text.
const SNAPSHOT: &str = r#"
    nft list ruleset
    for family in -4 -6; do
        ip $family -o addr show; ip $family rule show; ip $family route show table all
    done
    # Timers of a bridge run by themselves.
    ip -d -o link show | sed -E 's/_timer +[0-9.]+//g'
    stat -c '%F %a %U %G %s %N' /etc/resolv.conf 2>/dev/null || true
    cat /etc/resolv.conf 2>/dev/null || echo 'no resolv.conf'
    cat /run/other/resolv.conf 2>/dev/null || true
    for key in ipv4/ip_local_reserved_ports ipv4/ip_forward ipv4/ip_local_port_range; do
        echo "$key $(cat /proc/sys/net/$key)"
    done
    { grep -r . /proc/sys/net/ipv4/conf /proc/sys/net/ipv6/conf 2>/dev/null || true; } | sort
    ss -Hlnptu | sed 's/ *users.*//' | sort
    # File systems of eBPF, and what is pinned there.
    grep ' bpf ' /proc/self/mounts || true
    ls /run/margay/bpf 2>/dev/null || true
"#;

/// Margay's processes in this network namespace.
const PROCESSES: &str = r#"
    for process in /proc/[0-9]*; do
        if [ "$(readlink "$process/ns/net")" = "$(readlink /proc/self/ns/net)" ]; then
            readlink "$process/exe" || true
        fi
    done 2>/dev/null | grep '/margay$' || true
"#;

/// The page whose commands undo `up` without Margay.
const PAGE: &str = include_str!("../../../../docs/book/what-up-changes.md");

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("up-down", TOPOLOGY)?, dir)?;
    let (bare, busy, linked) = (lab.host("bare")?, lab.host("busy")?, lab.host("linked")?);
    bare.shell("rm /etc/resolv.conf")?;
    busy.shell(BUSY)?;
    linked.shell(LINKED)?;
    findings.figures.add("differences", 0.0);
    findings.figures.add("failed", 0.0);
    for host in [bare, busy, linked] {
        if let Err(error) = come_and_go(host, findings) {
            findings.note(format!("{error:#}"));
            findings.figures.add("failed", 1.0);
        }
    }
    pair::attempt_part("programs that serve names", findings, |_| served_again(busy));
    pair::attempt_part("a second token", findings, |_| joins_live(busy, bare));
    pair::attempt_part("a route into the virtual addresses", findings, |findings| clash(bare, findings));
    pair::attempt_part("other virtual addresses", findings, |findings| other_ranges(bare, busy, findings));
    Ok(())
}

/// A host that has virtual addresses elsewhere is left as it is, and `up` says where.
fn clash(host: &Host, findings: &mut Findings) -> Result<()> {
    for (family, network) in [("-4", "198.18.7.0/24"), ("-6", "fd5a:4c00:7::/48")] {
        host.run(["ip", family, "route", "add", network, "dev", "eth0"])?;
        let before = host.shell(SNAPSHOT)?;
        let Err(refusal) = margay(host, ["up", "--router"]) else { bail!("{network}: `up` does not mind") };
        // Words of an error may be parted by line ends.
        if !format!("{refusal:#}").contains(network) {
            bail!("{network}: `up` does not name it: {refusal:#}");
        }
        compare(host, "a refused up", &before, findings)?;
        host.run(["ip", family, "route", "del", network, "dev", "eth0"])?;
    }
    Ok(())
}

/// Where others have the usual virtual addresses, a host has other ones, and talks with hosts that have the usual ones.
fn other_ranges(host: &Host, peer: &Host, findings: &mut Findings) -> Result<()> {
    host.run(["ip", "route", "add", "198.18.7.0/24", "dev", "eth0"])?;
    let before = host.shell(SNAPSHOT)?;
    let set = |ipv4: &str| {
        host.shell(&format!(
            "sed -i '/^# ranges/,$d' /etc/margay/margay.toml
             printf '# ranges\n[ranges]\nipv4 = \"{ipv4}\"\nipv6 = \"fdaa:1::/32\"\n' >> /etc/margay/margay.toml"
        ))
    };
    host.shell("touch /etc/margay/margay.toml")?;
    set("10.66.0.0/15")?;
    margay(host, ["up", "--router"])?;
    margay(host, ["id", "authority", "create", "den"])?;
    agent::join(peer, margay(host, ["id", "token", "create", "den"])?.trim())?;
    let mut servers = Vec::new();
    for (server, name) in [(host, "one.den"), (peer, "two.den")] {
        servers.push(server.spawn(name, ["python3", "-m", "http.server", "--bind", "::", "8080"])?);
        agent::publish(server, name, "[::]:8080", &[])?;
    }
    for (client, name, v4, v6) in [(host, "two.den", "10.66.", "fdaa:1:"), (peer, "one.den", "198.18.", "fd5a:4c00:")] {
        let found = agent::virtual_addresses(client, name)?;
        ensure!(found.0.starts_with(v4) && found.1.starts_with(v6), "{name} is at {found:?} on {}", client.name());
        for family in ["-4", "-6"] {
            let page = client.shell(&format!("curl {family} -sSf --max-time 5 http://{name}.sal.internal:8080/"))?;
            ensure!(page.contains("Directory listing"), "{name} by {family} on {}: {page}", client.name());
        }
    }
    set("10.68.0.0/15")?;
    let said = margay(host, ["reload"])?;
    ensure!(said.contains("[ranges] ipv4") && said.contains("down"), "a reload does not say what is needed: {said}");
    let pid = agent::pid(host)?;
    host.run(["kill", "-9", &pid.to_string()])?;
    wait_for("the end of the agent", READY_LIMIT, || {
        if agent::pid(host).is_err() { Ok(()) } else { bail!("it is there") }
    })?;
    let Err(refusal) = margay(host, ["up", "--router"]) else { bail!("`up` does not mind other ranges than before") };
    let refusal = format!("{refusal:#}");
    ensure!(refusal.contains("10.66.0.0/15") && refusal.contains("10.68.0.0/15"), "`up` names no ranges: {refusal}");
    agent::down(host)?;
    agent::down(peer)?;
    drop(servers);
    compare(host, "down with other ranges", &before, findings)?;
    host.shell("ip route del 198.18.7.0/24 dev eth0; sed -i '/^# ranges/,$d' /etc/margay/margay.toml").map(drop)
}

/// A host that is a member joins another authority while its agent runs, and becomes a router while it runs.
fn joins_live(router: &Host, member: &Host) -> Result<()> {
    margay(router, ["up", "--router"])?;
    let token = |authority: &str| -> Result<String> {
        margay(router, ["id", "authority", "create", authority])?;
        Ok(margay(router, ["id", "token", "create", authority])?.trim().to_owned())
    };
    agent::join(member, &token("first")?)?;
    let epoch = agent::status(member)?["epoch"].clone();
    let said = margay(member, ["up", "--join", &token("second")?])?;
    ensure!(said.contains("a member of second"), "it does not say what it has joined: {said}");
    let status = agent::status(member)?;
    let connected =
        status["routers"].as_array().context("no routers")?.iter().filter(|one| one["state"] == "connected");
    let authorities: Vec<&str> = connected.filter_map(|one| one["authority"].as_str()).collect();
    ensure!(authorities == ["first", "second"], "it is a member of {authorities:?}");
    ensure!(status["epoch"] == epoch, "its agent was started again for a token");
    let Err(refusal) = margay(member, ["id", "authority", "create", "second"]) else { bail!("a key beside another's") };
    ensure!(format!("{refusal:#}").contains("id authority request second"), "no way is named: {refusal:#}");
    margay(member, ["up", "--router"])?;
    ensure!(agent::status(member)?["router"] == true, "it is no router");
    margay(member, ["id", "authority", "create", "third"])?;
    let Err(refusal) = margay(member, ["up", "--join", &token("third")?]) else { bail!("two authorities of one name") };
    ensure!(
        format!("{refusal:#}").contains("keys/authority/third.key"),
        "what is in the way is not named: {refusal:#}"
    );
    agent::down(member)?;
    agent::down(router)
}

/// A program that serves a name runs on over `down`, and serves it again after `up`, without being started again. Of
/// one that ends meanwhile nothing stays.
fn served_again(host: &Host) -> Result<()> {
    let is_served = |name: &str| -> Result<bool> {
        let listed = margay(host, ["service", "list"])?;
        Ok(listed.lines().any(|line| line.starts_with(name) && line.trim_end().ends_with("registered")))
    };
    let (stays, goes) = ("stays.shop", "goes.shop");
    margay(host, ["up", "--router"])?;
    margay(host, ["id", "authority", "create", "shop"])?;
    let margay_program = margay_program()?;
    let program = |name: &str, port: &str| {
        let line = ["run", "--service", name, "--", "python3", "-m", "http.server", port];
        let line = line.into_iter().map(OsStr::new);
        host.spawn(name, std::iter::once(margay_program.as_os_str()).chain(line))
    };
    let programs = [program(stays, "8001")?, program(goes, "8002")?];
    let await_served = |name: &str| {
        wait_for("a name that is served", READY_LIMIT, || {
            if is_served(name)? { Ok(()) } else { bail!("{name} is not registered") }
        })
    };
    await_served(stays)?;
    await_served(goes)?;
    let cgroups = [cgroup::of(programs[0].pid())?, cgroup::of(programs[1].pid())?];
    agent::down(host)?;
    let [stayed, gone] = programs;
    drop(gone);
    margay(host, ["up", "--router"])?;
    await_served(stays)?;
    let page = host.shell("curl -sf --max-time 5 http://stays.shop.sal.internal:8001/")?;
    ensure!(page.contains("Directory listing"), "the name leads elsewhere: {page}");
    ensure!(!is_served(goes)?, "{goes} is served, and its program is gone");
    ensure!(cgroup::of(stayed.pid())? == cgroups[0], "the program that stays was moved");
    agent::down(host)?;
    drop(stayed);
    agent::down(host)?;
    ensure!(cgroups.iter().all(|path| !path.exists()), "cgroups of programs that are gone are there: {cgroups:?}");
    Ok(())
}

fn come_and_go(host: &Host, findings: &mut Findings) -> Result<()> {
    let before = host.shell(SNAPSHOT)?;
    margay(host, ["up", "--dry-run"])?;
    compare(host, "--dry-run", &before, findings)?;

    margay(host, ["up", "--router"])?;
    if host.shell(SNAPSHOT)? == before {
        bail!("{}: `up` is not seen in the snapshot, so its undoing proves nothing", host.name());
    }
    margay(host, ["up"])?;
    agent::down(host)?;
    compare(host, "up, up, down", &before, findings)?;
    agent::down(host)?;
    compare(host, "a second down", &before, findings)?;

    margay(host, ["up", "--router"])?;
    let pid = agent::pid(host)?;
    host.run(["kill", "-9", &pid.to_string()])?;
    wait_for("the end of the agent", READY_LIMIT, || {
        if agent::pid(host).is_err() { Ok(()) } else { bail!("it is there") }
    })?;
    agent::down(host)?;
    compare(host, "kill -9, down", &before, findings)?;

    margay(host, ["up", "--router"])?;
    host.run(["ip", "link", "del", "sal0"])?;
    agent::down(host)?;
    compare(host, "sal0 deleted by somebody, down", &before, findings)?;
    by_hand(host, &before, findings)
}

/// The commands of the book undo `up` without any help of Margay's, and the next `up` finds nothing in its way.
fn by_hand(host: &Host, before: &str, findings: &mut Findings) -> Result<()> {
    let (_, section) = PAGE.split_once("## By hand, if all else is lost").context("the page has no such section")?;
    let (_, commands) = section.split_once("```sh\n").context("the section has no commands")?;
    let (commands, _) = commands.split_once("```").context("the commands have no end")?;
    margay(host, ["up", "--router"])?;
    ensure!(!host.shell(PROCESSES)?.is_empty(), "no process of Margay is found, so their end proves nothing");
    let pid = agent::pid(host)?;
    host.run(["kill", "-9", &pid.to_string()])?;
    // As typed: a command that fails stops nothing.
    host.run(["sh", "-c", &format!("{commands}\ntrue")])?;
    wait_for("the end of Margay's processes", READY_LIMIT, || {
        let left = host.shell(PROCESSES)?;
        if left.is_empty() { Ok(()) } else { bail!("{left}") }
    })?;
    compare(host, "kill -9, the book's commands", before, findings)?;
    margay(host, ["up", "--router"])?;
    agent::down(host)?;
    compare(host, "up and down after the book's commands", before, findings)
}

fn compare(host: &Host, after: &str, before: &str, findings: &mut Findings) -> Result<()> {
    let now = host.shell(SNAPSHOT)?;
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let (old, new) = (lines(before), lines(&now));
    let gone = old.iter().filter(|line| !new.contains(line)).map(|line| format!("- {line}"));
    let come = new.iter().filter(|line| !old.contains(line)).map(|line| format!("+ {line}"));
    let mut differences: Vec<String> = gone.chain(come).collect();
    if differences.is_empty() && old != new {
        differences.push("the same lines in another order or number".to_owned());
    }
    findings.figures.add("differences", differences.len() as f64);
    for difference in differences.iter().take(8) {
        findings.note(format!("{} after {after}: {difference}", host.name()));
    }
    Ok(())
}
