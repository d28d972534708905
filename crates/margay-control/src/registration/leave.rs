//! When hosts, and what they serve, are no longer there.

/// Why an instance is no longer listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// Its host said so.
    Withdrawn,
    /// Its host was silent for a lease.
    Lapsed,
    /// Its host's stream ended.
    Ended,
    /// Its host came back and did not register it again.
    NotRenewed,
    /// Its host was put out.
    Expelled,
    /// Another router of the cluster has given the name to another host.
    GivenAway,
}

impl Leave {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Withdrawn, Self::Lapsed, Self::Ended, Self::NotRenewed, Self::Expelled, Self::GivenAway];

    /// For metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Withdrawn => "withdrawn",
            Self::Lapsed => "lapsed",
            Self::Ended => "ended",
            Self::NotRenewed => "not_renewed",
            Self::Expelled => "expelled",
            Self::GivenAway => "given_away",
        }
    }
}

/// How far the end of a stream has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// The host serves some names still.
    Going,
    /// It serves nothing any more, and is not here.
    Gone,
    /// Another stream speaks for the host.
    Superseded,
}
