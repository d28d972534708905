//! Two ends by a network that loses, doubles and delays, in virtual time.

use std::collections::{BTreeMap, BTreeSet};

use margay_wire::sctp::{GapBlock, IDataRepr};
use proptest::prelude::*;

use super::*;

/// Bytes of a packet.
const ROOM: usize = 1200;

fn at(millis: u64) -> Instant {
    Instant::from_millis(millis)
}

/// One of 2^32, by xorshift.
struct Dice(u64);

impl Dice {
    fn throw(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as u32
    }

    fn is_one_of(&mut self, share: f64) -> bool {
        f64::from(self.throw()) < share * f64::from(u32::MAX)
    }
}

/// What the network does, each way.
#[derive(Clone, Copy, Debug)]
struct Net {
    loss: f64,
    doubles: f64,
    delay_ms: u64,
    /// By so much a packet is later at most.
    jitter_ms: u64,
}

/// Two ends and what is between them.
struct World {
    now: Instant,
    net: Net,
    dice: Dice,
    ends: [Endpoint; 2],
    numbers: [u32; 2],
    /// When a packet arrives, in the order of sending; at which end, with which number.
    under_way: BTreeMap<(Instant, u32), (usize, u32, Vec<u8>)>,
    sent_packets: u32,
    lost_packets: u32,
    /// When the program at either end was given what.
    given: [Vec<(Instant, u32)>; 2],
    held_max: usize,
}

impl World {
    fn new(seed: u64, net: Net) -> Self {
        Self {
            now: at(1000),
            net,
            dice: Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            ends: [Endpoint::new(7), Endpoint::new(7)],
            numbers: [0, 0],
            under_way: BTreeMap::new(),
            sent_packets: 0,
            lost_packets: 0,
            given: [Vec::new(), Vec::new()],
            held_max: 0,
        }
    }

    /// The program at an end sends a datagram.
    fn send(&mut self, end: usize, label: u32, len: usize) -> Result<(), Full> {
        let sent = self.ends[end].send(self.now, label, &vec![label as u8; len]);
        self.speak(end);
        sent
    }

    fn speak(&mut self, end: usize) {
        let mut packets = Vec::new();
        self.ends[end].poll(self.now, ROOM, |packet| packets.push(packet.to_vec()));
        self.held_max = self.held_max.max(self.ends[end].sender.held());
        for packet in packets {
            assert!(packet.len() <= ROOM);
            let number = self.numbers[end];
            self.numbers[end] += 1;
            let copies = 1 + usize::from(self.dice.is_one_of(self.net.doubles));
            for _ in 0..copies {
                self.sent_packets += 1;
                if self.dice.is_one_of(self.net.loss) {
                    self.lost_packets += 1;
                    continue;
                }
                let jitter = u64::from(self.dice.throw()) % (self.net.jitter_ms + 1);
                let arrives = self.now + Duration::from_millis(self.net.delay_ms + jitter);
                self.under_way.insert((arrives, self.sent_packets), (1 - end, number, packet.clone()));
            }
        }
    }

    fn run_until(&mut self, until: Instant) {
        loop {
            let arrival = self.under_way.keys().next().map(|(at, _)| *at);
            let deadlines = self.ends.iter().filter_map(Endpoint::next_deadline);
            let Some(next) = deadlines.chain(arrival).min().filter(|next| *next <= until) else { break };
            self.now = self.now.max(next);
            if arrival.is_some_and(|arrival| arrival <= self.now)
                && let Some((_, (end, number, packet))) = self.under_way.pop_first()
            {
                let Self { now, ends, given, .. } = self;
                let give = |one: Given<'_>| {
                    assert!(one.payload.iter().all(|byte| *byte == one.label as u8), "as it was sent");
                    given[end].push((*now, one.label));
                };
                assert_eq!(ends[end].receive(*now, number, &packet, give), Ok(()));
                self.speak(end);
            } else {
                (0..2).for_each(|end| self.speak(end));
            }
        }
        self.now = self.now.max(until);
    }

    /// Labels that an end was given; fails where one was given twice.
    fn labels(&self, end: usize) -> BTreeSet<u32> {
        let labels: BTreeSet<u32> = self.given[end].iter().map(|(_, label)| *label).collect();
        assert_eq!(labels.len(), self.given[end].len(), "nothing twice");
        labels
    }
}

/// A voice: 50 datagrams a second each way, for ten seconds.
fn talk(world: &mut World, count: u32) {
    for label in 0..count {
        for end in 0..2 {
            assert_eq!(world.send(end, label, 160), Ok(()));
        }
        world.run_until(world.now + Duration::from_millis(20));
    }
    world.run_until(world.now + LINGER);
}

#[test]
fn what_is_lost_is_sent_again_and_nothing_is_given_twice() {
    for (loss, seed) in [0.0, 0.02, 0.05, 0.1].into_iter().flat_map(|loss| (0..8).map(move |seed| (loss, seed))) {
        let what = format!("loss {loss}, seed {seed}");
        let mut world = World::new(seed, Net { loss, doubles: 0.01, delay_ms: 10, jitter_ms: 2 });
        talk(&mut world, 500);
        for end in 0..2 {
            // In 250 ms there is time for five or six tries.
            let lost = 500 - world.labels(end).len();
            assert!(lost <= if loss < 0.1 { 0 } else { 1 }, "{what}: {lost} lost");
            let born = |label: u32| at(1000 + 20 * u64::from(label));
            let worst = world.given[end].iter().map(|(came, label)| came.since(born(*label))).max().expect("some");
            assert!(worst <= LIFETIME + Duration::from_millis(12), "{what}: {worst:?}");
            let repeated = world.ends[end].sent().repeated;
            assert_eq!((loss > 0.0, world.ends[end].is_idle()), (repeated > 0, true), "{what}: {repeated}");
            let Arrivals { expected, received, .. } = world.ends[end].arrivals();
            let measured = 1.0 - f64::from(received) / f64::from(expected);
            assert!((measured - loss).abs() < 0.05, "{what}: measured {measured}");
        }
    }
}

#[test]
fn what_is_older_than_it_lives_does_not_come_and_what_follows_does() {
    let mut world = World::new(1, Net { loss: 0.0, doubles: 0.0, delay_ms: 10, jitter_ms: 0 });
    talk(&mut world, 10);
    let before = world.now;
    world.net.loss = 1.0;
    for label in 10..30 {
        world.send(0, label, 160).expect("room");
        world.run_until(world.now + Duration::from_millis(20));
    }
    world.run_until(before + Duration::from_millis(700));
    assert_eq!(world.ends[0].sent().given_up, 20);
    world.net.loss = 0.0;
    for label in 30..60 {
        world.send(0, label, 160).expect("room");
        world.run_until(world.now + Duration::from_millis(20));
    }
    world.run_until(world.now + LINGER);
    assert_eq!(world.labels(1), (0..10).chain(30..60).collect());
    assert!(world.ends[0].is_idle() && world.ends[0].next_deadline().is_none(), "nothing is owed any more");
    assert_eq!(world.ends[0].sent().given_up, 20);
}

#[test]
fn a_peer_that_is_gone_costs_no_more_than_the_bounds_and_some_packets() {
    let mut world = World::new(3, Net { loss: 1.0, doubles: 0.0, delay_ms: 10, jitter_ms: 0 });
    let mut refused = 0;
    for label in 0..20_000 {
        let len = if label % 2 == 0 { 1 } else { 1100 };
        refused += u32::from(world.send(0, label, len).is_err());
        world.run_until(world.now + Duration::from_micros(50));
        assert!(world.ends[0].sender.held() <= HELD_MAX);
    }
    assert!(refused > 10_000, "{refused}");
    assert!(world.sent_packets < 400, "{} packets in a second", world.sent_packets);
    world.run_until(world.now + LIFETIME);
    world.net.loss = 0.0;
    world.run_until(world.now + LINGER);
    world.send(0, 20_001, 100).expect("room again");
    world.run_until(world.now + LINGER);
    assert!(world.labels(1).contains(&20_001) && world.ends[0].is_idle());
}

#[test]
fn a_change_to_another_stack_loses_nothing_while_the_end_goes_on_to_repeat() {
    for seed in 0..25 {
        let mut world = World::new(seed, Net { loss: 0.05, doubles: 0.0, delay_ms: 15, jitter_ms: 3 });
        for label in 0..100 {
            (0..2).for_each(|end| world.send(end, label, 160).expect("room"));
            world.run_until(world.now + Duration::from_millis(5));
        }
        // Nothing more is sent by it: what is under way is repeated, and then the ends are gone.
        world.run_until(world.now + LINGER);
        assert_eq!((world.labels(0).len(), world.labels(1).len()), (100, 100), "seed {seed}");
        assert!(world.ends.iter().all(Endpoint::is_idle), "seed {seed}");
    }
}

#[test]
fn it_sends_no_faster_than_the_network_takes_it() {
    // A queue of some packets, of which one goes on each millisecond: what finds no place is lost.
    let mut world = World::new(5, Net { loss: 0.05, doubles: 0.0, delay_ms: 20, jitter_ms: 0 });
    let mut refused = 0;
    for label in 0..10_000 {
        refused += u32::from(world.send(0, label, 1000).is_err());
        world.run_until(world.now + Duration::from_micros(100));
    }
    let came = world.labels(1).len();
    assert!(refused + world.ends[0].sent().given_up > 5000, "{refused}, {:?}", world.ends[0].sent());
    assert!((50..5000).contains(&came), "{came} of 10000 in a second, where one of twenty is lost");
}

fn packet(write: impl FnOnce(&mut PacketWriter<'_>)) -> Vec<u8> {
    let mut bytes = vec![0; ROOM];
    let mut writer = PacketWriter::new(&mut bytes);
    write(&mut writer);
    let len = writer.len();
    bytes.truncate(len);
    bytes
}

#[test]
fn a_datagram_is_as_written_in_the_book() {
    let mut end = Endpoint::new(0);
    end.send(at(0), 0x0102_0304, b"abcde").expect("room");
    let mut packets = Vec::new();
    end.poll(at(0), ROOM, |packet| packets.push(packet.to_vec()));
    let head = [64, 7, 0, 25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4];
    assert_eq!(packets, [[&head[..], b"abcde\0\0\0"].concat()]);
    assert_eq!(end.send(at(0), 1, b""), Err(Full), "empty");
}

#[test]
fn what_no_end_of_the_stack_sends_is_refused_whole() {
    let mut end = Endpoint::new(0);
    let whole = IDataFlags::BEGIN | IDataFlags::END | IDataFlags::UNORDERED;
    let data = |flags, stream, tsn| {
        packet(|writer| {
            let good = IDataRepr { flags: whole, tsn: 0, stream: 0, mid: 0, number: 1 };
            writer.i_data(&good, b"good").expect("room");
            let other = IDataRepr { flags, tsn, stream, mid: 1, number: 1 };
            writer.i_data(&other, b"x").expect("room");
        })
    };
    let nothing = |_: Given<'_>| panic!("nothing is given");
    for (flags, stream) in
        [(IDataFlags::BEGIN | IDataFlags::UNORDERED, 0), (whole - IDataFlags::UNORDERED, 0), (whole, 1)]
    {
        assert_eq!(end.receive(at(0), 1, &data(flags, stream, 1), nothing), Err(Malformed), "{flags:?} {stream}");
    }
    assert_eq!(end.receive(at(0), 1, &[], nothing), Err(Malformed));
    assert_eq!(end.receive(at(0), 1, &[64, 7, 0, 3], nothing), Err(Malformed));
    let mut given = Vec::new();
    let good = data(whole, 0, 1);
    (0..2).for_each(|_| {
        end.receive(at(0), 1, &good, |one| given.push(one.payload.to_vec())).expect("sound");
    });
    assert_eq!(given, [b"good".to_vec(), b"x".to_vec()], "once");
}

proptest! {
    /// Whatever the peer says, what is held stays bounded, and the end goes on.
    #[test]
    fn whatever_a_peer_says_nothing_grows(said in proptest::collection::vec(
        (any::<bool>(), any::<u32>(), any::<u16>(), any::<u16>(), 0_u64..50), 0..60)
    ) {
        let mut end = Endpoint::new(0);
        let mut now = at(1000);
        for (label, (is_sack, tsn, start, len, pause)) in (0..).zip(said) {
            now += Duration::from_millis(pause);
            let _ = end.send(now, label, &[1; 300]);
            end.poll(now, ROOM, |_| {});
            let tsn = if tsn & 1 == 0 { tsn >> 20 } else { tsn };
            let bytes = packet(|writer| {
                let block = GapBlock { start: start.max(1), end: start.max(1).saturating_add(len) };
                let is_written = if is_sack {
                    writer.sack(tsn, u32::from(start), [block].into_iter())
                } else {
                    writer.i_forward_tsn(tsn, &[])
                };
                is_written.expect("room");
            });
            let _ = end.receive(now, tsn, &bytes, |_| {});
            end.poll(now, ROOM, |_| {});
            prop_assert!(end.sender.held() <= HELD_MAX);
        }
        end.poll(now + LIFETIME, ROOM, |_| {});
        prop_assert!(end.next_deadline().is_none_or(|deadline| deadline > now));
    }
}
