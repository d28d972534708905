//! Names whose connections move by themselves: `rebalance = "auto"` in `[[service]]`. Something has to have happened
//! first: an instance has come, or an operator has given one another weight. What programs do, checks find, or load
//! changes begins nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use margay_control::registration::Watcher;
use margay_core::key::HostId;
use margay_core::name::{Name, Prefix};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::census::{self, Seen};
use super::plan::is_uneven;
use super::{Question, obstacle};
use crate::agent::Agent;
use crate::agent::spread::{homes_of, instances_under, whole};
use crate::config::{Config, Rebalance};

/// From one look at what routers say to the next, and at counts where something has happened.
const TICK: Duration = Duration::from_secs(1);
/// Shares that differ for so long are no passing matter.
const UNEVEN_FOR: Duration = Duration::from_secs(5);
/// Counts are asked for so often in any case: a program may take over its name later than it is listed.
const LOOK_MAX: Duration = Duration::from_secs(30);

/// The weight that operators have given each instance that is not drained.
type Picture = BTreeMap<HostId, u32>;

/// What follows from a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Nothing.
    Rest,
    /// To look again soon.
    Look,
    /// Connections are to move.
    Begin,
}

/// What is known of one name.
#[derive(Debug, Default)]
struct Watch {
    /// The hosts that routers list, with their weights.
    listed: Vec<(HostId, u32)>,
    /// The picture in which shares were even, or nothing more could move.
    settled: Option<Picture>,
    uneven_since: Option<Instant>,
    /// None: nothing was looked at yet.
    looked: Option<Instant>,
    looks_again: bool,
    has_begun: bool,
}

impl Watch {
    /// Whether to look at counts now, as routers list these hosts.
    fn is_due(&mut self, listed: Vec<(HostId, u32)>, now: Instant) -> bool {
        let is_news = self.listed != listed;
        self.listed = listed;
        // Who has left and comes again is new.
        if let Some(settled) = &mut self.settled {
            let hosts: BTreeSet<HostId> = self.listed.iter().map(|(host, _)| *host).collect();
            settled.retain(|host, _| hosts.contains(host));
        }
        is_news || self.looks_again || self.looked.is_none_or(|looked| now - looked >= LOOK_MAX)
    }

    /// What follows from counts. `growing`: an instance has not all of its weight yet.
    fn judge(&mut self, seen: &[Seen], now: Instant) -> Verdict {
        self.looked = Some(now);
        let is_drained = |one: &&Seen| one.counted.as_ref().is_ok_and(|counted| counted.drained);
        let drained: BTreeSet<HostId> = seen.iter().filter(is_drained).map(|one| one.instance.host).collect();
        if let Some(settled) = &mut self.settled {
            settled.retain(|host, _| !drained.contains(host));
        }
        let picture = picture(seen);
        let is_known = |settled: &Picture| picture.iter().all(|(host, weight)| settled.get(host) == Some(weight));
        let verdict = if self.settled.as_ref().is_some_and(is_known) {
            Verdict::Rest
        } else if is_uneven(&census::shares(seen)) {
            let since = *self.uneven_since.get_or_insert(now);
            if now - since >= UNEVEN_FOR { Verdict::Begin } else { Verdict::Look }
        } else if seen.iter().any(|one| one.counted.as_ref().is_ok_and(|counted| counted.growing)) {
            self.uneven_since = None;
            Verdict::Look
        } else {
            self.settled = Some(picture);
            Verdict::Rest
        };
        if verdict == Verdict::Rest {
            self.uneven_since = None;
        }
        self.looks_again = verdict != Verdict::Rest;
        verdict
    }

    /// What has begun is over: what could move has moved.
    fn settle(&mut self, seen: &[Seen]) {
        self.has_begun = false;
        self.looks_again = false;
        self.uneven_since = None;
        self.settled = Some(picture(seen));
    }
}

fn picture(seen: &[Seen]) -> Picture {
    let weight = |one: &Seen| {
        let counted = one.counted.as_ref().ok().filter(|counted| !counted.drained)?;
        Some((one.instance.host, counted.weight))
    };
    seen.iter().filter_map(weight).collect()
}

/// Names of the configuration whose connections move by themselves.
fn wanted(config: &Config) -> BTreeMap<Prefix, Name> {
    let sections = config.service.iter().map(toml::Spanned::get_ref);
    let auto = sections.filter(|section| section.rebalance == Rebalance::Auto);
    auto.map(|section| (section.name.0.prefix(), section.name.0.clone())).collect()
}

/// Goes on until it is aborted.
pub async fn run(agent: Arc<Agent>) {
    let mut watches: BTreeMap<Prefix, (Name, Watch)> = BTreeMap::new();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let wanted = wanted(&agent.config());
        watches.retain(|prefix, (name, _)| {
            let stays = wanted.contains_key(prefix);
            if !stays {
                let service = name.service_id();
                homes_of(&agent, &service).iter().for_each(|home| home.end_watch(whole(&service), Watcher::Rebalances));
            }
            stays
        });
        for (prefix, name) in wanted {
            let (name, watch) = watches.entry(prefix).or_insert_with(|| (name, Watch::default()));
            follow(&agent, name, watch).await;
        }
    }
}

async fn follow(agent: &Arc<Agent>, name: &Name, watch: &mut Watch) {
    let service = name.service_id();
    let whole = whole(&service);
    // Also of those that are watched: a router may have come since.
    homes_of(agent, &service).iter().for_each(|home| home.watch(whole, Watcher::Rebalances));
    let takes_part = |published: &crate::agent::service::Published| {
        published.is_served && published.weight() > 0 && obstacle(published).is_none()
    };
    if !agent.publishing.services.find(name).is_some_and(|published| takes_part(&published)) {
        return;
    }
    if agent.connections.rebalances.run(&name.prefix()).is_some_and(|run| !run.is_over()) {
        return;
    }
    let Some(listed) = instances_under(agent, &service, &whole) else { return };
    let listed = listed.into_iter().filter(|instance| instance.prefix.contains(&service));
    let is_due = watch.is_due(listed.map(|instance| (instance.host, instance.weight)).collect(), Instant::now());
    if !is_due && !watch.has_begun {
        return;
    }
    match census::take(agent, name, |_, _| Question::default()).await {
        Ok(seen) if watch.has_begun => watch.settle(&seen),
        Ok(seen) => {
            if watch.judge(&seen, Instant::now()) == Verdict::Begin {
                watch.has_begun = true;
                agent.connections.rebalances.begin(agent, name);
            }
        }
        Err(why) => tracing::debug!(%name, why, "what instances have is not known"),
    }
}

#[cfg(test)]
mod test {
    use std::net::SocketAddr;
    use std::path::Path;

    use margay_control::registration::Instance;
    use margay_control::relocation::proto::Counted;

    use super::*;

    fn seen(n: u8, flows: u64) -> Seen {
        let instance = Instance {
            host: HostId([n; 16]),
            host_name: format!("host{n}"),
            address: SocketAddr::from(([10, 0, 0, n], 54324)),
            name: "web.shop".to_owned(),
            prefix: "sid:ab/8".parse().expect("literal"),
            weight: 100,
            priority: 1,
            sticky: false,
            fence: None,
            zero_weight: None,
        };
        let counted = Counted { flows, weight: 100, ..Counted::default() };
        Seen { instance, takes_part: true, counted: Ok(counted) }
    }

    fn with(mut seen: Seen, change: impl FnOnce(&mut Counted)) -> Seen {
        change(seen.counted.as_mut().expect("counted"));
        seen
    }

    /// Looks once a second, and gives what follows each time.
    fn verdicts(watch: &mut Watch, seen: &[Seen], begun: Instant, from_s: u64, count: u64) -> Vec<Verdict> {
        (from_s..from_s + count).map(|at_s| watch.judge(seen, begun + Duration::from_secs(at_s))).collect()
    }

    #[test]
    fn what_has_come_and_differs_for_long_begins() {
        use Verdict::{Begin, Look, Rest};
        let begun = Instant::now();
        let mut watch = Watch::default();
        let two = [seen(1, 150), seen(2, 150)];
        assert_eq!(verdicts(&mut watch, &two, begun, 0, 1), [Rest]);
        let three = [seen(1, 150), seen(2, 150), seen(3, 0)];
        assert_eq!(verdicts(&mut watch, &three, begun, 1, 6), [Look, Look, Look, Look, Look, Begin]);
        watch.settle(&three);
        assert_eq!(verdicts(&mut watch, &three, begun, 7, 1), [Rest], "what could not move stays");
    }

    #[test]
    fn a_difference_that_passes_begins_nothing() {
        use Verdict::{Look, Rest};
        let begun = Instant::now();
        let mut watch = Watch::default();
        assert_eq!(verdicts(&mut watch, &[seen(1, 150), seen(2, 0)], begun, 0, 4), [Look; 4]);
        assert_eq!(verdicts(&mut watch, &[seen(1, 80), seen(2, 75)], begun, 4, 1), [Rest]);
        assert_eq!(
            verdicts(&mut watch, &[seen(1, 200), seen(2, 20)], begun, 5, 9),
            [Rest; 9],
            "clients have done that"
        );
    }

    #[test]
    fn weights_of_operators_count_and_those_of_checks_and_load_do_not() {
        use Verdict::{Look, Rest};
        let begun = Instant::now();
        let mut watch = Watch::default();
        assert_eq!(verdicts(&mut watch, &[seen(1, 50), seen(2, 50)], begun, 0, 1), [Rest]);
        let mut loaded = seen(2, 50);
        loaded.instance.weight = 10;
        assert_eq!(verdicts(&mut watch, &[seen(1, 50), loaded.clone()], begun, 1, 9), [Rest; 9], "it has much to do");
        loaded.takes_part = false;
        assert_eq!(verdicts(&mut watch, &[seen(1, 50), loaded], begun, 10, 9), [Rest; 9], "it is sick");
        let mut heavy = with(seen(2, 50), |counted| counted.weight = 300);
        heavy.instance.weight = 300;
        assert_eq!(verdicts(&mut watch, &[seen(1, 50), heavy], begun, 20, 1), [Look]);
    }

    #[test]
    fn who_was_drained_or_away_is_new_and_a_weight_that_grows_is_waited_for() {
        use Verdict::{Look, Rest};
        let begun = Instant::now();
        let mut watch = Watch::default();
        assert_eq!(verdicts(&mut watch, &[seen(1, 50), seen(2, 50)], begun, 0, 1), [Rest]);
        let mut drained = with(seen(2, 0), |counted| counted.drained = true);
        drained.takes_part = false;
        assert_eq!(verdicts(&mut watch, &[seen(1, 100), drained], begun, 1, 1), [Rest]);
        assert_eq!(verdicts(&mut watch, &[seen(1, 100), seen(2, 0)], begun, 2, 1), [Look], "it is back");
        let growing = with(seen(2, 98), |counted| counted.growing = true);
        assert_eq!(verdicts(&mut watch, &[seen(1, 100), growing], begun, 3, 2), [Look; 2]);
        assert_eq!(verdicts(&mut watch, &[seen(1, 100), seen(2, 98)], begun, 5, 1), [Rest]);
        let host = |n: u8| (HostId([n; 16]), 100);
        assert!(watch.is_due(vec![host(1)], begun) && watch.is_due(vec![host(1), host(2)], begun));
        assert_eq!(verdicts(&mut watch, &[seen(1, 100), seen(2, 0)], begun, 6, 1), [Look], "it was away");
    }

    #[test]
    fn counts_are_looked_at_upon_news_and_now_and_then() {
        let begun = Instant::now();
        let mut watch = Watch::default();
        let listed = vec![(HostId([1; 16]), 100)];
        assert!(watch.is_due(listed.clone(), begun));
        watch.judge(&[seen(1, 5)], begun);
        assert!(!watch.is_due(listed.clone(), begun + TICK));
        assert!(watch.is_due(listed, begun + LOOK_MAX));
    }

    #[test]
    fn a_section_says_so() {
        let text = "[[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\"\nrebalance = \"auto\"\n\
            [[service]]\nname = \"db.shop\"\nlisten = \"0.0.0.0:5432\"\n";
        let found = wanted(&Config::parse(text, Path::new("margay.toml")).expect("read"));
        assert_eq!(found.values().map(ToString::to_string).collect::<Vec<_>>(), ["web.shop"]);
    }
}
