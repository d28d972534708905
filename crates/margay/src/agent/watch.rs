//! What happens in the core, for logs and for whoever watches.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use margay_core::Event;
use parking_lot::RwLock;
use tokio::sync::broadcast;

/// Events that a slow watcher may be behind; older ones are lost to it, and it is told how many.
const BEHIND_MAX: usize = 8192;

/// Gives events out.
#[derive(Clone)]
pub struct Watchers {
    /// None once the agent goes down.
    sender: Arc<RwLock<Option<broadcast::Sender<Event>>>>,
    /// Associations have changed since somebody asked.
    associations_changed: Arc<AtomicBool>,
}

impl Default for Watchers {
    fn default() -> Self {
        let sender = Arc::new(RwLock::new(Some(broadcast::channel(BEHIND_MAX).0)));
        Self { sender, associations_changed: Arc::default() }
    }
}

impl Watchers {
    /// For [`margay_datapath::Datapath::start`]: quick, and never calls back.
    pub fn on_event(&self) -> Box<dyn FnMut(Event) + Send> {
        let this = self.clone();
        Box::new(move |event| {
            log(&event);
            if matches!(event, Event::AssociationUp(_) | Event::PeerRebooted(_)) {
                this.associations_changed.store(true, Ordering::Relaxed);
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

    /// Whether associations have changed since the last call.
    pub fn take_associations_changed(&self) -> bool {
        self.associations_changed.swap(false, Ordering::Relaxed)
    }
}

fn log(event: &Event) {
    match event {
        Event::FlowOpened(flow) => tracing::debug!(%flow, "flow opened"),
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
