//! The program socket's messages: what one end writes the other reads, and nothing makes a reader stumble. Their
//! literal bytes are held by the tests of both ends.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use margay_wire::{
    PROGRAM_REPLY_LEN, PROGRAM_REQUEST_LEN, PROGRAM_TEXT_MAX, ProgramError, ProgramKind, ProgramReplyRepr,
    ProgramRequestRepr, SPLICE_RELAYS_ON,
};
use proptest::prelude::*;

fn with_text(fixed: &[u8], text: &str) -> Vec<u8> {
    [fixed, text.as_bytes()].concat()
}

/// Kinds from 15 on may not be known to the agent that is asked.
#[test]
fn a_report_of_load_has_its_percents_in_the_port() {
    let request =
        ProgramRequestRepr { port: 40, bits: 96, id: [0xab; 32], ..ProgramRequestRepr::new(ProgramKind::Load) };
    let bytes = [&[1, 15, 0, 0, 0, 40, 0, 96][..], &[0xab; 32], &[0; 16]].concat();
    assert_eq!(request.emit()[..], bytes);
    assert_eq!(ProgramRequestRepr::parse(&bytes), Ok(request));
    let unknown = [&[1, 17], &bytes[2..]].concat();
    assert_eq!(ProgramRequestRepr::parse(&unknown), Err(ProgramError::Kind));
}

#[test]
fn a_program_that_leaves_says_in_the_port_who_relays() {
    let relays = SPLICE_RELAYS_ON;
    let request = ProgramRequestRepr { protocol: 6, port: relays, ..ProgramRequestRepr::new(ProgramKind::Splice) };
    let bytes = [&[1, 75, 6, 0, 0, 1][..], &[0; 50]].concat();
    assert_eq!(request.emit()[..], bytes);
    assert_eq!(ProgramRequestRepr::parse(&bytes), Ok(request));
}

proptest! {
    #[test]
    fn a_request_is_read_as_it_was_written(
        kind in 1_u8..=6, protocol: u8, port: u16, bits in 0_u16..=256, id: [u8; 32], address: IpAddr,
        text in "\\PC{0,60}",
    ) {
        let kind = ProgramKind::of(kind).expect("a kind");
        // A mapped address is the other family's.
        let address = address.to_canonical();
        let request = ProgramRequestRepr { kind, protocol, port, bits, id, address, text: &text };
        let bytes = with_text(&request.emit(), &text);
        prop_assert_eq!(ProgramRequestRepr::parse(&bytes), Ok(request));
        let long = with_text(&request.emit(), &"x".repeat(PROGRAM_TEXT_MAX + 1));
        prop_assert!(ProgramRequestRepr::parse(&long).is_err());
        prop_assert!(ProgramRequestRepr::parse(&bytes[..PROGRAM_REQUEST_LEN - 1]).is_err());
    }

    #[test]
    fn a_reply_is_read_as_it_was_written(
        kind: u8, errno: u16, bits in 0_u16..=256, port: u16, id: [u8; 32], v6: Ipv6Addr, v4: [u8; 4],
        text in "\\PC{0,60}",
    ) {
        let reply = ProgramReplyRepr { kind, errno, bits, port, id, v6, v4: v4.into(), text: &text };
        let bytes = with_text(&reply.emit(), &text);
        prop_assert_eq!(ProgramReplyRepr::parse(&bytes), Ok(reply));
        prop_assert!(ProgramReplyRepr::parse(&bytes[..PROGRAM_REPLY_LEN - 1]).is_err());
    }

    /// A message with some bytes changed is either refused, or written again as it came: no byte is overlooked.
    #[test]
    fn whatever_is_read_is_written_as_it_came(
        id: [u8; 32], text in "[a-z]{0,20}", changes in proptest::collection::vec((0_usize..80, any::<u8>()), 0..4),
    ) {
        let request = ProgramRequestRepr { id, text: &text, ..ProgramRequestRepr::new(ProgramKind::Bind) };
        let (v6, v4) = (Ipv6Addr::LOCALHOST, Ipv4Addr::LOCALHOST);
        let reply = ProgramReplyRepr { kind: 3, errno: 0, bits: 96, port: 7, id, v6, v4, text: &text };
        for message in [with_text(&request.emit(), &text), with_text(&reply.emit(), &text)] {
            let mut bytes = message;
            for (at, value) in &changes {
                if let Some(byte) = bytes.get_mut(*at) {
                    *byte = *value;
                }
            }
            if let Ok(request) = ProgramRequestRepr::parse(&bytes) {
                prop_assert_eq!(&with_text(&request.emit(), request.text), &bytes);
            }
            if let Ok(reply) = ProgramReplyRepr::parse(&bytes) {
                prop_assert_eq!(with_text(&reply.emit(), reply.text), bytes);
            }
        }
    }
}
