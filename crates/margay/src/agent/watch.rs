//! What happens in the core, for logs and for whoever watches.

use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};

use margay_core::Event;
use parking_lot::RwLock;
use tokio::sync::broadcast;

use super::flows::Change;

/// Events that a slow watcher may be behind; older ones are lost to it, and it is told how many.
const BEHIND_MAX: usize = 8192;

/// Gives events out.
#[derive(Clone)]
pub struct Watchers {
    /// None once the agent goes down.
    sender: Arc<RwLock<Option<broadcast::Sender<Event>>>>,
    /// Whoever keeps flows for the next start.
    keeper: Arc<OnceLock<Sender<Change>>>,
}

impl Default for Watchers {
    fn default() -> Self {
        let sender = Arc::new(RwLock::new(Some(broadcast::channel(BEHIND_MAX).0)));
        Self { sender, keeper: Arc::default() }
    }
}

impl Watchers {
    /// For [`margay_datapath::Datapath::start`]: quick, and never calls back.
    pub fn on_event(&self) -> Box<dyn FnMut(Event) + Send> {
        let this = self.clone();
        Box::new(move |event| {
            log(&event);
            if let Some((keeper, change)) = this.keeper.get().zip(Change::of(&event)) {
                // It ends with the process only.
                let _ = keeper.send(change);
            }
            if let Some(sender) = &*this.sender.read() {
                // Nobody listens: nothing is lost.
                let _ = sender.send(event);
            }
        })
    }

    /// From now on; `None` when the agent goes down.
    pub fn subscribe(&self) -> Option<broadcast::Receiver<Event>> {
        self.sender.read().as_ref().map(broadcast::Sender::subscribe)
    }

    /// Ends all watching.
    pub fn close(&self) {
        *self.sender.write() = None;
    }

    /// Tells `keeper` of every change from now on.
    pub fn keep(&self, keeper: Sender<Change>) {
        // Set once, at the start.
        let _ = self.keeper.set(keeper);
    }
}

fn log(event: &Event) {
    match event {
        Event::FlowOpened(flow) => tracing::debug!(%flow, "flow opened"),
        Event::FlowChanged(flow) => tracing::trace!(%flow, "one side has closed"),
        Event::FlowClosed { flow, reason } => {
            tracing::debug!(flow = %flow.flow, app = %flow.app, reason = reason.label(), "flow closed");
        }
        Event::ConnectFailed { service, app, why } => tracing::info!(%service, %app, why, "connect failed"),
        Event::AssociationUp(host) => tracing::debug!(%host, "association up"),
        Event::PeerRebooted(host) => tracing::info!(%host, "peer rebooted; its older flows were reset"),
        Event::Quarantined(host) => {
            tracing::warn!(%host, "two hosts use the same key; the later one is kept out: remove the host key of one of them");
        }
    }
}
