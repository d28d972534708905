//! What every flow cache must do to the same packets and orders, as data (docs/decisions/0106). For tests alone.
//!
//! There are three flow caches: the kernel's (eBPF), the agent's own in user space, and the simulator's, which stands
//! in for both. [`cases`] are lists of [`Step`]s: what the cache is told, what passes, and what must be seen. Each
//! cache is driven by an implementation of [`CacheUnderTest`], and [`run`] has every case done by it. A case that a
//! cache cannot show is not left out in silence: [`CacheUnderTest::lacks`] gives the reason, and the caller says how
//! many there are.

mod cases;
mod packet;
mod run;
mod step;

pub use cases::cases;
pub use packet::{ACK, FIN, Numbers, PSH, RST, SYN, TCP, UDP, emit, read};
pub use run::{CacheUnderTest, Report, run};
pub use step::{
    Arrival, Case, DIRECT_LOCAL_PORT, DIRECT_REMOTE_PORT, Expected, LOCAL, Need, Notice, OTHER_LOCAL, PEER, Seen, Step,
    Why, application, peer_keys, seal_keys,
};
