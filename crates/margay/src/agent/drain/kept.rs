//! The drains, as they are kept for the next start of the agent.

use std::sync::Arc;
use std::time::Duration;

use margay_control::{Clock, StateDir, StateError};
use margay_core::name::Name;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{Drain, Drains, Order, When};

const FILE: &str = "drains.json";
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    drains: Vec<KeptDrain>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptDrain {
    /// None: all of the host.
    name: Option<String>,
    /// When flows that are left are reset.
    deadline_unix_s: u64,
    /// What the order says of flows that are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    when: Option<When>,
    /// Host-IDs of the hosts that programs give their connections to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    to: Vec<String>,
    /// No flows were left.
    is_over: bool,
}

impl KeptDrain {
    fn of(drain: &Drain) -> Self {
        Self {
            name: drain.name.as_ref().map(|name| name.written().to_owned()),
            deadline_unix_s: drain.deadline_unix_s,
            when: drain.when,
            to: drain.to.clone(),
            is_over: drain.is_over(),
        }
    }
}

impl Drains {
    /// Those of the start before.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or is damaged.
    pub fn open(dir: StateDir, clock: &Clock) -> Result<Self, StateError> {
        let damaged = |what: String| {
            let what = format!("{what}; remove the file, and drain again what is to be drained");
            StateError::Damaged { path: dir.join(FILE), what }
        };
        let mut all = Vec::new();
        if let Some(text) = dir.read(FILE)? {
            let kept: Kept = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
            if kept.version != VERSION {
                return Err(damaged(format!("it has version {}, this program reads {VERSION}", kept.version)));
            }
            for KeptDrain { name, deadline_unix_s, when, to, is_over } in kept.drains {
                let name = name.map(|name| name.parse::<Name>().map_err(|error| damaged(format!("{name}: {error}"))));
                let left = Duration::from_secs(deadline_unix_s.saturating_sub(clock.unix_s()));
                let deadline = left.min(super::DEADLINE_MAX);
                let order = Order { name: name.transpose()?, deadline, when, to, is_last_drained: true, is_kept: true };
                let drain = Drain::new(order, clock);
                if is_over {
                    drain.set_phase("over");
                }
                all.push(Arc::new(drain));
            }
        }
        Ok(Self { dir, all: Mutex::new(all) })
    }

    pub(super) fn keep(&self, all: &[Arc<Drain>]) -> Result<(), StateError> {
        let drains = all.iter().filter(|drain| drain.is_kept).map(|drain| KeptDrain::of(drain)).collect();
        // Plain data: it always has a JSON form.
        let text = serde_json::to_vec_pretty(&Kept { version: VERSION, drains }).unwrap_or_default();
        self.dir.write(FILE, &text)
    }
}

#[cfg(test)]
mod test {
    use super::super::{DrainError, written};
    use super::*;

    fn drain(name: Option<&str>) -> Arc<Drain> {
        let name: Option<Name> = name.map(|name| name.parse().expect("a name"));
        let when = name.as_ref().map(|_| When::Quiet { quiet_ms: 50 });
        let deadline = Duration::from_secs(60);
        let to = name.iter().map(|_| "00ff".to_owned()).collect();
        let order = Order { name, deadline, when, to, is_last_drained: true, is_kept: true };
        Arc::new(Drain::new(order, &Clock::from_fn(|| 1000)))
    }

    #[test]
    fn drains_outlive_a_restart_and_end_by_order_alone() {
        let state = tempfile::tempdir().expect("a directory");
        let dir = || StateDir::open(state.path()).expect("opened");
        let open = |unix_s: u64| Drains::open(dir(), &Clock::from_fn(move || unix_s)).expect("read");
        let drains = open(1000);
        assert!(drains.drained() == Default::default() && drains.warnings().is_empty());
        let one = drain(Some("web.shop"));
        drains.add(&one).expect("kept");
        drains.add(&drain(Some("adm.shop"))).expect("kept");
        assert!(matches!(drains.add(&drain(Some("web.shop"))), Err(DrainError::Already(..))));
        drains.note_over(&one);
        drop(drains);
        let again = open(1020);
        let states: Vec<(String, bool, u64)> = again
            .all
            .lock()
            .iter()
            .map(|drain| (written(drain.name.as_ref()), drain.is_over(), drain.deadline_unix_s))
            .collect();
        assert_eq!(states, [("web.shop".to_owned(), true, 1060), ("adm.shop".to_owned(), false, 1060)]);
        assert!(again.all.lock().iter().all(|drain| drain.when == Some(When::Quiet { quiet_ms: 50 })));
        assert!(again.all.lock().iter().all(|drain| drain.to == ["00ff"]));
        assert_eq!(again.drained().names.len(), 2);
        let name: Name = "web.shop".parse().expect("a name");
        again.remove(Some(&name)).expect("it is drained");
        assert!(matches!(again.remove(Some(&name)), Err(DrainError::NotDrained(_))));
        again.add(&drain(None)).expect("the host, too");
        assert!(matches!(again.add(&drain(Some("web.shop"))), Err(DrainError::OfHost)));
        assert!(again.drained().has(&name.prefix()), "with the host");
        assert_eq!(open(1030).warnings().len(), 2);
        again.remove(None).expect("it is drained");
        assert!(!open(1040).drained().has(&name.prefix()));
    }

    #[test]
    fn a_damaged_file_says_what_to_do() {
        let state = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(state.path()).expect("opened");
        for text in ["{", r#"{"version":2,"drains":[]}"#, r#"{"version":1,"drains":[{"name":"a b"}]}"#] {
            dir.write(FILE, text.as_bytes()).expect("written");
            let error = Drains::open(dir.clone(), &Clock::system()).err().expect("damaged").to_string();
            assert!(error.contains("remove the file"), "{error}");
        }
    }
}
