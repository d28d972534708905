//! Commands that the book shows are commands of the program: each verb and each option.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Command;

use crate::cli;

/// The page of formats, whose texts begin with the program's name, too.
const FORMATS: &str = "wire.md";

/// The pages that show commands and are not made from the program.
fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<PathBuf> = fs::read_dir(super::book())
        .expect("there is a book")
        .map(|entry| entry.expect("it can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            !name.starts_with("reference-") && name != FORMATS
        })
        .collect();
    pages.push(super::book().join("../../README.md"));
    pages.sort();
    pages
}

/// What a line of a code block says to a shell: without the prompt (`alpha# `, `$ `), variables and what follows the
/// command.
fn said(line: &str) -> &str {
    let line = line.trim_start();
    let prompt = line.split_once(' ').filter(|(first, _)| first.ends_with(['#', '$']));
    let mut rest = prompt.map_or(line, |(_, rest)| rest.trim_start());
    while let Some((word, after)) = rest.split_once(' ') {
        if word != "sudo" && !word.contains('=') {
            break;
        }
        rest = after.trim_start();
    }
    let ends = [" #", "|", "&", ";", ">", "…"];
    ends.iter().fold(rest, |rest, end| rest.split(end).next().unwrap_or_default())
}

/// All commands of a page that begin with `margay`: in code blocks, and in the text between backticks.
fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_fenced = false;
    for line in text.lines() {
        if line.starts_with("```") {
            is_fenced = !is_fenced;
        } else if is_fenced || line.starts_with("    ") {
            found.push(said(line).to_owned());
        } else {
            found.extend(line.split('`').skip(1).step_by(2).map(|code| said(code).to_owned()));
        }
    }
    // What goes on with a number is a text that is hashed.
    found.retain(|line| {
        line.strip_prefix("margay ").is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
    });
    found
}

/// What a reader gets wrong who types it.
fn wrong(program: &Command, line: &str) -> Option<String> {
    let mut command = program;
    let mut words = line.split_whitespace().skip(1);
    while let Some(word) = words.next() {
        if word == "--" {
            return None;
        }
        if let Some(long) = word.strip_prefix("--") {
            let (long, has_value) = long.split_once('=').map_or((long, false), |(long, _)| (long, true));
            let known = command.get_arguments().chain(program.get_arguments());
            let Some(option) = known.into_iter().find(|option| option.get_long() == Some(long)) else {
                let is_everywhere = ["help", "version"].contains(&long);
                return (!is_everywhere).then(|| format!("`{line}`: {} has no --{long}", command.get_name()));
            };
            let takes_value = option.get_num_args().is_none_or(|number| number.min_values() > 0);
            if !has_value && takes_value && option.get_action().takes_values() {
                words.next();
            }
        } else if let Some(inner) = command.find_subcommand(word) {
            command = inner;
        } else if command.is_subcommand_required_set() || command.get_name() == program.get_name() {
            // A word in capitals stands for one that the reader chooses; some groups take one before the verb.
            let is_chosen = word.chars().all(|c| !c.is_lowercase()) || command.get_positionals().next().is_some();
            if !is_chosen {
                return Some(format!("`{line}`: {} has no verb `{word}`", command.get_name()));
            }
        }
    }
    None
}

#[test]
fn every_command_in_the_book_is_one_of_the_program() {
    let mut program = cli::command();
    program.build();
    let mut count = 0;
    let mut found = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).expect("it can be read");
        let commands = commands(&text);
        count += commands.len();
        let name = page.file_name().map(Path::new).unwrap_or(&page);
        found
            .extend(commands.iter().filter_map(|line| Some(format!("{}: {}", name.display(), wrong(&program, line)?))));
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
    assert!(count > 200, "only {count} commands were found in the book");
}

#[test]
fn what_is_no_command_is_seen() {
    let mut program = cli::command();
    program.build();
    for line in ["margay upp", "margay up --jion X", "margay service publsh web.shop", "margay flow list --jsn"] {
        assert!(wrong(&program, line).is_some(), "{line}");
    }
    for line in ["margay up --join X", "margay VERB --help", "margay run --service web.shop:80 -- nginx --quiet"] {
        assert_eq!(wrong(&program, line), None);
    }
    let text =
        "    alpha# A=1 margay status | head\n`margay down`\n```\n$ margay check # why\n```\n    echo margay up\n";
    assert_eq!(commands(text), ["margay status ", "margay down", "margay check"]);
}

/// Where the links of a text lead: a path beside it, or nothing for the text itself; and a heading there, if one is
/// named.
fn links(text: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let inner = targets.filter(|target| !target.contains("://") && !target.contains(char::is_whitespace));
    inner.map(|target| target.split_once('#').map_or((target, None), |(path, heading)| (path, Some(heading))))
}

/// The heading as a link names it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn every_link_of_the_book_leads_somewhere_and_every_page_is_in_the_index() {
    let mut found = Vec::new();
    let index = fs::read_to_string(super::book().join("README.md")).expect("an index");
    for entry in fs::read_dir(super::book()).expect("there is a book") {
        let page = entry.expect("it can be read").path();
        let name = page.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.ends_with(".md") {
            continue;
        }
        if name != "README.md" && !links(&index).any(|(path, _)| path == name) {
            found.push(format!("{name} is not in the index"));
        }
        let text = fs::read_to_string(&page).expect("it can be read");
        for (path, heading) in links(&text) {
            let target = if path.is_empty() { page.clone() } else { super::book().join(path) };
            let Some(heading) = heading else {
                if !target.exists() {
                    found.push(format!("{name}: {path} is not there"));
                }
                continue;
            };
            let there = fs::read_to_string(&target).unwrap_or_default();
            if !there.lines().any(|line| line.starts_with('#') && anchor(line) == heading) {
                found.push(format!("{name}: {path} has no heading #{heading}"));
            }
        }
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}
