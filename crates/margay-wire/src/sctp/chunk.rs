//! A packet's chunks, one after the other.

use super::{CHUNK_HEADER_LEN, IDataRepr, IForwardTsn, Sack, WatermarkRepr, field, half, kind};
use crate::header::Error;

/// One chunk of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk<'a> {
    /// A frame, or a fragment of one.
    IData(IDataRepr, &'a [u8]),
    /// What has come.
    Sack(Sack<'a>),
    /// What will not come any more.
    IForwardTsn(IForwardTsn<'a>),
    /// What of the peer's order is complete.
    Watermark(WatermarkRepr),
    /// Of a type that is not known here, RFC 9260's DATA among them.
    Unknown {
        /// Its type.
        kind: u8,
    },
}

impl<'a> Chunk<'a> {
    fn parse(kind: u8, flags: u8, value: &'a [u8]) -> Result<Self, Error> {
        Ok(match kind {
            kind::I_DATA => {
                let (repr, payload) = IDataRepr::parse(flags, value)?;
                Self::IData(repr, payload)
            }
            kind::SACK => Self::Sack(Sack::parse(value)?),
            kind::I_FORWARD_TSN => Self::IForwardTsn(IForwardTsn::parse(value)?),
            kind::WATERMARK => Self::Watermark(WatermarkRepr::parse(flags, value)?),
            kind => Self::Unknown { kind },
        })
    }

    /// Whether chunks behind this one are to be read (RFC 9260, 3.2: the highest bit of a type says so to whoever does
    /// not know the type).
    pub const fn is_passed_over(&self) -> bool {
        match self {
            Self::Unknown { kind } => *kind & 0x80 != 0,
            _ => true,
        }
    }
}

/// The chunks of a packet. Ends behind one that cannot be read: nobody knows where the next would begin.
#[derive(Clone, Copy, Debug)]
pub struct Chunks<'a> {
    rest: &'a [u8],
}

impl<'a> Chunks<'a> {
    /// Of what a DATA datagram has in it.
    pub const fn new(packet: &'a [u8]) -> Self {
        Self { rest: packet }
    }

    fn split(&mut self) -> Result<Chunk<'a>, Error> {
        let header = self.rest.get(..CHUNK_HEADER_LEN).ok_or(Error)?;
        let len = usize::from(half(&header[field::LENGTH]));
        let value = self.rest.get(CHUNK_HEADER_LEN..len).ok_or(Error)?;
        let chunk = Chunk::parse(header[field::KIND], header[field::FLAGS], value)?;
        // The last one's padding may be missing.
        self.rest = self.rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Ok(chunk)
    }
}

impl<'a> Iterator for Chunks<'a> {
    type Item = Result<Chunk<'a>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let chunk = self.split();
        let goes_on = chunk.as_ref().is_ok_and(Chunk::is_passed_over);
        if !goes_on {
            self.rest = &[];
        }
        Some(chunk)
    }
}
