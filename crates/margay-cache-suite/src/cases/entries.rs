//! Entries come, change and go.

use margay_core::EntryUpdate;
use margay_core::delta::Delta;
use margay_core::{Directions, Entry};

use super::*;
use crate::step::Arrival;

pub(super) fn cases() -> Vec<Case> {
    let any = own(ACK, 0, 0, 10);
    let back = peers(ACK, 0, 0, 10);
    let at_port = |generation, port| installs(Entry { app: tcp(port), ..entry(FLOW, generation) });
    let from_b = Step::Sends(tcp(PORT_B), any, Expected::Carried(FLOW, any));
    let moved = Entry { app: tcp(PORT_B), ..entry(FLOW, 6) };
    let directions = |generation, directions| installs(Entry { directions, ..encapsulated(FLOW, generation) });
    let data = |expected| Step::Comes(Arrival::of(FLOW), tcp(PORT_A), back, expected);
    let missed = Expected::Exactly(Seen::Missed);
    let held = |generation, is_held| installs(Entry { is_held, ..encapsulated(FLOW, generation) });
    let out = |packet_number| Seen::Encapsulated {
        to: peer(),
        peer_flow: peer_flow_of(FLOW),
        packet_number,
        is_beside: false,
        is_sealed: false,
        numbers: any,
    };
    let numbered = |packet_number| Step::Sends(tcp(PORT_A), any, Expected::Exactly(out(packet_number)));
    let with_delta = Entry { delta: Some(Delta { peer: 500, own: 70, ..Delta::ZERO }), ..entry(FLOW, 1) };
    let on_wire = Numbers { sequence: OWN.wrapping_sub(70), acknowledgement: PEERS - 500, ..any };
    let from_wire = Numbers { sequence: PEERS - 500, acknowledgement: OWN.wrapping_sub(70), ..back };
    let datagrams = Entry { app: udp(PORT_A), ..entry(FLOW, 1) };
    vec![
        case(
            "without an entry everything misses",
            &[],
            vec![on_path(path()), misses(PORT_A), hears_as(FLOW, back, Seen::Missed)],
        ),
        case(
            "an entry carries both ways until it is removed",
            &[],
            after(
                entry(FLOW, 1),
                vec![
                    says(FLOW, any),
                    hears(FLOW, back),
                    misses(PORT_B),
                    hears_as(OTHER, back, Seen::Missed),
                    removes(FLOW),
                    misses(PORT_A),
                    hears_as(FLOW, back, Seen::Missed),
                    removes(FLOW),
                    installs(entry(FLOW, 1)),
                    says(FLOW, any),
                ],
            ),
        ),
        case(
            "datagrams are carried both ways",
            &[],
            after(
                datagrams,
                vec![
                    Step::Sends(udp(PORT_A), datagram(10), Expected::Carried(FLOW, datagram(10))),
                    Step::Hears(FLOW, udp(PORT_A), datagram(20), Expected::Given(PORT_A, datagram(20))),
                    misses(PORT_A),
                ],
            ),
        ),
        case(
            "an older generation changes nothing",
            &[],
            after(entry(FLOW, 5), vec![at_port(4, PORT_B), misses(PORT_B), says(FLOW, any)]),
        ),
        case(
            "a newer generation replaces the entry, also at another five-tuple",
            &[],
            after(
                entry(FLOW, 5),
                vec![
                    says(FLOW, any),
                    installs(moved),
                    misses(PORT_A),
                    from_b.clone(),
                    Step::Hears(FLOW, tcp(PORT_B), back, Expected::Given(PORT_B, back)),
                    // The same generation once more: the order in which updates come decides.
                    at_port(6, PORT_A),
                    Step::Sends(tcp(PORT_B), any, missed),
                    says(FLOW, any),
                ],
            ),
        ),
        case("a new flow takes the five-tuple of an old one, of which nothing is left", &[Need::Encapsulation], {
            after(
                encapsulated(FLOW, 1),
                vec![installs(encapsulated(OTHER, 1)), says(OTHER, any), data(missed), removes(FLOW), says(OTHER, any)],
            )
        }),
        case(
            "a cache that has forgotten its entries takes them again, and no packet number comes twice",
            &[Need::Encapsulation],
            after(
                encapsulated(FLOW, 1),
                vec![
                    numbered(0),
                    numbered(1),
                    Step::Forgets,
                    misses(PORT_A),
                    data(missed),
                    installs(encapsulated(FLOW, 1)),
                    numbered(2),
                    removes(FLOW),
                    installs(encapsulated(FLOW, 1)),
                    numbered(0),
                ],
            ),
        ),
        case(
            "the kernel's entry comes back after it was forgotten",
            &[Need::Direct],
            after(
                entry(FLOW, 1),
                vec![
                    says(FLOW, any),
                    Step::Forgets,
                    misses(PORT_A),
                    hears_as(FLOW, back, Seen::Missed),
                    installs(entry(FLOW, 1)),
                    says(FLOW, any),
                    hears(FLOW, back),
                ],
            ),
        ),
        case("each direction is carried by itself", &[Need::Encapsulation], {
            after(
                encapsulated(FLOW, 1),
                vec![
                    directions(2, Directions::Egress),
                    says(FLOW, any),
                    data(missed),
                    directions(3, Directions::Ingress),
                    misses(PORT_A),
                    data(Expected::Given(PORT_A, back)),
                    directions(4, Directions::Both),
                    says(FLOW, any),
                    data(Expected::Given(PORT_A, back)),
                ],
            )
        }),
        case("all of a parted flow is the core's, which has packets carried by it", &[Need::Encapsulation], {
            after(
                encapsulated(FLOW, 1),
                vec![
                    directions(2, Directions::Parted),
                    installs(Entry { directions: Directions::PartedAside, ..encapsulated(OTHER, 1) }),
                    misses(PORT_A),
                    data(Expected::Exactly(Seen::GivenUp { flow: FLOW, numbers: back })),
                    Step::Comes(
                        Arrival::of(OTHER),
                        tcp(PORT_A),
                        back,
                        Expected::Exactly(Seen::GivenUp { flow: OTHER, numbers: back }),
                    ),
                    Step::Carries(FLOW, tcp(PORT_A), any, inside(FLOW, any)),
                    Step::Carries(OTHER, tcp(PORT_A), any, inside(OTHER, any)),
                ],
            )
        }),
        case("what the program of a held flow sends is the core's, and what comes is given", &[Need::Encapsulation], {
            after(
                encapsulated(FLOW, 1),
                vec![
                    held(2, true),
                    misses(PORT_A),
                    data(Expected::Given(PORT_A, back)),
                    Step::Carries(FLOW, tcp(PORT_A), any, inside(FLOW, any)),
                    held(3, false),
                    says(FLOW, any),
                ],
            )
        }),
        case(
            "a flow with a delta has other numbers on the wire than at its program",
            &[],
            after(
                with_delta,
                vec![
                    Step::Sends(tcp(PORT_A), any, Expected::Carried(FLOW, on_wire)),
                    Step::Hears(FLOW, tcp(PORT_A), from_wire, Expected::Given(PORT_A, back)),
                    installs(entry(FLOW, 2)),
                    says(FLOW, any),
                    hears(FLOW, back),
                ],
            ),
        ),
        case(
            "what is removed without having been there is no fault",
            &[],
            vec![on_path(path()), removes(FLOW), Step::Told(EntryUpdate::RemovePath(PathId(9))), misses(PORT_A)],
        ),
    ]
}
