//! The rules that the switch's safety hangs on, one by one, so that the checkers can show that they miss each of them.

/// Which rules hold. Products use [`Sound`]; anything else is broken on purpose.
pub trait Rules {
    /// A patch is released only when all before it has been acknowledged, or is itself patched.
    const DEFERS_PATCHES: bool = true;
    /// Members are told what of the peer's order is complete, and no more.
    const WATERMARKS: bool = true;
    /// One that joins has the holes pending that there are.
    const HOLES_AT_JOIN: bool = true;
    /// The peer is told what members have acknowledged, and no more.
    const END_TO_END: bool = true;
}

/// All of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sound;

impl Rules for Sound {}
