//! Fenced names: one host alone holds each, and when it goes to another host, flows to the former one fail at once
//! (DESIGN §3.9, docs/decisions/0072). The new holder says so by a notice, which routers only pass on.
//!
//! ```text
//!  0 version = 1 | 1 zero | 2..4 bits of the prefix | 4..36 prefix | 36..44 number | 44..76 the holder's host key
//!  76..140 its signature (XEdDSA) over `margay 2026 fence` and bytes 0 to 76
//!  140.. the chain by which it may answer for the prefix, as CERTIFICATE carries it
//! ```
//! Numbers are big-endian. A router gives the number; of two notices of one name the higher one counts.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::cmp::Ordering;

use margay_wire::{ErrorCode, Extension, FlowId};

use super::told::Told;
use crate::association::AssociationTable;
use crate::cache::entry::RemoveReason;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::Flow;
use crate::session::flow::FlowTable;
use crate::session::give_up::GiveUpCause;
use crate::trust::certificate::{CertificateError, decode_chain};
use crate::types::fair_table::{FairTable, Full, Peer};
use crate::types::key::{HostId, HostPublic, HostSecret};
use crate::types::name::{Prefix, ServiceId};
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

const VERSION: u8 = 1;
const SIGNED_LEN: usize = 76;
const FIXED_LEN: usize = SIGNED_LEN + 64;
const CONTEXT: &[u8] = b"margay 2026 fence";
/// Three certificates with as many groups as they may have are shorter.
const CHAIN_LEN_MAX: usize = 1024;
/// Bytes of the longest notice.
pub const FENCE_NOTICE_LEN_MAX: usize = FIXED_LEN + CHAIN_LEN_MAX;
/// Names whose holder is known by a notice; those of one holder are a sixteenth. A host that may answer for a name may
/// hold each length of its prefix.
const HELD_MAX: usize = 1024;

/// A host's word that it holds a name for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FenceNotice {
    /// The name, or all that is under it.
    pub prefix: Prefix,
    /// Higher than that of every earlier holder.
    pub number: u64,
    /// The holder.
    pub host_key: HostPublic,
    /// By what it may answer for the prefix.
    pub chain: Vec<u8>,
    /// The holder's, over all but the chain.
    pub signature: [u8; 64],
}

/// The bytes are no notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the notice of a fenced name is malformed")]
pub struct BadFenceNotice;

/// Why a notice changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FenceError {
    /// The name has had another holder since.
    #[error("it is older than what is known of the name")]
    Outdated,
    /// It is not by the host whose key is in it.
    #[error("its signature is wrong")]
    Signature,
    /// The host may not answer for the name.
    #[error("{0}")]
    Certificate(#[from] CertificateError),
    /// There is no room, and flows of each name that is known are open.
    #[error("{0}")]
    Full(#[from] Full),
}

/// What a notice has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fenced {
    /// Flows of programs here to former holders.
    pub initiated: usize,
    /// Flows to programs here: this host was the former holder.
    pub served: usize,
}

impl FenceNotice {
    /// That of the host with this key.
    pub fn new(prefix: Prefix, number: u64, host: &HostSecret, chain: Vec<u8>) -> Self {
        let mut made = Self { prefix, number, host_key: host.public(), chain, signature: [0; 64] };
        made.signature = host.sign(&made.signed());
        made
    }

    /// The holder.
    pub fn holder(&self) -> HostId {
        self.host_key.id()
    }

    /// Whether the host whose key is in it has signed it. Whether that host may, its chain says.
    pub fn is_signed(&self) -> bool {
        self.host_key.verify(&self.signed(), &self.signature)
    }

    fn signed(&self) -> Vec<u8> {
        [CONTEXT, &self.fixed()].concat()
    }

    fn fixed(&self) -> [u8; SIGNED_LEN] {
        let mut bytes = [0; SIGNED_LEN];
        bytes[0] = VERSION;
        bytes[2..4].copy_from_slice(&self.prefix.bits.to_be_bytes());
        bytes[4..36].copy_from_slice(&self.prefix.id.0);
        bytes[36..44].copy_from_slice(&self.number.to_be_bytes());
        bytes[44..].copy_from_slice(&self.host_key.0);
        bytes
    }

    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        [&self.fixed()[..], &self.signature, &self.chain].concat()
    }

    /// Reads one; says nothing of its truth.
    ///
    /// # Errors
    ///
    /// Not of this format.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadFenceNotice> {
        let (fixed, chain) = bytes.split_at_checked(FIXED_LEN).ok_or(BadFenceNotice)?;
        let bits = u16::from_be_bytes([fixed[2], fixed[3]]);
        let id = ServiceId(core::array::from_fn(|byte| fixed[4 + byte]));
        let is_known = fixed[..2] == [VERSION, 0] && bits <= 256 && chain.len() <= CHAIN_LEN_MAX;
        // A prefix has one form: stray bits would be signed but mean nothing.
        if !is_known || Prefix::new(id, bits).id != id {
            return Err(BadFenceNotice);
        }
        Ok(Self {
            prefix: Prefix::new(id, bits),
            number: u64::from_be_bytes(core::array::from_fn(|byte| fixed[36 + byte])),
            host_key: HostPublic(core::array::from_fn(|byte| fixed[44 + byte])),
            chain: chain.to_vec(),
            signature: core::array::from_fn(|byte| fixed[SIGNED_LEN + byte]),
        })
    }
}

/// Who holds a name, by a notice that was believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    number: u64,
    holder: HostId,
    /// Until when the holder may answer for the name, in seconds since 1970: the notice counts no longer. A holder that
    /// goes on shows later certificates. Without that, a holder with the highest of all numbers, which a router can
    /// give it, would keep every later one out for ever.
    until_s: u64,
}

/// How a notice compares with what is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weight {
    /// It is the one that is known.
    Known,
    /// It is that one, and counts for longer.
    Extended,
    New,
}

/// What is known of fenced names.
#[derive(Debug)]
pub(crate) struct Fences {
    /// With which numbers this host holds names.
    own: BTreeMap<Prefix, u64>,
    held: FairTable<Prefix, Held>,
    /// With which numbers hosts hold names that programs here have flows to, as they said in their SYN-ACKs. A flow to
    /// a host that has said a higher number than a notice is none to a former holder: the notice is said again.
    told: Told<u64>,
}

impl Default for Fences {
    fn default() -> Self {
        Self { own: BTreeMap::new(), held: FairTable::elastic(HELD_MAX, 0), told: Told::default() }
    }
}

impl Fences {
    /// Whether a notice counts.
    fn weigh(&self, notice: &FenceNotice, own: HostId, unix_s: u64) -> Result<Weight, FenceError> {
        let number = notice.number;
        let holder = notice.holder();
        if holder != own && self.own.get(&notice.prefix).is_some_and(|held| *held >= number) {
            return Err(FenceError::Outdated);
        }
        let Some(known) = self.held.get(&notice.prefix).filter(|held| held.until_s >= unix_s) else {
            return Ok(Weight::New);
        };
        match (number.cmp(&known.number), holder == known.holder) {
            (Ordering::Equal, true) if end_of_chain(&notice.chain) > known.until_s => Ok(Weight::Extended),
            (Ordering::Equal, true) => Ok(Weight::Known),
            (Ordering::Greater, _) => Ok(Weight::New),
            _ => Err(FenceError::Outdated),
        }
    }

    /// Notes who holds a name, once that is proved.
    fn hold(
        &mut self,
        flows: &FlowTable,
        associations: &AssociationTable,
        prefix: Prefix,
        held: Held,
    ) -> Result<(), FenceError> {
        let peer = Peer::Member(held.holder);
        let is_its = self.held.get(&prefix).is_some_and(|known| known.holder == held.holder);
        if !self.held.has_room(peer) && !is_its {
            self.forget_fences(flows, associations);
        }
        let before = self.held.remove(&prefix);
        let noted = self.held.insert(peer, prefix, held);
        if let Some(before) = before.filter(|_| noted.is_err()) {
            // Its place was given back just now.
            let _ = self.held.insert(Peer::Member(before.holder), prefix, before);
        }
        Ok(noted?)
    }
}

/// Flows that a notice of their name may end.
fn is_open(flow: &Flow) -> bool {
    matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed) && flow.app.protocol != GREETING
}

impl Sal {
    /// Sets with which number this host holds a name; clients hear of it in SYN-ACKs. `None`: it does not hold it.
    pub fn set_own_fence(&mut self, prefix: Prefix, number: Option<u64>) {
        let Some(number) = number else {
            self.fences.own.remove(&prefix);
            return;
        };
        // Several routers may give it, each with a number of its own.
        let own = self.fences.own.entry(prefix).or_default();
        *own = number.max(*own);
        if self.fences.held.get(&prefix).is_some_and(|held| held.number < number) {
            self.fences.held.remove(&prefix);
        }
    }

    /// A holder says that a name is its own. Where that holds, flows with former holders end: programs here get an
    /// error at once, whatever those holders say. The same notice again ends flows that were begun since. Of a session
    /// that goes through boxes, the flow to the name's own host ends so, or the one to the box whose name it is; the
    /// others follow.
    ///
    /// # Errors
    ///
    /// Why it does not hold; nothing has changed. Where there is no room to note it, flows have ended all the same.
    pub fn handle_fence(&mut self, now: Instant, notice: &FenceNotice) -> Result<Fenced, FenceError> {
        self.now = now;
        let own = self.config.host_id();
        let weight = self.fences.weigh(notice, own, self.unix_s())?;
        let mut noted = Ok(());
        if weight != Weight::Known {
            let held = Held { number: notice.number, holder: notice.holder(), until_s: self.check_fence(notice)? };
            noted = self.fences.hold(&self.flows, &self.associations, notice.prefix, held);
        }
        let is_new = weight == Weight::New;
        if is_new {
            if notice.holder() != own {
                self.fences.own.remove(&notice.prefix);
            }
            self.end_grants_under(&notice.prefix);
        }
        let fenced = self.end_flows_with_former(now, notice, is_new);
        noted.map(|()| fenced)
    }

    /// Until when the holder may answer for the name.
    fn check_fence(&mut self, notice: &FenceNotice) -> Result<u64, FenceError> {
        if !notice.is_signed() {
            return Err(FenceError::Signature);
        }
        let unix_s = self.unix_s();
        Ok(self.trust.verify_prefix(&notice.chain, &notice.prefix, &notice.host_key.0, unix_s)?)
    }

    /// With a new notice, also those whose holder has said no number: they are older.
    fn end_flows_with_former(&mut self, now: Instant, notice: &FenceNotice, is_new: bool) -> Fenced {
        let own = self.config.host_id();
        let holder = notice.holder();
        let mut served = Vec::new();
        let mut initiated: BTreeMap<HostId, Vec<FlowId>> = BTreeMap::new();
        for flow in self.flows.iter().filter(|flow| is_open(flow) && notice.prefix.contains(&flow.asked())) {
            let Some(peer) = self.associations.get(flow.association).map(|association| association.host) else {
                continue;
            };
            let told = || self.fences.told.get(peer, &flow.asked()).copied();
            let is_former = || told().map_or(is_new, |told| told < notice.number);
            match flow.role {
                Role::Responder if holder != own => served.push(flow.id),
                Role::Initiator if holder != peer && is_former() => initiated.entry(peer).or_default().push(flow.id),
                Role::Responder | Role::Initiator => {}
            }
        }
        self.end_elsewhere(now, &served);
        let mut fenced = Fenced { initiated: 0, served: served.len() };
        for (peer, flows) in initiated {
            fenced.initiated += flows.len();
            self.end_elsewhere(now, &flows);
            self.note_given_up(peer, flows.len(), GiveUpCause::Elsewhere(holder));
        }
        fenced
    }

    /// This host may hold a name no longer: flows to its programs end. Gives how many there were.
    pub fn leave_fenced(&mut self, now: Instant, prefix: Prefix) -> usize {
        self.now = now;
        self.fences.own.remove(&prefix);
        self.end_grants_under(&prefix);
        let is_served = |flow: &&Flow| flow.role == Role::Responder && prefix.contains(&flow.asked()) && is_open(flow);
        let served: Vec<FlowId> = self.flows.iter().filter(is_served).map(|flow| flow.id).collect();
        self.end_elsewhere(now, &served);
        served.len()
    }

    fn end_elsewhere(&mut self, now: Instant, flows: &[FlowId]) {
        for id in flows {
            self.say_fail(*id, ErrorCode::Elsewhere);
            self.fail_flow(now, *id, RemoveReason::Elsewhere);
        }
    }

    /// Flows of programs here with a peer have ended, since it is given up.
    pub(crate) fn note_given_up(&mut self, peer: HostId, flows: usize, cause: GiveUpCause) {
        self.counters.given_up(cause);
        self.events.push(Event::GivenUp { peer, flows, cause });
    }
}

impl Fences {
    /// FENCE_NUMBER of the SYN-ACK for a service here.
    pub(crate) fn own_fence(&self, service: &ServiceId) -> Option<Extension<'static>> {
        let holding = self.own.iter().filter(|(prefix, _)| prefix.contains(service));
        holding.max_by_key(|(prefix, _)| prefix.bits).map(|(_, number)| Extension::FenceNumber(*number))
    }

    /// What the instance has said in its SYN-ACK.
    pub(crate) fn note_fence(
        &mut self,
        flows: &FlowTable,
        associations: &AssociationTable,
        id: FlowId,
        number: Option<u64>,
    ) {
        if number.is_some() {
            self.told.note_of(flows, associations, id, number);
        }
    }

    /// Who holds a name now, where a host that says that it does so is a former holder.
    pub(crate) fn holder_since(
        &self,
        host: HostId,
        service: &ServiceId,
        told: Option<u64>,
        unix_s: u64,
    ) -> Option<HostId> {
        let told = told?;
        let is_later = |held: &Held| held.holder != host && told < held.number && held.until_s >= unix_s;
        self.held.iter().find(|(prefix, held)| prefix.contains(service) && is_later(held)).map(|(_, held)| held.holder)
    }

    /// Forgets holders of names that no flow is of, and what hosts have said with which this one shares nothing any
    /// more.
    pub(crate) fn forget_fences(&mut self, flows: &FlowTable, associations: &AssociationTable) {
        let mut unused: Vec<Prefix> = self.held.iter().map(|(prefix, _)| *prefix).collect();
        for flow in flows.iter() {
            if unused.is_empty() {
                break;
            }
            unused.retain(|prefix| !prefix.contains(&flow.asked()));
        }
        for prefix in unused {
            self.held.remove(&prefix);
        }
        self.told.forget_strangers(associations);
    }
}

/// When the first certificate of a chain ends, in seconds since 1970; it may be no chain.
fn end_of_chain(chain: &[u8]) -> u64 {
    let chain = decode_chain(chain).unwrap_or_default();
    chain.iter().map(|certificate| certificate.not_after_s).min().unwrap_or(0)
}

#[cfg(test)]
mod test;
