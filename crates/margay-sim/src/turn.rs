//! A flow whose peer turns to another stack: what is of the new one waits for the FENCE of the old one.

use std::collections::HashMap;

use margay_core::flow_cache::FENCE_WAIT;
use margay_core::{Instant, Stack, Taking};
use margay_wire::FlowId;

use crate::cache::Came;

/// So many packets wait; with the next one, none does any more.
const HELD_MAX: usize = 64;

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It is taken.
    Take,
    /// It waits for the FENCE, or for the end of the change.
    Held,
    /// Nothing waits any longer, and it is taken after what has.
    Overtaken(u32),
    /// It is late: of the stack before.
    Late,
    /// It is of a stack that the flow does not have.
    Strange,
    /// It comes from where the flow's peer is not.
    Elsewhere,
    /// Too much waits for the word of a peer that may not turn at all.
    Full,
}

struct Turn {
    change: u32,
    is_fenced: bool,
    held: Vec<(Came, Vec<u8>)>,
    since: Instant,
    /// When the peer had said that it turns.
    said: Option<Instant>,
}

impl Turn {
    fn new(now: Instant, change: u32) -> Self {
        Self { change, is_fenced: false, held: Vec::new(), since: now, said: None }
    }

    /// When what waits is given on, whatever comes.
    fn due(&self) -> Option<Instant> {
        let said = self.said.filter(|_| !self.held.is_empty())?;
        Some(said.max(self.since) + FENCE_WAIT)
    }
}

/// The turns of a host's flows. They outlive entries.
#[derive(Default)]
pub(crate) struct Turns(HashMap<FlowId, Turn>);

impl Turns {
    pub fn admit(
        &mut self,
        now: Instant,
        flow: FlowId,
        (takes, change): (Taking, u32),
        stack: Option<Stack>,
        (came, datagram): (Came, &[u8]),
    ) -> Admission {
        let to = match takes {
            Taking::Only(only) => return if stack == Some(only) { Admission::Take } else { Admission::Strange },
            Taking::Ready(to) | Taking::Turning(to) => to,
        };
        let turn = self.turn(now, flow, change);
        match (stack, turn.is_fenced) {
            (None, _) => Admission::Strange,
            (Some(stack), true) if stack == to => Admission::Take,
            (Some(_), true) => Admission::Late,
            (Some(stack), false) if stack != to => Admission::Take,
            (Some(_), false) if turn.held.len() >= HELD_MAX && turn.said.is_none() => Admission::Full,
            (Some(_), false) if turn.held.len() >= HELD_MAX => {
                turn.is_fenced = true;
                Admission::Overtaken(change)
            }
            (Some(_), false) => {
                if turn.held.is_empty() {
                    turn.since = now;
                }
                turn.held.push((came, datagram.to_vec()));
                Admission::Held
            }
        }
    }

    fn turn(&mut self, now: Instant, flow: FlowId, change: u32) -> &mut Turn {
        let turn = self.0.entry(flow).or_insert_with(|| Turn::new(now, change));
        if turn.change != change {
            *turn = Turn::new(now, change);
        }
        turn
    }

    /// The peer has said that it turns.
    pub fn say(&mut self, now: Instant, flow: FlowId, change: u32) {
        self.turn(now, flow, change).said.get_or_insert(now);
    }

    /// The FENCE of a change has come. False if it is of another one, or has come before.
    pub fn fence(&mut self, now: Instant, flow: FlowId, change: u32) -> bool {
        let turn = self.0.entry(flow).or_insert_with(|| Turn::new(now, change));
        turn.change == change && !std::mem::replace(&mut turn.is_fenced, true)
    }

    /// What has waited, in order.
    pub fn take_held(&mut self, flow: FlowId) -> Vec<(Came, Vec<u8>)> {
        self.0.get_mut(&flow).map(|turn| std::mem::take(&mut turn.held)).unwrap_or_default()
    }

    /// The flow has one stack. Gives what has waited.
    pub fn end(&mut self, flow: FlowId) -> Vec<(Came, Vec<u8>)> {
        self.0.remove(&flow).map(|turn| turn.held).unwrap_or_default()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.0.values().filter_map(Turn::due).min()
    }

    /// Flows of which something has waited for too long, and by which changes.
    pub fn take_due(&mut self, now: Instant) -> Vec<(FlowId, u32)> {
        let is_due = |turn: &Turn| turn.due().is_some_and(|due| due <= now);
        let mut due: Vec<(FlowId, u32)> =
            self.0.iter().filter(|(_, turn)| is_due(turn)).map(|(flow, turn)| (*flow, turn.change)).collect();
        due.sort_unstable();
        for (flow, _) in &due {
            if let Some(turn) = self.0.get_mut(flow) {
                turn.is_fenced = true;
            }
        }
        due
    }
}
