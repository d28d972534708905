//! How connections end: FIN and RST, and who has acknowledged what.

use margay_core::delta::Delta;
use margay_core::{Direction, Directions, Entry, EntryUpdate};

use super::*;
use crate::packet::{FIN, RST};
use crate::step::{Arrival, Notice};

const OUT: Direction = Direction::Egress;
const BACK: Direction = Direction::Ingress;

fn ended(direction: Direction, flags: u8) -> Step {
    Step::Tells(vec![Notice::Ended(FLOW, direction, flags)])
}

const fn is_over(is_over: bool) -> Step {
    Step::IsOver(FLOW, is_over)
}

fn silent() -> Step {
    Step::Tells(Vec::new())
}

/// A connection in whose middle both have shown their numbers.
fn talk(steps: Vec<Step>) -> Vec<Step> {
    after(entry(FLOW, 1), [vec![says(FLOW, own(ACK, 0, 0, 0))], steps].concat())
}

/// The same, encapsulated.
fn encapsulated_talk(steps: Vec<Step>) -> Vec<Step> {
    after(encapsulated(FLOW, 1), [vec![says(FLOW, own(ACK, 0, 0, 0))], steps].concat())
}

fn comes(flow: FlowId, numbers: Numbers) -> Step {
    Step::Comes(Arrival::of(flow), tcp(PORT_A), numbers, Expected::Given(PORT_A, numbers))
}

pub(super) fn cases() -> Vec<Case> {
    [closing(), awry(), translated(), resets(), succession(), two_caches()].concat()
}

/// Both ends close, one before the other or at once.
fn closing() -> Vec<Case> {
    vec![
        case(
            "the program closes first, then the peer, and the last acknowledgement ends it",
            &[],
            talk(vec![
                says(FLOW, own(FIN | ACK, 0, 0, 0)),
                ended(OUT, FIN),
                hears(FLOW, peers(ACK, 0, 1, 0)),
                is_over(false),
                hears(FLOW, peers(FIN | ACK, 0, 1, 0)),
                is_over(false),
                silent(),
                says(FLOW, own(ACK, 1, 1, 0)),
                ended(BACK, FIN),
                is_over(true),
            ]),
        ),
        case(
            "the peer closes first, and the program much later",
            &[],
            talk(vec![
                hears(FLOW, peers(FIN | ACK, 0, 0, 0)),
                silent(),
                says(FLOW, own(ACK, 0, 1, 0)),
                ended(BACK, FIN),
                is_over(false),
                // It is half closed: what the program says still goes.
                says(FLOW, own(ACK, 0, 1, 10)),
                hears(FLOW, peers(ACK, 1, 10, 0)),
                is_over(false),
                says(FLOW, own(FIN | ACK, 10, 1, 0)),
                ended(OUT, FIN),
                hears(FLOW, peers(ACK, 1, 10, 0)),
                is_over(false),
                hears(FLOW, peers(ACK, 1, 11, 0)),
                is_over(true),
            ]),
        ),
        case(
            "both close at once",
            &[],
            talk(vec![
                says(FLOW, own(FIN | ACK, 0, 0, 0)),
                ended(OUT, FIN),
                hears(FLOW, peers(FIN | ACK, 0, 0, 0)),
                silent(),
                says(FLOW, own(ACK, 1, 1, 0)),
                ended(BACK, FIN),
                is_over(false),
                hears(FLOW, peers(ACK, 1, 1, 0)),
                is_over(true),
            ]),
        ),
    ]
}

/// FINs with data, and what is lost or overtaken.
fn awry() -> Vec<Case> {
    vec![
        case(
            "a FIN with data is acknowledged at the number after both",
            &[],
            talk(vec![
                hears(FLOW, peers(FIN | ACK, 0, 0, 30)),
                says(FLOW, own(ACK, 0, 30, 0)),
                silent(),
                says(FLOW, own(FIN | ACK, 0, 31, 20)),
                Step::Tells(vec![Notice::Ended(FLOW, OUT, FIN), Notice::Ended(FLOW, BACK, FIN)]),
                hears(FLOW, peers(ACK, 31, 20, 0)),
                is_over(false),
                hears(FLOW, peers(ACK, 31, 21, 0)),
                is_over(true),
            ]),
        ),
        case(
            "a FIN that nobody acknowledges ends nothing",
            &[],
            talk(vec![
                hears(FLOW, peers(FIN | ACK, 5000, 0, 0)),
                says(FLOW, own(ACK, 0, 0, 10)),
                hears(FLOW, peers(ACK, 0, 10, 10)),
                says(FLOW, own(ACK, 10, 10, 0)),
                silent(),
                is_over(false),
            ]),
        ),
        case(
            "an acknowledgement that was overtaken takes nothing back",
            &[],
            talk(vec![
                says(FLOW, own(FIN | ACK, 0, 0, 0)),
                ended(OUT, FIN),
                hears(FLOW, peers(FIN | ACK, 0, 1, 0)),
                hears(FLOW, peers(ACK, 0, 0, 0)),
                says(FLOW, own(ACK, 1, 1, 0)),
                ended(BACK, FIN),
                is_over(true),
            ]),
        ),
    ]
}

/// Numbers of the wire are others than the program has.
fn translated() -> Vec<Case> {
    vec![case("numbers of an ending are those of the program, whatever stands on the wire", &[], {
        let delta = Delta { peer: 500, own: 70, ..Delta::ZERO };
        let wired = |numbers: Numbers| Numbers {
            sequence: numbers.sequence.wrapping_sub(70),
            acknowledgement: numbers.acknowledgement.wrapping_sub(500),
            ..numbers
        };
        let unwired = |numbers: Numbers| Numbers {
            sequence: numbers.sequence.wrapping_sub(500),
            acknowledgement: numbers.acknowledgement.wrapping_sub(70),
            ..numbers
        };
        let says = |numbers| Step::Sends(tcp(PORT_A), numbers, Expected::Carried(FLOW, wired(numbers)));
        let hears = |numbers| Step::Hears(FLOW, tcp(PORT_A), unwired(numbers), Expected::Given(PORT_A, numbers));
        after(
            Entry { delta: Some(delta), ..entry(FLOW, 1) },
            vec![
                says(own(ACK, 0, 0, 0)),
                says(own(FIN | ACK, 0, 0, 0)),
                ended(OUT, FIN),
                hears(peers(FIN | ACK, 0, 1, 0)),
                silent(),
                says(own(ACK, 1, 1, 0)),
                ended(BACK, FIN),
                is_over(true),
            ],
        )
    })]
}

fn resets() -> Vec<Case> {
    let elsewhere = [1, 1000, 0x4000_0000, 0x8000_0000, u32::MAX].map(|far| hears(FLOW, peers(RST, far, 0, 0)));
    let resets = |far| hears(FLOW, Numbers { acknowledgement: 0, ..peers(RST, far, 0, 0) });
    vec![
        case(
            "the program resets",
            &[],
            talk(vec![
                says(FLOW, Numbers { acknowledgement: 0, ..own(RST, 0, 0, 0) }),
                ended(OUT, RST),
                is_over(false),
            ]),
        ),
        case("the peer resets at the very number that is expected", &[], talk(vec![resets(0), ended(BACK, RST)])),
        case("a reset at another number is the program's to judge, and ends nothing", &[], {
            talk([elsewhere.to_vec(), vec![silent(), is_over(false)]].concat())
        }),
        case(
            "a reset counts behind data that is not acknowledged yet",
            &[],
            talk(vec![
                hears(FLOW, peers(ACK, 0, 0, 100)),
                hears(FLOW, peers(ACK, 100, 0, 50)),
                resets(100),
                silent(),
                resets(150),
                ended(BACK, RST),
            ]),
        ),
        case(
            "made-up data leads no reset to its end",
            &[],
            talk(vec![
                hears(FLOW, peers(ACK, 2000, 0, 100)),
                resets(2100),
                silent(),
                hears(FLOW, peers(ACK, 0, 0, 100)),
                says(FLOW, own(ACK, 0, 100, 0)),
                silent(),
                resets(100),
                ended(BACK, RST),
            ]),
        ),
        case(
            "a reset of what the listener has answered ends a connection",
            &[Need::Encapsulation],
            vec![
                on_path(path()),
                installs(encapsulated(FLOW, 1)),
                Step::Told(EntryUpdate::Begun { flow: FLOW, next: OWN, expected: PEERS }),
                comes(FLOW, Numbers { acknowledgement: 0, ..peers(RST, 1, 0, 0) }),
                silent(),
                comes(FLOW, Numbers { acknowledgement: 0, ..peers(RST, 0, 0, 0) }),
                ended(BACK, RST),
            ],
        ),
    ]
}

fn aside(flow: FlowId, generation: u32) -> Step {
    parted(flow, generation, Directions::Ingress)
}

fn parted(flow: FlowId, generation: u32, directions: Directions) -> Step {
    installs(Entry { directions, ..encapsulated(flow, generation) })
}

const fn succeeds(from: FlowId, to: FlowId) -> Step {
    Step::Told(EntryUpdate::Succession { from, to })
}

const fn is_over_at(flow: FlowId, is_over: bool) -> Step {
    Step::IsOver(flow, is_over)
}

fn other_ended(direction: Direction, flags: u8) -> Step {
    Step::Tells(vec![Notice::Ended(OTHER, direction, flags)])
}

/// The program goes by another flow of its session meanwhile.
fn succession() -> Vec<Case> {
    vec![
        case("what a way has shown that is left counts for the one that is taken", &[Need::Encapsulation], {
            encapsulated_talk(vec![
                comes(FLOW, peers(FIN | ACK, 0, 0, 0)),
                aside(FLOW, 2),
                installs(encapsulated(OTHER, 1)),
                succeeds(FLOW, OTHER),
                silent(),
                says(OTHER, own(ACK, 0, 1, 0)),
                ended(BACK, FIN),
                says(OTHER, own(FIN | ACK, 0, 1, 0)),
                other_ended(OUT, FIN),
                is_over_at(OTHER, false),
                // It comes by the first way still.
                comes(FLOW, peers(ACK, 1, 1, 0)),
                is_over_at(OTHER, true),
            ])
        }),
        case("a session that goes back to its first way is over there", &[Need::Encapsulation], {
            encapsulated_talk(vec![
                says(FLOW, own(FIN | ACK, 0, 0, 0)),
                ended(OUT, FIN),
                aside(FLOW, 2),
                installs(encapsulated(OTHER, 1)),
                succeeds(FLOW, OTHER),
                comes(OTHER, peers(FIN | ACK, 0, 1, 0)),
                silent(),
                says(OTHER, own(ACK, 1, 1, 0)),
                other_ended(BACK, FIN),
                aside(OTHER, 2),
                installs(encapsulated(FLOW, 3)),
                succeeds(OTHER, FLOW),
                is_over(true),
                removes(OTHER),
                is_over(true),
            ])
        }),
        case(
            "of a parted connection the program's own numbers count",
            &[Need::Encapsulation],
            vec![
                on_path(path()),
                parted(FLOW, 1, Directions::Parted),
                parted(OTHER, 1, Directions::PartedAside),
                // As the core has made it, with numbers of the way.
                Step::Carries(OTHER, tcp(PORT_A), own(FIN | ACK, 2000, 4000, 0), {
                    inside(OTHER, own(FIN | ACK, 2000, 4000, 0))
                }),
                Step::Parted(FLOW, tcp(PORT_A), own(FIN | ACK, 0, 0, 0)),
                parted(FLOW, 2, Directions::PartedAside),
                installs(encapsulated(OTHER, 2)),
                succeeds(FLOW, OTHER),
                comes(OTHER, peers(FIN | ACK, 0, 1, 0)),
                silent(),
                says(OTHER, own(ACK, 1, 1, 0)),
                other_ended(BACK, FIN),
                is_over_at(OTHER, true),
            ],
        ),
    ]
}

/// A part passes the kernel, and a part user space.
fn two_caches() -> Vec<Case> {
    vec![
        case(
            "a FIN that went direct is acknowledged inside DATA",
            &[Need::Both],
            talk(vec![
                says(FLOW, own(FIN | ACK, 0, 0, 0)),
                ended(OUT, FIN),
                on_path(Path { passage: Passage::Held, ..path() }),
                comes_beside(peers(FIN | ACK, 0, 1, 0)),
                silent(),
                says(FLOW, own(ACK, 1, 1, 0)),
                ended(BACK, FIN),
                is_over(true),
            ]),
        ),
        case("a direct FIN of the peer's is acknowledged inside DATA once its flow has gone back", &[Need::Both], {
            talk(vec![
                hears(FLOW, peers(FIN | ACK, 0, 0, 0)),
                silent(),
                installs(encapsulated(FLOW, 2)),
                says(FLOW, own(ACK, 0, 1, 0)),
                ended(BACK, FIN),
                says(FLOW, own(FIN | ACK, 0, 1, 0)),
                ended(OUT, FIN),
                is_over(false),
                comes(FLOW, peers(ACK, 1, 1, 0)),
                is_over(true),
            ])
        }),
        case("a reset behind the first direct segment is taken", &[Need::Both], {
            after(
                encapsulated(FLOW, 1),
                vec![
                    says(FLOW, own(ACK, 0, 0, 0)),
                    comes(FLOW, peers(ACK, 0, 0, 10)),
                    installs(entry(FLOW, 2)),
                    hears(FLOW, peers(ACK, 10, 0, 10)),
                    silent(),
                    comes_beside(Numbers { acknowledgement: 0, ..peers(RST, 20, 0, 0) }),
                    ended(BACK, RST),
                ],
            )
        }),
    ]
}

/// Too large to go direct.
fn comes_beside(numbers: Numbers) -> Step {
    let arrival = Arrival { flags: margay_wire::BESIDE, ..Arrival::of(FLOW) };
    Step::Comes(arrival, tcp(PORT_A), numbers, Expected::Given(PORT_A, numbers))
}
