//! The wide area: routers of sites tell routers of other sites which names they lead to, and make rules of what they
//! are told (DESIGN §8; SCAFFOLD §5).
//!
//! [`announcement`] is what is said, [`board`] (pure) what follows from it, [`census`] what a site serves itself,
//! [`policy`] what its operator wants; [`WideArea`] has the rights checked and the rules made, and is shared by all
//! streams of a router, those that it accepts and those that it opens ([`crate::registration`]).

pub mod announcement;
mod area;
pub mod board;
mod census;
mod policy;
mod rule;

pub use announcement::{Announcement, Fault, Scope, Stage, is_site};
pub(crate) use area::{Attachment, Words, due};
pub use area::{NeighbourInfo, WideArea};
pub use board::{Link, Neighbour};
pub use census::Census;
pub use policy::{Policy, Preference};
