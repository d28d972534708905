//! Which host holds which partition of a service: evenly, and with as few moves as can be (DESIGN §5, §8; Serval §6.2).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use margay_core::key::HostId;

/// Gives every partition to one of `members`, from who holds them now (`None`: nobody yet).
///
/// No two members differ by more than one partition, and only as many partitions change hands as that takes. Which ones
/// follows from the host-IDs alone, in an order that every host has of its own: who comes back gets mostly what it had.
/// Weights do not count. Without members nobody holds anything.
pub fn assign(held: &[Option<HostId>], members: &BTreeSet<HostId>) -> Vec<Option<HostId>> {
    let mut holders: Vec<Option<HostId>> =
        held.iter().map(|holder| holder.filter(|host| members.contains(host))).collect();
    if members.is_empty() {
        return holders;
    }
    let mut counts: BTreeMap<HostId, usize> = members.iter().map(|host| (*host, 0)).collect();
    for holder in holders.iter().flatten() {
        *counts.entry(*holder).or_default() += 1;
    }
    let wanted = shares(holders.len(), &counts);
    let needy: Vec<HostId> = members.iter().copied().filter(|host| counts[host] < wanted[host]).collect();
    let may_move = |holder: Option<HostId>| holder.is_none_or(|host| counts[&host] > wanted[&host]);
    let mut moves: Vec<(Reverse<u64>, usize, HostId)> = Vec::new();
    for (index, _) in holders.iter().enumerate().filter(|(_, holder)| may_move(**holder)) {
        moves.extend(needy.iter().map(|host| (Reverse(liking(*host, index)), index, *host)));
    }
    moves.sort_unstable();
    // Once around is enough: who has its share never needs more, and who has no more than that never gives.
    for (_, index, host) in moves {
        let from = holders[index];
        let is_given = from.is_none_or(|from| counts[&from] > wanted[&from]);
        if is_given && counts[&host] < wanted[&host] {
            if let Some(count) = from.and_then(|from| counts.get_mut(&from)) {
                *count -= 1;
            }
            *counts.entry(host).or_default() += 1;
            holders[index] = Some(host);
        }
    }
    holders
}

/// How many partitions each member shall hold. Those that have more already keep the odd ones.
fn shares(partitions: usize, counts: &BTreeMap<HostId, usize>) -> BTreeMap<HostId, usize> {
    let (least, odd) = (partitions / counts.len(), partitions % counts.len());
    let mut by_count: Vec<(Reverse<usize>, HostId)> =
        counts.iter().map(|(host, count)| (Reverse(*count), *host)).collect();
    by_count.sort_unstable();
    by_count.iter().enumerate().map(|(rank, (_, host))| (*host, least + usize::from(rank < odd))).collect()
}

/// How much a host wants a partition; host-IDs are hashes, so that the order is as good as random.
fn liking(host: HostId, index: usize) -> u64 {
    let mut mixed = host.0.chunks_exact(8).fold(index as u64, |sum, chunk| {
        let word = chunk.iter().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
        (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
    });
    for multiplier in [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb] {
        mixed = (mixed ^ mixed >> 31).wrapping_mul(multiplier);
    }
    mixed ^ mixed >> 29
}

/// Numbers of partitions as people read them: `0-3,9`.
pub fn written(mut indices: Vec<u16>) -> String {
    indices.sort_unstable();
    let mut runs: Vec<(u16, u16)> = Vec::new();
    for index in indices {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(index) => *last = index,
            _ => runs.push((index, index)),
        }
    }
    let text = |(first, last): &(u16, u16)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    runs.iter().map(text).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::prelude::*;

    fn host(n: u8) -> HostId {
        HostId(*blake3::hash(&[n]).as_bytes().first_chunk().expect("32 bytes"))
    }

    fn hosts(all: impl IntoIterator<Item = u8>) -> BTreeSet<HostId> {
        all.into_iter().map(host).collect()
    }

    fn counts(holders: &[Option<HostId>]) -> Vec<usize> {
        let mut counts = BTreeMap::new();
        for holder in holders.iter().flatten() {
            *counts.entry(*holder).or_insert(0) += 1;
        }
        counts.into_values().collect()
    }

    fn moved(before: &[Option<HostId>], after: &[Option<HostId>]) -> usize {
        before.iter().zip(after).filter(|(before, after)| before != after).count()
    }

    #[test]
    fn four_servers_of_sixteen_partitions_as_in_the_paper() {
        let all = assign(&[None; 16], &hosts(0..4));
        assert_eq!(counts(&all), [4; 4]);
        let three = assign(&all, &hosts(1..4));
        assert_eq!((counts(&three).iter().max(), moved(&all, &three)), (Some(&6), 4));
        let two = assign(&three, &hosts(2..4));
        assert_eq!(counts(&two), [8; 2]);
        assert_eq!(assign(&two, &hosts([])), [None; 16]);
    }

    #[test]
    fn who_comes_back_gets_what_it_had_last() {
        let three = assign(&[None; 64], &hosts(0..3));
        let four = assign(&three, &hosts(0..4));
        let without = assign(&four, &hosts(0..3));
        let again = assign(&without, &hosts(0..4));
        let had = |holders: &[Option<HostId>]| -> Vec<usize> {
            (0..64).filter(|index| holders[*index] == Some(host(3))).collect()
        };
        let kept = had(&again).iter().filter(|index| had(&four).contains(index)).count();
        assert!(kept >= 12, "{kept} of {}", had(&four).len());
    }

    #[test]
    fn numbers_are_written_in_runs() {
        assert_eq!(written(vec![9, 0, 1, 3, 2]), "0-3,9");
        assert_eq!(written(vec![]), "");
    }

    proptest! {
        #[test]
        fn shares_are_even_moves_are_few_and_the_outcome_follows_from_the_state(
            bits in 0_u32..=7,
            sets in proptest::collection::vec(proptest::collection::btree_set(0_u8..12, 1..12), 1..8),
        ) {
            let mut holders = vec![None; 1 << bits];
            for set in sets {
                let members = hosts(set);
                let after = assign(&holders, &members);
                prop_assert_eq!(&after, &assign(&holders, &members));
                prop_assert!(after.iter().all(|holder| holder.is_some_and(|host| members.contains(&host))));
                let of = |holders: &[Option<HostId>], host: &HostId| {
                    holders.iter().filter(|holder| **holder == Some(*host)).count()
                };
                let least = holders.len() / members.len();
                let odd = holders.len() % members.len();
                prop_assert!(members.iter().all(|host| [least, least + usize::from(odd > 0)].contains(&of(&after, host))));
                // No even outcome keeps more: each member keeps at most its share, and `odd` of them one more.
                let mut before: Vec<usize> = members.iter().map(|host| of(&holders, host)).collect();
                before.sort_unstable_by_key(|count| Reverse(*count));
                let kept: usize =
                    before.iter().enumerate().map(|(rank, count)| *count.min(&(least + usize::from(rank < odd)))).sum();
                prop_assert_eq!(moved(&holders, &after), holders.len() - kept);
                holders = after;
            }
        }
    }
}
