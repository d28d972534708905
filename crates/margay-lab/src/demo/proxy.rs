//! The act of a proxy that leaves: a download runs through HAProxy, on a slow link, and goes on without it; a scrubber
//! is put into it and taken out again.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{quote, say};
use crate::agent::{self, Agents, margay};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::{Program, wait_for};
use crate::scenario::af_serval::programs::Programs;
use crate::scenario::chain::leaving::{Front, haproxy};
use crate::scenario::chain::{apply, build, chain, serve};
use crate::server::{Nginx, noise, sha256};
use crate::wire;

const GATE: &str = "gate.shop";
const WEB: &str = "web.shop";
const SCRUBBER: &str = "scrub.shop";
const PORT: u16 = 80;
const FILE_BYTES: usize = 240_000_000;
/// The proxy's link.
const PROXY_MBIT: u32 = 64;
/// What the client takes at most, in megabytes per second.
const CLIENT_MBYTES: u32 = 24;
const WINDOW: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(20);

/// A download, by the file that it writes.
struct Download<'a> {
    into: &'a Path,
    proxy: &'a Program,
}

impl Download<'_> {
    fn bytes(&self) -> u64 {
        std::fs::metadata(self.into).map_or(0, |file| file.len())
    }

    /// How fast it is, and what the proxy takes of a processor, for a while.
    fn measure(&self, what: &str) -> Result<(f64, f64)> {
        let before = (self.bytes(), observe::processor_seconds(self.proxy.pid())?, Instant::now());
        std::thread::sleep(WINDOW);
        let elapsed_s = before.2.elapsed().as_secs_f64();
        let rate = (self.bytes() - before.0) as f64 / 1e6 / elapsed_s;
        let share = (observe::processor_seconds(self.proxy.pid())? - before.1) / elapsed_s;
        say(&format!("    {rate:>6.1} MB/s, HAProxy takes {:>4.1} % of a processor   {what}", share * 100.0))?;
        Ok((rate, share))
    }
}

/// Does it, on hosts of its own. Gives whether all went well.
pub fn leave_a_download(dir: &Path) -> Result<bool> {
    say("A download through a proxy on a slow link, on five hosts of their own:

  client ──── HAProxy (gate.shop) ──── nginx (web.shop)        scrub.shop: a firewall, for later
")?;
    let lab = build("demo-proxy", 1, &["proxy"], dir)?;
    let _agents = Agents::start(&lab)?;
    let [client, proxy, scrubber] = [lab.host("client")?, lab.host("proxy")?, lab.host("box1")?];
    let shim = Programs::make(dir)?.shim();
    let nginx = serve_file(&lab)?;
    offer_scrubber(&lab)?;
    say("On proxy:   margay run --service gate.shop --splice 80 --splice-when GO -- haproxy -db -f proxy.cfg\n")?;
    let when = proxy.dir.join("go");
    let front = haproxy(proxy, &shim, &Front { port: PORT, to: WEB, when: &when })?;
    agent::publish(proxy, GATE, "0.0.0.0:80", &[])?;
    agent::await_instances(client, GATE, 1)?;

    let into = client.dir.join("downloaded");
    let mut curl = begin(client, &into)?;
    let download = Download { into: &into, proxy: &front };
    wait_for("the download", LIMIT, || {
        ensure!(download.bytes() > 1_000_000, "it has not begun");
        Ok(())
    })?;
    let through = download.measure("through the proxy")?;

    say("\nOn proxy:   touch GO")?;
    std::fs::write(&when, "").context("cannot write the word to leave")?;
    wait_for("the proxy to leave", LIMIT, || {
        let flows = agent::flows(proxy)?.len();
        ensure!(flows == 0, "it has {flows} flows");
        Ok(())
    })?;
    let without = download.measure("since it has left")?;

    let (scrubbed, is_scrubbed) = scrub(client, scrubber, &download)?;
    let status = curl.finish(Duration::from_secs(60));
    let has_content = sha256(client, &into)? == sha256(client, &nginx.root.join("file"))?;
    say(&format!(
        "    the download {}; its hash is {}\n",
        if status.is_ok() { "has ended well" } else { "has FAILED" },
        if has_content { "right" } else { "WRONG" }
    ))?;
    let is_faster = without.0 > through.0 * 1.5 && without.1 < 0.02 && scrubbed > through.0;
    Ok(is_faster && is_scrubbed && status.is_ok() && has_content)
}

/// The proxy's slow link, and the file behind it.
fn serve_file(lab: &Lab) -> Result<Nginx> {
    let [server, proxy] = [lab.host("server")?, lab.host("proxy")?];
    wire::set_rate(Some(proxy), "eth0", PROXY_MBIT)?;
    let nginx = Nginx::start(server, &["0.0.0.0:80"])?;
    nginx.put("file", &noise(FILE_BYTES, 3))?;
    agent::publish(server, WEB, "0.0.0.0:80", &[])?;
    agent::await_instances(proxy, WEB, 1)?;
    Ok(nginx)
}

/// A box that no session goes through by itself.
fn offer_scrubber(lab: &Lab) -> Result<()> {
    let scrubber = lab.host("box1")?;
    say("On box1:    margay middlebox serve scrub.shop --kind forward")?;
    serve(scrubber, SCRUBBER, "forward", &[])?;
    observe::count(scrubber, "passed", Passing::In, "iifname \"sal0\"")?;
    let hosts: Vec<&Host> = lab.hosts.iter().collect();
    apply(lab.host("router")?, &chain("known", "nobody.shop", &[SCRUBBER], ""), &hosts, &["known"])?;
    agent::await_instances(lab.host("client")?, SCRUBBER, 1)
}

fn begin(client: &Host, into: &Path) -> Result<Program> {
    let path = into.to_str().context("the path is no text")?;
    let limit = format!("{CLIENT_MBYTES}M");
    let words = ["curl", "-sS", "--fail", "--limit-rate", &limit, "-o", path, "http://gate.shop.sal.internal/file"];
    say("On client:  curl http://gate.shop.sal.internal/file")?;
    client.spawn("download", words)
}

/// Puts the scrubber into the download, and takes it out. Gives the rate meanwhile, in megabytes per second, and
/// whether the scrubber has come, seen the download, and gone.
fn scrub(client: &Host, scrubber: &Host, download: &Download<'_>) -> Result<(f64, bool)> {
    say("\nOn client:  margay chain insert scrub.shop --name web.shop")?;
    let is_in = change(client, "insert")?;
    let scrubbed = download.measure("through the scrubber")?;
    let seen = observe::counts(scrubber)?.get("passed").map_or(0.0, |one| one.packets);
    say(&format!("            the scrubber has seen {seen} packets"))?;
    say("On client:  margay chain remove scrub.shop --name web.shop")?;
    let is_out = change(client, "remove")?;
    let shown = agent::flows(client)?;
    let flow = shown.iter().find(|flow| flow["service"] == WEB).and_then(|flow| flow["flow"].as_str());
    if let Some(flow) = flow {
        quote(&margay(client, ["flow", "show", flow])?)?;
    }
    Ok((scrubbed.0, is_in && is_out && seen > 10.0))
}

/// Changes the boxes of the download. Whether that has worked.
fn change(client: &Host, verb: &str) -> Result<bool> {
    let said = margay(client, ["chain", verb, SCRUBBER, "--name", WEB, "--json"])?;
    let reply: Value = serde_json::from_str(&said)?;
    let done = reply["changed"].as_array().into_iter().flatten().filter(|one| one["outcome"] == "done").count();
    if done == 0 {
        quote(&said)?;
    }
    Ok(done > 0)
}
