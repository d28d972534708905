//! Randomness from the operating system, as the seed of the core's streams.

use std::time::Duration;

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

/// Half of a pause up to all of it, so that many who lost the same peer do not all come back to it at once. Three
/// quarters where the operating system gives no randomness.
pub fn jittered(pause: Duration) -> Duration {
    let part = rng().map_or(128, |mut rng| rng.u32() % 256);
    pause / 2 + pause * part / 512
}
