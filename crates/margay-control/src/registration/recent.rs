//! Which prefixes have changed lately, so that whoever watches some of them looks at those alone. How much is
//! remembered is bounded: who looks too seldom looks at everything.

use std::collections::VecDeque;

use margay_core::name::Prefix;

/// Changes that are remembered: a second's worth of many.
const RECENT_MAX: usize = 1024;

/// The latest changes.
#[derive(Default)]
pub struct Recent {
    changed: VecDeque<Prefix>,
    /// How many there were before these.
    forgotten: u64,
}

impl Recent {
    /// Something has changed at a prefix.
    pub fn note(&mut self, prefix: Prefix) {
        if self.changed.len() >= RECENT_MAX {
            self.changed.pop_front();
            self.forgotten += 1;
        }
        self.changed.push_back(prefix);
    }

    /// How many changes there were.
    pub fn count(&self) -> u64 {
        self.forgotten + self.changed.len() as u64
    }

    /// Whether something may have changed under a prefix, or above it, since there were `seen` changes.
    pub fn concerns(&self, prefix: &Prefix, seen: u64) -> bool {
        let Some(skipped) = seen.checked_sub(self.forgotten) else { return true };
        let skipped = usize::try_from(skipped).unwrap_or(usize::MAX);
        self.changed.iter().skip(skipped).any(|changed| changed.overlaps(prefix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_is_known_until_too_much_has() {
        let prefix = |text: &str| -> Prefix { text.parse().expect("literal") };
        let mut recent = Recent::default();
        recent.note(prefix("sid:aa/8"));
        let seen = recent.count();
        let concerned = |recent: &Recent| {
            ["sid:aa/8", "sid:bb/8", "sid:bbcc/16", "sid:bbdd/16", "sid:/0"]
                .map(|at| recent.concerns(&prefix(at), seen))
        };
        assert_eq!(concerned(&recent), [false; 5]);
        recent.note(prefix("sid:bbcc/16"));
        assert_eq!(concerned(&recent), [false, true, true, false, true]);
        assert!(recent.concerns(&prefix("sid:aa/8"), 0), "for who has seen nothing yet");
        (2..RECENT_MAX).for_each(|_| recent.note(prefix("sid:bbcc/16")));
        assert!(recent.concerns(&prefix("sid:aa/8"), 0));
        recent.note(prefix("sid:bbcc/16"));
        assert!(!recent.concerns(&prefix("sid:aa/8"), seen));
        recent.note(prefix("sid:bbcc/16"));
        assert!(recent.concerns(&prefix("sid:ee/8"), seen), "it is not known any more");
        assert_eq!(recent.count(), RECENT_MAX as u64 + 2);
    }
}
