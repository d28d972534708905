//! Two ways to do a thing that take turns many times a second: what goes the one stands still while the other is
//! measured, so that what else the machine does meets both alike. Here is iperf3 over two ways to one host. For ratios
//! near one, which runs of seconds one after the other do not tell from chance: on two processors plain TCP against
//! plain TCP was between 0.4 and 3 in such pairs.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use crate::command::progress;
use crate::host::Host;
use crate::iperf::{self, Load, Ratios};
use crate::observe;
use crate::program::{Program, wait_for};
use crate::report::median;
use crate::scenario::Findings;

/// Turns of each way in a round.
const TURNS: usize = 8;
/// Both ways open and grow their windows.
const WARM: Duration = Duration::from_millis(500);
const START_LIMIT: Duration = Duration::from_secs(10);
/// No client runs longer by itself, whatever becomes of us.
const CLIENT_SECONDS: &str = "120";
/// Where the servers listen: plain and by name. An iperf3 server has one client at a time.
pub const PORTS: [u16; 2] = [5201, 5202];

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Rounds, each with connections of its own: what a connection keeps for its life, chance has in it once per round.
    pub rounds: usize,
    /// A turn. Half as much goes before it, in which what the other way left in queues drains.
    pub turn: Duration,
}

/// A host in the comparison: one processor runs its programs, and takes what comes to it, as a NIC's with one queue
/// does.
///
/// Without that, a sender's segments come through the queues of two processors (its own, and that on which its peer's
/// acknowledgements are handled) and overtake each other. TCP takes some of that for loss; a connection to which it
/// happened early has a third of the throughput of another, by chance.
pub struct End<'a> {
    host: &'a Host,
    processor: usize,
}

impl<'a> End<'a> {
    /// Binds what comes to `eth0` of a host to a processor.
    ///
    /// # Errors
    ///
    /// The kernel has no receive packet steering.
    pub fn bind(host: &'a Host, processor: usize) -> Result<Self> {
        let processors = std::thread::available_parallelism().context("the number of processors is not known")?.get();
        let processor = processor % processors;
        // What `/sys` shows is that of the network namespace in which it was mounted.
        let script = format!(
            "unshare -m sh -c 'mount -t sysfs sysfs /sys && echo {:x} > /sys/class/net/eth0/queues/rx-0/rps_cpus'",
            1_u64 << processor
        );
        host.shell(&script)?;
        Ok(Self { host, processor })
    }

    /// Starts both servers. Returns when they listen.
    ///
    /// # Errors
    ///
    /// iperf3 is not installed, or does not listen in time.
    pub fn serve(&self) -> Result<[Program; 2]> {
        let [plain, named] = PORTS.map(|port| self.spawn(&["-s", "-p", &port.to_string()]));
        let programs = [plain?, named?];
        PORTS.iter().try_for_each(|port| iperf::await_listener(self.host, *port))?;
        Ok(programs)
    }

    fn spawn(&self, words: &[&str]) -> Result<Program> {
        let processor = self.processor.to_string();
        self.host.spawn("iperf3", ["taskset", "-c", &processor, "iperf3"].iter().chain(words))
    }

    /// Bytes that came to `eth0`.
    fn received_bytes(&self) -> Result<f64> {
        let path = format!("/proc/{}/net/dev", self.host.holder_pid());
        let table = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let line = table.lines().find_map(|line| line.trim_start().strip_prefix("eth0:"));
        let field = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        field.with_context(|| format!("{path} has no eth0"))
    }
}

/// The two ways.
pub struct Ways<'a> {
    /// Where iperf3's clients run.
    pub client: End<'a>,
    /// Where its servers run.
    pub server: End<'a>,
    /// The server's own address, and the virtual address of its name.
    pub addresses: [&'a str; 2],
}

/// Stops two programs and lets them take turns; both stand still at the end. `first` says who begins, and that
/// alternates. `measure` is called in each turn when half of one is over, and shall take a whole one.
///
/// # Errors
///
/// As `signal` and `measure` have them.
pub fn take(
    signal: impl Fn(usize, Signal) -> Result<()>,
    turn: Duration,
    first: usize,
    mut measure: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    [0, 1].into_iter().try_for_each(|way| signal(way, Signal::SIGSTOP))?;
    for number in first..first + TURNS {
        for way in [number % 2, (number + 1) % 2] {
            signal(way, Signal::SIGCONT)?;
            sleep(turn / 2);
            measure(way)?;
            signal(way, Signal::SIGSTOP)?;
        }
    }
    Ok(())
}

/// What was measured in the turns of one way.
#[derive(Clone, Debug, Default)]
struct Taken {
    gbit_per_s: Vec<f64>,
    bytes: f64,
    busy_s: f64,
}

impl Ways<'_> {
    /// Throughput and processor time by name to plain: medians over the rounds. `what` says in the notes what was
    /// compared.
    ///
    /// # Errors
    ///
    /// iperf3 fails, or carries nothing.
    pub fn compare(&self, load: Load, pace: Pace, what: &str, findings: &mut Findings) -> Result<Ratios> {
        let (mut ratios, mut busy, mut gbit) = (vec![], vec![], [vec![], vec![]]);
        for round in 0..pace.rounds {
            let taken = self.round(load, pace.turn, round)?;
            let [plain, named] = &taken;
            let turns = plain.gbit_per_s.iter().zip(&named.gbit_per_s);
            ratios.push(median(&turns.map(|(plain, named)| named / plain).collect::<Vec<_>>()));
            busy.push(named.busy_s / named.bytes / (plain.busy_s / plain.bytes));
            for (all, taken) in gbit.iter_mut().zip(&taken) {
                all.push(median(&taken.gbit_per_s));
            }
            let [plain, named] = gbit.each_ref().map(|all| all[round]);
            progress(&format!("{what}: plain {plain:.2} Gbit/s, by name {named:.2} Gbit/s"));
        }
        let all: Vec<_> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
        findings.note(format!(
            "{what}: plain {:.2} Gbit/s, by name {:.2} Gbit/s (medians of {} rounds of {TURNS} turns each; ratios {})",
            median(&gbit[0]),
            median(&gbit[1]),
            pace.rounds,
            all.join(" ")
        ));
        Ok(Ratios { throughput: median(&ratios), busy_per_byte: median(&busy) })
    }

    /// Opens connections both ways, and lets them take turns. Which goes first alternates.
    fn round(&self, load: Load, turn: Duration, round: usize) -> Result<[Taken; 2]> {
        let clients = [self.start(0, load)?, self.start(1, load)?];
        sleep(WARM);
        let mut taken = [Taken::default(), Taken::default()];
        let signal = |way: usize, signal| clients[way].signal(signal);
        take(signal, turn, round, |way| self.measure(load, turn, &mut taken[way]))?;
        // One that stands still does not hear that it shall end.
        clients.iter().try_for_each(|client| client.signal(Signal::SIGKILL))?;
        Ok(taken)
    }

    fn measure(&self, load: Load, turn: Duration, taken: &mut Taken) -> Result<()> {
        let receiver = if load.reverse { &self.client } else { &self.server };
        let (bytes, busy, begun) = (receiver.received_bytes()?, observe::machine_busy_seconds()?, Instant::now());
        sleep(turn);
        let bytes = receiver.received_bytes()? - bytes;
        ensure!(bytes > 0.0, "a connection stands still");
        taken.gbit_per_s.push(bytes * 8.0 / begun.elapsed().as_secs_f64() / 1e9);
        taken.busy_s += observe::machine_busy_seconds()? - busy;
        taken.bytes += bytes;
        Ok(())
    }

    /// Starts a client. Returns when it carries data; a server that has not yet let go of its last client refuses the
    /// next.
    fn start(&self, way: usize, load: Load) -> Result<Program> {
        let (port, streams) = (PORTS[way].to_string(), load.streams.to_string());
        let mut words = vec!["-c", self.addresses[way], "-p", &port, "-P", &streams, "-t", CLIENT_SECONDS];
        // Sockets that are told so late keep the pacing of a machine whose own choice is BBR; so both sides are told
        // alike.
        words.extend(["-C", "cubic", "--connect-timeout", "5000"]);
        words.extend(load.reverse.then_some("-R"));
        let mut client = self.client.spawn(&words)?;
        let open = format!("( sport = :{port} )");
        wait_for("iperf3's connections", START_LIMIT, || {
            if client.ended()?.is_some() {
                client = self.client.spawn(&words)?;
            }
            // One more than streams: that over which client and server agree.
            let found = self.server.host.run(["ss", "-Htn", "state", "established", &open])?.lines().count();
            ensure!(found > load.streams as usize, "{found} connections are open");
            Ok(())
        })?;
        Ok(client)
    }
}
