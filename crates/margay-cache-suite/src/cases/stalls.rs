//! Direct packets that go unanswered.

use std::time::Duration;

use margay_core::flow_cache::{DATAGRAM_ANSWER, DATAGRAM_IDLE, DATAGRAM_STALL, STALL_UNKNOWN};
use margay_core::{Entry, EntryUpdate};

use super::*;
use crate::step::Notice;

pub(super) fn cases() -> Vec<Case> {
    [segments(), datagrams_alone(), without_path()].concat()
}

const DIRECT: &[Need] = &[Need::Direct];
const KERNEL_ALONE: &[Need] = &[Need::Direct, Need::KernelAlone];
const MISSED: Expected = Expected::Exactly(Seen::Missed);
const GOES: Expected = Expected::Carried(FLOW, datagram(10));
/// Beyond a bound, or below.
const MORE: Duration = Duration::from_millis(100);

const fn passes(time: Duration) -> Step {
    Step::Passes(time)
}

fn data() -> Step {
    says(FLOW, own(ACK, 0, 0, 10))
}

const fn is_left(numbers: Numbers) -> Step {
    Step::Sends(tcp(PORT_A), numbers, MISSED)
}

/// An acknowledgement expects no answer.
fn unanswered() -> Vec<Step> {
    vec![data(), passes(STALL_UNKNOWN + MORE), says(FLOW, own(ACK, 10, 0, 0))]
}

fn datagrams() -> Entry {
    Entry { app: udp(PORT_A), ..entry(FLOW, 1) }
}

const fn sends(expected: Expected) -> Step {
    Step::Sends(udp(PORT_A), datagram(10), expected)
}

const fn arrives() -> Step {
    Step::Hears(FLOW, udp(PORT_A), datagram(10), Expected::Given(PORT_A, datagram(10)))
}

fn told(notices: &[Notice]) -> Step {
    Step::Tells(notices.to_vec())
}

/// Connections whose direct segments go unanswered.
fn segments() -> Vec<Case> {
    vec![
        case("direct data without an answer is the agent's until the flow is told anew", KERNEL_ALONE, {
            let stalled = vec![is_left(own(ACK, 0, 0, 10)), is_left(own(ACK, 0, 0, 0))];
            after(entry(FLOW, 1), [unanswered(), stalled, vec![installs(entry(FLOW, 2)), data()]].concat())
        }),
        case("the core hears that a direct flow stalls", &[Need::Both], {
            let beside = Expected::Encapsulated {
                flow: FLOW,
                to: peer(),
                is_beside: true,
                is_sealed: false,
                numbers: own(ACK, 0, 0, 10),
            };
            let stalled = vec![Step::Sends(tcp(PORT_A), own(ACK, 0, 0, 10), beside), told(&[Notice::Stalled(FLOW)])];
            after(entry(FLOW, 1), [unanswered(), stalled].concat())
        }),
        case(
            "an answer ends the wait, and says how long the next one may be",
            KERNEL_ALONE,
            after(
                entry(FLOW, 1),
                vec![
                    data(),
                    passes(Duration::from_millis(20)),
                    hears(FLOW, peers(ACK, 0, 10, 0)),
                    says(FLOW, own(ACK, 10, 0, 10)),
                    passes(Duration::from_millis(100)),
                    says(FLOW, own(ACK, 20, 0, 10)),
                    passes(Duration::from_millis(400)),
                    is_left(own(ACK, 30, 0, 10)),
                ],
            ),
        ),
    ]
}

/// Datagrams that go one way, or pause.
fn datagrams_alone() -> Vec<Case> {
    vec![
        case(
            "datagrams that nothing answers are the agent's",
            KERNEL_ALONE,
            after(
                datagrams(),
                vec![
                    sends(GOES),
                    passes(DATAGRAM_STALL - MORE * 5),
                    sends(GOES),
                    passes(MORE * 5 + MORE),
                    sends(MISSED),
                    sends(MISSED),
                ],
            ),
        ),
        case(
            "answered datagrams go on until they pause",
            KERNEL_ALONE,
            after(
                datagrams(),
                vec![
                    sends(GOES),
                    arrives(),
                    passes(DATAGRAM_IDLE - MORE * 5),
                    sends(GOES),
                    arrives(),
                    passes(DATAGRAM_IDLE + MORE),
                    sends(MISSED),
                ],
            ),
        ),
        case("datagrams that come and are not answered want a sign once a second", DIRECT, {
            after(
                datagrams(),
                vec![
                    arrives(),
                    told(&[Notice::OneWay(FLOW)]),
                    arrives(),
                    told(&[]),
                    passes(DATAGRAM_ANSWER + MORE),
                    arrives(),
                    told(&[Notice::OneWay(FLOW)]),
                    sends(GOES),
                    passes(MORE),
                    arrives(),
                ],
            )
        }),
    ]
}

/// Nothing goes direct without a path.
fn without_path() -> Vec<Case> {
    vec![case(
        "a path that goes takes its flows out of the kernel",
        KERNEL_ALONE,
        after(entry(FLOW, 1), vec![data(), Step::Told(EntryUpdate::RemovePath(PATH)), is_left(own(ACK, 0, 0, 10))]),
    )]
}
