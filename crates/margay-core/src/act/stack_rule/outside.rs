//! Facts from outside: what an operator or a program says of the world, for a while.

use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::fact::{Kind, Value};
use crate::act::stack_rule::StackRules;
use crate::machine::sal::Sal;
use crate::types::time::Instant;

/// Facts from outside that are set at one time, on one host.
const FACTS_MAX: usize = 256;
/// Bytes of a name, and of a text.
const NAME_MAX: usize = 64;
const TEXT_MAX: usize = 256;
/// The longest life of a fact.
const TTL_MAX: Duration = Duration::from_secs(24 * 3600);

/// What a fact from outside says.
#[derive(Clone, Debug, PartialEq)]
pub enum FactValue {
    /// True or false.
    Bool(bool),
    /// A number.
    Number(f64),
    /// A text.
    Text(String),
}

impl FactValue {
    /// As it is written: `true` and `false`, a number, or else a text.
    pub fn read(text: &str) -> Self {
        match (text, text.parse::<f64>()) {
            ("true", _) => Self::Bool(true),
            ("false", _) => Self::Bool(false),
            (_, Ok(number)) if number.is_finite() => Self::Number(number),
            (text, _) => Self::Text(text.into()),
        }
    }

    pub(super) fn value(&self) -> Value<'_> {
        match self {
            Self::Bool(is) => Value::Bool(*is),
            Self::Number(number) => Value::Number(*number),
            Self::Text(text) => Value::Text(text),
        }
    }
}

/// A fact that is set.
#[derive(Clone, Debug, PartialEq)]
pub struct OutsideFact {
    /// The value, which has the kind that rules compare the fact with.
    pub value: FactValue,
    /// When it was set.
    pub since: Instant,
    /// From here on the fact is not set, unless it is set anew.
    pub until: Instant,
}

/// The same, for lists.
#[derive(Clone, Debug, PartialEq)]
pub struct OutsideInfo {
    /// What rules call it, after `fact.`.
    pub name: String,
    /// Its value, when it was set, and until when it holds.
    pub fact: OutsideFact,
    /// Rules that look at it, by their numbers.
    pub rules: Vec<u16>,
}

/// Why a fact is not set. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FactRefused {
    /// No name that a rule could have.
    #[error(
        "`{0}` is no name of a fact: it begins with a letter, and has up to {NAME_MAX} small letters, digits and \
         underscores"
    )]
    Name(String),
    /// Too long.
    #[error("the text has {0} bytes; a fact has at most {TEXT_MAX}")]
    Long(usize),
    /// No time that a fact may live.
    #[error("a fact lives from one second to a day")]
    Ttl,
    /// A rule compares it with something else.
    #[error("rule {rule} wants fact.{name} to be {wanted}, and this is {is}")]
    OtherKind {
        /// The fact's name, without `fact.`.
        name: String,
        /// The number of one of the rules that compare the fact, as lists have it.
        rule: u16,
        /// The kind that the rule compares the fact with.
        wanted: &'static str,
        /// The kind of the value that was to be set.
        is: &'static str,
    },
    /// Too many.
    #[error("{FACTS_MAX} facts are set already; `margay fact clear NAME` makes room")]
    Full,
    /// There is none to clear.
    #[error("no fact is called `{0}`; `margay fact list` shows those that are set")]
    NotSet(String),
}

/// Whether a rule can name a fact so.
pub fn is_fact_name(name: &str) -> bool {
    let is_in_bounds = (1..=NAME_MAX).contains(&name.len());
    let may_follow = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    is_in_bounds && name.as_bytes()[0].is_ascii_lowercase() && name.bytes().all(may_follow)
}

impl Sal {
    /// Sets a fact from outside, or sets it anew.
    ///
    /// # Errors
    ///
    /// [`FactRefused`]; nothing has changed then.
    pub fn set_fact(&mut self, now: Instant, name: &str, value: FactValue, ttl: Duration) -> Result<(), FactRefused> {
        self.now = now;
        self.stack_rules.expire_facts(now);
        if !is_fact_name(name) {
            return Err(FactRefused::Name(name.chars().take(NAME_MAX).collect()));
        }
        if let FactValue::Text(text) = &value
            && text.len() > TEXT_MAX
        {
            return Err(FactRefused::Long(text.len()));
        }
        if !(Duration::from_secs(1)..=TTL_MAX).contains(&ttl) {
            return Err(FactRefused::Ttl);
        }
        let is = value.value().kind();
        if let Some((rule, wanted)) = self.stack_rules.kind_wanted(name).filter(|(_, wanted)| *wanted != is) {
            return Err(FactRefused::OtherKind { name: name.into(), rule, wanted: wanted.text(), is: is.text() });
        }
        let outside = &mut self.stack_rules.outside;
        if outside.len() >= FACTS_MAX && !outside.contains_key(name) {
            return Err(FactRefused::Full);
        }
        let fact = OutsideFact { value, since: now, until: now + ttl };
        let before = outside.insert(name.into(), fact.clone());
        if before.is_none_or(|before| before.value != fact.value) {
            self.stack_rules.epoch += 1;
        }
        Ok(())
    }

    /// Forgets a fact from outside.
    ///
    /// # Errors
    ///
    /// No fact of this name is set; nothing has changed then.
    pub fn clear_fact(&mut self, now: Instant, name: &str) -> Result<(), FactRefused> {
        self.now = now;
        self.stack_rules.expire_facts(now);
        if self.stack_rules.outside.remove(name).is_none() {
            return Err(FactRefused::NotSet(name.chars().take(NAME_MAX).collect()));
        }
        self.stack_rules.epoch += 1;
        Ok(())
    }

    /// The facts from outside that are set at `now`, by their names.
    pub fn outside_facts(&mut self, now: Instant) -> Vec<OutsideInfo> {
        self.now = now;
        self.stack_rules.expire_facts(now);
        let rules = &self.stack_rules.rules;
        let info = |(name, fact): (&String, &OutsideFact)| OutsideInfo {
            name: name.clone(),
            fact: fact.clone(),
            rules: rules
                .iter()
                .filter(|one| one.when.outside_facts().contains(&&**name))
                .map(|one| one.number)
                .collect(),
        };
        self.stack_rules.outside.iter().map(info).collect()
    }
}

impl StackRules {
    pub(super) fn expire_facts(&mut self, now: Instant) {
        let before = self.outside.len();
        self.outside.retain(|_, fact| fact.until > now);
        if self.outside.len() != before {
            self.epoch += 1;
        }
    }

    /// What a rule wants a fact to be, and which rule.
    fn kind_wanted(&self, name: &str) -> Option<(u16, Kind)> {
        self.rules.iter().find_map(|rule| Some((rule.number, rule.when.kind_of_outside(name)?)))
    }
}
