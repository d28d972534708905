//! What the packet threads hand to the thread of the core: misses, and what they saw of transports. Bounded, so that a
//! flood of one kind is dropped here and costs the packet threads no more than a copy (DESIGN §3.11).

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use margay_core::{DirectEvent, Direction, DropReason};
use margay_wire::FlowId;
use parking_lot::Mutex;

use crate::detour::Place;
use crate::vnet::Vnet;
use crate::wait::Wake;

/// Most packets of applications that wait, and most datagrams.
const PACKETS_MAX: usize = 4096;
/// Most bytes of either.
const BYTES_MAX: usize = 16 << 20;
/// Most notices that wait; a lost one leaves a closed flow in the cache until it is idle.
const NOTICES_MAX: usize = 1 << 16;

/// A packet of an application that missed the cache.
#[derive(Debug, PartialEq, Eq)]
pub struct Missed {
    /// What the kernel says of it.
    pub vnet: Vnet,
    /// The packet.
    pub packet: Vec<u8>,
    /// It is the peer's of this flow, and not an application's: the core has the flow's packets come to it.
    pub of_peer: Option<FlowId>,
}

/// A segment with FIN, RST or SYN that was carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed {
    /// The local flow.
    pub flow: FlowId,
    /// Which way it went.
    pub direction: Direction,
    /// The TCP flags byte.
    pub flags: u8,
}

/// Something that the packet threads saw of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A segment with FIN, RST or SYN was carried.
    Passed(Passed),
    /// Something happened to its direct path.
    Direct(FlowId, DirectEvent),
    /// A packet of it came to user space although it is sent direct.
    Beside(FlowId),
    /// Chunks of it come that this end cannot open.
    StrangeSeal(FlowId),
    /// The peer has turned a flow to another stack, by this change.
    Turned(FlowId, u32),
    /// Something of another stack than the flow's has come.
    StrangeStack(FlowId),
    /// Trains of this striped flow have come, and its peer is to be told.
    Arrivals(FlowId),
    /// Data of it, or by its path, goes unanswered for too long: its own for so long.
    Silence(FlowId, Duration),
    /// Data of it that went unanswered for long has been answered.
    Answer(FlowId),
    /// The core wants to know what was counted of it.
    Count(FlowId),
    /// An application has acknowledged a FIN of its peer's that waited for that.
    Acknowledged,
}

/// A datagram of a peer.
#[derive(Debug, PartialEq, Eq)]
pub struct Arrived {
    /// The address of this host that it came to, where that is known.
    pub local: Option<IpAddr>,
    /// The sender.
    pub from: SocketAddr,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// All that waits, by kind, each in order.
#[derive(Debug, Default)]
pub struct Waiting {
    /// What was seen of flows.
    pub notices: VecDeque<Notice>,
    /// Packets of applications.
    pub packets: VecDeque<Missed>,
    /// Datagrams of peers.
    pub datagrams: VecDeque<Arrived>,
    packet_bytes: usize,
    datagram_bytes: usize,
    /// Of the last packet that was handed over.
    pub packet_place: Place,
    /// Of the last datagram.
    pub datagram_place: Place,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.notices.is_empty() && self.packets.is_empty() && self.datagrams.is_empty()
    }
}

/// The hand-over point.
#[derive(Debug)]
pub struct Backlog {
    waiting: Mutex<Waiting>,
    is_taken: AtomicBool,
    /// Nothing waits any more up to these places.
    packets_done: AtomicU64,
    datagrams_done: AtomicU64,
    /// The place of a packet that somebody awaits; 0: none.
    awaited: AtomicU64,
    reached: Wake,
    wake: Wake,
}

impl Backlog {
    /// An empty one.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            waiting: Mutex::default(),
            is_taken: AtomicBool::new(false),
            packets_done: AtomicU64::new(0),
            datagrams_done: AtomicU64::new(0),
            awaited: AtomicU64::new(0),
            reached: Wake::new()?,
            wake: Wake::new()?,
        })
    }

    /// Hands over a packet of an application. Gives its place.
    pub fn packet(&self, missed: Missed) -> Result<Place, DropReason> {
        self.push(|waiting| {
            if waiting.packets.len() >= PACKETS_MAX || waiting.packet_bytes + missed.packet.len() > BYTES_MAX {
                return Err(DropReason::Full);
            }
            waiting.packet_bytes += missed.packet.len();
            waiting.packets.push_back(missed);
            waiting.packet_place += 1;
            Ok(waiting.packet_place)
        })
    }

    /// Hands over a datagram. Gives its place.
    pub fn datagram(&self, local: Option<IpAddr>, from: SocketAddr, datagram: &[u8]) -> Result<Place, DropReason> {
        self.push(|waiting| {
            if waiting.datagrams.len() >= PACKETS_MAX || waiting.datagram_bytes + datagram.len() > BYTES_MAX {
                return Err(DropReason::Full);
            }
            waiting.datagram_bytes += datagram.len();
            waiting.datagrams.push_back(Arrived { local, from, bytes: datagram.to_vec() });
            waiting.datagram_place += 1;
            Ok(waiting.datagram_place)
        })
    }

    /// Reports what was seen of a flow.
    pub fn notice(&self, notice: Notice) -> Result<(), DropReason> {
        self.push(|waiting| {
            if waiting.notices.len() >= NOTICES_MAX {
                return Err(DropReason::Full);
            }
            // A busy flow says the same many times before it is heard.
            if !matches!(notice, Notice::Passed(_)) && waiting.notices.back() == Some(&notice) {
                return Ok(());
            }
            waiting.notices.push_back(notice);
            Ok(())
        })
    }

    /// Takes all that waits. Until [`done`](Self::done) it counts as not worked off.
    pub fn take(&self) -> Waiting {
        self.wake.clear();
        let mut waiting = self.waiting.lock();
        self.is_taken.store(true, Ordering::Relaxed);
        let packet_place = waiting.packet_place;
        let datagram_place = waiting.datagram_place;
        std::mem::replace(&mut *waiting, Waiting { packet_place, datagram_place, ..Waiting::default() })
    }

    /// What was taken has been worked off, up to these places.
    pub fn done(&self, packets: Place, datagrams: Place) {
        self.packets_done.store(packets, Ordering::SeqCst);
        // One of the two sees what the other has stored: this, or `await_packets`.
        let awaited = self.awaited.load(Ordering::SeqCst);
        if awaited != 0 && packets >= awaited {
            self.reached.set();
        }
        self.datagrams_done.store(datagrams, Ordering::Release);
        self.is_taken.store(false, Ordering::Release);
    }

    /// Whether no packet waits any more of those that have been handed over. If some do, [`reached`](Self::reached)
    /// becomes readable when they have been worked off.
    pub fn await_packets(&self) -> bool {
        let place = self.waiting.lock().packet_place;
        self.reached.clear();
        self.awaited.store(place, Ordering::SeqCst);
        let is_reached = self.packets_done.load(Ordering::SeqCst) >= place;
        if is_reached {
            self.forget_awaited();
        }
        is_reached
    }

    /// Nobody awaits packets any more.
    pub fn forget_awaited(&self) {
        self.awaited.store(0, Ordering::SeqCst);
        self.reached.clear();
    }

    /// Becomes readable when the packets that somebody awaits have been worked off.
    pub fn reached(&self) -> BorrowedFd<'_> {
        self.reached.as_fd()
    }

    /// Up to which place no packet waits any more.
    pub fn packets_done(&self) -> Place {
        self.packets_done.load(Ordering::Acquire)
    }

    /// Up to which place no datagram waits any more.
    pub fn datagrams_done(&self) -> Place {
        self.datagrams_done.load(Ordering::Acquire)
    }

    /// Whether everything that was handed over has been worked off.
    pub fn is_idle(&self) -> bool {
        let waiting = self.waiting.lock();
        waiting.is_empty() && !self.is_taken.load(Ordering::Acquire)
    }

    fn push<T>(&self, add: impl FnOnce(&mut Waiting) -> Result<T, DropReason>) -> Result<T, DropReason> {
        let mut waiting = self.waiting.lock();
        let was_empty = waiting.is_empty();
        let added = add(&mut waiting)?;
        drop(waiting);
        // Only the first one wakes: the taker clears before it takes, so nothing is left behind.
        if was_empty {
            self.wake.set();
        }
        Ok(added)
    }
}

impl AsFd for Backlog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod test {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    #[test]
    fn each_kind_has_its_own_bound() {
        let backlog = Backlog::new().expect("descriptors");
        let from = "10.0.0.2:1".parse().expect("literal");
        let refused = (0..PACKETS_MAX + 10).filter(|_| backlog.datagram(None, from, &[1]).is_err()).count();
        assert_eq!(refused, 10);
        let missed = |len| Missed { vnet: Vnet::default(), packet: vec![0; len], of_peer: None };
        assert_eq!(backlog.packet(missed(1)), Ok(1));
        let refused = (0..300).filter(|_| backlog.packet(missed(65_000)).is_err()).count();
        assert_eq!(refused, 300 - (BYTES_MAX - 1) / 65_000);
        let waiting = backlog.take();
        assert_eq!(waiting.datagrams.len(), PACKETS_MAX);
        assert!(backlog.take().is_empty() && !backlog.is_idle(), "it has not been worked off");
        assert_eq!((backlog.packets_done(), backlog.datagrams_done()), (0, 0));
        let packets = 1 + (BYTES_MAX as u64 - 1) / 65_000;
        assert_eq!((waiting.packet_place, waiting.datagram_place), (packets, PACKETS_MAX as u64));
        backlog.done(waiting.packet_place, waiting.datagram_place);
        assert_eq!((backlog.packets_done(), backlog.datagrams_done()), (packets, PACKETS_MAX as u64));
        assert!(backlog.is_idle());
        assert_eq!(backlog.packet(missed(1)), Ok(packets + 1), "taking makes room");
        assert!(!backlog.is_idle());
    }

    #[test]
    fn who_awaits_packets_is_woken_once_when_they_have_been_worked_off() {
        let backlog = Backlog::new().expect("descriptors");
        let is_woken = || {
            let mut reached = [PollFd::new(backlog.reached(), PollFlags::POLLIN)];
            poll(&mut reached, PollTimeout::ZERO) != Ok(0)
        };
        let missed = || Missed { vnet: Vnet::default(), packet: vec![0], of_peer: None };
        assert!(backlog.await_packets() && !is_woken(), "there are none");
        backlog.packet(missed()).expect("room");
        backlog.packet(missed()).expect("room");
        assert!(!backlog.await_packets());
        backlog.done(1, 0);
        assert!(!is_woken() && !backlog.await_packets());
        backlog.done(2, 0);
        assert!(is_woken());
        assert!(backlog.await_packets() && !is_woken());
        backlog.packet(missed()).expect("room");
        backlog.done(3, 0);
        assert!(!is_woken(), "nobody awaits that one");
    }

    #[test]
    fn the_first_wakes() {
        let backlog = Backlog::new().expect("descriptors");
        let passed = Passed { flow: FlowId(1), direction: Direction::Egress, flags: 1 };
        backlog.notice(Notice::Passed(passed)).expect("room");
        assert_eq!(crate::wait::readable([backlog.as_fd()]).expect("poll"), [true]);
        backlog.notice(Notice::Beside(FlowId(1))).expect("room");
        backlog.notice(Notice::Beside(FlowId(1))).expect("room");
        assert_eq!(backlog.take().notices, [Notice::Passed(passed), Notice::Beside(FlowId(1))]);
    }
}
