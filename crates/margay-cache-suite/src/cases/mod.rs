//! The cases, and what they are made of.

mod direct;
mod endings;
mod entries;
mod paths;
mod silence;
mod stacks;
mod stalls;
mod ways;

use std::net::SocketAddr;

use margay_core::fair_table::Peer;
use margay_core::{Directions, Entry, EntryUpdate, Passage, Path, PathId, RemoveReason, Stack, Stacks, Tuple, Wire};
use margay_wire::{FlowId, PORT};

use crate::packet::{ACK, Numbers, TCP, UDP};
use crate::run::peer_flow_of;
use crate::step::{
    Case, DIRECT_LOCAL_PORT, DIRECT_REMOTE_PORT, Expected, LOCAL, Need, PEER, Seen, Step, Why, application,
};

/// Every case.
pub fn cases() -> Vec<Case> {
    let inside = [entries::cases(), ways::cases(), endings::cases(), silence::cases(), paths::cases(), stacks::cases()];
    [inside.concat(), direct::cases(), stalls::cases()].concat()
}

/// The flow of most cases.
const FLOW: FlowId = FlowId(7);
/// Another one.
const OTHER: FlowId = FlowId(8);
/// The record of all flows with the peer.
const PATH: PathId = PathId(1);
/// Ports of programs.
const PORT_A: u16 = 40_000;
const PORT_B: u16 = 40_001;
/// What the program says next, and what it expects.
const OWN: u32 = 0xffff_fff0;
const PEERS: u32 = 5000;

fn case(name: &'static str, needs: &[Need], steps: Vec<Step>) -> Case {
    Case { name, needs: needs.to_vec(), steps }
}

/// Where the peer is by UDP.
fn peer() -> SocketAddr {
    SocketAddr::new(PEER, PORT)
}

fn path() -> Path {
    Path {
        id: PATH,
        remote: peer(),
        local: Some(LOCAL),
        datagram_max: 1472,
        passage: Passage::Open,
        wired: true,
        expected: None,
        watched: false,
        peer: Peer::Own,
    }
}

/// A flow of a connection that goes direct both ways, where the cache has a direct path.
fn entry(flow: FlowId, generation: u32) -> Entry {
    Entry {
        flow,
        generation,
        app: tcp(PORT_A),
        peer_flow: peer_flow_of(flow),
        path: PATH,
        wire: Some(wire(flow)),
        seal: None,
        stacks: Stacks::only(Stack::Plain),
        stripe: None,
        is_held: false,
        at_middlebox: false,
        is_of_named_socket: false,
        directions: Directions::Both,
        delta: None,
    }
}

/// The same without a direct path.
fn encapsulated(flow: FlowId, generation: u32) -> Entry {
    Entry { wire: None, ..entry(flow, generation) }
}

const fn wire(flow: FlowId) -> Wire {
    let number = flow.0 as u16;
    Wire {
        path: PATH,
        local_port: DIRECT_LOCAL_PORT + number,
        remote_port: DIRECT_REMOTE_PORT + number,
        sending: true,
        accepting: true,
        begun: true,
    }
}

const fn tcp(port: u16) -> Tuple {
    application(TCP, port)
}

const fn udp(port: u16) -> Tuple {
    application(UDP, port)
}

const fn installs(entry: Entry) -> Step {
    Step::Told(EntryUpdate::Install(entry))
}

const fn on_path(path: Path) -> Step {
    Step::Told(EntryUpdate::Path(path))
}

const fn removes(flow: FlowId) -> Step {
    Step::Told(EntryUpdate::Remove { flow, reason: RemoveReason::Closed })
}

const fn suspends(flow: FlowId) -> Step {
    Step::Told(EntryUpdate::Suspend(flow))
}

/// A path, and a flow on it.
fn begun(entry: Entry) -> Vec<Step> {
    vec![on_path(path()), installs(entry)]
}

/// The same, and more.
fn after(entry: Entry, steps: Vec<Step>) -> Vec<Step> {
    [begun(entry), steps].concat()
}

/// A segment of the program, by how far its numbers are from the first ones.
const fn own(flags: u8, said: u32, heard: u32, len: usize) -> Numbers {
    Numbers { sequence: OWN.wrapping_add(said), acknowledgement: PEERS.wrapping_add(heard), flags, len }
}

/// A segment of the peer's, the same way.
const fn peers(flags: u8, said: u32, heard: u32, len: usize) -> Numbers {
    Numbers { sequence: PEERS.wrapping_add(said), acknowledgement: OWN.wrapping_add(heard), flags, len }
}

/// A datagram.
const fn datagram(len: usize) -> Numbers {
    Numbers { sequence: 0, acknowledgement: 0, flags: 0, len }
}

/// The program says this, and it is carried as it is.
const fn says(flow: FlowId, numbers: Numbers) -> Step {
    Step::Sends(tcp(PORT_A), numbers, Expected::Carried(flow, numbers))
}

/// The program says something, which misses.
const fn misses(port: u16) -> Step {
    Step::Sends(tcp(port), own(ACK, 0, 0, 1), Expected::Exactly(Seen::Missed))
}

/// The peer says this, and the program is given it as it is.
const fn hears(flow: FlowId, numbers: Numbers) -> Step {
    Step::Hears(flow, tcp(PORT_A), numbers, Expected::Given(PORT_A, numbers))
}

/// The peer says something, which becomes this.
const fn hears_as(flow: FlowId, numbers: Numbers, seen: Seen) -> Step {
    Step::Hears(flow, tcp(PORT_A), numbers, Expected::Exactly(seen))
}

const fn dropped(why: Why) -> Expected {
    Expected::Exactly(Seen::Dropped(why))
}

/// Where something goes inside DATA, neither sealed nor beside what is direct.
fn inside(flow: FlowId, numbers: Numbers) -> Expected {
    Expected::Encapsulated { flow, to: peer(), is_beside: false, is_sealed: false, numbers }
}
