//! The first page of the help: verbs by what people want to do.

use std::fmt::Write as _;

use clap::Command;

/// Headings, and the verbs under each.
const GROUPS: [(&str, &[&str]); 6] = [
    ("Start and stop", &["up", "down", "reload", "agent", "enable", "disable"]),
    ("Services", &["run", "service", "middlebox", "drain", "undrain", "rebalance", "ensemble"]),
    ("Flows and paths", &["flow", "path", "stack", "fact", "cache"]),
    ("Routing", &["route", "router", "policy", "chain"]),
    ("Identity", &["id", "audit"]),
    ("Look and try", &["status", "check", "trace", "completions"]),
];

const TEMPLATE: &str = "{about-with-newline}\n{usage-heading} {usage}\n\n{after-help}\n\nOptions:\n{options}";

const FIRST_STEPS: &str = "First steps:
  margay up --dry-run                            what would change on this host
  margay up --router                             a service router
  margay id authority create shop                an authority, on the router
  margay id token create shop                    a token for another host, which says: margay up --join TOKEN
  margay run --service web.shop -- nginx         serve a name while a program listens
  curl http://web.shop.sal.internal/
  margay check web.shop:80                       when something does not work

`make demo`, in a checkout, shows all of it on this machine alone.";

/// Puts the page together. The verbs' own lines come from their documentation.
pub fn group(command: Command) -> Command {
    let about = |verb: &str| {
        let found = command.find_subcommand(verb).and_then(Command::get_about);
        found.map(ToString::to_string).unwrap_or_default()
    };
    let mut text = String::new();
    for (heading, verbs) in GROUPS {
        let lines: String = verbs.iter().map(|verb| format!("  {verb:12} {}\n", about(verb))).collect();
        // To a string: it never fails.
        let _ = writeln!(text, "{heading}:\n{lines}");
    }
    text.push_str("Another host's agent (each verb that asks an agent takes these options):\n");
    for name in ["remote", "tls_ca", "tls_certificate", "tls_key"] {
        let Some(option) = command.get_arguments().find(|option| option.get_id() == name) else { continue };
        let value = option.get_value_names().and_then(<[_]>::first).map(ToString::to_string).unwrap_or_default();
        let long = format!("--{} <{value}>", option.get_long().unwrap_or_default());
        let help = option.get_help().map(ToString::to_string).unwrap_or_default();
        let variable = option.get_env().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let _ = writeln!(text, "  {long:26} {help} [env: {variable}]");
    }
    text.push('\n');
    text.push_str(FIRST_STEPS);
    command.help_template(TEMPLATE).after_help(text)
}

#[cfg(test)]
mod test {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    /// All verbs but those that programs alone use.
    fn shown(command: &Command) -> impl Iterator<Item = &Command> {
        command.get_subcommands().filter(|verb| verb.get_name() != "help" && !verb.is_hide_set())
    }

    #[test]
    fn every_verb_is_in_one_group() {
        let command = Cli::command();
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, verbs)| verbs.iter().copied()).collect();
        let mut verbs: Vec<&str> = shown(&command).map(Command::get_name).collect();
        grouped.sort_unstable();
        verbs.sort_unstable();
        assert_eq!(grouped, verbs);
    }

    /// Those that only stream other programs' output, or start one.
    const WITHOUT_JSON: [&str; 3] = ["agent", "run", "completions"];

    fn without_json(command: &Command, path: &str, found: &mut Vec<String>) {
        for verb in shown(command) {
            let path = format!("{path} {}", verb.get_name());
            let is_group = verb.has_subcommands() && verb.is_subcommand_required_set();
            if !is_group && !verb.get_arguments().any(|option| option.get_long() == Some("json")) {
                found.push(path.clone());
            }
            without_json(verb, &path, found);
        }
    }

    #[test]
    fn every_verb_that_says_something_says_the_same_to_programs() {
        let mut found = Vec::new();
        without_json(&Cli::command(), "", &mut found);
        // Those run until they are told to stop.
        let runs = ["ensemble serve", "ensemble member", "ensemble framer memcached", "ensemble framer resp"];
        found.retain(|path| !WITHOUT_JSON.contains(&path.split(' ').nth(1).unwrap_or_default()));
        found.retain(|path| !runs.contains(&path.trim_start()));
        assert!(found.is_empty(), "without --json: {found:?}");
    }

    #[test]
    fn options_for_another_host_are_on_the_first_page_alone() {
        let mut command = group(Cli::command());
        let first = command.render_long_help().to_string();
        assert_eq!(first.matches("--tls-certificate <FILE>").count(), 1, "{first}");
        command.build();
        let page = command.find_subcommand_mut("status").expect("a verb").render_long_help().to_string();
        assert!(!page.contains("--tls-"), "{page}");
    }
}
