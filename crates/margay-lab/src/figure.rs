//! `docs/figures`: every scenario's report as JSON, and a page that shows them side by side.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::command::progress;
use crate::fabric::own_command;
use crate::report::{Limit, Report};
use crate::scenario::{self, Scenario};

const BAR_WIDTH: f64 = 420.0;
const ROW_HEIGHT: usize = 26;
const LEFT: usize = 240;

/// Bars of the picture in the README, each as a share of plain TCP's: what it says, where it is measured, and whether
/// the figure is a multiple of what plain TCP needs.
const SUMMARY: [(&str, &str, &str, bool); 7] = [
    ("one stream by name, 1 Gbit/s link", "direct-throughput", "ratio_1g", false),
    ("one stream by name, link without limit", "direct-throughput", "ratio_1", false),
    ("round trips a second, one connection", "round-trips", "p50_ratio", true),
    ("connections a second", "setup-latency", "rate_ratio", false),
    ("one stream, encapsulated", "secure-throughput", "encap_ratio", false),
    ("one stream, secure", "secure-throughput", "secure_ratio", false),
    ("one stream, wireguard-go, without Margay", "secure-throughput", "tunnel_ratio", false),
];
/// Room for the words of those.
const SUMMARY_LEFT: usize = 300;

/// Runs scenarios (all, unless some are named) and writes their results to `out`. Returns the exit status.
///
/// # Errors
///
/// A name is none, or a file cannot be written.
pub fn write_all(out: &Path, names: &[String]) -> Result<u8> {
    let wanted: Vec<&Scenario> = if names.is_empty() {
        scenario::ALL.iter().collect()
    } else {
        names.iter().map(|name| scenario::find(name)).collect::<Result<_>>()?
    };
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    // The lab's processes are elsewhere.
    let out = out.canonicalize().with_context(|| format!("cannot find {}", out.display()))?;
    let mut status = 0;
    for scenario in wanted {
        let report = run(scenario, &out)?;
        status |= u8::from(!report.pass);
        progress(&report.table(scenario.bounds));
        let text = format!("{}\n", serde_json::to_string_pretty(&report)?);
        write(&out, &format!("{}.json", scenario.name), &text)?;
    }
    let reports = read_all(&out)?;
    write(&out, "README.md", &page(&reports, &out))?;
    write(&out, "ratios.svg", &picture(&reports))?;
    write(&out, "summary.svg", &summary(&reports))?;
    Ok(status)
}

/// Runs a scenario in a process of its own: a process can enter new namespaces only once.
fn run(scenario: &Scenario, out: &Path) -> Result<Report> {
    let mut command = own_command()?;
    command
        .args(["run", scenario.name, "--json"])
        .env(scenario::LONG, "1")
        .env(scenario::PICTURES, out)
        .stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot run {}", scenario.name))?;
    Report::from_json(&output.stdout)
}

fn write(out: &Path, name: &str, text: &str) -> Result<()> {
    let path = out.join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The reports that are there, also those of other days.
fn read_all(out: &Path) -> Result<Vec<(&'static Scenario, Report)>> {
    let mut reports = Vec::new();
    for scenario in scenario::ALL {
        if let Ok(text) = fs::read(out.join(format!("{}.json", scenario.name))) {
            reports.push((scenario, Report::from_json(&text)?));
        }
    }
    Ok(reports)
}

fn page(reports: &[(&Scenario, Report)], out: &Path) -> String {
    let mut text = "# Figures\n\nAs the scenarios measured them (`make figures`); each `.json` is what `margay-lab \
                    run NAME --json` printed.\n\n![ratios](ratios.svg)\n"
        .to_owned();
    for (scenario, report) in reports {
        let verdict = if report.pass { "passed" } else { "**failed**" };
        // Writing into a string cannot fail.
        let _ = write!(
            text,
            "\n## {}: {verdict}\n\n{}.\n\n| figure | measured | wanted |\n|---|---|---|\n",
            scenario.name, scenario.summary
        );
        for (name, figure) in &report.figures.0 {
            let limit = scenario.bounds.iter().find(|bound| bound.figure == name);
            let wanted = limit.map(|bound| bound.limit.to_string()).unwrap_or_default();
            let _ = writeln!(text, "| `{name}` | {figure} | {wanted} |");
        }
        let picture = format!("{}.svg", scenario.name);
        if out.join(&picture).exists() {
            let _ = writeln!(text, "\n![{}]({picture})", scenario.name);
        }
        if !report.notes.is_empty() {
            let _ = writeln!(text, "\n{}", report.notes);
        }
    }
    text
}

/// Figures between nothing and one, as bars with a mark where they must reach.
fn picture(reports: &[(&Scenario, Report)]) -> String {
    let mut rows = Vec::new();
    for (scenario, report) in reports {
        for bound in scenario.bounds {
            let limit = match bound.limit {
                Limit::AtLeast(limit) if limit > 0.0 && limit <= 1.0 => limit,
                _ => continue,
            };
            rows.push((format!("{} {}", scenario.name, bound.figure), report.figures.get(bound.figure), limit));
        }
    }
    bars(&rows, LEFT, true)
}

/// The picture in the README: few figures, in words. Scenarios that were never measured are left out.
fn summary(reports: &[(&Scenario, Report)]) -> String {
    let measured = SUMMARY.iter().filter_map(|(words, scenario, figure, is_multiple)| {
        let (_, report) = reports.iter().find(|(found, _)| found.name == *scenario)?;
        let value = report.figures.get(figure);
        let share = if *is_multiple && value > 0.0 { 1.0 / value } else { value };
        Some(((*words).to_owned(), (share * 100.0).round() / 100.0, 1.0))
    });
    bars(&measured.collect::<Vec<_>>(), SUMMARY_LEFT, false)
}

/// One bar for each name and figure, with a mark; red where it `is_judged` and does not reach that.
fn bars(rows: &[(String, f64, f64)], left: usize, is_judged: bool) -> String {
    let height = rows.len() * ROW_HEIGHT + 10;
    let width = left + BAR_WIDTH as usize + 70;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    for (row, (name, figure, limit)) in rows.iter().enumerate() {
        let y = row * ROW_HEIGHT + 8;
        let bar = figure.clamp(0.0, 1.0) * BAR_WIDTH;
        let colour = if figure >= limit || !is_judged { "#4c8c6b" } else { "#b5473c" };
        let mark = left as f64 + limit * BAR_WIDTH;
        let _ = writeln!(text, "<text x=\"8\" y=\"{}\">{name}</text>", y + 13);
        let _ = writeln!(text, "<rect x=\"{left}\" y=\"{y}\" width=\"{bar:.0}\" height=\"16\" fill=\"{colour}\"/>");
        let _ = writeln!(
            text,
            "<line x1=\"{mark:.0}\" x2=\"{mark:.0}\" y1=\"{}\" y2=\"{}\" stroke=\"#222222\" stroke-width=\"2\"/>",
            y - 3,
            y + 19
        );
        let _ = writeln!(text, "<text x=\"{:.0}\" y=\"{}\">{figure}</text>", left as f64 + bar + 8.0, y + 13);
    }
    text.push_str("</svg>\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Figures;

    #[test]
    fn the_picture_of_the_readme_is_of_the_figures_beside_it() {
        let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/figures");
        let drawn =
            fs::read_to_string(out.join("summary.svg")).expect("`margay-lab figures --out docs/figures NAME` draws it");
        let reports = read_all(&out).expect("reports");
        assert!(drawn == summary(&reports), "docs/figures/summary.svg is stale");
        assert_eq!(drawn.matches("<rect").count(), SUMMARY.len() + 1);
    }

    #[test]
    fn pages_and_pictures_have_every_bound() {
        let scenario = &scenario::ALL[0];
        let mut figures = Figures::default();
        for bound in scenario.bounds {
            figures.set(bound.figure, 0.5);
        }
        let report = Report::judge(scenario.name, figures, &["a note".to_owned()], scenario.bounds);
        let reports = [(scenario, report)];
        let text = page(&reports, Path::new("/nowhere"));
        assert!(scenario.bounds.iter().all(|bound| text.contains(bound.figure)), "{text}");
        assert!(text.contains("**failed**") && text.contains("a note"));
        assert!(picture(&reports).contains("share_min"));
    }
}
