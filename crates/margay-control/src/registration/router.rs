//! The router's end: lets hosts in, takes down what they serve, and forgets them when they fall silent.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use margay_core::AssociationSetup;
use margay_core::fair_table::Peer;
use margay_core::key::{HostId, HostPublic};
use margay_core::name::{Name, PARTITION_BITS_MAX, Prefix, SERVICE_BITS, ServiceId};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::fence::FENCE_HOLD_MS;
use super::leave::{Departure, Leave};
use super::ledger::{Act, Ledger};
use super::orders::{self, Orders, Told};
use super::proto::{self, Code, from_host, from_router};
use super::refusal::{No, invalid, prefix_of, refusal, shown};
use super::rights::Claim;
use super::roll::{OwnService, PREFIXES_MAX, Place, Roll, RollError, Seat, Terms};
use super::sharing;
use super::silence::Silence;
use super::stream::{Reader, StreamError, Writer, accept, read_all};
use super::trace::{self, Desk, Lines, Question, TraceError, Tracer};
use super::{Instance, Local, VERSION, ZeroWeight};
use crate::api::v1::TraceHop;
use crate::cluster::Cluster;
use crate::keyring::Keyring;
use crate::lineage::LineageError;
use crate::permits::{Backlog, BacklogPlace, UNWELCOMED_MAX};
use crate::store::{Member, MemberKey, Store};
use crate::token::hash_secret;
use crate::wide_area::{Attachment, WideArea, due};
use crate::{Clock, SalControl, entropy, issue};

/// From the first byte to the welcome.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// Instances in one answer.
const INSTANCES_MAX: usize = 64;
/// A host that watches hears of a change at once, and of what changes within so long after it together: a thousand
/// changes a second are no thousand looks for each host.
const LOOK_PAUSE: Duration = Duration::from_millis(5);
const TOO_MANY: &str = "too many streams at once that were not welcomed yet";
const GOING_DOWN: &str = "the router is going down";
const WEIGHT_MAX: u32 = 65_535;
const HOST_NAME_MAX: usize = 253;

mod authority;
mod error;
mod exclusive;
mod review;
mod site;
mod twin;
mod watching;

pub(super) use authority::News;
use authority::{Proofs, authority_of, proofs_of};
pub use error::RouterError;
use twin::make_way;
use watching::Watches;

/// How the router is set up.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// TCP address for registrations.
    pub listen: SocketAddr,
    /// Silence after which a host is gone.
    pub lease_ms: u32,
    /// Time between signs of life.
    pub heartbeat_ms: u32,
    /// What it shares with other routers.
    pub cluster: Option<Arc<Cluster>>,
}

/// What all streams share.
pub(super) struct Shared {
    pub config: RouterConfig,
    pub local: Local,
    pub keyring: Keyring,
    pub store: Arc<Store>,
    pub sal: Arc<dyn SalControl>,
    pub clock: Clock,
    pub roll: Mutex<Roll>,
    /// How hosts are asked.
    lines: Mutex<Lines>,
    /// What explains first packets on this host, once it is there.
    tracer: OnceLock<Tracer>,
    traces_refused: AtomicU64,
    strangers: Backlog,
    ledger: Arc<Ledger>,
    pub area: Option<Arc<WideArea>>,
    stopping: watch::Sender<bool>,
    /// Hosts that were put out, what has become of keys, and which sessions go through boxes.
    pub news: watch::Sender<News>,
    /// Rises when grants are changed.
    pub grants: watch::Sender<u64>,
    /// Where else hosts register.
    pub routers: watch::Sender<Vec<proto::ClusterRouter>>,
    /// This router signs for others than before.
    pub signs: Notify,
    /// Hosts are to send first packets to other routers.
    leaving: watch::Sender<bool>,
    pub orders: Orders,
}

/// A service router.
pub struct Router {
    pub(super) shared: Arc<Shared>,
    address: SocketAddr,
    task: Mutex<Option<JoinHandle<()>>>,
    keeping: JoinHandle<()>,
    following: Option<JoinHandle<()>>,
}

impl Router {
    /// Listens for hosts until [`stop`](Self::stop). With an `area`, other sites hear of what they serve.
    ///
    /// # Errors
    ///
    /// The address cannot be had.
    pub async fn start(
        config: RouterConfig,
        local: Local,
        keyring: Keyring,
        store: Arc<Store>,
        sal: Arc<dyn SalControl>,
        clock: Clock,
        area: Option<Arc<WideArea>>,
    ) -> Result<Arc<Self>, RouterError> {
        let address = config.listen;
        let listener = match TcpListener::bind(address).await {
            // "Every address" on a host whose kernel has no IPv6.
            Err(error) if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) && has_no_v6(&error) => {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
            }
            other => other,
        };
        let listener = listener.map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => RouterError::PortInUse(address),
            _ => RouterError::Listen { address, error },
        })?;
        let address = listener.local_addr().map_err(|error| RouterError::Listen { address, error })?;
        let ledger = Arc::new(Ledger::new(Arc::clone(&store), clock.clone()));
        let roll = exclusive::first_roll(&config, &store)?;
        let shared = Arc::new(Shared {
            config,
            local,
            keyring,
            store,
            sal,
            clock,
            roll: Mutex::new(roll),
            area,
            lines: Mutex::default(),
            tracer: OnceLock::new(),
            traces_refused: AtomicU64::default(),
            strangers: Backlog::new(UNWELCOMED_MAX),
            ledger: Arc::clone(&ledger),
            stopping: watch::channel(false).0,
            news: watch::Sender::default(),
            grants: watch::Sender::default(),
            routers: watch::Sender::default(),
            signs: Notify::new(),
            leaving: watch::Sender::default(),
            orders: Orders::default(),
        });
        let task = Mutex::new(Some(tokio::spawn(listen(Arc::clone(&shared), listener))));
        shared.read_revocations()?;
        let (sharing, following) = (sharing::follow(Arc::clone(&shared)), shared.follow_area());
        let keys = sharing::follow_keys(Arc::clone(&shared));
        let kept = exclusive::follow_kept_fences(Arc::clone(&shared));
        let orders = orders::follow_orders(Arc::clone(&shared));
        let keeping = tokio::spawn(async { _ = tokio::join!(ledger.keep(), sharing, keys, kept, orders) });
        Ok(Arc::new(Self { shared, address, task, keeping, following }))
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Everything that hosts have registered.
    pub fn instances(&self) -> Vec<Instance> {
        self.shared.roll.lock().instances()
    }

    /// Who serves a name now.
    pub fn instances_of(&self, service: &ServiceId) -> Vec<Instance> {
        self.shared.roll.lock().instances_of(service)
    }

    /// Who serves something under a prefix, or all of it; beside them, for each partition there, its holder once more
    /// with the partition as prefix.
    pub fn instances_under(&self, prefix: &Prefix) -> Vec<Instance> {
        self.shared.roll.lock().instances_under(prefix)
    }

    /// How many partitions went from one host to another.
    pub fn partitions_moved(&self) -> u64 {
        self.shared.roll.lock().partitions_moved()
    }

    /// Told whenever somebody else may serve something.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.shared.roll.lock().changes()
    }

    /// What the router's own host serves. Its rules are the caller's, but for those of partitions.
    pub fn set_own(&self, own: Vec<OwnService>) {
        self.shared.roll.lock().set_own(own, &*self.shared.sal);
        self.shared.fence_own();
    }

    /// What a host that is registered here would do with a first packet, and those that it would send it to.
    ///
    /// # Errors
    ///
    /// It is not registered for the name's authority, or there is no answer, or it is no.
    pub async fn trace(&self, host: HostId, question: &Question) -> Result<Vec<TraceHop>, TraceError> {
        let answer = self.shared.lines.lock().ask(host, question)?;
        trace::wait(answer, question.limit).await
    }

    /// Questions of hosts about first packets that were refused.
    pub fn traces_refused(&self) -> u64 {
        self.shared.traces_refused.load(Ordering::Relaxed)
    }

    /// Tells all hosts whether first packets are to go to other routers, where there are any. What comes here all the
    /// same is forwarded as before.
    pub fn set_leaving(&self, is_leaving: bool) {
        self.shared.leaving.send_if_modified(|leaving| std::mem::replace(leaving, is_leaving) != is_leaving);
    }

    /// Lets hosts ask what this router would do with first packets.
    pub fn set_tracer(&self, tracer: Tracer) {
        // Set once, at the start.
        let _ = self.shared.tracer.set(tracer);
    }

    /// SAL address of a host, if its stream is up.
    pub fn connected(&self, host: HostId) -> Option<SocketAddr> {
        self.shared.roll.lock().address_of(host)
    }

    /// The host whose stream is up at a SAL address, and what it calls itself.
    pub fn host_at(&self, address: SocketAddr) -> Option<(HostId, String)> {
        self.shared.roll.lock().host_at(address)
    }

    /// Hosts whose stream is up.
    pub fn host_count(&self) -> usize {
        self.shared.roll.lock().len()
    }

    /// How many instances are no longer listed, by reason. Who is listed again counts again.
    pub fn instances_left(&self) -> [(&'static str, u64); Leave::ALL.len()] {
        let roll = self.shared.roll.lock();
        Leave::ALL.map(|why| (why.label(), roll.left(why)))
    }

    /// Ends the stream of a host that is no member any more, and all that it serves; tells the others that what was
    /// signed for it holds no longer.
    ///
    /// # Errors
    ///
    /// The store cannot be read: then its stream has ended all the same, and its certificates end within a day.
    pub fn remove_host(&self, host: HostId) -> Result<(), LineageError> {
        self.shared.roll.lock().expel(host, &*self.shared.sal);
        self.shared.read_revocations()
    }

    /// What hosts may register has been changed: those that are here lose what they may not register any more, and are
    /// told.
    pub fn review_grants(&self) {
        self.shared.grants.send_modify(|version| *version = version.wrapping_add(1));
    }

    /// Tells every host that the router goes, ends their streams, and takes their rules out.
    pub async fn stop(&self) {
        self.shared.stopping.send_replace(true);
        let task = self.task.lock().take();
        if let Some(task) = task
            && task.await.is_err()
        {
            tracing::error!("the router ended badly");
        }
        self.following.iter().for_each(JoinHandle::abort);
        self.keeping.abort();
        self.write_audit().await;
    }

    /// Writes what the audit log has not yet.
    pub async fn write_audit(&self) {
        Arc::clone(&self.shared.ledger).flush().await;
    }

    /// How many registrations there were, and how often something was refused, by the acts of the audit log.
    pub fn audit_counts(&self) -> Vec<(&'static str, u64)> {
        self.shared.ledger.counts().into()
    }
}

async fn listen(shared: Arc<Shared>, listener: TcpListener) {
    let mut streams = JoinSet::new();
    let mut stopping = shared.stopping.subscribe();
    loop {
        tokio::select! {
            () = told(&mut stopping) => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    // One socket hears both families, and shows IPv4 as mapped.
                    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                    if let Ok(stranger) = shared.strangers.enter(from.ip()) {
                        streams.spawn(serve(Arc::clone(&shared), stream, from, stranger));
                    } else {
                        shared.ledger.note(Act::StreamRefused, from.ip(), TOO_MANY);
                    }
                }
                Err(error) => {
                    // Mostly: no more descriptors. Those that are there go on; a moment later there may be some.
                    tracing::warn!(%error, "a host cannot be heard");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(_) = streams.join_next() => {}
        }
    }
    while streams.join_next().await.is_some() {}
}

/// Whether the kernel says that it has no IPv6, or none on this host.
fn has_no_v6(error: &io::Error) -> bool {
    const EAFNOSUPPORT: i32 = 97;
    error.kind() == io::ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(EAFNOSUPPORT)
}

/// Waits until the router goes down.
async fn told(stopping: &mut watch::Receiver<bool>) {
    // The sender lives as long as the router.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

/// What is there now is news, too.
fn unheard<T>(sender: &watch::Sender<T>) -> watch::Receiver<T> {
    let mut receiver = sender.subscribe();
    receiver.mark_changed();
    receiver
}

/// Waits until something has changed, and the last look was long enough ago.
async fn next_change(changes: &mut watch::Receiver<u64>, not_before: Instant) {
    sleep_until(not_before).await;
    // The sender lives in the roll, which this stream holds.
    let _ = changes.changed().await;
}

fn answer_of(body: from_router::Body) -> proto::FromRouter {
    proto::FromRouter { body: Some(body) }
}

/// `twin`: the address of a host that was refused because it has the same key; `number`: of the sign of life that is
/// answered.
fn beat(leaving: bool, twin: Option<String>, number: u64) -> from_router::Body {
    from_router::Body::Heartbeat(proto::Heartbeat { twin: twin.unwrap_or_default(), leaving, number })
}

/// One stream from its first byte to its end.
async fn serve(shared: Arc<Shared>, stream: TcpStream, from: SocketAddr, mut stranger: BacklogPlace) {
    let greeted = timeout(HELLO_LIMIT, async {
        let (mut reader, writer, host) = accept(stream, &shared.local.host_key).await?;
        let hello: proto::FromHost = reader.read().await?;
        Ok::<_, StreamError>((reader, writer, host, hello))
    });
    let greeted = tokio::select! {
        greeted = greeted => greeted,
        () = stranger.displaced() => return shared.ledger.note(Act::StreamRefused, from.ip(), TOO_MANY),
    };
    let (reader, mut writer, host, hello) = match greeted {
        Ok(Ok(greeted)) => greeted,
        Ok(Err(error)) => return shared.ledger.note(Act::StreamRefused, from.ip(), error),
        Err(_) => {
            return shared.ledger.note(Act::StreamRefused, from.ip(), format!("no hello within {HELLO_LIMIT:?}"));
        }
    };
    let guest = match Guest::welcome(&shared, host, hello, from).await {
        Ok(guest) => guest,
        Err(no) => {
            tracing::warn!(%from, host = %host.id(), why = no.1, "host refused");
            shared.ledger.note(Act::HostRefused, host.id(), format!("{} (from {})", no.1, from.ip()));
            // The host learns by the end of the stream, too.
            let _ = timeout(HELLO_LIMIT, writer.write(&refusal(0, no))).await;
            return;
        }
    };
    drop(stranger);
    let (place, stream) = (guest.place, guest.seat.stream);
    let (leave, why) = guest.hold(reader, writer).await;
    let depart = || shared.roll.lock().depart(place, stream, leave, &*shared.sal);
    let departed = loop {
        match depart() {
            Departure::Going => tokio::task::yield_now().await,
            departed => break departed,
        }
    };
    if departed == Departure::Gone {
        tracing::info!(host = %place.host, why, "host gone");
    }
}

/// A host that was let in.
struct Guest {
    shared: Arc<Shared>,
    host: HostPublic,
    member: Member,
    place: Place,
    seat: Seat,
    welcome: proto::Welcome,
    watches: Watches,
    /// Names that it asks for again and again, because another host has them; bounded by the prefixes that a host may
    /// have.
    stands_by: BTreeSet<Prefix>,
    /// What it has registered because it was granted.
    granted: BTreeSet<Prefix>,
    desk: Desk,
    /// It is the router of another site.
    attachment: Option<Attachment>,
    orders: Told,
}

impl Guest {
    async fn welcome(
        shared: &Arc<Shared>,
        host: HostPublic,
        first: proto::FromHost,
        from: SocketAddr,
    ) -> Result<Self, No> {
        let Some(from_host::Body::Hello(hello)) = first.body else {
            return Err(invalid("the first message is no hello"));
        };
        if hello.version != VERSION {
            let text =
                format!("the host speaks version {}, this router version {VERSION}; update the older", hello.version);
            return Err(No(Code::Version, text));
        }
        let authority: [u8; 8] = hello.authority[..].try_into().map_err(|_| invalid("no authority"))?;
        let boot_id: [u8; 16] = hello.boot_id[..].try_into().map_err(|_| invalid("no boot identity"))?;
        let sal_port =
            u16::try_from(hello.sal_port).ok().filter(|port| *port != 0).ok_or_else(|| invalid("no SAL port"))?;
        if hello.association_id == 0 || hello.host_name.len() > HOST_NAME_MAX {
            return Err(invalid("the hello makes no sense"));
        }
        let key = MemberKey { host, authority };
        let token = (!hello.secret.is_empty()).then(|| hash_secret(&hello.secret));
        let (store, name, unix_s) = (Arc::clone(&shared.store), hello.host_name.clone(), shared.clock.unix_s());
        let admitted = blocking(move || store.admit(&key, &name, token, unix_s)).await?;
        let member = admitted?;
        let place = Place { host: host.id(), authority };
        let proofs = proofs_of(shared, &member)?;
        let address = SocketAddr::new(from.ip(), sal_port);
        make_way(shared, place, boot_id, from).await?;
        let seat = shared.roll.lock().arrive(place, &member.host_name, address, boot_id)?;
        let mut rng = entropy::rng().map_err(|error| No(Code::Store, error.to_string()))?;
        let (association_key, hop_key, association_id) = (rng.bytes::<32>(), rng.bytes::<16>(), rng.u32().max(1));
        // Before the host learns the key: its first packet finds the association.
        shared.sal.install_association(AssociationSetup {
            host_key: host.0,
            key: association_key,
            local_id: association_id,
            remote_id: hello.association_id,
            peer_epoch: hello.epoch,
            boot_id: Some(boot_id),
            remote: address,
            hop_key: Some(hop_key),
            router: true,
            initiator: false,
        });
        let welcome = proto::Welcome {
            version: VERSION,
            epoch: shared.local.epoch,
            association_id,
            association_key: association_key.to_vec(),
            hop_key: hop_key.to_vec(),
            sal_port: shared.local.sal_port.into(),
            membership: proofs.membership,
            router: proofs.router,
            unix_s,
            lease_ms: shared.config.lease_ms,
            heartbeat_ms: shared.config.heartbeat_ms,
            traces: true,
            site: shared.area.as_ref().map(|area| area.policy().site.clone()).unwrap_or_default(),
            keys: shared.news.borrow().keys(authority),
        };
        let desk = Desk::new(authority, place.host, hello.traces);
        tracing::info!(host = %place.host, name = member.host_name, %address, software = hello.software, "host registered");
        let (shared, watches, stands_by) = (Arc::clone(shared), Watches::default(), BTreeSet::new());
        let granted = BTreeSet::new();
        let attachment = None;
        let orders = Told::new(hello.orders);
        Ok(Self { shared, host, member, place, seat, welcome, watches, stands_by, granted, desk, attachment, orders })
    }

    /// Answers the host until it is gone; says why it is.
    async fn hold(mut self, reader: Reader, mut writer: Writer) -> (Leave, String) {
        let lease = Duration::from_millis(self.shared.config.lease_ms.into());
        let welcome = answer_of(from_router::Body::Welcome(std::mem::take(&mut self.welcome)));
        if let Err(error) = writer.write(&welcome).await {
            return (Leave::Ended, error.to_string());
        }
        let (sender, mut messages) = tokio::sync::mpsc::channel(64);
        let reading = tokio::spawn(read_all(reader, sender));
        let mut questions = self.shared.lines.lock().open(self.place, self.seat.stream, self.desk.is_answered);
        let (mut stopping, mut changes) = (self.shared.stopping.subscribe(), self.shared.roll.lock().changes());
        let (mut news, mut routers) = (unheard(&self.shared.news), unheard(&self.shared.routers));
        // They may have changed since it was let in.
        let (mut grants, mut leaving) = (unheard(&self.shared.grants), unheard(&self.shared.leaving));
        let (mut silence, sweep_at, mut look_at) = (Silence::new(lease), Instant::now() + lease, Instant::now());
        let mut orders = unheard(&self.shared.orders.live);
        let mut swept = false;
        let gone = loop {
            let answers = tokio::select! {
                // What has come is heard before the lease may end.
                biased;
                () = told(&mut stopping) => {
                    let _ = timeout(lease, writer.write(&refusal(0, No(Code::GoingDown, GOING_DOWN.to_owned())))).await;
                    break (Leave::Ended, "the router goes down".to_owned());
                }
                () = self.seat.end.notified() => {
                    let _ = timeout(lease, writer.write(&refusal(0, RollError::Superseded.into()))).await;
                    break (Leave::Ended, "another stream took over, or the host was put out".to_owned());
                }
                () = self.seat.news.notified() => self.given_away(),
                () = sleep_until(sweep_at), if !swept => {
                    swept = true;
                    self.shared.roll.lock().sweep(self.place, self.seat.stream, &*self.shared.sal);
                    self.attachment.iter().for_each(Attachment::sweep);
                    continue;
                }
                message = messages.recv() => match message {
                    None => break (Leave::Ended, "the stream ended".to_owned()),
                    Some(Err(error)) => {
                        if matches!(error, StreamError::Garbage) {
                            self.note(Act::MessageRefused, &error);
                        }
                        break (Leave::Ended, error.to_string());
                    }
                    Some(Ok(message)) => {
                        silence.broken();
                        self.answer(message).await
                    }
                },
                answer = self.desk.answered() => vec![answer_of(from_router::Body::Traced(answer))],
                Some(question) = questions.recv() => vec![question],
                words = due(self.attachment.as_ref()) => words.into_iter().map(|words| answer_of(words.into())).collect(),
                () = next_change(&mut changes, look_at), if !self.watches.is_empty() => {
                    look_at = Instant::now() + LOOK_PAUSE;
                    self.news()
                }
                _ = grants.changed() => self.review().await,
                _ = routers.changed() => sharing::told(&routers.borrow_and_update()),
                _ = leaving.changed() => vec![answer_of(beat(*leaving.borrow_and_update(), None, 0))],
                _ = news.changed() => news.borrow_and_update().told(self.place.authority),
                _ = orders.changed() => self.orders.tell(&self.shared, self.place),
                () = silence.lasted() => break (Leave::Lapsed, format!("silent for {lease:?}")),
            };
            if let Some(end) = say(&mut writer, &answers, lease).await {
                break end;
            }
        };
        reading.abort();
        self.shared.lines.lock().close(self.place, self.seat.stream);
        gone
    }

    async fn answer(&mut self, message: proto::FromHost) -> Vec<proto::FromRouter> {
        use from_host::Body as Asked;
        use from_router::Body as Answer;
        self.seat.signs.send_modify(|signs| *signs = signs.wrapping_add(1));
        let body = match message.body {
            Some(Asked::Heartbeat(asked)) => {
                let twin = self.seat.twin.lock().take().map(|twin| twin.ip().to_string());
                beat(*self.shared.leaving.borrow(), twin, asked.number)
            }
            Some(Asked::Register(asked)) => {
                let (request, name) = (asked.request, asked.name.clone());
                let prefix = prefix_of(&asked.service_id, asked.bits).ok();
                match self.register(asked).await {
                    Ok(registered) => {
                        prefix.map(|prefix| self.stands_by.remove(&prefix));
                        Answer::Registered(registered)
                    }
                    Err(no) => {
                        self.note_refused(&name, prefix, &no);
                        return vec![refusal(request, no)];
                    }
                }
            }
            Some(Asked::Watch(asked)) => {
                return match self.watch(&asked) {
                    Ok(()) => self.news(),
                    Err(no) => self.refuse(asked.request, no),
                };
            }
            Some(Asked::Withdraw(asked)) => match prefix_of(&asked.service_id, asked.bits) {
                Ok(prefix) => {
                    self.withdraw(&prefix);
                    tracing::info!(host = %self.place.host, %prefix, "withdrawn");
                    Answer::Withdrawn(proto::Withdrawn { request: asked.request })
                }
                Err(no) => return self.refuse(asked.request, no),
            },
            Some(Asked::Resolve(asked)) => match <[u8; 32]>::try_from(asked.service_id) {
                Ok(service) => self.resolve(asked.request, &ServiceId(service)),
                Err(_) => return self.refuse(asked.request, invalid("no serviceID")),
            },
            Some(Asked::RenewMembership(asked)) => return self.membership(asked.request),
            Some(Asked::Trace(asked)) => {
                if !self.desk.take(self.shared.tracer.get(), asked) {
                    self.shared.traces_refused.fetch_add(1, Ordering::Relaxed);
                }
                return Vec::new();
            }
            Some(Asked::Traced(answer)) => {
                self.shared.lines.lock().answered(self.place, answer);
                return Vec::new();
            }
            Some(Asked::Fence(asked)) => return self.fence(&asked),
            Some(Asked::OrderReport(report)) => {
                self.orders.hear(&self.shared, self.place, report);
                return Vec::new();
            }
            Some(Asked::Site(site)) => return self.attach(&site),
            Some(asked @ (Asked::Announce(_) | Asked::Retract(_) | Asked::Declined(_))) => return self.hear(asked),
            Some(Asked::Hello(_)) | None => return self.refuse(0, invalid("the message makes no sense here")),
        };
        vec![answer_of(body)]
    }

    /// What shows the host to be a member, as it is one now.
    fn membership(&self, request: u64) -> Vec<proto::FromRouter> {
        match proofs_of(&self.shared, &self.member) {
            Ok(Proofs { membership: chain, router }) => {
                vec![answer_of(from_router::Body::Membership(proto::Membership { request, chain, router }))]
            }
            Err(no) => self.refuse(request, no),
        }
    }

    fn withdraw(&mut self, prefix: &Prefix) {
        self.granted.remove(prefix);
        self.shared.roll.lock().withdraw(self.place, self.seat.stream, prefix, &*self.shared.sal);
    }

    fn note(&self, act: Act, detail: impl ToString) {
        self.shared.ledger.note(act, self.place.host, detail);
    }

    fn refuse(&self, request: u64, no: No) -> Vec<proto::FromRouter> {
        self.note(Act::MessageRefused, &no.1);
        vec![refusal(request, no)]
    }

    /// What a standby asks for every second is one refusal, until it is accepted.
    fn note_refused(&mut self, name: &str, prefix: Option<Prefix>, no: &No) {
        let No(code, why) = no;
        if let (Code::Exclusive | Code::Partitions, Some(prefix)) = (code, prefix) {
            if self.stands_by.contains(&prefix) {
                return;
            }
            if self.stands_by.len() < PREFIXES_MAX {
                self.stands_by.insert(prefix);
            }
        }
        tracing::warn!(host = %self.place.host, name, why, "registration refused");
        self.note(Act::RegisterRefused, format!("{}: {why}", shown(name)));
    }

    async fn register(&mut self, asked: proto::Register) -> Result<proto::Registered, No> {
        let prefix = prefix_of(&asked.service_id, asked.bits)?;
        let name: Name =
            asked.name.parse().map_err(|error: margay_core::name::NameError| invalid(&error.to_string()))?;
        if asked.weight > WEIGHT_MAX {
            return Err(invalid("the weight is out of range"));
        }
        if asked.fenced && !asked.exclusive {
            return Err(invalid("a name that several hosts may serve cannot be fenced"));
        }
        let partition_bits = u8::try_from(asked.partition_bits).ok().filter(|bits| *bits <= PARTITION_BITS_MAX);
        let partition_bits = partition_bits.ok_or_else(|| invalid("a service has 1024 partitions at most"))?;
        let is_divided = partition_bits > 0;
        if is_divided && !(name.is_service() && prefix.bits == SERVICE_BITS) {
            return Err(invalid("only a whole service has partitions, not a key or a block of services"));
        }
        let unix_s = self.shared.clock.unix_s();
        let is_proved = !asked.proof.is_empty();
        let claim = Claim { name: &name, prefix: &prefix, is_divided, proof: &asked.proof };
        claim.check(&self.member, &self.host, unix_s)?;
        // Before the name is written down for ever.
        self.shared.roll.lock().check_room(self.place, &prefix)?;
        let (store, claimed) = (Arc::clone(&self.shared.store), name.clone());
        let by = Peer::Member(self.place.host);
        blocking(move || store.claim_name(&claimed, by)).await??;
        let proto::Register { weight, priority, exclusive, fenced, sticky, zero_weight, .. } = asked;
        let terms = Terms { weight, priority, partition_bits, exclusive, fenced, sticky, ..Terms::default() };
        let mut fence_number = None;
        if !asked.certificate_only {
            let why = ZeroWeight::read(zero_weight, weight);
            let taken = self.take_down(prefix, &name, terms, why).await?;
            fence_number = taken.fence_number;
            if taken.is_new {
                tracing::info!(host = %self.place.host, %name, weight, priority, "registered");
                self.note(Act::Register, format!("{name}, priority {priority}, weight {weight}"));
            }
            if !is_proved {
                self.granted.insert(prefix);
            }
        }
        let mut registered = proto::Registered {
            request: asked.request,
            certificate: Vec::new(),
            not_after_unix_s: unix_s + issue::LIFETIME_S,
            fence_number: fence_number.unwrap_or(0),
            fence_hold_ms: if asked.fenced { FENCE_HOLD_MS } else { 0 },
        };
        if !is_proved && let Some(authority) = authority_of(&self.shared, self.place.authority)? {
            (registered.certificate, registered.not_after_unix_s) =
                issue::service(&authority, prefix, &self.host, unix_s);
        }
        Ok(registered)
    }

    fn resolve(&self, request: u64, service: &ServiceId) -> from_router::Body {
        let found = self.shared.roll.lock().instances_of(service);
        let truncated = found.len() > INSTANCES_MAX;
        let instances = found.into_iter().take(INSTANCES_MAX).map(proto::Instance::from);
        from_router::Body::Resolved(proto::Resolved { request, instances: instances.collect(), truncated })
    }
}

/// Gives why the host has left, where it cannot be told.
async fn say(writer: &mut Writer, messages: &[proto::FromRouter], lease: Duration) -> Option<(Leave, String)> {
    let all = async {
        for message in messages {
            writer.write(message).await?;
        }
        Ok::<(), StreamError>(())
    };
    match timeout(lease, all).await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some((Leave::Ended, error.to_string())),
        Err(_) => Some((Leave::Lapsed, "the host does not read".to_owned())),
    }
}

/// Runs what waits for the disk.
async fn blocking<R: Send + 'static>(act: impl FnOnce() -> R + Send + 'static) -> Result<R, No> {
    let done = tokio::task::spawn_blocking(act).await;
    done.map_err(|_| No(Code::Store, "the router's store ended badly; its log says why".to_owned()))
}
