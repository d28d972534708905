//! Flows that go by several pairs of addresses at once (docs/decisions/0021): each train by the place that the core's
//! scheduler chooses, or by two of them (docs/decisions/0084), and not before its turn; arriving trains put in order,
//! what comes twice dropped, what a place has lost repaired (docs/decisions/0095), and the peer told of what has come.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use margay_core::copies::Copies;
use margay_core::entry::{PathId, Place, Places, StripeNews};
use margay_core::reorder::{Part, Sequencer};
use margay_core::stripe::{PlaceInfo, Scheduler, Turn};
use margay_core::time::Instant;
use margay_core::{DropReason, PlaceStack};
use margay_wire::{ArrivalRepr, ArrivalsRepr, DataRepr, FlowId, PLACES_MAX, is_sealed};
use parking_lot::{Mutex, RwLock};

use crate::clock;
use crate::driver::Shared;
use crate::held_bytes::HeldAccount;
use crate::repairing::{Repairing, Repairs, Restoring};
use crate::table::Destination;
use crate::train::{OwnedRun, Run};
use crate::wait::Timer;

/// A train whose turn is so near is sent now: to wait would take longer.
const SLACK: Duration = Duration::from_micros(300);
/// The peer is told of what has come no more often.
const TELL: Duration = Duration::from_millis(10);

/// Where the flow may go.
#[derive(Clone, Copy, Debug)]
struct Ways {
    places: Places,
    /// That of all flows with the peer.
    main: PathId,
}

/// A part of a train that waits for its turn.
struct Waiting {
    at: Instant,
    to: Destination,
    datagrams: Vec<u8>,
    segment: usize,
    /// Another place has the same.
    is_copy: bool,
    /// The flow is sealed, and this is not: it goes by a place that is plain, or nowhere.
    is_plain: bool,
}

impl Waiting {
    /// What repairs a block goes at once.
    fn of_repairs<C>(shared: &Shared<C>, repairs: Repairs, at: Instant, to: Destination) -> Self {
        let Repairs { datagrams, segment } = repairs;
        shared.counting.fec_repair_bytes.add(datagrams.len() as u64);
        Self { at, to, datagrams, segment, is_copy: false, is_plain: false }
    }
}

/// How a train goes by a place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    place: usize,
    at: Instant,
    pub to: Destination,
    is_copy: bool,
    /// The flow is sealed, and goes as it is by this place.
    pub is_plain: bool,
    /// What goes by this place is repaired.
    pub is_fec: bool,
}

#[derive(Default)]
struct Sending {
    scheduler: Scheduler,
    queues: [VecDeque<Waiting>; PLACES_MAX],
    repairing: [Option<Repairing>; PLACES_MAX],
}

struct Receiving {
    sequencer: Sequencer<OwnedRun>,
    /// What has come, of a peer that sends by two places at once, or has done so.
    copies: Option<Copies>,
    restoring: [Restoring; PLACES_MAX],
    /// What those keep.
    account: HeldAccount,
    arrivals: ArrivalsRepr,
    /// Bytes by place, wrapping.
    bytes: [u32; PLACES_MAX],
    last_place: Option<usize>,
    told: Option<Instant>,
    /// Something has come that the peer has not been told of.
    is_fresh: bool,
}

/// What has come of a flow by one place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlaceCounters {
    /// The sending side; `None` while the place is not proved.
    pub sending: Option<PlaceInfo>,
    /// Bytes of datagrams that have come by it; wraps at 4 GiB.
    pub received_bytes: u32,
}

/// One striped flow. It outlives its entry, as long as the flow is striped.
pub struct Stripe {
    /// This host's number of it.
    pub flow: FlowId,
    ways: RwLock<Ways>,
    sending: Mutex<Sending>,
    receiving: Mutex<Receiving>,
}

impl Sending {
    fn choose(&mut self, now: Instant, places: &Places, bytes: usize) -> Turn {
        self.scheduler.set_sharing(places.sharing, places.weights());
        self.scheduler.choose(now, bytes)
    }

    /// What goes by a place that repairs has been sent: what is to follow it at once.
    fn repair(&mut self, now: Instant, place: usize, datagrams: &[u8], segment: usize) -> Vec<Repairs> {
        let repairs = self.repairing[place].get_or_insert_default().add(now, datagrams, segment);
        self.note_repairs(now, place, &repairs);
        repairs
    }

    /// The same, of blocks that have lasted long enough.
    fn repair_due(&mut self, now: Instant, place: usize) -> Vec<Repairs> {
        let repairs = self.repairing[place].as_mut().map(|repairing| repairing.take_due(now)).unwrap_or_default();
        self.note_repairs(now, place, &repairs);
        repairs
    }

    fn note_repairs(&mut self, now: Instant, place: usize, repairs: &[Repairs]) {
        repairs.iter().for_each(|one| self.scheduler.note_repairs(now, place, one.datagrams.len()));
    }

    fn repairs_deadline(&self) -> Option<Instant> {
        self.repairing.iter().flatten().filter_map(Repairing::deadline).min()
    }
}

impl Receiving {
    fn new(account: HeldAccount) -> Self {
        Self {
            sequencer: Sequencer::default(),
            copies: None,
            restoring: Default::default(),
            account,
            arrivals: ArrivalsRepr::default(),
            bytes: [0; PLACES_MAX],
            last_place: None,
            told: None,
            is_fresh: false,
        }
    }

    /// Takes something by a place that repairs. Where the peer has its share of what is kept, nothing of this flow is.
    fn restore<T>(&mut self, place: usize, act: impl FnOnce(&mut Restoring) -> T) -> T {
        let done = act(&mut self.restoring[place]);
        if !self.account.resize(self.restoring.iter().map(Restoring::bytes).sum()) {
            self.restoring.iter_mut().for_each(Restoring::clear);
            self.account.clear();
        }
        done
    }

    /// From here on copies are dropped, where the peer sends some; and still when it sends no more: some may be on
    /// their way.
    fn follow(&mut self, places: &Places) {
        let is_repaired = places.places.iter().flatten().any(|place| place.takes == Some(PlaceStack::Fec));
        self.sequencer.set_repaired(is_repaired);
        if places.takes_copies {
            self.copies.get_or_insert_default();
        }
    }
}

impl std::fmt::Debug for Stripe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stripe").field("flow", &self.flow).field("ways", &*self.ways.read()).finish_non_exhaustive()
    }
}

impl PartialEq for Stripe {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::eq(self, other)
    }
}

impl Eq for Stripe {}

fn number_of(datagrams: &[u8]) -> u32 {
    // What is sent here has been stamped.
    DataRepr::parse(datagrams).map_or(0, |header| header.packet_number)
}

impl Stripe {
    /// A flow that goes by these places, and by `main` while none of them works. What is kept to repair it counts for
    /// `account`.
    pub fn new(flow: FlowId, places: Places, main: PathId, account: HeldAccount) -> Self {
        let ways = RwLock::new(Ways { places, main });
        Self { flow, ways, sending: Mutex::default(), receiving: Mutex::new(Receiving::new(account)) }
    }

    /// Its places are these now.
    pub fn set_places(&self, places: Places, main: PathId) {
        // The table's lock is held here: whoever has one of the others may wait for that.
        *self.ways.write() = Ways { places, main };
    }

    fn place(&self, place: usize) -> Option<Place> {
        self.ways.read().places.places.get(place).copied().flatten()
    }

    /// The path record of a place by which it may send.
    pub fn path(&self, place: usize) -> Option<PathId> {
        self.place(place).filter(|place| place.may_send).map(|place| place.path)
    }

    /// Whether a sealed flow's packets go as they are by a place.
    fn sends_plain(&self, place: usize) -> bool {
        self.place(place).is_some_and(|place| place.sends == Some(PlaceStack::Plain))
    }

    /// Whether a sealed flow's packets may come as they are by a place.
    pub fn takes_plain(&self, place: usize) -> bool {
        self.place(place).is_some_and(|place| place.takes == Some(PlaceStack::Plain))
    }

    /// Whether what goes by a place is repaired.
    fn sends_fec(&self, place: usize) -> bool {
        self.place(place).is_some_and(|place| place.sends == Some(PlaceStack::Fec))
    }

    /// Whether repairs may come by a place.
    pub fn takes_fec(&self, place: usize) -> bool {
        self.place(place).is_some_and(|place| place.takes == Some(PlaceStack::Fec))
    }

    /// The path records of all its places.
    pub fn paths(&self) -> [Option<PathId>; PLACES_MAX] {
        self.ways.read().places.places.map(|place| place.map(|place| place.path))
    }

    /// What the core has heard of it.
    pub fn note(&self, news: StripeNews) {
        let mut sending = self.sending.lock();
        match news {
            StripeNews::Alive { place, rtt } => sending.scheduler.handle_alive(clock::now(), place, rtt),
            StripeNews::Gone(place) => {
                sending.scheduler.forget(place);
                sending.repairing[place] = None;
                drop(sending);
                self.receiving.lock().restoring[place] = Restoring::default();
            }
            StripeNews::Arrivals(arrivals) => {
                sending.scheduler.handle_arrivals(clock::now(), &arrivals);
                let Sending { scheduler, repairing, .. } = &mut *sending;
                for (place, repairing) in repairing.iter_mut().enumerate() {
                    if let Some((repairing, loss)) = repairing.as_mut().zip(scheduler.loss(place)) {
                        repairing.note_loss(loss);
                    }
                }
            }
        }
    }

    /// What goes by each place.
    pub fn counters(&self) -> [PlaceCounters; PLACES_MAX] {
        let (sending, arrivals) = (self.sending.lock().scheduler.places(), self.receiving.lock().arrivals);
        core::array::from_fn(|place| PlaceCounters {
            sending: sending[place],
            received_bytes: arrivals.places[place].map_or(0, |arrival| arrival.bytes),
        })
    }

    /// By which places a train of so many bytes goes, and when; one, or two. `None`: by whatever pair the host uses
    /// with the peer.
    ///
    /// # Errors
    ///
    /// Too much waits, or its place is no more.
    pub(crate) fn choose<C>(&self, shared: &Shared<C>, bytes: usize) -> Result<Option<(Way, Option<Way>)>, DropReason> {
        let places = self.ways.read().places;
        let turn = self.sending.lock().choose(clock::now(), &places, bytes);
        let way = |(place, at): (usize, Instant), is_copy| {
            let to = self.path(place).and_then(|path| shared.table.read().destination(path))?;
            // Of two copies one may be sealed, and there is one train.
            let is_plain = matches!(turn, Turn::Place(..)) && self.sends_plain(place);
            let is_fec = matches!(turn, Turn::Place(..)) && self.sends_fec(place);
            Some(Way { place, at, to, is_copy, is_plain, is_fec })
        };
        match turn {
            Turn::Place(place, at) => Ok(Some((way((place, at), false).ok_or(DropReason::Nowhere)?, None))),
            Turn::Twice([one, other]) => match (way(one, false), way(other, true)) {
                (Some(one), other) => Ok(Some((one, other))),
                (None, Some(other)) => Ok(Some((Way { is_copy: false, ..other }, None))),
                (None, None) => Err(DropReason::Nowhere),
            },
            Turn::Full => Err(DropReason::Full),
            Turn::Elsewhere => Ok(None),
        }
    }

    /// Sends a part of a train by a place that was chosen, or lets it wait for its turn.
    pub(crate) fn send<C>(self: &Arc<Self>, shared: &Shared<C>, way: &Way, datagrams: &[u8], segment: usize) {
        let Way { place, at, to, is_copy, is_plain, is_fec } = *way;
        if is_copy {
            shared.counting.egress_copies.add(1);
        }
        let now = clock::now();
        let mut sending = self.sending.lock();
        if sending.queues[place].is_empty() && at <= now + SLACK {
            sending.scheduler.note_sent(now, place, number_of(datagrams), datagrams.len(), at > now);
            let repairs = if is_fec { sending.repair(now, place, datagrams, segment) } else { Vec::new() };
            let due = sending.repairs_deadline().filter(|_| is_fec);
            drop(sending);
            shared.send_data(datagrams, segment, &to, false);
            if is_fec {
                shared.counting.fec_bytes.add(datagrams.len() as u64);
            }
            for Repairs { datagrams, segment } in repairs {
                shared.counting.fec_repair_bytes.add(datagrams.len() as u64);
                shared.send_data(&datagrams, segment, &to, false);
            }
            if let Some(due) = due {
                shared.pacing.add(self, due);
            }
            return;
        }
        sending.queues[place].push_back(Waiting { at, to, datagrams: datagrams.to_vec(), segment, is_copy, is_plain });
        drop(sending);
        shared.counting.egress_paced.add(1);
        shared.pacing.add(self, at);
    }

    /// What is to be sent now; and when there is more. What waits for a place that is dead by now goes another way.
    fn take_due<C>(&self, shared: &Shared<C>, now: Instant) -> (Vec<Waiting>, Option<Instant>) {
        let mut due = Vec::new();
        let mut sending = self.sending.lock();
        let Sending { scheduler, queues, .. } = &mut *sending;
        let is_dead = |place: usize, queue: &VecDeque<Waiting>| !queue.is_empty() && !scheduler.is_live(place);
        let dead = queues.iter_mut().enumerate().filter(|(place, queue)| is_dead(*place, queue));
        let orphans: Vec<Waiting> = dead.flat_map(|(_, queue)| std::mem::take(queue)).collect();
        // What another place has as well goes no other way.
        for waiting in orphans.into_iter().filter(|waiting| !waiting.is_copy) {
            if waiting.is_plain {
                // Other places may be sealed, and its seal's numbers are used up.
                shared.counting.drop(DropReason::Full);
                continue;
            }
            let turn = scheduler.choose(now, waiting.datagrams.len());
            match self.redirect(shared, turn, waiting) {
                Some((Some(other), waiting)) => queues[other].push_back(waiting),
                Some((None, waiting)) => due.push(waiting),
                None => shared.counting.drop(DropReason::Full),
            }
        }
        for place in 0..PLACES_MAX {
            let is_fec = self.sends_fec(place);
            while let Some(waiting) = sending.queues[place].pop_front_if(|waiting| waiting.at <= now + SLACK) {
                if waiting.is_plain && !self.sends_plain(place) {
                    // Since it began to wait, an end has come to demand the seal, or an order has.
                    shared.counting.drop(DropReason::OtherStack);
                    continue;
                }
                let Waiting { to, ref datagrams, segment, .. } = waiting;
                sending.scheduler.note_sent(now, place, number_of(datagrams), datagrams.len(), true);
                let repairs = if is_fec { sending.repair(now, place, datagrams, segment) } else { Vec::new() };
                if is_fec {
                    shared.counting.fec_bytes.add(datagrams.len() as u64);
                }
                due.push(waiting);
                due.extend(repairs.into_iter().map(|repairs| Waiting::of_repairs(shared, repairs, now, to)));
            }
            let repairs = sending.repair_due(now + SLACK, place);
            let to = self.path(place).filter(|_| is_fec && !repairs.is_empty());
            if let Some(to) = to.and_then(|path| shared.table.read().destination(path)) {
                due.extend(repairs.into_iter().map(|repairs| Waiting::of_repairs(shared, repairs, now, to)));
            }
        }
        let waiting = sending.queues.iter().filter_map(|queue| queue.front()).map(|waiting| waiting.at);
        (due, waiting.chain(sending.repairs_deadline()).min())
    }

    /// To its new place, if there is one, or else where all flows with the peer go.
    fn redirect<C>(&self, shared: &Shared<C>, turn: Turn, waiting: Waiting) -> Option<(Option<usize>, Waiting)> {
        let (place, path, at) = match turn {
            // Its copy, if it has one, is on its way.
            Turn::Place(place, at) | Turn::Twice([(place, at), _]) => (Some(place), self.path(place)?, at),
            Turn::Elsewhere => (None, self.ways.read().main, waiting.at),
            Turn::Full => return None,
        };
        let to = shared.table.read().destination(path)?;
        Some((place, Waiting { at, to, ..waiting }))
    }

    /// Takes note of datagrams that came by a place, and of the number of the train that they end, if they do. True if
    /// the peer is to be told now.
    pub(crate) fn note_arrival<C>(
        self: &Arc<Self>,
        shared: &Shared<C>,
        place: Option<usize>,
        ended: Option<u32>,
        bytes: usize,
    ) -> bool {
        let now = clock::now();
        let mut receiving = self.receiving.lock();
        receiving.last_place = place;
        if let Some(place) = place {
            let bytes = receiving.bytes[place].wrapping_add(u32::try_from(bytes).unwrap_or(u32::MAX));
            receiving.bytes[place] = bytes;
            if let Some(packet_number) = ended {
                let arrival = ArrivalRepr { packet_number, at_us: now.micros() as u32, bytes };
                receiving.arrivals.places[place] = Some(arrival);
            }
        }
        let told = receiving.told.unwrap_or(Instant::ZERO);
        let is_due = now.since(told) >= TELL;
        let was_fresh = std::mem::replace(&mut receiving.is_fresh, !is_due);
        if is_due {
            receiving.told = Some(now);
        }
        drop(receiving);
        if !is_due && !was_fresh {
            shared.ordering.add(self, told + TELL);
        }
        is_due
    }

    /// What has come, for the peer: and the place by which the last came.
    pub fn arrivals(&self) -> (Option<usize>, ArrivalsRepr) {
        let receiving = self.receiving.lock();
        (receiving.last_place, receiving.arrivals)
    }

    /// Gives a run and what has waited for it to `give`, in order; or lets it wait.
    pub(crate) fn in_order<C>(
        self: &Arc<Self>,
        shared: &Shared<C>,
        place: Option<usize>,
        part: Part,
        run: &Run<'_>,
        mut give: impl FnMut(&Run<'_>),
    ) {
        let now = clock::now();
        let places = self.ways.read().places;
        let mut receiving = self.receiving.lock();
        receiving.follow(&places);
        let Receiving { sequencer, copies, restoring, .. } = &mut *receiving;
        let is_repaired =
            |place: &usize| places.places[*place].is_some_and(|place| place.takes == Some(PlaceStack::Fec));
        let mut restoring = place.filter(is_repaired).map(|place| &mut restoring[place]);
        let mut take = |part: Part, run: &Run<'_>| {
            if sequencer.admit(now, place, &part) {
                give(run);
            } else {
                shared.counting.ingress_held.add(1);
                sequencer.hold(now, part, OwnedRun::from(run));
            }
        };
        // A seal takes no number twice.
        if is_sealed(run.header.stack) || copies.is_none() && restoring.is_none() {
            take(part, run);
        } else {
            let DataRepr { packet_number, count, .. } = run.header;
            let fresh = run.filtered(|index| {
                let is_first = copies.as_mut().is_none_or(|copies| copies.admit(part.number, count, index));
                is_first && !restoring.as_mut().is_some_and(|restoring| restoring.is_late(packet_number, index))
            });
            let mut chunks = 0;
            for run in fresh {
                chunks += run.chunks();
                take(Part { chunks: run.chunks() as u32, ..part }, &run);
            }
            if chunks < run.chunks() {
                shared.counting.ingress_copies.add((run.chunks() - chunks) as u64);
                sequencer.note_copy(now, place, part.number);
            }
        }
        while let Some(held) = receiving.sequencer.take(now) {
            give(&held.run());
        }
        let deadline = receiving.sequencer.deadline();
        drop(receiving);
        if let Some(deadline) = deadline {
            shared.ordering.add(self, deadline);
        }
    }

    /// A run has come by a place that repairs, as it was on the wire, and was taken. Gives datagrams that can be
    /// brought back now.
    pub(crate) fn keep(&self, place: usize, run: &Run<'_>) -> Vec<Vec<u8>> {
        self.receiving.lock().restore(place, |restoring| restoring.keep(run))
    }

    /// A repair has come by a place. As [`keep`](Self::keep).
    ///
    /// # Errors
    ///
    /// It is none.
    pub(crate) fn restore(&self, place: usize, repair: &[u8]) -> Result<Vec<Vec<u8>>, DropReason> {
        self.receiving.lock().restore(place, |restoring| restoring.repair(repair))
    }

    /// Takes note of a sealed chunk that has come before. False where the peer sends nothing twice.
    pub(crate) fn note_copy<C>(&self, shared: &Shared<C>, place: Option<usize>, number: u32) -> bool {
        let places = self.ways.read().places;
        let mut receiving = self.receiving.lock();
        receiving.follow(&places);
        if receiving.copies.is_none() {
            return false;
        }
        shared.counting.ingress_copies.add(1);
        receiving.sequencer.note_copy(clock::now(), place, number);
        true
    }

    /// Gives what has waited for too long to `give`. Says whether the peer is to be told of arrivals now, and when to
    /// come again.
    pub fn work(&self, now: Instant, mut give: impl FnMut(&Run<'_>)) -> (bool, Option<Instant>) {
        let mut receiving = self.receiving.lock();
        while let Some(held) = receiving.sequencer.take(now) {
            give(&held.run());
        }
        let tell_at = receiving.told.unwrap_or(Instant::ZERO) + TELL;
        let tells = receiving.is_fresh && tell_at <= now;
        if tells {
            (receiving.told, receiving.is_fresh) = (Some(now), false);
        }
        let later = receiving.is_fresh.then_some(tell_at);
        (tells, receiving.sequencer.deadline().into_iter().chain(later).min())
    }
}

/// Flows for which something is due at some time.
pub struct Agenda<T = Stripe> {
    timer: Timer,
    next_us: AtomicU64,
    flows: Mutex<Appointments<T>>,
}

/// Each flow once, by when something is due, and by its address in memory.
struct Appointments<T> {
    by_time: BTreeMap<(Instant, usize), Arc<T>>,
    times: HashMap<usize, Instant>,
}

impl<T> Appointments<T> {
    fn new() -> Self {
        Self { by_time: BTreeMap::new(), times: HashMap::new() }
    }

    /// The earlier of two times stays.
    fn add(&mut self, flow: &Arc<T>, at: Instant) {
        let address = Arc::as_ptr(flow).addr();
        let known = self.times.get(&address).copied();
        if known.is_some_and(|known| known <= at) {
            return;
        }
        if let Some(known) = known {
            self.by_time.remove(&(known, address));
        }
        self.times.insert(address, at);
        self.by_time.insert((at, address), Arc::clone(flow));
    }

    fn take(&mut self, now: Instant) -> Vec<Arc<T>> {
        let mut due = Vec::new();
        while let Some(first) = self.by_time.first_entry().filter(|first| first.key().0 <= now) {
            let ((_, address), flow) = first.remove_entry();
            self.times.remove(&address);
            due.push(flow);
        }
        due
    }

    fn next(&self) -> Option<Instant> {
        self.by_time.first_key_value().map(|((at, _), _)| *at)
    }
}

impl<T> Agenda<T> {
    /// An empty one.
    pub fn new() -> io::Result<Self> {
        let flows = Mutex::new(Appointments::new());
        Ok(Self { timer: Timer::new()?, next_us: AtomicU64::new(u64::MAX), flows })
    }

    /// Something is due for a flow at `at`, or earlier.
    pub fn add(&self, flow: &Arc<T>, at: Instant) {
        // Until it is dropped nobody else sets the timer.
        let mut flows = self.flows.lock();
        flows.add(flow, at);
        self.wake_at(at);
    }

    fn wake_at(&self, at: Instant) {
        if at.micros() < self.next_us.load(Ordering::Relaxed) {
            self.next_us.store(at.micros(), Ordering::Relaxed);
            if let Err(error) = self.timer.arm(at) {
                tracing::error!(%error, "cannot set the timer of flows whose packets wait");
            }
        }
    }

    /// The flows for which something is due now.
    pub fn take(&self, now: Instant) -> Vec<Arc<T>> {
        if now.micros() < self.next_us.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let mut flows = self.flows.lock();
        self.timer.clear();
        self.next_us.store(u64::MAX, Ordering::Relaxed);
        let due = flows.take(now);
        if let Some(next) = flows.next() {
            self.wake_at(next);
        }
        due
    }
}

impl<T> AsFd for Agenda<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

/// Sends what has its turn now.
pub(crate) fn send_due<C>(shared: &Shared<C>) {
    let now = clock::now();
    for stripe in shared.pacing.take(now + SLACK) {
        let (due, next) = stripe.take_due(shared, now);
        for waiting in due {
            shared.send_data(&waiting.datagrams, waiting.segment, &waiting.to, false);
        }
        if let Some(next) = next {
            shared.pacing.add(&stripe, next);
        }
    }
}
