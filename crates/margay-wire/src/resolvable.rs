//! The resolvable part: what a service router reads and rewrites, at a fixed offset right after the base header.
//!
//! Fixed, so that an XDP program reads it without a loop; tagged between neighbours with SipHash, so that such a
//! program can.

use core::net::SocketAddr;

use crate::address::{emit_ip, parse_socket};
use crate::header::{Error, HEADER_LEN};

/// Where the resolvable part starts in the datagram.
pub const RESOLVABLE_OFFSET: usize = HEADER_LEN;
/// Its length in bytes.
pub const RESOLVABLE_LEN: usize = 88;
/// The hop tag covers this many bytes from the start of the datagram and follows right after them.
pub const HOP_TAGGED_LEN: usize = HEADER_LEN + 80;

mod field {
    use core::ops::Range;

    pub const HOP_LIMIT: usize = 0;
    pub const PRESENT: usize = 1;
    pub const REPLY_TO_PORT: Range<usize> = 2..4;
    pub const REPLY_TO: Range<usize> = 4..20;
    pub const VIA_PORT: Range<usize> = 20..22;
    pub const RESERVED: Range<usize> = 22..24;
    pub const VIA: Range<usize> = 24..40;
    pub const SERVICE: Range<usize> = 40..72;
    pub const NONCE: Range<usize> = 72..80;
    pub const HOP_TAG: Range<usize> = 80..88;
}

const REPLY_TO_PRESENT: u8 = 1;
const VIA_PRESENT: u8 = 2;

/// The resolvable part as values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolvableRepr {
    /// Hops to go; a router that gets 1 does not forward.
    pub hop_limit: u8,
    /// Where the answer shall go, as the first router saw the sender.
    pub reply_to: Option<SocketAddr>,
    /// The router that relays answers; the unspecified address stands for "whoever sent this".
    pub via: Option<SocketAddr>,
    /// The name asked for.
    pub service: [u8; 32],
    /// With the source flowID, what routers pick an instance by.
    pub nonce: u64,
    /// SipHash-2-4 of the first [`HOP_TAGGED_LEN`] bytes of the datagram; zero without a key.
    pub hop_tag: [u8; 8],
}

impl ResolvableRepr {
    /// Reads the part from its own bytes.
    ///
    /// # Errors
    ///
    /// Shorter than [`RESOLVABLE_LEN`].
    pub fn parse(part: &[u8]) -> Result<Self, Error> {
        let part = part.get(..RESOLVABLE_LEN).ok_or(Error)?;
        let present = part[field::PRESENT];
        let (mut service, mut nonce, mut hop_tag) = ([0; 32], [0; 8], [0; 8]);
        service.copy_from_slice(&part[field::SERVICE]);
        nonce.copy_from_slice(&part[field::NONCE]);
        hop_tag.copy_from_slice(&part[field::HOP_TAG]);
        let address = |bit: u8, ip: &[u8], port: &[u8]| (present & bit != 0).then(|| parse_socket(ip, port));
        Ok(Self {
            hop_limit: part[field::HOP_LIMIT],
            reply_to: address(REPLY_TO_PRESENT, &part[field::REPLY_TO], &part[field::REPLY_TO_PORT]),
            via: address(VIA_PRESENT, &part[field::VIA], &part[field::VIA_PORT]),
            service,
            nonce: u64::from_be_bytes(nonce),
            hop_tag,
        })
    }

    /// Writes the part into the first [`RESOLVABLE_LEN`] bytes of `out`.
    ///
    /// # Panics
    ///
    /// When `out` is shorter.
    pub fn emit(&self, out: &mut [u8]) {
        let out = &mut out[..RESOLVABLE_LEN];
        out.fill(0);
        out[field::HOP_LIMIT] = self.hop_limit;
        let mut address = |bit: u8, address: Option<SocketAddr>, ip, port: core::ops::Range<usize>| {
            if let Some(address) = address {
                out[field::PRESENT] |= bit;
                emit_ip(address.ip(), &mut out[ip]);
                out[port].copy_from_slice(&address.port().to_be_bytes());
            }
        };
        address(REPLY_TO_PRESENT, self.reply_to, field::REPLY_TO, field::REPLY_TO_PORT);
        address(VIA_PRESENT, self.via, field::VIA, field::VIA_PORT);
        out[field::RESERVED].fill(0);
        out[field::SERVICE].copy_from_slice(&self.service);
        out[field::NONCE].copy_from_slice(&self.nonce.to_be_bytes());
        out[field::HOP_TAG].copy_from_slice(&self.hop_tag);
    }
}
