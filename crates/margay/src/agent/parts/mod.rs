//! The parts of a running agent. Each says what it owns, and who changes what is in it: a function that needs one of
//! them takes that part, not the whole agent.

mod connections;
mod host;
mod kernel;
mod names;
mod process;
mod publishing;
mod routing;

pub use connections::Connections;
pub use host::Host;
pub use kernel::Kernel;
pub use names::Names;
pub use process::Process;
pub use publishing::Publishing;
pub use routing::Routing;
