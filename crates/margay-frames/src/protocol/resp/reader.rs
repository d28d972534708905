//! What a client of Redis says, cut into commands as it comes: arrays of bulk strings, and lines as people type them.

use std::ops::Range;

use super::{NUMBER_LINE_MAX, Version, asked, error, number_line};
use crate::protocol::{Asked, LINE_MAX, MESSAGE_MAX, Step};

/// Longest string that Redis takes, in bytes: of a longer one nobody looks for the end.
const STRING_MAX: i64 = 512 << 20;
/// Most arguments that Redis takes.
const ARGS_MAX: i64 = 1 << 20;
/// Most arguments that an ensemble carries.
const ARGS_CARRIED_MAX: usize = 1 << 16;

/// A client's requests.
#[derive(Clone, Debug, Default)]
pub struct Reader {
    version: Version,
    /// A greeting that was not answered yet.
    greeting: Option<Version>,
    /// Arguments of the array that is being read: where they are, from its beginning.
    args: Vec<Range<usize>>,
    /// So many are still to come; none: no array is being read.
    missing: Option<usize>,
    /// Where the next one begins.
    at: usize,
    /// The array is refused, and the rest of it passed over.
    is_refused: bool,
}

/// What a line with a length has said.
enum Length {
    Is(i64, usize),
    /// It is not there yet.
    Missing,
    /// It is none.
    Bad,
}

impl Reader {
    /// Of a client that speaks a version.
    pub(super) fn of(version: Version) -> Self {
        Self { version, ..Self::default() }
    }

    /// Whether no request may be read before a greeting has been answered.
    pub fn is_waiting(&self) -> bool {
        self.greeting.is_some()
    }

    /// A greeting was answered: the client speaks another version, or it does not.
    pub fn greeted(&mut self, is_taken: bool) {
        if let Some(version) = self.greeting.take().filter(|_| is_taken) {
            self.version = version;
        }
    }

    /// Reads a request from the beginning of what a client has sent since the last one.
    pub fn step(&mut self, bytes: &[u8]) -> Step {
        match (self.missing, bytes.first()) {
            (_, None) => Step::More(None),
            (Some(_), _) if self.is_refused => self.pass(bytes),
            (Some(_), _) => self.array(bytes),
            (None, Some(b'*')) => self.begin(bytes),
            (None, Some(_)) => self.line(bytes),
        }
    }

    fn begin(&mut self, bytes: &[u8]) -> Step {
        match length(bytes, 1) {
            Length::Missing => Step::More(None),
            Length::Is(count, len) if count <= 0 => Step::Passed(len),
            Length::Is(count, len) if count <= ARGS_MAX => {
                self.args.clear();
                (self.missing, self.at) = (usize::try_from(count).ok(), len);
                self.array(bytes)
            }
            Length::Is(..) | Length::Bad => last("invalid multibulk length"),
        }
    }

    /// Reads arguments as far as they are there.
    fn array(&mut self, bytes: &[u8]) -> Step {
        while let Some(missing) = self.missing.filter(|missing| *missing > 0) {
            let Some(first) = bytes.get(self.at) else { return Step::More(Some(self.at + 1)) };
            if *first != b'$' {
                return no_string(*first);
            }
            let (len, begin) = match length(&bytes[self.at..], 1) {
                Length::Missing => return Step::More(None),
                Length::Is(len, behind) if (0..=STRING_MAX).contains(&len) => (len, self.at + behind),
                Length::Is(..) | Length::Bad => return last("invalid bulk length"),
            };
            // It is 512 MiB at most.
            let end = begin + len as usize;
            if end > MESSAGE_MAX || self.args.len() >= ARGS_CARRIED_MAX {
                return self.refuse();
            }
            let Some(behind) = bytes.get(end..end + 2) else { return Step::More(Some(end + 2)) };
            if behind != b"\r\n" {
                return last("a string does not end where its length says");
            }
            self.args.push(begin..end);
            (self.missing, self.at) = (Some(missing - 1), end + 2);
        }
        self.missing = None;
        let args: Vec<&[u8]> = self.args.drain(..).map(|place| &bytes[place]).collect();
        let len = self.at;
        Step::Taken(len, self.take(&args))
    }

    fn take(&mut self, args: &[&[u8]]) -> Asked {
        let asked::Said { asked, version, greeting } = asked::ask(args, self.version);
        (self.version, self.greeting) = (version, greeting);
        asked
    }

    /// The rest of the array is passed over.
    fn refuse(&mut self) -> Step {
        let why = format!(
            "the request is larger than an ensemble carries: {MESSAGE_MAX} bytes and {ARGS_CARRIED_MAX} arguments"
        );
        self.is_refused = true;
        self.args.clear();
        let len = std::mem::take(&mut self.at);
        Step::Taken(len, Asked::Answer(super::plain_error(&why)))
    }

    fn pass(&mut self, bytes: &[u8]) -> Step {
        let mut at = 0;
        while let Some(missing) = self.missing.filter(|missing| *missing > 0) {
            let Some(first) = bytes.get(at) else { return Step::Passed(at) };
            if *first != b'$' {
                return no_string(*first);
            }
            match length(&bytes[at..], 1) {
                Length::Missing if at > 0 => return Step::Passed(at),
                Length::Missing => return Step::More(None),
                // It is 512 MiB at most.
                Length::Is(len, behind) if (0..=STRING_MAX).contains(&len) => at += behind + len as usize + 2,
                Length::Is(..) | Length::Bad => return last("invalid bulk length"),
            }
            self.missing = Some(missing - 1);
        }
        (self.missing, self.is_refused) = (None, false);
        Step::Passed(at)
    }

    /// Reads a line of words.
    fn line(&mut self, bytes: &[u8]) -> Step {
        let Some(end) = bytes.iter().take(LINE_MAX).position(|byte| *byte == b'\n') else {
            return if bytes.len() < LINE_MAX { Step::More(None) } else { last("too big inline request") };
        };
        let Some(words) = words_of(&bytes[..end]) else { return last("unbalanced quotes in request") };
        if words.is_empty() {
            return Step::Passed(end + 1);
        }
        let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
        Step::Taken(end + 1, self.take(&words))
    }
}

/// A number behind the first byte, and how long all of its line is.
fn length(bytes: &[u8], from: usize) -> Length {
    match number_line(&bytes[from..]) {
        Some((number, rest)) => Length::Is(number, bytes.len() - rest.len()),
        None if bytes.len() - from < NUMBER_LINE_MAX && !bytes[from..].contains(&b'\n') => Length::Missing,
        None => Length::Bad,
    }
}

/// A client that is not understood is told so, as Redis does, and the connection ends.
fn last(why: &str) -> Step {
    Step::Taken(0, Asked::Last(error(&format!("ERR Protocol error: {why}"))))
}

fn no_string(first: u8) -> Step {
    let shown = if first.is_ascii_graphic() { char::from(first) } else { '?' };
    last(&format!("expected '$', got '{shown}'"))
}

/// The words of a line, as Redis reads what people type: with quotes, and with escapes in double ones. None: a quote
/// does not end, or something is behind it.
fn words_of(line: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut words = Vec::new();
    let mut rest = line.trim_ascii_start();
    while let Some(first) = rest.first() {
        let mut word = Vec::new();
        rest = match first {
            b'"' => double_quoted(&rest[1..], &mut word)?,
            b'\'' => single_quoted(&rest[1..], &mut word)?,
            _ => bare(rest, &mut word)?,
        };
        words.push(word);
        rest = rest.trim_ascii_start();
    }
    Some(words)
}

fn bare<'a>(mut rest: &'a [u8], word: &mut Vec<u8>) -> Option<&'a [u8]> {
    while let Some((byte, behind)) = rest.split_first() {
        match byte {
            byte if byte.is_ascii_whitespace() => break,
            b'"' => return double_quoted(behind, word),
            b'\'' => return single_quoted(behind, word),
            _ => word.push(*byte),
        }
        rest = behind;
    }
    Some(rest)
}

/// Behind the end of a quote there is a space, or nothing.
fn behind_quote(rest: &[u8]) -> Option<&[u8]> {
    rest.first().is_none_or(u8::is_ascii_whitespace).then_some(rest)
}

fn double_quoted<'a>(mut rest: &'a [u8], word: &mut Vec<u8>) -> Option<&'a [u8]> {
    loop {
        let (byte, behind) = rest.split_first()?;
        match byte {
            b'"' => return behind_quote(behind),
            b'\\' => rest = escaped(behind, word)?,
            _ => {
                word.push(*byte);
                rest = behind;
            }
        }
    }
}

fn escaped<'a>(rest: &'a [u8], word: &mut Vec<u8>) -> Option<&'a [u8]> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    if let [b'x', high, low, behind @ ..] = rest
        && let Some(high) = digit(high)
        && let Some(low) = digit(low)
    {
        // Two digits are less than 256.
        word.push((high * 16 + low) as u8);
        return Some(behind);
    }
    let (byte, behind) = rest.split_first()?;
    word.push(match byte {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 0x08,
        b'a' => 0x07,
        other => *other,
    });
    Some(behind)
}

fn single_quoted<'a>(mut rest: &'a [u8], word: &mut Vec<u8>) -> Option<&'a [u8]> {
    loop {
        rest = match rest {
            [b'\'', behind @ ..] => return behind_quote(behind),
            [b'\\', b'\'', behind @ ..] => {
                word.push(b'\'');
                behind
            }
            [byte, behind @ ..] => {
                word.push(*byte);
                behind
            }
            [] => return None,
        };
    }
}
