//! The signing keys of this host: of authorities that it speaks for, and of services whose names certify themselves (DESIGN §5).

use margay_core::key::{SigningKey, VerifyingKey, from_hex, to_hex};
use margay_core::name::{Name, ServiceId, authority_block, self_certifying_tail};
use zeroize::Zeroizing;

use crate::entropy;
use crate::state_dir::{StateDir, StateError, damaged};

const SUFFIX: &str = ".key";
const AUTHORITY_MAGIC: &str = "margay-authority-key-1";
const SERVICE_MAGIC: &str = "margay-service-key-1";

/// An authority's name and key.
#[derive(Clone, Debug)]
pub struct Authority {
    /// Its name: what stands after the service in `web.shop`.
    pub name: String,
    /// Its private key.
    pub key: SigningKey,
}

impl Authority {
    /// The first 64 bits of its names.
    pub fn block(&self) -> [u8; 8] {
        authority_block(&self.name)
    }
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
}

impl Keyring {
    /// Opens it; makes the directories.
    ///
    /// # Errors
    ///
    /// A directory cannot be made, or others may write in it.
    pub fn open(dir: &StateDir) -> Result<Self, StateError> {
        let keys = dir.subdir("keys")?;
        Ok(Self { authorities: keys.subdir("authority")?, services: keys.subdir("service")? })
    }

    /// Makes an authority's key.
    ///
    /// # Errors
    ///
    /// The name is no name, there is such a key already, or it cannot be written.
    pub fn create_authority(&self, name: &str) -> Result<Authority, StateError> {
        check_authority(name)?;
        let key = create(&self.authorities, name, AUTHORITY_MAGIC)?;
        Ok(Authority { name: name.to_owned(), key })
    }

    /// One authority's key, if this host has it.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or holds something else.
    pub fn authority(&self, name: &str) -> Result<Option<Authority>, StateError> {
        check_authority(name)?;
        let key = load(&self.authorities, name, AUTHORITY_MAGIC)?;
        Ok(key.map(|key| Authority { name: name.to_owned(), key }))
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
            let head = check_service(&name)?;
            if let Some(key) = load(&self.services, &name, SERVICE_MAGIC)? {
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
    let mut id = [0; 32];
    id[..12].copy_from_slice(&head);
    id[12..].copy_from_slice(&self_certifying_tail(&key.public(), &head));
    ServiceKey { name: name.to_owned(), key, service: ServiceId(id) }
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
    let text = Zeroizing::new(format!("{magic} {}\n", to_hex(&key.to_bytes()[..])));
    dir.write(&file, text.as_bytes())?;
    Ok(key)
}

fn load(dir: &StateDir, name: &str, magic: &str) -> Result<Option<SigningKey>, StateError> {
    let file = format!("{name}{SUFFIX}");
    let Some(text) = dir.read(&file)? else { return Ok(None) };
    let digits = text.trim_end().strip_prefix(magic).map(str::trim_start);
    let bytes = digits.and_then(|digits| from_hex::<32>(digits).ok());
    let bytes = bytes.map(Zeroizing::new).ok_or_else(|| {
        damaged(&dir.join(&file), format!("not `{magic}` and 64 hexadecimal digits; restore it from a copy"))
    })?;
    Ok(Some(SigningKey::from_bytes(&bytes)))
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
