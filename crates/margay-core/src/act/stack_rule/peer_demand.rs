//! Flows that a peer's rules want encrypted before anything more of them is sent: all with a host that has moved, or
//! single ones. The peer is asked until it frees them, by an answer to that very question: an answer to an earlier one,
//! which somebody on the path has kept, frees nothing. However often the peer does not answer, nothing is freed.
//!
//! A peer may demand it of each of its flows: neither a message nor the passing of time has this host look at all.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::FlowId;

use crate::association::location::Scope;
use crate::types::key::HostId;
use crate::types::rng::Rng;
use crate::types::time::Instant;

/// The first questions follow each other so closely: flows that need not be encrypted wait, too.
const ASK_EVERY: Duration = Duration::from_millis(100);
const ASKS_OFTEN: u32 = 10;
/// Later ones come at intervals that double, up to this.
const ASK_EVERY_MAX: Duration = Duration::from_secs(5);

/// One question that is not answered.
#[derive(Clone, Copy, Debug)]
struct Question {
    host: HostId,
    token: u64,
    next: Instant,
    tries: u32,
}

/// What peers demand.
#[derive(Debug, Default)]
pub(super) struct PeerDemands {
    of_hosts: BTreeMap<HostId, Question>,
    of_flows: BTreeMap<FlowId, Question>,
    /// Of both, by when they are asked next, and by token.
    due: BTreeSet<(Instant, Scope)>,
    by_token: BTreeMap<u64, Scope>,
}

impl PeerDemands {
    /// A peer demands that flows of a scope are encrypted.
    pub fn note(&mut self, rng: &mut Rng, now: Instant, scope: Scope) {
        let question = Question { host: scope.host, token: rng.u64() | 1, next: now + ASK_EVERY, tries: 0 };
        let before = if scope.is_host() {
            self.of_hosts.insert(scope.host, question)
        } else {
            self.of_flows.insert(scope.flow, question)
        };
        self.unlist(scope.flow, before);
        self.due.insert((question.next, scope));
        self.by_token.insert(question.token, scope);
    }

    /// A question is over that was about `flow`, or about all flows with its host.
    fn unlist(&mut self, flow: FlowId, question: Option<Question>) {
        if let Some(Question { host, token, next, .. }) = question {
            self.due.remove(&(next, Scope { host, flow }));
            self.by_token.remove(&token);
        }
    }

    /// Whether there is a demand of exactly this scope.
    pub fn has(&self, scope: Scope) -> bool {
        if scope.is_host() { self.of_hosts.contains_key(&scope.host) } else { self.of_flows.contains_key(&scope.flow) }
    }

    /// Whether a flow with a host is under a demand, alone or with all others.
    pub fn covers(&self, host: HostId, flow: FlowId) -> bool {
        self.of_hosts.contains_key(&host) || self.of_flows.contains_key(&flow)
    }

    /// The flow is encrypted, or over.
    pub fn forget_flow(&mut self, flow: FlowId) {
        let question = self.of_flows.remove(&flow);
        self.unlist(flow, question);
    }

    /// No flow with a host waits.
    pub fn forget_host(&mut self, host: HostId) {
        let question = self.of_hosts.remove(&host);
        self.unlist(FlowId(0), question);
    }

    /// A peer answers a question by freeing what was asked about. False if no such question is open.
    pub fn is_answered(&mut self, host: HostId, token: u64) -> bool {
        let Some(scope) = self.by_token.get(&token).copied().filter(|scope| scope.host == host) else { return false };
        if scope.is_host() {
            self.forget_host(host);
        } else {
            self.forget_flow(scope.flow);
        }
        true
    }

    /// Questions that are to be asked now, `max` of them at most, each with its token.
    pub fn take_due(&mut self, now: Instant, max: usize) -> Vec<(Scope, u64)> {
        let mut due = Vec::new();
        while due.len() < max
            && let Some((next, scope)) = self.due.first().copied().filter(|(next, _)| *next <= now)
        {
            self.due.remove(&(next, scope));
            let question =
                if scope.is_host() { self.of_hosts.get_mut(&scope.host) } else { self.of_flows.get_mut(&scope.flow) };
            let Some(question) = question else { continue };
            question.tries = question.tries.saturating_add(1);
            question.next = now + wait_after(question.tries);
            self.due.insert((question.next, scope));
            due.push((scope, question.token));
        }
        due
    }

    /// When the next question is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.due.first().map(|(next, _)| *next)
    }
}

/// How long an answer is waited for when so many questions have been asked.
fn wait_after(tries: u32) -> Duration {
    let doubled = tries.saturating_sub(ASKS_OFTEN).min(16);
    (ASK_EVERY * (1 << doubled)).min(ASK_EVERY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: HostId = HostId([1; 16]);
    const OTHER: HostId = HostId([2; 16]);

    fn at(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    #[test]
    fn a_peer_that_does_not_answer_is_asked_for_ever_and_frees_nothing() {
        let mut demands = PeerDemands::default();
        demands.note(&mut Rng::new([1; 32]), at(0), Scope::of(HOST));
        let mut asked = Vec::new();
        for millis in (0..600_000).step_by(50) {
            asked.extend(demands.take_due(at(millis), 9).into_iter().map(|(_, token)| (millis, token)));
        }
        assert_eq!(
            asked.iter().take(10).map(|(millis, _)| *millis).collect::<Vec<_>>(),
            (1..=10).map(|n| n * 100).collect::<Vec<_>>()
        );
        assert!(asked.len() > 120 && asked.len() < 150, "{}", asked.len());
        assert!(demands.covers(HOST, FlowId(7)) && demands.next_deadline().is_some());
        assert!(demands.is_answered(HOST, asked[0].1), "the question is one, however often it is asked");
        assert!(!demands.covers(HOST, FlowId(7)) && demands.next_deadline().is_none());
    }

    #[test]
    fn only_the_answer_to_the_present_question_of_the_same_peer_frees() {
        let mut rng = Rng::new([1; 32]);
        let mut demands = PeerDemands::default();
        let scope = Scope { host: HOST, flow: FlowId(7) };
        demands.note(&mut rng, at(0), scope);
        let (_, former) = demands.take_due(at(100), 9)[0];
        demands.note(&mut rng, at(200), scope);
        let (_, token) = demands.take_due(at(300), 9)[0];
        assert!(!demands.is_answered(HOST, former), "kept by somebody from the time before");
        assert!(!demands.is_answered(HOST, 0) && !demands.is_answered(OTHER, token));
        assert!(demands.has(scope) && demands.covers(HOST, FlowId(7)) && !demands.covers(HOST, FlowId(8)));
        assert!(demands.is_answered(HOST, token) && !demands.is_answered(HOST, token), "once");
        assert!(demands.due.is_empty() && demands.by_token.is_empty());
    }

    #[test]
    fn of_many_questions_some_are_asked_at_once_and_the_rest_right_after() {
        let mut demands = PeerDemands::default();
        let mut rng = Rng::new([1; 32]);
        (1..=100).for_each(|n| demands.note(&mut rng, at(0), Scope { host: HOST, flow: FlowId(n) }));
        let mut asked = Vec::new();
        for _ in 0..4 {
            assert_eq!(demands.next_deadline(), Some(at(100)));
            asked.extend(demands.take_due(at(100), 25).into_iter().map(|(scope, _)| scope.flow));
        }
        assert_eq!((asked.len(), demands.next_deadline()), (100, Some(at(200))));
        (1..=100).for_each(|n| demands.forget_flow(FlowId(n)));
        assert!(demands.due.is_empty() && demands.by_token.is_empty());
    }
}
