//! Answers of a memcached, cut apart as they come. One that is too large is passed over, and refused.

use margay_memcached::request::VALUE_MAX;
use margay_memcached::text::{self, LINE_MAX, NoAnswer, Shape};

/// Longest answer: with the largest value that clients can give, and with its lines.
pub(super) const ANSWER_MAX: usize = VALUE_MAX + LINE_MAX;
/// What a program is told in place of a longer one.
pub(super) const TOO_LARGE: &[u8] = b"SERVER_ERROR the value is larger than an ensemble carries\r\n";

/// What has come of answers. Holds at most [`ANSWER_MAX`] bytes, and what came with the last of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Answers {
    /// What is not cut yet.
    bytes: Vec<u8>,
    /// How far it has been looked at.
    from: usize,
    /// So many bytes that come next are of an answer that is too large.
    skip: usize,
    is_too_large: bool,
}

impl Answers {
    /// Takes what has come.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        let skipped = self.skip.min(bytes.len());
        self.skip -= skipped;
        self.bytes.extend_from_slice(&bytes[skipped..]);
    }

    /// Whether nothing has come that is of no answer yet.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty() && !self.is_too_large
    }

    /// The next answer, of this shape; none as long as it has not come whole.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub(super) fn next(&mut self, shape: Shape) -> Result<Option<Vec<u8>>, NoAnswer> {
        while self.skip == 0 {
            // The value was the last of it.
            let is_over = self.is_too_large && shape == Shape::Meta;
            let len = if is_over { Some(0) } else { text::answer_len(&self.bytes, shape, &mut self.from)? };
            if let Some(len) = len {
                return Ok(Some(self.cut(len)));
            }
            self.is_too_large |= self.from.max(self.bytes.len()) > ANSWER_MAX;
            if !self.is_too_large || self.from == 0 {
                break;
            }
            self.skip = std::mem::take(&mut self.from);
            let there = std::mem::take(&mut self.bytes);
            self.push(&there);
        }
        Ok(None)
    }

    fn cut(&mut self, len: usize) -> Vec<u8> {
        let rest = self.bytes.split_off(len);
        let answer = std::mem::replace(&mut self.bytes, rest);
        self.from = 0;
        if std::mem::take(&mut self.is_too_large) || answer.len() > ANSWER_MAX { TOO_LARGE.to_vec() } else { answer }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const LARGE: usize = ANSWER_MAX + 1;

    /// All answers, given the bytes in pieces of some length; with the most bytes that were held.
    fn cut(bytes: &[u8], shape: Shape, piece_len: usize) -> (Vec<String>, usize) {
        let mut answers = Answers::default();
        let mut found = Vec::new();
        let mut held_max = 0;
        for piece in bytes.chunks(piece_len) {
            answers.push(piece);
            while !answers.is_empty()
                && let Some(answer) = answers.next(shape).expect("sound")
            {
                found.push(String::from_utf8(answer).expect("ASCII"));
            }
            held_max = held_max.max(answers.bytes.len());
        }
        assert!(answers.is_empty(), "all was cut");
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
        let too_large = std::str::from_utf8(TOO_LARGE).expect("ASCII");
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
        let half = "x".repeat(ANSWER_MAX / 2);
        let one = format!("VALUE a 0 {}\r\n{half}\r\n", half.len());
        let (found, held_max) = cut(format!("{one}{one}{one}END\r\nEND\r\n").as_bytes(), Shape::Values, 64 << 10);
        assert_eq!(found, [std::str::from_utf8(TOO_LARGE).expect("ASCII"), "END\r\n"]);
        assert!(held_max <= ANSWER_MAX + (64 << 10), "{held_max} bytes were held");
    }

    #[test]
    fn the_largest_answer_is_carried() {
        let value = "x".repeat(VALUE_MAX);
        let answer =
            format!("VALUE {} 4294967295 {VALUE_MAX} 18446744073709551615\r\n{value}\r\nEND\r\n", "k".repeat(250));
        assert_eq!(cut(answer.as_bytes(), Shape::Values, 64 << 10).0, [answer]);
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        let mut answers = Answers::default();
        answers.push(&vec![b'x'; LINE_MAX + 1]);
        assert_eq!(answers.next(Shape::Line), Err(NoAnswer));
        let mut answers = Answers::default();
        answers.push(format!("VALUE a 0 {LARGE}\r\n{}\r\n{}", "x".repeat(LARGE), "y".repeat(LINE_MAX + 1)).as_bytes());
        assert_eq!(answers.next(Shape::Values), Err(NoAnswer));
    }
}
