//! Framed sockets over the loopback: a client and a server, without a switch.

use std::io::ErrorKind;
use std::time::Duration;

use margay_sdk::{Arrival, Error, FRAME_MAX, Frames, FramesListener, Options, Order, Received, Sending};
use margay_wire::{Framed, FramedTerms, OWN_FRAMES};
use tokio::net::UdpSocket;
use tokio::time::timeout;

use crate::fake::FakeAgent;

const LIMIT: Duration = Duration::from_secs(20);

async fn pair(options: &Options) -> (FramesListener, Frames, Frames) {
    let mut listener = options.bind_frames("work.shop", "a").await.expect("served");
    let client = options.connect_frames("work.shop").await.expect("connected");
    let (server, _) = timeout(LIMIT, listener.accept()).await.expect("in time").expect("accepted");
    (listener, client, server)
}

async fn frame(end: &mut Frames) -> Received {
    match timeout(LIMIT, end.recv()).await.expect("in time").expect("open") {
        Some(Arrival::Frame(frame)) => frame,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn frames_arrive_whole_in_their_order_and_answers_know_what_they_answer() {
    let fake = FakeAgent::start();
    let (_listener, mut client, mut server) = pair(&Options::new().agent(&fake.agent().await)).await;
    let large = vec![7; 300_000];
    assert_eq!(client.send(b"one").await.expect("sent"), 0);
    assert_eq!(client.send(&large).await.expect("sent"), 1);
    let how = Sending::new().key(b"k").wants_answer().safe().order(Order::Stream(3));
    let asked = client.send_with(b"", &how).await.expect("sent");
    let one = frame(&mut server).await;
    assert_eq!((&*one.bytes, one.number, one.wants_answer, one.order), (&b"one"[..], 0, false, Order::Member));
    let mut rest = [frame(&mut server).await, frame(&mut server).await];
    // A stream is another order.
    rest.sort_by_key(|frame| frame.number);
    assert!(rest[0].bytes == large);
    assert_eq!((&*rest[1].key, rest[1].order, rest[1].wants_answer), (&b"k"[..], Order::Stream(3), true));
    server.send(b"by the way").await.expect("sent");
    server.answer(&rest[1], b"two").await.expect("sent");
    let unasked = frame(&mut client).await;
    assert_eq!((&*unasked.bytes, unasked.is_answer, unasked.number), (&b"by the way"[..], false, 0));
    let answer = frame(&mut client).await;
    assert_eq!((&*answer.bytes, answer.is_answer, answer.number), (&b"two"[..], true, asked));
}

#[tokio::test]
async fn what_was_sent_before_the_end_arrives_and_the_end_is_told() {
    let fake = FakeAgent::start();
    let (_listener, client, mut server) = pair(&Options::new().agent(&fake.agent().await)).await;
    for number in 0..200_u32 {
        client.send(&number.to_be_bytes()).await.expect("sent");
    }
    timeout(LIMIT, client.close()).await.expect("in time");
    for number in 0..200_u32 {
        assert_eq!(*frame(&mut server).await.bytes, number.to_be_bytes());
    }
    assert_eq!(timeout(LIMIT, server.recv()).await.expect("in time").expect("in order"), None);
    let error = server.send(b"late").await.expect_err("it is over");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// A server answers one request before it takes the next.
#[tokio::test]
async fn who_answers_after_the_end_is_told_of_it_while_more_waits_to_be_taken() {
    let fake = FakeAgent::start();
    let (_listener, client, mut server) = pair(&Options::new().agent(&fake.agent().await)).await;
    for number in 0..200_u32 {
        client.send(&number.to_be_bytes()).await.expect("sent");
    }
    let first = frame(&mut server).await;
    let closing = tokio::spawn(client.close());
    // Whether the end has come by now or not, no answer waits for long.
    while timeout(LIMIT, server.answer(&first, b"done")).await.expect("in time").is_ok() {}
    for number in 1..200_u32 {
        assert_eq!(*frame(&mut server).await.bytes, number.to_be_bytes());
    }
    timeout(LIMIT, closing).await.expect("in time").expect("it does not panic");
}

#[tokio::test]
async fn who_does_not_read_holds_its_sender_back_and_loses_nothing() {
    let fake = FakeAgent::start();
    let (_listener, client, mut server) = pair(&Options::new().agent(&fake.agent().await)).await;
    let sending = tokio::spawn(async move {
        for number in 0..64_u8 {
            client.send(&vec![number; 1 << 20]).await.expect("sent");
        }
        client
    });
    // More than both ends hold.
    for number in 0..64_u8 {
        assert!(frame(&mut server).await.bytes == vec![number; 1 << 20], "{number}");
    }
    drop(timeout(LIMIT, sending).await.expect("in time").expect("it does not panic"));
}

#[tokio::test]
async fn two_ends_that_send_much_to_each_other_both_arrive_by_halves() {
    let fake = FakeAgent::start();
    let (_listener, client, server) = pair(&Options::new().agent(&fake.agent().await)).await;
    let ends = [client, server].map(|end| {
        let (sender, mut receiver) = end.split();
        let sending = tokio::spawn(async move {
            for number in 0..32_u8 {
                sender.send(&vec![number; 1 << 20]).await.expect("sent");
            }
            // A connection is closed when its sending half is dropped.
            sender
        });
        let receiving = tokio::spawn(async move {
            for number in 0..32_u8 {
                let arrival = timeout(LIMIT, receiver.recv()).await.expect("in time").expect("open");
                let Some(Arrival::Frame(frame)) = arrival else { panic!("{arrival:?}") };
                assert!(frame.bytes == vec![number; 1 << 20], "{number}");
            }
        });
        (sending, receiving)
    });
    for (sending, receiving) in ends {
        receiving.await.expect("all arrives");
        drop(sending.await.expect("all is sent"));
    }
}

#[tokio::test]
async fn a_listener_that_is_dropped_takes_no_new_connections_and_keeps_the_others() {
    let fake = FakeAgent::start();
    let options = Options::new().agent(&fake.agent().await);
    let (listener, client, mut server) = pair(&options).await;
    drop(listener);
    client.send(b"still").await.expect("sent");
    assert_eq!(frame(&mut server).await.bytes, b"still");
    let error = timeout(LIMIT, options.connect_frames("work.shop")).await.expect("in time").expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
}

#[tokio::test]
async fn what_cannot_be_sent_is_refused_and_what_nobody_serves_too() {
    let fake = FakeAgent::start();
    let options = Options::new().agent(&fake.agent().await);
    let (_listener, client, _server) = pair(&options).await;
    let long_key = Sending::new().key(&[0; 256]);
    let no_stream = Sending::new().order(Order::Stream(0));
    for (frame, how) in [(vec![0; FRAME_MAX + 1], Sending::new()), (vec![], long_key), (vec![], no_stream)] {
        let error = client.send_with(&frame, &how).await.expect_err("refused");
        assert!(matches!(&error, Error::Io(error) if error.kind() == ErrorKind::InvalidInput), "{error}");
    }
    assert!(options.bind_frames("other.shop", &"x".repeat(65)).await.is_err());
    let error = timeout(LIMIT, options.connect_frames("nobody.shop")).await.expect("in time").expect_err("nobody");
    assert!(matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::TimedOut | ErrorKind::ConnectionReset));
}

async fn peer_at(address: &str, fake: &FakeAgent) -> UdpSocket {
    let socket = UdpSocket::bind(address).await.expect("an address of the loopback");
    socket.connect(("127.0.0.1", fake.served_port())).await.expect("connected");
    socket
}

/// A connection of a peer that is none of this crate's: HELLO, and whatever comes back.
async fn hello(peer: &UdpSocket, number: u64) -> Option<Vec<u8>> {
    let terms = FramedTerms { tsn: 1, window_bytes: 1 << 20, window: 100, streams: 1 };
    let mut bytes = [0; 2048];
    let says = Framed::Hello { terms, host: [0; 16], protocol: OWN_FRAMES };
    let len = says.emit(number, &mut bytes).expect("room");
    peer.send(&bytes[..len]).await.expect("sent");
    let len = timeout(Duration::from_millis(500), peer.recv(&mut bytes)).await.ok()?.expect("received");
    Some(bytes[..len].to_vec())
}

#[tokio::test]
async fn one_host_that_is_not_accepted_leaves_room_for_others() {
    let fake = FakeAgent::start();
    let agent = fake.agent().await;
    let mut listener = Options::new().agent(&agent).bind_frames("work.shop", "a").await.expect("served");
    let [one, other] = [peer_at("127.0.0.9:0", &fake).await, peer_at("127.0.1.9:0", &fake).await];
    for number in 1..=128 {
        assert!(hello(&one, number).await.is_some(), "{number}");
    }
    assert_eq!(hello(&one, 129).await, None, "it has its share of those that wait, and asks again");
    assert!(hello(&other, 1).await.is_some(), "another host has room");
    let (_frames, _) = timeout(LIMIT, listener.accept()).await.expect("in time").expect("accepted");
    assert!(hello(&one, 129).await.is_some(), "there is room again");
}
