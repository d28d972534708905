//! The last answers about names of the zone, for as long as the agent is dead: virtual addresses are never wrong, and
//! packets to them wait for the next agent as those of flows do.

use std::collections::HashMap;

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{LowerName, Record, RecordType};
use parking_lot::Mutex;

use super::{Carrier, answer};

/// Questions whose answers are remembered; of more, some are forgotten.
const REMEMBERED_MAX: usize = 4096;

#[derive(Default)]
pub(super) struct Memory(Mutex<HashMap<(LowerName, RecordType), Remembered>>);

#[derive(Clone)]
struct Remembered {
    code: ResponseCode,
    answers: Vec<Record>,
    authorities: Vec<Record>,
}

impl Memory {
    /// Notes what the agent has answered. What it could not find out is no answer.
    pub(super) fn note(&self, query: &Query, reply: &[u8]) {
        let Ok(reply) = Message::from_vec(reply) else { return };
        let code = reply.metadata.response_code;
        if !matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) || reply.metadata.truncation {
            return;
        }
        let remembered = Remembered { code, answers: reply.answers, authorities: reply.authorities };
        let mut all = self.0.lock();
        let key = key(query);
        if all.len() >= REMEMBERED_MAX
            && !all.contains_key(&key)
            && let Some(some) = all.keys().next().cloned()
        {
            all.remove(&some);
        }
        all.insert(key, remembered);
    }

    /// The last answer to the question that these bytes are, as the agent would give it.
    pub(super) fn recall(&self, bytes: &[u8], carrier: Carrier) -> Option<Vec<u8>> {
        let (request, query) = answer::parse(bytes)?;
        let mut found = self.0.lock().get(&key(&query)).cloned()?;
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

fn key(query: &Query) -> (LowerName, RecordType) {
    (LowerName::new(&query.name), query.query_type)
}
