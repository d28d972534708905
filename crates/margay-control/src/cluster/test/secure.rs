//! An etcd that wants certificates, and users with passwords.

use std::path::Path;

use etcd_client::{Certificate, ConnectOptions, Identity, Permission, TlsOptions};

use super::*;

/// Who signs, and what is signed: `ca`, and below it `server` and `router`; `other` signs for nobody.
fn make_keys(dir: &Path) {
    let script = "set -e
        new='-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'
        for ca in ca other; do
            openssl req -x509 $new -keyout $ca.key -out $ca.pem -days 2 -subj /CN=$ca
        done
        printf 'subjectAltName=IP:127.0.0.1\\nextendedKeyUsage=serverAuth,clientAuth\\n' > extensions
        for end in server router; do
            openssl req $new -keyout $end.key -out $end.csr -subj /CN=$end
            openssl x509 -req -in $end.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out $end.pem
        done";
    let made = Command::new("sh").args(["-c", script]).current_dir(dir).output().expect("there is a shell");
    assert!(made.status.success(), "openssl: {}", String::from_utf8_lossy(&made.stderr));
}

impl Server {
    /// One that shows a certificate, and hears those alone who show one, too.
    async fn start_with_certificates() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        make_keys(dir.path());
        let mut this = Self { dir, client: nobody(), peer: nobody(), process: None, has_certificates: true };
        this.go("first").await;
        this
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn config(&self) -> ClusterConfig {
        ClusterConfig {
            endpoints: vec![self.url()],
            prefix: "/margay/test".to_owned(),
            user: Some(("margay".to_owned(), Zeroizing::new("secret".to_owned()))),
            ca: Some(self.file("ca.pem")),
            identity: Some((self.file("router.pem"), self.file("router.key"))),
        }
    }

    /// From now on only users get in: `root`, and `margay`, who may read and write below the prefix and nowhere else.
    async fn know_users(&self) {
        let read = |name: &str| std::fs::read(self.file(name)).expect("made");
        let tls = TlsOptions::new()
            .ca_certificate(Certificate::from_pem(read("ca.pem")))
            .identity(Identity::from_pem(read("router.pem"), read("router.key")));
        let options = ConnectOptions::new().with_tls(tls);
        let mut client = Client::connect([self.url()], Some(options)).await.expect("there");
        client.role_add("root").await.expect("added");
        client.role_add("routers").await.expect("added");
        let below = Permission::read_write("/margay/test/").with_prefix();
        client.role_grant_permission("routers", below).await.expect("granted");
        for (user, password, role) in [("root", "toor", "root"), ("margay", "secret", "routers")] {
            client.user_add(user, password, None).await.expect("added");
            client.user_grant_role(user, role).await.expect("granted");
        }
        client.auth_enable().await.expect("enabled");
    }
}

/// Why a router with this configuration does not get in.
async fn refused(config: ClusterConfig) -> String {
    let node = Node::alone().part_with(9, config);
    let mut state = node.cluster().state_changes();
    let waited = timeout(LIMIT, state.wait_for(|state| !state.why.is_empty() || state.is_connected)).await;
    let state = waited.expect("in time").expect("takes part").clone();
    assert!(!state.is_connected, "it got in");
    node.cluster().stop().await;
    state.why
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_wants_certificates_and_passwords_gets_them_and_who_lacks_one_hears_which() {
    let mut server = Server::start_with_certificates().await;
    server.know_users().await;
    let one = Node::alone().part_with(1, server.config()).connected().await;
    let two = Node::alone().part_with(2, server.config()).connected().await;
    one.act(|store| store.add_token(&token(2))).await.expect("agreed");
    two.admit(1, true).await.expect("let in");
    one.cluster().offer(place(1), &[served(1)], &BTreeSet::new());
    two.hears("one has a host", |cluster, _| elsewhere(cluster).contains_key(&place(1))).await;
    one.cluster().claim(&alone(), place(1).host).await.expect("free");
    assert_eq!(two.cluster().claim(&alone(), place(2).host).await, Err(ClaimError::Held(place(1).host)));

    let right = server.config();
    let with = |user: &str, password: &str| ClusterConfig {
        user: Some((user.to_owned(), Zeroizing::new(password.to_owned()))),
        ..right.clone()
    };
    for config in [with("margay", "wrong"), with("nobody", "secret"), ClusterConfig { user: None, ..right.clone() }] {
        let why = refused(config).await;
        assert!(why.contains("refuses") && why.contains("[router.etcd]"), "{why}");
    }
    let outside = refused(ClusterConfig { prefix: "/margay/other".to_owned(), ..right.clone() }).await;
    assert!(outside.contains("grant that user readwrite below the prefix"), "{outside}");
    let stranger = refused(ClusterConfig { ca: Some(server.file("other.pem")), ..right.clone() }).await;
    assert!(stranger.contains("do not accept each other's certificates"), "{stranger}");
    // What is said of a missing one comes when the handshake is over for this end, or not before the connection is
    // closed.
    refused(ClusterConfig { identity: None, ..right.clone() }).await;
    let missing = refused(ClusterConfig { ca: Some(server.file("none.pem")), ..right }).await;
    assert!(missing.contains("none.pem") && missing.contains("[router.etcd]"), "{missing}");

    // It is started again: the password is shown anew.
    server.kill();
    one.await_state(false).await;
    server.go("first").await;
    for node in [&one, &two] {
        node.await_state(true).await;
    }
    two.admit(2, true).await.expect("let in");
    one.cluster().stop().await;
    two.hears("who has gone serves nothing", |cluster, _| elsewhere(cluster).is_empty()).await;
    two.cluster().stop().await;
}
