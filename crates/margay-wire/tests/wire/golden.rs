//! The golden vectors: what they say is read from them, and what is written from that is they.

use std::collections::BTreeSet;

use margay_wire::{DataRepr, Extension, Kind, Message, TrainRepr, kind_of};

use crate::json;
use crate::vector::{data, hex, malformed, messages};

#[test]
fn every_message_is_read_and_written_exactly() {
    for vector in messages() {
        let name = &vector.name;
        let message = Message::parse(&vector.bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(json::of_message(&message, vector.bytes.len()), vector.fields, "{name}");
        assert_eq!(kind_of(&vector.bytes), Ok(message.kind), "{name}");
        let written = json::to_message(&vector.fields).unwrap_or_else(|error| panic!("{name}: {error}"));
        if vector.is_canonical {
            assert_eq!(hex(&written), hex(&vector.bytes), "{name}");
        } else {
            assert_ne!(hex(&written), hex(&vector.bytes), "{name} says that nobody writes it");
            let again = Message::parse(&written).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(json::of_message(&again, written.len()), vector.fields, "{name} means the same");
        }
    }
}

#[test]
fn every_data_packet_is_read_and_written_exactly() {
    for vector in data() {
        let name = &vector.name;
        let fields = json::of_data(&vector.bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(fields, vector.fields, "{name}");
        assert_eq!(kind_of(&vector.bytes), Ok(Kind::Data), "{name}");
        assert!(Message::parse(&vector.bytes).is_err(), "{name} is no message");
        let is_same = hex(&json::to_data(&fields)) == hex(&vector.bytes);
        assert_eq!(is_same, vector.is_canonical, "{name}");
    }
}

#[test]
fn everything_malformed_is_refused_by_whom_it_says() {
    for vector in malformed() {
        let (name, bytes) = (&vector.name, &vector.bytes[..]);
        assert!(Message::parse(bytes).is_err(), "{name}");
        let header = DataRepr::parse(bytes);
        match &vector.refused[..] {
            "message" | "data" => assert!(header.is_err(), "{name}"),
            "train" => {
                assert_eq!(header.map(|header| header.index), Ok(0), "{name}");
                assert!(TrainRepr::parse(&bytes[16..]).is_err(), "{name}");
            }
            other => panic!("{name}: {other} refuses nothing"),
        }
    }
}

#[test]
fn the_vectors_leave_nothing_out() {
    let all = messages();
    let parsed: Vec<Message<'_>> =
        all.iter().map(|vector| Message::parse(&vector.bytes).expect("well-formed")).collect();
    let kinds: BTreeSet<Kind> = parsed.iter().map(|message| message.kind).chain([Kind::Data]).collect();
    assert_eq!(kinds, Kind::ALL.iter().copied().collect());
    let types: BTreeSet<u8> =
        parsed.iter().flat_map(|message| message.extensions()).map(|extension| extension.type_byte()).collect();
    let known = [
        1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 20, 21, 23, 25, 26, 0x86, 0x87, 0x8a, 0x8b, 0x8c, 0x93, 0x96, 0x98, 0xce, 0xec,
    ];
    assert!(known.iter().all(|byte| types.contains(byte)), "{types:x?}");
    let codes: BTreeSet<u16> =
        parsed.iter().filter_map(|message| message.error()).map(|error| error.code.into()).collect();
    assert!((1..=14).all(|code| codes.contains(&code)), "{codes:?}");
    let names: BTreeSet<&str> = all.iter().map(|vector| &vector.name[..]).collect();
    assert_eq!(names.len(), all.len(), "each name once");
}

#[test]
fn an_unknown_critical_extension_is_named_and_an_unknown_other_one_skipped() {
    let find = |name: &str| messages().into_iter().find(|vector| vector.name == name).expect("there");
    for (name, unknown) in
        [("unknown-critical", Some(0xd5)), ("syn-chain", None), ("unknown-skipped", None), ("syn", None)]
    {
        let vector = find(name);
        let message = Message::parse(&vector.bytes).expect("well-formed");
        assert_eq!(message.unknown_critical(), unknown, "{name}");
    }
    let skipped = find("unknown-skipped");
    let message = Message::parse(&skipped.bytes).expect("well-formed");
    assert!(message.auth().is_some() && message.extensions().all(|extension| matches!(extension, Extension::Auth(_))));
}

#[test]
fn no_message_is_read_from_less_than_all_of_it() {
    for vector in messages() {
        let whole = Message::parse(&vector.bytes).expect("well-formed").signed_bytes().len();
        for len in 0..whole {
            assert!(Message::parse(&vector.bytes[..len]).is_err(), "{}: {len} of {whole} bytes", vector.name);
        }
        for len in whole..=vector.bytes.len() {
            assert!(Message::parse(&vector.bytes[..len]).is_ok(), "{}: padding may go", vector.name);
        }
    }
}
