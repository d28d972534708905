//! Many connections to a memcached that ask at a steady rate: how long answers take at a load that is the same whoever
//! answers.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::host::write_line;
use crate::report::{median, percentile};

/// A request that is not answered after so long has failed.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of each value.
const VALUE_LEN: usize = 100;

/// Whom to ask, and at which pace.
#[derive(Args, Clone, Copy, Debug)]
pub struct Plan {
    /// Where the memcached is
    to: SocketAddr,
    /// How many connections, at least one
    #[arg(long)]
    count: u32,
    /// Requests of all of them together in a second, at least one
    #[arg(long)]
    per_s: u32,
    /// For how long, in seconds
    #[arg(long)]
    seconds: u32,
}

/// What became of the requests.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Paced {
    /// Answers.
    pub answered: u64,
    /// Answers other than the value that was written.
    pub wrong: u64,
    /// Connections that ended, or were not answered in time.
    pub failed: u64,
    /// The middle of the times from request to answer, in microseconds.
    pub median_us: f64,
    /// All but one of a hundred are below.
    pub p99_us: f64,
}

/// What one connection has found.
#[derive(Default)]
struct Asked {
    times_us: Vec<f64>,
    wrong: u64,
}

/// Asks, and prints [`Paced`] as JSON.
pub async fn ask(plan: Plan) -> Result<()> {
    ensure!(plan.count > 0 && plan.per_s > 0, "no connection, or no request");
    let mut connections = JoinSet::new();
    for number in 0..plan.count {
        connections.spawn(timeout_each(plan, number));
    }
    let mut paced = Paced::default();
    let mut times_us = Vec::new();
    while let Some(asked) = connections.join_next().await {
        match asked? {
            Ok(asked) => {
                times_us.extend(asked.times_us);
                paced.wrong += asked.wrong;
            }
            Err(error) => {
                eprintln!("{error:#}");
                paced.failed += 1;
            }
        }
    }
    paced.answered = times_us.len() as u64;
    paced.median_us = median(&times_us);
    paced.p99_us = percentile(&times_us, 99.0);
    write_line(&serde_json::to_string(&paced)?)
}

async fn timeout_each(plan: Plan, number: u32) -> Result<Asked> {
    let limit = Duration::from_secs(plan.seconds.into()) + ANSWER_LIMIT;
    let asked = timeout(limit, ask_on_one(plan, number)).await;
    asked.with_context(|| format!("connection {number}: no answer within {ANSWER_LIMIT:?}"))?
}

async fn ask_on_one(plan: Plan, number: u32) -> Result<Asked> {
    let stream = TcpStream::connect(plan.to).await.with_context(|| format!("cannot connect to {}", plan.to))?;
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    let value: String = format!("{number};").chars().cycle().take(VALUE_LEN).collect();
    let set = format!("set paced:{number} 0 0 {VALUE_LEN}\r\n{value}\r\n");
    let mut line = String::new();
    stream.get_mut().write_all(set.as_bytes()).await?;
    stream.read_line(&mut line).await?;
    ensure!(line == "STORED\r\n", "connection {number} cannot store its value: {line}");
    let get = format!("get paced:{number}\r\n");
    let expected = format!("VALUE paced:{number} 0 {VALUE_LEN}\r\n{value}\r\nEND\r\n");
    let mut answer = vec![0; expected.len()];
    let every = Duration::from_secs(1) * plan.count / plan.per_s;
    // Spread over the time between two requests.
    sleep(every * number / plan.count).await;
    let mut turns = interval(every);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let begun = Instant::now();
    let mut asked = Asked::default();
    while begun.elapsed() < Duration::from_secs(plan.seconds.into()) {
        turns.tick().await;
        let sent = Instant::now();
        stream.get_mut().write_all(get.as_bytes()).await?;
        // One of another length is waited for in vain, and so has failed.
        stream.read_exact(&mut answer).await.with_context(|| format!("connection {number} has ended"))?;
        asked.times_us.push(sent.elapsed().as_secs_f64() * 1e6);
        asked.wrong += u64::from(answer != expected.as_bytes());
    }
    Ok(asked)
}
