//! `renumber`: addresses change under transfers, on either side, within a family and from one to the other, 40 ms
//! apart. Most changes happen at once; after some, a host has no address for eight seconds.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use ipnet::IpNet;

use super::moved::{self, NAME, Pauses};
use super::{Findings, Scenario, pair};
use crate::agent::Agents;
use crate::command::progress;
use crate::host::Host;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::moment::Moment;
use crate::observe;
use crate::report::Limit::{AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::transfers::{Order, Server, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "renumber",
    summary: "addresses of client and server change under transfers, also to the other family and with 8 s in between",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("pause_rtts_p50", AtMost(2.5)),
    bound("changes", Exactly((SIDES.len() * AT_ONCE.len()) as f64)),
    bound("gaps", Exactly((SIDES.len() * WITH_GAP.len()) as f64)),
    bound("failed", Exactly(0.0)),
];

const SIDES: [&str; 2] = ["client", "server"];
/// The family after each change, of a host that begins with IPv4.
const AT_ONCE: [Family; 10] = [V4, V6, V4, V4, V6, V4, V4, V6, V6, V4];
const WITH_GAP: [Family; 2] = [V4, V6];
const GAP: Duration = Duration::from_secs(8);
const WAYS: [&str; 4] = ["up:cubic", "down:cubic", "up:bbr", "down:bbr"];
/// Bytes per second of each: a path that queues nothing, so that a round trip takes what the path does.
const PACE: u64 = 1_000_000;
const CALM_BYTES: u64 = PACE;
/// More than was under way, and time between two changes: hosts that move too often are left where they are.
const RESUMED_BYTES: u64 = PACE * 3 / 2;
const STEP_LIMIT: Duration = Duration::from_secs(20);
/// Numbers of addresses that the topology has not given away.
const FREE_NUMBER: usize = 100;

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}
use Family::{V4, V6};

/// The host whose addresses change, and the one address that it has.
struct Mover<'a> {
    lab: &'a Lab,
    host: &'a Host,
    address: IpNet,
    number: usize,
}

impl<'a> Mover<'a> {
    /// Leaves a host with its IPv4 address.
    fn new(lab: &'a Lab, host: &'a Host) -> Result<Self> {
        let v6 = interface::first_address(lab, host, 0, true)?;
        interface::change(lab, host, &[Act::Remove(0, v6)])?;
        Ok(Self { lab, host, address: interface::first_address(lab, host, 0, false)?, number: FREE_NUMBER })
    }

    fn next(&mut self, to: Family) -> Result<IpNet> {
        self.number += 1;
        interface::address(self.lab, self.host, 0, to == V6, self.number)
    }

    /// In one go.
    fn change(&mut self, to: Family) -> Result<Moment> {
        let new = self.next(to)?;
        let old = std::mem::replace(&mut self.address, new);
        interface::change(self.lab, self.host, &[Act::Add(0, new), Act::Remove(0, old)])
    }

    /// With nothing in between.
    fn change_after_gap(&mut self, to: Family) -> Result<Moment> {
        let new = self.next(to)?;
        let old = std::mem::replace(&mut self.address, new);
        interface::change(self.lab, self.host, &[Act::Remove(0, old)])?;
        std::thread::sleep(GAP);
        interface::change(self.lab, self.host, &[Act::Add(0, new)])
    }

    /// Gives the host back what the topology has for it.
    fn settle(self) -> Result<()> {
        let [v4, v6] = [false, true].map(|v6| interface::first_address(self.lab, self.host, 0, v6));
        let (v4, v6) = (v4?, v6?);
        let mut acts = vec![Act::Add(0, v4), Act::Add(0, v6)];
        acts.extend((self.address != v4).then_some(Act::Remove(0, self.address)));
        interface::change(self.lab, self.host, &acts).map(drop)
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = moved::build_far("renumber", dir)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let rtt_ms = moved::measure_rtt_ms(client, server, findings)?;
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[client, server], findings)?;
    let mut serving = moved::serve(server)?;
    [client, server].iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    let (mut at_once, mut with_gap) = (Pauses::default(), Pauses::default());
    for figure in ["changes", "gaps"] {
        findings.set(figure, 0.0);
    }
    for side in SIDES {
        let host = lab.host(side)?;
        pair::attempt_part(&format!("changes of the {side}"), findings, |findings| {
            let mut mover = Mover::new(&lab, host)?;
            let done = renumber(&mut mover, &mut serving, &mut at_once, &mut with_gap, findings);
            // Whatever became of them, the other side begins in order.
            let settled = mover.settle();
            done.and(settled)
        });
    }
    at_once.report_rtts("", rtt_ms, findings);
    with_gap.report_rtts("gap_", rtt_ms, findings);
    pair::report_resets(&[client, server], findings)?;
    moved::report_moves(&[client, server], findings)
}

fn renumber(
    mover: &mut Mover<'_>,
    serving: &mut Server,
    at_once: &mut Pauses,
    with_gap: &mut Pauses,
    findings: &mut Findings,
) -> Result<()> {
    let client = mover.lab.host("client")?;
    let order = Order { to: NAME, ways: &WAYS, pace: PACE };
    let mut transfers = Transfers::start(client, serving, order)?;
    let changed = change_all(mover, &mut transfers, at_once, with_gap, findings);
    transfers.finish(&format!("changes of the {}", mover.host.name()), findings)?;
    changed
}

fn change_all(
    mover: &mut Mover<'_>,
    transfers: &mut Transfers<'_>,
    at_once: &mut Pauses,
    with_gap: &mut Pauses,
    findings: &mut Findings,
) -> Result<()> {
    transfers.await_bytes("calm transfers", CALM_BYTES, STEP_LIMIT)?;
    let side = mover.host.name().to_owned();
    for to in AT_ONCE {
        let from = mover.address;
        let moment = mover.change(to)?;
        let what = format!("{side}: {from} became {}", mover.address);
        // From before it was made: the old address is gone as soon as the new one is there.
        let pauses = at_once
            .enter("transfers that go on", transfers, moment.before_us, RESUMED_BYTES, STEP_LIMIT)
            .with_context(|| what.clone())?;
        progress(&format!("{what}: {pauses}"));
        findings.figures.add("changes", 1.0);
    }
    for to in WITH_GAP {
        let from = mover.address;
        let moment = mover.change_after_gap(to)?;
        let what = format!("{side}: {from} became {} after {GAP:?}", mover.address);
        let pauses = with_gap
            .enter("transfers that go on", transfers, moment.after_us, RESUMED_BYTES, STEP_LIMIT)
            .with_context(|| what.clone())?;
        progress(&format!("{what}: {pauses}"));
        findings.figures.add("gaps", 1.0);
    }
    Ok(())
}
