//! Sockets by name, over an agent for tests.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use crate::fake::{BIND, FakeAgent, PEER, RESOLVE};
use margay_sdk::{Error, Listener, Options, Prefix, Protocol, ServiceId, Stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

async fn options(fake: &FakeAgent) -> Options {
    Options::new().agent(&fake.agent().await)
}

/// Both ends of a connection that the service `name` accepted.
async fn exchange(listener: &Listener, client: &mut Stream) -> Stream {
    client.write_all(b"ping").await.expect("sent");
    let (mut served, _) = listener.accept().await.expect("accepted");
    let mut heard = [0; 4];
    served.read_exact(&mut heard).await.expect("received");
    assert_eq!(&heard, b"ping");
    served
}

#[tokio::test]
async fn a_client_reaches_a_service_by_its_name() {
    let fake = FakeAgent::start();
    let options = options(&fake).await;
    let listener = options.bind("web.shop").await.expect("bound");
    assert_eq!(listener.prefix(), "web.shop".parse().expect("a name"));
    assert!(listener.local_addr().expect("bound").ip().is_unspecified());
    let mut client = options.connect("web.shop").await.expect("connected");
    let mut served = exchange(&listener, &mut client).await;
    served.write_all(b"pong").await.expect("sent");
    served.shutdown().await.expect("shut down");
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.expect("received");
    assert_eq!(answer, "pong");
    assert_eq!(fake.world().written, ["web.shop"]);
    assert!(client.into_std().expect("a socket").peer_addr().is_ok());
}

#[tokio::test]
async fn peers_go_by_the_name_that_they_said() {
    let fake = FakeAgent::start();
    let plain = options(&fake).await;
    let listener = plain.bind("web.shop").await.expect("bound");
    let named = plain.clone().source("cli.shop").expect("a name");
    let own = plain.clone().own_source();
    let client = named.connect("web.shop").await.expect("connected");
    let (served, peer) = listener.accept().await.expect("accepted");
    let cli: Prefix = "cli.shop".parse().expect("a name");
    assert_eq!((client.source(), peer.service()), (Some(cli.id), Some(cli.id)));
    assert_eq!(peer.to_string(), cli.id.to_string());
    assert_eq!(served.peer_service().await.expect("asked"), Some(cli.id));
    let client = own.connect("web.shop").await.expect("connected");
    let (_, peer) = listener.accept().await.expect("accepted");
    assert!(peer.service().is_some() && peer.service() == client.source());
    let client = plain.connect("web.shop").await.expect("connected");
    let (_, peer) = listener.accept().await.expect("accepted");
    assert_eq!(client.source(), None);
    assert_eq!(peer.service().map(|host| host.authority()), Some([0; 8]));
}

#[tokio::test]
async fn one_socket_serves_all_names_under_a_prefix() {
    let fake = FakeAgent::start();
    let options = options(&fake).await;
    let prefix: Prefix = "sid:aabb/16".parse().expect("a prefix");
    let listener = options.bind(&prefix).await.expect("bound");
    let id = ServiceId(std::array::from_fn(|at| [0xaa, 0xbb, 0xcc][at.min(2)]));
    for name in ["sid:aabbcc", "sid:aabb01"] {
        let mut client = options.connect(name).await.expect("connected");
        exchange(&listener, &mut client).await;
    }
    let mut client = options.connect(&id).await.expect("connected");
    exchange(&listener, &mut client).await;
    let outside = options.connect("sid:aabc").await.expect_err("nobody serves it");
    assert_eq!(outside.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn datagrams_go_to_names_and_answers_come_back() {
    let fake = FakeAgent::start();
    let options = options(&fake).await.own_source();
    let server = options.bind_datagrams("dns.shop").await.expect("bound");
    let client = options.datagrams().await.expect("open");
    let dns: Prefix = "dns.shop".parse().expect("a name");
    let mut buf = [0; 100];
    for text in [b"one", b"two"] {
        assert_eq!(client.send_to("dns.shop", text).await.expect("sent"), 3);
        let (length, peer) = server.recv_from(&mut buf).await.expect("received");
        assert_eq!((&buf[..length], peer.service()), (&text[..], client.source()));
        server.answer(&peer, b"yes").await.expect("answered");
        let (length, peer) = client.recv_from(&mut buf).await.expect("received");
        assert_eq!((&buf[..length], peer.service()), (&b"yes"[..], Some(dns.id)));
    }
    // One question for the name, and one for the client.
    assert_eq!((fake.asked(RESOLVE), fake.asked(PEER)), (1, 1));
}

#[tokio::test]
async fn connected_datagrams_stay_with_one_instance() {
    let fake = FakeAgent::start();
    let options = options(&fake).await.own_source();
    let server = options.bind_datagrams("dns.shop").await.expect("bound");
    let client = options.connect_datagrams("dns.shop").await.expect("connected");
    let mut buf = [0; 100];
    client.send(b"question").await.expect("sent");
    let (length, peer) = server.recv_from(&mut buf).await.expect("received");
    assert_eq!((&buf[..length], peer.service()), (&b"question"[..], client.source()));
    server.answer(&peer, b"answer").await.expect("answered");
    let length = client.recv(&mut buf).await.expect("received");
    assert_eq!(&buf[..length], b"answer");
    assert_eq!(client.peer_service().await.expect("asked"), server.source());
    drop(server);
    client.send(b"anybody?").await.expect("sent");
    assert_eq!(client.recv(&mut buf).await.expect_err("nobody").kind(), std::io::ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn a_host_without_ipv6_uses_the_other_address() {
    let fake = FakeAgent::start();
    // No stream goes to a multicast address: the kernel has no route, as without IPv6.
    fake.world().v6 = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let options = options(&fake).await;
    let listener = options.bind("web.shop").await.expect("bound");
    let mut client = options.connect("web.shop").await.expect("connected");
    assert!(client.as_tcp().peer_addr().expect("connected").is_ipv4());
    exchange(&listener, &mut client).await;
    // Names with a key have no other.
    fake.world().v6 = Ipv4Addr::LOCALHOST.to_ipv6_mapped();
    let server = options.bind_datagrams("dns.shop").await.expect("bound");
    let client = options.datagrams().await.expect("open");
    client.send_to("dns.shop", b"x").await.expect("sent");
    let (length, peer) = server.recv_from(&mut [0; 10]).await.expect("received");
    server.answer(&peer, b"y").await.expect("answered");
    assert_eq!(length, client.recv_from(&mut [0; 10]).await.expect("received").0);
}

#[tokio::test]
async fn addresses_are_remembered_until_they_fail() {
    let fake = FakeAgent::start();
    let options = options(&fake).await;
    let listener = options.bind("web.shop").await.expect("bound");
    for _ in 0..3 {
        options.connect("web.shop").await.expect("connected");
        listener.accept().await.expect("accepted");
    }
    assert_eq!(fake.asked(RESOLVE), 1);
    drop(listener);
    options.connect("web.shop").await.expect_err("nobody listens");
    let _listener = options.bind("web.shop").await.expect("bound");
    options.connect("web.shop").await.expect("connected");
    assert_eq!(fake.asked(RESOLVE), 2);
    let agent = fake.agent().await;
    for at in 0_u16..300 {
        let id = ServiceId(std::array::from_fn(|byte| at.to_be_bytes()[byte % 2]));
        agent.resolve(&id, Protocol::Tcp).await.expect("resolved");
    }
    let oldest = ServiceId::default();
    agent.resolve(&oldest, Protocol::Tcp).await.expect("resolved");
    assert_eq!(fake.asked(RESOLVE), 2 + 300 + 1, "the oldest gave way");
}

#[tokio::test]
async fn a_cancelled_accept_loses_no_connection() {
    let fake = FakeAgent::start();
    let options = options(&fake).await;
    let listener = options.bind("web.shop").await.expect("bound");
    let _client = options.connect("web.shop").await.expect("connected");
    fake.world().silent.insert(PEER);
    tokio::select! {
        _ = listener.accept() => panic!("nobody said who the peer is"),
        () = fake.wait_asked(PEER, 1) => {}
    }
    fake.speak();
    let (_, peer) = timeout(Duration::from_secs(20), listener.accept()).await.expect("kept").expect("accepted");
    assert!(peer.service().is_some());
}

#[tokio::test]
async fn a_cancelled_receive_loses_no_datagram() {
    let fake = FakeAgent::start();
    let options = options(&fake).await;
    let server = options.bind_datagrams("dns.shop").await.expect("bound");
    options.datagrams().await.expect("open").send_to("dns.shop", b"kept").await.expect("sent");
    fake.world().silent.insert(PEER);
    let mut buf = [0; 10];
    tokio::select! {
        _ = server.recv_from(&mut buf) => panic!("nobody said who the peer is"),
        () = fake.wait_asked(PEER, 1) => {}
    }
    fake.speak();
    let received = timeout(Duration::from_secs(20), server.recv_from(&mut buf)).await.expect("kept");
    assert_eq!(&buf[..received.expect("received").0], b"kept");
}

#[tokio::test]
async fn who_comes_past_margay_is_turned_away() {
    let fake = FakeAgent::start();
    let options = options(&fake).await;
    let listener = options.bind("web.shop").await.expect("bound");
    let port = listener.local_addr().expect("bound").port();
    let mut past = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.expect("connected");
    fake.world().past.insert(past.local_addr().expect("connected").port());
    let client = options.clone().own_source().connect("web.shop").await.expect("connected");
    let (_, peer) = listener.accept().await.expect("accepted");
    assert_eq!(peer.service(), client.source());
    assert_eq!(past.read(&mut [0]).await.expect("closed"), 0);
}

#[tokio::test]
async fn datagrams_that_come_past_margay_are_dropped() {
    let fake = FakeAgent::start();
    let options = options(&fake).await.own_source();
    let server = options.bind_datagrams("dns.shop").await.expect("bound");
    let port = server.as_udp().local_addr().expect("bound").port();
    let past = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("bound");
    fake.world().past.insert(past.local_addr().expect("bound").port());
    for _ in 0..2 {
        past.send_to(b"past", (Ipv4Addr::LOCALHOST, port)).await.expect("sent");
    }
    let client = options.datagrams().await.expect("open");
    client.send_to("dns.shop", b"by name").await.expect("sent");
    let mut buf = [0; 10];
    let (length, peer) = server.recv_from(&mut buf).await.expect("received");
    assert_eq!((&buf[..length], peer.service()), (&b"by name"[..], client.source()));
}

#[tokio::test]
async fn who_cannot_be_named_is_nobody() {
    let fake = FakeAgent::start();
    let options = options(&fake).await;
    let listener = options.bind("web.shop").await.expect("bound");
    fake.world().refused.insert(PEER, (5, "the disk is broken"));
    let _client = options.connect("web.shop").await.expect("connected");
    let (served, peer) = listener.accept().await.expect("accepted");
    assert_eq!((peer.service(), peer.to_string()), (None, peer.address().to_string()));
    assert!(matches!(served.peer_service().await, Err(Error::Refused { errno: 5, .. })));
    fake.world().refused.insert(PEER, (107, "no such flow"));
    assert_eq!(served.peer_service().await.expect("asked"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_tasks_share_one_agent() {
    let fake = FakeAgent::start();
    let options = options(&fake).await.own_source();
    let listener = options.bind("web.shop").await.expect("bound");
    let clients: Vec<_> = (0..64)
        .map(|_| {
            let options = options.clone();
            tokio::spawn(async move { options.connect("web.shop").await.map(|client| client.source()) })
        })
        .collect();
    let mut seen = Vec::new();
    for _ in &clients {
        seen.push(listener.accept().await.expect("accepted").1.service());
    }
    for client in clients {
        let source = client.await.expect("no panic").expect("connected");
        assert!(seen.contains(&source));
    }
}

#[tokio::test]
async fn a_refused_name_is_not_served() {
    let fake = FakeAgent::start();
    let options = options(&fake).await;
    for (errno, text) in [(13, "user 1000 may not serve web.shop; ask its owner"), (98, "web.shop is taken")] {
        fake.world().refused.insert(BIND, (errno, text));
        for error in [
            options.bind("web.shop").await.err(),
            options.bind_datagrams("web.shop").await.err(),
            options.bind(&Prefix::default()).await.err(),
        ] {
            let error = error.expect("refused");
            assert_eq!(error.raw_os_error(), Some(i32::from(errno)));
            assert_eq!(
                error.to_string(),
                format!("the Margay agent refused to let this program serve the name: {text}")
            );
            let io = std::io::Error::from(error);
            assert!(io.to_string().contains(text));
        }
    }
    assert!(matches!(options.connect("web").await, Err(Error::Name(_))));
    fake.world().v4 = Ipv4Addr::UNSPECIFIED;
    fake.world().v6 = Ipv6Addr::UNSPECIFIED;
    assert!(matches!(options.connect("web.shop").await, Err(Error::Incompatible { .. })));
}
