//! A connection whose requests a module divides.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use margay_ensemble::{MemberId, Members};

use super::Choice;
use super::ketama::Ring;
use crate::module::{Answer, Guest, Module};
use crate::protocol::Content;

/// What is remembered of a request until its frame is retired.
#[derive(Clone, Copy, Debug)]
struct Kept {
    /// What the module keeps with it.
    rtx: u64,
    /// Of what the module has made of it, if that is something else.
    digest: Option<u64>,
    /// The module before this one has decided it.
    is_formers: bool,
    /// It went to a member. Then its frame is in the switch's ring, and is retired some time. Any other may never come
    /// again, and is forgotten once the client reports it as answered.
    is_placed: bool,
}

/// The module's instance, and what is remembered for it.
#[derive(Debug)]
pub(super) struct Guided {
    content: Content,
    guest: Guest,
    /// The module before it, as long as there are requests that it has decided: what is repeated of them is its affair.
    former: Option<Guest>,
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
    pub(super) fn new(content: Content, guest: Guest) -> Self {
        Self { content, guest, former: None, kept: HashMap::new() }
    }

    /// Whether another module may take over: not while the one before this one is needed.
    pub(super) fn may_move(&self) -> bool {
        self.former.is_none() && self.fault().is_none()
    }

    /// Another module takes over, if it wants to. Whether it does.
    ///
    /// # Errors
    ///
    /// That module fails, in words.
    pub(super) fn move_to(&mut self, module: &Module, connection: u32) -> Result<bool, String> {
        let Some(guest) = Guest::adopting(module, connection, &[], Some(&mut self.guest))? else { return Ok(false) };
        self.former = Some(std::mem::replace(&mut self.guest, guest));
        self.kept.values_mut().for_each(|kept| kept.is_formers = true);
        self.part();
        Ok(true)
    }

    /// Lets the module before this one go, once nothing is left of what it has decided.
    fn part(&mut self) {
        if self.former.is_some()
            && !self.kept.values().any(|kept| kept.is_formers)
            && let Some(mut former) = self.former.take()
        {
            former.remove_connection();
        }
    }

    fn both(&mut self) -> impl Iterator<Item = &mut Guest> {
        [&mut self.guest].into_iter().chain(&mut self.former)
    }

    /// Why there must be an end, of either module.
    pub(super) fn fault(&self) -> Option<&str> {
        self.guest.fault().or_else(|| self.former.as_ref()?.fault())
    }

    /// Whether the module that has taken over is not to blame for the fault.
    pub(super) fn is_fault_of_former(&self) -> bool {
        self.guest.fault().is_none()
    }

    pub(super) fn calls(&self) -> u64 {
        self.guest.calls()
    }

    pub(super) fn add_connection(&mut self, connection: u32) {
        self.guest.add_connection(connection);
    }

    pub(super) fn remove_connection(&mut self) {
        self.both().for_each(Guest::remove_connection);
    }

    pub(super) fn add_member(&mut self, id: MemberId, label: &str) {
        self.both().for_each(|guest| guest.add_member(id, label));
    }

    pub(super) fn remove_member(&mut self, id: MemberId) {
        self.both().for_each(|guest| guest.remove_member(id));
    }

    pub(super) fn set_ring(&mut self, ring: &Arc<Ring>, members: &[MemberId]) {
        self.both().for_each(|guest| guest.set_ring(ring, members));
    }

    /// What a module says of a request, if that can be.
    fn ask(
        content: Content,
        guest: &mut Guest,
        request: &[u8],
        is_whole: bool,
        members: Option<&Members>,
        rtx: u64,
    ) -> Option<Answer> {
        let answer = guest.redirect(request, members, rtx)?;
        let why = match &answer.changed {
            Some(_) if !is_whole => Some("redirect changes a request of which it has seen the beginning"),
            Some(changed) => content.objection(request, changed),
            None => None,
        };
        let Some(why) = why else { return Some(answer) };
        guest.fail(why.to_owned());
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
        // What another module has kept means nothing to this one.
        let rtx = self.kept.get(&number).filter(|kept| !kept.is_formers).map_or(0, |kept| kept.rtx);
        let answer = Self::ask(self.content, &mut self.guest, request, is_whole, Some(members), rtx)?;
        let Answer { member, pins, is_safe, changed, rtx } = answer;
        let is_safe = is_safe.unwrap_or_else(|| self.content.is_safe(request));
        // The switch gives nothing to one that takes no new frames.
        let member = member.filter(|id| members.is_active(*id));
        let digest = changed.as_deref().map(digest);
        self.keep(number, Kept { rtx, digest, is_formers: false, is_placed: member.is_some() });
        self.part();
        Some((Choice { member: member?, is_safe, pins }, changed))
    }

    /// Remembers a request, if there is something to remember.
    fn keep(&mut self, number: u32, mut kept: Kept) {
        kept.is_placed |= self.kept.get(&number).is_some_and(|was| was.is_placed);
        if kept.is_placed || kept.rtx != 0 {
            self.kept.insert(number, kept);
        } else {
            self.kept.remove(&number);
        }
    }

    /// The client has its answer to a request: one that went nowhere will not come again.
    pub(super) fn forget(&mut self, number: u32) {
        if self.kept.get(&number).is_some_and(|kept| !kept.is_placed) {
            self.kept.remove(&number);
            self.part();
        }
    }

    /// The same of all requests.
    pub(super) fn forget_all(&mut self) {
        self.kept.retain(|_, kept| kept.is_placed);
        self.part();
    }

    #[cfg(test)]
    pub(super) fn kept_count(&self) -> usize {
        self.kept.len()
    }

    /// A request comes again: what is sent in its place, which must be the same. An error: it is not.
    pub(super) fn repeat(&mut self, number: u32, request: &[u8], is_whole: bool) -> Result<Option<Vec<u8>>, Differs> {
        let Some(kept) = self.kept.get(&number).copied() else { return Ok(None) };
        let guest = if kept.is_formers { self.former.as_mut().ok_or(Differs)? } else { &mut self.guest };
        let answer = Self::ask(self.content, guest, request, is_whole, None, kept.rtx);
        let changed = answer.ok_or(Differs)?.changed;
        if changed.as_deref().map(digest) != kept.digest {
            guest.fail("redirect makes something else of a request that is repeated".to_owned());
            return Err(Differs);
        }
        Ok(changed)
    }

    /// A request's frame will not come again.
    pub(super) fn retire(&mut self, number: u32) {
        let Some(kept) = self.kept.remove(&number) else { return };
        match &mut self.former {
            Some(former) if kept.is_formers => {
                former.retire(kept.rtx);
                self.part();
            }
            _ => self.guest.retire(kept.rtx),
        }
    }
}

/// A repeated request has become another.
pub(super) struct Differs;
