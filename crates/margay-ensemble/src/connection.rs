//! One end of a framed connection: how it begins, carries frames, finds out that the other end is gone, and is over
//! (docs/decisions/0075). What it writes are whole datagrams of a flow.

use alloc::borrow::ToOwned;
use alloc::collections::VecDeque;
use alloc::string::String;
use core::fmt;
use core::time::Duration;

use margay_core::Instant;
use margay_wire::sctp::{Chunk, Chunks, PacketWriter};
use margay_wire::{AbortReason, FRAMED_HEADER_LEN, Framed, FramedTerms};

use crate::endpoint::{Reading, Received, Receiver, ReceiverConfig, Sender, SenderConfig, TooLarge};
use crate::number::Tsn;
use crate::plugin::Order;
use crate::split::STREAMS_MAX;

/// A HELLO is repeated after so long.
const HELLO_AGAIN: Duration = Duration::from_millis(100);
/// An end that nobody has answered for so long gives up.
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// An end that waits for something asks after so long without a word, and again.
const PING_AFTER: Duration = Duration::from_millis(100);
/// An end that waits for something takes the other for dead after so long without a word.
const SILENCE_MAX: Duration = Duration::from_millis(600);
/// It asks so often before. A process that was stopped for a while has not listened, however long it was.
const PINGS_MIN: u32 = 5;
/// An end that waits for nothing asks after so long: no translator of addresses may forget the flow.
const IDLE_PING_AFTER: Duration = Duration::from_secs(20);
/// The same again, where no answer comes.
const IDLE_PING_AGAIN: Duration = Duration::from_secs(1);
/// An end that waits for nothing takes the other for dead after so long.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// Numbers of lost requests that the owner has not taken: a list that comes then is not answered, and so is repeated.
const LOST_MAX: usize = 1 << 16;
/// LEAVING is repeated after so long.
const LEAVING_AGAIN: Duration = Duration::from_millis(200);

/// What an end is set up with.
#[derive(Clone, Debug)]
pub struct ConnectionConfig {
    /// The first number of what it sends; random.
    pub first: Tsn,
    /// Chunks under way at most, each way.
    pub window: u16,
    /// Bytes of frames that wait to be sent, or are under way.
    pub send_buffer_bytes: usize,
    /// Bytes of frames that wait here for others, or to be read.
    pub receive_buffer_bytes: usize,
    /// Of the programs, as HELLO names it.
    pub protocol: u8,
    /// How an end that answers puts in order what comes: by watermarks where a switch has opened the connection.
    pub reading: Reading,
}

impl Default for ConnectionConfig {
    fn default() -> Self {
        Self {
            first: Tsn(0),
            window: crate::config::WINDOW_DEFAULT,
            send_buffer_bytes: 1 << 20,
            receive_buffer_bytes: 1 << 20,
            protocol: 0,
            reading: Reading::Watermarks,
        }
    }
}

impl ConnectionConfig {
    fn terms(&self) -> FramedTerms {
        FramedTerms {
            tsn: self.first.0,
            window_bytes: u32::try_from(self.receive_buffer_bytes).unwrap_or(u32::MAX),
            window: self.window,
            // Far below 2^16.
            streams: STREAMS_MAX as u16,
        }
    }
}

/// Why a connection is over.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Over {
    /// This end closed it.
    Closed,
    /// The other end closed it.
    ClosedByPeer,
    /// The other end does not know it, or gave it up; with its words.
    Aborted(AbortReason, String),
    /// Nothing comes from the other end.
    Silent,
    /// The other end begins frames that do not end, and fills what there is of memory for them; or there is none for
    /// the frames that it has begun.
    Overfull,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("it was closed"),
            Self::ClosedByPeer => f.write_str("the other end has closed it"),
            Self::Aborted(AbortReason::Unknown, _) => f.write_str("the other end does not know it; was it restarted?"),
            Self::Aborted(_, text) => write!(f, "the other end has ended it: {text}"),
            Self::Silent => f.write_str("nothing comes from the other end"),
            Self::Overfull => f.write_str("the other end begins frames, and ends none while there is memory for them"),
        }
    }
}

/// How far a connection has come.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Standing {
    /// The other end has not answered.
    Opening,
    /// Frames go both ways.
    Open,
    /// No more.
    Over(Over),
}

/// The halves of an open end.
#[derive(Clone, Debug)]
struct Halves {
    sender: Sender,
    receiver: Receiver,
}

/// One end of a framed connection.
///
/// Whoever owns it gives it every datagram with its number ([`on_datagram`](Self::on_datagram)), calls
/// [`on_time`](Self::on_time) at [`next_deadline`](Self::next_deadline), and after each of them, and after
/// [`send`](Self::send), sends what [`poll_datagram`](Self::poll_datagram) writes until it writes nothing.
#[derive(Clone, Debug)]
pub struct Connection {
    number: u64,
    config: ConnectionConfig,
    standing: Standing,
    /// Of the end that opens it: the host that is meant.
    meant: Option<[u8; 16]>,
    /// What this end is called, where it answers.
    label: String,
    halves: Option<Halves>,
    began: Instant,
    heard_at: Instant,
    /// The owner waits for frames.
    is_awaiting: bool,
    /// Since when something is waited for.
    waiting_since: Option<Instant>,
    ping_at: Instant,
    /// Questions since the other end was heard last.
    pings: u32,
    hello_at: Option<Instant>,
    leaving_at: Option<Instant>,
    is_welcome_due: bool,
    is_pong_due: bool,
    is_ping_due: bool,
    is_close_due: bool,
    is_leaving_due: bool,
    /// The last list of lost requests that has come, and whether an answer is due.
    lost_seen: Option<u32>,
    is_lost_seen_due: bool,
    lost: VecDeque<u32>,
}

impl Connection {
    /// Opens a connection with a random number. `meant` is the host that may answer; all zero: any.
    pub fn open(now: Instant, number: u64, meant: [u8; 16], config: ConnectionConfig) -> Self {
        let mut this = Self::new(now, number, config);
        this.meant = Some(meant);
        this.hello_at = Some(now);
        this
    }

    /// Answers a HELLO that opens a connection. `label` is what this end is called where keys are divided, at most
    /// [`margay_wire::FRAMED_LABEL_MAX`] bytes.
    pub fn accept(now: Instant, number: u64, hello: &FramedTerms, label: &str, config: ConnectionConfig) -> Self {
        let mut this = Self::new(now, number, config);
        this.label = label.to_owned();
        this.begin(hello, this.config.reading);
        this.is_welcome_due = true;
        this
    }

    fn new(now: Instant, number: u64, config: ConnectionConfig) -> Self {
        Self {
            number,
            config,
            standing: Standing::Opening,
            meant: None,
            label: String::new(),
            halves: None,
            began: now,
            heard_at: now,
            is_awaiting: false,
            waiting_since: None,
            ping_at: now,
            pings: 0,
            hello_at: None,
            leaving_at: None,
            is_welcome_due: false,
            is_pong_due: false,
            is_ping_due: false,
            is_close_due: false,
            is_leaving_due: false,
            lost_seen: None,
            is_lost_seen_due: false,
            lost: VecDeque::new(),
        }
    }

    fn begin(&mut self, peer: &FramedTerms, reading: Reading) {
        let sender = Sender::new(SenderConfig {
            first: self.config.first,
            window: self.config.window.min(peer.window.max(1)),
            buffer_bytes: self.config.send_buffer_bytes,
            receiver_bytes: peer.window_bytes,
            ..SenderConfig::default()
        });
        let receiver = Receiver::new(ReceiverConfig {
            first: Tsn(peer.tsn),
            reading,
            buffer_bytes: self.config.receive_buffer_bytes,
            ..ReceiverConfig::default()
        });
        self.halves = Some(Halves { sender, receiver });
        self.standing = Standing::Open;
    }

    /// Its number.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// How far it has come.
    pub const fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Whether it is over.
    pub const fn is_over(&self) -> bool {
        matches!(self.standing, Standing::Over(_))
    }

    /// A datagram with its number.
    pub fn on_datagram(&mut self, now: Instant, says: &Framed<'_>) {
        if self.is_over() {
            return;
        }
        self.heard_at = now;
        self.pings = 0;
        match says {
            // Its answer was lost.
            Framed::Hello { .. } => self.is_welcome_due |= self.meant.is_none(),
            Framed::Welcome { terms, .. } => {
                if self.meant.is_some() && self.halves.is_none() {
                    self.begin(terms, Reading::Plain);
                    self.hello_at = None;
                }
            }
            Framed::Data(packet) => self.on_packet(now, packet),
            Framed::Abort { reason, text } => self.end(Over::Aborted(*reason, (*text).to_owned())),
            Framed::Close => self.end(Over::ClosedByPeer),
            Framed::Ping => self.is_pong_due = true,
            Framed::Lost { .. } if self.lost.len() >= LOST_MAX => {}
            Framed::Lost { generation, numbers } => {
                self.is_lost_seen_due = true;
                if self.lost_seen != Some(*generation) {
                    self.lost_seen = Some(*generation);
                    self.lost.extend(numbers.iter());
                }
            }
            // Those are for a switch.
            Framed::Pong | Framed::Leaving | Framed::LostSeen { .. } => {}
        }
        self.note_waiting(now);
    }

    fn on_packet(&mut self, now: Instant, packet: &[u8]) {
        let Some(halves) = &mut self.halves else { return };
        for chunk in Chunks::new(packet) {
            if let Ok(Chunk::Sack(sack)) = chunk {
                halves.sender.on_sack(now, &sack);
            }
        }
        halves.receiver.on_packet(now, packet);
        if halves.receiver.is_overfull() {
            self.end(Over::Overfull);
        }
    }

    fn end(&mut self, over: Over) {
        if !self.is_over() {
            // The other end may live, and keep what nobody wants any more.
            self.is_close_due |= matches!(over, Over::Silent | Over::Overfull);
            self.standing = Standing::Over(over);
        }
    }

    /// Sends a frame.
    ///
    /// # Errors
    ///
    /// [`TooLarge`]: it has not begun, or there is no room for the frame now.
    pub fn send(&mut self, now: Instant, order: Order, frame: &[u8]) -> Result<(), TooLarge> {
        let halves = self.halves.as_mut().filter(|_| self.standing == Standing::Open).ok_or(TooLarge)?;
        halves.sender.send(order, 0, frame)?;
        self.note_waiting(now);
        Ok(())
    }

    /// The owner waits for frames of the other end, or does so no longer: it is found out sooner that the other is
    /// dead.
    pub fn await_frames(&mut self, now: Instant, is_awaiting: bool) {
        self.is_awaiting = is_awaiting;
        self.note_waiting(now);
    }

    /// The next frame.
    pub fn poll_frame(&mut self) -> Option<Received> {
        self.halves.as_mut()?.receiver.poll_frame()
    }

    /// The number of a request that nobody will answer, since its member is gone.
    pub fn poll_lost(&mut self) -> Option<u32> {
        self.lost.pop_front()
    }

    /// This end takes no new frames; it says so until the other closes the connection.
    pub fn leave(&mut self, now: Instant) {
        if self.leaving_at.is_none() {
            self.leaving_at = Some(now);
        }
    }

    /// Closes the connection: one datagram tells the other end.
    pub fn close(&mut self) {
        self.is_close_due |= !self.is_over();
        self.end(Over::Closed);
    }

    /// Whether nothing waits or is under way.
    pub fn is_idle(&self) -> bool {
        self.halves.as_ref().is_none_or(|halves| halves.sender.is_idle())
    }

    /// Bytes of memory that frames take here, either way.
    pub fn memory(&self) -> usize {
        self.halves.as_ref().map_or(0, |halves| halves.sender.memory() + halves.receiver.memory())
    }

    /// Whether the owner is out of memory for frames of the other end. While it is, new ones are dropped, and the other
    /// end learns that there is no room.
    pub fn hold_back(&mut self, is_held_back: bool) {
        if let Some(halves) = &mut self.halves {
            halves.receiver.hold_back(is_held_back);
        }
    }

    fn note_waiting(&mut self, now: Instant) {
        // An end that answers waits for the ends behind a switch, which take their time.
        let is_waiting = self.meant.is_some() && (self.is_awaiting || !self.is_idle());
        self.waiting_since = if is_waiting { self.waiting_since.or(Some(now)) } else { None };
    }

    /// Since when nothing has been heard that was waited for, or could be; how long that may be; and when to ask.
    fn silence(&self) -> (Instant, Duration, Duration) {
        match self.waiting_since {
            Some(since) => (since.max(self.heard_at), SILENCE_MAX, PING_AFTER),
            None => (self.heard_at, IDLE_MAX, IDLE_PING_AFTER),
        }
    }

    /// Whether silence says something.
    fn has_listened(&self) -> bool {
        self.meant.is_none() || self.pings >= PINGS_MIN
    }

    /// Time has passed.
    pub fn on_time(&mut self, now: Instant) {
        match self.standing {
            Standing::Over(_) => return,
            Standing::Opening if now.since(self.began) >= HELLO_LIMIT => return self.end(Over::Silent),
            Standing::Opening => return,
            Standing::Open => {}
        }
        if let Some(halves) = &mut self.halves {
            halves.sender.on_time(now);
        }
        if let Some(at) = self.leaving_at.filter(|at| *at <= now) {
            self.is_leaving_due = true;
            self.leaving_at = Some(at.max(now) + LEAVING_AGAIN);
        }
        let (since, silence_max, ask_after) = self.silence();
        if self.has_listened() && now.since(since) >= silence_max {
            return self.end(Over::Silent);
        }
        if self.meant.is_some() && now.since(since) >= ask_after && self.ping_at <= now {
            self.is_ping_due = true;
            self.pings += 1;
            self.ping_at = now + if self.waiting_since.is_some() { PING_AFTER } else { IDLE_PING_AGAIN };
        }
        self.note_waiting(now);
    }

    /// When [`on_time`](Self::on_time), and then [`poll_datagram`](Self::poll_datagram), are to be called, if ever.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.standing {
            Standing::Over(_) => return None,
            Standing::Opening => return self.hello_at.map(|at| at.min(self.began + HELLO_LIMIT)),
            Standing::Open => {}
        }
        let halves = self.halves.as_ref();
        let sender = halves.and_then(|halves| halves.sender.next_deadline());
        let receiver = halves.and_then(|halves| halves.receiver.next_deadline());
        let (since, silence_max, ask_after) = self.silence();
        let ask = self.meant.map(|_| (since + ask_after).max(self.ping_at));
        let over = self.has_listened().then_some(since + silence_max);
        [sender, receiver, self.leaving_at, ask, over].into_iter().flatten().min()
    }

    /// Writes a datagram that is to be sent, and gives its length; none: there is nothing to be sent now. `out` has
    /// room for [`DATAGRAM_MAX`](Self::DATAGRAM_MAX) bytes.
    pub fn poll_datagram(&mut self, now: Instant, out: &mut [u8]) -> Option<usize> {
        if core::mem::take(&mut self.is_close_due) {
            return Framed::Close.emit(self.number, out);
        }
        match self.standing {
            Standing::Over(_) => None,
            Standing::Opening => {
                self.hello_at.filter(|at| *at <= now)?;
                self.hello_at = Some(now + HELLO_AGAIN);
                let host = self.meant.unwrap_or_default();
                let hello = Framed::Hello { terms: self.config.terms(), host, protocol: self.config.protocol };
                hello.emit(self.number, out)
            }
            Standing::Open => self.poll_control(out).or_else(|| self.poll_data(now, out)),
        }
    }

    /// Bytes that the longest datagram has: others can be cut on their way.
    pub const DATAGRAM_MAX: usize = 1300;

    fn poll_control(&mut self, out: &mut [u8]) -> Option<usize> {
        if core::mem::take(&mut self.is_welcome_due) {
            let welcome = Framed::Welcome { terms: self.config.terms(), label: &self.label };
            return welcome.emit(self.number, out);
        }
        if core::mem::take(&mut self.is_lost_seen_due) {
            return Framed::LostSeen { generation: self.lost_seen.unwrap_or_default() }.emit(self.number, out);
        }
        let due = [
            (&mut self.is_pong_due, Framed::Pong),
            (&mut self.is_ping_due, Framed::Ping),
            (&mut self.is_leaving_due, Framed::Leaving),
        ];
        let (_, says) = due.into_iter().find(|(is_due, _)| **is_due).map(|(is_due, says)| (*is_due = false, says))?;
        says.emit(self.number, out)
    }

    fn poll_data(&mut self, now: Instant, out: &mut [u8]) -> Option<usize> {
        let halves = self.halves.as_mut()?;
        let end = out.len().min(Self::DATAGRAM_MAX);
        let mut packet = PacketWriter::new(Framed::begin_data(self.number, &mut out[..end])?);
        if halves.sender.has_due() {
            halves.receiver.hasten_sack();
        }
        halves.receiver.poll_sack(now, &mut packet);
        halves.sender.poll(now, &mut packet);
        let len = packet.len();
        (len > 0).then_some(FRAMED_HEADER_LEN + len)
    }
}

#[cfg(test)]
mod test {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    fn pair(now: Instant) -> (Connection, Connection) {
        let mut client = Connection::open(now, 7, [0; 16], ConnectionConfig { first: Tsn(5), ..Default::default() });
        let hello = poll(&mut client, now).pop().expect("a HELLO");
        let Ok((7, Framed::Hello { terms, .. })) = Framed::parse(&hello) else { panic!("a HELLO") };
        let config = ConnectionConfig { first: Tsn(u32::MAX), ..Default::default() };
        let mut server = Connection::accept(now, 7, &terms, "s1", config);
        pass(&mut server, &mut client, now);
        assert_eq!(client.standing(), &Standing::Open);
        (client, server)
    }

    fn poll(end: &mut Connection, now: Instant) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        let mut out = vec![0; Connection::DATAGRAM_MAX];
        while let Some(len) = end.poll_datagram(now, &mut out) {
            all.push(out[..len].to_vec());
        }
        all
    }

    fn pass(from: &mut Connection, to: &mut Connection, now: Instant) -> usize {
        let all = poll(from, now);
        for datagram in &all {
            let (number, says) = Framed::parse(datagram).expect("sound");
            assert_eq!(number, 7);
            to.on_datagram(now, &says);
        }
        all.len()
    }

    /// Frames of a peer come to an end that reads by message identifiers; a member's watermarks are of a switch.
    #[test]
    fn frames_come_after_the_handshake() {
        let (mut client, mut server) = pair(at(0));
        assert_eq!(server.standing(), &Standing::Open);
        server.send(at(1), Order::Member, b"answer").expect("room");
        pass(&mut server, &mut client, at(1));
        assert_eq!(client.poll_frame().map(|frame| frame.bytes), Some(b"answer".to_vec()));
        assert!(!server.is_idle());
        client.on_time(at(30));
        pass(&mut client, &mut server, at(30));
        assert!(server.is_idle(), "the acknowledgement came");
    }

    /// A member acknowledges with its answer, and the peer with its next request.
    #[test]
    fn an_acknowledgement_goes_with_what_is_sent() {
        let (mut client, mut server) = pair(at(0));
        client.send(at(1), Order::None, b"question").expect("room");
        assert_eq!(pass(&mut client, &mut server, at(1)), 1);
        assert_eq!(poll(&mut server, at(1)).len(), 0, "its answer may come soon");
        server.send(at(2), Order::Member, b"answer").expect("room");
        assert_eq!(pass(&mut server, &mut client, at(2)), 1);
        assert!(client.is_idle());
        client.send(at(3), Order::None, b"question").expect("room");
        assert_eq!(pass(&mut client, &mut server, at(3)), 1);
        assert!(server.is_idle());
        assert_eq!(pass(&mut server, &mut client, at(30)), 1, "it has nothing to say, and has waited");
        assert!(client.is_idle());
    }

    #[test]
    fn a_hello_is_repeated_until_it_is_answered_or_given_up() {
        let mut client = Connection::open(at(0), 7, [1; 16], ConnectionConfig::default());
        assert_eq!(poll(&mut client, at(0)).len(), 1);
        assert_eq!(poll(&mut client, at(50)).len(), 0);
        assert_eq!(client.next_deadline(), Some(at(100)));
        assert_eq!(poll(&mut client, at(100)).len(), 1);
        assert!(client.send(at(100), Order::Member, b"early").is_err());
        client.on_time(at(2000));
        assert_eq!(client.standing(), &Standing::Over(Over::Silent));
        let close = poll(&mut client, at(2000)).pop().expect("the other end may have answered");
        assert_eq!(Framed::parse(&close), Ok((7, Framed::Close)));
        assert_eq!((poll(&mut client, at(2000)).len(), client.next_deadline()), (0, None));
    }

    #[test]
    fn a_repeated_hello_is_welcomed_again() {
        let (mut client, mut server) = pair(at(0));
        let mut late = Connection::open(at(0), 7, [0; 16], ConnectionConfig::default());
        pass(&mut late, &mut server, at(1));
        assert_eq!(pass(&mut server, &mut client, at(1)), 1);
        assert_eq!(client.standing(), &Standing::Open);
    }

    #[test]
    fn who_waits_asks_and_takes_silence_for_death() {
        let (mut client, mut server) = pair(at(0));
        client.await_frames(at(1000), true);
        client.on_time(at(1100));
        assert_eq!(pass(&mut client, &mut server, at(1100)), 1, "it asks");
        assert_eq!(pass(&mut server, &mut client, at(1150)), 1, "the other is there");
        (1250..1750).step_by(100).for_each(|millis| client.on_time(at(millis)));
        client.on_time(at(1749));
        assert_eq!((client.standing(), client.next_deadline()), (&Standing::Open, Some(at(1750))));
        client.on_time(at(1750));
        assert_eq!(client.standing(), &Standing::Over(Over::Silent));
    }

    #[test]
    fn who_has_not_listened_asks_before() {
        let (mut client, mut server) = pair(at(0));
        client.await_frames(at(0), true);
        client.on_time(at(9000));
        assert_eq!((client.standing(), client.next_deadline()), (&Standing::Open, Some(at(9100))));
        assert_eq!(pass(&mut client, &mut server, at(9000)), 1, "it asks");
        assert_eq!(pass(&mut server, &mut client, at(9001)), 1);
        client.on_time(at(9600));
        assert_eq!(client.standing(), &Standing::Open);
    }

    #[test]
    fn who_waits_for_nothing_is_patient() {
        let (mut client, mut server) = pair(at(0));
        client.on_time(at(19_999));
        assert_eq!(poll(&mut client, at(19_999)).len(), 0);
        client.on_time(at(20_000));
        assert_eq!(pass(&mut client, &mut server, at(20_000)), 1);
        (21_000..=60_000).step_by(1000).for_each(|millis| client.on_time(at(millis)));
        assert_eq!(client.standing(), &Standing::Over(Over::Silent));
        server.on_time(at(79_999));
        assert_eq!(server.standing(), &Standing::Open);
        server.on_time(at(80_000));
        assert_eq!(server.standing(), &Standing::Over(Over::Silent));
    }

    #[test]
    fn an_end_is_told() {
        let (mut client, mut server) = pair(at(0));
        client.close();
        assert_eq!(client.standing(), &Standing::Over(Over::Closed));
        assert_eq!(pass(&mut client, &mut server, at(1)), 1);
        assert_eq!(server.standing(), &Standing::Over(Over::ClosedByPeer));
        let (mut client, _) = pair(at(0));
        client.on_datagram(at(1), &Framed::Abort { reason: AbortReason::Program, text: "memcached is gone" });
        let over = Over::Aborted(AbortReason::Program, "memcached is gone".to_owned());
        assert_eq!(client.standing(), &Standing::Over(over));
    }

    #[test]
    fn one_that_leaves_says_so_again_and_again() {
        let (_, mut server) = pair(at(0));
        server.leave(at(10));
        server.on_time(at(10));
        assert_eq!(poll(&mut server, at(10)).len(), 1);
        server.on_time(at(100));
        assert_eq!(poll(&mut server, at(100)).len(), 0);
        server.on_time(at(210));
        assert_eq!(poll(&mut server, at(210)).len(), 1);
    }

    #[test]
    fn a_list_of_lost_requests_is_read_once_and_always_answered() {
        let (mut client, _) = pair(at(0));
        let mut out = [0; 64];
        let len = Framed::emit_lost(7, 1, &[3, 9], &mut out).expect("room");
        for _ in 0..2 {
            let (_, says) = Framed::parse(&out[..len]).expect("sound");
            client.on_datagram(at(1), &says);
            let answer = poll(&mut client, at(1)).pop().expect("an answer");
            assert_eq!(Framed::parse(&answer), Ok((7, Framed::LostSeen { generation: 1 })));
        }
        assert_eq!([client.poll_lost(), client.poll_lost(), client.poll_lost()], [Some(3), Some(9), None]);
    }

    #[test]
    fn lists_of_lost_requests_wait_at_the_switch_while_the_owner_takes_none() {
        let (mut client, _) = pair(at(0));
        let numbers: Vec<u32> = (0..margay_wire::FRAMED_LOST_MAX as u32).collect();
        let mut out = vec![0; Connection::DATAGRAM_MAX];
        let full = u32::try_from(LOST_MAX / numbers.len()).expect("few");
        for generation in 1..=full + 2 {
            let len = Framed::emit_lost(7, generation, &numbers, &mut out).expect("room");
            client.on_datagram(at(1), &Framed::parse(&out[..len]).expect("sound").1);
            assert_eq!(poll(&mut client, at(1)).len(), usize::from(generation <= full), "{generation}");
        }
        assert_eq!(core::iter::from_fn(|| client.poll_lost()).count(), LOST_MAX);
        let len = Framed::emit_lost(7, full + 1, &numbers, &mut out).expect("room");
        client.on_datagram(at(2), &Framed::parse(&out[..len]).expect("sound").1);
        assert_eq!(poll(&mut client, at(2)).len(), 1, "there is room again");
    }
}
