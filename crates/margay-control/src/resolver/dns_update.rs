//! Dynamic update (RFC 2136) of a zone with what is registered, signed with a key that the server knows (TSIG, RFC
//! 8945).

use std::net::{IpAddr, SocketAddr};

use data_encoding::BASE64;
use hickory_proto::ProtoError;
use hickory_proto::op::{Message, OpCode, Query, ResponseCode, UpdateMessage};
use hickory_proto::rr::rdata::tsig::TsigAlgorithm;
use hickory_proto::rr::rdata::{CNAME, SRV, TXT};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType, TSigner};
use margay_core::key::to_hex;
use margay_core::name::Prefix;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::dns_record::{Remark, owner, owner_by_bits, under};
use super::writer::{Entry, Write, Writing};
use super::{Place, Wanted};
use crate::Clock;

/// For how many seconds resolvers may keep what they have heard.
const TTL_S: u32 = 30;
/// How far the server's clock may be from this one (RFC 8945, 10).
const FUDGE_S: u16 = 300;

/// A zone, and the right to change it.
pub struct DnsUpdate {
    server: SocketAddr,
    zone: Name,
    key: TSigner,
    clock: Clock,
}

/// Reads a TSIG key as `nsupdate -y` and `kdig -y` have it: `hmac-sha256:NAME:BASE64`.
///
/// # Errors
///
/// It is none; the message does not show it.
pub fn parse_key(text: &str) -> Result<TSigner, String> {
    let wrong = "it is no TSIG key; write one line, ALGORITHM:NAME:SECRET, for example hmac-sha256:margay:c2VjcmV0";
    let [algorithm, name, secret] = text.trim().split(':').collect::<Vec<_>>()[..] else {
        return Err(wrong.to_owned());
    };
    let algorithm = match algorithm {
        "hmac-sha256" => TsigAlgorithm::HmacSha256,
        "hmac-sha384" => TsigAlgorithm::HmacSha384,
        "hmac-sha512" => TsigAlgorithm::HmacSha512,
        other => {
            return Err(format!("`{other}` is no algorithm here; there are hmac-sha256, hmac-sha384 and hmac-sha512"));
        }
    };
    let name = Name::from_ascii(name).map_err(|_| wrong.to_owned())?;
    let secret = BASE64.decode(secret.as_bytes()).map_err(|_| wrong.to_owned())?;
    TSigner::new(secret, algorithm, name, FUDGE_S).map_err(|error| error.to_string())
}

impl DnsUpdate {
    /// Updates `zone` at its primary server.
    ///
    /// # Errors
    ///
    /// The zone is no name.
    pub fn new(server: SocketAddr, zone: &str, key: TSigner, clock: Clock) -> Result<Self, String> {
        let mut zone = Name::from_ascii(zone).map_err(|error| format!("`{zone}` is no DNS zone: {error}"))?;
        zone.set_fqdn(true);
        Ok(Self { server, zone, key, clock })
    }

    async fn send(&self, mut message: Message) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("{}: {error}", self.server);
        let made = |error: ProtoError| error.to_string();
        let verifier = message.finalize(&self.key, self.clock.unix_s()).map_err(made)?;
        let bytes = message.to_vec().map_err(made)?;
        let length = u16::try_from(bytes.len()).map_err(|_| "the update is too large for DNS".to_owned())?;
        let mut stream = TcpStream::connect(self.server).await.map_err(failed)?;
        stream.write_all(&[&length.to_be_bytes()[..], &bytes].concat()).await.map_err(failed)?;
        let length = stream.read_u16().await.map_err(failed)?;
        let mut answer = vec![0; length.into()];
        stream.read_exact(&mut answer).await.map_err(failed)?;
        let said = Message::from_vec(&answer).map_err(|error| format!("{}: no DNS answer: {error}", self.server))?;
        if said.response_code != ResponseCode::NoError {
            return Err(refusal(self.server, said.response_code));
        }
        // Whoever stands between could say "done" otherwise.
        let mut verifier = verifier.ok_or_else(|| "the update was not signed".to_owned())?;
        verifier
            .verify(&answer)
            .map(drop)
            .map_err(|error| format!("{}: its answer is not signed right: {error}", self.server))
    }
}

fn refusal(server: SocketAddr, code: ResponseCode) -> String {
    let advice = match code {
        ResponseCode::NotAuth => {
            "it does not know the TSIG key, or the clocks differ, or it is not the zone's primary server"
        }
        ResponseCode::Refused => "the TSIG key may not change these names; see the server's update policy",
        ResponseCode::NotZone => "the names are not in its zone",
        _ => "see the server's log",
    };
    format!("{server} refuses the update ({code}): {advice}")
}

/// The label of a host under a name.
fn target_of(place: &Place, base: &Name) -> Result<Name, ProtoError> {
    let host = match (place.host, place.address.ip()) {
        (Some(host), _) => to_hex(&host.0),
        (None, IpAddr::V4(v4)) => to_hex(&v4.octets()),
        (None, IpAddr::V6(v6)) => to_hex(&v6.octets()),
    };
    under(&format!("h{host}"), base)
}

/// What makes a zone say what an entry says.
fn update(entry: &Entry, before: &[Place], zone: &Name) -> Result<Message, ProtoError> {
    let (service, prefix) = (entry.name.service_id(), entry.name.prefix());
    let wanted = Wanted { service, written: Some(entry.name.written().to_owned()) };
    let (owner, by_bits) = (owner(&wanted, zone)?, owner_by_bits(&service, zone)?);
    // Hosts stand beside the name, without the labels of the protocol: `hID.web.shop.ZONE`.
    let base = owner.trim_to(usize::from(owner.num_labels()).saturating_sub(2));
    let mut message = Message::query();
    (message.metadata.op_code, message.metadata.recursion_desired) = (OpCode::Update, false);
    let mut of_zone = Query::new();
    of_zone.set_name(zone.clone()).set_query_class(DNSClass::IN).set_query_type(RecordType::SOA);
    message.add_zone(of_zone);
    let mut gone = vec![(owner.clone(), RecordType::SRV), (owner.clone(), RecordType::TXT)];
    for place in before.iter().chain(&entry.places) {
        let target = target_of(place, &base)?;
        gone.extend([(target.clone(), RecordType::A), (target, RecordType::AAAA)]);
    }
    if by_bits != owner {
        gone.push((by_bits.clone(), RecordType::CNAME));
    }
    gone.dedup();
    for (name, kind) in gone {
        let mut record = Record::update0(name, 0, kind);
        record.dns_class = DNSClass::ANY;
        message.add_update(record.into_record_of_rdata());
    }
    let mut add = |name: &Name, data: RData| {
        message.add_update(Record::from_rdata(name.clone(), TTL_S, data));
    };
    for place in &entry.places {
        let target = target_of(place, &base)?;
        let weight = u16::try_from(place.weight).unwrap_or(u16::MAX);
        add(&owner, RData::SRV(SRV::new(0, weight, place.address.port(), target.clone())));
        add(&target, place.address.ip().into());
        if let Some(host) = place.host {
            add(&owner, RData::TXT(TXT::new(vec![Remark::Host { target, host }.to_string()])));
        }
    }
    if !entry.places.is_empty() && prefix != Prefix::from(service) {
        add(&owner, RData::TXT(TXT::new(vec![Remark::Bits(prefix.bits).to_string()])));
    }
    if !entry.places.is_empty() && by_bits != owner {
        add(&by_bits, RData::CNAME(CNAME(owner.clone())));
    }
    Ok(message)
}

impl Write for DnsUpdate {
    fn write<'a>(&'a self, entry: &'a Entry, before: &'a [Place]) -> Writing<'a> {
        Box::pin(async move {
            let message = update(entry, before, &self.zone).map_err(|error| error.to_string())?;
            self.send(message).await
        })
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::TSigResponseContext;
    use margay_core::key::HostId;
    use tokio::net::TcpListener;

    use super::*;

    fn place(n: u8) -> Place {
        Place { address: ([10, 1, 0, n], 54324).into(), host: Some(HostId([n; 16])), weight: 70 }
    }

    fn lines(name: &str, places: &[Place], before: &[Place]) -> Vec<String> {
        let zone = Name::from_ascii("dns.test.").expect("literal");
        let entry = Entry { name: name.parse().expect("literal"), places: places.to_vec() };
        let message = update(&entry, before, &zone).expect("short");
        assert_eq!(message.op_code, OpCode::Update);
        let line = |record: &Record| match record.dns_class {
            DNSClass::ANY => format!("- {} {}", record.name, record.record_type()),
            _ => format!("+ {} {} {} {}", record.name, record.ttl, record.record_type(), record.data),
        };
        message.updates().iter().map(line).collect()
    }

    #[test]
    fn an_update_replaces_what_a_name_had() {
        let (h1, h2) = ("01".repeat(16), "02".repeat(16));
        let by_bits = "_sal._udp.18555bd6.842add7b70d72e01._sid.dns.test.";
        let owner = "_sal._udp.web.shop.dns.test.";
        let wanted = [
            format!("- {owner} SRV"),
            format!("- {owner} TXT"),
            format!("- h{h1}.web.shop.dns.test. A"),
            format!("- h{h1}.web.shop.dns.test. AAAA"),
            format!("- h{h2}.web.shop.dns.test. A"),
            format!("- h{h2}.web.shop.dns.test. AAAA"),
            format!("- {by_bits} CNAME"),
            format!("+ {owner} 30 SRV 0 70 54324 h{h2}.web.shop.dns.test."),
            format!("+ h{h2}.web.shop.dns.test. 30 A 10.1.0.2"),
            format!("+ {owner} 30 TXT margay1 host={h2} target=h{h2}.web.shop.dns.test."),
            format!("+ {by_bits} 30 CNAME {owner}"),
        ];
        assert_eq!(lines("web.shop", &[place(2)], &[place(1)]), wanted);
        let gone = lines("web.shop", &[], &[place(2)]);
        assert!(gone.iter().all(|line| line.starts_with('-')), "{gone:?}");
        assert_eq!(gone.len(), 5);
        let prefix = lines("sid:842add7b70d72e0118555bd6/96", &[place(2)], &[]);
        assert!(prefix.contains(&format!("+ {by_bits} 30 TXT margay1 bits=96")), "{prefix:#?}");
        assert!(prefix.iter().all(|line| !line.contains("CNAME")), "{prefix:#?}");
        assert!(
            prefix.contains(&format!("+ h{h2}.18555bd6.842add7b70d72e01._sid.dns.test. 30 A 10.1.0.2")),
            "{prefix:#?}"
        );
    }

    /// What comes of an update at a server that answers `code`, signed or not.
    async fn sent(code: ResponseCode, is_signed: bool) -> Result<(), String> {
        const NOW_S: u64 = 1_700_000_000;
        let key = || parse_key("hmac-sha256:margay:c2VjcmV0").expect("right");
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let server = listener.local_addr().expect("bound");
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut asked = vec![0; stream.read_u16().await.expect("a length").into()];
            stream.read_exact(&mut asked).await.expect("a message");
            let (id, (mac, ..)) = {
                let message = Message::from_vec(&asked).expect("an update");
                (message.id, key().verify_message_byte(&asked, None, true).expect("signed by the client"))
            };
            let mut answer = Message::response(id, OpCode::Update);
            answer.metadata.response_code = code;
            if is_signed {
                let context = TSigResponseContext::new(id, NOW_S, key(), mac, None);
                let signature = context.sign(&answer.to_vec().expect("short")).expect("signed");
                answer.set_signature(signature);
            }
            let bytes = answer.to_vec().expect("short");
            let length = u16::try_from(bytes.len()).expect("short");
            stream.write_all(&[&length.to_be_bytes()[..], &bytes].concat()).await.expect("sent");
        });
        let update = DnsUpdate::new(server, "dns.test", key(), Clock::from_fn(|| NOW_S)).expect("right");
        let entry = Entry { name: "web.shop".parse().expect("literal"), places: vec![place(1)] };
        update.write(&entry, &[]).await
    }

    #[tokio::test]
    async fn only_a_signed_answer_counts_and_a_refusal_says_what_to_do() {
        assert_eq!(sent(ResponseCode::NoError, true).await, Ok(()));
        let unsigned = sent(ResponseCode::NoError, false).await.expect_err("not signed");
        assert!(unsigned.contains("its answer is not signed right"), "{unsigned}");
        let refused = sent(ResponseCode::Refused, false).await.expect_err("refused");
        assert!(refused.contains("the TSIG key may not change these names"), "{refused}");
    }

    #[test]
    fn a_key_is_read_as_other_programs_have_it() {
        let key = parse_key("hmac-sha256:margay.:c2VjcmV0\n").expect("right");
        assert_eq!((key.key(), key.signer_name().to_string().as_str()), (&b"secret"[..], "margay."));
        for (text, part) in [
            ("", "no TSIG key"),
            ("hmac-md5:margay:c2VjcmV0", "`hmac-md5` is no algorithm"),
            ("hmac-sha256:margay:???", "no TSIG key"),
            ("hmac-sha256:margay", "no TSIG key"),
        ] {
            let error = parse_key(text).err().expect(part);
            assert!(error.contains(part) && !error.contains("???"), "{error}");
        }
    }
}
