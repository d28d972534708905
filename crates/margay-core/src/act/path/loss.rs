//! How much of a flow's datagrams is lost on the way (DESIGN §12; docs/decisions/0081).
//!
//! Each end counts what its programs send and what comes. Who wants to know asks the peer twice a second, by a PROBE of
//! the flow that says how many were sent; the answer says how many had come when the PROBE came. The PROBE goes the
//! datagrams' way: so what is still on its way is missing in both counts, but for a few. Where a flow goes by `fec`
//! or `sctp`, its datagrams have numbers, and these are counted instead.
//!
//! Beside that, each PROBE says when it was sent: how much the time varies that PROBEs take is the jitter of their way
//! (docs/decisions/0084). And each end counts which of the peer's datagrams come behind a later one.
//!
//! The counts are the flow cache's: the core asks for them ([`EntryUpdate::Count`]) and is told
//! ([`Sal::handle_counted`]).

use alloc::collections::BTreeSet;
use core::time::Duration;

use margay_wire::{Extension, Flags, FlowId, Kind, LossRepr, TimingRepr};

use crate::act::stack_rule::StackRules;
use crate::association::draft::Draft;
use crate::association::{Association, AssociationTable};
use crate::cache::entry::EntryUpdate;
use crate::leg::loss::{FlowCount, FlowLoss, Loss, Numbered};
use crate::leg::timing::{FlowTiming, Order, Timing};
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::session::flow::FlowTable;
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::{FairTable, Peer};
use crate::types::key::HostId;
use crate::types::time::Instant;

const UDP: u8 = 17;
/// Most flows about which peers may ask at once. Those that this host wants to know of are as many as its flows: a rule
/// that demands encryption where much is lost must never fail for want of room.
const ASKED_MAX: usize = 4096;
/// Peers are asked about so many flows in the time of [`ASK`]; about more of them, less often.
const ASKS_MAX: usize = 4096;
/// A peer is asked so often about an active flow.
const ASK: Duration = Duration::from_millis(500);
/// A flow that has carried nothing for so long is not active.
const ACTIVE: Duration = Duration::from_secs(10);
/// What is known is forgotten as so many more datagrams should have come.
const WINDOW: f64 = 1024.0;
/// Of fewer datagrams nothing is said.
const SAMPLE_MIN: f64 = 50.0;
/// What one PROBE adds to the jitter. RFC 3550 has a sixteenth, for many packets a second; PROBEs are two to four.
const JITTER_GAIN: f64 = 0.125;
/// Of fewer PROBEs no jitter is said.
const JITTER_SAMPLES_MIN: u32 = 4;
/// So many answers, and so many datagrams, of which none has come: what carries them fails, since answers pass.
const UNHEARD_ANSWERS: u32 = 4;
const UNHEARD_MIN: u32 = 50;
/// A count that has risen by more has begun anew.
const RISE_MAX: u32 = 1 << 31;

/// One direction.
#[derive(Clone, Copy, Debug, Default)]
struct Meter {
    /// Where the counts stood.
    last: Option<Numbered>,
    expected: f64,
    received: f64,
    gaps: f64,
}

impl Meter {
    fn note(&mut self, now: Numbered) {
        let last = self.last.replace(now).filter(|last| last.change == now.change);
        let Some(last) = last else { return };
        let expected = now.expected.wrapping_sub(last.expected);
        let received = now.received.wrapping_sub(last.received);
        if expected > RISE_MAX || received > RISE_MAX {
            return;
        }
        let gaps = now.gaps.wrapping_sub(last.gaps).min(expected);
        let kept = 1.0 - (f64::from(expected) / WINDOW).min(1.0);
        self.expected = self.expected * kept + f64::from(expected);
        self.received = self.received * kept + f64::from(received);
        self.gaps = self.gaps * kept + f64::from(gaps);
    }

    fn loss(&self) -> Option<Loss> {
        if self.expected < SAMPLE_MIN {
            return None;
        }
        let lost = (self.expected - self.received).max(0.0);
        let row = if self.gaps >= 1.0 { (lost / self.gaps).clamp(1.0, 1000.0) } else { 1.0 };
        // Both are small numbers that are not negative.
        Some(Loss { ppm: (lost / self.expected * 1e6) as u32, row_thousandths: (row * 1000.0) as u32 })
    }
}

/// By how much the time varies that the peer's PROBEs take (RFC 3550 §6.4.1).
#[derive(Clone, Copy, Debug, Default)]
struct Jitter {
    /// How long the last one took, by two clocks.
    took: Option<u32>,
    smoothed_us: f64,
    samples: u32,
}

impl Jitter {
    fn note(&mut self, sent_us: u32, came_us: u32) {
        let took = came_us.wrapping_sub(sent_us);
        let Some(last) = self.took.replace(took) else { return };
        let differs_us = f64::from(took.wrapping_sub(last).cast_signed().unsigned_abs());
        self.samples += 1;
        let gain = if self.samples == 1 { 1.0 } else { JITTER_GAIN };
        self.smoothed_us += (differs_us - self.smoothed_us) * gain;
    }

    fn get(&self) -> Option<u32> {
        // A cast of what is too great gives the greatest, which says that it is not known.
        (self.samples >= JITTER_SAMPLES_MIN).then_some((self.smoothed_us as u32).min(u32::MAX - 1))
    }
}

/// Answers of a peer in a row by which nothing more of what was sent had come.
#[derive(Clone, Copy, Debug, Default)]
struct Unheard {
    /// What had come by the first of them: from which change on, and how much.
    came: Option<(u32, u32)>,
    /// How much programs here had sent by then.
    sent: u32,
    answers: u32,
}

impl Unheard {
    /// The peer has answered that so much has come, and so much was sent by now. True where that has been nothing for
    /// long.
    fn note(&mut self, came: (u32, u32), sent: u32) -> bool {
        if self.came != Some(came) {
            *self = Self { came: Some(came), sent, answers: 0 };
            return false;
        }
        self.answers += 1;
        self.answers >= UNHEARD_ANSWERS && sent.wrapping_sub(self.sent) >= UNHEARD_MIN
    }
}

/// What is asked and answered about one flow.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    /// When the peer is asked; nothing while the flow is not active. Changed by [`Losses::set_next`] alone.
    next: Option<Instant>,
    /// When the peer last asked. Its jitter is reckoned for it, whether this end wants to know or not.
    asked: Option<Instant>,
    /// The flow cache has been asked for counts, for these.
    asks: bool,
    question: Option<LossRepr>,
    answer: Option<LossRepr>,
    sent: Meter,
    received: Meter,
    /// Of PROBEs of the peer.
    jitter: Jitter,
    /// What the peer says of those of this host.
    sent_jitter_us: Option<u32>,
    sent_order: Meter,
    received_order: Meter,
    unheard: Unheard,
}

impl Measured {
    /// Whether the peer has asked of late.
    fn is_asked(&self, now: Instant) -> bool {
        self.asked.is_some_and(|asked| now.since(asked) < ACTIVE)
    }

    fn timing(&self) -> FlowTiming {
        let of = |jitter_us, order: &Meter| Timing { jitter_us, reordered_ppm: order.loss().map(|late| late.ppm) };
        FlowTiming {
            sent: of(self.sent_jitter_us, &self.sent_order),
            received: of(self.jitter.get(), &self.received_order),
        }
    }

    fn note_timing(&mut self, now: Instant, said: TimingRepr) {
        self.jitter.note(said.at_us, now.micros() as u32);
        self.sent_jitter_us = said.jitter_us;
        self.sent_order.note(in_order(Order { judged: said.judged, late: said.late }));
    }
}

/// What came in order, as what came.
fn in_order(order: Order) -> Numbered {
    Numbered { change: 0, expected: order.judged, received: order.judged.wrapping_sub(order.late), gaps: 0 }
}

/// Flows whose loss is measured, or asked about by the peer.
#[derive(Debug)]
pub(crate) struct Losses {
    flows: FairTable<FlowId, Measured>,
    due: BTreeSet<(Instant, FlowId)>,
}

impl Default for Losses {
    fn default() -> Self {
        Self { flows: FairTable::new(ASKED_MAX, usize::MAX), due: BTreeSet::new() }
    }
}

impl Losses {
    pub fn next_deadline(&self) -> Option<Instant> {
        self.due.first().map(|(next, _)| *next)
    }

    fn set_next(&mut self, id: FlowId, next: Option<Instant>) {
        let Some(measured) = self.flows.get_mut(&id) else { return };
        if let Some(before) = core::mem::replace(&mut measured.next, next) {
            self.due.remove(&(before, id));
        }
        self.due.extend(next.map(|next| (next, id)));
    }

    /// From one question about a flow to the next.
    fn between_questions(&self) -> Duration {
        // So many flows there are not.
        let flows = u32::try_from(self.due.len().div_ceil(ASKS_MAX)).unwrap_or(u32::MAX);
        ASK * flows.max(1)
    }

    /// What is known of a flow.
    pub fn of(&self, id: FlowId) -> FlowLoss {
        let measured = self.flows.get(&id);
        FlowLoss {
            sent: measured.and_then(|measured| measured.sent.loss()),
            received: measured.and_then(|measured| measured.received.loss()),
        }
    }

    /// How evenly a flow's datagrams arrive.
    pub fn timing_of(&self, id: FlowId) -> FlowTiming {
        self.flows.get(&id).map(Measured::timing).unwrap_or_default()
    }

    pub fn forget(&mut self, id: FlowId) {
        self.set_next(id, None);
        self.flows.remove(&id);
    }

    /// Nobody here wants to know of a flow; but the peer may, and asks again.
    fn forget_unless_asked(&mut self, now: Instant, id: FlowId) {
        let Some(measured) = self.flows.get_mut(&id) else { return };
        match measured.asked.filter(|_| measured.is_asked(now)) {
            Some(asked) => self.set_next(id, Some(asked + ACTIVE)),
            None => self.forget(id),
        }
    }

    /// The peer asks about a flow.
    fn note_asked(&mut self, now: Instant, peer: Peer, id: FlowId) {
        if let Some(measured) = self.entry(peer, id) {
            measured.asked = Some(now);
        }
    }

    /// The flow carries something again.
    pub fn stir(&mut self, now: Instant, id: FlowId) {
        if let Some(measured) = self.flows.get_mut(&id).filter(|measured| measured.next.is_none()) {
            // Two clocks go apart in a pause.
            measured.jitter.took = None;
            self.set_next(id, Some(now));
        }
    }

    /// This host wants to know: the peer is asked about a flow at this time.
    fn ask_at(&mut self, at: Instant, id: FlowId) {
        if self.entry(Peer::Own, id).is_some() {
            self.set_next(id, Some(at));
        }
    }

    fn entry(&mut self, peer: Peer, id: FlowId) -> Option<&mut Measured> {
        if !self.flows.contains_key(&id) {
            self.flows.insert(peer, id, Measured::default()).ok()?;
        }
        self.flows.get_mut(&id)
    }
}

impl Sal {
    /// From here on the loss of a flow is measured, as long as somebody here wants to know.
    pub(crate) fn watch_loss(&mut self, now: Instant, id: FlowId) {
        if self.flows.get(id).is_some_and(|flow| self.stack_rules.wants_loss(&self.associations, flow)) {
            self.losses.ask_at(now, id);
        }
    }

    /// Asks the peers about flows whose time has come.
    pub(crate) fn losses_due(&mut self, now: Instant) {
        while let Some((_, id)) = self.losses.due.first().copied().filter(|(next, _)| *next <= now) {
            self.losses.set_next(id, None);
            let flow = self.flows.get(id).filter(|flow| self.stack_rules.wants_loss(&self.associations, flow));
            let Some(active) = flow.map(|flow| flow.active) else {
                self.losses.forget_unless_asked(now, id);
                continue;
            };
            let is_active = now.since(active) < ACTIVE;
            let next = is_active.then(|| now + self.losses.between_questions());
            self.losses.set_next(id, next);
            let Some(measured) = self.losses.flows.get_mut(&id) else { continue };
            measured.asks = is_active;
            if is_active {
                self.queue.update(EntryUpdate::Count(id));
            }
        }
    }

    /// What the peer has said of a flow in a proved PROBE: a question, or an answer.
    pub(crate) fn note_loss(
        &mut self,
        id: FlowId,
        said: LossRepr,
        timing: Option<TimingRepr>,
        is_answer: bool,
    ) -> Result<(), DropReason> {
        let now = self.now;
        if is_answer && !self.losses.flows.contains_key(&id) {
            return Err(DropReason::Unexpected);
        }
        if !is_answer {
            let association = self.flows.get(id).and_then(|flow| self.associations.get(flow.association));
            let peer = association.map(Association::peer).ok_or(DropReason::UnknownFlow)?;
            self.losses.note_asked(now, peer, id);
        }
        let measured = self.losses.flows.get_mut(&id).ok_or(DropReason::Full)?;
        timing.into_iter().for_each(|timing| measured.note_timing(now, timing));
        *(if is_answer { &mut measured.answer } else { &mut measured.question }) = Some(said);
        self.queue.update(EntryUpdate::Count(id));
        Ok(())
    }

    /// What the flow cache has counted of a flow by now, as it was asked.
    pub(crate) fn handle_counted(&mut self, id: FlowId, count: &FlowCount) {
        let Some(measured) = self.losses.flows.get_mut(&id) else { return };
        let mut has_failed = false;
        let question = measured.question.take();
        let answer = measured.answer.take();
        let asks = core::mem::take(&mut measured.asks);
        measured.received_order.note(in_order(count.order));
        for said in question.iter().chain(&answer) {
            // What is on its way is behind what it says.
            measured.received.note(count.numbered.unwrap_or(Numbered {
                change: 0,
                expected: said.sent,
                received: count.received,
                gaps: 0,
            }));
        }
        if let Some(LossRepr { basis, expected, received, gaps, .. }) = answer {
            measured.sent.note(Numbered { change: basis, expected, received, gaps });
            has_failed = measured.unheard.note((basis, received), count.sent);
        }
        if let Some(question) = question {
            self.say_loss(id, count, question.sent, Flags::CONFIRM);
        }
        if asks {
            self.say_loss(id, count, 0, Flags::empty());
        }
        let Some(flow) = self.flows.get(id).filter(|flow| self.stack_rules.wants_loss(&self.associations, flow)) else {
            self.losses.forget_unless_asked(self.now, id);
            return;
        };
        let sends = flow.stacks.sends;
        if let Some(loss) = self.losses.of(id).sent.filter(|_| sends.repairs() && answer.is_some()) {
            self.queue.update(EntryUpdate::Loss { flow: id, loss });
        }
        if has_failed && sends.makes_good() {
            self.leave_failed_stack(id);
        }
    }

    fn say_loss(&mut self, id: FlowId, count: &FlowCount, asked: u32, flags: Flags) {
        let Some(flow) = self.flows.get(id) else { return };
        let association = flow.association;
        let numbered =
            count.numbered.unwrap_or(Numbered { change: 0, expected: asked, received: count.received, gaps: 0 });
        let Numbered { change, expected, received, gaps } = numbered;
        let jitter_us = self.losses.flows.get(&id).and_then(|measured| measured.jitter.get());
        let Order { judged, late } = count.order;
        let at_us = self.now.micros() as u32;
        let extensions = [
            Extension::Loss(LossRepr { basis: change, sent: count.sent, expected, received, gaps }),
            Extension::Timing(TimingRepr { at_us, jitter_us, judged, late }),
        ];
        let mut draft = Draft::new(Kind::Probe, flow.peer_flow, id);
        draft.flags = flags;
        draft.extensions = &extensions;
        self.seal_and_send(association, draft);
    }
}

impl StackRules {
    /// Whether this end wants to know what is lost of a flow.
    fn wants_loss(&self, associations: &AssociationTable, flow: &Flow) -> bool {
        let association = associations.get(flow.association);
        let is_able = association.is_some_and(|association| association.has_fec() && !association.is_self());
        let is_wanted = flow.stacks.has_repaired() || flow.stacks.has_repeated() || self.asks_for_loss(flow.id);
        is_able && is_wanted && flow.app.protocol == UDP && flow.carries_data()
    }
}

impl Losses {
    /// The greatest loss of all flows with a host whose loss is known, of a million.
    pub(crate) fn worst_loss(&self, flows: &FlowTable, associations: &AssociationTable, host: HostId) -> Option<u32> {
        let is_with = |id: &FlowId| {
            let association = flows.get(*id).and_then(|flow| associations.get(flow.association));
            association.is_some_and(|association| association.host == host)
        };
        let flows = self.flows.iter().filter(|(id, _)| is_with(id));
        flows.filter_map(|(id, _)| self.of(*id).worst_ppm()).max()
    }

    /// How evenly the datagrams of all flows with a host arrive, of each the worst.
    pub(crate) fn worst_timing(&self, flows: &FlowTable, associations: &AssociationTable, host: HostId) -> Timing {
        let is_with = |id: &FlowId| {
            let association = flows.get(*id).and_then(|flow| associations.get(flow.association));
            association.is_some_and(|association| association.host == host)
        };
        let flows = self.flows.iter().filter(|(id, _)| is_with(id));
        flows.map(|(_, measured)| measured.timing().worst()).fold(Timing::default(), Timing::or_worse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(change: u32, expected: u32, received: u32, gaps: u32) -> Numbered {
        Numbered { change, expected, received, gaps }
    }

    #[test]
    fn loss_is_told_after_enough_datagrams_and_follows_what_is_lost() {
        let mut meter = Meter::default();
        meter.note(counted(0, 1000, 900, 0));
        assert_eq!(meter.loss(), None, "what was before is not known");
        meter.note(counted(0, 1049, 949, 0));
        assert_eq!(meter.loss(), None);
        meter.note(counted(0, 1051, 950, 0));
        assert_eq!(meter.loss().map(|loss| loss.ppm / 1000), Some(19), "one of 51");
        let mut at = counted(0, 1051, 950, 0);
        for _ in 0..100 {
            at = counted(0, at.expected + 100, at.received + 95, at.gaps + 2);
            meter.note(at);
        }
        let loss = meter.loss().expect("known");
        assert!((49_000..51_000).contains(&loss.ppm) && (2400..2600).contains(&loss.row_thousandths), "{loss:?}");
        for _ in 0..100 {
            at = counted(0, at.expected + 100, at.received + 100, at.gaps);
            meter.note(at);
        }
        assert!(meter.loss().is_some_and(|loss| loss.ppm < 10));
    }

    #[test]
    fn what_the_peer_asks_about_is_kept_as_long_as_it_asks() {
        let mut losses = Losses::default();
        let id = FlowId(7);
        let at = |ms| Instant::from_millis(ms);
        losses.note_asked(at(0), Peer::Own, id);
        losses.forget_unless_asked(at(1), id);
        assert_eq!((losses.flows.len(), losses.next_deadline()), (1, Some(at(10_000))));
        losses.note_asked(at(9_000), Peer::Own, id);
        losses.forget_unless_asked(at(10_000), id);
        assert_eq!(losses.flows.len(), 1);
        losses.forget_unless_asked(at(19_000), id);
        assert_eq!((losses.flows.len(), losses.next_deadline()), (0, None));
    }

    #[test]
    fn what_peers_ask_about_keeps_nobody_here_from_knowing() {
        let mut losses = Losses::default();
        let at = |ms| Instant::from_millis(ms);
        let peer = |n| Peer::Member(HostId([n; 16]));
        let asked = |n| (0..ASKED_MAX as u32).map(move |flow| FlowId(flow + 10_000 * u32::from(n)));
        asked(1).for_each(|id| losses.note_asked(at(0), peer(1), id));
        assert_eq!(losses.flows.len(), ASKED_MAX / 16);
        (2..=16).for_each(|n| asked(n).for_each(|id| losses.note_asked(at(0), peer(n), id)));
        assert_eq!(losses.flows.len(), ASKED_MAX, "each has its share");
        assert_eq!(losses.between_questions(), ASK, "of these this host asks nobody");
        let own = 0..2 * ASKS_MAX as u32;
        own.clone().for_each(|flow| losses.ask_at(at(5), FlowId(1_000_000 + flow)));
        assert!(own.clone().all(|flow| losses.flows.contains_key(&FlowId(1_000_000 + flow))));
        assert_eq!((losses.between_questions(), losses.next_deadline()), (2 * ASK, Some(at(5))));
        own.for_each(|flow| losses.forget(FlowId(1_000_000 + flow)));
        assert_eq!((losses.flows.len(), losses.next_deadline()), (ASKED_MAX, None));
    }

    #[test]
    fn jitter_is_what_the_time_varies_by_whatever_the_clocks_say() {
        let mut jitter = Jitter::default();
        let apart = u32::MAX - 3_000_000;
        for at in 0..40_u32 {
            let sent_us = (u32::MAX - 5_000_000).wrapping_add(at * 500_000);
            let took_us = 20_000 + if at % 2 == 0 { 0 } else { 4_000 };
            assert_eq!(jitter.get().is_some(), at > JITTER_SAMPLES_MIN);
            jitter.note(sent_us, sent_us.wrapping_add(apart).wrapping_add(took_us));
        }
        assert_eq!(jitter.get(), Some(4_000));
        for at in 40..120_u32 {
            let sent_us = (u32::MAX - 5_000_000).wrapping_add(at * 500_000);
            jitter.note(sent_us, sent_us.wrapping_add(apart));
        }
        assert!(jitter.get().is_some_and(|us| us < 10), "{jitter:?}");
    }

    #[test]
    fn what_comes_behind_a_later_one_is_a_share_of_what_has_a_number() {
        let mut measured = Measured::default();
        let said = |judged, late| TimingRepr { judged, late, ..TimingRepr::default() };
        for step in 0..20 {
            measured.note_timing(Instant::ZERO, said(step * 100, step * 3));
            measured.received_order.note(in_order(Order { judged: step * 100, late: 0 }));
        }
        let FlowTiming { sent, received } = measured.timing();
        assert!(sent.reordered_ppm.is_some_and(|ppm| (29_000..31_000).contains(&ppm)), "{sent:?}");
        assert_eq!(received.reordered_ppm, Some(0));
        assert_eq!(Measured::default().timing(), FlowTiming::default());
    }

    #[test]
    fn what_is_sent_and_never_heard_of_has_failed() {
        let mut unheard = Unheard::default();
        let failed = |unheard: &mut Unheard, came, sent| unheard.note((7, came), sent);
        assert!((0..9).all(|at| !failed(&mut unheard, at, at * 1000)), "something comes");
        assert!((0..9).all(|at| !failed(&mut unheard, 9, 9000 + at)), "too little is sent");
        let first = (0..).find(|at| failed(&mut unheard, 10, (u32::MAX - 20).wrapping_add(at * 20)));
        assert_eq!(first, Some(UNHEARD_ANSWERS));
        assert!(!unheard.note((8, 10), 90_000), "of another change");
    }

    #[test]
    fn counts_wrap_begin_anew_and_run_ahead() {
        let mut meter = Meter::default();
        meter.note(counted(0, u32::MAX - 50, u32::MAX - 90, 0));
        meter.note(counted(0, 49, 4, 0));
        assert_eq!(meter.loss().map(|loss| loss.ppm / 10_000), Some(5), "95 of 100");
        meter.note(counted(0, 7, 2, 0));
        meter.note(counted(9, 0, 0, 0));
        meter.note(counted(9, 100, 100, 0));
        assert_eq!(meter.loss().map(|loss| loss.ppm / 1000), Some(23), "what was known stays");
        let mut ahead = Meter::default();
        ahead.note(counted(0, 0, 0, 0));
        ahead.note(counted(0, 100, 103, 0));
        assert_eq!(ahead.loss().map(|loss| loss.ppm), Some(0), "more than was said has come");
    }
}
