//! The Wireshark dissector reads what the vectors say, and refuses what the parsers refuse.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::mutation::{self, Numbers};
use crate::vector::{data, hex, malformed, messages};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/wireshark/margay.lua");
const PORT: u16 = 54324;
/// Between fields, and between several values of one: neither is in any text of the vectors.
const BETWEEN: char = '\t';
const BETWEEN_VALUES: char = '|';
/// pcap: addresses and what follows are IP, without a link layer.
const LINKTYPE_RAW: u32 = 101;
/// Fields that are read for every datagram.
const FIELDS: [&str; 151] = [
    "margay.refusal",
    "margay.version",
    "margay.type",
    "margay.flags",
    "margay.flags.resolvable",
    "margay.flags.full",
    "margay.flags.confirm",
    "margay.flags.relay",
    "margay.flags.copied",
    "margay.flags.named",
    "margay.next_protocol",
    "margay.header_len",
    "margay.payload_len",
    "margay.dst_flow",
    "margay.src_flow",
    "margay.control_seq",
    "margay.payload",
    "margay.resolvable.hop_limit",
    "margay.resolvable.reply_to",
    "margay.resolvable.reply_to_port",
    "margay.resolvable.via",
    "margay.resolvable.via_port",
    "margay.resolvable.service",
    "margay.resolvable.nonce",
    "margay.resolvable.hop_tag",
    "margay.ext.type",
    "margay.source_service",
    "margay.session.id",
    "margay.session.client",
    "margay.session.client_port",
    "margay.session.service_port",
    "margay.session.protocol",
    "margay.addresses.address",
    "margay.addresses.port",
    "margay.addresses.flags",
    "margay.capabilities.stacks",
    "margay.capabilities.mtu",
    "margay.key_exchange.host_id",
    "margay.key_exchange.assoc_id",
    "margay.key_exchange.message",
    "margay.certificate.chain",
    "margay.chain.is_answer",
    "margay.chain.shared",
    "margay.chain.failed_at",
    "margay.chain.destination",
    "margay.chain.time_s",
    "margay.chain.host_key",
    "margay.chain.signature",
    "margay.chain.box",
    "margay.chain.box_flags",
    "margay.chain.box_added_by",
    "margay.chain.host",
    "margay.chain.certificates",
    "margay.rendezvous.address",
    "margay.rendezvous.port",
    "margay.error.code",
    "margay.error.text",
    "margay.auth.assoc_id",
    "margay.auth.epoch",
    "margay.auth.receiver_epoch",
    "margay.auth.tag",
    "margay.cookie",
    "margay.stack",
    "margay.stack.demands",
    "margay.terms.give_up_after_ms",
    "margay.handover.ticket",
    "margay.handover.giver",
    "margay.handover.taker",
    "margay.handover.address",
    "margay.handover.port",
    "margay.quiet.quiet_ms",
    "margay.fence_number",
    "margay.syn_seen",
    "margay.loss.basis",
    "margay.loss.sent",
    "margay.loss.expected",
    "margay.loss.received",
    "margay.loss.gaps",
    "margay.timing.at_us",
    "margay.timing.jitter_us",
    "margay.timing.judged",
    "margay.timing.late",
    "margay.reconfiguration.step",
    "margay.reconfiguration.number",
    "margay.reconfiguration.host",
    "margay.reconfiguration.address",
    "margay.reconfiguration.port",
    "margay.splice.host",
    "margay.splice.session",
    "margay.splice.service",
    "margay.splice.unread",
    "margay.splice.written",
    "margay.splice.timestamp",
    "margay.splice.peer_scale",
    "margay.splice.own_scale",
    "margay.splice.has_sack",
    "margay.order.state",
    "margay.order.act",
    "margay.order.session",
    "margay.order.service",
    "margay.order.other",
    "margay.order.start",
    "margay.order.said_at_ms",
    "margay.order.host_key",
    "margay.order.signature",
    "margay.cut.number",
    "margay.cut.is_closed",
    "margay.cut.has_heard",
    "margay.change.step",
    "margay.change.stack",
    "margay.change.demands",
    "margay.change.number",
    "margay.flow_port.port",
    "margay.flow_port.starts",
    "margay.move.number",
    "margay.move.token",
    "margay.move.address",
    "margay.move.port",
    "margay.move.flags",
    "margay.stripe.number",
    "margay.stripe.place",
    "margay.stripe.flags.ends",
    "margay.stripe.flags.leads",
    "margay.stripe.flags.plain",
    "margay.stripe.flags.fec",
    "margay.stripe.sharing",
    "margay.stripe.weight",
    "margay.arrivals.number",
    "margay.arrivals.place",
    "margay.arrivals.packet_number",
    "margay.arrivals.at_us",
    "margay.arrivals.bytes",
    "margay.notice.epoch",
    "margay.notice.sequence",
    "margay.notice.until_s",
    "margay.notice.bits",
    "margay.notice.flags.withdrawn",
    "margay.notice.prefix",
    "margay.notice.host_key",
    "margay.notice.signature",
    "margay.grant.first_flow",
    "margay.grant.port",
    "margay.grant.count",
    "margay.grant.lifetime_ms",
    "margay.data.stack",
    "margay.data.flags",
    "margay.data.packet_number",
    "margay.data.index",
    "margay.data.count",
    "margay.data.chunk",
    "margay.train.gso",
];
const MORE_FIELDS: [&str; 7] = [
    "margay.train.flags.partial",
    "margay.train.segment_size",
    "margay.train.inner_len",
    "_ws.expert.message",
    "_ws.lua.error",
    "tcp.dstport",
    "udp.dstport",
];

type Fields = BTreeMap<String, String>;

/// The datagrams as UDP between two hosts, in a capture file.
fn pcap(datagrams: &[Vec<u8>]) -> Vec<u8> {
    let mut file = Vec::new();
    for word in [0xa1b2_c3d4, 0x0002_0004, 0, 0, 0x0004_0000, LINKTYPE_RAW] {
        file.extend_from_slice(&u32::to_be_bytes(word));
    }
    for (number, datagram) in (0_u32..).zip(datagrams) {
        let udp_len = u16::try_from(8 + datagram.len()).expect("a datagram");
        let ip_len = 20 + udp_len;
        for word in [number, 0, u32::from(ip_len), u32::from(ip_len)] {
            file.extend_from_slice(&word.to_be_bytes());
        }
        let len = ip_len.to_be_bytes();
        file.extend_from_slice(&[0x45, 0, len[0], len[1], 0, 0, 0, 0, 64, 17, 0, 0]);
        file.extend_from_slice(&[192, 0, 2, 1, 192, 0, 2, 2]);
        for half in [PORT, PORT, udp_len, 0] {
            file.extend_from_slice(&half.to_be_bytes());
        }
        file.extend_from_slice(datagram);
    }
    file
}

/// What tshark reads from each datagram, by field.
fn dissect(datagrams: &[Vec<u8>]) -> Vec<Fields> {
    let base = tempfile::tempdir().expect("a directory");
    let capture = base.path().join("vectors.pcap");
    std::fs::write(&capture, pcap(datagrams)).expect("written");
    assert!(Path::new(SCRIPT).is_file(), "{SCRIPT} is gone");
    let fields = || FIELDS.iter().chain(&MORE_FIELDS);
    let mut command = Command::new("tshark");
    // Nobody's own settings or plugins.
    command.env("WIRESHARK_CONFIG_DIR", base.path()).env("HOME", base.path()).env("LC_ALL", "C.UTF-8");
    command.arg("-n").arg("-r").arg(&capture).arg("-X").arg(format!("lua_script:{SCRIPT}"));
    command.args(["-T", "fields", "-E", "separator=/t", "-E", "occurrence=a", "-E"]);
    command.arg(format!("aggregator={BETWEEN_VALUES}"));
    for field in fields() {
        command.args(["-e", field]);
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => panic!("tshark cannot be run ({error}): scripts/setup installs it"),
    };
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "tshark failed: {complaints}");
    assert!(!complaints.contains("Lua"), "the script does not load: {complaints}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let read = |line: &str| {
        let values: Vec<&str> = line.split(BETWEEN).collect();
        assert_eq!(values.len(), fields().count(), "{line}");
        let some = fields().zip(values).filter(|(_, value)| !value.is_empty());
        some.map(|(field, value)| ((*field).to_owned(), value.to_owned())).collect()
    };
    let all: Vec<Fields> = text.lines().map(read).collect();
    assert_eq!(all.len(), datagrams.len());
    all
}

/// As versions of tshark differ in how they write: numbers in decimal, bytes without colons, truth as 1, addresses as
/// Rust writes them.
fn normal(field: &str, value: &str) -> String {
    let one = |value: &str| {
        if let Some(number) = value.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok()) {
            return number.to_string();
        }
        match value {
            "True" => return "1".to_owned(),
            "False" => return "0".to_owned(),
            _ => {}
        }
        if field == "margay.error.text" || field == "margay.refusal" {
            return value.to_owned();
        }
        match value.parse::<Ipv6Addr>() {
            Ok(address) => address.to_string(),
            Err(_) => value.replace(':', ""),
        }
    };
    value.split(BETWEEN_VALUES).map(one).collect::<Vec<_>>().join("|")
}

/// What the vector says that tshark reads.
#[derive(Default)]
struct Expected(Fields);

/// The type byte of an extension.
fn type_byte(value: &Value) -> u64 {
    match value["type"].as_str().expect("text") {
        "SOURCE_SERVICE" => 1,
        "SESSION" => 2,
        "ADDRESSES" => 3,
        "CAPABILITIES" => 4,
        "KEY_EXCHANGE" => 5,
        "CERTIFICATE" => 0x86,
        "CHAIN" => 0x87,
        "CHAIN_ADDED" => 0xec,
        "RENDEZVOUS" => 8,
        "ERROR" => 9,
        "AUTH" => 0x8a,
        "COOKIE" => 0x8b,
        "STACK" => 0x8c,
        "FLOW_PORT" => 13,
        "MOVE" => 0x8e,
        "STRIPE" => 15,
        "ARRIVALS" => 16,
        "NOTICE" => 17,
        "GRANT" => 0x93,
        "TERMS" => 20,
        "HANDOVER" => 0x96,
        "QUIET" => 21,
        "FENCE_NUMBER" => 23,
        "SYN_SEEN" => 25,
        "LOSS" => 26,
        "TIMING" => 36,
        "CHANGE" => 0x98,
        "RECONFIGURATION" => 0x9a,
        "SPLICE" => 0xcc,
        "CUT" => 0xcd,
        "ORDER" => 0xce,
        _ => value["number"].as_u64().expect("a number"),
    }
}

impl Expected {
    fn put(&mut self, field: &str, value: impl ToString) {
        let value = value.to_string();
        if value.is_empty() {
            return;
        }
        let all = self.0.entry(format!("margay.{field}")).or_default();
        if !all.is_empty() {
            all.push(BETWEEN_VALUES);
        }
        all.push_str(&value);
    }

    fn text(&mut self, field: &str, value: &Value) {
        self.put(field, value.as_str().expect("text"));
    }

    fn number(&mut self, field: &str, value: &Value) {
        self.put(field, value.as_u64().expect("a number"));
    }

    /// Hexadecimal digits that tshark shows as one number.
    fn word(&mut self, field: &str, value: &Value) {
        self.put(field, u64::from_str_radix(value.as_str().expect("text"), 16).expect("hexadecimal"));
    }

    fn socket(&mut self, address: &str, port: &str, value: &Value) {
        let Some(text) = value.as_str() else { return };
        let socket: SocketAddr = text.parse().expect("an address and a port");
        let v6 = match socket.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        self.put(address, v6);
        self.put(port, socket.port());
    }

    fn message(&mut self, bytes: &[u8], fields: &Value) {
        let header = &fields["header"];
        let half = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        self.put("version", 1);
        self.put("type", bytes[1]);
        self.put("flags", bytes[2]);
        for flag in ["RESOLVABLE", "FULL", "CONFIRM", "RELAY", "COPIED", "NAMED"] {
            let is_set = header["flags"].as_array().expect("a list").iter().any(|set| set == flag);
            self.put(&format!("flags.{}", flag.to_lowercase()), u8::from(is_set));
        }
        self.number("next_protocol", &header["next_protocol"]);
        self.put("header_len", half(4));
        self.put("payload_len", half(6));
        self.word("dst_flow", &header["dst_flow"]);
        self.word("src_flow", &header["src_flow"]);
        self.number("control_seq", &header["control_seq"]);
        self.text("payload", &fields["payload"]);
        if let Some(part) = fields.get("resolvable") {
            self.number("resolvable.hop_limit", &part["hop_limit"]);
            self.socket("resolvable.reply_to", "resolvable.reply_to_port", &part["reply_to"]);
            self.socket("resolvable.via", "resolvable.via_port", &part["via"]);
            self.text("resolvable.service", &part["service"]);
            self.word("resolvable.nonce", &part["nonce"]);
            self.text("resolvable.hop_tag", &part["hop_tag"]);
        }
        for extension in fields["extensions"].as_array().expect("a list") {
            self.extension(extension);
        }
    }

    fn extension(&mut self, value: &Value) {
        let kind = type_byte(value);
        self.put("ext.type", kind);
        match kind {
            1 => self.text("source_service", &value["service"]),
            2 => {
                self.text("session.id", &value["session"]);
                self.socket("session.client", "session.client_port", &value["client"]);
                self.number("session.service_port", &value["service_port"]);
                self.number("session.protocol", &value["protocol"]);
            }
            3 => {
                for entry in value["addresses"].as_array().expect("a list") {
                    self.socket("addresses.address", "addresses.port", &entry["address"]);
                    self.number("addresses.flags", &entry["flags"]);
                }
            }
            4 => {
                self.number("capabilities.stacks", &value["stacks"]);
                self.number("capabilities.mtu", &value["mtu"]);
            }
            5 => {
                self.text("key_exchange.host_id", &value["host_id"]);
                self.number("key_exchange.assoc_id", &value["assoc_id"]);
                self.text("key_exchange.message", &value["message"]);
            }
            0x86 => self.text("certificate.chain", &value["chain"]),
            0x87 | 0xec => self.chain(value),
            8 => self.socket("rendezvous.address", "rendezvous.port", &value["address"]),
            9 => {
                self.number("error.code", &value["code"]);
                self.text("error.text", &value["text"]);
            }
            0x8a => {
                let numbers = ["assoc_id", "epoch", "receiver_epoch"];
                numbers.iter().for_each(|part| self.number(&format!("auth.{part}"), &value[*part]));
                self.text("auth.tag", &value["tag"]);
            }
            0x8b => self.text("cookie", &value["cookie"]),
            0x8c => {
                self.number("stack", &value["stack"]);
                self.put("stack.demands", u8::from(value["demands"].as_bool().expect("a flag")));
            }
            13 => {
                self.number("flow_port.port", &value["port"]);
                self.put("flow_port.starts", u8::from(value["starts"].as_bool().expect("a flag")));
            }
            0x8e => self.location(value),
            15 | 16 => self.places(kind, value),
            17 => self.notice(value),
            0x93 => self.grant(value),
            20 => self.number("terms.give_up_after_ms", &value["give_up_after_ms"]),
            0x96 => {
                let parts = ["ticket", "giver", "taker"];
                parts.iter().for_each(|part| self.text(&format!("handover.{part}"), &value[*part]));
                self.socket("handover.address", "handover.port", &value["address"]);
            }
            21 => self.number("quiet.quiet_ms", &value["quiet_ms"]),
            23 => self.number("fence_number", &value["number"]),
            25 => self.text("syn_seen", &value["digest"]),
            26 => self.loss(value),
            36 => self.timing(value),
            0x98 => self.change(value),
            0x9a => self.reconfiguration(value),
            0xcc => self.splice(value),
            0xcd => self.cut(value),
            0xce => self.order(value),
            _ => {}
        }
    }

    fn reconfiguration(&mut self, value: &Value) {
        self.number("reconfiguration.step", &value["step"]);
        self.number("reconfiguration.number", &value["number"]);
        self.text("reconfiguration.host", &value["host"]);
        self.socket("reconfiguration.address", "reconfiguration.port", &value["address"]);
    }

    fn order(&mut self, value: &Value) {
        for field in ["state", "act", "start", "said_at_ms"] {
            self.number(&format!("order.{field}"), &value[field]);
        }
        for field in ["session", "service", "other", "host_key", "signature"] {
            self.text(&format!("order.{field}"), &value[field]);
        }
    }

    fn cut(&mut self, value: &Value) {
        self.number("cut.number", &value["number"]);
        for field in ["is_closed", "has_heard"] {
            self.put(&format!("cut.{field}"), u8::from(value[field].as_bool().expect("a flag")));
        }
    }

    fn splice(&mut self, value: &Value) {
        for field in ["host", "session", "service"] {
            self.text(&format!("splice.{field}"), &value[field]);
        }
        for socket in ["left", "right"].map(|side| &value[side]) {
            for field in ["unread", "written", "peer_scale", "own_scale"] {
                self.number(&format!("splice.{field}"), &socket[field]);
            }
            if !socket["timestamp"].is_null() {
                self.number("splice.timestamp", &socket["timestamp"]);
            }
            self.put("splice.has_sack", u8::from(socket["has_sack"].as_bool().expect("a flag")));
        }
    }

    fn chain(&mut self, value: &Value) {
        self.put("chain.is_answer", u8::from(value["is_answer"].as_bool().expect("a flag")));
        for field in ["shared", "failed_at", "time_s"] {
            self.number(&format!("chain.{field}"), &value[field]);
        }
        for field in ["destination", "host_key", "signature", "certificates"] {
            self.text(&format!("chain.{field}"), &value[field]);
        }
        for one in value["boxes"].as_array().expect("a list") {
            self.text("chain.box", &one["service"]);
            self.number("chain.box_flags", &one["flags"]);
            if one["added_by"].is_u64() {
                self.number("chain.box_added_by", &one["added_by"]);
            }
        }
        for host in value["hosts"].as_array().expect("a list") {
            self.text("chain.host", host);
        }
    }

    fn change(&mut self, value: &Value) {
        for field in ["step", "stack", "number"] {
            self.number(&format!("change.{field}"), &value[field]);
        }
        self.put("change.demands", u8::from(value["demands"].as_bool().expect("a flag")));
    }

    fn timing(&mut self, value: &Value) {
        for field in ["at_us", "judged", "late"] {
            self.number(&format!("timing.{field}"), &value[field]);
        }
        self.put("timing.jitter_us", value["jitter_us"].as_u64().unwrap_or(u32::MAX.into()));
    }

    fn loss(&mut self, value: &Value) {
        for field in ["basis", "sent", "expected", "received", "gaps"] {
            self.number(&format!("loss.{field}"), &value[field]);
        }
    }

    fn grant(&mut self, value: &Value) {
        self.word("grant.first_flow", &value["first_flow"]);
        for field in ["port", "count", "lifetime_ms"] {
            self.number(&format!("grant.{field}"), &value[field]);
        }
    }

    fn location(&mut self, value: &Value) {
        self.number("move.number", &value["number"]);
        self.text("move.token", &value["token"]);
        self.socket("move.address", "move.port", &value["address"]);
        self.number("move.flags", &value["flags"]);
    }

    fn notice(&mut self, value: &Value) {
        for field in ["epoch", "sequence", "until_s", "bits"] {
            self.number(&format!("notice.{field}"), &value[field]);
        }
        self.put("notice.flags.withdrawn", u8::from(value["withdrawn"].as_bool().expect("a flag")));
        for field in ["prefix", "host_key", "signature"] {
            self.text(&format!("notice.{field}"), &value[field]);
        }
    }

    fn places(&mut self, kind: u64, value: &Value) {
        match kind {
            15 => {
                self.number("stripe.number", &value["number"]);
                self.number("stripe.place", &value["place"]);
                for flag in ["ends", "leads", "plain", "fec"] {
                    self.put(&format!("stripe.flags.{flag}"), u8::from(value[flag].as_bool().expect("a flag")));
                }
                self.number("stripe.sharing", &value["sharing"]);
                self.number("stripe.weight", &value["weight"]);
            }
            16 => {
                self.number("arrivals.number", &value["number"]);
                for entry in value["places"].as_array().expect("a list") {
                    for field in ["place", "packet_number", "at_us", "bytes"] {
                        self.number(&format!("arrivals.{field}"), &entry[field]);
                    }
                }
            }
            _ => {}
        }
    }

    fn data(&mut self, fields: &Value) {
        let header = &fields["header"];
        self.put("version", 1);
        self.put("type", 32);
        self.number("data.stack", &header["stack"]);
        self.number("data.flags", &header["flags"]);
        self.word("dst_flow", &header["dst_flow"]);
        self.number("data.packet_number", &header["packet_number"]);
        self.number("data.index", &header["index"]);
        self.number("data.count", &header["count"]);
        self.text("data.chunk", &fields["chunk"]);
        if let Some(train) = fields.get("train") {
            let gso = ["none", "tcp", "udp"].iter().position(|name| train["gso"] == *name).expect("known");
            self.put("train.gso", gso);
            self.put("train.flags.partial", u8::from(train["partial_checksum"].as_bool().expect("true or false")));
            self.number("train.segment_size", &train["segment_size"]);
            self.number("train.inner_len", &train["inner_len"]);
        }
    }
}

/// The fields of this protocol alone, as they are compared.
fn own(fields: &Fields) -> Fields {
    let own = fields.iter().filter(|(field, _)| field.starts_with("margay."));
    own.map(|(field, value)| (field.clone(), normal(field, value))).collect()
}

#[test]
fn it_reads_what_the_vectors_say() {
    let (messages, data) = (messages(), data());
    let datagrams: Vec<Vec<u8>> = messages.iter().chain(&data).map(|vector| vector.bytes.clone()).collect();
    let found = dissect(&datagrams);
    for (at, vector) in messages.iter().chain(&data).enumerate() {
        let mut expected = Expected::default();
        if at < messages.len() {
            expected.message(&vector.bytes, &vector.fields);
        } else {
            expected.data(&vector.fields);
        }
        let mut own = own(&found[at]);
        if vector.name == "unknown-skipped" {
            assert_eq!(own.remove("margay.ext.type").as_deref(), Some("85|138"), "shown, though nobody acts on it");
            expected.0.remove("margay.ext.type");
        }
        assert_eq!(own, expected.0, "{}", vector.name);
        assert_eq!(found[at].get("_ws.lua.error"), None, "{}", vector.name);
        let warns = found[at].get("_ws.expert.message").is_some_and(|text| text.contains("UNKNOWN_CRITICAL"));
        assert_eq!(warns, vector.name == "unknown-critical", "{}", vector.name);
    }
    let of = |name: &str| {
        let at = messages.iter().chain(&data).position(|vector| vector.name == name);
        &found[at.expect("there")]
    };
    for (name, field, value) in [
        ("syn", "tcp.dstport", "80"),
        ("one-packet", "tcp.dstport", "80"),
        ("one-packet-v6", "udp.dstport", "54324|5300"),
    ] {
        assert_eq!(
            of(name).get(field).map(String::as_str),
            Some(value),
            "{name}: the program's own packet is read too"
        );
    }
}

#[test]
fn it_says_why_the_malformed_are_refused() {
    let all = malformed();
    let datagrams: Vec<Vec<u8>> = all.iter().map(|vector| vector.bytes.clone()).collect();
    for (vector, found) in all.iter().zip(dissect(&datagrams)) {
        assert_eq!(found.get("margay.refusal"), Some(&vector.refusal), "{}", vector.name);
        let marked = found.get("_ws.expert.message").expect("marked");
        assert!(marked.contains(&format!("Malformed: {}", vector.refusal)), "{}: {marked}", vector.name);
        assert_eq!(found.get("_ws.lua.error"), None, "{}", vector.name);
    }
}

#[test]
fn it_refuses_what_the_parsers_refuse_and_nothing_else() {
    let corpus = mutation::corpus();
    let mut numbers = Numbers::new(0);
    // An empty datagram is nobody's: tshark shows it to no dissector.
    let datagrams: Vec<Vec<u8>> =
        (0..4000).map(|_| mutation::mutant(&mut numbers, &corpus)).filter(|bytes| !bytes.is_empty()).collect();
    for (bytes, found) in datagrams.iter().zip(dissect(&datagrams)) {
        assert_eq!(found.get("_ws.lua.error"), None, "{}", hex(bytes));
        let refusal = found.get("margay.refusal");
        assert_eq!(refusal.is_none(), mutation::check(bytes), "{refusal:?} {}", hex(bytes));
    }
}
