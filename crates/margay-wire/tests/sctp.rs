//! Packets of chunks in SCTP's format: any that is written is read as the same, and no bytes whatever do harm.

use margay_wire::sctp::{Chunk, Chunks, GapBlock, IDataFlags, IDataRepr, PacketWriter, SkippedRepr, WatermarkRepr};
use proptest::collection::vec;
use proptest::prelude::*;

/// A chunk with what it points to.
#[derive(Clone, Debug, PartialEq)]
enum Owned {
    IData(IDataRepr, Vec<u8>),
    Sack(u32, u32, Vec<GapBlock>),
    IForwardTsn(u32, Vec<SkippedRepr>),
    Watermark(WatermarkRepr),
    Unknown(u8),
}

impl From<Chunk<'_>> for Owned {
    fn from(chunk: Chunk<'_>) -> Self {
        match chunk {
            Chunk::IData(repr, payload) => Self::IData(repr, payload.to_vec()),
            Chunk::Sack(sack) => Self::Sack(sack.cumulative, sack.window_bytes, sack.blocks().collect()),
            Chunk::IForwardTsn(forward) => Self::IForwardTsn(forward.cumulative, forward.skipped().collect()),
            Chunk::Watermark(repr) => Self::Watermark(repr),
            Chunk::Unknown { kind } => Self::Unknown(kind),
        }
    }
}

impl Owned {
    fn write(&self, packet: &mut PacketWriter<'_>) {
        let written = match self {
            Self::IData(repr, payload) => packet.i_data(repr, payload),
            Self::Sack(cumulative, window, blocks) => packet.sack(*cumulative, *window, blocks.iter().copied()),
            Self::IForwardTsn(cumulative, skipped) => packet.i_forward_tsn(*cumulative, skipped),
            Self::Watermark(repr) => packet.watermark(repr),
            Self::Unknown(_) => Ok(()),
        };
        written.expect("the packet is as long as all of them");
    }
}

fn i_data() -> impl Strategy<Value = Owned> {
    let parts = (0..16_u8, any::<(u32, u16, u32)>(), 1..=u32::MAX, vec(any::<u8>(), 1..200));
    parts.prop_map(|(flags, (tsn, stream, mid), number, payload)| {
        let flags = IDataFlags::from_bits_truncate(flags);
        Owned::IData(IDataRepr { flags, tsn, stream, mid, number }, payload)
    })
}

fn sack() -> impl Strategy<Value = Owned> {
    let block = (1..=u16::MAX, 1..=u16::MAX).prop_map(|(a, b)| GapBlock { start: a.min(b), end: a.max(b) });
    (any::<(u32, u32)>(), vec(block, 0..20)).prop_map(|((tsn, window), blocks)| Owned::Sack(tsn, window, blocks))
}

fn chunk() -> impl Strategy<Value = Owned> {
    let skipped =
        any::<(u16, bool, u32)>().prop_map(|(stream, is_unordered, mid)| SkippedRepr { stream, is_unordered, mid });
    let forward = (any::<u32>(), vec(skipped, 0..20)).prop_map(|(tsn, skipped)| Owned::IForwardTsn(tsn, skipped));
    let watermark = any::<(bool, u32, u32)>()
        .prop_map(|(confirms, lsn, csn)| Owned::Watermark(WatermarkRepr { confirms, lsn, csn }));
    prop_oneof![i_data(), sack(), forward, watermark]
}

fn written(chunks: &[Owned]) -> Vec<u8> {
    let mut packet = vec![0xee; 1 << 14];
    let mut writer = PacketWriter::new(&mut packet);
    chunks.iter().for_each(|chunk| chunk.write(&mut writer));
    let len = writer.len();
    packet.truncate(len);
    packet
}

/// Reads any bytes; what is taken is the same when it is written and read again. Gives how many chunks were taken.
fn check(bytes: &[u8]) -> usize {
    let taken: Vec<Owned> = Chunks::new(bytes).filter_map(Result::ok).map(Owned::from).collect();
    let known: Vec<Owned> = taken.iter().filter(|chunk| !matches!(chunk, Owned::Unknown(_))).cloned().collect();
    let again: Vec<Owned> = Chunks::new(&written(&known)).map(|chunk| chunk.expect("sound").into()).collect();
    assert_eq!(again, known);
    taken.len()
}

proptest! {
    #[test]
    fn what_is_written_is_read(chunks in vec(chunk(), 0..8)) {
        let packet = written(&chunks);
        prop_assert!(packet.len().is_multiple_of(4));
        let read: Vec<Owned> = Chunks::new(&packet).map(|chunk| chunk.expect("sound").into()).collect();
        prop_assert_eq!(read, chunks);
    }

    #[test]
    fn a_packet_that_is_cut_short_has_its_first_chunks(chunks in vec(chunk(), 1..6), left in 0..2000_usize) {
        let packet = written(&chunks);
        let left = left % packet.len();
        let read: Vec<Owned> = Chunks::new(&packet[..left]).filter_map(Result::ok).map(Owned::from).collect();
        prop_assert!(chunks.starts_with(&read));
        prop_assert!(read.len() <= chunks.len());
    }

    #[test]
    fn mistakes_do_no_harm(
        chunks in vec(chunk(), 1..6),
        mistakes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut packet = written(&chunks);
        for (at, byte) in mistakes {
            let at = at.index(packet.len());
            packet[at] = byte;
        }
        check(&packet);
        check(&packet[..cut.index(packet.len())]);
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..300)) {
        check(&bytes);
    }
}

#[test]
fn the_check_reads_chunks() {
    let chunks = [Owned::Sack(7, 8, vec![GapBlock { start: 2, end: 3 }]), Owned::IForwardTsn(9, Vec::new())];
    assert_eq!(check(&written(&chunks)), 2);
}
