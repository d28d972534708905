//! No key and nonce twice, in any world (docs/decisions/0117): every host of a world notes what it encrypts here.
//!
//! The numbers under a key rise, since a counter begins at zero and never goes back. So what is remembered of a key is
//! its next number, however much is encrypted under it, and whatever begins again at an earlier one is found at once.

pub mod search;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What was encrypted in one world, by key.
#[derive(Clone, Debug, Default)]
pub struct Nonces(Arc<Mutex<Ledger>>);

#[derive(Debug, Default)]
struct Ledger {
    /// The next number under each key.
    next: HashMap<[u8; 32], u64>,
    /// Packets that were encrypted.
    encrypted: u64,
    /// Those among them whose nonces had been used under their keys.
    reused: u64,
    only_counts: bool,
}

/// What a world has encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NonceCounts {
    /// Keys under which something was encrypted.
    pub keys: usize,
    /// Packets.
    pub encrypted: u64,
    /// Packets whose nonces had been used under their keys.
    pub reused: u64,
}

impl Nonces {
    /// Takes note of a packet that is encrypted under a key.
    ///
    /// # Panics
    ///
    /// The nonce has been used under this key.
    pub(crate) fn note(&self, key: &[u8; 32], number: u32) {
        let mut ledger = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.encrypted += 1;
        let next = ledger.next.entry(*key).or_default();
        let is_reused = u64::from(number) < *next;
        *next = (*next).max(u64::from(number) + 1);
        ledger.reused += u64::from(is_reused);
        let is_tolerated = !is_reused || ledger.only_counts;
        drop(ledger);
        assert!(is_tolerated, "nonce {number} has been used under its key: two packets are encrypted alike");
    }

    /// From here on what is reused is counted, and the world goes on.
    pub fn only_count(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).only_counts = true;
    }

    /// What was encrypted so far.
    pub fn counts(&self) -> NonceCounts {
        let ledger = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        NonceCounts { keys: ledger.next.len(), encrypted: ledger.encrypted, reused: ledger.reused }
    }
}

#[cfg(test)]
mod tests {
    use margay_core::{Cipher, SealKeys};
    use margay_wire::{DataRepr, FlowId, STACK_ENCAP};

    use super::*;
    use crate::seal::Seal;

    const HEADER: DataRepr =
        DataRepr { stack: STACK_ENCAP, flags: 0, dst_flow: FlowId(7), packet_number: 0, index: 0, count: 1 };

    fn keys(send: u8) -> SealKeys {
        let cipher = Cipher::ChaCha20Poly1305;
        SealKeys { cipher, send: [send; 32], open: [9; 32], send_epochs: 0, open_epochs: 0 }
    }

    #[test]
    fn numbers_rise_under_each_key_by_itself() {
        let nonces = Nonces::default();
        let (mut one, mut other) = (Seal::new(keys(1), nonces.clone()), Seal::new(keys(2), nonces.clone()));
        for _ in 0..3 {
            one.seal(HEADER, b"a");
            // One that goes as it is.
            one.number();
            other.seal(HEADER, b"b");
        }
        assert_eq!(nonces.counts(), NonceCounts { keys: 2, encrypted: 6, reused: 0 });
    }

    #[test]
    #[should_panic(expected = "has been used under its key")]
    fn a_cache_that_forgets_its_counter_ends_the_world() {
        let nonces = Nonces::default();
        Seal::new(keys(1), nonces.clone()).seal(HEADER, b"before");
        Seal::new(keys(1), nonces).seal(HEADER, b"and after");
    }

    #[test]
    fn what_a_broken_cache_reuses_is_counted_where_that_is_asked_for() {
        let nonces = Nonces::default();
        nonces.only_count();
        for said in [b"first ", b"second", b"third "] {
            Seal::new(keys(1), nonces.clone()).seal(HEADER, said);
        }
        assert_eq!(nonces.counts(), NonceCounts { keys: 1, encrypted: 3, reused: 2 });
    }
}
