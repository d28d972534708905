//! Names that are sick, kept for the next start of the agent.

use margay_control::{StateDir, StateError};
use margay_core::name::Name;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::{Counts, Health, WasSick};
use crate::agent::service::fitness::Sick;

const FILE: &str = "health.json";
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    sick: Vec<KeptSick>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptSick {
    name: String,
    since_unix_s: u64,
    reason: String,
}

impl Health {
    /// What the start before has found.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or is damaged.
    pub fn open(dir: StateDir) -> Result<Self, StateError> {
        let damaged = |what: String| {
            let what = format!("{what}; remove the file, and sick services are found out again");
            StateError::Damaged { path: dir.join(FILE), what }
        };
        let mut restored = WasSick::new();
        if let Some(text) = dir.read(FILE)? {
            let kept: Kept = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
            if kept.version != VERSION {
                return Err(damaged(format!("it has version {}, this program reads {VERSION}", kept.version)));
            }
            for KeptSick { name, since_unix_s, reason } in kept.sick {
                let name: Name = name.parse().map_err(|error| damaged(format!("{name}: {error}")))?;
                restored.insert(name.prefix(), (name, Some(Sick { since_unix_s, reason })));
            }
        }
        Ok(Self {
            dir,
            all: Mutex::default(),
            reports: Mutex::default(),
            restored: Mutex::new(restored),
            again: Notify::new(),
            counts: Counts::default(),
        })
    }

    /// Keeps which names are sick now. Where that fails, the next start takes them for well until their checks fail.
    pub(super) fn keep(&self) {
        // Until it is written: nobody writes an older state later.
        let all = self.all.lock();
        let sick_of = |running: &super::Running| {
            let Sick { since_unix_s, reason } = running.watched.sick()?;
            Some(KeptSick { name: running.watched.name.written().to_owned(), since_unix_s, reason })
        };
        let kept = Kept { version: VERSION, sick: all.values().filter_map(sick_of).collect() };
        // Plain data: it always has a JSON form.
        let text = serde_json::to_vec_pretty(&kept).unwrap_or_default();
        if let Err(error) = self.dir.write(FILE, &text) {
            tracing::warn!(%error, "which services are sick is not kept");
        }
    }
}

#[cfg(test)]
mod test {
    use std::sync::Arc;

    use super::super::{Running, Watched};
    use super::*;
    use crate::agent::health::spec::HealthSection;
    use crate::agent::service::checks::Checks;
    use crate::agent::service::fitness::Fitness;

    #[test]
    fn what_is_sick_is_so_at_the_next_start_and_what_is_damaged_is_refused() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("state")).expect("made");
        let health = Health::open(dir.clone()).expect("nothing is kept");
        let section: HealthSection = toml::from_str("connect = true").expect("read");
        let checks = Checks { health: Some(section), load: None };
        let sick = Sick { since_unix_s: 7, reason: "it was refused".to_owned() };
        for (text, was_sick) in [("web.shop", Some(sick.clone())), ("db.shop", None)] {
            let name: Name = text.parse().expect("a name");
            let watched = Arc::new(Watched::new(&name, &checks, was_sick));
            health.all.lock().insert(name.prefix(), Running { watched, task: None });
        }
        health.keep();
        let web: Name = "web.shop".parse().expect("a name");
        let restored = Health::open(dir.clone()).expect("read").restored();
        assert_eq!(
            restored.into_iter().collect::<Vec<_>>(),
            [(web.prefix(), Fitness { sick: Some(sick), percent: 100 })]
        );

        dir.write(FILE, b"{}").expect("written");
        assert!(Health::open(dir).is_err());
    }
}
