use std::sync::Arc;

use margay_control::Clock;
use margay_control::identity::Identity;
use margay_control::keyring::Keyring;
use margay_control::registration::Local;
use margay_control::store::Store;

/// Who this host is, and what it keeps on disk.
///
/// Identity and clock stay as they were at the start. Keyring and store change their files on disk themselves, one
/// whole file at a time; every other part may read and write through them.
pub struct Host {
    /// The host's key, epoch and start.
    pub identity: Identity,
    /// The identity as registrations tell it.
    pub local: Local,
    /// Keys of authorities and services.
    pub keyring: Keyring,
    /// Rules, leases, facts and the audit log.
    pub store: Arc<Store>,
    /// The wall clock.
    pub clock: Clock,
}
