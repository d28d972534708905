//! What connections have shown of themselves: their numbers, and how they end.

use margay_core::Direction;
use margay_wire::FlowId;

use super::{Cache, Slot};
use crate::kernel::Unjudged;
use crate::program::{ACK, Segment, TCP};

impl Slot {
    /// Takes note of a segment of the application. What is acknowledged stays so.
    pub(super) fn note_own(&mut self, segment: &Segment) {
        self.ending.note(Direction::Egress, segment);
        if segment.tuple.protocol != TCP || segment.flags & ACK == 0 {
            return;
        }
        let next = segment.sequence.wrapping_add(segment.data.len() as u32);
        let is_overtaken = |last: u32| last.wrapping_sub(segment.acknowledgement).cast_signed() > 0;
        let last = self.numbers.map(|(_, acknowledged)| acknowledged).filter(|last| is_overtaken(*last));
        self.numbers = Some((next, last.unwrap_or(segment.acknowledgement)));
    }
}

impl Cache {
    /// A session's program goes by another flow from here on: its connection's end is that one's.
    pub(super) fn succeed(&mut self, from: FlowId, to: FlowId) {
        self.heirs.remove(&to);
        self.heirs.values_mut().filter(|heir| **heir == from).for_each(|heir| *heir = to);
        self.heirs.insert(from, to);
        let Some(left) = self.by_flow.get(&from) else { return };
        let ending = left.ending;
        let numbers = left.numbers;
        if let Some(taken) = self.by_flow.get_mut(&to) {
            taken.ending = taken.ending.after(ending);
            taken.numbers = taken.numbers.or(numbers);
        }
    }

    /// What is known of a flow's connection.
    pub(super) fn shown_of(&mut self, flow: FlowId) -> Option<&mut Slot> {
        let known = self.known_by(flow);
        self.by_flow.get_mut(&known)
    }

    /// By which flow's entry a flow's connection is known.
    fn known_by(&self, flow: FlowId) -> FlowId {
        let has_heir = self.by_flow.get(&flow).is_some_and(|slot| !slot.entry.directions.has_egress());
        let heir = self.heirs.get(&flow).filter(|heir| has_heir && self.by_flow.contains_key(heir));
        heir.copied().unwrap_or(flow)
    }

    /// What has passed to the application, from whichever way.
    pub(crate) fn note_delivered(&mut self, flow: FlowId, segment: &Segment) {
        if let Some(slot) = self.shown_of(flow) {
            slot.ending.note(Direction::Ingress, segment);
        }
    }

    /// What the core has made of a segment of the application has passed by the session's two ways.
    pub(crate) fn note_parted(&mut self, flow: FlowId, segment: &Segment) {
        if let Some(slot) = self.shown_of(flow) {
            slot.note_own(segment);
        }
    }

    /// Takes note of an ending of the peer's before its program is given it. Gives which of FIN and RST the program's
    /// TCP takes by what is known; of others is asked again when the program says something.
    pub(crate) fn take_ending(&mut self, flow: FlowId, segment: &Segment) -> u8 {
        let Some(ending) = Unjudged::of(segment) else { return 0 };
        let taken = self.judge(flow, &ending).unwrap_or(0);
        if taken == 0 {
            let waiting = self.unjudged.entry(flow).or_default();
            waiting.reset = ending.reset.or(waiting.reset);
            waiting.end = ending.end.or(waiting.end);
        }
        taken
    }

    /// Endings that programs' TCPs have taken since they came: flow, and which of FIN and RST.
    pub(crate) fn judge_endings(&mut self) -> Vec<(FlowId, u8)> {
        let judged: Vec<_> = self.unjudged.iter().map(|(flow, ending)| (*flow, self.judge(*flow, ending))).collect();
        let is_judged = |(flow, taken): (FlowId, Option<u8>)| match taken {
            Some(0) => None,
            taken => Some((flow, taken.unwrap_or(0))),
        };
        let judged: Vec<(FlowId, u8)> = judged.into_iter().filter_map(is_judged).collect();
        judged.iter().for_each(|(flow, _)| {
            self.unjudged.remove(flow);
        });
        judged.into_iter().filter(|(_, taken)| *taken != 0).collect()
    }

    /// `None` where nothing is known of the connection any more.
    fn judge(&self, flow: FlowId, ending: &Unjudged) -> Option<u8> {
        let known = self.known_by(flow);
        let here = self.by_flow.get(&known).map(|slot| slot.ending);
        let kernel = self.kernel.as_ref().and_then(|kernel| kernel.ending(known));
        if here.is_none() && kernel.is_none() {
            return None;
        }
        Some(ending.taken([&here.unwrap_or_default(), &kernel.unwrap_or_default()]))
    }

    /// What waits of a flow that goes waits of the one that its session's program goes by.
    pub(super) fn pass_on_endings(&mut self, flow: FlowId) {
        let heir = self.heirs.remove(&flow);
        let Some(left) = self.unjudged.remove(&flow) else { return };
        if let Some(heir) = heir {
            let waiting = self.unjudged.entry(heir).or_default();
            waiting.reset = waiting.reset.or(left.reset);
            waiting.end = waiting.end.or(left.end);
        }
    }

    /// Whether each end of a connection has acknowledged all of the other's.
    pub(crate) fn is_over(&self, flow: FlowId) -> bool {
        let here = self.by_flow.get(&flow).map(|slot| slot.ending).unwrap_or_default();
        let kernel = self.kernel.as_ref().and_then(|kernel| kernel.ending(flow)).unwrap_or_default();
        here.with(kernel).is_over()
    }
}
