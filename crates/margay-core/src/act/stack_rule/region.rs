//! Between which values of a fact no condition changes. A fact such as a flow's age is another one with each look, but
//! a condition that compares it with ten seconds changes once: in between, the look costs a comparison for each fact
//! instead of an evaluation for each rule.

use alloc::vec::Vec;

use super::expression::Expression;
use super::fact::{Constant, Fact, Pace, Value};

/// What a condition compares those facts with that change with every packet.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// A fact, and a number that the condition compares it with.
    thresholds: Vec<(Fact, f64)>,
    /// Facts of which only whether they are known matters, or whether they are true.
    states: Vec<Fact>,
    /// Facts that the condition calculates with: any other value may change it.
    loose: Vec<Fact>,
}

impl Watch {
    pub fn of(when: &Expression) -> Self {
        let mut watch = Self::default();
        watch.add(when);
        watch
    }

    fn add(&mut self, part: &Expression) {
        let is_watched = |fact: &Fact| fact.pace() == Pace::Always;
        match part {
            Expression::Compare(_, parts) => match &**parts {
                [Expression::Fact(fact), Expression::Constant(Constant::Number(number))]
                | [Expression::Constant(Constant::Number(number)), Expression::Fact(fact)]
                    if is_watched(fact) =>
                {
                    self.thresholds.push((*fact, *number));
                }
                parts => parts.iter().for_each(|one| self.add(one)),
            },
            Expression::IsKnown(fact) if is_watched(fact) => self.states.push(*fact),
            Expression::Fact(fact) if is_watched(fact) => self.loose.push(*fact),
            other => other.parts().iter().for_each(|one| self.add(one)),
        }
    }

    /// The facts that it is about.
    fn facts(&self) -> impl Iterator<Item = Fact> {
        let compared = self.thresholds.iter().map(|(fact, _)| *fact);
        compared.chain(self.states.iter().copied()).chain(self.loose.iter().copied())
    }
}

/// The values of a fact among which the one that it has now lies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Values {
    /// It is not known.
    Unknown,
    /// One truth value.
    Is(bool),
    /// One number.
    Exactly(f64),
    /// The numbers between two, without these.
    Between(f64, f64),
}

/// One fact, and the values of it for which the conditions of a flow are as they were found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Region {
    fact: Fact,
    values: Values,
}

impl Region {
    /// Whether the conditions are with this value as they were found.
    fn has(&self, value: Option<Value<'_>>) -> bool {
        match (self.values, value) {
            (Values::Unknown, None) => true,
            (Values::Is(is), Some(Value::Bool(now))) => is == now,
            (Values::Exactly(number), Some(Value::Number(now))) => number == now,
            (Values::Between(low, high), Some(Value::Number(now))) => low < now && now < high,
            _ => false,
        }
    }
}

/// Whether no condition has become another one, as far as `value` says.
pub(super) fn are_as_found<'a>(regions: &[Region], value: impl Fn(Fact) -> Option<Value<'a>>) -> bool {
    regions.iter().all(|region| region.has(value(region.fact)))
}

/// The regions of all facts that some conditions are about, by the values that they have now.
pub(super) fn regions<'a, 'w>(
    watches: impl Iterator<Item = &'w Watch> + Clone,
    value: impl Fn(Fact) -> Option<Value<'a>>,
) -> Vec<Region> {
    let mut found: Vec<Region> = Vec::new();
    for fact in watches.clone().flat_map(Watch::facts) {
        if found.iter().any(|region| region.fact == fact) {
            continue;
        }
        let values = match value(fact) {
            None => Values::Unknown,
            Some(Value::Number(number)) => around(number, fact, watches.clone()),
            Some(Value::Bool(is)) => Values::Is(is),
            // No fact of this pace has another kind; if one comes to have it, it is evaluated with each look.
            Some(_) => Values::Exactly(f64::NAN),
        };
        found.push(Region { fact, values });
    }
    found
}

/// The numbers around `number` that no condition tells from it.
fn around<'w>(number: f64, fact: Fact, watches: impl Iterator<Item = &'w Watch>) -> Values {
    let mut low = f64::NEG_INFINITY;
    let mut high = f64::INFINITY;
    for watch in watches {
        if watch.loose.contains(&fact) {
            return Values::Exactly(number);
        }
        for (_, threshold) in watch.thresholds.iter().filter(|(compared, _)| *compared == fact) {
            if *threshold < number {
                low = low.max(*threshold);
            } else if *threshold > number {
                high = high.min(*threshold);
            } else {
                return Values::Exactly(number);
            }
        }
    }
    Values::Between(low, high)
}

#[cfg(test)]
mod tests {
    use alloc::boxed::Box;

    use proptest::prelude::*;

    use super::super::expression::{Arithmetic, Comparison};
    use super::super::fact::{Facts, Kind};
    use super::*;

    /// What changes with every packet.
    #[derive(Clone, Copy, Debug)]
    struct Now {
        age_s: f64,
        rtt_ms: Option<f64>,
        is_translated: bool,
    }

    impl Facts for Now {
        fn fact(&self, fact: Fact) -> Option<Value<'_>> {
            match fact {
                Fact::AgeS => Some(Value::Number(self.age_s)),
                Fact::RttMs => self.rtt_ms.map(Value::Number),
                Fact::IsTranslated => Some(Value::Bool(self.is_translated)),
                _ => None,
            }
        }

        fn outside(&self, _name: &str) -> Option<Value<'_>> {
            None
        }
    }

    fn fact(fact: Fact) -> Expression {
        Expression::Fact(fact)
    }

    fn number(number: f64) -> Expression {
        Expression::Constant(Constant::Number(number))
    }

    fn numeric() -> impl Strategy<Value = Expression> {
        let leaf = prop_oneof![
            Just(fact(Fact::AgeS)),
            Just(fact(Fact::RttMs)),
            (0_u8..6).prop_map(|value| number(value.into())),
        ];
        leaf.prop_recursive(2, 6, 2, |inner| {
            (inner.clone(), inner)
                .prop_map(|(one, other)| Expression::Calculate(Arithmetic::Add, Box::new([one, other])))
        })
    }

    fn condition() -> impl Strategy<Value = Expression> {
        let how = prop_oneof![
            Just(Comparison::Equal),
            Just(Comparison::Other),
            Just(Comparison::Less),
            Just(Comparison::AtMost),
            Just(Comparison::More),
            Just(Comparison::AtLeast),
        ];
        let leaf = prop_oneof![
            (how, numeric(), numeric()).prop_map(|(how, one, other)| Expression::Compare(how, Box::new([one, other]))),
            Just(Expression::IsKnown(Fact::RttMs)),
            Just(fact(Fact::IsTranslated)),
            Just(Expression::Outside("absent".into(), Kind::Bool)),
        ];
        leaf.prop_recursive(3, 12, 3, |inner| {
            prop_oneof![
                inner.clone().prop_map(|one| Expression::Not(Box::new(one))),
                (inner.clone(), inner.clone()).prop_map(|(one, other)| Expression::And(Box::new([one, other]))),
                (inner.clone(), inner.clone()).prop_map(|(one, other)| Expression::Or(Box::new([one, other]))),
                (inner.clone(), inner.clone(), inner)
                    .prop_map(|(when, one, other)| Expression::If(Box::new([when, one, other]))),
            ]
        })
    }

    fn now() -> impl Strategy<Value = Now> {
        let half = |halves: u8| f64::from(halves) / 2.0;
        (0_u8..14, proptest::option::of(0_u8..14), any::<bool>()).prop_map(move |(age, rtt, is_translated)| Now {
            age_s: half(age),
            rtt_ms: rtt.map(half),
            is_translated,
        })
    }

    proptest! {
        #[test]
        fn conditions_change_only_where_a_fact_leaves_its_region(
            conditions in proptest::collection::vec(condition(), 1..4),
            before in now(),
            after in proptest::collection::vec(now(), 1..12),
        ) {
            let watches: Vec<Watch> = conditions.iter().map(Watch::of).collect();
            let regions = regions(watches.iter(), |fact| before.fact(fact));
            prop_assert!(are_as_found(&regions, |fact| before.fact(fact)), "{regions:?} has {before:?}");
            for now in after.iter().filter(|now| are_as_found(&regions, |fact| now.fact(fact))) {
                for condition in &conditions {
                    prop_assert_eq!(condition.holds(now), condition.holds(&before), "{:?}", now);
                }
            }
        }
    }

    #[test]
    fn a_number_that_is_compared_has_a_region_and_one_that_is_calculated_with_has_none() {
        let of = |when: Expression| {
            let watch = Watch::of(&when);
            let at = |age_s| Now { age_s, rtt_ms: None, is_translated: false };
            let found = at(5.0);
            let regions = regions([&watch].into_iter(), |fact| found.fact(fact));
            [4.0, 5.0, 6.0, 10.0].map(at).map(|now| are_as_found(&regions, |fact| now.fact(fact)))
        };
        let less = |one, other| Expression::Compare(Comparison::Less, Box::new([one, other]));
        assert_eq!(of(less(fact(Fact::AgeS), number(10.0))), [true, true, true, false]);
        assert_eq!(of(less(number(5.0), fact(Fact::AgeS))), [false, true, false, false]);
        let twice = Expression::Calculate(Arithmetic::Add, Box::new([fact(Fact::AgeS), fact(Fact::AgeS)]));
        assert_eq!(of(less(twice, number(100.0))), [false, true, false, false]);
    }
}
