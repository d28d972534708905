//! A small ensemble for exhaustive checking: four chunks of a peer, two or three members, every order of delivery,
//! loss, duplication, repetition, time-out, join, drain and death.
//!
//! The switch and the members' receivers are those that ship. The peer is not: it repeats whatever it likes whenever it
//! likes, which is more than a sender would.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use margay_core::Instant;
use margay_ensemble::{
    Config, Csn, Event, Joining, Kind, Lsn, MemberId, Order, Reading, Receiver, ReceiverConfig, Rules, Serial, Switch,
    To, Tsn, WINDOW_MIN,
};
use margay_wire::sctp::{Chunk, Chunks, IDataFlags, IDataRepr, PacketWriter};

use super::{Ledger, Plan};

/// Chunks that the peer has to send.
pub const CHUNKS: usize = 4;
const PACKET_MAX: usize = 256;
/// Rounds after which a quiet world must have come to rest.
const ROUNDS_MAX: usize = 60;
/// Rooms for all that is sent.
const WINDOW_BYTES: u32 = 10_000;

/// What the peer sends, as four chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Load {
    /// Four frames in order per member.
    Member,
    /// One without order, and three in order per member.
    Mixed,
    /// Three of one stream, and one in order per member.
    Stream,
    /// One of two chunks, the second of which comes last, and two of one chunk, in order per member.
    Fragments,
}

impl Load {
    fn repr(self, chunk: usize) -> IDataRepr {
        let whole = IDataFlags::BEGIN | IDataFlags::END;
        let (flags, stream, mid, number) = match (self, chunk) {
            (Self::Mixed, 1) => (whole | IDataFlags::UNORDERED, 0, 0, 0),
            (Self::Mixed, 2..) => (whole, 0, chunk as u32 - 1, 0),
            (Self::Stream, 0..3) => (whole, 1, chunk as u32, 0),
            (Self::Stream, _) => (whole, 0, 0, 0),
            (Self::Fragments, 0) => (IDataFlags::BEGIN, 0, 0, 0),
            (Self::Fragments, 3) => (IDataFlags::END, 0, 0, 1),
            _ => (whole, 0, chunk as u32, 0),
        };
        IDataRepr { flags, tsn: chunk as u32, stream, mid, number }
    }

    fn order(self, chunk: usize) -> Order {
        let repr = self.repr(chunk);
        match repr.stream {
            _ if repr.is_unordered() => Order::None,
            0 => Order::Member,
            stream => Order::Stream(stream),
        }
    }

    /// First chunks of frames.
    fn frames(self) -> impl Iterator<Item = usize> {
        (0..CHUNKS).filter(move |chunk| self.repr(*chunk).begins())
    }
}

/// How much of each may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Packets that are lost.
    pub lose: u8,
    /// Packets that come twice.
    pub duplicate: u8,
    /// Chunks that the peer repeats.
    pub repeat: u8,
    /// Timers that run out.
    pub wait: u8,
    /// Members that join.
    pub join: u8,
    /// Members that drain.
    pub drain: u8,
    /// Members that die.
    pub die: u8,
}

/// Where it starts.
#[derive(Clone, Copy, Debug)]
pub struct Beginning {
    /// What the peer sends.
    pub load: Load,
    /// What the members' hosts understand, in the order in which they join.
    pub kinds: [Kind; 3],
    /// So many are there from the start.
    pub members: usize,
    /// How much may happen.
    pub budget: Budget,
    /// Which members the frames are for: each of these is searched. Bit by bit from the lowest, for each chunk, the
    /// member.
    pub choices: &'static [u8],
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The packet in flight of this number arrives.
    Deliver(usize),
    /// It arrives and is in flight still.
    Duplicate(usize),
    /// It is lost.
    Lose(usize),
    /// The peer repeats this chunk.
    Repeat(usize),
    /// The next timer runs out.
    Wait,
    /// The next member joins.
    Join,
    /// This one drains.
    Drain(usize),
    /// This one dies.
    Die(usize),
    /// From now on all is quiet: nothing is lost, and the peer repeats what is not acknowledged.
    Quiet,
}

/// A packet and where it goes: to the switch, from the peer or a member, or to a member.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Letter {
    FromPeer(Vec<u8>),
    FromMember(usize, Vec<u8>),
    ToMember(usize, Vec<u8>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Member {
    id: MemberId,
    receiver: Receiver,
    is_draining: bool,
    is_gone: bool,
}

/// A small ensemble.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SmallEnsemble<R> {
    switch: Switch<Plan, R>,
    load: Load,
    kinds: [Kind; 3],
    members: Vec<Member>,
    letters: Vec<Letter>,
    now: Instant,
    left: Budget,
    is_quiet: bool,
    /// What the peer knows: all before this chunk, and these behind it, as bits.
    acknowledged: (usize, u64),
    targets: [u8; CHUNKS],
    ledger: Ledger,
}

fn packet(write: impl FnOnce(&mut PacketWriter<'_>) -> bool) -> Option<Vec<u8>> {
    let mut bytes = [0; PACKET_MAX];
    let mut writer = PacketWriter::new(&mut bytes);
    let has_written = write(&mut writer);
    let len = writer.len();
    has_written.then(|| bytes[..len].to_vec())
}

impl<R: Rules + Clone + Default> SmallEnsemble<R> {
    /// All chunks are in flight. `targets` says which member each chunk's frame is for.
    pub fn new(beginning: &Beginning, targets: [u8; CHUNKS]) -> Self {
        let config = Config { window: WINDOW_MIN, packet_bytes: PACKET_MAX, ..Config::default() };
        let mut world = Self {
            switch: Switch::new(config, Plan::default(), WINDOW_BYTES),
            load: beginning.load,
            kinds: beginning.kinds,
            members: Vec::new(),
            letters: Vec::new(),
            now: Instant::from_millis(1),
            left: beginning.budget,
            is_quiet: false,
            acknowledged: (0, 0),
            targets,
            ledger: Ledger::default(),
        };
        (0..beginning.members).for_each(|_| world.join());
        (0..CHUNKS).for_each(|chunk| world.send(chunk));
        world.letters.sort();
        world
    }

    fn send(&mut self, chunk: usize) {
        let payload = [chunk as u8, self.targets[chunk]];
        let repr = self.load.repr(chunk);
        self.letters.extend(packet(|packet| packet.i_data(&repr, &payload).is_ok()).map(Letter::FromPeer));
    }

    fn join(&mut self) {
        let at = self.ledger.join();
        let kind = self.kinds[at];
        let joining = Joining { kind, to_member: Lsn(0), from_member: Lsn(0), window_bytes: WINDOW_BYTES };
        let reading = match kind {
            Kind::Margay => Reading::Watermarks,
            Kind::Foreign => Reading::Plain,
        };
        let config = ReceiverConfig { first: Tsn(0), reading, sack_delay: Duration::ZERO, ..ReceiverConfig::default() };
        let Ok(id) = self.switch.join(&joining) else { return };
        self.members.push(Member { id, receiver: Receiver::new(config), is_draining: false, is_gone: false });
    }

    fn arrive(&mut self, letter: Letter) {
        let taken = match letter {
            Letter::FromPeer(bytes) => self.switch.from_peer(self.now, &bytes),
            Letter::FromMember(at, bytes) => self.switch.from_member(self.now, self.members[at].id, &bytes),
            Letter::ToMember(at, bytes) => {
                self.arrive_at_member(at, &bytes);
                Ok(())
            }
        };
        if taken.is_err() {
            self.ledger.note("the connection failed");
        }
        self.collect();
    }

    fn arrive_at_member(&mut self, at: usize, bytes: &[u8]) {
        if self.ledger.is_dead(at) {
            return;
        }
        let receiver = &mut self.members[at].receiver;
        receiver.on_packet(self.now, bytes);
        for chunk in Chunks::new(bytes).filter_map(Result::ok) {
            if let Chunk::IData(repr, payload) = chunk
                && receiver.has(Tsn(repr.tsn))
            {
                self.ledger.have(at, payload[0].into());
            }
        }
        while let Some(received) = receiver.poll_frame() {
            let load = self.load;
            self.ledger.give(at, received.bytes[0].into(), received.order, |chunk| load.order(chunk));
        }
        let Some(sack) = packet(|packet| receiver.poll_sack(self.now, packet)) else { return };
        // One that is overtaken says nothing new: it is left out, and so are very many runs.
        self.letters.retain(|letter| !matches!(letter, Letter::FromMember(from, _) if *from == at));
        self.letters.push(Letter::FromMember(at, sack));
    }

    /// Takes what the switch has to say.
    fn collect(&mut self) {
        while let Some(packet) = self.switch.poll_packet() {
            let To::Member(id) = packet.to else {
                self.hear(&packet.bytes);
                continue;
            };
            let Some(at) = self.members.iter().position(|member| member.id == id) else { continue };
            for chunk in Chunks::new(&packet.bytes).filter_map(Result::ok) {
                if let Chunk::IData(_, payload) = chunk {
                    self.ledger.address(at, payload[0].into());
                }
            }
            self.letters.push(Letter::ToMember(at, packet.bytes));
        }
        while let Some(event) = self.switch.poll_event() {
            if let Event::Gone(id) = event {
                self.members.iter_mut().filter(|member| member.id == id).for_each(|member| member.is_gone = true);
            }
        }
        self.switch.take_counters();
        // One of several that are the same is as good as another.
        self.letters.sort();
        self.letters.dedup();
    }

    /// The peer hears at once: what it knows only says what it need not repeat.
    fn hear(&mut self, bytes: &[u8]) {
        for chunk in Chunks::new(bytes).filter_map(Result::ok) {
            let Chunk::Sack(sack) = chunk else { continue };
            let behind = Csn(sack.cumulative).plus(1).0 as usize;
            let blocks = sack.blocks().flat_map(|block| usize::from(block.start) - 1..usize::from(block.end));
            let chunks: Vec<usize> = blocks.map(|at| behind + at).collect();
            (0..behind).chain(chunks.iter().copied()).for_each(|chunk| self.ledger.acknowledge(chunk));
            self.acknowledged = (behind, chunks.iter().map(|chunk| 1 << chunk).sum());
        }
    }

    /// Chunks that the peer does not know to have come.
    fn open(&self) -> impl Iterator<Item = usize> + use<R> {
        let (behind, bits) = self.acknowledged;
        (behind..CHUNKS).filter(move |chunk| bits & 1 << chunk == 0)
    }

    /// Steps that are possible within what is left of the budget.
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.is_quiet || self.ledger.wrong().is_some() {
            return steps;
        }
        let living = || (0..self.members.len()).filter(|at| !self.ledger.is_dead(*at) && !self.members[*at].is_gone);
        for at in 0..self.letters.len() {
            steps.push(Step::Deliver(at));
            steps.extend((self.left.duplicate > 0).then_some(Step::Duplicate(at)));
            steps.extend((self.left.lose > 0).then_some(Step::Lose(at)));
        }
        if self.left.repeat > 0 {
            steps.extend(self.open().map(Step::Repeat));
        }
        let may_wait = self.left.wait > 0 && self.switch.next_deadline().is_some();
        steps.extend(may_wait.then_some(Step::Wait));
        let may_join = self.left.join > 0 && self.members.len() < self.kinds.len();
        steps.extend(may_join.then_some(Step::Join));
        if self.left.drain > 0 && living().count() > 1 {
            steps.extend(living().filter(|at| !self.members[*at].is_draining).map(Step::Drain));
        }
        if self.left.die > 0 && living().count() > 1 {
            steps.extend(living().map(Step::Die));
        }
        steps.push(Step::Quiet);
        steps
    }

    /// Carries out one of [`steps`](Self::steps).
    ///
    /// # Panics
    ///
    /// On any other.
    pub fn play(&mut self, step: Step) {
        match step {
            Step::Deliver(at) => {
                let letter = self.letters.remove(at);
                self.arrive(letter);
            }
            Step::Duplicate(at) => {
                self.left.duplicate -= 1;
                self.arrive(self.letters[at].clone());
            }
            Step::Lose(at) => {
                self.left.lose -= 1;
                self.letters.remove(at);
            }
            Step::Repeat(chunk) => {
                self.left.repeat -= 1;
                self.send(chunk);
                self.collect();
            }
            Step::Wait => {
                self.left.wait -= 1;
                self.wait();
            }
            Step::Join => {
                self.left.join -= 1;
                self.join();
            }
            Step::Drain(at) => {
                self.left.drain -= 1;
                self.members[at].is_draining = true;
                self.switch.drain(self.now, self.members[at].id);
                self.collect();
            }
            Step::Die(at) => {
                self.left.die -= 1;
                self.ledger.die(at);
                self.switch.died(self.now, self.members[at].id);
                self.collect();
            }
            Step::Quiet => self.settle(),
        }
    }

    fn wait(&mut self) {
        let Some(deadline) = self.switch.next_deadline() else { return };
        self.now = self.now.max(deadline);
        self.switch.on_time(self.now);
        self.collect();
    }

    fn settle(&mut self) {
        self.is_quiet = true;
        for _ in 0..ROUNDS_MAX {
            while let Some(letter) = self.letters.pop() {
                self.arrive(letter);
            }
            let open: Vec<usize> = self.open().collect();
            if open.is_empty() && self.switch.next_deadline().is_none() {
                break;
            }
            open.into_iter().for_each(|chunk| self.send(chunk));
            self.wait();
        }
        if self.acknowledged.0 < CHUNKS {
            self.ledger.note("not all is acknowledged");
        }
        let stays = |(at, member): (usize, &Member)| member.is_draining && !member.is_gone && !self.ledger.is_dead(at);
        if self.members.iter().enumerate().any(stays) {
            self.ledger.note("one that drains does not go");
        }
        self.ledger.close(self.load.frames());
    }

    /// What was wrong first.
    pub const fn wrong(&self) -> Option<&'static str> {
        self.ledger.wrong()
    }

    /// Equal for worlds that go on alike.
    pub fn fingerprint(&self) -> u64
    where
        R: Hash,
    {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }
}
