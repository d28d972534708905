//! Who vouches for a session end to end: the host of its client signs the SYN, the host of its server the answer. Boxes
//! pass both on, and can make neither.

use alloc::vec::Vec;

use margay_wire::{BoxFlags, BoxRepr, Chain, ChainRepr, SessionId};

use super::{BoxWanted, Failure, SIGNED_FOR_S, box_ahead, service_of};
use crate::machine::sal::Sal;
use crate::table::Allow;
use crate::trust::certificate::{joined_chain, links_in_common};
use crate::types::key::{HostId, HostPublic};
use crate::types::name::ServiceId;

const ORIGIN_CONTEXT: &[u8] = b"margay 2026 chain";
/// Longer than a box, so that no list of boxes is taken for one with a number.
const CHANGE_CONTEXT: &[u8] = b"margay 2026 reconfiguration";
const ANSWER_CONTEXT: &[u8] = b"margay 2026 chain answer";

/// What the client's host has signed.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub host_key: HostPublic,
    pub time_s: u64,
    pub signature: [u8; 64],
    /// That show of which authority it is a member; may be empty.
    pub certificates: Vec<u8>,
    /// Whether the signature was checked here, and whether the host may have the session.
    pub is_checked: bool,
}

/// What the server's host has signed, as it is passed on.
#[derive(Clone, Debug)]
pub(crate) struct Answered {
    pub host_key: HostPublic,
    pub signature: [u8; 64],
    /// That show that it may speak for the name.
    pub certificates: Vec<u8>,
    pub boxes: Vec<BoxRepr>,
    pub hosts: Vec<HostId>,
}

/// Why a first agent's word does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doubt {
    /// It has not signed this, or not now.
    Unsigned,
    /// It has, and its host may not connect.
    NotAllowed,
}

/// A session, as its first agent signs it.
#[derive(Clone, Copy)]
pub(crate) struct Signed<'a> {
    pub session: SessionId,
    pub destination: &'a ServiceId,
    pub protocol: u8,
    pub port: u16,
    pub boxes: &'a [BoxRepr],
    /// Of a session that runs: which of its reconfigurations this is of; otherwise zero.
    pub change: u32,
}

impl Signed<'_> {
    fn bytes(&self, time_s: u64) -> Vec<u8> {
        let mut bytes = ORIGIN_CONTEXT.to_vec();
        bytes.extend_from_slice(&self.session.0);
        bytes.extend_from_slice(&self.destination.0);
        bytes.extend_from_slice(&time_s.to_be_bytes());
        bytes.push(self.protocol);
        bytes.extend_from_slice(&self.port.to_be_bytes());
        for one in self.boxes.iter().filter(|one| !one.flags.contains(BoxFlags::ADDED)) {
            bytes.extend_from_slice(&one.service);
            bytes.push((one.flags & (BoxFlags::MAY_BE_LEFT_OUT | BoxFlags::ENDS)).bits());
        }
        if self.change != 0 {
            bytes.extend_from_slice(CHANGE_CONTEXT);
            bytes.extend_from_slice(&self.change.to_be_bytes());
        }
        bytes
    }
}

fn answer_bytes(session: SessionId, destination: &ServiceId, origin: &HostPublic) -> Vec<u8> {
    let mut bytes = ANSWER_CONTEXT.to_vec();
    bytes.extend_from_slice(&session.0);
    bytes.extend_from_slice(&destination.0);
    bytes.extend_from_slice(&origin.0);
    bytes
}

/// The hosts as they are on the wire.
fn host_bytes(hosts: &[HostId]) -> Vec<[u8; 16]> {
    hosts.iter().map(|host| host.0).collect()
}

/// Boxes as an answer has them, which does not say who has added some.
fn answered_boxes(boxes: &[BoxRepr]) -> Vec<BoxRepr> {
    boxes.iter().map(|one| BoxRepr { added_by: 0, ..*one }).collect()
}

fn write(repr: &ChainRepr<'_>) -> Option<Vec<u8>> {
    let mut value = alloc::vec![0; repr.value_len()];
    repr.emit(&mut value).ok()?;
    Some(value)
}

impl Origin {
    /// As it stands in a SYN.
    pub fn of(chain: &Chain<'_>) -> Self {
        Self {
            host_key: HostPublic(chain.host_key()),
            time_s: chain.time_s(),
            signature: chain.signature(),
            certificates: chain.certificates().to_vec(),
            is_checked: false,
        }
    }

    /// The value of CHAIN in a SYN.
    pub fn write(&self, destination: &ServiceId, boxes: &[BoxRepr], hosts: &[HostId]) -> Option<Vec<u8>> {
        write(&ChainRepr {
            is_answer: false,
            shared: 0,
            failed_at: 0,
            destination: destination.0,
            time_s: self.time_s,
            host_key: self.host_key.0,
            signature: self.signature,
            boxes,
            hosts: &host_bytes(hosts),
            certificates: &self.certificates,
        })
    }
}

impl Answered {
    /// As it stands in a SYN-ACK, whose CERTIFICATE is `certificate`. `None` where its certificates are none.
    pub fn of(chain: &Chain<'_>, certificate: &[u8]) -> Option<Self> {
        Some(Self {
            host_key: HostPublic(chain.host_key()),
            signature: chain.signature(),
            certificates: joined_chain(certificate, chain.shared(), chain.certificates())?,
            boxes: chain.boxes().collect(),
            hosts: chain.hosts().map(HostId).collect(),
        })
    }

    /// The value of CHAIN in a SYN-ACK whose CERTIFICATE is `certificate`.
    pub fn write(&self, destination: &ServiceId, certificate: &[u8]) -> Option<Vec<u8>> {
        let (shared, rest) = links_in_common(certificate, &self.certificates);
        write(&ChainRepr {
            is_answer: true,
            shared,
            failed_at: 0,
            destination: destination.0,
            time_s: 0,
            host_key: self.host_key.0,
            signature: self.signature,
            boxes: &answered_boxes(&self.boxes),
            hosts: &host_bytes(&self.hosts),
            certificates: &rest,
        })
    }
}

impl Failure {
    /// The value of CHAIN in a SYN-ACK that refuses.
    pub fn write(self, destination: &ServiceId, boxes: &[BoxRepr], hosts: &[HostId]) -> Option<Vec<u8>> {
        write(&ChainRepr {
            is_answer: true,
            shared: 0,
            failed_at: self.at,
            destination: destination.0,
            time_s: 0,
            host_key: [0; 32],
            signature: [0; 64],
            boxes: &answered_boxes(boxes),
            hosts: &host_bytes(hosts),
            certificates: &[],
        })
    }
}

impl Sal {
    /// What this host says of a session that one of its programs begins.
    pub(super) fn sign_origin(&self, signed: &Signed<'_>) -> Origin {
        let time_s = self.unix_s();
        Origin {
            host_key: self.config.host_key.public(),
            time_s,
            signature: self.config.host_key.sign(&signed.bytes(time_s)),
            certificates: self.membership_for(signed.destination),
            is_checked: true,
        }
    }

    /// Whether the client's host has signed this session just now, and may have it.
    /// `allow`: the list of the listener or the box, and whose it is.
    pub(super) fn check_origin(
        &mut self,
        origin: &Origin,
        signed: &Signed<'_>,
        (of, allow): (&ServiceId, &Allow),
    ) -> Result<(), Doubt> {
        let is_now = self.unix_s().abs_diff(origin.time_s) <= SIGNED_FOR_S;
        let is_its = || origin.host_key.verify(&signed.bytes(origin.time_s), &origin.signature);
        if !is_now || origin.host_key.is_of_low_order() || !is_its() {
            return Err(Doubt::Unsigned);
        }
        let membership = self.shown_membership(&origin.certificates, &origin.host_key);
        if self.allows(origin.host_key.id(), membership.as_ref(), of, allow) { Ok(()) } else { Err(Doubt::NotAllowed) }
    }

    /// What the server's host says of a session.
    pub(super) fn sign_answer(&self, session: SessionId, destination: &ServiceId, origin: &Origin) -> [u8; 64] {
        self.config.host_key.sign(&answer_bytes(session, destination, &origin.host_key))
    }

    /// Whether the server's host is who may speak for the name, as far as anybody here can tell, and has said that it
    /// has this session. Of a chain that ends at a proxy, whether the proxy's host is who may speak for that box.
    ///
    /// # Errors
    ///
    /// Why not, for people.
    pub(super) fn check_answered(
        &mut self,
        session: SessionId,
        destination: &ServiceId,
        asked: &[BoxRepr],
        answered: &Answered,
    ) -> Result<bool, alloc::string::String> {
        let own = self.config.host_key.public();
        let bytes = answer_bytes(session, destination, &own);
        if answered.host_key.is_of_low_order() || !answered.host_key.verify(&bytes, &answered.signature) {
            return Err("a box of the chain answers for the service: the server's signature is wrong".into());
        }
        if answered.host_key == own {
            return Ok(true);
        }
        let proxy = asked.last().filter(|last| last.flags.contains(BoxFlags::ENDS)).map(service_of);
        let what = if proxy.is_some() { "the proxy that ends the chain" } else { "this name" };
        self.may_serve(&proxy.unwrap_or(*destination), &answered.host_key, &answered.certificates)
            .map_err(|error| alloc::format!("the host at the end of the chain may not speak for {what}: {error}"))
    }

    /// The authorities that this host belongs to, and its groups there.
    pub(super) fn own_groups(&self) -> Vec<([u8; 8], Vec<u32>)> {
        let groups = |chain: &[u8]| -> Vec<u32> {
            let links = crate::trust::certificate::decode_chain(chain).unwrap_or_default();
            links.last().map(|leaf| leaf.groups.clone()).unwrap_or_default()
        };
        self.memberships.iter().map(|(authority, chain)| (*authority, groups(chain))).collect()
    }
}

/// A box of a chain that has not been passed yet.
pub(super) fn ahead(one: &BoxWanted) -> BoxRepr {
    let mut flags = BoxFlags::empty();
    flags.set(BoxFlags::MAY_BE_LEFT_OUT, one.may_be_left_out);
    flags.set(BoxFlags::ENDS, one.is_proxy);
    BoxRepr { flags, ..box_ahead(&one.service) }
}
