//! Orders to all hosts of an authority. On routers: those that are under way, and what hosts have said of them to
//! another router than the one that has issued them. On hosts: the numbers of those that were begun with, so that none
//! is carried out twice, also after a start.

use margay_core::key::HostId;
use redb::{ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};
use tokio::sync::watch;

use super::agreement::Draft;
use super::audit::{self, AuditEntry};
use super::record::bytes;
use super::replica::SharedTable;
use super::{Failure, Store, StoreError};
use crate::chain_order::{OrderKey, SignedOrder};

/// By authority and number, what was signed.
pub(super) const ORDERS: TableDefinition<[u8; 24], &[u8]> = TableDefinition::new("orders");
/// By the same, and the host: its last report.
pub(super) const ORDER_REPORTS: TableDefinition<[u8; 40], &[u8]> = TableDefinition::new("order_reports");
/// By authority and number, until when the order lives, in seconds since 1970.
const BEGUN: TableDefinition<[u8; 24], u64> = TableDefinition::new("orders_begun");
/// Orders of all authorities that are under way at once.
const ORDERS_MAX: u64 = 64;
/// Orders that a host remembers, each as long as it lives.
const BEGUN_MAX: u64 = 1024;

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(ORDERS)?;
    transaction.open_table(ORDER_REPORTS)?;
    transaction.open_table(BEGUN)?;
    Ok(())
}

fn report_key(order: &OrderKey, host: HostId) -> [u8; 40] {
    let mut key = [0; 40];
    key[..24].copy_from_slice(&order.bytes());
    key[24..].copy_from_slice(&host.0);
    key
}

/// Removes an order, and all that hosts have said of it.
fn draft_end(transaction: &WriteTransaction, draft: &mut Draft, key: [u8; 24]) -> Result<(), Failure> {
    let known = transaction.open_table(ORDERS)?.get(key)?.map(|known| known.value().to_vec());
    draft.put(SharedTable::Orders, &key, known, None);
    let first = [&key[..], &[0; 16]].concat();
    let last = [&key[..], &[0xff; 16]].concat();
    let range = bytes::<40>("a report's key", &first)?..=bytes::<40>("a report's key", &last)?;
    for entry in transaction.open_table(ORDER_REPORTS)?.range(range)? {
        let (key, known) = entry?;
        draft.put(SharedTable::OrderReports, &key.value(), Some(known.value().to_vec()), None);
    }
    Ok(())
}

impl Store {
    /// Keeps an order that a router issues, for all routers of the cluster to tell. Those whose life is over are
    /// cleared away by the way.
    ///
    /// # Errors
    ///
    /// The others do not agree, the disk refuses, or too many are under way.
    pub fn issue_order(&self, order: &SignedOrder, entry: &AuditEntry) -> Result<(), StoreError> {
        self.settle(|transaction, draft| {
            let mut under_way = 0;
            let mut over = Vec::new();
            for known in transaction.open_table(ORDERS)?.iter()? {
                let (key, signed) = known?;
                match SignedOrder::decode(signed.value()) {
                    Some(signed) if signed.until_s >= entry.unix_s => under_way += 1,
                    _ => over.push(key.value()),
                }
            }
            for key in over {
                draft_end(transaction, draft, key)?;
            }
            if under_way >= ORDERS_MAX {
                return Err(Failure::Full { what: "orders that are under way", limit: ORDERS_MAX });
            }
            draft.put(SharedTable::Orders, &order.key.bytes(), None, Some(order.encode()));
            draft.note(entry.clone());
            Ok(())
        })
    }

    /// An order is over: hosts that come later do not hear of it.
    ///
    /// # Errors
    ///
    /// The others do not agree, or the disk refuses: then it ends with its life.
    pub fn end_order(&self, key: &OrderKey, entry: &AuditEntry) -> Result<(), StoreError> {
        self.settle(|transaction, draft| {
            draft_end(transaction, draft, key.bytes())?;
            draft.note(entry.clone());
            Ok(())
        })
    }

    /// Orders that are under way. Whoever may write into the cluster's store may write anything: whether one is signed
    /// is for hosts to see.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn orders(&self) -> Result<Vec<SignedOrder>, StoreError> {
        self.read(|transaction| {
            let mut all = Vec::new();
            for entry in transaction.open_table(ORDERS)?.iter()? {
                all.extend(SignedOrder::decode(entry?.1.value()));
            }
            Ok(all)
        })
    }

    /// What a host that is registered here has said of an order that another router has issued; false: that order is
    /// not under way.
    ///
    /// # Errors
    ///
    /// The others do not agree, or the disk refuses.
    pub fn pass_report_on(&self, order: &OrderKey, host: HostId, report: &[u8]) -> Result<bool, StoreError> {
        let key = report_key(order, host);
        self.settle(|transaction, draft| {
            if transaction.open_table(ORDERS)?.get(order.bytes())?.is_none() {
                return Ok(false);
            }
            let known = transaction.open_table(ORDER_REPORTS)?.get(key)?.map(|known| known.value().to_vec());
            draft.put(SharedTable::OrderReports, &key, known, Some(report.to_vec()));
            Ok(true)
        })
    }

    /// What other routers have passed on of an order.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn reports_passed_on(&self, order: &OrderKey) -> Result<Vec<(HostId, Vec<u8>)>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(ORDER_REPORTS)?;
            let range = report_key(order, HostId([0; 16]))..=report_key(order, HostId([0xff; 16]));
            let mut all = Vec::new();
            for entry in table.range(range)? {
                let (key, report) = entry?;
                all.push((HostId(bytes("a host-ID", &key.value()[24..])?), report.value().to_vec()));
            }
            Ok(all)
        })
    }

    /// Notes that this host begins with an order, before it does. False: it has begun with it already.
    ///
    /// # Errors
    ///
    /// The disk refuses, or too many are remembered.
    pub fn begin_order(&self, order: &SignedOrder, entry: &AuditEntry) -> Result<bool, StoreError> {
        self.decide(|transaction| {
            let mut table = transaction.open_table(BEGUN)?;
            let key = order.key.bytes();
            if table.get(key)?.is_some() {
                return Ok((false, false));
            }
            table.retain(|_, until_s| until_s >= entry.unix_s)?;
            if table.len()? >= BEGUN_MAX {
                return Err(Failure::Full { what: "orders that it has begun with", limit: BEGUN_MAX });
            }
            table.insert(key, order.until_s)?;
            audit::note(transaction, entry.clone())?;
            Ok((true, true))
        })
    }

    /// Rises with every change of the orders that are under way, and of what was passed on of them.
    pub fn order_changes(&self) -> watch::Receiver<u64> {
        self.orders.subscribe()
    }
}

#[cfg(test)]
mod test {
    use margay_core::key::SigningKey;
    use margay_core::rng::Rng;

    use super::*;
    use crate::chain_order::OrderWords;
    use crate::keyring::Authority;
    use crate::store::tests::store;

    const NOW_S: u64 = 1_700_000_000;

    fn order(number: u16, unix_s: u64) -> SignedOrder {
        let key = SigningKey::generate(&mut Rng::new([1; 32]));
        let by = Authority { name: "shop".to_owned(), key, warrant: None, revoked: None, next: None };
        let words = OrderWords {
            number: number.to_be_bytes().repeat(8),
            router: vec![9; 16],
            act: "insert".to_owned(),
            r#box: "scrub.shop".to_owned(),
            services: "web.shop".to_owned(),
            life_s: 30,
            ..OrderWords::default()
        };
        SignedOrder::sign(&by, &words, unix_s).expect("signed")
    }

    fn entry(unix_s: u64) -> AuditEntry {
        AuditEntry::once(unix_s, "chain-order", "web.shop".to_owned(), "insert scrub.shop".to_owned())
    }

    #[test]
    fn orders_and_what_was_passed_on_of_them_are_there_until_they_are_over() {
        let (_base, store) = store();
        let [one, two] = [order(1, NOW_S), order(2, NOW_S + 20)];
        let changes = store.order_changes();
        let keys = store.key_changes();
        store.issue_order(&one, &entry(NOW_S)).expect("written");
        assert!(changes.has_changed().expect("the store lives") && !keys.has_changed().expect("the store lives"));
        let [a, b] = [HostId([1; 16]), HostId([0xff; 16])];
        assert!(store.pass_report_on(&one.key, a, b"x").expect("written"));
        assert!(store.pass_report_on(&one.key, b, b"y").expect("written"));
        assert!(!store.pass_report_on(&two.key, a, b"x").expect("written"), "it is not under way");
        assert_eq!(store.reports_passed_on(&one.key).expect("readable"), [(a, b"x".to_vec()), (b, b"y".to_vec())]);
        store.issue_order(&two, &entry(NOW_S + 20)).expect("written");
        assert_eq!(store.orders().expect("readable").len(), 2);
        store.end_order(&two.key, &entry(NOW_S + 21)).expect("written");
        assert_eq!(store.orders().expect("readable"), std::slice::from_ref(&one));
        store.issue_order(&order(3, NOW_S + 31), &entry(NOW_S + 31)).expect("written");
        assert_eq!(store.orders().expect("readable"), [order(3, NOW_S + 31)], "the life of the first is over");
        assert!(store.reports_passed_on(&one.key).expect("readable").is_empty());
        assert_eq!(store.audit(10).expect("readable").len(), 4);
        for number in 10..73 {
            store.issue_order(&order(number, NOW_S + 31), &entry(NOW_S + 31)).expect("written");
        }
        let error = store.issue_order(&order(99, NOW_S + 31), &entry(NOW_S + 31)).expect_err("too many");
        assert!(matches!(error, StoreError::Full { .. }), "{error}");
    }

    #[test]
    fn an_order_is_begun_with_once() {
        let (_base, store) = store();
        let one = order(1, NOW_S);
        assert!(store.begin_order(&one, &entry(NOW_S)).expect("written"));
        assert!(!store.begin_order(&one, &entry(NOW_S + 30)).expect("readable"), "a replay");
        assert!(store.begin_order(&order(2, NOW_S + 31), &entry(NOW_S + 31)).expect("written"));
        assert_eq!(store.audit(10).expect("readable").len(), 2, "a replay is no act");
        for number in 3..1026 {
            store.begin_order(&order(number, NOW_S + 31), &entry(NOW_S + 31)).expect("written");
        }
        let error = store.begin_order(&order(2000, NOW_S + 31), &entry(NOW_S + 31)).expect_err("too many");
        assert!(matches!(error, StoreError::Full { .. }), "{error}");
    }
}
