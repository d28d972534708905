//! Authorities whose key is on this host: it is a member of each by its own signature.

use margay_control::keyring::{Authority, Keyring};
use margay_control::lineage::LineageError;
use margay_control::store::Store;
use margay_control::{Clock, SalControl, issue, warrant};
use margay_core::certificate::TrustAnchor;
use margay_core::key::HostPublic;

/// Trusts the authorities whose keys are here and believes no key that may sign for them no longer, and shows peers a
/// membership of each, unless a router gives one: `joined` are the names of authorities of which one does.
///
/// # Errors
///
/// A key, or what was revoked, cannot be read.
pub fn adopt(
    core: &dyn SalControl,
    (keyring, store): (&Keyring, &Store),
    host: &HostPublic,
    clock: &Clock,
    joined: &[String],
) -> Result<(), LineageError> {
    for revocation in warrant::believed(keyring, store, clock.unix_s())? {
        core.revoke_key(revocation);
        if keyring.give_up(&revocation)? {
            tracing::warn!("the authority has taken back this host's right to sign; `margay id` says more");
        }
    }
    warrant::lineages(keyring, store)?.into_values().for_each(|(_, line)| line.teach(core));
    let authorities = keyring.authorities()?;
    for authority in &authorities {
        core.add_trust_anchor(TrustAnchor { authority: authority.block(), key: authority.root() });
    }
    let own = |authority: &&Authority| authority.is_valid(clock.unix_s()) && !joined.contains(&authority.name);
    for authority in authorities.iter().filter(own) {
        core.set_membership(issue::membership(authority, host, &[], clock.unix_s()).0);
    }
    Ok(())
}
