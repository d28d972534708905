//! Grants: flows that the kernels of two hosts open by themselves, without an agent on the way (docs/decisions/0035).

use libbpf_rs::{MapCore, MapHandle};
use margay_core::Role;
use margay_core::entry::{Grant, Survey};
use margay_wire::FlowId;

use super::layout::{self, grant, offer, spare, wire_key};
use super::plain::Plain;
use super::{CacheError, KernelCache, WireFlow, WireState, get, put};

impl KernelCache {
    /// Lets flows be opened by a grant.
    ///
    /// # Errors
    ///
    /// Full, or its port is another grant's. Connections are set up by the agent then.
    pub fn install_grant(&self, granted: &Grant) -> Result<(), CacheError> {
        let maps = &self.loaded.maps;
        match granted.role {
            Role::Initiator => {
                let id = granted.id.0.to_ne_bytes();
                put(&maps.spares, &id, layout::spare_of(granted).bytes(), "grants of peers")?;
                if let Err(error) = offer_grant(&maps.offers, granted) {
                    // It was put there just now.
                    let _ = maps.spares.delete(&id);
                    return Err(error);
                }
            }
            Role::Responder => {
                let key = layout::grant_key_of(granted);
                if get::<grant>(&maps.grants, key.bytes()).is_some() {
                    return Err(CacheError::Taken);
                }
                put(&maps.grants, key.bytes(), layout::grant_of(granted).bytes(), "grants to peers")?;
            }
        }
        self.grants.lock().insert(granted.id, *granted);
        Ok(())
    }

    /// Forgets an entry that [`entries`](Self::entries) has listed. Unlike [`remove`](Self::remove) also one of which
    /// nobody here was told: the kernel opens flows by grants while an agent takes over.
    pub fn remove_listed(&self, state: &WireState) {
        let mut index = self.index.lock();
        index.remove(&state.flow);
        if let Some((key, entry)) = self.entry_at(&layout::wire_key_of_state(state), state.flow) {
            self.delete(&key, &entry.app);
        }
    }

    /// No flow is opened by a grant any more; those that were are as they are.
    /// What the agent has not been told of is still found by what the kernel keeps.
    pub fn stop_grant(&self, id: FlowId) {
        if let Some(granted) = self.grants.lock().get(&id) {
            self.close(granted);
        }
    }

    fn close(&self, granted: &Grant) {
        let maps = &self.loaded.maps;
        match granted.role {
            Role::Initiator => withdraw_grant(&maps.offers, granted),
            Role::Responder => {
                let key = layout::grant_key_of(granted);
                if let Some(found) = get::<grant>(&maps.grants, key.bytes())
                    && let Err(error) =
                        put(&maps.grants, key.bytes(), grant { until_ns: 0, key: [0; 2], ..found }.bytes(), "grants")
                {
                    tracing::warn!(%error, "peers may open flows by a grant that is over");
                }
            }
        }
    }

    fn forget_grant(&self, granted: &Grant) {
        let maps = &self.loaded.maps;
        // Absent only where somebody has emptied the maps.
        let _ = match granted.role {
            Role::Initiator => maps.spares.delete(&granted.id.0.to_ne_bytes()),
            Role::Responder => maps.grants.delete(layout::grant_key_of(granted).bytes()),
        };
    }

    /// Grants of the agent before. Nothing is opened by them any more, and they are to be removed when what was opened
    /// has been seen to.
    pub fn kept_grants(&self) -> Vec<Grant> {
        self.grants.lock().values().copied().collect()
    }

    /// Finds what the agent before has left.
    pub(super) fn keep_grants(&self) {
        let maps = &self.loaded.maps;
        empty(&maps.offers);
        let spares = maps.spares.keys().filter_map(|key| get::<spare>(&maps.spares, &key));
        let given = maps.grants.keys().filter_map(|key| {
            let found = get::<grant>(&maps.grants, &key)?;
            Some(layout::kept_grant(&wire_key::read(&key)?, &found))
        });
        let kept: Vec<Grant> = spares.map(|kept| layout::kept_spare(&kept)).chain(given).collect();
        kept.iter().for_each(|granted| self.close(granted));
        *self.grants.lock() = kept.into_iter().map(|granted| (granted.id, granted)).collect();
    }

    /// What has become of these of its flows.
    pub fn survey_grant(&self, id: FlowId, these: u128) -> Survey {
        let Some(granted) = self.grants.lock().get(&id).copied() else { return Survey::default() };
        let said = self.loaded.survey_flows(&layout::grant_flows_of(&granted, these));
        said.inspect_err(|error| tracing::warn!(%error, "what was opened by a grant is not known"))
            .map_or_else(|_| Survey::default(), |said| layout::survey_of(&said))
    }

    /// Has the events tell of these of its flows, as far as somebody has answered them.
    pub fn tell_of_flows(&self, id: FlowId, these: u128) {
        if let Some(granted) = self.grants.lock().get(&id)
            && let Err(error) = self.loaded.tell_flows(&layout::grant_flows_of(granted, these))
        {
            tracing::warn!(%error, "the kernel does not tell of what was opened by a grant");
        }
    }

    /// Has the events tell of all that was opened by any grant.
    pub fn tell_of_all(&self) {
        let all: Vec<FlowId> = self.grants.lock().keys().copied().collect();
        all.into_iter().for_each(|id| self.tell_of_flows(id, u128::MAX));
    }

    /// A grant is over. What was opened by it goes, unless somebody has answered it and its flow `is_known`.
    pub fn remove_grant(&self, id: FlowId, is_known: impl Fn(FlowId) -> bool) {
        let Some(granted) = self.grants.lock().remove(&id) else { return };
        self.close(&granted);
        let bit = |number: u16, flow| u128::from(is_known(flow)) << number;
        let known =
            (0..).zip(layout::flows_of(&granted)).fold(0, |known, (number, (flow, _))| known | bit(number, flow));
        if let Err(error) = self.loaded.forget_flows(&layout::grant_flows_of(&granted, known)) {
            tracing::warn!(%error, "flows of a grant that is over stay in the kernel");
        }
        // Only now: if this process ends before, the next one finds the grant, and by it what was opened.
        self.forget_grant(&granted);
        // The agent before may have known others.
        let mut index = self.index.lock();
        for (number, (flow, _)) in (0..).zip(layout::flows_of(&granted)) {
            if known & 1 << number == 0 {
                index.remove(&flow);
            }
        }
    }

    /// Takes note of where the entry of a flow lies that the kernel has opened.
    pub fn note_opened(&self, flow: &WireFlow) {
        self.index.lock().insert(flow.flow, layout::wire_key_of(flow));
    }

    /// Ends every grant.
    pub fn end_grants(&self) {
        let ids: Vec<FlowId> = self.grants.lock().keys().copied().collect();
        for id in ids {
            self.remove_grant(id, |flow| self.index.lock().contains_key(&flow));
        }
        let maps = &self.loaded.maps;
        [&maps.offers, &maps.spares, &maps.grants].into_iter().for_each(empty);
    }
}

/// Lets SYNs to its destination find a grant.
fn offer_grant(offers: &MapHandle, granted: &Grant) -> Result<(), CacheError> {
    let key = layout::offer_key_of(granted.app.destination);
    let mut offered = get::<offer>(offers, key.bytes()).unwrap_or_default();
    let limit = offered.grants.len() as u32;
    let vacant = offered.grants.iter_mut().find(|id| **id == 0);
    *vacant.ok_or(CacheError::Full { what: "grants for one destination", limit })? = granted.id.0;
    put(offers, key.bytes(), offered.bytes(), "destinations of grants")
}

fn withdraw_grant(offers: &MapHandle, granted: &Grant) {
    let key = layout::offer_key_of(granted.app.destination);
    let Some(mut offered) = get::<offer>(offers, key.bytes()) else { return };
    let Some(place) = offered.grants.iter_mut().find(|id| **id == granted.id.0) else { return };
    *place = 0;
    if offered.grants.iter().all(|id| *id == 0) {
        // It was there just now, and the agent alone writes there.
        let _ = offers.delete(key.bytes());
    } else if let Err(error) = put(offers, key.bytes(), offered.bytes(), "destinations of grants") {
        tracing::warn!(%error, "a grant that is over is still looked for");
    }
}

fn empty(map: &MapHandle) {
    for key in map.keys().collect::<Vec<_>>() {
        // Refused only when it is gone already.
        let _ = map.delete(&key);
    }
}

#[cfg(test)]
#[path = "grant_test.rs"]
pub(super) mod test;
