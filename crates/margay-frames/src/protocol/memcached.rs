//! memcached's protocols as framers need them: where a request ends, which keys it is about, whether it may be
//! repeated, and where an answer ends. Here is the text protocol, with its meta commands; [`binary`] has the other one.
//! The first byte of a client, or of a request, says which of the two it is.

pub mod binary;

use margay_memcached::request::{VALUE_MAX, is_key, number};

use super::{Asked, Join, LINE_MAX, NoAnswer, Part, Shape, Step};

/// The letters of `mg` that change something.
const MG_CHANGES: &[u8] = b"NRTE";

/// Which answers a client does not want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quiet {
    /// It wants any.
    No,
    /// It wants none (`noreply`).
    All,
    /// It does not want those that begin with one of these words (`q` of meta commands).
    These(&'static [&'static str]),
}

impl Quiet {
    /// Whether an answer is kept from the client.
    pub fn hides(self, answer: &[u8]) -> bool {
        match self {
            Self::No => false,
            Self::All => true,
            Self::These(words) => words.iter().any(|word| answer.starts_with(word.as_bytes())),
        }
    }
}

/// Which of the two protocols a client speaks: its first byte says so, as memcached itself has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reader {
    /// It has said nothing.
    #[default]
    New,
    /// The text protocol.
    Text,
    /// The binary protocol.
    Binary,
}

impl Reader {
    /// Reads a request from the beginning of what a client has sent since the last one.
    pub fn step(&mut self, bytes: &[u8]) -> Step {
        if *self == Self::New && !bytes.is_empty() {
            *self = if binary::is_binary(bytes) { Self::Binary } else { Self::Text };
        }
        match self {
            Self::New => Step::More(None),
            Self::Text => step_of_text(bytes),
            Self::Binary => binary::step(bytes),
        }
    }
}

/// Reads a request that stands alone.
pub(super) fn step(bytes: &[u8]) -> Step {
    Reader::default().step(bytes)
}

fn step_of_text(bytes: &[u8]) -> Step {
    let Some(end) = bytes.iter().take(LINE_MAX).position(|byte| *byte == b'\n') else {
        let answer = b"CLIENT_ERROR line too long\r\n".to_vec();
        return if bytes.len() < LINE_MAX { Step::More(None) } else { Step::Taken(LINE_MAX, Asked::Last(answer)) };
    };
    let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty()).collect();
    let Some((verb, rest)) = words.split_first() else { return error(end + 1, "ERROR") };
    match *verb {
        b"get" | b"gets" => values(end + 1, verb, rest),
        b"gat" | b"gats" if rest.len() >= 2 => values(end + 1, &[verb, &b" "[..], rest[0]].concat(), &rest[1..]),
        b"set" | b"add" | b"replace" | b"append" | b"prepend" => storage(bytes, end + 1, verb, rest, 3),
        b"cas" => storage(bytes, end + 1, verb, rest, 4),
        b"delete" => plain(end + 1, verb, rest, 0),
        b"incr" | b"decr" | b"touch" => plain(end + 1, verb, rest, 1),
        b"mg" | b"ms" | b"md" | b"ma" | b"me" => meta(bytes, end + 1, verb, rest),
        b"mn" => Step::Taken(end + 1, Asked::Answer(b"MN\r\n".to_vec())),
        b"version" => servers(end + 1, vec![Part { bytes: b"version\r\n".to_vec(), is_safe: true }], Quiet::No),
        b"verbosity" => {
            let answer = if rest.last() == Some(&&b"noreply"[..]) { Vec::new() } else { b"OK\r\n".to_vec() };
            Step::Taken(end + 1, Asked::Answer(answer))
        }
        b"quit" => Step::Taken(end + 1, Asked::Last(Vec::new())),
        b"gat" | b"gats" => error(end + 1, "ERROR"),
        verb => {
            let shown: String = String::from_utf8_lossy(verb).chars().filter(|c| !c.is_control()).take(40).collect();
            let text =
                format!("CLIENT_ERROR {shown} is not supported by an ensemble: it concerns no key; ask a server");
            error(end + 1, &text)
        }
    }
}

fn servers(len: usize, parts: Vec<Part>, quiet: Quiet) -> Step {
    Step::Taken(len, Asked::Servers { parts, join: Join::Values(quiet) })
}

fn error(len: usize, text: &str) -> Step {
    Step::Taken(len, Asked::Answer(format!("{text}\r\n").into_bytes()))
}

fn bad_format(len: usize) -> Step {
    error(len, "CLIENT_ERROR bad command line format")
}

fn values(len: usize, head: &[u8], keys: &[&[u8]]) -> Step {
    if keys.is_empty() {
        return error(len, "ERROR");
    }
    if !keys.iter().all(|key| is_key(key)) {
        return bad_format(len);
    }
    let is_safe = head.starts_with(b"get");
    let part = |key: &&[u8]| Part { bytes: [head, &b" "[..], key, &b"\r\n"[..]].concat(), is_safe };
    servers(len, keys.iter().map(part).collect(), Quiet::No)
}

/// Without `noreply`, if it is the last word, and whether it was.
fn without_noreply<'a, 'b>(words: &'a [&'b [u8]]) -> (&'a [&'b [u8]], Quiet) {
    match words.split_last() {
        Some((last, others)) if *last == b"noreply" => (others, Quiet::All),
        _ => (words, Quiet::No),
    }
}

fn line_of(verb: &[u8], words: &[&[u8]]) -> Vec<u8> {
    let mut line = verb.to_vec();
    for word in words {
        line.push(b' ');
        line.extend_from_slice(word);
    }
    line.extend_from_slice(b"\r\n");
    line
}

fn plain(len: usize, verb: &[u8], words: &[&[u8]], count: usize) -> Step {
    let (words, quiet) = without_noreply(words);
    // `delete KEY 0` is of old clients.
    let words = if verb == b"delete" && words.get(1..) == Some(&[&b"0"[..]]) { &words[..1] } else { words };
    match words.first() {
        None => error(len, "ERROR"),
        Some(key) if is_key(key) && words.len() == count + 1 => {
            servers(len, vec![Part { bytes: line_of(verb, words), is_safe: false }], quiet)
        }
        Some(_) => bad_format(len),
    }
}

fn storage(bytes: &[u8], line_len: usize, verb: &[u8], words: &[&[u8]], count: usize) -> Step {
    let (words, quiet) = without_noreply(words);
    let Some(key) = words.first() else { return error(line_len, "ERROR") };
    let value_len = words.get(3).and_then(|word| number(word));
    match value_len {
        Some(value_len) if is_key(key) && words.len() == count + 1 => {
            with_value(bytes, line_len, line_of(verb, words), value_len, quiet)
        }
        _ => bad_format(line_len),
    }
}

fn with_value(bytes: &[u8], line_len: usize, mut message: Vec<u8>, value_len: usize, quiet: Quiet) -> Step {
    // Whatever the client says: what it calls a value is never read as its next request.
    let whole = line_len.saturating_add(value_len).saturating_add(2);
    if value_len > VALUE_MAX {
        return error(whole, "SERVER_ERROR object too large for cache");
    }
    let Some(value) = bytes.get(line_len..whole) else { return Step::More(Some(whole)) };
    if !value.ends_with(b"\r\n") {
        // Where the next request begins is not known any more.
        return Step::Taken(whole, Asked::Last(b"CLIENT_ERROR bad data chunk\r\n".to_vec()));
    }
    message.extend_from_slice(value);
    servers(whole, vec![Part { bytes: message, is_safe: false }], quiet)
}

fn meta(bytes: &[u8], line_len: usize, verb: &[u8], words: &[&[u8]]) -> Step {
    let Some((key, rest)) = words.split_first() else { return error(line_len, "ERROR") };
    if !is_key(key) {
        return bad_format(line_len);
    }
    let is_store = verb == b"ms";
    let flags = if is_store { rest.get(1..).unwrap_or_default() } else { rest };
    if flags.contains(&&b"b"[..]) {
        return error(line_len, "CLIENT_ERROR keys in base64 are not supported by an ensemble");
    }
    let hidden: &'static [&'static str] = match verb {
        b"mg" => &["EN"],
        b"md" => &["HD", "NF"],
        b"ma" => &["HD", "NF", "VA"],
        _ => &["HD"],
    };
    // Nobody would know when the answer is over that does not come.
    let is_quiet = flags.contains(&&b"q"[..]);
    let quiet = if is_quiet { Quiet::These(hidden) } else { Quiet::No };
    let kept: Vec<&[u8]> = words.iter().copied().filter(|word| *word != b"q" || *word == *key).collect();
    let line = line_of(verb, &kept);
    if is_store {
        return match rest.first().and_then(|word| number(word)) {
            Some(value_len) => with_value(bytes, line_len, line, value_len, quiet),
            None => bad_format(line_len),
        };
    }
    let is_safe = is_safe(&line);
    servers(line_len, vec![Part { bytes: line, is_safe }], quiet)
}

/// Whether both requests are of the same of the two protocols.
pub(super) fn is_mixable(one: &[u8], other: &[u8]) -> bool {
    binary::is_binary(one) == binary::is_binary(other)
}

/// A request as people would write it, as far as it is there.
pub(super) fn shown(request: &[u8]) -> Vec<u8> {
    if binary::is_binary(request) { binary::shown(request) } else { request.to_vec() }
}

fn words_of(request: &[u8]) -> (impl Iterator<Item = &[u8]>, bool) {
    let end = request.iter().position(|byte| *byte == b'\r' || *byte == b'\n');
    let line = &request[..end.unwrap_or(request.len())];
    (line.split(|byte| *byte == b' ').filter(|word| !word.is_empty()), end.is_some())
}

/// The key of a request for servers, of which the beginning is enough; none in one that any server can answer.
pub fn key_of(request: &[u8]) -> Option<&[u8]> {
    if binary::is_binary(request) {
        return binary::key_of(request);
    }
    let (mut words, _) = words_of(request);
    match words.next()? {
        b"version" => None,
        b"gat" | b"gats" => words.nth(1),
        _ => words.next(),
    }
}

/// Whether a request for servers may be repeated, where nobody knows whether it was done: it changes nothing.
pub fn is_safe(request: &[u8]) -> bool {
    if binary::is_binary(request) {
        return binary::is_safe(request);
    }
    let (mut words, is_whole) = words_of(request);
    match words.next() {
        Some(b"get" | b"gets" | b"version" | b"me") => true,
        Some(b"mg") => {
            let changes = |flag: &[u8]| flag.first().is_some_and(|letter| MG_CHANGES.contains(letter));
            is_whole && !words.skip(1).any(changes)
        }
        _ => false,
    }
}

/// How the answer to a request ends.
pub fn shape_of(request: &[u8]) -> Shape {
    if binary::is_binary(request) {
        return Shape::Packet;
    }
    match words_of(request).0.next() {
        Some(b"get" | b"gets" | b"gat" | b"gats") => Shape::Values,
        Some(b"mg" | b"ma" | b"ms" | b"md") => Shape::Meta,
        _ => Shape::Line,
    }
}

/// What a line of an answer says: how many lines are to come, and how long the value is that follows.
pub(super) fn line_of_answer(line: &[u8], shape: Shape) -> Result<(usize, Option<usize>), NoAnswer> {
    let mut words = line.split(|byte| *byte == b' ');
    let (left, length) = match (shape, words.next()) {
        (Shape::Values, Some(b"VALUE")) => (1, words.nth(2)),
        (Shape::Meta, Some(b"VA")) => (0, words.next()),
        _ => return Ok((0, None)),
    };
    Ok((left, Some(length.and_then(number).ok_or(NoAnswer)?)))
}

/// Puts the answers to the parts of a request together: values, and one `END`. An error is the answer to all.
pub fn join(answers: &[Vec<u8>]) -> Vec<u8> {
    if let [only] = answers {
        return only.clone();
    }
    let mut whole = Vec::new();
    for answer in answers {
        match answer.strip_suffix(b"END\r\n") {
            Some(values) => whole.extend_from_slice(values),
            None => return answer.clone(),
        }
    }
    whole.extend_from_slice(b"END\r\n");
    whole
}

#[cfg(test)]
mod test {
    use super::super::{Progress, answer_len};
    use super::*;

    fn asked(bytes: &str) -> (Vec<(String, bool)>, Quiet) {
        match step(bytes.as_bytes()) {
            Step::Taken(len, Asked::Servers { parts, join: Join::Values(quiet) }) => {
                assert_eq!(len, bytes.len(), "{bytes}");
                let text = |part: Part| (String::from_utf8(part.bytes).expect("ASCII"), part.is_safe);
                (parts.into_iter().map(text).collect(), quiet)
            }
            other => panic!("{bytes}: {other:?}"),
        }
    }

    fn refused(bytes: &str) -> String {
        match step(bytes.as_bytes()) {
            Step::Taken(_, Asked::Answer(answer) | Asked::Last(answer)) => {
                String::from_utf8_lossy(&answer).into_owned()
            }
            other => panic!("{bytes}: {other:?}"),
        }
    }

    #[test]
    fn each_request_becomes_what_servers_are_asked() {
        for (line, told, is_safe, quiet) in [
            ("set a 1 2 3\r\nabc\r\n", "set a 1 2 3\r\nabc\r\n", false, Quiet::No),
            ("set a 1 2 3 noreply\r\nabc\r\n", "set a 1 2 3\r\nabc\r\n", false, Quiet::All),
            ("cas a 1 2 0 9\r\n\r\n", "cas a 1 2 0 9\r\n\r\n", false, Quiet::No),
            ("get a\n", "get a\r\n", true, Quiet::No),
            ("get \x10\ta\r\n", "get \x10\ta\r\n", true, Quiet::No),
            ("gat 60 a\r\n", "gat 60 a\r\n", false, Quiet::No),
            ("delete a 0 noreply\r\n", "delete a\r\n", false, Quiet::All),
            ("incr  a 5\r\n", "incr a 5\r\n", false, Quiet::No),
            ("version\r\n", "version\r\n", true, Quiet::No),
            ("mg a v t\r\n", "mg a v t\r\n", true, Quiet::No),
            ("mg a v q\r\n", "mg a v\r\n", true, Quiet::These(&["EN"])),
            ("mg q v\r\n", "mg q v\r\n", true, Quiet::No),
            ("mg a v N30\r\n", "mg a v N30\r\n", false, Quiet::No),
            ("ms a 2 T0 q\r\nhi\r\n", "ms a 2 T0\r\nhi\r\n", false, Quiet::These(&["HD"])),
            ("md a q\r\n", "md a\r\n", false, Quiet::These(&["HD", "NF"])),
        ] {
            let (parts, found) = asked(line);
            assert_eq!(parts, [(told.to_owned(), is_safe)], "{line}");
            assert_eq!(found, quiet, "{line}");
            assert_eq!(super::is_safe(told.as_bytes()), is_safe, "{line}");
        }
    }

    #[test]
    fn a_get_of_many_keys_is_many_requests() {
        let (parts, _) = asked("gets a b c\r\n");
        assert_eq!(parts.len(), 3);
        assert_eq!(parts[1], ("gets b\r\n".to_owned(), true));
        let (parts, _) = asked("gat 9 a b\r\n");
        assert_eq!(parts[1], ("gat 9 b\r\n".to_owned(), false));
    }

    #[test]
    fn what_is_not_whole_waits() {
        assert_eq!(step(b""), Step::More(None));
        assert_eq!(step(b"get a"), Step::More(None));
        assert_eq!(step(b"set a 0 0 5\r\nhel"), Step::More(Some(20)));
        let mut reader = Reader::default();
        assert_eq!((reader.step(b""), reader), (Step::More(None), Reader::New));
    }

    #[test]
    fn what_cannot_be_is_answered() {
        for (line, answer) in [
            ("\r\n", "ERROR"),
            ("get\r\n", "ERROR"),
            ("gat 5\r\n", "ERROR"),
            ("set a 1 2\r\n", "CLIENT_ERROR bad"),
            ("set a 1 2 3\r\nabcdefg", "CLIENT_ERROR bad data"),
            ("get a\rb\r\n", "CLIENT_ERROR bad"),
            ("flush_all\r\n", "CLIENT_ERROR flush_all is not supported"),
            ("mg YQ== b v\r\n", "CLIENT_ERROR keys in base64"),
            ("ms a x\r\n", "CLIENT_ERROR bad"),
            ("mn\r\n", "MN\r\n"),
            ("verbosity 1\r\n", "OK\r\n"),
            ("quit\r\n", ""),
        ] {
            assert!(refused(line).starts_with(answer), "{line}: {}", refused(line));
        }
        let line = "set a 0 0 18446744073709551615\r\n";
        assert!(matches!(step(line.as_bytes()), Step::Taken(usize::MAX, Asked::Answer(_))));
        assert!(refused(&"x".repeat(LINE_MAX)).starts_with("CLIENT_ERROR line too long"));
    }

    #[test]
    fn the_key_is_known_from_the_beginning() {
        for (request, key) in [("set k 0 0 9000\r\nxy", Some("k")), ("gat 5 k\r\n", Some("k")), ("version\r\n", None)] {
            assert_eq!(key_of(request.as_bytes()), key.map(str::as_bytes), "{request}");
        }
        assert!(!is_safe(b"mg k v v v"), "flags may follow");
    }

    #[test]
    fn answers_end_where_their_shape_says() {
        let whole = b"VALUE a 0 5\r\n\r\nEND\r\nVALUE b 0 2\r\nhi\r\nEND\r\nrest";
        let mut progress = Progress::default();
        for cut in 0..whole.len() - 4 {
            assert_eq!(answer_len(&whole[..cut], Shape::Values, &mut progress), Ok(None), "{cut}");
        }
        assert_eq!(answer_len(whole, Shape::Values, &mut progress), Ok(Some(whole.len() - 4)));
        let len = |bytes: &[u8], shape| answer_len(bytes, shape, &mut Progress::default());
        assert_eq!(len(b"SERVER_ERROR no\r\nx", Shape::Values), Ok(Some(17)));
        assert_eq!(len(b"VA 2 t5\r\nhi\r\nHD\r\n", Shape::Meta), Ok(Some(13)));
        let mut progress = Progress::default();
        assert_eq!(answer_len(b"VA 9000 t5\r\nhi", Shape::Meta, &mut progress), Ok(None));
        assert_eq!(progress.from, 9014, "where the value ends");
        assert_eq!(len(b"HD\r\nHD\r\n", Shape::Meta), Ok(Some(4)));
        assert_eq!(len(b"VALUE a\r\n", Shape::Line), Ok(Some(9)));
        assert_eq!(len(b"VALUE a 0 18446744073709551615\r\n", Shape::Values), Err(NoAnswer));
        assert_eq!(len(b"VALUE a\r\n", Shape::Values), Err(NoAnswer));
        assert_eq!(len(b"no end\n", Shape::Line), Err(NoAnswer));
    }

    #[test]
    fn parts_are_put_together() {
        let a = b"VALUE a 0 1\r\nx\r\nEND\r\n".to_vec();
        let b = b"END\r\n".to_vec();
        assert_eq!(join(&[a.clone(), b.clone()]), a);
        assert_eq!(join(&[a.clone(), b"SERVER_ERROR no\r\n".to_vec(), b]), b"SERVER_ERROR no\r\n");
        assert_eq!(join(std::slice::from_ref(&a)), a);
    }
}
