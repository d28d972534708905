//! Conditions of stack rules: CEL, read and typed when the configuration is loaded (docs/decisions/0076).
//!
//! The parser is the crate `cel`'s. Its interpreter is not used: a condition is about a few facts that are known
//! beforehand, so that every mistake is found when the file is read, and what is left costs some comparisons
//! ([`Expression`]).

mod operation;

use std::net::IpAddr;
use std::ops::Range;

use cel::IdedExpr;
use cel::common::ast::{Expr, LiteralValue, SelectExpr, SourceInfo};
use cel::parser::Parser;
use margay_core::name::Name;
use margay_core::stack_rule::{Constant, Expression, Fact, Kind, is_fact_name};

/// Bytes of a condition, how deep its brackets nest, how deep its parts do, and how many parts there are.
const TEXT_MAX: usize = 1024;
const BRACKETS_MAX: usize = 16;
const DEPTH_MAX: u16 = 24;
const PARTS_MAX: usize = 128;
/// What begins the name of a fact from outside.
const OUTSIDE: &str = "fact";
const HOST_NAME: &str = "host.name";

/// What is wrong with a condition.
#[derive(Debug, PartialEq, Eq)]
pub struct Fault {
    /// A sentence for the operator: the fault, and what is possible there.
    pub what: String,
    /// At which bytes of the condition, where that is known.
    pub at: Option<Range<usize>>,
    /// What to do.
    pub advice: String,
}

/// Reads a condition. `host_name` is what `host.name` says.
///
/// # Errors
///
/// It is no condition, or none that a rule may have.
pub fn read(text: &str, host_name: &str) -> Result<Expression, Fault> {
    let whole = |what: String, advice: &str| Fault { what, at: None, advice: advice.to_owned() };
    let split = "split the rule into several";
    if text.len() > TEXT_MAX {
        return Err(whole(format!("the condition has {} bytes, and may have {TEXT_MAX}", text.len()), split));
    }
    if nests_deep(text) {
        let what = format!("the condition has brackets, or `? :`, that nest deeper than {BRACKETS_MAX}");
        return Err(whole(what, split));
    }
    let parser = Parser::default().max_recursion_depth(DEPTH_MAX);
    let (parsed, source) = parser.parse_with_source_info(text).map_err(|errors| unreadable(text, &errors))?;
    let mut reader = Reader { source: &source, text, host_name, parts: 0 };
    let condition = reader.typed(&parsed, Some(Kind::Bool))?;
    if condition.kind != Kind::Bool {
        let what = format!("the condition is {}, and neither true nor false", condition.kind.text());
        return Err(reader.fault(&parsed, what, "compare it with something"));
    }
    Ok(condition.expression)
}

/// Whether the parser would need much of the stack: it calls itself for each bracket, and bounds only what it has read.
/// Brackets in texts count as well.
fn nests_deep(text: &str) -> bool {
    let mut depth = 0_usize;
    let mut deepest = 0;
    for letter in text.chars() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest > BRACKETS_MAX || text.matches('?').count() > BRACKETS_MAX
}

/// What the parser says of the first error.
fn unreadable(text: &str, errors: &cel::ParseErrors) -> Fault {
    let advice = "the book's page on stacks has conditions that work".to_owned();
    let Some(first) = errors.errors.first() else {
        return Fault { what: "the condition cannot be read".to_owned(), at: None, advice };
    };
    let (line, column) = first.pos;
    let at = usize::try_from(line - 1).ok().zip(usize::try_from(column - 1).ok()).and_then(|(line, column)| {
        let begin: usize = text.split_inclusive('\n').take(line).map(str::len).sum();
        let at = begin + column;
        (at <= text.len()).then(|| at..(at + 1).min(text.len()))
    });
    let said = first.msg.lines().next().unwrap_or_default();
    Fault { what: format!("the condition cannot be read: {said}"), at, advice }
}

/// A part, and what it is.
struct Typed {
    expression: Expression,
    kind: Kind,
}

struct Reader<'a> {
    source: &'a SourceInfo,
    text: &'a str,
    host_name: &'a str,
    parts: usize,
}

impl Reader<'_> {
    fn fault(&self, part: &IdedExpr, what: String, advice: &str) -> Fault {
        let at = self.source.offset_for(part.id).and_then(|(start, stop)| {
            let start = usize::try_from(start).ok()?;
            let stop = usize::try_from(stop).ok()?;
            let end = stop.max(start + 1).min(self.text.len());
            (self.text.is_char_boundary(start) && self.text.is_char_boundary(end)).then_some(start..end)
        });
        Fault { what, at, advice: advice.to_owned() }
    }

    /// A part, which is wanted to be of a kind: texts become addresses and names where those are wanted, and a fact
    /// from outside is what is wanted.
    fn typed(&mut self, part: &IdedExpr, wanted: Option<Kind>) -> Result<Typed, Fault> {
        self.parts += 1;
        if self.parts > PARTS_MAX {
            let what = format!("the condition has more than {PARTS_MAX} parts");
            return Err(self.fault(part, what, "split the rule into several"));
        }
        match &part.expr {
            Expr::Literal(literal) => self.literal(part, literal, wanted),
            Expr::Select(select) => self.selected(part, select, wanted),
            Expr::Call(call) => self.operation(part, call, wanted),
            Expr::Ident(name) => {
                let what = format!("`{name}` is no fact");
                Err(self.fault(part, what, &advice_for(name)))
            }
            Expr::List(_) => Err(self.fault(part, "a list stands where a value is wanted".into(), "write `x in [..]`")),
            Expr::Comprehension(_) | Expr::Map(_) | Expr::Struct(_) | Expr::Unspecified => {
                let what = "a rule has no loops, tables and structures".into();
                Err(self.fault(part, what, "write each comparison, joined by && and ||"))
            }
        }
    }

    /// The same, of exactly this kind.
    fn of_kind(&mut self, part: &IdedExpr, wanted: Kind) -> Result<Expression, Fault> {
        let typed = self.typed(part, Some(wanted))?;
        if typed.kind != wanted {
            let what = format!("{} stands where {} is wanted", typed.kind.text(), wanted.text());
            return Err(self.fault(part, what, "compare values of one kind"));
        }
        Ok(typed.expression)
    }

    fn literal(&self, part: &IdedExpr, literal: &LiteralValue, wanted: Option<Kind>) -> Result<Typed, Fault> {
        let constant = match literal {
            LiteralValue::Boolean(is) => Constant::Bool(**is),
            // Numbers of more than 2^53 have no meaning in any fact.
            LiteralValue::Int(number) => Constant::Number(**number as f64),
            LiteralValue::UInt(number) => Constant::Number(**number as f64),
            LiteralValue::Double(number) => Constant::Number(**number),
            LiteralValue::String(text) => self.text(part, text.inner(), wanted)?,
            LiteralValue::Bytes(_) | LiteralValue::Null => {
                let what = "bytes and null are compared with nothing".into();
                return Err(self.fault(part, what, "write a number, a text in quotes, true or false"));
            }
        };
        Ok(Typed { kind: constant.kind(), expression: Expression::Constant(constant) })
    }

    fn text(&self, part: &IdedExpr, text: &str, wanted: Option<Kind>) -> Result<Constant, Fault> {
        match wanted {
            Some(Kind::Address) => text.parse::<IpAddr>().map(Constant::Address).map_err(|_| {
                let advice = "write \"10.0.0.1\" or \"fd00::1\"; for a network, path.local.within(\"10.0.0.0/8\")";
                self.fault(part, format!("`{text}` is no address"), advice)
            }),
            Some(Kind::Name) => {
                let name = text.parse::<Name>();
                name.map(|name| Constant::Name(name.prefix())).map_err(|error| {
                    self.fault(part, format!("`{text}` is no name: {error}"), "write for example \"web.shop\"")
                })
            }
            _ => Ok(Constant::Text(text.to_owned())),
        }
    }

    /// `flow.age_s`, `fact.load`, `has(fact.load)`.
    fn selected(&self, part: &IdedExpr, select: &SelectExpr, wanted: Option<Kind>) -> Result<Typed, Fault> {
        let Expr::Ident(group) = &select.operand.expr else {
            let what = "a fact has two words, such as flow.age_s".into();
            return Err(self.fault(part, what, &advice_for("")));
        };
        let name = format!("{group}.{}", select.field);
        let is_asked = |expression| Ok(Typed { expression, kind: Kind::Bool });
        if group == OUTSIDE {
            let fact = &select.field;
            if !is_fact_name(fact) {
                let advice = "it begins with a letter, and has small letters, digits and underscores";
                return Err(self.fault(part, format!("`{fact}` is no name of a fact from outside"), advice));
            }
            if select.test {
                return is_asked(Expression::IsSet(fact.clone()));
            }
            let Some(kind) = wanted.filter(|kind| matches!(kind, Kind::Bool | Kind::Number | Kind::Text)) else {
                let what = format!("nobody can tell what {name} is to be");
                return Err(self.fault(part, what, "compare it with a number, a text, true or false"));
            };
            return Ok(Typed { expression: Expression::Outside(fact.clone(), kind), kind });
        }
        if name == HOST_NAME && !select.test {
            let constant = Constant::Text(self.host_name.to_owned());
            return Ok(Typed { expression: Expression::Constant(constant), kind: Kind::Text });
        }
        let Some(fact) = Fact::ALL.iter().copied().find(|fact| fact.name() == name) else {
            return Err(self.fault(part, format!("`{name}` is no fact"), &advice_for(&name)));
        };
        if select.test {
            return is_asked(Expression::IsKnown(fact));
        }
        Ok(Typed { expression: Expression::Fact(fact), kind: fact.kind() })
    }
}

/// The names of all facts but those from outside.
pub fn fact_names() -> impl Iterator<Item = &'static str> {
    Fact::ALL.iter().map(|fact| fact.name()).chain([HOST_NAME])
}

fn advice_for(name: &str) -> String {
    let near = fact_names().map(|fact| (strsim::damerau_levenshtein(name, fact), fact)).min();
    match near {
        Some((distance, fact)) if distance <= 3 && !name.is_empty() => format!("did you mean `{fact}`?"),
        _ => {
            let all: Vec<&str> = fact_names().collect();
            format!("write one of: {}; or fact.NAME, which `margay fact set` sets", all.join(", "))
        }
    }
}

#[cfg(test)]
#[path = "condition_test.rs"]
mod test;
