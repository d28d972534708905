//! A DHT of our own nodes (BitTorrent's Mainline, BEP 5 and 44), for names that certify themselves: records are signed
//! by the service's key. [`dht_record`](super::dht_record) has their form.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::time::Duration;

use mainline::async_dht::AsyncDht;
use mainline::{Dht as Node, MutableItem};
use margay_core::key::{SigningKey, VerifyingKey};
use margay_core::name::{Name, Prefix, ServiceId};
use parking_lot::Mutex;
use tokio_stream::StreamExt;

use super::dht_record::{ServiceRecord, locator, locator_key, read_locator, salt};
use super::writer::{AGAIN, Entry, Write, Writing};
use super::{Answering, Found, Place, Resolve, ResolveError, Wanted};
use crate::Clock;
use crate::keyring::Keyring;

/// A node has so long to answer another; less than a question may take.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(400);
/// After the first record others may be newer, and come so much later.
const NEWER_WAIT: Duration = Duration::from_millis(150);
/// Records of one name that are looked at.
const RECORDS_MAX: usize = 64;
/// Names whose key is remembered.
const KEYS_MAX: usize = 1024;
/// An answer holds no longer than this, whatever its record says: the DHT does not say when it is withdrawn.
const TTL_MAX: Duration = Duration::from_secs(300);

/// How long an answer that is written holds.
const RECORD_TTL: Duration = Duration::from_secs(30);
/// How long a record is good unless it is written again: well over twice the time until then.
const KEPT: Duration = AGAIN.saturating_mul(3);

/// Whether a name can certify itself.
fn has_key(service: &ServiceId) -> bool {
    service.tail().iter().any(|byte| *byte != 0)
}

/// Keys of names, the oldest are forgotten.
#[derive(Default)]
struct Keys {
    by_service: HashMap<ServiceId, VerifyingKey>,
    order: VecDeque<ServiceId>,
}

impl Keys {
    fn insert(&mut self, service: ServiceId, key: VerifyingKey) {
        if self.by_service.insert(service, key).is_none() {
            self.order.push_back(service);
        }
        while self.order.len() > KEYS_MAX {
            if let Some(oldest) = self.order.pop_front() {
                self.by_service.remove(&oldest);
            }
        }
    }
}

/// This host's node of the DHT.
pub struct Dht {
    node: AsyncDht,
    clock: Clock,
    /// Keys that the operator has given.
    given: Vec<VerifyingKey>,
    keys: Mutex<Keys>,
}

impl Dht {
    /// Joins the DHT by these nodes. With a port this host is a node that others may ask; without, it only asks. Names
    /// that one of `given` certifies need no locator.
    ///
    /// # Errors
    ///
    /// The port is taken.
    pub fn join(
        bootstrap: &[SocketAddrV4],
        port: Option<u16>,
        given: Vec<VerifyingKey>,
        clock: Clock,
    ) -> Result<Self, String> {
        let mut builder = Node::builder();
        builder.bootstrap(bootstrap).request_timeout(REQUEST_TIMEOUT);
        if let Some(port) = port {
            builder.server_mode().port(port);
        }
        let node = builder.build().map_err(|error| match port {
            Some(port) => format!("UDP port {port} cannot be opened: {error}"),
            None => format!("no UDP port can be opened: {error}"),
        })?;
        Ok(Self { node: node.as_async(), clock, given, keys: Mutex::default() })
    }

    /// The key that certifies a name.
    async fn key_of(&self, service: &ServiceId) -> Result<VerifyingKey, ResolveError> {
        let given = self.given.iter().find(|key| service.is_certified_by(key)).copied();
        if let Some(key) = given.or_else(|| self.keys.lock().by_service.get(service).copied()) {
            return Ok(key);
        }
        let locator = SigningKey::from_bytes(&locator_key(service)).public();
        let mut records = self.node.get_mutable(&locator.0, None, None).take(RECORDS_MAX);
        while let Some(record) = records.next().await {
            if let Some(key) = read_locator(service, record.value()) {
                self.keys.lock().insert(*service, key);
                return Ok(key);
            }
        }
        Err(ResolveError::Nobody)
    }

    /// The newest record of a name; of those that come soon after the first.
    async fn newest(&self, key: &VerifyingKey, service: &ServiceId) -> Option<MutableItem> {
        let mut records = self.node.get_mutable(&key.0, Some(salt(service)), None).take(RECORDS_MAX);
        let mut newest = records.next().await?;
        let others = async {
            while let Some(other) = records.next().await {
                if other.seq() > newest.seq() {
                    newest = other;
                }
            }
        };
        // All have come, or what has come is good enough.
        let _ = tokio::time::timeout(NEWER_WAIT, others).await;
        Some(newest)
    }

    async fn find(&self, service: &ServiceId) -> Result<Found, ResolveError> {
        if !has_key(service) {
            let text = "the name has no key in it, and so nobody could tell a true record from a false one";
            return Err(ResolveError::Unfit(text.to_owned()));
        }
        let key = self.key_of(service).await?;
        let record = self.newest(&key, service).await.ok_or(ResolveError::Nobody)?;
        let record = ServiceRecord::parse(record.value()).ok_or_else(|| {
            ResolveError::Failed("the service's record makes no sense to this version; update Margay".to_owned())
        })?;
        let left = record.until_s.saturating_sub(self.clock.unix_s());
        if left == 0 || record.places.is_empty() {
            return Err(ResolveError::Nobody);
        }
        let ttl = record.ttl.min(TTL_MAX).min(Duration::from_secs(left));
        let places = record.places.into_iter().filter(|place| place.weight > 0).collect();
        Ok(Found { prefix: Prefix::from(*service), places, ttl })
    }
}

/// Writes names into the DHT whose key is here.
pub struct DhtWriter {
    dht: Arc<Dht>,
    keyring: Keyring,
}

impl DhtWriter {
    /// By this host's node, with the keys of this host.
    pub const fn new(dht: Arc<Dht>, keyring: Keyring) -> Self {
        Self { dht, keyring }
    }

    async fn put(&self, entry: &Entry) -> Result<(), String> {
        let service = entry.name.service_id();
        let found = tokio::task::block_in_place(|| self.keyring.service_key_of(&service));
        let key = found.map_err(|error| error.to_string())?.ok_or_else(|| {
            "the key of the name is not on this host, and nobody else can sign its record (`margay id`)".to_owned()
        })?;
        let now_s = self.dht.clock.unix_s();
        let until_s = now_s + KEPT.as_secs();
        let record = ServiceRecord { ttl: RECORD_TTL, until_s, places: entry.places.clone() };
        let public = key.key.public();
        let known = self.dht.newest(&public, &service).await.map_or(0, |known| known.seq());
        // Later than what is there, whichever clock made that; a number near the end is no time, and leaves room for a
        // few more.
        let number = i64::try_from(now_s).unwrap_or(i64::MAX).max(known.saturating_add(1));
        let signer = mainline::SigningKey::from_bytes(&key.key.to_bytes());
        let item = MutableItem::new(signer, &record.value(), number, Some(salt(&service)));
        self.put_item(item).await?;
        let signer = mainline::SigningKey::from_bytes(&locator_key(&service));
        self.put_item(MutableItem::new(signer, &locator(&public), number, None)).await
    }

    async fn put_item(&self, item: MutableItem) -> Result<(), String> {
        self.dht
            .node
            .put_mutable(item, None)
            .await
            .map(drop)
            .map_err(|error| format!("no node of the DHT takes it: {error}"))
    }
}

impl Write for DhtWriter {
    fn takes(&self, name: &Name) -> bool {
        has_key(&name.service_id())
    }

    fn write<'a>(&'a self, entry: &'a Entry, _: &'a [Place]) -> Writing<'a> {
        Box::pin(self.put(entry))
    }
}

impl Resolve for Arc<Dht> {
    fn kind(&self) -> &'static str {
        "dht"
    }

    fn resolve<'a>(&'a self, wanted: &'a Wanted) -> Answering<'a> {
        Box::pin(self.find(&wanted.service))
    }
}

#[cfg(test)]
mod tests {
    use mainline::Testnet;

    use super::*;
    use crate::StateDir;

    const NOW_S: u64 = 1_700_000_000;

    struct Lab {
        net: Testnet,
        keyring: Keyring,
        _base: tempfile::TempDir,
    }

    fn lab() -> Lab {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("state")).expect("made");
        let net = Testnet::builder(5).build().expect("ports of the loopback");
        Lab { net, keyring: Keyring::open(&dir).expect("made"), _base: base }
    }

    fn node(lab: &Lab, clock: Clock) -> Arc<Dht> {
        let bootstrap: Vec<SocketAddrV4> =
            lab.net.bootstrap.iter().map(|text| text.parse().expect("an address")).collect();
        Arc::new(Dht::join(&bootstrap, None, Vec::new(), clock).expect("a port"))
    }

    fn entry(service: &ServiceId, hosts: &[u8]) -> Entry {
        let place = |n: &u8| Place { address: ([10, 0, 0, *n], 54324).into(), host: None, weight: 1 };
        let name = service.to_string().parse().expect("a name");
        Entry { name, places: hosts.iter().map(place).collect() }
    }

    /// Nodes that are slow to answer are passed over by the writer: one that is asked may have what was there before.
    async fn await_places(reader: &Dht, service: &ServiceId, wanted: &Result<Vec<Place>, ResolveError>) {
        let is_found = async { while reader.find(service).await.map(|found| found.places) != *wanted {} };
        tokio::time::timeout(Duration::from_secs(20), is_found).await.expect("what was written last is found in time");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_the_holder_of_the_key_writes_is_found_and_what_is_withdrawn_is_not() {
        let lab = lab();
        let service = lab.keyring.create_service_key("web.shop").expect("made").service;
        let writer = DhtWriter::new(node(&lab, Clock::from_fn(|| NOW_S)), lab.keyring.clone());
        let reader = node(&lab, Clock::from_fn(|| NOW_S));
        assert_eq!(reader.find(&service).await, Err(ResolveError::Nobody));
        for hosts in [&[1][..], &[2, 3]] {
            writer.put(&entry(&service, hosts)).await.expect("written");
            await_places(&reader, &service, &Ok(entry(&service, hosts).places)).await;
            let found = reader.find(&service).await.expect("found");
            assert_eq!((found.prefix, found.ttl), (service.into(), RECORD_TTL));
        }
        let late = node(&lab, Clock::from_fn(|| NOW_S + KEPT.as_secs()));
        assert_eq!(late.find(&service).await, Err(ResolveError::Nobody), "nobody has written it again");
        writer.put(&entry(&service, &[])).await.expect("written");
        await_places(&reader, &service, &Err(ResolveError::Nobody)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn names_without_a_key_and_locators_of_others_are_refused() {
        let lab = lab();
        let dht = node(&lab, Clock::from_fn(|| NOW_S));
        let plain: margay_core::name::Name = "web.shop".parse().expect("literal");
        assert!(matches!(dht.find(&plain.service_id()).await, Err(ResolveError::Unfit(_))));
        let writer = DhtWriter::new(Arc::clone(&dht), lab.keyring.clone());
        let foreign = writer.put(&entry(&ServiceId([7; 32]), &[1])).await.expect_err("no key");
        assert!(foreign.contains("key of the name is not on this host"), "{foreign}");
        // Somebody says that the name's key is theirs.
        let service = lab.keyring.create_service_key("web.shop").expect("made").service;
        let thief = SigningKey::from_bytes(&[9; 32]);
        let signer = mainline::SigningKey::from_bytes(&locator_key(&service));
        let claim = MutableItem::new(signer, &locator(&thief.public()), 5, None);
        writer.put_item(claim).await.expect("anybody may");
        assert_eq!(dht.find(&service).await, Err(ResolveError::Nobody));
        // Whoever was given the key needs no locator.
        let own = lab.keyring.service_key_of(&service).expect("readable").expect("made").key.public();
        let given = Dht { given: vec![own], node: dht.node.clone(), clock: dht.clock.clone(), keys: Mutex::default() };
        assert_eq!(given.key_of(&service).await, Ok(own));
    }
}
