//! The signing keys of this host: of authorities that it speaks for, and of services whose names certify themselves
//! (DESIGN §5).

use std::fs;

use margay_core::certificate::{Certificate, CertificateKind};
use margay_core::key::{HostPublic, SigningKey, VerifyingKey, from_hex, to_hex};
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::{Name, ServiceId, authority_block, self_certifying_tail};
use margay_core::succession::{SUCCESSION_LEN, Succession};
use zeroize::Zeroizing;

use crate::entropy;
use crate::state_dir::{StateDir, StateError, damaged};
use crate::warrant::{
    Delegation, LIFETIME_MAX_S, Permit, Request, Warrant, WarrantError, read_revocation, write_revocation,
};

const SUFFIX: &str = ".key";
/// A key that waits for its warrant; the same format.
const REQUESTED: &str = ".requested";
/// A key that is to follow; the same format, and then the succession in hexadecimal digits.
const NEXT: &str = ".next";
const PERMIT: &str = ".warrant";
const AUTHORITY_MAGIC: &str = "margay-authority-key-1";
const SERVICE_MAGIC: &str = "margay-service-key-1";

/// An authority's name, and a key that signs for it.
#[derive(Clone, Debug)]
pub struct Authority {
    /// Its name: what stands after the service in `web.shop`.
    pub name: String,
    /// The private key: the authority's own, or this router's.
    pub key: SigningKey,
    /// By what a key of this router signs; `None`: the key is the authority's own.
    pub warrant: Option<Delegation>,
    /// The authority has taken back what it had let this router's key sign.
    pub revoked: Option<KeyRevocation>,
    /// The key that follows the authority's own one, from its time on.
    pub next: Option<Next>,
}

/// A key that is to follow an authority's own one.
#[derive(Clone, Debug)]
pub struct Next {
    /// It.
    pub key: SigningKey,
    /// By the word of both.
    pub succession: Succession,
}

impl Authority {
    /// The first 64 bits of its names.
    pub fn block(&self) -> [u8; 8] {
        authority_block(&self.name)
    }

    /// The authority's own key: what hosts trust.
    pub fn root(&self) -> VerifyingKey {
        self.warrant.as_ref().map_or_else(|| self.key.public(), |warrant| warrant.root)
    }

    /// What stands between the root and what is signed here.
    pub fn delegations(&self, kind: CertificateKind) -> &[Certificate] {
        match (&self.warrant, kind) {
            (None, _) => &[],
            (Some(warrant), CertificateKind::Member) => &warrant.members,
            (Some(warrant), CertificateKind::Service) => &warrant.services,
        }
    }

    /// What to say, and to do, when it is not [valid](Self::is_valid).
    pub fn ended(&self) -> String {
        let name = &self.name;
        if self.revoked.is_some() {
            return format!(
                "the authority has taken back the router's right to sign for {name}: `margay id authority request \
                 {name}` there asks for it with a new key, `margay id authority sign` where the authority's key is, \
                 `margay id accept` there"
            );
        }
        format!(
            "the router's right to sign for {name} has ended: `margay id authority request {name}` there, `margay id \
             authority sign` where the authority's key is, `margay id accept` there"
        )
    }

    /// Whether what is signed here holds.
    pub fn is_valid(&self, unix_s: u64) -> bool {
        self.revoked.is_none() && self.warrant.as_ref().is_none_or(|warrant| unix_s <= warrant.not_after_s())
    }
}

/// Why a warrant is not taken.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// It is wrong, or somebody else's.
    #[error(transparent)]
    Warrant(#[from] WarrantError),
    /// It cannot be kept.
    #[error(transparent)]
    State(#[from] StateError),
}

/// How long the key before and the one that follows it may both be trusted.
const OVERLAP_S: std::ops::RangeInclusive<u64> = 10..=LIFETIME_MAX_S;

/// Why no key follows.
#[derive(Debug, thiserror::Error)]
pub enum SucceedError {
    /// It is elsewhere.
    #[error("the own key of `{0}` is not here; say this on the host that has it (`margay id` lists what is here)")]
    NoKey(String),
    /// One at a time.
    #[error("a key is to follow that of `{0}` already, and does not sign yet; `margay id` says when it will")]
    UnderWay(String),
    /// Too short or too long.
    #[error("both keys are trusted from ten seconds to a year")]
    Overlap,
    /// It cannot be kept.
    #[error(transparent)]
    State(#[from] StateError),
}

/// A service's key, and the name that certifies itself by it.
#[derive(Clone, Debug)]
pub struct ServiceKey {
    /// As written: `web.shop`.
    pub name: String,
    /// Its private key.
    pub key: SigningKey,
    /// The head of the written name, then the key's tail.
    pub service: ServiceId,
}

/// The directory `keys` of the state directory.
#[derive(Clone, Debug)]
pub struct Keyring {
    authorities: StateDir,
    services: StateDir,
    permits: StateDir,
}

impl Keyring {
    /// Opens it; makes the directories.
    ///
    /// # Errors
    ///
    /// A directory cannot be made, or others may write in it.
    pub fn open(dir: &StateDir) -> Result<Self, StateError> {
        let keys = dir.subdir("keys")?;
        let (authorities, services) = (keys.subdir("authority")?, keys.subdir("service")?);
        Ok(Self { authorities, services, permits: keys.subdir("permit")? })
    }

    /// Makes an authority's key.
    ///
    /// # Errors
    ///
    /// The name is no name, there is such a key already, or it cannot be written.
    pub fn create_authority(&self, name: &str) -> Result<Authority, StateError> {
        check_authority(name)?;
        let key = create(&self.authorities, name, AUTHORITY_MAGIC)?;
        Ok(Authority { name: name.to_owned(), key, warrant: None, revoked: None, next: None })
    }

    /// Asks for the right to sign for an authority: by the key that this router signs by already, by the one that it
    /// asked for before, or by a new one.
    ///
    /// # Errors
    ///
    /// The name is no name, the authority's own key is here, or the key cannot be written.
    pub fn request(&self, name: &str, is_new_key: bool) -> Result<Request, StateError> {
        let known = self.authority(name)?;
        if known.as_ref().is_some_and(|known| known.warrant.is_none()) {
            return Err(StateError::Exists(self.authorities.join(&format!("{name}{SUFFIX}"))));
        }
        // A key that was taken back is of no use again.
        if let (Some(known), false) = (known.as_ref().filter(|known| known.revoked.is_none()), is_new_key) {
            return Ok(Request::new(name, &known.key));
        }
        let file = format!("{name}{REQUESTED}");
        let waiting = if is_new_key { None } else { self.requested(name)? };
        let key = match waiting {
            Some(key) => key,
            None => {
                let key = SigningKey::generate(&mut entropy::rng()?);
                self.authorities.write(&file, line(AUTHORITY_MAGIC, &key).as_bytes())?;
                key
            }
        };
        Ok(Request::new(name, &key))
    }

    fn requested(&self, name: &str) -> Result<Option<SigningKey>, StateError> {
        let file = format!("{name}{REQUESTED}");
        let Some(text) = self.authorities.read(&file)? else { return Ok(None) };
        read_key(&self.authorities, &file, &text, AUTHORITY_MAGIC).map(Some)
    }

    fn next(&self, name: &str) -> Result<Option<Next>, StateError> {
        let file = format!("{name}{NEXT}");
        let Some(text) = self.authorities.read(&file)? else { return Ok(None) };
        let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
        let key = read_key(&self.authorities, &file, first, AUTHORITY_MAGIC)?;
        let succession = from_hex::<SUCCESSION_LEN>(rest.trim()).ok();
        let succession = succession.and_then(|bytes| Succession::decode(&bytes).ok()).ok_or_else(|| {
            damaged(
                &self.authorities.join(&file),
                "what follows the key is no succession; restore it from a copy".to_owned(),
            )
        })?;
        Ok(Some(Next { key, succession }))
    }

    /// Makes a key that follows an authority's own one, after half of `overlap_s`; that one is trusted to its end.
    /// Nobody is told.
    ///
    /// # Errors
    ///
    /// The authority's own key is not here, one is to follow it already, or it cannot be written.
    pub fn succeed(&self, name: &str, unix_s: u64, overlap_s: u64) -> Result<Succession, SucceedError> {
        let known = self.authority(name)?.ok_or_else(|| SucceedError::NoKey(name.to_owned()))?;
        if known.warrant.is_some() {
            return Err(SucceedError::NoKey(name.to_owned()));
        }
        if !OVERLAP_S.contains(&overlap_s) {
            return Err(SucceedError::Overlap);
        }
        if known.next.is_some() {
            return Err(SucceedError::UnderWay(name.to_owned()));
        }
        let key = SigningKey::generate(&mut entropy::rng().map_err(StateError::from)?);
        let (from_s, until_s) = (unix_s.saturating_add(overlap_s / 2), unix_s.saturating_add(overlap_s));
        let succession = Succession::new(known.block(), &known.key, &key, from_s, until_s);
        let encoded = to_hex(&succession.encode());
        let content = Zeroizing::new(format!("{}{encoded}\n", *line(AUTHORITY_MAGIC, &key)));
        self.authorities.write(&format!("{name}{NEXT}"), content.as_bytes())?;
        Ok(succession)
    }

    /// Takes back what [`succeed`](Self::succeed) has made, where nobody could be told.
    ///
    /// # Errors
    ///
    /// A file cannot be removed.
    pub fn drop_next(&self, name: &str) -> Result<(), StateError> {
        let path = self.authorities.join(&format!("{name}{NEXT}"));
        fs::remove_file(&path).map_err(|error| StateError::Io { path, act: "remove the key", error })
    }

    /// Successions that were made here, of keys that do not sign yet, with the authorities' names.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or holds something else.
    pub fn waiting(&self) -> Result<Vec<(String, Succession)>, StateError> {
        let mut waiting = Vec::new();
        for name in self.authorities.list(NEXT)? {
            waiting.extend(self.next(&name)?.map(|next| (name, next.succession)));
        }
        Ok(waiting)
    }

    /// Keys whose time has come sign from now on, and those before them are gone; `name`: this one's in any case. Gives
    /// the names.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or holds something else; or it cannot be written.
    pub fn promote(&self, unix_s: u64, name: Option<&str>) -> Result<Vec<String>, StateError> {
        let mut promoted = Vec::new();
        for waiting in self.authorities.list(NEXT)? {
            let Some(next) = self.next(&waiting)? else { continue };
            if unix_s < next.succession.signs_from_s && name != Some(&waiting) {
                continue;
            }
            // A crash after this leaves the same key twice, which is taken for one.
            self.authorities.write(&format!("{waiting}{SUFFIX}"), line(AUTHORITY_MAGIC, &next.key).as_bytes())?;
            self.drop_next(&waiting)?;
            promoted.push(waiting);
        }
        Ok(promoted)
    }

    /// Takes what was signed for a request of this host: from now on it signs for the authority. `heirs`: keys that
    /// follow the one by which it signs until now.
    ///
    /// # Errors
    ///
    /// It does not hold, it is for another host, or it cannot be written.
    pub fn accept(&self, warrant: Delegation, heirs: &[VerifyingKey], unix_s: u64) -> Result<Authority, AcceptError> {
        let name = warrant.authority.clone();
        let known = self.authority(&name)?;
        if known.as_ref().is_some_and(|known| known.root() != warrant.root) && !heirs.contains(&warrant.root) {
            return Err(WarrantError::OtherRoot(name).into());
        }
        let mut keys: Vec<SigningKey> = self.requested(&name)?.into_iter().collect();
        keys.extend(known.filter(|known| known.warrant.is_some() && known.revoked.is_none()).map(|known| known.key));
        let mut verdict = Err(WarrantError::NotHere);
        for key in keys {
            verdict = match warrant.verify(&key.public(), unix_s) {
                Ok(()) => Ok(key),
                // The one that is signed by now may be right where the one that was asked for is not.
                Err(WarrantError::NotHere) => continue,
                Err(error) => Err(error),
            };
            break;
        }
        let key = verdict?;
        let text = Warrant::Authority(warrant.clone()).to_string();
        let content = Zeroizing::new(format!("{}{text}\n", *line(AUTHORITY_MAGIC, &key)));
        self.authorities.write(&format!("{name}{SUFFIX}"), content.as_bytes())?;
        // A crash before this leaves a key that nothing asks for.
        let _ = fs::remove_file(self.authorities.join(&format!("{name}{REQUESTED}")));
        Ok(Authority { name, key, warrant: Some(warrant), revoked: None, next: None })
    }

    /// Signs no more with a key of this host that its authority has taken back; false where there is none, or that was
    /// known. The caller knows that the authority says so.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or holds something else; or it cannot be written.
    pub fn give_up(&self, revocation: &KeyRevocation) -> Result<bool, StateError> {
        let Some(known) = self.authority_of(revocation.authority)? else { return Ok(false) };
        let Authority { name, key, warrant: Some(warrant), revoked: None, .. } = known else { return Ok(false) };
        if key.public() != revocation.key || warrant.not_after_s() > revocation.until_s {
            return Ok(false);
        }
        let (warrant, revoked) = (Warrant::Authority(warrant), write_revocation(revocation));
        let content = Zeroizing::new(format!("{}{warrant}\n{revoked}\n", *line(AUTHORITY_MAGIC, &key)));
        self.authorities.write(&format!("{name}{SUFFIX}"), content.as_bytes())?;
        Ok(true)
    }

    /// Takes what a service's key has signed for this host.
    ///
    /// # Errors
    ///
    /// It does not hold, it is for another host, or it cannot be written.
    pub fn accept_permit(&self, permit: &Permit, host: &HostPublic, unix_s: u64) -> Result<(), AcceptError> {
        permit.verify(host, unix_s)?;
        let text = Warrant::Service(permit.clone()).to_string();
        Ok(self.permits.write(&format!("{}{PERMIT}", permit.name), text.as_bytes())?)
    }

    /// Names of keys elsewhere that this host may answer for, by name.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or holds something else.
    pub fn permits(&self) -> Result<Vec<Permit>, StateError> {
        let names = self.permits.list(PERMIT)?;
        let read = |name: &String| {
            let file = format!("{name}{PERMIT}");
            let text = self.permits.read(&file)?.unwrap_or_default();
            match text.parse() {
                Ok(Warrant::Service(permit)) => Ok(permit),
                Ok(Warrant::Authority(_)) => Err(damaged(&self.permits.join(&file), "not for a service".to_owned())),
                Err(error) => Err(damaged(&self.permits.join(&file), format!("{error}, or remove the file"))),
            }
        };
        names.iter().map(read).collect()
    }

    /// One authority's key, if this host has it.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or holds something else.
    pub fn authority(&self, name: &str) -> Result<Option<Authority>, StateError> {
        check_authority(name)?;
        let file = format!("{name}{SUFFIX}");
        let Some(text) = self.authorities.read(&file)? else { return Ok(None) };
        let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
        let key = read_key(&self.authorities, &file, first, AUTHORITY_MAGIC)?;
        let mut rest = rest.split_whitespace();
        let (warrant, revoked) = (rest.next().map(str::parse), rest.next().map(read_revocation));
        let (warrant, revoked) = match (warrant, revoked.transpose()) {
            (None, Ok(None)) => (None, None),
            (Some(Ok(Warrant::Authority(warrant))), Ok(revoked)) if warrant.authority == name => {
                (Some(warrant), revoked)
            }
            _ => {
                let what = "what follows the key is no warrant for it; restore it from a copy, or ask for a new one";
                return Err(damaged(&self.authorities.join(&file), what.to_owned()));
            }
        };
        let next = self.next(name)?.filter(|next| next.key.public() != key.public());
        Ok(Some(Authority { name: name.to_owned(), key, warrant, revoked, next }))
    }

    /// The authority of a block, if this host has its key.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or holds something else.
    pub fn authority_of(&self, block: [u8; 8]) -> Result<Option<Authority>, StateError> {
        let names = self.authorities.list(SUFFIX)?;
        match names.iter().find(|name| authority_block(name) == block) {
            Some(name) => self.authority(name),
            None => Ok(None),
        }
    }

    /// Every authority whose key is here, by name.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or holds something else.
    pub fn authorities(&self) -> Result<Vec<Authority>, StateError> {
        let names = self.authorities.list(SUFFIX)?;
        let all: Result<Vec<Option<Authority>>, StateError> = names.iter().map(|name| self.authority(name)).collect();
        Ok(all?.into_iter().flatten().collect())
    }

    /// Makes a service's key; the name `service.authority` gives the first 96 bits, the key the rest.
    ///
    /// # Errors
    ///
    /// The name is no name, there is such a key already, or it cannot be written.
    pub fn create_service_key(&self, name: &str) -> Result<ServiceKey, StateError> {
        let head = check_service(name)?;
        let key = create(&self.services, name, SERVICE_MAGIC)?;
        Ok(service_key(name, key, head))
    }

    /// Every service key that is here, by name.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or holds something else.
    pub fn service_keys(&self) -> Result<Vec<ServiceKey>, StateError> {
        let mut keys = Vec::new();
        for name in self.services.list(SUFFIX)? {
            let (file, head) = (format!("{name}{SUFFIX}"), check_service(&name)?);
            if let Some(text) = self.services.read(&file)? {
                let key = read_key(&self.services, &file, &text, SERVICE_MAGIC)?;
                keys.push(service_key(&name, key, head));
            }
        }
        Ok(keys)
    }

    /// The key that certifies `service`, if it is here.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or holds something else.
    pub fn service_key_of(&self, service: &ServiceId) -> Result<Option<ServiceKey>, StateError> {
        Ok(self.service_keys()?.into_iter().find(|known| known.service == *service))
    }
}

fn service_key(name: &str, key: SigningKey, head: [u8; 12]) -> ServiceKey {
    let service = certified(head, &key.public());
    ServiceKey { name: name.to_owned(), key, service }
}

/// The name that a key certifies, written as `name`.
///
/// # Errors
///
/// The name is no name of a service.
pub(crate) fn service_of(name: &str, key: &VerifyingKey) -> Result<ServiceId, StateError> {
    Ok(certified(check_service(name)?, key))
}

fn certified(head: [u8; 12], key: &VerifyingKey) -> ServiceId {
    let mut id = [0; 32];
    id[..12].copy_from_slice(&head);
    id[12..].copy_from_slice(&self_certifying_tail(key, &head));
    ServiceId(id)
}

/// An authority is what may stand after a service's name; that also makes it a safe name of a file.
pub(crate) fn check_authority(name: &str) -> Result<(), StateError> {
    let whole = format!("x.{name}").parse::<Name>();
    match whole {
        // Names are read without regard to case; a key has one.
        Ok(whole) if !name.contains('/') && whole.written()[2..] == *name => Ok(()),
        _ => Err(StateError::Name(name.to_owned())),
    }
}

fn check_service(name: &str) -> Result<[u8; 12], StateError> {
    let bad = || StateError::Name(name.to_owned());
    let parsed: Name = name.parse().map_err(|_| bad())?;
    if name.contains(['/', ':']) || parsed.written() != name {
        return Err(bad());
    }
    let mut head = [0; 12];
    head.copy_from_slice(&parsed.service_id().0[..12]);
    Ok(head)
}

fn create(dir: &StateDir, name: &str, magic: &str) -> Result<SigningKey, StateError> {
    let file = format!("{name}{SUFFIX}");
    if dir.has(&file) {
        return Err(StateError::Exists(dir.join(&file)));
    }
    let key = SigningKey::generate(&mut entropy::rng()?);
    dir.write(&file, line(magic, &key).as_bytes())?;
    Ok(key)
}

fn line(magic: &str, key: &SigningKey) -> Zeroizing<String> {
    Zeroizing::new(format!("{magic} {}\n", to_hex(&key.to_bytes()[..])))
}

fn read_key(dir: &StateDir, file: &str, text: &str, magic: &str) -> Result<SigningKey, StateError> {
    let digits = text.trim_end().strip_prefix(magic).map(str::trim_start);
    let bytes = digits.and_then(|digits| from_hex::<32>(digits).ok());
    let bytes = bytes.map(Zeroizing::new).ok_or_else(|| {
        damaged(&dir.join(file), format!("not `{magic}` and 64 hexadecimal digits; restore it from a copy"))
    })?;
    Ok(SigningKey::from_bytes(&bytes))
}

/// A public key as people pass it on.
pub fn written_key(key: &VerifyingKey) -> String {
    to_hex(&key.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keyring() -> (tempfile::TempDir, Keyring) {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        (base, Keyring::open(&dir).expect("opened"))
    }

    #[test]
    fn keys_are_found_again_by_name_and_by_block() {
        let (_base, ring) = keyring();
        let made = ring.create_authority("shop").expect("made");
        let found = ring.authority_of(authority_block("shop")).expect("readable").expect("is there");
        assert_eq!(found.key.public(), made.key.public());
        assert!(ring.authority("other").expect("readable").is_none());
        assert_eq!(ring.authorities().expect("listed").len(), 1);
    }

    #[test]
    fn a_service_key_gives_a_name_that_it_certifies() {
        let (_base, ring) = keyring();
        let made = ring.create_service_key("web.shop").expect("made");
        assert!(made.service.is_certified_by(&made.key.public()));
        assert_eq!(made.service.authority(), authority_block("shop"));
        let found = ring.service_key_of(&made.service).expect("readable").expect("is there");
        assert_eq!(found.name, "web.shop");
    }

    #[test]
    fn nothing_is_written_over_and_no_name_leaves_the_directory() {
        let (_base, ring) = keyring();
        ring.create_authority("shop").expect("made");
        assert!(matches!(ring.create_authority("shop"), Err(StateError::Exists(_))));
        for bad in ["", "../x", "a/b", "Shop", "a b", ".", "-a", "shop/key:x", "sid:00"] {
            assert!(matches!(ring.create_authority(bad), Err(StateError::Name(_))), "{bad}");
            assert!(matches!(ring.create_service_key(bad), Err(StateError::Name(_))), "{bad}");
        }
    }

    #[test]
    fn a_damaged_key_is_named() {
        let (_base, ring) = keyring();
        ring.create_authority("shop").expect("made");
        ring.authorities.write("shop.key", b"margay-authority-key-1 zz\n").expect("written");
        let error = ring.authorities().expect_err("refused").to_string();
        assert!(error.contains("shop.key"), "{error}");
    }
}
