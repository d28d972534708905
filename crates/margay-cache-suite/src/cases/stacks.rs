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
    let needs = &[Need::Encapsulation];
    let numbers = own(ACK, 0, 0, 10);
    let back = peers(ACK, 0, 0, 10);
    let given = Expected::Given(PORT_A, back);
    let comes = |arrival, expected| Step::Comes(arrival, tcp(PORT_A), back, expected);
    let of_seal = |number, keys| Arrival { number, seal: Some(keys), ..Arrival::of(FLOW) };
    let strange_keys = SealKeys { send: [0x33; 32], ..peer_keys() };
    let out = |packet_number| {
        let seen = Seen::Encapsulated {
            to: peer(),
            peer_flow: peer_flow_of(FLOW),
            packet_number,
            is_beside: false,
            is_sealed: true,
            numbers,
        };
        Step::Sends(tcp(PORT_A), numbers, Expected::Exactly(seen))
    };
    let strange_stack = || Step::Tells(vec![Notice::StrangeStack(FLOW)]);
    let strange_seal = || Step::Tells(vec![Notice::StrangeSeal(FLOW)]);
    let from = |from: SocketAddr, at| Arrival { from, at: Some(at), ..Arrival::of(FLOW) };
    let plain_place = [place(SECOND, Some(PlaceStack::Plain)), place(THIRD, None)];
    let by_remotes = other_paths([OTHER_PEER, THIRD_PEER], [OTHER_LOCAL, OTHER_LOCAL]);
    let by_locals = other_paths([OTHER_PEER, OTHER_PEER], [OTHER_LOCAL, LOCAL]);
    vec![
        case(
            "a sealed flow is sent sealed, and takes nothing else",
            needs,
            after(
                sealed(1),
                vec![
                    out(0),
                    comes(Arrival::of(FLOW), dropped(Why::OtherStack)),
                    strange_stack(),
                    comes(of_seal(0, peer_keys()), given),
                    comes(of_seal(1, peer_keys()), given),
                ],
            ),
        ),
        case(
            "what was opened once is opened no more",
            needs,
            after(
                sealed(1),
                vec![
                    comes(of_seal(5, peer_keys()), given),
                    comes(of_seal(5, peer_keys()), dropped(Why::Replayed)),
                    comes(of_seal(4, peer_keys()), given),
                ],
            ),
        ),
        case(
            "what cannot be opened is told of",
            needs,
            after(
                sealed(1),
                vec![
                    comes(of_seal(0, strange_keys), dropped(Why::Strange)),
                    strange_seal(),
                    comes(of_seal(0, peer_keys()), given),
                ],
            ),
        ),
        case(
            "a plain flow takes nothing sealed",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![
                    comes(of_seal(0, peer_keys()), dropped(Why::OtherStack)),
                    strange_stack(),
                    comes(Arrival::of(FLOW), given),
                ],
            ),
        ),
        case("a sealed flow keeps its numbers and what it has opened when entries are forgotten", needs, {
            after(
                sealed(1),
                vec![
                    out(0),
                    out(1),
                    comes(of_seal(5, peer_keys()), given),
                    Step::Forgets,
                    installs(sealed(1)),
                    out(2),
                    comes(of_seal(5, peer_keys()), dropped(Why::Replayed)),
                    removes(FLOW),
                    installs(sealed(1)),
                    out(0),
                    comes(of_seal(5, peer_keys()), given),
                ],
            )
        }),
        case(
            "DATA from elsewhere shows nothing, of whatever stack it is",
            needs,
            after(
                sealed(1),
                vec![
                    comes(Arrival { from: OTHER_PEER, ..Arrival::of(FLOW) }, dropped(Why::WrongPath)),
                    comes(Arrival { from: OTHER_PEER, ..of_seal(0, peer_keys()) }, dropped(Why::WrongPath)),
                    Step::Tells(Vec::new()),
                    comes(of_seal(0, peer_keys()), given),
                ],
            ),
        ),
        case(
            "a striped flow takes what comes by its places",
            needs,
            [
                begun(encapsulated(FLOW, 1)),
                by_remotes.clone(),
                vec![
                    comes(from(OTHER_PEER, OTHER_LOCAL), dropped(Why::WrongPath)),
                    installs(striped(encapsulated(FLOW, 2), [place(SECOND, None), place(THIRD, None)])),
                    comes(from(OTHER_PEER, OTHER_LOCAL), given),
                    comes(from(THIRD_PEER, OTHER_LOCAL), given),
                    comes(Arrival::of(FLOW), given),
                    comes(from(SocketAddr::new(PEER, PORT + 1), LOCAL), dropped(Why::WrongPath)),
                    installs(encapsulated(FLOW, 3)),
                    comes(from(OTHER_PEER, OTHER_LOCAL), dropped(Why::WrongPath)),
                ],
            ]
            .concat(),
        ),
        case(
            "a sealed flow takes what is plain by its plain place alone",
            needs,
            [
                begun(sealed(1)),
                by_remotes,
                vec![
                    installs(striped(sealed(2), plain_place)),
                    comes(from(OTHER_PEER, OTHER_LOCAL), given),
                    comes(from(THIRD_PEER, OTHER_LOCAL), dropped(Why::OtherStack)),
                    strange_stack(),
                    comes(Arrival { seal: Some(peer_keys()), number: 9, ..from(THIRD_PEER, OTHER_LOCAL) }, given),
                    Step::Passes(std::time::Duration::from_millis(200)),
                    installs(striped(sealed(3), [place(SECOND, None), place(THIRD, None)])),
                    comes(from(OTHER_PEER, OTHER_LOCAL), dropped(Why::OtherStack)),
                    strange_stack(),
                ],
            ]
            .concat(),
        ),
        case(
            "which place it is, this host's own address says, too",
            needs,
            [
                begun(sealed(1)),
                by_locals,
                vec![
                    installs(striped(sealed(2), plain_place)),
                    comes(from(OTHER_PEER, OTHER_LOCAL), given),
                    comes(from(OTHER_PEER, LOCAL), dropped(Why::OtherStack)),
                    strange_stack(),
                ],
            ]
            .concat(),
        ),
    ]
}
