//! The flows, kept for the next start of the agent where a reboot forgets them: under the runtime directory (DESIGN
//! §3.6, §18).
//!
//! One thread hears of every flow that opens, changes or ends and writes its hand-over record into a slot of its own,
//! or clears it. A record that was cut short by the end of the process does not bear its checksum and is ignored.
//! Between a flow's beginning and its record lie some milliseconds: what is killed in them is lost, but for the ways of
//! sessions that run, for whose records the core waits.
//!
//! ```text
//!  0 "MGFL" | 4..8 version = 2 | ... | 1024: slots of 1024 bytes (version 1: 512 of each)
//!  slot: 0..2 length of the record, 0 for none | 2..8 zero | 8..16 first bytes of BLAKE3 of the record | 16 the record
//! ```

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;
use std::{io, thread};

use margay_core::handover::HandoverRecord;
use margay_core::keepsake::KeptAssociations;
use margay_core::{Event, Instant, Lifecycle, Sal};
use margay_wire::FlowId;
use zeroize::Zeroizing;

use super::core::Running;
use super::keepsake::Keepsake;

const MAGIC: [u8; 4] = *b"MGFL";
const VERSION: u32 = 2;
/// Longer than a record with eight boxes.
const SLOT: u64 = 1024;
/// The version before this one, and the length of its slots.
const FORMER: (u32, usize) = (1, 512);
const HEAD: usize = 16;
/// Between two looks. Connections that are over by then cost nothing; and a flow of the initiator has no record until
/// its peer has confirmed.
const PAUSE: Duration = Duration::from_millis(5);
/// How often a flow is asked for: a set-up that takes longer has failed.
const TRIES_MAX: u32 = 1200;

/// Records that are written at once.
const AT_ONCE: usize = 128;

/// What the keeper is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A flow has opened, or is another than before.
    Flow(FlowId),
    /// It is over.
    Over(FlowId),
    /// The core waits until both are written.
    Keep {
        /// As [`Event::Keep`] has it.
        old: FlowId,
        /// The same.
        new: FlowId,
    },
    /// A peer has been met: its association is worth keeping once something uses it.
    Met,
    /// Associations that are kept have changed.
    Associations,
}

impl Change {
    /// What an event means to the keeper, if anything.
    pub fn of(event: &Event) -> Option<Self> {
        match event {
            Event::FlowOpened(flow) | Event::FlowChanged(flow) | Event::FlowEnded { flow, .. } => {
                Some(Self::Flow(*flow))
            }
            Event::FlowClosed { flow, .. } => Some(Self::Over(flow.flow)),
            Event::Moved { flow, .. } if flow.0 != 0 => Some(Self::Flow(*flow)),
            Event::Keep { old, new } => Some(Self::Keep { old: *old, new: *new }),
            Event::AssociationUp(_) => Some(Self::Met),
            Event::PeerRebooted(_) | Event::Moved { .. } | Event::Whereabouts(_) => Some(Self::Associations),
            Event::ConnectFailed { .. }
            | Event::Twin(_)
            | Event::Flapping(_)
            | Event::Silent(_)
            | Event::GivenUp { .. }
            | Event::Unanswered(_)
            | Event::OtherHost { .. }
            | Event::RouterFound { .. }
            | Event::HandOver(_)
            | Event::SpliceOver { .. }
            | Event::StackChanged { .. }
            | Event::Reconfigured { .. }
            | Event::Ordered { .. }
            | Event::RuleExpired { .. } => None,
        }
    }
}

/// The file.
struct Journal {
    file: File,
    slots: HashMap<FlowId, u64>,
    free: Vec<u64>,
    next: u64,
}

fn path(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join("flows")
}

impl Journal {
    /// An empty one: what the file held has been taken up.
    fn create(runtime_dir: &Path) -> io::Result<Self> {
        let temporary = path(runtime_dir).with_extension("new");
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        let mut head = [0; SLOT as usize];
        head[..4].copy_from_slice(&MAGIC);
        head[4..8].copy_from_slice(&VERSION.to_be_bytes());
        file.write_all_at(&head, 0)?;
        Ok(Self { file, slots: HashMap::new(), free: Vec::new(), next: 1 })
    }

    /// Puts the file in the place of the older one.
    fn publish(&self, runtime_dir: &Path) -> io::Result<()> {
        let path = path(runtime_dir);
        fs::rename(path.with_extension("new"), path)
    }

    fn write(&mut self, flow: FlowId, record: &[u8]) -> io::Result<()> {
        let slot = match self.slots.get(&flow) {
            Some(slot) => *slot,
            None => self.free.pop().unwrap_or_else(|| {
                self.next += 1;
                self.next - 1
            }),
        };
        self.file.write_all_at(&slot_of(record), slot * SLOT)?;
        self.slots.insert(flow, slot);
        Ok(())
    }

    fn clear(&mut self, flow: FlowId) -> io::Result<()> {
        let Some(slot) = self.slots.remove(&flow) else { return Ok(()) };
        self.file.write_all_at(&[0; HEAD], slot * SLOT)?;
        self.free.push(slot);
        Ok(())
    }
}

fn slot_of(record: &[u8]) -> Vec<u8> {
    let len = u16::try_from(record.len()).unwrap_or(u16::MAX);
    let mut slot = vec![0; HEAD];
    slot[..2].copy_from_slice(&len.to_be_bytes());
    slot[8..16].copy_from_slice(&checksum(record));
    slot.extend_from_slice(record);
    slot
}

fn checksum(record: &[u8]) -> [u8; 8] {
    let mut sum = [0; 8];
    sum.copy_from_slice(&blake3::hash(record).as_bytes()[..8]);
    sum
}

/// The whole records of a file; `None` when it is of another version.
fn records(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let version = u32::from_be_bytes(bytes.get(4..8)?.try_into().ok()?);
    let slot_len = match version {
        VERSION => SLOT as usize,
        former if former == FORMER.0 => FORMER.1,
        _ => return None,
    };
    let (head, slots) = bytes.split_at_checked(slot_len)?;
    if head[..4] != MAGIC {
        return None;
    }
    let record = |slot: &'_ [u8]| -> Option<(usize, [u8; 8])> {
        let len = usize::from(u16::from_be_bytes(slot.get(..2)?.try_into().ok()?));
        Some((len, slot.get(8..16)?.try_into().ok()?)).filter(|(len, _)| *len > 0)
    };
    let whole = slots.chunks(slot_len).filter_map(|slot| {
        let (len, sum) = record(slot)?;
        slot.get(HEAD..HEAD + len).filter(|record| checksum(record) == sum)
    });
    Some(whole.collect())
}

/// Hands the core the flows of the start before. Before the datapath runs, so that none of their packets meets a core
/// that does not know them.
pub fn take_up(runtime_dir: &Path, sal: &mut Sal, now: Instant) {
    let path = path(runtime_dir);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => return tracing::warn!(path = %path.display(), %error, "flows cannot be read"),
    };
    let Some(records) = records(&bytes) else {
        return tracing::warn!(path = %path.display(), "the kept flows are of another version; they end");
    };
    let (mut adopted, mut refused) = (0_u64, 0_u64);
    for record in records {
        let result = HandoverRecord::decode(record)
            .map_err(|error| error.to_string())
            .and_then(|record| sal.adopt_flow(now, &record).map_err(|error| error.to_string()));
        match result {
            Ok(()) => adopted += 1,
            Err(error) => {
                refused += 1;
                tracing::info!(error, "a flow is not carried on");
            }
        }
    }
    tracing::info!(adopted, refused, "flows taken up");
}

/// Forgets all: the flows have been ended.
pub fn forget(runtime_dir: &Path) {
    // Absent as a rule, where nothing was kept.
    let _ = fs::remove_file(path(runtime_dir));
}

/// Keeps the file true until the process ends or the datapath is gone.
pub fn keep(runtime_dir: &Path, datapath: Weak<Running>, changes: &Receiver<Change>) {
    if let Err(error) = run(runtime_dir, &datapath, changes) {
        tracing::error!(%error, "flows are no longer kept for the next start of the agent");
    }
}

fn run(runtime_dir: &Path, datapath: &Weak<Running>, changes: &Receiver<Change>) -> io::Result<()> {
    let keepsake = Keepsake::new(runtime_dir);
    let mut journal = Journal::create(runtime_dir)?;
    let mut wanted: HashMap<FlowId, u32> = HashMap::new();
    if let Some(datapath) = datapath.upgrade() {
        // Flows that were taken up say nothing by themselves.
        let known: Vec<FlowId> = datapath.with_sal(|sal, _| sal.flows_to_keep().collect());
        wanted.extend(known.into_iter().map(|flow| (flow, 0)));
        export(&datapath, &mut journal, &mut wanted)?;
    }
    journal.publish(runtime_dir)?;
    loop {
        let first = if wanted.is_empty() { changes.recv().ok() } else { changes.try_recv().ok() };
        if first.is_none() && wanted.is_empty() {
            return Ok(());
        }
        let heard = gather(first, changes);
        let Some(datapath) = datapath.upgrade() else { return Ok(()) };
        let mut has_associations = false;
        let mut awaited = Vec::new();
        for change in heard.into_iter().chain(changes.try_iter()) {
            match change {
                Change::Keep { old, new } => {
                    wanted.extend([(old, 0), (new, 0)]);
                    awaited.push(old);
                }
                Change::Flow(flow) => {
                    wanted.insert(flow, 0);
                }
                Change::Over(flow) => {
                    wanted.remove(&flow);
                    journal.clear(flow)?;
                }
                Change::Met => {}
                Change::Associations => has_associations = true,
            }
        }
        // First: a flow without its association cannot be taken up.
        if datapath.with_sal(|sal, _| sal.take_kept_news()) || has_associations {
            keepsake.write(&associations(&datapath));
        }
        export(&datapath, &mut journal, &mut wanted)?;
        if !awaited.is_empty() {
            datapath.with_sal(|sal, now| awaited.into_iter().for_each(|old| sal.kept(now, old)));
        }
    }
}

/// What comes within [`PAUSE`], or until something comes that is waited for.
fn gather(first: Option<Change>, changes: &Receiver<Change>) -> Vec<Change> {
    let until = std::time::Instant::now() + PAUSE;
    let mut heard: Vec<Change> = first.into_iter().collect();
    while !matches!(heard.last(), Some(Change::Keep { .. })) {
        let rest = until.saturating_duration_since(std::time::Instant::now());
        match changes.recv_timeout(rest) {
            Ok(change) => heard.push(change),
            Err(RecvTimeoutError::Timeout) => break,
            Err(RecvTimeoutError::Disconnected) => {
                thread::sleep(rest);
                break;
            }
        }
    }
    heard
}

/// What the next start needs of the associations: some at a time, since the core's lock is not to be held for all of
/// them.
fn associations(datapath: &Running) -> Zeroizing<Vec<u8>> {
    let ids = datapath.with_sal(|sal, _| sal.kept_associations());
    let parts: Vec<_> = ids.chunks(AT_ONCE).map(|some| datapath.with_sal(|sal, _| sal.keep_some(some))).collect();
    KeptAssociations::concat(&parts)
}

/// Writes what has a record by now; the rest is asked for again, some times.
fn export(datapath: &Running, journal: &mut Journal, wanted: &mut HashMap<FlowId, u32>) -> io::Result<()> {
    let flows: Vec<FlowId> = wanted.keys().copied().collect();
    // Their sessions go another way, by flows that are written before these are cleared.
    let mut left = Vec::new();
    // Some at a time: neither the core's lock nor memory is held for all of them.
    for some in flows.chunks(AT_ONCE) {
        let records: Vec<(Option<Vec<u8>>, bool)> = datapath.with_sal(|sal, now| {
            let record = |flow: &FlowId| {
                let shown = sal.flow(*flow);
                let record = sal.export_flow(now, *flow).map(|record| record.encode());
                if record.is_none() && shown.as_ref().is_some_and(|flow| !flow.goes_on) {
                    left.push(*flow);
                }
                let is_over = shown.is_none_or(|flow| flow.lifecycle >= Lifecycle::Closed);
                (record, is_over)
            };
            some.iter().map(record).collect()
        });
        for (flow, (record, is_over)) in some.iter().zip(records) {
            match record {
                // What was over before it was written costs nothing.
                Some(_) if is_over && !journal.slots.contains_key(flow) => {
                    wanted.remove(flow);
                }
                Some(record) => {
                    journal.write(*flow, &record)?;
                    wanted.remove(flow);
                }
                None if is_over => {
                    wanted.remove(flow);
                }
                None => {
                    if let Some(tries) = wanted.get_mut(flow) {
                        *tries += 1;
                    }
                }
            }
        }
    }
    for flow in left {
        wanted.remove(&flow);
        journal.clear(flow)?;
    }
    wanted.retain(|_, tries| *tries < TRIES_MAX);
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_slot_is_as_written_above() {
        let slot = slot_of(b"abc");
        assert_eq!(slot[..8], [0, 3, 0, 0, 0, 0, 0, 0]);
        // The first bytes of BLAKE3 of "abc".
        assert_eq!(slot[8..16], [0x64, 0x37, 0xb3, 0xac, 0x38, 0x46, 0x51, 0x33]);
        assert_eq!(slot[16..], *b"abc");
    }

    #[test]
    fn what_is_torn_or_cleared_is_left_out() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut journal = Journal::create(dir.path()).expect("created");
        journal.publish(dir.path()).expect("published");
        let read = || fs::read(dir.path().join("flows")).expect("there");
        for (flow, record) in [(1, &b"one"[..]), (2, b"two"), (3, b"three")] {
            journal.write(FlowId(flow), record).expect("written");
        }
        assert_eq!(records(&read()).expect("this version"), [&b"one"[..], b"two", b"three"]);
        journal.clear(FlowId(1)).expect("cleared");
        // The process ended in the middle of a write.
        journal.file.write_all_at(b"TWO", 2 * SLOT + HEAD as u64).expect("written");
        assert_eq!(records(&read()).expect("this version"), [&b"three"[..]]);
        journal.write(FlowId(4), b"four").expect("written");
        assert_eq!(records(&read()).expect("this version"), [&b"four"[..], b"three"], "a free slot is used again");
        journal.write(FlowId(4), b"more").expect("written");
        assert_eq!(records(&read()).expect("this version"), [&b"more"[..], b"three"], "a flow has one slot");
    }

    #[test]
    fn another_version_is_refused() {
        let mut bytes = vec![0; SLOT as usize];
        bytes[..4].copy_from_slice(&MAGIC);
        for (version, is_read) in [(0, false), (1, true), (2, true), (3, false)] {
            bytes[7] = version;
            assert_eq!(records(&bytes), is_read.then(Vec::new), "version {version}");
        }
        assert_eq!(records(b"MGFL"), None);
    }
}
