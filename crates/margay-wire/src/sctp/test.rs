//! Literal bytes of every chunk, and what is refused.

use super::*;
use crate::header::Error;

const FIRST: [u8; 28] = [
    0x40, 0x02, 0x00, 0x19, // I-DATA, BEGIN, 25 bytes
    0x00, 0x00, 0x00, 0x09, // TSN
    0x00, 0x03, 0x00, 0x00, // stream, reserved
    0x00, 0x00, 0x00, 0x02, // MID
    0x00, 0x00, 0x00, 0x2f, // PPID
    b'h', b'e', b'l', b'l', b'o', 0, 0, 0, // and padding
];
const LAST: [u8; 24] = [
    0x40, 0x0d, 0x00, 0x16, // I-DATA, END, UNORDERED and IMMEDIATE, 22 bytes
    0xff, 0xff, 0xff, 0xff, // TSN
    0x00, 0x00, 0x00, 0x00, // stream, reserved
    0x00, 0x00, 0x00, 0x00, // MID
    0x00, 0x00, 0x00, 0x01, // FSN
    b'h', b'i', 0, 0, // and padding
];
const SACK: [u8; 24] = [
    0x03, 0x00, 0x00, 0x18, // SACK, 24 bytes
    0x00, 0x00, 0x00, 0x07, // cumulative TSN
    0x00, 0x01, 0x00, 0x00, // window
    0x00, 0x02, 0x00, 0x00, // two blocks, no duplicate
    0x00, 0x02, 0x00, 0x02, // 9
    0x00, 0x05, 0x00, 0x08, // 12 to 15
];
/// From a capture of another implementation.
const I_FORWARD_TSN: [u8; 16] =
    [0xc2, 0x00, 0x00, 0x10, 0xb8, 0x74, 0x52, 0xec, 0x00, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02];
const WATERMARK: [u8; 12] = [
    0x27, 0x01, 0x00, 0x0c, // WATERMARK that confirms, 12 bytes
    0x00, 0x00, 0x00, 0x0a, // LSN
    0x00, 0x00, 0x00, 0x14, // CSN
];

fn first() -> IDataRepr {
    IDataRepr { flags: IDataFlags::BEGIN, tsn: 9, stream: 3, mid: 2, number: 47 }
}

fn last() -> IDataRepr {
    let flags = IDataFlags::END | IDataFlags::UNORDERED | IDataFlags::IMMEDIATE;
    IDataRepr { flags, tsn: u32::MAX, stream: 0, mid: 0, number: 1 }
}

fn only(bytes: &[u8]) -> Result<Chunk<'_>, Error> {
    let mut chunks = Chunks::new(bytes);
    let chunk = chunks.next().expect("a chunk");
    assert!(chunks.next().is_none(), "one chunk");
    chunk
}

fn write(write: impl FnOnce(&mut PacketWriter<'_>) -> Result<(), NoRoom>) -> ([u8; 64], usize) {
    let mut packet = [0xee; 64];
    let mut writer = PacketWriter::new(&mut packet);
    write(&mut writer).expect("room");
    let len = writer.len();
    (packet, len)
}

#[test]
fn i_data() {
    assert_eq!(only(&FIRST), Ok(Chunk::IData(first(), b"hello")));
    assert_eq!(only(&LAST), Ok(Chunk::IData(last(), b"hi")));
    assert_eq!((first().fragment(), last().fragment()), (0, 1));
    let (packet, len) = write(|packet| packet.i_data(&first(), b"hello"));
    assert_eq!(packet[..len], FIRST);
    let (packet, len) = write(|packet| packet.i_data(&last(), b"hi"));
    assert_eq!(packet[..len], LAST);
}

#[test]
fn sack() {
    let Ok(Chunk::Sack(read)) = only(&SACK) else { panic!("a SACK") };
    let blocks = [GapBlock { start: 2, end: 2 }, GapBlock { start: 5, end: 8 }];
    assert_eq!((read.cumulative, read.window_bytes), (7, 65536));
    assert!(read.blocks().eq(blocks));
    let (packet, len) = write(|packet| packet.sack(7, 65536, blocks.into_iter()));
    assert_eq!(packet[..len], SACK);
}

#[test]
fn a_sack_has_the_blocks_that_fit() {
    let mut packet = [0; SACK_LEN + 7];
    let mut writer = PacketWriter::new(&mut packet);
    writer.sack(7, 0, [GapBlock { start: 2, end: 3 }, GapBlock { start: 5, end: 5 }].into_iter()).expect("room");
    assert_eq!(writer.len(), SACK_LEN + GAP_BLOCK_LEN);
    assert!(writer.sack(7, 0, core::iter::empty()).is_err());
    let Ok(Chunk::Sack(read)) = only(&packet[..SACK_LEN + GAP_BLOCK_LEN]) else { panic!("a SACK") };
    assert!(read.blocks().eq([GapBlock { start: 2, end: 3 }]));
}

#[test]
fn duplicates_are_passed_over() {
    let mut bytes = [0; 28];
    bytes[..24].copy_from_slice(&SACK);
    (bytes[3], bytes[15]) = (28, 1);
    let Ok(Chunk::Sack(read)) = only(&bytes) else { panic!("a SACK") };
    assert_eq!(read.blocks().count(), 2);
}

#[test]
fn i_forward_tsn() {
    let Ok(Chunk::IForwardTsn(read)) = only(&I_FORWARD_TSN) else { panic!("an I-FORWARD-TSN") };
    let skipped = SkippedRepr { stream: 1, is_unordered: false, mid: 2 };
    assert_eq!(read.cumulative, 3_094_631_148);
    assert!(read.skipped().eq([skipped]));
    let (packet, len) = write(|packet| packet.i_forward_tsn(3_094_631_148, &[skipped]));
    assert_eq!(packet[..len], I_FORWARD_TSN);
}

#[test]
fn watermark() {
    let repr = WatermarkRepr { confirms: true, lsn: 10, csn: 20 };
    assert_eq!(only(&WATERMARK), Ok(Chunk::Watermark(repr)));
    let (packet, len) = write(|packet| packet.watermark(&repr));
    assert_eq!(packet[..len], WATERMARK);
}

#[test]
fn chunks_follow_each_other_and_the_last_padding_may_be_missing() {
    let mut packet = [0; 64];
    let mut writer = PacketWriter::new(&mut packet);
    writer.watermark(&WatermarkRepr { confirms: true, lsn: 10, csn: 20 }).expect("room");
    writer.i_data(&first(), b"hello").expect("room");
    assert_eq!((writer.len(), writer.room()), (40, 24));
    let kinds = |packet| Chunks::new(packet).filter(Result::is_ok).count();
    assert_eq!(kinds(&packet[..40]), 2);
    assert_eq!(kinds(&packet[..37]), 2);
    assert_eq!(kinds(&packet[..36]), 1, "it is cut short");
}

#[test]
fn what_is_not_known_is_passed_over_or_ends_the_packet() {
    let mut packet = [0; 16];
    packet[4..].copy_from_slice(&WATERMARK);
    packet[..4].copy_from_slice(&[0x84, 0, 0, 4]);
    fn read(packet: &[u8]) -> usize {
        Chunks::new(packet).filter(Result::is_ok).count()
    }
    assert_eq!(read(&packet), 2);
    // DATA as RFC 9260 has it: nothing behind it is read.
    packet[0] = 0;
    assert_eq!(read(&packet), 1);
    assert_eq!(Chunks::new(&packet).next(), Some(Ok(Chunk::Unknown { kind: 0 })));
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |bytes: &[u8], at: usize, byte: u8| {
        let mut wrong = [0; 32];
        let wrong = &mut wrong[..bytes.len()];
        wrong.copy_from_slice(bytes);
        wrong[at] = byte;
        assert_eq!(only(wrong), Err(Error), "byte {at} as {byte:#x}");
    };
    refused(&WATERMARK, 3, 3);
    refused(&WATERMARK, 3, 8);
    refused(&WATERMARK, 3, 13);
    refused(&FIRST, 3, 20);
    refused(&LAST, 19, 0);
    refused(&SACK, 13, 1);
    refused(&SACK, 13, 3);
    refused(&SACK, 17, 0);
    refused(&SACK, 17, 3);
    refused(&I_FORWARD_TSN, 3, 15);
    refused(&I_FORWARD_TSN, 3, 7);
    assert_eq!(only(&[0x40, 0]), Err(Error));
}

#[test]
fn a_writer_refuses_what_has_no_room() {
    let mut packet = [0; 16];
    let mut writer = PacketWriter::new(&mut packet);
    assert_eq!(writer.i_data(&first(), b""), Err(NoRoom));
    assert_eq!(writer.i_data(&first(), b"hello"), Err(NoRoom));
    assert!(writer.is_empty());
    assert_eq!(writer.i_data(&first(), &[0; I_DATA_PAYLOAD_MAX + 1]), Err(NoRoom));
    let skipped = SkippedRepr { stream: 1, is_unordered: true, mid: 2 };
    assert_eq!(writer.i_forward_tsn(1, &[skipped; 2]), Err(NoRoom));
    assert_eq!(writer.i_forward_tsn(1, &[skipped; 1]), Ok(()));
}

#[test]
fn the_longest_chunk_fits_its_length_field() {
    let mut packet = [0; 65_536];
    let mut writer = PacketWriter::new(&mut packet);
    writer.i_data(&first(), &[7; I_DATA_PAYLOAD_MAX]).expect("room");
    assert_eq!(writer.len(), 65_532);
    let Ok(Chunk::IData(repr, payload)) = only(&packet[..65_532]) else { panic!("I-DATA") };
    assert_eq!((repr, payload.len()), (first(), I_DATA_PAYLOAD_MAX));
}
