//! The house rules that a compiler does not check: file and function length, leftovers, purity of the core.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 70;
const COLUMNS_MAX: usize = 120;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/margay is two below").to_path_buf()
}

/// Files that git tracks, or would if they were added, with one of these endings.
fn files(endings: &[&str]) -> Vec<(PathBuf, String)> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git is there");
    let names = String::from_utf8(output.stdout).expect("names are UTF-8");
    let wanted = names.lines().filter(|name| endings.iter().any(|ending| name.ends_with(ending)));
    wanted.filter_map(|name| Some((name.into(), fs::read_to_string(root().join(name)).ok()?))).collect()
}

fn complain(found: &[String]) {
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn files_stay_small() {
    let long = files(&[".rs", ".c", ".h", ".py", ".sh", ".lua"]).into_iter().filter_map(|(name, text)| {
        let lines = text.lines().count();
        (lines > FILE_LINES_MAX).then(|| format!("{}: {lines} lines; is there a seam to cut?", name.display()))
    });
    complain(&long.collect::<Vec<_>>());
}

#[test]
fn functions_stay_small() {
    let mut found = Vec::new();
    for (name, text) in files(&[".rs"]) {
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let code = line.trim_start();
            let is_function = ["fn ", "pub fn ", "pub(crate) fn ", "async fn ", "pub async fn ", "pub(super) fn "];
            if !is_function.iter().any(|start| code.starts_with(start)) || line.trim_end().ends_with(';') {
                continue;
            }
            let indent = line.len() - code.len();
            let closing = format!("{}}}", " ".repeat(indent));
            let Some(end) = lines[at..].iter().position(|line| *line == closing) else { continue };
            if end + 1 > FUNCTION_LINES_MAX {
                found.push(format!("{}:{}: {} lines", name.display(), at + 1, end + 1));
            }
        }
    }
    complain(&found);
}

/// What formatters do not break: comments, and the prose of the book outside of tables and examples.
#[test]
fn comments_and_prose_end_at_120_columns() {
    let mut found = Vec::new();
    let mut complain_of = |name: &Path, at: usize, line: &str| {
        if line.chars().count() > COLUMNS_MAX {
            found.push(format!("{}:{}: {}", name.display(), at + 1, line.trim()));
        }
    };
    for (name, text) in files(&[".rs", ".c", ".h", ".proto"]) {
        let is_comment = |line: &str| ["//", "/*", "* "].iter().any(|start| line.trim_start().starts_with(start));
        text.lines()
            .enumerate()
            .filter(|(_, line)| is_comment(line))
            .for_each(|(at, line)| complain_of(&name, at, line));
    }
    // The figures' pages are written by the lab.
    for (name, text) in files(&[".md"]).into_iter().filter(|(name, _)| !name.starts_with("docs/figures")) {
        let mut is_example = false;
        for (at, line) in text.lines().enumerate() {
            is_example ^= line.starts_with("```");
            if !is_example && !line.starts_with("    ") && !line.starts_with('|') {
                complain_of(&name, at, line);
            }
        }
    }
    complain(&found);
}

/// `fuzz/` is a workspace of its own, which only long runs build: its lock file has what the crates here have come to
/// need.
#[test]
fn the_lock_of_the_fuzz_targets_is_up_to_date() {
    let lock = fs::read_to_string(root().join("fuzz/Cargo.lock")).expect("there is one");
    let name_of = |package: &str| Some(package.split_once("name = \"")?.1.split_once('"')?.0.to_owned());
    let mut found = Vec::new();
    let mut packages = 0;
    for package in lock.split("[[package]]") {
        let Some(name) = name_of(package) else { continue };
        let Ok(manifest) = fs::read_to_string(root().join("crates").join(&name).join("Cargo.toml")) else { continue };
        packages += 1;
        let dependencies = manifest.lines().skip_while(|line| *line != "[dependencies]").skip(1);
        for line in dependencies.take_while(|line| !line.starts_with('[')).filter(|line| line.contains('=')) {
            let wanted = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if !package.contains(&format!("\"{wanted}\"")) && !package.contains(&format!("\"{wanted} ")) {
                found
                    .push(format!("{name} needs {wanted}: `cargo update --workspace --manifest-path fuzz/Cargo.toml`"));
            }
        }
    }
    assert!(packages > 3, "crates of this repository are in it");
    complain(&found);
}

#[test]
fn nothing_is_left_for_later() {
    let words =
        [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("X", "XX"), concat!("HA", "CK"), concat!("#[ig", "nore")];
    let mut found = Vec::new();
    for (name, text) in files(&[".rs", ".c", ".h", ".py", ".sh", ".toml", "Makefile"]) {
        for (at, line) in text.lines().enumerate() {
            if words.iter().any(|word| line.contains(word)) {
                found.push(format!("{}:{}: {}", name.display(), at + 1, line.trim()));
            }
        }
    }
    complain(&found);
}

#[test]
fn the_core_asks_nobody() {
    let impure = ["std::", "tokio", "getrandom", "Instant::now", "SystemTime"];
    let mut found = Vec::new();
    for (name, text) in files(&[".rs"]) {
        let pure = ["crates/margay-core/src", "crates/margay-ensemble/src", "crates/margay-wire/src"];
        let is_core = pure.iter().any(|path| name.starts_with(path));
        for (at, line) in text.lines().enumerate().filter(|_| is_core) {
            let code = line.split("//").next().unwrap_or_default();
            if impure.iter().any(|word| code.contains(word)) {
                found.push(format!("{}:{}: {}", name.display(), at + 1, line.trim()));
            }
        }
    }
    complain(&found);
}

/// "1 hosts" is no English: `margay_control::quantity` puts numbers before nouns. Constants are plural as they stand.
#[test]
fn numbers_agree_with_their_nouns() {
    const NOUNS: [&str; 23] = [
        "hosts",
        "times",
        "packets",
        "names",
        "flows",
        "services",
        "members",
        "routers",
        "rules",
        "events",
        "sockets",
        "peers",
        "checks",
        "warnings",
        "datagrams",
        "instances",
        "listeners",
        "keys",
        "tokens",
        "programs",
        "connections",
        "changes",
        "minutes",
    ];
    let is_number = |place: &str| !place.chars().any(|letter| letter.is_ascii_uppercase() || letter.is_ascii_digit());
    let mut found = Vec::new();
    let programs = ["crates/margay/src", "crates/margay-control/src", "crates/margay-memcached/src"];
    for (name, text) in files(&[".rs"]) {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (at, line) in code.lines().enumerate().filter(|_| programs.iter().any(|path| name.starts_with(path))) {
            for (before, after) in line.match_indices("} ").map(|(split, _)| line.split_at(split + 1)) {
                let place = before.rsplit_once('{').map_or("A", |(_, place)| place);
                let word = after.trim_start().split(|letter: char| !letter.is_alphabetic()).next().unwrap_or_default();
                if NOUNS.contains(&word) && is_number(place) && line.contains('"') {
                    found.push(format!("{}:{}: {}", name.display(), at + 1, line.trim()));
                }
            }
        }
    }
    complain(&found);
}

#[test]
fn every_crate_takes_the_lints_of_the_workspace() {
    let manifests = files(&["Cargo.toml"]).into_iter().filter(|(name, _)| name.parent() != Some(Path::new("")));
    let without = manifests.filter(|(_, text)| !text.contains("[lints]\nworkspace = true"));
    complain(&without.map(|(name, _)| name.display().to_string()).collect::<Vec<_>>());
}

/// Everything is under the licence that `Cargo.toml` names. Programs for the kernel may be used under its own, too: it
/// wants so.
#[test]
fn one_licence_everywhere() {
    const MARK: &str = concat!("SPDX-License-", "Identifier: ");
    let mut found = Vec::new();
    for (name, text) in files(&[".rs", ".c", ".h", ".3", ".py", ".lua", ".proto"]) {
        let wanted =
            if name.starts_with("crates/margay-datapath/bpf") { "GPL-2.0 OR Apache-2.0" } else { "Apache-2.0" };
        for (_, licence) in text.lines().filter_map(|line| line.split_once(MARK)) {
            if licence.trim_end_matches("*/").trim() != wanted {
                found.push(format!("{}: {licence}, where {wanted} is meant", name.display()));
            }
        }
    }
    let named = [("Cargo.toml", "license = \"Apache-2.0\""), ("sdk/python/pyproject.toml", "\"Apache-2.0\"")];
    let named = named.into_iter().chain([("README.md", "Apache-2.0 ([LICENSE](LICENSE))"), ("LICENSE", "Version 2.0")]);
    for (name, words) in named {
        let text = fs::read_to_string(root().join(name)).unwrap_or_default();
        if !text.contains(words) {
            found.push(format!("{name} does not say `{words}`"));
        }
    }
    complain(&found);
}
