//! `memcached-partitions`: Serval's Figure 8. Four memcached servers hold 16 partitions; SETs of 1 KB with random keys
//! go to the partitions' virtual addresses; one server leaves, then another, and both come back.

mod account;

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use margay_core::name::Name;
use nix::sys::signal::Signal;

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound, median};
use crate::series::Series;
use crate::timeline::Timeline;
use crate::traffic::{Slot, Taken, now_ms};
use crate::turns;
use account::Span;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "memcached-partitions",
    summary: "Serval Fig. 8: 4 servers, 16 partitions, random SETs of 1 KB; two servers leave, and both come back",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("rate_ratio", AtLeast(0.6)),
    bound("recover_ms", Below(500.0)),
    bound("partition_balance", AtLeast(0.75)),
    bound("figure_drawn", Exactly(1.0)),
    bound("failed", Exactly(0.0)),
];

const SERVERS: [&str; 4] = ["s1", "s2", "s3", "s4"];
const SERVICE: &str = "cache.shop";
const PARTITION_BITS: u8 = 4;
const PARTITIONS: usize = 1 << PARTITION_BITS;
const PORT: u16 = 11_211;
/// Requests at once: four for each partition.
const WINDOW: usize = 4 * PARTITIONS;
/// How long it stays as it is: in tests, and as in the paper.
const PHASE: Duration = Duration::from_secs(3);
const PHASE_LONG: Duration = Duration::from_secs(10);
const SAMPLE: Duration = Duration::from_millis(100);
/// After a change it takes so long until shares are counted.
const SETTLE_MS: f64 = 1000.0;
/// Where rates are compared: how often, and one way's turn.
const ROUNDS: usize = 7;
const TURN: Duration = Duration::from_millis(100);
const LIMIT: Duration = Duration::from_secs(20);

/// The site while the SETs come.
struct Cluster<'a> {
    hosts: Vec<&'a Host>,
    running: Vec<Option<Program>>,
    sets: Series<Slot>,
    taken: Vec<Series<Taken>>,
    /// What happened: when, to which server, and whether it came.
    changes: Vec<(f64, usize, bool)>,
}

/// What became of it.
struct Course {
    begun_ms: f64,
    ended_ms: f64,
    /// What happened: when, to which server, and whether it came.
    changes: Vec<(f64, usize, bool)>,
    slots: Vec<Slot>,
    /// What each server took, step by step.
    steps: Vec<Vec<(f64, f64)>>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let phase = if is_long() { PHASE_LONG } else { PHASE };
    let lab = site::build("memcached-partitions", site::V4, &["s1", "s2", "s3", "s4", "client", "plain"], dir)?;
    let _agents = Agents::start(&lab)?;
    findings.set("failed", 0.0);
    let course = divided(&lab, phase, findings)?;
    let ends = course.changes.iter().skip(1).map(|(at_ms, ..)| *at_ms).chain([course.ended_ms]);
    let spans: Vec<Span> =
        course.changes.iter().zip(ends).map(|(change, to_ms)| Span { from_ms: change.0, to_ms }).collect();
    let calm = Span { from_ms: course.begun_ms, to_ms: spans.first().context("nothing changed")?.from_ms };
    let lost: u32 = course.slots.iter().map(|slot| slot.lost).sum();
    findings.set("lost", lost.into());
    findings.figures.add("failed", course.slots.iter().map(|slot| f64::from(slot.refused)).sum());
    judge_changes(&course, &spans, findings);
    judge_balance(&course, calm, &spans, findings);
    draw(&course, findings)?;
    let moved = agent::metric(lab.host("router")?, "margay_partitions_moved_total")?;
    findings.set("partitions_moved", moved);
    findings.note(
        "rate_ratio: answers per second with four servers, against one plain memcached by UDP at its own address, with \
         as many requests at once, in turns (median of rounds); partition_balance: least over mean of the servers' own \
         counts of SETs, the worst of the phases; recover_ms: the worst of the changes, from kill to the last \
         partition's next answer (0: none was silent for 80 ms), or from start to the returned server's first 100 ms \
         with three quarters of its share; silence_ms_max: the longest silence of a partition from the first change to \
         the end; the client has one unconnected socket",
    );
    Ok(())
}

fn memcached() -> [String; 13] {
    let port = PORT.to_string();
    ["memcached", "-u", "root", "-l", "0.0.0.0", "-p", &port, "-U", &port, "-t", "1", "-m", "256"].map(str::to_owned)
}

/// Answers per second, against those of one memcached at its own address.
fn compare_rates(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let (client, host) = (lab.host("client")?, lab.host("plain")?);
    let _server = host.spawn("memcached", memcached())?;
    await_memcached(host)?;
    let ways = [vec![pair::address(host)?], addresses(client)?];
    let rounds: Vec<[f64; 2]> = (0..ROUNDS).map(|round| rates(client, &ways, round)).collect::<Result<_>>()?;
    let ratios: Vec<f64> = rounds.iter().map(|[plain, named]| named / plain).collect();
    let of = |way: usize| median(&rounds.iter().map(|rates| rates[way]).collect::<Vec<_>>());
    findings.set("rate", of(1));
    findings.set("plain_rate", of(0));
    findings.set("rate_ratio", median(&ratios));
    let all: Vec<_> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
    findings.note(format!("rate_ratio of each round: {}", all.join(" ")));
    Ok(())
}

/// Answers per second at the two ways' addresses, in turns. Each round has clients of its own: how they fall in with
/// the servers is chance, and lasts.
fn rates(client: &Host, ways: &[Vec<String>; 2], round: usize) -> Result<[f64; 2]> {
    let clients = [start_sets(client, &ways[0])?, start_sets(client, &ways[1])?];
    for client in &clients {
        wait_for("answers", LIMIT, || match client.count(|slot| slot.answered.iter().any(|count| *count > 0)) {
            0 => bail!("there are none"),
            _ => Ok(()),
        })?;
    }
    let mut spans = [vec![], vec![]];
    let measure = |way: usize| {
        let from_ms = now_ms();
        sleep(TURN);
        spans[way].push(Span { from_ms, to_ms: now_ms() });
        Ok(())
    };
    turns::take(|way, signal| clients[way].signal(signal), TURN, round, measure)?;
    let rate = |way: usize| {
        let slots = clients[way].lines();
        median(&spans[way].iter().map(|span| account::rate(&slots, *span)).collect::<Vec<_>>())
    };
    let rates = [rate(0), rate(1)];
    ensure!(rates.iter().all(|rate| *rate > 0.0), "a client had no answers: {rates:?}");
    Ok(rates)
}

fn await_memcached(host: &Host) -> Result<()> {
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{PORT}");
    wait_for(&format!("memcached on {}", host.name()), LIMIT, || host.shell(&script).map(drop))
}

fn start_sets(client: &Host, addresses: &[String]) -> Result<Series<Slot>> {
    let mut words = vec!["memcached-sets".to_owned(), format!("--window={WINDOW}")];
    words.extend(addresses.iter().map(|address| format!("--to={address}:{PORT}")));
    Series::start(client, &words)
}

/// The virtual addresses that stand for the partitions on a host, in their order.
fn addresses(host: &Host) -> Result<Vec<String>> {
    let service: Name = SERVICE.parse()?;
    let address = |index: usize| {
        let partition = service.service_prefix().partition(PARTITION_BITS, u16::try_from(index)?);
        Ok(agent::virtual_addresses(host, &partition.id.to_string())?.0)
    };
    (0..PARTITIONS).map(address).collect()
}

/// Serves, sends, takes servers away and brings them back.
fn divided(lab: &Lab, phase: Duration, findings: &mut Findings) -> Result<Course> {
    let (router, client) = (lab.host("router")?, lab.host("client")?);
    let hosts: Vec<&Host> = SERVERS.iter().map(|name| lab.host(name)).collect::<Result<_>>()?;
    let running = hosts.iter().map(|host| serve(host).map(Some)).collect::<Result<_>>()?;
    await_holders(router, &[4; 4])?;
    compare_rates(lab, findings)?;
    let every = ["memcached-taken".to_owned(), format!("--port={PORT}"), format!("--every-ms={}", SAMPLE.as_millis())];
    let taken = hosts.iter().map(|host| Series::start(host, &every)).collect::<Result<_>>()?;
    let sets = start_sets(client, &addresses(client)?)?;
    let begun_ms = now_ms();
    let mut cluster = Cluster { hosts, running, sets, taken, changes: Vec::new() };
    sleep(phase);
    for (server, comes) in [(0, false), (1, false), (0, true), (1, true)] {
        cluster.change(server, comes)?;
        sleep(phase);
    }
    let ended_ms = now_ms();
    await_holders(router, &[4; 4])?;
    Ok(Course {
        begun_ms,
        ended_ms,
        slots: cluster.sets.lines(),
        steps: cluster.taken.iter().map(|taken| account::steps(&taken.lines())).collect(),
        changes: cluster.changes,
    })
}

fn serve(host: &Host) -> Result<Program> {
    let service = format!("{SERVICE}:{PORT}");
    let words =
        ["margay", "run", "--service", &service, "--partitions", &PARTITIONS.to_string(), "--"].map(str::to_owned);
    host.spawn("memcached", words.into_iter().chain(memcached()))
}

/// Waits until the router has given so many partitions to each of so many hosts.
fn await_holders(router: &Host, wanted: &[u64]) -> Result<()> {
    wait_for("the partitions' holders", LIMIT, || {
        let shown = agent::show(router, SERVICE)?;
        let all = shown["partitions"].as_array().cloned().unwrap_or_default();
        let mut counts: Vec<u64> = all.iter().filter_map(|of| of["count"].as_u64()).collect();
        counts.sort_unstable();
        if counts == wanted { Ok(()) } else { bail!("they hold {counts:?}: {shown}") }
    })
}

impl Cluster<'_> {
    fn change(&mut self, server: usize, comes: bool) -> Result<()> {
        self.changes.push((now_ms(), server, comes));
        if comes {
            self.running[server] = Some(serve(self.hosts[server])?);
        } else {
            let running = self.running[server].take();
            ensure!(running.is_some(), "{} does not run", SERVERS[server]);
            running.map_or(Ok(()), |program| program.signal(Signal::SIGKILL))?;
        }
        Ok(())
    }
}

impl Course {
    /// Who serves after so many changes.
    fn present(&self, changes: usize) -> Vec<usize> {
        let is_gone = |server: &usize| {
            self.changes[..changes].iter().rev().find(|change| change.1 == *server).is_some_and(|change| !change.2)
        };
        (0..SERVERS.len()).filter(|server| !is_gone(server)).collect()
    }
}

/// How long each change took until all was well again.
fn judge_changes(course: &Course, spans: &[Span], findings: &mut Findings) {
    let mut worst: f64 = 0.0;
    for (number, ((_, server, comes), span)) in course.changes.iter().zip(spans).enumerate() {
        let answered = account::all_answered_ms(&course.slots, *span);
        let share = 0.75 / course.present(number + 1).len() as f64;
        let took = match (answered, comes) {
            (Some(answered), true) => account::share_reached_ms(&course.steps[*server], &course.steps, share, *span)
                .map(|reached| reached.max(answered)),
            (answered, _) => answered,
        };
        let what = format!("{} {}", SERVERS[*server], if *comes { "comes back" } else { "leaves" });
        match took {
            Some(took) => findings.note(format!("{what}: all is well after {took:.0} ms")),
            None => {
                findings.note(format!("{what}: not all is well before the next change"));
                findings.figures.add("failed", 1.0);
            }
        }
        worst = worst.max(took.unwrap_or(span.length_ms()));
        let longest = account::silences(&course.slots, *span).into_iter().map(Span::length_ms).fold(0.0, f64::max);
        findings.set("silence_ms_max", findings.figures.get("silence_ms_max").max(longest));
    }
    findings.set("recover_ms", worst);
}

/// Whether those who serve share the SETs, in each phase.
fn judge_balance(course: &Course, calm: Span, spans: &[Span], findings: &mut Findings) {
    let mut worst = f64::INFINITY;
    for (number, span) in std::iter::once(&calm).chain(spans).enumerate() {
        let present = course.present(number);
        let totals: Vec<f64> =
            present.iter().map(|server| account::total(&course.steps[*server], span.after(SETTLE_MS))).collect();
        worst = worst.min(account::balance(&totals));
        let of: Vec<String> =
            present.iter().zip(&totals).map(|(server, total)| format!("{} {total:.0}", SERVERS[*server])).collect();
        findings.note(format!("phase {}: {}", number + 1, of.join(", ")));
    }
    findings.set("partition_balance", worst);
}

fn draw(course: &Course, findings: &mut Findings) -> Result<()> {
    let (step_ms, count) =
        (SAMPLE.as_secs_f64() * 1e3, ((course.ended_ms - course.begun_ms) / (SAMPLE.as_secs_f64() * 1e3)) as usize);
    let rate = |steps: &Vec<(f64, f64)>, number: usize| {
        let from_ms = course.begun_ms + number as f64 * step_ms;
        account::total(steps, Span { from_ms, to_ms: from_ms + step_ms }) * 1e3 / step_ms
    };
    let rates: Vec<Vec<f64>> =
        course.steps.iter().map(|steps| (0..count).map(|number| rate(steps, number)).collect()).collect();
    let change = |(at_ms, server, comes): &(f64, usize, bool)| {
        let what = if *comes { "comes back" } else { "leaves" };
        ((at_ms - course.begun_ms) / 1e3, format!("{} {what}", SERVERS[*server]))
    };
    let changes: Vec<(f64, String)> = course.changes.iter().map(change).collect();
    let picture =
        Timeline { names: &SERVERS, unit: "SETs per second", rates: &rates, step_s: step_ms / 1e3, changes: &changes };
    findings.draw(SCENARIO.name, &picture.svg())?;
    findings.set("figure_drawn", f64::from(u8::from(rates.iter().flatten().any(|rate| *rate > 0.0))));
    Ok(())
}
