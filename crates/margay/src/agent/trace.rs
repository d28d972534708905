//! What a first packet would meet, hop by hop, and why: this host's own part, and who is asked for the rest.
//!
//! Each host explains itself. It asks the next one over the registration between the two, so an answer comes from
//! whoever would decide, and only of names of that registration's authority. Nothing is sent to the name, and no rule
//! counts it.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use margay_control::api::v1::{EndedRouteInfo, RouteInfo, TraceHop, TraceRule};
use margay_control::registration::{HOPS_MAX, Question, TraceError, Tracer};
use margay_core::explain::{Probe, Unusable, Verdict};
use margay_core::key::HostId;
use margay_core::name::{Prefix, authority_block};
use margay_core::notice::Heard;
use margay_core::segment::SEGMENT;
use margay_core::table::resolver::ResolverId;
use margay_core::table::{Action, Allow, AllowItem, NextHop};
use margay_core::way::Sender;
use margay_datapath::clock;

use super::api::route::{Found, Known, ended_of};
use super::{Agent, core::CoreHandle};
use margay_control::quantity::{count_of, span};

/// How long all hops together may take to answer.
pub const LIMIT: Duration = Duration::from_secs(4);
/// So much sooner than its asker each hop stops waiting: the answer has a way to go.
const MARGIN: Duration = Duration::from_millis(200);
/// Rules of one hop that are told.
const RULES_MAX: usize = 24;
/// Rules that have ended and are told, of one hop.
const ENDED_MAX: usize = 4;

/// A rule that covers the name, and what becomes of it.
struct Considered {
    found: Found,
    verdict: Verdict,
}

/// What the core says of a packet, taken under its lock.
struct Explained {
    rules: Vec<Considered>,
    /// Of a forward: whether what is sent there can be tagged.
    is_hop_known: bool,
    /// Of a delay: how many packets for the name wait for a resolver.
    held: usize,
    /// Of a listener: whether the client may connect, where that can be known.
    may_connect: Option<bool>,
}

/// What comes after a hop.
enum Next {
    End,
    /// One, or all that get a copy.
    Hops(Vec<NextHop>),
}

/// Answers the questions of others about this host.
pub fn tracer(agent: &Arc<Agent>) -> Tracer {
    let agent: Weak<Agent> = Arc::downgrade(agent);
    Arc::new(move |question| {
        let agent = agent.upgrade();
        Box::pin(async move {
            match agent {
                Some(agent) => trace(&agent, question, false).await,
                None => Vec::new(),
            }
        })
    })
}

/// The hops from this host on. `own`: a program of this host sends the packet.
pub async fn trace(agent: &Agent, question: Question, own: bool) -> Vec<TraceHop> {
    let explained = explain(agent, &question, own);
    let (mut hop, next) = describe(agent, &question, own, &explained);
    let Next::Hops(to) = next else { return vec![hop] };
    if question.passed.len() >= HOPS_MAX {
        hop.act = "hop-limit".to_owned();
        hop.why = format!("{}; but the packet has passed {HOPS_MAX} hosts, and is discarded", hop.why);
        return vec![hop];
    }
    let mut hops = vec![hop];
    let mut ways = join_all(to.iter().map(|to| follow(agent, question.clone(), to, own))).await;
    // Of several copies, one that reaches the name is what the trace ends with.
    ways.sort_by_key(|way| way.last().is_some_and(|hop| hop.act == "deliver"));
    hops.extend(ways.into_iter().flatten());
    hops
}

fn explain(agent: &Agent, question: &Question, own: bool) -> Explained {
    let Question { service, protocol, port, sticky, .. } = *question;
    let client = question.passed.first().copied().filter(|_| !own).unwrap_or(agent.host.identity.host_id());
    agent.core.0.with_sal(|sal, _| {
        let sender = match &question.passed[..] {
            _ if own => Sender::Own,
            // Whose program sends it is no hop.
            [] | [_] => Sender::Host,
            [.., router] => {
                let there = sal.associations().find(|one| one.host == *router).map(|one| one.remote);
                there.map_or(Sender::Host, Sender::Router)
            }
        };
        let considered = sal.explain(&Probe { service, protocol, port, sticky, sender });
        let chosen = considered.iter().find(|one| one.verdict == Verdict::Chosen).map(|one| &one.rule.action);
        let (is_hop_known, may_connect) = match chosen {
            // What a program here sends needs no tag: its answers come straight back.
            Some(Action::Forward(hop) | Action::ForwardAll(hop)) => (own || sal.is_hop_known(hop), None),
            Some(Action::Demux(demux)) => (true, sal.may_connect(client, &service, &demux.allow)),
            Some(Action::Box(middlebox)) => (true, sal.may_connect(client, &service, &middlebox.allow)),
            Some(Action::Delay(_) | Action::Drop) | None => (true, None),
        };
        let found = |one: &margay_core::explain::Considered<'_>| Considered {
            found: Found::of(sal, one.prefix, one.id, one.rule),
            verdict: one.verdict,
        };
        let rules = considered.iter().map(found).collect();
        Explained { rules, is_hop_known, held: sal.held_for(&service), may_connect }
    })
}

/// This host as a hop, and what comes after it.
fn describe(agent: &Agent, question: &Question, own: bool, explained: &Explained) -> (TraceHop, Next) {
    let known = Known::of(agent, None, Some(&Prefix::from(question.service)));
    let mut hop = TraceHop {
        host_id: agent.host.identity.host_id().to_string(),
        host_name: agent.host.local.host_name.clone(),
        rules: told(&known, &explained.rules),
        ended: ended(agent, &known, question),
        ..TraceHop::default()
    };
    hop.rules_left_out = u32::try_from(explained.rules.len() - hop.rules.len()).unwrap_or(u32::MAX);
    let chosen = explained.rules.iter().find(|one| one.verdict == Verdict::Chosen);
    let Some(chosen) = chosen else {
        (hop.act, hop.why) = ("nobody".to_owned(), nobody(agent, own, explained));
        return (hop, Next::End);
    };
    let info = known.route(&chosen.found);
    let rule = named(&info);
    match &chosen.found.rule.action {
        Action::Drop => {
            (hop.act, hop.why) = ("discard".to_owned(), discarded(&rule, own));
            (hop, Next::End)
        }
        Action::Demux(demux) => {
            let to = format!("the listener at {}", demux.listener);
            (hop.act, hop.why) = delivered(&to, &demux.allow, &rule, explained.may_connect);
            (hop, Next::End)
        }
        Action::Box(middlebox) => {
            (hop.act, hop.why) = delivered("the box of that name", &middlebox.allow, &rule, explained.may_connect);
            (hop, Next::End)
        }
        Action::Delay(resolver) => {
            (hop.act, hop.why) = delayed(agent, &rule, *resolver, question, explained);
            hop.notes = answers(agent, question, explained);
            (hop, Next::End)
        }
        Action::Forward(next) => {
            (hop.act, hop.why) = ("forward".to_owned(), format!("sends it on to {} by {rule}", place(&info)));
            if let Some(heard) = heard_of(&agent.core, question).filter(|_| own && next.address == SEGMENT) {
                hop.notes.push(format!(
                    "before that, it asks the host {} at {} alone, which has said on the segment {} s ago that it \
                     serves the name",
                    heard.host,
                    heard.address,
                    clock::now().since(heard.at).as_secs()
                ));
            }
            if !explained.is_hop_known {
                hop.notes.push(format!(
                    "this router shares no key with a host at {}: what it sends there for others is not tagged, and \
                     answers do not find back",
                    next.address
                ));
            }
            (hop, Next::Hops(vec![*next]))
        }
        Action::ForwardAll(_) => {
            let copies = explained.rules.iter().filter(|one| one.verdict == Verdict::Chosen);
            let tell = |one: &Considered| {
                let info = known.route(&one.found);
                format!("{} by {}", place(&info), named(&info))
            };
            let told: Vec<String> = copies.clone().map(tell).collect();
            (hop.act, hop.why) = ("forward".to_owned(), format!("sends a copy to each of {}", told.join(", ")));
            (hop, Next::Hops(copies.filter_map(|one| one.found.rule.action.next_hop().copied()).collect()))
        }
    }
}

fn heard_of(core: &CoreHandle, question: &Question) -> Option<Heard> {
    core.0.with_sal(|sal, now| sal.heard_of(now, &question.service, question.sticky))
}

/// What becomes of a packet that waits for a resolver.
fn delayed(
    agent: &Agent,
    rule: &str,
    resolver: ResolverId,
    question: &Question,
    explained: &Explained,
) -> (String, String) {
    let name = agent.routing.rules.resolvers.name_of(resolver);
    if agent.core.0.with_sal(|sal, _| sal.had_no_answer(&question.service, resolver)) {
        let text = format!("refuses it by {rule}: the resolver {name} had no answer just now, and no other is left");
        return ("nobody".to_owned(), text);
    }
    let waiting = match explained.held {
        0 => String::new(),
        held => format!("; {} for the name waiting now", count_of(held, "packet")),
    };
    ("delay".to_owned(), format!("holds it by {rule} until the resolver {name} has said where it goes{waiting}"))
}

/// What the resolvers of a name's rules said of it last, and what is wrong with them.
fn answers(agent: &Agent, question: &Question, explained: &Explained) -> Vec<String> {
    let mut notes = Vec::new();
    for one in &explained.rules {
        let Action::Delay(id) = one.found.rule.action else { continue };
        let name = agent.routing.rules.resolvers.name_of(id);
        let Some(resolver) = agent.routing.rules.resolvers.get(id) else {
            notes.push(format!("there is no resolver {name} in the configuration: what it is asked fails at once"));
            continue;
        };
        notes.push(match resolver.last(&question.service) {
            None => format!("{name} has not been asked of this name yet"),
            Some(last) => {
                let what = match &last.what {
                    Ok(instances) => count_of(*instances, "instance"),
                    Err(error) => error.to_string(),
                };
                let (ago, took) = (last.at.elapsed().as_secs(), last.took.as_millis());
                format!("{name} was asked {ago}s ago and took {took} ms: {what}")
            }
        });
        notes.extend(resolver.trouble().map(|trouble| format!("{name}: {trouble}")));
    }
    notes
}

fn discarded(rule: &str, own: bool) -> String {
    let heard =
        if own { "its program is refused at once" } else { "its client hears nothing, and gives up after a while" };
    format!("discards it by {rule}; {heard}")
}

fn delivered(to: &str, allow: &Allow, rule: &str, may_connect: Option<bool>) -> (String, String) {
    let (act, who) = match may_connect {
        Some(true) => ("deliver", "its allow list lets the client in".to_owned()),
        Some(false) => ("refuse", "its allow list does not let the client in".to_owned()),
        None => ("deliver", format!("whether the client may connect shows when the two meet: {} may", allowed(allow))),
    };
    (act.to_owned(), format!("hands it to {to} by {rule}; {who}"))
}

fn allowed(allow: &Allow) -> String {
    let item = |item: &AllowItem| match item {
        AllowItem::Host(host) => format!("host {host}"),
        AllowItem::Group(_) => "a group of the authority's members".to_owned(),
        AllowItem::Authority(_) => "members of another authority that its list names".to_owned(),
    };
    match allow {
        Allow::Any => "everybody".to_owned(),
        Allow::Authority => "members of the name's authority".to_owned(),
        Allow::List(items) => items.iter().map(item).collect::<Vec<_>>().join(", "),
    }
}

fn nobody(agent: &Agent, own: bool, explained: &Explained) -> String {
    let refused = if own { "the program is refused at once" } else { "the client is told at once" };
    match (explained.rules.is_empty(), agent.routing.router.is_some()) {
        (false, _) => format!("no rule can take it; {refused}"),
        (true, true) => format!("nobody has registered the name here, and no rule covers it; {refused}"),
        (true, false) => {
            format!("no rule covers the name, since this host knows no router that it leads to; {refused}")
        }
    }
}

/// A rule with its origin and age, inside a sentence.
fn named(info: &RouteInfo) -> String {
    let origin = match info.origin.as_str() {
        "operator" => "the operator's".to_owned(),
        "router" => "the way to the router".to_owned(),
        "ad hoc" => "where no router knows better".to_owned(),
        "configured" => "of a [[resolver]] section".to_owned(),
        "registered" if !info.host_name.is_empty() => format!("registered by {}", info.host_name),
        "announced" => format!("announced by {}", announced(info)),
        other => other.to_owned(),
    };
    format!("rule {} ({origin})", info.id)
}

/// Whose router has announced a rule, and by which sites it leads from there.
fn announced(info: &RouteInfo) -> String {
    let age = span(Duration::from_secs(info.age_ms / 1000));
    match &info.sites[..] {
        [] => "another site".to_owned(),
        [site] => format!("{site}, {age} ago"),
        [site, on @ ..] => format!("{site}, {age} ago, which leads on to {}", on.join(", ")),
    }
}

/// Where a rule leads, inside a sentence.
fn place(info: &RouteInfo) -> String {
    match (info.host_name.as_str(), info.origin.as_str()) {
        ("", "router") => format!("the router at {}", info.to),
        ("", _) => info.to.clone(),
        (name, _) => format!("{name} ({})", info.to),
    }
}

/// The rules that are told: which decides, and of the others the first ones asked.
fn told(known: &Known<'_>, rules: &[Considered]) -> Vec<TraceRule> {
    let chosen = rules.iter().position(|one| one.verdict == Verdict::Chosen);
    let by = chosen.map(|at| &rules[at].found);
    let level: Vec<&Considered> =
        rules.iter().filter(|one| matches!(one.verdict, Verdict::Chosen | Verdict::NotPicked)).collect();
    let total: u64 = level.iter().map(|one| u64::from(one.found.rule.weight)).sum();
    let tell = |one: &Considered| TraceRule {
        route: Some(known.route(&one.found)),
        verdict: label(one.verdict).to_owned(),
        why: why(one, by, level.len(), total),
    };
    let is_told = |(at, _): &(usize, &Considered)| *at < RULES_MAX || Some(*at) == chosen;
    rules.iter().enumerate().filter(is_told).map(|(_, one)| tell(one)).collect()
}

const fn label(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Chosen => "chosen",
        Verdict::NotPicked => "not-picked",
        Verdict::Outranked => "outranked",
        Verdict::Shorter => "shorter",
        Verdict::Unusable(_) => "unusable",
    }
}

fn why(one: &Considered, by: Option<&Found>, level: usize, total: u64) -> String {
    let winner = by.map_or(0, |found| found.id.0);
    let rule = &one.found.rule;
    match one.verdict {
        Verdict::Chosen if matches!(rule.action, Action::ForwardAll(_)) => {
            "a copy goes by each of those that forward to all, of one prefix and priority".to_owned()
        }
        Verdict::Chosen if level > 1 => format!("picked by weight among {level}: it takes {} of {total}", rule.weight),
        Verdict::Chosen => "the longest prefix, and of that the highest priority that can take it".to_owned(),
        Verdict::NotPicked => {
            format!("would do as well: it takes {} of {total}; this one goes by rule {winner}", rule.weight)
        }
        Verdict::Outranked => format!("rule {winner} has a higher priority"),
        Verdict::Shorter => format!("rule {winner} has a longer prefix"),
        Verdict::Unusable(Unusable::NoWeight) => "weight 0: it takes no new connections".to_owned(),
        Verdict::Unusable(Unusable::Protocol) => "its listener is for the other protocol".to_owned(),
        Verdict::Unusable(Unusable::Port) => "its listener is for another port".to_owned(),
        Verdict::Unusable(Unusable::Inward) => {
            "it leads to a router above or beside this one, and the packet comes from one: such go to hosts and \
             routers below"
                .to_owned()
        }
        Verdict::Unusable(Unusable::Back) => "it leads to the router that the packet comes from".to_owned(),
        Verdict::Unusable(Unusable::Copies) => {
            "it makes copies, and the packet comes from a router: only the first host on its way makes them".to_owned()
        }
        Verdict::Unusable(Unusable::Unanswered) => "its resolver had no answer just now".to_owned(),
        Verdict::Unusable(Unusable::NotForOthers) => {
            "this host is no router: it sends on only what its own programs send".to_owned()
        }
    }
}

/// What else a reader may look for: rules that covered the name a while ago.
fn ended(agent: &Agent, known: &Known<'_>, question: &Question) -> Vec<EndedRouteInfo> {
    let ended = agent.routing.rules.ended().into_iter().filter(|ended| ended.rule.prefix.contains(&question.service));
    ended.take(ENDED_MAX).map(|ended| ended_of(known, &ended)).collect()
}

/// Asks whoever the packet goes to.
async fn follow(agent: &Agent, mut question: Question, to: &NextHop, own: bool) -> Vec<TraceHop> {
    let own_id = agent.host.identity.host_id();
    let Some(limit) = question.limit.checked_sub(MARGIN).filter(|left| *left > MARGIN) else {
        return vec![unasked(to.host, String::new(), to.address, "there is no time left to ask it")];
    };
    question.limit = limit;
    if !own {
        question.passed.push(own_id);
    }
    if to.address == SEGMENT {
        let text = "whoever serves the name on the network segments of this host may answer, and is not known before";
        return vec![TraceHop {
            host_name: "the segment".to_owned(),
            ..unasked(None, String::new(), to.address, text)
        }];
    }
    let Some((host, name)) = whose(agent, to) else {
        let text = "no host that is registered here, and no router of this host, is known at that address, so nobody \
            there can be asked";
        return vec![unasked(to.host, String::new(), to.address, text)];
    };
    // The first is whose program sends it; that host may get it back, and then it is for a listener there.
    if question.passed.iter().skip(1).any(|passed| *passed == host) {
        let text = "the packet has been here before: the hosts send it round until its hops are used up";
        return vec![TraceHop { act: "loop".to_owned(), ..unasked(Some(host), name, to.address, text) }];
    }
    match ask(agent, host, question).await {
        Ok(hops) if hops.is_empty() => vec![unasked(Some(host), name, to.address, "it has nothing to say")],
        Ok(hops) => hops,
        Err(error) => vec![unasked(Some(host), name, to.address, &error.to_string())],
    }
}

/// Names the hosts that a packet goes round by, where it does.
pub fn name_circle(hops: &mut [TraceHop]) {
    let Some((last, before)) = hops.split_last_mut().filter(|(last, _)| last.act == "loop") else { return };
    let Some(from) = before.iter().position(|hop| hop.host_id == last.host_id && hop.act == "forward") else { return };
    last.host_name.clone_from(&before[from].host_name);
    let round: Vec<&str> = before[from..].iter().chain([&*last]).map(|hop| hop.host_name.as_str()).collect();
    last.why = format!("{} ({})", last.why, round.join(" > "));
}

fn unasked(host: Option<HostId>, name: String, address: SocketAddr, why: &str) -> TraceHop {
    TraceHop {
        host_id: host.map(|host| host.to_string()).unwrap_or_default(),
        host_name: if name.is_empty() { address.to_string() } else { name },
        act: "unasked".to_owned(),
        why: why.to_owned(),
        ..TraceHop::default()
    }
}

/// The host at a next hop, and what people call it.
fn whose(agent: &Agent, to: &NextHop) -> Option<(HostId, String)> {
    let homes = agent.publishing.services.homes();
    let is_there = |host: HostId| match to.host {
        Some(known) => known == host,
        None => {
            agent.core.0.with_sal(|sal, _| sal.associations().any(|one| one.host == host && one.remote == to.address))
        }
    };
    if let Some(home) = homes.iter().find(|home| is_there(home.config().router_key.id())) {
        return Some((home.config().router_key.id(), home.config().router_address.clone()));
    }
    let registered = agent.routing.router.as_ref().and_then(|router| router.host_at(to.address));
    match (to.host, registered) {
        (Some(host), Some((found, name))) if found == host => Some((host, name)),
        // It has left just now; whoever is asked says so.
        (Some(host), _) => Some((host, String::new())),
        (None, registered) => registered,
    }
}

async fn ask(agent: &Agent, host: HostId, question: Question) -> Result<Vec<TraceHop>, TraceError> {
    let homes = agent.publishing.services.homes();
    let mut of_router: Vec<_> = homes.iter().filter(|home| home.config().router_key.id() == host).collect();
    // Of several authorities with one router it is asked under the name's, if there is that.
    of_router.sort_by_key(|home| authority_block(&home.config().authority) != question.service.authority());
    if let Some(home) = of_router.first() {
        return home.trace(question).await;
    }
    match &agent.routing.router {
        Some(router) => router.trace(host, &question).await,
        None => Err(TraceError::Down),
    }
}
