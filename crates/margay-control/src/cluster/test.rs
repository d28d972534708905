//! Against a real etcd, a process of its own for each test.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use etcd_client::{Client, CompactionOptions};
use margay_core::key::HostPublic;
use margay_core::name::{Name, Prefix, authority_block};
use tokio::net::TcpSocket;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::*;
use crate::StateDir;
use crate::registration::Instance;
use crate::store::{AdmitError, MemberKey, StoreError, Token};
use crate::token::TokenHash;

mod secure;

const LIMIT: Duration = Duration::from_secs(20);
/// What etcd says when it answers.
const READY: &str = "ready to serve client requests";
const NOW_S: u64 = 1_700_000_000;

/// One member of etcd, which is all of it.
struct Server {
    dir: tempfile::TempDir,
    /// Its ports. Nobody else gets them before it listens there, nor while it is away: routers would follow another
    /// test's etcd.
    client: TcpSocket,
    peer: TcpSocket,
    process: Option<Child>,
    /// It shows one, and wants to see one.
    has_certificates: bool,
}

impl Server {
    async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut this = Self { dir, client: nobody(), peer: nobody(), process: None, has_certificates: false };
        this.go("first").await;
        this
    }

    fn url(&self) -> String {
        let scheme = if self.has_certificates { "https" } else { "http" };
        format!("{scheme}://{}", self.client.local_addr().expect("bound"))
    }

    /// Starts it with the data of this name: the same again, or none yet.
    async fn go(&mut self, data: &str) {
        let (url, peer) = (self.url(), format!("http://{}", self.peer.local_addr().expect("bound")));
        let certificates: &[&str] = match self.has_certificates {
            true => {
                &["--client-cert-auth", "--trusted-ca-file=ca.pem", "--cert-file=server.pem", "--key-file=server.key"]
            }
            false => &[],
        };
        let process = Command::new("etcd")
            .current_dir(self.dir.path())
            .args(certificates)
            .args(["--name", "one", "--unsafe-no-fsync", "--data-dir"])
            .arg(self.dir.path().join(data))
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("one={peer}")])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut process = process.expect("etcd is installed; scripts/setup does it");
        let mut said = BufReader::new(process.stderr.take().expect("piped")).lines();
        self.process = Some(process);
        let (sender, ready) = oneshot::channel();
        std::thread::spawn(move || {
            let is_ready = |line: &std::io::Result<String>| line.as_ref().is_ok_and(|line| line.contains(READY));
            let _ = sender.send(said.any(|line| is_ready(&line)));
            // It ends when it cannot say what it has to say.
            said.for_each(drop);
        });
        assert_eq!(timeout(LIMIT, ready).await.expect("in time"), Ok(true), "etcd has ended");
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().expect("killed");
            process.wait().expect("gone");
        }
    }

    async fn client(&self) -> Client {
        Client::connect([self.url()], None).await.expect("there")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A router: its store, and its part in the cluster.
struct Node {
    base: tempfile::TempDir,
    store: Arc<Store>,
    cluster: Option<Arc<Cluster>>,
    /// Nobody listens there, and nobody else gets the port meanwhile.
    nobody: TcpSocket,
}

/// Has a port, and does not listen there. A process that is told the port may.
fn nobody() -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_reuseaddr(true).expect("set");
    socket.bind(([127, 0, 0, 1], 0).into()).expect("a port");
    socket
}

impl Node {
    fn alone() -> Self {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        Self { store: Arc::new(Store::open(&dir).expect("opened")), base, cluster: None, nobody: nobody() }
    }

    /// Its next start.
    async fn again(self) -> Self {
        let Self { base, store, cluster, .. } = self;
        if let Some(cluster) = cluster {
            cluster.stop().await;
        }
        drop(store);
        let dir = StateDir::open(base.path().join("s")).expect("there");
        Self { store: Arc::new(Store::open(&dir).expect("opened")), base, cluster: None, nobody: nobody() }
    }

    fn part(self, seed: u8, server: &Server) -> Self {
        let config = ClusterConfig {
            // Nobody is at the first: the second is found.
            endpoints: vec![format!("http://{}", self.nobody.local_addr().expect("bound")), server.url()],
            prefix: "/margay/test".to_owned(),
            user: None,
            ca: None,
            identity: None,
        };
        self.part_with(seed, config)
    }

    fn part_with(mut self, seed: u8, config: ClusterConfig) -> Self {
        let router = RouterEntry {
            key: HostPublic([seed; 32]),
            address: format!("10.0.0.{seed}:54324"),
            name: format!("r{seed}"),
            is_leaving: false,
        };
        let clock = Clock::from_fn(|| NOW_S);
        let cluster = Cluster::start(config, router, Arc::clone(&self.store), clock);
        cluster.announce();
        self.cluster = Some(cluster);
        self
    }

    fn elsewhere(&self) -> BTreeMap<Place, ByRouter> {
        elsewhere(self.cluster())
    }

    fn cluster(&self) -> &Cluster {
        self.cluster.as_ref().expect("takes part")
    }

    async fn connected(self) -> Self {
        self.await_state(true).await;
        self
    }

    async fn await_state(&self, is_connected: bool) {
        let mut state = self.cluster().state_changes();
        let awaited = timeout(LIMIT, state.wait_for(|state| state.is_connected == is_connected)).await;
        assert!(awaited.is_ok(), "not {is_connected}: {:?}", self.cluster().state());
    }

    /// Waits until so much has been heard of the others that something is so.
    async fn hears(&self, what: &str, is_so: impl Fn(&Cluster, &Store) -> bool) {
        let (mut changes, mut rows) = (self.cluster().changes(), self.cluster().row_changes());
        let waited = timeout(LIMIT, async {
            while !is_so(self.cluster(), &self.store) {
                let more = tokio::select! {
                    more = changes.changed() => more,
                    more = rows.changed() => more,
                };
                more.expect("takes part");
            }
        });
        assert!(waited.await.is_ok(), "in {LIMIT:?} it is not heard that {what}");
    }

    /// What the store does waits for the network.
    async fn act<T: Send + 'static>(&self, act: impl FnOnce(&Store) -> T + Send + 'static) -> T {
        let store = Arc::clone(&self.store);
        tokio::task::spawn_blocking(move || act(&store)).await.expect("done")
    }

    async fn admit(&self, n: u8, with_token: bool) -> Result<(), AdmitError> {
        let token = with_token.then_some(TokenHash([1; 32]));
        self.act(move |store| store.admit(&host(n), "h", token, NOW_S).map(drop)).await
    }
}

/// What hosts have registered with other routers.
fn elsewhere(cluster: &Cluster) -> BTreeMap<Place, ByRouter> {
    let view = cluster.shared.view.lock();
    let all = view.places().map(|place| (*place, cluster.elsewhere(&view, place)));
    all.filter(|(_, by_router)| !by_router.is_empty()).collect()
}

fn host(n: u8) -> MemberKey {
    MemberKey { host: HostPublic([n; 32]), authority: authority_block("shop") }
}

fn token(uses_left: u32) -> Token {
    Token {
        hash: TokenHash([1; 32]),
        authority: "shop".to_owned(),
        grants: vec![Prefix::of_authority("shop")],
        groups: Vec::new(),
        uses_left,
        created_s: NOW_S,
        expires_s: NOW_S + 60,
    }
}

fn place(n: u8) -> Place {
    Place { host: HostPublic([n; 32]).id(), authority: authority_block("shop") }
}

fn served(n: u8) -> Served {
    let name: Name = "web.shop".parse().expect("a name");
    let instance = Instance {
        host: place(n).host,
        host_name: format!("h{n}"),
        address: "10.0.1.1:54324".parse().expect("literal"),
        name: name.to_string(),
        prefix: name.prefix(),
        weight: 1,
        priority: 1,
        sticky: false,
        fence: None,
        zero_weight: None,
    };
    Served { instance, partition_bits: 0, exclusive: false }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_share_members_and_registrations_and_a_router_that_goes_takes_its_own_with_it() {
    let server = Server::start().await;
    // It was a router by itself before.
    let one = Node::alone();
    one.act(|store| store.add_token(&token(2))).await.expect("kept");
    one.admit(1, true).await.expect("let in");
    let one = one.part(1, &server).connected().await;
    let two = Node::alone().part(2, &server).connected().await;
    two.admit(1, false).await.expect("a member before there was a cluster");
    two.admit(2, true).await.expect("the second use");
    assert!(matches!(one.admit(3, true).await, Err(AdmitError::UsedUp)));
    one.admit(2, false).await.expect("a member by the other router");

    one.cluster().offer(place(1), &[served(1)], &BTreeSet::new());
    two.hears("one has a host", |cluster, _| elsewhere(cluster).contains_key(&place(1))).await;
    let known = two.elsewhere();
    assert_eq!(known[&place(1)].values().collect::<Vec<_>>(), [&[Arc::new(served(1))]]);
    assert!(one.elsewhere().is_empty(), "its own is not elsewhere");
    one.hears("there is a second router", |cluster, _| cluster.routers().len() == 2).await;
    two.hears("there is a first router", |cluster, _| cluster.routers().len() == 2).await;
    assert_eq!(two.cluster().routers()[0].name, "r2", "itself first");
    two.cluster().set_leaving(true);
    one.hears("the second router is drained", |cluster, _| cluster.routers()[1].is_leaving).await;
    two.cluster().set_leaving(false);
    one.hears("it is drained no more", |cluster, _| !cluster.routers()[1].is_leaving).await;

    two.act(|store| store.remove_member(host(1).host.id(), NOW_S)).await.expect("agreed");
    one.hears("a member is gone", |_, store| store.member(&host(1)).expect("readable").is_none()).await;
    assert_eq!(one.store.revocations(NOW_S).expect("readable").len(), 1);

    one.cluster().stop().await;
    two.hears("who has gone serves nothing", |cluster, _| elsewhere(cluster).is_empty()).await;
    two.cluster().stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_is_taken_out_is_spoken_of_no_more_until_it_takes_part_again() {
    let mut server = Server::start().await;
    let [one, two] = [1, 2].map(|seed| Node::alone().part(seed, &server));
    let (one, two) = (one.connected().await, two.connected().await);
    one.hears("there is a second router", |cluster, _| cluster.routers().len() == 2).await;
    let gone = two.cluster().router().id();
    let two = two.again().await;
    // It has ended, and may come back: that alone changes nothing.
    assert_eq!(one.cluster().routers().len(), 2);
    one.cluster().remove(gone).await.expect("etcd answers");
    one.hears("there is one router", |cluster, _| cluster.routers().len() == 1).await;
    let two = two.part(2, &server).connected().await;
    one.hears("it is back", |cluster, _| cluster.routers().len() == 2).await;
    server.kill();
    one.await_state(false).await;
    assert!(one.cluster().remove(gone).await.is_err(), "nobody can be asked");
    for node in [&one, &two] {
        node.cluster().stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_etcd_is_away_members_go_on_and_what_changed_meanwhile_is_found_even_if_its_record_is_gone() {
    let mut server = Server::start().await;
    let one = Node::alone().part(1, &server).connected().await;
    let two = Node::alone().part(2, &server).connected().await;
    one.act(|store| store.add_token(&token(9))).await.expect("agreed");
    for n in 1..=3 {
        one.admit(n, true).await.expect("let in");
    }
    one.cluster().offer(place(1), &[served(1)], &BTreeSet::new());
    one.cluster().offer(place(2), &[served(2)], &BTreeSet::new());
    two.hears("there are two registrations and three members", |cluster, store| {
        elsewhere(cluster).len() == 2 && store.members().expect("readable").len() == 3
    })
    .await;

    server.kill();
    for node in [&one, &two] {
        node.await_state(false).await;
    }
    two.admit(1, false).await.expect("known");
    let error = two.admit(7, true).await.expect_err("nobody new");
    assert!(matches!(&error, AdmitError::Store(StoreError::Away(why)) if why.contains("does not answer")), "{error}");
    assert_eq!(two.elsewhere().len(), 2, "it goes on with what it knows");
    // What is registered and withdrawn meanwhile.
    one.cluster().offer(place(1), &[], &BTreeSet::new());
    one.cluster().offer(place(3), &[served(3)], &BTreeSet::new());

    // Somebody else's hand, and all record of it is gone before the routers find etcd again.
    let port = std::mem::replace(&mut server.client, nobody());
    server.go("first").await;
    let mut client = server.client().await;
    let member = key::Keys::new("/margay/test").written(&key::Key::Row(
        crate::store::SharedTable::Members,
        [&host(3).host.0[..], &host(3).authority].concat(),
    ));
    client.delete(member, None).await.expect("deleted");
    let revision = client.get("x", None).await.expect("there").header().expect("a header").revision();
    client.compact(revision, Some(CompactionOptions::new())).await.expect("compacted");
    server.kill();
    server.client = port;
    server.go("first").await;
    for node in [&one, &two] {
        node.await_state(true).await;
    }
    let mut wanted = [place(2), place(3)];
    wanted.sort();
    two.hears("the two agree again", |cluster, store| {
        let known: Vec<Place> = elsewhere(cluster).into_keys().collect();
        known == wanted && store.member(&host(3)).expect("readable").is_none()
    })
    .await;
    // What it wrote, the other heard, perhaps before it heard itself that the record of changes is gone.
    one.hears("a member is gone", |_, store| store.member(&host(3)).expect("readable").is_none()).await;
    for node in [&one, &two] {
        assert!(node.cluster().counts().contains(&("reread", 1)), "{:?}", node.cluster().counts());
        node.cluster().stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_lost_everything_gets_it_back_from_the_routers() {
    let mut server = Server::start().await;
    let one = Node::alone().part(1, &server).connected().await;
    one.act(|store| store.add_token(&token(9))).await.expect("agreed");
    one.admit(1, true).await.expect("let in");
    one.cluster().offer(place(1), &[served(1)], &BTreeSet::new());
    server.kill();
    one.await_state(false).await;
    server.go("second").await;
    one.await_state(true).await;
    let two = Node::alone().part(2, &server).connected().await;
    two.admit(1, false).await.expect("still a member");
    two.admit(2, true).await.expect("the token is still there");
    two.hears("registrations, too", |cluster, _| elsewhere(cluster).contains_key(&place(1))).await;
    one.cluster().stop().await;
    two.cluster().stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_starts_without_etcd_knows_what_it_knew() {
    let mut server = Server::start().await;
    let one = Node::alone().part(1, &server).connected().await;
    let two = Node::alone().part(2, &server).connected().await;
    one.act(|store| store.add_token(&token(9))).await.expect("agreed");
    one.admit(1, true).await.expect("let in");
    one.cluster().offer(place(1), &[served(1)], &BTreeSet::new());
    one.cluster().offer(place(2), &[served(2)], &BTreeSet::new());
    two.hears("both are there", |cluster, _| elsewhere(cluster).len() == 2).await;
    one.cluster().offer(place(2), &[], &BTreeSet::new());
    two.hears("one has ended", |cluster, _| elsewhere(cluster).len() == 1).await;
    // With the end of the connection everything is on the disk, however late it came.
    server.kill();
    two.await_state(false).await;
    let (_, kept) = two.store.kept_view().expect("readable");
    assert_eq!(kept.iter().filter(|(key, _)| key.contains("/hosts/")).count(), 1);
    let two = two.again().await.part(2, &server);
    assert!(!two.cluster().state().is_connected && two.cluster().is_informed());
    let routers: Vec<String> = two.cluster().routers().into_iter().map(|router| router.name).collect();
    assert_eq!(routers, ["r2", "r1"]);
    assert_eq!(two.elsewhere().into_keys().collect::<Vec<_>>(), [place(1)]);
    two.admit(1, false).await.expect("still a member");
    one.cluster().stop().await;
    two.cluster().stop().await;
}

fn alone() -> Prefix {
    "alone.shop".parse::<Name>().expect("a name").prefix()
}

/// The holder as it is known to both, once both have heard it.
async fn await_holder(nodes: [&Node; 2], holder: Option<u8>) {
    let holder = holder.map(|n| place(n).host);
    for node in nodes {
        let heard = timeout(LIMIT, async {
            while node.cluster().shared.view.lock().holder(&claimed_as(&alone())) != holder {
                tokio::task::yield_now().await;
            }
        });
        assert!(heard.await.is_ok(), "not heard that the holder is {holder:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_for_one_host_is_given_once_however_many_routers_are_asked_at_the_same_moment() {
    let server = Server::start().await;
    let one = Node::alone().part(1, &server).connected().await;
    let two = Node::alone().part(2, &server).connected().await;
    let (own, name) = (|n| place(n).host, alone());
    for _ in 0..20 {
        let asked = tokio::join!(one.cluster().claim(&name, own(1)), two.cluster().claim(&name, own(2)));
        let holder = match asked {
            (Ok(()), Err(ClaimError::Held(holder))) if holder == own(1) => 1,
            (Err(ClaimError::Held(holder)), Ok(())) if holder == own(2) => 2,
            both => panic!("{both:?}"),
        };
        // It registers with every router, as hosts do.
        for node in [&one, &two] {
            node.cluster().claim(&name, own(holder)).await.expect("its own");
        }
        await_holder([&one, &two], Some(holder)).await;
        one.cluster().release(&name, own(holder));
        assert_eq!(one.cluster().claim(&name, own(9)).await, Err(ClaimError::Held(own(holder))), "it has it by two");
        two.cluster().release(&name, own(holder));
        await_holder([&one, &two], None).await;
    }
    // What goes with a router stays with the host that has it by another one, too.
    for node in [&one, &two] {
        node.cluster().claim(&name, own(1)).await.expect("free");
    }
    one.cluster().stop().await;
    assert_eq!(two.cluster().claim(&name, own(2)).await, Err(ClaimError::Held(own(1))));
    two.cluster().stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_etcd_is_away_who_has_a_name_for_itself_keeps_it_and_nobody_else_gets_one() {
    let mut server = Server::start().await;
    let one = Node::alone().part(1, &server).connected().await;
    let two = Node::alone().part(2, &server).connected().await;
    let (own, name, other) = (|n| place(n).host, alone(), "other.shop".parse().expect("a name"));
    let mut held = served(1);
    (held.instance.prefix, held.exclusive) = (name, true);
    one.cluster().claim(&name, own(1)).await.expect("free");
    one.cluster().offer(place(1), &[held.clone()], &BTreeSet::new());
    await_holder([&one, &two], Some(1)).await;
    let number = one.cluster().fence_number(&name, own(1));
    assert!(number > Some(FENCES_OF_CLUSTER) && one.cluster().fence_number(&name, own(2)).is_none(), "{number:?}");
    server.kill();
    for node in [&one, &two] {
        node.await_state(false).await;
        node.cluster().claim(&name, own(1)).await.expect("its own, as both have heard");
        for (name, host) in [(&name, 2), (&other, 1)] {
            let error = node.cluster().claim(name, own(host)).await.expect_err("nobody can be asked");
            assert!(matches!(&error, ClaimError::Away(why) if why.contains("does not answer")), "{error}");
            assert_eq!(node.cluster().check_own_claim(name, own(host)), Err(error));
        }
    }
    // Two, which has given it while etcd was away, says so as soon as it can.
    server.go("first").await;
    for node in [&one, &two] {
        node.await_state(true).await;
    }
    one.cluster().offer(place(1), &[], &BTreeSet::new());
    let written = |router: &Node| {
        key::Keys::new("/margay/test").written(&key::Key::Claim(claimed_as(&name), router.cluster().router().id()))
    };
    let mut client = server.client().await;
    let gone =
        timeout(LIMIT, async { while !client.get(written(&one), None).await.expect("there").kvs().is_empty() {} });
    gone.await.expect("one has given it no more");
    assert_eq!(one.cluster().claim(&name, own(2)).await, Err(ClaimError::Held(own(1))), "two has");
    // Somebody else's hand gives it to another host.
    let (first, second) = (key::Key::Claim(claimed_as(&name), HostPublic([3; 32]).id()), own(2).0);
    let given = [
        etcd_client::TxnOp::delete(written(&two), None),
        etcd_client::TxnOp::put(key::Keys::new("/margay/test").written(&first), second, None),
    ];
    client.txn(etcd_client::Txn::new().and_then(given)).await.expect("written");
    two.hears("its host has lost it", |cluster, _| cluster.take_news().0.lost.contains(&(claimed_as(&name), own(1))))
        .await;
    await_holder([&one, &two], Some(2)).await;
    one.cluster().stop().await;
    two.cluster().stop().await;
}
