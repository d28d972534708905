//! Packets on their way out.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use margay_wire::sctp::{
    GapBlock, I_DATA_HEADER_LEN, I_FORWARD_TSN_LEN, IDataRepr, NoRoom, PacketWriter, SKIPPED_LEN, SkippedRepr,
    WATERMARK_LEN, WatermarkRepr,
};

use crate::member::MemberId;

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum To {
    /// To the peer.
    Peer,
    /// To a member.
    Member(MemberId),
}

/// A packet: a row of chunks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Packet {
    /// Where it goes.
    pub to: To,
    /// What goes into a DATA datagram.
    pub bytes: Vec<u8>,
}

/// Packets that nobody has fetched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Outbox {
    packets: VecDeque<Packet>,
}

impl Outbox {
    pub(crate) fn pop(&mut self) -> Option<Packet> {
        self.packets.pop_front()
    }

    /// A packet of at most `len` bytes. One that does not fit its own length is not sent: callers give the length of
    /// what they write, and payloads that plug-ins made too long are caught before.
    fn write(&mut self, to: To, len: usize, write: impl FnOnce(&mut PacketWriter<'_>) -> Result<(), NoRoom>) {
        let mut bytes = vec![0; len];
        let mut writer = PacketWriter::new(&mut bytes);
        if write(&mut writer).is_ok() {
            let len = writer.len();
            bytes.truncate(len);
            self.packets.push_back(Packet { to, bytes });
        }
    }

    pub(crate) fn frame(&mut self, to: To, mark: Option<WatermarkRepr>, repr: &IDataRepr, payload: &[u8]) {
        let len = WATERMARK_LEN + I_DATA_HEADER_LEN + payload.len().next_multiple_of(4);
        self.write(to, len, |packet| {
            mark.iter().try_for_each(|mark| packet.watermark(mark))?;
            packet.i_data(repr, payload)
        });
    }

    pub(crate) fn watermark(&mut self, to: MemberId, mark: &WatermarkRepr) {
        self.write(To::Member(to), WATERMARK_LEN, |packet| packet.watermark(mark));
    }

    pub(crate) fn forward(&mut self, to: To, cumulative: u32, skipped: &[SkippedRepr]) {
        let len = I_FORWARD_TSN_LEN + skipped.len() * SKIPPED_LEN;
        self.write(to, len, |packet| packet.i_forward_tsn(cumulative, skipped));
    }

    pub(crate) fn sack(
        &mut self,
        to: To,
        len: usize,
        cumulative: u32,
        window_bytes: u32,
        blocks: impl Iterator<Item = GapBlock>,
    ) {
        self.write(to, len, |packet| packet.sack(cumulative, window_bytes, blocks));
    }
}
