//! Connections that begin at even times, whatever becomes of those before: to a server that greets with its name.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::host::write_line;
use crate::traffic::resolve;

const PATIENCE: Duration = Duration::from_secs(10);

/// One connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Arrival {
    /// Its number, from zero.
    pub number: u64,
    /// When it began, as [`now_ms`] has it.
    pub begun_ms: f64,
    /// How long it took until the server's name had come, with the look-up of the service's.
    pub took_ms: f64,
    /// The server's name; empty where none came.
    pub answered: String,
    /// Why none came.
    pub error: String,
}

/// Milliseconds since 1970: the clock that all processes of a lab share.
pub fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e3
}

/// Begins a connection every so often, for ever; prints an [`Arrival`] as a line of JSON when one has ended.
pub async fn keep_coming(host: String, port: u16, every: Duration) -> Result<()> {
    let mut ticks = interval(every);
    // A machine that was late does not begin many at once.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 0.. {
        ticks.tick().await;
        let host = host.clone();
        tokio::spawn(async move {
            let (begun_ms, start) = (now_ms(), Instant::now());
            let greeted = timeout(PATIENCE, greeting(&host, port)).await;
            let greeted = greeted.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer in {PATIENCE:?}")));
            let took_ms = start.elapsed().as_secs_f64() * 1e3;
            let (answered, error) = match greeted {
                Ok(answered) => (answered, String::new()),
                Err(error) => (String::new(), format!("{error:#}")),
            };
            write_line(&serde_json::to_string(&Arrival { number, begun_ms, took_ms, answered, error })?)
        });
    }
    Ok(())
}

async fn greeting(host: &str, port: u16) -> Result<String> {
    let stream = TcpStream::connect(resolve(host, port).await?).await.context("cannot connect")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).await.context("no greeting")?;
    Ok(line.trim().to_owned())
}
