//! Datagrams of framed connections: any that is written is read as the same, and no bytes whatever do harm.

use margay_wire::{AbortReason, FRAMED_LOST_MAX, Framed, FramedParts, FramedTerms};
use proptest::collection::vec;
use proptest::prelude::*;

fn terms() -> impl Strategy<Value = FramedTerms> {
    any::<(u32, u32, u16, u16)>().prop_map(|(tsn, window_bytes, window, streams)| FramedTerms {
        tsn,
        window_bytes,
        window,
        streams,
    })
}

fn check_both_ways(number: u64, says: &Framed<'_>) {
    let mut out = [0xee; 2048];
    let len = says.emit(number, &mut out).expect("room");
    assert_eq!(Framed::parse(&out[..len]), Ok((number, *says)));
}

/// Reads any bytes; what is taken is the same when it is written and read again.
fn check(bytes: &[u8]) {
    FramedParts::of(bytes).filter(|part| part.len() < bytes.len()).for_each(check);
    if let Ok((number, says)) = Framed::parse(bytes) {
        let mut out = vec![0; bytes.len()];
        let len = says.emit(number, &mut out).expect("it is no longer than it was");
        assert_eq!(Framed::parse(&out[..len]), Ok((number, says)));
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        number: u64, terms in terms(), host: [u8; 16], label in "[a-z0-9.:]{0,64}", packet in vec(any::<u8>(), 0..200),
        generation: u32, protocol: u8,
    ) {
        let reason = AbortReason::Failed;
        for says in [
            Framed::Hello { terms, host, protocol },
            Framed::Welcome { terms, label: &label },
            Framed::Data(&packet),
            Framed::Abort { reason, text: &label },
            Framed::LostSeen { generation },
            Framed::Close, Framed::Ping, Framed::Pong, Framed::Leaving,
        ] {
            check_both_ways(number, &says);
        }
    }

    #[test]
    fn a_list_of_lost_requests_is_read(generation: u32, lost in vec(any::<u32>(), 1..300)) {
        let mut out = [0; 2048];
        let len = Framed::emit_lost(7, generation, &lost, &mut out).expect("room");
        let (_, says) = Framed::parse(&out[..len]).expect("sound");
        let Framed::Lost { generation: read, numbers } = says else { panic!("a list") };
        prop_assert_eq!(read, generation);
        prop_assert!(numbers.iter().eq(lost.iter().copied().take(FRAMED_LOST_MAX)));
        check(&out[..len]);
    }

    #[test]
    fn any_bytes_are_read_or_refused(
        kind in prop_oneof![0_u8..12, Just(40)],
        value in vec(any::<u8>(), 0..60),
        mistake in any::<prop::sample::Index>(),
        byte: u8,
        cut: bool,
    ) {
        let mut bytes = vec![b'M', b'F', 1, kind, 0, 0, 0, 0, 0, 0, 0, if kind == 40 { 0 } else { 7 }];
        bytes.extend(value);
        check(&bytes);
        let at = mistake.index(bytes.len());
        bytes[at] = byte;
        check(&bytes);
        if cut {
            check(&bytes[..at]);
        }
    }
}
