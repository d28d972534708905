//! The tag by which the first segment of a connection is known again when a box has changed its addresses: a TCP option
//! of experiments (RFC 6994). It stays inside the host of the box.
//!
//! ```text
//!  0 kind 253 | 1 length 8 | 2 experiment 0x4d47 | 4 tag
//! ```

use alloc::vec::Vec;

use crate::cache::packet::{AppPacket, TCP_HEADER_LEN, build, tcp_options};

const KIND: u8 = 253;
const EXPERIMENT: [u8; 2] = *b"MG";
const LEN: u8 = 8;
/// Bytes of a TCP header with all the options that it may have.
const HEADER_MAX: usize = 60;

/// Where the option is, and its tag.
fn find(transport: &[u8]) -> Option<(usize, u32)> {
    let is_it = |(kind, at, len): &(u8, usize, usize)| {
        (*kind, *len) == (KIND, usize::from(LEN)) && transport.get(at + 2..at + 4) == Some(&EXPERIMENT)
    };
    let (_, at, _) = tcp_options(transport).find(is_it)?;
    let tag: [u8; 4] = transport.get(at + 4..at + 8)?.try_into().ok()?;
    Some((at, u32::from_be_bytes(tag)))
}

/// The tag of a segment, if it bears one.
pub(super) fn tag_of(packet: &AppPacket<'_>) -> Option<u32> {
    packet.is_tcp().then(|| find(packet.transport).map(|(_, tag)| tag)).flatten()
}

fn header_len(transport: &[u8]) -> usize {
    transport.get(12).map_or(0, |byte| usize::from(byte >> 4) * 4)
}

/// Gives a segment's header another length in bytes, a multiple of 4 of at most [`HEADER_MAX`].
fn set_header_len(transport: &mut [u8], len: usize) {
    transport[12] = transport[12] & 0x0f | ((len / 4) as u8) << 4;
}

/// The segment with a tag, before all other options. `None`: there is no room for it.
pub(super) fn with_tag(packet: &AppPacket<'_>, tag: u32) -> Option<Vec<u8>> {
    let len = header_len(packet.transport) + usize::from(LEN);
    if !packet.is_tcp() || len > HEADER_MAX || packet.transport.len() < TCP_HEADER_LEN {
        return None;
    }
    let mut transport = packet.transport.to_vec();
    let option = [KIND, LEN, EXPERIMENT[0], EXPERIMENT[1]].into_iter().chain(tag.to_be_bytes());
    transport.splice(TCP_HEADER_LEN..TCP_HEADER_LEN, option);
    set_header_len(&mut transport, len);
    build(&packet.tuple, transport, packet.class, packet.hop_limit)
}

/// The segment without its tag. `None`: it has none.
pub(super) fn without_tag(packet: &AppPacket<'_>) -> Option<Vec<u8>> {
    let (at, _) = find(packet.transport)?;
    let mut transport = packet.transport.to_vec();
    let len = header_len(&transport);
    transport.drain(at..at + usize::from(LEN));
    set_header_len(&mut transport, len - usize::from(LEN));
    build(&packet.tuple, transport, packet.class, packet.hop_limit)
}

#[cfg(test)]
mod tests {
    use core::net::SocketAddr;

    use super::*;
    use crate::cache::packet::{Parsed, parse, tcp_flags};
    use crate::types::tuple::Tuple;

    /// A SYN with options and data, as an IP packet.
    fn syn(source: &str, options: &[u8], data: &[u8]) -> Vec<u8> {
        let mut transport = alloc::vec![0; TCP_HEADER_LEN];
        transport[4..8].copy_from_slice(&7_u32.to_be_bytes());
        transport[12] = ((TCP_HEADER_LEN + options.len()) as u8 / 4) << 4;
        transport[13] = tcp_flags::SYN;
        transport.extend_from_slice(options);
        transport.extend_from_slice(data);
        let source: SocketAddr = source.parse().expect("literal");
        let mut destination = source;
        destination.set_port(80);
        transport[..2].copy_from_slice(&source.port().to_be_bytes());
        transport[2..4].copy_from_slice(&80_u16.to_be_bytes());
        build(&Tuple { protocol: 6, source, destination }, transport, 0, 64).expect("one family")
    }

    fn read(packet: &[u8]) -> AppPacket<'_> {
        match parse(packet) {
            Ok(Parsed::Transport(packet)) => packet,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_tag_comes_off_as_it_was_put_on() {
        let usual = [2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7];
        for source in ["10.0.0.1:4000", "[fd00::1]:4000"] {
            for (options, data) in [(&usual[..], &b""[..]), (&[], b"early"), (&usual, b"early")] {
                let before = syn(source, options, data);
                assert_eq!(tag_of(&read(&before)), None);
                assert_eq!(without_tag(&read(&before)), None);
                let tagged = with_tag(&read(&before), 0xfeed_0102).expect("there is room");
                assert_eq!(tagged.len(), before.len() + 8);
                let read_again = read(&tagged);
                assert_eq!(tag_of(&read_again), Some(0xfeed_0102));
                assert_eq!(&read_again.transport[20..28], [253, 8, 0x4d, 0x47, 0xfe, 0xed, 1, 2]);
                assert_eq!(without_tag(&read_again).as_deref(), Some(&before[..]));
            }
        }
    }

    #[test]
    fn a_header_that_is_full_has_no_room() {
        assert!(with_tag(&read(&syn("10.0.0.1:4000", &[1; 32], b"")), 1).is_some());
        assert!(with_tag(&read(&syn("10.0.0.1:4000", &[1; 36], b"")), 1).is_none());
        assert!(with_tag(&read(&syn("10.0.0.1:4000", &[1; 40], b"")), 1).is_none());
    }

    #[test]
    fn options_of_other_experiments_are_left_alone() {
        for other in [
            [253, 8, 0x4d, 0x48, 0, 0, 0, 1, 1, 1, 1, 1],
            // What a connection of a grant bears.
            [253, 12, 0x4d, 0x47, 0, 0, 0, 1, 1, 1, 1, 1],
            [254, 8, 0x4d, 0x47, 0, 0, 0, 1, 1, 1, 1, 1],
        ] {
            let packet = syn("10.0.0.1:4000", &other, b"");
            assert_eq!(tag_of(&read(&packet)), None);
            let tagged = with_tag(&read(&packet), 9).expect("there is room");
            assert_eq!(without_tag(&read(&tagged)).as_deref(), Some(&packet[..]));
        }
    }
}
