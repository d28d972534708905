//! Independent checkers: what must hold of a run, judged from the programs and the tables alone.

use std::collections::HashMap;
use std::time::Duration;

use margay_core::Lifecycle;

use crate::program::Outcome;
use crate::world::World;

/// Nothing hangs: every client ended, and none later than `bound`.
///
/// # Errors
///
/// Names the first that did not.
pub fn all_ended_within(world: &World, bound: Duration) -> Result<(), String> {
    for (host, machine) in world.hosts.iter().enumerate() {
        for (client, program) in machine.clients.iter().enumerate() {
            match program.took() {
                None => return Err(format!("client {client} of host {host} never ended")),
                Some(took) if took > bound => {
                    return Err(format!("client {client} of host {host} took {took:?}: {:?}", program.outcome));
                }
                Some(_) => {}
            }
        }
    }
    Ok(())
}

/// Both ends of every flow agree: same session, same service, each names the other's number. A session has one flow,
/// unless it goes through boxes.
///
/// # Errors
///
/// Names the first disagreement.
pub fn ends_agree(world: &World) -> Result<(), String> {
    let mut ends = HashMap::new();
    let mut of_session = HashMap::new();
    for (host, machine) in world.hosts.iter().enumerate() {
        for flow in machine.sal.flows().filter(|flow| flow.lifecycle == Lifecycle::Established) {
            let is_plain = flow.chain.is_none();
            if is_plain && let Some(other) = of_session.insert((flow.session, flow.role), host) {
                return Err(format!("session {:?} has two {:?}s: hosts {other} and {host}", flow.session, flow.role));
            }
            ends.insert((flow.session, flow.role, flow.flow), (host, flow));
        }
    }
    for ((session, role, _), (host, flow)) in &ends {
        let other = match role {
            margay_core::Role::Initiator => margay_core::Role::Responder,
            margay_core::Role::Responder => margay_core::Role::Initiator,
        };
        let named = ends.get(&(*session, other, flow.peer_flow));
        let is_single = flow.chain.is_none();
        let theirs = || ends.iter().find(|((of, role, _), _)| of == session && *role == other).map(|(_, end)| end);
        let Some((peer_host, peer)) = named.or_else(|| theirs().filter(|_| is_single)) else { continue };
        if peer.peer_flow != flow.flow || flow.peer_flow != peer.flow || peer.service != flow.service {
            return Err(format!("hosts {host} and {peer_host} disagree on session {session:?}"));
        }
    }
    Ok(())
}

/// Every path record is of an association or of flows beside it, and direct flows with a host name one that stands
/// where the host is: a packet's pair of addresses can lead to one record only.
///
/// # Errors
///
/// Names the first record that is too many, or that flows should not name.
pub fn paths_agree(world: &World) -> Result<(), String> {
    for (host, machine) in world.hosts.iter().enumerate() {
        let beside = machine.sal.flows().filter(|flow| flow.is_aside).count();
        let kept = machine.cache.paths().filter(|path| !path.remote.ip().is_loopback()).count();
        let known = machine.sal.associations().count();
        if kept > known + beside {
            return Err(format!("the cache of host {host} keeps {kept} paths of {known} associations"));
        }
        let mut owners = HashMap::new();
        for named in machine.cache.wire_paths() {
            let Some(path) = machine.cache.paths().find(|path| path.id == named) else {
                return Err(format!("direct flows of host {host} name {named:?}, which its cache does not have"));
            };
            let owner = *owners.entry((path.local, path.remote)).or_insert(named);
            if owner != named {
                return Err(format!(
                    "direct flows of host {host} name {owner:?} and {named:?}, both at {}",
                    path.remote
                ));
            }
        }
    }
    Ok(())
}

/// After quiet nothing is left of what was never proved, and the caches hold no more than the tables.
///
/// # Errors
///
/// Names the first leak.
pub fn nothing_left_over(world: &World) -> Result<(), String> {
    for (host, machine) in world.hosts.iter().enumerate() {
        if machine.sal.half_open_count() != 0 {
            return Err(format!("host {host} keeps {} half-open flows", machine.sal.half_open_count()));
        }
        let connecting = machine.sal.flows().filter(|flow| flow.lifecycle == Lifecycle::Connecting).count();
        if connecting != 0 {
            return Err(format!("host {host} keeps {connecting} connecting flows"));
        }
        if machine.cache.len() > machine.sal.flow_count() {
            return Err(format!("the cache of host {host} holds more flows than its table"));
        }
    }
    Ok(())
}

/// The first packet that a program's TCP has after the SYN comes from whoever gave it that: where an agent does, and
/// the kernel's cache gives it another one in the same moment, Linux may find neither the request nor the socket that
/// becomes of it, and resets the connection.
///
/// # Errors
///
/// Names the first host whose cache has done so.
pub fn no_request_met(world: &World) -> Result<(), String> {
    for (host, machine) in world.hosts.iter().enumerate() {
        if let Some(met) = machine.cache.kernel.as_ref().map(|kernel| kernel.requests_met).filter(|met| *met != 0) {
            return Err(format!("the kernel of host {host} gave {met} packets to requests"));
        }
    }
    Ok(())
}

/// How many clients ended each way.
pub fn tally(world: &World) -> HashMap<Outcome, usize> {
    let mut tally = HashMap::new();
    for client in world.hosts.iter().flat_map(|host| &host.clients) {
        *tally.entry(client.outcome).or_insert(0) += 1;
    }
    tally
}
