//! What a module may ask the switch for during a call.

use std::sync::Arc;

use margay_ensemble::{MemberId, Members};
use wasmi::errors::LinkerError;
use wasmi::{Caller, Engine, Error, Extern, Linker, StoreLimits, TrapCode, ValType};

use crate::router::ketama::Ring;

/// Of the functions that a module may import: name, parameters, results.
pub(super) const IMPORTS: [(&str, &[ValType], &[ValType]); 8] = [
    ("member_count", &[], &[ValType::I32]),
    ("member_at", &[ValType::I32], &[ValType::I32]),
    ("label", &[ValType::I32, ValType::I32, ValType::I32], &[ValType::I32]),
    ("window_bytes", &[ValType::I32], &[ValType::I32]),
    ("in_flight", &[ValType::I32], &[ValType::I32]),
    ("round_trip_us", &[ValType::I32], &[ValType::I32]),
    ("ring", &[ValType::I32, ValType::I32], &[ValType::I32]),
    ("keep", &[ValType::I64], &[]),
];

/// Fuel that a call of any of these functions costs beside what it touches: leaving the interpreter takes as long as so
/// many of its instructions. A byte that is read or copied, a member that is looked at, and a point of the ring cost a
/// unit each.
const CALL_FUEL: u64 = 20;

/// A member, as a module knows it by its number.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) id: MemberId,
    pub(super) label: String,
    /// It takes new frames.
    pub(super) is_active: bool,
    window_bytes: i32,
    pub(super) in_flight: i32,
    /// -1: it is not known yet.
    pub(super) round_trip_us: i32,
}

impl Known {
    pub(super) fn new(id: MemberId, label: &str) -> Self {
        Self { id, label: label.to_owned(), is_active: true, window_bytes: 0, in_flight: 0, round_trip_us: -1 }
    }
}

/// What there is to be known during a call.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) limits: StoreLimits,
    /// By the numbers that modules have for them.
    pub(super) members: Vec<Option<Known>>,
    pub(super) ring: Arc<Ring>,
    /// The members of the ring, in its order, by their numbers.
    pub(super) ring_members: Vec<Option<usize>>,
    /// What the module keeps with the frame.
    pub(super) rtx: u64,
}

/// What a module is told that does not fit: it is far more than there is.
fn saturated(value: impl TryInto<i32>) -> i32 {
    value.try_into().unwrap_or(i32::MAX)
}

impl Facts {
    /// Brings what is known of members in step with a connection's.
    pub(super) fn follow(&mut self, members: &Members) {
        for known in self.members.iter_mut().flatten() {
            known.is_active = members.is_active(known.id);
            known.window_bytes = saturated(members.window_bytes(known.id).unwrap_or_default());
            known.in_flight = saturated(members.in_flight(known.id).unwrap_or_default());
            known.round_trip_us = members.round_trip(known.id).map_or(-1, |took| saturated(took.as_micros()));
        }
    }

    pub(super) fn known(&self, number: i32) -> Option<&Known> {
        self.members.get(usize::try_from(number).ok()?)?.as_ref()
    }

    fn active(&self) -> impl Iterator<Item = i32> + '_ {
        let is_active = |known: &Option<Known>| known.as_ref().is_some_and(|known| known.is_active);
        (0..).zip(&self.members).filter(move |(_, known)| is_active(known)).map(|(number, _)| number)
    }

    /// The member for a key, and how many points of the ring were looked at: of members that take no frames, too.
    fn ring_of(&self, key: &[u8]) -> (i32, usize) {
        let mut passed = 0;
        let points = self.ring.servers_of(key).inspect(|_| passed += 1);
        let mut candidates = points.filter_map(|at| self.ring_members.get(at).copied().flatten());
        let is_active = |number: &usize| self.members[*number].as_ref().is_some_and(|known| known.is_active);
        let found = candidates.find(is_active).map_or(-1, saturated);
        drop(candidates);
        (found, passed)
    }
}

/// Bytes of the caller's memory; none: they are not all in it.
fn range(memory: &[u8], at: i32, len: i32) -> Option<&[u8]> {
    let at = usize::try_from(at).ok()?;
    memory.get(at..at.checked_add(usize::try_from(len).ok()?)?)
}

/// Charges a module for what a function does for it. The interpreter counts its own instructions alone, so without this
/// fuel would not bound time.
fn charge(caller: &mut Caller<'_, Facts>, touched: usize) -> Result<(), Error> {
    // Lengths have 64 bits at most.
    let cost = CALL_FUEL.saturating_add(touched as u64);
    let left = caller.get_fuel()?.checked_sub(cost).ok_or(TrapCode::OutOfFuel)?;
    caller.set_fuel(left)
}

fn memory_of(caller: &Caller<'_, Facts>) -> Option<wasmi::Memory> {
    caller.get_export("memory").and_then(Extern::into_memory)
}

/// Writes as much of a member's label as there is room for, and gives the length of all of it; -1 where there is no
/// such member, or no such place.
fn label(mut caller: Caller<'_, Facts>, number: i32, at: i32, room: i32) -> Result<i32, Error> {
    let label_len = caller.data().known(number).map_or(0, |known| known.label.len());
    charge(&mut caller, label_len)?;
    let Some(memory) = memory_of(&caller) else { return Ok(-1) };
    let (bytes, facts) = memory.data_and_store_mut(&mut caller);
    let Some(known) = facts.known(number) else { return Ok(-1) };
    let (Ok(at), Ok(room)) = (usize::try_from(at), usize::try_from(room)) else { return Ok(-1) };
    let len = room.min(known.label.len());
    let Some(place) = at.checked_add(len).and_then(|end| bytes.get_mut(at..end)) else { return Ok(-1) };
    place.copy_from_slice(&known.label.as_bytes()[..len]);
    Ok(saturated(known.label.len()))
}

/// The member that libketama's ring has for a key; -1 where there is none, or no such key.
fn ring(mut caller: Caller<'_, Facts>, at: i32, len: i32) -> Result<i32, Error> {
    charge(&mut caller, usize::try_from(len).unwrap_or_default())?;
    let Some(memory) = memory_of(&caller) else { return Ok(-1) };
    let Some(key) = range(memory.data(&caller), at, len) else { return Ok(-1) };
    let (found, passed) = caller.data().ring_of(key);
    charge(&mut caller, passed)?;
    Ok(found)
}

/// What is known of a member; -1 where there is no such member.
fn fact(mut caller: Caller<'_, Facts>, number: i32, of: impl Fn(&Known) -> i32) -> Result<i32, Error> {
    charge(&mut caller, 0)?;
    Ok(caller.data().known(number).map_or(-1, of))
}

pub(super) fn linker(engine: &Engine) -> Result<Linker<Facts>, LinkerError> {
    type Of<'a> = Caller<'a, Facts>;
    let mut linker = Linker::new(engine);
    linker.func_wrap("margay", "member_count", |mut caller: Of<'_>| {
        let all = caller.data().members.len();
        charge(&mut caller, all)?;
        Ok::<i32, Error>(saturated(caller.data().active().count()))
    })?;
    linker.func_wrap("margay", "member_at", |mut caller: Of<'_>, at: i32| {
        let all = caller.data().members.len();
        charge(&mut caller, all)?;
        Ok::<i32, Error>(usize::try_from(at).ok().and_then(|at| caller.data().active().nth(at)).unwrap_or(-1))
    })?;
    linker.func_wrap("margay", "label", label)?;
    linker.func_wrap("margay", "window_bytes", |caller: Of<'_>, number: i32| {
        fact(caller, number, |known| known.window_bytes)
    })?;
    linker.func_wrap("margay", "in_flight", |caller: Of<'_>, number: i32| {
        fact(caller, number, |known| known.in_flight)
    })?;
    linker.func_wrap("margay", "round_trip_us", |caller: Of<'_>, number: i32| {
        fact(caller, number, |known| known.round_trip_us)
    })?;
    linker.func_wrap("margay", "ring", ring)?;
    linker.func_wrap("margay", "keep", |mut caller: Of<'_>, rtx: i64| {
        charge(&mut caller, 0)?;
        caller.data_mut().rtx = rtx.cast_unsigned();
        Ok::<(), Error>(())
    })?;
    Ok(linker)
}
