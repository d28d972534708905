//! What a router decides, beside a switch that has the members alone.

use std::collections::BTreeSet;

use margay_core::Instant;
use margay_ensemble::{Config, Joining, Kind, Lsn, Order, Switch};
use margay_wire::OwnFrameRepr;

use super::*;
use crate::module::sample;
use crate::protocol::Protocol;

struct Rig {
    router: Router,
    /// Who is a member: its own router has nothing to do.
    switch: Switch<Router>,
    ids: Vec<MemberId>,
}

impl Rig {
    fn new(policy: Policy, labels: &[&str]) -> Self {
        Self::of(Protocol::Memcached, policy, labels)
    }

    fn of(content: impl Into<Content>, policy: Policy, labels: &[&str]) -> Self {
        let content = content.into();
        let switch = Switch::new(Config::default(), Router::new(content, policy), 1 << 20);
        let mut rig = Self { router: Router::new(content, policy), switch, ids: Vec::new() };
        labels.iter().for_each(|label| rig.join(label));
        rig
    }

    fn join(&mut self, label: &str) {
        let joining = Joining { kind: Kind::Margay, to_member: Lsn(0), from_member: Lsn(0), window_bytes: 1 << 20 };
        let id = self.switch.join(&joining).expect("room");
        self.router.add_member(id);
        self.router.name(id, label);
        self.ids.push(id);
    }

    fn die(&mut self, at: usize) -> Vec<u32> {
        self.switch.died(Instant::ZERO, self.ids[at]);
        self.router.remove_member(self.ids[at]);
        self.lost()
    }

    fn lost(&mut self) -> Vec<u32> {
        let mut lost = self.router.take_lost();
        lost.sort_unstable();
        lost
    }

    /// Which member is given a request, and whether that is safe; `rtx` is kept with it.
    fn redirect(&mut self, head: Head, request: &str, rtx: &mut u64) -> Option<(usize, bool)> {
        let mut frame = frame(head.frame(request.as_bytes()));
        match self.router.redirect(&mut frame, self.switch.members(), rtx) {
            Verdict::To { member, is_safe, pins: false } => {
                Some((self.ids.iter().position(|id| *id == member).expect("a member"), is_safe))
            }
            Verdict::To { .. } => panic!("no member is for all frames"),
            Verdict::Drop => None,
        }
    }

    /// The same of a request that has not come before. Gives the member.
    fn ask(&mut self, number: u32, oldest: u32, request: &str) -> Option<usize> {
        self.redirect(Head { number, oldest }, request, &mut 0).map(|(at, _)| at)
    }

    fn answer(&mut self, number: u32, at: usize) {
        let mut frame = frame(Head { number, oldest: 0 }.frame(b"x\r\n"));
        self.router.answer(&mut frame, self.ids[at]);
    }

    fn may_go(&self, at: usize) -> bool {
        self.router.may_go(self.ids[at])
    }

    fn retire(&mut self, number: u32) {
        self.router.retire(rtx_of(number));
    }
}

fn frame<'a>(bytes: Vec<u8>) -> Frame<'a> {
    Frame { connection: 0, order: Order::Member, is_whole: true, payload: Cow::Owned(bytes) }
}

#[test]
fn keys_go_where_the_ring_has_them_and_one_that_drains_counts_as_gone() {
    let mut rig = Rig::new(Policy::Ketama, &["a", "b", "c"]);
    let ring = |labels: &[&str], key: &str| Ring::new(labels.iter().copied()).servers_of(key.as_bytes()).next();
    for number in 0..50 {
        let key = format!("key:{number}");
        assert_eq!(rig.ask(number, 0, &format!("set {key} 0 0 1\r\nx\r\n")), ring(&["a", "b", "c"], &key), "{key}");
    }
    rig.switch.drain(Instant::ZERO, rig.ids[2]);
    for number in 50..100 {
        let key = format!("key:{number}");
        assert_eq!(rig.ask(number, 0, &format!("get {key}\r\n")), ring(&["a", "b"], &key), "{key}");
    }
    rig.join("d");
    for number in 100..150 {
        let key = format!("key:{number}");
        let at = rig.ask(number, 0, &format!("get {key}\r\n"));
        let expected = ring(&["a", "b", "d"], &key).map(|at| if at == 2 { 3 } else { at });
        assert_eq!(at, expected, "{key}");
    }
    assert!(rig.ask(150, 0, "version\r\n").is_some_and(|at| at != 2), "it is of no key");
}

/// As they are between framers.
#[test]
fn keys_of_redis_go_where_the_same_ring_has_them_or_their_tag() {
    let mut rig = Rig::of(Protocol::Resp, Policy::Ketama, &["a", "b", "c"]);
    let ring = Ring::new(["a", "b", "c"]);
    for number in 0..50 {
        let key = format!("key:{number}");
        let at = ring.servers_of(key.as_bytes()).next();
        for request in [
            format!("*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len()),
            format!(">2\r\n$4\r\nINCR\r\n${}\r\nx{{{key}}}y\r\n", key.len() + 4),
            format!("={}\r\n{key}\r\n*4\r\n$4\r\nEVAL\r\n$9000\r\nreturn", key.len()),
        ] {
            let mut rtx = 0;
            let oldest = number * 3;
            let sent = rig.redirect(Head { number: oldest, oldest }, &request, &mut rtx);
            assert_eq!(sent.map(|(at, is_safe)| (Some(at), is_safe)), Some((at, request.contains("GET"))), "{request}");
        }
    }
    let mut rtx = 0;
    let head = Head { number: 200, oldest: 200 };
    rig.redirect(head, "*2\r\n$4\r\nINCR\r\n$1\r\na\r\n", &mut rtx).expect("a member");
    let mut refused = frame(head.frame(b"x"));
    rig.router.refuse(&mut refused, rig.switch.members(), &mut rtx).expect("a member");
    assert_eq!(*refused.payload, head.answered(format!("-ERR {MEMBER_DIED}\r\n").as_bytes()));
}

#[test]
fn members_are_asked_one_after_the_other_and_connections_begin_anywhere() {
    let mut rig = Rig::new(Policy::RoundRobin, &["a", "b", "c"]);
    rig.router.add_connection(4);
    let turns: Vec<Option<usize>> = (0..6).map(|number| rig.ask(number, 0, "get same\r\n")).collect();
    assert_eq!(turns, [1, 2, 0, 1, 2, 0].map(Some));
    rig.die(0);
    let turns: Vec<Option<usize>> = (6..10).map(|number| rig.ask(number, 0, "get same\r\n")).collect();
    assert!(turns == [1, 2, 1, 2].map(Some) || turns == [2, 1, 2, 1].map(Some), "{turns:?}");
    rig.die(1);
    rig.die(2);
    assert_eq!(rig.ask(10, 0, "get same\r\n"), None, "there is none");
}

#[test]
fn a_member_may_go_when_it_has_answered_all() {
    let mut rig = Rig::new(Policy::RoundRobin, &["a", "b"]);
    assert_eq!((rig.ask(0, 0, "incr a 1\r\n"), rig.ask(1, 0, "incr b 1\r\n")), (Some(0), Some(1)));
    assert_eq!(rig.router.open_requests(), 2);
    rig.answer(0, 1);
    assert!(!rig.may_go(0) && !rig.may_go(1), "the answer of one that was not asked");
    rig.answer(0, 0);
    // A repeated packet of it.
    rig.answer(0, 0);
    assert!(rig.may_go(0) && !rig.may_go(1));
    assert_eq!(rig.router.open_requests(), 1);
    rig.answer(9, 1);
    assert!(!rig.may_go(1), "nobody has asked that");
}

#[test]
fn what_a_dead_member_has_acknowledged_and_not_answered_is_lost() {
    let mut rig = Rig::new(Policy::RoundRobin, &["a", "b"]);
    for number in 0..6 {
        assert_eq!(rig.ask(number, 0, "incr a 1\r\n"), Some(number as usize % 2));
    }
    rig.retire(0);
    rig.retire(1);
    assert_eq!(rig.die(0), [0], "the others come again");
    assert!(rig.may_go(0) && !rig.may_go(1));
    // Its acknowledgement was under way.
    rig.retire(2);
    rig.retire(2);
    assert_eq!(rig.lost(), [2]);
    rig.retire(3);
    assert_eq!(rig.lost(), Vec::<u32>::new(), "that member lives");
}

/// Of an answer that has begun, the rest may be missing.
#[test]
fn what_is_answered_in_part_is_lost_with_its_member() {
    let mut rig = Rig::new(Policy::RoundRobin, &["a", "b"]);
    rig.ask(0, 0, "get a\r\n");
    rig.retire(0);
    rig.answer(0, 0);
    assert!(rig.may_go(0));
    assert_eq!(rig.die(0), [0]);
}

#[test]
fn what_comes_again_after_a_death_goes_to_another_if_it_is_safe() {
    let mut rig = Rig::new(Policy::Ketama, &["a", "b"]);
    let mut rtx = 0;
    let head = Head { number: 7, oldest: 7 };
    let (first, is_safe) = rig.redirect(head, "get key:1\r\n", &mut rtx).expect("a member");
    assert!(is_safe && rtx != 0);
    assert_eq!(rig.die(first), Vec::<u32>::new());
    assert_eq!(rig.redirect(head, "get key:1\r\n", &mut rtx), Some((1 - first, true)));
    assert!(!rig.may_go(1 - first));
    rig.router.retire(rtx);
    assert_eq!(rig.die(1 - first), [7]);
    let mut rtx = 0;
    let mut rig = Rig::new(Policy::Ketama, &["a"]);
    assert_eq!(rig.redirect(head, "incr key:1 1\r\n", &mut rtx), Some((0, false)));
}

#[test]
fn what_is_not_safe_is_refused_in_the_programs_words_each_time_it_comes() {
    let mut rig = Rig::new(Policy::RoundRobin, &["a", "b"]);
    let mut rtx = 0;
    let head = Head { number: 3, oldest: 1 };
    assert_eq!(rig.redirect(head, "incr a 1\r\n", &mut rtx), Some((0, false)));
    rig.die(0);
    let expected = head.answered(&Protocol::Memcached.error(MEMBER_DIED));
    let mut first = frame(head.frame(b"incr a 1\r\n"));
    let member = rig.router.refuse(&mut first, rig.switch.members(), &mut rtx);
    assert_eq!((member, &*first.payload), (Some(rig.ids[1]), &expected[..]));
    assert!(!rig.may_go(1), "it answers for the dead one");
    let mut again = frame(head.frame(b"incr a 1\r\n"));
    rig.router.again(&mut again, &mut rtx);
    assert_eq!(*again.payload, expected);
    // It dies, too, before it has answered.
    rig.router.retire(rtx);
    assert_eq!(rig.die(1), [3]);
    let mut third = frame(head.frame(b"incr a 1\r\n"));
    assert_eq!(rig.router.refuse(&mut third, rig.switch.members(), &mut rtx), None, "nobody is left");
    // One that was not refused comes again as it was.
    let mut other = frame(head.frame(b"incr a 1\r\n"));
    rig.router.again(&mut other, &mut rtx_of(3));
    assert_eq!(*other.payload, head.frame(b"incr a 1\r\n"));
}

#[test]
fn requests_before_the_oldest_are_forgotten() {
    let mut rig = Rig::new(Policy::RoundRobin, &["a"]);
    let before_wrap = u32::MAX - 1;
    for step in 0..4 {
        assert_eq!(rig.ask(before_wrap.wrapping_add(step), before_wrap, "incr a 1\r\n"), Some(0), "{step}");
    }
    assert_eq!(rig.router.requests.len(), 4);
    assert_eq!(rig.ask(2, 1, "incr a 1\r\n"), Some(0), "all but two are answered");
    assert_eq!((rig.router.requests.len(), rig.router.open_requests()), (2, 2));
    rig.answer(1, 0);
    assert!(!rig.may_go(0));
    assert_eq!(rig.ask(u32::MAX, u32::MAX, "incr a 1\r\n"), None, "a late one, whose answer the client has");
    assert_eq!(rig.ask(3, u32::MAX, "incr a 1\r\n"), Some(0), "overtaken, and still of interest");
    assert_eq!(rig.router.requests.len(), 3);
    // Far on: nothing of what was is.
    assert_eq!(rig.ask(3 * REQUESTS_MAX, 3 * REQUESTS_MAX, "incr a 1\r\n"), Some(0));
    assert_eq!(rig.router.requests.len(), 1);
    rig.answer(3 * REQUESTS_MAX, 0);
    assert!(rig.may_go(0));
    assert_eq!(rig.die(0), Vec::<u32>::new());
}

#[test]
fn one_connection_has_so_many_requests_and_no_more() {
    let mut rig = Rig::new(Policy::RoundRobin, &["a"]);
    assert_eq!(rig.ask(0, 0, "incr a 1\r\n"), Some(0));
    assert_eq!(rig.ask(REQUESTS_MAX - 1, 0, "incr a 1\r\n"), Some(0));
    assert_eq!(rig.ask(REQUESTS_MAX, 0, "incr a 1\r\n"), None);
    assert_eq!(rig.ask(REQUESTS_MAX, 1, "incr a 1\r\n"), Some(0));
    assert_eq!(rig.router.requests.len(), 2);
}

/// The client's word of what is answered is the only one about a request that went nowhere.
#[test]
fn what_a_module_keeps_with_a_request_goes_with_the_request() {
    let mut rig = Rig::new(Policy::RoundRobin, &[]);
    rig.router = Router::guided(Protocol::Memcached, Guest::start(&sample("keeps")).expect("it starts"));
    rig.join("a");
    let kept = |rig: &Rig| rig.router.guided.as_ref().expect("there is a module").kept_count();
    for number in 0..1000 {
        let is_placed = number % 2 == 1;
        assert_eq!(rig.ask(number, number, "get a\r\n").is_some(), is_placed);
        assert!(kept(&rig) <= 2, "{number}: {}", kept(&rig));
        if is_placed {
            rig.retire(number);
        }
    }
    rig.ask(1000, 1000, "get a\r\n");
    rig.ask(1001, 1000, "get a\r\n");
    assert_eq!(kept(&rig), 2);
    // Far on: what is in the switch's ring alone may come again.
    rig.ask(1003 + 2 * REQUESTS_MAX, 1003 + 2 * REQUESTS_MAX, "get a\r\n");
    assert_eq!(kept(&rig), 2);
    rig.retire(1001);
    assert_eq!(kept(&rig), 1);
}

#[test]
fn what_is_no_frame_goes_nowhere() {
    let mut rig = Rig::new(Policy::Ketama, &["a"]);
    for bytes in [vec![], vec![0; 8]] {
        let verdict = rig.router.redirect(&mut frame(bytes), rig.switch.members(), &mut 0);
        assert_eq!(verdict, Verdict::Drop);
    }
    assert_eq!(rig.router.refuse(&mut frame(vec![0; 8]), rig.switch.members(), &mut 0), None);
}

/// A frame of a program's own, with these numbers.
fn own<'a>(head: Head, wants_answer: bool, is_safe: bool, key: &[u8]) -> Frame<'a> {
    let Head { number, oldest } = head;
    let repr = OwnFrameRepr { number, oldest, is_safe, wants_answer, is_answer: false, key, payload: b"data" };
    let mut bytes = vec![0; repr.len()];
    repr.emit(&mut bytes).expect("room");
    frame(bytes)
}

#[test]
fn frames_go_by_their_keys_and_without_one_by_turns() {
    let mut rig = Rig::of(Content::Frames, Policy::Ketama, &["a", "b", "c"]);
    let ring = Ring::new(["a", "b", "c"]);
    let to = |rig: &mut Rig, number, key: &str| {
        let mut frame = own(Head { number, oldest: number }, false, true, key.as_bytes());
        match rig.router.redirect(&mut frame, rig.switch.members(), &mut 0) {
            Verdict::To { member, is_safe: true, pins: false } => rig.ids.iter().position(|id| *id == member),
            other => panic!("{other:?}"),
        }
    };
    for number in 0..30 {
        let key = format!("key:{number}");
        assert_eq!(to(&mut rig, number, &key), ring.servers_of(key.as_bytes()).next(), "{key}");
    }
    let turns: BTreeSet<_> = (30..33).map(|number| to(&mut rig, number, "")).collect();
    assert_eq!(turns.len(), 3);
    assert!((0..3).all(|at| rig.may_go(at)), "nobody wants an answer");
    assert!(rig.router.requests.is_empty());
}

#[test]
fn a_member_stays_for_the_answers_that_are_wanted_of_it_and_the_client_hears_of_those_that_will_not_come() {
    let mut rig = Rig::of(Content::Frames, Policy::Ketama, &["a"]);
    let head = Head { number: 5, oldest: 5 };
    let mut rtx = 0;
    rig.router.redirect(&mut own(head, true, false, b""), rig.switch.members(), &mut rtx);
    rig.router.retire(rtx);
    assert!(!rig.may_go(0));
    // What is no answer is none, whatever its number.
    rig.router.answer(&mut own(head, false, false, b""), rig.ids[0]);
    assert!(!rig.may_go(0));
    let mut answer = vec![0; 32];
    let repr = OwnFrameRepr { number: 5, is_answer: true, payload: b"done", ..OwnFrameRepr::default() };
    let len = repr.emit(&mut answer).expect("room");
    answer.truncate(len);
    rig.router.answer(&mut frame(answer), rig.ids[0]);
    assert!(rig.may_go(0));
    rig.router.redirect(&mut own(Head { number: 6, oldest: 6 }, true, false, b""), rig.switch.members(), &mut 0);
    rig.retire(6);
    assert_eq!(rig.die(0), [6]);
}

#[test]
fn a_frame_that_is_not_safe_is_given_nobody_else_and_the_client_hears_so_once() {
    let mut rig = Rig::of(Content::Frames, Policy::RoundRobin, &["a", "b"]);
    let head = Head { number: 3, oldest: 3 };
    let mut rtx = 0;
    rig.router.redirect(&mut own(head, false, false, b""), rig.switch.members(), &mut rtx);
    assert_eq!(rig.die(0), Vec::<u32>::new());
    for _ in 0..2 {
        let mut refused = own(head, false, false, b"");
        assert_eq!(rig.router.refuse(&mut refused, rig.switch.members(), &mut rtx), Some(rig.ids[1]));
        assert_eq!(*refused.payload, [0, 0, 0, 3, 0, 0, 0, 3, 0]);
        assert_eq!(OwnFrameRepr::parse(&refused.payload), None);
    }
    assert_eq!(rig.lost(), [3]);
    let mut again = own(head, false, false, b"");
    rig.router.again(&mut again, &mut rtx);
    assert_eq!(again.payload.len(), 9, "each time it comes");
    assert!(rig.may_go(1));
}
