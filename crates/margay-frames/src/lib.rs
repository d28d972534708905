//! What runs an ensemble (DESIGN §13, docs/decisions/0075): one connection of a client with many servers, switched
//! frame by frame.
//!
//! ```text
//!  client ── TCP ── framer ══ flow of NAME ══ switch ══ flows of NAME2 ══ member framers ── TCP ── memcached, or Redis
//! ```
//!
//! A framed connection is an ordinary flow of datagrams of Margay. Nothing of the agent takes part, but to give the
//! flows.
//!
//! To be read in this order: [`head`] (what a frame begins with), [`protocol`] (what programs say), [`router`]
//! (which member a frame goes to), [`module`] (what is loaded to decide that), [`switch`], [`member`] and [`framer`]
//! (the ends), [`by_name`] (what they ask the agent); `batch`, `pipe` and `clock` are below them.

mod batch;
pub mod by_name;
mod clock;
pub mod framer;
pub mod head;
pub mod member;
pub mod module;
mod pipe;
pub mod protocol;
pub mod router;
pub mod switch;

pub use margay_memcached::process;

/// A table that is asked for each frame. Whoever chooses its keys may use the ensemble, and the tables are bounded: so
/// the hash is quick, and not proof against whoever finds out its seed.
type Table<K, V> = std::collections::HashMap<K, V, foldhash::fast::RandomState>;

/// A random number.
///
/// # Errors
///
/// The operating system gives none.
fn random_seed() -> std::io::Result<[u8; 32]> {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(|error| {
        std::io::Error::other(format!("the operating system gave no random bytes: {error}; nothing can start safely"))
    })?;
    Ok(seed)
}
