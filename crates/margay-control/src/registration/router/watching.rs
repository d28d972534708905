//! Hosts that watch prefixes hear who serves something there, whenever that changes.

use std::collections::BTreeMap;

use margay_core::name::Prefix;
use prost::Message as _;

use super::Guest;
use crate::registration::Instance;
use crate::registration::proto::{self, Code, from_router};
use crate::registration::refusal::{No, prefix_of};

/// Bytes of instances under one watched prefix that one message holds: a frame without the rest. One instance is far
/// shorter.
const PART_BYTES_MAX: usize = 60_000;
/// Bytes around each, at most.
const FIELD_HEAD_LEN: usize = 4;
/// Instances that are told: each of a service's partitions, and more.
const WATCHED_MAX: usize = 4000;
/// Prefixes that one host watches.
const WATCHES_MAX: usize = 256;

/// What fits into one message each. Nobody is news, too: then there is one part, and it is empty.
fn parts_of(all: &[Instance]) -> Vec<Vec<proto::Instance>> {
    let mut parts = Vec::new();
    let mut part = Vec::new();
    let mut bytes = 0;
    for instance in all.iter().cloned().map(proto::Instance::from) {
        let len = instance.encoded_len() + FIELD_HEAD_LEN;
        if bytes + len > PART_BYTES_MAX {
            parts.push(std::mem::take(&mut part));
            bytes = 0;
        }
        bytes += len;
        part.push(instance);
    }
    parts.push(part);
    parts
}

/// What a host watches.
#[derive(Default)]
pub(super) struct Watches {
    /// What it was told last of each prefix.
    told: BTreeMap<Prefix, Option<Vec<Instance>>>,
    /// How many changes there were then.
    seen: u64,
}

impl Watches {
    pub fn is_empty(&self) -> bool {
        self.told.is_empty()
    }
}

impl Guest {
    pub(super) fn watch(&mut self, asked: &proto::Watch) -> Result<(), No> {
        let prefix = prefix_of(&asked.service_id, asked.bits)?;
        if asked.ends {
            self.watches.told.remove(&prefix);
        } else if self.watches.told.len() >= WATCHES_MAX && !self.watches.told.contains_key(&prefix) {
            return Err(No(Code::Limit, format!("a host watches {WATCHES_MAX} prefixes at most")));
        } else {
            // Told again, if it is known: the host may have lost it.
            self.watches.told.insert(prefix, None);
        }
        Ok(())
    }

    /// What has changed under the watched prefixes since the host was told.
    pub(super) fn news(&mut self) -> Vec<proto::FromRouter> {
        let roll = self.shared.roll.lock();
        let seen = std::mem::replace(&mut self.watches.seen, roll.recent().count());
        let mut news = Vec::new();
        for (prefix, told) in &mut self.watches.told {
            if told.is_some() && !roll.recent().concerns(prefix, seen) {
                continue;
            }
            let now = roll.instances_under(prefix);
            if told.as_ref() == Some(&now) {
                continue;
            }
            let parts = parts_of(&now[..now.len().min(WATCHED_MAX)]);
            let count = parts.len();
            for (part, instances) in (1..).zip(parts) {
                let (service_id, bits) = (prefix.id.0.to_vec(), prefix.bits.into());
                let truncated = now.len() > WATCHED_MAX;
                let watched = proto::Watched { service_id, bits, instances, truncated, goes_on: part < count };
                news.push(proto::FromRouter { body: Some(from_router::Body::Watched(watched)) });
            }
            *told = Some(now);
        }
        news
    }
}

#[cfg(test)]
mod test {
    use std::sync::Arc;

    use margay_core::key::HostId;

    use super::*;

    /// Of a frame, without its tag.
    const MESSAGE_MAX: usize = 65_535 - 16;

    #[test]
    fn parts_fit_into_messages_however_long_each_instance_is() {
        let notice: Arc<[u8]> = vec![7; margay_core::fence::FENCE_NOTICE_LEN_MAX].into();
        let instance = |name_len: usize, fence: Option<&Arc<[u8]>>| Instance {
            host: HostId([1; 16]),
            host_name: "h".repeat(name_len),
            address: "[2001:db8::1234:5678]:54324".parse().expect("literal"),
            name: "db.shop".to_owned(),
            prefix: "db.shop".parse().expect("literal"),
            weight: 65_535,
            priority: u32::MAX,
            sticky: true,
            fence: fence.cloned(),
            zero_weight: None,
        };
        assert_eq!(parts_of(&[]), [Vec::new()]);
        for (count, name_len, fence, parts) in
            [(1, 5, None, 1), (400, 5, None, 1), (400, 253, None, 3), (45, 253, Some(&notice), 2)]
        {
            let all = vec![instance(name_len, fence); count];
            let found = parts_of(&all);
            assert_eq!((found.len(), found.concat().len()), (parts, count), "{count} of {name_len}");
            let message = |instances: &Vec<proto::Instance>| {
                let (service_id, bits) = (vec![7; 32], 256);
                let watched =
                    proto::Watched { service_id, bits, instances: instances.clone(), truncated: true, goes_on: true };
                proto::FromRouter { body: Some(from_router::Body::Watched(watched)) }.encoded_len()
            };
            assert!(found.iter().map(message).all(|len| len <= MESSAGE_MAX), "{count} of {name_len}");
        }
    }
}
