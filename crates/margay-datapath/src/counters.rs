//! What the datapath counts: for metrics, and for tests that must see that something did not happen.

use std::sync::atomic::{AtomicU64, Ordering};

use margay_core::DropReason;

macro_rules! counters {
    ($(#[doc = $doc:literal] $name:ident,)*) => {
        /// Counts since the start, shared by the threads.
        #[derive(Debug, Default)]
        pub struct Counting {
            $(pub(crate) $name: Count,)*
            drops: PerReason<Count>,
        }

        /// Counts since the start, at one moment.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $(#[doc = $doc] pub $name: u64,)*
            drops: PerReason<u64>,
        }

        impl Counting {
            /// The counts now.
            pub fn read(&self) -> Counters {
                Counters {
                    $($name: self.$name.get(),)*
                    drops: PerReason(std::array::from_fn(|at| self.drops.0[at].get())),
                }
            }
        }

        impl Counters {
            /// Every count with the name that metrics carry, and what it counts, drops apart.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
                [$((stringify!($name), $doc.trim_matches([' ', '.']), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Packets and super-packets of applications that were sent to peers.
    egress_packets,
    /// Bytes of applications that were sent to peers, after the transport header.
    egress_bytes,
    /// Sends of DATA; each carries up to 64 datagrams.
    egress_sends,
    /// Sends of striped flows that waited for their turn.
    egress_paced,
    /// Sends of striped flows that another place has as well.
    egress_copies,
    /// Runs of chunks that peers sent.
    ingress_runs,
    /// Runs of striped flows that waited for those before them.
    ingress_held,
    /// Chunks of striped flows that had come by another place already.
    ingress_copies,
    /// Bytes given to applications, after the transport header.
    ingress_bytes,
    /// Packets of applications that missed the cache.
    egress_misses,
    /// DATA datagrams that missed the cache.
    ingress_misses,
    /// Datagrams of signalling received.
    signalling_received,
    /// Datagrams of signalling sent.
    signalling_sent,
    /// Times that a path turned out narrower than thought.
    paths_shrunk,
    /// Packets that had to be copied because their path has another datagram size than the one before.
    relaid,
    /// Pinholes for direct paths sent.
    pinholes,
    /// Connections that were made to send again what a break had lost.
    restarts,
    /// Fragments of applications.
    fragments,
    /// Bytes of datagrams that were sent by `fec`, repairs apart.
    fec_bytes,
    /// Bytes of repairs that were sent.
    fec_repair_bytes,
    /// Datagrams that were repaired in time.
    fec_repaired,
    /// Datagrams that could not be repaired, or not in time.
    fec_lost,
    /// Bytes of packets that were sent by `sctp`, acknowledgements and repetitions included.
    sctp_bytes,
    /// Times that a datagram was sent again by `sctp`.
    sctp_repeated,
    /// Datagrams that had not been acknowledged by `sctp` when their time was over.
    sctp_given_up,
}

/// One of each reason for a drop.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PerReason<T>([T; 64]);

impl<T: Default> Default for PerReason<T> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| T::default()))
    }
}

/// One count.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, number: u64) {
        self.0.fetch_add(number, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counting {
    pub(crate) fn drop(&self, reason: DropReason) {
        self.drop_many(reason, 1);
    }

    pub(crate) fn drop_many(&self, reason: DropReason, number: u64) {
        // Reasons are stable numbers below 64; a new one would be caught by the test below.
        if let Some(count) = self.drops.0.get(reason as usize) {
            count.add(number);
        }
    }
}

impl Counters {
    /// What the datapath itself dropped for a reason. The core counts its own drops.
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.drops.0.get(reason as usize).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn every_reason_has_its_place() {
        let counting = Counting::default();
        for &reason in DropReason::ALL {
            counting.drop(reason);
            assert_eq!(counting.read().drops(reason), 1, "{reason}");
        }
    }
}
