//! Hosts that nobody knows, with keys of their own and the very core that honest hosts have: many that ask one host
//! for a name, each to be kept in its tables; or one that answers for a name that is not its own.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant as Moment};

use anyhow::{Result, anyhow};
use clap::Args;
use margay_control::entropy;
use margay_core::key::HostSecret;
use margay_core::name::{Name, Prefix, ServiceId};
use margay_core::table::{Action, Allow, Demux, NextHop, Rule};
use margay_core::{Config, Input, Limits, Output, Sal};
use margay_datapath::clock;
use margay_wire::{Message, PORT};
use serde_json::json;

use super::forger::{IP_UDP_LEN, envelope};
use crate::host::write_line;

/// What stands for the name at the stranger.
const LEASE: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 1);
const HOST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// Who does not answer for so long does not answer at all.
const PATIENCE: Duration = Duration::from_millis(20);

/// What strangers do.
#[derive(Args, Debug)]
pub struct Plan {
    /// The name
    service: String,
    /// Ask the agent there; without it, answer on this host's own SAL port
    #[arg(long)]
    ask: Option<SocketAddr>,
    /// How many strangers ask
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// For how long
    #[arg(long, default_value_t = 5_000)]
    time_ms: u64,
}

/// Does it. Prints how many messages were answered, and what an honest program gave or took.
///
/// # Errors
///
/// The name is none, or this host has no such address.
pub fn meet(plan: &Plan) -> Result<()> {
    let service = plan.service.parse::<Name>()?.service_id();
    let until = Moment::now() + Duration::from_millis(plan.time_ms);
    match plan.ask {
        Some(server) => ask(service, server, plan.count, until),
        None => answer(service, until),
    }
}

/// Gives what is sent instead of a datagram; `None`: the datagram itself.
pub(super) type Change = Box<dyn Fn(&[u8]) -> Option<Vec<u8>>>;

pub(super) struct Stranger {
    pub sal: Sal,
    pub socket: UdpSocket,
    /// Rewrites what the core sends.
    pub change: Option<Change>,
    out: Vec<u8>,
    /// Messages that this one has sent, and that have come.
    said: u64,
    heard: u64,
    /// Packets of honest programs.
    given: u64,
}

impl Stranger {
    pub fn new(bind: SocketAddr) -> Result<Self> {
        let sal = core_of(HostSecret::generate(&mut entropy::rng()?))?;
        let socket = UdpSocket::bind(bind)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { sal, socket, change: None, out: vec![0; 65_536], said: 0, heard: 0, given: 0 })
    }

    pub fn add_rule(&mut self, service: ServiceId, action: Action) -> Result<()> {
        let rule = Rule { priority: 100, weight: 1, action };
        self.sal.add_rule(clock::now(), Prefix::from(service), rule).map(drop).map_err(|error| anyhow!("{error:?}"))
    }

    /// Takes what has come, and answers it. Gives each message of signalling first.
    pub fn listen(&mut self, mut each: impl FnMut(&Message<'_>)) -> Result<()> {
        let mut datagram = [0; 2048];
        loop {
            match self.socket.recv_from(&mut datagram) {
                Ok((length, from)) => {
                    if let Ok(message) = Message::parse(&datagram[..length]) {
                        each(&message);
                    }
                    // What this one makes of it is its own affair.
                    let _ = self.sal.handle_datagram(clock::now(), None, from, &datagram[..length]);
                    self.say();
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends what there is to say.
    pub fn say(&mut self) {
        self.sal.handle(clock::now(), Input::Timeout);
        while let Some(output) = self.sal.poll(&mut self.out) {
            match output {
                Output::Transmit { to, len, .. } => {
                    let own = &self.out[..len];
                    let changed = self.change.as_ref().and_then(|change| change(own));
                    self.said += u64::from(self.socket.send_to(changed.as_deref().unwrap_or(own), to).is_ok());
                }
                Output::Inject { .. } => self.given += 1,
                _ => {}
            }
        }
        while self.sal.poll_event().is_some() {}
    }

    /// Whether something came.
    fn hear(&mut self) -> Result<bool> {
        let mut datagram = [0; 2048];
        match self.socket.recv_from(&mut datagram) {
            Ok((length, from)) => {
                // What this one makes of it is its own affair.
                let _ = self.sal.handle_datagram(clock::now(), None, from, &datagram[..length]);
                self.heard += 1;
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// The core of a host that has just started, and has this key.
pub(super) fn core_of(host_key: HostSecret) -> Result<Sal> {
    let config = Config {
        host_key,
        epoch: 1,
        boot_id: entropy::rng()?.bytes(),
        router: false,
        datagram_max: 1472,
        local_addresses: Vec::new(),
        ranges: margay_core::Ranges::USUAL,
        limits: Limits::default(),
    };
    Ok(Sal::new(config, clock::now(), unix_s(), entropy::seed()?))
}

fn unix_s() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A stranger and its SYN for a name, which it has not sent: somebody who changes it does.
pub(super) fn syn_of_stranger(service: ServiceId) -> Result<(Stranger, Vec<u8>)> {
    let mut stranger = Stranger::new(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0))?;
    stranger.sal.bind_name(LEASE.into(), service);
    // Nothing is at the discard port.
    let nowhere = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 9);
    stranger.add_rule(service, Action::Forward(NextHop { address: nowhere, host: None, router: false }))?;
    let mut packet = [0; IP_UDP_LEN + 8];
    envelope(&mut packet, SocketAddrV4::new(HOST, 4_000), LEASE, 8);
    stranger.sal.handle_app_packet(clock::now(), &packet);
    while let Some(output) = stranger.sal.poll(&mut stranger.out) {
        if let Output::Transmit { to, len, .. } = output
            && to == nowhere
        {
            let syn = stranger.out[..len].to_vec();
            return Ok((stranger, syn));
        }
    }
    Err(anyhow!("a stranger's core sends no SYN"))
}

/// One more stranger, which has asked a host for a name and has heard what that says.
pub(super) fn introduce(service: ServiceId, server: SocketAddr) -> Result<Stranger> {
    let mut stranger = Stranger::new(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0))?;
    stranger.sal.bind_name(LEASE.into(), service);
    stranger.add_rule(service, Action::Forward(NextHop { address: server, host: None, router: false }))?;
    let mut packet = [0; IP_UDP_LEN + 8];
    envelope(&mut packet, SocketAddrV4::new(HOST, 4_000), LEASE, 8);
    stranger.sal.handle_app_packet(clock::now(), &packet);
    stranger.say();
    // The answer, and what follows where this one was taken for a host that may ask.
    while stranger.hear()? && stranger.heard < 4 {
        stranger.say();
    }
    Ok(stranger)
}

fn ask(service: ServiceId, server: SocketAddr, count: u64, until: Moment) -> Result<()> {
    let (mut met, mut heard) = (0, 0);
    while met < count && Moment::now() < until {
        let stranger = introduce(service, server)?;
        met += 1;
        heard += u64::from(stranger.heard > 0);
    }
    write_line(&json!({"strangers": met, "answered": heard}).to_string())
}

fn answer(service: ServiceId, until: Moment) -> Result<()> {
    let mut stranger = Stranger::new(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), PORT))?;
    let listener = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 9);
    let demux = Demux {
        listener,
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: None,
        allow: Allow::Any,
    };
    stranger.add_rule(service, Action::Demux(demux))?;
    while Moment::now() < until {
        stranger.hear()?;
        stranger.say();
    }
    write_line(&json!({"asked": stranger.heard, "answers": stranger.said, "accepted": stranger.given}).to_string())
}
