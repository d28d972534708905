//! What a [`Sal`](crate::Sal) is told at its birth: who it is, and its bounds (DESIGN §3.11).

use alloc::vec::Vec;
use core::net::IpAddr;

use crate::types::key::HostSecret;
use crate::types::ranges::Ranges;

/// Identity and bounds of one core.
pub struct Config {
    /// The host's X25519 key.
    pub host_key: HostSecret,
    /// This start of the agent: greater than that of every earlier start, and on disk before the first send (DESIGN
    /// §7).
    pub epoch: u32,
    /// Identity of the running boot; a new one means that every socket of the older is gone.
    pub boot_id: [u8; 16],
    /// Whether this agent forwards resolvable packets of others.
    pub router: bool,
    /// Largest UDP payload, in bytes, that this host's links take.
    pub datagram_max: u16,
    /// Addresses of this host.
    pub local_addresses: Vec<IpAddr>,
    /// Its virtual ones.
    pub ranges: Ranges,
    /// The bounds.
    pub limits: Limits,
}

/// Bounds of every table and queue of the core. At a bound the newcomer is refused with [`DropReason::Full`]
/// (crate::DropReason::Full), except where a field says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Flows of all kinds.
    pub flows: usize,
    /// Responder flows whose peer is not proved; beyond `half_open_cookie` a SYN needs a cookie.
    pub half_open: usize,
    /// Half-open flows from which on cookies are asked for.
    pub half_open_cookie: usize,
    /// Associations.
    pub associations: usize,
    /// Rules of the service table.
    pub rules: usize,
    /// Packets of an application held for one flow that is being set up.
    pub held_per_flow: usize,
    /// Datagrams of a program here held for a flow that its peer has not answered yet: as many as the kernel cuts one
    /// send into (UDP_SEGMENT).
    pub held_sends_per_flow: usize,
    /// DATA datagrams held for one flow whose peer is not proved yet: the longest inner packet comes in 47,
    /// and one send in 128. While cookies are asked for, only `held_per_flow`.
    pub held_data_per_flow: usize,
    /// Names that first packets of programs here wait for, to be resolved; of other hosts, four times as many.
    pub held_names: usize,
    /// First packets of programs here that wait for one name; of other hosts as above.
    pub held_per_name: usize,
    /// First packets of programs here that wait in all; of other hosts as above.
    pub held_packets: usize,
    /// Their length in all, in bytes; of other hosts as above.
    pub held_bytes: usize,
    /// Rules that resolvers' answers to programs here make; those to other hosts as above.
    pub resolved_rules: usize,
    /// Names of programs here of which it is remembered that a resolver had no answer, and as many of other hosts; the
    /// oldest are forgotten.
    pub failed_names: usize,
    /// Outputs waiting to be polled; beyond it transmissions are dropped, never entry updates.
    pub outputs: usize,
    /// Unauthenticated answers (cookies, errors) per second.
    pub answers_per_s: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            flows: 1 << 20,
            half_open: 4096,
            half_open_cookie: 128,
            associations: 1 << 16,
            rules: 1 << 20,
            held_per_flow: 8,
            held_sends_per_flow: 128,
            held_data_per_flow: 128,
            held_names: 1024,
            held_per_name: 256,
            held_packets: 4096,
            held_bytes: 8 << 20,
            resolved_rules: 1 << 14,
            failed_names: 4096,
            outputs: 8192,
            answers_per_s: 20_000,
        }
    }
}
