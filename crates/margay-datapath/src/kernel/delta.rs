//! What becomes of the numbers of flows whose numbers differ on the wire: blocks that entries name by the flow.

use libbpf_rs::MapCore;
use margay_core::delta::Translations;
use margay_wire::FlowId;

use super::plain::Plain;
use super::{CacheError, KernelCache, layout, put};

impl KernelCache {
    /// Adds a block, or replaces it: each packet goes by the one or by the other.
    pub(super) fn put_delta(&self, number: u32, delta: &Translations) -> Result<(), CacheError> {
        put(&self.loaded.maps.deltas, &number.to_ne_bytes(), layout::delta_of(delta).bytes(), "deltas")
    }

    /// Forgets the block of an entry that is gone, where it had one.
    pub(super) fn drop_delta(&self, number: u32) {
        if number != 0 {
            // Refused only when it is gone already.
            let _ = self.loaded.maps.deltas.delete(&number.to_ne_bytes());
        }
    }

    /// Forgets blocks of flows that have no entry: the agent before died while one was removed.
    pub(super) fn drop_strange_deltas(&self) {
        let index = self.index.lock();
        let number = |key: Vec<u8>| key.try_into().ok().map(u32::from_ne_bytes);
        let numbers = self.loaded.maps.deltas.keys().filter_map(number);
        let strange: Vec<u32> = numbers.filter(|number| !index.contains_key(&FlowId(*number))).collect();
        strange.into_iter().for_each(|number| self.drop_delta(number));
    }
}
