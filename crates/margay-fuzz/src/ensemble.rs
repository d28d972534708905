//! Framed connections: their datagrams, an end, and the switch between.

use margay_core::time::Instant;
use margay_ensemble::{
    Config, Connection, ConnectionConfig, Frame, Joining, Kind, Lsn, Members, Order, Plugin, Sound, Switch, Verdict,
};
use margay_wire::Framed;

use crate::parts;

/// Datagrams of framed connections.
pub fn framed(bytes: &[u8]) {
    let _ = Framed::parse(bytes);
}

/// An end is told a sequence of things.
pub fn connection(bytes: &[u8]) {
    let mut now = Instant::from_millis(1);
    let mut end = Connection::open(now, 7, [0; 16], ConnectionConfig::default());
    let mut out = [0; 2048];
    for part in parts(bytes) {
        let Some((what, said)) = part.split_first() else { continue };
        match what % 4 {
            0 => now = Instant::from_micros(now.micros() + (u64::from(*what) << 12)),
            1 => drop(end.send(now, Order::None, said)),
            _ => {
                if let Ok((_, says)) = Framed::parse(said) {
                    end.on_datagram(now, &says);
                }
            }
        }
        if end.next_deadline().is_some_and(|deadline| deadline <= now) {
            end.on_time(now);
        }
        while end.poll_datagram(now, &mut out).is_some() {}
        while end.poll_frame().is_some() {}
        while end.poll_lost().is_some() {}
    }
}

/// Goes round the members.
#[derive(Default)]
struct InTurn {
    asked: u64,
}

impl Plugin for InTurn {
    fn redirect(&mut self, frame: &mut Frame<'_>, members: &Members, rtx: &mut u64) -> Verdict {
        self.asked += 1;
        *rtx = self.asked;
        let turn = usize::try_from(self.asked % 2).unwrap_or_default();
        let chosen = members.active().nth(turn).or_else(|| members.active().next());
        let is_safe = frame.payload.first().is_some_and(|byte| byte & 1 == 0);
        chosen.map_or(Verdict::Drop, |member| Verdict::To { member, is_safe, pins: false })
    }
}

/// A switch with a member of its own kind and a foreign one is told a sequence of things by all three.
pub fn switch(bytes: &[u8]) {
    let mut now = Instant::from_millis(1);
    let mut switch = Switch::<_, Sound>::new(Config::default(), InTurn::default(), 1 << 20);
    let ids = [Kind::Margay, Kind::Foreign].map(|kind| {
        let joining = Joining { kind, to_member: Lsn(0), from_member: Lsn(0), window_bytes: 1 << 20 };
        switch.join(&joining).expect("there is room for two")
    });
    for part in parts(bytes) {
        let Some((what, said)) = part.split_first() else { continue };
        let told = match what % 8 {
            0 => {
                now = Instant::from_micros(now.micros() + (u64::from(*what) << 12));
                Ok(())
            }
            1 => {
                switch.drain(now, ids[0]);
                Ok(())
            }
            2 => {
                switch.died(now, ids[1]);
                Ok(())
            }
            3 | 4 => switch.from_member(now, ids[usize::from(what >> 7)], said),
            _ => switch.from_peer(now, said),
        };
        if switch.next_deadline().is_some_and(|deadline| deadline <= now) {
            switch.on_time(now);
        }
        while switch.poll_packet().is_some() {}
        while switch.poll_event().is_some() {}
        if told.is_err() {
            return;
        }
    }
}
