//! `[router]` of a router that exchanges announcements with routers of other sites: how that is written in the
//! configuration.

use std::collections::BTreeMap;

use margay_control::wide_area::{Policy, Preference, Scope, is_site};
use margay_core::name::{AUTHORITY_BITS, Name, Prefix, SERVICE_BITS};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use toml::Spanned;

use crate::config::RouterSection;
use crate::listener::WEIGHT_MAX;

/// What is wrong with a section, where it says so, and what to do.
type Wrong = (String, Option<std::ops::Range<usize>>, String);

/// Names as an operator means them here: a service with all its keys, all of an authority (`*.shop`), or a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names(pub Prefix);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        if let Some(authority) = text.strip_prefix("*.") {
            let name: Name = format!("x.{authority}").parse().map_err(D::Error::custom)?;
            return Ok(Self(Prefix::new(name.service_id(), AUTHORITY_BITS)));
        }
        let name: Name = text.parse().map_err(D::Error::custom)?;
        let prefix = name.prefix();
        if prefix.bits < AUTHORITY_BITS {
            let what = format!("`{text}` covers names of many authorities; write sid: with /{AUTHORITY_BITS} at least");
            return Err(D::Error::custom(what));
        }
        Ok(Self(if name.is_service() { Prefix::new(prefix.id, SERVICE_BITS) } else { prefix }))
    }
}

/// How far an announcement goes, as the file has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScopeWord {
    /// Not out of the site.
    Site,
    /// To the routers that this one has to do with, and no further.
    Region,
    /// Everywhere.
    World,
}

/// `[[router.scope]]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScopeSection {
    /// Which names.
    pub names: Vec<Names>,
    /// How far the word of them goes.
    pub scope: ScopeWord,
}

/// What a router that this one has joined is to it, as the file has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RelationWord {
    /// What is not known here goes there.
    #[default]
    Upstream,
    /// Only what it announces goes there.
    Peer,
}

/// `[[router.neighbour]]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NeighbourSection {
    /// What its site is called.
    #[serde(deserialize_with = "site")]
    pub site: String,
    /// What it is to this router, where this one has joined it; where it has joined this one, its own file says that.
    #[serde(default)]
    pub relation: RelationWord,
    /// Higher first.
    #[serde(default = "default_preference")]
    pub preference: u32,
    /// In percent of the share that it asks for.
    #[serde(default = "default_weight", deserialize_with = "weight")]
    pub weight: u32,
}

const fn default_preference() -> u32 {
    100
}

/// Of a site, and of a neighbour.
pub const fn default_weight() -> u32 {
    100
}

fn site<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    if is_site(&name) {
        return Ok(name);
    }
    Err(D::Error::custom(format!(
        "`{name}` is no name of a site; it has a-z, 0-9 and - inside, and 63 characters at most"
    )))
}

/// The name of this router's own site.
///
/// # Errors
///
/// It is none.
pub fn own_site<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    site(from).map(Some)
}

/// A share.
///
/// # Errors
///
/// It is too large.
pub fn weight<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let weight = u32::deserialize(from)?;
    if weight <= WEIGHT_MAX {
        return Ok(weight);
    }
    Err(D::Error::custom(format!("a weight is 0 to {WEIGHT_MAX}; 0 takes no new connections")))
}

impl RouterSection {
    /// What no single field can know.
    pub fn check(&self) -> Result<(), Wrong> {
        let has_more = !self.announce.is_empty() || !self.scope.is_empty() || !self.neighbour.is_empty();
        if self.site.is_none() && has_more {
            let what = "[router] says what is announced to other sites, but not what this one is called".to_owned();
            return Err((what, None, "add `site`, a name for this router's site".to_owned()));
        }
        for (at, section) in self.scope.iter().enumerate() {
            let this = section.get_ref();
            if this.names.is_empty() {
                let advice = "write some `names`, or remove it".to_owned();
                return Err(("a [[router.scope]] section is about no name".to_owned(), Some(section.span()), advice));
            }
            let mut earlier = self.scope[..at].iter().flat_map(|earlier| &earlier.get_ref().names);
            if earlier.any(|names| this.names.contains(names)) {
                let advice = "name them in one [[router.scope]] section".to_owned();
                return Err(("the same names have two scopes".to_owned(), Some(section.span()), advice));
            }
        }
        for (at, section) in self.neighbour.iter().enumerate() {
            let this = &section.get_ref().site;
            if self.neighbour[..at].iter().any(|earlier| earlier.get_ref().site == *this) {
                let what = format!("the site {this} has two [[router.neighbour]] sections");
                return Err((what, Some(section.span()), "keep one of them".to_owned()));
            }
            if self.site.as_ref() == Some(this) {
                let what = format!("{this} is this router's own site");
                return Err((what, Some(section.span()), "name the site of another router".to_owned()));
            }
        }
        Ok(())
    }

    /// What this router tells others; `None`: it tells nothing.
    pub fn policy(&self) -> Option<Policy> {
        let scope = |section: &ScopeSection| {
            let scope = match section.scope {
                ScopeWord::Site => Scope::Site,
                ScopeWord::Region => Scope::Region,
                ScopeWord::World => Scope::World,
            };
            section.names.iter().map(|names| (names.0, scope)).collect::<Vec<_>>()
        };
        let preference = |section: &NeighbourSection| {
            let NeighbourSection { site, relation, preference, weight } = section.clone();
            (site, Preference { beside: relation == RelationWord::Peer, preference, weight })
        };
        let neighbours: BTreeMap<String, Preference> =
            self.neighbour.iter().map(Spanned::get_ref).map(preference).collect();
        Some(Policy {
            site: self.site.clone()?,
            aggregates: self.announce.iter().map(|names| names.0).collect(),
            scopes: self.scope.iter().map(Spanned::get_ref).flat_map(scope).collect(),
            weight: self.site_weight,
            neighbours,
        })
    }
}
