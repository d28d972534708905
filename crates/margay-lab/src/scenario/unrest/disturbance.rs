//! What happens to hosts, in an order that a seed gives.

use std::time::Duration;

use anyhow::{Context, Result};
use ipnet::IpNet;

use crate::agent;
use crate::command::progress;
use crate::host::Host;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::pump::Dice;
use crate::topology::Role;

/// Numbers of addresses from here on are nobody's.
const FREE_NUMBER: usize = 100;
const OUTAGE: Duration = Duration::from_secs(2);
/// Between two disturbances, at most: some come before hosts have found each other again, others after.
const PAUSE_MAX_MS: usize = 4_000;

/// Something that happens to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disturbance {
    /// Its link is down for [`OUTAGE`].
    Cut,
    /// Its address of one family is replaced by another one. A translator gives it another port then.
    Renumber,
    /// Its agent is killed and started again.
    Kill,
    /// Its agent is killed, and started again after [`OUTAGE`].
    KillForLonger,
}

const ALL: [Disturbance; 4] = [Disturbance::Cut, Disturbance::Renumber, Disturbance::Kill, Disturbance::KillForLonger];

/// A host, and the addresses that it has now.
struct Target<'a> {
    host: &'a Host,
    addresses: Vec<IpNet>,
}

/// Disturbances of a lab's hosts.
pub struct Unrest<'a> {
    lab: &'a Lab,
    dice: Dice,
    targets: Vec<Target<'a>>,
    number: usize,
    history: Vec<String>,
}

impl<'a> Unrest<'a> {
    /// For all hosts with an agent, which have the addresses of the topology.
    ///
    /// # Errors
    ///
    /// A host has no address.
    pub fn begin(lab: &'a Lab, seed: u64) -> Result<Self> {
        let with_agent = |host: &&Host| matches!(host.plan.role, Role::Agent | Role::Router);
        let targets = lab.hosts.iter().filter(with_agent).map(|host| {
            let families = [false, true].map(|v6| interface::first_address(lab, host, 0, v6).ok());
            Target { host, addresses: families.into_iter().flatten().collect() }
        });
        Ok(Self { lab, dice: Dice::new(seed), targets: targets.collect(), number: FREE_NUMBER, history: Vec::new() })
    }

    /// The next disturbance, and a pause of random length.
    ///
    /// # Errors
    ///
    /// A host's interface cannot be changed, or its agent does not start.
    pub fn disturb(&mut self) -> Result<()> {
        let which = self.dice.below(self.targets.len());
        let disturbance = ALL[self.dice.below(ALL.len())];
        // A router's address stands in its hosts' configuration.
        let is_router = self.targets[which].host.plan.role == Role::Router;
        let disturbance =
            if is_router && disturbance == Disturbance::Renumber { Disturbance::Cut } else { disturbance };
        let said = format!("{disturbance:?} of {}", self.targets[which].host.name());
        progress(&said);
        self.history.push(said);
        match disturbance {
            Disturbance::Cut => self.cut(which)?,
            Disturbance::Renumber => self.renumber(which)?,
            Disturbance::Kill => self.kill(which, Duration::ZERO)?,
            Disturbance::KillForLonger => self.kill(which, OUTAGE)?,
        }
        std::thread::sleep(Duration::from_millis(self.dice.below(PAUSE_MAX_MS) as u64));
        Ok(())
    }

    /// What has happened so far, in order.
    pub fn history(&self) -> String {
        self.history.join(", ")
    }

    fn cut(&mut self, which: usize) -> Result<()> {
        let Target { host, addresses } = &self.targets[which];
        interface::change(self.lab, host, &[Act::Down(0)])?;
        std::thread::sleep(OUTAGE);
        let mut acts = vec![Act::Up(0)];
        acts.extend(addresses.iter().map(|own| Act::Add(0, *own)));
        // The kernel has dropped the IPv6 address, and the topology's comes with the link.
        let first_v6 = interface::first_address(self.lab, host, 0, true).ok();
        acts.extend(first_v6.filter(|first| !addresses.contains(first)).map(|first| Act::Remove(0, first)));
        interface::change(self.lab, host, &acts).map(drop)
    }

    fn renumber(&mut self, which: usize) -> Result<()> {
        self.number += 1;
        let Target { host, addresses } = &mut self.targets[which];
        let index = self.dice.below(addresses.len());
        let old = *addresses.get(index).with_context(|| format!("{} has no address", host.name()))?;
        let new = interface::address(self.lab, host, 0, old.addr().is_ipv6(), self.number)?;
        addresses[index] = new;
        interface::change(self.lab, host, &[Act::Add(0, new), Act::Remove(0, old)]).map(drop)
    }

    fn kill(&self, which: usize, outage: Duration) -> Result<()> {
        let host = self.targets[which].host;
        agent::kill(host)?;
        std::thread::sleep(outage);
        agent::start(host)
    }

    /// Gives all hosts the addresses of the topology back.
    ///
    /// # Errors
    ///
    /// A host's interface cannot be changed.
    pub fn settle(self) -> Result<()> {
        for Target { host, addresses } in &self.targets {
            let families = [false, true].map(|v6| interface::first_address(self.lab, host, 0, v6).ok());
            let first: Vec<IpNet> = families.into_iter().flatten().collect();
            let add = first.iter().map(|own| Act::Add(0, *own));
            let remove = addresses.iter().filter(|own| !first.contains(own)).map(|own| Act::Remove(0, *own));
            let acts: Vec<Act> = add.chain(remove).collect();
            interface::change(self.lab, host, &acts)?;
        }
        Ok(())
    }
}
