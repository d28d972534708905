//! What the kernel sends and gives: the direct paths of flows.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use margay_core::Entry;
use margay_core::flow_cache::LINGER;

use super::*;
use crate::packet::RST;
use crate::run::wire_of;

pub(super) fn cases() -> Vec<Case> {
    [held_and_moved(), left()].concat()
}

const DIRECT: &[Need] = &[Need::Direct];
const KERNEL_ALONE: &[Need] = &[Need::Direct, Need::KernelAlone];
const SAID: Numbers = own(ACK, 0, 0, 10);
const BACK: Numbers = peers(ACK, 0, 0, 10);
const GIVEN: Expected = Expected::Given(PORT_A, BACK);
const MISSED: Expected = Expected::Exactly(Seen::Missed);
const MOVED: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 3)), PORT);
const MORE: Duration = Duration::from_millis(100);

/// Addresses and ports as the flow's direct packets leave this host, to this address.
fn to(remote: SocketAddr) -> Tuple {
    let known = wire_of(FLOW, TCP);
    Tuple { destination: SocketAddr::new(remote.ip(), known.destination.port()), ..known }
}

fn goes(remote: SocketAddr) -> Step {
    let seen = Seen::Direct { wire: to(remote), numbers: SAID };
    Step::Sends(tcp(PORT_A), SAID, Expected::Exactly(seen))
}

fn from(remote: SocketAddr, expected: Expected) -> Step {
    Step::Arrives(to(remote).reversed(), BACK, expected)
}

fn held() -> Step {
    on_path(Path { passage: Passage::Held, ..path() })
}

fn is_left() -> Step {
    Step::Sends(tcp(PORT_A), SAID, MISSED)
}

fn wired(generation: u32, sending: bool, accepting: bool, begun: bool) -> Step {
    let wire = Wire { sending, accepting, begun, ..wire(FLOW) };
    installs(Entry { wire: Some(wire), ..entry(FLOW, generation) })
}

/// Paths move, or are held.
fn held_and_moved() -> Vec<Case> {
    vec![
        case("a path that moves moves its direct flows, and what was on its way still comes", DIRECT, {
            after(
                entry(FLOW, 1),
                vec![
                    goes(peer()),
                    from(peer(), GIVEN),
                    on_path(Path { remote: MOVED, ..path() }),
                    goes(MOVED),
                    from(MOVED, GIVEN),
                    from(peer(), GIVEN),
                    Step::Passes(LINGER + MORE),
                    from(peer(), MISSED),
                    from(MOVED, GIVEN),
                ],
            )
        }),
        case(
            "by a held path nothing is sent direct, and what comes is given",
            KERNEL_ALONE,
            after(entry(FLOW, 1), vec![held(), is_left(), from(peer(), GIVEN), on_path(path()), goes(peer())]),
        ),
        case(
            "a reset by a held path is the word of a stranger",
            DIRECT,
            after(
                entry(FLOW, 1),
                vec![
                    says(FLOW, own(ACK, 0, 0, 0)),
                    held(),
                    Step::Arrives(to(peer()).reversed(), peers(RST, 0, 0, 0), dropped(Why::HeldReset)),
                    from(peer(), GIVEN),
                ],
            ),
        ),
    ]
}

/// What the kernel leaves.
fn left() -> Vec<Case> {
    vec![
        case("the kernel leaves what it is not to send and what it is not to give", KERNEL_ALONE, {
            vec![
                on_path(path()),
                wired(1, true, false, true),
                goes(peer()),
                from(peer(), MISSED),
                wired(2, false, true, true),
                is_left(),
                from(peer(), GIVEN),
                wired(3, true, true, false),
                goes(peer()),
                from(peer(), MISSED),
                wired(4, false, false, true),
                is_left(),
                from(peer(), MISSED),
            ]
        }),
        case(
            "the kernel leaves what is too large, what begins a connection, and datagrams without payload",
            KERNEL_ALONE,
            {
                let datagrams = Entry { app: udp(PORT_B), ..entry(OTHER, 1) };
                after(
                    entry(FLOW, 1),
                    vec![
                        installs(datagrams),
                        Step::Sends(tcp(PORT_A), own(ACK, 0, 0, 1460), Expected::Carried(FLOW, own(ACK, 0, 0, 1460))),
                        Step::Sends(tcp(PORT_A), own(ACK, 0, 0, 1461), MISSED),
                        Step::Sends(tcp(PORT_A), Numbers { acknowledgement: 0, ..own(crate::SYN, 0, 0, 0) }, MISSED),
                        Step::Sends(udp(PORT_B), datagram(0), MISSED),
                        Step::Sends(udp(PORT_B), datagram(1), Expected::Carried(OTHER, datagram(1))),
                    ],
                )
            },
        ),
    ]
}
