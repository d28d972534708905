//! The last answers about names of the zone, for while the agent is dead: virtual addresses stay right for
//! [`LASTING_FOR`], and packets to them wait for the next agent as those of flows do. Whatever else was answered (there
//! is no such name, none of a type, or its plain addresses while nobody serves it) may change at any moment, and is
//! remembered for [`PASSING_FOR`] alone. That a name has no address of one family holds for as long as the other one.

use std::collections::HashMap;
use std::time::Duration;

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{LowerName, RData, Record, RecordType};
use margay_core::Ranges;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Carrier, answer};
use crate::lease::QUARANTINE_S;

/// Questions whose answers are remembered.
const REMEMBERED_MAX: usize = 4096;
/// How long an answer is given again that may have become wrong: enough for a restart of the agent.
const PASSING_FOR: Duration = Duration::from_secs(30);

/// How long a virtual address is given again: the agent gives it to no other name in this time, and whoever asked last
/// has forgotten it by the end of the quarantine.
const LASTING_FOR: Duration = Duration::from_secs(QUARANTINE_S - 60 * 60);

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
    is_passing: bool,
    until: Instant,
}

impl Remembered {
    fn is_of_no_such_type(&self) -> bool {
        self.code == ResponseCode::NoError && self.answers.is_empty()
    }
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
        let is_passing = self.is_passing(&reply);
        let until = Instant::now() + if is_passing { PASSING_FOR } else { LASTING_FOR };
        let remembered = Remembered { code, answers: reply.answers, authorities: reply.authorities, is_passing, until };
        let mut known = self.known.lock();
        let key = key(query);
        if known.len() >= REMEMBERED_MAX && !known.contains_key(&key) && !make_room(&mut known, is_passing) {
            return;
        }
        known.insert(key, remembered);
    }

    /// Whether an answer says anything else than that a name has virtual addresses.
    fn is_passing(&self, reply: &Message) -> bool {
        let is_plain = |record: &Record| match &record.data {
            RData::A(address) => !self.ranges.is_virtual(address.0.into()),
            RData::AAAA(address) => !self.ranges.is_virtual(address.0.into()),
            _ => false,
        };
        reply.metadata.response_code == ResponseCode::NXDomain
            || reply.answers.is_empty()
            || reply.answers.iter().any(is_plain)
    }

    /// The last answer to the question that these bytes are, as the agent would give it.
    pub(super) fn recall(&self, bytes: &[u8], carrier: Carrier) -> Option<Vec<u8>> {
        let (request, query) = answer::parse(bytes)?;
        let now = Instant::now();
        let mut known = self.known.lock();
        let key = key(&query);
        let mut found = known.get(&key).cloned()?;
        if found.until <= now && !(found.is_of_no_such_type() && has_lasting(&known, &key.0, now)) {
            known.remove(&key);
            return None;
        }
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

/// Whether virtual addresses of a name are remembered.
fn has_lasting(known: &HashMap<Key, Remembered>, name: &LowerName, now: Instant) -> bool {
    let of_type = |kind| known.get(&(name.clone(), kind));
    let mut found = [RecordType::A, RecordType::AAAA].into_iter().filter_map(of_type);
    found.any(|one| !one.is_passing && one.until > now)
}

/// Takes out the answer that would end first; a lasting one only for another: whoever asks for names that do not exist
/// pushes out no others. False where there is no room.
fn make_room(known: &mut HashMap<Key, Remembered>, is_for_passing: bool) -> bool {
    let may_go = known.iter().filter(|(_, one)| one.is_passing || !is_for_passing);
    let Some(key) = may_go.min_by_key(|(_, one)| one.until).map(|(key, _)| key.clone()) else { return false };
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
    async fn only_virtual_addresses_are_remembered_until_another_name_may_have_them() {
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
        tokio::time::advance(LASTING_FOR - PASSING_FOR - Duration::from_secs(1)).await;
        assert_eq!(recalled(&memory, &served), Some(ResponseCode::NoError));
        assert_eq!(memory.known.lock().len(), 1, "what is over is forgotten");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(recalled(&memory, &served), None);
    }

    #[tokio::test(start_paused = true)]
    async fn that_there_is_none_of_a_type_holds_while_the_name_has_a_virtual_address() {
        let memory = Memory::new(Ranges::USUAL);
        let [served, other] = ["web.shop.test.", "db.shop.test."].map(query);
        memory.note(&served, &reply(&served, Some("198.18.1.7")));
        let of_v6 = |query: &Query| Query::query(query.name.clone(), RecordType::AAAA);
        for query in [of_v6(&served), of_v6(&other)] {
            let none = answer::response(&asked(&query), query.clone());
            memory.note(&query, &none.to_vec().expect("it fits"));
            assert_eq!(recalled(&memory, &query), Some(ResponseCode::NoError));
        }
        tokio::time::advance(PASSING_FOR).await;
        assert_eq!(recalled(&memory, &of_v6(&other)), None);
        assert_eq!(recalled(&memory, &of_v6(&served)), Some(ResponseCode::NoError));
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
