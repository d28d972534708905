//! Redis' protocol (RESP, versions 2 and 3) as ensembles need it.
//!
//! A request between framers is an array of bulk strings, as clients send it. Its first byte is `>` in place of `*`
//! where the client speaks version 3: each member's framer has its own connection, and greets the server when it has
//! to. Where the key lies further behind than a switch sees, the key stands in front as well, as `=LENGTH`, the end of
//! a line, the key, the end of a line.

mod answer;
mod asked;
mod command;
mod reader;

pub(crate) use answer::{join_arrays, join_okays, join_sums, line_of_answer};
pub use reader::Reader;

use super::{Protocol, Step};
use command::{Keys, What};

/// First byte of an array.
const ARRAY: u8 = b'*';
/// First byte of an array whose answer is wanted in version 3; of what a server says unasked.
const PUSH: u8 = b'>';
/// First byte of a key that stands in front of a request.
const KEY_IN_FRONT: u8 = b'=';
/// Longest key, or part of a key that it is placed by, in bytes.
const KEY_MAX: usize = 1024;
/// A switch sees so many bytes of any request at least: the key must lie in there.
const SEEN_MIN: usize = 1100;

/// A version of the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// What each connection begins with.
    #[default]
    Two,
    /// What a client has asked for with `HELLO 3`.
    Three,
}

impl Version {
    /// The first byte of a request between framers.
    const fn mark(self) -> u8 {
        match self {
            Self::Two => ARRAY,
            Self::Three => PUSH,
        }
    }

    /// What a server is told so that it speaks this version.
    pub(crate) const fn greeting(self) -> &'static [u8] {
        match self {
            Self::Two => b"*2\r\n$5\r\nHELLO\r\n$1\r\n2\r\n",
            Self::Three => b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n",
        }
    }
}

/// A request between framers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Carried<'a> {
    /// The key that stands in front.
    key: Option<&'a [u8]>,
    /// Of the answer.
    pub(crate) version: Version,
    /// The array behind its first byte.
    array: &'a [u8],
}

impl<'a> Carried<'a> {
    /// Reads a request between framers, of which the beginning is enough. None: it is none.
    pub(crate) fn read(request: &'a [u8]) -> Option<Self> {
        let (key, request) = match request.split_first()? {
            (&KEY_IN_FRONT, rest) => {
                let (len, rest) = number_line(rest)?;
                let (key, rest) = rest.split_at_checked(usize::try_from(len).ok()?)?;
                (Some(key), rest.strip_prefix(b"\r\n")?)
            }
            _ => (None, request),
        };
        let (first, array) = request.split_first()?;
        let version = [Version::Two, Version::Three].into_iter().find(|version| version.mark() == *first)?;
        Some(Self { key, version, array })
    }

    /// Appends what the server is told.
    pub(crate) fn tell(&self, out: &mut Vec<u8>) {
        out.push(ARRAY);
        out.extend_from_slice(self.array);
    }

    /// How many arguments there are, and those of them that are there whole.
    fn args(&self) -> Option<(usize, Vec<&'a [u8]>)> {
        let (count, mut rest) = number_line(self.array)?;
        let count = usize::try_from(count).ok()?;
        let mut args = Vec::new();
        while args.len() < count {
            let Some((len, behind)) = rest.strip_prefix(b"$").and_then(number_line) else { break };
            let Some((arg, behind)) = usize::try_from(len).ok().and_then(|len| behind.split_at_checked(len)) else {
                break;
            };
            args.push(arg);
            rest = behind.strip_prefix(b"\r\n").unwrap_or_default();
        }
        Some((count, args))
    }
}

/// A number and the end of its line, and what comes behind.
fn number_line(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let end = bytes.iter().take(NUMBER_LINE_MAX).position(|byte| *byte == b'\n')?;
    Some((number(bytes[..end].strip_suffix(b"\r")?)?, &bytes[end + 1..]))
}

/// Longest line with a number: more digits than any has.
const NUMBER_LINE_MAX: usize = 32;

fn number(text: &[u8]) -> Option<i64> {
    // The standard library would take a plus, which no program writes.
    std::str::from_utf8(text).ok().filter(|text| !text.starts_with('+'))?.parse().ok()
}

/// What a key is placed by: what lies between its first `{` and the next `}`, if that is anything, as Redis Cluster has
/// it; otherwise all of it.
fn place_of(key: &[u8]) -> &[u8] {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let behind = &key[open + 1..];
        let close = behind.iter().position(|byte| *byte == b'}')?;
        Some(&behind[..close])
    });
    tag.filter(|tag| !tag.is_empty()).unwrap_or(key)
}

/// What a request between framers is placed by; none in one that any server can answer.
pub(super) fn key_of(request: &[u8]) -> Option<&[u8]> {
    let carried = Carried::read(request)?;
    if carried.key.is_some() {
        return carried.key;
    }
    let (count, args) = carried.args()?;
    let first = match command::find(&args)?.what {
        // Of two keys that are placed by the same, the first one will do.
        What::Keys(Keys::FirstAndCounted | Keys::Stored { .. } | Keys::Sorted) | What::Each { .. } => {
            args.get(1).copied()?
        }
        What::Keys(keys) => *command::keys_of(keys, &args, count)?.first()?,
        What::Any | What::Own(_) | What::Subcommand | What::Refused(_) => return None,
    };
    Some(place_of(first))
}

/// Whether a request between framers may be repeated.
pub(super) fn is_safe(request: &[u8]) -> bool {
    let args = Carried::read(request).and_then(|carried| carried.args());
    args.and_then(|(_, args)| command::find(&args)).is_some_and(|command| command.is_safe)
}

/// The words of a request between framers, as far as they are there.
pub(super) fn words_of(request: &[u8]) -> Vec<u8> {
    let args = Carried::read(request).and_then(|carried| carried.args());
    args.map(|(_, args)| args.join(&b' ')).unwrap_or_default()
}

/// Reads a request between framers as a client's.
pub(super) fn step_of_request(request: &[u8]) -> Step {
    let Some(carried) = Carried::read(request) else { return Step::More(None) };
    let mut told = Vec::with_capacity(carried.array.len() + 1);
    carried.tell(&mut told);
    match Reader::of(carried.version).step(&told) {
        // There is something behind it.
        Step::Taken(len, _) if len != told.len() => Step::More(None),
        step => step,
    }
}

/// An error of a kind that Redis has itself.
fn error(text: &str) -> Vec<u8> {
    format!("-{text}\r\n").into_bytes()
}

/// The same of the usual kind.
fn plain_error(text: &str) -> Vec<u8> {
    Protocol::Resp.error(text)
}

#[cfg(test)]
mod test;
