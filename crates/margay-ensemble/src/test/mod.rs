//! Literal cases of the switch: the paper's figures, and what the paper leaves open.

mod bounds;
mod ends;
mod inbound;
mod membership;
mod outbound;
mod rig;
