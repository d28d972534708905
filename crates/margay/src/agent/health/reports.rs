//! Load as the programs that serve a name report it themselves (`docs/book/programming.md`).

use std::collections::BTreeMap;

use margay_core::name::{Name, Prefix};

/// Names that one program reports the load of.
pub const NAMES_OF_REPORTER_MAX: usize = 64;

/// A program that reports, by its connection to the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reporter(u64);

/// What programs say of a name: how much of its weight is to stay, in percent.
struct Reported {
    name: Name,
    percents: BTreeMap<Reporter, u32>,
}

/// What all programs say. Each has said it once for each name, and may say it again.
#[derive(Default)]
pub struct Reports {
    names: BTreeMap<Prefix, Reported>,
    reporters: u64,
}

impl Reports {
    /// One more program.
    pub fn add(&mut self) -> Reporter {
        self.reporters += 1;
        Reporter(self.reporters)
    }

    /// Takes a report, in place of the one before of the same program and name. False: the program reports of
    /// [`NAMES_OF_REPORTER_MAX`] other names already.
    pub fn note(&mut self, reporter: Reporter, name: &Name, percent: u32) -> bool {
        let prefix = name.prefix();
        let others = self.names.iter().filter(|(known, of)| **known != prefix && of.percents.contains_key(&reporter));
        if others.count() >= NAMES_OF_REPORTER_MAX {
            return false;
        }
        let new = || Reported { name: name.clone(), percents: BTreeMap::new() };
        self.names.entry(prefix).or_insert_with(new).percents.insert(reporter, percent);
        true
    }

    /// A program is gone. Gives the names of which it has said something.
    pub fn forget(&mut self, reporter: Reporter) -> Vec<Prefix> {
        let of = self.names.iter_mut().filter_map(|(prefix, of)| of.percents.remove(&reporter).map(|_| *prefix));
        let names: Vec<Prefix> = of.collect();
        self.names.retain(|_, of| !of.percents.is_empty());
        names
    }

    /// How much of the weight of a name is to stay: of several programs, the one that has least room says it. `None`:
    /// none says anything.
    pub fn percent(&self, prefix: &Prefix) -> Option<u32> {
        self.names.get(prefix).and_then(|of| of.percents.values().min().copied())
    }

    /// All names of which somebody says something.
    pub fn names(&self) -> impl Iterator<Item = (Prefix, &Name)> {
        self.names.iter().map(|(prefix, of)| (*prefix, &of.name))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn name(text: &str) -> Name {
        text.parse().expect("a name")
    }

    #[test]
    fn the_last_report_of_a_program_holds_until_it_is_gone() {
        let mut reports = Reports::default();
        let one = reports.add();
        let other = reports.add();
        let web = name("web.shop");
        assert_eq!(reports.percent(&web.prefix()), None);
        assert!(reports.note(one, &web, 0) && reports.note(one, &web, 70));
        assert_eq!(reports.percent(&web.prefix()), Some(70));
        assert!(reports.note(other, &web, 40) && reports.note(other, &name("db.shop"), 5));
        assert_eq!(reports.percent(&web.prefix()), Some(40), "of several the one with least room");
        assert_eq!(reports.forget(other).len(), 2);
        assert_eq!((reports.percent(&web.prefix()), reports.names().count()), (Some(70), 1));
        assert!(reports.forget(other).is_empty());
        assert_eq!(reports.forget(one), [web.prefix()]);
        assert_eq!((reports.percent(&web.prefix()), reports.names().count()), (None, 0));
    }

    #[test]
    fn a_program_reports_of_so_many_names() {
        let mut reports = Reports::default();
        let one = reports.add();
        let other = reports.add();
        for at in 0..NAMES_OF_REPORTER_MAX {
            assert!(reports.note(one, &name(&format!("s{at}.shop")), 1));
        }
        assert!(!reports.note(one, &name("more.shop"), 1) && reports.note(one, &name("s0.shop"), 2));
        assert!(reports.note(other, &name("more.shop"), 1));
    }
}
