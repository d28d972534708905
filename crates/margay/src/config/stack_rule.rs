//! `[[stack_rule]]`: when flows are carried otherwise than they began.

use std::ops::Range;
use std::time::Duration;

use margay_core::Stack;
use margay_core::stack_rule::{STACK_RULES_MAX, StackRule};
use serde::Deserialize;
use toml::Spanned;

use crate::condition;
use crate::listener::ServiceName;

/// A longer time is a mistake.
const TIME_MAX_S: u32 = 3600;

/// `[[stack_rule]]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackRuleSection {
    /// Which names, or prefixes (`sid:<hex>/bits`) with all that is under them.
    pub names: Vec<ServiceName>,
    /// The condition, in CEL: [facts](stacks.md#facts) and what they are compared with.
    pub when: Spanned<String>,
    /// By which stack flows are carried while the rule is in force; `fec` of flows that are to be sealed is
    /// `secure-fec`, and `sctp` is `secure-sctp`.
    pub r#use: StackUse,
    /// For so many seconds the condition must hold before that, up to an hour; a rule with `floor` is in force at once.
    #[serde(default = "default_hold_s")]
    pub hold_s: u32,
    /// For so many seconds the condition must be over before flows are carried as without the rule, up to an hour.
    #[serde(default = "default_release_s")]
    pub release_s: u32,
    /// Of several rules in force the one with the greatest decides, and of two that have the same the first in the
    /// file; 0 unless given.
    #[serde(default)]
    pub priority: i32,
    /// With `use = "secure"`, `"secure-fec"` or `"secure-sctp"`: a demand. Nothing is sent to addresses where the
    /// condition holds but sealed, and no order has it otherwise.
    #[serde(default)]
    pub floor: bool,
}

/// A stack, as the file has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StackUse {
    /// Encapsulated, and direct where that can be.
    Plain,
    /// Flows of datagrams: encapsulated, and what the network loses is repaired.
    Fec,
    /// Flows of datagrams: encapsulated, and what the network loses is sent again, for a quarter of a second.
    Sctp,
    /// Sealed.
    Secure,
    /// Flows of datagrams: sealed, and what the network loses is repaired.
    SecureFec,
    /// Flows of datagrams: sealed, and what the network loses is sent again.
    SecureSctp,
}

impl StackUse {
    const fn stack(self) -> Stack {
        match self {
            Self::Plain => Stack::Plain,
            Self::Fec => Stack::Fec,
            Self::Sctp => Stack::Sctp,
            Self::Secure => Stack::Secure,
            Self::SecureFec => Stack::SecureFec,
            Self::SecureSctp => Stack::SecureSctp,
        }
    }
}

const fn default_hold_s() -> u32 {
    3
}

const fn default_release_s() -> u32 {
    10
}

/// What is wrong, at which bytes of the file, and what to do.
type Fault = (String, Option<Range<usize>>, String);

impl StackRuleSection {
    /// What is wrong with it as a whole, and what to do.
    fn check(&self) -> Result<(), (String, String)> {
        let times = [("hold_s", self.hold_s), ("release_s", self.release_s)];
        let long = times.iter().find(|(_, seconds)| *seconds > TIME_MAX_S);
        match long {
            _ if self.names.is_empty() => {
                Err(("a [[stack_rule]] is about no name".into(), "write some `names`, or remove it".into()))
            }
            _ if self.floor && !self.r#use.stack().is_sealed() => {
                let what =
                    format!("`floor` demands that flows are sealed, and `use` is {:?}", self.r#use.stack().label());
                Err((what, "write `use = \"secure\"`, or remove `floor`".into()))
            }
            Some((name, seconds)) => {
                let what = format!("{name} is {seconds}, which is longer than an hour");
                Err((what, format!("write up to {TIME_MAX_S}")))
            }
            None => Ok(()),
        }
    }

    /// Whether two rules with one condition want different stacks of one name.
    fn contradicts(&self, other: &Self) -> bool {
        let is_shared = |name: &ServiceName| other.names.iter().any(|one| one.0.prefix().overlaps(&name.0.prefix()));
        self.when.get_ref() == other.when.get_ref()
            && self.r#use != other.r#use
            && self.priority == other.priority
            && self.names.iter().any(is_shared)
    }
}

/// Reads the conditions. `text` is the file, for where they stand in it; `host_name` is what `host.name` says.
///
/// # Errors
///
/// What is wrong with a section, or with its condition, and where.
pub fn rules(sections: &[Spanned<StackRuleSection>], text: &str, host_name: &str) -> Result<Vec<StackRule>, Fault> {
    let mut rules: Vec<StackRule> = Vec::new();
    if let Some(beyond) = sections.get(STACK_RULES_MAX) {
        let what = format!("this is one more than the {STACK_RULES_MAX} sections that are taken");
        return Err((what, Some(beyond.span()), "join some of them by `||`".into()));
    }
    for (at, section) in sections.iter().enumerate() {
        let this = section.get_ref();
        this.check().map_err(|(what, advice)| (what, Some(section.span()), advice))?;
        if let Some(earlier) = sections[..at].iter().position(|earlier| earlier.get_ref().contradicts(this)) {
            let what =
                format!("this rule and rule {} contradict each other: one condition, and two stacks", earlier + 1);
            return Err((what, Some(section.span()), "remove one, or give them different priorities".into()));
        }
        let when = condition::read(this.when.get_ref(), host_name)
            .map_err(|fault| (fault.what, Some(place(&this.when, text, fault.at)), fault.advice))?;
        for name in when.outside_facts() {
            let kind = when.kind_of_outside(name);
            let earlier = rules.iter().find_map(|rule| Some((rule.number, rule.when.kind_of_outside(name)?)));
            if let (Some(kind), Some((number, other))) = (kind, earlier.filter(|(_, other)| Some(*other) != kind)) {
                let what = format!("fact.{name} is {} here, and {} in rule {number}", kind.text(), other.text());
                return Err((what, Some(this.when.span()), "compare it with the same kind of value in both".into()));
            }
        }
        rules.push(StackRule {
            number: u16::try_from(at + 1).unwrap_or(u16::MAX),
            names: this.names.iter().map(|name| name.0.prefix()).collect(),
            text: this.when.get_ref().clone(),
            when,
            uses: this.r#use.stack(),
            hold: Duration::from_secs(this.hold_s.into()),
            release: Duration::from_secs(this.release_s.into()),
            priority: this.priority,
            is_floor: this.floor,
        });
    }
    Ok(rules)
}

/// Where in the file a part of a condition stands; all of the condition where it is written with escapes.
fn place(when: &Spanned<String>, text: &str, at: Option<Range<usize>>) -> Range<usize> {
    let span = when.span();
    let begin = text.get(span.clone()).and_then(|written| written.find(when.get_ref().as_str()));
    match (begin, at) {
        (Some(begin), Some(at)) => span.start + begin + at.start..span.start + begin + at.end,
        _ => span,
    }
}
