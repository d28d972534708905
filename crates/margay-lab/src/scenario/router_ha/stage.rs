//! Routers and members of etcd, three of each or fewer, servers and a client on one subnet; and what can happen to
//! them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::agent::{self, margay};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::topology::Topology;

/// The routers.
pub const ROUTERS: [&str; 3] = ["r1", "r2", "r3"];
/// The members of etcd.
pub const MEMBERS: [&str; 3] = ["e1", "e2", "e3"];
/// The hosts that serve.
pub const SERVERS: [&str; 3] = ["web1", "web2", "web3"];
/// How long something may take that does not concern new connections.
pub const LIMIT: Duration = Duration::from_secs(20);
const PREFIX: &str = "/margay/lab";

/// Who is there.
#[derive(Clone, Copy)]
pub struct Cast {
    /// The scenario.
    pub name: &'static str,
    /// The routers.
    pub routers: &'static [&'static str],
    /// The members of etcd.
    pub members: &'static [&'static str],
    /// The hosts that serve.
    pub servers: &'static [&'static str],
    /// Hosts that run no agent yet.
    pub late: &'static [&'static str],
}

/// The lab, and what runs in it besides the agents.
pub struct Stage {
    cast: Cast,
    /// All hosts.
    pub lab: Lab,
    /// Join token of the authority.
    pub token: String,
    members: RefCell<BTreeMap<&'static str, Program>>,
}

fn topology(cast: &Cast) -> Result<Topology> {
    let mut text = "[subnet.site]\nv4 = \"10.1.0.0/24\"\n".to_owned();
    let clients: &[&str] = &["client"];
    let agents = [cast.servers, clients, cast.late].map(|names| (names, "agent"));
    let roles = [(cast.routers, "router"), (cast.members, "plain")].into_iter().chain(agents);
    for (names, role) in roles {
        for name in names {
            text += &format!("[host.{name}]\nrole = \"{role}\"\nlinks = [{{ subnet = \"site\" }}]\n");
        }
    }
    Ok(Topology::parse(cast.name, &text)?)
}

fn address(host: &Host) -> Result<IpAddr> {
    host.plan.address().with_context(|| format!("{} has no address", host.name()))
}

impl Stage {
    /// Builds it and starts all of it.
    pub fn build(cast: Cast, dir: &Path) -> Result<Self> {
        let lab = Lab::build(topology(&cast)?, dir)?;
        let mut this = Self { cast, lab, token: String::new(), members: RefCell::default() };
        cast.members.iter().try_for_each(|member| this.start_member(member))?;
        this.start_routers()?;
        this.token = wait_for("a join token", LIMIT, || {
            Ok(margay(this.host(cast.routers[0])?, ["id", "token", "create", "shop", "--uses", "100"])?
                .trim()
                .to_owned())
        })?;
        for name in cast.servers.iter().chain(&["client"]) {
            agent::join(this.host(name)?, &this.token)?;
        }
        this.await_homes()?;
        Ok(this)
    }

    /// A host of the lab.
    pub fn host(&self, name: &str) -> Result<&Host> {
        self.lab.host(name)
    }

    fn endpoints(&self) -> Result<Vec<String>> {
        self.cast.members.iter().map(|member| Ok(format!("http://{}:2379", address(self.host(member)?)?))).collect()
    }

    /// Starts a member of etcd, with the data that it left.
    pub fn start_member(&self, name: &'static str) -> Result<()> {
        let host = self.host(name)?;
        let own = address(host)?;
        let peers: Result<Vec<String>> = self
            .cast
            .members
            .iter()
            .map(|peer| Ok(format!("{peer}=http://{}:2380", address(self.host(peer)?)?)))
            .collect();
        let data = host.dir.join("etcd");
        let argv = [
            "etcd".to_owned(),
            format!("--name={name}"),
            format!("--data-dir={}", data.display()),
            format!("--listen-client-urls=http://{own}:2379"),
            format!("--advertise-client-urls=http://{own}:2379"),
            format!("--listen-peer-urls=http://{own}:2380"),
            format!("--initial-advertise-peer-urls=http://{own}:2380"),
            format!("--initial-cluster={}", peers?.join(",")),
        ];
        self.members.borrow_mut().insert(name, host.spawn("etcd", argv)?);
        Ok(())
    }

    /// Ends a member of etcd without a word.
    pub fn kill_member(&self, name: &str) -> Result<()> {
        let mut program = self.members.borrow_mut().remove(name).with_context(|| format!("{name} does not run"))?;
        program.signal(Signal::SIGKILL)?;
        wait_for("the end of a member of etcd", LIMIT, || program.ended()?.context("it is there"))?;
        Ok(())
    }

    /// All routers sign for the authority: the first by its key, the others by keys of their own and its word.
    fn start_routers(&self) -> Result<()> {
        let endpoints = self.endpoints()?.iter().map(|url| format!("{url:?}")).collect::<Vec<_>>().join(", ");
        let configuration =
            format!("[router]\nenabled = true\n[router.etcd]\nendpoints = [{endpoints}]\nprefix = \"{PREFIX}\"\n");
        let first = self.host(self.cast.routers[0])?;
        for name in self.cast.routers {
            let host = self.host(name)?;
            host.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{configuration}END\n"))?;
            margay(host, ["up"])?;
            if *name == first.name() {
                margay(host, ["id", "authority", "create", "shop"])?;
                continue;
            }
            let request = margay(host, ["id", "authority", "request", "shop"])?;
            let warrant = margay(first, ["id", "authority", "sign", request.trim()])?;
            margay(host, ["id", "accept", warrant.trim()])?;
        }
        Ok(())
    }

    /// Waits until every host is registered with every router, routers know each other, and all follow etcd.
    pub fn await_homes(&self) -> Result<()> {
        for name in self.cast.servers.iter().chain(&["client"]) {
            wait_for(&format!("{name} is registered everywhere"), LIMIT, || {
                let status = agent::status(self.host(name)?)?;
                let routers = status["routers"].as_array().cloned().unwrap_or_default();
                let connected = routers.iter().filter(|router| router["state"] == "connected").count();
                if connected == self.cast.routers.len() { Ok(()) } else { bail!("with {connected}: {routers:?}") }
            })?;
        }
        self.cast.routers.iter().try_for_each(|name| self.await_router(name))
    }

    /// Waits until a router follows etcd and has all others.
    pub fn await_router(&self, name: &str) -> Result<()> {
        wait_for(&format!("{name} is one of the cluster"), LIMIT, || {
            let cluster = agent::status(self.host(name)?)?["cluster"].clone();
            let routers = cluster["routers"].as_array().cloned().unwrap_or_default();
            let there = routers.iter().filter(|router| router["state"] != "unreachable").count();
            if cluster["connected"] == true && there == self.cast.routers.len() { Ok(()) } else { bail!("{cluster}") }
        })
    }

    /// Waits until a router follows etcd, or does not.
    pub fn await_etcd(&self, router: &str, is_there: bool) -> Result<()> {
        wait_for(&format!("etcd at {router}: {is_there}"), LIMIT, || {
            let cluster = agent::status(self.host(router)?)?["cluster"].clone();
            if cluster["connected"] == is_there { Ok(()) } else { bail!("{cluster}") }
        })
    }

    /// Nothing passes between hosts of one and of the other side, in either direction. It is lost where it arrives:
    /// senders are not told.
    pub fn cut(&self, one: &[&str], other: &[&str]) -> Result<()> {
        for (side, others) in [(one, other), (other, one)] {
            let gone: Result<Vec<String>> =
                others.iter().map(|name| Ok(address(self.host(name)?)?.to_string())).collect();
            let gone = gone?.join(", ");
            let rules = format!(
                "add table inet lab_cut
                add chain inet lab_cut in {{ type filter hook input priority -200; }}
                add rule inet lab_cut in ip saddr {{ {gone} }} drop"
            );
            side.iter().try_for_each(|name| self.host(name)?.run(["nft", &rules]).map(drop))?;
        }
        Ok(())
    }

    /// All that was cut is mended.
    pub fn mend(&self) -> Result<()> {
        self.lab
            .hosts
            .iter()
            .try_for_each(|host| host.run(["nft", "add table inet lab_cut; delete table inet lab_cut"]).map(drop))
    }

    /// Hosts that a router lists for a name.
    pub fn listed(&self, router: &str, service: &str) -> Result<Vec<String>> {
        let found = agent::resolve(self.host(router)?, service)?;
        let instances = found["instances"].as_array().cloned().unwrap_or_default();
        let mut names: Vec<String> =
            instances.iter().filter_map(|one| one["host_name"].as_str()).map(str::to_owned).collect();
        names.sort();
        Ok(names)
    }

    /// Keys of registrations in etcd, as `ROUTER/…-HOST`, by the hosts' identifiers.
    pub fn registered_keys(&self) -> Result<Vec<String>> {
        let endpoints = self.endpoints()?.join(",");
        let words = ["env", "ETCDCTL_API=3", "etcdctl", "--endpoints", &endpoints, "get", "--prefix", "--keys-only"];
        let below = format!("{PREFIX}/hosts/");
        let text = self.host("client")?.run(words.into_iter().chain([below.as_str()]))?;
        Ok(text.lines().filter_map(|line| line.strip_prefix(&below)).map(str::to_owned).collect())
    }
}
