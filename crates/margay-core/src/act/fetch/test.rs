use super::*;
use crate::act::handover::HandoverRecord;
use crate::act::handover::tests::{meet_peer, record, sal};
use crate::association::Association;
use crate::session::hand_over::HandOver;
use crate::trust::handshake::Keys;
use crate::types::config::Limits;
use crate::types::key::HostPublic;
use crate::types::role::{Lifecycle, Role};

#[test]
fn the_whole_matrix_of_a_giver() {
    let expected = "\
Asking Granted Frozen
Asking Refused Over
Asking Sent -
Asking Cancelled Cancelling
Asking Stays -
Asking Gone -
Asking TimeOut Cancelling
Frozen Granted -
Frozen Refused -
Frozen Sent Waiting
Frozen Cancelled Cancelling
Frozen Stays Over
Frozen Gone Parted
Frozen TimeOut Cancelling
Waiting Granted -
Waiting Refused -
Waiting Sent -
Waiting Cancelled Cancelling
Waiting Stays Over
Waiting Gone Parted
Waiting TimeOut Over
Cancelling Granted -
Cancelling Refused -
Cancelling Sent -
Cancelling Cancelled -
Cancelling Stays Over
Cancelling Gone Parted
Cancelling TimeOut Over
Parted Granted -
Parted Refused -
Parted Sent -
Parted Cancelled -
Parted Stays -
Parted Gone -
Parted TimeOut Over
Over Granted -
Over Refused -
Over Sent -
Over Cancelled -
Over Stays -
Over Gone -
Over TimeOut -
";
    assert_eq!(GIVING.matrix(), expected);
    assert_eq!(GIVING.faults(), [] as [String; 0]);
}

#[test]
fn what_nobody_waits_for_is_dropped_at_once() {
    let mut sal = sal(Limits::default());
    let ticket = PeerTicket { peer: HostId([8; 16]), ticket: Ticket([7; 16]) };
    sal.take_over(Instant::from_millis(1), ticket);
    assert_eq!(sal.poll_event(), Some(crate::session::event::Event::HandOver(HandOver::Dropped(ticket))));
    assert_eq!(sal.poll_event(), None);
}

#[test]
fn no_packet_has_the_five_tuple_of_a_flow_between_programs_and_no_two_have_the_same() {
    let one = tuple_between(FlowId(7), 30_000, 80);
    assert_eq!((one.protocol, one.source.port(), one.destination.port()), (TCP, 30_000, 80));
    assert!(one.source.ip().is_unspecified());
    assert_ne!(one, tuple_between(FlowId(8), 30_000, 80));
}

#[test]
fn each_refusal_says_who_is_at_fault() {
    let known = [ErrorCode::UnknownFlow, ErrorCode::NotAllowed, ErrorCode::Refused, ErrorCode::BadCertificate];
    let texts: alloc::collections::BTreeSet<String> = known.into_iter().map(refusal_text).collect();
    assert_eq!(texts.len(), known.len());
    assert_eq!(refusal_text(ErrorCode::HopLimit), refusal_text(ErrorCode::Other(4711)));
}

#[test]
fn tickets_of_connections_that_have_stayed_are_known_for_a_lease_and_are_bounded() {
    let mut fetches = Fetches::default();
    let begin = Instant::from_millis(1000);
    let ticket = |n: u16| {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&n.to_be_bytes());
        PeerTicket { peer: HostId([9; 16]), ticket: Ticket(bytes) }
    };
    let [giver, other] = [1, 2].map(|n| Peer::Member(HostId([n; 16])));
    fetches.note_stay(other, ticket(1), begin);
    fetches.note_stay(other, ticket(1), begin + LEASE / 2);
    assert!(fetches.has_stayed(ticket(1), begin) && !fetches.has_stayed(ticket(2), begin));
    assert_eq!(fetches.stayed.len(), 1);
    assert!(!fetches.has_stayed(ticket(1), begin + LEASE));
    let of_another = PeerTicket { peer: HostId([10; 16]), ..ticket(1) };
    assert!(!fetches.has_stayed(of_another, begin), "another host's ticket is another one");
    fetches.note_stay(other, ticket(5001), begin + LEASE);
    (0..5000).for_each(|n| fetches.note_stay(giver, ticket(n), begin + LEASE));
    let is_known = |n| fetches.has_stayed(ticket(n), begin + LEASE);
    assert!(is_known(5001), "one giver's do not displace another one's");
    assert_eq!((0..5000).filter(|n| is_known(*n)).count(), HAND_OVERS_MAX / 16);
}

#[test]
fn a_client_confirms_the_hand_over_alone_by_which_it_has_fetched_a_session() {
    const FROM: SocketAddr = SocketAddr::new(IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 2)), 54324);
    let (giver, made_up) = (HostId([8; 16]), Ticket([9; 16]));
    let ticket = PeerTicket { peer: giver, ticket: Ticket([7; 16]) };
    for fetched in [None, Some(ticket)] {
        let mut sal = sal(Limits::default());
        meet_peer(&mut sal, 77);
        let (role, lifecycle) = (Role::Initiator, Lifecycle::Established);
        // As after a start of the agent between the commit and the taker's question.
        let record = HandoverRecord { role, lifecycle, fins: (false, false), fetched, ..record() };
        sal.adopt_flow(Instant::ZERO, &record).expect("the peer is known");
        assert_eq!(sal.export_flow(Instant::ZERO, record.flow).and_then(|record| record.fetched), fetched);
        let mut taker = Association::new(3, 77, HostPublic([6; 32]), Keys { root: [1; 32] }, false, FROM);
        taker.peer_epoch = sal.config.epoch;
        let mut ask = |sal: &mut Sal, ticket| {
            let extensions = [Extension::Handover(handover(ticket, giver, HostId([6; 16])))];
            let mut draft = Draft::new(Kind::RsynDone, record.flow, FlowId(9));
            draft.extensions = &extensions;
            let datagram = draft.seal(&mut taker, 1).expect("it fits");
            sal.handle_datagram(Instant::from_millis(1), None, FROM, &datagram)
        };
        let is_confirmed = if fetched.is_some() { Ok(()) } else { Err(DropReason::Unexpected) };
        assert_eq!(ask(&mut sal, ticket.ticket), is_confirmed);
        assert_eq!(ask(&mut sal, made_up), Err(DropReason::Unexpected));
    }
}
