//! From the bytes of a question about the zone to the bytes of its answer: the agent's part.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use hickory_proto::op::{Edns, Message, MessageType, Metadata, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::PTR;
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinEncodable, BinEncoder};
use margay_core::name::{self, is_computable};

use tokio::time::{MissedTickBehavior, interval};

use super::responder::short_reply;
use super::zone::{self, FALLBACK_TTL_S, Place, TTL_S, Zones};
use super::{Carrier, Directory, DnsError, HEADER, Questioner};
use crate::lease::{LeaseError, Leases};

/// Largest datagram that is sent: fits every path, and needs no fragments (DNS flag day 2020).
const DATAGRAM_MAX: u16 = 1232;
/// What everybody takes.
const DATAGRAM_MIN: u16 = 512;
/// How long the directory may think. Whoever asks gives up after some seconds, and virtual addresses are never wrong.
const DIRECTORY_WAIT: Duration = Duration::from_secs(2);
const KEEP_USES_EVERY: Duration = Duration::from_secs(60);
/// RFC 8914: an extended error, and its code "other".
const EXTENDED_ERROR: u16 = 15;
const EXTENDED_TEXT_MAX: usize = 300;

/// What the agent knows of names of the zone, for a responder that asks (see [`serve`](super::channel::serve)).
pub struct Answers {
    zones: Zones,
    leases: Arc<Leases>,
    directory: Arc<dyn Directory>,
}

/// What was found out about a question.
enum Found {
    Records(Vec<Record>),
    /// The name is there, but has nothing of this type; how long that holds.
    Nothing(u32),
    /// And how long that holds.
    NoSuchName(u32),
    NotOurs,
    Failed(LeaseError),
}

/// A question's name, read as one of Margay's.
enum Spelled {
    Service(name::Name),
    /// One label: an authority, under which there may be services.
    Authority,
    Malformed,
}

impl Answers {
    /// About `zone`, for a responder at `listen`.
    ///
    /// # Errors
    ///
    /// The zone is none.
    pub fn new(
        zone: &str,
        listen: IpAddr,
        leases: Arc<Leases>,
        directory: Arc<dyn Directory>,
    ) -> Result<Arc<Self>, DnsError> {
        let zones = Zones::new(zone, listen, leases.ranges())?;
        Ok(Arc::new(Self { zones, leases, directory }))
    }

    /// Writes down now and then when names were last used, until it is aborted.
    pub async fn keep_uses(self: Arc<Self>) {
        let mut every = interval(KEEP_USES_EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let leases = Arc::clone(&self.leases);
            if let Ok(Err(error)) = tokio::task::spawn_blocking(move || leases.keep_uses()).await {
                tracing::warn!(%error, "when names were last used was not written down");
            }
        }
    }

    /// What to answer to somebody's question.
    pub(super) async fn reply(&self, bytes: &[u8], asker: Questioner, carrier: Carrier) -> Option<Vec<u8>> {
        if bytes.len() < HEADER {
            return None;
        }
        let Some((request, query)) = parse(bytes) else {
            return Some(short_reply(bytes, ResponseCode::FormErr));
        };
        let response = self.respond(&request, query, asker).await;
        Some(finish(&request, response, carrier, bytes))
    }

    async fn respond(&self, request: &Message, query: Query, asker: Questioner) -> Message {
        let mut response = response(request, query.clone());
        let code = if request.version() > 0 {
            ResponseCode::BADVERS
        } else if request.metadata.op_code != OpCode::Query {
            ResponseCode::NotImp
        } else {
            self.look_up(&query, asker, &mut response).await
        };
        response.metadata.response_code = code;
        response
    }

    async fn look_up(&self, query: &Query, asker: Questioner, response: &mut Message) -> ResponseCode {
        let (found, zone) = self.find(query, asker).await;
        response.metadata.authoritative = zone.is_some();
        let mut add_soa = |ttl_s| {
            if let Some(zone) = zone {
                response.add_authority(self.zones.soa(zone, ttl_s));
            }
        };
        match found {
            Found::Records(records) => {
                response.add_answers(records);
                ResponseCode::NoError
            }
            Found::Nothing(ttl_s) => {
                add_soa(ttl_s);
                ResponseCode::NoError
            }
            Found::NoSuchName(ttl_s) => {
                add_soa(ttl_s);
                ResponseCode::NXDomain
            }
            Found::NotOurs => {
                response.metadata.authoritative = false;
                ResponseCode::Refused
            }
            Found::Failed(error) => {
                response.metadata.authoritative = false;
                response.set_edns(extended_error(&error));
                ResponseCode::ServFail
            }
        }
    }

    async fn find(&self, query: &Query, asker: Questioner) -> (Found, Option<&Name>) {
        let is_ours = matches!(query.query_class, DNSClass::IN | DNSClass::ANY)
            && !matches!(query.query_type, RecordType::AXFR | RecordType::IXFR);
        if !is_ours {
            return (Found::NotOurs, None);
        }
        match self.zones.place(&query.name) {
            Place::Elsewhere => (Found::NotOurs, None),
            Place::Apex(zone) => (self.apex(zone, query.query_type), Some(zone)),
            Place::Reverse(zone) => (self.pointer(query), Some(zone)),
            Place::Forward(zone) => (self.forward(query, asker, zone).await, Some(zone)),
        }
    }

    fn apex(&self, zone: &Name, kind: RecordType) -> Found {
        match kind {
            RecordType::SOA => Found::Records(vec![self.zones.soa(zone, TTL_S)]),
            RecordType::NS => Found::Records(vec![self.zones.ns(zone)]),
            RecordType::ANY => Found::Records(vec![self.zones.soa(zone, TTL_S), self.zones.ns(zone)]),
            _ => Found::Nothing(TTL_S),
        }
    }

    async fn forward(&self, query: &Query, asker: Questioner, zone: &Name) -> Found {
        let (owner, kind) = (&query.name, query.query_type);
        if self.zones.is_server(owner) {
            return of_kind(
                self.zones.listen().map(|ip| zone::address(owner, TTL_S, ip)).into_iter().collect(),
                kind,
                TTL_S,
            );
        }
        let service = match spelled(owner, zone) {
            Spelled::Service(service) => service,
            Spelled::Authority => return Found::Nothing(TTL_S),
            Spelled::Malformed => return Found::NoSuchName(TTL_S),
        };
        let known = tokio::time::timeout(DIRECTORY_WAIT, self.directory.exists(&service)).await;
        if known == Ok(false) {
            // Somebody may serve it in a moment.
            return Found::NoSuchName(FALLBACK_TTL_S);
        }
        if !matches!(kind, RecordType::A | RecordType::AAAA | RecordType::ANY) {
            return Found::Nothing(TTL_S);
        }
        let plain = tokio::time::timeout(DIRECTORY_WAIT, self.directory.fallback(&service)).await.unwrap_or_default();
        if !plain.is_empty() {
            let records = plain.into_iter().map(|address| zone::address(owner, FALLBACK_TTL_S, address)).collect();
            return of_kind(records, kind, FALLBACK_TTL_S);
        }
        let mut records = Vec::new();
        if kind != RecordType::AAAA {
            match self.lease(&service, asker).await {
                Ok(address) => records.push(zone::a(owner, TTL_S, address)),
                Err(error) => return Found::Failed(error),
            }
        }
        let id = service.service_id();
        if kind != RecordType::A && is_computable(&id) {
            records.push(zone::aaaa(owner, TTL_S, self.leases.ranges().virtual_v6(&id)));
        }
        of_kind(records, kind, TTL_S)
    }

    async fn lease(&self, service: &name::Name, asker: Questioner) -> Result<Ipv4Addr, LeaseError> {
        if let Some(address) = self.leases.used(service) {
            return Ok(address);
        }
        let (leases, wanted) = (Arc::clone(&self.leases), service.clone());
        let leased = tokio::task::spawn_blocking(move || leases.lease(&wanted, asker.into())).await;
        // Only where the runtime is going down is the task not run.
        let leased = leased.unwrap_or_else(|_| Err(LeaseError::Stopping(service.written().to_owned())));
        if let Err(error @ LeaseError::Store { .. }) = &leased {
            tracing::warn!(%error, "a name was not answered");
        }
        leased
    }

    /// The name behind a virtual address, for logs.
    fn pointer(&self, query: &Query) -> Found {
        let Ok(net) = query.name.parse_arpa_name() else { return Found::NoSuchName(TTL_S) };
        if net.prefix_len() < net.max_prefix_len() {
            return Found::Nothing(TTL_S);
        }
        let written = match net.addr() {
            IpAddr::V4(v4) => self.leases.name_of(v4),
            IpAddr::V6(v6) => self.leases.ranges().service_of_v6(v6).and_then(|service| self.leases.written(&service)),
        };
        let Some(name) = written.and_then(|written| self.zones.spelling(&written)) else {
            return Found::NoSuchName(TTL_S);
        };
        let record = Record::from_rdata(query.name.clone(), TTL_S, RData::PTR(PTR(name)));
        of_kind(vec![record], query.query_type, TTL_S)
    }
}

/// Those of `records` that were asked for.
fn of_kind(mut records: Vec<Record>, kind: RecordType, ttl_s: u32) -> Found {
    records.retain(|record| kind == RecordType::ANY || record.record_type() == kind);
    if records.is_empty() { Found::Nothing(ttl_s) } else { Found::Records(records) }
}

fn spelled(owner: &Name, zone: &Name) -> Spelled {
    let own = usize::from(owner.num_labels()).saturating_sub(usize::from(zone.num_labels()));
    let mut text = String::new();
    for label in owner.iter().take(own) {
        // A dot inside a label, or a key behind a slash, would read as something else.
        let is_plain = label.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-');
        let (true, Ok(label)) = (is_plain, std::str::from_utf8(label)) else { return Spelled::Malformed };
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(label);
    }
    if own == 1 {
        let is_good = format!("x.{text}").parse::<name::Name>().is_ok();
        return if is_good { Spelled::Authority } else { Spelled::Malformed };
    }
    text.parse().map_or(Spelled::Malformed, Spelled::Service)
}

/// The message and its one question.
pub(super) fn parse(bytes: &[u8]) -> Option<(Message, Query)> {
    // Looked at first: the parser would make room for as many questions as the header claims.
    if bytes[4..6] != [0, 1] {
        return None;
    }
    let message = Message::from_vec(bytes).ok()?;
    let query = message.queries.first()?.clone();
    Some((message, query))
}

/// An answer without anything in it yet. Recursion is available: whoever asks elsewhere for lack of it asks somebody
/// who does not know.
pub(super) fn response(request: &Message, query: Query) -> Message {
    let mut response = Message::new(request.metadata.id, MessageType::Response, request.metadata.op_code);
    response.metadata = Metadata::response_from_request(&request.metadata);
    response.metadata.recursion_available = true;
    response.add_query(query);
    response
}

/// The bytes of an answer, as long as the way back takes, with EDNS for EDNS.
pub(super) fn finish(request: &Message, mut response: Message, carrier: Carrier, bytes: &[u8]) -> Vec<u8> {
    let limit = match carrier {
        Carrier::Stream => u16::MAX,
        Carrier::Datagram => request.max_payload().clamp(DATAGRAM_MIN, DATAGRAM_MAX),
    };
    if let Some(asked) = &request.edns {
        let edns = response.edns.get_or_insert_with(Edns::new);
        edns.set_max_payload(DATAGRAM_MAX).set_version(0).set_dnssec_ok(asked.flags().dnssec_ok);
    } else {
        response.edns = None;
    }
    encode(&response, limit).unwrap_or_else(|| short_reply(bytes, ResponseCode::FormErr))
}

fn encode(message: &Message, limit: u16) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(usize::from(DATAGRAM_MIN));
    let mut encoder = BinEncoder::new(&mut bytes);
    encoder.set_max_size(limit);
    message.emit(&mut encoder).ok()?;
    Some(bytes)
}

fn extended_error(error: &LeaseError) -> Edns {
    let mut text = error.to_string();
    let end = text.floor_char_boundary(EXTENDED_TEXT_MAX);
    text.truncate(end);
    let mut value = vec![0, 0];
    value.extend_from_slice(text.as_bytes());
    let mut edns = Edns::new();
    edns.options_mut().insert(EdnsOption::Unknown(EXTENDED_ERROR, value));
    edns
}
