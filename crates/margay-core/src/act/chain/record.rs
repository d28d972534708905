//! A flow's chain in a form that leaves the core: for lists, and for the next start of the agent.
//!
//! ```text
//!  0 place (1 first, 2 left, 3 right, 4 last, 5 proxy) | 1 at | 2 boxes | 3 flags (1 a number follows, 2 a host)
//!  4 boxes, 32 each: 0 name (12) | 12 flags (1 passed, 2 left out, 4 ends, 8 added) | 13 zero (3)
//!                    16 host-ID, zero where none
//!   then, where flags say so: the number of the other half (4), the host-ID of the other end (16)
//! ```

use alloc::vec::Vec;

use margay_wire::{BOXES_MAX, BoxFlags, BoxRepr, FlowId};

use super::{Chained, Place, head_of, service_of};
use crate::types::key::HostId;
use crate::types::name::ServiceId;

const HEAD_LEN: usize = 4;
const BOX_LEN: usize = 32;
const NUMBER_LEN: usize = 4;
const HOST_LEN: usize = 16;
const HAS_NUMBER: u8 = 1;
const HAS_FAR_END: u8 = 2;
const PASSED: u8 = 1;
const LEFT_OUT: u8 = 2;
const ENDS: u8 = 4;
const ADDED: u8 = 8;

/// Where in the chain a flow is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainPlace {
    /// From the client's host to the first box.
    First,
    /// From the host before, to a box of this host.
    Left,
    /// From a box of this host, to the next host.
    Right,
    /// From the last box to the server's host.
    Last,
    /// From the host before, to a proxy of this host, at which the session ends.
    Proxy,
}

const PLACES: [(ChainPlace, u8); 5] = [
    (ChainPlace::First, 1),
    (ChainPlace::Left, 2),
    (ChainPlace::Right, 3),
    (ChainPlace::Last, 4),
    (ChainPlace::Proxy, 5),
];

/// A box of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassedBox {
    /// Its name.
    pub service: ServiceId,
    /// Where the session has passed it; `None`: it has not, or not yet.
    pub host: Option<HostId>,
    /// Nobody served it, and the session goes on without it.
    pub is_left_out: bool,
    /// It is a proxy, at which the session ends.
    pub is_end: bool,
    /// A host on the way has added it.
    pub is_added: bool,
}

/// The chain of a flow's session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainRecord {
    /// Where in it the flow is.
    pub place: ChainPlace,
    /// Of a flow at a box: which, from 0. Of the first flow: how many boxes come before the one that it asked for, such
    /// as the proxy that has begun the session. Otherwise 0.
    pub at: u8,
    /// All boxes in order.
    pub boxes: Vec<PassedBox>,
    /// Of a flow at a box that changes addresses: the session's other flow here.
    pub other_half: Option<FlowId>,
    /// Of a flow at an end of the session: the host at the other end, where that is known. Of one to a box of this
    /// host: the client's.
    pub far_end: Option<HostId>,
}

impl ChainRecord {
    pub(crate) fn of(chained: &Chained) -> Self {
        let mut hosts = chained.hosts.iter();
        let passed = |one: &BoxRepr| PassedBox {
            service: service_of(one),
            host: if one.flags.contains(BoxFlags::PASSED) { hosts.next().copied() } else { None },
            is_left_out: one.flags.contains(BoxFlags::LEFT_OUT),
            is_end: one.flags.contains(BoxFlags::ENDS),
            is_added: one.flags.contains(BoxFlags::ADDED),
        };
        let boxes: Vec<PassedBox> = chained.boxes.iter().map(passed).collect();
        let asked = || boxes.iter().position(|one| one.service == chained.asked).unwrap_or(boxes.len());
        let (place, at) = match chained.place {
            Place::First => (ChainPlace::First, asked()),
            Place::Left { at } => (ChainPlace::Left, at),
            Place::Right { at } => (ChainPlace::Right, at),
            Place::Last => (ChainPlace::Last, 0),
            Place::Proxy { at } => (ChainPlace::Proxy, at),
        };
        // A chain has eight boxes at most.
        Self { place, at: at as u8, boxes, other_half: chained.other_half, far_end: chained.far_end }
    }

    /// The name of the box of this host that the flow comes to, or leaves.
    pub fn box_here(&self) -> Option<ServiceId> {
        let is_at_box = matches!(self.place, ChainPlace::Left | ChainPlace::Right | ChainPlace::Proxy);
        self.boxes.get(usize::from(self.at)).filter(|_| is_at_box).map(|one| one.service)
    }

    /// The chain of a flow that is set up. `destination`: what its session is for.
    pub(crate) fn to_chained(&self, destination: ServiceId) -> Chained {
        let at = usize::from(self.at);
        let place = match self.place {
            ChainPlace::First => Place::First,
            ChainPlace::Left => Place::Left { at },
            ChainPlace::Right => Place::Right { at },
            ChainPlace::Last => Place::Last,
            ChainPlace::Proxy => Place::Proxy { at },
        };
        let next_passed = |from| self.boxes.iter().skip(from).find(|one| one.host.is_some());
        let asked = match self.place {
            ChainPlace::First => next_passed(at),
            ChainPlace::Right => next_passed(at + 1),
            ChainPlace::Left | ChainPlace::Proxy => self.boxes.get(at),
            ChainPlace::Last => None,
        };
        let repr = |one: &PassedBox| {
            let mut flags = BoxFlags::empty();
            flags.set(BoxFlags::PASSED, one.host.is_some());
            flags.set(BoxFlags::LEFT_OUT, one.is_left_out && one.host.is_none());
            flags.set(BoxFlags::ENDS, one.is_end);
            flags.set(BoxFlags::ADDED, one.is_added);
            BoxRepr { service: head_of(&one.service), flags, added_by: 0 }
        };
        Chained {
            asked: asked.map_or(destination, |one| one.service),
            place,
            boxes: self.boxes.iter().map(repr).collect(),
            hosts: self.boxes.iter().filter_map(|one| one.host).collect(),
            other_half: self.other_half,
            far_end: self.far_end,
            setup: None,
        }
    }

    /// Bytes of the record.
    pub(crate) fn len(&self) -> usize {
        let number = if self.other_half.is_some() { NUMBER_LEN } else { 0 };
        let host = if self.far_end.is_some() { HOST_LEN } else { 0 };
        HEAD_LEN + BOX_LEN * self.boxes.len().min(BOXES_MAX) + number + host
    }

    /// The bytes. Boxes beyond [`BOXES_MAX`] are left out; no chain has so many.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let boxes = &self.boxes[..self.boxes.len().min(BOXES_MAX)];
        let place = PLACES.iter().find(|(place, _)| *place == self.place).map_or(0, |(_, number)| *number);
        let flags = if self.other_half.is_some() { HAS_NUMBER } else { 0 };
        let flags = flags | if self.far_end.is_some() { HAS_FAR_END } else { 0 };
        let mut out = alloc::vec![place, self.at, boxes.len() as u8, flags];
        for one in boxes {
            let bits =
                [(one.host.is_some(), PASSED), (one.is_left_out, LEFT_OUT), (one.is_end, ENDS), (one.is_added, ADDED)];
            let flags = bits.iter().filter(|(is_set, _)| *is_set).fold(0, |flags, (_, bit)| flags | bit);
            out.extend_from_slice(&head_of(&one.service));
            out.extend_from_slice(&[flags, 0, 0, 0]);
            out.extend_from_slice(&one.host.map_or([0; 16], |host| host.0));
        }
        out.extend(self.other_half.into_iter().flat_map(|other| other.0.to_be_bytes()));
        out.extend(self.far_end.into_iter().flat_map(|host| host.0));
        out
    }

    /// Reads a record from the start of `bytes`; `None` where there is none.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let [place, at, count, flags] = *bytes.first_chunk::<HEAD_LEN>()?;
        let place = PLACES.iter().find(|(_, number)| *number == place)?.0;
        let count = usize::from(count);
        // A proxy may be the last box of the chain of the session that it begins.
        let at_max = if place == ChainPlace::First { count } else { count.saturating_sub(1) };
        let is_sound =
            flags <= (HAS_NUMBER | HAS_FAR_END) && (1..=BOXES_MAX).contains(&count) && usize::from(at) <= at_max;
        let (boxes, rest) = bytes[HEAD_LEN..].split_at_checked(BOX_LEN * count).filter(|_| is_sound)?;
        let boxes = boxes.chunks_exact(BOX_LEN).map(decode_box).collect::<Option<_>>()?;
        let other_half = if flags & HAS_NUMBER == 0 {
            None
        } else {
            Some(FlowId(u32::from_be_bytes(*rest.first_chunk::<NUMBER_LEN>()?)))
        };
        let rest = rest.get(if other_half.is_some() { NUMBER_LEN } else { 0 }..)?;
        let far_end = if flags & HAS_FAR_END == 0 { None } else { Some(HostId(*rest.first_chunk::<HOST_LEN>()?)) };
        Some(Self { place, at, boxes, other_half, far_end })
    }
}

fn decode_box(bytes: &[u8]) -> Option<PassedBox> {
    let (name, rest) = bytes.split_first_chunk::<12>()?;
    let (flags, host) = rest.split_first_chunk::<4>()?;
    let host: [u8; 16] = host.try_into().ok()?;
    let is_sound = flags[0] <= (PASSED | LEFT_OUT | ENDS | ADDED) && flags[1..] == [0; 3];
    let is_passed = flags[0] & PASSED != 0;
    let is_one_form = is_passed || host == [0; 16];
    let service = service_of(&BoxRepr { service: *name, flags: BoxFlags::empty(), added_by: 0 });
    let host = is_passed.then_some(HostId(host));
    let is_left_out = flags[0] & LEFT_OUT != 0;
    let is_end = flags[0] & ENDS != 0;
    let is_added = flags[0] & ADDED != 0;
    (is_sound && is_one_form).then_some(PassedBox { service, host, is_left_out, is_end, is_added })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::name::Name;

    fn one(name: &str, host: Option<u8>, is_left_out: bool) -> PassedBox {
        let service = name.parse::<Name>().expect("literal").service_id();
        PassedBox { service, host: host.map(|host| HostId([host; 16])), is_left_out, is_end: false, is_added: false }
    }

    fn record(place: ChainPlace) -> ChainRecord {
        let boxes =
            alloc::vec![one("fw.shop", Some(1), false), one("log.shop", None, true), one("ids.shop", Some(2), false)];
        ChainRecord { place, at: 0, boxes, other_half: None, far_end: None }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        for (place, _) in PLACES {
            let record = record(place);
            let bytes = record.encode();
            assert_eq!(bytes.len(), record.len());
            assert_eq!(ChainRecord::decode(&bytes), Some(record.clone()));
            assert!((0..bytes.len()).all(|len| ChainRecord::decode(&bytes[..len]).is_none()));
            let mut with_added = record.clone();
            with_added.boxes[2].is_added = true;
            let added = with_added.encode();
            assert_eq!((added[4 + 64 + 12], ChainRecord::decode(&added)), (PASSED | ADDED, Some(with_added)));
            let rewritten = ChainRecord { other_half: Some(FlowId(0x0102_0304)), ..record.clone() };
            let with_number = rewritten.encode();
            assert_eq!((with_number.len(), &with_number[bytes.len()..]), (rewritten.len(), &[1, 2, 3, 4][..]));
            assert_eq!(ChainRecord::decode(&with_number), Some(rewritten));
            assert!((0..with_number.len()).all(|len| ChainRecord::decode(&with_number[..len]).is_none()));
            for other_half in [None, Some(FlowId(7))] {
                let of_end = ChainRecord { other_half, far_end: Some(HostId([9; 16])), ..record.clone() };
                let with_host = of_end.encode();
                assert_eq!(with_host.len(), of_end.len());
                assert_eq!(ChainRecord::decode(&with_host), Some(of_end));
            }
            for (at, value) in
                [(0, 0), (0, 6), (1, 4), (2, 0), (2, 9), (3, 4), (3, 2), (3, 1), (16, 16), (17, 1), (48 + 16, 1)]
            {
                let mut other = bytes.clone();
                other[at] = value;
                assert_ne!(ChainRecord::decode(&other), Some(record.clone()), "byte {at}");
            }
        }
    }

    #[test]
    fn a_flow_that_is_taken_up_again_knows_what_it_asked_for() {
        let web = "web.shop".parse::<Name>().expect("literal").service_id();
        let [fw, ids] = ["fw.shop", "ids.shop"].map(|name| name.parse::<Name>().expect("literal").service_id());
        for (place, asked) in [
            (ChainPlace::First, fw),
            (ChainPlace::Left, fw),
            (ChainPlace::Right, ids),
            (ChainPlace::Last, web),
            (ChainPlace::Proxy, fw),
        ] {
            let chained = record(place).to_chained(web);
            assert_eq!(chained.asked, asked, "{place:?}");
            let is_at_box = matches!(place, ChainPlace::Left | ChainPlace::Right | ChainPlace::Proxy);
            assert_eq!(record(place).box_here(), is_at_box.then_some(fw), "{place:?}");
            assert_eq!(ChainRecord::of(&chained), record(place));
        }
    }
    #[test]
    fn a_session_that_a_proxy_has_begun_asks_for_what_comes_after_it() {
        let web = "web.shop".parse::<Name>().expect("literal").service_id();
        let proxy = one("lb.shop", Some(1), false);
        let last = PassedBox { is_end: true, ..one("cache.shop", Some(2), false) };
        for (at, boxes, asked) in [
            (1, alloc::vec![proxy], web),
            (1, alloc::vec![proxy, last], last.service),
            (0, alloc::vec![last], last.service),
        ] {
            let record = ChainRecord { place: ChainPlace::First, at, boxes, other_half: None, far_end: None };
            assert_eq!(ChainRecord::decode(&record.encode()), Some(record.clone()));
            let chained = record.to_chained(web);
            assert_eq!(chained.asked, asked, "{record:?}");
            assert_eq!(ChainRecord::of(&chained), record);
        }
    }
}
