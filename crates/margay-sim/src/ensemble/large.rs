//! Random ensembles, from seeds: the endpoints that ship at both ends, a network that delays, loses, doubles and
//! reorders, and members that join, drain and die at any time. When it is quiet again nothing is lost, and nobody
//! waits.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use margay_core::Instant;
use margay_ensemble::{
    Config, Csn, Event, Failure, Joining, Kind, LossDetection, Lsn, MEMBERS_MAX, MemberId, Order, Reading, Receiver,
    ReceiverConfig, Rules, Sender, SenderConfig, Serial, Sound, Switch, To, Tsn,
};
use margay_wire::sctp::{Chunk, Chunks, PacketWriter};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

use super::{Ledger, Plan};

/// A frame's bytes are records of so many; each chunk starts with one.
const RECORD: usize = 8;
const CHUNK_BYTES: usize = 32;
const PACKET_BYTES: usize = 600;
const FRAMES_MAX: usize = 60;
const TIME_MAX: Duration = Duration::from_secs(600);
const WINDOW_BYTES: u32 = 60_000;
const STEP: Duration = Duration::from_millis(7);

/// One who sends and receives.
struct End {
    sender: Sender,
    receiver: Receiver,
}

impl End {
    fn new(from: Tsn, to: Tsn, window: u16, reading: Reading) -> Self {
        let config = SenderConfig {
            first: from,
            window,
            chunk_bytes: CHUNK_BYTES,
            packet_bytes: PACKET_BYTES,
            receiver_bytes: WINDOW_BYTES,
            ..SenderConfig::default()
        };
        let sender = Sender::new(config);
        let receiver = Receiver::new(ReceiverConfig { first: to, reading, ..ReceiverConfig::default() });
        Self { sender, receiver }
    }

    fn hear(&mut self, now: Instant, bytes: &[u8]) {
        self.receiver.on_packet(now, bytes);
        for chunk in Chunks::new(bytes).filter_map(Result::ok) {
            if let Chunk::Sack(sack) = chunk {
                self.sender.on_sack(now, &sack);
            }
        }
    }

    /// Packets that it sends now.
    fn speak(&mut self, now: Instant) -> Vec<Vec<u8>> {
        if self.sender.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.sender.on_time(now);
        }
        let mut packets = Vec::new();
        loop {
            let mut bytes = [0; PACKET_BYTES];
            let mut writer = PacketWriter::new(&mut bytes);
            // An acknowledgement goes with what is sent, or alone.
            let has_sack = self.receiver.poll_sack(now, &mut writer);
            let has_data = self.sender.poll(now, &mut writer);
            if !has_sack && !has_data {
                return packets;
            }
            let len = writer.len();
            packets.push(bytes[..len].to_vec());
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.sender.next_deadline().into_iter().chain(self.receiver.next_deadline()).min()
    }
}

struct Member {
    id: MemberId,
    end: End,
    is_draining: bool,
    is_gone: bool,
    /// Frames whose answers it has sent.
    answered: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Address {
    SwitchFromPeer,
    SwitchFrom(usize),
    Peer,
    Member(usize),
}

/// What the weather is like. Shares are per mille.
#[derive(Clone, Copy)]
struct Weather {
    loss: u32,
    double: u32,
    delay_ms: u32,
    jitter_ms: u32,
}

/// When it arrives, its number, where, and its bytes.
type Letter = (Instant, u64, Address, Vec<u8>);

struct Ensemble<R> {
    random: ChaCha8Rng,
    weather: Weather,
    now: Instant,
    switch: Switch<Plan, R>,
    peer: End,
    members: Vec<Member>,
    letters: BinaryHeap<Reverse<Letter>>,
    sent: u64,
    ledger: Ledger,
    first: Csn,
    window: u16,
    /// By frame: its first chunk, and its order.
    frames: Vec<(usize, Order)>,
    /// Chunk to order, for frames' first ones.
    orders: BTreeMap<usize, Order>,
    answers: BTreeMap<(usize, u32), u32>,
    failure: Option<Failure>,
    deaths: u32,
    kinds: u32,
}

/// A record at the start of each chunk: frame, place of the chunk, target.
fn payload(frame: u32, target: u8, chunks: usize) -> Vec<u8> {
    let records = (0..chunks * CHUNK_BYTES / RECORD).flat_map(|at| {
        let place = (at * RECORD / CHUNK_BYTES) as u16;
        let [high, low] = place.to_be_bytes();
        let [a, b, c, d] = frame.to_be_bytes();
        // The target is where `Plan` looks for it.
        [0, target, high, low, a, b, c, d]
    });
    records.collect()
}

fn read(payload: &[u8]) -> (u32, usize) {
    let number = |bytes: &[u8]| bytes.iter().fold(0, |sum: u32, byte| sum << 8 | u32::from(*byte));
    (number(&payload[4..8]), number(&payload[2..4]) as usize)
}

impl<R: Rules> Ensemble<R> {
    fn new(seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut below = |bound: u32| random.next_u32() % bound;
        let weather = Weather {
            loss: [0, 20, 100, 250][below(4) as usize],
            double: [0, 50][below(2) as usize],
            delay_ms: below(20),
            jitter_ms: [0, 3, 60][below(3) as usize],
        };
        let window = [16, 16, 64, 384][below(4) as usize];
        let first = Csn([0, u32::MAX - 20][below(2) as usize]);
        let kinds = below(3);
        let peer = if below(2) == 0 { LossDetection::Time } else { LossDetection::Misses };
        let sack_delay = Duration::from_millis([0, 20][below(2) as usize]);
        let config = Config {
            window,
            peer,
            from_peer: first,
            to_peer: first,
            packet_bytes: PACKET_BYTES,
            sack_delay,
            ..Config::default()
        };
        Self {
            weather,
            now: Instant::from_millis(1),
            switch: Switch::new(config, Plan::default(), WINDOW_BYTES),
            peer: End::new(Tsn(first.0), Tsn(first.0), window, Reading::Plain),
            members: Vec::new(),
            letters: BinaryHeap::new(),
            sent: 0,
            ledger: Ledger::default(),
            first,
            window,
            frames: Vec::new(),
            orders: BTreeMap::new(),
            answers: BTreeMap::new(),
            failure: None,
            deaths: 0,
            kinds,
            random,
        }
    }

    fn below(&mut self, bound: u32) -> u32 {
        self.random.next_u32() % bound
    }

    fn post(&mut self, to: Address, bytes: Vec<u8>) {
        let copies = if self.below(1000) < self.weather.double { 2 } else { 1 };
        for _ in 0..copies {
            if self.below(1000) < self.weather.loss {
                continue;
            }
            let delay = self.weather.delay_ms + self.below(self.weather.jitter_ms + 1);
            self.sent += 1;
            let at = self.now + Duration::from_millis(delay.into());
            self.letters.push(Reverse((at, self.sent, to, bytes.clone())));
        }
    }

    fn join(&mut self) {
        // The ledger has a bit for each that there ever was.
        if self.members.len() == MEMBERS_MAX {
            return;
        }
        let kind = match self.kinds {
            0 => Kind::Margay,
            1 => Kind::Foreign,
            _ => [Kind::Margay, Kind::Foreign][self.below(2) as usize],
        };
        let first = self.below(2).wrapping_sub(1);
        let (to_member, from_member) = (Lsn(first), Lsn(first));
        let Ok(id) = self.switch.join(&Joining { kind, to_member, from_member, window_bytes: WINDOW_BYTES }) else {
            return;
        };
        let reading = if kind == Kind::Margay { Reading::Watermarks } else { Reading::Plain };
        let end = End::new(Tsn(first), Tsn(first), self.window, reading);
        self.ledger.join();
        self.members.push(Member { id, end, is_draining: false, is_gone: false, answered: Vec::new() });
    }

    fn living(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|at| !self.ledger.is_dead(*at) && !self.members[*at].is_gone).collect()
    }

    fn send_frame(&mut self) {
        let frame = self.frames.len() as u32;
        let order = match self.below(6) {
            0 => Order::None,
            1 => Order::Stream(1 + self.below(3) as u16),
            _ => Order::Member,
        };
        let chunks = if self.below(6) == 0 { 1 + self.below(4) as usize } else { 1 };
        let target = self.below(self.members.len().max(1) as u32) as u8;
        let Ok(queued) = self.peer.sender.send(order, 0, &payload(frame, target, chunks)) else { return };
        let first = queued.first.since(Tsn(self.first.0)) as usize;
        self.frames.push((first, order));
        self.orders.insert(first, order);
    }

    /// Something happens, or nothing.
    fn unrest(&mut self) {
        match self.below(40) {
            0..12 if self.frames.len() < FRAMES_MAX => self.send_frame(),
            12 if self.living().len() < 6 => self.join(),
            13 | 14 => {
                let living = self.living();
                let at = living[self.below(living.len() as u32) as usize];
                let others = living.iter().filter(|other| !self.members[**other].is_draining && **other != at).count();
                if others == 0 {
                    return;
                }
                if self.below(3) == 0 {
                    self.deaths += 1;
                    self.ledger.die(at);
                    self.switch.died(self.now, self.members[at].id);
                } else {
                    self.members[at].is_draining = true;
                    self.switch.drain(self.now, self.members[at].id);
                }
            }
            _ => {}
        }
    }

    fn chunk_of(&self, payload: &[u8]) -> usize {
        let (frame, place) = read(payload);
        self.frames[frame as usize].0 + place
    }

    fn arrive(&mut self, to: Address, bytes: &[u8]) {
        let taken = match to {
            Address::SwitchFromPeer => self.switch.from_peer(self.now, bytes),
            Address::SwitchFrom(at) => self.switch.from_member(self.now, self.members[at].id, bytes),
            Address::Peer => {
                self.peer.hear(self.now, bytes);
                Ok(())
            }
            Address::Member(at) => {
                self.arrive_at_member(at, bytes);
                Ok(())
            }
        };
        if let Err(failure) = taken {
            self.failure = Some(failure);
        }
    }

    fn arrive_at_member(&mut self, at: usize, bytes: &[u8]) {
        if self.ledger.is_dead(at) {
            return;
        }
        self.members[at].end.hear(self.now, bytes);
        for chunk in Chunks::new(bytes).filter_map(Result::ok) {
            if let Chunk::IData(repr, payload) = chunk
                && self.members[at].end.receiver.has(Tsn(repr.tsn))
            {
                self.ledger.have(at, self.chunk_of(payload));
            }
        }
        while let Some(received) = self.members[at].end.receiver.poll_frame() {
            let (frame, _) = read(&received.bytes);
            let (first, order) = self.frames[frame as usize];
            let is_whole = received.bytes.len() % CHUNK_BYTES == 0 && received.order == order;
            if !is_whole {
                self.ledger.note("a frame was changed");
            }
            let orders = &self.orders;
            let order_of = |first: usize| orders.get(&first).copied().unwrap_or(Order::None);
            self.ledger.give(at, first, order, order_of);
            self.answer(at, frame, order);
        }
    }

    fn answer(&mut self, at: usize, frame: u32, order: Order) {
        let chunks = 1 + self.below(3) as usize;
        // The answer says whose it is.
        let bytes = payload(frame, at as u8, chunks);
        if self.members[at].end.sender.send(order, 0, &bytes).is_err() {
            self.ledger.note("no room for an answer");
        }
        self.members[at].answered.push(frame);
    }

    /// Everybody says what there is to say.
    fn speak(&mut self) {
        while let Some(received) = self.peer.receiver.poll_frame() {
            let (frame, _) = read(&received.bytes);
            *self.answers.entry((received.bytes[1].into(), frame)).or_default() += 1;
        }
        for bytes in self.peer.speak(self.now) {
            self.post(Address::SwitchFromPeer, bytes);
        }
        for at in self.living() {
            for bytes in self.members[at].end.speak(self.now) {
                self.post(Address::SwitchFrom(at), bytes);
            }
        }
        if self.switch.next_deadline().is_some_and(|deadline| deadline <= self.now) {
            self.switch.on_time(self.now);
        }
        while let Some(packet) = self.switch.poll_packet() {
            match packet.to {
                To::Peer => self.note_acknowledged(&packet.bytes),
                To::Member(_) => {}
            }
            let to = match packet.to {
                To::Peer => Address::Peer,
                To::Member(id) => {
                    let Some(at) = self.members.iter().position(|member| member.id == id) else { continue };
                    self.note_addressed(at, &packet.bytes);
                    Address::Member(at)
                }
            };
            self.post(to, packet.bytes);
        }
        while let Some(event) = self.switch.poll_event() {
            match event {
                Event::Gone(id) => {
                    self.members.iter_mut().filter(|member| member.id == id).for_each(|member| member.is_gone = true);
                }
                Event::Failed(failure) => self.failure = Some(failure),
            }
        }
    }

    fn note_addressed(&mut self, at: usize, bytes: &[u8]) {
        for chunk in Chunks::new(bytes).filter_map(Result::ok) {
            if let Chunk::IData(_, payload) = chunk {
                self.ledger.address(at, self.chunk_of(payload));
            }
        }
    }

    fn note_acknowledged(&mut self, bytes: &[u8]) {
        for chunk in Chunks::new(bytes).filter_map(Result::ok) {
            let Chunk::Sack(sack) = chunk else { continue };
            let behind = Csn(sack.cumulative).plus(1).since(self.first) as usize;
            let blocks = sack.blocks().flat_map(|block| usize::from(block.start) - 1..usize::from(block.end));
            (0..behind).chain(blocks.map(|at| behind + at)).for_each(|chunk| self.ledger.acknowledge(chunk));
        }
    }

    /// Goes on to the next thing that happens, but no further than this.
    fn go_on(&mut self, until: Instant) {
        self.speak();
        let mut next = until;
        let deadlines = [self.peer.next_deadline(), self.switch.next_deadline()].into_iter().flatten();
        let members = self.living().into_iter().filter_map(|at| self.members[at].end.next_deadline());
        for deadline in deadlines.chain(members).collect::<Vec<_>>() {
            next = next.min(deadline);
        }
        if let Some(Reverse((at, ..))) = self.letters.peek() {
            next = next.min(*at);
        }
        self.now = self.now.max(next);
        while self.letters.peek().is_some_and(|Reverse((at, ..))| *at <= self.now) {
            if let Some(Reverse((_, _, to, bytes))) = self.letters.pop() {
                self.arrive(to, &bytes);
            }
        }
    }

    fn is_over(&self) -> bool {
        let is_idle = |at: &usize| self.members[*at].end.sender.is_idle();
        self.peer.sender.is_idle() && self.living().iter().all(is_idle) && self.switch.next_deadline().is_none()
    }

    fn judge(&mut self) -> Result<(), String> {
        let firsts: Vec<usize> = self.frames.iter().map(|(first, _)| *first).collect();
        self.ledger.close(firsts.into_iter());
        if let Some(wrong) = self.ledger.wrong() {
            return Err(wrong.to_owned());
        }
        for (at, member) in self.members.iter().enumerate() {
            if self.ledger.is_dead(at) {
                continue;
            }
            if member.is_draining != member.is_gone {
                return Err(format!("member {at} drains and does not go, or goes and does not drain"));
            }
            if let Some(frame) = member.answered.iter().find(|frame| self.answers.get(&(at, **frame)) != Some(&1)) {
                return Err(format!("the answer of member {at} to frame {frame} came not once"));
            }
        }
        match self.answers.values().find(|count| **count > 1) {
            Some(count) => Err(format!("an answer came {count} times")),
            None => Ok(()),
        }
    }
}

/// What a run came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Run {
    /// Frames that the peer sent.
    pub frames: usize,
    /// The connection ended, as it may when a member dies with a part of a frame.
    pub has_ended: bool,
}

/// One run under broken rules, or [`Sound`] ones.
///
/// # Errors
///
/// What was wrong.
pub fn run_under<R: Rules>(seed: u64) -> Result<Run, String> {
    let mut ensemble = Ensemble::<R>::new(seed);
    (0..2).for_each(|_| ensemble.join());
    let steps = 60 + ensemble.below(200);
    for _ in 0..steps {
        ensemble.unrest();
        let until = ensemble.now + STEP;
        while ensemble.now < until && ensemble.failure.is_none() {
            ensemble.go_on(until);
        }
    }
    let end = ensemble.now + TIME_MAX;
    while !ensemble.is_over() && ensemble.now < end && ensemble.failure.is_none() {
        ensemble.go_on(end);
    }
    // What is still on the way may be the last confirmation.
    ensemble.weather = Weather { loss: 0, double: 0, ..ensemble.weather };
    let end = ensemble.now + Duration::from_secs(5);
    while ensemble.now < end && ensemble.failure.is_none() {
        ensemble.go_on(end);
    }
    let frames = ensemble.frames.len();
    match ensemble.failure {
        Some(Failure::PartlyAcknowledged(_)) if ensemble.deaths > 0 => {
            // What was promised before must hold all the same.
            ensemble.ledger.wrong().map_or(Ok(Run { frames, has_ended: true }), |wrong| Err(wrong.to_owned()))
        }
        Some(failure) => Err(format!("the connection failed: {failure}")),
        None => ensemble.judge().map(|()| Run { frames, has_ended: false }),
    }
}

/// One run.
///
/// # Errors
///
/// What was wrong.
pub fn run(seed: u64) -> Result<Run, String> {
    run_under::<Sound>(seed)
}
