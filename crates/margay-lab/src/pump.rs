//! The user-space link: two TAP devices joined by threads that delay and lose frames, where the kernel has no netem.
//! What enters it from a host may also be in bad weather.
//!
//! A TAP takes no offloads here, so what passes are packets as on a wire.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use crate::weather::Sky;

/// Frames that wait in one direction; more are dropped, as by a switch.
const QUEUE_MAX: usize = 16_384;
const FRAME_MAX: usize = 65_536 + 18;

/// What a link does to frames, in each direction.
#[derive(Clone, Copy, Debug)]
pub struct Treatment {
    /// How long each frame takes.
    pub delay: Duration,
    /// Share of frames lost.
    pub loss: f64,
    /// Start of the sequence that decides which are lost.
    pub seed: u64,
}

/// A joined pair of TAP devices, for as long as the process lives.
pub struct Pump {
    /// Frames dropped because a queue was full, both directions.
    pub overflows: Arc<AtomicU64>,
}

/// Makes a TAP device in the network namespace of this process; it may be moved to another one afterwards.
fn tap(name: &str) -> Result<SyncDevice> {
    DeviceBuilder::new()
        .name(name)
        .layer(Layer::L2)
        .enable(false)
        .build_sync()
        .with_context(|| format!("cannot make the TAP device {name}; is /dev/net/tun there and open to this user?"))
}

impl Pump {
    /// Makes the two devices and starts to carry frames; those that come from the left, a host, are in the lab's
    /// weather.
    ///
    /// # Errors
    ///
    /// The kernel refuses a TAP device or a thread.
    pub fn start(left: &str, right: &str, treatment: Treatment, sky: &Arc<Sky>) -> Result<Self> {
        let left = Arc::new(tap(left)?);
        let right = Arc::new(tap(right)?);
        let overflows = Arc::new(AtomicU64::new(0));
        carry(&left, &right, treatment, &overflows, Some(sky.clone()))?;
        let back = Treatment { seed: treatment.seed.rotate_left(32) ^ 0x5bd1_e995, ..treatment };
        carry(&right, &left, back, &overflows, None)?;
        Ok(Self { overflows })
    }
}

/// Frames on their way, the next to arrive first.
#[derive(Default)]
struct Way {
    frames: Mutex<VecDeque<(Instant, Vec<u8>)>>,
    arrived: Condvar,
}

fn carry(
    from: &Arc<SyncDevice>,
    to: &Arc<SyncDevice>,
    treatment: Treatment,
    overflows: &Arc<AtomicU64>,
    sky: Option<Arc<Sky>>,
) -> Result<()> {
    let way = Arc::new(Way::default());
    let (entry, from, overflows) = (way.clone(), from.clone(), overflows.clone());
    let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
    named("link-in")
        .spawn(move || take_in(&from, &entry, treatment, &overflows, sky.as_deref()))
        .context("no thread left")?;
    let to = to.clone();
    named("link-out").spawn(move || let_out(&to, &way)).context("no thread left")?;
    Ok(())
}

fn take_in(from: &SyncDevice, way: &Way, treatment: Treatment, overflows: &AtomicU64, sky: Option<&Sky>) {
    let mut dice = Dice(treatment.seed | 1);
    let mut row = 0;
    let mut buffer = vec![0; FRAME_MAX];
    // Reading fails while the device is down or after it is gone; a lab's links live as long as the lab.
    loop {
        let Ok(length) = from.recv(&mut buffer) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        if dice.hits(treatment.loss) || sky.is_some_and(|sky| sky.loses(&mut row, &mut dice)) {
            continue;
        }
        let frame = &buffer[..length];
        let copies = sky.map_or_else(|| vec![Duration::ZERO], |sky| sky.copies(frame, &mut dice));
        let due = Instant::now() + treatment.delay;
        let mut frames = way.frames.lock().unwrap_or_else(PoisonError::into_inner);
        for late in copies {
            if frames.len() >= QUEUE_MAX {
                overflows.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let place = frames.partition_point(|(at, _)| *at <= due + late);
            frames.insert(place, (due + late, frame.to_vec()));
            way.arrived.notify_one();
        }
    }
}

fn let_out(to: &SyncDevice, way: &Way) {
    let mut frames = way.frames.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let now = Instant::now();
        match frames.front() {
            None => frames = way.arrived.wait(frames).unwrap_or_else(PoisonError::into_inner),
            Some((due, _)) if *due > now => {
                let wait = *due - now;
                frames = way.arrived.wait_timeout(frames, wait).unwrap_or_else(PoisonError::into_inner).0;
            }
            Some(_) => {
                if let Some((_, frame)) = frames.pop_front() {
                    drop(frames);
                    // A device that is down loses frames, as a cable that is out.
                    let _ = to.send(&frame);
                    frames = way.frames.lock().unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

/// Repeatable chance (xorshift64*); it only has to be even.
pub struct Dice(u64);

impl Dice {
    /// Another sequence for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`, which is not zero.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.roll() >> 11) as usize % bound.max(1)
    }

    /// Whether an event of this share happens now.
    pub fn hits(&mut self, share: f64) -> bool {
        share > 0.0 && ((self.roll() >> 11) as f64) < share * (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::Dice;

    #[test]
    fn loss_is_the_share_that_was_asked_for() {
        let mut dice = Dice::new(7);
        let lost = (0..100_000).filter(|_| dice.hits(0.03)).count();
        assert!((2_800..3_200).contains(&lost), "{lost}");
        assert!(!(0..1_000).any(|_| dice.hits(0.0)));
        assert!((0..1_000).all(|_| dice.hits(1.0)));
    }
}
