//! The table of prefixes that the program looks names up in (`bpf/router_cells.h`, docs/decisions/0022): cells in
//! chunks, of which there are as many as prefixes need. A table that has no more room is made anew, and put in force
//! whole.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use margay_core::name::Prefix;

use super::layout::{self, cell_order, cell_table, chunk, usage};
use super::skeleton::types::bss;

/// Cells of a chunk that are used, on average, when a table is made anew: half. With more, few prefixes are where they
/// are looked for first.
const USED_CELLS: u32 = layout::CHUNK_CELLS / 2;
/// Cells that are used at most, for each prefix there can be: some have been those of prefixes that are no more.
const SPARE_PERCENT: u32 = 125;
/// Chunks of a table, at least.
const CHUNKS_MIN: u32 = 8;
/// Chunks that are put in their places at once: so many descriptors are open meanwhile.
const CHUNKS_AT_ONCE: u32 = 64;

/// What the program reads of lengths and table, and where.
pub(super) struct Cells {
    /// Reads and writes cells.
    keep_cell: OwnedFd,
    chunks: MapHandle,
    /// Stands where there is none.
    no_chunk: MapHandle,
    shared: &'static mut bss,
    chunks_max: u32,
    active: Table,
}

/// One of the two tables.
#[derive(Clone, Copy)]
pub(super) struct Table {
    at: cell_table,
    /// Cells that are used.
    used: u32,
}

/// What has become of a prefix that was written.
pub(super) struct Written {
    /// What was done by the route that was there before.
    pub usage: usage,
    /// There was room. Else all names with this prefix are the agent's.
    pub has_room: bool,
}

impl Cells {
    /// For so many prefixes at most. The map has [`places_for`] for them.
    pub fn new(keep_cell: OwnedFd, chunks: MapHandle, shared: &'static mut bss, prefixes_max: u32) -> io::Result<Self> {
        let none = Table { at: cell_table::default(), used: 0 };
        let chunks_max = chunks_max(prefixes_max);
        let mut this = Self { keep_cell, chunks, no_chunk: new_chunk()?, shared, chunks_max, active: none };
        let table = this.prepare(0)?;
        this.active = table;
        Ok(this)
    }

    /// The table that is in force.
    pub const fn active(&self) -> Table {
        self.active
    }

    /// Whether there is no good room for one more than these prefixes, and there would be in a table that is made anew.
    pub fn is_full(&self, prefixes: usize) -> bool {
        let Table { at, used } = self.active;
        let gone = used.saturating_sub(u32::try_from(prefixes).unwrap_or(u32::MAX));
        used >= at.chunks * USED_CELLS && (at.chunks < self.chunks_max || gone > used / 8)
    }

    /// Bytes that the table takes in the kernel.
    pub fn bytes(&self) -> usize {
        const POINTER: usize = 8;
        let of_chunk = size_of::<chunk>().next_power_of_two();
        self.active.at.chunks as usize * of_chunk + places(self.chunks_max) as usize * POINTER
    }

    /// An empty table for `prefixes` and as many to come, beside the one that is in force.
    pub fn prepare(&self, prefixes: usize) -> io::Result<Table> {
        let wanted = u32::try_from(2 * prefixes).unwrap_or(u32::MAX).div_ceil(USED_CELLS);
        let wanted = wanted.max(CHUNKS_MIN).min(self.chunks_max);
        let first_chunk = if self.active.at.first_chunk == 0 { self.chunks_max } else { 0 };
        self.put_chunks(first_chunk, wanted, true)?;
        Ok(Table { at: cell_table { first_chunk, chunks: wanted }, used: 0 })
    }

    /// Puts a table in force. Nobody looks at the one before when this returns.
    pub fn put_in_force(&mut self, table: Table) -> io::Result<Table> {
        let before = std::mem::replace(&mut self.active, table);
        let lengths = self.shared.lengths[self.in_force()];
        self.put_lengths(layout::route_lengths { table: table.at, ..lengths });
        // Whenever such a map is written, the kernel waits for packets on their way through programs.
        let nowhere = (places(self.chunks_max) - 1).to_ne_bytes();
        let no_chunk = self.no_chunk.as_fd().as_raw_fd().to_ne_bytes();
        self.chunks.update(&nowhere, &no_chunk, MapFlags::ANY).map_err(io::Error::other)?;
        Ok(before)
    }

    /// Gives back what a table took that is no more in force.
    pub fn release(&self, table: Table) -> io::Result<()> {
        self.put_chunks(table.at.first_chunk, table.at.chunks, false)
    }

    fn put_chunks(&self, first: u32, count: u32, are_new: bool) -> io::Result<()> {
        let numbers: Vec<u32> = (first..first + count).collect();
        numbers.chunks(CHUNKS_AT_ONCE as usize).try_for_each(|numbers| {
            let new =
                if are_new { numbers.iter().map(|_| new_chunk()).collect::<io::Result<Vec<_>>>()? } else { vec![] };
            let descriptor = |at: usize| new.get(at).unwrap_or(&self.no_chunk).as_fd().as_raw_fd();
            let keys: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
            let values: Vec<u8> = (0..numbers.len()).flat_map(|at| descriptor(at).to_ne_bytes()).collect();
            let put = self.chunks.update_batch(&keys, &values, numbers.len() as u32, MapFlags::ANY, MapFlags::ANY);
            put.map_err(io::Error::other)
        })
    }

    /// Writes a prefix's route; and into the filter of its length that there is such a prefix.
    pub fn write(
        &self,
        table: &mut Table,
        prefix: &Prefix,
        route: layout::Route,
        filter: Option<u32>,
    ) -> io::Result<Written> {
        let order = cell_order {
            route: layout::route_word(prefix, route),
            action: layout::CELL_WRITE,
            filter: layout::filter_number(filter),
            ..order_of(table, prefix)
        };
        let done = self.run(order)?;
        table.used += u32::from(done.result == layout::CELL_NEW);
        Ok(Written { usage: done.usage, has_room: done.result != layout::CELL_CROWDED })
    }

    /// The same in the table that is in force.
    pub fn write_active(&mut self, prefix: &Prefix, route: layout::Route, filter: Option<u32>) -> io::Result<Written> {
        let mut active = self.active;
        let written = self.write(&mut active, prefix, route, filter);
        self.active = active;
        written
    }

    /// What was done by a prefix's route.
    pub fn usage(&self, table: &Table, prefix: &Prefix) -> io::Result<usage> {
        let done = self.run(cell_order { action: layout::CELL_READ, ..order_of(table, prefix) })?;
        Ok(done.usage)
    }

    /// Adds what was done by a prefix's route before it was here.
    pub fn add_usage(&self, table: &Table, prefix: &Prefix, usage: usage) -> io::Result<()> {
        self.run(cell_order { action: layout::CELL_ADD, usage, ..order_of(table, prefix) }).map(|_| ())
    }

    fn run(&self, order: cell_order) -> io::Result<cell_order> {
        run(self.keep_cell.as_fd(), order)
    }

    /// Empties a filter: it is for another length now.
    pub fn empty_filter(&mut self, filter: u32) {
        self.shared.filters[filter as usize].fill(0);
    }

    /// Tells the program which lengths prefixes have, all at once.
    pub fn set_lengths(&mut self, lengths: &[(u16, Option<u32>)]) {
        let wanted = layout::lengths_of(lengths, self.active.at);
        if !layout::is_same(&self.shared.lengths[self.in_force()], &wanted) {
            self.put_lengths(wanted);
        }
    }

    const fn in_force(&self) -> usize {
        self.shared.lengths_active as usize % 2
    }

    /// Writes those that are not in force, then puts them in force.
    fn put_lengths(&mut self, wanted: layout::route_lengths) {
        let next = 1 - self.in_force();
        self.shared.lengths[next] = wanted;
        // SAFETY: the word is aligned, and lives as long as the mapping, which is never undone; this process writes it
        // here alone.
        unsafe { AtomicU32::from_ptr(&raw mut self.shared.lengths_active) }.store(next as u32, Ordering::Release);
    }
}

fn order_of(table: &Table, prefix: &Prefix) -> cell_order {
    cell_order {
        id: layout::words(&prefix.id),
        route: layout::route_word(prefix, layout::Route::Gone),
        table: table.at,
        filter: layout::filter_number(None),
        ..Default::default()
    }
}

/// Places for chunks of two tables, and one that is nowhere.
pub(super) fn places_for(prefixes_max: u32) -> u32 {
    places(chunks_max(prefixes_max))
}

const fn places(chunks_max: u32) -> u32 {
    2 * chunks_max + 1
}

/// Chunks of a table, at most.
fn chunks_max(prefixes_max: u32) -> u32 {
    let cells = u64::from(prefixes_max) * u64::from(SPARE_PERCENT) / 100;
    u32::try_from(cells.div_ceil(u64::from(USED_CELLS))).unwrap_or(u32::MAX / 2).max(1)
}

fn new_chunk() -> io::Result<MapHandle> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    let len = size_of::<chunk>() as u32;
    MapHandle::create(MapType::Array, Some("router_chunk"), 4, len, 1, &options).map_err(io::Error::other)
}

/// Has the program carry out an order, and gives back what it made of it.
fn run(program: BorrowedFd<'_>, order: cell_order) -> io::Result<cell_order> {
    let mut order = MaybeUninit::new(order);
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        ctx_in: order.as_mut_ptr().cast(),
        ctx_size_in: size_of::<cell_order>() as u32,
        ..Default::default()
    };
    // SAFETY: the program is open; order and options live across the call, and say their sizes. The kernel writes the
    // order back.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    if result != 0 {
        return Err(io::Error::from_raw_os_error(-result));
    }
    // SAFETY: it was initialised, and any bytes are a value of it.
    Ok(unsafe { order.assume_init() })
}
