//! By which way direct packets come to this host's programs: in place at the card, or by `sal0` (decision 0040).

use std::future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use margay_datapath::kernel::KernelCache;
use parking_lot::Mutex;
use tokio::time::{interval, sleep};

use super::Agent;
use crate::host::judge::{self, Judge};

/// Reverse-path filters are set without a word to anybody.
const ROUND: Duration = Duration::from_secs(1);
/// Between two looks at a packet filter that is changed all the time.
const PAUSE: Duration = Duration::from_millis(100);
/// One flow may be mistaken.
const SWALLOWED_MAX: u64 = 3;

/// Why direct packets take the way by `sal0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detour {
    /// This one may ask why they come by that card.
    Judged(Judge),
    /// Nobody knows what is there to judge.
    Unknown(String),
    /// So many flows have shown that what stays on the card does not arrive.
    Swallowed(u64),
}

/// The way that is in use.
#[derive(Default)]
pub struct Way(Mutex<State>);

#[derive(Default)]
struct State {
    detour: Option<Detour>,
    /// How many flows had shown it before this agent started: the kernel's counters outlive it.
    swallowed_before: Option<u64>,
}

impl Way {
    /// As it is to be at the start.
    pub fn look() -> Option<Detour> {
        match judge::find() {
            Ok(judge) => judge.map(Detour::Judged),
            Err(error) => Some(Detour::Unknown(error.to_string())),
        }
    }

    /// Why not in place.
    pub fn detour(&self) -> Option<Detour> {
        self.0.lock().detour.clone()
    }
}

/// Looks, and has the programs follow.
pub fn refresh(agent: &Agent) {
    let Some(swallowed) = agent.kernel.direct.with_cache(KernelCache::undelivered) else { return };
    let mut state = agent.kernel.way.0.lock();
    let before = *state.swallowed_before.get_or_insert(swallowed);
    // For good: who it is that drops them cannot be seen, nor when it ends.
    let found = match swallowed.saturating_sub(before) {
        flows if flows >= SWALLOWED_MAX => Some(Detour::Swallowed(flows)),
        _ => Way::look(),
    };
    agent.kernel.direct.with_cache(|cache| cache.set_in_place(found.is_none()));
    let has_changed = match (&state.detour, &found) {
        (Some(Detour::Swallowed(_)), Some(Detour::Swallowed(_))) => false,
        (before, found) => before != found,
    };
    state.detour = found;
    match &state.detour {
        _ if !has_changed => {}
        None => tracing::info!("direct packets come to programs in place"),
        Some(Detour::Judged(judge)) => {
            tracing::info!(%judge, "direct packets come to programs by sal0: it may ask by which card")
        }
        Some(Detour::Unknown(why)) => tracing::warn!(why, "direct packets come to programs by sal0"),
        Some(Detour::Swallowed(flows)) => tracing::warn!(
            flows,
            "something on this host drops what is rewritten at the cards; direct packets come to programs by sal0 \
             until the next start"
        ),
    }
}

/// Goes on until it is aborted.
pub async fn follow(agent: Arc<Agent>) {
    let mut rounds = interval(ROUND);
    let mut changes = judge::Changes::open().inspect_err(|error| {
        tracing::warn!(%error, "this host's packet filter is looked at every second, and not heard of");
    });
    loop {
        tokio::select! {
            _ = rounds.tick() => {}
            () = heard(&mut changes) => {}
        }
        tokio::task::block_in_place(|| refresh(&agent));
        sleep(PAUSE).await;
    }
}

pub(super) async fn heard(changes: &mut io::Result<judge::Changes>) {
    let Ok(changes) = changes else { return future::pending().await };
    changes.next().await;
    // One change comes in many messages.
    while changes.next().now_or_never().is_some() {}
}
