//! A connection whose requests a module divides.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use margay_ensemble::{MemberId, Members};

use super::Choice;
use super::ketama::Ring;
use crate::module::{Answer, Guest};
use crate::protocol::Protocol;

/// What is remembered of a request until its frame is retired.
#[derive(Clone, Copy, Debug)]
struct Kept {
    /// What the module keeps with it.
    rtx: u64,
    /// Of what the module has made of it, if that is something else.
    digest: Option<u64>,
}

/// The module's instance, and what is remembered for it.
#[derive(Debug)]
pub(super) struct Guided {
    protocol: Protocol,
    guest: Guest,
    /// By the number of the request.
    kept: HashMap<u32, Kept>,
}

/// The same for the same bytes, in this process.
fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

impl Guided {
    pub(super) fn new(protocol: Protocol, guest: Guest) -> Self {
        Self { protocol, guest, kept: HashMap::new() }
    }

    pub(super) fn fault(&self) -> Option<&str> {
        self.guest.fault()
    }

    pub(super) fn calls(&self) -> u64 {
        self.guest.calls()
    }

    pub(super) fn add_connection(&mut self, connection: u32) {
        self.guest.add_connection(connection);
    }

    pub(super) fn remove_connection(&mut self) {
        self.guest.remove_connection();
    }

    pub(super) fn add_member(&mut self, id: MemberId, label: &str) {
        self.guest.add_member(id, label);
    }

    pub(super) fn remove_member(&mut self, id: MemberId) {
        self.guest.remove_member(id);
    }

    pub(super) fn set_ring(&mut self, ring: &Arc<Ring>, members: &[MemberId]) {
        self.guest.set_ring(ring, members);
    }

    /// What the module says of a request, if that can be.
    fn ask(&mut self, request: &[u8], is_whole: bool, members: Option<&Members>, rtx: u64) -> Option<Answer> {
        let answer = self.guest.redirect(request, members, rtx)?;
        let why = match &answer.changed {
            Some(_) if !is_whole => "redirect changes a request of which it has seen the beginning",
            Some(changed) if !self.protocol.is_request(changed) => {
                "redirect makes of a request what is no single request"
            }
            _ => return Some(answer),
        };
        self.guest.fail(why.to_owned());
        None
    }

    /// Whose a request is, and what is sent in its place.
    pub(super) fn choose(
        &mut self,
        number: u32,
        request: &[u8],
        is_whole: bool,
        members: &Members,
    ) -> Option<(Choice, Option<Vec<u8>>)> {
        let rtx = self.kept.get(&number).map_or(0, |kept| kept.rtx);
        let Answer { member, pins, is_safe, changed, rtx } = self.ask(request, is_whole, Some(members), rtx)?;
        let is_safe = is_safe.unwrap_or_else(|| self.protocol.is_safe(request));
        self.kept.insert(number, Kept { rtx, digest: changed.as_deref().map(digest) });
        Some((Choice { member: member?, is_safe, pins }, changed))
    }

    /// A request comes again: what is sent in its place, which must be the same. An error: it is not.
    pub(super) fn repeat(&mut self, number: u32, request: &[u8], is_whole: bool) -> Result<Option<Vec<u8>>, Differs> {
        let Some(kept) = self.kept.get(&number).copied() else { return Ok(None) };
        let changed = self.ask(request, is_whole, None, kept.rtx).ok_or(Differs)?.changed;
        if changed.as_deref().map(digest) != kept.digest {
            self.guest.fail("redirect makes something else of a request that is repeated".to_owned());
            return Err(Differs);
        }
        Ok(changed)
    }

    /// A request's frame will not come again.
    pub(super) fn retire(&mut self, number: u32) {
        if let Some(kept) = self.kept.remove(&number) {
            self.guest.retire(kept.rtx);
        }
    }
}

/// A repeated request has become another.
pub(super) struct Differs;
