//! Taking back the right to sign for an authority: the word of its own key, as people carry it and as routers tell it.
//!
//! ```text
//! margay-revocation- and the digits (`armor.rs`) of what `key_revocation.rs` of the core encodes
//! ```

use std::collections::BTreeMap;

use margay_core::key::VerifyingKey;
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::authority_block;

use super::{LIFETIME_MAX_S, SKEW_S, WarrantError};
use crate::armor::Armor;
use crate::keyring::{Authority, Keyring};
use crate::lineage::{Lineage, LineageError};
use crate::store::Store;

/// What its text begins with.
pub const REVOCATION_PREFIX: &str = "margay-revocation-";
const REVOCATION: Armor = Armor {
    prefix: REVOCATION_PREFIX,
    noun: "revocation",
    made_by: "`margay id authority revoke`, where the authority's key is,",
    text_max: 1024,
};

/// Takes back what the authority has let `key` sign, in all warrants that it may have.
///
/// # Errors
///
/// The authority's own key is not here, or it is the key.
pub fn revoke(by: &Authority, key: VerifyingKey, unix_s: u64) -> Result<KeyRevocation, WarrantError> {
    if by.warrant.is_some() {
        return Err(WarrantError::NotRoot(by.name.clone()));
    }
    // A key that another one follows already is taken back by that.
    let signer = by.next.as_ref().map_or(&by.key, |next| &next.key);
    if key == signer.public() {
        return Err(WarrantError::OwnKey(by.name.clone()));
    }
    // No warrant that was signed until now holds longer.
    let is_own = key == by.key.public();
    let until_s = if is_own { u64::MAX } else { unix_s.saturating_add(LIFETIME_MAX_S + SKEW_S) };
    Ok(KeyRevocation::new(by.block(), key, until_s, signer))
}

/// As text.
pub fn write_revocation(revocation: &KeyRevocation) -> String {
    REVOCATION.write(&revocation.encode()).to_string()
}

/// From text.
///
/// # Errors
///
/// It is none, or not signed by the key that it names.
pub fn read_revocation(text: &str) -> Result<KeyRevocation, WarrantError> {
    let read = KeyRevocation::decode(&REVOCATION.read(text)?);
    let read = read.map_err(|_| WarrantError::Malformed(REVOCATION.noun))?;
    if read.is_signed() { Ok(read) } else { Err(WarrantError::Unsigned(REVOCATION.noun)) }
}

/// The name and the own key of the authority that a revocation is about, as this host knows it.
///
/// # Errors
///
/// It knows none, or one with another key.
pub fn revoker(
    revocation: &KeyRevocation,
    keyring: &Keyring,
    store: &Store,
    unix_s: u64,
) -> Result<String, WarrantError> {
    let known = lineages(keyring, store)
        .map_err(|error| WarrantError::Unreadable(error.to_string()))?
        .remove(&revocation.authority);
    let (name, line) = known.ok_or(WarrantError::Stranger)?;
    if line.says(revocation, unix_s) { Ok(name) } else { Err(WarrantError::OtherRoot(name)) }
}

/// The revocations of keys that this host has, as far as they are by the authorities that it knows.
///
/// # Errors
///
/// They cannot be read, or whom this host knows cannot: nobody is to go on as if nothing were revoked.
pub fn believed(keyring: &Keyring, store: &Store, unix_s: u64) -> Result<Vec<KeyRevocation>, LineageError> {
    let all = store.key_revocations(unix_s)?;
    if all.is_empty() {
        return Ok(all);
    }
    let lineages = lineages(keyring, store)?;
    let is_by = |one: &KeyRevocation| lineages.get(&one.authority).is_some_and(|(_, line)| line.says(one, unix_s));
    // Of several for one key, the one that holds for longest.
    let mut longest: BTreeMap<([u8; 8], [u8; 32]), KeyRevocation> = BTreeMap::new();
    for one in all.into_iter().filter(is_by) {
        let known = longest.entry((one.authority, one.key.0)).or_insert(one);
        if known.until_s < one.until_s {
            *known = one;
        }
    }
    Ok(longest.into_values().collect())
}

/// By block, the name and the keys of each authority that this host signs for or has joined.
///
/// # Errors
///
/// They cannot be read: what an authority demands would be forgotten with it.
pub fn lineages(keyring: &Keyring, store: &Store) -> Result<BTreeMap<[u8; 8], (String, Lineage)>, LineageError> {
    let joined = store.joined()?.into_iter();
    let joined = joined.map(|joined| (authority_block(&joined.authority), (joined.authority, joined.authority_key)));
    let signed = keyring.authorities()?.into_iter();
    // What this host signs for counts for more.
    let known: BTreeMap<_, _> =
        joined.chain(signed.map(|known| (known.block(), (known.name.clone(), known.root())))).collect();
    let line = |(block, (name, root))| Ok((block, (name, Lineage::of(store, block, root)?)));
    known.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use margay_core::key::SigningKey;
    use margay_core::rng::Rng;

    use super::*;
    use crate::armor::ArmorError;

    const NOW_S: u64 = 1_700_000_000;

    fn authority() -> Authority {
        Authority {
            name: "shop".to_owned(),
            key: SigningKey::generate(&mut Rng::new([1; 32])),
            warrant: None,
            revoked: None,
            next: None,
        }
    }

    #[test]
    fn a_revocation_outlives_every_warrant_and_comes_back_from_its_text() {
        let (by, key) = (authority(), VerifyingKey([9; 32]));
        let made = revoke(&by, key, NOW_S).expect("made");
        assert_eq!((made.authority, made.key, made.signer), (by.block(), key, by.key.public()));
        assert!(made.until_s >= NOW_S + LIFETIME_MAX_S);
        let text = write_revocation(&made);
        assert!(text.starts_with(REVOCATION_PREFIX), "{text}");
        assert_eq!(read_revocation(&text), Ok(made));
        let forged = KeyRevocation { key: VerifyingKey([8; 32]), ..made };
        assert_eq!(read_revocation(&write_revocation(&forged)), Err(WarrantError::Unsigned("revocation")));
        assert!(matches!(read_revocation(&text[..90]), Err(WarrantError::Text(ArmorError::Checksum(_)))));
        assert_eq!(revoke(&by, by.key.public(), NOW_S), Err(WarrantError::OwnKey("shop".to_owned())));
    }
}
