//! What an agent leaves for its next start, in root-only memory that a reboot forgets: its associations (DESIGN §7,
//! §18).
//!
//! The next start has a greater epoch, so its tags use other keys and its numbers may begin again. The replay window is
//! not kept: each message names the epoch of the receiver that it is for, and what was sent to the start before is
//! refused ([`auth`](crate::association::auth)).
//!
//! ```text
//!  0 version = 2 | 1 flags (1 initiator, 2 router, 4 boot known, 8 hop key) | 2..4 datagram_max
//!  4..8 local index | 8..12 remote index | 12..16 peer epoch | 16..48 peer's key | 48..80 root key
//!  80..96 boot | 96..112 hop key | 112..128 address | 128..130 port | 130..132 zero
//!  132..148 address of the peer's router | 148..150 port, zero where none is known
//!  150 the first eight stacks that the peer has, a bit for each | 151 flags (1 it can change a live flow's)
//! ```
//! Bytes 150 and 151 may be zero: then nothing is known of that. Version 1 ends at byte 132. It is read as well, so
//! that flows outlive the change of the program.

use alloc::vec::Vec;
use core::net::{Ipv6Addr, SocketAddr};

use margay_wire::CHANGES;
use zeroize::Zeroizing;

use crate::association::Association;
use crate::association::location::Scope;
use crate::machine::sal::Sal;
use crate::trust::handshake::Keys;
use crate::types::key::HostPublic;
use crate::types::time::Instant;

const VERSION: u8 = 2;
const VERSION_WITHOUT_ROUTER: u8 = 1;
/// Bytes of one association.
pub const KEEPSAKE_LEN: usize = 152;
const LEN_WITHOUT_ROUTER: usize = 132;
const INITIATOR: u8 = 1;
const ROUTER: u8 = 2;
const BOOT: u8 = 4;
const HOP_KEY: u8 = 8;
const CAN_CHANGE: u8 = 1;

/// The bytes are not of this version or cut short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the kept associations are of another version or damaged; they are left alone, and peers will be met anew")]
pub struct BadKeepsake;

fn put_address(address: SocketAddr, out: &mut Vec<u8>) {
    let ip = match address.ip() {
        core::net::IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        core::net::IpAddr::V6(v6) => v6,
    };
    out.extend_from_slice(&ip.octets());
    out.extend_from_slice(&address.port().to_be_bytes());
    out.extend_from_slice(&[0; 2]);
}

/// Associations for the next start, in two parts.
#[derive(Debug)]
pub struct KeptAssociations {
    older: Zeroizing<Vec<u8>>,
    newest: Zeroizing<Vec<u8>>,
}

impl KeptAssociations {
    fn with_room_for(count: usize) -> Self {
        let room = || Zeroizing::new(Vec::with_capacity(count * KEEPSAKE_LEN));
        Self { older: room(), newest: room() }
    }

    /// All of them, in an order by which the next start uses the same ones for new flows.
    pub fn concat(parts: &[Self]) -> Zeroizing<Vec<u8>> {
        let all = || parts.iter().map(|part| &part.older).chain(parts.iter().map(|part| &part.newest));
        // Room for all: what grows leaves copies behind, which nobody wipes.
        let mut bytes = Zeroizing::new(Vec::with_capacity(all().map(|part| part.len()).sum()));
        all().for_each(|part| bytes.extend_from_slice(part));
        bytes
    }
}

fn encode(association: &Association, rendezvous: Option<SocketAddr>, out: &mut Vec<u8>) {
    let flag = |bit: u8, is_set: bool| if is_set { bit } else { 0 };
    let flags = flag(INITIATOR, association.is_initiator())
        | flag(ROUTER, association.router)
        | flag(BOOT, association.boot_id.is_some())
        | flag(HOP_KEY, association.hop_key.is_some());
    out.extend_from_slice(&[VERSION, flags]);
    out.extend_from_slice(&association.datagram_max.to_be_bytes());
    for number in [association.local_id, association.remote_id, association.peer_epoch] {
        out.extend_from_slice(&number.to_be_bytes());
    }
    out.extend_from_slice(&association.host_key.0);
    out.extend_from_slice(&association.root_key());
    out.extend_from_slice(&association.boot_id.unwrap_or_default());
    out.extend_from_slice(&association.hop_key.unwrap_or_default());
    put_address(association.remote, out);
    put_address(rendezvous.unwrap_or(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0)), out);
    // The last two are what the peer can do.
    out.truncate(out.len() - 2);
    let can_change = association.stacks & CHANGES != 0;
    out.extend_from_slice(&[association.stacks as u8, flag(CAN_CHANGE, can_change)]);
}

/// One association, of either version, and where its peer's router is.
fn decode(record: &[u8]) -> Result<(Association, Option<SocketAddr>), BadKeepsake> {
    let (record, more) = record.split_first_chunk::<LEN_WITHOUT_ROUTER>().ok_or(BadKeepsake)?;
    let array = |at: usize| -> [u8; 16] { core::array::from_fn(|byte| record[at + byte]) };
    let key = |at: usize| -> [u8; 32] { core::array::from_fn(|byte| record[at + byte]) };
    let word = |at: usize| record[at..at + 4].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
    let half = |at: usize| u16::from_be_bytes([record[at], record[at + 1]]);
    let flags = record[1];
    let is_known = matches!((record[0], more.len()), (VERSION, 20) | (VERSION_WITHOUT_ROUTER, 0));
    if !is_known || flags > 15 || word(4) == 0 || HostPublic(key(16)).is_of_low_order() {
        return Err(BadKeepsake);
    }
    let remote = SocketAddr::new(Ipv6Addr::from(array(112)).to_canonical(), half(128));
    let keys = Keys { root: key(48) };
    let mut association = Association::new(word(4), word(8), HostPublic(key(16)), keys, flags & INITIATOR != 0, remote);
    association.peer_epoch = word(12);
    association.datagram_max = half(2).max(600);
    association.router = flags & ROUTER != 0;
    association.boot_id = (flags & BOOT != 0).then(|| array(80));
    association.hop_key = (flags & HOP_KEY != 0).then(|| array(96));
    let (stacks, able) = more.get(18..20).map_or((0, 0), |able| (u32::from(able[0]), able[1]));
    association.stacks = stacks | if able & CAN_CHANGE != 0 { CHANGES } else { 0 };
    let router_ip = more.first_chunk::<16>().map(|ip| Ipv6Addr::from(*ip).to_canonical());
    let router_port = more.get(16..18).map_or(0, |port| u16::from_be_bytes([port[0], port[1]]));
    let rendezvous = router_ip.filter(|_| router_port != 0).map(|ip| SocketAddr::new(ip, router_port));
    Ok((association, rendezvous))
}

impl Sal {
    /// The associations, for the next start on this boot. Secret: to be kept where only root reads, and where a reboot
    /// forgets.
    pub fn keep_associations(&self) -> Zeroizing<Vec<u8>> {
        KeptAssociations::concat(&[self.keep_some(&self.kept_associations())])
    }

    /// By our index, all that [`keep_some`](Self::keep_some) is to be asked for. Of those that are idle and with
    /// strangers only the latest 256: there are as many of them as the strangers want.
    pub fn kept_associations(&self) -> Vec<u32> {
        self.associations.kept().collect()
    }

    /// Those of these associations that there are, for who must not hold up this host for all at once.
    pub fn keep_some(&self, ids: &[u32]) -> KeptAssociations {
        let mut kept = KeptAssociations::with_room_for(ids.len());
        for association in ids.iter().filter_map(|id| self.associations.get(*id)).filter(|one| !one.is_self()) {
            let is_newest = self.associations.is_newest(association.local_id);
            let rendezvous = self.locations.get(Scope::of(association.host)).and_then(|location| location.rendezvous);
            encode(association, rendezvous, if is_newest { &mut kept.newest } else { &mut kept.older });
        }
        kept
    }

    /// Whether what [`kept_associations`](Self::kept_associations) gives has changed since this was asked last.
    pub fn take_kept_news(&mut self) -> bool {
        self.associations.take_kept_news()
    }

    /// Takes up the associations of the start before. Peers need no new handshake; what they still send on flows of
    /// that start is answered with a FAIL that they believe. Flows are to be taken up next, and then
    /// [`forget_superseded`](Self::forget_superseded) be called. Gives how many there were.
    ///
    /// # Errors
    ///
    /// The bytes are damaged or of another version; nothing has changed then.
    pub fn take_up_associations(&mut self, now: Instant, bytes: &[u8]) -> Result<usize, BadKeepsake> {
        self.now = now;
        let len = if bytes.first() == Some(&VERSION_WITHOUT_ROUTER) { LEN_WITHOUT_ROUTER } else { KEEPSAKE_LEN };
        let associations = bytes.chunks(len).map(decode).collect::<Result<Vec<_>, _>>()?;
        let count = associations.len();
        for (mut association, rendezvous) in associations {
            if rendezvous.is_some() {
                self.locations.with(Scope::of(association.host), |location| location.rendezvous = rendezvous);
            }
            association.heard = now;
            association.is_kept = true;
            association.is_fresh = false;
            if association.is_of_registered() {
                self.hosts_absent.insert(association.host);
            }
            let id = association.local_id;
            // A table at its bound refuses the rest: those peers are met anew.
            if self.associations.insert_beside(association).is_ok() {
                self.locations.announce_path(&self.associations, &mut self.queue, id);
            }
        }
        Ok(count)
    }

    /// The flows of the start before have been taken up: what no flow needs goes.
    pub fn forget_superseded(&mut self) {
        self.associations.forget_superseded();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn association() -> Association {
        let remote = "[2001:db8::7]:54324".parse().expect("literal");
        let mut association = Association::new(7, 8, HostPublic([9; 32]), Keys { root: [3; 32] }, true, remote);
        association.peer_epoch = 5;
        association.boot_id = Some([1; 16]);
        association.hop_key = Some([2; 16]);
        association.stacks = CHANGES | 12;
        association
    }

    #[test]
    fn an_association_comes_back_as_it_was() {
        let mut bytes = Vec::new();
        let router = Some("10.0.0.1:54324".parse().expect("literal"));
        encode(&association(), router, &mut bytes);
        assert_eq!(bytes.len(), KEEPSAKE_LEN);
        assert_eq!(bytes[..16], [2, 13, 4, 176, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0, 5]);
        assert_eq!(bytes[142..], [0xff, 0xff, 10, 0, 0, 1, 0xd4, 0x34, 12, 1]);
        let mut again = Vec::new();
        let (known, rendezvous) = decode(&bytes).expect("whole");
        encode(&known, rendezvous, &mut again);
        assert_eq!((bytes, rendezvous, known.stacks), (again, router, CHANGES | 12));
    }

    #[test]
    fn what_the_version_before_has_left_is_taken_up() {
        let mut bytes = Vec::new();
        for id in 1..=3 {
            let mut one = Vec::new();
            let mut kept = association();
            kept.local_id = id;
            encode(&kept, None, &mut one);
            one[0] = 1;
            bytes.extend_from_slice(&one[..132]);
        }
        let mut sal = crate::act::handover::tests::sal(crate::types::config::Limits::default());
        assert_eq!(sal.take_up_associations(Instant::ZERO, &bytes[..200]), Err(BadKeepsake), "cut short");
        assert_eq!(sal.take_up_associations(Instant::ZERO, &bytes), Ok(3));
    }

    #[test]
    fn a_peers_router_is_known_after_a_new_start() {
        let start = || crate::act::handover::tests::sal(crate::types::config::Limits::default());
        let (mut bytes, router) = (Vec::new(), "[2001:db8::1]:54324".parse().ok());
        encode(&association(), router, &mut bytes);
        let (mut sal, mut next) = (start(), start());
        assert_eq!(sal.take_up_associations(Instant::ZERO, &bytes), Ok(1));
        assert_eq!(next.take_up_associations(Instant::ZERO, &sal.keep_associations()), Ok(1));
        let location = next.locations.get(Scope::of(association().host));
        assert_eq!(location.and_then(|location| location.rendezvous), router);
    }

    /// Flows are taken up after it, so that none has one yet: all stay until then, however many are at one address.
    #[test]
    fn all_of_a_peers_come_back_until_flows_have_chosen() {
        let mut sal = crate::act::handover::tests::sal(crate::types::config::Limits::default());
        let mut bytes = Vec::new();
        for id in 1..=40 {
            let mut one = association();
            one.local_id = id;
            encode(&one, None, &mut bytes);
        }
        assert_eq!(sal.take_up_associations(Instant::ZERO, &bytes), Ok(40));
        let peers = |sal: &Sal| -> Vec<u32> {
            sal.associations.iter().filter(|one| !one.is_self()).map(|one| one.local_id).collect()
        };
        assert_eq!(peers(&sal).len(), 40);
        sal.associations.hold(3);
        sal.forget_superseded();
        assert_eq!(peers(&sal), [3, 40]);
    }

    #[test]
    fn another_version_is_refused() {
        let mut bytes = Vec::new();
        encode(&association(), None, &mut bytes);
        bytes[0] = 3;
        assert!(decode(&bytes).is_err());
    }
}
