//! Flows that ended a short while ago otherwise than by their programs: who was given up, when and upon what, for
//! `margay flow list --failed` and `margay flow show`.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use margay_core::give_up::GiveUpCause;
use margay_core::key::HostId;
use margay_core::{Event, FlowCounters, FlowInfo, RemoveReason};
use margay_wire::FlowId;
use parking_lot::Mutex;

/// Flows that are remembered; the oldest is forgotten for one more.
const ENDED_MAX: usize = 64;

/// A flow that is over.
#[derive(Clone, Debug)]
pub struct Ended {
    /// What it was, at its end.
    pub flow: FlowInfo,
    /// What it has carried.
    pub carried: FlowCounters,
    /// Why it ended.
    pub reason: RemoveReason,
    /// Upon what its peer was given up, where it was.
    pub cause: Option<GiveUpCause>,
    /// The moment at which the agent heard of its end.
    pub at: Instant,
}

impl Ended {
    /// Why, as a sentence; `names` are those of hosts.
    pub fn why(&self, names: &HashMap<HostId, String>) -> String {
        let fixed = match (self.reason, self.cause) {
            (_, Some(GiveUpCause::Silent(silent))) => {
                let silent = silent.as_secs_f64();
                return format!("its host was silent for {silent:.1} s, and no router lists it: it was given up");
            }
            (_, Some(GiveUpCause::Elsewhere(holder))) => {
                let holder = names.get(&holder).cloned().unwrap_or_else(|| holder.to_string());
                return format!("the name is held by {holder} now");
            }
            (_, Some(GiveUpCause::Left)) => "its instance has left, and datagrams go to another one",
            (RemoveReason::GivenUp, None) => "its host was given up",
            (RemoveReason::Elsewhere, None) => "the host that it was with holds the name no more",
            (RemoveReason::PeerFailed, None) => "the other host could not carry it any more, or has refused it",
            (RemoveReason::PeerRebooted, None) => "the other host has booted anew",
            (RemoveReason::Unproved, None) => "the other host did not prove itself in time",
            (RemoveReason::Operator, None) => "an operator has ended it, or the agent here was taken off",
            (RemoveReason::Drained, None) => "its instance was drained",
            (RemoveReason::HandedOver, None) => "it goes on at another host",
            (RemoveReason::Rechained, None) => "its session goes through other boxes",
            (RemoveReason::Closed | RemoveReason::Reset | RemoveReason::Idle, None) => "its programs have ended it",
        };
        fixed.to_owned()
    }
}

const fn is_failure(reason: RemoveReason) -> bool {
    !matches!(
        reason,
        RemoveReason::Closed
            | RemoveReason::Reset
            | RemoveReason::Idle
            | RemoveReason::HandedOver
            | RemoveReason::Rechained
    )
}

/// Those of late, the latest first.
#[derive(Debug, Default)]
pub struct EndedFlows(Mutex<VecDeque<Ended>>);

impl EndedFlows {
    /// Remembers what concerns it.
    pub fn note(&self, event: &Event, now: Instant) {
        match event {
            Event::FlowClosed { flow, reason, carried } if is_failure(*reason) => {
                let ended = Ended { flow: (**flow).clone(), carried: *carried, reason: *reason, cause: None, at: now };
                let mut all = self.0.lock();
                all.push_front(ended);
                all.truncate(ENDED_MAX);
            }
            // It comes after the flows' own ends.
            Event::GivenUp { peer, cause, .. } => {
                let is_of_peer = |ended: &&mut Ended| {
                    let is_given_up = matches!(ended.reason, RemoveReason::GivenUp | RemoveReason::Elsewhere);
                    is_given_up && ended.cause.is_none() && ended.flow.peer == Some(*peer)
                };
                self.0.lock().iter_mut().filter(is_of_peer).for_each(|ended| ended.cause = Some(*cause));
            }
            _ => {}
        }
    }

    /// All of them.
    pub fn all(&self) -> Vec<Ended> {
        self.0.lock().iter().cloned().collect()
    }

    /// One of them.
    pub fn find(&self, flow: FlowId) -> Option<Ended> {
        self.0.lock().iter().find(|ended| ended.flow.flow == flow).cloned()
    }
}

#[cfg(test)]
mod test {
    use std::time::Duration;

    use margay_core::carriage::{Carriage, Why};
    use margay_core::name::ServiceId;
    use margay_core::{Lifecycle, Role, Stack, StackInfo, Tuple};
    use margay_wire::SessionId;

    use super::*;

    fn closed(number: u32, peer: u8, reason: RemoveReason) -> Event {
        let address = "198.18.0.9:80".parse().expect("literal");
        let flow = FlowInfo {
            flow: FlowId(number),
            peer_flow: FlowId(1),
            session: SessionId([0; 16]),
            service: ServiceId([4; 32]),
            port: 0,
            source: None,
            role: Role::Initiator,
            lifecycle: Lifecycle::Closed,
            closed: None,
            app: Tuple { protocol: 6, source: address, destination: address },
            peer: Some(HostId([peer; 16])),
            shares_as: None,
            remote: None,
            authenticated: true,
            since: margay_core::Instant::ZERO,
            carriage: Carriage::Encapsulated,
            carriage_since: margay_core::Instant::ZERO,
            why: Why::Unproved,
            secure: None,
            loss: margay_core::loss::FlowLoss::default(),
            timing: margay_core::timing::FlowTiming::default(),
            stack: StackInfo {
                stack: Stack::Plain,
                since: margay_core::Instant::ZERO,
                changing_to: None,
                order: None,
                is_demanded: false,
                is_demanded_by_rule: false,
                is_demanded_by_peer: false,
                changes: Vec::new(),
            },
            local: None,
            is_aside: false,
            is_pinned: false,
            stripes: false,
            is_striped: false,
            sharing: margay_core::stripe::Sharing::default(),
            places: Vec::new(),
            moved: None,
            moves: 0,
            trouble: None,
            chain: None,
            reconfigurations: Vec::new(),
            goes_on: true,
        };
        Event::FlowClosed { flow: Box::new(flow), reason, carried: FlowCounters::default() }
    }

    #[test]
    fn who_was_given_up_is_known_with_the_cause() {
        let ended = EndedFlows::default();
        let now = Instant::now();
        let names = HashMap::from([(HostId([9; 16]), "db2".into())]);
        ended.note(&closed(1, 1, RemoveReason::Closed), now);
        ended.note(&closed(2, 1, RemoveReason::GivenUp), now);
        ended.note(&closed(3, 2, RemoveReason::GivenUp), now);
        let silent = GiveUpCause::Silent(Duration::from_millis(30_200));
        ended.note(&Event::GivenUp { peer: HostId([1; 16]), flows: 1, cause: silent }, now);
        ended.note(&closed(4, 2, RemoveReason::Elsewhere), now);
        let elsewhere = GiveUpCause::Elsewhere(HostId([9; 16]));
        ended.note(&Event::GivenUp { peer: HostId([2; 16]), flows: 1, cause: elsewhere }, now);
        ended.note(&closed(5, 2, RemoveReason::Drained), now);
        let why: Vec<(u32, String)> = ended.all().iter().map(|one| (one.flow.flow.0, one.why(&names))).collect();
        let said = why.iter().map(|(flow, why)| (*flow, why.as_str())).collect::<Vec<_>>();
        assert_eq!(
            said,
            [
                (5, "its instance was drained"),
                (4, "the name is held by db2 now"),
                (3, "the name is held by db2 now"),
                (2, "its host was silent for 30.2 s, and no router lists it: it was given up"),
            ]
        );
        assert!(ended.find(FlowId(2)).is_some() && ended.find(FlowId(1)).is_none());
    }

    #[test]
    fn of_very_many_the_oldest_are_forgotten() {
        let ended = EndedFlows::default();
        for number in 0..=ENDED_MAX as u32 {
            ended.note(&closed(number, 1, RemoveReason::PeerFailed), Instant::now());
        }
        assert_eq!((ended.all().len(), ended.find(FlowId(0)).is_none()), (ENDED_MAX, true));
    }
}
