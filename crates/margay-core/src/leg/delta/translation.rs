//! What a delta does to the packets of one direction.

/// How the transport checksum of a packet stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// It is complete, and stays right.
    Full,
    /// It is of the pseudo-header alone, which does not change: the card, or whoever cuts up a super-packet, adds the
    /// rest.
    Partial,
}

/// What is added to the numbers of packets of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// To the sequence number.
    pub sequence: u32,
    /// To the acknowledgement, and to both edges of each block of a selective one.
    pub acknowledgement: u32,
    /// To the sender's timestamp; `None`: it becomes zero.
    pub timestamp: Option<u32>,
    /// To the echo of the receiver's; `None`: it becomes zero.
    pub echo: Option<u32>,
    /// By how many bits the window is shifted: left, or right where it is negative. It is held to 65535.
    pub window_shift: i8,
    /// Timestamps are overwritten by NOPs.
    pub drops_timestamps: bool,
    /// Selective acknowledgements are overwritten by NOPs.
    pub drops_sack: bool,
}

const TCP: u8 = 6;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
const HEADER_LEN: usize = 20;
const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_SACK: u8 = 5;
const OPTION_TIMESTAMPS: u8 = 8;
const TIMESTAMPS_LEN: usize = 10;

impl Translation {
    /// Translates an IPv4 or IPv6 packet with TCP right behind the IP header; others stay as they are. The numbers of a
    /// super-packet are those of its first segment: who cuts it up adds to them. The window of a SYN is not scaled.
    pub fn apply(&self, packet: &mut [u8], checksum: Checksum) {
        let Some(tcp) = tcp_header(packet) else { return };
        let before = sum(tcp);
        let flags = tcp[13];
        add(tcp, 4, self.sequence);
        if flags & ACK != 0 {
            add(tcp, 8, self.acknowledgement);
        }
        if flags & SYN == 0 {
            let window = self.window(u16::from_be_bytes([tcp[14], tcp[15]]));
            tcp[14..16].copy_from_slice(&window.to_be_bytes());
        }
        let mut at = HEADER_LEN;
        while let Some((kind, start, len)) = option(tcp, at) {
            self.translate_option(kind, &mut tcp[start..start + len]);
            at = start + len;
        }
        if checksum == Checksum::Full {
            let after = sum(tcp);
            let check = u16::from_be_bytes([tcp[16], tcp[17]]);
            // RFC 1624 §3; the field itself is in both sums, and cancels.
            let check = !fold(u64::from(!check) + u64::from(!fold(before)) + after);
            tcp[16..18].copy_from_slice(&check.to_be_bytes());
        }
    }

    fn translate_option(&self, kind: u8, option: &mut [u8]) {
        match kind {
            OPTION_TIMESTAMPS if self.drops_timestamps => option.fill(OPTION_NOP),
            OPTION_SACK if self.drops_sack => option.fill(OPTION_NOP),
            OPTION_TIMESTAMPS if option.len() == TIMESTAMPS_LEN => {
                shift_timestamp(option, 2, self.timestamp);
                shift_timestamp(option, 6, self.echo);
            }
            OPTION_SACK => (2..option.len().saturating_sub(3)).step_by(4).for_each(|at| {
                add(option, at, self.acknowledgement);
            }),
            _ => {}
        }
    }

    /// A window as the other side counts it.
    pub fn window(&self, window: u16) -> u16 {
        // As much as 32 bits leave nothing of it, or more than the largest.
        let bits = self.window_shift.unsigned_abs().min(32);
        let wide = if self.window_shift < 0 { u64::from(window) >> bits } else { u64::from(window) << bits };
        u16::try_from(wide).unwrap_or(u16::MAX)
    }
}

/// The sender's timestamp of a packet.
pub(super) fn timestamp(packet: &mut [u8]) -> Option<u32> {
    let tcp = tcp_header(packet)?;
    let mut at = HEADER_LEN;
    while let Some((kind, start, len)) = option(tcp, at) {
        if kind == OPTION_TIMESTAMPS && len == TIMESTAMPS_LEN {
            return number(tcp, start + 2);
        }
        at = start + len;
    }
    None
}

/// The TCP header with its options, where it is whole.
fn tcp_header(packet: &mut [u8]) -> Option<&mut [u8]> {
    let start = match packet.first()? >> 4 {
        4 if *packet.get(9)? == TCP && u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]) & 0x3fff == 0 => {
            usize::from(packet[0] & 15) * 4
        }
        6 if *packet.get(6)? == TCP => 40,
        _ => return None,
    };
    let len = usize::from(packet.get(start + 12)? >> 4) * 4;
    packet.get_mut(start..start + len).filter(|tcp| tcp.len() >= HEADER_LEN)
}

/// The next option from `at` on: kind, where it starts, length. Ends at the first malformed one.
fn option(tcp: &[u8], mut at: usize) -> Option<(u8, usize, usize)> {
    while *tcp.get(at)? == OPTION_NOP {
        at += 1;
    }
    let kind = tcp[at];
    let len = usize::from(*tcp.get(at + 1)?);
    (kind != OPTION_END && len >= 2 && at + len <= tcp.len()).then_some((kind, at, len))
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn add(bytes: &mut [u8], at: usize, shift: u32) {
    if let Some(found) = number(bytes, at) {
        bytes[at..at + 4].copy_from_slice(&found.wrapping_add(shift).to_be_bytes());
    }
}

fn shift_timestamp(option: &mut [u8], at: usize, shift: Option<u32>) {
    match shift {
        Some(shift) => add(option, at, shift),
        None => option[at..at + 4].fill(0),
    }
}

/// Ones' complement sum of a header, of which the length is a multiple of four.
fn sum(tcp: &[u8]) -> u64 {
    tcp.chunks_exact(2).map(|word| u64::from(u16::from_be_bytes([word[0], word[1]]))).sum()
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
