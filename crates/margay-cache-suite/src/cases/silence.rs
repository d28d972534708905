//! What goes unanswered, and what is answered again.

use std::time::Duration;

use margay_core::flow_cache::{DATAGRAM_ANSWER, DATAGRAM_IDLE, DATAGRAM_STALL, LINGER, STALL_UNKNOWN, UNANSWERED};
use margay_core::{Entry, EntryUpdate};

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
    let mut all = inside_data();
    all.extend(direct());
    all
}

fn inside_data() -> Vec<Case> {
    let data = says(FLOW, own(ACK, 0, 0, 10));
    let needs = &[Need::Encapsulation];
    let too_long = UNANSWERED + MORE;
    let neighbour = installs(Entry { app: tcp(PORT_B), ..encapsulated(OTHER, 1) });
    let moved = on_path(Path { remote: SocketAddr::new([10, 0, 0, 3].into(), PORT), ..path() });
    let datagrams = Entry { app: udp(PORT_A), ..encapsulated(FLOW, 1) };
    let datagram_out = Step::Sends(udp(PORT_A), datagram(10), Expected::Carried(FLOW, datagram(10)));
    let large = says(FLOW, own(ACK, 0, 0, 1480));
    vec![
        case("data that goes unanswered is told of with each packet, and then its answer, once", needs, {
            after(
                encapsulated(FLOW, 1),
                vec![
                    data.clone(),
                    silent(),
                    passes(too_long),
                    data.clone(),
                    hears_it(Notice::Silence(FLOW)),
                    passes(MORE),
                    data.clone(),
                    hears_it(Notice::Silence(FLOW)),
                    comes(FLOW),
                    hears_it(Notice::Answer(FLOW)),
                    comes(FLOW),
                    data.clone(),
                    millis(300),
                    data.clone(),
                ],
            )
        }),
        case(
            "an answer in time is no news",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![data.clone(), millis(300), comes(FLOW), data.clone(), millis(300), data.clone(), comes(FLOW)],
            ),
        ),
        case(
            "acknowledgements alone wait for no answer",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![says(FLOW, own(ACK, 0, 0, 0)), passes(too_long), says(FLOW, own(ACK, 0, 0, 0))],
            ),
        ),
        case("one connection's data goes unanswered, whatever else is answered", needs, {
            let others = [millis(400), comes(OTHER), data.clone()];
            let rounds = [&others[..], &others[..], &[millis(400), comes(OTHER)]].concat();
            let steps = [vec![neighbour, data.clone()], rounds, vec![silent(), data.clone()]].concat();
            after(encapsulated(FLOW, 1), [steps, vec![hears_it(Notice::Silence(FLOW))]].concat())
        }),
        case(
            "the wait begins anew with another address",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![data.clone(), millis(800), moved, data.clone(), millis(400), data.clone()],
            ),
        ),
        case(
            "an answer is told of whatever became of the entry meanwhile",
            needs,
            after(
                encapsulated(FLOW, 1),
                vec![
                    data.clone(),
                    passes(too_long),
                    data.clone(),
                    hears_it(Notice::Silence(FLOW)),
                    installs(encapsulated(FLOW, 2)),
                    comes(FLOW),
                    hears_it(Notice::Answer(FLOW)),
                    comes(FLOW),
                ],
            ),
        ),
        case(
            "nobody need answer a datagram",
            needs,
            after(
                datagrams,
                vec![
                    datagram_out.clone(),
                    Step::Comes(Arrival::of(FLOW), udp(PORT_A), datagram(1), Expected::Given(PORT_A, datagram(1))),
                    datagram_out.clone(),
                    millis(400),
                    datagram_out.clone(),
                ],
            ),
        ),
        case(
            "of a path from which nothing comes it is told, whatever goes by it",
            needs,
            after(
                datagrams,
                vec![
                    datagram_out.clone(),
                    millis(600),
                    datagram_out.clone(),
                    hears_it(Notice::PathSilence(FLOW)),
                    millis(100),
                    datagram_out.clone(),
                ],
            ),
        ),
        case(
            "what is beside a direct flow has no watch of its own",
            needs,
            after(entry(FLOW, 1), vec![large.clone(), passes(too_long), large]),
        ),
    ]
}

fn direct() -> Vec<Case> {
    let data = says(FLOW, own(ACK, 0, 0, 10));
    let answer = hears(FLOW, peers(ACK, 0, 10, 0));
    let needs = &[Need::Direct];
    let missed = Expected::Exactly(Seen::Missed);
    let alone = missed_alone();
    let datagrams = Entry { app: udp(PORT_A), ..entry(FLOW, 1) };
    let sends = |expected| Step::Sends(udp(PORT_A), datagram(10), expected);
    let goes = Expected::Carried(FLOW, datagram(10));
    let arrives = Step::Hears(FLOW, udp(PORT_A), datagram(10), Expected::Given(PORT_A, datagram(10)));
    let is_left = |numbers| Step::Sends(tcp(PORT_A), numbers, missed);
    let unanswered = || vec![data.clone(), passes(STALL_UNKNOWN + MORE), says(FLOW, own(ACK, 10, 0, 0))];
    vec![
        case("direct data without an answer is the agent's until the flow is told anew", alone, {
            let stalled = vec![is_left(own(ACK, 0, 0, 10)), is_left(own(ACK, 0, 0, 0))];
            after(entry(FLOW, 1), [unanswered(), stalled, vec![installs(entry(FLOW, 2)), data.clone()]].concat())
        }),
        case("the core hears that a direct flow stalls", &[Need::Both], {
            let beside = Expected::Encapsulated {
                flow: FLOW,
                to: peer(),
                is_beside: true,
                is_sealed: false,
                numbers: own(ACK, 0, 0, 10),
            };
            let stalled = vec![Step::Sends(tcp(PORT_A), own(ACK, 0, 0, 10), beside), hears_it(Notice::Stalled(FLOW))];
            after(entry(FLOW, 1), [unanswered(), stalled].concat())
        }),
        case(
            "an answer ends the wait, and says how long the next one may be",
            alone,
            after(
                entry(FLOW, 1),
                vec![
                    data.clone(),
                    millis(20),
                    answer,
                    says(FLOW, own(ACK, 10, 0, 10)),
                    millis(100),
                    says(FLOW, own(ACK, 20, 0, 10)),
                    millis(400),
                    is_left(own(ACK, 30, 0, 10)),
                ],
            ),
        ),
        case(
            "datagrams that nothing answers are the agent's",
            alone,
            after(
                datagrams,
                vec![
                    sends(goes),
                    passes(DATAGRAM_STALL - LINGER / 4),
                    sends(goes),
                    passes(LINGER / 4 + MORE),
                    sends(missed),
                    sends(missed),
                ],
            ),
        ),
        case(
            "answered datagrams go on until they pause",
            alone,
            after(
                datagrams,
                vec![
                    sends(goes),
                    arrives.clone(),
                    passes(DATAGRAM_IDLE - LINGER / 4),
                    sends(goes),
                    arrives.clone(),
                    passes(DATAGRAM_IDLE + MORE),
                    sends(missed),
                ],
            ),
        ),
        case("datagrams that come and are not answered want a sign once a second", needs, {
            after(
                datagrams,
                vec![
                    arrives.clone(),
                    hears_it(Notice::OneWay(FLOW)),
                    arrives.clone(),
                    silent(),
                    passes(DATAGRAM_ANSWER + MORE),
                    arrives.clone(),
                    hears_it(Notice::OneWay(FLOW)),
                    sends(goes),
                    passes(MORE),
                    arrives.clone(),
                ],
            )
        }),
        case(
            "a path that goes takes its flows out of the kernel",
            alone,
            after(
                entry(FLOW, 1),
                vec![data.clone(), Step::Told(EntryUpdate::RemovePath(PATH)), is_left(own(ACK, 0, 0, 10))],
            ),
        ),
    ]
}

/// What the kernel leaves is not carried elsewhere.
const fn missed_alone() -> &'static [Need] {
    &[Need::Direct, Need::KernelAlone]
}
