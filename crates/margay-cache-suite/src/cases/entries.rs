//! Entries come, change and go.

use margay_core::EntryUpdate;
use margay_core::delta::Delta;
use margay_core::{Directions, Entry};

use super::*;
use crate::step::Arrival;

pub(super) fn cases() -> Vec<Case> {
    [coming_and_going(), replacing(), forgetting(), parting(), translating()].concat()
}

const ANY: Numbers = own(ACK, 0, 0, 10);
const ANSWER: Numbers = peers(ACK, 0, 0, 10);
const MISSED: Expected = Expected::Exactly(Seen::Missed);

fn at_port(generation: u32, port: u16) -> Step {
    installs(Entry { app: tcp(port), ..entry(FLOW, generation) })
}

fn directions(generation: u32, directions: Directions) -> Step {
    installs(Entry { directions, ..encapsulated(FLOW, generation) })
}

fn held(generation: u32, is_held: bool) -> Step {
    installs(Entry { is_held, ..encapsulated(FLOW, generation) })
}

fn data(expected: Expected) -> Step {
    Step::Comes(Arrival::of(FLOW), tcp(PORT_A), ANSWER, expected)
}

/// The program says something, which goes inside DATA of this number.
fn numbered(packet_number: u32) -> Step {
    let seen = Seen::Encapsulated {
        to: peer(),
        peer_flow: peer_flow_of(FLOW),
        packet_number,
        is_beside: false,
        is_sealed: false,
        numbers: ANY,
    };
    Step::Sends(tcp(PORT_A), ANY, Expected::Exactly(seen))
}

/// Entries are there or not.
fn coming_and_going() -> Vec<Case> {
    vec![
        case(
            "without an entry everything misses",
            &[],
            vec![on_path(path()), misses(PORT_A), hears_as(FLOW, ANSWER, Seen::Missed)],
        ),
        case(
            "of a flow at a middlebox the core has what was not forwarded",
            &[],
            after(Entry { at_middlebox: true, ..entry(FLOW, 1) }, vec![misses(PORT_A)]),
        ),
        case(
            "an entry carries both ways until it is removed",
            &[],
            after(
                entry(FLOW, 1),
                vec![
                    says(FLOW, ANY),
                    hears(FLOW, ANSWER),
                    misses(PORT_B),
                    hears_as(OTHER, ANSWER, Seen::Missed),
                    removes(FLOW),
                    misses(PORT_A),
                    hears_as(FLOW, ANSWER, Seen::Missed),
                    removes(FLOW),
                    installs(entry(FLOW, 1)),
                    says(FLOW, ANY),
                ],
            ),
        ),
        case(
            "datagrams are carried both ways",
            &[],
            after(
                Entry { app: udp(PORT_A), ..entry(FLOW, 1) },
                vec![
                    Step::Sends(udp(PORT_A), datagram(10), Expected::Carried(FLOW, datagram(10))),
                    Step::Hears(FLOW, udp(PORT_A), datagram(20), Expected::Given(PORT_A, datagram(20))),
                    misses(PORT_A),
                ],
            ),
        ),
    ]
}

/// One entry takes the place of another.
fn replacing() -> Vec<Case> {
    vec![
        case(
            "an older generation changes nothing",
            &[],
            after(entry(FLOW, 5), vec![at_port(4, PORT_B), misses(PORT_B), says(FLOW, ANY)]),
        ),
        case(
            "a newer generation replaces the entry, also at another five-tuple",
            &[],
            after(
                entry(FLOW, 5),
                vec![
                    says(FLOW, ANY),
                    at_port(6, PORT_B),
                    misses(PORT_A),
                    Step::Sends(tcp(PORT_B), ANY, Expected::Carried(FLOW, ANY)),
                    Step::Hears(FLOW, tcp(PORT_B), ANSWER, Expected::Given(PORT_B, ANSWER)),
                    // The same generation once more: the order in which updates come decides.
                    at_port(6, PORT_A),
                    Step::Sends(tcp(PORT_B), ANY, MISSED),
                    says(FLOW, ANY),
                ],
            ),
        ),
        case("a new flow takes the five-tuple of an old one, of which nothing is left", &[Need::Encapsulation], {
            after(
                encapsulated(FLOW, 1),
                vec![installs(encapsulated(OTHER, 1)), says(OTHER, ANY), data(MISSED), removes(FLOW), says(OTHER, ANY)],
            )
        }),
    ]
}

/// Entries may be forgotten at any time.
fn forgetting() -> Vec<Case> {
    vec![
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
                    data(MISSED),
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
                    says(FLOW, ANY),
                    Step::Forgets,
                    misses(PORT_A),
                    hears_as(FLOW, ANSWER, Seen::Missed),
                    installs(entry(FLOW, 1)),
                    says(FLOW, ANY),
                    hears(FLOW, ANSWER),
                ],
            ),
        ),
        case(
            "a suspended flow is nobody's until it is installed again, and is removed where it is",
            &[],
            after(
                entry(FLOW, 1),
                vec![
                    says(FLOW, ANY),
                    suspends(FLOW),
                    misses(PORT_A),
                    hears_as(FLOW, ANSWER, Seen::Missed),
                    installs(entry(FLOW, 2)),
                    says(FLOW, ANY),
                    hears(FLOW, ANSWER),
                    suspends(FLOW),
                    removes(FLOW),
                    misses(PORT_A),
                    hears_as(FLOW, ANSWER, Seen::Missed),
                ],
            ),
        ),
    ]
}

/// Of some flows not every packet is carried.
fn parting() -> Vec<Case> {
    vec![
        case("each direction is carried by itself", &[Need::Encapsulation], {
            after(
                encapsulated(FLOW, 1),
                vec![
                    directions(2, Directions::Egress),
                    says(FLOW, ANY),
                    data(MISSED),
                    directions(3, Directions::Ingress),
                    misses(PORT_A),
                    data(Expected::Given(PORT_A, ANSWER)),
                    directions(4, Directions::Both),
                    says(FLOW, ANY),
                    data(Expected::Given(PORT_A, ANSWER)),
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
                    data(Expected::Exactly(Seen::GivenUp { flow: FLOW, numbers: ANSWER })),
                    Step::Comes(
                        Arrival::of(OTHER),
                        tcp(PORT_A),
                        ANSWER,
                        Expected::Exactly(Seen::GivenUp { flow: OTHER, numbers: ANSWER }),
                    ),
                    Step::Carries(FLOW, tcp(PORT_A), ANY, inside(FLOW, ANY)),
                    Step::Carries(OTHER, tcp(PORT_A), ANY, inside(OTHER, ANY)),
                ],
            )
        }),
        case("what the program of a held flow sends is the core's, and what comes is given", &[Need::Encapsulation], {
            after(
                encapsulated(FLOW, 1),
                vec![
                    held(2, true),
                    misses(PORT_A),
                    data(Expected::Given(PORT_A, ANSWER)),
                    Step::Carries(FLOW, tcp(PORT_A), ANY, inside(FLOW, ANY)),
                    held(3, false),
                    says(FLOW, ANY),
                ],
            )
        }),
    ]
}

/// Numbers of the wire, and updates without effect.
fn translating() -> Vec<Case> {
    vec![
        case(
            "a flow with a delta has other numbers on the wire than at its program",
            &[],
            after(
                Entry { delta: Some(Delta { peer: 500, own: 70, ..Delta::ZERO }), ..entry(FLOW, 1) },
                vec![
                    Step::Sends(
                        tcp(PORT_A),
                        ANY,
                        Expected::Carried(
                            FLOW,
                            Numbers { sequence: OWN.wrapping_sub(70), acknowledgement: PEERS - 500, ..ANY },
                        ),
                    ),
                    Step::Hears(
                        FLOW,
                        tcp(PORT_A),
                        Numbers { sequence: PEERS - 500, acknowledgement: OWN.wrapping_sub(70), ..ANSWER },
                        Expected::Given(PORT_A, ANSWER),
                    ),
                    installs(entry(FLOW, 2)),
                    says(FLOW, ANY),
                    hears(FLOW, ANSWER),
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
