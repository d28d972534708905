//! The TCP connections of a name that stand at this host, and which of them could go.

use std::collections::{BTreeMap, HashMap, HashSet};

use margay_core::Tuple;
use margay_core::drain::ServedFlow;
use margay_core::name::Prefix;
use margay_wire::FlowId;

use crate::agent::Agent;
use crate::agent::quiet::{Owner, Sockets};

const TCP: u8 = 6;
/// Reasons that are told; of more, those that come last are put together.
const REASONS_MAX: usize = 8;
const OTHER_REASONS: &str = "other reasons; the log has them";
const NO_GIVER: &str = "no program that gives its connections away has it";
const NO_SOCKET: &str = "its socket is in another network namespace than the agent, or is being closed";

/// How many connections stay, by the reason.
pub(super) type Stays = BTreeMap<String, u64>;

/// The connections, as they were at one moment.
pub(super) struct Own {
    served: Vec<ServedFlow>,
    /// On their way to another host; they may come to stay.
    leaving: HashSet<FlowId>,
}

/// A connection that could go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Movable {
    pub flow: ServedFlow,
    /// The process that is asked for it.
    pub pid: i32,
    queued_bytes: u64,
}

/// What could go, and what stays.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Sorted {
    /// First those on which the fewest bytes are under way.
    pub movable: Vec<Movable>,
    pub stays: Stays,
}

impl Own {
    /// Those that there are now under `prefix`.
    pub fn look(agent: &Agent, prefix: &Prefix) -> Self {
        agent.core.0.hear_of_flows();
        let (mut served, leaving) = agent.core.0.with_sal(|sal, _| (sal.served_flows(prefix), sal.leaving_flows()));
        // A stream by which connections come from another host is no client's.
        served.retain(|served| served.app.protocol == TCP && !agent.connections.relocations.is_stream(&served.app));
        let of_name = leaving.into_iter().filter(|flow| !flow.has_gone && prefix.contains(&flow.service));
        Self { served, leaving: of_name.map(|flow| flow.flow).collect() }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        (self.served.len() + self.leaving.len()) as u64
    }

    /// All of them, also those that are on their way.
    pub fn flows(&self) -> HashSet<FlowId> {
        self.served.iter().map(|served| served.flow).chain(self.leaving.iter().copied()).collect()
    }

    /// What could go. `failed`: those that could not before, and why.
    pub fn sort(&self, agent: &Agent, failed: &HashMap<FlowId, String>) -> Sorted {
        let wanted: HashSet<Tuple> = self.served.iter().map(|served| served.app).collect();
        let sockets = Sockets::of(&wanted);
        let mut givers: HashMap<Prefix, _> = HashMap::new();
        let judge = |served: &ServedFlow| -> Result<Movable, String> {
            if let Some(why) = failed.get(&served.flow) {
                return Err(why.clone());
            }
            let name = Prefix::from(served.service);
            let givers = givers.entry(name).or_insert_with(|| agent.connections.programs.takers.givers_of(&name));
            match sockets.owner(&served.app) {
                Some(Owner { pid, queued_bytes }) => {
                    let pid = i32::try_from(pid).ok().filter(|pid| givers.contains(pid)).ok_or(NO_GIVER)?;
                    Ok(Movable { flow: *served, pid, queued_bytes })
                }
                // A name that no program gives has nothing to do with namespaces.
                None if givers.is_empty() => Err(NO_GIVER.to_owned()),
                None => Err(NO_SOCKET.to_owned()),
            }
        };
        sorted(self.served.iter().map(judge))
    }
}

fn sorted(judged: impl Iterator<Item = Result<Movable, String>>) -> Sorted {
    let mut sorted = Sorted::default();
    for one in judged {
        match one {
            Ok(movable) => sorted.movable.push(movable),
            Err(why) => {
                let has_room = sorted.stays.contains_key(&why) || sorted.stays.len() < REASONS_MAX;
                let why = if has_room { why } else { OTHER_REASONS.to_owned() };
                *sorted.stays.entry(why).or_default() += 1;
            }
        }
    }
    sorted.movable.sort_by_key(|movable| (movable.queued_bytes, movable.flow.flow.0));
    sorted
}

#[cfg(test)]
mod test {
    use margay_core::name::ServiceId;

    use super::*;

    fn movable(flow: u32, queued_bytes: u64) -> Movable {
        let app =
            Tuple { protocol: TCP, source: ([10, 1, 0, 1], 80).into(), destination: ([10, 1, 0, 2], 4660).into() };
        let flow = ServedFlow { flow: FlowId(flow), service: ServiceId([1; 32]), app };
        Movable { flow, pid: 7, queued_bytes }
    }

    #[test]
    fn what_carries_little_goes_first_and_reasons_are_counted() {
        let judged = [
            Ok(movable(1, 900)),
            Err(NO_GIVER.to_owned()),
            Ok(movable(3, 0)),
            Err(NO_GIVER.to_owned()),
            Ok(movable(2, 0)),
        ];
        let sorted = sorted(judged.into_iter());
        let flows: Vec<u32> = sorted.movable.iter().map(|movable| movable.flow.flow.0).collect();
        assert_eq!(flows, [2, 3, 1]);
        assert_eq!(sorted.stays, [(NO_GIVER.to_owned(), 2)].into());
    }

    #[test]
    fn there_are_only_so_many_reasons() {
        let judged = (0..100).map(|number| Err(format!("host {number} is away")));
        let stays = sorted(judged).stays;
        assert_eq!((stays.len(), stays[OTHER_REASONS]), (REASONS_MAX + 1, 100 - REASONS_MAX as u64));
    }
}
