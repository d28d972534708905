//! Flows that a peer's rules want encrypted before anything more of them is sent: all with a host that has moved, or
//! single ones. The peer is asked until it frees them, by an answer to that very question: an answer to an earlier one,
//! which somebody on the path has kept, frees nothing. However often the peer does not answer, nothing is freed.

use alloc::collections::BTreeMap;
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
}

impl PeerDemands {
    /// A peer demands that flows of a scope are encrypted.
    pub fn note(&mut self, rng: &mut Rng, now: Instant, scope: Scope) {
        let question = Question { host: scope.host, token: rng.u64() | 1, next: now + ASK_EVERY, tries: 0 };
        if scope.is_host() {
            self.of_hosts.insert(scope.host, question);
        } else {
            self.of_flows.insert(scope.flow, question);
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
        self.of_flows.remove(&flow);
    }

    /// No flow with a host waits.
    pub fn forget_host(&mut self, host: HostId) {
        self.of_hosts.remove(&host);
    }

    /// A peer answers a question by freeing what was asked about. False if no such question is open.
    pub fn is_answered(&mut self, host: HostId, token: u64) -> bool {
        let is_it = |question: &Question| question.host == host && question.token == token;
        if self.of_hosts.get(&host).is_some_and(is_it) {
            return self.of_hosts.remove(&host).is_some();
        }
        let flow = self.of_flows.iter().find(|(_, question)| is_it(question)).map(|(flow, _)| *flow);
        flow.is_some_and(|flow| self.of_flows.remove(&flow).is_some())
    }

    /// The questions that are to be asked now, each with its token.
    pub fn take_due(&mut self, now: Instant) -> Vec<(Scope, u64)> {
        let of_hosts = self.of_hosts.iter_mut().map(|(host, question)| (Scope::of(*host), question));
        let of_flows = self.of_flows.iter_mut().map(|(flow, question)| {
            let scope = Scope { host: question.host, flow: *flow };
            (scope, question)
        });
        let due = of_hosts.chain(of_flows).filter(|(_, question)| question.next <= now);
        due.map(|(scope, question)| {
            question.tries = question.tries.saturating_add(1);
            question.next = now + wait_after(question.tries);
            (scope, question.token)
        })
        .collect()
    }

    /// When the next question is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.of_hosts.values().chain(self.of_flows.values()).map(|question| question.next).min()
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
            asked.extend(demands.take_due(at(millis)).into_iter().map(|(_, token)| (millis, token)));
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
        let (_, former) = demands.take_due(at(100))[0];
        demands.note(&mut rng, at(200), scope);
        let (_, token) = demands.take_due(at(300))[0];
        assert!(!demands.is_answered(HOST, former), "kept by somebody from the time before");
        assert!(!demands.is_answered(HOST, 0) && !demands.is_answered(OTHER, token));
        assert!(demands.has(scope) && demands.covers(HOST, FlowId(7)) && !demands.covers(HOST, FlowId(8)));
        assert!(demands.is_answered(HOST, token) && !demands.is_answered(HOST, token), "once");
    }
}
