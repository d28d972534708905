//! The act about stacks: a laptop's numbered datagrams go from plain to sealed when it leaves its network, are repaired
//! as well when the path there loses some, and come back to plain; by two rules, and with the rule beside each change.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{quote, say};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::scenario::rules::TOPOLOGY;
use crate::series::Series;
use crate::topology::Topology;
use crate::traffic::{Came, Sent};
use crate::weather::Losses;

const RULES: &str = r#"[[stack_rule]]
names = ["voice.shop"]
when = '!path.local.within("10.2.0.0/24")'
use = "secure"
floor = true
release_s = 1

[[stack_rule]]
names = ["voice.shop"]
when = "path.loss > 0.01"
use = "fec"
hold_s = 1
release_s = 1
"#;

const SERVICE: &str = "voice.shop";
const NAME: &str = "voice.shop.sal.internal";
const PORT: u16 = 9;
/// Datagrams a second, and bytes of each.
const RATE: u64 = 1000;
const BYTES: u64 = 200;
/// What the path loses for a while.
const LOSSES: Losses = Losses { share: 0.05, row: 1 };
/// Of what goes by `fec` over it, so much may be lost: of a thousand blocks one is not repaired.
const UNREPAIRED_MAX: f64 = 0.005;
/// How long each stack is looked at.
const LOOK: Duration = Duration::from_secs(2);
/// For so long one that is missing may still come.
const LATE: Duration = Duration::from_millis(500);
const LIMIT: Duration = Duration::from_secs(15);

struct Stage<'a> {
    lab: &'a Lab,
    laptop: &'a Host,
    server: &'a Host,
    sink: Program,
    flow: String,
    /// Changes that have been told of.
    told: usize,
}

/// How many datagrams of numbers up to now have been sent, and how many of them have not come.
#[derive(Clone, Copy, Default)]
struct Tally {
    sent: u64,
    lost: u64,
}

impl Tally {
    /// Since an earlier one.
    fn since(self, before: Self) -> Self {
        Self { sent: self.sent - before.sent, lost: self.lost.saturating_sub(before.lost) }
    }
}

/// Does it, and says what happens; whether it went well.
pub fn perform(dir: &Path) -> Result<bool> {
    say("\nA laptop at home, a cafe with a network of its own, and a server elsewhere; on the laptop:\n")?;
    quote(RULES)?;
    let lab = Lab::build(Topology::parse("stacks", TOPOLOGY)?, dir)?;
    let laptop = lab.host("laptop")?;
    let server = lab.host("server")?;
    interface::route_by_source(&lab, laptop)?;
    interface::change(&lab, laptop, &[Act::Down(1)])?;
    laptop.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{RULES}END"))?;
    let _agents = Agents::start(&lab)?;
    let command = server.traffic(["numbered-sink", "--listen", &format!("0.0.0.0:{PORT}")])?;
    let sink = Program::start(command, &server.dir.join("numbered-sink.log"))?;
    wait_for("a sink", LIMIT, || sink.log().contains("ready").then_some(()).context("it is not ready"))?;
    agent::publish(server, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(laptop, SERVICE, 1)?;
    say(&format!("{RATE} numbered datagrams a second begin, from the laptop to {SERVICE}:"))?;
    let begun = Instant::now();
    let [port, rate, bytes] = [u64::from(PORT), RATE, BYTES].map(|number| number.to_string());
    let words = ["numbered", NAME, &port, "--run", "1", "--rate", &rate, "--bytes", &bytes].map(str::to_owned);
    let series: Series<Sent> = Series::start(laptop, &words)?;
    let flow = wait_for("a flow", LIMIT, || {
        let open = agent::open_flows(laptop, SERVICE, "udp")?;
        let flow = open.iter().find(|flow| flow["lifecycle"] == "established").context("there is none")?;
        Ok(flow["flow"].as_str().context("it has no number")?.to_owned())
    })?;
    let mut stage = Stage { lab: &lab, laptop, server, sink, flow, told: 0 };
    let is_right = stage.play()?;
    let sent = series.finish(LIMIT)?.first().context("the sender has said nothing")?.sent;
    say(&format!("    {sent} datagrams in {:.0} s\n", begun.elapsed().as_secs_f64()))?;
    Ok(is_right)
}

impl Stage<'_> {
    /// Out and back.
    fn play(&mut self) -> Result<bool> {
        let mut is_right = true;
        self.reach("plain")?;
        is_right &= self.look("at home", 0.0)?;
        say("    the laptop goes to the cafe")?;
        let before = self.tally()?;
        self.go(0, 1, "secure")?;
        is_right &= self.judge("on its way, and while it is sealed", before, 0.0)?;
        is_right &= self.look("in the cafe", 0.0)?;
        say(&format!("    the path loses {:.0} datagrams of a hundred", LOSSES.share * 100.0))?;
        let before = self.tally()?;
        self.lab.sky.lose(LOSSES);
        self.reach("secure-fec")?;
        let Tally { sent, lost } = self.tally()?.since(before);
        say(&format!("        until they are repaired {lost} of {sent} are lost: the path's doing"))?;
        is_right &= self.look("over the bad path", UNREPAIRED_MAX)?;
        say("    the path is well again")?;
        self.lab.sky.lose(Losses::default());
        let before = self.tally()?;
        self.reach("secure")?;
        is_right &= self.judge("until the repairs end", before, UNREPAIRED_MAX)?;
        say("    the laptop comes home")?;
        let before = self.tally()?;
        self.go(1, 0, "plain")?;
        is_right &= self.judge("on its way, and while it is unsealed", before, 0.0)?;
        Ok(is_right && self.look("at home", 0.0)?)
    }

    /// The laptop goes from one network to another: it has the new one before it leaves the old one, as where Wi-Fi
    /// and a cable, or two radios, overlap, and its owner moves the flow in between.
    fn go(&mut self, from: usize, to: usize, stack: &str) -> Result<()> {
        interface::change(self.lab, self.laptop, &[Act::Up(to)])?;
        interface::route_by_source_again(self.lab, self.laptop, to)?;
        let address = interface::first_address(self.lab, self.laptop, to, false)?.addr();
        // The agent hears of an address a moment after the kernel has it.
        wait_for("a flow that has moved", LIMIT, || agent::migrate(self.laptop, &self.flow, &address.to_string()))?;
        self.reach(stack)?;
        interface::change(self.lab, self.laptop, &[Act::Down(from)])?;
        Ok(())
    }

    /// Waits until both ends have a stack, and tells of the changes that led there.
    fn reach(&mut self, stack: &str) -> Result<()> {
        let shown = wait_for(&format!("a flow that is {stack}"), LIMIT, || {
            let shown = agent::stack(self.laptop, &self.flow)?;
            let peer = shown["peer_flow"].as_str().context("the peer has no number of the flow")?;
            let peer = agent::stack(self.server, peer)?;
            let is_calm = |shown: &Value| shown["stack"]["changing_to"].as_str().is_none_or(str::is_empty);
            let is_it = |shown: &Value| shown["stack"]["stack"] == stack && is_calm(shown);
            if !is_it(&shown) || !is_it(&peer) {
                bail!("here it is {}, and there {}", shown["stack"]["stack"], peer["stack"]["stack"]);
            }
            Ok(shown)
        })?;
        let none = Vec::new();
        let changes = shown["stack"]["changes"].as_array().unwrap_or(&none);
        for change in changes.iter().skip(self.told) {
            let word = |field: &str| change[field].as_str().unwrap_or_default();
            let why = match (word("cause"), &change["rule"]) {
                ("rule", rule) => format!("rule {rule}: {}", self.condition(rule, &shown)),
                ("rule-ended", rule) => format!("rule {rule} has no say any more: {}", self.condition(rule, &shown)),
                (cause, _) => cause.to_owned(),
            };
            say(&format!("        {:10} → {:10}  {why}", word("from"), word("to")))?;
        }
        self.told = changes.len();
        Ok(())
    }

    /// What a rule says.
    fn condition(&self, rule: &Value, shown: &Value) -> String {
        let rules = shown["stack"]["rules"].as_array().cloned().unwrap_or_default();
        let found = rules.iter().find(|one| one["number"] == *rule);
        found.and_then(|one| one["when"].as_str()).unwrap_or_default().to_owned()
    }

    /// Looks for a while at what comes.
    fn look(&self, place: &str, share_max: f64) -> Result<bool> {
        let before = self.tally()?;
        sleep(LOOK);
        self.judge(place, before, share_max)
    }

    /// Says what was lost since then, and whether it was no more than it may be.
    fn judge(&self, what: &str, before: Tally, share_max: f64) -> Result<bool> {
        let Tally { sent, mut lost } = self.tally()?.since(before);
        let may_lose = (sent as f64 * share_max) as u64;
        // What is late, or waits for a repair, is not lost.
        let deadline = Instant::now() + LATE;
        while lost > may_lose && Instant::now() < deadline {
            sleep(LATE / 10);
            lost = lost.min(self.tally()?.since(before).lost);
        }
        let is_right = lost <= may_lose;
        let verdict = if is_right { "" } else { ": MORE THAN THERE SHOULD BE" };
        say(&format!("        {what}: {lost} of {sent} lost{verdict}"))?;
        Ok(is_right)
    }

    fn tally(&self) -> Result<Tally> {
        let log = self.sink.log();
        // The last line may be half-written.
        let came = log.lines().rev().find_map(|line| serde_json::from_str::<Came>(line).ok());
        let came = came.context("nothing has come")?;
        ensure!(came.wrong == 0 && came.duplicated == 0, "{} wrong, {} twice", came.wrong, came.duplicated);
        Ok(Tally { sent: came.next, lost: came.next - came.received })
    }
}
