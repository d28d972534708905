//! The box of a host, where it has one, and its containers.

use std::net::IpAddr;

use margay_core::Instant;
use margay_core::chain::{mark_forwarded, mark_outside};

use super::Host;
use crate::program::{Datagram, Segment};

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

    /// A container here sends a datagram.
    pub(crate) fn say_from_outside(&mut self, now: Instant, datagram: &Datagram) {
        let mut packet = datagram.emit();
        mark_outside(&mut packet);
        self.egress(now, &packet);
        self.drain(now);
    }

    /// What comes out of the box, as the kernel forwards it.
    pub(super) fn let_out(&mut self, now: Instant, segment: &Segment) {
        let mut packet = segment.emit();
        mark_forwarded(&mut packet);
        self.egress(now, &packet);
    }
}
