use super::*;

#[test]
fn the_whole_matrix_of_the_left_anchor() {
    assert!(LEADING.faults().is_empty(), "{:?}", LEADING.faults());
    let matrix = LEADING.matrix();
    assert_eq!(matrix.lines().count(), LEADING.states.len() * LEADING.events.len());
    // Once both ends send by the new way and have said so, nothing leads back.
    for state in ["Lingering", "Leaving"] {
        assert!(matrix.lines().any(|line| line == alloc::format!("{state} Failed -")), "{state}");
    }
    let lines = [
        "Confirming Failed Canceling",
        "Turned Failed Canceling",
        "Asking Refused Over",
        "Asking Unanswered Canceling",
    ];
    for line in lines {
        assert!(matrix.lines().any(|found| found == line), "{line}");
    }
}
