//! What a scenario found, and whether that is good enough.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Which way a figure has to go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// At least this much.
    AtLeast(f64),
    /// At most this much.
    AtMost(f64),
    /// Less than this.
    Below(f64),
    /// This and nothing else.
    Exactly(f64),
}

impl Limit {
    /// Whether a figure keeps it.
    pub fn holds(self, figure: f64) -> bool {
        match self {
            Self::AtLeast(limit) => figure >= limit,
            Self::AtMost(limit) => figure <= limit,
            Self::Below(limit) => figure < limit,
            Self::Exactly(limit) => figure == limit,
        }
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtLeast(limit) => write!(f, "≥ {limit}"),
            Self::AtMost(limit) => write!(f, "≤ {limit}"),
            Self::Below(limit) => write!(f, "< {limit}"),
            Self::Exactly(limit) => write!(f, "= {limit}"),
        }
    }
}

/// A figure that must be reported, and what it must reach.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Name of the figure.
    pub figure: &'static str,
    /// What it must reach.
    pub limit: Limit,
}

impl Bound {
    /// Whether the figure is a time, a rate or a ratio of either, by the unit in its name: what a busy machine can
    /// change without a fault of the program. Counts of resets, of wrong bytes, of leaks and of what was let in are
    /// none.
    fn is_of_time(&self) -> bool {
        self.figure.split('_').any(|word| matches!(word, "ms" | "us" | "s" | "rtts" | "ratio" | "cpu" | "gain" | "p50"))
    }
}

/// Shorthand for a table of bounds.
pub const fn bound(figure: &'static str, limit: Limit) -> Bound {
    Bound { figure, limit }
}

/// Figures by name, in the order of their names.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Figures(pub BTreeMap<String, f64>);

impl Figures {
    /// Sets a figure; at most four digits after the point are kept.
    pub fn set(&mut self, name: &str, value: f64) {
        self.0.insert(name.to_owned(), (value * 10_000.0).round() / 10_000.0);
    }

    /// Adds to a figure that counts.
    pub fn add(&mut self, name: &str, value: f64) {
        *self.0.entry(name.to_owned()).or_default() += value;
    }

    /// A figure; zero when it was never set.
    pub fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or_default()
    }
}

/// The one JSON object of a scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Its name.
    pub scenario: String,
    /// Whether all figures kept their bounds.
    pub pass: bool,
    /// Whether figures of time missed their bounds, and no others: the scenario may run once more.
    #[serde(default)]
    pub late: bool,
    /// What was measured.
    pub figures: Figures,
    /// How, and what went wrong.
    pub notes: String,
}

impl Report {
    /// Judges figures by bounds. A missing figure fails.
    pub fn judge(scenario: &str, figures: Figures, notes: &[String], bounds: &[Bound]) -> Self {
        let mut notes = notes.to_vec();
        let mut pass = true;
        let mut late = true;
        for bound in bounds {
            match figures.0.get(bound.figure) {
                Some(figure) if bound.limit.holds(*figure) => {}
                Some(figure) => {
                    pass = false;
                    late &= bound.is_of_time();
                    notes.push(format!("{} is {figure}, must be {}", bound.figure, bound.limit));
                }
                None => {
                    pass = false;
                    late = false;
                    notes.push(format!("{} was not measured", bound.figure));
                }
            }
        }
        Self { scenario: scenario.to_owned(), pass, late: late && !pass, figures, notes: notes.join("; ") }
    }

    /// The report of a scenario that could not be done.
    pub fn broken(scenario: &str, reason: &str) -> Self {
        let mut figures = Figures::default();
        figures.set("failed", 1.0);
        Self { scenario: scenario.to_owned(), pass: false, late: false, figures, notes: reason.to_owned() }
    }

    /// Reads the object.
    ///
    /// # Errors
    ///
    /// It is none.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        serde_json::from_slice(text).context("the scenario ended without a report")
    }

    /// For people.
    pub fn table(&self, bounds: &[Bound]) -> String {
        let mut text = format!("{}: {}\n", self.scenario, if self.pass { "passed" } else { "FAILED" });
        for (name, figure) in &self.figures.0 {
            let limit = bounds.iter().find(|bound| bound.figure == name).map(|bound| bound.limit);
            let mark = match limit {
                Some(limit) if !limit.holds(*figure) => "  ✗",
                _ => "",
            };
            let wanted = limit.map(|limit| limit.to_string()).unwrap_or_default();
            // Writing into a string cannot fail.
            let _ = writeln!(text, "  {name:28} {figure:>14} {wanted:>10}{mark}");
        }
        if !self.notes.is_empty() {
            text.push_str(&format!("  {}\n", self.notes));
        }
        text.trim_end().to_owned()
    }
}

/// The middle of some numbers; zero of none.
pub fn median(numbers: &[f64]) -> f64 {
    percentile(numbers, 50.0)
}

/// The number below which `percent` of the numbers lie (nearest rank); zero of none.
pub fn percentile(numbers: &[f64], percent: f64) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.is_empty() {
        return 0.0;
    }
    let rank = ((percent / 100.0) * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::{Figures, Limit, Report, bound, median, percentile};

    #[test]
    fn a_missing_figure_fails() {
        let mut figures = Figures::default();
        figures.set("failed", 0.0);
        let bounds = [bound("failed", Limit::Exactly(0.0)), bound("ok", Limit::AtLeast(1.0))];
        let report = Report::judge("x", figures.clone(), &[], &bounds);
        assert!(!report.pass);
        assert!(report.notes.contains("ok was not measured"), "{}", report.notes);
        figures.set("ok", 1.0);
        assert!(Report::judge("x", figures, &[], &bounds).pass);
    }

    #[test]
    fn only_figures_of_time_make_a_scenario_late() {
        let bounds = [
            bound("resets", Limit::Exactly(0.0)),
            bound("back_ms_p99", Limit::Below(1000.0)),
            bound("honest_ratio", Limit::AtLeast(0.75)),
            bound("leaked_entries", Limit::Exactly(0.0)),
        ];
        let judge = |resets, back_ms, ratio, leaked: Option<f64>| {
            let mut figures = Figures::default();
            figures.set("resets", resets);
            figures.set("back_ms_p99", back_ms);
            figures.set("honest_ratio", ratio);
            if let Some(leaked) = leaked {
                figures.set("leaked_entries", leaked);
            }
            let report = Report::judge("x", figures, &[], &bounds);
            (report.pass, report.late)
        };
        assert_eq!(judge(0.0, 10.0, 1.0, Some(0.0)), (true, false));
        assert_eq!(judge(0.0, 2000.0, 1.0, Some(0.0)), (false, true));
        assert_eq!(judge(0.0, 2000.0, 0.5, Some(0.0)), (false, true));
        assert_eq!(judge(1.0, 2000.0, 1.0, Some(0.0)), (false, false));
        assert_eq!(judge(0.0, 10.0, 1.0, Some(4.0)), (false, false));
        assert_eq!(judge(0.0, 2000.0, 1.0, None), (false, false));
    }

    #[test]
    fn limits() {
        assert!(Limit::AtLeast(0.4).holds(0.4) && !Limit::AtLeast(0.4).holds(0.39));
        assert!(Limit::AtMost(0.4).holds(0.4) && !Limit::AtMost(0.4).holds(0.41));
        assert!(Limit::Below(1000.0).holds(999.9) && !Limit::Below(1000.0).holds(1000.0));
        assert!(Limit::Exactly(200.0).holds(200.0) && !Limit::Exactly(200.0).holds(199.0));
    }

    #[test]
    fn ranks() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(percentile(&[1.0, 2.0, 3.0, 4.0], 99.0), 4.0);
        assert_eq!(percentile(&[], 99.0), 0.0);
    }
}
