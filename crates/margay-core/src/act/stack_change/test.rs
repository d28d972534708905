//! The declared lives of a change, and what one end alone does.

use super::*;
use crate::act::handover::HandoverRecord;
use crate::act::handover::tests::{meet_peer, record, sal};
use crate::association::{FEC, SCTP};
use crate::cache::output::Output;
use crate::leg::seal::Cipher;
use crate::machine::input::Input;
use crate::types::config::Limits;
use margay_wire::Message;
use margay_wire::{CHANGES, STACK_ENCAP, STACK_FEC};

#[test]
fn the_whole_matrix_of_the_leading_end() {
    let expected = "\
Asking Answered Turning\nAsking Refused Over\nAsking Done -\nAsking Fenced -\nAsking TimeOut Over
Turning Answered -\nTurning Refused -\nTurning Done Told\nTurning Fenced FenceFirst\nTurning TimeOut Over
FenceFirst Answered -\nFenceFirst Refused -\nFenceFirst Done Over\nFenceFirst Fenced -\nFenceFirst TimeOut Over
Told Answered -\nTold Refused -\nTold Done -\nTold Fenced Over\nTold TimeOut Over
Over Answered -\nOver Refused -\nOver Done -\nOver Fenced -\nOver TimeOut -\n";
    assert_eq!(LEADING.matrix(), expected);
    assert!(LEADING.faults().is_empty(), "{:?}", LEADING.faults());
}

#[test]
fn the_whole_matrix_of_the_following_end() {
    let expected = "\
Ready Confirmed Turning\nReady Fenced FenceFirst\nReady Abandoned Left\nReady TimeOut Left
FenceFirst Confirmed Made\nFenceFirst Fenced -\nFenceFirst Abandoned Left\nFenceFirst TimeOut Left
Turning Confirmed -\nTurning Fenced Made\nTurning Abandoned -\nTurning TimeOut Made
Made Confirmed -\nMade Fenced -\nMade Abandoned -\nMade TimeOut -
Left Confirmed -\nLeft Fenced -\nLeft Abandoned -\nLeft TimeOut -\n";
    assert_eq!(FOLLOWING.matrix(), expected);
    assert!(FOLLOWING.faults().is_empty(), "{:?}", FOLLOWING.faults());
}

#[test]
fn what_may_come_of_each_stack() {
    use Stack::{Fec, Plain, Sctp, Secure, SecureFec, SecureSctp};
    let of = |takes, before| Stacks { sends: before, takes, before, change: 1 };
    let taken = |takes, before| {
        let taken = Stack::ALL.into_iter().filter(|stack| of(takes, before).takes(*stack));
        taken.collect::<Vec<_>>()
    };
    for stack in Stack::ALL {
        assert_eq!(taken(Taking::Only(stack), stack), [stack]);
    }
    assert_eq!(taken(Taking::Turning(Plain), Secure), [Plain, Secure]);
    assert_eq!(taken(Taking::Ready(Secure), Plain), [Plain, Secure]);
    assert_eq!(taken(Taking::Ready(Secure), Fec), [Fec, Secure], "nothing of a third one");
    assert_eq!(taken(Taking::Turning(Fec), Plain), [Plain, Fec]);
    assert_eq!(taken(Taking::Ready(SecureFec), Secure), [Secure, SecureFec], "nothing that is not sealed");
    assert!(of(Taking::Ready(SecureSctp), Secure).is_sealed_only() && of(Taking::Only(Sctp), Sctp).has_repeated());
    assert!(!of(Taking::Ready(Secure), Sctp).is_sealed_only());
    assert!(of(Taking::Ready(SecureFec), Secure).is_sealed_only());
    assert!(!of(Taking::Ready(SecureFec), Fec).is_sealed_only() && of(Taking::Ready(SecureFec), Fec).has_sealed());
    let direct = |takes, before| of(takes, before).takes_direct();
    assert!(direct(Taking::Only(Plain), Plain));
    for takes in [Taking::Ready(Secure), Taking::Turning(Secure), Taking::Ready(Fec), Taking::Turning(Fec)] {
        assert!(direct(takes, Plain), "{takes:?}");
    }
    for before in [Fec, Sctp, Secure, SecureFec, SecureSctp] {
        let not_plain = [Taking::Only(before), Taking::Ready(Plain), Taking::Turning(Plain)];
        assert!(not_plain.iter().all(|takes| !direct(*takes, before)), "{before} takes nothing direct");
    }
    let known = [Plain, Secure, Secure, Fec, SecureFec, SecureFec, Sctp, SecureSctp, SecureSctp].map(Some);
    assert_eq!([2, 3, 4, 5, 6, 7, 8, 9, 10].map(Stack::of_number), known);
    assert_eq!([0, 1, 11].map(Stack::of_number), [None; 3]);
    for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
        for stack in Stack::ALL {
            let number = stack.number(Some(cipher));
            assert_eq!((Stack::of_number(number), Cipher::sealing(number).is_some()), (Some(stack), stack.is_sealed()));
        }
    }
}

/// A host with one established flow, whose peer can do `stacks`.
fn host(role: Role, stacks: u32) -> (Sal, FlowId) {
    let mut sal = sal(Limits::default());
    sal.set_secure(&[Cipher::ChaCha20Poly1305], false, Vec::new());
    meet_peer(&mut sal, 77);
    let lifecycle = crate::types::role::Lifecycle::Established;
    let record = HandoverRecord { role, lifecycle, fins: (false, false), ..record() };
    sal.adopt_flow(Instant::ZERO, &record).expect("the peer is known");
    let association = sal.flows.get(record.flow).map_or(0, |flow| flow.association);
    sal.associations.set_stacks(association, stacks);
    while sal.poll(&mut [0; 4096]).is_some() {}
    while sal.poll_event().is_some() {}
    (sal, record.flow)
}

/// What becomes of an order: of every stack of a flow of datagrams, ordered to every other; where nobody demands a
/// seal, where this end does, and where the peer does.
#[test]
fn the_whole_matrix_of_orders() {
    let mut matrix = String::new();
    let start = Instant::from_millis(10_000);
    for from in Stack::ALL {
        for to in Stack::ALL {
            let outcomes = [Marks::empty(), Marks::DEMANDS, Marks::PEER_DEMANDS].map(|demand| {
                if !demand.is_empty() && !from.is_sealed() {
                    return "-".into();
                }
                let (mut sal, id) = host(Role::Initiator, ABLE_OF_ALL);
                sal.flows.derive_seal(&sal.associations, &sal.config, id, Cipher::ChaCha20Poly1305).expect("its first");
                let flow = sal.flows.get_mut(id).expect("there");
                flow.app.protocol = 17;
                flow.stacks = Stacks::only(from);
                sal.note_demand(id, demand, !demand.is_empty());
                match sal.set_flow_stack(start, id, to) {
                    Ok(true) => sal.stack_changes.under_way(id).expect("a change").to_string(),
                    Ok(false) => "is so".into(),
                    Err(ChangeRefused::Demanded(End::This)) => "refused".into(),
                    Err(other) => other.to_string(),
                }
            });
            matrix.push_str(&alloc::format!("{from} {to}: {}\n", outcomes.join(", ")));
        }
    }
    // A peer that demands refuses by itself what is less.
    let expected = "\
plain plain: is so, -, -
plain fec: fec, -, -
plain sctp: sctp, -, -
plain secure: secure, -, -
plain secure-fec: secure-fec, -, -
plain secure-sctp: secure-sctp, -, -
fec plain: plain, -, -
fec fec: is so, -, -
fec sctp: sctp, -, -
fec secure: secure, -, -
fec secure-fec: secure-fec, -, -
fec secure-sctp: secure-sctp, -, -
sctp plain: plain, -, -
sctp fec: fec, -, -
sctp sctp: is so, -, -
sctp secure: secure, -, -
sctp secure-fec: secure-fec, -, -
sctp secure-sctp: secure-sctp, -, -
secure plain: plain, refused, plain
secure fec: secure-fec, secure-fec, secure-fec
secure sctp: secure-sctp, secure-sctp, secure-sctp
secure secure: is so, is so, is so
secure secure-fec: secure-fec, secure-fec, secure-fec
secure secure-sctp: secure-sctp, secure-sctp, secure-sctp
secure-fec plain: plain, refused, plain
secure-fec fec: is so, is so, is so
secure-fec sctp: secure-sctp, secure-sctp, secure-sctp
secure-fec secure: secure, secure, secure
secure-fec secure-fec: is so, is so, is so
secure-fec secure-sctp: secure-sctp, secure-sctp, secure-sctp
secure-sctp plain: plain, refused, plain
secure-sctp fec: secure-fec, secure-fec, secure-fec
secure-sctp sctp: is so, is so, is so
secure-sctp secure: secure, secure, secure
secure-sctp secure-fec: secure-fec, secure-fec, secure-fec
secure-sctp secure-sctp: is so, is so, is so
";
    assert_eq!(matrix, expected);
}

#[test]
fn two_ends_with_different_stacks_agree_in_one_that_both_have_everything_for() {
    use Stack::{Fec, Plain, Sctp, Secure, SecureFec, SecureSctp};
    let rows = Stack::ALL.map(|one| Stack::ALL.map(|other| one.agreed(other)));
    let expected = [
        [Plain, Plain, Plain, Secure, Secure, Secure],
        [Plain, Fec, Plain, Secure, Secure, Secure],
        [Plain, Plain, Sctp, Secure, Secure, Secure],
        [Secure, Secure, Secure, Secure, Secure, Secure],
        [Secure, Secure, Secure, Secure, SecureFec, Secure],
        [Secure, Secure, Secure, Secure, Secure, SecureSctp],
    ];
    assert_eq!(rows, expected);
}

/// A flow by `secure-fec`, told what the peer has of it.
#[test]
fn what_is_sealed_stays_so_whatever_the_peer_has() {
    let start = Instant::from_millis(10_000);
    for theirs in [Stack::Plain, Stack::Fec, Stack::Secure] {
        let (mut sal, id) = host(Role::Responder, ABLE | FEC | Cipher::ChaCha20Poly1305.fec_bit());
        sal.flows.derive_seal(&sal.associations, &sal.config, id, Cipher::ChaCha20Poly1305).expect("its first");
        sal.flows.get_mut(id).expect("there").stacks = Stacks { change: 9, ..Stacks::only(Stack::SecureFec) };
        let number = theirs.number(Some(Cipher::ChaCha20Poly1305));
        let told = ChangeRepr { step: ChangeStep::Tell, stack: number, ..request(Stack::Plain, 8) };
        assert_eq!(sal.told(start, id, told, false), Ok(()));
        assert_eq!(stacks(&sal, id).settled(), Some(Stack::Secure), "{theirs}");
        assert_eq!(said(&mut sal), [ChangeStep::Tell], "{theirs}");
    }
}

#[test]
fn fec_under_a_seal_is_refused_where_it_cannot_be_and_a_demand_does_not_wait_for_it() {
    let start = Instant::from_millis(10_000);
    let (mut sal, id) = host(Role::Initiator, ABLE | FEC);
    sal.flows.get_mut(id).expect("there").app.protocol = 17;
    assert_eq!(sal.set_flow_stack(start, id, Stack::SecureFec), Err(ChangeRefused::NoSealedFec));
    sal.note_demand(id, Marks::DEMANDS, true);
    assert_eq!(sal.set_flow_stack(start, id, Stack::Fec), Err(ChangeRefused::NoSealedFec), "and never less");
    sal.flows.get_mut(id).expect("there").app.protocol = 6;
    assert_eq!(sal.set_flow_stack(start, id, Stack::SecureFec), Err(ChangeRefused::DatagramsOnly));
    let (mut sal, id) = host(Role::Initiator, CHANGES | FEC);
    sal.flows.get_mut(id).expect("there").app.protocol = 17;
    assert_eq!(sal.set_flow_stack(start, id, Stack::SecureFec), Err(ChangeRefused::NoCipher));
}

#[test]
fn sctp_is_for_datagrams_and_peers_that_have_it_sealed_or_not() {
    const NOBODY: Marks = Marks::empty();
    let start = Instant::from_millis(10_000);
    let refused = |protocol: u8, stacks: u32, demand: Marks, to: Stack| {
        let (mut sal, id) = host(Role::Initiator, stacks);
        sal.flows.get_mut(id).expect("there").app.protocol = protocol;
        sal.note_demand(id, demand, !demand.is_empty());
        sal.set_flow_stack(start, id, to)
    };
    assert_eq!(refused(6, ABLE_OF_ALL, NOBODY, Stack::Sctp), Err(ChangeRefused::DatagramsOnly));
    assert_eq!(refused(6, ABLE_OF_ALL, NOBODY, Stack::SecureSctp), Err(ChangeRefused::DatagramsOnly));
    assert_eq!(refused(17, ABLE | FEC, NOBODY, Stack::Sctp), Err(ChangeRefused::NoSctp));
    assert_eq!(refused(17, ABLE | SCTP, NOBODY, Stack::Fec), Err(ChangeRefused::NoFec), "each by itself");
    assert_eq!(refused(17, ABLE | SCTP, NOBODY, Stack::SecureSctp), Err(ChangeRefused::NoSealedSctp));
    assert_eq!(
        refused(17, ABLE | SCTP, Marks::DEMANDS, Stack::Sctp),
        Err(ChangeRefused::NoSealedSctp),
        "and never less"
    );
    assert_eq!(refused(17, CHANGES | SCTP, NOBODY, Stack::SecureSctp), Err(ChangeRefused::NoCipher));
    assert_eq!(refused(17, CHANGES | SCTP, NOBODY, Stack::Sctp), Ok(true));
    assert_eq!(refused(17, ABLE_OF_ALL, Marks::DEMANDS, Stack::Sctp), Ok(true));
}

/// A demand that comes late: a change to less that is not made comes to nothing, and one to more goes on.
#[test]
fn a_late_demand_ends_changes_to_less_and_lets_those_to_more_go_on() {
    let start = Instant::from_millis(10_000);
    for (to, goes_on) in [(Stack::Plain, false), (Stack::Fec, false), (Stack::SecureFec, true)] {
        let (mut sal, id) = host(Role::Responder, ABLE | FEC | Cipher::ChaCha20Poly1305.fec_bit());
        sal.flows.derive_seal(&sal.associations, &sal.config, id, Cipher::ChaCha20Poly1305).expect("its first");
        let flow = sal.flows.get_mut(id).expect("there");
        flow.app.protocol = 17;
        flow.stacks = Stacks::only(Stack::Secure);
        let asked = ChangeRepr { stack: to.number(Some(Cipher::ChaCha20Poly1305)), ..request(Stack::Plain, 5) };
        assert_eq!(sal.requested(start, id, asked), Ok(()));
        sal.note_demand(id, Marks::DEMANDS, true);
        sal.keep_as_demanded(id);
        assert_eq!(sal.stack_changes.under_way(id).is_some(), goes_on, "{to}");
        assert!(stacks(&sal, id).is_sealed_only(), "{to}");
    }
}

#[test]
fn fec_is_for_datagrams_and_peers_that_have_it() {
    let start = Instant::from_millis(10_000);
    let with = |protocol: u8, stacks: u32| {
        let (mut sal, id) = host(Role::Initiator, stacks);
        sal.flows.get_mut(id).expect("there").app.protocol = protocol;
        (sal, id)
    };
    let (mut sal, id) = with(6, ABLE | FEC);
    assert_eq!(sal.set_flow_stack(start, id, Stack::Fec), Err(ChangeRefused::DatagramsOnly));
    let (mut sal, id) = with(17, ABLE);
    assert_eq!(sal.set_flow_stack(start, id, Stack::Fec), Err(ChangeRefused::NoFec));
    // Without a cipher in common.
    let (mut sal, id) = with(17, CHANGES | FEC);
    assert_eq!(sal.set_flow_stack(start, id, Stack::Fec), Ok(true));
    let number = stacks(&sal, id).change;
    assert_eq!(sal.leading_event(start, id, number, LeadingEvent::Answered), Ok(()));
    let turned = Stacks { sends: Stack::Fec, takes: Taking::Ready(Stack::Fec), before: Stack::Plain, change: number };
    assert_eq!(stacks(&sal, id), turned);
    assert_eq!(sal.leading_event(start, id, number, LeadingEvent::Done), Ok(()));
    sal.handle(start, Input::Turned { flow: id, change: number });
    assert_eq!(stacks(&sal, id), Stacks { change: number, ..Stacks::only(Stack::Fec) });
    // The peer's agent has started again, and has it plain.
    let plain = ChangeRepr { step: ChangeStep::Tell, ..request(Stack::Plain, number) };
    assert_eq!(sal.told(start, id, plain, false), Ok(()));
    assert_eq!(stacks(&sal, id).settled(), Some(Stack::Plain));
    assert_eq!(sal.told(start, id, ChangeRepr { stack: STACK_FEC, ..plain }, false), Ok(()));
    assert_eq!(stacks(&sal, id).settled(), Some(Stack::Plain), "it is the other one that goes back");
}

const ABLE: u32 = CHANGES | Cipher::ChaCha20Poly1305.bit();
/// Of a peer that has every stack.
const ABLE_OF_ALL: u32 = ABLE | FEC | SCTP | Cipher::ChaCha20Poly1305.fec_bit() | Cipher::ChaCha20Poly1305.sctp_bit();

/// The steps that a host says.
fn said(sal: &mut Sal) -> Vec<ChangeStep> {
    let mut buf = alloc::vec![0; 65_536];
    let mut steps = Vec::new();
    while let Some(output) = sal.poll(&mut buf) {
        if let Output::Transmit { len, .. } = output {
            let message = Message::parse(&buf[..len]).expect("ours");
            steps.extend(message.change().map(|change| change.step));
        }
    }
    steps
}

#[test]
fn a_silent_peer_is_asked_four_times_and_the_flow_stays_as_it_was() {
    for (role, step, last) in [
        (Role::Initiator, ChangeStep::Request, &[ChangeStep::Abandon][..]),
        (Role::Responder, ChangeStep::Propose, &[]),
    ] {
        let (mut sal, id) = host(role, ABLE);
        let start = Instant::from_millis(10_000);
        assert_eq!(sal.set_flow_stack(start, id, Stack::Secure), Ok(true));
        assert_eq!(sal.set_flow_stack(start, id, Stack::Plain), Err(ChangeRefused::UnderWay));
        let mut steps = said(&mut sal);
        assert_eq!(sal.locked_sessions(start), usize::from(role == Role::Initiator));
        for millis in (0..2000).step_by(10) {
            sal.handle(start + Duration::from_millis(millis), Input::Timeout);
            steps.extend(said(&mut sal));
        }
        assert_eq!(steps, [step; 4]);
        let end = start + PATIENCE;
        sal.handle(end, Input::Timeout);
        assert_eq!(said(&mut sal), last);
        assert_eq!(sal.locked_sessions(end), 0);
        let info = sal.flow(id).expect("it goes on");
        assert_eq!((info.stack.stack, info.stack.changing_to, info.secure), (Stack::Plain, None, None));
        let outcomes: Vec<&str> = info.stack.changes.iter().map(|change| change.outcome.label()).collect();
        assert_eq!(outcomes, ["no-answer"], "what is refused since it is under way says so at once");
    }
}

#[test]
fn who_cannot_be_changed_hears_why() {
    let start = Instant::from_millis(10_000);
    let (mut sal, id) = host(Role::Initiator, 0);
    assert_eq!(sal.set_flow_stack(start, id, Stack::Secure), Err(ChangeRefused::OldPeer));
    let (mut sal, id) = host(Role::Initiator, CHANGES | Cipher::Aes256Gcm.bit());
    assert_eq!(sal.set_flow_stack(start, id, Stack::Secure), Err(ChangeRefused::NoCipher));
    assert_eq!(sal.set_flow_stack(start, FlowId(1), Stack::Secure), Err(ChangeRefused::UnknownFlow(FlowId(1))));
    assert_eq!(sal.set_flow_stack(start, id, Stack::Plain), Ok(false), "it is so already");
    assert_eq!(sal.flow(id).and_then(|flow| flow.stack.order).map(|order| order.stack), Some(Stack::Plain));
    assert_eq!(sal.release_flow_stack(start, id), Ok(false));
    assert_eq!(sal.release_flow_stack(start, id), Err(ChangeRefused::NoOrder));
    sal.handle(
        start,
        Input::Transport {
            flow: id,
            direction: crate::types::direction::Direction::Ingress,
            flags: crate::cache::packet::tcp_flags::FIN,
        },
    );
    assert_eq!(sal.set_flow_stack(start, id, Stack::Secure), Err(ChangeRefused::NotOpen));
    assert!(said(&mut sal).is_empty(), "nobody was asked");
    let busy = host(Role::Initiator, ABLE);
    let (mut sal, id) = busy;
    let session = sal.flows.get(id).map(|flow| flow.session).expect("there");
    let holder = crate::session::Holder { host: sal.config.host_id(), act: crate::session::Act::HandOver };
    sal.locks
        .acquire(crate::types::fair_table::Peer::Own, session, holder, start, Duration::from_secs(1))
        .expect("free");
    assert!(matches!(sal.set_flow_stack(start, id, Stack::Secure), Err(ChangeRefused::Busy(_))));
}

#[test]
fn eight_changes_are_remembered_and_a_flow_that_ends_frees_its_lock() {
    let (mut sal, id) = host(Role::Initiator, 0);
    for second in 1..20 {
        let now = Instant::from_millis(second * 1000);
        assert!(sal.set_flow_stack(now, id, Stack::Secure).is_err());
    }
    let changes = sal.flow(id).expect("there").stack.changes;
    assert_eq!((changes.len(), changes[0].at), (8, Instant::from_millis(12_000)));
    let association = sal.flows.get(id).map_or(0, |flow| flow.association);
    sal.associations.set_stacks(association, ABLE);
    let now = Instant::from_millis(30_000);
    assert_eq!(sal.set_flow_stack(now, id, Stack::Secure), Ok(true));
    assert!(sal.close_flow(now, id));
    assert_eq!(sal.locked_sessions(now), 0);
    let ended = core::iter::from_fn(|| sal.poll_event())
        .any(|event| matches!(event, Event::StackChanged { change, .. } if change.outcome == ChangeOutcome::Ended));
    assert!(ended);
}

/// What an initiator asks for.
fn request(stack: Stack, number: u32) -> ChangeRepr {
    let stack = if stack == Stack::Secure { Cipher::ChaCha20Poly1305.stack() } else { STACK_ENCAP };
    ChangeRepr { step: ChangeStep::Request, stack, demands: false, by_rule: false, number }
}

fn stacks(sal: &Sal, id: FlowId) -> Stacks {
    sal.flows.get(id).expect("there").stacks
}

#[test]
fn a_plain_fence_makes_no_change_before_the_peer_has_said_a_word() {
    let (mut sal, id) = host(Role::Responder, ABLE);
    let start = Instant::from_millis(10_000);
    assert_eq!(sal.requested(start, id, request(Stack::Secure, 5)), Ok(()));
    assert_eq!(stacks(&sal, id).takes, Taking::Ready(Stack::Secure));
    sal.handle(start, Input::Turned { flow: id, change: 5 });
    assert_eq!(said(&mut sal), [ChangeStep::Answer], "it has not turned");
    assert_eq!(stacks(&sal, id).sends, Stack::Plain);
    // The answer is lost.
    assert_eq!(sal.requested(start, id, request(Stack::Secure, 5)), Ok(()));
    assert_eq!(said(&mut sal), [ChangeStep::Answer]);
    assert_eq!(sal.confirmed(start, id, request(Stack::Secure, 5)), Ok(()));
    assert_eq!((stacks(&sal, id).settled(), said(&mut sal)), (Some(Stack::Secure), alloc::vec![ChangeStep::Done]));
    // By a sealed one the peer says it itself.
    assert_eq!(sal.requested(start, id, request(Stack::Plain, 6)), Ok(()));
    sal.handle(start, Input::Turned { flow: id, change: 6 });
    let steps = alloc::vec![ChangeStep::Answer, ChangeStep::Done];
    assert_eq!((stacks(&sal, id).settled(), said(&mut sal)), (Some(Stack::Plain), steps));
    // One that is forged, and no more: it goes on as it was.
    assert_eq!(sal.requested(start, id, request(Stack::Secure, 7)), Ok(()));
    sal.handle(start, Input::Turned { flow: id, change: 7 });
    sal.handle(start + PATIENCE * 2, Input::Timeout);
    assert_eq!(stacks(&sal, id).settled(), Some(Stack::Plain));
}

#[test]
fn the_leading_end_takes_no_plain_fence_for_the_responders_word() {
    let (mut sal, id) = host(Role::Initiator, ABLE);
    let start = Instant::from_millis(10_000);
    assert_eq!(sal.set_flow_stack(start, id, Stack::Secure), Ok(true));
    let number = stacks(&sal, id).change;
    assert_eq!(sal.leading_event(start, id, number, LeadingEvent::Answered), Ok(()));
    assert_eq!(stacks(&sal, id).takes, Taking::Ready(Stack::Secure));
    sal.handle(start, Input::Turned { flow: id, change: number });
    assert_eq!((stacks(&sal, id).settled(), sal.locked_sessions(start)), (None, 1));
    said(&mut sal);
    sal.handle(start + PATIENCE / 2, Input::Timeout);
    assert!(said(&mut sal).contains(&ChangeStep::Confirm), "it is said again");
    assert_eq!(sal.leading_event(start, id, number, LeadingEvent::Done), Ok(()));
    assert_eq!((stacks(&sal, id).settled(), sal.locked_sessions(start)), (Some(Stack::Secure), 0));
}

#[test]
fn a_request_that_comes_before_the_fence_of_the_change_before_is_kept_until_the_fence() {
    let start = Instant::from_millis(10_000);
    let kept = |requests: &[u32]| {
        let (mut sal, id) = host(Role::Responder, ABLE);
        assert_eq!(sal.requested(start, id, request(Stack::Secure, 5)), Ok(()));
        assert_eq!(sal.confirmed(start, id, request(Stack::Secure, 5)), Ok(()));
        said(&mut sal);
        for number in requests {
            assert_eq!(sal.requested(start, id, request(Stack::Plain, *number)), Ok(()));
        }
        assert!(said(&mut sal).is_empty(), "what is of the stack before may still wait to be read");
        assert_eq!(stacks(&sal, id).takes, Taking::Turning(Stack::Secure));
        (sal, id)
    };
    let (mut sal, id) = kept(&[6, 6, 7, 6]);
    assert_eq!(sal.requested(start, id, request(Stack::Plain, 4)), Err(DropReason::Stale));
    sal.handle(start, Input::Turned { flow: id, change: 5 });
    let Stacks { takes, change, .. } = stacks(&sal, id);
    assert_eq!((takes, change), (Taking::Ready(Stack::Plain), 7), "the last one");
    assert_eq!(said(&mut sal), [ChangeStep::Answer]);
    // The FENCE is lost.
    let (mut sal, id) = kept(&[6]);
    sal.handle(start + PATIENCE, Input::Timeout);
    assert_eq!(
        (stacks(&sal, id).takes, said(&mut sal)),
        (Taking::Ready(Stack::Plain), alloc::vec![ChangeStep::Answer])
    );
    // The initiator does not wait for so long.
    let (mut sal, id) = kept(&[6]);
    assert_eq!(sal.abandoned(start, id, 7), Err(DropReason::Stale));
    assert_eq!(sal.abandoned(start, id, 6), Ok(()));
    sal.handle(start, Input::Turned { flow: id, change: 5 });
    assert_eq!((stacks(&sal, id).settled(), said(&mut sal)), (Some(Stack::Secure), alloc::vec![]));
    assert!(sal.flow(id).is_some_and(|flow| flow.stack.changing_to.is_none()));
}

/// A peer that has the cipher replaced could have the first one come back, with numbers that begin again.
#[test]
fn a_flow_keeps_its_cipher_until_an_agent_starts_again() {
    let start = Instant::from_millis(10_000);
    let (aes, chacha) = (Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305);
    let (mut sal, id) = host(Role::Responder, ABLE | aes.bit());
    sal.set_secure(&[aes, chacha], false, Vec::new());
    let asks = |cipher: Cipher, number| ChangeRepr { stack: cipher.stack(), ..request(Stack::Secure, number) };
    let keys = |sal: &Sal| sal.flows.get(id).and_then(|flow| flow.seal.as_deref().copied()).expect("it has keys");
    assert_eq!(sal.requested(start, id, asks(chacha, 5)), Ok(()));
    let first = keys(&sal);
    assert_eq!(sal.abandoned(start, id, 5), Ok(()));
    said(&mut sal);
    assert_eq!(sal.requested(start, id, asks(aes, 6)), Ok(()));
    assert_eq!(said(&mut sal), [ChangeStep::Refuse]);
    let tells = ChangeRepr { step: ChangeStep::Tell, ..asks(aes, 7) };
    assert_eq!(sal.told(start, id, tells, false), Err(DropReason::OtherCipher));
    assert!(said(&mut sal).is_empty() && stacks(&sal, id).settled() == Some(Stack::Plain), "nothing has changed");
    assert!(keys(&sal) == first && sal.stack_changes.under_way(id).is_none());
    assert_eq!(sal.requested(start, id, asks(chacha, 8)), Ok(()));
    assert_eq!(said(&mut sal), [ChangeStep::Answer]);
    assert!(keys(&sal) == first, "the numbers go on under these");
    assert_eq!(sal.abandoned(start, id, 8), Ok(()));
    let association = sal.flows.get(id).map_or(0, |flow| flow.association);
    sal.associations.get_mut(association).expect("its own").peer_epoch += 1;
    assert_eq!(sal.requested(start, id, asks(aes, 9)), Ok(()));
    assert_eq!(keys(&sal).cipher, aes, "all keys are fresh");
}
