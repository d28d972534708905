//! The router's end of orders: which ones are under way in its cluster, and what hosts say of those that it has issued.
//! What a host says to another router of the cluster comes by the store that they share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use margay_core::key::HostId;
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::watch;

use super::order_book::{OrderBook, Standing, follow};
use super::proto::{self, from_router};
use super::roll::Place;
use super::router::{Router, Shared};
use crate::chain_order::{OrderKey, OrderReport, SignedOrder, bounded, numbers_of};
use crate::store::{MemberKey, StoreError};
use crate::warrant::{believed, lineages};

/// What hosts have said of an order.
pub type Heard = BTreeMap<HostId, OrderReport>;

/// Orders, on a router.
#[derive(Default)]
pub(super) struct Orders {
    /// Those that are under way.
    pub live: watch::Sender<Vec<SignedOrder>>,
    /// Those that were issued here.
    awaited: Mutex<BTreeMap<OrderKey, watch::Sender<Heard>>>,
    /// What carries them out on the router's own host.
    book: OnceLock<Arc<OrderBook>>,
}

impl Orders {
    /// A host has said how far it is; false: nobody here awaits that.
    fn heard(&self, key: &OrderKey, host: HostId, report: OrderReport) -> bool {
        let awaited = self.awaited.lock();
        let Some(heard) = awaited.get(key) else { return false };
        heard.send_modify(|heard| {
            let is_over = heard.get(&host).is_some_and(|known| known.over && known.refused.is_empty());
            // Nothing takes the place of the last word, but that of a host that has refused and thinks better of it.
            if !is_over {
                heard.insert(host, report);
            }
        });
        true
    }
}

/// What one stream of a host has of orders.
pub(super) struct Told {
    /// The host's version carries orders out.
    pub knows: bool,
    orders: BTreeSet<OrderKey>,
    /// Those of which its last word was passed on.
    passed_on: BTreeSet<OrderKey>,
}

impl Told {
    /// For a stream.
    pub fn new(knows: bool) -> Self {
        Self { knows, orders: BTreeSet::new(), passed_on: BTreeSet::new() }
    }

    /// What the host is told, of the orders that are under way.
    pub fn tell(&mut self, shared: &Arc<Shared>, place: Place) -> Vec<proto::FromRouter> {
        let unix_s = shared.clock.unix_s();
        let is_for_it = |order: &&SignedOrder| order.key.authority == place.authority && order.until_s >= unix_s;
        let live: Vec<SignedOrder> = shared.orders.live.borrow().iter().filter(is_for_it).cloned().collect();
        let is_live = |key: &OrderKey| live.iter().any(|order| order.key == *key);
        self.orders.retain(is_live);
        self.passed_on.retain(is_live);
        let mut words = Vec::new();
        for order in live {
            if !self.orders.insert(order.key) {
                continue;
            }
            if self.knows {
                let body = from_router::Body::Order(proto::Order { signed: order.encode() });
                words.push(proto::FromRouter { body: Some(body) });
            } else {
                let number = order.key.number.to_vec();
                let older = OrderReport { number, over: true, older: true, ..OrderReport::default() };
                self.hear(shared, place, older);
            }
        }
        words
    }

    /// A host has said something of an order; what it was not told of is ignored.
    pub fn hear(&mut self, shared: &Arc<Shared>, place: Place, report: OrderReport) {
        let Ok(number) = report.number[..].try_into() else { return };
        let key = OrderKey { authority: place.authority, number };
        if !self.orders.contains(&key) {
            return;
        }
        let report = bounded(report);
        let is_last = report.over && !report.issuer_told;
        if !shared.orders.heard(&key, place.host, report.clone()) && is_last && self.passed_on.insert(key) {
            pass_on(Arc::clone(shared), key, place.host, report);
        }
    }
}

/// Another router of the cluster has issued the order, and the host has not heard it from that one.
fn pass_on(shared: Arc<Shared>, key: OrderKey, host: HostId, report: OrderReport) {
    tokio::task::spawn_blocking(move || {
        if let Err(error) = shared.store.pass_report_on(&key, host, &report.encode_to_vec()) {
            tracing::warn!(%host, order = key.digits(), %error, "what a host says of an order is not passed on");
        }
    });
}

/// Follows the orders that are under way; until it is dropped.
pub(super) async fn follow_orders(shared: Arc<Shared>) {
    let mut changes = shared.store.order_changes();
    changes.mark_changed();
    while changes.changed().await.is_ok() {
        let this = Arc::clone(&shared);
        match tokio::task::spawn_blocking(move || this.read_orders()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "orders that are under way cannot be read"),
            Err(_) => tracing::error!("reading orders that are under way ended badly"),
        }
    }
}

impl Shared {
    fn read_orders(self: &Arc<Self>) -> Result<(), StoreError> {
        let mut live = self.store.orders()?;
        live.retain(|order| order.until_s >= self.clock.unix_s());
        let awaited: Vec<OrderKey> = self.orders.awaited.lock().keys().copied().collect();
        for key in awaited {
            for (host, report) in self.store.reports_passed_on(&key)? {
                // Whoever may write into the cluster's store may write anything.
                if let Ok(report) = OrderReport::decode(&report[..]) {
                    self.orders.heard(&key, host, bounded(report));
                }
            }
        }
        let known = self.orders.live.send_replace(live.clone());
        live.iter().filter(|order| !known.contains(order)).for_each(|order| self.carry_out(order));
        Ok(())
    }

    /// On this host itself.
    fn carry_out(self: &Arc<Self>, order: &SignedOrder) {
        let Some(book) = self.orders.book.get() else { return };
        let known = lineages(&self.keyring, &self.store)
            .and_then(|lines| Ok((lines, believed(&self.keyring, &self.store, self.clock.unix_s())?)));
        let (mut lines, revoked) = match known {
            Ok(known) => known,
            Err(error) => return tracing::error!(%error, "an order is not carried out on this host"),
        };
        let Some((_, line)) = lines.remove(&order.key.authority) else { return };
        let host = self.local.host_key.public().id();
        let member =
            self.store.member(&MemberKey { host: self.local.host_key.public(), authority: order.key.authority });
        let groups = member.ok().flatten().map(|own| numbers_of(&own.groups)).unwrap_or_default();
        let report = book.take(order, host, &Standing { line: &line, revoked: &revoked, groups: &groups });
        let this = Arc::clone(self);
        let key = order.key;
        tokio::spawn(follow(report, move |report| {
            if !this.orders.heard(&key, host, report.clone()) && report.over {
                pass_on(Arc::clone(&this), key, host, report);
            }
            std::future::ready(true)
        }));
    }
}

impl Router {
    /// What carries orders out on this host.
    pub fn set_order_book(&self, book: Arc<OrderBook>) {
        // Set once, at the start.
        let _ = self.shared.orders.book.set(book);
        // What is under way since before.
        let shared = Arc::clone(&self.shared);
        tokio::task::spawn_blocking(move || {
            let live = shared.orders.live.borrow().clone();
            live.iter().for_each(|order| shared.carry_out(order));
        });
    }

    /// Hears what hosts say of an order, from before it is issued until [`forget_order`](Self::forget_order).
    pub fn await_order(&self, key: OrderKey) -> watch::Receiver<Heard> {
        self.shared.orders.awaited.lock().entry(key).or_default().subscribe()
    }

    /// Nobody awaits anything of an order any more.
    pub fn forget_order(&self, key: &OrderKey) {
        self.shared.orders.awaited.lock().remove(key);
    }
}
