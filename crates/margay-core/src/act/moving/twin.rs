//! One host key in two places (DESIGN §18): a copy of a machine; or one machine, that has booted anew or was restored
//! from an older copy.
//!
//! Whoever proves a key in a handshake, and is not the user of it that this host knows, is a *newcomer*: another
//! boot, or an epoch that has gone back. The *elder* is asked, under the association with it, at every address where
//! it may be. If it answers, it keeps its place, and the newcomer is kept out; if it does not, it is gone, and the
//! newcomer takes its place. Meanwhile what the newcomer has sent waits here. All three are told, so that each of
//! their logs says what is the matter.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{ErrorCode, ErrorRepr, Extension, FlowId, Kind, Message, MoveFlags, MoveRepr};

use crate::association::Association;
use crate::association::AssociationTable;
use crate::association::draft::Draft;
use crate::association::location::{PAIRS_MAX, Pair};
use crate::association::twin::Twin;
use crate::cache::packet::Unreachable;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::event::EventQueue;
use crate::trust::handshake::Introduction;
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::{FairShares, Peer};
use crate::types::key::HostId;
use crate::types::time::Instant;

/// Elders that are asked at once. Of more newcomers the rest waits for its own repetitions.
const INQUIRIES_MAX: usize = 64;
/// How often an elder is asked, before it is taken for gone.
const PROBES: u8 = 3;
/// How long each time; two known round trips, where those are longer.
const WAIT: Duration = Duration::from_millis(200);
const WAIT_MAX: Duration = Duration::from_secs(1);
/// A verdict is good for so long; then the elder is asked anew.
const VERDICT: Duration = Duration::from_secs(5);
/// This host says so often that its key is shown elsewhere.
const TOLD_REST: Duration = Duration::from_secs(60);
/// What a program hears whose connection ends at a newcomer.
pub(crate) const KEPT_OUT: &str =
    "two hosts use the key of the host that answered, and this is the later one; the log says where both are";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The elder has been asked so often, and is asked again, or taken for gone, at the deadline.
    Asking { asked: u8 },
    /// The elder has answered.
    Here,
    /// It has not.
    Gone,
}

/// What a newcomer has sent last, to be heard when it is known whether it is the only one.
#[derive(Debug)]
struct Held {
    local: Option<IpAddr>,
    from: SocketAddr,
    datagram: Vec<u8>,
}

#[derive(Debug)]
struct Inquiry {
    host: HostId,
    boot_id: [u8; 16],
    newcomer: SocketAddr,
    /// Number of its probes.
    number: u32,
    state: State,
    due: Instant,
    held: Option<Held>,
}

/// The inquiries of one host.
#[derive(Debug, Default)]
pub(crate) struct Twins {
    inquiries: Vec<Inquiry>,
    /// The newcomer whose datagram is in hand.
    in_hand: Option<u32>,
    /// When a peer last told this host that its key is shown elsewhere.
    told: Option<Instant>,
}

impl Twins {
    pub fn next_deadline(&self) -> Option<Instant> {
        self.inquiries.iter().map(|inquiry| inquiry.due).min()
    }
}

impl Sal {
    /// Whether a host that has just proved the key of `host`, at another place than the one that this host knows, may
    /// take that one's place.
    ///
    /// # Errors
    ///
    /// The elder is there; or it is still to be seen whether it is, and what is in hand is heard again then.
    pub(crate) fn admit_newcomer(
        &mut self,
        now: Instant,
        host: HostId,
        theirs: &Introduction,
        from: SocketAddr,
    ) -> Result<(), DropReason> {
        let is_it = |inquiry: &Inquiry| inquiry.host == host && inquiry.boot_id == theirs.boot_id;
        if let Some(at) = self.twins.inquiries.iter().position(is_it) {
            let inquiry = &mut self.twins.inquiries[at];
            return match inquiry.state {
                State::Asking { .. } => {
                    self.twins.in_hand = Some(inquiry.number);
                    Err(DropReason::Inquired)
                }
                State::Here => Err(DropReason::KeptOut),
                State::Gone => {
                    self.twins.inquiries.remove(at);
                    Ok(())
                }
            };
        }
        if self.elders_places(host, from).is_empty() {
            return Ok(());
        }
        let peer = |host, newcomer: SocketAddr| match self.associations.by_host(host).map(Association::peer) {
            Some(Peer::Member(host)) => Peer::Member(host),
            _ => Peer::Unauthenticated(newcomer.ip()),
        };
        let mut shares = FairShares::new(INQUIRIES_MAX, 0);
        self.twins.inquiries.iter().for_each(|one| shares.add(peer(one.host, one.newcomer), 1));
        shares.check(peer(host, from), 1).map_err(|_| DropReason::Full)?;
        let (number, boot_id) = (self.rng.u32(), theirs.boot_id);
        let state = State::Asking { asked: 0 };
        self.twins.inquiries.push(Inquiry { host, boot_id, newcomer: from, number, state, due: now, held: None });
        self.twins.in_hand = Some(number);
        self.inquiries_due(now);
        Err(DropReason::Inquired)
    }

    /// Where the elder may be: not where the newcomer is.
    fn elders_places(&self, host: HostId, newcomer: SocketAddr) -> Vec<Pair> {
        let mut pairs: Vec<Pair> = self.associations.pair_of(host).into_iter().collect();
        pairs.extend(self.pairs_for(host).into_iter().filter(|pair| Some(*pair) != self.associations.pair_of(host)));
        pairs.retain(|pair| pair.remote != newcomer);
        pairs.truncate(PAIRS_MAX);
        pairs
    }

    /// The datagram in hand is a newcomer's: it waits.
    pub(crate) fn hold_newcomer(&mut self, from: SocketAddr, datagram: &[u8]) {
        let Some(number) = self.twins.in_hand.take() else { return };
        let local = self.arrival;
        if let Some(inquiry) = self.twins.inquiries.iter_mut().find(|inquiry| inquiry.number == number) {
            inquiry.held = Some(Held { local, from, datagram: datagram.to_vec() });
        }
    }

    /// Asks elders again, and takes those for gone that have been asked often enough. Verdicts that are old are
    /// forgotten.
    pub(crate) fn inquiries_due(&mut self, now: Instant) {
        self.twins.inquiries.retain(|inquiry| matches!(inquiry.state, State::Asking { .. }) || inquiry.due > now);
        let due: Vec<u32> = self.twins.inquiries.iter().filter(|one| one.due <= now).map(|one| one.number).collect();
        for number in due {
            let Some(inquiry) = self.twins.inquiries.iter_mut().find(|inquiry| inquiry.number == number) else {
                continue;
            };
            let (host, newcomer) = (inquiry.host, inquiry.newcomer);
            let State::Asking { asked } = inquiry.state else { continue };
            if asked >= PROBES {
                (inquiry.state, inquiry.due) = (State::Gone, now + VERDICT);
                continue;
            }
            let rtt = self.associations.by_host(host).and_then(|elder| elder.rtt).unwrap_or_default();
            (inquiry.state, inquiry.due) = (State::Asking { asked: asked + 1 }, now + (rtt * 2).clamp(WAIT, WAIT_MAX));
            for pair in self.elders_places(host, newcomer) {
                // Not the first of a suspicion, which would say that this host goes by that pair now.
                let probe = MoveRepr { number, token: 1, challenge: 0, address: newcomer, flags: MoveFlags::TWIN };
                let extensions = [Extension::Move(probe)];
                let mut draft = Draft::new(Kind::Probe, FlowId(0), FlowId(0));
                draft.extensions = &extensions;
                self.send_over(host, pair, draft);
            }
        }
    }

    /// Hears what newcomers have sent, as far as it is known now whether they are the only ones.
    pub(crate) fn hear_newcomers(&mut self, now: Instant) {
        while let Some(held) = self.twins.inquiries.iter_mut().find_map(|inquiry| {
            let is_decided = !matches!(inquiry.state, State::Asking { .. });
            inquiry.held.take_if(|_| is_decided)
        }) {
            (self.arrival, self.came_to_all) = (held.local, false);
            if let Err(reason) = self.dispatch(now, held.from, &held.datagram) {
                self.counters.drop(reason);
            }
            self.seal_again();
        }
        // What leads to another inquiry comes again by itself.
        self.twins.in_hand = None;
    }

    /// Tells a newcomer that has connected to this host that it is kept out. `once` is the association that its
    /// handshake would have made.
    pub(crate) fn say_kept_out(&mut self, id: FlowId, message: &Message<'_>, from: SocketAddr, mut once: Association) {
        let extensions = [Extension::Error(ErrorRepr { code: ErrorCode::KeptOut, text: "" })];
        let mut draft = Draft::new(Kind::Fail, message.src_flow, id);
        draft.extensions = &extensions;
        if let Some(datagram) = draft.seal(&mut once, self.config.epoch) {
            self.transmit(from, datagram, Kind::Fail);
        }
        self.drop_half_open(id);
    }

    /// The host that answered a connection of this one is a newcomer, and kept out.
    pub(crate) fn refuse_newcomers_answer(&mut self, now: Instant, id: FlowId) {
        if !self.others_may_answer(now, id, ErrorCode::KeptOut) {
            self.fail_connecting(id, Unreachable::Host, KEPT_OUT);
        }
    }
}

impl Twins {
    /// An answer to a probe: whether it is that of an elder, which is there.
    pub(crate) fn hear_elder(
        &mut self,
        associations: &AssociationTable,
        events: &mut EventQueue,
        now: Instant,
        host: HostId,
        number: u32,
    ) -> bool {
        let elder = associations.by_host(host).map(|association| association.remote);
        let is_it = |inquiry: &&mut Inquiry| inquiry.number == number && inquiry.host == host;
        let Some((inquiry, elder)) = self.inquiries.iter_mut().find(is_it).zip(elder) else { return false };
        if matches!(inquiry.state, State::Asking { .. }) {
            (inquiry.state, inquiry.due) = (State::Here, now + VERDICT);
            events.push(Event::Twin(Twin::KeptOut { host, elder, newcomer: inquiry.newcomer }));
        }
        true
    }

    /// A peer asks whether this host is there, because another one shows its key.
    pub(crate) fn note_twin(&mut self, events: &mut EventQueue, now: Instant, peer: HostId, newcomer: SocketAddr) {
        if self.told.is_none_or(|told| now.since(told) >= TOLD_REST) {
            self.told = Some(now);
            events.push(Event::Twin(Twin::Elsewhere { peer, newcomer }));
        }
    }
}
