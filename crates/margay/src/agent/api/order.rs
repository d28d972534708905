//! Orders by which a router has all hosts of an authority change the boxes of their sessions (docs/decisions/0113): who
//! is asked, how it goes, and what has become of it on each host.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use margay_control::api::v1::*;
use margay_control::chain_order::{OrderKey, OrderReason, OrderWords, SignedOrder, is_for, numbers_of, rule_of};
use margay_control::chains::authority_of;
use margay_control::entropy;
use margay_control::keyring::Authority;
use margay_control::quantity::{count, count_of};
use margay_control::registration::{Heard, Router};
use margay_control::store::AuditEntry;
use margay_core::key::HostId;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout_at};
use tonic::Status;

use super::{Streamed, blocking, environment, misuse};
use crate::agent::{Agent, orders};

/// Between two reports of how it goes.
const TICK: Duration = Duration::from_millis(100);
/// Hosts in one report.
const HOSTS_AT_ONCE: usize = 500;
/// Hosts that an entry of the audit log names.
const NAMED_MAX: usize = 20;

/// An order that was issued, and the hosts that are asked.
struct Issued {
    key: OrderKey,
    /// The name that its sessions are to.
    name: String,
    asked: BTreeMap<HostId, String>,
}

pub(super) async fn order(
    agent: &Arc<Agent>,
    request: ChainOrderRequest,
) -> Result<Streamed<ChainOrderReport>, Status> {
    let router = agent.routing.router.clone().ok_or_else(|| {
        environment("this host is no router; say it on a router of the authority, there or by --remote")
    })?;
    let by = authority(agent, &request.name)?;
    let words = words_of(agent, request)?;
    let rule = rule_of(&words, by.block()).map_err(misuse)?;
    let edit = orders::edit(&words).map_err(misuse)?;
    orders::check_box(agent, &words, edit).map_err(misuse)?;
    let meant = |host: HostId, groups: &[String]| is_for(&rule, host, &numbers_of(groups));
    let asked = hosts_of(agent, &by, meant)?;
    if asked.is_empty() {
        return Err(misuse(format!(
            "no host of {} is meant by {}; `margay id member list` shows hosts and their groups",
            by.name,
            words.clients.join(", ")
        )));
    }
    let unix_s = agent.host.clock.unix_s();
    let order = SignedOrder::sign(&by, &words, unix_s).map_err(misuse)?;
    let what = format!("{} {} {}", words.act, words.r#box, words.other);
    let detail = format!("{}, order {} to {}", what.trim_end(), order.key.digits(), count_of(asked.len(), "host"));
    let entry = AuditEntry::once(unix_s, "chain-order", words.services.clone(), detail);
    let heard = router.await_order(order.key);
    if let Err(error) = blocking(|| agent.host.store.issue_order(&order, &entry)) {
        router.forget_order(&order.key);
        return Err(environment(error));
    }
    let until = Instant::now() + Duration::from_secs(words.life_s.into());
    let issued = Issued { key: order.key, name: words.services, asked };
    let (sender, reports) = mpsc::channel(16);
    agent.connections.orders.wait(follow(Arc::clone(agent), router, issued, (heard, until), sender));
    Ok(Box::pin(futures_util::stream::unfold(reports, |mut reports| async move {
        let report = reports.recv().await?;
        Some((Ok(report), reports))
    })))
}

/// The key that signs for the authority of a name.
fn authority(agent: &Agent, name: &str) -> Result<Authority, Status> {
    let block = authority_of(name).map_err(misuse)?;
    let found = blocking(|| agent.host.keyring.authority_of(block)).map_err(environment)?;
    let by = found.ok_or_else(|| {
        misuse(format!(
            "no key of the authority of `{name}` is on this host; say it on a router that signs for that authority"
        ))
    })?;
    if by.is_valid(agent.host.clock.unix_s()) { Ok(by) } else { Err(environment(by.ended())) }
}

fn words_of(agent: &Agent, request: ChainOrderRequest) -> Result<OrderWords, Status> {
    let number = entropy::rng().map_err(environment)?.bytes::<16>();
    let ChainOrderRequest { act, r#box, other, name, protocol, first_port, last_port, clients, wait_s } = request;
    Ok(OrderWords {
        number: number.to_vec(),
        router: agent.host.identity.host_id().0.to_vec(),
        act,
        r#box,
        other,
        services: name,
        protocol,
        first_port,
        last_port,
        clients,
        life_s: wait_s,
    })
}

/// Members of an authority that are meant, by host-ID, with what people call them. This host is one of its hosts, also
/// where nobody has let it in.
fn hosts_of(
    agent: &Agent,
    by: &Authority,
    is_meant: impl Fn(HostId, &[String]) -> bool,
) -> Result<BTreeMap<HostId, String>, Status> {
    let members = blocking(|| agent.host.store.members()).map_err(environment)?;
    let own = (agent.host.identity.host_id(), Vec::new(), agent.host.local.host_name.clone());
    let known = members.into_iter().filter(|member| member.authority == by.name);
    let mut hosts: BTreeMap<HostId, (Vec<String>, String)> =
        known.map(|member| (member.host.id(), (member.groups, member.host_name))).collect();
    hosts.entry(own.0).or_insert((own.1, own.2));
    let meant = hosts.into_iter().filter(|(host, (groups, _))| is_meant(*host, groups));
    Ok(meant.map(|(host, (_, name))| (host, name)).collect())
}

/// Tells how it goes, until nothing more is awaited or the order's life is over; then what has become of it. Goes on
/// when nobody hears: the audit log has the outcome.
async fn follow(
    agent: Arc<Agent>,
    router: Arc<Router>,
    issued: Issued,
    (mut heard, until): (watch::Receiver<Heard>, Instant),
    reports: mpsc::Sender<ChainOrderReport>,
) {
    loop {
        let going = issued.going(&heard.borrow_and_update());
        let is_over = going.over == going.asked;
        // One that finds no room is followed by another one.
        let _ = reports.try_send(going);
        if is_over || Instant::now() >= until {
            break;
        }
        sleep_until((Instant::now() + TICK).min(until)).await;
        // The sender lives until the order is forgotten; when the time is over, so is the loop.
        let _ = timeout_at(until, heard.changed()).await;
    }
    let last = heard.borrow().clone();
    router.forget_order(&issued.key);
    let hosts = issued.hosts(&last, |host| router.connected(host).is_some());
    let going = issued.going(&last);
    let entry = issued.entry(agent.host.clock.unix_s(), &going, &hosts);
    let store = Arc::clone(&agent.host.store);
    let key = issued.key;
    match tokio::task::spawn_blocking(move || store.end_order(&key, &entry)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "an order that is over ends with its life"),
        Err(_) => tracing::error!("ending an order ended badly"),
    }
    for some in hosts.chunks(HOSTS_AT_ONCE) {
        let part = ChainOrderReport { phase: "hosts".to_owned(), hosts: some.to_vec(), ..going.clone() };
        // Nobody may hear any more.
        let _ = reports.send(part).await;
    }
    let _ = reports.send(ChainOrderReport { phase: "over".to_owned(), ..going }).await;
}

impl Issued {
    /// How far it is, of all hosts.
    fn going(&self, heard: &Heard) -> ChainOrderReport {
        let mut report = ChainOrderReport {
            number: self.key.digits(),
            phase: "going".to_owned(),
            asked: u32::try_from(self.asked.len()).unwrap_or(u32::MAX),
            ..ChainOrderReport::default()
        };
        for said in self.asked.keys().filter_map(|host| heard.get(host)) {
            report.over += u32::from(said.over);
            report.sessions += u64::from(said.sessions);
            report.changed += u64::from(said.changed);
            report.as_before += said.as_before.iter().map(|reason| u64::from(reason.sessions)).sum::<u64>();
        }
        report
    }

    /// What has become of it on each host that has such sessions, or has not carried it out.
    fn hosts(&self, heard: &Heard, is_registered: impl Fn(HostId) -> bool) -> Vec<ChainOrderHost> {
        let row = |(host, name): (&HostId, &String)| {
            let said = heard.get(host).cloned().unwrap_or_default();
            let (state, why) = match heard.get(host) {
                None if is_registered(*host) => ("silent", "it has not answered in time".to_owned()),
                None => ("silent", "it has not answered in time, and is not registered here now".to_owned()),
                Some(said) if said.older => ("older", "its version knows no orders; update it".to_owned()),
                Some(said) if !said.refused.is_empty() => ("refused", said.refused.clone()),
                Some(said) if said.over => ("done", String::new()),
                Some(_) => ("unfinished", "it has begun, and was not over in time; it goes on".to_owned()),
            };
            let reason = |one: &OrderReason| ChainOrderReason { why: one.why.clone(), sessions: one.sessions };
            ChainOrderHost {
                host_id: host.to_string(),
                host_name: name.clone(),
                state: state.to_owned(),
                sessions: said.sessions,
                changed: said.changed,
                as_before: said.as_before.iter().map(reason).collect(),
                why,
            }
        };
        self.asked.iter().map(row).filter(|row| row.state != "done" || row.sessions > 0).collect()
    }

    /// For the audit log.
    fn entry(&self, unix_s: u64, going: &ChainOrderReport, hosts: &[ChainOrderHost]) -> AuditEntry {
        let undone: Vec<&str> =
            hosts.iter().filter(|host| host.state != "done").map(|host| host.host_name.as_str()).collect();
        let mut detail = format!(
            "order {}: {} asked, {} changed, {} as before",
            going.number,
            count(going.asked.into(), "host"),
            count(going.changed, "session"),
            going.as_before
        );
        if !undone.is_empty() {
            detail += &format!("; not done at {}", undone[..undone.len().min(NAMED_MAX)].join(", "));
        }
        if undone.len() > NAMED_MAX {
            detail += &format!(" and {} others", undone.len() - NAMED_MAX);
        }
        AuditEntry::once(unix_s, "chain-order-over", self.name.clone(), detail)
    }
}

#[cfg(test)]
mod test {
    use margay_control::chain_order::OrderReport;

    use super::*;

    fn host(number: u8) -> HostId {
        HostId([number; 16])
    }

    #[test]
    fn every_host_that_has_not_done_it_is_named_with_the_reason() {
        let asked = (1..=8).map(|number| (host(number), format!("web{number}"))).collect();
        let key = OrderKey { authority: [1; 8], number: [0xab; 16] };
        let issued = Issued { key, name: "web.shop".to_owned(), asked };
        let reason = OrderReason { why: "nobody serves the box".to_owned(), sessions: 2 };
        let heard = Heard::from([
            (
                host(1),
                OrderReport { sessions: 5, changed: 3, as_before: vec![reason], over: true, ..Default::default() },
            ),
            (host(2), OrderReport { over: true, ..Default::default() }),
            (host(3), OrderReport { over: true, older: true, ..Default::default() }),
            (host(4), OrderReport { over: true, refused: "no".to_owned(), ..Default::default() }),
            (host(5), OrderReport { sessions: 4, changed: 1, ..Default::default() }),
            // Whoever was not asked is not counted.
            (host(9), OrderReport { sessions: 100, changed: 100, over: true, ..Default::default() }),
        ]);
        let going = issued.going(&heard);
        assert_eq!((going.asked, going.over, going.sessions, going.changed, going.as_before), (8, 4, 9, 4, 2));
        assert_eq!(going.number, "ab".repeat(16));
        let hosts = issued.hosts(&heard, |one| one != host(7));
        let states: Vec<(&str, &str)> = hosts.iter().map(|one| (one.host_name.as_str(), one.state.as_str())).collect();
        let wanted = [
            ("web1", "done"),
            ("web3", "older"),
            ("web4", "refused"),
            ("web5", "unfinished"),
            ("web6", "silent"),
            ("web7", "silent"),
            ("web8", "silent"),
        ];
        assert_eq!(states, wanted, "who has no such session and is done is left out");
        assert!(hosts[5].why.contains("not registered here") && !hosts[4].why.contains("not registered here"));
        let entry = issued.entry(7, &going, &hosts);
        let detail = format!(
            "order {}: 8 hosts asked, 4 sessions changed, 2 as before; not done at web3, web4, web5, web6, web7, web8",
            going.number
        );
        assert_eq!(
            (entry.act.as_str(), entry.subject.as_str(), entry.detail),
            ("chain-order-over", "web.shop", detail)
        );
        let many = (0..30).map(|number| (host(number), format!("h{number}"))).collect();
        let issued = Issued { asked: many, ..issued };
        let entry = issued.entry(7, &going, &issued.hosts(&Heard::new(), |_| true));
        assert!(entry.detail.ends_with("h19 and 10 others"), "{}", entry.detail);
    }
}
