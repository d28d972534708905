//! On a router: join tokens, and the hosts that used them.

use margay_core::certificate::{REVOCATIONS_MAX, Revocation};
use margay_core::key::{HostId, HostPublic};
use margay_core::name::{Prefix, authority_block};
use prost::Message;
use redb::{ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};

use super::agreement::Draft;
use super::audit::AuditEntry;
use super::record::{MemberRecord, TokenRecord, bytes, prefix_key, prefix_of};
use super::replica::SharedTable;
use super::{Failure, Store, StoreError};
use crate::issue::{LIFETIME_S, end_s};
use crate::token::TokenHash;

/// By the hash of the secret.
pub(super) const TOKENS: TableDefinition<[u8; 32], &[u8]> = TableDefinition::new("tokens");
/// Host's key, then the authority's block.
pub(super) const MEMBERS: TableDefinition<[u8; 40], &[u8]> = TableDefinition::new("members");
/// Hosts that were put out, by the same key: until when what was signed for them would hold.
pub(super) const REVOKED: TableDefinition<[u8; 40], u64> = TableDefinition::new("revoked");
const TOKENS_MAX: u64 = 10_000;
const MEMBERS_MAX: u64 = 100_000;
/// Grants and groups of one host; more than a certificate carries would be of no use.
const GRANTS_MAX: usize = 64;
const GROUPS_MAX: usize = 16;
/// Old rows that one act clears away by the way.
const CLEARED_MAX: usize = 50;

/// A join token as the router keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The hash of its secret; the secret itself is nowhere.
    pub hash: TokenHash,
    /// The authority that it lets hosts join.
    pub authority: String,
    /// Names that they may register.
    pub grants: Vec<Prefix>,
    /// Groups that they belong to.
    pub groups: Vec<String>,
    /// How many more hosts may use it.
    pub uses_left: u32,
    /// When it was made, in seconds since 1970.
    pub created_s: u64,
    /// Until when it holds.
    pub expires_s: u64,
}

/// What a token is good for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenState {
    /// A host may join.
    Usable,
    /// Its time is over.
    Expired,
    /// All its uses were taken.
    UsedUp,
}

impl Token {
    /// What it is good for at `unix_s`.
    pub fn state(&self, unix_s: u64) -> TokenState {
        if unix_s > self.expires_s {
            TokenState::Expired
        } else if self.uses_left == 0 {
            TokenState::UsedUp
        } else {
            TokenState::Usable
        }
    }
}

/// A host of an authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberKey {
    /// The host's key.
    pub host: HostPublic,
    /// The authority's block.
    pub authority: [u8; 8],
}

impl MemberKey {
    /// From a row's key; `None`: it is none.
    pub fn read(key: &[u8]) -> Option<Self> {
        let (host, authority) = key.split_at_checked(32)?;
        Some(Self { host: HostPublic(host.try_into().ok()?), authority: authority.try_into().ok()? })
    }
}

/// A host that joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its key.
    pub host: HostPublic,
    /// What it calls itself.
    pub host_name: String,
    /// The authority.
    pub authority: String,
    /// Names that it may register.
    pub grants: Vec<Prefix>,
    /// Its groups.
    pub groups: Vec<String>,
    /// When it joined, in seconds since 1970.
    pub joined_s: u64,
}

impl Member {
    /// Whether it may register `prefix`.
    pub fn may_register(&self, prefix: &Prefix) -> bool {
        self.grants.iter().any(|grant| grant.covers(prefix))
    }

    /// Whether a grant is for `prefix` alone, and not for more.
    pub fn is_granted_exactly(&self, prefix: &Prefix) -> bool {
        self.grants.contains(prefix)
    }
}

/// Why a host is not let in.
#[derive(Debug, thiserror::Error)]
pub enum AdmitError {
    /// No such token here.
    #[error(
        "this router does not know the join token: it was revoked, or made on another router; make a new one with \
         `margay id token create`"
    )]
    UnknownToken,
    /// Too late.
    #[error("the join token has expired; make a new one with `margay id token create`")]
    Expired,
    /// Others were faster.
    #[error("the join token was used up by other hosts; make a new one with `margay id token create`")]
    UsedUp,
    /// For another authority.
    #[error("the join token is for another authority than the host asked for")]
    OtherAuthority,
    /// It never joined, or was removed.
    #[error("this host is no member here; it needs a new join token: `margay id token create` on the router")]
    NotAMember,
    /// Its tokens gave it more than can be kept.
    #[error(
        "the host would have more than {GRANTS_MAX} grants or {GROUPS_MAX} groups; remove it and let it join again with fewer"
    )]
    TooMuch,
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(TOKENS)?;
    transaction.open_table(MEMBERS)?;
    transaction.open_table(REVOKED)?;
    Ok(())
}

fn member_key(key: &MemberKey) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[..32].copy_from_slice(&key.host.0);
    bytes[32..].copy_from_slice(&key.authority);
    bytes
}

fn grants_of(grants: &[Vec<u8>]) -> Result<Vec<Prefix>, Failure> {
    grants.iter().map(|grant| prefix_of(grant)).collect()
}

fn token_of(hash: TokenHash, encoded: &[u8]) -> Result<Token, Failure> {
    let record = TokenRecord::decode(encoded)?;
    Ok(Token {
        hash,
        grants: grants_of(&record.grants)?,
        authority: record.authority,
        groups: record.groups,
        uses_left: record.uses_left,
        created_s: record.created_s,
        expires_s: record.expires_s,
    })
}

fn encode_token(token: &Token) -> Vec<u8> {
    TokenRecord {
        authority: token.authority.clone(),
        grants: token.grants.iter().map(|grant| prefix_key(grant).to_vec()).collect(),
        groups: token.groups.clone(),
        uses_left: token.uses_left,
        created_s: token.created_s,
        expires_s: token.expires_s,
    }
    .encode_to_vec()
}

fn member_of(host: HostPublic, record: MemberRecord) -> Result<Member, Failure> {
    Ok(Member {
        host,
        grants: grants_of(&record.grants)?,
        host_name: record.host_name,
        authority: record.authority,
        groups: record.groups,
        joined_s: record.joined_s,
    })
}

/// Adds what is not there yet.
fn merge<T: Clone + PartialEq>(into: &mut Vec<T>, from: &[T]) {
    for item in from {
        if !into.contains(item) {
            into.push(item.clone());
        }
    }
}

impl Store {
    /// Keeps a new token. Tokens that have expired or were used up a week ago are cleared away by the way.
    ///
    /// # Errors
    ///
    /// The disk refuses, or there are too many tokens.
    pub fn add_token(&self, token: &Token) -> Result<(), StoreError> {
        const KEPT_S: u64 = 7 * 24 * 3600;
        self.settle(|transaction, draft| {
            let table = transaction.open_table(TOKENS)?;
            let is_old = |known: &[u8]| {
                TokenRecord::decode(known).is_ok_and(|known| known.expires_s.saturating_add(KEPT_S) < token.created_s)
            };
            for entry in table.iter()? {
                let (hash, known) = entry?;
                if draft.len() < CLEARED_MAX && is_old(known.value()) {
                    draft.put(SharedTable::Tokens, &hash.value(), Some(known.value().to_vec()), None);
                }
            }
            if table.len()? - draft.len() as u64 >= TOKENS_MAX {
                return Err(Failure::Full { what: "join tokens", limit: TOKENS_MAX });
            }
            let before = table.get(token.hash.0)?.map(|known| known.value().to_vec());
            draft.put(SharedTable::Tokens, &token.hash.0, before, Some(encode_token(token)));
            let detail = format!("for {}, uses: {}", token.authority, token.uses_left);
            draft.note(AuditEntry::once(token.created_s, "token-create", token.hash.id(), detail));
            Ok(())
        })
    }

    /// Every token.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn tokens(&self) -> Result<Vec<Token>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(TOKENS)?;
            let mut all = Vec::new();
            for entry in table.iter()? {
                let (hash, value) = entry?;
                all.push(token_of(TokenHash(hash.value()), value.value())?);
            }
            Ok(all)
        })
    }

    /// Takes a token back. Hosts that used it stay members.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn revoke_token(&self, id: &str, unix_s: u64) -> Result<Option<Token>, StoreError> {
        let Some(token) = self.tokens()?.into_iter().find(|token| token.hash.id() == id) else { return Ok(None) };
        self.settle(|transaction, draft| {
            let known = transaction.open_table(TOKENS)?.get(token.hash.0)?.map(|known| known.value().to_vec());
            draft.put(SharedTable::Tokens, &token.hash.0, known, None);
            draft.note(AuditEntry::once(unix_s, "token-revoke", id.to_owned(), token.authority.clone()));
            Ok(())
        })?;
        Ok(Some(token))
    }

    /// Lets a host in: by a token that it shows, or because it joined before. Taking a use of the token and making the
    /// member are one transaction. A host that shows the same token again (its welcome was lost) takes no second use.
    ///
    /// # Errors
    ///
    /// Why it is not let in; nothing was changed.
    pub fn admit(
        &self,
        key: &MemberKey,
        host_name: &str,
        token: Option<TokenHash>,
        unix_s: u64,
    ) -> Result<Member, AdmitError> {
        let admit =
            || self.settle(|transaction, draft| draft_admission(transaction, draft, key, host_name, token, unix_s));
        match admit()? {
            // Another router may know more.
            Err(AdmitError::NotAMember | AdmitError::UnknownToken) if self.refresh(&rows_of(key, token))? => admit()?,
            decided => decided,
        }
    }

    /// A router is a member of the authorities that it signs for, with nothing that it may register as a host.
    ///
    /// # Errors
    ///
    /// The others do not agree, or the disk refuses.
    pub fn enrol(&self, key: &MemberKey, authority: &str, host_name: &str, unix_s: u64) -> Result<(), StoreError> {
        self.settle(|transaction, draft| {
            let known = transaction.open_table(MEMBERS)?.get(member_key(key))?.is_some();
            if !known {
                let (authority, host_name) = (authority.to_owned(), host_name.to_owned());
                let record = MemberRecord { authority, host_name, joined_s: unix_s, ..MemberRecord::default() };
                draft.put(SharedTable::Members, &member_key(key), None, Some(record.encode_to_vec()));
                let detail = format!("{} as a router", record.authority);
                draft.note(AuditEntry::once(unix_s, "join", key.host.id().to_string(), detail));
            }
            Ok(())
        })
    }

    /// A host's membership as it is now.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn member(&self, key: &MemberKey) -> Result<Option<Member>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(MEMBERS)?;
            let Some(found) = table.get(member_key(key))? else { return Ok(None) };
            Ok(Some(member_of(key.host, MemberRecord::decode(found.value())?)?))
        })
    }

    /// Says anew what a host may register; gives what it is then. `None`: it is no member.
    ///
    /// # Errors
    ///
    /// The disk refuses, or those are more than can be kept.
    pub fn set_grants(&self, key: &MemberKey, grants: &[Prefix], unix_s: u64) -> Result<Option<Member>, StoreError> {
        self.settle(|transaction, draft| {
            let members = transaction.open_table(MEMBERS)?;
            let Some(known) = members.get(member_key(key))?.map(|known| known.value().to_vec()) else {
                return Ok(None);
            };
            let mut record = MemberRecord::decode(&known[..])?;
            if grants.len() > GRANTS_MAX {
                return Err(Failure::Full { what: "grants of a host", limit: GRANTS_MAX as u64 });
            }
            record.grants = grants.iter().map(|grant| prefix_key(grant).to_vec()).collect();
            draft.put(SharedTable::Members, &member_key(key), Some(known), Some(record.encode_to_vec()));
            let all: Vec<String> = grants.iter().map(Prefix::to_string).collect();
            let detail =
                format!("{}: {}", record.authority, if all.is_empty() { "nothing".to_owned() } else { all.join(" ") });
            draft.note(AuditEntry::once(unix_s, "member-grant", key.host.id().to_string(), detail));
            Ok(Some(member_of(key.host, record)?))
        })
    }

    /// Every member.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn members(&self) -> Result<Vec<Member>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(MEMBERS)?;
            let mut all = Vec::new();
            for entry in table.iter()? {
                let (key, value) = entry?;
                let host = HostPublic(bytes("a host's key", &key.value()[..32])?);
                all.push(member_of(host, MemberRecord::decode(value.value())?)?);
            }
            Ok(all)
        })
    }

    /// Hosts that were put out, as long as something that was signed for them would hold.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn revocations(&self, unix_s: u64) -> Result<Vec<Revocation>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(REVOKED)?;
            let mut all = Vec::new();
            for entry in table.iter()? {
                let (key, until_s) = entry?;
                let (host_key, authority) =
                    (bytes("a host's key", &key.value()[..32])?, bytes("a block", &key.value()[32..])?);
                // Whoever may write into the cluster's store may write any time.
                let until_s = until_s.value().min(end_s(unix_s));
                all.push(Revocation { authority, host_key, until_s, by: None });
            }
            all.retain(|revocation| revocation.until_s >= unix_s);
            Ok(all)
        })
    }

    /// Removes a host from every authority, and revokes what was signed for it; gives what it was.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn remove_member(&self, host: HostId, unix_s: u64) -> Result<Vec<Member>, StoreError> {
        let gone: Vec<Member> = self.members()?.into_iter().filter(|member| member.host.id() == host).collect();
        if gone.is_empty() {
            return Ok(gone);
        }
        let key = |member: &Member| MemberKey { host: member.host, authority: authority_block(&member.authority) };
        let keys: Vec<[u8; 40]> = gone.iter().map(|member| member_key(&key(member))).collect();
        self.settle(|transaction, draft| {
            let members = transaction.open_table(MEMBERS)?;
            for key in &keys {
                let known = members.get(key)?.map(|known| known.value().to_vec());
                draft.put(SharedTable::Members, key, known, None);
            }
            revoke(transaction, draft, &keys, unix_s)?;
            let detail = gone.iter().map(|member| member.authority.as_str()).collect::<Vec<_>>().join(" ");
            draft.note(AuditEntry::once(unix_s, "member-remove", host.to_string(), detail));
            Ok(())
        })?;
        Ok(gone)
    }
}

/// What decides about letting a host in.
fn rows_of(key: &MemberKey, token: Option<TokenHash>) -> Vec<(SharedTable, Vec<u8>)> {
    let member = (SharedTable::Members, member_key(key).to_vec());
    let token = token.map(|hash| (SharedTable::Tokens, hash.0.to_vec()));
    std::iter::once(member).chain(token).collect()
}

fn draft_admission(
    transaction: &WriteTransaction,
    draft: &mut Draft,
    key: &MemberKey,
    host_name: &str,
    token: Option<TokenHash>,
    unix_s: u64,
) -> Result<Result<Member, AdmitError>, Failure> {
    let members = transaction.open_table(MEMBERS)?;
    let before = members.get(member_key(key))?.map(|known| known.value().to_vec());
    let known = before.as_deref().map(MemberRecord::decode).transpose()?;
    let Some(hash) = token else {
        let member = known.map(|known| member_of(key.host, known)).transpose()?;
        return Ok(member.ok_or(AdmitError::NotAMember));
    };
    if let Some(known) = known.as_ref().filter(|known| known.tokens.iter().any(|used| *used == hash.0)) {
        return Ok(Ok(member_of(key.host, known.clone())?));
    }
    let tokens = transaction.open_table(TOKENS)?;
    let token_before = tokens.get(hash.0)?.map(|found| found.value().to_vec());
    let found = token_before.as_deref().map(|found| token_of(hash, found)).transpose()?;
    let mut token = match usable(found, key, unix_s) {
        Ok(token) => token,
        Err(error) => return Ok(Err(error)),
    };
    let is_new = known.is_none();
    let mut record = known.unwrap_or_else(|| MemberRecord { joined_s: unix_s, ..MemberRecord::default() });
    record.authority.clone_from(&token.authority);
    record.host_name = host_name.to_owned();
    merge(&mut record.grants, &token.grants.iter().map(|grant| prefix_key(grant).to_vec()).collect::<Vec<_>>());
    merge(&mut record.groups, &token.groups);
    record.tokens.push(hash.0.to_vec());
    if record.grants.len() > GRANTS_MAX || record.groups.len() > GROUPS_MAX {
        return Ok(Err(AdmitError::TooMuch));
    }
    if is_new && members.len()? >= MEMBERS_MAX {
        return Err(Failure::Full { what: "member hosts", limit: MEMBERS_MAX });
    }
    draft.put(SharedTable::Members, &member_key(key), before, Some(record.encode_to_vec()));
    token.uses_left = token.uses_left.saturating_sub(1);
    draft.put(SharedTable::Tokens, &hash.0, token_before, Some(encode_token(&token)));
    let (subject, detail) = (key.host.id().to_string(), format!("{} by token {}", token.authority, hash.id()));
    draft.note(AuditEntry::once(unix_s, "join", subject, detail));
    Ok(Ok(member_of(key.host, record)?))
}

/// Nothing that was signed for hosts until now holds any longer.
fn revoke(transaction: &WriteTransaction, draft: &mut Draft, keys: &[[u8; 40]], unix_s: u64) -> Result<(), Failure> {
    let table = transaction.open_table(REVOKED)?;
    let mut known: Vec<(u64, [u8; 40])> = Vec::new();
    for entry in table.iter()? {
        let (key, until_s) = entry?;
        known.push((until_s.value(), key.value()));
    }
    known.sort_unstable();
    let encoded = |until_s: u64| until_s.to_be_bytes().to_vec();
    let others = known.iter().filter(|(_, key)| !keys.contains(key));
    // Of more, those that end first are forgotten, here as at the hosts.
    let surplus = (others.clone().count() + keys.len()).saturating_sub(REVOCATIONS_MAX);
    for (rank, (until_s, key)) in others.take(CLEARED_MAX).enumerate() {
        let is_over = *until_s < unix_s;
        if rank < surplus && !is_over {
            tracing::warn!(
                limit = REVOCATIONS_MAX,
                "more revocations than are remembered: the oldest certificates hold to their end"
            );
        }
        if is_over || rank < surplus {
            draft.put(SharedTable::Revoked, key, Some(encoded(*until_s)), None);
        }
    }
    for key in keys {
        let before = known.iter().find(|(_, known)| known == key).map(|(until_s, _)| encoded(*until_s));
        draft.put(SharedTable::Revoked, key, before, Some(encoded(unix_s + LIFETIME_S)));
    }
    Ok(())
}

fn usable(found: Option<Token>, key: &MemberKey, unix_s: u64) -> Result<Token, AdmitError> {
    let token = found.ok_or(AdmitError::UnknownToken)?;
    if authority_block(&token.authority) != key.authority {
        return Err(AdmitError::OtherAuthority);
    }
    match token.state(unix_s) {
        TokenState::Usable => Ok(token),
        TokenState::Expired => Err(AdmitError::Expired),
        TokenState::UsedUp => Err(AdmitError::UsedUp),
    }
}

#[cfg(test)]
mod tests {
    use margay_core::name::{Name, ServiceId};

    use super::*;
    use crate::store::tests::store;

    fn token(n: u8, uses_left: u32) -> Token {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&authority_block("shop"));
        Token {
            hash: TokenHash([n; 32]),
            authority: "shop".to_owned(),
            grants: vec![Prefix::new(ServiceId(id), 64)],
            groups: vec!["web".to_owned()],
            uses_left,
            created_s: 100,
            expires_s: 200,
        }
    }

    fn host(n: u8) -> MemberKey {
        MemberKey { host: HostPublic([n; 32]), authority: authority_block("shop") }
    }

    #[test]
    fn a_token_admits_as_many_hosts_as_it_says_and_each_once() {
        let (_base, store) = store();
        store.add_token(&token(1, 1)).expect("written");
        let hash = Some(TokenHash([1; 32]));
        assert!(matches!(store.admit(&host(1), "a", None, 150), Err(AdmitError::NotAMember)));
        let member = store.admit(&host(1), "a", hash, 150).expect("let in");
        let web: Name = "web.shop".parse().expect("a name");
        assert!(member.may_register(&web.prefix()) && !member.may_register(&Prefix::default()));
        // The welcome was lost, the host asks again; and later without the token.
        assert_eq!(store.admit(&host(1), "a", hash, 900).expect("let in"), member);
        assert_eq!(store.admit(&host(1), "a", None, 900).expect("let in"), member);
        assert!(matches!(store.admit(&host(2), "b", hash, 150), Err(AdmitError::UsedUp)));
        assert_eq!(store.members().expect("readable").len(), 1);
        assert_eq!(store.tokens().expect("readable")[0].state(150), TokenState::UsedUp);
        let acts: Vec<String> = store.audit(10).expect("readable").into_iter().map(|entry| entry.act).collect();
        assert_eq!(acts, ["join", "token-create"]);
    }

    #[test]
    fn wrong_late_and_foreign_tokens_admit_nobody() {
        let (_base, store) = store();
        store.add_token(&token(1, 5)).expect("written");
        let hash = Some(TokenHash([1; 32]));
        assert!(matches!(store.admit(&host(1), "a", Some(TokenHash([9; 32])), 150), Err(AdmitError::UnknownToken)));
        assert!(matches!(store.admit(&host(1), "a", hash, 201), Err(AdmitError::Expired)));
        let foreign = MemberKey { authority: authority_block("other"), ..host(1) };
        assert!(matches!(store.admit(&foreign, "a", hash, 150), Err(AdmitError::OtherAuthority)));
        assert!(store.revoke_token(&TokenHash([1; 32]).id(), 160).expect("written").is_some());
        assert!(matches!(store.admit(&host(1), "a", hash, 170), Err(AdmitError::UnknownToken)));
        assert!(store.members().expect("readable").is_empty());
    }

    #[test]
    fn a_second_token_adds_to_what_a_host_may_and_removal_takes_all() {
        let (_base, store) = store();
        store.add_token(&token(1, 5)).expect("written");
        store.add_token(&Token { groups: vec!["db".to_owned()], ..token(2, 5) }).expect("written");
        store.admit(&host(1), "a", Some(TokenHash([1; 32])), 150).expect("let in");
        let member = store.admit(&host(1), "a", Some(TokenHash([2; 32])), 150).expect("let in");
        assert_eq!(member.groups, ["web", "db"]);
        assert_eq!(member.grants.len(), 1);
        assert_eq!(store.remove_member(host(1).host.id(), 160).expect("written").len(), 1);
        let revoked = |unix_s| store.revocations(unix_s).expect("readable");
        let until_s = 160 + LIFETIME_S;
        assert_eq!(
            revoked(160),
            [Revocation { authority: host(1).authority, host_key: host(1).host.0, until_s, by: None }]
        );
        assert_eq!(revoked(until_s + 1), [], "all that was signed has ended by itself");
        assert!(store.member(&host(1)).expect("readable").is_none());
        assert!(matches!(store.admit(&host(1), "a", None, 150), Err(AdmitError::NotAMember)));
    }

    #[test]
    fn old_tokens_are_cleared_away() {
        let (_base, store) = store();
        store.add_token(&token(1, 5)).expect("written");
        let newer = Token { created_s: 10_000_000, expires_s: 10_000_100, ..token(2, 5) };
        store.add_token(&newer).expect("written");
        assert_eq!(store.tokens().expect("readable"), [newer]);
    }
}
