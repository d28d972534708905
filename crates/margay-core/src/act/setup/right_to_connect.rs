//! Who may connect (DESIGN §7, "Who may connect").

use crate::association::Association;
use crate::machine::sal::Sal;
use crate::table::{Allow, AllowItem};
use crate::trust::certificate::Membership;
use crate::types::key::HostId;
use crate::types::name::ServiceId;

/// A membership that ends within so many seconds is asked for anew: it may end before the ACK comes.
const ENDING_S: u64 = 5;

impl Sal {
    /// The association that a claimed host-ID would use, if its right to connect is proved for as long as the set-up
    /// takes. The others show more at a new handshake.
    pub(crate) fn known_host(&self, claimed: HostId, service: &ServiceId, allow: &Allow) -> Option<u32> {
        let association = self.associations.by_host(claimed)?;
        let until_s = self.unix_s().saturating_add(ENDING_S);
        let is_self = claimed == self.config.host_id();
        let is_member = self.has_shown_enough(association, (service, allow), until_s);
        (is_self || is_member || self.trust.is_empty()).then_some(association.local_id)
    }

    /// Whether a peer has shown until then what decides about its right to a service. A member of another authority,
    /// who may not connect by that, may be one of the service's as well.
    pub(crate) fn has_shown_enough(
        &self,
        association: &Association,
        (service, allow): (&ServiceId, &Allow),
        until_s: u64,
    ) -> bool {
        association.membership.as_ref().is_some_and(|membership| {
            let may_connect = || self.is_allowed(association.local_id, service, allow);
            membership.not_after_s > until_s && (membership.authority == service.authority() || may_connect())
        })
    }

    /// Whether the proved host behind `association` is on the allow list.
    pub(crate) fn is_allowed(&self, association: u32, service: &ServiceId, allow: &Allow) -> bool {
        let Some(association) = self.associations.get(association) else { return false };
        self.allows(association.host, association.membership.as_ref(), service, allow)
    }

    /// Whether a host that has proved its key, and this of its authority, is on the allow list.
    pub(crate) fn allows(
        &self,
        host: HostId,
        membership: Option<&Membership>,
        service: &ServiceId,
        allow: &Allow,
    ) -> bool {
        if host == self.config.host_id() {
            return true;
        }
        let unix_s = self.unix_s();
        let membership = membership.filter(|membership| membership.not_after_s > unix_s);
        let is_of = |authority: &[u8]| membership.is_some_and(|membership| membership.authority[..] == *authority);
        match allow {
            Allow::Any => true,
            Allow::Authority => is_of(&service.0[..8]),
            Allow::List(items) => items.iter().any(|item| match item {
                AllowItem::Host(known) => host == *known,
                AllowItem::Group(group) => {
                    is_of(&service.0[..8]) && membership.is_some_and(|membership| membership.groups.contains(group))
                }
                AllowItem::Authority(authority) => is_of(&authority[..]),
            }),
        }
    }
}
