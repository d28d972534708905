//! The keys of an authority, from the one that a host was told when it joined to the one that signs now.
//!
//! ```text
//! margay-succession- and the digits (`armor.rs`) of what `succession.rs` of the core encodes
//! ```

use margay_core::certificate::{Certificate, TrustAnchor, TrustStore, decode_chain};
use margay_core::key::VerifyingKey;
use margay_core::key_revocation::KeyRevocation;
use margay_core::succession::{Succession, heirs};

use crate::armor::Armor;
use crate::keyring::Keyring;
use crate::store::{Kept, Store, StoreError};
use crate::warrant::WarrantError;
use crate::wide_area::WideArea;
use crate::{SalControl, StateError};

/// What the text of a succession begins with.
pub const SUCCESSION_PREFIX: &str = "margay-succession-";
const SUCCESSION: Armor = Armor {
    prefix: SUCCESSION_PREFIX,
    noun: "succession",
    made_by: "`margay id authority succeed`, where the authority's key is,",
    text_max: 1024,
};

/// A succession as text.
pub fn write_succession(succession: &Succession) -> String {
    SUCCESSION.write(&succession.encode()).to_string()
}

/// From text.
///
/// # Errors
///
/// It is none, or not signed by both keys.
pub fn read_succession(text: &str) -> Result<Succession, WarrantError> {
    let read = Succession::decode(&SUCCESSION.read(text)?);
    let read = read.map_err(|_| WarrantError::Malformed(SUCCESSION.noun))?;
    if read.is_signed() { Ok(read) } else { Err(WarrantError::Unsigned(SUCCESSION.noun)) }
}

/// Has the store keep the successions that were made here, just now or before it failed or a crash came between. Until
/// it has, nobody is told. True: there was one that it had not. What another key has overtaken is dropped.
///
/// # Errors
///
/// A key cannot be read, or the store does not take it.
pub fn take_up(keyring: &Keyring, store: &Store, unix_s: u64) -> Result<bool, TakeUpError> {
    let mut is_new = false;
    for (name, succession) in keyring.waiting()? {
        match store.keep_succession(&succession, &name, unix_s)? {
            Kept::New => is_new = true,
            Kept::Known => {}
            Kept::Rival => {
                keyring.drop_next(&name)?;
                return Err(TakeUpError::Rival(name));
            }
        }
    }
    Ok(is_new)
}

/// Why a succession that was made here is not told.
#[derive(Debug, thiserror::Error)]
pub enum TakeUpError {
    /// A key cannot be read.
    #[error(transparent)]
    State(#[from] StateError),
    /// It is not kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Somebody else has the authority's key.
    #[error(
        "another key follows that of {0} already, as far as is known here: somebody else has it, or a copy of it was \
         used"
    )]
    Rival(String),
}

/// Which authorities this host knows, and by which keys, cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LineageError {
    /// The keys of this host.
    #[error(transparent)]
    State(#[from] StateError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// One authority's line of keys, as this host knows it.
#[derive(Clone, Debug)]
pub struct Lineage {
    /// Its block.
    pub authority: [u8; 8],
    first: VerifyingKey,
    line: Vec<Succession>,
}

impl Lineage {
    /// From the key that is known, by what the store has.
    ///
    /// # Errors
    ///
    /// The disk refuses. The key that is known may have been followed by others long ago, and be somebody else's by
    /// now: nobody is to believe it alone.
    pub fn of(store: &Store, authority: [u8; 8], first: VerifyingKey) -> Result<Self, StoreError> {
        let known = store.successions()?;
        let mut first = first;
        // Who knows a later key believes what it says of the earlier one, for its time.
        let mut seen = 0;
        while let Some(before) = known.iter().find(|one| one.authority == authority && one.new == first)
            && seen < known.len()
        {
            (first, seen) = (before.old, seen + 1);
        }
        Ok(Self { authority, first, line: heirs(authority, first, &known) })
    }

    /// The first key of the line.
    pub fn first(&self) -> VerifyingKey {
        self.first
    }

    /// Whether a succession goes on with the line, at either end.
    pub fn takes(&self, one: &Succession) -> bool {
        one.authority == self.authority && (one.old == self.last() || one.new == self.first || self.line.contains(one))
    }

    /// Has the core trust all of it, each for its time.
    pub fn teach(&self, sal: &dyn SalControl) {
        sal.add_trust_anchor(TrustAnchor { authority: self.authority, key: self.first });
        self.line.iter().for_each(|one| sal.succeed(one));
    }

    /// Has a trust store trust all of it.
    pub fn teach_store(&self, trust: &mut TrustStore) {
        trust.add(TrustAnchor { authority: self.authority, key: self.first });
        self.line.iter().for_each(|one| trust.succeed(one));
    }

    /// The last key: what is signed from its time on is signed by it.
    pub fn last(&self) -> VerifyingKey {
        self.line.last().map_or(self.first, |last| last.new)
    }

    /// Has the router of a site trust all of it.
    pub fn teach_area(&self, area: &WideArea) {
        area.trust(TrustAnchor { authority: self.authority, key: self.first });
        self.line.iter().for_each(|one| area.succeed(one));
    }

    /// From each to the next.
    pub fn successions(&self) -> &[Succession] {
        &self.line
    }

    fn place(&self, key: &VerifyingKey) -> Option<usize> {
        let keys = std::iter::once(self.first).chain(self.line.iter().map(|one| one.new));
        keys.into_iter().position(|known| known == *key)
    }

    /// Until when what a key of the line has signed is believed, in seconds since 1970; the last one's has no end.
    /// `None`: it is none.
    pub fn until_s(&self, key: &VerifyingKey) -> Option<u64> {
        let place = self.place(key)?;
        Some(self.line.get(place).map_or(u64::MAX, |next| next.trusted_until_s))
    }

    /// Until when the key is believed with which a chain begins; of what is no chain of the line, for ever: its own
    /// time counts.
    pub fn chain_until_s(&self, chain: &[u8]) -> u64 {
        let first: Option<Certificate> = decode_chain(chain).ok().and_then(|chain| chain.into_iter().next());
        first.and_then(|first| self.until_s(&first.issuer)).unwrap_or(u64::MAX)
    }

    /// Whether the authority says so: by a key that is believed at `unix_s`; and of a key of the authority itself, by
    /// one that came after it.
    pub fn says(&self, revocation: &KeyRevocation, unix_s: u64) -> bool {
        let Some(signer) = self.place(&revocation.signer) else { return false };
        let is_later = self.place(&revocation.key).is_none_or(|revoked| revoked < signer);
        let is_in_time = self.until_s(&revocation.signer).is_some_and(|until_s| unix_s <= until_s);
        revocation.authority == self.authority && is_later && is_in_time && revocation.is_signed()
    }
}

#[cfg(test)]
mod tests {
    use margay_core::key::SigningKey;
    use margay_core::name::authority_block;
    use margay_core::rng::Rng;

    use super::*;
    use crate::StateDir;

    fn key(n: u8) -> SigningKey {
        SigningKey::generate(&mut Rng::new([n; 32]))
    }

    #[test]
    fn a_succession_comes_back_from_its_text() {
        let made = Succession::new(authority_block("shop"), &key(1), &key(2), 5, 10);
        assert_eq!(read_succession(&write_succession(&made)), Ok(made));
        let forged = Succession { trusted_until_s: 11, ..made };
        assert_eq!(read_succession(&write_succession(&forged)), Err(WarrantError::Unsigned("succession")));
    }

    #[test]
    fn what_was_made_and_not_told_is_taken_up() {
        const NOW_S: u64 = 1_700_000_000;
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let (keyring, store) = (Keyring::open(&dir).expect("opened"), Store::open(&dir).expect("made"));
        keyring.create_authority("shop").expect("made");
        assert!(!take_up(&keyring, &store, NOW_S).expect("nothing is made"));
        let made = keyring.succeed("shop", NOW_S, 20).expect("made");
        assert_eq!(store.successions().expect("readable"), []);
        assert!(take_up(&keyring, &store, NOW_S).expect("it is kept"));
        assert_eq!(store.successions().expect("readable"), [made]);
        assert!(!take_up(&keyring, &store, NOW_S).expect("it is known"));
        assert_eq!(keyring.promote(NOW_S + 10, None).expect("its time has come"), ["shop"]);
        assert!(!take_up(&keyring, &store, NOW_S + 10).expect("it signs"));

        let signs = keyring.authority("shop").expect("readable").expect("is there").key;
        keyring.succeed("shop", NOW_S + 10, 20).expect("made");
        let rival = Succession::new(authority_block("shop"), &signs, &key(9), NOW_S, NOW_S + 20);
        assert_eq!(store.keep_succession(&rival, "shop", NOW_S).expect("kept"), Kept::New);
        assert!(matches!(take_up(&keyring, &store, NOW_S + 10), Err(TakeUpError::Rival(name)) if name == "shop"));
        assert_eq!(keyring.waiting().expect("readable"), [], "nobody was told of it, and nobody is");
    }

    #[test]
    fn where_the_keys_that_follow_cannot_be_read_the_one_before_them_is_not_believed_alone() {
        let (_base, store) = crate::store::tests::store();
        let follows = Succession::new(authority_block("shop"), &key(1), &key(2), 5, 10);
        store.keep_succession(&follows, "shop", 5).expect("kept");
        let line = || Lineage::of(&store, authority_block("shop"), key(1).public());
        assert_eq!(line().expect("readable").until_s(&key(1).public()), Some(10));
        crate::store::tests::damage(&store);
        assert!(matches!(line(), Err(StoreError::Damaged { .. })));
    }

    #[test]
    fn who_may_revoke_comes_later_and_is_believed_still() {
        let block = authority_block("shop");
        let succession = |old, new, until| Succession::new(block, &key(old), &key(new), until - 5, until);
        let line = vec![succession(1, 2, 100), succession(2, 3, 200)];
        let lineage = Lineage { authority: block, first: key(1).public(), line };
        assert_eq!(lineage.last(), key(3).public());
        let untils = [1, 2, 3, 4].map(|n| lineage.until_s(&key(n).public()));
        assert_eq!(untils, [Some(100), Some(200), Some(u64::MAX), None]);
        let says = |of: u8, by: u8, unix_s| {
            lineage.says(&KeyRevocation::new(block, key(of).public(), u64::MAX, &key(by)), unix_s)
        };
        assert_eq!([says(9, 2, 200), says(9, 2, 201), says(9, 3, 900)], [true, false, true], "a router's key");
        assert_eq!([says(1, 2, 50), says(2, 1, 50), says(2, 2, 50)], [true, false, false], "the authority's");
        assert!(!says(9, 4, 50), "nobody");
    }
}
