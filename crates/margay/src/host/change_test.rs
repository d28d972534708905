//! Changes upon a network namespace of their own: each is made, undone by another program, seen as undone, and put
//! back. It needs root; without it the test says so and passes.

use std::process::Command;
use std::sync::Arc;

use nix::sched::{CloneFlags, unshare};

use super::*;
use crate::agent::INTERFACE;
use crate::host::plan::test::changes_of_a_usual_host;
use crate::host::responder_way::Namespace;

fn ip(words: &str) {
    let done = Command::new("ip").args(words.split(' ')).status().expect("iproute2 is there");
    assert!(done.success(), "ip {words}");
}

/// Runs `body` on a thread with a network of its own.
fn alone<F: Future<Output = ()>>(body: impl FnOnce(Netlink) -> F + Send + 'static) {
    if !nix::unistd::Uid::effective().is_root() {
        eprintln!("skipped: namespaces need root");
        return;
    }
    let thread = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).expect("root may");
        ip("link set lo up");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let responders = Arc::new(Namespace::new().expect("root may"));
        runtime.block_on(async { body(Netlink::connect().expect("netlink").with_namespace(Some(responders))).await });
    });
    thread.join().expect("the test on its own thread passes");
}

/// What another program does to a change; none where it is not of the kernel's, or needs the whole host.
fn undoing(change: &Change) -> Option<String> {
    let family = |address: &IpAddr| if address.is_ipv4() { "-4" } else { "-6" };
    Some(match change {
        Change::Sizes { interface, .. } => format!("link set {interface} mtu 1300"),
        Change::Address { interface, block } => format!("addr del {block} dev {interface}"),
        Change::Up { interface } => format!("link set {interface} down"),
        Change::Route { interface, table, destination, .. } => {
            format!("{} route del {destination} dev {interface} table {table}", family(&destination.address))
        }
        Change::Rule { from: Some(from), from_bits, source_port: None, table, .. } => {
            let bits = from_bits.map(|bits| format!("/{bits}")).unwrap_or_default();
            format!("{} rule del from {from}{bits} table {table}", family(from))
        }
        Change::Rule { to: Some(to), table, .. } => format!("{} rule del to {to} table {table}", family(&to.address)),
        Change::Rule { from: Some(from), source_port: Some(port), table, .. } => {
            format!("{} rule del from {from} sport {port} table {table}", family(from))
        }
        _ => return None,
    })
}

async fn make(net: &Netlink, changes: &[Change]) {
    for change in changes {
        if change.state(net).await.expect("looked at") != State::Present {
            change.apply(net).await.expect("made");
        }
    }
}

async fn all_are_there(net: &Netlink, changes: &[Change]) {
    for change in changes {
        assert_eq!(change.state(net).await.expect("looked at"), State::Present, "{change}");
    }
}

#[test]
fn what_is_undone_is_seen_and_put_back_in_the_order_of_the_list() {
    alone(|net| async move {
        let changes = changes_of_a_usual_host();
        make(&net, &changes).await;
        all_are_there(&net, &changes).await;
        let mut undone = 0;
        for change in &changes {
            let act = match change {
                Change::Tun { interface } | Change::Veth { interface, .. } => format!("link del {interface}"),
                change => match undoing(change) {
                    Some(act) => act,
                    None => continue,
                },
            };
            ip(&act);
            assert_ne!(change.state(&net).await.expect("looked at"), State::Present, "{act}");
            make(&net, &changes).await;
            all_are_there(&net, &changes).await;
            undone += 1;
        }
        assert!(undone >= 14, "{undone}");
    });
}

#[test]
fn rules_go_before_those_that_others_add_and_are_undone_wherever_they_stand() {
    alone(|net| async move {
        let changes = changes_of_a_usual_host();
        make(&net, &changes).await;
        // Where none is named, the kernel takes the place before all but that of this host's own addresses.
        for _ in 0..3 {
            ip("rule add table 52");
            ip("-6 rule add table 52");
            make(&net, &changes).await;
            all_are_there(&net, &changes).await;
            let rules = net.rules().await.expect("read");
            assert_eq!(rule_place::before(&rules, Ranges::USUAL), Vec::<&ListedRule>::new());
        }
        ip("rule add pref 1 table 52");
        make(&net, &changes).await;
        let rules = net.rules().await.expect("read");
        let before: Vec<String> =
            rule_place::before(&rules, Ranges::USUAL).into_iter().map(ToString::to_string).collect();
        assert_eq!(before, ["rule 1 of IPv4 (lookup 52)"], "there is no room before it");

        for change in changes.iter().rev() {
            change.undo(&net).await.expect("undone");
        }
        let own = net
            .rules()
            .await
            .expect("read")
            .into_iter()
            .filter(|listed| listed.rule.is_some_and(|rule| rule.from.is_some() || rule.to.is_some()));
        assert_eq!(own.count(), 0);
        assert!(net.link(INTERFACE).await.expect("read").is_none());
    });
}

#[test]
fn a_route_of_others_into_the_virtual_addresses_is_named() {
    alone(|net| async move {
        ip("link add own0 type bridge");
        ip("link set own0 up");
        ip("route add 198.18.7.0/24 dev own0");
        ip("-6 route add fd5a:4c00:7::/48 dev own0");
        // Wider ones are asked last.
        ip("route add 198.0.0.0/8 dev own0");
        let mut found = crate::host::clashes(Ranges::USUAL).await.expect("read");
        found.sort();
        assert_eq!(found, ["198.18.7.0/24 dev own0", "fd5a:4c00:7::/48 dev own0"]);
        make(&net, &changes_of_a_usual_host()).await;
        assert_eq!(crate::host::clashes(Ranges::USUAL).await.expect("read").len(), 2, "Margay's own are none");
    });
}
