//! The whole core: datagrams from nobody known, and packets of programs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::LazyLock;

use margay_core::config::{Config, Limits};
use margay_core::key::HostSecret;
use margay_core::rng::Rng;
use margay_core::time::Instant;
use margay_core::{Input, Ranges, Sal};

use crate::parts;

const LOCAL: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const REMOTE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// The core of a router, which knows nobody yet.
pub fn new_sal() -> Sal {
    static KEY: LazyLock<HostSecret> = LazyLock::new(|| HostSecret::generate(&mut Rng::new([7; 32])));
    let config = Config {
        host_key: KEY.clone(),
        epoch: 1,
        boot_id: [1; 16],
        router: true,
        datagram_max: 1472,
        local_addresses: vec![LOCAL.into()],
        ranges: Ranges::default(),
        limits: Limits::default(),
    };
    Sal::new(config, Instant::from_millis(0), 1_700_000_000, [9; 32])
}

/// A sequence of datagrams, of packets that programs send, and of waits. The core has a deadline in the future, or
/// none, after all of them.
pub fn sal(bytes: &[u8]) {
    let mut sal = new_sal();
    let mut now = Instant::from_millis(1);
    let mut datagram = vec![0; usize::from(u16::MAX) + 1];
    for part in parts(bytes) {
        let Some((what, said)) = part.split_first() else { continue };
        match what % 4 {
            0 | 1 => {
                let from = SocketAddr::new(REMOTE.into(), 54324);
                let _ = sal.handle_datagram(now, Some(IpAddr::V4(LOCAL)), from, said);
            }
            2 => drop(sal.handle_app_packet(now, said)),
            _ => {
                now = Instant::from_micros(now.micros() + (u64::from(*what) << 12));
                sal.handle(now, Input::Timeout);
            }
        }
        while sal.poll(&mut datagram).is_some() {}
        while sal.poll_event().is_some() {}
        let _ = sal.poll_timeout();
    }
}
