//! What the agent counts, as OpenMetrics text: `/metrics`, and `margay` itself.

use std::fmt::Error;
use std::sync::Arc;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use margay_control::wide_area::WideArea;
use margay_control::{registration, resolver};
use margay_core::{Counters, DropReason, RemoveReason};
use margay_wire::Kind;
use miette::{IntoDiagnostic, Result, WrapErr};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::Agent;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves `/metrics`, where the configuration says so.
///
/// # Errors
///
/// The address cannot be had.
pub async fn start(agent: &Arc<Agent>) -> Result<Option<JoinHandle<()>>> {
    let Some(listen) = agent.config.metrics.listen else { return Ok(None) };
    let listener = TcpListener::bind(listen).await.into_diagnostic();
    let listener = listener.wrap_err_with(|| {
        format!("metrics cannot be served at {listen}; correct [metrics] listen in the configuration")
    })?;
    let agent = Arc::clone(agent);
    let answer = move || {
        let text = text(&agent);
        async move { ([(CONTENT_TYPE, OPENMETRICS)], text) }
    };
    let app = Router::new().route("/metrics", get(answer));
    Ok(Some(tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            tracing::warn!(%error, "metrics are no longer served");
        }
    })))
}

/// All of it, now.
pub fn text(agent: &Arc<Agent>) -> String {
    let mut registry = Registry::with_prefix("margay");
    registry.register_collector(Box::new(Figures(Arc::clone(agent))));
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
        let drops = of_core.drops(*reason) + of_datapath.drops(*reason) + agent.kernel_router.drops(*reason);
        (reason.label(), drops)
    };
    DropReason::ALL.iter().map(all).collect()
}

struct Figures(Arc<Agent>);

impl std::fmt::Debug for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Figures")
    }
}

/// Rows of one metric: the value of its label, and the count.
type Rows = Vec<(String, u64)>;

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let agent = &self.0;
        let core = agent.core.0.with_sal(|sal, _| sal.counters().clone());
        gauges(agent, &mut encoder)?;
        for (name, help, value) in [
            ("cookies", "Cookies asked for under load", core.cookies_sent),
            ("connects_failed", "Connects of programs that failed", core.connects_failed),
            ("forwarded", "First packets forwarded for others", core.forwarded + agent.kernel_router.forwarded()),
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
            ("traces_refused", "Questions of other hosts about first packets that were refused", traces_refused(agent)),
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
        of_associations(&core, &mut encoder)?;
        of_grants(&core, &mut encoder)?;
        of_segments(&core, &mut encoder)?;
        carried(agent, &mut encoder)?;
        let kinds = |count: &dyn Fn(Kind) -> u64| -> Rows {
            Kind::ALL.iter().map(|kind| (format!("{kind:?}").to_lowercase(), count(*kind))).collect()
        };
        family(
            &mut encoder,
            "messages_received",
            "Signalling received",
            "kind",
            kinds(&|kind| core.messages_received(kind)),
        )?;
        family(&mut encoder, "messages_sent", "Signalling sent", "kind", kinds(&|kind| core.messages_sent(kind)))?;
        let removed = RemoveReason::ALL.iter().map(|reason| (reason.label().to_owned(), core.removals(*reason)));
        family(&mut encoder, "flows_removed", "Flows that ended", "reason", removed.collect())?;
        of_leases(agent, &mut encoder)?;
        of_resolvers(agent, &mut encoder)?;
        if let Some(router) = &agent.router {
            of_router(router, &mut encoder)?;
        }
        if let Some(cluster) = &agent.cluster {
            let help = "What happened between this router and etcd";
            let rows = cluster.counts().map(|(act, count)| (act.to_owned(), count));
            family(&mut encoder, "etcd", help, "act", rows.into())?;
        }
        if let Some(area) = &agent.area {
            of_area(area, &mut encoder)?;
        }
        let dropped = drops(agent).into_iter().map(|(reason, count)| (reason.to_owned(), count));
        family(&mut encoder, "drops", "Packets dropped", "reason", dropped.collect())
    }
}

fn carried(agent: &Agent, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let router = agent.kernel_router.kernel().map(|router| router.counters()).unwrap_or_default();
    let counters = agent.core.0.counters();
    let datapath = counters.named().map(|row| ("datapath", "What the datapath carried", row));
    let kernel = agent.direct.counters().into_iter().map(|row| ("kernel", "What the kernel carried", row));
    let router = router.into_iter().map(|row| ("kernel_router", "What the service router in the kernel did", row));
    for (of, help, (name, value)) in datapath.chain(kernel).chain(router) {
        let name = format!("{of}_{name}");
        let metric = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
        ConstCounter::new(value).encode(metric)?;
    }
    Ok(())
}

/// What became of wishes for virtual addresses.
fn of_leases(agent: &Agent, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let counts = agent.leases.counts();
    let help = "Virtual IPv4 addresses that went to another name, since all were leased";
    let metric = encoder.encode_descriptor("leases_taken_back", help, None, MetricType::Counter)?;
    ConstCounter::new(counts.taken_back).encode(metric)?;
    let help = "New names that got no virtual IPv4 address";
    let rows = [("rate", counts.too_fast), ("asker", counts.too_many), ("exhausted", counts.exhausted)];
    let rows = rows.map(|(reason, count)| (reason.to_owned(), count));
    family(encoder, "leases_refused", help, "reason", rows.into())
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
            ("flows_brief", "Of these, flows that were over before the agent was told of them", core.flows_brief),
        ],
    )
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
            "Such words that were not believed: forged, without a right to the name, or too many",
            core.notices_refused,
        ),
        ("notices_used", "First packets that went to a host that was heard of", core.notices_used),
        ("notices_failed", "Of these, such as the whole segment was asked about in the end", core.notices_failed),
    ] {
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(value).encode(metric)?;
    }
    Ok(())
}

fn of_resolvers(agent: &Agent, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let all = agent.rules.resolvers.all();
    let rows = |figure: &dyn Fn(resolver::Figures) -> u64| -> Rows {
        all.iter().map(|resolver| (resolver.name().to_owned(), figure(resolver.figures()))).collect()
    };
    let asked = "Questions that a resolver was asked";
    family(encoder, "resolver_asked", asked, "resolver", rows(&|figures| figures.asked))?;
    let answered = "Of these, answered with somebody who serves the name";
    family(encoder, "resolver_answered", answered, "resolver", rows(&|figures| figures.answered))?;
    let failed = "Of these, without";
    family(encoder, "resolver_failed", failed, "resolver", rows(&|figures| figures.failed))?;
    let reports = all.iter().filter_map(|one| Some((one.name().to_owned(), agent.rules.resolvers.report(one.name())?)));
    let reports: Vec<_> = reports.collect();
    let writes = |figure: &dyn Fn(&resolver::writer::Report) -> u64| -> Rows {
        reports.iter().map(|(name, report)| (name.clone(), figure(report))).collect()
    };
    let written = "Names of registrations written to a resolver, and taken away";
    family(encoder, "resolver_written", written, "resolver", writes(&|report| report.written))?;
    let not_written = "Names that could not be written, and are tried again";
    family(encoder, "resolver_not_written", not_written, "resolver", writes(&|report| report.failed))?;
    family(encoder, "resolver_ms", "Milliseconds that all of them took", "resolver", rows(&|figures| figures.ms))
}

fn of_router(router: &registration::Router, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let help = "Partitions of services that went from one host to another";
    let metric = encoder.encode_descriptor("partitions_moved", help, None, MetricType::Counter)?;
    ConstCounter::new(router.partitions_moved()).encode(metric)?;
    let left = router.instances_left().map(|(why, count)| (why.to_owned(), count));
    let acts = router.audit_counts().into_iter().map(|(act, count)| (act.to_owned(), count));
    family(encoder, "registrations", "Registrations, and refusals of all kinds", "act", acts.collect())?;
    family(encoder, "instances_left", "Instances that this router lists no longer", "reason", left.into())
}

fn of_area(area: &WideArea, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let counts = area.counts().into_iter().map(|(act, count)| (act.to_owned(), count));
    family(encoder, "announcements", "What was announced to other sites and by them", "act", counts.collect())?;
    let (neighbours, prefixes) = area.sizes();
    for (name, help, value) in [
        ("neighbours", "Routers of other sites whose streams are up", neighbours),
        ("prefixes_heard", "Prefixes that they have announced", prefixes),
    ] {
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(metric)?;
    }
    Ok(())
}

/// By either end of a registration.
fn traces_refused(agent: &Agent) -> u64 {
    let by_router = agent.router.as_ref().map_or(0, |router| router.traces_refused());
    agent.services.homes().iter().map(|home| home.traces_refused()).sum::<u64>() + by_router
}

/// How much there is of what.
fn gauges(agent: &Agent, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let (flows, half_open, associations, sources) = agent
        .core
        .0
        .with_sal(|sal, _| (sal.flow_count(), sal.half_open_count(), sal.association_count(), sal.source_count()));
    let (rules, revocations, heard) =
        agent.core.0.with_sal(|sal, _| (sal.rule_count(), sal.revocations(), sal.heard_count()));
    let (programs, sockets, bound) = agent.active.counts();
    let (names, instances) = agent.spreads.counts();
    let follows_etcd = agent.cluster.as_ref().is_some_and(|cluster| cluster.state().is_connected);
    let routers = agent.cluster.as_ref().map_or(0, |cluster| cluster.routers().len());
    let links = agent.router.as_ref().map_or(0, |router| router.links().len());
    let [prefixes, lists, hops] = agent.kernel_router.kernel().map(|router| router.sizes()).unwrap_or_default();
    let table_bytes = agent.kernel_router.kernel().map_or(0, |router| router.table_bytes());
    let (held, grants, strangers) =
        agent.core.0.with_sal(|sal, _| (sal.held(), sal.grant_count(), sal.stranger_count()));
    let fullness = agent.leases.fullness();
    for (name, help, value) in [
        ("held_names", "Names whose first packets wait for a resolver", held.names),
        ("held_packets", "First packets that wait for a resolver", held.packets),
        ("held_bytes", "Their length", held.bytes),
        ("held_packets_max", "The most that ever waited at once", held.packets_max),
        ("rules_resolved", "Rules that resolvers' answers have made", held.rules),
        ("kernel_router_prefixes", "Prefixes that the service router in the kernel knows", prefixes),
        ("kernel_router_table_bytes", "Bytes that its table of prefixes takes", table_bytes),
        ("kernel_router_lists", "Of these, with several instances", lists),
        ("kernel_router_next_hops", "Hosts and routers that it forwards to", hops),
        ("flows", "Flows of all kinds", flows),
        ("strangers", "Idle associations with peers that no authority trusted here vouches for", strangers),
        ("grants", "Grants that this host has or gives, until they are forgotten", grants),
        ("flows_half_open", "Flows to this host whose peer is not proved yet", half_open),
        ("flows_cached", "Flows that the datapath carries without the core", agent.core.0.cached_flows()),
        (
            "revocations",
            "Hosts that were put out of their authority, and keys that may sign for it no longer",
            revocations,
        ),
        ("associations", "Hosts that this host shares keys with", associations),
        ("leases", "Virtual IPv4 addresses that stand for names", fullness.leased),
        (
            "leases_idle",
            "Of these, without use for a day: new names may have them once the pool is used up",
            fullness.idle,
        ),
        ("leases_max", "Virtual IPv4 addresses in the pool", fullness.pool),
        ("services", "Services published by this host", agent.services.list().len()),
        ("rules", "Rules of the service table", rules),
        ("names_heard", "Names that other hosts of the segment have said they serve, or no longer", heard),
        ("programs", "Programs that were started for a name", programs),
        ("listening_sockets", "Sockets that listen, as the kernel says", sockets),
        ("bound_sockets", "Sockets that their programs have bound to names", bound),
        ("named_sockets", "Sockets of clients that have a name of their own", sources),
        ("program_connections", "Programs that are connected to the program socket", agent.programs.connections()),
        ("names_spread", "Names that programs here send unconnected datagrams to", names),
        ("instances_known", "Instances of those names", instances),
        ("etcd_connected", "1: this router follows etcd", usize::from(follows_etcd)),
        ("cluster_routers", "Routers of this router's cluster, itself among them", routers),
        ("cluster_routers_connected", "Of these, others that answer", links),
        ("hosts", "Hosts registered with this router", agent.router.as_ref().map_or(0, |router| router.host_count())),
    ] {
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(metric)?;
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
