//! What goes unanswered, and what is answered again.

use std::time::Duration;

use margay_core::Entry;
use margay_core::flow_cache::UNANSWERED;

use super::*;
use crate::step::{Arrival, Notice};

/// Beyond a bound by enough for what a test run takes itself.
const MORE: Duration = Duration::from_millis(100);

const fn passes(time: Duration) -> Step {
    Step::Passes(time)
}

fn millis(time: u64) -> Step {
    Step::Passes(Duration::from_millis(time))
}

fn hears_it(notice: Notice) -> Step {
    Step::Tells(vec![notice])
}

fn silent() -> Step {
    Step::Tells(Vec::new())
}

fn comes(flow: FlowId) -> Step {
    let numbers = peers(ACK, 0, 0, 0);
    Step::Comes(Arrival::of(flow), tcp(if flow == FLOW { PORT_A } else { PORT_B }), numbers, {
        Expected::Given(if flow == FLOW { PORT_A } else { PORT_B }, numbers)
    })
}

pub(super) fn cases() -> Vec<Case> {
    [unanswered(), anew(), others()].concat()
}

const ENCAPSULATED: &[Need] = &[Need::Encapsulation];

/// For so long data may not go unanswered.
fn too_long() -> Duration {
    UNANSWERED + MORE
}

fn data() -> Step {
    says(FLOW, own(ACK, 0, 0, 10))
}

fn datagrams() -> Entry {
    Entry { app: udp(PORT_A), ..encapsulated(FLOW, 1) }
}

fn datagram_out() -> Step {
    Step::Sends(udp(PORT_A), datagram(10), Expected::Carried(FLOW, datagram(10)))
}

/// One connection waits for an answer.
fn unanswered() -> Vec<Case> {
    vec![
        case("data that goes unanswered is told of with each packet, and then its answer, once", ENCAPSULATED, {
            after(
                encapsulated(FLOW, 1),
                vec![
                    data(),
                    silent(),
                    passes(too_long()),
                    data(),
                    hears_it(Notice::Silence(FLOW)),
                    passes(MORE),
                    data(),
                    hears_it(Notice::Silence(FLOW)),
                    comes(FLOW),
                    hears_it(Notice::Answer(FLOW)),
                    comes(FLOW),
                    data(),
                    millis(300),
                    data(),
                ],
            )
        }),
        case(
            "an answer in time is no news",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![data(), millis(300), comes(FLOW), data(), millis(300), data(), comes(FLOW)],
            ),
        ),
        case(
            "acknowledgements alone wait for no answer",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![says(FLOW, own(ACK, 0, 0, 0)), passes(too_long()), says(FLOW, own(ACK, 0, 0, 0))],
            ),
        ),
        case("one connection's data goes unanswered, whatever else is answered", ENCAPSULATED, {
            let others = [millis(400), comes(OTHER), data()];
            let rounds = [&others[..], &others[..], &[millis(400), comes(OTHER)]].concat();
            let steps = [
                vec![installs(Entry { app: tcp(PORT_B), ..encapsulated(OTHER, 1) }), data()],
                rounds,
                vec![silent(), data()],
            ]
            .concat();
            after(encapsulated(FLOW, 1), [steps, vec![hears_it(Notice::Silence(FLOW))]].concat())
        }),
    ]
}

/// Waits begin anew, and answers are told of.
fn anew() -> Vec<Case> {
    vec![
        case(
            "the wait begins anew with another address",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![
                    data(),
                    millis(800),
                    on_path(Path { remote: SocketAddr::new([10, 0, 0, 3].into(), PORT), ..path() }),
                    data(),
                    millis(400),
                    data(),
                ],
            ),
        ),
        case(
            "an answer is told of whatever became of the entry meanwhile",
            ENCAPSULATED,
            after(
                encapsulated(FLOW, 1),
                vec![
                    data(),
                    passes(too_long()),
                    data(),
                    hears_it(Notice::Silence(FLOW)),
                    installs(encapsulated(FLOW, 2)),
                    comes(FLOW),
                    hears_it(Notice::Answer(FLOW)),
                    comes(FLOW),
                ],
            ),
        ),
    ]
}

/// What has no wait, or is not the connection's.
fn others() -> Vec<Case> {
    vec![
        case(
            "nobody need answer a datagram",
            ENCAPSULATED,
            after(
                datagrams(),
                vec![
                    datagram_out(),
                    Step::Comes(Arrival::of(FLOW), udp(PORT_A), datagram(1), Expected::Given(PORT_A, datagram(1))),
                    datagram_out(),
                    millis(400),
                    datagram_out(),
                ],
            ),
        ),
        case(
            "of a path from which nothing comes it is told, whatever goes by it",
            ENCAPSULATED,
            after(
                datagrams(),
                vec![
                    datagram_out(),
                    millis(600),
                    datagram_out(),
                    hears_it(Notice::PathSilence(FLOW)),
                    millis(100),
                    datagram_out(),
                ],
            ),
        ),
        case(
            "what is beside a direct flow has no watch of its own",
            ENCAPSULATED,
            after(
                entry(FLOW, 1),
                vec![says(FLOW, own(ACK, 0, 0, 1480)), passes(too_long()), says(FLOW, own(ACK, 0, 0, 1480))],
            ),
        ),
    ]
}
