//! What is lost of a flow of datagrams, and what the flow cache counts for that.

use crate::leg::timing::Order;

/// What is lost of a flow's datagrams one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Of a million datagrams.
    pub ppm: u32,
    /// How many are lost in a row, on the average, in thousandths; at least 1000. That much where it is not known.
    pub row_thousandths: u32,
}

/// What is lost of a flow's datagrams, each way; nothing where it is not known, or not yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowLoss {
    /// Of those that this host sends.
    pub sent: Option<Loss>,
    /// Of those that the peer sends.
    pub received: Option<Loss>,
}

impl FlowLoss {
    /// The greater of both, of a million.
    pub fn worst_ppm(&self) -> Option<u32> {
        self.sent.into_iter().chain(self.received).map(|loss| loss.ppm).max()
    }
}

/// What the flow cache has counted of one flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCount {
    /// Datagrams that programs here have sent; wraps.
    pub sent: u32,
    /// Datagrams that they were given; wraps.
    pub received: u32,
    /// By the numbers of datagrams, where the peer sends by `fec` or `sctp`.
    pub numbered: Option<Numbered>,
    /// In which order they came, as far as they had numbers.
    pub order: Order,
}

/// What has come of datagrams with numbers; counts wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbered {
    /// The change from which on it is counted.
    pub change: u32,
    /// Datagrams that should have come.
    pub expected: u32,
    /// Those that have, by themselves.
    pub received: u32,
    /// How often one or several in a row have not.
    pub gaps: u32,
}
