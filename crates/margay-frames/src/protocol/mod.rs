//! The protocols of programs, as framers and switches need them: what a client asks, where a request goes, whether it
//! may be repeated, and where an answer ends.
//!
//! A client's framer reads requests ([`Reader`]) and puts answers together ([`Join`]); a switch wants to know the key
//! of a request, and whether another member may get it ([`Protocol`]); a member's framer cuts answers apart
//! ([`Protocol::answer_len`]).

mod content;
pub mod memcached;
pub mod resp;

pub use content::Content;
use margay_memcached::request::VALUE_MAX;

/// Longest line of a program, in bytes: a `get` of memcached with some hundred keys.
pub const LINE_MAX: usize = 64 << 10;
/// Longest request of Redis, and longest answer: with the largest value that clients can give, and what is around it.
pub const MESSAGE_MAX: usize = VALUE_MAX + LINE_MAX;
/// What a program is told in place of an answer that is longer.
pub const TOO_LARGE: &str = "the value is larger than an ensemble carries";

/// A protocol of programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// One of memcached's protocols, text or binary.
    #[default]
    Memcached,
    /// Redis' protocol, version 2 or 3.
    Resp,
}

/// A request that a server is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What the server is told: it always answers.
    pub bytes: Vec<u8>,
    /// Another server may be told the same when nobody knows whether this one has acted on it.
    pub is_safe: bool,
}

/// How the answers to the parts of a request become its answer. An error is the answer to all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// There is one part, and its answer is the request's.
    Only,
    /// Values of memcached, and which answers the client does not want.
    Values(memcached::Quiet),
    /// There is one part, of memcached's binary protocol; its answer is given so.
    Binary(memcached::binary::Answering),
    /// Arrays of one element become one array.
    Array,
    /// Numbers are added.
    Sum,
    /// All are `OK`.
    Okay,
    /// There is one part. Unless its answer is an error, the client speaks another version from then on.
    Greeting,
}

/// What a client has asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Servers know the answer: one for each part.
    Servers {
        /// What they are asked.
        parts: Vec<Part>,
        /// How their answers become one.
        join: Join,
    },
    /// The answer is known.
    Answer(Vec<u8>),
    /// The answer is known, and the connection ends with it.
    Last(Vec<u8>),
}

/// What the bytes of a client begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Not yet a whole request: so many bytes are wanted, if that is known.
    More(Option<usize>),
    /// So many bytes are no request; not all of them need be there yet.
    Passed(usize),
    /// A request of so many bytes, of which not all need be there: what is not is to be passed over.
    Taken(usize, Asked),
}

/// How an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// With its first line.
    Line,
    /// With `END`, after values; or with an error's line.
    Values,
    /// With its first line; after `VA` with the value that the line has the length of.
    Meta,
    /// Where Redis' protocol has it, whatever was asked.
    Message,
    /// Where its header says, as in memcached's binary protocol.
    Packet,
}

/// Bytes of an error that are kept.
const ERROR_SEEN_MAX: usize = 100;

/// The beginning of a text that a program has written.
fn shown(text: &[u8]) -> String {
    let text = &text[..text.len().min(ERROR_SEEN_MAX)];
    String::from_utf8_lossy(text).chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

impl Protocol {
    /// What an answer says, of which the beginning is enough, where it is an error.
    fn error_of(self, answer: &[u8]) -> Option<String> {
        let words: &[&[u8]] = match self {
            Self::Memcached => &[b"SERVER_ERROR", b"CLIENT_ERROR", b"ERROR"],
            Self::Resp => &[b"-"],
        };
        if self == Self::Memcached
            && let Some((status, text)) = memcached::binary::error_of(answer)
        {
            return Some(format!("status {status:#04x}: {}", shown(text)));
        }
        let is_error = words.iter().any(|word| answer.starts_with(word));
        is_error.then(|| shown(answer.split(|byte| *byte == b'\r').next().unwrap_or_default()))
    }
}

/// How far an answer has been looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// So many bytes have been. It lies behind the last byte where the rest of a value has not come.
    pub from: usize,
    /// So many elements are to come behind them; none: nothing is known of the answer yet.
    pub left: Option<usize>,
}

/// An answer is none of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server's answer is none of its protocol")]
pub struct NoAnswer;

impl Protocol {
    /// As HELLO has it.
    pub const fn number(self) -> u8 {
        match self {
            Self::Memcached => 0,
            Self::Resp => 1,
        }
    }

    /// As commands and lists have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memcached => "memcached",
            Self::Resp => "resp",
        }
    }

    /// What programs that speak it are called.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Memcached => "memcached",
            Self::Resp => "Redis",
        }
    }

    /// The port that such programs have unless they are told otherwise.
    pub const fn port(self) -> u16 {
        match self {
            Self::Memcached => 11_211,
            Self::Resp => 6379,
        }
    }

    /// Why an end that speaks this protocol takes no connection with one that names another.
    pub fn refusal_of(self, number: u8) -> String {
        Content::from(self).refusal_of(number)
    }

    /// An error in the program's own words.
    pub fn error(self, text: &str) -> Vec<u8> {
        let word = match self {
            Self::Memcached => "SERVER_ERROR",
            Self::Resp => "-ERR",
        };
        format!("{word} {text}\r\n").into_bytes()
    }

    /// What a request for servers is placed by, of which the beginning is enough; none in one that any server can
    /// answer.
    pub fn key_of(self, request: &[u8]) -> Option<&[u8]> {
        match self {
            Self::Memcached => memcached::key_of(request),
            Self::Resp => resp::key_of(request),
        }
    }

    /// Whether a request for servers may be repeated, where nobody knows whether it was done: it changes nothing.
    pub fn is_safe(self, request: &[u8]) -> bool {
        match self {
            Self::Memcached => memcached::is_safe(request),
            Self::Resp => resp::is_safe(request),
        }
    }

    /// Whether these bytes are one request for servers, which is answered once.
    pub fn is_request(self, bytes: &[u8]) -> bool {
        let step = match self {
            Self::Memcached => memcached::step(bytes),
            Self::Resp => resp::step_of_request(bytes),
        };
        match step {
            Step::Taken(_, Asked::Servers { parts, .. }) => parts.len() == 1 && parts[0].bytes == bytes,
            _ => false,
        }
    }

    /// Whether a server takes both requests on one connection: memcached's protocols cannot be mixed.
    pub(crate) fn is_mixable(self, one: &[u8], other: &[u8]) -> bool {
        match self {
            Self::Memcached => memcached::is_mixable(one, other),
            Self::Resp => true,
        }
    }

    /// A request for servers as people would write it, for lists.
    pub fn shown(self, request: &[u8]) -> Vec<u8> {
        match self {
            Self::Memcached => memcached::shown(request),
            Self::Resp => resp::words_of(request),
        }
    }

    /// How the answer to a request for servers ends.
    pub fn shape_of(self, request: &[u8]) -> Shape {
        match self {
            Self::Memcached => memcached::shape_of(request),
            Self::Resp => Shape::Message,
        }
    }

    /// What a program is asked to see whether it is there.
    pub(crate) const fn question(self) -> &'static [u8] {
        match self {
            Self::Memcached => b"version\r\n",
            Self::Resp => b"PING\r\n",
        }
    }

    /// What the answer to [`question`](Self::question) begins with.
    pub(crate) const fn reply(self) -> &'static str {
        match self {
            Self::Memcached => "VERSION ",
            Self::Resp => "+PONG",
        }
    }
}

/// The length of the answer that these bytes begin with; none as long as it has not come whole. `progress` is how far
/// earlier calls got, and must be kept for the next one.
///
/// # Errors
///
/// [`NoAnswer`].
pub fn answer_len(bytes: &[u8], shape: Shape, progress: &mut Progress) -> Result<Option<usize>, NoAnswer> {
    if shape == Shape::Packet {
        return memcached::binary::answer_len(bytes, progress);
    }
    loop {
        if progress.left == Some(0) {
            return Ok((progress.from <= bytes.len()).then_some(progress.from));
        }
        let Some(rest) = bytes.get(progress.from..) else { return Ok(None) };
        let Some(end) = rest.iter().position(|byte| *byte == b'\n') else {
            return if rest.len() > LINE_MAX { Err(NoAnswer) } else { Ok(None) };
        };
        let line = rest[..end].strip_suffix(b"\r").ok_or(NoAnswer)?;
        let (left, value_len) = match shape {
            Shape::Message => resp::line_of_answer(line, progress.left.unwrap_or(1))?,
            Shape::Line | Shape::Values | Shape::Meta => memcached::line_of_answer(line, shape)?,
            // It was measured above.
            Shape::Packet => return Err(NoAnswer),
        };
        progress.left = Some(left);
        // A value has an end of line of its own.
        let behind = value_len.map_or(Some(0), |len| len.checked_add(2)).ok_or(NoAnswer)?;
        progress.from = (progress.from + end + 1).checked_add(behind).ok_or(NoAnswer)?;
    }
}

/// What a client says, read as it comes.
#[derive(Clone, Debug)]
pub enum Reader {
    /// One of memcached's protocols.
    Memcached(memcached::Reader),
    /// Redis' protocol.
    Resp(resp::Reader),
}

impl Reader {
    /// Of a client that has said nothing.
    pub fn new(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Memcached => Self::Memcached(memcached::Reader::default()),
            Protocol::Resp => Self::Resp(resp::Reader::default()),
        }
    }

    /// Reads a request from the beginning of what a client has sent since the last one.
    pub fn step(&mut self, bytes: &[u8]) -> Step {
        match self {
            Self::Memcached(reader) => reader.step(bytes),
            Self::Resp(reader) => reader.step(bytes),
        }
    }

    /// Whether no request may be read before a greeting has been answered: the version is not known before.
    pub fn is_waiting(&self) -> bool {
        match self {
            Self::Memcached(_) => false,
            Self::Resp(reader) => reader.is_waiting(),
        }
    }

    /// A greeting was answered: the client speaks another version, or it does not.
    pub fn greeted(&mut self, is_taken: bool) {
        if let Self::Resp(reader) = self {
            reader.greeted(is_taken);
        }
    }
}

impl Join {
    /// The request's answer. None: the client wants none.
    pub fn join(self, answers: Vec<Vec<u8>>) -> Option<Vec<u8>> {
        match self {
            Self::Only | Self::Greeting => answers.into_iter().next(),
            Self::Values(quiet) => Some(memcached::join(&answers)).filter(|answer| !quiet.hides(answer)),
            Self::Binary(answering) => answers.into_iter().next().and_then(|answer| answering.answer(answer)),
            Self::Array => Some(resp::join_arrays(&answers)),
            Self::Sum => Some(resp::join_sums(&answers)),
            Self::Okay => Some(resp::join_okays(&answers)),
        }
    }
}
