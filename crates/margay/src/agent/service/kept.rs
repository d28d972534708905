//! What was published by order, kept on disk for the next start of the agent.

use margay_control::StateError;
use margay_control::registration::Terms;
use margay_core::name::Name;
use serde::{Deserialize, Serialize};

use super::checks::Checks;
use super::{Listener, Origin, Publication, PublishError, Published, Services};
use crate::agent::health::spec::{HealthSection, LoadSection};

pub(super) const FILE: &str = "services.json";
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    services: Vec<KeptService>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptService {
    name: String,
    weight: u32,
    priority: u32,
    #[serde(default)]
    partition_bits: u8,
    #[serde(default)]
    exclusive: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    fenced: bool,
    #[serde(default)]
    sticky: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    give_up_after_ms: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quiet_ms: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    health: Option<HealthSection>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    load: Option<LoadSection>,
    listeners: Vec<Listener>,
}

impl Services {
    pub(super) fn kept(&self) -> Result<Vec<Publication>, PublishError> {
        let Some(text) = self.dir.read(FILE)? else { return Ok(Vec::new()) };
        let damaged = |what: String| {
            let what = format!("{what}; remove the file, and publish the services again");
            PublishError::State(StateError::Damaged { path: self.dir.join(FILE), what })
        };
        let kept: Kept = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        if kept.version != VERSION {
            return Err(damaged(format!("it has version {}, this program reads {VERSION}", kept.version)));
        }
        let mut publications = Vec::new();
        for service in kept.services {
            let name: Name = service.name.parse().map_err(|error| damaged(format!("{}: {error}", service.name)))?;
            let KeptService { weight, priority, partition_bits, exclusive, fenced, sticky, .. } = service;
            let KeptService { give_up_after_ms, quiet_ms, listeners, health, load, .. } = service;
            let checks = Checks { health, load };
            let terms =
                Terms { weight, priority, partition_bits, exclusive, fenced, sticky, give_up_after_ms, quiet_ms };
            publications.extend(listeners.into_iter().map(|listener| Publication {
                name: name.clone(),
                listener,
                terms,
                checks: checks.clone(),
            }));
        }
        Ok(publications)
    }

    pub(super) fn keep(&self) -> Result<(), PublishError> {
        let kept_of = |service: &Published| self.kept_of(service);
        let services: Vec<KeptService> = self.published.lock().iter().map(kept_of).collect();
        let services = services.into_iter().filter(|service| !service.listeners.is_empty()).collect();
        let kept = Kept { version: VERSION, services };
        // Plain data: it always has a JSON form.
        let text = serde_json::to_vec_pretty(&kept).unwrap_or_default();
        Ok(self.dir.write(FILE, &text)?)
    }

    fn kept_of(&self, service: &Published) -> KeptService {
        let Checks { health, load } = self.checks_of(&service.name);
        KeptService {
            name: service.name.written().to_owned(),
            weight: service.terms.weight,
            priority: service.terms.priority,
            partition_bits: service.terms.partition_bits,
            exclusive: service.terms.exclusive,
            fenced: service.terms.fenced,
            sticky: service.terms.sticky,
            give_up_after_ms: service.terms.give_up_after_ms,
            quiet_ms: service.terms.quiet_ms,
            health,
            load,
            listeners: service.listeners.iter().filter(|listener| listener.origin == Origin::Order).cloned().collect(),
        }
    }
}
