//! `margay lab demo`: the main job on real programs, and in words.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::agent::{self, Agents};
use crate::fabric::Privilege;
use crate::host::{Host, write_line};
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::scenario::late_binding::TOPOLOGY;
use crate::server::{Nginx, fetch, fetch_text, noise, sha256};
use crate::topology::Topology;

const SERVICE: &str = "web.shop";
const URL: &str = "http://web.shop.sal.internal";
const GREETINGS: usize = 12;
const DOWNLOADS: usize = 8;
const FILE_BYTES: usize = 10_000_000;
const NEXT_LIMIT: Duration = Duration::from_secs(5);

/// Does it, and says what happens. Returns the exit status.
///
/// # Errors
///
/// The lab cannot be built.
pub fn perform(dir: &Path) -> Result<u8> {
    say(&format!("Four hosts on this machine, as network namespaces ({}).", Privilege::of_this_process().sentence()))?;
    let lab = Lab::build(Topology::parse("examples/web-shop.toml", TOPOLOGY)?, dir)?;
    say("
  client ──┐            ┌── web1   nginx
           ├─ one site ─┤
  router ──┘            └── web2   nginx
")?;
    say("On the router:   margay up --router;  margay id authority create shop;  margay id token create shop")?;
    say("On the others:   margay up --join TOKEN")?;
    let _agents = Agents::start(&lab)?;
    let (client, router) = (lab.host("client")?, lab.host("router")?);
    let content = noise(FILE_BYTES, 1);
    let mut servers = Vec::new();
    say("On web1, web2:   nginx;  margay service publish web.shop --listen 0.0.0.0:80\n")?;
    for name in ["web1", "web2"] {
        let server = Nginx::start(lab.host(name)?, &["0.0.0.0:80"])?;
        server.put("file", &content)?;
        agent::publish(lab.host(name)?, SERVICE, "0.0.0.0:80", &[])?;
        servers.push(server);
    }
    agent::await_instances(router, SERVICE, 2)?;
    say("What the client knows of the name:")?;
    quote(&agent::margay(client, ["service", "resolve", SERVICE])?)?;

    say(&format!("{GREETINGS} times on the client:   curl {URL}/host"))?;
    let mut answered = Vec::new();
    for _ in 0..GREETINGS {
        answered.push(fetch_text(client, &format!("{URL}/host"))?);
    }
    say(&format!("    {}\n", answered.join(" ")))?;

    let wrong = download(client, router, &servers)?;
    let kept = withdraw(&lab, client)?;
    say(if wrong == 0 && kept { "All of it went as it should." } else { "Something went wrong; see above." })?;
    Ok(u8::from(wrong != 0 || !kept))
}

fn say(text: &str) -> Result<()> {
    write_line(text)
}

fn quote(text: &str) -> Result<()> {
    for line in text.lines() {
        say(&format!("    {line}"))?;
    }
    say("")
}

/// Files by name, with the router's packets counted by its kernel.
fn download(client: &Host, router: &Host, servers: &[Nginx]) -> Result<usize> {
    let expected = sha256(client, &servers[0].root.join("file"))?;
    observe::count(router, "seen", Passing::In, "udp dport 54324")?;
    observe::count(router, "sent", Passing::Out, "udp sport 54324")?;
    say(&format!("{DOWNLOADS} files of {} MB, by name, with the router's kernel counting:", FILE_BYTES / 1_000_000))?;
    let start = Instant::now();
    let mut wrong = 0;
    for _ in 0..DOWNLOADS {
        let got = fetch(client, &[], &format!("{URL}/file"))?;
        if !got.is(&expected) {
            say(&format!("    a file is wrong: {}", got.error))?;
            wrong += 1;
        }
    }
    let counts = observe::counts(router)?;
    let (packets, bytes): (f64, f64) =
        counts.values().fold((0.0, 0.0), |sum, count| (sum.0 + count.packets, sum.1 + count.bytes));
    let megabytes = (DOWNLOADS * FILE_BYTES) as f64 / 1e6;
    let served: Vec<String> = servers.iter().map(|server| server.served("file").to_string()).collect();
    say(&format!(
        "    {megabytes:.0} MB in {:.2} s, served by web1 and web2: {}; checksums right: {} of {DOWNLOADS}",
        start.elapsed().as_secs_f64(),
        served.join(" and "),
        DOWNLOADS - wrong
    ))?;
    say(&format!(
        "    through the router: {packets:.0} packets, {:.1} KB: first packets, and nothing of the data\n",
        bytes / 1e3
    ))?;
    Ok(wrong)
}

/// An instance goes; the next connections find the other.
fn withdraw(lab: &Lab, client: &Host) -> Result<bool> {
    say("On web2:         margay service withdraw web.shop")?;
    let start = Instant::now();
    agent::withdraw(lab.host("web2")?, SERVICE)?;
    while fetch_text(client, &format!("{URL}/host"))? != "web1" {
        if start.elapsed() > NEXT_LIMIT {
            bail!("the withdrawn instance still gets connections");
        }
    }
    say(&format!("    the next connection was answered by web1, {} ms after the word", start.elapsed().as_millis()))?;
    let mut answered = Vec::new();
    for _ in 0..GREETINGS {
        answered.push(fetch_text(client, &format!("{URL}/host"))?);
    }
    say(&format!("    {}\n", answered.join(" ")))?;
    Ok(answered.iter().all(|name| name == "web1"))
}
