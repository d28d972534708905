//! How the packets of one leg of a session are carried, and in which order striped ones are given on.

pub mod carriage;
pub mod copies;
pub mod delta;
pub(crate) mod flow_ports;
pub mod loss;
pub mod reorder;
pub mod seal;
pub mod stack;
pub mod stripe;
pub mod timing;
