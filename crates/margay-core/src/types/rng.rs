//! Random bytes from a seed that the caller gave: the output of BLAKE3 keyed with it.
//!
//! The core draws no randomness of its own (DESIGN §3.4); with the same seed it does the same, which is what a
//! simulator needs.

use snow::types::Random;

/// An endless stream of random bytes.
pub struct Rng {
    stream: blake3::OutputReader,
}

impl Rng {
    /// The stream of a seed. The seed must be unpredictable, and used once.
    pub fn new(seed: [u8; 32]) -> Self {
        Self { stream: blake3::Hasher::new_keyed(&seed).finalize_xof() }
    }

    /// Fills `out`.
    pub fn fill(&mut self, out: &mut [u8]) {
        self.stream.fill(out);
    }

    /// So many bytes.
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.fill(&mut bytes);
        bytes
    }

    /// 32 bits.
    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes())
    }

    /// 64 bits.
    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes())
    }
}

impl Random for Rng {
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), snow::Error> {
        self.fill(dest);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_one_stream_and_another_seed_another() {
        let (mut a, mut b, mut c) = (Rng::new([1; 32]), Rng::new([1; 32]), Rng::new([2; 32]));
        let first: [u8; 80] = a.bytes();
        assert_eq!(first, b.bytes());
        assert_ne!(first, c.bytes());
        assert_ne!(first, a.bytes());
    }
}
