//! Bad weather for signalling alone: of the datagrams of the SAL port, all but DATA are lost, doubled and late by
//! chance. Data, direct or encapsulated, and registration, which is TCP, pass as ever. And losses of whatever passes.
//! It is made where packets are delayed ([`crate::pump`]), and may become another while the lab runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use margay_wire::{Kind, PORT, kind_of};

use crate::pump::Dice;

const UDP: u8 = 17;
const UDP_HEADER_LEN: usize = 8;

/// How bad it is. Shares are from 0 to 1, once for each passage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weather {
    /// Messages that are lost.
    pub lost: f64,
    /// That come twice; each copy may be late.
    pub doubled: f64,
    /// That are late, by up to `late_max`, so that others overtake them.
    pub late: f64,
    /// How late at most.
    pub late_max: Duration,
}

/// Frames of any kind that are lost by chance.
#[derive(Clone, Copy, Debug, Default)]
pub struct Losses {
    /// From 0 to 1.
    pub share: f64,
    /// So many in a row; 0 is as 1.
    pub row: u32,
}

/// The weather over a lab, and what it has done so far.
#[derive(Default)]
pub struct Sky {
    weather: RwLock<Weather>,
    losses: RwLock<Losses>,
    passed: AtomicU64,
    lost: AtomicU64,
    doubled: AtomicU64,
    late: AtomicU64,
}

/// Messages by their fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fates {
    /// All that came by.
    pub passed: u64,
    /// Lost.
    pub lost: u64,
    /// Came twice.
    pub doubled: u64,
    /// Copies that were late.
    pub late: u64,
}

impl Sky {
    /// From now on.
    pub fn set(&self, weather: Weather) {
        *self.weather.write().unwrap_or_else(PoisonError::into_inner) = weather;
    }

    /// From now on so much of whatever hosts send is lost.
    pub fn lose(&self, losses: Losses) {
        *self.losses.write().unwrap_or_else(PoisonError::into_inner) = losses;
    }

    /// Whether the next frame is lost. `left`: how many of the present row still are.
    pub fn loses(&self, left: &mut u32, dice: &mut Dice) -> bool {
        let Losses { share, row } = *self.losses.read().unwrap_or_else(PoisonError::into_inner);
        if *left == 0 && share > 0.0 {
            // Between two rows of losses there are on the average as many frames as the share asks for.
            let row = row.max(1);
            let begins = 1.0 / (1.0 + f64::from(row) * (1.0 - share) / share);
            *left = if dice.hits(begins) { row } else { 0 };
        }
        let is_lost = *left > 0;
        *left = left.saturating_sub(1);
        is_lost
    }

    /// What has become of messages so far.
    pub fn fates(&self) -> Fates {
        let [passed, lost, doubled, late] =
            [&self.passed, &self.lost, &self.doubled, &self.late].map(|count| count.load(Ordering::Relaxed));
        Fates { passed, lost, doubled, late }
    }

    /// How much later each copy of a frame comes: none, one or two copies.
    pub fn copies(&self, frame: &[u8], dice: &mut Dice) -> Vec<Duration> {
        if !is_signalling(frame) {
            return vec![Duration::ZERO];
        }
        let weather = *self.weather.read().unwrap_or_else(PoisonError::into_inner);
        let count = |of: &AtomicU64| of.fetch_add(1, Ordering::Relaxed);
        count(&self.passed);
        if dice.hits(weather.lost) {
            count(&self.lost);
            return Vec::new();
        }
        let mut copies = 1;
        if dice.hits(weather.doubled) {
            count(&self.doubled);
            copies = 2;
        }
        let mut lateness = || {
            if !dice.hits(weather.late) {
                return Duration::ZERO;
            }
            count(&self.late);
            Duration::from_micros(dice.below(weather.late_max.as_micros() as usize) as u64)
        };
        (0..copies).map(|_| lateness()).collect()
    }
}

/// Whether an Ethernet frame carries a message of the SAL that is not DATA.
pub fn is_signalling(frame: &[u8]) -> bool {
    let payload = match frame.get(12..14) {
        Some([0x08, 0x00]) => frame.get(14..).and_then(|packet| {
            let is_first = packet.get(6..8)? == [0, 0] || packet.get(6..8)? == [0x40, 0];
            let header = usize::from(packet[0] & 0x0f) * 4;
            (packet.get(9) == Some(&UDP) && is_first).then(|| packet.get(header..)).flatten()
        }),
        Some([0x86, 0xdd]) => {
            frame.get(14..).and_then(|packet| (packet.get(6) == Some(&UDP)).then(|| packet.get(40..)).flatten())
        }
        _ => None,
    };
    let Some((header, datagram)) = payload.and_then(|payload| payload.split_at_checked(UDP_HEADER_LEN)) else {
        return false;
    };
    let ports = [u16::from_be_bytes([header[0], header[1]]), u16::from_be_bytes([header[2], header[3]])];
    ports.contains(&PORT) && kind_of(datagram).is_ok_and(|kind| kind != Kind::Data)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(v6: bool, protocol: u8, port: u16, kind: u8) -> Vec<u8> {
        let mut frame = vec![0; 12];
        if v6 {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, protocol, 64]);
            frame.extend([0; 32]);
        } else {
            frame.extend([0x08, 0x00, 0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, protocol]);
            frame.extend([0; 10]);
        }
        frame.extend([200, 1]);
        frame.extend(port.to_be_bytes());
        frame.extend([0, 20, 0, 0, 1, kind, 0, 0]);
        frame
    }

    #[test]
    fn as_many_are_lost_as_was_asked_for_and_in_rows() {
        for row in [1, 3] {
            let sky = Sky::default();
            let mut dice = Dice::new(3);
            let mut left = 0;
            assert!(!(0..1000).any(|_| sky.loses(&mut left, &mut dice)));
            sky.lose(Losses { share: 0.02, row });
            let fates: Vec<bool> = (0..300_000).map(|_| sky.loses(&mut left, &mut dice)).collect();
            let lost = fates.iter().filter(|lost| **lost).count();
            assert!((5400..6600).contains(&lost), "{lost}");
            let rows = fates.windows(2).filter(|two| !two[0] && two[1]).count();
            assert!((lost as f64 / rows as f64 - f64::from(row)).abs() < 0.2, "{lost} in {rows}");
        }
    }

    #[test]
    fn only_messages_of_the_sal_are_signalling() {
        for v6 in [false, true] {
            assert!(is_signalling(&frame(v6, UDP, PORT, 4)));
            assert!(!is_signalling(&frame(v6, UDP, PORT, 32)));
            assert!(!is_signalling(&frame(v6, UDP, 53, 4)));
            assert!(!is_signalling(&frame(v6, 6, PORT, 4)));
        }
        let whole = frame(false, UDP, PORT, 4);
        // Cut short before its type.
        assert!(!(0..whole.len() - 2).any(|len| is_signalling(&whole[..len])));
    }

    #[test]
    fn data_passes_in_any_weather_and_messages_do_not() {
        let sky = Sky::default();
        let mut dice = Dice::new(3);
        let (message, data) = (frame(false, UDP, PORT, 4), frame(false, UDP, PORT, 32));
        assert_eq!(sky.copies(&message, &mut dice), [Duration::ZERO]);
        sky.set(Weather { lost: 0.2, doubled: 0.2, late: 0.2, late_max: Duration::from_millis(60) });
        for _ in 0..10_000 {
            assert_eq!(sky.copies(&data, &mut dice), [Duration::ZERO]);
            assert!(sky.copies(&message, &mut dice).iter().all(|late| *late < Duration::from_millis(60)));
        }
        let fates = sky.fates();
        assert_eq!(fates.passed, 10_001);
        assert!((1_800..2_200).contains(&fates.lost), "{fates:?}");
        assert!((1_400..1_800).contains(&fates.doubled), "{fates:?}");
        assert!((1_600..2_200).contains(&fates.late), "{fates:?}");
    }
}
