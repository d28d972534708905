use super::*;
use crate::trust::standing::{MEMBER_IDLE, STRANGER_IDLE, STRANGERS_PER_ADDRESS, STRANGERS_PER_NETWORK};

fn association(id: u32, host: u8) -> Association {
    let remote = SocketAddr::new([10, 0, 0, host].into(), 54324);
    Association::new(id, id, HostPublic([host; 32]), Keys { root: [1; 32] }, true, remote)
}

fn table(limit: usize) -> AssociationTable {
    AssociationTable::with_hasher(limit, 64, 1, KeyedHash(1, 2))
}

#[test]
fn the_window_takes_each_number_once() {
    let mut rng = Rng::new([4; 32]);
    let (mut window, mut naive) = (ReplayWindow::default(), BTreeSet::new());
    let mut newest = 0_u32;
    for _ in 0..10_000 {
        let sequence = (newest + 1).saturating_sub(rng.u32() % 100) + rng.u32() % 8;
        let wanted = sequence != 0 && !naive.contains(&sequence) && newest < sequence + WINDOW;
        assert_eq!(window.is_new(sequence), wanted, "{sequence} after {newest}");
        if wanted {
            window.note(sequence);
            naive.insert(sequence);
            newest = newest.max(sequence);
        }
    }
}

#[test]
fn the_newest_association_of_a_host_serves_and_older_ones_go_with_their_flows() {
    let mut table = table(100);
    table.insert(association(1, 5)).expect("room");
    table.hold(1);
    table.insert(association(2, 5)).expect("room");
    let host = HostPublic([5; 32]).id();
    assert_eq!(table.by_host(host).map(|association| association.local_id), Some(2));
    assert!(table.get(1).is_some(), "it has a flow");
    assert!(table.release(1));
    assert!(table.get(1).is_none());
    assert_eq!(table.at_address(SocketAddr::new([10, 0, 0, 5].into(), 54324)).count(), 1);
}

#[test]
fn a_full_table_lets_idle_ones_go_and_refuses_when_none_is() {
    let mut table = table(2);
    let at = SocketAddr::new([10, 0, 0, 1].into(), 54324);
    table.insert(member(1, at)).expect("room");
    table.insert(member(2, at)).expect("room");
    table.hold(2);
    table.insert(member(3, at)).expect("the first is idle");
    assert!(table.get(1).is_none());
    table.hold(3);
    assert_eq!(table.insert(member(4, at)), Err(DropReason::Full));
}

#[test]
fn each_direction_and_epoch_has_its_own_key() {
    let mut here = association(1, 5);
    let remote = here.remote;
    let mut there = Association::new(1, 1, HostPublic([6; 32]), Keys { root: [1; 32] }, false, remote);
    assert_eq!(here.sending_key(3), there.receiving_key(3));
    assert_eq!(there.sending_key(3), here.receiving_key(3));
    assert_ne!(here.sending_key(3), here.receiving_key(3));
    assert_ne!(here.sending_key(3), here.sending_key(4));
    let mut own = association(1, 5).with_itself();
    assert_eq!(own.sending_key(3), own.receiving_key(3));
}
/// One of a stranger at `remote`, heard at `n` ms.
fn stranger(n: u32, remote: SocketAddr) -> Association {
    let mut key = [7; 32];
    key[..4].copy_from_slice(&n.to_be_bytes());
    let mut one = Association::new(n, n, HostPublic(key), Keys { root: [1; 32] }, false, remote);
    one.heard = Instant::from_millis(n.into());
    one
}

fn member(n: u32, remote: SocketAddr) -> Association {
    let shown = Membership { authority: [1; 8], groups: alloc::vec![], not_after_s: u64::MAX, issuers: alloc::vec![] };
    Association { membership: Some(shown), ..stranger(n, remote) }
}

#[test]
fn idle_associations_do_not_crowd_an_address_and_busy_ones_stay() {
    let mut table = table(4000);
    // Each from another port.
    let at = |n: u32| SocketAddr::new([10, 0, 0, 99].into(), n as u16);
    for n in 1..=200 {
        table.insert(stranger(n, at(n))).expect("room");
        if n <= 40 {
            table.hold(n);
        }
    }
    assert!((1..=40).all(|n| table.get(n).is_some()));
    assert_eq!(table.len(), 40 + STRANGERS_PER_ADDRESS);
    assert!(table.get(200).is_some(), "the newest is always there");
}

#[test]
fn the_links_of_one_network_do_not_crowd_out_others() {
    let mut table = table(10_000);
    let at = |network: u16, link: u32| SocketAddr::new([0x2001, 0xdb8, network, link as u16, 0, 0, 0, 1].into(), 54324);
    table.insert(stranger(1, at(2, 1))).expect("room");
    for n in 2..=2000 {
        table.insert(stranger(n, at(1, n))).expect("room");
    }
    assert_eq!(table.len(), 1 + STRANGERS_PER_NETWORK);
    assert!(table.get(1).is_some());
}

#[test]
fn strangers_take_neither_a_members_place_nor_the_half_that_is_left_to_members() {
    let mut table = table(32);
    let at = |n: u32| SocketAddr::new([10, (n >> 8) as u8, n as u8, 1].into(), 54324);
    for n in 1..=4 {
        table.insert(member(n, at(n))).expect("room");
    }
    for n in 100..1000 {
        if table.insert(stranger(n, at(n))).is_ok() {
            table.hold(n);
        }
    }
    assert!((1..=4).all(|n| table.get(n).is_some()), "idle for longer than any stranger");
    assert_eq!(table.len(), 4 + 16);
    for n in 5..=17 {
        assert_eq!(table.insert(member(n, at(n))), Ok(usize::from(n == 17)), "the oldest of its like");
    }
    assert_eq!((table.len(), table.get(1).is_none()), (32, true));
}

#[test]
fn strangers_with_a_flow_each_at_one_address_leave_room_for_those_elsewhere() {
    let mut table = table(160);
    let at = |network: u8, host: u8, n: u32| SocketAddr::new([10, 0, network, host].into(), n as u16);
    let mut fill = |network, host, first: u32| {
        let mut is_in = |n| table.insert(stranger(n, at(network, host, n))).map(|_| table.hold(n)).is_ok();
        (first..first + 100).filter(|n| is_in(*n)).count()
    };
    assert_eq!(fill(1, 1, 1000), 10, "an address");
    assert_eq!((2..9).map(|host| fill(1, host, 1000 * u32::from(host))).sum::<usize>(), 30, "its network");
    assert_eq!(fill(2, 1, 20_000), 10, "another network");
    table.set_membership(1000, member(0, at(1, 1, 1)).membership);
    let mut is_in = |n| table.insert(stranger(n, at(1, 1, n))).is_ok();
    assert!(is_in(30_000), "a member counts no more as a stranger");
    assert!(is_in(30_001), "in the place of the one before, which is idle");
    assert!(table.get(30_000).is_none() && table.get(30_001).is_some());
}

#[test]
fn strangers_that_have_their_half_keep_this_host_from_meeting_nobody() {
    let mut table = table(160);
    let at = |n: u32| SocketAddr::new([10, (n >> 8) as u8, n as u8, 1].into(), 54324);
    let mut is_in = |n, initiator| {
        let one = Association { initiator, ..stranger(n, at(n)) };
        table.insert(one).map(|_| table.hold(n)).is_ok()
    };
    assert_eq!((1000..2000).filter(|n| is_in(*n, false)).count(), 80);
    // Whoever is met first shows its certificate later.
    assert!((1..=8).all(|n| is_in(n, true)));
    assert!(table.check_flow_share(1).is_err(), "it was greeted to have room");
    table.remove(1);
    assert!(table.insert(stranger(3000, at(3000))).is_err(), "it leaves nothing to strangers");
    table.remove(1000);
    table.check_flow_share(2).expect("room for one");
    table.hold_flow(2, Role::Responder);
    assert!(table.check_flow_share(3).is_err(), "the other one has it");
}

#[test]
fn one_peers_flows_leave_room_for_those_of_others_whatever_association_they_use() {
    let mut table = table(160);
    let at = |host| SocketAddr::new([10, 0, 0, host].into(), 54324);
    table.insert(member(1, at(1))).expect("room");
    table.hold_flow(1, Role::Responder);
    table.insert(Association { local_id: 2, ..member(1, at(1)) }).expect("room");
    table.insert(stranger(3, at(3))).expect("room");
    table.insert(member(4, at(4))).expect("room");
    let mut fill = |id| {
        let mut may_begin = || table.check_flow_share(id).map(|()| table.hold_flow(id, Role::Responder)).is_ok();
        core::iter::repeat_with(&mut may_begin).take(64).filter(|is_begun| *is_begun).count()
    };
    assert_eq!([1, 2, 3, 4].map(&mut fill), [31, 0, 4, 14], "of 64: half, four, half of the rest");
    table.hold_flow(3, Role::Initiator);
    assert!(!table.release_flow(3, Role::Initiator));
    assert!(table.check_flow_share(3).is_err(), "this host's own do not count for the peer");
    table.release_flow(3, Role::Responder);
    assert!(table.check_flow_share(3).is_ok(), "one of its own is over");
    table.set_membership(1, None);
    assert!(table.check_flow_share(4).is_ok(), "what a host counts for has changed, and its flows with it");
    assert!(table.check_flow_share(1).is_err());
    (1..=4).for_each(|id| drop(table.remove(id)));
    table.insert(member(5, at(5))).expect("room");
    assert!(table.check_flow_share(5).is_ok());
}

#[test]
fn the_idle_expire_and_what_is_in_use_or_tied_stays() {
    let mut table = table(100);
    let at = |n: u32| SocketAddr::new([10, 0, n as u8, 1].into(), 54324);
    table.insert(stranger(1, at(1))).expect("room");
    table.insert(stranger(2, at(2))).expect("room");
    table.insert(member(3, at(3))).expect("room");
    table.insert(Association { router: true, ..stranger(4, at(4)) }).expect("room");
    table.insert(stranger(5, at(5)).with_itself()).expect("room");
    table.hold(2);
    let late = |idle: Duration| Instant::from_millis(100) + idle;
    assert_eq!(table.expire(Instant::ZERO + STRANGER_IDLE), 0);
    assert_eq!((table.expire(late(STRANGER_IDLE)), table.get(1).is_none()), (1, true));
    assert!(!table.release(2));
    assert_eq!(table.expire(late(STRANGER_IDLE)), 0, "its flow was there until now");
    assert_eq!((table.expire(late(2 * STRANGER_IDLE)), table.get(2).is_none()), (1, true));
    table.touch(3, late(MEMBER_IDLE));
    assert_eq!(table.expire(late(MEMBER_IDLE)), 0, "it was heard");
    table.set_membership(3, None);
    assert_eq!((table.expire(late(2 * MEMBER_IDLE)), table.len()), (1, 2));
}

#[test]
fn news_for_the_next_start_are_of_what_it_gets() {
    let mut table = table(100);
    let at = SocketAddr::new([10, 0, 0, 1].into(), 54324);
    assert!(!table.take_kept_news());
    table.insert(stranger(1, at)).expect("room");
    assert!(!table.take_kept_news(), "strangers come as they like");
    table.hold(1);
    assert!(table.take_kept_news() && !table.take_kept_news());
    table.hold(1);
    table.touch(1, Instant::from_millis(9));
    assert!(!table.take_kept_news());
    table.remove(1);
    assert!(table.take_kept_news());
}

/// The three indices say the same after whatever happened, and the bound holds.
#[test]
fn whose_hop_key_may_have_changed_is_given_to_a_copy_once() {
    let mut table = table(9);
    let (host, at) =
        (Neighbour::Host(association(1, 1).host), |n| Neighbour::At(SocketAddr::new([10, 0, 0, n].into(), 1)));
    let with_key = |id, n| {
        let remote = SocketAddr::new([10, 0, 0, n].into(), 1);
        Association { hop_key: Some([n; 16]), remote, ..association(id, 1) }
    };
    table.insert(with_key(1, 5)).expect("room");
    table.insert(association(2, 2)).expect("room");
    table.follow_hop_keys();
    assert!(table.has_news());
    let key = Some([5; 16]);
    let first = Part { begins_anew: true, changed: alloc::vec![(host, key), (at(5), key)] };
    assert_eq!(table.take_hop_keys(9), first);
    table.insert(association(3, 3)).expect("room");
    let nothing = Part { begins_anew: false, changed: alloc::vec![] };
    assert_eq!((table.has_news(), table.take_hop_keys(9)), (false, nothing), "it has none");
    table.set_remote(1, SocketAddr::new([10, 0, 0, 6].into(), 1));
    assert_eq!(table.take_hop_keys(9).changed, [(host, key), (at(5), None), (at(6), key)]);
    table.insert(with_key(4, 7)).expect("room");
    let key = Some([7; 16]);
    assert_eq!(table.take_hop_keys(9).changed, [(host, key), (at(6), None), (at(7), key)], "it superseded the other");
    table.remove(4);
    assert_eq!(table.take_hop_keys(9).changed, [(host, None), (at(7), None)]);
}

#[test]
fn the_indices_agree_after_any_history() {
    let mut rng = Rng::new([11; 32]);
    let mut table = table(12);
    for step in 0..20_000_u64 {
        let n = rng.u32() % 20 + 1;
        match rng.u32() % 6 {
            0 | 1 => {
                let host = rng.u32() % 6;
                let remote = SocketAddr::new([10, 0, 0, host as u8].into(), 54324);
                let mut one = Association { local_id: n, ..member(host, remote) };
                one.membership = one.membership.filter(|_| host.is_multiple_of(2));
                one.heard = Instant::from_millis(step);
                let host = one.host;
                if table.insert(one).is_ok() {
                    assert_eq!(table.by_host(host).map(|known| known.local_id), Some(n));
                }
            }
            2 => table.hold(n),
            3 => {
                let was = table.get(n).map(|known| known.flows);
                assert!(!table.release(n) || was.is_some_and(|flows| flows <= 1));
            }
            4 => {
                table.remove(n);
            }
            _ => table.set_remote(n, SocketAddr::new([10, 0, 0, (rng.u32() % 6) as u8].into(), 54324)),
        }
        assert!(table.len() <= 12);
        let count = |lists: alloc::vec::Vec<usize>| lists.iter().sum::<usize>();
        assert_eq!(table.by_address.len(), table.len());
        assert_eq!(table.kept().count(), table.len(), "as long as there are few strangers");
        let busy = table.iter().filter(|known| known.flows > 0).count();
        assert_eq!(table.in_use().filter(|known| known.flows > 0).count(), busy);
        assert_eq!(count(table.by_host.values().map(alloc::vec::Vec::len).collect()), table.len());
        for known in table.iter() {
            assert!(table.at_address(known.remote).any(|at| at.local_id == known.local_id));
            assert!(known.flows == 0 || table.get(known.local_id).is_some());
        }
        let is_its = |host: &HostId, id: &u32| table.get(*id).is_some_and(|known| known.host == *host);
        assert!(table.by_host.iter().all(|(host, ids)| ids.iter().all(|id| is_its(host, id))));
    }
}
