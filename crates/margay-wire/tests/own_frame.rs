//! Frames of programs' own, byte by byte.

use margay_wire::{OWN_FRAME_KEY_MAX, OwnFrameRepr};
use proptest::prelude::*;

fn written(repr: &OwnFrameRepr<'_>) -> Vec<u8> {
    let mut bytes = vec![0; repr.len()];
    assert_eq!(repr.emit(&mut bytes), Some(bytes.len()));
    bytes
}

#[test]
fn each_field_has_its_place() {
    let asks = OwnFrameRepr {
        number: 0x0102_0304,
        oldest: 5,
        is_safe: true,
        wants_answer: true,
        is_answer: false,
        key: b"key",
        payload: b"data",
    };
    let bytes = *b"\x01\x02\x03\x04\0\0\0\x05\x83\x03keydata";
    assert_eq!(written(&asks), bytes);
    assert_eq!(OwnFrameRepr::parse(&bytes), Some(asks));
    let unnumbered = OwnFrameRepr { number: 0, oldest: 0, ..asks };
    assert_eq!(OwnFrameRepr::parse_unnumbered(&bytes[8..]), Some(unnumbered));
    let answers = OwnFrameRepr { number: 9, is_answer: true, payload: b"x", ..OwnFrameRepr::default() };
    assert_eq!(written(&answers), *b"\0\0\0\x09\0\0\0\0\x84\0x");
}

#[test]
fn what_is_none_is_not_read() {
    for bytes in [&b""[..], b"\0\0\0\0\0\0\0\0\x80", b"\0\0\0\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\0\x80\x02k"] {
        assert_eq!(OwnFrameRepr::parse(bytes), None, "{bytes:?}");
    }
    let long = [0; OWN_FRAME_KEY_MAX + 1];
    let repr = OwnFrameRepr { key: &long, ..OwnFrameRepr::default() };
    assert_eq!(repr.emit(&mut [0; 1000]), None);
    assert_eq!(OwnFrameRepr::default().emit(&mut [0; 9]), None);
}

proptest! {
    #[test]
    fn what_is_read_is_written_again(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        if let Some(repr) = OwnFrameRepr::parse(&bytes) {
            let again = written(&repr);
            prop_assert_eq!(OwnFrameRepr::parse(&again), Some(repr));
            prop_assert_eq!(&again[9..], &bytes[9..]);
        }
    }
}
