//! Names that one host alone serves: to whom the routers of the cluster have given them. Each router writes down what
//! it has given, under its lease, and only where no other router has given it to another host; a host has a name as
//! long as any router says so. Pure.

use std::collections::{BTreeMap, BTreeSet};

use margay_core::key::HostId;
use margay_core::name::{Prefix, SERVICE_BITS};

use crate::registration::Place;

/// A service that has partitions is registered by its prefix, one that has none by its name's own bits: it is one name.
pub fn claimed_as(prefix: &Prefix) -> Prefix {
    let service = Prefix::new(prefix.id, SERVICE_BITS);
    if prefix.bits == 256 && service.id == prefix.id { service } else { *prefix }
}

/// Why a host does not get a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// Another host has it.
    #[error("host {0} has it by another router of the cluster")]
    Held(HostId),
    /// Nobody can be asked.
    #[error(
        "the routers of the cluster must agree about it, and the cluster's store cannot be asked now: {0}; who has \
         such a name keeps it meanwhile"
    )]
    Away(String),
}

/// What is to be told to etcd.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ClaimsDue {
    /// Given by this router, and not there.
    pub claim: Vec<(Prefix, HostId)>,
    /// There, and given by this router no more; with the change that wrote it.
    pub release: Vec<(Prefix, i64)>,
}

/// What this router has given.
#[derive(Debug, Default)]
pub struct Claims {
    given: BTreeMap<Prefix, HostId>,
    by_place: BTreeMap<Place, BTreeSet<Prefix>>,
    /// What etcd has of it, and by which change.
    there: BTreeMap<Prefix, (HostId, i64)>,
    /// How many ask etcd for one just now.
    asking: BTreeMap<Prefix, usize>,
}

impl Claims {
    /// These are the names that a host has by this router now.
    pub fn hold(&mut self, place: Place, prefixes: BTreeSet<Prefix>) {
        let before = match prefixes.is_empty() {
            true => self.by_place.remove(&place),
            false => self.by_place.insert(place, prefixes.clone()),
        };
        for prefix in before.iter().flatten().filter(|prefix| !prefixes.contains(prefix)) {
            self.release(prefix, place.host);
        }
        self.given.extend(prefixes.into_iter().map(|prefix| (prefix, place.host)));
    }

    /// A host that had a name by this router has it no more.
    pub fn release(&mut self, prefix: &Prefix, host: HostId) {
        if self.given.get(prefix) == Some(&host) {
            self.given.remove(prefix);
        }
    }

    /// Etcd is asked for a name now, until [`asked`](Self::asked).
    pub fn ask(&mut self, prefix: Prefix) {
        *self.asking.entry(prefix).or_default() += 1;
    }

    /// Etcd was asked: a host has the name, by a change of this number; or nobody has got it.
    pub fn asked(&mut self, prefix: Prefix, given: Option<(HostId, i64)>) {
        let left = self.asking.remove(&prefix).unwrap_or_default().saturating_sub(1);
        if left > 0 {
            self.asking.insert(prefix, left);
        }
        if let Some((host, revision)) = given {
            self.given.insert(prefix, host);
            self.heard(prefix, Some(host), revision);
        }
    }

    /// A host has a name by this router, as far as is known while nobody can be asked.
    pub fn keep(&mut self, prefix: Prefix, host: HostId) {
        self.given.insert(prefix, host);
    }

    /// What etcd has of a name under this router now, by a change of this number; true: something is to be told to it.
    pub fn heard(&mut self, prefix: Prefix, host: Option<HostId>, revision: i64) -> bool {
        // What is heard late may be older than what is known.
        if self.there.get(&prefix).is_none_or(|(_, known)| *known <= revision) {
            match host {
                Some(host) => drop(self.there.insert(prefix, (host, revision))),
                None => drop(self.there.remove(&prefix)),
            }
        }
        self.there.get(&prefix).map(|(host, _)| host) != self.given.get(&prefix)
    }

    /// By which change etcd has a name for a host by this router.
    pub fn revision(&self, prefix: &Prefix, host: HostId) -> Option<i64> {
        self.there.get(prefix).filter(|(there, _)| *there == host).map(|(_, revision)| *revision)
    }

    /// A new connection, under a new lease: nothing is there under it.
    pub fn begin(&mut self) {
        self.there.clear();
    }

    /// What is to be told to etcd now.
    pub fn due(&self) -> ClaimsDue {
        let is_idle = |prefix: &&Prefix| !self.asking.contains_key(prefix);
        let claim = self
            .given
            .iter()
            .filter(|(prefix, host)| is_idle(prefix) && self.there.get(prefix).is_none_or(|(there, _)| there != *host));
        let release = self.there.iter().filter(|(prefix, _)| is_idle(prefix) && !self.given.contains_key(prefix));
        ClaimsDue {
            claim: claim.map(|(prefix, host)| (*prefix, *host)).collect(),
            release: release.map(|(prefix, (_, revision))| (*prefix, *revision)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(n: u8) -> Place {
        Place { host: HostId([n; 16]), authority: [1; 8] }
    }

    fn prefix(name: &str) -> Prefix {
        name.parse().expect("literal")
    }

    #[test]
    fn what_is_given_is_claimed_and_what_is_given_no_more_is_released_once_it_was_heard() {
        let (mut claims, one) = (Claims::default(), prefix("one.shop"));
        let due = |claim: &[(Prefix, HostId)], release: &[(Prefix, i64)]| ClaimsDue {
            claim: claim.to_vec(),
            release: release.to_vec(),
        };
        claims.ask(one);
        assert_eq!(claims.due(), due(&[], &[]));
        claims.asked(one, Some((place(1).host, 5)));
        claims.hold(place(1), BTreeSet::from([one]));
        assert_eq!(claims.due(), due(&[], &[]), "it is there");
        assert!(!claims.heard(one, None, 4), "what was before counts no more");
        let revision = |host| claims.revision(&one, place(host).host);
        assert_eq!((revision(1), revision(2)), (Some(5), None));
        // The lease was lost, or somebody else's hand.
        assert!(claims.heard(one, None, 6));
        assert_eq!(claims.due(), due(&[(one, place(1).host)], &[]));
        assert!(!claims.heard(one, Some(place(1).host), 7));
        claims.hold(place(1), BTreeSet::new());
        claims.ask(one);
        assert_eq!(claims.due(), due(&[], &[]), "somebody asks for it");
        claims.asked(one, None);
        assert_eq!(claims.due(), due(&[], &[(one, 7)]));
        assert!(!claims.heard(one, None, 8) && claims.given.is_empty() && claims.there.is_empty());
        // Its host withdrew while an answer of etcd was lost: what was written all the same goes.
        assert!(claims.heard(one, Some(place(2).host), 9));
        assert_eq!(claims.due(), due(&[], &[(one, 9)]));
    }

    #[test]
    fn what_one_host_gives_up_another_has_meanwhile_stays_its_own() {
        let (mut claims, one) = (Claims::default(), prefix("one.shop"));
        claims.hold(place(1), BTreeSet::from([one]));
        claims.asked(one, Some((place(2).host, 5)));
        claims.hold(place(1), BTreeSet::new());
        assert_eq!(claims.due(), ClaimsDue::default());
        claims.begin();
        assert_eq!(claims.due().claim, [(one, place(2).host)], "under a new lease all is claimed anew");
    }

    #[test]
    fn a_service_is_one_name_with_and_without_partitions() {
        let plain = prefix("web.shop");
        assert_eq!((plain.bits, claimed_as(&plain)), (256, Prefix::new(plain.id, SERVICE_BITS)));
        assert_eq!(claimed_as(&claimed_as(&plain)), claimed_as(&plain));
        let key = prefix("web.shop/key:a");
        assert_eq!(claimed_as(&key), key);
    }
}
