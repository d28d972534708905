//! Packets that wait for what they have overtaken, in bounded memory.

use alloc::vec::Vec;

/// What a packet takes beside its own bytes: the vector, and what the allocator adds.
const OVERHEAD_BYTES: usize = 64;

/// Packets in the order in which they came.
#[derive(Debug)]
pub(crate) struct WaitingPackets {
    packets: Vec<Vec<u8>>,
    bytes: usize,
}

impl WaitingPackets {
    /// Nothing waits.
    pub const fn new() -> Self {
        Self { packets: Vec::new(), bytes: 0 }
    }

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

    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// All of them; nothing waits any more.
    pub fn take(&mut self) -> Vec<Vec<u8>> {
        self.bytes = 0;
        core::mem::take(&mut self.packets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_whatever_the_size_of_packets() {
        let mut waiting = WaitingPackets::new();
        assert!(waiting.push(&[1; 2000], 1000), "the first one");
        assert!(!waiting.push(&[2; 1], 1000));
        assert_eq!(waiting.take(), [[1; 2000]]);
        for count in 0..1000 / (OVERHEAD_BYTES + 36) {
            assert!(waiting.push(&[3; 36], 1000), "packet {count}");
        }
        assert!(!waiting.push(&[3; 36], 1000));
        assert_eq!((waiting.take().len(), waiting.is_empty()), (10, true));
    }
}
