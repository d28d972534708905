//! Client and server of a scenario in which they get other addresses: each is at one at a time.

use anyhow::Result;
use ipnet::IpNet;

use crate::interface::{self, Act};
use crate::lab::Lab;

/// The hosts, by side.
pub const SIDES: [&str; 2] = ["client", "server"];
/// Numbers of addresses from here on are nobody's.
const FREE_NUMBER: usize = 100;

/// Both hosts, and the one IPv4 address of each.
pub struct Ends<'a> {
    /// Where they are.
    pub lab: &'a Lab,
    /// By side.
    pub addresses: [IpNet; 2],
    number: usize,
}

impl<'a> Ends<'a> {
    /// Takes their IPv6 addresses away. Before agents start.
    ///
    /// # Errors
    ///
    /// The lab has no such hosts, or they have no such addresses.
    pub fn at_one_address(lab: &'a Lab) -> Result<Self> {
        for side in SIDES {
            let host = lab.host(side)?;
            interface::change(lab, host, &[Act::Remove(0, interface::first_address(lab, host, 0, true)?)])?;
        }
        let address = |side: &str| interface::first_address(lab, lab.host(side)?, 0, false);
        Ok(Self { lab, addresses: [address(SIDES[0])?, address(SIDES[1])?], number: FREE_NUMBER })
    }

    /// An address for a host that nobody has had.
    ///
    /// # Errors
    ///
    /// The subnet has no more.
    pub fn next(&mut self, side: usize) -> Result<IpNet> {
        self.number += 1;
        interface::address(self.lab, self.lab.host(SIDES[side])?, 0, false, self.number)
    }

    /// A host gets another address. Gives when that began.
    ///
    /// # Errors
    ///
    /// The host's interface cannot be changed.
    pub fn change(&mut self, side: usize) -> Result<u64> {
        let new = self.next(side)?;
        let old = std::mem::replace(&mut self.addresses[side], new);
        let acts = [Act::Add(0, new), Act::Remove(0, old)];
        Ok(interface::change(self.lab, self.lab.host(SIDES[side])?, &acts)?.before_us)
    }

    /// Both get another address at once. Gives when the first of them began to, and how far apart they were done, in
    /// microseconds.
    ///
    /// # Errors
    ///
    /// As for [`change`](Self::change).
    pub fn change_both(&mut self) -> Result<(u64, u64)> {
        let hosts = [self.lab.host(SIDES[0])?, self.lab.host(SIDES[1])?];
        self.number += 1;
        let fresh = |side: usize| interface::address(self.lab, hosts[side], 0, false, self.number);
        let (old, new) = (self.addresses, [fresh(0)?, fresh(1)?]);
        let acts = [0, 1].map(|side| [Act::Add(0, new[side]), Act::Remove(0, old[side])]);
        let [one, other] = interface::change_both(self.lab, [(hosts[0], &acts[0]), (hosts[1], &acts[1])])?;
        self.addresses = new;
        Ok((one.before_us.min(other.before_us), one.after_us.abs_diff(other.after_us)))
    }
}
