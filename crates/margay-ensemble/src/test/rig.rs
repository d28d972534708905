//! A switch with a plug-in that does what the frames say, and short words for packets.

use alloc::borrow::Cow;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use margay_core::Instant;
use margay_wire::sctp::{Chunk, Chunks, GapBlock, IDataFlags, IDataRepr, PacketWriter, WatermarkRepr};

use crate::{
    Config, Event, Failure, Frame, Joining, Kind, Lsn, MemberId, Members, Packet, Plugin, Switch, To, Verdict,
};

/// A frame's first byte says which member it goes to, `A` for the one that joined first, and to the first that takes
/// frames where that one does not; `!` drops it. The second byte: `s` is safe to repeat, `p` pins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Script {
    pub joined: Vec<MemberId>,
    pub gone: Vec<MemberId>,
    pub retired: Vec<u64>,
    /// Who answers for what is not safe.
    pub refuser: Option<MemberId>,
    pub asked: u64,
    pub owing: bool,
    pub lengthens: bool,
}

impl Script {
    fn change(&self, frame: &mut Frame<'_>, rtx: u64) {
        if self.lengthens {
            frame.payload.to_mut().push(rtx as u8);
        }
    }
}

impl Plugin for Script {
    fn add_member(&mut self, member: MemberId) {
        self.joined.push(member);
    }

    fn remove_member(&mut self, member: MemberId) {
        self.gone.push(member);
    }

    fn may_go(&self, _: MemberId) -> bool {
        !self.owing
    }

    fn redirect(&mut self, frame: &mut Frame<'_>, members: &Members, rtx: &mut u64) -> Verdict {
        self.asked += 1;
        *rtx = self.asked;
        if frame.payload[0] == b'!' {
            return Verdict::Drop;
        }
        let wanted = self.joined.get(usize::from(frame.payload[0].wrapping_sub(b'A'))).copied();
        let named = wanted.filter(|id| members.is_active(*id)).or(members.active().next());
        let (is_safe, pins) = (frame.payload.get(1) == Some(&b's'), frame.payload.get(1) == Some(&b'p'));
        self.change(frame, *rtx);
        named.map_or(Verdict::Drop, |member| Verdict::To { member, is_safe, pins })
    }

    fn again(&mut self, frame: &mut Frame<'_>, rtx: &mut u64) {
        self.change(frame, *rtx);
    }

    fn refuse(&mut self, frame: &mut Frame<'_>, _: &Members, _: &mut u64) -> Option<MemberId> {
        frame.payload = Cow::Owned(b"refused".to_vec());
        self.refuser
    }

    fn retire(&mut self, rtx: u64) {
        self.retired.push(rtx);
    }
}

pub struct Rig {
    pub switch: Switch<Script>,
    pub now: Instant,
}

/// A whole frame.
pub fn whole(tsn: u32) -> IDataRepr {
    IDataRepr { flags: IDataFlags::BEGIN | IDataFlags::END, tsn, stream: 0, mid: tsn, number: 0 }
}

/// A whole frame without order.
pub fn free(tsn: u32) -> IDataRepr {
    IDataRepr { flags: IDataFlags::BEGIN | IDataFlags::END | IDataFlags::UNORDERED, ..whole(tsn) }
}

/// A whole frame of a stream.
pub fn of_stream(tsn: u32, stream: u16, mid: u32) -> IDataRepr {
    IDataRepr { stream, mid, ..whole(tsn) }
}

/// A fragment of the frame `mid` in order per member; which one, and whether it is the last.
pub fn fragment(tsn: u32, mid: u32, at: u32, is_last: bool) -> IDataRepr {
    let mut flags = IDataFlags::empty();
    flags.set(IDataFlags::BEGIN, at == 0);
    flags.set(IDataFlags::END, is_last);
    IDataRepr { flags, tsn, stream: 0, mid, number: at }
}

pub fn packet(write: impl FnOnce(&mut PacketWriter<'_>)) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let mut writer = PacketWriter::new(&mut bytes);
    write(&mut writer);
    let len = writer.len();
    bytes.truncate(len);
    bytes
}

pub fn data(repr: &IDataRepr, payload: &[u8]) -> Vec<u8> {
    packet(|packet| packet.i_data(repr, payload).expect("room"))
}

pub fn sack(cumulative: u32, blocks: &[(u16, u16)]) -> Vec<u8> {
    let blocks = blocks.iter().map(|(start, end)| GapBlock { start: *start, end: *end });
    packet(|packet| packet.sack(cumulative, 5000, blocks).expect("room"))
}

/// A packet in words: `mark 1<5` (up to LSN 1, before CSN 5), `data 3.0#7 A` (TSN, stream, MID, payload; `~` without
/// order), `sack 4 2-3`, `forward 5 0#2`.
fn words(bytes: &[u8]) -> String {
    let mut words = Vec::new();
    for chunk in Chunks::new(bytes) {
        words.push(match chunk.expect("sound") {
            Chunk::Watermark(mark) => format!("mark {}<{}", mark.lsn, mark.csn),
            Chunk::IData(repr, payload) => {
                let order = if repr.is_unordered() { "~" } else { "" };
                let text = String::from_utf8_lossy(payload);
                format!("data {}.{order}{}#{} {text}", repr.tsn, repr.stream, repr.mid)
            }
            Chunk::Sack(sack) => {
                let blocks = sack.blocks().map(|block| format!(" {}-{}", block.start, block.end));
                format!("sack {}{}", sack.cumulative, blocks.collect::<String>())
            }
            Chunk::IForwardTsn(forward) => {
                let skipped = forward.skipped().map(|skipped| {
                    format!(" {}{}#{}", if skipped.is_unordered { "~" } else { "" }, skipped.stream, skipped.mid)
                });
                format!("forward {}{}", forward.cumulative, skipped.collect::<String>())
            }
            Chunk::Unknown { kind } => format!("unknown {kind}"),
        });
    }
    words.join(", ")
}

impl Rig {
    pub fn new(config: Config) -> Self {
        Self { switch: Switch::new(config, Script::default(), 64_000), now: Instant::from_millis(1) }
    }

    /// Two members of a kind, all numbers from 0 on.
    pub fn two(kind: Kind) -> (Self, [MemberId; 2]) {
        let mut rig = Self::new(Config::default());
        let members = [rig.join(kind), rig.join(kind)];
        (rig, members)
    }

    pub fn join(&mut self, kind: Kind) -> MemberId {
        let joining = Joining { kind, to_member: Lsn(0), from_member: Lsn(0), window_bytes: 9000 };
        self.switch.join(&joining).expect("a place")
    }

    pub fn peer(&mut self, packet: &[u8]) -> Result<(), Failure> {
        self.switch.from_peer(self.now, packet)
    }

    /// The peer sends a frame.
    pub fn send(&mut self, repr: &IDataRepr, payload: &str) {
        self.peer(&data(repr, payload.as_bytes())).expect("the connection lives");
    }

    pub fn member(&mut self, id: MemberId, packet: &[u8]) {
        self.switch.from_member(self.now, id, packet).expect("the connection lives");
    }

    /// A member says up to where it has been told what is complete.
    pub fn confirm(&mut self, id: MemberId, lsn: u32, csn: u32) {
        let mark = WatermarkRepr { confirms: true, lsn, csn };
        self.member(id, &packet(|packet| packet.watermark(&mark).expect("room")));
    }

    pub fn wait(&mut self, millis: u64) {
        self.now += core::time::Duration::from_millis(millis);
        self.switch.on_time(self.now);
    }

    /// What the switch has sent, in words.
    pub fn sent(&mut self) -> Vec<(To, String)> {
        core::iter::from_fn(|| self.switch.poll_packet()).map(|Packet { to, bytes }| (to, words(&bytes))).collect()
    }

    /// What was sent to one of them; the rest is forgotten.
    pub fn sent_to(&mut self, to: To) -> Vec<String> {
        self.sent().into_iter().filter(|(other, _)| *other == to).map(|(_, words)| words).collect()
    }

    pub fn events(&mut self) -> Vec<Event> {
        core::iter::from_fn(|| self.switch.poll_event()).collect()
    }
}
