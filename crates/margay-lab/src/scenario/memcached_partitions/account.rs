//! What the numbers say: rates, gaps, shares.

use crate::traffic::{SLOT, Slot, Taken};

/// A stretch of time, as [`crate::traffic::now_ms`] has it.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Its begin.
    pub from_ms: f64,
    /// Its end.
    pub to_ms: f64,
}

impl Span {
    /// Without its first part.
    pub fn after(self, ms: f64) -> Self {
        Self { from_ms: self.from_ms + ms, ..self }
    }

    fn has(self, at_ms: f64) -> bool {
        self.from_ms < at_ms && at_ms <= self.to_ms
    }

    /// How long it is, in milliseconds.
    pub fn length_ms(self) -> f64 {
        self.to_ms - self.from_ms
    }

    fn seconds(self) -> f64 {
        self.length_ms() / 1e3
    }
}

/// Answers per second.
pub fn rate(slots: &[Slot], span: Span) -> f64 {
    let answered = slots.iter().filter(|slot| span.has(slot.at_ms)).flat_map(|slot| &slot.answered);
    f64::from(answered.sum::<u32>()) / span.seconds()
}

/// Times without an answer for some partition that were longer than a breath, in order; one that lasts ends with the
/// span.
pub fn silences(slots: &[Slot], span: Span) -> Vec<Span> {
    /// Three slots: less is chance.
    const BREATH_MS: f64 = 60.0;
    let seen: Vec<&Slot> = slots.iter().filter(|slot| span.has(slot.at_ms)).collect();
    let partitions = seen.first().map_or(0, |slot| slot.answered.len());
    let mut silences = Vec::new();
    for partition in 0..partitions {
        let answered = seen.iter().filter(|slot| slot.answered[partition] > 0).map(|slot| slot.at_ms);
        let mut heard_ms = span.from_ms;
        for at_ms in answered.chain([span.to_ms]) {
            if at_ms - heard_ms > BREATH_MS + SLOT.as_secs_f64() * 1e3 {
                silences.push(Span { from_ms: heard_ms, to_ms: at_ms });
            }
            heard_ms = at_ms;
        }
    }
    silences.sort_by(|one, other| one.from_ms.total_cmp(&other.from_ms));
    silences
}

/// Time from the begin of a span until every partition is answered, and stays so for a while. `None`: not in the span.
pub fn all_answered_ms(slots: &[Slot], span: Span) -> Option<f64> {
    /// What begins later has another cause.
    const WHILE_MS: f64 = 300.0;
    let mut well_ms = span.from_ms;
    for silence in silences(slots, span) {
        if silence.from_ms < well_ms + WHILE_MS {
            well_ms = well_ms.max(silence.to_ms);
        }
    }
    (well_ms < span.to_ms && !slots.is_empty()).then_some(well_ms - span.from_ms)
}

/// SETs that a server took between two of its figures, by the time of the latter; a new start counts from nothing.
pub fn steps(taken: &[Taken]) -> Vec<(f64, f64)> {
    let mut steps = Vec::new();
    for pair in taken.windows(2) {
        let (before, now) = (pair[0].sets.unwrap_or(0), pair[1].sets.unwrap_or(0));
        let more = if pair[1].sets.is_none() { 0 } else { now.checked_sub(before).unwrap_or(now) };
        steps.push((pair[1].at_ms, more as f64));
    }
    steps
}

/// SETs that a server took in a span.
pub fn total(steps: &[(f64, f64)], span: Span) -> f64 {
    steps.iter().filter(|(at_ms, _)| span.has(*at_ms)).map(|(_, count)| count).sum()
}

/// When a server first takes a share of all SETs that is at least `share`, in a span: milliseconds from its begin.
pub fn share_reached_ms(one: &[(f64, f64)], all: &[Vec<(f64, f64)>], share: f64, span: Span) -> Option<f64> {
    let found = one.iter().filter(|(at_ms, count)| span.has(*at_ms) && *count > 0.0).find(|(at_ms, count)| {
        // The servers' figures are not of the same moment: each one's that is nearest.
        let nearest = |steps: &Vec<(f64, f64)>| {
            let near = steps.iter().min_by(|a, b| (a.0 - at_ms).abs().total_cmp(&(b.0 - at_ms).abs()));
            near.map_or(0.0, |(_, count)| *count)
        };
        *count >= share * all.iter().map(nearest).sum::<f64>()
    });
    found.map(|(at_ms, _)| at_ms - span.from_ms)
}

/// The least share of some servers against their mean.
pub fn balance(totals: &[f64]) -> f64 {
    let mean = totals.iter().sum::<f64>() / totals.len().max(1) as f64;
    let least = totals.iter().copied().fold(f64::INFINITY, f64::min);
    if mean > 0.0 { least / mean } else { 0.0 }
}

#[cfg(test)]
mod test {
    use super::*;

    const SPAN: Span = Span { from_ms: 1000.0, to_ms: 2000.0 };

    /// Two partitions; the second one is silent between two times.
    fn slots(silent_from_ms: f64, silent_to_ms: f64) -> Vec<Slot> {
        (0..100)
            .map(|number| {
                let at_ms = f64::from(number) * 20.0 + 20.0;
                let second = u32::from(!(silent_from_ms < at_ms && at_ms < silent_to_ms));
                Slot { at_ms, answered: vec![3, second], ..Slot::default() }
            })
            .collect()
    }

    #[test]
    fn a_silence_is_over_when_it_is_over() {
        assert_eq!(all_answered_ms(&slots(0.0, 0.0), SPAN), Some(0.0));
        assert_eq!(all_answered_ms(&slots(1000.0, 1400.0), SPAN), Some(400.0));
        assert_eq!(all_answered_ms(&slots(1000.0, 1060.0), SPAN), Some(0.0), "a breath");
        assert_eq!(all_answered_ms(&slots(1500.0, 1700.0), SPAN), Some(0.0), "that is something else");
        assert_eq!(all_answered_ms(&slots(1200.0, 9999.0), SPAN), None);
        let silence = silences(&slots(1500.0, 1700.0), SPAN)[0];
        assert_eq!((silence.from_ms, silence.to_ms), (1500.0, 1700.0));
        assert_eq!(all_answered_ms(&[], SPAN), None);
        assert_eq!(rate(&slots(0.0, 0.0), SPAN), 200.0);
    }

    #[test]
    fn a_server_that_starts_again_counts_from_nothing() {
        let taken: Vec<Taken> = [Some(5), Some(9), None, None, Some(3), Some(4)]
            .iter()
            .zip(1_u32..)
            .map(|(sets, at)| Taken { at_ms: 1000.0 + f64::from(at) * 100.0, sets: *sets })
            .collect();
        let steps = steps(&taken);
        assert_eq!(steps.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [4.0, 0.0, 0.0, 3.0, 1.0]);
        assert_eq!(total(&steps, SPAN), 8.0);
        let other: Vec<(f64, f64)> = steps.iter().map(|(at_ms, _)| (*at_ms, 3.0)).collect();
        assert_eq!(share_reached_ms(&steps, &[steps.clone(), other], 0.5, SPAN.after(200.0)), Some(300.0));
        assert_eq!(balance(&[4.0, 6.0]), 0.8);
        assert_eq!(balance(&[]), 0.0);
    }
}
