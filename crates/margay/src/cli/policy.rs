//! `margay policy`: what an operator declares in a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use margay_control::api::v1::*;
use miette::{IntoDiagnostic, Result, WrapErr};
use serde::Deserialize;

use super::{Client, Json, Out, refused};
use crate::listener::ServiceName;
use crate::misread::{self, Misread};
use margay_control::quantity::count_of;

#[derive(Subcommand)]
pub enum PolicyVerb {
    /// Make rules and grants of an agent what a file declares; rules that are not in it are deleted
    Apply(ApplyArgs),
}

#[derive(Args)]
pub struct ApplyArgs {
    /// A TOML file of `[[route]]` and `[[grant]]` sections
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Only show what would change
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    json: Json,
}

/// The whole file.
#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct Policy {
    /// All of the operator's rules; without the word they are left alone, `route = []` declares that there are none.
    route: Option<Vec<RouteSection>>,
    /// What members may serve; others are left alone.
    #[serde(default)]
    grant: Vec<GrantSection>,
}

/// `[[route]]`
#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct RouteSection {
    name: ServiceName,
    action: ActionWord,
    /// Next hops of one that forwards; who is asked by one that delays.
    #[serde(default)]
    to: Vec<String>,
    weight: Option<u32>,
    priority: Option<u32>,
    #[serde(default, deserialize_with = "time")]
    idle_timeout: Option<Duration>,
    #[serde(default, deserialize_with = "time")]
    hard_timeout: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum ActionWord {
    Forward,
    ForwardAll,
    Delay,
    Drop,
}

/// `[[grant]]`
#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct GrantSection {
    /// A member: its name, or its host-ID.
    host: String,
    /// The authority, where the host is a member of several.
    #[serde(default)]
    authority: String,
    /// What it may serve; none: nothing.
    names: Vec<String>,
}

fn time<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(from)?;
    let parsed = humantime::parse_duration(&text);
    parsed.map(Some).map_err(|error| serde::de::Error::custom(format!("{error}; write for example \"30s\" or \"1h\"")))
}

impl Policy {
    #[expect(clippy::result_large_err, reason = "made once, and shown")]
    fn parse(text: &str, path: &Path) -> Result<Self, Misread> {
        misread::read(text, path, "a policy has [[route]] and [[grant]] sections; docs/book/routing.md shows one")
    }

    fn request(self, dry_run: bool) -> PolicyApplyRequest {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let route = |section: RouteSection| RouteAddRequest {
            name: section.name.0.written().to_owned(),
            action: match section.action {
                ActionWord::Forward => "forward",
                ActionWord::ForwardAll => "forward-all",
                ActionWord::Delay => "delay",
                ActionWord::Drop => "drop",
            }
            .to_owned(),
            to: section.to,
            weight: section.weight,
            priority: section.priority,
            idle_timeout_ms: section.idle_timeout.map(millis),
            hard_timeout_ms: section.hard_timeout.map(millis),
        };
        let grant = |section: GrantSection| MemberGrantRequest {
            host_id: section.host,
            authority: section.authority,
            grants: section.names,
        };
        PolicyApplyRequest {
            routes: self.route.map(|all| PolicyRoutes { routes: all.into_iter().map(route).collect() }),
            grants: self.grant.into_iter().map(grant).collect(),
            dry_run,
        }
    }
}

pub async fn policy(mut client: Client, verb: PolicyVerb, out: &mut Out) -> Result<()> {
    let PolicyVerb::Apply(args) = verb;
    let text = fs::read_to_string(&args.file).into_diagnostic();
    let text = text.wrap_err_with(|| format!("cannot read the policy in {}", args.file.display()))?;
    let request = Policy::parse(&text, &args.file)?.request(args.dry_run);
    let reply = client.policy_apply(request).await.map_err(refused)?.into_inner();
    if args.json.json {
        return out.json(&reply);
    }
    for change in &reply.changes {
        let sign = match change.act.as_str() {
            "add" => '+',
            "delete" => '-',
            _ => '~',
        };
        out.line(&format!("{sign} {} {}", change.what, change.text))?;
    }
    match (reply.changes.len(), args.dry_run) {
        (0, _) => out.line("nothing to change"),
        (changes, true) => {
            let they = if changes == 1 { "it is" } else { "they are" };
            out.line(&format!("{}; without --dry-run {they} made", count_of(changes, "change")))
        }
        (changes, false) => out.line(&format!("{} made", count_of(changes, "change"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Policy, String> {
        Policy::parse(text, Path::new("p.toml")).map_err(|error| format!("{error} at {:?}", error.pointed()))
    }

    #[test]
    fn a_file_says_which_rules_there_are() {
        let text = r#"
[[route]]
name = "web.shop"
action = "forward"
to = ["10.0.0.1", "10.0.0.2"]
weight = 50
hard_timeout = "10m"

[[route]]
name = "old.shop"
action = "drop"

[[grant]]
host = "00112233445566778899aabbccddeeff"
names = ["web.shop"]
"#;
        let request = parse(text).expect("fine").request(true);
        let routes = request.routes.expect("declared").routes;
        assert_eq!((routes.len(), &routes[0].to[..]), (2, &["10.0.0.1".to_owned(), "10.0.0.2".to_owned()][..]));
        assert_eq!((routes[0].weight, routes[0].hard_timeout_ms, routes[1].weight), (Some(50), Some(600_000), None));
        assert_eq!((request.grants.len(), request.dry_run), (1, true));
        // Not to speak of rules is not to say that there are none.
        assert!(parse("").expect("fine").request(false).routes.is_none());
        assert_eq!(parse("route = []").expect("fine").request(false).routes.expect("declared").routes.len(), 0);
    }

    #[test]
    fn what_makes_no_sense_is_named_with_its_place() {
        for (text, wanted) in [
            ("[[route]]\nname = \"web.shop\"\naction = \"send\"\n", "send"),
            ("[[route]]\nname = \"web shop\"\naction = \"drop\"\n", "web shop"),
            ("[[route]]\nname = \"web.shop\"\naction = \"drop\"\nweigth = 3\n", "weigth"),
            ("[[route]]\naction = \"drop\"\n", "name"),
            ("[[route]]\nname = \"web.shop\"\naction = \"drop\"\nidle_timeout = \"soon\"\n", "30s"),
            ("[[grants]]\n", "grants"),
            ("[[grant]]\nhost = \"1\"\n", "names"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(wanted) && error.contains("Some("), "{text}: {error}");
        }
    }
}
