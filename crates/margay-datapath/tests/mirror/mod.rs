//! A core that needs no signalling: both hosts give a flow the number of its client's port, so each can install what it
//! sees. It exercises the datapath's contract with the core, with misses, held packets and notices.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use margay_core::fair_table::Peer;
use margay_core::{
    AppVerdict, Direction, Directions, DropReason, Entry, EntryUpdate, Event, Grant, Input, Instant, Output, Passage,
    Path, PathId, RemoveReason, Role, Stack, Stacks, Tuple, Wire,
};
use margay_datapath::Core;
use margay_datapath::packet::{Packet, parse};
use margay_wire::{DATA_HEADER_LEN, DataRepr, FlowId, TRAIN_HEADER_LEN};

/// Ports below this are servers'.
const CLIENTS_FROM: u16 = 10_000;
/// How often the kernel is asked what has become of a grant's flows.
const SURVEYS: Duration = Duration::from_millis(20);

/// What the datapath told the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A segment with FIN, RST or SYN passed.
    Passed(FlowId, Direction, u8),
    /// A datagram that is not DATA.
    Signalling(Vec<u8>),
    /// A flow carried something.
    Active(FlowId),
    /// The kernel has opened a flow of a grant.
    Opened(FlowId, Tuple),
    /// So many flows of a grant are opened.
    Taken(FlowId, u16),
    /// Whether each end of a connection has acknowledged all of the other's.
    Over(FlowId, bool),
    /// A packet of an application was of no use.
    InVain,
    /// The deadline came.
    Timeout,
}

/// See the module.
pub struct Mirror {
    path: Path,
    flows: HashMap<FlowId, Entry>,
    grants: Vec<Grant>,
    outputs: VecDeque<(Output, Vec<u8>)>,
    /// Virtual addresses here, for packets that come from a host with other ones.
    translate: fn(Tuple) -> Tuple,
    heard: Sender<Heard>,
    /// When it wants to be called.
    pub deadline: Option<Instant>,
    /// So many more packets of applications are of no use to it.
    pub deaf_to: u32,
}

impl Mirror {
    /// A core whose one peer is at `remote`. `translate` turns the peer's five-tuple of a flow into that of this host.
    pub fn new(remote: SocketAddr, datagram_max: u16, translate: fn(Tuple) -> Tuple) -> (Self, Receiver<Heard>) {
        let path = Path {
            id: PathId(1),
            remote,
            local: None,
            datagram_max,
            passage: Passage::Open,
            wired: true,
            expected: None,
            watched: false,
            peer: Peer::Own,
        };
        let (heard, receiver) = channel();
        let mut mirror = Self {
            path,
            flows: HashMap::new(),
            grants: Vec::new(),
            outputs: VecDeque::new(),
            translate,
            heard,
            deadline: None,
            deaf_to: 0,
        };
        mirror.update(EntryUpdate::Path(path));
        (mirror, receiver)
    }

    fn update(&mut self, update: EntryUpdate) {
        self.outputs.push_back((Output::Update(update), Vec::new()));
    }

    fn install(&mut self, app: Tuple) -> FlowId {
        let ports = [app.source.port(), app.destination.port()];
        let client = ports.into_iter().find(|&port| port >= CLIENTS_FROM).unwrap_or(ports[0]);
        let flow = FlowId(u32::from(client));
        let new = Entry {
            flow,
            generation: 1,
            app,
            peer_flow: flow,
            path: self.path.id,
            wire: None,
            seal: None,
            stacks: Stacks::only(Stack::Plain),
            stripe: None,
            is_held: false,
            at_middlebox: false,
            is_of_named_socket: false,
            directions: Directions::Both,
            delta: None,
        };
        let entry = *self.flows.entry(flow).or_insert(new);
        self.update(EntryUpdate::Install(entry));
        flow
    }

    /// Lets the kernel open flows, and asks it from time to time what has become of them.
    pub fn grant(&mut self, now: Instant, grant: Grant) {
        self.grants.push(grant);
        self.update(EntryUpdate::Grant(Box::new(grant)));
        self.deadline = Some(now + SURVEYS);
    }

    /// Forgets a flow, which it need not have.
    pub fn remove(&mut self, flow: FlowId) {
        self.flows.remove(&flow);
        self.update(EntryUpdate::Remove { flow, reason: RemoveReason::Closed });
    }

    /// Takes what comes of a session by another flow than the one that its program goes by.
    pub fn take_by(&mut self, flow: FlowId, other: FlowId) {
        self.change(Entry { flow: other, peer_flow: other, directions: Directions::Ingress, ..self.flows[&flow] });
    }

    /// A session's program leaves a flow, of which what still comes is taken, and goes by another one.
    pub fn turn(&mut self, from: FlowId, to: FlowId) {
        let before = self.flows[&from];
        self.change(Entry { generation: before.generation + 1, directions: Directions::Ingress, ..before });
        self.change(Entry { flow: to, peer_flow: to, ..before });
        self.update(EntryUpdate::Succession { from, to });
    }

    /// A flow is encapsulated from here on.
    pub fn encapsulate(&mut self, flow: FlowId) {
        let before = self.flows[&flow];
        self.change(Entry { generation: before.generation + 1, wire: None, ..before });
    }

    fn change(&mut self, entry: Entry) {
        self.flows.insert(entry.flow, entry);
        self.update(EntryUpdate::Install(entry));
    }

    /// Asks whether a connection is over.
    pub fn ask_end(&mut self, flow: FlowId) {
        self.outputs.push_back((Output::Ending(flow), Vec::new()));
    }

    /// Whether it has a flow.
    pub fn knows(&self, flow: FlowId) -> bool {
        self.flows.contains_key(&flow)
    }

    /// Makes a datagram leave as signalling.
    pub fn transmit(&mut self, datagram: &[u8]) {
        let output = Output::Transmit { local: None, to: self.path.remote, len: datagram.len() };
        self.outputs.push_back((output, datagram.to_vec()));
    }

    /// The grant of a flow that is not known, and which of its flows it is.
    fn strange(&self, flow: FlowId) -> Option<(&Grant, u16)> {
        let number = |grant: &Grant| flow.0.checked_sub(grant.first_flow.0).filter(|at| *at < grant.count.into());
        let found = self.grants.iter().find_map(|grant| Some((grant, number(grant)? as u16)));
        found.filter(|_| !self.knows(flow))
    }

    /// The kernel has opened a flow by a grant.
    fn open(&mut self, flow: FlowId, app: Tuple) {
        let Some((grant, at)) = self.strange(flow) else { return };
        let (local, remote) = if grant.role == Role::Initiator { (at, 0) } else { (0, at) };
        let wire = Wire {
            path: self.path.id,
            local_port: grant.local_port + local,
            remote_port: grant.remote_port + remote,
            sending: true,
            accepting: true,
            begun: true,
        };
        let entry = Entry {
            flow,
            generation: 1,
            app,
            peer_flow: flow,
            path: self.path.id,
            wire: Some(wire),
            seal: None,
            stacks: Stacks::only(Stack::Plain),
            stripe: None,
            is_held: false,
            at_middlebox: false,
            is_of_named_socket: false,
            directions: Directions::Both,
            delta: None,
        };
        self.flows.insert(flow, entry);
        self.update(EntryUpdate::Opened(entry));
        self.tell(Heard::Opened(flow, app));
    }

    /// Asks what has become of the flows of all grants, and will again.
    fn survey(&mut self, now: Instant) {
        self.deadline = (!self.grants.is_empty()).then_some(now + SURVEYS);
        for grant in &self.grants {
            self.outputs.push_back((Output::Survey { grant: grant.id, flows: u128::MAX }, Vec::new()));
        }
        self.tell(Heard::Timeout);
    }

    /// Tells the test; it may have stopped listening.
    fn tell(&self, heard: Heard) {
        let _ = self.heard.send(heard);
    }
}

impl Core for Mirror {
    fn untold(&self, datagram: &[u8]) -> Option<(FlowId, u128)> {
        let data = DataRepr::parse(datagram).ok()?;
        self.strange(data.dst_flow).map(|(grant, number)| (grant.id, 1 << number))
    }

    fn handle_app_packet(&mut self, _now: Instant, packet: &[u8]) -> AppVerdict {
        if self.deaf_to > 0 {
            self.deaf_to -= 1;
            self.tell(Heard::InVain);
            return AppVerdict::Consumed;
        }
        match parse(packet, packet.len()) {
            Ok(Packet::Transport(found)) => AppVerdict::Forward(self.install(found.key.tuple())),
            _ => AppVerdict::Drop(DropReason::Protocol),
        }
    }

    fn handle_datagram(&mut self, _now: Instant, _local: Option<IpAddr>, from: SocketAddr, datagram: &[u8]) {
        let Ok(header) = DataRepr::parse(datagram) else {
            self.tell(Heard::Signalling(datagram.to_vec()));
            return;
        };
        let inner = datagram.get(DATA_HEADER_LEN + TRAIN_HEADER_LEN..).unwrap_or(&[]);
        let total = |inner: &[u8]| match inner {
            [first, _, high, low, ..] if first >> 4 == 4 => usize::from(u16::from_be_bytes([*high, *low])),
            [_, _, _, _, high, low, ..] => 40 + usize::from(u16::from_be_bytes([*high, *low])),
            _ => 0,
        };
        if header.index == 0
            && let Ok(Packet::Transport(found)) = parse(inner, total(inner).max(inner.len()))
        {
            self.install((self.translate)(found.key.tuple()).reversed());
        }
        if self.flows.contains_key(&header.dst_flow) {
            self.outputs.push_back((Output::Ingress { from, len: datagram.len() }, datagram.to_vec()));
        }
    }

    fn handle(&mut self, now: Instant, input: Input<'_>) {
        match input {
            Input::Timeout => self.survey(now),
            Input::Activity(flow) => self.tell(Heard::Active(flow)),
            Input::Transport { flow, direction, flags } => self.tell(Heard::Passed(flow, direction, flags)),
            Input::Ending { flow, is_over } => self.tell(Heard::Over(flow, is_over)),
            Input::Opened { flow, app } => self.open(flow, *app),
            Input::Taken { grant, taken } => self.tell(Heard::Taken(grant, taken)),
            Input::Survey { grant, survey } => {
                self.outputs.push_back((Output::Tell { grant, flows: survey.answered }, Vec::new()));
            }
            _ => {}
        }
    }

    fn poll(&mut self, buf: &mut [u8]) -> Option<Output> {
        let (output, bytes) = self.outputs.pop_front()?;
        buf[..bytes.len()].copy_from_slice(&bytes);
        Some(output)
    }

    fn poll_event(&mut self) -> Option<Event> {
        None
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }
}
