//! Authorities whose key is on this host: it is a member of each by its own signature.

use margay_control::keyring::Keyring;
use margay_control::{Clock, SalControl, StateError, issue};
use margay_core::certificate::TrustAnchor;
use margay_core::key::HostPublic;

/// Trusts the authorities whose keys are here, and shows peers a membership of the first of them, unless a router gives one.
///
/// # Errors
///
/// A key cannot be read.
pub fn adopt(
    core: &dyn SalControl,
    keyring: &Keyring,
    host: &HostPublic,
    clock: &Clock,
    has_home: bool,
) -> Result<(), StateError> {
    let authorities = keyring.authorities()?;
    for authority in &authorities {
        core.add_trust_anchor(TrustAnchor { authority: authority.block(), key: authority.root() });
    }
    let first = authorities.iter().find(|authority| authority.is_valid(clock.unix_s()));
    if let (Some(first), false) = (first, has_home) {
        core.set_membership(issue::membership(first, host, &[], clock.unix_s()).0);
    }
    Ok(())
}
