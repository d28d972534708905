//! The host's end of what an authority says: what becomes of its keys (the host follows the one that it knows to those
//! after it, and leaves what may sign no longer), which sessions go through boxes, and what it
//! orders.

use std::sync::Arc;

use margay_core::certificate::{CertificateError, decode_chain};
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::{Prefix, ServiceId, authority_block};
use margay_core::succession::Succession;

use super::host::{End, Shared};
use super::order_book::{Standing, Taking};
use super::proto;
use crate::chain_order::SignedOrder;
use crate::chains::SignedChains;
use crate::lineage::Lineage;
use crate::store::{Kept, StoreError};

/// What keeps a host from a router that tells this.
enum Trouble {
    Lost,
    Store(StoreError),
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Shared {
    /// Takes up what is kept here of the authority's keys.
    ///
    /// # Errors
    ///
    /// It cannot be read; nothing is changed.
    pub fn read_keys(&self) -> Result<(), StoreError> {
        let (line, revoked) = self.signers(self.clock.unix_s())?;
        line.teach(&*self.sal);
        line.teach_store(&mut self.trust.lock());
        self.area.iter().for_each(|area| line.teach_area(area));
        revoked.into_iter().for_each(|revocation| self.disbelieve(revocation));
        *self.line.lock() = Some(line);
        Ok(())
    }

    fn disbelieve(&self, revocation: KeyRevocation) {
        self.trust.lock().revoke_key(revocation, self.clock.unix_s());
        self.sal.revoke_key(revocation);
        self.area.iter().for_each(|area| area.revoke_key(revocation));
    }

    /// How much is known of keys: more is a reason to look again.
    pub fn keys_known(&self) -> usize {
        self.trust.lock().revocations() + self.line.lock().as_ref().map_or(0, |line| line.successions().len())
    }

    /// Until when the key is believed with which a chain begins; none is, where the authority's keys could not be read.
    pub fn chain_until_s(&self, chain: &[u8]) -> u64 {
        self.line.lock().as_ref().map_or(0, |line| line.chain_until_s(chain))
    }

    /// Takes up what the router tells of the authority's keys. It is on disk when this returns: the router may begin to
    /// sign with a key that is told here, and this host's next start has to know it.
    pub async fn heed(self: &Arc<Self>, keys: proto::Keys) -> Result<(), End> {
        let this = Arc::clone(self);
        match tokio::task::spawn_blocking(move || this.keep_keys(&keys)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Trouble::Store(error))) => Err(End::Broke(error.to_string())),
            Ok(Err(Trouble::Lost)) => {
                let authority = &self.config.authority;
                Err(End::Refused(format!(
                    "the key of {authority} that this host knows was lost to somebody else, who could have made what \
                     follows it: this host needs a new join token: `margay id token create {authority}` on the router"
                )))
            }
            Err(_) => Err(End::Broke("the store ended badly".to_owned())),
        }
    }

    /// Takes up which sessions go through boxes, as the router tells. It is on disk when this returns; whoever goes by
    /// it is told by the store.
    pub async fn heed_chains(self: &Arc<Self>, chains: proto::Chains) -> Result<(), End> {
        let this = Arc::clone(self);
        match tokio::task::spawn_blocking(move || this.keep_chains(&chains)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(End::Broke(error.to_string())),
            Err(_) => Err(End::Broke("the store ended badly".to_owned())),
        }
    }

    /// Takes an order, and begins with it if it counts.
    pub async fn heed_order(
        self: &Arc<Self>,
        order: &proto::Order,
        membership: &[u8],
        taking: Taking,
    ) -> Result<(), End> {
        let Some(signed) = SignedOrder::decode(&order.signed) else {
            tracing::warn!(router = self.config.router_address, "an order that the router tells is malformed");
            return Ok(());
        };
        let groups = decode_chain(membership).unwrap_or_default().pop().map(|own| own.groups).unwrap_or_default();
        let this = Arc::clone(self);
        let taken = tokio::task::spawn_blocking(move || {
            let (line, revoked) = this.signers(this.clock.unix_s())?;
            taking.take(&signed, &Standing { line: &line, revoked: &revoked, groups: &groups });
            Ok::<_, StoreError>(())
        });
        match taken.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(End::Broke(error.to_string())),
            Err(_) => Err(End::Broke("the store ended badly".to_owned())),
        }
    }

    fn lineage(&self) -> Result<Lineage, StoreError> {
        Lineage::of(&self.store, authority_block(&self.config.authority), self.config.authority_key)
    }

    /// The authority's own keys, and those that may sign for it no longer, as they are on disk.
    fn signers(&self, unix_s: u64) -> Result<(Lineage, Vec<KeyRevocation>), StoreError> {
        let line = self.lineage()?;
        let revoked = self.store.key_revocations(unix_s)?.into_iter().filter(|kept| line.says(kept, unix_s)).collect();
        Ok((line, revoked))
    }

    /// What does not count is left aside, and the one before stays.
    fn keep_chains(&self, chains: &proto::Chains) -> Result<(), StoreError> {
        let config = &self.config;
        let unix_s = self.clock.unix_s();
        let authority = &config.authority;
        let (line, revoked) = self.signers(unix_s)?;
        let Ok(signed) = SignedChains::decode(&chains.signed) else {
            tracing::warn!(router = config.router_address, authority, "chains that the router tells are malformed");
            return Ok(());
        };
        let replaces = |known: Option<&SignedChains>| signed.replaces(known, &line, &revoked, unix_s);
        if !self.store.keep_chains(&signed, authority, unix_s, replaces)?
            && let Err(why) = signed.policy(&line, &revoked, unix_s)
        {
            let router = &config.router_address;
            tracing::warn!(router, authority, %why, "chains that the router tells are not taken");
        }
        Ok(())
    }

    fn keep_keys(&self, keys: &proto::Keys) -> Result<(), Trouble> {
        let (authority, unix_s) = (&self.config.authority, self.clock.unix_s());
        let revoked = keys.revocations.iter().filter_map(|bytes| KeyRevocation::decode(bytes).ok());
        let revoked: Vec<KeyRevocation> = revoked.filter(KeyRevocation::is_signed).collect();
        let told = keys.successions.iter().filter_map(|bytes| Succession::decode(bytes).ok());
        let mut told: Vec<Succession> = told.filter(Succession::is_signed).collect();
        told.retain(|one| one.authority == authority_block(authority));
        loop {
            let line = self.lineage()?;
            // The next one, or the one before the first: the later key says that of the earlier one, too.
            let Some(at) = told.iter().position(|one| one.old == line.last() || one.new == line.first()) else { break };
            let one = told.swap_remove(at);
            let is_lost = |known: &KeyRevocation| known.key == one.old && known.signer == one.new;
            if one.old == line.last() && revoked.iter().any(is_lost) {
                return Err(Trouble::Lost);
            }
            if self.store.keep_succession(&one, authority, unix_s)? == Kept::New {
                tracing::info!(authority, "the authority has another key, which signs from its time on");
            }
        }
        let line = self.lineage()?;
        let is_rival =
            |one: &&Succession| line.successions().iter().any(|known| known.old == one.old && known.new != one.new);
        if told.iter().any(|one| is_rival(&one)) {
            tracing::warn!(
                authority,
                "the router tells of another key after one that is followed already: somebody else has that one"
            );
        }
        for revocation in revoked.iter().filter(|revocation| line.says(revocation, unix_s)) {
            self.store.revoke_key(revocation, authority, unix_s)?;
        }
        self.read_keys()?;
        Ok(())
    }

    /// Until when it is proved that this host belongs to the authority and that the router is one of its routers, in
    /// seconds since 1970. A membership alone proves nothing of the router: every peer of this host has seen it.
    ///
    /// # Errors
    ///
    /// What is not proved.
    pub fn check_proofs(&self, membership: &[u8], router: &[u8]) -> Result<u64, CertificateError> {
        let (authority, unix_s) = (authority_block(&self.config.authority), self.clock.unix_s());
        let mut trust = self.trust.lock();
        let member = trust.verify_member(membership, &self.local.host_key.public().0, unix_s)?;
        let name = Prefix::from(ServiceId::of_routers(authority));
        // Other hosts may have certificates for all names of the authority: those make nobody a router.
        let is_routers = decode_chain(router)?.last().is_some_and(|leaf| leaf.prefix == name);
        if member.authority != authority || !is_routers {
            return Err(CertificateError::WrongPrefix);
        }
        let until_s = trust.verify_prefix(router, &name, &self.config.router_key.0, unix_s)?;
        Ok(until_s.min(member.not_after_s))
    }

    /// Nothing is taken from a router that does not prove that it is one.
    pub fn refusal(&self, fault: CertificateError) -> End {
        let authority = &self.config.authority;
        if fault == CertificateError::KeyRevoked {
            return End::Refused(format!(
                "the authority has taken back this router's right to sign for {authority}; join another router of it: \
                 `margay id token create {authority}` there"
            ));
        }
        End::Refused(format!("the router does not prove that it is a router of {authority}: {fault}"))
    }
}
