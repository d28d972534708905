//! Members that die, come back and are withdrawn: whatever says so first, each death is one, and each request is
//! answered, or its client is told.

use super::test::{Rig, host};
use super::*;

/// How a switch hears that a member's process is gone, and in what order.
#[derive(Clone, Copy, Debug)]
enum Word {
    List,
    /// Its socket has failed.
    Socket,
    /// Its flow goes to another host.
    Elsewhere,
    /// Nothing comes.
    Silence,
}

fn kill(rig: &mut Rig, words: &[Word]) {
    rig.end(2).is_cut = true;
    for word in words {
        match word {
            Word::List => {
                rig.end(2).is_unlisted = true;
                rig.list();
            }
            Word::Socket => rig.worker.link_failed(rig.now, host(2), "its flow has ended"),
            Word::Elsewhere => (rig.end(2).is_cut, rig.end(2).is_elsewhere) = (false, true),
            Word::Silence => rig.pass(700),
        }
        rig.pass(1);
    }
    rig.pass(700);
}

const ORDERS: [&[Word]; 9] = [
    &[Word::List],
    &[Word::Socket],
    &[Word::Elsewhere],
    &[Word::List, Word::Socket],
    &[Word::Socket, Word::List],
    &[Word::List, Word::Elsewhere],
    &[Word::Elsewhere, Word::List],
    &[Word::Silence, Word::List, Word::Socket],
    &[Word::List, Word::Silence, Word::Elsewhere],
];

#[test]
fn a_death_with_requests_is_one_whatever_says_so_first() {
    for words in ORDERS {
        let mut rig = Rig::new(&[1, 2]);
        rig.pass(10);
        let numbers = rig.ask_the_mute(2);
        kill(&mut rig, words);
        let lost = rig.lost();
        assert_eq!((lost.len(), rig.worker.totals.deaths), (2, 1), "{words:?}");
        assert!(lost.iter().all(|number| numbers.contains(number)), "{words:?}");
        rig.replace(2);
        rig.list();
        rig.pass(500);
        assert!(rig.is_up(2) && rig.worker.legs.len() == 2, "{words:?}: it is a member again");
        rig.end(2).is_mute = true;
        rig.end(1).is_mute = true;
        for n in 0..2 {
            rig.ask(&format!("incr again{n} 1\r\n"));
        }
        rig.pass(60);
        kill(&mut rig, words);
        assert_eq!((rig.lost().len(), rig.worker.totals.deaths), (1, 2), "{words:?}: another death");
    }
}

#[test]
fn a_death_without_requests_is_one_when_the_list_says_so_first() {
    for words in ORDERS.into_iter().filter(|words| words.len() > 1 || matches!(words, [Word::List | Word::Socket])) {
        let mut rig = Rig::new(&[1, 2]);
        rig.pass(10);
        kill(&mut rig, words);
        assert_eq!((rig.lost().len(), rig.worker.totals.deaths), (0, 1), "{words:?}");
        if words.iter().any(|word| matches!(word, Word::List)) {
            assert_eq!(rig.worker.members.len(), 1, "{words:?}: it is forgotten");
        }
    }
}

/// A refusal is of a datagram that was sent before, and may be of another flow: the answers that have come since count.
#[test]
fn a_member_that_answers_is_not_given_up_for_one_refusal() {
    let mut rig = Rig::new(&[1, 2]);
    rig.pass(10);
    let numbers = rig.ask_the_mute(2);
    for _ in 0..3 {
        rig.worker.link_refused(rig.now, host(2), "its flow has ended");
        rig.worker.link_refused(rig.now, host(2), "its flow has ended");
        rig.pass(300);
    }
    assert_eq!((rig.lost().len(), rig.worker.totals.deaths, rig.worker.legs.len()), (0, 0, 2), "{numbers:?}");
    assert!(rig.is_up(2));
    rig.end(2).is_cut = true;
    rig.worker.link_refused(rig.now, host(2), "its flow has ended");
    rig.pass(105);
    assert_eq!(rig.worker.totals.deaths, 0, "it is asked again");
    rig.worker.link_refused(rig.now, host(2), "its flow has ended");
    rig.pass(5);
    assert_eq!((rig.lost().len(), rig.worker.totals.deaths, rig.worker.legs.len()), (2, 1, 1));
}

#[test]
fn a_member_whose_name_is_withdrawn_has_not_died() {
    let mut rig = Rig::new(&[1, 2]);
    rig.pass(10);
    rig.end(2).is_unlisted = true;
    rig.list();
    assert_eq!(rig.worker.members.len(), 2, "it is asked first");
    rig.pass(20);
    assert_eq!((rig.worker.members.len(), rig.worker.totals.deaths), (1, 0));
    assert_eq!(rig.worker.legs.len(), 1);
}

#[test]
fn another_process_in_a_members_place_does_not_hide_what_the_one_before_owed() {
    for (seed, millis) in (1..).zip([0, 1, 30, 150, 450]) {
        let mut rig = Rig::seeded(&[1, 2], seed);
        rig.pass(10);
        let numbers = rig.ask_the_mute(2);
        rig.end(2).is_cut = true;
        rig.pass(millis);
        // The list has it all the time, and its host answers.
        rig.replace(2);
        rig.pass(400);
        let lost = rig.lost();
        assert_eq!((lost.len(), rig.worker.totals.deaths), (2, 1), "{millis} ms");
        assert!(lost.iter().all(|number| numbers.contains(number)));
        rig.pass(300);
        assert_eq!(rig.worker.legs.len(), 2, "{millis} ms: it has the connection again");
    }
}

#[test]
fn one_that_is_listed_again_before_it_was_missed_has_died_once() {
    for millis in [1, 50, 150, 300] {
        let mut rig = Rig::new(&[1, 2]);
        rig.pass(10);
        rig.ask_the_mute(2);
        (rig.end(2).is_cut, rig.end(2).is_unlisted) = (true, true);
        rig.list();
        rig.pass(millis);
        rig.replace(2);
        rig.list();
        rig.pass(700);
        assert_eq!((rig.lost().len(), rig.worker.totals.deaths), (2, 1), "{millis} ms");
        assert!(rig.is_up(2) && rig.worker.legs.len() == 2, "{millis} ms");
    }
}

#[test]
fn a_drained_member_that_dies_is_found_out() {
    let mut rig = Rig::new(&[1, 2]);
    rig.pass(10);
    rig.ask_the_mute(2);
    assert!(rig.worker.drain(rig.now, "m2", true));
    rig.pass(200);
    rig.replace(2);
    rig.pass(1700);
    assert_eq!((rig.lost().len(), rig.worker.totals.deaths), (2, 1));
}

#[test]
fn a_drain_that_is_undone_while_it_ends_leaves_a_member() {
    let mut rig = Rig::new(&[1, 2]);
    rig.pass(10);
    let number = rig.ask_the_mute(1);
    assert!(rig.worker.drain(rig.now, "m2", true) && rig.worker.drain(rig.now, "m2", false));
    let at = rig.now;
    for end in rig.members.values_mut() {
        for connection in end.connections.values_mut() {
            for number in &number {
                let frame = crate::head::Head { number: *number, oldest: 0 }.frame(b"1\r\n");
                connection.send(at, margay_ensemble::Order::Member, &frame).expect("room");
            }
        }
        end.is_mute = false;
    }
    rig.pass(300);
    assert_eq!(rig.worker.legs.len(), 2);
    for n in 0..4 {
        rig.ask(&format!("get {n}\r\n"));
    }
    rig.pass(100);
    assert_eq!(rig.asked(2), 3, "it takes frames");
}

#[test]
fn one_that_left_and_is_there_again_at_once_is_a_member() {
    let mut rig = Rig::new(&[1, 2]);
    rig.pass(10);
    let at = rig.now;
    rig.end(2).is_leaving = true;
    rig.end(2).connections.values_mut().for_each(|connection| connection.leave(at));
    rig.pass(300);
    assert!(!rig.is_up(2) && rig.worker.legs.len() == 1, "it has left, and says so to whoever asks");
    // The list has it all the time.
    rig.replace(2);
    rig.pass(300);
    assert!(rig.is_up(2) && rig.worker.legs.len() == 2);
    assert_eq!((rig.worker.totals.deaths, rig.lost().len()), (0, 0));
}

#[test]
fn one_that_dies_before_it_takes_a_connection_keeps_nobody_waiting() {
    let mut rig = Rig::new(&[1, 2]);
    rig.end(2).is_elsewhere = true;
    rig.pass(500);
    assert_eq!(rig.client.standing(), &margay_ensemble::Standing::Open);
    rig.replace(2);
    rig.pass(700);
    assert!(rig.is_up(2) && rig.worker.legs.len() == 2);
    assert_eq!(rig.worker.totals.deaths, 0, "it was none");
}

#[test]
fn what_members_died_with_is_repeated_as_soon_as_there_are_others() {
    let mut rig = Rig::new(&[1, 2]);
    rig.pass(10);
    // There is a round trip to judge by.
    rig.ask("get a\r\n");
    rig.pass(100);
    rig.members.values_mut().for_each(|end| end.is_cut = true);
    let numbers = [rig.ask("get b\r\n"), rig.ask("incr c 1\r\n")];
    rig.pass(10_000);
    assert!(rig.worker.legs.is_empty());
    rig.replace(1);
    rig.replace(2);
    rig.pass(900);
    assert!(numbers.iter().all(|number| rig.answer(*number).len() == 1), "{:?}", rig.answers);
    assert_eq!(rig.worker.totals.deaths, 2);
}

#[test]
fn what_a_member_died_with_is_repeated_as_soon_as_the_death_is_found() {
    // Round after round: the death is found just after the client has repeated by itself, and just before.
    for found_after in [450, 590, 610, 700] {
        let mut rig = Rig::new(&[1, 2]);
        rig.pass(10);
        for n in 0..20 {
            rig.ask(&format!("get warm{n}\r\n"));
        }
        rig.pass(100);
        rig.end(2).is_cut = true;
        let before = rig.asked(1);
        let numbers: Vec<u32> = (0..20).map(|n| rig.ask(&format!("get key{n}\r\n"))).collect();
        rig.pass(20);
        let open: Vec<u32> = numbers.into_iter().filter(|number| rig.answer(*number).is_empty()).collect();
        assert!(!open.is_empty() && rig.asked(1) > before, "{} of the dead member", open.len());
        rig.pass(found_after - 20);
        rig.worker.link_failed(rig.now, host(2), "its flow has ended");
        rig.pass(20);
        assert!(open.iter().all(|number| rig.answer(*number).len() == 1), "{found_after} ms: {:?}", rig.answers);
    }
}

/// Something that happens to a member.
fn happen(rig: &mut Rig, rng: &mut Rng) {
    let number = 1 + u8::try_from(rng.u64() % 3).expect("small");
    match rng.u64() % 9 {
        0 => rig.end(number).is_cut ^= true,
        1 => rig.replace(number),
        2 => {
            rig.end(number).is_unlisted ^= true;
            rig.list();
        }
        3 if rng.u64().is_multiple_of(2) => rig.worker.link_refused(rig.now, host(number), "its flow has ended"),
        3 => rig.worker.link_failed(rig.now, host(number), "its flow has ended"),
        4 => rig.end(number).is_elsewhere ^= true,
        // What it was asked before it answers never: only its end ends that.
        5 if rig.end(number).is_mute => rig.replace(number),
        5 => rig.end(number).is_mute = true,
        6 => drop(rig.worker.drain(rig.now, &format!("m{number}"), true)),
        7 => drop(rig.worker.drain(rig.now, &format!("m{number}"), false)),
        _ => {
            rig.end(number).is_unlisted = true;
            rig.list();
            rig.replace(number);
            rig.list();
        }
    }
}

/// Each request has an answer, or its client was told that it is lost; nothing that is unsafe was done twice.
#[test]
fn whatever_happens_each_request_is_answered_or_told_lost() {
    // At the last one a client had waited seven seconds to repeat what members had died with.
    for seed in (0..60).chain([150]) {
        let mut rig = Rig::seeded(&[1, 2, 3], seed);
        let mut rng = Rng::new([seed; 32]);
        rig.lost_per_mille = [0, 50, 200][usize::from(seed) % 3];
        rig.pass(1000);
        let mut told = BTreeSet::new();
        for _ in 0..60 {
            if rig.client.is_over() {
                break;
            }
            for _ in 0..rng.u64() % 4 {
                let verb = if rng.u64().is_multiple_of(2) { "get" } else { "incr" };
                rig.ask(&format!("{verb} {}\r\n", rig.next_request));
            }
            happen(&mut rig, &mut rng);
            rig.pass(rng.u64() % 120);
            told.extend(rig.lost());
        }
        rig.lost_per_mille = 0;
        for number in 1..=3 {
            let is_mute = rig.end(number).is_mute;
            if is_mute || rig.end(number).is_elsewhere {
                rig.replace(number);
            }
            (rig.end(number).is_cut, rig.end(number).is_unlisted) = (false, false);
            rig.worker.drain(rig.now, &format!("m{number}"), false);
        }
        rig.list();
        rig.pass(6000);
        told.extend(rig.lost());
        let answered: BTreeSet<u32> = rig.answers.iter().map(|(number, _)| *number).collect();
        let waiting: Vec<u32> =
            (0..rig.next_request).filter(|number| !answered.contains(number) && !told.contains(number)).collect();
        // A connection that is over is refused as a whole.
        assert!(rig.client.is_over() || waiting.is_empty(), "seed {seed}: {waiting:?} of {}", rig.next_request);
        let mut done = BTreeSet::new();
        let unsafe_ones = rig.members.values().flat_map(|end| &end.asked).filter(|asked| asked.starts_with("incr"));
        unsafe_ones.for_each(|asked| assert!(done.insert(asked.clone()), "seed {seed}: {asked} was done twice"));
    }
}
