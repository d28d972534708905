//! What this router knows of the other routers of its cluster, and of who is registered with them. Pure: what etcd says
//! goes in, what has changed by it comes out.

use std::collections::BTreeMap;
use std::sync::Arc;

use margay_core::key::HostId;
use margay_core::name::Prefix;

use super::key::Key;
use super::news::News;
use super::record::{RouterEntry, Served, read_router, read_served};
use crate::registration::Place;

/// What a host serves, by the router with which it has registered that.
pub type ByRouter = BTreeMap<HostId, Vec<Arc<Served>>>;

/// The view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    routers: BTreeMap<HostId, RouterEntry>,
    served: BTreeMap<Place, ByRouter>,
    /// Who has a name for itself, by each router that has given it.
    claims: BTreeMap<Prefix, BTreeMap<HostId, HostId>>,
}

impl View {
    /// A key holds something else now; `None`: it is gone. What makes no sense counts as gone.
    pub fn apply(&mut self, key: &Key, value: Option<&[u8]>) -> News {
        let mut news = News::default();
        match key {
            Key::Router(id) => {
                // Nobody speaks for another router than the one whose key it is.
                let entry = value.and_then(read_router).filter(|entry| entry.id() == *id);
                news.routers = match entry {
                    Some(entry) => self.routers.insert(*id, entry.clone()) != Some(entry),
                    None => self.routers.remove(id).is_some(),
                };
            }
            Key::Host(router, place) => {
                let served = value.and_then(read_served);
                let served = served.map(|mut served| {
                    served.retain(|served| served.instance.host == place.host);
                    served
                });
                let by_router = self.served.entry(*place).or_default();
                let is_changed = match served.filter(|served| !served.is_empty()) {
                    Some(served) => {
                        let served = shared(by_router, served);
                        by_router.insert(*router, served.clone()) != Some(served)
                    }
                    None => by_router.remove(router).is_some(),
                };
                if by_router.is_empty() {
                    self.served.remove(place);
                }
                if is_changed {
                    news.places.insert(*place);
                }
            }
            Key::Claim(prefix, router) => {
                let by_router = self.claims.entry(*prefix).or_default();
                match value.and_then(read_host) {
                    Some(host) => drop(by_router.insert(*router, host)),
                    None => drop(by_router.remove(router)),
                }
                if by_router.is_empty() {
                    self.claims.remove(prefix);
                }
            }
            Key::Cluster | Key::Row(..) => {}
        }
        news
    }

    /// All keys were read anew: this is all that there is.
    pub fn replace(&mut self, entries: impl IntoIterator<Item = (Key, Vec<u8>)>) -> News {
        let mut fresh = Self::default();
        for (key, value) in entries {
            fresh.apply(&key, Some(&value));
        }
        let places = self.served.keys().chain(fresh.served.keys());
        let is_changed = |place: &&Place| self.served.get(place) != fresh.served.get(place);
        let news = News {
            routers: self.routers != fresh.routers,
            places: places.filter(is_changed).copied().collect(),
            ..News::default()
        };
        *self = fresh;
        news
    }

    /// Who has a name for itself; nobody, where routers say different things.
    pub fn holder(&self, prefix: &Prefix) -> Option<HostId> {
        let mut holders = self.claims.get(prefix)?.values();
        let first = *holders.next()?;
        holders.all(|other| *other == first).then_some(first)
    }

    /// Nothing is known.
    pub fn is_empty(&self) -> bool {
        self.routers.is_empty() && self.served.is_empty()
    }

    /// All routers, this one among them.
    pub fn routers(&self) -> impl Iterator<Item = &RouterEntry> {
        self.routers.values()
    }

    /// One of them.
    pub fn router(&self, id: HostId) -> Option<&RouterEntry> {
        self.routers.get(&id)
    }

    /// What a host has registered with whom.
    pub fn served(&self, place: &Place) -> impl Iterator<Item = (HostId, &[Arc<Served>])> {
        self.served.get(place).into_iter().flatten().map(|(router, served)| (*router, &served[..]))
    }

    /// All hosts that have registered something.
    #[cfg(test)]
    pub fn places(&self) -> impl Iterator<Item = &Place> {
        self.served.keys()
    }

    /// Hosts that have registered something with a router.
    pub fn places_of(&self, router: HostId) -> impl Iterator<Item = &Place> {
        self.served.iter().filter(move |(_, by_router)| by_router.contains_key(&router)).map(|(place, _)| place)
    }
}

fn read_host(value: &[u8]) -> Option<HostId> {
    value.try_into().ok().map(HostId)
}

/// A host says the same to every router: it is kept once.
fn shared(known: &ByRouter, served: Vec<Served>) -> Vec<Arc<Served>> {
    let known: BTreeMap<Prefix, &Arc<Served>> =
        known.values().flatten().map(|served| (served.instance.prefix, served)).collect();
    let of = |served: Served| match known.get(&served.instance.prefix) {
        Some(same) if ***same == served => Arc::clone(same),
        _ => Arc::new(served),
    };
    served.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use margay_core::key::HostPublic;
    use margay_core::rng::Rng;

    use super::super::record::{write_router, write_served};
    use super::*;
    use crate::registration::Instance;

    fn served(host: HostId, weight: u32) -> Served {
        let instance = Instance {
            host,
            host_name: "h".to_owned(),
            address: "10.0.0.1:54324".parse().expect("literal"),
            name: "web.shop".to_owned(),
            prefix: "web.shop".parse().expect("literal"),
            weight,
            priority: 1,
            sticky: false,
            fence: None,
            zero_weight: None,
        };
        Served { instance, partition_bits: 0, exclusive: weight == 3 }
    }

    fn draw(rng: &mut Rng) -> (Key, Option<Vec<u8>>) {
        let router = HostPublic([(rng.u32() % 3) as u8 + 1; 32]);
        let gone = rng.u32().is_multiple_of(3);
        if rng.u32().is_multiple_of(5) {
            let prefix = "web.shop".parse().expect("literal");
            return (Key::Claim(prefix, router.id()), (!gone).then(|| vec![(rng.u32() % 2) as u8; 16]));
        }
        if rng.u32().is_multiple_of(4) {
            let entry = RouterEntry {
                key: router,
                address: format!("r:{}", rng.u32() % 2 + 1),
                name: String::new(),
                is_leaving: false,
            };
            return (Key::Router(router.id()), (!gone).then(|| write_router(&entry)));
        }
        let host = HostId([(rng.u32() % 4) as u8; 16]);
        let value = write_served(&[served(host, rng.u32() % 4)]);
        (Key::Host(router.id(), Place { host, authority: [1; 8] }), (!gone).then_some(value))
    }

    #[test]
    fn whether_it_is_told_each_change_or_reads_all_anew_it_knows_the_same() {
        for seed in 0..50 {
            let mut rng = Rng::new([seed; 32]);
            let (mut followed, mut reread) = (View::default(), View::default());
            let mut etcd: BTreeMap<Key, Vec<u8>> = BTreeMap::new();
            let mut since = News::default();
            for _ in 0..200 {
                let (key, value) = draw(&mut rng);
                since.add(followed.apply(&key, value.as_deref()));
                match value {
                    Some(value) => drop(etcd.insert(key, value)),
                    None => drop(etcd.remove(&key)),
                }
                if rng.u32().is_multiple_of(20) {
                    let before = reread.clone();
                    let news = reread.replace(etcd.clone());
                    assert_eq!(reread, followed, "seed {seed}");
                    // What went and came back in between is no news to who looks only now.
                    assert!(news.places.is_subset(&since.places) && (!news.routers || since.routers), "seed {seed}");
                    let same =
                        |one: &View, other: &View| (&one.routers, &one.served) == (&other.routers, &other.served);
                    assert_eq!(news.is_empty(), same(&before, &reread), "seed {seed}");
                    since = News::default();
                }
            }
            assert!(followed.places().count() > 0, "seed {seed} was empty");
        }
    }

    #[test]
    fn a_name_has_one_holder_by_whatever_router_and_none_where_they_differ() {
        let (mut view, web) = (View::default(), "web.shop".parse().expect("literal"));
        let mut say = |router: u8, host: Option<u8>| {
            view.apply(&Key::Claim(web, HostId([router; 16])), host.map(|host| vec![host; 16]).as_deref());
            view.holder(&web).map(|host| host.0[0])
        };
        assert_eq!([say(1, Some(7)), say(2, Some(7)), say(3, Some(8))], [Some(7), Some(7), None]);
        assert_eq!([say(3, None), say(1, None), say(2, None)], [Some(7), Some(7), None]);
        assert!(view.claims.is_empty());
    }

    #[test]
    fn what_makes_no_sense_or_speaks_for_another_is_not_there() {
        let mut view = View::default();
        let (id, place) = (HostPublic([1; 32]).id(), Place { host: HostId([2; 16]), authority: [1; 8] });
        let foreign =
            RouterEntry { key: HostPublic([9; 32]), address: "r:1".to_owned(), name: String::new(), is_leaving: false };
        assert!(view.apply(&Key::Router(id), Some(&write_router(&foreign))).is_empty());
        assert!(view.apply(&Key::Router(id), Some(b"\xff")).is_empty());
        let other = write_served(&[served(HostId([7; 16]), 1)]);
        assert!(view.apply(&Key::Host(id, place), Some(&other)).is_empty());
        assert_eq!(view, View::default());
        let own = write_served(&[served(place.host, 1)]);
        assert_eq!(view.apply(&Key::Host(id, place), Some(&own)).places, BTreeSet::from([place]));
        assert!(view.apply(&Key::Host(id, place), Some(&own)).is_empty(), "the same again is no news");
        // Garbage in place of what was there: better nobody than somebody who is somewhere else.
        assert_eq!(view.apply(&Key::Host(id, place), Some(b"\xff")).places, BTreeSet::from([place]));
        assert_eq!(view.places().count(), 0);
    }
}
