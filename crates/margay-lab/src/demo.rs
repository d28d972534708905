//! `margay-lab demo`: the main job on real programs, and in words.

mod cache;
mod proxy;
mod stacks;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::agent::{self, Agents};
use crate::downloads::{self, Downloads, Order};
use crate::fabric::Privilege;
use crate::host::{Host, write_line};
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::scenario::late_binding::TOPOLOGY;
use crate::server::{Nginx, fetch, fetch_text, noise, sha256};
use crate::sessions::Sessions;
use crate::topology::Topology;
use crate::traffic::Step;
use crate::upgrading::Serving;

const SERVICE: &str = "web.shop";
const URL: &str = "http://web.shop.sal.internal";
const GREETINGS: usize = 12;
const DOWNLOADS: usize = 4;
const FILE_BYTES: usize = 100_000_000;
/// Transfers that go on while agents are killed, and their time in seconds.
const HELD: usize = 8;
const HELD_S: u64 = 8;
/// Transfers that go on while a host is drained, and their time in seconds.
const DRAINED: usize = 8;
const DRAINED_S: u64 = 4;
const DEADLINE: &str = "30s";
/// What is served by a server that gives its connections away.
const LIVE: &str = "live.shop";
const LIVE_LISTEN: &str = "0.0.0.0:81";
const LIVE_PORT: u16 = 81;
const SESSIONS: usize = 12;
/// Transfers that go on while addresses change.
const WANDERING: usize = 4;
/// What is drawn of each stage, and how wide the usual rate is.
const PART: Duration = Duration::from_millis(150);
const PARTS: usize = 6;
const BAR: usize = 40;
/// How long no agent lives.
const DEAD: Duration = Duration::from_secs(2);
const END_LIMIT: Duration = Duration::from_secs(60);
const NEXT_LIMIT: Duration = Duration::from_secs(5);

/// What is shown, each part in a lab of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// A service with two instances, whose hosts are drained, move, and lose their agents
    Shop,
    /// One connection to many memcacheds, which come and go
    Cache,
    /// A download through a proxy, which leaves, and through a scrubber, which comes and goes
    Proxy,
    /// A stream that is sealed, repaired and plain, by rules
    Stacks,
}

impl Part {
    /// All of them, in order.
    pub const ALL: [Self; 4] = [Self::Shop, Self::Cache, Self::Stacks, Self::Proxy];

    /// As it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shop => "shop",
            Self::Cache => "cache",
            Self::Proxy => "proxy",
            Self::Stacks => "stacks",
        }
    }
}

/// Does it, and says what happens. Returns the exit status.
///
/// # Errors
///
/// The lab cannot be built.
pub fn perform(part: Part, dir: &Path) -> Result<u8> {
    let went_well = match part {
        Part::Shop => shop(dir)?,
        Part::Cache => cache::share_a_cache(dir)?,
        Part::Proxy => proxy::leave_a_download(dir)?,
        Part::Stacks => stacks::perform(dir)?,
    };
    Ok(u8::from(!went_well))
}

/// A service with two instances.
fn shop(dir: &Path) -> Result<bool> {
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

    let acts = [
        download(client, router, &servers)?,
        kill_all(&lab, client, &servers)?,
        maintain(&lab, client, &servers)?,
        wander(&lab, client, &servers)?,
    ];
    Ok(acts.into_iter().all(|went_well| went_well))
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

/// One file fetched, by curl's account.
struct Transfer {
    megabytes_per_s: f64,
    local_port: String,
}

fn transfer(client: &Host, url: &str) -> Result<Transfer> {
    const FORMAT: &str = "%{speed_download} %{local_port}";
    let text = client.run(["curl", "-sS", "--fail", "--max-time", "30", "-o", "/dev/null", "-w", FORMAT, url])?;
    let mut words = text.split_whitespace();
    let speed: f64 = words.next().context("curl says no speed")?.parse().context("curl's speed is no number")?;
    Ok(Transfer { megabytes_per_s: speed / 1e6, local_port: words.next().context("curl says no port")?.to_owned() })
}

/// Files by name and by address, with the router's packets counted by its kernel.
fn download(client: &Host, router: &Host, servers: &[Nginx]) -> Result<bool> {
    observe::count(router, "seen", Passing::In, "udp dport 54324")?;
    observe::count(router, "sent", Passing::Out, "udp sport 54324")?;
    say(&format!("{DOWNLOADS} files of {} MB, by name, and beside each what plain TCP does:", FILE_BYTES / 1_000_000))?;
    for _ in 0..DOWNLOADS {
        let named = transfer(client, &format!("{URL}/file"))?;
        let is_its = |flow: &&Value| {
            flow["app_source"].as_str().is_some_and(|source| source.rsplit(':').next() == Some(&named.local_port))
        };
        let flows = agent::flows(client)?;
        let flow = flows.iter().find(is_its).context("the flow is not on the client's list")?;
        let remote = flow["remote"].as_str().and_then(|remote| remote.rsplit_once(':')).context("it has no remote")?.0;
        let plain = transfer(client, &format!("http://{remote}/file"))?;
        say(&format!(
            "    by name {:>6.0} MB/s   {:12}   to {remote}: plain TCP {:>6.0} MB/s",
            named.megabytes_per_s,
            flow["path"].as_str().unwrap_or_default(),
            plain.megabytes_per_s
        ))?;
    }
    let counts = observe::counts(router)?;
    let (packets, bytes): (f64, f64) =
        counts.values().fold((0.0, 0.0), |sum, count| (sum.0 + count.packets, sum.1 + count.bytes));
    let expected = sha256(client, &servers[0].root.join("file"))?;
    let is_right = fetch(client, &[], &format!("{URL}/file"))?.is(&expected);
    let verdict = if is_right { "right" } else { "WRONG" };
    say(&format!(
        "    through the router: {packets:.0} packets, {:.1} KB: first packets, and nothing of the data; checksum \
         {verdict}\n",
        bytes / 1e3
    ))?;
    Ok(is_right)
}

/// All agents are killed under transfers, and started again.
fn kill_all(lab: &Lab, client: &Host, servers: &[Nginx]) -> Result<bool> {
    say(&format!("{HELD} transfers begin, and on every host:   kill -9 $(pidof margay)"))?;
    let name = URL.trim_start_matches("http://");
    let order = Order { host: name, path: "file", count: HELD, pace: FILE_BYTES as u64 / HELD_S };
    let mut running = Downloads::start(client, order)?;
    running.await_open(NEXT_LIMIT)?;
    let (path, _) = agent::datapath(client)?;
    if path == "kernel" {
        agent::await_paths(&[client], true, HELD, NEXT_LIMIT)?;
    }
    lab.hosts.iter().try_for_each(agent::kill)?;
    let (start, before) = (Instant::now(), running.progress()?.bytes);
    // Encapsulated flows pause now: it is not an error when this does not come.
    let enough = before + FILE_BYTES as f64 * DEAD.as_secs_f64() / HELD_S as f64 * HELD as f64;
    let _ = running.await_progress("what comes without an agent", DEAD, |now| now.bytes > enough);
    let carried = running.progress()?.bytes - before;
    say(&format!(
        "    {:.0} MB came in {:.1} s without an agent on any host",
        carried / 1e6,
        start.elapsed().as_secs_f64()
    ))?;
    lab.hosts.iter().try_for_each(agent::start_again)?;
    let results = running.finish(END_LIMIT)?;
    let expected = sha256(client, &servers[0].root.join("file"))?;
    let right = results.iter().filter(|result| result.sha256 == expected).count();
    say(&format!(
        "    all agents are back; checksums right: {right} of {HELD}; the longest pause of any: {:.0} ms\n",
        downloads::stall_ms_max(&results)
    ))?;
    let went_on = path != "kernel" || carried > 0.0;
    Ok(right == HELD && went_on)
}

/// One host after the other is emptied, under sessions of a server that gives its connections away, and transfers of
/// one that does not.
fn maintain(lab: &Lab, client: &Host, servers: &[Nginx]) -> Result<bool> {
    let hosts = [lab.host("web1")?, lab.host("web2")?];
    let options = ["--listen", LIVE_LISTEN, "--take-over"];
    say(&format!("{SESSIONS} sessions begin to {LIVE}, whose server gives its connections away when it is asked to:"))?;
    let mut serving = Vec::new();
    for host in hosts {
        let mut one = Serving::start(host, LIVE, host.name(), &options)?;
        one.await_step("a server", 1, |step| *step == Step::Takes)?;
        agent::publish(host, LIVE, LIVE_LISTEN, &[])?;
        serving.push(one);
    }
    agent::await_instances(client, LIVE, hosts.len())?;
    let (live, _) = agent::virtual_addresses(client, LIVE)?;
    let mut sessions = Sessions::open(client, &live, LIVE_PORT, SESSIONS, &[])?;
    let is_first_right = empty(hosts[0], hosts[1], client, servers)?;
    say("On web1:   margay undrain --host\n")?;
    agent::margay(hosts[0], ["undrain", "--host"])?;
    let has_both = sessions.round()?;
    let is_second_right = empty(hosts[1], hosts[0], client, servers)?;
    let talked = sessions.end()?;
    let longest_ms = has_both.waits_ms.iter().chain(&talked.waits_ms).copied().fold(0.0, f64::max);
    say(&format!(
        "    {} of {SESSIONS} sessions have been at both hosts, and go on; {} wrong answers; the longest wait for one: \
         {longest_ms:.0} ms\n",
        talked.open, talked.wrong
    ))?;
    Ok(is_first_right && is_second_right && talked.open == SESSIONS && talked.wrong == 0)
}

/// A host is taken out of service under transfers; the next connections find the other one.
fn empty(host: &Host, other: &Host, client: &Host, servers: &[Nginx]) -> Result<bool> {
    let order = format!("margay drain --host --deadline {DEADLINE}");
    say(&format!("{DRAINED} transfers begin, and on {}:   {order}", host.name()))?;
    let name = URL.trim_start_matches("http://");
    let transfers = Order { host: name, path: "file", count: DRAINED, pace: FILE_BYTES as u64 / DRAINED_S };
    let mut running = Downloads::start(client, transfers)?;
    running.await_open(NEXT_LIMIT)?;
    let start = Instant::now();
    quote(&agent::margay(host, order.split(' ').skip(1))?)?;
    say(&format!("    it took {:.1} s: the transfers of {} had to end", start.elapsed().as_secs_f64(), host.name()))?;
    let mut answered = Vec::new();
    for _ in 0..GREETINGS {
        answered.push(fetch_text(client, &format!("{URL}/host"))?);
    }
    say(&format!("    new connections:   {}", answered.join(" ")))?;
    let results = running.finish(END_LIMIT)?;
    let expected = sha256(client, &servers[0].root.join("file"))?;
    let right = results.iter().filter(|result| result.sha256 == expected).count();
    say(&format!("    checksums right: {right} of {DRAINED}\n"))?;
    Ok(right == DRAINED && answered.iter().all(|name| name == other.name()))
}

/// Client and server change their addresses under transfers; what comes in each part of a second is drawn.
fn wander(lab: &Lab, client: &Host, servers: &[Nginx]) -> Result<bool> {
    let name = URL.trim_start_matches("http://");
    let order = Order { host: name, path: "file", count: WANDERING, pace: FILE_BYTES as u64 / HELD_S };
    let mut running = Downloads::start(client, order)?;
    running.await_open(NEXT_LIMIT)?;
    say(&format!(
        "{WANDERING} transfers begin; then the client has another address, then the server, then both at once:"
    ))?;
    let server = lab.host("web1")?;
    let stages: [&[(&Host, usize)]; 3] = [&[(client, 77)], &[(server, 78)], &[(client, 87), (server, 88)]];
    draw(&mut running)?;
    let mut old = [interface::first_address(lab, client, 0, false)?, interface::first_address(lab, server, 0, false)?];
    for stage in stages {
        for (host, number) in stage {
            let which = usize::from(host.name() == server.name());
            let new = interface::address(lab, host, 0, false, *number)?;
            interface::change(lab, host, &[Act::Add(0, new), Act::Remove(0, old[which])])?;
            say(&format!("    {:6} {} is {} now", host.name(), old[which].addr(), new.addr()))?;
            old[which] = new;
        }
        draw(&mut running)?;
    }
    let results = running.finish(END_LIMIT)?;
    let expected = sha256(client, &servers[0].root.join("file"))?;
    let right = results.iter().filter(|result| result.sha256 == expected).count();
    let pause = downloads::stall_ms_max(&results);
    say(&format!(
        "    on the same connections; checksums right: {right} of {WANDERING}; the longest pause of any: {pause:.0} ms"
    ))?;
    quote(&agent::margay(client, ["path", "list"])?)?;
    Ok(right == WANDERING)
}

/// What all transfers together receive in a second, as bars.
fn draw(running: &mut Downloads) -> Result<()> {
    let part = FILE_BYTES as f64 * WANDERING as f64 / HELD_S as f64 * PART.as_secs_f64();
    for _ in 0..PARTS {
        let before = running.progress()?.bytes;
        // Until the time is over: nothing is waited for.
        let _ = running.await_progress("the end of a part of a second", PART, |_| false);
        let share = (running.progress()?.bytes - before) / part;
        say(&format!("        |{}", "#".repeat((share * BAR as f64).clamp(0.0, 2.0 * BAR as f64) as usize)))?;
    }
    Ok(())
}
