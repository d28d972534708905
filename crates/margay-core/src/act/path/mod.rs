//! Which way the packets of a flow go: direct, encapsulated, by single pairs or by several at once.

pub mod direct;
pub(crate) mod hold;
pub(crate) mod loss;
pub mod place_stack;
pub mod policy;
pub(crate) mod related;
pub(crate) mod side_path;
pub(crate) mod striping;
pub(crate) mod wire_path;
