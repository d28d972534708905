//! What the control plane asks of the core.

use std::collections::BTreeSet;
use std::net::IpAddr;

use margay_core::AssociationSetup;
use margay_core::certificate::{Revocation, TrustAnchor};
use margay_core::give_up::GiveUpAfter;
use margay_core::key::HostId;
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::{Prefix, ServiceId};
use margay_core::succession::Succession;
use margay_core::table::{Rule, RuleId, TableError};
use margay_core::way::Relation;

/// The control side of [`margay_core::Sal`]. The program implements it with its lock around the core and its own `now`;
/// every call is short and must not call back.
pub trait SalControl: Send + Sync + 'static {
    /// See [`margay_core::Sal::install_association`].
    fn install_association(&self, setup: AssociationSetup);
    /// See [`margay_core::Sal::add_trust_anchor`].
    fn add_trust_anchor(&self, anchor: TrustAnchor);
    /// See [`margay_core::Sal::revoke`].
    fn revoke(&self, revocation: Revocation);
    /// See [`margay_core::Sal::revoke_key`].
    fn revoke_key(&self, revocation: KeyRevocation);
    /// See [`margay_core::Sal::succeed`].
    fn succeed(&self, succession: &Succession);
    /// See [`margay_core::Sal::set_membership`].
    fn set_membership(&self, chain: Vec<u8>);
    /// See [`margay_core::Sal::set_service_certificate`]; an empty chain takes it away.
    fn set_service_certificate(&self, prefix: Prefix, chain: Vec<u8>);
    /// See [`margay_core::Sal::set_own_terms`].
    fn set_own_terms(&self, prefix: Prefix, terms: Option<GiveUpAfter>);
    /// See [`margay_core::Sal::set_own_fence`]. Nothing to do for a core that serves nothing.
    fn set_own_fence(&self, _prefix: Prefix, _number: Option<u64>) {}
    /// See [`margay_core::Sal::set_relation`]. Nothing to do for a core that forwards nothing for others.
    fn set_relation(&self, _host: HostId, _relation: Option<Relation>) {}
    /// See [`margay_core::Sal::set_leaving`]. Nothing to do for a core that has no peers.
    fn set_leaving(&self, _router: HostId, _is_leaving: bool) {}
    /// See [`margay_core::Sal::add_rule`].
    ///
    /// # Errors
    ///
    /// The table is full.
    fn add_rule(&self, prefix: Prefix, rule: Rule) -> Result<RuleId, TableError>;
    /// See [`margay_core::Sal::remove_rule`].
    fn remove_rule(&self, id: RuleId) -> bool;
    /// See [`margay_core::Sal::bind_name`].
    fn bind_name(&self, address: IpAddr, service: ServiceId);
    /// See [`margay_core::Sal::unbind_name`].
    fn unbind_name(&self, address: IpAddr);
    /// See [`margay_core::Sal::take_used_leases`]. None for a core that no program sends to.
    fn take_used_leases(&self) -> BTreeSet<IpAddr> {
        BTreeSet::new()
    }
    /// See [`margay_core::Sal::leases_of_flows`].
    fn leases_of_flows(&self) -> BTreeSet<IpAddr> {
        BTreeSet::new()
    }
}
