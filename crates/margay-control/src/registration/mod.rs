//! Hosts register with service routers over one authenticated stream; its lease decides about *new* connections only
//! (DESIGN §7, §8).
//!
//! [`stream`] is the transport, [`host`] and [`conversation`] the host's end, [`router`] the router's, [`roll`] who is
//! registered there now, [`entry`] what is kept of each name of each host, [`partition`] and [`allotment`] who holds
//! which part of a service, [`fence`] who holds fenced names, and [`tenure`] for how long a host may count on that,
//! [`rights`] who may register what, [`zero_weight`] why somebody takes nothing new, [`recent`] what has changed of
//! late, [`ledger`] what is written down of it, [`retry`] what a refused host does, [`sharing`] what routers of a
//! cluster tell each other, [`elsewhere`] who is registered with the others, [`ways`] which router first packets go
//! to, [`silence`] when either end counts the other as gone, [`trace`] what either end asks the other of a first
//! packet's way, [`orders`] what hosts say of an authority's orders, and [`order_book`] how they carry them out.

mod allotment;
mod conversation;
mod elsewhere;
mod entry;
mod fence;
mod host;
mod instance;
mod keys;
mod leave;
mod ledger;
mod order_book;
mod orders;
pub mod partition;
mod recent;
mod refusal;
mod retry;
mod rights;
mod roll;
mod router;
mod sharing;
mod silence;
pub mod stream;
mod tenure;
mod trace;
mod ways;
mod zero_weight;

use margay_core::key::HostSecret;

pub use host::{
    Acknowledgement, ClusterRouter, Home, HomeConfig, HomeError, HomeState, Phase, Registration, RegistrationState,
    Watcher,
};
pub use instance::Instance;
pub(crate) use ledger::{Act, Ledger};
pub use order_book::{Carry, OrderBook};
pub use orders::Heard;
pub use roll::{OwnService, Place, RollError, Terms};
pub use router::{Router, RouterConfig, RouterError};
pub use tenure::Tenure;
pub use trace::{HOPS_MAX, Question, TraceError, Tracer};
pub use ways::Ways;
pub use zero_weight::ZeroWeight;

/// Messages of `proto/registration.proto`.
#[allow(missing_docs, clippy::all, clippy::unwrap_used)]
pub mod proto {
    tonic::include_proto!("margay.registration.v1");
}

/// Version of the protocol in `Hello` and `Welcome`.
const VERSION: u32 = 1;

/// Who this agent is, for both ends.
#[derive(Clone, Debug)]
pub struct Local {
    /// The host's key.
    pub host_key: HostSecret,
    /// This start of the agent.
    pub epoch: u32,
    /// The boot of the host.
    pub boot_id: [u8; 16],
    /// UDP port where SAL is heard.
    pub sal_port: u16,
    /// What people call the host.
    pub host_name: String,
    /// Name and version of the program.
    pub software: String,
}

#[cfg(test)]
mod test;
