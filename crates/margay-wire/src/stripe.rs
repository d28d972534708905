//! STRIPE and ARRIVALS: a flow over several pairs of addresses at once, and what has come by each
//! (docs/decisions/0021).

use crate::header::Error;

/// Pairs of addresses that one flow may use at once.
pub const PLACES_MAX: usize = 4;
/// Bytes of STRIPE's value.
pub(crate) const STRIPE_LEN: usize = 8;
/// Bytes in front of the places of ARRIVALS, and of each place.
const ARRIVALS_HEAD: usize = 4;
const ARRIVAL_LEN: usize = 16;

mod field {
    use core::ops::Range;

    pub const NUMBER: Range<usize> = 0..4;
    pub const PLACE: usize = 4;
    pub const FLAGS: usize = 5;
    pub const SHARING: usize = 6;
    pub const WEIGHT: usize = 7;

    pub const ARRIVAL_PLACE: usize = 0;
    pub const PACKET_NUMBER: Range<usize> = 4..8;
    pub const AT: Range<usize> = 8..12;
    pub const BYTES: Range<usize> = 12..16;
}

/// Bits of STRIPE's flags byte.
const ENDS: u8 = 1;
const LEADS: u8 = 2;
const PLAIN: u8 = 4;
const FEC: u8 = 8;

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

/// How the trains of a striped flow are shared out among its places (docs/decisions/0021, 0084).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Sharing {
    /// Each by the place where it is predicted to arrive first.
    #[default]
    Earliest = 0,
    /// By the places in turns, each as often as its weight says.
    Weighted = 1,
    /// Each by two places; the receiver takes what comes first.
    Redundant = 2,
}

impl Sharing {
    /// Every one, by number.
    pub const ALL: [Self; 3] = [Self::Earliest, Self::Weighted, Self::Redundant];

    /// A number that this version does not know is as the first: any receiver puts in order what comes by several.
    fn of_number(number: u8) -> Self {
        Self::ALL.into_iter().find(|known| *known as u8 == number).unwrap_or_default()
    }
}

/// STRIPE: the pair of addresses that this PROBE goes by is a place of the flow; in the answer, it works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeRepr {
    /// Random, or the question's in an answer.
    pub number: u32,
    /// Which place, below [`PLACES_MAX`].
    pub place: u8,
    /// The flow goes by several pairs no more.
    pub ends: bool,
    /// The sender says which pairs are places; the other end follows.
    pub leads: bool,
    /// How the sender of a question shares out what it sends; the question's in an answer. Versions before this field
    /// answer [`Sharing::Earliest`] to any.
    pub sharing: Sharing,
    /// Of this place, where the sender shares by weights; 0 elsewhere.
    pub weight: u8,
    /// The sender of a question wants to send as it is by this place what is sealed by others; in the answer, it may
    /// (docs/decisions/0097). Versions before this field answer that it may not.
    pub plain: bool,
    /// The same of repairs, which follow what is sent by this place (docs/decisions/0095).
    pub fec: bool,
}

impl StripeRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let place = *value.get(field::PLACE).filter(|_| value.len() == STRIPE_LEN).ok_or(Error)?;
        if usize::from(place) >= PLACES_MAX {
            return Err(Error);
        }
        let flags = value[field::FLAGS];
        Ok(Self {
            number: word(&value[field::NUMBER]),
            place,
            ends: flags & ENDS != 0,
            leads: flags & LEADS != 0,
            sharing: Sharing::of_number(value[field::SHARING]),
            weight: value[field::WEIGHT],
            plain: flags & PLAIN != 0,
            fec: flags & FEC != 0,
        })
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::NUMBER].copy_from_slice(&self.number.to_be_bytes());
        value[field::PLACE] = self.place;
        let flags = [(self.ends, ENDS), (self.leads, LEADS), (self.plain, PLAIN), (self.fec, FEC)];
        value[field::FLAGS] = flags.iter().map(|(is_set, bit)| if *is_set { *bit } else { 0 }).sum();
        value[field::SHARING] = self.sharing as u8;
        value[field::WEIGHT] = self.weight;
    }
}

/// What has come by one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivalRepr {
    /// The packet number of the last train whose last chunk came, as its chunks have it.
    pub packet_number: u32,
    /// When, in microseconds of the receiver's clock.
    pub at_us: u32,
    /// Bytes of DATA datagrams up to then, since the beginning.
    pub bytes: u32,
}

/// ARRIVALS: what the sender of this has received of a flow, place by place. Counts wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArrivalsRepr {
    /// Of this report: the next one's is one more.
    pub number: u32,
    /// By place; `None` where nothing has come.
    pub places: [Option<ArrivalRepr>; PLACES_MAX],
}

impl ArrivalsRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let (head, rest) = value.split_at_checked(ARRIVALS_HEAD).ok_or(Error)?;
        if !rest.len().is_multiple_of(ARRIVAL_LEN) {
            return Err(Error);
        }
        let mut repr = Self { number: word(head), ..Self::default() };
        // In order, each once.
        let mut next = 0;
        for entry in rest.chunks_exact(ARRIVAL_LEN) {
            let at = usize::from(entry[field::ARRIVAL_PLACE]);
            let place = repr.places.get_mut(at).filter(|_| at >= next).ok_or(Error)?;
            next = at + 1;
            let packet_number = word(&entry[field::PACKET_NUMBER]);
            let arrival =
                ArrivalRepr { packet_number, at_us: word(&entry[field::AT]), bytes: word(&entry[field::BYTES]) };
            *place = Some(arrival);
        }
        Ok(repr)
    }

    pub(crate) fn value_len(&self) -> usize {
        ARRIVALS_HEAD + self.places.iter().flatten().count() * ARRIVAL_LEN
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        let (head, rest) = value.split_at_mut(ARRIVALS_HEAD);
        head.copy_from_slice(&self.number.to_be_bytes());
        let known = (0..).zip(&self.places).filter_map(|(place, arrival): (u8, _)| Some((place, arrival.as_ref()?)));
        for ((place, arrival), entry) in known.zip(rest.chunks_exact_mut(ARRIVAL_LEN)) {
            entry[field::ARRIVAL_PLACE] = place;
            entry[field::PACKET_NUMBER].copy_from_slice(&arrival.packet_number.to_be_bytes());
            entry[field::AT].copy_from_slice(&arrival.at_us.to_be_bytes());
            entry[field::BYTES].copy_from_slice(&arrival.bytes.to_be_bytes());
        }
    }
}
