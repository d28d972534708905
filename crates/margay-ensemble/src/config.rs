//! What a connection is set up with, and why it may fail.

use core::fmt;
use core::time::Duration;

use crate::number::Csn;

/// Frames that a connection may have under way in each direction, unless told otherwise (the paper's *w*).
pub const WINDOW_DEFAULT: u16 = 384;
/// The least.
pub const WINDOW_MIN: u16 = 16;
/// The most.
pub const WINDOW_MAX: u16 = 4096;

/// How the peer finds out what is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LossDetection {
    /// By time, as Margay's own endpoints do: it is told of every gap.
    Time,
    /// By three misses (RFC 9260, 7.2.4): a slow member would look like loss to it, and so some gaps are not revealed.
    Misses,
}

/// What a connection is set up with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Which connection: for plug-ins.
    pub connection: u32,
    /// Chunks under way in each direction; brought within [`WINDOW_MIN`] and [`WINDOW_MAX`].
    pub window: u16,
    /// How the peer finds out what is lost.
    pub peer: LossDetection,
    /// The peer's initial TSN.
    pub from_peer: Csn,
    /// The initial TSN towards the peer.
    pub to_peer: Csn,
    /// Bytes of the largest packet that has only acknowledgements.
    pub packet_bytes: usize,
    /// A member is told so much later what the peer has of its, unless something is sent to the member before, or there
    /// is more to tell; zero: at once.
    pub sack_delay: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            connection: 0,
            window: WINDOW_DEFAULT,
            peer: LossDetection::Time,
            from_peer: Csn(0),
            to_peer: Csn(0),
            packet_bytes: 1200,
            sack_delay: Duration::ZERO,
        }
    }
}

impl Config {
    pub(crate) fn window(&self) -> u32 {
        self.window.clamp(WINDOW_MIN, WINDOW_MAX).into()
    }
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The peer sends RFC 9260's DATA; two members' answers could not be merged into that without a buffer.
    PlainData,
    /// The peer gave up a frame that it had sent; an ensemble's frames have no lifetime.
    Abandoned,
    /// All frames go to one member, and it is gone.
    PinnedMemberGone,
    /// A member died with this frame, which is not safe to repeat, and the plug-in names no member to answer with an
    /// error.
    Unsafe(Csn),
    /// A member died when the peer had been told of a part of this frame, and so will not repeat that.
    PartlyAcknowledged(Csn),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PlainData => f.write_str("the peer sends DATA (RFC 9260); an ensemble takes I-DATA (RFC 8260)"),
            Self::Abandoned => f.write_str("the peer gave up a frame; frames to an ensemble have no lifetime"),
            Self::PinnedMemberGone => f.write_str("the member that all frames of the connection go to is gone"),
            Self::Unsafe(csn) => write!(f, "a member died with frame {csn}, which is not safe to repeat"),
            Self::PartlyAcknowledged(csn) => write!(f, "a member died with a part of frame {csn}"),
        }
    }
}

impl core::error::Error for Failure {}
