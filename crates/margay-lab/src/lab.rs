//! A lab: all hosts of a topology, joined and running.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};

use crate::host::Host;
use crate::pump::Pump;
use crate::topology::{Role, Topology};
use crate::weather::Sky;
use crate::{filter, wire};

/// Hosts that run. Dropping it ends them.
pub struct Lab {
    /// What was built.
    pub topology: Topology,
    /// In the order of the topology.
    pub hosts: Vec<Host>,
    /// Files of the lab.
    pub dir: PathBuf,
    /// What happens to signalling where packets are delayed.
    pub sky: Arc<Sky>,
    _pumps: Vec<Pump>,
}

impl Lab {
    /// Builds the hosts, links, routes, NATs and firewalls; no agent is started.
    ///
    /// # Errors
    ///
    /// The kernel or a tool refuses something.
    pub fn build(topology: Topology, dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        // Links between hosts only: nothing of the machine's own network is here.
        wire::ip(None, "link set lo up\n")?;
        let names = hosts_file(&topology);
        let mut hosts = Vec::new();
        for plan in &topology.hosts {
            hosts.push(Host::start(plan, dir, &names)?);
        }
        let sky = Arc::new(Sky::default());
        let pumps = wire::join(&topology, &hosts, &sky)?;
        for host in hosts.iter().filter(|host| host.plan.role == Role::Gateway) {
            filter::install(host)?;
        }
        Ok(Self { topology, hosts, dir: dir.to_owned(), sky, _pumps: pumps })
    }

    /// The host of this name.
    ///
    /// # Errors
    ///
    /// There is none; the message names those that there are.
    pub fn host(&self, name: &str) -> Result<&Host> {
        match self.hosts.iter().find(|host| host.name() == name) {
            Some(host) => Ok(host),
            None => {
                let names: Vec<_> = self.hosts.iter().map(Host::name).collect();
                bail!("there is no host \"{name}\"; there are: {}", names.join(", "))
            }
        }
    }
}

/// `/etc/hosts` of every host: all of them by name.
fn hosts_file(topology: &Topology) -> String {
    let mut text = "127.0.0.1 localhost\n::1 localhost\n".to_owned();
    for host in &topology.hosts {
        if let Some(address) = host.address() {
            text.push_str(&format!("{address} {}\n", host.name));
        }
    }
    text
}
