//! Between DATA and the direct path: marks, what goes beside, pinholes.

use margay_core::Entry;
use margay_core::flow_cache::DATAGRAMS_MIN;
use margay_wire::{BESIDE, FENCE};

use super::*;
use crate::step::{Arrival, Notice};

pub(super) fn cases() -> Vec<Case> {
    [going_over(), pinholes()].concat()
}

const BACK: Numbers = peers(ACK, 0, 0, 10);
const ENCAPSULATED: &[Need] = &[Need::Encapsulation];

fn comes(number: u32, flags: u8) -> Step {
    let arrival = Arrival { number, flags, ..Arrival::of(FLOW) };
    Step::Comes(arrival, tcp(PORT_A), BACK, Expected::Given(PORT_A, BACK))
}

fn mark(number: u32, flags: u8) -> Step {
    let arrival = Arrival { number, flags, is_mark: true, ..Arrival::of(FLOW) };
    Step::Comes(arrival, tcp(PORT_A), BACK, Expected::Exactly(Seen::Marked))
}

fn told(notices: &[Notice]) -> Step {
    Step::Tells(notices.to_vec())
}

fn accepting(generation: u32, accepting: bool) -> Step {
    let wire = Wire { accepting, ..wire(FLOW) };
    installs(Entry { wire: Some(wire), ..entry(FLOW, generation) })
}

/// A flow that is not sent direct, and could be.
fn unlifted(generation: u32) -> Entry {
    Entry { wire: Some(Wire { sending: false, ..wire(FLOW) }), ..entry(FLOW, generation) }
}

fn unlifted_datagrams() -> Entry {
    Entry { app: udp(PORT_A), ..unlifted(1) }
}

fn acknowledges(said: u32, heard: u32) -> Step {
    let numbers = own(ACK, said, heard, 0);
    Step::Sends(tcp(PORT_A), numbers, inside(FLOW, numbers))
}

fn datagram_out() -> Step {
    Step::Sends(udp(PORT_A), datagram(10), inside(FLOW, datagram(10)))
}

const fn pinhole(numbers: Option<(u32, u32)>) -> Step {
    Step::Pinhole(FLOW, numbers)
}

/// From one way to the other.
fn going_over() -> Vec<Case> {
    vec![
        case(
            "a peer that encapsulates again is told of once its FENCE has passed",
            ENCAPSULATED,
            after(
                entry(FLOW, 1),
                vec![
                    mark(20, FENCE),
                    told(&[Notice::PeerDirect(FLOW)]),
                    comes(19, 0),
                    told(&[]),
                    comes(21, BESIDE),
                    told(&[]),
                    comes(22, 0),
                    told(&[Notice::PeerBack(FLOW)]),
                    mark(23, 0),
                    told(&[Notice::PeerBack(FLOW)]),
                    accepting(2, false),
                    comes(24, 0),
                    told(&[]),
                ],
            ),
        ),
        case(
            "what a direct flow cannot send direct goes beside it",
            &[Need::Both],
            after(entry(FLOW, 1), {
                let numbers = own(ACK, 0, 0, 1480);
                let expected =
                    Expected::Encapsulated { flow: FLOW, to: peer(), is_beside: true, is_sealed: false, numbers };
                vec![Step::Sends(tcp(PORT_A), numbers, expected)]
            }),
        ),
        case(
            "a flow that is not sent direct goes inside DATA",
            ENCAPSULATED,
            after(unlifted(1), vec![acknowledges(0, 0)]),
        ),
    ]
}

/// When it is time for a pinhole, and what its numbers are.
fn pinholes() -> Vec<Case> {
    vec![
        case(
            "a pinhole has the numbers that the program has shown last",
            ENCAPSULATED,
            after(
                unlifted(1),
                vec![
                    pinhole(None),
                    acknowledges(0, 0),
                    pinhole(Some((OWN, PEERS))),
                    acknowledges(3, 50),
                    pinhole(Some((OWN.wrapping_add(3), PEERS + 50))),
                    // A segment that was overtaken acknowledges nothing less.
                    acknowledges(3, 40),
                    pinhole(Some((OWN.wrapping_add(3), PEERS + 50))),
                ],
            ),
        ),
        case("what a program has shown before its flow has flow ports is known", ENCAPSULATED, {
            after(
                encapsulated(FLOW, 1),
                vec![
                    acknowledges(3, 50),
                    pinhole(None),
                    installs(unlifted(2)),
                    pinhole(Some((OWN.wrapping_add(3), PEERS + 50))),
                ],
            )
        }),
        case("datagrams are lifted after several, or when one has come back", ENCAPSULATED, {
            let steps = [
                vec![datagram_out(); DATAGRAMS_MIN as usize - 1],
                vec![pinhole(None), datagram_out(), pinhole(Some((0, 0)))],
            ];
            after(unlifted_datagrams(), steps.concat())
        }),
        case(
            "a datagram that comes back is enough",
            ENCAPSULATED,
            after(
                unlifted_datagrams(),
                vec![
                    pinhole(None),
                    Step::Comes(Arrival::of(FLOW), udp(PORT_A), datagram(1), Expected::Given(PORT_A, datagram(1))),
                    told(&[Notice::PeerBack(FLOW)]),
                    pinhole(Some((0, 0))),
                ],
            ),
        ),
    ]
}
