//! Which member a frame goes to, and what becomes of requests when a member dies.

mod guided;
pub mod ketama;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use margay_ensemble::{Frame, MemberId, Members, Plugin, Serial, Tsn, Verdict};

use crate::Table;
use crate::head::Head;
use crate::module::{Guest, Module};
use crate::protocol::Content;
use guided::{Differs, Guided};
use ketama::Ring;

/// Requests of one connection that are remembered: from the oldest that is not answered.
const REQUESTS_MAX: u32 = 1 << 16;
/// Bit of a frame's own number: it goes to its member as a refusal.
const REFUSED: u64 = 1 << 63;
/// What a program is told of a request that nobody knows the fate of.
pub const MEMBER_DIED: &str = "the server died with this request; it may be done, or not";

/// How frames are divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// By key: libketama's ring of the members' labels.
    #[default]
    Ketama,
    /// One after the other, for members that all have the same.
    RoundRobin,
}

/// A request that is not answered, as far as is known here.
#[derive(Clone, Copy, Debug)]
struct Request {
    /// Whose it is; none: that member is dead, and the request may go to another.
    member: Option<MemberId>,
    /// The member has acknowledged it for good.
    is_acknowledged: bool,
    /// Its answer has begun.
    is_answered: bool,
}

/// What was decided of a request.
#[derive(Clone, Copy, Debug)]
struct Choice {
    member: MemberId,
    is_safe: bool,
    /// All that come after it go there as well.
    pins: bool,
}

/// The plug-in for one connection.
#[derive(Debug)]
pub struct Router {
    content: Content,
    policy: Policy,
    /// A random number.
    connection: u32,
    /// A module that decides in the policy's place.
    guided: Option<Guided>,
    /// Members by what they are called.
    labels: BTreeMap<MemberId, String>,
    ring: Arc<Ring>,
    /// The members of the ring, in its order.
    ring_members: Vec<MemberId>,
    /// The ring is of the members that there are.
    is_arranged: bool,
    /// Whose turn is next, of members that are asked one after the other.
    turn: usize,
    /// All requests before it are answered; none: no request has come.
    oldest: Option<Tsn>,
    requests: Table<u32, Request>,
    /// How many of them each member has not answered.
    owed: Table<MemberId, usize>,
    lost: Vec<u32>,
    /// What members were given and have answered since it was taken last.
    tallies: Vec<(MemberId, Tally)>,
}

/// What a member was given, and has answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Requests that were given; also those that came again after another member's death.
    pub requests: u64,
    /// Requests of those whose answers have begun.
    pub answers: u64,
    /// Answers of those that were errors of the program.
    pub errors: u64,
    /// What the last one of them said.
    pub last_error: Option<String>,
}

impl Tally {
    /// Adds what came later.
    pub fn add(&mut self, later: Self) {
        self.requests += later.requests;
        self.answers += later.answers;
        self.errors += later.errors;
        self.last_error = later.last_error.or(self.last_error.take());
    }
}

impl Router {
    /// Of a connection without members.
    pub fn new(content: impl Into<Content>, policy: Policy) -> Self {
        Self {
            content: content.into(),
            policy,
            connection: 0,
            guided: None,
            labels: BTreeMap::new(),
            ring: Arc::default(),
            ring_members: Vec::new(),
            is_arranged: true,
            turn: 0,
            oldest: None,
            requests: Table::default(),
            owed: Table::default(),
            lost: Vec::new(),
            tallies: Vec::new(),
        }
    }

    /// Of a connection without members, whose requests a module divides.
    pub(crate) fn guided(content: impl Into<Content>, guest: Guest) -> Self {
        let content = content.into();
        Self { guided: Some(Guided::new(content, guest)), ..Self::new(content, Policy::Ketama) }
    }

    /// A member that has joined is called so.
    pub fn name(&mut self, member: MemberId, label: &str) {
        self.labels.insert(member, label.to_owned());
        self.is_arranged = false;
        if let Some(guided) = &mut self.guided {
            guided.add_member(member, label);
        }
    }

    /// Whether a module may take over from whatever divides requests now: not while one before that is needed.
    pub(crate) fn may_move(&self) -> bool {
        self.guided.as_ref().is_none_or(Guided::may_move)
    }

    /// A module takes over, if it wants to. Whether it does.
    ///
    /// # Errors
    ///
    /// The module fails, in words; what was there goes on.
    pub(crate) fn move_to(&mut self, module: &Module) -> Result<bool, String> {
        if !module.adopts() {
            return Ok(false);
        }
        let is_moved = match &mut self.guided {
            Some(guided) => guided.move_to(module, self.connection)?,
            None => {
                let members: Vec<_> = self.labels.iter().map(|(id, label)| (*id, label.clone())).collect();
                let guest = Guest::adopting(module, self.connection, &members, None)?;
                self.guided = guest.map(|guest| Guided::new(self.content, guest));
                // The ring of the policy is another one where there is none.
                self.policy = if self.guided.is_some() { Policy::Ketama } else { self.policy };
                self.guided.is_some()
            }
        };
        // It knows no ring yet.
        self.is_arranged &= !is_moved;
        Ok(is_moved)
    }

    /// Whether the fault is of a module that another one has taken over from.
    pub(crate) fn is_fault_of_former(&self) -> bool {
        self.guided.as_ref().is_some_and(Guided::is_fault_of_former)
    }

    /// Why the module can divide no more: the connection must end.
    pub fn fault(&self) -> Option<&str> {
        self.guided.as_ref()?.fault()
    }

    /// How often the module was called; none: there is no module.
    pub fn module_calls(&self) -> Option<u64> {
        self.guided.as_ref().map(Guided::calls)
    }

    /// Requests that nobody will answer, since their member is dead.
    pub fn take_lost(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.lost)
    }

    /// What members were given and have answered since it was taken last.
    pub fn take_tallies(&mut self) -> impl Iterator<Item = (MemberId, Tally)> + '_ {
        self.tallies.drain(..)
    }

    /// Since it is taken after each batch, few members are in it.
    fn tally(&mut self, member: MemberId) -> &mut Tally {
        let at = self.tallies.iter().position(|(of, _)| *of == member).unwrap_or_else(|| {
            self.tallies.push((member, Tally::default()));
            self.tallies.len() - 1
        });
        &mut self.tallies[at].1
    }

    /// How many requests are not answered, as far as is known here.
    pub fn open_requests(&self) -> usize {
        self.requests.values().filter(|request| !request.is_answered).count()
    }

    /// Makes the ring: once for all members that have come and gone since the last request.
    fn arrange(&mut self) {
        if std::mem::replace(&mut self.is_arranged, true) {
            return;
        }
        if self.policy == Policy::Ketama {
            self.ring = Arc::new(Ring::new(self.labels.values().map(String::as_str)));
        }
        self.ring_members = self.labels.keys().copied().collect();
        if let Some(guided) = &mut self.guided {
            guided.set_ring(&self.ring, &self.ring_members);
        }
    }

    /// Whose a request is, and what is sent in its place.
    fn decide(
        &mut self,
        number: u32,
        request: &[u8],
        is_whole: bool,
        members: &Members,
    ) -> Option<(Choice, Option<Vec<u8>>)> {
        self.arrange();
        if let Some(guided) = &mut self.guided {
            return guided.choose(number, request, is_whole, members);
        }
        let member = self.choose(request, members)?;
        Some((Choice { member, is_safe: self.content.is_safe(request), pins: false }, None))
    }

    fn choose(&mut self, request: &[u8], members: &Members) -> Option<MemberId> {
        // One that drains keeps its place in the ring, and others stand in for it: as if it were gone.
        let key = self.content.key_of(request).filter(|_| self.policy == Policy::Ketama);
        if let Some(key) = key {
            let candidates = self.ring.servers_of(key).filter_map(|at| self.ring_members.get(at).copied());
            return candidates.into_iter().find(|id| members.is_active(*id));
        }
        let active: Vec<MemberId> = self.ring_members.iter().copied().filter(|id| members.is_active(*id)).collect();
        let chosen = active.get(self.turn.checked_rem(active.len())?).copied();
        self.turn = self.turn.wrapping_add(1);
        chosen
    }

    /// Whether a request has a place among those that are remembered; those before its oldest are forgotten.
    fn admit(&mut self, head: Head) -> bool {
        let number = Tsn(head.number);
        let mut oldest = Tsn(head.oldest);
        if let Some(was) = self.oldest {
            // A frame may be overtaken by one that was sent after it.
            oldest = was.later(oldest);
            let steps = oldest.since(was);
            if steps <= REQUESTS_MAX {
                for step in 0..steps {
                    let answered = was.plus(step).0;
                    let request = self.requests.remove(&answered);
                    self.settle(request);
                    if let Some(guided) = &mut self.guided {
                        guided.forget(answered);
                    }
                }
            } else {
                self.requests.clear();
                self.owed.clear();
                if let Some(guided) = &mut self.guided {
                    guided.forget_all();
                }
            }
        }
        self.oldest = Some(oldest);
        !number.is_before(oldest) && number.since(oldest) < REQUESTS_MAX
    }

    fn assign(&mut self, number: u32, member: MemberId) {
        let request = Request { member: Some(member), is_acknowledged: false, is_answered: false };
        let was = self.requests.insert(number, request);
        self.settle(was);
        *self.owed.entry(member).or_default() += 1;
        self.tally(member).requests += 1;
    }

    /// A request is not waited for any more, or not of this member.
    fn settle(&mut self, request: Option<Request>) {
        let Some(Request { member: Some(member), is_answered: false, .. }) = request else { return };
        if let Some(count) = self.owed.get_mut(&member) {
            *count -= 1;
        }
        self.owed.retain(|_, count| *count > 0);
    }
}

/// The frame's own number for the switch: never zero, which says that it is new.
fn rtx_of(number: u32) -> u64 {
    u64::from(number) + 1
}

fn number_of(rtx: u64) -> Option<u32> {
    u32::try_from((rtx & !REFUSED).checked_sub(1)?).ok()
}

/// Has a member answer for one that is dead, if the client hears of its request's fate by that: whether it does, with
/// the request's number.
fn refuse(frame: &mut Frame<'_>, content: Content) -> Option<(u32, bool)> {
    let (head, _) = Head::split(&frame.payload)?;
    let (bytes, is_told) = content.in_place(head, MEMBER_DIED);
    frame.payload = Cow::Owned(bytes);
    Some((head.number, is_told))
}

impl Plugin for Router {
    fn add_connection(&mut self, connection: u32) {
        // Each connection begins elsewhere: many have one request alone.
        self.turn = connection as usize;
        self.connection = connection;
        if let Some(guided) = &mut self.guided {
            guided.add_connection(connection);
        }
    }

    fn remove_connection(&mut self, _connection: u32) {
        if let Some(guided) = &mut self.guided {
            guided.remove_connection();
        }
    }

    fn remove_member(&mut self, member: MemberId) {
        if let Some(guided) = &mut self.guided {
            guided.remove_member(member);
        }
        self.labels.remove(&member);
        self.owed.remove(&member);
        self.is_arranged = false;
        let theirs = self.requests.iter_mut().filter(|(_, request)| request.member == Some(member));
        for (number, request) in theirs {
            request.member = None;
            // Others come again, and go elsewhere; or they are acknowledged yet.
            if request.is_acknowledged {
                self.lost.push(*number);
            }
        }
    }

    fn may_go(&self, member: MemberId) -> bool {
        !self.owed.contains_key(&member)
    }

    fn redirect(&mut self, frame: &mut Frame<'_>, members: &Members, rtx: &mut u64) -> Verdict {
        let Some((head, request)) = Head::split(&frame.payload) else { return Verdict::Drop };
        let is_new = *rtx == 0;
        if is_new && !self.admit(head) {
            return Verdict::Drop;
        }
        // What the client waits for, whatever a module makes of it.
        let wants_answer = self.content.wants_answer(request);
        let decided = self.decide(head.number, request, frame.is_whole, members);
        let Some((Choice { member, is_safe, pins }, changed)) = decided else { return Verdict::Drop };
        if let Some(changed) = changed {
            frame.payload = Cow::Owned(head.frame(&changed));
        }
        *rtx = rtx_of(head.number);
        // One before the oldest comes again although its answer has come: of no interest any more.
        if wants_answer && (is_new || self.requests.contains_key(&head.number)) {
            self.assign(head.number, member);
        }
        Verdict::To { member, is_safe, pins }
    }

    fn follow(&mut self, frame: &mut Frame<'_>, member: MemberId, rtx: &mut u64) {
        let Some((head, request)) = Head::split(&frame.payload) else { return };
        if *rtx != 0 || self.admit(head) {
            *rtx = rtx_of(head.number);
            if self.content.wants_answer(request) {
                self.assign(head.number, member);
            }
        }
    }

    fn again(&mut self, frame: &mut Frame<'_>, rtx: &mut u64) {
        if *rtx & REFUSED != 0 {
            refuse(frame, self.content);
            return;
        }
        let Some(guided) = &mut self.guided else { return };
        let Some((head, request)) = Head::split(&frame.payload) else { return };
        match guided.repeat(head.number, request, frame.is_whole) {
            Ok(None) => {}
            Ok(Some(changed)) => frame.payload = Cow::Owned(head.frame(&changed)),
            // Without bytes it goes nowhere: the member may have other ones.
            Err(Differs) => frame.payload = Cow::Owned(Vec::new()),
        }
    }

    fn refuse(&mut self, frame: &mut Frame<'_>, members: &Members, rtx: &mut u64) -> Option<MemberId> {
        let member = members.active().next()?;
        let (number, is_told) = refuse(frame, self.content)?;
        if is_told {
            self.assign(number, member);
        } else if *rtx & REFUSED == 0 {
            let request = self.requests.remove(&number);
            self.settle(request);
            self.lost.push(number);
        }
        *rtx |= REFUSED;
        Some(member)
    }

    fn answer(&mut self, frame: &mut Frame<'_>, from: MemberId) {
        let Some((head, answer)) = Head::split(&frame.payload) else { return };
        if !self.content.is_answer(answer) {
            return;
        }
        let Some(request) = self.requests.get_mut(&head.number).filter(|request| request.member == Some(from)) else {
            return;
        };
        let was = *request;
        request.is_answered = true;
        self.settle(Some(was));
        if was.is_answered {
            return;
        }
        let error = self.content.error_of(answer);
        let tally = self.tally(from);
        tally.answers += 1;
        if error.is_some() {
            tally.errors += 1;
            tally.last_error = error;
        }
    }

    fn retire(&mut self, rtx: u64) {
        let Some(number) = number_of(rtx) else { return };
        if let Some(guided) = &mut self.guided {
            guided.retire(number);
        }
        let Some(request) = self.requests.get_mut(&number) else { return };
        if request.member.is_none() && !request.is_acknowledged {
            self.lost.push(number);
        }
        request.is_acknowledged = true;
    }
}

#[cfg(test)]
mod test;
