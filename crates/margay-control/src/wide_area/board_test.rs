use std::collections::VecDeque;

use margay_core::key::HostPublic;
use margay_core::name::ServiceId;
use margay_core::rng::Rng;

use super::*;

const AUTHORITY: [u8; 8] = [5; 8];
/// Random worlds, and what happens in each.
const SEEDS: u64 = 200;
const STEPS: usize = 300;

fn key(n: usize) -> HostPublic {
    HostPublic([u8::try_from(n).expect("few") + 1; 32])
}

fn prefix(n: u8) -> Prefix {
    let mut id = ServiceId::default();
    id.0[..8].copy_from_slice(&AUTHORITY);
    id.0[8] = n;
    Prefix::new(id, 96)
}

fn site(n: usize) -> String {
    format!("site{n}")
}

fn link_to(n: usize, joined: bool) -> Link {
    Link { host: key(n).id(), authority: AUTHORITY, joined }
}

fn neighbour(n: usize, relation: Relation) -> Neighbour {
    Neighbour { site: site(n), relation, preference: 100, weight: 100 }
}

/// What router `n` says of what it serves itself.
fn served(n: usize, of: u8, scope: Scope) -> Announcement {
    let path = vec![Stage { host: key(n).id(), site: site(n) }];
    let name = String::new();
    Announcement {
        prefix: prefix(of),
        name,
        scope,
        path,
        weight: 100,
        origin: key(n),
        proof: Vec::new(),
        not_after_s: 0,
    }
}

/// The same as heard by way of others, the nearest first.
fn by_way(path: &[usize], of: u8) -> Announcement {
    let stage = |n: &usize| Stage { host: key(*n).id(), site: site(*n) };
    let last = *path.last().expect("a path");
    Announcement { path: path.iter().map(stage).collect(), ..served(last, of, Scope::World) }
}

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn board(n: usize) -> Board {
    Board::new(key(n).id(), &site(n))
}

fn hosts(announcement: &Announcement) -> Vec<HostId> {
    announcement.path.iter().map(|stage| stage.host).collect()
}

#[test]
fn neighbours_above_and_beside_hear_what_is_served_here_or_below_and_nothing_else() {
    let mut hub = board(0);
    let all = [(1, Relation::Above), (2, Relation::Beside), (3, Relation::Below), (4, Relation::Below)];
    let mut tickets = BTreeMap::new();
    for (n, relation) in all {
        tickets.insert(n, hub.arrive(link_to(n, false), neighbour(n, relation)).expect("room"));
    }
    let words = |hub: &mut Board, n: usize| -> Vec<String> {
        let words = hub.take_words(&link_to(n, false), tickets[&n], 100);
        let said = |word: Word| match word {
            Word::Announce(one) => format!("{} by {}", one.prefix.id.0[8], one.sites().join(">")),
            Word::Retract(prefix) => format!("not {}", prefix.id.0[8]),
        };
        words.into_iter().map(said).collect()
    };
    hub.set_served(at(0), prefix(1), Some(served(0, 1, Scope::World)));
    hub.hear(at(0), &link_to(3, false), 3, by_way(&[3], 2)).expect("taken");
    hub.hear(at(0), &link_to(2, false), 2, by_way(&[2], 3)).expect("taken");
    for n in [1, 2] {
        assert_eq!(words(&mut hub, n), ["1 by site0", "2 by site0>site3"], "to {n}");
        assert!(words(&mut hub, n).is_empty(), "said once");
    }
    assert!([3, 4].iter().all(|n| words(&mut hub, *n).is_empty()), "those below come here anyway");
    // A second site below, farther away: nothing that others would have to know.
    hub.hear(at(0), &link_to(4, false), 4, by_way(&[4, 9], 2)).expect("taken");
    assert!(words(&mut hub, 1).is_empty());
    hub.retracted(&link_to(3, false), 3, &prefix(2));
    assert_eq!(words(&mut hub, 1), ["2 by site0>site4>site9"]);
    assert!(hub.leave(&link_to(4, false), 4) && !hub.leave(&link_to(4, false), 4));
    assert_eq!(words(&mut hub, 1), ["not 2"]);
    // For the region alone: told, and passed on by nobody.
    hub.hear(at(0), &link_to(3, false), 3, served(3, 4, Scope::Region)).expect("taken");
    hub.set_served(at(0), prefix(5), Some(served(0, 5, Scope::Region)));
    assert_eq!(words(&mut hub, 1), ["5 by site0"]);
}

#[test]
fn what_comes_and_goes_rests() {
    let mut board = board(0);
    let link = link_to(1, true);
    let ticket = board.arrive(link, neighbour(1, Relation::Above)).expect("room");
    let own = || Some(served(0, 1, Scope::World));
    let mut count = 0;
    for round in 0..100 {
        board.set_served(at(round * 10), prefix(1), own());
        count += board.take_words(&link, ticket, 9).len();
        board.set_served(at(round * 10 + 5), prefix(1), None);
        count += board.take_words(&link, ticket, 9).len();
        board.tick(at(round * 10 + 6));
    }
    assert_eq!(count, 2, "told and retracted, and then it rests");
    board.set_served(at(1001), prefix(1), own());
    assert!(board.take_words(&link, ticket, 9).is_empty());
    assert_eq!(board.deadline(), Some(at(1005)));
    board.tick(at(1005));
    assert!(matches!(board.take_words(&link, ticket, 9)[..], [Word::Announce(_)]));
}

#[test]
fn what_makes_no_sense_is_refused_and_takes_what_was_said_before_with_it() {
    let mut board = board(0);
    let (below, above) = (link_to(1, false), link_to(2, true));
    let ticket = board.arrive(below, neighbour(1, Relation::Below)).expect("room");
    let above_ticket = board.arrive(above, neighbour(2, Relation::Above)).expect("room");
    let mut foreign = by_way(&[1], 1);
    foreign.prefix.id.0[0] = 9;
    let cases = [
        (by_way(&[3, 1], 1), Fault::Invalid("its path begins at another router than the one that says it")),
        (by_way(&[1, 0, 3], 1), Fault::Loop("site3 > site0 > site1".to_owned())),
        (by_way(&[1, 3, 3], 1), Fault::Invalid("a router is on its path twice")),
        (foreign, Fault::Invalid("the names are of another authority than the stream")),
    ];
    for (announcement, fault) in cases {
        let prefix = announcement.prefix;
        board.hear(at(0), &below, ticket, by_way(&[1], 1)).expect("taken");
        assert_eq!(board.hear(at(1), &below, ticket, announcement), Err(fault));
        assert_eq!(board.candidates(&prefix).len(), 0);
    }
    assert_eq!(board.hear(at(0), &above, above_ticket, by_way(&[2], 1)), Err(Fault::FromAbove));
    assert!(board.hear(at(0), &below, ticket + 7, by_way(&[1], 1)).is_err(), "of another stream");
    assert_eq!(board.candidates(&prefix(1)).len(), 1, "that of another stream changes nothing");
    board.retracted(&below, ticket, &prefix(1));
    for n in 0..HEARD_MAX {
        let mut one = by_way(&[1], 0);
        one.prefix.id.0[8..12].copy_from_slice(&u32::try_from(n).expect("few").to_be_bytes());
        board.hear(at(0), &below, ticket, one).expect("room");
    }
    let mut one = by_way(&[1], 0);
    one.prefix.id.0[8] = 9;
    assert_eq!(board.hear(at(0), &below, ticket, one), Err(Fault::Full(HEARD_MAX)));
    assert_eq!(board.prefixes(), HEARD_MAX);
}

#[test]
fn the_best_way_is_below_then_preferred_then_short() {
    let mut board = board(0);
    let preferred = |n, relation, preference| Neighbour { preference, ..neighbour(n, relation) };
    let all = [
        (1, preferred(1, Relation::Beside, 900), vec![1]),
        (2, preferred(2, Relation::Below, 100), vec![2, 7]),
        (3, preferred(3, Relation::Below, 100), vec![3, 8]),
        (4, preferred(4, Relation::Below, 100), vec![4]),
        (5, preferred(5, Relation::Below, 200), vec![5, 6, 9]),
    ];
    for (n, neighbour, path) in all {
        let ticket = board.arrive(link_to(n, false), neighbour).expect("room");
        board.hear(at(0), &link_to(n, false), ticket, by_way(&path, 1)).expect("taken");
    }
    let ranked: Vec<(HostId, usize)> =
        board.candidates(&prefix(1)).iter().map(|one| (one.link.host, one.rank)).collect();
    let wanted = [(5, 0), (4, 1), (2, 2), (3, 2), (1, 3)].map(|(n, rank): (usize, usize)| (key(n).id(), rank));
    let mut sorted = ranked.clone();
    sorted.sort_by_key(|(host, rank)| (*rank, *host));
    let mut expected = wanted.to_vec();
    expected.sort_by_key(|(host, rank)| (*rank, *host));
    assert_eq!(sorted, expected);
    assert!(ranked.is_sorted_by_key(|(_, rank)| *rank));
}

#[test]
fn a_stream_that_takes_over_leaves_no_gap() {
    let mut board = board(0);
    let link = link_to(1, false);
    let first = board.arrive(link, neighbour(1, Relation::Below)).expect("room");
    for of in [1, 2] {
        board.hear(at(0), &link, first, by_way(&[1], of)).expect("taken");
    }
    let second = board.arrive(link, neighbour(1, Relation::Below)).expect("room");
    assert_eq!(board.candidates(&prefix(1)).len(), 1);
    board.hear(at(5), &link, second, by_way(&[1], 1)).expect("taken");
    assert!(board.hear(at(6), &link, first, by_way(&[9], 1)).is_err(), "the earlier stream has no say");
    board.retracted(&link, first, &prefix(1));
    assert!(!board.leave(&link, first), "it ends, and takes nothing with it");
    board.sweep(&link, second);
    assert_eq!((board.candidates(&prefix(1)).len(), board.candidates(&prefix(2)).len()), (1, 0));
    assert_eq!(board.candidates(&prefix(1))[0].heard.since, at(0), "it holds since it was said first");
}

#[test]
fn what_was_declined_is_told_again_when_something_changes() {
    let mut board = board(0);
    let link = link_to(1, true);
    let ticket = board.arrive(link, neighbour(1, Relation::Above)).expect("room");
    board.set_served(at(0), prefix(1), Some(served(0, 1, Scope::World)));
    assert_eq!(board.take_words(&link, ticket, 9).len(), 1);
    board.declined(&link, ticket, &prefix(1), "no".to_owned());
    assert_eq!(board.told(&link).map(|(_, why)| why).collect::<Vec<_>>(), ["no"]);
    assert!(board.take_words(&link, ticket, 9).is_empty());
    board.tell_declined_again(&link, ticket);
    assert_eq!(board.take_words(&link, ticket, 9).len(), 1);
    assert_eq!(board.told(&link).map(|(_, why)| why).collect::<Vec<_>>(), [""]);
}

/// Routers that have joined others, with words on their way between them.
struct World {
    rng: Rng,
    now: u64,
    boards: Vec<Board>,
    edges: Vec<Edge>,
    /// By router and prefix.
    served: BTreeMap<(usize, u8), Scope>,
}

/// A stream: `low` has joined `high`.
struct Edge {
    low: usize,
    high: usize,
    beside: bool,
    /// Of each end for the other.
    preference: [u32; 2],
    /// The tickets at both ends, while it is up.
    tickets: Option<[u64; 2]>,
    /// From low to high, and back.
    on_the_way: [VecDeque<Word>; 2],
}

/// What a way is ranked by, its routers, and whether it may be passed on.
type Way = ((Relation, Reverse<u32>, usize, Link), Vec<HostId>, u8);

const PREFIXES: u8 = 3;

impl World {
    /// Routers join only those with lower numbers, so nobody is above itself.
    fn new(seed: u64) -> Self {
        let mut bytes = [3; 32];
        bytes[..8].copy_from_slice(&seed.to_be_bytes());
        let mut world =
            Self { rng: Rng::new(bytes), now: 0, boards: Vec::new(), edges: Vec::new(), served: BTreeMap::new() };
        let count = 2 + world.draw(9);
        world.boards = (0..count).map(board).collect();
        for low in 1..count {
            for high in 0..low {
                if world.draw(3) == 0 {
                    let (beside, preference) = (world.draw(3) == 0, [0, 1].map(|_| 100 * (world.rng.u32() % 3)));
                    let on_the_way = [VecDeque::new(), VecDeque::new()];
                    world.edges.push(Edge { low, high, beside, preference, tickets: None, on_the_way });
                }
            }
        }
        world
    }

    fn draw(&mut self, below: usize) -> usize {
        self.rng.u32() as usize % below
    }

    fn set_edge(&mut self, at: usize, up: bool) {
        let edge = &mut self.edges[at];
        let links = [link_to(edge.high, true), link_to(edge.low, false)];
        match (edge.tickets, up) {
            (None, true) => {
                let (to_high, to_low) =
                    if edge.beside { (Relation::Beside, Relation::Beside) } else { (Relation::Above, Relation::Below) };
                let of = |n, relation, preference| Neighbour { preference, ..neighbour(n, relation) };
                let low = self.boards[edge.low].arrive(links[0], of(edge.high, to_high, edge.preference[0]));
                let high = self.boards[edge.high].arrive(links[1], of(edge.low, to_low, edge.preference[1]));
                edge.tickets = Some([low.expect("room"), high.expect("room")]);
            }
            (Some(tickets), false) => {
                self.boards[edge.low].leave(&links[0], tickets[0]);
                self.boards[edge.high].leave(&links[1], tickets[1]);
                edge.tickets = None;
                edge.on_the_way = [VecDeque::new(), VecDeque::new()];
            }
            _ => {}
        }
    }

    /// Takes words out at one end, and brings some in at the other. Whether there was anything.
    fn carry(&mut self, at: usize, back: bool, max: usize) -> bool {
        let edge = &mut self.edges[at];
        let Some(tickets) = edge.tickets else { return false };
        let ends =
            [(edge.low, link_to(edge.high, true), tickets[0]), (edge.high, link_to(edge.low, false), tickets[1])];
        let [(from, from_link, from_ticket), (to, to_link, to_ticket)] = if back { [ends[1], ends[0]] } else { ends };
        let queue = &mut edge.on_the_way[usize::from(back)];
        queue.extend(self.boards[from].take_words(&from_link, from_ticket, max));
        let count = queue.len().min(max);
        for word in queue.drain(..count) {
            match word {
                // In these worlds everything that is told is taken.
                Word::Announce(one) => self.boards[to]
                    .hear(super::Instant::from_millis(self.now), &to_link, to_ticket, one)
                    .expect("taken"),
                Word::Retract(prefix) => self.boards[to].retracted(&to_link, to_ticket, &prefix),
            }
        }
        count > 0
    }

    fn step(&mut self) {
        self.now += u64::from(self.rng.u32() % 400);
        match self.draw(8) {
            0 if !self.edges.is_empty() => {
                let (at, up) = (self.draw(self.edges.len()), self.draw(3) > 0);
                self.set_edge(at, up);
            }
            1 | 2 => {
                let (n, of) = (self.draw(self.boards.len()), (self.rng.u32() % u32::from(PREFIXES)) as u8);
                let scope = if self.draw(4) == 0 { Scope::Region } else { Scope::World };
                let said = (!self.served.contains_key(&(n, of))).then(|| served(n, of, scope));
                self.boards[n].set_served(at(self.now), prefix(of), said.clone());
                match said {
                    Some(_) => drop(self.served.insert((n, of), scope)),
                    None => drop(self.served.remove(&(n, of))),
                }
            }
            3 => {
                let n = self.draw(self.boards.len());
                self.boards[n].tick(at(self.now));
            }
            _ if !self.edges.is_empty() => {
                let (at, back, max) = (self.draw(self.edges.len()), self.draw(2) == 0, 1 + self.draw(3));
                self.carry(at, back, max);
            }
            _ => {}
        }
    }

    /// Lets everything that is on its way arrive. Fails if that never ends.
    fn settle(&mut self) {
        self.now += 10_000;
        let now = at(self.now);
        self.boards.iter_mut().for_each(|board| board.tick(now));
        for _ in 0..10_000 {
            let mut moved = false;
            for edge in 0..self.edges.len() {
                moved |= self.carry(edge, false, 100) | self.carry(edge, true, 100);
            }
            if !moved {
                return;
            }
        }
        panic!("the routers never agree");
    }

    /// Neighbours of a router: number, relation, this one's preference, and the link.
    fn around(&self, n: usize) -> Vec<(usize, Relation, u32, Link)> {
        let mut around = Vec::new();
        for edge in self.edges.iter().filter(|edge| edge.tickets.is_some()) {
            let relation = |other| if edge.beside { Relation::Beside } else { other };
            if edge.low == n {
                around.push((edge.high, relation(Relation::Above), edge.preference[0], link_to(edge.high, true)));
            }
            if edge.high == n {
                around.push((edge.low, relation(Relation::Below), edge.preference[1], link_to(edge.low, false)));
            }
        }
        around
    }

    /// What router `n` tells `to`, which is above or beside: found by looking at the whole world.
    fn told_by(&self, n: usize, of: u8, to: usize) -> Option<(Vec<HostId>, Scope)> {
        if let Some(scope) = self.served.get(&(n, of)) {
            return Some((vec![key(n).id()], *scope));
        }
        let may_be_told = |(_, path, scope): &Way| *scope == 1 && !path.contains(&key(to).id());
        let (_, path, _) = self.ways(n, of, Relation::Below).into_iter().filter(may_be_told).min()?;
        Some((std::iter::once(key(n).id()).chain(path).collect(), Scope::World))
    }

    /// The ways that router `n` knows by those below, or by those beside as well; best first.
    fn ways(&self, n: usize, of: u8, highest: Relation) -> Vec<Way> {
        let mut ways = Vec::new();
        for (other, relation, preference, link) in self.around(n) {
            if relation > highest {
                continue;
            }
            let Some((path, scope)) = self.told_by(other, of, n) else { continue };
            if !path.contains(&key(n).id()) {
                ways.push(((relation, Reverse(preference), path.len(), link), path, u8::from(scope == Scope::World)));
            }
        }
        ways.sort();
        ways
    }

    fn check(&self, seed: u64) {
        for n in 0..self.boards.len() {
            for of in 0..PREFIXES {
                let found: Vec<Vec<HostId>> =
                    self.boards[n].candidates(&prefix(of)).iter().map(|one| hosts(&one.heard.announcement)).collect();
                let wanted: Vec<Vec<HostId>> =
                    self.ways(n, of, Relation::Beside).into_iter().map(|(_, path, _)| path).collect();
                assert_eq!(found, wanted, "seed {seed}: ways of router {n} to {of}");
                self.walk(&mut vec![n], None, of, seed);
            }
        }
    }

    /// Follows every way that a first packet may take from here: by the best that was announced, and up where nothing
    /// was.
    fn walk(&self, passed: &mut Vec<usize>, came: Option<Relation>, of: u8, seed: u64) {
        let n = passed[passed.len() - 1];
        if self.served.contains_key(&(n, of)) {
            return;
        }
        let is_inward = matches!(came, Some(Relation::Above | Relation::Beside));
        let around = self.around(n);
        let before = passed.len().checked_sub(2).map(|at| key(passed[at]).id());
        let candidates = self.boards[n].candidates(&prefix(of));
        let usable = candidates
            .iter()
            .filter(|one| (!is_inward || one.neighbour.relation == Relation::Below) && Some(one.link.host) != before);
        let best = usable.clone().map(|one| one.rank).next();
        let of_link = |link: Link| around.iter().find(|(.., known)| *known == link).map(|(to, ..)| *to);
        let mut next: Vec<usize> =
            usable.take_while(|one| Some(one.rank) == best).filter_map(|one| of_link(one.link)).collect();
        assert!(
            came != Some(Relation::Above) || !next.is_empty(),
            "seed {seed}: {passed:?} was led here in vain for {of}"
        );
        if next.is_empty() && !is_inward {
            next = around.iter().filter(|(_, relation, ..)| *relation == Relation::Above).map(|(to, ..)| *to).collect();
        }
        for to in next {
            assert!(!passed.contains(&to), "seed {seed}: round by {passed:?} to {to}");
            let back = self.around(to).into_iter().find(|(other, ..)| *other == n);
            passed.push(to);
            self.walk(passed, back.map(|(_, relation, ..)| relation), of, seed);
            passed.pop();
        }
    }
}

#[test]
fn in_random_worlds_routers_agree_with_who_sees_all_of_it_and_nothing_goes_round() {
    let seeds = std::env::var("MARGAY_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(SEEDS);
    let mut ways = 0;
    for seed in 0..seeds {
        let mut world = World::new(seed);
        for edge in 0..world.edges.len() {
            world.set_edge(edge, true);
        }
        for _ in 0..STEPS {
            world.step();
        }
        world.settle();
        world.check(seed);
        ways += world.boards.iter().map(Board::prefixes).sum::<usize>();
    }
    assert!(ways > 2 * usize::try_from(seeds).expect("few"), "there was something to agree about: {ways}");
}
