//! The one configuration file (TOML). Every field has a default; an unknown word is an error that points at its line.
//!
//! ```toml
//! [join]
//! token_file = "/etc/margay/join-token"
//!
//! [[service]]
//! name = "web.shop"
//! listen = "0.0.0.0:8080"
//! port = 80
//! ```

mod ensemble;
mod service;
mod stack_rule;

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use margay_core::chain::Requirement;
use margay_core::name::Prefix;
use margay_core::stack_rule::StackRule;
use margay_core::{PlaceStack, PlaceStacks, PlaceStacksError, Policy, RangeV4, RangeV6, Ranges, Weights, WeightsError};
use miette::Diagnostic;
use nix::unistd::{Group, User};
use serde::{Deserialize, Serialize};
use toml::Spanned;

pub use self::ensemble::{EnsembleProtocol, EnsembleRouter, EnsembleSection, ProgramProtocol};
pub use self::service::{OnDrain, Rebalance, ServiceSection};
pub use self::stack_rule::StackRuleSection;

use crate::etcd_section::EtcdSection;
use crate::fields::{self, Patience};
use crate::listener::ServiceName;
use crate::misread::{self, Misread};
use crate::resolver::ResolverSection;
use crate::site::{self, Names, NeighbourSection, ScopeSection};

/// Where it lies unless `--config` says otherwise.
pub const DEFAULT_PATH: &str = "/etc/margay/margay.toml";

/// The whole file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Whether flows may go direct, carried by the kernel; otherwise all are encapsulated.
    pub direct: bool,
    /// Whether every flow of this host is to be sealed, at whichever end it is; what cannot be is refused.
    pub secure: bool,
    /// Interfaces that lead to containers and virtual machines of this host, whose addresses may use names; bridges
    /// that lead nowhere else, unless given.
    #[serde(deserialize_with = "fields::interface_names")]
    pub inside: Option<Vec<String>>,
    /// Where this host keeps things.
    pub host: HostSection,
    /// Whether this host is a service router.
    pub router: RouterSection,
    /// The router that this host registers with.
    pub join: JoinSection,
    /// Names without a router.
    pub ad_hoc: AdHocSection,
    /// Services published by this host.
    pub service: Vec<Spanned<ServiceSection>>,
    /// Names that users other than root may bind.
    pub bind: Vec<Spanned<BindSection>>,
    /// What flows do with several addresses, by name.
    pub multihoming: Vec<Spanned<MultihomingSection>>,
    /// When flows are carried plain and when sealed, by name.
    pub stack_rule: Vec<Spanned<StackRuleSection>>,
    /// Switches of ensembles that run while the agent does.
    pub ensemble: Vec<Spanned<EnsembleSection>>,
    /// Who is asked who serves a name.
    pub resolver: Vec<Spanned<ResolverSection>>,
    /// Plain addresses for names whose service has no instance.
    pub fallback: Vec<Spanned<FallbackSection>>,
    /// Addresses that this host uses for nothing else.
    pub ranges: RangesSection,
    /// The DNS responder.
    pub dns: DnsSection,
    /// `/metrics`.
    pub metrics: MetricsSection,
    /// The API for operators on other hosts; it is heard on this host alone unless given.
    pub api: Option<ApiSection>,
    /// Logs.
    pub log: LogSection,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            direct: true,
            secure: false,
            inside: None,
            host: HostSection::default(),
            router: RouterSection::default(),
            join: JoinSection::default(),
            ad_hoc: AdHocSection::default(),
            service: Vec::new(),
            bind: Vec::new(),
            multihoming: Vec::new(),
            stack_rule: Vec::new(),
            ensemble: Vec::new(),
            resolver: Vec::new(),
            fallback: Vec::new(),
            ranges: RangesSection::default(),
            dns: DnsSection::default(),
            metrics: MetricsSection::default(),
            api: None,
            log: LogSection::default(),
        }
    }
}

/// `[host]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostSection {
    /// Keys, leases, registry and the journal of what `up` changed. Root only.
    #[serde(deserialize_with = "fields::absolute")]
    pub state_dir: PathBuf,
    /// Socket, lock and log of a running agent.
    #[serde(deserialize_with = "fields::absolute")]
    pub runtime_dir: PathBuf,
    /// UDP port of the SAL.
    #[serde(deserialize_with = "fields::port")]
    pub port: u16,
    /// What lists call this host; the kernel's host name unless given.
    #[serde(deserialize_with = "fields::some_host_name")]
    pub name: Option<String>,
    /// Whether the host's kernel forwards what comes in by `sal0` and is for nobody here: sessions of other hosts may
    /// pass boxes of this one.
    pub boxes: bool,
    /// A group whose members may use the API, too.
    pub group: Option<Spanned<String>>,
    /// Connections to a host that is silent for so long, and that no router lists, end with an error: `500ms` to `24h`,
    /// or `never`. Unless given: for as long as the service says, or `30s`.
    pub give_up_after: Option<Patience>,
}

impl Default for HostSection {
    fn default() -> Self {
        Self {
            state_dir: margay_control::state_dir::DEFAULT.into(),
            runtime_dir: "/run/margay".into(),
            port: margay_wire::PORT,
            name: None,
            boxes: false,
            group: None,
            give_up_after: None,
        }
    }
}

/// `[router]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterSection {
    /// Take registrations, and forward first packets for others.
    pub enabled: bool,
    /// TCP address for registrations; `[::]` is every address of both families.
    #[serde(deserialize_with = "fields::address_and_port")]
    pub listen: SocketAddr,
    /// Where hosts find this router: `host:port`; the first address of this host unless given.
    #[serde(deserialize_with = "fields::some_place")]
    pub address: Option<String>,
    /// What it shares with other routers.
    pub etcd: Option<EtcdSection>,
    /// What routers of other sites call this one's; with it, announcements are exchanged with them.
    #[serde(deserialize_with = "site::own_site")]
    pub site: Option<String>,
    /// Announced in place of the services under them.
    pub announce: Vec<Names>,
    /// The share that this site asks for, among sites that are as good.
    #[serde(deserialize_with = "site::weight")]
    pub site_weight: u32,
    /// How far announcements of names go.
    pub scope: Vec<Spanned<ScopeSection>>,
    /// How routers of other sites are taken.
    pub neighbour: Vec<Spanned<NeighbourSection>>,
}

impl Default for RouterSection {
    fn default() -> Self {
        Self {
            enabled: false,
            listen: (Ipv6Addr::UNSPECIFIED, margay_wire::PORT).into(),
            address: None,
            etcd: None,
            site: None,
            announce: Vec::new(),
            site_weight: site::default_weight(),
            scope: Vec::new(),
            neighbour: Vec::new(),
        }
    }
}

/// `[join]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JoinSection {
    /// Address of the router; the token names one, which this replaces.
    #[serde(deserialize_with = "fields::some_address_and_port")]
    pub router: Option<SocketAddr>,
    /// The join token, as `margay id token create` printed it.
    #[serde(deserialize_with = "fields::some_token")]
    pub token: Option<String>,
    /// A file that holds it.
    #[serde(deserialize_with = "fields::some_absolute")]
    pub token_file: Option<PathBuf>,
}

/// `[ad_hoc]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdHocSection {
    /// While there is no router, ask the network segments for names that are not served here.
    pub enabled: bool,
    /// Pass on what is asked on one segment to the others.
    pub relay: bool,
    /// Tell the network segments which names are served here, and go by what others tell.
    pub flood: bool,
}

impl Default for AdHocSection {
    fn default() -> Self {
        Self { enabled: true, relay: false, flood: false }
    }
}

/// `[[bind]]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindSection {
    /// Whose programs.
    #[serde(default)]
    pub user: Option<String>,
    /// Instead: whose members' programs.
    #[serde(default)]
    pub group: Option<String>,
    /// Which names, or prefixes (`sid:<hex>/bits`) with all that is under them.
    pub names: Vec<ServiceName>,
    /// Users whose programs may hand sockets of these names over to those programs, on this host, beside their own
    /// user.
    #[serde(default)]
    pub takes_from: Vec<String>,
}

impl BindSection {
    /// What is wrong with it as a whole, and what to do.
    fn check(&self) -> Result<(), (String, String)> {
        if self.user.is_some() == self.group.is_some() {
            let what = "a [[bind]] section is about one user, or about one group".to_owned();
            return Err((what, "write `user` or `group`, and a section for each".to_owned()));
        }
        if self.names.is_empty() {
            return Err((
                "a [[bind]] section grants no name".to_owned(),
                "write some `names`, or remove it".to_owned(),
            ));
        }
        if let Some(twice) =
            (1..self.takes_from.len()).find(|at| self.takes_from[..*at].contains(&self.takes_from[*at]))
        {
            let what = format!("`takes_from` has `{}` twice", self.takes_from[twice]);
            return Err((what, "remove one of them".to_owned()));
        }
        Ok(())
    }
}

/// `[[multihoming]]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MultihomingSection {
    /// Which names, or prefixes (`sid:<hex>/bits`) with all that is under them.
    pub names: Vec<ServiceName>,
    /// What flows to them, or of them, do.
    pub policy: PolicyWord,
    /// With `pin`: which address, of this host or of the peer.
    #[serde(default, deserialize_with = "fields::some_address")]
    pub address: Option<IpAddr>,
    /// With `weighted`: how often places with these addresses, of this host or of the peer, have their turn: 1 to 255.
    /// Others have 1.
    #[serde(default)]
    pub weights: BTreeMap<IpAddr, u32>,
    /// With `stripe`: by which addresses, of this host or of the peer, flows are `plain`; by all others they are
    /// `secure` then. And by which what flows of datagrams lose is repaired: `fec`.
    #[serde(default)]
    pub stacks: BTreeMap<IpAddr, PlaceStackWord>,
}

/// How a flow goes by a place, as the file has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlaceStackWord {
    /// As it is.
    Plain,
    /// Sealed.
    Secure,
    /// What is lost is repaired; of flows of datagrams.
    Fec,
}

/// A policy, as the file has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyWord {
    /// Go with all flows of the peer.
    FailOver,
    /// Stay with one address.
    Pin,
    /// Go by several pairs of addresses at once, each packet where it arrives first.
    Stripe,
    /// Go by several pairs of addresses in turns.
    Weighted,
    /// Send each packet by two pairs of addresses.
    Redundant,
}

impl MultihomingSection {
    fn policy(&self) -> Policy {
        match (self.policy, self.address) {
            (PolicyWord::Pin, Some(address)) => Policy::Pin(address),
            (PolicyWord::Stripe, _) if self.stacks.is_empty() => Policy::Stripe,
            // Places that cannot be were refused when the file was read.
            (PolicyWord::Stripe, _) => self.read_stacks().map_or(Policy::Stripe, Policy::StripePartly),
            (PolicyWord::Redundant, _) => Policy::Redundant,
            // Weights that are none were refused when the file was read.
            (PolicyWord::Weighted, _) => self.read_weights().map_or(Policy::Stripe, Policy::Weighted),
            (PolicyWord::Pin | PolicyWord::FailOver, _) => Policy::FailOver,
        }
    }

    fn read_stacks(&self) -> Result<PlaceStacks, PlaceStacksError> {
        PlaceStacks::new(self.stacks.iter().filter_map(|(address, stack)| match stack {
            PlaceStackWord::Plain => Some((*address, PlaceStack::Plain)),
            PlaceStackWord::Fec => Some((*address, PlaceStack::Fec)),
            PlaceStackWord::Secure => None,
        }))
    }

    fn read_weights(&self) -> Result<Weights, WeightsError> {
        Weights::new(self.weights.iter().map(|(address, weight)| (*address, *weight)))
    }

    /// What is wrong with it as a whole, and what to do.
    fn check(&self) -> Result<(), (String, String)> {
        if self.policy == PolicyWord::Weighted {
            let advice = "write `weights`, as in { \"192.0.2.1\" = 2 }: of up to four addresses, 1 to 255 each";
            self.read_weights().map_err(|error| (error.to_string(), advice.to_owned()))?;
        } else if !self.weights.is_empty() {
            return Err(("only `weighted` takes weights".to_owned(), "remove `weights`".to_owned()));
        }
        if !self.stacks.is_empty() {
            if self.policy != PolicyWord::Stripe {
                return Err(("only `stripe` takes stacks of its places".to_owned(), "remove `stacks`".to_owned()));
            }
            let advice = "write `stacks` as in { \"192.0.2.1\" = \"plain\" }: up to four addresses, one plain \
                          where one is secure";
            let own = self.read_stacks().map_err(|error| (error.to_string(), advice.to_owned()))?;
            let has_sealed = self.stacks.values().any(|stack| *stack == PlaceStackWord::Secure);
            if has_sealed && !own.have(PlaceStack::Plain) {
                return Err(("`stacks` has no place that is `plain`".to_owned(), advice.to_owned()));
            }
        }
        match (self.policy, self.address) {
            _ if self.names.is_empty() => Err((
                "a [[multihoming]] section is about no name".to_owned(),
                "write some `names`, or remove it".to_owned(),
            )),
            (PolicyWord::Pin, None) => Err((
                "`pin` needs an address".to_owned(),
                "add `address`: one of this host, or one of the peers".to_owned(),
            )),
            (policy, Some(address)) if policy != PolicyWord::Pin => {
                Err((format!("only `pin` takes an address, and {address} is one"), "remove `address`".to_owned()))
            }
            _ => Ok(()),
        }
    }
}

/// `[[fallback]]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FallbackSection {
    /// `service.authority`.
    pub name: ServiceName,
    /// Plain address of a server without an agent.
    #[serde(deserialize_with = "fields::address")]
    pub address: IpAddr,
}

/// `[ranges]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RangesSection {
    /// A /15 of private addresses, which stand for names, for instances and for clients on this host alone.
    #[serde(serialize_with = "fields::written", deserialize_with = "fields::range_v4")]
    pub ipv4: RangeV4,
    /// A /32 of unique local addresses, for the same.
    #[serde(serialize_with = "fields::written", deserialize_with = "fields::range_v6")]
    pub ipv6: RangeV6,
}

impl Default for RangesSection {
    fn default() -> Self {
        Self { ipv4: Ranges::USUAL.v4, ipv6: Ranges::USUAL.v6 }
    }
}

impl RangesSection {
    /// Both.
    pub const fn value(self) -> Ranges {
        Ranges { v4: self.ipv4, v6: self.ipv6 }
    }
}

/// `[dns]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DnsSection {
    /// Answer names of the zone, and be asked by this host's resolvers.
    pub enabled: bool,
    /// The zone under which names are found.
    #[serde(deserialize_with = "fields::zone")]
    pub zone: String,
    /// Where to answer in this host's own port space; unless given, behind an interface of its own, at the second
    /// address of `[ranges] ipv4`.
    #[serde(deserialize_with = "fields::some_address_and_port")]
    pub listen: Option<SocketAddr>,
}

impl Default for DnsSection {
    fn default() -> Self {
        Self { enabled: true, zone: "sal.internal".into(), listen: None }
    }
}

/// `[metrics]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsSection {
    /// TCP address that serves `/metrics`; none unless given.
    #[serde(deserialize_with = "fields::some_address_and_port")]
    pub listen: Option<SocketAddr>,
}

/// `[api]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiSection {
    /// TCP address where operators are heard.
    #[serde(deserialize_with = "fields::address_and_port")]
    pub listen: SocketAddr,
    /// The agent's certificate in PEM, and those between it and its authority.
    #[serde(deserialize_with = "fields::absolute")]
    pub certificate: PathBuf,
    /// Its private key.
    #[serde(deserialize_with = "fields::absolute")]
    pub key: PathBuf,
    /// Authorities in PEM: whoever shows a certificate of one of them is an operator.
    #[serde(deserialize_with = "fields::absolute")]
    pub operators: PathBuf,
}

/// `[log]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSection {
    /// How much to say.
    pub level: Level,
}

/// How much to say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// What failed.
    Error,
    /// And what may.
    Warn,
    /// And what happens.
    #[default]
    Info,
    /// And why.
    Debug,
    /// And every packet that was dropped.
    Trace,
}

impl Level {
    /// As tracing has it.
    pub const fn tracing(self) -> tracing::Level {
        match self {
            Self::Error => tracing::Level::ERROR,
            Self::Warn => tracing::Level::WARN,
            Self::Info => tracing::Level::INFO,
            Self::Debug => tracing::Level::DEBUG,
            Self::Trace => tracing::Level::TRACE,
        }
    }
}

/// What is wrong, at which bytes of the file, and what to do.
type Fault = (String, Option<std::ops::Range<usize>>, String);

/// What is wrong with the file, and where.
#[derive(Debug, thiserror::Error, Diagnostic)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    #[diagnostic(help("{advice}"))]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
        /// What to do.
        advice: String,
    },
    /// Its content is wrong.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Wrong(#[from] Misread),
}

impl Config {
    /// Reads `path`; without one the default path, which may be absent.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or its content is wrong.
    #[expect(clippy::result_large_err, reason = "made once, and shown")]
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        Self::load_and(path, |_| Ok(()))
    }

    /// As [`load`](Self::load), and makes sure that users, groups and modules that are named are there: for whoever has
    /// just written the file. An agent that starts goes on without them.
    ///
    /// # Errors
    ///
    /// As for [`load`](Self::load), or this host lacks one of them, or no switch would take the module.
    #[expect(clippy::result_large_err, reason = "made once, and shown")]
    pub fn load_written(path: Option<&Path>) -> Result<Self, ConfigError> {
        Self::load_and(path, |config| {
            config.check_people()?;
            ensemble::check_modules(&config.ensemble)
        })
    }

    #[expect(clippy::result_large_err, reason = "made once, and shown")]
    fn load_and(path: Option<&Path>, check: impl FnOnce(&Self) -> Result<(), Fault>) -> Result<Self, ConfigError> {
        let chosen = path.unwrap_or(Path::new(DEFAULT_PATH));
        match fs::read_to_string(chosen) {
            Ok(text) => {
                let config = Self::parse(&text, chosen)?;
                check(&config).map_err(|(what, at, advice)| Misread::new(&text, chosen, what, at, advice))?;
                Ok(config)
            }
            Err(error) if path.is_none() && error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => {
                let advice = match error.kind() {
                    std::io::ErrorKind::NotFound => "name a file that exists with --config, or leave the option out",
                    std::io::ErrorKind::PermissionDenied => "run as root, or let this user read the file",
                    _ => "give --config a TOML file",
                };
                Err(ConfigError::Unreadable { path: chosen.to_owned(), error, advice: advice.into() })
            }
        }
    }

    /// Reads `text`, which came from `path`.
    ///
    /// # Errors
    ///
    /// Its content is wrong.
    #[expect(clippy::result_large_err, reason = "made once, and shown")]
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let config: Self =
            misread::read(text, path, "the book's page on configuration lists every field with its default")?;
        config.check_whole().map_err(|(what, at, advice)| Misread::new(text, path, what, at, advice))?;
        stack_rule::rules(&config.stack_rule, text, "")
            .map_err(|(what, at, advice)| Misread::new(text, path, what, at, advice))?;
        Ok(config)
    }

    /// What no single field can know.
    fn check_whole(&self) -> Result<(), Fault> {
        for (at, service) in self.service.iter().enumerate() {
            let this = service.get_ref();
            let twin = self.service[..at].iter().map(Spanned::get_ref).find(|earlier| {
                earlier.name == this.name
                    && (earlier.listen, &earlier.executable, earlier.listen_port)
                        == (this.listen, &this.executable, this.listen_port)
                    && earlier.service_port() == this.service_port()
                    && (earlier.protocol == this.protocol || earlier.protocol.is_none() || this.protocol.is_none())
            });
            if let Err((what, advice)) = this.check(self.ranges()) {
                return Err((what, Some(service.span()), advice));
            }
            let others = self.service[..at].iter().map(Spanned::get_ref).filter(|earlier| earlier.name == this.name);
            if let Some(other) = others
                .map(ServiceSection::terms)
                .map(|other| {
                    [
                        other.partition_bits != this.partitions,
                        other.exclusive != this.exclusive,
                        other.fenced != this.fence,
                    ]
                })
                .find_map(|differs| differs.iter().position(|differs| *differs))
            {
                let word = ["partitions", "exclusive", "fence"][other];
                let what = format!("the sections of {} do not agree about `{word}`", this.name);
                return Err((what, Some(service.span()), "say the same in all of them".into()));
            }
            let others = self.service[..at].iter().map(Spanned::get_ref).filter(|earlier| earlier.name == this.name);
            if let Some(key) = others.filter_map(|other| this.differs_in_checks(other)).next() {
                let what = format!("the sections of {} do not agree about `{key}`", this.name);
                return Err((what, Some(service.span()), "say it in one of them".into()));
            }
            if twin.is_some() {
                let what = match this.listen {
                    Some(listen) => format!("{} is published twice with the listener {listen}", this.name),
                    None => format!("{} follows the same sockets twice", this.name),
                };
                return Err((what, Some(service.span()), "remove one of the two [[service]] sections".into()));
            }
        }
        for bind in &self.bind {
            bind.get_ref().check().map_err(|(what, advice)| (what, Some(bind.span()), advice))?;
        }
        self.check_multihoming()?;
        self.router.check()?;
        self.check_resolvers()?;
        ensemble::check(&self.ensemble)?;
        self.check_fallbacks()?;
        self.check_router()?;
        if self.join.token.is_some() && self.join.token_file.is_some() {
            let advice = "keep token_file, so that the configuration holds no secret".into();
            return Err(("[join] has both token and token_file".into(), None, advice));
        }
        Ok(())
    }

    fn check_fallbacks(&self) -> Result<(), Fault> {
        for (at, fallback) in self.fallback.iter().enumerate() {
            let this = fallback.get_ref();
            let is_twin = |earlier: &FallbackSection| {
                earlier.name == this.name && earlier.address.is_ipv4() == this.address.is_ipv4()
            };
            if self.fallback[..at].iter().map(Spanned::get_ref).any(is_twin) {
                let what = format!("{} has two plain addresses of one kind", this.name);
                return Err((what, Some(fallback.span()), "keep one; a fallback is the last resort".into()));
            }
            if let Some(demand) = self.demand_of(&this.name) {
                let what = format!("{} has a plain address, and {demand} demands that it is encrypted", this.name);
                let advice = "remove one of the two: whoever keeps the router's answers away would have it plain";
                return Err((what, Some(fallback.span()), advice.into()));
            }
        }
        Ok(())
    }

    /// What may demand that connections to a name are encrypted.
    fn demand_of(&self, name: &ServiceName) -> Option<&'static str> {
        let prefix = name.0.prefix();
        let demands =
            |rule: &StackRuleSection| rule.floor && rule.names.iter().any(|ruled| ruled.0.prefix().overlaps(&prefix));
        let is_ruled = self.stack_rule.iter().map(Spanned::get_ref).any(demands);
        self.secure.then_some("`secure`").or(is_ruled.then_some("a [[stack_rule]] with `floor`"))
    }

    /// Users and groups that this host lacks.
    fn check_people(&self) -> Result<(), Fault> {
        let group = |name: &str, at: std::ops::Range<usize>| match Group::from_name(name) {
            Ok(None) => {
                let advice = format!("`groupadd --system {name}` makes it; or correct the name");
                Err((format!("this host has no group `{name}`"), Some(at), advice))
            }
            // Where they cannot be asked for, nothing is known against the name.
            Ok(Some(_)) | Err(_) => Ok(()),
        };
        if let Some(name) = &self.host.group {
            group(name.get_ref(), name.span())?;
        }
        for section in &self.bind {
            let bind = section.get_ref();
            let mut users = bind.user.iter().chain(&bind.takes_from);
            if let Some(name) = users.find(|name| matches!(User::from_name(name), Ok(None))) {
                let advice = format!("`useradd --system {name}` makes it; or correct the name");
                return Err((format!("this host has no user `{name}`"), Some(section.span()), advice));
            }
            bind.group.as_deref().map_or(Ok(()), |name| group(name, section.span()))?;
        }
        Ok(())
    }

    fn check_router(&self) -> Result<(), Fault> {
        let etcd = self.router.etcd.as_ref().map_or(Ok(()), EtcdSection::check);
        etcd.map_err(|(what, advice)| (format!("[router.etcd] {what}"), None, advice))
    }

    fn check_multihoming(&self) -> Result<(), Fault> {
        for (at, section) in self.multihoming.iter().enumerate() {
            let this = section.get_ref();
            this.check().map_err(|(what, advice)| (what, Some(section.span()), advice))?;
            let is_twice = |(at, name): &(usize, &ServiceName)| this.names[..*at].contains(name);
            if let Some((_, twin)) = this.names.iter().enumerate().find(is_twice) {
                return Err((format!("{twin} is named twice"), Some(section.span()), "name it once".into()));
            }
            let mut earlier = self.multihoming[..at].iter().flat_map(|earlier| &earlier.get_ref().names);
            if let Some(twin) = earlier.find(|name| this.names.contains(name)) {
                let what = format!("{twin} has two policies");
                return Err((what, Some(section.span()), "name it in one [[multihoming]] section".into()));
            }
        }
        Ok(())
    }

    fn check_resolvers(&self) -> Result<(), Fault> {
        for (at, section) in self.resolver.iter().enumerate() {
            let this = section.get_ref();
            this.check().map_err(|(what, advice)| (what, Some(section.span()), advice))?;
            if self.resolver[..at].iter().any(|earlier| earlier.get_ref().name == this.name) {
                let what = format!("two resolvers are called `{}`", this.name);
                return Err((what, Some(section.span()), "rules know them by their names; call one otherwise".into()));
            }
        }
        Ok(())
    }

    /// What flows do with several addresses, by their names.
    pub fn policies(&self) -> Vec<(Prefix, Policy)> {
        let sections = self.multihoming.iter().map(Spanned::get_ref);
        let of = |section: &MultihomingSection| {
            let policy = section.policy();
            section.names.iter().map(|name| (name.0.prefix(), policy)).collect::<Vec<_>>()
        };
        sections.flat_map(of).collect()
    }

    /// Which rules say how flows are carried. `host_name` is what lists call this host.
    pub fn stack_rules(&self, host_name: &str) -> Vec<StackRule> {
        // They were read once already, when the file was: what is wrong with one has been said then.
        stack_rule::rules(&self.stack_rule, "", host_name).unwrap_or_default()
    }

    /// Switches that run while the agent does.
    pub fn ensembles(&self) -> impl Iterator<Item = &EnsembleSection> {
        self.ensemble.iter().map(Spanned::get_ref)
    }

    /// Names that this file wants sealed, whoever connects to them or serves them here.
    pub fn secure_names(&self) -> Vec<Prefix> {
        let secure = self.service.iter().map(Spanned::get_ref).filter(|service| service.secure);
        secure.map(|service| service.name.0.prefix()).collect()
    }

    /// What services of this host require of chains, by this file.
    pub fn required(&self) -> Vec<Requirement> {
        self.service.iter().filter_map(|section| section.get_ref().requirement()).collect()
    }

    /// Whether names that are served here are told to the network segments.
    pub fn floods(&self) -> bool {
        self.ad_hoc.flood && self.ad_hoc.enabled && !self.router.enabled
    }

    /// The virtual addresses of this host.
    pub const fn ranges(&self) -> Ranges {
        self.ranges.value()
    }

    /// Path of the API's socket.
    pub fn socket(&self) -> PathBuf {
        self.host.runtime_dir.join("api.sock")
    }
}

#[cfg(test)]
#[path = "config_test.rs"]
mod test;
