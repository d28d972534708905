//! The state machine that a host sees.

pub(crate) mod control;
pub(crate) mod counters;
pub(crate) mod input;
pub(crate) mod sal;
pub(crate) mod share;
