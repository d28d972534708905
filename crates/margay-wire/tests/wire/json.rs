//! Between messages and the fields of a vector, both ways.

use std::net::SocketAddr;

use margay_wire::{
    Addresses, ArrivalRepr, ArrivalsRepr, AuthRepr, BoxFlags, BoxRepr, CapabilitiesRepr, Chain, ChainRepr, ChangeRepr,
    ChangeStep, CutRepr, DATA_HEADER_LEN, DataRepr, Error, ErrorRepr, Extension, Flags, FlowId, FlowPortRepr,
    GrantRepr, GsoKind, HandoverRepr, KeyExchangeRepr, Kind, LossRepr, Message, MessageWriter, MoveFlags, MoveRepr,
    NextProtocol, NoticeRepr, OrderAct, OrderRepr, OrderState, QuietRepr, ReconfigurationRepr, ReconfigurationStep,
    ResolvableRepr, STACK_FEC, SessionId, SessionRepr, Sharing, SpliceRepr, SpliceSocketRepr, StackRepr, StripeRepr,
    TRAIN_HEADER_LEN, TermsRepr, TimingRepr, TrainRepr, is_sealed,
};
use serde_json::{Value, json};

use crate::vector::{hex, unhex};

const KINDS: [(Kind, &str); 18] = [
    (Kind::Syn, "SYN"),
    (Kind::SynAck, "SYN_ACK"),
    (Kind::Ack, "ACK"),
    (Kind::Rsyn, "RSYN"),
    (Kind::RsynAck, "RSYN_ACK"),
    (Kind::RsynDone, "RSYN_DONE"),
    (Kind::Fin, "FIN"),
    (Kind::Rst, "RST"),
    (Kind::Fail, "FAIL"),
    (Kind::Probe, "PROBE"),
    (Kind::Error, "ERROR"),
    (Kind::RequestLock, "REQUEST_LOCK"),
    (Kind::AckLock, "ACK_LOCK"),
    (Kind::NackLock, "NACK_LOCK"),
    (Kind::CancelLock, "CANCEL_LOCK"),
    (Kind::AckCancel, "ACK_CANCEL"),
    (Kind::Notice, "NOTICE"),
    (Kind::Change, "CHANGE"),
];
const FLAGS: [(Flags, &str); 6] = [
    (Flags::RESOLVABLE, "RESOLVABLE"),
    (Flags::FULL, "FULL"),
    (Flags::CONFIRM, "CONFIRM"),
    (Flags::RELAY, "RELAY"),
    (Flags::COPIED, "COPIED"),
    (Flags::NAMED, "NAMED"),
];

/// The fields of a message that was read from `len` bytes.
pub fn of_message(message: &Message<'_>, len: usize) -> Value {
    let kind = KINDS.iter().find(|(kind, _)| *kind == message.kind).expect("every kind has a name");
    let flags: Vec<&str> =
        FLAGS.iter().filter(|(flag, _)| message.flags.contains(*flag)).map(|(_, name)| *name).collect();
    let mut header = json!({
        "type": kind.1,
        "flags": flags,
        "next_protocol": u8::from(message.next_protocol),
        "dst_flow": message.dst_flow.to_string(),
        "src_flow": message.src_flow.to_string(),
        "control_seq": message.control_seq,
    });
    let unknown_flags = message.flags.bits() & 0xc0;
    if unknown_flags != 0 {
        header["unknown_flags"] = unknown_flags.into();
    }
    let extensions: Vec<Value> = message.extensions().map(|extension| of_extension(&extension)).collect();
    let mut fields = json!({
        "header": header,
        "extensions": extensions,
        "payload": hex(message.payload),
        "padding": len - message.signed_bytes().len(),
    });
    if let Some(resolvable) = &message.resolvable {
        fields["resolvable"] = json!({
            "hop_limit": resolvable.hop_limit,
            "reply_to": resolvable.reply_to.map(|address| address.to_string()),
            "via": resolvable.via.map(|address| address.to_string()),
            "service": hex(&resolvable.service),
            "nonce": format!("{:016x}", resolvable.nonce),
            "hop_tag": hex(&resolvable.hop_tag),
        });
    }
    fields
}

fn of_handover(handover: &HandoverRepr) -> Value {
    json!({
        "type": "HANDOVER",
        "ticket": hex(&handover.ticket),
        "giver": hex(&handover.giver),
        "taker": hex(&handover.taker),
        "address": handover.address.to_string(),
    })
}

fn of_chain(chain: &Chain<'_>) -> Value {
    let one = |one: BoxRepr| {
        let mut value = json!({"service": hex(&one.service), "flags": one.flags.bits()});
        if one.added_by != 0 {
            value["added_by"] = json!(one.added_by);
        }
        value
    };
    json!({
        "type": if chain.names_adders() { "CHAIN_ADDED" } else { "CHAIN" },
        "is_answer": chain.is_answer(),
        "shared": chain.shared(),
        "failed_at": chain.failed_at(),
        "destination": hex(&chain.destination()),
        "time_s": chain.time_s(),
        "host_key": hex(&chain.host_key()),
        "signature": hex(&chain.signature()),
        "boxes": chain.boxes().map(one).collect::<Vec<_>>(),
        "hosts": chain.hosts().map(|host| hex(&host)).collect::<Vec<_>>(),
        "certificates": hex(chain.certificates()),
    })
}

fn of_reconfiguration(one: &ReconfigurationRepr) -> Value {
    json!({
        "type": "RECONFIGURATION",
        "step": one.step as u8,
        "number": one.number,
        "host": hex(&one.host),
        "address": one.address.to_string(),
    })
}

fn of_splice(one: &SpliceRepr) -> Value {
    let socket = |socket: &SpliceSocketRepr| {
        json!({
            "unread": socket.unread,
            "written": socket.written,
            "timestamp": socket.timestamp,
            "peer_scale": socket.peer_scale,
            "own_scale": socket.own_scale,
            "has_sack": socket.has_sack,
        })
    };
    json!({
        "type": "SPLICE",
        "host": hex(&one.host),
        "session": one.session.to_string(),
        "service": hex(&one.service),
        "left": socket(&one.left),
        "right": socket(&one.right),
    })
}

fn of_order(order: &OrderRepr) -> Value {
    json!({
        "type": "ORDER",
        "state": order.state as u8,
        "act": order.act as u8,
        "session": order.session.to_string(),
        "service": hex(&order.service),
        "other": hex(&order.other),
        "start": order.start,
        "said_at_ms": order.said_at_ms,
        "host_key": hex(&order.host_key),
        "signature": hex(&order.signature),
    })
}

fn of_cut(cut: &CutRepr) -> Value {
    let CutRepr { number, is_closed, has_heard } = cut;
    json!({"type": "CUT", "number": number, "is_closed": is_closed, "has_heard": has_heard})
}

fn of_change(change: &ChangeRepr) -> Value {
    let ChangeRepr { step, stack, demands, by_rule, number } = change;
    let step = *step as u8;
    json!({"type": "CHANGE", "step": step, "stack": stack, "demands": demands, "by_rule": by_rule, "number": number})
}

fn of_timing(timing: &TimingRepr) -> Value {
    let TimingRepr { at_us, jitter_us, judged, late } = timing;
    json!({"type": "TIMING", "at_us": at_us, "jitter_us": jitter_us, "judged": judged, "late": late})
}

fn timing(value: &Value) -> TimingRepr {
    TimingRepr {
        at_us: number(value, "at_us"),
        jitter_us: value["jitter_us"].as_u64().map(|jitter_us| jitter_us as u32),
        judged: number(value, "judged"),
        late: number(value, "late"),
    }
}

fn of_loss(loss: &LossRepr) -> Value {
    let LossRepr { basis, sent, expected, received, gaps } = loss;
    json!({
        "type": "LOSS", "basis": basis, "sent": sent, "expected": expected, "received": received, "gaps": gaps,
    })
}

fn of_extension(extension: &Extension<'_>) -> Value {
    match extension {
        Extension::SourceService(service) => json!({"type": "SOURCE_SERVICE", "service": hex(service)}),
        Extension::Session(session) => json!({
            "type": "SESSION",
            "session": session.session.to_string(),
            "client": session.client.to_string(),
            "service_port": session.service_port,
            "protocol": session.protocol,
        }),
        Extension::Addresses(addresses) => {
            let entry = |(address, flags): (SocketAddr, u16)| json!({"address": address.to_string(), "flags": flags});
            json!({"type": "ADDRESSES", "addresses": addresses.iter().map(entry).collect::<Vec<_>>()})
        }
        Extension::Capabilities(capabilities) => {
            json!({"type": "CAPABILITIES", "stacks": capabilities.stacks, "mtu": capabilities.mtu})
        }
        Extension::KeyExchange(exchange) => json!({
            "type": "KEY_EXCHANGE",
            "host_id": hex(&exchange.host_id),
            "assoc_id": exchange.assoc_id,
            "message": hex(exchange.message),
        }),
        Extension::Certificate(chain) => json!({"type": "CERTIFICATE", "chain": hex(chain)}),
        Extension::Chain(chain) => of_chain(chain),
        Extension::Rendezvous(address) => json!({"type": "RENDEZVOUS", "address": address.to_string()}),
        Extension::Error(error) => json!({"type": "ERROR", "code": u16::from(error.code), "text": error.text}),
        Extension::Auth(auth) => {
            json!({"type": "AUTH", "assoc_id": auth.assoc_id, "epoch": auth.epoch,
                "receiver_epoch": auth.receiver_epoch, "tag": hex(&auth.tag)})
        }
        Extension::Cookie(cookie) => json!({"type": "COOKIE", "cookie": hex(cookie)}),
        Extension::Stack(stack) => json!({"type": "STACK", "stack": stack.stack, "demands": stack.demands}),
        Extension::Terms(terms) => json!({"type": "TERMS", "give_up_after_ms": terms.give_up_after_ms}),
        Extension::Handover(handover) => of_handover(handover),
        Extension::Reconfiguration(one) => of_reconfiguration(one),
        Extension::Splice(one) => of_splice(one),
        Extension::Cut(cut) => of_cut(cut),
        Extension::Order(order) => of_order(order),
        Extension::SynSeen(digest) => json!({"type": "SYN_SEEN", "digest": hex(digest)}),
        Extension::Change(change) => of_change(change),
        Extension::Loss(loss) => of_loss(loss),
        Extension::Timing(timing) => of_timing(timing),
        Extension::Quiet(quiet) => json!({"type": "QUIET", "quiet_ms": quiet.quiet_ms}),
        Extension::FenceNumber(number) => json!({"type": "FENCE_NUMBER", "number": number}),
        Extension::FlowPort(port) => json!({"type": "FLOW_PORT", "port": port.port, "starts": port.starts}),
        Extension::Move(location) => of_move(location),
        Extension::Stripe(StripeRepr { number, place, ends, leads, sharing, weight, plain, fec }) => json!({
            "type": "STRIPE", "number": number, "place": place, "ends": ends, "leads": leads,
            "sharing": *sharing as u8, "weight": weight, "plain": plain, "fec": fec,
        }),
        Extension::Arrivals(arrivals) => {
            let place = |(place, arrival): (usize, &Option<ArrivalRepr>)| {
                let ArrivalRepr { packet_number, at_us, bytes } = (*arrival)?;
                Some(json!({"place": place, "packet_number": packet_number, "at_us": at_us, "bytes": bytes}))
            };
            let places: Vec<_> = arrivals.places.iter().enumerate().filter_map(place).collect();
            json!({"type": "ARRIVALS", "number": arrivals.number, "places": places})
        }
        Extension::Notice(notice) => of_notice(notice),
        Extension::Grant(grant) => of_grant(grant),
        Extension::UnknownCritical(byte) => json!({"type": "UNKNOWN_CRITICAL", "number": byte}),
    }
}

fn of_move(location: &MoveRepr) -> Value {
    json!({
        "type": "MOVE",
        "number": location.number,
        "token": format!("{:016x}", location.token),
        "challenge": format!("{:016x}", location.challenge),
        "address": location.address.to_string(),
        "flags": location.flags.bits(),
    })
}

fn of_notice(notice: &NoticeRepr) -> Value {
    json!({
        "type": "NOTICE",
        "epoch": notice.epoch,
        "sequence": notice.sequence,
        "until_s": notice.until_s,
        "bits": notice.bits,
        "withdrawn": notice.withdrawn,
        "prefix": hex(&notice.prefix),
        "host_key": hex(&notice.host_key),
        "signature": hex(&notice.signature),
    })
}

fn of_grant(grant: &GrantRepr) -> Value {
    let GrantRepr { first_flow, port, count, lifetime_ms } = grant;
    let first_flow = first_flow.to_string();
    json!({"type": "GRANT", "first_flow": first_flow, "port": port, "count": count, "lifetime_ms": lifetime_ms})
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().unwrap_or_else(|| panic!("no text {key} in {value}"))
}

fn number<T: TryFrom<u64>>(value: &Value, key: &str) -> T {
    let number = value[key].as_u64().and_then(|number| T::try_from(number).ok());
    number.unwrap_or_else(|| panic!("no number {key} in {value}"))
}

fn flag(value: &Value, key: &str) -> bool {
    value[key].as_bool().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn bytes<const N: usize>(value: &Value, key: &str) -> [u8; N] {
    unhex(text(value, key)).try_into().unwrap_or_else(|_| panic!("{key} of {value} has not {N} bytes"))
}

fn socket(value: &Value) -> SocketAddr {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{value} is no address and port"))
}

fn flow(value: &Value, key: &str) -> FlowId {
    FlowId(u32::from_be_bytes(bytes(value, key)))
}

/// The datagram that has these fields.
///
/// # Errors
///
/// The writer refuses.
pub fn to_message(fields: &Value) -> Result<Vec<u8>, Error> {
    // The buffer is dirty: the writer must not count on zeros.
    let mut buf = vec![0xee; 140_000];
    let bare = write_message(&mut buf, fields, 0)?;
    let padded = bare + number::<usize>(fields, "padding");
    let len = write_message(&mut buf, fields, padded)?;
    assert_eq!(len, padded, "padded to where it was asked to");
    buf.truncate(len);
    Ok(buf)
}

fn write_message(buf: &mut [u8], fields: &Value, pad_to: usize) -> Result<usize, Error> {
    let header = &fields["header"];
    let kind = KINDS.iter().find(|(_, name)| *name == text(header, "type")).expect("a known type").0;
    let (dst_flow, src_flow) = (flow(header, "dst_flow"), flow(header, "src_flow"));
    let mut writer = MessageWriter::new(buf, kind, dst_flow, src_flow, number(header, "control_seq"));
    for name in header["flags"].as_array().expect("a list of flags") {
        writer.flags(FLAGS.iter().find(|(_, known)| name == known).expect("a known flag").0);
    }
    if !header["unknown_flags"].is_null() {
        writer.flags(Flags::from_bits_retain(number(header, "unknown_flags")));
    }
    if let Some(part) = fields.get("resolvable") {
        let address = |key: &str| (!part[key].is_null()).then(|| socket(&part[key]));
        writer.resolvable(&ResolvableRepr {
            hop_limit: number(part, "hop_limit"),
            reply_to: address("reply_to"),
            via: address("via"),
            service: bytes(part, "service"),
            nonce: u64::from_be_bytes(bytes(part, "nonce")),
            hop_tag: bytes(part, "hop_tag"),
        })?;
    }
    for extension in fields["extensions"].as_array().expect("a list of extensions") {
        write_extension(&mut writer, extension)?;
    }
    let payload = unhex(text(fields, "payload"));
    writer.payload(NextProtocol::from(number::<u8>(header, "next_protocol")), &payload)?;
    writer.pad_to(pad_to);
    writer.finish()
}

fn handover(value: &Value) -> HandoverRepr {
    let [ticket, giver, taker] = ["ticket", "giver", "taker"].map(|key| bytes(value, key));
    HandoverRepr { ticket, giver, taker, address: socket(&value["address"]) }
}

fn reconfiguration(value: &Value) -> Result<ReconfigurationRepr, Error> {
    Ok(ReconfigurationRepr {
        step: ReconfigurationStep::try_from(number::<u8>(value, "step"))?,
        number: number(value, "number"),
        host: bytes(value, "host"),
        address: socket(&value["address"]),
    })
}

fn splice_socket(value: &Value) -> SpliceSocketRepr {
    SpliceSocketRepr {
        unread: number(value, "unread"),
        written: number(value, "written"),
        timestamp: value["timestamp"].as_u64().map(|clock| u32::try_from(clock).expect("32 bits")),
        peer_scale: number(value, "peer_scale"),
        own_scale: number(value, "own_scale"),
        has_sack: flag(value, "has_sack"),
    }
}

fn splice(value: &Value) -> SpliceRepr {
    SpliceRepr {
        host: bytes(value, "host"),
        session: SessionId(bytes(value, "session")),
        service: bytes(value, "service"),
        left: splice_socket(&value["left"]),
        right: splice_socket(&value["right"]),
    }
}

fn order(value: &Value) -> Result<OrderRepr, Error> {
    Ok(OrderRepr {
        state: OrderState::try_from(number::<u8>(value, "state"))?,
        act: OrderAct::try_from(number::<u8>(value, "act"))?,
        session: SessionId(bytes(value, "session")),
        service: bytes(value, "service"),
        other: bytes(value, "other"),
        start: number(value, "start"),
        said_at_ms: number(value, "said_at_ms"),
        host_key: bytes(value, "host_key"),
        signature: bytes(value, "signature"),
    })
}

fn cut(value: &Value) -> CutRepr {
    let [is_closed, has_heard] = ["is_closed", "has_heard"].map(|key| flag(value, key));
    CutRepr { number: number(value, "number"), is_closed, has_heard }
}

fn change(value: &Value) -> Result<ChangeRepr, Error> {
    Ok(ChangeRepr {
        step: ChangeStep::try_from(number::<u8>(value, "step"))?,
        stack: number(value, "stack"),
        demands: flag(value, "demands"),
        by_rule: flag(value, "by_rule"),
        number: number(value, "number"),
    })
}

fn loss(value: &Value) -> LossRepr {
    LossRepr {
        basis: number(value, "basis"),
        sent: number(value, "sent"),
        expected: number(value, "expected"),
        received: number(value, "received"),
        gaps: number(value, "gaps"),
    }
}

fn write_extension(writer: &mut MessageWriter<'_>, value: &Value) -> Result<(), Error> {
    let long;
    let extension = match text(value, "type") {
        "SOURCE_SERVICE" => Extension::SourceService(bytes(value, "service")),
        "SESSION" => Extension::Session(SessionRepr {
            session: SessionId(bytes(value, "session")),
            client: socket(&value["client"]),
            service_port: number(value, "service_port"),
            protocol: number(value, "protocol"),
        }),
        "ADDRESSES" => {
            long = addresses(&value["addresses"]);
            Extension::Addresses(Addresses::parse(&long)?)
        }
        "CAPABILITIES" => {
            Extension::Capabilities(CapabilitiesRepr { stacks: number(value, "stacks"), mtu: number(value, "mtu") })
        }
        "KEY_EXCHANGE" => {
            long = unhex(text(value, "message"));
            let (host_id, assoc_id) = (bytes(value, "host_id"), number(value, "assoc_id"));
            Extension::KeyExchange(KeyExchangeRepr { host_id, assoc_id, message: &long })
        }
        "CERTIFICATE" => {
            long = unhex(text(value, "chain"));
            Extension::Certificate(&long)
        }
        "CHAIN" | "CHAIN_ADDED" => {
            long = chain(value)?;
            Extension::Chain(Chain::parse(&long)?)
        }
        "RENDEZVOUS" => Extension::Rendezvous(socket(&value["address"])),
        "ERROR" => Extension::Error(ErrorRepr { code: number::<u16>(value, "code").into(), text: text(value, "text") }),
        "AUTH" => {
            let (assoc_id, epoch) = (number(value, "assoc_id"), number(value, "epoch"));
            let receiver_epoch = number(value, "receiver_epoch");
            Extension::Auth(AuthRepr { assoc_id, epoch, receiver_epoch, tag: bytes(value, "tag") })
        }
        "COOKIE" => Extension::Cookie(bytes(value, "cookie")),
        "STACK" => Extension::Stack(StackRepr { stack: number(value, "stack"), demands: flag(value, "demands") }),
        "CHANGE" => Extension::Change(change(value)?),
        "LOSS" => Extension::Loss(loss(value)),
        "TIMING" => Extension::Timing(timing(value)),
        "TERMS" => Extension::Terms(TermsRepr { give_up_after_ms: number(value, "give_up_after_ms") }),
        "HANDOVER" => Extension::Handover(handover(value)),
        "RECONFIGURATION" => Extension::Reconfiguration(reconfiguration(value)?),
        "SPLICE" => Extension::Splice(splice(value)),
        "CUT" => Extension::Cut(cut(value)),
        "ORDER" => Extension::Order(order(value)?),
        "SYN_SEEN" => Extension::SynSeen(bytes(value, "digest")),
        "QUIET" => Extension::Quiet(QuietRepr { quiet_ms: number(value, "quiet_ms") }),
        "FENCE_NUMBER" => Extension::FenceNumber(number(value, "number")),
        "FLOW_PORT" => Extension::FlowPort(FlowPortRepr { port: number(value, "port"), starts: flag(value, "starts") }),
        "MOVE" => Extension::Move(MoveRepr {
            number: number(value, "number"),
            token: u64::from_be_bytes(bytes(value, "token")),
            challenge: u64::from_be_bytes(bytes(value, "challenge")),
            address: socket(&value["address"]),
            flags: MoveFlags::from_bits_retain(number(value, "flags")),
        }),
        "STRIPE" => Extension::Stripe(stripe(value)),
        "ARRIVALS" => Extension::Arrivals(arrivals(value)),
        "NOTICE" => Extension::Notice(notice(value)),
        "GRANT" => Extension::Grant(grant(value)),
        "UNKNOWN_CRITICAL" => Extension::UnknownCritical(number(value, "number")),
        other => panic!("{other} is no extension"),
    };
    writer.extension(&extension).map(|_| ())
}

fn stripe(value: &Value) -> StripeRepr {
    StripeRepr {
        number: number(value, "number"),
        place: number(value, "place"),
        ends: flag(value, "ends"),
        leads: flag(value, "leads"),
        sharing: Sharing::ALL[number::<usize>(value, "sharing")],
        weight: number(value, "weight"),
        plain: flag(value, "plain"),
        fec: flag(value, "fec"),
    }
}

fn arrivals(value: &Value) -> ArrivalsRepr {
    let mut arrivals = ArrivalsRepr { number: number(value, "number"), ..ArrivalsRepr::default() };
    for place in value["places"].as_array().expect("a list of places") {
        let packet_number = number(place, "packet_number");
        let at_us = number(place, "at_us");
        let arrival = ArrivalRepr { packet_number, at_us, bytes: number(place, "bytes") };
        arrivals.places[number::<usize>(place, "place")] = Some(arrival);
    }
    arrivals
}

fn chain(value: &Value) -> Result<Vec<u8>, Error> {
    let list = |key: &str| value[key].as_array().unwrap_or_else(|| panic!("no list {key} in {value}"));
    let one = |one: &Value| {
        let flags = BoxFlags::from_bits(number(one, "flags")).unwrap_or_else(|| panic!("{one} has other flags"));
        let added_by = if one["added_by"].is_null() { 0 } else { number(one, "added_by") };
        BoxRepr { service: bytes(one, "service"), flags, added_by }
    };
    let boxes: Vec<BoxRepr> = list("boxes").iter().map(one).collect();
    let host = |host: &Value| unhex(host.as_str().expect("text")).try_into().expect("sixteen bytes");
    let hosts: Vec<[u8; 16]> = list("hosts").iter().map(host).collect();
    let certificates = unhex(text(value, "certificates"));
    let repr = ChainRepr {
        is_answer: value["is_answer"].as_bool().unwrap_or_else(|| panic!("no is_answer in {value}")),
        shared: number(value, "shared"),
        failed_at: number(value, "failed_at"),
        destination: bytes(value, "destination"),
        time_s: number(value, "time_s"),
        host_key: bytes(value, "host_key"),
        signature: bytes(value, "signature"),
        boxes: &boxes,
        hosts: &hosts,
        certificates: &certificates,
    };
    let mut written = vec![0xee; repr.value_len()];
    repr.emit(&mut written)?;
    Ok(written)
}

fn grant(value: &Value) -> GrantRepr {
    GrantRepr {
        first_flow: flow(value, "first_flow"),
        port: number(value, "port"),
        count: number(value, "count"),
        lifetime_ms: number(value, "lifetime_ms"),
    }
}

fn notice(value: &Value) -> NoticeRepr {
    NoticeRepr {
        epoch: number(value, "epoch"),
        sequence: number(value, "sequence"),
        until_s: number(value, "until_s"),
        bits: number(value, "bits"),
        withdrawn: flag(value, "withdrawn"),
        prefix: bytes(value, "prefix"),
        host_key: bytes(value, "host_key"),
        signature: bytes(value, "signature"),
    }
}

/// The value of ADDRESSES; the format has no writer of its own.
fn addresses(list: &Value) -> Vec<u8> {
    let mut value = Vec::new();
    for entry in list.as_array().expect("a list of addresses") {
        let address = socket(&entry["address"]);
        let octets = match address.ip() {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(v6) => v6.octets(),
        };
        value.extend_from_slice(&octets);
        value.extend_from_slice(&address.port().to_be_bytes());
        value.extend_from_slice(&number::<u16>(entry, "flags").to_be_bytes());
    }
    value
}

/// The fields of DATA.
///
/// # Errors
///
/// The header, or that of the train, is malformed.
pub fn of_data(datagram: &[u8]) -> Result<Value, Error> {
    let header = DataRepr::parse(datagram)?;
    let chunk = &datagram[DATA_HEADER_LEN..];
    let mut fields = json!({
        "header": {
            "stack": header.stack,
            "flags": header.flags,
            "dst_flow": header.dst_flow.to_string(),
            "packet_number": header.packet_number,
            "index": header.index,
            "count": header.count,
        },
        "chunk": hex(chunk),
    });
    if header.index == 0 && !is_sealed(header.stack) && header.stack != STACK_FEC {
        let train = TrainRepr::parse(chunk)?;
        let gso = match train.gso {
            GsoKind::None => "none",
            GsoKind::Tcp => "tcp",
            GsoKind::Udp => "udp",
        };
        fields["train"] = json!({
            "gso": gso,
            "partial_checksum": train.partial_checksum,
            "segment_size": train.segment_size,
            "inner_len": train.inner_len,
        });
        fields["chunk"] = hex(&chunk[TRAIN_HEADER_LEN..]).into();
    }
    Ok(fields)
}

/// The datagram that has these fields.
pub fn to_data(fields: &Value) -> Vec<u8> {
    let header = &fields["header"];
    let mut datagram = vec![0xee; DATA_HEADER_LEN];
    DataRepr {
        stack: number(header, "stack"),
        flags: number(header, "flags"),
        dst_flow: flow(header, "dst_flow"),
        packet_number: number(header, "packet_number"),
        index: number(header, "index"),
        count: number(header, "count"),
    }
    .emit(&mut datagram);
    if let Some(train) = fields.get("train") {
        let gso = match text(train, "gso") {
            "none" => GsoKind::None,
            "tcp" => GsoKind::Tcp,
            "udp" => GsoKind::Udp,
            other => panic!("{other} is no segmentation"),
        };
        let mut bytes = [0xee; TRAIN_HEADER_LEN];
        TrainRepr {
            gso,
            partial_checksum: train["partial_checksum"].as_bool().expect("true or false"),
            segment_size: number(train, "segment_size"),
            inner_len: number(train, "inner_len"),
        }
        .emit(&mut bytes);
        datagram.extend_from_slice(&bytes);
    }
    datagram.extend_from_slice(&unhex(text(fields, "chunk")));
    datagram
}
