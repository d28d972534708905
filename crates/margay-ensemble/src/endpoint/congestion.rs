//! How much may be under way: RFC 9260, 7.2.

/// A congestion window in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Congestion {
    packet_bytes: usize,
    window: usize,
    slow_start_to: usize,
    /// Acknowledged since the window was enlarged.
    acked: usize,
}

impl Congestion {
    /// `packet_bytes` is what a packet takes on the path.
    pub(super) fn new(packet_bytes: usize) -> Self {
        let window = (4 * packet_bytes).min((2 * packet_bytes).max(4380));
        Self { packet_bytes, window, slow_start_to: usize::MAX, acked: 0 }
    }

    /// Bytes that may be under way.
    pub(super) const fn window(&self) -> usize {
        self.window
    }

    /// Bytes were acknowledged while the window was in use.
    pub(super) fn grow(&mut self, acked: usize) {
        if self.window <= self.slow_start_to {
            self.window += acked.min(self.packet_bytes);
            return;
        }
        self.acked += acked;
        if self.acked >= self.window {
            self.acked -= self.window;
            self.window += self.packet_bytes;
        }
    }

    /// Something was lost, for the first time in this window.
    pub(super) fn shrink(&mut self) {
        self.slow_start_to = (self.window / 2).max(4 * self.packet_bytes);
        self.window = self.slow_start_to;
        self.acked = 0;
    }

    /// Nothing came back for so long that all is taken for lost.
    pub(super) fn collapse(&mut self) {
        self.shrink();
        self.window = self.packet_bytes;
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn it_grows_quickly_then_slowly_and_shrinks_by_half() {
        let mut congestion = Congestion::new(1000);
        assert_eq!(congestion.window(), 4000);
        (0..6).for_each(|_| congestion.grow(1000));
        assert_eq!(congestion.window(), 10_000);
        congestion.shrink();
        assert_eq!(congestion.window(), 5000);
        congestion.grow(1);
        let was = congestion.window();
        congestion.grow(was);
        assert_eq!(congestion.window(), was + 1000, "a packet for each window");
        congestion.collapse();
        assert_eq!((congestion.window(), congestion.slow_start_to), (1000, 4000));
    }
}
