//! The host's end of one stream: what it asks of its router, and what it makes of the answers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use margay_core::certificate::{CertificateError, Revocation, decode_chain};
use margay_core::fence::FenceNotice;
use margay_core::key::{HostPublic, VerifyingKey};
use margay_core::name::{Prefix, ServiceId, authority_block};
use margay_core::way::Relation;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::Instance;
use super::host::{ClusterRouter, End, Order, RegistrationState, Shared, refused};
use super::order_book::Reports;
use super::proto::{self, from_host, from_router};
use super::retry::Retries;
use super::silence::Silence;
use super::stream::{StreamError, Writer};
use super::trace::{Desk, Question, TraceError};
use super::ways::Ways;
use crate::cluster::ROUTERS_MAX;
use crate::issue;
use crate::token::check_address;
use crate::wide_area::{Attachment, Link, Words, due};

/// Instances under a watched prefix that are remembered.
const WATCHED_MAX: usize = 10_000;
/// From one request for a membership to the next, where the router does not give one.
const MEMBERSHIP_RETRY_S: u64 = 60;
/// Orders that wait; a router tells no more at once.
const ORDERS_MAX: usize = 64;
/// Bounds of what a router may ask for.
const LEASE_RANGE_MS: std::ops::RangeInclusive<u32> = 100..=60_000;

/// What an answer is awaited for.
enum Pending {
    Certified(Prefix),
    Registered(Prefix),
    Withdrawn(oneshot::Sender<()>),
    Resolved(oneshot::Sender<Vec<Instance>>),
    Traced(oneshot::Sender<proto::Traced>),
    Membership,
}

/// One stream while it lasts.
pub(super) struct Conversation<'a> {
    shared: &'a Arc<Shared>,
    /// This host's address.
    local: IpAddr,
    writer: Writer,
    lease: Duration,
    heartbeat: Duration,
    next_request: u64,
    pending: HashMap<u64, Pending>,
    /// When what must be signed again: prefixes, and the membership.
    renewals: BTreeMap<Prefix, u64>,
    membership_renewal_s: u64,
    /// Until when it is proved that the router is one of the authority's.
    proved_until_s: u64,
    /// What was refused and is asked for again.
    retries: Retries,
    /// What was heard of a watched prefix, while more of it is to come.
    parts: BTreeMap<Prefix, Vec<Instance>>,
    /// Prefixes that this host can answer for: the router may send others here.
    certified: BTreeSet<Prefix>,
    /// Those among them that are to be registered now.
    to_register: Vec<Prefix>,
    desk: Desk,
    /// What the router's site is called, if it has one.
    site: String,
    /// Both are routers of sites.
    attachment: Option<Attachment>,
    /// What it is to be answered.
    to_say: Vec<Words>,
    /// Notices of fenced names for the router.
    notices: Vec<Vec<u8>>,
    /// By what the router has shown this host to be a member, and itself to be a router.
    membership: Vec<u8>,
    router: Vec<u8>,
    /// What has become of keys: what was heard of it, and how much was known at the last look.
    told_keys: Option<proto::Keys>,
    /// Which sessions go through boxes, as was heard.
    told_chains: Option<proto::Chains>,
    /// Orders of its authority, as were heard, and how it goes with those that are carried out.
    told_orders: Vec<proto::Order>,
    reports: Reports,
    keys_known: usize,
    revoked_keys: usize,
}

impl<'a> Conversation<'a> {
    /// Of a host that was welcomed, from this address, by a router that has proved until when it is one.
    pub fn new(
        shared: &'a Arc<Shared>,
        local: IpAddr,
        writer: Writer,
        welcome: &proto::Welcome,
        proved_until_s: u64,
    ) -> Self {
        let within = |ms: u32| ms.clamp(*LEASE_RANGE_MS.start(), *LEASE_RANGE_MS.end());
        let router = shared.config.router_key.id();
        let mut this = Self {
            shared,
            local,
            writer,
            lease: Duration::from_millis(within(welcome.lease_ms).into()),
            heartbeat: Duration::from_millis(within(welcome.heartbeat_ms).into()),
            next_request: 1,
            pending: HashMap::new(),
            renewals: BTreeMap::new(),
            membership_renewal_s: 0,
            proved_until_s: 0,
            retries: Retries::default(),
            parts: BTreeMap::new(),
            certified: BTreeSet::new(),
            to_register: Vec::new(),
            desk: Desk::new(authority_block(&shared.config.authority), router, welcome.traces),
            reports: Reports::new(router),
            told_orders: Vec::new(),
            site: welcome.site.clone(),
            attachment: None,
            to_say: Vec::new(),
            notices: Vec::new(),
            membership: Vec::new(),
            router: Vec::new(),
            told_keys: None,
            told_chains: None,
            keys_known: shared.keys_known(),
            revoked_keys: shared.trust.lock().revocations(),
        };
        this.plan_membership(welcome.membership.clone(), welcome.router.clone(), proved_until_s);
        shared.tenures.lock().begin_stream(Instant::now());
        this
    }

    /// Half of a certificate's life from now.
    fn half_way(&self, not_after_s: u64) -> u64 {
        let now = self.shared.clock.unix_s();
        now + not_after_s.saturating_sub(now) / 2
    }

    fn plan_membership(&mut self, membership: Vec<u8>, router: Vec<u8>, proved_until_s: u64) {
        self.membership_renewal_s = self.half_way(proved_until_s);
        self.proved_until_s = proved_until_s;
        (self.membership, self.router) = (membership, router);
    }

    /// Gives the end, when the router may sign no longer. What proves nothing else is left aside, and what was shown
    /// before counts for its time.
    fn take_membership(&mut self, answer: proto::Membership) -> Option<End> {
        self.pending.remove(&answer.request);
        match self.shared.check_proofs(&answer.chain, &answer.router) {
            Ok(until_s) => {
                self.shared.sal.set_membership(answer.chain.clone());
                self.plan_membership(answer.chain, answer.router, until_s);
                None
            }
            Err(fault @ CertificateError::KeyRevoked) => Some(self.shared.refusal(fault)),
            Err(fault) => {
                let router = &self.shared.config.router_address;
                tracing::warn!(router, why = %fault, "a membership that the router gives is not taken");
                None
            }
        }
    }

    /// Whether nothing proves any longer that the router is one.
    fn is_unproved(&self) -> bool {
        self.proved_until_s < self.shared.clock.unix_s()
    }

    /// Goes on until the stream ends, and says why.
    pub async fn hold(
        mut self,
        orders: &mut mpsc::UnboundedReceiver<Order>,
        mut answers: mpsc::Receiver<Result<proto::FromRouter, StreamError>>,
    ) -> End {
        if let Err(error) = self.attach().await {
            return error.into();
        }
        let wanted: Vec<Prefix> = self.shared.wanted.lock().keys().copied().collect();
        for prefix in wanted {
            if let Err(error) = self.register(prefix).await {
                return error.into();
            }
        }
        let watched: Vec<Prefix> = self.shared.watched.lock().keys().copied().collect();
        for prefix in watched {
            if let Err(error) = self.watch(prefix, false).await {
                return error.into();
            }
        }
        let mut beats = interval(self.heartbeat);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut silence = Silence::new(self.lease);
        let mut keys = self.shared.store.key_changes();
        // Another router may have told of one since this one welcomed the host.
        keys.mark_changed();
        loop {
            let done = tokio::select! {
                // Its own sign of life first, and what has come before the lease may end.
                biased;
                _ = beats.tick() => match self.is_unproved() {
                    // A new stream begins with a proof, or comes to nothing.
                    true => return End::Broke("its proof that it is a router of the authority has ended".to_owned()),
                    false => self.beat().await,
                },
                () = self.retries.wait() => self.ask_again().await,
                order = orders.recv() => match order {
                    None | Some(Order::Stop) => return End::Stopped,
                    Some(Order::Moved(gone)) if gone.contains(&self.local) => return End::Left(Some(self.writer)),
                    Some(order) => self.carry_out(order).await,
                },
                words = due(self.attachment.as_ref()) => self.say(words).await,
                _ = keys.changed() => match self.look_at_keys().await {
                    Some(end) => return end,
                    None => Ok(()),
                },
                answer = self.desk.answered() => self.send(from_host::Body::Traced(answer)).await,
                report = self.reports.next() => self.send(from_host::Body::OrderReport(report)).await,
                answer = answers.recv() => {
                    silence.broken();
                    match answer {
                        None => return End::Broke("the stream ended".to_owned()),
                        Some(Err(error)) => return error.into(),
                        Some(Ok(answer)) => match self.take(answer) {
                            Some(end) => return end,
                            None => match self.heed().await {
                                Err(end) => return end,
                                Ok(()) => self.follow_up().await,
                            },
                        },
                    }
                },
                () = silence.lasted() => return End::Broke(format!("silent for {:?}", self.lease)),
            };
            if let Err(error) = done {
                return error.into();
            }
        }
    }

    async fn send(&mut self, body: from_host::Body) -> Result<(), StreamError> {
        self.writer.write(&proto::FromHost { body: Some(body) }).await
    }

    fn request(&mut self, pending: Pending) -> u64 {
        let request = self.next_request;
        self.next_request += 1;
        self.pending.insert(request, pending);
        request
    }

    async fn beat(&mut self) -> Result<(), StreamError> {
        self.shared.ways.iter().for_each(|ways| ways.look());
        let now = self.shared.clock.unix_s();
        let due: Vec<Prefix> = self.renewals.iter().filter(|(_, at)| **at <= now).map(|(prefix, _)| *prefix).collect();
        for prefix in due {
            self.renewals.remove(&prefix);
            self.register(prefix).await?;
        }
        if self.membership_renewal_s <= now {
            self.membership_renewal_s = now + MEMBERSHIP_RETRY_S;
            let request = self.request(Pending::Membership);
            self.send(from_host::Body::RenewMembership(proto::RenewMembership { request })).await?;
        }
        let number = self.shared.tenures.lock().beat(Instant::now());
        self.send(from_host::Body::Heartbeat(proto::Heartbeat { number, ..proto::Heartbeat::default() })).await
    }

    /// For what another host had, and may have no longer.
    async fn ask_again(&mut self) -> Result<(), StreamError> {
        for prefix in self.retries.due(Instant::now()) {
            self.register(prefix).await?;
        }
        Ok(())
    }

    /// The certificate comes first, and the registration after it: whom the router sends here is answered in a way that
    /// it believes.
    async fn register(&mut self, prefix: Prefix) -> Result<(), StreamError> {
        let Some(wanted) = self.shared.wanted.lock().get(&prefix).cloned() else { return Ok(()) };
        let certificate_only = wanted.proof.is_empty() && !self.certified.contains(&prefix);
        let pending = if certificate_only { Pending::Certified(prefix) } else { Pending::Registered(prefix) };
        let request = self.request(pending);
        self.send(from_host::Body::Register(proto::Register {
            request,
            name: wanted.name,
            service_id: prefix.id.0.to_vec(),
            bits: prefix.bits.into(),
            weight: wanted.weight,
            priority: wanted.priority,
            proof: wanted.proof,
            partition_bits: wanted.partition_bits.into(),
            exclusive: wanted.exclusive,
            sticky: wanted.sticky,
            certificate_only,
            fenced: wanted.fenced,
            zero_weight: wanted.zero_weight.map(Into::into),
        }))
        .await
    }

    /// Says whose site this host is the router of, if both ends are one.
    async fn attach(&mut self) -> Result<(), StreamError> {
        let Some(area) = self.shared.area.as_ref().filter(|_| !self.site.is_empty()) else { return Ok(()) };
        let config = &self.shared.config;
        let (host, authority) = (config.router_key.id(), authority_block(&config.authority));
        let beside = self.shared.is_beside(&self.site);
        let relation = if beside { Relation::Beside } else { Relation::Above };
        let Some(address) = *self.shared.router_at.lock() else { return Ok(()) };
        match area.attach(Link { host, authority, joined: true }, address, &self.site, relation, None) {
            Ok(attachment) => self.attachment = Some(attachment),
            Err(fault) => {
                tracing::warn!(router = config.router_address, why = %fault, "nothing is announced to the router");
                return Ok(());
            }
        }
        let site = proto::Site { name: area.policy().site.clone(), beside };
        self.send(from_host::Body::Site(site)).await
    }

    async fn say(&mut self, words: Vec<Words>) -> Result<(), StreamError> {
        for words in words {
            self.send(words.into()).await?;
        }
        Ok(())
    }

    async fn heed(&mut self) -> Result<(), End> {
        if let Some(keys) = self.told_keys.take() {
            self.shared.heed(keys).await?;
        }
        if let Some(chains) = self.told_chains.take() {
            self.shared.heed_chains(chains).await?;
        }
        // The agent may be starting yet: then they wait for the next word of the router. A link between two routers has
        // no book, and carries nothing out.
        let Some(book) = self.shared.order_book.get() else { return Ok(()) };
        for order in std::mem::take(&mut self.told_orders) {
            self.shared.heed_order(&order, &self.membership, self.reports.taking(book)).await?;
        }
        Ok(())
    }

    /// What follows from an answer.
    async fn follow_up(&mut self) -> Result<(), StreamError> {
        let words = std::mem::take(&mut self.to_say);
        self.say(words).await?;
        for notice in std::mem::take(&mut self.notices) {
            let request = self.next_request;
            self.next_request += 1;
            self.send(from_host::Body::Fence(proto::Fence { request, notice })).await?;
        }
        self.register_certified().await
    }

    /// The router has said something of what other sites serve.
    fn heard_words(&mut self, words: Words) {
        if let Some(attachment) = &self.attachment {
            self.to_say.extend(attachment.take(words));
        }
    }

    async fn register_certified(&mut self) -> Result<(), StreamError> {
        for prefix in std::mem::take(&mut self.to_register) {
            self.register(prefix).await?;
        }
        Ok(())
    }

    async fn carry_out(&mut self, order: Order) -> Result<(), StreamError> {
        match order {
            Order::Register(prefix) => self.register(prefix).await,
            Order::Withdraw(prefix, done) => {
                self.renewals.remove(&prefix);
                self.retries.forget(&prefix);
                self.certified.remove(&prefix);
                self.shared.tenures.lock().end(&prefix);
                let request = self.request(Pending::Withdrawn(done));
                let (service_id, bits) = (prefix.id.0.to_vec(), prefix.bits.into());
                self.send(from_host::Body::Withdraw(proto::Withdraw { request, service_id, bits })).await
            }
            Order::Resolve(service, done) => {
                let request = self.request(Pending::Resolved(done));
                let service_id = service.0.to_vec();
                self.send(from_host::Body::Resolve(proto::Resolve { request, service_id })).await
            }
            Order::Watch(prefix) => self.watch(prefix, false).await,
            Order::EndWatch(prefix) => self.watch(prefix, true).await,
            Order::Trace(question, done) => self.ask_trace(&question, done).await,
            Order::Moved(_) | Order::Found | Order::Stop => Ok(()),
        }
    }

    async fn ask_trace(
        &mut self,
        question: &Question,
        done: oneshot::Sender<Result<oneshot::Receiver<proto::Traced>, TraceError>>,
    ) -> Result<(), StreamError> {
        if !self.desk.is_answered {
            // Whoever asked has stopped waiting.
            let _ = done.send(Err(TraceError::Older));
            return Ok(());
        }
        let (sender, answer) = oneshot::channel();
        let request = self.request(Pending::Traced(sender));
        let _ = done.send(Ok(answer));
        self.send(from_host::Body::Trace(question.written(request))).await
    }

    async fn watch(&mut self, prefix: Prefix, ends: bool) -> Result<(), StreamError> {
        // What is heard names the prefix.
        let (request, service_id, bits) = (self.next_request, prefix.id.0.to_vec(), prefix.bits.into());
        self.next_request += 1;
        self.send(from_host::Body::Watch(proto::Watch { request, service_id, bits, ends })).await
    }

    /// Of its own host the router knows no address that it could tell: we know it.
    fn instances(&self, found: Vec<proto::Instance>) -> Vec<Instance> {
        let mut instances: Vec<Instance> = found.into_iter().filter_map(Instance::read).collect();
        let router = (self.shared.config.router_key.id(), *self.shared.router_at.lock());
        for instance in instances.iter_mut().filter(|instance| instance.host == router.0) {
            instance.address = router.1.unwrap_or(instance.address);
        }
        instances
    }

    fn heard(&mut self, watched: proto::Watched) {
        let Ok(id) = <[u8; 32]>::try_from(watched.service_id) else { return };
        let prefix = Prefix::new(ServiceId(id), u16::try_from(watched.bits).unwrap_or(256).min(256));
        if !self.shared.watched.lock().contains_key(&prefix) {
            return;
        }
        let mut instances = self.parts.remove(&prefix).unwrap_or_default();
        instances.extend(self.instances(watched.instances));
        if watched.goes_on && instances.len() < WATCHED_MAX {
            self.parts.insert(prefix, instances);
            return;
        }
        if watched.truncated {
            tracing::warn!(%prefix, known = instances.len(), "more hosts serve it than the router tells of");
        }
        if let Some(known) = self.shared.watched.lock().get_mut(&prefix) {
            known.found = Some(instances);
        }
        self.shared.heard.send_modify(|version| *version = version.wrapping_add(1));
    }

    /// What this host may register has changed: some is lost, and what was refused may be had now.
    fn granted(&mut self, granted: proto::Granted) {
        self.attachment.iter().for_each(Attachment::tell_declined_again);
        let refused = |(prefix, state): (&Prefix, &RegistrationState)| (state.state == "refused").then_some(*prefix);
        self.to_register.extend(self.shared.states.lock().iter().filter_map(refused));
        for lost in granted.lost {
            let (Ok(id), Ok(bits)) = (<[u8; 32]>::try_from(lost.service_id), u16::try_from(lost.bits)) else {
                continue;
            };
            let prefix = Prefix::new(ServiceId(id), bits.min(256));
            self.certified.remove(&prefix);
            self.shared.sal.set_service_certificate(prefix, Vec::new());
            self.not_registered(prefix, proto::Refusal { request: 0, code: lost.code, text: lost.text });
        }
    }

    fn of_cluster(&self, told: proto::Routers) {
        let read = |router: proto::ClusterRouter| {
            let key = HostPublic(router.key.try_into().ok()?);
            let is_good = !key.is_of_low_order() && check_address(&router.address).is_ok();
            is_good.then_some(ClusterRouter { key, address: router.address })
        };
        let routers: Vec<ClusterRouter> = told.routers.into_iter().take(ROUTERS_MAX).filter_map(read).collect();
        self.shared.routers.send_if_modified(|known| {
            *known != routers && {
                *known = routers;
                true
            }
        });
    }

    /// After something has become of a key, by the word of any router. This router's own one may sign no longer: what
    /// it has signed is worth nothing. What others have signed is fetched anew in time: now, since nobody can tell by
    /// whose certificates this host is shown just now; and half-way to the end of a key that is followed by another
    /// one.
    async fn look_at_keys(&mut self) -> Option<End> {
        let shared = Arc::clone(self.shared);
        match tokio::task::spawn_blocking(move || shared.read_keys()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the authority's keys cannot be read; those of before stay"),
            Err(_) => tracing::error!("looking at the authority's keys ended badly"),
        }
        let unix_s = self.shared.clock.unix_s();
        match self.shared.check_proofs(&self.membership, &self.router) {
            Ok(until_s) => self.proved_until_s = until_s,
            Err(fault @ CertificateError::KeyRevoked) => return Some(self.shared.refusal(fault)),
            // By a key of the authority that another one has followed: the router may sign by that by now. It has as
            // long as it might be silent.
            Err(_) => {
                self.membership_renewal_s = 0;
                self.proved_until_s = self.proved_until_s.min(unix_s.saturating_add(self.lease.as_secs() + 1));
            }
        }
        let (known, revoked) = (self.shared.keys_known(), self.shared.trust.lock().revocations());
        if std::mem::replace(&mut self.revoked_keys, revoked) != revoked {
            self.membership_renewal_s = 0;
            self.renewals.values_mut().for_each(|at| *at = 0);
        } else if std::mem::replace(&mut self.keys_known, known) != known {
            let at_s = self.half_way(self.shared.chain_until_s(&self.membership));
            self.membership_renewal_s = self.membership_renewal_s.min(at_s);
            self.renewals.values_mut().for_each(|at| *at = at_s.min(*at));
        }
        self.keys_known = known;
        None
    }

    /// Until when a certificate is of use: its own end, or that of the key that signed it.
    fn end_of(&self, chain: &[u8], not_after_s: u64) -> u64 {
        self.shared.chain_until_s(chain).min(not_after_s)
    }

    fn put_out(&self, revoked: proto::Revoked) {
        let authority = authority_block(&self.shared.config.authority);
        // Nothing that was signed until now ends later.
        let end_s = issue::end_s(self.shared.clock.unix_s());
        let by = delegated_key(&self.router);
        for host in revoked.hosts {
            if let Ok(host_key) = host.host_key.try_into() {
                let revocation = Revocation { authority, host_key, until_s: host.until_unix_s.min(end_s), by };
                self.shared.sal.revoke(revocation);
                self.shared.area.iter().for_each(|area| area.revoke(revocation));
            }
        }
    }

    /// The router is being drained, or is not any more.
    fn note_leaving(&self, is_leaving: bool) {
        let config = &self.shared.config;
        let (authority, router) = (&config.authority, &config.router_address);
        let is_news = |ways: &Arc<Ways>| ways.leaves(authority, config.router_key.id(), is_leaving);
        if self.shared.ways.as_ref().is_some_and(is_news) {
            let how = if is_leaving { "is asked no more, where there are others" } else { "takes first packets again" };
            tracing::info!(router, "a router that is drained {how}");
        }
    }

    /// Gives the end, when the router ends the stream.
    fn take(&mut self, message: proto::FromRouter) -> Option<End> {
        use from_router::Body;
        match message.body? {
            Body::Heartbeat(beat) => {
                self.shared.tenures.lock().answered(beat.number);
                note_twin(&self.shared.config.router_address, &beat.twin);
                self.note_leaving(beat.leaving);
            }
            Body::Welcome(_) => {}
            Body::Registered(answer) => self.registered(&answer),
            Body::Withdrawn(answer) => {
                if let Some(Pending::Withdrawn(done)) = self.pending.remove(&answer.request) {
                    // Whoever ordered it has stopped waiting.
                    let _ = done.send(());
                }
            }
            Body::Resolved(answer) => {
                if let Some(Pending::Resolved(done)) = self.pending.remove(&answer.request) {
                    // Whoever asked has stopped waiting.
                    let _ = done.send(self.instances(answer.instances));
                }
            }
            Body::Watched(watched) => self.heard(watched),
            Body::Traced(answer) => {
                if let Some(Pending::Traced(done)) = self.pending.remove(&answer.request) {
                    // Whoever asked has stopped waiting.
                    let _ = done.send(answer);
                }
            }
            Body::Trace(asked) => {
                if !self.desk.take(self.shared.tracer.get(), asked) {
                    self.shared.traces_refused.fetch_add(1, Ordering::Relaxed);
                }
            }
            Body::Revoked(revoked) => self.put_out(revoked),
            Body::Keys(keys) => self.told_keys = Some(keys),
            Body::Chains(chains) => self.told_chains = Some(chains),
            Body::Order(order) if self.told_orders.len() < ORDERS_MAX => self.told_orders.push(order),
            Body::Order(_) => {}
            Body::Granted(granted) => self.granted(granted),
            Body::Routers(routers) => self.of_cluster(routers),
            Body::Announce(announce) => self.heard_words(Words::Announce(announce)),
            Body::Retract(retract) => self.heard_words(Words::Retract(retract)),
            Body::Declined(declined) => self.heard_words(Words::Declined(declined)),
            Body::Membership(answer) => return self.take_membership(answer),
            Body::Refusal(refusal) if refusal.request == 0 => return Some(refused(&refusal)),
            Body::Refusal(refusal) => match self.pending.remove(&refusal.request) {
                Some(Pending::Registered(prefix) | Pending::Certified(prefix)) => self.not_registered(prefix, refusal),
                _ => tracing::warn!(why = refusal.text, "the router refuses what it was asked"),
            },
        }
        None
    }

    fn not_registered(&mut self, prefix: Prefix, refusal: proto::Refusal) {
        if !self.shared.wanted.lock().contains_key(&prefix) {
            return;
        }
        self.renewals.remove(&prefix);
        self.shared.tenures.lock().end(&prefix);
        self.retries.refused(prefix, refusal.code(), Instant::now());
        let known = self.shared.states.lock().get(&prefix).cloned();
        // Asked again and again, it is one refusal.
        if known.is_none_or(|known| (known.state, &known.why) != ("refused", &refusal.text)) {
            tracing::warn!(%prefix, why = refusal.text, "the router does not register it");
            self.shared.note(prefix, "refused", refusal.text, 0);
        }
    }

    fn registered(&mut self, answer: &proto::Registered) {
        let (prefix, is_registered) = match self.pending.remove(&answer.request) {
            Some(Pending::Registered(prefix)) => (prefix, true),
            Some(Pending::Certified(prefix)) => (prefix, false),
            _ => return,
        };
        if !self.shared.wanted.lock().contains_key(&prefix) {
            return;
        }
        if !answer.certificate.is_empty() {
            self.shared.sal.set_service_certificate(prefix, answer.certificate.clone());
            let end_s = self.end_of(&answer.certificate, answer.not_after_unix_s);
            self.renewals.insert(prefix, self.half_way(end_s));
        }
        self.certified.insert(prefix);
        if is_registered {
            self.retries.forget(&prefix);
            self.begin_tenure(prefix, answer);
            self.shared.note(prefix, "registered", String::new(), answer.not_after_unix_s);
        } else {
            self.to_register.push(prefix);
        }
    }
}

impl Conversation<'_> {
    /// The router has given a fenced name to this host, which says so to all who watch it. The certificate is a new one
    /// each time.
    fn begin_tenure(&mut self, prefix: Prefix, answer: &proto::Registered) {
        let wanted = self.shared.wanted.lock().get(&prefix).filter(|wanted| wanted.fenced).cloned();
        let Some(wanted) = wanted.filter(|_| answer.fence_hold_ms > 0) else { return };
        let number = answer.fence_number;
        let hold = Duration::from_millis(answer.fence_hold_ms.into());
        self.shared.tenures.lock().begin(prefix, number, hold.saturating_sub(self.heartbeat));
        // While the cluster's store is away, a router knows no number: the host has the name from before.
        if number == 0 {
            return;
        }
        let chain = if wanted.proof.is_empty() { answer.certificate.clone() } else { wanted.proof };
        self.shared.sal.set_own_fence(prefix, Some(number));
        let notice = FenceNotice::new(prefix, number, &self.shared.local.host_key, chain);
        self.notices.push(notice.encode());
    }
}

/// The key that signed a chain, where it is not the authority's own.
fn delegated_key(chain: &[u8]) -> Option<VerifyingKey> {
    match &decode_chain(chain).ok()?[..] {
        [_, .., leaf] => Some(leaf.issuer),
        _ => None,
    }
}

/// The router has refused another host that has the key of this one.
fn note_twin(router: &str, twin: &str) {
    // Its word, to be read by people.
    if let Ok(newcomer) = twin.parse::<IpAddr>() {
        tracing::warn!(
            router, %newcomer,
            "another host has registered with this host's key and was refused; this one was there before, and keeps \
             its place: stop the agent \
             on the copy, remove /var/lib/margay/host.key there, and start it again: it is a host of its own then"
        );
    }
}
