//! Two ways of one TCP connection, parted by sequence number (Dysco §3.4; docs/decisions/0088). Behind the old way is a
//! program that acknowledges: what it has acknowledged goes no other way.
//!
//! Each end has a *cut*: the first number that its program had not sent when it turned. Data below go by the old way,
//! others by the new one, and a FIN is a byte. What the other end acknowledges below this end's cut it says by the old
//! way, the rest by the new one. Pure: packets go in, packets come out. All numbers are those of the local TCP.

pub(super) mod segment;
#[cfg(test)]
mod test;

use alloc::vec::Vec;

use crate::cache::packet::{self, AppPacket, Parsed, tcp_flags};
use crate::cache::waiting_packets::WaitingPackets;

use segment::{Blocks, Segment, after, before, largest};

/// Memory for the packets that wait for a turn of one end or of the other. What finds no room comes again.
const WAITING_BYTES_MAX: usize = 4 << 20;

/// Bytes at most, of one session, that wait for room in the receive window of the program's TCP.
const BEYOND_MAX: usize = 1 << 20;
/// The same where they wait for the last of the old way, too: what is beyond is dropped, and sent again by its TCP.
const BEYOND_ORDERED_MAX: usize = super::HELD_BYTES_MAX;

/// Window scales of the program's TCP (RFC 7323 §2), in bits, at most 14.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Scales {
    /// Of windows that the program's TCP receives.
    pub told: u8,
    /// Of windows that it sends. `None`: an agent that has started again does not know it.
    pub own: Option<u8>,
}

/// One of the two ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Through the program that leaves.
    Old,
    /// Between the two ends, past the program.
    New,
}

/// The cut of the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCut {
    /// From this number on its data come by the new way.
    pub number: u32,
    /// Its FIN is right below.
    pub is_closed: bool,
}

/// What becomes of a packet of the other end's.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The program's TCP is given it.
    Deliver(Vec<u8>),
    /// The same, and the connection ends: it is a RST that counts.
    Ends(Vec<u8>),
    /// It is nothing to the connection, or waits.
    Nothing,
    /// The program that leaves has ended too early: bytes that it has acknowledged do not come any more.
    Lost,
}

/// What one end of a connection knows of its two ways.
#[derive(Debug, Default)]
pub(super) struct Cut {
    /// The number after the last byte that the program has sent, as far as it was seen.
    sent: Option<u32>,
    /// The program's TCP has shown what it sends next: nothing beyond `sent` has gone before anybody looked.
    is_shown: bool,
    /// The last of what it said without data.
    bare: Vec<u8>,
    /// This end's cut, once it is fixed.
    own: Option<u32>,
    /// It holds: data beyond it go by the new way.
    has_turned: bool,
    /// Is to go by the new way, once this end has turned.
    waiting: WaitingPackets,
    peer: Option<PeerCut>,
    /// What the program's TCP has acknowledged last.
    acknowledged: Option<u32>,
    /// The largest acknowledgement that the program's TCP was given, and the largest by the old way.
    given: Option<u32>,
    given_by_old: Option<u32>,
    /// What each way has been told last of what is here.
    old_told: Option<u32>,
    new_told: Option<u32>,
    /// Data have come by the old way since.
    is_old_waiting: bool,
    scales: Scales,
    /// The program is given nothing of the new way's before all of the old one's (Dysco §3.4).
    is_ordered: bool,
    /// The number after the last byte that the program was given without a gap before it, as far as it was seen.
    reached: Option<u32>,
    /// Has come by the new way too early.
    held: WaitingPackets,
    /// Right edge of the receive window that the program's TCP has advertised.
    edge: Option<u32>,
    /// Has come by the new way and lies beyond the edge, or waits for the last of the old way. The other end's TCP goes
    /// by the window of the program that leaves until the new way says how wide this one is, and takes none back (RFC
    /// 9293 §3.8.6): this one would throw away what it has no room for yet, and the other find that out by a time-out.
    beyond: Vec<Beyond>,
    /// Rises with whatever the old way carries that is new.
    progress: u32,
}

/// A packet that waits until the program's TCP has room for it.
#[derive(Debug)]
struct Beyond {
    sequence: u32,
    end: u32,
    packet: Vec<u8>,
}

impl Cut {
    /// Nothing has been seen yet.
    pub fn new(scales: Scales) -> Self {
        Self { scales, ..Self::default() }
    }

    /// The same, and what comes by the new way waits for the last of the old one, if `is_ordered`.
    pub fn in_order(self, is_ordered: bool) -> Self {
        Self { is_ordered, ..self }
    }

    /// What an agent goes on from that has started again: an end that has turned, at a cut that was written down.
    pub fn resumed(own: u32, peer: Option<PeerCut>, scales: Scales) -> Self {
        Self { own: Some(own), has_turned: true, peer, sent: Some(own), ..Self::new(scales) }
    }

    /// Whether this end may turn: what its program has sent is known.
    pub const fn may_turn(&self) -> bool {
        self.is_shown && self.sent.is_some()
    }

    /// This end's cut.
    pub const fn own(&self) -> Option<u32> {
        self.own
    }

    pub const fn has_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// The other end's cut, where it is known.
    pub const fn peer(&self) -> Option<PeerCut> {
        self.peer
    }

    pub const fn scales(&self) -> Scales {
        self.scales
    }

    pub const fn has_turned(&self) -> bool {
        self.has_turned
    }

    /// Fixes this end's cut at what its program has sent. What it sends from here on waits until this end turns.
    pub fn fix(&mut self) {
        if self.own.is_none() && self.is_shown {
            self.own = self.sent;
        }
    }

    /// From here on data beyond what the program has sent go by the new way. Gives what that is told of how far this
    /// end is, the last word of its TCP.
    pub fn turn(&mut self) -> Option<Vec<u8>> {
        let sent = self.sent.filter(|_| self.is_shown)?;
        self.own.get_or_insert(sent);
        self.has_turned = true;
        let Parsed::Transport(packet) = packet::parse(&self.bare).ok()? else { return None };
        let segment = Segment::of(&packet)?;
        self.new_told = largest(self.new_told, segment.acknowledgement);
        let blocks = self.peer.map_or(Blocks::None, |peer| Blocks::From(peer.number));
        segment.write(segment.bare().with(segment.acknowledgement, blocks).bare_at(sent))
    }

    /// Whether the program's FIN is right below this end's cut, if it has sent one at all.
    pub fn closes_own(&self) -> bool {
        self.own.is_some() && self.own == self.sent
    }

    /// What has waited for this end to turn, and goes by the new way.
    pub fn take_waiting(&mut self) -> Vec<Vec<u8>> {
        core::mem::take(&mut self.waiting).packets
    }

    /// What has come by the new way too early, which is to come in again.
    pub fn take_held(&mut self) -> Vec<Vec<u8>> {
        core::mem::take(&mut self.held).packets
    }

    /// What has waited for room in the window of the program's TCP, and finds some now, which is to come in again.
    pub fn take_opened(&mut self) -> Vec<Vec<u8>> {
        if self.waits_for_old() {
            return Vec::new();
        }
        let edge = self.edge;
        let has_room = |beyond: &mut Beyond| edge.is_none_or(|edge| !after(beyond.end, edge));
        self.beyond.extract_if(.., has_room).map(|beyond| beyond.packet).collect()
    }

    /// This end is about to have one way again: all that waits for room, as the program's TCP is given it now.
    pub fn give_up_waiting(&mut self) -> Vec<Vec<u8>> {
        self.edge = None;
        self.is_ordered = false;
        let waiting = self.take_opened();
        let given = waiting.iter().filter_map(|packet| {
            let Ok(Parsed::Transport(parsed)) = packet::parse(packet) else { return None };
            match self.ingress(Way::New, &parsed) {
                Arrival::Deliver(packet) | Arrival::Ends(packet) => Some(packet),
                Arrival::Nothing | Arrival::Lost => None,
            }
        });
        given.collect()
    }

    /// The other end's cut is known. Gives what has waited for that, which is to come in again.
    pub fn hear(&mut self, peer: PeerCut) -> Vec<Vec<u8>> {
        self.peer.get_or_insert(peer);
        core::mem::take(&mut self.held).packets
    }

    /// What the program's TCP has acknowledged last, where it has shown that.
    pub const fn acknowledged(&self) -> Option<u32> {
        self.acknowledged
    }

    /// Whether everything has come that comes by the old way.
    pub fn has_all_of_old(&self) -> bool {
        self.peer.zip(self.acknowledged).is_some_and(|(peer, acknowledged)| !before(acknowledged, peer.number))
    }

    /// Whether what comes by the new way is to wait until the program was given the last of the old way.
    fn waits_for_old(&self) -> bool {
        let reached = self.reached.into_iter().chain(self.acknowledged);
        self.is_ordered && self.peer.is_some_and(|peer| !reached.into_iter().any(|at| !before(at, peer.number)))
    }

    /// A number that changes as long as the old way is of use.
    pub const fn progress(&self) -> u32 {
        self.progress
    }

    /// A packet of the program's: which pieces of it go by which way.
    pub fn egress(&mut self, packet: &AppPacket<'_>) -> Vec<(Way, Vec<u8>)> {
        let whole = |way: Way| (way, packet.whole.to_vec());
        let Some(segment) = Segment::of(packet) else { return Vec::new() };
        if segment.has(tcp_flags::RST) {
            let ways = [Some(Way::Old), self.has_turned.then_some(Way::New)];
            return ways.into_iter().flatten().map(whole).collect();
        }
        if segment.has(tcp_flags::SYN) {
            return alloc::vec![whole(Way::Old)];
        }
        let is_probe = segment.is_bare() && self.sent.is_some_and(|sent| before(segment.sequence, sent));
        self.note_sent(&segment, is_probe, packet.whole);
        match self.own {
            None => alloc::vec![whole(Way::Old)],
            Some(own) => {
                let pieces = self.part(&segment, own, is_probe);
                if self.has_turned { pieces } else { self.wait_to_turn(pieces) }
            }
        }
    }

    /// Gives what goes by the old way. What finds no room among the rest is sent again by the program's TCP.
    fn wait_to_turn(&mut self, pieces: Vec<(Way, Vec<u8>)>) -> Vec<(Way, Vec<u8>)> {
        let (old, new): (Vec<_>, Vec<_>) = pieces.into_iter().partition(|(way, _)| *way == Way::Old);
        for (_, packet) in new {
            self.waiting.push(&packet, WAITING_BYTES_MAX);
        }
        old
    }

    fn note_sent(&mut self, segment: &Segment<'_>, is_probe: bool, whole: &[u8]) {
        self.sent = largest(self.sent, segment.end());
        if segment.is_bare() && !is_probe && self.given.is_none_or(|given| !before(segment.sequence, given)) {
            self.is_shown = true;
        }
        if segment.is_bare() && !is_probe {
            self.bare = whole.to_vec();
        }
        if !segment.has(tcp_flags::ACK) {
            return;
        }
        if let Some(own) = self.scales.own {
            let window = u32::from(segment.window()) << own.min(14);
            self.edge = largest(self.edge, segment.acknowledgement.wrapping_add(window));
        }
        let before_this = self.acknowledged;
        self.acknowledged = largest(before_this, segment.acknowledgement);
        let is_old = self.peer.is_none_or(|peer| !after(segment.acknowledgement, peer.number));
        if is_old && self.acknowledged != before_this {
            self.progress = self.progress.wrapping_add(1);
        }
    }

    /// Parts a packet at this end's cut, and its acknowledgement at the other end's.
    fn part(&mut self, segment: &Segment<'_>, own: u32, is_probe: bool) -> Vec<(Way, Vec<u8>)> {
        let acknowledgement = segment.acknowledgement;
        let peer = self.peer.map(|peer| peer.number);
        let is_beyond = peer.is_some_and(|peer| !before(acknowledgement, peer));
        let old_acknowledgement = peer.filter(|_| is_beyond).unwrap_or(acknowledgement);
        let [old_blocks, new_blocks] = match peer {
            None => [Blocks::All, Blocks::None],
            Some(_) if is_beyond => [Blocks::None, Blocks::All],
            Some(peer) => [Blocks::Below(peer), Blocks::From(peer)],
        };
        let below = segment.len_below(own);
        let old = segment.part(0..below).with(old_acknowledgement, old_blocks);
        let new = segment.part(below..segment.len()).with(acknowledgement, new_blocks);
        let is_all_given = self.given_by_old.is_some_and(|given| !before(given, own));
        let probes_old = is_probe && before(segment.sequence, own) && !is_all_given;
        let has_ack = segment.has(tcp_flags::ACK);
        let is_new_to_new = self.new_told.is_none_or(|told| after(acknowledgement, told));
        let beyond_blocks = peer.is_some_and(|peer| segment.has_block_from(peer));
        let is_new_to_old = self.old_told.is_none_or(|told| after(old_acknowledgement, told));
        let tells_old = is_new_to_old || self.is_old_waiting || segment.is_bare() && !is_beyond;
        let goes_old = below > 0 || probes_old || has_ack && tells_old;
        let goes_new = below < segment.len()
            || is_probe && !probes_old
            || has_ack && (is_beyond || is_new_to_new || beyond_blocks);
        let sent = self.sent.unwrap_or(own);
        let mut pieces = Vec::new();
        if goes_old {
            self.old_told = largest(self.old_told, old_acknowledgement);
            self.is_old_waiting = false;
            let sequence = if before(segment.sequence, own) { segment.sequence } else { own };
            let piece = if below > 0 || probes_old { old } else { old.bare_at(sequence) };
            pieces.extend(segment.write(piece).map(|packet| (Way::Old, packet)));
        }
        if goes_new {
            self.new_told = largest(self.new_told, acknowledgement);
            let has_data = below < segment.len() || is_probe && !probes_old;
            let piece = if has_data { new } else { new.bare_at(sent) };
            pieces.extend(segment.write(piece).map(|packet| (Way::New, packet)));
        }
        pieces
    }

    /// A packet of the other end's.
    pub fn ingress(&mut self, way: Way, packet: &AppPacket<'_>) -> Arrival {
        let Some(segment) = Segment::of(packet) else { return Arrival::Nothing };
        if segment.has(tcp_flags::RST) {
            // Who has left a session does not end it.
            let is_late = way == Way::Old && self.own.is_some() && self.has_all_of_old();
            return if is_late { Arrival::Nothing } else { Arrival::Ends(packet.whole.to_vec()) };
        }
        match (way, self.peer) {
            (Way::Old, _) => self.by_old(&segment),
            (Way::New, Some(_)) if self.has_turned => self.by_new(&segment),
            (Way::New, _) => {
                self.held.push(packet.whole, WAITING_BYTES_MAX);
                Arrival::Nothing
            }
        }
    }

    fn by_old(&mut self, segment: &Segment<'_>) -> Arrival {
        let mut piece = segment.part(0..segment.len());
        if let Some(peer) = self.peer {
            let end = segment.end();
            let is_early_end = segment.has(tcp_flags::FIN)
                && if peer.is_closed { before(end, peer.number) } else { before(end.wrapping_sub(1), peer.number) };
            if is_early_end {
                return Arrival::Lost;
            }
            // A FIN of the program that leaves is at the cut, or beyond, and is nobody's.
            piece = segment.part(0..segment.len_below(peer.number));
        }
        if !piece.is_bare() {
            self.note_given(segment.sequence, piece.end());
            self.is_old_waiting = true;
            if self.acknowledged.is_none_or(|acknowledged| after(segment.end(), acknowledged)) {
                self.progress = self.progress.wrapping_add(1);
            }
        }
        if segment.has(tcp_flags::ACK) {
            let before_this = self.given_by_old;
            self.given_by_old = largest(before_this, segment.acknowledgement);
            if self.given_by_old != before_this {
                self.progress = self.progress.wrapping_add(1);
            }
            if !piece.is_bare() {
                // TCP throws data away whose acknowledgement is too old (RFC 5961 §5).
                piece = self.raised(segment, piece);
            }
            self.given = largest(self.given, piece.acknowledgement);
        }
        segment.write(piece).map_or(Arrival::Nothing, Arrival::Deliver)
    }

    /// The program is given these numbers by the old way.
    fn note_given(&mut self, from: u32, to: u32) {
        let reached = self.acknowledged.map_or(self.reached, |acknowledged| largest(self.reached, acknowledged));
        self.reached =
            if reached.is_some_and(|reached| !after(from, reached)) { largest(reached, to) } else { reached };
    }

    fn by_new(&mut self, segment: &Segment<'_>) -> Arrival {
        let mut piece = segment.part(0..segment.len());
        // The clocks of two programs stand behind the timestamps until the old way is gone, and the later one would
        // have the earlier one's segments thrown away (RFC 7323 §5).
        piece.drops_timestamps = true;
        if segment.has(tcp_flags::ACK) {
            piece = self.raised(segment, piece);
            self.given = largest(self.given, piece.acknowledgement);
        }
        if self.is_kept(segment) {
            // What it acknowledges need not wait.
            piece = piece.bare_at(segment.sequence);
        }
        if let Some(acknowledged) = self.acknowledged.filter(|_| piece.is_bare()) {
            // The window is as wide as what has come leaves it, and what the old way still has is not in it.
            piece.sequence = if after(piece.sequence, acknowledged) { acknowledged } else { piece.sequence };
        }
        segment.write(piece).map_or(Arrival::Nothing, Arrival::Deliver)
    }

    /// Whether the program is not given the data of a segment of the new way now: they wait until its TCP has room for
    /// all of them, and where order is kept until it has the last of the old way. Those that find no room here are
    /// given all the same, or where order is kept dropped: they are sent again.
    fn is_kept(&mut self, segment: &Segment<'_>) -> bool {
        let has_room = self.edge.is_none_or(|edge| !after(segment.end(), edge));
        let is_early = self.waits_for_old();
        if segment.is_bare() || has_room && !is_early {
            return false;
        }
        let has_all = |one: &Beyond| !after(one.sequence, segment.sequence) && !before(one.end, segment.end());
        if self.beyond.iter().any(has_all) {
            return true;
        }
        let waiting: usize = self.beyond.iter().map(|one| one.packet.len()).sum();
        let most = if is_early { BEYOND_ORDERED_MAX } else { BEYOND_MAX };
        if waiting + segment.whole().len() > most {
            return is_early;
        }
        let at = self.beyond.partition_point(|one| before(one.sequence, segment.sequence));
        let packet = segment.whole().to_vec();
        self.beyond.insert(at, Beyond { sequence: segment.sequence, end: segment.end(), packet });
        true
    }

    /// No acknowledgement is below one that was given; the right edge of the window stays where it is.
    fn raised(&self, segment: &Segment<'_>, mut piece: segment::Piece) -> segment::Piece {
        if let Some(given) = self.given.filter(|given| after(*given, piece.acknowledgement)) {
            let by = given.wrapping_sub(piece.acknowledgement).div_ceil(1 << self.scales.told.min(14));
            piece.window = segment.window().saturating_sub(u16::try_from(by).unwrap_or(u16::MAX));
            piece.acknowledgement = given;
        }
        piece
    }
}
