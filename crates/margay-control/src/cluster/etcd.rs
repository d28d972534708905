//! One member of etcd, and what is asked of it. Every call has an end, and every failure says whose it is and what to
//! do.

use std::future::Future;
use std::time::Duration;

use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, Error, EventType, GetOptions, Identity, PutOptions,
    TlsOptions, Txn, TxnOp, TxnOpResponse, WatchOptions, WatchStream,
};

use margay_core::key::HostId;
use margay_core::name::Prefix;

use super::ClusterConfig;
use super::key::{Key, Keys};
use crate::store::{Change, Dissent, Row, SharedTable};

/// For one answer.
const LIMIT: Duration = Duration::from_secs(2);
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// Pings of the connection itself; etcd ends connections that ping more often than every five seconds.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Keys in one answer, and bytes in it at the most.
const PAGE: i64 = 500;
const MESSAGE_MAX: usize = 128 << 20;
/// What etcd takes in one transaction; its own bounds are 128 and 1.5 MiB.
pub const BATCH_MAX: usize = 100;
pub const BATCH_BYTES_MAX: usize = 512 << 10;

/// Why etcd cannot be used, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// Nobody answers there.
    #[error(
        "etcd at {0} does not answer: {1}; is it running (`etcdctl endpoint health`), and may TCP get there from here?"
    )]
    Unreachable(String, String),
    /// It answers, and one of the two ends does not believe the other's certificate.
    #[error(
        "etcd at {0} and this router do not accept each other's certificates: {1}; correct `ca`, `certificate` and \
         `key` in [router.etcd]"
    )]
    Certificate(String, String),
    /// It answers, and has lost the others.
    #[error(
        "etcd at {0} is there, but most members of etcd are not, so that it decides nothing; start the others again"
    )]
    NoLeader(String),
    /// It knows us, and says no.
    #[error(
        "etcd at {0} refuses: {1}; correct user and password in [router.etcd], or grant that user readwrite below the \
         prefix"
    )]
    Denied(String, String),
    /// Its disk quota is used up.
    #[error("etcd at {0} takes no more: {1}; `etcdctl compact`, `etcdctl defrag`, then `etcdctl alarm disarm`")]
    Full(String, String),
    /// A file of the configuration.
    #[error("{0}; correct [router.etcd]")]
    Configuration(String),
    /// Changes since the last one that was heard are gone: everything is read anew.
    #[error("etcd at {0} keeps no record of what has changed meanwhile; all is read anew")]
    Compacted(String),
    /// Our lease ended: this router was silent for too long.
    #[error("the lease at etcd ({0}) has ended: this host was stopped, or too busy, for that long; it registers anew")]
    LeaseLost(String),
    /// Something else has changed under this router.
    #[error("what lies in etcd at {0} was replaced; all is read anew")]
    Replaced(String),
    /// Something else changes under this router again and again.
    #[error(
        "all that lies in etcd was read anew {1} times in a row, the last time from {0} ({2}); see whether another \
         program writes below `prefix` of [router.etcd], whether etcd's members differ (`etcdctl endpoint status`, \
         `etcdctl endpoint hashkv`), and whether this host is too busy"
    )]
    Unsettled(String, u32, String),
    /// The store of this router.
    #[error("{0}")]
    Store(#[from] crate::store::StoreError),
    /// It says something else.
    #[error("etcd at {0}: {1}")]
    Other(String, String),
}

fn trouble(endpoint: &str, error: Error) -> Trouble {
    let at = endpoint.to_owned();
    let Error::GRpcStatus(status) = &error else {
        return match error {
            Error::TransportError(error) => no_answer(at, causes(&error)),
            Error::IoError(error) => Trouble::Unreachable(at, error.to_string()),
            other => Trouble::Other(at, other.to_string()),
        };
    };
    // Names of etcd's api/v3rpc/rpctypes; their numbers are shared with other errors.
    let text = status.message().to_owned();
    let says = |word: &str| text.contains(word);
    if says("no leader") || says("request timed out") || says("not capable") || says("leader changed") {
        return Trouble::NoLeader(at);
    }
    if says("database space exceeded") {
        return Trouble::Full(at, text);
    }
    let is_denied = ["permission denied", "authentication", "invalid auth token", "user name", "user/password"];
    if is_denied.into_iter().any(says) {
        return Trouble::Denied(at, text);
    }
    match status.code() {
        tonic::Code::PermissionDenied | tonic::Code::Unauthenticated => Trouble::Denied(at, text),
        tonic::Code::Unavailable | tonic::Code::Unknown | tonic::Code::Cancelled => no_answer(at, causes(status)),
        _ => Trouble::Other(at, text),
    }
}

/// As TLS tells of itself: by rustls' own words, or by the name of the other end's alert.
fn no_answer(at: String, why: String) -> Trouble {
    let words = why.to_lowercase();
    let is_about_keys = ["certificate", "unknownca"].into_iter().any(|word| words.contains(word));
    if is_about_keys { Trouble::Certificate(at, why) } else { Trouble::Unreachable(at, why) }
}

/// The innermost cause is what says most: the outer ones are "transport error".
fn causes(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

/// A member that answered.
#[derive(Clone)]
pub struct Etcd {
    client: Client,
    endpoint: String,
    keys: Keys,
}

/// What a watch has brought.
#[derive(Debug, Default)]
pub struct Heard {
    /// Keys, what they hold now, and the revision of that.
    pub events: Vec<(Key, Option<Vec<u8>>, i64)>,
    /// All up to here.
    pub revision: i64,
}

impl Etcd {
    /// Asks a member for the cluster's number; gives it with the revision at which that is so.
    pub async fn connect(config: &ClusterConfig, endpoint: &str) -> Result<(Self, i64, Option<u64>), Trouble> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_LIMIT)
            .with_keep_alive(KEEP_ALIVE, LIMIT)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some((user, password)) = &config.user {
            options = options.with_user(user, password.as_str());
        }
        if endpoint.starts_with("https:") {
            options = options.with_tls(tls(config)?);
        }
        let client = within(endpoint, Client::connect([endpoint], Some(options))).await?;
        let mut this = Self { client, endpoint: endpoint.to_owned(), keys: Keys::new(&config.prefix) };
        let (revision, value) = this.get(&Key::Cluster).await?;
        let number = value.map(|value| {
            let bytes: Result<[u8; 8], _> = value.try_into();
            bytes.map(u64::from_be_bytes).map_err(|_| {
                let what = format!("the key {} is none of Margay's", this.keys.written(&Key::Cluster));
                Trouble::Configuration(what)
            })
        });
        Ok((this, revision, number.transpose()?))
    }

    /// The member.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    async fn get(&mut self, key: &Key) -> Result<(i64, Option<Vec<u8>>), Trouble> {
        let mut answer = within(&self.endpoint, self.client.get(self.keys.written(key), None)).await?;
        let revision = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
        Ok((revision, answer.take_kvs().pop().map(|found| found.into_key_value().1)))
    }

    /// The revision at which everything that follows is read.
    pub async fn revision(&mut self) -> Result<i64, Trouble> {
        Ok(self.get(&Key::Cluster).await?.0)
    }

    /// Writes a key that is not there yet; false: it is.
    pub async fn create(&mut self, key: &Key, value: Vec<u8>) -> Result<bool, Trouble> {
        self.create_all(&[(key.clone(), value)]).await
    }

    /// Writes keys none of which is there yet; false: some are, and nothing was written.
    pub async fn create_all(&mut self, entries: &[(Key, Vec<u8>)]) -> Result<bool, Trouble> {
        let written = |key| self.keys.written(key);
        let absent: Vec<_> =
            entries.iter().map(|(key, _)| Compare::create_revision(written(key), CompareOp::Equal, 0)).collect();
        let puts: Vec<_> = entries.iter().map(|(key, value)| TxnOp::put(written(key), value.clone(), None)).collect();
        let txn = Txn::new().when(absent).and_then(puts);
        Ok(within(&self.endpoint, self.client.txn(txn)).await?.succeeded())
    }

    /// Writes and removes keys, those with a value under a lease, where one is given.
    pub async fn put_all(&mut self, entries: &[(Key, Option<Vec<u8>>)], lease: Option<i64>) -> Result<(), Trouble> {
        let operation = |(key, value): &(Key, Option<Vec<u8>>)| match value {
            Some(value) => {
                let options = lease.map(|lease| PutOptions::new().with_lease(lease));
                TxnOp::put(self.keys.written(key), value.clone(), options)
            }
            None => TxnOp::delete(self.keys.written(key), None),
        };
        let txn = Txn::new().and_then(entries.iter().map(operation).collect::<Vec<_>>());
        within(&self.endpoint, self.client.txn(txn)).await.map(drop)
    }

    /// Everything below a prefix (which ends with `/`) as it was at a revision.
    pub async fn read_all(&mut self, prefix: &str, revision: i64) -> Result<Vec<(Key, Vec<u8>)>, Trouble> {
        let end = format!("{}0", prefix.trim_end_matches('/'));
        let (mut from, mut all) = (prefix.as_bytes().to_vec(), Vec::new());
        let mut reader = self.client.kv_client().max_decoding_message_size(MESSAGE_MAX);
        loop {
            let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE).with_revision(revision);
            let mut page = within(&self.endpoint, reader.get(from, Some(options))).await?;
            let is_last = !page.more();
            let found = page.take_kvs();
            from = found.last().map(|last| [last.key(), &[0]].concat()).unwrap_or_default();
            let read = found.into_iter().map(etcd_client::KeyValue::into_key_value);
            all.extend(read.filter_map(|(key, value)| Some((self.keys.read(&key)?, value))));
            if is_last {
                return Ok(all);
            }
        }
    }

    /// A lease of so many seconds.
    pub async fn lease(&mut self, seconds: i64) -> Result<i64, Trouble> {
        Ok(within(&self.endpoint, self.client.lease_grant(seconds, None)).await?.id())
    }

    /// Ends a lease and what lies under it.
    pub async fn end_lease(&mut self, lease: i64) -> Result<(), Trouble> {
        within(&self.endpoint, self.client.lease_revoke(lease)).await.map(drop)
    }

    /// Gives a lease its time anew.
    pub async fn renew(&mut self, lease: i64) -> Result<(), Trouble> {
        match within(&self.endpoint, self.client.lease_keep_alive(lease)).await {
            Err(Trouble::Other(at, why)) if why.contains("lease not found") => Err(Trouble::LeaseLost(at)),
            other => other.map(drop),
        }
    }

    /// Hears of all changes after a revision, and of those of that revision again: older etcd (its issue 18089) loses
    /// removals of the very revision up to which it drops its record, and this way that is always one that was heard.
    pub async fn watch(&mut self, after: i64) -> Result<WatchStream, Trouble> {
        let options = WatchOptions::new().with_prefix().with_start_revision(after);
        let mut watcher = self.client.watch_client().max_decoding_message_size(MESSAGE_MAX);
        within(&self.endpoint, watcher.watch(self.keys.all(), Some(options))).await
    }

    /// The next changes.
    pub async fn heard(&self, watch: &mut WatchStream) -> Result<Heard, Trouble> {
        let at = || self.endpoint.clone();
        let next = watch.message().await.map_err(|error| trouble(&self.endpoint, error))?;
        let response = next.ok_or_else(|| Trouble::Unreachable(at(), "the watch ended".to_owned()))?;
        if response.compact_revision() > 0 {
            return Err(Trouble::Compacted(at()));
        }
        if response.canceled() {
            return Err(match response.cancel_reason() {
                reason if reason.contains("no leader") => Trouble::NoLeader(at()),
                reason => Trouble::Other(at(), format!("the watch was cancelled: {reason}")),
            });
        }
        let mut heard = Heard::default();
        for event in response.events() {
            let Some(found) = event.kv() else { continue };
            heard.revision = heard.revision.max(found.mod_revision());
            if let Some(key) = self.keys.read(found.key()) {
                let is_put = event.event_type() == EventType::Put;
                heard.events.push((key, is_put.then(|| found.value().to_vec()), found.mod_revision()));
            }
        }
        Ok(heard)
    }

    /// Changes rows, if all are still what the changes replace.
    pub async fn agree(&mut self, changes: &[Change]) -> Result<i64, Dissent> {
        let key = |change: &Change| self.keys.written(&Key::Row(change.table, change.key.clone()));
        let same = |change: &Change| match &change.before {
            Some(value) => Compare::value(key(change), CompareOp::Equal, value.clone()),
            None => Compare::create_revision(key(change), CompareOp::Equal, 0),
        };
        let then = |change: &Change| match &change.after {
            Some(value) => TxnOp::put(key(change), value.clone(), None),
            None => TxnOp::delete(key(change), None),
        };
        let txn = Txn::new()
            .when(changes.iter().map(same).collect::<Vec<_>>())
            .and_then(changes.iter().map(then).collect::<Vec<_>>())
            .or_else(changes.iter().map(|change| TxnOp::get(key(change), None)).collect::<Vec<_>>());
        let away = |error: Trouble| Dissent::Away(error.to_string());
        let answer = within(&self.endpoint, self.client.txn(txn)).await.map_err(away)?;
        if answer.succeeded() {
            return Ok(answer.header().map_or(0, etcd_client::ResponseHeader::revision));
        }
        let rows = changes.iter().zip(answer.op_responses()).map(|(change, found)| {
            let TxnOpResponse::Get(found) = found else { return (change.table, change.key.clone(), None) };
            (change.table, change.key.clone(), found.kvs().first().map(|found| found.value().to_vec()))
        });
        Err(Dissent::Outdated(rows.collect()))
    }

    /// Gives a name to a host, unless a router has given it to another one; `Err`: to this one.
    pub async fn claim(
        &mut self,
        (prefix, host): (&Prefix, HostId),
        router: HostId,
        lease: i64,
    ) -> Result<Result<i64, HostId>, Trouble> {
        let all = self.keys.claims_of(prefix);
        let put = || {
            let options = Some(PutOptions::new().with_lease(lease));
            vec![TxnOp::put(self.keys.written(&Key::Claim(*prefix, router)), host.0, options)]
        };
        let is_free = Compare::create_revision(all.clone(), CompareOp::Equal, 0).with_prefix();
        let is_its_own = Compare::value(all.clone(), CompareOp::Equal, host.0).with_prefix();
        let look = vec![TxnOp::get(all, Some(GetOptions::new().with_prefix()))];
        let again = Txn::new().when([is_its_own]).and_then(put()).or_else(look);
        let txn = Txn::new().when([is_free]).and_then(put()).or_else([TxnOp::txn(again)]);
        let answer = within(&self.endpoint, self.client.txn(txn)).await?;
        let revision = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
        let holders = answer.op_responses().into_iter().find_map(|response| match response {
            TxnOpResponse::Txn(again) if !again.succeeded() => again.op_responses().pop(),
            _ => None,
        });
        let Some(TxnOpResponse::Get(found)) = holders else { return Ok(Ok(revision)) };
        let other = found.kvs().iter().find(|found| found.value() != host.0);
        let holder = other.and_then(|found| found.value().try_into().ok()).map(HostId);
        holder.map(Err).ok_or_else(|| Trouble::Other(self.endpoint.clone(), format!("nobody's claim of {prefix}")))
    }

    /// Takes a router's word about a name back, if it is still the one of that revision.
    pub async fn release(&mut self, prefix: &Prefix, router: HostId, revision: i64) -> Result<(), Trouble> {
        let key = self.keys.written(&Key::Claim(*prefix, router));
        let is_same = Compare::mod_revision(key.clone(), CompareOp::Equal, revision);
        let txn = Txn::new().when([is_same]).and_then([TxnOp::delete(key, None)]);
        within(&self.endpoint, self.client.txn(txn)).await.map(drop)
    }

    /// What rows hold now.
    pub async fn ask(&mut self, keys: &[(SharedTable, Vec<u8>)]) -> Result<Vec<Row>, Trouble> {
        let mut rows = Vec::new();
        for (table, key) in keys {
            let (_, value) = self.get(&Key::Row(*table, key.clone())).await?;
            rows.push((*table, key.clone(), value));
        }
        Ok(rows)
    }
}

fn tls(config: &ClusterConfig) -> Result<TlsOptions, Trouble> {
    let read = |path: &std::path::Path| {
        std::fs::read(path).map_err(|error| Trouble::Configuration(format!("{}: {error}", path.display())))
    };
    let mut options = TlsOptions::new();
    if let Some(ca) = &config.ca {
        options = options.ca_certificate(Certificate::from_pem(read(ca)?));
    }
    if let Some((certificate, key)) = &config.identity {
        options = options.identity(Identity::from_pem(read(certificate)?, read(key)?));
    }
    Ok(options)
}

async fn within<T>(endpoint: &str, call: impl Future<Output = Result<T, Error>>) -> Result<T, Trouble> {
    match tokio::time::timeout(LIMIT, call).await {
        Ok(done) => done.map_err(|error| trouble(endpoint, error)),
        Err(_) => Err(Trouble::Unreachable(endpoint.to_owned(), format!("no answer in {LIMIT:?}"))),
    }
}
