//! What libbpf has said last: the verifier's log is among it.

use parking_lot::Mutex;

static WORDS: Mutex<Vec<String>> = Mutex::new(Vec::new());
const WORDS_MAX: usize = 20;

/// Keeps what libbpf says for [`last`], instead of printing it.
pub(crate) fn keep() {
    let keep = |_: libbpf_rs::PrintLevel, line: String| {
        let mut words = WORDS.lock();
        words.extend(line.lines().map(str::to_owned));
        let surplus = words.len().saturating_sub(WORDS_MAX);
        words.drain(..surplus);
    };
    libbpf_rs::set_print(Some((libbpf_rs::PrintLevel::Warn, keep)));
}

/// Whether the last lines are of a program that the verifier refused.
pub(crate) fn has_verifier_log() -> bool {
    WORDS.lock().iter().any(|line| line.contains("END PROG LOAD LOG"))
}

/// The last lines.
pub(crate) fn last() -> String {
    WORDS.lock().join(" | ")
}
