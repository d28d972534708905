//! A module that is tried with requests, without a switch.

use std::borrow::Cow;
use std::time::Instant as SystemInstant;

use margay_ensemble::{Config, Frame, Joining, Kind, Lsn, MemberId, Order, Plugin, Switch, Verdict};

use super::{Guest, Module};
use crate::head::Head;
use crate::protocol::{Asked, Protocol, Reader, Step};
use crate::router::{Policy, Router};

/// What a module has said of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// The request's first line.
    pub request: String,
    /// The member's label, and what else the module has said.
    pub answer: String,
}

/// What a module has said of all requests.
#[derive(Clone, Debug)]
pub struct Trial {
    /// In their order.
    pub answers: Vec<Tried>,
    /// How long a call of `redirect` took, in nanoseconds: the middle one.
    pub median_ns: u64,
}

/// A connection with members, and a module that divides its requests.
struct Bench {
    protocol: Protocol,
    router: Router,
    /// Who is a member: its own router has nothing to do.
    switch: Switch<Router>,
    labels: Vec<(MemberId, String)>,
    times_ns: Vec<u64>,
}

impl Trial {
    /// Has a module divide requests among members that are called so. Each request comes twice, as one that a client
    /// repeats does, and must become the same both times.
    ///
    /// # Errors
    ///
    /// In words: the module's fault, and with which request; or that the requests are none.
    pub fn run(module: &Module, protocol: Protocol, labels: &[String], requests: &[u8]) -> Result<Self, String> {
        let mut bench = Bench::new(module, protocol, labels)?;
        let mut answers = Vec::new();
        let mut reader = Reader::new(protocol);
        let mut rest = requests;
        while !rest.is_empty() {
            let (len, asked) = match reader.step(rest) {
                Step::Taken(len, asked) => (len, asked),
                Step::Passed(len) => {
                    rest = &rest[len.min(rest.len())..];
                    continue;
                }
                Step::More(_) => return Err(format!("the last request is not whole: {}", first_line(rest))),
            };
            let is_last = matches!(asked, Asked::Last(_));
            match asked {
                Asked::Servers { parts, .. } => {
                    for part in parts {
                        answers.push(bench.ask(&part.bytes)?);
                    }
                }
                Asked::Answer(answer) | Asked::Last(answer) => {
                    let answer = format!("the framer answers: {}", first_line(&answer));
                    answers.push(Tried { request: first_line(rest), answer });
                }
            }
            // There is nobody to answer a greeting.
            reader.greeted(true);
            rest = if is_last { &[] } else { &rest[len.min(rest.len())..] };
        }
        bench.times_ns.sort_unstable();
        let median_ns = bench.times_ns.get(bench.times_ns.len() / 2).copied().unwrap_or_default();
        Ok(Self { answers, median_ns })
    }
}

impl Bench {
    fn new(module: &Module, protocol: Protocol, labels: &[String]) -> Result<Self, String> {
        let guest = Guest::start(module).map_err(|error| error.to_string())?;
        let switch = Switch::new(Config::default(), Router::new(protocol, Policy::RoundRobin), 0);
        let mut this = Self {
            protocol,
            router: Router::guided(protocol, guest),
            switch,
            labels: Vec::new(),
            times_ns: Vec::new(),
        };
        this.router.add_connection(0);
        let joining = Joining { kind: Kind::Margay, to_member: Lsn(0), from_member: Lsn(0), window_bytes: 1 << 16 };
        for label in labels {
            let id = this.switch.join(&joining).map_err(|full| full.to_string())?;
            this.router.name(id, label);
            this.labels.push((id, label.clone()));
        }
        Ok(this)
    }

    fn shown(&self, request: &[u8]) -> String {
        first_line(&self.protocol.shown(request))
    }

    fn ask(&mut self, request: &[u8]) -> Result<Tried, String> {
        // There are less than 2^32.
        let number = self.times_ns.len() as u32;
        let payload = Head { number, oldest: number }.frame(request);
        let frame =
            |payload| Frame { connection: 0, order: Order::Member, is_whole: true, payload: Cow::Owned(payload) };
        let mut first = frame(payload.clone());
        let mut rtx = 0;
        let begun = SystemInstant::now();
        let verdict = self.router.redirect(&mut first, self.switch.members(), &mut rtx);
        self.times_ns.push(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
        if rtx != 0 {
            self.router.again(&mut frame(payload.clone()), &mut rtx);
            self.router.retire(rtx);
        }
        if let Some(why) = self.router.fault() {
            return Err(format!("{why}, with the request {}", self.shown(request)));
        }
        let mut answer = match verdict {
            Verdict::Drop => "nobody for now".to_owned(),
            Verdict::To { member, is_safe, pins } => {
                let label = self.labels.iter().find(|(id, _)| *id == member).map_or("", |(_, label)| label.as_str());
                let mut words = vec![label];
                words.extend(is_safe.then_some("may be repeated"));
                words.extend(pins.then_some("and all that follow"));
                words.join(", ")
            }
        };
        if first.payload != payload {
            let changed = Head::split(&first.payload).map(|(_, bytes)| self.shown(bytes)).unwrap_or_default();
            answer.push_str(&format!("; as {changed}"));
        }
        Ok(Tried { request: self.shown(request), answer })
    }
}

fn first_line(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| matches!(byte, b'\r' | b'\n')).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).chars().filter(|letter| !letter.is_control()).take(80).collect()
}
