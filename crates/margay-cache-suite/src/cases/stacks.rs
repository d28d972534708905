//! Flows that are sealed, and flows with places of their own.

use std::net::IpAddr;

use margay_core::entry::{Place, Places};
use margay_core::{Entry, PlaceStack, SealKeys};

use super::*;
use crate::step::{Arrival, Notice, OTHER_LOCAL, peer_keys, seal_keys};

const SECOND: PathId = PathId(2);
const THIRD: PathId = PathId(3);
/// The peer's other addresses.
const OTHER_PEER: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 0, 2)), PORT);
const THIRD_PEER: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(10, 2, 0, 2)), PORT);

fn sealed(generation: u32) -> Entry {
    Entry { seal: Some(seal_keys()), stacks: Stacks::only(Stack::Secure), ..encapsulated(FLOW, generation) }
}

/// A place by which nothing is sent yet, so that what is sent goes where all goes.
const fn place(path: PathId, takes: Option<PlaceStack>) -> Option<Place> {
    Some(Place { path, may_send: false, weight: 1, sends: None, takes })
}

fn striped(entry: Entry, places: [Option<Place>; 2]) -> Entry {
    let [first, second] = places;
    Entry { stripe: Some(Places { places: [first, second, None, None], ..Places::default() }), ..entry }
}

fn other_paths(remotes: [SocketAddr; 2], locals: [IpAddr; 2]) -> Vec<Step> {
    let one = |id, at: usize| on_path(Path { id, remote: remotes[at], local: Some(locals[at]), ..path() });
    vec![one(SECOND, 0), one(THIRD, 1)]
}

pub(super) fn cases() -> Vec<Case> {
    [seals(), numbers_of_seals(), places()].concat()
}

const ENCAPSULATED: &[Need] = &[Need::Encapsulation];
const SAID: Numbers = own(ACK, 0, 0, 10);
const BACK: Numbers = peers(ACK, 0, 0, 10);
const GIVEN: Expected = Expected::Given(PORT_A, BACK);

fn comes(arrival: Arrival, expected: Expected) -> Step {
    Step::Comes(arrival, tcp(PORT_A), BACK, expected)
}

fn of_seal(number: u32, keys: SealKeys) -> Arrival {
    Arrival { number, seal: Some(keys), ..Arrival::of(FLOW) }
}

fn from(from: SocketAddr, at: IpAddr) -> Arrival {
    Arrival { from, at: Some(at), ..Arrival::of(FLOW) }
}

/// The program says something, which goes sealed and with this number.
fn out(packet_number: u32) -> Step {
    let seen = Seen::Encapsulated {
        to: peer(),
        peer_flow: peer_flow_of(FLOW),
        packet_number,
        is_beside: false,
        is_sealed: true,
        numbers: SAID,
    };
    Step::Sends(tcp(PORT_A), SAID, Expected::Exactly(seen))
}

fn strange_stack() -> Step {
    Step::Tells(vec![Notice::StrangeStack(FLOW)])
}

/// The first is plain, the second is as the flow.
const PLAIN_PLACE: [Option<Place>; 2] = [place(SECOND, Some(PlaceStack::Plain)), place(THIRD, None)];
const PLACES: [Option<Place>; 2] = [place(SECOND, None), place(THIRD, None)];

/// Sealed or plain, and nothing else.
fn seals() -> Vec<Case> {
    vec![
        case(
            "a sealed flow is sent sealed, and takes nothing else",
            ENCAPSULATED,
            after(
                sealed(1),
                vec![
                    out(0),
                    comes(Arrival::of(FLOW), dropped(Why::OtherStack)),
                    strange_stack(),
                    comes(of_seal(0, peer_keys()), GIVEN),
                    comes(of_seal(1, peer_keys()), GIVEN),
                ],
            ),
        ),
        case(
            "what was opened once is opened no more",
            ENCAPSULATED,
            after(
                sealed(1),
                vec![
                    comes(of_seal(5, peer_keys()), GIVEN),
                    comes(of_seal(5, peer_keys()), dropped(Why::Replayed)),
                    comes(of_seal(4, peer_keys()), GIVEN),
                ],
            ),
        ),
        case(
            "what cannot be opened is told of",
            ENCAPSULATED,
            after(
                sealed(1),
                vec![
                    comes(of_seal(0, SealKeys { send: [0x33; 32], ..peer_keys() }), dropped(Why::Strange)),
                    Step::Tells(vec![Notice::StrangeSeal(FLOW)]),
                    comes(of_seal(0, peer_keys()), GIVEN),
                ],
            ),
        ),
        case(
            "a plain flow takes nothing sealed",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![
                    comes(of_seal(0, peer_keys()), dropped(Why::OtherStack)),
                    strange_stack(),
                    comes(Arrival::of(FLOW), GIVEN),
                ],
            ),
        ),
    ]
}

/// Numbers are kept, and shown to nobody.
fn numbers_of_seals() -> Vec<Case> {
    vec![
        case("a sealed flow keeps its numbers and what it has opened when entries are forgotten", ENCAPSULATED, {
            after(
                sealed(1),
                vec![
                    out(0),
                    out(1),
                    comes(of_seal(5, peer_keys()), GIVEN),
                    Step::Forgets,
                    installs(sealed(1)),
                    out(2),
                    comes(of_seal(5, peer_keys()), dropped(Why::Replayed)),
                ],
            )
        }),
        case("a suspended flow carries nothing, and goes on with its keys where it was", ENCAPSULATED, {
            let missed = || Expected::Exactly(Seen::Missed);
            after(
                sealed(1),
                vec![
                    out(0),
                    out(1),
                    comes(of_seal(5, peer_keys()), GIVEN),
                    suspends(FLOW),
                    misses(PORT_A),
                    comes(of_seal(6, peer_keys()), missed()),
                    Step::Forgets,
                    installs(sealed(2)),
                    out(2),
                    comes(of_seal(5, peer_keys()), dropped(Why::Replayed)),
                    comes(of_seal(6, peer_keys()), GIVEN),
                ],
            )
        }),
        case(
            "DATA from elsewhere shows nothing, of whatever stack it is",
            ENCAPSULATED,
            after(
                sealed(1),
                vec![
                    comes(Arrival { from: OTHER_PEER, ..Arrival::of(FLOW) }, dropped(Why::WrongPath)),
                    comes(Arrival { from: OTHER_PEER, ..of_seal(0, peer_keys()) }, dropped(Why::WrongPath)),
                    Step::Tells(Vec::new()),
                    comes(of_seal(0, peer_keys()), GIVEN),
                ],
            ),
        ),
    ]
}

/// Places of striped flows.
fn places() -> Vec<Case> {
    vec![
        case(
            "a striped flow takes what comes by its places",
            ENCAPSULATED,
            [
                begun(encapsulated(FLOW, 1)),
                other_paths([OTHER_PEER, THIRD_PEER], [OTHER_LOCAL, OTHER_LOCAL]),
                vec![
                    comes(from(OTHER_PEER, OTHER_LOCAL), dropped(Why::WrongPath)),
                    installs(striped(encapsulated(FLOW, 2), PLACES)),
                    comes(from(OTHER_PEER, OTHER_LOCAL), GIVEN),
                    comes(from(THIRD_PEER, OTHER_LOCAL), GIVEN),
                    comes(Arrival::of(FLOW), GIVEN),
                    comes(from(SocketAddr::new(PEER, PORT + 1), LOCAL), dropped(Why::WrongPath)),
                    installs(encapsulated(FLOW, 3)),
                    comes(from(OTHER_PEER, OTHER_LOCAL), dropped(Why::WrongPath)),
                ],
            ]
            .concat(),
        ),
        case(
            "a sealed flow takes what is plain by its plain place alone",
            ENCAPSULATED,
            [
                begun(sealed(1)),
                other_paths([OTHER_PEER, THIRD_PEER], [OTHER_LOCAL, OTHER_LOCAL]),
                vec![
                    installs(striped(sealed(2), PLAIN_PLACE)),
                    comes(from(OTHER_PEER, OTHER_LOCAL), GIVEN),
                    comes(from(THIRD_PEER, OTHER_LOCAL), dropped(Why::OtherStack)),
                    strange_stack(),
                    comes(Arrival { seal: Some(peer_keys()), number: 9, ..from(THIRD_PEER, OTHER_LOCAL) }, GIVEN),
                    Step::Passes(std::time::Duration::from_millis(200)),
                    installs(striped(sealed(3), PLACES)),
                    comes(from(OTHER_PEER, OTHER_LOCAL), dropped(Why::OtherStack)),
                    strange_stack(),
                ],
            ]
            .concat(),
        ),
        case(
            "which place it is, this host's own address says, too",
            ENCAPSULATED,
            [
                begun(sealed(1)),
                other_paths([OTHER_PEER, OTHER_PEER], [OTHER_LOCAL, LOCAL]),
                vec![
                    installs(striped(sealed(2), PLAIN_PLACE)),
                    comes(from(OTHER_PEER, OTHER_LOCAL), GIVEN),
                    comes(from(OTHER_PEER, LOCAL), dropped(Why::OtherStack)),
                    strange_stack(),
                ],
            ]
            .concat(),
        ),
    ]
}
