//! Numbers that every flow cache has in common: the kernel's, which the agent tells them when it loads the programs,
//! the agent's own, and the simulator's.

use core::time::Duration;

/// A connection whose encapsulated data goes unanswered for so long is told of, whatever else is answered.
pub const UNANSWERED: Duration = Duration::from_secs(1);

/// Data that goes encapsulated by a path is suspicious if nothing comes back for so long: longer than the kernel's TCP
/// waits before it sends again.
pub const SILENCE: Duration = Duration::from_millis(450);

/// For so long packets are taken that come by addresses that a path has left.
pub const LINGER: Duration = Duration::from_secs(2);

/// Datagrams of the application, beside the first, after which its flow is lifted though none has come back.
pub const DATAGRAMS_MIN: u32 = 4;

/// The last packet of a stack, if it is lost, holds up what has overtaken it for so long at most.
pub const FENCE_WAIT: Duration = Duration::from_millis(50);

/// A direct segment is overdue after so long and two round trips: just under the least retransmission time-out of the
/// kernel's TCP, whose first retransmission then finds the flow stalled.
pub const STALL: Duration = Duration::from_millis(190);

/// The same without a round trip known, of the flow or of another one on its path.
pub const STALL_UNKNOWN: Duration = Duration::from_secs(1);

/// The end that only receives direct datagrams answers so often.
pub const DATAGRAM_ANSWER: Duration = Duration::from_secs(1);

/// Direct datagrams that go unanswered for so long arrive nowhere: three answers are not lost by chance.
pub const DATAGRAM_STALL: Duration = Duration::from_millis(3500);

/// After such a pause a flow of direct datagrams is proved anew. Firewalls close the hole of one after 30 s of silence
/// at the earliest (Linux conntrack's time for a flow that has not been answered); half of that is on the safe side.
pub const DATAGRAM_IDLE: Duration = Duration::from_secs(15);

/// How often the core hears, while the flows of a grant are opened, how many are.
pub const GRANT_NEWS: u16 = 8;
