//! Names that one host alone serves: in a cluster, its routers agree about who does ([`crate::cluster`]).

use std::collections::BTreeSet;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use margay_core::fence::FenceNotice;
use margay_core::key::HostId;
use margay_core::name::{Name, Prefix};
use tokio::time::sleep_until;

use super::{Guest, Router, RouterConfig, Shared, answer_of, authority_of, blocking};
use crate::cluster::ClaimError;
use crate::issue;
use crate::registration::ledger::Act;
use crate::registration::proto::{self, Code, from_router};
use crate::registration::refusal::{No, invalid};
use crate::registration::roll::{OwnFence, OwnService, Roll, RollError};
use crate::registration::{Place, Terms, ZeroWeight};
use crate::store::{Store, StoreError};

/// A registration that was taken down.
pub(super) struct Taken {
    /// It is not the same as before.
    pub is_new: bool,
    /// Of a fenced name: with which number the host holds it, if that is known.
    pub fence_number: Option<u64>,
}

/// The roll of a router that starts: fenced names that it had given are kept for their holders. In a cluster, etcd
/// knows who holds them.
pub(super) fn first_roll(config: &RouterConfig, store: &Store) -> Result<Roll, StoreError> {
    let mut roll = Roll::new(Duration::from_millis(config.lease_ms.into()));
    let kept = if config.cluster.is_none() { store.fences()? } else { Vec::new() };
    kept.iter().for_each(|(prefix, host)| roll.keep_fence(prefix, *host));
    Ok(roll)
}

/// As hosts hear it.
fn refused(roll: &Roll, name: &str, error: ClaimError) -> RollError {
    let name = name.to_owned();
    match error {
        ClaimError::Held(host) => RollError::Held { name, holder: roll.name_of(host) },
        away @ ClaimError::Away(_) => RollError::Away { name, why: away.to_string() },
    }
}

/// Keeps fenced names no longer than they need be. Goes on until it is dropped.
pub(super) async fn follow_kept_fences(shared: Arc<Shared>) {
    let mut changes = shared.roll.lock().changes();
    loop {
        let next = shared.roll.lock().end_kept_fences();
        let ends = async {
            match next {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = ends => {}
            // The sender lives in the roll, which this holds.
            _ = changes.changed() => {}
        }
    }
}

impl Guest {
    /// Takes a registration down; one of a name that this host alone shall serve, once the routers of the cluster
    /// agree.
    pub(super) async fn take_down(
        &self,
        prefix: Prefix,
        name: &Name,
        terms: Terms,
        zero_weight: Option<Box<ZeroWeight>>,
    ) -> Result<Taken, No> {
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
                return Err(refused(&roll, name, error).into());
            }
        }
        let registered = {
            let mut roll = self.shared.roll.lock();
            let registered = roll.register(place, stream, prefix, name, terms, sal);
            if let Some(cluster) = cluster.filter(|_| registered.is_err() && !roll.is_alone(place, &prefix)) {
                cluster.release(&prefix, host);
            }
            roll.note_zero_weight(place, stream, &prefix, zero_weight);
            registered?
        };
        let fence_number = if terms.fenced { self.fence_number(prefix).await? } else { None };
        if !terms.fenced {
            self.shared.roll.lock().end_fence(place, &prefix);
        }
        Ok(Taken { is_new: registered, fence_number })
    }

    /// With which number the host holds a fenced name that it has registered: the one that it has, or a new one. In a
    /// cluster there is none as long as etcd cannot be told: then the host has the name from before.
    async fn fence_number(&self, prefix: Prefix) -> Result<Option<u64>, No> {
        let place = self.place;
        let host = place.host;
        let known = self.shared.roll.lock().fence_number(&prefix, host);
        if known.is_some() {
            return Ok(known);
        }
        let number = match &self.shared.config.cluster {
            Some(cluster) => cluster.fence_number(&prefix, host),
            None => {
                let store = Arc::clone(&self.shared.store);
                let unix_s = self.shared.clock.unix_s();
                let drawn = blocking(move || store.next_fence(&prefix, host, unix_s)).await?;
                Some(drawn.map_err(|error| No(Code::Store, error.to_string()))?)
            }
        };
        if let Some(number) = number {
            self.shared.roll.lock().hold_fence(place, &prefix, number);
        }
        Ok(number)
    }

    /// The host's notice that it holds a fenced name. Those who watch the name judge it for themselves.
    pub(super) fn fence(&self, asked: &proto::Fence) -> Vec<proto::FromRouter> {
        match self.take_notice(&asked.notice) {
            Ok(()) => Vec::new(),
            Err(no) => self.refuse(asked.request, no),
        }
    }

    fn take_notice(&self, bytes: &[u8]) -> Result<(), No> {
        let notice = FenceNotice::decode(bytes).map_err(|error| invalid(&error.to_string()))?;
        if notice.host_key != self.host || !notice.is_signed() {
            return Err(invalid("the notice of a fenced name is not signed by the host"));
        }
        if !self.shared.roll.lock().set_fence_notice(self.place, &notice) {
            return Err(invalid("the host does not hold the fenced name with that number"));
        }
        Ok(())
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
    /// The router's own host says of the fenced names that it serves that it holds them, if it has not.
    pub(in crate::registration) fn fence_own(&self) {
        let unsaid = self.roll.lock().own_fences_unsaid();
        for OwnFence { place, prefix, number } in unsaid {
            match self.own_notice(place, prefix, number) {
                Ok(Some(notice)) => {
                    let mut roll = self.roll.lock();
                    if number.is_none() {
                        roll.hold_fence(place, &prefix, notice.number);
                    }
                    roll.set_fence_notice(place, &notice);
                    drop(roll);
                    self.sal.set_own_fence(prefix, Some(notice.number));
                }
                Ok(None) => {}
                Err(No(_, why)) => tracing::warn!(%prefix, why, "this host cannot say that it holds a fenced name"),
            }
        }
    }

    /// `None`: the cluster has not agreed yet.
    fn own_notice(&self, place: Place, prefix: Prefix, number: Option<u64>) -> Result<Option<FenceNotice>, No> {
        let unix_s = self.clock.unix_s();
        let of_store = |error: StoreError| No(Code::Store, error.to_string());
        let number = match (number, &self.config.cluster) {
            (Some(number), _) => Some(number),
            (None, Some(cluster)) => cluster.fence_number(&prefix, place.host),
            (None, None) => Some(self.store.next_fence(&prefix, place.host, unix_s).map_err(of_store)?),
        };
        let authority = authority_of(self, place.authority)?;
        let Some((number, authority)) = number.zip(authority) else { return Ok(None) };
        let chain = issue::service(&authority, prefix, &self.local.host_key.public(), unix_s).0;
        Ok(Some(FenceNotice::new(prefix, number, &self.local.host_key, chain)))
    }

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
    /// Gives the notices of fenced names that the router's own host holds another life: those of this start are by
    /// certificates that end.
    pub fn renew_own_notices(&self) {
        self.shared.roll.lock().drop_own_notices();
        self.shared.fence_own();
    }

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
