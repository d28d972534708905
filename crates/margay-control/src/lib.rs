//! The control plane of one agent: keys, join tokens, the embedded store, virtual addresses, registration between hosts
//! and routers, DNS, and the gRPC API.
//!
//! Nothing here owns the datapath: what the control plane decides reaches the core through [`SalControl`], which the
//! program implements.

pub mod api;
mod armor;
pub mod chain_order;
pub mod chains;
pub mod clock;
pub mod cluster;
pub mod dns;
pub mod entropy;
pub mod identity;
pub mod issue;
pub mod keyring;
pub mod lease;
pub mod lineage;
pub mod permits;
pub mod pins;
pub mod quantity;
pub mod registration;
pub mod relocation;
pub mod resolver;
pub mod sal_control;
pub mod state_dir;
pub mod statement;
pub mod store;
pub mod token;
pub mod warrant;
pub mod wide_area;

pub use clock::Clock;
pub use sal_control::SalControl;
pub use state_dir::{StateDir, StateError};
