//! Orders to all hosts of an authority: who carries them out, who does not, and what the router that has issued one
//! hears.

use tokio::sync::watch;

use super::super::stream::{Reader, Writer, open};
use super::*;
use crate::chain_order::{OrderReport, OrderWords, SignedOrder};
use crate::keyring::Authority;
use crate::store::{AuditEntry, Marks, Row, SharedTable};

/// A host that has said hello, knows nothing of later versions, and says no more.
pub(super) async fn bare(router: &Party, at: &Router, host: &Party, secret: &TokenSecret) -> (Reader, Writer) {
    let stream = TcpStream::connect(at.local_address()).await.expect("connected");
    let opened = open(stream, &host.local.host_key, &router.local.host_key.public()).await;
    let (reader, mut writer) = opened.expect("opened");
    let hello = super::super::proto::Hello {
        version: VERSION,
        secret: secret.as_bytes().to_vec(),
        authority: authority_block("shop").to_vec(),
        epoch: 1,
        boot_id: vec![2; 16],
        association_id: 5,
        sal_port: 54_324,
        host_name: "web1".to_owned(),
        software: String::new(),
        traces: false,
        orders: false,
    };
    let body = Some(super::super::proto::from_host::Body::Hello(hello));
    writer.write(&super::super::proto::FromHost { body }).await.expect("written");
    (reader, writer)
}

type Carried = Arc<Mutex<Vec<(OrderWords, watch::Sender<OrderReport>)>>>;

/// What a host would carry out.
fn book(host: &Party) -> (Arc<OrderBook>, Carried) {
    let carried = Carried::default();
    let into = Arc::clone(&carried);
    let carry: Carry = Box::new(move |order, tell| into.lock().push((order.words, tell)));
    (OrderBook::new(id(host), Arc::clone(&host.store), clock(), carry), carried)
}

fn id(host: &Party) -> HostId {
    host.local.host_key.public().id()
}

fn order(router: &Party, number: u8, clients: &[&str]) -> SignedOrder {
    signed(&router.keyring.authority("shop").expect("readable").expect("made"), router, number, clients, NOW_S)
}

fn signed(by: &Authority, router: &Party, number: u8, clients: &[&str], unix_s: u64) -> SignedOrder {
    let words = OrderWords {
        number: vec![number; 16],
        router: id(router).0.to_vec(),
        act: "insert".to_owned(),
        r#box: "scrub.shop".to_owned(),
        services: "web.shop".to_owned(),
        clients: clients.iter().map(ToString::to_string).collect(),
        life_s: 30,
        ..OrderWords::default()
    };
    SignedOrder::sign(by, &words, unix_s).expect("signed")
}

/// As the API does.
fn issue(router: &Party, at: &Router, order: &SignedOrder) -> watch::Receiver<Heard> {
    let heard = at.await_order(order.key);
    let entry = AuditEntry::once(NOW_S, "chain-order", "web.shop".to_owned(), "insert scrub.shop".to_owned());
    router.store.issue_order(order, &entry).expect("written");
    heard
}

async fn hear(heard: &mut watch::Receiver<Heard>, host: &Party, is_so: impl Fn(&OrderReport) -> bool) -> OrderReport {
    let host = id(host);
    let said = timeout(LIMIT, heard.wait_for(|heard| heard.get(&host).is_some_and(&is_so))).await;
    said.expect("in time").expect("the router lives")[&host].clone()
}

fn tell(carried: &Carried, at: usize, report: OrderReport) {
    let (words, tell) = &carried.lock()[at];
    tell.send_replace(OrderReport { number: words.number.clone(), ..report });
}

fn acts(host: &Party) -> Vec<String> {
    host.store
        .audit(100)
        .expect("readable")
        .into_iter()
        .map(|entry| entry.act)
        .filter(|act| act == "chain-order")
        .collect()
}

#[tokio::test]
async fn a_host_carries_an_order_out_once_and_says_how_it_goes() {
    let (router, at, host, home) = shop().await;
    let (own_book, own) = book(&router);
    at.set_order_book(own_book);
    home.stop().await;
    let home = host.join(&router, &at, None);
    let (host_book, carried) = book(&host);
    home.set_order_book(host_book);
    await_phase(&home, Phase::Connected).await;
    let signed = order(&router, 1, &[]);
    let mut heard = issue(&router, &at, &signed);
    let first = hear(&mut heard, &host, |_| true).await;
    assert_eq!((first.over, first.sessions, first.refused.as_str()), (false, 0, ""), "it is acknowledged");
    assert!(first.issuer_told);
    tell(&carried, 0, OrderReport { sessions: 3, changed: 1, ..OrderReport::default() });
    assert_eq!(hear(&mut heard, &host, |report| report.sessions == 3).await.changed, 1);
    // The same once more, by whichever way, is no other one.
    let row = |value| -> Row { (SharedTable::Orders, signed.key.bytes().to_vec(), value) };
    for value in [None, Some(signed.encode())] {
        router.store.follow(&[row(value.clone())], Marks::default()).expect("written");
        until("the router's looking", || at.shared.orders.live.borrow().len() == usize::from(value.is_some())).await;
        home.register(registration("web.shop", 100));
        until("what is told with it", || state_of(&home, "web.shop") == "registered").await;
    }
    tell(&carried, 0, OrderReport { sessions: 3, changed: 3, over: true, ..OrderReport::default() });
    assert_eq!(hear(&mut heard, &host, |report| report.over).await.changed, 3);
    // The router's own host is one of the authority's.
    tell(&own, 0, OrderReport { over: true, ..OrderReport::default() });
    hear(&mut heard, &router, |report| report.over).await;
    assert_eq!((carried.lock().len(), own.lock().len()), (1, 1));
    assert_eq!((acts(&host).len(), acts(&router).len()), (1, 2), "the router has issued it, too");
    at.forget_order(&signed.key);
    home.stop().await;
    at.stop().await;
}

#[tokio::test]
async fn a_host_takes_orders_from_the_authority_alone_and_for_itself_alone() {
    let (router, at, host, home) = shop().await;
    let (host_book, carried) = book(&host);
    home.set_order_book(host_book);
    home.stop().await;
    let home = host.join(&router, &at, None);
    let (host_book, again) = book(&host);
    home.set_order_book(host_book);
    await_phase(&home, Phase::Connected).await;
    let posing = party(7, "posing").keyring.create_authority("shop").expect("made");
    let own = router.keyring.authority("shop").expect("readable").expect("made");
    let bad = [
        (signed(&posing, &router, 1, &[], NOW_S), "not signed by the authority"),
        (signed(&own, &router, 2, &[], NOW_S + 1000), "more than ten minutes from now"),
        (signed(&own, &router, 3, &["group:ops"], NOW_S), "does not show it in a group"),
    ];
    for (order, why) in bad {
        let mut heard = issue(&router, &at, &order);
        let said = hear(&mut heard, &host, |report| report.over).await;
        assert!(said.refused.contains(why), "{}", said.refused);
    }
    assert!(again.lock().is_empty() && acts(&host).is_empty());
    let mut heard = issue(&router, &at, &order(&router, 4, &["group:front"]));
    hear(&mut heard, &host, |report| report.refused.is_empty()).await;
    assert_eq!((carried.lock().len(), again.lock().len()), (0, 1), "its certificate shows that group");
    assert_eq!(home.state().phase, Phase::Connected, "the rest of what the router says counts");
    home.stop().await;
    at.stop().await;
}

#[tokio::test]
async fn an_order_that_was_begun_with_before_a_start_is_not_begun_with_again() {
    let (router, at, host, home) = shop().await;
    home.stop().await;
    let order = order(&router, 1, &[]);
    let entry = AuditEntry::once(NOW_S, "chain-order", "web.shop".to_owned(), String::new());
    assert!(host.store.begin_order(&order, &entry).expect("written"));
    let mut heard = issue(&router, &at, &order);
    let (host_book, carried) = book(&host);
    let home = host.join(&router, &at, None);
    home.set_order_book(host_book);
    let said = hear(&mut heard, &host, |report| report.over).await;
    assert!(said.refused.contains("has started again"), "{}", said.refused);
    assert!(carried.lock().is_empty());
    home.stop().await;
    at.stop().await;
}

#[tokio::test]
async fn a_host_of_an_earlier_version_is_named_at_once_and_is_told_nothing() {
    let (router, host) = (party(1, "router"), party(2, "web1"));
    let authority = router.keyring.create_authority("shop").expect("made");
    let at = router.route(60_000).await;
    let secret = router.token(1, 9, vec![authority_prefix(&authority)]);
    let (mut reader, _writer) = bare(&router, &at, &host, &secret).await;
    until("the host's arrival", || at.host_count() == 1).await;
    let mut heard = issue(&router, &at, &order(&router, 1, &[]));
    assert!(hear(&mut heard, &host, |report| report.over).await.older);
    // What it is told next is an answer to what is done next.
    router.store.remove_member(id(&host), NOW_S).expect("written");
    at.remove_host(id(&host)).expect("removed");
    loop {
        let message: super::super::proto::FromRouter = match reader.read().await {
            Ok(message) => message,
            Err(_) => break,
        };
        assert!(!matches!(message.body, Some(super::super::proto::from_router::Body::Order(_))));
    }
    at.stop().await;
}

#[tokio::test]
async fn a_host_that_reaches_another_router_of_the_cluster_alone_is_heard_by_the_one_that_has_issued_the_order() {
    let (router, at, host, home) = shop().await;
    home.stop().await;
    let other = Party { keyring: router.keyring.clone(), ..party(4, "other") };
    let beside = other.route(60_000).await;
    let home = host.join(&other, &beside, Some(other.token(1, 8, Vec::new())));
    let (host_book, carried) = book(&host);
    home.set_order_book(host_book);
    await_phase(&home, Phase::Connected).await;
    let order = order(&router, 1, &[]);
    let mut heard = issue(&router, &at, &order);
    let share = |from: &Party, to: &Party, table| {
        let rows = from.store.shared_rows(table).expect("readable").into_iter();
        let rows: Vec<Row> = rows.map(|(key, value)| (table, key, Some(value))).collect();
        to.store.follow(&rows, Marks::default()).expect("written");
    };
    share(&router, &other, SharedTable::Orders);
    until("the order", || !carried.lock().is_empty()).await;
    let passed_on = || other.store.reports_passed_on(&order.key).expect("readable");
    assert!(passed_on().is_empty(), "the last word alone is passed on");
    tell(&carried, 0, OrderReport { sessions: 2, changed: 2, over: true, ..OrderReport::default() });
    until("the last word", || passed_on().len() == 1).await;
    share(&other, &router, SharedTable::OrderReports);
    let said = hear(&mut heard, &host, |report| report.over).await;
    assert_eq!((said.sessions, said.changed, said.issuer_told), (2, 2, false));
    home.stop().await;
    beside.stop().await;
    at.stop().await;
}
