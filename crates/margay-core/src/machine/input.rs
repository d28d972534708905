//! What the flow cache, the network and the clock tell the core, beside packets that nobody else knew what to do with.

use core::net::IpAddr;
use core::time::Duration;

use margay_wire::{ArrivalsRepr, FlowId};

use crate::cache::entry::{PathId, Survey};
use crate::leg::carriage::DirectEvent;
use crate::leg::loss::FlowCount;
use crate::machine::sal::Sal;
use crate::types::direction::Direction;
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// Something that has happened.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// The instant that [`Sal::poll_timeout`] gave has come.
    Timeout,
    /// The flow carried data since it was last asked about.
    Activity(FlowId),
    /// The flow cache carried a segment with FIN or RST set.
    Transport {
        /// The number that this host has given it.
        flow: FlowId,
        /// From the application, or to it.
        direction: Direction,
        /// The TCP flags byte.
        flags: u8,
    },
    /// The flow cache's answer to [`Output::Ending`](crate::Output::Ending).
    Ending {
        /// The number that this host has given it.
        flow: FlowId,
        /// Each end has acknowledged all of the other's.
        is_over: bool,
    },
    /// The flow cache saw something of a flow's direct path.
    Direct {
        /// The number that this host has given it.
        flow: FlowId,
        /// What it saw.
        event: DirectEvent,
    },
    /// A direct packet came by a path that is watched.
    PathDirect(PathId),
    /// Nothing has come by the path of a flow that goes encapsulated for longer than its traffic allows, or no answer
    /// to the flow itself.
    Silence {
        /// The number that this host has given it.
        flow: FlowId,
        /// For how long the flow's own data has been waiting for an answer; zero for datagrams, which nobody need
        /// answer.
        unanswered: Duration,
    },
    /// Data of a flow that went encapsulated and unanswered for long has been answered.
    Answer(FlowId),
    /// The network has said that an address, or its network, cannot be reached. Anybody can say so.
    Unreachable(IpAddr),
    /// The flow cache cannot open what came for a sealed flow.
    StrangeSeal(FlowId),
    /// DATA has come of a stack that this end does not take.
    StrangeStack(FlowId),
    /// The flow cache has come to the peer's FENCE of a change of stacks; or to what can only follow it, where the peer
    /// has said that it turns.
    Turned {
        /// The number that this host has given it.
        flow: FlowId,
        /// Number of the change.
        change: u32,
    },
    /// A packet of the peer's has come by a flow whose packets the core divides between two ways
    /// ([`Directions::gives_up`](crate::Directions::gives_up)).
    Parted {
        /// The number that this host has given it.
        flow: FlowId,
        /// The packet, with the addresses of the application's connection and complete checksums.
        packet: &'a [u8],
    },
    /// What the flow cache has counted of a flow by now, as it was asked.
    Counted {
        /// The number that this host has given it.
        flow: FlowId,
        /// The counts.
        count: &'a FlowCount,
    },
    /// Trains of a striped flow have arrived.
    Arrivals {
        /// The number that this host has given it.
        flow: FlowId,
        /// The place where the last one came; none: it is not known.
        place: Option<usize>,
        /// What has come by each place.
        arrivals: &'a ArrivalsRepr,
    },
    /// The kernel's cache has opened a flow by a grant, and both ends have had a packet of it.
    Opened {
        /// The number that this host has given it.
        flow: FlowId,
        /// The five-tuple of the program here, as its packets leave `sal0`.
        app: &'a Tuple,
    },
    /// Flows of a grant have been opened.
    Taken {
        /// The number that this host has given the grant.
        grant: FlowId,
        /// How many there are by now.
        taken: u16,
    },
    /// The kernel's answer to [`Output::Survey`](crate::Output::Survey).
    Survey {
        /// The number that this host has given the grant.
        grant: FlowId,
        /// What has become of its flows.
        survey: Survey,
    },
}

impl Sal {
    /// Something has happened at `now`.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        self.now = now;
        match input {
            Input::Timeout => self.handle_timeout(now),
            Input::Activity(flow) => self.handle_activity(now, flow),
            Input::Transport { flow, direction, flags } => self.transport_event(now, flow, direction, flags),
            Input::Ending { flow, is_over } => self.handle_ending(flow, is_over),
            Input::Direct { flow, event } => self.handle_direct(now, flow, event),
            Input::PathDirect(path) => self.handle_path_direct(path),
            Input::Silence { flow, unanswered } => self.handle_silence(now, flow, unanswered),
            Input::Answer(flow) => self.locations.handle_answer(&self.flows, &self.associations, flow),
            Input::Unreachable(remote) => self.handle_unreachable(now, remote),
            Input::StrangeSeal(flow) => self.handle_strange_seal(now, flow),
            Input::StrangeStack(flow) => self.handle_strange_stack(now, flow),
            Input::Turned { flow, change } => self.handle_turned(now, flow, change),
            Input::Parted { flow, packet } => self.handle_parted(now, flow, packet),
            Input::Counted { flow, count } => self.handle_counted(flow, count),
            Input::Arrivals { flow, place, arrivals } => self.handle_arrivals(flow, place, arrivals),
            Input::Opened { flow, app } => self.handle_opened(now, flow, app),
            Input::Taken { grant, taken } => self.handle_taken(now, grant, taken),
            Input::Survey { grant, survey } => self.handle_survey(now, grant, survey),
        }
    }
}
