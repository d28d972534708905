//! Long connections while addresses change, links go down, agents die and translators forget, in every order, from
//! seeds. After the last of it both ends of every connection find each other again within a bounded time, and say that
//! they have.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::time::Duration;

use margay_core::table::{Action, NextHop, Rule};
use margay_core::{AssociationInfo, FlowInfo, Instant, Lifecycle, Moving, Passage};

use crate::network::TimeOuts;
use crate::stream::{Plan, State};
use crate::world::service;
use crate::{HostId, Weather, World};

const SECOND: Duration = Duration::from_secs(1);
/// A little, for ever.
const TALK: Plan = Plan { write: 200, every: Duration::from_millis(200), writes: u32::MAX, closes: false };
/// Within this time after the last disturbance all is well again: a translator that has forgotten a host whose programs
/// say nothing is noticed by the next keep-alive, and a connection's own timer may have backed off.
const QUIET: Duration = Duration::from_secs(40);
/// Then nothing is lost any more, and what waits for a timer has its time.
const CALM: Duration = Duration::from_secs(8);
/// In this time every connection gets something done, both ways.
const SPAN: Duration = Duration::from_secs(4);

/// What happens to a host.
#[derive(Clone, Copy, Debug)]
enum Blow {
    /// It has another address.
    Move,
    /// It has none for a while.
    LinkDown(Duration),
    /// Its packets are lost for a while, and nobody tells it.
    Silence(Duration),
    /// Its agent is killed, and started again after a while.
    Restart(Duration),
    /// The translators start again.
    Translators,
}

/// What ends later.
#[derive(Clone, Copy, Debug)]
enum End {
    Link(HostId),
    Silence(HostId),
    Agent(HostId),
    /// The stream between a host and the router, which has broken.
    Stream(HostId),
}

/// A router, a server and a client that has connections.
struct Unrest {
    world: World,
    router: HostId,
    server: HostId,
    client: HostId,
    /// The client's end of each connection.
    streams: Vec<usize>,
    /// What ends, and when.
    ends: Vec<(Instant, End)>,
    /// Addresses of hosts whose links are down.
    down: [Option<Vec<IpAddr>>; 3],
    silent: [bool; 3],
    /// The next address of each, and whether a translator is before it.
    next: [u8; 3],
    translated: [Option<IpAddr>; 3],
    guarded: [bool; 3],
    log: String,
}

impl Unrest {
    fn new(seed: u64) -> Self {
        let mut world = World::new(seed, Weather::FAIR);
        let router = world.add_host(true);
        let (server, client) = (world.add_host(false), world.add_host(false));
        let mut pick = |below: u32| world.random() % below;
        let (kind, takes_direct, direct, loss) =
            (pick(6), pick(2) == 0, pick(3) != 0, [0, 0, 10, 100][pick(4) as usize]);
        let forgets = pick(2) == 0;
        let delay = Duration::from_millis(1 + u64::from(pick(30)));
        let public = |n: u8| IpAddr::from([192, 0, 2, n]);
        let translated = match kind {
            0 => [None; 3],
            1 | 2 => [None, None, Some(public(7))],
            3 => [None, Some(public(6)), Some(public(7))],
            _ => [None; 3],
        };
        let guarded = [false, kind == 4, kind >= 4];
        if forgets {
            world.network.time_outs = TimeOuts { datagrams: 30 * SECOND, direct: 300 * SECOND };
        }
        world.network.weather =
            Weather { delay_min: delay, delay_max: delay * 2, loss_per_mille: loss, ..Weather::FAIR };
        let (streams, ends, down, silent, next) = (Vec::new(), Vec::new(), [const { None }; 3], [false; 3], [10; 3]);
        let mut log = format!("translated {translated:?}, guarded {guarded:?}, forgets {forgets}, ");
        log += &format!("take direct {takes_direct}, direct {direct}, loss {loss}, delay {delay:?}\n");
        let mut this =
            Self { world, router, server, client, streams, ends, down, silent, next, translated, guarded, log };
        for host in [server, client] {
            let address = this.fresh_address(host);
            this.world.set_addresses(host, vec![address]);
            this.world.register(router, host);
            this.world.set_direct(host, direct);
        }
        if takes_direct {
            (6..8).for_each(|n| this.world.network.translate_direct(public(n)));
        }
        this.world.run_for(SECOND);
        this.publish("talk.shop");
        for _ in 0..2 {
            this.streams.push(this.world.connect_stream(client, "talk.shop", TALK));
            this.world.run_for(3 * SECOND);
        }
        this
    }

    /// First packets go to where the router sees the server.
    fn publish(&mut self, name: &str) {
        let service = service(name);
        let host = self.world.host(self.server).sal.host();
        self.world.host(self.server).serve_streams(service, 81, TALK);
        let sal = &mut self.world.host(self.router).sal;
        let seen = sal.paths().iter().find(|path| path.host == host).map(|path| path.remote);
        let hop = NextHop { address: seen.expect("it is registered"), host: Some(host), router: false };
        let rule = Rule { priority: 100, weight: 1, action: Action::Forward(hop) };
        sal.add_rule(Instant::ZERO, service.into(), rule).expect("an empty table has room");
    }

    fn pick(&mut self, below: u32) -> u32 {
        self.world.random() % below
    }

    fn fresh_address(&mut self, host: HostId) -> IpAddr {
        let n = &mut self.next[host.0];
        *n += 1;
        let address = IpAddr::from([10, 8, host.0 as u8, *n]);
        if let Some(public) = self.translated[host.0] {
            self.world.network.put_behind_nat(address, public);
        }
        if self.guarded[host.0] {
            self.world.network.put_behind_firewall(address);
            self.world.network.guard(address);
        }
        address
    }

    fn say(&mut self, what: &str) {
        // A String takes all.
        let _ = writeln!(self.log, "{:?} {what}", self.world.now);
    }

    fn later(&mut self, after: Duration, end: End) {
        self.ends.push((self.world.now + after, end));
        self.ends.sort_by_key(|(at, _)| *at);
    }

    /// Lets time pass, with what ends meanwhile.
    fn run_for(&mut self, time: Duration) {
        let until = self.world.now + time;
        while let Some((at, end)) = self.ends.first().copied().filter(|(at, _)| *at <= until) {
            self.ends.remove(0);
            self.world.run_until(at);
            self.end(end);
        }
        self.world.run_until(until);
    }

    fn end(&mut self, end: End) {
        self.say(&format!("{end:?}"));
        match end {
            End::Link(host) => {
                if let Some(addresses) = self.down[host.0].take() {
                    self.world.set_addresses(host, addresses);
                    self.break_stream(host);
                }
            }
            End::Silence(host) => {
                self.silent[host.0] = false;
                self.follow_silence();
            }
            End::Agent(host) if !self.world.host(host).has_agent() => {
                self.world.start_agent(host);
                self.break_stream(host);
            }
            End::Agent(_) => {}
            End::Stream(host) => {
                if !self.world.register_again(self.router, host) {
                    self.later(SECOND, End::Stream(host));
                }
            }
        }
    }

    fn break_stream(&mut self, host: HostId) {
        let hosts = if host == self.router { vec![self.server, self.client] } else { vec![host] };
        for host in hosts {
            let after = Duration::from_millis(100 + u64::from(self.pick(1500)));
            self.later(after, End::Stream(host));
        }
    }

    fn follow_silence(&mut self) {
        let silent = [0, 1, 2].map(|n| self.silent[n].then(|| self.world.hosts[n].addresses.clone()));
        let lost: Vec<IpAddr> = silent.into_iter().flatten().flatten().collect();
        self.world.network.losing =
            Some(Box::new(move |packet| lost.contains(&packet.from.ip()) || lost.contains(&packet.to.ip())));
    }

    fn strike(&mut self, host: HostId, blow: Blow) {
        self.say(&format!("{host:?} {blow:?}"));
        match blow {
            Blow::Move => {
                let address = self.fresh_address(host);
                match &mut self.down[host.0] {
                    Some(addresses) => *addresses = vec![address],
                    None => {
                        let old = self.world.host(host).addresses.clone();
                        if self.pick(3) == 0 {
                            // The new one comes before the old one goes.
                            self.world.set_addresses(host, [vec![address], old].concat());
                            let pause = Duration::from_millis(u64::from(self.pick(300)));
                            self.world.run_for(pause);
                        }
                        self.world.set_addresses(host, vec![address]);
                        self.break_stream(host);
                    }
                }
                self.follow_silence();
            }
            Blow::LinkDown(time) => {
                if self.down[host.0].is_none() {
                    self.down[host.0] = Some(self.world.host(host).addresses.clone());
                    self.world.set_addresses(host, Vec::new());
                    self.later(time, End::Link(host));
                }
            }
            Blow::Silence(time) => {
                self.silent[host.0] = true;
                self.follow_silence();
                self.later(time, End::Silence(host));
            }
            Blow::Restart(time) => {
                if self.world.host(host).has_agent() {
                    self.world.kill_agent(host);
                    self.later(time, End::Agent(host));
                }
            }
            Blow::Translators => self.world.network.restart_nats(),
        }
    }

    fn random_blow(&mut self) {
        let kind = self.pick(16);
        let time = Duration::from_millis(u64::from(self.pick(4000)));
        let host = [self.client, self.server, self.client, self.server, self.router][self.pick(5) as usize];
        let blow = match kind {
            // The router keeps its address: a host knows no other.
            0..6 if host != self.router => Blow::Move,
            0..6 => Blow::Restart(time),
            6..9 => Blow::LinkDown(time),
            9..11 => Blow::Silence(time),
            11..15 => Blow::Restart(time),
            _ => Blow::Translators,
        };
        self.strike(host, blow);
    }

    fn flows(&mut self, host: HostId) -> Vec<FlowInfo> {
        self.world.host(host).sal.flows().collect()
    }

    fn progress(&mut self) -> Vec<u64> {
        let ends = [self.client, self.server];
        ends.iter().flat_map(|host| self.world.hosts[host.0].streams.iter().map(|stream| stream.received)).collect()
    }

    /// Everything is as it was before.
    fn check(&mut self) -> Result<(), String> {
        let before = self.progress();
        self.run_for(SPAN);
        let after = self.progress();
        for host in [self.client, self.server] {
            for (at, stream) in self.world.hosts[host.0].streams.iter().enumerate() {
                if stream.state != State::Open || stream.was_reset || stream.was_wrong {
                    return Err(format!(
                        "{host:?}, connection {at}: {:?}, reset {}, wrong {}",
                        stream.state, stream.was_reset, stream.was_wrong
                    ));
                }
            }
        }
        if before.len() != 2 * self.streams.len() || before.iter().zip(&after).any(|(before, after)| before == after) {
            return Err(format!("nothing comes: {before:?} {after:?}"));
        }
        for host in [self.client, self.server] {
            for flow in self.flows(host) {
                if flow.lifecycle != Lifecycle::Established || flow.trouble.is_some() {
                    return Err(format!("{host:?} says {:?} {:?}", flow.lifecycle, flow.trouble));
                }
            }
            let other = if host == self.client { self.server } else { self.client };
            let other = self.world.host(other).sal.host();
            let is_well = |path: &AssociationInfo| {
                path.moving == Moving::Settled && path.trouble.is_none() && path.passage == Passage::Open
            };
            if let Some(path) =
                self.world.host(host).sal.paths().iter().find(|path| path.host == other && !is_well(path))
            {
                return Err(format!("{host:?} says {path:?}"));
            }
        }
        Ok(())
    }

    /// What both ends think, for whoever looks for the fault.
    fn describe(&mut self) -> String {
        let mut text = std::mem::take(&mut self.log);
        for host in [self.router, self.client, self.server] {
            let host = self.world.host(host);
            let _ = writeln!(text, "== {:?} at {:?}", host.sal.host(), host.addresses);
            host.sal.paths().iter().for_each(|path| text += &format!("{path:?}\n"));
            host.sal.flows().for_each(|flow| text += &format!("{flow:?}\n"));
            let from = host.events.len().saturating_sub(12);
            host.events[from..].iter().for_each(|event| text += &format!("  {event:?}\n"));
        }
        text
    }
}

/// One world.
///
/// # Errors
///
/// What does not hold, what was done before, and what both ends think.
pub fn run(seed: u64) -> Result<(), String> {
    let mut unrest = Unrest::new(seed);
    unrest.check().map_err(|why| format!("before anything has happened: {why}\n{}", unrest.describe()))?;
    for _ in 0..1 + unrest.pick(10) {
        unrest.random_blow();
        let pause = match unrest.pick(3) {
            0 => unrest.pick(200),
            1 => unrest.pick(1500),
            _ => 2000 + unrest.pick(3000),
        };
        unrest.run_for(Duration::from_millis(pause.into()));
    }
    // What has an end ends.
    unrest.run_for(6 * SECOND);
    unrest.say("quiet");
    unrest.run_for(QUIET);
    // Where one packet of ten is lost a connection may wait for its timer at any time.
    unrest.world.network.weather.loss_per_mille = 0;
    unrest.run_for(CALM);
    unrest.check().map_err(|why| format!("{why}\n{}", unrest.describe()))
}
