//! Operators and functions of conditions.

use std::net::IpAddr;

use cel::IdedExpr;
use cel::common::ast::{CallExpr, Expr, LiteralValue, operators};
use margay_core::stack_rule::{Arithmetic, Comparison, Constant, Expression, Fact, Kind, Network, Place};

use super::{Fault, OUTSIDE, Reader, Typed};

const IN: &str = "@in";

fn comparison(function: &str) -> Option<Comparison> {
    Some(match function {
        operators::EQUALS => Comparison::Equal,
        operators::NOT_EQUALS => Comparison::Other,
        operators::LESS => Comparison::Less,
        operators::LESS_EQUALS => Comparison::AtMost,
        operators::GREATER => Comparison::More,
        operators::GREATER_EQUALS => Comparison::AtLeast,
        _ => return None,
    })
}

fn arithmetic(function: &str) -> Option<Arithmetic> {
    Some(match function {
        operators::ADD => Arithmetic::Add,
        operators::SUBSTRACT => Arithmetic::Subtract,
        operators::MULTIPLY => Arithmetic::Multiply,
        operators::DIVIDE => Arithmetic::Divide,
        _ => return None,
    })
}

fn place(function: &str) -> Option<Place> {
    Some(match function {
        "startsWith" => Place::Start,
        "endsWith" => Place::End,
        "contains" => Place::Anywhere,
        _ => return None,
    })
}

/// What a part is whatever it is compared with; nothing of a text and of a fact from outside.
fn own_kind(part: &IdedExpr) -> Option<Kind> {
    match &part.expr {
        Expr::Literal(LiteralValue::String(_)) => None,
        Expr::Literal(LiteralValue::Boolean(_)) => Some(Kind::Bool),
        Expr::Literal(_) => Some(Kind::Number),
        Expr::Select(select) if select.test => Some(Kind::Bool),
        Expr::Select(select) => match &select.operand.expr {
            Expr::Ident(group) if group == OUTSIDE => None,
            Expr::Ident(group) => {
                let is_named = |fact: &&Fact| fact.name().split_once('.') == Some((group, &select.field));
                Some(Fact::ALL.iter().find(is_named).map_or(Kind::Text, |fact| fact.kind()))
            }
            _ => None,
        },
        Expr::Call(call) if arithmetic(&call.func_name).is_some() => Some(Kind::Number),
        Expr::Call(call) if call.func_name == operators::NEGATE => Some(Kind::Number),
        Expr::Call(call) if call.func_name == operators::CONDITIONAL => call.args.get(1).and_then(own_kind),
        Expr::Call(_) => Some(Kind::Bool),
        _ => None,
    }
}

const fn is_text(part: &IdedExpr) -> bool {
    matches!(part.expr, Expr::Literal(LiteralValue::String(_)))
}

impl Reader<'_> {
    pub(super) fn operation(&mut self, part: &IdedExpr, call: &CallExpr, wanted: Option<Kind>) -> Result<Typed, Fault> {
        let condition = |expression| Ok(Typed { expression, kind: Kind::Bool });
        let function = call.func_name.as_str();
        match (&call.target, &*call.args) {
            (None, [one]) if function == operators::LOGICAL_NOT => {
                condition(Expression::Not(Box::new(self.of_kind(one, Kind::Bool)?)))
            }
            (None, [one]) if function == operators::NEGATE => {
                let expression = Expression::Negative(Box::new(self.of_kind(one, Kind::Number)?));
                Ok(Typed { expression, kind: Kind::Number })
            }
            (None, [_, _]) if function == operators::LOGICAL_AND => {
                condition(Expression::And(self.both(call, Kind::Bool)?))
            }
            (None, [_, _]) if function == operators::LOGICAL_OR => {
                condition(Expression::Or(self.both(call, Kind::Bool)?))
            }
            (None, [test, one, other]) if function == operators::CONDITIONAL => {
                let test = self.of_kind(test, Kind::Bool)?;
                let first = self.typed(one, wanted)?;
                let second = self.of_kind(other, first.kind)?;
                let expression = Expression::If(Box::new([test, first.expression, second]));
                Ok(Typed { expression, kind: first.kind })
            }
            (None, [one, list]) if function == IN => self.one_of(part, one, list),
            (None, [one, other]) => match (comparison(function), arithmetic(function)) {
                (Some(how), _) => condition(self.compared(how, one, other)?),
                (None, Some(how)) => {
                    let expression = Expression::Calculate(how, self.both(call, Kind::Number)?);
                    Ok(Typed { expression, kind: Kind::Number })
                }
                (None, None) => Err(self.unknown(part, call)),
            },
            (Some(target), [one]) if function == "within" => {
                let network = self.network(one)?;
                condition(Expression::Within(Box::new(self.of_kind(target, Kind::Address)?), network))
            }
            (Some(target), [one]) => {
                let Some(place) = place(function) else { return Err(self.unknown(part, call)) };
                let parts = [self.of_kind(target, Kind::Text)?, self.of_kind(one, Kind::Text)?];
                condition(Expression::Find(place, Box::new(parts)))
            }
            _ => Err(self.unknown(part, call)),
        }
    }

    fn unknown(&self, part: &IdedExpr, call: &CallExpr) -> Fault {
        let what = format!("a rule has no `{}` of this form", call.func_name.trim_matches('_'));
        let advice = "there are && || ! == != < <= > >= + - * / in ?: has(), and .within() of addresses, .startsWith() \
                      .endsWith() .contains() of texts";
        self.fault(part, what, advice)
    }

    fn both(&mut self, call: &CallExpr, kind: Kind) -> Result<Box<[Expression; 2]>, Fault> {
        let first = self.of_kind(&call.args[0], kind)?;
        let second = self.of_kind(&call.args[1], kind)?;
        Ok(Box::new([first, second]))
    }

    fn compared(&mut self, how: Comparison, one: &IdedExpr, other: &IdedExpr) -> Result<Expression, Fault> {
        if !matches!(how, Comparison::Equal | Comparison::Other) {
            let parts = [self.of_kind(one, Kind::Number)?, self.of_kind(other, Kind::Number)?];
            return Ok(Expression::Compare(how, Box::new(parts)));
        }
        // Of two texts in quotes, or a text and a fact from outside, neither says more.
        let text = (is_text(one) || is_text(other)).then_some(Kind::Text);
        let kind = own_kind(one).or_else(|| own_kind(other)).or(text);
        let first = self.typed(one, kind)?;
        let second = self.of_kind(other, first.kind)?;
        Ok(Expression::Compare(how, Box::new([first.expression, second])))
    }

    fn one_of(&mut self, part: &IdedExpr, one: &IdedExpr, list: &IdedExpr) -> Result<Typed, Fault> {
        let Expr::List(values) = &list.expr else {
            return Err(self.fault(part, "`in` wants a list".into(), "write `x in [\"one\", \"other\"]`"));
        };
        let of_list = values.elements.first().map(|first| own_kind(first).unwrap_or(Kind::Text));
        let value = self.typed(one, own_kind(one).or(of_list))?;
        let mut constants = Vec::new();
        for element in &values.elements {
            match self.of_kind(element, value.kind)? {
                Expression::Constant(constant) => constants.push(constant),
                _ => return Err(self.fault(element, "a list has values only, and no facts".into(), "use || instead")),
            }
        }
        Ok(Typed { expression: Expression::In(Box::new(value.expression), constants), kind: Kind::Bool })
    }

    fn network(&mut self, part: &IdedExpr) -> Result<Network, Fault> {
        let wrong = |reader: &Self, text: &str| {
            let what = format!("`{text}` is no network");
            reader.fault(part, what, "write for example \"10.1.0.0/16\" or \"fd00:1::/32\"")
        };
        let Expression::Constant(Constant::Text(text)) = self.of_kind(part, Kind::Text)? else {
            return Err(wrong(self, "a fact"));
        };
        let parsed = text.split_once('/').and_then(|(address, bits)| {
            let address: IpAddr = address.parse().ok()?;
            let bits: u8 = bits.parse().ok()?;
            (bits <= if address.is_ipv4() { 32 } else { 128 }).then_some(Network { address, bits })
        });
        parsed.ok_or_else(|| wrong(self, &text))
    }
}
