//! Literal bytes, every cut of them, and whatever bytes.

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::{Asked, Join, LINE_MAX, MESSAGE_MAX, NoAnswer, Part, Progress, Shape, answer_len};
use super::*;

/// What a client has said, given in pieces of some length: what became of each request.
fn read(bytes: &[u8], piece_len: usize) -> Vec<Asked> {
    let mut reader = Reader::default();
    let mut unread: Vec<u8> = Vec::new();
    let mut all = Vec::new();
    let mut skip = 0;
    for piece in bytes.chunks(piece_len) {
        let skipped = piece.len().min(skip);
        skip -= skipped;
        unread.extend_from_slice(&piece[skipped..]);
        loop {
            let len = match reader.step(&unread) {
                Step::More(_) => break,
                Step::Passed(len) => len,
                Step::Taken(len, asked) => {
                    let is_last = matches!(asked, Asked::Last(_));
                    all.push(asked);
                    reader.greeted(true);
                    if is_last {
                        return all;
                    }
                    len
                }
            };
            skip = len.saturating_sub(unread.len());
            unread.drain(..len.min(unread.len()));
        }
    }
    all
}

fn shown(asked: &Asked) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace("\r\n", " ");
    match asked {
        Asked::Servers { parts, .. } => {
            let parts: Vec<String> = parts.iter().map(|part| text(&part.bytes)).collect();
            parts.join("| ")
        }
        Asked::Answer(answer) => format!("answer {}", text(answer)),
        Asked::Last(answer) => format!("last {}", text(answer)),
    }
}

fn only(text: &str) -> Asked {
    let all = read(text.as_bytes(), text.len());
    assert_eq!(all.len(), 1, "{text}: {all:?}");
    all.into_iter().next().expect("one")
}

fn parts(text: &str) -> (Vec<Part>, Join) {
    match only(text) {
        Asked::Servers { parts, join } => (parts, join),
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn requests_are_what_servers_are_asked_wherever_they_are_torn() {
    let said = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n\r\n  set  'it''s' 1\r\nset \"a\\x41\\n\" 'it\\'s'\r\n*0\r\n*-1\r\n\
        MGET a b\r\n*3\r\n$4\r\nMSET\r\n$1\r\nk\r\n$2\r\n\r\n\r\nHELLO 3\r\nDEL a b\n*1\r\n$4\r\nQUIT\r\nGET never\r\n";
    let first = "*2 $3 GET $1 a ";
    for piece_len in 1..=said.len() {
        let all: Vec<String> = read(said, piece_len).iter().map(shown).collect();
        assert_eq!(all, [first, "last -ERR Protocol error: unbalanced quotes in request "], "{piece_len}");
    }
    let said = String::from_utf8_lossy(said).replace("  set  'it''s' 1\r\n", "");
    for piece_len in 1..=said.len() {
        let all: Vec<String> = read(said.as_bytes(), piece_len).iter().map(shown).collect();
        let set = "*3 $3 set $3 aA\n $4 it's ";
        let mget = "*2 $4 MGET $1 a | *2 $4 MGET $1 b ";
        let del = ">2 $3 DEL $1 a | >2 $3 DEL $1 b ";
        let expected = [first, set, mget, "*3 $4 MSET $1 k $2   ", ">1 $5 HELLO ", del, "last +OK "];
        assert_eq!(all, expected, "{piece_len}");
    }
}

#[test]
fn requests_of_many_keys_are_asked_for_each_and_joined() {
    assert_eq!(parts("MGET a b\r\n").1, Join::Array);
    assert_eq!(parts("MGET a\r\n").1, Join::Only);
    assert_eq!(parts("UNLINK a b\r\n").1, Join::Sum);
    let (all, join) = parts("mset a 1 b 2\r\n");
    assert_eq!((all.len(), join, all[0].is_safe), (2, Join::Okay, false));
    assert_eq!(all[1].bytes, b"*3\r\n$4\r\nmset\r\n$1\r\nb\r\n$1\r\n2\r\n");
    let bytes = |texts: &[&str]| -> Vec<Vec<u8>> { texts.iter().map(|text| text.as_bytes().to_vec()).collect() };
    assert_eq!(join_arrays(&bytes(&["*1\r\n$1\r\nx\r\n", "*1\r\n_\r\n"])), b"*2\r\n$1\r\nx\r\n_\r\n");
    assert_eq!(join_sums(&bytes(&[":1\r\n", ":0\r\n", ":1\r\n"])), b":2\r\n");
    assert_eq!(join_okays(&bytes(&["+OK\r\n", "+OK\r\n"])), b"+OK\r\n");
    for join in [join_arrays, join_sums, join_okays] {
        assert_eq!(join(&bytes(&["-ERR no\r\n", "?\r\n"])), b"-ERR no\r\n");
        assert!(join(&bytes(&["?\r\n"])).starts_with(b"-ERR a server has answered otherwise"));
    }
}

#[test]
fn what_cannot_be_is_answered_in_the_protocols_words() {
    for (said, answer) in [
        ("MULTI\r\n", "answer -ERR MULTI is not supported by an ensemble: a server would have to remember"),
        ("BLPOP a 0\r\n", "answer -ERR BLPOP is not supported"),
        ("XREAD BLOCK 0 STREAMS a 0\r\n", "answer -ERR XREAD is not supported"),
        ("KEYS *\r\n", "answer -ERR KEYS is not supported by an ensemble: it concerns no key"),
        ("SELECT 1\r\n", "answer -ERR SELECT is not supported by an ensemble: there is database 0"),
        ("AUTH x\r\n", "answer -ERR AUTH is not supported"),
        ("HELLO 3 AUTH u p\r\n", "answer -ERR AUTH is not supported"),
        ("HELLO 9\r\n", "answer -NOPROTO "),
        ("HELLO 3 FOO\r\n", "answer -ERR Syntax error in HELLO"),
        ("CLIENT REPLY OFF\r\n", "answer -ERR CLIENT REPLY is not supported"),
        ("CLIENT SETINFO LIB-NAME x\r\n", "answer +OK"),
        ("OBJECT HELP\r\n", "answer -ERR OBJECT HELP is not supported"),
        ("OBJECT DANCE a\r\n", "answer -ERR unknown command 'OBJECT DANCE'"),
        ("DANCE a\r\n", "answer -ERR unknown command 'DANCE'"),
        ("GET\r\n", "answer -ERR wrong number of arguments for 'get' command"),
        ("MSET a\r\n", "answer -ERR wrong number of arguments for 'mset' command"),
        ("RENAME a b\r\n", "answer -CROSSSLOT "),
        ("SUNION {a}1 b\r\n", "answer -CROSSSLOT "),
        ("POST / HTTP/1.1\r\n", "last "),
        ("*1\r\n:1\r\n", "last -ERR Protocol error: expected '$', got ':'"),
        ("*1\r\n$-1\r\n", "last -ERR Protocol error: invalid bulk length"),
        ("*1\r\n$+1\r\n", "last -ERR Protocol error: invalid bulk length"),
        ("*1\r\n$536870913\r\n", "last -ERR Protocol error: invalid bulk length"),
        ("*1\r\n$1\r\nabc", "last -ERR Protocol error: a string does not end"),
        ("*1048577\r\n", "last -ERR Protocol error: invalid multibulk length"),
        ("*99999999999999999999999999999999", "last -ERR Protocol error: invalid multibulk length"),
    ] {
        let asked = only(said);
        assert!(shown(&asked).starts_with(answer), "{said}: {}", shown(&asked));
    }
    let long = "x".repeat(LINE_MAX);
    assert!(shown(&only(&long)).starts_with("last -ERR Protocol error: too big inline request"));
    let key = "k".repeat(KEY_MAX + 1);
    assert!(shown(&only(&format!("GET {key}\r\n"))).starts_with("answer -ERR a key may have"));
    assert!(matches!(only(&format!("GET {{t}}{key}\r\n")), Asked::Servers { .. }), "the tag alone counts");
}

#[test]
fn a_request_that_is_too_large_is_refused_and_passed_over() {
    let value = "x".repeat(MESSAGE_MAX);
    let large = format!("*4\r\n$4\r\nMSET\r\n$1\r\na\r\n${}\r\n{value}\r\n$1\r\nz\r\nGET b\r\n", value.len());
    let many = format!("*70000\r\n{}GET b\r\n", "$1\r\na\r\n".repeat(70_000));
    for said in [large, many] {
        for piece_len in [1000, 64 << 10, said.len()] {
            let all: Vec<String> = read(said.as_bytes(), piece_len).iter().map(shown).collect();
            assert_eq!(all.len(), 2, "{piece_len}");
            assert!(all[0].starts_with("answer -ERR the request is larger than an ensemble carries"), "{}", all[0]);
            assert_eq!(all[1], "*2 $3 GET $1 b ");
        }
    }
}

#[test]
fn a_switch_knows_the_key_from_the_beginning() {
    for (said, key, is_safe) in [
        ("GET a\r\n", Some("a"), true),
        ("SET user{42}x 1\r\n", Some("42"), false),
        ("SET {}x 1\r\n", Some("{}x"), false),
        ("EVAL s 1 a\r\n", Some("a"), false),
        ("EVAL_RO s 1 a\r\n", Some("a"), true),
        ("BITOP and {a}1 {a}2\r\n", Some("a"), false),
        ("XREAD STREAMS a 0\r\n", Some("a"), true),
        ("ZUNIONSTORE {a} 1 {a}\r\n", Some("a"), false),
        ("SORT a\r\n", Some("a"), false),
        ("OBJECT ENCODING a\r\n", Some("a"), true),
        ("PING\r\n", None, true),
        ("HELLO 3\r\n", None, true),
    ] {
        let (all, _) = parts(said);
        let [part] = &all[..] else { panic!("{said}: {all:?}") };
        assert_eq!(key_of(&part.bytes).map(String::from_utf8_lossy).as_deref(), key, "{said}");
        assert_eq!((part.is_safe, super::is_safe(&part.bytes)), (is_safe, is_safe), "{said}");
        assert!(Protocol::Resp.is_request(&part.bytes), "{said}");
        assert!(!Protocol::Resp.is_request(&[&part.bytes[..], b"x"].concat()), "{said}");
    }
    for bytes in
        [&b""[..], b"*", b">", b"=3\r\nab", b"=1\r\na\r\n", b"*1\r\n", b"get a\r\n", b"*2\r\n$3\r\nGET\r\n$9\r\nx"]
    {
        assert_eq!(key_of(bytes), None, "{bytes:?}");
    }
}

#[test]
fn a_key_that_lies_behind_what_a_switch_sees_stands_in_front() {
    let script = "x".repeat(2000);
    let (all, _) = parts(&format!("EVAL {script} 1 {{tag}}key\r\n"));
    let whole = &all[0].bytes;
    assert_eq!(whole[..14], *b"=3\r\ntag\r\n*4\r\n$");
    assert_eq!(key_of(&whole[..SEEN_MIN]), Some(&b"tag"[..]));
    assert!(Protocol::Resp.is_request(whole));
    let mut told = Vec::new();
    Carried::read(whole).expect("a request").tell(&mut told);
    assert_eq!(told, whole[9..]);
    let (all, _) = parts(&format!("SET {} {script}\r\n", "k".repeat(KEY_MAX)));
    assert_eq!(key_of(&all[0].bytes[..SEEN_MIN]).map(<[u8]>::len), Some(KEY_MAX));
}

#[test]
fn answers_end_where_their_elements_do() {
    let whole = [
        &b"+OK\r\n"[..],
        b"-ERR no\r\n",
        b":-5\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"$5\r\n\r\n\r\nx\r\n",
        b"*0\r\n",
        b"*2\r\n*1\r\n$1\r\na\r\n%1\r\n+k\r\n~2\r\n#t\r\n_\r\n",
        b"=7\r\ntxt:abc\r\n",
        b"!3\r\nERR\r\n",
        b"(12345678901234567890\r\n",
        b",inf\r\n",
        b"|1\r\n+ttl\r\n:9\r\n|1\r\n+x\r\n*1\r\n:1\r\n*2\r\n:1\r\n:2\r\n",
    ];
    for answer in whole {
        let bytes = [answer, b"+behind\r\n"].concat();
        let mut progress = Progress::default();
        for cut in 0..answer.len() {
            assert_eq!(answer_len(&bytes[..cut], Shape::Message, &mut progress), Ok(None), "{answer:?} {cut}");
        }
        assert_eq!(answer_len(&bytes, Shape::Message, &mut progress), Ok(Some(answer.len())));
        assert_eq!(answer_len(&bytes, Shape::Message, &mut Progress::default()), Ok(Some(answer.len())));
    }
    for bad in [
        "\r\n",
        "hello\r\n",
        "$x\r\n",
        "$-2\r\n",
        "*-2\r\n",
        "+no end\n",
        "$?\r\n",
        "*99999999999999999999\r\n",
        "%9223372036854775807\r\n%9223372036854775807\r\n",
    ] {
        assert_eq!(answer_len(bad.as_bytes(), Shape::Message, &mut Progress::default()), Err(NoAnswer), "{bad}");
    }
    let long = vec![b'+'; LINE_MAX + 1];
    assert_eq!(answer_len(&long, Shape::Message, &mut Progress::default()), Err(NoAnswer));
}

fn array(args: &[Vec<u8>]) -> Vec<u8> {
    let strings = args.iter().flat_map(|arg| [format!("${}\r\n", arg.len()).as_bytes(), arg, b"\r\n"].concat());
    format!("*{}\r\n", args.len()).bytes().chain(strings).collect()
}

proptest! {
    #[test]
    fn any_cut_gives_the_same(requests in vec(vec(vec(any::<u8>(), 0..40), 1..5), 1..6), piece_len in 1..80_usize) {
        let said: Vec<u8> = requests.iter().flat_map(|args| {
            // Some are of commands that there are.
            let mut args = args.clone();
            args[0] = [&b"get"[..], b"mget", b"set", b"evalsha", b"xread"][args[0].len() % 5].to_vec();
            array(&args)
        }).collect();
        prop_assert_eq!(read(&said, piece_len), read(&said, said.len()));
    }

    #[test]
    fn any_bytes_do_no_harm(bytes in vec(any::<u8>(), 0..300), piece_len in 1..300_usize) {
        read(&bytes, piece_len);
        let _ = answer_len(&bytes, Shape::Message, &mut Progress::default());
        let _ = (key_of(&bytes), super::is_safe(&bytes), Protocol::Resp.is_request(&bytes));
    }

    #[test]
    fn bytes_of_the_protocol_do_no_harm(
        text in "([*$>%|=+:-][0-9]{0,3}(\r\n)?|\r\n|[a-z]{1,5}){0,40}",
        piece_len in 1..50_usize,
    ) {
        let bytes = text.as_bytes();
        prop_assert_eq!(read(bytes, piece_len), read(bytes, bytes.len().max(1)));
        let _ = answer_len(bytes, Shape::Message, &mut Progress::default());
        let _ = (key_of(bytes), super::is_safe(bytes), Protocol::Resp.is_request(bytes));
    }
}
