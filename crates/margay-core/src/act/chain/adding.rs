//! Boxes that the host of a box adds behind it, since its program asks for them before the session's first packet has
//! left the box (docs/decisions/0108; Dysco, section 2.2).

use alloc::vec::Vec;

use margay_wire::{BOXES_MAX, BoxFlags, BoxRepr, Chain};

use super::policy::{ChainPolicy, SessionHeader};
use super::proof::Origin;
use super::{Chained, Place, head_of, service_of};
use crate::machine::sal::Sal;
use crate::session::flow::Setup;
use crate::trust::certificate::TrustStore;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::tuple::Tuple;

/// Why boxes are not added to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddRefused {
    /// No session with this five-tuple has come to a box here.
    #[error(
        "no session with these addresses and ports has come to a box of this host; they are those of its first packet \
         as it comes by sal0"
    )]
    Unknown,
    /// It ends at this box.
    #[error("the session ends at this box, which is a proxy; what it connects to goes through the rest of the chain")]
    Proxy,
    /// Its first packet has left the box, or never was in it.
    #[error(
        "the session's first packet has left the box, or goes on without the box; `margay chain insert` on the \
         client's host puts boxes into sessions that run"
    )]
    Late,
    /// The policy that this host goes by does not let hosts add that box, which of those that were asked for, from 0.
    #[error(
        "no chain of the policy that may be this session's has it in `may_add`; `margay policy apply` on a router of \
         the authority declares one"
    )]
    Unnamed(usize),
    /// The session passes that box already, or is for it, which of those that were asked for, from 0.
    #[error("the session goes through it already, or is for it; a session passes a box once")]
    Twice(usize),
    /// Too many boxes.
    #[error("the session would go through {0} boxes; at most {BOXES_MAX} are allowed")]
    Many(usize),
}

/// What the host of a session's client has signed of it, beside its boxes.
pub(super) struct Begun<'a> {
    pub service: &'a ServiceId,
    pub protocol: u8,
    pub port: u16,
    pub origin: &'a Origin,
}

impl Begun<'_> {
    /// The client's authority and its groups there, where it shows them.
    fn groups(&self, trust: &mut TrustStore, unix_s: u64) -> Vec<([u8; 8], Vec<u32>)> {
        let Origin { host_key, certificates, .. } = self.origin;
        let shown = trust.verify_member(certificates, &host_key.0, unix_s).ok();
        shown.into_iter().map(|member| (member.authority, member.groups)).collect()
    }
}

impl ChainPolicy {
    /// Takes the boxes of a session whose added ones some rule names. Gives whether those may be left out.
    ///
    /// # Errors
    ///
    /// Which box of them was added, and no rule names it, from 0.
    pub(super) fn check_added(
        &self,
        begun: &Begun<'_>,
        groups: &[([u8; 8], Vec<u32>)],
        boxes: &[BoxRepr],
    ) -> Result<bool, usize> {
        let is_added = |one: &BoxRepr| one.flags.contains(BoxFlags::ADDED);
        let signed: Vec<ServiceId> = boxes.iter().filter(|one| !is_added(one)).map(service_of).collect();
        let at: Vec<usize> = (0..boxes.len()).filter(|at| is_added(&boxes[*at])).collect();
        let added: Vec<ServiceId> = at.iter().map(|at| service_of(&boxes[*at])).collect();
        let session = SessionHeader {
            service: begun.service,
            protocol: begun.protocol,
            port: begun.port,
            host: begun.origin.host_key.id(),
            groups,
            packet: &[],
        };
        let rule = self.may_add(&session, &signed, &added).map_err(|first| at.get(first).copied().unwrap_or(0))?;
        Ok(rule.may_add.iter().any(|one| one.may_be_left_out))
    }
}

impl Chained {
    /// What the host of box `by`, from 1, has added behind it, in order.
    fn added_by(&self, by: u8) -> impl Iterator<Item = ServiceId> {
        self.boxes.iter().filter(move |one| one.added_by == by).map(service_of)
    }

    /// A later host refuses the session, and speaks of boxes that it knows of; they are known here from now on if they
    /// are this session's.
    pub(crate) fn note_boxes(&mut self, said: &Chain<'_>) {
        let signed = |one: &BoxRepr| (!one.flags.contains(BoxFlags::ADDED)).then_some(one.service);
        let boxes: Vec<BoxRepr> = said.boxes().collect();
        if boxes.iter().filter_map(signed).eq(self.boxes.iter().filter_map(signed)) {
            self.boxes = boxes;
            self.hosts = said.hosts().map(HostId).collect();
        }
    }
}

impl Sal {
    /// Adds boxes, in order, behind the box of this host to which a session has come with this five-tuple and which has
    /// not let its first packet out; in the place of those that were added here before. To ask for those that were
    /// added already does nothing, also when that packet is gone.
    ///
    /// # Errors
    ///
    /// Why not; nothing has changed.
    pub fn add_boxes(&mut self, seen: &Tuple, boxes: &[ServiceId]) -> Result<(), AddRefused> {
        let unix_s = self.unix_s();
        let left = self.flows.by_tuple(&seen.reversed()).and_then(|id| self.flows.get_mut(id));
        let left = left.ok_or(AddRefused::Unknown)?;
        let is_half_open = matches!(left.setup, Setup::Responder(_));
        let service = left.service;
        let chained = left.chain.as_deref_mut().ok_or(AddRefused::Unknown)?;
        let at = match chained.place {
            Place::Left { at } => at,
            Place::Proxy { .. } => return Err(AddRefused::Proxy),
            Place::First | Place::Right { .. } | Place::Last => return Err(AddRefused::Unknown),
        };
        // A chain has eight boxes at most.
        let by = at as u8 + 1;
        if chained.added_by(by).eq(boxes.iter().copied()) {
            return Ok(());
        }
        let setup = chained.setup.as_deref().filter(|setup| is_half_open && !setup.has_come_out);
        let setup = setup.ok_or(AddRefused::Late)?;
        let mut all: Vec<BoxRepr> = chained.boxes.iter().filter(|one| one.added_by != by).copied().collect();
        let count = all.len() + boxes.len();
        if count > BOXES_MAX {
            return Err(AddRefused::Many(count));
        }
        let is_known = |at: usize| {
            let one = &boxes[at];
            *one == service || boxes[..at].contains(one) || all.iter().any(|known| service_of(known) == *one)
        };
        if let Some(twice) = (0..boxes.len()).find(|at| is_known(*at)) {
            return Err(AddRefused::Twice(twice));
        }
        let added = |service| BoxRepr { service: head_of(service), flags: BoxFlags::ADDED, added_by: by };
        all.splice(at + 1..at + 1, boxes.iter().map(added));
        let begun = Begun { service: &service, protocol: seen.protocol, port: setup.port, origin: &setup.origin };
        let groups = begun.groups(&mut self.trust, unix_s);
        let may_be_left_out = self.chains.policy.check_added(&begun, &groups, &all);
        // One that an earlier host has added is refused at the end of the chain, with its own name.
        let may_be_left_out = may_be_left_out.map_err(|one| AddRefused::Unnamed(one.saturating_sub(at + 1)))?;
        for one in all.iter_mut().filter(|one| one.added_by == by) {
            one.flags.set(BoxFlags::MAY_BE_LEFT_OUT, may_be_left_out);
        }
        chained.boxes = all;
        Ok(())
    }

    /// Which box of a session that ends here was added on the way although this host's policy does not let hosts add
    /// it, or twice; from 0.
    pub(super) fn unnamed_box(&mut self, begun: &Begun<'_>, boxes: &[BoxRepr]) -> Option<usize> {
        let is_added = |at: &usize| boxes[*at].flags.contains(BoxFlags::ADDED);
        let mut added = (0..boxes.len()).filter(is_added).peekable();
        added.peek()?;
        let is_twice = |at: &usize| boxes.iter().filter(|one| one.service == boxes[*at].service).count() > 1;
        added.find(is_twice).or_else(|| {
            let unix_s = self.unix_s();
            let groups = begun.groups(&mut self.trust, unix_s);
            self.chains.policy.check_added(begun, &groups, boxes).err()
        })
    }
}
