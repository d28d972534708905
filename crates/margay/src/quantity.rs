//! Numbers of things, as sentences have them.

/// A number with its noun.
pub fn count(number: u64, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// The same of what a collection holds.
pub fn count_of(number: usize, noun: &str) -> String {
    count(number as u64, noun)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn one_thing_is_no_plural() {
        assert_eq!([count(0, "host"), count(1, "host"), count(2, "host")], ["0 hosts", "1 host", "2 hosts"]);
        assert_eq!(count_of(1, "flow"), "1 flow");
    }
}
