//! What the other end of a registration would do with a first packet to a name: asked by host and router alike,
//! answered by what explains it on each of them.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use margay_core::key::HostId;
use margay_core::name::ServiceId;
use margay_core::rate::RateLimit;
use prost::Message;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::proto::{self, from_router};
use super::roll::Place;
use crate::api::v1::{RouteInfo, TraceHop};

/// Hosts that a first packet may pass.
pub const HOPS_MAX: usize = 16;
/// Questions of one stream that are answered at once, and in a second.
const AT_ONCE_MAX: usize = 4;
const PER_S_MAX: u32 = 50;
/// An answer fits one message of the stream, with room for what is around it.
const ANSWER_MAX: usize = 60_000;
/// Nobody waits longer.
const LIMIT_MAX: Duration = Duration::from_secs(10);
/// Words of another host, in characters.
const WORDS_MAX: usize = 400;

/// What would you do?
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The name.
    pub service: ServiceId,
    /// IP protocol 6 or 17.
    pub protocol: u8,
    /// The port of the service.
    pub port: u16,
    /// By what instances are picked.
    pub sticky: u64,
    /// Hosts that the packet has passed: first whose program sends it, last the asker.
    pub passed: Vec<HostId>,
    /// An answer is of no use later.
    pub limit: Duration,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// There is no stream.
    #[error("there is no registration between the two now")]
    Down,
    /// It does not know the question.
    #[error("it runs an older version, which cannot be asked")]
    Older,
    /// It did not answer.
    #[error("it does not answer")]
    Timeout,
    /// It says no.
    #[error("it does not say: {0}")]
    Refused(String),
}

/// What explains a packet on this host, and asks on.
pub type Tracer = Arc<dyn Fn(Question) -> Pin<Box<dyn Future<Output = Vec<TraceHop>> + Send>> + Send + Sync>;

impl Question {
    pub(super) fn written(&self, request: u64) -> proto::Trace {
        proto::Trace {
            request,
            service_id: self.service.0.to_vec(),
            protocol: self.protocol.into(),
            port: self.port.into(),
            sticky: self.sticky,
            passed: self.passed.iter().map(|host| host.0.to_vec()).collect(),
            limit_ms: u32::try_from(self.limit.as_millis()).unwrap_or(u32::MAX),
        }
    }

    /// What the other end wrote; `None` when it makes no sense.
    fn read(asked: proto::Trace) -> Option<Self> {
        let passed = asked.passed.into_iter().map(|host| host.try_into().ok().map(HostId));
        let passed: Vec<HostId> = passed.collect::<Option<_>>()?;
        Some(Self {
            service: ServiceId(asked.service_id.try_into().ok()?),
            protocol: u8::try_from(asked.protocol).ok().filter(|number| matches!(number, 6 | 17))?,
            port: u16::try_from(asked.port).ok()?,
            sticky: asked.sticky,
            passed: Some(passed).filter(|passed| (1..=HOPS_MAX).contains(&passed.len()))?,
            limit: Duration::from_millis(asked.limit_ms.into()).min(LIMIT_MAX),
        })
    }
}

/// Hops as they fit a message: of the rules that did not decide, those of the longest lists go first.
fn fitting(mut hops: Vec<TraceHop>) -> Vec<TraceHop> {
    hops.truncate(HOPS_MAX);
    let len = |hops: &[TraceHop]| hops.iter().map(|hop| hop.encoded_len() + 8).sum::<usize>();
    while len(&hops) > ANSWER_MAX {
        let idle = |hop: &TraceHop| hop.rules.iter().filter(|rule| rule.verdict != "chosen").count();
        let Some(longest) = hops.iter_mut().max_by_key(|hop| idle(hop)).filter(|hop| idle(hop) > 0) else {
            // One rule and a few sentences each: that many hops have no business to be so long.
            hops.truncate(hops.len() / 2);
            continue;
        };
        let before = longest.rules.len();
        longest.rules.retain(|rule| rule.verdict == "chosen");
        longest.rules_left_out += u32::try_from(before - longest.rules.len()).unwrap_or(u32::MAX);
    }
    hops
}

/// Words that come from elsewhere, for a terminal.
fn clean(text: &mut String) {
    if text.chars().any(char::is_control) || text.len() > WORDS_MAX {
        *text = text.chars().filter(|char| !char.is_control()).take(WORDS_MAX).collect();
    }
}

/// What the other end answered.
pub(super) fn heard(answer: proto::Traced) -> Result<Vec<TraceHop>, TraceError> {
    let proto::Traced { mut hops, mut refused, .. } = answer;
    clean(&mut refused);
    if !refused.is_empty() {
        return Err(TraceError::Refused(refused));
    }
    hops.truncate(HOPS_MAX);
    for hop in &mut hops {
        let TraceHop { host_id, host_name, rules, act, why, notes, ended, .. } = hop;
        notes.truncate(HOPS_MAX);
        ended.truncate(HOPS_MAX);
        [host_id, host_name, act, why].into_iter().chain(notes).for_each(clean);
        rules.iter_mut().for_each(|rule| [&mut rule.verdict, &mut rule.why].into_iter().for_each(clean));
        ended.iter_mut().for_each(|ended| clean(&mut ended.why));
        let of_rules = rules.iter_mut().filter_map(|rule| rule.route.as_mut());
        for route in of_rules.chain(ended.iter_mut().filter_map(|ended| ended.route.as_mut())) {
            let RouteInfo { prefix, name, action, to, host_id, host_name, protocol, origin, .. } = route;
            [prefix, name, action, to, host_id, host_name, protocol, origin].into_iter().for_each(clean);
        }
    }
    Ok(hops)
}

/// Answers the questions that come by one stream.
pub(super) struct Desk {
    /// The other end answers questions, too.
    pub is_answered: bool,
    authority: [u8; 8],
    peer: HostId,
    limit: RateLimit,
    since: Instant,
    room: Arc<Semaphore>,
    sender: mpsc::Sender<proto::Traced>,
    answers: mpsc::Receiver<proto::Traced>,
}

impl Desk {
    /// For a stream with `peer`, for an authority.
    pub fn new(authority: [u8; 8], peer: HostId, is_answered: bool) -> Self {
        let (sender, answers) = mpsc::channel(2 * AT_ONCE_MAX);
        Self {
            is_answered,
            authority,
            peer,
            limit: RateLimit::new(PER_S_MAX, margay_core::Instant::ZERO),
            since: Instant::now(),
            room: Arc::new(Semaphore::new(AT_ONCE_MAX)),
            sender,
            answers,
        }
    }

    /// Takes a question; it is answered while the stream goes on. Beyond the bounds the answer is no, and where even
    /// that finds no room the asker's own limit ends it. False if it is no.
    pub fn take(&mut self, tracer: Option<&Tracer>, asked: proto::Trace) -> bool {
        let request = asked.request;
        let begun = self.begin(tracer, asked);
        if let Err(no) = begun {
            let refused = proto::Traced { request, hops: Vec::new(), refused: no.to_owned() };
            let _ = self.sender.try_send(refused);
        }
        begun.is_ok()
    }

    fn begin(&mut self, tracer: Option<&Tracer>, asked: proto::Trace) -> Result<(), &'static str> {
        let micros = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        if !self.limit.take(margay_core::Instant::from_micros(micros)) {
            return Err("it was asked too often; try again in a second");
        }
        let request = asked.request;
        let question = Question::read(asked).ok_or("the question makes no sense to it")?;
        if question.service.authority() != self.authority {
            return Err("the name is of another authority than the registration between the two");
        }
        if question.passed.last() != Some(&self.peer) {
            return Err("the question comes from another host than it says");
        }
        let tracer = tracer.ok_or("it has just been started")?;
        let room = Arc::clone(&self.room).try_acquire_owned().map_err(|_| "it is asked too much at once")?;
        let (sender, limit) = (self.sender.clone(), question.limit);
        let answer = tracer(question);
        tokio::spawn(async move {
            // Without an answer in time the asker has given up, too.
            if let Ok(hops) = timeout(limit, answer).await {
                let answer = proto::Traced { request, hops: fitting(hops), refused: String::new() };
                let _ = sender.send(answer).await;
            }
            drop(room);
        });
        Ok(())
    }

    /// The next answer to be sent.
    pub async fn answered(&mut self) -> proto::Traced {
        match self.answers.recv().await {
            Some(answer) => answer,
            // Never: the desk itself has a sender.
            None => std::future::pending().await,
        }
    }
}

/// A stream of a host that can be asked.
struct Line {
    stream: u64,
    traces: bool,
    sender: mpsc::Sender<proto::FromRouter>,
}

/// The streams of a router's hosts, as ways to ask them.
#[derive(Default)]
pub(super) struct Lines {
    by_place: HashMap<Place, Line>,
    next_request: u64,
    /// Answers that are waited for, each as long as its question's limit at most.
    pending: HashMap<(Place, u64), oneshot::Sender<proto::Traced>>,
}

impl Lines {
    /// A host can be asked by this stream from now on; what is asked comes out of the receiver.
    pub fn open(&mut self, place: Place, stream: u64, traces: bool) -> mpsc::Receiver<proto::FromRouter> {
        let (sender, receiver) = mpsc::channel(2 * AT_ONCE_MAX);
        self.by_place.insert(place, Line { stream, traces, sender });
        receiver
    }

    /// The stream is over.
    pub fn close(&mut self, place: Place, stream: u64) {
        if self.by_place.get(&place).is_some_and(|line| line.stream == stream) {
            self.by_place.remove(&place);
            self.pending.retain(|(of, _), _| *of != place);
        }
    }

    /// Asks a host; what is given back is told its answer.
    pub fn ask(&mut self, host: HostId, question: &Question) -> Result<oneshot::Receiver<proto::Traced>, TraceError> {
        let place = Place { host, authority: question.service.authority() };
        let line = self.by_place.get(&place).ok_or(TraceError::Down)?;
        if !line.traces {
            return Err(TraceError::Older);
        }
        self.pending.retain(|_, waiting| !waiting.is_closed());
        self.next_request += 1;
        let body = from_router::Body::Trace(question.written(self.next_request));
        line.sender.try_send(proto::FromRouter { body: Some(body) }).map_err(|_| TraceError::Timeout)?;
        let (done, answer) = oneshot::channel();
        self.pending.insert((place, self.next_request), done);
        Ok(answer)
    }

    /// A host has answered.
    pub fn answered(&mut self, place: Place, answer: proto::Traced) {
        if let Some(waiting) = self.pending.remove(&(place, answer.request)) {
            // Whoever asked has stopped waiting.
            let _ = waiting.send(answer);
        }
    }
}

/// Waits for an answer as long as it is of use.
pub(super) async fn wait(
    answer: oneshot::Receiver<proto::Traced>,
    limit: Duration,
) -> Result<Vec<TraceHop>, TraceError> {
    match timeout(limit, answer).await {
        Err(_) => Err(TraceError::Timeout),
        Ok(Err(_)) => Err(TraceError::Down),
        Ok(Ok(answer)) => heard(answer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::v1::TraceRule;

    fn hop(rules: usize, why: &str) -> TraceHop {
        let rule = |n: usize| TraceRule {
            route: Some(RouteInfo {
                prefix: "sid:".to_owned() + &"ab".repeat(32),
                id: n as u64,
                ..RouteInfo::default()
            }),
            verdict: if n == 1 { "chosen" } else { "not-picked" }.to_owned(),
            why: "because".repeat(10),
        };
        TraceHop { rules: (0..rules).map(rule).collect(), why: why.to_owned(), ..TraceHop::default() }
    }

    #[test]
    fn an_answer_fits_its_message_and_keeps_what_decided() {
        let hops = fitting(vec![hop(400, "x"), hop(3, "y"), hop(200, "z")]);
        assert!(hops.iter().map(Message::encoded_len).sum::<usize>() <= ANSWER_MAX);
        assert_eq!(
            (hops[0].rules.len(), hops[0].rules_left_out, hops[0].rules[0].verdict.as_str()),
            (1, 399, "chosen")
        );
        assert_eq!(hops[1].rules.len(), 3, "what is short stays");
        assert_eq!(fitting(vec![hop(1, ""); 40]).len(), HOPS_MAX);
        assert!(!fitting(vec![hop(0, &"long ".repeat(4000)); 16]).is_empty());
    }

    #[test]
    fn words_of_others_are_safe_to_print() {
        let mut strange = hop(1, "\u{1b}[2Jall is well\n");
        strange.rules[0].why = "x".repeat(10_000);
        let answer = proto::Traced { request: 1, hops: vec![strange; 40], refused: String::new() };
        let hops = heard(answer).expect("an answer");
        assert_eq!(
            (hops.len(), hops[0].why.as_str(), hops[0].rules[0].why.len()),
            (HOPS_MAX, "[2Jall is well", WORDS_MAX)
        );
        let refused = proto::Traced { request: 1, hops: Vec::new(), refused: "no".to_owned() };
        assert_eq!(heard(refused), Err(TraceError::Refused("no".to_owned())));
    }

    #[test]
    fn questions_that_make_no_sense_are_none() {
        let good = Question {
            service: ServiceId([1; 32]),
            protocol: 6,
            port: 80,
            sticky: 7,
            passed: vec![HostId([2; 16])],
            limit: Duration::from_secs(1),
        };
        let written = good.written(5);
        assert_eq!(Question::read(written.clone()), Some(good));
        let bad: [fn(&mut proto::Trace); 6] = [
            |trace| trace.service_id.truncate(31),
            |trace| trace.protocol = 1,
            |trace| trace.port = 65_536,
            |trace| trace.passed.clear(),
            |trace| trace.passed = vec![vec![0; 16]; HOPS_MAX + 1],
            |trace| trace.passed[0].truncate(15),
        ];
        for spoil in bad {
            let mut asked = written.clone();
            spoil(&mut asked);
            assert_eq!(Question::read(asked), None);
        }
    }
}
