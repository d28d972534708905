//! Fenced names among what is registered.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use margay_core::fence::FenceNotice;
use margay_core::key::HostId;
use margay_core::name::Prefix;
use tokio::time::Instant;

use super::{OwnService, Place, Roll, RollError};
use crate::registration::Instance;
use crate::registration::fence::Fences;
use crate::registration::leave::Leave;

/// A fenced name of the router's own host.
pub struct OwnFence {
    /// The host, in its authority.
    pub place: Place,
    /// The name.
    pub prefix: Prefix,
    /// With which number the host holds it, where one was given.
    pub number: Option<u64>,
}

impl Roll {
    /// An empty one, of a router that takes hosts for gone that are silent for a lease.
    pub fn new(lease: Duration) -> Self {
        Self { fences: Fences::new(lease), ..Self::default() }
    }

    /// A host has held a fenced name before this start of the router.
    pub fn keep_fence(&mut self, prefix: &Prefix, host: HostId) {
        self.fences.keep(prefix, host);
    }

    /// Fenced names that are kept for a host which does not have them registered just now.
    pub fn kept_fences(&self, place: &Place) -> BTreeSet<Prefix> {
        let kept = self.fences.kept_for(place.host);
        kept.filter(|prefix| prefix.id.authority() == place.authority).copied().collect()
    }

    /// Keeps fenced names no longer whose time is over. Gives when the next one's is.
    pub fn end_kept_fences(&mut self) -> Option<Instant> {
        for (prefix, host) in self.fences.end_kept(Instant::now()) {
            self.tell_of(Place { host, authority: prefix.id.authority() }, prefix);
        }
        self.fences.next_end()
    }

    /// Whether a fenced name is kept for another host.
    pub(super) fn check_kept(&self, host: HostId, prefix: &Prefix, name: &str) -> Result<(), RollError> {
        match self.fences.kept_for_other(prefix, host, Instant::now()) {
            None => Ok(()),
            Some(holder) => Err(RollError::Kept { name: name.to_owned(), holder: self.name_of(holder) }),
        }
    }

    /// With which number a host holds a fenced name by this router.
    pub fn fence_number(&self, prefix: &Prefix, host: HostId) -> Option<u64> {
        self.fences.number(prefix, host)
    }

    /// A host that has registered a name holds it with this number.
    pub fn hold_fence(&mut self, place: Place, prefix: &Prefix, number: u64) {
        if self.serves(place, prefix) {
            self.fences.hold(prefix, place.host, number);
        }
    }

    /// A name that a host has registered is fenced no more.
    pub fn end_fence(&mut self, place: Place, prefix: &Prefix) {
        if self.fences.number(prefix, place.host).is_some() {
            self.fences.left(prefix, place.host, Leave::Withdrawn);
            self.tell_of(place, *prefix);
        }
    }

    /// A holder has given its notice. Whoever watches the name hears of it. False: the host does not hold the name with
    /// that number.
    pub fn set_fence_notice(&mut self, place: Place, notice: &FenceNotice) -> bool {
        let is_its = self.serves(place, &notice.prefix) && place.host == notice.holder();
        let encoded: Arc<[u8]> = notice.encode().into();
        if !is_its || !self.fences.set_notice(&notice.prefix, place.host, notice.number, encoded) {
            return false;
        }
        self.tell_of(place, notice.prefix);
        true
    }

    fn tell_of(&mut self, place: Place, prefix: Prefix) {
        self.untold.iter_mut().for_each(|untold| untold.extend([place]));
        self.changed_at([prefix]);
    }

    fn serves(&self, place: Place, prefix: &Prefix) -> bool {
        let is_registered = self.hosts.get(&place).is_some_and(|host| host.entries.contains_key(prefix));
        is_registered || self.own.iter().any(|own| own.place() == place && own.instance.prefix == *prefix)
    }

    /// Fenced names of the router's own host, by which it has not said yet that it holds them.
    pub fn own_fences_unsaid(&self) -> Vec<OwnFence> {
        let fenced = self.own.iter().filter(|own| own.fenced);
        let unsaid = fenced.filter(|own| self.fences.notice(&own.instance.prefix, own.instance.host).is_none());
        unsaid
            .map(|own| OwnFence {
                place: own.place(),
                prefix: own.instance.prefix,
                number: self.fences.number(&own.instance.prefix, own.instance.host),
            })
            .collect()
    }

    /// The router's own host says anew that it holds its fenced names.
    pub fn drop_own_notices(&mut self) {
        for own in self.own.iter().filter(|own| own.fenced) {
            self.fences.drop_notice(&own.instance.prefix, own.instance.host);
        }
    }

    /// The router's own host serves some names no longer, or they are fenced no more.
    pub(super) fn end_own_fences(&mut self, before: &[OwnService]) {
        for gone in before.iter().filter(|own| own.fenced) {
            let is_same = |own: &OwnService| own.fenced && own.instance.prefix == gone.instance.prefix;
            if !self.own.iter().any(is_same) {
                self.fences.left(&gone.instance.prefix, gone.instance.host, Leave::Withdrawn);
            }
        }
    }

    /// Adds its notice to a holder's entry in a list.
    pub(super) fn add_fence(&self, instance: &mut Instance) {
        if let Some(notice) = self.fences.notice(&instance.prefix, instance.host) {
            instance.fence = Some(Arc::clone(notice));
        }
    }
}
