//! Join tokens: one string that carries a host all that it needs to meet its router, and to know it.
//!
//! ```text
//! margay-join- and the digits (`armor.rs`) of
//!  0 version = 1 | 1..33 router's host key | 33..65 authority's key | 65..81 secret
//!  81 length, router address as host:port | length, authority's name
//! ```
//! The secret is worth one host (or as many as the operator said) and is kept by the router as a hash only.

use std::fmt;
use std::str::FromStr;

use margay_core::key::{HostPublic, VerifyingKey, to_hex};
use margay_core::name::authority_block;
use zeroize::Zeroizing;

use crate::armor::{Armor, ArmorError};
use crate::keyring::check_authority;

const ARMOR: Armor = Armor {
    prefix: "margay-join-",
    noun: "join token",
    made_by: "`margay id token create` on the router",
    text_max: 1024,
};
const VERSION: u8 = 1;
const SECRET_LEN: usize = 16;
const FIXED_LEN: usize = 1 + 32 + 32 + SECRET_LEN;

/// What is wrong with a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// No such text.
    #[error(transparent)]
    Text(#[from] ArmorError),
    /// Made by another program.
    #[error(
        "the join token has version {0}, this program reads version {VERSION}; update the older of router and host"
    )]
    Version(u8),
    /// The address is none.
    #[error("`{0}` is no address of a router; write host:port, for example 10.0.0.1:54324 or [fd00::1]:54324")]
    Address(String),
    /// The name is none.
    #[error("`{0}` is no name of an authority; it has a-z, 0-9, - and . inside")]
    Authority(String),
    /// The router's key is of low order.
    #[error(
        "the key of the router in the join token is no key: everybody could pose as that router; make a new token there"
    )]
    Key,
}

/// The one-time part.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenSecret(Zeroizing<[u8; SECRET_LEN]>);

impl TokenSecret {
    /// The secret of these bytes.
    pub fn new(bytes: [u8; SECRET_LEN]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// For the wire; the stream is encrypted to the router whose key the token pins.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0[..]
    }

    /// What the router keeps. A secret of 128 random bits needs no slow hash.
    pub fn hash(&self) -> TokenHash {
        hash_secret(self.as_bytes())
    }
}

/// The hash of whatever a host sent as its secret.
pub fn hash_secret(secret: &[u8]) -> TokenHash {
    TokenHash(blake3::derive_key("margay 2026 join token", secret))
}

impl fmt::Debug for TokenSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenSecret(..)")
    }
}

/// The hash of a secret: what the router knows of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TokenHash(pub [u8; 32]);

impl TokenHash {
    /// By which people name the token; says nothing of the secret.
    pub fn id(&self) -> String {
        to_hex(&self.0[..6])
    }
}

/// A join token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinToken {
    /// Where the router is: `host:port`.
    pub router_address: String,
    /// The router's host key: nobody else can pose as it.
    pub router_key: HostPublic,
    /// Name of the authority that the host joins.
    pub authority: String,
    /// Key of the authority: what the host trusts for the authority's names.
    pub authority_key: VerifyingKey,
    /// Proves that the operator gave the token.
    pub secret: TokenSecret,
}

impl JoinToken {
    /// The block of the authority.
    pub fn authority_block(&self) -> [u8; 8] {
        authority_block(&self.authority)
    }

    /// Checks what people wrote into it.
    ///
    /// # Errors
    ///
    /// The address, the router's key or the authority's name is none.
    pub fn check(&self) -> Result<(), TokenError> {
        check_address(&self.router_address)?;
        if self.router_key.is_of_low_order() {
            return Err(TokenError::Key);
        }
        let fits = self.authority.len() <= usize::from(u8::MAX) && check_authority(&self.authority).is_ok();
        if fits { Ok(()) } else { Err(TokenError::Authority(self.authority.clone())) }
    }

    fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        let mut bytes =
            Zeroizing::new(Vec::with_capacity(FIXED_LEN + self.router_address.len() + self.authority.len() + 2));
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.router_key.0);
        bytes.extend_from_slice(&self.authority_key.0);
        bytes.extend_from_slice(self.secret.as_bytes());
        for text in [&self.router_address, &self.authority] {
            let text = &text.as_bytes()[..text.len().min(255)];
            bytes.push(text.len() as u8);
            bytes.extend_from_slice(text);
        }
        bytes
    }
}

/// Whether text is `host:port`: an IP address or a name, and a port that is not zero.
///
/// # Errors
///
/// It is not.
pub fn check_address(text: &str) -> Result<(), TokenError> {
    let bad = || TokenError::Address(text.to_owned());
    let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
    let is_port = port.parse::<u16>().is_ok_and(|port| port != 0);
    let is_v6 = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .is_some_and(|host| host.parse::<std::net::Ipv6Addr>().is_ok());
    let is_name = !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.'));
    if is_port && (is_v6 || is_name) && text.len() <= 255 { Ok(()) } else { Err(bad()) }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ARMOR.write(&self.to_bytes()))
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let body = ARMOR.read(text)?;
        if body[0] != VERSION {
            return Err(TokenError::Version(body[0]));
        }
        if body.len() < FIXED_LEN {
            return Err(ArmorError::Incomplete(ARMOR).into());
        }
        let key = |at: usize| -> [u8; 32] { std::array::from_fn(|byte| body[at + byte]) };
        let (router_address, rest) = take_text(&body[FIXED_LEN..])?;
        let (authority, rest) = take_text(rest)?;
        let secret = TokenSecret::new(std::array::from_fn(|byte| body[65 + byte]));
        let token = Self {
            router_address,
            router_key: HostPublic(key(1)),
            authority,
            authority_key: VerifyingKey(key(33)),
            secret,
        };
        token.check()?;
        if rest.is_empty() { Ok(token) } else { Err(ArmorError::Checksum(ARMOR).into()) }
    }
}

fn take_text(bytes: &[u8]) -> Result<(String, &[u8]), ArmorError> {
    let (len, rest) = bytes.split_first().ok_or(ArmorError::Incomplete(ARMOR))?;
    let (text, rest) = rest.split_at_checked(usize::from(*len)).ok_or(ArmorError::Incomplete(ARMOR))?;
    let text = std::str::from_utf8(text).map_err(|_| ArmorError::Checksum(ARMOR))?;
    Ok((text.to_owned(), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> JoinToken {
        JoinToken {
            router_address: "10.0.0.1:54324".to_owned(),
            router_key: HostPublic([7; 32]),
            authority: "shop".to_owned(),
            authority_key: VerifyingKey([9; 32]),
            secret: TokenSecret::new([3; SECRET_LEN]),
        }
    }

    #[test]
    fn a_router_whose_key_everybody_has_is_none() {
        let text = JoinToken { router_key: HostPublic([0; 32]), ..token() }.to_string();
        assert_eq!(text.parse::<JoinToken>(), Err(TokenError::Key));
    }

    #[test]
    fn a_token_is_read_as_it_was_written() {
        let text = token().to_string();
        assert!(text.starts_with("margay-join-ae"), "{text}");
        assert_eq!(text.parse(), Ok(token()));
        let body = token().to_bytes();
        for len in 1..body.len() {
            assert!(ARMOR.write(&body[..len]).parse::<JoinToken>().is_err(), "cut at {len}");
        }
        let longer = [&body[..], &[0]].concat();
        assert_eq!(ARMOR.write(&longer).parse::<JoinToken>(), Err(ArmorError::Checksum(ARMOR).into()));
    }

    #[test]
    fn another_version_says_which_side_is_old() {
        let mut bytes = token().to_bytes();
        bytes[0] = 2;
        assert_eq!(ARMOR.write(&bytes).parse::<JoinToken>(), Err(TokenError::Version(2)));
    }

    #[test]
    fn addresses_and_names_are_checked() {
        for good in ["10.0.0.1:1", "[fd00::1]:54324", "router.example:54324"] {
            assert_eq!(check_address(good), Ok(()));
        }
        for bad in ["", "10.0.0.1", ":54324", "10.0.0.1:0", "10.0.0.1:99999", "fd00::1:x", "[fd00]:1", "a b:1"] {
            assert!(check_address(bad).is_err(), "{bad}");
        }
        let bad = JoinToken { authority: "Shop!".to_owned(), ..token() };
        assert_eq!(bad.check(), Err(TokenError::Authority("Shop!".to_owned())));
        assert!(bad.to_string().parse::<JoinToken>().is_err());
    }

    #[test]
    fn the_secret_is_not_printed_and_the_hash_hides_it() {
        assert!(!format!("{:?}", token()).contains("3, 3"));
        assert_ne!(token().secret.hash().0[..SECRET_LEN], [3; SECRET_LEN]);
        assert_eq!(token().secret.hash().id().len(), 12);
    }
}
