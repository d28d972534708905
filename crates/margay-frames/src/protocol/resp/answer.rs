//! Where an answer of Redis ends, and how answers to the parts of a request become one.

use crate::protocol::NoAnswer;

use super::{number, plain_error};

/// What a line of an answer says: how many elements are to come behind it, of `left` with its own, and how long the
/// value is that follows. What comes in pieces of unknown number, as version 3 allows, no server sends.
///
/// # Errors
///
/// [`NoAnswer`].
pub(crate) fn line_of_answer(line: &[u8], left: usize) -> Result<(usize, Option<usize>), NoAnswer> {
    let (kind, text) = line.split_first().ok_or(NoAnswer)?;
    // The caller asks for no line when nothing is to come.
    let others = left.saturating_sub(1);
    let count = || number(text).ok_or(NoAnswer);
    let with = |left: usize, count: i64, of_each: usize| {
        let all = usize::try_from(count).ok().and_then(|count| count.checked_mul(of_each)).ok_or(NoAnswer)?;
        Ok((left.checked_add(all).ok_or(NoAnswer)?, None))
    };
    match kind {
        b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(' => Ok((others, None)),
        b'$' | b'*' if text == b"-1" => Ok((others, None)),
        b'$' | b'=' | b'!' => Ok((others, Some(usize::try_from(count()?).map_err(|_| NoAnswer)?))),
        b'*' | b'~' | b'>' => with(others, count()?, 1),
        b'%' => with(others, count()?, 2),
        // Attributes stand before what they are about.
        b'|' => with(left, count()?, 2),
        _ => Err(NoAnswer),
    }
}

/// Of answers that cannot be those to the parts of a request, the first: an error as it is.
fn odd_answer(answer: &[u8]) -> Vec<u8> {
    if answer.starts_with(b"-") {
        return answer.to_vec();
    }
    plain_error("a server has answered otherwise than its protocol says")
}

/// Arrays of one element become one.
pub(crate) fn join_arrays(answers: &[Vec<u8>]) -> Vec<u8> {
    let mut whole = format!("*{}\r\n", answers.len()).into_bytes();
    for answer in answers {
        match answer.strip_prefix(b"*1\r\n") {
            Some(element) => whole.extend_from_slice(element),
            None => return odd_answer(answer),
        }
    }
    whole
}

/// Numbers are added.
pub(crate) fn join_sums(answers: &[Vec<u8>]) -> Vec<u8> {
    let mut sum = 0_i64;
    for answer in answers {
        let count = answer.strip_prefix(b":").and_then(|line| number(line.strip_suffix(b"\r\n")?));
        match count {
            Some(count) => sum = sum.saturating_add(count),
            None => return odd_answer(answer),
        }
    }
    format!(":{sum}\r\n").into_bytes()
}

/// All are `OK`.
pub(crate) fn join_okays(answers: &[Vec<u8>]) -> Vec<u8> {
    let odd = answers.iter().find(|answer| ***answer != *b"+OK\r\n");
    odd.map_or_else(|| b"+OK\r\n".to_vec(), |answer| odd_answer(answer))
}
