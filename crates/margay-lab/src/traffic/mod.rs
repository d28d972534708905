//! Small traffic programs that no package has: started by scenarios as hidden commands, on a host.

mod arrivals;
mod asking;
mod attempt;
mod cached;
mod connects;
mod datagrams;
mod dns;
mod download;
mod echo;
mod fabricator;
mod fetches;
mod flows;
mod forger;
pub mod frames;
mod hijack;
mod hostile;
mod idle;
mod intruder;
mod liar;
mod memcached;
mod mutated;
mod numbered;
mod odd;
mod own_frames;
mod paced;
mod pingpong;
mod policy_evader;
mod pooled;
mod pour;
mod reader;
pub mod registrants;
mod request;
mod route_rate;
mod sessions;
mod snatch;
mod stranger;
mod strike;
mod ticket_thief;
mod transfer;
mod upgrading;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Subcommand;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

pub use arrivals::{Arrival, now_ms};
pub use asking::{Answering, Heard};
pub use attempt::Outcome;
pub use cached::{Cached, Slow};
pub use connects::Connects;
pub use datagrams::{Blasted, Slice};
pub use download::Download;
pub use fetches::Fetched;
pub use forger::read_frames;
pub use idle::Idle;
pub use intruder::Tally;
pub use liar::liars_id;
pub use memcached::{SLOT, Slot, Taken};
pub use numbered::{Came, Sent};
pub use own_frames::Framed;
pub use paced::Paced;
pub use pingpong::RoundTrips;
pub use policy_evader::Evaded;
pub use pooled::{Pooled, Turn};
pub use pour::Poured;
pub use route_rate::{OUTSIDE, OWN, RouteRate, hop};
pub use sessions::Talked;
pub use strike::FLOW_PORTS;
pub use transfer::{AT_ONCE, MORE, STOP, Way, Word, now_us};
pub use upgrading::Step;

/// Which program.
#[derive(Debug, Subcommand)]
pub enum Traffic {
    /// TCP and UDP echo server
    Echo {
        /// Where to listen; may be given more than once
        #[arg(long, required = true)]
        listen: Vec<SocketAddr>,
        /// Send this text to each new connection, before anything else
        #[arg(long)]
        greeting: Option<String>,
        /// How many connections may wait to be taken
        #[arg(long, default_value_t = echo::BACKLOG)]
        backlog: i32,
        /// Wait so long after the first connection is taken
        #[arg(long, default_value_t = 0)]
        accept_after_ms: u64,
        /// Wait so long before each further one
        #[arg(long, default_value_t = 0)]
        accept_every_ms: u64,
    },
    /// Open many TCP connections to an echo server, hold them, and send on each now and then
    Flows {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// How many
        #[arg(long)]
        count: usize,
    },
    /// Open many TCP connections to a server that greets with its name, and hold them without a word; say when one is
    /// open, and when and why it has ended
    Idle {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// How many
        #[arg(long)]
        count: usize,
    },
    /// Ask an `asking-server` for its name on connected UDP sockets until the input ends; say when another one answers
    Asking {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// How many sockets
        #[arg(long)]
        count: usize,
        /// Time between two datagrams of a socket
        #[arg(long)]
        every_ms: u64,
        /// Send what is not answered
        #[arg(long)]
        silent: bool,
    },
    /// The server for it; says which sockets it has heard that want no answers
    AskingServer {
        /// Where to listen
        #[arg(long)]
        listen: SocketAddr,
        /// What to answer
        #[arg(long)]
        name: String,
    },
    /// Talk on many TCP connections to an `upgrading-server` until the input ends, and check every answer
    Sessions(sessions::Plan),
    /// Keep connections as client libraries do until the input ends: ask on each now and then, and open those again
    /// that the server closes; say what became of each
    Pooled(pooled::Plan),
    /// The server for it; on SIGTERM it gives its sockets to the process that takes them over, and its connections to
    /// another host where the agent asks for that
    UpgradingServer(upgrading::Plan),
    /// Measure round trips of one byte on one TCP connection to an echo server
    Pingpong {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// How many
        #[arg(long)]
        count: usize,
        /// Use UDP
        #[arg(long)]
        udp: bool,
    },
    /// Measure how long connect() takes, and how many connections there are per second
    Connects {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// How many
        #[arg(long)]
        count: usize,
        /// How many at once
        #[arg(long, default_value_t = 1)]
        parallel: usize,
    },
    /// Send datagrams as fast as they go, from one unconnected socket
    Blast {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// Payload of each
        #[arg(long, default_value_t = 1024)]
        bytes: usize,
        /// For how long
        #[arg(long)]
        time_ms: u64,
    },
    /// Measure how many first packets a second are forwarded, in a namespace that is made for it
    RouteRate(route_rate::Plan),
    /// Count datagrams
    Sink {
        /// Where to listen
        #[arg(long)]
        listen: SocketAddr,
    },
    /// Send numbered datagrams at an even rate on one connected socket, until the input ends
    Numbered(numbered::Plan),
    /// Say what has come of them
    NumberedSink {
        /// Where to listen
        #[arg(long)]
        listen: SocketAddr,
    },
    /// Send datagrams as fast as they go on one connected socket, until the input ends
    Pour(pour::Plan),
    /// Say how many bytes of them have come
    PourSink {
        /// Where to listen
        #[arg(long)]
        listen: SocketAddr,
    },
    /// Send frames of several datagrams each, so many a second, until the input ends
    Frames(frames::Plan),
    /// Say which of them have come whole and in time
    FrameSink {
        /// Where to listen
        #[arg(long)]
        listen: SocketAddr,
        /// A frame that is not whole so long after it was sent is of no use
        #[arg(long, default_value_t = frames::IN_TIME_MS)]
        in_time_ms: u32,
    },
    /// Many downloads at once from a web server, each hashed
    Download(download::Plan),
    /// Transfers in either direction to a `transfer-server`, every byte checked; answers each line of input with how
    /// far they are. Eight begin at once, and the next eight with the line `more`
    Transfer {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// One transfer: up or down, and the sender's congestion control (`up:bbr`); may be given more than once
        #[arg(long = "way", required = true)]
        ways: Vec<Way>,
        /// Number of the first of them, at the server
        #[arg(long, default_value_t = 0)]
        first: usize,
        /// Bytes per second of each; 0: as fast as it goes
        #[arg(long, default_value_t = 0)]
        pace: u64,
        /// Bytes of each; 0: until a line of input says `stop`
        #[arg(long, default_value_t = 0)]
        bytes: u64,
        /// Use MPTCP
        #[arg(long)]
        mptcp: bool,
    },
    /// The server for it
    TransferServer {
        /// Where to listen
        #[arg(long)]
        listen: SocketAddr,
        /// Use MPTCP
        #[arg(long)]
        mptcp: bool,
    },
    /// Begin a connection every so often, to a server that greets with its name; say what became of each
    Arrivals {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// Time between two
        #[arg(long)]
        every_ms: u64,
        /// What to say first, to a server that says nothing by itself; `\\r\\n` ends a line
        #[arg(long)]
        ask: Option<String>,
        /// How many at once: the next one waits for the end of another
        #[arg(long, default_value_t = 4096)]
        at_most: u32,
    },
    /// Fetch a file from a web server again and again, over new connections, until the input ends; say what became of
    /// each
    Fetches {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// File on the server, without the first slash
        path: String,
        /// How many fetch at once
        #[arg(long)]
        clients: usize,
    },
    /// Name server that gives one address for every name that exists
    Dns {
        /// Where to listen
        #[arg(long)]
        listen: SocketAddr,
        /// The address
        #[arg(long)]
        answer: Ipv4Addr,
        /// No name exists but under this label at the end
        #[arg(long)]
        under: Option<String>,
    },
    /// Connect, exchange some bytes with an echo server, close; again and again
    Attempt {
        /// Each of them
        #[command(flatten)]
        plan: attempt::Plan,
        /// How often
        #[arg(long)]
        count: usize,
        /// How many at once
        #[arg(long, default_value_t = 1)]
        parallel: usize,
    },
    /// Send SETs to memcached by UDP, so many at once, and print how many were answered
    MemcachedSets {
        /// Address and port of each partition, in order
        #[arg(long, required = true)]
        to: Vec<SocketAddr>,
        /// Requests at once
        #[arg(long)]
        window: usize,
        /// Length of a value
        #[arg(long, default_value_t = 1024)]
        bytes: usize,
    },
    /// Ask a memcached or Redis by many connections until the input ends, and check each answer
    CacheChecked(cached::Plan),
    /// Ask a memcached by many connections at a steady rate, and print how long answers take
    MemcachedPaced(paced::Plan),
    /// Send frames to a name until the input ends, and check each answer
    FramesAsk {
        /// Of the service, or of the ensemble
        name: String,
    },
    /// Serve a name with frames, and answer each
    FramesServe {
        /// Of the service, or of the ensemble's members
        name: String,
        /// What the server is called
        label: String,
    },
    /// Send mutated datagrams of framed connections to the switch of a name
    FramedMutations {
        /// The name
        name: String,
        /// How many
        #[arg(long)]
        count: usize,
    },
    /// Print how many SETs a memcached of this host has taken
    MemcachedTaken {
        /// Its port
        #[arg(long)]
        port: u16,
        /// Time between two lines
        #[arg(long)]
        every_ms: u64,
    },
    /// Send urgent data between other data to an echo server
    Urgent {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// How often
        #[arg(long)]
        count: usize,
    },
    /// Close connections in the same moment as the server does
    Closing {
        /// Server's name or address
        host: String,
        /// Server's port
        port: u16,
        /// How many
        #[arg(long)]
        count: usize,
    },
    /// The server for it
    ClosingServer {
        /// Where to listen
        #[arg(long)]
        listen: SocketAddr,
    },
    /// Trouble hosts: garbage and forgeries made from a capture, or well-formed SYNs for a service
    Hostile {
        /// Host whose SAL port gets it; may be given more than once
        #[arg(long, required = true)]
        target: Vec<Ipv4Addr>,
        /// Host whose address is forged; may be given more than once
        #[arg(long, required = true)]
        honest: Vec<Ipv4Addr>,
        /// Other senders' addresses: the 65,536 from here on
        #[arg(long)]
        strangers: Ipv4Addr,
        /// Datagrams
        #[arg(long)]
        count: u64,
        /// Datagrams per second
        #[arg(long)]
        rate: u64,
        /// Real traffic (pcap) to mutate and replay
        #[arg(long, required_unless_present = "service")]
        capture: Option<PathBuf>,
        /// Send SYNs for this service instead
        #[arg(long, conflicts_with = "capture")]
        service: Option<String>,
        /// Port of the service
        #[arg(long, default_value_t = 7)]
        port: u16,
        /// Let the SYNs fetch connections that nobody hands over
        #[arg(long, requires = "service")]
        fetching: bool,
    },
    /// Forge TCP segments of others' connections
    Strike(strike::Plan),
    /// Be a host that has no part in a hand-over, and try to take others' sessions: by messages with right tags, or by
    /// bringing connections that nobody has given
    #[command(subcommand)]
    Snatch(snatch::Plan),
    /// Be hosts that nobody knows: ask for what is others', or answer for it
    Strange(stranger::Plan),
    /// Be unauthenticated hosts with changed agents, and try to bypass the middlebox that a name requires
    Evade(policy_evader::Plan),
    /// Register with a router without a right to it, in every way; print what was granted
    Intrude(Box<intruder::Plan>),
    /// Register as many hosts with a router, let their services come and go, and note when watchers hear of it
    Crowd(Box<registrants::Plan>),
    /// Read what grants say, on the client's host, and ask for connections by them in its name
    Reader {
        /// For how long
        #[arg(long)]
        time_ms: u64,
    },
    /// Try to take over what others have: forgeries of every type of message, and real ones again, as they were or
    /// changed
    Hijack(hijack::Plan),
}

/// Runs a traffic program.
///
/// # Errors
///
/// What it was asked for cannot be done at all. Single failures are counted, not raised.
pub fn perform(traffic: Traffic) -> Result<()> {
    raise_descriptors();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no event loop")?;
    match traffic {
        Traffic::Echo { listen, greeting, backlog, accept_after_ms, accept_every_ms } => {
            let [after, every] = [accept_after_ms, accept_every_ms].map(Duration::from_millis);
            runtime.block_on(echo::serve(&listen, &echo::Plan { greeting, backlog, after, every }))
        }
        Traffic::Flows { host, port, count } => runtime.block_on(flows::hold(&host, port, count)),
        Traffic::Idle { host, port, count } => runtime.block_on(idle::hold(&host, port, count)),
        Traffic::Asking { host, port, count, every_ms, silent: is_silent } => {
            let every = Duration::from_millis(every_ms);
            runtime.block_on(asking::ask(asking::Plan { host, port, count, every, is_silent }))
        }
        Traffic::AskingServer { listen, name } => asking::serve(listen, &name),
        Traffic::Sessions(plan) => runtime.block_on(sessions::keep_talking(plan)),
        Traffic::Pooled(plan) => runtime.block_on(pooled::keep(plan)),
        Traffic::UpgradingServer(plan) => runtime.block_on(upgrading::serve(plan)),
        Traffic::Pingpong { host, port, count, udp } => pingpong::measure(&host, port, count, udp),
        Traffic::Connects { host, port, count, parallel } => connects::measure(&host, port, count, parallel),
        Traffic::Blast { host, port, bytes, time_ms } => {
            datagrams::blast(&host, port, bytes, Duration::from_millis(time_ms))
        }
        Traffic::RouteRate(plan) => route_rate::measure(&plan),
        Traffic::Sink { listen } => datagrams::sink(listen),
        Traffic::Pour(plan) => pour::pour(&plan),
        Traffic::PourSink { listen } => pour::sink(listen),
        Traffic::Numbered(plan) => numbered::send(&plan),
        Traffic::NumberedSink { listen } => numbered::sink(listen),
        Traffic::Frames(plan) => frames::send(&plan),
        Traffic::FrameSink { listen, in_time_ms } => frames::sink(listen, in_time_ms),
        Traffic::Download(plan) => download::run(plan),
        Traffic::Transfer { host, port, ways, first, pace, bytes, mptcp } => {
            transfer::run(transfer::Plan { host, port, ways, first, pace, bytes, mptcp })
        }
        Traffic::TransferServer { listen, mptcp } => transfer::serve(listen, mptcp),
        Traffic::Arrivals { host, port, every_ms, ask, at_most } => {
            let every = Duration::from_millis(every_ms);
            runtime.block_on(arrivals::keep_coming(arrivals::Plan { host, port, every, ask, at_most }))
        }
        Traffic::Fetches { host, port, path, clients } => {
            runtime.block_on(fetches::keep_fetching(&host, port, &path, clients))
        }
        Traffic::Dns { listen, answer, under } => dns::serve(listen, answer, under.as_deref()),
        Traffic::Attempt { plan, count, parallel } => runtime.block_on(attempt::repeat(plan, count, parallel)),
        Traffic::MemcachedSets { to, window, bytes } => memcached::send_sets(memcached::Plan { to, window, bytes }),
        Traffic::CacheChecked(plan) => runtime.block_on(cached::ask(plan)),
        Traffic::MemcachedPaced(plan) => runtime.block_on(paced::ask(plan)),
        Traffic::FramesAsk { name } => runtime.block_on(own_frames::ask(&name)),
        Traffic::FramesServe { name, label } => runtime.block_on(own_frames::serve(&name, &label)),
        Traffic::FramedMutations { name, count } => runtime.block_on(mutated::send(&name, count)),
        Traffic::MemcachedTaken { port, every_ms } => memcached::watch_sets(port, Duration::from_millis(every_ms)),
        Traffic::Urgent { host, port, count } => odd::urgent(&host, port, count),
        Traffic::Closing { host, port, count } => odd::close_together(&host, port, count),
        Traffic::ClosingServer { listen } => odd::serve_closing(listen),
        Traffic::Hostile { target, honest, strangers, count, rate, capture, service, port, fetching } => {
            let plan = hostile::Plan { targets: target, honest, strangers, count, rate, fetching };
            hostile::trouble(&plan, capture.as_deref(), service.as_deref().map(|service| (service, port)))
        }
        Traffic::Strike(plan) => strike::strike(&plan),
        Traffic::Snatch(plan) => runtime.block_on(snatch::snatch(&plan)),
        Traffic::Strange(plan) => stranger::meet(&plan),
        Traffic::Evade(plan) => policy_evader::evade(&plan),
        Traffic::Intrude(plan) => runtime.block_on(intruder::intrude(&plan)),
        Traffic::Crowd(plan) => runtime.block_on(registrants::crowd(&plan)),
        Traffic::Reader { time_ms } => reader::read(Duration::from_millis(time_ms)),
        Traffic::Hijack(plan) => hijack::attack(&plan),
    }
}

/// Ten thousand connections need as many descriptors: as many as the host allows.
fn raise_descriptors() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // Who needs more than there are says so when they run out.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// The first address of a name, as the host's resolver gives it.
async fn resolve(host: &str, port: u16) -> Result<SocketAddr> {
    let mut found = tokio::net::lookup_host((host, port)).await.with_context(|| format!("cannot resolve {host}"))?;
    found.next().with_context(|| format!("{host} has no address"))
}

/// The unspecified address of a family.
fn any_of(family: IpAddr) -> IpAddr {
    if family.is_ipv6() {
        IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED)
    } else {
        IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED)
    }
}
