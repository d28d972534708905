//! A hash whose values strangers cannot foretell.

use core::hash::BuildHasher;

use siphasher::sip::SipHasher13;

/// SipHash under keys that strangers do not know: they choose ports and sessions, and must not choose collisions.
#[derive(Clone, Copy)]
pub(crate) struct KeyedHash(pub u64, pub u64);

impl BuildHasher for KeyedHash {
    type Hasher = SipHasher13;

    fn build_hasher(&self) -> SipHasher13 {
        SipHasher13::new_with_keys(self.0, self.1)
    }
}
