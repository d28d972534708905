//! Orders as a host carries them out: each once, whichever routers tell it, and by all streams that have brought it the
//! routers hear how it goes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use margay_core::key::HostId;
use margay_core::key_revocation::KeyRevocation;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use crate::Clock;
use crate::chain_order::{ChainOrder, OrderKey, OrderReport, SignedOrder, is_for, refusal};
use crate::lineage::Lineage;
use crate::store::{AuditEntry, Store};

/// Reports that wait until the stream has room.
const REPORTS_MAX: usize = 16;
const NO_SUCH_GROUP: &str = "the host's certificate does not show it in a group of the order";
const STARTED_AGAIN: &str =
    "the host's agent has started again since it began with the order; `margay chain show` there shows its sessions";

/// What carries an order out, and tells how it goes; the last report says that it is over.
pub type Carry = Box<dyn Fn(ChainOrder, watch::Sender<OrderReport>) + Send + Sync>;

/// By whom an order may be signed, and what the host is in its authority.
pub(super) struct Standing<'a> {
    pub line: &'a Lineage,
    pub revoked: &'a [KeyRevocation],
    pub groups: &'a [u32],
}

/// An order that this host has begun with, or refused.
struct Begun {
    report: watch::Receiver<OrderReport>,
    until_s: u64,
    /// The router that has issued it.
    issuer: Option<HostId>,
    /// Those that have told it, by streams that stand.
    told_by: BTreeSet<HostId>,
}

/// The orders that a host carries out, of all its authorities.
pub struct OrderBook {
    host: HostId,
    store: Arc<Store>,
    clock: Clock,
    carry: Carry,
    begun: Mutex<BTreeMap<OrderKey, Begun>>,
}

impl OrderBook {
    /// Of this host.
    pub fn new(host: HostId, store: Arc<Store>, clock: Clock, carry: Carry) -> Arc<Self> {
        Arc::new(Self { host, store, clock, carry, begun: Mutex::default() })
    }

    /// Takes an order that a router tells, and begins with it if it is to be carried out here, and was not before. What
    /// is given back is told how it goes. Waits for the disk.
    pub(super) fn take(
        &self,
        signed: &SignedOrder,
        router: HostId,
        standing: &Standing<'_>,
    ) -> watch::Receiver<OrderReport> {
        let mut begun = self.begun.lock();
        let unix_s = self.clock.unix_s();
        let is_at_work = |known: &Begun| !known.report.borrow().over && known.report.has_changed().is_ok();
        begun.retain(|_, known| known.until_s >= unix_s || is_at_work(known));
        if let Some(known) = begun.get_mut(&signed.key) {
            known.told_by.insert(router);
            return known.report.clone();
        }
        let key = signed.key;
        let (order, why) = match self.begin(signed, standing, unix_s) {
            Ok(order) => (Some(order), String::new()),
            Err(why) => (None, why),
        };
        let first = match &order {
            Some(_) => OrderReport { number: key.number.to_vec(), ..OrderReport::default() },
            None => {
                tracing::warn!(order = key.digits(), why, "an order of a router is not carried out");
                refusal(&key, &why)
            }
        };
        let (tell, report) = watch::channel(first);
        let Some(order) = order else { return report };
        let issuer = Some(order.router);
        let told_by = BTreeSet::from([router]);
        begun.insert(key, Begun { report: report.clone(), until_s: signed.until_s, issuer, told_by });
        drop(begun);
        (self.carry)(order, tell);
        report
    }

    /// The order, noted as begun with; or why it is not carried out.
    fn begin(&self, signed: &SignedOrder, standing: &Standing<'_>, unix_s: u64) -> Result<ChainOrder, String> {
        let order = signed.order(standing.line, standing.revoked, unix_s).map_err(|doubt| doubt.to_string())?;
        if !is_for(&order.rule, self.host, standing.groups) {
            return Err(NO_SUCH_GROUP.to_owned());
        }
        let words = &order.words;
        let what = format!("{} {} {}", words.act, words.r#box, words.other);
        let detail = format!("{}, order {} of router {}", what.trim_end(), order.key.digits(), order.router);
        let entry = AuditEntry::once(unix_s, "chain-order", words.services.clone(), detail);
        match self.store.begin_order(signed, &entry) {
            Ok(true) => Ok(order),
            Ok(false) => Err(STARTED_AGAIN.to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// A report as a router is told it.
    fn told(&self, key: &OrderKey, mut report: OrderReport) -> OrderReport {
        let begun = self.begun.lock();
        let known = begun.get(key);
        report.issuer_told = known.is_some_and(|known| known.issuer.is_some_and(|one| known.told_by.contains(&one)));
        report
    }

    /// A router's stream has ended.
    fn left(&self, router: HostId) {
        self.begun.lock().values_mut().for_each(|known| _ = known.told_by.remove(&router));
    }
}

/// The reports that one stream is to carry.
pub(super) struct Reports {
    router: HostId,
    /// Whose orders they are of, from the first one on.
    book: Option<Arc<OrderBook>>,
    sender: mpsc::Sender<OrderReport>,
    reports: mpsc::Receiver<OrderReport>,
}

/// Takes an order that came by one stream.
pub(super) struct Taking {
    router: HostId,
    book: Arc<OrderBook>,
    sender: mpsc::Sender<OrderReport>,
}

impl Taking {
    /// Takes an order, and has the stream carry what becomes of it. Waits for the disk.
    pub fn take(self, signed: &SignedOrder, standing: &Standing<'_>) {
        let Self { router, book, sender } = self;
        let report = book.take(signed, router, standing);
        let key = signed.key;
        tokio::spawn(follow(report, move |report| {
            let report = book.told(&key, report);
            let sender = sender.clone();
            async move { sender.send(report).await.is_ok() }
        }));
    }
}

impl Reports {
    /// For a stream with a router.
    pub fn new(router: HostId) -> Self {
        let (sender, reports) = mpsc::channel(REPORTS_MAX);
        Self { router, book: None, sender, reports }
    }

    /// For an order that came by it.
    pub fn taking(&mut self, book: &Arc<OrderBook>) -> Taking {
        self.book = Some(Arc::clone(book));
        Taking { router: self.router, book: Arc::clone(book), sender: self.sender.clone() }
    }

    /// The next report to be sent.
    pub async fn next(&mut self) -> OrderReport {
        match self.reports.recv().await {
            Some(report) => report,
            // Never: this has a sender itself.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Reports {
    fn drop(&mut self) {
        self.book.iter().for_each(|book| book.left(self.router));
    }
}

/// Tells each report, the present one first, until the order is over or nobody hears.
pub(super) async fn follow<F: Future<Output = bool>>(
    mut report: watch::Receiver<OrderReport>,
    tell: impl Fn(OrderReport) -> F,
) {
    loop {
        let last = report.borrow_and_update().clone();
        let is_over = last.over;
        // Whoever carried it out has ended without a last word: so does the agent.
        if !tell(last).await || is_over || report.changed().await.is_err() {
            return;
        }
    }
}
