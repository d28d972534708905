//! Modules that are replaced while connections run: which of these stay, and which go over.

use margay_ensemble::Standing;

use super::test::{Rig, begin, ended_by_module, host, loaded};

fn answer(rig: &mut Rig, request: &str) -> String {
    let number = rig.ask(request);
    rig.pass(50);
    rig.answers.iter().find(|(answered, _)| *answered == number).map(|(_, answer)| answer.clone()).unwrap_or_default()
}

/// The number of the module of the only connection.
fn module_of(rig: &Rig) -> Option<u64> {
    rig.worker.connections.values().next().and_then(|served| served.module)
}

fn shown(rig: &Rig, key: &str) -> u64 {
    let placed = rig.worker.module.as_ref().expect("there is a module");
    placed.show(rig.now, 0)[key].as_u64().expect("a number")
}

#[test]
fn a_connection_goes_over_with_what_its_module_leaves() {
    let mut rig = Rig::new(&[1, 2]);
    rig.worker.place(rig.now, loaded("counts"));
    rig.pass(200);
    assert_eq!(answer(&mut rig, "get a\r\n"), "m2 get a\r\n");
    assert_eq!((module_of(&rig), rig.worker.connections.len()), (Some(2), 1));
    rig.worker.place(rig.now, loaded("counts-on"));
    assert_eq!(answer(&mut rig, "get b\r\n"), "m1 get b\r\n", "it counts on from one");
    assert_eq!(answer(&mut rig, "get c\r\n"), "m2 get c\r\n");
    assert_eq!((module_of(&rig), shown(&rig, "adopted")), (Some(3), 1));
    assert_eq!(rig.worker.totals.failed, 0);
}

#[test]
fn a_connection_without_a_module_goes_over_with_nothing() {
    let mut rig = Rig::new(&[1, 2]);
    rig.pass(200);
    rig.worker.place(rig.now, loaded("counts-on"));
    // Which of them has which number is no matter.
    let first = answer(&mut rig, "get a\r\n");
    let second = answer(&mut rig, "get a\r\n");
    assert_eq!([&first, &second].map(String::len), ["m1 get a\r\n".len(); 2]);
    assert_ne!(first, second);
    assert_eq!(shown(&rig, "adopted"), 1);
    // One that was loaded before does not lose it to none.
    rig.worker.place(rig.now, None);
    assert_eq!(answer(&mut rig, "get a\r\n"), first);
    assert_eq!(module_of(&rig), Some(2));
}

#[test]
fn a_connection_stays_where_the_module_does_not_want_it_or_has_no_word_for_it() {
    for name in ["declines", "traps"] {
        let mut rig = Rig::new(&[1, 2]);
        rig.worker.place(rig.now, loaded("to-first"));
        rig.pass(200);
        rig.worker.place(rig.now, loaded(name));
        assert_eq!(answer(&mut rig, "get a\r\n"), "m1 get a\r\n", "{name}");
        assert_eq!((module_of(&rig), shown(&rig, "adopted"), shown(&rig, "faults")), (Some(2), 0, 0), "{name}");
    }
}

#[test]
fn a_module_that_fails_to_adopt_has_a_fault_and_no_connection_ends() {
    for name in ["fails-to-adopt", "answers-nonsense"] {
        let mut rig = Rig::new(&[1, 2]);
        rig.worker.place(rig.now, loaded("to-first"));
        rig.pass(200);
        rig.worker.place(rig.now, loaded(name));
        assert_eq!(answer(&mut rig, "get a\r\n"), "m1 get a\r\n", "{name}");
        assert_eq!(answer(&mut rig, "get b\r\n"), "m1 get b\r\n", "{name}: it is offered once");
        assert_eq!((shown(&rig, "faults"), rig.worker.totals.failed), (1, 0), "{name}");
    }
}

#[test]
fn a_module_that_fails_to_adopt_many_loses_its_place() {
    let mut rig = Rig::new(&[1, 2]);
    for number in 100..112 {
        begin(&mut rig, number);
    }
    assert_eq!(rig.worker.connections.len(), 12);
    rig.worker.place(rig.now, loaded("fails-to-adopt"));
    rig.pass(50);
    assert_eq!((rig.worker.connections.len(), shown(&rig, "faults")), (12, 11), "the last one is not offered to it");
    begin(&mut rig, 200);
    assert!(ended_by_module(&rig).contains("adopt fails"));
}

#[test]
fn a_module_that_fails_to_leave_ends_its_connection_and_the_next_is_not_to_blame() {
    let mut rig = Rig::new(&[1, 2]);
    rig.worker.place(rig.now, loaded("leaves-too-much"));
    rig.pass(200);
    rig.worker.place(rig.now, loaded("counts-on"));
    rig.pass(50);
    assert!(ended_by_module(&rig).contains("alrm_state leaves 2049 bytes"));
    assert_eq!((shown(&rig, "faults"), rig.worker.totals.failed), (0, 1));
}

#[test]
fn what_is_repeated_is_the_affair_of_the_module_that_has_decided_it() {
    let mut rig = Rig::new(&[1, 2]);
    rig.worker.place(rig.now, loaded("shouts"));
    rig.pass(200);
    assert_eq!(answer(&mut rig, "get a\r\n"), "m1 get X\r\n");
    // The request is lost behind the switch.
    rig.members.get_mut(&host(1)).expect("there is one").is_cut = true;
    let lost = rig.ask("get a\r\n");
    rig.pass(20);
    rig.worker.place(rig.now, loaded("counts-on"));
    rig.pass(20);
    assert_eq!(module_of(&rig), Some(3));
    rig.worker.place(rig.now, loaded("to-number-one"));
    rig.pass(20);
    assert_eq!(module_of(&rig), Some(3), "it does not go over as long as another one is needed");
    rig.members.get_mut(&host(1)).expect("there is one").is_cut = false;
    rig.pass(2000);
    assert!(rig.answers.contains(&(lost, "m1 get X\r\n".to_owned())), "{:?}", rig.answers);
    assert_eq!(module_of(&rig), Some(4), "now it does");
    assert_eq!(answer(&mut rig, "get a\r\n"), "m2 get a\r\n");
    assert_eq!((rig.worker.totals.failed, rig.client.standing()), (0, &Standing::Open));
}

#[test]
fn members_keep_their_numbers() {
    let mut rig = Rig::new(&[1, 2]);
    rig.worker.place(rig.now, loaded("to-first"));
    rig.pass(200);
    assert_eq!(answer(&mut rig, "get a\r\n"), "m1 get a\r\n");
    rig.members.get_mut(&host(1)).expect("there is one").is_cut = true;
    rig.ask("get a\r\n");
    rig.pass(3000);
    rig.worker.place(rig.now, loaded("to-number-one"));
    assert_eq!(answer(&mut rig, "get b\r\n"), "m2 get b\r\n");
    assert_eq!((shown(&rig, "adopted"), rig.worker.totals.failed), (1, 0));
}
