//! Boxes that change addresses or ports (docs/decisions/0077; Dysco, section 2.3): what comes out of one is known by
//! the tag that went in. UDP has no options, and the payload has to do.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{ErrorCode, FlowId};

use super::forwarded::mark_forwarded;
use super::given::Mark;
use super::tag::{with_tag, without_tag};
use super::{Chained, Place};
use crate::cache::output::AppVerdict;
use crate::cache::packet::{self, AppPacket, Parsed};
use crate::machine::sal::Sal;
use crate::session::flow::{Flow, Setup};
use crate::table::middlebox::BoxKind;
use crate::types::drop_reason::DropReason;
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// So long after a box was given a datagram, one with the same payload and other addresses is that one.
const SAME_DATAGRAM: Duration = Duration::from_millis(100);

/// What has come out of a box.
enum CameOut {
    /// The first packet of this session.
    First(FlowId),
    /// The same, with other addresses, of a box that is not to change any.
    Changed(FlowId),
    /// Of one of these sessions, which all began with the same datagram.
    Any(Vec<FlowId>),
    /// The first packet of a session that is over.
    Late,
}

impl Sal {
    fn rewrites(&self, chained: &Chained) -> bool {
        self.box_here(&chained.asked).is_some_and(|known| matches!(known.kind, BoxKind::Rewrite))
    }

    /// Takes note of a first packet that a box is given. Gives the packet as the box gets it.
    ///
    /// # Errors
    ///
    /// The box changes addresses, and the packet has no room for a tag.
    pub(super) fn mark_first(&mut self, left: FlowId, first: Vec<u8>) -> Result<Vec<u8>, ErrorCode> {
        // What a client has put there is no tag of this host's.
        let mut first = without_tags(first);
        mark_forwarded(&mut first);
        let Ok(Parsed::Transport(packet)) = packet::parse(&first) else { return Ok(first) };
        let chained = self.flows.get(left).and_then(|flow| flow.chain.as_deref());
        let is_tagged = packet.is_tcp_syn() && chained.is_some_and(|chained| self.rewrites(chained));
        let mut marks: Vec<Mark> = Mark::of(&packet).into_iter().collect();
        let tagged = if is_tagged {
            let tag = self.rng.u32();
            marks.push(Mark::Tag(tag));
            Some(with_tag(&packet, tag).ok_or(ErrorCode::NoRoomForTag)?)
        } else {
            None
        };
        let given = tagged.unwrap_or(first);
        if let Some(flow) = self.flows.get_mut(left)
            && let Setup::Responder(setup) = &mut flow.setup
        {
            // Should the client ask again, the box is given the same once more.
            setup.syn = Some(given.clone());
        }
        marks.iter().for_each(|mark| self.chains.given.note(*mark, left));
        if let Some(setup) = self.flows.chain_setup(left) {
            setup.marks = marks;
        }
        Ok(given)
    }

    /// Whether a first packet that is not in the SYN can be done without: not by a box that changes addresses.
    pub(super) fn needs_first(&self, left: FlowId) -> bool {
        let chained = self.flows.get(left).and_then(|flow| flow.chain.as_deref());
        chained.is_some_and(|chained| self.rewrites(chained))
    }

    /// A packet that is no flow's has come out of `sal0`, and may be a first packet that a box has changed. `None`: it
    /// is none.
    pub(super) fn come_out_changed(&mut self, now: Instant, packet: &AppPacket<'_>) -> Option<AppVerdict> {
        match self.what_came_out(now, packet)? {
            CameOut::First(left) => {
                let bare = without_tag(packet);
                let bare = bare.as_deref().and_then(|bytes| match packet::parse(bytes) {
                    Ok(Parsed::Transport(bare)) => Some(bare),
                    _ => None,
                });
                let begun = self.begin_right(now, left, Some(bare.as_ref().unwrap_or(packet)));
                Some(begun.map_or_else(AppVerdict::Drop, |()| AppVerdict::Consumed))
            }
            CameOut::Changed(left) => {
                self.refuse_at_box(left, ErrorCode::BoxRewrites);
                Some(AppVerdict::Drop(DropReason::Unexpected))
            }
            CameOut::Any(all) => {
                all.into_iter().for_each(|left| self.refuse_at_box(left, ErrorCode::BoxAmbiguous));
                Some(AppVerdict::Drop(DropReason::Unexpected))
            }
            CameOut::Late => Some(AppVerdict::Drop(DropReason::UnknownFlow)),
        }
    }

    /// What a packet is by its tag, or without one by its number or its payload.
    fn what_came_out(&self, now: Instant, packet: &AppPacket<'_>) -> Option<CameOut> {
        if let Some(tag) = Mark::of_tagged(packet) {
            let left = self.chains.given.of(tag).iter().find(|left| self.waits(**left)).copied();
            return Some(left.map_or(CameOut::Late, CameOut::First));
        }
        // It has come out before, and was kept here until somebody knew where it goes on.
        if let Some(left) = self.left_that_let_out(packet) {
            return Some(CameOut::First(left));
        }
        let is_none_known = self.chains.given.is_empty() && self.chains.past.is_empty();
        if is_none_known || self.flows.by_tuple(&packet.tuple.reversed()).is_some() {
            return None;
        }
        let waiting = |mark| self.chains.given.of(mark).iter().filter(|left| self.waits(**left)).copied();
        let mark = Mark::of(packet)?;
        let past = || self.chains.past.has(&mark, now).then_some(CameOut::Late);
        if packet.is_tcp() {
            // Without its tag: the box has not said that it changes addresses, or takes options off.
            let is_known = !self.chains.given.of(mark).is_empty();
            let known = is_known.then(|| waiting(mark).next().map_or(CameOut::Late, CameOut::Changed));
            return known.or_else(past);
        }
        let is_recent = |flow: &Flow| now.since(flow.since) <= SAME_DATAGRAM;
        let recent = waiting(mark).filter(|left| self.flows.get(*left).is_some_and(is_recent));
        let recent: Vec<FlowId> = recent.collect();
        match recent[..] {
            [] => past(),
            [left] => {
                let chained = self.flows.get(left).and_then(|flow| flow.chain.as_deref());
                let rewrites = chained.is_some_and(|chained| self.rewrites(chained));
                Some(if rewrites { CameOut::First(left) } else { CameOut::Changed(left) })
            }
            _ => Some(CameOut::Any(recent)),
        }
    }

    /// The left half whose first packet this is, with the five-tuple that it has come out with.
    pub(super) fn left_that_let_out(&self, packet: &AppPacket<'_>) -> Option<FlowId> {
        if self.chains.given.is_empty() {
            return None;
        }
        let is_it = |left: &&FlowId| {
            let chained = self.flows.get(**left).and_then(|flow| flow.chain.as_ref());
            let out_as = chained.and_then(|chained| chained.setup.as_ref()?.out_as);
            out_as == Some(packet.tuple) && self.waits(**left)
        };
        self.chains.given.of(Mark::of(packet)?).iter().find(is_it).copied()
    }

    /// Whether a left half has no right one yet.
    fn waits(&self, left: FlowId) -> bool {
        let half_open = self.flows.get(left).filter(|flow| matches!(flow.setup, Setup::Responder(_)));
        half_open.is_some_and(|flow| self.flows.other_half(flow).is_none())
    }

    /// Refuses a session because of what its box here has done.
    pub(super) fn refuse_at_box(&mut self, left: FlowId, code: ErrorCode) {
        let place = self.flows.get(left).and_then(|flow| flow.chain.as_ref()).map(|chained| chained.place);
        if let Some(Place::Left { at }) = place {
            self.refuse_left(left, code, at as u8 + 1);
        }
    }

    /// Gives the right half the five-tuple that has come out of the box, where that is another one. False where that
    /// five-tuple is another session's.
    pub(super) fn set_right_tuple(&mut self, left: FlowId, right: &mut Flow, tuple: Tuple) -> bool {
        if tuple == right.app {
            return true;
        }
        if self.grants.is_taken(&self.flows, &tuple) || self.grants.is_taken(&self.flows, &tuple.reversed()) {
            return false;
        }
        right.app = tuple;
        let id = right.id;
        let halves = [right.chain.as_mut().map(|chained| (chained, left)), self.chain_of(left).map(|its| (its, id))];
        halves.into_iter().flatten().for_each(|(chained, other)| chained.other_half = Some(other));
        true
    }

    fn chain_of(&mut self, id: FlowId) -> Option<&mut Box<Chained>> {
        self.flows.get_mut(id)?.chain.as_mut()
    }

    /// Forgets by what the first packet of a left half would have been known.
    pub(super) fn forget_marks(&mut self, left: FlowId) {
        let marks = self.flows.chain_setup(left).map(|setup| core::mem::take(&mut setup.marks)).unwrap_or_default();
        marks.into_iter().for_each(|mark| self.chains.given.forget(mark, left));
    }
}

/// A packet without any tags.
fn without_tags(mut whole: Vec<u8>) -> Vec<u8> {
    while let Ok(Parsed::Transport(packet)) = packet::parse(&whole)
        && let Some(bare) = without_tag(&packet)
    {
        whole = bare;
    }
    whole
}
