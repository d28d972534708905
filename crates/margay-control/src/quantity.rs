//! Numbers of things and spans of time, as sentences have them.

use std::time::Duration;

/// A number with its noun, which is regular.
pub fn count(number: u64, noun: &str) -> String {
    let end = match noun {
        _ if number == 1 => "",
        noun if noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{number} {noun}{end}")
}

/// The same of what a collection holds.
pub fn count_of(number: usize, noun: &str) -> String {
    count(number as u64, noun)
}

/// How long, in at most two units.
pub fn span(duration: Duration) -> String {
    const UNITS: [(u128, &str); 5] = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s"), (1, "ms")];
    let whole_ms = duration.as_millis();
    let Some(at) = UNITS.iter().position(|(unit_ms, _)| whole_ms >= *unit_ms) else { return "0s".to_owned() };
    let (unit_ms, unit) = UNITS[at];
    let rest = UNITS.get(at + 1).map(|(less_ms, less)| (whole_ms % unit_ms / less_ms, less));
    match rest.filter(|(number, _)| *number > 0) {
        Some((number, less)) => format!("{}{unit} {number}{less}", whole_ms / unit_ms),
        None => format!("{}{unit}", whole_ms / unit_ms),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn one_thing_is_no_plural() {
        assert_eq!([count(0, "host"), count(1, "host"), count(2, "host")], ["0 hosts", "1 host", "2 hosts"]);
        assert_eq!([count_of(1, "address"), count_of(9, "address")], ["1 address", "9 addresses"]);
    }

    #[test]
    fn a_span_has_two_units_at_most() {
        let of = |ms: u64| span(Duration::from_millis(ms));
        assert_eq!([of(0), of(7), of(1_000), of(1_500)], ["0s", "7ms", "1s", "1s 500ms"]);
        assert_eq!([of(61_500), of(3_600_000), of(3_725_000)], ["1m 1s", "1h", "1h 2m"]);
        assert_eq!(of(1_000 * (90 * 86_400 + 7_300)), "90d 2h");
    }
}
