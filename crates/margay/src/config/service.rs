//! `[[service]]`: what this host serves, and how.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::ValueEnum;
use margay_control::registration::Terms;
use margay_core::Ranges;
use margay_core::chain::Requirement;
use margay_core::name::ServiceId;
use margay_core::quiet::QUIET_MS_DEFAULT;
use margay_wire::BOXES_MAX;
use serde::Deserialize;

use crate::agent::active::rule::{Offer, Rule, Source};
use crate::agent::health::spec::{HealthSection, LoadSection};
use crate::fields::{self, Patience};
use crate::listener::{self, Protocol, ServiceName};

/// `[[service]]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceSection {
    /// `service.authority`.
    pub name: ServiceName,
    /// Address and port of the listening socket, whosever it is.
    #[serde(default, deserialize_with = "fields::some_address_and_port")]
    pub listen: Option<SocketAddr>,
    /// Instead: the program whose sockets serve the name, while they listen.
    #[serde(default, deserialize_with = "fields::some_absolute")]
    pub executable: Option<PathBuf>,
    /// Instead, or besides: only sockets on this port.
    #[serde(default, deserialize_with = "fields::some_port")]
    pub listen_port: Option<u16>,
    /// Port of the service that clients use; the listener's unless given.
    #[serde(default, deserialize_with = "fields::some_port")]
    pub port: Option<u16>,
    /// `tcp`, `udp`; both unless given.
    #[serde(default)]
    pub protocol: Option<Protocol>,
    /// Share among instances of one priority.
    #[serde(default = "default_weight", deserialize_with = "fields::weight")]
    pub weight: u32,
    /// Higher first.
    #[serde(default = "default_priority")]
    pub priority: u32,
    /// Number of its partitions, a power of two; none unless given. In the program: the bits that number them.
    #[serde(default, deserialize_with = "fields::partitions")]
    pub partitions: u8,
    /// One host alone, and on it one program, may serve it.
    #[serde(default)]
    pub exclusive: bool,
    /// With `exclusive`: connections to a host that held it before are reset once another host holds it.
    #[serde(default)]
    pub fence: bool,
    /// Datagrams of one unconnected socket are for one instance.
    #[serde(default)]
    pub sticky: bool,
    /// Clients whose own operator says nothing wait for so long for this host when it is silent and no router lists it:
    /// `500ms` to `24h`, or `never`; `30s` unless given.
    #[serde(default)]
    pub give_up_after: Option<Patience>,
    /// What a drain without `--when` does with connections that are there.
    #[serde(default)]
    pub on_drain: OnDrain,
    /// With `on_drain = "quiet"`: connections end that have carried nothing for so many milliseconds, 10 to 600000;
    /// 1000 unless given.
    #[serde(default, deserialize_with = "fields::some_quiet_ms")]
    pub quiet_ms: Option<u32>,
    /// When TCP connections go from instances with more than their share to those with fewer, where their programs give
    /// them.
    #[serde(default)]
    pub rebalance: Rebalance,
    /// Flows to it are to be sealed.
    #[serde(default)]
    pub secure: bool,
    /// How this host finds out whether it is well; while it is not, it takes no new flows.
    #[serde(default)]
    pub health: Option<HealthSection>,
    /// How this host finds out how loaded it is, and with that, how much of its weight it keeps.
    #[serde(default)]
    pub load: Option<LoadSection>,
    /// Who may connect: `authority`, `any`, `host:<id>`, `group:<name>`, `authority:<name>`.
    #[serde(default, deserialize_with = "fields::allow_list")]
    pub allow: Vec<String>,
    /// Boxes, by their names: it takes only sessions that have passed all of them, whatever the policy of chains says.
    #[serde(default)]
    pub require: Vec<ServiceName>,
}

/// What becomes of a service's connections when it is drained, as the file and the command line have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum OnDrain {
    /// They may end by themselves until the deadline.
    #[default]
    Finish,
    /// Besides, TCP connections that carry nothing are ended in order.
    Quiet,
}

/// When connections of a service go to instances that have fewer than their share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rebalance {
    /// Upon `margay rebalance`.
    #[default]
    ByOrder,
    /// Also by themselves, when an instance has come or its weight was changed.
    Auto,
}

impl ServiceSection {
    /// Port that clients use; `None`: that of each socket.
    pub fn service_port(&self) -> Option<u16> {
        self.port.or(self.listen.map(|listen| listen.port()))
    }

    /// How it is served.
    pub fn terms(&self) -> Terms {
        let Self { weight, priority, partitions, exclusive, fence, sticky, .. } = *self;
        Terms {
            weight,
            priority,
            partition_bits: partitions,
            exclusive,
            fenced: fence,
            sticky,
            give_up_after_ms: self.give_up_after_ms(),
            quiet_ms: self.ends_quiet_ms(),
        }
    }

    fn give_up_after_ms(&self) -> Option<u32> {
        self.give_up_after.map(|patience| patience.0.ms())
    }

    /// After how many milliseconds of quiet a drain ends connections, if it does.
    fn ends_quiet_ms(&self) -> Option<u32> {
        (self.on_drain == OnDrain::Quiet).then(|| self.quiet_ms.unwrap_or(QUIET_MS_DEFAULT))
    }

    /// Which sockets serve it, where that is up to the programs.
    pub fn rule(&self) -> Option<Rule> {
        let offer = Offer {
            name: self.name.0.clone(),
            port: self.port,
            listen_port: self.listen_port,
            protocol: self.protocol,
            allow: self.allow.clone(),
            weight: self.weight,
            priority: self.priority,
            partition_bits: self.partitions,
            exclusive: self.exclusive,
            fenced: self.fence,
            sticky: self.sticky,
            give_up_after_ms: self.give_up_after_ms(),
            quiet_ms: self.ends_quiet_ms(),
            middlebox: None,
        };
        self.listen.is_none().then(|| Rule { source: Source::Host(self.executable.clone()), offer })
    }

    /// What it requires of chains, if it does.
    pub(super) fn requirement(&self) -> Option<Requirement> {
        let name = &self.name.0;
        let services = if name.is_service() { name.service_prefix() } else { name.prefix() };
        let boxes: Vec<ServiceId> = self.require.iter().map(|name| name.0.service_id()).collect();
        (!boxes.is_empty()).then_some(Requirement { services, boxes })
    }

    /// Which checks of a name this section and another one of it both say, and not alike.
    pub(super) fn differs_in_checks(&self, other: &Self) -> Option<&'static str> {
        if self.health.is_some() && other.health.is_some() && self.health != other.health {
            return Some("health");
        }
        (self.load.is_some() && other.load.is_some() && self.load != other.load).then_some("load")
    }

    /// What is wrong with it as a whole, and what to do.
    pub(super) fn check(&self, ranges: Ranges) -> Result<(), (String, String)> {
        let name = &self.name;
        listener::divisible(&name.0, self.partitions)
            .map_err(|what| (what, "remove `partitions`, or correct the name".to_owned()))?;
        if self.quiet_ms.is_some() && self.on_drain != OnDrain::Quiet {
            let what = format!("{name} has `quiet_ms`, and its connections are not ended when they are quiet");
            return Err((what, "add `on_drain = \"quiet\"`, or remove `quiet_ms`".to_owned()));
        }
        if self.fence && !self.exclusive {
            let what = format!("{name} has `fence`, and several hosts may serve it");
            return Err((what, "add `exclusive = true`, or remove `fence`".to_owned()));
        }
        if self.rebalance == Rebalance::Auto && (self.partitions > 0 || self.exclusive) {
            let what = format!("connections of {name} cannot go to other instances: each has a host of its own");
            return Err((what, "remove `rebalance`, or `partitions` and `exclusive`".to_owned()));
        }
        for name in &self.require {
            listener::box_name(&name.0).map_err(|what| (what, "correct `require`".to_owned()))?;
        }
        if self.require.len() > BOXES_MAX {
            let what =
                format!("{name} requires {} boxes, and a session passes {BOXES_MAX} at most", self.require.len());
            return Err((what, "write fewer into `require`".to_owned()));
        }
        self.health.as_ref().map_or(Ok(()), |health| health.check(self.protocol))?;
        self.load.as_ref().map_or(Ok(()), LoadSection::check)?;
        match self.listen {
            None if self.executable.is_none() && self.listen_port.is_none() => Err((
                format!("nothing says which sockets serve {name}"),
                "add `listen`, or `executable`, or `listen_port`".to_owned(),
            )),
            Some(_) if self.executable.is_some() || self.listen_port.is_some() => Err((
                format!("{name} has `listen`, and a program or port to follow as well"),
                "`listen` takes any program's socket there; remove it, or the others".to_owned(),
            )),
            Some(listen) => listener::deliverable(listen, ranges)
                .map_err(|what| (what, "write the address and the port of the program's socket".to_owned()))
                .and_then(|()| {
                    listener::expects_others(listen, self.protocol, &self.allow, ranges)
                        .map_err(|what| (what, "`allow = [\"authority\"]` lets in who shares an authority".to_owned()))
                }),
            None => Ok(()),
        }
    }
}

const fn default_weight() -> u32 {
    100
}

const fn default_priority() -> u32 {
    100
}
