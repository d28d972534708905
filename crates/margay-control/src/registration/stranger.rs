//! Streams that were not welcomed yet: room for so many, and for so many of one address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// All, and of one address.
const STRANGERS_MAX: usize = 256;
const STRANGERS_OF_ADDRESS_MAX: usize = 32;

/// How many there are of each address.
pub(super) type Strangers = Mutex<HashMap<IpAddr, usize>>;

/// Room for one stream that was not welcomed yet.
pub(super) struct Stranger {
    strangers: Arc<Strangers>,
    address: IpAddr,
}

impl Stranger {
    /// Takes room for a stream; `None` where there is none.
    pub fn admit(strangers: &Arc<Strangers>, address: IpAddr) -> Option<Self> {
        let mut known = strangers.lock();
        let all: usize = known.values().sum();
        let of_address = known.entry(address).or_default();
        if all >= STRANGERS_MAX || *of_address >= STRANGERS_OF_ADDRESS_MAX {
            return None;
        }
        *of_address += 1;
        Some(Self { strangers: Arc::clone(strangers), address })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut strangers = self.strangers.lock();
        if let Some(count) = strangers.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                strangers.remove(&self.address);
            }
        }
    }
}
