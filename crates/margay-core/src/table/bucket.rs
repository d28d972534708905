//! The buckets that sticky numbers fall into, and which of several rules has one: weighted rendezvous hashing.

use core::cmp::Ordering;

/// Buckets that sticky numbers fall into; each is one instance's.
pub const BUCKETS: usize = 1 << BUCKET_BITS;
const BUCKET_BITS: u32 = 12;

/// The bucket of a sticky number: the upper bits of a mix of all of its bits, so that numbers that count up spread.
pub fn bucket(sticky: u64) -> u64 {
    mix(sticky) >> (u64::BITS - BUCKET_BITS)
}

pub(super) fn mix(mut number: u64) -> u64 {
    for multiplier in [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb] {
        number = (number ^ number >> 31).wrapping_mul(multiplier);
    }
    number ^ number >> 29
}

/// What a rule bids for a bucket; the greatest bid has it. A rule without a weight does not bid.
///
/// Weighted rendezvous hashing: the highest of −weight / ln(u) wins, with u uniform in (0, 1) from the pair of bucket
/// and rule, and the highest point among equals. Lists of thousands of buckets are made of bids, and a logarithm costs
/// as much as twenty of all else: so what is compared first is between which two of a table it lies, and that decides
/// nearly always.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bid {
    /// In parts of 2^64; not zero.
    u: u64,
    weight: u32,
    point: u64,
}

impl Bid {
    pub fn new(bucket: u64, point: u64, weight: u32) -> Self {
        Self { u: mix(bucket ^ point) | 1, weight, point }
    }

    /// As −1/ln is increasing, ln is taken in base 2 and fixed point; floats would differ between hosts and are
    /// absent from the core.
    fn score(&self) -> u128 {
        (u128::from(self.weight) << 64) / u128::from(negative_log2(self.u))
    }

    /// What its logarithm is at least, and at most.
    fn logarithm_range(&self) -> (u64, u64) {
        let zeros = self.u.leading_zeros();
        let step = (self.u << zeros << 1 >> (u64::BITS - STEP_BITS)) as usize;
        let whole = u64::from(zeros) << 32;
        (whole + LOGARITHMS[step + 1], whole + LOGARITHMS[step])
    }
}

impl Ord for Bid {
    fn cmp(&self, other: &Self) -> Ordering {
        /// Scores are quotients of 2^64 times a weight by logarithms of up to 2^38, rounded down: so far apart, they
        /// differ.
        const APART: u128 = 1 << 12;
        let weighed = |bid: &Self, logarithm: u64| u128::from(bid.weight) * u128::from(logarithm);
        let (own, others) = (self.logarithm_range(), other.logarithm_range());
        if weighed(self, others.0) >= weighed(other, own.1) + APART {
            return Ordering::Greater;
        }
        if weighed(other, own.0) >= weighed(self, others.1) + APART {
            return Ordering::Less;
        }
        (self.score(), self.point).cmp(&(other.score(), other.point))
    }
}

impl PartialOrd for Bid {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Bid {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Bid {}

const STEP_BITS: u32 = 8;
const STEPS: usize = 1 << STEP_BITS;

/// −log2 of 1/2, and of each 1/512 more; the last one is of the largest number below one. Greater numbers have no
/// greater ones, as they are computed, too.
static LOGARITHMS: [u64; STEPS + 1] = {
    let mut all = [negative_log2(u64::MAX); STEPS + 1];
    let mut step = 0;
    while step < STEPS {
        all[step] = negative_log2(1 << 63 | (step as u64) << (u64::BITS - 1 - STEP_BITS));
        step += 1;
    }
    all
};

/// −log2(u / 2^64) with 32 fractional bits. `u` is not zero; then the result is neither.
const fn negative_log2(u: u64) -> u64 {
    let zeros = u.leading_zeros();
    // The mantissa in [1, 2) with 63 fractional bits; squaring it yields one bit of the logarithm at a time.
    let mut mantissa = (u << zeros) as u128;
    let (mut fraction, mut bits) = (0_u64, 0);
    while bits < 32 {
        let square = mantissa * mantissa;
        // Without a branch: the bits are random, and every guess would be wrong half of the time.
        let bit = (square >> 127) as u64;
        fraction = fraction << 1 | bit;
        mantissa = square >> (63 + bit);
        bits += 1;
    }
    ((zeros as u64 + 1) << 32) - fraction
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::rng::Rng;

    #[test]
    fn numbers_that_count_up_fall_into_all_buckets_alike() {
        let mut counts = [0_u32; BUCKETS];
        (0..64 * BUCKETS as u64).for_each(|sticky| counts[bucket(sticky) as usize] += 1);
        // 64 each, and six times the deviation of chance.
        assert!(counts.iter().all(|count| (16..112).contains(count)), "{:?}", counts.iter().max());
    }

    #[test]
    fn the_logarithm_is_right() {
        assert_eq!(negative_log2(1 << 63), 1 << 32);
        assert_eq!(negative_log2(1), 64 << 32);
        // log2(3/4) = −0.41504
        let got = negative_log2(3 << 62);
        assert!(got.abs_diff(1_782_568_000) < 200_000, "{got}");
        assert_eq!(negative_log2(u64::MAX), 1);
    }

    /// Of all sizes: as many small ones as large ones.
    fn any_size(rng: &mut Rng) -> u64 {
        rng.u64() >> (rng.u64() % 64)
    }

    #[test]
    fn a_logarithm_lies_in_its_range() {
        let mut rng = Rng::new([5; 32]);
        for number in 0..200_000 {
            let u = any_size(&mut rng) | 1;
            let near = [u, u.leading_zeros().into(), 1 << 63 | number << 46, (1 << 63 | number << 46) - 1, u64::MAX];
            for u in near.map(|u| u.max(1)) {
                let (least, most) = Bid { u, weight: 1, point: 0 }.logarithm_range();
                assert!((least..=most).contains(&negative_log2(u)), "{u:x}");
            }
        }
    }

    #[test]
    fn bids_are_in_the_order_of_their_scores() {
        let mut rng = Rng::new([6; 32]);
        let mut undecided = 0;
        for _ in 0..100_000 {
            let (kind, mut u) = (rng.u64() % 6, any_size(&mut rng) | 1);
            let weight = (any_size(&mut rng) >> 32) as u32 | 1;
            if kind == 5 {
                // Where one step of the table ends and the next one begins.
                u = 1 << 63 | rng.u64() >> (u64::BITS - STEP_BITS) << (u64::BITS - 1 - STEP_BITS);
            }
            let one = Bid { u, weight, point: rng.u64() % 3 };
            let another = any_size(&mut rng) | 1;
            let other = match kind {
                0 => Bid { u: another, weight: (rng.u64() as u32 >> (rng.u64() % 32)).max(1), point: 1 },
                1 => Bid { u: u.saturating_add(any_size(&mut rng) >> 20), weight, point: 1 },
                2 => Bid { u, weight, point: 1 },
                3 => Bid { u, weight: weight.saturating_add((any_size(&mut rng) >> 60) as u32), point: 1 },
                4 => {
                    // A weight that makes up for the other number, as nearly as it goes.
                    let as_much =
                        u128::from(weight) * u128::from(negative_log2(another)) / u128::from(negative_log2(u));
                    Bid { u: another, weight: u32::try_from(as_much).unwrap_or(u32::MAX).max(1), point: 1 }
                }
                _ => Bid { u: u - 1, weight, point: 1 },
            };
            let wanted = (one.score(), one.point).cmp(&(other.score(), other.point));
            assert_eq!(one.cmp(&other), wanted, "{one:?} {other:?}");
            assert_eq!(other.cmp(&one), wanted.reverse());
            undecided += u32::from(one.score() == other.score());
        }
        assert!(undecided > 1000, "equal scores were seen {undecided} times only");
    }
}
