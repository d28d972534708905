use super::*;

type Sent = (RepairBeside, Covered, Vec<u8>);

fn at(millis: u64) -> Instant {
    Instant::from_millis(millis)
}

fn name(number: u32) -> ChunkName {
    ChunkName { number, index: 0 }
}

fn datagram(number: u32) -> Vec<u8> {
    (0..20 + number % 7).map(|at| (number.wrapping_mul(31) + at) as u8).collect()
}

fn sent(covered: &Covered, repair: &Repair<'_>) -> Sent {
    let Repair { base, index, count, symbol, .. } = *repair;
    (RepairBeside { block: base, index, count }, *covered, symbol.to_vec())
}

/// Sends datagrams of these numbers in one block; gives its repairs.
fn block(repairer: &mut Repairer, now: Instant, numbers: &[u32]) -> Vec<Sent> {
    let mut repairs = Vec::new();
    for number in numbers {
        repairer.add(now, name(*number), &datagram(*number), |covered, repair| repairs.push(sent(covered, repair)));
    }
    let due = repairer.deadline().unwrap_or(now);
    repairer.close_due(due, |covered, repair| repairs.push(sent(covered, repair)));
    repairs
}

fn losing(ppm: u32) -> Repairer {
    let mut repairer = Repairer::default();
    repairer.note_loss(Loss { ppm, row_thousandths: 1000 });
    repairer
}

/// What a receiver is given of what has come.
fn receive(restorer: &mut Restorer, came: &[u32], repairs: &[Sent]) -> Vec<u32> {
    let mut given = Vec::new();
    let mut give = |name: ChunkName, bytes: &[u8]| {
        assert_eq!(bytes, datagram(name.number), "as it was sent");
        given.push(name.number);
    };
    came.iter().for_each(|number| restorer.keep(name(*number), &datagram(*number), &mut give));
    for (of, covered, symbol) in repairs {
        let _ = restorer.repair(*of, covered, symbol, &mut give);
    }
    given
}

#[test]
fn what_is_missing_is_brought_back_once_whatever_other_places_have_had_between() {
    let mut repairer = losing(50_000);
    let numbers: Vec<u32> = (0..12).map(|at| (u32::MAX - 20).wrapping_add(at * 3)).collect();
    let repairs = block(&mut repairer, at(0), &numbers);
    assert!(repairs.len() >= 4, "{} repairs", repairs.len());
    let came: Vec<u32> = numbers.iter().copied().filter(|number| ![numbers[2], numbers[7]].contains(number)).collect();
    let mut restorer = Restorer::default();
    let mut given = receive(&mut restorer, &came, &repairs);
    given.sort_unstable();
    let mut wanted = vec![numbers[2], numbers[7]];
    wanted.sort_unstable();
    assert_eq!(given, wanted);
    assert_eq!(receive(&mut restorer, &[numbers[2]], &repairs), [], "late, and again");
    let is_late = |restorer: &mut Restorer, number: u32| restorer.is_late(name(number));
    assert!(!is_late(&mut restorer, numbers[2]), "on its way to the program");
    assert!(is_late(&mut restorer, numbers[2]) && is_late(&mut restorer, numbers[2]), "and then by itself");
    assert!(!is_late(&mut restorer, numbers[0]) && !is_late(&mut restorer, numbers[0]), "never brought back");
}

#[test]
fn repairs_that_come_first_wait_for_datagrams() {
    let mut repairer = losing(50_000);
    let repairs = block(&mut repairer, at(0), &[1, 2, 3]);
    let mut restorer = Restorer::default();
    assert_eq!(receive(&mut restorer, &[], &repairs[..1]), []);
    assert_eq!(receive(&mut restorer, &[1], &[]), []);
    assert_eq!(receive(&mut restorer, &[3], &[]), [2]);
    assert_eq!(receive(&mut restorer, &[2], &[]), []);
    assert!(restorer.blocks.is_empty());
}

#[test]
fn blocks_end_in_time_and_with_sixteen_datagrams_and_no_later_than_names_allow() {
    let mut repairer = losing(20_000);
    let mut ends = Vec::new();
    let mut each = |covered: &Covered, _: &Repair<'_>| ends.push(covered.names().len());
    for number in 0..40 {
        repairer.add(at(0), name(number), &[1; 100], &mut each);
    }
    repairer.add(at(8), name(41), &[1; 100], &mut each);
    repairer.add(at(8), name(100_000), &[1; 100], &mut each);
    ends.dedup();
    assert_eq!(ends, [16, 8, 1]);
}

#[test]
fn where_nothing_is_lost_nothing_is_added() {
    let mut repairer = losing(0);
    block(&mut repairer, at(0), &[1]);
    assert_eq!(block(&mut repairer, at(1), &[2, 3]), []);
    assert_eq!(repairer.deadline(), None);
}

#[test]
fn a_copy_that_is_not_what_was_sent_brings_nothing_back() {
    let mut repairer = losing(50_000);
    let repairs = block(&mut repairer, at(0), &[1, 2, 3]);
    let mut restorer = Restorer::default();
    let mut give = |_, _: &[u8]| panic!("it is not what was sent");
    restorer.keep(name(1), &datagram(8), &mut give);
    restorer.keep(name(3), &datagram(3), &mut give);
    for (of, covered, symbol) in &repairs {
        let _ = restorer.repair(*of, covered, symbol, &mut give);
    }
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_grows() {
    let mut repairer = losing(50_000);
    let repairs = block(&mut repairer, at(0), &[1, 2, 3]);
    let (of, covered, symbol) = &repairs[0];
    let mut restorer = Restorer::default();
    let mut give = |_, _: &[u8]| panic!("nothing can be brought back");
    for bad in [RepairBeside { count: 0, ..*of }, RepairBeside { index: of.count, ..*of }] {
        assert_eq!(restorer.repair(bad, covered, symbol, &mut give), Err(Refused::Malformed), "{bad:?}");
    }
    assert_eq!(restorer.repair(*of, covered, &symbol[..4], &mut give), Err(Refused::Malformed), "too short");
    assert_eq!(restorer.repair(*of, covered, symbol, &mut give), Ok(()));
    assert_eq!(restorer.repair(*of, covered, symbol, &mut give), Err(Refused::Late));
    let fewer = RepairBeside { count: of.count - 1, ..*of };
    assert_eq!(restorer.repair(fewer, covered, symbol, &mut give), Err(Refused::Malformed), "of as many as before");
    let longer = [&symbol[..], &[0, 0]].concat();
    assert_eq!(restorer.repair(*of, covered, &longer, &mut give), Err(Refused::Malformed), "as long as before");
    for block in 0..1000 {
        let _ = restorer.repair(RepairBeside { block, ..*of }, covered, symbol, &mut give);
        restorer.keep(name(1000 + block), &[0; 4000], |_, _| ());
    }
    assert!(restorer.blocks.len() <= BLOCKS_MAX && restorer.bytes <= KEPT_BYTES_MAX);
    assert!(restorer.kept.len() <= KEPT_MAX && restorer.brought.len() <= BROUGHT_MAX);
}

#[test]
fn long_repairs_push_out_those_of_older_blocks() {
    let (mut covered, mut restorer) = (Covered::default(), Restorer::default());
    assert!((0..12).all(|number| covered.add(name(number))));
    for block in 0..8 {
        for index in 0..11 {
            let _ = restorer.repair(RepairBeside { block, index, count: 31 }, &covered, &[0; 20_000], |_, _| {});
        }
    }
    assert!((250_000..=KEPT_BYTES_MAX).contains(&restorer.bytes()), "{} bytes", restorer.bytes());
    restorer.clear();
    assert_eq!(restorer.bytes(), 0);
}
