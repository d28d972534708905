//! The reference pages of the book, made from the program: `make reference` writes them, the test fails when they are
//! stale.

mod examples;
pub mod settings;

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Arg, Command};

use crate::agent::{check, metrics};
use crate::cli;
use crate::host::by_hand;

/// With this word in this variable, pages are written instead of compared.
const VARIABLE: &str = "MARGAY_REFERENCE";
const WRITE: &str = "write";
/// Width of the pages' source.
const COLUMNS: usize = 120;
const MADE: &str = "This page is made from the program by `make reference`.\n";

fn book() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book")
}

/// Writes a page, or says that it is stale.
fn hold(name: &str, text: &str) {
    let path = book().join(name);
    if env::var(VARIABLE).is_ok_and(|word| word == WRITE) {
        return fs::write(&path, text).expect("the book can be written");
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    let differs = kept.lines().zip(text.lines()).position(|(kept, now)| kept != now);
    let line = differs.unwrap_or_else(|| kept.lines().count().min(text.lines().count())) + 1;
    assert!(kept == text, "docs/book/{name} is stale from line {line} on; `make reference` writes it anew");
}

/// A paragraph or a list entry within the pages' width.
fn fill(text: &mut String, first: &str, rest: &str, words: &str) {
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in words.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            let _ = writeln!(text, "{line}");
            (line, is_empty) = (rest.to_owned(), true);
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    let _ = writeln!(text, "{line}");
}

/// Without what Markdown would take for a tag; in code it takes nothing for one.
fn plain(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let parts = parts.map(|(at, part)| if at % 2 == 0 { part.replace('<', "&lt;") } else { part.to_owned() });
    parts.collect::<Vec<_>>().join("`")
}

/// How an argument is written, and what it is.
fn argument(arg: &Arg) -> (String, String) {
    let values: Vec<String> =
        arg.get_value_names().unwrap_or_default().iter().map(|name| format!("<{name}>")).collect();
    let takes_value = arg.get_num_args().is_none_or(|number| number.takes_values());
    let is_optional = arg.get_num_args().is_some_and(|number| number.takes_values() && number.min_values() == 0);
    let value = if takes_value { values.join(" ") } else { String::new() };
    let form = match (arg.get_long(), is_optional) {
        (None, _) => value,
        (Some(long), _) if value.is_empty() => format!("--{long}"),
        (Some(long), true) => format!("--{long}[={value}]"),
        (Some(long), false) => format!("--{long} {value}"),
    };
    let mut help = plain(&arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default());
    if takes_value {
        let words: Vec<String> =
            arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
        if !words.is_empty() {
            help.push_str(&format!(" ({})", words.join(", ")));
        }
        for default in arg.get_default_values() {
            help.push_str(&format!("; default: `{}`", default.to_string_lossy()));
        }
    }
    if let Some(variable) = arg.get_env() {
        help.push_str(&format!("; environment: `{}`", variable.to_string_lossy()));
    }
    (form, help)
}

fn arguments(command: &Command, of_all_verbs: bool, text: &mut String) {
    let is_own = |arg: &&Arg| {
        let is_everywhere = arg.is_global_set() || ["help", "version"].contains(&arg.get_id().as_str());
        is_everywhere == of_all_verbs && (of_all_verbs || !arg.is_hide_set())
    };
    for arg in command.get_arguments().filter(is_own) {
        let (form, help) = argument(arg);
        fill(text, &format!("- `{form}`: "), "  ", &help);
    }
}

fn verb(command: &mut Command, path: &str, text: &mut String) {
    let path = format!("{path} {}", command.get_name());
    if !command.has_subcommands() || !command.is_subcommand_required_set() {
        let _ = writeln!(text, "\n## {}\n", plain(&path));
        let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
        fill(text, "", "", &plain(&about));
        let usage = command.render_usage().to_string();
        let usage = usage.trim_start_matches("Usage: ").split_once(command.get_name()).map_or("", |(_, rest)| rest);
        let _ = writeln!(text, "\n    {path}{}\n", usage.lines().next().unwrap_or_default().trim_end());
        arguments(command, false, text);
        if let Some(after) = command.get_after_help() {
            text.push('\n');
            fill(text, "", "", &after.to_string());
        }
    }
    let before: String = match command.is_subcommand_required_set() {
        true => command.get_positionals().map(|arg| format!(" {}", argument(arg).0)).collect(),
        false => String::new(),
    };
    let path = path + &before;
    for inner in command.get_subcommands_mut().filter(|inner| inner.get_name() != "help" && !inner.is_hide_set()) {
        verb(inner, &path, text);
    }
}

#[test]
fn every_verb_and_option_is_in_the_book() {
    let mut text = format!("# Reference: commands\n\n{MADE}");
    text.push_str("`margay VERB --help` says the same.\n\nOptions of all verbs:\n\n");
    let mut command = cli::command();
    arguments(&command, true, &mut text);
    command.build();
    for inner in command.get_subcommands_mut().filter(|inner| inner.get_name() != "help") {
        verb(inner, "margay", &mut text);
    }
    hold("reference-commands.md", &text);
}

#[test]
fn every_metric_is_in_the_book_and_says_what_it_counts() {
    let catalogue = metrics::catalogue();
    let mut text = format!("# Reference: metrics\n\n{MADE}");
    text.push_str(
        "`margay status --metrics` prints them, and `[metrics] listen` serves them at `/metrics` (OpenMetrics).\n\
         Counters count from the start of the agent. Families whose part of the agent is not there (router, cluster,\n\
         sites, kernel) are left out.\n\n",
    );
    let mut helps: BTreeMap<&str, &str> = BTreeMap::new();
    for line in catalogue.lines().filter_map(|line| line.strip_prefix("# HELP ")) {
        let (name, help) = line.split_once(' ').expect("a name and a text");
        assert!(help.trim_matches(['.', ' ']).len() > 3, "{name} does not say what it counts");
        assert!(helps.insert(name, help.trim_end_matches('.')).is_none(), "{name} is there twice");
    }
    for line in catalogue.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').expect("a name and a type");
        let (suffix, of_labels) = match kind {
            "counter" => ("_total", "_total"),
            // It has sums and classes, too.
            "histogram" => ("", "_count"),
            _ => ("", ""),
        };
        let sample = format!("{name}{suffix}");
        let labelled = format!("{name}{of_labels}");
        let labels: Vec<(String, String)> = catalogue.lines().filter_map(|line| label(line, &labelled)).collect();
        let form = labels.first().map_or_else(|| sample.clone(), |(label, _)| format!("{sample}{{{label}}}"));
        let values: Vec<&str> =
            labels.iter().map(|(_, value)| value.as_str()).filter(|value| !value.is_empty()).collect();
        let values = if values.is_empty() { String::new() } else { format!(": {}", values.join(", ")) };
        fill(&mut text, &format!("- `{form}` ({kind}): "), "  ", &format!("{}{values}", plain(helps[name])));
    }
    hold("reference-metrics.md", &text);
}

/// The labels of a sample, and their values.
fn label(line: &str, sample: &str) -> Option<(String, String)> {
    let labels = line.strip_prefix(sample)?.strip_prefix('{')?;
    let parts = labels.split_once('}')?.0.split(',').map(|part| part.split_once('=')).collect::<Option<Vec<_>>>()?;
    let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
    let values: Vec<&str> = parts.iter().map(|(_, value)| value.trim_matches('"')).collect();
    Some((names.join(","), values.join(" ")))
}

#[test]
fn every_check_is_in_the_book() {
    let mut text = format!("# Reference: checks\n\n{MADE}");
    text.push_str(
        "`margay check` makes those of this host; with a peer, those on the way to it, too. Each says `ok`, `waiting`\n\
         (under way by itself), `warning` or `failed`, and what to do. The exit status is 1 where one has failed.\n",
    );
    for (heading, of_peer) in [("This host", false), ("The way to a peer", true)] {
        let _ = writeln!(text, "\n## {heading}\n");
        for check in check::list::ALL.iter().filter(|check| check.of_peer == of_peer) {
            fill(&mut text, &format!("- `{}`: ", check.name), "  ", check.looks_at);
        }
    }
    hold("reference-checks.md", &text);
}

#[test]
fn what_takes_up_back_by_hand_is_in_the_book() {
    const PAGE: &str = "what-up-changes.md";
    const HEADING: &str = "## By hand, if all else is lost\n";
    let page = fs::read_to_string(book().join(PAGE)).expect("the page can be read");
    let (head, section) = page.split_once(HEADING).expect("the page has the section");
    let (words, rest) = section.split_once("```sh\n").expect("the section has commands");
    let (_, tail) = rest.split_once("```\n").expect("they end");
    hold(PAGE, &format!("{head}{HEADING}{words}```sh\n{}```\n{tail}", by_hand::script()));
}

#[test]
fn every_key_of_the_configuration_is_in_the_book() {
    let mut text = format!("# Reference: configuration\n\n{MADE}");
    text.push_str(
        "An [example with everything](configuration.md) shows how the keys go together. What is required has to be\n\
         given where its section is; other keys may be left out. `[[section]]` may be there several times.\n",
    );
    for section in settings::sections() {
        let _ = writeln!(text, "\n## {}\n", section.heading);
        for key in &section.keys {
            fill(&mut text, &format!("- `{}` ({}): ", key.name, key.form), "  ", &plain(&key.text));
        }
    }
    hold("reference-configuration.md", &text);
}
