//! The lab: hosts as network namespaces, real agents and real programs on them, scenarios that give figures.
//!
//! The program `margay-lab` calls [`run`]. Reading order: [`topology`], [`fabric`] (processes and namespaces),
//! [`host`], [`wire`] and [`pump`] (links), [`lab`], [`agent`] (all invocations of Margay itself), [`scenario`].

pub mod agent;
pub mod arrivals;
pub mod cgroup;
pub mod command;
pub mod demo;
pub mod downloads;
pub mod draining;
pub mod entries;
pub mod fabric;
pub mod figure;
pub mod filter;
pub mod held;
pub mod host;
pub mod idle;
pub mod interface;
pub mod iperf;
pub mod lab;
pub mod moment;
pub mod observe;
pub mod pause;
pub mod program;
pub mod pump;
pub mod python;
pub mod recorder;
pub mod report;
pub mod route;
pub mod scenario;
pub mod series;
pub mod server;
pub mod sessions;
pub mod shadow;
pub mod standing;
pub mod timeline;
pub mod topology;
pub mod traffic;
pub mod transfers;
pub mod tunnel;
pub mod turns;
pub mod twins;
pub mod upgrading;
pub mod weather;
pub mod websockets;
pub mod wire;

pub use command::run;
