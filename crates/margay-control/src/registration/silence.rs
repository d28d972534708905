//! When the other end of a stream counts as silent.

use tokio::time::{Duration, Instant, sleep_until};

/// On a busy machine this end, too, is late: its clock says that the lease is over while messages of the other end lie
/// unread. So this end looks once more after this time, or, if longer, after as long as it was late, a lease at most: a
/// machine without a free processor, or one that was paused, may have stopped both ends.
const SECOND_LOOK: Duration = Duration::from_millis(30);

/// The silence of the other end.
pub struct Silence {
    lease: Duration,
    ends_at: Instant,
    looked: bool,
}

impl Silence {
    /// The other end was heard just now.
    pub fn new(lease: Duration) -> Self {
        Self { lease, ends_at: Instant::now() + lease, looked: false }
    }

    /// The other end was heard again.
    pub fn broken(&mut self) {
        *self = Self::new(self.lease);
    }

    /// Waits until it has lasted for the lease, and a second look has found nothing. May be dropped and called again.
    pub async fn lasted(&mut self) {
        sleep_until(self.ends_at).await;
        if !self.looked {
            self.looked = true;
            let now = Instant::now();
            let late = now.saturating_duration_since(self.ends_at).min(self.lease);
            self.ends_at = now + SECOND_LOOK.max(late);
            sleep_until(self.ends_at).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::{Duration, Instant, SECOND_LOOK, Silence};

    const LEASE: Duration = Duration::from_millis(900);

    #[tokio::test(start_paused = true)]
    async fn who_looks_late_waits_as_long_again_and_a_lease_at_most() {
        for (late_ms, more_ms) in [(10, 30), (500, 500), (5000, 900)] {
            let (late, more) = (Duration::from_millis(late_ms), Duration::from_millis(more_ms));
            let (start, mut silence) = (Instant::now(), Silence::new(LEASE));
            tokio::time::advance(LEASE + late).await;
            silence.lasted().await;
            assert_eq!(start.elapsed(), LEASE + late + more, "{late_ms} ms late");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_lasts_a_lease_and_a_second_look() {
        let (start, mut silence) = (Instant::now(), Silence::new(LEASE));
        silence.lasted().await;
        assert_eq!(start.elapsed(), LEASE + SECOND_LOOK);
    }

    #[tokio::test(start_paused = true)]
    async fn what_lay_unread_when_this_end_was_late_breaks_it() {
        let mut silence = Silence::new(LEASE);
        let (said, mut heard) = mpsc::channel(1);
        // This end is stopped for longer than the lease. What was said meanwhile is handed on only after its clock.
        tokio::time::advance(3 * LEASE).await;
        tokio::spawn(async move {
            tokio::time::sleep(SECOND_LOOK / 2).await;
            said.send(()).await
        });
        let is_silent = tokio::select! {
            biased;
            _ = heard.recv() => false,
            () = silence.lasted() => true,
        };
        assert!(!is_silent);
        let again = Instant::now();
        silence.broken();
        silence.lasted().await;
        assert_eq!(again.elapsed(), LEASE + SECOND_LOOK);
    }
}
