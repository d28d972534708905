//! The program socket: what a program says to the agent of its host (DESIGN §9; `docs/book/program-socket.md`). The C
//! library, the preload shim and the SDKs speak it; anybody may, and rights are asked for per request.
//!
//! Reading order: [`message`] (the bytes), [`request`] (what each of them does), [`rights`] (who may), [`source`]
//! (names of clients), [`event`], [`instances`] (who serves a name), [`load`] (how loaded a program is), [`hand_over`]
//! (sockets that go to another process), [`give`] (who is asked to give), [`splice`] (programs that leave), [`next`]
//! (boxes that name the next one), [`socket`] (connections).

pub mod event;
pub mod give;
pub mod hand_over;
pub mod instances;
pub mod load;
pub mod message;
pub mod next;
pub mod request;
pub mod rights;
pub mod socket;
pub mod source;
pub mod splice;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use margay_datapath::active_sockets::Cookie;
use parking_lot::RwLock;

use super::core::CoreHandle;
use crate::config::Config;
use event::Feed;
use hand_over::Takers;
use instances::Followers;
use rights::Rights;
use source::Sources;
use splice::Splices;

const FILE: &str = "programs.sock";

/// What the agent knows of programs that speak to it.
pub struct Programs {
    rights: RwLock<Rights>,
    sources: Sources,
    events: Feed,
    /// Processes that take over sockets.
    pub(in crate::agent) takers: Takers,
    /// Programs that follow who serves a name.
    followers: Followers,
    /// Programs that leave between two connections.
    pub(in crate::agent) splices: Splices,
    connections: AtomicUsize,
}

impl Programs {
    /// Nobody is there yet.
    pub fn new(config: &Config) -> Self {
        Self {
            rights: RwLock::new(Rights::new(config)),
            sources: Sources::default(),
            events: Feed::default(),
            takers: Takers::default(),
            followers: Followers::default(),
            splices: Splices::default(),
            connections: AtomicUsize::new(0),
        }
    }

    /// Who may bind which name from now on.
    pub fn configure(&self, config: &Config) {
        *self.rights.write() = Rights::new(config);
    }

    /// How many are connected.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// How many sockets one program has taken over from another.
    pub fn handed_over(&self) -> u64 {
        self.takers.taken()
    }

    /// These sockets are gone.
    pub fn forget(&self, core: &CoreHandle, gone: &[Cookie]) {
        self.sources.forget(core, gone);
    }
}

/// Where the program socket is.
pub fn path(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join(FILE)
}
