//! `acl`: who must not connect, does not; who must not answer, is not believed; all of them learn it at once, and
//! honest hosts do not notice.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::{Findings, Scenario};
use crate::agent::{self, READY_LIMIT, margay};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::wait_for;
use crate::report::Limit::{Below, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::server;
use crate::topology::Topology;
use crate::traffic::Outcome;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "acl",
    summary: "hosts that may not connect or may not answer: strangers, missing grants, wrong keys, expired \
              certificates",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("accepted", Exactly(0.0)),
    bound("error_ms_p99", Below(1000.0)),
    bound("honest_failed", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const TRIES: usize = 25;
/// Clocks that differ by more than a certificate lives.
const LATE: &str = "+3d";

const TOPOLOGY: &str = r#"
authority = "shop"

[subnet.site]
v4 = "10.1.0.0/24"

[host.router]
role = "plain"
links = [{ subnet = "site" }]

[host.server]
role = "plain"
links = [{ subnet = "site" }]

# A member of shop, in the group ops.
[host.friend]
role = "plain"
links = [{ subnet = "site" }]

# A member of shop, in no group, that may serve nothing but mail.shop.
[host.other]
role = "plain"
links = [{ subnet = "site" }]

# A member of another authority.
[host.stranger]
role = "plain"
links = [{ subnet = "site" }]

# A member of shop whose clock is days ahead: all certificates have ended for it.
[host.late]
role = "plain"
links = [{ subnet = "site" }]

# Another router of shop, which signs by a warrant, and a host that joined there.
[host.second]
role = "plain"
links = [{ subnet = "site" }]

[host.guest]
role = "plain"
links = [{ subnet = "site" }]

# Belongs to nobody, and trusts nobody.
[host.loner]
role = "plain"
links = [{ subnet = "site" }]

# Calls itself the router of shop, with a key of its own.
[host.rogue]
role = "plain"
links = [{ subnet = "site" }]
"#;

/// What was tried, and what came of it.
#[derive(Default)]
struct Tally {
    accepted: u64,
    error_ms: Vec<f64>,
    honest_failed: u64,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("acl", TOPOLOGY)?, dir)?;
    let [router, server, friend, other, stranger, late] =
        ["router", "server", "friend", "other", "stranger", "late"].map(|name| lab.host(name));
    let (router, server, friend, other) = (router?, server?, friend?, other?);
    margay(router, ["up", "--router"])?;
    for authority in ["shop", "evil"] {
        margay(router, ["id", "authority", "create", authority])?;
    }
    agent::join(server, &token(router, &["shop"])?)?;
    agent::join(friend, &token(router, &["shop", "--group", "ops"])?)?;
    agent::join(other, &token(router, &["shop", "--grant", "mail.shop"])?)?;
    agent::join(stranger?, &token(router, &["evil"])?)?;
    let friend_id = host_id(friend)?;
    let mut echoes = Vec::new();
    for (port, name, allow) in [
        (7, "open.shop", "authority".to_owned()),
        (8, "ops.shop", "group:ops".to_owned()),
        (9, "one.shop", format!("host:{friend_id}")),
    ] {
        echoes.push(server::echo(server, &[format!("0.0.0.0:{port}").parse()?])?);
        agent::publish(server, name, &format!("0.0.0.0:{port}"), &["--allow", &allow])?;
    }
    let mut tally = Tally::default();
    for (name, port) in [("open.shop", 7), ("ops.shop", 8), ("one.shop", 9)] {
        honest(friend, name, port, &mut tally, findings)?;
    }
    honest(other, "open.shop", 7, &mut tally, findings)?;
    refused(other, "ops.shop", 8, "a member outside the group", &mut tally, findings)?;
    refused(other, "one.shop", 9, "a member that is not the host named", &mut tally, findings)?;
    refused(lab.host("stranger")?, "open.shop", 7, "a member of another authority", &mut tally, findings)?;
    forged_registration(other, friend, &mut tally, findings)?;
    warranted(&lab, &mut tally, findings)?;
    taken_back(&lab, &mut tally, findings)?;
    let keyed = key_elsewhere(router, server, friend, &mut tally, findings)?;
    key_of_nobody(&lab, &keyed, &mut tally, findings)?;
    expired(router, late?)?;
    honest(friend, "open.shop", 7, &mut tally, findings)?;
    rogue_router(router, lab.host("rogue")?, friend, &mut tally, findings)?;
    findings.set("accepted", tally.accepted as f64);
    findings.set("error_ms_p99", percentile(&tally.error_ms, 99.0));
    findings.set("honest_failed", tally.honest_failed as f64);
    findings.set("refusals", tally.error_ms.len() as f64);
    findings.figures.add("failed", 0.0);
    Ok(())
}

fn token(router: &Host, words: &[&str]) -> Result<String> {
    let words = ["id", "token", "create"].into_iter().chain(words.iter().copied());
    Ok(margay(router, words)?.trim().to_owned())
}

fn host_id(host: &Host) -> Result<String> {
    let status = agent::status(host)?;
    Ok(status["host_id"].as_str().context("the agent has no host-ID")?.to_owned())
}

fn attempts(host: &Host, name: &str, port: u16) -> Result<Outcome> {
    server::attempt(host, &format!("{name}.sal.internal"), port, &["--count", &TRIES.to_string()])
}

fn honest(host: &Host, name: &str, port: u16, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let outcome = attempts(host, name, port)?;
    if outcome.ok != TRIES as u64 {
        findings.note(format!("{} to {name}: {:?}", host.name(), outcome.errors));
    }
    tally.honest_failed += TRIES as u64 - outcome.ok;
    Ok(())
}

fn refused(host: &Host, name: &str, port: u16, who: &str, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let outcome = attempts(host, name, port)?;
    tally.accepted += outcome.ok;
    let slowest = outcome.error_ms.iter().copied().fold(0.0, f64::max);
    findings.note(format!("{who}: {:?}, at the latest after {slowest:.1} ms", outcome.errors));
    tally.error_ms.extend(outcome.error_ms);
    Ok(())
}

/// A member publishes a name that it has no grant for: the router refuses, and nobody is sent there.
fn forged_registration(other: &Host, friend: &Host, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let _echo = server::echo(other, &["0.0.0.0:10".parse()?])?;
    margay(other, ["service", "publish", "bank.shop", "--listen", "0.0.0.0:10"])?;
    wait_for("the router's refusal", READY_LIMIT, || {
        let shown = agent::show(other, "bank.shop")?;
        match shown["service"]["state"].as_str() {
            Some("refused") => Ok(()),
            state => bail!("the state of bank.shop is {state:?}"),
        }
    })?;
    refused(friend, "bank.shop", 10, "a name whose only server has no grant", tally, findings)?;
    agent::withdraw(other, "bank.shop")
}

/// Hosts of one authority believe each other, whichever of its routers has signed for them; a warrant that a third host
/// holds gives it nothing.
fn warranted(lab: &Lab, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let [router, second, guest] = [lab.host("router")?, lab.host("second")?, lab.host("guest")?];
    let [server, friend, other] = [lab.host("server")?, lab.host("friend")?, lab.host("other")?];
    margay(second, ["up", "--router"])?;
    let request = margay(second, ["id", "authority", "request", "shop"])?;
    if margay(second, ["id", "token", "create", "shop"]).is_ok() {
        bail!("a router that has only asked gives out tokens");
    }
    let warrant = margay(router, ["id", "authority", "sign", request.trim(), "--lifetime", "1h"])?;
    if margay(other, ["id", "accept", warrant.trim()]).is_ok() {
        bail!("a host has taken the warrant of another");
    }
    margay(second, ["id", "accept", warrant.trim()])?;
    agent::join(guest, &token(second, &["shop"])?)?;
    let _echo = server::echo(guest, &["0.0.0.0:11".parse()?])?;
    agent::publish(guest, "guest.shop", "0.0.0.0:11", &[])?;
    // The routers know nothing of each other: the way there is said by hand.
    for (from, name, to) in [(guest, "open.shop", server), (friend, "guest.shop", guest)] {
        let address = to.plan.address().context("no address")?.to_string();
        margay(from, ["route", "add", name, "forward", &address])?;
    }
    honest(guest, "open.shop", 7, tally, findings)?;
    honest(friend, "guest.shop", 11, tally, findings)
}

/// The authority takes back what the second router may sign: who is shown by its word alone neither connects nor
/// answers, until another router has let it in.
fn taken_back(lab: &Lab, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let [router, second, guest] = [lab.host("router")?, lab.host("second")?, lab.host("guest")?];
    let [server, friend] = [lab.host("server")?, lab.host("friend")?];
    let _echo = server::echo(guest, &["0.0.0.0:11".parse()?])?;
    let identity: serde_json::Value = serde_json::from_str(&margay(second, ["id", "--json"])?)?;
    let key = identity["warrants"][0]["signs_with"].as_str().context("the second router shows no key")?;
    if margay(second, ["id", "authority", "revoke", "shop", key]).is_ok() {
        bail!("a router without the authority's key takes back what a key may sign");
    }
    let revocation = margay(router, ["id", "authority", "revoke", "shop", key])?;
    for host in [server, friend] {
        wait_for(&format!("the news at {}", host.name()), READY_LIMIT, || {
            let heard = agent::metric(host, "margay_revocations")?;
            if heard >= 1.0 { Ok(()) } else { bail!("it has heard of {heard} revocations") }
        })?;
    }
    refused(guest, "open.shop", 7, "a member by the word of a router that may sign no longer", tally, findings)?;
    refused(friend, "guest.shop", 11, "an instance by the word of a router that may sign no longer", tally, findings)?;
    honest(friend, "open.shop", 7, tally, findings)?;
    if !margay(router, ["audit", "list"])?.contains("key-revoke") {
        bail!("the router's log does not say that a key was revoked");
    }
    margay(second, ["id", "accept", revocation.trim()])?;
    if margay(second, ["id", "token", "create", "shop"]).is_ok() {
        bail!("a router that may sign no longer gives out tokens");
    }
    let request = margay(second, ["id", "authority", "request", "shop"])?;
    margay(router, ["id", "authority", "sign", request.trim(), "--lifetime", "1h"])?;
    agent::down(guest)?;
    agent::join(guest, &token(router, &["shop"])?)?;
    honest(guest, "open.shop", 7, tally, findings)?;
    honest(friend, "guest.shop", 11, tally, findings)
}

/// A host that has joined nobody asks its segment for the name of a key. One serves it and shows nothing: it has no
/// connection with that one, and has one as soon as a host is there that shows the key's own word.
fn key_of_nobody(lab: &Lab, name: &str, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let [loner, other, server] = [lab.host("loner")?, lab.host("other")?, lab.host("server")?];
    let listen = "0.0.0.0:12".parse()?;
    let _echoes = [server::echo(other, &[listen])?, server::echo(server, &[listen])?];
    let publish = |host| margay(host, ["service", "publish", name, "--listen", "0.0.0.0:12", "--allow", "any"]);
    margay(loner, ["up"])?;
    agent::withdraw(server, name)?;
    publish(other)?;
    let address = agent::virtual_addresses(loner, name)?.0;
    // Each waits for others to answer, as long as a segment has time to.
    let outcome = server::attempt(loner, &address, 12, &["--count", "2"])?;
    tally.accepted += outcome.ok;
    findings.note(format!("the name of a key, by a host that does not have its word: {:?}", outcome.errors));
    publish(server)?;
    let outcome = server::attempt(loner, &address, 12, &["--count", &TRIES.to_string()])?;
    if outcome.ok != TRIES as u64 {
        findings.note(format!("to the name of a key, by its own word: {:?}", outcome.errors));
    }
    tally.honest_failed += TRIES as u64 - outcome.ok;
    agent::withdraw(other, name)
}

/// A host that a service's key lets answer does, and without that key's word it is not listed. Gives the name.
fn key_elsewhere(
    holder: &Host,
    server: &Host,
    friend: &Host,
    tally: &mut Tally,
    findings: &mut Findings,
) -> Result<String> {
    let name = margay(holder, ["id", "key", "create", "own.shop"])?.trim().to_owned();
    let _echo = server::echo(server, &["0.0.0.0:12".parse()?])?;
    let publish = |state: &str| {
        margay(server, ["service", "publish", &name, "--listen", "0.0.0.0:12"])?;
        wait_for("the router's word on the key's name", READY_LIMIT, || {
            let shown = agent::show(server, &name)?;
            let found = shown["service"]["state"].as_str().unwrap_or_default();
            if found == state { Ok(()) } else { bail!("the state of {name} is {found}, not {state}") }
        })
    };
    publish("refused")?;
    agent::withdraw(server, &name)?;
    let identity: serde_json::Value = serde_json::from_str(&margay(server, ["id", "--json"])?)?;
    let key = identity["host_key"].as_str().context("the agent shows no host key")?;
    let warrant = margay(holder, ["id", "key", "sign", "own.shop", "--host", key])?;
    margay(server, ["id", "accept", warrant.trim()])?;
    publish("registered")?;
    let address = agent::virtual_addresses(friend, &name)?.0;
    let outcome = server::attempt(friend, &address, 12, &["--count", &TRIES.to_string()])?;
    if outcome.ok != TRIES as u64 {
        findings.note(format!("to the name of a key that is elsewhere: {:?}", outcome.errors));
    }
    tally.honest_failed += TRIES as u64 - outcome.ok;
    Ok(name)
}

/// A host whose clock is beyond the end of every certificate believes nobody, not even its router; and a token that has
/// expired admits nobody.
fn expired(router: &Host, late: &Host) -> Result<()> {
    let short = token(router, &["shop", "--lifetime", "1s"])?;
    wait_for("the end of the token", READY_LIMIT, || {
        let listed = margay(router, ["id", "token", "list"])?;
        if listed.contains("expired") { Ok(()) } else { bail!("no token has expired: {listed}") }
    })?;
    match margay(late, ["up", "--join", &short]) {
        Ok(_) => bail!("a host has joined with an expired token"),
        Err(error) => ensure!(format!("{error:#}").contains("expired"), "the reason is another one: {error:#}"),
    }
    ensure!(agent::pid(late).is_err(), "an agent is left of a join that failed");
    let library = late.shell("ls /usr/lib/*/faketime/libfaketime.so.1 | head -n 1")?;
    let (preload, clock) = (format!("LD_PRELOAD={}", library.trim()), format!("FAKETIME={LATE}"));
    let program = crate::fabric::margay_program()?;
    let program = program.to_str().context("the program's path is no text")?;
    // The program's clocks that only measure time are left alone.
    let ahead = ["env", &preload, &clock, "DONT_FAKE_MONOTONIC=1", program, "up"];
    match late.run(ahead.iter().copied().chain(["--join", &token(router, &["shop"])?])) {
        Ok(_) => bail!("a host has joined whose clock says that the router's certificate has expired"),
        Err(error) => {
            ensure!(format!("{error:#}").contains("check both clocks"), "the reason is another one: {error:#}")
        }
    }
    ensure!(agent::pid(late).is_err(), "an agent is left of a join that failed");
    Ok(())
}

/// Another host takes the router's address, calls itself router of shop, and answers for its names with a key of its
/// own.
fn rogue_router(router: &Host, rogue: &Host, friend: &Host, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let address = router.plan.address().context("the router has no address")?;
    let _echo = server::echo(rogue, &["0.0.0.0:7".parse()?])?;
    agent::down(router)?;
    router.run(["ip", "addr", "del", &format!("{address}/24"), "dev", "eth0"])?;
    rogue.run(["ip", "addr", "add", &format!("{address}/24"), "dev", "eth0"])?;
    rogue.run([
        "ping",
        "-c",
        "1",
        "-I",
        &address.to_string(),
        &friend.plan.address().context("no address")?.to_string(),
    ])?;
    margay(rogue, ["up", "--router"])?;
    margay(rogue, ["id", "authority", "create", "shop"])?;
    margay(rogue, ["service", "publish", "open.shop", "--listen", "0.0.0.0:7"])?;
    wait_for("the friend's distrust of the rogue", READY_LIMIT, || {
        let status = agent::status(friend)?;
        match status["routers"][0]["state"].as_str() {
            Some("refused") => Ok(()),
            state => bail!("its router is {state:?}"),
        }
    })?;
    refused(friend, "open.shop", 7, "an impostor at the router's address, with a key of its own", tally, findings)
}
