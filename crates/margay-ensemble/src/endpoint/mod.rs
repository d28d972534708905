//! The ends of a connection: of the peer as of a member, which need not know whether there is a switch.

mod congestion;
mod rack;
mod receiver;
mod sender;

pub use rack::Patience;
pub use receiver::{Reading, Received, Receiver, ReceiverConfig};
pub use sender::{Queued, Sender, SenderConfig, TooLarge};
