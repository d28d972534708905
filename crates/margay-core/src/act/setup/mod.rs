//! Setting a flow up: SYN, SYN-ACK, ACK, and the confirmation of the ACK (DESIGN §6, §7).
//!
//! The SYN carries the application's first packet to whoever the service table picks; the instance's SYN-ACK carries
//! the answer straight back; the ACK proves the initiator. Between hosts that have never met the three also carry a
//! Noise XX handshake, between others they are tagged under the association. The responder confirms the ACK, so that a
//! lost ACK is sent again even when the application has nothing to say.

mod ack;
mod initiator;
mod listener_tuple;
mod proof;
mod refusal;
mod responder;
mod right_to_answer;
mod right_to_connect;
mod syn;
mod syn_digest;

pub(crate) use initiator::Start;
use syn_digest::digest_of_syn;

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{
    CHANGES, CapabilitiesRepr, ErrorCode, Extension, FlowId, FlowPortRepr, HandoverRepr, KeyExchangeRepr, Message,
    NextProtocol, ReconfigurationRepr, SEAL_TAG_LEN, SessionId,
};

use crate::act::fetch::Fetch;
use crate::act::grant::{Asks, Granted, Offer};
use crate::act::path::related::Related;
use crate::act::secure::Demands;
use crate::association::AssociationTable;
use crate::association::draft::{Arrival, Reply, relayed_from};
use crate::association::location::Pair;
use crate::association::{FEC, SCTP};
use crate::cache::packet;
use crate::cache::packet::{Parsed, Unreachable};
use crate::leg::flow_ports::FlowPorts;
use crate::leg::seal::Cipher;
use crate::machine::sal::Sal;
use crate::resolve::instance::Pin;
use crate::resolve::segment::SEGMENT;
use crate::session::flow::FlowTable;
use crate::table::Allow;
use crate::trust::handshake::{Introduction, Keys, Responder};
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::hop;
use crate::types::key::{HostId, HostPublic};
use crate::types::name::ServiceId;
use crate::types::time::Instant;

/// A SYN is padded to this many bytes, so that no answer to it is larger than itself (DESIGN §6).
pub(crate) const SYN_LEN: usize = 1200;
/// First wait for an answer; doubles up to [`RETRY_MAX`].
pub(crate) const RETRY_FIRST: Duration = Duration::from_millis(150);
pub(crate) const RETRY_MAX: Duration = Duration::from_millis(1000);
/// A listener that has said nothing for so long lets the initiator know: as long as a TCP waits before it sends its
/// SYN again (RFC 6298 §2).
pub(crate) const LISTENER_PATIENCE: Duration = Duration::from_secs(1);
/// An application is told of failure after this long without an answer.
pub(crate) const SETUP_TIMEOUT: Duration = Duration::from_millis(5000);
/// A second instance's answer is still recognised, and reset, for this long.
pub(crate) const LATE_WINDOW: Duration = Duration::from_millis(3000);
/// Bit of the CAPABILITIES word: carries `encap`.
pub(crate) const STACK_ENCAP: u32 = 1 << 2;
/// Bytes that DATA and train headers take of a datagram.
pub(crate) const ENCAP_OVERHEAD: u16 = 24;
/// What people are told.
const NO_COMMON_STACK: &str =
    "one end demands `secure` and the other cannot carry the connection so; run the same version on both hosts";
/// What the initiator keeps until it has the answer.
pub(crate) struct InitiatorSetup {
    pub nonce: u64,
    /// The client's address as SESSION has it, unless the session goes through boxes: the same in every copy.
    pub client: SocketAddr,
    pub next_hop: SocketAddr,
    /// Where a SYN was sent to a host that serves the name: it answers itself, and nobody relays for it.
    pub instance_at: Option<SocketAddr>,
    /// Who gets a copy.
    pub beside: Vec<SocketAddr>,
    /// The application's own first packet.
    pub first: Vec<u8>,
    /// Whether the SYN as sent last had room for it.
    pub first_carried: bool,
    /// Its later packets, UDP only.
    pub held: Vec<Vec<u8>>,
    pub retries: u32,
    pub give_up: Instant,
    pub handshake: HandshakeSeed,
    /// The index that the peer shall use for a new association.
    pub association: u32,
    pub cookie: Option<[u8; 24]>,
    /// The peer shall not count on an older association.
    pub full: bool,
    /// The flow port that the SYN offers.
    pub flow_port: Option<u16>,
    /// The peer's flow that this one is related to, if it is to any.
    pub related: Option<Related>,
    /// The next hop is the one instance that the program's packet was resolved to, and that firmly.
    pub pin: Option<Pin>,
    /// What it asks for in the place of a connection.
    pub asks: Option<Asks>,
    /// What it is set up for in the place of a connection.
    pub fetch: Option<Fetch>,
    /// The session that it is to be another way of, in the place of a connection's first.
    pub begin: Option<ReconfigurationRepr>,
    /// A digest of what the SYN asks for, as it was sent last.
    pub syn_digest: [u8; 32],
    /// What one of several hosts has refused it with, while others may still answer.
    pub refused: Option<ErrorCode>,
    /// An instance has said that its listener says nothing.
    pub is_listener_silent: bool,
}

impl InitiatorSetup {
    /// The one host that may answer, where a peer has named it.
    pub fn named_host(&self) -> Option<HostId> {
        let taker = self.fetch.map(|fetch| fetch.taker);
        let anchor = || self.begin.filter(|_| self.pin == Some(Pin::Only)).map(|begin| HostId(begin.host));
        taker.or_else(anchor)
    }

    /// The address that an answer set out from. A router that relays an answer names that address; it is believed if
    /// this host is registered with it, or if the SYN was sent to it for it to find an instance.
    ///
    /// # Errors
    ///
    /// Somebody else says to have relayed it.
    pub fn source_of_answer(
        &self,
        associations: &AssociationTable,
        message: &Message<'_>,
        from: SocketAddr,
    ) -> Result<SocketAddr, DropReason> {
        let Some(source) = relayed_from(message) else { return Ok(from) };
        let is_resolved = self.pin.is_some()
            || self.related.is_some()
            || self.fetch.is_some()
            || self.instance_at == Some(self.next_hop);
        // Any host of the segment may be the relay; see [`LateAnswers::is_hearsay`].
        let is_asked = [from, SEGMENT].contains(&self.next_hop) || self.beside.contains(&from);
        let is_believed = is_asked && !is_resolved || associations.is_own_router_at(from);
        if is_believed { Ok(source) } else { Err(DropReason::WrongPath) }
    }
}

/// What the responder keeps until the initiator is proved.
pub(crate) struct ResponderSetup {
    pub initiator_flow: FlowId,
    pub claimed: HostId,
    /// Index that the initiator wants for a new association.
    pub initiator_association: u32,
    pub reply: Reply,
    pub syn_len: usize,
    /// Of the SYN that began the flow. Copies of it change nothing that they ask for.
    pub syn_digest: [u8; 32],
    pub message_1: Vec<u8>,
    pub handshake: Option<Responder>,
    /// What its third message has shown, while it is asked whether the peer is the only one with its key: it is read
    /// once only.
    pub shown_by: Option<Box<Shown>>,
    /// The index reserved here for a new association.
    pub association: u32,
    pub datagram_max: u16,
    pub allow: Allow,
    /// Whether it is to be refused once its sender is proved, where that is known before.
    pub ruling: Result<(), ErrorCode>,
    /// By what this host could answer for the name when it was asked: it answers by that, also where it has left
    /// meanwhile.
    pub chain: Vec<u8>,
    /// SYN-ACK datagrams as sent, to be sent again.
    pub answers: Vec<(SocketAddr, Vec<u8>)>,
    /// When they were sent, if only once.
    pub answered: Option<Instant>,
    /// The application's SYN-ACK, from which it can be reset.
    pub app_answer: Option<Vec<u8>>,
    /// The first datagram, delivered once the peer is proved.
    pub first: Option<Vec<u8>>,
    /// The application's SYN as it was given to the listener, until that answers.
    pub syn: Option<Vec<u8>>,
    /// The client's real address, where programs here can be shown it.
    pub shown: Option<IpAddr>,
    /// How its DATA will be sealed, if it is.
    pub cipher: Option<Cipher>,
    /// How often the flow had to take another five-tuple.
    pub moves: u8,
    /// DATA that overtook the ACK.
    pub held: Vec<(SocketAddr, Vec<u8>)>,
    /// Direct packets that overtook the ACK.
    pub held_direct: Vec<Vec<u8>>,
    /// What is granted in the place of a connection.
    pub offer: Option<Box<Offer>>,
    /// The connection that it waits for, where that comes from another host.
    pub handover: Option<HandoverRepr>,
    /// The session that it is another way of.
    pub begin: Option<ReconfigurationRepr>,
}

/// What the third message of a handshake has shown.
pub(crate) struct Shown {
    pub message_3: Vec<u8>,
    pub proved: (HostPublic, Introduction, Keys),
}

impl ResponderSetup {
    /// What a SYN begins.
    pub fn new(arrival: &Arrival<'_>, exchange: &KeyExchangeRepr<'_>, allow: Allow, chain: Vec<u8>) -> Self {
        Self {
            initiator_flow: arrival.message.src_flow,
            claimed: HostId(exchange.host_id),
            initiator_association: exchange.assoc_id,
            reply: arrival.reply,
            syn_len: arrival.syn_len,
            syn_digest: digest_of_syn(arrival.message),
            message_1: exchange.message.to_vec(),
            handshake: None,
            shown_by: None,
            association: 0,
            datagram_max: 0,
            allow,
            ruling: Ok(()),
            chain,
            answers: Vec::new(),
            answered: None,
            app_answer: None,
            first: None,
            syn: None,
            shown: None,
            cipher: None,
            moves: 0,
            held: Vec::new(),
            held_direct: Vec::new(),
            offer: None,
            handover: arrival.message.handover(),
            begin: arrival.message.reconfiguration(),
        }
    }
}

/// From which an initiator's handshake can be made again: garbage in a SYN-ACK must not use it up.
#[derive(Clone)]
pub(crate) struct HandshakeSeed {
    seed: [u8; 32],
    /// The certificate that message 3 shows, from the first one on. A copy of an answer leads to the same key and nonce
    /// again, so that what they encrypt must be the same, also where the host has a new certificate since.
    membership: Option<Box<[u8]>>,
}

impl HandshakeSeed {
    pub const fn new(seed: [u8; 32]) -> Self {
        Self { seed, membership: None }
    }
}

/// What an established initiator keeps to reset late second instances, and to send its ACK again.
pub(crate) struct LateAnswers {
    pub handshake: HandshakeSeed,
    pub association: u32,
    pub ack: Box<[u8]>,
    pub syn_digest: [u8; 32],
    /// Where the peer answered at first contact, while flows with it, under older associations, go elsewhere.
    pub answered_from: Option<Box<SocketAddr>>,
    pub retries: u32,
    pub give_up: Instant,
    /// What the answer grants, once it is confirmed.
    pub granted: Option<Box<Granted>>,
    /// Where the peer is, is the word of some host of the segment. The flow ends unless the peer confirms it from
    /// there.
    pub is_hearsay: bool,
}

impl LateAnswers {
    /// Of a flow that is established now. `message_3` is empty where the hosts had met.
    pub fn new(
        setup: &InitiatorSetup,
        now: Instant,
        message_3: Vec<u8>,
        answered_from: Option<SocketAddr>,
        granted: Option<Granted>,
        is_relayed: bool,
    ) -> Self {
        Self {
            handshake: setup.handshake.clone(),
            association: setup.association,
            ack: message_3.into_boxed_slice(),
            syn_digest: setup.syn_digest,
            answered_from: answered_from.map(Box::new),
            retries: 1,
            give_up: now + SETUP_TIMEOUT,
            granted: granted.map(Box::new),
            is_hearsay: is_relayed && setup.next_hop == SEGMENT,
        }
    }
}

/// The wait before try number `retries` + 1.
pub(crate) fn retry_after(retries: u32) -> Duration {
    RETRY_FIRST.saturating_mul(1 << retries.min(8)).min(RETRY_MAX)
}

/// What binds a handshake to its session: neither half can be used for another.
pub(crate) fn prologue(session: SessionId, service: &ServiceId, initiator_flow: FlowId, association: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(76);
    bytes.extend_from_slice(b"margay sal 1");
    bytes.extend_from_slice(&session.0);
    bytes.extend_from_slice(&service.0);
    bytes.extend_from_slice(&initiator_flow.0.to_be_bytes());
    bytes.extend_from_slice(&association.to_be_bytes());
    bytes
}

/// What the application is told by its own protocol.
pub(crate) fn unreachable_of(code: ErrorCode) -> Unreachable {
    match code {
        ErrorCode::NotAllowed
        | ErrorCode::BadCertificate
        | ErrorCode::NoCommonStack
        | ErrorCode::BoxRefused
        | ErrorCode::ChainRequired => Unreachable::Prohibited,
        ErrorCode::HopLimit
        | ErrorCode::Overloaded
        | ErrorCode::KeptOut
        | ErrorCode::BoxSilent
        | ErrorCode::BoxAnswered
        | ErrorCode::BoxOtherKind
        | ErrorCode::BoxRewrites
        | ErrorCode::NoRoomForTag
        | ErrorCode::BoxAmbiguous
        | ErrorCode::BoxNeedsFirst
        | ErrorCode::BoxUnknown
        | ErrorCode::UnknownCritical
        | ErrorCode::NoAnswer => Unreachable::Host,
        _ => Unreachable::Port,
    }
}

/// What people are told.
pub(crate) fn error_text(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::NoService => {
            "nobody serves this name now; `margay service resolve NAME` shows what the router knows"
        }
        ErrorCode::Refused => {
            "the instance refused: nothing listens on that port of the service, or a firewall on its host rejects \
             what comes by sal0 (`margay check` there says which)"
        }
        ErrorCode::NotAllowed => "this host may not connect to the service; its operator's `allow` list decides",
        ErrorCode::HopLimit => "the routers forward this name in a circle; their operators must mend the rules",
        ErrorCode::Overloaded => "the instance is overloaded; try again",
        ErrorCode::NoCommonStack => NO_COMMON_STACK,
        ErrorCode::BadCertificate => "only hosts answered that may not speak for this name; their certificates say so",
        ErrorCode::KeptOut => crate::act::moving::twin::KEPT_OUT,
        ErrorCode::ChainRequired => {
            "the service takes sessions only through boxes that its policy names; `margay chain show` here says \
             whether this host has that policy"
        }
        ErrorCode::BoxUnknown => {
            "no chain of the policy that the server's host goes by names one of the boxes; `margay policy apply` on a \
             router of the authority declares one"
        }
        ErrorCode::NoAnswer => "nobody answered in time; `margay check` looks for the cause",
        ErrorCode::Drained => "the instance is drained and takes no new flows, and no other one serves the name",
        _ => "the peer refused the connection",
    }
}

/// A TCP segment without its data: what is inside a SYN, everybody may read and change.
pub(crate) fn bare(first: &[u8]) -> Option<Vec<u8>> {
    match packet::parse(first) {
        Ok(Parsed::Transport(first)) if first.is_tcp() => packet::without_data(&first),
        _ => None,
    }
}

/// Whether the sender says that it sends direct from the start.
pub(crate) fn starts_direct(message: &Message<'_>) -> bool {
    message.flow_port().is_some_and(|port| port.starts)
}

/// The protocol number that stands for an IP packet of this version.
pub(crate) fn next_protocol(packet: &[u8]) -> NextProtocol {
    match packet.first().map(|byte| byte >> 4) {
        Some(4) => NextProtocol::Ipv4,
        Some(6) => NextProtocol::Ipv6,
        _ => NextProtocol::None,
    }
}

impl Sal {
    /// A proved message of set-up has shown the peer to be here. A peer without flows is wherever it is; with flows,
    /// also such as belong to an older association, it moves by RSYN alone, since it is not proved that it can be
    /// reached there.
    pub(crate) fn find_peer(&mut self, local_id: u32, found: Pair) {
        let Pair { local, remote } = found;
        let Some(host) = self.associations.get(local_id).map(|association| association.host) else { return };
        let has_flows = self.associations.has_flows_with(host);
        let Some(association) = self.associations.get_mut(local_id) else { return };
        if has_flows {
            if association.remote != remote {
                // Somebody sends on what it saw, from elsewhere; or did so before, and this is where the peer is.
                self.counters.elsewhere += 1;
                self.suspect(self.now, host, Some(found));
            }
            return;
        }
        association.local = local.or(association.local);
        self.associations.set_remote(local_id, remote);
    }

    /// What this host says of itself inside a handshake. The initiator shows its membership of the authority of the
    /// service, which a responder needs; the responder keeps its answer small and shows its own later.
    pub(crate) fn introduction(&self, assoc_id: u32, tag_key: [u8; 32], certificate: Vec<u8>) -> Introduction {
        Introduction { epoch: self.config.epoch, boot_id: self.config.boot_id, assoc_id, tag_key, certificate }
    }

    /// Puts a hop tag on a finished datagram for the router or host behind `hop_key`.
    pub(crate) fn tag_hop(datagram: &mut [u8], hop_key: Option<[u8; 16]>) {
        let tag = match (hop_key, datagram.get(..margay_wire::HOP_TAGGED_LEN)) {
            (Some(key), Some(tagged)) => hop::hop_tag(&key, tagged),
            _ => [0; 8],
        };
        if let Some(place) = datagram.get_mut(margay_wire::HOP_TAGGED_LEN..margay_wire::HOP_TAGGED_LEN + 8) {
            place.copy_from_slice(&tag);
        }
    }
}

impl Demands {
    /// What this host can do, for the peer.
    pub(crate) fn capabilities(&self, config: &Config) -> Extension<'static> {
        let sealed = self.secure_stacks() | self.secure_fec_stacks() | self.secure_sctp_stacks();
        let stacks = STACK_ENCAP | CHANGES | FEC | SCTP | sealed;
        Extension::Capabilities(CapabilitiesRepr { stacks, mtu: config.datagram_max })
    }
}

impl AssociationTable {
    /// A proved message of set-up says what the peer can do.
    pub(crate) fn note_abilities(&mut self, association: u32, message: &Message<'_>) {
        if let Some(capabilities) = message.capabilities() {
            self.set_stacks(association, capabilities.stacks);
        }
    }
}

impl FlowTable {
    /// This end's flow port, and whether it sends direct from the start.
    pub(crate) fn flow_port(&self, id: FlowId) -> Option<Extension<'static>> {
        let direct = &self.get(id)?.direct;
        let repr = FlowPortRepr { port: direct.local_port, starts: direct.carriage.sends() };
        (direct.local_port != 0).then_some(Extension::FlowPort(repr))
    }
}

impl FlowPorts {
    /// Largest TCP payload per segment, on a path that takes datagrams of `datagram_max` bytes, for an application that
    /// uses addresses of the family of `app`.
    ///
    /// A packet that goes direct has no UDP header, and a TCP header that is 12 bytes longer. Where none goes direct, a
    /// packet is to fit a datagram, sealed where it `is_sealed`.
    pub(crate) fn mss_max(&self, datagram_max: u16, app: IpAddr, is_sealed: bool) -> u16 {
        let tag = if is_sealed { SEAL_TAG_LEN as u16 } else { 0 };
        let headers = match app {
            _ if self.is_direct_on() && !is_sealed => 12,
            IpAddr::V4(_) => ENCAP_OVERHEAD + 40,
            IpAddr::V6(_) => ENCAP_OVERHEAD + 60,
        };
        datagram_max.saturating_sub(headers + tag).max(216)
    }
}

impl Config {
    pub(crate) fn host_id(&self) -> HostId {
        HostPublic::id(&self.host_key.public())
    }
}
