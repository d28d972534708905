//! Notices as bytes, which of them are believed, and what they end.

use super::*;
use crate::act::handover::HandoverRecord;
use crate::act::handover::tests::{meet_peer, record, sal};
use crate::cache::output::Output;
use crate::trust::certificate::{Certificate, CertificateKind, TrustAnchor, encode_chain};
use crate::types::config::Limits;
use crate::types::fair_table::Peer;
use crate::types::key::{SigningKey, VerifyingKey};
use crate::types::rng::Rng;

fn host(n: u8) -> HostSecret {
    HostSecret::generate(&mut Rng::new([n; 32]))
}

fn authority() -> SigningKey {
    SigningKey::generate(&mut Rng::new([1; 32]))
}

/// The name that the flows of these tests are of.
fn name() -> Prefix {
    Prefix::from(record().service)
}

fn chain_for(prefix: Prefix, host: &HostSecret, by: &SigningKey) -> Vec<u8> {
    chain_until(1000, prefix, host, by)
}

fn chain_until(not_after_s: u64, prefix: Prefix, host: &HostSecret, by: &SigningKey) -> Vec<u8> {
    let certificate = Certificate {
        kind: CertificateKind::Service,
        prefix,
        host_key: host.public().0,
        not_before_s: 0,
        not_after_s,
        groups: Vec::new(),
        issuer: VerifyingKey([0; 32]),
        delegate: None,
        signature: [0; 64],
    };
    encode_chain(&[certificate.sign(by)])
}

fn notice(number: u64, holder: u8) -> FenceNotice {
    let holder = host(holder);
    FenceNotice::new(name(), number, &holder, chain_for(name(), &holder, &authority()))
}

/// A host with one flow with a peer, which it has begun or takes.
fn with_flow(role: Role) -> Sal {
    let mut sal = sal(Limits::default());
    meet_peer(&mut sal, 77);
    sal.add_trust_anchor(TrustAnchor { authority: name().id.authority(), key: authority().public() });
    add_flow(&mut sal, role);
    sal
}

fn add_flow(sal: &mut Sal, role: Role) {
    let record = HandoverRecord { role, fins: (false, false), lifecycle: Lifecycle::Established, ..record() };
    sal.adopt_flow(Instant::ZERO, &record).expect("the peer is known");
}

fn peer(sal: &Sal) -> HostId {
    sal.associations.get(77).expect("met").host
}

fn is_open(sal: &Sal) -> bool {
    sal.flow(record().flow).is_some_and(|flow| flow.lifecycle == Lifecycle::Established)
}

const ONE: Result<Fenced, FenceError> = Ok(Fenced { initiated: 1, served: 0 });
const NONE: Result<Fenced, FenceError> = Ok(Fenced { initiated: 0, served: 0 });

#[test]
fn the_format_is_as_written_above() {
    let prefix = Prefix::new(ServiceId([0xff; 32]), 12);
    let made = FenceNotice::new(prefix, 0x0102, &host(2), b"chain".to_vec());
    let bytes = made.encode();
    assert_eq!(bytes[..6], [1, 0, 0, 12, 0xff, 0xf0]);
    assert_eq!((&bytes[6..36], &bytes[36..44]), (&[0; 30][..], &[0, 0, 0, 0, 0, 0, 1, 2][..]));
    assert_eq!(bytes[44..76], host(2).public().0);
    let signed = [b"margay 2026 fence", &bytes[..76]].concat();
    assert_eq!((&bytes[76..140], &bytes[140..]), (&host(2).sign(&signed)[..], &b"chain"[..]));
    assert_eq!(FenceNotice::decode(&bytes), Ok(made));
    assert_eq!(FenceNotice::decode(&bytes[..139]), Err(BadFenceNotice));
    for (at, byte) in [(0, 2), (1, 1), (2, 1), (3, 11)] {
        let mut other = bytes.clone();
        other[at] = byte;
        assert!(FenceNotice::decode(&other).is_err() || at == 2, "byte {at}");
    }
    let long = [&bytes[..140], &[0; CHAIN_LEN_MAX + 1]].concat();
    assert_eq!(FenceNotice::decode(&long), Err(BadFenceNotice));
    assert_eq!(FenceNotice::decode(&long[..FENCE_NOTICE_LEN_MAX]).map(|read| read.chain.len()), Ok(CHAIN_LEN_MAX));
}

#[test]
fn no_flipped_bit_is_believed() {
    let good = notice(3, 2).encode();
    for bit in 0..FIXED_LEN * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let mut sal = with_flow(Role::Initiator);
        let read = FenceNotice::decode(&bad);
        assert!(read.map_or(true, |read| sal.handle_fence(Instant::ZERO, &read).is_err()), "bit {bit}");
        assert!(is_open(&sal), "bit {bit}");
    }
}

#[test]
fn a_flow_to_the_former_holder_ends_at_once_and_both_ends_hear_why() {
    let mut sal = with_flow(Role::Initiator);
    let former = peer(&sal);
    assert_eq!(sal.handle_fence(Instant::ZERO, &notice(3, 2)), ONE);
    assert!(!is_open(&sal));
    let (mut buf, mut fails) = (alloc::vec![0; 65_536], 0);
    while let Some(output) = sal.poll(&mut buf) {
        fails += u32::from(matches!(output, Output::Transmit { .. }) && buf[1] == margay_wire::Kind::Fail.into());
    }
    assert_eq!(fails, 1);
    let cause = GiveUpCause::Elsewhere(host(2).public().id());
    let told = core::iter::from_fn(|| sal.poll_event()).collect::<Vec<_>>();
    assert!(told.contains(&Event::GivenUp { peer: former, flows: 1, cause }), "{told:?}");
    let is_end = |event: &Event| matches!(event, Event::FlowClosed { reason: RemoveReason::Elsewhere, .. });
    assert_eq!(told.iter().filter(|event| is_end(event)).count(), 1);
    assert_eq!(sal.counters().peers_given_up(), [("silent", 0), ("left", 0), ("elsewhere", 1)]);
    assert_eq!(sal.counters().removals(RemoveReason::Elsewhere), 1);
}

#[test]
fn a_former_holder_ends_what_it_serves_and_the_present_one_nothing() {
    let mut former = with_flow(Role::Responder);
    former.set_own_fence(name(), Some(2));
    assert!(former.fences.own_fence(&record().service).is_some());
    assert_eq!(former.handle_fence(Instant::ZERO, &notice(3, 2)), Ok(Fenced { initiated: 0, served: 1 }));
    assert!(!is_open(&former) && former.fences.own_fence(&record().service).is_none());

    let mut present = with_flow(Role::Responder);
    present.set_own_fence(name(), Some(4));
    assert_eq!(present.handle_fence(Instant::ZERO, &notice(3, 2)), Err(FenceError::Outdated), "an older holder's");
    assert!(is_open(&present));
    assert_eq!(present.leave_fenced(Instant::ZERO, name()), 1);
    assert!(!is_open(&present));
}

#[test]
fn who_may_not_answer_for_the_name_is_not_believed() {
    let foreign_key = SigningKey::generate(&mut Rng::new([9; 32]));
    let by_foreign = chain_for(name(), &host(2), &foreign_key);
    let of_other_host = chain_for(name(), &host(3), &authority());
    let wide = Prefix::new(name().id, 200);
    let narrow = chain_for(name(), &host(2), &authority());
    for (prefix, chain) in [(name(), by_foreign), (name(), of_other_host), (name(), Vec::new()), (wide, narrow)] {
        let mut sal = with_flow(Role::Initiator);
        let refused = sal.handle_fence(Instant::ZERO, &FenceNotice::new(prefix, 3, &host(2), chain));
        assert!(matches!(refused, Err(FenceError::Certificate(_))), "{refused:?}");
        assert!(is_open(&sal));
    }
    let mut forged = notice(3, 2);
    forged.number = 4;
    let mut sal = with_flow(Role::Initiator);
    assert_eq!(sal.handle_fence(Instant::ZERO, &forged), Err(FenceError::Signature));
    assert_eq!(sal.handle_fence(Instant::ZERO, &notice(3, 2)), ONE, "what was refused is not kept");
}

#[test]
fn a_notice_that_is_said_again_later_ends_nothing() {
    // Of an earlier holder, told to a client that knows of the present one by its notice.
    let mut sal = with_flow(Role::Initiator);
    assert_eq!(sal.handle_fence(Instant::ZERO, &notice(7, 2)), ONE);
    assert_eq!(sal.handle_fence(Instant::ZERO, &notice(6, 3)), Err(FenceError::Outdated));
    assert_eq!(sal.handle_fence(Instant::ZERO, &notice(7, 3)), Err(FenceError::Outdated), "two with one number");

    // By its SYN-ACK.
    let mut sal = with_flow(Role::Initiator);
    sal.fences.note_fence(&sal.flows, &sal.associations, record().flow, Some(8));
    assert_eq!(sal.handle_fence(Instant::ZERO, &notice(6, 3)), NONE);
    assert!(is_open(&sal), "its holder has a later number");
    assert_eq!(sal.handle_fence(Instant::ZERO, &notice(9, 2)), ONE);
}

#[test]
fn the_same_notice_again_ends_what_a_former_holder_has_begun_since() {
    let mut sal = with_flow(Role::Initiator);
    let host_id = peer(&sal);
    let service = record().service;
    sal.fences.note_fence(&sal.flows, &sal.associations, record().flow, Some(8));
    assert_eq!(sal.handle_fence(Instant::ZERO, &notice(9, 2)), ONE);
    sal.take_flow(record().flow);
    add_flow(&mut sal, Role::Initiator);
    assert_eq!(sal.handle_fence(Instant::ZERO, &notice(9, 2)), ONE);
    // A SYN-ACK with that number is not taken to begin with; one without a number is.
    let holder = host(2).public().id();
    assert_eq!(sal.fences.holder_since(host_id, &service, Some(8), 0), Some(holder));
    assert_eq!([Some(9), Some(10), None].map(|told| sal.fences.holder_since(host_id, &service, told, 0)), [None; 3]);
    assert_eq!(sal.fences.holder_since(holder, &service, Some(8), 0), None);
}

#[test]
fn what_is_known_is_forgotten_with_the_last_flow_of_the_name() {
    let mut sal = with_flow(Role::Initiator);
    assert_eq!(sal.handle_fence(Instant::ZERO, &notice(7, 2)), ONE);
    sal.fences.forget_fences(&sal.flows, &sal.associations);
    assert_eq!(sal.fences.held.len(), 1, "the flow that failed is there yet");
    sal.take_flow(record().flow);
    sal.fences.forget_fences(&sal.flows, &sal.associations);
    assert!(sal.fences.held.is_empty());
    let stranger = host(2).public().id();
    sal.fences.told.note(Peer::Member(stranger), (stranger, record().service), Some(1));
    sal.fences.forget_fences(&sal.flows, &sal.associations);
    assert_eq!(sal.fences.told.len(), 0, "nothing is shared with that host");
}

/// A router can give a holder the highest of all numbers.
#[test]
fn no_number_keeps_later_holders_out_for_longer_than_the_holders_certificate() {
    let until = |until_s, number, n| {
        let holder = host(n);
        FenceNotice::new(name(), number, &holder, chain_until(until_s, name(), &holder, &authority()))
    };
    let mut sal = with_flow(Role::Initiator);
    let holder = host(2).public().id();
    let (other, service) = (host(3).public().id(), record().service);
    assert_eq!(sal.handle_fence(Instant::ZERO, &until(1000, u64::MAX, 2)), ONE);
    sal.set_wall_clock(Instant::ZERO, 1000);
    assert_eq!(sal.handle_fence(Instant::ZERO, &until(5000, 9, 3)), Err(FenceError::Outdated));
    assert_eq!(sal.handle_fence(Instant::ZERO, &until(2000, u64::MAX, 2)), NONE, "it goes on");
    sal.set_wall_clock(Instant::ZERO, 2000);
    assert_eq!(sal.fences.holder_since(other, &service, Some(9), 2000), Some(holder));
    assert_eq!(sal.handle_fence(Instant::ZERO, &until(5000, 9, 3)), Err(FenceError::Outdated));
    sal.set_wall_clock(Instant::ZERO, 2001);
    assert_eq!(sal.fences.holder_since(other, &service, Some(9), 2001), None);
    assert_eq!(sal.handle_fence(Instant::ZERO, &until(5000, 9, 3)), NONE);
    assert_eq!(sal.fences.holder_since(holder, &service, Some(8), 2001), Some(other));
}

#[test]
fn a_holder_of_many_names_leaves_room_for_those_of_others() {
    let mut sal = with_flow(Role::Initiator);
    let mut say = |bits, n| {
        let prefix = Prefix::new(name().id, bits);
        let holder = host(n);
        let chain = chain_for(prefix, &holder, &authority());
        sal.handle_fence(Instant::ZERO, &FenceNotice::new(prefix, 3, &holder, chain))
    };
    assert!((100..250).all(|bits| say(bits, 2).is_ok()), "more than a sixteenth, while there is room");
    assert!(say(251, 3).is_ok());
}

#[test]
fn flows_with_former_holders_end_also_where_there_is_no_room_to_note_it() {
    let mut sal = with_flow(Role::Initiator);
    sal.fences.held = FairTable::new(0, 0);
    let full = sal.handle_fence(Instant::ZERO, &notice(3, 2));
    assert!(matches!(full, Err(FenceError::Full(_))), "{full:?}");
    assert!(!is_open(&sal));
}
