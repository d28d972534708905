//! Writes the chunks of a packet.

use core::fmt;

use super::{
    GAP_BLOCK_LEN, GapBlock, I_DATA_HEADER_LEN, I_DATA_PAYLOAD_MAX, I_FORWARD_TSN_LEN, IDataRepr, SACK_LEN,
    SKIPPED_LEN, SkippedRepr, WATERMARK_LEN, WatermarkRepr, i_forward_tsn, sack,
};

/// The chunk is longer than what is left of the packet, or than a chunk may be; nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the packet has no room for the chunk")
    }
}

impl core::error::Error for NoRoom {}

/// Writes chunks into a packet, one after the other, each with its padding.
#[derive(Debug)]
pub struct PacketWriter<'a> {
    packet: &'a mut [u8],
    len: usize,
}

impl<'a> PacketWriter<'a> {
    /// Starts with no chunk; `packet` is as long as the packet may become.
    pub const fn new(packet: &'a mut [u8]) -> Self {
        Self { packet, len: 0 }
    }

    /// Bytes that have been written.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing has been written.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that are left.
    pub const fn room(&self) -> usize {
        self.packet.len() - self.len
    }

    /// Takes the place of a chunk with `len` bytes, with its padding as zeros.
    fn take(&mut self, len: usize) -> Result<&mut [u8], NoRoom> {
        let padded = len.next_multiple_of(4);
        let place = self.packet[self.len..].get_mut(..padded).ok_or(NoRoom)?;
        place[len..].fill(0);
        self.len += padded;
        Ok(&mut place[..len])
    }

    /// Adds a frame, or a fragment of one.
    ///
    /// # Errors
    ///
    /// [`NoRoom`]; the payload is longer than [`I_DATA_PAYLOAD_MAX`], or empty.
    pub fn i_data(&mut self, repr: &IDataRepr, payload: &[u8]) -> Result<(), NoRoom> {
        if payload.is_empty() || payload.len() > I_DATA_PAYLOAD_MAX {
            return Err(NoRoom);
        }
        let chunk = self.take(I_DATA_HEADER_LEN + payload.len())?;
        repr.emit(payload.len(), chunk);
        chunk[I_DATA_HEADER_LEN..].copy_from_slice(payload);
        Ok(())
    }

    /// Adds a SACK, with as many of the blocks as there is room for: the first ones.
    ///
    /// # Errors
    ///
    /// [`NoRoom`], for one without any block.
    pub fn sack(
        &mut self,
        cumulative: u32,
        window_bytes: u32,
        blocks: impl Iterator<Item = GapBlock>,
    ) -> Result<(), NoRoom> {
        let room = self.packet.get_mut(self.len + SACK_LEN..).ok_or(NoRoom)?;
        let mut count = 0_u16;
        // So that the chunk's length fits its field, too.
        let places = room.chunks_exact_mut(GAP_BLOCK_LEN).take((usize::from(u16::MAX) - SACK_LEN) / GAP_BLOCK_LEN);
        for (place, block) in places.zip(blocks) {
            block.emit(place);
            count += 1;
        }
        let chunk = self.take(SACK_LEN + usize::from(count) * GAP_BLOCK_LEN)?;
        sack::emit_head(cumulative, window_bytes, count, chunk);
        Ok(())
    }

    /// Adds an I-FORWARD-TSN.
    ///
    /// # Errors
    ///
    /// [`NoRoom`] for all of `skipped`.
    pub fn i_forward_tsn(&mut self, cumulative: u32, skipped: &[SkippedRepr]) -> Result<(), NoRoom> {
        let len = I_FORWARD_TSN_LEN + skipped.len() * SKIPPED_LEN;
        if len > usize::from(u16::MAX) {
            return Err(NoRoom);
        }
        let chunk = self.take(len)?;
        i_forward_tsn::emit_head(cumulative, skipped.len(), chunk);
        for (skipped, place) in skipped.iter().zip(chunk[I_FORWARD_TSN_LEN..].chunks_exact_mut(SKIPPED_LEN)) {
            skipped.emit(place);
        }
        Ok(())
    }

    /// Adds a WATERMARK.
    ///
    /// # Errors
    ///
    /// [`NoRoom`].
    pub fn watermark(&mut self, repr: &WatermarkRepr) -> Result<(), NoRoom> {
        repr.emit(self.take(WATERMARK_LEN)?);
        Ok(())
    }
}
