//! How long silent peers are waited for, and upon what they are given up.

use core::time::Duration;

use margay_wire::TERMS_NEVER;

use crate::types::key::HostId;

/// Unless the operator says otherwise: long enough for hosts that move or sleep.
pub const GIVE_UP_AFTER: Duration = Duration::from_secs(30);

/// Less is less than a host that moves may take.
pub const GIVE_UP_AFTER_MIN: Duration = Duration::from_millis(500);

/// How long a silent peer is waited for; `None`: for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GiveUpAfter(pub Option<Duration>);

impl GiveUpAfter {
    /// As TERMS say it; less than [`GIVE_UP_AFTER_MIN`] counts as that.
    pub fn of_ms(ms: u32) -> Self {
        let limit = Duration::from_millis(ms.into()).max(GIVE_UP_AFTER_MIN);
        Self((ms != TERMS_NEVER).then_some(limit))
    }

    /// For TERMS: at most 49 days.
    pub fn ms(self) -> u32 {
        let ms = self.0.map(|limit| u32::try_from(limit.as_millis()).unwrap_or(TERMS_NEVER - 1));
        ms.map_or(TERMS_NEVER, |ms| ms.min(TERMS_NEVER - 1))
    }
}

/// Upon what a peer is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveUpCause {
    /// It has been silent for so long, and no router lists it.
    Silent(Duration),
    /// It serves the name no longer: its flows of datagrams begin anew with another host.
    Left,
    /// This host holds the name now, which is fenced.
    Elsewhere(HostId),
}

impl GiveUpCause {
    /// The names that metrics carry, by number.
    pub const LABELS: [&'static str; 3] = ["silent", "left", "elsewhere"];

    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::Silent(_) => 0,
            Self::Left => 1,
            Self::Elsewhere(_) => 2,
        }
    }
}
