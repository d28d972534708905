//! Rules of the service table that the operator gave, kept across restarts.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::name::{Prefix, ServiceId};
use margay_core::table::RuleId;
use prost::Message;
use redb::{ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};

use super::record::{RuleRecord, bytes};
use super::{Failure, Store, StoreError};

/// By number.
const RULES: TableDefinition<u64, &[u8]> = TableDefinition::new("rules");
/// Rules that people write; those of registrations are not kept here.
const RULES_MAX: u64 = 10_000;

/// A rule as it lies on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRule {
    /// Its number, which stays its own.
    pub id: RuleId,
    /// What it is for.
    pub prefix: Prefix,
    /// As written.
    pub name: String,
    /// Where it leads; `None`: it delays, or discards.
    pub forward: Option<SocketAddr>,
    /// The others of its name and priority that say so get a copy, too.
    pub all: bool,
    /// The resolver that packets wait for; `None` with `forward`: it discards.
    pub resolver: Option<String>,
    /// Higher first.
    pub priority: u32,
    /// Share among rules of the same priority.
    pub weight: u32,
    /// When it was given, in seconds since 1970.
    pub created_s: u64,
    /// It ends when it has decided upon nothing for so long.
    pub idle: Option<Duration>,
    /// It ends after so long, counted from `hard_since_s`.
    pub hard: Option<Duration>,
    /// In seconds since 1970.
    pub hard_since_s: u64,
}

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(RULES)?;
    Ok(())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl StoredRule {
    fn record(&self) -> RuleRecord {
        RuleRecord {
            service: self.prefix.id.0.to_vec(),
            bits: self.prefix.bits.into(),
            name: self.name.clone(),
            forward: self.forward.map(|address| address.to_string()).unwrap_or_default(),
            resolver: self.resolver.clone().unwrap_or_default(),
            all: self.all,
            priority: self.priority,
            weight: self.weight,
            created_s: self.created_s,
            idle_ms: self.idle.map(millis),
            hard_ms: self.hard.map(millis),
            hard_since_s: self.hard_since_s,
        }
    }

    fn read(id: u64, value: &[u8]) -> Result<Self, Failure> {
        let record = RuleRecord::decode(value)?;
        let corrupted = |what: &str| Failure::Redb(Box::new(redb::Error::Corrupted(format!("rule {id}: {what}"))));
        let forward = match record.forward.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| corrupted("no address"))?),
        };
        let bits = u16::try_from(record.bits).ok().filter(|bits| *bits <= 256);
        Ok(Self {
            id: RuleId(id),
            prefix: Prefix::new(
                ServiceId(bytes("a serviceID", &record.service)?),
                bits.ok_or_else(|| corrupted("no prefix length"))?,
            ),
            name: record.name,
            forward,
            resolver: Some(record.resolver).filter(|name| !name.is_empty()),
            all: record.all,
            priority: record.priority,
            weight: record.weight,
            created_s: record.created_s,
            idle: record.idle_ms.map(Duration::from_millis),
            hard: record.hard_ms.map(Duration::from_millis),
            hard_since_s: record.hard_since_s,
        })
    }
}

impl Store {
    /// Keeps rules, new ones and changed ones alike: all or none.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the table is at its bound.
    pub fn write_rules(&self, rules: &[StoredRule]) -> Result<(), StoreError> {
        self.exchange_rules(rules, &[])
    }

    /// Keeps rules, new ones and changed ones alike, and forgets others: all or nothing.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the table is at its bound.
    pub fn exchange_rules(&self, rules: &[StoredRule], gone: &[RuleId]) -> Result<(), StoreError> {
        self.write(|transaction| {
            let mut table = transaction.open_table(RULES)?;
            for id in gone {
                table.remove(id.0)?;
            }
            for rule in rules {
                table.insert(rule.id.0, &rule.record().encode_to_vec()[..])?;
            }
            if table.len()? > RULES_MAX {
                return Err(Failure::Full { what: "rules", limit: RULES_MAX });
            }
            Ok(())
        })
    }

    /// Forgets rules.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn remove_rules(&self, ids: &[RuleId]) -> Result<(), StoreError> {
        self.exchange_rules(&[], ids)
    }

    /// Every rule that is kept, by number.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn rules(&self) -> Result<Vec<StoredRule>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(RULES)?;
            let mut all = Vec::new();
            for entry in table.iter()? {
                let (key, value) = entry?;
                all.push(StoredRule::read(key.value(), value.value())?);
            }
            Ok(all)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::store;

    fn rule(id: u64) -> StoredRule {
        StoredRule {
            id: RuleId(id),
            prefix: "sid:0102/16".parse().expect("literal"),
            name: "sid:0102/16".to_owned(),
            forward: Some("[fd01::7]:54324".parse().expect("literal")),
            all: id.is_multiple_of(2),
            resolver: None,
            priority: 9,
            weight: 3,
            created_s: 1_700_000_000,
            idle: Some(Duration::from_millis(1500)),
            hard: None,
            hard_since_s: 0,
        }
    }

    #[test]
    fn what_is_kept_comes_back_and_what_is_forgotten_does_not() {
        let (_base, store) = store();
        let drop = StoredRule { forward: None, idle: None, hard: Some(Duration::from_secs(60)), ..rule(7) };
        let delay = StoredRule { forward: None, resolver: Some("hosts".to_owned()), ..rule(8) };
        store.write_rules(&[rule(3), drop.clone(), delay.clone()]).expect("written");
        assert_eq!(store.rules().expect("readable"), [rule(3), drop.clone(), delay]);
        let changed = StoredRule { weight: 8, ..rule(3) };
        store.write_rules(std::slice::from_ref(&changed)).expect("written");
        store.remove_rules(&[RuleId(7), RuleId(8), RuleId(99)]).expect("written");
        assert_eq!(store.rules().expect("readable"), [changed]);
    }

    #[test]
    fn beyond_the_bound_nothing_is_kept() {
        let (_base, store) = store();
        let all: Vec<StoredRule> = (0..RULES_MAX).map(rule).collect();
        store.write_rules(&all).expect("room");
        let error = store.write_rules(&[rule(RULES_MAX)]).expect_err("full");
        assert!(matches!(error, StoreError::Full { what: "rules", .. }), "{error}");
        assert_eq!(store.rules().expect("readable").len() as u64, RULES_MAX);
    }
}
