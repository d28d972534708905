//! Numbers of one TCP connection as another one has them: what stands between two connections that have become one,
//! once the program between them has left (Dysco §3.4; docs/decisions/0088).
//!
//! The *wire* has the numbers of the left connection, the *local* TCP those of the right one. One end of the session
//! translates, for its own side alone. All arithmetic wraps.

mod record;
mod translation;

#[cfg(test)]
mod test;

pub use self::record::DELTA_RECORD_LEN;
pub use self::translation::{Checksum, Translation};
use crate::types::direction::Direction;
use crate::types::time::Instant;

/// What the kernel says of one of the two sockets of a program that leaves, at a moment when it has written all that
/// it has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketFacts {
    /// Number of the first byte of the peer's that the program has not read.
    pub unread: u32,
    /// Number of the first byte that the program has not written.
    pub written: u32,
    /// The clock of its timestamps (RFC 7323 §5.4), in milliseconds; `None` where the connection has none.
    pub timestamp: Option<u32>,
    /// Window scale of what the peer says, at most 14.
    pub peer_scale: u8,
    /// Window scale of what this socket says, at most 14.
    pub own_scale: u8,
    /// Both ends of the connection take selective acknowledgements.
    pub has_sack: bool,
}

/// What is known of the two sockets of a program that leaves. What it read of the left one it wrote to the right one,
/// and the other way round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpliceFacts {
    /// Of the connection that the program has accepted. Its numbers stay on the wire.
    pub left: SocketFacts,
    /// Of the one that it has opened. The end that translates has this one's peer.
    pub right: SocketFacts,
}

/// How the clock of timestamps of one side becomes that of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Added on the way from the wire to the local TCP.
    Fixed(u32),
    /// Follows from the first packet that bears a timestamp: the clock of the socket that has left goes on, and shows
    /// so many milliseconds more than have passed since [`Instant::ZERO`].
    Awaited(u32),
    /// One of the two connections has no timestamps: the option is overwritten.
    Absent,
}

impl Clock {
    const NONE: Self = Self::Fixed(0);

    const fn shift(self) -> Option<u32> {
        match self {
            Self::Fixed(shift) => Some(shift),
            Self::Absent => Some(0),
            Self::Awaited(_) => None,
        }
    }

    /// The clock that shows `value` now.
    pub const fn awaited(value: u32, now: Instant) -> Self {
        Self::Awaited(value.wrapping_sub(millis(now)))
    }

    /// What the clock that is awaited shows now.
    fn shows(self, now: Instant) -> Option<u32> {
        let Self::Awaited(ahead) = self else { return None };
        Some(ahead.wrapping_add(millis(now)))
    }

    fn then(self, next: Self) -> Self {
        match (self, next) {
            (Self::Absent, _) | (_, Self::Absent) => Self::Absent,
            (Self::Fixed(first), Self::Fixed(second)) => Self::Fixed(first.wrapping_add(second)),
            (Self::Awaited(ahead), Self::Fixed(shift)) => Self::Awaited(ahead.wrapping_add(shift)),
            (_, Self::Awaited(ahead)) => Self::Awaited(ahead),
        }
    }
}

/// As a clock of 32 bits counts it.
const fn millis(now: Instant) -> u32 {
    (now.micros() / 1000) as u32
}

/// What is done to the packets of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translations {
    /// To those of the local TCP, on their way to the wire.
    pub egress: Translation,
    /// To those that come from the wire.
    pub ingress: Translation,
}

/// What numbers differ by between the wire and the local TCP of one flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta {
    /// Added to numbers of the peer on the way from the wire to the local TCP.
    pub peer: u32,
    /// Added to numbers of this end, in acknowledgements, on the way from the wire to the local TCP.
    pub own: u32,
    /// The peer's clock of timestamps.
    pub peer_clock: Clock,
    /// This end's.
    pub own_clock: Clock,
    /// By how many bits a window is shifted on the way from the wire to the local TCP: left, or right where it is
    /// negative.
    pub ingress_shift: i8,
    /// The same on the way to the wire.
    pub egress_shift: i8,
    /// One of the two connections has no selective acknowledgements: those that come are overwritten.
    pub drops_sack: bool,
}

impl SpliceFacts {
    /// What the end to the right of the program adds, when it hears of this at `now`.
    pub fn delta(&self, now: Instant) -> Delta {
        let Self { left, right } = self;
        let clock = |shown: u32| Clock::awaited(shown, now);
        let (peer_clock, own_clock) = match (left.timestamp, right.timestamp) {
            (Some(left), Some(right)) => (clock(right), clock(left)),
            (None, None) => (Clock::NONE, Clock::NONE),
            _ => (Clock::Absent, Clock::Absent),
        };
        Delta {
            peer: right.written.wrapping_sub(left.unread),
            own: right.unread.wrapping_sub(left.written),
            peer_clock,
            own_clock,
            ingress_shift: shift_between(left.peer_scale, right.own_scale),
            egress_shift: shift_between(right.peer_scale, left.own_scale),
            drops_sack: left.has_sack != right.has_sack,
        }
    }
}

/// Largest window scale (RFC 7323 §2.3).
const SCALE_MAX: u8 = 14;

/// A window of 16 bits has nothing left, or is the largest there is, after less than that.
const SHIFT_MAX: i8 = 64;

fn added(one: i8, other: i8) -> i8 {
    one.saturating_add(other).clamp(-SHIFT_MAX, SHIFT_MAX)
}

fn shift_between(from: u8, to: u8) -> i8 {
    let scale = |bits: u8| i8::try_from(bits.min(SCALE_MAX)).unwrap_or(0);
    scale(from) - scale(to)
}

impl Delta {
    /// Both connections have the same numbers, clocks and scales.
    pub const ZERO: Self = Self {
        peer: 0,
        own: 0,
        peer_clock: Clock::NONE,
        own_clock: Clock::NONE,
        ingress_shift: 0,
        egress_shift: 0,
        drops_sack: false,
    };

    /// Whether it changes nothing: such a one is none.
    pub fn is_zero(&self) -> bool {
        *self == Self::ZERO
    }

    /// Whether both clocks are known. A flow cache carries a flow from then on.
    pub const fn is_settled(&self) -> bool {
        self.peer_clock.shift().is_some() && self.own_clock.shift().is_some()
    }

    /// What a flow cache does to packets; `None` until [`is_settled`](Self::is_settled).
    pub fn translations(&self) -> Option<Translations> {
        self.is_settled().then(|| Translations {
            egress: self.translation_so_far(Direction::Egress),
            ingress: self.translation_so_far(Direction::Ingress),
        })
    }

    /// A timestamp of a clock that is not known yet becomes zero, which no TCP takes for an echo.
    fn translation_so_far(&self, direction: Direction) -> Translation {
        let drops_timestamps = self.peer_clock == Clock::Absent || self.own_clock == Clock::Absent;
        let towards = |shift: u32| match direction {
            Direction::Ingress => shift,
            Direction::Egress => shift.wrapping_neg(),
        };
        let (sender, receiver) = match direction {
            Direction::Ingress => ((self.peer, self.peer_clock), (self.own, self.own_clock)),
            Direction::Egress => ((self.own, self.own_clock), (self.peer, self.peer_clock)),
        };
        let window_shift = match direction {
            Direction::Ingress => self.ingress_shift,
            Direction::Egress => self.egress_shift,
        };
        Translation {
            sequence: towards(sender.0),
            acknowledgement: towards(receiver.0),
            timestamp: sender.1.shift().map(towards),
            echo: receiver.1.shift().map(towards),
            window_shift,
            drops_timestamps,
            drops_sack: self.drops_sack,
        }
    }

    /// Gives a packet from the wire the numbers of the local TCP. The first one with a timestamp settles the peer's
    /// clock. What is no whole TCP packet stays as it is.
    pub fn apply_ingress(&mut self, now: Instant, packet: &mut [u8], checksum: Checksum) {
        if let Some(expected) = self.peer_clock.shows(now)
            && let Some(timestamp) = translation::timestamp(packet)
        {
            self.peer_clock = Clock::Fixed(expected.wrapping_sub(timestamp));
        }
        self.translation_so_far(Direction::Ingress).apply(packet, checksum);
    }

    /// Gives a packet of the local TCP the numbers of the wire. The first one with a timestamp settles this end's
    /// clock.
    pub fn apply_egress(&mut self, now: Instant, packet: &mut [u8], checksum: Checksum) {
        if let Some(expected) = self.own_clock.shows(now)
            && let Some(timestamp) = translation::timestamp(packet)
        {
            self.own_clock = Clock::Fixed(timestamp.wrapping_sub(expected));
        }
        self.translation_so_far(Direction::Egress).apply(packet, checksum);
    }

    /// The same for whoever calls `to` what is called `from` here: clocks that are awaited go on from there.
    pub fn shown_at(self, from: Instant, to: Instant) -> Self {
        let moved = |clock: Clock| clock.shows(from).map_or(clock, |value| Clock::awaited(value, to));
        Self { peer_clock: moved(self.peer_clock), own_clock: moved(self.own_clock), ..self }
    }

    /// The same with clocks that are awaited, if there are any, further by so many milliseconds.
    pub fn ahead(self, by_ms: u32) -> Self {
        let further = |clock: Clock| match clock {
            Clock::Awaited(ahead) => Clock::Awaited(ahead.wrapping_add(by_ms)),
            known => known,
        };
        Self { peer_clock: further(self.peer_clock), own_clock: further(self.own_clock), ..self }
    }

    /// The delta of a wire that lies beyond: from there to the wire of `next` by this one, and on by `next`.
    pub fn then(self, next: Self) -> Self {
        Self {
            peer: self.peer.wrapping_add(next.peer),
            own: self.own.wrapping_add(next.own),
            peer_clock: self.peer_clock.then(next.peer_clock),
            own_clock: self.own_clock.then(next.own_clock),
            ingress_shift: added(self.ingress_shift, next.ingress_shift),
            egress_shift: added(self.egress_shift, next.egress_shift),
            drops_sack: self.drops_sack || next.drops_sack,
        }
    }

    /// What takes the numbers back: [`then`](Self::then) of both is zero, but for options that are overwritten. `None`
    /// until [`is_settled`](Self::is_settled).
    pub fn inverse(self) -> Option<Self> {
        let back = |clock: Clock| match clock {
            Clock::Fixed(shift) => Some(Clock::Fixed(shift.wrapping_neg())),
            Clock::Absent => Some(Clock::Absent),
            Clock::Awaited(_) => None,
        };
        Some(Self {
            peer: self.peer.wrapping_neg(),
            own: self.own.wrapping_neg(),
            peer_clock: back(self.peer_clock)?,
            own_clock: back(self.own_clock)?,
            ingress_shift: self.ingress_shift.saturating_neg(),
            egress_shift: self.egress_shift.saturating_neg(),
            drops_sack: self.drops_sack,
        })
    }

    /// A number of the peer as the local TCP has it, from the wire's.
    pub const fn peer_local(&self, wire: u32) -> u32 {
        wire.wrapping_add(self.peer)
    }

    /// A number of this end as the wire has it, from the local TCP's.
    pub const fn own_wire(&self, local: u32) -> u32 {
        local.wrapping_sub(self.own)
    }
}
