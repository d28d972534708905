//! Between DATA and the direct path: marks, what goes beside, pinholes.

use margay_core::Entry;
use margay_core::flow_cache::DATAGRAMS_MIN;
use margay_wire::{BESIDE, FENCE};

use super::*;
use crate::step::{Arrival, Notice};

pub(super) fn cases() -> Vec<Case> {
    let back = peers(ACK, 0, 0, 10);
    let comes = |number, flags| {
        let arrival = Arrival { number, flags, ..Arrival::of(FLOW) };
        Step::Comes(arrival, tcp(PORT_A), back, Expected::Given(PORT_A, back))
    };
    let mark = |number, flags| {
        let arrival = Arrival { number, flags, is_mark: true, ..Arrival::of(FLOW) };
        Step::Comes(arrival, tcp(PORT_A), back, Expected::Exactly(Seen::Marked))
    };
    let hears = |notice| Step::Tells(vec![notice]);
    let silent = Step::Tells(Vec::new());
    let accepting = |generation, accepting| {
        let wire = Wire { accepting, ..wire(FLOW) };
        installs(Entry { wire: Some(wire), ..entry(FLOW, generation) })
    };
    let unwired = |generation| Entry { wire: Some(Wire { sending: false, ..wire(FLOW) }), ..entry(FLOW, generation) };
    let says = |said, heard, flags| {
        let numbers = own(flags, said, heard, 0);
        Step::Sends(tcp(PORT_A), numbers, inside(FLOW, numbers))
    };
    let datagrams = Entry { app: udp(PORT_A), ..unwired(1) };
    let datagram_out = Step::Sends(udp(PORT_A), datagram(10), inside(FLOW, datagram(10)));
    let few = vec![datagram_out.clone(); DATAGRAMS_MIN as usize - 1];
    let no_pinhole = Step::Pinhole(FLOW, None);
    let needs = &[Need::Encapsulation];
    vec![
        case(
            "a peer that encapsulates again is told of once its FENCE has passed",
            needs,
            after(
                entry(FLOW, 1),
                vec![
                    mark(20, FENCE),
                    hears(Notice::PeerDirect(FLOW)),
                    comes(19, 0),
                    silent.clone(),
                    comes(21, BESIDE),
                    silent.clone(),
                    comes(22, 0),
                    hears(Notice::PeerBack(FLOW)),
                    mark(23, 0),
                    hears(Notice::PeerBack(FLOW)),
                    accepting(2, false),
                    comes(24, 0),
                    silent,
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
        case("a flow that is not sent direct goes inside DATA", needs, after(unwired(1), vec![says(0, 0, ACK)])),
        case(
            "a pinhole has the numbers that the program has shown last",
            needs,
            after(
                unwired(1),
                vec![
                    no_pinhole.clone(),
                    says(0, 0, ACK),
                    Step::Pinhole(FLOW, Some((OWN, PEERS))),
                    says(3, 50, ACK),
                    Step::Pinhole(FLOW, Some((OWN.wrapping_add(3), PEERS + 50))),
                    // A segment that was overtaken acknowledges nothing less.
                    says(3, 40, ACK),
                    Step::Pinhole(FLOW, Some((OWN.wrapping_add(3), PEERS + 50))),
                ],
            ),
        ),
        case("what a program has shown before its flow has flow ports is known", needs, {
            after(
                encapsulated(FLOW, 1),
                vec![
                    says(3, 50, ACK),
                    no_pinhole.clone(),
                    installs(unwired(2)),
                    Step::Pinhole(FLOW, Some((OWN.wrapping_add(3), PEERS + 50))),
                ],
            )
        }),
        case("datagrams are lifted after several, or when one has come back", needs, {
            let steps = [few, vec![no_pinhole.clone(), datagram_out.clone(), Step::Pinhole(FLOW, Some((0, 0)))]];
            after(datagrams, steps.concat())
        }),
        case(
            "a datagram that comes back is enough",
            needs,
            after(
                datagrams,
                vec![
                    no_pinhole,
                    Step::Comes(Arrival::of(FLOW), udp(PORT_A), datagram(1), Expected::Given(PORT_A, datagram(1))),
                    Step::Tells(vec![Notice::PeerBack(FLOW)]),
                    Step::Pinhole(FLOW, Some((0, 0))),
                ],
            ),
        ),
    ]
}
