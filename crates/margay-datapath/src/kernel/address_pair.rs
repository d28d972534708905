//! Which path a direct packet comes by, from its two addresses: the first of the two lookups (DESIGN §7).

use libbpf_rs::MapCore;
use margay_core::entry::PathId;

use super::layout::{self, PATH_SHARED, pair_key, pair_value, path_entry};
use super::plain::Plain;
use super::{CacheError, get, put};

/// The pairs that lead to paths, beside the paths that stand at them.
pub(super) struct AddressPairs<'a, Map> {
    pub(super) paths: &'a Map,
    pub(super) pairs: &'a Map,
}

impl<Map: MapCore> AddressPairs<'_, Map> {
    /// Makes a pair lead to a path: to none where another path stands there, too, since a packet could be of either.
    pub(super) fn lead(&self, id: PathId, pair: &pair_key, flags: u32) -> Result<(), CacheError> {
        let is_led = get::<pair_value>(self.pairs, pair.bytes()).is_some_and(|value| value.path != id.0);
        let is_shared = is_led && self.at(pair).any(|(other, _)| other != id);
        self.set(pair, if is_shared { PATH_SHARED } else { id.0 }, flags)
    }

    /// Forgets pairs that lead to a path that stands elsewhere, or nowhere.
    pub(super) fn forget_unled(&self) {
        let leads_astray = |key: &Vec<u8>| {
            let value = get::<pair_value>(self.pairs, key).filter(|value| value.path != PATH_SHARED);
            let path = value.map(|value| get::<path_entry>(self.paths, &value.path.to_ne_bytes()));
            path.is_some_and(|path| path.is_none_or(|path| layout::pair_of(&path).bytes() != key))
        };
        for key in self.pairs.keys().filter(leads_astray).collect::<Vec<_>>() {
            // Refused only when it is gone already.
            let _ = self.pairs.delete(&key);
        }
    }

    /// Whether several paths stand at a pair.
    pub(super) fn is_shared(&self, pair: &pair_key) -> bool {
        get::<pair_value>(self.pairs, pair.bytes()).is_some_and(|value| value.path == PATH_SHARED)
    }

    /// A path stands at a pair no longer. The last one that shared it with this one has it for itself then.
    pub(super) fn forget(&self, id: PathId, pair: &pair_key) {
        match get::<pair_value>(self.pairs, pair.bytes()) {
            Some(value) if value.path == id.0 => {
                // Refused only when it is gone already.
                let _ = self.pairs.delete(pair.bytes());
            }
            Some(value) if value.path == PATH_SHARED => {
                let mut others = self.at(pair).filter(|(other, _)| *other != id);
                if let (Some((last, entry)), None) = (others.next(), others.next())
                    && let Err(error) = self.set(pair, last.0, entry.flags)
                {
                    tracing::warn!(%error, path = last.0, "direct packets that come by this path stay the agent's");
                }
            }
            _ => {}
        }
    }

    /// The paths at a pair. Looks through all there are.
    fn at(&self, pair: &pair_key) -> impl Iterator<Item = (PathId, path_entry)> {
        self.paths.keys().filter_map(move |key| {
            let entry = get::<path_entry>(self.paths, &key)?;
            let is_there = layout::pair_of(&entry).bytes() == pair.bytes();
            is_there.then_some((PathId(u32::from_ne_bytes(key.try_into().ok()?)), entry))
        })
    }

    fn set(&self, pair: &pair_key, path: u32, flags: u32) -> Result<(), CacheError> {
        put(self.pairs, pair.bytes(), pair_value { path, flags, told_ns: 0 }.bytes(), "address pairs")
    }
}
