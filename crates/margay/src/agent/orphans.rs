//! Flows that were taken up from the start before, and whose programs have no socket any more. Their end passed while
//! there was no agent, or was lost with one that died in the milliseconds before it could write that down: nothing
//! else would end them for two hours.

use std::collections::HashSet;
use std::net::SocketAddr;

use margay_core::event::FlowInfo;
use margay_core::{Lifecycle, Ranges, Tuple};
use margay_datapath::socket_table::{Socket, Table};
use margay_wire::FlowId;

use super::Agent;

/// Rounds of the agent's upkeep after its start at which it looks. Whatever has no socket at both has none: one that
/// is being set up has one by then, and a socket is not opened again.
const FIRST_ROUND: u64 = 8;
const SECOND_ROUND: u64 = 16;
const TCP: u8 = 6;

/// What the first look has found.
#[derive(Default)]
pub struct Orphans(HashSet<FlowId>);

impl Orphans {
    /// Looks when it is time to.
    pub fn look(&mut self, agent: &Agent, round: u64) {
        if round != FIRST_ROUND && round != SECOND_ROUND {
            return;
        }
        let ranges = agent.config().ranges();
        // The flows first: a socket is there before its flow.
        let flows: Vec<(FlowId, Tuple)> = agent.core.0.with_sal(|sal, _| {
            let judged = sal.flows().filter(|flow| may_be_judged(flow, ranges));
            judged.map(|flow| (flow.flow, flow.app)).collect()
        });
        if flows.is_empty() {
            return;
        }
        let sockets = [Table::Tcp, Table::Tcp6].into_iter().flat_map(Table::sockets);
        let found = without_socket(&flows, sockets);
        if round == FIRST_ROUND {
            self.0 = found;
            return;
        }
        let gone: Vec<FlowId> = found.intersection(&std::mem::take(&mut self.0)).copied().collect();
        if !gone.is_empty() {
            tracing::info!(flows = gone.len(), "flows whose programs have no socket any more are ended");
            agent.core.0.with_sal(|sal, now| sal.end_without_socket(now, &gone));
        }
    }
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
}
