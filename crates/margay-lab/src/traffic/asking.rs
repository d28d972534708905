//! Connected UDP sockets that ask for the server's name again and again, or tell it something and want no answer; and
//! the server for them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use crate::host::write_line;
use crate::traffic::{any_of, now_ms, resolve};

/// First word of a datagram that is answered with the server's name; its second one is the socket's number.
const ASK: &str = "ask";
/// First word of one that is not answered.
const TELL: &str = "tell";
/// Longer is no datagram of this program.
const DATAGRAM_MAX: usize = 256;

/// Another server than before answers a socket; or, with the end of the input, none.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Answering {
    /// The socket's number, from zero.
    pub socket: usize,
    /// The server's name; empty at the end.
    pub server: String,
    /// When the last answer of the one before came, as [`now_ms`] has it; none before the first one.
    pub last_ms: Option<f64>,
    /// When the first answer of this one came; or when the end was.
    pub first_ms: f64,
    /// Errors of sending and receiving since the line before.
    pub errors: u64,
}

/// A server has heard a socket that wants no answers, for the first time.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Heard {
    /// The socket's number.
    pub sender: usize,
    /// When that was, as [`now_ms`] has it.
    pub first_ms: f64,
}

/// Whom to ask, and how often.
pub struct Plan {
    /// Server's name or address.
    pub host: String,
    /// Server's port.
    pub port: u16,
    /// How many sockets.
    pub count: usize,
    /// Time between two datagrams of a socket.
    pub every: Duration,
    /// They want no answers.
    pub is_silent: bool,
}

struct Asker {
    socket: UdpSocket,
    number: usize,
    /// Who answers; empty before the first answer.
    server: String,
    last_ms: Option<f64>,
    errors: u64,
}

/// Asks until the input ends, and prints an [`Answering`] as a line of JSON when there is one. An error ends nothing.
pub async fn ask(plan: Plan) -> Result<()> {
    let Plan { host, port, count, every, is_silent } = plan;
    let address = resolve(&host, port).await?;
    let (ending, over) = watch::channel(());
    let start = Instant::now();
    let mut askers = JoinSet::new();
    for number in 0..count {
        let socket = UdpSocket::bind((any_of(address.ip()), 0)).await.context("cannot bind a UDP socket")?;
        socket.connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
        // Spread evenly, not all at once.
        let mut ticks = interval_at(start + every.mul_f64(number as f64 / count as f64), every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let asker = Asker { socket, number, server: String::new(), last_ms: None, errors: 0 };
        askers.spawn(asker.go_on(ticks, is_silent, over.clone()));
    }
    tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await.context("cannot read the input")?;
    drop(ending);
    while let Some(ended) = askers.join_next().await {
        ended.context("a socket's task has broken down")??;
    }
    Ok(())
}

impl Asker {
    async fn go_on(mut self, mut ticks: Interval, is_silent: bool, mut over: watch::Receiver<()>) -> Result<()> {
        let message = format!("{} {}", if is_silent { TELL } else { ASK }, self.number);
        let mut answer = [0; DATAGRAM_MAX];
        loop {
            tokio::select! {
                _ = over.changed() => return self.say("", now_ms()),
                _ = ticks.tick() => {
                    let sent = self.socket.send(message.as_bytes()).await;
                    self.errors += u64::from(sent.is_err());
                }
                received = self.socket.recv(&mut answer), if !is_silent => match received {
                    Ok(length) => self.hear(&String::from_utf8_lossy(&answer[..length]))?,
                    Err(_) => self.errors += 1,
                },
            }
        }
    }

    fn hear(&mut self, server: &str) -> Result<()> {
        let at_ms = now_ms();
        if self.server != server {
            self.say(server, at_ms)?;
            self.server = server.to_owned();
        }
        self.last_ms = Some(at_ms);
        Ok(())
    }

    fn say(&mut self, server: &str, first_ms: f64) -> Result<()> {
        let errors = std::mem::take(&mut self.errors);
        let Self { number, last_ms, .. } = *self;
        let answering = Answering { socket: number, server: server.to_owned(), last_ms, first_ms, errors };
        write_line(&serde_json::to_string(&answering)?)
    }
}

/// Answers with `name` until it is killed. Says "ready" when it listens, and prints a [`Heard`] as a line of JSON for
/// each socket that wants no answers.
pub fn serve(listen: SocketAddr, name: &str) -> Result<()> {
    let socket = std::net::UdpSocket::bind(listen).with_context(|| format!("cannot bind {listen}"))?;
    write_line("ready")?;
    let mut senders = BTreeSet::new();
    let mut datagram = [0; DATAGRAM_MAX];
    loop {
        // An ICMP error about an earlier answer may come back here; the next datagram has nothing to do with it.
        let Ok((length, from)) = socket.recv_from(&mut datagram) else { continue };
        let text = String::from_utf8_lossy(&datagram[..length]);
        let Some((word, number)) = text.split_once(' ') else { continue };
        let Ok(number) = number.parse::<usize>() else { continue };
        if word == ASK {
            // A lost answer is asked for again.
            let _ = socket.send_to(name.as_bytes(), from);
        } else if word == TELL && senders.insert(number) {
            write_line(&serde_json::to_string(&Heard { sender: number, first_ms: now_ms() })?)?;
        }
    }
}
