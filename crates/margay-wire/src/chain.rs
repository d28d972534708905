//! CHAIN: the boxes that a session goes through, and who vouches for it (docs/decisions/0074).
//!
//! In a SYN: what the initiator's host has signed, and how far the SYN has come. In a SYN-ACK: the same boxes as the
//! last host has had them, and what that host has signed.
//!
//! In a SYN with boxes that hosts on the way have added, each of them says who has (docs/decisions/0108). Such a SYN
//! has CHAIN_ADDED in the place of CHAIN, with a value of the same form: hosts that know nothing of added boxes refuse
//! it as they refuse every critical extension that they do not know.

use crate::header::Error;

/// Boxes of a chain.
pub const BOXES_MAX: usize = 8;
/// Bytes of CHAIN's value before the boxes.
const HEAD_LEN: usize = 140;
const BOX_LEN: usize = 16;
const HOST_LEN: usize = 16;
/// Most certificates that may be those of CERTIFICATE.
const SHARED_MAX: u8 = 3;

mod field {
    use core::ops::Range;

    pub const KIND: usize = 0;
    pub const BOXES: usize = 1;
    pub const SHARED: usize = 2;
    pub const FAILED_AT: usize = 3;
    pub const DESTINATION: Range<usize> = 4..36;
    pub const TIME_S: Range<usize> = 36..44;
    pub const HOST_KEY: Range<usize> = 44..76;
    pub const SIGNATURE: Range<usize> = 76..140;

    /// Of a box.
    pub const SERVICE: Range<usize> = 0..12;
    pub const FLAGS: usize = 12;
    pub const ADDED_BY: usize = 13;
    pub const RESERVED: Range<usize> = 14..16;
}

bitflags::bitflags! {
    /// What is said of a box, and what has become of it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct BoxFlags: u8 {
        /// Where nobody serves it, the session goes on without it.
        const MAY_BE_LEFT_OUT = 0x01;
        /// A host on the way has added it: the initiator's host has not signed it.
        const ADDED = 0x02;
        /// Nobody serves it, and the session has gone on without it.
        const LEFT_OUT = 0x04;
        /// The SYN has passed it.
        const PASSED = 0x08;
        /// It is a proxy, at which the session ends: the last box of the chain.
        const ENDS = 0x10;
    }
}

/// One box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoxRepr {
    /// The first 96 bits of its name; the others are zero.
    pub service: [u8; 12],
    /// What is said of it.
    pub flags: BoxFlags,
    /// In a SYN, of a box that was added: by the host of which box, from 1. Otherwise 0.
    pub added_by: u8,
}

impl BoxRepr {
    /// Whether the SYN is still to pass it.
    pub const fn is_ahead(&self) -> bool {
        !self.flags.intersects(BoxFlags::LEFT_OUT.union(BoxFlags::PASSED))
    }

    fn parse(value: &[u8; BOX_LEN]) -> Result<Self, Error> {
        let mut service = [0; 12];
        service.copy_from_slice(&value[field::SERVICE]);
        let flags = BoxFlags::from_bits(value[field::FLAGS]).ok_or(Error)?;
        let is_both = flags.contains(BoxFlags::LEFT_OUT | BoxFlags::PASSED);
        let is_reserved_zero = value[field::RESERVED].iter().all(|byte| *byte == 0);
        let added_by = value[field::ADDED_BY];
        if is_both || !is_reserved_zero { Err(Error) } else { Ok(Self { service, flags, added_by }) }
    }

    fn emit(&self, value: &mut [u8]) {
        value[field::SERVICE].copy_from_slice(&self.service);
        value[field::FLAGS] = self.flags.bits();
        value[field::ADDED_BY] = self.added_by;
    }
}

/// CHAIN before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainRepr<'a> {
    /// Whether it answers a SYN's.
    pub is_answer: bool,
    /// So many certificates of an answer are the first ones of CERTIFICATE, at most 3.
    pub shared: u8,
    /// In a refusal: the box that it is about, from 1; 0: none.
    pub failed_at: u8,
    /// The name that the session is for.
    pub destination: [u8; 32],
    /// When the initiator's host signed, in seconds since 1970; zero in an answer.
    pub time_s: u64,
    /// Of the host that signed; zero in a refusal.
    pub host_key: [u8; 32],
    /// By that host; zero in a refusal.
    pub signature: [u8; 64],
    /// All boxes in order, at least one and at most [`BOXES_MAX`]: those that are still ahead come last.
    pub boxes: &'a [BoxRepr],
    /// The hosts of the boxes that the SYN has passed, in order.
    pub hosts: &'a [[u8; 16]],
    /// The certificates of the host that signed, as in CERTIFICATE; empty where there are none, or none besides the
    /// shared ones.
    pub certificates: &'a [u8],
}

impl ChainRepr<'_> {
    /// Bytes of the value.
    pub const fn value_len(&self) -> usize {
        HEAD_LEN + BOX_LEN * self.boxes.len() + HOST_LEN * self.hosts.len() + self.certificates.len()
    }

    /// Writes the value, [`value_len`](Self::value_len) bytes, at the start of `out`.
    ///
    /// # Errors
    ///
    /// `out` is too short, or no reader would take the value.
    pub fn emit<'o>(&self, out: &'o mut [u8]) -> Result<Chain<'o>, Error> {
        let value = out.get_mut(..self.value_len()).ok_or(Error)?;
        value.fill(0);
        value[field::KIND] = u8::from(self.is_answer);
        value[field::BOXES] = u8::try_from(self.boxes.len()).map_err(|_| Error)?;
        value[field::SHARED] = self.shared;
        value[field::FAILED_AT] = self.failed_at;
        value[field::DESTINATION].copy_from_slice(&self.destination);
        value[field::TIME_S].copy_from_slice(&self.time_s.to_be_bytes());
        value[field::HOST_KEY].copy_from_slice(&self.host_key);
        value[field::SIGNATURE].copy_from_slice(&self.signature);
        let (boxes, rest) = value[HEAD_LEN..].split_at_mut(BOX_LEN * self.boxes.len());
        let (hosts, certificates) = rest.split_at_mut(HOST_LEN * self.hosts.len());
        self.boxes.iter().zip(boxes.chunks_exact_mut(BOX_LEN)).for_each(|(one, place)| one.emit(place));
        self.hosts.iter().zip(hosts.chunks_exact_mut(HOST_LEN)).for_each(|(host, place)| place.copy_from_slice(host));
        certificates.copy_from_slice(self.certificates);
        Chain::parse(value)
    }
}

/// The value of CHAIN, checked: no accessor fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain<'a>(&'a [u8]);

impl<'a> Chain<'a> {
    /// Around the value of an extension.
    ///
    /// # Errors
    ///
    /// Too short; no box or too many; one ahead before one that is not, or after one that ends the session; not a host
    /// for each box that was passed; one that was added by nobody who could, or stands elsewhere than behind who has
    /// added it; a reserved bit is set.
    pub fn parse(value: &'a [u8]) -> Result<Self, Error> {
        let head = value.get(..HEAD_LEN).ok_or(Error)?;
        let count = usize::from(head[field::BOXES]);
        let is_sound = head[field::KIND] <= 1
            && (1..=BOXES_MAX).contains(&count)
            && head[field::SHARED] <= SHARED_MAX
            && usize::from(head[field::FAILED_AT]) <= count;
        let boxes = value.get(HEAD_LEN..HEAD_LEN + BOX_LEN * count).filter(|_| is_sound).ok_or(Error)?;
        let mut passed = 0;
        let mut was_ahead = false;
        let mut has_ended = false;
        // The box behind which the added ones stand that come now, from 1, and the boxes that were passed, as bits.
        let mut behind = 0;
        let mut passed_bits = 0_u16;
        for (number, one) in (1_u8..).zip(boxes.chunks_exact(BOX_LEN)) {
            let one = BoxRepr::parse(one.try_into().map_err(|_| Error)?)?;
            if was_ahead && !one.is_ahead() || has_ended {
                return Err(Error);
            }
            let is_added = one.flags.contains(BoxFlags::ADDED);
            // A SYN says who has added a box, an answer does not. Between the two are boxes that were added, too.
            let can_have = || (behind..number).contains(&one.added_by) && passed_bits & 1 << one.added_by != 0;
            let names_adder = one.added_by != 0;
            if names_adder != (is_added && head[field::KIND] == 0) || names_adder && !can_have() {
                return Err(Error);
            }
            behind = if is_added { behind } else { number };
            passed_bits |= u16::from(one.flags.contains(BoxFlags::PASSED)) << number;
            has_ended = one.flags.contains(BoxFlags::ENDS);
            was_ahead = one.is_ahead();
            passed += usize::from(one.flags.contains(BoxFlags::PASSED));
        }
        let whole_len = HEAD_LEN + BOX_LEN * count + HOST_LEN * passed;
        if value.len() < whole_len { Err(Error) } else { Ok(Self(value)) }
    }

    /// The value.
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.0
    }

    /// Whether it is a SYN's in which some box says who has added it: the value of CHAIN_ADDED, and none of CHAIN.
    pub fn names_adders(&self) -> bool {
        self.boxes().any(|one| one.added_by != 0)
    }

    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[at..at + N]);
        bytes
    }

    /// Whether it answers a SYN's.
    pub const fn is_answer(&self) -> bool {
        self.0[field::KIND] == 1
    }

    /// So many certificates are the first ones of CERTIFICATE.
    pub const fn shared(&self) -> u8 {
        self.0[field::SHARED]
    }

    /// The box that a refusal is about, from 1; 0: none.
    pub const fn failed_at(&self) -> u8 {
        self.0[field::FAILED_AT]
    }

    /// The name that the session is for.
    pub fn destination(&self) -> [u8; 32] {
        self.array(field::DESTINATION.start)
    }

    /// When the initiator's host signed, in seconds since 1970.
    pub fn time_s(&self) -> u64 {
        u64::from_be_bytes(self.array(field::TIME_S.start))
    }

    /// Of the host that signed.
    pub fn host_key(&self) -> [u8; 32] {
        self.array(field::HOST_KEY.start)
    }

    /// By that host.
    pub fn signature(&self) -> [u8; 64] {
        self.array(field::SIGNATURE.start)
    }

    fn boxes_end(&self) -> usize {
        HEAD_LEN + BOX_LEN * usize::from(self.0[field::BOXES])
    }

    /// All boxes in order.
    pub fn boxes(&self) -> impl Iterator<Item = BoxRepr> + use<'a> {
        let boxes = self.0[HEAD_LEN..self.boxes_end()].chunks_exact(BOX_LEN);
        // Each was read once already.
        boxes.filter_map(|one| one.try_into().ok().and_then(|one| BoxRepr::parse(one).ok()))
    }

    fn hosts_end(&self) -> usize {
        let passed = self.boxes().filter(|one| one.flags.contains(BoxFlags::PASSED)).count();
        self.boxes_end() + HOST_LEN * passed
    }

    /// The hosts of the boxes that the SYN has passed, in order.
    pub fn hosts(&self) -> impl Iterator<Item = [u8; 16]> + use<'a> {
        let hosts = self.0[self.boxes_end()..self.hosts_end()].chunks_exact(HOST_LEN);
        hosts.filter_map(|host| host.try_into().ok())
    }

    /// The certificates of the host that signed, as in CERTIFICATE.
    pub fn certificates(&self) -> &'a [u8] {
        &self.0[self.hosts_end()..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AHEAD: BoxFlags = BoxFlags::MAY_BE_LEFT_OUT;

    fn one(number: u8, flags: BoxFlags) -> BoxRepr {
        BoxRepr { service: [number; 12], flags, added_by: 0 }
    }

    fn added(number: u8, flags: BoxFlags, added_by: u8) -> BoxRepr {
        BoxRepr { added_by, ..one(number, flags | BoxFlags::ADDED) }
    }

    fn chain<'a>(boxes: &'a [BoxRepr], hosts: &'a [[u8; 16]]) -> ChainRepr<'a> {
        ChainRepr {
            is_answer: false,
            shared: 0,
            failed_at: 0,
            destination: [1; 32],
            time_s: 0x0102_0304_0506_0708,
            host_key: [2; 32],
            signature: [3; 64],
            boxes,
            hosts,
            certificates: &[9; 7],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let boxes =
            [one(1, BoxFlags::PASSED), added(2, BoxFlags::LEFT_OUT | AHEAD, 1), added(3, AHEAD, 1), one(4, AHEAD)];
        let hosts = [[7; 16]];
        let written = ChainRepr { failed_at: 4, ..chain(&boxes, &hosts) };
        let mut buf = [0xee; 512];
        let read = written.emit(&mut buf).expect("sound");
        assert_eq!(read.as_bytes().len(), written.value_len());
        assert!(!read.is_answer());
        assert_eq!((read.shared(), read.failed_at()), (0, 4));
        assert_eq!((read.destination(), read.time_s()), (written.destination, written.time_s));
        assert_eq!((read.host_key(), read.signature()), (written.host_key, written.signature));
        assert!(read.boxes().eq(boxes) && read.hosts().eq(hosts));
        assert_eq!(read.certificates(), written.certificates);
    }

    #[test]
    fn a_chain_that_says_two_things_is_none() {
        let mut buf = [0; 512];
        let ahead = one(1, AHEAD);
        let passed = one(2, BoxFlags::PASSED);
        let host = [[7; 16]];
        assert!(chain(&[passed, ahead], &host).emit(&mut buf).is_ok());
        assert!(chain(&[], &[]).emit(&mut buf).is_err(), "no box");
        assert!(chain(&[ahead; BOXES_MAX], &[]).emit(&mut buf).is_ok());
        assert!(chain(&[ahead; BOXES_MAX + 1], &[]).emit(&mut buf).is_err(), "nine boxes");
        assert!(chain(&[ahead, passed], &host).emit(&mut buf).is_err(), "passed before one that is ahead of it");
        assert!(chain(&[one(1, BoxFlags::PASSED | BoxFlags::LEFT_OUT)], &host).emit(&mut buf).is_err(), "both");
        let proxy = one(3, BoxFlags::ENDS);
        assert!(chain(&[passed, proxy], &host).emit(&mut buf).is_ok());
        assert!(chain(&[proxy, ahead], &[]).emit(&mut buf).is_err(), "one after the session's end");
        let was_passed = [passed];
        let without_host = ChainRepr { certificates: &[], ..chain(&was_passed, &[]) };
        assert!(without_host.emit(&mut buf).is_err(), "passed where?");
        assert!(ChainRepr { shared: 4, ..chain(&[ahead], &[]) }.emit(&mut buf).is_err(), "chains have three");
        assert!(ChainRepr { failed_at: 2, ..chain(&[ahead], &[]) }.emit(&mut buf).is_err(), "there is one");
        assert!(chain(&[ahead], &[]).emit(&mut buf[..100]).is_err(), "no room");
    }

    #[test]
    fn a_box_says_who_has_added_it() {
        let mut buf = [0xee; 512];
        let hosts = [[7; 16], [8; 16]];
        let passed = one(1, BoxFlags::PASSED);
        let boxes = [passed, added(2, BoxFlags::PASSED, 1), added(3, AHEAD, 2), added(4, BoxFlags::empty(), 1)];
        let read = chain(&boxes, &hosts).emit(&mut buf).expect("sound");
        assert!(read.names_adders() && read.boxes().eq(boxes));
        // The name, the flags, who has added it, zero.
        let literal = [
            [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0x08, 0, 0, 0],
            [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0x0a, 1, 0, 0],
            [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0x03, 2, 0, 0],
            [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 0x02, 1, 0, 0],
        ];
        assert_eq!(read.as_bytes()[HEAD_LEN..HEAD_LEN + 4 * BOX_LEN], literal.concat());
        let mut is_read = |boxes: &[BoxRepr], is_answer: bool| {
            let passed = boxes.iter().filter(|one| one.flags.contains(BoxFlags::PASSED)).count();
            ChainRepr { is_answer, ..chain(boxes, &hosts[..passed]) }.emit(&mut buf).is_ok()
        };
        let none = BoxFlags::empty();
        assert!(!is_read(&[passed, one(2, BoxFlags::ADDED)], false), "by nobody");
        assert!(is_read(&[passed, one(2, BoxFlags::ADDED)], true), "an answer does not say");
        assert!(!is_read(&[passed, added(2, none, 1)], true), "an answer says");
        assert!(!is_read(&[passed, BoxRepr { added_by: 1, ..one(2, none) }], false), "it was not added");
        for (boxes, why) in [
            (&[passed, added(2, none, 2)][..], "by itself"),
            (&[passed, added(2, none, 3), one(3, none)], "by a later one"),
            (&[passed, added(2, none, 0xff)], "by none of them"),
            (&[one(1, none), added(2, none, 1)], "by one that was not passed"),
            (&[passed, one(2, AHEAD | BoxFlags::LEFT_OUT), added(3, none, 2)], "by one that was left out"),
            (&[passed, one(2, none), added(3, none, 1)], "not behind who has added it"),
        ] {
            assert!(!is_read(boxes, false), "{why}");
        }
    }

    #[test]
    fn reserved_bits_are_zero() {
        let mut buf = [0; 512];
        let len = chain(&[one(1, AHEAD)], &[]).emit(&mut buf).expect("sound").as_bytes().len();
        for (at, value) in [(0, 2), (HEAD_LEN + 12, 0x20), (HEAD_LEN + 14, 1), (HEAD_LEN + 15, 1)] {
            let mut other = buf;
            other[at] = value;
            assert!(Chain::parse(&other[..len]).is_err(), "byte {at}");
        }
        assert!((0..HEAD_LEN + BOX_LEN).all(|len| Chain::parse(&buf[..len]).is_err()));
    }
}
