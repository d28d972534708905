//! Two servers of one name on two hosts that give each other their connections ([`crate::upgrading`]).

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use crate::agent;
use crate::host::Host;
use crate::traffic::Step;
use crate::upgrading::Serving;

/// The name.
pub const SERVICE: &str = "web.shop";
/// Its port, at both servers.
pub const PORT: u16 = 81;
/// Hosts of the servers.
pub const HOSTS: [&str; 2] = ["one", "two"];
/// Both families.
const LISTEN: &str = "[::]:81";
/// Until all connections of a server have gone.
const MOVE_LIMIT: Duration = Duration::from_secs(120);
/// Of what a server says about connections that have not gone: the first few tell as much as all of them.
const TOLD_MAX: usize = 3;

/// What has become of the connections that a server was told to give.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Given {
    /// Connections that the other server has now.
    pub moved: usize,
    /// Those that stay.
    pub kept: usize,
    /// How long all of it took.
    pub took_ms: f64,
}

/// Both servers, by their number in [`HOSTS`].
pub struct Twins {
    serving: [Serving; 2],
    /// How often each was told to give what it has.
    told: [usize; 2],
    /// How often each has begun to take over the name.
    begun: [usize; 2],
}

impl Twins {
    /// Starts and publishes both, on hosts with the names of [`HOSTS`].
    ///
    /// # Errors
    ///
    /// A server does not start, or an agent refuses.
    pub fn start(hosts: [&Host; 2]) -> Result<Self> {
        Self::start_for(hosts, &[])
    }

    /// The same, for clients that these words of `margay service publish` admit.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub fn start_for(hosts: [&Host; 2], allow: &[&str]) -> Result<Self> {
        let serving = [serve(hosts[0], HOSTS[1], allow)?, serve(hosts[1], HOSTS[0], allow)?];
        Ok(Self { serving, told: [0, 0], begun: [1, 1] })
    }

    /// Tells a server to give its connections to the other one.
    ///
    /// # Errors
    ///
    /// It has ended.
    pub fn tell(&mut self, from: usize) -> Result<()> {
        self.told[from] += 1;
        self.serving[from].program.signal(Signal::SIGUSR1)
    }

    /// Waits until a server has done all that it was told.
    ///
    /// # Errors
    ///
    /// It does not end with that in time; the message has what it said.
    pub fn await_given(&mut self, from: usize) -> Result<Given> {
        let times = self.told[from];
        let serving = &mut self.serving[from];
        serving.await_step_for(MOVE_LIMIT, "a server that has given its connections away", times, |step| {
            matches!(step, Step::Moved { .. })
        })?;
        let last = serving.steps().into_iter().rev().find_map(|step| match step {
            Step::Moved { moved, kept, took_ms } => Some(Given { moved, kept, took_ms }),
            _ => None,
        });
        last.context("it has not said what it has given")
    }

    /// Tells a server to give its connections to the other one, and waits until it has.
    ///
    /// # Errors
    ///
    /// As for [`tell`](Self::tell) and [`await_given`](Self::await_given).
    pub fn order(&mut self, from: usize) -> Result<Given> {
        self.tell(from)?;
        self.await_given(from)
    }

    /// Why connections of a server have not gone: what it said first, since its start.
    pub fn not_given(&self, from: usize) -> Vec<Step> {
        let is_failure = |step: &Step| matches!(step, Step::Keeps { .. } | Step::Loses { .. });
        self.serving[from].steps().into_iter().filter(is_failure).take(TOLD_MAX).collect()
    }

    /// Lets a server whose agent has been started again take over the name as before.
    ///
    /// # Errors
    ///
    /// It does not begin with that.
    pub fn take_again(&mut self, at: usize) -> Result<()> {
        self.begun[at] += 1;
        let times = self.begun[at];
        let serving = &mut self.serving[at];
        serving.program.signal(Signal::SIGUSR2)?;
        serving.await_step("a server that takes connections again", times, |step| *step == Step::Takes)
    }
}

fn serve(host: &Host, twin: &str, allow: &[&str]) -> Result<Serving> {
    let options = ["--listen", LISTEN, "--take-over", "--give-to", twin];
    let mut serving = Serving::start(host, SERVICE, host.name(), &options)?;
    serving.await_step("a server", 1, |step| *step == Step::Takes)?;
    agent::publish(host, SERVICE, LISTEN, allow)?;
    Ok(serving)
}

/// Sockets of connections that a server's host has, in the words of `ss`: open, or not quite closed. Those of programs
/// that have ended are among them.
///
/// # Errors
///
/// `ss` refuses.
pub fn sockets(host: &Host) -> Result<Vec<String>> {
    let text = host.run(["ss", "-Htan", "sport", "=", &format!(":{PORT}")])?;
    Ok(text.lines().filter(|line| is_of_connection(line)).map(str::to_owned).collect())
}

/// How many connections are established at a server's host.
///
/// # Errors
///
/// As for [`sockets`].
pub fn established(host: &Host) -> Result<usize> {
    Ok(sockets(host)?.iter().filter(|line| line.starts_with("ESTAB")).count())
}

/// The established connections of a server's host: its own address and the peer's.
///
/// # Errors
///
/// As for [`sockets`].
pub fn connections(host: &Host) -> Result<Vec<(SocketAddr, SocketAddr)>> {
    let lines = sockets(host)?;
    Ok(lines.iter().filter_map(|line| connection(line)).collect())
}

/// The addresses of an established connection. A socket of both families has IPv4 addresses mapped.
fn connection(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let mut words = line.split_whitespace();
    (words.next()? == "ESTAB").then_some(())?;
    let address =
        |word: &str| word.parse::<SocketAddr>().ok().map(|at| SocketAddr::new(at.ip().to_canonical(), at.port()));
    Some((address(words.nth(2)?)?, address(words.next()?)?))
}

fn is_of_connection(line: &str) -> bool {
    !matches!(line.split_whitespace().next(), None | Some("LISTEN" | "TIME-WAIT"))
}

#[cfg(test)]
mod tests {
    use super::{connection, is_of_connection};

    #[test]
    fn addresses_of_connections_are_read_without_their_mapping() {
        let both = connection("ESTAB 0 0 [::ffff:198.18.0.1]:81 [::ffff:198.18.1.1]:40000");
        assert_eq!(both, connection("ESTAB 0 0 198.18.0.1:81 198.18.1.1:40000"));
        assert!(both.is_some() && connection("FIN-WAIT-1 0 1 198.18.0.1:81 198.18.1.1:40000").is_none());
    }

    #[test]
    fn sockets_that_listen_or_only_rest_are_no_connections() {
        assert!(is_of_connection("ESTAB 0 0 198.18.0.1:81 198.18.1.1:40000"));
        assert!(is_of_connection("FIN-WAIT-1 0 1 198.18.0.1:81 198.18.1.1:40000"));
        assert!(!is_of_connection("LISTEN 0 4096 *:81 *:*"));
        assert!(!is_of_connection("TIME-WAIT 0 0 198.18.0.1:81 198.18.1.1:40000"));
        assert!(!is_of_connection(""));
    }
}
