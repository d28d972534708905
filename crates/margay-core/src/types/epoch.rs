//! Epochs: the starts of a host's agent, of which all keys for sending derive (DESIGN §7).

/// The epoch of the next start: beyond every one in which keys of this host may have been used. `counted` is what the
/// state directory says, which may be an older copy; `used` is what lies beside the keys; `clock_s` are the seconds
/// since 1970, zero where there is no clock: an agent starts less than once a second. `None`: there is none left.
pub fn next_epoch(counted: Option<u32>, used: Option<u32>, clock_s: u32) -> Option<u32> {
    let next = counted.max(used).unwrap_or(0).checked_add(1)?;
    if clock_s <= next {
        return Some(next);
    }
    // Encrypted data shows the low three bits: they go on counting, so that two starts after each other are told apart.
    Some(clock_s.saturating_add(next.wrapping_sub(clock_s) & 7))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_beyond_all_that_is_remembered_and_the_clock() {
        assert_eq!(next_epoch(None, None, 0), Some(1));
        assert_eq!((next_epoch(Some(3), Some(9), 0), next_epoch(Some(9), Some(3), 0)), (Some(10), Some(10)));
        assert_eq!(next_epoch(Some(1), None, 1000), Some(1002), "two, by its low bits");
        assert_eq!(next_epoch(Some(2000), Some(7), 1000), Some(2001), "whatever the clock says");
        assert_eq!((next_epoch(Some(u32::MAX), None, 0), next_epoch(None, Some(u32::MAX), 9)), (None, None));
    }
}
