//! Connections one after the other, with what became of each.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpSocket, UdpSocket};
use tokio::sync::Semaphore;

use crate::host::write_line;
use crate::pump::Dice;
use crate::traffic::{any_of, echo, resolve};

/// What to attempt.
#[derive(Args, Debug)]
pub struct Plan {
    /// Server's name or address
    pub host: String,
    /// Server's port
    pub port: u16,
    /// Use UDP
    #[arg(long)]
    pub udp: bool,
    /// Bytes to exchange
    #[arg(long, default_value_t = 64)]
    pub bytes: usize,
    /// Source address and port
    #[arg(long)]
    pub from: Option<SocketAddr>,
    /// When an attempt counts as failed
    #[arg(long, default_value_t = 5_000)]
    pub timeout_ms: u64,
    /// Pause after each attempt
    #[arg(long, default_value_t = 0)]
    pub pause_ms: u64,
    /// Send a datagram again after this time without an answer; 0: never
    #[arg(long, default_value_t = 0)]
    pub resend_ms: u64,
    /// Bytes to exchange in the second half of the rounds
    #[arg(long)]
    pub then_bytes: Option<usize>,
    /// How often each connection exchanges the bytes
    #[arg(long, default_value_t = 1)]
    pub rounds: usize,
    /// Before this exchange, counted from zero, wait until the input ends
    #[arg(long)]
    pub wait_before: Option<usize>,
    /// Pause between two exchanges
    #[arg(long, default_value_t = 0)]
    pub round_pause_ms: u64,
    /// Largest segment of a connection; 0: as the kernel has it
    #[arg(long, default_value_t = 0)]
    pub mss: u32,
}

impl Plan {
    fn bytes_of(&self, round: usize) -> usize {
        let is_second_half = round >= self.rounds / 2;
        self.then_bytes.filter(|_| is_second_half).unwrap_or(self.bytes)
    }

    async fn pause_before(&self, round: usize) -> Result<()> {
        if round > 0 {
            tokio::time::sleep(Duration::from_millis(self.round_pause_ms)).await;
        }
        if self.wait_before == Some(round) {
            tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await.context("cannot read the input")?;
        }
        Ok(())
    }
}

/// What became of the attempts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// All bytes came back.
    pub ok: u64,
    /// Reasons of the others.
    pub errors: BTreeMap<String, u64>,
    /// How long the successful ones took, in milliseconds.
    pub ok_ms: Vec<f64>,
    /// How long the others took.
    pub error_ms: Vec<f64>,
    /// Datagrams that were sent again, and that sent again was answered before them.
    pub lost: u64,
}

impl Outcome {
    /// How many did not succeed.
    pub fn failed(&self) -> u64 {
        self.errors.values().sum()
    }

    pub(super) fn add(&mut self, result: &Result<()>, took_ms: f64) {
        match result {
            Ok(()) => {
                self.ok += 1;
                self.ok_ms.push(took_ms);
            }
            Err(error) => {
                *self.errors.entry(error.root_cause().to_string()).or_default() += 1;
                self.error_ms.push(took_ms);
            }
        }
    }
}

/// Prints an [`Outcome`] as JSON.
pub async fn repeat(plan: Plan, count: usize, parallel: usize) -> Result<()> {
    let plan = Arc::new(plan);
    let outcome = Arc::new(Mutex::new(Outcome::default()));
    let slots = Arc::new(Semaphore::new(parallel.max(1)));
    for number in 0..count {
        let (slot, plan, outcome) = (slots.clone().acquire_owned().await?, plan.clone(), outcome.clone());
        tokio::spawn(async move {
            let start = Instant::now();
            let limit = Duration::from_millis(plan.timeout_ms);
            let lost = AtomicU64::new(0);
            let result = match tokio::time::timeout(limit, attempt(&plan, number, &lost)).await {
                Ok(result) => result,
                Err(_) => Err(anyhow::anyhow!("timed out")),
            };
            let took_ms = start.elapsed().as_secs_f64() * 1e3;
            {
                // A panic elsewhere does not make the counts wrong.
                let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
                outcome.add(&result, took_ms);
                outcome.lost += lost.into_inner();
            }
            tokio::time::sleep(Duration::from_millis(plan.pause_ms)).await;
            drop(slot);
        });
    }
    let all = slots.acquire_many(u32::try_from(parallel.max(1))?).await?;
    drop(all);
    let outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
    write_line(&serde_json::to_string(&*outcome)?)
}

async fn attempt(plan: &Plan, number: usize, lost: &AtomicU64) -> Result<()> {
    let to = resolve(&plan.host, plan.port).await?;
    let mut dice = Dice::new(number as u64 + 1);
    let bytes = plan.bytes.max(plan.then_bytes.unwrap_or_default());
    let message: Vec<u8> = (0..bytes).map(|_| dice.roll() as u8).collect();
    if plan.udp { datagram(plan, to, message, lost).await } else { connection(plan, to, &message).await }
}

async fn connection(plan: &Plan, to: SocketAddr, message: &[u8]) -> Result<()> {
    let socket = if to.is_ipv6() { TcpSocket::new_v6()? } else { TcpSocket::new_v4()? };
    if let Some(from) = plan.from {
        socket.set_reuseaddr(true)?;
        socket.bind(from).with_context(|| format!("cannot bind {from}"))?;
    }
    if plan.mss > 0 {
        SockRef::from(&socket).set_tcp_mss(plan.mss).context("cannot set the segment size")?;
    }
    let mut stream = socket.connect(to).await?;
    for round in 0..plan.rounds.max(1) {
        plan.pause_before(round).await?;
        if !echo::exchange(&mut stream, &message[..plan.bytes_of(round)]).await? {
            bail!("wrong bytes came back");
        }
    }
    // The port may be wanted again at once: no TIME-WAIT, and a close that the other side sees.
    Ok(())
}

async fn datagram(plan: &Plan, to: SocketAddr, mut message: Vec<u8>, lost: &AtomicU64) -> Result<()> {
    let socket = Socket::new(Domain::for_address(to), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    let from = plan.from.unwrap_or_else(|| SocketAddr::new(any_of(to.ip()), 0));
    socket.bind(&from.into()).with_context(|| format!("cannot bind {from}"))?;
    let socket = UdpSocket::from_std(socket.into())?;
    socket.connect(to).await?;
    for round in 0..plan.rounds.max(1) {
        plan.pause_before(round).await?;
        exchange_datagram(plan, &socket, round as u32, &mut message[..plan.bytes_of(round)], lost).await?;
    }
    Ok(())
}

async fn exchange_datagram(
    plan: &Plan,
    socket: &UdpSocket,
    round: u32,
    message: &mut [u8],
    lost: &AtomicU64,
) -> Result<()> {
    let patience = Duration::from_millis(if plan.resend_ms == 0 { plan.timeout_ms } else { plan.resend_ms });
    for time in 0.. {
        number(message, round, time);
        socket.send(message).await?;
        // Whoever starts the attempt ends it when all of its time is over.
        if let Ok(answered) = tokio::time::timeout(patience, answer(socket, round, time, message)).await {
            lost.fetch_add(answered?.into(), Ordering::Relaxed);
            break;
        }
    }
    Ok(())
}

/// Says in its first bytes which exchange a message is of, and how often it was sent before: as far as there is room
/// for it.
fn number(message: &mut [u8], round: u32, time: u32) {
    let numbers = [round.to_be_bytes(), time.to_be_bytes()];
    message.iter_mut().zip(numbers.into_iter().flatten()).for_each(|(byte, number)| *byte = number);
}

/// Waits for an answer to a message that was sent up to `last` times again, and gives to which time it is the answer.
/// Answers of earlier rounds, which did not wait for them, are not meant.
async fn answer(socket: &UdpSocket, round: u32, last: u32, message: &mut [u8]) -> Result<u32> {
    let mut back = vec![0; message.len() + 1];
    loop {
        let length = socket.recv(&mut back).await?;
        let back = &back[..length];
        for time in 0..=last {
            number(message, round, time);
            if *back == *message {
                return Ok(time);
            }
        }
        if back.first_chunk().is_none_or(|of| u32::from_be_bytes(*of) >= round) {
            bail!("wrong bytes came back");
        }
    }
}
