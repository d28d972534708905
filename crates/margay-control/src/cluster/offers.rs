//! Who is registered with this router, as etcd shall have it, and what of that is not there yet. A change costs what
//! has changed, however many others are registered. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::registration::Place;

/// What a host has registered, as etcd keeps it; `None`: nothing.
pub type Offer = Option<Arc<[u8]>>;

/// All of them.
#[derive(Debug, Default)]
pub struct Offers {
    wanted: BTreeMap<Place, Arc<[u8]>>,
    written: BTreeMap<Place, Arc<[u8]>>,
    /// Where the two may differ.
    due: BTreeSet<Place>,
}

impl Offers {
    /// A host has something else registered from now on.
    pub fn offer(&mut self, place: Place, offer: Option<Vec<u8>>) {
        match offer {
            Some(offer) => drop(self.wanted.insert(place, offer.into())),
            None => drop(self.wanted.remove(&place)),
        }
        self.due.insert(place);
    }

    /// Nothing that was written is there any more, but for what an earlier start left behind.
    pub fn begin(&mut self, left_behind: impl IntoIterator<Item = Place>) {
        let none: Arc<[u8]> = Arc::default();
        self.written = left_behind.into_iter().map(|place| (place, Arc::clone(&none))).collect();
        self.due = self.wanted.keys().chain(self.written.keys()).copied().collect();
    }

    /// What is to be written now.
    pub fn due(&self) -> Vec<(Place, Offer)> {
        let is_other = |place: &&Place| self.wanted.get(place) != self.written.get(place);
        self.due.iter().filter(is_other).map(|place| (*place, self.wanted.get(place).cloned())).collect()
    }

    /// It is written, and all others that were due had nothing new.
    pub fn wrote(&mut self, offers: Vec<(Place, Offer)>) {
        for (place, offer) in offers {
            match offer {
                Some(offer) => drop(self.written.insert(place, offer)),
                None => drop(self.written.remove(&place)),
            }
        }
        // Something else may have been offered meanwhile.
        let (wanted, written) = (&self.wanted, &self.written);
        self.due.retain(|place| wanted.get(place) != written.get(place));
    }

    /// What etcd has now of a host, by whosever hand; true: something is to be written.
    pub fn heard(&mut self, place: Place, value: Option<&[u8]>) -> bool {
        if self.written.get(&place).map(|written| &written[..]) != value {
            match value {
                Some(value) => drop(self.written.insert(place, value.into())),
                None => drop(self.written.remove(&place)),
            }
            self.due.insert(place);
        }
        self.wanted.get(&place) != self.written.get(&place)
    }
}

#[cfg(test)]
mod tests {
    use margay_core::key::HostId;
    use margay_core::rng::Rng;

    use super::*;

    fn place(n: u32) -> Place {
        let mut host = [0; 16];
        host[..4].copy_from_slice(&n.to_be_bytes());
        Place { host: HostId(host), authority: [1; 8] }
    }

    #[test]
    fn a_change_touches_one_host_however_many_there_are() {
        for others in [10, 100_000] {
            let mut offers = Offers::default();
            (0..others).for_each(|n| offers.offer(place(n), Some(b"web".to_vec())));
            let all = offers.due();
            assert_eq!(all.len(), others as usize);
            offers.wrote(all);
            offers.offer(place(7), Some(b"db".to_vec()));
            assert_eq!(offers.due.len(), 1, "others are not looked at");
            let one = offers.due();
            assert_eq!(one, [(place(7), Some(Arc::from(*b"db")))]);
            offers.wrote(one);
            assert!(offers.due.is_empty() && offers.due().is_empty());
            offers.offer(place(7), Some(b"db".to_vec()));
            assert!(offers.due().is_empty(), "the same again is nothing to write");
        }
    }

    #[test]
    fn whatever_comes_in_between_etcd_has_in_the_end_what_is_wanted() {
        for seed in 0..50 {
            let mut rng = Rng::new([seed; 32]);
            let (mut offers, mut etcd, mut wanted) = (Offers::default(), BTreeMap::new(), BTreeMap::new());
            let put = |etcd: &mut BTreeMap<Place, Arc<[u8]>>, all: &[(Place, Offer)]| {
                for (place, offer) in all {
                    match offer {
                        Some(offer) => drop(etcd.insert(*place, Arc::clone(offer))),
                        None => drop(etcd.remove(place)),
                    }
                }
            };
            for _ in 0..300 {
                let at = place(rng.u32() % 6);
                let value = (!rng.u32().is_multiple_of(3)).then(|| vec![(rng.u32() % 3) as u8]);
                match rng.u32() % 8 {
                    0 => {
                        // A new connection: what is there of an earlier one is known by what etcd said.
                        offers.begin(etcd.keys().copied().collect::<Vec<_>>());
                    }
                    1 => {
                        // Somebody else's hand.
                        let value: Offer = value.map(Into::into);
                        put(&mut etcd, &[(at, value.clone())]);
                        offers.heard(at, value.as_deref());
                    }
                    2 => {
                        let due = offers.due();
                        put(&mut etcd, &due);
                        if rng.u32().is_multiple_of(2) {
                            let between = place(rng.u32() % 6);
                            wanted.remove(&between);
                            offers.offer(between, None);
                        }
                        offers.wrote(due);
                    }
                    _ => {
                        match value.clone() {
                            Some(value) => drop(wanted.insert(at, Arc::from(value))),
                            None => drop(wanted.remove(&at)),
                        }
                        offers.offer(at, value);
                    }
                }
            }
            let due = offers.due();
            put(&mut etcd, &due);
            offers.wrote(due);
            assert_eq!(etcd, wanted, "seed {seed}");
            assert_eq!(offers.written, wanted, "seed {seed}");
        }
    }
}
