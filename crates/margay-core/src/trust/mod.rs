//! Who may speak for which key and name: certificates, revocation, succession, handshakes, cookies.

pub mod certificate;
pub mod cookie;
pub(crate) mod half_open;
pub mod handshake;
pub(crate) mod handshake_rate;
pub mod key_revocation;
pub(crate) mod standing;
pub mod succession;
