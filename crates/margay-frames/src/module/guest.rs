//! One connection's instance of a module.

use std::fmt;
use std::sync::Arc;

use margay_ensemble::{MemberId, Members};
use wasmi::{Memory, Store, StoreLimitsBuilder, TrapCode, TypedFunc, WasmParams, WasmResults};

use super::facts::{Facts, Known};
use super::{FRAME_MAX, FUEL, INTERFACE_VERSION, MEMORY_MAX, Module, Refused};
use crate::router::ketama::Ring;

/// Entries of a module's tables.
const TABLE_MAX: usize = 4096;
/// In an answer: nowhere for now.
const DROP: i64 = 0xff;
/// Bits of an answer: all frames to come go there as well; another member may be given it, too; none may.
const PINS: i64 = 1 << 8;
const SAFE: i64 = 1 << 9;
const UNSAFE: i64 = 1 << 10;
/// Where the frame's new length is, zero if it has none.
const LEN_SHIFT: u32 = 32;
/// Who has sent a frame that goes to a member.
const OF_PEER: i32 = -1;

/// What a module says of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Whose it is; none: nobody's for now.
    pub(crate) member: Option<MemberId>,
    pub(crate) pins: bool,
    /// Whether it may be repeated; none: as the protocol has it.
    pub(crate) is_safe: Option<bool>,
    /// What is sent in place of the request.
    pub(crate) changed: Option<Vec<u8>>,
    /// What is kept with the frame.
    pub(crate) rtx: u64,
}

/// A call of a module that gives nothing.
type Upcall<P> = Option<TypedFunc<P, ()>>;

/// An instance of a module: the one of one connection.
pub(crate) struct Guest {
    store: Store<Facts>,
    memory: Memory,
    frame_at: usize,
    redirect: TypedFunc<(i32, i32, i32, i64), i64>,
    add_conn: Upcall<i32>,
    rm_conn: Upcall<i32>,
    add_member: Upcall<i32>,
    rm_member: Upcall<i32>,
    retire: Upcall<i64>,
    uninit: Upcall<()>,
    state: Option<TypedFunc<(), i32>>,
    adopt: Option<TypedFunc<i32, i32>>,
    connection: u32,
    /// Why nothing is asked of it any more.
    fault: Option<String>,
    calls: u64,
}

impl fmt::Debug for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guest")
            .field("connection", &self.connection)
            .field("fault", &self.fault)
            .finish_non_exhaustive()
    }
}

impl Guest {
    /// A new instance, which has been started and knows no member.
    ///
    /// # Errors
    ///
    /// [`Refused`]: there is no memory, or its first calls fail.
    pub(crate) fn start(module: &Module) -> Result<Self, Refused> {
        let failed = |error: wasmi::Error| Refused::Start(reason(&error));
        let limits = StoreLimitsBuilder::new().memory_size(MEMORY_MAX).table_elements(TABLE_MAX).memories(1).tables(1);
        let ring = Arc::new(Ring::default());
        let limits = limits.instances(1).build();
        let facts = Facts { limits, members: Vec::new(), ring, ring_members: Vec::new(), rtx: 0 };
        let mut store = Store::new(&module.engine, facts);
        store.limiter(|facts| &mut facts.limits);
        store.set_fuel(FUEL).map_err(failed)?;
        let instance = module.linker.instantiate_and_start(&mut store, &module.compiled).map_err(failed)?;
        let memory = instance.get_memory(&store, "memory").ok_or(Refused::Memory)?;
        let version: TypedFunc<(), i32> = instance.get_typed_func(&store, "alrm_version").map_err(failed)?;
        let version = version.call(&mut store, ()).map_err(failed)?;
        if version != INTERFACE_VERSION {
            return Err(Refused::Version(version));
        }
        let init: Upcall<()> = instance.get_typed_func(&store, "alrm_init").ok();
        if let Some(init) = init {
            init.call(&mut store, ()).map_err(failed)?;
        }
        let frame: TypedFunc<(), i32> = instance.get_typed_func(&store, "alrm_frame").map_err(failed)?;
        let frame_at = frame.call(&mut store, ()).map_err(failed)?.cast_unsigned() as usize;
        let redirect = instance.get_typed_func(&store, "redirect").map_err(failed)?;
        // Those that are of another type were refused when the module was checked.
        let this = Self {
            memory,
            frame_at,
            redirect,
            add_conn: instance.get_typed_func(&store, "add_conn").ok(),
            rm_conn: instance.get_typed_func(&store, "rm_conn").ok(),
            add_member: instance.get_typed_func(&store, "add_member").ok(),
            rm_member: instance.get_typed_func(&store, "rm_member").ok(),
            retire: instance.get_typed_func(&store, "retire").ok(),
            uninit: instance.get_typed_func(&store, "alrm_uninit").ok(),
            state: instance.get_typed_func(&store, "alrm_state").ok(),
            adopt: instance.get_typed_func(&store, "adopt").ok(),
            connection: 0,
            fault: None,
            calls: 0,
            store,
        };
        let has_room = this.frame_at.checked_add(FRAME_MAX).is_some_and(|end| end <= memory.data_size(&this.store));
        if has_room { Ok(this) } else { Err(Refused::Start(format!("alrm_frame has no {FRAME_MAX} bytes of memory"))) }
    }

    /// An instance that takes over a connection from `former`, or from none: members keep their numbers, and what the
    /// former one leaves is handed over. None: the module does not want the connection, which keeps what it has.
    ///
    /// # Errors
    ///
    /// The module fails, in words. Where it is the former one that fails, that one has the fault, and nothing is given.
    pub(crate) fn adopting(
        module: &Module,
        connection: u32,
        members: &[(MemberId, String)],
        former: Option<&mut Self>,
    ) -> Result<Option<Self>, String> {
        let mut this = Self::start(module).map_err(|error| error.to_string())?;
        this.add_connection(connection);
        let mut state = Vec::new();
        match former {
            Some(former) => {
                let Some(left) = former.leave() else { return Ok(None) };
                state = left;
                this.calls += former.calls;
                this.store.data_mut().members.clone_from(&former.store.data().members);
                for number in 0..this.store.data().members.len() {
                    if this.store.data().members[number].is_some() {
                        this.tell("add_member", this.add_member, number as i32);
                    }
                }
            }
            None => members.iter().for_each(|(id, label)| this.add_member(*id, label)),
        }
        let is_taken = this.take(&state);
        match (&this.fault, is_taken) {
            (Some(why), _) => Err(why.clone()),
            (None, true) => Ok(Some(this)),
            (None, false) => Ok(None),
        }
    }

    /// What the module leaves for the one after it: nothing unless it exports `alrm_state`. None: it fails.
    fn leave(&mut self) -> Option<Vec<u8>> {
        let Some(state) = self.state else { return self.fault.is_none().then(Vec::new) };
        let said = self.call("alrm_state", state, ())?;
        let len = usize::try_from(said).ok().filter(|len| *len <= FRAME_MAX);
        let Some(len) = len else {
            self.fail(format!("alrm_state leaves {said} bytes, and {FRAME_MAX} is the most"));
            return None;
        };
        self.memory.data(&self.store).get(self.frame_at..self.frame_at + len).map(<[u8]>::to_vec)
    }

    /// Gives the module what the one before it has left. Whether it takes the connection.
    fn take(&mut self, state: &[u8]) -> bool {
        let Some(adopt) = self.adopt else { return false };
        // There was room for it at the start, and memory does not shrink.
        let Some(place) = self.memory.data_mut(&mut self.store).get_mut(self.frame_at..self.frame_at + state.len())
        else {
            return false;
        };
        place.copy_from_slice(state);
        match self.call("adopt", adopt, state.len() as i32) {
            None | Some(0) => false,
            Some(1) => true,
            Some(other) => {
                self.fail(format!("adopt answers {other}, and 0 or 1 is an answer"));
                false
            }
        }
    }

    /// Why nothing is asked of it any more: its connection must end.
    pub(crate) fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    /// Calls so far.
    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    /// Asks no more: what the module has said cannot be.
    pub(crate) fn fail(&mut self, why: String) {
        self.fault.get_or_insert(why);
    }

    fn call<P: WasmParams, R: WasmResults>(&mut self, name: &str, of: TypedFunc<P, R>, params: P) -> Option<R> {
        if self.fault.is_some() {
            return None;
        }
        self.calls += 1;
        let called = self.store.set_fuel(FUEL).and_then(|()| of.call(&mut self.store, params));
        if let Err(error) = &called {
            self.fail(format!("{name} {}", reason(error)));
        }
        called.ok()
    }

    fn tell<P: WasmParams>(&mut self, name: &str, upcall: Upcall<P>, params: P) {
        if let Some(upcall) = upcall {
            self.call(name, upcall, params);
        }
    }

    /// It is a connection's.
    pub(crate) fn add_connection(&mut self, connection: u32) {
        self.connection = connection;
        self.tell("add_conn", self.add_conn, connection.cast_signed());
    }

    /// The connection is over, and the instance with it.
    pub(crate) fn remove_connection(&mut self) {
        self.tell("rm_conn", self.rm_conn, self.connection.cast_signed());
        self.tell("alrm_uninit", self.uninit, ());
    }

    fn number_of(&self, id: MemberId) -> Option<usize> {
        self.store.data().members.iter().position(|known| known.as_ref().is_some_and(|known| known.id == id))
    }

    /// A member has joined.
    pub(crate) fn add_member(&mut self, id: MemberId, label: &str) {
        let members = &mut self.store.data_mut().members;
        let free = members.iter().position(Option::is_none).unwrap_or(members.len());
        members.resize(members.len().max(free + 1), None);
        members[free] = Some(Known::new(id, label));
        // There are 64 at most.
        self.tell("add_member", self.add_member, free as i32);
    }

    /// What a member is found to be like.
    #[cfg(test)]
    pub(super) fn tell_member(&mut self, number: usize, in_flight: i32, round_trip_us: i32) {
        let known = self.store.data_mut().members[number].as_mut().expect("it has joined");
        known.in_flight = in_flight;
        known.round_trip_us = round_trip_us;
    }

    /// A member is gone.
    pub(crate) fn remove_member(&mut self, id: MemberId) {
        let Some(number) = self.number_of(id) else { return };
        self.store.data_mut().members[number] = None;
        self.tell("rm_member", self.rm_member, number as i32);
    }

    /// The ring is another: of these members, in its order.
    pub(crate) fn set_ring(&mut self, ring: &Arc<Ring>, members: &[MemberId]) {
        let numbers = members.iter().map(|id| self.number_of(*id)).collect();
        let facts = self.store.data_mut();
        facts.ring = Arc::clone(ring);
        facts.ring_members = numbers;
    }

    /// A request: whose it is. `rtx` is what the module has kept with it, zero at first.
    /// Without members the module is told what it was told of them last.
    pub(crate) fn redirect(&mut self, request: &[u8], members: Option<&Members>, rtx: u64) -> Option<Answer> {
        let facts = self.store.data_mut();
        members.inspect(|members| facts.follow(members));
        facts.rtx = rtx;
        let shown = &request[..request.len().min(FRAME_MAX)];
        // It was there when the instance began, and memory does not shrink.
        let place = self.memory.data_mut(&mut self.store).get_mut(self.frame_at..self.frame_at + shown.len())?;
        place.copy_from_slice(shown);
        let params = (self.connection.cast_signed(), shown.len() as i32, OF_PEER, rtx.cast_signed());
        let said = self.call("redirect", self.redirect, params)?;
        let read = self.read(said, request, shown.len());
        if let Err(why) = &read {
            self.fail(why.clone());
        }
        read.ok()
    }

    fn read(&self, said: i64, request: &[u8], shown_len: usize) -> Result<Answer, String> {
        let facts = self.store.data();
        let number = said & 0xff;
        let known = facts.known(number as i32);
        if number != DROP && known.is_none() {
            return Err(format!("redirect names member {number}, and there is none"));
        }
        let len = match said.cast_unsigned() >> LEN_SHIFT {
            0 => shown_len,
            len => usize::try_from(len)
                .ok()
                .filter(|len| *len <= FRAME_MAX)
                .ok_or_else(|| format!("redirect makes a request of {len} bytes, and {FRAME_MAX} is the most"))?,
        };
        let left = &self.memory.data(&self.store)[self.frame_at..self.frame_at + len];
        let is_changed = left != &request[..shown_len];
        if is_changed && shown_len < request.len() {
            return Err("redirect changes a request that it has not seen all of".to_owned());
        }
        Ok(Answer {
            member: known.map(|known| known.id),
            pins: said & PINS != 0,
            is_safe: (said & (SAFE | UNSAFE) != 0).then_some(said & SAFE != 0),
            changed: is_changed.then(|| left.to_vec()),
            rtx: facts.rtx,
        })
    }

    /// A frame will not come again.
    pub(crate) fn retire(&mut self, rtx: u64) {
        self.tell("retire", self.retire, rtx.cast_signed());
    }
}

/// What has gone wrong, for operators.
fn reason(error: &wasmi::Error) -> String {
    match error.as_trap_code() {
        Some(TrapCode::OutOfFuel) => format!("took more than its fuel, {FUEL}"),
        Some(TrapCode::StackOverflow) => "calls itself too deeply".to_owned(),
        _ => format!("fails: {error}"),
    }
}
