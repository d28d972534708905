//! What becomes of the frames that a member was given, when it dies.
//!
//! What it has acknowledged for good stays so. Each other frame becomes an orphan: it is pending again, and goes
//! elsewhere when the peer repeats it. The peer may have been told of one for now, and is told otherwise by the next
//! SACK (RFC 9260, 6.2).

use alloc::vec::Vec;

use crate::config::Failure;
use crate::member::MemberId;
use crate::number::{Csn, Serial};
use crate::plugin::Order;
use crate::split::{Acked, Held, Place, Split, order_of};

/// Whether this chunk stays the dead member's. One without order may have been acted on as soon as it was there; one in
/// order has not been, as long as something before it is missing at the member.
fn is_settled(held: &Held) -> bool {
    match held.acked {
        Acked::Cumulative => true,
        Acked::Gap => held.repr.is_unordered(),
        Acked::No => false,
    }
}

impl Split {
    fn held(&self) -> impl Iterator<Item = &Held> {
        self.ring.iter().filter_map(|(_, place)| match place {
            Place::Held(held) => Some(held),
            _ => None,
        })
    }

    /// A member is dead.
    pub(crate) fn bereave(&mut self, id: MemberId) -> Result<(), Failure> {
        let its = self.held().filter(|held| held.member == id && !is_settled(held));
        // Frames, by their first chunks.
        let mut lost: Vec<Csn> = its.map(|held| held.first).collect();
        let incomplete = self.open.values().filter(|open| open.member == id && !open.is_complete());
        lost.extend(incomplete.map(|open| open.first));
        self.lose_streams(id, &mut lost);
        if let Some(first) = lost.iter().find(|first| first.is_before(self.ring.first())) {
            return Err(Failure::PartlyAcknowledged(*first));
        }
        for (_, place) in self.ring.iter_mut() {
            match place {
                Place::Held(held) if lost.contains(&held.first) => {
                    *place = Place::Orphan { repr: held.repr, is_safe: held.is_safe, rtx: held.rtx };
                }
                Place::Held(held) if held.member == id => held.acked = Acked::Cumulative,
                _ => {}
            }
        }
        self.open.retain(|_, open| !lost.contains(&open.first));
        self.is_sack_due = true;
        Ok(())
    }

    /// Of a stream, what follows a frame that is lost, or has not come, was not acted on either. What is left goes
    /// elsewhere.
    fn lose_streams(&mut self, id: MemberId, lost: &mut Vec<Csn>) {
        let numbers = self.streams.iter().filter(|(_, stream)| stream.member == Some(id)).map(|(number, _)| *number);
        for number in numbers.collect::<Vec<_>>() {
            let Some(mut stream) = self.streams.remove(&number) else { continue };
            stream.top = stream.retired;
            let firsts = self.held().filter(|held| order_of(&held.repr) == Order::Stream(number) && held.repr.begins());
            for held in firsts {
                if held.repr.mid == stream.top && !lost.contains(&held.first) {
                    stream.top = stream.top.wrapping_add(1);
                } else {
                    lost.push(held.first);
                }
            }
            (stream.member, stream.count, stream.unacked) = (None, stream.top, 0);
            self.streams.insert(number, stream);
        }
    }
}
