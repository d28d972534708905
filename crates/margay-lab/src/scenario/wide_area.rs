//! `wide-area`: three sites with a router, two instances and a client each; a router above all of them, and two that
//! are beside each other. Instances come and go inside their sites; one site has none for a while; another is cut off,
//! comes back, is killed and comes back.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{Findings, Scenario, is_long};
use crate::agent::{self, margay};
use crate::arrivals::{Arrival, Arrivals, now_ms};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound};
use crate::server;
use crate::topology::Topology;
use crate::wire;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "wide-area",
    summary: "three sites and a router above them: churn inside, spill-over, a site cut off, killed and back",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    bound("failed_after_ms", Below(2000.0)),
    bound("announcements_outside", Exactly(0.0)),
    // What happened inside meanwhile.
    bound("changes_inside", AtLeast(20.0)),
    // Of connections while the client's own site has instances.
    bound("not_nearest", Exactly(0.0)),
    bound("stretch", Below(1.5)),
    bound("refused_ms", Below(1000.0)),
    bound("connects", AtLeast(300.0)),
    bound("deaths", Exactly(2.0)),
    bound("failed", Exactly(0.0)),
];

/// A gateway's first link is the one that its site hangs on.
const TOPOLOGY: &str = r#"
[subnet.wan]
v4 = "10.9.0.0/24"
delay_ms = 5
[subnet.a]
v4 = "10.1.0.0/24"
[subnet.b]
v4 = "10.2.0.0/24"
[subnet.c]
v4 = "10.3.0.0/24"
[host.hub]
role = "router"
links = [{ subnet = "wan" }]
"#;
const SITES: [&str; 3] = ["a", "b", "c"];
const SERVICE: &str = "who.shop";
const NAME: &str = "who.shop.sal.internal";
const PORT: u16 = 7;
const EVERY: Duration = Duration::from_millis(25);
/// Whoever was not answered until then had to ask again: the core asks again after 150 ms.
const PROMPT_MS: f64 = 140.0;
const CALM_MS: f64 = 1000.0;
const LIMIT: Duration = Duration::from_secs(20);
const CHANGES: usize = 12;
const CHANGES_LONG: usize = 200;

fn topology() -> Result<Topology> {
    let mut text = TOPOLOGY.to_owned();
    for site in SITES {
        text.push_str(&format!(
            "[host.g{site}]\nrole = \"gateway\"\nlinks = [{{ subnet = \"wan\" }}, {{ subnet = \"{site}\" }}]\n"
        ));
        for (host, role) in [("r", "router"), ("s1", "agent"), ("s2", "agent"), ("u", "agent")] {
            text.push_str(&format!("[host.{site}-{host}]\nrole = \"{role}\"\nlinks = [{{ subnet = \"{site}\" }}]\n"));
        }
    }
    Ok(Topology::parse(SCENARIO.name, &text)?)
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(topology()?, dir)?;
    findings.set("failed", 0.0);
    start(&lab)?;
    let _servers = serve(&lab)?;
    await_known(&lab)?;
    told(&lab)?;
    let mut clients = SITES.iter().map(|site| arrivals(&lab, site)).collect::<Result<Vec<_>>>()?;
    churn(&lab, findings)?;
    let calm_until = now_ms();
    for (site, client) in SITES.into_iter().zip(&mut clients) {
        judge_calm(site, client.until(calm_until, LIMIT)?, calm_until, findings);
    }
    stretch(&lab, findings)?;
    spill_over(&lab, &mut clients, findings)?;
    refused(&lab, findings)?;
    for (how, die, live) in [("cut off", cut_off as Act, mend as Act), ("killed", kill, revive)] {
        // Site a has no instance now, and goes to its peer b; so that is the one to die.
        let after = site_death(&lab, &mut clients, how, die, live, findings)?;
        findings.set("failed_after_ms", findings.figures.get("failed_after_ms").max(after));
        findings.figures.add("deaths", 1.0);
    }
    come_home(&lab, &mut clients[0])?;
    let connects: usize = clients.iter_mut().map(|client| client.until(0.0, LIMIT).map_or(0, Iterator::count)).sum();
    findings.set("connects", connects as f64);
    findings.note(
        "failed_after_ms: from a site's death until the last connection from elsewhere began that failed or had to ask \
         again; stretch: hosts that a first packet meets against the fewest that would do, its own router, that of the \
         other site and the instance",
    );
    Ok(())
}

fn configure(host: &Host, text: &str) -> Result<()> {
    host.shell(&format!("printf '%b' '{}' >> /etc/margay/margay.toml", text.replace('\n', "\\n"))).map(drop)
}

fn token(router: &Host) -> Result<String> {
    Ok(margay(router, ["id", "token", "create", "shop", "--uses", "100"])?.trim().to_owned())
}

/// The hub first, then the sites below it; b joins a as well, as its peer.
fn start(lab: &Lab) -> Result<()> {
    let hub = lab.host("hub")?;
    configure(hub, "[router]\nsite = \"hub\"\n")?;
    margay(hub, ["up", "--router"])?;
    margay(hub, ["id", "authority", "create", "shop"])?;
    let above = token(hub)?;
    for site in SITES {
        let router = lab.host(&format!("{site}-r"))?;
        configure(router, &format!("[router]\nsite = \"{site}\"\n"))?;
        if site == "b" {
            configure(router, "[[router.neighbour]]\nsite = \"a\"\nrelation = \"peer\"\n")?;
        }
        margay(router, ["up", "--router", "--join", &above])?;
        await_joined(router, 1)?;
        let request = margay(router, ["id", "authority", "request", "shop"])?;
        let warrant = margay(hub, ["id", "authority", "sign", request.trim(), "--lifetime", "1d"])?;
        margay(router, ["id", "accept", warrant.trim()])?;
    }
    let (peer, beside) = (lab.host("b-r")?, token(lab.host("a-r")?)?);
    margay(peer, ["down"])?;
    margay(peer, ["up", "--router", "--join", &beside])?;
    await_joined(peer, 2)?;
    for site in SITES {
        let token = token(lab.host(&format!("{site}-r"))?)?;
        for host in ["s1", "s2", "u"] {
            agent::join(lab.host(&format!("{site}-{host}"))?, &token)?;
        }
    }
    Ok(())
}

fn await_joined(router: &Host, count: usize) -> Result<()> {
    wait_for(&format!("{} and {count} others", router.name()), LIMIT, || {
        let status = agent::status(router)?;
        let routers = status["routers"].as_array().context("no routers")?;
        let connected = routers.iter().filter(|router| router["state"] == "connected").count();
        if connected == count { Ok(()) } else { bail!("{connected} are connected: {routers:?}") }
    })
}

fn instances(site: &str) -> [String; 2] {
    [1, 2].map(|number| format!("{site}-s{number}"))
}

fn serve(lab: &Lab) -> Result<Vec<Program>> {
    let mut servers = Vec::new();
    for name in SITES.iter().flat_map(|site| instances(site)) {
        servers.push(server::greeter(lab.host(&name)?, ([0; 4], PORT).into())?);
        publish(lab.host(&name)?)?;
    }
    Ok(servers)
}

fn publish(host: &Host) -> Result<()> {
    agent::publish(host, SERVICE, &format!("0.0.0.0:{PORT}"), &[])
}

/// Whom a router's rules for the service are from, beside its own hosts.
fn announcers(router: &Host) -> Result<Vec<String>> {
    let routes = agent::routes(router, SERVICE)?;
    let announced = routes.iter().filter(|route| route["origin"] == "announced");
    let path = |route: &Value| -> Vec<String> {
        let sites = route["sites"].as_array().into_iter().flatten();
        sites.filter_map(|site| site.as_str().map(str::to_owned)).collect()
    };
    let mut announcers: Vec<String> = announced.map(|route| path(route).join(" > ")).collect();
    announcers.sort();
    Ok(announcers)
}

fn await_announcers(router: &Host, wanted: &[&str], limit: Duration) -> Result<()> {
    wait_for(&format!("announcements by {wanted:?} at {}", router.name()), limit, || match announcers(router)? {
        found if found == wanted => Ok(()),
        found => bail!("they are by {found:?}"),
    })
}

fn await_known(lab: &Lab) -> Result<()> {
    await_announcers(lab.host("hub")?, &["a", "b", "c"], LIMIT)?;
    await_announcers(lab.host("a-r")?, &["b"], LIMIT)?;
    await_announcers(lab.host("b-r")?, &["a"], LIMIT)?;
    await_announcers(lab.host("c-r")?, &[], LIMIT)
}

/// What operators are shown.
fn told(lab: &Lab) -> Result<()> {
    let list: Value = serde_json::from_str(&margay(lab.host("b-r")?, ["router", "list", "--json"])?)?;
    let neighbours = list["neighbours"].as_array().context("no neighbours")?;
    let said: Vec<String> = neighbours
        .iter()
        .map(|one| format!("{} {} {} {}", one["site"], one["relation"], one["told"], one["heard"]))
        .collect();
    let wanted = ["\"a\" \"peer\" \"1\" \"1\"", "\"hub\" \"upstream\" \"1\" \"0\""];
    let plain = |text: &str| text.replace('"', "");
    let same = said.iter().map(|text| plain(text)).eq(wanted.iter().map(|text| plain(text)));
    ensure!(same, "{said:?}");
    let shown = margay(lab.host("hub")?, ["router", "show", "c"])?;
    ensure!(shown.contains("downstream") && shown.contains(SERVICE) && shown.contains("announced by it"), "{shown}");
    let listed = margay(lab.host("hub")?, ["route", "list", SERVICE])?;
    ensure!(listed.contains("announced by b"), "{listed}");
    Ok(())
}

fn arrivals(lab: &Lab, site: &str) -> Result<Arrivals> {
    Arrivals::start(lab.host(&format!("{site}-u"))?, NAME, PORT, EVERY, None)
}

/// Words that all routers have sent to each other so far.
fn words(lab: &Lab) -> Result<f64> {
    let mut sum = 0.0;
    for router in ["hub", "a-r", "b-r", "c-r"] {
        for act in ["sent", "retraction_sent"] {
            sum += agent::metric(lab.host(router)?, &format!("margay_announcements_total{{act=\"{act}\"}}"))?;
        }
    }
    Ok(sum)
}

/// One of the two instances of each site goes and comes back, again and again, the other one between: outside, nobody
/// hears of it.
fn churn(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let before = words(lab)?;
    for number in 0..if is_long() { CHANGES_LONG } else { CHANGES } {
        let site = SITES[number % SITES.len()];
        let [one, other] = instances(site);
        let host = lab.host(if (number / SITES.len()).is_multiple_of(2) { &one } else { &other })?;
        agent::withdraw(host, SERVICE)?;
        agent::await_instances(lab.host(&format!("{site}-r"))?, SERVICE, 1)?;
        publish(host)?;
        findings.figures.add("changes_inside", 2.0);
    }
    findings.set("announcements_outside", words(lab)? - before);
    Ok(())
}

/// While its own site has instances, a client is answered by them.
fn judge_calm<'a>(site: &str, all: impl Iterator<Item = &'a Arrival>, until_ms: f64, findings: &mut Findings) {
    findings.figures.add("not_nearest", 0.0);
    for arrival in all.filter(|arrival| arrival.begun_ms < until_ms) {
        if !arrival.error.is_empty() {
            findings.note(format!("in calm times, from {site}: {}", arrival.error));
            findings.figures.add("failed", 1.0);
        } else if !arrival.answered.starts_with(site) {
            findings.figures.add("not_nearest", 1.0);
        }
    }
}

/// Hosts that a first packet meets, and where it ends.
fn way(client: &Host) -> Result<(usize, String)> {
    let output = client.output([
        crate::fabric::margay_program()?.as_os_str(),
        "trace".as_ref(),
        SERVICE.as_ref(),
        "--json".as_ref(),
    ])?;
    let reply: Value = serde_json::from_slice(&output.stdout).context("a trace is not JSON")?;
    let hops = reply["hops"].as_array().context("a trace without hops")?;
    let names: Vec<&str> = hops.iter().filter_map(|hop| hop["host_name"].as_str()).collect();
    ensure!(reply["reached"] == true, "the trace ends on the way: {}", names.join(" > "));
    Ok((hops.len() - 1, names.join(" > ")))
}

/// By how many hosts first packets go, against the fewest that would do: the router of the client's site, that of the
/// instance's where it is another one, and the instance.
fn stretch(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let mut ratios = Vec::new();
    for (site, from) in SITES.iter().flat_map(|site| ["u", "s1"].map(|host| (*site, host))) {
        if from == "u" {
            let (hops, path) = way(lab.host(&format!("{site}-{from}"))?)?;
            ratios.push(hops as f64 / 2.0);
            findings.note(path);
        }
    }
    // With no instance in its own site, by the peer and by the router above.
    for site in ["a", "c"] {
        set_instances(lab, site, false)?;
        let limit = std::time::Instant::now() + LIMIT;
        loop {
            match way(lab.host(&format!("{site}-u"))?) {
                Ok((hops, path)) if !path.contains(&format!("{site}-s")) => {
                    ratios.push(hops as f64 / 3.0);
                    findings.note(path);
                    break;
                }
                other if std::time::Instant::now() > limit => bail!("{site} does not spill over: {other:?}"),
                _ => {}
            }
        }
        set_instances(lab, site, true)?;
    }
    await_known(lab)?;
    findings.set("stretch", ratios.iter().sum::<f64>() / ratios.len() as f64);
    findings.set("stretch_max", ratios.iter().copied().fold(0.0, f64::max));
    Ok(())
}

fn set_instances(lab: &Lab, site: &str, serves: bool) -> Result<()> {
    for name in instances(site) {
        let host = lab.host(&name)?;
        if serves { publish(host)? } else { agent::withdraw(host, SERVICE)? }
    }
    Ok(())
}

/// Site a loses all its instances: from then on its clients are answered by its peer, and none of them notices.
fn spill_over(lab: &Lab, clients: &mut [Arrivals], findings: &mut Findings) -> Result<()> {
    let from_ms = now_ms();
    set_instances(lab, "a", false)?;
    await_announcers(lab.host("hub")?, &["b", "c"], LIMIT)?;
    let gone_ms = now_ms();
    let seen: Vec<Arrival> = clients[0].until(gone_ms + CALM_MS, LIMIT)?.cloned().collect();
    let after = seen.iter().filter(|arrival| arrival.begun_ms > from_ms);
    for arrival in after {
        let is_wrong = arrival.begun_ms > gone_ms && !arrival.answered.starts_with('b');
        if !arrival.error.is_empty() || is_wrong {
            findings.note(format!(
                "spilling over, {:.0} ms in: {} {}",
                arrival.begun_ms - from_ms,
                arrival.answered,
                arrival.error
            ));
            findings.figures.add("failed", 1.0);
        }
    }
    Ok(())
}

/// What nobody serves anywhere is refused, and not sent round until its program gives up.
fn refused(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let client = lab.host("a-u")?;
    let begun_ms = now_ms();
    let curl = client.output(["curl", "-sS", "--max-time", "20", "http://nobody.shop.sal.internal/"])?;
    let said = String::from_utf8_lossy(&curl.stderr).into_owned();
    ensure!(!curl.status.success() && said.contains("onnect"), "a name that nobody serves: {said}");
    findings.set("refused_ms", now_ms() - begun_ms);
    let output = client.output([
        crate::fabric::margay_program()?.as_os_str(),
        "trace".as_ref(),
        "nobody.shop".as_ref(),
        "--json".as_ref(),
    ])?;
    let reply: Value = serde_json::from_slice(&output.stdout).context("a trace is not JSON")?;
    let last = reply["hops"].as_array().and_then(|hops| hops.last()).context("a trace without hops")?;
    ensure!(
        last["act"] == "nobody" && last["host_name"] == "hub",
        "the way of a name that nobody serves ends so: {last}"
    );
    Ok(())
}

type Act = fn(&Lab) -> Result<()>;

fn cut_off(lab: &Lab) -> Result<()> {
    wire::set_link(&lab.topology, lab.host("gb")?, false)
}

fn mend(lab: &Lab) -> Result<()> {
    wire::set_link(&lab.topology, lab.host("gb")?, true)
}

const OF_B: [&str; 4] = ["b-r", "b-s1", "b-s2", "b-u"];

fn kill(lab: &Lab) -> Result<()> {
    OF_B.iter().try_for_each(|host| agent::kill(lab.host(host)?))
}

fn revive(lab: &Lab) -> Result<()> {
    OF_B.iter().try_for_each(|host| agent::start_again(lab.host(host)?))
}

/// Site b dies, and comes back. Gives the time from its death until the last connection from elsewhere began that
/// failed or had to ask again.
fn site_death(
    lab: &Lab,
    clients: &mut [Arrivals],
    how: &str,
    die: Act,
    live: Act,
    findings: &mut Findings,
) -> Result<f64> {
    let dead_ms = now_ms();
    die(lab)?;
    await_announcers(lab.host("hub")?, &["c"], LIMIT)?;
    await_announcers(lab.host("a-r")?, &[], LIMIT)?;
    let gone_ms = now_ms();
    let mut last_ms = dead_ms;
    for (site, client) in [("a", 0), ("c", 2)] {
        let seen = clients[client].until(gone_ms + CALM_MS, LIMIT)?;
        for arrival in seen.filter(|arrival| arrival.begun_ms > dead_ms) {
            let is_late = !arrival.error.is_empty() || arrival.took_ms > PROMPT_MS;
            if is_late {
                last_ms = last_ms.max(arrival.begun_ms);
            }
            findings.figures.add("failed_in_death", f64::from(u8::from(!arrival.error.is_empty())));
            if arrival.begun_ms > gone_ms && !arrival.answered.starts_with('c') {
                let (after_ms, error) = (arrival.begun_ms - gone_ms, &arrival.error);
                findings.note(format!(
                    "b {how}, from {site}, {after_ms:.0} ms after it was forgotten: {} {error}",
                    arrival.answered
                ));
                findings.figures.add("failed", 1.0);
            }
        }
    }
    progress(&format!(
        "b {how}: forgotten after {:.0} ms, all well after {:.0} ms",
        gone_ms - dead_ms,
        last_ms - dead_ms
    ));
    live(lab)?;
    await_announcers(lab.host("hub")?, &["b", "c"], 2 * LIMIT)?;
    await_announcers(lab.host("a-r")?, &["b"], 2 * LIMIT)?;
    for name in instances("b") {
        wait_for(&format!("{name} back"), LIMIT, || match agent::show(lab.host(&name)?, SERVICE)?["service"]["state"]
            .as_str()
        {
            Some("registered") => Ok(()),
            state => bail!("its service is {state:?}"),
        })?;
    }
    Ok(last_ms - dead_ms)
}

/// Site a has instances again: its clients are answered by them.
fn come_home(lab: &Lab, client: &mut Arrivals) -> Result<()> {
    set_instances(lab, "a", true)?;
    await_announcers(lab.host("hub")?, &["a", "b", "c"], LIMIT)?;
    let home_ms = now_ms();
    let seen: Vec<&Arrival> = client.until(home_ms + CALM_MS, LIMIT)?.filter(|one| one.begun_ms > home_ms).collect();
    match seen.iter().find(|arrival| !arrival.answered.starts_with('a')) {
        Some(stray) => bail!("at home again, a client is answered by {:?} {}", stray.answered, stray.error),
        None => Ok(()),
    }
}
