//! One end of a flow by `sctp`: datagrams as frames without order of SCTP's data format, sent again while they are
//! lost, for as long as they live (RFC 3758, RFC 8260).
//!
//! Sender and receiver are those of framed connections (`margay-ensemble`). There is no handshake: the number of the
//! change is known to both ends, and the first TSN follows from it.

use std::time::Duration;

use margay_core::time::Instant;
use margay_ensemble::{Order, Patience, Reading, Receiver, ReceiverConfig, Sender, SenderConfig, Tsn};
use margay_wire::sctp::{Chunk, Chunks, I_DATA_PAYLOAD_MAX, IDataFlags, PacketWriter};

use crate::first_number;

/// A datagram is sent again for so long after the program has sent it. What is interactive (voice, games, requests
/// that are answered) has no use for what is older: ITU-T G.114 has 150 ms as good for speech and 400 ms as the most.
/// Three round trips between continents fit in, a first repetition and two more; and programs that ask again by
/// themselves wait for a second before they do.
pub const LIFETIME: Duration = Duration::from_millis(250);
/// After a change to another stack this end goes on so long to repeat, and to say what has come: the last datagram
/// lives as long, and its last repetition is on its way for as long again at most.
pub const LINGER: Duration = Duration::from_millis(500);
/// Bytes that wait or are under way, at most. More is not taken.
pub const HELD_BYTES_MAX: usize = 1 << 20;
/// Datagrams that wait or are under way, at most.
pub const HELD_MAX: usize = 2048;

/// Datagrams whose numbers the receiver keeps apart.
const WINDOW: u16 = 1024;
/// What is under way begins with some of these, and grows by one in each round trip.
const PACKET_BYTES: usize = 1200;
/// A datagram that comes alone is acknowledged after so long: long before its sender takes it for lost.
const SACK_DELAY: Duration = Duration::from_millis(5);
/// Without an answer everything is sent again after 40 ms, or the round trip and four times what it varies by, and once
/// more after as long. That is far less than RFC 9260 has, since a datagram lives for [`LIFETIME`] only: it is what a
/// time of that length has five of. It does not double: who gets no answer sends one packet each time.
const PATIENCE: Patience = Patience {
    timeout_first: Duration::from_millis(100),
    timeout_min: Duration::from_millis(40),
    doubled_max: Duration::ZERO,
    reordering_max: Duration::from_millis(20),
};
/// Numbers so far from the last are of another time, or forged.
const REACH: u32 = 1 << 16;

/// There is no room: as many datagrams wait as may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What has come is no packet of this stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// A datagram of the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given<'a> {
    /// The number that its sender gave with it, as the frame's PPID.
    pub label: u32,
    /// What the sender was given to send, at most a packet's room less the chunk header.
    pub payload: &'a [u8],
}

/// What has become of datagrams; counts wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Times that one was sent again.
    pub repeated: u32,
    /// Those that had not been acknowledged when their time was over.
    pub given_up: u32,
}

/// What has come of the peer's packets by their numbers; counts wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrivals {
    /// The greatest number that has come.
    last: Option<u32>,
    /// Packets that should have come, from the first one that has.
    pub expected: u32,
    /// Packets that have.
    pub received: u32,
    /// How often one or several in a row have not, or have come late.
    pub gaps: u32,
}

impl Arrivals {
    fn note(&mut self, number: u32) {
        let Some(last) = self.last else {
            *self = Self { last: Some(number), expected: 1, received: 1, gaps: 0 };
            return;
        };
        let ahead = number.wrapping_sub(last);
        if ahead > REACH && ahead.wrapping_neg() > REACH {
            return;
        }
        self.received = self.received.wrapping_add(1);
        if ahead.cast_signed() > 0 {
            self.last = Some(number);
            self.expected = self.expected.wrapping_add(ahead);
            self.gaps = self.gaps.wrapping_add(u32::from(ahead > 1));
        }
    }
}

/// One end of one flow, both directions. It keeps at most [`HELD_MAX`] datagrams and [`HELD_BYTES_MAX`] bytes of what
/// it sends, and nothing of what it is given but numbers.
#[derive(Debug)]
pub struct Endpoint {
    sender: Sender,
    receiver: Receiver,
    sent: Sent,
    arrivals: Arrivals,
}

impl Endpoint {
    /// Of a flow that goes this way from this change on.
    pub fn new(change: u32) -> Self {
        let first = Tsn(first_number(change));
        let sender = Sender::new(SenderConfig {
            first,
            window: WINDOW,
            // Nothing is cut here: what is too long for a packet is cut before.
            chunk_bytes: I_DATA_PAYLOAD_MAX,
            packet_bytes: PACKET_BYTES,
            buffer_bytes: HELD_BYTES_MAX,
            // There is no window to keep to: what comes is given on at once.
            receiver_bytes: u32::MAX,
            patience: PATIENCE,
        });
        let receiver = Receiver::new(ReceiverConfig {
            first,
            reading: Reading::Plain,
            buffer_bytes: HELD_BYTES_MAX,
            sack_delay: SACK_DELAY,
        });
        Self { sender, receiver, sent: Sent::default(), arrivals: Arrivals::default() }
    }

    /// Takes a datagram, which lives until [`LIFETIME`] from now. The peer is given `label` with it.
    ///
    /// # Errors
    ///
    /// It is empty, or there is no room; nothing has changed but that those are gone whose time is over.
    pub fn send(&mut self, now: Instant, label: u32, datagram: &[u8]) -> Result<(), Full> {
        self.give_up(now);
        if self.sender.held() >= HELD_MAX {
            return Err(Full);
        }
        let sent = self.sender.send_until(Some(now + LIFETIME), Order::None, label, datagram);
        sent.map(|_| ()).map_err(|_| Full)
    }

    fn give_up(&mut self, now: Instant) {
        // There are far fewer.
        self.sent.given_up = self.sent.given_up.wrapping_add(self.sender.give_up(now) as u32);
    }

    /// Takes what came in a packet of the peer's with this number. Calls `give` with datagrams that have not been given
    /// before.
    ///
    /// # Errors
    ///
    /// The peer sends no such packet; nothing of it is taken.
    pub fn receive(
        &mut self,
        now: Instant,
        number: u32,
        packet: &[u8],
        mut give: impl FnMut(Given<'_>),
    ) -> Result<(), Malformed> {
        if packet.is_empty() || !Chunks::new(packet).all(|chunk| chunk.is_ok_and(|chunk| is_of_stack(&chunk))) {
            return Err(Malformed);
        }
        self.arrivals.note(number);
        for chunk in Chunks::new(packet) {
            if let Ok(Chunk::Sack(sack)) = chunk {
                self.sender.on_sack(now, &sack);
            }
        }
        self.receiver.on_packet(now, packet);
        while let Some(frame) = self.receiver.poll_frame() {
            give(Given { label: frame.ppid, payload: &frame.bytes });
        }
        Ok(())
    }

    /// What is to be sent now, in packets of at most `room` bytes: acknowledgements, what is lost, and what is new as
    /// far as the network takes it.
    pub fn poll(&mut self, now: Instant, room: usize, mut each: impl FnMut(&[u8])) {
        self.give_up(now);
        if self.sender.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.sender.on_time(now);
        }
        let mut packet = vec![0; room];
        loop {
            let before = self.sender.unsent();
            let mut writer = PacketWriter::new(&mut packet);
            let has_sack = self.receiver.poll_sack(now, &mut writer);
            let has_data = self.sender.poll(now, &mut writer);
            let len = writer.len();
            if !has_sack && !has_data {
                return;
            }
            let is_again = |chunk: &Chunk<'_>| matches!(chunk, Chunk::IData(repr, _) if is_before(repr.tsn, before));
            let repeated = Chunks::new(&packet[..len]).filter_map(Result::ok).filter(is_again).count();
            self.sent.repeated = self.sent.repeated.wrapping_add(repeated as u32);
            each(&packet[..len]);
        }
    }

    /// When [`poll`](Self::poll) is to be called, if ever.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.sender.next_deadline().into_iter().chain(self.receiver.next_deadline()).min()
    }

    /// What has become of what this end sends.
    pub const fn sent(&self) -> Sent {
        self.sent
    }

    /// What has come.
    pub const fn arrivals(&self) -> Arrivals {
        self.arrivals
    }

    /// How many datagrams wait or are under way.
    pub fn held(&self) -> usize {
        self.sender.held()
    }

    /// Whether all that this end has sent is acknowledged or given up.
    pub fn is_idle(&self) -> bool {
        self.sender.is_idle()
    }
}

fn is_before(tsn: u32, other: Tsn) -> bool {
    tsn.wrapping_sub(other.0).cast_signed() < 0
}

/// Whether an end of this stack sends such a chunk: a datagram is whole and has no place in an order.
fn is_of_stack(chunk: &Chunk<'_>) -> bool {
    let whole = IDataFlags::BEGIN | IDataFlags::END | IDataFlags::UNORDERED;
    match chunk {
        Chunk::IData(repr, _) => repr.flags.contains(whole) && repr.stream == 0,
        Chunk::IForwardTsn(_) | Chunk::Sack(_) => true,
        // Chunks that are not known are passed over, as RFC 9260 has it.
        Chunk::Unknown { .. } => true,
        Chunk::Watermark(_) => false,
    }
}

#[cfg(test)]
#[path = "sctp_test.rs"]
mod test;
