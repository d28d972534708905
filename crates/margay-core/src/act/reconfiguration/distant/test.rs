use alloc::vec;

use margay_wire::{OrderState, SessionId};

use super::*;
use crate::act::reconfiguration::EditError;
use crate::types::rng::Rng;

fn one(number: u8) -> ServiceId {
    let mut id = [0; 32];
    id[..12].fill(number);
    ServiceId(id)
}

fn wish(edit: &Edit) -> OrderRepr {
    let (act, service, other) = parts_of(edit).expect("somebody orders it");
    OrderRepr {
        state: OrderState::Wished,
        act,
        session: SessionId([1; 16]),
        service,
        other,
        start: 2,
        said_at_ms: 3,
        host_key: [0; 32],
        signature: [0; 64],
    }
}

#[test]
fn the_whole_matrix_of_an_order_at_the_host_that_gives_it() {
    assert!(ORDERING.faults().is_empty(), "{:?}", ORDERING.faults());
    let wanted = "Knocking ToSign Signed
Knocking Restarted -
Knocking Taken -
Knocking Told Over
Knocking TimeOut Over
Knocking Gone Over
Signed ToSign Signed
Signed Restarted Over
Signed Taken Waiting
Signed Told Over
Signed TimeOut Over
Signed Gone Over
Waiting ToSign -
Waiting Restarted Over
Waiting Taken Waiting
Waiting Told Over
Waiting TimeOut Over
Waiting Gone Over
Over ToSign -
Over Restarted -
Over Taken -
Over Told -
Over TimeOut -
Over Gone -
";
    assert_eq!(ORDERING.matrix(), wanted);
}

#[test]
fn what_is_ordered_is_read_as_it_was_written() {
    for edit in [
        Edit::Insert { service: one(1), before: None },
        Edit::Insert { service: one(1), before: Some(one(2)) },
        Edit::Remove { service: one(1) },
        Edit::Replace { service: one(1), by: one(2) },
    ] {
        assert_eq!(edit_of(&wish(&edit)), Some(edit));
    }
    assert!(parts_of(&Edit::Leave { service: one(1) }).is_none(), "a program says so itself");
    let remove = wish(&Edit::Remove { service: one(1) });
    assert_eq!(edit_of(&OrderRepr { other: [2; 12], ..remove }), None);
    assert_eq!(edit_of(&OrderRepr { act: OrderAct::Replace, ..remove }), None);
}

#[test]
fn a_word_is_its_hosts_about_one_order_alone() {
    let mut rng = Rng::new([7; 32]);
    let [key, other] = [(); 2].map(|()| HostSecret::generate(&mut rng));
    let host = key.public().id();
    let word = Word { number: 5, by: HostId([6; 16]), code: 7, text: "no" };
    let edit = Edit::Insert { service: one(1), before: Some(one(2)) };
    let signed = word.sign(&key, wish(&edit));
    let bytes = word.bytes(&signed);
    assert_eq!(bytes[..17], *b"margay 2026 order");
    assert_eq!(bytes[17..21], [0, 0, 0, 5]);
    assert_eq!(bytes[21..37], [6; 16]);
    assert_eq!(bytes[37..125], signed.signed_bytes());
    assert_eq!(bytes[125..], [0, 7, b'n', b'o']);
    assert!(word.is_of(host, &signed));
    assert!(!word.is_of(other.public().id(), &signed), "another host's");
    assert!(!word.is_of(host, &word.sign(&other, wish(&edit))), "by another key");
    for (what, said) in [
        ("number", Word { number: 6, ..word }),
        ("who has given it", Word { by: HostId([7; 16]), ..word }),
        ("code", Word { code: 8, ..word }),
        ("reason", Word { text: "yes", ..word }),
    ] {
        assert!(!said.is_of(host, &signed), "{what}");
    }
    for (what, order) in [
        ("state", OrderRepr { state: OrderState::Done, ..signed }),
        ("act", OrderRepr { act: OrderAct::Replace, ..signed }),
        ("session", OrderRepr { session: SessionId([2; 16]), ..signed }),
        ("box", OrderRepr { service: [3; 12], ..signed }),
        ("other box", OrderRepr { other: [0; 12], ..signed }),
        ("start", OrderRepr { start: 3, ..signed }),
        ("time", OrderRepr { said_at_ms: 4, ..signed }),
    ] {
        assert!(!word.is_of(host, &order), "{what}");
    }
    let nobody = OrderRepr { host_key: [0; 32], ..signed };
    assert!(!word.is_of(HostPublic([0; 32]).id(), &nobody), "a key of low order is nobody's");
}

#[test]
fn the_host_of_a_box_speaks_for_what_is_beside_it() {
    let known = SessionBoxes { between: vec![one(1), one(2), one(3)], ..SessionBoxes::default() };
    let insert = |before| Edit::Insert { service: one(4), before };
    let refused = Err(ReconfigurationRefused::NotItsBox);
    for (own, edit, wanted) in [
        (2, insert(Some(one(2))), Ok(())),
        (2, insert(Some(one(3))), Ok(())),
        (2, insert(Some(one(1))), refused),
        (2, insert(None), refused),
        (3, insert(None), Ok(())),
        (1, insert(Some(one(1))), Ok(())),
        (2, Edit::Remove { service: one(2) }, Ok(())),
        (2, Edit::Remove { service: one(1) }, refused),
        (2, Edit::Replace { service: one(2), by: one(4) }, Ok(())),
        (2, Edit::Replace { service: one(3), by: one(2) }, refused),
        (2, Edit::Leave { service: one(2) }, refused),
        (2, insert(Some(one(9))), Err(ReconfigurationRefused::Edit(EditError::Absent(one(9))))),
    ] {
        assert_eq!(edit.check_host_of(&[one(own)], &known), wanted, "{own}: {edit:?}");
    }
    let both = vec![one(1), one(3)];
    assert_eq!(insert(Some(one(2))).check_host_of(&both, &known), Ok(()), "of two boxes");
}

#[test]
fn a_reason_fits_and_is_text() {
    assert_eq!(reason("no\u{1b}[31m"), "no?[31m");
    let long = reason(&"ä".repeat(100));
    assert_eq!(long.chars().count(), 64);
}
