//! Answers of a program, cut apart as they come. One that is too large is passed over, and refused.

use crate::protocol::{MESSAGE_MAX, NoAnswer, Progress, Protocol, Shape, TOO_LARGE, answer_len};

/// First byte of what a Redis says that nobody has asked, as version 3 of its protocol has it.
const UNASKED: u8 = b'>';

/// What has come of answers. Holds at most [`MESSAGE_MAX`] bytes, and what came with the last of them.
#[derive(Clone, Debug)]
pub(super) struct Answers {
    protocol: Protocol,
    /// What is not cut yet.
    bytes: Vec<u8>,
    /// How far it has been looked at.
    progress: Progress,
    /// So many bytes that come next are of an answer that is too large.
    skip: usize,
    is_too_large: bool,
    /// It is none, and is passed over.
    is_unasked: bool,
}

impl Answers {
    /// Of a program that has said nothing.
    pub(super) fn new(protocol: Protocol) -> Self {
        Self {
            protocol,
            bytes: Vec::new(),
            progress: Progress::default(),
            skip: 0,
            is_too_large: false,
            is_unasked: false,
        }
    }

    /// Bytes that are held.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Takes what has come.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        let skipped = self.skip.min(bytes.len());
        self.skip -= skipped;
        self.bytes.extend_from_slice(&bytes[skipped..]);
    }

    /// Whether an answer has begun to come. What nobody has asked is passed over.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub(super) fn has_begun(&mut self) -> Result<bool, NoAnswer> {
        loop {
            let is_new = self.progress == Progress::default() && !self.is_too_large;
            self.is_unasked |= is_new && self.protocol == Protocol::Resp && self.bytes.first() == Some(&UNASKED);
            if !self.is_unasked {
                return Ok(!self.bytes.is_empty() || self.is_too_large);
            }
            if self.next(Shape::Message)?.is_none() {
                return Ok(false);
            }
            self.is_unasked = false;
        }
    }

    /// The next answer, of this shape; none as long as it has not come whole.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub(super) fn next(&mut self, shape: Shape) -> Result<Option<Vec<u8>>, NoAnswer> {
        while self.skip == 0 {
            if let Some(len) = answer_len(&self.bytes, shape, &mut self.progress)? {
                return Ok(Some(self.cut(len)));
            }
            self.is_too_large |= self.progress.from.max(self.bytes.len()) > MESSAGE_MAX;
            if !self.is_too_large || self.progress.from == 0 {
                break;
            }
            self.skip = std::mem::take(&mut self.progress.from);
            let there = std::mem::take(&mut self.bytes);
            self.push(&there);
        }
        Ok(None)
    }

    fn cut(&mut self, len: usize) -> Vec<u8> {
        let rest = self.bytes.split_off(len);
        let answer = std::mem::replace(&mut self.bytes, rest);
        self.progress = Progress::default();
        let is_too_large = std::mem::take(&mut self.is_too_large) || answer.len() > MESSAGE_MAX;
        if is_too_large { self.protocol.error(TOO_LARGE) } else { answer }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    use margay_memcached::request::VALUE_MAX;

    use crate::protocol::LINE_MAX;

    const LARGE: usize = MESSAGE_MAX + 1;

    /// All answers, given the bytes in pieces of some length; with the most bytes that were held.
    fn cut(bytes: &[u8], shape: Shape, piece_len: usize) -> (Vec<String>, usize) {
        let protocol = if shape == Shape::Message { Protocol::Resp } else { Protocol::Memcached };
        let mut answers = Answers::new(protocol);
        let mut found = Vec::new();
        let mut held_max = 0;
        for piece in bytes.chunks(piece_len) {
            answers.push(piece);
            while answers.has_begun().expect("sound")
                && let Some(answer) = answers.next(shape).expect("sound")
            {
                found.push(String::from_utf8(answer).expect("ASCII"));
            }
            held_max = held_max.max(answers.bytes.len());
        }
        assert!(!answers.has_begun().expect("sound"), "all was cut");
        (found, held_max)
    }

    #[test]
    fn answers_are_cut_wherever_they_are_torn() {
        let bytes = b"VALUE a 0 2\r\nhi\r\nEND\r\nEND\r\nSERVER_ERROR no\r\n";
        let expected = ["VALUE a 0 2\r\nhi\r\nEND\r\n", "END\r\n", "SERVER_ERROR no\r\n"];
        for piece_len in 1..=bytes.len() {
            assert_eq!(cut(bytes, Shape::Values, piece_len).0, expected, "{piece_len}");
        }
        let bytes = b"VA 2 t5\r\nhi\r\nHD\r\nEN\r\n";
        for piece_len in 1..=bytes.len() {
            assert_eq!(cut(bytes, Shape::Meta, piece_len).0, ["VA 2 t5\r\nhi\r\n", "HD\r\n", "EN\r\n"], "{piece_len}");
        }
    }

    #[test]
    fn an_answer_that_is_too_large_is_passed_over_and_refused_alone() {
        let value = "x".repeat(LARGE);
        let too_large = &*format!("SERVER_ERROR {TOO_LARGE}\r\n");
        let values = format!("END\r\nVALUE a 0 {LARGE}\r\n{value}\r\nEND\r\nVALUE b 0 1\r\ny\r\nEND\r\n");
        let meta = format!("EN\r\nVA {LARGE} t5\r\n{value}\r\nVA 1\r\ny\r\n");
        for piece_len in [7, 64 << 10, 2 * LARGE] {
            let (found, held_max) = cut(values.as_bytes(), Shape::Values, piece_len);
            assert_eq!(found, ["END\r\n", too_large, "VALUE b 0 1\r\ny\r\nEND\r\n"], "{piece_len}");
            assert!(held_max <= piece_len.max(64), "{held_max} bytes were held");
            let (found, held_max) = cut(meta.as_bytes(), Shape::Meta, piece_len);
            assert_eq!(found, ["EN\r\n", too_large, "VA 1\r\ny\r\n"], "{piece_len}");
            assert!(held_max <= piece_len.max(64), "{held_max} bytes were held");
        }
    }

    #[test]
    fn many_values_are_one_answer_that_may_be_too_large() {
        let half = "x".repeat(MESSAGE_MAX / 2);
        let one = format!("VALUE a 0 {}\r\n{half}\r\n", half.len());
        let (found, held_max) = cut(format!("{one}{one}{one}END\r\nEND\r\n").as_bytes(), Shape::Values, 64 << 10);
        assert_eq!(found, [format!("SERVER_ERROR {TOO_LARGE}\r\n"), "END\r\n".to_owned()]);
        assert!(held_max <= MESSAGE_MAX + (64 << 10), "{held_max} bytes were held");
    }

    #[test]
    fn the_largest_answer_is_carried() {
        let value = "x".repeat(VALUE_MAX);
        let answer =
            format!("VALUE {} 4294967295 {VALUE_MAX} 18446744073709551615\r\n{value}\r\nEND\r\n", "k".repeat(250));
        assert_eq!(cut(answer.as_bytes(), Shape::Values, 64 << 10).0, [answer]);
    }

    #[test]
    fn what_redis_says_unasked_is_passed_over() {
        let bytes = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n+OK\r\n|1\r\n+ttl\r\n:3\r\n%1\r\n+a\r\n,1.5\r\n\
            >1\r\n+x\r\n_\r\n";
        for piece_len in 1..=bytes.len() {
            let (found, _) = cut(bytes, Shape::Message, piece_len);
            assert_eq!(found, ["+OK\r\n", "|1\r\n+ttl\r\n:3\r\n%1\r\n+a\r\n,1.5\r\n", "_\r\n"], "{piece_len}");
        }
        let huge = format!(">2\r\n${LARGE}\r\n{}\r\n:1\r\n+OK\r\n", "x".repeat(LARGE));
        assert_eq!(cut(huge.as_bytes(), Shape::Message, 64 << 10).0, ["+OK\r\n"]);
    }

    #[test]
    fn an_answer_of_redis_that_is_too_large_is_refused_alone() {
        let value = "x".repeat(LARGE);
        let bytes = format!("*2\r\n$1\r\ny\r\n${LARGE}\r\n{value}\r\n:1\r\n*2\r\n${LARGE}\r\n{value}\r\n:7\r\n:2\r\n");
        for piece_len in [7, 64 << 10, 3 * LARGE] {
            let (found, held_max) = cut(bytes.as_bytes(), Shape::Message, piece_len);
            let too_large = format!("-ERR {TOO_LARGE}\r\n");
            assert_eq!(found, [&too_large, ":1\r\n", &too_large, ":2\r\n"], "{piece_len}");
            assert!(held_max <= piece_len.max(64), "{held_max} bytes were held");
        }
        // Many small elements are an answer that may be too large, too.
        let count = LARGE / 4 + 1;
        let many = format!("*{count}\r\n{}+OK\r\n", ":1\r\n".repeat(count));
        assert_eq!(
            cut(many.as_bytes(), Shape::Message, 64 << 10).0,
            [format!("-ERR {TOO_LARGE}\r\n").as_str(), "+OK\r\n"]
        );
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        let mut answers = Answers::new(Protocol::Memcached);
        answers.push(&vec![b'x'; LINE_MAX + 1]);
        assert_eq!(answers.next(Shape::Line), Err(NoAnswer));
        let mut answers = Answers::new(Protocol::Memcached);
        answers.push(format!("VALUE a 0 {LARGE}\r\n{}\r\n{}", "x".repeat(LARGE), "y".repeat(LINE_MAX + 1)).as_bytes());
        assert_eq!(answers.next(Shape::Values), Err(NoAnswer));
    }
}
