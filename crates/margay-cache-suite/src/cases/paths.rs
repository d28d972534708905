//! Addresses that packets come from and go to.

use std::time::Duration;

use margay_core::flow_cache::LINGER;
use margay_core::{Entry, EntryUpdate};

use super::*;
use crate::step::Arrival;

const MOVED: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 3)), PORT);
const MORE: Duration = Duration::from_millis(100);

pub(super) fn cases() -> Vec<Case> {
    [senders(), records()].concat()
}

const ENCAPSULATED: &[Need] = &[Need::Encapsulation];
const SAID: Numbers = own(ACK, 0, 0, 10);
const BACK: Numbers = peers(ACK, 0, 0, 10);
const GIVEN: Expected = Expected::Given(PORT_A, BACK);
const WRONG: Expected = dropped(Why::WrongPath);
const MISSED: Expected = Expected::Exactly(Seen::Missed);
const SECOND: PathId = PathId(2);

fn from(from: SocketAddr, expected: Expected) -> Step {
    Step::Comes(Arrival { from, ..Arrival::of(FLOW) }, tcp(PORT_A), BACK, expected)
}

fn to(to: SocketAddr) -> Step {
    let expected = Expected::Encapsulated { flow: FLOW, to, is_beside: false, is_sealed: false, numbers: SAID };
    Step::Sends(tcp(PORT_A), SAID, expected)
}

/// Where DATA comes from.
fn senders() -> Vec<Case> {
    vec![
        case(
            "DATA from elsewhere is nobody's",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![
                    from(MOVED, WRONG),
                    from(SocketAddr::new(PEER, PORT + 1), WRONG),
                    from(peer(), GIVEN),
                    Step::Comes(Arrival { from: MOVED, ..Arrival::of(OTHER) }, tcp(PORT_A), BACK, MISSED),
                ],
            ),
        ),
        case("from where the peer says that it is DATA is taken, and nothing is sent there", ENCAPSULATED, {
            after(
                encapsulated(FLOW, 1),
                vec![
                    on_path(Path { expected: Some(MOVED), ..path() }),
                    from(MOVED, GIVEN),
                    from(peer(), GIVEN),
                    to(peer()),
                ],
            )
        }),
        case(
            "DATA still comes from the address before, for a while",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![
                    to(peer()),
                    on_path(Path { remote: MOVED, ..path() }),
                    to(MOVED),
                    from(MOVED, GIVEN),
                    Step::Passes(LINGER - MORE),
                    from(peer(), GIVEN),
                    Step::Passes(MORE * 2),
                    from(peer(), WRONG),
                    from(MOVED, GIVEN),
                ],
            ),
        ),
    ]
}

/// Path records change and go.
fn records() -> Vec<Case> {
    vec![
        case(
            "so it does where the flow goes by another record",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![
                    on_path(Path { id: SECOND, remote: MOVED, ..path() }),
                    from(MOVED, WRONG),
                    installs(Entry { path: SECOND, ..encapsulated(FLOW, 2) }),
                    to(MOVED),
                    from(peer(), GIVEN),
                    Step::Passes(LINGER + MORE),
                    from(peer(), WRONG),
                ],
            ),
        ),
        case(
            "an entry whose path is gone carries nothing",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![
                    Step::Told(EntryUpdate::RemovePath(PATH)),
                    misses(PORT_A),
                    from(peer(), MISSED),
                    on_path(path()),
                    to(peer()),
                    from(peer(), GIVEN),
                ],
            ),
        ),
        case(
            "by a void path nothing is sent, and what comes is taken",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![
                    on_path(Path { passage: Passage::Void, ..path() }),
                    Step::Sends(tcp(PORT_A), SAID, Expected::Exactly(Seen::Nowhere)),
                    from(peer(), GIVEN),
                    on_path(path()),
                    to(peer()),
                ],
            ),
        ),
        case(
            "by a held path all goes inside DATA",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![on_path(Path { passage: Passage::Held, ..path() }), to(peer()), from(peer(), GIVEN)],
            ),
        ),
    ]
}
