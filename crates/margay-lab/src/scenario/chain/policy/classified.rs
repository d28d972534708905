//! A box that classifies: it names the next box of the sessions of one client, as the signed policy lets it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};

use super::{NAME, Stage};
use crate::agent::{READY_LIMIT, margay};
use crate::program::{Program, wait_for};
use crate::python;
use crate::scenario::Findings;
use crate::scenario::chain::{PORT, ZONE, agent_program, apply, chain, try_apply};

const CLASSIFIER: &str = include_str!("../../../../../../examples/classifying-box.py");

/// Sessions of the client go through both boxes, those of the other host through the first one alone.
pub(super) fn judge(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let client = stage.client;
    let other = stage.other;
    let one = stage.boxes[0];
    let policy = chain("sort", NAME, &["fw.shop"], "may_add = [\"ids.shop\"]");
    let shown = try_apply(stage.router, &policy, &["--dry-run"])?;
    ensure!(shown.contains("through fw.shop, whose hosts may add ids.shop"), "the dry run shows: {shown}");
    apply(stage.router, &policy, &stage.all, &["sort"])?;
    stage.go(client, [true, false], findings)?;
    let network = match stage.address {
        IpAddr::V4(v4) => format!("{v4}/32"),
        IpAddr::V6(v6) => format!("{v6}/128"),
    };
    let mut classifier = python::sdk(one, "classifying-box.py", CLASSIFIER, &[&network, "ids.shop"])?;
    wait_for("the classifier", READY_LIMIT, || {
        if classifier.log().contains("sorting") { Ok(()) } else { bail!("it says: {}", classifier.log()) }
    })?;
    let before = named(&classifier);
    stage.go(client, [true, true], findings)?;
    findings.set("classified", (named(&classifier) - before) as f64);
    stage.go(other, [true, false], findings)?;
    foreign(stage, &classifier)?;
    // What the policy does not let it add it does not add, and the session goes on as it was to go.
    apply(stage.router, &chain("sort", NAME, &["fw.shop"], ""), &stage.all, &["sort"])?;
    stage.go(client, [true, false], findings)?;
    let log = classifier.log();
    ensure!(log.contains("ids.shop is not added: no chain of the policy"), "the classifier says: {log}");
    // A service that demands the first box takes what its host has added behind it.
    let required = format!("[[require]]\nname = \"{NAME}\"\nboxes = [\"fw.shop\"]\n");
    apply(stage.router, &format!("{policy}{required}"), &stage.all, &["sort"])?;
    stage.go(client, [true, true], findings)?;
    stage.go(other, [true, false], findings)?;
    classifier.stop();
    one.run(["nft", "delete table inet sort"])?;
    let policy = chain("inspect", NAME, &["fw.shop", "ids.shop"], "");
    apply(stage.router, &format!("require = []\n{policy}"), &stage.all, &["inspect"]).map(drop)
}

/// How many sessions the classifier has named a box for; a first packet that comes twice is named twice.
fn named(classifier: &Program) -> usize {
    let log = classifier.log();
    log.lines().filter(|line| line.starts_with("named ")).collect::<BTreeSet<_>>().len()
}

/// A session that runs: its boxes are shown, its first packet has left the box, and it is no other user's to steer.
fn foreign(stage: &Stage<'_>, classifier: &Program) -> Result<()> {
    let script = format!("exec 3<>/dev/tcp/{NAME}.{ZONE}/{PORT}; echo connected; sleep 60");
    let before = named(classifier);
    let mut held = stage.client.spawn("held", ["bash", "-c", &script])?;
    let log = wait_for("a session that stays", READY_LIMIT, || {
        ensure!(held.log().contains("connected"), "it says: {}", held.log());
        if named(classifier) > before {
            Ok(classifier.log())
        } else {
            bail!("the classifier says: {}", classifier.log())
        }
    })?;
    let shown = margay(stage.client, ["chain", "show"])?;
    ensure!(shown.contains("client > fw.shop at box1 > added ids.shop at box2 > server"), "it shows: {shown}");
    let words = log.lines().rfind(|line| line.starts_with("named ")).map(|line| line.split(' ').skip(1));
    let words: Vec<&str> = words.into_iter().flatten().collect();
    let [source, port, destination, to_port] = words[..] else { bail!("the classifier says: {log}") };
    let joined = |ip: &str, port: &str| -> Result<String> {
        let ip: IpAddr = ip.parse().context("no address")?;
        Ok(SocketAddr::new(ip, port.parse()?).to_string())
    };
    let from = joined(source, port)?;
    let to = joined(destination, to_port)?;
    let program = agent_program()?;
    let ask = ["middlebox", "next", "web2.shop", "--from", &from, "--to", &to];
    let one = stage.boxes[0];
    let refused = |words: Vec<&str>, reason: &str| match one.run(words) {
        Ok(said) => bail!("taken, and should be refused with `{reason}`: {said}"),
        Err(error) => {
            let text = format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ");
            if text.contains(reason) { Ok(()) } else { bail!("`{reason}` is not in: {text}") }
        }
    };
    let own: Vec<&str> = [program.as_str()].into_iter().chain(ask).collect();
    refused(own.clone(), "first packet has left the box")?;
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    refused(nobody.into_iter().chain(own).collect(), "has no right to fw.shop")?;
    let unknown = joined(source, "1")?;
    let ask = ["middlebox", "next", "ids.shop", "--from", &unknown, "--to", &to];
    refused([program.as_str()].into_iter().chain(ask).collect(), "no session with these")?;
    held.stop();
    Ok(())
}
