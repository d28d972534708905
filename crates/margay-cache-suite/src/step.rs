//! What a case consists of.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use margay_core::{Cipher, Direction, EntryUpdate, SealKeys, Tuple};
use margay_wire::{FlowId, epochs};

use crate::packet::Numbers;

/// This host's address.
pub const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
/// Another one of this host's addresses, of a place of striped flows.
pub const OTHER_LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 1, 0, 1));
/// The peer's address.
pub const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
/// This end's flow port of flow 0; rises with flows.
pub const DIRECT_LOCAL_PORT: u16 = 61_000;
/// The peer's flow port of flow 0; rises with flows.
pub const DIRECT_REMOTE_PORT: u16 = 62_000;

/// The five-tuple of a program here, by its port.
pub const fn application(protocol: u8, port: u16) -> Tuple {
    let source = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 18, 0, 1)), port);
    let destination = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 18, 0, 9)), 80);
    Tuple { protocol, source, destination }
}

/// The keys of this end of a sealed flow.
pub fn seal_keys() -> SealKeys {
    let cipher = Cipher::ChaCha20Poly1305;
    SealKeys { cipher, send: [0x11; 32], open: [0x22; 32], send_epochs: epochs(5, 9), open_epochs: epochs(9, 5) }
}

/// Those of the other end.
pub fn peer_keys() -> SealKeys {
    let SealKeys { cipher, send, open, send_epochs, open_epochs } = seal_keys();
    SealKeys { cipher, send: open, open: send, send_epochs: open_epochs, open_epochs: send_epochs }
}

/// What a cache must be able to show for a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// Packets inside DATA.
    Encapsulation,
    /// Packets on the hosts' own addresses and flow ports.
    Direct,
    /// Both of one flow: what the one has seen counts for the other.
    Both,
    /// What the kernel leaves is seen to be left, and not what the agent makes of it.
    KernelAlone,
}

/// DATA of the peer's, but for the packet in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Who sent it.
    pub from: SocketAddr,
    /// By which of this host's addresses it came; `None` where that is not known.
    pub at: Option<IpAddr>,
    /// This host's number of the flow.
    pub flow: FlowId,
    /// Packet number.
    pub number: u32,
    /// BESIDE and the like.
    pub flags: u8,
    /// Under which keys it is sealed, if it is.
    pub seal: Option<SealKeys>,
    /// Nothing is in it: a mark.
    pub is_mark: bool,
}

/// Why a packet is neither carried nor anybody's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It comes from where its flow's peer is not.
    WrongPath,
    /// It is of another stack than its flow.
    OtherStack,
    /// It cannot be opened: other keys, or changed.
    Strange,
    /// It was opened before.
    Replayed,
    /// A reset, by a path of which nothing has come yet.
    HeldReset,
}

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The kernel sent it, as it stands on the wire.
    Direct {
        /// The hosts' addresses and flow ports.
        wire: Tuple,
        /// On the wire.
        numbers: Numbers,
    },
    /// It went inside DATA.
    Encapsulated {
        /// The UDP address of the peer's agent.
        to: SocketAddr,
        /// The peer's number of the flow.
        peer_flow: FlowId,
        /// Packet number of the DATA.
        packet_number: u32,
        /// It is said that the flow goes direct otherwise.
        is_beside: bool,
        /// It is sealed.
        is_sealed: bool,
        /// Of the packet inside.
        numbers: Numbers,
    },
    /// It was taken, and has nowhere to go.
    Nowhere,
    /// The program was given it.
    Given {
        /// The five-tuple that it was given with.
        tuple: Tuple,
        /// As the program's TCP is shown them.
        numbers: Numbers,
    },
    /// It misses the cache.
    Missed,
    /// It is a flow's of which the core decides packet by packet, opened and with the program's addresses and numbers.
    GivenUp {
        /// This host's number of the flow.
        flow: FlowId,
        /// As the program's TCP would be shown them.
        numbers: Numbers,
    },
    /// A mark, which carries no packet.
    Marked,
    /// It is nobody's.
    Dropped(Why),
    /// It is none of Margay's: the host's own TCP has it.
    OfHost,
}

/// What must be seen. What is not said does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// On its way to the peer by this flow, direct or encapsulated; the numbers are those of the wire.
    Carried(FlowId, Numbers),
    /// Encapsulated.
    Encapsulated {
        /// By which flow.
        flow: FlowId,
        /// The UDP address of the peer's agent.
        to: SocketAddr,
        /// See [`Seen::Encapsulated`].
        is_beside: bool,
        /// See [`Seen::Encapsulated`].
        is_sealed: bool,
        /// Of the packet inside.
        numbers: Numbers,
    },
    /// The program of this port was given it.
    Given(u16, Numbers),
    /// Exactly this.
    Exactly(Seen),
}

/// What the core hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// FIN or RST counts: of the application at once, of the peer when the application's TCP takes it (RFC 5961).
    Ended(FlowId, Direction, u8),
    /// Data of the connection goes unanswered for too long.
    Silence(FlowId),
    /// Something should have come by the path by now, and the connection is not at fault.
    PathSilence(FlowId),
    /// It is answered again.
    Answer(FlowId),
    /// The peer sends direct from here on.
    PeerDirect(FlowId),
    /// It encapsulates again.
    PeerBack(FlowId),
    /// Direct packets go unanswered.
    Stalled(FlowId),
    /// Direct datagrams come, and none goes.
    OneWay(FlowId),
    /// Something of another stack has come.
    StrangeStack(FlowId),
    /// Something has come that cannot be opened.
    StrangeSeal(FlowId),
}

/// One step of a case.
#[derive(Clone, Debug)]
pub enum Step {
    /// The cache is told something.
    Told(EntryUpdate),
    /// A program sends a packet.
    Sends(Tuple, Numbers, Expected),
    /// The core has a packet carried by a flow.
    Carries(FlowId, Tuple, Numbers, Expected),
    /// The core has carried what it made of a packet of a program, which counts as shown by this flow.
    Parted(FlowId, Tuple, Numbers),
    /// A packet of the peer's comes, direct where the cache can be shown that, and otherwise inside DATA.
    Hears(FlowId, Tuple, Numbers, Expected),
    /// DATA comes.
    Comes(Arrival, Tuple, Numbers, Expected),
    /// A direct packet comes, with these addresses and ports.
    Arrives(Tuple, Numbers, Expected),
    /// Time passes.
    Passes(Duration),
    /// The cache forgets all entries.
    Forgets,
    /// These and no others since the last such step.
    Tells(Vec<Notice>),
    /// Whether each end of the connection has closed and has acknowledged all of the other's.
    IsOver(FlowId, bool),
    /// The numbers of a pinhole, next sequence number and acknowledgement on the wire, if it is time for one; of
    /// datagrams zeros.
    Pinhole(FlowId, Option<(u32, u32)>),
}

/// A list of steps.
#[derive(Clone, Debug)]
pub struct Case {
    /// What it shows.
    pub name: &'static str,
    /// What a cache must be able to show.
    pub needs: Vec<Need>,
    /// In their order.
    pub steps: Vec<Step>,
}
