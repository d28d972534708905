//! The control side of the running core: every call takes the core's lock for a moment, and carries out what the core
//! asks for.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use margay_control::SalControl;
use margay_core::certificate::{Revocation, TrustAnchor};
use margay_core::give_up::GiveUpAfter;
use margay_core::key::HostId;
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::{Prefix, ServiceId};
use margay_core::succession::Succession;
use margay_core::table::{Rule, RuleId, TableError};
use margay_core::way::Relation;
use margay_core::{AssociationSetup, Sal};
use margay_datapath::Datapath;

use super::service::datagrams::EndDatagrams;

/// The datapath with the core that ships.
pub type Running = Datapath<Sal>;

/// The running core.
#[derive(Clone)]
pub struct CoreHandle(pub Arc<Running>);

impl CoreHandle {
    /// For the services: ends the flows of datagrams that are served under a prefix.
    pub fn end_datagrams(&self) -> EndDatagrams {
        let core = Arc::clone(&self.0);
        Box::new(move |prefix| {
            let flows = core.with_sal(|sal, now| sal.end_served_datagrams(now, prefix));
            if flows > 0 {
                tracing::info!(%prefix, flows, "the socket of these flows of datagrams is gone; peers are told");
            }
        })
    }
}

impl SalControl for CoreHandle {
    fn install_association(&self, setup: AssociationSetup) {
        self.0.with_sal(|sal, now| sal.install_association(now, setup));
    }

    fn add_trust_anchor(&self, anchor: TrustAnchor) {
        self.0.with_sal(|sal, _| sal.add_trust_anchor(anchor));
    }

    fn revoke(&self, revocation: Revocation) {
        self.0.with_sal(|sal, _| sal.revoke(revocation));
    }

    fn revoke_key(&self, revocation: KeyRevocation) {
        self.0.with_sal(|sal, _| sal.revoke_key(revocation));
    }

    fn succeed(&self, succession: &Succession) {
        self.0.with_sal(|sal, _| sal.succeed(succession));
    }

    fn set_membership(&self, chain: Vec<u8>) {
        self.0.with_sal(|sal, _| sal.set_membership(chain));
    }

    fn set_service_certificate(&self, prefix: Prefix, chain: Vec<u8>) {
        self.0.with_sal(|sal, _| sal.set_service_certificate(prefix, chain));
    }

    fn set_own_terms(&self, prefix: Prefix, terms: Option<GiveUpAfter>) {
        self.0.with_sal(|sal, _| sal.set_own_terms(prefix, terms));
    }

    fn set_own_fence(&self, prefix: Prefix, number: Option<u64>) {
        self.0.with_sal(|sal, _| sal.set_own_fence(prefix, number));
    }

    fn set_relation(&self, host: HostId, relation: Option<Relation>) {
        self.0.with_sal(|sal, _| sal.set_relation(host, relation));
    }

    fn set_leaving(&self, router: HostId, is_leaving: bool) {
        self.0.with_sal(|sal, now| sal.set_leaving(now, router, is_leaving));
    }

    fn add_rule(&self, prefix: Prefix, rule: Rule) -> Result<RuleId, TableError> {
        self.0.with_sal(|sal, now| sal.add_rule(now, prefix, rule))
    }

    fn remove_rule(&self, id: RuleId) -> bool {
        self.0.with_sal(|sal, _| sal.remove_rule(id))
    }

    fn bind_name(&self, address: IpAddr, service: ServiceId) {
        self.0.with_sal(|sal, _| sal.bind_name(address, service));
    }

    fn unbind_name(&self, address: IpAddr) {
        self.0.with_sal(|sal, _| sal.unbind_name(address));
    }

    fn take_used_leases(&self) -> BTreeSet<IpAddr> {
        self.0.with_sal(|sal, _| sal.take_used_leases())
    }

    fn leases_of_flows(&self) -> BTreeSet<IpAddr> {
        self.0.with_sal(|sal, _| sal.leases_of_flows())
    }
}
