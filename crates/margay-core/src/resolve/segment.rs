//! Ad hoc: a name that no other rule leads to is asked for on the network segments that this host is on. Who serves it
//! answers, and the first answer by a host that may speak for the name wins (DESIGN §8; Serval §4.2, §4.4).
//!
//! A rule that leads to [`SEGMENT`] does it. Hosts that relay pass a SYN on to their other segments, once, and its
//! answers back: no host on the way holds a key with another, so that none would believe a reply-to. Only what came to
//! a whole segment is passed on, which nobody outside can bring about.

use alloc::collections::{BTreeMap, VecDeque};
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::time::Duration;

use margay_wire::{Flags, FlowId, Kind, Message, ResolvableRepr};

use crate::machine::sal::Sal;
use crate::resolve::forward::{VIA_SENDER, rewrite};
use crate::types::drop_reason::DropReason;
use crate::types::rate::RateLimit;
use crate::types::time::Instant;

/// Stands for every host on the segments that this host is on, of both families: as a next hop, and as where a datagram
/// goes.
pub const SEGMENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::BROADCAST), margay_wire::PORT);

/// Who is asked is near: nobody waits for long.
pub const SEGMENT_TIMEOUT: Duration = Duration::from_millis(2000);
/// After one host has refused, others may still answer for so long.
pub(crate) const OTHERS_WAIT: Duration = Duration::from_millis(300);
/// A SYN that is sent again comes later than this; what comes sooner is a copy by another relay.
pub(crate) const COPIES: Duration = Duration::from_millis(100);
/// SYNs whose answers are remembered to be passed back; beyond it the oldest is forgotten.
const ASKED_MAX: usize = 4096;
/// How many SYNs are passed on in a second.
const PASSED_PER_S: u32 = 1000;

/// Whether a datagram that came to this address of its header came to all hosts of a segment.
pub fn is_for_all(local: IpAddr) -> bool {
    match local {
        IpAddr::V4(v4) => v4.is_broadcast() || v4.is_multicast(),
        IpAddr::V6(v6) => v6.is_multicast(),
    }
}

/// A SYN that was passed on.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// Who it came from.
    from: SocketAddr,
    at: Instant,
}

/// What a relay remembers of others' SYNs.
pub(crate) struct Relay {
    asked: BTreeMap<FlowId, Asked>,
    order: VecDeque<FlowId>,
    rate: RateLimit,
}

impl Relay {
    pub(crate) fn new(now: Instant) -> Self {
        Self { asked: BTreeMap::new(), order: VecDeque::new(), rate: RateLimit::new(PASSED_PER_S, now) }
    }

    /// Whether the SYN is to be passed on. The way back is the way that its first copy came.
    fn note(&mut self, flow: FlowId, asked: Asked) -> bool {
        if let Some(known) = self.asked.get_mut(&flow) {
            let is_again = known.from == asked.from && asked.at.since(known.at) >= COPIES;
            if is_again {
                known.at = asked.at;
            }
            return is_again && self.rate.take(asked.at);
        }
        if !self.rate.take(asked.at) {
            return false;
        }
        if self.order.len() >= ASKED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.asked.remove(&oldest);
        }
        self.order.push_back(flow);
        self.asked.insert(flow, asked);
        true
    }
}

impl Sal {
    /// Whether this host passes on what is asked on one of its segments to the others.
    pub fn set_relay(&mut self, now: Instant, is_relay: bool) {
        self.relay = is_relay.then(|| Relay::new(now));
    }

    /// A SYN that came to a whole segment, for a name that nothing is known of here. Who has nothing to say keeps
    /// silent.
    pub(crate) fn pass_on(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
        resolvable: &ResolvableRepr,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        let is_own = self.flows.get(message.src_flow).is_some();
        let relay = self.relay.as_mut().filter(|_| !is_own).ok_or(DropReason::NoService)?;
        if resolvable.hop_limit <= 1 {
            return Err(DropReason::HopLimit);
        }
        if !relay.note(message.src_flow, Asked { from, at: now }) {
            return Err(DropReason::RateLimited);
        }
        let mut onward = *resolvable;
        onward.hop_limit -= 1;
        (onward.reply_to, onward.via) = (Some(resolvable.reply_to.unwrap_or(from)), Some(VIA_SENDER));
        let copy = rewrite(datagram, &onward, None).ok_or(DropReason::Malformed)?;
        self.counters.forwarded += 1;
        self.transmit(SEGMENT, copy, Kind::Syn);
        Ok(())
    }

    /// Whether an answer is one to a SYN that this host has passed on.
    pub(crate) fn is_to_pass_back(&self, message: &Message<'_>) -> bool {
        let is_asked = self.relay.as_ref().is_some_and(|relay| relay.asked.contains_key(&message.dst_flow));
        is_asked && message.flags.contains(Flags::RELAY) && matches!(message.kind, Kind::SynAck | Kind::Error)
    }

    /// Passes an answer back by the way that the SYN came.
    pub(crate) fn pass_back(
        &mut self,
        from: SocketAddr,
        message: &Message<'_>,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        let mut onward = message.resolvable.ok_or(DropReason::Malformed)?;
        let asked = self.relay.as_ref().and_then(|relay| relay.asked.get(&message.dst_flow));
        let to = asked.ok_or(DropReason::UnknownFlow)?.from;
        if onward.hop_limit <= 1 {
            return Err(DropReason::HopLimit);
        }
        onward.hop_limit -= 1;
        // The first relay writes down where the answer set out, and the initiator sends its ACK there.
        onward.via = onward.via.or(Some(from));
        let copy = rewrite(datagram, &onward, None).ok_or(DropReason::Malformed)?;
        self.counters.relayed += 1;
        self.transmit(to, copy, message.kind);
        Ok(())
    }
}
