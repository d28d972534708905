//! What a service router does for others: send a resolvable packet on to an instance, and relay the answer back
//! (DESIGN §6, first contact). Stateless: no flow is made here.

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::time::Duration;

use margay_wire::{ErrorCode, ErrorRepr, Extension, Flags, FlowId, Kind, Message, RESOLVABLE_OFFSET, ResolvableRepr};

use crate::association::AssociationTable;
use crate::association::Neighbour;
use crate::association::draft::{Arrival, Draft, Reply};
use crate::machine::sal::Sal;
use crate::resolve::instance::sticky;
use crate::resolve::named::{forward_named, named_host};
use crate::resolve::way::Sender;
use crate::table::{Action, Resolution};
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::hop;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// Hosts whose router was away for a moment are back within this time after its start: they try at first after 100,
/// then 200, then 400 ms. And who is back has said by then what it serves.
pub const HOSTS_AWAITED: Duration = Duration::from_secs(1);
/// Where a router was away for longer its hosts may take so long to come back: they try every other second then. An
/// initiator goes on asking for longer.
pub const ABSENT_AWAITED: Duration = Duration::from_secs(3);

/// Stands for "the router that sent this": it does not know which of its addresses the next hop sees.
pub(crate) const VIA_SENDER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), margay_wire::PORT);

/// A SYN for a listener here, whose session is for this port of the service.
fn arrival_of<'a>(
    message: &'a Message<'a>,
    resolvable: &ResolvableRepr,
    port: u16,
    reply: Reply,
    syn_len: usize,
) -> Arrival<'a> {
    let reply = Reply { is_copy: message.flags.contains(Flags::COPIED), ..reply };
    Arrival {
        message,
        service: ServiceId(resolvable.service),
        port,
        reply,
        syn_len,
        nonce: resolvable.nonce,
        app: None,
    }
}

impl Sal {
    /// This router has just started, and hosts are still to tell it what they serve: for [`HOSTS_AWAITED`], or
    /// [`ABSENT_AWAITED`] where one that was registered before is not back, a name that it does not know has no answer,
    /// rather than a no. Whoever asks asks again.
    pub fn await_hosts(&mut self, now: Instant) {
        self.hosts_awaited = now + if self.hosts_absent.is_empty() { HOSTS_AWAITED } else { ABSENT_AWAITED };
    }

    /// This host has just started, and its routers are still to say what it may serve, and its hosts what they do:
    /// until [`take_connects`](Self::take_connects) a SYN from the network has no answer. Whoever asks asks again.
    pub fn hold_connects(&mut self) {
        self.holds_connects = true;
    }

    /// SYNs from the network are answered from now on.
    pub fn take_connects(&mut self) {
        self.holds_connects = false;
    }

    /// A host has registered.
    pub(crate) fn note_present(&mut self, now: Instant, host: HostId) {
        if self.hosts_absent.remove(&host) && self.hosts_absent.is_empty() {
            self.hosts_awaited = self.hosts_awaited.min(now + HOSTS_AWAITED);
        }
    }

    /// Whether somebody may serve a name of whom this router has not heard yet.
    pub(crate) fn is_awaited(&self, now: Instant, service: &ServiceId) -> bool {
        now < self.hosts_awaited && self.table.lookup(service).is_none()
    }

    /// A SYN from the network: for a listener here, to be forwarded, or for nobody.
    pub(crate) fn handle_syn(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        let resolvable = message.resolvable.ok_or(DropReason::Malformed)?;
        let session = message.session().ok_or(DropReason::Malformed)?;
        if self.holds_connects {
            return Err(DropReason::Awaited);
        }
        let service = ServiceId(resolvable.service);
        let is_chained = message.chain().is_some();
        if is_chained && (message.dst_flow != FlowId(0) || session.protocol == GREETING) {
            return Err(DropReason::Malformed);
        }
        match session.protocol {
            GREETING if self.came_to_all => return self.handle_search(now, from, message, &resolvable, datagram),
            GREETING => return self.handle_greeting(now, from, message, resolvable.nonce, datagram.len()),
            6 | 17 => {}
            _ => return Err(DropReason::Protocol),
        }
        if message.dst_flow != FlowId(0) {
            return self.handle_related(now, from, message, datagram.len());
        }
        if let Some(listener) = self.listener_of_new_path(message, &service) {
            let (port, demux) = listener?;
            let reply = self.reply_path(from, &resolvable, datagram);
            return self.respond(now, &arrival_of(message, &resolvable, port, reply, datagram.len()), &demux);
        }
        let sticky = sticky(message.src_flow, resolvable.nonce);
        let sender = if resolvable.via.is_some() { Sender::Router(from) } else { Sender::Host };
        if let Some(host) = named_host(message).filter(|host| *host != self.config.host_id()) {
            return forward_named(self, now, (from, sender), message, datagram, host);
        }
        match self.pick(&service, sticky, session.protocol, session.service_port, sender) {
            Resolution::Box(rule, _) => self.handle_chained(now, from, message, datagram, rule),
            Resolution::Demux(rule, _) if is_chained => self.handle_chained(now, from, message, datagram, rule),
            Resolution::Demux(rule, demux) => {
                let demux = demux.clone();
                self.table.note_use(now, rule);
                let (reply, port) = (self.reply_path(from, &resolvable, datagram), session.service_port);
                self.respond(now, &arrival_of(message, &resolvable, port, reply, datagram.len()), &demux)
            }
            Resolution::Forward(rule, hop) if named_host(message).is_none() => {
                let hop = *hop;
                let mut beside = self.beside(rule, sender);
                if !beside.is_empty() {
                    beside.push((rule, hop));
                    return self.forward_all(now, from, &resolvable, datagram, &beside);
                }
                self.table.note_use(now, rule);
                self.forward(from, &resolvable, datagram, Kind::Syn, hop.address, hop.host)
            }
            Resolution::Delay(rule, resolver) => {
                self.delay_other(now, from, message, service, datagram, (rule, resolver))
            }
            Resolution::Drop(rule) => {
                self.table.note_use(now, rule);
                Err(DropReason::ServiceDrop)
            }
            Resolution::None if self.is_awaited(now, &service) => Err(DropReason::Awaited),
            Resolution::None if self.came_to_all => self.pass_on(now, from, message, &resolvable, datagram),
            Resolution::None | Resolution::Forward(..) => {
                self.answer_nobody(now, from, message, &service, datagram);
                Err(DropReason::NoService)
            }
        }
    }

    /// Where answers to a resolvable packet go. A reply-to that differs from the sender counts only on a tagged hop.
    pub(crate) fn reply_path(&mut self, from: SocketAddr, resolvable: &ResolvableRepr, datagram: &[u8]) -> Reply {
        let Some(reply_to) = resolvable.reply_to else { return Reply::straight(from) };
        if self.came_to_all {
            return Reply { via: Some(from), is_detour: true, ..Reply::straight(reply_to) };
        }
        if !self.associations.is_hop_tagged(from, resolvable, datagram) {
            self.counters.drop(DropReason::BadHopTag);
            return Reply::straight(from);
        }
        let via = resolvable.via.filter(|via| !via.ip().is_unspecified()).unwrap_or(from);
        // The first router of another site shares no key with this host, and would relay nothing for it; a copy to it
        // would only use up what an answer may have of bytes.
        let via = Some(via).filter(|via| self.associations.hop_key_of(*via).is_some());
        Reply { via, ..Reply::straight(reply_to) }
    }

    pub(crate) fn forward(
        &mut self,
        from: SocketAddr,
        resolvable: &ResolvableRepr,
        datagram: &[u8],
        kind: Kind,
        to: SocketAddr,
        host: Option<HostId>,
    ) -> Result<(), DropReason> {
        if resolvable.hop_limit <= 1 {
            return Err(DropReason::HopLimit);
        }
        let mut onward = *resolvable;
        onward.hop_limit -= 1;
        let passed_a_router = resolvable.via.is_some() && self.associations.is_hop_tagged(from, resolvable, datagram);
        if passed_a_router {
            onward.via = resolvable.via.map(|via| if via.ip().is_unspecified() { from } else { via });
        } else {
            onward.reply_to = Some(from);
            onward.via = Some(VIA_SENDER);
        }
        let hop_key = self.associations.hop_key_to(host, to);
        let copy = rewrite(datagram, &onward, hop_key).ok_or(DropReason::Malformed)?;
        self.counters.forwarded += 1;
        self.transmit(to, copy, kind);
        Ok(())
    }

    /// An RSYN for a host that is registered here: to where its own association leads. Nothing is kept.
    pub(crate) fn forward_rsyn(
        &mut self,
        from: SocketAddr,
        resolvable: &ResolvableRepr,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        let host = ServiceId(resolvable.service).host().filter(|_| self.config.router).ok_or(DropReason::Unexpected)?;
        let to = self.associations.registered(host).ok_or(DropReason::NoService)?;
        self.forward(from, resolvable, datagram, Kind::Rsyn, to, Some(host))
    }

    /// Says at once that nobody serves the name, or not on that port; believed only by a host that shares an
    /// association with this one.
    pub(crate) fn answer_nobody(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
        service: &ServiceId,
        datagram: &[u8],
    ) {
        let claimed = message.key_exchange().map(|exchange| HostId(exchange.host_id));
        let known = claimed.and_then(|host| self.associations.by_host(host)).map(|association| association.local_id);
        let Some(resolvable) = message.resolvable else { return };
        if message.flags.contains(Flags::COPIED) || !self.answers.take(now) {
            return;
        }
        let is_drained = self.would_take_undrained(message, service);
        let Some(local_id) = known else {
            let code = if is_drained { ErrorCode::Drained } else { ErrorCode::NoService };
            return self.tell_router_of_nobody(from, message, datagram, code);
        };
        // The service is here but not this port or protocol of it: that is a refusal, not an absence. The initiator
        // hears it itself; it may have come through a router, which knows nothing of the flow.
        let is_here = self
            .table
            .lookup(service)
            .is_some_and(|set| set.iter().any(|(_, rule)| matches!(rule.action, Action::Demux(_))));
        if is_here {
            let reply = self.reply_path(from, &resolvable, datagram);
            let (syn_len, nonce) = (datagram.len(), resolvable.nonce);
            let arrival = Arrival { message, service: *service, port: 0, reply, syn_len, nonce, app: None };
            let code = if is_drained { ErrorCode::Drained } else { ErrorCode::Refused };
            return self.refuse_syn(&arrival, local_id, code);
        }
        let extensions = [Extension::Error(ErrorRepr { code: ErrorCode::NoService, text: "" })];
        let mut draft = Draft::new(Kind::Error, message.src_flow, FlowId(0));
        draft.extensions = &extensions;
        let epoch = self.config.epoch;
        let Some(association) = self.associations.get_mut(local_id) else { return };
        if let Some(datagram) = draft.seal(association, epoch) {
            self.transmit(from, datagram, Kind::Error);
        }
    }

    /// An answer that an instance asks this router to relay to the initiator, whose NAT or firewall lets only us in.
    pub(crate) fn relay(&mut self, from: SocketAddr, message: &Message<'_>, datagram: &[u8]) -> Result<(), DropReason> {
        let resolvable = message.resolvable.ok_or(DropReason::Malformed)?;
        let initiator = resolvable.reply_to.ok_or(DropReason::Malformed)?;
        if !self.associations.is_hop_tagged(from, &resolvable, datagram) {
            return Err(DropReason::BadHopTag);
        }
        if resolvable.hop_limit <= 1 {
            return Err(DropReason::HopLimit);
        }
        let mut onward = resolvable;
        onward.hop_limit -= 1;
        // The initiator sends its ACK straight to where the answer came from.
        onward.via = Some(from);
        let copy = rewrite(datagram, &onward, None).ok_or(DropReason::Malformed)?;
        self.counters.relayed += 1;
        // Who names the host may know an address only that the host has left since.
        let named = ServiceId(resolvable.service).host().and_then(|host| self.associations.registered(host));
        self.transmit(named.unwrap_or(initiator), copy, message.kind);
        Ok(())
    }
}

impl AssociationTable {
    /// Where a host is that is registered with this router.
    pub(crate) fn registered(&self, host: HostId) -> Option<SocketAddr> {
        self.by_host(host).filter(|association| association.router).map(|association| association.remote)
    }

    pub(crate) fn is_hop_tagged(&self, from: SocketAddr, resolvable: &ResolvableRepr, datagram: &[u8]) -> bool {
        let tagged = datagram.get(..margay_wire::HOP_TAGGED_LEN);
        match (self.hop_key_of(from), tagged) {
            (Some(key), Some(tagged)) => hop::is_valid(&key, tagged, &resolvable.hop_tag),
            _ => false,
        }
    }

    /// The hop key shared with the router or host at `address`.
    pub(crate) fn hop_key_of(&self, address: SocketAddr) -> Option<[u8; 16]> {
        self.hop_key(Neighbour::At(address))
    }

    /// The hop key shared with a next hop: the host's, or that of whoever is known to be at the address.
    pub(crate) fn hop_key_to(&self, host: Option<HostId>, address: SocketAddr) -> Option<[u8; 16]> {
        let of_host = host.and_then(|host| self.hop_key(Neighbour::Host(host)));
        of_host.or_else(|| self.hop_key_of(address))
    }
}

impl Config {
    /// The resolvable part of an RSYN that is for another host than this one, which only passes it on.
    pub(crate) fn rsyn_for_another(&self, message: &Message<'_>) -> Option<ResolvableRepr> {
        let of_another = |part: &ResolvableRepr| !ServiceId(part.service).is_at_host(self.host_id());
        message.resolvable.filter(|part| message.kind == Kind::Rsyn && of_another(part))
    }
}

/// The datagram with another resolvable part, tagged for the next hop. Tags between end hosts leave that part out.
pub(crate) fn rewrite(datagram: &[u8], resolvable: &ResolvableRepr, hop_key: Option<[u8; 16]>) -> Option<Vec<u8>> {
    let mut copy = datagram.to_vec();
    resolvable.emit(copy.get_mut(RESOLVABLE_OFFSET..RESOLVABLE_OFFSET + margay_wire::RESOLVABLE_LEN)?);
    Sal::tag_hop(&mut copy, hop_key);
    Some(copy)
}

/// Whether a router's answer is for this host rather than to be relayed.
pub(crate) fn is_relay_request(message: &Message<'_>) -> bool {
    // Set by the router itself once it has relayed: the initiator sees where the answer came from.
    message.flags.contains(Flags::RELAY) && message.resolvable.is_some_and(|resolvable| resolvable.via.is_none())
}
