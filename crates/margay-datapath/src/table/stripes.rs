//! Which flows go by several paths, and by which of a flow's places a packet has come.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use margay_core::entry::{Entry, Path};
use margay_core::fair_table::Peer;
use margay_wire::FlowId;

use super::{Slot, Table};
use crate::striped::Stripe;

impl Table {
    /// The place of a striped flow by which something came.
    pub(super) fn place(
        &self,
        stripe: &Stripe,
        local: Option<IpAddr>,
        is_from: &impl Fn(SocketAddr) -> bool,
    ) -> Option<usize> {
        let known = stripe.paths().map(|path| path.and_then(|path| self.paths.get(&path)).map(|record| &record.path));
        let mut by_remote = known.iter().enumerate().filter_map(|(place, path)| Some((place, (*path)?)));
        let is_place = |(_, path): &(usize, &Path)| is_from(path.remote) && (local.is_none() || path.local == local);
        by_remote.find(is_place).map(|(place, _)| place)
    }

    pub(super) fn stripe_of(&self, slot: &Slot) -> Option<Arc<Stripe>> {
        // Few flows are, so slots do not say it.
        if self.stripes.is_empty() { None } else { self.stripe(slot.flow) }
    }

    /// A striped flow.
    pub fn stripe(&self, flow: FlowId) -> Option<Arc<Stripe>> {
        self.stripes.get(&flow).cloned()
    }

    pub(super) fn follow_stripe(&mut self, entry: &Entry, peer: Peer) {
        let Some(places) = entry.stripe else {
            self.stripes.remove(&entry.flow);
            return;
        };
        let fresh = || Arc::new(Stripe::new(entry.flow, places, entry.path, self.held_bytes.account(peer)));
        let stripe = self.stripes.entry(entry.flow).or_insert_with(fresh);
        stripe.set_places(places, entry.path);
    }
}
