//! Fenced names: what this host serves of them follows whether it holds them; and flows of programs here to a host that
//! held one before end when the holder says so (DESIGN §3.9, docs/decisions/0072).

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use futures_util::future::{pending, select_all};
use margay_control::registration::{Home, Instance};
use margay_core::fence::{FenceError, FenceNotice, Fenced};
use margay_core::key::HostId;
use margay_core::name::{Name, Prefix, ServiceId};
use tokio::sync::Notify;
use tokio::task::block_in_place;
use tokio::time::sleep_until;

use super::Agent;
use super::spread::pass_on;

/// Notices that were refused and are spoken of once; of more, some are spoken of again.
const REFUSED_MAX: usize = 256;

/// Makes what is served follow what this host holds. Goes on until it is dropped.
pub async fn follow(agent: Arc<Agent>) {
    let heard = Arc::new(Notify::new());
    let mut homes: Vec<Weak<Home>> = Vec::new();
    let mut services = agent.publishing.services.changes();
    let mut home_changes = agent.publishing.services.home_changes();
    loop {
        homes.retain(|known| known.strong_count() > 0);
        for home in agent.publishing.services.homes() {
            if homes.iter().all(|known| !known.ptr_eq(&Arc::downgrade(&home))) {
                homes.push(Arc::downgrade(&home));
                tokio::spawn(pass_on(home.noted(), Arc::clone(&heard)));
            }
        }
        let found = block_in_place(|| agent.publishing.services.follow_tenures());
        for (name, prefix) in found.lost {
            let flows = agent.core.0.with_sal(|sal, now| sal.leave_fenced(now, prefix));
            tracing::warn!(%name, flows, "this host does not hold this fenced name: it serves it no more");
        }
        let look_again = async {
            match found.next {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = look_again => {}
            () = heard.notified() => {}
            // Both live as long as the services.
            _ = services.changed() => {}
            _ = home_changes.changed() => {}
        }
    }
}

/// Waits until this host serves a name, as a router knows; or until it does not.
pub async fn wait(agent: &Agent, name: &Name, is_wanted: bool) {
    let mut services = agent.publishing.services.changes();
    let mut home_changes = agent.publishing.services.home_changes();
    loop {
        let mut noted: Vec<_> = agent.publishing.services.homes_of(name).iter().map(|home| home.noted()).collect();
        if agent.publishing.services.serves(name) == is_wanted {
            return;
        }
        let any_home = async {
            match noted.is_empty() {
                true => pending().await,
                false => drop(select_all(noted.iter_mut().map(|noted| Box::pin(noted.changed()))).await),
            }
        };
        tokio::select! {
            () = any_home => {}
            _ = services.changed() => {}
            _ = home_changes.changed() => {}
        }
    }
}

/// Notices of fenced names, as they are heard of routers.
#[derive(Default)]
pub struct Notices {
    refused: HashSet<(Prefix, u64, HostId)>,
}

impl Notices {
    /// Takes up what holders of these names say.
    pub fn take(&mut self, agent: &Agent, listed: &HashMap<ServiceId, Vec<Instance>>) {
        let noticed = listed.values().flatten().filter_map(|instance| {
            let notice = FenceNotice::decode(instance.fence.as_ref()?).ok()?;
            (notice.holder() == instance.host).then_some((instance, notice))
        });
        for (instance, notice) in noticed {
            match agent.core.0.with_sal(|sal, now| sal.handle_fence(now, &notice)) {
                Ok(fenced) => self.taken(&notice, instance, fenced),
                Err(error) => self.refuse(&notice, instance, error),
            }
        }
    }

    fn taken(&mut self, notice: &FenceNotice, instance: &Instance, Fenced { initiated, served }: Fenced) {
        self.refused.remove(&key(notice));
        if initiated + served > 0 {
            tracing::warn!(
                name = instance.name,
                holder = instance.host_name,
                number = notice.number,
                initiated,
                served,
                "another host holds this fenced name now: flows with the former holder have ended"
            );
        }
    }

    fn refuse(&mut self, notice: &FenceNotice, instance: &Instance, error: FenceError) {
        if self.refused.len() >= REFUSED_MAX {
            self.refused.clear();
        }
        if !self.refused.insert(key(notice)) {
            return;
        }
        let name = &instance.name;
        let holder = &instance.host_name;
        let number = notice.number;
        if error == FenceError::Outdated {
            tracing::debug!(name, holder, number, "an older notice of a fenced name is not believed");
        } else {
            tracing::warn!(
                name, holder, number, %error,
                "a router says that this host holds a fenced name, which is not believed: flows to other hosts stay"
            );
        }
    }
}

fn key(notice: &FenceNotice) -> (Prefix, u64, HostId) {
    (notice.prefix, notice.number, notice.holder())
}
