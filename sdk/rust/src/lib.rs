//! Sockets by service name: connect to, serve and exchange datagrams with the services of a Margay network.
//!
//! ```no_run
//! use margay_sdk::{Listener, Stream};
//! use tokio::io::AsyncWriteExt;
//!
//! # async fn example() -> Result<(), margay_sdk::Error> {
//! let listener = Listener::bind("web.shop").await?;
//! let mut client = Stream::connect("web.shop").await?;
//! client.write_all(b"hello").await?;
//! let (served, peer) = listener.accept().await?;
//! println!("{peer} says {:?}", served.as_tcp().peer_addr());
//! # Ok(())
//! # }
//! ```
//!
//! All sockets are ordinary ones of the kernel; this library asks the agent of this host which addresses stand for a
//! name, tells it what a socket serves, and asks who a peer is. Nothing that is sent or received passes through it.
//!
//! A server that is replaced by a new process gives that one its listening socket and its connections: the new process
//! opens a [`Takeover`] of the name, and then the old one calls [`hand_over()`] for each socket, the listening one
//! first. Clients notice nothing, and what nobody has read yet, the new process reads. By [`hand_over_to`] a connection
//! goes on at another host; a [`GivingTakeover`] hears when an operator wants that.
//!
//! [`Frames`] and [`FramesListener`] are framed sockets: messages that arrive whole, over a connection with one server,
//! or with an ensemble of them that a switch divides the frames among.
//!
//! A proxy that has done its work leaves between two connections by [`splice()`], and they become one.
//!
//! The program of a box names the boxes that a session goes through next by [`pass_next()`].
//! A server that has much to do says so by [`report_load()`], and has fewer new connections.
//!
//! It runs on tokio, with time and I/O enabled, on Linux. Nothing here blocks.

mod agent;
mod datagram;
mod error;
mod event;
mod frames;
mod hand_over;
mod instances;
mod load;
mod next;
mod options;
#[doc(hidden)]
pub mod shares;
mod socket;
mod splice;
mod stream;
mod target;
mod wire;

pub use agent::{Addresses, Agent, DEFAULT_PATH};
pub use datagram::{Connected, Datagrams};
pub use error::Error;
pub use event::{Event, EventKind, Events};
pub use frames::{
    Arrival, FRAME_MAX, FRAME_STREAMS_MAX, Frames, FramesListener, FramesReceiver, FramesSender, Received, Sending,
};
pub use hand_over::{Give, GivingTakeover, Incoming, NotHandedOver, Taken, Takeover, hand_over, hand_over_to};
pub use instances::{Instance, Instances};
pub use load::report_load;
pub use margay_core::name::{Name, NameError, Prefix, ServiceId};
pub use margay_ensemble::Order;
pub use next::{FirstPacket, pass_next};
pub use options::Options;
pub use splice::{NotSpliced, splice};
pub use stream::{Listener, Peer, Stream};
pub use target::{Target, ToTarget};
pub use wire::Protocol;
