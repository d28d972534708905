//! Literal bytes of each command, and bytes that were changed at random.

use proptest::prelude::*;

use super::super::super::{Progress, Protocol, Shape, answer_len};
use super::*;

/// A request with this opaque.
const OPAQUE: u32 = 0x0102_0304;

fn packet(magic: u8, opcode: u8, status: u16, extras: &[u8], key: &[u8], value: &[u8]) -> Vec<u8> {
    let body_len = (extras.len() + key.len() + value.len()) as u32;
    let mut bytes = vec![magic, opcode];
    bytes.extend_from_slice(&(key.len() as u16).to_be_bytes());
    bytes.extend_from_slice(&[extras.len() as u8, 0]);
    bytes.extend_from_slice(&status.to_be_bytes());
    bytes.extend_from_slice(&body_len.to_be_bytes());
    bytes.extend_from_slice(&OPAQUE.to_be_bytes());
    bytes.extend_from_slice(&[0; 8]);
    [&bytes, extras, key, value].concat()
}

fn request(opcode: u8, extras: &[u8], key: &[u8], value: &[u8]) -> Vec<u8> {
    packet(0x80, opcode, 0, extras, key, value)
}

/// What servers are told, whether it is safe, and how their answer is given.
fn asked(bytes: &[u8]) -> (Vec<u8>, bool, Answering) {
    match step(bytes) {
        Step::Taken(len, Asked::Servers { parts, join: Join::Binary(answering) }) => {
            assert_eq!((len, parts.len()), (bytes.len(), 1));
            (parts[0].bytes.clone(), parts[0].is_safe, answering)
        }
        other => panic!("{bytes:02x?}: {other:?}"),
    }
}

/// The answer that the framer gives by itself: opcode, status, opaque, text; and whether the connection ends with it.
fn own(bytes: &[u8]) -> (u8, u16, u32, String, bool) {
    let (answer, is_last) = match step(bytes) {
        Step::Taken(_, Asked::Answer(answer)) => (answer, false),
        Step::Taken(_, Asked::Last(answer)) => (answer, true),
        other => panic!("{bytes:02x?}: {other:?}"),
    };
    assert_eq!((answer[0], answer[2..6].to_vec(), answer[16..24].to_vec()), (0x81, vec![0; 4], vec![0; 8]));
    let word = |at: usize| u32::from_be_bytes([answer[at], answer[at + 1], answer[at + 2], answer[at + 3]]);
    assert_eq!(word(8) as usize, answer.len() - 24);
    let text = String::from_utf8(answer[24..].to_vec()).expect("a text");
    (answer[1], u16::from_be_bytes([answer[6], answer[7]]), word(12), text, is_last)
}

#[test]
fn each_request_is_told_as_one_that_is_always_answered() {
    // What memcached's own document has for a `get` of "Hello".
    let mut get = vec![0x80, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    get.extend_from_slice(b"Hello");
    assert_eq!((asked(&get).0, asked(&get).1), (get, true));
    let extras = [7; 21];
    let hidden_miss = Hidden::Misses;
    let hidden_success = Hidden::Successes;
    let wanted = Hidden::Nothing;
    for (opcode, told, extras_len, has_value, is_safe, hidden) in [
        (0x00, 0x00, 0, false, true, wanted),
        (0x01, 0x01, 8, true, false, wanted),
        (0x02, 0x02, 8, true, false, wanted),
        (0x03, 0x03, 8, true, false, wanted),
        (0x04, 0x04, 0, false, false, wanted),
        (0x05, 0x05, 20, false, false, wanted),
        (0x06, 0x06, 20, false, false, wanted),
        (0x09, 0x00, 0, false, true, hidden_miss),
        (0x0c, 0x0c, 0, false, true, wanted),
        (0x0d, 0x0c, 0, false, true, hidden_miss),
        (0x0e, 0x0e, 0, true, false, wanted),
        (0x0f, 0x0f, 0, true, false, wanted),
        (0x11, 0x01, 8, true, false, hidden_success),
        (0x12, 0x02, 8, true, false, hidden_success),
        (0x13, 0x03, 8, true, false, hidden_success),
        (0x14, 0x04, 0, false, false, hidden_success),
        (0x15, 0x05, 20, false, false, hidden_success),
        (0x16, 0x06, 20, false, false, hidden_success),
        (0x19, 0x0e, 0, true, false, hidden_success),
        (0x1a, 0x0f, 0, true, false, hidden_success),
        (0x1c, 0x1c, 4, false, false, wanted),
        (0x1d, 0x1d, 4, false, false, wanted),
        (0x1e, 0x1d, 4, false, false, hidden_miss),
        (0x23, 0x23, 4, false, false, wanted),
        (0x24, 0x23, 4, false, false, hidden_miss),
    ] {
        let value: &[u8] = if has_value { b"\r\nvalue\x80" } else { b"" };
        let said = request(opcode, &extras[..extras_len], b"a key\n", value);
        let (bytes, safe, answering) = asked(&said);
        assert_eq!(bytes, request(told, &extras[..extras_len], b"a key\n", value), "{opcode:02x}");
        assert_eq!((safe, answering), (is_safe, Answering { opcode, opaque: OPAQUE, hidden }), "{opcode:02x}");
        assert_eq!(Protocol::Memcached.key_of(&bytes), Some(&b"a key\n"[..]), "{opcode:02x}");
        assert_eq!(Protocol::Memcached.is_safe(&bytes), is_safe, "{opcode:02x}");
        assert_eq!(Protocol::Memcached.shape_of(&bytes), Shape::Packet);
        assert!(Protocol::Memcached.is_request(&bytes), "{opcode:02x}");
        assert_eq!(Protocol::Memcached.is_request(&said), told == opcode, "quiet ones are not always answered");
        for cut in 24..said.len() {
            assert_eq!(step(&said[..cut]), Step::More(Some(said.len())), "{opcode:02x}, {cut} bytes");
        }
        // Other extras than the command's, and no key.
        let wrong = request(opcode, &extras[..extras_len + 1], b"k", value);
        assert_eq!((own(&wrong).1, own(&wrong).4), (0x04, true), "{opcode:02x}");
        let wrong = request(opcode, &extras[..extras_len], b"", value);
        assert_eq!((own(&wrong).1, own(&wrong).4), (0x04, true), "{opcode:02x}");
    }
    let version = request(0x0b, b"", b"", b"");
    assert_eq!((asked(&version).0, asked(&version).1), (version.clone(), true));
    assert_eq!(Protocol::Memcached.key_of(&version), None);
    assert!(Protocol::Memcached.is_safe(&version));
}

#[test]
fn what_needs_no_server_is_answered_by_the_framer() {
    for (said, status, has_text, is_last) in [
        (request(0x0a, b"", b"", b""), 0x00, false, false),
        (request(0x1b, &[0, 0, 0, 1], b"", b""), 0x00, false, false),
        (request(0x07, b"", b"", b""), 0x00, false, true),
        (request(0x10, b"", b"", b""), 0x83, true, false),
        (request(0x10, b"", b"items", b""), 0x83, true, false),
        (request(0x08, b"", b"", b""), 0x83, true, false),
        (request(0x18, &[0; 4], b"", b""), 0x83, true, false),
        (request(0x20, b"", b"", b""), 0x83, true, false),
        (request(0x21, b"", b"PLAIN", b"\0user\0word"), 0x20, true, false),
        (request(0x22, b"", b"PLAIN", b""), 0x20, true, false),
        (request(0x40, &[0; 3], b"x", b"y"), 0x81, true, false),
        (request(0xff, b"", b"", b""), 0x81, true, false),
        (request(0x0a, b"", b"k", b""), 0x04, true, true),
        (request(0x00, b"", &[b'k'; 251], b""), 0x04, true, true),
        (request(0x00, b"", b"k", b"value"), 0x04, true, true),
    ] {
        let (opcode, found, opaque, text, ends) = own(&said);
        assert_eq!((opcode, found, opaque, ends), (said[1], status, OPAQUE, is_last), "{said:02x?}");
        assert_eq!(text.is_empty(), !has_text, "{said:02x?}: {text}");
    }
    assert_eq!(step(&request(0x17, b"", b"", b"")), Step::Taken(24, Asked::Last(Vec::new())), "quitq");
}

#[test]
fn lengths_that_contradict_each_other_end_the_connection() {
    let mut said = request(0x00, b"", b"key", b"");
    said[11] = 2;
    assert_eq!((own(&said).1, own(&said).4), (0x04, true), "the key is longer than all of it");
    said[1] = 0x10;
    assert_eq!((own(&said).1, own(&said).4), (0x04, true), "also of what is refused in any case");
}

#[test]
fn a_value_that_is_too_large_is_refused_before_it_has_come() {
    let mut said = request(0x01, &[0; 8], b"key", b"");
    said[8..12].copy_from_slice(&u32::MAX.to_be_bytes());
    let Step::Taken(len, Asked::Answer(answer)) = step(&said) else { panic!("it is refused") };
    assert_eq!((len, answer[1], answer[7]), (24 + u32::MAX as usize, 0x01, 0x03));
    said[8..12].copy_from_slice(&(8 + 3 + VALUE_MAX as u32).to_be_bytes());
    assert_eq!(step(&said), Step::More(Some(24 + 8 + 3 + VALUE_MAX)));
}

#[test]
fn a_client_speaks_one_of_the_protocols() {
    let mut reader = super::super::Reader::default();
    let noop = request(0x0a, b"", b"", b"");
    assert!(matches!(reader.step(&noop), Step::Taken(24, Asked::Answer(_))));
    assert_eq!(reader.step(b""), Step::More(Some(24)));
    assert_eq!(reader.step(b"get a\r\n"), Step::Taken(7, Asked::Last(Vec::new())));
    let mut reader = super::super::Reader::default();
    assert!(matches!(reader.step(b"mn\r\n"), Step::Taken(4, Asked::Answer(_))));
    let version = request(0x0b, b"", b"", b"");
    assert_eq!(reader.step(&version), Step::More(None), "as text it has no end of line");
}

#[test]
fn answers_are_given_with_the_opcode_of_their_request_or_kept_back() {
    let of = |opcode| asked(&request(opcode, b"", b"k", b"")).2;
    let hit = packet(0x81, 0x0c, 0x00, &[0, 0, 0, 9], b"k", b"value");
    let miss = packet(0x81, 0x0c, 0x01, b"", b"", b"Not found");
    let mut given = hit.clone();
    given[1] = 0x0d;
    assert_eq!(of(0x0d).answer(hit.clone()), Some(given));
    assert_eq!((of(0x0c).answer(hit.clone()), of(0x0d).answer(miss.clone())), (Some(hit), None));
    assert_eq!(of(0x0c).answer(miss.clone()), Some(miss));
    let done = packet(0x81, 0x04, 0x00, b"", b"", b"");
    let missing = packet(0x81, 0x04, 0x01, b"", b"", b"");
    assert_eq!((of(0x04).answer(done.clone()), of(0x14).answer(done.clone())), (Some(done), None));
    assert_eq!(of(0x14).answer(missing).map(|answer| answer[1]), Some(0x14), "errors of quiet requests are told");
}

#[test]
fn errors_of_framers_and_switches_become_answers() {
    let answering = asked(&request(0x0d, b"", b"k", b"")).2;
    for (text, status) in [("no switch answers", 0x84), (TOO_LARGE, 0x03)] {
        let answer = answering.answer(Protocol::Memcached.error(text)).expect("an error is told");
        assert_eq!((answer[0], answer[1], answer[6], answer[7]), (0x81, 0x0d, 0, status));
        assert_eq!((&answer[12..16], &answer[24..]), (&OPAQUE.to_be_bytes()[..], text.as_bytes()));
    }
    // From whoever lies.
    for answer in [vec![], vec![0x81], vec![0x81; 9]] {
        assert_eq!(answering.answer(answer).map(|answer| answer[7]), Some(0x84));
    }
}

#[test]
fn answers_are_cut_by_their_headers() {
    let one = packet(0x81, 0x00, 0, &[0; 4], b"", b"value");
    let both = [one.clone(), packet(0x81, 0x0a, 0, b"", b"", b"")].concat();
    let mut progress = Progress::default();
    for cut in 0..one.len() {
        assert_eq!(answer_len(&both[..cut], Shape::Packet, &mut progress), Ok(None), "{cut}");
    }
    assert_eq!(answer_len(&both, Shape::Packet, &mut progress), Ok(Some(one.len())));
    assert_eq!(answer_len(&both[one.len()..], Shape::Packet, &mut Progress::default()), Ok(Some(24)));
    assert_eq!(answer_len(b"ERROR\r\n", Shape::Packet, &mut Progress::default()), Err(NoAnswer));
}

/// Commands in a row, as a client sends them.
fn conversation() -> Vec<u8> {
    [
        request(0x01, &[0; 8], b"a", b"value of a"),
        request(0x0d, b"", b"a", b""),
        request(0x0d, b"", b"b", b""),
        request(0x0a, b"", b"", b""),
        request(0x15, &[1; 20], b"n", b""),
        request(0x21, b"", b"PLAIN", b"\0u\0w"),
        request(0x1e, &[0; 4], b"c", b""),
    ]
    .concat()
}

proptest! {
    /// Whatever a client sends: each step goes on, asks for more than there is, or ends the connection; and what
    /// servers are told is one request that another reader takes as the same.
    #[test]
    fn changed_bytes_are_read_or_refused(changes in prop::collection::vec((0usize..300, any::<u8>()), 0..12)) {
        let mut bytes = conversation();
        for (at, byte) in changes {
            let len = bytes.len();
            bytes[at % len] = byte;
        }
        bytes[0] = REQUEST;
        let mut reader = super::super::Reader::default();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match reader.step(rest) {
                Step::More(wanted) => {
                    prop_assert!(wanted.is_some_and(|wanted| wanted > rest.len()));
                    break;
                }
                Step::Passed(_) => prop_assert!(false, "there is nothing between requests"),
                Step::Taken(_, Asked::Last(_)) => break,
                Step::Taken(len, asked) => {
                    if let Asked::Servers { parts, .. } = asked {
                        prop_assert_eq!(len, parts[0].bytes.len());
                        prop_assert!(Protocol::Memcached.is_request(&parts[0].bytes));
                        prop_assert_eq!(Protocol::Memcached.is_safe(&parts[0].bytes), parts[0].is_safe);
                    }
                    prop_assert!(len >= HEADER_LEN);
                    rest = rest.get(len..).unwrap_or_default();
                }
            }
        }
    }

    /// Whatever a server says: an answer is cut, more is waited for, or it is none; nothing else happens.
    #[test]
    fn answers_of_any_bytes_are_cut_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        let mut progress = Progress::default();
        match answer_len(&bytes, Shape::Packet, &mut progress) {
            Ok(Some(len)) => prop_assert!((HEADER_LEN..=bytes.len()).contains(&len)),
            Ok(None) => prop_assert!(bytes.len() < HEADER_LEN || progress.from > bytes.len()),
            Err(NoAnswer) => prop_assert!(bytes[0] != ANSWER),
        }
    }
}
