//! Which routers first packets go to: those that are heard. A host of a cluster registers with every router of it; when
//! one is lost, its rules go at once, and no other host, router or store has to be asked about it.

use std::net::SocketAddr;
use std::sync::Arc;

use margay_core::key::HostId;
use margay_core::name::{Prefix, ServiceId};
use margay_core::table::{Action, NextHop, Rule, RuleId};
use parking_lot::Mutex;
use tokio::time::{Duration, Instant};

use crate::SalControl;

/// Of rules that lead to a router: before the one that asks the network segment.
const ROUTER_PRIORITY: u32 = 1;
/// A router that has just come back may not know yet who else is there: while another one has been heard for longer, it
/// is not asked. By then every host that lost it has tried again, twice.
const PROBATION: Duration = Duration::from_secs(10);
/// Routers that were first heard within this time know equally much.
const TOGETHER: Duration = Duration::from_secs(1);

/// A router, for one authority.
struct Way {
    authority: String,
    router: HostId,
    address: SocketAddr,
    /// Since when it is heard; `None`: it is not.
    heard: Option<Instant>,
    /// It is heard, and wants to be asked no more.
    is_leaving: bool,
    rules: Vec<RuleId>,
    sal: Arc<dyn SalControl>,
}

impl Way {
    fn is(&self, authority: &str, router: HostId) -> bool {
        self.authority == authority && self.router == router
    }

    /// First packets of this authority's names, and of all others that are not known here, go to the router.
    fn open(&mut self) {
        let hop = NextHop { address: self.address, host: Some(self.router), router: true };
        let rule = Rule { priority: ROUTER_PRIORITY, weight: 1, action: Action::Forward(hop) };
        let everything = Prefix::new(ServiceId([0; 32]), 0);
        for prefix in [Prefix::of_authority(&self.authority), everything] {
            match self.sal.add_rule(prefix, rule.clone()) {
                Ok(rule) => self.rules.push(rule),
                Err(error) => tracing::error!(%error, "no rule leads to the router"),
            }
        }
    }

    /// Since when it is heard, and may be asked.
    fn asked_since(&self) -> Option<Instant> {
        self.heard.filter(|_| !self.is_leaving)
    }

    fn close(&mut self) {
        for rule in self.rules.drain(..) {
            self.sal.remove_rule(rule);
        }
    }
}

/// The routers of a host.
#[derive(Default)]
pub struct Ways(Mutex<Vec<Way>>);

impl Ways {
    /// A router has welcomed this host.
    pub(super) fn heard(&self, authority: &str, router: HostId, address: SocketAddr, sal: &Arc<dyn SalControl>) {
        let mut ways = self.0.lock();
        match ways.iter_mut().find(|way| way.is(authority, router)) {
            Some(way) => {
                way.heard = Some(Instant::now());
                if way.address != address && !way.rules.is_empty() {
                    let former = std::mem::take(&mut way.rules);
                    way.address = address;
                    way.open();
                    for rule in former {
                        sal.remove_rule(rule);
                    }
                }
                way.address = address;
            }
            None => ways.push(Way {
                authority: authority.to_owned(),
                router,
                address,
                heard: Some(Instant::now()),
                is_leaving: false,
                rules: Vec::new(),
                sal: Arc::clone(sal),
            }),
        }
        settle(&mut ways);
    }

    /// A router is heard no more. Where it is the only one, its rules stay: it may come back at any moment, and nobody
    /// else can help.
    pub(super) fn lost(&self, authority: &str, router: HostId) {
        let mut ways = self.0.lock();
        ways.iter_mut().filter(|way| way.is(authority, router)).for_each(|way| way.heard = None);
        settle(&mut ways);
    }

    /// A router says whether it is to be asked. Gives whether it has said otherwise before.
    pub(super) fn leaves(&self, authority: &str, router: HostId, is_leaving: bool) -> bool {
        let mut ways = self.0.lock();
        let known = ways.iter_mut().find(|way| way.is(authority, router) && way.is_leaving != is_leaving);
        let Some(way) = known else { return false };
        way.is_leaving = is_leaving;
        // Hosts that this one shares flows with shall look for it elsewhere, too.
        way.sal.set_leaving(router, is_leaving);
        settle(&mut ways);
        true
    }

    /// This host registers there no more.
    pub(super) fn left(&self, authority: &str, router: HostId) {
        let mut ways = self.0.lock();
        for way in ways.iter_mut().filter(|way| way.is(authority, router)) {
            way.close();
            way.sal.set_leaving(router, false);
        }
        ways.retain(|way| !way.is(authority, router));
        settle(&mut ways);
    }

    /// Time has passed.
    pub(super) fn look(&self) {
        settle(&mut self.0.lock());
    }
}

/// Rules lead, of each authority, to the router that has been heard for longest, and to those that have been for long
/// enough; where none is heard, to where they did. New rules are there before old ones go.
fn settle(ways: &mut [Way]) {
    let now = Instant::now();
    let first_of =
        |authority: &str| ways.iter().filter(|way| way.authority == authority).filter_map(Way::asked_since).min();
    let is_wanted = |way: &Way| match (way.asked_since(), first_of(&way.authority)) {
        (Some(since), Some(first)) => now - since >= PROBATION || since - first <= TOGETHER,
        (None, Some(_)) => false,
        (_, None) => !way.rules.is_empty(),
    };
    let wanted: Vec<bool> = ways.iter().map(is_wanted).collect();
    for (way, _) in ways.iter_mut().zip(&wanted).filter(|(way, wanted)| **wanted && way.rules.is_empty()) {
        way.open();
    }
    for (way, _) in ways.iter_mut().zip(&wanted).filter(|(_, wanted)| !**wanted) {
        way.close();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::super::test::Recorder;
    use super::*;

    fn router(n: u8) -> (HostId, SocketAddr) {
        (HostId([n; 16]), SocketAddr::from(([10, 0, 0, n], 54_324)))
    }

    /// Where first packets of an authority go.
    fn open(core: &Recorder, authority: &str) -> BTreeSet<u8> {
        let rules = core.rules_of(&Prefix::of_authority(authority));
        let of = |rule: Rule| match rule.action {
            Action::Forward(hop) => hop.host.expect("known").0[0],
            other => panic!("{other:?}"),
        };
        rules.into_iter().map(of).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn first_packets_go_to_routers_that_are_heard_and_there_is_always_a_rule() {
        let core = Arc::new(Recorder::default());
        let sal = Arc::clone(&core) as Arc<dyn SalControl>;
        let ways = Ways::default();
        let heard = |n| ways.heard("shop", router(n).0, router(n).1, &sal);
        let lost = |n| ways.lost("shop", router(n).0);
        heard(1);
        heard(2);
        ways.heard("other", router(9).0, router(9).1, &sal);
        assert_eq!(open(&core, "shop"), BTreeSet::from([1, 2]));
        tokio::time::advance(PROBATION).await;
        lost(1);
        assert_eq!(open(&core, "shop"), BTreeSet::from([2]));
        heard(1);
        assert_eq!(open(&core, "shop"), BTreeSet::from([2]), "the one that has come back knows little");
        lost(2);
        assert_eq!(open(&core, "shop"), BTreeSet::from([1]), "and is better than none");
        tokio::time::advance(TOGETHER * 2).await;
        heard(2);
        assert_eq!(open(&core, "shop"), BTreeSet::from([1]), "nor does this one, yet");
        tokio::time::advance(PROBATION).await;
        ways.look();
        assert_eq!(open(&core, "shop"), BTreeSet::from([1, 2]));
        lost(1);
        lost(2);
        assert_eq!(open(&core, "shop"), BTreeSet::from([2]), "the last one may come back");
        assert_eq!(open(&core, "other"), BTreeSet::from([9]));
        ways.left("shop", router(2).0);
        assert!(open(&core, "shop").is_empty());
        let fewest = core.fewest.lock()[&Prefix::of_authority("shop")];
        assert_eq!(fewest, 0, "only in the end");
    }

    #[tokio::test(start_paused = true)]
    async fn a_router_that_leaves_is_asked_only_where_there_is_no_other() {
        let core = Arc::new(Recorder::default());
        let sal = Arc::clone(&core) as Arc<dyn SalControl>;
        let ways = Ways::default();
        let heard = |n| ways.heard("shop", router(n).0, router(n).1, &sal);
        let leaves = |n, is_leaving| ways.leaves("shop", router(n).0, is_leaving);
        heard(1);
        assert!(leaves(1, true), "it is news");
        assert!(!leaves(1, true));
        assert_eq!(open(&core, "shop"), BTreeSet::from([1]), "it forwards all the same");
        heard(2);
        assert_eq!(open(&core, "shop"), BTreeSet::from([2]));
        heard(1);
        assert_eq!(open(&core, "shop"), BTreeSet::from([2]), "a new stream changes nothing of that");
        assert_eq!(*core.leaving.lock(), BTreeMap::from([(router(1).0, true)]));
        assert!(leaves(1, false));
        assert_eq!(*core.leaving.lock(), BTreeMap::from([(router(1).0, false)]));
        assert_eq!(open(&core, "shop"), BTreeSet::from([1, 2]));
        assert!(leaves(1, true) && leaves(2, true));
        assert!(!open(&core, "shop").is_empty(), "there is always a rule");
        assert!(!leaves(9, true), "it is not known");
    }

    #[tokio::test(start_paused = true)]
    async fn a_router_that_is_elsewhere_now_has_its_new_rules_before_the_old_ones_go() {
        let core = Arc::new(Recorder::default());
        let sal = Arc::clone(&core) as Arc<dyn SalControl>;
        let ways = Ways::default();
        ways.heard("shop", router(1).0, router(1).1, &sal);
        ways.heard("shop", router(1).0, router(2).1, &sal);
        let rules = core.rules_of(&Prefix::of_authority("shop"));
        assert!(matches!(&rules[..], [Rule { action: Action::Forward(hop), .. }] if hop.address == router(2).1));
        assert_eq!(core.fewest.lock()[&Prefix::of_authority("shop")], 1);
    }
}
