//! `margay policy`: what an operator declares in a file.

mod filter;

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Subcommand};
use margay_control::api::v1::*;
use miette::{IntoDiagnostic, Result, WrapErr};
use serde::Deserialize;
use toml::Spanned;

use super::{Client, Json, Out, refused};
use crate::listener::{Protocol, ServiceName, port_number};
use crate::misread::{self, Misread};
use margay_control::quantity::count_of;

#[derive(Subcommand)]
pub enum PolicyVerb {
    /// Make rules, grants and chains of an agent what a file declares; rules and chains that are not in it are deleted
    Apply(ApplyArgs),
}

#[derive(Args)]
pub struct ApplyArgs {
    /// A TOML file of `[[route]]`, `[[grant]]`, `[[chain]]` and `[[require]]` sections
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
    /// All chains of the authorities whose keys are on the router; without the word they are left alone, `chain = []`
    /// declares that there are none.
    chain: Option<Vec<ChainSection>>,
    /// The same of what services require.
    require: Option<Vec<RequireSection>>,
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

/// `[[chain]]`
#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct ChainSection {
    /// By which errors call it.
    name: String,
    /// Sessions to this name, or with `*.authority` to all names of an authority.
    #[serde(rename = "for")]
    services: String,
    protocol: Option<Protocol>,
    /// A port of the service, or some: `"8000-8999"`.
    #[serde(default, deserialize_with = "ports")]
    port: Option<Ports>,
    /// Whose sessions: `host:<id>`, `group:<name>`; everybody's unless given.
    #[serde(default)]
    from: Vec<String>,
    /// What first packets look like: an expression of libpcap.
    filter: Option<Spanned<String>>,
    /// Names of boxes, in order; none: such sessions go through no boxes.
    through: Vec<ServiceName>,
    /// Those of them that end TCP connections.
    #[serde(default)]
    proxies: Vec<ServiceName>,
    /// What hosts of the boxes may add behind their own.
    #[serde(default)]
    may_add: Vec<ServiceName>,
    /// What happens where nobody serves a box.
    #[serde(default)]
    missing: Missing,
    /// Order is kept while boxes of such sessions are changed, or a proxy leaves them.
    #[serde(default)]
    ordered: bool,
}

/// Ports of a service: one, or from one to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ports {
    /// The first one.
    pub first: u16,
    /// The last one.
    pub last: u16,
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let one = |text: &str| port_number(text.trim());
        Ok(Self { first: one(first)?, last: one(last)? })
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Missing {
    /// Sessions are refused.
    #[default]
    Refuse,
    /// They go on without it.
    Bypass,
}

/// `[[require]]`
#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct RequireSection {
    /// The service, or `*.authority`.
    name: String,
    /// Boxes that its sessions must have passed.
    boxes: Vec<ServiceName>,
}

fn ports<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Ports>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "write a port, as 80, or ports, as \"8000-8999\"")]
    enum Written {
        Number(u16),
        Text(String),
    }
    let text = match Written::deserialize(from)? {
        Written::Number(number) => number.to_string(),
        Written::Text(text) => text,
    };
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

fn time<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(from)?;
    let parsed = humantime::parse_duration(&text);
    parsed.map(Some).map_err(|error| serde::de::Error::custom(format!("{error}; write for example \"30s\" or \"1h\"")))
}

impl Policy {
    #[expect(clippy::result_large_err, reason = "made once, and shown")]
    fn parse(text: &str, path: &Path) -> Result<Self, Misread> {
        misread::read(
            text,
            path,
            "a policy has [[route]], [[grant]], [[chain]] and [[require]] sections; docs/book/routing.md and \
             docs/book/chains.md show some",
        )
    }

    /// What the agent is asked for. The file's text and path are for errors.
    #[expect(clippy::result_large_err, reason = "made once, and shown")]
    fn request(self, dry_run: bool, (text, path): (&str, &Path)) -> Result<PolicyApplyRequest, Misread> {
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
        let chain = |section: ChainSection| {
            let at = section.filter.as_ref().map(Spanned::span);
            section.declared().map_err(|what| {
                let advice = "it is written as for tcpdump, `man pcap-filter` has the words; docs/book/chains.md says \
                              what it is run on";
                Misread::new(text, path, what, at, advice.to_owned())
            })
        };
        let chains = self.chain.map(|all| all.into_iter().map(chain).collect::<Result<_, _>>()).transpose()?;
        Ok(PolicyApplyRequest {
            routes: self.route.map(|all| PolicyRoutes { routes: all.into_iter().map(route).collect() }),
            grants: self.grant.into_iter().map(grant).collect(),
            dry_run,
            chains: chains.map(|chains| PolicyChains { chains }),
            required: self
                .require
                .map(|all| PolicyRequirements { required: all.into_iter().map(RequireSection::declared).collect() }),
        })
    }
}

fn written(names: Vec<ServiceName>) -> Vec<String> {
    names.into_iter().map(|name| name.0.written().to_owned()).collect()
}

impl ChainSection {
    /// # Errors
    ///
    /// What is wrong with its filter.
    fn declared(self) -> Result<PolicyChain, String> {
        let filter = self.filter.map(Spanned::into_inner);
        let filter_program = filter.as_deref().map(filter::compile).transpose()?.unwrap_or_default();
        let filter = filter.unwrap_or_default();
        Ok(PolicyChain {
            name: self.name,
            services: self.services,
            protocol: self.protocol.map(Protocol::label).unwrap_or_default().to_owned(),
            first_port: self.port.map_or(0, |ports| ports.first.into()),
            last_port: self.port.map_or(0, |ports| ports.last.into()),
            clients: self.from,
            boxes: written(self.through),
            bypass: self.missing == Missing::Bypass,
            proxies: written(self.proxies),
            may_add: written(self.may_add),
            filter_program,
            filter,
            ordered: self.ordered,
        })
    }
}

impl RequireSection {
    fn declared(self) -> PolicyRequirement {
        PolicyRequirement { services: self.name, boxes: written(self.boxes) }
    }
}

pub async fn policy(mut client: Client, verb: PolicyVerb, out: &mut Out) -> Result<()> {
    let PolicyVerb::Apply(args) = verb;
    let text = fs::read_to_string(&args.file).into_diagnostic();
    let text = text.wrap_err_with(|| format!("cannot read the policy in {}", args.file.display()))?;
    let request = Policy::parse(&text, &args.file)?.request(args.dry_run, (&text, &args.file))?;
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
    for warning in &reply.warnings {
        out.line(&format!("warning: {warning}"))?;
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

    fn asked_for(text: &str, dry_run: bool) -> Result<PolicyApplyRequest, String> {
        let asked = parse(text)?.request(dry_run, (text, Path::new("p.toml")));
        asked.map_err(|error| format!("{error} at {:?}", error.pointed()))
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
        let request = asked_for(text, true).expect("fine");
        let routes = request.routes.expect("declared").routes;
        assert_eq!((routes.len(), &routes[0].to[..]), (2, &["10.0.0.1".to_owned(), "10.0.0.2".to_owned()][..]));
        assert_eq!((routes[0].weight, routes[0].hard_timeout_ms, routes[1].weight), (Some(50), Some(600_000), None));
        assert_eq!((request.grants.len(), request.dry_run), (1, true));
        // Not to speak of rules is not to say that there are none.
        assert!(asked_for("", false).expect("fine").routes.is_none());
        assert_eq!(asked_for("route = []", false).expect("fine").routes.expect("declared").routes.len(), 0);
    }

    #[test]
    fn a_file_says_which_sessions_go_through_which_boxes() {
        let text = r#"
[[chain]]
name = "staff"
for = "web.shop"
protocol = "tcp"
port = "8000-8999"
from = ["group:staff"]
through = ["fw.shop", "IDS.shop"]
missing = "bypass"
proxies = ["ids.shop"]
ordered = true
may_add = ["log.shop", "AV.shop"]

[[chain]]
name = "rest"
for = "*.shop"
port = 80
through = []

[[require]]
name = "web.shop"
boxes = ["fw.shop"]
"#;
        let request = asked_for(text, false).expect("fine");
        let chains = request.chains.expect("declared").chains;
        let staff = PolicyChain {
            name: "staff".to_owned(),
            services: "web.shop".to_owned(),
            protocol: "tcp".to_owned(),
            first_port: 8000,
            last_port: 8999,
            clients: vec!["group:staff".to_owned()],
            boxes: vec!["fw.shop".to_owned(), "ids.shop".to_owned()],
            bypass: true,
            proxies: vec!["ids.shop".to_owned()],
            ordered: true,
            may_add: vec!["log.shop".to_owned(), "av.shop".to_owned()],
            ..PolicyChain::default()
        };
        assert_eq!(chains[0], staff);
        assert_eq!((chains[1].first_port, chains[1].last_port, chains[1].bypass), (80, 80, false));
        assert!(!chains[1].ordered);
        assert_eq!(request.required.expect("declared").required[0].boxes, ["fw.shop"]);
        let none = asked_for("", false).expect("fine");
        assert!(none.chains.is_none() && none.required.is_none(), "what is not spoken of is left alone");
        let gone = asked_for("chain = []", false).expect("fine");
        assert!(gone.chains.is_some_and(|all| all.chains.is_empty()) && gone.required.is_none());
    }

    #[test]
    fn a_filter_that_is_none_is_pointed_at() {
        let text = "[[chain]]\nname = \"a\"\nfor = \"web.shop\"\nthrough = []\nfilter = \" \"\n";
        let error = asked_for(text, false).expect_err("it is empty");
        assert!(error.contains("leave the word `filter` out") && error.contains("Some(\"\\\" \\\"\")"), "{error}");
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
            ("[[chain]]\nname = \"a\"\nfor = \"web.shop\"\n", "through"),
            ("[[chain]]\nname = \"a\"\nfor = \"web.shop\"\nthrough = [\"fw shop\"]\n", "fw shop"),
            ("[[chain]]\nname = \"a\"\nfor = \"web.shop\"\nthrough = []\nport = \"web\"\n", "`web` is no port"),
            ("[[chain]]\nname = \"a\"\nfor = \"web.shop\"\nthrough = []\nport = 0\n", "`0` is no port"),
            ("[[chain]]\nname = \"a\"\nfor = \"web.shop\"\nthrough = []\nport = []\n", "8000-8999"),
            ("[[chain]]\nname = \"a\"\nfor = \"web.shop\"\nthrough = []\nmissing = \"skip\"\n", "skip"),
            ("[[require]]\nname = \"web.shop\"\n", "boxes"),
            ("[[grant]]\nhost = \"1\"\n", "names"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(wanted) && error.contains("Some("), "{text}: {error}");
        }
    }
}
