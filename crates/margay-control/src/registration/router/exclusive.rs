//! Names that one host alone serves: in a cluster, its routers agree about who does ([`crate::cluster`]).

use std::collections::BTreeSet;

use margay_core::key::HostId;
use margay_core::name::{Name, Prefix};

use super::{Guest, Router, Shared, answer_of};
use crate::cluster::ClaimError;
use crate::registration::Terms;
use crate::registration::ledger::Act;
use crate::registration::proto::{self, Code, from_router};
use crate::registration::roll::{OwnService, Roll, RollError};

/// As hosts hear it.
fn refused(roll: &Roll, name: &str, error: ClaimError) -> RollError {
    let name = name.to_owned();
    match error {
        ClaimError::Held(host) => RollError::Held { name, holder: roll.name_of(host) },
        away @ ClaimError::Away(_) => RollError::Away { name, why: away.to_string() },
    }
}

impl Guest {
    /// Takes a registration down; one of a name that this host alone shall serve, once the routers of the cluster
    /// agree.
    pub(super) async fn take_down(&self, prefix: Prefix, name: &Name, terms: Terms) -> Result<bool, RollError> {
        let (host, name, sal) = (self.place.host, name.written(), &*self.shared.sal);
        let (place, stream) = (self.place, self.seat.stream);
        let cluster = self.shared.config.cluster.as_ref().filter(|_| terms.exclusive);
        if let Some(cluster) = cluster {
            let known = self.shared.roll.lock().check_others(host, &prefix, name, terms.partition_bits, true);
            // Who is refused here is not asked for elsewhere.
            let claimed = if known.is_ok() { cluster.claim(&prefix, host).await } else { Ok(()) };
            if let Err(error) = claimed {
                let mut roll = self.shared.roll.lock();
                if matches!(error, ClaimError::Held(_)) {
                    roll.withdraw(place, stream, &prefix, sal);
                }
                return Err(refused(&roll, name, error));
            }
        }
        let mut roll = self.shared.roll.lock();
        let registered = roll.register(place, stream, prefix, name, terms, sal);
        if let Some(cluster) = cluster.filter(|_| registered.is_err() && !roll.is_alone(place, &prefix)) {
            cluster.release(&prefix, host);
        }
        registered
    }

    /// Names for this host alone that the cluster has given to another one.
    pub(super) fn given_away(&mut self) -> Vec<proto::FromRouter> {
        let gone = self.shared.roll.lock().take_given_away(self.place, self.seat.stream);
        let mut lost = Vec::new();
        for (prefix, name) in gone {
            self.granted.remove(&prefix);
            let text = format!(
                "while this router could not be heard, another one of the cluster gave {name}, which one host alone \
                 may serve, to another host"
            );
            self.note(Act::RegisterRefused, format!("{name}: {text}"));
            let (service_id, bits) = (prefix.id.0.to_vec(), prefix.bits.into());
            lost.push(proto::Lost { service_id, bits, code: Code::Exclusive.into(), text });
        }
        vec![answer_of(from_router::Body::Granted(proto::Granted { lost }))]
    }
}

impl Shared {
    /// Hosts lose what the cluster has given to others.
    pub(in crate::registration) fn give_away(&self, lost: BTreeSet<(Prefix, HostId)>) {
        let mut roll = self.roll.lock();
        for (claimed, host) in lost {
            tracing::warn!(%claimed, %host, "another router has given this name to another host meanwhile");
            roll.give_away(&claimed, host, &*self.sal);
        }
    }
}

impl Router {
    /// Whether the router's own host may serve a name; if so, no other host gets it from now on.
    ///
    /// # Errors
    ///
    /// Another host has it, or divides it in another way; or the routers of the cluster must agree, and cannot.
    pub fn admit_own(&self, own: OwnService) -> Result<(), RollError> {
        let mut roll = self.shared.roll.lock();
        if let Some(cluster) = self.shared.config.cluster.as_ref().filter(|_| own.exclusive) {
            let instance = &own.instance;
            let claimed = cluster.check_own_claim(&instance.prefix, instance.host);
            claimed.map_err(|error| refused(&roll, &instance.name, error))?;
        }
        roll.admit_own(own)
    }
}
