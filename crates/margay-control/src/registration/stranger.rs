//! Streams that were not welcomed yet: room for so many, and for so many of one address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// All, and of one address.
const STRANGERS_MAX: usize = 256;
const STRANGERS_OF_ADDRESS_MAX: usize = 32;

/// How many there are of each address.
pub(crate) type Strangers = Mutex<HashMap<IpAddr, usize>>;

/// Room for one stream that was not welcomed yet.
pub(crate) struct Stranger {
    strangers: Arc<Strangers>,
    address: IpAddr,
}

impl Stranger {
    /// Takes room for a stream; `None` where there is none.
    pub fn admit(strangers: &Arc<Strangers>, address: IpAddr) -> Option<Self> {
        let mut known = strangers.lock();
        let all: usize = known.values().sum();
        let of_address = known.get(&address).copied().unwrap_or_default();
        if all >= STRANGERS_MAX || of_address >= STRANGERS_OF_ADDRESS_MAX {
            // Nothing is kept of who is not let in: there may be any number of addresses.
            return None;
        }
        known.insert(address, of_address + 1);
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

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn there_is_room_for_so_many_and_nothing_is_kept_of_others() {
        let (strangers, address) =
            (Arc::default(), |number: u16| IpAddr::from([10, 0, (number >> 8) as u8, number as u8]));
        let admit = |number| Stranger::admit(&strangers, address(number));
        let of_one: Vec<_> = (0..STRANGERS_OF_ADDRESS_MAX).map(|_| admit(0).expect("room")).collect();
        assert!(admit(0).is_none());
        let others: Vec<_> = (1..).map_while(admit).collect();
        assert_eq!(of_one.len() + others.len(), STRANGERS_MAX);
        for number in 1000..2000 {
            assert!(admit(number).is_none());
        }
        assert_eq!(strangers.lock().len(), 1 + others.len());
        drop((of_one, others));
        assert!(strangers.lock().is_empty());
        assert!(admit(0).is_some());
    }
}
