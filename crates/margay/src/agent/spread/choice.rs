//! Which of a name's instances take its datagrams, and by which share.

use margay_control::registration::Instance;
use margay_core::name::ServiceId;

/// The instances of the longest prefix that covers `service`, of those the ones of the highest priority, that take
/// anything: as the service table has it (DESIGN §8).
pub fn usable<'a>(instances: &'a [Instance], service: &ServiceId) -> Vec<&'a Instance> {
    let covering = || instances.iter().filter(|one| one.prefix.contains(service) && one.weight > 0);
    let best = covering().map(|one| (one.prefix.bits, one.priority)).max();
    covering().filter(|one| Some((one.prefix.bits, one.priority)) == best).collect()
}

#[cfg(test)]
mod test {
    use margay_core::key::HostId;
    use margay_core::name::Prefix;

    use super::*;

    fn instance(n: u8, prefix: &str, weight: u32, priority: u32) -> Instance {
        Instance {
            host: HostId([n; 16]),
            host_name: format!("host{n}"),
            address: "10.0.0.1:54324".parse().expect("literal"),
            name: "cache.shop".to_owned(),
            prefix: prefix.parse().expect("literal"),
            weight,
            priority,
            sticky: false,
            fence: None,
            zero_weight: None,
        }
    }

    fn chosen(instances: &[Instance], service: &ServiceId) -> Vec<u8> {
        usable(instances, service).iter().map(|one| one.host.0[0]).collect()
    }

    #[test]
    fn the_longest_prefix_and_the_highest_priority_win_and_weight_zero_takes_nothing() {
        let mut service = ServiceId([0; 32]);
        service.0[..3].copy_from_slice(&[0xab, 0xcd, 0xef]);
        let all = [
            instance(1, "sid:ab/8", 100, 100),
            instance(2, "sid:ab/8", 100, 200),
            instance(3, "sid:abcd/16", 100, 1),
            instance(4, "sid:abcd/16", 50, 1),
            instance(5, "sid:abcd/16", 0, 9),
            instance(6, "sid:ac/8", 100, 900),
        ];
        assert_eq!(chosen(&all, &service), [3, 4]);
        assert_eq!(chosen(&all[..2], &service), [2]);
        assert_eq!(chosen(&all[4..], &service), [0_u8; 0]);
        assert_eq!(Prefix::from(service).bits, 256);
    }
}
