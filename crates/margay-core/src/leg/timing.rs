//! How evenly a flow's datagrams arrive, and what the flow cache counts for that.

/// How evenly a flow's datagrams arrive one way; nothing where it is not known, or not yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// By how much the time varies that they take, in microseconds.
    pub jitter_us: Option<u32>,
    /// Those that came behind a later one, of a million.
    pub reordered_ppm: Option<u32>,
}

/// How evenly a flow's datagrams arrive, each way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowTiming {
    /// Of those that this host sends.
    pub sent: Timing,
    /// Of those that the peer sends.
    pub received: Timing,
}

impl FlowTiming {
    /// The greater of both ways, each by itself.
    pub fn worst(&self) -> Timing {
        self.sent.or_worse(self.received)
    }
}

impl Timing {
    /// The greater of both, each by itself.
    #[must_use]
    pub fn or_worse(self, other: Self) -> Self {
        Self {
            jitter_us: self.jitter_us.max(other.jitter_us),
            reordered_ppm: self.reordered_ppm.max(other.reordered_ppm),
        }
    }
}

/// What the flow cache has seen of the order of the peer's datagrams; counts wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Datagrams that have come with a number.
    pub judged: u32,
    /// Of these, those that came behind a later one.
    pub late: u32,
}
