//! The box of a host, where it has one.

use std::net::IpAddr;

use margay_core::Instant;
use margay_core::chain::mark_forwarded;

use super::Host;
use crate::program::Segment;

impl Host {
    /// Addresses for names that a box here is to see.
    pub(super) fn lease(&mut self) {
        for wanted in self.sal.take_wanted_leases() {
            let address = IpAddr::V4(self.ranges().name_v4(self.leases.len() as u32));
            self.leases.push((address, wanted.service));
            self.sal.bind_name(address, wanted.service);
        }
    }

    /// Gives the box a packet that is for no socket here. False if there is none.
    pub(super) fn give_box(&mut self, now: Instant, segment: &Segment) -> bool {
        let Some(middlebox) = &mut self.middlebox else { return false };
        if !middlebox.next.is_empty() && middlebox.is_first(segment) {
            middlebox.told.push(self.sal.add_boxes(&segment.tuple, &middlebox.next));
        }
        for out in middlebox.take(now, segment) {
            self.let_out(now, &out);
        }
        true
    }

    /// What comes out of the box, as the kernel forwards it.
    pub(super) fn let_out(&mut self, now: Instant, segment: &Segment) {
        let mut packet = segment.emit();
        mark_forwarded(&mut packet);
        self.egress(now, &packet);
    }
}
