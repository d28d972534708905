//! What memcached clients say: the lines of the ASCII protocol (`doc/protocol.txt` of memcached).

/// Longest key, in bytes.
pub const KEY_MAX: usize = 250;
/// Largest value, in bytes: more than any server takes unless it is told to.
pub const VALUE_MAX: usize = 8 << 20;

/// A line that was understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// `get` or `gets`, of keys in any number of partitions.
    Get {
        /// Which of the two.
        verb: &'static str,
        /// The keys.
        keys: Vec<Vec<u8>>,
    },
    /// About one key.
    One(One),
    /// What this is.
    Version,
    /// How much to log: taken, and nothing follows.
    Verbosity {
        /// No answer is wanted.
        quiet: bool,
    },
    /// The client goes.
    Quit,
    /// The answer to what was not understood.
    Bad(String),
    /// The same of a value that is too large: so many bytes follow, and are passed over.
    TooLarge(usize),
}

/// A request about one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct One {
    /// The key.
    pub key: Vec<u8>,
    /// What the server is told, without the end of the line; it always answers, so that its answers stay in step.
    pub line: Vec<u8>,
    /// Bytes of the value that follow.
    pub value: Option<usize>,
    /// The client wants no answer.
    pub quiet: bool,
    /// Done twice it is as done once, and its second answer says the same.
    pub repeatable: bool,
}

/// A verb about one key: how many words follow the key, which of them is the value's length, and whether it may be
/// repeated.
const VERBS: [(&str, usize, Option<usize>, bool); 10] = [
    ("set", 3, Some(2), true),
    ("replace", 3, Some(2), true),
    ("add", 3, Some(2), false),
    ("append", 3, Some(2), false),
    ("prepend", 3, Some(2), false),
    ("cas", 4, Some(2), false),
    ("delete", 0, None, false),
    ("incr", 1, None, false),
    ("decr", 1, None, false),
    ("touch", 1, None, true),
];

impl Request {
    /// Reads a line, without its end.
    pub fn parse(line: &[u8]) -> Self {
        let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty()).collect();
        let Some((verb, rest)) = words.split_first() else { return Self::Bad("ERROR".to_owned()) };
        match *verb {
            b"get" | b"gets" => {
                let verb = if *verb == b"get" { "get" } else { "gets" };
                match rest.iter().find(|key| !is_key(key)) {
                    None if rest.is_empty() => Self::Bad("ERROR".to_owned()),
                    None => Self::Get { verb, keys: rest.iter().map(|key| key.to_vec()).collect() },
                    Some(_) => bad_format(),
                }
            }
            b"version" => Self::Version,
            b"verbosity" => Self::Verbosity { quiet: rest.last() == Some(&&b"noreply"[..]) },
            b"quit" => Self::Quit,
            verb => match VERBS.iter().find(|known| known.0.as_bytes() == verb) {
                Some(known) => one(*known, rest),
                None => {
                    let verb = String::from_utf8_lossy(verb);
                    let shown: String = verb.chars().filter(|letter| !letter.is_control()).take(40).collect();
                    Self::Bad(format!(
                        "CLIENT_ERROR {shown} is not supported by margay-memcached: it concerns no key, or not one; ask a server"
                    ))
                }
            },
        }
    }
}

fn one((verb, count, length_at, repeatable): (&str, usize, Option<usize>, bool), rest: &[&[u8]]) -> Request {
    let Some((key, mut words)) = rest.split_first() else { return Request::Bad("ERROR".to_owned()) };
    let quiet = words.last() == Some(&&b"noreply"[..]);
    if quiet {
        words = &words[..words.len() - 1];
    }
    // `delete KEY 0` is of old clients.
    if verb == "delete" && words == [b"0"] {
        words = &[];
    }
    if !is_key(key) || words.len() != count {
        return bad_format();
    }
    let length = match length_at.map(|at| number(words[at])) {
        None => None,
        Some(Some(length)) if length > VALUE_MAX => return Request::TooLarge(length),
        Some(Some(length)) => Some(length),
        Some(None) => return bad_format(),
    };
    let mut line = verb.as_bytes().to_vec();
    for word in std::iter::once(key).chain(words) {
        line.push(b' ');
        line.extend_from_slice(word);
    }
    Request::One(One { key: key.to_vec(), line, value: length, quiet, repeatable })
}

fn bad_format() -> Request {
    Request::Bad("CLIENT_ERROR bad command line format".to_owned())
}

/// Whether memcached takes it for a key: its documentation forbids control characters, and its server takes them, as
/// memcaslap's keys have them. What ends a line, or a string of C, is none of a key.
pub fn is_key(key: &[u8]) -> bool {
    key.len() <= KEY_MAX && !key.iter().any(|byte| matches!(byte, 0 | b'\r' | b'\n'))
}

/// A decimal number.
pub fn number(text: &[u8]) -> Option<usize> {
    std::str::from_utf8(text).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?.parse().ok()
}

#[cfg(test)]
mod test {
    use super::*;

    fn parsed(line: &str) -> Request {
        Request::parse(line.as_bytes())
    }

    #[test]
    fn requests_about_one_key_are_passed_on_without_noreply() {
        for (line, to_server, value, quiet, repeatable) in [
            ("set a 1 2 3", "set a 1 2 3", Some(3), false, true),
            ("add a 1 2 0 noreply", "add a 1 2 0", Some(0), true, false),
            ("cas a 1 2 3 99", "cas a 1 2 3 99", Some(3), false, false),
            ("delete a 0 noreply", "delete a", None, true, false),
            ("incr a 5", "incr a 5", None, false, false),
            ("touch  a  60", "touch a 60", None, false, true),
        ] {
            let (key, line_out) = (b"a".to_vec(), to_server.as_bytes().to_vec());
            assert_eq!(parsed(line), Request::One(One { key, line: line_out, value, quiet, repeatable }), "{line}");
        }
        assert_eq!(parsed("gets a b"), Request::Get { verb: "gets", keys: vec![b"a".to_vec(), b"b".to_vec()] });
    }

    #[test]
    fn what_cannot_be_is_answered() {
        let long = format!("get {}", "k".repeat(KEY_MAX + 1));
        for (line, answer) in [
            ("", "ERROR"),
            ("get", "ERROR"),
            ("set", "ERROR"),
            ("set a 1 2", "CLIENT_ERROR bad"),
            ("set a 1 2 -3", "CLIENT_ERROR bad"),
            ("set a 1 2 3 4 5", "CLIENT_ERROR bad"),
            ("get a\0b", "CLIENT_ERROR bad"),
            ("stats items", "CLIENT_ERROR stats is not supported"),
            (long.as_str(), "CLIENT_ERROR bad"),
        ] {
            assert!(matches!(parsed(line), Request::Bad(text) if text.starts_with(answer)), "{line}");
        }
        assert_eq!(parsed("set a 0 0 999999999"), Request::TooLarge(999_999_999));
        assert_eq!(parsed("verbosity 1 noreply"), Request::Verbosity { quiet: true });
    }
}
