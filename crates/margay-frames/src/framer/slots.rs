//! Requests of a program in its order, and which of their answers have come.

use std::collections::VecDeque;

use crate::head::Head;
use crate::protocol::{Join, Part, Protocol, TOO_LARGE};

/// Bytes of the answers to one request that are held until all of them have come.
const JOINED_MAX: usize = 64 << 20;
/// The error for an answer that would have to wait for others.
const NO_MEMORY: &str = "the framer has no memory for the answer; ask for less at once";

/// Bytes that a request takes, and each of its parts, however short it and its answer are.
const SLOT_BYTES: usize = size_of::<Slot>();
const PART_BYTES: usize = size_of::<State>() + size_of::<Option<Place>>();

/// A part of a request: what one server is asked.
#[derive(Clone, Debug)]
enum State {
    /// It is not answered. What may be repeated is kept.
    Asked {
        repeatable: Option<Vec<u8>>,
    },
    Answered(Vec<u8>),
}

/// A request.
#[derive(Clone, Debug)]
struct Slot {
    parts: Vec<State>,
    /// Parts that are not answered.
    missing: usize,
    join: Join,
    /// What its parts keep.
    bytes: usize,
}

impl State {
    /// Bytes that are kept.
    fn len(&self) -> usize {
        match self {
            Self::Asked { repeatable } => repeatable.as_ref().map_or(0, Vec::len),
            Self::Answered(answer) => answer.len(),
        }
    }
}

impl Slot {
    /// Bytes that it takes without what its parts keep.
    fn overhead(&self) -> usize {
        SLOT_BYTES + self.parts.len() * PART_BYTES
    }

    fn answered(&mut self) -> impl Iterator<Item = &mut Vec<u8>> {
        self.parts.iter_mut().filter_map(|state| match state {
            State::Answered(answer) => Some(answer),
            State::Asked { .. } => None,
        })
    }
}

/// Which part a number is for.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Which request, counted from the first of the program.
    request: u64,
    part: usize,
}

/// All requests of a program that are not answered yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots {
    protocol: Protocol,
    slots: VecDeque<Slot>,
    /// How many requests came before the first slot.
    before: u64,
    /// By number, from `oldest` on; none: it is answered, or has another number now.
    places: VecDeque<Option<Place>>,
    oldest: u32,
    open: usize,
    /// Bytes that all slots take.
    held_bytes: usize,
    /// A greeting was answered: whether it was taken.
    greeted: Option<bool>,
}

impl Slots {
    /// Of a program that has asked nothing.
    pub(super) fn new(protocol: Protocol) -> Self {
        Self { protocol, ..Self::default() }
    }

    /// Parts that are not answered.
    pub(super) fn open(&self) -> usize {
        self.open
    }

    /// Bytes of memory that requests take until their answers are written.
    pub(super) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// A request whose answer is known.
    pub(super) fn answered(&mut self, answer: Vec<u8>) {
        self.push(Slot { parts: vec![State::Answered(answer)], missing: 0, join: Join::Only, bytes: 0 });
    }

    fn push(&mut self, mut slot: Slot) {
        slot.bytes = slot.parts.iter().map(State::len).sum();
        self.held_bytes += slot.overhead() + slot.bytes;
        self.slots.push_back(slot);
    }

    /// A request for servers: its frames.
    pub(super) fn ask(&mut self, parts: Vec<Part>, join: Join) -> Vec<Vec<u8>> {
        let request = self.before + self.slots.len() as u64;
        let count = parts.len();
        let mut frames = Vec::with_capacity(count);
        let mut states = Vec::with_capacity(count);
        for (part, Part { bytes, is_safe }) in parts.into_iter().enumerate() {
            frames.push(self.number(Place { request, part }).frame(&bytes));
            states.push(State::Asked { repeatable: is_safe.then_some(bytes) });
        }
        self.open += count;
        self.push(Slot { parts: states, missing: count, join, bytes: 0 });
        frames
    }

    /// The next number.
    fn number(&mut self, place: Place) -> Head {
        // There are far less than 2^32.
        let number = self.oldest.wrapping_add(self.places.len() as u32);
        self.places.push_back(Some(place));
        Head { number, oldest: self.oldest }
    }

    /// Takes a number's place: it has none any more.
    fn take(&mut self, number: u32) -> Option<Place> {
        let place = self.places.get_mut(number.wrapping_sub(self.oldest) as usize)?.take()?;
        while let Some(None) = self.places.front() {
            self.places.pop_front();
            self.oldest = self.oldest.wrapping_add(1);
        }
        Some(place)
    }

    fn slot(&mut self, place: Place) -> Option<&mut Slot> {
        self.slots.get_mut(usize::try_from(place.request.checked_sub(self.before)?).ok()?)
    }

    fn fill(&mut self, place: Place, answer: Vec<u8>) {
        let refusal = self.protocol.error(TOO_LARGE);
        let Some(slot) = self.slot(place) else { return };
        let Some(state) = slot.parts.get_mut(place.part) else { return };
        let was = slot.bytes;
        slot.bytes = slot.bytes - state.len() + answer.len();
        *state = State::Answered(answer);
        slot.missing -= 1;
        if slot.bytes > JOINED_MAX && slot.parts.len() > 1 {
            // An error is the answer to all.
            slot.answered().for_each(|answer| *answer = refusal.clone());
            slot.bytes = slot.parts.iter().map(State::len).sum();
        }
        let is = slot.bytes;
        self.open -= 1;
        self.held_bytes = self.held_bytes - was + is;
    }

    /// An answer has come. One to a number that is none of these is of no interest. Without memory an answer is refused
    /// that would wait for others.
    pub(super) fn answer(&mut self, number: u32, answer: Vec<u8>, has_memory: bool) {
        let Some(place) = self.take(number) else { return };
        let is_next = place.request == self.before && self.slot(place).is_some_and(|slot| slot.parts.len() == 1);
        self.fill(place, if has_memory || is_next { answer } else { self.protocol.error(NO_MEMORY) });
    }

    /// Nobody will answer a number: what may be repeated is asked anew, and gives its frame; else `refusal` is the
    /// answer.
    pub(super) fn lost(&mut self, number: u32, refusal: &[u8]) -> Option<Vec<u8>> {
        let place = self.take(number)?;
        self.ask_again(place, refusal)
    }

    fn ask_again(&mut self, place: Place, refusal: &[u8]) -> Option<Vec<u8>> {
        let repeated = match self.slot(place)?.parts.get(place.part)? {
            State::Asked { repeatable: Some(bytes) } => bytes.clone(),
            _ => {
                self.fill(place, refusal.to_vec());
                return None;
            }
        };
        Some(self.number(place).frame(&repeated))
    }

    /// The connection is another from now on: what may be repeated is asked anew, in its order; `refusal` is the answer
    /// to the rest. Gives the frames.
    pub(super) fn restart(&mut self, refusal: &[u8]) -> Vec<Vec<u8>> {
        // A repeated frame says which number is the oldest one of this connection.
        self.oldest = self.oldest.wrapping_add(self.places.len() as u32);
        let mut places: Vec<Place> = std::mem::take(&mut self.places).into_iter().flatten().collect();
        places.sort_by_key(|place| (place.request, place.part));
        places.into_iter().filter_map(|place| self.ask_again(place, refusal)).collect()
    }

    /// There is no connection: `refusal` is the answer to all.
    pub(super) fn refuse_all(&mut self, refusal: &[u8]) {
        self.oldest = self.oldest.wrapping_add(self.places.len() as u32);
        for place in std::mem::take(&mut self.places).into_iter().flatten() {
            self.fill(place, refusal.to_vec());
        }
    }

    /// Whether a greeting was taken that was answered since the last call.
    pub(super) fn take_greeted(&mut self) -> Option<bool> {
        self.greeted.take()
    }

    /// Appends the answers whose turn has come.
    pub(super) fn write(&mut self, out: &mut Vec<u8>) {
        while let Some(slot) = self.slots.pop_front_if(|slot| slot.missing == 0) {
            self.before += 1;
            self.held_bytes -= slot.overhead() + slot.bytes;
            let answers: Vec<Vec<u8>> = slot.parts.into_iter().filter_map(answer_of).collect();
            let Some(answer) = slot.join.join(answers) else { continue };
            if slot.join == Join::Greeting {
                self.greeted = Some(!answer.starts_with(b"-"));
            }
            out.extend_from_slice(&answer);
        }
    }
}

fn answer_of(state: State) -> Option<Vec<u8>> {
    match state {
        State::Answered(answer) => Some(answer),
        State::Asked { .. } => None,
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::protocol::memcached::Quiet;

    const VALUES: Join = Join::Values(Quiet::No);

    const NO: &[u8] = b"SERVER_ERROR no\r\n";

    fn part(text: &str, is_safe: bool) -> Part {
        Part { bytes: text.as_bytes().to_vec(), is_safe }
    }

    /// Numbers and bytes of frames.
    fn read(frames: &[Vec<u8>]) -> Vec<(u32, u32, String)> {
        let read = |frame: &Vec<u8>| {
            let (head, bytes) = Head::split(frame).expect("a frame");
            (head.number, head.oldest, String::from_utf8_lossy(bytes).into_owned())
        };
        frames.iter().map(read).collect()
    }

    fn written(slots: &mut Slots) -> String {
        let mut out = Vec::new();
        slots.write(&mut out);
        String::from_utf8(out).expect("ASCII")
    }

    #[test]
    fn answers_come_in_the_order_of_the_requests() {
        let mut slots = Slots::default();
        let frames = slots.ask(vec![part("get a", true), part("get b", true)], VALUES);
        assert_eq!(read(&frames), [(0, 0, "get a".to_owned()), (1, 0, "get b".to_owned())]);
        slots.answered(b"MN\r\n".to_vec());
        slots.ask(vec![part("delete c", false)], Join::Values(Quiet::All));
        slots.ask(vec![part("delete d", false)], VALUES);
        slots.answer(3, b"DELETED\r\n".to_vec(), true);
        slots.answer(2, b"NOT_FOUND\r\n".to_vec(), true);
        slots.answer(1, b"VALUE b 0 1\r\ny\r\nEND\r\n".to_vec(), true);
        assert_eq!((written(&mut slots), slots.open()), (String::new(), 1));
        slots.answer(0, b"END\r\n".to_vec(), true);
        slots.answer(0, b"END\r\n".to_vec(), true);
        assert_eq!(written(&mut slots), "VALUE b 0 1\r\ny\r\nEND\r\nMN\r\nDELETED\r\n");
        assert_eq!((slots.open(), slots.held_bytes()), (0, 0));
        let frames = slots.ask(vec![part("get e", true)], VALUES);
        assert_eq!(read(&frames), [(4, 4, "get e".to_owned())]);
    }

    #[test]
    fn what_is_lost_is_repeated_with_another_number_or_refused() {
        let mut slots = Slots::default();
        slots.ask(vec![part("get a", true)], VALUES);
        slots.ask(vec![part("incr b 1", false)], VALUES);
        let again = slots.lost(0, NO).expect("it is safe");
        assert_eq!(read(&[again]), [(2, 1, "get a".to_owned())]);
        assert_eq!((slots.lost(0, NO), slots.lost(1, NO)), (None, None));
        slots.answer(0, b"late\r\n".to_vec(), true);
        assert_eq!(written(&mut slots), "", "the first answer is missing");
        slots.answer(2, b"END\r\n".to_vec(), true);
        assert_eq!(written(&mut slots), "END\r\nSERVER_ERROR no\r\n");
    }

    #[test]
    fn of_a_split_request_the_lost_part_alone_is_asked_again() {
        let mut slots = Slots::default();
        slots.ask(vec![part("get a", true), part("get b", true), part("get c", true)], VALUES);
        slots.answer(2, b"VALUE c 0 1\r\nz\r\nEND\r\n".to_vec(), true);
        let again = slots.lost(1, NO).expect("it is safe");
        assert_eq!(read(&[again]), [(3, 0, "get b".to_owned())]);
        slots.answer(1, b"late\r\n".to_vec(), true);
        slots.answer(0, b"END\r\n".to_vec(), true);
        assert_eq!(written(&mut slots), "");
        let again = slots.lost(3, NO).expect("the next one may die, too");
        assert_eq!(read(&[again]), [(4, 4, "get b".to_owned())]);
        slots.answer(4, b"VALUE b 0 1\r\ny\r\nEND\r\n".to_vec(), true);
        assert_eq!(written(&mut slots), "VALUE b 0 1\r\ny\r\nVALUE c 0 1\r\nz\r\nEND\r\n");
    }

    #[test]
    fn answers_to_one_request_that_are_too_much_together_are_refused() {
        let mut slots = Slots::new(Protocol::Resp);
        let parts = (0..10).map(|_| part("MGET k", true)).collect();
        slots.ask(parts, Join::Array);
        for number in 0..10 {
            slots.answer(number, vec![b'x'; JOINED_MAX / 8], true);
            assert!(slots.held_bytes() <= JOINED_MAX + SLOT_BYTES + 10 * (PART_BYTES + "MGET k".len()));
        }
        assert_eq!(written(&mut slots), format!("-ERR {TOO_LARGE}\r\n"));
        assert_eq!((slots.open(), slots.held_bytes()), (0, 0));
    }

    #[test]
    fn without_memory_no_answer_waits_for_others() {
        let mut slots = Slots::default();
        slots.ask(vec![part("get a", true)], VALUES);
        slots.ask(vec![part("get b", true), part("get c", true)], VALUES);
        let held = slots.held_bytes();
        slots.answer(2, vec![b'x'; 1 << 20], false);
        assert!(slots.held_bytes() < held + 200);
        let answer = "VALUE a 0 1\r\nx\r\nEND\r\n";
        slots.answer(0, answer.as_bytes().to_vec(), false);
        assert_eq!(written(&mut slots), answer, "it is the next one");
        slots.answer(1, b"END\r\n".to_vec(), true);
        assert_eq!(written(&mut slots), format!("SERVER_ERROR {NO_MEMORY}\r\n"));
        assert_eq!((slots.open(), slots.held_bytes()), (0, 0));
    }

    /// Behind one that nobody answers a client can have any number of requests that are answered here.
    #[test]
    fn what_is_held_is_counted_with_what_it_takes_to_hold_it() {
        let mut slots = Slots::default();
        slots.ask(vec![part("get a", true)], VALUES);
        slots.ask(vec![part("incr b 1", false)], VALUES);
        let first = slots.held_bytes();
        assert_eq!(first, 2 * (SLOT_BYTES + PART_BYTES) + "get a".len());
        for _ in 0..1000 {
            slots.answered(Vec::new());
        }
        assert_eq!(slots.held_bytes(), first + 1000 * (SLOT_BYTES + PART_BYTES));
        slots.answer(0, b"END\r\n".to_vec(), true);
        slots.answer(1, b"1\r\n".to_vec(), true);
        assert_eq!(written(&mut slots), "END\r\n1\r\n");
        assert_eq!((slots.open(), slots.held_bytes()), (0, 0));
    }

    #[test]
    fn another_connection_gets_what_is_safe() {
        let mut slots = Slots::default();
        slots.ask(vec![part("get a", true)], VALUES);
        slots.ask(vec![part("set b", false)], VALUES);
        slots.ask(vec![part("get c", true)], VALUES);
        let again = slots.lost(0, NO).expect("it is safe");
        assert_eq!(read(&[again]), [(3, 1, "get a".to_owned())]);
        let frames = slots.restart(NO);
        assert_eq!(read(&frames), [(4, 4, "get a".to_owned()), (5, 4, "get c".to_owned())]);
        slots.answer(5, b"c".to_vec(), true);
        slots.refuse_all(NO);
        assert_eq!(written(&mut slots), "SERVER_ERROR no\r\nSERVER_ERROR no\r\nc");
        assert_eq!(slots.open(), 0);
    }
}
