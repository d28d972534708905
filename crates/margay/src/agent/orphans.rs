//! What an agent that was killed leaves behind of connections, found by its next start.
//!
//! Flows that were taken up from the start before, and whose programs have no socket any more: their end passed while
//! there was no agent, or was lost with one that died in the milliseconds before it could write that down. And the
//! other way round, programs' connections that no flow is of: the agent died in the milliseconds before it could write
//! the flow down. Nothing else would end either for two hours.

use std::collections::HashSet;
use std::hash::Hash;
use std::net::SocketAddr;

use margay_core::event::FlowInfo;
use margay_core::{Lifecycle, Ranges, Tuple};
use margay_datapath::socket_table::{Socket, Table};
use margay_wire::FlowId;

use super::Agent;

/// Rounds of the agent's upkeep after its start at which it looks. Whatever is alone at both is alone: a connection
/// that is being set up has socket and flow by then, and a socket is not opened again.
const FIRST_ROUND: u64 = 8;
const SECOND_ROUND: u64 = 16;
const TCP: u8 = 6;

/// What the first look has found.
#[derive(Default)]
pub struct Orphans {
    /// Flows of a start before were taken up: without these nobody has left anything, and a long list of sockets need
    /// not be read.
    has_heritage: bool,
    flows: HashSet<FlowId>,
    /// Of sockets, as their packets have them.
    connections: HashSet<Tuple>,
}

impl Orphans {
    /// To be made when the agent starts.
    pub fn new(agent: &Agent) -> Self {
        let has_heritage = agent.core.0.with_sal(|sal, _| sal.flows().next().is_some());
        Self { has_heritage, ..Self::default() }
    }

    /// Looks when it is time to.
    pub fn look(&mut self, agent: &Agent, round: u64) {
        if !self.has_heritage || round != FIRST_ROUND && round != SECOND_ROUND {
            return;
        }
        let ranges = agent.config().ranges();
        // Kernels open flows by themselves.
        agent.core.0.hear_of_flows();
        let listed = || [Table::Tcp, Table::Tcp6].into_iter().flat_map(Table::sockets);
        // A socket is there before its flow and after it: without a flow is one that had none since it was listed.
        let sockets: Vec<Socket> = listed().filter(|socket| may_need_flow(socket, ranges)).collect();
        let flows: Vec<FlowInfo> = agent.core.0.with_sal(|sal, _| sal.flows().collect());
        let judged: Vec<(FlowId, Tuple)> =
            flows.iter().filter(|flow| may_be_judged(flow, ranges)).map(|flow| (flow.flow, flow.app)).collect();
        let found = Self {
            has_heritage: true,
            flows: if judged.is_empty() { HashSet::new() } else { without_socket(&judged, listed()) },
            connections: without_flow(&sockets, flows.iter().map(|flow| flow.app)),
        };
        if round == FIRST_ROUND {
            *self = found;
            return;
        }
        let first = std::mem::take(self);
        let flows = in_both(&found.flows, &first.flows);
        if !flows.is_empty() {
            tracing::info!(flows = flows.len(), "flows whose programs have no socket any more are ended");
            agent.core.0.with_sal(|sal, now| sal.end_without_socket(now, &flows));
        }
        let connections = in_both(&found.connections, &first.connections);
        if !connections.is_empty() {
            tracing::info!(
                connections = connections.len(),
                "connections of programs that no flow is of any more are reset"
            );
            agent.core.0.with_sal(|sal, now| sal.end_without_flow(now, &connections));
        }
    }
}

fn in_both<T: Eq + Hash + Copy>(one: &HashSet<T>, other: &HashSet<T>) -> Vec<T> {
    one.intersection(other).copied().collect()
}

/// Whether a connection can go nowhere but by a flow, and nothing of its own would end it without one. Connections of
/// a host with itself pass no flow.
fn may_need_flow(socket: &Socket, ranges: Ranges) -> bool {
    let Tuple { source, destination, .. } = tuple(socket);
    matches!(socket.state, Socket::ESTABLISHED | Socket::CLOSE_WAIT)
        && ranges.is_host(source.ip())
        && !ranges.is_host(destination.ip())
}

/// Those of the connections that no flow is of.
fn without_flow(sockets: &[Socket], flows: impl Iterator<Item = Tuple>) -> HashSet<Tuple> {
    let has: HashSet<Tuple> = flows.collect();
    sockets.iter().map(tuple).filter(|app| !has.contains(app)).collect()
}

/// Whether its socket would be in this network namespace: a program elsewhere has an address of its own.
fn may_be_judged(flow: &FlowInfo, ranges: Ranges) -> bool {
    flow.app.protocol == TCP
        && matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed)
        && ranges.is_host(flow.app.source.ip())
}

/// Those of the flows that no socket is of.
fn without_socket(flows: &[(FlowId, Tuple)], sockets: impl Iterator<Item = Socket>) -> HashSet<FlowId> {
    // In TIME_WAIT both ends have closed.
    let has = sockets.filter(|socket| socket.state != Socket::TIME_WAIT).map(|socket| tuple(&socket));
    let has: HashSet<Tuple> = has.collect();
    flows.iter().filter(|(_, app)| !has.contains(app)).map(|(flow, _)| *flow).collect()
}

/// As the socket's packets carry it. A socket of IPv6 may have peers of IPv4.
pub(super) fn tuple(socket: &Socket) -> Tuple {
    let plain = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    Tuple { protocol: TCP, source: plain(socket.local), destination: plain(socket.remote) }
}

#[cfg(test)]
mod test {
    use super::*;

    const ESTABLISHED: u8 = 1;
    const FIN_WAIT2: u8 = 5;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("literal")
    }

    #[test]
    fn a_flow_has_a_socket_in_whichever_family_unless_both_ends_have_closed() {
        let flow = |number: u32, source: &str, destination: &str| {
            (FlowId(number), Tuple { protocol: TCP, source: address(source), destination: address(destination) })
        };
        let flows = [
            flow(1, "198.18.0.1:80", "10.1.0.2:1025"),
            flow(2, "198.18.0.1:80", "10.1.0.2:1026"),
            flow(3, "198.18.0.1:80", "10.1.0.2:1027"),
            flow(4, "198.18.0.1:80", "10.1.0.2:1028"),
            flow(5, "[fd5a:4c00::1]:40001", "[fd5a:4c00:1:2:3::7]:81"),
        ];
        let socket = |local: &str, remote: &str, state: u8| {
            let (local, remote) = (address(local), address(remote));
            Socket { local, remote, state, queued_bytes: 0, inode: 0 }
        };
        let sockets = [
            socket("198.18.0.1:80", "10.1.0.2:1025", ESTABLISHED),
            socket("[::ffff:198.18.0.1]:80", "[::ffff:10.1.0.2]:1026", FIN_WAIT2),
            socket("198.18.0.1:80", "10.1.0.2:1027", Socket::TIME_WAIT),
            socket("0.0.0.0:80", "0.0.0.0:0", Socket::LISTEN),
            socket("[fd5a:4c00::1]:40001", "[fd5a:4c00:1:2:3::7]:81", ESTABLISHED),
        ];
        let without = without_socket(&flows, sockets.into_iter());
        assert_eq!(without, HashSet::from([FlowId(3), FlowId(4)]));
    }

    #[test]
    fn a_connection_to_another_host_needs_a_flow_until_this_end_has_closed() {
        let ranges = Ranges::default();
        let host = SocketAddr::new(ranges.host_v4().into(), 80);
        let socket = |local: SocketAddr, remote: &str, state: u8| Socket {
            local,
            remote: address(remote),
            state,
            inode: 0,
            queued_bytes: 0,
        };
        let served = socket(host, "10.1.0.2:1025", ESTABLISHED);
        let needs = |socket: &Socket| may_need_flow(socket, ranges);
        assert!(needs(&served) && needs(&Socket { state: Socket::CLOSE_WAIT, ..served }));
        for state in [FIN_WAIT2, Socket::TIME_WAIT, Socket::LISTEN] {
            assert!(!needs(&Socket { state, ..served }), "it ends by itself: {state}");
        }
        assert!(!needs(&socket(address("10.1.0.1:80"), "10.1.0.2:1025", ESTABLISHED)), "it is plain");
        assert!(!needs(&Socket { remote: host, ..served }), "it passes no flow");
        let other = socket(host, "10.1.0.2:1026", ESTABLISHED);
        let alone = without_flow(&[served, other], std::iter::once(tuple(&served)));
        assert_eq!(alone, HashSet::from([tuple(&other)]));
    }
}
