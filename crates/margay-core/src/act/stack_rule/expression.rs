//! A condition of a stack rule, read and typed: what is left of it costs a few comparisons.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::IpAddr;

use super::fact::{Constant, Fact, Facts, Kind, Pace, Value};

/// How two values are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// `==`
    Equal,
    /// `!=`
    Other,
    /// `<`
    Less,
    /// `<=`
    AtMost,
    /// `>`
    More,
    /// `>=`
    AtLeast,
}

/// What is done with two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// `+`
    Add,
    /// `-`
    Subtract,
    /// `*`
    Multiply,
    /// `/`, whole or not
    Divide,
}

/// Where in a text another one is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// `startsWith`
    Start,
    /// `endsWith`
    End,
    /// `contains`
    Anywhere,
}

/// The addresses of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Any address of it.
    pub address: IpAddr,
    /// How many bits count: at most as many as the address has.
    pub bits: u8,
}

impl Network {
    /// Whether an address is of it.
    pub fn contains(&self, address: IpAddr) -> bool {
        let of = |address: IpAddr| match address {
            IpAddr::V4(v4) => (32, u128::from(u32::from(v4))),
            IpAddr::V6(v6) => (128, u128::from(v6)),
        };
        let (len, own) = of(self.address);
        let (other_len, other) = of(address);
        let shift = len - u32::from(self.bits).min(len);
        // All bits of an IPv6 address may be beyond those that count.
        len == other_len && (own ^ other).checked_shr(shift).unwrap_or(0) == 0
    }
}

/// A condition, or a part of one. Whoever makes one sees to it that the kinds fit; where they do not, it fails.
#[derive(Clone, Debug, PartialEq)]
pub enum Expression {
    /// Stands in the rule.
    Constant(Constant),
    /// Of the flow, the path or the time.
    Fact(Fact),
    /// From outside, by its name, of this kind.
    Outside(String, Kind),
    /// Whether a fact from outside is set.
    IsSet(String),
    /// Whether a fact is known.
    IsKnown(Fact),
    /// `!`
    Not(Box<Self>),
    /// `-`
    Negative(Box<Self>),
    /// `&&`
    And(Box<[Self; 2]>),
    /// `||`
    Or(Box<[Self; 2]>),
    /// `condition ? one : other`
    If(Box<[Self; 3]>),
    /// Two values of one kind.
    Compare(Comparison, Box<[Self; 2]>),
    /// Two numbers become one.
    Calculate(Arithmetic, Box<[Self; 2]>),
    /// `value in [..]`
    In(Box<Self>, Vec<Constant>),
    /// `address.within("..")`
    Within(Box<Self>, Network),
    /// `text.startsWith(other)` and the like
    Find(Place, Box<[Self; 2]>),
}

/// Why a condition has no value now. It counts as false.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// A fact is not known of this flow, or not yet.
    #[error("{0} is not known of this flow now")]
    Unknown(Fact),
    /// A fact from outside is not set, or no more.
    #[error("fact.{0} is not set; `margay fact set {0} VALUE` sets it")]
    NotSet(String),
    /// A fact from outside is of another kind than the rule wants.
    #[error("fact.{name} is {is}, and the rule wants {wanted}")]
    OtherKind {
        /// The fact's name, without `fact.`.
        name: String,
        /// The kind that a part of the condition has.
        is: &'static str,
        /// The kind that the operator beside the fact takes.
        wanted: &'static str,
    },
    /// No number comes out of it.
    #[error("a division by zero, or a number that is too large")]
    NoNumber,
    /// The parts do not fit.
    #[error("values of different kinds meet")]
    Mixed,
}

impl Expression {
    /// Whether the condition holds.
    ///
    /// # Errors
    ///
    /// Why nobody knows.
    pub fn holds(&self, facts: &dyn Facts) -> Result<bool, Failure> {
        match self.value(facts)? {
            Value::Bool(holds) => Ok(holds),
            _ => Err(Failure::Mixed),
        }
    }

    fn number(&self, facts: &dyn Facts) -> Result<f64, Failure> {
        match self.value(facts)? {
            Value::Number(number) => Ok(number),
            _ => Err(Failure::Mixed),
        }
    }

    fn value<'a>(&'a self, facts: &'a dyn Facts) -> Result<Value<'a>, Failure> {
        let is = |is: bool| Ok(Value::Bool(is));
        match self {
            Self::Constant(constant) => Ok(constant.value()),
            Self::Fact(fact) => facts.fact(*fact).ok_or(Failure::Unknown(*fact)),
            Self::Outside(name, kind) => outside(facts, name, *kind),
            Self::IsSet(name) => is(facts.outside(name).is_some()),
            Self::IsKnown(fact) => is(facts.fact(*fact).is_some()),
            Self::Not(part) => is(!part.holds(facts)?),
            Self::Negative(part) => Ok(Value::Number(-part.number(facts)?)),
            Self::And(parts) => is(decided_by(false, parts, facts)?),
            Self::Or(parts) => is(decided_by(true, parts, facts)?),
            Self::If(parts) => {
                let [condition, one, other] = &**parts;
                if condition.holds(facts)? { one.value(facts) } else { other.value(facts) }
            }
            Self::Compare(how, parts) => is(compare(*how, &parts[0].value(facts)?, &parts[1].value(facts)?)?),
            Self::Calculate(how, parts) => calculate(*how, parts[0].number(facts)?, parts[1].number(facts)?),
            Self::In(part, list) => {
                let value = part.value(facts)?;
                is(list.iter().any(|one| one.value().is(&value)))
            }
            Self::Within(part, network) => match part.value(facts)? {
                Value::Address(address) => is(network.contains(address)),
                _ => Err(Failure::Mixed),
            },
            Self::Find(place, parts) => match (parts[0].value(facts)?, parts[1].value(facts)?) {
                (Value::Text(text), Value::Text(other)) => is(match place {
                    Place::Start => text.starts_with(other),
                    Place::End => text.ends_with(other),
                    Place::Anywhere => text.contains(other),
                }),
                _ => Err(Failure::Mixed),
            },
        }
    }

    /// What it consists of.
    pub(super) fn parts(&self) -> &[Self] {
        match self {
            Self::Constant(_) | Self::Fact(_) | Self::Outside(..) | Self::IsSet(_) | Self::IsKnown(_) => &[],
            Self::Not(part) | Self::Negative(part) | Self::In(part, _) | Self::Within(part, _) => {
                core::slice::from_ref(part)
            }
            Self::And(parts) | Self::Or(parts) | Self::Compare(_, parts) => &**parts,
            Self::Calculate(_, parts) | Self::Find(_, parts) => &**parts,
            Self::If(parts) => &**parts,
        }
    }

    /// Calls `visit` with every part, itself first.
    pub(super) fn each<'a>(&'a self, visit: &mut impl FnMut(&'a Self)) {
        visit(self);
        self.parts().iter().for_each(|part| part.each(visit));
    }

    /// The facts that it is about, each once.
    pub fn facts(&self) -> Vec<Fact> {
        let mut facts = Vec::new();
        self.each(&mut |part| {
            if let Self::Fact(fact) | Self::IsKnown(fact) = part
                && !facts.contains(fact)
            {
                facts.push(*fact);
            }
        });
        facts
    }

    /// Whether it asks if a fact is known that may become so with any packet.
    pub(super) fn asks_of_packets(&self) -> bool {
        let mut asks = false;
        self.each(&mut |part| asks |= matches!(part, Self::IsKnown(fact) if fact.pace() == Pace::Always));
        asks
    }

    /// What it wants a fact from outside to be, if it compares it.
    pub fn kind_of_outside(&self, name: &str) -> Option<Kind> {
        let mut wanted = None;
        self.each(&mut |part| {
            if let Self::Outside(other, kind) = part
                && other == name
            {
                wanted = Some(*kind);
            }
        });
        wanted
    }

    /// The facts from outside that it is about, each once.
    pub fn outside_facts(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        self.each(&mut |part| {
            if let Self::Outside(name, _) | Self::IsSet(name) = part
                && !names.contains(&&**name)
            {
                names.push(name);
            }
        });
        names
    }
}

fn outside<'a>(facts: &'a dyn Facts, name: &str, kind: Kind) -> Result<Value<'a>, Failure> {
    let value = facts.outside(name).ok_or_else(|| Failure::NotSet(name.into()))?;
    if value.kind() != kind {
        return Err(Failure::OtherKind { name: name.into(), is: value.kind().text(), wanted: kind.text() });
    }
    Ok(value)
}

/// Of two conditions one that is `decides` decides, also where the other has no value.
fn decided_by(decides: bool, parts: &[Expression; 2], facts: &dyn Facts) -> Result<bool, Failure> {
    let first = parts[0].holds(facts);
    if first == Ok(decides) {
        return Ok(decides);
    }
    let second = parts[1].holds(facts)?;
    if second == decides { Ok(decides) } else { first }
}

fn compare(how: Comparison, one: &Value<'_>, other: &Value<'_>) -> Result<bool, Failure> {
    let ordered = |of: fn(&f64, &f64) -> bool| match (one, other) {
        (Value::Number(one), Value::Number(other)) => Ok(of(one, other)),
        _ => Err(Failure::Mixed),
    };
    match how {
        Comparison::Equal => Ok(one.is(other)),
        Comparison::Other => Ok(!one.is(other)),
        Comparison::Less => ordered(f64::lt),
        Comparison::AtMost => ordered(f64::le),
        Comparison::More => ordered(f64::gt),
        Comparison::AtLeast => ordered(f64::ge),
    }
}

fn calculate(how: Arithmetic, one: f64, other: f64) -> Result<Value<'static>, Failure> {
    let result = match how {
        Arithmetic::Add => one + other,
        Arithmetic::Subtract => one - other,
        Arithmetic::Multiply => one * other,
        Arithmetic::Divide => one / other,
    };
    if result.is_finite() { Ok(Value::Number(result)) } else { Err(Failure::NoNumber) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Knows that the flow is of UDP, and one fact from outside.
    struct Known;

    impl Facts for Known {
        fn fact(&self, fact: Fact) -> Option<Value<'_>> {
            (fact == Fact::Protocol).then_some(Value::Text("udp"))
        }

        fn outside(&self, name: &str) -> Option<Value<'_>> {
            (name == "load").then_some(Value::Number(3.0))
        }
    }

    fn constant(is: bool) -> Expression {
        Expression::Constant(Constant::Bool(is))
    }

    #[test]
    fn what_has_no_value_does_not_matter_where_the_other_part_decides() {
        let unknown = || {
            Expression::Compare(
                Comparison::Less,
                Box::new([Expression::Fact(Fact::RttMs), Expression::Constant(Constant::Number(5.0))]),
            )
        };
        let failure = Err(Failure::Unknown(Fact::RttMs));
        for (is, and, or) in [(false, Ok(false), failure.clone()), (true, failure, Ok(true))] {
            for parts in [[unknown(), constant(is)], [constant(is), unknown()]] {
                assert_eq!(Expression::And(Box::new(parts.clone())).holds(&Known), and);
                assert_eq!(Expression::Or(Box::new(parts)).holds(&Known), or);
            }
        }
    }

    #[test]
    fn facts_from_outside_are_absent_or_of_another_kind() {
        let of = |name: &str, kind| {
            Expression::Compare(
                Comparison::Equal,
                Box::new([Expression::Outside(name.into(), kind), Expression::Constant(Constant::Number(3.0))]),
            )
        };
        assert_eq!(of("load", Kind::Number).holds(&Known), Ok(true));
        assert_eq!(of("place", Kind::Number).holds(&Known), Err(Failure::NotSet("place".into())));
        let wrong = of("load", Kind::Text).holds(&Known).expect_err("no text");
        assert!(wrong.to_string().starts_with("fact.load is a number"), "{wrong}");
        assert_eq!(Expression::IsSet("place".into()).holds(&Known), Ok(false));
        assert_eq!(of("load", Kind::Number).outside_facts(), ["load"]);
    }

    #[test]
    fn numbers_that_are_none_fail() {
        assert_eq!(calculate(Arithmetic::Divide, 1.0, 0.0), Err(Failure::NoNumber));
        assert_eq!(calculate(Arithmetic::Multiply, f64::MAX, 2.0), Err(Failure::NoNumber));
        assert_eq!(calculate(Arithmetic::Divide, 1.0, 4.0), Ok(Value::Number(0.25)));
    }

    #[test]
    fn networks_contain_addresses_of_their_family() {
        let network = |text: &str, bits| Network { address: text.parse().expect("literal"), bits };
        let at = |text: &str| -> IpAddr { text.parse().expect("literal") };
        assert!(
            network("10.1.0.0", 16).contains(at("10.1.200.3")) && !network("10.1.0.0", 16).contains(at("10.2.0.1"))
        );
        assert!(network("0.0.0.0", 0).contains(at("192.0.2.1")) && !network("0.0.0.0", 0).contains(at("::1")));
        assert!(network("::", 0).contains(at("fd00::1")) && network("fd00::", 8).contains(at("fd12::1")));
        assert!(!network("fd00::1", 128).contains(at("fd00::2")));
    }

    use alloc::string::ToString;
}
