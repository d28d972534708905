//! State machines as data: the states, the events and every transition are written down, so that a test prints the
//! whole matrix, a checker walks it, and nothing happens that is not on the list.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::{self, Debug, Write as _};

/// A declared state machine. Put it in a `const` or `static` next to its states.
#[derive(Clone, Copy, Debug)]
pub struct Machine<S: 'static, E: 'static> {
    /// What it is, for messages.
    pub name: &'static str,
    /// Every state; the first is the one that it starts in.
    pub states: &'static [S],
    /// Every event.
    pub events: &'static [E],
    /// Every transition: in this state, on this event, to that state. What is not listed is illegal.
    pub transitions: &'static [(S, E, S)],
}

/// An event that has no transition in the state it came in. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Illegal<S, E> {
    /// The machine's name.
    pub machine: &'static str,
    /// The state that it was, and is, in.
    pub state: S,
    /// What came.
    pub event: E,
}

impl<S: Debug, E: Debug> fmt::Display for Illegal<S, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?} is not possible while {:?}", self.machine, self.event, self.state)
    }
}

impl<S: Debug, E: Debug> core::error::Error for Illegal<S, E> {}

impl<S: Copy + Eq + Debug, E: Copy + Eq + Debug> Machine<S, E> {
    /// The state after `event`.
    ///
    /// # Errors
    ///
    /// There is no such transition.
    pub fn after(&self, state: S, event: E) -> Result<S, Illegal<S, E>> {
        let listed = self.transitions.iter().find(|(from, on, _)| *from == state && *on == event);
        listed.map(|(_, _, to)| *to).ok_or(Illegal { machine: self.name, state, event })
    }

    /// One line for each pair of state and event: `state event next`, with `-` where it is illegal. Tests compare it
    /// whole, so that a change of any cell is seen by whoever reviews it.
    pub fn matrix(&self) -> String {
        let mut matrix = String::new();
        for state in self.states {
            for event in self.events {
                // Writing to a String cannot fail.
                let _ = match self.after(*state, *event) {
                    Ok(next) => writeln!(matrix, "{state:?} {event:?} {next:?}"),
                    Err(_) => writeln!(matrix, "{state:?} {event:?} -"),
                };
            }
        }
        matrix
    }

    /// What is wrong with the declaration, one line each; empty for a sound one. A pair listed twice, a state or event
    /// that is not declared, a state that no walk from the first one reaches.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for (at, (from, on, to)) in self.transitions.iter().enumerate() {
            if self.transitions[..at].iter().any(|(f, o, _)| f == from && o == on) {
                faults.push(alloc::format!("{from:?} {on:?} is listed twice"));
            }
            if !self.states.contains(from) || !self.states.contains(to) || !self.events.contains(on) {
                faults.push(alloc::format!("{from:?} {on:?} {to:?} names something that is not declared"));
            }
        }
        let reached = self.reachable();
        let lost = self.states.iter().filter(|state| !reached.contains(state));
        faults.extend(lost.map(|state| alloc::format!("{state:?} is never reached")));
        faults
    }

    /// The states that some walk from the first one reaches, in the order of discovery.
    pub fn reachable(&self) -> Vec<S> {
        let mut reached: Vec<S> = self.states.first().copied().into_iter().collect();
        let mut at = 0;
        while let Some(state) = reached.get(at).copied() {
            for (from, _, to) in self.transitions {
                if *from == state && !reached.contains(to) {
                    reached.push(*to);
                }
            }
            at += 1;
        }
        reached
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Door {
        Shut,
        Open,
        Gone,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Act {
        Push,
        Pull,
    }

    const DOOR: Machine<Door, Act> = Machine {
        name: "door",
        states: &[Door::Shut, Door::Open],
        events: &[Act::Push, Act::Pull],
        transitions: &[(Door::Shut, Act::Push, Door::Open), (Door::Open, Act::Pull, Door::Shut)],
    };

    #[test]
    fn only_what_is_listed_happens() {
        assert_eq!(DOOR.after(Door::Shut, Act::Push), Ok(Door::Open));
        let refused = DOOR.after(Door::Shut, Act::Pull).expect_err("not listed");
        assert_eq!(alloc::format!("{refused}"), "door: Pull is not possible while Shut");
        assert_eq!(DOOR.matrix(), "Shut Push Open\nShut Pull -\nOpen Push -\nOpen Pull Shut\n");
        assert!(DOOR.faults().is_empty());
    }

    #[test]
    fn an_unsound_declaration_is_found_out() {
        let twice = Machine {
            transitions: &[(Door::Shut, Act::Push, Door::Open), (Door::Shut, Act::Push, Door::Shut)],
            ..DOOR
        };
        assert_eq!(twice.faults(), ["Shut Push is listed twice"]);
        let unknown = Machine { transitions: &[(Door::Shut, Act::Push, Door::Gone)], ..DOOR };
        let faults = ["Shut Push Gone names something that is not declared", "Open is never reached"];
        assert_eq!(unknown.faults(), faults);
    }
}
