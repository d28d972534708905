//! DATA: encapsulated packets. One super-packet is a train of equal chunks, each behind a header of sixteen bytes; the
//! first chunk starts with a train header of eight.

use crate::header::{Error, FlowId, Kind, VERSION};

/// Bytes of the header before each chunk.
pub const DATA_HEADER_LEN: usize = 16;
/// Bytes of the train header at the start of chunk 0.
pub const TRAIN_HEADER_LEN: usize = 8;
/// Bytes of the tag at the end of each sealed chunk.
pub const SEAL_TAG_LEN: usize = 16;
/// Stack: plain encapsulation.
pub const STACK_ENCAP: u8 = 2;
/// Stack: `secure`, sealed with AES-256-GCM.
pub const STACK_SECURE_AES: u8 = 3;
/// Stack: `secure`, sealed with ChaCha20-Poly1305.
pub const STACK_SECURE_CHACHA: u8 = 4;
/// Stack: `fec`, datagrams and what repairs those that are lost ([`RepairRepr`](crate::RepairRepr)).
pub const STACK_FEC: u8 = 5;
/// Stack: `secure-fec`, what goes by `fec` sealed with AES-256-GCM ([`SealedFecRepr`](crate::SealedFecRepr)).
pub const STACK_SECURE_FEC_AES: u8 = 6;
/// Stack: `secure-fec`, what goes by `fec` sealed with ChaCha20-Poly1305.
pub const STACK_SECURE_FEC_CHACHA: u8 = 7;
/// Stack: `sctp`, packets of [SCTP's data format](crate::sctp), by which what is lost is repeated.
pub const STACK_SCTP: u8 = 8;
/// Stack: `secure-sctp`, what goes by `sctp` sealed with AES-256-GCM.
pub const STACK_SECURE_SCTP_AES: u8 = 9;
/// Stack: `secure-sctp`, what goes by `sctp` sealed with ChaCha20-Poly1305.
pub const STACK_SECURE_SCTP_CHACHA: u8 = 10;
/// Flag: the sender's last encapsulated packet before it sends direct (DESIGN §18); or, of any stack, its last packet
/// before it sends by another one: then there is no inner packet, and the train header has the change's number in the
/// place of a length ([`change_of_fence`]).
pub const FENCE: u8 = 1;
/// Flag: the sender sends this flow direct, and only this packet could not go so.
pub const BESIDE: u8 = 2;
/// Flag, of [`STACK_FEC`] and inside a sealed chunk of `fec`: it repairs a block of datagrams.
pub const REPAIR: u8 = 4;
const PARTIAL_CHECKSUM: u8 = 1;

mod field {
    use core::ops::Range;

    pub const VERSION: usize = 0;
    pub const KIND: usize = 1;
    pub const STACK: usize = 2;
    pub const FLAGS: usize = 3;
    pub const DST_FLOW: Range<usize> = 4..8;
    pub const PACKET_NUMBER: Range<usize> = 8..12;
    pub const INDEX: Range<usize> = 12..14;
    pub const COUNT: Range<usize> = 14..16;

    pub const GSO: usize = 0;
    pub const TRAIN_FLAGS: usize = 1;
    pub const SEGMENT_SIZE: Range<usize> = 2..4;
    pub const INNER_LEN: Range<usize> = 4..8;
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

fn half(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u16::from(*byte))
}

/// The flags of a sealed chunk: the low three bits of the sender's epoch, then of the receiver's as the sender knows
/// it.
pub const fn epochs(sender: u32, receiver: u32) -> u8 {
    (sender as u8 & 7) << 5 | (receiver as u8 & 7) << 2
}

/// Whether chunks of this stack are sealed.
pub const fn is_sealed(stack: u8) -> bool {
    matches!(
        stack,
        STACK_SECURE_AES
            | STACK_SECURE_CHACHA
            | STACK_SECURE_FEC_AES
            | STACK_SECURE_FEC_CHACHA
            | STACK_SECURE_SCTP_AES
            | STACK_SECURE_SCTP_CHACHA
    )
}

/// What stands behind the header of a change's FENCE: a train header without a packet. It is sealed where the stack
/// is.
pub fn fence_of_change(number: u32) -> [u8; TRAIN_HEADER_LEN] {
    let mut chunk = [0; TRAIN_HEADER_LEN];
    chunk[field::INNER_LEN].copy_from_slice(&number.to_be_bytes());
    chunk
}

/// The number of the change whose FENCE this chunk, opened, is.
pub fn change_of_fence(chunk: &[u8]) -> Option<u32> {
    let chunk: &[u8; TRAIN_HEADER_LEN] = chunk.try_into().ok()?;
    let rest = &chunk[..field::INNER_LEN.start];
    rest.iter().all(|byte| *byte == 0).then(|| word(&chunk[field::INNER_LEN]))
}

/// The header of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataRepr {
    /// How the flow is carried: [`STACK_ENCAP`], say.
    pub stack: u8,
    /// [`FENCE`] and [`BESIDE`]; of a sealed chunk, whatever is inside, [`FENCE`] and [`epochs`]; of `fec` [`FENCE`]
    /// and [`REPAIR`].
    pub flags: u8,
    /// The receiver's flow.
    pub dst_flow: FlowId,
    /// Low 32 bits of the train's number. The next train's is one more; of sealed trains it is more by this one's
    /// chunks, so that number and place name a chunk for ever. Of `fec` the number of the first datagram of the block.
    /// Of `sctp` number and place together are the datagram's own number, which a repetition does not share.
    pub packet_number: u32,
    /// Place of the chunk in its train; of `fec` that of the datagram in its block, or of the repair among those of the
    /// block.
    pub index: u16,
    /// Chunks of the train; of `fec` [`BLOCK_MAX`](crate::BLOCK_MAX), or the repairs of the block.
    pub count: u16,
}

impl DataRepr {
    /// Reads the header at the start of `datagram`.
    ///
    /// # Errors
    ///
    /// Too short, not DATA of this version, or a place outside the train.
    pub fn parse(datagram: &[u8]) -> Result<Self, Error> {
        let header = datagram.get(..DATA_HEADER_LEN).ok_or(Error)?;
        let repr = Self {
            stack: header[field::STACK],
            flags: header[field::FLAGS],
            dst_flow: FlowId(word(&header[field::DST_FLOW])),
            packet_number: word(&header[field::PACKET_NUMBER]),
            index: half(&header[field::INDEX]),
            count: half(&header[field::COUNT]),
        };
        let is_data = header[field::VERSION] == VERSION && header[field::KIND] == u8::from(Kind::Data);
        if is_data && repr.index < repr.count { Ok(repr) } else { Err(Error) }
    }

    /// Writes the header into the first [`DATA_HEADER_LEN`] bytes of `out`.
    ///
    /// # Panics
    ///
    /// When `out` is shorter.
    pub fn emit(&self, out: &mut [u8]) {
        out[field::VERSION] = VERSION;
        out[field::KIND] = Kind::Data.into();
        out[field::STACK] = self.stack;
        out[field::FLAGS] = self.flags;
        out[field::DST_FLOW].copy_from_slice(&self.dst_flow.0.to_be_bytes());
        out[field::PACKET_NUMBER].copy_from_slice(&self.packet_number.to_be_bytes());
        out[field::INDEX].copy_from_slice(&self.index.to_be_bytes());
        out[field::COUNT].copy_from_slice(&self.count.to_be_bytes());
    }
}

/// How the super-packet is to be segmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GsoKind {
    /// It is one packet.
    None,
    /// TCP segments.
    Tcp,
    /// UDP datagrams.
    Udp,
}

/// What the receiver needs to give the whole packet to its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainRepr {
    /// Segmentation.
    pub gso: GsoKind,
    /// The transport checksum holds the pseudo-header's sum only.
    pub partial_checksum: bool,
    /// Transport payload bytes per segment; zero without segmentation.
    pub segment_size: u16,
    /// Bytes of the whole inner IP packet.
    pub inner_len: u32,
}

impl TrainRepr {
    /// Reads the train header at the start of chunk 0's payload.
    ///
    /// # Errors
    ///
    /// Too short, an unknown segmentation, or segments of no size.
    pub fn parse(chunk: &[u8]) -> Result<Self, Error> {
        let header = chunk.get(..TRAIN_HEADER_LEN).ok_or(Error)?;
        let gso = match header[field::GSO] {
            0 => GsoKind::None,
            1 => GsoKind::Tcp,
            2 => GsoKind::Udp,
            _ => return Err(Error),
        };
        let repr = Self {
            gso,
            partial_checksum: header[field::TRAIN_FLAGS] & PARTIAL_CHECKSUM != 0,
            segment_size: half(&header[field::SEGMENT_SIZE]),
            inner_len: word(&header[field::INNER_LEN]),
        };
        let is_cut_into_nothing = repr.gso != GsoKind::None && repr.segment_size == 0;
        if is_cut_into_nothing { Err(Error) } else { Ok(repr) }
    }

    /// Writes the header into the first [`TRAIN_HEADER_LEN`] bytes of `out`.
    ///
    /// # Panics
    ///
    /// When `out` is shorter.
    pub fn emit(&self, out: &mut [u8]) {
        out[field::GSO] = match self.gso {
            GsoKind::None => 0,
            GsoKind::Tcp => 1,
            GsoKind::Udp => 2,
        };
        out[field::TRAIN_FLAGS] = if self.partial_checksum { PARTIAL_CHECKSUM } else { 0 };
        out[field::SEGMENT_SIZE].copy_from_slice(&self.segment_size.to_be_bytes());
        out[field::INNER_LEN].copy_from_slice(&self.inner_len.to_be_bytes());
    }
}
