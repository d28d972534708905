//! memcached's binary protocol (`doc/protocol-binary.txt` of memcached; deprecated there, and spoken by many clients).
//!
//! Between framers a request is as its client has sent it, but for one byte: the opcode is the one of the same name
//! that always answers, so that answers stay in step. The client's framer keeps from the client what that one does not
//! want to hear, and gives each answer the opcode of its request. Errors of framers and switches travel as text, and
//! become answers of this protocol at the client's framer ([`Answering::answer`]).
//!
//! ```text
//!  0 magic | 1 opcode | 2..4 length of the key | 4 length of the extras | 5 data type
//!  6..8 of requests vbucket, of answers status
//!  8..12 length of all behind the header | 12..16 opaque | 16..24 CAS | extras | key | value
//! ```

use margay_memcached::request::{KEY_MAX, VALUE_MAX};

use super::super::{Asked, Join, NoAnswer, Part, Progress, Step, TOO_LARGE};

/// First byte of a request.
pub(super) const REQUEST: u8 = 0x80;
/// First byte of an answer.
const ANSWER: u8 = 0x81;
/// Bytes of the header.
const HEADER_LEN: usize = 24;

/// The status of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
enum Status {
    /// It was done.
    Success = 0x00,
    /// There is no such key.
    Missing = 0x01,
    /// The value is too large.
    TooLarge = 0x03,
    /// The request is none.
    Invalid = 0x04,
    /// Whoever asks is not believed.
    Authentication = 0x20,
    /// There is no such command.
    Unknown = 0x81,
    /// The command is not supported.
    NotSupported = 0x83,
    /// Something has failed that is no affair of the client's.
    Internal = 0x84,
}

/// Statuses of answers that are no error: done, no such key, the key exists, not stored.
const ORDINARY: [u16; 4] = [Status::Success as u16, Status::Missing as u16, 0x02, 0x05];

/// Which answers a client does not want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hidden {
    /// It wants any.
    Nothing,
    /// That there is no such key.
    Misses,
    /// That it was done.
    Successes,
}

/// What a request has behind its extras.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    /// A key.
    Key,
    /// A key and a value.
    KeyAndValue,
    /// Nothing.
    Nothing,
    /// Whatever there is, it is not looked at.
    Any,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The server that has the key is told the opcode that always answers. `is_safe`: it changes nothing.
    Key { told: u8, hidden: Hidden, is_safe: bool },
    /// Any server is told.
    Anybody,
    /// It is done, as far as the client can tell.
    Done,
    /// So is it, and the connection ends; with an answer, or without.
    Quit { has_answer: bool },
    /// An error is the answer.
    Refused(Status, &'static str),
}

/// A command.
#[derive(Clone, Copy, Debug)]
struct Command {
    opcode: u8,
    extras_len: usize,
    body: Body,
    fate: Fate,
}

const NO_KEY: &str = "this is not supported by an ensemble: it concerns no key; ask a server";
const NO_PASSWORD: &str = "an ensemble takes no password: Margay says who may connect";

const fn of_key(opcode: u8, told: u8, extras_len: usize, hidden: Hidden, is_safe: bool) -> Command {
    Command { opcode, extras_len, body: Body::Key, fate: Fate::Key { told, hidden, is_safe } }
}

const fn with_value(opcode: u8, told: u8, extras_len: usize, hidden: Hidden) -> Command {
    let fate = Fate::Key { told, hidden, is_safe: false };
    Command { opcode, extras_len, body: Body::KeyAndValue, fate }
}

const fn plain(opcode: u8, extras_len: usize, fate: Fate) -> Command {
    Command { opcode, extras_len, body: Body::Nothing, fate }
}

const fn refused(opcode: u8, status: Status, why: &'static str) -> Command {
    Command { opcode, extras_len: 0, body: Body::Any, fate: Fate::Refused(status, why) }
}

/// Every command that memcached knows; of others an ensemble says, as memcached does, that they are unknown.
const COMMANDS: [Command; 36] = [
    of_key(0x00, 0x00, 0, Hidden::Nothing, true),       // get
    with_value(0x01, 0x01, 8, Hidden::Nothing),         // set
    with_value(0x02, 0x02, 8, Hidden::Nothing),         // add
    with_value(0x03, 0x03, 8, Hidden::Nothing),         // replace
    of_key(0x04, 0x04, 0, Hidden::Nothing, false),      // delete
    of_key(0x05, 0x05, 20, Hidden::Nothing, false),     // increment
    of_key(0x06, 0x06, 20, Hidden::Nothing, false),     // decrement
    plain(0x07, 0, Fate::Quit { has_answer: true }),    // quit
    refused(0x08, Status::NotSupported, NO_KEY),        // flush
    of_key(0x09, 0x00, 0, Hidden::Misses, true),        // getq
    plain(0x0a, 0, Fate::Done),                         // noop
    plain(0x0b, 0, Fate::Anybody),                      // version
    of_key(0x0c, 0x0c, 0, Hidden::Nothing, true),       // getk
    of_key(0x0d, 0x0c, 0, Hidden::Misses, true),        // getkq
    with_value(0x0e, 0x0e, 0, Hidden::Nothing),         // append
    with_value(0x0f, 0x0f, 0, Hidden::Nothing),         // prepend
    refused(0x10, Status::NotSupported, NO_KEY),        // stat
    with_value(0x11, 0x01, 8, Hidden::Successes),       // setq
    with_value(0x12, 0x02, 8, Hidden::Successes),       // addq
    with_value(0x13, 0x03, 8, Hidden::Successes),       // replaceq
    of_key(0x14, 0x04, 0, Hidden::Successes, false),    // deleteq
    of_key(0x15, 0x05, 20, Hidden::Successes, false),   // incrementq
    of_key(0x16, 0x06, 20, Hidden::Successes, false),   // decrementq
    plain(0x17, 0, Fate::Quit { has_answer: false }),   // quitq
    refused(0x18, Status::NotSupported, NO_KEY),        // flushq
    with_value(0x19, 0x0e, 0, Hidden::Successes),       // appendq
    with_value(0x1a, 0x0f, 0, Hidden::Successes),       // prependq
    plain(0x1b, 4, Fate::Done),                         // verbosity
    of_key(0x1c, 0x1c, 4, Hidden::Nothing, false),      // touch
    of_key(0x1d, 0x1d, 4, Hidden::Nothing, false),      // gat
    of_key(0x1e, 0x1d, 4, Hidden::Misses, false),       // gatq
    refused(0x20, Status::NotSupported, NO_PASSWORD),   // SASL: which mechanisms
    refused(0x21, Status::Authentication, NO_PASSWORD), // SASL: begin
    refused(0x22, Status::Authentication, NO_PASSWORD), // SASL: go on
    of_key(0x23, 0x23, 4, Hidden::Nothing, false),      // gatk
    of_key(0x24, 0x23, 4, Hidden::Misses, false),       // gatkq
];

fn command_of(opcode: u8) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| command.opcode == opcode)
}

/// The header of a request or an answer.
#[derive(Clone, Copy, Debug)]
struct Header {
    opcode: u8,
    key_len: usize,
    extras_len: usize,
    body_len: usize,
    opaque: u32,
}

fn number<const LEN: usize>(bytes: [u8; LEN]) -> usize {
    bytes.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
}

impl Header {
    /// Reads it. None: it has not come whole.
    fn read(bytes: &[u8]) -> Option<Self> {
        let header: &[u8; HEADER_LEN] = bytes.first_chunk()?;
        let [_, opcode, key_0, key_1, extras_len, _, _, _, body_0, body_1, body_2, body_3, rest @ ..] = *header;
        let [opaque_0, opaque_1, opaque_2, opaque_3, ..] = rest;
        Some(Self {
            opcode,
            key_len: number([key_0, key_1]),
            extras_len: extras_len.into(),
            body_len: number([body_0, body_1, body_2, body_3]),
            opaque: u32::from_be_bytes([opaque_0, opaque_1, opaque_2, opaque_3]),
        })
    }

    /// Bytes of all of it: less than 2^33.
    fn whole_len(self) -> usize {
        HEADER_LEN + self.body_len
    }

    /// Bytes behind the key; none: the lengths contradict each other.
    fn value_len(self) -> Option<usize> {
        self.body_len.checked_sub(self.extras_len + self.key_len)
    }

    fn is_of(self, command: &Command) -> bool {
        let Some(value_len) = self.value_len() else { return false };
        let is_key = (1..=KEY_MAX).contains(&self.key_len);
        let has_body = match command.body {
            Body::Key => is_key && value_len == 0,
            Body::KeyAndValue => is_key,
            Body::Nothing => self.key_len == 0 && value_len == 0,
            Body::Any => return true,
        };
        has_body && self.extras_len == command.extras_len
    }

    fn answering(self, hidden: Hidden) -> Answering {
        Answering { opcode: self.opcode, opaque: self.opaque, hidden }
    }
}

/// The status of an answer that is an error, and as much of its text as there is. `None`: another answer, or one whose
/// header has not come whole.
pub(in super::super) fn error_of(answer: &[u8]) -> Option<(u16, &[u8])> {
    let header = Header::read(answer)?;
    let status = u16::from_be_bytes([answer[6], answer[7]]);
    let text = answer.get(HEADER_LEN + header.extras_len + header.key_len..).unwrap_or_default();
    (answer[0] == ANSWER && !ORDINARY.contains(&status)).then_some((status, text))
}

/// How the answer to a request is given to its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answering {
    opcode: u8,
    opaque: u32,
    hidden: Hidden,
}

impl Answering {
    /// The answer that was meant for this request: the server's, or an error as text. None: the client does not want
    /// it.
    pub fn answer(self, mut answer: Vec<u8>) -> Option<Vec<u8>> {
        let [_, opcode, _, _, _, _, status @ .., _, _] = match answer.first_chunk_mut::<10>() {
            Some(begin) if begin[0] == ANSWER => begin,
            _ => return Some(self.error(&answer)),
        };
        *opcode = self.opcode;
        let status = u16::from_be_bytes(*status);
        let is_hidden = match self.hidden {
            Hidden::Nothing => false,
            Hidden::Misses => status == Status::Missing as u16,
            Hidden::Successes => status == Status::Success as u16,
        };
        (!is_hidden).then_some(answer)
    }

    /// The answer for an error that is text.
    fn error(self, text: &[u8]) -> Vec<u8> {
        let text = String::from_utf8_lossy(text);
        let text = text.trim_end();
        let text = text.strip_prefix("SERVER_ERROR ").unwrap_or(text);
        let status = if text == TOO_LARGE { Status::TooLarge } else { Status::Internal };
        self.status(status, text)
    }

    /// An answer of the framer's own, with a text that has less than 2^32 bytes.
    fn status(self, status: Status, text: &str) -> Vec<u8> {
        let mut answer = vec![0; HEADER_LEN];
        answer[0] = ANSWER;
        answer[1] = self.opcode;
        answer[6..8].copy_from_slice(&(status as u16).to_be_bytes());
        answer[8..12].copy_from_slice(&(text.len() as u32).to_be_bytes());
        answer[12..16].copy_from_slice(&self.opaque.to_be_bytes());
        answer.extend_from_slice(text.as_bytes());
        answer
    }
}

/// Reads a request from the beginning of what a client has sent.
pub(super) fn step(bytes: &[u8]) -> Step {
    if bytes.first().is_some_and(|magic| *magic != REQUEST) {
        // Where the next request begins is not known. memcached says nothing, either.
        return Step::Taken(bytes.len(), Asked::Last(Vec::new()));
    }
    let Some(header) = Header::read(bytes) else { return Step::More(Some(HEADER_LEN)) };
    let len = header.whole_len();
    let says = |status, text| header.answering(Hidden::Nothing).status(status, text);
    let Some(command) = command_of(header.opcode) else {
        return Step::Taken(len, Asked::Answer(says(Status::Unknown, "this command is not known to an ensemble")));
    };
    if !header.is_of(command) {
        return Step::Taken(HEADER_LEN, Asked::Last(says(Status::Invalid, "the lengths are not those of the command")));
    }
    if header.value_len().is_some_and(|value_len| value_len > VALUE_MAX) {
        return Step::Taken(len, Asked::Answer(says(Status::TooLarge, "object too large for cache")));
    }
    let (told, hidden, is_safe) = match command.fate {
        Fate::Key { told, hidden, is_safe } => (told, hidden, is_safe),
        Fate::Anybody => (command.opcode, Hidden::Nothing, true),
        Fate::Done => return Step::Taken(len, Asked::Answer(says(Status::Success, ""))),
        Fate::Quit { has_answer: true } => return Step::Taken(len, Asked::Last(says(Status::Success, ""))),
        Fate::Quit { has_answer: false } => return Step::Taken(len, Asked::Last(Vec::new())),
        Fate::Refused(status, why) => return Step::Taken(len, Asked::Answer(says(status, why))),
    };
    let Some(request) = bytes.get(..len) else { return Step::More(Some(len)) };
    let mut request = request.to_vec();
    request[1] = told;
    let join = Join::Binary(header.answering(hidden));
    Step::Taken(len, Asked::Servers { parts: vec![Part { bytes: request, is_safe }], join })
}

/// Whether these bytes are of this protocol: a request, or the beginning of one.
pub(super) fn is_binary(bytes: &[u8]) -> bool {
    bytes.first() == Some(&REQUEST)
}

/// The key of a request for servers, of which the beginning is enough; none in one that any server can answer.
pub(super) fn key_of(request: &[u8]) -> Option<&[u8]> {
    let header = Header::read(request)?;
    let from = HEADER_LEN + header.extras_len;
    request.get(from..from + header.key_len).filter(|key| !key.is_empty())
}

/// Whether a request for servers may be repeated: it changes nothing.
pub(super) fn is_safe(request: &[u8]) -> bool {
    let command = request.get(1).and_then(|opcode| command_of(*opcode));
    matches!(command.map(|command| command.fate), Some(Fate::Anybody | Fate::Key { is_safe: true, .. }))
}

/// The opcode and the key of a request, for lists.
pub(super) fn shown(request: &[u8]) -> Vec<u8> {
    let opcode = request.get(1).copied().unwrap_or_default();
    [format!("0x{opcode:02x} ").as_bytes(), key_of(request).unwrap_or_default()].concat()
}

/// As [`answer_len`](super::super::answer_len), of an answer of this protocol.
///
/// # Errors
///
/// [`NoAnswer`].
pub(in super::super) fn answer_len(bytes: &[u8], progress: &mut Progress) -> Result<Option<usize>, NoAnswer> {
    if progress.left.is_none() {
        if bytes.first().is_some_and(|magic| *magic != ANSWER) {
            return Err(NoAnswer);
        }
        let Some(header) = Header::read(bytes) else { return Ok(None) };
        *progress = Progress { from: header.whole_len(), left: Some(0) };
    }
    Ok((progress.from <= bytes.len()).then_some(progress.from))
}

#[cfg(test)]
#[path = "binary_test.rs"]
mod test;
