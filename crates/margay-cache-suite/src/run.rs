//! Has a cache do the cases.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use margay_core::{EntryUpdate, Tuple};
use margay_wire::{BESIDE, FlowId, PORT};

use crate::packet::emit;
use crate::step::{
    Arrival, Case, DIRECT_LOCAL_PORT, DIRECT_REMOTE_PORT, Expected, LOCAL, Need, Notice, PEER, Seen, Step,
};

/// A flow cache, with what stands around it on a host as far as that is needed to see what it does.
pub trait CacheUnderTest {
    /// Why it cannot show something; `None` where it can.
    fn lacks(&self, need: Need) -> Option<&'static str>;
    /// The core changes it.
    fn apply(&mut self, update: EntryUpdate);
    /// Time passes.
    fn pass(&mut self, time: Duration);
    /// It forgets all entries, as it may at any time.
    fn forget(&mut self);
    /// A program sends a packet.
    fn send(&mut self, packet: &[u8]) -> Seen;
    /// The core has a packet carried by a flow ([`Output::Carry`](margay_core::Output::Carry)).
    fn carry(&mut self, flow: FlowId, packet: &[u8]) -> Seen;
    /// The core has parted a packet of a program from others ([`AppVerdict::Parted`](margay_core::AppVerdict::Parted)).
    fn note_parted(&mut self, flow: FlowId, packet: &[u8]);
    /// DATA of the peer's comes, with this packet inside, sealed by the cache's own kind of cipher.
    fn take(&mut self, arrival: &Arrival, packet: &[u8]) -> Seen;
    /// A direct packet of the peer's comes.
    fn take_direct(&mut self, packet: &[u8]) -> Seen;
    /// What the core hears, since the last call.
    fn notices(&mut self) -> Vec<Notice>;
    /// Whether each end of a connection has acknowledged all of the other's.
    fn is_over(&mut self, flow: FlowId) -> bool;
    /// The numbers of a pinhole on the wire, if it is time for one.
    fn pinhole(&mut self, flow: FlowId) -> Option<(u32, u32)>;
}

/// What became of the cases.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Cases that were done as they must be.
    pub done: usize,
    /// Cases that the cache cannot show, and why.
    pub not_shown: Vec<(&'static str, &'static str)>,
    /// What went otherwise, by case and step.
    pub wrong: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} cases done, {} not shown, {} wrong", self.done, self.not_shown.len(), self.wrong.len())?;
        self.not_shown.iter().try_for_each(|(case, reason)| writeln!(f, "not shown: {case}: {reason}"))?;
        self.wrong.iter().try_for_each(|wrong| writeln!(f, "wrong: {wrong}"))
    }
}

/// Has a fresh cache do each case.
pub fn run<C: CacheUnderTest>(cases: &[Case], mut fresh: impl FnMut() -> C) -> Report {
    let mut report = Report::default();
    for case in cases {
        let mut cache = fresh();
        match case.needs.iter().find_map(|need| cache.lacks(*need)) {
            Some(reason) => report.not_shown.push((case.name, reason)),
            None => match do_case(case, &mut cache) {
                Ok(()) => report.done += 1,
                Err(wrong) => report.wrong.push(format!("{}: {wrong}", case.name)),
            },
        }
    }
    report
}

/// Endings that the core knows.
#[derive(Default)]
struct Heard(Vec<Notice>);

impl Heard {
    /// What the core has not heard yet. An ending may be told of again: its segment comes again, or is acknowledged
    /// again.
    fn news(&mut self, told: Vec<Notice>) -> Vec<Notice> {
        let mut news = Vec::new();
        for notice in told {
            let is_ending = matches!(notice, Notice::Ended(..));
            if is_ending && self.0.contains(&notice) {
                continue;
            }
            self.0.extend(is_ending.then_some(notice));
            news.push(notice);
        }
        news
    }
}

/// Does a case; what is told at the end and not spoken of is wrong, too.
fn do_case(case: &Case, cache: &mut impl CacheUnderTest) -> Result<(), String> {
    let mut heard = Heard::default();
    for (number, step) in case.steps.iter().enumerate() {
        do_step(step, cache, &mut heard).map_err(|wrong| format!("step {number}, {step:?}: {wrong}"))?;
    }
    match &heard.news(cache.notices())[..] {
        [] => Ok(()),
        told => Err(format!("at the end the core has heard {told:?}")),
    }
}

fn do_step(step: &Step, cache: &mut impl CacheUnderTest, heard: &mut Heard) -> Result<(), String> {
    match step {
        Step::Told(update) => cache.apply(update.clone()),
        Step::Sends(tuple, numbers, expected) => return expected.of(cache.send(&emit(tuple, *numbers))),
        Step::Carries(flow, tuple, numbers, expected) => {
            return expected.of(cache.carry(*flow, &emit(tuple, *numbers)));
        }
        Step::Parted(flow, tuple, numbers) => cache.note_parted(*flow, &emit(tuple, *numbers)),
        Step::Hears(flow, tuple, numbers, expected) => {
            let seen = if cache.lacks(Need::Direct).is_none() {
                let wire = wire_of(*flow, tuple.protocol).reversed();
                cache.take_direct(&emit(&wire, *numbers))
            } else {
                cache.take(&Arrival { flags: BESIDE, ..Arrival::of(*flow) }, &emit(&tuple.reversed(), *numbers))
            };
            return expected.of(seen);
        }
        Step::Comes(arrival, tuple, numbers, expected) => {
            return expected.of(cache.take(arrival, &emit(&tuple.reversed(), *numbers)));
        }
        Step::Arrives(wire, numbers, expected) => return expected.of(cache.take_direct(&emit(wire, *numbers))),
        Step::Passes(time) => cache.pass(*time),
        Step::Forgets => cache.forget(),
        Step::Tells(notices) => return is_same(&heard.news(cache.notices()), notices),
        Step::IsOver(flow, is_over) => return is_same(&cache.is_over(*flow), is_over),
        Step::Pinhole(flow, numbers) => return is_same(&cache.pinhole(*flow), numbers),
    }
    Ok(())
}

fn is_same<T: PartialEq + fmt::Debug>(seen: &T, expected: &T) -> Result<(), String> {
    if seen == expected { Ok(()) } else { Err(format!("{seen:?}")) }
}

/// The addresses and ports of a flow of the cases as its direct packets leave this host.
pub(crate) fn wire_of(flow: FlowId, protocol: u8) -> Tuple {
    let number = flow.0 as u16;
    Tuple {
        protocol,
        source: SocketAddr::new(LOCAL, DIRECT_LOCAL_PORT + number),
        destination: SocketAddr::new(PEER, DIRECT_REMOTE_PORT + number),
    }
}

/// What the peer calls a flow.
pub(crate) const fn peer_flow_of(flow: FlowId) -> FlowId {
    FlowId(flow.0 + 1000)
}

impl Arrival {
    /// Plain DATA of a flow, from where the peer is.
    pub const fn of(flow: FlowId) -> Self {
        let from = SocketAddr::new(PEER, PORT);
        Self { from, at: Some(LOCAL), flow, number: 1, flags: 0, seal: None, is_mark: false }
    }
}

impl Expected {
    /// Whether it is what was seen.
    fn of(&self, seen: Seen) -> Result<(), String> {
        let is_it = match (*self, seen) {
            (Self::Carried(flow, expected), Seen::Direct { wire, numbers }) => {
                wire.source.port() == DIRECT_LOCAL_PORT + flow.0 as u16 && numbers == expected
            }
            (Self::Carried(flow, expected), Seen::Encapsulated { peer_flow, numbers, .. }) => {
                peer_flow == peer_flow_of(flow) && numbers == expected
            }
            (Self::Encapsulated { flow, to, is_beside, is_sealed, numbers }, seen) => {
                let packet_number = if let Seen::Encapsulated { packet_number, .. } = seen { packet_number } else { 0 };
                let peer_flow = peer_flow_of(flow);
                seen == Seen::Encapsulated { to, peer_flow, packet_number, is_beside, is_sealed, numbers }
            }
            (Self::Given(port, expected), Seen::Given { tuple, numbers }) => {
                tuple.destination.port() == port && numbers == expected
            }
            (Self::Exactly(expected), seen) => expected == seen,
            (Self::Carried(..) | Self::Given(..), _) => false,
        };
        if is_it { Ok(()) } else { Err(format!("{seen:?}")) }
    }
}
