//! Clients with changed agents try to bypass the middlebox that a name requires. A member's agent that never received
//! the policy sends its usual SYNs and grant requests, and the same with FULL set. Unauthenticated hosts send SYNs with
//! FULL, with chains that they have signed themselves, and with the chain of an honest session.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::super::{PORT, chains, sessions};
use super::{FIREWALL, OPEN, POST, TRIES, Tally};
use crate::agent;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{output_within, wait_for};
use crate::recorder::Recorder;
use crate::scenario::{Findings, pair};
use crate::server;
use crate::traffic::{Evaded, read_frames};

/// Connections of the member with and without FULL, at a rate at which its agent requests grants.
const BURST: f64 = 400.0;
/// Attempts with each trick of the unauthenticated hosts, and the number of tricks.
const COUNT: f64 = 4.0;
const TRICKS: f64 = 7.0;
/// Three tricks are legitimate if no policy requires a middlebox: no chain, FULL, and a middlebox left out.
pub(super) const LET_IN: f64 = 3.0 * COUNT;
pub(super) const REFUSED: f64 = 2.0 * BURST + TRICKS * COUNT;
/// Drop counters of SYNs that are not answered: a handshake with another key than the claimed one, and a session that
/// the server's host has had.
const UNANSWERED: [&str; 2] = ["bad_handshake", "replayed"];
const LIMIT: Duration = Duration::from_secs(30);
/// SYNs (type 1).
const SYNS: &str = "udp[9] == 1";
const CAPTURED: usize = 50;
/// TCP connections to routers: registration, and the distribution of policies.
const LEAVE_ROUTER: &str = "add table inet alone; \
    add chain inet alone out { type filter hook output priority 0; }; \
    add chain inet alone in { type filter hook input priority 0; }; \
    add rule inet alone out tcp dport 54324 drop; \
    add rule inet alone in tcp sport 54324 drop";
/// Sets FULL in each SYN that has RESOLVABLE alone.
const SET_FULL: &str = "add table inet changed; \
    add chain inet changed out { type filter hook output priority 0; }; \
    add rule inet changed out udp dport 54324 @th,72,8 1 @th,80,8 1 @th,80,8 set 3";

/// A member gets grants for a name that requires nothing yet.
pub(super) fn get_granted(member: &Host, server: &Host, findings: &mut Findings) -> Result<()> {
    let to = agent::virtual_addresses(member, POST)?.0;
    let granted = wait_for("grants", LIMIT, || {
        server::connects(member, &to, 1000, 16)?;
        let given = given(server)?;
        ensure!(given > 0.0, "there are none");
        Ok(given)
    })?;
    findings.set("granted", granted);
    Ok(())
}

/// Blocks the host's connection to its router. It keeps its rules, and receives no policy. SAL messages pass.
pub(super) fn leave_router(host: &Host) -> Result<()> {
    host.run(["nft", LEAVE_ROUTER]).map(drop)
}

/// Unblocks it.
pub(super) fn return_to_router(host: &Host) -> Result<()> {
    host.run(["nft", "delete table inet alone"]).map(drop)
}

/// Tries everything against [`POST`], which requires the middlebox by now.
pub(super) fn evade(lab: &Lab, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let (server, client, other) = (lab.host("server")?, lab.host("client")?, lab.host("other")?);
    ensure!(chains(other)?.is_empty(), "the member has received the policy");
    let capture = record_honest(lab, client, tally, findings)?;
    let given_before = given(server)?;
    let of_member = as_member(other, server, tally, findings)?;
    let open = as_strangers(lab, OPEN, &capture, findings)?;
    findings.set("let_in", open.accepted as f64);
    let dropped_before = dropped(server, &UNANSWERED)?;
    let post = as_strangers(lab, POST, &capture, findings)?;
    let unanswered = (post.tried - post.accepted - post.refused) as f64;
    let dropped = unanswered.min(dropped(server, &UNANSWERED)? - dropped_before);
    findings.set("refused_syns", of_member + post.refused as f64 + dropped);
    tally.accepted += post.accepted as f64;
    tally.accepted += given(server)? - given_before;
    // Independent of what the attackers have heard.
    let open = agent::open_flows(server, POST, "tcp")?;
    let established = open.iter().filter(|flow| flow["lifecycle"] == "established");
    for flow in established.clone() {
        findings.note(format!("{POST} has this flow: {flow}"));
    }
    tally.accepted += established.count() as f64;
    Ok(())
}

/// Records SYNs of an honest client's sessions through the middlebox, at the server's host.
fn record_honest(lab: &Lab, client: &Host, tally: &mut Tally, findings: &mut Findings) -> Result<String> {
    let one = lab.host("box1")?;
    let mut recorder = Recorder::start(lab.host("server")?, 0, SYNS, CAPTURED)?;
    let before = sessions(one)?;
    tally.honest_to(POST, client, findings)?;
    ensure!(sessions(one)? > before, "honest sessions do not pass the middlebox");
    // dumpcap writes them some moments later.
    wait_for("SYNs in the capture", LIMIT, || {
        ensure!(read_frames(recorder.file())?.len() >= TRIES as usize, "there are fewer than {TRIES}");
        Ok(())
    })?;
    recorder.finish()?.to_str().map(str::to_owned).context("a path that is no text")
}

/// A member that the server's host gave grants before. Gives the number of SYNs that were refused.
fn as_member(member: &Host, server: &Host, tally: &mut Tally, findings: &mut Findings) -> Result<f64> {
    let to = agent::virtual_addresses(member, POST)?.0;
    let count = BURST.to_string();
    let options = ["--count", &count, "--parallel", "128", "--timeout-ms", "2000"];
    let mut all_refused = 0.0;
    for (what, script) in [("a member without the policy", None), ("the same with FULL", Some(SET_FULL))] {
        script.map_or(Ok(()), |script| member.run(["nft", script]).map(drop))?;
        let asked_before = asked(member)?;
        // For a second after a refusal, its agent requests no grant.
        wait_for("grant requests", LIMIT, || {
            let before = refused(server)?;
            let outcome = server::attempt(member, &to, PORT, &options)?;
            tally.accepted += outcome.ok as f64;
            let (refused, asked) = (refused(server)? - before, asked(member)? - asked_before);
            let said = format!("{what}: {asked} grants requested, {refused} SYNs refused: {:?}", outcome.errors);
            ensure!(asked > 0.0 && refused >= BURST, "{said}");
            findings.note(said);
            all_refused += refused.min(BURST);
            Ok(())
        })?;
    }
    member.run(["nft", "delete table inet changed"])?;
    Ok(all_refused)
}

/// Unauthenticated hosts, at a member's address. The sum of all tricks.
fn as_strangers(lab: &Lab, name: &str, capture: &str, findings: &mut Findings) -> Result<Evaded> {
    let at = pair::address(lab.host("server")?)?;
    let (port, count) = (PORT.to_string(), COUNT.to_string());
    let words = ["evade", "--service", name, "--port", &port, "--middlebox", FIREWALL, "--server", &at];
    let mut command = lab.host("other")?.traffic(words.iter().chain(&["--capture", capture, "--count", &count]))?;
    let output = output_within(&mut command, LIMIT)?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    findings.note(format!("unauthenticated hosts to {name}: {said}"));
    let tricks: BTreeMap<String, Evaded> =
        serde_json::from_str(&said).with_context(|| String::from_utf8_lossy(&output.stderr).trim().to_owned())?;
    let sum = |of: fn(&Evaded) -> u64| tricks.values().map(of).sum();
    Ok(Evaded { tried: sum(|one| one.tried), accepted: sum(|one| one.accepted), refused: sum(|one| one.refused) })
}

fn asked(member: &Host) -> Result<f64> {
    agent::metric(member, "margay_grants_asked_total")
}

fn given(server: &Host) -> Result<f64> {
    agent::metric(server, "margay_grants_given_total")
}

/// SYNs that a policy or an allow list has refused.
pub(super) fn refused(server: &Host) -> Result<f64> {
    dropped(server, &["not_allowed"])
}

fn dropped(server: &Host, reasons: &[&str]) -> Result<f64> {
    let drops = agent::drops(server)?;
    Ok(reasons.iter().filter_map(|reason| drops.get(*reason)).sum())
}
