//! What happens to sessions and associations: one module for each act.

pub mod chain;
pub(crate) mod ending;
pub mod fetch;
pub(crate) mod flow_lock;
pub(crate) mod grant;
pub(crate) mod greeting;
pub mod handover;
pub(crate) mod moving;
pub(crate) mod path;
pub mod reconfiguration;
pub mod search;
pub mod secure;
pub(crate) mod setup;
pub mod stack_change;
pub mod stack_rule;
