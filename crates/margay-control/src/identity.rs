//! Who this host is: its key, how often its agent has started, and which boot this is (DESIGN §7).

use std::path::Path;

use margay_core::epoch::next_epoch;
use margay_core::key::{HostId, HostSecret, from_hex, to_hex};
use zeroize::Zeroizing;

use crate::clock::Clock;
use crate::entropy;
use crate::state_dir::{StateDir, StateError, damaged};

const KEY_FILE: &str = "host.key";
const KEY_MAGIC: &str = "margay-host-key-1";
const EPOCH_FILE: &str = "epoch";
/// Where Linux tells which boot this is.
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The host's identity, for one start of the agent.
#[derive(Debug)]
pub struct Identity {
    /// The host's private key.
    pub host_key: HostSecret,
    /// This start of the agent; greater than that of every earlier one, and on disk already.
    pub epoch: u32,
    /// The boot of the host.
    pub boot_id: [u8; 16],
    /// What the runtime directory keeps of keys is of this boot, and the epoch that they were used in last is known. If
    /// not, they must not be used again: nobody could say under which numbers they have been.
    pub continues: bool,
}

impl Identity {
    /// Reads the identity, or makes one on the first start; takes the next epoch and syncs it to disk before it
    /// returns.
    ///
    /// Call it once per start, before anything is sent: sending keys derive from the epoch. `runtime_dir` is where
    /// association keys are kept until a reboot: the epoch is kept beside them, so that a state directory that was
    /// restored from an older copy brings no epoch back under which those keys have been used.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or written, or holds something else. Names the file and says what to do.
    pub fn start(dir: &StateDir, runtime_dir: &Path, boot_id: &Path, clock: &Clock) -> Result<Self, StateError> {
        let boot_id = read_boot_id(boot_id)?;
        let known = read_key(dir)?;
        let beside_keys = runtime_dir.join(EPOCH_FILE);
        let used = read_used(&beside_keys)?;
        let epoch = later_epoch(dir, used.map(|used| used.epoch), known.is_some(), clock)?;
        dir.write(EPOCH_FILE, format!("{epoch}\n").as_bytes())?;
        write_used(&beside_keys, epoch, &boot_id)?;
        let continues = used.is_some_and(|used| used.boot_id.is_none_or(|known| known == boot_id));
        let host_key = match known {
            Some(key) => key,
            None => make_key(dir)?,
        };
        Ok(Self { host_key, epoch, boot_id, continues })
    }

    /// The host's name on the wire.
    pub fn host_id(&self) -> HostId {
        self.host_key.public().id()
    }
}

/// Reads the host's key without starting anything: for `margay id` on a host whose agent is down.
///
/// # Errors
///
/// The file cannot be read, or holds something else.
pub fn read_key(dir: &StateDir) -> Result<Option<HostSecret>, StateError> {
    let Some(text) = dir.read(KEY_FILE)? else { return Ok(None) };
    let digits = text.trim_end().strip_prefix(KEY_MAGIC).map(str::trim_start);
    let bytes = digits.and_then(|digits| from_hex::<32>(digits).ok()).ok_or_else(|| {
        let what =
            format!("not `{KEY_MAGIC}` and 64 hexadecimal digits; restore it, or remove it to become a new host");
        damaged(&dir.join(KEY_FILE), what)
    })?;
    Ok(Some(HostSecret::from_bytes(bytes)))
}

fn make_key(dir: &StateDir) -> Result<HostSecret, StateError> {
    let key = HostSecret::generate(&mut entropy::rng()?);
    let text = Zeroizing::new(format!("{KEY_MAGIC} {}\n", to_hex(&key.to_bytes()[..])));
    dir.write(KEY_FILE, text.as_bytes())?;
    Ok(key)
}

/// What lies beside the keys: the epoch that they were used in last, and the boot that they are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Used {
    epoch: u32,
    /// Unknown where the version before has written it.
    boot_id: Option<[u8; 16]>,
}

fn read_used(path: &Path) -> Result<Option<Used>, StateError> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(StateError::Io { path: path.to_owned(), act: "read the epoch", error }),
    };
    let text = text.trim_end();
    let used = match text.split_once(' ') {
        Some((epoch, boot_id)) => epoch.parse().ok().zip(from_hex(boot_id).ok().map(Some)),
        None => text.parse().ok().map(|epoch| (epoch, None)),
    };
    let used = used.map(|(epoch, boot_id)| Used { epoch, boot_id });
    let what = "not an epoch and a boot; remove it: peers are met anew, and the flows that were kept end";
    used.map(Some).ok_or_else(|| damaged(path, what))
}

/// Whole, or not at all.
fn write_used(path: &Path, epoch: u32, boot_id: &[u8; 16]) -> Result<(), StateError> {
    let fresh = path.with_extension("new");
    let text = format!("{epoch} {}\n", to_hex(boot_id));
    let written = std::fs::write(&fresh, text).and_then(|()| std::fs::rename(&fresh, path));
    written.map_err(|error| StateError::Io { path: path.to_owned(), act: "write the epoch", error })
}

/// Beyond every epoch that this host may have used: those that it remembers, and the clock, since an agent starts
/// less than once a second. The clock counts although there is a counter: the counter may be an old copy.
fn later_epoch(dir: &StateDir, used: Option<u32>, has_key: bool, clock: &Clock) -> Result<u32, StateError> {
    let path = dir.join(EPOCH_FILE);
    let text = dir.read(EPOCH_FILE)?;
    let advice = "not a number; remove it, and the agent continues from the clock";
    let counted: Option<u32> =
        text.map(|text| text.trim_end().parse()).transpose().map_err(|_| damaged(&path, advice))?;
    if counted.is_none() && has_key {
        tracing::warn!(path = %path.display(), "the epoch counter is missing; it continues from the clock");
    }
    if let (Some(counted), Some(used)) = (counted, used)
        && counted < used
    {
        tracing::warn!(
            path = %path.display(), counted, used,
            "the epoch counter has gone back: the state directory was restored from an older copy; the later one counts"
        );
    }
    // A new host needs no clock, and one whose clock is beyond 2106 goes on counting.
    let now = if has_key { u32::try_from(clock.unix_s()).unwrap_or(0) } else { 0 };
    next_epoch(counted, used, now)
        .ok_or_else(|| damaged(&path, "the last epoch is used up; remove the host key to become a new host"))
}

fn read_boot_id(path: &Path) -> Result<[u8; 16], StateError> {
    let io_error = |error| StateError::Io { path: path.to_owned(), act: "read the boot's identity", error };
    let text = std::fs::read_to_string(path).map_err(io_error)?;
    let digits: String = text.trim_end().chars().filter(|digit| *digit != '-').collect();
    from_hex(&digits).map_err(|_| damaged(path, "not the identity of a boot"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock() -> Clock {
        Clock::from_fn(|| 1_700_000_000)
    }

    /// On a boot of its own each time.
    fn start(dir: &StateDir) -> Result<Identity, StateError> {
        let runtime = tempfile::tempdir().expect("a directory");
        Identity::start(dir, runtime.path(), Path::new(BOOT_ID), &clock())
    }

    #[test]
    fn a_host_keeps_its_key_and_every_start_is_a_new_epoch() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let first = start(&dir).expect("started");
        let second = start(&dir).expect("started");
        assert_eq!(first.host_id(), second.host_id());
        assert_eq!((first.epoch, second.epoch), (1, 1_700_000_002), "the low three bits count on");
        assert_eq!(start(&dir).expect("started").epoch, 1_700_000_003);
        assert_ne!(first.boot_id, [0; 16]);
    }

    #[test]
    fn a_lost_epoch_never_goes_backwards() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        start(&dir).expect("started");
        std::fs::remove_file(dir.join(EPOCH_FILE)).expect("removed");
        assert!(start(&dir).expect("started").epoch >= 1_700_000_000);
    }

    #[test]
    fn a_restored_counter_brings_no_used_epoch_back() {
        let base = tempfile::tempdir().expect("a directory");
        let (dir, runtime) = (StateDir::open(base.path().join("s")).expect("made"), base.path());
        let at = |unix_s: u64| Identity::start(&dir, runtime, Path::new(BOOT_ID), &Clock::from_fn(move || unix_s));
        at(1000).expect("started");
        let copy = dir.read(EPOCH_FILE).expect("readable").expect("is there");
        let latest = (0..40).map(|_| at(1000).expect("started").epoch).max().expect("forty");
        dir.write(EPOCH_FILE, copy.as_bytes()).expect("restored");
        // The clock is as it was: the keys of this boot are there, and so is the epoch beside them.
        let restored = at(1000).expect("started").epoch;
        assert!(restored > latest, "{restored} was used, up to {latest}");
        // After a reboot the clock alone knows.
        std::fs::remove_file(runtime.join(EPOCH_FILE)).expect("removed");
        dir.write(EPOCH_FILE, copy.as_bytes()).expect("restored");
        let rebooted = at(1100).expect("started").epoch;
        assert!(rebooted > restored, "{rebooted} was used, up to {restored}");
    }

    #[test]
    fn keys_are_used_again_only_on_their_boot_and_beyond_their_epoch() {
        let base = tempfile::tempdir().expect("a directory");
        let (dir, runtime) = (StateDir::open(base.path().join("s")).expect("made"), base.path());
        let boots = ["one", "two"].map(|name| runtime.join(name));
        for (path, digit) in boots.iter().zip(["1", "2"]) {
            std::fs::write(path, digit.repeat(32)).expect("written");
        }
        let at = |boot: usize| Identity::start(&dir, runtime, &boots[boot], &clock());
        let starts = [0, 0, 1, 1].map(|boot| at(boot).expect("started"));
        assert_eq!(starts.each_ref().map(|start| start.continues), [false, true, false, true]);
        assert!(starts.is_sorted_by(|one, next| one.epoch < next.epoch));
        let beside_keys = runtime.join(EPOCH_FILE);
        for torn in ["", "17 22", "x"] {
            std::fs::write(&beside_keys, torn).expect("written");
            let error = at(1).expect_err("nobody knows what the keys were used for").to_string();
            assert!(error.contains(EPOCH_FILE), "{error}");
        }
        std::fs::remove_file(&beside_keys).expect("removed");
        assert!(!at(1).expect("started").continues, "the keys are left alone");
    }

    #[test]
    fn damaged_files_are_named() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        start(&dir).expect("started");
        for (file, content) in
            [(EPOCH_FILE, "seven\n"), (EPOCH_FILE, "4294967295\n"), (KEY_FILE, "margay-host-key-1 12\n")]
        {
            let before = dir.read(file).expect("readable").expect("is there");
            dir.write(file, content.as_bytes()).expect("written");
            let error = start(&dir).expect_err("refused").to_string();
            assert!(error.contains(file), "{error}");
            dir.write(file, before.as_bytes()).expect("written");
        }
        assert!(start(&dir).is_ok());
    }

    #[test]
    fn keys_are_not_printed() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let identity = start(&dir).expect("started");
        let secret = to_hex(&identity.host_key.to_bytes()[..]);
        assert!(!format!("{identity:?}").contains(&secret));
    }
}
