//! The last answers about names of the zone, for as long as the agent is dead: virtual addresses are never wrong, and
//! packets to them wait for the next agent as those of flows do. Whatever else was answered (there is no such name, or
//! its plain addresses while nobody serves it) may change at any moment, and is remembered for [`PASSING_FOR`] alone.

use std::collections::HashMap;
use std::time::Duration;

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{LowerName, RData, Record, RecordType};
use margay_core::Ranges;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Carrier, answer};

/// Questions whose answers are remembered.
const REMEMBERED_MAX: usize = 4096;
/// How long an answer is given again that may have become wrong: enough for a restart of the agent.
const PASSING_FOR: Duration = Duration::from_secs(30);

type Key = (LowerName, RecordType);

pub(super) struct Memory {
    ranges: Ranges,
    known: Mutex<HashMap<Key, Remembered>>,
}

#[derive(Clone)]
struct Remembered {
    code: ResponseCode,
    answers: Vec<Record>,
    authorities: Vec<Record>,
    /// `None`: as long as the responder lives.
    until: Option<Instant>,
}

impl Memory {
    pub(super) fn new(ranges: Ranges) -> Self {
        Self { ranges, known: Mutex::default() }
    }

    /// Notes what the agent has answered. What it could not find out is no answer.
    pub(super) fn note(&self, query: &Query, reply: &[u8]) {
        let Ok(reply) = Message::from_vec(reply) else { return };
        let code = reply.metadata.response_code;
        if !matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) || reply.metadata.truncation {
            return;
        }
        let now = Instant::now();
        let until = self.is_passing(&reply).then(|| now + PASSING_FOR);
        let remembered = Remembered { code, answers: reply.answers, authorities: reply.authorities, until };
        let mut known = self.known.lock();
        let key = key(query);
        if known.len() >= REMEMBERED_MAX && !known.contains_key(&key) && !make_room(&mut known, until.is_some()) {
            return;
        }
        known.insert(key, remembered);
    }

    /// Whether an answer says more than that a name has virtual addresses, or none of a type.
    fn is_passing(&self, reply: &Message) -> bool {
        let is_plain = |record: &Record| match &record.data {
            RData::A(address) => !self.ranges.is_virtual(address.0.into()),
            RData::AAAA(address) => !self.ranges.is_virtual(address.0.into()),
            _ => false,
        };
        reply.metadata.response_code == ResponseCode::NXDomain || reply.answers.iter().any(is_plain)
    }

    /// The last answer to the question that these bytes are, as the agent would give it.
    pub(super) fn recall(&self, bytes: &[u8], carrier: Carrier) -> Option<Vec<u8>> {
        let (request, query) = answer::parse(bytes)?;
        let now = Instant::now();
        let mut known = self.known.lock();
        let key = key(&query);
        if known.get(&key)?.until.is_some_and(|until| until <= now) {
            known.remove(&key);
            return None;
        }
        let mut found = known.get(&key).cloned()?;
        drop(known);
        for record in &mut found.answers {
            // In the letters that were asked with.
            record.name = query.name.clone();
        }
        let mut response = answer::response(&request, query);
        response.metadata.response_code = found.code;
        response.metadata.authoritative = true;
        response.add_answers(found.answers);
        response.add_authorities(found.authorities);
        Some(answer::finish(&request, response, carrier, bytes))
    }
}

/// Takes out the answer that would end first; only for a lasting one also some answer that would not end: whoever asks
/// for names that do not exist pushes out no others. False where there is no room.
fn make_room(known: &mut HashMap<Key, Remembered>, is_for_passing: bool) -> bool {
    let first = known.iter().filter_map(|(key, one)| Some((one.until?, key))).min_by_key(|(until, _)| *until);
    let some = || if is_for_passing { None } else { known.keys().next() };
    let Some(key) = first.map(|(_, key)| key).or_else(some).cloned() else { return false };
    known.remove(&key);
    true
}

fn key(query: &Query) -> Key {
    (LowerName::new(&query.name), query.query_type)
}

#[cfg(test)]
mod test {
    use std::net::IpAddr;

    use hickory_proto::rr::Name;

    use super::super::zone;
    use super::*;

    fn query(name: &str) -> Query {
        Query::query(Name::from_ascii(name).expect("literal"), RecordType::A)
    }

    fn asked(query: &Query) -> Message {
        let mut message = Message::query();
        message.add_query(query.clone());
        message
    }

    /// What the agent answers: an address, or that there is no such name.
    fn reply(query: &Query, address: Option<&str>) -> Vec<u8> {
        let mut reply = answer::response(&asked(query), query.clone());
        match address {
            Some(address) => {
                let address: IpAddr = address.parse().expect("literal");
                reply.add_answers([zone::address(&query.name, 30, address)]);
            }
            None => reply.metadata.response_code = ResponseCode::NXDomain,
        }
        reply.to_vec().expect("it fits")
    }

    fn recalled(memory: &Memory, query: &Query) -> Option<ResponseCode> {
        let bytes = memory.recall(&asked(query).to_vec().expect("it fits"), Carrier::Datagram)?;
        Some(Message::from_vec(&bytes).expect("readable").metadata.response_code)
    }

    #[tokio::test(start_paused = true)]
    async fn only_virtual_addresses_are_remembered_for_good() {
        let memory = Memory::new(Ranges::USUAL);
        let [served, plain, none] = ["web.shop.test.", "old.shop.test.", "no.shop.test."].map(query);
        memory.note(&served, &reply(&served, Some("198.18.1.7")));
        memory.note(&plain, &reply(&plain, Some("192.0.2.7")));
        memory.note(&none, &reply(&none, None));
        tokio::time::advance(PASSING_FOR - Duration::from_secs(1)).await;
        assert_eq!(recalled(&memory, &plain), Some(ResponseCode::NoError));
        assert_eq!(recalled(&memory, &none), Some(ResponseCode::NXDomain));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!((recalled(&memory, &plain), recalled(&memory, &none)), (None, None));
        tokio::time::advance(Duration::from_secs(86_400)).await;
        assert_eq!(recalled(&memory, &served), Some(ResponseCode::NoError));
        assert_eq!(memory.known.lock().len(), 1, "what is over is forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn names_that_do_not_exist_push_no_others_out() {
        let memory = Memory::new(Ranges::USUAL);
        let served = query("web.shop.test.");
        memory.note(&served, &reply(&served, Some("198.18.1.7")));
        for number in 0..REMEMBERED_MAX + 100 {
            let none = query(&format!("no{number}.shop.test."));
            memory.note(&none, &reply(&none, None));
        }
        assert_eq!(memory.known.lock().len(), REMEMBERED_MAX);
        assert_eq!(recalled(&memory, &served), Some(ResponseCode::NoError));
        for number in 0..REMEMBERED_MAX {
            let other = query(&format!("web{number}.shop.test."));
            memory.note(&other, &reply(&other, Some("198.18.2.7")));
        }
        let none = query("no.shop.test.");
        memory.note(&none, &reply(&none, None));
        assert_eq!(recalled(&memory, &none), None, "there is no room for what passes");
        assert_eq!(memory.known.lock().len(), REMEMBERED_MAX);
    }
}
