//! Connections that begin at even times, whatever becomes of those before, unless too many of them are open: to a
//! server that says its name, asked or not.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
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
    /// The server's name, or the whole answer with the name in it; empty where none came.
    pub answered: String,
    /// Why none came.
    pub error: String,
}

/// Milliseconds since 1970: the clock that all processes of a lab share.
pub fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e3
}

/// What to connect to, and how often.
pub struct Plan {
    /// Server's name or address.
    pub host: String,
    /// Server's port.
    pub port: u16,
    /// Time between two.
    pub every: Duration,
    /// What to say first, to a server that says nothing by itself.
    pub ask: Option<String>,
    /// So many at once.
    pub at_most: u32,
}

/// Begins a connection every so often, until the input ends; prints an [`Arrival`] as a line of JSON when one has
/// ended.
pub async fn keep_coming(plan: Plan) -> Result<()> {
    let Plan { host, port, every, ask, at_most } = plan;
    let places = Arc::new(Semaphore::new(at_most as usize));
    let ask = ask.map(|ask| ask.replace("\\r\\n", "\r\n"));
    let mut ticks = interval(every);
    // A machine that was late does not begin many at once.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut over = tokio::spawn(async { tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await });
    for number in 0.. {
        tokio::select! {
            _ = &mut over => break,
            _ = ticks.tick() => {}
        }
        let place = places.clone().acquire_owned().await?;
        let (host, ask) = (host.clone(), ask.clone());
        tokio::spawn(async move {
            let (begun_ms, start) = (now_ms(), Instant::now());
            let greeted = timeout(PATIENCE, greeting(&host, port, ask.as_deref())).await;
            let greeted = greeted.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer in {PATIENCE:?}")));
            let took_ms = start.elapsed().as_secs_f64() * 1e3;
            let (answered, error) = match greeted {
                Ok(answered) => (answered, String::new()),
                Err(error) => (String::new(), format!("{error:#}")),
            };
            drop(place);
            write_line(&serde_json::to_string(&Arrival { number, begun_ms, took_ms, answered, error })?)
        });
    }
    // What has begun may end.
    places.acquire_many(at_most).await.map(drop)?;
    Ok(())
}

async fn greeting(host: &str, port: u16, ask: Option<&str>) -> Result<String> {
    let mut stream = TcpStream::connect(resolve(host, port).await?).await.context("cannot connect")?;
    if let Some(ask) = ask {
        stream.write_all(ask.as_bytes()).await.context("cannot ask")?;
        return whole_answer(stream).await;
    }
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).await.context("no greeting")?;
    Ok(line.trim().to_owned())
}

/// Until the server closes. memcached's answer ends with a line instead.
async fn whole_answer(mut stream: TcpStream) -> Result<String> {
    let mut answer = Vec::new();
    while stream.read_buf(&mut answer).await.context("no answer")? > 0 && !answer.ends_with(b"END\r\n") {}
    Ok(String::from_utf8_lossy(&answer).trim().to_owned())
}
