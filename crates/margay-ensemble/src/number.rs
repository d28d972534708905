//! Sequence numbers that wrap, and rows of things that have consecutive ones.

use alloc::collections::VecDeque;
use core::fmt;
use core::marker::PhantomData;

/// A number of 32 bits that wraps (RFC 1982). Of two, one is before the other as long as they are less than 2^31 apart.
pub trait Serial: Copy + PartialEq {
    /// From the bits on the wire.
    fn from_bits(bits: u32) -> Self;
    /// As on the wire.
    fn bits(self) -> u32;

    /// The number that is `steps` later.
    fn plus(self, steps: u32) -> Self {
        Self::from_bits(self.bits().wrapping_add(steps))
    }

    /// The number before.
    fn previous(self) -> Self {
        Self::from_bits(self.bits().wrapping_sub(1))
    }

    /// Steps from `earlier` to `self`.
    fn since(self, earlier: Self) -> u32 {
        self.bits().wrapping_sub(earlier.bits())
    }

    /// Whether `self` is before `other`.
    fn is_before(self, other: Self) -> bool {
        other.since(self).wrapping_sub(1) < (1 << 31) - 1
    }

    /// The later of the two.
    fn later(self, other: Self) -> Self {
        if self.is_before(other) { other } else { self }
    }

    /// The earlier of the two.
    fn earlier(self, other: Self) -> Self {
        if other.is_before(self) { other } else { self }
    }
}

macro_rules! serial {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
            pub struct $name(pub u32);

            impl Serial for $name {
                fn from_bits(bits: u32) -> Self {
                    Self(bits)
                }

                fn bits(self) -> u32 {
                    self.0
                }
            }

            impl fmt::Display for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    self.0.fmt(f)
                }
            }
        )*
    };
}

serial! {
    /// Connection sequence number: a TSN as the peer has it, in either direction.
    Csn;
    /// Local sequence number: a TSN as one member has it, in either direction.
    Lsn;
    /// A TSN as an end host has it, which need not know whether there is a switch.
    Tsn;
}

/// Things with consecutive numbers. Grows at the end, shrinks at the front; any is found at once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Row<N, T> {
    first: u32,
    things: VecDeque<T>,
    numbers: PhantomData<N>,
}

impl<N: Serial, T> Row<N, T> {
    pub(crate) const fn new(first: u32) -> Self {
        Self { first, things: VecDeque::new(), numbers: PhantomData }
    }

    /// The number of the thing at the front; of an empty row, that of the next one.
    pub(crate) fn first(&self) -> N {
        N::from_bits(self.first)
    }

    /// The number that the next thing will have.
    pub(crate) fn next(&self) -> N {
        // Rows are bounded far below 2^32 things.
        self.first().plus(self.things.len() as u32)
    }

    pub(crate) fn len(&self) -> usize {
        self.things.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.things.is_empty()
    }

    pub(crate) fn get(&self, number: N) -> Option<&T> {
        self.things.get(number.since(self.first()) as usize)
    }

    pub(crate) fn get_mut(&mut self, number: N) -> Option<&mut T> {
        let at = number.since(self.first()) as usize;
        self.things.get_mut(at)
    }

    pub(crate) fn front(&self) -> Option<&T> {
        self.things.front()
    }

    pub(crate) fn push(&mut self, thing: T) -> N {
        let number = self.next();
        self.things.push_back(thing);
        number
    }

    pub(crate) fn pop(&mut self) -> Option<T> {
        let thing = self.things.pop_front()?;
        self.first = self.first.wrapping_add(1);
        Some(thing)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (N, &T)> {
        let first = self.first();
        (0..).zip(&self.things).map(move |(at, thing)| (first.plus(at), thing))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (N, &mut T)> {
        let first = self.first();
        (0..).zip(&mut self.things).map(move |(at, thing)| (first.plus(at), thing))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn numbers_wrap() {
        let (last, first) = (Csn(u32::MAX), Csn(0));
        assert!(last.is_before(first) && !first.is_before(last) && !first.is_before(first));
        assert_eq!((last.plus(1), first.previous(), first.since(last)), (first, last, 1));
        assert_eq!((last.later(first), last.earlier(first)), (first, last));
    }

    #[test]
    fn a_row_has_consecutive_numbers_across_the_wrap() {
        let mut row = Row::<Lsn, char>::new(u32::MAX);
        assert_eq!((row.push('a'), row.push('b'), row.next()), (Lsn(u32::MAX), Lsn(0), Lsn(1)));
        assert_eq!((row.get(Lsn(0)), row.get(Lsn(1)), row.get(Lsn(u32::MAX - 1))), (Some(&'b'), None, None));
        assert_eq!((row.pop(), row.first(), row.len()), (Some('a'), Lsn(0), 1));
        assert!(row.iter().eq([(Lsn(0), &'b')]));
    }
}
