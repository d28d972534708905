//! Who gives how many connections to whom. Pure: each host makes the same plan from the same counts, and carries out
//! its own part of it.

use std::cmp::Reverse;

use margay_core::key::HostId;

/// A host that takes part, and what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The host.
    pub host: HostId,
    /// Its share of new flows among these hosts.
    pub weight: u32,
    /// Connections that it has.
    pub flows: u64,
}

/// Connections that go from one host to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gift {
    /// Who gives.
    pub from: HostId,
    /// Who gets.
    pub to: HostId,
    /// How many.
    pub flows: u64,
}

/// How many connections each host would have if all went by weight: their sum is that of `flows`. What is left over by
/// whole numbers goes to the largest fractions, and among equals to those that have more already: so that targets stay
/// as they are while connections move. None has any where all weights are zero.
pub fn targets(hosts: &[Share]) -> Vec<u64> {
    let total: u64 = hosts.iter().map(|host| host.flows).sum();
    let weights: u128 = hosts.iter().map(|host| u128::from(host.weight)).sum();
    if weights == 0 {
        return vec![0; hosts.len()];
    }
    let exact = |host: &Share| u128::from(total) * u128::from(host.weight);
    // At most the total.
    let whole = |host: &Share| u64::try_from(exact(host) / weights).unwrap_or(total);
    let mut targets: Vec<u64> = hosts.iter().map(whole).collect();
    let left = total - targets.iter().sum::<u64>();
    let mut order: Vec<usize> = (0..hosts.len()).collect();
    order.sort_by_key(|&at| {
        let host = &hosts[at];
        let has_more = host.flows > targets[at];
        (Reverse(exact(host) % weights), Reverse(has_more), host.host)
    });
    // Fewer are left over than there are hosts.
    for at in order.into_iter().take(usize::try_from(left).unwrap_or(usize::MAX)) {
        targets[at] += 1;
    }
    targets
}

/// Who gives how many to whom, so that each has its target. A host gives or gets, and gives no more than what it has
/// beyond its target.
///
/// All that is given is laid side by side in the order of the givers, all that is missing in the order of the takers,
/// and each giver gives to those that lie beside it. Who has given a part of its gifts in their order gets the rest of
/// the same gifts from later counts, whether or not others have given theirs: so that hosts that look at different
/// moments do not all give to the same taker.
pub fn gifts(hosts: &[Share]) -> Vec<Gift> {
    let targets = targets(hosts);
    let mut placed: Vec<(&Share, u64)> = hosts.iter().zip(targets).collect();
    placed.sort_by_key(|(host, _)| host.host);
    let mut givers = placed.iter().filter(|(host, target)| host.flows > *target);
    let mut missing: Vec<(HostId, u64)> = placed
        .iter()
        .filter(|(host, target)| host.flows < *target)
        .map(|(host, target)| (host.host, target - host.flows))
        .collect();
    missing.reverse();
    let mut gifts = Vec::new();
    let mut giver = givers.next().map(|(host, target)| (host.host, host.flows - target));
    while let (Some((from, beyond)), Some((to, lack))) = (giver, missing.last().copied()) {
        let flows = beyond.min(lack);
        gifts.push(Gift { from, to, flows });
        missing.pop();
        if lack > flows {
            missing.push((to, lack - flows));
        }
        let rest = beyond - flows;
        giver = if rest > 0 {
            Some((from, rest))
        } else {
            givers.next().map(|(host, target)| (host.host, host.flows - target))
        };
    }
    gifts
}

/// Whether a host differs from its target by more than a tenth of that, and by more than one connection: from then on
/// connections move by themselves.
pub fn is_uneven(hosts: &[Share]) -> bool {
    let differs = |(host, target): (&Share, u64)| {
        let difference = host.flows.abs_diff(target);
        difference > 1 && difference.saturating_mul(10) > target
    };
    hosts.iter().zip(targets(hosts)).any(differs)
}

/// Whether each host has its target within half of a tenth: then nothing more moves.
pub fn is_even(hosts: &[Share]) -> bool {
    let is_near = |(host, target): (&Share, u64)| host.flows.abs_diff(target).saturating_mul(20) <= target;
    hosts.iter().zip(targets(hosts)).all(is_near)
}

#[cfg(test)]
mod test {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn share(n: u8, weight: u32, flows: u64) -> Share {
        Share { host: HostId([n; 16]), weight, flows }
    }

    fn shares(of: &[(u32, u64)]) -> Vec<Share> {
        (1..).zip(of).map(|(n, (weight, flows))| share(n, *weight, *flows)).collect()
    }

    /// The gifts, by the first byte of each host-ID.
    fn given(of: &[(u32, u64)]) -> Vec<(u8, u8, u64)> {
        gifts(&shares(of)).into_iter().map(|gift| (gift.from.0[0], gift.to.0[0], gift.flows)).collect()
    }

    #[test]
    fn targets_are_by_weight_and_leave_what_is_over_where_it_is() {
        let targets = |of: &[(u32, u64)]| targets(&shares(of));
        assert_eq!(targets(&[(100, 150), (100, 150), (100, 0)]), [100, 100, 100]);
        assert_eq!(targets(&[(100, 300), (50, 0)]), [200, 100]);
        assert_eq!(targets(&[(1, 1), (1, 2), (1, 1)]), [1, 2, 1], "nothing needs to move");
        assert_eq!(targets(&[(1, 0), (1, 2), (1, 2)]), [1, 2, 1], "one has to");
        assert_eq!(targets(&[(3, 0), (1, 1)]), [1, 0], "the larger fraction");
        assert_eq!(targets(&[(0, 7), (0, 1)]), [0, 0], "nobody takes any");
        assert_eq!(targets(&[]), [0_u64; 0]);
        assert_eq!(targets(&[(u32::MAX, u64::MAX / 2), (u32::MAX, 0)]).iter().sum::<u64>(), u64::MAX / 2);
    }

    #[test]
    fn givers_and_takers_lie_side_by_side() {
        assert_eq!(given(&[(1, 150), (1, 150), (1, 0)]), [(1, 3, 50), (2, 3, 50)]);
        assert_eq!(given(&[(1, 90), (1, 0), (1, 0)]), [(1, 2, 30), (1, 3, 30)]);
        assert_eq!(given(&[(1, 0), (1, 100), (1, 0), (1, 100)]), [(2, 1, 50), (4, 3, 50)]);
        assert_eq!(given(&[(1, 10), (1, 10)]), []);
        assert_eq!(given(&[(0, 10), (0, 0)]), [], "without any weight nothing moves");
    }

    #[test]
    fn a_giver_that_is_ahead_leaves_the_others_their_part() {
        let all = [(1, 200), (1, 0), (1, 200), (1, 0)];
        assert_eq!(given(&all), [(1, 2, 100), (3, 4, 100)]);
        assert_eq!(given(&[(1, 130), (1, 70), (1, 200), (1, 0)]), [(1, 2, 30), (3, 4, 100)]);
        assert_eq!(given(&[(1, 200), (1, 0), (1, 130), (1, 70)]), [(1, 2, 100), (3, 4, 30)]);
    }

    #[test]
    fn moves_begin_beyond_a_tenth_and_end_within_half_of_that() {
        let at = |flows: &[u64]| {
            let hosts = shares(&flows.iter().map(|flows| (1, *flows)).collect::<Vec<_>>());
            (is_uneven(&hosts), is_even(&hosts))
        };
        assert_eq!(at(&[111, 89]), (true, false));
        assert_eq!(at(&[110, 90]), (false, false), "neither: what runs goes on, and nothing begins");
        assert_eq!(at(&[106, 94]), (false, false));
        assert_eq!(at(&[105, 95]), (false, true));
        assert_eq!(at(&[2, 0]), (false, false), "for one connection nothing begins by itself");
        assert_eq!(at(&[4, 0]), (true, false));
        assert_eq!(at(&[1, 0]), (false, true), "it has to be somewhere");
        assert_eq!(at(&[100, 100, 100, 100, 100, 100, 100, 100, 100, 0]), (true, false), "one alone is short of all");
    }

    /// Carries out one round: each host in `acting` makes the plan of what it sees, and gives at most `at_once`.
    fn round(hosts: &mut [Share], seen: &[Share], acting: &[bool], at_once: u64) {
        let moves: Vec<Gift> = gifts(seen);
        for (at, _) in acting.iter().enumerate().filter(|(_, is_acting)| **is_acting) {
            let mut room = at_once;
            for gift in moves.iter().filter(|gift| gift.from == seen[at].host) {
                let flows = gift.flows.min(room);
                room -= flows;
                let taker = hosts.iter().position(|host| host.host == gift.to).expect("a host");
                hosts[at].flows -= flows;
                hosts[taker].flows += flows;
            }
        }
    }

    fn some_hosts() -> impl Strategy<Value = Vec<(u32, u64)>> {
        vec((1_u32..200, 0_u64..2000), 1..8)
    }

    proptest! {
        #[test]
        fn nobody_gives_below_its_target_or_gets_beyond_it(of in some_hosts()) {
            let hosts = shares(&of);
            let targets = targets(&hosts);
            prop_assert_eq!(targets.iter().sum::<u64>(), hosts.iter().map(|host| host.flows).sum::<u64>());
            let gifts = gifts(&hosts);
            for (host, target) in hosts.iter().zip(&targets) {
                let gives: u64 = gifts.iter().filter(|gift| gift.from == host.host).map(|gift| gift.flows).sum();
                let gets: u64 = gifts.iter().filter(|gift| gift.to == host.host).map(|gift| gift.flows).sum();
                prop_assert!(gives == 0 || gets == 0, "one direction");
                prop_assert_eq!(host.flows - gives + gets, *target);
            }
            prop_assert!(gifts.len() < hosts.len(), "few pairs");
        }

        /// In each round some hosts act, by what there was at its beginning.
        #[test]
        fn hosts_that_act_by_themselves_come_to_their_targets_and_rest(
            of in some_hosts(),
            acting in vec(vec(any::<bool>(), 8), 20),
            at_once in 1_u64..60,
        ) {
            let mut hosts = shares(&of);
            let targets = targets(&hosts);
            let beyond = |hosts: &[Share]| hosts.iter().zip(&targets).map(|(host, target)| host.flows.saturating_sub(*target)).sum::<u64>();
            for acting in &acting {
                let before = hosts.clone();
                round(&mut hosts, &before, &acting[..before.len()], at_once);
                for ((host, before), target) in hosts.iter().zip(&before).zip(&targets) {
                    let (low, high) = (before.flows.min(*target), before.flows.max(*target));
                    prop_assert!((low..=high).contains(&host.flows), "each comes nearer, and never past its target");
                }
            }
            for _ in 0..2000 / at_once + 1 {
                let before = hosts.clone();
                round(&mut hosts, &before, &[true; 8][..before.len()], at_once);
            }
            prop_assert_eq!(beyond(&hosts), 0);
            prop_assert!(is_even(&hosts) && !is_uneven(&hosts));
            let rest = hosts.clone();
            round(&mut hosts, &rest, &[true; 8][..rest.len()], at_once);
            prop_assert_eq!(hosts, rest, "nothing moves any more");
        }
    }
}
