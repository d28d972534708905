//! What happens to the flows of a program's user, as one line of JSON each.
//!
//! Whose a flow is, the kernel's tables of sockets say, and they are long. So one thread looks that up, once for each
//! event and all who are told, once for several events where many come, and for no more than a part of its time:
//! however many subscriptions a user has, and however many connections it makes, the threads of the runtime have
//! other things to do.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{fs, thread};

use margay_core::name::ServiceId;
use margay_core::{Event, Tuple};
use margay_wire::{FlowId, SessionId};
use nix::errno::Errno;
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::broadcast::{Receiver, Sender, channel};

use super::rights::Caller;
use crate::agent::watch::{End, Ends};
use crate::agent::{Agent, Connections};

/// Flows of one user that are remembered until they close; of more, the end is not told.
const FLOWS_MAX: usize = 65_536;
/// Subscriptions of one user but root.
const SUBSCRIPTIONS_OF_USER_MAX: usize = 16;
/// Lines that a slow subscription may be behind.
const BEHIND_MAX: usize = 1024;
/// Events that one look at the kernel's tables is for.
const BATCH_MAX: usize = 1024;
/// After a look at the tables the thread rests for so many times what it took.
const REST: u32 = 4;
const TCP: u8 = 6;

/// Whose flows; `None`: all.
type Whose = Option<u32>;

/// Who is told.
#[derive(Clone, Default)]
pub struct Feed(Arc<Mutex<Told>>);

#[derive(Default)]
struct Told {
    by_user: HashMap<Whose, Sender<Arc<str>>>,
    is_running: bool,
}

/// Why somebody is not told.
#[derive(Debug, thiserror::Error)]
pub enum SubscribeError {
    /// The agent goes down.
    #[error("the agent goes down; ask again when it has started")]
    Down,
    /// Its user has too many.
    #[error(
        "this user has {SUBSCRIPTIONS_OF_USER_MAX} connections that are told of events, and may have no more; close \
         some"
    )]
    Full,
    /// The operating system refused a thread.
    #[error("no thread can be started that looks up whose flows are whose: {0}; raise the limit of tasks, or end some")]
    Thread(#[from] std::io::Error),
}

impl SubscribeError {
    /// The number that programs know it by.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Down => Errno::ESHUTDOWN,
            Self::Full => Errno::EUSERS,
            Self::Thread(_) => Errno::EAGAIN,
        }
    }
}

/// Somebody who is told.
pub struct Subscription(Receiver<Arc<str>>);

impl Subscription {
    /// From now on.
    ///
    /// # Errors
    ///
    /// There are too many of this user, or the agent goes down.
    pub fn new(agent: &Arc<Agent>, caller: &Caller) -> Result<Self, SubscribeError> {
        let uid = (!caller.uid.is_root()).then(|| caller.uid.as_raw());
        let feed = &agent.connections.programs.events;
        let mut told = feed.0.lock();
        let receiver = told.subscribe(uid)?;
        if !told.is_running {
            let events = agent.process.watchers.subscribe().ok_or(SubscribeError::Down)?;
            let (feed, agent) = (feed.clone(), Arc::downgrade(agent));
            thread::Builder::new().name("program-events".to_owned()).spawn(move || run(&agent, &feed, events))?;
            told.is_running = true;
        }
        Ok(Self(receiver))
    }

    /// The next line; `None` when the agent goes down.
    pub async fn next(&mut self) -> Option<Arc<str>> {
        match self.0.recv().await {
            Ok(line) => Some(line),
            Err(RecvError::Lagged(count)) => Some(missed(count)),
            Err(RecvError::Closed) => None,
        }
    }
}

fn missed(count: u64) -> Arc<str> {
    json!({"kind": "missed", "count": count}).to_string().into()
}

impl Told {
    fn subscribe(&mut self, whose: Whose) -> Result<Receiver<Arc<str>>, SubscribeError> {
        self.forget_gone();
        let sender = self.by_user.entry(whose).or_insert_with(|| channel(BEHIND_MAX).0);
        if whose.is_some() && sender.receiver_count() >= SUBSCRIPTIONS_OF_USER_MAX {
            return Err(SubscribeError::Full);
        }
        Ok(sender.subscribe())
    }

    fn forget_gone(&mut self) {
        self.by_user.retain(|_, sender| sender.receiver_count() > 0);
    }

    /// To the users among `owners`, and to whoever is told of all.
    fn say(&self, owners: &[u32], line: &Arc<str>) {
        let whose = owners.iter().map(|uid| Some(*uid)).chain([None]);
        for sender in whose.filter_map(|whose| self.by_user.get(&whose)) {
            // Nobody listens any more: nothing is lost.
            let _ = sender.send(Arc::clone(line));
        }
    }

    /// The users who are told and have a socket, by what `has` says of each.
    fn owners(&self, has: impl Fn(u32) -> bool) -> Vec<u32> {
        self.by_user.keys().flatten().copied().filter(|uid| has(*uid)).collect()
    }

    fn is_any_user(&self) -> bool {
        self.by_user.keys().any(Option::is_some)
    }
}

/// Tells until nobody is told any more, or the agent goes down.
fn run(agent: &Weak<Agent>, feed: &Feed, mut events: Receiver<Event>) {
    let mut teller = Teller::default();
    loop {
        let mut batch = Vec::new();
        let mut lost = 0;
        match events.blocking_recv() {
            Ok(event) => batch.push(event),
            Err(RecvError::Lagged(count)) => lost += count,
            Err(RecvError::Closed) => break,
        }
        while batch.len() < BATCH_MAX {
            match events.try_recv() {
                Ok(event) => batch.push(event),
                Err(TryRecvError::Lagged(count)) => lost += count,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        let Some(agent) = agent.upgrade() else { break };
        if lost > 0 {
            let told = feed.0.lock();
            told.by_user.values().for_each(|sender| drop(sender.send(missed(lost))));
            drop(told);
            teller.ends.missed(&agent);
        }
        let mut tables = Tables::default();
        batch.into_iter().for_each(|event| teller.tell(&agent, feed, &mut tables, event));
        drop(agent);
        let mut told = feed.0.lock();
        told.forget_gone();
        if told.by_user.is_empty() {
            told.is_running = false;
            return;
        }
        drop(told);
        if !tables.took.is_zero() {
            thread::sleep(tables.took * REST);
        }
    }
    // Whoever waits is woken: its channel has ended.
    *feed.0.lock() = Told::default();
}

/// Which flows are known to be whose, until they close.
#[derive(Default)]
struct Teller {
    owners: HashMap<FlowId, Vec<u32>>,
    /// How many are of a user.
    counts: HashMap<u32, usize>,
    ends: Ends,
}

impl Teller {
    fn tell(&mut self, agent: &Agent, feed: &Feed, tables: &mut Tables, event: Event) {
        match event {
            Event::FlowOpened(id) => {
                // One that is gone again already will be told of by its end.
                let Some(flow) = agent.core.0.with_sal(|sal, _| sal.flow(id)) else { return };
                let owners = owners_of(&agent.connections, feed, tables, &flow.app);
                let line = line(agent, "opened", &flow.service, Some(flow.session), "");
                let owners = self.remember(id, owners);
                feed.0.lock().say(owners, &line);
            }
            event @ (Event::FlowEnded { .. } | Event::FlowClosed { .. }) => {
                let Some(End { flow, reason, .. }) = self.ends.end(agent, event) else { return };
                let owners = self.forget(flow.flow);
                let line = line(agent, "closed", &flow.service, Some(flow.session), reason.label());
                feed.0.lock().say(&owners, &line);
            }
            Event::ConnectFailed { service, app, why } => {
                let owners = owners_of(&agent.connections, feed, tables, &app);
                let line = line(agent, "failed", &service, None, &why);
                feed.0.lock().say(&owners, &line);
            }
            Event::FlowChanged(_)
            | Event::StackChanged { .. }
            | Event::Reconfigured { .. }
            | Event::Ordered { .. }
            | Event::AssociationUp(_)
            | Event::PeerRebooted(_)
            | Event::Twin(_)
            | Event::Moved { .. }
            | Event::Whereabouts(_)
            | Event::Flapping(_)
            | Event::Silent(_)
            | Event::GivenUp { .. }
            | Event::Unanswered(_)
            | Event::OtherHost { .. }
            | Event::RouterFound { .. }
            | Event::HandOver(_)
            | Event::SpliceOver { .. }
            | Event::Keep { .. }
            | Event::RuleExpired { .. } => {}
        }
    }

    /// Those of the owners who can be told of the flow's end, too.
    fn remember(&mut self, id: FlowId, mut owners: Vec<u32>) -> &[u32] {
        owners.retain(|uid| {
            let count = self.counts.entry(*uid).or_default();
            let has_room = *count < FLOWS_MAX;
            *count += usize::from(has_room);
            has_room
        });
        if owners.is_empty() {
            return &[];
        }
        self.owners.entry(id).insert_entry(owners).into_mut()
    }

    fn forget(&mut self, id: FlowId) -> Vec<u32> {
        let owners = self.owners.remove(&id).unwrap_or_default();
        for uid in &owners {
            if let Some(count) = self.counts.get_mut(uid) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(uid);
                }
            }
        }
        owners
    }
}

/// Whose the socket of a flow is, as far as its user is told.
fn owners_of(connections: &Connections, feed: &Feed, tables: &mut Tables, app: &Tuple) -> Vec<u32> {
    // A socket that is closed is nobody's in the kernel's tables; a client that has a name is known all the same.
    if let Some(owner) = connections.programs.sources.user_of(app) {
        return feed.0.lock().owners(|uid| uid == owner.as_raw());
    }
    if !feed.0.lock().is_any_user() {
        return Vec::new();
    }
    let owners = tables.owners(app.protocol, app.source);
    feed.0.lock().owners(|uid| owners.contains(&uid))
}

/// Users by what their sockets are bound to. The port alone would not do: whoever binds it at another address would be
/// told of the flows of others.
type Owners = HashMap<SocketAddr, BTreeSet<u32>>;

/// The kernel's tables of sockets, read at most once each.
#[derive(Default)]
struct Tables {
    tcp: Option<Owners>,
    udp: Option<Owners>,
    /// How long that took.
    took: Duration,
}

impl Tables {
    fn owners(&mut self, protocol: u8, local: SocketAddr) -> BTreeSet<u32> {
        let (known, names) = match protocol {
            TCP => (&mut self.tcp, ["tcp", "tcp6"]),
            _ => (&mut self.udp, ["udp", "udp6"]),
        };
        let owners = known.get_or_insert_with(|| {
            let begun = Instant::now();
            let mut owners = Owners::new();
            for name in names {
                let table = fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default();
                add_owners(&mut owners, &table);
            }
            self.took += begun.elapsed();
            owners
        });
        owners_in(owners, local)
    }
}

/// Of sockets at this address, or where there is none, at every address.
fn owners_in(owners: &Owners, local: SocketAddr) -> BTreeSet<u32> {
    let any = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
    let at = |ip| owners.get(&SocketAddr::new(ip, local.port())).into_iter().flatten().copied();
    let exact: BTreeSet<u32> = at(local.ip()).collect();
    if exact.is_empty() { any.into_iter().flat_map(at).collect() } else { exact }
}

fn line(agent: &Agent, kind: &str, service: &ServiceId, session: Option<SessionId>, why: &str) -> Arc<str> {
    let registered = agent.host.store.name_of(&(*service).into()).ok().flatten();
    let name = registered.or_else(|| agent.names.leases.written(service)).unwrap_or_default();
    let session = session.map(|session| session.to_string()).unwrap_or_default();
    json!({"kind": kind, "name": name, "service": service.to_string(), "session": session, "why": why})
        .to_string()
        .into()
}

/// Adds the sockets of one of the kernel's tables.
fn add_owners(owners: &mut Owners, table: &str) {
    for line in table.lines().skip(1) {
        let mut columns = line.split_ascii_whitespace();
        let local = columns.nth(1).and_then(address);
        let owner = columns.nth(5).and_then(|owner| owner.parse().ok());
        if let (Some(local), Some(owner)) = (local, owner) {
            owners.entry(local).or_default().insert(owner);
        }
    }
}

/// An address as the tables have it: words of 32 bits, each in the order of this machine.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.rsplit_once(':')?;
    let word = |at: usize| u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match ip.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let mut bytes = [0; 16];
            for (at, into) in bytes.chunks_exact_mut(4).enumerate() {
                into.copy_from_slice(&word(at)?);
            }
            IpAddr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_socket_is_its_users() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout \
                     inode\n 12: 0100007F:1F90 00000000:0000 01 00000000:00000000 00:00000000 00000000  1000        0 \
                     4711 2 0\n bad";
        let mut owners = Owners::new();
        add_owners(&mut owners, table);
        add_owners(&mut owners, "");
        assert_eq!(owners, Owners::from([("127.0.0.1:8080".parse().expect("literal"), BTreeSet::from([1000]))]));
        let v6 = "head\n 0: 0000000000000000FFFF00000100007F:1F90 0:0 01 0:0 00:00000000 00000000 7 0 1 2 0\n \
                  1: 00000000000000000000000001000000:1F90 0:0 01 0:0 00:00000000 00000000 8 0 1 2 0";
        add_owners(&mut owners, v6);
        assert_eq!(owners_in(&owners, "127.0.0.1:8080".parse().expect("literal")), BTreeSet::from([7, 1000]));
        assert_eq!(owners_in(&owners, "[::1]:8080".parse().expect("literal")), BTreeSet::from([8]));
    }

    #[test]
    fn who_binds_the_port_at_another_address_is_not_told_of_its_flows() {
        let mut owners = Owners::new();
        let at = |text: &str| -> SocketAddr { text.parse().expect("literal") };
        for (local, uid) in [("198.18.0.1:4000", 1000), ("127.0.0.1:4000", 66), ("0.0.0.0:53", 1000), ("[::]:54", 7)] {
            owners.entry(at(local)).or_default().insert(uid);
        }
        assert_eq!(owners_in(&owners, at("198.18.0.1:4000")), BTreeSet::from([1000]));
        assert_eq!(owners_in(&owners, at("198.18.0.1:53")), BTreeSet::from([1000]), "bound to every address");
        assert_eq!(owners_in(&owners, at("198.18.0.1:54")), BTreeSet::from([7]), "of both families");
        assert_eq!(owners_in(&owners, at("198.18.0.1:55")), BTreeSet::new());
    }

    /// However many are told and whatever comes, the kernel's tables are read once for a batch of events.
    #[test]
    fn the_tables_are_read_once_for_many_questions() {
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let mut tables = Tables::default();
        let before = (0..1000_u16).map(|port| tables.owners(TCP, local(port)).len()).sum::<usize>();
        let took = tables.took;
        assert!(!took.is_zero() && tables.udp.is_none());
        assert_eq!((0..1000_u16).map(|port| tables.owners(TCP, local(port)).len()).sum::<usize>(), before);
        assert_eq!(tables.took, took);
    }

    #[test]
    fn a_user_has_so_many_subscriptions_and_is_told_of_its_own() {
        let mut told = Told::default();
        let mut own: Vec<_> = (0..SUBSCRIPTIONS_OF_USER_MAX).map(|_| told.subscribe(Some(7)).expect("room")).collect();
        assert!(matches!(told.subscribe(Some(7)), Err(SubscribeError::Full)));
        let (mut other, mut root) =
            (told.subscribe(Some(8)).expect("room"), told.subscribe(None).expect("root may always"));
        assert_eq!(told.owners(|uid| uid != 9), told.owners(|_| true));
        told.say(&[7, 9], &"line".into());
        assert!(own.iter_mut().all(|one| one.try_recv().is_ok()));
        assert!(root.try_recv().is_ok() && other.try_recv().is_err());
        own.clear();
        assert!(told.subscribe(Some(7)).is_ok(), "its earlier ones are gone");
        told.forget_gone();
        assert_eq!(told.owners(|_| true), [8], "and so is that one");
    }

    #[test]
    fn a_flows_end_is_told_to_whom_its_beginning_was() {
        let mut teller = Teller::default();
        assert_eq!(teller.remember(FlowId(1), vec![7, 8]), [7, 8]);
        teller.counts.insert(8, FLOWS_MAX);
        assert_eq!(teller.remember(FlowId(2), vec![7, 8]), [7], "the other has too many");
        assert_eq!((teller.forget(FlowId(1)), teller.forget(FlowId(1))), (vec![7, 8], vec![]));
        assert_eq!((teller.forget(FlowId(2)), teller.counts.get(&7)), (vec![7], None));
    }
}
