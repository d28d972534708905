//! The agent's side of the DNS responder: starts its process where there is none, answers what it asks, and keeps the
//! way to it.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream as StdStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use margay_control::dns::{Answers, Directory, DnsError, ResponderCounters, bind, channel};
use margay_control::lease::Leases;
use nix::unistd::dup;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};

use crate::config::{Config, RangesSection};
use crate::host;
use crate::host::change::State;
use crate::host::netlink::Netlink;
use crate::host::responder_way::{Namespace, ResponderWay};
use crate::responder::{self, Sockets, Words};

/// A responder that has just been started, or is being started again, says what it is within this time, also on a host
/// that is busy.
const GREETING_LIMIT: Duration = Duration::from_secs(10);
/// It ends, when it is told to, within this time.
const END_LIMIT: Duration = Duration::from_secs(2);
/// After a failure, so that a lasting one does not take the processor.
const PAUSE: Duration = Duration::from_millis(50);

/// The responder, as its agent sees it.
pub struct Dns {
    /// Where it answers.
    pub way: ResponderWay,
    counters: watch::Receiver<ResponderCounters>,
    namespace: Arc<Mutex<Option<Arc<Namespace>>>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Dns {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its sockets, or its zone.
    #[error(transparent)]
    Dns(#[from] DnsError),
    /// Its process.
    #[error("the DNS responder cannot be started: {0}")]
    Process(#[from] io::Error),
    /// The way to it.
    #[error("the DNS responder cannot be reached: {0}")]
    Way(#[from] host::HostError),
}

/// Starts it, or goes on with the one that runs.
///
/// # Errors
///
/// The host refuses.
pub async fn start(config: &Config, leases: Arc<Leases>, directory: Arc<dyn Directory>) -> Result<Dns, StartError> {
    let way = ResponderWay::of(config);
    let answers = Answers::new(&config.dns.zone, way.address().ip(), leases, directory)?;
    let RangesSection { ipv4, ipv6 } = config.ranges;
    let words = Words { zone: config.dns.zone.clone(), address: way.address(), ipv4, ipv6, worker: false };
    let mut process = Process { words, way: way.clone(), path: responder::path(&config.host.runtime_dir), held: None };
    let (stream, is_new) = process.reach().await?;
    let held = process.namespace()?;
    make_way(config, held.clone(), is_new).await?;
    let namespace = Arc::new(Mutex::new(held));
    let (count, counters) = watch::channel(ResponderCounters::default());
    let uses = tokio::spawn(Arc::clone(&answers).keep_uses());
    let follower = Follower { process, answers, count };
    let following = tokio::spawn(follower.follow(stream));
    Ok(Dns { way, counters, namespace, tasks: vec![uses, following] })
}

impl Dns {
    /// What it did so far.
    pub fn counters(&self) -> ResponderCounters {
        *self.counters.borrow()
    }

    /// Where its sockets are, if not in this host's own.
    pub fn namespace(&self) -> Option<Arc<Namespace>> {
        self.namespace.lock().clone()
    }
}

/// Makes what leads to a responder; what led to one before, whose namespace is gone, goes first.
async fn make_way(config: &Config, namespace: Option<Arc<Namespace>>, is_new: bool) -> Result<(), StartError> {
    if is_new {
        host::remove_responder_way().await?;
    }
    let net = Netlink::connect()?.with_namespace(namespace);
    for change in host::agents_own(config).await? {
        if change.state(&net).await.is_ok_and(|state| state == State::Present) {
            continue;
        }
        match change.apply(&net).await {
            Err(error) if !change.is_optional() => {
                return Err(host::HostError::Refused { error, advice: String::new() }.into());
            }
            Err(error) => tracing::warn!(%error, "the agent goes on without"),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// The responder's process, or what it takes to start one.
struct Process {
    words: Words,
    way: ResponderWay,
    path: PathBuf,
    held: Option<Sockets>,
}

impl Process {
    /// A stream to a responder; and whether its sockets are new ones.
    async fn reach(&mut self) -> Result<(UnixStream, bool), StartError> {
        let (path, words) = (self.path.clone(), self.words.clone());
        let found = spawn_blocking(move || take_up(&path, &words)).await.map_err(io::Error::other)?;
        match found {
            Ok((stream, sockets)) if self.suits(&sockets) => {
                self.held = Some(sockets);
                if let Some(stream) = stream {
                    return Ok((UnixStream::from_std(stream)?, false));
                }
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "no DNS responder runs"),
        }
        let is_new = self.held.is_none();
        let sockets = match self.held.take() {
            Some(sockets) => sockets,
            None => open(&self.way).await?,
        };
        let started = self.start_process(&sockets);
        self.held = Some(sockets);
        let path = started?;
        let (stream, _) = spawn_blocking(move || connect(&path)).await.map_err(io::Error::other)??;
        stream.set_nonblocking(true)?;
        Ok((UnixStream::from_std(stream)?, is_new))
    }

    /// Whether sockets are where they are wanted.
    fn suits(&self, sockets: &Sockets) -> bool {
        let local = || {
            let udp = std::net::UdpSocket::from(sockets.udp.try_clone().ok()?);
            udp.local_addr().ok()
        };
        match &self.way {
            ResponderWay::Apart { .. } => sockets.namespace.is_some(),
            ResponderWay::OnHost { listen, .. } => sockets.namespace.is_none() && local() == Some(*listen),
        }
    }

    fn start_process(&self, sockets: &Sockets) -> io::Result<PathBuf> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let control = UnixListener::bind(&self.path)?;
        fs::set_permissions(&self.path, fs::Permissions::from_mode(0o600))?;
        let mut child = responder::start(&self.words, control.as_fd(), sockets)?;
        // Somebody has to take its end note.
        std::thread::Builder::new().name("margay-dns".to_owned()).spawn(move || child.wait())?;
        Ok(self.path.clone())
    }

    fn namespace(&self) -> io::Result<Option<Arc<Namespace>>> {
        let Some(namespace) = self.held.as_ref().and_then(|held| held.namespace.as_ref()) else { return Ok(None) };
        Ok(Some(Arc::new(dup(namespace)?.into())))
    }
}

fn connect(path: &Path) -> io::Result<(StdStream, Greeting)> {
    let stream = StdStream::connect(path)?;
    stream.set_read_timeout(Some(GREETING_LIMIT))?;
    let greeting = responder::greet(&stream)?;
    Ok((stream, greeting))
}

type Greeting = ([u8; responder::IDENTITY_LEN], Sockets);

/// What a responder that runs holds, and a stream to it; one that is made of something else is ended.
fn take_up(path: &Path, words: &Words) -> io::Result<(Option<StdStream>, Sockets)> {
    let (stream, (identity, sockets)) = connect(path)?;
    if identity == words.identity()? {
        stream.set_nonblocking(true)?;
        return Ok((Some(stream), sockets));
    }
    end_over(stream)?;
    Ok((None, sockets))
}

/// Ends a responder, and waits until it is gone.
fn end_over(mut stream: StdStream) -> io::Result<()> {
    use std::io::{Read, Write};
    stream.set_read_timeout(Some(END_LIMIT))?;
    stream.write_all(&channel::end())?;
    let mut rest = [0; 4096];
    while stream.read(&mut rest)? > 0 {}
    Ok(())
}

/// Ends the responder that runs, if one does.
///
/// # Errors
///
/// It does not end.
pub fn end(runtime_dir: &Path) -> io::Result<()> {
    let path = responder::path(runtime_dir);
    match connect(&path) {
        Ok((stream, _)) => end_over(stream)?,
        // Nobody is there.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {}
        Err(error) => return Err(error),
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Opens what programs will ask.
async fn open(way: &ResponderWay) -> Result<Sockets, StartError> {
    let pair = |(udp, tcp): (tokio::net::UdpSocket, tokio::net::TcpListener)| -> io::Result<_> {
        Ok((udp.into_std()?.into(), tcp.into_std()?.into()))
    };
    match way {
        ResponderWay::OnHost { listen, .. } => {
            let (udp, tcp) = pair(bind(*listen).await?)?;
            Ok(Sockets { udp, tcp, namespace: None })
        }
        ResponderWay::Apart { .. } => {
            let port = way.address().port();
            let opened = spawn_blocking(move || -> io::Result<Sockets> {
                let namespace = Namespace::new()?;
                // All addresses there are the responder's.
                let any = (std::net::Ipv4Addr::UNSPECIFIED, port);
                let (udp, tcp) = namespace
                    .enter(|| Ok((std::net::UdpSocket::bind(any)?.into(), std::net::TcpListener::bind(any)?.into())))?;
                Ok(Sockets { udp, tcp, namespace: Some(namespace) })
            });
            Ok(opened.await.map_err(io::Error::other)??)
        }
    }
}

/// Answers one responder after the other.
struct Follower {
    process: Process,
    answers: Arc<Answers>,
    count: watch::Sender<ResponderCounters>,
}

impl Follower {
    async fn follow(mut self, mut stream: UnixStream) {
        loop {
            let served = channel::serve(stream, &self.answers, &self.count).await;
            tracing::warn!(?served, "the DNS responder has ended; another one takes its place");
            stream = loop {
                match timeout(GREETING_LIMIT * 2, self.process.reach()).await {
                    Ok(Ok((stream, _))) => break stream,
                    Ok(Err(error)) => tracing::warn!(%error, "the DNS responder is not there"),
                    Err(_) => tracing::warn!("the DNS responder does not answer"),
                }
                sleep(PAUSE).await;
            };
        }
    }
}
