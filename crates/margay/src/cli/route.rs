//! `margay route`.

use std::time::Duration;

use clap::{Args, Subcommand};
use margay_control::api::v1::*;
use miette::Result;
use serde_json::json;

use super::output::{count, span};
use super::{Client, Json, Out, refused};
use crate::listener::ServiceName;

#[derive(Subcommand)]
pub enum RouteVerb {
    /// The service table: what is done with first packets, where each rule is from, how often it was used, and what is
    /// left of its time
    List {
        /// Only the rules that cover this name, in the order in which they are asked
        name: Option<String>,
        #[command(flatten)]
        json: Json,
    },
    /// Add a rule of your own; for what listens on this host use `margay service publish`
    Add {
        /// What for: a name (web.shop), or a prefix (sid:HEX/BITS) of an authority that this host belongs to
        #[arg(value_name = "NAME")]
        name: ServiceName,
        #[command(subcommand)]
        action: ActionVerb,
    },
    /// Change a rule of your own; what is left out stays
    Change(ChangeArgs),
    /// Delete a rule of your own; connections that it made live on
    Delete {
        /// Its number in `margay route list`
        id: u64,
        #[command(flatten)]
        json: Json,
    },
}

#[derive(Subcommand)]
pub enum ActionVerb {
    /// Send first packets to a host or a router; of several addresses to one for each connection, by weight
    Forward {
        /// Next hops; without a port that of the SAL
        #[arg(value_name = "ADDRESS[:PORT]", value_delimiter = ',', required = true)]
        to: Vec<String>,
        /// Share among rules of the same priority; 0 takes no new connections
        #[arg(long, value_name = "NUMBER")]
        weight: Option<u32>,
        #[command(flatten)]
        terms: TermArgs,
    },
    /// Send a copy of each first packet to every one of several hosts or routers; who answers first has the connection
    ForwardAll {
        /// Next hops, eight at most; without a port that of the SAL
        #[arg(value_name = "ADDRESS[:PORT]", value_delimiter = ',', required = true)]
        to: Vec<String>,
        #[command(flatten)]
        terms: TermArgs,
    },
    /// Hold first packets until a resolver has said who serves the name
    Delay {
        /// Its name in the configuration
        #[arg(value_name = "RESOLVER")]
        resolver: String,
        #[command(flatten)]
        terms: TermArgs,
    },
    /// Discard first packets; programs of this host are refused at once
    Drop {
        #[command(flatten)]
        terms: TermArgs,
    },
}

#[derive(Args)]
pub struct TermArgs {
    /// Rules of a higher priority come first; those of a lower one take over where none of a higher one can
    #[arg(long, value_name = "NUMBER")]
    priority: Option<u32>,
    /// It ends when it has decided upon nothing for so long: 30s, 5m, 1h
    #[arg(long, value_name = "TIME", value_parser = time)]
    idle_timeout: Option<Duration>,
    /// It ends after so long, used or not
    #[arg(long, value_name = "TIME", value_parser = time)]
    hard_timeout: Option<Duration>,
    #[command(flatten)]
    json: Json,
}

#[derive(Args)]
pub struct ChangeArgs {
    /// Its number in `margay route list`
    id: u64,
    /// Where it leads
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    to: Option<String>,
    /// Share among rules of the same priority; 0 takes no new connections
    #[arg(long, value_name = "NUMBER")]
    weight: Option<u32>,
    /// Rules of a higher priority come first
    #[arg(long, value_name = "NUMBER")]
    priority: Option<u32>,
    /// It ends when it has decided upon nothing for so long, from now on; `none`: it does not
    #[arg(long, value_name = "TIME", value_parser = time_or_none)]
    idle_timeout: Option<Term>,
    /// It ends after so long, from now on; `none`: it does not
    #[arg(long, value_name = "TIME", value_parser = time_or_none)]
    hard_timeout: Option<Term>,
    #[command(flatten)]
    json: Json,
}

/// A time, or the word that there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Term {
    None,
    Time(Duration),
}

fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write for example 30s, 5m or 1h30m"))
}

fn time_or_none(text: &str) -> Result<Term, String> {
    if text == "none" { Ok(Term::None) } else { time(text).map(Term::Time) }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn term_ms(term: Option<Term>) -> Option<u64> {
    match term {
        Some(Term::Time(time)) => Some(millis(time)),
        Some(Term::None) | None => None,
    }
}

pub async fn route(client: Client, verb: RouteVerb, out: &mut Out) -> Result<()> {
    match verb {
        RouteVerb::List { name, json } => list(client, name, json, out).await,
        RouteVerb::Add { name, action } => add(client, &name, action, out).await,
        RouteVerb::Change(args) => change(client, args, out).await,
        RouteVerb::Delete { id, json } => delete(client, id, json, out).await,
    }
}

async fn list(mut client: Client, name: Option<String>, json: Json, out: &mut Out) -> Result<()> {
    let request = RouteListRequest { name: name.unwrap_or_default() };
    let reply = client.route_list(request).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    table(&reply.routes, out)?;
    reply.ended.iter().try_for_each(|ended| out.line(&ended_rule(ended)))?;
    reply.resolvers.iter().try_for_each(|resolver| out.line(&resolver_line(resolver)))
}

/// A resolver, in one line.
fn resolver_line(resolver: &ResolverInfo) -> String {
    let ResolverInfo { name, kind, asked, answered, failed, ms, trouble, writes } = resolver;
    let told = |trouble: &str| if trouble.is_empty() { String::new() } else { format!("; {trouble}") };
    let writes = writes.as_ref().map(|writes| {
        let ResolverWrites { names, failing, trouble, .. } = writes;
        format!("; written there: {}, {failing} failed{}", count(*names, "name"), told(trouble))
    });
    let trouble = format!("{}{}", told(trouble), writes.unwrap_or_default());
    match ms.checked_div(*asked) {
        None => format!("resolver {name} ({kind}): not asked yet{trouble}"),
        Some(ms) => {
            format!(
                "resolver {name} ({kind}): asked {}, {answered} answered, {failed} not, {ms} ms each{trouble}",
                count(*asked, "time")
            )
        }
    }
}

/// A rule that has ended by itself, in one line.
pub(super) fn ended_rule(ended: &EndedRouteInfo) -> String {
    let EndedRouteInfo { route, why, ended_ms_ago } = ended;
    let route = &route.clone().unwrap_or_default();
    let reason = match (why.as_str(), route.idle_timeout_ms, route.hard_timeout_ms) {
        ("idle", Some(idle), _) => format!("it decided upon nothing for {}", span(Duration::from_millis(idle))),
        (_, _, Some(hard)) => format!("its time of {} is over", span(Duration::from_millis(hard))),
        _ => "its time was over".to_owned(),
    };
    let to = if route.to.is_empty() { String::new() } else { format!(" to {}", route.to) };
    let ago = span(Duration::from_millis(*ended_ms_ago));
    format!("rule {} ({} of {}{to}) ended {ago} ago: {reason}", route.id, route.action, of(route))
}

async fn add(mut client: Client, name: &ServiceName, action: ActionVerb, out: &mut Out) -> Result<()> {
    let (action, to, weight, terms) = match action {
        ActionVerb::Forward { to, weight, terms } => ("forward", to, weight, terms),
        ActionVerb::ForwardAll { to, terms } => ("forward-all", to, None, terms),
        ActionVerb::Delay { resolver, terms } => ("delay", vec![resolver], None, terms),
        ActionVerb::Drop { terms } => ("drop", Vec::new(), None, terms),
    };
    let request = RouteAddRequest {
        name: name.to_string(),
        action: action.to_owned(),
        to,
        weight,
        priority: terms.priority,
        idle_timeout_ms: terms.idle_timeout.map(millis),
        hard_timeout_ms: terms.hard_timeout.map(millis),
    };
    let reply = client.route_add(request).await.map_err(refused)?.into_inner();
    if terms.json.json {
        return out.json(&reply);
    }
    table(&reply.routes, out)?;
    reply.warnings.iter().try_for_each(|warning| out.line(&format!("note: {warning}")))
}

async fn change(mut client: Client, args: ChangeArgs, out: &mut Out) -> Result<()> {
    let request = RouteChangeRequest {
        id: args.id,
        to: args.to.unwrap_or_default(),
        weight: args.weight,
        priority: args.priority,
        idle_timeout_ms: term_ms(args.idle_timeout),
        hard_timeout_ms: term_ms(args.hard_timeout),
        no_idle_timeout: args.idle_timeout == Some(Term::None),
        no_hard_timeout: args.hard_timeout == Some(Term::None),
    };
    let route = client.route_change(request).await.map_err(refused)?.into_inner();
    if args.json.json { out.json(&route) } else { table(&[route], out) }
}

async fn delete(mut client: Client, id: u64, json: Json, out: &mut Out) -> Result<()> {
    client.route_delete(RouteDeleteRequest { id }).await.map_err(refused)?;
    let sentence = format!("rule {id} is deleted; connections that it made live on");
    out.done(json.json, &json!({ "id": id }), &sentence)
}

fn table(routes: &[RouteInfo], out: &mut Out) -> Result<()> {
    let header = ["ID", "FOR", "ACTION", "TO", "HOST", "PRIORITY", "WEIGHT", "FROM", "AGE", "LEFT", "PACKETS", "LAST"];
    let rows = routes.iter().map(row).collect();
    out.table(&header, rows, "no rules: nothing is published here, and no router is known")
}

/// What a rule is for.
pub(super) fn of(route: &RouteInfo) -> String {
    if route.name.is_empty() { shortened(&route.prefix) } else { route.name.clone() }
}

/// Where a rule leads, and for what alone.
pub(super) fn place(route: &RouteInfo) -> String {
    let port = match (route.service_port, route.protocol.as_str()) {
        (0, "") => String::new(),
        (0, protocol) => format!(" ({protocol})"),
        (port, "") => format!(" (port {port})"),
        (port, protocol) => format!(" ({protocol} port {port})"),
    };
    format!("{}{port}", route.to)
}

/// Where a rule is from.
fn origin(route: &RouteInfo) -> String {
    if route.sites.is_empty() {
        route.origin.clone()
    } else {
        format!("{} by {}", route.origin, route.sites.join(" > "))
    }
}

fn row(route: &RouteInfo) -> Vec<String> {
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let host =
        if route.host_name.is_empty() { route.host_id.chars().take(12).collect() } else { route.host_name.clone() };
    vec![
        route.id.to_string(),
        of(route),
        route.action.clone(),
        or_dash(&place(route)),
        or_dash(&host),
        route.priority.to_string(),
        route.weight.to_string(),
        origin(route),
        span(Duration::from_millis(route.age_ms)),
        or_dash(&left(route)),
        route.packets.to_string(),
        route.used_ms_ago.map_or_else(|| "never".to_owned(), |ago| format!("{} ago", span(Duration::from_millis(ago)))),
    ]
}

/// What is left of a rule's time: empty where it does not end by itself.
fn left(route: &RouteInfo) -> String {
    let whole = |ms: u64| span(Duration::from_secs(ms.div_ceil(1000)));
    let idle = route.idle_left_ms.map(|ms| format!("{} idle", whole(ms)));
    let hard = route.hard_left_ms.map(whole);
    idle.into_iter().chain(hard).collect::<Vec<_>>().join(", ")
}

/// The digits that say something: a prefix has 64, most of them zero or more than anybody reads.
fn shortened(prefix: &str) -> String {
    let Some((digits, bits)) = prefix.split_once('/') else { return prefix.chars().take(20).collect() };
    match bits {
        "0" => "everything".to_owned(),
        _ => format!("{}…/{bits}", digits.chars().take(20).collect::<String>()),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_rule_in_one_line() {
        let route = RouteInfo {
            prefix: format!("sid:{}/256", "ab".repeat(32)),
            action: "demux".to_owned(),
            to: "0.0.0.0:80".to_owned(),
            service_port: 80,
            protocol: "tcp".to_owned(),
            priority: 100,
            weight: 1,
            origin: "published".to_owned(),
            age_ms: 61_000,
            packets: 7,
            used_ms_ago: Some(2_000),
            id: 3,
            ..RouteInfo::default()
        };
        let cells = row(&route).join("|");
        let wanted = "3|sid:abababababababab…/256|demux|0.0.0.0:80 (tcp port 80)|-|100|1|published|1m 1s|-|7|2s ago";
        assert_eq!(cells, wanted);
        let default = RouteInfo { prefix: "sid:/0".to_owned(), name: String::new(), used_ms_ago: None, ..route };
        assert_eq!((row(&default)[1].as_str(), row(&default)[11].as_str()), ("everything", "never"));
    }

    #[test]
    fn what_is_left_and_why_it_ended() {
        let route = RouteInfo {
            name: "web.shop".to_owned(),
            action: "drop".to_owned(),
            id: 9,
            idle_timeout_ms: Some(30_000),
            idle_left_ms: Some(27_100),
            hard_timeout_ms: Some(3_600_000),
            hard_left_ms: Some(3_599_999),
            ..RouteInfo::default()
        };
        assert_eq!(left(&route), "28s idle, 1h");
        let ended = |why: &str, ended_ms_ago| {
            ended_rule(&EndedRouteInfo { route: Some(route.clone()), why: why.to_owned(), ended_ms_ago })
        };
        let idle = "rule 9 (drop of web.shop) ended 2s ago: it decided upon nothing for 30s";
        assert_eq!(ended("idle", 2_000), idle);
        assert_eq!(ended("hard", 500), "rule 9 (drop of web.shop) ended 500ms ago: its time of 1h is over");
    }

    #[test]
    fn a_resolver_in_one_line() {
        let idle = ResolverInfo { name: "hosts".to_owned(), kind: "static".to_owned(), ..ResolverInfo::default() };
        assert_eq!(resolver_line(&idle), "resolver hosts (static): not asked yet");
        let busy = ResolverInfo { asked: 4, answered: 3, failed: 1, ms: 22, trouble: "gone".to_owned(), ..idle };
        let wanted = "resolver hosts (static): asked 4 times, 3 answered, 1 not, 5 ms each; gone";
        assert_eq!(resolver_line(&busy), wanted);
        let writes =
            ResolverWrites { names: 2, failing: 1, trouble: "refused".to_owned(), ..ResolverWrites::default() };
        let both = ResolverInfo { writes: Some(writes), ..busy };
        assert_eq!(resolver_line(&both), format!("{wanted}; written there: 2 names, 1 failed; refused"));
    }

    #[test]
    fn times_as_people_write_them() {
        assert_eq!(time_or_none("none"), Ok(Term::None));
        assert_eq!(time_or_none("90s"), Ok(Term::Time(Duration::from_secs(90))));
        assert!(time("soon").expect_err("refused").contains("30s"));
    }
}
