//! What has changed in what routers share, gathered until somebody has time for it. Pure.

use std::collections::{BTreeMap, BTreeSet};

use margay_core::key::HostId;
use margay_core::name::Prefix;

use crate::registration::Place;
use crate::store::{MemberKey, Row, SharedTable};

/// Of the other routers, and those who are registered with them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct News {
    /// Routers came, went, or are somewhere else.
    pub routers: bool,
    /// Hosts that serve something else, or somewhere else.
    pub places: BTreeSet<Place>,
    /// Names that this router had given, and etcd has given to another host.
    pub lost: BTreeSet<(Prefix, HostId)>,
    /// Etcd has been told of names that this router has given.
    pub claims: bool,
}

impl News {
    /// Nothing has.
    pub fn is_empty(&self) -> bool {
        !self.routers && self.places.is_empty() && self.lost.is_empty() && !self.claims
    }

    /// With what has changed besides.
    pub fn add(&mut self, other: Self) {
        self.routers |= other.routers;
        self.places.extend(other.places);
        self.lost.extend(other.lost);
        self.claims |= other.claims;
    }
}

/// Of the rows of shared tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowNews {
    /// Members that came, went, or may register something else.
    pub members: BTreeMap<Place, MemberKey>,
    /// Members were put out, or an entry of those has ended.
    pub revoked: bool,
}

impl RowNews {
    /// That of some rows.
    pub fn of(rows: &[Row]) -> Self {
        let mut news = Self::default();
        for (table, key, _) in rows {
            match table {
                SharedTable::Members => news.members.extend(MemberKey::read(key).map(|member| {
                    let place = Place { host: member.host.id(), authority: member.authority };
                    (place, member)
                })),
                SharedTable::Revoked => news.revoked = true,
                // Of keys, chains and orders the store itself tells.
                SharedTable::Tokens
                | SharedTable::Names
                | SharedTable::RevokedKeys
                | SharedTable::Successions
                | SharedTable::Chains
                | SharedTable::Orders
                | SharedTable::OrderReports => {}
            }
        }
        news
    }

    /// With what has changed besides.
    pub fn add(&mut self, other: Self) {
        self.members.extend(other.members);
        self.revoked |= other.revoked;
    }
}

#[cfg(test)]
mod tests {
    use margay_core::key::HostPublic;

    use super::*;

    #[test]
    fn of_all_rows_only_members_and_revocations_concern_who_is_registered() {
        let (host, authority) = (HostPublic([7; 32]), [9; 8]);
        let member: Row = (SharedTable::Members, [&host.0[..], &authority].concat(), None);
        let (name, token) = ((SharedTable::Names, vec![0; 34], None), (SharedTable::Tokens, vec![0; 32], None));
        assert_eq!(RowNews::of(&[name, token, (SharedTable::Members, vec![1], None)]), RowNews::default());
        let mut news = RowNews::of(&[member]);
        news.add(RowNews::of(&[(SharedTable::Revoked, vec![0; 40], None)]));
        let place = Place { host: host.id(), authority };
        let members = BTreeMap::from([(place, MemberKey { host, authority })]);
        assert_eq!(news, RowNews { members, revoked: true });
    }
}
