//! The endpoints, without a switch and with a lossy one of their own.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use margay_core::Instant;
use margay_wire::sctp::{Chunk, Chunks, PacketWriter, SkippedRepr, WatermarkRepr};

use super::rig::{data, fragment, free, of_stream, packet, whole};
use crate::{Order, Reading, Received, Receiver, ReceiverConfig, Sender, SenderConfig, Tsn};

fn at(millis: u64) -> Instant {
    Instant::from_millis(millis)
}

fn receiver(reading: Reading) -> Receiver {
    Receiver::new(ReceiverConfig { reading, ..ReceiverConfig::default() })
}

fn given(receiver: &mut Receiver) -> Vec<Vec<u8>> {
    core::iter::from_fn(|| receiver.poll_frame()).map(|received| received.bytes).collect()
}

fn mark(lsn: u32, csn: u32) -> Vec<u8> {
    packet(|packet| packet.watermark(&WatermarkRepr { confirms: false, lsn, csn }).expect("room"))
}

/// What a poll wrote, of at most this many bytes.
fn poll(len: usize, poll: impl FnOnce(&mut PacketWriter<'_>) -> bool) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut writer = PacketWriter::new(&mut bytes);
    let has_written = poll(&mut writer);
    let len = writer.len();
    bytes.truncate(len);
    has_written.then_some(bytes)
}

fn sack_to(sender: &mut Sender, now: Instant, packet: &[u8]) {
    for chunk in Chunks::new(packet) {
        if let Ok(Chunk::Sack(sack)) = chunk {
            sender.on_sack(now, &sack);
        }
    }
}

#[test]
fn a_plain_receiver_gives_on_by_message_identifiers() {
    let mut receiver = receiver(Reading::Plain);
    for repr in [fragment(2, 1, 1, true), fragment(1, 1, 0, false), of_stream(3, 5, 0), free(4)] {
        receiver.on_packet(at(0), &data(&repr, &[repr.tsn as u8]));
    }
    assert_eq!(given(&mut receiver), [vec![3], vec![4]]);
    receiver.on_packet(at(0), &data(&whole(0), &[0]));
    receiver.on_packet(at(0), &data(&whole(0), &[0]));
    assert_eq!(given(&mut receiver), [vec![0], vec![1, 2]]);
    assert_eq!(receiver.expected(), Tsn(5));
}

#[test]
fn a_member_gives_on_up_to_the_watermark_once_all_before_it_has_come() {
    let mut receiver = receiver(Reading::Watermarks);
    // Frames 7 and 5 of the peer came to the switch in this order.
    receiver.on_packet(at(0), &data(&crate::test::rig::of_stream(0, 0, 7), b"7"));
    assert_eq!(given(&mut receiver).len(), 0, "nothing is known");
    receiver.on_packet(at(0), &mark(1, 8));
    assert_eq!(given(&mut receiver).len(), 0, "something before 8 is missing");
    receiver.on_packet(at(0), &data(&of_stream(1, 0, 5), b"5"));
    assert_eq!(given(&mut receiver), [b"5", b"7"]);
    let told = poll(200, |packet| receiver.poll_sack(at(0), packet)).expect("it is time");
    let Some(Ok(Chunk::Watermark(told))) = Chunks::new(&told).next() else { panic!("it confirms") };
    assert_eq!(told, WatermarkRepr { confirms: true, lsn: 1, csn: 8 });
}

#[test]
fn what_is_passed_over_is_not_waited_for() {
    let mut receiver = receiver(Reading::Plain);
    receiver.on_packet(at(0), &data(&fragment(1, 1, 0, false), b"half"));
    receiver.on_packet(at(0), &data(&of_stream(3, 0, 3), b"3"));
    receiver.on_packet(at(0), &data(&of_stream(4, 0, 2), b"2"));
    let skipped = [SkippedRepr { stream: 0, is_unordered: false, mid: 1 }];
    receiver.on_packet(at(0), &packet(|packet| packet.i_forward_tsn(2, &skipped).expect("room")));
    assert_eq!(given(&mut receiver), [b"2", b"3"]);
    assert_eq!(receiver.expected(), Tsn(5));
}

#[test]
fn a_full_receiver_takes_what_all_wait_for() {
    let config = ReceiverConfig { buffer_bytes: 10, ..ReceiverConfig::default() };
    let mut receiver = Receiver::new(config);
    receiver.on_packet(at(0), &data(&whole(1), &[1; 10]));
    receiver.on_packet(at(0), &data(&whole(2), &[2; 1]));
    assert!(receiver.has(Tsn(1)) && !receiver.has(Tsn(2)));
    receiver.on_packet(at(0), &data(&whole(0), &[0; 1]));
    assert_eq!(given(&mut receiver).len(), 2);
}

#[test]
fn a_sender_cuts_frames_and_numbers_them_by_order() {
    let mut sender = Sender::new(SenderConfig { chunk_bytes: 4, ..SenderConfig::default() });
    assert!(sender.send(Order::Member, 9, b"").is_err());
    sender.send(Order::Member, 9, b"abcdefg").expect("room");
    sender.send(Order::Stream(3), 9, b"x").expect("room");
    sender.send(Order::None, 9, b"y").expect("room");
    let bytes = poll(1200, |packet| sender.poll(at(0), packet)).expect("something");
    let mut receiver = receiver(Reading::Plain);
    receiver.on_packet(at(0), &bytes);
    let frames: Vec<Received> = core::iter::from_fn(|| receiver.poll_frame()).collect();
    let expected = [(Order::None, &b"y"[..]), (Order::Member, b"abcdefg"), (Order::Stream(3), b"x")];
    assert_eq!(frames, expected.map(|(order, bytes)| Received { order, ppid: 9, bytes: bytes.to_vec() }));
}

#[test]
fn a_sender_repeats_what_is_late_after_what_was_sent_later_has_come() {
    let mut sender = Sender::new(SenderConfig { packet_bytes: 1000, ..SenderConfig::default() });
    let mut sent = Vec::new();
    for n in 0..3 {
        sender.send(Order::Member, 0, &[n]).expect("room");
        sent.push(poll(100, |packet| sender.poll(at(n.into()), packet)).expect("something"));
    }
    let mut receiver = receiver(Reading::Plain);
    receiver.on_packet(at(20), &sent[1]);
    receiver.on_packet(at(20), &sent[2]);
    let sack = poll(100, |packet| receiver.poll_sack(at(20), packet)).expect("a gap");
    sack_to(&mut sender, at(40), &sack);
    assert_eq!(poll(100, |packet| sender.poll(at(40), packet)), None);
    let lost_at = sender.next_deadline().expect("a time");
    assert!(lost_at > at(40) && lost_at < at(60), "{lost_at:?}");
    sender.on_time(lost_at);
    assert_eq!(poll(100, |packet| sender.poll(lost_at, packet)), Some(sent[0].clone()));
    receiver.on_packet(lost_at, &sent[0]);
    let sack = poll(100, |packet| receiver.poll_sack(lost_at + Duration::from_millis(20), packet)).expect("all");
    sack_to(&mut sender, lost_at + Duration::from_millis(20), &sack);
    assert!(sender.is_idle());
    assert_eq!(sender.next_deadline(), None);
}

#[test]
fn a_sender_repeats_all_when_nothing_comes_back() {
    let mut sender = Sender::new(SenderConfig::default());
    sender.send(Order::Member, 0, b"a").expect("room");
    let sent = poll(100, |packet| sender.poll(at(0), packet)).expect("something");
    assert_eq!(sender.next_deadline(), Some(at(1000)));
    sender.on_time(at(1000));
    assert_eq!(poll(100, |packet| sender.poll(at(1000), packet)), Some(sent));
    assert_eq!(sender.next_deadline(), Some(at(2000)), "not longer: the other end is asked meanwhile");
}

#[test]
fn after_a_time_out_words_that_nobody_asked_for_hasten_a_few_repetitions() {
    let mut sender = Sender::new(SenderConfig::default());
    let sends = |sender: &mut Sender, now| poll(100, |packet| sender.poll(now, packet)).is_some();
    sender.send(Order::Member, 0, b"a").expect("room");
    assert!(sends(&mut sender, at(0)));
    // A round trip of 8 ms: answers are expected within 24.
    sack_to(&mut sender, at(8), &super::rig::sack(0, &[]));
    sender.send(Order::Member, 0, b"b").expect("room");
    assert!(sends(&mut sender, at(100)));
    let is_hastened = |sender: &mut Sender, millis| {
        sack_to(sender, at(millis), &super::rig::sack(0, &[]));
        sends(sender, at(millis))
    };
    assert!(!is_hastened(&mut sender, 250), "no time-out yet: the receiver may just be slow");
    sender.on_time(at(300));
    assert!(sends(&mut sender, at(300)));
    assert!(!is_hastened(&mut sender, 310), "the answer to the repetition");
    let hastened = [340, 350, 380, 420, 460, 500].map(|millis| is_hastened(&mut sender, millis));
    assert_eq!(hastened, [true, false, true, true, false, false]);
    assert_eq!(sender.next_deadline(), Some(at(820)));
}

#[test]
fn a_sender_repeats_what_the_receiver_took_back() {
    let mut sender = Sender::new(SenderConfig::default());
    for _ in 0..3 {
        sender.send(Order::Member, 0, b"a").expect("room");
    }
    poll(200, |packet| sender.poll(at(0), packet)).expect("something");
    sack_to(&mut sender, at(5), &super::rig::sack(u32::MAX, &[(2, 3)]));
    sack_to(&mut sender, at(5), &super::rig::sack(0, &[(2, 2)]));
    let again = poll(200, |packet| sender.poll(at(5), packet)).expect("something");
    let Some(Ok(Chunk::IData(repr, _))) = Chunks::new(&again).next() else { panic!("a frame") };
    assert_eq!(repr.tsn, 1);
}

#[test]
fn a_sender_believes_no_acknowledgement_of_what_was_never_sent() {
    let mut sender = Sender::new(SenderConfig::default());
    sender.send(Order::Member, 0, b"a").expect("room");
    poll(200, |packet| sender.poll(at(0), packet)).expect("something");
    sack_to(&mut sender, at(5), &super::rig::sack(1, &[]));
    sack_to(&mut sender, at(5), &super::rig::sack(u32::MAX, &[(2, 2)]));
    assert_eq!(sender.acknowledged(), Tsn(0));
}

#[test]
fn a_sender_keeps_within_the_window_and_asks_a_full_receiver() {
    let mut sender = Sender::new(SenderConfig { window: 2, receiver_bytes: 0, ..SenderConfig::default() });
    for _ in 0..3 {
        sender.send(Order::Member, 0, b"a").expect("room");
    }
    let count = |bytes: Option<Vec<u8>>| bytes.map_or(0, |bytes| Chunks::new(&bytes).count());
    assert_eq!(count(poll(500, |packet| sender.poll(at(0), packet))), 1);
    sack_to(&mut sender, at(5), &super::rig::sack(0, &[]));
    assert_eq!(count(poll(500, |packet| sender.poll(at(5), packet))), 2, "room for 5000 bytes, two chunks at once");
}

/// What both ends say to each other until neither has more to say now.
fn talk(sender: &mut Sender, receiver: &mut Receiver, now: Instant) {
    let later = now + Duration::from_millis(20);
    for now in [now, later] {
        loop {
            let data = poll(1232, |packet| sender.poll(now, packet));
            data.iter().for_each(|bytes| receiver.on_packet(now, bytes));
            let sack = poll(200, |packet| receiver.poll_sack(now, packet));
            sack.iter().for_each(|bytes| sack_to(sender, now, bytes));
            if data.is_none() && sack.is_none() {
                break;
            }
        }
    }
}

#[test]
fn what_nobody_reads_is_bounded_and_comes_when_somebody_does() {
    const BUFFER: usize = 20_000;
    let mut sender = Sender::new(SenderConfig { receiver_bytes: BUFFER as u32, ..SenderConfig::default() });
    let config = ReceiverConfig { buffer_bytes: BUFFER, ..ReceiverConfig::default() };
    let mut receiver = Receiver::new(config);
    for n in 0..100 {
        sender.send(Order::Member, 0, &[n; 1000]).expect("room");
    }
    let mut now = at(0);
    for _ in 0..200 {
        talk(&mut sender, &mut receiver, now);
        now = sender.next_deadline().map_or(now, |at| at.max(now)) + Duration::from_millis(21);
        sender.on_time(now);
    }
    let mut come = given(&mut receiver);
    assert_eq!(come.len(), BUFFER / 1000, "as much as there was room for, however often it was tried");
    // Nothing waits for a timer: the first word is the receiver's.
    let told = poll(200, |packet| receiver.poll_sack(now, packet)).expect("there is room again");
    sack_to(&mut sender, now, &told);
    for _ in 0..200 {
        talk(&mut sender, &mut receiver, now);
        come.extend(given(&mut receiver));
        now += Duration::from_millis(21);
        sender.on_time(now);
    }
    assert_eq!(come, (0..100).map(|n| vec![n; 1000]).collect::<Vec<_>>());
    assert!(sender.is_idle());
}

#[test]
fn frames_that_do_not_end_fill_a_bounded_part_of_memory() {
    let config = ReceiverConfig { buffer_bytes: 1000, ..ReceiverConfig::default() };
    let mut receiver = Receiver::new(config);
    let mut taken = 0;
    for tsn in 0..20 {
        receiver.on_packet(at(0), &data(&fragment(tsn, 0, tsn, false), &[0; 500]));
        taken += usize::from(receiver.has(Tsn(tsn)));
        assert_eq!(receiver.is_overfull(), tsn >= 16, "{tsn}");
    }
    assert_eq!(taken, 16, "eight buffers");
}

#[test]
fn what_is_given_up_is_passed_over_and_all_else_comes() {
    let mut sender = Sender::new(SenderConfig { packet_bytes: 1000, ..SenderConfig::default() });
    let until = |millis: u64| Some(at(millis));
    for (n, until) in [(0, until(50)), (1, None), (2, until(40)), (3, until(500))] {
        sender.send_until(until, Order::None, 0, &[n; 600]).expect("room");
    }
    // The first one is lost; the last two are not sent in time.
    let first = poll(700, |packet| sender.poll(at(0), packet)).expect("something");
    assert_eq!(sender.give_up(at(39)), 0);
    assert_eq!((sender.give_up(at(45)), sender.next_deadline()), (1, Some(at(50))));
    let second = poll(700, |packet| sender.poll(at(45), packet)).expect("something");
    assert_eq!(sender.give_up(at(60)), 1);
    let third = poll(1400, |packet| sender.poll(at(60), packet)).expect("something");
    let mut receiver = receiver(Reading::Plain);
    receiver.on_packet(at(61), &third);
    receiver.on_packet(at(62), &second);
    let bytes: Vec<u8> = given(&mut receiver).into_iter().map(|frame| frame[0]).collect();
    assert_eq!(bytes, [3, 1], "the second waits for nothing");
    let sack = poll(100, |packet| receiver.poll_sack(at(62), packet)).expect("it is told");
    sack_to(&mut sender, at(70), &sack);
    let forward = poll(100, |packet| sender.poll(at(70), packet)).expect("the third one will not come");
    receiver.on_packet(at(71), &forward);
    receiver.on_packet(at(72), &first);
    assert!(given(&mut receiver).is_empty(), "it comes too late");
    let sack = poll(100, |packet| receiver.poll_sack(at(72), packet)).expect("it is told");
    sack_to(&mut sender, at(80), &sack);
    assert!(sender.is_idle() && sender.next_deadline().is_none());
}

#[test]
fn without_memory_nothing_is_taken_and_what_stands_still_for_it_ends() {
    let mut receiver = receiver(Reading::Plain);
    receiver.on_packet(at(0), &data(&fragment(0, 0, 0, false), &[0; 100]));
    let held = receiver.memory();
    assert!(held > 100, "the chunk itself takes some");
    receiver.hold_back(true);
    receiver.on_packet(at(1), &data(&fragment(1, 0, 1, false), &[0; 100]));
    receiver.on_packet(at(1), &data(&fragment(1, 0, 1, false), &[0; 100]));
    assert!(!receiver.has(Tsn(1)) && receiver.memory() == held);
    let told = poll(200, |packet| receiver.poll_sack(at(1), packet)).expect("it is told");
    let Some(Ok(Chunk::Sack(sack))) = Chunks::new(&told).next() else { panic!("a SACK") };
    assert_eq!(sack.window_bytes, 0);
    receiver.hold_back(false);
    assert!(poll(200, |packet| receiver.poll_sack(at(2), packet)).is_some(), "its sender hears of room at once");
    receiver.on_packet(at(3), &data(&fragment(1, 0, 1, false), &[0; 100]));
    assert!(receiver.has(Tsn(1)));
    receiver.hold_back(true);
    for (millis, is_overfull) in [(1000, false), (2999, false), (3000, true)] {
        receiver.on_packet(at(millis), &data(&fragment(2, 0, 2, true), &[0; 100]));
        assert_eq!(receiver.is_overfull(), is_overfull, "{millis}");
    }
}
