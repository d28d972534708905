//! Orders of an authority to all of its hosts (docs/decisions/0113): how this host carries them out, as it would its
//! own operator's; and on a router, those that wait for hosts (`api::order`).

use std::sync::{Arc, OnceLock};

use margay_control::api::v1::ChainChangeRequest;
use margay_control::chain_order::{ChainOrder, OrderKey, OrderReport, OrderWords, Reasons, refusal};
use margay_control::registration::OrderBook;
use margay_control::store::AuditEntry;
use margay_core::FlowInfo;
use margay_core::chain::{ChainRule, SessionHeader};
use margay_core::key::HostId;
use margay_core::reconfiguration::Edit;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Agent;
use super::api::reconfiguration::{AT_ONCE, Target, change_some, edit_of, own_sessions};

/// Orders that this host carries out, and on a router those that it has issued and waits for.
#[derive(Default)]
pub struct Orders {
    book: OnceLock<Arc<OrderBook>>,
    waiting: Mutex<JoinSet<()>>,
}

impl Orders {
    /// Waits for hosts, until that is over or the agent goes down.
    pub fn wait(&self, waiting: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.waiting.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(waiting);
    }

    /// The agent goes down. Hosts finish what they have begun with.
    pub fn close(&self) {
        self.waiting.lock().abort_all();
    }
}

/// What carries orders out here, whichever router tells them.
pub fn book(agent: &Arc<Agent>) -> Arc<OrderBook> {
    let make = || {
        let running = Arc::downgrade(agent);
        let runtime = Handle::current();
        let carry = move |order: ChainOrder, tell: watch::Sender<OrderReport>| {
            if let Some(agent) = running.upgrade() {
                runtime.spawn(async move { carry_out(&agent, &order, &tell).await });
            }
        };
        let host = &agent.host;
        OrderBook::new(host.identity.host_id(), Arc::clone(&host.store), host.clock.clone(), Box::new(carry))
    };
    Arc::clone(agent.connections.orders.book.get_or_init(make))
}

/// Lets the routers of this host, and the one on it, have their orders carried out here.
pub fn begin(agent: &Arc<Agent>) {
    agent.publishing.services.homes().iter().for_each(|home| home.set_order_book(book(agent)));
    agent.routing.router.iter().for_each(|router| router.set_order_book(book(agent)));
}

/// What is to be done with sessions.
///
/// # Errors
///
/// The words make no sense, as a sentence.
pub fn edit(words: &OrderWords) -> Result<Edit, String> {
    let request = ChainChangeRequest {
        act: words.act.clone(),
        r#box: words.r#box.clone(),
        other: words.other.clone(),
        ..ChainChangeRequest::default()
    };
    edit_of(&request).map_err(|status| status.message().to_owned())
}

/// Whether the policy that this host goes by names a box that is to be put in. The server's host asks its own.
///
/// # Errors
///
/// It does not, as a sentence.
pub fn check_box(agent: &Agent, words: &OrderWords, edit: Edit) -> Result<(), String> {
    let (service, name) = match edit {
        Edit::Insert { service, .. } => (service, &words.r#box),
        Edit::Replace { by, .. } => (by, &words.other),
        Edit::Remove { .. } | Edit::Leave { .. } => return Ok(()),
    };
    let is_named = agent.core.0.with_sal(|sal, _| sal.chain_policy().name_of_box(&service).is_some());
    if is_named {
        return Ok(());
    }
    Err(format!(
        "no chain of the policy names the box {name}: write one that does, be it for no session, and `margay policy \
         apply` it on a router of the authority"
    ))
}

/// Whether an order is about a session of a program here.
fn is_about(rule: &ChainRule, host: HostId, flow: &FlowInfo) -> bool {
    let session = SessionHeader {
        service: &flow.service,
        protocol: flow.app.protocol,
        port: flow.app.destination.port(),
        host,
        groups: &[],
        packet: &[],
    };
    flow.goes_on && rule.matches(&session)
}

/// What is to be done with which sessions.
fn prepare(agent: &Agent, order: &ChainOrder) -> Result<(Edit, Vec<Target>), String> {
    let edit = edit(&order.words)?;
    check_box(agent, &order.words, edit)?;
    // That the order is for this host was seen when it came.
    let rule = ChainRule { clients: Vec::new(), ..order.rule.clone() };
    let host = agent.host.identity.host_id();
    Ok((edit, own_sessions(&agent.core, |flow| is_about(&rule, host, flow))))
}

/// Changes all sessions that an order is about, and tells how it goes. What is begun is finished, whoever hears of it.
async fn carry_out(agent: &Agent, order: &ChainOrder, tell: &watch::Sender<OrderReport>) {
    let (edit, targets) = match prepare(agent, order) {
        Ok(prepared) => prepared,
        Err(why) => {
            note(agent, order, &why).await;
            tell.send_replace(refusal(&order.key, &why));
            return;
        }
    };
    let mut tally = Tally::new(&order.key, targets.len());
    tell.send_replace(tally.report());
    for some in targets.chunks(AT_ONCE) {
        match change_some(agent, some, edit).await {
            Ok(changed) => changed.iter().for_each(|one| tally.add(&one.outcome, &one.why)),
            Err(status) => some.iter().for_each(|_| tally.add("failed", status.message())),
        }
        tell.send_replace(tally.report());
    }
    let failed = tally.sessions - tally.changed;
    if failed > 0 {
        note(agent, order, &format!("{failed} of {} as before", tally.sessions)).await;
    }
    tell.send_replace(OrderReport { over: true, ..tally.report() });
}

/// That it has come is in the audit log already.
async fn note(agent: &Agent, order: &ChainOrder, what: &str) {
    let detail = format!("order {}: {what}", order.key.digits());
    let subject = order.words.services.clone();
    let entry = AuditEntry::once(agent.host.clock.unix_s(), "chain-order-failed", subject, detail);
    let store = Arc::clone(&agent.host.store);
    match tokio::task::spawn_blocking(move || store.note_all(&[entry])).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "the outcome of an order is not in the audit log"),
        Err(_) => tracing::error!("noting the outcome of an order ended badly"),
    }
}

/// How far this host is with an order.
struct Tally {
    number: [u8; 16],
    sessions: u32,
    changed: u32,
    as_before: Reasons,
}

impl Tally {
    fn new(key: &OrderKey, sessions: usize) -> Self {
        let sessions = u32::try_from(sessions).unwrap_or(u32::MAX);
        Self { number: key.number, sessions, changed: 0, as_before: Reasons::default() }
    }

    /// What has become of one session. One that ended by itself was none to be changed.
    fn add(&mut self, outcome: &str, why: &str) {
        match outcome {
            "done" => self.changed += 1,
            "ended" => self.sessions = self.sessions.saturating_sub(1),
            _ => self.as_before.add(why),
        }
    }

    fn report(&self) -> OrderReport {
        OrderReport {
            number: self.number.to_vec(),
            sessions: self.sessions,
            changed: self.changed,
            as_before: self.as_before.listed(),
            ..OrderReport::default()
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn sessions_are_changed_or_as_before_or_none_any_more() {
        let key = OrderKey { authority: [1; 8], number: [7; 16] };
        let mut tally = Tally::new(&key, 5);
        for (outcome, why) in [
            ("done", "done"),
            ("refused", "the session does not go through it"),
            ("ended", "the session ended meanwhile"),
            ("failed", "nobody serves the box"),
            ("refused", "the session does not go through it"),
        ] {
            tally.add(outcome, why);
        }
        let report = tally.report();
        assert_eq!((report.sessions, report.changed, report.over, report.number), (4, 1, false, vec![7; 16]));
        let counted: Vec<(&str, u32)> = report.as_before.iter().map(|one| (one.why.as_str(), one.sessions)).collect();
        assert_eq!(counted, [("nobody serves the box", 1), ("the session does not go through it", 2)]);
    }

    #[test]
    fn acts_are_those_of_one_host_s_orders() {
        let words = |act: &str, other: &str| OrderWords {
            act: act.to_owned(),
            r#box: "scrub.shop".to_owned(),
            other: other.to_owned(),
            ..OrderWords::default()
        };
        assert!(matches!(edit(&words("insert", "")), Ok(Edit::Insert { before: None, .. })));
        assert!(matches!(edit(&words("replace", "other.shop")), Ok(Edit::Replace { .. })));
        assert!(matches!(edit(&words("remove", "")), Ok(Edit::Remove { .. })));
        for (act, other) in [("replace", ""), ("remove", "other.shop"), ("turn", ""), ("insert", "no name")] {
            assert!(edit(&words(act, other)).is_err(), "{act} {other}");
        }
    }
}
