//! How flows end, and how hosts and names are left: FIN, FAIL, drain, quiet ends, patience, fences.

pub(crate) mod closing;
pub mod drain;
pub mod fence;
pub mod patience;
pub(crate) mod pending_fail;
pub mod quiet;
mod told;
