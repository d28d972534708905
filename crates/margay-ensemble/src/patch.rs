//! What members are told of order across holes: watermarks, and redirect patches (§4.2 and 5.2 of the paper).
//!
//! The paper's patch is a null frame that fills a number. I-FORWARD-TSN is cumulative: it says that *nothing* up to a
//! number will come. So a patch waits until all before it has been acknowledged, or else what is merely late would be
//! lost.

use margay_core::Instant;
use margay_wire::sctp::{SkippedRepr, WatermarkRepr};

use crate::counters::Dropped;
use crate::member::{Link, Member, Sequencing, Watermarks};
use crate::number::{Csn, Lsn, Row, Serial};
use crate::outbox::{Outbox, To};
use crate::rules::Rules;
use crate::split::Split;

/// What a member of Margay's is told now.
fn watermark<R: Rules>(split: &Split, marks: &Watermarks, chain: &Row<Lsn, Link>) -> WatermarkRepr {
    if !R::WATERMARKS {
        return WatermarkRepr { confirms: false, lsn: chain.next().previous().0, csn: split.ring.next().0 };
    }
    let csn = if R::HOLES_AT_JOIN { split.mark } else { split.mark.later(marks.joined_at) };
    WatermarkRepr { confirms: false, lsn: marks.lsn.0, csn: csn.0 }
}

/// The watermark that goes with a frame.
pub(crate) fn beside_frame<R: Rules>(split: &Split, member: &mut Member, now: Instant) -> Option<WatermarkRepr> {
    let Sequencing::Watermarks(marks) = &mut member.sequencing else { return None };
    let mark = watermark::<R>(split, marks, &member.chain);
    marks.told = marks.told.later(Csn(mark.csn));
    if marks.repeat.due().is_none() {
        marks.repeat.start(now);
    }
    Some(mark)
}

/// Tells a member what it needs to know and has no frame to hear it with.
pub(crate) fn tell<R: Rules>(split: &Split, member: &mut Member, now: Instant, outbox: &mut Outbox) {
    match &mut member.sequencing {
        Sequencing::Watermarks(marks) => {
            // What is behind the last frame in order that it has is of no interest to it.
            let wanted = split.mark.earlier(marks.ordered_to);
            if !marks.confirmed.is_before(wanted) {
                return marks.repeat.stop();
            }
            if marks.told.is_before(wanted) || marks.repeat.due().is_none() {
                marks.repeat.start(now);
            } else if !marks.repeat.is_due(now) {
                return;
            }
            let mark = watermark::<R>(split, marks, &member.chain);
            marks.told = marks.told.later(Csn(mark.csn));
            outbox.watermark(member.id, &mark);
        }
        Sequencing::Patches(_) => release::<R>(split, member, now, outbox),
    }
}

/// Releases patches whose turn has come: those next to what the member has acknowledged.
fn release<R: Rules>(split: &Split, member: &mut Member, now: Instant, outbox: &mut Outbox) {
    // Whoever passes over a MID throws away what is incomplete before it.
    let open = split.open.iter().filter(|((stream, is_unordered, _), open)| {
        open.member == member.id && *stream == 0 && !is_unordered && !open.is_complete()
    });
    let least_open = open.map(|(_, open)| Csn(open.mid)).reduce(Csn::earlier);
    let mut to = None;
    for (lsn, link) in member.chain.iter() {
        match *link {
            Link::Patched { mid } if least_open.is_none_or(|open| Csn(mid).is_before(open)) => to = Some((lsn, mid)),
            _ if R::DEFERS_PATCHES => break,
            _ => {}
        }
    }
    let Sequencing::Patches(patches) = &mut member.sequencing else { return };
    let Some((lsn, mid)) = to else { return patches.repeat.stop() };
    // It may have been held back after it was released: by a frame of which only a part has come.
    if patches.forwarded.is_none_or(|(was, _)| was.is_before(lsn)) || patches.repeat.due().is_none() {
        patches.forwarded = Some((lsn, mid));
        patches.repeat.start(now);
    } else if !patches.repeat.is_due(now) {
        return;
    }
    outbox.forward(To::Member(member.id), lsn.0, &[SkippedRepr { stream: 0, is_unordered: false, mid }]);
}

/// A member says what it has been told.
pub(crate) fn confirm(member: &mut Member, mark: &WatermarkRepr) -> Result<(), Dropped> {
    let Some(marks) = member.watermarks().filter(|_| mark.confirms) else { return Err(Dropped::Malformed) };
    if marks.told.is_before(Csn(mark.csn)) {
        return Err(Dropped::Lie);
    }
    marks.confirmed = marks.confirmed.later(Csn(mark.csn));
    Ok(())
}

/// Whether a member has given on all in order that it was given.
pub(crate) fn is_told_all(split: &Split, member: &Member) -> bool {
    match &member.sequencing {
        Sequencing::Watermarks(marks) => {
            !split.mark.is_before(marks.ordered_to) && !marks.confirmed.is_before(marks.ordered_to)
        }
        Sequencing::Patches(_) => true,
    }
}
