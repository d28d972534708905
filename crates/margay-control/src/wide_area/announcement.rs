//! What a router says of names that it leads to: which, how far the word may go, by which routers, and who may say so.

use margay_core::key::{HostId, HostPublic};
use margay_core::name::{AUTHORITY_BITS, Name, Prefix, ServiceId};

use crate::registration::proto::{self, Code};

/// Routers that an announcement may have passed, the one that serves the names among them.
pub const PATH_MAX: usize = 16;
/// Bytes of a proof: chains are shorter.
const PROOF_MAX: usize = 2048;
/// Characters of a site's name.
pub const SITE_MAX: usize = 63;
const WEIGHT_MAX: u32 = 65_535;

/// How far an announcement goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Nowhere: the names are for the site's own hosts.
    Site,
    /// To the routers above and beside, which keep it to themselves.
    Region,
    /// To whoever passes it on.
    #[default]
    World,
}

/// A router that an announcement has passed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stage {
    /// The router.
    pub host: HostId,
    /// What its site is called.
    pub site: String,
}

/// Names that a router leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Which.
    pub prefix: Prefix,
    /// As people write them, where that is known; else empty.
    pub name: String,
    /// How far it goes.
    pub scope: Scope,
    /// From whoever says it to whoever serves them.
    pub path: Vec<Stage>,
    /// Share among announcements that are as good.
    pub weight: u32,
    /// Key of the last router of the path.
    pub origin: HostPublic,
    /// Encoded chain by which that one may answer for them; empty: whoever hears it knows what was granted.
    pub proof: Vec<u8>,
    /// End of the chain, in seconds since 1970.
    pub not_after_s: u64,
}

/// Why an announcement is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It is none.
    #[error("the announcement makes no sense: {0}")]
    Invalid(&'static str),
    /// It has been here.
    #[error("the announcement has passed this router already: some routers are above each other in a circle ({0})")]
    Loop(String),
    /// It was too far.
    #[error("the announcement has passed {PATH_MAX} routers, which is as far as one goes")]
    Far,
    /// From above nothing is told.
    #[error(
        "it comes from a router above, which has no need to announce anything: what is not known here goes there anyway"
    )]
    FromAbove,
    /// Too many.
    #[error("this router has {0} prefixes from that neighbour already; announce aggregates: [router] announce")]
    Full(usize),
    /// Not granted to whoever says it.
    #[error(
        "that router was granted no such names: `margay id member grant`, on the router that it has joined, with a \
         name or a prefix that covers {0}"
    )]
    NoGrant(Prefix),
    /// Its chain proves nothing.
    #[error("that the router at the end of its path may answer for {prefix} is not proved: {why}")]
    Proof {
        /// What for.
        prefix: Prefix,
        /// Why not.
        why: String,
    },
}

impl Fault {
    /// Its number on the wire.
    pub fn code(&self) -> Code {
        match self {
            Self::Invalid(_) | Self::FromAbove => Code::Invalid,
            Self::Loop(_) => Code::Loop,
            Self::Far | Self::Full(_) => Code::Limit,
            Self::NoGrant(_) => Code::NoGrant,
            Self::Proof { .. } => Code::Proof,
        }
    }
}

/// A prefix as it is written in messages.
///
/// # Errors
///
/// It is none, or of the names of several authorities.
pub fn prefix_of(service_id: &[u8], bits: u32) -> Result<Prefix, Fault> {
    let id: [u8; 32] = service_id.try_into().map_err(|_| Fault::Invalid("no serviceID"))?;
    let bits = u16::try_from(bits).ok().filter(|bits| (AUTHORITY_BITS..=256).contains(bits));
    let prefix = Prefix::new(ServiceId(id), bits.ok_or(Fault::Invalid("a prefix has 64 to 256 bits"))?);
    if prefix.id.0 == id { Ok(prefix) } else { Err(Fault::Invalid("bits beyond the prefix are not zero")) }
}

/// The service that a written name is of, if that is what `prefix` stands for.
pub fn service_name(written: &str, prefix: &Prefix) -> Option<String> {
    let service = written.split('/').next()?;
    let name: Name = service.parse().ok().filter(|_| !service.starts_with("sid:"))?;
    (name.service_prefix() == *prefix).then(|| name.written().to_owned())
}

/// Whether a site may be called this: a label, as names have them.
pub fn is_site(name: &str) -> bool {
    let is_inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let ends = !name.starts_with('-') && !name.ends_with('-');
    (1..=SITE_MAX).contains(&name.len()) && name.bytes().all(is_inside) && ends
}

impl Announcement {
    /// The sites of its path.
    pub fn sites(&self) -> Vec<&str> {
        self.path.iter().map(|stage| stage.site.as_str()).collect()
    }

    /// As a message has it.
    pub fn written(&self) -> proto::Announce {
        let stage = |stage: &Stage| proto::Stage { host: stage.host.0.to_vec(), site: stage.site.clone() };
        proto::Announce {
            service_id: self.prefix.id.0.to_vec(),
            bits: self.prefix.bits.into(),
            passed_on: self.scope == Scope::World,
            path: self.path.iter().map(stage).collect(),
            weight: self.weight,
            origin_key: self.origin.0.to_vec(),
            proof: self.proof.clone(),
            name: self.name.clone(),
        }
    }

    /// What a neighbour wrote. Nothing of it is proved yet.
    ///
    /// # Errors
    ///
    /// It makes no sense.
    pub fn read(announce: proto::Announce) -> Result<Self, Fault> {
        let prefix = prefix_of(&announce.service_id, announce.bits)?;
        if announce.path.len() > PATH_MAX {
            return Err(Fault::Far);
        }
        let stage = |stage: proto::Stage| {
            let host: [u8; 16] = stage.host.try_into().ok()?;
            is_site(&stage.site).then_some(Stage { host: HostId(host), site: stage.site })
        };
        let path: Option<Vec<Stage>> = announce.path.into_iter().map(stage).collect();
        let path = path.filter(|path| !path.is_empty()).ok_or(Fault::Invalid("no path of routers and their sites"))?;
        let origin: [u8; 32] =
            announce.origin_key.try_into().map_err(|_| Fault::Invalid("no key of the router that serves the names"))?;
        let origin = HostPublic(origin);
        if origin.is_of_low_order() {
            return Err(Fault::Invalid(
                "the key of the router that serves the names is no key: everybody can prove it",
            ));
        }
        if path.last().is_none_or(|last| last.host != origin.id()) {
            return Err(Fault::Invalid("its path ends at another router than its key is of"));
        }
        if announce.proof.len() > PROOF_MAX || announce.weight > WEIGHT_MAX {
            return Err(Fault::Invalid("its proof is too long, or its weight too large"));
        }
        Ok(Self {
            prefix,
            name: service_name(&announce.name, &prefix).unwrap_or_default(),
            scope: if announce.passed_on { Scope::World } else { Scope::Region },
            path,
            weight: announce.weight,
            origin,
            proof: announce.proof,
            not_after_s: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announce() -> proto::Announce {
        let origin = HostPublic([7; 32]);
        let path = vec![
            Stage { host: HostId([1; 16]), site: "hub".to_owned() },
            Stage { host: origin.id(), site: "berlin".to_owned() },
        ];
        let prefix = Prefix::new(ServiceId([9; 32]), 96);
        let (name, scope) = (String::new(), Scope::World);
        let one = Announcement { prefix, name, scope, path, weight: 5, origin, proof: vec![1], not_after_s: 0 };
        one.written()
    }

    #[test]
    fn a_name_is_believed_where_it_stands_for_the_prefix() {
        let web: Name = "web.shop".parse().expect("a name");
        let prefix = web.service_prefix();
        assert_eq!(service_name("web.shop/key:one", &prefix), Some("web.shop".to_owned()));
        for other in ["mail.shop", "", "\u{1b}[2J", &prefix.to_string()] {
            assert_eq!(service_name(other, &prefix), None, "{other}");
        }
        assert_eq!(service_name("web.shop", &Prefix::of_authority("shop")), None);
        let named = proto::Announce { name: "web.shop".to_owned(), service_id: prefix.id.0.to_vec(), ..announce() };
        assert_eq!(Announcement::read(named).expect("fine").name, "web.shop");
    }

    #[test]
    fn what_is_written_is_read_and_what_makes_no_sense_is_not() {
        let good = Announcement::read(announce()).expect("as written");
        assert_eq!((good.sites(), good.written()), (vec!["hub", "berlin"], announce()));
        let low = |one: &mut proto::Announce| {
            one.origin_key = vec![0; 32];
            one.path[1].host = HostPublic([0; 32]).id().0.to_vec();
        };
        let bad: [fn(&mut proto::Announce); 11] = [
            low,
            |one| one.service_id.truncate(31),
            |one| one.service_id[31] = 1,
            |one| one.bits = 63,
            |one| one.bits = 257,
            |one| one.path.clear(),
            |one| one.path[0].site = "Berlin \u{1b}".to_owned(),
            |one| one.path[0].host.truncate(15),
            |one| one.path.reverse(),
            |one| one.weight = 65_536,
            |one| one.proof = vec![0; PROOF_MAX + 1],
        ];
        for (number, spoil) in bad.into_iter().enumerate() {
            let mut one = announce();
            spoil(&mut one);
            assert!(matches!(Announcement::read(one), Err(Fault::Invalid(_))), "number {number}");
        }
        let mut far = announce();
        far.path = vec![far.path[0].clone(); PATH_MAX + 1];
        assert_eq!(Announcement::read(far), Err(Fault::Far));
    }
}
