//! What the control plane and the operator ask of the core. Nothing here touches a bound flow, unless it is about that
//! flow (DESIGN §3.9).

use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use margay_wire::{FlowId, Kind, Message};

use crate::association::Association;
use crate::association::draft::Draft;
use crate::association::location::{Moving, Scope, Trouble};
use crate::cache::entry::Passage;
use crate::leg::carriage::{Carriage, Why};
use crate::machine::counters::Counters;
use crate::machine::sal::Sal;
use crate::session::event::{AssociationInfo, Event, FlowInfo};
use crate::session::flow::Flow;
use crate::table::{Resolution, Rule, RuleId, TableError, Usage};
use crate::trust::certificate::{Membership, Revocation, TrustAnchor, decode_chain};
use crate::trust::handshake::{Introduction, Keys};
use crate::trust::key_revocation::KeyRevocation;
use crate::trust::succession::Succession;
use crate::types::drop_reason::DropReason;
use crate::types::key::{HostId, HostPublic};
use crate::types::name::{Prefix, ServiceId};
use crate::types::role::Role;
use crate::types::time::Instant;
use crate::types::tuple::GREETING;
use crate::types::tuple::Tuple;

/// An association that was agreed outside the SAL: over the authenticated registration stream of a router and a host.
#[derive(Clone, Debug)]
pub struct AssociationSetup {
    /// The peer's public key.
    pub host_key: [u8; 32],
    /// The shared key.
    pub key: [u8; 32],
    /// Index by which the peer names it to us. Random, not zero.
    pub local_id: u32,
    /// Index by which we name it to the peer.
    pub remote_id: u32,
    /// The peer's epoch.
    pub peer_epoch: u32,
    /// The peer's boot, where it has said which.
    pub boot_id: Option<[u8; 16]>,
    /// The peer's SAL address.
    pub remote: SocketAddr,
    /// Key of the hop tags between router and host.
    pub hop_key: Option<[u8; 16]>,
    /// One end is the other's service router.
    pub router: bool,
    /// Whether this end opened the stream.
    pub initiator: bool,
}

impl Sal {
    /// Trusts an authority's key for its block of names.
    pub fn add_trust_anchor(&mut self, anchor: TrustAnchor) {
        self.trust.add(anchor);
    }

    /// Believes no more what an authority signed for a host that it has put out. Flows that are bound go on (DESIGN
    /// §3.9); new ones, either way, are refused.
    pub fn revoke(&mut self, revocation: Revocation) {
        let unix_s = self.unix_s();
        self.trust.revoke(revocation, unix_s);
        let host = HostPublic(revocation.host_key).id();
        self.end_grants_with(|_, with| with == host);
        let indices: Vec<u32> = self.associations.all_with(host).map(|association| association.local_id).collect();
        for local_id in indices {
            let shown = self.associations.get(local_id).and_then(|association| association.membership.as_ref());
            let is_revoked = shown.is_some_and(|membership| {
                membership.authority == revocation.authority && membership.not_after_s <= revocation.until_s
            });
            if is_revoked {
                self.associations.set_membership(local_id, None);
            }
        }
    }

    /// Believes no more what a key has signed that an authority had let sign; the caller knows that the authority says
    /// so. Flows that are bound go on; of members that are so by its word nothing is known until they show another one.
    pub fn revoke_key(&mut self, revocation: KeyRevocation) {
        let unix_s = self.unix_s();
        self.trust.revoke_key(revocation, unix_s);
        self.end_all_grants();
        self.associations.revise_memberships(|shown| {
            shown.take_if(|shown| shown.authority == revocation.authority && shown.issuers.contains(&revocation.key));
        });
    }

    /// Trusts the key that follows one of an authority, and that one until the time that both have said; the caller has
    /// seen that it is signed.
    pub fn succeed(&mut self, succession: &Succession) {
        self.trust.succeed(succession);
        let Succession { authority, old, trusted_until_s, .. } = *succession;
        let by_old = |shown: &&mut Membership| shown.authority == authority && shown.issuers.first() == Some(&old);
        self.associations.revise_memberships(|shown| {
            if let Some(shown) = shown.as_mut().filter(by_old) {
                shown.not_after_s = shown.not_after_s.min(trusted_until_s);
            }
        });
    }

    /// How many revocations are remembered, of hosts and of keys.
    pub fn revocations(&self) -> usize {
        self.trust.revocations()
    }

    /// Sets the encoded certificate chain that shows peers that this host belongs to an authority, in the place of the
    /// one before of the same authority.
    pub fn set_membership(&mut self, chain: Vec<u8>) {
        // What cannot be read is of no authority; peers refuse it, and say why.
        let links = decode_chain(&chain).unwrap_or_default();
        let authority = links.last().map_or([0; 8], |leaf| leaf.prefix.id.authority());
        match self.memberships.iter_mut().find(|(of, _)| *of == authority) {
            Some((_, shown)) => *shown = chain,
            None => self.memberships.push((authority, chain)),
        }
    }

    /// The chain that shows a peer what may be needed for this service: of its authority, or else of the first one that
    /// this host belongs to; empty where there is none.
    pub(crate) fn membership_for(&self, service: &ServiceId) -> Vec<u8> {
        let of_its_own = self.memberships.iter().find(|(authority, _)| *authority == service.authority());
        of_its_own.or(self.memberships.first()).map(|(_, chain)| chain.clone()).unwrap_or_default()
    }

    /// Sets the encoded certificate chain that lets this host answer for `prefix`; an empty one takes it away.
    pub fn set_service_certificate(&mut self, prefix: Prefix, chain: Vec<u8>) {
        self.certificates.retain(|(of, _)| *of != prefix);
        if !chain.is_empty() {
            self.certificates.push((prefix, chain));
        }
        self.notices.tell_again(self.now, true);
    }

    /// The chain of the longest prefix that covers `service`; empty when there is none.
    pub fn certificate_for(&self, service: &ServiceId) -> Vec<u8> {
        let covering = self.certificates.iter().filter(|(prefix, _)| prefix.contains(service));
        covering.max_by_key(|(prefix, _)| prefix.bits).map(|(_, chain)| chain.clone()).unwrap_or_default()
    }

    /// Adds a rule to the service table.
    ///
    /// # Errors
    ///
    /// The table is full.
    pub fn add_rule(&mut self, now: Instant, prefix: Prefix, rule: Rule) -> Result<RuleId, TableError> {
        self.notices.look_again(now);
        self.end_grants_under(&prefix);
        self.table.insert(now, prefix, rule)
    }

    /// Adds a rule under a number that it had in an earlier life of the agent. Numbers given from now on are higher.
    ///
    /// # Errors
    ///
    /// The table is full.
    pub fn add_rule_as(&mut self, now: Instant, id: RuleId, prefix: Prefix, rule: Rule) -> Result<(), TableError> {
        self.table.insert_as(now, id, prefix, rule)
    }

    /// Makes a rule say something else. It keeps its number, its prefix, and what it counted. False if there is no such
    /// rule.
    pub fn change_rule(&mut self, id: RuleId, rule: Rule) -> bool {
        if let Some((prefix, _)) = self.table.get(id) {
            self.end_grants_under(&prefix);
        }
        self.table.change(id, rule)
    }

    /// What became of a rule.
    pub fn rule_usage(&self, id: RuleId) -> Option<Usage> {
        self.table.usage(id)
    }

    /// Takes a rule out. Flows that it made live on.
    pub fn remove_rule(&mut self, id: RuleId) -> bool {
        self.lifetimes.remove(id);
        let Some((prefix, rule)) = self.table.remove(id) else { return false };
        self.end_grants_under(&prefix);
        self.notices.look_again(self.now);
        self.forget_resolved(id, &rule);
        true
    }

    /// One rule.
    pub fn rule(&self, id: RuleId) -> Option<(Prefix, &Rule)> {
        self.table.get(id)
    }

    /// How many rules there are.
    pub fn rule_count(&self) -> usize {
        self.table.len()
    }

    /// Every rule, in no order.
    pub fn rules(&self) -> impl Iterator<Item = (Prefix, RuleId, &Rule)> {
        self.table.iter()
    }

    /// The rules that cover a name, in the order in which they are asked.
    pub fn rules_covering(&self, service: ServiceId) -> impl Iterator<Item = (Prefix, RuleId, &Rule)> {
        let sets = self.table.covering_sets(service);
        sets.flat_map(|(prefix, set)| set.iter().map(move |(id, rule)| (prefix, id, rule)))
    }

    /// What would happen now to a first packet to `service` from this host, for TCP and any port.
    pub fn resolve(&self, service: &ServiceId) -> Resolution<'_> {
        self.table.resolve(service, 0, |_| true)
    }

    /// Installs or renews an association that the registration stream agreed.
    pub fn install_association(&mut self, now: Instant, setup: AssociationSetup) {
        self.now = now;
        let keys = Keys { root: setup.key };
        let peer = HostPublic(setup.host_key);
        let mut association =
            Association::new(setup.local_id, setup.remote_id, peer, keys, setup.initiator, setup.remote);
        association.peer_epoch = setup.peer_epoch;
        association.boot_id = setup.boot_id;
        association.hop_key = setup.hop_key;
        association.router = setup.router;
        association.heard = now;
        association.datagram_max = self.config.datagram_max;
        let host = association.host;
        if association.is_of_registered() {
            self.note_present(now, host);
        }
        // The stream proved the peer just now, so an older association is superseded; its flows keep theirs.
        if let Some(known) = self.associations.by_host(host) {
            association.membership = known.membership.clone();
            association.rtt = known.rtt;
            association.stacks = known.stacks;
            // Where they find each other is told by RSYN; a stream knows no address translators, and may be an old one.
            // It knows nothing of this host's own address either: where the peer is where it was, that is not found out
            // anew.
            if known.flows > 0 || known.remote == setup.remote {
                (association.local, association.remote) = (known.local, known.remote);
                association.chosen = known.chosen;
            }
        }
        match self.associations.insert(association) {
            Ok(gone) => self.counters.associations_displaced += gone as u64,
            Err(reason) => return self.counters.drop(reason),
        }
        self.locations.announce_path(&self.associations, &mut self.queue, setup.local_id);
        self.events.push(Event::AssociationUp(host));
        if setup.router && !self.config.router {
            // It has seen a stream only, and is to reach this host by UDP, now and later.
            self.locations.keep_router(now, host);
            self.ask_present(now, host);
        }
    }

    /// The association of this host with itself: client and server on one host (DESIGN §18).
    pub(crate) fn meet_self(&mut self, now: Instant) {
        let local_id = self.associations.fresh_id(&mut self.rng);
        let keys = Keys { root: self.rng.bytes() };
        let (peer, remote) = (self.config.host_key.public(), self.loopback());
        let mut association = Association::new(local_id, local_id, peer, keys, true, remote).with_itself();
        association.peer_epoch = self.config.epoch;
        association.heard = now;
        association.datagram_max = self.config.datagram_max;
        // An empty table has room for one.
        if self.associations.insert(association).is_ok() {
            self.locations.announce_path(&self.associations, &mut self.queue, local_id);
        }
    }

    /// Adopts a peer that finished a full handshake: a new association, and what its epoch and boot say of older ones.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn adopt_peer(
        &mut self,
        now: Instant,
        peer: &HostPublic,
        theirs: &Introduction,
        local_id: u32,
        keys: &Keys,
        message: &Message<'_>,
        from: SocketAddr,
        initiator: bool,
    ) -> Result<(), DropReason> {
        let host = peer.id();
        let known = self.associations.by_host(host).filter(|known| !known.is_self());
        let older = known.map(|known| (known.local_id, known.peer_epoch, known.boot_id));
        if let Some((_, epoch, boot_id)) = older
            && (theirs.epoch < epoch || boot_id.is_some_and(|id| id != theirs.boot_id))
        {
            // Its keys are fresh, so an epoch that has gone back is none that was used; the question is whether it is
            // alone.
            self.admit_newcomer(now, host, theirs, from)?;
        }
        let mut association = Association::new(local_id, theirs.assoc_id, *peer, keys.clone(), initiator, from);
        association.peer_epoch = theirs.epoch;
        association.boot_id = Some(theirs.boot_id);
        association.heard = now;
        association.datagram_max = self.config.datagram_max;
        if let Some(known) = older.and_then(|(id, _, _)| self.associations.get(id)) {
            association.hop_key = known.hop_key;
            association.router = known.router;
            association.membership = known.membership.clone();
            association.rtt = known.rtt;
            association.stacks = known.stacks;
            if known.boot_id.is_none_or(|id| id == theirs.boot_id) && self.associations.has_flows_with(host) {
                // All associations with a host share one pair, which moves by RSYN alone.
                (association.local, association.remote) = (known.local, known.remote);
            }
        }
        if let Some(membership) = self.shown_membership(&theirs.certificate, peer) {
            // Before it takes a place: a stranger may not have a member's.
            association.membership = Some(membership);
        }
        self.counters.associations_displaced += self.associations.insert(association)? as u64;
        if !initiator && let Err(reason) = crate::association::auth::authenticate(&mut self.associations, message, now)
        {
            self.associations.remove(local_id);
            return Err(reason);
        }
        self.events.push(Event::AssociationUp(host));
        let is_other = |other: &&Association| other.host != host && other.flows > 0 && !other.is_self();
        if let Some(former) = self.associations.at_address(from).find(is_other).map(|other| other.host) {
            self.events.push(Event::OtherHost { former, host });
        }
        // The host that had them is gone; its epoch may have gone back as well, with its disk.
        if let Some((old_id, _, Some(boot_id))) = older
            && boot_id != theirs.boot_id
        {
            self.reset_flows_of(now, &[old_id]);
            self.events.push(Event::PeerRebooted(host));
        }
        Ok(())
    }

    /// Keeps what a peer showed of its authority, if it is true.
    pub(crate) fn note_membership(&mut self, association: u32, chain: &[u8]) {
        let Some(host_key) = self.associations.get(association).map(|association| association.host_key) else {
            return;
        };
        if let Some(membership) = self.shown_membership(chain, &host_key) {
            self.associations.set_membership(association, Some(membership));
        }
    }

    /// What an encoded chain, which may be empty, shows of the authority of the host with this key, if it is true.
    pub(crate) fn shown_membership(&mut self, chain: &[u8], host_key: &HostPublic) -> Option<Membership> {
        if chain.is_empty() {
            return None;
        }
        let shown = self.trust.verify_member(chain, &host_key.0, self.unix_s());
        if shown.is_err() {
            self.counters.drop(DropReason::BadCertificate);
        }
        shown.ok()
    }

    /// Leases: packets to `address` are for `service`.
    pub fn bind_name(&mut self, address: IpAddr, service: ServiceId) {
        let before = self.names.insert(address, service);
        if let Some(before) = before.filter(|before| *before != service) {
            self.chains.forget_lease(address, &before);
        }
        self.chains.note_lease(address, service);
        if before != Some(service) {
            self.end_grants_to(address);
        }
    }

    /// Takes a lease away. Flows live on.
    pub fn unbind_name(&mut self, address: IpAddr) {
        if let Some(service) = self.names.remove(&address) {
            self.chains.forget_lease(address, &service);
        }
        self.names_used.remove(&address);
        self.end_grants_to(address);
    }

    /// Leased addresses that programs here have sent first packets to since this was asked last.
    pub fn take_used_leases(&mut self) -> BTreeSet<IpAddr> {
        core::mem::take(&mut self.names_used)
    }

    /// Leased addresses where flows of programs here go, and those that grants may still open. Takes a walk over all
    /// flows.
    pub fn leases_of_flows(&self) -> BTreeSet<IpAddr> {
        let own = self.flows.iter().filter(|flow| flow.role == Role::Initiator);
        let all = own.map(|flow| flow.app.destination.ip()).chain(self.grants.destinations());
        all.filter(|address| self.names.contains_key(address)).collect()
    }

    /// A program has sent something to a virtual address.
    pub(crate) fn note_use_of_lease(&mut self, address: IpAddr) {
        if self.names.contains_key(&address) {
            self.names_used.insert(address);
        }
    }

    pub(crate) fn describe(&self, flow: &Flow) -> FlowInfo {
        let mut info = flow.info();
        info.stack = self.stack_info(flow);
        info.loss = self.losses.of(flow.id);
        info.timing = self.losses.timing_of(flow.id);
        info.reconfigurations = self.reconfigurations.of_flow(flow.id);
        if let Some(striping) = &flow.stripe {
            info.why = Why::Striped;
            info.places = striping.list(flow.may_be_plain_in_places());
        }
        info.sharing = self.sharing_of(flow);
        if let Some(association) = self.associations.get(flow.association) {
            (info.peer, info.shares_as) = (Some(association.host), Some(association.peer()));
            let scope = Scope { host: association.host, flow: flow.id };
            let pair = self.pair_in_use(scope);
            (info.local, info.remote) = (pair.and_then(|pair| pair.local), pair.map(|pair| pair.remote));
            let passage = self.locations.passage_of_flow(&self.associations, flow);
            if passage != Passage::Open && info.carriage.sends() {
                info.carriage = Carriage::Encapsulated;
                info.why = if passage == Passage::Held { Why::Held } else { Why::Nowhere };
            }
            let unsealed = self.stack_rules.is_late_to_seal(flow.id).then_some(Trouble::Unsealed);
            let with_peer = self.trouble_with(association.host).filter(|_| flow.side.is_none());
            info.trouble = unsealed.or(with_peer);
            let locations = [scope, Scope::of(association.host)].map(|scope| self.locations.get(scope));
            info.moves = locations.iter().flatten().map(|location| location.moves).sum();
            info.moved = locations.iter().flatten().filter_map(|location| location.moved).max_by_key(|moved| moved.at);
        }
        info
    }

    /// Every flow, in no order. Of a session that is between two ways, the one that its program sends by.
    pub fn flows(&self) -> impl Iterator<Item = FlowInfo> {
        let is_shown = |flow: &&Flow| flow.app.protocol != GREETING && flow.directions.has_egress();
        self.flows.iter().filter(is_shown).map(|flow| self.describe(flow))
    }

    /// Every flow that may have a record for the next start of the agent, in no order: also the other way of a session
    /// that is between two.
    pub fn flows_to_keep(&self) -> impl Iterator<Item = FlowId> {
        self.flows.iter().filter(|flow| flow.app.protocol != GREETING).map(|flow| flow.id)
    }

    /// The flow whose application sends packets of `app`, and which end this is.
    pub fn flow_of(&self, app: &Tuple) -> Option<(FlowId, Role)> {
        self.flows.by_tuple(app).and_then(|id| self.flows.get(id)).map(|flow| (flow.id, flow.role))
    }

    /// How many flows there are.
    pub fn flow_count(&self) -> usize {
        self.flows.len()
    }

    /// Responder flows whose peer is not proved.
    pub fn half_open_count(&self) -> usize {
        self.half_open.len()
    }

    /// One flow.
    pub fn flow(&self, id: FlowId) -> Option<FlowInfo> {
        self.flows.get(id).map(|flow| self.describe(flow))
    }

    /// Every association with another host, in no order.
    pub fn associations(&self) -> impl Iterator<Item = AssociationInfo> {
        let others = self.associations.iter().filter(|association| !association.is_self());
        others.map(|association| self.describe_association(association))
    }

    /// How many associations there are with other hosts.
    pub fn association_count(&self) -> usize {
        self.associations.len().saturating_sub(1)
    }

    /// Of these, how many nothing uses, with peers that no authority trusted here vouches for.
    pub fn stranger_count(&self) -> usize {
        self.associations.strangers()
    }

    /// Whether an address is one of this host's.
    pub fn has_address(&self, address: IpAddr) -> bool {
        self.config.local_addresses.contains(&address)
    }

    /// This host's addresses.
    pub fn local_addresses(&self) -> &[IpAddr] {
        &self.config.local_addresses
    }

    /// Every peer, by its newest association; the flows are those of all that there are with it.
    pub fn paths(&self) -> Vec<AssociationInfo> {
        let newest = |association: &&Association| {
            let newest = self.associations.by_host(association.host).map(|newest| newest.local_id);
            !association.is_self() && newest == Some(association.local_id)
        };
        let with_all = |association: &Association| {
            let mut info = self.describe_association(association);
            info.flows = self.associations.all_with(association.host).map(|each| each.flows).sum();
            info
        };
        self.associations.iter().filter(newest).map(with_all).collect()
    }

    fn describe_association(&self, association: &Association) -> AssociationInfo {
        let location = self.locations.get(Scope::of(association.host));
        AssociationInfo {
            host: association.host,
            remote: association.remote,
            local: association.local,
            addresses: location.map(|location| location.addresses.clone()).unwrap_or_default(),
            rendezvous: location.and_then(|location| location.rendezvous),
            moving: location.map_or(Moving::Settled, |location| location.state),
            passage: self.locations.passage_of(association.host),
            is_suspected: location.is_some_and(|location| location.suspicion.is_some()),
            trouble: self.trouble_with(association.host),
            flapping: location.and_then(|location| location.flapping),
            moved: location.and_then(|location| location.moved),
            moves: location.map_or(0, |location| location.moves),
            rtt: association.rtt,
            loss_ppm: self.losses.worst_loss(&self.flows, &self.associations, association.host),
            timing: self.losses.worst_timing(&self.flows, &self.associations, association.host),
            datagram_max: association.datagram_max,
            epoch: association.peer_epoch,
            flows: association.flows,
            router: association.router,
            heard: association.heard,
        }
    }

    /// Asks a peer for a sign of life under its association; its answer moves [`AssociationInfo::heard`]. False when
    /// there is no association with `host`.
    pub fn probe(&mut self, now: Instant, host: HostId) -> bool {
        self.now = now;
        let Some(local_id) = self.associations.by_host(host).map(|association| association.local_id) else {
            return false;
        };
        self.seal_and_send(local_id, Draft::new(Kind::Probe, FlowId(0), FlowId(0)));
        true
    }

    /// Counts since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Outputs that were lost because nobody polled in time.
    pub fn overflowed(&self) -> u64 {
        self.queue.overflowed
    }

    /// This host's identity.
    pub fn host(&self) -> HostId {
        self.config.host_id()
    }
}
