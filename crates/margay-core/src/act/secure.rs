//! `secure`: which flows are carried sealed, under which cipher, and with what keys (docs/decisions/0019).
//!
//! A flow is sealed because an end demands it: the initiator in its SYN, the responder in its SYN-ACK. The SYN may be
//! changed on its way, the SYN-ACK may not; so an initiator that demands it and is not told so ends the flow. A live
//! flow comes to be sealed, or ceases to be, by [`stack_change`](crate::act::stack_change): the latter where nobody
//! demands it.
//!
//! Keys derive from the association's, the epochs of both agents, the direction and the flow. An agent that starts
//! again has another epoch: what it sends is under new keys, and what was sent to it before can never be given to it
//! again.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::time::Duration;

use margay_wire::{
    CHANGES, Extension, FlowId, Kind, Message, STACK_ENCAP, STACK_SECURE_AES, STACK_SECURE_CHACHA, SessionId,
    StackRepr, epochs,
};

use crate::association::draft::Draft;
use crate::association::{Association, AssociationTable};
use crate::leg::carriage::Why;
use crate::leg::seal::{Cipher, SealKeys};
use crate::leg::stack::{Stack, Stacks};
use crate::machine::sal::Sal;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, Marks};
use crate::types::config::Config;
use crate::types::name::{Prefix, ServiceId};
use crate::types::role::Role;
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// A peer is not asked for its epoch more often.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// One direction of one flow, as its keys know it.
struct Context {
    cipher: Cipher,
    from_initiator: bool,
    sender_epoch: u32,
    receiver_epoch: u32,
    initiator_flow: FlowId,
    responder_flow: FlowId,
    session: SessionId,
}

impl Context {
    fn secret(&self, root: &[u8; 32]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("margay 2026 seal");
        hasher.update(root).update(&[self.cipher.stack(), u8::from(self.from_initiator)]);
        hasher.update(&self.sender_epoch.to_be_bytes()).update(&self.receiver_epoch.to_be_bytes());
        hasher.update(&self.initiator_flow.0.to_be_bytes()).update(&self.responder_flow.0.to_be_bytes());
        hasher.update(&self.session.0);
        *hasher.finalize().as_bytes()
    }
}

/// Which flows this host wants sealed, and what it can do.
#[derive(Debug, Default)]
pub(crate) struct Demands {
    /// Bits of the ciphers that the flow cache has.
    stacks: u32,
    all: bool,
    services: Vec<Prefix>,
}

/// What becomes of a flow whose other end has spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Carried plainly.
    Plain,
    /// Sealed.
    Sealed(Cipher),
    /// One end demands what the other has not.
    Refused,
}

impl Verdict {
    /// The cipher, where there is one.
    pub const fn cipher(self) -> Option<Cipher> {
        match self {
            Self::Sealed(cipher) => Some(cipher),
            Self::Plain | Self::Refused => None,
        }
    }
}

/// The stack that a message names.
fn stack_of(message: &Message<'_>) -> Option<u8> {
    message.stack().map(|said| said.stack)
}

impl Sal {
    /// What the flow cache can seal with, and what is to be sealed: every flow of this host, or those to some names.
    /// Flows that there are stay as they are; but they may be unsealed, or not, as this says.
    pub fn set_secure(&mut self, ciphers: &[Cipher], all: bool, services: Vec<Prefix>) {
        let stacks = ciphers.iter().fold(0, |stacks, cipher| stacks | cipher.bit());
        self.secure = Demands { stacks, all, services };
        self.end_all_grants();
        let demands: Vec<(FlowId, bool)> =
            self.flows.iter().map(|flow| (flow.id, self.secure.demands_secure(&flow.service))).collect();
        for (id, is_demanded) in demands {
            self.note_demand(id, Marks::DEMANDS, is_demanded);
            if is_demanded {
                self.keep_as_demanded(id);
            }
        }
    }

    /// What a responder makes of a SYN.
    pub(crate) fn answer_stack(&self, message: &Message<'_>, service: &ServiceId, from: SocketAddr) -> Verdict {
        if message.session().is_some_and(|session| session.protocol == GREETING) {
            return Verdict::Plain;
        }
        // A related flow is as the one that it is related to.
        let is_related = |id| self.flows.get(id).is_some_and(Flow::is_sealed);
        let is_demanded = self.secure.demands_secure(service)
            || self.rules_demand_of(message, service, from)
            || is_related(message.dst_flow);
        match stack_of(message) {
            None | Some(STACK_ENCAP) if !is_demanded => return Verdict::Plain,
            None | Some(STACK_ENCAP | STACK_SECURE_AES | STACK_SECURE_CHACHA) => {}
            Some(_) => return Verdict::Refused,
        }
        let theirs = message.capabilities().map_or(0, |capabilities| capabilities.stacks);
        Cipher::best(self.secure.stacks & theirs).map_or(Verdict::Refused, Verdict::Sealed)
    }

    /// Whether a rule demands that a flow is sealed that a SYN asks for from there.
    pub(crate) fn rules_demand_of(&self, message: &Message<'_>, service: &ServiceId, from: SocketAddr) -> bool {
        let protocol = message.session().map_or(GREETING, |session| session.protocol);
        protocol != GREETING && self.rules_demand(*service, protocol, Role::Responder, self.arrival, Some(from))
    }

    /// Which ends demand that a new flow is sealed. Versions that know no changes say STACK only if they demand it.
    pub(crate) fn note_demands(
        &mut self,
        now: Instant,
        id: FlowId,
        message: &Message<'_>,
        from: SocketAddr,
        is_sealed: bool,
    ) {
        let is_old = message.capabilities().is_none_or(|able| able.stacks & CHANGES == 0);
        let is_wanted = message.stack().is_some_and(|said| is_sealed && (said.demands || is_old));
        let is_demanded = self.flows.get(id).is_some_and(|flow| self.secure.demands_secure(&flow.service));
        self.note_demand(id, Marks::PEER_DEMANDS, is_wanted);
        self.note_demand(id, Marks::DEMANDS, is_demanded);
        let service = self.flows.get(id).map(|flow| flow.service).unwrap_or_default();
        let is_ruled = self.rules_demand_of(message, &service, from);
        self.note_demand(id, Marks::RULED, is_ruled);
        if is_sealed {
            self.keep_sealed(now, id);
        }
    }

    /// A flow that will be sealed goes direct only if it is unsealed one day: it keeps its ports.
    pub(crate) fn keep_sealed(&mut self, now: Instant, id: FlowId) {
        if let Some(flow) = self.flows.get_mut(id) {
            flow.marks |= Marks::SECURE;
        }
        self.park_direct(now, id, Why::Secure);
    }

    /// Peers whose agents have started again: their sealed flows get the keys of the new epoch. Those that do not know
    /// of this agent's start are told.
    pub(crate) fn seal_again(&mut self) {
        for association in core::mem::take(&mut self.associations.outdated) {
            self.tell_epoch(self.now, association);
        }
        for association in core::mem::take(&mut self.associations.renewed) {
            let is_sealed = |flow: &&Flow| flow.association == association && flow.seal.is_some();
            let sealed: Vec<FlowId> = self.flows.iter().filter(is_sealed).map(|flow| flow.id).collect();
            for id in sealed {
                let Some(cipher) = self.flows.get(id).and_then(|flow| flow.seal.as_ref()).map(|keys| keys.cipher)
                else {
                    continue;
                };
                // The cipher is the one that it has.
                let is_derived = self.flows.derive_seal(&self.associations, &self.config, id, cipher).is_ok();
                if is_derived && self.flows.get(id).is_some_and(|flow| flow.stacks.has_sealed()) {
                    self.flows.install_again(&mut self.queue, id);
                }
            }
        }
    }

    /// The flow cache cannot open what came for a sealed flow: one end does not know yet that the agent of the other
    /// has started again. Both are told by one PROBE and its answer, which are tagged.
    pub(crate) fn handle_strange_seal(&mut self, now: Instant, flow: FlowId) {
        let Some(flow) = self.flows.get(flow).filter(|flow| flow.seal.is_some()) else { return };
        let local_id = flow.association;
        self.tell_epoch(now, local_id);
    }

    /// Lets a peer know this agent's epoch, and asks for its own.
    pub(crate) fn tell_epoch(&mut self, now: Instant, association: u32) {
        let Some(known) = self.associations.get_mut(association).filter(|known| !known.is_self()) else { return };
        if known.epoch_told.is_some_and(|at| now.since(at) < ASK_AGAIN) {
            return;
        }
        known.epoch_told = Some(now);
        self.seal_and_send(association, Draft::new(Kind::Probe, FlowId(0), FlowId(0)));
    }
}

impl Demands {
    /// Bits for CAPABILITIES.
    pub(crate) fn secure_stacks(&self) -> u32 {
        self.stacks
    }

    /// Bits for CAPABILITIES: `fec` that is sealed, with each of the ciphers.
    pub(crate) fn secure_fec_stacks(&self) -> u32 {
        let ciphers = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305].into_iter();
        let able = ciphers.filter(|cipher| self.stacks & cipher.bit() != 0);
        able.fold(0, |stacks, cipher| stacks | cipher.fec_bit())
    }

    /// Bits for CAPABILITIES: `sctp` that is sealed, with each of the ciphers.
    pub(crate) fn secure_sctp_stacks(&self) -> u32 {
        let ciphers = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305].into_iter();
        let able = ciphers.filter(|cipher| self.stacks & cipher.bit() != 0);
        able.fold(0, |stacks, cipher| stacks | cipher.sctp_bit())
    }

    /// Whether this host demands that flows to `service` are sealed.
    pub(crate) fn demands_secure(&self, service: &ServiceId) -> bool {
        self.all || self.services.iter().any(|prefix| prefix.contains(service))
    }

    /// What a SYN says of a flow that is to be sealed.
    pub(crate) fn secure_request(&self, flow: &Flow) -> Option<Extension<'static>> {
        let demands = flow.is_demanded_here();
        Cipher::best(self.stacks).map(|cipher| Extension::Stack(StackRepr { stack: cipher.stack(), demands }))
    }

    /// What an initiator makes of the SYN-ACK to its flow `id`.
    pub(crate) fn settle_stack(&self, flows: &FlowTable, id: FlowId, message: &Message<'_>) -> Verdict {
        let is_demanded = flows.get(id).is_some_and(|flow| flow.has(Marks::SECURE));
        match stack_of(message) {
            None | Some(STACK_ENCAP) if !is_demanded => Verdict::Plain,
            Some(stack) => Cipher::of_stack(stack)
                .filter(|cipher| self.stacks & cipher.bit() != 0)
                .map_or(Verdict::Refused, Verdict::Sealed),
            None => Verdict::Refused,
        }
    }
}

impl FlowTable {
    /// A flow whose association and peer are known is sealed from its first packet on.
    pub(crate) fn seal_flow(&mut self, associations: &AssociationTable, config: &Config, id: FlowId, cipher: Cipher) {
        // A flow that is new here has no keys yet.
        let _ = self.derive_seal(associations, config, id, cipher);
        if let Some(flow) = self.get_mut(id) {
            flow.marks |= Marks::SECURE;
            flow.stacks = Stacks::only(Stack::Secure);
        }
    }

    /// Gives a flow the keys of the present epochs.
    ///
    /// # Errors
    ///
    /// It has keys of these epochs, of another cipher; it keeps them. Numbers under them have been used: who could have
    /// the cipher replaced could have the first one come back, with counters that begin again.
    pub(crate) fn derive_seal(
        &mut self,
        associations: &AssociationTable,
        config: &Config,
        id: FlowId,
        cipher: Cipher,
    ) -> Result<(), CipherBound> {
        let Some(flow) = self.get_mut(id) else { return Ok(()) };
        let Some(association) = associations.get(flow.association) else { return Ok(()) };
        let other = flow.seal.as_deref().filter(|had| had.cipher != cipher);
        if other.is_some_and(|had| *had == keys_of(flow, association, config, had.cipher)) {
            return Err(CipherBound);
        }
        flow.seal = Some(Box::new(keys_of(flow, association, config, cipher)));
        Ok(())
    }
}

/// A flow has a cipher in these epochs, and it is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CipherBound;

/// The keys of a flow in the present epochs of both ends.
fn keys_of(flow: &Flow, association: &Association, config: &Config, cipher: Cipher) -> SealKeys {
    let own = config.epoch;
    let peer = association.peer_epoch;
    let is_initiator = flow.role == Role::Initiator;
    let (initiator_flow, responder_flow) =
        if is_initiator { (flow.id, flow.peer_flow) } else { (flow.peer_flow, flow.id) };
    let secret = |is_own: bool| {
        let (sender_epoch, receiver_epoch) = if is_own { (own, peer) } else { (peer, own) };
        let from_initiator = is_own == is_initiator;
        let session = flow.key_session();
        let context =
            Context { cipher, from_initiator, sender_epoch, receiver_epoch, initiator_flow, responder_flow, session };
        context.secret(&association.root_key())
    };
    SealKeys {
        cipher,
        send: secret(true),
        open: secret(false),
        send_epochs: epochs(own, peer),
        open_epochs: epochs(peer, own),
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeSet;
    use alloc::format;

    use super::*;

    fn context() -> Context {
        Context {
            cipher: Cipher::Aes256Gcm,
            from_initiator: true,
            sender_epoch: 1,
            receiver_epoch: 2,
            initiator_flow: FlowId(3),
            responder_flow: FlowId(4),
            session: SessionId([5; 16]),
        }
    }

    #[test]
    fn whatever_tells_two_directions_apart_makes_another_secret() {
        let root = [9; 32];
        let contexts = [
            context(),
            Context { cipher: Cipher::ChaCha20Poly1305, ..context() },
            Context { from_initiator: false, ..context() },
            Context { sender_epoch: 2, ..context() },
            Context { receiver_epoch: 1, ..context() },
            Context { sender_epoch: 2, receiver_epoch: 1, ..context() },
            Context { initiator_flow: FlowId(4), responder_flow: FlowId(3), ..context() },
            Context { responder_flow: FlowId(5), ..context() },
            Context { session: SessionId([6; 16]), ..context() },
        ];
        let mut secrets: BTreeSet<[u8; 32]> = contexts.iter().map(|context| context.secret(&root)).collect();
        secrets.insert(context().secret(&[8; 32]));
        assert_eq!(secrets.len(), contexts.len() + 1);
        assert!(secrets.insert(root), "nor is it the root itself");
    }

    #[test]
    fn keys_are_not_printed() {
        let keys =
            SealKeys { cipher: Cipher::Aes256Gcm, send: [0xab; 32], open: [0xcd; 32], send_epochs: 0, open_epochs: 0 };
        assert_eq!(format!("{keys:?}"), "SealKeys { cipher: Aes256Gcm, .. }");
    }

    #[test]
    fn aes_is_chosen_where_both_have_it() {
        let (aes, chacha) = (Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305);
        assert_eq!(Cipher::best(aes.bit() | chacha.bit()), Some(aes));
        assert_eq!(Cipher::best((aes.bit() | chacha.bit()) & chacha.bit()), Some(chacha));
        assert_eq!(Cipher::best(1 << STACK_ENCAP), None);
        for cipher in [aes, chacha] {
            assert_eq!(Cipher::of_stack(cipher.stack()), Some(cipher));
        }
    }
}
