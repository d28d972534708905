//! The DNS responder on loopback sockets, over a store in a temporary directory, asked by another implementation's
//! encoder.

mod dns_world;

use margay_core::Ranges;
use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::Ordering;

use dns_world::{Agent, World, id_of, question, responder, wire};
use hickory_proto::op::{Edns, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, RecordType};
use margay_control::dns::channel::{self, Ended};
use margay_control::dns::{DnsError, Responder};
use margay_control::lease::Asker;
use margay_control::store::StoredLease;
use proptest::test_runner::{Config, TestRunner};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

fn addresses(answer: &Message) -> Vec<IpAddr> {
    let of = |data: &RData| match data {
        RData::A(a) => Some(IpAddr::V4(a.0)),
        RData::AAAA(aaaa) => Some(IpAddr::V6(aaaa.0)),
        _ => None,
    };
    answer.answers.iter().filter_map(|record| of(&record.data)).collect()
}

fn assert_nothing(answer: &Message, code: ResponseCode, why: &str) {
    assert_eq!(answer.metadata.response_code, code, "{why}");
    assert!(answer.answers.is_empty(), "{why}");
    assert_eq!(answer.authorities.len(), 1, "{why}: one SOA, so that resolvers remember it");
    assert_eq!(answer.authorities[0].record_type(), RecordType::SOA, "{why}");
    assert!(answer.metadata.authoritative, "{why}");
}

#[tokio::test]
async fn a_name_has_a_lease_and_a_computed_address() {
    let world = World::start().await;
    let four = world.ask("web.shop.sal.internal.", RecordType::A).await;
    let address = world.leases.find(&"web.shop".parse().expect("a name")).expect("leased");
    assert_eq!(addresses(&four), [IpAddr::V4(address)]);
    assert_eq!(world.sal.bound(address.into()), Some(id_of("web.shop")), "the core knows it before the program does");
    assert!(four.metadata.authoritative && four.metadata.recursion_available && four.metadata.recursion_desired);
    assert_eq!((four.answers[0].ttl, four.metadata.message_type), (30, MessageType::Response));
    let six = world.ask("web.shop.sal.internal.", RecordType::AAAA).await;
    assert_eq!(addresses(&six), [IpAddr::V6(Ranges::USUAL.virtual_v6(&id_of("web.shop")))]);
    let both = world.ask("web.shop.sal.internal.", RecordType::ANY).await;
    assert_eq!(addresses(&both).len(), 2);
    let deep = world.ask("web.shop.example.sal.internal.", RecordType::A).await;
    assert_eq!(addresses(&deep).len(), 1);
    assert_ne!(addresses(&deep), addresses(&four));
    let counters = world.responder.counters();
    assert_eq!((counters.queries, counters.answered, counters.refused, counters.malformed), (4, 4, 0, 0));
}

#[tokio::test]
async fn case_does_not_matter_and_comes_back_as_asked() {
    let world = World::start().await;
    let lower = world.ask("web.shop.sal.internal.", RecordType::A).await;
    let mixed = world.ask("wEb.ShOp.SAL.internal.", RecordType::A).await;
    assert_eq!(addresses(&lower), addresses(&mixed));
    assert_eq!(mixed.queries[0].name.to_ascii(), "wEb.ShOp.SAL.internal.");
    assert_eq!(mixed.answers[0].name.to_ascii(), "wEb.ShOp.SAL.internal.");
    assert_eq!(world.leases.len(), 1);
}

#[tokio::test]
async fn other_types_and_the_zones_own_names() {
    let world = World::start().await;
    for kind in [RecordType::MX, RecordType::TXT, RecordType::HTTPS, RecordType::SRV, RecordType::DS] {
        let answer = world.ask("web.shop.sal.internal.", kind).await;
        assert_nothing(&answer, ResponseCode::NoError, &kind.to_string());
    }
    assert!(world.leases.is_empty(), "only who asks for an address gets one");
    let apex = world.ask("sal.internal.", RecordType::SOA).await;
    assert!(matches!(&apex.answers[0].data, RData::SOA(soa) if soa.mname.to_ascii() == "ns.sal.internal."));
    let servers = world.ask("sal.internal.", RecordType::NS).await;
    assert!(matches!(&servers.answers[0].data, RData::NS(ns) if ns.0.to_ascii() == "ns.sal.internal."));
    assert_nothing(&world.ask("sal.internal.", RecordType::A).await, ResponseCode::NoError, "apex");
    assert_eq!(addresses(&world.ask("ns.sal.internal.", RecordType::A).await), [IpAddr::V4(Ipv4Addr::LOCALHOST)]);
    assert_nothing(&world.ask("ns.sal.internal.", RecordType::AAAA).await, ResponseCode::NoError, "ns");
    // "No such name" would say that there is nothing below it either (RFC 8020).
    assert_nothing(&world.ask("shop.sal.internal.", RecordType::A).await, ResponseCode::NoError, "an authority");
}

#[tokio::test]
async fn names_that_are_none_do_not_exist() {
    let world = World::start().await;
    let long = "b".repeat(50);
    for labels in [
        vec!["_http", "_tcp", "web", "shop", "sal", "internal"],
        vec!["-web", "shop", "sal", "internal"],
        vec!["web", "shop-", "sal", "internal"],
        vec!["_", "sal", "internal"],
        vec!["a", &long, &long, &long, &long, "sal", "internal"],
        vec!["web", "shop/key:User42", "sal", "internal"],
        vec!["sid:00", "shop", "sal", "internal"],
        vec!["web.shop", "sal", "internal"],
        vec!["w\0b", "shop", "sal", "internal"],
    ] {
        let mut name = Name::from_labels(labels.iter().map(|label| label.as_bytes())).expect("any bytes");
        name.set_fqdn(true);
        let answer = world.exchange(&wire(&question(name, RecordType::A))).await;
        assert_nothing(&answer, ResponseCode::NXDomain, &format!("{labels:?}"));
    }
    assert!(world.leases.is_empty());
}

#[tokio::test]
async fn everything_else_is_refused_at_once_where_there_is_no_server() {
    let world = World::start().await;
    let all = ["example.com.", ".", "internal.", "xsal.internal.", "sal.internal.example.", "1.0.0.10.in-addr.arpa."];
    for name in all {
        let answer = world.ask(name, RecordType::A).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::Refused, "{name}");
        assert!(!answer.metadata.authoritative && answer.answers.is_empty() && answer.authorities.is_empty());
    }
    let refused = world.responder.counters().refused;
    assert_eq!(refused, 6);
    let mut chaos = question(name_of("web.shop.sal.internal."), RecordType::TXT);
    chaos.queries[0].set_query_class(DNSClass::CH);
    assert_eq!(world.exchange(&wire(&chaos)).await.metadata.response_code, ResponseCode::Refused);
    let transfer = world.ask("sal.internal.", RecordType::AXFR).await;
    assert_eq!(transfer.metadata.response_code, ResponseCode::Refused);
    let mut notify = question(name_of("sal.internal."), RecordType::SOA);
    notify.metadata.op_code = OpCode::Notify;
    assert_eq!(world.exchange(&wire(&notify)).await.metadata.response_code, ResponseCode::NotImp);
}

fn name_of(text: &str) -> Name {
    Name::from_ascii(text).expect("a literal name")
}

#[tokio::test]
async fn edns_is_answered_in_kind() {
    let world = World::start().await;
    let plain = world.ask("web.shop.sal.internal.", RecordType::A).await;
    assert!(plain.edns.is_none());
    let mut asked = question(name_of("web.shop.sal.internal."), RecordType::A);
    let mut edns = Edns::new();
    edns.set_max_payload(4096).set_dnssec_ok(true);
    asked.set_edns(edns.clone());
    let answer = world.exchange(&wire(&asked)).await;
    let given = answer.edns.expect("EDNS for EDNS");
    assert!(given.flags().dnssec_ok);
    assert_eq!((given.version(), given.max_payload()), (0, 1232));
    edns.set_version(1);
    asked.set_edns(edns);
    let answer = world.exchange(&wire(&asked)).await;
    // 16 is BADVERS here, and BADSIG to the parser.
    assert_eq!(u16::from(answer.metadata.response_code), u16::from(ResponseCode::BADVERS));
    assert_eq!(answer.edns.expect("EDNS").version(), 0, "the version that it has");
    assert!(answer.answers.is_empty());
}

#[tokio::test]
async fn fallbacks_are_plain_and_short() {
    let world = World::start().await;
    world.directory.set("web.shop", vec!["192.0.2.7".parse().expect("literal")]);
    let four = world.ask("web.shop.sal.internal.", RecordType::A).await;
    assert_eq!(addresses(&four), ["192.0.2.7".parse::<IpAddr>().expect("literal")]);
    assert_eq!(four.answers[0].ttl, 1);
    let six = world.ask("web.shop.sal.internal.", RecordType::AAAA).await;
    assert_nothing(&six, ResponseCode::NoError, "no virtual address beside a plain one");
    assert_eq!(six.authorities[0].ttl, 1);
    assert!(world.leases.is_empty());
    world.directory.set("web.shop", Vec::new());
    assert_eq!(addresses(&world.ask("web.shop.sal.internal.", RecordType::A).await).len(), 1);
    assert_eq!(world.leases.len(), 1);
}

#[tokio::test]
async fn in_a_search_list_a_name_that_nobody_has_does_not_exist_and_takes_no_lease() {
    let world = World::start().await;
    world.directory.only("web.shop");
    for kind in [RecordType::A, RecordType::AAAA, RecordType::MX] {
        let none = world.ask("host.example.com.sal.internal.", kind).await;
        assert_nothing(&none, ResponseCode::NXDomain, "nobody's");
        assert_eq!(none.authorities[0].ttl, 1);
    }
    assert!(world.leases.is_empty());
    assert_eq!(addresses(&world.ask("web.shop.sal.internal.", RecordType::A).await).len(), 1);
}

#[tokio::test]
async fn answers_fit_where_they_go() {
    let world = World::start().await;
    let many: Vec<IpAddr> = (0..120).map(|n| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, n).into()).collect();
    world.directory.set("web.shop", many);
    let asked = question(name_of("web.shop.sal.internal."), RecordType::AAAA);
    for (payload, limit) in [(None, 512), (Some(100), 512), (Some(900), 900), (Some(65535), 1232)] {
        let mut asked = asked.clone();
        if let Some(payload) = payload {
            let mut edns = Edns::new();
            edns.set_max_payload(payload);
            asked.set_edns(edns);
        }
        let bytes = world.exchange_bytes(&wire(&asked)).await;
        assert!(bytes.len() <= limit && bytes.len() > limit / 2, "{payload:?}: {}", bytes.len());
        let answer = Message::from_vec(&bytes).expect("readable");
        assert!(answer.metadata.truncation);
    }
    let mut stream = TcpStream::connect(world.responder.local_address()).await.expect("accepted");
    let answer = over_stream(&mut stream, &wire(&asked)).await.expect("answered");
    assert_eq!(addresses(&answer).len(), 120);
    assert!(!answer.metadata.truncation);
}

async fn over_stream(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<Message> {
    let len = u16::try_from(bytes.len()).expect("short");
    stream.write_all(&[&len.to_be_bytes()[..], bytes].concat()).await?;
    read_stream(stream).await
}

async fn read_stream(stream: &mut TcpStream) -> io::Result<Message> {
    let mut bytes = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut bytes).await?;
    Ok(Message::from_vec(&bytes).expect("readable"))
}

#[tokio::test]
async fn pointers_give_the_written_name() {
    let world = World::start().await;
    let lease = |name: &str| world.leases.lease(&name.parse().expect("a name"), Asker::Operator).expect("leased");
    let reverse = |address: IpAddr| Name::from(address);
    let (web, user) = (lease("web.shop"), lease("web.shop/key:user42"));
    for address in [IpAddr::V4(web), IpAddr::V6(Ranges::USUAL.virtual_v6(&id_of("web.shop")))] {
        let answer = world.exchange(&wire(&question(reverse(address), RecordType::PTR))).await;
        assert!(
            matches!(&answer.answers[..], [record] if matches!(&record.data, RData::PTR(ptr) if ptr.0.to_ascii() == "web.shop.sal.internal.")),
            "{address}"
        );
    }
    let none = [IpAddr::V4(user), "198.19.3.4".parse().expect("literal"), "fd5a:4c00::1".parse().expect("literal")];
    for address in none {
        let answer = world.exchange(&wire(&question(reverse(address), RecordType::PTR))).await;
        assert_nothing(&answer, ResponseCode::NXDomain, &address.to_string());
    }
    assert_nothing(
        &world.ask("1.18.198.in-addr.arpa.", RecordType::PTR).await,
        ResponseCode::NoError,
        "half an address",
    );
    for odd in ["x.1.18.198.in-addr.arpa.", "300.1.18.198.in-addr.arpa.", "1.1.1.18.198.in-addr.arpa."] {
        assert_nothing(&world.ask(odd, RecordType::PTR).await, ResponseCode::NXDomain, odd);
    }
    assert_eq!(world.ask("18.198.in-addr.arpa.", RecordType::SOA).await.answers.len(), 1);
    assert_nothing(
        &world.exchange(&wire(&question(reverse(web.into()), RecordType::A))).await,
        ResponseCode::NoError,
        "A",
    );
}

#[tokio::test]
async fn a_flood_of_random_names_fails_clearly_and_harms_nobody() {
    let world = World::start().await;
    let known = world.ask("web.shop.sal.internal.", RecordType::A).await;
    let mut failed = 0;
    for n in 0..300 {
        let answer = world.ask(&format!("r{n}.x.sal.internal."), RecordType::A).await;
        failed += usize::from(answer.metadata.response_code == ResponseCode::ServFail);
    }
    // One asker has half of what may be new within moments.
    assert_eq!(failed, 300 - 127);
    assert_eq!(world.leases.len(), 128);
    assert_eq!(addresses(&world.ask("web.shop.sal.internal.", RecordType::A).await), addresses(&known));
    assert_eq!(addresses(&world.ask("new.x.sal.internal.", RecordType::AAAA).await).len(), 1, "computed, hence free");
    let mut asked = question(name_of("new.x.sal.internal."), RecordType::A);
    asked.set_edns(Edns::new());
    let bytes = world.exchange_bytes(&wire(&asked)).await;
    assert!(String::from_utf8_lossy(&bytes).contains("more than 10 new names a second"), "RFC 8914 says why");
    world.now_s.fetch_add(1, Ordering::SeqCst);
    assert_eq!(addresses(&world.ask("new.x.sal.internal.", RecordType::A).await).len(), 1);
    assert_eq!(world.responder.counters().failed, 300 - 127 + 1);
}

#[tokio::test]
async fn a_pool_that_is_used_up_fails_clearly_and_gives_nobody_the_address_of_another_name() {
    let lease = |number: u32| {
        let written = format!("s{number}.old");
        let address = Ipv4Addr::from(u32::from(Ipv4Addr::new(198, 18, 1, 0)) + number).into();
        StoredLease { address, service: id_of(&written), name: written, used_s: 1_000_000 }
    };
    let all: Vec<_> = (0..255 * 256).map(lease).collect();
    let world = World::start_with(&all, &[]).await;
    let mut asked = question(name_of("web.shop.sal.internal."), RecordType::A);
    asked.set_edns(Edns::new());
    let bytes = world.exchange_bytes(&wire(&asked)).await;
    assert!(String::from_utf8_lossy(&bytes).contains("was used within the last day"), "RFC 8914 says why");
    let answer = world.ask("web.shop.sal.internal.", RecordType::A).await;
    assert_nothing_known(&answer);
    assert_eq!(addresses(&world.ask("s7.old.sal.internal.", RecordType::A).await), [all[7].address]);
    assert_eq!((world.leases.counts().exhausted, world.leases.fullness().idle), (2, 0));
    assert_eq!(world.leases.len(), all.len());
}

fn assert_nothing_known(answer: &Message) {
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    assert!(answer.answers.is_empty() && answer.authorities.is_empty());
}

#[tokio::test]
async fn what_is_no_question_gets_a_format_error_or_nothing() {
    let world = World::start().await;
    let good = wire(&question(name_of("web.shop.sal.internal."), RecordType::A));
    for count in [0, 2, 0xffff_u16] {
        let mut bytes = good.clone();
        bytes[4..6].copy_from_slice(&count.to_be_bytes());
        let answer = world.exchange(&bytes).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::FormErr, "{count} questions");
    }
    assert_eq!(world.exchange(&good[..14]).await.metadata.response_code, ResponseCode::FormErr);
    let mut response = good.clone();
    response[2] |= 0x80;
    for silent in [&response[..], &good[..11], &good[..0]] {
        world.client.send_to(silent, world.responder.local_address()).await.expect("sent");
    }
    let answer = world.exchange(&good).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::NoError, "the next answer is to the next question");
    assert_eq!(world.responder.counters().malformed, 7);
}

#[tokio::test]
async fn garbage_never_ends_it() {
    let world = World::start().await;
    let good = wire(&question(name_of("web.shop.sal.internal."), RecordType::A));
    let cases = dns_world::garbage(&mut TestRunner::new(Config::default()), &good, 2000);
    // Answers may overtake each other: those that wait for the disk come later.
    let mut sent = HashSet::new();
    for case in cases {
        sent.extend(case.first_chunk::<2>().copied());
        world.client.send_to(&case, world.responder.local_address()).await.expect("sent");
        let mut asked = question(name_of("web.shop.sal.internal."), RecordType::A);
        asked.metadata.id = 0x4d4d;
        world.client.send_to(&wire(&asked), world.responder.local_address()).await.expect("sent");
        loop {
            let bytes = world.receive().await;
            let answer = Message::from_vec(&bytes).expect("only well-formed answers");
            assert_eq!(answer.metadata.message_type, MessageType::Response);
            if answer.metadata.id == 0x4d4d && answer.queries.len() == 1 {
                break;
            }
            assert!(
                bytes.first_chunk::<2>().is_some_and(|id| sent.contains(id)),
                "an answer to the garbage, {bytes:02x?}"
            );
        }
    }
    assert!(world.responder.counters().malformed > 100);
}

#[tokio::test]
async fn streams_carry_many_questions_and_end_at_the_first_that_is_none() {
    let world = World::start().await;
    let at = world.responder.local_address();
    let good = wire(&question(name_of("web.shop.sal.internal."), RecordType::A));
    let framed = [&u16::try_from(good.len()).expect("short").to_be_bytes()[..], &good].concat();
    let mut stream = TcpStream::connect(at).await.expect("accepted");
    stream.write_all(&[&framed[..], &framed, &framed].concat()).await.expect("sent");
    for _ in 0..3 {
        assert_eq!(addresses(&read_stream(&mut stream).await.expect("answered")).len(), 1);
    }
    for bad in [vec![0, 3, 1, 2, 3], vec![0xff; 4], vec![0, 0]] {
        let mut stream = TcpStream::connect(at).await.expect("accepted");
        stream.write_all(&bad).await.expect("sent");
        assert_eq!(ends(&mut stream).await, 0, "closed without a word after {bad:?}");
    }
}

/// Reads until the other end is gone, however it went.
async fn ends(stream: &mut TcpStream) -> usize {
    let mut all = Vec::new();
    match stream.read_to_end(&mut all).await {
        Ok(_) => all.len(),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => all.len(),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn connections_are_bounded() {
    let world = World::start().await;
    let at = world.responder.local_address();
    let good = wire(&question(name_of("web.shop.sal.internal."), RecordType::A));
    let mut open = Vec::new();
    for _ in 0..128 {
        let mut stream = TcpStream::connect(at).await.expect("accepted");
        over_stream(&mut stream, &good).await.expect("answered");
        open.push(stream);
    }
    let mut one_more = TcpStream::connect(at).await.expect("accepted");
    assert_eq!(ends(&mut one_more).await, 0);
    drop(open);
    assert_eq!(addresses(&world.exchange(&good).await).len(), 1, "UDP goes on");
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let world = World::start().await;
    let mut stream = TcpStream::connect(world.responder.local_address()).await.expect("accepted");
    stream.write_all(&[0]).await.expect("sent");
    // Time jumps ahead whenever nothing else is to be done.
    tokio::time::pause();
    assert_eq!(ends(&mut stream).await, 0);
}

#[tokio::test]
async fn a_place_that_cannot_be_had_is_named() {
    let world = World::start().await;
    let taken = world.responder.local_address();
    let error = responder(taken, "sal.internal", &[]).await.expect_err("taken");
    assert!(matches!(error, DnsError::PortInUse(_)) && error.to_string().contains(&taken.to_string()), "{error}");
    let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let error = responder(tcp.local_addr().expect("bound"), "sal.internal", &[]).await.expect_err("taken for TCP");
    assert!(matches!(error, DnsError::PortInUse(_)), "{error}");
    let elsewhere: SocketAddr = "198.51.100.1:5300".parse().expect("literal");
    let error = responder(elsewhere, "sal.internal", &[]).await.expect_err("not here");
    assert!(matches!(error, DnsError::NoAddress(at) if at == elsewhere), "{error}");
    for zone in ["", ".", "sal internal", "-x", "a..b", &"x".repeat(64)] {
        let error = responder("127.0.0.1:0".parse().expect("literal"), zone, &[]).await.expect_err(zone);
        assert!(matches!(error, DnsError::Zone { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_stopped_responder_gives_its_address_back() {
    let world = World::start().await;
    let any: SocketAddr = "127.0.0.1:0".parse().expect("literal");
    for zone in ["Sal.Internal.", "sal.internal"] {
        let next: Responder = responder(any, zone, &[]).await.expect("free");
        let at = next.local_address();
        let mut stream = TcpStream::connect(at).await.expect("accepted");
        let good = wire(&question(name_of("example.com."), RecordType::A));
        over_stream(&mut stream, &good).await.expect("answered");
        next.stop().await;
        assert_eq!(ends(&mut stream).await, 0, "open connections end");
        UdpSocket::bind(at).await.expect("free again");
        responder(at, "sal.internal", &[]).await.expect("free again").stop().await;
    }
    assert_eq!(addresses(&world.ask("web.shop.sal.internal.", RecordType::A).await).len(), 1);
}

/// A server of somebody else: it says `NOERROR` and gives the question back, over UDP and TCP.
async fn other_server() -> SocketAddr {
    let (udp, tcp) = margay_control::dns::bind("127.0.0.1:0".parse().expect("literal")).await.expect("a port");
    let at = udp.local_addr().expect("bound");
    let answer = |mut bytes: Vec<u8>| {
        bytes[2] |= 0x80;
        bytes
    };
    tokio::spawn(async move {
        let mut bytes = [0; 4096];
        loop {
            let (len, from) = udp.recv_from(&mut bytes).await.expect("received");
            udp.send_to(&answer(bytes[..len].to_vec()), from).await.expect("sent");
        }
    });
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = tcp.accept().await.expect("accepted");
            let mut bytes = vec![0; usize::from(stream.read_u16().await.expect("a length"))];
            stream.read_exact(&mut bytes).await.expect("a question");
            let framed = [&u16::try_from(bytes.len()).expect("short").to_be_bytes()[..], &answer(bytes)].concat();
            stream.write_all(&framed).await.expect("sent");
        }
    });
    at
}

#[tokio::test]
async fn names_of_others_are_asked_elsewhere_byte_for_byte() {
    let world = World::start_with(&[], &[other_server().await]).await;
    let mut asked = question(name_of("wWw.Example.com."), RecordType::Unknown(65_280));
    let mut edns = Edns::new();
    edns.set_max_payload(4000).set_dnssec_ok(true);
    edns.options_mut().insert(hickory_proto::rr::rdata::opt::EdnsOption::Unknown(65_001, vec![1, 2, 3]));
    asked.set_edns(edns);
    let mut expected = wire(&asked);
    expected[2] |= 0x80;
    // Recursion is available, whatever the server says of itself.
    expected[3] |= 0x80;
    assert_eq!(world.exchange_bytes(&wire(&asked)).await, expected);
    let mut stream = TcpStream::connect(world.responder.local_address()).await.expect("accepted");
    let answer = over_stream(&mut stream, &wire(&asked)).await.expect("answered");
    assert_eq!(
        answer.to_vec().expect("encodable"),
        Message::from_vec(&expected).expect("readable").to_vec().expect("encodable")
    );
    let counters = world.responder.counters();
    assert_eq!((counters.forwarded, counters.answered, counters.failed), (2, 0, 0));
}

#[tokio::test]
async fn without_an_agent_names_have_their_last_answers_and_others_wait_for_the_next_one() {
    let mut world = World::start_with(&[], &[other_server().await]).await;
    let known = world.ask("web.shop.sal.internal.", RecordType::A).await;
    let none = world.ask("_x._y.shop.sal.internal.", RecordType::A).await;
    let next = Agent::start(&world.responder, &world.answers);
    assert_eq!(std::mem::replace(&mut world.agent, next).kill().await, Ended::Lost);
    let before = world.agent;
    assert_eq!(before.kill().await, Ended::Lost);
    let mixed = question(name_of("weB.shop.sal.internal."), RecordType::A);
    let exchange = async |bytes: Vec<u8>| {
        world.client.send_to(&bytes, world.responder.local_address()).await.expect("sent");
        let mut answer = vec![0; 4096];
        let len = world.client.recv(&mut answer).await.expect("answered");
        Message::from_vec(&answer[..len]).expect("readable")
    };
    let last = exchange(wire(&mixed)).await;
    assert_eq!(addresses(&last), addresses(&known));
    assert_eq!(last.answers[0].name.to_ascii(), "weB.shop.sal.internal.");
    let last = exchange(wire(&question(name_of("_x._y.shop.sal.internal."), RecordType::A))).await;
    assert_eq!(last.metadata.response_code, none.metadata.response_code);
    assert_eq!(exchange(wire(&question(name_of("example.com."), RecordType::A))).await.queries.len(), 1);
    // Never asked before: it waits, until there is an agent again.
    let unknown = wire(&question(name_of("new.shop.sal.internal."), RecordType::A));
    let waiting = exchange(unknown);
    let starting = async {
        tokio::task::yield_now().await;
        Agent::start(&world.responder, &world.answers)
    };
    let (found, agent) = tokio::join!(waiting, starting);
    assert_eq!(addresses(&found).len(), 1);
    let counters = world.responder.counters();
    assert_eq!((counters.remembered, counters.forwarded, counters.failed), (2, 1, 0));
    let mut told = agent.counters.clone();
    let all = tokio::time::timeout(std::time::Duration::from_secs(20), told.wait_for(|told| *told == counters));
    all.await.expect("in time").expect("the agent is there");
    let (mut ours, theirs) = tokio::net::UnixStream::pair().expect("a pair");
    ours.write_all(&channel::end()).await.expect("sent");
    assert_eq!(world.responder.attach(theirs).await, Ended::End);
}

#[tokio::test]
async fn an_agent_that_never_comes_is_a_failure_in_time() {
    let world = World::start().await;
    world.agent.kill().await;
    tokio::time::pause();
    world
        .client
        .send_to(&wire(&question(name_of("a.shop.sal.internal."), RecordType::A)), world.responder.local_address())
        .await
        .expect("sent");
    let mut answer = vec![0; 512];
    let len = world.client.recv(&mut answer).await.expect("answered");
    assert_eq!(Message::from_vec(&answer[..len]).expect("readable").metadata.response_code, ResponseCode::ServFail);
}
