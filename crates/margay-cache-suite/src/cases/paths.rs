//! Addresses that packets come from and go to.

use std::time::Duration;

use margay_core::flow_cache::LINGER;
use margay_core::{Entry, EntryUpdate};

use super::*;
use crate::packet::RST;
use crate::run::wire_of;
use crate::step::Arrival;

const MOVED: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 3)), PORT);
const MORE: Duration = Duration::from_millis(100);

pub(super) fn cases() -> Vec<Case> {
    let mut all = inside_data();
    all.extend(direct());
    all
}

fn inside_data() -> Vec<Case> {
    let numbers = own(ACK, 0, 0, 10);
    let back = peers(ACK, 0, 0, 10);
    let from = |from, expected| Step::Comes(Arrival { from, ..Arrival::of(FLOW) }, tcp(PORT_A), back, expected);
    let given = Expected::Given(PORT_A, back);
    let wrong = dropped(Why::WrongPath);
    let to = |to| {
        let expected = Expected::Encapsulated { flow: FLOW, to, is_beside: false, is_sealed: false, numbers };
        Step::Sends(tcp(PORT_A), numbers, expected)
    };
    let moves = on_path(Path { remote: MOVED, ..path() });
    let second = PathId(2);
    let needs = &[Need::Encapsulation];
    let missed = Expected::Exactly(Seen::Missed);
    vec![
        case(
            "DATA from elsewhere is nobody's",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![
                    from(MOVED, wrong),
                    from(SocketAddr::new(PEER, PORT + 1), wrong),
                    from(peer(), given),
                    Step::Comes(Arrival { from: MOVED, ..Arrival::of(OTHER) }, tcp(PORT_A), back, missed),
                ],
            ),
        ),
        case("from where the peer says that it is DATA is taken, and nothing is sent there", needs, {
            after(
                encapsulated(FLOW, 1),
                vec![
                    on_path(Path { expected: Some(MOVED), ..path() }),
                    from(MOVED, given),
                    from(peer(), given),
                    to(peer()),
                ],
            )
        }),
        case(
            "DATA still comes from the address before, for a while",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![
                    to(peer()),
                    moves.clone(),
                    to(MOVED),
                    from(MOVED, given),
                    Step::Passes(LINGER - MORE),
                    from(peer(), given),
                    Step::Passes(MORE * 2),
                    from(peer(), wrong),
                    from(MOVED, given),
                ],
            ),
        ),
        case(
            "so it does where the flow goes by another record",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![
                    on_path(Path { id: second, remote: MOVED, ..path() }),
                    from(MOVED, wrong),
                    installs(Entry { path: second, ..encapsulated(FLOW, 2) }),
                    to(MOVED),
                    from(peer(), given),
                    Step::Passes(LINGER + MORE),
                    from(peer(), wrong),
                ],
            ),
        ),
        case(
            "an entry whose path is gone carries nothing",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![
                    Step::Told(EntryUpdate::RemovePath(PATH)),
                    misses(PORT_A),
                    from(peer(), missed),
                    on_path(path()),
                    to(peer()),
                    from(peer(), given),
                ],
            ),
        ),
        case(
            "by a void path nothing is sent, and what comes is taken",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![
                    on_path(Path { passage: Passage::Void, ..path() }),
                    Step::Sends(tcp(PORT_A), numbers, Expected::Exactly(Seen::Nowhere)),
                    from(peer(), given),
                    on_path(path()),
                    to(peer()),
                ],
            ),
        ),
        case(
            "by a held path all goes inside DATA",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![on_path(Path { passage: Passage::Held, ..path() }), to(peer()), from(peer(), given)],
            ),
        ),
    ]
}

fn direct() -> Vec<Case> {
    let numbers = own(ACK, 0, 0, 10);
    let back = peers(ACK, 0, 0, 10);
    let wire = |remote: SocketAddr| {
        let known = wire_of(FLOW, TCP);
        Tuple { destination: SocketAddr::new(remote.ip(), known.destination.port()), ..known }
    };
    let goes =
        |remote| Step::Sends(tcp(PORT_A), numbers, Expected::Exactly(Seen::Direct { wire: wire(remote), numbers }));
    let from = |remote, expected| Step::Arrives(wire(remote).reversed(), back, expected);
    let given = Expected::Given(PORT_A, back);
    let missed = Expected::Exactly(Seen::Missed);
    let held = on_path(Path { passage: Passage::Held, ..path() });
    let reset = |expected| Step::Arrives(wire(peer()).reversed(), peers(RST, 0, 0, 0), expected);
    let needs = &[Need::Direct];
    let alone = &[Need::Direct, Need::KernelAlone];
    vec![
        case("a path that moves moves its direct flows, and what was on its way still comes", needs, {
            after(
                entry(FLOW, 1),
                vec![
                    goes(peer()),
                    from(peer(), given),
                    on_path(Path { remote: MOVED, ..path() }),
                    goes(MOVED),
                    from(MOVED, given),
                    from(peer(), given),
                    Step::Passes(LINGER + MORE),
                    from(peer(), missed),
                    from(MOVED, given),
                ],
            )
        }),
        case(
            "by a held path nothing is sent direct, and what comes is given",
            alone,
            after(
                entry(FLOW, 1),
                vec![
                    held.clone(),
                    Step::Sends(tcp(PORT_A), numbers, missed),
                    from(peer(), given),
                    on_path(path()),
                    goes(peer()),
                ],
            ),
        ),
        case(
            "a reset by a held path is the word of a stranger",
            needs,
            after(
                entry(FLOW, 1),
                vec![says(FLOW, own(ACK, 0, 0, 0)), held.clone(), reset(dropped(Why::HeldReset)), from(peer(), given)],
            ),
        ),
        case("the kernel leaves what it is not to send and what it is not to give", alone, {
            let wired = |generation, sending, accepting, begun| {
                let wire = Wire { sending, accepting, begun, ..super::wire(FLOW) };
                installs(Entry { wire: Some(wire), ..entry(FLOW, generation) })
            };
            vec![
                on_path(path()),
                wired(1, true, false, true),
                goes(peer()),
                from(peer(), missed),
                wired(2, false, true, true),
                Step::Sends(tcp(PORT_A), numbers, missed),
                from(peer(), given),
                wired(3, true, true, false),
                goes(peer()),
                from(peer(), missed),
                wired(4, false, false, true),
                Step::Sends(tcp(PORT_A), numbers, missed),
                from(peer(), missed),
            ]
        }),
        case("the kernel leaves what is too large, what begins a connection, and datagrams without payload", alone, {
            let datagrams = Entry { app: udp(PORT_B), ..entry(OTHER, 1) };
            after(
                entry(FLOW, 1),
                vec![
                    installs(datagrams),
                    Step::Sends(tcp(PORT_A), own(ACK, 0, 0, 1460), Expected::Carried(FLOW, own(ACK, 0, 0, 1460))),
                    Step::Sends(tcp(PORT_A), own(ACK, 0, 0, 1461), missed),
                    Step::Sends(tcp(PORT_A), Numbers { acknowledgement: 0, ..own(crate::SYN, 0, 0, 0) }, missed),
                    Step::Sends(udp(PORT_B), datagram(0), missed),
                    Step::Sends(udp(PORT_B), datagram(1), Expected::Carried(OTHER, datagram(1))),
                ],
            )
        }),
    ]
}
