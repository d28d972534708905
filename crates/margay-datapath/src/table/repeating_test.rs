//! What repeats a flow, while its stack changes.

use margay_core::entry::{Entry, EntryUpdate};
use margay_core::{Cipher, DropReason, RemoveReason, Taking};
use margay_wire::{STACK_ENCAP, STACK_SCTP};

use super::*;
use crate::packet::FlowKey;
use crate::sample;
use crate::table::Origin;
use crate::table::test::{data, entry, table};

/// What DATA of a stack becomes, from where the flow's path leads.
fn taken(table: &Table, stack: u8, flags: u8) -> Result<Option<Arc<Sctp>>, DropReason> {
    let from = "10.0.0.2:54324".parse().expect("literal");
    table.ingress(FlowId(7), (None, from), &DataRepr { stack, flags, ..data(0, 0) }).map(|route| route.sctp)
}

fn with_stacks(generation: u32, sends: Stack, takes: Taking, before: Stack, change: u32) -> EntryUpdate {
    let stacks = Stacks { sends, takes, before, change };
    EntryUpdate::Install(Entry { stacks, ..entry(7, generation, 100) })
}

#[test]
fn what_repeats_a_flow_goes_on_for_a_while_behind_the_fence() {
    let mut table = table();
    table.apply(EntryUpdate::Install(entry(7, 1, 100)));
    assert_eq!(taken(&table, STACK_SCTP, 0), Err(DropReason::OtherStack));
    table.apply(with_stacks(2, Stack::Plain, Taking::Ready(Stack::Sctp), Stack::Plain, 9));
    let sctp = table.sctp(FlowId(7)).expect("ready");
    assert_eq!((taken(&table, STACK_SCTP, 0), taken(&table, STACK_ENCAP, 0)), (Ok(Some(Arc::clone(&sctp))), Ok(None)));
    table.apply(with_stacks(3, Stack::Sctp, Taking::Turning(Stack::Sctp), Stack::Plain, 9));
    let last = table.begin_turn(FlowId(7)).expect("it turns");
    assert_eq!((last.stack, last.to, last.route.sctp), (Stack::Plain, Stack::Sctp, None));
    table.apply(with_stacks(4, Stack::Sctp, Taking::Only(Stack::Sctp), Stack::Sctp, 9));
    let route = table.route_by(FlowId(7), Stack::Sctp).expect("of its own");
    assert_eq!(route.sctp, Some(Arc::clone(&sctp)));
    // And back: this end turns, then the peer does.
    table.apply(with_stacks(5, Stack::Plain, Taking::Turning(Stack::Plain), Stack::Sctp, 10));
    let last = table.begin_turn(FlowId(7)).expect("it turns");
    assert_eq!((last.stack, last.change, last.route.sctp), (Stack::Sctp, 10, Some(Arc::clone(&sctp))));
    assert!(sctp.is_lingering(clock::now()), "left with the turn");
    let turn = table.turn_of(table.find(FlowId(7)).expect("cached")).expect("the peer turns");
    assert!(turn.fence(10));
    let route = |flags| {
        let from = "10.0.0.2:54324".parse().expect("literal");
        let data = DataRepr { stack: STACK_SCTP, flags, ..data(0, 0) };
        table.ingress(FlowId(7), (None, from), &data).expect("taken").turn
    };
    assert!(route(0).is_none() && route(FENCE).is_some(), "what is under way has no place before the FENCE");
    table.apply(with_stacks(6, Stack::Plain, Taking::Only(Stack::Plain), Stack::Plain, 10));
    assert_eq!(taken(&table, STACK_SCTP, 0), Ok(Some(Arc::clone(&sctp))), "it is still repeated");
    assert_eq!(taken(&table, STACK_SCTP, FENCE), Err(DropReason::OtherStack));
    assert!(table.route_by(FlowId(7), Stack::Sctp).is_some() && table.sctp(FlowId(7)).is_none());
    // A flow that waits for its seal sends nothing by its own.
    let held = Entry { is_held: true, stacks: Stacks::only(Stack::Plain), ..entry(7, 7, 100) };
    table.apply(EntryUpdate::Install(held));
    assert!(table.route_by(FlowId(7), Stack::Sctp).is_none());
    table.forget_sctp(&sctp);
    assert_eq!(taken(&table, STACK_SCTP, 0), Err(DropReason::OtherStack));
    assert!(table.sctps.is_empty());
}

#[test]
fn nothing_is_repeated_as_it_is_of_a_flow_that_is_sealed() {
    let mut table = table();
    let keys = sample::seal_keys(Cipher::Aes256Gcm);
    let update = |generation, stacks: Stacks| {
        EntryUpdate::Install(Entry { stacks, seal: Some(keys), ..entry(7, generation, 100) })
    };
    let by = |sends, takes, before| Stacks { sends, takes, before, change: 9 };
    table.apply(update(1, Stacks { change: 8, ..Stacks::only(Stack::Sctp) }));
    let sctp = table.sctp(FlowId(7)).expect("kept");
    table.apply(update(2, by(Stack::SecureSctp, Taking::Turning(Stack::SecureSctp), Stack::Sctp)));
    let last = table.begin_turn(FlowId(7)).expect("it turns");
    assert!(sctp.is_left() && !sctp.is_lingering(clock::now()) && last.to == Stack::SecureSctp);
    assert_eq!(taken(&table, STACK_SCTP, 0), Ok(Some(Arc::clone(&sctp))), "the peer has not turned");
    table.apply(update(3, Stacks { change: 9, ..Stacks::only(Stack::SecureSctp) }));
    assert_eq!(taken(&table, STACK_SCTP, 0), Err(DropReason::OtherStack));
    let sealed = table.sctp(FlowId(7)).expect("kept");
    assert!(sealed != sctp && sealed.stack == Stack::SecureSctp);
    // Sealed to plain: what is under way stays sealed, and is repeated.
    table.apply(update(4, Stacks { change: 10, ..Stacks::only(Stack::Plain) }));
    let last = table.begin_turn(FlowId(7)).expect("it turns");
    assert_eq!(last.route.sctp, Some(Arc::clone(&sealed)));
    assert!(sealed.is_lingering(clock::now()));
    assert_eq!(taken(&table, keys.cipher.sctp_stack(), 0), Ok(Some(sealed)));
    assert_eq!(taken(&table, keys.cipher.stack(), 0), Err(DropReason::OtherStack));
    table.apply(EntryUpdate::Remove { flow: FlowId(7), reason: RemoveReason::Closed });
    assert!(table.sctps.is_empty());
}

/// The peer acknowledges what this end sends by its new stack before it turns itself.
#[test]
fn acknowledgements_do_not_wait_for_the_fence_of_a_peer_that_turns_later() {
    let keys = sample::seal_keys(Cipher::Aes256Gcm);
    let from = "10.0.0.2:54324".parse().expect("literal");
    for (before, to, passes) in [
        (Stack::Secure, Stack::SecureSctp, true),
        (Stack::Plain, Stack::Sctp, true),
        (Stack::Plain, Stack::SecureSctp, true),
        // Anybody may forge that: the peer's FENCE, which is sealed, has to come first.
        (Stack::Secure, Stack::Sctp, false),
    ] {
        let mut table = table();
        let stacks = Stacks { sends: to, takes: Taking::Ready(to), before, change: 9 };
        table.apply(EntryUpdate::Install(Entry { stacks, seal: Some(keys), ..entry(7, 1, 100) }));
        let stack = if to.is_sealed() { keys.cipher.sctp_stack() } else { STACK_SCTP };
        let turn = |flags| {
            let route = table.ingress(FlowId(7), (None, from), &DataRepr { stack, flags, ..data(0, 0) });
            route.expect("of a stack that it takes").turn
        };
        assert_eq!(turn(0).is_none(), passes, "{before} to {to}");
        assert!(turn(FENCE).is_some(), "{before} to {to}");
    }
}

/// The change is over at both ends, and the thread that sends has not come to its last packet of the stack before.
#[test]
fn what_the_peer_repeats_is_taken_also_before_this_end_has_turned() {
    let mut table = table();
    let keys = sample::seal_keys(Cipher::Aes256Gcm);
    let update = |generation, stacks: Stacks| {
        EntryUpdate::Install(Entry { stacks, seal: Some(keys), ..entry(7, generation, 100) })
    };
    table.apply(update(1, Stacks { change: 8, ..Stacks::only(Stack::SecureSctp) }));
    let sctp = table.sctp(FlowId(7)).expect("kept");
    table.apply(update(2, Stacks { change: 9, ..Stacks::only(Stack::Secure) }));
    let stack = keys.cipher.sctp_stack();
    assert_eq!(taken(&table, stack, 0), Ok(Some(Arc::clone(&sctp))));
    table.begin_turn(FlowId(7)).expect("it turns");
    // An update between the turn and whatever its thread does next.
    table.apply(update(3, Stacks { change: 9, ..Stacks::only(Stack::Secure) }));
    assert_eq!(taken(&table, stack, 0), Ok(Some(sctp)), "what is under way is repeated, and acknowledged");
}

/// A rule demands that a flow is sealed: it is held, and then not one plain packet of it leaves, repetitions included.
#[test]
fn of_a_flow_that_was_held_until_it_is_sealed_only_the_last_packet_is_plain() {
    let mut table = table();
    let keys = sample::seal_keys(Cipher::Aes256Gcm);
    let key = FlowKey::from(entry(7, 1, 100).app);
    for (generation, before, to) in [(1, Stack::Plain, Stack::Secure), (11, Stack::Sctp, Stack::SecureSctp)] {
        let update = |generation, stacks: Stacks, is_held| {
            EntryUpdate::Install(Entry { stacks, is_held, seal: Some(keys), ..entry(7, generation, 100) })
        };
        table.apply(update(generation, Stacks { change: 8, ..Stacks::only(before) }, false));
        let _ = table.begin_turn(FlowId(7));
        table.apply(update(generation + 1, Stacks { change: 8, ..Stacks::only(before) }, true));
        assert!(table.egress(&key, 1, 1, None, Origin::Core).is_none() && table.route_by(FlowId(7), before).is_none());
        let stacks = Stacks { sends: to, takes: Taking::Ready(to), before, change: 9 };
        table.apply(update(generation + 2, stacks, false));
        let route = table.egress(&key, 1, 1, None, Origin::Core).expect("it goes on");
        assert!(route.seal.is_some(), "the core sends what has waited before another thread turns the flow");
        assert!(table.route_by(FlowId(7), before).is_none() && table.is_to_turn(FlowId(7)));
        let last = table.begin_turn(FlowId(7)).expect("the peer waits for it");
        assert_eq!((last.stack, last.to, last.change, last.route.seal), (before, to, 9, None));
        assert!(!table.is_to_turn(FlowId(7)) && table.begin_turn(FlowId(7)).is_none(), "once");
    }
}
