//! Packets that wait for what they have overtaken, in bounded memory.

use alloc::vec::Vec;

/// What a packet takes beside its own bytes: the vector, and what the allocator adds.
const OVERHEAD_BYTES: usize = 64;

/// Packets in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct WaitingPackets {
    pub packets: Vec<Vec<u8>>,
    bytes: usize,
}

impl WaitingPackets {
    /// Keeps one more, unless all together would take more than so much memory. The first one is always kept.
    pub fn push(&mut self, packet: &[u8], bytes_max: usize) -> bool {
        let bytes = self.bytes.saturating_add(packet.len() + OVERHEAD_BYTES);
        if bytes > bytes_max && !self.packets.is_empty() {
            return false;
        }
        self.packets.push(packet.to_vec());
        self.bytes = bytes;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_whatever_the_size_of_packets() {
        let mut waiting = WaitingPackets::default();
        assert!(waiting.push(&[1; 2000], 1000), "the first one");
        assert!(!waiting.push(&[2; 1], 1000));
        assert_eq!(waiting.packets, [[1; 2000]]);
        let mut waiting = WaitingPackets::default();
        for count in 0..1000 / (OVERHEAD_BYTES + 36) {
            assert!(waiting.push(&[3; 36], 1000), "packet {count}");
        }
        assert!(!waiting.push(&[3; 36], 1000));
        assert_eq!(waiting.packets.len(), 10);
    }
}
