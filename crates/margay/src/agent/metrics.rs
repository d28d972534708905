//! What the agent counts, as OpenMetrics text: `/metrics`, and `margay` itself.

mod admitted;
pub(super) mod ensembles;

use std::fmt::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use margay_control::wide_area::WideArea;
use margay_control::{registration, resolver};
use margay_core::reconfiguration::{Durations, Edit, ReconfigurationOutcome};
use margay_core::stack_rule::StackRuleInfo;
use margay_core::{AssociationInfo, Counters, DropReason, RemoveReason, SHARED_TABLES, Sal, share_refusals};
use margay_datapath::meaning;
use margay_wire::Kind;
use miette::{Result, miette};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use self::admitted::Admitted;
use super::{Agent, rebalance, relocation};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves `/metrics`.
#[derive(Default)]
pub struct Server(Mutex<Option<(SocketAddr, JoinHandle<()>)>>);

impl Server {
    /// Serves them at an address, or nowhere, from now on.
    ///
    /// # Errors
    ///
    /// The address cannot be had; they are served where they were before.
    pub async fn listen(&self, agent: &Arc<Agent>, at: Option<SocketAddr>) -> Result<()> {
        let mut running = self.0.lock().await;
        let before = running.as_ref().map(|(at, _)| *at);
        if before == at {
            return Ok(());
        }
        // First: the two may share a port, where one is any address of the host.
        end(running.take()).await;
        let result = match at {
            Some(at) => serve(agent, at).await.map(|task| *running = Some((at, task))),
            None => Ok(()),
        };
        if result.is_err()
            && let Some(before) = before
        {
            match serve(agent, before).await {
                Ok(task) => *running = Some((before, task)),
                Err(error) => tracing::error!(%error, "metrics are no longer served"),
            }
        }
        result
    }

    /// Serves them no more.
    pub async fn end(&self) {
        end(self.0.lock().await.take()).await;
    }
}

async fn end(running: Option<(SocketAddr, JoinHandle<()>)>) {
    if let Some((_, task)) = running {
        task.abort();
        // The socket is closed when it has ended, which it was told to.
        let _ = task.await;
    }
}

async fn serve(agent: &Arc<Agent>, listen: SocketAddr) -> Result<JoinHandle<()>> {
    let listener = TcpListener::bind(listen).await.map_err(|error| {
        miette!("metrics cannot be served at {listen}: {error}; correct [metrics] listen in the configuration")
    })?;
    let agent = Arc::downgrade(agent);
    let answer = move || {
        let agent = agent.upgrade();
        async move {
            let text = match agent {
                Some(agent) => text(&agent).await,
                None => String::new(),
            };
            ([(CONTENT_TYPE, OPENMETRICS)], text)
        }
    };
    let app = Router::new().route("/metrics", get(answer));
    Ok(tokio::spawn(async move {
        if let Err(error) = axum::serve(Admitted::new(listener), app).await {
            tracing::warn!(%error, "metrics are no longer served");
        }
    }))
}

/// All of it, now.
pub async fn text(agent: &Arc<Agent>) -> String {
    let ensembles = ensembles::shown(&agent.config().host.runtime_dir).await;
    encoded(Figures { agent: Some(Arc::clone(agent)), ensembles: Some(ensembles) })
}

/// The same without an agent: every metric that there is, at zero.
#[cfg(test)]
pub fn catalogue() -> String {
    encoded(Figures { agent: None, ensembles: None })
}

fn encoded(figures: Figures) -> String {
    let mut registry = Registry::with_prefix("margay");
    registry.register_collector(Box::new(figures));
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
    text
}

/// Drops of the core, of the datapath and of the kernel's service router together, by reason.
pub fn drops(agent: &Agent) -> Vec<(&'static str, u64)> {
    let of_datapath = agent.core.0.counters();
    let of_core = agent.core.0.with_sal(|sal, _| sal.counters().clone());
    let all = |reason: &DropReason| {
        let drops = of_core.drops(*reason) + of_datapath.drops(*reason) + agent.kernel.router.drops(*reason);
        (reason.label(), drops)
    };
    DropReason::ALL.iter().map(all).collect()
}

struct Figures {
    /// `None`: of no agent, for the list of all that there is.
    agent: Option<Arc<Agent>>,
    /// What the switches of this host show.
    ensembles: Option<Vec<Value>>,
}

impl std::fmt::Debug for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Figures")
    }
}

/// Rows of one metric: the value of its label, and the count.
type Rows = Vec<(String, u64)>;

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let agent = self.agent.as_deref();
        let core = agent.map(|agent| agent.core.0.with_sal(|sal, _| sal.counters().clone())).unwrap_or_default();
        let by_kernel = agent.map_or(0, |agent| agent.kernel.router.forwarded());
        gauges(agent, &mut encoder)?;
        for (name, help, value) in [
            ("cookies", "Cookies asked for under load", core.cookies_sent),
            ("connects_failed", "Connects of programs that failed", core.connects_failed),
            ("forwarded", "First packets forwarded for others", core.forwarded + by_kernel),
            ("relayed", "Answers relayed for others", core.relayed),
            ("stripes", "Times that a flow began to go by several pairs of addresses", core.stripes),
            (
                "policies_refused",
                "Flows that could not have the policy of their name, and go as others do",
                core.policies_refused,
            ),
            ("moves", "Times that a peer and this host, or one of their flows, changed addresses", core.moves),
            (
                "elsewhere",
                "Proved messages of set-up from another place than where their sender's flows go",
                core.elsewhere,
            ),
            (
                "traces_refused",
                "Questions of other hosts about first packets that were refused",
                agent.map_or(0, traces_refused),
            ),
            (
                "sockets_handed_over",
                "Sockets that one program of this host has given to another",
                agent.map_or(0, |agent| agent.connections.programs.handed_over()),
            ),
            ("rules_expired", "Rules of the service table that ended by themselves", core.rules_expired),
            ("packets_held", "First packets that waited for a resolver", core.delayed),
            ("packets_not_held", "First packets refused since too many waited for resolvers", core.delays_refused),
            ("questions", "Questions to resolvers", core.questions),
            ("questions_failed", "Questions to resolvers that brought nothing", core.questions_failed),
            ("answers_late", "Answers of resolvers that nothing waited for any more", core.answers_late),
            ("resets", "TCP connections of programs reset because their flow failed", core.resets),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(value).encode(metric)?;
        }
        of_shares(agent, &mut encoder)?;
        of_relocations(agent, &mut encoder)?;
        of_rebalances(agent, &mut encoder)?;
        of_stacks(agent, &mut encoder)?;
        of_associations(&core, &mut encoder)?;
        of_grants(&core, &mut encoder)?;
        of_chains(agent, &core, &mut encoder)?;
        of_segments(&core, &mut encoder)?;
        carried(agent, &mut encoder)?;
        of_signalling(&core, &mut encoder)?;
        of_leases(agent, &mut encoder)?;
        of_responder(agent, &mut encoder)?;
        of_resolvers(agent, &mut encoder)?;
        if agent.is_none_or(|agent| agent.routing.router.is_some()) {
            of_router(agent.and_then(|agent| agent.routing.router.as_deref()), &mut encoder)?;
        }
        of_cluster(agent, &mut encoder)?;
        if agent.is_none_or(|agent| agent.routing.area.is_some()) {
            of_area(agent.and_then(|agent| agent.routing.area.as_deref()), &mut encoder)?;
        }
        let dropped = agent.map_or_else(|| DropReason::ALL.iter().map(|reason| (reason.label(), 0)).collect(), drops);
        family(&mut encoder, "drops", "Packets dropped", "reason", owned(dropped))?;
        ensembles::encode(self.ensembles.as_deref(), &mut encoder)
    }
}

fn of_cluster(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    if agent.is_some_and(|agent| agent.routing.cluster.is_none()) {
        return Ok(());
    }
    let cluster = agent.and_then(|agent| agent.routing.cluster.as_deref());
    let rows = cluster.map_or_else(unlabelled, |cluster| cluster.counts().to_vec());
    family(encoder, "etcd", "What happened between this router and etcd", "act", owned(rows))
}

/// Peers that wanted more than their share of what is bounded.
fn of_shares(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let of_core = agent.map(|agent| agent.core.0.with_sal(|sal, _| share_refusals(sal))).unwrap_or_default();
    let streams = agent.map_or(0, |agent| agent.connections.relocations.refused());
    let rows = SHARED_TABLES.into_iter().zip(of_core).chain([("hand_over_streams", streams)]).collect();
    let help = "Times that a peer was refused more than its share of a table or a buffer";
    family(encoder, "share_refused", help, "table", owned(rows))
}

/// Connections that were to go to another host, or to come from one.
fn of_relocations(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let counts = agent.map_or_else(relocation::no_counts, |agent| agent.connections.relocations.counts());
    let help = "Connections of programs that were to go to another host, or to come from one";
    let mut descriptor = encoder.encode_descriptor("hand_overs", help, None, MetricType::Counter)?;
    for ([role, outcome], count) in counts {
        let labels = [("role", role), ("outcome", outcome)];
        let metric = descriptor.encode_family(&labels)?;
        ConstCounter::new(count).encode(metric)?;
    }
    Ok(())
}

/// Connections that programs were asked for, since another instance had fewer than its share.
fn of_rebalances(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let counts = agent.map_or_else(rebalance::no_counts, |agent| agent.connections.rebalances.counts());
    let help = "Connections that programs were asked to give to instances with fewer than their share";
    let mut descriptor = encoder.encode_descriptor("rebalance_moves", help, None, MetricType::Counter)?;
    for ([service, outcome], count) in counts {
        let labels = [("service", service.as_str()), ("outcome", outcome.as_str())];
        let metric = descriptor.encode_family(&labels)?;
        ConstCounter::new(count).encode(metric)?;
    }
    Ok(())
}

/// A figure between this host and a peer, where it is known.
type FigureOfPath<'a> = &'a dyn Fn(&AssociationInfo) -> Option<f64>;

/// What is measured between this host and its peers: of those alone of which something is known.
fn gauges_of_paths(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let paths = agent.map(|agent| agent.core.0.with_sal(|sal, _| sal.paths())).unwrap_or_default();
    let share = |ppm: Option<u32>| ppm.map(|ppm| f64::from(ppm) / 1e6);
    let figures: [(&str, &str, FigureOfPath<'_>); 3] = [
        ("path_loss_ratio", "Share of datagrams lost, of the flow with the peer that loses most", &|path| {
            share(path.loss_ppm)
        }),
        ("path_reordered_ratio", "Share of datagrams that come behind a later one, of the worst flow", &|path| {
            share(path.timing.reordered_ppm)
        }),
        ("path_jitter_seconds", "By how much the time varies that datagrams take, of the worst flow", &|path| {
            path.timing.jitter_us.map(|us| f64::from(us) / 1e6)
        }),
    ];
    for (name, help, figure) in figures {
        let mut descriptor = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        if agent.is_none() {
            let labels = [("peer", "")];
            let metric = descriptor.encode_family(&labels)?;
            ConstGauge::new(0.0).encode(metric)?;
        }
        for path in &paths {
            let Some(value) = figure(path) else { continue };
            let peer = path.host.to_string();
            let labels = [("peer", peer.as_str())];
            let metric = descriptor.encode_family(&labels)?;
            ConstGauge::new(value).encode(metric)?;
        }
    }
    Ok(())
}

/// Live flows' stacks: what has changed them, and what may.
fn of_stacks(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    of_stack_changes(agent, encoder)?;
    of_stack_rules(agent, encoder)
}

/// Changes of live flows' stacks.
fn of_stack_changes(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let counts = agent.map_or_else(|| vec![([""; 4], 0)], |agent| agent.process.watchers.stack_changes());
    let help = "Changes of live flows' stacks that are over";
    let mut descriptor = encoder.encode_descriptor("stack_changes", help, None, MetricType::Counter)?;
    for ([from, to, cause, outcome], count) in counts {
        let labels = [("from", from), ("to", to), ("cause", cause), ("outcome", outcome)];
        let metric = descriptor.encode_family(&labels)?;
        ConstCounter::new(count).encode(metric)?;
    }
    Ok(())
}

/// Rules of stacks: there are at most 256.
fn of_stack_rules(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let rules = agent.map(|agent| agent.core.0.with_sal(|sal, _| sal.stack_rules())).unwrap_or_default();
    let rows = |count: fn(&StackRuleInfo) -> u64| -> Rows {
        if agent.is_none() {
            return owned(unlabelled());
        }
        rules.iter().map(|info| (info.rule.number.to_string(), count(info))).collect()
    };
    let help = "Times that the condition of a stack rule was evaluated, since the rules were read";
    family(encoder, "stack_rule_evaluations", help, "rule", rows(|info| info.counts.evaluations))?;
    let help = "Times that the condition of a stack rule began to fail for a flow, since the rules were read";
    family(encoder, "stack_rule_failures", help, "rule", rows(|info| info.counts.failures))?;
    let help = "Seconds that looks at stack rules have taken, waits for the core included";
    let descriptor = encoder.encode_descriptor("stack_rule_time_seconds", help, None, MetricType::Counter)?;
    ConstCounter::new(agent.map_or(0.0, |agent| agent.process.watchers.judging().seconds())).encode(descriptor)
}

/// Messages between agents, and the ends of flows.
fn of_signalling(core: &Counters, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let kinds = |count: &dyn Fn(Kind) -> u64| -> Rows {
        Kind::ALL.iter().map(|kind| (format!("{kind:?}").to_lowercase(), count(*kind))).collect()
    };
    family(encoder, "messages_received", "Signalling received", "kind", kinds(&|kind| core.messages_received(kind)))?;
    family(encoder, "messages_sent", "Signalling sent", "kind", kinds(&|kind| core.messages_sent(kind)))?;
    let given_up = core.peers_given_up().to_vec();
    family(encoder, "peers_given_up", "Peers given up, with flows of programs here", "cause", owned(given_up))?;
    let removed = RemoveReason::ALL.iter().map(|reason| (reason.label().to_owned(), core.removals(*reason)));
    family(encoder, "flows_removed", "Flows that ended", "reason", removed.collect())
}

/// Of a family whose labels are not known without an agent.
fn unlabelled() -> Vec<(&'static str, u64)> {
    vec![("", 0)]
}

fn owned(rows: Vec<(&'static str, u64)>) -> Rows {
    rows.into_iter().map(|(value, count)| (value.to_owned(), count)).collect()
}

fn carried(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let counters = agent.map(|agent| agent.core.0.counters()).unwrap_or_default();
    let at_zero = |names: &mut dyn Iterator<Item = &'static str>| names.map(|name| (name, 0)).collect();
    let of_kernel = match agent {
        Some(agent) => agent.kernel.direct.counters(),
        None => at_zero(&mut meaning::names_of_cache()),
    };
    let of_router = match agent {
        Some(agent) => agent.kernel.router.kernel().map(|router| router.counters()).unwrap_or_default(),
        None => at_zero(&mut meaning::names_of_router()),
    };
    let datapath = counters.named().map(|(name, help, value)| ("datapath", name, help, value));
    let kernel = of_kernel.into_iter().map(|(name, value)| ("kernel", name, meaning::of_cache(name), value));
    let router = of_router.into_iter().map(|(name, value)| ("kernel_router", name, meaning::of_router(name), value));
    for (of, name, help, value) in datapath.chain(kernel).chain(router) {
        let name = format!("{of}_{name}");
        let metric = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
        ConstCounter::new(value).encode(metric)?;
    }
    Ok(())
}

/// What became of wishes for virtual addresses.
fn of_leases(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let counts = agent.map(|agent| agent.names.leases.counts()).unwrap_or_default();
    let help = "Virtual IPv4 addresses that went to another name, since all were leased";
    let metric = encoder.encode_descriptor("leases_taken_back", help, None, MetricType::Counter)?;
    ConstCounter::new(counts.taken_back).encode(metric)?;
    let help = "New names that got no virtual IPv4 address";
    let rows = [("rate", counts.too_fast), ("asker", counts.too_many), ("exhausted", counts.exhausted)];
    let rows = rows.map(|(reason, count)| (reason.to_owned(), count));
    family(encoder, "leases_refused", help, "reason", rows.into())
}

/// What became of questions to the DNS responder.
fn of_responder(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let counts = agent.and_then(|agent| agent.names.dns.as_ref()).map(|dns| dns.counters()).unwrap_or_default();
    let help = "Questions to the DNS responder, by what became of them; its process outlives the agent";
    let rows = [
        ("answered", counts.answered),
        ("remembered", counts.remembered),
        ("forwarded", counts.forwarded),
        ("refused", counts.refused),
        ("failed", counts.failed),
        ("malformed", counts.malformed),
        ("crowded", counts.crowded),
    ];
    family(encoder, "dns", help, "outcome", owned(rows.into()))
}

/// What became of associations that nothing used.
fn of_associations(core: &Counters, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let displaced = "Idle associations that had to make room for others";
    let expired = "Idle associations whose time was over";
    counters(
        encoder,
        &[
            ("associations_displaced", displaced, core.associations_displaced),
            ("associations_expired", expired, core.associations_expired),
        ],
    )
}

/// Connections that kernels set up by themselves.
fn of_grants(core: &Counters, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    counters(
        encoder,
        &[
            ("grants_asked", "Grants that this host has asked for", core.grants_asked),
            ("grants_given", "Grants that this host has given", core.grants_given),
            ("grants_ended", "Grants by which no flow is opened any more", core.grants_ended),
            ("grants_silent", "Grants of which no flow was answered", core.grants_silent),
            ("flows_granted", "Flows that kernels have set up by grants", core.flows_granted),
            (
                "flows_brief",
                "Flows set up by grants that were over before the agent was told of them",
                core.flows_brief,
            ),
        ],
    )
}

/// Sessions that pass boxes.
fn of_chains(agent: Option<&Agent>, core: &Counters, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let rules = agent.map_or(0, |agent| agent.core.0.with_sal(|sal, _| sal.chain_policy().rules.len()));
    let parted = agent.map_or(0, |agent| agent.core.0.with_sal(|sal, _| sal.parted_sessions()));
    let parted_help = "Sessions that end here and go two ways while a program between their ends leaves";
    each_gauge(
        encoder,
        &[("chain_rules", "Rules of chains that this host goes by", rules), ("sessions_parted", parted_help, parted)],
    )?;
    counters(
        encoder,
        &[
            ("chains_joined", "Sessions that have passed a box of this host", core.chains_joined),
            (
                "chains_refused",
                "Sessions refused at a box of this host: by the box, or since nobody was there to go on to",
                core.chains_refused,
            ),
            (
                "reconfigurations_locked",
                "Times that a change of a session's boxes found the session busy with another act",
                core.reconfigurations_locked,
            ),
            ("programs_left", "Times that a program here has left between two connections", core.splices_done),
            ("programs_stayed", "Times that a program here was to leave and has not", core.splices_failed),
        ],
    )?;
    let help = "Changes of running sessions' boxes that were ordered or led here and are over";
    let mut descriptor = encoder.encode_descriptor("reconfigurations", help, None, MetricType::Counter)?;
    for (act, counts) in Edit::LABELS.into_iter().zip(core.reconfigurations) {
        for (outcome, count) in ReconfigurationOutcome::LABELS.into_iter().zip(counts) {
            let labels = [("act", act), ("outcome", outcome)];
            let metric = descriptor.encode_family(&labels)?;
            ConstCounter::new(count).encode(metric)?;
        }
    }
    let help = "Orders of other hosts on the boxes of sessions of programs here that are over";
    let mut descriptor = encoder.encode_descriptor("orders_of_others", help, None, MetricType::Counter)?;
    for (outcome, count) in ReconfigurationOutcome::LABELS.into_iter().zip(core.orders_of_others) {
        ConstCounter::new(count).encode(descriptor.encode_family(&[("outcome", outcome)])?)?;
    }
    let help =
        "How long changes of running sessions' boxes have taken, from their first message until one way was left";
    let seconds = Some(&Unit::Seconds);
    let mut descriptor = encoder.encode_descriptor("reconfiguration_duration", help, seconds, MetricType::Histogram)?;
    for (outcome, durations) in ReconfigurationOutcome::LABELS.into_iter().zip(&core.reconfiguration_durations) {
        histogram(descriptor.encode_family(&[("outcome", outcome)])?, durations)?;
    }
    let help = "How long it has taken until programs here sent by the new way, from the first message of a change";
    let metric = encoder.encode_descriptor("reconfiguration_turn", help, seconds, MetricType::Histogram)?;
    histogram(metric, &core.reconfiguration_turns)
}

fn histogram(mut metric: MetricEncoder<'_>, durations: &Durations) -> Result<(), Error> {
    metric.encode_histogram::<NoLabelSet>(durations.sum_s(), durations.count(), &durations.classes(), None)
}

/// Counters without a label: name, help, value.
fn counters(encoder: &mut DescriptorEncoder<'_>, rows: &[(&str, &str, u64)]) -> Result<(), Error> {
    for (name, help, value) in rows {
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(*value).encode(metric)?;
    }
    Ok(())
}

/// What was asked and told on network segments.
fn of_segments(core: &Counters, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    for (name, help, value) in [
        ("searches", "Times that the network segments were asked for a router", core.searches),
        ("routers_found", "Answers to that by hosts that proved to be routers", core.routers_found),
        ("searches_answered", "Searches of other hosts that this router answered", core.searches_answered),
        ("notices_heard", "Words of other hosts about names that they serve, or no longer", core.notices_heard),
        (
            "notices_refused",
            "Words about names that were not believed: forged, without a right to the name, or too many",
            core.notices_refused,
        ),
        ("notices_used", "First packets that went to a host that was heard of", core.notices_used),
        (
            "notices_failed",
            "First packets for which the whole segment was asked, after the host that was heard of",
            core.notices_failed,
        ),
    ] {
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(value).encode(metric)?;
    }
    Ok(())
}

fn of_resolvers(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let all = agent.map(|agent| agent.routing.rules.resolvers.all()).unwrap_or_default();
    let rows = |figure: &dyn Fn(resolver::Figures) -> u64| -> Rows {
        let of_all = all.iter().map(|resolver| (resolver.name().to_owned(), figure(resolver.figures())));
        if agent.is_none() { owned(unlabelled()) } else { of_all.collect() }
    };
    let asked = "Questions that a resolver was asked";
    family(encoder, "resolver_asked", asked, "resolver", rows(&|figures| figures.asked))?;
    let answered = "Questions that a resolver answered with somebody who serves the name";
    family(encoder, "resolver_answered", answered, "resolver", rows(&|figures| figures.answered))?;
    let failed = "Questions that a resolver answered with nobody, or not at all";
    family(encoder, "resolver_failed", failed, "resolver", rows(&|figures| figures.failed))?;
    let reports =
        all.iter().filter_map(|one| Some((one.name().to_owned(), agent?.routing.rules.resolvers.report(one.name())?)));
    let reports: Vec<_> = reports.collect();
    let writes = |figure: &dyn Fn(&resolver::writer::Report) -> u64| -> Rows {
        let of_all = reports.iter().map(|(name, report)| (name.clone(), figure(report)));
        if agent.is_none() { owned(unlabelled()) } else { of_all.collect() }
    };
    let written = "Names of registrations written to a resolver, and taken away";
    family(encoder, "resolver_written", written, "resolver", writes(&|report| report.written))?;
    let not_written = "Names that could not be written, and are tried again";
    family(encoder, "resolver_not_written", not_written, "resolver", writes(&|report| report.failed))?;
    family(
        encoder,
        "resolver_ms",
        "Milliseconds that the questions to a resolver took, together",
        "resolver",
        rows(&|figures| figures.ms),
    )
}

fn of_router(router: Option<&registration::Router>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let help = "Partitions of services that went from one host to another";
    let metric = encoder.encode_descriptor("partitions_moved", help, None, MetricType::Counter)?;
    ConstCounter::new(router.map_or(0, registration::Router::partitions_moved)).encode(metric)?;
    let left = router.map_or_else(unlabelled, |router| router.instances_left().to_vec());
    let acts = router.map_or_else(unlabelled, registration::Router::audit_counts);
    family(encoder, "registrations", "Registrations, and refusals of all kinds", "act", owned(acts))?;
    family(encoder, "instances_left", "Instances that this router lists no longer", "reason", owned(left))
}

fn of_area(area: Option<&WideArea>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let counts = area.map_or_else(unlabelled, WideArea::counts);
    family(encoder, "announcements", "What was announced to other sites and by them", "act", owned(counts))?;
    let (neighbours, prefixes) = area.map(WideArea::sizes).unwrap_or_default();
    for (name, help, value) in [
        ("neighbours", "Routers of other sites whose streams are up", neighbours),
        ("prefixes_heard", "Prefixes that routers of other sites have announced", prefixes),
    ] {
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(metric)?;
    }
    Ok(())
}

/// By either end of a registration.
fn traces_refused(agent: &Agent) -> u64 {
    let by_router = agent.routing.router.as_ref().map_or(0, |router| router.traces_refused());
    agent.publishing.services.homes().iter().map(|home| home.traces_refused()).sum::<u64>() + by_router
}

/// How much there is of what.
fn gauges(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    gauges_of_resolvers(agent, encoder)?;
    gauges_of_flows(agent, encoder)?;
    gauges_of_paths(agent, encoder)?;
    gauges_of_programs(agent, encoder)?;
    of_health(agent, encoder)
}

/// Services that are checked, and what checks have brought.
fn of_health(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let services = agent.map_or_else(|| vec![(String::new(), true)], |agent| agent.publishing.health.all());
    let help = "1: a service of this host is well, 0: it is sick and takes no new flows";
    let mut descriptor = encoder.encode_descriptor("service_health", help, None, MetricType::Gauge)?;
    for (service, is_well) in services {
        let row = [("service", service.as_str())];
        let metric = descriptor.encode_family(&row)?;
        ConstGauge::new(i64::from(is_well)).encode(metric)?;
    }
    let counts = agent.map(|agent| agent.publishing.health.counts());
    let none = || [("succeeded", 0), ("failed", 0), ("timed_out", 0)];
    let help = "Checks of services of this host, by what they have brought";
    family(encoder, "health_checks", help, "outcome", owned(counts.unwrap_or_else(none).into()))
}

fn gauges_of_resolvers(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let held = agent.map(|agent| agent.core.0.with_sal(|sal, _| sal.held())).unwrap_or_default();
    let in_kernel = agent.and_then(|agent| agent.kernel.router.kernel());
    let [prefixes, lists, hops] = in_kernel.as_ref().map(|router| router.sizes()).unwrap_or_default();
    let table_bytes = in_kernel.as_ref().map_or(0, |router| router.table_bytes());
    let rows = [
        ("held_names", "Names whose first packets wait for a resolver", held.names),
        ("held_packets", "First packets that wait for a resolver", held.packets),
        ("held_bytes", "Bytes of first packets that wait for a resolver", held.bytes),
        ("held_packets_max", "Most first packets that ever waited for a resolver at once", held.packets_max),
        ("rules_resolved", "Rules that resolvers' answers have made", held.rules),
        ("kernel_router_prefixes", "Prefixes that the service router in the kernel knows", prefixes),
        ("kernel_router_table_bytes", "Bytes that the table of prefixes in the kernel takes", table_bytes),
        ("kernel_router_lists", "Prefixes with several instances that the service router in the kernel knows", lists),
        ("kernel_router_next_hops", "Hosts and routers that the service router in the kernel forwards to", hops),
    ];
    each_gauge(encoder, &rows)
}

fn gauges_of_flows(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let of = |figure: &dyn Fn(&Agent) -> usize| agent.map_or(0, figure);
    let of_core = |figure: &dyn Fn(&Sal) -> usize| of(&|agent| agent.core.0.with_sal(|sal, _| figure(sal)));
    let of_locks = of(&|agent| agent.core.0.with_sal(Sal::locked_sessions));
    let fullness = agent.map(|agent| agent.names.leases.fullness()).unwrap_or_default();
    let rows = [
        ("flows", "Flows of all kinds", of_core(&Sal::flow_count)),
        (
            "strangers",
            "Idle associations with peers that no authority trusted here vouches for",
            of_core(&Sal::stranger_count),
        ),
        ("grants", "Grants that this host has or gives, until they are forgotten", of_core(&Sal::grant_count)),
        ("flows_half_open", "Flows to this host whose peer is not proved yet", of_core(&Sal::half_open_count)),
        ("flows_cached", "Flows that the datapath carries without the core", of(&|agent| agent.core.0.cached_flows())),
        (
            "revocations",
            "Hosts that were put out of their authority, and keys that may sign for it no longer",
            of_core(&Sal::revocations),
        ),
        ("sessions_locked", "Sessions that an act has locked", of_locks),
        ("associations", "Hosts that this host shares keys with", of_core(&Sal::association_count)),
        ("leases", "Virtual IPv4 addresses that stand for names", fullness.leased),
        (
            "leases_idle",
            "Virtual IPv4 addresses without use for a day: new names may have them once the pool is used up",
            fullness.idle,
        ),
        ("leases_max", "Virtual IPv4 addresses in the pool", fullness.pool),
        ("services", "Services published by this host", of(&|agent| agent.publishing.services.list().len())),
        ("rules", "Rules of the service table", of_core(&Sal::rule_count)),
        (
            "names_heard",
            "Names that other hosts of the segment have said they serve, or no longer",
            of_core(&Sal::heard_count),
        ),
    ];
    each_gauge(encoder, &rows)
}

fn gauges_of_programs(agent: Option<&Agent>, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let of = |figure: &dyn Fn(&Agent) -> usize| agent.map_or(0, figure);
    let (programs, sockets, bound) = agent.map(|agent| agent.publishing.active.counts()).unwrap_or_default();
    let (names, instances) = agent.map(|agent| agent.kernel.spreads.counts()).unwrap_or_default();
    let cluster = agent.and_then(|agent| agent.routing.cluster.as_deref());
    let router = agent.and_then(|agent| agent.routing.router.as_deref());
    let rows = [
        ("programs", "Programs that were started for a name", programs),
        ("listening_sockets", "Sockets that listen, as the kernel says", sockets),
        ("bound_sockets", "Sockets that their programs have bound to names", bound),
        (
            "named_sockets",
            "Sockets of clients that have a name of their own",
            of(&|agent| agent.core.0.with_sal(|sal, _| sal.source_count())),
        ),
        (
            "program_connections",
            "Programs that are connected to the program socket",
            of(&|agent| agent.connections.programs.connections()),
        ),
        ("names_spread", "Names that programs here send unconnected datagrams to", names),
        ("instances_known", "Instances of names that programs here send unconnected datagrams to", instances),
        (
            "etcd_connected",
            "1: this router follows etcd",
            usize::from(cluster.is_some_and(|cluster| cluster.state().is_connected)),
        ),
        (
            "cluster_routers",
            "Routers of this router's cluster, itself among them",
            cluster.map_or(0, |cluster| cluster.routers().len()),
        ),
        (
            "cluster_routers_connected",
            "Other routers of this router's cluster that answer",
            router.map_or(0, |router| router.links().len()),
        ),
        ("hosts", "Hosts registered with this router", router.map_or(0, registration::Router::host_count)),
    ];
    each_gauge(encoder, &rows)
}

fn each_gauge(encoder: &mut DescriptorEncoder<'_>, rows: &[(&str, &str, usize)]) -> Result<(), Error> {
    for (name, help, value) in rows {
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::try_from(*value).unwrap_or(i64::MAX)).encode(metric)?;
    }
    Ok(())
}

fn family(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, label: &str, rows: Rows) -> Result<(), Error> {
    let mut descriptor = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (value, count) in rows {
        let row = [(label, value.as_str())];
        let metric = descriptor.encode_family(&row)?;
        ConstCounter::new(count).encode(metric)?;
    }
    Ok(())
}
