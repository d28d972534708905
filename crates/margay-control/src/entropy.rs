//! Randomness from the operating system, as the seed of the core's streams.

use margay_core::rng::Rng;

/// The operating system gave no randomness.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the operating system gave no random bytes: {0}; nothing safe can be made without them")]
pub struct NoEntropy(getrandom::Error);

/// A seed, fit for [`Rng::new`].
///
/// # Errors
///
/// The operating system gave none.
pub fn seed() -> Result<[u8; 32], NoEntropy> {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(NoEntropy)?;
    Ok(seed)
}

/// A fresh stream.
///
/// # Errors
///
/// The operating system gave no seed.
pub fn rng() -> Result<Rng, NoEntropy> {
    seed().map(Rng::new)
}
