//! `[[ensemble]]`: switches that run while the agent does.

use std::ops::Range;
use std::path::PathBuf;

use clap::ValueEnum;
use margay_ensemble::{WINDOW_DEFAULT, WINDOW_MAX, WINDOW_MIN};
use margay_frames::module::Module;
use margay_frames::protocol::{Content, Protocol};
use margay_frames::router::Policy;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use crate::fields;
use crate::listener::ServiceName;

/// `[[ensemble]]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnsembleSection {
    /// The name that clients ask for.
    pub name: ServiceName,
    /// The name that members serve.
    pub members: ServiceName,
    /// What clients and members speak.
    #[serde(default)]
    pub protocol: EnsembleProtocol,
    /// How requests are divided; by `ketama` unless given.
    #[serde(default)]
    pub router: Option<EnsembleRouter>,
    /// Instead: a module of WebAssembly that divides them.
    #[serde(default, deserialize_with = "fields::some_absolute")]
    pub module: Option<PathBuf>,
    /// Chunks of requests, and of answers, that a connection may have under way, 16 to 4096.
    #[serde(default = "default_window", deserialize_with = "window")]
    pub window: u16,
}

const fn default_window() -> u16 {
    WINDOW_DEFAULT
}

fn window<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
    let number = i64::deserialize(from)?;
    let window = u16::try_from(number).ok().filter(|window| (WINDOW_MIN..=WINDOW_MAX).contains(window));
    window.ok_or_else(|| D::Error::custom(format!("{number} is no window; it is {WINDOW_MIN} to {WINDOW_MAX}")))
}

/// What clients and servers of an ensemble speak, as the file and the command line have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum EnsembleProtocol {
    /// One of memcached's protocols, text or binary
    #[default]
    Memcached,
    /// Redis' protocol, version 2 or 3
    Resp,
    /// Frames of the programs' own, which use the SDKs
    Frames,
}

impl From<EnsembleProtocol> for Content {
    fn from(protocol: EnsembleProtocol) -> Self {
        match protocol {
            EnsembleProtocol::Memcached => Self::Requests(Protocol::Memcached),
            EnsembleProtocol::Resp => Self::Requests(Protocol::Resp),
            EnsembleProtocol::Frames => Self::Frames,
        }
    }
}

/// What programs speak that know nothing of ensembles, as the command line has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProgramProtocol {
    /// One of memcached's protocols, text or binary
    Memcached,
    /// Redis' protocol, version 2 or 3
    Resp,
}

impl From<ProgramProtocol> for Protocol {
    fn from(protocol: ProgramProtocol) -> Self {
        match protocol {
            ProgramProtocol::Memcached => Self::Memcached,
            ProgramProtocol::Resp => Self::Resp,
        }
    }
}

/// How an ensemble divides requests, as the file and the command line have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum EnsembleRouter {
    /// By key, with the ring of libketama
    #[default]
    Ketama,
    /// One after the other
    RoundRobin,
}

impl From<EnsembleRouter> for Policy {
    fn from(router: EnsembleRouter) -> Self {
        match router {
            EnsembleRouter::Ketama => Self::Ketama,
            EnsembleRouter::RoundRobin => Self::RoundRobin,
        }
    }
}

/// What is wrong, at which bytes of the file, and what to do.
type Fault = (String, Option<Range<usize>>, String);

impl EnsembleSection {
    /// What is wrong with it as a whole, and what to do.
    fn check(&self) -> Result<(), (String, String)> {
        if self.name.0.prefix().overlaps(&self.members.0.prefix()) {
            let what = format!("{} and {} are not apart: the ensemble would ask itself", self.name, self.members);
            return Err((what, "give the members a name of their own".into()));
        }
        if self.module.is_some() && self.router.is_some() {
            let what = format!("the module of {} divides requests in the router's place", self.name);
            return Err((what, "remove `router`, or `module`".into()));
        }
        Ok(())
    }
}

/// Looks at all sections.
///
/// # Errors
///
/// What is wrong with one of them, or with several together, and where.
pub fn check(sections: &[Spanned<EnsembleSection>]) -> Result<(), Fault> {
    for (at, section) in sections.iter().enumerate() {
        let this = section.get_ref();
        this.check().map_err(|(what, advice)| (what, Some(section.span()), advice))?;
        if sections[..at].iter().any(|earlier| earlier.get_ref().name == this.name) {
            let what = format!("{} has two switches on this host", this.name);
            return Err((what, Some(section.span()), "remove one of the two [[ensemble]] sections".into()));
        }
    }
    Ok(())
}

/// Looks at the modules, which lie in files of their own.
///
/// # Errors
///
/// One that no switch would take, and where it is named.
pub fn check_modules(sections: &[Spanned<EnsembleSection>]) -> Result<(), Fault> {
    for section in sections {
        let this = section.get_ref();
        if let Some(path) = &this.module
            && let Err(error) = Module::read(path)
        {
            let what = format!("the module of {} is not taken: {error}", this.name);
            let advice = "`margay ensemble try FILE` tries a module; correct `module`, or leave it out".into();
            return Err((what, Some(section.span()), advice));
        }
    }
    Ok(())
}
