//! How many repairs a block needs, by what the network loses.

pub use margay_core::loss::Loss;

/// At most so many of blocks shall be incomplete.
const INCOMPLETE_AIM: f64 = 1e-3;
/// At most so many repairs for each datagram, over some blocks.
const SHARE_MAX: f64 = 0.5;
/// Repairs that may be saved up for a block which needs more than its share.
const CREDIT_MAX: f64 = 16.0;
/// Longest row of losses that is reckoned with, in datagrams.
const BURST_MAX: u32 = 16;

/// What is supposed until something is measured: a flow is not carried by `fec` where nothing is lost.
pub const SUPPOSED: Loss = Loss { ppm: 10_000, row_thousandths: 1000 };

/// Plans the repairs of one flow.
#[derive(Debug)]
pub struct Plan {
    /// Share of datagrams.
    loss: f64,
    /// Datagrams that are lost in a row.
    row: u16,
    credit: f64,
}

impl Default for Plan {
    fn default() -> Self {
        let mut plan = Self { loss: 0.0, row: 1, credit: CREDIT_MAX / 2.0 };
        plan.note(SUPPOSED);
        plan
    }
}

impl Plan {
    /// Takes note of what is lost.
    pub fn note(&mut self, loss: Loss) {
        self.loss = f64::from(loss.ppm.min(1_000_000)) / 1e6;
        let row = loss.row_thousandths.saturating_add(500) / 1000;
        // It is at most 16.
        self.row = row.clamp(1, BURST_MAX) as u16;
    }

    /// Whether a block of any length would get repairs.
    pub fn is_active(&self) -> bool {
        self.wanted(margay_wire::BLOCK_MAX) > 0
    }

    /// How many repairs a block of so many datagrams gets; they are taken from what may be sent.
    pub fn take(&mut self, datagrams: u16) -> u16 {
        self.credit = (self.credit + SHARE_MAX * f64::from(datagrams)).min(CREDIT_MAX);
        // It is at most 16, and whole numbers of repairs are sent.
        let allowed = self.credit as u16;
        let repairs = self.wanted(datagrams).min(allowed);
        self.credit -= f64::from(repairs);
        repairs
    }

    /// As few as keep the share of incomplete blocks at what is aimed at.
    fn wanted(&self, datagrams: u16) -> u16 {
        let is_enough = |repairs: &u16| {
            let events = repairs / self.row;
            self.more_than(events, datagrams + repairs) <= INCOMPLETE_AIM
        };
        (0..crate::REPAIRS_MAX).find(is_enough).unwrap_or(crate::REPAIRS_MAX)
    }

    /// How likely it is that of so many datagrams more than `events` rows are lost: of the binomial distribution.
    fn more_than(&self, events: u16, datagrams: u16) -> f64 {
        let share = self.loss / f64::from(self.row);
        if share >= 1.0 {
            return 1.0;
        }
        let mut term = (1.0 - share).powi(i32::from(datagrams));
        let mut sum = term;
        for event in 0..events.min(datagrams) {
            term *= f64::from(datagrams - event) / f64::from(event + 1) * share / (1.0 - share);
            sum += term;
        }
        1.0 - sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repairs(ppm: u32, row_thousandths: u32, datagrams: u16) -> u16 {
        let mut plan = Plan::default();
        plan.note(Loss { ppm, row_thousandths });
        plan.take(datagrams)
    }

    #[test]
    fn repairs_follow_loss() {
        let of_15 = [0, 60, 1000, 10_000, 20_000, 50_000].map(|ppm| repairs(ppm, 1000, 15));
        assert_eq!(of_15, [0, 0, 1, 2, 3, 5]);
        let of_1 = [0, 900, 20_000, 50_000].map(|ppm| repairs(ppm, 1000, 1));
        assert_eq!(of_1, [0, 0, 1, 2]);
        assert_eq!([1000, 1400, 1600, 3000].map(|row| repairs(20_000, row, 15)), [3, 3, 4, 6], "in rows");
        assert!(!Plan { loss: 0.0, row: 1, credit: 0.0 }.is_active());
        assert!(Plan::default().is_active());
    }

    #[test]
    fn no_more_than_half_is_added_whatever_is_lost() {
        for (ppm, row) in [(1_000_000, 1000), (u32::MAX, u32::MAX), (500_000, 3000), (50_000, 16_000)] {
            for datagrams in [1, 2, 7, 32] {
                let mut plan = Plan::default();
                plan.note(Loss { ppm, row_thousandths: row });
                let sent: u32 = (0..1000).map(|_| u32::from(plan.take(datagrams))).sum();
                assert!(sent <= 500 * u32::from(datagrams) + 16, "{ppm} {row} {datagrams}: {sent}");
            }
        }
    }
}
